"""``quant_method: "mxfp8"`` (MiniMax-M3): e4m3 codes with one e8m0 scale for 32 of K, activations likewise.

Tensors are those of ``quant_method: "fp8"`` in blocks of 1 x 32: ``weight`` F8_E4M3 (N, K), ``weight_scale_inv``, which
multiplies, U8 or F8_E8M0 (N, K/32).
"""

from collections.abc import Mapping
from typing import Any, Self

from jmoe.checkpoint.methods.base import CheckpointError, register, where
from jmoe.checkpoint.methods.fp8 import Fp8
from jmoe.checkpoint.safetensors import TensorInfo
from jmoe.scheme import Recipe, recipe

_FIXED = {"weight_block_size": [1, 32], "scale_fmt": "ue8m0", "activation_scheme": "dynamic"}


@register("mxfp8")
class Mxfp8(Fp8):
    """MXFP8 weights and activations."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        for key, value in _FIXED.items():
            if config.get(key) not in (None, value):
                raise CheckpointError(f"has {key} {config[key]!r}, expected {value!r} with quant_method 'mxfp8'")
        return super().from_config({**config, **_FIXED})

    def recipe_for(self, module: str, present: Mapping[str, TensorInfo]) -> Recipe:
        found = super().recipe_for(module, present)
        if found.weight is None:
            return found
        if found.weight != recipe("mxfp8").weight:
            raise CheckpointError(
                f"{where(present['weight'])} is {found.weight.describe()}, expected e4m3 with e8m0 "
                "scales as quant_method 'mxfp8' says"
            )
        return recipe("mxfp8")
