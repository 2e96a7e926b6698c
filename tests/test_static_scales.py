"""Scales that are given and not measured: what is taken, what is refused, eagerly, while tracing, and at run time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jmoe.config import config
from jmoe.quantize import check_static_scale, quantize
from jmoe.scheme import Scheme, recipe
from tests import quantizer_oracle as oracle

TENSOR = recipe("fp8_tensor_static").input
ROW = TENSOR.replace(block=(1, -1))
INT8 = Scheme(format="int8", block=(-1, -1), static=True)
NVFP4 = recipe("nvfp4").input


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("scheme", [TENSOR, ROW, INT8, NVFP4], ids=lambda s: s.describe())
@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 33)])
def test_a_given_scale_is_used_as_it_is(scheme, shape):
    x, s = normal(*shape), np.float32(0.013)
    made = quantize(x, scheme, scale=s)
    oracle.assert_is(made, oracle.quantize(x, scheme, np.full((*shape[:-2], 1, 1), s)))
    assert made.scheme == scheme
    traced = jax.jit(lambda x, s: quantize(x, scheme, scale=s))(x, s)
    np.testing.assert_array_equal(oracle.codes_of(traced), oracle.codes_of(made))


@pytest.mark.parametrize("scheme", [TENSOR, ROW, INT8], ids=lambda s: s.describe())
def test_one_scale_a_row_is_a_scale_a_row(scheme):
    x, s = normal(2, 3, 8), np.array([0.01, 0.02, 0.04], np.float32)[:, None]
    made = quantize(x, scheme, scale=s)
    assert made.scheme == scheme.replace(block=(1, -1))
    np.testing.assert_array_equal(made.scale, np.broadcast_to(s, (2, 3, 1)))
    oracle.assert_is(made, oracle.quantize(x, made.scheme, np.broadcast_to(s, (2, 3, 1))))


def test_one_global_scale_a_row_is_a_global_scale_a_row():
    x, s = normal(3, 32), np.array([[0.001], [0.002], [0.004]], np.float32)
    made = quantize(x, NVFP4, scale=s)
    np.testing.assert_array_equal(made.global_scale, s)
    oracle.assert_is(made, oracle.quantize(x, NVFP4, s))


@pytest.mark.parametrize("scheme", [TENSOR, ROW, NVFP4], ids=lambda s: s.describe())
def test_one_scale_an_expert(scheme):
    x, s = normal(2, 3, 16), np.array([0.01, 0.02], np.float32).reshape(2, 1, 1)
    made = quantize(x, scheme, scale=s)
    for i in range(2):
        alone = quantize(x[i], scheme, scale=s[i])
        np.testing.assert_array_equal(oracle.dequantize(made)[i], oracle.dequantize(alone))


def test_a_python_number_a_numpy_array_and_bfloat16_are_taken():
    x = normal(2, 8)
    for s in (0.5, 1, np.float64(0.5), np.array(0.5, np.float16), jnp.bfloat16(0.5)):
        made = quantize(x, TENSOR, scale=s)
        assert made.scale.dtype == jnp.float32
        assert made.scale.tolist() == [[float(s)]]
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        assert quantize(x, TENSOR, scale=0.5).scale.dtype == jnp.float32


def test_a_static_scheme_needs_a_scale_and_no_other_takes_one():
    x = normal(2, 16)
    for scheme in (TENSOR, NVFP4):
        with pytest.raises(ValueError, match=r"scale is missing, but the scheme \(.* static\) has static=True"):
            quantize(x, scheme)
    for how in (TENSOR.replace(static=False), "int8", "nvfp4"):
        with pytest.raises(ValueError, match=r"scale is given, but the scheme \(.*\) has static=False"):
            quantize(x, how, scale=1.0)


@pytest.mark.parametrize("shape", [(5,), (3,), (1, 8), (5, 8), (2, 1), (2, 5, 1), (1, 1, 1)])
def test_a_scale_that_is_not_one_a_row_at_most_is_refused(shape):
    with pytest.raises(
        ValueError, match=r"scale has shape \(.*\), but x of shape \(5, 8\) takes one that broadcasts to \(5, 1\)"
    ):
        quantize(normal(5, 8), TENSOR, scale=np.ones(shape, np.float32))


WRONG = [0.0, -1.0, 1e-45, 1e-40, np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("scheme", [TENSOR, NVFP4], ids=lambda s: s.describe())
@pytest.mark.parametrize("value", WRONG)
def test_a05_a_zero_tiny_or_non_finite_scale_is_refused(scheme, value):
    x = normal(2, 16)
    message = f"scale has the value {np.float32(value):g}, but a scale is finite and at least 1.17549e-38"
    with pytest.raises(ValueError, match=message):
        quantize(x, scheme, scale=value)
    with pytest.raises(ValueError, match=message):
        quantize(x, scheme, scale=jnp.array([[1.0], [value]]))
    # A number that is known while tracing is checked then.
    for known in (value, np.float32(value), jnp.float32(value)):
        with pytest.raises(ValueError, match=message):
            jax.jit(lambda x, known=known: quantize(x, scheme, scale=known))(x)


@pytest.mark.parametrize(
    "value, shown",
    [(1e-50, "the value 1e-50"), (1e300, r"the value 1e\+300"), (10**400, "a value beyond float32")],
    ids=["low", "high", "int"],
)
def test_a_scale_that_float32_has_not_is_named_as_it_was_given(value, shown):
    with pytest.raises(ValueError, match=rf"scale has {shown}, but a scale is finite and at least"):
        quantize(normal(2, 16), TENSOR, scale=value)


@pytest.mark.parametrize("value", WRONG)
def test_a05_check_finds_a_traced_scale_at_run_time(value):
    x = normal(2, 16)

    def f(x, s):
        return quantize(x, NVFP4, scale=s).dequantize()

    with config(check=True):
        checked = jax.jit(checkify.checkify(f))
        error, _ = checked(x, jnp.float32(value))
        with pytest.raises(checkify.JaxRuntimeError, match="scale must be finite and positive"):
            error.throw()
        error, values = checked(x, jnp.float32(0.001))
        error.throw()
    np.testing.assert_array_equal(values, f(x, 0.001))


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-45])
@pytest.mark.parametrize("scheme", [TENSOR, INT8, NVFP4], ids=lambda s: s.describe())
def test_an_unchecked_traced_scale_gives_no_nan_from_finite_values(scheme, value):
    values = jax.jit(lambda x, s: quantize(x, scheme, scale=s).dequantize())(normal(2, 16), jnp.float32(value))
    assert np.isfinite(values).all()


def test_an_unchecked_traced_nan_scale_shows():
    values = jax.jit(lambda x, s: quantize(x, TENSOR, scale=s).dequantize())(normal(2, 16), jnp.float32(np.nan))
    assert np.isnan(values).all()


def test_check_static_scale_says_the_name_it_is_given():
    with pytest.raises(ValueError, match="intermediate_scale has the value 0, but"):
        check_static_scale("intermediate_scale", np.zeros(3))
    assert check_static_scale("input_scale", [1.0, 2.0]).tolist() == [1.0, 2.0]
