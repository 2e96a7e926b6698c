"""Every quantiser against its formula (``quantizer_oracle``), and what must hold whatever the data."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmoe.qtensor import QTensor
from jmoe.quantize import block_amax, quantize
from jmoe.scheme import RECIPES, Recipe, Scheme, recipe
from tests import quantizer_oracle as oracle

BLOCK = Scheme(format="e4m3", block=(128, 128))
INT4 = Scheme(format="int4", block=(1, 32))
INT8 = Scheme(format="int8", block=(1, -1))
FP8_ROW = Scheme(format="e4m3", block=(1, -1))
MXFP4 = recipe("mxfp4").weight
NVFP4 = recipe("nvfp4").weight
NVFP4_STATIC = recipe("nvfp4").input


def all_schemes() -> dict[str, Scheme]:
    """Every scheme of every recipe, and those that options reach."""
    made = [s for name in RECIPES for s in (recipe(name).weight, recipe(name).input) if s is not None]
    made += [
        BLOCK.replace(power_of_two=True),
        BLOCK.replace(scale_dtype="e8m0", block=(32, 32)),
        BLOCK.replace(scale_dtype="bfloat16", block=(2, 3)),
        FP8_ROW.replace(power_of_two=True),
        Scheme(format="e5m2", block=(1, -1)),
        INT4.replace(scale_dtype="bfloat16"),
        INT4.replace(scale_dtype="float16", zero_point=True),
        INT4.replace(block=(1, -1), zero_point=True),
        INT8.replace(block=(1, 64), scale_dtype="float16"),
        INT8.replace(block=(1, 64), zero_point=True),
        MXFP4.replace(scale_rounding="floor"),
        NVFP4.replace(block=(4, 16)),
    ]
    return {s.describe(): s for s in made}


SCHEMES = all_schemes()
DYNAMIC = {name: s for name, s in SCHEMES.items() if not s.static}
ACTIVATIONS = {s.describe(): s for name in RECIPES if (s := recipe(name).input) is not None}

schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
dynamic = pytest.mark.parametrize("scheme", DYNAMIC.values(), ids=DYNAMIC.keys())
activations = pytest.mark.parametrize("scheme", ACTIVATIONS.values(), ids=ACTIVATIONS.keys())


def static_scale(scheme: Scheme) -> float | None:
    if not scheme.static:
        return None
    return 1 / 2688 if scheme.global_scale else 1 / 448


def q(x, scheme: Scheme) -> QTensor:
    """Quantized, with a plausible scale where one must be given."""
    return quantize(x, scheme, scale=static_scale(scheme))


def same(a: QTensor, b: QTensor) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


# One shape for most tests: a quantiser is compiled once for it. K is ragged in groups of 16, 32 and 64.
SHAPE = (3, 40)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# Each takes (random generator, shape, the format's largest value).
DATA = {
    "normal": lambda rng, shape, top: rng.normal(size=shape),
    "positive": lambda rng, shape, top: rng.uniform(0.5, 1, size=shape),
    "negative": lambda rng, shape, top: -rng.uniform(0.5, 1, size=shape),
    "zeros": lambda rng, shape, top: np.zeros(shape),
    "some rows zero": lambda rng, shape, top: rng.normal(size=shape) * rng.integers(0, 2, (*shape[:-1], 1)),
    "one huge": lambda rng, shape, top: _one(rng.normal(size=shape), 3e38),
    "all huge": lambda rng, shape, top: rng.choice([-3.4e38, 3.4e38, 1e38], size=shape),
    "many sizes": lambda rng, shape, top: rng.normal(size=shape) * np.exp2(rng.integers(-100, 100, (*shape[:-1], 1))),
    "tiny": lambda rng, shape, top: rng.normal(size=shape) * 1e-12,
    "powers of two": lambda rng, shape, top: rng.choice([-1, 1], shape) * np.exp2(rng.integers(-12, 12, shape)),
    # With the format's largest value in each row the scale is 1 (or near it), and quarters fall on every tie.
    "ties": lambda rng, shape, top: _one(np.clip(rng.integers(-4 * 448, 4 * 448, shape) / 4, -top, top), top),
}


def _one(x: np.ndarray, value: float) -> np.ndarray:
    if x.size:
        x[..., 0] = value
    return x


def ieee_like(values: np.ndarray) -> np.ndarray:
    """float32 without subnormals, which XLA on a CPU takes for zeros."""
    x = values.astype(np.float32)
    return np.where(np.abs(x) < oracle.TINY, np.float32(0), x)


def assert_formulas(x: np.ndarray, scheme: Scheme) -> None:
    given_scale = None
    if scheme.static:
        given_scale = np.full((*x.shape[:-2], 1, 1), static_scale(scheme), np.float32)
    oracle.assert_is(q(x, scheme), oracle.quantize(x, scheme, given_scale))


@schemes
def test_codes_and_scales_are_the_formulas(scheme):
    for kind, data in DATA.items():
        for seed in range(3):
            x = ieee_like(data(np.random.default_rng(seed), SHAPE, scheme.fmt.max))
            try:
                assert_formulas(x, scheme)
            except AssertionError as error:
                error.add_note(f"on data {kind!r}, {seed=}")
                raise


@schemes
@settings(max_examples=3)
@given(
    batch=st.sampled_from([(), (), (2,), (2, 3), (0,)]),
    n=st.integers(0, 5),
    k=st.one_of(st.integers(0, 5), st.integers(14, 35), st.integers(126, 131)),
    kind=st.sampled_from(list(DATA)),
)
def test_codes_and_scales_are_the_formulas_whatever_the_shape(scheme, batch, n, k, kind):
    assert_formulas(ieee_like(DATA[kind](np.random.default_rng(n + k), (*batch, n, k), scheme.fmt.max)), scheme)


@dynamic
def test_codes_and_scales_are_the_formulas_on_ragged_blocks(scheme):
    assert_formulas(ieee_like(DATA["ties"](np.random.default_rng(0), (130, 260), scheme.fmt.max)), scheme)


@schemes
def test_narrow_inputs_are_quantized_as_their_float32_values(scheme):
    narrow = [jnp.asarray(normal(*SHAPE), dtype) for dtype in (jnp.bfloat16, jnp.float16)]
    made = jax.jit(lambda xs: [q(x, scheme) for x in xs])(narrow)
    for one, x in zip(made, narrow, strict=True):
        same(one, q(x.astype(jnp.float32), scheme))


@schemes
def test_a_callers_jit_changes_no_bit(scheme):
    x = jnp.asarray(normal(*SHAPE))
    # Its own arithmetic around the quantiser must not be merged into it either.
    plain, doubled = jax.jit(lambda x: (q(x, scheme), q(x * 2, scheme)))(x)
    same(plain, q(x, scheme))
    same(doubled, q(x * 2, scheme))


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "mxfp8", "mxfp4", "nvfp4", "int8", "int4:zero_point"])
def test_op_by_op_gives_the_same_bits(name):
    x = normal(*SHAPE)
    with jax.disable_jit():
        made = quantize(x, name)
    same(made, quantize(x, name))


@schemes
def test_strict_promotion_and_x64_change_nothing(scheme):
    x = normal(*SHAPE)
    expected = q(x, scheme)
    with jax.numpy_dtype_promotion("strict"):
        shapes, of_expected = jax.eval_shape(lambda x: q(x, scheme), x), jax.eval_shape(lambda: expected)
        assert jax.tree.flatten(shapes) == jax.tree.flatten(of_expected)
        with jax.enable_x64(True):
            single, double = jax.jit(lambda x, y: (q(x, scheme), q(y, scheme)))(x, x.astype(np.float64))
    same(single, expected)
    same(double, expected)


@schemes
def test_f19_no_tokens_are_no_error(scheme):
    made = jax.jit(lambda x: q(x, scheme))(np.zeros((0, 40), np.float32))
    assert made.shape == (0, 40)
    assert oracle.dequantize(made).shape == (0, 40)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(made))


@schemes
def test_a02_zeros_give_zero_codes_and_a_finite_scale(scheme):
    made = q(np.zeros(SHAPE, np.float32), scheme)
    np.testing.assert_array_equal(oracle.dequantize(made), np.zeros(SHAPE))
    scale = np.asarray(made.scale).astype(np.float32)
    assert np.isfinite(scale).all()
    if scheme.scale_dtype == "e8m0":
        assert not scale.any()  # byte 0 is 2**-127
    elif scheme.scale_dtype != "e4m3":
        assert (scale > 0).all()
    if made.zero_point is not None:
        assert len(np.unique(oracle.codes_of(made))) == len(np.unique(made.zero_point)) == 1
    else:
        assert (oracle.codes_of(made) == (8 if scheme.format == "int4" else 0)).all()


@activations
def test_a_non_finite_element_makes_its_own_row_nan_and_no_other(scheme):
    x = normal(5, 64)
    x[2, 7], x[2, 40], x[3, 0] = np.nan, np.inf, -np.inf
    values = np.asarray(jax.jit(lambda x: q(x, scheme).dequantize())(x))
    assert np.isnan(values).any(-1).tolist() == [False, False, True, True, False]
    assert not np.isinf(values).any()
    clean = np.asarray(oracle.dequantize(q(np.where(np.isfinite(x), x, 0), scheme)))
    np.testing.assert_array_equal(values[[0, 1, 4]], clean[[0, 1, 4]])


@schemes
def test_a_non_finite_element_is_never_a_finite_value(scheme):
    x = normal(*SHAPE)
    x[1, 5] = np.nan
    assert np.isnan(oracle.dequantize(q(x, scheme))[1, 5])


@schemes
def test_subnormal_inputs_are_zeros_or_their_values(scheme):
    x = np.resize(np.array([1e-45, -1e-40, 5e-39, 0], np.float32), SHAPE)
    values = np.asarray(oracle.dequantize(q(x, scheme)))
    assert (np.abs(values) < 2 * oracle.TINY).all()


@pytest.mark.parametrize(
    "name, decibels",
    [
        ("fp8_block", 31.5),
        ("fp8_channel", 31.5),
        ("int8", 41.2),
        ("int4", 19.0),
        ("nvfp4", 20.4),
        ("mxfp4", 19.0),
        ("mxfp4:scale_rounding=floor", 18.8),
    ],
)
def test_the_error_on_normal_data(name, decibels):
    x = normal(128, 4096)
    error = np.asarray(oracle.dequantize(quantize(x, name)), np.float64) - x
    assert 10 * np.log10(np.sum(x.astype(np.float64) ** 2) / np.sum(error**2)) == pytest.approx(decibels, abs=0.2)


def test_block_amax_leaves_out_the_padding():
    x = -np.arange(1, 16, dtype=np.float32).reshape(3, 5)
    assert block_amax(x, (2, 2)).tolist() == [[7, 9, 10], [12, 14, 15]]
    assert block_amax(x, (-1, -1)).tolist() == [[15]]
    assert block_amax(x, (1, -1)).tolist() == [[5], [10], [15]]
    assert block_amax(x[:0], (-1, 2)).tolist() == [[0, 0, 0]]


def test_shared_axes_share_one_global_scale():
    x = normal(3, 2, 4, 32)
    halves = quantize(x, "nvfp4", shared=(-3,))
    assert halves.global_scale.shape == (3, 2, 1, 1)
    expected = np.abs(x).max((1, 2, 3), keepdims=True) * np.float32(1 / 2688)
    np.testing.assert_array_equal(halves.global_scale, np.broadcast_to(expected, (3, 2, 1, 1)))
    own = quantize(x, "nvfp4").global_scale
    np.testing.assert_array_equal(own, np.abs(x).max((2, 3), keepdims=True) * np.float32(1 / 2688))
    same(quantize(x, "int8", shared=(-3,)), quantize(x, "int8"))
    for axes in [(-1,), (2,), (4,), (-5,)]:
        with pytest.raises(
            ValueError, match=r"shared=\(-?\d,\) must name leading axes of x, which has shape \(3, 2, 4, 32\)"
        ):
            quantize(x, "nvfp4", shared=axes)


def test_a_recipe_sets_the_input_scheme_and_a_scheme_leaves_it_open():
    x = normal(2, 32)
    assert quantize(x, "int8").input_scheme == INT8
    assert quantize(x, recipe("nvfp4")).input_scheme == NVFP4_STATIC
    assert quantize(x, INT8).input_scheme is None
    assert quantize(x, "mxfp4").input_scheme is None


@pytest.mark.parametrize(
    "x, how, error, message",
    [
        (
            np.ones((2, 2), np.int32),
            "int8",
            TypeError,
            "x has dtype int32, but only floating point arrays are quantized",
        ),
        (
            np.ones(4, np.float32),
            "int8",
            ValueError,
            r"x has shape \(4,\), but a quantized array has at least two axes",
        ),
        (np.ones((2, 2), np.float32), "bf16", ValueError, "recipe 'bf16' leaves the weight as it is"),
        (np.ones((2, 2), np.float32), "int9", ValueError, "recipe 'int9' is unknown"),
        (np.ones((2, 2), np.float32), None, TypeError, "how=None must be a Recipe, a Scheme or a recipe's name"),
    ],
)
def test_a_wrong_argument_is_named(x, how, error, message):
    with pytest.raises(error, match=message):
        quantize(x, how)


# The pitfalls: an input small enough to check by hand, and the right answer.


def test_a01_zero_blocks_beside_others_stay_zero():
    w = np.zeros((256, 256), np.float32)
    w[0, 0] = 1
    made = quantize(w, BLOCK)
    np.testing.assert_array_equal(made.dequantize(), w)
    assert np.isfinite(made.scale).all()
    assert np.count_nonzero(np.asarray(made.data).view(np.uint8)) == 1


def test_a03_an_nvfp4_block_scale_saturates():
    x = np.zeros((1, 32), np.float32)
    x[0, :16], x[0, 16:] = 3.0, np.linspace(-1, 1, 16)
    made = quantize(x, NVFP4_STATIC, scale=1 / 2688)  # calibrated for amax 1
    assert made.scale.astype(jnp.float32).tolist() == [[448, 448]]  # not 1344, which e4m3 casts to NaN
    np.testing.assert_allclose(made.dequantize()[0, :16], 1.0, rtol=1e-6)  # 6 * 448 / 2688


def test_a08_a_cast_to_e4m3_saturates():
    x = jnp.array([[448, 464, 465, 480, 1e4]])
    made = quantize(x, FP8_ROW.replace(static=True), scale=1.0)
    assert made.dequantize().tolist() == [[448] * 5]


def test_a10_the_largest_value_of_e4m3_is_448():
    x = np.full((1, 128), 448, np.float32)
    for scheme in (BLOCK.replace(block=(1, 128)), BLOCK, FP8_ROW, FP8_ROW.replace(block=(-1, -1))):
        assert quantize(x, scheme).scale.tolist() == [[1.0]]


def test_a11_the_shared_exponent_is_that_of_amax_less_two():
    x = np.zeros((3, 32), np.float32)
    x[:, 3] = [2.7, -5.5, 1.2]
    assert quantize(x, MXFP4).scale.tolist() == [[126], [127], [125]]
    assert quantize(x, MXFP4.replace(scale_rounding="floor")).scale.tolist() == [[126], [127], [125]]


@pytest.mark.parametrize(
    "scheme", [recipe("mxfp8").weight, FP8_ROW.replace(power_of_two=True)], ids=["e8m0", "float32"]
)
def test_b04_exact_powers_of_two_are_not_rounded_up(scheme):
    k = np.arange(-126, 119)
    x = np.repeat(np.ldexp(np.float32(448), k).astype(np.float32)[:, None], 32, 1)
    made = quantize(x, scheme)
    np.testing.assert_array_equal(made.combined_scale(), np.ldexp(np.float32(1), k).astype(np.float32)[:, None])
    np.testing.assert_array_equal(made.dequantize(), x)


def test_b06_float16_is_quantized_in_float32_and_ties_go_to_even():
    x = np.zeros((2, 32), np.float16)
    x[0, :4] = np.array([448, 168, 17, 19]) * 128
    x[1, 0] = 6e4
    made = quantize(x, "mxfp8")
    assert made.scale.tolist() == [[134], [135]]  # 2**7; 6e4 / 448 = 133.9 needs 2**8
    assert made.codes.astype(jnp.float32)[0, :4].tolist() == [448, 160, 16, 20]
    assert made.dequantize()[1, 0] == 240 * 256  # 6e4 / 256 = 234.4, between 224 and 240


def test_b14_a_group_of_64_is_not_128():
    w = np.concatenate([np.full((2, 64), s, np.float32) for s in (7, 70, 0.7, 1)], 1)
    made = quantize(w, "int4:group=64")
    assert made.scale.shape == (2, 4)
    np.testing.assert_allclose(made.dequantize(), w, rtol=2e-7 + 1 / 14)
    expected = np.repeat(np.asarray(made.scale), 64, 1) * 7
    np.testing.assert_array_equal(made.dequantize(), expected)


@pytest.mark.parametrize("name", ["int4:group=-1", "int8_w8a16:group=-1"])
def test_b16_group_minus_one_is_one_group_over_k(name):
    w = normal(3, 100)
    made = quantize(w, name)
    top = 7.5 if name.startswith("int4") else 127
    np.testing.assert_array_equal(made.scale, np.abs(w).max(1, keepdims=True) * np.float32(1 / top))


@schemes
def test_c06_slices_and_transposes_in_one_jit_change_nothing(scheme):
    x, y = normal(40, 3), normal(6, 50)
    by_transpose, by_slice = jax.jit(lambda x, y: (q(x.T, scheme), q(y[::2, 5:45], scheme)))(x, y)
    same(by_transpose, q(np.ascontiguousarray(x.T), scheme))
    same(by_slice, q(np.ascontiguousarray(y[::2, 5:45]), scheme))


def test_d01_int8_rounds_and_does_not_truncate():
    made = quantize(np.array([[127, 1.9, -1.9, 2.5]], np.float32), INT8)
    assert made.scale.tolist() == [[1.0]]
    assert made.data.tolist() == [[127, 2, -2, 2]]


def test_d03_mx_scales_are_rounded_before_the_codes():
    x = np.zeros((2, 32), np.float32)
    x[:, 0] = [7.0, 6.9]
    even, floor = quantize(x, MXFP4), quantize(x, MXFP4.replace(scale_rounding="floor"))
    assert even.scales.astype(jnp.float32).tolist() == [[2], [1]]
    assert even.dequantize()[:, 0].tolist() == [8, 6]
    assert floor.dequantize()[:, 0].tolist() == [6, 6]


def test_d04_nvfp4_block_scales_round_to_even_and_saturate():
    x = np.repeat(np.array([17, 19, 500], np.float32) * 6, 16)[None]
    made = quantize(x, NVFP4_STATIC, scale=1.0)
    assert made.scale.astype(jnp.float32).tolist() == [[16, 20, 448]]


def test_d06_quantised_nibbles_are_low_first():
    made = quantize(np.array([[-7.5, 1, 2, 3, 4]], np.float32), INT4)
    assert made.scale.tolist() == [[1.0]]
    assert made.data.tolist() == [[0x90, 0xBA, 0x0C]]  # codes + 8: -8 (from the tie -7.5), 1, 2, 3, 4


def test_recipes_and_schemes_of_ones_own():
    own = Scheme(format="int8", block=(1, 16), scale_dtype="e4m3", global_scale="tensor")
    x = normal(8, 64)
    made = quantize(x, Recipe(name="own", weight=own))
    assert np.abs(np.asarray(made.data, np.int32)).max() == 127
    error = np.asarray(made.dequantize()) - x
    assert 20 * np.log10(np.linalg.norm(x) / np.linalg.norm(error)) > 38
