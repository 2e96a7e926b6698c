"""The quantisers' formulas once more, in NumPy: float32, one IEEE operation after another, one block at a time.

Written from the table of formulas and not from ``jmoe.quantize``, so that the two can disagree. Constants are the
float32 nearest to the exact quotient. Finite inputs only.
"""

from itertools import product
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np

from jmoe.qtensor import QTensor
from jmoe.scheme import Scheme

F32 = np.float32
TINY = np.finfo(F32).tiny
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
LARGEST = {"e4m3": 448, "e5m2": 57344, "int8": 127, "int4": 7.5, "e2m1": 6}
FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
SCALE = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


dequantize = jax.jit(lambda q: q.dequantize())


class Quantized(NamedTuple):
    """Codes one an entry (float8 as bytes, integers as they are stored, nibbles unpacked), scales as stored."""

    codes: np.ndarray
    scale: np.ndarray
    global_scale: np.ndarray | None
    zero_point: np.ndarray | None
    values: np.ndarray


def quantize(x: np.ndarray, scheme: Scheme, given: np.ndarray | None = None) -> Quantized:
    """``x`` (..., N, K) in float32 or narrower; ``given`` (..., 1 or N, 1) for static schemes."""
    with np.errstate(over="ignore"):  # an infinite product saturates
        return _quantize(np.asarray(x).astype(F32), scheme, given)


def _quantize(x: np.ndarray, scheme: Scheme, given: np.ndarray | None) -> Quantized:
    *batch, n, k = x.shape
    bn, bk = (max(size, 1) if b == -1 else b for size, b in zip((n, k), scheme.block, strict=True))
    gn, gk = (1 if b == -1 else -(-size // b) for size, b in zip((n, k), scheme.block, strict=True))
    codes, values = np.zeros(x.shape, np.int32), np.zeros(x.shape, F32)
    scale, zero_point = np.zeros((*batch, gn, gk), F32), np.zeros((*batch, gn, gk), np.int32)
    g = None
    if scheme.global_scale is not None:
        rows = n if scheme.global_scale == "token" and given is None else 1 if given is None else given.shape[-2]
        g = np.zeros((*batch, rows, 1), F32)
    for lead in np.ndindex(*batch):
        if g is not None:
            g[lead] = _global(x[lead], scheme) if given is None else given[lead]
        for i, j in product(range(gn), range(gk)):
            at = (*lead, slice(i * bn, (i + 1) * bn), slice(j * bk, (j + 1) * bk))
            if g is not None:
                fixed = g[lead][i if g.shape[-2] > 1 else 0, 0]
            else:
                fixed = None if given is None else given[lead][i if given.shape[-2] > 1 else 0, 0]
            cell = (*lead, i, j)
            codes[at], scale[cell], zero_point[cell], values[at] = _block(x[at], scheme, fixed)
    return Quantized(codes, scale, g, zero_point if scheme.zero_point else None, values)


def _amax(x: np.ndarray) -> F32:
    return np.max(np.abs(x), initial=F32(0))


def _global(x: np.ndarray, scheme: Scheme) -> np.ndarray:
    if scheme.global_scale == "token":
        return np.array([[max(_amax(row), F32(1e-8)) * F32(1 / 2688)] for row in x], F32).reshape(len(x), 1)
    g = _amax(x) * F32(1 / 2688)
    return np.array([[g if g >= TINY else F32(1)]], F32)


def _block(x: np.ndarray, scheme: Scheme, given: F32 | None) -> tuple[np.ndarray, F32, int, np.ndarray]:
    """Codes, scale (a number, or the byte of e8m0), zero point and values of one block."""
    amax, fmt = _amax(x), scheme.format
    if scheme.zero_point:
        return _asymmetric(x, scheme)
    if fmt == "e2m1" and scheme.scale_dtype == "e8m0":
        stored = _mx_byte(amax, scheme.scale_rounding)
        s = _flushed(np.ldexp(F32(1), stored - 127))
    elif fmt == "e2m1":
        stored = F32(_float8(amax * F32(1 / 6) * (F32(1) / given), "e4m3").astype(F32))
        s = stored * given
    elif given is not None:
        stored = s = given
    elif scheme.power_of_two:
        e = _ceil_log2(amax, LARGEST[fmt])
        stored = e + 127 if scheme.scale_dtype == "e8m0" else np.ldexp(F32(1), e)
        s = _flushed(np.ldexp(F32(1), e))
    else:
        stored = s = _held(_linear(amax, scheme), scheme.scale_dtype)
    r = F32(1) / s if s > 0 else F32(0)
    y = x * r
    if fmt in FLOAT8:
        code = _float8(y, fmt)
        return code.view(np.uint8), stored, 0, code.astype(F32) * s
    if fmt == "e2m1":
        code = _e2m1(y)
        return code, stored, 0, np.array(E2M1 + [-v for v in E2M1], F32)[code] * s
    low, high = (-127, 127) if fmt == "int8" else (-8, 7)
    q = np.clip(np.rint(y), low, high)
    return (q if fmt == "int8" else q + 8), stored, 0, q * s


def _linear(amax: F32, scheme: Scheme) -> F32:
    fmt, block = scheme.format, scheme.block
    if fmt == "int8":
        return max(amax, F32(1e-10)) * F32(1 / 127)
    if fmt == "int4":
        return max(amax * F32(1 / 7.5), F32(1e-10))
    unit = F32(1 / LARGEST[fmt])
    if block == (-1, -1):
        return max(amax, F32(1e-12)) * unit
    if block == (1, -1):
        return max(amax * unit, F32(1 / (LARGEST[fmt] * 512)))
    return max(amax, F32(1e-10 if block[0] == 1 else 1e-4)) * unit


def _asymmetric(x: np.ndarray, scheme: Scheme) -> tuple[np.ndarray, F32, int, np.ndarray]:
    top = 15 if scheme.format == "int4" else 255
    lo, hi = np.min(x, initial=F32(0)), np.max(x, initial=F32(0))
    span = min(hi - lo, np.finfo(F32).max)
    s = _held(max(span * F32(1 / top), F32(1e-10)), scheme.scale_dtype)
    r = F32(1) / s
    zp = np.clip(np.rint(-lo * r), 0, top)
    q = np.clip(np.rint(x * r) + zp, 0, top)
    offset = 0 if top == 15 else 128  # 8-bit codes and zero points are held as int8
    return q - offset, s, int(zp) - offset, (q - zp) * s


def _held(s: F32, dtype: str) -> F32:
    """The scale as its dtype holds it: rounded to nearest even, neither overflowing nor vanishing."""
    if dtype == "float32":
        return s
    info = ml_dtypes.finfo(SCALE[dtype])
    smallest = max(F32(info.smallest_subnormal), TINY)
    return F32(min(max(s, smallest), F32(info.max)).astype(SCALE[dtype]))


def _mx_byte(amax: F32, rounding: str) -> int:
    m, e = np.frexp(np.float64(amax))  # amax = m * 2**e with m in [1/2, 1)
    if amax == 0:
        return 0
    exponent = e - 1 + (1 if rounding == "even" and m >= 0.875 else 0)  # 1.75 and more rounds to 2 in one bit
    return int(np.clip(exponent - 2 + 127, 0, 254))


def _ceil_log2(amax: F32, largest: float) -> int:
    """The least e in -127..127 with amax <= largest * 2**e, in exact arithmetic."""
    if amax == 0:
        return -127
    e = int(np.frexp(np.float64(amax))[1]) - int(np.frexp(largest)[1])
    return int(np.clip(e if np.float64(amax) <= np.ldexp(largest, e) else e + 1, -127, 127))


def _flushed(s: F32) -> F32:
    """``s``, or 0 where it is subnormal: the scale 2**-127 is, and XLA's arithmetic on a CPU takes it for zero."""
    return s if s >= TINY else F32(0)


def _float8(y: np.ndarray, fmt: str) -> np.ndarray:
    return np.clip(y, -LARGEST[fmt], LARGEST[fmt]).astype(FLOAT8[fmt])


def _e2m1(y: np.ndarray) -> np.ndarray:
    """The nearest of the eight values, a tie to the even code; a zero has no sign."""
    distance = np.abs(np.minimum(np.abs(y), 6).astype(np.float64)[..., None] - np.array(E2M1))
    nearest = distance == distance.min(-1, keepdims=True)
    first, last = np.argmax(nearest, -1), 7 - np.argmax(nearest[..., ::-1], -1)
    code = np.where(first % 2 == 0, first, last)
    return np.where((y < 0) & (code > 0), code + 8, code)


def codes_of(q: QTensor) -> np.ndarray:
    """The codes of a tensor, one an entry, as ``Quantized`` has them; an odd row's padding must be a zero nibble."""
    data = np.asarray(q.data)
    if q.scheme.fmt.bits == 4:
        nibbles = np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], 2 * data.shape[-1])
        assert not nibbles[..., q.shape[-1] :].any()
        return nibbles[..., : q.shape[-1]]
    return data if data.dtype == np.int8 else data.view(np.uint8)


def assert_is(q: QTensor, expected: Quantized) -> None:
    """``q`` holds these codes and scales, bit for bit, and has these values."""
    np.testing.assert_array_equal(np.asarray(q.scale).astype(F32), expected.scale, err_msg="scale")
    np.testing.assert_array_equal(codes_of(q), expected.codes, err_msg="codes")
    for name in ("global_scale", "zero_point"):
        actual, wanted = getattr(q, name), getattr(expected, name)
        assert (actual is None) == (wanted is None), name
        if wanted is not None:
            np.testing.assert_array_equal(actual, wanted, err_msg=name)
    np.testing.assert_array_equal(dequantize(q), expected.values, err_msg="values")
