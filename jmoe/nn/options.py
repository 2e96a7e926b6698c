"""Checks of what modules are made with, so that a mistake is met where it is made and not at the first call."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jmoe.arguments import COMPUTE_DTYPES, check_type, float_dtype, type_of
from jmoe.backends.activation import Activation, as_activation
from jmoe.backends.select import IMPLEMENTATIONS


def extent(name: str, value: Any, *, least: int = 1) -> int:
    """``value`` as an int of at least ``least``.

    Raises:
      TypeError: no integer; ValueError: a smaller one.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} must be an integer")
    if value < least:
        raise ValueError(f"{name}={value} must be at least {least}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """``value`` as a bool; a TypeError names what is none."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}={value!r} must be True or False")
    return bool(value)


def check_rngs(rngs: Any) -> None:
    """Raises TypeError unless it is an ``nnx.Rngs``, or None."""
    check_type("rngs", rngs, (nnx.Rngs, type(None)), "an nnx.Rngs, such as nnx.Rngs(0), or None")


def check_shared(shared: Any) -> None:
    """Raises TypeError unless it is a module that can be called, or None."""
    check_type("shared", shared, (nnx.Module, type(None)), "an nnx.Module x -> y, or None")
    if shared is not None and not callable(shared):
        raise TypeError(f"shared is {type_of(shared)}, which cannot be called, but it is a module x -> y")


def optional_dtype(name: str, value: Any) -> Any:
    """``value`` as a dtype that products compute in, or None."""
    return None if value is None else float_dtype(name, value, COMPUTE_DTYPES)


def check_activation(activation: Activation | str | None, halves: int) -> None:
    """Raises ValueError or TypeError unless it is an activation, or the name of one, of that many halves, or None."""
    if activation is not None:
        as_activation(activation).check_halves(halves)


def check_implementation(implementation: str | None) -> None:
    """Raises ValueError unless it is the name of an implementation, or None."""
    if implementation is not None and implementation not in tuple(IMPLEMENTATIONS):
        raise ValueError(
            f"implementation={implementation!r} is unknown; it is one of {', '.join(IMPLEMENTATIONS)}, or None"
        )


def refuse(options: Mapping[str, Any], names: Iterable[str], instead: str) -> None:
    """Raises TypeError where ``options`` has one of ``names``, which what is given decides."""
    for name in names:
        if name in options:
            raise TypeError(f"{name} is no option here: {instead}")
