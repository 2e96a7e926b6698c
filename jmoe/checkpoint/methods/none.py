"""Checkpoints that are not quantized: bfloat16, float16 or float32 weights."""

from collections.abc import Collection, Mapping
from typing import Any, Self

from jmoe.checkpoint.methods.base import (
    FLOAT_DTYPES,
    CheckpointError,
    HostWeight,
    Method,
    Tensors,
    present_leaves,
    register,
    where,
)
from jmoe.checkpoint.safetensors import TensorInfo
from jmoe.scheme import Recipe, recipe

UNQUANTIZED = recipe("bf16")

# Leaves that only quantized modules have, in any of the published layouts.
_QUANTIZED_LEAVES = frozenset(
    {
        *("SCB", "qweight", "weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv"),
        *("gate_up_proj_blocks", "down_proj_blocks"),
        *("gate_up_proj_scale", "down_proj_scale", "gate_up_proj_weight_scale", "down_proj_weight_scale"),
    }
)


@register("none")
class Unquantized(Method):
    """Weights as they are."""

    leaves = ("weight",)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls()

    def is_quantized(self, leaves: Collection[str]) -> bool:
        # A norm's only parameter may be called scale as well.
        return not _QUANTIZED_LEAVES.isdisjoint(leaves) or {"scale", "weight"} <= set(leaves)

    def recipe_for(self, module: str, present: Mapping[str, TensorInfo]) -> Recipe:
        return unquantized_recipe(module, present)

    def load_weight(self, tensors: Tensors, module: str) -> HostWeight:
        self.recipe_for(module, present_leaves(tensors.tensors, module, self.leaves))
        return tensors.read(f"{module}.weight")


def unquantized_recipe(module: str, present: Mapping[str, TensorInfo]) -> Recipe:
    """The recipe of a module whose weight must be a plain float tensor."""
    if "weight" not in present:
        raise CheckpointError(f"tensor {module + '.weight'!r} is missing from the checkpoint")
    weight = present["weight"]
    if weight.dtype not in FLOAT_DTYPES:
        raise CheckpointError(
            f"{where(weight)} has dtype {weight.dtype}, but neither the configuration nor a scale tensor says how it "
            f"is quantized; a weight that is not is {', '.join(FLOAT_DTYPES)}"
        )
    return UNQUANTIZED
