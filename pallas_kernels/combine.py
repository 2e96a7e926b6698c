"""The sum over a token's slots: out[t] = sum_j y[t, j], float32, in ascending slot order, and a slot's shares' order.

A slot without an expert adds nothing, whatever lies in its row. The order is fixed, so results are the same bits from
run to run.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import body, lowering
from pallas_kernels.align import local_expert
from pallas_kernels.lowering import arange, load, store

_WARPS = 4
_COLUMNS = 1024
"""Columns a program sums: eight a thread, one 16-byte load of bfloat16."""


def combine(
    y: Array,
    topk_ids: Array,
    *,
    experts: int,
    expert_map: Array | None = None,
    shares: int = 1,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool = False,
) -> Array:
    """Sums slot results, already weighted, into their tokens.

    Args:
      y: (T k shares, H), what each slot's shares add up to, float32 or a 16-bit float.
      topk_ids: int32 (T, k); rows of slots whose expert is not here are not read.
      experts: experts here, E.
      expert_map: int32 (E_global,), the slot here of each expert or -1.
      shares: rows of ``y`` that a slot has, one behind the other.
      out_dtype: of the result; the sum is cast once.
      interpret: compute with XLA on any device, for tests.

    Returns:
      (T, H).
    """
    tokens, k = topk_ids.shape
    columns = y.shape[1]
    width = min(_COLUMNS, body.pow2_at_least(columns))
    return lowering.kernel_call(
        _combine_kernel,
        name="combine",
        grid=(tokens * pl.cdiv(columns, width),),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), out_dtype),
        num_warps=_WARPS,
        num_stages=1,
        interpret=interpret,
        k=k,
        shares=shares,
        width=width,
        experts=experts,
    )(y, topk_ids.reshape(-1), expert_map)


def _combine_kernel(
    y_ref: Any, ids_ref: Any, map_ref: Any | None, out_ref: Any, *, k: int, shares: int, width: int, experts: int
) -> None:
    columns = y_ref.shape[1]
    across = pl.cdiv(columns, width)
    program = pl.program_id(0)
    token = body.div(program, across)
    column = body.rem(program, across) * width + arange(width)
    inside = column < columns
    total = jnp.zeros((width,), jnp.float32)
    for choice in range(k):
        slot = token * k + choice
        here = local_expert(load(ids_ref, (slot,)), map_ref, experts) >= 0
        for share in range(shares):
            row = slot * shares + share
            total = total + load(y_ref, (row, column), mask=inside & here, other=0).astype(jnp.float32)
    store(out_ref, (token, column), total.astype(out_ref.dtype), mask=inside)
