"""Flax NNX modules with quantized weights."""

from jmoe.nn.kv_cache import KVCache
from jmoe.nn.linear import Linear
from jmoe.nn.moe import FusedMoE
from jmoe.nn.param import QuantizedParam
from jmoe.nn.scan import scan_layers, stack_layers

__all__ = ["FusedMoE", "KVCache", "Linear", "QuantizedParam", "scan_layers", "stack_layers"]
