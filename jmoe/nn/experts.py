"""Expert weights in the layouts that models have them in, brought to (E, halves, I, H) and (E, H, I) and quantized."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jmoe.arguments import as_array, type_of
from jmoe.qtensor import QTensor
from jmoe.quantize import quantize
from jmoe.scheme import Recipe

Parts = tuple[Array, ...]


def first_weight(w13: Array | tuple[Array, Array], recipe: Recipe, *, layout: str, gated: bool) -> Array | QTensor:
    """w13 (E, halves, I, H) from any of the forms that ``FusedMoE.from_dense`` takes, quantized as the recipe says."""
    _check_layout(layout)
    parts = _pair("w13", w13, "(E, I, H)") if isinstance(w13, tuple | list) else (as_array("w13", w13),)
    shapes = " and ".join(str(part.shape) for part in parts)
    halves = 2 if gated else 1
    if len(parts) > 1:
        if not gated or parts[0].shape != parts[1].shape or parts[0].ndim != 3:
            raise ValueError(f"w13 has shapes {shapes}, but a pair is gate and up of one shape (E, I, H)")
        return _shaped(parts, recipe, "pair", layout)
    (w,) = parts
    if w.ndim == 4 and layout == "out_in" and w.shape[1] == halves:
        return quantize_experts(w, recipe, first=True)
    if w.ndim != 3 or w.shape[-2 if layout == "out_in" else -1] % halves:
        form = "(E, 2I, H) or (E, 2, I, H)" if gated else "(E, I, H) or (E, 1, I, H)"
        form = form if layout == "out_in" else ("(E, H, 2I)" if gated else "(E, H, I)")
        raise ValueError(f"w13 has shape {shapes}, but with layout={layout!r} it is {form}")
    return _shaped(parts, recipe, "gated" if gated else "ungated", layout)


def second_weight(w2: Array, recipe: Recipe, *, layout: str) -> Array | QTensor:
    """w2 (E, H, I) from (E, H, I), or (E, I, H) with layout "in_out", quantized as the recipe says."""
    _check_layout(layout)
    w2 = as_array("w2", w2)
    if w2.ndim != 3:
        form = "(E, H, I)" if layout == "out_in" else "(E, I, H)"
        raise ValueError(f"w2 has shape {w2.shape}, but with layout={layout!r} it is {form}")
    return _shaped((w2,), recipe, "second", layout)


def first_bias(b13: Array | tuple[Array, Array], *, gated: bool) -> Array:
    """b13 (E, halves, I) from (E, 2I), a pair of (E, I), (E, halves, I), or ungated (E, I)."""
    halves = 2 if gated else 1
    if isinstance(b13, tuple | list):
        gate, up = _pair("b13", b13, "(E, I)")
        if not gated or gate.shape != up.shape or gate.ndim != 2:
            shapes = f"{gate.shape} and {up.shape}"
            raise ValueError(f"b13 has shapes {shapes}, but a pair is gate and up of one shape (E, I)")
        return jnp.stack((gate, up), axis=1)
    b13 = as_array("b13", b13)
    if b13.ndim == 3:
        return b13
    if b13.ndim != 2 or b13.shape[1] % halves:
        form = "(E, 2I) or (E, 2, I)" if gated else "(E, I) or (E, 1, I)"
        raise ValueError(f"b13 has shape {b13.shape}, but it is {form}")
    return b13.reshape(b13.shape[0], halves, b13.shape[1] // halves)


def quantize_experts(w: Array, recipe: Recipe, *, first: bool) -> Array | QTensor:
    """Quantizes w13 (..., E, halves, I, H) with ``first``, or w2 (..., E, H, I); "bf16" leaves it as it is.

    NVFP4's global scale is one per expert, gate and up together. Experts are quantized one after the other, so that
    beside the operand and the result only one expert is held in float32; an array that is sharded is quantized whole,
    for every device holds a part of it.
    """
    if recipe.weight is None:
        return w
    return _shaped((w,), recipe, "first" if first else "second", "out_in")


def _pair(name: str, parts: Sequence[Any], axes: str) -> tuple[Array, Array]:
    """Gate and up."""
    if len(parts) != 2:
        raise ValueError(f"{name} is {type_of(parts)} of {len(parts)}, but gate and up are a pair of arrays {axes}")
    return as_array(f"{name}[0]", parts[0]), as_array(f"{name}[1]", parts[1])


def _check_layout(layout: str) -> None:
    if layout not in ("out_in", "in_out"):
        raise ValueError(f"layout={layout!r} must be 'out_in' (y = x w^T) or 'in_out' (y = x w)")


def _arrange(parts: Parts, form: str, layout: str) -> Array:
    """One expert's weight, or that of all, since only the last axes change: (..., halves, I, H) or (..., H, I)."""
    if layout == "in_out":
        parts = tuple(jnp.swapaxes(part, -1, -2) for part in parts)
    if form == "pair":
        return jnp.stack(parts, axis=-3)
    (w,) = parts
    if form in ("gated", "ungated"):
        halves = 2 if form == "gated" else 1
        *lead, rows, columns = w.shape
        return w.reshape(*lead, halves, rows // halves, columns)
    return w


def _shaped(parts: Parts, recipe: Recipe, form: str, layout: str) -> Array | QTensor:
    whole = recipe.weight is None or any(_is_sharded(part) for part in parts)
    return (_shape_whole if whole else _shape_each)(parts, recipe, form, layout)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _shape_whole(parts: Parts, recipe: Recipe, form: str, layout: str) -> Array | QTensor:
    w = _arrange(parts, form, layout)
    return w if recipe.weight is None else _quantize(w, recipe, form)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _shape_each(parts: Parts, recipe: Recipe, form: str, layout: str) -> QTensor:
    lead = parts[0].shape[: -3 if form == "first" else -2]
    flat = tuple(part.reshape(math.prod(lead), *part.shape[len(lead) :]) for part in parts)
    q = lax.map(lambda one: _quantize(_arrange(one, form, layout), recipe, form), flat)
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), q)


def _quantize(w: Array, recipe: Recipe, form: str) -> QTensor:
    return quantize(w, recipe, shared=() if form == "second" else (-3,))


def _is_sharded(x: Array) -> bool:
    """Whether several devices hold parts of ``x``, or may, for it is traced under a mesh."""
    if isinstance(x, jax.core.Tracer):
        return not jax.sharding.get_abstract_mesh().empty
    return not x.sharding.is_fully_replicated
