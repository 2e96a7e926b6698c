"""How the operands of an operation are split over the axes of a mesh, and checks that they can be.

An operation of jmoe on parts must be that on the whole. What each device would measure or read for itself, though it
belongs to something that several of them hold parts of, is therefore refused.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from jmoe.arguments import check_type
from jmoe.qtensor import QTensor

AxisName = str | tuple[str, ...] | None
Axes = tuple[str, ...]


def as_axes(argument: str, value: Any) -> Axes:
    """The mesh axes that ``value`` names: a name, several, or None.

    Raises:
      TypeError: anything else.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, tuple | list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{argument}={value!r} must be the name of a mesh axis, a tuple of such names, or None")
    return tuple(value)


def as_token_axes(x: Array, value: Any) -> tuple[Axes, ...]:
    """For each leading axis of x, the mesh axes that ``token_axes`` splits it over.

    Raises:
      TypeError: no sequence of names; ValueError: more entries than x has leading axes.
    """
    lead = x.shape[:-1]
    if isinstance(value, str) or not isinstance(value, Sequence | PartitionSpec):
        raise TypeError(
            f"token_axes={value!r} must be a sequence with a mesh axis's name, a tuple of such names, or None for each "
            "leading axis of x, such as ('data',)"
        )
    axes = tuple(as_axes(f"token_axes[{i}]", names) for i, names in enumerate(value))
    if len(axes) > len(lead):
        raise ValueError(f"token_axes={tuple(value)} is longer than the leading axes of x, {lead}")
    return (*axes, *((),) * (len(lead) - len(axes)))


def manual_axes() -> frozenset[str]:
    """The axes of the mesh in force that no surrounding shard_map has made manual; all of them become so inside.

    Raises:
      ValueError: no mesh is in force.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError("no mesh is in force: enter one with jax.set_mesh")
    return frozenset(
        name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual
    )


def check_axes(manual: frozenset[str], groups: dict[str, Axes]) -> None:
    """Raises ValueError unless every axis is one of ``manual`` and named once; ``groups`` are axes by argument."""
    used: dict[str, str] = {}
    for argument, names in groups.items():
        for name in names:
            if name not in manual:
                raise ValueError(
                    f"{argument} names {name!r}, but {name!r} is no axis of the mesh in force; those to split over are "
                    f"{sorted(manual)}"
                )
            if name in used:
                where = argument if used[name] == argument else f"{used[name]} and in {argument}"
                raise ValueError(
                    f"the mesh axis {name!r} is named twice, in {where}, but it splits one axis of the operation"
                )
            used[name] = argument


def check_tokens(x: Array, tokens: tuple[Axes, ...]) -> None:
    """Raises ValueError unless each device gets an equal part of x's leading axes."""
    for extent, names in zip(x.shape[:-1], tokens, strict=True):
        if extent % devices(names):
            raise ValueError(
                f"x has {extent} tokens along an axis that is split over {devices(names)} devices ({', '.join(names)})"
            )


def check_split(name: str, w: Array | QTensor, axes: dict[int, tuple[str, Axes]]) -> None:
    """Raises ValueError unless each device gets an equal part of ``w`` along ``axes``, in whole blocks.

    Args:
      name: the argument's.
      w: the weight.
      axes: for an axis of w, its letter and the mesh axes that it is split over.
    """
    for axis, (letter, names) in axes.items():
        parts, extent = devices(names), w.shape[axis]
        where = f"along {', '.join(names)}"
        if extent % parts:
            spare = "; spare slots and an expert_map (jmoe.parallel) make it" if letter == "E" else ""
            raise ValueError(f"{name} has {letter} = {extent}, no multiple of the {parts} devices {where}{spare}")
        if parts == 1 or not isinstance(w, QTensor) or axis < -2:
            continue
        part, block = extent // parts, w.scheme.block[axis]
        if block != -1 and w.scale.shape[axis] != 1 and part % block:
            fitting = list(w.scheme.block)
            fitting[axis] = math.gcd(part, block)
            raise ValueError(
                f"{name} has a scale for every {block} of {letter}, and the part of {part} that each of {parts} "
                f"devices {where} has is no multiple of that: jmoe.refine_blocks({name}, {tuple(fitting)}) first"
            )
        if axis == -1 and w.scheme.fmt.bits == 4 and part % 2:
            raise ValueError(f"{name} has two codes of {letter} to a byte, and an odd part of {part} on each device")


def check_groups(name: str, w: Array | QTensor, letter: str, names: Axes, instead: str) -> None:
    """Raises ValueError where devices would have parts of a group whose scale an activation measures whole.

    A group that is the whole row is measured over all devices (``jmoe.config.Shards``), so that one is no matter.

    Args:
      name: the weight's argument.
      w: the weight, whose last axis is split and whose input scheme is that of the activation.
      letter: of that axis.
      names: the mesh axes that it is split over.
      instead: the letter of an axis that splits no activation.
    """
    if not isinstance(w, QTensor) or w.input_scheme is None:
        return
    parts, extent, group = devices(names), w.shape[-1], w.input_scheme.block[1]
    # Uneven parts are check_split's to name.
    if parts == 1 or group == -1 or extent % parts or (extent // parts) % group == 0:
        return
    whole = extent // group if extent % group == 0 else 1
    few = f"split {letter} over a number of devices that divides {whole}, or " if whole > 1 else ""
    raise ValueError(
        f"{name} asks for an activation with a measured scale for every {group} of {letter}, and the part of "
        f"{extent // parts} that each of {parts} devices along {', '.join(names)} has is no multiple of that: {few}"
        f"split {instead} instead, or take a recipe whose activation has one scale a row or is not quantized"
    )


def check_rows(name: str, w: Array | QTensor, names: Axes, rows: Sequence[int] | None) -> None:
    """The same for scales that several tokens share, but not all of them.

    Args:
      name: the weight's argument.
      w: the weight, whose input scheme is that of the activation.
      names: all mesh axes that tokens (or the choice among them) are split over.
      rows: the extents of the tokens' axes on each device; None where no part of them is in order.
    """
    if not isinstance(w, QTensor) or w.input_scheme is None or devices(names) == 1:
        return
    block = w.input_scheme.block[0]
    if block in (1, -1) or (rows is not None and len(rows) == 1 and rows[0] % block == 0):
        return
    raise ValueError(
        f"{name} asks for an activation with a measured scale for every {block} tokens, and each of the "
        f"{devices(names)} devices along {', '.join(names)} would have parts of these: leave tokens and experts whole, "
        "or take a recipe whose activation has scales of one row or of all"
    )


def devices(names: Axes) -> int:
    """How many devices of the mesh in force lie along these axes."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return math.prod(sizes[name] for name in names)


def flat(axes: Sequence[Axes]) -> Axes:
    """All names of all of them."""
    return tuple(name for names in axes for name in names)


def spread_tokens(lead: Sequence[int], used: AxisName) -> tuple[AxisName, ...]:
    """For tokens of shape ``lead`` whose sharding is not known, the mesh axes to split each of their axes over.

    Those are all axes of the mesh in force that are not ``used``; one that divides none of the extents is left out,
    and its devices then compute the same.

    Raises:
      TypeError: ``lead`` is no shape, or ``used`` no names; ValueError: no mesh in force.
    """
    check_type("lead", lead, Sequence, "the shape of the tokens, such as x.shape[:-1]")
    for i, extent in enumerate(lead):
        check_type(f"lead[{i}]", extent, int, "an integer")
    mesh = jax.sharding.get_abstract_mesh()
    chosen: list[list[str]] = [[] for _ in lead]
    left = list(lead)
    for name in sorted(manual_axes() - set(as_axes("used", used)), key=mesh.axis_names.index):
        size = mesh.shape[name]
        for axis, extent in enumerate(left):
            if extent and extent % size == 0:
                chosen[axis].append(name)
                left[axis] = extent // size
                break
    return tuple(tuple(names) or None for names in chosen)
