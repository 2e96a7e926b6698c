"""``quant_method: "fbgemm_fp8"`` (Llama 3.1 405B, Llama 4): e4m3 with a scale a row, activations with a scale a token.

Tensors are ``weight`` F8_E4M3 (N, K) and ``weight_scale`` F32 (N, 1), which multiplies. Llama 4 has the experts of a
layer in one tensor: ``experts.gate_up_proj`` (E, H, 2I) with ``gate_up_proj_scale`` (E, 1, 2I), and ``down_proj``
(E, I, H) with ``down_proj_scale`` (E, H, 1); see `jmoe.checkpoint.methods.stacked`. ``activation_scale_ub``, a bound of
what activations measure, is not applied: magnitudes that large do not occur where it has been set with care.

Source: transformers, and the published checkpoints.
"""

from collections.abc import Collection, Mapping
from typing import Any, Self

from jmoe.checkpoint.methods import stacked
from jmoe.checkpoint.methods.base import (
    SCALE_DTYPES,
    CheckpointError,
    Files,
    HostWeight,
    Method,
    ModuleList,
    Tensors,
    check_keys,
    host_qtensor,
    list_of_names,
    present_leaves,
    read_scale,
    register,
    require_matrix,
    where,
)
from jmoe.checkpoint.methods.none import unquantized_recipe
from jmoe.checkpoint.safetensors import TensorInfo
from jmoe.scheme import Recipe, recipe, recipe_of

_FLOAT_SCALES = ("F32", "BF16", "F16")


@register("fbgemm_fp8")
class FbgemmFp8(Method):
    """E4M3 weights with a scale a row, activations with a measured scale a token."""

    leaves = ("weight", "weight_scale", "input_scale_ub")

    def __init__(self, ignored: Collection[str]) -> None:
        self._ignored = ModuleList(ignored)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        check_keys(config, ("quant_method", "activation_scale_ub", "modules_to_not_convert"))
        if type(bound := config.get("activation_scale_ub", 1200.0)) not in (int, float) or bound <= 0:
            raise CheckpointError(f"has activation_scale_ub {bound!r}, expected a positive number")
        return cls(list_of_names(config, "modules_to_not_convert"))

    def view(self, files: Files) -> Files:
        return stacked.show_each_expert(files, {"_scale": "weight_scale"})

    def is_quantized(self, leaves: Collection[str]) -> bool:
        return "weight_scale" in leaves

    def ignored_by(self, module: str) -> str | None:
        entry = self._ignored.find(module)
        return None if entry is None else f"modules_to_not_convert entry {entry!r}"

    def recipe_for(self, module: str, present: Mapping[str, TensorInfo]) -> Recipe:
        weight, scale = present.get("weight"), present.get("weight_scale")
        if scale is None:
            if weight is not None and weight.dtype == "F8_E4M3":
                raise CheckpointError(
                    f"{where(weight)} is F8_E4M3, but its scale {module + '.weight_scale'!r} is missing"
                )
            return unquantized_recipe(module, present)
        if weight is None:
            raise CheckpointError(f"{where(scale)} is a scale, but {module + '.weight'!r} is missing")
        if weight.dtype != "F8_E4M3":
            raise CheckpointError(f"{where(weight)} has dtype {weight.dtype}, expected F8_E4M3 beside {scale.name!r}")
        if (ignored := self.ignored_by(module)) is not None:
            raise CheckpointError(
                f"{where(weight)} is F8_E4M3 with the scale {scale.name!r}, but the configuration's {ignored} says "
                "that it is not quantized"
            )
        n, _ = require_matrix(weight)
        shapes = ((n, 1), (n,), *([()] if n == 1 else []))
        if scale.shape not in shapes or scale.dtype not in _FLOAT_SCALES:
            raise CheckpointError(
                f"{where(scale)} is {scale.dtype} of shape {scale.shape}, expected F32 of {(n, 1)}, one a row of "
                f"{weight.name!r}"
            )
        of = recipe("fp8_channel")
        assert of.weight is not None
        return recipe_of(of.weight.replace(scale_dtype=SCALE_DTYPES[scale.dtype]), of.input)

    def load_weight(self, tensors: Tensors, module: str) -> HostWeight:
        found = self.recipe_for(module, present_leaves(tensors.tensors, module, self.leaves))
        data = tensors.read(f"{module}.weight")
        if found.weight is None:
            return data
        scale = read_scale(tensors, f"{module}.weight_scale").reshape(-1, 1)
        return host_qtensor(data, scale, found.weight, found.input)
