"""First choices of tiles for layers of experts from shapes and device facts; pure functions, no GPU needed."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pallas_kernels.tuning.heuristics import MatmulTile, Operands, even_shares, shared_memory, step_of_k


@dataclass(frozen=True, kw_only=True, slots=True)
class MoETiles:
    """How a layer's two grouped products are cut.

    Attributes:
      first: of x times w13; ``block_n`` counts columns of each half.
      second: of the intermediate times w2; its ``block_m`` is the first's.
      single: every slot is a product of a matrix and a vector and nothing is aligned; for few slots, of mostly
        different experts. Then ``block_m`` and ``num_stages`` are 1.
    """

    first: MatmulTile
    second: MatmulTile
    single: bool = False


_BYTES = {"fp8": (1, 1), "int8": (1, 1), "w8a16": (2, 1), "16bit": (2, 2), "32bit": (4, 4)}
"""Bytes an element of x and of w."""

_STEP = {"fp8": 128, "int8": 128, "w8a16": 64, "16bit": 64, "32bit": 32}
"""Longest step of K."""

_SINGLE_SLOTS = 16
"""Most slots that are products of a matrix and a vector: the tensor core needs more launches, and less time a slot."""

_SINGLE_WEIGHTS = 2**25
"""Most weights of w2 of such slots where codes meet scales along K: decoding is their limit then, not memory."""

_NARROW_WEIGHTS = 3 * 2**25
"""Likewise, of up to a slot an expert, where scales change every 32 of K or sooner: as many as were measured."""


def moe_tiles(
    tokens: int,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int = 1,
    *,
    operands: Operands,
    halves: int = 2,
    first_cell: int | None = None,
    second_cell: int | None = None,
    group: int | None = None,
    exact: bool = True,
    batched: bool = False,
    batch_invariant: bool = False,
    global_experts: int = 0,
    capability: int = 90,
    sm_count: int = 132,
) -> MoETiles:
    """Tiles of a layer of experts.

    Args:
      tokens: T, or the rows of each expert where ``batched``.
      hidden, intermediate: H and I.
      experts: experts here, E.
      top_k: k.
      operands: what the dots are made of.
      halves: of w13, 2 if gated.
      first_cell, second_cell: columns of K that share all scales inside the loop of each product, None where there are
        none; see ``grouped.scale_cell``.
      group: group of the intermediate's scales, where it is quantised by groups.
      exact: FP8 sums are promoted to float32 at least every 128 of K.
      batched: for ``batched_experts``.
      batch_invariant: the choice may not depend on ``tokens``.
      global_experts: E_global, where some are elsewhere; fewer than ``experts`` are as many.
      capability: compute capability times ten.
      sm_count: streaming multiprocessors.
    """
    slots = tokens * top_k
    decoded = first_cell is not None and slots * hidden * intermediate > _SINGLE_WEIGHTS
    few = are_few(tokens, experts, top_k) and not decoded
    if operands == "fp8" and first_cell is not None and first_cell <= 32:
        # Products of 32 of K and a sum each keep the tensor core waiting.
        few |= slots <= experts and slots * hidden * intermediate <= _NARROW_WEIGHTS
    if few and not (batched or batch_invariant):
        first, second = vector_tiles(tokens, hidden, intermediate, top_k, halves, sm_count)
        return MoETiles(first=first, second=second, single=True)
    of = max(experts, global_experts)
    read = None if batched else experts_read(tokens, top_k, experts, of)
    rows = tokens if batched else rows_of_each(slots, of)
    promoted = (operands == "fp8" and exact) or (operands in ("fp8", "int8") and second_cell is not None)
    first_n = group if group in (32, 64, 128) else 128 if operands != "32bit" else 32
    steps = step_of_k(first_cell, _STEP[operands]), step_of_k(second_cell, _STEP[operands])
    if capability == 90 and operands != "32bit" and not batch_invariant:
        # Every program reads weights of its own where slots are this few.
        own = slots * -(-intermediate // first_n) if slots <= experts else None
        layer = _Layer(
            rows, experts, own, read, hidden, intermediate, operands, promoted, group is None, first_n, steps, sm_count
        )
        first, second = layer.first(), layer.second()
    else:
        height = 64 if batch_invariant else None
        first, second = _plain(rows, intermediate, operands, promoted, first_n, steps, halves, capability, height)
    return MoETiles(first=_fitted(first, halves, operands, capability), second=_fitted(second, 1, operands, capability))


def _plain(
    rows: int,
    intermediate: int,
    operands: Operands,
    promoted: bool,
    first_n: int,
    steps: tuple[int, int],
    halves: int,
    capability: int,
    height: int | None,
) -> tuple[MatmulTile, MatmulTile]:
    """Both tiles where nothing was measured, and where their ``height`` may not depend on the number of rows."""
    # Two accumulators of 128 rows keep to registers on Hopper, and on Blackwell where sums are not promoted.
    tall = capability >= 90 and operands in ("fp8", "int8", "16bit") and not promoted
    if rows <= 24:
        block_m = height or (16 if rows <= 8 else 32)
    else:
        block_m = height or (128 if tall and rows >= 512 else 64)
    wide = operands == "w8a16" and block_m == 64
    swap = operands != "32bit" and (block_m <= 32 or (operands == "w8a16" and capability >= 90))
    first = MatmulTile(
        block_m=block_m,
        block_n=first_n,
        block_k=steps[0],
        num_warps=8 if block_m * first_n * halves > 64 * 128 or wide else 4,
        num_stages=4 if promoted and block_m == 64 else 3,
        swap=swap,
    )
    second = MatmulTile(
        block_m=block_m,
        block_n=32 if operands == "32bit" else 256 if block_m == 128 else 128,
        block_k=steps[1],
        num_warps=8 if block_m == 128 or wide else 4,
        num_stages=5 if block_m <= 32 and intermediate > 2048 else 3,
        swap=swap,
    )
    return first, second


class _Layer(NamedTuple):
    """What tiles on Hopper depend on; they were measured on an H200.

    Blocks are high where experts have many rows, since all of a block's programs read the weights, and the L2 cache's
    rate is the limit of low ones. The last block of an expert is mostly not full, and made by a shorter program.
    """

    rows: int
    experts: int
    own: int | None
    """Programs of the first product of few slots, at most one an expert; else None."""
    read: float | None
    """Experts that slots have on average; None of batched experts."""
    hidden: int
    intermediate: int
    operands: Operands
    promoted: bool
    free: bool
    """The width of the first product's tile is not fixed by the intermediate's groups."""
    first_n: int
    steps: tuple[int, int]
    sm_count: int

    @property
    def block_m(self) -> int:
        rows = self.rows
        if rows <= 8:
            return 16
        if rows <= (40 if self.promoted else 24):
            return 32
        # A masked last step takes registers that promoted sums of 128 rows have not.
        low = self.promoted and self.hidden % self.steps[0] != 0
        return 64 if low or rows < (96 if self.operands == "w8a16" else 64) else 128

    @property
    def swap(self) -> bool:
        # Half of 64 rows are too few for the tensor core's left side.
        return self.block_m <= 32 or self.operands == "w8a16" or (self.block_m == 64 and not self.promoted)

    @property
    def short(self) -> int:
        if self.block_m == 32:
            return 16
        return 32 if self.block_m == 64 and self.swap else 64 if self.block_m == 128 else 0

    def _tile(self, product: int, warps: int, stages: int, **more: Any) -> MatmulTile:
        columns = (self.first_n, 128)[product]
        tile = MatmulTile(
            block_m=self.block_m,
            block_n=columns,
            block_k=self.steps[product],
            num_warps=warps,
            num_stages=stages,
            swap=self.swap,
            short=self.short,
        )
        return replace(tile, **more)

    @property
    def takes_turns(self) -> bool:
        """int8 sums, each of whose products is waited for, so that programs take turns where one would idle."""
        return self.operands == "int8" and not self.promoted and self.block_m == 128

    @property
    def many_and_short(self) -> bool:
        """The second product's programs are so many and short that it costs to begin them."""
        many = self.experts * self.rows // 128 * (self.hidden // 256) >= 24 * self.sm_count
        return self.block_m == 128 and 256 < self.intermediate <= 1024 and self.hidden >= 1024 and many

    def first(self) -> MatmulTile:
        if self.takes_turns and self.free:
            return self._tile(0, 4, 3, block_n=64)
        if self.block_m >= 64:
            stages = 3 if self.operands == "w8a16" and self.block_m == 64 else 4
            return self._tile(0, 8, stages, run=2 if self.promoted and self.many_and_short else 1)
        if self.operands == "16bit" and self.free and self.block_m == 16:
            return self._tile(0, 4, 4, block_n=64, block_k=128)
        if self.promoted and self.block_m == 16 and self.own is not None:
            # Many small programs at a time, or few that read far ahead.
            return self._tile(0, 8, 2) if self.own >= 2 * self.sm_count else self._tile(0, 4, 5)
        return self._tile(0, 4, 3)

    def second(self) -> MatmulTile:
        short_k, rows = self.intermediate <= 2048, self.block_m
        if self.promoted:
            return self._promoted_second()
        if self.operands == "w8a16":
            return self._tile(1, 8, 4 if rows == 128 else 3) if rows >= 64 else self._tile(1, 4, 3 if short_k else 5)
        if rows == 128:
            return self._tile(1, 4, 3) if self.takes_turns else self._tile(1, 8, 3, block_n=256)
        if self.operands == "16bit" and short_k and rows != 32:
            return self._tile(1, 8, 3, block_n=256) if rows == 64 else self._tile(1, 8, 3, block_k=128)
        return self._tile(1, 4, (6 if self.operands != "16bit" else 5) if rows == 64 else 3 if short_k else 5)

    def _in_shares(self, tile: MatmulTile) -> MatmulTile:
        """The tile with K in shares where few programs have much of it: sums that are not promoted gain 1% at most."""
        if self.block_m > 16 or self.read is None:
            return tile
        programs = self.read * -(-self.hidden // tile.block_n)
        return replace(tile, split_k=even_shares(programs, -(-self.intermediate // tile.block_k), self.sm_count))

    def _promoted_second(self) -> MatmulTile:
        rows = self.block_m
        if self.intermediate <= 2 * self.steps[1]:
            # Too short to fill a pipeline of loads, which a run of tiles does.
            run = min(7 if rows == 16 else 14, -(-self.hidden // 128))
            stages = {64: 2, 128: 4}.get(rows, 3)
            return self._tile(1, 8 if rows == 128 else 4, stages, run=run)
        if self.hidden % 256 or self.intermediate % 128:
            tile = self._tile(1, 8 if rows == 128 else 4, 5 if rows <= 32 and self.intermediate > 2048 else 3)
            return self._in_shares(tile)
        if rows <= 32:
            if self.intermediate > 2048:
                return self._in_shares(self._tile(1, 4, 5))
            if self.intermediate > 1024:
                return self._tile(1, 4, 3, block_n=256)
            return self._tile(1, 8, 3, block_n=256, pieces=2)
        # Enough warps for the tensor core to be busy while others promote: sixteen, or two programs of eight.
        if rows == 64:
            return self._tile(1, 8, 2, block_n=256, pieces=2)
        return self._tile(1, 16, 3, block_n=256, pieces=2, run=4 if self.many_and_short else 1)


def experts_read(tokens: int, top_k: int, experts: int, of: int) -> float:
    """How many of the ``experts`` here, ``of`` so many, have tokens on average: each chooses k, all as likely."""
    return experts * (1 - (1 - min(top_k, of) / of) ** tokens) if of else 0.0


def rows_of_each(slots: int, experts: int) -> int:
    """Rows of an expert on average, rounded up."""
    return -(-slots // max(experts, 1))


def are_few(tokens: int, experts: int, top_k: int) -> bool:
    """Whether slots are so few, and experts so many, that products of matrices and vectors are faster."""
    slots = tokens * top_k
    return (tokens == 1 or 4 * slots <= experts) and slots <= _SINGLE_SLOTS


def vector_tiles(
    tokens: int, hidden: int, intermediate: int, top_k: int, halves: int, sm_count: int
) -> tuple[MatmulTile, MatmulTile]:
    """Tiles of the two products of matrices and vectors, as measured on an H200.

    Small programs overlap best; few of them need more bytes under way in each.
    """
    rows = 4
    full = tokens * top_k * -(-intermediate // rows) >= 8 * sm_count
    warps = 2 if full else 4
    width = 2**9 * warps // halves
    first = _vector_tile(rows, min(width, _pow2(hidden)), warps)
    rows = 8
    full = tokens * -(-hidden // rows) >= 2 * sm_count
    width = max(256, 2**10 // _pow2(top_k))
    warps = max(1, rows * _pow2(top_k) * width >> (11 if full else 12))
    return first, _vector_tile(rows, min(width, _pow2(intermediate)), warps)


def _vector_tile(rows: int, columns: int, warps: int) -> MatmulTile:
    return MatmulTile(block_m=1, block_n=rows, block_k=max(columns, 32), num_warps=warps, num_stages=1)


def _pow2(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def _fitted(tile: MatmulTile, halves: int, operands: Operands, capability: int) -> MatmulTile:
    """The tile with as many stages, and if need be as long a step of K, as shared memory allows."""
    x_bytes, w_bytes = _BYTES[operands]
    column = tile.block_m * x_bytes + halves * tile.block_n * w_bytes
    stages, block_k = tile.num_stages, tile.block_k
    while stages * block_k * column > shared_memory(capability):
        if stages > 2:
            stages -= 1
        else:
            block_k //= 2
    return replace(tile, num_stages=stages, block_k=block_k)
