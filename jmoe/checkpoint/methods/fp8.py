"""``quant_method: "fp8"``: e4m3 weights with one scale a block (DeepSeek, Qwen3, MiniMax, GLM) or one a tensor.

Values are ``e4m3 * scale``: the common name ``weight_scale_inv`` notwithstanding, scales multiply. The block comes from
``weight_block_size`` and nothing else: with ragged last blocks it does not follow from shapes. The scale's dtype comes
from its tensor, because ``scale_fmt: "ue8m0"`` occurs with float32 and with e8m0 scales alike; the setting itself is
obeyed for activations.

DeepSeek-V4 has experts in MXFP4 among them: ``weight`` I8 (N, K/2), two e2m1 codes a byte, low nibble first, and
``scale`` F8_E8M0 (N, K/32). Which module is such a one, its tensors say; activations are those of all others.

Model Optimizer adds NVFP4 and its other formats: with ``quant_algo`` MIXED_PRECISION the modules of
``quantized_layers`` are as `jmoe.checkpoint.methods.modelopt` has them, and all else stays as described here, also what
its ``ignore`` lists.
"""

from collections.abc import Collection, Mapping
from typing import Any, Self

import numpy as np

from jmoe.checkpoint.methods.base import (
    SCALE_DTYPES,
    CheckpointError,
    HostWeight,
    Method,
    ModuleList,
    Tensors,
    check_keys,
    host_qtensor,
    list_of_names,
    logical_shape,
    present_leaves,
    read_scale,
    register,
    require_grid,
    require_groups,
    where,
)
from jmoe.checkpoint.methods.modelopt import ModelOpt
from jmoe.checkpoint.methods.none import unquantized_recipe
from jmoe.checkpoint.safetensors import TensorInfo
from jmoe.qtensor import scale_grid
from jmoe.scheme import Block, Recipe, Scheme, recipe, recipe_of

_WEIGHT_SCALES = ("weight_scale_inv", "weight_scale", "scale")
_INPUT_SCALES = ("input_scale", "activation_scale")
_IGNORE_KEYS = ("ignored_layers", "modules_to_not_convert")
_PER_TENSOR: Block = (-1, -1)
_MIXED = "MIXED_PRECISION"
_KEYS = (
    *("quant_method", "activation_scheme", "fmt", "scale_fmt", "weight_block_size", *_IGNORE_KEYS),
    *("modules_to_convert", "dequantize", "kv_cache_scheme"),
)
# What Model Optimizer writes besides.
_MIXED_KEYS = (
    *("quant_algo", "moe_quant_algo", "quantized_layers", "ignore", "exclude_modules", "group_size", "config_groups"),
    *("kv_cache_quant_algo", "producer", "quantization"),
)


@register("fp8")
class Fp8(Method):
    """E4M3 weights in blocks or per tensor, activations e4m3 too, their scales measured or (per tensor) given."""

    leaves: tuple[str, ...] = ("weight", *_WEIGHT_SCALES, *_INPUT_SCALES)

    def __init__(
        self,
        *,
        block: Block,
        static: bool,
        power_of_two: bool,
        ignored: Mapping[str, str],
        others: ModelOpt | None = None,
    ) -> None:
        self._others = others
        if others is not None:
            self.leaves = tuple(dict.fromkeys((*self.leaves, *others.leaves)))
        self._block = block
        self._static = static
        self._ignored = ModuleList(ignored)
        self._keys = dict(ignored)  # entry -> the key it stands under
        if block == _PER_TENSOR:
            self._input = Scheme(format="e4m3", block=_PER_TENSOR, static=static)
        else:
            self._input = Scheme(format="e4m3", block=(1, block[1]), power_of_two=power_of_two)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        others = None
        if (algo := config.get("quant_algo")) is not None:
            if not isinstance(algo, str) or algo.upper() != _MIXED:
                raise CheckpointError(f"has quant_method 'fp8' with quant_algo {algo!r}, expected {_MIXED!r} or none")
            check_keys(config, (*_KEYS, *_MIXED_KEYS))
            others = ModelOpt.from_config({"quant_algo": algo, "quantized_layers": config.get("quantized_layers")})
        else:
            check_keys(config, _KEYS)
        if (fmt := config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise CheckpointError(f"has fmt {fmt!r}, expected 'e4m3'")
        if (scale_fmt := config.get("scale_fmt")) not in (None, "float", "ue8m0"):
            raise CheckpointError(f"has scale_fmt {scale_fmt!r}, expected 'ue8m0' or none")
        scheme = config.get("activation_scheme") or "dynamic"
        if scheme not in ("dynamic", "static"):
            raise CheckpointError(f"has activation_scheme {scheme!r}, expected 'dynamic' or 'static'")
        block = _block_of(config.get("weight_block_size"))
        if scheme == "static" and block != _PER_TENSOR:
            raise CheckpointError(
                f"has activation_scheme 'static' with weight_block_size {list(block)}, expected 'dynamic' with blocks"
            )
        if scale_fmt == "ue8m0" and block == _PER_TENSOR:
            raise CheckpointError("has scale_fmt 'ue8m0' without weight_block_size, expected it only with blocks")
        ignored: dict[str, str] = {}
        for key in _IGNORE_KEYS:
            ignored.update(dict.fromkeys(list_of_names(config, key), key))
        return cls(
            block=block, static=scheme == "static", power_of_two=scale_fmt == "ue8m0", ignored=ignored, others=others
        )

    def is_quantized(self, leaves: Collection[str]) -> bool:
        # A norm's only parameter, or a KV cache's, may be called scale as well.
        return not {"weight_scale_inv", "weight_scale"}.isdisjoint(leaves) or {"scale", "weight"} <= set(leaves)

    def _other(self, module: str) -> ModelOpt | None:
        """Whose format the module has, where it is not this one's."""
        return self._others if self._others is not None and self._others.lists(module) else None

    def ignored_by(self, module: str) -> str | None:
        entry = self._ignored.find(module)
        return None if entry is None else f"{self._keys[entry]} entry {entry!r}"

    def recipe_for(self, module: str, present: Mapping[str, TensorInfo]) -> Recipe:
        if (other := self._other(module)) is not None:
            return other.recipe_for(module, present)
        if "weight_scale_2" in present:
            raise CheckpointError(
                f"{where(present['weight_scale_2'])} is a scale of NVFP4, but the configuration's quantized_layers do "
                "not list its module"
            )
        scale = _only(present, _WEIGHT_SCALES)
        weight = present.get("weight")
        if scale is None:
            if weight is not None and weight.dtype == "F8_E4M3":
                raise CheckpointError(
                    f"{where(weight)} is F8_E4M3, but its scale is missing, expected "
                    f"one of {', '.join(f'{module}.{leaf}' for leaf in _WEIGHT_SCALES)}"
                )
            return unquantized_recipe(module, present)
        if weight is None:
            raise CheckpointError(f"{where(scale)} is a scale, but {module + '.weight'!r} is missing")
        fp4 = weight.dtype == "I8" and scale.dtype in ("F8_E8M0", "U8")
        if weight.dtype != "F8_E4M3" and not fp4:
            raise CheckpointError(f"{where(weight)} has dtype {weight.dtype}, expected F8_E4M3 beside {scale.name!r}")
        if (ignored := self.ignored_by(module)) is not None:
            raise CheckpointError(
                f"{where(weight)} is {weight.dtype} with the scale {scale.name!r}, but the configuration's {ignored} "
                "says that it is not quantized"
            )
        if scale.dtype not in SCALE_DTYPES:
            raise CheckpointError(f"{where(scale)} has dtype {scale.dtype}, expected one of {', '.join(SCALE_DTYPES)}")
        self._check_input_scale(module, weight, _only(present, _INPUT_SCALES))
        if fp4:
            require_groups(weight, scale, 32)
            return recipe_of(recipe("mxfp4").weight, self._input)
        require_grid(scale, weight, self._block)
        scheme = Scheme(format="e4m3", block=self._block, scale_dtype=SCALE_DTYPES[scale.dtype])
        return recipe_of(scheme, self._input)

    def _check_input_scale(self, module: str, weight: TensorInfo, scale: TensorInfo | None) -> None:
        if not self._static:
            if scale is not None:
                raise CheckpointError(
                    f"{where(scale)} is a given activation scale, but the configuration says activation_scheme "
                    "'dynamic'"
                )
            return
        if scale is None:
            raise CheckpointError(
                f"{where(weight)} has no activation scale, expected one of "
                f"{', '.join(f'{module}.{leaf}' for leaf in _INPUT_SCALES)} since the configuration says "
                "activation_scheme 'static'"
            )
        if scale.shape not in ((), (1,)) or scale.dtype not in ("F32", "BF16", "F16"):
            raise CheckpointError(f"{where(scale)} is {scale.dtype} of shape {scale.shape}, expected one F32 number")

    def shape_for(self, module: str, present: Mapping[str, TensorInfo]) -> tuple[int, ...]:
        return logical_shape(present["weight"], packed=present["weight"].dtype in ("I8", "U8"))

    def load_weight(self, tensors: Tensors, module: str) -> HostWeight:
        if (other := self._other(module)) is not None:
            return other.load_weight(tensors, module)
        present = present_leaves(tensors.tensors, module, self.leaves)
        found = self.recipe_for(module, present)
        data = tensors.read(f"{module}.weight")
        if found.weight is None:
            return data
        scale = _only(present, _WEIGHT_SCALES)
        assert scale is not None
        n, k = self.shape_for(module, present)
        grid = read_scale(tensors, scale.name).reshape(scale_grid((n, k), found.weight.block))
        return host_qtensor(data.view(found.weight.fmt.storage), grid, found.weight, found.input)

    def load_input_scale(self, tensors: Tensors, module: str) -> np.float32 | None:
        if (other := self._other(module)) is not None:
            return other.load_input_scale(tensors, module)
        present = present_leaves(tensors.tensors, module, self.leaves)
        if self.recipe_for(module, present).input is None or not self._static:
            return None
        scale = _only(present, _INPUT_SCALES)
        assert scale is not None
        return np.float32(read_scale(tensors, scale.name).reshape(()))


def _block_of(size: object) -> Block:
    """``weight_block_size`` as a block; without one the whole tensor has one scale."""
    if size is None:
        return _PER_TENSOR
    if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(type(b) is int and 0 < b < 2**31 for b in size):
        raise CheckpointError(
            f"has weight_block_size {size!r}, expected two positive numbers (rows, columns) below 2^31"
        )
    return size[0], size[1]


def _only(present: Mapping[str, TensorInfo], leaves: tuple[str, ...]) -> TensorInfo | None:
    """The one of these alternative names that is there."""
    found = [present[leaf] for leaf in leaves if leaf in present]
    if len(found) > 1:
        raise CheckpointError(
            f"{where(found[0])} and {found[1].name!r} are two names of one scale, expected only one of them"
        )
    return found[0] if found else None
