import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts import CANONICAL, Layout, pack_ue8m0_words, unpack_ue8m0_words


def test_a_layout_is_a_value():
    assert Layout("canonical") == CANONICAL
    assert hash(Layout("canonical")) == hash(CANONICAL)
    assert Layout("other") != CANONICAL
    with pytest.raises(dataclasses.FrozenInstanceError):
        CANONICAL.name = "other"


def test_four_groups_make_a_word_least_significant_first():
    words = pack_ue8m0_words(jnp.array([[1, 2, 3, 4, 5]], jnp.uint8))
    assert words.dtype == jnp.int32
    assert words.tolist() == [[0x04030201, 0x00000005]]


def test_a_top_byte_above_127_makes_a_negative_word():
    words = pack_ue8m0_words(jnp.array([[0, 0, 0, 255]], jnp.uint8))
    assert words.tolist() == [[-(2**24)]]
    assert unpack_ue8m0_words(words, 4).tolist() == [[0, 0, 0, 255]]


def test_all_bytes_round_trip():
    scale = jnp.arange(256).astype(jnp.uint8)[None]
    np.testing.assert_array_equal(unpack_ue8m0_words(pack_ue8m0_words(scale), 256), scale)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (3, 3), (2, 3, 4), (2, 3, 5), (0, 4), (3, 0), (2, 0, 7)])
def test_any_shape_round_trips_under_jit(shape):
    scale = jnp.asarray(np.random.default_rng(0).integers(0, 256, shape), jnp.uint8)
    words = jax.jit(pack_ue8m0_words)(scale)
    assert words.shape == (*shape[:-1], -(-shape[-1] // 4))
    back = jax.jit(unpack_ue8m0_words, static_argnums=1)(words, shape[-1])
    assert back.dtype == jnp.uint8
    np.testing.assert_array_equal(back, scale)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.bfloat16])
def test_b05_only_e8m0_bytes_are_packed(dtype):
    with pytest.raises(TypeError, match=rf"scale has dtype {jnp.dtype(dtype).name}.*packed from e8m0 bytes \(uint8\)"):
        pack_ue8m0_words(jnp.ones((2, 4), dtype))


def test_unpacking_rejects_what_is_not_words():
    words = jnp.zeros((2, 2), jnp.int32)
    with pytest.raises(TypeError, match="words has dtype uint32, but UE8M0 words are int32"):
        unpack_ue8m0_words(words.astype(jnp.uint32), 8)
    for groups in (4, 9):
        with pytest.raises(ValueError, match=f"groups={groups} does not fit rows of 2 words"):
            unpack_ue8m0_words(words, groups)
