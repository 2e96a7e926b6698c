"""Rotary embeddings: angles by hand, and YaRN's frequencies against transformers'."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.models.rope import Yarn, rotate

# transformers 5.24.0, ROPE_INIT_FUNCTIONS["yarn"] for gpt-oss-20b: eight of its 32 frequencies, and the scale.
DIMENSIONS = [0, 7, 8, 9, 13, 17, 18, 31]
FREQUENCIES = [1, 0.07374457, 0.05081327, 0.0317057, 0.003860359, 0.0001293187, 3.830881e-05, 3.023511e-07]
SCALE = 1.3465735902799727


def test_rotate_turns_pairs_of_halves_by_position_over_wavelength():
    # head_dim 4, theta 16: frequencies 1 and 1/4. Position 2 turns (x0, x2) by 2 and (x1, x3) by 1/2.
    x = jnp.asarray([1.0, 1.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    expected = [np.cos(2), np.cos(0.5), np.sin(2), np.sin(0.5)]
    np.testing.assert_allclose(rotate(x, jnp.asarray([2]), 16.0).ravel(), expected, rtol=1e-6)


def test_yarn_keeps_short_wavelengths_stretches_long_ones_and_goes_linearly_between():
    # Base 16, head_dim 8, 4096 tokens: dimension d turns 4096 / (2 pi 2^d) times.
    # Of 2^9 / pi turns it is 2, of 2^8 / pi it is 3: frequencies 1, 1/2 stay, 1/4 too, and 1/8 is divided by 4.
    fast, slow = 2**9 / math.pi, 2**8 / math.pi
    yarn = Yarn(factor=4.0, original_max_position_embeddings=4096, beta_fast=fast, beta_slow=slow, truncate=False)
    frequencies = yarn.stretched(2.0 ** -np.arange(4), 16.0)
    np.testing.assert_allclose(frequencies, [1, 1 / 2, 1 / 4, 1 / 32], rtol=1e-9)
    # From dimension 1 to 3, dimension 2 is halfway between f and f / 4.
    yarn = Yarn(factor=4.0, original_max_position_embeddings=4096, beta_fast=2 * fast, beta_slow=slow, truncate=False)
    frequencies = yarn.stretched(2.0 ** -np.arange(4), 16.0)
    np.testing.assert_allclose(frequencies, [1, 1 / 2, 5 / 32, 1 / 32], rtol=1e-9)


def test_dimensions_are_rounded_outwards_unless_told_not_to():
    # Of 2^8.5 / pi turns it is dimension 2.5, so that rounded outwards the ramp goes from 2 to 3, or else from 2.5.
    turns = 2**8.5 / math.pi
    given = {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": turns}
    rounded = Yarn(**given, beta_slow=turns).stretched(2.0 ** -np.arange(4), 16.0)
    np.testing.assert_allclose(rounded, [1, 1 / 2, 1 / 4, 1 / 32], rtol=1e-9)
    exact = Yarn(**given, beta_slow=2**7.5 / math.pi, truncate=False).stretched(2.0 ** -np.arange(4), 16.0)
    # From 2.5 to 3.5: dimension 3 is halfway, 5/8 of its frequency.
    np.testing.assert_allclose(exact, [1, 1 / 2, 1 / 4, 5 / 64], rtol=1e-9)


def test_frequencies_of_gpt_oss_are_transformers():
    yarn = Yarn(factor=32.0, original_max_position_embeddings=4096, truncate=False)
    assert yarn.scale == pytest.approx(SCALE, rel=1e-12)
    frequencies = yarn.stretched(150000.0 ** -(np.arange(32) / 32), 150000.0)
    np.testing.assert_allclose(frequencies[DIMENSIONS], FREQUENCIES, rtol=1e-5)


def test_yarn_scales_what_it_turns():
    x = jnp.ones((1, 1, 1, 4))
    yarn = Yarn(factor=math.exp(10), original_max_position_embeddings=64)  # 0.1 * 10 + 1
    np.testing.assert_allclose(rotate(x, jnp.asarray([0]), 16.0, yarn), 2 * x, rtol=1e-6)
    assert Yarn(factor=2.0, original_max_position_embeddings=64, attention_factor=0.5).scale == 0.5


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"factor": 0}, "factor=0 must be a positive number"),
        ({"factor": math.nan}, "factor=nan must be a positive number"),
        ({"original_max_position_embeddings": "64"}, "original_max_position_embeddings='64' must be"),
        ({"attention_factor": -1.0}, "attention_factor=-1.0 must be"),
    ],
)
def test_numbers_that_stretch_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Yarn(**{"factor": 2.0, "original_max_position_embeddings": 64, **changes})
