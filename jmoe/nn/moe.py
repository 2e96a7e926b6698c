"""``FusedMoE``: router, experts and shared expert of a Mixture-of-Experts layer."""

from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from jmoe import ops, parallel
from jmoe.arguments import COMPUTE_DTYPES, as_array, check_type, float_dtype
from jmoe.backends.activation import Activation
from jmoe.nn import experts as ex
from jmoe.nn import mesh, options, param
from jmoe.nn.param import AxisName
from jmoe.ops import Routed, Routing
from jmoe.qtensor import QTensor
from jmoe.scheme import Recipe, as_recipe
from jmoe.sharding import spec_of


class FusedMoE(nnx.Module):
    r"""A Mixture-of-Experts layer: a router and experts of two products, with plain or quantized weights.

    .. math::
      y = \sum_{j \in \mathrm{top}_k} p_j \, \mathrm{expert}_j(x) \; (+ \; g(x) \, \mathrm{shared}(x)), \qquad
      \mathrm{expert}_e(x) = W_{2,e} \, \mathrm{act}(W_{13,e} \, x + b_{13,e}) + b_{2,e}

    Created without ``rngs`` router and experts are zero throughout, and so is the experts' sum, until they are set,
    from a checkpoint, say. ``from_dense`` and ``from_quantized`` take weights that are there.

    Router logits, scores and the sum over experts are float32, whatever x is. The shared expert is added as it is,
    without the router's weights or scale; with ``shared_gate`` it is multiplied by g(x) = sigmoid(x . gate)
    (Qwen2-MoE).

    Example usage::

      >>> import jax, jmoe
      >>> from flax import nnx
      >>> from jmoe.nn import FusedMoE
      ...
      >>> routing = jmoe.Routing(top_k=2, renormalize=True)
      >>> moe = FusedMoE(64, 128, 8, routing, recipe="int4:group=32", rngs=nnx.Rngs(0))
      >>> moe.w13.shape, moe.w13.dtype  # experts, gate and up, I, bytes of H
      ((8, 2, 128, 32), dtype('uint8'))
      >>> x = jax.random.normal(jax.random.key(1), (4, 7, 64))
      >>> moe(x).shape
      (4, 7, 64)

    Variables: ``w13`` (E, 2, I, H), half 0 gate and half 1 up, or (E, 1, I, H) ungated; ``w2`` (E, H, I); each an
    ``nnx.Param``, or a ``QuantizedParam`` together with ``w13_scale``, ``w13_global_scale`` and ``w13_zero_point``;
    ``w13_input_scale`` (), ``w2_input_scale`` (E,), float32, where activations' scales are given ones; ``b13``
    (E, halves, I), ``b2`` (E, H); ``router_weight`` (experts, H), ``router_bias`` and ``e_score_correction_bias``
    (experts,), ``shared_gate_weight`` (1, H), ``expert_map`` (experts,). What is absent is None. In stacked modules
    each has a leading axis of layers.

    On a mesh whose axes ``sharding`` names for experts or intermediate, every device computes with its own part of the
    experts' weights (``jmoe.parallel.fused_moe``). A name for hidden is where weights are kept, not how they are
    computed with.

    Args:
      hidden_size: H.
      intermediate_size: I.
      num_experts: experts that the router knows, without ``routing.n_identity``.
      routing: how the router decides.
      recipe: how weights and activations are quantized, a Recipe or its name (default: ``"bf16"``, not at all).
      activation: between the two products (default: ``"silu"``).
      gated: whether w13 has the two halves gate and up (default: True).
      use_bias: whether experts have biases (default: False).
      router_bias: whether router logits have a bias (default: False).
      correction_bias: whether the router has DeepSeek-V3's e_score_correction_bias (default: False).
      shared: a module x -> y that every token passes, added to the experts' sum (default: None).
      shared_gate: whether it is gated (default: False).
      expert_map: integers (num_experts,): the local slot of each expert, -1 where it is elsewhere (default: None, all
        are here in order).
      num_local_experts: slots whose weights are here, E (default: num_experts).
      dtype: what x is cast to for the experts (default: x's own dtype, which is then the result's).
      param_dtype: dtype of unquantized weights and biases (default: bfloat16).
      router_dtype: dtype in which the router's weight is held (default: float32).
      sharding: the mesh axis over which each of (experts, intermediate, hidden) is sharded; see ``Linear``.
      implementation: taken by name (default: the selector's choice).
      rngs: keys of the initial weights; None (default) leaves all of them zero.
    """

    weight_names = ("w13", "w2")
    bias_names = ("b13", "b2")

    layer: Array | None
    w13: nnx.Variable
    w2: nnx.Variable
    w13_input_scale: nnx.Variable | None
    w2_input_scale: nnx.Variable | None
    b13: nnx.Variable | None
    b2: nnx.Variable | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        routing: Routing,
        *,
        recipe: Recipe | str = "bf16",
        activation: Activation | str = "silu",
        gated: bool = True,
        use_bias: bool = False,
        router_bias: bool = False,
        correction_bias: bool = False,
        shared: nnx.Module | None = None,
        shared_gate: bool = False,
        expert_map: Array | Sequence[int] | None = None,
        num_local_experts: int | None = None,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.bfloat16,
        router_dtype: jax.typing.DTypeLike = jnp.float32,
        sharding: Sequence[AxisName] = (None, None, None),
        implementation: str | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        check_type("routing", routing, Routing, "a jmoe.Routing")
        num_experts = options.extent("num_experts", num_experts)
        routing.check_experts(num_experts + routing.n_identity)
        for name, value in (
            ("gated", gated),
            ("use_bias", use_bias),
            ("router_bias", router_bias),
            ("correction_bias", correction_bias),
            ("shared_gate", shared_gate),
        ):
            options.flag(name, value)
        options.check_rngs(rngs)
        options.check_shared(shared)
        if shared_gate and shared is None:
            raise ValueError("shared_gate=True gates a shared expert, but shared is None")
        local = num_experts
        if num_local_experts is not None:
            local = options.extent("num_local_experts", num_local_experts, least=0)  # a rank may hold none
        if local != num_experts and expert_map is None:
            raise ValueError(f"num_local_experts={local} of {num_experts} needs an expert_map")
        param_dtype = float_dtype("param_dtype", param_dtype, COMPUTE_DTYPES)
        router_dtype = float_dtype("router_dtype", router_dtype)
        self.hidden_size = options.extent("hidden_size", hidden_size)
        self.intermediate_size = options.extent("intermediate_size", intermediate_size)
        self.num_experts = num_experts
        self.num_local_experts = local
        self.routing = routing
        options.check_activation(activation, 2 if gated else 1)
        self.activation = activation
        self.gated = gated
        self.dtype = options.optional_dtype("dtype", dtype)
        self.sharding = param.checked_axes("sharding", sharding, ("experts", "intermediate", "hidden"))
        options.check_implementation(implementation)
        self.implementation = implementation
        self.layer = nnx.data(None)
        self.shared = nnx.data(shared)

        how = as_recipe(recipe)
        halves = 2 if gated else 1
        self._init_weight("w13", (local, halves, intermediate_size, hidden_size), how, param_dtype, rngs)
        self._init_weight("w2", (local, hidden_size, intermediate_size), how, param_dtype, rngs)
        self.b13 = nnx.data(None)
        self.b2 = nnx.data(None)
        if use_bias:
            self.set_biases(
                jnp.zeros((local, halves, intermediate_size), param_dtype),
                jnp.zeros((local, hidden_size), param_dtype),
            )
        logits = num_experts + routing.n_identity
        router = jnp.zeros((logits, hidden_size), router_dtype)
        if rngs is not None:
            router = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2)(
                rngs.params(), (logits, hidden_size), router_dtype
            )
        self.router_weight = nnx.Param(router)
        self.router_bias = nnx.data(nnx.Param(jnp.zeros((logits,), router_dtype)) if router_bias else None)
        self.e_score_correction_bias = nnx.data(
            nnx.Param(jnp.zeros((logits,), jnp.float32)) if correction_bias else None
        )
        self.shared_gate_weight = nnx.data(nnx.Param(jnp.zeros((1, hidden_size), param_dtype)) if shared_gate else None)
        self.expert_map = nnx.data(None)
        if expert_map is not None:
            self.expert_map = nnx.Variable(checked_map(expert_map, num_experts, local))

    def _init_weight(
        self,
        name: str,
        shape: tuple[int, ...],
        recipe: Recipe,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs | None,
    ) -> None:
        # Taken even where no expert is here, so that every rank draws the same router.
        key = None if rngs is None else rngs.params()
        if key is None or not self.num_local_experts:
            weight = param.empty(shape, recipe, dtype)
        else:
            batch = tuple(range(len(shape) - 2))
            init = nnx.initializers.lecun_normal(in_axis=-1, out_axis=-2, batch_axis=batch)
            weight = ex.quantize_experts(init(key, shape, dtype), recipe, first=name == "w13")
        weight = param.prepared(weight, "moe", self.implementation)
        scale, scale_shape = None, () if name == "w13" else (self.num_local_experts,)
        if recipe.input is not None and recipe.input.static:
            scale = jnp.ones(scale_shape, jnp.float32)
        param.set_weight(self, name, weight, self._axes(name), input_scale=scale, scale_shapes=[scale_shape])

    def _axes(self, name: str) -> tuple[AxisName, ...]:
        experts, intermediate, hidden = self.sharding
        return (experts, None, intermediate, hidden) if name == "w13" else (experts, hidden, intermediate)

    @classmethod
    def from_dense(
        cls,
        w13: Array | tuple[Array, Array],
        w2: Array,
        routing: Routing,
        *,
        router_weight: Array,
        recipe: Recipe | str = "bf16",
        layout: str = "out_in",
        gated: bool = True,
        b13: Array | tuple[Array, Array] | None = None,
        b2: Array | None = None,
        **others: Any,
    ) -> Self:
        """A layer from dense weights, quantized here, one expert at a time.

        Args:
          w13: float. Gate and up as a pair of (E, I, H), or one array: (E, 2, I, H), or (E, 2I, H) with the rows of the
            gate first; ungated (E, I, H) or (E, 1, I, H). With ``layout="in_out"`` a pair of (E, H, I), or (E, H, 2I)
            with the columns of the gate first; ungated (E, H, I).
          w2: float (E, H, I); with ``layout="in_out"`` (E, I, H).
          routing: how the router decides.
          router_weight: (experts, H) in either layout.
          recipe: as for the class; "bf16" takes the weights as they are, also in float16 or float32.
          layout: "out_in", as checkpoints of PyTorch modules have it (y = x w^T), or "in_out" (y = x w).
          gated: whether w13 has gate and up.
          b13: (E, 2, I), (E, 2I) or a pair of (E, I); ungated (E, I) or (E, 1, I).
          b2: (E, H).
          **others: as for ``from_quantized``.

        Raises:
          ValueError: shapes that do not fit each other, or an unknown layout.
        """
        how = as_recipe(recipe)
        options.flag("gated", gated)
        asked = others.get("implementation")
        return cls.from_quantized(
            param.prepared(ex.first_weight(w13, how, layout=layout, gated=gated), "moe", asked),
            param.prepared(ex.second_weight(w2, how, layout=layout), "moe", asked),
            routing,
            router_weight=router_weight,
            b13=None if b13 is None else ex.first_bias(b13, gated=gated),
            b2=b2,
            **others,
        )

    @classmethod
    def from_quantized(
        cls,
        w13: QTensor | Array,
        w2: QTensor | Array,
        routing: Routing,
        *,
        router_weight: Array,
        router_bias: Array | None = None,
        correction_bias: Array | None = None,
        b13: Array | None = None,
        b2: Array | None = None,
        input_scale: Array | float | None = None,
        intermediate_scale: Array | float | None = None,
        shared: nnx.Module | None = None,
        shared_gate_weight: Array | None = None,
        **others: Any,
    ) -> Self:
        """A layer from weights as they are, QTensors or plain arrays.

        Args:
          w13: (E, 2, I, H), or (E, 1, I, H) ungated; its ``input_scheme`` says how x is quantised.
          w2: (E, H, I); its ``input_scheme`` says how the intermediate is quantised.
          routing: how the router decides.
          router_weight: (experts, H), kept in its dtype.
          router_bias: (experts,), added to the logits.
          correction_bias: (experts,), DeepSeek-V3's e_score_correction_bias.
          b13: (E, halves, I); b2: (E, H).
          input_scale: float32 () or (E,), where w13's input scheme is static.
          intermediate_scale: float32 () or (E,), where w2's is.
          shared: the shared expert, a module x -> y.
          shared_gate_weight: (H,) or (1, H), its gate.
          **others: use_bias (zeros where b13 and b2 are not given), activation, expert_map, dtype, param_dtype,
            sharding, implementation: as for the class.

        Raises:
          ValueError: shapes that do not fit each other; TypeError: dtypes, or an option that the weights decide.
        """
        check_type("routing", routing, Routing, "a jmoe.Routing")
        options.check_shared(shared)
        decided = ("recipe", "rngs", "router_dtype", "shared_gate", "gated", "num_local_experts")
        options.refuse(others, decided, "the arrays that are given decide")
        w13, w2 = param.checked_weight("w13", w13), param.checked_weight("w2", w2)
        router_weight = _checked_float("router_weight", router_weight)
        if router_weight.ndim != 2:
            raise ValueError(f"router_weight has shape {router_weight.shape}, but it is (experts, H)")
        if len(w13.shape) != 4 or w13.shape[1] not in (1, 2):
            raise ValueError(f"w13 has shape {tuple(w13.shape)}, but it is (E, 2, I, H), or (E, 1, I, H) ungated")
        local, halves, intermediate, hidden = w13.shape
        experts = router_weight.shape[0] - routing.n_identity
        layer = nnx.eval_shape(
            lambda: cls(
                hidden,
                intermediate,
                experts,
                routing,
                gated=halves == 2,
                num_local_experts=local,
                **others,
            )
        )
        layer.set_w13(w13, input_scale=input_scale)
        layer.set_w2(w2, input_scale=intermediate_scale)
        if layer.b13 is not None and b13 is None:
            b13 = jnp.zeros(layer.b13.get_raw_value().shape, layer.b13.get_raw_value().dtype)
        if layer.b2 is not None and b2 is None:
            b2 = jnp.zeros(layer.b2.get_raw_value().shape, layer.b2.get_raw_value().dtype)
        layer.set_biases(b13, b2)
        for name, value, shape in (
            ("router_weight", router_weight, (experts + routing.n_identity, hidden)),
            ("router_bias", router_bias, (experts + routing.n_identity,)),
            ("e_score_correction_bias", correction_bias, (experts + routing.n_identity,)),
        ):
            value = None if value is None else _checked_float(name, value)
            if value is not None and tuple(value.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, but here it is {shape}")
            setattr(layer, name, nnx.data(None if value is None else nnx.Param(value)))
        layer.shared = nnx.data(shared)
        if shared_gate_weight is not None:
            if shared is None:
                raise ValueError("shared_gate_weight gates a shared expert, but shared is None")
            gate = _checked_float("shared_gate_weight", shared_gate_weight)
            if gate.shape not in ((hidden,), (1, hidden)):
                raise ValueError(f"shared_gate_weight has shape {gate.shape}, but it is {(hidden,)} or {(1, hidden)}")
            layer.shared_gate_weight = nnx.Param(gate.reshape(1, hidden))
        if others.get("expert_map") is not None:
            layer.expert_map = nnx.Variable(checked_map(others["expert_map"], experts, local))
        return layer

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The leading axes that stacking has given to each variable, () of a single layer."""
        return param.stack_shape(self, "w13", 4)

    @property
    def qw13(self) -> Array | QTensor:
        """The first product's weight as operations take it: a QTensor, or an array where it is not quantized."""
        return param.get_weight(self, "w13")

    @property
    def qw2(self) -> Array | QTensor:
        """The second product's weight as operations take it."""
        return param.get_weight(self, "w2")

    @property
    def recipe(self) -> Recipe:
        """How w13 and x are quantized; w2 and the intermediate may differ where they were set so."""
        return param.recipe_of_weight(self, "w13")

    def set_w13(self, w13: Array | QTensor, *, input_scale: Array | float | None = None) -> None:
        """Replaces w13 (..., E, halves, I, H), which may be quantized otherwise than the one before.

        Args:
          w13: QTensor or float array; leading axes are those that the module is stacked with.
          input_scale: float32 () or (E,), after the leading axes, where w13's input scheme is static; None keeps one
            that is there.

        Raises:
          ValueError: the shape differs, or an input scale is missing, not wanted, or no scale. The layer is as it was
            then.
        """
        halves = 2 if self.gated else 1
        self._set("w13", w13, (self.num_local_experts, halves, self.intermediate_size, self.hidden_size), input_scale)

    def set_w2(self, w2: Array | QTensor, *, input_scale: Array | float | None = None) -> None:
        """Replaces w2 (..., E, H, I); ``input_scale`` is the intermediate's, () or (E,). See ``set_w13``."""
        self._set("w2", w2, (self.num_local_experts, self.hidden_size, self.intermediate_size), input_scale)

    def _set(self, name: str, w: Array | QTensor, shape: tuple[int, ...], scale: Array | float | None) -> None:
        w = param.checked_weight(name, w)
        stack = param.stack_shape(self, name, len(shape))
        if tuple(w.shape) != (*stack, *shape):
            raise ValueError(f"{name} has shape {tuple(w.shape)}, but this layer's is {(*stack, *shape)}")
        shapes = [stack, (*stack, self.num_local_experts)]
        param.set_weight(self, name, w, self._axes(name), input_scale=scale, scale_shapes=shapes)

    def set_biases(self, b13: Array | None, b2: Array | None) -> None:
        """Replaces the experts' biases (..., E, halves, I) and (..., E, H), or removes them."""
        experts, intermediate, hidden = self.sharding
        variables: dict[str, nnx.Variable | None] = {}
        for name, value, axes, shape in (
            ("b13", b13, (experts, None, intermediate), (2 if self.gated else 1, self.intermediate_size)),
            ("b2", b2, (experts, hidden), (self.hidden_size,)),
        ):
            if value is None:
                variables[name] = None
                continue
            value = param.checked_bias(name, value)
            expected = (*self.stack_shape, self.num_local_experts, *shape)
            if tuple(value.shape) != expected:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, but this layer's is {expected}")
            stacked = (None,) * (value.ndim - len(axes))
            variables[name] = param.variable(nnx.Param, value, (*stacked, *axes))
        for name, variable in variables.items():
            setattr(self, name, nnx.data(variable))

    def route(self, x: Array) -> Routed:
        """Each token's experts and weights, (..., k), for x (..., H); in float32 throughout.

        Raises:
          ValueError: x has another shape, or the module is a stack of layers; TypeError: x is no array of numbers.
        """
        x = self._checked_input(x)
        logits = _project(x, self.router_weight.get_value())
        if self.router_bias is not None:
            logits = logits + self.router_bias.get_value().astype(jnp.float32)
        return ops.route(logits, self.routing, bias=param.value_of(self.e_score_correction_bias))

    def __call__(self, x: Array, out_sharding: Any = None) -> Array:
        """Applies the layer.

        Args:
          x: (..., H) bfloat16, float16 or float32.
          out_sharding: how the result is sharded, as for ``nnx.Linear``.

        Returns:
          (..., H).

        Raises:
          ValueError: x has another shape, or the module is a stack of layers; TypeError: x is no such array.
        """
        x = self._checked_input(x)
        return mesh.apply(FusedMoE._apply, self, x, out_sharding, lambda: PartitionSpec(*spec_of(x)))

    def _checked_input(self, x: Any) -> Array:
        param.check_single(self)
        if isinstance(x, QTensor):
            raise TypeError("x is a QTensor, but the router takes it as it is: an array (..., H)")
        x = as_array("x", x)
        if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
            raise TypeError(f"x has dtype {x.dtype}, but it is floating point")
        if x.ndim < 1 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {x.shape}, but it is (..., H) with H = {self.hidden_size}")
        return x

    def _apply(self, x: Array, tokens: mesh.Tokens) -> Array:
        routed = self.route(x)
        x = x if self.dtype is None else x.astype(self.dtype)
        plain = self.shared is None and routed.identity_weight is None
        how: dict[str, Any] = {
            "activation": self.activation,
            "b13": param.value_of(self.b13),
            "b2": param.value_of(self.b2),
            "input_scale": param.value_of(self.w13_input_scale),
            "intermediate_scale": param.value_of(self.w2_input_scale),
            "weight_on_input": self.routing.weight_on_input,
            "expert_map": param.value_of(self.expert_map),
            "layer": self.layer,
            "preferred_element_type": None if plain else jnp.float32,
            "implementation": self.implementation,
        }
        experts, _, intermediate, _ = param.split_axes(self.w13, 4)
        if experts or intermediate:
            how["expert_axes"], how["intermediate_axes"] = experts, intermediate
            how["token_axes"] = mesh.tokens_beside(x.shape[:-1], tokens, (*experts, *intermediate))
        compute = parallel.fused_moe if experts or intermediate else ops.fused_moe
        y = compute(x, self.qw13, self.qw2, routed.weights, routed.ids, **how)
        if routed.identity_weight is not None:
            y = y + routed.identity_weight[..., None] * x.astype(jnp.float32)
        if self.shared is not None:
            shared = self.shared(x).astype(jnp.float32)
            if self.shared_gate_weight is not None:
                shared = jax.nn.sigmoid(_project(x, self.shared_gate_weight.get_value())) * shared
            y = y + shared
        return y.astype(x.dtype)


def _project(x: Array, weight: Array) -> Array:
    """float32 x (..., H) times weight (N, H) transposed."""
    return jnp.einsum(
        "...h,nh->...n", x.astype(jnp.float32), weight.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )


def _checked_float(name: str, value: Any) -> Any:
    """``value`` as a floating point array (possibly an abstract one)."""
    array = value if isinstance(value, jax.ShapeDtypeStruct) else as_array(name, value)
    float_dtype(name, array.dtype)
    return array


def checked_map(expert_map: Array | Sequence[int], experts: int, local: int) -> Array:
    """An expert map as int32 (experts,); what is traced is not looked at."""
    given = expert_map if isinstance(expert_map, jax.core.Tracer) else np.asarray(expert_map)
    if given.shape != (experts,) or not jnp.issubdtype(given.dtype, jnp.integer):
        raise ValueError(
            f"expert_map has shape {given.shape} and dtype {given.dtype}, but it is one integer an expert, ({experts},)"
        )
    if isinstance(given, np.ndarray) and (outside := given[(given < -1) | (given >= local)]).size:
        raise ValueError(
            f"expert_map holds {outside[0]}, but it holds local slots from 0 to {local - 1}, and -1 for elsewhere"
        )
    return jnp.asarray(given, jnp.int32)
