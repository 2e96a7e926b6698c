"""From the host onto devices: whole arrays, or each device's own part of an array that is sharded over a mesh.

Every byte is copied once into memory of our own, never aliased to a mapped file. Of an array that is sharded, one part
is in the host's memory at a time, and a process makes the parts of its own devices only.
"""

import gc
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jmoe.arguments import check_type
from jmoe.qtensor import QTensor, grid_axes
from jmoe.sharding import AxisName

Device = Any
"""Where arrays go: what ``jax.device_put`` takes, or a function (variable's name, shape) that gives such a thing."""

_PARTS = {"data": "", "scale": "_scale", "global_scale": "_global_scale", "zero_point": "_zero_point"}

Bounds = tuple[tuple[int, int], ...]
"""Start and stop along each axis."""


@dataclass(frozen=True)
class Part:
    """An array that is to be made: a plain weight, or one of a QTensor's.

    Attributes:
      name: as the variable of a module that holds it: ``w13``, ``w13_scale``, ...
      shape, dtype: of all of it.
      target: what ``jax.device_put`` takes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    target: Any


@dataclass(frozen=True)
class Block:
    """A piece of a part, to be filled.

    Attributes:
      part: the number of the part among those that are made together.
      bounds: where in the part it lies.
      array: the host's memory for it.
    """

    part: int
    bounds: Bounds
    array: np.ndarray

    @property
    def index(self) -> tuple[slice, ...]:
        """``array`` holds ``part[index]``."""
        return tuple(slice(start, stop) for start, stop in self.bounds)


class Placement:
    """Where the arrays of a weight go: to a device, or on a mesh as the weight's axes are sharded.

    Args:
      device: as `Device`.
      mesh: devices to shard over; the mesh in force where ``sharding`` is given alone.
      sharding: the mesh axis, or several, that each axis in ``meaning`` is sharded over; None leaves all unsharded.
      meaning: what these axes are called.

    Raises:
      ValueError: a device and a mesh, axes without a mesh, a name that is no axis of it, one name twice, or another
        number of axes; TypeError: what is none of these.
    """

    def __init__(
        self,
        device: Device,
        mesh: Mesh | None = None,
        sharding: Sequence[AxisName] | None = None,
        meaning: Sequence[str] = (),
    ) -> None:
        check_type("mesh", mesh, (Mesh, type(None)), "a jax.sharding.Mesh or None")
        if device is not None and (mesh is not None or sharding is not None):
            raise ValueError(f"device={device!r} is given with a mesh or sharding, which say where to as well")
        if sharding is not None and mesh is None:
            mesh = jax.sharding.get_mesh()
            if mesh.empty:
                raise ValueError(
                    "sharding names axes of a mesh, but there is none: pass one, or enter it with jax.set_mesh"
                )
        self.device = device
        self.mesh = mesh
        self.axes: tuple[AxisName, ...] = (None,) * len(meaning)
        if sharding is not None:
            self.axes = _checked_axes(sharding, meaning, mesh)

    def target(self, name: str, shape: tuple[int, ...], axes: Sequence[AxisName] = ()) -> Any:
        """What ``jax.device_put`` takes for an array; ``axes`` are the mesh axes of its leading axes.

        Raises:
          ValueError: the devices along a mesh axis do not divide the array's axis.
        """
        if self.mesh is None:
            found = self.device(name, shape) if callable(self.device) else self.device
            if isinstance(found, PartitionSpec):
                mesh = jax.sharding.get_mesh()
                if mesh.empty:
                    raise ValueError(f"device gives {found!r} for {name}, but no mesh is in force: enter one")
                found = NamedSharding(mesh, found)
        else:
            names = (axis if extent != 1 else None for axis, extent in zip(axes, shape, strict=False))
            found = NamedSharding(self.mesh, PartitionSpec(*names))
        if isinstance(found, NamedSharding) and len(found.spec) > len(shape):
            raise ValueError(
                f"{name} of shape {shape} cannot be sharded so: {found.spec} is for {len(found.spec)} axes"
            )
        if isinstance(found, Sharding):
            try:
                found.shard_shape(shape)
            except ValueError as error:
                raise ValueError(f"{name} of shape {shape} cannot be sharded so: {error}") from error
        return found

    def parts(self, name: str, weight: Any, axes: Sequence[AxisName]) -> list[Part]:
        """The arrays of a weight of these axes, an array or a QTensor (possibly abstract), under variables' names."""
        if not isinstance(weight, QTensor):
            return [Part(name, weight.shape, np.dtype(weight.dtype), self.target(name, weight.shape, axes))]
        found = []
        for field, suffix in _PARTS.items():
            if (leaf := getattr(weight, field)) is not None:
                own = axes if field == "data" else grid_axes(weight, field, axes, self._extent)
                target = self.target(name + suffix, leaf.shape, own)
                found.append(Part(name + suffix, leaf.shape, np.dtype(leaf.dtype), target))
        return found

    def _extent(self, names: AxisName) -> int:
        if self.mesh is None or names is None:
            return 1
        return math.prod(self.mesh.shape[name] for name in (names if isinstance(names, tuple) else (names,)))


def _checked_axes(sharding: Sequence[AxisName], meaning: Sequence[str], mesh: Mesh | None) -> tuple[AxisName, ...]:
    assert mesh is not None
    wanted = f"must name one mesh axis, or None, for each of ({', '.join(meaning)})"
    if isinstance(sharding, str) or not isinstance(sharding, Sequence | PartitionSpec):
        raise TypeError(f"sharding={sharding!r} {wanted}, in a sequence")
    axes = tuple(sharding)
    if len(axes) != len(meaning):
        raise ValueError(f"sharding={sharding!r} {wanted}")
    used: set[str] = set()
    for name in (name for axis in axes if axis is not None for name in (axis if isinstance(axis, tuple) else (axis,))):
        if not isinstance(name, str):
            raise TypeError(f"sharding={sharding!r} {wanted}, and {name!r} is no name")
        if name not in mesh.axis_names:
            known = ", ".join(map(str, mesh.axis_names))
            raise ValueError(f"sharding={sharding!r} names {name!r}, which is no axis of the mesh; it has {known}")
        if name in used:
            raise ValueError(f"sharding={sharding!r} names the mesh axis {name!r} twice, but it splits one axis")
        used.add(name)
    return axes


def place_array(name: str, array: np.ndarray, placement: Placement, axes: Sequence[AxisName] = ()) -> Array:
    """Moves an array that nobody else writes to or keeps, and returns when the transfer is complete.

    Only then is the host's memory free before more of it is filled.
    """
    part = Part(name, array.shape, array.dtype, placement.target(name, array.shape, axes))
    if not _is_split(part.target):
        return _moved(array, part.target)

    def fill(blocks: list[Block]) -> None:
        for block in blocks:
            block.array[...] = array[block.index]

    return place_parts([part], fill)[0]


def place_parts(parts: Sequence[Part], fill: Callable[[list[Block]], None]) -> list[Array]:
    """Makes arrays block by block.

    Args:
      parts: the arrays.
      fill: fills the memory of some blocks, at most one of each part, in one pass over what they come from.
    """
    wanted = [_blocks(part) for part in parts]
    pieces: list[list[Array]] = [[] for _ in parts]
    for group in itertools.zip_longest(*(found.items() for found in wanted)):
        blocks = []
        for number, (part, item) in enumerate(zip(parts, group, strict=True)):
            if item is not None:
                shape = tuple(stop - start for start, stop in item[0])
                blocks.append(Block(number, item[0], np.empty(shape, part.dtype)))
        fill(blocks)
        while blocks:  # each is freed as soon as it has been moved
            block = blocks.pop(0)
            pieces[block.part] += [_moved(block.array, target) for target in wanted[block.part][block.bounds]]
            del block
    return [
        jax.make_array_from_single_device_arrays(part.shape, part.target, found) if _is_split(part.target) else found[0]
        for part, found in zip(parts, pieces, strict=True)
    ]


def _blocks(part: Part) -> Mapping[Bounds, list[Any]]:
    """The blocks that this process makes, each with where it goes; several devices may hold one and the same."""
    if not _is_split(part.target):
        return {tuple((0, extent) for extent in part.shape): [part.target]}
    found: dict[Bounds, list[Any]] = {}
    for device, index in part.target.addressable_devices_indices_map(part.shape).items():
        bounds = tuple(s.indices(extent)[:2] for s, extent in zip(index, part.shape, strict=True))
        found.setdefault(bounds, []).append(device)
    return found


def _is_split(target: Any) -> bool:
    """Whether several devices, or other processes' ones, hold an array that lies so."""
    return isinstance(target, Sharding) and (len(target.device_set) > 1 or not target.is_fully_addressable)


def _moved(array: np.ndarray, target: Any) -> Array:
    placed = jax.block_until_ready(jax.device_put(array, target))
    gc.collect(0)  # JAX lets go of the host's array at the next collection only
    return placed
