"""The two products of a layer of experts: kernels and their launches.

The first product's epilogue turns the sums of an expert's halves into the intermediate

    h = round(activation(scale * sum + bias))

and, where the scales it is to have fit a program's tile, into codes and scales. The second one's adds the bias and
multiplies by the router weight. Both are float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import body, grouped, launch, lowering, quantize
from pallas_kernels.activation import Activation, ActivationParams, activate
from pallas_kernels.experts import InputScheme
from pallas_kernels.fourbit.expand import AGAIN_PROGRAMS, any_beyond
from pallas_kernels.grouped import At, Batched, Block, Input, Product, Rows, Weights
from pallas_kernels.lowering import arange, load, store
from pallas_kernels.tuning.heuristics import MatmulTile

_F32_TINY = np.finfo(np.float32).tiny


class _Hidden(NamedTuple):
    """What the first product leaves: values or codes (S, I); scales (S, groups); each tile's largest magnitude."""

    data: Any
    scale: Any | None = None
    amax: Any | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Epilogue:
    """How the first product's sums become the intermediate.

    Attributes:
      activation: of gate and up, or of the only half.
      dtype: what its result is rounded to.
      scheme: how it is quantised, or None.
    """

    activation: Activation
    dtype: str
    scheme: InputScheme | None

    @property
    def group(self) -> int | None:
        """Columns of a group of scales, None where scales are not by groups."""
        return self.scheme.group if self.scheme is not None and self.scheme.scale == "group" else None

    @property
    def static(self) -> bool:
        return self.scheme is not None and self.scheme.scale == "static"

    def requantises(self, tile: MatmulTile) -> bool:
        """Whether a program's tile has all that its scales need."""
        return self.static or self.group == tile.block_n


class Again(NamedTuple):
    """What is made again of a product with expanded weights: ``product`` with packed ``w``, of rows of many exponents.

    ``product`` is of ``Product.again``, ``passes`` as in ``fourbit.expand.Expanded``.
    """

    w: Weights
    passes: Array
    product: Product


class _Operands(NamedTuple):
    """Refs of the first product beside x and w: activation constants, and the intermediate's static scale."""

    params: ActivationParams
    given: Any | None


def first_product(
    x: Input,
    w: Weights,
    rows: Rows,
    params: ActivationParams,
    given: Array | None,
    *,
    product: Product,
    epilogue: Epilogue,
    again: Again | None = None,
    interpret: bool,
) -> Input:
    """The intermediate (S, I) of every slot, quantised as ``epilogue`` says; rows of slots in no block are undefined.

    ``given`` is float32 (1,) or (E,), of a static scheme. Nothing is made ``again`` where the scale is the tensor's.
    """
    tile, columns, scheme = product.tile, product.columns(w), epilogue.scheme
    operands = _Operands(params, given)
    out = _hidden_shapes(
        product, columns, product.blocks(rows), epilogue, per_expert=given is not None and given.size > 1
    )
    [hidden] = lowering.kernel_call(
        _first_kernel,
        name="moe_first",
        grid=product.grid(rows, columns),
        out_shape=[out],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        product=product,
        epilogue=epilogue,
    )(x, w, rows, operands)
    if again is not None:
        assert scheme is not None and scheme.scale != "tensor"
        [hidden] = _made_again(
            _first_again,
            "moe_first_again",
            again,
            rows,
            columns,
            epilogue=epilogue,
            interpret=interpret,
            before=[hidden],
        )(x, again.w, rows, operands, again.passes, [hidden])
    if scheme is None:
        return Input(hidden.data)
    if scheme.scale == "static":
        assert given is not None
        return Input(hidden.data, given.reshape(1, 1) if hidden.scale is None else hidden.scale)
    if epilogue.requantises(tile):
        return Input(hidden.data, hidden.scale)
    chain = quantise_chain(hidden.data, scheme, amax=hidden.amax)
    [(codes, scale)] = launch.run_chains("moe_requantize", chain, interpret=interpret)
    return Input(codes, scale)


def _made_again(
    kernel: Callable[..., None],
    name: str,
    again: Again,
    rows: Rows,
    columns: int,
    *,
    before: Any,
    interpret: bool,
    **static: Any,
) -> Callable[..., Any]:
    """A launch of ``kernel`` over what there is to make again, which overwrites ``before``, its last input."""
    [tiles] = again.product.grid(rows, columns)
    programs = min(tiles, AGAIN_PROGRAMS)
    return lowering.kernel_call(
        kernel,
        name=name,
        grid=(programs,),
        out_shape=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), before),
        num_warps=again.product.tile.num_warps,
        num_stages=again.product.tile.num_stages,
        interpret=interpret,
        overwrites=True,
        product=again.product,
        tiles=tiles,
        programs=programs,
        **static,
    )


def _hidden_shapes(product: Product, columns: int, blocks: int, epilogue: Epilogue, *, per_expert: bool) -> _Hidden:
    requantises = epilogue.requantises(product.tile)
    dtype = epilogue.scheme.codes if epilogue.scheme is not None and requantises else epilogue.dtype
    data = jax.ShapeDtypeStruct((product.slots, columns), dtype)
    scale = amax = None
    if requantises and (epilogue.group or per_expert):
        groups = pl.cdiv(columns, epilogue.group) if epilogue.group else 1
        scale = jax.ShapeDtypeStruct((product.slots, groups), jnp.float32)
    if epilogue.scheme is not None and epilogue.scheme.scale == "tensor":
        amax = jax.ShapeDtypeStruct((blocks * product.tiles(columns),), jnp.float32)
    return _Hidden(data, scale, amax)


def quantise_chain(
    x: Array,
    scheme: InputScheme,
    *,
    scale: Array | None = None,
    amax: Array | None = None,
    choices: quantize.Choices | None = None,
    experts: int = 0,
) -> launch.Chain:
    """The jobs that make codes and scales of x (R, K), which is not empty.

    Args:
      x: bfloat16, float16 or float32.
      scheme: how.
      scale: float32 (1, 1) or (R, 1), of a static scheme.
      amax: float32 (n,), for one measured scale: the largest magnitudes of x's parts, instead of measuring x.
      choices: what x's rows go to; those that go to none of the ``experts`` here touch no scale but their own.
    """
    codes, power_of_two = scheme.codes, scheme.power_of_two
    if scheme.scale == "static":
        assert scale is not None
        return [lambda: quantize.static_job(x, scale)]
    if scheme.scale == "group":
        return [lambda: quantize.groups_job(x, scheme.group, codes=codes, power_of_two=power_of_two)]
    if scheme.scale == "token":
        return [lambda: quantize.tokens_job(x, codes=codes, power_of_two=power_of_two)]
    return quantize.tensor_chain(x, codes=codes, power_of_two=power_of_two, amax=amax, choices=choices, experts=experts)


def _first_kernel(
    x: Input,
    w: Weights,
    rows: Rows,
    operands: _Operands,
    out: _Hidden,
    *,
    product: Product,
    epilogue: Epilogue,
) -> None:
    _first(pl.program_id(0), x, w, rows, operands, out, product, epilogue)


def _first_again(
    x: Input,
    w: Weights,
    rows: Rows,
    operands: _Operands,
    passes: Any,
    before: list[_Hidden],
    out: _Hidden,
    *,
    product: Product,
    epilogue: Epilogue,
    tiles: int,
    programs: int,
) -> None:
    def make(number: Array) -> None:
        _first(number, x, w, rows, operands, out, product, epilogue)

    body.for_share(tiles, programs, make, when=any_beyond(passes))


def _first(
    program: Array,
    x: Input,
    w: Weights,
    rows: Rows,
    operands: _Operands,
    out: _Hidden,
    product: Product,
    epilogue: Epilogue,
) -> None:
    at = grouped.place(program, w, rows, product)
    tiles = product.tiles(product.columns(w))

    def finish(product: Product, at: At, totals: grouped.Sums) -> None:
        # Located again, so that no slots are held in registers over the loop.
        at = grouped.after_sums(at, w, product)
        block = grouped.locate(rows, at.block, product)
        index, inside = _where(block, at, w, product)
        halves = []
        for half, total in enumerate(totals):
            value = grouped.finish(total, half, x, w, block, at, product)
            halves.append(value if w.bias is None else value + grouped.bias_of(half, w, block, at, product))
        h = activate(epilogue.activation, halves, operands.params, block.expert)
        h = lowering.round_to(h, epilogue.dtype)
        _store_hidden(h, index, inside, operands.given, out, block, at, product, epilogue)
        if out.amax is not None:
            assert epilogue.scheme is not None
            magnitude = body.magnitude(jnp.where(inside, h, 0), epilogue.scheme.codes)
            store(out.amax, (at.block * tiles + at.tile,), jnp.max(magnitude))

    def make(block: Block, product: Product) -> None:
        grouped.for_tiles(x, w, block, at, product, functools.partial(finish, product))

    whole = grouped.for_used(rows, at, product, make)

    if out.amax is not None:

        @pl.when(~whole.used)
        def _() -> None:
            tile = at.tile + arange(body.pow2_at_least(product.tile.run))
            inside = tile < jnp.minimum(at.tile + product.tile.run, tiles)
            store(out.amax, (at.block * tiles + tile,), jnp.zeros(tile.shape, jnp.float32), mask=inside)


def _where(block: Block, at: At, w: Weights, product: Product) -> tuple[tuple[Array, Array], Array]:
    """Slots and columns of a program's tile, as they lie along its accumulator, and which elements count."""
    index = grouped.oriented(product.tile, block.slot, grouped.columns_of(at, product.tile))
    live, _ = grouped.oriented(product.tile, block.live, None)
    return index, live & (index[1] < product.columns(w))


def _store_hidden(
    h: Array,
    index: tuple[Array, Array],
    inside: Array,
    given: Any | None,
    out: _Hidden,
    block: Block,
    at: At,
    product: Product,
    epilogue: Epilogue,
) -> None:
    scheme, swap = epilogue.scheme, product.tile.swap
    if scheme is None or not epilogue.requantises(product.tile):
        store(out.data, index, h.astype(out.data.dtype), mask=inside)
        return
    if epilogue.group:
        # Columns past the end repeat one of the group's own, so they do not change its largest magnitude.
        codes, scales = body.quantize_tile(
            h, 0 if swap else 1, codes=scheme.codes, floor=quantize.GROUP_FLOOR, power_of_two=scheme.power_of_two
        )
        store(out.scale, (block.slot, at.tile), scales, mask=block.live)
    else:
        assert given is not None
        scale = jnp.maximum(load(given, (block.expert if given.shape[0] > 1 else 0,)), _F32_TINY)
        codes = body.codes_of(h, lowering.reciprocal(scale), body.F8, saturates=True)
        if out.scale is not None:
            # Programs that share a row write the same value.
            store(out.scale, (block.slot, 0), jnp.broadcast_to(scale, block.slot.shape), mask=block.live)
    store(out.data, index, codes, mask=inside)


def second_product(
    h: Input,
    w: Weights,
    rows: Rows,
    weights: Array | None,
    out_dtype: jax.typing.DTypeLike,
    *,
    product: Product,
    again: Again | None = None,
    interpret: bool,
) -> Array:
    """Every slot's result (S, H), or where K is split what each share adds to it (S * ``split_k``, H).

    Rows of slots in no block are undefined.

    Args:
      h: the intermediate.
      w: w2.
      rows: where the rows of each expert are.
      weights: float32 (S,), router weights, or None for none.
      out_dtype: of the result.
      product: static facts.
      again: what is made again where ``w`` is expanded.
      interpret: compute with XLA on any device, for tests.
    """
    tile, columns = product.tile, product.columns(w)
    y = lowering.kernel_call(
        _second_kernel,
        name="moe_second",
        grid=product.grid(rows, columns),
        out_shape=jax.ShapeDtypeStruct((product.slots * tile.split_k, columns), out_dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
        product=product,
    )(h, w, rows, weights)
    if again is None:
        return y
    launch_again = _made_again(_second_again, "moe_second_again", again, rows, columns, interpret=interpret, before=y)
    return launch_again(h, again.w, rows, weights, again.passes, y)


def _second_kernel(
    h: Input, w: Weights, rows: Rows, weights_ref: Any | None, out_ref: Any, *, product: Product
) -> None:
    _second(pl.program_id(0), h, w, rows, weights_ref, out_ref, product)


def _second_again(
    h: Input,
    w: Weights,
    rows: Rows,
    weights_ref: Any | None,
    passes: Any,
    before_ref: Any,
    out_ref: Any,
    *,
    product: Product,
    tiles: int,
    programs: int,
) -> None:
    def make(number: Array) -> None:
        _second(number, h, w, rows, weights_ref, out_ref, product)

    body.for_share(tiles, programs, make, when=any_beyond(passes))


def _second(
    program: Array, h: Input, w: Weights, rows: Rows, weights_ref: Any | None, out_ref: Any, product: Product
) -> None:
    at = grouped.place(program, w, rows, product)

    def finish(product: Product, at: At, totals: grouped.Sums) -> None:
        # Located again, so that no slots are held in registers over the loop.
        at = grouped.after_sums(at, w, product)
        block = grouped.locate(rows, at.block, product)
        places, narrow = grouped.pieces(at, product)
        for place, total in zip(places, totals, strict=True):
            y = grouped.finish(total, 0, h, w, block, place, narrow)
            if w.bias is not None:
                bias = grouped.bias_of(0, w, block, place, narrow)
                y = y + (bias if place.share is None else jnp.where(place.share == 0, bias, 0))
            if weights_ref is not None:
                weight = load(weights_ref, (block.slot,), mask=block.live, other=0)
                y = y * grouped.oriented(product.tile, weight, None)[0]
            (slot, column), inside = _where(block, place, w, narrow)
            row = slot if place.share is None else slot * product.tile.split_k + place.share
            store(out_ref, (row, column), y.astype(out_ref.dtype), mask=inside)

    def make(block: Block, product: Product) -> None:
        grouped.for_tiles(h, w, block, at, product, functools.partial(finish, product))

    whole = grouped.for_used(rows, at, product, make)

    if isinstance(rows, Batched) and not product.again:
        # Rows that do not count are zero, whichever block they lie in.
        def clear(number: Array, carry: None) -> None:
            index, inside = _where(whole, at._replace(tile=at.tile + number), w, product)
            rest = (index[0] < product.slots) & (index[1] < product.columns(w)) & ~inside
            store(out_ref, index, jnp.zeros(rest.shape, out_ref.dtype), mask=rest)

        lowering.loop(product.tile.run, clear, None)
