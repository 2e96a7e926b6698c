"""``linear``: activation(x w^T + bias) with a quantized or plain weight."""

import math

import jax
from jax import Array

from jmoe.backends.activation import Activation, as_activation
from jmoe.backends.spec import Accumulation, LinearArgs, OpSpec
from jmoe.config import config
from jmoe.ops import call as c
from jmoe.qtensor import QTensor
from jmoe.scheme import Recipe
from pallas_kernels.layouts import CANONICAL


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
      accumulation: "exact" promotes every 128 of K to float32, "fast" leaves K to the matrix unit; None is the
        recipe's default. Implementations that only have float32 sums are exact always.
      preferred_element_type: dtype of the result; x's by default, bfloat16 for a quantized x.
      implementation: "triton", "xla" or "reference"; None lets the selector choose.

    Returns:
      (..., N).

    Raises:
      ValueError: shapes, scales or a recipe that do not fit; TypeError: dtypes.
      NotImplementedError: the implementation asked for cannot serve, with the reason.
      ExceptionGroup: none can.
    """
    w = c.check_weight("w", w, 2, layer, "(N, K)")
    resolved = c.resolve_recipe("w", w, recipe)
    w = c.with_input_of(w, resolved)
    x = c.as_input(x, resolved, 1)
    n, k = w.shape[-2:]
    if x.shape[-1] != k:
        raise ValueError(f"x has shape {tuple(x.shape)}, but w has K = {k} (w is (N, K) = {(n, k)})")
    lead = x.shape[:-1]
    if isinstance(x, QTensor) and x.ndim != 2:
        raise ValueError(f"x is a QTensor of shape {x.shape}, but a quantized activation is (M, K)")
    layers = w.shape[0] if layer is not None else None
    stack = () if layers is None else (layers,)
    if bias is not None:
        c.check_shape("bias", bias, (*stack, n), "(L, N)" if stack else "(N,)")
    c.check_accumulation(accumulation)
    act = None if activation is None else as_activation(activation)
    if act is not None:
        act.check_halves(1)
    dtype, out_dtype = c.dtypes(x, preferred_element_type)
    args = LinearArgs(
        x=x if isinstance(x, QTensor) else x.reshape(math.prod(lead), k),
        w=w,
        bias=bias,
        input_scale=c.static_scale("input_scale", input_scale, None if _given(x) else resolved.input, None),
        layer=c.as_layer(layer, layers),
    )
    op = OpSpec(
        op="linear",
        recipe=resolved,
        tokens=math.prod(lead),
        hidden=k,
        features=n,
        dtype=dtype,
        out_dtype=out_dtype,
        activation=act,
        bias=bias is not None,
        layers=layers,
        quantized_input=isinstance(x, QTensor),
        accumulation=accumulation,
        layout=w.layout if isinstance(w, QTensor) else CANONICAL,
        mesh=c.mesh_axes(x, w),
        batch_invariant=config.batch_invariant,
    )
    return c.call(op, args, implementation).reshape(*lead, n)


def _given(x: Array | QTensor) -> bool:
    return isinstance(x, QTensor)
