"""Nothing adds axes without being told to: every public operation works under jax_numpy_rank_promotion="raise".

That is found out where shapes are, so everything here is traced and nothing is computed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmoe
from jmoe import nn
from jmoe.backends import xla

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 9, 4, 2, 32, 16
X = np.ones((TOKENS, HIDDEN), np.float32)
WEIGHTS, IDS = np.ones((TOKENS, TOP_K), np.float32), np.zeros((TOKENS, TOP_K), np.int32)
W13 = np.ones((EXPERTS, 2, INTERMEDIATE, HIDDEN), np.float32)
W2 = np.ones((EXPERTS, HIDDEN, INTERMEDIATE), np.float32)
COUNTS = np.array([9, 0, 1, 4])
EACH = np.full(EXPERTS, 0.5, np.float32)


@pytest.fixture(autouse=True)
def _raising():
    with jax.numpy_rank_promotion("raise"):
        yield


def traced(fn, *args):
    """Traces ``fn`` and its derivative for the first of its arguments."""
    jax.eval_shape(fn, *args)
    jax.eval_shape(jax.grad(lambda *a: jnp.sum(fn(*a).astype(jnp.float32))), *args)


def weights(recipe):
    return (W13, W2) if recipe == "bf16" else (jmoe.quantize(W13, recipe), jmoe.quantize(W2, recipe))


def scales(recipe, value):
    scheme = jmoe.recipe(recipe).input
    names = ("input_scale", "intermediate_scale") if scheme is not None and scheme.static else ()
    return dict.fromkeys(names, value)


def test_the_flag_is_in_force():
    with pytest.raises(ValueError, match="rank_promotion"):
        jax.eval_shape(jnp.add, X, X[0])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("recipe", [*jmoe.RECIPES, "int4:group=8,zero_point", "fp8_block:block=8"])
def test_products(recipe, implementation, monkeypatch):
    w13, w2 = weights(recipe)
    w = jax.tree.map(lambda leaf: leaf[0, 0], w13)
    bias, b13, b2 = X[0, :INTERMEDIATE], W13[..., 0], W2[..., 0]
    given = scales(recipe, 0.5)
    linear = functools.partial(jmoe.linear, implementation=implementation, **dict(list(given.items())[:1]))
    traced(lambda x: linear(x, w, bias=bias, activation="gelu"), X)
    traced(lambda x: linear(x, w), X[0])
    monkeypatch.setattr(xla, "_PIECE_BYTES", 5 * HIDDEN * 4)
    traced(lambda x: linear(x, w, bias=bias), X)

    for each in (given, scales(recipe, EACH)) if given else ({},):
        moe = functools.partial(jmoe.fused_moe, b13=b13, b2=b2, implementation=implementation, **each)
        traced(lambda x, weights, moe=moe: moe(x, w13, w2, weights, IDS), X, WEIGHTS)
        traced(lambda x, moe=moe: moe(x, w13, w2, WEIGHTS[:1], IDS[:1]), X[:1])
        batched = functools.partial(jmoe.batched_experts, b13=b13, b2=b2, implementation=implementation, **each)
        traced(lambda x, batched=batched: batched(x, COUNTS, w13, w2), np.stack([X] * EXPERTS))
    params = jmoe.ActivationParams(alpha=EACH, beta=EACH, limit=EACH)
    traced(lambda x: moe(x, w13, w2, WEIGHTS, IDS, activation_params=params, expert_map=np.array([2, -1, 0, 1])), X)
    traced(lambda x: moe(x, w13, w2, WEIGHTS[:, :1], IDS[:, :1], weight_on_input=True), X)
    with jmoe.config(batch_invariant=True, device="h100"):
        if implementation == "xla":
            traced(lambda x: moe(x, w13, w2, WEIGHTS, IDS), X.astype(jnp.bfloat16))
            traced(lambda x: linear(x, w, bias=bias), X.astype(jnp.bfloat16))


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_route(score):
    bias = np.ones(8, np.float32)
    for shape in ((8,), (3, 8), (2, 3, 8)):
        logits = np.ones(shape, np.float32)
        for options in ({}, {"n_group": 2, "topk_group": 1}, {"n_identity": 2}):
            routing = jmoe.Routing(top_k=2, score=score, renormalize=True, **options)
            for given in (None, bias):
                traced(lambda x, r=routing, b=given: jmoe.route(x, r, bias=b).weights, logits)
        routing = jmoe.Routing(top_k=2, score=score, order="topk_score")
        traced(lambda x, r=routing: jmoe.route(x, r).weights, logits)


@pytest.mark.parametrize("recipe", [*jmoe.RECIPES[1:], "int4:group=8,zero_point", "fp8_block:block=8"])
def test_quantised_arrays(recipe):
    w = jmoe.quantize(W2, recipe)
    jax.eval_shape(w.dequantize)
    jax.eval_shape(lambda: jmoe.merge_shards([w, w]))
    jax.eval_shape(lambda: jmoe.requantize(w, "int8"))
    jax.eval_shape(lambda: jmoe.refine_blocks(w, (1, 1)))


@pytest.mark.parametrize("recipe", ["bf16", "int8", "fp8_block:block=8", "int4:group=8"])
def test_layers(recipe):
    linear = nn.Linear(HIDDEN, INTERMEDIATE, recipe=recipe, use_bias=True, rngs=nnx.Rngs(0))
    traced(linear, X)
    shared = nn.Linear(HIDDEN, HIDDEN, rngs=nnx.Rngs(1))
    routing = jmoe.Routing(top_k=TOP_K, renormalize=True)
    moe = nn.FusedMoE(
        HIDDEN, INTERMEDIATE, EXPERTS, routing, recipe=recipe, rngs=nnx.Rngs(0), shared=shared, shared_gate=True
    )
    traced(moe, X.reshape(3, 3, HIDDEN))
