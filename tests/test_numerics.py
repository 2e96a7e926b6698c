import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jmoe import numerics
from jmoe.numerics import E2M1, E4M3, E5M2, FORMATS, INT4, INT8


def test_the_formats_are_those_of_the_field():
    assert {name: (f.bits, f.max) for name, f in FORMATS.items()} == {
        "e4m3": (8, 448.0),
        "e5m2": (8, 57344.0),
        "e2m1": (4, 6.0),
        "int8": (8, 127.0),
        "int4": (4, 7.5),
    }
    for name, fmt in FORMATS.items():
        assert fmt.name == name
        assert hash(fmt) == hash(FORMATS[name])


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1])
def test_a_float_format_ends_where_ml_dtypes_says(fmt):
    assert float(ml_dtypes.finfo(fmt.dtype).max) == fmt.max


def test_four_bit_formats_are_stored_as_bytes():
    assert [np.dtype(f.storage).name for f in FORMATS.values()] == [
        "float8_e4m3fn",
        "float8_e5m2",
        "uint8",
        "int8",
        "uint8",
    ]
    assert [np.dtype(f.dtype).name for f in (E2M1, INT4)] == ["float4_e2m1fn", "int4"]


@pytest.mark.parametrize("fmt", [E4M3, E5M2, INT8])
def test_all_bytes_of_an_eight_bit_format_decode(fmt):
    codes = np.arange(256, dtype=np.uint8).view(fmt.dtype)
    decoded = np.asarray(jax.jit(lambda c: numerics.decode(c, fmt))(codes))
    assert decoded.dtype == np.float32
    np.testing.assert_array_equal(decoded, codes.astype(np.float32))


def test_all_nibbles_decode():
    nibbles = jnp.arange(16).astype(jnp.uint8)
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert numerics.decode(nibbles, E2M1).tolist() == e2m1 + [-v for v in e2m1]
    assert numerics.decode(nibbles, INT4).tolist() == list(range(16))
    assert [int(n) - numerics.INT4_OFFSET for n in nibbles] == list(range(-8, 8))


def test_unpack_leaves_eight_bits_and_splits_bytes():
    data = jnp.array([[0x21, 0x43]], jnp.uint8)
    assert numerics.unpack(data, INT4, 4).tolist() == [[1, 2, 3, 4]]
    assert numerics.unpack(data, E2M1, 3).tolist() == [[1, 2, 3]]
    eight = jnp.array([[1, -2]], jnp.int8)
    assert numerics.unpack(eight, INT8, 2) is eight


@pytest.mark.parametrize("name", numerics.SCALE_DTYPES)
def test_every_scale_dtype_decodes_exactly(name):
    dtype = numerics.SCALE_DTYPES[name]
    if name == "e8m0":
        scale, expected = jnp.array([126, 127, 130], jnp.uint8), [0.5, 1, 8]
    else:
        scale, expected = jnp.array([0.5, 1, 1.75], dtype), [0.5, 1, 1.75]
    decoded = numerics.decode_scale(scale)
    assert decoded.dtype == jnp.float32
    assert decoded.tolist() == expected


def test_a_float16_scale_may_be_subnormal():
    scale = np.array([1, 2, 1023], np.uint16).view(np.float16)  # multiples of 2**-24
    decoded = jax.jit(numerics.decode_scale)(scale)
    np.testing.assert_array_equal(decoded, np.array([1, 2, 1023], np.float32) * np.float32(2**-24))
