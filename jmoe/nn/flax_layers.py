"""Flax's dense layers as jmoe's, to be called the same way."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding

from jmoe.nn import param
from jmoe.nn.general import Einsum, LinearGeneral, kernel_axes, split_equation
from jmoe.nn.linear import Linear
from jmoe.nn.param import AxisName

FlaxLayer = nnx.Linear | nnx.LinearGeneral | nnx.Einsum

FLAX_LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)


def check(path: str, module: FlaxLayer) -> None:
    """Raises ValueError where ``from_flax`` could not take the layer's place."""
    if type(module) not in FLAX_LAYERS:
        base = next(kind for kind in FLAX_LAYERS if isinstance(module, kind))
        raise ValueError(
            f"{path} is a {type(module).__name__}, which does more than the {base.__name__} it is derived from; "
            f"leave it alone with the rule ({path!r}, None)"
        )
    own = {
        "dot_general": (lax.dot_general, None),
        "dot_general_cls": (None,),
        "einsum_op": (jnp.einsum,),
        "promote_dtype": (nnx.nn.dtypes.promote_dtype,),
    }
    for name, usual in own.items():
        if getattr(module, name, usual[0]) not in usual:
            raise ValueError(f"{path} has a {name} of its own, which quantized products would not call")
    if isinstance(module, nnx.Einsum):
        if module.einsum_str is None:
            raise ValueError(f"{path} is given its einsum_str at each call, and a quantized weight is made for one")
        kernel_axes(module.einsum_str)
    shape = tuple(module.kernel.get_raw_value().shape)
    expected = _kernel_shape(module)
    if shape[len(shape) - len(expected) :] != expected:
        raise ValueError(
            f"{path} has a kernel of shape {shape}, but its layer's is {expected}, after stacked axes if any"
        )


def stack_shape(module: FlaxLayer) -> tuple[int, ...]:
    """The leading axes that stacking has given to the layer's variables, () where it is not stacked."""
    shape = module.kernel.get_raw_value().shape
    return tuple(shape[: len(shape) - len(_kernel_shape(module))])


def _kernel_shape(module: FlaxLayer) -> tuple[int, ...]:
    if isinstance(module, nnx.LinearGeneral):
        return (*module.batch_axis.values(), *module.in_features, *module.out_features)
    return tuple(module.kernel_shape) if isinstance(module, nnx.Einsum) else (module.in_features, module.out_features)


def from_flax(module: FlaxLayer) -> Linear:
    """A ``Linear`` with the weight of a Flax layer, which computes in the dtype that the Flax layer computes in."""
    kernel, dtype = module.kernel.get_value(), module.dtype
    if dtype is None and kernel.dtype == jnp.float32:
        dtype = jnp.float32  # to which Flax promotes any x
    bias = param.value_of(module.bias)
    options = {"dtype": dtype, "preferred_element_type": module.preferred_element_type}
    if isinstance(module, nnx.LinearGeneral):
        return _from_linear_general(module, kernel, bias, options)
    if isinstance(module, nnx.Einsum):
        return _from_einsum(module, kernel, bias, options)
    return _from_linear(module, kernel, bias, options)


def _from_linear(module: nnx.Linear, kernel: Array, bias: Array | None, options: dict[str, Any]) -> Linear:
    k, n = _names(module.kernel, 2)
    return Linear.from_quantized(jnp.swapaxes(kernel, -1, -2), bias, sharding=(n, k), **options)


def _from_linear_general(
    module: nnx.LinearGeneral, kernel: Array, bias: Array | None, options: dict[str, Any]
) -> Linear:
    batch, ins, outs = tuple(module.batch_axis.values()), module.in_features, module.out_features
    names = _names(module.kernel, len(batch) + len(ins) + len(outs))
    lead = (*stack_shape(module), *batch)
    weight = jnp.swapaxes(kernel.reshape(*lead, math.prod(ins), math.prod(outs)), -1, -2)
    return LinearGeneral.from_quantized(
        weight,
        None if bias is None else bias.reshape(*lead, math.prod(outs)),
        axis=module.axis,
        batch_axis=tuple(module.batch_axis),
        batch_shape=batch,
        out_shape=outs,
        sharding=(
            *names[: len(batch)],
            _merged(names[len(batch) + len(ins) :]),
            _merged(names[len(batch) :][: len(ins)]),
        ),
        **options,
    )


def _from_einsum(module: nnx.Einsum, kernel: Array, bias: Array | None, options: dict[str, Any]) -> Linear:
    _, letters, result = split_equation(module.einsum_str)
    batch, contracted, out = kernel_axes(module.einsum_str)
    extent = dict(zip(letters, module.kernel_shape, strict=True))
    name = dict(zip(letters, _names(module.kernel, len(letters)), strict=True))
    stack = stack_shape(module)
    n, k = (math.prod(extent[c] for c in part) for part in (out, contracted))
    lead = (*stack, *(extent[c] for c in batch))
    weight = _permuted(kernel, len(stack), letters, batch + out + contracted).reshape(*lead, n, k)
    if bias is not None:
        in_result = "".join(c for c in result if c in letters)
        bias = bias.reshape(*stack, *(extent[c] for c in in_result))
        bias = _permuted(bias, len(stack), in_result, batch + out).reshape(*lead, n)
    return Einsum.from_quantized(
        weight,
        bias,
        equation=module.einsum_str,
        batch_shape=lead[len(stack) :],
        out_shape=tuple(extent[c] for c in out),
        sharding=(*(name[c] for c in batch), _merged([name[c] for c in out]), _merged([name[c] for c in contracted])),
        **options,
    )


def _permuted(x: Array, stacked: int, letters: str, wanted: str) -> Array:
    """X, whose axes after the stacked ones are ``letters``, with these in the order ``wanted``."""
    return jnp.transpose(x, (*range(stacked), *(stacked + letters.index(c) for c in wanted)))


def _names(kernel: nnx.Variable, rank: int) -> tuple[AxisName, ...]:
    """The sharding names of a kernel's own axes, None where it has none."""
    sharding = kernel.get_metadata("out_sharding", None) or ()
    names = tuple(sharding.spec if isinstance(sharding, NamedSharding) else sharding)
    names = (*names, *(None,) * (len(kernel.get_raw_value().shape) - len(names)))
    return names[len(names) - rank :]


def _merged(names: Sequence[AxisName]) -> AxisName:
    """The name of axes flattened to one: the first one's, if the others have none."""
    return names[0] if names and not any(names[1:]) else None
