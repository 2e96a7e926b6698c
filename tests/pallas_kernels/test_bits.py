"""Every code of every format, every rounding boundary and both its neighbours."""

from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels import bits

TABLES = np.load(Path(__file__).parents[1] / "data" / "vectors" / "dtype_tables.npz")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # OCP MX v1.0, section 5.3.3
FLOAT8 = {"e4m3": (ml_dtypes.float8_e4m3fn, "x/f8_e4m3fn"), "e5m2": (ml_dtypes.float8_e5m2, "x/f8_e5m2")}

positive_floats = st.floats(
    min_value=float(np.finfo(np.float32).tiny), max_value=float(np.finfo(np.float32).max), width=32
)


def positive_values(fmt: str) -> np.ndarray:
    """The finite values 0 <= v of a format in order, so that index i is also the code of the i-th."""
    if fmt == "e2m1":
        return E2M1
    table = TABLES[FLOAT8[fmt][1]][:128]
    return table[np.isfinite(table)]


def boundaries(fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """Each value, each midpoint of two neighbours, and the floats next to them, with the code each must round to."""
    values = positive_values(fmt)
    midpoints = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    code = np.arange(len(values))
    even = np.where(code[:-1] % 2 == 0, code[:-1], code[1:])
    inf = np.float32(np.inf)
    below, above = np.nextafter(midpoints, -inf), np.nextafter(midpoints, inf)
    around = np.nextafter(values[1:], -inf), np.nextafter(values[1:], inf)
    x = np.concatenate([values, below, midpoints, above, *around])
    return x, np.concatenate([code, code[:-1], even, code[1:], code[1:], code[1:]])


def test_boundaries_agree_with_ml_dtypes():
    for fmt, (dtype, _) in FLOAT8.items():
        x, codes = boundaries(fmt)
        top = positive_values(fmt)[-1]  # beyond it ml_dtypes overflows
        np.testing.assert_array_equal(x[x <= top].astype(dtype).view(np.uint8), codes[x <= top])


def test_exponent_and_mantissa_split_a_float():
    x = jnp.array([1.0, -1.5, 448.0, 0.0, -0.0, 2.0**-126, 3.4e38, np.inf, np.nan], jnp.float32)
    assert bits.exponent(x).tolist() == [0, 0, 8, -127, -127, -126, 127, 128, 128]
    assert bits.mantissa(x)[:6].tolist() == [0, 0x400000, 0x600000, 0, 0, 0]
    assert bits.exponent(jnp.float32(1e-40)) == -127


def test_pow2_is_exact_and_clips():
    e = np.arange(-140, 140)
    expected = np.ldexp(np.float32(1), np.clip(e, -127, 127)).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(bits.pow2)(jnp.asarray(e))), expected)


def test_e8m0_decodes_all_bytes():
    decoded = np.asarray(jax.jit(bits.e8m0_to_f32)(jnp.arange(256).astype(jnp.uint8)))
    np.testing.assert_array_equal(decoded, TABLES["x/f8_e8m0fnu"])
    ours = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(decoded, ours)


def test_b07_e8m0_byte_zero_is_not_zero_and_255_is_nan():
    decoded = np.asarray(bits.e8m0_to_f32(jnp.array([0, 1, 127, 254, 255], jnp.uint8)))
    np.testing.assert_array_equal(decoded[:4], np.array([2.0**-127, 2.0**-126, 1, 2.0**127], np.float32))
    assert np.isnan(decoded[4])


@pytest.mark.parametrize("fmt_max", [448.0, 57344.0, 127.0, 7.5, 6.0, 4.0, 1.0])
def test_ceil_exponent_of_exact_multiples_and_their_neighbours(fmt_max):
    low, high = -126 - int(np.floor(np.log2(fmt_max))), 127 - int(np.floor(np.log2(fmt_max)))
    k = np.arange(low, high + 1)
    amax = np.ldexp(np.float32(fmt_max), k).astype(np.float32)
    exponents = jax.jit(bits.ceil_exponent, static_argnums=1)
    np.testing.assert_array_equal(exponents(amax, fmt_max), np.clip(k, -127, 127))
    up, down = np.nextafter(amax, np.float32(np.inf)), np.nextafter(amax, np.float32(0))
    np.testing.assert_array_equal(exponents(up[:-1], fmt_max), np.clip(k[:-1] + 1, -127, 127))
    np.testing.assert_array_equal(exponents(down, fmt_max), np.clip(k, -127, 127))


@given(amax=positive_floats)
def test_ceil_exponent_is_the_least_that_does_not_overflow(amax):
    e = int(bits.ceil_exponent(jnp.float32(amax), 448.0))
    assert Fraction(amax) <= 448 * Fraction(2) ** e
    assert e == -127 or Fraction(amax) > 448 * Fraction(2) ** (e - 1)


def test_ceil_exponent_of_zero_and_subnormals_is_the_least():
    assert bits.ceil_exponent(jnp.array([0.0, 1e-45, 1e-38], jnp.float32), 448.0).tolist() == [-127] * 3


@pytest.mark.parametrize("fmt", FLOAT8)
def test_saturate_rounds_every_boundary_to_nearest_even(fmt):
    dtype = FLOAT8[fmt][0]
    x, codes = boundaries(fmt)
    cast = jax.jit(bits.saturate, static_argnums=1)
    np.testing.assert_array_equal(np.asarray(cast(x, dtype)).view(np.uint8), codes)
    np.testing.assert_array_equal(np.asarray(cast(-x, dtype)).view(np.uint8), codes | 0x80)


@pytest.mark.parametrize("fmt", FLOAT8)
def test_saturate_keeps_every_code(fmt):
    dtype, table = FLOAT8[fmt]
    values = TABLES[table]
    kept = np.asarray(bits.saturate(jnp.asarray(values), dtype)).view(np.uint8)
    np.testing.assert_array_equal(kept[np.isfinite(values)], np.arange(256)[np.isfinite(values)])
    top = positive_values(fmt)[-1]
    np.testing.assert_array_equal(kept.view(dtype).astype(np.float32), np.clip(values, -top, top))


@pytest.mark.parametrize("jit", [False, True])
def test_a08_values_beyond_448_saturate_and_nan_stays(jit):
    def cast(x):
        return bits.saturate(x, jnp.float8_e4m3fn).astype(jnp.float32)

    x = jnp.array([448, 464, 465, 480, 1e4, np.inf, -np.inf, np.nan], jnp.float32)
    np.testing.assert_array_equal((jax.jit(cast) if jit else cast)(x), [448, 448, 448, 448, 448, 448, -448, np.nan])


def test_b06_e4m3_ties_go_to_even():
    rounded = bits.saturate(jnp.array([168.0, 17.0, 19.0]), jnp.float8_e4m3fn)
    assert rounded.astype(jnp.float32).tolist() == [160, 16, 20]


def test_round_int_rounds_every_half_to_even_and_clips():
    halves = (np.arange(-260, 261) / 2).astype(np.float32)
    x = np.concatenate([halves, np.nextafter(halves, np.float32(-1e9)), np.nextafter(halves, np.float32(1e9))])
    expected = np.clip([round(float(v)) for v in x], -127, 127)  # Python rounds halves to even
    np.testing.assert_array_equal(bits.round_int(jnp.asarray(x), -127, 127, jnp.int8), expected)
    odd = jnp.array([np.nan, np.inf, -np.inf, 200.0], jnp.float32)
    assert bits.round_int(odd, -8, 7, jnp.int8).tolist() == [0, 7, -8, 7]


def test_d01_int8_rounds_and_does_not_truncate():
    assert bits.round_int(jnp.array([127, 1.9, -1.9, 2.5]), -127, 127, jnp.int8).tolist() == [127, 2, -2, 2]


def test_e2m1_decodes_all_nibbles():
    codes = jnp.arange(16).astype(jnp.uint8)
    decoded = np.asarray(jax.jit(bits.e2m1_decode)(codes))
    np.testing.assert_array_equal(decoded, TABLES["x/f4_e2m1fn_16"])
    np.testing.assert_array_equal(decoded, np.asarray(codes).view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    assert not np.signbit(decoded[8])
    # Only the low four bits are looked at.
    np.testing.assert_array_equal(bits.e2m1_decode(codes | jnp.uint8(0xF0)), decoded)


def test_e2m1_rounds_every_boundary_to_nearest_even():
    x, codes = boundaries("e2m1")
    encode = jax.jit(bits.e2m1_encode)
    np.testing.assert_array_equal(encode(x), codes)
    np.testing.assert_array_equal(encode(-x), np.where(codes > 0, codes | 8, 0))


def test_e2m1_keeps_every_code_but_minus_zero():
    codes = jnp.arange(16).astype(jnp.uint8)
    kept = bits.e2m1_encode(bits.e2m1_decode(codes))
    np.testing.assert_array_equal(kept, np.where(codes == 8, 0, codes))
    assert bits.e2m1_encode(jnp.array([np.inf, -np.inf, np.nan, 7.0, 1e38])).tolist() == [7, 15, 0, 7, 7]


def test_d02_e2m1_round_trips_and_ties():
    x = jnp.array([0, 0.25, 0.25000006, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.0001, 7], jnp.float32)
    assert bits.e2m1_decode(bits.e2m1_encode(x)).tolist() == [0, 0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6]


def test_d06_the_low_nibble_is_the_even_element():
    packed = bits.pack_nibbles(jnp.array([1, 2, 3, 4], jnp.uint8))
    assert packed.tolist() == [0x21, 0x43]
    assert bits.unpack_nibbles(packed, 4).tolist() == [1, 2, 3, 4]


def test_nibbles_pack_into_every_byte():
    low, high = np.meshgrid(np.arange(16), np.arange(16), indexing="xy")
    codes = np.stack([low, high], -1).reshape(256, 2).astype(np.uint8)
    packed = bits.pack_nibbles(jnp.asarray(codes))
    np.testing.assert_array_equal(packed[:, 0], np.arange(256))
    np.testing.assert_array_equal(bits.unpack_nibbles(packed, 2), codes)


@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (3,), (4, 5), (4, 6), (2, 3, 7), (0, 4), (0, 3), (2, 0, 9)])
def test_nibbles_round_trip(shape):
    codes = jnp.asarray(np.random.default_rng(0).integers(0, 16, shape), jnp.uint8)
    packed = bits.pack_nibbles(codes)
    assert packed.shape == (*shape[:-1], (shape[-1] + 1) // 2)
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(bits.unpack_nibbles(packed, shape[-1]), codes)


def test_an_odd_row_ends_in_a_zero_nibble():
    assert bits.pack_nibbles(jnp.array([[15, 15, 15]], jnp.uint8)).tolist() == [[0xFF, 0x0F]]


@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_do_not_drift_under_strict_promotion_and_x64(x64):
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(x64):
        x, code = jnp.ones((2, 4), jnp.float32), jnp.ones((2, 4), jnp.uint8)
        assert bits.exponent(x).dtype == bits.mantissa(x).dtype == bits.ceil_exponent(x, 448.0).dtype == jnp.int32
        assert bits.pow2(bits.exponent(x)).dtype == bits.e8m0_to_f32(code).dtype == jnp.float32
        assert bits.e2m1_decode(code).dtype == jnp.float32
        assert bits.e2m1_encode(x).dtype == bits.pack_nibbles(code).dtype == jnp.uint8
        assert bits.unpack_nibbles(code, 7).dtype == jnp.uint8
        assert bits.saturate(x, jnp.float8_e5m2).dtype == jnp.float8_e5m2
        assert bits.round_int(x, -8, 7, jnp.int8).dtype == jnp.int8
