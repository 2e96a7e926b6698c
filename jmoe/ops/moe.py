"""``fused_moe`` and ``batched_experts``: the experts of a Mixture-of-Experts layer."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jmoe.backends.activation import Activation, ActivationParams, as_activation
from jmoe.backends.spec import Accumulation, BatchedArgs, MoEArgs, OpSpec
from jmoe.config import config
from jmoe.ops import call as c
from jmoe.qtensor import QTensor
from jmoe.scheme import Recipe
from pallas_kernels.layouts import CANONICAL


def fused_moe(
    x: Array | QTensor,
    w13: Array | QTensor,
    w2: Array | QTensor,
    topk_weights: Array,
    topk_ids: Array,
    *,
    recipe: Recipe | str | None = None,
    activation: Activation | str = "silu",
    activation_params: ActivationParams | None = None,
    b13: Array | None = None,
    b2: Array | None = None,
    input_scale: Array | float | None = None,
    intermediate_scale: Array | float | None = None,
    weight_on_input: bool = False,
    expert_map: Array | None = None,
    layer: Array | int | None = None,
    accumulation: Accumulation | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> Array:
    """y[t] = sum_j topk_weights[t, j] * expert(topk_ids[t, j], x[t]).

    expert(e, x) = w2[e] h + b2[e], h = activation(w13[e] x + b13[e]). x is quantised as w13 asks, h as w2 asks, after
    it is rounded to x's dtype. The sum over slots is float32 in ascending slot order.

    Args:
      x: (..., H) bfloat16, float16 or float32, or a QTensor (T, H) quantized as w13 asks.
      w13: QTensor or array (E, 2, I, H), half 0 gate and half 1 up; (E, 1, I, H) ungated; with ``layer`` (L, E, ...).
      w2: QTensor or array (E, H, I); with ``layer`` (L, E, H, I).
      topk_weights: (..., k), router weights; cast to float32.
      topk_ids: (..., k) integers in [0, E_global); -1 is no expert, and its weight is ignored, even NaN. Any other
        value contributes nothing, and raises under ``jmoe.config(check=True)``.
      recipe: how activations are quantised in this call, instead of the weights' own input schemes.
      activation: an ``Activation`` or its name; gated where w13 has two halves.
      activation_params: per-expert constants of swiglu, (E,) each.
      b13: (E, halves, I); b2: (E, H); with ``layer`` (L, ...). Not quantized.
      input_scale: float32 () or (E,), x's scale where w13's input scheme is static, and only there.
      intermediate_scale: float32 () or (E,), the same for h and w2.
      weight_on_input: the weight multiplies x, in x's dtype before quantisation, instead of the result (k = 1 only).
      expert_map: integers (E_global,), the local slot of each expert or -1; ids then count E_global.
      layer: index of the layer in stacked weights; the implementation indexes, so that nothing is copied.
      accumulation: as for ``linear``.
      preferred_element_type: dtype of the result; x's by default, bfloat16 for a quantized x.
      implementation: "triton", "xla" or "reference"; None lets the selector choose.

    Returns:
      (..., H).

    Raises:
      ValueError: shapes, scales, an activation or a recipe that do not fit; TypeError: dtypes.
      NotImplementedError: the implementation asked for cannot serve, with the reason.
      ExceptionGroup: none can.
    """
    experts = _Experts(w13, w2, recipe, activation, activation_params, b13, b2, layer)
    x = c.as_input(x, experts.recipe, 1)
    experts.check_hidden(x)
    lead = x.shape[:-1]
    if isinstance(x, QTensor) and x.ndim != 2:
        raise ValueError(f"x is a QTensor of shape {x.shape}, but a quantized activation is (T, H)")
    topk_weights, topk_ids = jnp.asarray(topk_weights), jnp.asarray(topk_ids)
    if topk_ids.ndim != len(lead) + 1 or topk_ids.shape[:-1] != lead:
        raise ValueError(f"topk_ids has shape {topk_ids.shape}, but x has tokens of shape {lead}: it is {(*lead, 'k')}")
    k = topk_ids.shape[-1]
    c.check_shape("topk_weights", topk_weights, (*lead, k), "topk_ids' shape")
    if not jnp.issubdtype(topk_ids.dtype, jnp.integer):
        raise TypeError(f"topk_ids has dtype {topk_ids.dtype}, but expert ids are integers")
    if not jnp.issubdtype(topk_weights.dtype, jnp.floating):
        raise TypeError(f"topk_weights has dtype {topk_weights.dtype}, but router weights are floating point")
    if weight_on_input and k != 1:
        raise ValueError(f"weight_on_input=True multiplies x by one weight, but topk_ids has k = {k}")
    global_experts = experts.count
    if expert_map is not None:
        expert_map = jnp.asarray(expert_map)
        if expert_map.ndim != 1 or not jnp.issubdtype(expert_map.dtype, jnp.integer):
            raise ValueError(
                f"expert_map has shape {expert_map.shape} and dtype {expert_map.dtype}, "
                "but it is one integer per global expert, (E_global,)"
            )
        global_experts = expert_map.shape[0]
    c.check_accumulation(accumulation)
    dtype, out_dtype = c.dtypes(x, preferred_element_type)
    tokens = math.prod(lead)
    given = isinstance(x, QTensor)
    args = MoEArgs(
        x=x if isinstance(x, QTensor) else x.reshape(tokens, experts.hidden),
        w13=experts.w13,
        w2=experts.w2,
        topk_weights=topk_weights.astype(jnp.float32).reshape(tokens, k),
        topk_ids=_as_ids(topk_ids, global_experts).reshape(tokens, k),
        b13=b13,
        b2=b2,
        input_scale=c.static_scale("input_scale", input_scale, None if given else experts.recipe.input, experts.count),
        intermediate_scale=c.static_scale(
            "intermediate_scale", intermediate_scale, experts.second.input, experts.count
        ),
        expert_map=expert_map,
        layer=experts.layer,
        activation_params=activation_params,
    )
    op = experts.spec(
        op="moe",
        tokens=tokens,
        global_experts=global_experts,
        top_k=k,
        dtype=dtype,
        out_dtype=out_dtype,
        weight_on_input=weight_on_input,
        expert_map=expert_map is not None,
        quantized_input=given,
        accumulation=accumulation,
        mesh=c.mesh_axes(x, w13, w2),
    )
    return c.call(op, args, implementation).reshape(*lead, experts.hidden)


def batched_experts(
    x: Array | QTensor,
    counts: Array,
    w13: Array | QTensor,
    w2: Array | QTensor,
    *,
    recipe: Recipe | str | None = None,
    activation: Activation | str = "silu",
    activation_params: ActivationParams | None = None,
    b13: Array | None = None,
    b2: Array | None = None,
    input_scale: Array | float | None = None,
    intermediate_scale: Array | float | None = None,
    layer: Array | int | None = None,
    accumulation: Accumulation | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> Array:
    """Every expert applied to rows of its own: y[e, t] = expert(e, x[e, t]) for t < counts[e], zero beyond.

    The form that expert parallelism's dispatch hands over; ``fused_moe`` gives the formula and the options.

    Args:
      x: (E, T_max, H) bfloat16, float16 or float32, or a QTensor; rows beyond counts may hold anything, even NaN.
      counts: integers (E,), valid rows of each expert; clipped to [0, T_max], and a value outside raises under
        ``jmoe.config(check=True)``.
      w13, w2, and the options: as for ``fused_moe``.

    Returns:
      (E, T_max, H).
    """
    experts = _Experts(w13, w2, recipe, activation, activation_params, b13, b2, layer)
    x = c.as_input(x, experts.recipe, 3)
    experts.check_hidden(x)
    counts = jnp.asarray(counts)
    if x.ndim != 3 or x.shape[0] != experts.count:
        raise ValueError(f"x has shape {tuple(x.shape)}, but it is (E, T_max, H) with E = {experts.count}")
    c.check_shape("counts", counts, (experts.count,), "(E,)")
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise TypeError(f"counts has dtype {counts.dtype}, but counts are integers")
    rows = x.shape[1]
    c.check_values((counts >= 0) & (counts <= rows), f"counts must lie in [0, T_max = {rows}]")
    c.check_accumulation(accumulation)
    dtype, out_dtype = c.dtypes(x, preferred_element_type)
    given = isinstance(x, QTensor)
    args = BatchedArgs(
        x=x,
        counts=jnp.clip(counts, 0, min(rows, jnp.iinfo(counts.dtype).max)).astype(jnp.int32),
        w13=experts.w13,
        w2=experts.w2,
        b13=b13,
        b2=b2,
        input_scale=c.static_scale("input_scale", input_scale, None if given else experts.recipe.input, experts.count),
        intermediate_scale=c.static_scale(
            "intermediate_scale", intermediate_scale, experts.second.input, experts.count
        ),
        layer=experts.layer,
        activation_params=activation_params,
    )
    op = experts.spec(
        op="batched_experts",
        tokens=rows,
        global_experts=experts.count,
        dtype=dtype,
        out_dtype=out_dtype,
        quantized_input=given,
        accumulation=accumulation,
        mesh=c.mesh_axes(x, w13, w2),
    )
    return c.call(op, args, implementation)


def _as_ids(ids: Array, experts: int) -> Array:
    """int32 ids; what is out of range becomes -1 before a narrower type could wrap it into range."""
    inside = (ids >= 0) & (ids <= min(experts - 1, jnp.iinfo(ids.dtype).max))
    unused = ids == -1 if jnp.issubdtype(ids.dtype, jnp.signedinteger) else jnp.zeros_like(inside)
    c.check_values(inside | unused, f"topk_ids must be -1 or lie in [0, {experts})")
    return jnp.where(inside, ids.astype(jnp.int32), -1)


class _Experts:
    """The weights of a layer's experts, checked, and what follows from their shapes."""

    def __init__(
        self,
        w13: Array | QTensor,
        w2: Array | QTensor,
        recipe: Recipe | str | None,
        activation: Activation | str,
        params: ActivationParams | None,
        b13: Array | None,
        b2: Array | None,
        layer: Array | int | None,
    ) -> None:
        w13 = c.check_weight("w13", w13, 4, layer, "(E, halves, I, H)")
        w2 = c.check_weight("w2", w2, 3, layer, "(E, H, I)")
        self.recipe, self.second = c.resolve_recipe("w13", w13, recipe), c.resolve_recipe("w2", w2, recipe)
        self.w13, self.w2 = c.with_input_of(w13, self.recipe), c.with_input_of(w2, self.second)
        self.count, self.halves, self.intermediate, self.hidden = w13.shape[-4:]
        if self.halves not in (1, 2):
            raise ValueError(f"w13 has shape {tuple(w13.shape)}, but it is (E, halves, I, H) with one or two halves")
        self.layers = w13.shape[0] if layer is not None else None
        stack = () if self.layers is None else (self.layers,)
        c.check_shape("w2", w2, (*stack, self.count, self.hidden, self.intermediate), "(E, H, I) to match w13")
        c.check_shape("b13", b13, (*stack, self.count, self.halves, self.intermediate), "(E, halves, I)")
        c.check_shape("b2", b2, (*stack, self.count, self.hidden), "(E, H)")
        self.bias = b13 is not None or b2 is not None
        self.layer = c.as_layer(layer, self.layers)
        self.activation = as_activation(activation)
        self.activation.check_halves(self.halves)
        if params is not None:
            if self.activation.name != "swiglu" or self.halves == 1:
                raise ValueError(f"activation_params go with a gated swiglu, not with {self.activation}")
            for name, value in params._asdict().items():
                c.check_shape(f"activation_params.{name}", value, (self.count,), "(E,)")

    def check_hidden(self, x: Array | QTensor) -> None:
        if x.shape[-1] != self.hidden:
            raise ValueError(f"x has shape {tuple(x.shape)}, but w13 has H = {self.hidden}")

    def spec(self, **facts: Any) -> OpSpec:
        return OpSpec(
            recipe=self.recipe,
            second_recipe=None if self.second == self.recipe else self.second,
            hidden=self.hidden,
            experts=self.count,
            intermediate=self.intermediate,
            gated=self.halves == 2,
            activation=self.activation,
            bias=self.bias,
            layers=self.layers,
            layout=self.w13.layout if isinstance(self.w13, QTensor) else CANONICAL,
            batch_invariant=config.batch_invariant,
            **facts,
        )
