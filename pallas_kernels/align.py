"""Token alignment: which slots each block of rows works on, so that a block has one expert.

A slot is one choice of one token, slot = token * k + choice, S = T k slots in all; slot S stands for padding. Blocks of
``rows`` slots follow each other by expert, each expert's slots in ascending order and padded to whole blocks. A slot
whose expert is not here (-1, out of range, or mapped to -1) is in no block.

Up to ``ONE_LAUNCH`` slots, one program an expert counts everybody and places its own slots. Above, one launch counts
chunks of slots and ranks each slot among its equals, a second sums the counts and places every chunk. Both count with
histograms in registers: no sort, no atomics.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import body, launch, lowering
from pallas_kernels.lowering import arange, load, store

ONE_LAUNCH = 4096
"""Slots up to which alignment is one launch."""

_CHUNK = 256
"""Slots a program ranks when there are two launches."""
_PEERS = 32
"""Slots that a chunk's are compared with at a time."""
_CHUNKS = 64
"""Chunks whose counts are summed at a time."""
_MIN_BINS = 32
"""A warp's lanes: Triton's histogram has no smaller number of bins."""


class Blocks(NamedTuple):
    """Blocks of slots of one expert each; arrays outside a kernel, refs inside.

    Attributes:
      slots: int32 (count * rows,), the slots of each block; S where a row is padding.
      experts: int32 (count,), each block's expert.
      used: int32 (1,), how many blocks there are; entries of the others are undefined.
    """

    slots: Any
    experts: Any
    used: Any


def max_blocks(slots: int, experts: int, rows: int) -> int:
    """The most blocks of ``rows`` that any routing of ``slots`` slots to ``experts`` experts needs."""
    if slots <= experts:
        return slots
    return experts + (slots - experts) // rows


def local_expert(ids: Array, map_ref: Any | None, experts: int) -> Array:
    """In a kernel: the expert here of each id, -1 where there is none.

    Args:
      ids: int32 of any value and shape.
      map_ref: int32 (E_global,), the slot here of each expert or -1; None where ids count the experts here.
      experts: experts here.
    """
    if map_ref is not None:
        known = (ids >= 0) & (ids < map_ref.shape[0])
        ids = load(map_ref, (jnp.where(known, ids, 0),), mask=known, other=-1)
    return jnp.where((ids >= 0) & (ids < experts), ids, -1)


def align(
    topk_ids: Array, *, experts: int, rows: int, expert_map: Array | None = None, interpret: bool = False
) -> Blocks:
    """Sorts slots by expert into blocks of ``rows``; see ``align_chain``."""
    chain = align_chain(topk_ids, experts=experts, rows=rows, expert_map=expert_map)
    [(blocks,)] = launch.run_chains("align", chain, interpret=interpret)
    return blocks


def align_chain(topk_ids: Array, *, experts: int, rows: int, expert_map: Array | None = None) -> launch.Chain:
    """The jobs that sort slots by expert into blocks of ``rows``.

    Args:
      topk_ids: int32 (T, k), T k at least 1; any value, what is not an expert's is dropped.
      experts: experts here, E.
      rows: rows of a block, a power of two.
      expert_map: int32 (E_global,), the slot here of each expert or -1.

    Returns:
      One or two jobs, of which the last makes ``Blocks`` with count = max_blocks(T k, E, rows).
    """
    ids = topk_ids.reshape(-1)
    slots = ids.shape[0]
    count = max_blocks(slots, experts, rows)
    bins = max(_MIN_BINS, body.pow2_at_least(experts))
    blocks = Blocks(*(jax.ShapeDtypeStruct((n,), jnp.int32) for n in (count * rows, count, 1)))
    static = {"experts": experts, "rows": rows}
    if slots <= ONE_LAUNCH:
        return [
            lambda: launch.Job(
                kernel=_align_kernel,
                programs=experts,
                inputs=(ids, expert_map),
                outputs=(blocks,),
                static=static | {"bins": bins},
            )
        ]
    chunks = pl.cdiv(slots, _CHUNK)
    counts = jax.ShapeDtypeStruct((chunks, bins), jnp.int16)
    ranks = jax.ShapeDtypeStruct((slots,), jnp.int16)
    return [
        lambda: launch.Job(
            kernel=_count_kernel,
            programs=chunks,
            inputs=(ids, expert_map),
            outputs=(counts, ranks),
            static={"experts": experts},
        ),
        lambda counts, ranks: launch.Job(
            kernel=_place_kernel,
            programs=chunks,
            inputs=(ids, expert_map, counts, ranks),
            outputs=(blocks,),
            static=static,
        ),
    ]


def _experts_of(ids_ref: Any, map_ref: Any | None, slot: Array, experts: int) -> Array:
    """The expert here of slots, -1 for those past the last too."""
    ids = load(ids_ref, (slot,), mask=slot < ids_ref.shape[0], other=-1)
    return local_expert(ids, map_ref, experts)


def _total(mine: Array, values: Array) -> Array:
    return jnp.sum(jnp.where(mine, values, 0), dtype=jnp.int32)


def _padded(counts: Array, rows: int) -> tuple[Array, Array]:
    """Where each expert's blocks begin and end, in slots."""
    sizes = body.div(counts + (rows - 1), rows) * rows
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    return ends - sizes, ends


def _align_kernel(
    expert: Array, ids_ref: Any, map_ref: Any | None, out: Blocks, *, experts: int, bins: int, rows: int
) -> None:
    """One program an expert."""
    slots = ids_ref.shape[0]
    slot = arange(body.pow2_at_least(slots))
    chosen = _experts_of(ids_ref, map_ref, slot, experts)
    counts = lowering.histogram(chosen, chosen >= 0, bins)
    starts, ends = _padded(counts, rows)
    mine = arange(bins) == expert
    start, end, count = (_total(mine, values) for values in (starts, ends, counts))

    @pl.when(expert == 0)
    def _() -> None:
        store(out.used, (0,), body.div(jnp.max(ends), rows))

    @pl.when(count > 0)
    def _() -> None:
        hit = chosen == expert
        place = start + jnp.cumsum(hit.astype(jnp.int32), dtype=jnp.int32) - 1
        store(out.slots, (place,), slot, mask=hit)
        pad = start + count + arange(rows)
        store(out.slots, (pad,), jnp.full((rows,), slots, jnp.int32), mask=pad < end)
        block = body.div(start, rows) + arange(body.pow2_at_least(pl.cdiv(slots, rows)))
        store(out.experts, (block,), jnp.full(block.shape, expert, jnp.int32), mask=block < body.div(end, rows))


def _count_kernel(
    chunk: Array, ids_ref: Any, map_ref: Any | None, counts_ref: Any, ranks_ref: Any, *, experts: int
) -> None:
    """Counts a chunk's slots of each expert, and each slot's equals before it in the chunk."""
    lane = arange(_CHUNK)
    slot = chunk * _CHUNK + lane
    chosen = _experts_of(ids_ref, map_ref, slot, experts)
    bins = counts_ref.shape[1]
    counts = lowering.histogram(chosen, chosen >= 0, bins)
    store(counts_ref, (chunk, arange(bins)), counts.astype(jnp.int16))

    def earlier(step: Array, rank: Array) -> Array:
        other = step * _PEERS + arange(_PEERS)
        equal = chosen[:, None] == _experts_of(ids_ref, map_ref, chunk * _CHUNK + other, experts)[None, :]
        return rank + jnp.sum((equal & (other[None, :] < lane[:, None])).astype(jnp.int32), axis=1, dtype=jnp.int32)

    rank = lowering.loop(_CHUNK // _PEERS, earlier, jnp.zeros((_CHUNK,), jnp.int32))
    store(ranks_ref, (slot,), rank.astype(jnp.int16), mask=slot < ids_ref.shape[0])


def _place_kernel(
    chunk: Array,
    ids_ref: Any,
    map_ref: Any | None,
    counts_ref: Any,
    ranks_ref: Any,
    out: Blocks,
    *,
    experts: int,
    rows: int,
) -> None:
    """Sums all chunks' counts, and those of earlier chunks; places its own chunk and its share of the padding."""
    chunks, bins = counts_ref.shape
    slots, bin_ = ids_ref.shape[0], arange(bins)

    def add(step: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        row = step * _CHUNKS + arange(_CHUNKS)
        part = load(counts_ref, (row[:, None], bin_[None, :]), mask=(row < chunks)[:, None], other=0).astype(jnp.int32)
        before = jnp.where((row < chunk)[:, None], part, 0)
        return sums[0] + jnp.sum(part, axis=0, dtype=jnp.int32), sums[1] + jnp.sum(before, axis=0, dtype=jnp.int32)

    zeros = jnp.zeros((bins,), jnp.int32)
    counts, before = lowering.loop(pl.cdiv(chunks, _CHUNKS), add, (zeros, zeros))
    starts, ends = _padded(counts, rows)

    slot = chunk * _CHUNK + arange(_CHUNK)
    chosen = _experts_of(ids_ref, map_ref, slot, experts)
    rank = load(ranks_ref, (slot,), mask=slot < slots, other=0).astype(jnp.int32)
    place = lowering.gather(starts + before, jnp.maximum(chosen, 0)) + rank
    store(out.slots, (place,), slot, mask=chosen >= 0)

    @pl.when(chunk == 0)
    def _() -> None:
        store(out.used, (0,), body.div(jnp.max(ends), rows))

    def pad(step: Array, carry: None) -> None:
        mine = bin_ == chunk * pl.cdiv(bins, chunks) + step
        gap = _total(mine, starts + counts) + arange(rows)
        store(out.slots, (gap,), jnp.full((rows,), slots, jnp.int32), mask=gap < _total(mine, ends))

    lowering.loop(pl.cdiv(bins, chunks), pad, None)

    blocks = out.experts.shape[0]
    share = body.pow2_at_least(pl.cdiv(blocks, chunks))
    block = chunk * share + arange(share)
    # The expert of a block is the number of experts that end at or before its first slot.
    expert = jnp.sum((ends[None, :] <= (block * rows)[:, None]).astype(jnp.int32), axis=1, dtype=jnp.int32)
    store(out.experts, (block,), expert, mask=block < body.div(jnp.max(ends), rows))
