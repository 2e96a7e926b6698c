"""Small right calls of the operations, whose arguments tests change."""

import jax.numpy as jnp

from jmoe import batched_experts, fused_moe, linear, quantize

T, K_SLOTS, E, H, I, L = 5, 2, 4, 16, 8, 3
X = jnp.ones((T, H))
W = jnp.ones((I, H))
W13, W2 = jnp.ones((E, 2, I, H)), jnp.ones((E, H, I))
WEIGHTS, IDS = jnp.ones((T, K_SLOTS)), jnp.zeros((T, K_SLOTS), jnp.int32)
COUNTS = jnp.array([T, 0, 1, 2], jnp.int32)
XE = jnp.ones((E, T, H))
STACKED = {"w13": jnp.ones((L, E, 2, I, H)), "w2": jnp.ones((L, E, H, I)), "layer": 0}
FP8 = {"w13": quantize(W13, "fp8_channel"), "w2": quantize(W2, "fp8_channel")}
STATIC = {"w13": quantize(W13, "fp8_tensor_static"), "w2": quantize(W2, "fp8_tensor_static")}
SCALES = {"input_scale": 0.5, "intermediate_scale": 0.5}


def call_linear(**changes):
    return linear(**{"x": X, "w": W, **changes})


def call_moe(**changes):
    return fused_moe(**{"x": X, "w13": W13, "w2": W2, "topk_weights": WEIGHTS, "topk_ids": IDS, **changes})


def call_batched(**changes):
    return batched_experts(**{"x": XE, "counts": COUNTS, "w13": W13, "w2": W2, **changes})
