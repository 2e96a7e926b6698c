"""A layer of experts for few slots, of mostly different experts: matrices times vectors, in two launches.

    h[s] = round(activation(w13[e_s] x[t] + b13)),   y[t] = sum_j weight[t, j] (w2[e_tj] h[t, j] + b2)

A program of the first product owns a slot and a few rows of each half; one of the second a token, all its slots and a
few rows. So there is nothing to align and nothing to combine. The ordinary cores multiply, which keep up with memory
where a weight is used once or twice; slots of one expert read it at about the same time, so that it comes from the
cache. x and h are quantised where they are read, by every program that reads them. Sums are float32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_kernels import body, lowering, quantize
from pallas_kernels.activation import Activation, ActivationParams, activate
from pallas_kernels.align import local_expert
from pallas_kernels.experts import InputScheme
from pallas_kernels.fourbit import product as fourbit
from pallas_kernels.fourbit.packing import Packed, Packing
from pallas_kernels.grouped import WHOLE, Input, Weights
from pallas_kernels.lowering import arange, load, store
from pallas_kernels.tuning.heuristics import MatmulTile

_F32_TINY = np.finfo(np.float32).tiny


class Routing(NamedTuple):
    """Slots' experts and weights; arrays outside a kernel, refs inside.

    Attributes:
      ids: int32 (S,), of any value; a slot whose expert is not here adds nothing.
      expert_map: int32 (E_global,), the slot here of each expert or -1; or None.
      weights: float32 (S,).
    """

    ids: Any
    expert_map: Any | None
    weights: Any


class Vectors(NamedTuple):
    """What a product multiplies by; arrays outside a kernel, refs inside.

    Attributes:
      x: values (R, K), or codes and scales.
      given: float32 (1,) or (E,), of a static scheme for values.
      amax: float32 (n,), the largest magnitudes of parts of x, where one measured scale is for all of it.
    """

    x: Input
    given: Any | None = None
    amax: Any | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Static facts of a product.

    Attributes:
      tile: a program has ``block_n`` rows of each half and sums ``block_k`` columns at a time.
      k: slots a token.
      experts: E.
      scheme: how x is quantised, or None.
      w_block: (rows, cols) that share a scale of w.
      packing: of four-bit weights, None of others; then ``w_block`` says nothing.
    """

    tile: MatmulTile
    k: int
    experts: int
    scheme: InputScheme | None
    w_block: tuple[int, int]
    packing: Packing | None = None

    def extents(self, w: Weights) -> tuple[int, int]:
        """Rows of each half, and columns."""
        return w.data.shape[3:] if self.packing is None else (self.packing.n, self.packing.k)

    def warps(self, vectors: int) -> int:
        """Warps of a program with so many vectors.

        Packed weights are unpacked by words, so each thread is to have the elements of at least one.

        Raises:
          ValueError: a tile that has fewer for one warp.
        """
        if self.packing is None:
            return self.tile.num_warps
        elements = vectors * self.tile.block_n * (self.tile.block_k // self.packing.runs)
        a_warp = 32 * self.packing.neighbours
        if elements < a_warp:
            raise ValueError(f"tile={self.tile} has {elements} packed elements, and a warp takes at least {a_warp}")
        return min(self.tile.num_warps, elements // a_warp)


def reads_values(scheme: InputScheme | None, tile: MatmulTile) -> bool:
    """Whether a program can quantise what it reads: all that shares a scale is at hand, or measured already."""
    if scheme is None or scheme.scale != "group":
        return True
    return scheme.group & -scheme.group == scheme.group <= tile.block_k


def first_product(
    vectors: Vectors,
    w: Weights,
    routing: Routing,
    params: ActivationParams,
    *,
    facts: Facts,
    activation: Activation,
    dtype: str,
    measure: DTypeLike | None,
    interpret: bool,
) -> tuple[Array, Array | None]:
    """The intermediate (S, I) in ``dtype``, of slots with an expert here.

    With ``measure``, a dtype of codes, also the largest ``body.magnitude`` for these of each program's part of it.
    """
    slots, (columns, _), tile = routing.ids.shape[0], facts.extents(w), facts.tile
    programs = slots * pl.cdiv(columns, tile.block_n)
    [(h, amax)] = lowering.kernel_call(
        _first_kernel,
        name="moe_first_few",
        grid=(programs,),
        out_shape=[
            (
                jax.ShapeDtypeStruct((slots, columns), dtype),
                None if measure is None else jax.ShapeDtypeStruct((programs,), jnp.float32),
            )
        ],
        num_warps=facts.warps(1),
        num_stages=1,
        interpret=interpret,
        facts=facts,
        activation=activation,
        measure=measure,
    )(vectors, w, routing, params)
    return h, amax


def second_product(
    vectors: Vectors, w: Weights, routing: Routing, out_dtype: str, *, facts: Facts, interpret: bool
) -> Array:
    """The layer's result (T, H), weighted and summed over each token's slots."""
    tokens, (columns, _), tile = routing.ids.shape[0] // facts.k, facts.extents(w), facts.tile
    return lowering.kernel_call(
        _second_kernel,
        name="moe_second_few",
        grid=(tokens * pl.cdiv(columns, tile.block_n),),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), out_dtype),
        num_warps=facts.warps(body.pow2_at_least(facts.k)),
        num_stages=1,
        interpret=interpret,
        facts=facts,
    )(vectors, w, routing)


def _first_kernel(
    vectors: Vectors,
    w: Weights,
    routing: Routing,
    params: ActivationParams,
    out: tuple[Any, Any | None],
    *,
    facts: Facts,
    activation: Activation,
    measure: DTypeLike | None,
) -> None:
    program = pl.program_id(0)
    h_ref, amax_ref = out
    slots, columns = h_ref.shape
    slot, block = body.rem(program, slots), body.div(program, slots)
    expert = local_expert(load(routing.ids, (slot,)), routing.expert_map, facts.experts)

    @pl.when(expert >= 0)
    def _() -> None:
        row = slot if vectors.x.data.shape[0] == slots else body.div(slot, facts.k)
        h = activate(activation, _products(vectors, w, _Rows(expert, row, None), block, facts), params, expert)
        h = lowering.round_to(h, h_ref.dtype)
        column = block * facts.tile.block_n + arange(facts.tile.block_n)
        store(h_ref, (slot, column), h.astype(h_ref.dtype), mask=column < columns)
        if measure is not None:
            store(amax_ref, (program,), jnp.max(body.magnitude(jnp.where(column < columns, h, 0), measure)))

    if amax_ref is not None:

        @pl.when(expert < 0)
        def _() -> None:
            store(amax_ref, (program,), jnp.float32(0))


def _second_kernel(vectors: Vectors, w: Weights, routing: Routing, out_ref: Any, *, facts: Facts) -> None:
    program = pl.program_id(0)
    tokens, columns = out_ref.shape
    token, block = body.rem(program, tokens), body.div(program, tokens)
    choice = arange(body.pow2_at_least(facts.k))
    slot = token * facts.k + jnp.minimum(choice, facts.k - 1)
    expert = local_expert(load(routing.ids, (slot,)), routing.expert_map, facts.experts)
    live = (choice < facts.k) & (expert >= 0)
    [y] = _products(vectors, w, _Rows(jnp.where(live, expert, 0), slot, live), block, facts)
    y = jnp.where(live[:, None], y * load(routing.weights, (slot,))[:, None], 0)
    column = block * facts.tile.block_n + arange(facts.tile.block_n)
    store(out_ref, (token, column), jnp.sum(y, axis=0).astype(out_ref.dtype), mask=column < columns)


class _Rows(NamedTuple):
    """The vectors that a program multiplies by, one (scalars) or several (arrays (R,)).

    Attributes:
      expert: of each.
      row: of x, of each.
      live: which of several count.
    """

    expert: Array
    row: Array
    live: Array | None

    def after(self, value: Array, axes: int) -> Array:
        """One of the above with ``axes`` axes after it."""
        return jnp.expand_dims(value, tuple(range(1, 1 + axes))) if value.shape else value

    def before(self, value: Array) -> Array:
        """A value that is the same for all vectors, with their axis before its own if they are several."""
        return value[None] if self.row.shape else value

    def mask(self, inside: Array | None, axes: int) -> Array | None:
        """Where vectors are live, with ``axes`` axes after them, and ``inside``."""
        if self.live is None:
            return inside
        live = self.after(self.live, axes)
        return live if inside is None else live & self.before(inside)


def _products(vectors: Vectors, w: Weights, rows: _Rows, block: Array, facts: Facts) -> list[Array]:
    """In a kernel: each half's product with its bias, (block_n,) or (R, block_n)."""
    tile, halves, (n, k) = facts.tile, w.data.shape[2], facts.extents(w)
    layer = 0 if w.layer is None else body.existing(load(w.layer, (0,)), w.data.shape[0])
    row = block * tile.block_n + arange(tile.block_n)
    row = row if n % tile.block_n == 0 else jnp.minimum(row, n - 1)
    at = _At(layer, rows, block, row)
    read, factor = _reader(vectors, rows, facts)
    if facts.packing is not None:
        sums = _packed_sums(read, w, at, halves, facts, facts.packing)
        return [_finish(total, factor, w, at, half, facts) for half, total in enumerate(sums)]

    masked = k % tile.block_k != 0

    def step(i: Array, sums: list[Array]) -> list[Array]:
        column = i * tile.block_k + arange(tile.block_k)
        inside = column < k if masked else None
        weights = [_load_weights(w, at, half, column, inside) for half in range(halves)]
        x = read(column, inside)
        found = []
        for half, (codes, total) in enumerate(zip(weights, sums, strict=True)):
            scaled, of_each = _scaled(x, w, at, half, column, facts)
            weight = _as_float(codes) if of_each is None else _as_float(codes) * of_each
            found.append(lowering.fma(weight, jnp.expand_dims(scaled, -2), total))
        return found

    zeros = [jnp.zeros((*rows.row.shape, tile.block_n, tile.block_k), jnp.float32)] * halves
    sums = lowering.loop(pl.cdiv(k, tile.block_k), step, zeros)
    return [_finish(jnp.sum(total, axis=-1), factor, w, at, half, facts) for half, total in enumerate(sums)]


class _At(NamedTuple):
    """Where a program is in w: its layer, its experts, its block of rows and these, those past the end the last."""

    layer: Array | int
    rows: _Rows
    block: Array
    row: Array


def _packed_sums(read: "_Read", w: Weights, at: _At, halves: int, facts: Facts, packing: Packing) -> list[Array]:
    """Each half's sums of packed weights."""
    tile, rows, slots = facts.tile, at.rows, at.rows.row.shape
    shape = (*slots, tile.block_n)

    def each(value: Array, axes: int) -> Array:
        return jnp.broadcast_to(rows.after(value, axes) if axes else rows.before(value), shape).reshape(-1)

    parts = [
        fourbit.Part((at.layer, each(rows.expert, 1), half), each(at.row, 0))
        if slots
        else fourbit.Part((at.layer, rows.expert, half), at.row)
        for half in range(halves)
    ]
    packed = Packed(w.data, w.scale, w.zero_point, w.global_scale)
    width = tile.block_k // packing.runs

    masked = packing.k % tile.block_k != 0

    def step(i: Array, sums: list[Array]) -> list[Array]:
        operands = [fourbit.Operands(packed, part, packing, tile, i) for part in parts]
        for j in range(packing.runs):
            column = fourbit.columns_of_runs(packing, tile.block_k, i, j, 1)
            x = jnp.expand_dims(read(column, column < packing.k if masked else None), -2)
            weights = [operand.values(j, exact=facts.scheme is not None) for operand in operands]
            sums = [lowering.fma(v.reshape(*shape, width), x, s) for v, s in zip(weights, sums, strict=True)]
        return sums

    sums = [jnp.zeros((*shape, width), jnp.float32)] * halves
    sums = lowering.loop(pl.cdiv(packing.k, tile.block_k), step, sums)
    scales = [fourbit.row_scale(packed, part, packing).reshape(shape) for part in parts]
    return [jnp.sum(total, axis=-1) * scale for total, scale in zip(sums, scales, strict=True)]


def _load_weights(w: Weights, at: _At, half: int, column: Array, inside: Array | None) -> Array:
    each = at.rows.before
    index = (at.layer, at.rows.after(at.rows.expert, 2), half, each(at.row[:, None]), each(column[None, :]))
    mask = at.rows.mask(None if inside is None else inside[None, :], 2)
    return load(w.data, index, mask=mask, other=None if mask is None else 0)


def _as_float(w: Array) -> Array:
    return (body.decode_e4m3(w, jnp.bfloat16) if w.dtype == jnp.uint8 else w).astype(jnp.float32)


def _scaled(x: Array, w: Weights, at: _At, half: int, column: Array, facts: Facts) -> tuple[Array, Array | None]:
    """``x`` times the scales of w that change along K, if all rows share them; else these, for each weight."""
    rows, cols = facts.w_block
    if w.scale is None or cols == WHOLE:
        return x, None
    column = jnp.minimum(body.div(column, cols), w.scale.shape[4] - 1)
    if rows == WHOLE or rows % facts.tile.block_n == 0:
        row = jnp.int32(0) if rows == WHOLE else body.div(at.block * facts.tile.block_n, rows)
        index = (at.layer, at.rows.after(at.rows.expert, 1), half, row, at.rows.before(column))
        return x * body.decode_scale(load(w.scale, index)), None
    row, each = body.div(at.row, rows), at.rows.before
    index = (at.layer, at.rows.after(at.rows.expert, 2), half, each(row[:, None]), each(column[None, :]))
    return x, body.decode_scale(load(w.scale, index))


def _finish(total: Array, factor: Array | None, w: Weights, at: _At, half: int, facts: Facts) -> Array:
    """A sum times the scales that cover all of K, with its bias."""
    index = (at.layer, at.rows.after(at.rows.expert, 1), half)
    if factor is not None:
        total = total * at.rows.after(factor, 1)
    if facts.packing is None and w.scale is not None and facts.w_block[1] == WHOLE:
        rows = facts.w_block[0]
        row = jnp.zeros_like(at.row) if rows == WHOLE else body.div(at.row, rows)
        total = total * body.decode_scale(load(w.scale, (*index, at.rows.before(row), 0)))
    return total if w.bias is None else total + load(w.bias, (*index, at.rows.before(at.row))).astype(jnp.float32)


_Read = Callable[[Array, Array | None], Array]
"""(columns, which of them exist) to float32 values: (block_k,) or (R, block_k)."""


def _reader(vectors: Vectors, rows: _Rows, facts: Facts) -> tuple[_Read, Array | None]:
    """How a program reads its vectors, and what to multiply their products by."""
    (x, scale), scheme = vectors.x, facts.scheme

    def values(column: Array, inside: Array | None) -> Array:
        mask = rows.mask(inside, 1)
        index = (rows.after(rows.row, 1), rows.before(column))
        return load(x, index, mask=mask, other=None if mask is None else 0).astype(jnp.float32)

    if scale is not None:
        assert scheme is not None
        group, last = scheme.x_group, scale.shape[1] - 1
        if group == WHOLE:
            return values, body.decode_scale(load(scale, (rows.row if scale.shape[0] > 1 else 0, 0)))

        def scaled(column: Array, inside: Array | None) -> Array:
            index = (rows.after(rows.row, 1), rows.before(jnp.minimum(body.div(column, group), last)))
            return values(column, inside) * body.decode_scale(load(scale, index))

        return scaled, None
    if scheme is None:
        return values, None
    if scheme.scale == "group":

        def grouped(column: Array, inside: Array | None) -> Array:
            x = values(column, inside)
            tile = x.reshape(*x.shape[:-1], -1, scheme.group)
            axis = tile.ndim - 1
            codes, scales = body.quantize_tile(
                tile, axis, codes=scheme.codes, floor=quantize.GROUP_FLOOR, power_of_two=scheme.power_of_two
            )
            return (codes.astype(jnp.float32) * jnp.expand_dims(scales, axis)).reshape(x.shape)

        return grouped, None
    factor, inverse = _scale_of(vectors, values, rows, facts)

    def coded(column: Array, inside: Array | None) -> Array:
        x, saturates = values(column, inside), scheme.scale == "static"
        return body.codes_of(x, rows.after(inverse, 1), scheme.codes, saturates=saturates).astype(jnp.float32)

    return coded, factor


def _scale_of(vectors: Vectors, values: _Read, rows: _Rows, facts: Facts) -> tuple[Array, Array]:
    """The one scale of each vector, and its reciprocal."""
    scheme, tile = facts.scheme, facts.tile
    assert scheme is not None
    if scheme.scale == "static":
        assert vectors.given is not None
        index = rows.expert if vectors.given.shape[0] > 1 else jnp.zeros_like(rows.expert)
        scale = jnp.maximum(load(vectors.given, (index,)), _F32_TINY)
        return scale, lowering.reciprocal(scale)
    if scheme.scale == "tensor":
        amax = jnp.broadcast_to(quantize.largest(vectors.amax), rows.row.shape)
        return body.code_scale(amax, scheme.codes, floor=quantize.TENSOR_FLOOR, power_of_two=scheme.power_of_two)
    k = vectors.x.data.shape[1]

    def measure(i: Array, amax: Array) -> Array:
        column = i * tile.block_k + arange(tile.block_k)
        return jnp.maximum(amax, body.magnitude(values(column, column < k), scheme.codes))

    zeros = jnp.zeros((*rows.row.shape, tile.block_k), jnp.float32)
    amax = jnp.max(lowering.loop(pl.cdiv(k, tile.block_k), measure, zeros), axis=-1)
    return body.code_scale(amax, scheme.codes, floor=quantize.TOKEN_FLOOR, power_of_two=scheme.power_of_two)
