"""What the xla implementation multiplies: operands with what is left of their scales, and slices of stacked weights."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jmoe import numerics
from jmoe.backends import common
from jmoe.backends.common import Weight
from jmoe.numerics import INT4_OFFSET
from jmoe.qtensor import QTensor, expand, expand_axis
from jmoe.scheme import Scheme


class Operand(NamedTuple):
    """One side of a product: values (..., M, K), and float32 (..., M or 1, 1) that multiplies them afterwards."""

    values: Array
    scale: Array | None


def as_operand(a: Weight, dtype: str) -> Operand:
    """``a`` (..., M, K) as the side of a product in ``dtype``; plain arrays come as they are."""
    if not isinstance(a, QTensor):
        return Operand(a, None)
    if dtype == "float32":
        return Operand(a.dequantize(), None)
    m, k = a.shape[-2:]
    codes = numerics.decode(numerics.unpack(a.data, a.scheme.fmt, k), a.scheme.fmt)
    if a.zero_point is not None:
        codes = codes - expand(a.zero_point.astype(jnp.float32), a.scheme.block, (m, k))
    elif a.scheme.format == "int4":
        codes = codes - INT4_OFFSET
    if a.scale.shape[-1] == 1:
        scale = a.combined_scale()
        rows = scale if scale.shape[-2] == m else expand_axis(scale, -2, a.scheme.block[0], m)
        return Operand(cast(codes, dtype), rows)
    scale = expand(numerics.decode_scale(a.scale), a.scheme.block, (m, k))
    return Operand(cast(codes * scale, dtype), a.global_scale)


def cast(x: Array, dtype: str) -> Array:
    """X as a product in ``dtype`` takes it; tensorfloat32 is held in float32, rounded: matrix units truncate."""
    if dtype != "tensorfloat32":
        return x.astype(dtype)
    # The 16-bit dtypes are part of it.
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10) if x.dtype == jnp.float32 else x.astype("float32")


def quantized_operand(x: Weight, scheme: Scheme | None, scale: Array | None, dtype: str) -> Operand:
    """X as a product's other side after ``scheme`` has quantised it; a QTensor is already."""
    if isinstance(x, QTensor) or scheme is None:
        return as_operand(x, dtype)
    q, factor = common.quantised(x, scheme, scale)
    operand = as_operand(q, dtype)
    if factor is None:
        return operand
    return Operand(operand.values, factor if operand.scale is None else operand.scale * factor)


def with_row_scale(x: Operand) -> Operand:
    """The same with a scale that has x's rows, if it has one."""
    if x.scale is None:
        return x
    return Operand(x.values, jnp.broadcast_to(x.scale, (*x.values.shape[:-1], 1)))


def multiply(x: Operand, w: Operand, dtype: str) -> Array:
    """X (M, K) times w (N, K) transposed, (M, N) float32; products in ``dtype``, sums in float32."""
    if dtype in ("bfloat16", "float16") and w.values.dtype != dtype:
        dtype = "tensorfloat32"
    y = lax.dot_general(
        cast(x.values, dtype),
        cast(w.values, dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == "float32" else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    if x.scale is not None:
        y = y * x.scale
    return y if w.scale is None else y * w.scale.T


def entry_at(tree: Any, *index: Array | None) -> Any:
    """Every leaf's entry at the leading ``index``, of which None counts for no axis, sliced where it lies."""
    given = tuple(i for i in index if i is not None)

    def entry(leaf: Array) -> Array:
        rest = leaf.shape[len(given) :]
        start = (*given, *(jnp.int32(0) for _ in rest))
        return window(leaf, start, (*(1 for _ in given), *rest)).reshape(rest)

    return jax.tree.map(entry, tree) if given else tree


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def window(leaf: Array, start: tuple[Array, ...], size: tuple[int, ...]) -> Array:
    """``lax.dynamic_slice``, of which XLA converts no more than the slice.

    Inside a loop XLA hoists a conversion of the whole array, which is the same at every step, and on a CPU it slices
    float8 as float16 besides. Tied to the index, the array is no longer the same.
    """
    leaf, start = lax.optimization_barrier((leaf, start))
    return lax.dynamic_slice(leaf, start, size)


@window.defjvp
def _window_jvp(size: tuple[int, ...], primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    # No barrier: XLA adds the transpose of a plain slice to a cotangent in place.
    return window(*primals, size), lax.dynamic_slice(tangents[0], primals[1], size)
