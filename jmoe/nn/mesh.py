"""Calls of modules under a mesh."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax import Array
from jax.sharding import AxisType, PartitionSpec

Module = TypeVar("Module", bound=nnx.Module)


def apply(
    compute: Callable[[Module, Array], Array],
    module: Module,
    x: Array,
    sharding: Any,
    default: Callable[[], PartitionSpec],
) -> Array:
    """``compute(module, x)`` with the sharding asked for.

    Under a mesh with explicit axes, where every operation's sharding must follow from its operands', the axes are
    automatic inside: kernels choose theirs themselves.

    Args:
      compute: what the module does.
      module: the module.
      x: its input.
      sharding: the result's, a PartitionSpec or a Sharding, or None.
      default: the result's on an explicit mesh, where none is asked for.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and AxisType.Explicit in mesh.axis_types:
        graphdef, state = nnx.split(module)
        automatic = jax.sharding.auto_axes(
            lambda state, x: compute(nnx.merge(graphdef, state), x),
            out_sharding=default() if sharding is None else sharding,
        )
        return automatic(state, x)
    y = compute(module, x)
    return y if sharding is None else jax.lax.with_sharding_constraint(y, sharding)
