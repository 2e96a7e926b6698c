"""``calibrate``: the ranges of activations, for recipes whose activation scales are given."""

import functools
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jmoe.arguments import as_array, check_type, type_of
from jmoe.backends import common
from jmoe.backends.activation import as_activation
from jmoe.backends.reference import matmul
from jmoe.nn import flax_layers, param, walk
from jmoe.nn.compiled import Code, program
from jmoe.nn.flax_layers import FLAX_LAYERS, FlaxLayer
from jmoe.nn.linear import Linear
from jmoe.nn.moe import FusedMoE
from jmoe.numerics import E4M3
from jmoe.ops import Routed
from jmoe.qtensor import index_leading
from jmoe.scheme import Scheme
from pallas_kernels import bits


class Observation(nnx.Variable):
    """What calibration has measured of a layer so far: float32, of the shape of the stacked layers."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The largest magnitudes that layers met, by module path.

    Attributes:
      inputs: float32 (), of each layer's input; (L,) of a stacked layer.
      intermediates: float32 (E,), of each expert's intermediate, over the tokens it got; 0 where it got none.
      slots: int64 (E,), how many tokens each expert got.
    """

    inputs: dict[str, np.ndarray]
    intermediates: dict[str, np.ndarray] = field(default_factory=dict)
    slots: dict[str, np.ndarray] = field(default_factory=dict)

    def check(self, path: str, *, experts: bool) -> None:
        """Raises ValueError where nothing is known of a layer, or of its experts."""
        _known(self.inputs, path)
        if experts:
            _known(self.intermediates, path)

    def input_scale(self, path: str, scheme: Scheme) -> Array:
        """The static scale of a layer's input: its amax over the format's range, 1 where it is zero throughout.

        Raises:
          ValueError: nothing is known of that layer.
        """
        return _scale(_known(self.inputs, path), scheme)

    def intermediate_scale(self, path: str, scheme: Scheme) -> Array:
        """The static scale of each expert's intermediate.

        An expert that got no token takes the largest of its layer's, which clips nothing that was seen, with a warning.

        Raises:
          ValueError: nothing is known of that layer.
        """
        amax, slots = _known(self.intermediates, path), _known(self.slots, path)
        if np.any(slots == 0):
            unseen = ", ".join("/".join(map(str, index)) for index in np.argwhere(slots == 0))
            warnings.warn(
                f"{path}: experts {unseen} got no token in calibration; the scale of their intermediate is the largest "
                "of the other experts'",
                stacklevel=4,
            )
        return _scale(np.where(slots == 0, amax.max(axis=-1, keepdims=True), amax), scheme)


def _known(values: dict[str, np.ndarray], path: str) -> np.ndarray:
    if path not in values:
        raise ValueError(f"calibration has nothing on {path!r}; its layers are {', '.join(sorted(values)) or 'none'}")
    return values[path]


def _scale(amax: np.ndarray, scheme: Scheme) -> Array:
    """Amax over the largest magnitude that codes, and their block scales, express with a scale of 1."""
    largest = scheme.fmt.max * (E4M3.max if scheme.global_scale is not None else 1.0)
    scale = amax.astype(np.float32) * (np.float32(1) / np.float32(largest))
    return jnp.asarray(np.where(scale >= np.finfo(np.float32).tiny, scale, np.float32(1)))


def calibrate(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[Any, Any], Any] | None = None,
) -> Calibration:
    """Runs ``model`` over ``batches`` and measures the inputs of its layers, and the intermediates of its experts.

    The forward pass is compiled once a shape of batch, also over several calls (see ``scan_layers`` on functions that
    read arrays from elsewhere); it may itself be compiled, and scan over layers (``scan_layers``, ``nnx.scan``). The
    model is not changed, and what it changes in itself is dropped.

    Args:
      model: with dense weights; layers are those of ``quantize_model``.
      batches: pytrees of arrays.
      forward: (model, batch) -> anything; ``model(batch)`` by default.

    Returns:
      A Calibration, for ``quantize_model``. Layers that the forward pass does not reach are not in it.

    Raises:
      ValueError: no batches, or a layer met a value that is not finite; TypeError: ``model`` is no module, ``batches``
        are no iterable, or there is no function to run.
    """
    check_type("model", model, nnx.Module, "an nnx.Module")
    if forward is None and not callable(model):
        raise TypeError(f"model is {type_of(model)}, which cannot be called: pass forward")
    if forward is not None and not callable(forward):
        check_type("forward", forward, types.FunctionType, "a function (model, batch) -> anything, or None")
    try:
        remaining = iter(batches)
    except TypeError as error:
        raise TypeError(f"batches is {type_of(batches)}, but it is an iterable of pytrees of arrays") from error
    observed = nnx.clone(model)
    layers = [node for node in walk.modules(observed) if isinstance(node.module, (Linear, FusedMoE, *FLAX_LAYERS))]
    for node in layers:
        _observe(node.module)
    graphdef, *states = nnx.split(observed, Observation, ...)
    observations, rest = states

    code = Code.of(_forward if forward is None else forward)
    how = _How(code, graphdef)
    own = jax.jit(functools.partial(_step, how))
    ran = False
    for batch in remaining:
        run = program(_step, how, code, observations, rest, batch) or own
        observations, ran = run(observations, rest, batch), True
    if not ran:
        raise ValueError("batches is empty; calibration needs at least one")
    nnx.update(observed, observations)
    return _collect(layers)


@dataclass(frozen=True)
class _How:
    """What calibration is compiled for: the forward pass, and the graph definition of the model that observes."""

    forward: Code
    graphdef: Any


def _step(how: _How, observations: nnx.State, rest: nnx.State, batch: Any) -> nnx.State:
    """The observations after one more batch."""
    model = nnx.merge(how.graphdef, observations, rest)
    how.forward.function(model, batch)
    return nnx.state(model, Observation)


def _forward(model: Any, batch: Any) -> Any:
    return model(batch)


def _collect(layers: list[walk.Node]) -> Calibration:
    inputs, intermediates, slots = {}, {}, {}
    for node in layers:
        calls = np.asarray(node.module.observed_calls.get_value())
        if not calls.any():
            continue
        inputs[node.path] = np.asarray(node.module.observed_input.get_value())
        if isinstance(node.module, _ObservedMoE):
            intermediates[node.path] = np.asarray(node.module.observed_intermediate.get_value())
            slots[node.path] = np.asarray(node.module.observed_slots.get_value()).astype(np.int64)
        for what, values in (("input", inputs), ("intermediate", intermediates)):
            if node.path in values and not np.isfinite(values[node.path]).all():
                raise ValueError(f"{node.path} met an {what} that is not finite in calibration")
    return Calibration(inputs=inputs, intermediates=intermediates, slots=slots)


def _observe(module: Any) -> None:
    """Turns a layer into one that measures, by its class, so that code around it sees the same attributes."""
    stack = _stack_shape(module)
    module.__class__ = _observed_class(type(module))
    module.observed_calls = Observation(jnp.zeros(stack, jnp.float32))
    module.observed_input = Observation(jnp.zeros(stack, jnp.float32))
    if isinstance(module, _ObservedMoE):
        experts = (*stack, module.num_local_experts)
        module.observed_intermediate = Observation(jnp.zeros(experts, jnp.float32))
        module.observed_slots = Observation(jnp.zeros(experts, jnp.float32))


class _ObservedLayer(nnx.Module):
    """Measures a layer's input."""

    observed_calls: Observation
    observed_input: Observation

    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Any:
        x = as_array("x", x)
        _raise_to(self.observed_calls, jnp.float32(1))
        _raise_to(self.observed_input, _amax(x))
        return super().__call__(x, *args, **kwargs)


class _ObservedMoE(_ObservedLayer):
    """Measures each expert's intermediate too."""

    observed_intermediate: Observation
    observed_slots: Observation
    num_local_experts: int
    route: Callable[[Array], Routed]

    def __call__(self, x: Array, *args: Any, **kwargs: Any) -> Any:
        x = as_array("x", x)
        amax, slots = _intermediates(self, x, self.route(x))
        _raise_to(self.observed_intermediate, amax)
        self.observed_slots.set_value(self.observed_slots.get_value() + slots)
        return super().__call__(x, *args, **kwargs)


_OBSERVED: dict[type, type] = {}  # every new class would be registered with JAX anew, for good


def _observed_class(cls: type) -> type:
    if cls not in _OBSERVED:
        base = _ObservedMoE if issubclass(cls, FusedMoE) else _ObservedLayer
        _OBSERVED[cls] = type(f"Observed{cls.__name__}", (base, cls), {})
    return _OBSERVED[cls]


def _raise_to(observation: Observation, value: Array) -> None:
    observation.set_value(jnp.maximum(observation.get_value(), value))


def _amax(x: Array) -> Array:
    return jnp.max(jnp.abs(x.astype(jnp.float32)), initial=0)


def _intermediates(moe: Any, x: Array, routed: Routed) -> tuple[Array, Array]:
    """Of each local expert, float32 (E,): the amax of its intermediate over its tokens, and how many it has."""
    x = x if moe.dtype is None else x.astype(moe.dtype)
    rows = x.reshape(-1, x.shape[-1])
    topk_ids = routed.ids.reshape(rows.shape[0], -1)
    ids = common.local_ids(topk_ids, param.value_of(moe.expert_map), moe.num_local_experts)
    if moe.routing.weight_on_input:
        rows = common.weighted_input(rows, routed.weights.reshape(ids.shape), ids)
    w13, b13 = common.at_layer((moe.qw13, param.value_of(moe.b13)), moe.layer)
    activation = as_activation(moe.activation)

    def one(e: Array) -> tuple[Array, Array]:
        mine = jnp.any(ids == e, axis=-1)
        product = matmul(rows.astype(jnp.float32)[None], common.values(index_leading(w13, e)))
        if b13 is not None:
            product = product + index_leading(b13, e).astype(jnp.float32)[:, None, :]
        h = bits.round_to(common.activate(activation, product, None), rows.dtype.name)
        return _amax(jnp.where(mine[:, None], h, 0)), jnp.sum(ids == e, dtype=jnp.float32)

    return lax.map(one, jnp.arange(moe.num_local_experts, dtype=jnp.int32))


def _stack_shape(module: Linear | FusedMoE | FlaxLayer) -> tuple[int, ...]:
    """The leading axes that stacking has given to a layer's variables, () where it is not stacked."""
    return module.stack_shape if isinstance(module, Linear | FusedMoE) else flax_layers.stack_shape(module)
