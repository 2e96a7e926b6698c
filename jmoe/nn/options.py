"""Checks of what modules are made with, so that a mistake is met where it is made and not at the first call."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from jmoe.arguments import COMPUTE_DTYPES, float_dtype
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
