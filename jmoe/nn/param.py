"""Weights as Flax variables: a weight of a module is a plain ``nnx.Param`` or the parts of a QTensor.

A module that has the weight ``w13`` has the variables ``w13``, ``w13_scale``, ``w13_global_scale``, ``w13_zero_point``
and ``w13_input_scale``, named as in checkpoints and None where absent, and the static attribute ``w13_format``.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from jmoe.arguments import COMPUTE_DTYPES, as_array, float_dtype
from jmoe.config import config
from jmoe.ops.prepare import prepare
from jmoe.qtensor import QTensor, grid_axes
from jmoe.quantize import check_static_scale, quantize
from jmoe.scheme import Recipe, Scheme, recipe_of
from pallas_kernels.layouts import CANONICAL, Layout

AxisName = str | tuple[str, ...] | None
"""A mesh axis (or a logical one, or several) that an array axis is sharded over; None is not at all."""

_LETTERS = {"weight": ("N", "K"), "w13": ("E", "halves", "I", "H"), "w2": ("E", "H", "I")}
"""The last axes of the weights of our modules."""

_PARTS = {"data": "", "scale": "_scale", "global_scale": "_global_scale", "zero_point": "_zero_point"}


class QuantizedParam(nnx.Variable):
    """Codes, scales and zero points of a quantized weight.

    Not an ``nnx.Param``: optimizers and ``nnx.grad`` select those, and codes have no gradient.
    """


nnx.register_variable_name("quantized_params", QuantizedParam)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The static fields of a QTensor, kept beside its leaves."""

    scheme: Scheme
    input_scheme: Scheme | None
    layout: Layout
    odd_k: bool


def checked_axes(argument: str, axes: Sequence[AxisName], meaning: Sequence[str]) -> tuple[AxisName, ...]:
    """``axes`` as a tuple, one name for each of the axes that ``meaning`` lists.

    Raises:
      TypeError: no sequence, or something that is no name; ValueError: another number of them.
    """
    wanted = f"must name one mesh axis, or None, for each of ({', '.join(meaning)})"
    if isinstance(axes, str) or not isinstance(axes, Sequence | PartitionSpec):
        raise TypeError(f"{argument}={axes!r} {wanted}, in a sequence")
    if len(axes) != len(meaning):
        raise ValueError(f"{argument}={axes!r} {wanted}")
    for names in axes:
        if names is not None and not all(isinstance(n, str) for n in (names if isinstance(names, tuple) else (names,))):
            raise TypeError(f"{argument}={axes!r} {wanted}, and {names!r} is no name and no tuple of names")
    return tuple(axes)


def part_names(name: str) -> tuple[str, ...]:
    """The attributes that hold the weight ``name``, without its input scale."""
    return tuple(name + suffix for suffix in _PARTS.values())


def input_scale_name(name: str) -> str:
    """The attribute that holds the static scale of the activation that meets the weight ``name``."""
    return name + "_input_scale"


def checked_weight(name: str, w: Any) -> Any:
    """``w`` as a weight: a QTensor, or an array of a dtype that products compute in (possibly an abstract one).

    Raises:
      TypeError: anything else.
    """
    if isinstance(w, QTensor):
        return w
    array = w if isinstance(w, jax.ShapeDtypeStruct) else as_array(name, w)
    if array.dtype.name not in COMPUTE_DTYPES:
        raise TypeError(
            f"{name} has dtype {array.dtype}, but a plain weight is {', '.join(COMPUTE_DTYPES[:-1])} or "
            f"{COMPUTE_DTYPES[-1]}, and a quantized one is a QTensor"
        )
    return array


def checked_bias(name: str, bias: Any) -> Any:
    """``bias`` as an array of a dtype that products compute in (possibly an abstract one).

    Raises:
      TypeError: anything else.
    """
    array = bias if isinstance(bias, jax.ShapeDtypeStruct) else as_array(name, bias)
    float_dtype(name, array.dtype, COMPUTE_DTYPES)
    return array


def stack_shape(module: Any, name: str, rank: int) -> tuple[int, ...]:
    """The axes that lead the last ``rank`` ones of the weight ``name``; not that which a scan has the module index."""
    shape = tuple(getattr(module, name).get_raw_value().shape)
    lead = shape[: len(shape) - rank]
    return lead if module.layer is None else lead[1:]


def check_single(module: Any) -> None:
    """Raises ValueError where ``module`` is a stack of layers, which is not called itself."""
    if lead := module.stack_shape:
        raise ValueError(
            f"this {type(module).__name__} is a stack of layers, with the leading axes {lead}; jmoe.nn.scan_layers "
            "applies it"
        )


def set_weight(
    module: nnx.Module,
    name: str,
    w: Array | QTensor,
    axes: Sequence[AxisName],
    *,
    input_scale: Any = None,
    scale_shapes: Sequence[tuple[int, ...]],
) -> None:
    """Makes ``w`` the weight ``name`` of ``module``; what was there before is released.

    Everything is checked, and every variable made, before the first is assigned: a call that raises changes nothing.

    Args:
      module: the module.
      name: the weight's name.
      w: the weight; axes beyond those named in ``axes`` lead (stacked layers).
      axes: the mesh axis over which each of the weight's axes is sharded, e.g. (None, "model") for (N, K).
      input_scale: float32 of one of ``scale_shapes``, the static scale of the activation that meets the weight, where
        its input scheme is static; None keeps one that is there.
      scale_shapes: the shapes that scale may have.

    Raises:
      ValueError: a scale is missing or not wanted, has another shape, or is not positive and finite; or the mesh in
        force cannot hold ``w`` so.
    """
    axes = (None,) * (w.ndim - len(axes)) + tuple(axes)
    if isinstance(w, QTensor) and any(axes[-2:]):
        w = w.in_layout(CANONICAL)  # no kernel's own packing can be split along rows or columns
    _check_placement(name, w, axes)
    fmt = WeightFormat(w.scheme, w.input_scheme, w.layout, w.odd_k) if isinstance(w, QTensor) else None
    values: dict[str, nnx.Variable | None] = {input_scale_name(name): _input_scale(module, name, fmt, input_scale)}
    scale = values[input_scale_name(name)]
    if scale is not None and tuple(scale.get_raw_value().shape) not in scale_shapes:
        shape = tuple(scale.get_raw_value().shape)
        raise ValueError(
            f"{input_scale_name(name)} has shape {shape}, but it is {' or '.join(map(str, scale_shapes))} here"
        )
    for part, suffix in _PARTS.items():
        value: nnx.Variable | None = None
        if isinstance(w, QTensor):
            if (leaf := getattr(w, part)) is not None:
                value = variable(
                    QuantizedParam, leaf, axes if part == "data" else grid_axes(w, part, axes, _mesh_extent)
                )
        elif part == "data":
            value = variable(nnx.Param, w, axes)
        values[name + suffix] = value
    setattr(module, name + "_format", nnx.static(fmt))
    for attribute, value in values.items():
        setattr(module, attribute, nnx.data(value))


def _check_placement(name: str, w: Array | QTensor, axes: Sequence[AxisName]) -> None:
    """Raises ValueError unless the mesh in force can hold ``w`` so; Flax places variables as soon as they are made."""
    held = w.data.shape if isinstance(w, QTensor) else w.shape
    split = {axis: names for axis, names in enumerate(axes) if names and held[axis] != 1}
    if not split or not nnx.using_eager_sharding():
        return
    mesh, used = jax.sharding.get_abstract_mesh(), set[str]()
    if mesh.empty:
        raise ValueError(
            f"sharding names {next(iter(split.values()))!r} for {name}, but no mesh is in force: enter one with "
            "jax.set_mesh, or keep names alone under nnx.use_eager_sharding(False)"
        )
    for axis, names in split.items():
        (resolved,) = _on_mesh((names,))
        parts = () if resolved is None else resolved if isinstance(resolved, tuple) else (resolved,)
        for part in parts:
            if part not in mesh.axis_names:
                known = ", ".join(map(str, mesh.axis_names))
                raise ValueError(
                    f"sharding names {part!r} for {name}, but {part!r} is no axis of the mesh in force; it has {known}"
                )
            if part in used:
                raise ValueError(f"sharding names the mesh axis {part!r} twice for {name}, but it splits one axis")
            used.add(part)
        extent, count = w.shape[axis], _mesh_extent(names)
        letters = _LETTERS[name]
        letter = letters[axis - w.ndim] if w.ndim - axis <= len(letters) else f"axis {axis}"
        where = f"devices along {', '.join(parts)} that sharding splits it over"
        if extent % count:
            spare = "; spare slots and an expert_map (jmoe.parallel) make it" if letter == "E" else ""
            raise ValueError(f"{name} has {letter} = {extent}, no multiple of the {count} {where}{spare}")
        if held[axis] % count:
            raise ValueError(
                f"{name} has {letter} = {extent} in {held[axis]} bytes of two codes each, no multiple of the {count} "
                f"{where}"
            )


def _input_scale(module: nnx.Module, name: str, fmt: WeightFormat | None, scale: Any) -> nnx.Variable | None:
    """The static scale that goes with a weight of that format: the one given, or else the one that is there."""
    attribute = input_scale_name(name)
    how = _recipe_of_format(fmt).name
    if fmt is None or fmt.input_scheme is None or not fmt.input_scheme.static:
        if scale is not None:
            raise ValueError(f"{attribute} is given, but recipe {how!r} has no given activation scale")
        return None
    if scale is not None:
        return QuantizedParam(check_static_scale(attribute, scale))
    kept = getattr(module, attribute, None)
    if kept is None:
        raise ValueError(f"{attribute} is missing: recipe {how!r} needs it given")
    return kept


def get_weight(module: nnx.Module, name: str) -> Array | QTensor:
    """The weight ``name`` of ``module``, as operations take it."""
    leaves = {part: value_of(getattr(module, name + suffix)) for part, suffix in _PARTS.items()}
    fmt = getattr(module, name + "_format")
    if fmt is None:
        return leaves["data"]
    return QTensor(**leaves, scheme=fmt.scheme, input_scheme=fmt.input_scheme, layout=fmt.layout, odd_k=fmt.odd_k)


def recipe_of_weight(module: nnx.Module, name: str) -> Recipe:
    """How the weight ``name`` and its activation are quantized."""
    return _recipe_of_format(getattr(module, name + "_format"))


def _recipe_of_format(fmt: WeightFormat | None) -> Recipe:
    return recipe_of(None, None) if fmt is None else recipe_of(fmt.scheme, fmt.input_scheme)


def variable(kind: type[nnx.Variable], value: Any, axes: Sequence[AxisName] = ()) -> nnx.Variable:
    """A variable with sharding metadata, in Flax's form; axes of extent 1 are not sharded."""
    names = tuple(None if extent == 1 else axis for axis, extent in zip(axes, value.shape, strict=bool(axes)))
    if not any(names):
        return kind(value)
    concrete = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    if concrete and nnx.using_eager_sharding() and not jax.sharding.get_abstract_mesh().empty:
        # Flax itself shards arrays that were made under the mesh, but not those from elsewhere.
        value = jax.device_put(value, PartitionSpec(*_on_mesh(names)))
    return kind(value, out_sharding=names)


def assign(module: nnx.Module, name: str, value: Array) -> None:
    """Gives the variable ``name`` of ``module`` a new value of the same shape; its kind and metadata stay.

    Unlike ``variable.set_value`` this shards the value as the metadata say, and works on abstract modules too.

    Raises:
      ValueError: the module has no such variable, or its shape is another.
    """
    old = getattr(module, name, None)
    if not isinstance(old, nnx.Variable):
        raise ValueError(f"{type(module).__name__} has no variable {name!r} to assign to")
    if tuple(value.shape) != tuple(old.get_raw_value().shape):
        expected = tuple(old.get_raw_value().shape)
        raise ValueError(f"{name} of {type(module).__name__} has shape {expected}, not {tuple(value.shape)}")
    axes = old.get_metadata("out_sharding", None) or ()
    setattr(module, name, variable(type(old), value, axes))


def split_axes(var: nnx.Variable, rank: int) -> tuple[tuple[str, ...], ...]:
    """For each of the last ``rank`` axes of a variable, the axes of the mesh in force over which its metadata split it.

    Only those of several devices that no surrounding ``jax.shard_map`` has made manual.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return ((),) * rank
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    usable = {name for name, size in mesh.shape.items() if size > 1 and kinds[name] != AxisType.Manual}
    spec = tuple(nnx.get_partition_spec(var).get_value())
    names = (*spec, *(None,) * (var.get_raw_value().ndim - len(spec)))
    parts = [axis if isinstance(axis, tuple) else (axis,) for axis in names[len(names) - rank :]]
    return tuple(tuple(name for name in part if name in usable) for part in parts)


def value_of(var: nnx.Variable | None) -> Any:
    """The value of a variable that may be absent."""
    return None if var is None else var.get_value()


def prepared(w: Array | QTensor, op: Literal["linear", "moe"], implementation: str | None) -> Array | QTensor:
    """``jmoe.prepare`` of a layer's weight, for the layer's implementation; as it is where nothing serves it."""
    try:
        with contextlib.nullcontext() if implementation is None else config(implementation=implementation):
            return prepare(w, op=op)
    except (ExceptionGroup, NotImplementedError):  # calls say so, and may ask for another by name
        return w


def empty(shape: tuple[int, ...], recipe: Recipe, dtype: jax.typing.DTypeLike) -> Array | QTensor:
    """A weight of zeros: plain of that dtype, or a QTensor whose codes and scales are zero."""
    if recipe.weight is None:
        return jnp.zeros(shape, dtype)
    like = jax.eval_shape(lambda w: quantize(w, recipe), jax.ShapeDtypeStruct(shape, dtype))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)


def _on_mesh(names: tuple[AxisName, ...]) -> tuple[AxisName, ...]:
    """Mesh axes for logical ones, by the rules in force."""
    rules = spmd.get_logical_axis_rules()
    return spmd.from_sharding_rules(names, rules) if rules else names


def _mesh_extent(name: AxisName) -> int:
    """Devices along that axis of the mesh in force, 1 where there is none or it has no such axis."""
    if name is None:
        return 1
    (resolved,) = _on_mesh((name,))
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    parts = resolved if isinstance(resolved, tuple) else (resolved,)
    return math.prod(sizes.get(part, 1) for part in parts)
