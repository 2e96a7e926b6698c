"""Tiles worth measuring: legal ones around the heuristic's, ranked by a model of a GPU; pure functions.

The model is a filter, not a judge: it drops what cannot run (registers, shared memory) and what would leave most of the
GPU idle, so that a few measurements are enough. Its constants are an H200's, and only ratios count.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pallas_kernels.tuning.heuristics import SHORT_STEPS, MatmulTile, Operands, shared_memory
from pallas_kernels.tuning.moe_heuristics import MoETiles

_BYTES = {"fp8": (1, 1), "int8": (1, 1), "w8a16": (2, 1), "16bit": (2, 2), "32bit": (4, 4)}
"""Bytes an element of x and of w."""

_TFLOPS = {"fp8": 12.0, "int8": 12.0, "w8a16": 6.0, "16bit": 6.0, "32bit": 0.4}
"""Of a multiprocessor's matrix unit."""

_PROMOTED = 0.55
"""What promotion leaves of that, with warps enough."""

_L2_GBS = 90.0
_DRAM_GBS = 33.0
"""A multiprocessor's share of the L2 cache's rate and of the memory's."""

_IN_FLIGHT = 40 * 1024
"""Bytes on their way to a multiprocessor at which memory is busy all the time."""

_START = 128
"""Columns of K that a program could do while it waits for its first loads."""

_LAUNCH_US = 2.0
"""Of the second launch that a split sum needs."""

_REGISTERS = 65536
_MAX_REGISTERS = 255
_OTHER_REGISTERS = 32
"""A thread's, for all but sums; with the sums' this gives what ptxas reports for the tiles of the heuristics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What a tile is for.

    Attributes:
      m, n, k: rows, columns (of each half), and extent of the sum.
      operands: what the dots are made of.
      promoted: sums of eight-bit products are promoted to float32 along K.
      halves: products of the same rows, 2 for gate and up.
      groups: experts that are read; ``m`` is the rows of each.
      columns: the only ``block_n``, where scales of the result fix it.
      capability: compute capability times ten.
      sm_count: streaming multiprocessors.
    """

    m: int
    n: int
    k: int
    operands: Operands
    promoted: bool = False
    halves: int = 1
    groups: int = 1
    columns: int | None = None
    capability: int = 90
    sm_count: int = 132


def registers(tile: MatmulTile, problem: Problem) -> int:
    """Registers of a thread, about."""
    sums = tile.block_m * tile.block_n * problem.halves // (32 * tile.num_warps)
    waiting = sums // max(tile.pieces, problem.halves) if problem.promoted else 0
    decoded = 32 if problem.operands == "w8a16" else 0
    return sums + waiting + decoded + _OTHER_REGISTERS


def shared_bytes(tile: MatmulTile, problem: Problem) -> int:
    """Bytes of shared memory of a program's pipeline."""
    x_bytes, w_bytes = _BYTES[problem.operands]
    return tile.num_stages * tile.block_k * (tile.block_m * x_bytes + problem.halves * tile.block_n * w_bytes)


def is_legal(tile: MatmulTile, problem: Problem) -> bool:
    """Whether the tile runs without spilling registers, as far as can be told without compiling it."""
    threads = 32 * tile.num_warps
    return (
        shared_bytes(tile, problem) <= shared_memory(problem.capability)
        and registers(tile, problem) <= min(_MAX_REGISTERS, _REGISTERS // threads)
        and tile.block_m * tile.block_n * problem.halves >= 8 * threads
        and (tile.pieces == 1 or tile.block_n // tile.pieces >= 64)
        and tile.split_k <= max(1, -(-problem.k // tile.block_k))
    )


def estimated_us(tile: MatmulTile, problem: Problem) -> float:
    """The model's time of a product: whole waves of programs, or memory, whichever takes longer."""
    x_bytes, w_bytes = _BYTES[problem.operands]
    rows, columns, sms = tile.block_m, tile.block_n * problem.halves, problem.sm_count
    depth = problem.k / tile.split_k
    across = -(-problem.n // (tile.block_n * tile.run))
    programs = problem.groups * -(-problem.m // rows) * across * tile.split_k
    beside = _beside(tile, problem, programs)
    warps = beside * tile.num_warps
    busy = _PROMOTED * min(1.0, 0.6 + 0.025 * warps) if problem.promoted else min(1.0, 0.7 + 0.04 * warps)
    if problem.promoted:  # more often where steps are short
        busy *= min(1.0, 0.5 + tile.block_k / 256)
    if rows >= 64:  # narrow dots of each group of four warps wait for shared memory
        busy *= min(1.0, 0.5 + rows * columns / (16 * tile.num_warps) / 256)
    computing = 2 * rows * columns * depth / (_TFLOPS[problem.operands] * busy) * 1e-6
    loading = (rows * x_bytes + columns * w_bytes) * depth / _L2_GBS * 1e-3
    work = max(computing, loading) * (tile.run + _START / depth)
    waves = -(-programs // (sms * beside)) * beside * work
    flying = shared_bytes(tile, problem) * (tile.num_stages - 1) / tile.num_stages * min(programs, sms * beside)
    weights = problem.groups * problem.n * problem.halves * problem.k * w_bytes
    reading = weights / (_DRAM_GBS * sms * min(1.0, flying / (_IN_FLIGHT * sms))) * 1e-3
    summing = 0.0
    if tile.split_k > 1:
        parts = 2 * tile.split_k * problem.groups * problem.m * problem.n * problem.halves * 4
        summing = _LAUNCH_US + parts / (_DRAM_GBS * sms) * 1e-3
    return max(waves, reading) + summing


def _beside(tile: MatmulTile, problem: Problem, programs: int) -> int:
    """Programs that share a multiprocessor."""
    memory = (shared_memory(problem.capability) + 1024) // (shared_bytes(tile, problem) + 1024)
    by_registers = _REGISTERS // (registers(tile, problem) * 32 * tile.num_warps)
    return max(1, min(memory, by_registers, 64 // tile.num_warps, -(-programs // problem.sm_count)))


def _space(base: MatmulTile, heights: Iterable[int], problem: Problem, *, splits: bool) -> Iterator[MatmulTile]:
    """Legal tiles of those heights; what is not varied is as in ``base``."""
    widths = (problem.columns,) if problem.columns is not None else (64, 128, 256)
    steps = sorted({base.block_k, max(32, base.block_k // 2)}, reverse=True)
    parts = (1, 2, 4, 8, 16) if splits else sorted({1, base.split_k})
    pieces = (1, 2) if problem.promoted and problem.halves == 1 else (1,)
    for block_m, block_n, block_k in itertools.product(heights, widths, steps):
        runs = _runs(base, block_n, problem)
        for warps, stages, split, piece, run in itertools.product((4, 8, 16), (2, 3, 4, 5), parts, pieces, runs):
            for swap in _orientations(block_m, problem):
                tile = replace(
                    base,
                    block_m=block_m,
                    block_n=block_n,
                    block_k=block_k,
                    num_warps=warps,
                    num_stages=stages,
                    split_k=split,
                    swap=swap,
                    pieces=piece,
                    run=run,
                )
                if is_legal(tile, problem) and (split == 1 or run == 1):
                    yield tile


def _runs(base: MatmulTile, block_n: int, problem: Problem) -> list[int]:
    """Tiles that a program may make: one, those of the heuristic, and where K is short numbers that divide a row's."""
    if problem.groups == 1 or problem.halves > 1 or problem.k > SHORT_STEPS * base.block_k:
        return sorted({1, base.run})
    across = -(-problem.n // block_n)
    even = {max(run for run in range(1, most + 1) if across % run == 0) for most in (1, 4, 8, 16)}
    return sorted({base.run, *even})


def _orientations(block_m: int, problem: Problem) -> tuple[bool, ...]:
    if problem.operands == "32bit":
        return (False,)
    if problem.operands == "w8a16" and problem.capability >= 90:
        return (True,)  # what is decoded is fed from registers only as the left operand
    if block_m <= 32:
        return (True, False)
    return (False, True) if block_m == 64 and problem.m <= 64 else (False,)


def _best(base: MatmulTile, space: Iterable[MatmulTile], problem: Problem, count: int) -> list[MatmulTile]:
    """``base``, and the best others, each of another kind: what differs in stages or steps alone is one kind."""

    def rank(tile: MatmulTile) -> tuple[float, int]:
        changed = sum(getattr(tile, name) != getattr(base, name) for name in ("num_warps", "block_k", "swap", "pieces"))
        changed += abs(tile.num_stages - base.num_stages)
        return estimated_us(tile, problem) * (1 + 0.01 * changed), -tile.num_stages

    found, kinds = [base], set()
    for tile in sorted(space, key=rank):
        kind = replace(tile, num_stages=1, block_k=1)
        if len(found) < count and tile != base and kind not in kinds:
            kinds.add(kind)
            found.append(tile)
    return found


def matmul_candidates(base: MatmulTile, problem: Problem, count: int) -> list[MatmulTile]:
    """At most ``count`` tiles of a dense product, the heuristic's ``base`` first."""
    few = problem.m <= 64
    heights = {base.block_m, *((max(16, _power_of_two(problem.m)),) if few else (64, 128))}
    return _best(base, _space(base, sorted(heights), problem, splits=few), problem, count)


def packed_candidates(base: MatmulTile, problem: Problem, count: int) -> list[MatmulTile]:
    """At most ``count`` tiles of a product with packed four-bit weights: ``base``, and its neighbours.

    Four bits a weight are shared memory's, and steps of K stay multiples of 128, the columns of a packed tile.
    """
    steps = -(-problem.k // base.block_k)
    few = problem.m <= 64 and (problem.groups == 1 or base.split_k > 1)
    moves: list[dict[str, Any]] = [
        {"run": 1, "num_stages": 4} if base.run > 1 else {},
        {"short": 16 if base.short == 32 else 32} if base.block_m == 64 and base.short else {},
        {"split_k": 1 if problem.groups > 1 else max(1, base.split_k // 2)},
        {"num_stages": base.num_stages + 1},
        {"block_k": base.block_k // 2},
        {"num_stages": base.num_stages - 1},
        {"block_k": base.block_k * 2},
        {"split_k": base.split_k * 2} if few and steps >= 4 * base.split_k else {},
        {"block_n": base.block_n * 2, "num_warps": base.num_warps * 2, "run": max(1, base.run // 2)},
    ]
    x_bytes, _ = _BYTES[problem.operands]
    found = [base]
    for move in moves:
        tile = replace(base, **move)
        size = tile.num_stages * tile.block_k * (2 * tile.block_m * x_bytes + problem.halves * tile.block_n) // 2
        fits = size <= shared_memory(problem.capability) and tile.num_stages >= 2 and tile.num_warps <= 8
        if fits and tile.block_k >= 128 and tile not in found and len(found) < count:
            found.append(tile)
    return found


def moe_candidates(
    bases: Sequence[MoETiles], first: Problem, second: Problem, count: int, *, packed: bool = False
) -> list[MoETiles]:
    """At most ``count`` pairs of tiles of a layer of experts, the heuristic's first.

    The i-th tiles of both products make a pair: a product's time does not depend on the other's tile, but for the
    height that both share and the kind of kernel.

    Args:
      bases: the heuristic's tiles for this row count, and for others nearby; those of another height or kind than the
        first are candidates as they are.
      first, second: the products; ``m`` is the rows of an expert on average.
      count: at least 1.
      packed: weights are four-bit codes.
    """
    base = bases[0]
    others: dict[tuple[int, bool], MoETiles] = {}
    for other in bases[1:]:
        if _height(other) != _height(base):
            others.setdefault(_height(other), other)
    chosen = list(others.values())[: (count - 1) // 2]
    own = count - len(chosen)
    tiles = []
    for tile, problem in ((base.first, first), (base.second, second)):
        if base.single:
            tiles.append(_of_vectors(tile, problem, own))
        elif packed:
            tiles.append(packed_candidates(tile, problem, own))
        else:
            tiles.append(_best(tile, _space(tile, (tile.block_m,), problem, splits=False), problem, own))
    pairs = [replace(base, first=a or base.first, second=b or base.second) for a, b in itertools.zip_longest(*tiles)]
    return [*pairs, *chosen]


def _height(tiles: MoETiles) -> tuple[int, bool]:
    return tiles.first.block_m, tiles.single


def _of_vectors(base: MatmulTile, problem: Problem, count: int) -> list[MatmulTile]:
    """Tiles of programs that multiply some rows with a vector: ``base``, and wider, longer and larger ones."""
    found = [base]
    for rows, columns, warps in ((2, 0.5, 1), (0.5, 2, 1), (1, 2, 2), (1, 0.5, 0.5), (2, 1, 2), (0.5, 1, 0.5)):
        tile = replace(
            base,
            block_n=int(base.block_n * rows),
            block_k=int(base.block_k * columns),
            num_warps=int(base.num_warps * warps),
        )
        fits = tile.block_n >= 1 and 128 <= tile.block_k <= _power_of_two(problem.k) and 1 <= tile.num_warps <= 8
        if fits and len(found) < count:
            found.append(tile)
    return found


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
