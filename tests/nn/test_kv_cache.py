"""KVCache: what is held, where, and who may attend to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jmoe
from jmoe.nn import KVCache


def test_tokens_are_appended_and_the_position_counts_them():
    cache = KVCache.init(1, 4, 1, 1, jnp.float32)
    step = jax.jit(KVCache.update)
    cache = step(cache, jnp.full((1, 2, 1, 1), 1.0), jnp.full((1, 2, 1, 1), 10.0))
    cache = step(cache, jnp.full((1, 1, 1, 1), 2.0), jnp.full((1, 1, 1, 1), 20.0))
    assert cache.keys.ravel().tolist() == [1, 1, 2, 0]
    assert cache.values.ravel().tolist() == [10, 10, 20, 0]
    assert int(cache.position) == 3


def test_the_mask_is_causal_and_leaves_out_what_is_not_held():
    cache = KVCache.init(1, 4, 1, 1).update(jnp.ones((1, 3, 1, 1)), jnp.ones((1, 3, 1, 1)))
    assert cache.mask(2).astype(int).tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]


def test_keys_are_cast_to_the_cache_dtype():
    cache = KVCache.init(1, 2, 1, 1).update(jnp.full((1, 1, 1, 1), 1.01), jnp.ones((1, 1, 1, 1)))
    assert cache.keys.dtype == jnp.bfloat16
    assert float(cache.keys[0, 0, 0, 0]) == 1.0078125  # the bfloat16 next to 1.01


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    cache = KVCache.init(2, 4, 3, 8)
    with pytest.raises(ValueError, match=r"keys has shape \(2, 5, 3, 8\), but this cache takes \(2, S <= 4, 3, 8\)"):
        cache.update(jnp.ones((2, 5, 3, 8)), jnp.ones((2, 5, 3, 8)))
    with pytest.raises(ValueError, match=r"values has shape \(2, 1, 3, 4\)"):
        cache.update(jnp.ones((2, 1, 3, 8)), jnp.ones((2, 1, 3, 4)))
    with pytest.raises(ValueError, match="they are of the same tokens"):
        cache.update(jnp.ones((2, 1, 3, 8)), jnp.ones((2, 2, 3, 8)))
    with pytest.raises(TypeError, match="dtype=int8 must be bfloat16"):
        KVCache.init(2, 4, 3, 8, jnp.int8)


def test_overflow_raises_under_check():
    cache = KVCache.init(1, 2, 1, 1)
    new = jnp.ones((1, 2, 1, 1))
    with jmoe.config(check=True):
        error, cache = checkify.checkify(lambda c: c.update(new, new))(cache)
        error.throw()
        error, _ = checkify.checkify(lambda c: c.update(new, new))(cache)
    with pytest.raises(checkify.JaxRuntimeError, match="holds 2 tokens"):
        error.throw()


def test_a_mask_of_x64_mode_keeps_int32_positions():
    with jax.enable_x64(True):
        cache = KVCache.init(1, 4, 1, 1).update(jnp.ones((1, 3, 1, 1)), jnp.ones((1, 3, 1, 1)))
        assert cache.position.dtype == jnp.int32
        np.testing.assert_array_equal(cache.mask(1), [[True, True, True, False]])


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_keys_that_are_sharded_otherwise_are_held_as_the_cache_is():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    keys = jnp.arange(2 * 2 * 2 * 4, dtype=jnp.float32).reshape(2, 2, 2, 4)
    with jax.set_mesh(mesh):
        heads = jax.device_put(keys, jax.P(None, None, "model"))
        cache = KVCache.init(2, 3, 2, 4, jnp.float32).update(heads, heads)
    np.testing.assert_array_equal(cache.keys[:, :2], keys)
    assert jax.typeof(cache.keys).sharding.spec == jax.P(None, None, None, None)
