"""Checks of what users hand to the operations: each gives the value back, in the form that implementations take, or
raises one sentence that names the argument, what it is and what it should be.

Whatever ``jnp.asarray`` takes is taken for an array.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import checkify

from jmoe.arguments import COMPUTE_DTYPES, as_array, type_of
from jmoe.backends.activation import Activation, ActivationParams
from jmoe.backends.spec import Accumulation
from jmoe.config import config
from jmoe.qtensor import QTensor
from jmoe.quantize import check_static_scale
from jmoe.scheme import Recipe, Scheme, as_recipe, recipe_of


def as_floats(name: str, value: Any) -> Array:
    """A bfloat16, float16 or float32 array."""
    array = as_array(name, value)
    if array.dtype.name not in COMPUTE_DTYPES:
        raise TypeError(f"{name} has dtype {array.dtype}, but it is bfloat16, float16 or float32")
    return array


def as_float32(name: str, value: Any) -> Array:
    """Real numbers of any floating or integer dtype as float32."""
    array = as_array(name, value)
    if not jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {array.dtype}, but it is floating point")
    return array.astype(jnp.float32)


def as_int32(name: str, value: Any) -> Array:
    """Integers of any dtype as int32, saturating: a plain cast would wrap large ones back into range."""
    # jnp.asarray is such a cast for 64-bit integers that are not JAX's yet.
    array = np.asarray(value) if _is_on_host(value) else as_array(name, value)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {array.dtype}, but it holds integers")
    if array.dtype == jnp.int32:
        return jnp.asarray(array)
    narrow, given = jnp.iinfo(jnp.int32), jnp.iinfo(array.dtype)
    return jnp.asarray(array.clip(max(narrow.min, given.min), min(narrow.max, given.max)).astype(jnp.int32))


def as_weight(name: str, w: Any, axes: str, layer: Any, hint: str = "") -> Array | QTensor:
    """A weight of those axes, with one more of layers in front where ``layer`` is given."""
    if not isinstance(w, QTensor):
        w = as_array(name, w)
        if w.dtype.name not in COMPUTE_DTYPES:
            raise TypeError(
                f"{name} has dtype {w.dtype}, but a plain weight is bfloat16, float16 or float32, "
                "and a quantized one is a QTensor"
            )
    expected = _count(axes) + (layer is not None)
    if w.ndim != expected:
        if layer is not None:
            hint = "; with layer given, it has a leading axis of layers"
        elif w.ndim == expected + 1:
            hint = "; stacked layers go with layer="
        raise ValueError(f"{name} has shape {tuple(w.shape)}, but it is {axes}{hint}")
    return w


def as_input(x: Any, recipe: Recipe, axes: str, quantized_axes: str) -> Array | QTensor:
    """The activation: a float array, or a QTensor quantized just as the recipe wants it."""
    if isinstance(x, QTensor):
        if recipe.input is None or _kind(x.scheme) != _kind(recipe.input):
            wanted = recipe.input.describe() if recipe.input else "not quantized"
            raise ValueError(f"x is quantized as {x.scheme.describe()}, but here the activation is {wanted}")
        if x.ndim != _count(quantized_axes):
            raise ValueError(f"x is a QTensor of shape {x.shape}, but a quantized activation is {quantized_axes}")
        return x
    x = as_floats("x", x)
    fits = x.ndim >= _count(axes) - 1 if axes.startswith("(...") else x.ndim == _count(axes)
    if not fits:
        raise ValueError(f"x has shape {x.shape}, but it is {axes}")
    return x


def as_bias(name: str, value: Any, shape: tuple[int, ...], axes: str, layers: int | None) -> Array | None:
    """A bias of that shape, with one more axis in front where there are ``layers``; or None."""
    if value is None:
        return None
    value = as_floats(name, value)
    check_shape(name, value, *stacked(shape, axes, layers))
    return value


def as_activation_params(
    params: ActivationParams | None, activation: Activation, experts: int, halves: int
) -> ActivationParams | None:
    """Constants of swiglu as float32 (E,) each, or None."""
    if params is None:
        return None
    if not isinstance(params, ActivationParams):
        raise TypeError(f"activation_params is {type_of(params)}, but it is an ActivationParams")
    if activation.name != "swiglu" or halves == 1:
        raise ValueError(f"activation_params go with a gated swiglu, not with {activation} on {halves} half(s) of w13")
    given = {}
    for key, value in params._asdict().items():
        if value is None:
            continue
        array = as_float32(f"activation_params.{key}", value)
        if array.shape not in ((), (experts,)):
            raise ValueError(f"activation_params.{key} has shape {array.shape}, but it is () or (E,) = {(experts,)}")
        given[key] = jnp.broadcast_to(array, (experts,))
    return ActivationParams(**given) if given else None


def as_layer(layer: Any, weight: Array | QTensor) -> tuple[Array | None, int | None]:
    """``layer`` as an int32 scalar and the number of layers that ``weight`` stacks; None and None without it."""
    if layer is None:
        return None, None
    layers = weight.shape[0]
    index = as_int32("layer", layer)
    if index.ndim:
        raise ValueError(f"layer has shape {index.shape}, but it is one integer")
    # An index on the device is not fetched to look at it.
    if _is_on_host(layer) and not 0 <= int(layer) < layers:
        raise ValueError(f"layer={layer} is outside the {layers} stacked layers")
    check_range("layer", index, 0, layers - 1)
    return index, layers


def as_static_scale(
    name: str, scale: Any, scheme: Scheme | None, *, quantized: bool, experts: int | None = None
) -> Array | None:
    """A given activation scale, float32 () or (E,): there just where ``scheme`` is static.

    Args:
      name: the argument's.
      scale: what the caller gave.
      scheme: how the activation is quantised.
      quantized: the activation comes quantized, scales included.
      experts: E, None for an operation without experts.
    """
    if scheme is None or not scheme.static or quantized:
        if scale is None:
            return None
        if quantized:
            raise ValueError(f"{name} is given, but x is a QTensor, which has its scales")
        how = f"quantized as {scheme.describe()}, with measured scales" if scheme else "not quantized"
        raise ValueError(f"{name} is given, but the activation is {how}")
    if scale is None:
        raise ValueError(f"{name} is missing: the activation's scheme ({scheme.describe()}) has a given scale")
    array = as_float32(name, scale)
    shapes = ((),) if experts is None else ((), (experts,))
    if array.shape not in shapes:
        raise ValueError(f"{name} has shape {array.shape}, but it is {' or '.join(map(str, shapes))} here")
    return check_static_scale(name, array)


def with_recipe(name: str, w: Array | QTensor, recipe: Recipe | str | None) -> tuple[Array | QTensor, Recipe]:
    """The weight asking for the activation of ``recipe``, or of its own where that is None; and the recipe in force.

    Raises:
      ValueError: the recipe is about another kind of weight.
    """
    scheme, input_scheme = (w.scheme, w.input_scheme) if isinstance(w, QTensor) else (None, None)
    if recipe is None:
        return w, recipe_of(scheme, input_scheme)
    asked = as_recipe(recipe)
    if _kind(asked.weight) != _kind(scheme):
        wanted = asked.weight.describe() if asked.weight else "not quantized"
        found = scheme.describe() if scheme else "not quantized; jmoe.quantize does that"
        raise ValueError(f"recipe={asked.name!r} is for weights that are {wanted}, but {name} is {found}")
    return (w.with_input_scheme(asked.input) if isinstance(w, QTensor) else w), recipe_of(scheme, asked.input)


def dtypes(x: Array | QTensor, preferred: Any) -> tuple[str, str]:
    """Names of x's dtype and of the result's; a quantized x counts as the result's dtype, bfloat16 by default."""
    if preferred is None:
        out = "bfloat16" if isinstance(x, QTensor) else x.dtype.name
    else:
        try:
            out = jnp.dtype(preferred).name
        except TypeError as error:
            raise TypeError(f"preferred_element_type={preferred!r} is no dtype") from error
        if out not in COMPUTE_DTYPES:
            raise TypeError(f"preferred_element_type={out} must be bfloat16, float16 or float32")
    return (out if isinstance(x, QTensor) else x.dtype.name), out


def stacked(shape: tuple[int, ...], axes: str, layers: int | None) -> tuple[tuple[int, ...], str]:
    """A shape and its axes with that of layers in front, where there are ``layers``."""
    return (shape, axes) if layers is None else ((layers, *shape), f"(L, {axes[1:].replace(',)', ')')}")


def check_shape(name: str, value: Array | QTensor, expected: tuple[int, ...], meaning: str) -> None:
    """Raises ValueError unless ``value`` has the shape."""
    if tuple(value.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, but here it is {meaning} = {expected}")


def check_accumulation(accumulation: Accumulation | None) -> None:
    """Raises ValueError unless it is one of the two, or None."""
    if accumulation not in (None, "exact", "fast"):
        raise ValueError(f"accumulation={accumulation!r} must be 'exact', 'fast' or None")


def check_range(name: str, values: Array, low: int, high: int) -> None:
    """Under ``jmoe.config(check=True)``, raises (through checkify) unless every value lies in [low, high]."""
    if config.check and values.size:
        good = (values >= low) & (values <= high)
        outside = values.ravel()[jnp.argmin(good.ravel())]
        checkify.check(jnp.all(good), f"{name} holds {{outside}}, but it lies in [{low}, {high}]", outside=outside)


def _kind(scheme: Scheme | None) -> tuple[Any, ...] | None:
    """What a recipe and a tensor must agree on; how the scale itself is held does not matter."""
    return None if scheme is None else (scheme.format, scheme.block, scheme.zero_point, scheme.global_scale)


def _is_on_host(value: Any) -> bool:
    """Numbers of Python's or NumPy's, also in (rectangular) lists."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_on_host, value)) and len({np.shape(v) for v in value}) <= 1
    return isinstance(value, (int, float, np.ndarray, np.generic))


def _count(axes: str) -> int:
    """The number of axes in such a text as "(E, H, I)"."""
    return axes.count(",") + 1
