"""Tiles that were measured for an operation on a device, from the user's file or the package's."""

import functools
from typing import Any

from jmoe.backends.spec import Accumulation, DeviceSpec, OpSpec
from jmoe.config import config
from jmoe.scheme import Recipe, recipe_of
from pallas_kernels.tuning import table

Tiles = tuple[tuple[str, Any], ...]


def find(op: OpSpec, device: DeviceSpec, accumulation: Accumulation) -> tuple[Tiles, str] | None:
    """Tiles, and where they are from; None where nothing near was measured.

    What ``jmoe.config.tuning`` names is asked first. Tiles that may not depend on the row count are never looked up.
    """
    key = key_of(op, device, accumulation)
    if key is None or op.batch_invariant:
        return None
    tables = [table.shipped()] if config.tuning is None else [table.load(config.tuning.path), table.shipped()]
    for each in tables:
        entry = table.nearest(each.get(key, ()), op.tokens)
        if entry is not None:
            rows = "M" if op.op == "linear" else "T"
            origin = f"tuned for {device.sm_count} SMs sm{device.compute_capability}, {rows}={entry.tokens}"
            return table.parts(entry.tiles), origin
    return None


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
