"""Tiles that tuning measures: few, legal, the heuristic's first."""

from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest

from pallas_kernels.tuning.candidates import (
    Problem,
    estimated_us,
    is_legal,
    matmul_candidates,
    moe_candidates,
    packed_candidates,
    registers,
    shared_bytes,
)
from pallas_kernels.tuning.heuristics import MatmulTile, matmul_tile, shared_memory
from pallas_kernels.tuning.moe_heuristics import MoETiles, moe_tiles


def tile(block_m, block_n, block_k, warps, stages, **changes):
    return MatmulTile(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages, **changes)


def dense(m, operands, promoted=False, n=8192, k=8192, **facts):
    base = matmul_tile(m, n, k, operands=operands, cell=128 if promoted else None, exact=promoted, **facts)
    return base, Problem(m=m, n=n, k=k, operands=operands, promoted=promoted, **facts)


@pytest.mark.parametrize(
    "given, promoted, count",
    [
        # ptxas reports 160 for the second and 126 for the third on sm90.
        (tile(64, 128, 128, 4, 3), True, 160),
        (tile(128, 128, 128, 8, 3), True, 160),
        (tile(64, 256, 128, 8, 2, pieces=2), True, 128),
        (tile(128, 256, 128, 8, 3), False, 160),
    ],
)
def test_registers_are_those_of_the_sums_and_what_waits_for_its_scale(given, promoted, count):
    assert registers(given, Problem(m=8192, n=8192, k=8192, operands="fp8", promoted=promoted)) == count


def test_what_spills_or_does_not_fit_is_not_legal():
    promoted = Problem(m=8192, n=8192, k=8192, operands="fp8", promoted=True)
    assert not is_legal(tile(128, 256, 128, 8, 3), promoted)  # 255 registers and a stack
    assert is_legal(tile(128, 256, 128, 16, 3, pieces=2), promoted)
    assert shared_bytes(tile(128, 256, 128, 16, 5), promoted) == 5 * 128 * 384 > shared_memory(90)
    assert not is_legal(tile(128, 256, 128, 16, 5, pieces=2), promoted)
    assert not is_legal(tile(16, 64, 128, 4, 3, split_k=16), Problem(m=1, n=64, k=1024, operands="fp8"))


@hypothesis.given(
    m=st.integers(1, 20_000),
    n=st.integers(1, 40_000),
    k=st.integers(1, 20_000),
    kind=st.sampled_from([("fp8", False), ("fp8", True), ("w8a16", False), ("16bit", False), ("32bit", False)]),
    capability=st.sampled_from([80, 89, 90, 100, 120]),
    count=st.integers(1, 6),
)
@hypothesis.settings(max_examples=15, deadline=None)
def test_candidates_of_a_dense_product(m, n, k, kind, capability, count):
    base, problem = dense(m, *kind, n=n, k=k, capability=capability, sm_count=108)
    found = matmul_candidates(base, problem, count)
    assert found[0] == base and 1 <= len(set(found)) == len(found) <= count
    assert all(is_legal(other, problem) for other in found[1:])
    assert all(estimated_us(other, problem) > 0 for other in found)
    assert {other.block_k for other in found} <= {base.block_k, max(32, base.block_k // 2)}


def test_the_measured_winners_are_among_the_candidates():
    """At 8192 cubed on an H200: one of each for plain sums, and both ways to keep the tensor core busy for blocks."""
    assert tile(128, 256, 64, 8, 3, group=16) in matmul_candidates(*dense(8192, "16bit"), 4)
    assert tile(128, 256, 128, 8, 3, group=16) in matmul_candidates(*dense(8192, "fp8"), 4)
    found = [(t.block_m, t.block_n, t.num_warps, t.pieces) for t in matmul_candidates(*dense(8192, "fp8", True), 6)]
    assert (64, 128, 4, 1) in found and (128, 256, 16, 2) in found


@pytest.mark.parametrize("tokens", [1, 8, 64, 512, 8192])
def test_candidates_of_a_layer_of_experts(tokens):
    def heuristic(rows):
        return moe_tiles(rows, 2048, 768, 128, 8, operands="fp8", first_cell=128, second_cell=128, group=128)

    bases = [heuristic(rows) for rows in (tokens, max(1, tokens // 4), 4 * tokens)]
    read = min(128, 8 * tokens)
    facts = {"m": 8 * tokens // read, "operands": "fp8", "promoted": True, "groups": read}
    first = Problem(n=768, k=2048, halves=2, columns=128, **facts)
    second = Problem(n=2048, k=768, **facts)
    pairs = moe_candidates(bases, first, second, 4)
    assert pairs[0] == bases[0] and 2 < len(set(pairs)) == len(pairs) <= 4
    for pair in pairs:
        assert pair.first.block_m == pair.second.block_m
        if not pair.single:
            assert pair.first.block_n == 128  # a group of the intermediate's scales
            assert is_legal(pair.first, first) and is_legal(pair.second, second)
    assert {(b.first.block_m, b.single) for b in bases} >= {(p.first.block_m, p.single) for p in pairs}
    assert moe_candidates(bases, first, second, 1) == bases[:1]


def test_candidates_of_packed_weights_are_neighbours():
    base = tile(16, 64, 256, 4, 5, swap=True)
    problem = Problem(m=8, n=8192, k=8192, operands="fp8")
    found = packed_candidates(base, problem, 9)
    assert found[0] == base and len(set(found)) == len(found)
    differing = [
        {
            name
            for name in ("block_n", "block_k", "num_warps", "num_stages", "split_k")
            if getattr(other, name) != getattr(base, name)
        }
        for other in found[1:]
    ]
    assert differing == [
        {"num_stages"},
        {"block_k"},
        {"num_stages"},
        {"block_k"},
        {"split_k"},
        {"block_n", "num_warps"},
    ]
    assert {other.block_k % 128 for other in found} == {0}
    assert packed_candidates(base, problem, 2) == found[:2]
    large = tile(256, 128, 128, 8, 3, swap=True)
    for other in packed_candidates(large, Problem(m=8192, n=8192, k=8192, operands="w8a16"), 9):
        assert other.split_k == 1 and other.num_warps == 8 and other.block_k == 128  # nothing larger fits
    base = MoETiles(first=tile(16, 64, 256, 4, 3, swap=True), second=tile(16, 64, 256, 4, 4, swap=True))
    facts = {"m": 4, "operands": "w8a16", "groups": 128}
    pairs = moe_candidates(
        [base], Problem(n=768, k=2048, halves=2, **facts), Problem(n=2048, k=768, **facts), 4, packed=True
    )
    assert pairs[0] == base and len(pairs) == 4


def test_a_run_of_packed_tiles_is_compared_with_none():
    base = tile(16, 64, 128, 4, 2, swap=True, run=8)
    found = packed_candidates(base, Problem(m=4, n=2048, k=768, operands="w8a16", groups=128), 4)
    assert {other.run for other in found} == {1, 8}


def test_a_packed_linears_parts_of_k_are_compared_with_fewer_and_more():
    base = tile(64, 64, 256, 4, 3, swap=True, split_k=4)
    found = packed_candidates(base, Problem(m=64, n=5760, k=8192, operands="w8a16"), 9)
    assert {other.split_k for other in found} == {2, 4, 8}
    assert {other.split_k for other in found[:2]} == {2, 4}


def test_shares_of_k_are_compared_with_none_and_with_more():
    facts = {"m": 2, "operands": "w8a16", "groups": 8}
    base = tile(16, 128, 128, 8, 4, swap=True, split_k=2)
    assert {c.split_k for c in packed_candidates(base, Problem(n=4096, k=14336, **facts), 9)} == {1, 2, 4}
    whole = replace(base, split_k=1)
    assert {c.split_k for c in packed_candidates(whole, Problem(n=4096, k=14336, **facts), 9)} == {1}
    facts = {"operands": "fp8", "promoted": True, "groups": 8, "m": 2}
    pair = moe_tiles(4, 4096, 14336, 8, 2, operands="fp8", first_cell=128, second_cell=128, group=128)
    assert pair.second.split_k == 4
    first = Problem(n=14336, k=4096, halves=2, columns=128, **facts)
    found = moe_candidates([pair], first, Problem(n=4096, k=14336, **facts), 8)
    assert {c.second.split_k for c in found} == {1, 4} and {c.first.split_k for c in found} == {1}


def test_a_wider_packed_tile_is_of_fewer_a_program():
    base = tile(64, 128, 128, 4, 2, swap=True, run=3)
    found = packed_candidates(base, Problem(m=64, n=333, k=256, operands="fp8", groups=8), 9)
    assert {(other.block_n, other.run) for other in found} == {(128, 3), (128, 1), (256, 1)}


@pytest.mark.parametrize("rows, short, other", [(64, 32, 16), (64, 16, 32), (32, 16, 16), (128, 64, 64), (16, 0, 0)])
def test_both_low_last_blocks_of_64_rows_are_compared(rows, short, other):
    base = tile(rows, 64, 128, 4, 4, swap=True, short=short)
    found = packed_candidates(base, Problem(m=64, n=768, k=2048, operands="fp8", groups=128, halves=2), 4)
    assert {tile.short for tile in found} == {short, other}


def test_a_run_over_many_steps_of_k_is_compared_with_none():
    facts = {"operands": "fp8", "promoted": True, "groups": 128}
    base = moe_tiles(8192, 2048, 768, 128, 8, operands="fp8", first_cell=128, second_cell=128, group=128, exact=True)
    assert base.second.run > 1
    first = Problem(m=512, n=768, k=2048, halves=2, columns=128, **facts)
    pairs = moe_candidates([base], first, Problem(m=512, n=2048, k=768, **facts), 8)
    assert {pair.second.run for pair in pairs} == {1, base.second.run}


def test_where_k_is_short_programs_make_several_tiles_that_divide_a_row():
    base = moe_tiles(2048, 7168, 256, 256, 8, operands="fp8", first_cell=128, second_cell=128, group=128)
    facts = {"m": 64, "operands": "fp8", "promoted": True, "groups": 256}
    second = Problem(n=7168, k=256, **facts)
    pairs = moe_candidates([base], Problem(n=256, k=7168, halves=2, columns=128, **facts), second, 8)
    tiles = [pair.second for pair in pairs]
    assert len({tile.run for tile in tiles}) > 1
    assert all(7168 // tile.block_n % tile.run == 0 or tile.run == base.second.run for tile in tiles)
    assert {pair.first.run for pair in pairs} == {base.first.run}  # its K is long
