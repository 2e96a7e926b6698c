"""Layers of experts by the xla implementation: blocks of rows that belong to one expert each, one block at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jmoe.backends import activation as act
from jmoe.backends import common
from jmoe.backends.common import Weight
from jmoe.backends.spec import BatchedArgs, MoEArgs, OpSpec, Selection
from jmoe.backends.xla_operands import Operand, as_operand, entry_at, multiply, quantized_operand, with_row_scale
from jmoe.qtensor import QTensor, index_leading
from pallas_kernels import bits


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


def _first_operand(op: OpSpec, x: Weight, a: MoEArgs | BatchedArgs, dtype: str) -> Operand:
    """X as w13's other side, each row with its own scale; left alone where every expert has a scale of its own."""
    scheme = None if _is_per_expert(a.input_scale) else common.input_scheme_of(a.w13)
    return with_row_scale(quantized_operand(x, scheme, a.input_scale, dtype))


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


def _run_experts(op: OpSpec, a: MoEArgs | BatchedArgs, blocks: _Blocks, x: Operand, dtype: str) -> Array:
    """Every block's expert applied to its rows: x (B, R, H) -> (B, R, H) float32."""
    assert op.activation is not None
    activation = op.activation
    in_scheme = common.input_scheme_of(a.w13) if _is_per_expert(a.input_scale) else None
    h_scheme = common.input_scheme_of(a.w2)

    def first_of(e: Array) -> _First:
        params = common.params_of(a.activation_params, e)
        return _First(entry_at(a.w13, a.layer, e), entry_at(a.b13, a.layer, e), params, _scale_of(a.input_scale, e))

    def second_of(e: Array) -> _Second:
        return _Second(entry_at(a.w2, a.layer, e), entry_at(a.b2, a.layer, e), _scale_of(a.intermediate_scale, e))

    def first(w: _First, rows: Operand) -> Array:
        if in_scheme is not None:
            rows = quantized_operand(rows.values, in_scheme, w.scale, dtype)
        product = _halves_product(rows, as_operand(w.w13, dtype), dtype)
        if w.b13 is not None:
            product = product + w.b13.astype(jnp.float32)[:, None, :]
        return bits.round_to(common.activate(activation, product, w.params), op.dtype)

    def second(w: _Second, h: Operand) -> Array:
        y = multiply(h, as_operand(w.w2, dtype), dtype)
        return y if w.b2 is None else y + w.b2.astype(jnp.float32)[None]

    def both(w: tuple[_First, _Second], rows: Operand) -> Array:
        h = quantized_operand(first(w[0], rows), h_scheme, w[1].scale, dtype)
        return second(w[1], h)

    if not common.measures_over_rows(h_scheme):
        return _over_blocks(both, lambda e: (first_of(e), second_of(e)), blocks, x)
    # h's scales span rows of several experts, so all of h comes first, in the order of slots.
    h = blocks.to_slots(_over_blocks(first, first_of, blocks, x))
    h_rows = with_row_scale(quantized_operand(h, h_scheme, None, dtype))
    return _over_blocks(second, second_of, blocks, jax.tree.map(blocks.to_blocks, h_rows))


def _over_blocks(
    body: Callable[[Any, Operand], Array], share_of: Callable[[Array], Any], blocks: _Blocks, x: Operand
) -> Array:
    """``body`` of each block's expert's share of the weights and the block's rows; zero for unused blocks."""

    def block(inputs: tuple[Array, Array, Operand]) -> Array:
        expert, used, rows = inputs
        # Outside the condition: the cotangent of a slice adds into a weight's in place, that of a whole would be added.
        share = share_of(expert)
        shape = jax.eval_shape(body, share, rows).shape
        return lax.cond(used, body, lambda *_: common.zeros(shape, (share, rows)), share, rows)

    return lax.map(jax.checkpoint(block, prevent_cse=False), (blocks.expert, blocks.used, x))


def _halves_product(x: Operand, w: Operand, dtype: str) -> Array:
    """X (M, H) times w13 (halves, I, H), as one product: (halves, M, I)."""
    halves, features, hidden = w.values.shape
    scale = w.scale
    if scale is not None:
        scale = jnp.broadcast_to(scale, (halves, features, 1)).reshape(halves * features, 1)
    y = multiply(x, Operand(w.values.reshape(halves * features, hidden), scale), dtype)
    return jnp.moveaxis(y.reshape(y.shape[0], halves, features), 1, 0)
