"""Layers of experts that take some tokens at a time, in interpret mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from tests.interpreted import DEVICE, interpreted

T, H, I, E, K = 37, 128, 128, 4, 2


def arrays(recipe: str) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (T, H), jnp.bfloat16)
    w13 = jmoe.quantize(jax.random.normal(keys[1], (E, 2, I, H)) * H**-0.5, recipe)
    w2 = jmoe.quantize(jax.random.normal(keys[2], (E, H, I)) * I**-0.5, recipe)
    weights, ids = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[3], (T, E))), K)
    return x, w13, w2, weights, ids


def layer(*args: jax.Array, **options: object) -> jax.Array:
    return jmoe.fused_moe(*args, implementation="triton", **options)


@pytest.mark.parametrize("chunk", [1, 16, 36, 37, 1000])
def test_results_are_the_same_bits(chunk):
    args = arrays("fp8_block")
    with interpreted():
        with jmoe.config(moe_chunk=None):
            whole = jax.jit(layer)(*args)
        with jmoe.config(moe_chunk=chunk):
            found = jax.jit(layer)(*args)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(whole, np.float32))


def test_a_quantized_input_is_cut_with_its_scales():
    x, *rest = arrays("fp8_channel")
    codes = jmoe.quantize(x, rest[0].input_scheme)
    with interpreted(), jmoe.config(moe_chunk=16):
        found = np.asarray(jax.jit(layer)(codes, *rest), np.float32)
    wanted = np.asarray(jmoe.fused_moe(codes, *rest, implementation="reference"), np.float32)
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)


def test_a_scale_of_all_tokens_keeps_them_together():
    for recipe, said in (("fp8_block", True), ("fp8_tensor", False)):
        with jmoe.config(device=DEVICE, moe_chunk=16):
            [(_, selection)] = jmoe.explain(layer, *arrays(recipe)).entries
        assert ("16 tokens at a time" in selection.note) == said


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "8"])
def test_what_is_no_number_of_tokens_is_refused(wrong):
    with pytest.raises(ValueError, match=r"moe_chunk=.* must be a number of tokens, an int from 1 on, or None"):
        jmoe.config(moe_chunk=wrong).__enter__()
