"""What kernel bodies share: grid order, decoding of scales and codes, quantisation of a tile, activations.

Plain jnp that Triton can lower. NaN survives everything here, in Triton too, where ``minimum`` and ``maximum`` would
drop it: clamps are written as selects.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import bits, lowering

F8 = jnp.float8_e4m3fn
F8_MAX = 448.0
CODES = (jnp.dtype(F8), jnp.dtype(jnp.int8))
"""What quantised operands are held in."""
INT8_MAX, INT8_FLOOR = 127.0, 1e-10


def pow2_at_least(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(0, n - 1).bit_length()


def div(a: Array, n: int) -> Array:
    """Floor of a / n of an int32 that is not negative, in one instruction."""
    return lax.div(a, np.int32(n))


def rem(a: Array, n: int) -> Array:
    """``a`` modulo ``n`` of an int32 that is not negative."""
    return lax.rem(a, np.int32(n))


def grouped_order(program: Array, rows: int, cols: int, group: int) -> tuple[Array, Array]:
    """The tile (row, col) of a ``rows`` x ``cols`` grid of tiles that a program computes.

    ``group`` rows of tiles go through all columns together, so that a column's operand is read from memory once for
    the group and from the L2 cache after that.
    """
    first = div(program, group * cols) * group
    within = rem(program, group * cols)
    height = jnp.minimum(rows - first, group)
    return first + lax.rem(within, height), lax.div(within, height)


def steps_of(share: Array | None, shares: int, count: int) -> tuple[Array | int, Array | int]:
    """The first of ``count`` steps that one of several equal shares has, and the one it ends before; None has all."""
    if share is None:
        return 0, count
    length = pl.cdiv(count, shares)
    first = share * length
    return first, jnp.minimum(first + length, count)


def for_share(count: int, programs: int, make: Callable[[Array], None], *, when: Array) -> None:
    """In a kernel of so many programs: ``make`` of each number below ``count`` that is this program's, ``when`` true.

    ``count`` is at least ``programs``.
    """
    first = pl.program_id(0)
    share = jnp.where(when, div(count - 1 - first, programs) + 1, 0)

    def one(i: Array, carry: None) -> None:
        make(first + i * programs)

    lowering.loop(share, one, None)


def existing(index: Array, extent: int) -> Array:
    """A scalar index as JAX takes it: a negative one counts from the end, and one outside is the nearest."""
    index = jnp.where(index < 0, index + extent, index)
    return jnp.clip(index, 0, extent - 1)


def decode_scale(scale: Array) -> Array:
    """A scale as float32; uint8 is e8m0."""
    return bits.e8m0_to_f32(scale) if scale.dtype == jnp.uint8 else scale.astype(jnp.float32)


def encode_e8m0(scale: Array) -> Array:
    """The e8m0 byte of a float32 power of two from 2**-127 up."""
    return ((bits.f32_bits(scale) >> 23) & 0xFF).astype(jnp.uint8)


def e4m3_values(code: Array, dtype: jax.typing.DTypeLike) -> Array:
    """The exact values, in bfloat16, float16 or float32, of e4m3 codes given as uint8; 0x7F and 0xFF are NaN.

    By integer operations: no float8 type appears, which compilers for compute capability below 8.9 do not survive, and
    no subnormal of ``dtype``, which some backends flush.
    """
    info = jnp.finfo(dtype)
    word = jnp.int32 if info.bits == 32 else jnp.int16
    bias = (1 << (info.nexp - 1)) - 1
    c = code.astype(word)
    magnitude = c & 0x7F
    # The four exponent bits and three of mantissa, moved to where dtype has them, and biased by dtype instead of 7.
    # A code below 8 (exponent 0) is m/8 * 2**-6: built as (1 + m/8) * 2**-6, from which 2**-6 is taken.
    subnormal = magnitude < 8
    low, normal = (np.asarray((bias - e) << info.nmant, word) for e in (6, 7))
    exponent = jnp.where(subnormal, low, normal)
    value = lax.bitcast_convert_type((magnitude << (info.nmant - 3)) + exponent, jnp.dtype(dtype))
    value = jnp.where(subnormal, value - np.asarray(2.0**-6, dtype), value)
    value = jnp.where(magnitude == 0x7F, np.asarray(np.nan, dtype), value)
    sign = (c & 0x80) << (info.bits - 8)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(value, word) | sign, jnp.dtype(dtype))


def _decode_ptx(dtype: Any) -> str:
    """PTX for ``e4m3_values`` of four codes, two at a time in the halves of a register.

    A code's bits, moved to where dtype's exponent ends, are its value times a power of two (a subnormal of dtype where
    the code is one, which these instructions keep). One fused multiply-add undoes the power and, through a NaN addend,
    makes NaN of 0x7F. Four and a half instructions an element.
    """
    info = jnp.finfo(dtype)
    bias = (1 << (info.nexp - 1)) - 1
    power = (2 * bias - 7) << info.nmant  # 2**(bias - 7)
    lines = ["{", ".reg .b32 t, m, h, n, s;", f"mov.b32 s, {power | power << 16:#x};"]
    for result, select in (("$0", "0x1404"), ("$1", "0x3424")):
        lines += [
            f"prmt.b32 t, $2, 0, {select};",  # a code in the upper byte of each half
            "and.b32 m, t, 0x7F007F00;",
            "add.u32 n, m, 0x01000100;",  # sets a half's top bit for 0x7F alone
            "and.b32 n, n, 0x80008000;",
            f"shr.u32 h, n, {16 - info.nmant};",
            "sub.u32 n, n, h;",  # all ones in the exponent and one in the mantissa
            f"shr.u32 m, m, {11 - info.nmant};",
            "lop3.b32 h, t, 0x80008000, m, 0xEA;",  # (t & 0x80008000) | m
            f"fma.rn.{'bf16x2' if dtype == jnp.bfloat16 else 'f16x2'} {result}, h, s, n;",
        ]
    return "\n".join([*lines, "}"])


def decode_e4m3(code: Array, dtype: jax.typing.DTypeLike) -> Array:
    """``e4m3_values`` of a tile, in packed instructions for 16-bit dtypes."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float32:
        return e4m3_values(code, dtype)
    meaning = _e4m3_as_bfloat16 if dtype == jnp.bfloat16 else _e4m3_as_float16
    return lowering.packed_ptx(code, meaning, _decode_ptx(dtype), pack=4, dtype=dtype)


def as_operand(x: Array, dtype: jax.typing.DTypeLike) -> Array:
    """A tile of codes or floats in the dtype of the other operand."""
    if x.dtype in (dtype, jnp.int8):  # any float dtype holds int8
        return x.astype(dtype)
    # Triton casts no float8 to bfloat16.
    return x.astype(jnp.float32).astype(dtype)


def _e4m3_as_bfloat16(code: Array) -> Array:
    return e4m3_values(code, jnp.bfloat16)


def _e4m3_as_float16(code: Array) -> Array:
    return e4m3_values(code, jnp.float16)


def add_scaled(acc: Array, values: Array, scales: Sequence[Array]) -> Array:
    """``acc`` plus ``values`` times every one of at least one scale, the last of them and the sum in one operation."""
    *scales, last = scales
    for scale in scales:
        values = values * scale
    return lowering.fma(values, last, acc)


def fp8_scale(amax: Array, *, floor: float, power_of_two: bool = False) -> tuple[Array, Array]:
    """Scale of e4m3 blocks from their largest magnitude, and the reciprocal that codes are made with; both float32.

    ``max(amax, floor) * (1/448)``, or the power of two that is not below amax / 448.
    """
    if power_of_two:
        exponent = bits.ceil_exponent(amax, F8_MAX)
        return bits.pow2(exponent), bits.pow2(-exponent)
    scale = jnp.maximum(amax, np.float32(floor)) * (np.float32(1) / np.float32(F8_MAX))
    return scale, lowering.reciprocal(scale)


def code_scale(
    amax: Array, codes: jax.typing.DTypeLike, *, floor: float, power_of_two: bool = False
) -> tuple[Array, Array]:
    """Scale of blocks of e4m3 or int8 codes from ``magnitude``'s largest, and its reciprocal; both float32.

    int8 has no NaN, so that a block which an infinite ``amax`` says is not finite has a NaN scale (and reciprocal 0).
    """
    if codes != jnp.int8:
        return fp8_scale(amax, floor=floor, power_of_two=power_of_two)
    bad = amax == np.float32(np.inf)
    amax = jnp.where(bad, np.float32(0), amax)
    if power_of_two:
        exponent = bits.ceil_exponent(amax, INT8_MAX)
        scale, inverse = bits.pow2(exponent), bits.pow2(-exponent)
    else:
        scale = jnp.maximum(amax, np.float32(INT8_FLOOR)) * (np.float32(1) / np.float32(INT8_MAX))
        inverse = lowering.reciprocal(scale)
    return jnp.where(bad, np.float32(np.nan), scale), inverse


def magnitude(x: Array, codes: jax.typing.DTypeLike) -> Array:
    """What ``code_scale`` takes the largest of: |x|; where x is not finite, infinity for int8 and 0 for e4m3."""
    size = jnp.abs(x)
    return jnp.where(size < np.float32(np.inf), size, np.float32(np.inf if codes == jnp.int8 else 0))


def codes_of(x: Array, inverse: Array, codes: jax.typing.DTypeLike, *, saturates: bool) -> Array:
    """Codes of float32 ``x * inverse``, to nearest even; where x is not finite, e4m3's NaN and any of int8.

    What is out of range ``saturates``; with the scale of x's own largest nothing is, and a rounded 448 or 127 remains
    one.
    """
    if codes != jnp.int8 and not saturates:
        return lowering.times_or_nan(x, inverse).astype(F8)
    scaled = x * inverse
    if saturates:
        largest = np.float32(INT8_MAX if codes == jnp.int8 else F8_MAX)
        scaled = jnp.clip(scaled, -largest, largest)
    if codes != jnp.int8:
        return jnp.where(jnp.abs(x) < np.float32(np.inf), scaled, np.float32(np.nan)).astype(F8)
    # The sum is rounded to a whole number, whose two's complement ends its mantissa: Triton has no rounding of its own.
    word = lax.bitcast_convert_type(scaled + np.float32(1.5 * 2**23), jnp.int32)
    return word.astype(jnp.int8)


def quantize_tile(
    x: Array, axis: int, *, codes: jax.typing.DTypeLike = F8, floor: float = 1e-10, power_of_two: bool = False
) -> tuple[Array, Array]:
    """e4m3 or int8 codes of a float32 tile, one scale for each line along ``axis``, and these (float32, without it).

    A non-finite element gets the NaN code and does not count for its line's scale; in int8 that scale is NaN.
    """
    amax = jnp.max(magnitude(x, codes), axis=axis)
    scale, inverse = code_scale(amax, codes, floor=floor, power_of_two=power_of_two)
    return codes_of(x, jnp.expand_dims(inverse, axis), codes, saturates=False), scale


def silu(x: Array, alpha: float | Array = 1.0) -> Array:
    """X sigmoid(alpha x)."""
    return x / (1.0 + jnp.exp(-alpha * x))


def gelu(x: Array) -> Array:
    """GELU, the exact form."""
    return 0.5 * x * lowering.erfc(x * np.float32(-np.sqrt(0.5)))


def gelu_tanh(x: Array) -> Array:
    """GELU in its tanh form."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * (x * x * x))
    return 0.5 * x * (1.0 + jnp.tanh(inner))


def ungated(name: str, x: Array) -> Array:
    """The activation of float32 ``x`` alone: silu, gelu, gelu_tanh or relu2."""
    if name == "silu":
        return silu(x)
    if name == "gelu":
        return gelu(x)
    if name == "gelu_tanh":
        return gelu_tanh(x)
    if name == "relu2":
        positive = jnp.where(x <= 0, np.float32(0), x)
        return positive * positive
    raise ValueError(f"activation={name!r} must be 'silu', 'gelu', 'gelu_tanh' or 'relu2'")
