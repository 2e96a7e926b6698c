"""Packed e2m1 weights with e8m0 scales as e4m3 codes times one float32 scale a row, in memory.

    w[n, k] = scale[n] * codes[n, k]

Codes and scales are those that the products of ``product`` make in registers, so products with them are the same but
for the order of their sums. Exact for rows whose exponents e4m3's own takes in; others are wrong, and ``passes`` says
where there are any, so that what was made of them can be made again.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import body, lowering
from pallas_kernels.fourbit import product
from pallas_kernels.fourbit.packing import COLUMNS, ROWS, Packed, Packing
from pallas_kernels.fourbit.product import Operands, Part
from pallas_kernels.lowering import arange, load, store
from pallas_kernels.tuning.heuristics import MatmulTile

AGAIN_PROGRAMS = 256
"""Programs that share what is made again: few, since mostly there is nothing to do."""

_LANES = 1024


class Expanded(NamedTuple):
    """A layer's expanded matrices.

    Attributes:
      codes: float8_e4m3fn (..., N, K).
      scale: float32 (..., N, 1), which multiplies.
      passes: int32 (tiles,), the most passes that rows of each tile of 64 need; those that need one are exact.
    """

    codes: Any
    scale: Any
    passes: Any


def again_tile(block_m: int) -> MatmulTile:
    """The tile by which products of rows with many exponents are made again; it fits any GPU."""
    return MatmulTile(block_m=block_m, block_n=ROWS, block_k=COLUMNS, num_warps=4, num_stages=3, swap=True)


def any_beyond(passes: Any) -> Array:
    """In a kernel: whether ``Expanded.passes`` has rows whose exponents e4m3's cannot all take in."""
    count = passes.shape[0]
    lane = arange(min(body.pow2_at_least(count), _LANES))

    def most(i: Array, found: Array) -> Array:
        return jnp.maximum(found, jnp.max(load(passes, (jnp.minimum(i * _LANES + lane, count - 1),))))

    return lowering.loop(pl.cdiv(count, _LANES), most, jnp.int32(1)) > 1


def expand(w: Packed, packing: Packing, layer: Array, *, interpret: bool = False) -> Expanded:
    """One layer's matrices, (..., N, K), expanded in one launch.

    Args:
      w: packed (L, ..., N, K) that ``packing.folds``, none of it 0.
      packing: how.
      layer: int32 (1,), which of the L layers; the kernel indexes them, nothing is copied.
      interpret: compute with XLA on any device, for tests.

    Raises:
      ValueError: scales do not go into an e4m3 exponent.
    """
    if not packing.folds:
        raise ValueError(f"weights packed as {packing} have no scales that go into an e4m3 exponent")
    matrices = w.data.shape[1:-2]
    steps = pl.cdiv(packing.column_tiles, _tiles_a_step(packing))
    out = Expanded(
        jax.ShapeDtypeStruct((*matrices, packing.n, packing.k), body.F8),
        jax.ShapeDtypeStruct((*matrices, packing.n, 1), jnp.float32),
        jax.ShapeDtypeStruct((math.prod(matrices) * packing.row_tiles,), jnp.int32),
    )
    [expanded] = lowering.kernel_call(
        _kernel,
        name="expand_w4",
        grid=(math.prod(matrices) * packing.row_tiles * steps,),
        out_shape=[out],
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        packing=packing,
        steps=steps,
    )(w, layer)
    return expanded


def expand_after(
    x: Array, w: Packed, packing: Packing, layer: Array, *, interpret: bool = False
) -> tuple[Array, Expanded, Array]:
    """``x``, a layer's matrices expanded when x is there and not before, and ``layer``.

    Without x to wait for, what two products expand alike would be kept from the first to the second.
    """
    x, layer = lax.optimization_barrier((x, layer))
    return x, expand(w, packing, layer, interpret=interpret), layer


def _tiles_a_step(packing: Packing) -> int:
    """Tiles of columns that a program expands."""
    return 1 if packing.column_tiles % 2 else 2


def _kernel(w: Packed, layer: Any, out: Expanded, *, packing: Packing, steps: int) -> None:
    number, step = body.div(pl.program_id(0), steps), body.rem(pl.program_id(0), steps)
    row_tile, rest = body.rem(number, packing.row_tiles), body.div(number, packing.row_tiles)
    matrix: tuple[Array, ...] = ()
    for extent in reversed(w.data.shape[1:-2]):
        matrix, rest = (body.rem(rest, extent), *matrix), body.div(rest, extent)
    tiles = _tiles_a_step(packing)
    rows = row_tile * ROWS + arange(ROWS)
    part = Part((body.existing(load(layer, (0,)), w.data.shape[0]), *matrix), rows)
    tile = MatmulTile(block_m=16, block_n=ROWS, block_k=tiles * COLUMNS, num_warps=4, num_stages=1)
    operands = Operands(w, part, packing, tile, step)
    inside = rows < packing.n
    for run in range(packing.runs):
        # Each run by itself: its columns lie in memory as those of the packed tile do.
        column = product.columns_of_runs(packing, tile.block_k, step, run, 1)
        mask = inside[:, None] & (column < packing.k)[None, :]
        store(out.codes, (*matrix, rows[:, None], column[None, :]), operands.run(run), mask=mask)

    @pl.when(step == 0)
    def _() -> None:
        store(out.scale, (*matrix, rows, 0), product.row_scale(w, part, packing), mask=inside)
        store(out.passes, (number,), product.passes_of(w, [part], packing))
