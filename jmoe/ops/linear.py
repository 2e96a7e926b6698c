"""``linear``: activation(x w^T + bias) with a quantized or plain weight."""

import math
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec

from jmoe.backends.activation import Activation, as_activation
from jmoe.backends.spec import Accumulation, LinearArgs, OpSpec
from jmoe.ops import validate as v
from jmoe.ops.call import call
from jmoe.qtensor import QTensor
from jmoe.scheme import Recipe
from jmoe.sharding import automatic_inside, spec_of, with_last
from pallas_kernels.layouts import CANONICAL


def _place(y: Array, x: Any, w: Any, **_: Any) -> PartitionSpec:
    """Leading axes as x's are, N as w's is."""
    x, w = (a.data if isinstance(a, QTensor) else a for a in (x, w))
    return with_last(spec_of(x), spec_of(w)[-2])


@automatic_inside(_place)
def linear(
    x: Array | QTensor,
    w: Array | QTensor,
    *,
    recipe: Recipe | str | None = None,
    bias: Array | None = None,
    activation: Activation | str | None = None,
    input_scale: Array | float | None = None,
    layer: Array | int | None = None,
    accumulation: Accumulation | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> Array:
    """activation(x w^T + bias), x quantised as the weight asks.

    The product, scales, bias and activation are float32; the result is cast once.

    Args:
      x: (..., K) bfloat16, float16 or float32, or a QTensor (..., M, K) quantized as the weight asks.
      w: QTensor (N, K), or a plain array (N, K); with ``layer`` stacked, (L, N, K).
      recipe: how the activation is quantised in this call, instead of ``w.input_scheme``; its weight part must be w's.
      bias: (N,), or (L, N) with ``layer``; not quantized.
      activation: ungated: "silu", "gelu", "gelu_tanh", "relu2".
      input_scale: float32 (), the activation's scale where its scheme is static, and only there.
      layer: index of the layer in stacked weights; the implementation indexes, so that nothing is copied.
        A number outside [0, L) raises; one that is traced, or on a device, does so under ``jmoe.config(check=True)``
        only: without it the nearest layer is taken, as JAX does for indices.
      accumulation: "exact" promotes every 128 of K to float32, "fast" leaves K to the matrix unit; None is the
        recipe's default. Implementations that only have float32 sums are exact always.
      preferred_element_type: dtype of the result; x's by default, bfloat16 for a quantized x.
      implementation: "triton", "xla" or "reference"; None lets the selector choose.

    Returns:
      (..., N). On a mesh with explicit axes, sharded as x's leading axes and w's N are.

    Raises:
      ValueError: shapes, scales or a recipe that do not fit; TypeError: dtypes.
      NotImplementedError: the implementation asked for cannot serve, with the reason.
      ExceptionGroup: none can.
    """
    w = v.as_weight("w", w, "(N, K)", layer)
    w, resolved = v.with_recipe("w", w, recipe)
    x = v.as_input(x, resolved, "(..., K)", "(M, K)")
    n, k = w.shape[-2:]
    if x.shape[-1] != k:
        raise ValueError(f"x has shape {tuple(x.shape)}, but w has K = {k} (w is (N, K) = {(n, k)})")
    lead = x.shape[:-1]
    tokens = math.prod(lead)
    index, layers = v.as_layer(layer, w)
    bias = v.as_bias("bias", bias, (n,), "(N,)", layers)
    v.check_accumulation(accumulation)
    act = None if activation is None else as_activation(activation)
    if act is not None:
        act.check_halves(1)
    quantized = isinstance(x, QTensor)
    dtype, out_dtype = v.dtypes(x, preferred_element_type)
    args = LinearArgs(
        x=x if isinstance(x, QTensor) else x.reshape(tokens, k),
        w=w,
        bias=bias,
        input_scale=v.as_static_scale("input_scale", input_scale, resolved.input, quantized=quantized),
        layer=index,
    )
    op = OpSpec(
        op="linear",
        recipe=resolved,
        tokens=tokens,
        hidden=k,
        features=n,
        dtype=dtype,
        out_dtype=out_dtype,
        activation=act,
        bias=bias is not None,
        layers=layers,
        quantized_input=quantized,
        accumulation=accumulation,
        layout=w.layout.kind if isinstance(w, QTensor) else CANONICAL,
    )
    return call(op, args, implementation).reshape(*lead, n)
