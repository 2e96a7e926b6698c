"""What else JAX users have for a layer of experts: a sort, grouped products and a sum, in bfloat16."""

import functools
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

Dot = Callable[[Array, Array, Array], Array]
"""Rows sorted by group (M, K), weights (G, K, N) and the groups' sizes (G,) to (M, N) of the rows' dtype."""


def fused_moe(dot: Dot, x: Array, w13: Array, w2: Array, topk_weights: Array, topk_ids: Array) -> Array:
    """A gated layer of experts with silu, written for speed with a grouped product.

    Args:
      dot: the grouped product.
      x: (T, H).
      w13: (E, H, 2I), gate before up; the orientation that grouped products take without a transposition.
      w2: (E, I, H).
      topk_weights: float32 (T, k).
      topk_ids: int32 (T, k), each the number of an expert.

    Returns:
      (T, H) of x's dtype.
    """
    slots = topk_ids.reshape(-1)
    order = jnp.argsort(slots)
    sizes = jnp.bincount(slots, length=w13.shape[0]).astype(jnp.int32)
    gate, up = jnp.split(dot(x[order // topk_ids.shape[1]], w13, sizes).astype(jnp.float32), 2, axis=-1)
    y = dot((jax.nn.silu(gate) * up).astype(x.dtype), w2, sizes)
    # A gather through the inverse permutation: a scatter would add with atomics.
    back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype), unique_indices=True)
    rows = y[back].reshape(*topk_ids.shape, x.shape[1]).astype(jnp.float32)
    return jnp.sum(rows * topk_weights[..., None], axis=1).astype(x.dtype)


def _ragged_dot(rows: Array, weights: Array, sizes: Array) -> Array:
    return lax.ragged_dot(rows, weights, sizes, preferred_element_type=rows.dtype)


def _tokamax_dot(rows: Array, weights: Array, sizes: Array, *, implementation: str) -> Array:
    import tokamax

    return tokamax.ragged_dot(rows, weights, sizes, preferred_element_type=rows.dtype, implementation=implementation)


PEERS: dict[str, Dot] = {
    "ragged-bf16": _ragged_dot,
    "tokamax-triton-bf16": functools.partial(_tokamax_dot, implementation="triton"),
    "tokamax-mosaic-bf16": functools.partial(_tokamax_dot, implementation="mosaic"),
}
"""Names of rows to their grouped products."""


def is_here(name: str) -> bool:
    """Whether what a peer takes is installed."""
    return not name.startswith("tokamax") or importlib.util.find_spec("tokamax") is not None
