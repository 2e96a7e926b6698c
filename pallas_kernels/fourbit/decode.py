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

E4M3_ONE = 5
"""``exponent`` with which ``fold`` leaves e2m1 values as they are."""

INT4_SHIFT = -6
"""Powers of two that ``int4`` leaves in its result."""

SCALED_INT4_SHIFT = -133
"""Powers of two that ``scaled_int4`` leaves in its result."""

INT4_OFFSET = 8
"""What symmetric codes are held too large by."""

# e4m3 codes of 0, .5, 1, 1.5 and of 2, 3, 4, 6, all times 2**-5, lowest byte first; 8 more is twice as much.
_E4M3_LOW, _E4M3_HIGH = 0x14100800, 0x24201C18

_HALVES = np.uint32(0xFFFF)


def spread(groups: Sequence[Array], width: int) -> Array:
    """Tiles (rows,), n of them, a power of two -> (rows, n * width), each constant over its ``width`` columns."""
    if len(groups) == 1:
        # Joined with itself: Triton takes the dot's own layout back through a join, and so to the words that are
        # loaded, but not through a tile alone, whose unpacked weights it would write to shared memory and read again.
        groups, width = [*groups, *groups], width // 2
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


def four_times(word: Array, byte: int) -> Array:
    """One byte of each uint32, in all four."""
    return lowering.packed_ptx(
        word, _FOUR[byte], f"prmt.b32 $0, $1, $1, 0x{byte:x}{byte:x}{byte:x}{byte:x};", pack=1, dtype=jnp.uint32
    )


def _four_meaning(word: Array, *, byte: int) -> Array:
    return ((word >> np.uint32(8 * byte)) & np.uint32(0xFF)) * np.uint32(0x01010101)


_FOUR = tuple(functools.partial(_four_meaning, byte=byte) for byte in range(4))


def fold(w: Array, exponent: Array, run: int, live: Array | None = None) -> Array:
    """e4m3 values of e2m1 codes times 2**(exponent - 5), exactly.

    Args:
      w: uint8 (rows, h).
      exponent: uint32, four bytes of a number from 0 to 11.
      run: 0 or 1.
      live: uint32, ``MAGNITUDES`` or 0; None is the former. A constant tile beside w would cost the dot its pipeline.
    """
    others = [exponent] if live is None else [exponent, live]
    ptx = _fold_ptx(run, masked=live is not None)
    return lowering.packed_ptx(w, _FOLD[run], ptx, *others, pack=4, dtype=F8)


@functools.cache
def _fold_ptx(run: int, *, masked: bool) -> str:
    """Seven instructions for four weights, three of them alike for a group.

    A byte permutation looks up four magnitudes at once, by four nibbles, in a table of eight bytes; the seven that are
    not zero have had the exponent added.
    """
    lines = [
        "{",
        ".reg .b32 a, b, m, v, t;",
        f"mad.lo.u32 b, $2, 8, {_E4M3_HIGH:#x};",
        f"mad.lo.u32 a, $2, 2048, {_E4M3_LOW:#x};",  # not to the byte of zero
        f"and.b32 m, $1, {'$6' if masked else hex(MAGNITUDES)};",
        *(["shr.u32 m, m, 16;"] if run else []),
        "prmt.b32 v, a, b, m;",
        "shl.b32 t, $1, 4;" if run else "mov.b32 t, $1;",
        "lop3.b32 $0, v, t, 0x80808080, 0xF8;",  # v | (t & 0x80808080)
        "}",
    ]
    return "\n".join(lines)


def _fold_meaning(w: Array, exponent: Array, live: Array | None = None, *, run: int) -> Array:
    word, exponent = _words(w, 4), exponent[:, ::4]
    low = exponent * np.uint32(2048) + np.uint32(_E4M3_LOW)
    high = exponent * np.uint32(8) + np.uint32(_E4M3_HIGH)
    magnitude = word & (np.uint32(MAGNITUDES) if live is None else live[:, ::4])
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


def int4(w: Array, zero: Array | None, scales: Sequence[Array], run: int) -> Array:
    """bfloat16 (code - zero) * scale * 2**INT4_SHIFT, rounded once but for the last scale's product.

    Args:
      w: uint16 (rows, h).
      zero: uint32, the bfloat16 -zero * 2**INT4_SHIFT in each half; None is a zero of ``INT4_OFFSET``.
      scales: tiles of uint32, a bfloat16 in each half, whose sum is the scale; up to two, none is a scale of 1.
      run: 0 to 3.
    """
    others = [*([] if zero is None else [zero]), *scales]
    meaning, ptx = _INT4[zero is not None][run], _int4_ptx(run, len(scales), given=zero is not None)
    return lowering.packed_ptx(w, meaning, ptx, *others, pack=2, dtype=jnp.bfloat16)


def _int4_code_ptx(run: int) -> list[str]:
    """A code in the lowest mantissa bits is a bfloat16 subnormal, code * 2**-133, or 2**-129 four bits further up."""
    shift = ["shr.u32 a, $1, 8;"] if run >= 2 else []
    return [*shift, f"and.b32 a, {'a' if shift else '$1'}, {'0x00F000F0' if run % 2 else '0x000F000F'};"]


@functools.cache
def _int4_ptx(run: int, scales: int, *, given: bool) -> str:
    difference, first = "d" if scales else "$0", 4 if given else 2
    lines = [
        "{",
        ".reg .b32 a, d, o, p, z;",
        *_int4_code_ptx(run),
        f"mov.b32 p, {'0x7D007D00' if run % 2 else '0x7F007F00'};",  # 2**123 or 2**127
        "mov.b32 o, $2;" if given else "mov.b32 o, 0xBE00BE00;",  # -8 * 2**-6
        f"fma.rn.bf16x2 {difference}, a, p, o;",
    ]
    if scales:
        lines.append("mov.b32 z, 0x80008000;")
    if scales == 2:
        lines.append(f"fma.rn.bf16x2 z, d, ${first + 2}, z;")
    if scales:
        lines.append(f"fma.rn.bf16x2 $0, d, ${first}, z;")
    return "\n".join([*lines, "}"])


def _int4_meaning(w: Array, *others: Array, run: int, given: bool) -> Array:
    zero = _low_half(others[0]) if given else np.float32(-INT4_OFFSET * 2.0**INT4_SHIFT)
    scales = others[1:] if given else others
    value = _int4_code(w, run) * np.float32(2.0**INT4_SHIFT) + zero
    if len(scales) == 2:
        rest = (value * _low_half(scales[1])).astype(jnp.bfloat16).astype(jnp.float32)
        value = value * _low_half(scales[0]) + rest
    elif scales:
        value = value * _low_half(scales[0])
    return value.astype(jnp.bfloat16)


def _int4_code(w: Array, run: int) -> Array:
    return _parts((_words(w, 2) >> np.uint32(4 * run)) & np.uint32(0x000F000F), jnp.uint16).astype(jnp.float32)


_INT4 = tuple(tuple(functools.partial(_int4_meaning, run=run, given=g) for run in range(4)) for g in (False, True))


def scaled_int4(w: Array, scale: Array, run: int) -> Array:
    """bfloat16 (code - INT4_OFFSET) * scale * 2**SCALED_INT4_SHIFT, rounded once.

    Args:
      w: uint16 (rows, h).
      scale: uint32, a bfloat16 in each half.
      run: 0 to 3.
    """
    return lowering.packed_ptx(w, _SCALED[run], _scaled_int4_ptx(run), scale, pack=2, dtype=jnp.bfloat16)


@functools.cache
def _scaled_int4_ptx(run: int) -> str:
    """One multiply-add a weight: eight scales are a bfloat16 too, and alike for a group, as is the scale's 16th."""
    lines = [
        "{",
        ".reg .b32 a, c, k, s, z;",
        *_int4_code_ptx(run),
        "mov.b32 z, 0x80008000;",
        "mov.b32 k, 0x80088008;",  # -8 * 2**-133
        "fma.rn.bf16x2 c, $2, k, z;",
        *(["mov.b32 s, 0x3D803D80;", "fma.rn.bf16x2 s, $2, s, z;"] if run % 2 else ["mov.b32 s, $2;"]),  # 2**-4
        "fma.rn.bf16x2 $0, a, s, c;",
        "}",
    ]
    return "\n".join(lines)


def _scaled_int4_meaning(w: Array, scale: Array, *, run: int) -> Array:
    half = np.float32(2.0 ** (SCALED_INT4_SHIFT / 2 - 0.5)), np.float32(2.0 ** (SCALED_INT4_SHIFT / 2 + 0.5))
    value = (_int4_code(w, run) - INT4_OFFSET) * (_low_half(scale) * half[0])
    return (value * half[1]).astype(jnp.bfloat16)


_SCALED = tuple(functools.partial(_scaled_int4_meaning, run=run) for run in range(4))


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
