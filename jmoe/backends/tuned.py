"""Tiles that were measured for an operation on a device, from the user's file or the package's."""

import functools
from typing import Any

from jmoe.backends import packed
from jmoe.backends.spec import Accumulation, DeviceSpec, OpSpec
from jmoe.config import config
from jmoe.scheme import Recipe, recipe_of
from pallas_kernels.fourbit.packing import COLUMNS
from pallas_kernels.tuning import table
from pallas_kernels.tuning.heuristics import MatmulTile

Tiles = tuple[tuple[str, Any], ...]


def find(op: OpSpec, device: DeviceSpec, accumulation: Accumulation, *, few: bool = True) -> tuple[Tiles, str] | None:
    """Tiles, and where they are from; None where nothing near was measured.

    What ``jmoe.config.tuning`` names is asked first. Tiles that may not depend on the row count are never looked up;
    without ``few``, nor are those that only few tokens have: of products with vectors, and of K in shares.
    """
    key = key_of(op, device, accumulation)
    if key is None or op.batch_invariant:
        return None
    tables = [table.shipped()] if config.tuning is None else [table.load(config.tuning.path), table.shipped()]
    for each in tables:
        entries = each.get(key, ())
        entry = table.nearest(entries if few else [e for e in entries if not table.is_of_few(e)], op.tokens)
        if entry is not None:
            _check_packed(op, entry)
            rows = "M" if op.op == "linear" else "T"
            origin = f"tuned for {device.sm_count} SMs sm{device.compute_capability}, {rows}={entry.tokens}"
            return table.parts(entry.tiles), origin
    return None


def _check_packed(op: OpSpec, entry: table.Entry) -> None:
    """Raises ValueError for tiles by which the kernels of packed weights cannot compute."""
    if not packed.is_packed(op.recipe):
        return
    for name, tile in table.parts(entry.tiles):
        if isinstance(tile, MatmulTile) and (tile.block_k % COLUMNS or not (tile.swap or table.is_single(entry))):
            raise ValueError(
                f"tiles measured for {entry.key.recipe} at {entry.tokens} tokens do not serve {op.describe()}: {name} "
                f"is {tile}, but block_k is a multiple of {COLUMNS} and swap is true where weights are packed"
            )


def key_of(op: OpSpec, device: DeviceSpec, accumulation: Accumulation) -> table.Key | None:
    """What tables have entries by; None for operations that none has: experts in part, or of two recipes."""
    if op.second_recipe not in (None, op.recipe) or op.global_experts != op.experts:
        return None
    return table.Key(
        compute_capability=device.compute_capability,
        sm_count=device.sm_count,
        op=op.op,
        recipe=_name(op.recipe),
        accumulation=accumulation,
        dtype=op.dtype,
        hidden=op.hidden,
        features=op.features,
        intermediate=op.intermediate,
        experts=op.experts,
        top_k=op.top_k,
        gated=op.gated,
    )


@functools.lru_cache(maxsize=256)
def _name(recipe: Recipe) -> str:
    """The name that its schemes have, whatever it calls itself."""
    return recipe_of(recipe.weight, recipe.input).name
