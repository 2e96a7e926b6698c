"""Packed four-bit weights: what comes out is what went in, and which rows e4m3's exponents take in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.fourbit.packing import COLUMNS, Packed, Packing, pack, rows_beyond, supports_group, unpack

SCALES = {"e8m0": np.uint8, "e4m3": jnp.float8_e4m3fn}

PACKINGS = [
    *(("e2m1", operand, "e8m0", 32, False) for operand in ("bfloat16", "e4m3")),
    ("e2m1", "bfloat16", "e4m3", 16, False),
    *(
        ("int4", "bfloat16", scale, group, zero_point)
        for scale, group, zero_point in (
            ("float32", 128, False),
            ("bfloat16", 32, True),
            ("float16", 64, True),
            ("bfloat16", 256, True),
            ("float16", -1, True),
        )
    ),
]


def raw_bits(rng, shape, dtype):
    """Any bit pattern of ``dtype``."""
    dtype = np.dtype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize)).astype(np.uint8).view(dtype)[..., 0]


@pytest.mark.parametrize("codes, operand, scale, group, zero_point", PACKINGS)
def test_every_bit_comes_back(codes, operand, scale, group, zero_point):
    rng = np.random.default_rng(0)
    for batch, n, k in (((), 5, 33), ((2, 3), 70, 300), ((), 64, 128)):
        p = Packing(codes=codes, operand=operand, scale=scale, group=group, zero_point=zero_point, n=n, k=k)
        data = raw_bits(rng, (*batch, n, -(-k // 2)), np.uint8)
        scales = raw_bits(rng, (*batch, n, p.groups), SCALES.get(scale) or jnp.dtype(scale))
        zeros = raw_bits(rng, scales.shape, np.uint8) if zero_point else None
        packed = jax.jit(pack, static_argnums=4)(data, scales, zeros, None, p)
        again = jax.jit(unpack, static_argnums=1)(packed, p)
        for found, given in zip(again, (data, scales, zeros), strict=True):
            if given is not None:
                assert found.dtype == given.dtype
                assert np.asarray(found).tobytes() == np.asarray(given).tobytes()
        assert packed.data.shape == (*batch, p.row_tiles, p.row_elements)
        # Each of stacked matrices by itself, as a streaming loader packs them.
        if batch:
            one = pack(data[1, 2], scales[1, 2], None if zeros is None else zeros[1, 2], None, p)
            for whole, part in zip(packed, one, strict=True):
                assert whole is None or (whole[1, 2] == part).all()


def test_packing_keeps_the_bytes_of_codes():
    p = Packing(codes="int4", operand="bfloat16", scale="bfloat16", group=128, n=128, k=256)
    shapes = jax.eval_shape(
        functools.partial(pack, packing=p),
        jax.ShapeDtypeStruct((128, 128), jnp.uint8),
        jax.ShapeDtypeStruct((128, 2), jnp.bfloat16),
        None,
        None,
    )
    assert shapes.data.size * shapes.data.dtype.itemsize == 128 * 128
    assert shapes.scale.size == 128 * (1 + 1)  # two scales a word, and the row's exponent


def test_d06_a_word_holds_eight_codes_of_four_runs_of_columns():
    # Columns 0 and 1 of each run of 32: int4 codes lie in the nibbles of two halves, run 0 lowest.
    codes = np.zeros((1, COLUMNS), np.uint8)
    codes[0, [0, 32, 64, 96]] = 1, 2, 3, 4
    codes[0, [1, 33, 65, 97]] = 5, 6, 7, 8
    data = codes[:, 0::2] | codes[:, 1::2] << 4
    p = Packing(codes="int4", operand="bfloat16", scale="float32", group=128, n=1, k=COLUMNS)
    packed = pack(data, jnp.ones((1, 1)), None, None, p)
    assert [hex(v) for v in packed.data[0, :3].tolist()] == ["0x4321", "0x8765", "0x0"]


def test_scales_lie_along_rows_and_a_last_word_has_the_rows_own():
    # Codes are 1, so every group counts; row 0's largest exponent is 130, held as 11.
    data = jnp.full((2, 2 * COLUMNS // 2), 0x11, jnp.uint8)
    scale = jnp.array([[130, 129, 128, 127, 130, 130, 130, 119], [100] * 8], jnp.uint8)
    p = Packing(codes="e2m1", operand="e4m3", scale="e8m0", group=32, n=2, k=2 * COLUMNS)
    words = pack(data, scale, None, None, p).scale
    assert words.shape == (3, 64)
    assert [hex(v) for v in words[:, 0].tolist()] == ["0x8090a0b", "0xb0b0b", hex(1 << 8 | 130)]
    assert [hex(v) for v in words[:, 1].tolist()] == ["0xb0b0b0b", "0xb0b0b0b", hex(1 << 8 | 100)]


def test_rows_that_span_more_than_twelve_exponents_need_more_passes():
    exponents = [[127, 116], [127, 115], [127, 103], [127, 90], [255, 90]]
    codes = np.ones((5, 64), np.uint8)
    scale = jnp.array(exponents, jnp.uint8)
    assert rows_beyond(codes, scale).tolist() == [False, True, True, True, False]  # a row of NaN is one in any case
    codes[:, 32:] = 8  # minus zero: the second group does not count
    assert not rows_beyond(codes, scale).any()
    p = Packing(codes="e2m1", operand="e4m3", scale="e8m0", group=32, n=5, k=64)
    data = jnp.full((5, 32), 0x11, jnp.uint8)
    row = pack(data, scale, None, None, p).scale[-1, :5]
    assert (row & 0xFF).tolist() == [127, 127, 127, 127, 255]
    assert (row >> 8).tolist() == [1, 2, 3, 4, 1]


def test_b16_groups_that_can_be_packed():
    assert [g for g in (-1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256) if supports_group(g)] == [
        -1,
        16,
        32,
        64,
        128,
        256,
    ]


def test_e4m3_scales_are_held_as_bfloat16_values():
    p = Packing(codes="e2m1", operand="bfloat16", scale="e4m3", group=16, n=1, k=COLUMNS)
    scale = jnp.array([[0.0, 2.0**-9, 1.0, 448.0, -1.5, 1.0, 1.0, 1.0]], jnp.float8_e4m3fn)
    packed = pack(jnp.zeros((1, 64), jnp.uint8), scale, None, jnp.ones((1, 1)), p)
    assert isinstance(packed, Packed) and packed.scale.shape == (4, 64)
    halves = lax.bitcast_convert_type(packed.scale[:, 0], jnp.bfloat16).reshape(-1).astype(jnp.float32)
    assert (halves * 2.0**-119).tolist() == scale.astype(jnp.float32)[0].tolist()
