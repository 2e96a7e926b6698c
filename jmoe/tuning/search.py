"""Tiles measured on the device: a few candidates for each operation, the fastest of which go to a file.

The file is what ``jmoe.config(tuning=path)`` takes. It is written after every operation, and one that it has already is
not measured again, so that an interrupted run goes on where it was.
"""

import dataclasses
import datetime
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jmoe.backends import triton, tuned
from jmoe.backends.select import as_device, select
from jmoe.backends.spec import DeviceSpec, OpSpec
from jmoe.progress import Progress, steps
from pallas_kernels.tuning import candidates, table
from pallas_kernels.tuning.heuristics import MatmulTile
from pallas_kernels.tuning.moe_heuristics import MoETiles
from pallas_kernels.tuning.timing import Kernels

CANDIDATES = 4

Measure = Callable[[OpSpec, Sequence[table.Tiles]], Sequence[Kernels | None]]
"""Kernels' times of an operation with each of some tiles, None where these do not compile or run."""

_GAIN = 0.99
"""Of the heuristic's time; what does not get below it is noise, and the heuristic's tiles stay."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What was measured for an operation.

    Attributes:
      op: the operation.
      entry: the fastest tiles, as they went to the file.
      tried: each of the tiles with its kernels' times, None where they did not run.
    """

    op: OpSpec
    entry: table.Entry
    tried: tuple[tuple[table.Tiles, Kernels | None], ...]


def tune(
    ops: Iterable[OpSpec],
    path: str | Path,
    *,
    count: int = CANDIDATES,
    again: bool = False,
    device: DeviceSpec | jax.Device | str | None = None,
    measure: Measure | None = None,
    progress: Progress | None = None,
) -> list[Trial]:
    """Measures candidates of each operation and writes the fastest to a file.

    Args:
      ops: what to tune, as ``jmoe.explain`` shows operations or ``jmoe.tuning.operations`` makes them for a model.
      path: of a file, new or from an earlier run; entries for other operations and devices stay.
      count: candidates an operation, at least 1; the heuristic's is one of them.
      again: measure what the file has already.
      device: what the tiles are for, the current device by default; another one takes a ``measure`` of its own.
      measure: how to measure, on this device's own kernels by default.
      progress: called with (description, done, total) instead of a bar on standard error.

    Returns:
      A Trial for each operation that was measured.

    Raises:
      ValueError: the device is no NVIDIA GPU, or the file is no table, or ``count`` is below 1.
      NotImplementedError: an operation that the kernels do not serve there, with the reason.
    """
    if count < 1:
        raise ValueError(f"count={count!r} must be at least 1")
    spec = as_device(device)
    if spec.platform != "cuda":
        raise ValueError(f"tiles are measured on an NVIDIA GPU, and this is {spec.describe()}")
    if measure is None:
        from jmoe.tuning.on_device import OnDevice

        measure = OnDevice()
    work = [plan_of(op, spec, count) for op in ops]
    entries = list(_entries(path))
    known = set() if again else {(entry.key, entry.tokens) for entry in entries}
    work = [each for each in work if (each.key, each.op.tokens) not in known]
    trials = []
    with steps(progress) as tell:
        for done, each in enumerate(work):
            tell(each.op.describe(), done, len(work))
            trial = _trial(each, measure)
            trials.append(trial)
            entries = [e for e in entries if (e.key, e.tokens) != (trial.entry.key, trial.entry.tokens)]
            entries.append(trial.entry)
            table.save(path, entries)
        tell("done", len(work), len(work))
    return trials


def _entries(path: str | Path) -> Iterable[table.Entry]:
    if not Path(path).exists():
        return []
    return [entry for entries in table.load(path).values() for entry in entries]


@dataclass(frozen=True, kw_only=True)
class Work:
    """An operation with its accumulation, what tables know it by, and tiles to try, the heuristic's first."""

    op: OpSpec
    key: table.Key
    tiles: tuple[table.Tiles, ...]


def plan_of(op: OpSpec, device: DeviceSpec | str, count: int = CANDIDATES) -> Work:
    """What ``tune`` would measure for an operation on a device, here or not.

    Raises:
      ValueError: an operation whose tiles may not depend on what was measured, or whose experts are elsewhere in part.
      NotImplementedError: the kernels do not serve it there, with the reason.
    """
    device = as_device(device)
    selection = select(op, device, implementation=triton.NAME)
    op = op.replace(accumulation=selection.accumulation)
    key = tuned.key_of(op, device, selection.accumulation)
    if key is None or op.batch_invariant or op.tokens < 1:
        raise ValueError(
            f"{op.describe()} is not tuned: it has no tokens, fixed tiles, two recipes or part of the experts"
        )
    heuristic = functools.partial(_heuristic, op, device)
    packed = op.recipe.weight is not None and op.recipe.weight.format in ("int4", "e2m1")
    if op.op == "linear":
        base = heuristic(op.tokens)
        assert isinstance(base, MatmulTile)
        of = candidates.packed_candidates if packed else candidates.matmul_candidates
        tiles: list[table.Tiles] = [*of(base, _problem(op, device, op.features), count)]
    else:
        around = (op.tokens, 4 * op.tokens, max(1, op.tokens // 4))
        first = _problem(op, device, op.intermediate)
        second = dataclasses.replace(first, n=op.hidden, k=op.intermediate, halves=1, columns=None)
        bases = [heuristic(t) for t in around]
        tiles = [*candidates.moe_candidates(bases, first, second, count, packed=packed)]
    return Work(op=op, key=key, tiles=tuple(tiles))


def _heuristic(op: OpSpec, device: DeviceSpec, tokens: int) -> Any:
    assert op.accumulation is not None
    parts = dict(triton.heuristic_tiles(op.replace(tokens=tokens), device, op.accumulation))
    return parts["tile"] if op.op == "linear" else MoETiles(**parts)


def _problem(op: OpSpec, device: DeviceSpec, columns: int) -> candidates.Problem:
    """The (first) product of an operation."""
    x = op.recipe.input
    operands = triton.operands_of(op)
    rows, read, fixed = op.tokens, 1, None
    if op.op != "linear":
        slots = op.tokens * (op.top_k if op.op == "moe" else op.experts)
        read = max(1, min(op.experts, slots))
        rows = -(-slots // read)
        group = x.block[1] if x is not None else -1
        fixed = group if group in (32, 64, 128) else None
    return candidates.Problem(
        m=rows,
        n=columns,
        k=op.hidden,
        operands=operands,
        promoted=_promoted(op),
        halves=2 if op.op != "linear" and op.gated else 1,
        groups=read,
        columns=fixed,
        capability=device.compute_capability,
        sm_count=device.sm_count,
    )


def _promoted(op: OpSpec) -> bool:
    """Whether sums leave the matrix unit along K: for scales that change there, or to be exact."""
    weight, x = op.recipe.weight, op.recipe.input
    if weight is None or x is None:
        return False
    return weight.block[1] != -1 or x.block[1] != -1 or (weight.format == "e4m3" and op.accumulation == "exact")


def describe_tiles(tiles: table.Tiles) -> str:
    """One line."""
    parts = [f"{name} {value}" for name, value in table.parts(tiles) if not isinstance(value, bool)]
    return ", ".join(parts + [name for name, value in table.parts(tiles) if value is True])


def _trial(work: Work, measure: Measure) -> Trial:
    measured = measure(work.op, work.tiles)
    if measured[0] is None:
        raise ValueError(f"{work.op.describe()}: the heuristic's tiles {work.tiles[0]} do not run")
    ran = [(tiles, kernels) for tiles, kernels in zip(work.tiles, measured, strict=True) if kernels is not None]
    own = _sum(measured[0])
    tiles, us = _fastest(ran)
    if us > _GAIN * own:
        tiles, us = work.tiles[0], own
    entry = table.Entry(
        key=work.key,
        tokens=work.op.tokens,
        tiles=tiles,
        us=round(us, 2),
        heuristic_us=round(own, 2),
        date=datetime.date.today().isoformat(),
        jax=jax.__version__,
    )
    return Trial(op=work.op, entry=entry, tried=tuple(zip(work.tiles, measured, strict=True)))


def _sum(kernels: Kernels) -> float:
    return sum(us for _, us in kernels)


def _fastest(ran: Sequence[tuple[table.Tiles, Kernels]]) -> tuple[table.Tiles, float]:
    """The fastest tiles: of a layer of experts the fastest of each product, among those whose blocks are as high."""
    whole = min(((tiles, _sum(kernels)) for tiles, kernels in ran), key=lambda found: found[1])
    groups: dict[tuple[int, bool], list[tuple[MoETiles, float, float, float]]] = {}
    for tiles, kernels in ran:
        first, second = (sum(us for name, us in kernels if name.startswith(p)) for p in ("moe_first", "moe_second"))
        if isinstance(tiles, MatmulTile) or not (first and second):
            return whole
        rest = _sum(kernels) - first - second
        groups.setdefault((tiles.first.block_m, tiles.single), []).append((tiles, first, second, rest))
    best = whole
    for members in groups.values():
        first_of = min(members, key=lambda member: member[1])
        # What follows the second product adds up its shares of K.
        shares = {tiles.second.split_k for tiles, *_ in members}
        rest_of = {n: min(rest for tiles, _, _, rest in members if tiles.second.split_k == n) for n in shares}
        seconds = [(second + rest_of[tiles.second.split_k], tiles.second) for tiles, _, second, _ in members]
        us, tile = min(seconds, key=lambda found: found[0])
        if first_of[1] + us < best[1]:
            best = dataclasses.replace(first_of[0], second=tile), first_of[1] + us
    return best
