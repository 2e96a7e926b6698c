"""How weights of a recipe lie in a checkpoint: the method's name, a module's tensors, and the configuration.

The forms are those that inference engines read: ``fp8`` for e4m3 weights in blocks or per tensor whose activations are
quantized alike, compressed-tensors for everything else. Codes and scales are a QTensor's own, rearranged; only the
multiplier of NVFP4 is rounded, since compressed-tensors holds its reciprocal: values that are read back may differ by
an ulp. Source of names, packing and settings: the compressed-tensors library and published checkpoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jmoe.checkpoint.safetensors_header import DTYPE_NAMES
from jmoe.numerics import INT4_OFFSET, SCALE_DTYPES
from jmoe.qtensor import QTensor, scale_grid
from jmoe.scheme import Recipe, Scheme

_PER_TENSOR = (-1, -1)
_FLOAT_SCALES = ("float32", "bfloat16", "float16")
_WORD_BITS = 32

# What compressed-tensors stores for a block of zeros. A scale of 0 says the same, but readers may divide by it.
_ZERO_BLOCK_SCALE = 0.125

# The release of compressed-tensors whose settings these are.
_COMPRESSED_TENSORS_VERSION = "0.19.0"


@dataclass(frozen=True)
class Form:
    """One way to write quantized weights.

    Attributes:
      recipe: what is written.
      method: ``quant_method``.
      settings: the ``quantization_config`` without the list of modules that are left alone.
      ignore_key: the key of that list.
      codes: "elements" (one an element), "words" (packed into int32, the first in the lowest bits) or "bytes" (two
        4-bit codes a byte, the first in the low nibble).
      scale: the leaf that holds the scales.
      scale_dtype: how the file calls their dtype.
      scalar: the shape of a single scale.
      input_scale: the leaf of a given activation scale; None where there is none.
      inverse: whether global scales are stored as what one divides by.
    """

    recipe: Recipe
    method: str
    settings: Mapping[str, Any]
    ignore_key: str
    codes: Literal["elements", "words", "bytes"]
    scale: str
    scale_dtype: str
    scalar: tuple[int, ...]
    input_scale: str | None
    inverse: bool = False

    @property
    def scheme(self) -> Scheme:
        assert self.recipe.weight is not None
        return self.recipe.weight

    def config(self, ignored: Sequence[str], kv_cache: bool = False) -> dict[str, Any]:
        """The ``quantization_config`` with these modules left alone, and a KV cache in e4m3 or none said of it."""
        settings = {**self.settings, self.ignore_key: list(ignored)}
        if kv_cache and self.method == "compressed-tensors":  # of "fp8", the scales alone tell
            settings["kv_cache_scheme"] = _args(8, "float", "tensor", False, "minmax")
        return settings

    def refusal(self, shape: tuple[int, int]) -> str | None:
        """Why a weight (N, K) cannot be written in this form; None where it can."""
        if 0 in shape:
            return f"has shape {shape}, which leaves nothing to quantize"
        rows, columns = self.scheme.block
        if self.method != "fp8" and rows == 1 and columns > 0 and shape[1] % columns:
            return (
                f"has K={shape[1]}, but {self.settings['format']} takes a multiple of {columns}, the columns that "
                "share a scale"
            )
        return None

    def leaves(self, shape: tuple[int, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Leaf to (dtype as the file names it, shape) of the tensors of a weight (N, K)."""
        n, k = shape
        scheme = self.scheme
        grid = scale_grid(shape, scheme.block)
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        if self.codes == "elements":
            found["weight"] = ("F8_E4M3" if scheme.format == "e4m3" else "I8", shape)
        elif self.codes == "bytes":
            found["weight_packed"] = ("U8", (n, k // 2))
        else:
            found["weight_packed"] = ("I32", (n, _words(k, scheme)))
            found["weight_shape"] = ("I64", (2,))
            if scheme.zero_point:
                found["weight_zero_point"] = ("I32", (_words(n, scheme), grid[1]))
        found[self.scale] = (self.scale_dtype, self.scalar if scheme.block == _PER_TENSOR else grid)
        if scheme.global_scale is not None:
            found["weight_global_scale"] = ("F32", self.scalar)
        if self.input_scale is not None:
            found[self.input_scale] = ("F32", self.scalar)
        return found

    def encode(self, q: QTensor, input_scale: np.float32 | None = None) -> dict[str, np.ndarray]:
        """Leaf to tensor of a weight (N, K) quantized by the recipe.

        Args:
          q: the weight, in the canonical layout.
          input_scale: the given activation scale, where the recipe has a static one.
        """
        n, k = q.shape
        data, scale = np.asarray(q.data), np.asarray(q.scale)
        found: dict[str, np.ndarray] = {}
        if self.codes == "elements":
            found["weight"] = _signed(data, k) if self.scheme.format == "int4" else data
        elif self.codes == "bytes":
            found["weight_packed"] = data
        else:
            found["weight_packed"] = _as_words(_code_bytes(data))
            found["weight_shape"] = np.array([n, k], np.int64)
            if q.zero_point is not None:
                found["weight_zero_point"] = self._packed_zero_point(np.asarray(q.zero_point))
        if self.scale_dtype == "F8_E8M0":
            scale = scale.view(ml_dtypes.float8_e8m0fnu)
        if self.scheme.global_scale is not None:
            scale = np.where(scale == 0, np.asarray(_ZERO_BLOCK_SCALE, scale.dtype), scale)
            found["weight_global_scale"] = self._scalar(np.asarray(q.global_scale))
        found[self.scale] = scale.reshape(self.scalar) if self.scheme.block == _PER_TENSOR else scale
        if self.input_scale is not None:
            assert input_scale is not None
            found[self.input_scale] = self._scalar(np.asarray(input_scale))
        return found

    def _scalar(self, value: np.ndarray) -> np.ndarray:
        stored = 1 / value.astype(np.float64) if self.inverse else value
        return stored.astype(np.float32).reshape(self.scalar)

    def _packed_zero_point(self, zero_point: np.ndarray) -> np.ndarray:
        """(N, groups) to int32 (ceil(N * bits / 32), groups): packed along N, unlike the codes."""
        columns = _code_bytes(np.ascontiguousarray(zero_point.T))
        if self.scheme.fmt.bits == 4:
            padded = np.pad(columns, ((0, 0), (0, columns.shape[1] % 2)))
            columns = padded[:, ::2] | padded[:, 1::2] << 4
        return np.ascontiguousarray(_as_words(columns).T)


def form_of(recipe: Recipe) -> Form:
    """The form in which a recipe's weights are written.

    Raises:
      ValueError: the recipe quantizes nothing, or no checkpoint format can say what it says.
    """
    if recipe.weight is None:
        raise ValueError(f"recipe {recipe.name!r} leaves weights as they are; there is nothing to quantize")
    return _fp8(recipe, recipe.weight) or _compressed_tensors(recipe, recipe.weight)


def _fp8(recipe: Recipe, weight: Scheme) -> Form | None:
    """``quant_method: "fp8"``, if that is what the recipe is."""
    given = recipe.input
    if (weight.format, weight.global_scale) != ("e4m3", None) or given is None:
        return None
    if (given.format, given.scale_dtype) != ("e4m3", "float32"):
        return None
    settings: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    input_scale = None
    if weight.block == given.block == _PER_TENSOR and weight.scale_dtype == "float32" and not given.power_of_two:
        leaf = "weight_scale"
        if given.static:
            settings["activation_scheme"] = "static"
            input_scale = "input_scale"
    elif min(weight.block) > 0 and given.block == (1, weight.block[1]):
        leaf = "weight_scale_inv"
        settings["weight_block_size"] = list(weight.block)
        if given.power_of_two:
            settings["scale_fmt"] = "ue8m0"
    else:
        return None
    dtype = "F8_E8M0" if weight.scale_dtype == "e8m0" else _dtype_name(weight)
    return Form(recipe, "fp8", settings, "modules_to_not_convert", "elements", leaf, dtype, (), input_scale)


def _compressed_tensors(recipe: Recipe, weight: Scheme) -> Form:
    found = _compressed_weight(weight, recipe.input)
    if found is None:
        raise ValueError(
            f"recipe {recipe.name!r}: no checkpoint format that engines read holds weights of {weight.describe()} "
            + (f"for activations of {recipe.input.describe()}" if recipe.input else "for unquantized activations")
        )
    name, codes, weights = found
    activations = None if recipe.input is None else _compressed_input(recipe.input)
    if recipe.input is not None and activations is None:
        raise ValueError(
            f"recipe {recipe.name!r}: compressed-tensors cannot say that activations are "
            f"{recipe.input.describe()}; a weight-only recipe leaves them open"
        )
    group = {
        "format": name,
        "input_activations": activations,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    settings = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "format": name,
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": _COMPRESSED_TENSORS_VERSION,
    }
    input_scale = None
    if recipe.input is not None and recipe.input.static:
        input_scale = "input_scale" if recipe.input.global_scale is None else "input_global_scale"
    dtype = "U8" if weight.scale_dtype == "e8m0" else _dtype_name(weight)
    two_level = weight.global_scale is not None
    return Form(
        recipe, "compressed-tensors", settings, "ignore", codes, "weight_scale", dtype, (1,), input_scale, two_level
    )


def _compressed_weight(
    weight: Scheme, given: Scheme | None
) -> tuple[str, Literal["elements", "words", "bytes"], dict[str, Any]] | None:
    """The format's name, how codes lie, and the ``weights`` settings; None where there is no such format."""
    rows, columns = weight.block
    bits, micro = weight.fmt.bits, "torch.uint8"
    if weight.format == "e4m3" and weight.scale_dtype in _FLOAT_SCALES:
        if weight.block == _PER_TENSOR:
            return "float-quantized", "elements", _weight_args(bits, "float", "tensor")
        if weight.block == (1, -1):
            return "float-quantized", "elements", _weight_args(bits, "float", "channel")
        if min(weight.block) > 0:
            args = _weight_args(bits, "float", "block", block_structure=[rows, columns])
            return "float-quantized", "elements", args
    if weight.format == "e4m3" and (weight.block, weight.scale_dtype) == ((1, 32), "e8m0"):
        return "mxfp8-quantized", "elements", _weight_args(bits, "float", "group", group_size=32, scale_dtype=micro)
    if weight.format == "e2m1" and (weight.block, weight.scale_dtype) == ((1, 32), "e8m0"):
        return "mxfp4-pack-quantized", "bytes", _weight_args(bits, "float", "group", group_size=32, scale_dtype=micro)
    if weight.format == "e2m1" and (weight.block, weight.global_scale) == ((1, 16), "tensor"):
        args = _weight_args(bits, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
        return "nvfp4-pack-quantized", "bytes", args
    if weight.format in ("int4", "int8") and rows == 1 and weight.scale_dtype in _FLOAT_SCALES:
        sharing = {"strategy": "channel"} if columns == -1 else {"strategy": "group", "group_size": columns}
        args = _weight_args(bits, "int", **sharing, symmetric=not weight.zero_point)
        if given is None or (given.format == "e4m3" and weight.format == "int4" and not weight.zero_point):
            return "pack-quantized", "words", args
        if given.format == "int8" and not weight.zero_point and (weight.format == "int4" or columns == -1):
            return "int-quantized", "elements", args
    return None


def _compressed_input(given: Scheme) -> dict[str, Any] | None:
    """The ``input_activations`` settings; None where there are none that say this."""
    kind, bits = "int" if given.format == "int8" else "float", given.fmt.bits
    two_level = (given.format, given.block, given.global_scale, given.static) == ("e2m1", (1, 16), "tensor", True)
    if two_level:
        scale_dtype, observer = "torch.float8_e4m3fn", "static_minmax"
        return _args(bits, kind, "tensor_group", "local", observer, group_size=16, scale_dtype=scale_dtype)
    if given.format not in ("e4m3", "int8", "e2m1") or given.global_scale is not None or given.zero_point:
        return None
    if (given.block, given.scale_dtype, given.scale_rounding) == ((1, 32), "e8m0", "even"):
        return _args(bits, kind, "group", True, None, group_size=32, scale_dtype="torch.uint8")
    if given.scale_dtype != "float32" or given.power_of_two:
        return None
    if given.block == _PER_TENSOR:
        return _args(bits, kind, "tensor", not given.static, "minmax" if given.static else None)
    if given.static or given.block[0] != 1:
        return None
    if given.block[1] == -1:
        return _args(bits, kind, "token", True, None)
    return _args(bits, kind, "group", True, None, group_size=given.block[1])


def _weight_args(bits: int, kind: str, strategy: str, **options: Any) -> dict[str, Any]:
    return _args(bits, kind, strategy, False, "memoryless_minmax", **options)


def _args(
    num_bits: int,
    kind: str,
    strategy: str,
    dynamic: bool | str,
    observer: str | None,
    *,
    group_size: int | None = None,
    block_structure: list[int] | None = None,
    scale_dtype: str | None = None,
    symmetric: bool = True,
) -> dict[str, Any]:
    return {
        "actorder": None,
        "block_structure": block_structure,
        "dynamic": dynamic,
        "group_size": group_size,
        "num_bits": num_bits,
        "observer": observer,
        "observer_kwargs": {},
        "scale_dtype": scale_dtype,
        "strategy": strategy,
        "symmetric": symmetric,
        "type": kind,
        "zp_dtype": None if symmetric else "torch.int8",
    }


def _dtype_name(scheme: Scheme) -> str:
    return DTYPE_NAMES[np.dtype(SCALE_DTYPES[scheme.scale_dtype])]


def _words(count: int, scheme: Scheme) -> int:
    """How many int32 hold so many codes."""
    return -(-count * scheme.fmt.bits // _WORD_BITS)


def _code_bytes(codes: np.ndarray) -> np.ndarray:
    """Codes as unsigned bytes; an 8-bit one is held as its signed value, which is 128 less."""
    return codes.view(np.uint8) ^ np.uint8(0x80) if codes.dtype == np.int8 else codes


def _as_words(rows: np.ndarray) -> np.ndarray:
    """Bytes (R, B) as little-endian int32 (R, ceil(B / 4)), padded with zeros."""
    return np.ascontiguousarray(np.pad(rows, ((0, 0), (0, -rows.shape[1] % 4)))).view("<i4")


def _signed(data: np.ndarray, k: int) -> np.ndarray:
    """Symmetric int4 codes, two to a byte, as one int8 each."""
    nibbles = np.stack([data & 0xF, data >> 4], axis=-1).reshape(data.shape[0], 2 * data.shape[1])[:, :k]
    return nibbles.astype(np.int8) - np.int8(INT4_OFFSET)
