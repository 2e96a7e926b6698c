"""Quantization methods: how a checkpoint's configuration and tensors become recipes and quantized tensors.

One file a method, each entered under the name that ``quant_method`` has in a checkpoint. Methods know no kernels and no
models. A method of one's own is a subclass of `Method` under the decorator `register`.
"""

from jmoe.checkpoint.methods import compressed_tensors, fbgemm_fp8, fp8, modelopt, mxfp4, mxfp8, none
from jmoe.checkpoint.methods.base import (
    CheckpointError,
    HostWeight,
    Method,
    Tensors,
    known_methods,
    method_for,
    register,
)

__all__ = [
    "CheckpointError",
    "HostWeight",
    "Method",
    "Tensors",
    "compressed_tensors",
    "fbgemm_fp8",
    "fp8",
    "known_methods",
    "method_for",
    "modelopt",
    "mxfp4",
    "mxfp8",
    "none",
    "register",
]
