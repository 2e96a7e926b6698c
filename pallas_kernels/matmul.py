"""Dense products with plain, e4m3 or int8 weights: activation(scales * (x w^T) + bias).

    y[m, n] = act( sum_kb s_x[m, kb] s_w[nb, kb] sum_{k in kb} x[m, k] w[n, k]  +  bias[n] )

x (M, K) and w (N, K) are both e4m3 or both int8 (W8A8), or x is 16 or 32 bit and w plain, e4m3 or int8 (W8A16, decoded
in the kernel). A scale with one column for all of K multiplies after the sum; one with more multiplies each partial sum
as it is promoted to float32, and no step of K straddles a scale. Scales, bias and activation are float32, and so are
sums, but for those of int8 codes between two scales: these are int32, and exact.
"""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels import bits, body, lowering
from pallas_kernels.lowering import arange, load, store
from pallas_kernels.tuning.heuristics import MatmulTile

_PROMOTE_EVERY = 128
"""Of K, with exact accumulation."""


class _Static(NamedTuple):
    """What a kernel knows at compile time."""

    names: tuple[str, ...]
    tile: MatmulTile
    layers: int
    m: int
    n: int
    k: int
    w_rows: int  # rows of w that share a scale
    w_cols: int  # columns of K that share a scale of w, 0 if all do
    x_cols: int  # the same for x
    exact: bool
    int8: bool  # both operands
    activation: str | None

    @property
    def cell(self) -> int:
        """Columns of K that share every scale applied in the loop, 0 if none is."""
        return math.gcd(self.w_cols, self.x_cols)

    @property
    def total(self) -> Any:
        """Dtype of the sums that the loop carries."""
        return jnp.int32 if self.int8 and not self.cell else jnp.float32

    @property
    def straddles(self) -> bool:
        """Steps of K do not divide the cells evenly, so each cell gets its own masked steps."""
        return bool(self.cell) and self.cell % self.tile.block_k != 0

    @property
    def steps_a_cell(self) -> int:
        return pl.cdiv(self.cell, self.tile.block_k)

    @property
    def steps(self) -> int:
        if self.straddles:
            return pl.cdiv(self.k, self.cell) * self.steps_a_cell
        return pl.cdiv(self.k, self.tile.block_k)

    @property
    def cut(self) -> bool:
        """Whether some step ends beyond K or its cell."""
        return self.straddles or self.k % self.tile.block_k != 0


def linear(
    x: Array,
    w: Array,
    w_scale: Array | None = None,
    *,
    x_scale: Array | None = None,
    w_block: tuple[int, int] = (-1, -1),
    x_group: int = -1,
    bias: Array | None = None,
    activation: str | None = None,
    layer: Array | None = None,
    exact: bool = False,
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    tile: MatmulTile,
    interpret: bool = False,
) -> Array:
    """activation(scales * (x w^T) + bias), (M, N), in one launch, or two where K is split.

    Args:
      x: (M, K) e4m3 or int8, or bfloat16, float16, float32.
      w: (N, K), or stacked (L, N, K) with ``layer``: e4m3 or int8, or bfloat16, float16, float32. Codes with an x that
        is none are decoded, e4m3 by bits, without float8 types in the kernel. Plain operands of two dtypes are
        multiplied in float32.
      w_scale: for codes w: (ceil(N/rows), ceil(K/cols)) of ``w_block``, float32, bfloat16, float16 or uint8 (e8m0);
        with ``layer`` stacked. It multiplies.
      x_scale: for codes x: (1, 1), (M, 1) or (M, ceil(K/x_group)), dtypes as above. It multiplies.
      w_block: rows and columns of w that share a scale; -1 is the whole extent.
      x_group: columns of x that share a scale; -1 is all of K.
      bias: (N,), or (L, N) with ``layer``; any float dtype.
      activation: "silu", "gelu", "gelu_tanh", "relu2" or None.
      layer: int32 scalar, which of the stacked weights; the kernel indexes them, nothing is copied.
      exact: promote FP8 sums to float32 at least every 128 of K, instead of leaving all of K to the tensor core.
      out_dtype: bfloat16, float16 or float32.
      tile: see ``tuning.heuristics.matmul_tile``.
      interpret: compute with XLA on any device, for tests.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit together; int8 products whose sum may not fit int32.
    """
    if layer is None:
        w = w[None]
        w_scale, bias = (None if a is None else a[None] for a in (w_scale, bias))
    static = _checked(x, w, w_scale, x_scale, w_block, x_group, bias, activation, exact, tile)
    m, n, k = static.m, static.n, static.k
    if not (m and n and k):
        return _of_nothing(static, bias, layer, out_dtype)
    if w.dtype == body.F8 and x.dtype != body.F8:
        w = lax.bitcast_convert_type(w, jnp.uint8)
    arrays = {"x": x, "w": w, "w_scale": w_scale, "x_scale": x_scale, "bias": bias}
    if layer is not None:
        arrays["layer"] = layer.astype(jnp.int32).reshape(1)
    given = {name: array for name, array in arrays.items() if array is not None}
    static = static._replace(names=tuple(given))
    split = tile.split_k
    shape, dtype = ((split, m, n), static.total) if split > 1 else ((m, n), out_dtype)
    y = lowering.kernel_call(
        _kernel,
        name="linear",
        grid=(pl.cdiv(m, tile.block_m) * pl.cdiv(n, tile.block_n) * split,),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        static=static,
    )(*given.values())
    return _finish(y, given, static, out_dtype, interpret) if split > 1 else y


def _kernel(*refs: Any, static: _Static) -> None:
    *operands, out_ref = refs
    ref = dict(zip(static.names, operands, strict=True))
    tile = static.tile
    program = pl.program_id(0)
    part = body.rem(program, tile.split_k)
    row_block, col_block = body.grouped_order(
        body.div(program, tile.split_k),
        pl.cdiv(static.m, tile.block_m),
        pl.cdiv(static.n, tile.block_n),
        tile.group,
    )
    layer = _layer(ref, static)
    # No masks in the loop: the last block of rows begins early enough to be whole, so that its rows lie at constant
    # distances (rows of two blocks get equal values); else rows and columns past the end repeat the last one, and
    # nothing of those is stored.
    first, whole_rows, whole_cols = row_block * tile.block_m, static.m >= tile.block_m, static.n % tile.block_n == 0
    if whole_rows:
        first = jnp.minimum(first, static.m - tile.block_m)
    row = first + arange(tile.block_m)
    existing = row if whole_rows else jnp.minimum(row, static.m - 1)
    static = static._replace(tile=replace(tile, block_n=tile.block_n // tile.pieces))
    columns, places = [], []
    for piece in range(tile.pieces):
        block = col_block * tile.pieces + piece
        col = block * static.tile.block_n + arange(static.tile.block_n)
        columns.append(col)
        places.append(_At(layer, existing, col if whole_cols else jnp.minimum(col, static.n - 1), block))
    sums = _sums_over_k(ref, places, part, static)
    for col, at, acc in zip(columns, places, sums, strict=True):
        index = _oriented(static, row, col)
        limits = [
            i < n
            for i, n, whole in zip(index, (static.m, static.n), (whole_rows, whole_cols), strict=True)
            if not whole
        ]
        inside = functools.reduce(jnp.logical_and, limits) if limits else None
        if tile.split_k > 1:
            store(out_ref, (part, *index), acc, mask=inside)
        else:
            store(out_ref, index, _epilogue(ref, at, acc, static).astype(out_ref.dtype), mask=inside)


def _layer(ref: dict[str, Any], static: _Static) -> Array:
    if "layer" not in ref:
        return jnp.int32(0)
    return body.existing(load(ref["layer"], (0,)), static.layers)


class _At(NamedTuple):
    """Where a program is: its layer, its rows of x, its rows of w (columns of the result), and its block of these."""

    layer: Array
    row: Array
    col: Array
    col_block: Array


def _oriented(static: _Static, row: Any, col: Any) -> tuple[Any, Any]:
    """A value a row of x and a value a row of w, as they lie along the accumulator; scalars and None stay."""
    row_axis, col_axis = (0, 1) if static.tile.swap else (1, 0)
    row, col = (
        v if v is None or not v.shape else jnp.expand_dims(v, axis) for v, axis in ((row, row_axis), (col, col_axis))
    )
    return row, col


def _sums_over_k(ref: dict[str, Any], places: list[_At], part: Array, static: _Static) -> list[Array]:
    """The accumulator of each piece of a program's columns.

    Where a step is cut all have a mask: a last one of its own, behind the loop, would wait for its loads.
    """
    tile = static.tile
    shape = (tile.block_n, tile.block_m) if tile.swap else (tile.block_m, tile.block_n)
    zeros = [jnp.zeros(shape, static.total)] * len(places)
    step = functools.partial(_step, ref, places, static)
    first, last = body.steps_of(part if tile.split_k > 1 else None, tile.split_k, static.steps)
    return lowering.loop(last, step, zeros, start=first)


def _step(ref: dict[str, Any], places: list[_At], static: _Static, i: Array, sums: list[Array]) -> list[Array]:
    """The accumulators after step ``i`` of K."""
    tile = static.tile
    if static.straddles:
        cell = body.div(i, static.steps_a_cell)
        first = cell * static.cell + (i - cell * static.steps_a_cell) * tile.block_k
        limit = jnp.minimum(cell * static.cell + static.cell, static.k)
    else:
        first, limit = i * tile.block_k, jnp.int32(static.k)
    column = first + arange(tile.block_k)
    valid = (column < limit)[None, :] if static.cut else None
    fill = 0 if static.cut else None
    row = places[0].row
    x = load(ref["x"], (row[:, None], column[None, :]), mask=valid, other=fill)
    s_x = s_w = None
    if static.x_cols:
        s_x = body.decode_scale(load(ref["x_scale"], (row, body.div(first, static.x_cols))))
    result = []
    for at, acc in zip(places, sums, strict=True):
        w = load(ref["w"], (at.layer, at.col[:, None], column[None, :]), mask=valid, other=fill)
        left, right = _same_dtype(x, w)
        if tile.swap:
            left, right = right, left
        if not static.cell:
            result.append(acc + lowering.dot(left, right) if static.exact else lowering.dot(left, right, acc))
            continue
        if static.w_cols:
            row_of_scale = _scale_row(at, static)
            s_w = body.decode_scale(load(ref["w_scale"], (at.layer, row_of_scale, body.div(first, static.w_cols))))
        partial = lowering.dot(left, right).astype(jnp.float32)
        result.append(body.add_scaled(acc, partial, _scales(s_x, s_w, static)))
    return result


def _same_dtype(x: Array, w: Array) -> tuple[Array, Array]:
    if w.dtype == jnp.uint8:
        return x, body.decode_e4m3(w, x.dtype)
    if x.dtype == w.dtype:
        return x, w
    if w.dtype == jnp.int8:
        return x, w.astype(x.dtype)
    return x.astype(jnp.float32), w.astype(jnp.float32)


def _scale_row(at: _At, static: _Static) -> Array:
    """Row of w's scales for each of a program's rows of w: one for all where they share it."""
    if static.w_rows % static.tile.block_n == 0:
        return body.div(at.col_block * static.tile.block_n, static.w_rows)
    return at.col if static.w_rows == 1 else body.div(at.col, static.w_rows)


def _scales(s_x: Array | None, s_w: Array | None, static: _Static) -> list[Array]:
    """What to multiply an accumulator by for scales a row of x and a row of w; either may be one number, or None."""
    if s_x is not None and s_w is not None and not (s_x.shape and s_w.shape):
        s_x, s_w = (s_x * s_w, None) if s_x.shape else (None, s_x * s_w)
    return [scale for scale in _oriented(static, s_x, s_w) if scale is not None]


def _epilogue(ref: dict[str, Any], at: _At, acc: Array, static: _Static) -> Array:
    """Scales that cover all of K, bias and activation."""
    s_x = s_w = None
    if "x_scale" in ref and not static.x_cols:
        rows = at.row if ref["x_scale"].shape[0] > 1 else 0
        s_x = body.decode_scale(load(ref["x_scale"], (rows, 0)))
    if "w_scale" in ref and not static.w_cols:
        s_w = body.decode_scale(load(ref["w_scale"], (at.layer, _scale_row(at, static), 0)))
    y = functools.reduce(jnp.multiply, _scales(s_x, s_w, static), acc.astype(jnp.float32))
    if "bias" in ref:
        bias = load(ref["bias"], (at.layer, at.col)).astype(jnp.float32)
        y = y + _oriented(static, None, bias)[1]
    return y if static.activation is None else body.ungated(static.activation, y)


def finish_tile(m: int, n: int) -> MatmulTile:
    """The tile of a program that sums the parts of a split K: two elements a thread, whose loads all wait at once."""
    cols = min(512, body.pow2_at_least(n))
    rows = min(512 // cols, body.pow2_at_least(m))
    return MatmulTile(block_m=rows, block_n=cols, block_k=16, num_warps=8, num_stages=1)


def _finish(parts: Array, given: dict[str, Array], static: _Static, out_dtype: Any, interpret: bool) -> Array:
    """The epilogue of a split K: sums the parts in ascending order."""
    tile = finish_tile(static.m, static.n)
    names = tuple(name for name in given if name not in ("x", "w"))
    return lowering.kernel_call(
        _finish_kernel,
        name="linear_finish",
        grid=(pl.cdiv(static.m, tile.block_m) * pl.cdiv(static.n, tile.block_n),),
        out_shape=jax.ShapeDtypeStruct((static.m, static.n), out_dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        static=static._replace(tile=tile, names=("parts", *names)),
    )(parts, *(given[name] for name in names))


def _finish_kernel(*refs: Any, static: _Static) -> None:
    *operands, out_ref = refs
    ref = dict(zip(static.names, operands, strict=True))
    tile = static.tile
    across = pl.cdiv(static.n, tile.block_n)
    row_block, col_block = body.div(pl.program_id(0), across), body.rem(pl.program_id(0), across)
    row, col = row_block * tile.block_m + arange(tile.block_m), col_block * tile.block_n + arange(tile.block_n)
    layer = _layer(ref, static)
    at = _At(layer, jnp.minimum(row, static.m - 1), jnp.minimum(col, static.n - 1), col_block)
    inside = (row < static.m)[:, None] & (col < static.n)[None, :]
    acc = jnp.zeros((tile.block_m, tile.block_n), static.total)
    for part in range(ref["parts"].shape[0]):
        acc = acc + load(ref["parts"], (part, at.row[:, None], at.col[None, :]))
    y = _epilogue(ref, at, acc, static)
    store(out_ref, (row[:, None], col[None, :]), y.astype(out_ref.dtype), mask=inside)


def _checked(
    x: Array,
    w: Array,
    w_scale: Array | None,
    x_scale: Array | None,
    w_block: tuple[int, int],
    x_group: int,
    bias: Array | None,
    activation: str | None,
    exact: bool,
    tile: MatmulTile,
) -> _Static:
    """The static description, if everything fits together; w, its scale and bias have a leading axis of layers."""
    floats = (jnp.bfloat16, jnp.float16, jnp.float32)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[2]:
        raise ValueError(f"x {x.shape} and w {w.shape} (layers first) must be (M, K) and (L, N, K)")
    if x.dtype not in (*floats, *body.CODES) or w.dtype not in (*floats, *body.CODES):
        raise TypeError(f"x is {x.dtype} and w {w.dtype}, but operands are float8_e4m3fn, int8 or 16- or 32-bit floats")
    if x.dtype in body.CODES and w.dtype != x.dtype:
        raise TypeError(f"x is {x.dtype}, so w must be so too, not {w.dtype}")
    (m, k), (layers, n, _) = x.shape, w.shape
    for name, operand, scale in (("w_scale", w, w_scale), ("x_scale", x, x_scale)):
        if (operand.dtype in body.CODES) != (scale is not None):
            there = "missing" if scale is None else "given"
            raise ValueError(f"{name} is {there}, but its operand is {operand.dtype}")
    rows, cols = (extent if b == -1 else b for b, extent in zip(w_block, (n, k), strict=True))
    if w_scale is not None and w_scale.shape != (layers, pl.cdiv(n, max(rows, 1)), max(1, pl.cdiv(k, max(cols, 1)))):
        raise ValueError(f"w_scale has shape {w_scale.shape}, which is not the grid of {w_block} blocks of {w.shape}")
    group = k if x_group == -1 else x_group
    groups = max(1, pl.cdiv(k, max(group, 1)))
    if x_scale is not None and x_scale.shape not in ((m, groups), (1, 1) if groups == 1 else (m, groups)):
        raise ValueError(f"x_scale has shape {x_scale.shape}, which does not fit x {x.shape} in groups of {x_group}")
    if bias is not None and bias.shape != (layers, n):
        raise ValueError(f"bias has shape {bias.shape}, but it is (L, N) = {(layers, n)}")
    static = _Static(
        names=(),
        tile=tile,
        layers=layers,
        m=m,
        n=n,
        k=k,
        w_rows=max(rows, 1),
        w_cols=cols if w_scale is not None and w_scale.shape[-1] > 1 else 0,
        x_cols=group if x_scale is not None and x_scale.shape[-1] > 1 else 0,
        exact=exact and x.dtype == body.F8,
        int8=x.dtype == jnp.int8,
        activation=activation,
    )
    if static.total == jnp.int32 and k > bits.INT32_PRODUCTS:
        raise ValueError(f"K={k}, but sums of int8 products are sure to fit int32 only up to {bits.INT32_PRODUCTS}")
    return static


def _of_nothing(static: _Static, bias: Array | None, layer: Array | None, out_dtype: Any) -> Array:
    """The product where M, N or K is 0: the bias alone."""
    y = jnp.zeros((static.m, static.n), jnp.float32)
    if bias is not None:
        y = y + bias[0 if layer is None else layer].astype(jnp.float32)
    if static.activation is not None:
        y = body.ungated(static.activation, y)
    return y.astype(out_dtype)
