"""Products of rows with the weights of each row's expert.

    sum[half][r, n] = sum_kb s_x[r, kb] s_w[half, nb, kb] sum_{k in kb} x[r, k] w[layer, expert of r, half, n, k]

A program owns a block of rows, all of one expert, and a tile of each half's columns. Rows of x are gathered, weights
are read where they lie: stacked layers are indexed, never copied.

Scales that change along K multiply the partial sum of each K step, and no step straddles one; those that do not are
left to ``finish``. Rows and columns past the end repeat one that exists, and the end of K is masked to zero on both
operands, so that nothing beyond, NaN included, contributes.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import body, lowering
from pallas_kernels.align import Blocks
from pallas_kernels.fourbit import product as fourbit
from pallas_kernels.fourbit.packing import Packed, Packing
from pallas_kernels.lowering import arange, load
from pallas_kernels.tuning.heuristics import SHORT_STEPS, MatmulTile

WHOLE = -1
"""Extent of a scale's block that is the whole axis."""


class Weights(NamedTuple):
    """Experts' weights of one product; arrays outside a kernel, refs inside.

    Attributes:
      data: (L, E, halves, N, K), bfloat16, float16, float32, float8_e4m3fn or int8, or uint8: e4m3 decoded by bits;
        or packed four-bit codes, whose ``scale``, ``zero_point`` and ``global_scale`` are as ``fourbit.packing`` says,
        with the same three axes in front.
      scale: (L, E, halves, ceil(N/rows), ceil(K/cols)), extent 1 where a block is ``WHOLE``; float32, bfloat16,
        float16 or uint8 (e8m0); or None.
      bias: (L, E, halves, N), any float dtype; or None.
      layer: int32 (1,), which of the L layers; None for the only one.
      zero_point, global_scale: of packed codes; or None.
    """

    data: Any
    scale: Any | None = None
    bias: Any | None = None
    layer: Any | None = None
    zero_point: Any | None = None
    global_scale: Any | None = None


class Input(NamedTuple):
    """x: data (R, K); where that is codes, scale (1, 1), (R, 1) or (R, ceil(K/group)), of any dtype a scale has."""

    data: Any
    scale: Any | None = None


class Routed(NamedTuple):
    """Blocks of slots that alignment made."""

    blocks: Blocks


class Batched(NamedTuple):
    """Blocks of each expert's own rows, S/E of them, of which the first counts[e] count. counts: (E,)."""

    counts: Any


Rows = Routed | Batched


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Static facts of a grouped product.

    Attributes:
      tile: what a program computes; ``block_m`` rows, ``block_n`` columns of each half. Halves are pieces already: a
        product of two has one piece each.
      slots: S.
      experts: E.
      slots_a_row: slots that share a row of x: k where x has a row a token, 1 where it has one a slot.
      w_block: (rows, cols) that share a scale of w, ``WHOLE`` for a whole axis.
      x_group: columns that share a scale of x, ``WHOLE`` for all.
      exact: FP8 sums are promoted to float32 at least every 128 of K.
      int8: x and w are int8 codes.
      packing: of four-bit weights, None of others; then ``w_block`` says nothing.
      stride: rows from a block's first to the next one's; None is ``block_m``.
      again: of packed weights that fold, only tiles with rows of many exponents, see ``fourbit.product``.
    """

    tile: MatmulTile
    slots: int
    experts: int
    slots_a_row: int = 1
    w_block: tuple[int, int] = (WHOLE, WHOLE)
    x_group: int = WHOLE
    exact: bool = True
    int8: bool = False
    packing: Packing | None = None
    stride: int | None = None
    again: bool = False

    @property
    def cell(self) -> int | None:
        """Columns of K that share every scale that changes along K, None where none does."""
        return scale_cell(self.w_block, self.x_group)

    def blocks(self, rows: Rows) -> int:
        """Blocks of rows in the grid, the unused ones too."""
        match rows:
            case Routed(blocks):
                return blocks.experts.shape[0]
        return self.experts * pl.cdiv(self.slots // self.experts, self.tile.block_m)

    def columns(self, w: Weights) -> int:
        """Columns of each half, N."""
        return w.data.shape[3] if self.packing is None else self.packing.n

    def grid(self, rows: Rows, columns: int) -> tuple[int]:
        """Programs, for that many columns of each half."""
        return (self.blocks(rows) * self.runs(columns) * self.tile.split_k,)

    def tiles(self, columns: int) -> int:
        """Tiles of that many columns."""
        return pl.cdiv(columns, self.tile.block_n)

    def runs(self, columns: int) -> int:
        """Programs that share a block of rows."""
        return pl.cdiv(self.tiles(columns), self.tile.run)


def scale_cell(w_block: tuple[int, int], x_group: int) -> int | None:
    """Columns of K that share every scale that changes along K, None where none does."""
    extents = [extent for extent in (w_block[1], x_group) if extent != WHOLE]
    return math.gcd(*extents) if extents else None


class At(NamedTuple):
    """Where a program is: its layer, its block of rows, its tile of columns (the first of its run), its share of K.

    The share is None where K is not split.
    """

    layer: Array | int
    block: Array
    tile: Array
    share: Array | None = None


def layer_of(w: Weights) -> Array | int:
    """In a kernel: the layer."""
    return 0 if w.layer is None else body.existing(load(w.layer, (0,)), w.data.shape[0])


def place(program: Array, w: Weights, rows: Rows, product: Product) -> At:
    """In a kernel: where the program is."""
    layer = layer_of(w)
    runs, split = product.runs(product.columns(w)), product.tile.split_k
    share = None
    if split > 1:
        program, share = body.div(program, split), body.rem(program, split)
    block, run = body.grouped_order(program, product.blocks(rows), runs, product.tile.group)
    return At(layer, block, run * product.tile.run, share)


def after_sums(at: At, w: Weights, product: Product) -> At:
    """In a kernel: ``at`` once K is done. Of packed weights the layer is read again, whose addresses would otherwise
    take registers over the loop; others gained nothing by it.
    """
    return at if product.packing is None else at._replace(layer=layer_of(w))


class Block(NamedTuple):
    """A block of rows: whether it is used, its expert, its slots, which of these are not padding, their rows of x."""

    used: Array
    expert: Array
    slot: Array
    live: Array
    row: Array


def pieces(at: At, product: Product) -> tuple[list[At], Product]:
    """In a kernel: the pieces of a program's tile of columns, and the product as each of them sees it."""
    tile = product.tile
    narrow = replace(product, tile=replace(tile, block_n=tile.block_n // tile.pieces, pieces=1))
    return [at._replace(tile=at.tile * tile.pieces + piece) for piece in range(tile.pieces)], narrow


def locate(rows: Rows, block: Array, product: Product, lane: Array | None = None) -> Block:
    """In a kernel: what a block of rows holds, or one of its rows."""
    lane = arange(product.tile.block_m) if lane is None else lane
    stride = product.stride or product.tile.block_m
    padding: Array | int  # a slot of this block, or any
    match rows:
        case Routed(blocks):
            slot = load(blocks.slots, (block * stride + lane,))
            live = slot < product.slots
            used, expert, padding = block < load(blocks.used, (0,)), load(blocks.experts, (block,)), 0
        case Batched(counts):
            height = product.slots // product.experts
            across = pl.cdiv(height, stride)
            expert = body.div(block, across)
            count = jnp.minimum(load(counts, (expert,)), height)
            line = body.rem(block, across) * stride + lane
            live = line < count
            used, padding = jnp.max(count - line) > 0, expert * height
            slot = jnp.where(line < height, padding + line, product.slots)
    row = body.div(jnp.where(live, slot, padding), product.slots_a_row)
    return Block(used, expert, slot, live, row)


def for_used(rows: Rows, at: At, product: Product, make: Callable[[Block, Product], None]) -> Block:
    """In a kernel: ``make(block, product)`` if the program's block is used, as high as its rows need; the whole block.

    A block whose rows are no more than the tile's ``short`` is made by a shorter form of the program, whose tile is as
    high as that.
    """
    whole, tile = locate(rows, at.block, product), product.tile
    if not tile.short:
        pl.when(whole.used)(lambda: make(whole, product))
        return whole
    short = replace(product, tile=replace(tile, block_m=tile.short), stride=tile.block_m)
    full = locate(rows, at.block, product, jnp.int32(tile.short)).live
    pl.when(whole.used & full)(lambda: make(whole, product))
    pl.when(whole.used & ~full)(lambda: make(locate(rows, at.block, short), short))
    return whole


def oriented(tile: MatmulTile, row: Any, col: Any) -> tuple[Any, Any]:
    """A value a row and a value a column, as they lie along an accumulator; scalars and None stay."""
    row_axis, col_axis = (0, 1) if tile.swap else (1, 0)
    row, col = (
        v if v is None or not v.shape else jnp.expand_dims(v, axis) for v, axis in ((row, row_axis), (col, col_axis))
    )
    return row, col


def columns_of(at: At, tile: MatmulTile) -> Array:
    """The columns that a program owns, those past the last too."""
    return at.tile * tile.block_n + arange(tile.block_n)


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of K: one ``step`` wide each, and none beyond its cell of scales."""

    k: int
    step: int
    cell: int | None

    @property
    def straddled(self) -> bool:
        """Steps do not divide cells evenly, so that a cell has steps of its own, of which the last is cut short."""
        return self.cell is not None and self.cell % self.step != 0

    @property
    def a_cell(self) -> int:
        return pl.cdiv(self.cell or self.k, self.step)

    @property
    def count(self) -> int:
        if self.straddled:
            assert self.cell is not None
            return pl.cdiv(self.k, self.cell) * self.a_cell
        return pl.cdiv(self.k, self.step)

    @property
    def cut(self) -> bool:
        """Whether some step ends beyond K or its cell."""
        return self.straddled or self.k % self.step != 0

    def span(self, i: Array) -> tuple[Array, Array | int]:
        """First column of step ``i``, and the one it ends before if it is not whole."""
        if not self.straddled:
            return i * self.step, self.k
        assert self.cell is not None
        cell = body.div(i, self.a_cell)
        first = cell * self.cell
        return first + (i - cell * self.a_cell) * self.step, jnp.minimum(first + self.cell, self.k)


Sums = list[Array]
"""Sums over K of each piece of a tile's columns and each half: (rows, columns) or, swapped, (columns, rows).

float32; int32 where all of K is of int8 codes, and only the whole sum is scaled.
"""


_Finish = Callable[[At, Sums], None]


def for_tiles(x: Input, w: Weights, block: Block, at: At, product: Product, finish: _Finish) -> None:
    """In a kernel: ``finish(at, sums)`` of every tile that a program makes, of its share of K."""
    tile = product.tile
    assert tile.run == 1 or at.share is None
    tiles = product.tiles(product.columns(w))
    count = tile.run if tiles % tile.run == 0 else jnp.minimum(tile.run, tiles - at.tile)
    if product.packing is not None:
        _for_packed_tiles(x, w, block, at, product, product.packing, count, finish)
        return
    steps = _Steps(w.data.shape[4], tile.block_k, product.cell)
    if tile.run == 1:
        finish(at, _sums(x, w, block, at, product, steps))
        return
    # One loop is over tiles: its pipeline of loads does not run dry between two of them.
    make = _short_run if steps.count <= SHORT_STEPS else _long_run
    make(x, w, block, at, product, steps, count, finish)


def _short_run(
    x: Input, w: Weights, block: Block, at: At, product: Product, steps: _Steps, count: Array | int, finish: _Finish
) -> None:
    parts = range(steps.count)
    operands = [_operand(x, block, product, steps, jnp.int32(i)) for i in parts]

    def make(number: Array, carry: None) -> None:
        here = at._replace(tile=at.tile + number)
        sums = _zeros(w, product)
        for i in parts:
            sums = _step(operands[i], w, block, here, product, steps, jnp.int32(i), sums)
        finish(here, sums)

    lowering.loop(count, make, None)


def _long_run(
    x: Input, w: Weights, block: Block, at: At, product: Product, steps: _Steps, count: Array | int, finish: _Finish
) -> None:
    """Every turn is a step of K of some tile: for sums that are promoted. Others are right, but slow: the tensor core
    could not go on with an accumulator that a turn may have set to zero, so that each product is waited for.
    """

    def make(turn: Array, sums: Sums) -> Sums:
        number = body.div(turn, steps.count)
        i = turn - number * steps.count
        here = at._replace(tile=at.tile + number)
        left = _operand(x, block, product, steps, i)
        sums = _step(left, w, block, here, product, steps, i, sums)

        def end() -> Sums:
            finish(here, sums)
            return _zeros(w, product)

        return lax.cond(i == steps.count - 1, end, lambda: sums)

    lowering.loop(count * steps.count, make, _zeros(w, product))


def _zeros(w: Weights, product: Product) -> Sums:
    tile = product.tile
    columns = tile.block_n // tile.pieces
    shape = (columns, tile.block_m) if tile.swap else (tile.block_m, columns)
    dtype = jnp.int32 if product.int8 and product.cell is None else jnp.float32
    return [jnp.zeros(shape, dtype)] * (w.data.shape[2] * tile.pieces)


def _sums(x: Input, w: Weights, block: Block, at: At, product: Product, steps: _Steps) -> Sums:
    """The sums of one tile, or of its share of K.

    Where a step is cut all have a mask: a last one of its own, behind the loop, would wait for its loads.
    """

    def step(i: Array, sums: Sums) -> Sums:
        left = _operand(x, block, product, steps, i)
        return _step(left, w, block, at, product, steps, i, sums)

    first, last = body.steps_of(at.share, product.tile.split_k, steps.count)
    return lowering.loop(last, step, _zeros(w, product), start=first)


def _for_packed_tiles(
    x: Input,
    w: Weights,
    block: Block,
    at: At,
    product: Product,
    packing: Packing,
    count: Array | int,
    finish: _Finish,
) -> None:
    """``for_tiles`` of packed weights."""
    step = fourbit.Step(packing, pieces(at, product)[1].tile, product.exact)
    halves = range(w.data.shape[2])

    def parts(at: At) -> list[fourbit.Part]:
        places, narrow = pieces(at, product)
        return [_part(block, place, half, narrow.tile) for place in places for half in halves]

    if product.again:
        fourbit.if_many_exponents(x.data, block.row, _packed(w), parts(at), step, lambda totals: finish(at, totals))
        return
    if product.tile.run == 1:
        finish(at, fourbit.sums(x.data, block.row, _packed(w), parts(at), step, share=at.share))
        return

    def after(number: Array) -> At:
        return at._replace(tile=at.tile + number)

    fourbit.for_runs(
        x.data,
        block.row,
        _packed(w),
        lambda number: parts(after(number)),
        step,
        count,
        lambda number, sums: finish(after(number), sums),
    )


def _packed(w: Weights) -> Packed:
    return Packed(w.data, w.scale, w.zero_point, w.global_scale)


def _part(block: Block, at: At, half: int, tile: MatmulTile) -> fourbit.Part:
    return fourbit.Part((at.layer, block.expert, half), columns_of(at, tile))


def _operand(x: Input, block: Block, product: Product, steps: _Steps, i: Array) -> tuple[Array, Array | None]:
    """Step ``i`` of a block's rows of x, and their scales if these change along K."""
    first, limit = steps.span(i)
    column = first + arange(product.tile.block_k)
    valid = (column < limit)[None, :] if steps.cut else None
    a = load(x.data, (block.row[:, None], column[None, :]), mask=valid, other=0 if steps.cut else None)
    if product.x_group == WHOLE:
        return a, None
    return a, body.decode_scale(load(x.scale, (block.row, body.div(first, product.x_group))))


def _step(
    left: tuple[Array, Array | None],
    w: Weights,
    block: Block,
    at: At,
    product: Product,
    steps: _Steps,
    i: Array,
    sums: Sums,
) -> Sums:
    """The sums after step ``i`` of K, of which ``left`` is what ``_operand`` gives."""
    (a, s_x), s_w = left, None
    places, product = pieces(at, product)
    tile = product.tile
    first, limit = steps.span(i)
    column = first + arange(tile.block_k)
    valid = (column < limit)[None, :] if steps.cut else None
    result = []
    for (at, half), acc in zip(itertools.product(places, range(w.data.shape[2])), sums, strict=True):
        index, col = (at.layer, block.expert, half), _existing_columns(w, at, product)
        codes = load(w.data, (*index, col[:, None], column[None, :]), mask=valid, other=0 if steps.cut else None)
        b = body.decode_e4m3(codes, a.dtype) if codes.dtype == jnp.uint8 else body.as_operand(codes, a.dtype)
        pair = (b, a) if tile.swap else (a, b)
        if product.cell is None:
            promoted = product.exact and a.dtype == body.F8
            result.append(acc + lowering.dot(*pair) if promoted else lowering.dot(*pair, acc))
            continue
        if product.w_block[1] != WHOLE:
            s_w = _weight_scale(w, index, at, body.div(first, product.w_block[1]), product)
        result.append(body.add_scaled(acc, lowering.dot(*pair).astype(jnp.float32), _scales(s_x, s_w, tile)))
    return result


def _existing_columns(w: Weights, at: At, product: Product) -> Array:
    n, columns = product.columns(w), columns_of(at, product.tile)
    return columns if n % product.tile.block_n == 0 else jnp.minimum(columns, n - 1)


def _weight_scale(w: Weights, index: tuple[Any, Array, int], at: At, k_block: Array | int, product: Product) -> Array:
    """Scale of each column at one block of K: a scalar where they share it."""
    rows = product.w_block[0]
    if rows == WHOLE:
        row: Any = 0
    elif rows % product.tile.block_n == 0:
        row = body.div(at.tile * product.tile.block_n, rows)
    else:
        row = body.div(_existing_columns(w, at, product), rows)
    assert w.scale is not None
    return body.decode_scale(load(w.scale, (*index, row, k_block)))


def _scales(s_x: Array | None, s_w: Array | None, tile: MatmulTile) -> list[Array]:
    """What to multiply an accumulator by for a scale a row and a scale a column; either may be one number, or None."""
    if s_x is not None and s_w is not None and not (s_x.shape and s_w.shape):
        s_x, s_w = (s_x * s_w, None) if s_x.shape else (None, s_x * s_w)
    return [scale for scale in oriented(tile, s_x, s_w) if scale is not None]


def finish(total: Array, half: int, x: Input, w: Weights, block: Block, at: At, product: Product) -> Array:
    """In a kernel: one half's sum times the scales that cover all of K."""
    s_x = s_w = None
    if x.scale is not None and product.x_group == WHOLE:
        s_x = body.decode_scale(load(x.scale, (block.row if x.scale.shape[0] > 1 else 0, 0)))
    if product.packing is not None:
        s_w = fourbit.row_scale(_packed(w), _part(block, at, half, product.tile), product.packing)
    elif w.scale is not None and product.w_block[1] == WHOLE:
        s_w = _weight_scale(w, (at.layer, block.expert, half), at, 0, product)
    return functools.reduce(jnp.multiply, _scales(s_x, s_w, product.tile), total.astype(jnp.float32))


def bias_of(half: int, w: Weights, block: Block, at: At, product: Product) -> Array:
    """In a kernel: the bias of one half's columns, float32, as it broadcasts to an accumulator."""
    assert w.bias is not None
    value = load(w.bias, (at.layer, block.expert, half, _existing_columns(w, at, product)))
    return oriented(product.tile, None, value.astype(jnp.float32))[1]
