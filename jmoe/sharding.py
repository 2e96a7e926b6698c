"""Functions on meshes with explicit axes (``AxisType.Explicit``, the default of ``jax.make_mesh``).

There JAX asks of every single operation that its result's sharding follow from its operands', and blocks, packed codes
and gathered rows have none that follows. So the axes are automatic inside: XLA partitions, and the result is placed as
the function's arguments were.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

AxisName = str | tuple[str, ...] | None

Args = ParamSpec("Args")
Result = TypeVar("Result")


def automatic_inside(place: Callable[..., Any]) -> Callable[[Callable[Args, Result]], Callable[Args, Result]]:
    """Makes a function's explicit mesh axes automatic inside it; without such axes, it is as it was.

    Args:
      place: ``place(result, *args, **kwargs)`` gives a PartitionSpec for each array of the result, by what
        ``spec_of`` says of the arguments. An axis whose extent its mesh axes do not divide is not sharded.

    The function then raises ValueError for arrays on meshes of different axes.
    """

    def decorate(function: Callable[Args, Result]) -> Callable[Args, Result]:
        @functools.wraps(function)
        def wrapper(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            leaves, tree = jax.tree.flatten((args, kwargs))
            mesh = _explicit_mesh(leaves)
            if mesh is None:
                return function(*args, **kwargs)
            axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
            changes = {name: AxisType.Auto for name, kind in axes if kind == AxisType.Explicit}
            with jax.sharding.use_abstract_mesh(mesh.update_axis_types(changes)):
                inside = [
                    jax.sharding.reshard(leaf, PartitionSpec()) if isinstance(leaf, jax.Array) else leaf
                    for leaf in leaves
                ]
                inside_args, inside_kwargs = jax.tree.unflatten(tree, inside)
                result = function(*inside_args, **inside_kwargs)
            return jax.tree.map(functools.partial(_placed, mesh), result, place(result, *args, **kwargs))

        return wrapper

    return decorate


def spec_of(x: Any) -> tuple[AxisName, ...]:
    """The explicit mesh axes that each axis of ``x`` is sharded over, as its type says."""
    if not isinstance(x, jax.Array):
        return (None,) * np.ndim(x)
    spec = tuple(jax.typeof(x).sharding.spec)
    return (*spec, *(None,) * (x.ndim - len(spec)))


def with_last(axes: tuple[AxisName, ...], name: AxisName) -> PartitionSpec:
    """The spec of a product's result: x's axes but the last, then ``name`` if none of them is sharded over it."""
    used = {part for axis in axes[:-1] for part in _names(axis)}
    return PartitionSpec(*axes[:-1], None if used & set(_names(name)) else name)


def _names(axis: AxisName) -> tuple[str, ...]:
    if axis is None:
        return ()
    return axis if isinstance(axis, tuple) else (axis,)


def _explicit_mesh(leaves: list[Any]) -> AbstractMesh | None:
    """The mesh in force, or else the arrays', if it has explicit axes."""
    found = jax.sharding.get_abstract_mesh()
    for leaf in leaves:
        if not isinstance(leaf, jax.Array):
            continue
        mesh = jax.typeof(leaf).sharding.mesh
        if mesh.empty or AxisType.Explicit not in mesh.axis_types:
            continue
        if found.empty:
            found = mesh
        elif mesh.shape_tuple != found.shape_tuple:
            raise ValueError(
                f"an array of shape {leaf.shape} lies on a mesh with the explicit axes {_text(mesh)}, but the mesh in "
                f"force, or another array's, has {_text(found)}: move it there with jax.device_put, or enter its mesh "
                "with jax.set_mesh"
            )
    return None if found.empty or AxisType.Explicit not in found.axis_types else found


def _text(mesh: AbstractMesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape_tuple)


def _placed(mesh: AbstractMesh, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    sizes = dict(mesh.shape_tuple)
    parts = [int(np.prod([sizes[name] for name in _names(axis)])) for axis in spec]
    fitting = (axis if x.shape[i] % parts[i] == 0 else None for i, axis in enumerate(spec))
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*fitting)))
