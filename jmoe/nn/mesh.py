"""Calls of modules under a mesh."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from jmoe import parallel
from jmoe.sharding import AxisName, spec_of

Module = TypeVar("Module", bound=nnx.Module)

Tokens = tuple[AxisName, ...] | None
"""The mesh axes over which each leading axis of tokens is sharded; None where that is XLA's to choose."""


def apply(
    compute: Callable[[Module, Array, Tokens], Array],
    module: Module,
    x: Array,
    sharding: Any,
    default: Callable[[], PartitionSpec],
) -> Array:
    """``compute(module, x, tokens)`` with the sharding asked for.

    Under a mesh with explicit axes, where every operation's sharding must follow from its operands', the axes are
    automatic inside: kernels choose theirs themselves.

    Args:
      compute: what the module does; ``tokens`` are the mesh axes of x's leading axes where its type says, else None.
      module: the module.
      x: its input.
      sharding: the result's, a PartitionSpec or a Sharding, or None.
      default: the result's on an explicit mesh, where none is asked for.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and AxisType.Explicit in mesh.axis_types:
        graphdef, state = nnx.split(module)
        tokens = spec_of(x)[:-1]
        automatic = jax.sharding.auto_axes(
            lambda state, x: compute(nnx.merge(graphdef, state), x, tokens),
            out_sharding=default() if sharding is None else sharding,
        )
        return automatic(state, x)
    y = compute(module, x, None)
    return y if sharding is None else jax.lax.with_sharding_constraint(y, sharding)


def tokens_beside(lead: Sequence[int], tokens: Tokens, used: tuple[str, ...]) -> tuple[AxisName, ...]:
    """The mesh axes over which tokens of shape ``lead`` are split in an operation whose weights take ``used``."""
    if tokens is None:
        return parallel.spread_tokens(lead, used)
    parts = (axis if isinstance(axis, tuple) else (axis,) for axis in tokens)
    return tuple(tuple(name for name in part if name is not None and name not in used) or None for part in parts)
