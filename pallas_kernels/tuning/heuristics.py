"""First choices of tiles from shapes and device facts; pure functions, no GPU needed."""

import math
from dataclasses import dataclass, replace
from typing import Literal

Operands = Literal["fp8", "int8", "w8a16", "16bit", "32bit"]
"""What a product's dots are made of: two e4m3 or int8 operands, such weights made 16-bit in the kernel, or floats."""


@dataclass(frozen=True, kw_only=True)
class MatmulTile:
    """What one program of a dense product computes, and how.

    Attributes:
      block_m, block_n, block_k: rows of x, rows of w and step of K; powers of two, at least 16 (block_k 32 for FP8).
      num_warps: warps a program.
      num_stages: stages of the pipeline that loads operands.
      group: row blocks that go through all columns together while a column's operand is in the L2 cache.
      split_k: parts of K, summed in fixed order by a second launch, or where a token's experts are.
      swap: w on the tensor core's M side and x on its N side, which may be as short as 16.
      pieces: of ``block_n``, that go through the tensor core one after the other; sums that wait for their scales take
        the registers of one piece.
      run: tiles of columns that a program of a layer of experts makes one after the other, while the next one's
        operands are on their way; for a K of few steps, and promoted sums of many short programs.
      short: rows that a program of a layer of experts computes where its block has no more; 0 is always ``block_m``. As
        many as ``block_m`` is the tile of those rows itself.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8
    split_k: int = 1
    swap: bool = False
    pieces: int = 1
    run: int = 1
    short: int = 0

    def __str__(self) -> str:
        parts = [
            f"{self.block_m}x{self.block_n}x{self.block_k}",
            f"{self.num_warps} warps",
            f"{self.num_stages} stages",
        ]
        parts += [f"K split in {self.split_k}"] if self.split_k > 1 else []
        parts += [f"{self.pieces} pieces"] if self.pieces > 1 else []
        parts += [f"{self.run} a program"] if self.run > 1 else []
        parts += [f"or {self.short} rows"] if self.short else []
        return " ".join(parts + (["swapped"] if self.swap else []))


SHORT_STEPS = 2
"""Steps of K of weights that are not packed that a run of tiles writes out, so that x is read once."""

_SHARE = 10
"""Steps of K that a share has at least."""

_SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB of shared memory a block can have, by compute capability (CUDA C++ programming guide, table of technical
specifications)."""

_BYTES = {"fp8": (1, 1), "int8": (1, 1), "w8a16": (2, 1), "16bit": (2, 2), "32bit": (4, 4)}
"""Bytes an element of x and of w."""


def shared_memory(capability: int) -> int:
    """Bytes of shared memory a program can use; an unknown GPU is taken for a small one."""
    return _SHARED_MEMORY.get(capability, 99) * 1024


def even_shares(programs: float, steps: int, sm_count: int) -> int:
    """Shares of K with which few programs give all multiprocessors as much to do; 1 where that gains less than 10%.

    The multiprocessor with most programs decides; two run side by side, and the last of an odd number alone takes half
    as long again. ``programs`` are so many on average. Of shares that are about as good the fewest are chosen, since
    the sums of each are written and read.
    """
    if programs > 4 * sm_count:
        return 1

    def cost(shares: int) -> float:
        most = math.ceil(programs * shares / sm_count)
        return (most + most % 2 / 2) / shares

    costs = {shares: cost(shares) for shares in (1, 2, 4) if shares == 1 or steps >= _SHARE * shares}
    least = min(costs.values())
    if least > 0.9 * costs[1]:
        return 1
    return min(shares for shares in costs if costs[shares] <= 1.05 * least)


def step_of_k(cell: int | None, limit: int) -> int:
    """The K step for operands with one scale for each ``cell`` of K (None: one for all of it), at most ``limit``.

    A power of two from 32 that divides the cell if there is one, else one that covers it with masked lanes.
    """
    if cell is None:
        return limit
    divisor = cell & -cell
    if divisor >= 32:
        return min(divisor, limit)
    return min(max(32, 1 << (cell - 1).bit_length()), limit)


def matmul_tile(
    m: int,
    n: int,
    k: int,
    *,
    operands: Operands,
    cell: int | None = None,
    exact: bool = False,
    capability: int = 90,
    sm_count: int = 132,
    batch_invariant: bool = False,
) -> MatmulTile:
    """Tile of a dense product (M, K) x (N, K).

    Args:
      m, n, k: the product's extents.
      operands: what the dots are made of.
      cell: columns of K that share all scales applied inside the loop, None where no scale is.
      exact: FP8 sums are promoted to float32 at least every 128 of K.
      capability: compute capability times ten.
      sm_count: streaming multiprocessors.
      batch_invariant: the choice may not depend on ``m``.
    """
    block_k = step_of_k(cell, {"16bit": 64, "32bit": 32}.get(operands, 128))
    if batch_invariant:
        return _fitted(_tile(64, 128, block_k, 4, 4, operands, capability), operands, capability)
    promoted = (operands == "fp8" and exact) or (operands in ("fp8", "int8") and cell is not None)
    if m <= 64:
        return _fitted(_few_rows(m, n, k, block_k, operands, promoted, sm_count), operands, capability)
    if operands == "w8a16" and capability == 90:
        block_k = min(block_k, 64)
    candidates = _many_rows(block_k, operands, promoted, k % block_k != 0, capability, scaled=cell is not None)
    best = min(candidates, key=lambda candidate: _time(candidate, m, n, k, sm_count))[0]
    blocks = -(-m // best.block_m)
    return _fitted(replace(best, group=16 if blocks * best.block_m >= 4096 else 8), operands, capability)


def _tile(
    block_m: int, block_n: int, block_k: int, warps: int, stages: int, operands: Operands, capability: int
) -> MatmulTile:
    # On Hopper w8a16's decoded operand is fed from registers only as the tensor core's left one.
    swap = operands == "w8a16" and capability >= 90
    return MatmulTile(block_m=block_m, block_n=block_n, block_k=block_k, num_warps=warps, num_stages=stages, swap=swap)


def _few_rows(m: int, n: int, k: int, block_k: int, operands: Operands, promoted: bool, sm_count: int) -> MatmulTile:
    """Bound by reading w: every multiprocessor gets a share of w, by splitting K where N is short."""
    block_m = max(16, 1 << (m - 1).bit_length())
    if operands == "32bit":
        return MatmulTile(block_m=block_m, block_n=32, block_k=block_k, num_warps=4, num_stages=3)
    block_n = 128 if -(-n // 128) >= sm_count else 64
    tiles, steps = -(-n // block_n), -(-k // block_k)
    # With 64 rows of codes, summing the parts takes long beside what a share of K saves.
    high = block_m == 64 and operands in ("fp8", "int8")
    split, fewest = 1, 24 if high else 8
    splits = not high or 5 * tiles < 4 * sm_count
    while splits and split < 16 and split * tiles <= sm_count and steps >= fewest * split:
        split *= 2
    alone = high and block_n == 64
    return MatmulTile(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        num_warps=4,
        num_stages=6 if alone else 4,
        split_k=split,
        swap=not (alone and promoted),
    )


def _many_rows(
    block_k: int, operands: Operands, promoted: bool, ragged: bool, capability: int, *, scaled: bool
) -> list[tuple[MatmulTile, float, float]]:
    """Candidates: larger ones do more work a byte, smaller ones fill the last wave.

    With each its rate on a full GPU, relative to others of its operands, and what its start and end take, in K; both as
    measured on an H200.
    """

    def tile(block_m: int, block_n: int, warps: int, stages: int) -> MatmulTile:
        return _tile(block_m, block_n, block_k, warps, stages, operands, capability)

    if operands == "32bit":
        return [(tile(64, 64, 4, 3), 1, 0)]
    small = [(tile(64, 128, 4, 4), 0.72, 0.0), (tile(64, 64, 4, 4), 0.5, 0.0)]
    if operands == "w8a16" and capability == 90:
        # Decoding takes as long as the product, unless rows are many or two programs take turns.
        low = [(tile(128, 64, 4, 4), 0.78, 0.0), (tile(64, 64, 4, 4), 0.5, 0.0)]
        return low if scaled else [(tile(256, 64, 4, 3), 1, 0.0), *low]
    if capability < 90 or operands == "w8a16":
        return [(tile(128, 128, 8, 3), 0.85, 0), *small]
    if operands == "int8" and capability == 90 and not promoted:
        # Every product is waited for, so that two programs take turns.
        return [(tile(128, 128, 4, 3), 1, 0), (tile(128, 256, 8, 3), 0.84, 0), (tile(64, 128, 4, 4), 0.63, 0), small[1]]
    if not promoted:
        return [(tile(128, 256, 8, 3), 1, 0), (tile(128, 128, 4, 3), 0.9, 0), *small]
    if capability > 90:
        return [(tile(128, 128, 8, 3), 0.85, 0), *small]
    # Promotion takes the registers of a second sum and the tensor core's time, unless other warps keep it busy: three
    # programs of 64 rows share a multiprocessor, as do the 16 warps of a large tile in pieces.
    shared = [(tile(128, 128, 8, 3), 0.83, 0.0), (tile(64, 128, 4, 3), 0.97, 0.0), (small[1][0], 0.55, 0.0)]
    if ragged:  # a masked last step takes registers that a large tile has not
        return shared
    return [(replace(tile(128, 256, 16, 3), pieces=2), 1, 256), *shared]


def _time(candidate: tuple[MatmulTile, float, float], m: int, n: int, k: int, sm_count: int) -> float:
    """Time in arbitrary units: whole waves of tiles, each as long as its work at the tile's rate."""
    tile, rate, overhead = candidate
    tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
    work = tile.block_m * tile.block_n * (k + overhead) / rate
    if tile.num_warps > 4:
        return -(-tiles // sm_count) * work
    if tile.num_stages == 3 and tile.block_m == 64:
        return (-(-tiles // sm_count) + 0.7) * work  # three share a multiprocessor, and the last are alone
    return -(-tiles // (2 * sm_count)) * 2 * work  # two do


def _fitted(tile: MatmulTile, operands: Operands, capability: int) -> MatmulTile:
    """The tile with as many stages, and if need be as long a step of K, as shared memory allows."""
    x_bytes, w_bytes = _BYTES[operands]
    limit = shared_memory(capability)
    stages, block_k = tile.num_stages, tile.block_k
    while stages * block_k * (tile.block_m * x_bytes + tile.block_n * w_bytes) > limit:
        if stages > 2:
            stages -= 1
        else:
            block_k //= 2
    return replace(tile, num_stages=stages, block_k=block_k)
