"""Dense products with packed four-bit weights: activation(scale * (x w^T) + bias).

    y[m, n] = act( s_x[m] s[n] sum_k x[m, k] w[n, k]  +  bias[n] )

x (M, K) is bfloat16, or codes with one scale a row; ``product`` says what w is made of. Sums, scales, bias and
activation are float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import body, lowering, matmul
from pallas_kernels.fourbit import expand, product
from pallas_kernels.fourbit.packing import ROWS, Packed, Packing
from pallas_kernels.fourbit.product import Part, Step
from pallas_kernels.lowering import arange, load, store
from pallas_kernels.tuning.heuristics import MatmulTile


class _Ends(NamedTuple):
    """What comes after the sums: x's scales (M or 1, 1), bias (L, N), and which layer, (1,); or None."""

    x_scale: Any | None
    bias: Any | None
    layer: Any | None


class _Static(NamedTuple):
    """What a kernel knows at compile time."""

    step: Step
    m: int
    layers: int
    activation: str | None


def linear(
    x: Array,
    w: Packed,
    *,
    packing: Packing,
    x_scale: Array | None = None,
    bias: Array | None = None,
    activation: str | None = None,
    layer: Array | None = None,
    exact: bool = True,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    tile: MatmulTile,
    expands: bool = False,
    interpret: bool = False,
) -> Array:
    """activation(scale * (x w^T) + bias), (M, N), in one launch, or two where K is split.

    Args:
      x: (M, K), of a dtype that ``packing.takes``.
      w: packed (N, K), or stacked (L, N, K) with ``layer``.
      packing: how.
      x_scale: float32 (M, 1) or (1, 1), of an x of codes.
      bias: (N,), or (L, N) with ``layer``; any float dtype.
      activation: "silu", "gelu", "gelu_tanh", "relu2" or None.
      layer: int32 scalar, which of the stacked weights; the kernel indexes them, nothing is copied.
      exact: e4m3 sums are promoted to float32 every 128 of K instead of left to the tensor core.
      out_dtype: bfloat16, float16 or float32.
      tile: see ``tuning.fourbit``; with ``expands`` of ``matmul.linear``.
      expands: weights, which fold, are expanded to e4m3 codes before their product.
      interpret: compute with XLA on any device, for tests.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit together.
    """
    if layer is None:
        w = jax.tree.map(lambda a: a[None], w)
        bias = None if bias is None else bias[None]
    else:
        layer = layer.astype(jnp.int32).reshape(1)
    _check(x, w, packing, x_scale, bias)
    (m, _), n = x.shape, packing.n
    static = _Static(Step(packing, tile, exact), m, w.data.shape[0], activation)
    ends = _Ends(x_scale, bias, layer)
    if not (m and n and packing.k):
        y = jnp.zeros((m, n), jnp.float32)
        if bias is not None:
            y = y + bias[0 if layer is None else layer[0]].astype(jnp.float32)
        return (y if activation is None else body.ungated(activation, y)).astype(out_dtype)
    if expands:
        return _expanded(x, w, ends, static, out_dtype, interpret)
    split = tile.split_k
    shape = jax.ShapeDtypeStruct((m, n), out_dtype) if split == 1 else jax.ShapeDtypeStruct((split, m, n), jnp.float32)
    y = lowering.kernel_call(
        _kernel,
        name="linear_w4",
        grid=(pl.cdiv(m, tile.block_m) * pl.cdiv(n, tile.block_n) * split,),
        out_shape=shape,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        static=static,
    )(x, w, ends)
    return y if split == 1 else _finish(y, ends, static, out_dtype, interpret)


def _expanded(
    x: Array, w: Packed, ends: _Ends, static: _Static, out_dtype: jax.typing.DTypeLike, interpret: bool
) -> Array:
    """``linear`` of weights that are expanded to e4m3 codes before, (N, K) bytes and 4 N for their scales.

    Where rows of w have exponents that e4m3's cannot all take in, the blocks of such rows are computed again from the
    packed weights.
    """
    (packing, tile, exact), m = static.step, static.m
    index = jnp.zeros(1, jnp.int32) if ends.layer is None else ends.layer
    x, (codes, scale, passes), index = expand.expand_after(x, w, packing, index, interpret=interpret)
    bias = ends.bias
    if bias is not None:
        bias = lax.dynamic_index_in_dim(bias, body.existing(index[0], static.layers), 0, False)
    y = matmul.linear(
        x,
        codes,
        scale,
        x_scale=ends.x_scale,
        w_block=(1, -1),
        bias=bias,
        activation=static.activation,
        exact=exact,
        out_dtype=out_dtype,
        tile=tile,
        interpret=interpret,
    )
    again = expand.again_tile(64)
    static = static._replace(step=Step(packing, again, exact))
    tiles = pl.cdiv(m, again.block_m) * pl.cdiv(packing.n, again.block_n)
    programs = min(tiles, expand.AGAIN_PROGRAMS)
    return lowering.kernel_call(
        _again_kernel,
        name="linear_w4_again",
        grid=(programs,),
        out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype),
        num_warps=again.num_warps,
        num_stages=again.num_stages,
        interpret=interpret,
        overwrites=True,
        static=static,
        tiles=tiles,
        programs=programs,
    )(x, w, ends._replace(layer=index), passes, y)


def _kernel(x_ref: Any, w: Packed, ends: _Ends, out_ref: Any, *, static: _Static) -> None:
    program, split = pl.program_id(0), static.step.tile.split_k
    place = _place(body.div(program, split), ends, static)
    share = body.rem(program, split) if split > 1 else None
    [total] = product.sums(x_ref, place.existing, w, [place.part], static.step, share=share)
    _store(total, place, share, w, ends, out_ref, static)


def _again_kernel(
    x_ref: Any,
    w: Packed,
    ends: _Ends,
    passes_ref: Any,
    before_ref: Any,
    out_ref: Any,
    *,
    static: _Static,
    tiles: int,
    programs: int,
) -> None:
    """Stores the tiles that have rows of w with many exponents."""

    def make(number: Array) -> None:
        place = _place(number, ends, static)

        def finish(totals: list[Array]) -> None:
            _store(totals[0], place, None, w, ends, out_ref, static)

        product.if_many_exponents(x_ref, place.existing, w, [place.part], static.step, finish)

    body.for_share(tiles, programs, make, when=expand.any_beyond(passes_ref))


class _Place(NamedTuple):
    """A tile's rows of x, those past the end too and as they are read, and its rows of w."""

    row: Array
    existing: Array
    part: Part


def _place(number: Array, ends: _Ends, static: _Static) -> _Place:
    packing, tile, _ = static.step
    row_block, col_block = body.grouped_order(
        number, pl.cdiv(static.m, tile.block_m), pl.cdiv(packing.n, tile.block_n), tile.group
    )
    row = row_block * tile.block_m + arange(tile.block_m)
    col = col_block * tile.block_n + arange(tile.block_n)
    part = Part((_layer(ends, static),), col)
    existing = row if static.m % tile.block_m == 0 else jnp.minimum(row, static.m - 1)
    return _Place(row, existing, part)


def _store(
    total: Array, place: _Place, share: Array | None, w: Packed, ends: _Ends, out_ref: Any, static: _Static
) -> None:
    """Stores what a tile's sums come to, or with a ``share`` of K the scaled sums."""
    packing, (row, existing, part), col = static.step.packing, place, place.part.rows
    total = total * product.row_scale(w, part, packing)[:, None]
    if ends.x_scale is not None:
        scale = load(ends.x_scale, (existing if ends.x_scale.shape[0] > 1 else 0, 0))
        total = total * (scale[None, :] if scale.shape else scale)
    inside = (row < static.m)[None, :] & (col < packing.n)[:, None]
    if share is not None:
        store(out_ref, (share, row[None, :], col[:, None]), total, mask=inside)
        return
    y = _end(total, ends, part, static, axis=1)
    store(out_ref, (row[None, :], col[:, None]), y.astype(out_ref.dtype), mask=inside)


def _layer(ends: _Ends, static: _Static) -> Any:
    return 0 if ends.layer is None else body.existing(load(ends.layer, (0,)), static.layers)


def _end(y: Array, ends: _Ends, part: Part, static: _Static, *, axis: int) -> Array:
    """Bias and activation; ``axis`` is that along which rows of x lie."""
    if ends.bias is not None:
        bias = load(ends.bias, (*part.matrix, jnp.minimum(part.rows, static.step.packing.n - 1)))
        y = y + jnp.expand_dims(bias.astype(jnp.float32), axis)
    return y if static.activation is None else body.ungated(static.activation, y)


def _finish(parts: Array, ends: _Ends, static: _Static, out_dtype: Any, interpret: bool) -> Array:
    """Sums the parts of a split K in ascending order."""
    m, n = parts.shape[1:]
    tile = matmul.finish_tile(m, n)
    return lowering.kernel_call(
        _finish_kernel,
        name="linear_finish",
        grid=(pl.cdiv(m, tile.block_m) * pl.cdiv(n, tile.block_n),),
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        static=static,
        rows=tile.block_m,
        cols=tile.block_n,
    )(parts, ends._replace(x_scale=None))


def _finish_kernel(parts_ref: Any, ends: _Ends, out_ref: Any, *, static: _Static, rows: int, cols: int) -> None:
    split, m, n = parts_ref.shape
    across = pl.cdiv(n, cols)
    row = body.div(pl.program_id(0), across) * rows + arange(rows)
    col = body.rem(pl.program_id(0), across) * cols + arange(cols)
    inside = (row < m)[:, None] & (col < n)[None, :]
    index = jnp.minimum(row, m - 1)[:, None], jnp.minimum(col, n - 1)[None, :]
    total = functools.reduce(jnp.add, [load(parts_ref, (i, *index)) for i in range(split)])
    y = _end(total, ends, Part((_layer(ends, static),), col), static, axis=0)
    store(out_ref, (row[:, None], col[None, :]), y.astype(out_ref.dtype), mask=inside)


def _check(x: Array, w: Packed, packing: Packing, x_scale: Array | None, bias: Array | None) -> None:
    if not packing.takes(x.dtype):
        raise TypeError(
            f"x is {x.dtype}, but {packing.codes} weights packed for {packing.operand} operands go with "
            + packing.operand
            + (", float8_e4m3fn and int8 codes" if packing.codes == "int4" else "")
        )
    if x.ndim != 2 or x.shape[1] != packing.k:
        raise ValueError(f"x has shape {x.shape}, but it is (M, K) with K = {packing.k}")
    if (x_scale is None) != (x.dtype not in body.CODES):
        raise ValueError(f"x_scale is {'missing' if x_scale is None else 'given'}, but x is {x.dtype}")
    if x_scale is not None and x_scale.shape not in ((x.shape[0], 1), (1, 1)):
        raise ValueError(f"x_scale has shape {x_scale.shape}, but it is (M, 1) or (1, 1), with M = {x.shape[0]}")
    layers = w.data.shape[:-2]
    shapes = {
        "data": (*layers, packing.row_tiles, packing.row_elements),
        "scale": (*layers, packing.words + packing.has_row_word, packing.row_tiles * ROWS),
    }
    for name, shape in shapes.items():
        found = getattr(w, name).shape
        if len(layers) != 1 or found != shape:
            raise ValueError(f"w.{name} has shape {found}, but packed as {packing} it is {shape}")
    if bias is not None and bias.shape != (*layers, packing.n):
        raise ValueError(f"bias has shape {bias.shape}, but it is (L, N) = {(*layers, packing.n)}")
