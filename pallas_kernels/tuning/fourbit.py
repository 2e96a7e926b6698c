"""First choices of tiles for packed four-bit weights; pure functions, no GPU needed.

Weights are the tensor core's left operand, so ``block_n`` is at least 64, and ``block_m`` may be as little as 16. A
step of K is a number of tiles of the packing: long ones pay while reading the weights takes the time.
"""

from dataclasses import dataclass, replace
from typing import Literal

from pallas_kernels.tuning.heuristics import MatmulTile, even_shares, shared_memory
from pallas_kernels.tuning.moe_heuristics import MoETiles, are_few, experts_read, rows_of_each, vector_tiles

_COLUMNS = 128

_SINGLE_WEIGHTS = 2**24
"""Most weights of w2 of slots that are products of matrices and vectors, whose limit is unpacking."""

_SHORT_K = 8 * _COLUMNS
"""Longest K of a run of tiles, whose steps are written out."""

_LONG_K = 16 * _COLUMNS
"""K above which loads pay to be further ahead."""

_NARROW_K = 32 * _COLUMNS
"""Longest K of many programs of 64 columns of 16 rows where e2m1 codes become bfloat16."""

_FEW_SLOTS = 8
"""Most slots whose programs do not fill the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """What of a packing its tiles depend on.

    Attributes:
      operand: what the weights are made to, and x is.
      words: 32-bit words of scales and zero points that go with 128 columns of a row.
      codes: of the weights.
      scales_sums: scales multiply sums over groups, which take registers beside the accumulators.
    """

    operand: Literal["bfloat16", "e4m3"]
    words: int
    codes: Literal["int4", "e2m1"]
    scales_sums: bool = False

    @property
    def x_bytes(self) -> int:
        return 1 if self.operand == "e4m3" else 2


def linear_tile(
    m: int,
    n: int,
    k: int,
    *,
    kind: Kind,
    exact: bool = False,
    capability: int = 90,
    sm_count: int = 132,
    batch_invariant: bool = False,
) -> MatmulTile:
    """Tile of a dense product (M, K) x (N, K).

    Args:
      m, n, k: the product's extents.
      kind: of the weights.
      exact: e4m3 sums are promoted to float32 every 128 of K, which takes registers for a second accumulator.
      capability: compute capability times ten.
      sm_count: streaming multiprocessors.
      batch_invariant: the choice may not depend on ``m``.
    """
    folds = kind.operand == "e4m3"
    if batch_invariant:
        tile = _tile(64, 64, 256 if folds else 128, 4, 3)
    elif m <= 16:
        tile = _in_parts(_tile(16, 64, 256, 4, 4), n, k, sm_count)
    elif m <= 64:
        low = m <= 32 or (kind.scales_sums and capability < 90)
        block_k = 128 if kind.words >= 4 else 256
        tile = _tile(32 if low else 64, 64, block_k, 4, 3 if block_k == 256 and not folds else 4)
        if low or kind.scales_sums or capability != 90:
            tile = _in_parts(tile, n, k, sm_count)
        else:
            tile = _of_64_rows(n, k, kind, sm_count)
    elif kind.scales_sums:
        tile = _tile(128, 64, _COLUMNS, 8, 3) if capability == 90 else _tile(64, 64, _COLUMNS, 4, 3)
    elif m <= 128 or -(-m // 256) * -(-n // 128) < 3 * sm_count // 4 or capability != 90:
        tile = replace(_tile(128, 64, 128, 4, 4 if folds else 3), group=1 if m <= 256 else 8)
    elif folds and exact:
        tile = _tile(128, 128, 256, 8, 3)
    else:
        tile = replace(_tile(256, 128, 128, 8, 3), group=8 if folds else 4)
    if folds and capability < 90 and tile.block_m > 16:  # Ada has no registers for what longer steps unpack
        tile = replace(tile, block_m=min(tile.block_m, 64), block_k=_COLUMNS)
    if folds and exact and capability > 90 and tile.block_m == 16:  # nor has Blackwell for their sums beside them
        tile = replace(tile, block_k=_COLUMNS)
    return _fitted(tile, 1, kind, capability)


def moe_tiles(
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int = 1,
    *,
    kind: Kind,
    halves: int = 2,
    exact: bool = False,
    batched: bool = False,
    global_experts: int = 0,
    capability: int = 90,
    sm_count: int = 132,
    batch_invariant: bool = False,
) -> MoETiles:
    """Tiles of a layer of experts.

    Args:
      tokens: T, or the rows of each expert where ``batched``.
      hidden, intermediate: H and I.
      experts: experts here, E.
      top_k: k.
      kind: of the weights.
      halves: of w13, 2 if gated.
      exact: e4m3 sums are promoted to float32 every 128 of K.
      batched: for ``batched_experts``.
      global_experts: E_global, where some are elsewhere; fewer than ``experts`` are as many.
      capability: compute capability times ten.
      sm_count: streaming multiprocessors.
      batch_invariant: the choice may not depend on ``tokens``.
    """
    slots, folds = tokens * top_k, kind.operand == "e4m3"
    # Codes that are folded into e4m3 would be decoded twice.
    single = are_few(tokens, experts, top_k) and slots * hidden * intermediate <= _SINGLE_WEIGHTS and not folds
    if single and not (batched or batch_invariant):
        first, second = vector_tiles(tokens, hidden, intermediate, top_k, halves, sm_count)
        return MoETiles(first=_whole_tiles(first, hidden), second=_whole_tiles(second, intermediate), single=True)
    of = max(experts, global_experts)
    rows = tokens if batched else rows_of_each(slots, of)
    if batch_invariant or capability != 90 or kind.scales_sums:
        block_m = 64 if batch_invariant or capability != 90 or rows > 40 else 16 if rows <= 8 else 32
        if kind.scales_sums and capability != 90:
            block_m = min(block_m, 32)
        warps = 8 if kind.scales_sums and block_m == 64 else 4
        # Elsewhere long steps spill.
        first = _tile(block_m, 64, 2 * _COLUMNS if folds and capability == 90 else _COLUMNS, warps, 3)
        second = replace(first, num_stages=4)
    else:
        few = None if batched or slots > _FEW_SLOTS else slots * -(-intermediate // 64) / sm_count
        block_m, short = _height(rows, intermediate, kind, exact, known=batched)
        blocks = experts * -(-rows // block_m) if batched else min(slots, experts)
        first, second = _on_hopper(block_m, hidden, intermediate, kind, few, rows > 2)
        second = _in_runs(second, hidden, intermediate, blocks / sm_count, folds, few)
        if block_m == 16 and not batched and second.run == 1:
            read = experts_read(tokens, top_k, experts, of)
            second = _in_shares(second, hidden, intermediate, folds, read, sm_count)
        first, second = replace(first, short=short), replace(second, short=short)
    return MoETiles(first=_fitted(first, halves, kind, capability), second=_fitted(second, 1, kind, capability))


def _height(rows: int, intermediate: int, kind: Kind, exact: bool, *, known: bool) -> tuple[int, int]:
    """Rows of a block, and of the shorter program that makes an expert's last block where its rows are that few.

    Experts' rows vary about their average, ``rows``, unless they are ``known`` to be no more. A block of few rows more
    takes another program, which unpacks the weights again: high blocks with a low last one make the fewest.
    """
    folds = kind.operand == "e4m3"
    if rows <= 8:
        return 16, 0
    if rows <= (40 if 2 * _COLUMNS < intermediate <= _SHORT_K else 26):
        return 32, 16
    # Two accumulators of 128 rows leave no registers for promotion. Unpacking to bfloat16 takes more power, which
    # lowers the clock where kernels follow each other, than low blocks save.
    high = rows > (144 if folds else 80) and not (folds and exact)
    block_m = 128 if high else 64
    if high and folds:
        return block_m, block_m // 2
    half, quarter = block_m // 2, block_m // 4
    just_begun = 0 < rows % block_m <= quarter if known else abs((rows + half) % block_m - half) <= 3 * quarter / 4
    return block_m, quarter if just_begun else half


def _on_hopper(
    block_m: int, hidden: int, intermediate: int, kind: Kind, few: float | None, many: bool
) -> tuple[MatmulTile, MatmulTile]:
    """Both tiles as measured on an H200.

    ``few``: of few slots, the first product's programs a multiprocessor, which read far ahead; None for more slots.
    ``many``: experts have more than two rows on average.
    """
    folds = kind.operand == "e4m3"
    if block_m == 128:
        first = _tile(128, 128, _COLUMNS, 8, 3) if folds else _tile(128, 64, _COLUMNS, 4, 3)
        return first, _tile(128, 128, _COLUMNS, 4, 3)
    if block_m > 16:
        first = _tile(block_m, 64, _COLUMNS, 4, 4 if folds or block_m == 32 else 3)
        return first, _tile(block_m, 128, _COLUMNS, 4, 4)
    if folds:
        if few is None:
            return _tile(16, 64, _COLUMNS, 4, 4), _tile(16, 64, _COLUMNS, 4, 5)
        first = second = _tile(16, 64, _COLUMNS, 4, 6)
        return _tile(16, 64, 2 * _COLUMNS, 4, 4) if few < 1 and hidden >= 4096 else first, second
    narrow, wide = _tile(16, 64, _COLUMNS, 4, 4), _tile(16, 128, _COLUMNS, 8, 3)
    if few is not None:
        return wide if few >= 2 else replace(narrow, num_stages=6), replace(narrow, num_stages=8)
    second = replace(wide, num_stages=5 if intermediate > _LONG_K else 4)
    if kind.codes == "int4":
        return wide, second
    return narrow, narrow if many and intermediate <= _NARROW_K else second


def _in_runs(
    second: MatmulTile, hidden: int, intermediate: int, blocks: float, folds: bool, few: float | None
) -> MatmulTile:
    """The second product's tile where K is short: programs that make several, so that loads do not run dry in between.

    ``blocks`` of rows a multiprocessor; three programs are under way at a time.
    """
    tiles, block_m = -(-hidden // 64), second.block_m
    if intermediate <= 2 * _COLUMNS:
        if not folds:
            return second
        if few is not None or block_m == 16:
            return replace(_tile(block_m, 64, 2 * _COLUMNS, 4, 3), run=min(8 if few is None else 4, tiles))
        wide = -(-hidden // 128)
        if block_m == 128:
            return replace(second, run=min(16, wide))
        return replace(_tile(block_m, 128, _COLUMNS, 4, 3 if block_m == 32 else 4), run=min(8, wide))
    if intermediate > _SHORT_K or few is not None or block_m == 128:
        return second
    most = 4 if folds else 8
    run = next((run for run in (8, 4) if run <= min(most, tiles) and blocks * tiles >= 3 * run), 1)
    if folds and block_m == 64 and run > 1:
        return replace(second, num_stages=2, run=min(4, tiles // 2))
    # Programs of weights that do not fold are worth it only where they are long, and their blocks low.
    if run == 1 or (not folds and (run < 8 or block_m > 16)):
        return second
    return replace(second, block_n=64, num_warps=4, num_stages=2, run=run)


def _in_shares(
    second: MatmulTile, hidden: int, intermediate: int, folds: bool, read: float, sm_count: int
) -> MatmulTile:
    """The second product's tile, of 16 rows, with K in shares where few programs have much of it."""
    tile = second if folds else _tile(16, 128, _COLUMNS, 8, 4)
    shares = even_shares(read * -(-hidden // tile.block_n), -(-intermediate // tile.block_k), sm_count)
    return second if shares == 1 else replace(tile, split_k=shares)


def _whole_tiles(tile: MatmulTile, k: int) -> MatmulTile:
    """A tile of a product of matrices and vectors with a step of whole tiles of K, of twice as many columns or so."""
    double = 2 * tile.block_k
    return replace(tile, block_k=max(_COLUMNS, double if k % double == 0 else tile.block_k))


def _tile(block_m: int, block_n: int, block_k: int, warps: int, stages: int) -> MatmulTile:
    return MatmulTile(
        block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages, group=8, swap=True
    )


def _split(tiles: int, enough: int, steps: int) -> int:
    """Parts of K that make ``enough`` programs of so many tiles of rows of w, with two steps each at least."""
    split = 1
    while split < 8 and split * tiles < enough and steps >= 4 * split:
        split *= 2
    return split


def _in_parts(tile: MatmulTile, n: int, k: int, sm_count: int) -> MatmulTile:
    """The tile of few rows with K in parts, where tiles of rows of w do not fill the GPU."""
    split = _split(-(-n // tile.block_n), sm_count * 3 // 2, -(-k // tile.block_k))
    # Programs of little K have no use for another stage.
    return replace(tile, split_k=split, num_stages=min(tile.num_stages, 3) if split > 1 else tile.num_stages)


def _of_64_rows(n: int, k: int, kind: Kind, sm_count: int) -> MatmulTile:
    """The tile of up to 64 rows, as measured on an H200.

    Where most multiprocessors have a program, parts of K cost more to add up than they save, until programs of 128
    columns fill the GPU.
    """
    folds = kind.operand == "e4m3"
    if folds and 4 * -(-n // 128) >= 3 * sm_count:
        return replace(_tile(64, 128, _COLUMNS, 4, 4), split_k=2 if k >= _LONG_K else 1)
    tiles = -(-n // 64)
    split = _split(tiles, sm_count, k // _COLUMNS) if 3 * tiles < 2 * sm_count else 1
    if split > 1 or folds:
        return replace(_tile(64, 64, _COLUMNS, 4, 6 if split == 1 else 4), split_k=split)
    return _tile(64, 64, _COLUMNS, 4, 4) if kind.words >= 4 else _tile(64, 64, 2 * _COLUMNS, 4, 3)


def _fitted(tile: MatmulTile, halves: int, kind: Kind, capability: int) -> MatmulTile:
    """The tile with as many stages, and if need be as short a step of K, as shared memory allows.

    Packed weights leave it a step earlier than x, which the tensor core reads there.
    """

    def bytes_of(stages: int, block_k: int) -> int:
        w = halves * tile.block_n * (block_k // 2 + block_k // _COLUMNS * 4 * kind.words)
        return stages * tile.block_m * block_k * kind.x_bytes + max(stages - 1, 1) * w

    stages, block_k, limit = tile.num_stages, tile.block_k, shared_memory(capability)
    while bytes_of(stages, block_k) > limit and (stages > 2 or block_k > _COLUMNS):
        if stages > 2:
            stages -= 1
        else:
            block_k //= 2
    return replace(tile, num_stages=stages, block_k=block_k)
