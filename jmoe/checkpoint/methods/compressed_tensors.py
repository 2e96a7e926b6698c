"""``quant_method: "compressed-tensors"``: what llm-compressor writes, in all the formats of integers, FP8 and FP4.

A module's tensors say how its weight lies:

| layout | tensors | value |
|---|---|---|
| packed | ``weight_packed`` int32 (N, words), ``weight_shape`` | ``(q - zero_point) * scale`` |
| int | ``weight`` int8 (N, K) | ``(q - zero_point) * scale`` |
| float | ``weight`` e4m3 (N, K) | ``e4m3 * scale`` |
| nvfp4 | ``weight_packed`` uint8 (N, K/2), ``weight_global_scale`` | ``e2m1 * scale / global_scale`` |
| mxfp4 | ``weight_packed`` uint8 (N, K/2) | ``e2m1 * 2^(scale - 127)`` |

each with ``weight_scale``. Packed fields of n bits hold q + 2^(n-1), zero points likewise and packed along N. The
configuration's group of the module says what shares a scale and how activations are quantized; it and the tensors must
agree. Global scales divide here and multiply in a QTensor, so NVFP4 values may differ from the library's by one unit in
the last place; all others are exact. Columns that find their group through ``weight_g_idx`` have no form as a QTensor:
such a weight loads as its float32 values. Scales of int8 activations are measured as amax / 127, as engines do; the
library's own simulation takes amax / 127.5. Source: the compressed-tensors library.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast

import numpy as np
from jax import Array

from jmoe.checkpoint.methods import bit_fields
from jmoe.checkpoint.methods.base import (
    SCALE_DTYPES,
    CheckpointError,
    HostWeight,
    Method,
    Tensors,
    present_leaves,
    read_scale,
    register,
    require_grid,
    require_matrix,
    where,
)
from jmoe.checkpoint.methods.compressed_tensors_config import LAYOUTS, Args, Entries, Group, is_class, parse
from jmoe.checkpoint.methods.none import UNQUANTIZED, unquantized_recipe
from jmoe.checkpoint.safetensors import TensorInfo
from jmoe.numerics import INT4_OFFSET
from jmoe.qtensor import QTensor, scale_grid
from jmoe.scheme import Recipe, Scheme, recipe_of

Layout = Literal["packed", "int", "float", "nvfp4", "mxfp4"]

_F32_TINY = np.finfo(np.float32).tiny

_LEAVES: Mapping[Layout, frozenset[str]] = {
    "packed": frozenset({"weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"}),
    "int": frozenset({"weight", "weight_zero_point", "weight_g_idx"}),
    "float": frozenset({"weight", "weight_zero_point"}),
    "nvfp4": frozenset({"weight_packed", "weight_global_scale"}),
    "mxfp4": frozenset({"weight_packed"}),
}
"""The leaves of each layout beside ``weight_scale`` and those of the activation."""


@dataclass(frozen=True)
class _Module:
    """A quantized module: how its tensors lie and what the configuration says of it.

    Attributes:
      layout: how the weight lies.
      info: the header of the codes.
      present: the headers of all leaves.
      args: of the weight.
      group: that the module belongs to.
    """

    layout: Layout
    info: TensorInfo
    present: Mapping[str, TensorInfo]
    args: Args
    group: Group

    @property
    def narrow(self) -> bool:
        """Whether integer codes fit four bits."""
        return self.args.bits <= 4

    @property
    def says(self) -> str:
        """The key of the configuration and what stands there, for errors."""
        return f"the configuration's {self.args.where} says {self.args.describe()}"


@register("compressed-tensors")
class CompressedTensors(Method):
    """Every format of compressed-tensors that has integers of up to 8 bits, e4m3 or e2m1 codes."""

    leaves = (
        "weight",
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "weight_global_scale",
        "input_scale",
        "input_zero_point",
        "input_global_scale",
    )

    def __init__(self, groups: Collection[Group], ignore: Collection[str]) -> None:
        self._ignored = Entries("ignore", [(entry, None) for entry in ignore])
        self._groups = Entries(
            "config_groups targets", [(target, group) for group in groups for target in group.targets]
        )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(*parse(config))

    def is_quantized(self, leaves: Collection[str]) -> bool:
        return not {"weight_packed", "weight_scale"}.isdisjoint(leaves)

    def ignored_by(self, module: str) -> str | None:
        if (ignored := self._ignored.find(module)) is not None:
            return f"ignore entry {ignored[0]!r}"
        found = self._groups.find(module)
        if found is None:
            return "config_groups, of whose targets none is for it,"
        return f"group {found[1].name!r} without weights" if found[1].weights is None else None

    def recipe_for(self, module: str, present: Mapping[str, TensorInfo]) -> Recipe:
        found = self._module(module, present)
        if found is None:
            return unquantized_recipe(module, present)
        if found.args.ordered:
            return UNQUANTIZED
        return recipe_of(_weight_scheme(found), found.group.input)

    def shape_for(self, module: str, present: Mapping[str, TensorInfo]) -> tuple[int, ...]:
        """As `Method.shape_for`; K of packed integers may be padding in part, which `read_shape` knows."""
        found = self._module(module, present)
        if found is None:
            return present["weight"].shape
        n, k = found.info.shape
        if found.layout == "packed":
            return n, k * 32 // found.args.bits
        return (n, k) if found.layout in ("int", "float") else (n, 2 * k)

    def read_shape(self, tensors: Tensors, module: str) -> tuple[int, ...]:
        present = present_leaves(tensors.tensors, module, self.leaves)
        found = self._module(module, present)
        if found is None or found.layout != "packed":
            return self.shape_for(module, present)
        shape = _packed_shape(tensors, found)
        _require_grid(found.present["weight_scale"], found, shape)
        return shape

    def load_weight(self, tensors: Tensors, module: str) -> HostWeight:
        found = self._module(module, present_leaves(tensors.tensors, module, self.leaves))
        if found is None:
            return tensors.read(f"{module}.weight")
        _check_zeros(tensors, found)
        if found.layout in ("packed", "int"):
            return _load_integers(tensors, found)
        scheme = _weight_scheme(found)
        scale = read_scale(tensors, found.present["weight_scale"].name)
        n, k = self.shape_for(module, found.present)
        grid = scale.reshape(scale_grid((n, k), scheme.block))
        multiplier = None
        if found.layout == "nvfp4":
            multiplier = _multiplier(tensors, found.present["weight_global_scale"]).reshape(1, 1)
        return _host(tensors.read(found.info.name), grid, scheme, found.group.input, global_scale=multiplier)

    def load_input_scale(self, tensors: Tensors, module: str) -> np.float32 | None:
        found = self._module(module, present_leaves(tensors.tensors, module, self.leaves))
        if found is None or found.group.input is None or not found.group.input.static:
            return None
        if found.group.input.global_scale is not None:
            return np.float32(_multiplier(tensors, found.present["input_global_scale"]).reshape(()))
        return np.float32(read_scale(tensors, found.present["input_scale"].name).reshape(()))

    def _module(self, module: str, present: Mapping[str, TensorInfo]) -> _Module | None:
        """The module's tensors beside its group, which agree; None where it is not quantized."""
        quantized = self.is_quantized(present)
        stray = [leaf for leaf in present if leaf != "weight"]
        if not quantized and stray:
            raise CheckpointError(
                f"{where(present[stray[0]])} belongs to a quantized weight, but {module + '.weight_scale'!r} is missing"
            )
        if not quantized:
            self._check_plain(module, present.get("weight"))
            return None
        layout, info = _layout(module, present)
        if (reason := self.ignored_by(module)) is not None:
            raise CheckpointError(
                f"{where(info)} is {info.dtype} with the scale {present['weight_scale'].name!r}, but the "
                f"configuration's {reason} says that it is not quantized"
            )
        target = self._groups.find(module)
        assert target is not None and target[1].weights is not None  # or a reason would have been found
        found = _Module(layout, info, present, target[1].weights, target[1])
        _check_agreement(found)
        _check_scale(found)
        _check_zero_point_and_order(found)
        _check_input(module, found)
        return found

    def _check_plain(self, module: str, weight: TensorInfo | None) -> None:
        """A matrix without a scale is an error where a target names it; a class may have other members than linears."""
        target = self._groups.find(module)
        if weight is None or len(weight.shape) != 2 or target is None or self.ignored_by(module) is not None:
            return
        if not is_class(target[0]):
            raise CheckpointError(
                f"{where(weight)} is {weight.dtype} without a scale, but the configuration quantizes it: "
                f"config_groups.{target[1].name} has the target {target[0]!r}"
            )


def _layout(module: str, present: Mapping[str, TensorInfo]) -> tuple[Layout, TensorInfo]:
    """How the weight of a quantized module lies, by the names and dtypes of its tensors; the header of the codes."""
    codes = [present[leaf] for leaf in ("weight_packed", "weight") if leaf in present]
    if len(codes) == 2:
        raise CheckpointError(f"{where(codes[0])} and {codes[1].name!r} are two weights of one module, expected one")
    if not codes:
        info = present["weight_scale"]
        raise CheckpointError(
            f"{where(info)} is a scale, but {module + '.weight'!r} and {module + '.weight_packed'!r} are missing"
        )
    info = codes[0]
    if "weight_scale" not in present:
        raise CheckpointError(f"{where(info)} is packed, but its scale {module + '.weight_scale'!r} is missing")
    require_matrix(info)
    if "weight_packed" in present:
        layouts: dict[str, Layout] = {"I32": "packed", "U8": "nvfp4" if "weight_global_scale" in present else "mxfp4"}
    else:
        layouts = {"I8": "int", "F8_E4M3": "float"}
    if info.dtype not in layouts:
        raise CheckpointError(
            f"{where(info)} has dtype {info.dtype}, expected {' or '.join(layouts)} beside "
            f"{present['weight_scale'].name!r}"
        )
    return layouts[info.dtype], info


def _check_agreement(found: _Module) -> None:
    """The layout and the leaves against what the group says of the weight and of its format."""
    args, info = found.args, found.info
    fits = {
        "packed": args.kind == "int",
        "int": args.kind == "int",
        "float": (args.kind, args.bits) == ("float", 8),
        "nvfp4": (args.kind, args.bits, args.strategy) == ("float", 4, "tensor_group"),
        "mxfp4": (args.kind, args.bits, args.strategy) == ("float", 4, "group"),
    }
    scaled = {"nvfp4": " with a global scale", "mxfp4": " without a global scale"}.get(found.layout, "")
    if not fits[found.layout]:
        raise CheckpointError(f"{where(info)} is {info.dtype}{scaled}, but {found.says}")
    if found.group.format is not None and found.layout not in LAYOUTS[found.group.format]:
        raise CheckpointError(
            f"{where(info)} is {info.dtype}{scaled}, but the configuration says format {found.group.format!r} for "
            f"group {found.group.name!r}"
        )
    known = {"weight_scale", "input_scale", "input_zero_point", "input_global_scale"} | _LEAVES[found.layout]
    if unknown := sorted(set(found.present) - known):
        raise CheckpointError(
            f"{where(found.present[unknown[0]])} does not go with {info.name!r} of dtype {info.dtype}: expected none"
        )
    if found.layout == "packed" and "weight_shape" not in found.present:
        raise CheckpointError(
            f"{where(info)} is packed, but {info.name.removesuffix('packed') + 'shape'!r} is missing, which says how "
            "much of it is padding"
        )


def _check_scale(found: _Module) -> None:
    scale, args = found.present["weight_scale"], found.args
    dtypes = {
        "packed": ("F32", "BF16", "F16"),
        "int": ("F32", "BF16", "F16"),
        "float": tuple(SCALE_DTYPES),
        "nvfp4": ("F8_E4M3",),
        "mxfp4": ("U8", "F8_E8M0"),
    }[found.layout]
    if scale.dtype not in dtypes:
        raise CheckpointError(f"{where(scale)} has dtype {scale.dtype}, expected {' or '.join(dtypes)}")
    kind = {"U8": "e8m0", "F8_E8M0": "e8m0", "F8_E4M3": "e4m3"}.get(scale.dtype, "float")
    expected = "e8m0" if found.group.format == "mxfp8-quantized" else args.scale
    if expected not in (None, kind):
        raise CheckpointError(
            f"{where(scale)} has dtype {scale.dtype}, but the configuration's {args.where} or its format says that "
            f"scales are {expected}"
        )
    if found.layout == "packed":
        rows = scale_grid((found.info.shape[0], 1), args.block)[0]
        if scale.shape[:1] != (rows,) and not (rows == 1 and scale.shape == ()):
            raise CheckpointError(f"{where(scale)} has shape {scale.shape}, expected {rows} rows as {found.says}")
        return
    n, k = found.info.shape
    _require_grid(scale, found, (n, k if found.layout in ("int", "float") else 2 * k))
    if found.layout == "nvfp4":
        _require_number(found.present["weight_global_scale"])


def _check_zero_point_and_order(found: _Module) -> None:
    zero_point, index = found.present.get("weight_zero_point"), found.present.get("weight_g_idx")
    if not found.args.symmetric:
        if zero_point is None:
            raise CheckpointError(f"{where(found.info)} has no zero points, but {found.args.where} has symmetric false")
        dtype = "I32" if found.layout == "packed" else "I8"
        if zero_point.dtype != dtype:
            raise CheckpointError(f"{where(zero_point)} has dtype {zero_point.dtype}, expected {dtype}")
    if index is None and found.args.ordered:
        raise CheckpointError(
            f"{where(found.info)} has no weight_g_idx, but the configuration's {found.args.where} has actorder 'group'"
        )
    if index is not None and (index.dtype not in ("I32", "I64") or len(index.shape) != 1):
        raise CheckpointError(
            f"{where(index)} is {index.dtype} of shape {index.shape}, expected I32 of shape (K,), a group a column"
        )


def _check_input(module: str, found: _Module) -> None:
    """The tensors of the activation against its scheme."""
    scheme = found.group.input
    wanted = None
    if scheme is not None and scheme.static:
        wanted = "input_global_scale" if scheme.global_scale is not None else "input_scale"
    told = f"the configuration's config_groups.{found.group.name}.input_activations"
    for leaf in ("input_scale", "input_global_scale"):
        if leaf in found.present and leaf != wanted:
            raise CheckpointError(
                f"{where(found.present[leaf])} is a given activation scale, but {told} says "
                + ("none" if scheme is None else scheme.describe())
            )
    if "input_zero_point" in found.present and scheme is None:
        raise CheckpointError(
            f"{where(found.present['input_zero_point'])} is an activation's zero point, but {told} says none"
        )
    if wanted is not None:
        assert scheme is not None
        if wanted not in found.present:
            raise CheckpointError(
                f"{where(found.info)} has no {module}.{wanted}, expected one since {told} says {scheme.describe()}"
            )
        _require_number(found.present[wanted])


def _require_number(info: TensorInfo) -> None:
    if info.shape not in ((), (1,)) or info.dtype not in ("F32", "BF16", "F16"):
        raise CheckpointError(f"{where(info)} is {info.dtype} of shape {info.shape}, expected one F32 number")


def _require_grid(info: TensorInfo, found: _Module, shape: tuple[int, int]) -> None:
    """One entry a block of the logical shape; a row's may also have one axis."""
    if info.shape != (shape[0],) or found.args.block != (1, -1):
        require_grid(info, replace(found.info, shape=shape), found.args.block)


def _weight_scheme(found: _Module) -> Scheme:
    integer = "int4" if found.narrow else "int8"
    names = {"packed": integer, "int": integer, "float": "e4m3", "nvfp4": "e2m1", "mxfp4": "e2m1"}
    nvfp4 = found.layout == "nvfp4"
    return Scheme(
        format=names[found.layout],
        block=found.args.block,
        scale_dtype="e4m3" if nvfp4 else SCALE_DTYPES[found.present["weight_scale"].dtype],
        global_scale="tensor" if nvfp4 else None,
        zero_point=not found.args.symmetric,
    )


def _host(
    data: np.ndarray,
    scale: np.ndarray,
    scheme: Scheme,
    input_scheme: Scheme | None,
    *,
    global_scale: np.ndarray | None = None,
    zero_point: np.ndarray | None = None,
    odd_k: bool = False,
) -> QTensor:
    """A QTensor with NumPy leaves, of shapes that were checked against the scheme."""
    parts = cast(tuple[Array, Array, Array | None, Array | None], (data, scale, global_scale, zero_point))
    return QTensor(*parts, scheme, input_scheme, odd_k=odd_k)


def _multiplier(tensors: Tensors, info: TensorInfo) -> np.ndarray:
    """The reciprocal of a global scale, which divides in the file."""
    divisor = read_scale(tensors, info.name).astype(np.float32)
    multiplier = np.float32(1) / divisor
    if not (multiplier >= _F32_TINY).all():
        raise CheckpointError(
            f"{where(info)} holds the global scale {float(divisor.reshape(())):.9g}, expected at most "
            f"{1 / float(_F32_TINY):.9g}: it divides"
        )
    return multiplier


def _packed_shape(tensors: Tensors, found: _Module) -> tuple[int, int]:
    """The logical (N, K) of packed integers, as ``weight_shape`` has it."""
    info, (rows, words) = found.present["weight_shape"], found.info.shape
    if info.shape != (2,) or info.dtype not in ("I64", "I32"):
        raise CheckpointError(f"{where(info)} is {info.dtype} of shape {info.shape}, expected the two I64 numbers N, K")
    n, k = (int(extent) for extent in tensors.read(info.name))
    if n != rows or k < 1 or words not in bit_fields.word_counts(k, found.args.bits):
        raise CheckpointError(
            f"{where(info)} holds {[n, k]}, which does not fit {found.info.name!r} of shape {found.info.shape} with "
            f"{found.args.bits} bits an element"
        )
    return n, k


def _as_stored(values: np.ndarray, found: _Module, info: TensorInfo) -> np.ndarray:
    """Integers of the file as a QTensor holds codes and zero points: q + 8 as uint8 up to 4 bits, q as int8 above."""
    half = 2 ** (found.args.bits - 1)
    offset = INT4_OFFSET if found.narrow else 0
    if found.layout == "packed":
        offset -= half
    elif found.args.bits < 8 and values.size and not -half <= values.min() <= values.max() < half:
        raise CheckpointError(f"{where(info)} holds integers from {values.min()} to {values.max()}, but {found.says}")
    codes = values.view(np.uint8)
    if offset:
        codes = codes + np.uint8(offset % 256)  # modulo 256, which two's complement makes a difference
    return codes if found.narrow else codes.view(np.int8)


def _load_integers(tensors: Tensors, found: _Module) -> HostWeight:
    info, args = found.info, found.args
    n, k = _packed_shape(tensors, found) if found.layout == "packed" else info.shape
    scale_info = found.present["weight_scale"]
    _require_grid(scale_info, found, (n, k))
    grid = scale_grid((n, k), args.block)
    scale = read_scale(tensors, scale_info.name).reshape(grid)
    zero_point = None if args.symmetric else _load_zero_point(tensors, found, (n, k))
    index = _load_order(tensors, found, k)
    stored = tensors.read(info.name)
    as_packed = (found.layout, args.bits) == ("packed", 4)  # a QTensor's own nibbles
    if as_packed and index is None:
        data = np.ascontiguousarray(stored).view(np.uint8)[:, : -(-k // 2)]
        return _host(data, scale, _weight_scheme(found), found.group.input, zero_point=zero_point, odd_k=k % 2 == 1)
    fields = bit_fields.unpack(stored, args.bits, k, info) if found.layout == "packed" else stored
    codes = _as_stored(fields, found, info)
    if index is not None:
        zeros = np.float32(INT4_OFFSET if found.narrow else 0) if zero_point is None else zero_point[:, index]
        return (codes.astype(np.float32) - zeros) * scale.astype(np.float32)[:, index]
    data = bit_fields.pack_nibbles(codes) if found.narrow else codes
    odd_k = found.narrow and k % 2 == 1
    return _host(data, scale, _weight_scheme(found), found.group.input, zero_point=zero_point, odd_k=odd_k)


def _load_zero_point(tensors: Tensors, found: _Module, shape: tuple[int, int]) -> np.ndarray:
    """Zero points on the grid of scales; packed ones are packed along N."""
    info = found.present["weight_zero_point"]
    rows, columns = scale_grid(shape, found.args.block)
    stored = tensors.read(info.name)
    if found.layout == "packed":
        if stored.ndim != 2 or stored.shape[1] != columns:
            words = bit_fields.word_counts(rows, found.args.bits)[0]
            raise CheckpointError(f"{where(info)} has shape {info.shape}, expected {(words, columns)}, packed along N")
        stored = bit_fields.unpack(stored.T, found.args.bits, rows, info).T
    else:
        _require_grid(info, found, shape)
        stored = stored.reshape(rows, columns)
    return np.ascontiguousarray(_as_stored(stored, found, info))


def _load_order(tensors: Tensors, found: _Module, k: int) -> np.ndarray | None:
    """The group of each column (K,) where the configuration says that they are out of order, else None."""
    info = found.present.get("weight_g_idx")
    if info is None:
        return None
    index = tensors.read(info.name)
    if index.shape != (k,):
        raise CheckpointError(f"{where(info)} has shape {info.shape}, expected {(k,)}, a group a column")
    in_order = np.arange(k) // found.args.block[1] if found.args.strategy == "group" else np.zeros(k, np.int64)
    if (index == -1).all():  # what the library initialises it to
        index = in_order
    if not found.args.ordered:
        if (index != in_order).any():
            raise CheckpointError(
                f"{where(info)} puts columns out of the order of their groups, but the configuration's "
                f"{found.args.where} has no actorder 'group'"
            )
        return None
    if index.min() < 0 or index.max() > in_order[-1]:
        raise CheckpointError(
            f"{where(info)} holds groups from {index.min()} to {index.max()}, expected 0 to {in_order[-1]}"
        )
    return np.asarray(index)


def _check_zeros(tensors: Tensors, found: _Module) -> None:
    """Zero points of what is symmetric may be there, and are zero."""
    half = 2 ** (found.args.bits - 1)
    leaves = ["input_zero_point"] + (["weight_zero_point"] if found.args.symmetric else [])
    for info in (found.present[leaf] for leaf in leaves if leaf in found.present):
        values = tensors.read(info.name)
        zero = not values.astype(np.float32).any()
        if not zero and found.layout == "packed" and values.ndim == 2 and values.dtype == np.int32:
            rows = scale_grid((found.info.shape[0], 1), found.args.block)[0]
            zero = bool((bit_fields.unpack(values.T, found.args.bits, rows, info) == half).all())
        if not zero:
            raise CheckpointError(
                f"{where(info)} holds zero points other than 0, but the configuration's "
                f"config_groups.{found.group.name} says symmetric"
            )
