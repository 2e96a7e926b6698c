"""Checks of arguments that all rooms share: each raises one sentence with the name and what would be right."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

COMPUTE_DTYPES = ("bfloat16", "float16", "float32")
"""What products compute in, and what plain weights are held in."""


def type_of(value: Any) -> str:
    """What a value is, for an error: "None", "a str", "an int"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIO" else f"a {name}"


def check_type(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises TypeError unless ``value`` is of that kind; strings and numbers are shown, larger things named."""
    if isinstance(value, kind):
        return
    if value is None or isinstance(value, str | bytes | int | float):
        raise TypeError(f"{name}={value!r} must be {wanted}")
    raise TypeError(f"{name} is {type_of(value)}, but it must be {wanted}")


def as_array(name: str, value: Any) -> Array:
    """``value`` as an array; a TypeError names what is none."""
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} is {type_of(value)}, but it is an array ({error})") from error


def float_dtype(name: str, value: Any, among: tuple[str, ...] = ()) -> Any:
    """``value`` as a floating point dtype, one of those named where there are any.

    Raises:
      TypeError: anything else, None included, which NumPy takes for float64.
    """
    try:
        dtype = None if value is None else jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not (dtype.name in among if among else jnp.issubdtype(dtype, jnp.floating)):
        wanted = " or ".join((", ".join(among[:-1]), among[-1])) if among else "a floating point dtype"
        raise TypeError(f"{name}={repr(value) if dtype is None else dtype} must be {wanted}")
    return dtype
