"""``jmoe tune``: what its options name, and the tables that it prints."""

import re
from collections.abc import Iterable, Sequence

from rich.table import Table

from jmoe.backends.spec import DeviceSpec, OpSpec
from jmoe.scheme import Recipe
from jmoe.tuning import catalogue
from jmoe.tuning.search import Trial, describe_tiles, plan_of


def operations_to_tune(
    models: Iterable[str],
    moe: Iterable[str],
    linear: Iterable[str],
    recipes: Sequence[Recipe],
    tokens: str,
    part: str,
) -> list[OpSpec]:
    """The operations that the options of ``jmoe tune`` name, each once; raises ValueError for wrong ones."""
    if part not in ("experts", "linears", "all"):
        raise ValueError(f"--part {part!r} must be experts, linears or all")
    rows = _numbers("--tokens", tokens, ",")
    shapes = [catalogue.model(name) for names in models for name in names.split(",")]
    layers = [_numbers("--moe", text, "x", 4) for text in moe]
    pairs = [_numbers("--linear", text, "x", 2) for text in linear]
    if not (shapes or layers or pairs):
        raise ValueError("nothing to tune: give a --model, or shapes with --moe or --linear")
    ops: list[OpSpec] = []
    for how in recipes:
        for each in shapes:
            ops += [op for op in catalogue.operations(each, how, rows) if part in ("all", _PARTS[op.op])]
        for h, i, e, k in layers:
            if k > e:
                raise ValueError(f"--moe {h}x{i}x{e}x{k}: k is more than E")
            sizes = catalogue.ModelShapes(hidden=h, intermediate=i, experts=e, top_k=k, linears=())
            ops += catalogue.operations(sizes, how, rows)
        ops += [catalogue.linear(n, k, how, t) for n, k in pairs for t in rows]
    return list(dict.fromkeys(ops))


_PARTS = {"moe": "experts", "linear": "linears"}


def _numbers(option: str, text: str, between: str, count: int | None = None) -> list[int]:
    parts = text.split(between)
    if not all(re.fullmatch(r"[1-9]\d{0,8}", part) for part in parts) or (count or len(parts)) != len(parts):
        form = f"{count or 'some'} positive numbers with {between!r} between them"
        raise ValueError(f"{option} {text!r} must be {form}")
    return [int(part) for part in parts]


def candidate_table(ops: Iterable[OpSpec], device: DeviceSpec, count: int) -> Table:
    """What ``tune`` would measure for each."""
    table = Table(title=f"tiles to measure on {device.describe()}")
    for heading in ("operation", "tiles"):
        table.add_column(heading, overflow="fold")
    for op in ops:
        work = plan_of(op, device, count)
        table.add_row(op.describe(), "\n".join(map(describe_tiles, work.tiles)))
    return table


def tried_table(trials: Iterable[Trial]) -> Table:
    """Every candidate of each operation, the fastest first, with the microseconds of its kernels."""
    table = Table(title="microseconds of every candidate")
    for heading in ("operation", "tiles"):
        table.add_column(heading, overflow="fold")
    for heading in ("sum", "kernels"):
        table.add_column(heading, justify="right")
    for trial in trials:
        sums = [float("inf") if kernels is None else sum(us for _, us in kernels) for _, kernels in trial.tried]
        for total, (tiles, kernels) in sorted(zip(sums, trial.tried, strict=True), key=lambda found: found[0]):
            each = "does not run" if kernels is None else ", ".join(f"{name} {us:.1f}" for name, us in kernels)
            table.add_row(trial.op.describe(), describe_tiles(tiles), "" if kernels is None else f"{total:.1f}", each)
    return table


def trial_table(trials: Iterable[Trial]) -> Table:
    """Times and tiles of each operation."""
    table = Table(title="microseconds of the heuristic's tiles and of the fastest")
    table.add_column("operation", overflow="fold")
    for heading in ("heuristic", "fastest", "gain"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("tiles", overflow="fold")
    for trial in trials:
        entry = trial.entry
        gain = f"{1 - entry.us / entry.heuristic_us:.0%}"
        tiles = describe_tiles(entry.tiles)
        table.add_row(trial.op.describe(), f"{entry.heuristic_us:.1f}", f"{entry.us:.1f}", gain, tiles)
    return table
