"""Quantisers, and lossless and lossy changes of a quantized array's scheme.

Two rules give every scheme the same codes on every backend (up to ties): constants multiply and are never divided by
(``amax * f32(1/448)``, ``x * (1/scale)`` with the reciprocal taken once a block), and a scale that is rounded, to a
power of two or to e4m3 or bfloat16, is rounded before the codes are computed.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import checkify

from jmoe import numerics
from jmoe.arguments import as_array, check_type
from jmoe.config import Shards, config
from jmoe.numerics import INT4_OFFSET
from jmoe.qtensor import QTensor, expand, part_specs, scale_grid
from jmoe.scheme import Block, Recipe, Scheme, recipe
from jmoe.sharding import automatic_inside, spec_of
from pallas_kernels import bits
from pallas_kernels.layouts import CANONICAL

_F32_TINY = float(np.finfo(np.float32).tiny)


def _reciprocal(constant: float) -> np.float32:
    return np.float32(1) / np.float32(constant)


class _Scales(NamedTuple):
    stored: Array  # as QTensor.scale holds it
    effective: Array  # float32, what a code is multiplied by
    global_scale: Array | None


@automatic_inside(lambda q, x, *_, **__: part_specs(q, spec_of(x)))
def quantize(
    x: Array,
    how: Recipe | Scheme | str,
    *,
    scale: Array | float | None = None,
    shared: Sequence[int] = (),
) -> QTensor:
    """Quantizes ``x``.

    A recipe (or its name) quantizes a weight and records how operations quantise the other operand; a scheme quantizes
    any array and leaves that open (weight-only).

    A non-finite element makes its own row NaN and, where the block has one row, no other: through a NaN code in float8
    formats, through a NaN scale of its block in int8, int4 and e2m1, which have no NaN.

    Args:
      x: float (..., N, K); leading axes are batch axes.
      how: recipe, scheme, or a recipe's name.
      scale: for static schemes only, the given (global) scale: float32, () or broadcastable to (..., N, 1), finite
        and positive.
      shared: leading axes over which one global scale is shared, e.g. ``(-3,)`` for the two halves of w13.

    Returns:
      A QTensor of x's shape.

    Raises:
      TypeError: ``x`` is not floating point, or an argument is of another kind.
      ValueError: ``x`` has fewer than two axes, the recipe quantizes nothing, or ``scale`` is missing, not wanted or
        not a positive finite number.
    """
    how = recipe(how) if isinstance(how, str) else how
    if isinstance(how, Recipe) and how.weight is None:
        raise ValueError(
            f"recipe {how.name!r} leaves the weight as it is; there is nothing to quantize, and operations "
            "take the array itself"
        )
    scheme = how.weight if isinstance(how, Recipe) else how
    if not isinstance(scheme, Scheme):
        raise TypeError(f"how={how!r} must be a Recipe, a Scheme or a recipe's name")
    if isinstance(x, QTensor):
        raise TypeError(f"x={x!r} is quantized already; requantize gives its values another scheme")
    x = as_array("x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x has dtype {x.dtype}, but only floating point arrays are quantized")
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}, but a quantized array has at least two axes (..., N, K)")
    if scheme.static != (scale is not None):
        state = "missing" if scale is None else "given"
        raise ValueError(f"scale is {state}, but the scheme ({scheme.describe()}) has static={scheme.static}")
    if scale is not None:
        scale = check_static_scale("scale", scale)
        rows = (*x.shape[:-1], 1)
        if scale.ndim > x.ndim or any(s not in (1, r) for s, r in zip(scale.shape[::-1], rows[::-1], strict=False)):
            raise ValueError(
                f"scale has shape {scale.shape}, but x of shape {x.shape} takes one that broadcasts to {rows}"
            )
        scale = scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
    check_type("shared", shared, Sequence, "a sequence of axes")
    if not all(type(axis) is int and -x.ndim <= axis < x.ndim and axis % x.ndim < x.ndim - 2 for axis in shared):
        raise ValueError(f"shared={shared!r} must name leading axes of x, which has shape {x.shape}")
    axes = tuple(sorted({axis % x.ndim for axis in shared}))
    if len(axes) != len(shared):
        raise ValueError(f"shared={shared!r} names an axis of x, which has shape {x.shape}, twice")
    quantized = _quantize(x, scale, scheme, axes, config.shards)
    return quantized.with_input_scheme(how.input) if isinstance(how, Recipe) else quantized


def check_static_scale(name: str, scale: Array | float) -> Array:
    """``scale`` as float32, if it is finite and large enough to have a reciprocal.

    Concrete values are checked at once, also while tracing; traced ones under ``jmoe.config(check=True)``, through
    checkify.
    """
    if isinstance(scale, jax.core.Tracer):
        scale = scale.astype(jnp.float32)
        if config.check:
            good = jnp.all(jnp.isfinite(scale) & (scale >= _F32_TINY))
            checkify.check(good, f"{name} must be finite and positive")
        return scale
    try:
        with np.errstate(over="ignore"):
            values = np.asarray(scale, np.float32)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be a number or an array of them ({error})") from error
    except OverflowError as error:
        raise ValueError(
            f"{name} has a value beyond float32, but a scale is finite and at least {_F32_TINY:g} ({error})"
        ) from error
    bad = ~(np.isfinite(values) & (values >= _F32_TINY))
    if bad.any():
        value = float(values[bad].flat[0])
        if value == 0 or np.isinf(value):  # in float32 only, perhaps
            value = float(np.asarray(scale)[bad].flat[0])
        raise ValueError(f"{name} has the value {value:g}, but a scale is finite and at least {_F32_TINY:g}")
    return jnp.asarray(scale, jnp.float32)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _quantize(x: Array, scale: Array | None, scheme: Scheme, shared: tuple[int, ...], shards: Shards) -> QTensor:
    n, k = x.shape[-2:]
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x)
    x_finite = jnp.where(finite, x, jnp.float32(0))
    if scheme.static and scheme.global_scale is None and scale is not None and scale.shape[-2] != 1:
        scheme = scheme.replace(block=(1, -1))
    zero_point = None
    if scheme.zero_point:
        scales, zero_point = _asymmetric_scales(x_finite, scheme)
    else:
        amax = block_amax(x_finite, scheme.block)
        amax = _across(amax, shards.rows) if scheme.block[0] == -1 else amax
        amax = _across(amax, shards.columns) if scheme.block[1] == -1 else amax
        scales = _symmetric_scales(amax, scheme, scale, shared, shards)

    # Not a division per element: one reciprocal a block. The barrier keeps XLA from merging the two again.
    inverse = jnp.where(scales.effective > 0, 1 / scales.effective, jnp.float32(0))
    scaled = x_finite * expand(lax.optimization_barrier(inverse), scheme.block, (n, k))
    if scheme.fmt.dtype == scheme.fmt.storage and scheme.format != "int8":
        data = bits.saturate(jnp.where(finite, scaled, jnp.float32(np.nan)), scheme.fmt.storage)
        return QTensor(data, scales.stored, scales.global_scale, None, scheme)

    bad = block_amax((~finite).astype(jnp.float32), scheme.block) > 0
    stored = jnp.where(bad, _nan_scale(scales.stored.dtype), scales.stored)
    if scheme.format == "e2m1":
        codes = bits.e2m1_encode(scaled)
    elif zero_point is not None:
        codes = _unsigned_codes(scaled, expand(zero_point, scheme.block, (n, k)), scheme)
    elif scheme.format == "int4":
        codes = (bits.round_int(scaled, -8, 7, jnp.int8) + jnp.int8(INT4_OFFSET)).astype(jnp.uint8)
    else:
        codes = bits.round_int(scaled, -127, 127, jnp.int8)
    data = bits.pack_nibbles(codes) if scheme.fmt.bits == 4 else codes
    if zero_point is not None:
        zero_point = _store_zero_point(zero_point, scheme)
    odd_k = scheme.fmt.bits == 4 and k % 2 == 1
    return QTensor(data, stored, scales.global_scale, zero_point, scheme, None, CANONICAL, odd_k)


def block_amax(x: Array, block: Block) -> Array:
    """Max |x| over each block of (..., N, K), 0 where a block is empty: shape (..., ceil(N/bn), ceil(K/bk))."""
    return _block_max(jnp.abs(x), block)


def _across(amax: Array, axes: tuple[str, ...]) -> Array:
    """The largest over the devices along those mesh axes on which ``amax`` is not the same already."""
    varying = tuple(axis for axis in axes if axis in jax.typeof(amax).manual_axis_type.varying)
    return lax.pmax(amax, varying) if varying else amax


def _block_max(x: Array, block: Block) -> Array:
    """max(0, x) over each block."""
    *batch, n, k = x.shape
    gn, gk = scale_grid((n, k), block)
    # No more rows than there are, or a tensor smaller than its block would be padded to one.
    bn, bk = (extent if b == -1 else min(b, max(extent, 1)) for extent, b in zip((n, k), block, strict=True))
    if (gn * bn, gk * bk) != (n, k):
        x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, gn * bn - n), (0, gk * bk - k)])
    return jnp.max(x.reshape(*batch, gn, bn, gk, bk), axis=(-3, -1), initial=0)


def _symmetric_scales(
    amax: Array, scheme: Scheme, given: Array | None, shared: tuple[int, ...], shards: Shards
) -> _Scales:
    if scheme.global_scale is not None:
        return _two_level_scales(amax, scheme, given, shared, shards)
    if given is not None:
        effective = jnp.broadcast_to(jnp.maximum(given, _F32_TINY), amax.shape)
        return _Scales(effective, effective, None)
    if scheme.format == "e2m1":
        code = _shared_exponent(amax, scheme.scale_rounding)
    elif scheme.power_of_two or scheme.scale_dtype == "e8m0":
        exponent = bits.ceil_exponent(amax, scheme.fmt.max)
        if scheme.scale_dtype != "e8m0":
            return _rounded(bits.pow2(exponent), scheme)
        code = (exponent + 127).astype(jnp.uint8)
    else:
        return _rounded(_linear_scale(amax, scheme), scheme)
    return _Scales(code, bits.e8m0_to_f32(code), None)


def _linear_scale(amax: Array, scheme: Scheme) -> Array:
    """Amax over the format's largest value, kept away from zero by the customary floor of each scheme."""
    unit = _reciprocal(scheme.fmt.max)
    if scheme.format == "int4":
        return jnp.maximum(amax * unit, np.float32(1e-10))
    if scheme.format == "int8":
        return jnp.maximum(amax, np.float32(1e-10)) * unit
    if scheme.block == (-1, -1):
        return jnp.maximum(amax, np.float32(1e-12)) * unit
    if scheme.block == (1, -1):
        return jnp.maximum(amax * unit, _reciprocal(scheme.fmt.max * 512))
    floor = 1e-10 if scheme.block[0] == 1 else 1e-4
    return jnp.maximum(amax, np.float32(floor)) * unit


def _rounded(scale: Array, scheme: Scheme) -> _Scales:
    """The scale as its dtype holds it, neither overflowing nor vanishing."""
    dtype = numerics.SCALE_DTYPES[scheme.scale_dtype]
    if dtype == jnp.float32:
        return _Scales(scale, scale, None)
    info = jnp.finfo(dtype)
    # float16's subnormals are ordinary float32 numbers; bfloat16's are float32's own, which may flush to zero.
    smallest = max(float(info.smallest_subnormal), _F32_TINY)
    effective = bits.round_to(jnp.clip(scale, smallest, float(info.max)), scheme.scale_dtype)
    return _Scales(effective.astype(dtype), effective, None)


def _shared_exponent(amax: Array, rounding: str) -> Array:
    """MX's shared exponent of e2m1 blocks as an e8m0 byte: that of amax, less 2 (the exponent of 4, e2m1's largest)."""
    carry = 0x00200000 if rounding == "even" else 0  # rounds amax to e2m1's one mantissa bit
    field = ((bits.f32_bits(amax) + carry) >> 23) & 0xFF
    return jnp.clip(field - 2, 0, 254).astype(jnp.uint8)


def _two_level_scales(
    amax: Array, scheme: Scheme, given: Array | None, shared: tuple[int, ...], shards: Shards
) -> _Scales:
    """NVFP4 and its like: block scales in e4m3 relative to a float32 multiplier.

    The multiplier is amax over the largest value there is, that of the format times that of a block scale: 2688 for
    e2m1.
    """
    unit = _reciprocal(scheme.fmt.max * numerics.E4M3.max)
    if given is not None:
        extents = (*amax.shape[:-2], given.shape[-2], 1)
        global_scale = jnp.broadcast_to(jnp.maximum(given, _F32_TINY), extents)
    elif scheme.global_scale == "token":
        row_amax = _across(jnp.max(amax, axis=-1, keepdims=True, initial=0), shards.columns)
        global_scale = jnp.maximum(row_amax, np.float32(1e-8)) * unit
    else:
        largest = jnp.max(amax, axis=(*shared, -2, -1), keepdims=True, initial=0) * unit
        largest = _across(largest, (*shards.rows, *shards.columns))
        largest = jnp.where(largest >= _F32_TINY, largest, jnp.float32(1))
        global_scale = jnp.broadcast_to(largest, (*amax.shape[:-2], 1, 1))
    inverse = lax.optimization_barrier(1 / global_scale)
    stored = bits.saturate(amax * _reciprocal(scheme.fmt.max) * inverse, jnp.float8_e4m3fn)
    return _Scales(stored, stored.astype(jnp.float32) * global_scale, global_scale)


def _asymmetric_scales(x: Array, scheme: Scheme) -> tuple[_Scales, Array]:
    """Scale and float32 zero point (0..levels) of unsigned codes."""
    levels = 2**scheme.fmt.bits - 1
    low, high = -_block_max(-x, scheme.block), _block_max(x, scheme.block)
    span = jnp.minimum(high - low, np.finfo(np.float32).max)
    scales = _rounded(jnp.maximum(span * _reciprocal(levels), np.float32(1e-10)), scheme)
    inverse = lax.optimization_barrier(1 / scales.effective)
    return scales, jnp.clip(jnp.rint(-low * inverse), 0, levels)


def _unsigned_codes(scaled: Array, zero_point: Array, scheme: Scheme) -> Array:
    """Codes as stored: nibbles 0..15, or 8-bit codes less 128 as int8."""
    codes = jnp.clip(jnp.rint(scaled) + zero_point, 0, 2**scheme.fmt.bits - 1)
    return _store_zero_point(codes, scheme)


def _store_zero_point(value: Array, scheme: Scheme) -> Array:
    return value.astype(jnp.uint8) if scheme.fmt.bits == 4 else (value - 128).astype(jnp.int8)


def _nan_scale(dtype: jax.typing.DTypeLike) -> Array:
    return jnp.uint8(bits.E8M0_NAN) if dtype == jnp.uint8 else jnp.asarray(np.nan, dtype)


def requantize(q: QTensor, how: Recipe | Scheme | str, *, scale: Array | float | None = None) -> QTensor:
    """The values of ``q`` quantized anew, codes included: what a change of scales needs (a lossy step in general)."""
    _check_quantized("q", q)
    requantized = quantize(q.dequantize(), how, scale=scale)
    keep = isinstance(how, Scheme)
    return requantized.with_input_scheme(q.input_scheme) if keep else requantized


def _check_quantized(name: str, value: Any) -> None:
    check_type(name, value, QTensor, "a QTensor; quantize makes one of an array")


@automatic_inside(lambda refined, q, *_, **__: part_specs(refined, spec_of(q.data)))
def refine_blocks(q: QTensor, block: Block) -> QTensor:
    """The same values with smaller blocks, losslessly: every scale is repeated over the blocks that divide its own.

    Args:
      q: in the canonical layout.
      block: (rows, cols), each a divisor of q's (anything divides -1, the whole extent).

    Raises:
      ValueError: a new block would straddle two of q's scales, or q is in a kernel's layout.
    """
    _check_quantized("q", q)
    if q.layout != CANONICAL:
        raise ValueError(f"layout={q.layout.name!r}: blocks are refined in the canonical layout; unpack first")
    scheme = q.scheme.replace(block=block)
    old = q.scheme.block
    n, k = q.shape[-2:]
    for new, current, extent in zip(block, old, (n, k), strict=True):
        whole = max(extent, 1) if new == -1 else new
        if not (new == current or current == -1 or current % whole == 0 or extent <= whole <= current):
            raise ValueError(f"block={block} does not divide the tensor's blocks {old}, so scales would be straddled")
    gn, gk = scale_grid((n, k), block)

    def refine(grid: Array) -> Array:
        for axis, current, new, cells in ((-2, old[0], block[0], gn), (-1, old[1], block[1], gk)):
            if grid.shape[axis] == cells:
                continue
            times = cells if grid.shape[axis] == 1 else current // new
            grid = lax.slice_in_dim(jnp.repeat(grid, times, axis=axis), 0, cells, axis=axis % grid.ndim)
        return grid

    zero_point = None if q.zero_point is None else refine(q.zero_point)
    return QTensor(q.data, refine(q.scale), q.global_scale, zero_point, scheme, q.input_scheme, q.layout, q.odd_k)


@automatic_inside(lambda merged, shards: part_specs(merged, spec_of(shards[0].data)))
def merge_shards(shards: Sequence[QTensor]) -> QTensor:
    """Concatenates quantized arrays along N, exactly: gate and up, or q, k and v, each with scales of its own.

    Blocks that do not meet at a seam are refined to the largest that does; per-tensor scales that may differ become
    one a row (block (1, -1)), and likewise global scales.

    Raises:
      ValueError: no shards, or shards that differ in more than N (format, K, column blocks, batch axes).
    """
    check_type("shards", shards, Sequence, "a sequence of QTensors")
    if not shards:
        raise ValueError("shards is empty; merging needs at least one")
    for i, shard in enumerate(shards):
        _check_quantized(f"shards[{i}]", shard)
    first = shards[0]
    if len(shards) == 1:
        return first
    for i, shard in enumerate(shards):
        like = first.scheme.replace(block=shard.scheme.block)
        same = shard.scheme == like and shard.scheme.block[1] == first.scheme.block[1]
        if not same or (shard.input_scheme, shard.layout) != (first.input_scheme, first.layout):
            raise ValueError(f"shards[{i}] is {shard!r}, which cannot follow {first!r}")
        if shard.shape[:-2] + shard.shape[-1:] != first.shape[:-2] + first.shape[-1:]:
            raise ValueError(f"shards[{i}] has shape {shard.shape}, but only N may differ from {first.shape}")
    rows = _common_rows(shards)
    refined = [refine_blocks(s, (rows, s.scheme.block[1])) for s in shards]

    def join(name: str) -> Array:
        return jnp.concatenate([getattr(s, name) for s in refined], axis=-2)

    global_scale = None
    if first.global_scale is not None:
        by_row = [jnp.broadcast_to(jnp.asarray(s.global_scale), (*s.shape[:-1], 1)) for s in refined]
        global_scale = jnp.concatenate(by_row, axis=-2)
    zero_point = join("zero_point") if first.zero_point is not None else None
    scheme = refined[0].scheme
    return QTensor(
        join("data"), join("scale"), global_scale, zero_point, scheme, first.input_scheme, first.layout, first.odd_k
    )


def _common_rows(shards: Sequence[QTensor]) -> int:
    """The most rows a block can have so that every seam lies on a block's edge."""
    if any(s.scheme.block[0] == -1 for s in shards):
        return 1
    seams = [s.shape[-2] for s in shards[:-1]]
    return math.gcd(*(s.scheme.block[0] for s in shards), *seams)
