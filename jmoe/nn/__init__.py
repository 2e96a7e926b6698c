"""Flax NNX modules with quantized weights."""

from jmoe.nn.calibrate import Calibration, calibrate
from jmoe.nn.convert import LayerReport, Report, quantize_model
from jmoe.nn.kv_cache import KVCache
from jmoe.nn.linear import Linear
from jmoe.nn.moe import FusedMoE
from jmoe.nn.param import QuantizedParam
from jmoe.nn.scan import scan_layers, stack_layers

__all__ = [
    "Calibration",
    "FusedMoE",
    "KVCache",
    "LayerReport",
    "Linear",
    "QuantizedParam",
    "Report",
    "calibrate",
    "quantize_model",
    "scan_layers",
    "stack_layers",
]
