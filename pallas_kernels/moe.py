"""Layers of experts: y[t] = sum_j weight[t, j] * (w2[e] h + b2[e]), h = act(w13[e] x[t] + b13[e]), e = ids[t, j].

Five steps: x is quantised, and its slots are aligned; the first product makes the intermediate h, rounded to x's dtype
and quantised; the second product, with bias and router weight; the sum over each token's slots. Each is a launch, but
for h's scales a token or a tensor take one more, since no program of the first product sees all that they cover. Few
slots take two launches altogether, see ``few``.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels import body, few, launch
from pallas_kernels.align import align_chain
from pallas_kernels.combine import combine
from pallas_kernels.experts import Experts, ExpertsSpec, InputScheme, checked, weights_of
from pallas_kernels.fourbit import expand
from pallas_kernels.fourbit.packing import Packed
from pallas_kernels.grouped import WHOLE, Batched, Input, Product, Routed, Rows, Weights
from pallas_kernels.moe_kernels import Again, Epilogue, first_product, quantise_chain, second_product
from pallas_kernels.quantize import Choices


def fused_moe(
    x: Array,
    experts: Experts,
    topk_weights: Array,
    topk_ids: Array,
    *,
    spec: ExpertsSpec,
    x_scale: Array | None = None,
    expert_map: Array | None = None,
    interpret: bool = False,
) -> Array:
    """y[t] = sum_j topk_weights[t, j] * expert(topk_ids[t, j], x[t]), in ascending order of j.

    Args:
      x: (T, H) of ``spec.dtype``, or codes with ``x_scale`` as ``spec.input_scheme`` says.
      experts: E experts' weights.
      topk_weights: float32 (T, k).
      topk_ids: int32 (T, k), any value; a slot whose expert is not here adds nothing, whatever its weight.
      spec: static facts.
      x_scale: (1, 1), (T, 1) or (T, ceil(H/group)), of x given as codes; dtypes as for weights.
      expert_map: int32 (E_global,), the slot here of each expert or -1; ids then count E_global.
      interpret: compute with XLA on any device, for tests.

    Returns:
      (T, H) of ``spec.out_dtype``.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit together.
    """
    sizes = checked(experts, spec)
    tokens, k = topk_ids.shape
    if x.shape != (tokens, sizes.hidden):
        raise ValueError(f"x has shape {x.shape}, but topk_ids {topk_ids.shape} and w13 want {(tokens, sizes.hidden)}")
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(f"topk_weights has shape {topk_weights.shape}, but topk_ids has {topk_ids.shape}")
    if not (tokens and k):
        return jnp.zeros((tokens, sizes.hidden), spec.out_dtype)
    if spec.tiles.single:
        return _few(x, x_scale, experts, topk_weights, topk_ids, expert_map, spec=spec, interpret=interpret)
    ids, slots_a_row, scale = topk_ids.reshape(-1), k, experts.input_scale
    choices = Choices(topk_ids, expert_map)
    if scale is not None and scale.size > 1:
        # A scale an expert: each slot has a row of its own.
        x, slots_a_row, scale = jnp.repeat(x, k, axis=0), 1, _of_experts(scale, ids, expert_map)
    x_chain = _input_chain(x, x_scale, scale, choices, sizes.experts, spec.input_scheme)
    align = align_chain(topk_ids, experts=sizes.experts, rows=spec.tiles.first.block_m, expert_map=expert_map)
    shares = spec.tiles.second.split_k
    # Alignment first: its programs take longest, and the others go on beside them.
    results = launch.run_chains("moe_prepare", align, *([x_chain] if x_chain else []), interpret=interpret)
    y = _products(
        Input(*results[1]) if x_chain else Input(x, x_scale),
        experts,
        Routed(*results[0]),
        topk_weights.reshape(-1),
        slots=ids.size,
        slots_a_row=slots_a_row,
        slot_dtype=spec.dtype if shares == 1 else "float32",
        spec=spec,
        interpret=interpret,
    )
    return combine(
        y,
        topk_ids,
        experts=sizes.experts,
        expert_map=expert_map,
        shares=shares,
        out_dtype=spec.out_dtype,
        interpret=interpret,
    )


def batched_experts(
    x: Array,
    counts: Array,
    experts: Experts,
    *,
    spec: ExpertsSpec,
    x_scale: Array | None = None,
    interpret: bool = False,
) -> Array:
    """y[e, t] = expert(e, x[e, t]) for t < counts[e], zero beyond.

    Args:
      x: (E, T_max, H) of ``spec.dtype``, or codes with ``x_scale``; rows beyond counts may hold anything.
      counts: int32 (E,).
      experts, spec, interpret: as for ``fused_moe``.
      x_scale: (1, 1, 1), (E, T_max, 1) or (E, T_max, ceil(H/group)), of x given as codes; dtypes as for weights.

    Returns:
      (E, T_max, H) of ``spec.out_dtype``.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit together.
    """
    sizes = checked(experts, spec)
    if x.ndim != 3 or x.shape[::2] != (sizes.experts, sizes.hidden) or counts.shape != x.shape[:1]:
        wanted = f"(E, T_max, H) = ({sizes.experts}, T_max, {sizes.hidden})"
        raise ValueError(f"x has shape {x.shape} and counts {counts.shape}, but they are {wanted} and (E,)")
    if spec.tiles.second.split_k != 1:
        raise ValueError(f"second.split_k {spec.tiles.second.split_k} must be 1: nothing sums shares of K here")
    height = x.shape[1]
    if not height:
        return jnp.zeros(x.shape, spec.out_dtype)
    slots = sizes.experts * height
    valid = jnp.arange(height, dtype=jnp.int32)[None] < counts[:, None]
    choices = Choices(jnp.where(valid, 0, -1).astype(jnp.int32).reshape(slots, 1))
    scale = experts.input_scale
    if scale is not None and scale.size > 1:
        scale = jnp.repeat(scale, height)[:, None]
    flat_scale = None if x_scale is None else x_scale.reshape(-1, x_scale.shape[-1])
    x = x.reshape(slots, sizes.hidden)
    chain = _input_chain(x, flat_scale, scale, choices, sizes.experts, spec.input_scheme)
    x_in = Input(x, flat_scale)
    if chain:
        [(codes, scale)] = launch.run_chains("moe_prepare", chain, interpret=interpret)
        x_in = Input(codes, scale)
    y = _products(
        x_in,
        experts,
        Batched(counts),
        None,
        slots=slots,
        slots_a_row=1,
        slot_dtype=spec.out_dtype,
        spec=spec,
        interpret=interpret,
    )
    return y.reshape(sizes.experts, height, sizes.hidden)


def _few(
    x: Array,
    x_scale: Array | None,
    experts: Experts,
    topk_weights: Array,
    topk_ids: Array,
    expert_map: Array | None,
    *,
    spec: ExpertsSpec,
    interpret: bool,
) -> Array:
    """``fused_moe`` without alignment, by ``few``."""
    w13, w2 = weights_of(experts, spec)
    routing = few.Routing(topk_ids.reshape(-1), expert_map, topk_weights.reshape(-1))
    facts = functools.partial(few.Facts, k=topk_ids.shape[1], experts=w13.data.shape[1])
    scheme, h_scheme = spec.input_scheme, spec.intermediate_scheme
    first = facts(tile=spec.tiles.first, scheme=scheme, w_block=spec.w13_block, packing=spec.w13_packing)
    second = facts(tile=spec.tiles.second, scheme=h_scheme, w_block=spec.w2_block, packing=spec.w2_packing)
    vectors = few.Vectors(Input(x, x_scale), _flat(experts.input_scale))
    if x_scale is None and (_measures_tensor(scheme) or not few.reads_values(scheme, first.tile)):
        chain = _input_chain(x, None, None, Choices(topk_ids, expert_map), first.experts, scheme)
        [made] = launch.run_chains("moe_prepare", chain, interpret=interpret)
        vectors = few.Vectors(Input(*made))
    h, amax = few.first_product(
        vectors,
        w13,
        routing,
        jax.tree.map(jnp.ravel, experts.activation_params),
        facts=first,
        activation=spec.activation,
        dtype=spec.dtype,
        measure=h_scheme.codes if h_scheme is not None and _measures_tensor(h_scheme) else None,
        interpret=interpret,
    )
    vectors = few.Vectors(Input(h), _flat(experts.intermediate_scale), amax)
    if h_scheme is not None and not few.reads_values(h_scheme, second.tile):
        chain = quantise_chain(h, h_scheme)
        [made] = launch.run_chains("moe_requantize", chain, interpret=interpret)
        vectors = few.Vectors(Input(*made))
    return few.second_product(vectors, w2, routing, spec.out_dtype, facts=second, interpret=interpret)


def _measures_tensor(scheme: InputScheme | None) -> bool:
    return scheme is not None and scheme.scale == "tensor"


def _flat(scale: Array | None) -> Array | None:
    return None if scale is None else scale.reshape(-1)


def _of_experts(scale: Array, ids: Array, expert_map: Array | None) -> Array:
    """A scale (E,) for each slot, (S, 1); any of them where the slot's expert is not here."""
    if expert_map is not None:
        ids = jnp.take(expert_map, jnp.clip(ids, 0, expert_map.shape[0] - 1), mode="clip")
    return jnp.take(scale, jnp.clip(ids, 0, scale.shape[0] - 1), mode="clip")[:, None]


def _input_chain(
    x: Array,
    x_scale: Array | None,
    scale: Array | None,
    choices: Choices,
    experts: int,
    scheme: InputScheme | None,
) -> launch.Chain:
    """The jobs that quantise x (R, H), none where it is used as it is; ``scale`` is of a static scheme.

    Rows whose ``choices`` are none of the ``experts`` here may hold anything, and touch no scale but their own.
    """
    if (x.dtype in body.CODES) != (x_scale is not None) or (x_scale is not None and scheme is None):
        raise ValueError(f"x is {x.dtype}, x_scale {'missing' if x_scale is None else 'given'} and its scheme {scheme}")
    if scheme is None or x_scale is not None:
        return ()
    scale = None if scale is None else scale.reshape(-1, 1)
    return quantise_chain(x, scheme, scale=scale, choices=choices, experts=experts)


def _products(
    x: Input,
    experts: Experts,
    rows: Rows,
    weights: Array | None,
    *,
    slots: int,
    slots_a_row: int,
    slot_dtype: str,
    spec: ExpertsSpec,
    interpret: bool,
) -> Array:
    """Every slot's result (S, H), in ``slot_dtype``; see ``second_product``."""
    w13, w2 = weights_of(experts, spec)
    given = experts.intermediate_scale
    product = functools.partial(Product, slots=slots, experts=w13.data.shape[1], exact=spec.exact)
    first = product(
        tile=spec.tiles.first,
        slots_a_row=slots_a_row,
        w_block=spec.w13_block,
        packing=spec.w13_packing,
        x_group=_group(spec.input_scheme),
        int8=_is_int8(spec.input_scheme),
    )
    again = None
    if spec.expands:
        x, w13, first, again = _expanded(x, w13, first, interpret)
    h = first_product(
        x,
        w13,
        rows,
        jax.tree.map(jnp.ravel, experts.activation_params),
        None if given is None else given.reshape(-1),
        product=first,
        epilogue=Epilogue(activation=spec.activation, dtype=spec.dtype, scheme=spec.intermediate_scheme),
        again=again,
        interpret=interpret,
    )
    second = product(
        tile=spec.tiles.second,
        w_block=spec.w2_block,
        packing=spec.w2_packing,
        x_group=_group(spec.intermediate_scheme),
        int8=_is_int8(spec.intermediate_scheme),
    )
    if spec.expands:
        h, w2, second, again = _expanded(h, w2, second, interpret)
    return second_product(h, w2, rows, weights, slot_dtype, product=second, again=again, interpret=interpret)


def _expanded(x: Input, w: Weights, product: Product, interpret: bool) -> tuple[Input, Weights, Product, Again]:
    """The operands of a product with its layer's weights expanded, which waits for x: it takes memory no earlier."""
    how = product.packing
    assert how is not None
    layer = jnp.zeros(1, jnp.int32) if w.layer is None else w.layer
    data, expanded, layer = expand.expand_after(x.data, Packed(w.data, w.scale), how, layer, interpret=interpret)
    codes, scale, passes = expanded
    bias = w.bias
    if bias is not None:
        bias = lax.dynamic_index_in_dim(bias, body.existing(layer[0], bias.shape[0]))
    again = replace(product, tile=expand.again_tile(product.tile.block_m), again=True)
    return (
        x._replace(data=data),
        Weights(codes[None], scale[None], bias),
        replace(product, w_block=(1, WHOLE), packing=None),
        Again(w, passes, again),
    )


def _is_int8(scheme: InputScheme | None) -> bool:
    return scheme is not None and scheme.format == "int8"


def _group(scheme: InputScheme | None) -> int:
    return WHOLE if scheme is None else scheme.x_group
