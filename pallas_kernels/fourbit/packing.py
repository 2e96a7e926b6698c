"""How four-bit weights lie for the kernels: codes so that unpacking needs no shuffle, scales as words along rows.

**Codes.** Tiles of 64 rows and 128 columns are contiguous, 4 KiB each, first all tiles of 64 rows along K. An element
(a byte for e4m3 operands, two for bfloat16 ones) holds one code of each of the tile's two or four runs of columns: run
j is the j-th 64 or 32 columns. Neighbouring elements make a 32-bit word, in which every code's bits lie where few
instructions on the whole word bring them to their place in the operand.

**Scales** are 32-bit words of one, two or four groups of a row, (words, rows), so that a program's rows are read side
by side. e8m0 exponents are held relative to their row's largest, which makes them ready to be added to an operand's
exponent; the row's own follows in a last word. So are those of bfloat16 scales that symmetric int4 codes are to be
multiplied by as subnormals: the largest is then the largest that there is.

``unpack`` gives back what ``pack`` was given, bit by bit.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import bits

ROWS = 64
"""Rows of a tile."""

COLUMNS = 128
"""Columns of a tile."""

FOLDED = 12
"""Consecutive exponents that e4m3's own takes in exactly with every e2m1 code."""

_SCALE_BITS = {"e8m0": 8, "e4m3": 16, "bfloat16": 16, "float16": 16, "float32": 32}
"""Bits that a group's scale takes in a word; e4m3 is held as a bfloat16."""

E4M3_SHIFT = 119
"""Powers of two by which e4m3 scales are held too large, so that their product with a subnormal code is a normal."""


class Packed(NamedTuple):
    """Arrays of a packed weight, in a kernel refs; leading axes are batches.

    Attributes:
      data: (..., N/64, K/128 * 64 * elements), uint8 or uint16; both extents rounded up.
      scale: uint32 (..., words, N rounded up to 64).
      zero_point: uint32, likewise, four groups a word; or None.
      global_scale: float32 (..., 1 or N, 1), as it came; or None.
    """

    data: Any
    scale: Any
    zero_point: Any | None = None
    global_scale: Any | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """How a weight (N, K) is packed.

    Attributes:
      codes: "e2m1", or "int4" (unsigned, less 8 or less a zero point).
      operand: what the kernel makes of them, "bfloat16" or "e4m3".
      scale: "e8m0" or "e4m3" of e2m1 codes, "bfloat16", "float16" or "float32" of int4.
      group: columns that share a scale, or -1 for all of K.
      zero_point: int4 codes have one a group.
      n, k: rows and columns.
    """

    codes: Literal["e2m1", "int4"]
    operand: Literal["bfloat16", "e4m3"]
    scale: str
    group: int
    n: int
    k: int
    zero_point: bool = False

    @property
    def runs(self) -> int:
        """Codes in an element, which belong to as many runs of columns."""
        return 2 if self.operand == "e4m3" else 4

    @property
    def run(self) -> int:
        """Columns of a run: elements of a tile's row."""
        return COLUMNS // self.runs

    @property
    def neighbours(self) -> int:
        """Elements of a word."""
        return 8 // self.runs

    @property
    def row_tiles(self) -> int:
        return -(-self.n // ROWS)

    @property
    def column_tiles(self) -> int:
        return -(-self.k // COLUMNS)

    @property
    def row_elements(self) -> int:
        """Elements of a row of tiles."""
        return self.column_tiles * ROWS * self.run

    @property
    def groups(self) -> int:
        """Groups of a row, without those of padding."""
        return 1 if self.group == -1 else -(-self.k // self.group)

    @property
    def has_row_word(self) -> bool:
        """Whether scales' exponents are held relative to their row's, which a last word has."""
        return self.scale == "e8m0" or self.scaled_codes

    @property
    def scaled_codes(self) -> bool:
        """Whether int4 codes become weights by one multiply-add each, see ``decode.scaled_int4``."""
        return self.codes == "int4" and self.scale == "bfloat16" and self.group != -1 and not self.zero_point

    @property
    def groups_a_word(self) -> int:
        return 32 // _SCALE_BITS[self.scale]

    @property
    def words(self) -> int:
        """Words of a row's scales, without the row's own."""
        return -(-self.padded_groups // self.groups_a_word)

    @property
    def words_a_tile(self) -> int:
        """Words of scales and zero points that go with a row of a tile, at least one."""
        groups = COLUMNS // self.group if 0 < self.group < COLUMNS else 1
        return -(-groups // self.groups_a_word) + (-(-groups // 4) if self.zero_point else 0)

    @property
    def padded_groups(self) -> int:
        """Groups of a row, with those of padding."""
        return 1 if self.group == -1 else -(-self.column_tiles * COLUMNS // self.group)

    @property
    def folds(self) -> bool:
        """Whether scales go into the exponent of an e4m3 operand."""
        return self.operand == "e4m3" and self.scale == "e8m0"

    @property
    def expanded_bytes(self) -> int:
        """Bytes of e4m3 codes, and a float32 scale a row, that it would be expanded to."""
        return self.n * (self.k + 4)

    @property
    def held_top(self) -> int:
        """What a row's largest exponent is held as: bfloat16's largest, or the last of those that e4m3 takes in."""
        return FOLDED - 1 if self.folds else 254

    def takes(self, dtype: Any) -> bool:
        """Whether x may be of that dtype: the operand's, or int4's also codes, which bfloat16 holds exactly."""
        if self.operand == "e4m3":
            return dtype == jnp.float8_e4m3fn
        return dtype == jnp.bfloat16 or (self.codes == "int4" and dtype in (jnp.float8_e4m3fn, jnp.int8))

    @property
    def element(self) -> type:
        return jnp.uint8 if self.operand == "e4m3" else jnp.uint16


def supports_group(group: int) -> bool:
    """Whether groups of so many columns can be packed: 16, 32 or 64, a multiple of 128, or all of K."""
    return group in (-1, 16, 32, 64) or (group > 0 and group % COLUMNS == 0)


@functools.cache
def _places(codes: str, operand: str) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Where bit b of run j's code in neighbour i lies in a word: ``[j][i][b]``.

    e2m1 for e4m3: a byte permutation looks up the magnitudes of four neighbours by four consecutive nibbles, and signs
    lie at the top of each byte, or four bits below. e2m1 for bfloat16: run 0 needs two masks and a shift, the others a
    shift or rotation of the word, to have the sign at bit 15 and the magnitude at bits 6 to 8 of each half. int4: the
    nibble j of each half.
    """
    if codes == "int4":
        return tuple(tuple(tuple(16 * i + 4 * j + b for b in range(4)) for i in range(2)) for j in range(4))
    if operand == "e4m3":
        return tuple(
            tuple((*(16 * j + 4 * i + b for b in range(3)), 8 * i + 7 - 4 * j) for i in range(4)) for j in range(2)
        )
    half = [(14, 7, 8, 15), (0, 1, 2, 9), (26, 27, 28, 3), (4, 5, 6, 13)]
    return tuple(tuple(tuple((p + 16 * i) % 32 for p in places) for i in range(2)) for places in half)


def pack(data: Array, scale: Array, zero_point: Array | None, global_scale: Array | None, packing: Packing) -> Packed:
    """Packs canonical arrays.

    Args:
      data: uint8 (..., N, ceil(K/2)), two codes a byte, the even one low.
      scale: (..., N, groups), of the dtype that ``packing`` says (e8m0: uint8).
      zero_point: uint8, of scale's shape, exactly where ``packing`` has one.
      global_scale: float32 (..., 1 or N, 1), exactly where scales are e4m3.
      packing: how.
    """
    # The padding nibble of an odd row, too: it comes back.
    codes = bits.unpack_nibbles(data, 2 * data.shape[-1])
    words = _words_of_scales(codes, scale, packing)
    zeros = None if zero_point is None else _as_words(zero_point.astype(jnp.uint32), 4, packing)
    return Packed(_pack_codes(codes, packing), words, zeros, global_scale)


def unpack(packed: Packed, packing: Packing) -> tuple[Array, Array, Array | None]:
    """The canonical data, scale and zero point."""
    data = bits.pack_nibbles(_unpack_codes(packed.data, packing))
    zeros = packed.zero_point
    return data, _scales_of_words(packed.scale, packing), None if zeros is None else _from_words(zeros, 4, packing)


def rows_beyond(codes: Array, scale: Array) -> Array:
    """Which rows of e2m1 weights have exponents that e4m3's cannot all take in, so that a row needs several passes.

    Args:
      codes: uint8 (..., N, K), values 0 to 15.
      scale: uint8 (..., N, ceil(K/32)), e8m0.

    Returns:
      bool (..., N).
    """
    packing = Packing(codes="e2m1", operand="e4m3", scale="e8m0", group=32, n=codes.shape[-2], k=codes.shape[-1])
    return _passes(codes, scale.astype(jnp.int32), packing) > 1


def _pack_codes(codes: Array, packing: Packing) -> Array:
    *batch, n, k = codes.shape
    padding = [(0, 0)] * len(batch) + [(0, -n % ROWS), (0, -k % COLUMNS)]
    p, elements = packing, packing.run // packing.neighbours
    shape = (*batch, p.row_tiles, ROWS, p.column_tiles, p.runs, elements, p.neighbours)
    parts = jnp.pad(codes, padding).reshape(shape)
    parts = jnp.swapaxes(parts, -5, -4)
    word = jnp.zeros((*parts.shape[:-3], elements), jnp.uint32)
    for j, places in enumerate(_places(p.codes, p.operand)):
        for i, positions in enumerate(places):
            word = word | _moved(parts[..., j, :, i].astype(jnp.uint32), range(4), positions)
    packed = lax.bitcast_convert_type(word, p.element)
    return packed.reshape(*batch, p.row_tiles, p.row_elements)


def _unpack_codes(data: Array, packing: Packing) -> Array:
    p, batch = packing, data.shape[:-2]
    elements = p.run // p.neighbours
    shape = (*batch, p.row_tiles, p.column_tiles, ROWS, elements, p.neighbours)
    word = lax.bitcast_convert_type(data.reshape(shape), jnp.uint32)
    runs = [
        jnp.stack([_moved(word, positions, range(4)) for positions in places], axis=-1)
        for places in _places(p.codes, p.operand)
    ]
    parts = jnp.swapaxes(jnp.stack(runs, axis=-3), -5, -4)
    codes = parts.reshape(*batch, p.row_tiles * ROWS, p.column_tiles * COLUMNS)
    return codes[..., : p.n, : p.k + p.k % 2].astype(jnp.uint8)


def _moved(word: Array, sources: Sequence[int], targets: Sequence[int]) -> Array:
    """Bits ``sources`` of uint32 words at places ``targets``; bits that move equally far go together."""
    masks: dict[int, int] = {}
    for source, target in zip(sources, targets, strict=True):
        masks[target - source] = masks.get(target - source, 0) | 1 << source
    moved = jnp.zeros(word.shape, jnp.uint32)
    for distance, mask in masks.items():
        part = word & np.uint32(mask)
        moved = moved | (part << np.uint32(distance) if distance >= 0 else part >> np.uint32(-distance))
    return moved


def _as_words(values: Array, a_word: int, packing: Packing) -> Array:
    """uint32 (..., N, groups) of 32 / a_word bits each as words (..., words, rows), with zeros for padding."""
    *batch, n, groups = values.shape
    whole = -(-packing.padded_groups // a_word) * a_word
    values = jnp.pad(values, [(0, 0)] * len(batch) + [(0, -n % ROWS), (0, whole - groups)])
    values = values.reshape(*batch, values.shape[-2], whole // a_word, a_word)
    shifts = np.arange(a_word, dtype=np.uint32) * np.uint32(32 // a_word)
    words = functools.reduce(jnp.bitwise_or, [values[..., i] << shifts[i] for i in range(a_word)])
    return jnp.swapaxes(words, -1, -2)


def _from_words(words: Array, a_word: int, packing: Packing) -> Array:
    """Inverse of ``_as_words``, as the unsigned integers of 32 / a_word bits."""
    size = 32 // a_word
    shifts = np.arange(a_word, dtype=np.uint32) * np.uint32(size)
    values = jnp.swapaxes(words, -1, -2)[..., None] >> shifts
    values = values.reshape(*values.shape[:-2], -1)[..., : packing.n, : packing.groups]
    return values.astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[size])


def _words_of_scales(codes: Array, scale: Array, packing: Packing) -> Array:
    if packing.scaled_codes:
        held, top = _relative(_scale_bits(scale).astype(jnp.int32))
        return _with_row(_as_words(held.astype(jnp.uint32), packing.groups_a_word, packing), top, packing)
    if packing.scale != "e8m0":
        return _as_words(_scale_bits(scale).astype(jnp.uint32), packing.groups_a_word, packing)
    exponent = scale.astype(jnp.int32)
    top = _top(codes, exponent, packing)
    held = (exponent - top[..., None] + packing.held_top) & 0xFF
    row = top | (_passes(codes, exponent, packing) if packing.folds else 1) << 8
    return _with_row(_as_words(held.astype(jnp.uint32), packing.groups_a_word, packing), row, packing)


def _with_row(words: Array, row: Array, packing: Packing) -> Array:
    """Words of scales with those of their rows below; rows of padding have exponent 0 and need one pass."""
    row = jnp.pad(row, [(0, 0)] * (row.ndim - 1) + [(0, -packing.n % ROWS)], constant_values=1 << 8)
    return jnp.concatenate([words, row.astype(jnp.uint32)[..., None, :]], axis=-2)


def _relative(half: Array) -> tuple[Array, Array]:
    """bfloat16 bits (int32), the row's largest exponent made 254 and others as much larger; and what it was.

    Zeros and subnormals stay, and so do infinities and NaN.
    """
    exponent = (half >> 7) & 0xFF
    finite = exponent < 255
    top = jnp.max(jnp.where(finite, jnp.maximum(exponent, 1), 1), axis=-1)
    moves = finite & (exponent > 0)
    return jnp.where(moves, half + ((254 - top[..., None]) << 7), half), top


def _absolute(held: Array, top: Array) -> Array:
    """Inverse of ``_relative``."""
    exponent = (held >> 7) & 0xFF
    return jnp.where((exponent > 0) & (exponent < 255), held - ((254 - top[..., None]) << 7), held)


def _scales_of_words(words: Array, packing: Packing) -> Array:
    if packing.scale == "e8m0":
        top = (words[..., -1, : packing.n] & 0xFF).astype(jnp.int32)[..., None]
        held = _from_words(words[..., :-1, :], packing.groups_a_word, packing).astype(jnp.int32)
        return ((held + top - packing.held_top) & 0xFF).astype(jnp.uint8)
    if packing.scaled_codes:
        top = (words[..., -1, : packing.n] & 0xFF).astype(jnp.int32)
        held = _from_words(words[..., :-1, :], packing.groups_a_word, packing).astype(jnp.int32)
        return lax.bitcast_convert_type(_absolute(held, top).astype(jnp.uint16), jnp.bfloat16)
    held = _from_words(words, packing.groups_a_word, packing)
    if packing.scale == "e4m3":
        codes = jnp.take(_e4m3_of_words(), held.astype(jnp.int32))
        return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(held, jnp.dtype(packing.scale))


def _scale_bits(scale: Array) -> Array:
    """The bits of a scale that is no e8m0; those of an e4m3 one as a bfloat16."""
    if scale.dtype == jnp.float8_e4m3fn:
        return jnp.take(_words_of_e4m3(), lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32))
    return lax.bitcast_convert_type(scale, {2: jnp.uint16, 4: jnp.uint32}[scale.dtype.itemsize])


@functools.cache
def _words_of_e4m3() -> np.ndarray:
    """Each e4m3 code's value times 2**E4M3_SHIFT as bits of a bfloat16, uint16 (256,)."""
    values = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    return (values * np.float32(2.0**E4M3_SHIFT)).astype(jnp.bfloat16).view(np.uint16)


@functools.cache
def _e4m3_of_words() -> np.ndarray:
    """Inverse of ``_words_of_e4m3``, uint8 (65536,)."""
    codes = np.zeros(1 << 16, np.uint8)
    codes[_words_of_e4m3()] = np.arange(256, dtype=np.uint8)
    return codes


def _counts(codes: Array, exponent: Array, packing: Packing) -> Array:
    """Which groups' exponents count: in bfloat16 all, in e4m3 those of groups with a code other than zero, and NaN."""
    if packing.operand == "bfloat16":
        return jnp.ones(exponent.shape, bool)
    *batch, groups = exponent.shape
    padding = [(0, 0)] * len(batch) + [(0, groups * packing.group - codes.shape[-1])]
    grouped = jnp.pad(codes & 7, padding).reshape(*batch, groups, packing.group)
    return jnp.any(grouped > 0, axis=-1) | (exponent == bits.E8M0_NAN)


def _top(codes: Array, exponent: Array, packing: Packing) -> Array:
    """The largest exponent that counts in each row, 0 where none does."""
    return jnp.max(jnp.where(_counts(codes, exponent, packing), exponent, 0), axis=-1)


def _passes(codes: Array, exponent: Array, packing: Packing) -> Array:
    """Passes that each row needs for e4m3 to take in all its exponents that count; one where one is NaN."""
    top = _top(codes, exponent, packing)
    below = jnp.where(_counts(codes, exponent, packing), top[..., None] - exponent, 0)
    return jnp.where(top == bits.E8M0_NAN, 1, 1 + jnp.max(below, axis=-1) // FOLDED)
