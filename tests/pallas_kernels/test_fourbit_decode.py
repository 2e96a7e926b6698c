"""Unpacking in registers, as interpret mode computes it: every code under every scale."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fourbit import decode
from pallas_kernels.fourbit.packing import COLUMNS, ROWS, Packing, pack

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def tile_of(codes, operand):
    """A packed tile that holds all 16 codes everywhere, and its codes (64, 128)."""
    values = np.roll(np.tile(np.arange(16, dtype=np.uint8), (ROWS, COLUMNS // 16)), 3, axis=1)
    scale = "e8m0" if codes == "e2m1" else "float32"
    p = Packing(codes=codes, operand=operand, scale=scale, group=32, n=ROWS, k=COLUMNS)
    scales = jnp.ones((ROWS, p.groups), jnp.uint8 if scale == "e8m0" else jnp.float32)
    packed = pack(values[:, 0::2] | values[:, 1::2] << 4, scales, None, None, p)
    runs = values.reshape(ROWS, p.runs, p.run).swapaxes(0, 1)
    return packed.data.reshape(ROWS, p.run), runs


def full(tile, word):
    return jnp.full(tile.shape, word, jnp.uint32)


@pytest.mark.parametrize("exponent", range(12))
def test_e8m0_scales_go_into_e4m3_exponents_exactly(exponent):
    tile, runs = tile_of("e2m1", "e4m3")
    for j, codes in enumerate(runs):
        exponents = full(tile, decode.four_times(jnp.uint32(exponent << 16), 2))
        value = decode.fold(tile, exponents, j)
        np.testing.assert_array_equal(value.astype(jnp.float32), E2M1[codes] * np.float32(2.0 ** (exponent - 5)))
        same = decode.fold(tile, exponents, j, full(tile, decode.MAGNITUDES))
        np.testing.assert_array_equal(same.astype(jnp.float32), value.astype(jnp.float32))
        nothing = decode.fold(tile, exponents, j, full(tile, 0))
        assert not nothing.astype(jnp.float32).any()


@pytest.mark.parametrize("scale", [2.0**3, 1.625 * 2.0**100, -(2.0**127), 0.0])
def test_e2m1_times_a_bfloat16(scale):
    tile, runs = tile_of("e2m1", "bfloat16")
    word = full(tile, decode.pair(jnp.float32(scale)))
    for j, codes in enumerate(runs):
        value = decode.e2m1(tile, word, j).astype(jnp.float32)
        np.testing.assert_array_equal(value, E2M1[codes] * np.float32(scale * 2.0**-126))


@pytest.mark.parametrize("zero", [0, 5, 8, 15, 16])
def test_int4_less_its_zero_point_is_exact_and_its_product_rounded_once(zero):
    tile, runs = tile_of("int4", "bfloat16")
    zeros = full(tile, decode.pair(jnp.float32(-zero * 2.0**decode.INT4_SHIFT)))
    scale = jnp.float32(0.0123)
    upper = np.array(np.array(0.0123, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    parts = [full(tile, decode.pair(jnp.float32(upper))), full(tile, decode.twice(scale - upper))]
    for j, codes in enumerate(runs):
        difference = (codes.astype(np.float32) - zero) * np.float32(2.0**decode.INT4_SHIFT)
        np.testing.assert_array_equal(decode.int4(tile, zeros, [], j).astype(jnp.float32), difference)
        short = (difference * upper).astype(jnp.bfloat16)
        np.testing.assert_array_equal(decode.int4(tile, zeros, parts[:1], j), short)
        np.testing.assert_array_equal(decode.int4(tile, zeros, parts, j), (difference * scale).astype(jnp.bfloat16))
        if zero == decode.INT4_OFFSET:
            np.testing.assert_array_equal(decode.int4(tile, None, parts, j), decode.int4(tile, zeros, parts, j))


@pytest.mark.parametrize("scale", [1.5 * 2.0**127, -1.6171875 * 2.0**100, 2.0**20, 0.0])
def test_int4_times_a_bfloat16_is_rounded_once(scale):
    tile, runs = tile_of("int4", "bfloat16")
    word = full(tile, decode.pair(jnp.float32(scale)))
    for j, codes in enumerate(runs):
        product = (codes.astype(np.float64) - 8) * scale * 2.0**decode.SCALED_INT4_SHIFT
        np.testing.assert_array_equal(
            decode.scaled_int4(tile, word, j), product.astype(np.float32).astype(jnp.bfloat16)
        )


def test_tiles_are_spread_and_put_beside_each_other():
    a, b = jnp.array([[0, 1, 2, 3]]), jnp.array([[10, 11, 12, 13]])
    assert decode.spread([a[:, 0], b[:, 0]], 2).tolist() == [[0, 0, 10, 10]]
    assert decode.beside([a, b], 2).tolist() == [[0, 1, 10, 11, 2, 3, 12, 13]]
