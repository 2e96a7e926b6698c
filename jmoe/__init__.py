"""Quantized linear layers and Mixture-of-Experts for JAX and Flax on GPUs.

A format is data (``QTensor``, described by a ``Scheme``), an operation is a pure function with interchangeable
implementations (``linear``, ``fused_moe``), and ``explain`` says which one runs and why.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jmoe.backends.activation import Activation, ActivationParams, swiglu
from jmoe.backends.select import select
from jmoe.backends.spec import DeviceSpec, OpSpec, Selection
from jmoe.config import config
from jmoe.ops import Routed, Routing, batched_experts, explain, fused_moe, linear, prepare, route, warmup
from jmoe.qtensor import QTensor
from jmoe.quantize import merge_shards, quantize, refine_blocks, requantize
from jmoe.scheme import RECIPES, Recipe, Scheme, recipe

if TYPE_CHECKING:
    from jmoe import checkpoint as checkpoint
    from jmoe import models as models
    from jmoe import nn as nn
    from jmoe import parallel as parallel
    from jmoe import tuning as tuning

__version__ = "0.1.0"

__all__ = [
    "RECIPES",
    "Activation",
    "ActivationParams",
    "DeviceSpec",
    "OpSpec",
    "QTensor",
    "Recipe",
    "Routed",
    "Routing",
    "Scheme",
    "Selection",
    "batched_experts",
    "config",
    "explain",
    "fused_moe",
    "linear",
    "merge_shards",
    "prepare",
    "quantize",
    "recipe",
    "refine_blocks",
    "requantize",
    "route",
    "select",
    "swiglu",
    "warmup",
]

# Imported when first used: operations alone need no Flax.
_PACKAGES = ("checkpoint", "models", "nn", "parallel", "tuning")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES})
