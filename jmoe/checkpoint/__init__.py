"""Checkpoints: reading, translating and writing quantized models on disk."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jmoe.checkpoint.load import load_model
    from jmoe.checkpoint.methods import CheckpointError, Method, register
    from jmoe.checkpoint.reader import Checkpoint, open
    from jmoe.checkpoint.safetensors import SafetensorsError
    from jmoe.checkpoint.save import Written, quantize_checkpoint
    from jmoe.checkpoint.summary import ModuleSummary, Summary
    from jmoe.checkpoint.weights import (
        load_bias,
        load_expert_biases,
        load_expert_scales,
        load_experts,
        load_input_scale,
        load_linear,
    )

# Names to the modules that define them, imported when first used: reading files takes no models, and no Flax.
_EXPORTS = {
    "Checkpoint": "reader",
    "CheckpointError": "methods",
    "Method": "methods",
    "ModuleSummary": "summary",
    "SafetensorsError": "safetensors",
    "Summary": "summary",
    "Written": "save",
    "load_bias": "weights",
    "load_expert_biases": "weights",
    "load_expert_scales": "weights",
    "load_experts": "weights",
    "load_input_scale": "weights",
    "load_linear": "weights",
    "load_model": "load",
    "open": "reader",
    "quantize_checkpoint": "save",
    "register": "methods",
}

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Method",
    "ModuleSummary",
    "SafetensorsError",
    "Summary",
    "Written",
    "load_bias",
    "load_expert_biases",
    "load_expert_scales",
    "load_experts",
    "load_input_scale",
    "load_linear",
    "load_model",
    "open",
    "quantize_checkpoint",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
