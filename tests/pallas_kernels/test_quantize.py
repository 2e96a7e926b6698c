"""Quantisation kernels in interpret mode, bit for bit against ``jmoe.quantize``, and as Triton IR."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmoe.quantize import quantize
from jmoe.scheme import Scheme
from pallas_kernels import launch
from pallas_kernels import quantize as kernels
from tests.pallas_kernels import lanes

F8 = jnp.float8_e4m3fn


def assert_same(found, expected):
    """Codes and scales of equal bits; ``expected`` is a QTensor."""
    for mine, theirs in zip(found, (expected.data, expected.scale), strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(np.asarray(mine).view(np.uint8), np.asarray(theirs).view(np.uint8))


def activations(m, k, dtype, seed=0):
    """Rows of very different size, a zero group, and non-finite elements."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k)) * np.exp(3 * rng.standard_normal((m, 1)))
    x[0, : min(k, 128)] = 0
    x[-1, k // 2] = np.nan
    x[m // 2, -1] = np.inf
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(
    "m, k, group, dtype", [(1, 1, 128, "float32"), (7, 300, 128, "bfloat16"), (3, 200, 24, "float16")]
)
def test_groups(m, k, group, dtype, power_of_two):
    x = activations(m, k, dtype)
    found = kernels.quantize_groups(x, group, power_of_two=power_of_two, interpret=True)
    assert_same(found, quantize(x, Scheme(format="e4m3", block=(1, group), power_of_two=power_of_two)))


def test_groups_with_e8m0_scales():
    x = activations(5, 100, jnp.bfloat16)
    found = kernels.quantize_groups(x, 32, scale_dtype="e8m0", interpret=True)
    assert_same(found, quantize(x, Scheme(format="e4m3", block=(1, 32), scale_dtype="e8m0")))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("m, k", [(9, 70), (2, 8200)], ids=["a row at once", "a row in two steps"])
def test_tokens(m, k, power_of_two):
    x = activations(m, k, jnp.bfloat16)
    found = kernels.quantize_tokens(x, power_of_two=power_of_two, interpret=True)
    assert_same(found, quantize(x, Scheme(format="e4m3", block=(1, -1), power_of_two=power_of_two)))


@pytest.mark.parametrize("m, k", [(3, 50), (9, 4100)], ids=["one launch", "two launches"])
def test_tensor(m, k):
    x = activations(m, k, jnp.float32)
    found = kernels.quantize_tensor(x, interpret=True)
    assert_same(found, quantize(x, Scheme(format="e4m3", block=(-1, -1))))


@pytest.mark.parametrize("m, k", [(3, 50), (9, 4100)], ids=["one launch", "two launches"])
def test_rows_of_nobody_do_not_count_for_the_scale_of_a_tensor(m, k):
    x = activations(m, k, jnp.float32)
    # Experts 0 and 4 of five are here. Row 1 has none of them.
    ids = jnp.full((m, 3), 4, jnp.int32).at[:2].set(jnp.array([[-1, 0, 9], [1, -1, 5]]))
    choices = kernels.Choices(ids, jnp.array([0, -1, -1, 2, 1], jnp.int32))
    chain = kernels.tensor_chain(x.at[1].set(1e30), choices=choices, experts=2)
    [(codes, scale)] = launch.run_chains("quantize_tensor", chain, interpret=True)
    expected = quantize(x.at[1].set(0), Scheme(format="e4m3", block=(-1, -1)))
    np.testing.assert_array_equal(scale, expected.scale)
    others = np.arange(m) != 1
    np.testing.assert_array_equal(*(np.asarray(c)[others].view(np.uint8) for c in (codes, expected.data)))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", [(1, -1), (1, 24), (-1, -1)], ids=["tokens", "groups", "tensor"])
def test_int8_codes_whose_scale_is_nan_where_an_element_is_not_finite(block, power_of_two):
    scheme = Scheme(format="int8", block=block, power_of_two=power_of_two)
    call = {
        (1, -1): kernels.quantize_tokens,
        (1, 24): lambda x, **options: kernels.quantize_groups(x, 24, **options),
        (-1, -1): kernels.quantize_tensor,
    }[block]
    for x in (activations(9, 70, jnp.bfloat16), jnp.full((2, 8200), 0.75, jnp.float32).at[1, 5].set(-1e30)):
        code, scale = call(x, codes=jnp.int8, power_of_two=power_of_two, interpret=True)
        expected = quantize(x, scheme)
        np.testing.assert_array_equal(scale, expected.scale)
        known = np.broadcast_to(
            np.isfinite(np.repeat(scale, 24, axis=1)[:, : x.shape[1]] if block[1] == 24 else scale), x.shape
        )
        np.testing.assert_array_equal(np.asarray(code)[known], np.asarray(expected.data)[known])


def test_d01_int8_rounds_to_nearest_even_and_does_not_truncate():
    x = jnp.array([[127, 1.9, -1.9, 2.5, -127, 3.5, -0.5, 0.5]], jnp.float32)
    code, _ = kernels.quantize_tokens(x, codes=jnp.int8, interpret=True)
    assert code.tolist() == [[127, 2, -2, 2, -127, 4, 0, 0]]


@pytest.mark.parametrize("rows", [False, True])
def test_static(rows):
    x = activations(6, 40, jnp.bfloat16)
    scale = jnp.linspace(0.01, 2, 6, dtype=jnp.float32)[:, None] if rows else jnp.float32(0.013)
    scheme = Scheme(format="e4m3", block=(1, -1) if rows else (-1, -1), static=True)
    assert_same(kernels.quantize_static(x, scale, interpret=True), quantize(x, scheme, scale=scale))


def test_b04_amax_of_448_times_a_power_of_two_gives_that_power():
    exponent = np.arange(-100, 110)
    x = jnp.asarray(448 * np.exp2(exponent)[:, None], jnp.float32)
    code, scale = kernels.quantize_groups(x, 128, power_of_two=True, interpret=True)
    np.testing.assert_array_equal(scale[:, 0], np.exp2(exponent).astype(np.float32))
    np.testing.assert_array_equal(np.float32(code), 448)


@pytest.mark.parametrize("quantizer", [kernels.quantize_tokens, kernels.quantize_tensor])
def test_a02_zeros_get_code_0_and_a_positive_finite_scale(quantizer):
    code, scale = quantizer(jnp.zeros((4, 128), jnp.bfloat16), interpret=True)
    assert not np.asarray(code).view(np.uint8).any()
    assert (np.asarray(scale) > 0).all() and np.isfinite(scale).all()


@pytest.mark.parametrize(
    "call", [lambda x: kernels.quantize_groups(x, 128), kernels.quantize_tokens, kernels.quantize_tensor]
)
@pytest.mark.parametrize("shape", [(0, 256), (3, 0)])
def test_h01_nothing_to_quantise(call, shape):
    code, scale = call(jnp.zeros(shape, jnp.bfloat16))
    assert code.shape == shape and code.dtype == F8
    assert scale.dtype == jnp.float32 and np.isfinite(scale).all()


def test_they_work_under_vmap_strict_promotion_and_x64():
    x = jnp.stack([activations(3, 130, jnp.bfloat16, seed) for seed in range(2)])
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        codes, scales = jax.vmap(lambda v: kernels.quantize_groups(v, 128, interpret=True))(x)
        lanes.lower_for(kernels.quantize_tensor, (lanes.spec((64, 4096), jnp.bfloat16),))
    for i in range(2):
        assert_same((codes[i], scales[i]), quantize(x[i], Scheme(format="e4m3", block=(1, 128))))


def test_bad_arguments_are_named():
    x = jnp.zeros((2, 4), jnp.bfloat16)
    with pytest.raises(ValueError, match="group=0 must be between 1 and 8192"):
        kernels.quantize_groups(x, 0)
    with pytest.raises(TypeError, match="x is int32 of shape"):
        kernels.quantize_tokens(x.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"scale has shape \(2,\), but it is \(\) or \(M, 1\)"):
        kernels.quantize_static(x, jnp.ones(2, jnp.float32))


@pytest.mark.lowering
@pytest.mark.parametrize("capability", [89, 90, 100])
def test_they_lower_in_one_launch_and_a_large_tensor_in_two(capability):
    big, small = lanes.spec((8192, 7168), jnp.bfloat16), lanes.spec((4, 100), jnp.float32)
    calls = {
        "groups": lambda x: kernels.quantize_groups(x, 128),
        "pow2": lambda x: kernels.quantize_groups(x, 32, scale_dtype="e8m0"),
        "tokens": kernels.quantize_tokens,
        "tensor": kernels.quantize_tensor,
        "static": lambda x: kernels.quantize_static(x, jnp.float32(1)),
        "int8": lambda x: kernels.quantize_tokens(x, codes=jnp.int8),
    }
    launches = {
        name: [len(lanes.lower_for(call, (x,), capability)) for x in (big, small)] for name, call in calls.items()
    }
    assert launches == {
        "groups": [1, 1],
        "pow2": [1, 1],
        "tokens": [1, 1],
        "tensor": [2, 1],
        "static": [1, 1],
        "int8": [1, 1],
    }


@pytest.mark.lowering
def test_h12_rows_of_a_tensor_beyond_2_31_elements_are_addressed_with_64_bits():
    [kernel] = lanes.lower_for(kernels.quantize_tokens, (lanes.spec((2**19, 8192), jnp.bfloat16),))
    assert "xi64>" in kernel.text
