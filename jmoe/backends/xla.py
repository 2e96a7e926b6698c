"""Compiled by XLA on any device, with bounded memory.

A product never sees more dequantised weights than one expert's, or a piece of a linear's. Experts are taken in blocks
of rows that belong to one expert each; blocks that hold no row are skipped. The loops have static lengths and carry
nothing, so forward and reverse mode differentiate them, and their bodies are rematerialised, so that no dequantised
weight outlives its block. Sums are float32, in an order that shapes alone decide.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jmoe.backends import activation as act
from jmoe.backends import common
from jmoe.backends.common import Weight
from jmoe.backends.spec import DeviceSpec, LinearArgs, OpSpec, Plan, Selection
from jmoe.backends.xla_experts import batched_experts as batched_experts
from jmoe.backends.xla_experts import fused_moe as fused_moe
from jmoe.backends.xla_operands import (
    Operand,
    as_operand,
    entry_at,
    multiply,
    quantized_operand,
    window,
    with_row_scale,
)
from jmoe.qtensor import QTensor
from jmoe.scheme import Scheme
from pallas_kernels.layouts import CANONICAL, PACKED_BFLOAT16, PACKED_E4M3

NAME = "xla"

_PIECE_BYTES = 64 * 2**20
"""At most so many bytes of a linear's weight are dequantised at a time (or one row, where that is more)."""

_INVARIANT_ROWS = 64
"""Rows of every product under ``batch_invariant``, however many tokens there are."""


def plan(op: OpSpec, device: DeviceSpec, *, explicit: bool) -> Plan:
    """The plan on that device, here or not; ``explicit`` where the user asked for it by name.

    Tiles: "operands" is the dtype that products are computed in (a plain weight of another dtype than 16-bit operands
    is multiplied in tensorfloat32); "rows" those of a block that belongs to one expert (1: a block a slot, unsorted)
    or, under ``batch_invariant``, of a linear's products; "features" those of a linear that are dequantised at a time.

    Raises:
      NotImplementedError: weights are in a kernel's layout, or FP4 activations would be emulated unasked on a GPU.
    """
    if op.layout not in (CANONICAL, PACKED_BFLOAT16, PACKED_E4M3):
        raise NotImplementedError(f"weights are in the layout {op.layout.name!r}, and it reads the canonical one only")
    common.check_emulation(op, device, NAME, explicit=explicit)
    operands = _operands(op, device)
    tiles: list[tuple[str, Any]] = [("operands", operands)]
    if op.op == "linear":
        features = _piece(op, 2 if operands in ("bfloat16", "float16") else 4)
        tiles.append(("features", features))
        if op.batch_invariant:
            tiles.append(("rows", _INVARIANT_ROWS))
        extent = "whole" if features >= op.features else f"{features} rows at a time"
    else:
        rows = _block_rows(op, device)
        tiles.append(("rows", rows))
        extent = "one expert at a time, once a slot" if rows == 1 else f"one expert at a time, once {rows} rows"
    notes = []
    if op.recipe.weight is not None:
        held = "float32, multiplied in tensorfloat32" if operands == "tensorfloat32" else operands
        notes.append(f"weights are dequantised to {held}, {extent}")
    if op.layout != CANONICAL:
        notes.append(f"weights are brought from the layout {op.layout.name!r} to the canonical one in every call")
    if common.has_fp4_activations(op):
        notes.append(f"FP4 activations are emulated: rounded to FP4, multiplied in {operands}")
    if op.accumulation == "fast" and op.default_accumulation == "exact":
        notes.append("accumulation='fast' changes nothing: sums are float32 throughout")
    if op.mesh:
        axes = ", ".join(f"{axis}={size}" for axis, size in op.mesh)
        notes.append(f"XLA partitions it over the mesh ({axes}) and gathers experts that are sharded over it")
    return Plan(tiles=tuple(tiles), accumulation="exact", note="; ".join(notes))


def _operands(op: OpSpec, device: DeviceSpec) -> str:
    """The dtype that products are computed in, its sums being float32.

    bfloat16 holds every code exactly, and a scale that all of K shares is applied after the product. A finer float32
    scale has to be multiplied in before, and rounds. Where both products are weight-only that may be; but what differs
    by the last of 8 bits changes many of h's codes where it is quantised, so there tensorfloat32 keeps 11.
    """
    recipes = [r for r in (op.recipe, op.second_recipe) if r is not None and r.weight is not None]
    if op.dtype == "float32" or device.platform == "cpu":
        return "float32"
    if device.platform == "cuda" and device.compute_capability < 80:
        return "float32"  # neither bfloat16 nor tensorfloat32 units
    if not recipes:
        return op.dtype
    if op.dtype == "float16" and any(r.input is None for r in recipes):
        exact = False  # bfloat16 does not hold x
    else:
        weight_only = all(r.input is None for r in recipes)
        exact = weight_only or all(_is_exact(r.weight) and _is_exact(r.input) for r in recipes)
    if exact:
        return "bfloat16"
    return "tensorfloat32" if device.platform == "cuda" else "float32"


def _is_exact(scheme: Scheme | None) -> bool:
    """Whether bfloat16 holds codes times those scales that vary along K."""
    if scheme is None or scheme.block[1] == -1 or scheme.power_of_two:
        return True
    return scheme.scale_dtype == "e4m3" and scheme.format != "int8"  # four bits of a scale by four of a code


def _piece(op: OpSpec, itemsize: int) -> int:
    """Features of a linear that are dequantised at a time: equal pieces, or all of them.

    Where such pieces are small enough they split no scale's block and are whole tiles of a matrix unit.
    """
    scheme = op.recipe.weight
    if scheme is None or op.features * op.hidden * itemsize <= _PIECE_BYTES:
        return op.features
    most = max(_PIECE_BYTES // (op.hidden * itemsize), 1)
    unit = next(u for u in (math.lcm(128, max(scheme.block[0], 1)), 128, 1) if u <= most)
    pieces = -(-op.features // (most // unit * unit))
    return -(-op.features // (pieces * unit)) * unit


def _block_rows(op: OpSpec, device: DeviceSpec) -> int:
    """Rows of a block, from shapes alone.

    With n rows an expert and blocks of R, an expert is dequantised n/R + 1/2 times and R/2 rows of padding are
    multiplied. Where dequantising costs as much as multiplying d rows, that is least at R = sqrt(2 n d). On a CPU d is
    about 32 (measured); on a GPU about 256 (a weight written and read at memory speed against matrix units).
    """
    if op.batch_invariant:
        return _INVARIANT_ROWS
    most = op.tokens * op.top_k if op.op == "moe" else op.tokens
    experts = max(op.experts, op.global_experts, 1) if op.op == "moe" else 1
    if op.op == "moe" and (op.tokens == 1 or 4 * most <= experts):
        return 1  # hardly any two slots share an expert, so there is nothing to sort
    d = 32 if device.platform == "cpu" else 256
    best = 2 ** round(math.log2(max(2 * d * most / experts, 1)) / 2)
    # At least 16: every row then goes through a matrix unit's (or a CPU kernel's) full tiles, so that its sums do not
    # depend on where in the block it lies.
    return min(max(best, 16), 1024, -(-max(most, 1) // 16) * 16)


def linear(op: OpSpec, selection: Selection, args: LinearArgs) -> Array:
    """activation(x w^T + bias), (M, N) in ``op.out_dtype``."""
    dtype, features = selection.tile("operands"), selection.tile("features")
    x = with_row_scale(quantized_operand(args.x, common.input_scheme_of(args.w), args.input_scale, dtype))

    def piece(start: Array, size: int) -> Array:
        return _linear_piece(op, x, _weight_rows(args.w, args.layer, start, size), dtype)

    if features >= op.features:
        y = _linear_piece(op, x, entry_at(args.w, args.layer), dtype)
    else:
        pieces = op.features // features
        starts = features * jnp.arange(pieces, dtype=jnp.int32)
        y = lax.map(jax.checkpoint(lambda start: piece(start, features), prevent_cse=False), starts)
        y = jnp.moveaxis(y, 0, 1).reshape(op.tokens, pieces * features)
        if rest := op.features - pieces * features:
            y = jnp.concatenate([y, piece(jnp.int32(pieces * features), rest)], axis=1)
    if args.bias is not None:
        y = y + common.at_layer(args.bias, args.layer).astype(jnp.float32)[None]
    if op.activation is not None:
        y = act.ungated(op.activation, y)
    return y.astype(op.out_dtype)


def _linear_piece(op: OpSpec, x: Operand, w: Weight, dtype: str) -> Array:
    """X (M, K) times some rows of w, (M, rows)."""
    other = as_operand(w, dtype)
    if not op.batch_invariant:
        return multiply(x, other, dtype)
    blocks = -(-op.tokens // _INVARIANT_ROWS)
    padding = blocks * _INVARIANT_ROWS - op.tokens

    def split(leaf: Array) -> Array:
        return jnp.pad(leaf, [(0, padding), (0, 0)]).reshape(blocks, _INVARIANT_ROWS, leaf.shape[-1])

    y = lax.map(lambda rows: multiply(rows, other, dtype), jax.tree.map(split, x))
    return y.reshape(blocks * _INVARIANT_ROWS, y.shape[-1])[: op.tokens]


def _weight_rows(w: Weight, layer: Array | None, start: Array, size: int) -> Weight:
    """Rows [start, start + size) of w (N, K), or of the layer's; a row's scales are its own or those of all rows."""
    zero = jnp.int32(0)

    def rows(leaf: Array, first: Array, count: int) -> Array:
        if layer is None:
            return window(leaf, (first, zero), (count, leaf.shape[-1]))
        return window(leaf, (layer, first, zero), (1, count, leaf.shape[-1]))[0]

    def grid(leaf: Array, block: int) -> Array:
        """A row of ``leaf``, which stands for ``block`` of w's, for each of the rows."""
        height = leaf.shape[-2]
        if height == 1:  # it stands for all of N, whatever N is
            return entry_at(leaf, layer)
        if block == 1:
            return rows(leaf, start, size)
        # The rows may begin and end inside of blocks: those that they touch, and then each row's own.
        touched = min((size + block - 2) // block + 1, height)
        first = jnp.minimum(start // block, height - touched)
        own = (start + jnp.arange(size, dtype=jnp.int32)) // block - first
        return rows(leaf, first, touched).at[own].get(mode="promise_in_bounds")

    if not isinstance(w, QTensor):
        return rows(w, start, size)
    block = w.scheme.block
    return dataclasses.replace(
        w,
        data=rows(w.data, start, size),
        scale=grid(w.scale, block[0]),
        zero_point=None if w.zero_point is None else grid(w.zero_point, block[0]),
        global_scale=None if w.global_scale is None else grid(w.global_scale, 1),
        scheme=w.scheme if block[0] == -1 else w.scheme.replace(block=(1, block[1])),
    )
