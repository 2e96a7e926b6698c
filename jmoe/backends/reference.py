"""The definition of every operation: float32, plain jnp, dequantised operands, one expert after another.

It is written to be read. Everything else is tested against it.
"""

import jax.numpy as jnp
from jax import Array, lax

from jmoe.backends import activation as act
from jmoe.backends import common
from jmoe.backends.spec import BatchedArgs, DeviceSpec, LinearArgs, MoEArgs, OpSpec, Plan, Selection
from jmoe.qtensor import QTensor, index_leading
from pallas_kernels import bits

NAME = "reference"


def plan(op: OpSpec, device: DeviceSpec, *, explicit: bool) -> Plan:
    """Serves everything, everywhere; FP4 activations on a GPU that lacks FP4 matrix units only where asked by name.

    Raises:
      NotImplementedError: such an emulation was not asked for.
    """
    common.check_emulation(op, device, NAME, explicit=explicit)
    work = "" if op.op == "linear" else ", every expert over every token"
    return Plan(accumulation="exact", note=f"float32 definition{work}: for checking, not speed")


def matmul(x: Array, w: Array) -> Array:
    """X (..., M, K) times w (..., N, K) transposed, in float32 with no TF32."""
    return jnp.einsum("...mk,...nk->...mn", x, w, precision=lax.Precision.HIGHEST)


def linear(op: OpSpec, selection: Selection, args: LinearArgs) -> Array:
    """activation(x w^T + bias), (M, N) in ``op.out_dtype``."""
    w = common.at_layer(args.w, args.layer)
    x = common.rounded_input(args.x, w, args.input_scale)
    y = matmul(x, common.values(w))
    if args.bias is not None:
        y = y + common.at_layer(args.bias, args.layer).astype(jnp.float32)[None]
    if op.activation is not None:
        y = act.ungated(op.activation, y)
    return y.astype(op.out_dtype)


def fused_moe(op: OpSpec, selection: Selection, args: MoEArgs) -> Array:
    """y[t] = sum_j weight[t, j] * (w2[e] h + b2[e]), h = activation(w13[e] x[t] + b13[e]), e = ids[t, j]; (T, H)."""
    a = args._replace(**{name: common.at_layer(getattr(args, name), args.layer) for name in ("w13", "w2", "b13", "b2")})
    tokens, k = a.topk_ids.shape
    ids = common.local_ids(a.topk_ids, a.expert_map, op.experts)
    slot_ids = ids.reshape(-1)
    # Before a scale is measured over them.
    x = a.x if isinstance(a.x, QTensor) else common.chosen_rows(a.x, ids)
    if op.weight_on_input:
        x = common.weighted_input(x, a.topk_weights, ids)
    scale = jnp.asarray(1.0, jnp.float32) if a.input_scale is None else a.input_scale
    x_rounded = None if scale.ndim else common.rounded_input(x, a.w13, scale)

    def first(e: Array, h: Array) -> Array:
        rows = common.rounded_input(x, a.w13, scale[e]) if x_rounded is None else x_rounded
        mine = ids == e
        he = intermediate(op, rows, jnp.any(mine, axis=1), a, e)
        return jnp.where(mine[..., None], he[:, None, :], h)

    h = lax.fori_loop(0, op.experts, first, common.zeros((tokens, k, op.intermediate), args))
    h = round_intermediate(op, h.reshape(tokens * k, op.intermediate), a, slot_ids)

    def second(e: Array, y: Array) -> Array:
        mine = (slot_ids == e)[:, None]
        ye = matmul(jnp.where(mine, h, 0), common.values(index_leading(a.w2, e)))
        if a.b2 is not None:
            ye = ye + a.b2[e].astype(jnp.float32)[None]
        return jnp.where(mine, ye, y)

    y = lax.fori_loop(0, op.experts, second, common.zeros((tokens * k, op.hidden), args))
    weight = jnp.ones((tokens, k), jnp.float32) if op.weight_on_input else a.topk_weights
    return combine(y.reshape(tokens, k, op.hidden), weight, ids).astype(op.out_dtype)


def batched_experts(op: OpSpec, selection: Selection, args: BatchedArgs) -> Array:
    """Each expert's own rows, x (E, T, H) of which counts[e] are valid -> (E, T, H); rows beyond are zero."""
    a = args._replace(**{name: common.at_layer(getattr(args, name), args.layer) for name in ("w13", "w2", "b13", "b2")})
    valid = jnp.arange(op.tokens, dtype=jnp.int32)[None] < a.counts[:, None]
    rows = op.experts * op.tokens
    slot_ids = jnp.where(valid, jnp.arange(op.experts, dtype=jnp.int32)[:, None], -1).reshape(rows)
    x = batched_input(op, a, valid, slot_ids)

    def first(e: Array, h: Array) -> Array:
        return h.at[e].set(intermediate(op, x[e], valid[e], a, e))

    h = lax.fori_loop(0, op.experts, first, common.zeros((op.experts, op.tokens, op.intermediate), args))
    h = jnp.where(valid[..., None], h, 0).reshape(rows, op.intermediate)
    h = round_intermediate(op, h, a, slot_ids).reshape(op.experts, op.tokens, op.intermediate)

    def second(e: Array, y: Array) -> Array:
        ye = matmul(h[e], common.values(index_leading(a.w2, e)))
        return y.at[e].set(ye if a.b2 is None else ye + a.b2[e].astype(jnp.float32)[None])

    y = lax.fori_loop(0, op.experts, second, common.zeros((op.experts, op.tokens, op.hidden), args))
    return jnp.where(valid[..., None], y, 0).astype(op.out_dtype)


def batched_input(op: OpSpec, a: BatchedArgs, valid: Array, slot_ids: Array) -> Array:
    """float32 x (E, T, H) after quantisation, with invalid rows zero before it, so that they touch no scale."""
    if isinstance(a.x, QTensor):
        return jnp.where(valid[..., None], a.x.dequantize(), 0)
    x = jnp.where(valid[..., None], a.x, 0).reshape(-1, op.hidden)
    rounded = common.rounded_input(x, a.w13, common.per_row(a.input_scale, slot_ids))
    return rounded.reshape(op.experts, op.tokens, op.hidden)


def intermediate(op: OpSpec, rows: Array, mine: Array, a: MoEArgs | BatchedArgs, e: Array) -> Array:
    """Expert e's intermediate of ``rows`` (M, H): (M, I) float32, before it is rounded.

    Only those of ``mine`` (M,) are e's. Nobody reads the others, but derivatives would still be 0 * NaN where x or an
    expert's weights are not finite, so they are zero before the product and after it.
    """
    assert op.activation is not None
    mine = mine[:, None]
    product = matmul(jnp.where(mine, rows, 0)[None], common.values(index_leading(a.w13, e)))
    if a.b13 is not None:
        product = product + a.b13[e].astype(jnp.float32)[:, None, :]
    product = jnp.where(mine[None], product, 0)
    return common.activate(op.activation, product, common.params_of(a.activation_params, e))


def round_intermediate(op: OpSpec, h: Array, a: MoEArgs | BatchedArgs, slot_ids: Array) -> Array:
    """H (S, I) rounded to x's dtype, then quantised as w2 asks: float32 values."""
    h = bits.round_to(h, op.dtype)
    scheme = common.input_scheme_of(a.w2)
    if scheme is None:
        return h
    return common.quantised_values(h, scheme, common.per_row(a.intermediate_scale, slot_ids))


def combine(y: Array, weight: Array, ids: Array) -> Array:
    """Weighted sum of slot results (T, k, H) in ascending slot order, float32; slots of -1 add nothing, even NaN."""
    # Selected before they are multiplied, or derivatives would be 0 * NaN.
    weight, y = jnp.where(ids >= 0, weight, 0), jnp.where((ids >= 0)[..., None], y, 0)
    total = jnp.zeros((y.shape[0], y.shape[2]), jnp.float32)
    for j in range(y.shape[1]):
        total = total + weight[:, j, None] * y[:, j]
    return total
