"""Tiles chosen from shapes and device facts."""

import functools

import hypothesis
import hypothesis.strategies as st
import pytest

from pallas_kernels.tuning import fourbit, moe_heuristics
from pallas_kernels.tuning.heuristics import even_shares, matmul_tile, shared_memory, step_of_k
from tests.pallas_kernels.fourbit_cases import LONG

BYTES = {"fp8": (1, 1), "int8": (1, 1), "w8a16": (2, 1), "16bit": (2, 2), "32bit": (4, 4)}

INT4 = fourbit.Kind(operand="bfloat16", words=1, codes="int4")
MXFP4 = fourbit.Kind(operand="bfloat16", words=1, codes="e2m1")
MXFP4_A8 = fourbit.Kind(operand="e4m3", words=1, codes="e2m1")


@pytest.mark.parametrize(
    "cell, limit, step",
    [
        (None, 128, 128),
        (128, 128, 128),
        (64, 128, 64),
        (32, 128, 32),
        (192, 128, 64),  # 64 divides it
        (48, 128, 64),  # 16 divides it, below the least: one masked step
        (200, 128, 128),  # 8 divides it: two masked steps
        (16, 128, 32),
        (256, 128, 128),
    ],
)
def test_step_of_k(cell, limit, step):
    assert step_of_k(cell, limit) == step


@hypothesis.given(
    m=st.integers(1, 100_000),
    n=st.integers(1, 100_000),
    k=st.integers(1, 100_000),
    operands=st.sampled_from(sorted(BYTES)),
    cell=st.sampled_from([None, 32, 48, 64, 128, 200]),
    exact=st.booleans(),
    capability=st.sampled_from([80, 86, 89, 90, 100, 120]),
    batch_invariant=st.booleans(),
)
def test_h14_every_tile_is_one_that_triton_takes(m, n, k, operands, cell, exact, capability, batch_invariant):
    tile = matmul_tile(
        m,
        n,
        k,
        operands=operands,
        cell=cell,
        exact=exact,
        capability=capability,
        sm_count=108,
        batch_invariant=batch_invariant,
    )
    extents = (tile.block_m, tile.block_n, tile.block_k)
    assert all(e >= 16 and e & (e - 1) == 0 for e in extents)
    assert tile.block_k >= 32 or operands != "fp8"
    x_bytes, w_bytes = BYTES[operands]
    used = tile.num_stages * tile.block_k * (tile.block_m * x_bytes + tile.block_n * w_bytes)
    assert used <= shared_memory(capability)
    # A step never straddles a cell, unless it covers one (or a part of one) with masked lanes.
    assert cell is None or cell % tile.block_k == 0 or cell % 32 != 0
    assert tile.split_k <= max(1, -(-k // tile.block_k))


def test_j01_an_unknown_gpu_gets_tiles_for_a_small_one():
    assert matmul_tile(4096, 4096, 4096, operands="16bit", capability=999).block_m <= 128
    assert shared_memory(999) == 99 * 1024


def test_batch_invariant_tiles_do_not_depend_on_rows():
    tiles = {
        matmul_tile(m, 4096, 4096, operands="fp8", cell=128, batch_invariant=True) for m in (1, 16, 64, 65, 512, 8192)
    }
    assert len(tiles) == 1
    assert tiles.pop().split_k == 1


def test_few_rows_split_k_where_w_is_too_short_to_fill_the_gpu():
    assert matmul_tile(8, 1024, 8192, operands="fp8").split_k > 1
    assert matmul_tile(8, 65536, 8192, operands="fp8").split_k == 1
    assert matmul_tile(8192, 8192, 8192, operands="fp8").split_k == 1


def test_large_products_on_hopper_take_the_measured_tiles():
    """The fastest of those measured on an H200 at 8192 cubed, and at 512 x 8192 x 8192 where one wave does all."""
    tile = matmul_tile(8192, 8192, 8192, operands="fp8")
    assert (tile.block_m, tile.block_n, tile.block_k, tile.num_warps, tile.num_stages) == (128, 256, 128, 8, 3)
    tile = matmul_tile(8192, 8192, 8192, operands="16bit")
    assert (tile.block_m, tile.block_n, tile.block_k, tile.num_warps, tile.num_stages) == (128, 256, 64, 8, 3)
    tile = matmul_tile(8192, 8192, 8192, operands="fp8", cell=128)
    assert (tile.block_m, tile.block_n, tile.block_k, tile.num_warps, tile.num_stages) == (64, 128, 128, 4, 3)
    tile = matmul_tile(512, 8192, 8192, operands="fp8", cell=128)
    assert (tile.block_m, tile.block_n, tile.block_k, tile.num_warps, tile.pieces) == (128, 256, 128, 16, 2)


@pytest.mark.parametrize(
    ("n", "k", "split", "stages"), [(8192, 8192, 1, 6), (4096, 7168, 4, 6), (2112, 7168, 4, 6), (24576, 1536, 1, 4)]
)
def test_64_rows_of_codes_split_k_only_where_few_programs_have_much_of_it(n, k, split, stages):
    tile = matmul_tile(64, n, k, operands="fp8", cell=128, exact=True)
    assert (tile.split_k, tile.num_stages) == (split, stages)
    assert tile.swap == (n == 24576)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "experts", "top_k", "cell", "single"),
    [
        (7168, 256, 256, 8, 128, True),
        (2048, 768, 128, 8, 128, True),
        (7168, 2048, 256, 8, 128, False),
        (4096, 14336, 8, 2, None, True),
    ],
    ids=["dsv3-tp8", "qwen3-30b", "dsv3", "mixtral"],
)
def test_one_token_of_large_experts_with_scales_along_k_is_the_tensor_cores(
    hidden, intermediate, experts, top_k, cell, single
):
    facts = {"operands": "fp8", "first_cell": cell, "second_cell": cell, "group": cell}
    assert moe_heuristics.moe_tiles(1, hidden, intermediate, experts, top_k, **facts).single == single


@pytest.mark.parametrize(("tokens", "cell", "single"), [(8, 32, True), (16, 32, False), (8, 64, False), (1, 64, True)])
def test_few_slots_with_scales_every_32_of_k_are_not_the_tensor_cores(tokens, cell, single):
    """Of Qwen3-30B-A3B's layers: 132 us against 319 with 8 tokens on an H200."""
    facts = {"operands": "fp8", "first_cell": cell, "second_cell": cell, "group": cell}
    assert moe_heuristics.moe_tiles(tokens, 2048, 768, 128, 8, **facts).single == single


@pytest.mark.parametrize(
    ("kind", "hidden", "intermediate", "single"),
    [
        (INT4, 2048, 768, True),
        (INT4, 4096, 14336, False),
        (MXFP4_A8, 2048, 768, False),
    ],
    ids=["small", "large", "folded"],
)
def test_one_token_of_packed_weights_is_the_tensor_cores_where_unpacking_is_the_limit(
    kind, hidden, intermediate, single
):
    assert fourbit.moe_tiles(1, hidden, intermediate, 128, 8, kind=kind).single == single


@pytest.mark.parametrize(
    ("kind", "tokens", "intermediate", "run", "stages", "columns"),
    [
        (INT4, 8, 768, 1, 4, 128),
        (INT4, 32, 768, 8, 2, 64),
        (INT4, 128, 1024, 8, 2, 64),
        (INT4, 128, 1025, 1, 4, 128),
        (INT4, 512, 768, 1, 4, 128),
        (MXFP4_A8, 8, 768, 4, 2, 64),
        (MXFP4_A8, 128, 768, 4, 2, 64),
        (MXFP4_A8, 512, 768, 4, 2, 64),
        (MXFP4_A8, 1024, 768, 4, 2, 128),
        (MXFP4_A8, 8192, 768, 1, 3, 128),
    ],
)
def test_programs_of_packed_weights_make_several_tiles_where_k_is_short(
    kind, tokens, intermediate, run, stages, columns
):
    """As measured on an H200 with Qwen3-30B-A3B's shapes."""
    tiles = fourbit.moe_tiles(tokens, 2048, intermediate, 128, 8, kind=kind)
    assert (tiles.first.run, tiles.second.run, tiles.second.num_stages) == (1, run, stages)
    assert tiles.second.block_n == columns


@pytest.mark.parametrize(
    ("tokens", "second"),
    [
        (1, "16x64x256 4 warps 3 stages 4 a program swapped"),
        (8, "16x64x256 4 warps 3 stages 8 a program swapped"),
        (512, "32x128x128 4 warps 3 stages 8 a program or 16 rows swapped"),
        (2048, "64x128x128 4 warps 4 stages 8 a program or 16 rows swapped"),
        (8192, "128x128x128 4 warps 3 stages 16 a program or 64 rows swapped"),
    ],
)
def test_programs_of_folded_weights_of_two_steps_of_k_make_several_tiles(tokens, second):
    """As measured on an H200 with DeepSeek-V3's shapes in eight parts, I = 256; weights that do not fold make one."""
    assert str(fourbit.moe_tiles(tokens, 7168, 256, 256, 8, kind=MXFP4_A8).second) == second
    assert fourbit.moe_tiles(tokens, 7168, 256, 256, 8, kind=INT4).second.run == 1


@pytest.mark.parametrize(
    ("kind", "tokens", "first", "second"),
    [
        (MXFP4, 8, "16x64x128 4 warps 4 stages", "16x128x128 8 warps 5 stages"),
        (MXFP4, 128, "16x64x128 4 warps 4 stages", "16x64x128 4 warps 4 stages"),
        (INT4, 128, "16x128x128 8 warps 3 stages", "16x128x128 8 warps 5 stages"),
        (MXFP4_A8, 128, "16x64x128 4 warps 4 stages", "16x64x128 4 warps 5 stages"),
        (MXFP4, 2048, "64x64x128 4 warps 3 stages or 16 rows", "64x128x128 4 warps 4 stages or 16 rows"),
        (MXFP4_A8, 2048, "64x64x128 4 warps 4 stages or 16 rows", "64x128x128 4 warps 4 stages or 16 rows"),
        (MXFP4, 8192, "128x64x128 4 warps 3 stages or 32 rows", "128x128x128 4 warps 3 stages or 32 rows"),
    ],
)
def test_tiles_of_packed_weights_are_those_measured(kind, tokens, first, second):
    """On an H200 with gpt-oss-120b's shapes."""
    tiles = fourbit.moe_tiles(tokens, 2880, 2880, 128, 4, kind=kind)
    assert (str(tiles.first), str(tiles.second)) == (f"{first} swapped", f"{second} swapped")


def test_tiles_are_those_of_the_experts_that_are_here():
    """As high, and as many a program, for an eighth of the experts with an eighth of the slots as for all."""
    for kind in (MXFP4, MXFP4_A8):
        whole = fourbit.moe_tiles(96, 2880, 2880, 128, 4, kind=kind)
        assert fourbit.moe_tiles(96, 2880, 2880, 64, 4, global_experts=128, kind=kind) == whole
        assert fourbit.moe_tiles(3, 2880, 2880, 128, 1, batched=True, kind=kind) == whole
        # Six rows of each, which would be twelve were there no experts elsewhere.
        whole = fourbit.moe_tiles(200, 2880, 2880, 128, 4, kind=kind)
        assert fourbit.moe_tiles(200, 2880, 2880, 64, 4, global_experts=128, kind=kind) == whole
        assert whole != fourbit.moe_tiles(200, 2880, 2880, 64, 4, kind=kind)
        # Blocks that are not full are as many programs.
        whole = fourbit.moe_tiles(128, 2048, 768, 128, 8, kind=kind)
        assert fourbit.moe_tiles(8, 2048, 768, 128, 1, batched=True, kind=kind).second.run == whole.second.run
    assert whole.second.run > 1


def test_a_run_is_of_no_more_tiles_than_there_are():
    kind = MXFP4_A8
    assert [fourbit.moe_tiles(64, h, 768, 4096, 8, kind=kind).second.run for h in (128, 255, 2048)] == [1, 4, 4]
    assert [fourbit.moe_tiles(8192, h, 768, 1024, 8, kind=kind).second.run for h in (128, 256, 2048)] == [1, 2, 4]
    assert [fourbit.moe_tiles(8192, h, 256, 8, 8, kind=kind).second.run for h in (128, 1024, 7168)] == [1, 8, 16]


HEIGHTS = {1: (16, 0), 8: (16, 0), 9: (32, 16), 26: (32, 16), 27: (64, 32), 48: (64, 32), 60: (64, 16), 80: (64, 32)}
UNFOLDED_HEIGHTS = {81: (128, 64), 103: (128, 64), 104: (128, 32), 152: (128, 32), 153: (128, 64), 512: (128, 32)}
FOLDED_HEIGHTS = {96: (64, 32), 128: (64, 16), 144: (64, 32), 145: (128, 64), 4096: (128, 64)}


@pytest.mark.parametrize(
    ("kind", "heights"),
    [
        (INT4, HEIGHTS | UNFOLDED_HEIGHTS),
        (MXFP4, HEIGHTS | UNFOLDED_HEIGHTS),
        (MXFP4_A8, HEIGHTS | FOLDED_HEIGHTS),
    ],
    ids=["int4", "mxfp4", "mxfp4_a8"],
)
def test_blocks_of_packed_weights_are_high_enough_for_most_experts_with_a_low_last_one(kind, heights):
    """As measured on an H200 with the shapes of gpt-oss-120b, Mixtral and Qwen3: each block unpacks its weights."""
    for rows, height in heights.items():
        tiles = fourbit.moe_tiles(rows * 128, 4096, 4096, 128, 1, kind=kind)
        assert [(tile.block_m, tile.short) for tile in (tiles.first, tiles.second)] == [height, height], rows


def test_blocks_of_packed_weights_where_rows_or_registers_are_limited():
    tall = functools.partial(fourbit.moe_tiles, hidden=4096, intermediate=4096, experts=128)
    # Where no expert has more rows than are there for it, the last block of those that have all is known.
    assert [tall(rows, kind=INT4, batched=True).first.short for rows in (64, 65, 80)] == [32, 16, 16]
    # Two accumulators of 128 rows leave no registers for promotion.
    assert tall(512 * 128, kind=MXFP4_A8, exact=True).first.block_m == 64
    # Products of short K keep to 32 rows for longer.
    assert tall(40 * 128, kind=INT4, intermediate=768).first.block_m == 32


NVFP4 = fourbit.Kind(operand="bfloat16", words=4, codes="e2m1")


@pytest.mark.parametrize(
    ("m", "n", "k", "kind", "tile"),
    [
        (16, 16384, 8192, INT4, "16x64x256 4 warps 4 stages"),
        (16, 16384, 8192, MXFP4_A8, "16x64x256 4 warps 4 stages"),
        (1, 5760, 2880, MXFP4, "16x64x256 4 warps 3 stages K split in 4"),
        (16, 2880, 4096, INT4, "16x64x256 4 warps 3 stages K split in 8"),
        (64, 16384, 8192, MXFP4_A8, "64x128x128 4 warps 4 stages K split in 2"),
        (64, 16384, 2047, MXFP4_A8, "64x128x128 4 warps 4 stages"),
        (64, 16384, 8192, NVFP4, "64x64x128 4 warps 4 stages"),
        (64, 16384, 8192, INT4, "64x64x256 4 warps 3 stages"),
        (64, 5760, 2880, INT4, "64x64x256 4 warps 3 stages"),
        (64, 5760, 2880, MXFP4_A8, "64x64x128 4 warps 6 stages"),
        (64, 5760, 2880, NVFP4, "64x64x128 4 warps 4 stages"),
        (64, 2880, 4096, INT4, "64x64x128 4 warps 4 stages K split in 4"),
        (64, 2880, 4096, MXFP4_A8, "64x64x128 4 warps 4 stages K split in 4"),
        (256, 5760, 2880, INT4, "128x64x128 4 warps 3 stages"),
        (256, 5760, 2880, MXFP4_A8, "128x64x128 4 warps 4 stages"),
        (256, 16384, 8192, MXFP4, "256x128x128 8 warps 3 stages"),
        (4096, 5760, 2880, MXFP4_A8, "256x128x128 8 warps 3 stages"),
    ],
)
def test_tiles_of_packed_products_are_those_measured(m, n, k, kind, tile):
    """On an H200, with the shapes of gpt-oss-120b's projections and of a large layer."""
    assert str(fourbit.linear_tile(m, n, k, kind=kind)) == f"{tile} swapped"


@pytest.mark.parametrize(
    "m, n, k, kind, group", [(256, 5760, 2880, INT4, 1), (4096, 5760, 2880, INT4, 4), (4096, 5760, 2880, MXFP4_A8, 8)]
)
def test_packed_products_go_through_rows_as_measured(m, n, k, kind, group):
    assert fourbit.linear_tile(m, n, k, kind=kind).group == group


def test_parts_of_k_have_steps_of_their_own():
    """However short K is; a batch-invariant product has none."""
    for m in (1, 16, 33, 64):
        for k in (1, 128, 513, 1024):
            tile = fourbit.linear_tile(m, 64, k, kind=INT4)
            assert tile.split_k <= max(1, -(-k // tile.block_k) // 2), (m, k)
        assert fourbit.linear_tile(m, 64, 8192, kind=INT4, batch_invariant=True).split_k == 1


def test_many_short_programs_of_promoted_sums_make_several_tiles():
    """Of Qwen3-30B-A3B's products with 8192 tokens, by 1 and 6% on an H200; with 2048 it lost."""
    facts = {"operands": "fp8", "first_cell": 128, "second_cell": 128, "group": 128, "exact": True}
    runs = [moe_heuristics.moe_tiles(tokens, 2048, 768, 128, 8, **facts) for tokens in (2048, 8192)]
    assert [(tiles.first.run, tiles.second.run) for tiles in runs] == [(1, 1), (2, 4)]
    for few_or_long in (
        moe_heuristics.moe_tiles(8192, 7168, 2048, 256, 8, **facts),
        moe_heuristics.moe_tiles(8192, 2048, 768, 16, 8, global_experts=128, **facts),  # an eighth of the experts
        moe_heuristics.moe_tiles(8192, 768, 768, 128, 8, **facts),
    ):
        assert (few_or_long.first.run, few_or_long.second.run) == (1, 1)
    assert moe_heuristics.moe_tiles(512, 2048, 768, 128, batched=True, **facts).second.run == 4


@pytest.mark.parametrize(
    "programs, steps, shares",
    [
        (60, 112, 4),  # less than one a multiprocessor
        (106, 112, 2),
        (175, 112, 4),
        (225.6, 112, 1),  # two of them on most, one on others
        (252, 112, 1),  # two on nearly all
        (528, 112, 1),
        (529, 112, 1),
        (60, 19, 1),  # a share would be too short
        (60, 20, 2),
        (60, 39, 2),
    ],
)
def test_shares_of_k_are_as_many_as_give_multiprocessors_as_much_to_do(programs, steps, shares):
    """The programs of Mixtral's second product in int4 for 1, 2, 4, 8 and 16 tokens, of which an H200 has 132."""
    assert even_shares(programs, steps, 132) == shares


WIDE = "16x128x128 8 warps 4 stages K split in {} swapped"
NARROW = "16x64x128 4 warps 6 stages K split in {} swapped"


@pytest.mark.parametrize(
    "kind, shares, one_token",
    [
        (INT4, [4, 2, 4, 1, 1], WIDE.format(4)),
        (MXFP4, [4, 2, 4, 1, 1], WIDE.format(4)),
        (MXFP4_A8, [2, 1, 2, 4, 1], NARROW.format(2)),
    ],
    ids=["int4", "mxfp4", "mxfp4_a8"],
)
def test_few_experts_split_k_of_the_second_product(kind, shares, one_token):
    mixtral = functools.partial(fourbit.moe_tiles, hidden=4096, intermediate=14336, kind=kind)
    tiles = [mixtral(tokens, experts=8, top_k=2) for tokens in (1, 2, 4, 8, 16)]
    assert [(t.first.split_k, t.second.split_k) for t in tiles] == [(1, n) for n in shares]
    assert str(tiles[0].second) == one_token
    # Of experts that are elsewhere in part, only those here count: half as many programs.
    assert mixtral(8, experts=4, top_k=2, global_experts=8).second.split_k != shares[3]
    # Blocks of more rows are measured with whole sums only.
    assert mixtral(64, hidden=256, experts=8, top_k=2).second.split_k == 1
    # Nothing sums shares of batched experts, and how many there are depends on the number of tokens.
    assert mixtral(2, experts=8, batched=True).second.split_k == 1
    assert mixtral(1, experts=8, top_k=2, batch_invariant=True).second.split_k == 1


@pytest.mark.parametrize(
    "tokens, second", [(1, WIDE.format(2)), (2, WIDE.format(2)), (8, "16x128x128 8 warps 5 stages swapped")]
)
def test_23_steps_of_k_are_two_shares_at_most(tokens, second):
    assert str(fourbit.moe_tiles(tokens, 2880, 2880, 128, 4, kind=MXFP4).second) == second


@pytest.mark.parametrize("kind", [INT4, MXFP4, MXFP4_A8])
def test_what_the_gpu_lane_has_of_shares(kind):
    assert fourbit.moe_tiles(*LONG.values(), kind=kind).second.split_k > 1
    assert fourbit.moe_tiles(3, 1000, 5200, 16, 2, kind=kind).second.split_k > 1


@pytest.mark.parametrize(
    "tokens, top_k, experts, of, read",
    [
        (1, 2, 8, 8, 2),
        (2, 2, 8, 8, 3.5),
        (1, 8, 8, 8, 8),
        (1, 8, 16, 128, 1),
        (9, 10, 4, 4, 4),
        (3, 2, 0, 0, 0),
        (0, 2, 8, 8, 0),
    ],
)
def test_experts_that_have_tokens(tokens, top_k, experts, of, read):
    assert moe_heuristics.experts_read(tokens, top_k, experts, of) == read


def test_only_promoted_sums_of_bytes_split_k():
    facts = {"hidden": 4096, "intermediate": 14336, "experts": 8, "top_k": 2, "group": 128}
    block = {"operands": "fp8", "first_cell": 128, "second_cell": 128}
    shares = [moe_heuristics.moe_tiles(tokens, **facts, **block).second.split_k for tokens in (2, 4, 8, 16)]
    assert shares == [2, 4, 1, 1]
    for others in ({"operands": "16bit"}, {"operands": "fp8", "exact": False}):
        assert moe_heuristics.moe_tiles(4, **facts | {"group": None}, **others).second.split_k == 1
    assert moe_heuristics.moe_tiles(2, **facts, **block, batched=True).second.split_k == 1
    assert moe_heuristics.moe_tiles(64, **facts | {"hidden": 256}, **block).second.split_k == 1  # blocks of 32 rows
    here = moe_heuristics.moe_tiles(8, **facts | {"experts": 4}, **block, global_experts=8)
    assert here.second.split_k > shares[2]
    oss = moe_heuristics.moe_tiles(2, 2880, 2880, 128, 4, **block, group=128)  # of which 128 leaves a rest
    assert oss.second.split_k == 2


def test_the_last_block_of_32_rows_may_be_of_16():
    assert moe_heuristics.moe_tiles(512, 2880, 2880, 128, 4, operands="16bit").first.short == 16


def test_int8_products_that_are_waited_for_take_turns():
    """Two programs of 128 x 128 on a multiprocessor, in layers with 64 columns of each half, as measured on an H200."""
    large = matmul_tile(8192, 8192, 8192, operands="int8")
    assert (large.block_m, large.block_n, large.num_warps, large.num_stages, large.group) == (128, 128, 4, 3, 16)
    assert [matmul_tile(m, 8192, 8192, operands="int8").block_n for m in (128, 256, 512)] == [64, 128, 128]
    tiles = moe_heuristics.moe_tiles(8192, 4096, 14336, 8, 2, operands="int8")
    assert (tiles.first.block_n, tiles.first.num_warps) == (64, 4)
    assert (tiles.second.block_n, tiles.second.num_warps) == (128, 4)
