"""Compiled by XLA on any device, with bounded memory.

A product never sees more dequantised weights than one expert's, or a piece of a linear's. Experts are taken in blocks
of rows that belong to one expert each; blocks that hold no row are skipped. The loops have static lengths and carry
nothing, so forward and reverse mode differentiate them, and their bodies are rematerialised, so that no dequantised
weight outlives its block. Sums are float32, in an order that shapes alone decide.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jmoe import numerics
from jmoe.backends import activation as act
from jmoe.backends import common
from jmoe.backends.common import Weight
from jmoe.backends.spec import BatchedArgs, DeviceSpec, LinearArgs, MoEArgs, OpSpec, Plan, Selection
from jmoe.numerics import INT4_OFFSET
from jmoe.qtensor import QTensor, expand, expand_axis, index_leading
from jmoe.scheme import Scheme
from pallas_kernels import bits
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
        notes.append(f"weights are dequantised to {operands}, {extent}")
    if op.layout != CANONICAL:
        notes.append(f"weights are brought from the layout {op.layout.name!r} to the canonical one in every call")
    if common.has_fp4_activations(op):
        notes.append(f"FP4 activations are emulated: rounded to FP4, multiplied in {operands}")
    if op.accumulation == "fast":
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


class _Operand(NamedTuple):
    """One side of a product: values (..., M, K), and float32 (..., M or 1, 1) that multiplies them afterwards."""

    values: Array
    scale: Array | None


def _operand(a: Weight, dtype: str) -> _Operand:
    """``a`` (..., M, K) as the side of a product in ``dtype``; plain arrays come as they are."""
    if not isinstance(a, QTensor):
        return _Operand(a, None)
    if dtype == "float32":
        return _Operand(a.dequantize(), None)
    m, k = a.shape[-2:]
    codes = numerics.decode(numerics.unpack(a.data, a.scheme.fmt, k), a.scheme.fmt)
    if a.zero_point is not None:
        codes = codes - expand(a.zero_point.astype(jnp.float32), a.scheme.block, (m, k))
    elif a.scheme.format == "int4":
        codes = codes - INT4_OFFSET
    if a.scale.shape[-1] == 1:
        scale = a.combined_scale()
        rows = scale if scale.shape[-2] == m else expand_axis(scale, -2, a.scheme.block[0], m)
        return _Operand(_cast(codes, dtype), rows)
    scale = expand(numerics.decode_scale(a.scale), a.scheme.block, (m, k))
    return _Operand(_cast(codes * scale, dtype), a.global_scale)


def _cast(x: Array, dtype: str) -> Array:
    """X as a product in ``dtype`` takes it; tensorfloat32 is held in float32, rounded: matrix units truncate."""
    if dtype != "tensorfloat32":
        return x.astype(dtype)
    # The 16-bit dtypes are part of it.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10) if x.dtype == jnp.float32 else x.astype("float32")


def _quantized_operand(x: Weight, scheme: Scheme | None, scale: Array | None, dtype: str) -> _Operand:
    """X as a product's other side after ``scheme`` has quantised it; a QTensor is already."""
    if isinstance(x, QTensor) or scheme is None:
        return _operand(x, dtype)
    q, factor = common.quantised(x, scheme, scale)
    operand = _operand(q, dtype)
    if factor is None:
        return operand
    return _Operand(operand.values, factor if operand.scale is None else operand.scale * factor)


def _with_row_scale(x: _Operand) -> _Operand:
    """The same with a scale that has x's rows, if it has one."""
    if x.scale is None:
        return x
    return _Operand(x.values, jnp.broadcast_to(x.scale, (*x.values.shape[:-1], 1)))


def _product(x: _Operand, w: _Operand, dtype: str) -> Array:
    """X (M, K) times w (N, K) transposed, (M, N) float32; products in ``dtype``, sums in float32."""
    if dtype in ("bfloat16", "float16") and w.values.dtype != dtype:
        dtype = "tensorfloat32"
    y = lax.dot_general(
        _cast(x.values, dtype),
        _cast(w.values, dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == "float32" else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    if x.scale is not None:
        y = y * x.scale
    return y if w.scale is None else y * w.scale.T


def linear(op: OpSpec, selection: Selection, args: LinearArgs) -> Array:
    """activation(x w^T + bias), (M, N) in ``op.out_dtype``."""
    dtype, features = selection.tile("operands"), selection.tile("features")
    x = _with_row_scale(_quantized_operand(args.x, common.input_scheme_of(args.w), args.input_scale, dtype))

    def piece(start: Array, size: int) -> Array:
        return _linear_piece(op, x, _weight_rows(args.w, args.layer, start, size), dtype)

    if features >= op.features:
        y = _linear_piece(op, x, _at(args.w, args.layer), dtype)
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


def _linear_piece(op: OpSpec, x: _Operand, w: Weight, dtype: str) -> Array:
    """X (M, K) times some rows of w, (M, rows)."""
    other = _operand(w, dtype)
    if not op.batch_invariant:
        return _product(x, other, dtype)
    blocks = -(-op.tokens // _INVARIANT_ROWS)
    padding = blocks * _INVARIANT_ROWS - op.tokens

    def split(leaf: Array) -> Array:
        return jnp.pad(leaf, [(0, padding), (0, 0)]).reshape(blocks, _INVARIANT_ROWS, leaf.shape[-1])

    y = lax.map(lambda rows: _product(rows, other, dtype), jax.tree.map(split, x))
    return y.reshape(blocks * _INVARIANT_ROWS, y.shape[-1])[: op.tokens]


def _weight_rows(w: Weight, layer: Array | None, start: Array, size: int) -> Weight:
    """Rows [start, start + size) of w (N, K), or of the layer's; a row's scales are its own or those of all rows."""
    zero = jnp.int32(0)

    def rows(leaf: Array, first: Array, count: int) -> Array:
        if layer is None:
            return _window(leaf, (first, zero), (count, leaf.shape[-1]))
        return _window(leaf, (layer, first, zero), (1, count, leaf.shape[-1]))[0]

    def grid(leaf: Array, block: int) -> Array:
        """A row of ``leaf``, which stands for ``block`` of w's, for each of the rows."""
        height = leaf.shape[-2]
        if height == 1:  # it stands for all of N, whatever N is
            return _at(leaf, layer)
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


class _Blocks(NamedTuple):
    """Rows in blocks that belong to one expert each.

    Attributes:
      expert: int32 (B,).
      used: bool (B,), whether any of the block's rows is in use; the others are zero.
      to_blocks: rows (S, C) in the order of slots to (B, R, C), zero where no slot is.
      to_slots: its inverse; slots without an expert get zeros.
    """

    expert: Array
    used: Array
    to_blocks: Callable[[Array], Array]
    to_slots: Callable[[Array], Array]


def fused_moe(op: OpSpec, selection: Selection, args: MoEArgs) -> Array:
    """The weighted sum of each token's experts, (T, H) in ``op.out_dtype``; reference.fused_moe is the formula."""
    tokens, k = args.topk_ids.shape
    if 0 in (tokens, k, op.experts):
        return jnp.zeros((tokens, op.hidden), op.out_dtype)
    ids = common.local_ids(args.topk_ids, args.expert_map, op.experts)
    x = args.x
    if not isinstance(x, QTensor) and common.measures_over_rows(common.input_scheme_of(args.w13)):
        x = common.chosen_rows(x, ids)
    if op.weight_on_input:
        x = common.weighted_input(x, args.topk_weights, ids)
    rows = selection.tile("rows")
    slots = ids.reshape(tokens * k)
    blocks = _one_slot_blocks(slots) if rows == 1 else _sorted_blocks(slots, op.experts, rows)

    def by_slot(leaf: Array) -> Array:
        # Every slot has a row of its own, so the gather below is one-to-one and its transpose adds nothing up; this
        # broadcast's transpose does, over k and in order.
        spread = jnp.broadcast_to(leaf[:, None], (tokens, k, leaf.shape[-1]))
        return spread.reshape(tokens * k, leaf.shape[-1])

    x_rows = _first_operand(op, x, args, selection.tile("operands"))
    x_blocks = jax.tree.map(lambda leaf: blocks.to_blocks(by_slot(leaf)), x_rows)
    y = _run_experts(op, args, blocks, x_blocks, selection.tile("operands"))
    y = blocks.to_slots(y).reshape(tokens, k, op.hidden)
    if op.weight_on_input:
        weights = jnp.ones((tokens, k), jnp.float32)
    else:
        weights = jnp.where(ids >= 0, args.topk_weights, 0)  # even where it is NaN
    total = weights[:, 0, None] * y[:, 0]
    for j in range(1, k):
        total = total + weights[:, j, None] * y[:, j]
    return total.astype(op.out_dtype)


def batched_experts(op: OpSpec, selection: Selection, args: BatchedArgs) -> Array:
    """Each expert's own rows, x (E, T, H) of which counts[e] are valid -> (E, T, H); rows beyond are zero."""
    experts, tokens = op.experts, op.tokens
    if 0 in (experts, tokens):
        return jnp.zeros((experts, tokens, op.hidden), op.out_dtype)
    rows = selection.tile("rows")
    valid = jnp.arange(tokens, dtype=jnp.int32)[None] < args.counts[:, None]
    blocks = _batched_blocks(valid, rows)
    # Invalid rows may hold anything, so they are zero before a scale is measured over them.
    x = args.x
    x = x if isinstance(x, QTensor) else jnp.where(valid[..., None], x, 0).reshape(experts * tokens, op.hidden)
    x_rows = _first_operand(op, x, args, selection.tile("operands"))
    x_blocks = jax.tree.map(lambda leaf: blocks.to_blocks(leaf.reshape(experts * tokens, leaf.shape[-1])), x_rows)
    y = blocks.to_slots(_run_experts(op, args, blocks, x_blocks, selection.tile("operands")))
    return y.reshape(experts, tokens, op.hidden).astype(op.out_dtype)


def _one_slot_blocks(ids: Array) -> _Blocks:
    """A block a slot, in their own order."""
    used = ids >= 0
    return _Blocks(
        expert=jnp.maximum(ids, 0),
        used=used,
        to_blocks=lambda x: x[:, None, :],
        to_slots=lambda y: jnp.where(used[:, None], y[:, 0, :], 0),
    )


def _sorted_blocks(ids: Array, experts: int, rows: int) -> _Blocks:
    """Slots (S,) of local experts, -1 for none, sorted stably by expert, each expert padded to whole blocks.

    An expert with c slots takes ceil(c / R) blocks, so there are at most min(E, S) + (S - min(E, S)) // R of them.
    """
    slots = ids.shape[0]
    most = min(experts, slots)
    count = most + (slots - most) // rows
    index = jnp.arange(slots, dtype=jnp.int32)
    key, order = lax.sort((jnp.where(ids >= 0, ids, experts), index), num_keys=1, is_stable=True)
    in_expert = jnp.zeros(experts + 1, jnp.int32).at[key].add(1)
    first_row = lax.cumsum(in_expert) - in_expert
    needed = -(-in_expert // rows)
    last_block = lax.cumsum(needed)
    first_block = last_block - needed
    # Out of range where there is nothing, and still one to one.
    place = jnp.where(key < experts, first_block[key] * rows + index - first_row[key], count * rows + index)
    place_of_slot = jnp.zeros(slots, jnp.int32).at[order].set(place, unique_indices=True)
    nothing = slots + jnp.arange(count * rows, dtype=jnp.int32)
    slot_of_place = nothing.at[place].set(order, mode="drop", unique_indices=True)

    block = jnp.arange(count, dtype=jnp.int32)
    expert = jnp.sum(last_block[None, :experts] <= block[:, None], axis=1, dtype=jnp.int32)

    def to_blocks(x: Array) -> Array:
        return _rows_or_zero(x, slot_of_place).reshape(count, rows, x.shape[-1])

    def to_slots(y: Array) -> Array:
        return _rows_or_zero(y.reshape(count * rows, y.shape[-1]), place_of_slot)

    return _Blocks(jnp.minimum(expert, experts - 1), expert < experts, to_blocks, to_slots)


def _rows_or_zero(x: Array, index: Array) -> Array:
    """Rows of x (M, C), zero where the index is M or more; no index occurs twice."""
    return x.at[index].get(mode="fill", fill_value=0, unique_indices=True)


def _batched_blocks(valid: Array, rows: int) -> _Blocks:
    """Blocks of the rows (E * T, C) of experts in turn, of which ``valid`` (E, T) are in use."""
    experts, tokens = valid.shape
    per_expert = -(-tokens // rows)
    padding = per_expert * rows - tokens
    starts = rows * jnp.arange(per_expert, dtype=jnp.int32)

    def to_blocks(x: Array) -> Array:
        x = jnp.where(valid[..., None], x.reshape(experts, tokens, x.shape[-1]), 0)
        return jnp.pad(x, [(0, 0), (0, padding), (0, 0)]).reshape(experts * per_expert, rows, x.shape[-1])

    def to_slots(y: Array) -> Array:
        y = y.reshape(experts, per_expert * rows, y.shape[-1])[:, :tokens]
        return jnp.where(valid[..., None], y, 0).reshape(experts * tokens, y.shape[-1])

    return _Blocks(
        expert=jnp.repeat(jnp.arange(experts, dtype=jnp.int32), per_expert),
        used=jnp.take(valid, starts, axis=1).reshape(-1),
        to_blocks=to_blocks,
        to_slots=to_slots,
    )


def _first_operand(op: OpSpec, x: Weight, a: MoEArgs | BatchedArgs, dtype: str) -> _Operand:
    """X as w13's other side, each row with its own scale; left alone where every expert has a scale of its own."""
    scheme = None if _is_per_expert(a.input_scale) else common.input_scheme_of(a.w13)
    return _with_row_scale(_quantized_operand(x, scheme, a.input_scale, dtype))


def _is_per_expert(scale: Array | None) -> bool:
    return scale is not None and scale.ndim == 1


def _scale_of(scale: Array | None, expert: Array) -> Array | None:
    """A static scale () or (E,) for one expert: ()."""
    return scale if scale is None or scale.ndim == 0 else index_leading(scale, expert)


class _First(NamedTuple):
    """One expert's share of what the first product takes."""

    w13: Weight
    b13: Array | None
    params: act.ActivationParams | None
    scale: Array | None


class _Second(NamedTuple):
    """One expert's share of what the second product takes."""

    w2: Weight
    b2: Array | None
    scale: Array | None


def _run_experts(op: OpSpec, a: MoEArgs | BatchedArgs, blocks: _Blocks, x: _Operand, dtype: str) -> Array:
    """Every block's expert applied to its rows: x (B, R, H) -> (B, R, H) float32."""
    assert op.activation is not None
    activation = op.activation
    in_scheme = common.input_scheme_of(a.w13) if _is_per_expert(a.input_scale) else None
    h_scheme = common.input_scheme_of(a.w2)

    def first_of(e: Array) -> _First:
        params = common.params_of(a.activation_params, e)
        return _First(_at(a.w13, a.layer, e), _at(a.b13, a.layer, e), params, _scale_of(a.input_scale, e))

    def second_of(e: Array) -> _Second:
        return _Second(_at(a.w2, a.layer, e), _at(a.b2, a.layer, e), _scale_of(a.intermediate_scale, e))

    def first(w: _First, rows: _Operand) -> Array:
        if in_scheme is not None:
            rows = _quantized_operand(rows.values, in_scheme, w.scale, dtype)
        product = _halves_product(rows, _operand(w.w13, dtype), dtype)
        if w.b13 is not None:
            product = product + w.b13.astype(jnp.float32)[:, None, :]
        return bits.round_to(common.activate(activation, product, w.params), op.dtype)

    def second(w: _Second, h: _Operand) -> Array:
        y = _product(h, _operand(w.w2, dtype), dtype)
        return y if w.b2 is None else y + w.b2.astype(jnp.float32)[None]

    def both(w: tuple[_First, _Second], rows: _Operand) -> Array:
        h = _quantized_operand(first(w[0], rows), h_scheme, w[1].scale, dtype)
        return second(w[1], h)

    if not common.measures_over_rows(h_scheme):
        return _over_blocks(both, lambda e: (first_of(e), second_of(e)), blocks, x)
    # h's scales span rows of several experts, so all of h comes first, in the order of slots.
    h = blocks.to_slots(_over_blocks(first, first_of, blocks, x))
    h_rows = _with_row_scale(_quantized_operand(h, h_scheme, None, dtype))
    return _over_blocks(second, second_of, blocks, jax.tree.map(blocks.to_blocks, h_rows))


def _over_blocks(
    body: Callable[[Any, _Operand], Array], share_of: Callable[[Array], Any], blocks: _Blocks, x: _Operand
) -> Array:
    """``body`` of each block's expert's share of the weights and the block's rows; zero for unused blocks."""

    def block(inputs: tuple[Array, Array, _Operand]) -> Array:
        expert, used, rows = inputs
        # Outside the condition: the cotangent of a slice adds into a weight's in place, that of a whole would be added.
        share = share_of(expert)
        shape = jax.eval_shape(body, share, rows).shape
        return lax.cond(used, body, lambda *_: common.zeros(shape, (share, rows)), share, rows)

    return lax.map(jax.checkpoint(block, prevent_cse=False), (blocks.expert, blocks.used, x))


def _halves_product(x: _Operand, w: _Operand, dtype: str) -> Array:
    """X (M, H) times w13 (halves, I, H), as one product: (halves, M, I)."""
    halves, features, hidden = w.values.shape
    scale = w.scale
    if scale is not None:
        scale = jnp.broadcast_to(scale, (halves, features, 1)).reshape(halves * features, 1)
    y = _product(x, _Operand(w.values.reshape(halves * features, hidden), scale), dtype)
    return jnp.moveaxis(y.reshape(y.shape[0], halves, features), 1, 0)


def _at(tree: Any, *index: Array | None) -> Any:
    """Every leaf's entry at the leading ``index``, of which None counts for no axis, sliced where it lies."""
    given = tuple(i for i in index if i is not None)

    def entry(leaf: Array) -> Array:
        rest = leaf.shape[len(given) :]
        start = (*given, *(jnp.int32(0) for _ in rest))
        return _window(leaf, start, (*(1 for _ in given), *rest)).reshape(rest)

    return jax.tree.map(entry, tree) if given else tree


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _window(leaf: Array, start: tuple[Array, ...], size: tuple[int, ...]) -> Array:
    """``lax.dynamic_slice``, of which XLA converts no more than the slice.

    Inside a loop XLA hoists a conversion of the whole array, which is the same at every step, and on a CPU it slices
    float8 as float16 besides. Tied to the index, the array is no longer the same.
    """
    leaf, start = lax.optimization_barrier((leaf, start))
    return lax.dynamic_slice(leaf, start, size)


@_window.defjvp
def _window_jvp(size: tuple[int, ...], primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    # No barrier: XLA adds the transpose of a plain slice to a cotangent in place.
    return _window(*primals, size), lax.dynamic_slice(tangents[0], primals[1], size)
