"""From packed words to a dot's left operand, in registers: PTX, and its jnp twin for interpret mode.

Each function takes a tile of elements (rows, h) as ``packing`` laid them out and gives the operand of one run of codes,
of the same shape: nothing moves between threads. Scales come as uint32 tiles of that shape, constant over a group.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import bits, lowering
from pallas_kernels.body import F8

MAGNITUDES = 0x77777777
"""``live`` of a group that counts; 0 makes all of its weights zero."""

INT4_SHIFT = -6
"""Powers of two that ``int4`` leaves in its result."""

# e4m3 codes of 0, .5, 1, 1.5 and of 2, 3, 4, 6, all times 2**-5, lowest byte first; 8 more is twice as much.
_E4M3_LOW, _E4M3_HIGH = 0x14100800, 0x24201C18

_HALVES = np.uint32(0xFFFF)


def spread(groups: Sequence[Array], width: int) -> Array:
    """Tiles (rows,), n of them, a power of two -> (rows, n * width), each constant over its ``width`` columns."""
    tile = _interleaved(groups)
    tile = jnp.broadcast_to(tile[..., None], (*tile.shape, width))
    return tile.reshape(groups[0].shape[0], len(groups) * width)


def _interleaved(tiles: Sequence[Array]) -> Array:
    if len(tiles) == 1:
        return tiles[0]
    return lowering.join(_interleaved(tiles[0::2]), _interleaved(tiles[1::2]))


def beside(tiles: Sequence[Array], run: int) -> Array:
    """Tiles (rows, m * run), n of them -> (rows, n * m * run): the first run of each, then the second of each, ..."""
    if len(tiles) == 1:
        return tiles[0]
    half, unit = len(tiles) // 2, run * len(tiles) // 2
    a, b = (beside(part, run) for part in (tiles[:half], tiles[half:]))
    a, b = (t.reshape(t.shape[0], -1, unit) for t in (a, b))
    return jnp.transpose(lowering.join(a, b), (0, 1, 3, 2)).reshape(a.shape[0], -1)


def fold(w: Array, exponent: Array, live: Array, run: int) -> Array:
    """e4m3 values of e2m1 codes times 2**(exponent - 5), exactly.

    Args:
      w: uint8 (rows, h).
      exponent: uint32, four bytes of eight times a number from 0 to 11.
      live: uint32, ``MAGNITUDES`` or 0.
      run: 0 or 1.
    """
    return lowering.packed_ptx(w, _FOLD[run], _fold_ptx(run), exponent, live, pack=4, dtype=F8)


@functools.cache
def _fold_ptx(run: int) -> str:
    """Seven instructions for four weights, three of them alike for a group.

    A byte permutation looks up four magnitudes at once, by four nibbles, in a table of eight bytes; the seven that are
    not zero have had the exponent added.
    """
    lines = [
        "{",
        ".reg .b32 a, b, m, v, t;",
        f"add.u32 b, $2, {_E4M3_HIGH:#x};",
        f"mad.lo.u32 a, $2, 256, {_E4M3_LOW:#x};",  # not to the byte of zero
        "and.b32 m, $1, $6;",
        *(["shr.u32 m, m, 16;"] if run else []),
        "prmt.b32 v, a, b, m;",
        "shl.b32 t, $1, 4;" if run else "mov.b32 t, $1;",
        "lop3.b32 $0, v, t, 0x80808080, 0xF8;",  # v | (t & 0x80808080)
        "}",
    ]
    return "\n".join(lines)


def _fold_meaning(w: Array, exponent: Array, live: Array, *, run: int) -> Array:
    word, exponent, live = _words(w, 4), exponent[:, ::4], live[:, ::4]
    low = exponent * np.uint32(256) + np.uint32(_E4M3_LOW)
    high = exponent + np.uint32(_E4M3_HIGH)
    magnitude = word & live
    if run:
        magnitude, word = magnitude >> np.uint32(16), word << np.uint32(4)
    result = word & np.uint32(0x80808080)
    for i in range(4):
        index = (magnitude >> np.uint32(4 * i)) & np.uint32(7)
        half = jnp.where(index < 4, low, high)
        result = result | ((half >> (8 * (index & np.uint32(3)))) & np.uint32(0xFF)) << np.uint32(8 * i)
    return _parts(result, jnp.uint8, F8)


_FOLD = tuple(functools.partial(_fold_meaning, run=run) for run in range(2))


def e2m1(w: Array, scale: Array, run: int) -> Array:
    """bfloat16 values of e2m1 codes times ``scale`` times 2**-126, rounded once.

    Args:
      w: uint16 (rows, h).
      scale: uint32, a bfloat16 in each half.
      run: 0 to 3.
    """
    return lowering.packed_ptx(w, _E2M1[run], _e2m1_ptx(run), scale, pack=2, dtype=jnp.bfloat16)


@functools.cache
def _e2m1_ptx(run: int) -> str:
    """Brings sign and magnitude to bits 15 and 8 to 6 of each half, which make the bfloat16 subnormal 2**-126 e2m1."""
    place = (
        # (t & 0x00400040) | a
        ["and.b32 a, $1, 0x81808180;", "shr.u32 t, $1, 8;", "lop3.b32 a, t, 0x00400040, a, 0xEA;"],
        ["shl.b32 a, $1, 6;", "and.b32 a, a, 0x81C081C0;"],
        ["shf.l.wrap.b32 a, $1, $1, 12;", "and.b32 a, a, 0x81C081C0;"],
        ["shl.b32 a, $1, 2;", "and.b32 a, a, 0x81C081C0;"],
    )[run]
    # A product is a fused multiply-add to -0, since GPUs before Hopper have no other for bfloat16.
    product = ["mov.b32 z, 0x80008000;", "fma.rn.bf16x2 $0, a, $2, z;"]
    return "\n".join(["{", ".reg .b32 a, t, z;", *place, *product, "}"])


def _e2m1_meaning(w: Array, scale: Array, *, run: int) -> Array:
    word = _words(w, 2)
    placed = (
        (word & np.uint32(0x81808180)) | ((word >> np.uint32(8)) & np.uint32(0x00400040)),
        word << np.uint32(6),
        word << np.uint32(12) | word >> np.uint32(20),
        word << np.uint32(2),
    )[run]
    half = _parts(placed, jnp.uint16)
    # By value, since subnormals may be flushed here.
    value = bits.e2m1_decode(((half >> np.uint16(6)) & np.uint16(7)) | ((half >> np.uint16(12)) & np.uint16(8)))
    negative = half >= np.uint16(0x8000)
    value = jnp.where(negative, -jnp.abs(value), value)
    return (value * (_low_half(scale) * np.float32(2.0**-126))).astype(jnp.bfloat16)


_E2M1 = tuple(functools.partial(_e2m1_meaning, run=run) for run in range(4))


def int4(w: Array, zero: Array, scales: Sequence[Array], run: int) -> Array:
    """bfloat16 (code - zero) * scale * 2**INT4_SHIFT, rounded once but for the last scale's product.

    Args:
      w: uint16 (rows, h).
      zero: uint32, the bfloat16 -zero * 2**INT4_SHIFT in each half.
      scales: tiles of uint32, a bfloat16 in each half, whose sum is the scale; up to two, none is a scale of 1.
      run: 0 to 3.
    """
    meaning, ptx = _INT4[len(scales)][run], _int4_ptx(run, len(scales))
    return lowering.packed_ptx(w, meaning, ptx, zero, *scales, pack=2, dtype=jnp.bfloat16)


@functools.cache
def _int4_ptx(run: int, scales: int) -> str:
    """A code in the lowest mantissa bits is a bfloat16 subnormal, code * 2**-133, or 2**-129 four bits further up."""
    odd, difference = run % 2, "$0" if scales == 0 else "d"
    lines = [
        "{",
        ".reg .b32 a, d, p, z;",
        *(["shr.u32 a, $1, 8;"] if run >= 2 else []),
        f"and.b32 a, {'a' if run >= 2 else '$1'}, {'0x00F000F0' if odd else '0x000F000F'};",
        f"mov.b32 p, {'0x7D007D00' if odd else '0x7F007F00'};",  # 2**123 or 2**127
        f"fma.rn.bf16x2 {difference}, a, p, $2;",
    ]
    if scales:
        lines.append("mov.b32 z, 0x80008000;")
    if scales == 2:
        lines.append("fma.rn.bf16x2 z, d, $6, z;")
    if scales:
        lines.append("fma.rn.bf16x2 $0, d, $4, z;")
    return "\n".join([*lines, "}"])


def _int4_meaning(w: Array, zero: Array, *scales: Array, run: int) -> Array:
    code = _parts((_words(w, 2) >> np.uint32(4 * run)) & np.uint32(0x000F000F), jnp.uint16)
    value = code.astype(jnp.float32) * np.float32(2.0**INT4_SHIFT) + _low_half(zero)
    if len(scales) == 2:
        rest = (value * _low_half(scales[1])).astype(jnp.bfloat16).astype(jnp.float32)
        value = value * _low_half(scales[0]) + rest
    elif scales:
        value = value * _low_half(scales[0])
    return value.astype(jnp.bfloat16)


_INT4 = tuple(tuple(functools.partial(_int4_meaning, run=run) for run in range(4)) for _ in range(3))


def twice(value: Array) -> Array:
    """The bfloat16 nearest to float32 ``value``, in both halves of a uint32."""
    return pair(lowering.round_to(value, jnp.bfloat16))


def pair(value: Array) -> Array:
    """The upper half of float32 ``value``, a bfloat16 if the lower one is zero, in both halves of a uint32."""
    return (lax.bitcast_convert_type(value, jnp.uint32) >> np.uint32(16)) * np.uint32(0x10001)


def _low_half(word: Array) -> Array:
    return lax.bitcast_convert_type((word & _HALVES) << np.uint32(16), jnp.float32)


def _words(parts: Array, n: int) -> Array:
    """Each n neighbours of (rows, h), bytes or 16 bits, as a uint32 (rows, h/n)."""
    parts = parts.reshape(parts.shape[0], -1, n).astype(jnp.uint32)
    return functools.reduce(jnp.bitwise_or, [parts[..., i] << np.uint32(32 // n * i) for i in range(n)])


def _parts(word: Array, part: Any, dtype: Any | None = None) -> Array:
    """Inverse of ``_words``, as bits of ``dtype``."""
    n = 4 // jnp.dtype(part).itemsize
    parts = jnp.stack([(word >> np.uint32(32 // n * i)).astype(part) for i in range(n)], axis=-1)
    parts = parts.reshape(word.shape[0], -1)
    return parts if dtype is None else lax.bitcast_convert_type(parts, dtype)
