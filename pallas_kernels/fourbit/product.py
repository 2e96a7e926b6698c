"""Sums over K of packed four-bit weights times rows of x, with the weights on the tensor core's left, from registers.

Packed words go from memory through shared memory into the registers of the dot's left operand, where a few
instructions make e4m3 or bfloat16 of them; nothing unpacked is stored, and as few as 16 rows of x fill the right one.

e2m1 codes with e8m0 scales become e4m3 with the scale in the exponent, relative to the row's largest: exact for twelve
consecutive exponents. Rows that span more go through K in several passes, each of which takes in the next twelve, from
the smallest up, so that one accumulator serves. How many is known from the row's last word, which a program asks when
it has gone through K as if one were enough: nothing waits for the answer, and if one was not it starts again.

int4 codes less their zero point, and codes of x, are exact in bfloat16, so where they meet, scales multiply the sum of
each group.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import bits, body, lowering
from pallas_kernels.fourbit import decode
from pallas_kernels.fourbit.packing import COLUMNS, E4M3_SHIFT, FOLDED, ROWS, Packed, Packing
from pallas_kernels.lowering import arange, load
from pallas_kernels.tuning.heuristics import MatmulTile


class Part(NamedTuple):
    """Rows of w that one accumulator belongs to: the indices of its matrix, and ``block_n`` rows of it.

    Rows past the end are any that exist; their sums mean nothing. Rows of several matrices have an index each.
    """

    matrix: tuple[Any, ...]
    rows: Array


class Step(NamedTuple):
    """Static facts of a program's sums."""

    packing: Packing
    tile: MatmulTile
    exact: bool


def sums(
    x: Any, row: Array, w: Packed, parts: Sequence[Part], step: Step, *, share: Array | None = None
) -> list[Array]:
    """In a kernel: the float32 sum over K of each part, (rows of w, rows of x), without ``row_scale`` and x's scales.

    Args:
      x: ref (R, K), of a dtype that ``packing.takes``.
      row: int32 (block_m,), rows of x.
      w: refs, with as many axes in front as a part has indices.
      parts: of the program, with ``block_n`` rows each.
      step: static facts.
      share: which of ``split_k`` shares of K; None is all of it.
    """
    packing, tile, _ = step
    if _scales_sums(x, packing):
        tile = replace(tile, block_k=COLUMNS)
        step = step._replace(tile=tile)
    total = [jnp.zeros((tile.block_n, tile.block_m), jnp.float32)] * len(parts)
    count = _steps_a_share(packing, tile) if share is not None else pl.cdiv(packing.k, tile.block_k)
    first = 0 if share is None else share * count

    def advance(i: Array, total: list[Array]) -> list[Array]:
        return _step(x, row, w, parts, step, i if share is None else first + i, total)

    # A loop that might have no turn would wait for every product: its sums could be the zeros that it begins with.
    found = lowering.loop(count, advance, total)
    if not packing.folds:
        return found
    passes = passes_of(w, parts, packing)
    in_passes = functools.partial(_in_passes, x, row, w, parts, step, first, first + count, passes)
    return lax.cond(passes > 1, in_passes, lambda: found)


def if_many_exponents(
    x: Any, row: Array, w: Packed, parts: Sequence[Part], step: Step, finish: Callable[[list[Array]], None]
) -> None:
    """In a kernel: ``finish(sums)``, as ``sums`` are, where any row of the parts needs several passes, else nothing."""
    packing, tile, _ = step
    passes, last = passes_of(w, parts, packing), pl.cdiv(packing.k, tile.block_k)
    pl.when(passes > 1)(lambda: finish(_in_passes(x, row, w, parts, step, 0, last, passes)))


def row_scale(w: Packed, part: Part, packing: Packing) -> Array:
    """In a kernel: what a part's sums are to be multiplied by, float32, one a row of w."""
    if packing.scale == "e8m0":
        top = load(w.scale, (*part.matrix, packing.words, _word_column(part.rows, packing))) & np.uint32(0xFF)
        # A row's largest exponent is held as 11, which ``decode.fold`` makes 2**6, or as 254, 2**127 times 2**-126.
        return bits.e8m0_to_f32(top) * np.float32(2.0**-6 if packing.folds else 2.0**-1)
    if packing.scale == "e4m3":
        assert w.global_scale is not None
        one = w.global_scale.shape[-2] == 1
        row = jnp.zeros_like(part.rows) if one else jnp.minimum(part.rows, packing.n - 1)
        return load(w.global_scale, (*part.matrix, row, 0)) * np.float32(2.0 ** (126 - E4M3_SHIFT))
    if packing.scaled_codes:
        top = load(w.scale, (*part.matrix, packing.words, _word_column(part.rows, packing))) & np.uint32(0xFF)
        # 2**(top - 254) of what was held, and the shift; a scale beyond float32's makes infinities.
        exponent = jnp.minimum(top + np.uint32(127 - 254 - decode.SCALED_INT4_SHIFT), np.uint32(255))
        return lax.bitcast_convert_type(exponent << np.uint32(23), jnp.float32)
    power = np.float32(2.0**-decode.INT4_SHIFT)
    if packing.group != -1:
        return jnp.full(part.rows.shape, power, jnp.float32)
    return _as_float(load(w.scale, (*part.matrix, 0, _word_column(part.rows, packing))), packing) * power


def _scales_sums(x: Any, packing: Packing) -> bool:
    """Whether scales multiply sums over their groups: where x is of codes too, products of both are exact."""
    return packing.codes == "int4" and packing.group != -1 and x.dtype in body.CODES


def _row_tile(rows: Array, packing: Packing) -> Array:
    """The tile that rows of w lie in; those past the end lie in the last."""
    return jnp.minimum(body.div(rows, ROWS), packing.row_tiles - 1)


def _word_column(rows: Array, packing: Packing) -> Array:
    """Where words of scales lie along the rows of w."""
    return _row_tile(rows, packing) * ROWS + body.rem(rows, ROWS)


def passes_of(w: Packed, parts: Sequence[Part], packing: Packing) -> Array:
    """In a kernel: the most passes that any of a program's rows of w needs, int32."""
    words = [load(w.scale, (*p.matrix, packing.words, _word_column(p.rows, packing))) for p in parts]
    return functools.reduce(jnp.maximum, [jnp.max((word >> np.uint32(8)).astype(jnp.int32)) for word in words])


def _in_passes(
    x: Any,
    row: Array,
    w: Packed,
    parts: Sequence[Part],
    step: Step,
    first: Array | int,
    last: Array | int,
    passes: Array,
) -> list[Array]:
    """The sums over steps ``first`` to ``last`` of K of rows that need several passes.

    A pass adds the groups whose exponents are from 12 ``number`` to 12 ``number`` + 11 below their row's largest. It
    counts in units 2**12 larger than the pass before, whose sums it goes on from.
    """
    packing, tile, _ = step
    steps = tile.block_k // COLUMNS
    end = jnp.minimum(last * steps, packing.column_tiles)
    short = step._replace(tile=replace(tile, block_k=COLUMNS, split_k=1))

    def one_pass(part: Part, i: Array, total: list[Array]) -> list[Array]:
        total = [acc * np.float32(2.0**-FOLDED) for acc in total]
        # A compiler that knows these rows to be the first time's keeps dozens of addresses in registers since then.
        x_rows, again = lowering.anew((row, part), i)
        advance = functools.partial(_step, x, x_rows, w, [again], short, number=passes - 1 - i)
        return lowering.loop(end, advance, total, start=first * steps)

    # One part after the other: this seldom runs, and is not to need more registers than what always does.
    zero = [jnp.zeros((tile.block_n, tile.block_m), jnp.float32)]
    return [lowering.loop(passes, functools.partial(one_pass, part), zero)[0] for part in parts]


def _step(
    x: Any,
    row: Array,
    w: Packed,
    parts: Sequence[Part],
    step: Step,
    i: Array,
    total: list[Array],
    *,
    number: Array | None = None,
) -> list[Array]:
    """The accumulators after step ``i`` of K, of all groups or of those of pass ``number``."""
    return _add(_rights(x, row, step, i), _scales_sums(x, step.packing), w, parts, step, i, total, number=number)


_Right = tuple[range, Array]
"""Runs that go into one dot, and the columns of x that meet them."""


def _rights(x: Any, row: Array, step: Step, i: Array) -> list[_Right]:
    """The right operands of step ``i``'s dots.

    Where K does not end with the last step, every step has a mask: a last one of its own would wait for its loads.
    """
    packing = step.packing
    runs, masked = packing.runs, _steps(packing, step.tile) * step.tile.block_k != packing.k
    dots = COLUMNS // min(packing.group, COLUMNS) if _scales_sums(x, packing) else _dots(step)
    found = []
    for j in range(0, runs, runs // dots):
        among = range(j, j + runs // dots)
        column = columns_of_runs(packing, step.tile.block_k, i, j, len(among))
        valid = (column < packing.k)[None, :] if masked else None
        codes = load(x, (row[:, None], column[None, :]), mask=valid, other=0 if masked else None)
        found.append((among, body.as_operand(codes, body.F8 if packing.operand == "e4m3" else jnp.bfloat16)))
    return found


def _add(
    rights: Sequence[_Right],
    scaled: bool,
    w: Packed,
    parts: Sequence[Part],
    step: Step,
    i: Array,
    total: list[Array],
    *,
    number: Array | None = None,
) -> list[Array]:
    """``_step`` with its right operands at hand; ``scaled`` is that ``_scales_sums``."""
    packing, tile, exact = step
    operands = [Operands(w, part, packing, tile, i, number) for part in parts]
    promoted = exact and packing.operand == "e4m3"
    # Triton waits for each dot but the last of every accumulator, which run on into the next step: what that one begins
    # with, for all accumulators, is unpacked while the tensor core works. Operands of those last dots must not be
    # unpacked before the next step's first wait, so a whole step's weights may not come before its dots: ptxas of CUDA
    # 13.0 overwrites registers that are still being read. Short dots of bfloat16 are no work to unpack beside.
    together = packing.operand == "e4m3" or tile.block_m > 16 or tile.short > 0
    for among, right in rights:
        lefts = (decode.beside([o.run(r, with_scale=not scaled) for r in among], packing.run) for o in operands)
        result = []
        for left, operand, acc in zip(list(lefts) if together else lefts, operands, total, strict=True):
            if scaled:
                acc = body.add_scaled(acc, lowering.dot(left, right), [operand.scale_of_run(among[0])[:, None]])
            else:
                acc = acc + lowering.dot(left, right) if promoted else lowering.dot(left, right, acc)
            result.append(acc)
        total = result
    return total


def for_runs(
    x: Any,
    row: Array,
    w: Packed,
    parts_of: Callable[[Array], Sequence[Part]],
    step: Step,
    count: Array | int,
    finish: Callable[[Array, list[Array]], None],
) -> None:
    """In a kernel: ``finish(number, sums)`` of the parts of each number below ``count``, as many each.

    x is read once, and one loop is over numbers: its pipeline of loads does not run dry between two of them. So K is to
    be few steps, which are written out.
    """
    packing, tile = step.packing, step.tile
    if _scales_sums(x, packing):  # a step of their own

        def one(number: Array, carry: None) -> None:
            finish(number, sums(x, row, w, parts_of(number), step))

        lowering.loop(count, one, None)
        return
    steps = [jnp.int32(i) for i in range(pl.cdiv(packing.k, tile.block_k))]
    rights = [_rights(x, row, step, i) for i in steps]

    def make(number: Array, carry: None) -> None:
        parts = parts_of(number)
        total = [jnp.zeros((tile.block_n, tile.block_m), jnp.float32)] * len(parts)
        for i, right in zip(steps, rights, strict=True):
            total = _add(right, False, w, parts, step, i, total)
        finish(number, total)

    lowering.loop(count, make, None)
    if not packing.folds:
        return

    def most(number: Array, passes: Array) -> Array:
        return jnp.maximum(passes, passes_of(w, parts_of(number), packing))

    passes = lowering.loop(count, most, jnp.int32(1))

    def again(number: Array, carry: None) -> None:
        finish(number, _in_passes(x, row, w, parts_of(number), step, 0, len(steps), passes))

    pl.when(passes > 1)(lambda: lowering.loop(count, again, None))


def _steps_a_share(packing: Packing, tile: MatmulTile) -> int:
    """Steps of each share of K, the last of which may have some beyond the end."""
    return pl.cdiv(pl.cdiv(packing.k, tile.block_k), tile.split_k)


def _steps(packing: Packing, tile: MatmulTile) -> int:
    """Steps of all shares of K."""
    return _steps_a_share(packing, tile) * tile.split_k


def _dots(step: Step) -> int:
    """Dots that a step of K goes through one after the other: one may run while the next one's weights unpack."""
    packing, tile, exact = step
    if packing.operand == "e4m3" and exact:
        if tile.block_k > packing.runs * COLUMNS:
            longest = packing.runs * COLUMNS
            raise ValueError(f"block_k {tile.block_k} of {tile} must be {longest} at most for exact sums of e4m3")
        return max(1, tile.block_k // COLUMNS)
    # Two dots took 8% less time of long steps (mxfp4, 16 rows, on an H200), and of short ones up to 12% more. Of one
    # Triton makes two again, and beside a higher form of the program ptxas then serialises all products of both.
    one = (
        tile.block_m <= 16
        and not tile.short
        and tile.block_k == COLUMNS
        and packing.scale == "e8m0"
        and not packing.folds
    )
    return 1 if one else 2


def columns_of_runs(packing: Packing, block_k: int, i: Array, first: int, runs: int) -> Array:
    """Columns of x that meet ``decode.beside`` of so many runs of step ``i``."""
    width = runs * packing.run
    lane = arange(width * (block_k // COLUMNS))
    if runs == packing.runs or block_k == COLUMNS:
        return i * block_k + first * packing.run + lane
    return i * block_k + body.div(lane, width) * COLUMNS + first * packing.run + body.rem(lane, width)


class Operands:
    """A step's packed weights and scales of a program's rows of w, loaded when they are first asked for."""

    def __init__(
        self,
        w: Packed,
        part: Part,
        packing: Packing,
        tile: MatmulTile,
        i: Array,
        number: Array | None = None,
    ) -> None:
        self._w, self._matrix, self._packing, self._number = w, part.matrix, packing, number
        self._words: dict[Any, Array] = {}
        self._tiles, self._step = tile.block_k // COLUMNS, i
        self._steps = _steps(packing, tile)
        last = packing.column_tiles - 1
        cut = self._steps * self._tiles != packing.column_tiles
        tiles = [i * self._tiles + b for b in range(self._tiles)]
        self._column_tiles = [jnp.minimum(t, last) for t in tiles] if cut else tiles
        self._word_column = _word_column(part.rows, packing)
        lane = arange(self._tiles * packing.run)
        column_tile = i * self._tiles + body.div(lane, packing.run)
        across = column_tile * (ROWS * packing.run) + body.rem(lane, packing.run)
        down = body.rem(part.rows, ROWS) * packing.run
        rows = _row_tile(part.rows, packing)
        matrix = (index[:, None] if getattr(index, "shape", ()) else index for index in part.matrix)
        # A mask, since addresses of a minimum of tiles would no longer be known to follow each other.
        inside = (column_tile <= last)[None, :] if cut else None
        where = (*matrix, rows[:, None], down[:, None] + across[None, :])
        self._data = load(w.data, where, mask=inside, other=0 if cut else None)

    def run(self, j: int, *, with_scale: bool = True) -> Array:
        """The dot's left operand of run ``j`` of every tile of the step; int4's also without scales."""
        p = self._packing
        a_run = max(1, p.run // p.group) if p.group > 0 else 1
        groups = [(b, j * p.run, n) for b in range(self._tiles) for n in range(a_run)]
        width = p.run // a_run
        if p.scaled_codes and with_scale:
            scaled = [self._scale(*group) for group in groups]
            return decode.scaled_int4(self._data, decode.spread(scaled, width), j)
        if p.codes == "int4":
            zeros = None
            if self._w.zero_point is not None:
                zeros = decode.spread([self._zero(*group) for group in groups], width)
            scales = [self._scales(*group) for group in groups] if with_scale and p.group != -1 else []
            parts = [decode.spread(list(part), width) for part in zip(*scales, strict=True)]
            return decode.int4(self._data, zeros, parts, j)
        if p.operand == "bfloat16":
            return decode.e2m1(self._data, decode.spread([self._scale(*group) for group in groups], width), j)
        if self._number is None:
            exponents = [self._exponent(*group) for group in groups]
            return decode.fold(self._data, decode.spread(exponents, width), j)
        passed = [_in_pass(self._field(self._w.scale, 8, *group), self._number) for group in groups]
        exponents = [held * np.uint32(0x01010101) for held, _ in passed]
        masks = [jnp.where(here, np.uint32(decode.MAGNITUDES), np.uint32(0)) for _, here in passed]
        return decode.fold(self._data, decode.spread(exponents, width), j, decode.spread(masks, width))

    def values(self, j: int, *, exact: bool) -> Array:
        """float32 weights of run ``j``, but for ``row_scale``; ``exact`` ones are not rounded to bfloat16 before."""
        p = self._packing
        if not p.folds and (p.codes == "e2m1" or p.group == -1 or not exact):
            return self.run(j).astype(jnp.float32)
        a_run = max(1, p.run // p.group)
        groups = [(b, j * p.run, n) for b in range(self._tiles) for n in range(a_run)]
        scale = lax.bitcast_convert_type(
            decode.spread([lax.bitcast_convert_type(self._multiplier(*g), jnp.uint32) for g in groups], p.run // a_run),
            jnp.float32,
        )
        if p.folds:
            ones = jnp.full(self._data.shape, np.uint32(decode.E4M3_ONE * 0x01010101))
            return decode.fold(self._data, ones, j).astype(jnp.float32) * scale
        return self.run(j, with_scale=False).astype(jnp.float32) * scale

    def _multiplier(self, *group: int) -> Array:
        """A group's scale in float32, so that ``row_scale`` does the rest."""
        p = self._packing
        if p.folds:
            below = (np.uint32(FOLDED - 1) - self._field(self._w.scale, 8, *group)) & np.uint32(0xFF)
            exponent = (127 + FOLDED - 1 - decode.E4M3_ONE) - below.astype(jnp.int32)
            return bits.e8m0_to_f32(jnp.maximum(exponent, 0).astype(jnp.uint32))
        scale = _as_float(self._field(self._w.scale, 32 // p.groups_a_word, *group), p)
        if not p.scaled_codes:
            return scale
        # ``row_scale`` undoes the shift of ``decode.scaled_int4``, not that of ``decode.int4``. A factor of 2**-127 is
        # no normal number, so exponents are lowered as integers: what is so small beside the row's largest is 0.
        by = np.uint32(decode.INT4_SHIFT - decode.SCALED_INT4_SHIFT)
        word = lax.bitcast_convert_type(scale, jnp.uint32)
        exponent = (word >> np.uint32(23)) & np.uint32(0xFF)
        lowered = jnp.where(exponent > by, word - (by << np.uint32(23)), np.uint32(0))
        return lax.bitcast_convert_type(jnp.where(exponent == 255, word, lowered), jnp.float32)

    def _exponent(self, *group: int) -> Array:
        """An e2m1 group's scale, as ``decode.fold`` takes it."""
        word, byte = self._word(self._w.scale, 8, *group)
        return decode.four_times(word, byte // 8)

    def scale_of_run(self, j: int) -> Array:
        """float32 scales of the int4 groups, one a row, that run ``j`` of the step's only tile begins."""
        return self._multiplier(0, j * self._packing.run, 0)

    def _scale(self, *group: int) -> Array:
        """A group's scale, as ``decode.e2m1`` and ``decode.scaled_int4`` take it."""
        if self._packing.scale == "e8m0":
            return self._field(self._w.scale, 8, *group) * np.uint32(0x00800080)
        return self._field(self._w.scale, 16, *group) * np.uint32(0x00010001)

    def _scales(self, *group: int) -> list[Array]:
        """The parts of an int4 group's scale, as ``decode.int4`` takes them."""
        p = self._packing
        field = self._field(self._w.scale, 32 // p.groups_a_word, *group)
        if p.scale == "bfloat16":
            return [field * np.uint32(0x00010001)]
        value = _as_float(field, p)
        word = lax.bitcast_convert_type(value, jnp.uint32)
        upper = lax.bitcast_convert_type(word & np.uint32(0xFFFF0000), jnp.float32)
        return [decode.pair(upper), decode.twice(value - upper)]

    def _zero(self, *group: int) -> Array:
        zero = self._field(self._w.zero_point, 8, *group).astype(jnp.int32).astype(jnp.float32)
        return decode.pair(zero * np.float32(-(2.0**decode.INT4_SHIFT)))

    def _field(self, ref: Any, size: int, *group: int) -> Array:
        """A group's ``size`` bits, as uint32."""
        word, shift = self._word(ref, size, *group)
        return word if size == 32 else (word >> shift) & np.uint32((1 << size) - 1)

    def _word(self, ref: Any, size: int, b: int, column: int, n: int) -> tuple[Array, Any]:
        """A word of fields of so many bits, and where in it that of a group is: bits up.

        The group is the one n behind that of ``column`` of the step's tile ``b``. Where a step has whole words, which
        and where is known now.
        """
        p, a_word = self._packing, 32 // size
        a_tile = COLUMNS // p.group if 0 < p.group <= COLUMNS else 0
        a_step = a_tile * self._tiles
        whole_steps = a_step % a_word == 0 and self._steps * (a_step // a_word) <= pl.cdiv(p.padded_groups, a_word)
        word: Any
        shift: Any
        if a_tile and (a_tile % a_word == 0 or whole_steps):
            within = column // p.group + n
            if a_tile % a_word == 0:
                word = self._column_tiles[b] * (a_tile // a_word) + within // a_word
            else:
                within += b * a_tile
                word = self._step * (a_step // a_word) + within // a_word
            shift, key = within % a_word * size, (size, b * a_tile // max(a_tile, a_word), within // a_word)
        else:
            if a_tile:
                group = self._column_tiles[b] * a_tile + (column // p.group + n)
            elif p.group == -1:
                group = jnp.int32(0)
            else:
                group = body.div(self._column_tiles[b], p.group // COLUMNS)
            word = body.div(group, a_word)
            shift = (body.rem(group, a_word) * size).astype(jnp.uint32)
            key = (size, b, column // p.group + n if a_tile else 0)
        held = (ref is self._w.zero_point, key)
        if held not in self._words:
            self._words[held] = load(ref, (*self._matrix, word, self._word_column))
        return self._words[held], shift


def _as_float(field: Array, packing: Packing) -> Array:
    """An int4 group's scale, from the bits that its words hold, as float32."""
    if packing.scale == "float16":
        half = (field & np.uint32(0xFFFF)).astype(jnp.uint16)
        return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)
    if packing.scale == "bfloat16":
        field = field << np.uint32(16)
    return lax.bitcast_convert_type(field, jnp.float32)


def _in_pass(held: Array, number: Array) -> tuple[Array, Array]:
    """A folded exponent as it would be held were the row's largest 12 ``number`` smaller, and whether e4m3 has it."""
    below = ((np.uint32(FOLDED - 1) - held) & np.uint32(0xFF)).astype(jnp.int32) - number * FOLDED
    return (FOLDED - 1 - below).astype(jnp.uint32), (below >= 0) & (below < FOLDED)
