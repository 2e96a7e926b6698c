"""``fused_moe`` and ``batched_experts``: the experts of a Mixture-of-Experts layer."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jmoe.arguments import as_array
from jmoe.backends.activation import Activation, ActivationParams, as_activation
from jmoe.backends.spec import Accumulation, BatchedArgs, MoEArgs, OpSpec
from jmoe.config import config
from jmoe.ops import validate as v
from jmoe.ops.call import call
from jmoe.qtensor import QTensor
from jmoe.scheme import Recipe
from jmoe.sharding import automatic_inside, spec_of
from pallas_kernels.layouts import CANONICAL


def _place(y: Array, x: Any, *_: Any, **__: Any) -> PartitionSpec:
    """As x is."""
    return PartitionSpec(*spec_of(x.data if isinstance(x, QTensor) else x))


@automatic_inside(_place)
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
        value contributes nothing, and raises under ``jmoe.config(check=True)``. A token none of whose experts is here
        may hold anything: it touches no scale that is measured over tokens.
      recipe: how activations are quantised in this call, instead of the weights' own input schemes.
      activation: an ``Activation`` or its name; gated where w13 has two halves.
      activation_params: constants of a gated swiglu as arrays, () or (E,) each, instead of the activation's own.
      b13: (E, halves, I); b2: (E, H); with ``layer`` (L, ...). Not quantized.
      input_scale: float32 () or (E,), x's scale where w13's input scheme is static, and only there.
      intermediate_scale: float32 () or (E,), the same for h and w2.
      weight_on_input: the weight multiplies x, in x's dtype before quantisation, instead of the result (k = 1 only).
      expert_map: integers (E_global,), the local slot of each expert or -1; ids then count E_global.
      layer: index of the layer in stacked weights; the implementation indexes, so that nothing is copied.
        A number outside [0, L) raises; one that is traced, or on a device, does so under ``jmoe.config(check=True)``
        only: without it the nearest layer is taken, as JAX does for indices.
      accumulation: as for ``linear``.
      preferred_element_type: dtype of the result; x's by default, bfloat16 for a quantized x.
      implementation: "triton", "xla" or "reference"; None lets the selector choose.

    Returns:
      (..., H). On a mesh with explicit axes, sharded as x is.

    Raises:
      ValueError: shapes, scales, an activation or a recipe that do not fit; TypeError: dtypes.
      NotImplementedError: the implementation asked for cannot serve, with the reason.
      ExceptionGroup: none can.
    """
    experts = Experts(w13, w2, recipe, activation, activation_params, b13, b2, layer)
    x = experts.as_input(x, "(..., H)", "(T, H)")
    lead = x.shape[:-1]
    tokens = math.prod(lead)
    routed = as_routed(lead, topk_weights, topk_ids, expert_map, experts.count)
    k = routed.ids.shape[-1]
    if weight_on_input and k != 1:
        raise ValueError(f"weight_on_input=True multiplies x by one weight, but topk_ids has k = {k}")
    if weight_on_input and isinstance(x, QTensor):
        raise ValueError("weight_on_input=True multiplies x before it is quantised, but x is a QTensor")
    args = MoEArgs(
        x=x if isinstance(x, QTensor) else x.reshape(tokens, experts.hidden),
        topk_weights=routed.weights.astype(jnp.float32).reshape(tokens, k),
        topk_ids=routed.ids.reshape(tokens, k),
        expert_map=routed.expert_map,
        **experts.arrays(x, input_scale, intermediate_scale),
    )
    op = experts.spec(
        x,
        preferred_element_type,
        accumulation,
        op="moe",
        tokens=tokens,
        global_experts=routed.experts * config.shards.experts,
        top_k=k,
        weight_on_input=weight_on_input,
        expert_map=routed.expert_map is not None,
    )
    return call(op, args, implementation).reshape(*lead, experts.hidden)


@automatic_inside(_place)
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
      w13, w2, and the options: as for ``fused_moe``, a ``layer`` outside [0, L) too.

    Returns:
      (E, T_max, H). On a mesh with explicit axes, sharded as x is.
    """
    experts = Experts(w13, w2, recipe, activation, activation_params, b13, b2, layer)
    x = experts.as_input(x, "(E, T_max, H)", "(E, T_max, H)")
    if x.shape[0] != experts.count:
        raise ValueError(f"x has shape {tuple(x.shape)}, but it is (E, T_max, H) with E = {experts.count}")
    rows = x.shape[1]
    counts = v.as_int32("counts", counts)
    v.check_shape("counts", counts, (experts.count,), "(E,)")
    v.check_range("counts", counts, 0, rows)
    args = BatchedArgs(x=x, counts=jnp.clip(counts, 0, rows), **experts.arrays(x, input_scale, intermediate_scale))
    op = experts.spec(
        x,
        preferred_element_type,
        accumulation,
        op="batched_experts",
        tokens=rows,
        global_experts=experts.count,
    )
    return call(op, args, implementation)


class RoutedTokens(NamedTuple):
    """What a router decided, checked: weights and ids (*lead, k), and a map of as many ``experts`` as ids count."""

    weights: Array
    ids: Array
    expert_map: Array | None
    experts: int


def as_routed(lead: tuple[int, ...], topk_weights: Any, topk_ids: Any, expert_map: Any, slots: int) -> RoutedTokens:
    """A router's decisions for tokens of shape ``lead`` among ``slots`` local experts.

    Raises:
      ValueError: shapes that do not fit; TypeError: dtypes.
    """
    topk_ids = v.as_int32("topk_ids", topk_ids)
    if topk_ids.ndim != len(lead) + 1 or topk_ids.shape[:-1] != lead:
        raise ValueError(f"topk_ids has shape {topk_ids.shape}, but x has tokens of shape {lead}: it is {(*lead, 'k')}")
    topk_weights = as_array("topk_weights", topk_weights)
    if not jnp.issubdtype(topk_weights.dtype, jnp.floating):
        raise TypeError(f"topk_weights has dtype {topk_weights.dtype}, but router weights are floating point")
    v.check_shape("topk_weights", topk_weights, topk_ids.shape, "topk_ids' shape")
    experts = slots
    if expert_map is not None:
        expert_map = v.as_int32("expert_map", expert_map)
        if expert_map.ndim != 1 or not expert_map.size:
            raise ValueError(f"expert_map has shape {expert_map.shape}, but it is (E_global,), a local slot or -1 each")
        experts = expert_map.shape[0]
        v.check_range("expert_map", expert_map, -1, slots - 1)
    v.check_range("topk_ids", topk_ids, -1, experts - 1)
    return RoutedTokens(topk_weights, topk_ids, expert_map, experts)


class Experts:
    """The weights of a layer's experts, checked, and what follows from them."""

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
        merged = ", half 0 gate and half 1 up; a merged (E, 2 I, H) is reshaped to it"
        w13 = v.as_weight("w13", w13, "(E, halves, I, H)", layer, hint=merged)
        w2 = v.as_weight("w2", w2, "(E, H, I)", layer)
        self.count, self.halves, self.intermediate, self.hidden = w13.shape[-4:]
        if self.halves not in (1, 2):
            raise ValueError(f"w13 has shape {tuple(w13.shape)}, but it is (E, halves, I, H) with one or two halves")
        self.layer, self.layers = v.as_layer(layer, w13)
        fitting, axes = v.stacked((self.count, self.hidden, self.intermediate), "(E, H, I)", self.layers)
        if tuple(w2.shape) != fitting:
            raise ValueError(
                f"w2 has shape {tuple(w2.shape)}, but w13 of shape {tuple(w13.shape)} goes with {axes} = {fitting}; "
                "weights are (out, in), not transposed"
            )
        self.w13, self.recipe = v.with_recipe("w13", w13, recipe)
        self.w2, self.second = v.with_recipe("w2", w2, recipe)
        self.b13 = v.as_bias("b13", b13, w13.shape[-4:-1], "(E, halves, I)", self.layers)
        self.b2 = v.as_bias("b2", b2, (self.count, self.hidden), "(E, H)", self.layers)
        self.activation = as_activation(activation)
        self.activation.check_halves(self.halves)
        self.params = v.as_activation_params(params, self.activation, self.count, self.halves)

    def as_input(self, x: Any, axes: str, quantized_axes: str) -> Array | QTensor:
        x = v.as_input(x, self.recipe, axes, quantized_axes)
        if x.shape[-1] != self.hidden:
            raise ValueError(f"x has shape {tuple(x.shape)}, but w13 has H = {self.hidden}")
        return x

    def arrays(self, x: Array | QTensor, input_scale: Any, intermediate_scale: Any) -> dict[str, Any]:
        """The arguments that both operations hand to their implementations."""
        quantized, count = isinstance(x, QTensor), self.count
        return {
            "w13": self.w13,
            "w2": self.w2,
            "b13": self.b13,
            "b2": self.b2,
            "input_scale": v.as_static_scale(
                "input_scale", input_scale, self.recipe.input, quantized=quantized, experts=count
            ),
            "intermediate_scale": v.as_static_scale(
                "intermediate_scale", intermediate_scale, self.second.input, quantized=False, experts=count
            ),
            "layer": self.layer,
            "activation_params": self.params,
        }

    def spec(
        self,
        x: Array | QTensor,
        preferred_element_type: jax.typing.DTypeLike | None,
        accumulation: Accumulation | None,
        **facts: Any,
    ) -> OpSpec:
        v.check_accumulation(accumulation)
        dtype, out_dtype = v.dtypes(x, preferred_element_type)
        return OpSpec(
            recipe=self.recipe,
            second_recipe=None if self.second == self.recipe else self.second,
            hidden=self.hidden,
            experts=self.count,
            intermediate=self.intermediate,
            gated=self.halves == 2,
            dtype=dtype,
            out_dtype=out_dtype,
            activation=self.activation,
            bias=self.b13 is not None or self.b2 is not None,
            layers=self.layers,
            quantized_input=isinstance(x, QTensor),
            accumulation=accumulation,
            layout=self.w13.layout.kind if isinstance(self.w13, QTensor) else CANONICAL,
            **facts,
        )
