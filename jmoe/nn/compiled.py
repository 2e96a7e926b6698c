"""Calls outside ``jax.jit`` that compile once, though what they compile is a function that the caller gives."""

import functools
import types
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.dtype, type)


@dataclass(frozen=True)
class Code:
    """A function, equal to another one of the same code: a lambda is a new object each time it is reached.

    Attributes:
      function: the function.
      key: what it is compared by: its code and the plain values that it closes over; None where it closes over
        anything else, such as arrays or modules, whose contents may change between two calls.
    """

    function: Callable[..., Any] = field(compare=False)
    key: Hashable

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "Code":
        return cls(function, _key(function))


@dataclass(frozen=True)
class _Same:
    """An object, equal to itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _key(value: Any, within: tuple[Any, ...] = ()) -> Hashable | None:
    """What ``value`` is compared by, or None where its meaning may change; ``within`` are the functions around it."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType):
        return _Same(value)
    if isinstance(value, tuple):
        keys = tuple(_key(part, within) for part in value)
        return None if None in keys else keys
    if not isinstance(value, types.FunctionType):
        return None
    for depth, function in enumerate(within):
        if function is value:  # one that calls itself
            return ("within", depth)
    try:
        closed_over = tuple(cell.cell_contents for cell in value.__closure__ or ())
    except ValueError:  # a cell that is still empty
        return None
    named_defaults = tuple((value.__kwdefaults__ or {}).items())
    parts = _key((closed_over, value.__defaults__ or (), named_defaults), (*within, value))
    return None if parts is None else (value.__code__, _Same(value.__globals__), parts)


def program(function: Callable[..., Any], how: Any, code: Code, *args: Any) -> Callable[..., Any] | None:
    """``function`` with ``how`` for its first argument, compiled once for each ``how`` and shapes of ``args``.

    Args:
      function: (how, *args) -> any pytree of arrays; a function of a module.
      how: static and hashable; ``code`` is part of it.
      code: the caller's function.
      args: arrays as in the first call.

    Returns:
      A function of ``args``; or None where no program would be good for another call: under a transformation, or where
      the caller's function reads arrays from elsewhere, which a program would hold as they are now.
    """
    if code.key is None or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
        return None
    if any(isinstance(constant, jax.Array) for constant in _compiled.trace(function, how, *args).jaxpr.consts):
        return None
    return functools.partial(_compiled, function, how)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(function: Callable[..., Any], how: Any, *args: Any) -> Any:
    return function(how, *args)
