"""Faults that four-bit weights have had elsewhere, on interpreted kernels of our own, from jmoe's operations down.

A product with the identity shows the weights that a kernel makes; expected values are worked out by hand.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.backends.activation import ActivationParams
from jmoe.qtensor import QTensor
from pallas_kernels.layouts import CANONICAL
from tests.interpreted import interpreted


@pytest.fixture(autouse=True)
def _kernels():
    with interpreted():
        yield


@functools.partial(jax.jit, static_argnames="recipe")
def product(x, w, recipe=None):
    return jmoe.linear(x, w, recipe=recipe, implementation="triton", preferred_element_type=jnp.float32)


def values(w):
    """What the kernel takes the weights for, (N, K)."""
    return np.asarray(product(jnp.eye(w.shape[-1], dtype=jnp.bfloat16), w)).T


def nvfp4(codes, scales, multiplier):
    """Rows of 64 equal codes, of which each has one scale."""
    data = np.repeat(np.uint8(codes)[:, None] * np.uint8(0x11), 32, axis=1)
    scale = np.repeat(np.asarray(scales, jnp.float8_e4m3fn)[:, None], 4, axis=1)
    scheme = jmoe.recipe("nvfp4_w4a16").weight
    return QTensor.make(data, scale, global_scale=np.full((1, 1), multiplier, np.float32), scheme=scheme)


def test_a03_c07_d04_nvfp4_scales_saturate_and_the_multiplier_counts_once():
    # 6 * 448 / 2688, both signs, and -448.
    w = nvfp4([7, 15, 7], [448, 448, -448], 1 / 2688)
    np.testing.assert_allclose(values(w), np.repeat([[1.0], [-1.0], [-1.0]], 64, axis=1), rtol=2**-9)
    # Scales 17, 19 and 448 under a multiplier of 1 are 16, 20 and 448; 102 / 16 and 114 / 20 are nearest to 6.
    block = np.repeat(np.float32([102, 114, 2688, 0]), 16)
    q = jmoe.quantize(np.stack([block] * 3), "nvfp4_w4a16")
    np.testing.assert_array_equal(values(q), np.stack([np.repeat(np.float32([96, 120, 2688, 0]), 16)] * 3))


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4_a8"])
def test_a11_d02_d03_d06_codes_and_shared_exponents_of_mxfp4(recipe):
    first = np.zeros((4, 64), np.float32)
    first[0, [0, 32]] = 2.7, 5.5  # exponents 126 and 127: 5.4 and 5.5 are nearest to 6
    first[1, [0, 32]] = 1.2, 7.0  # 125: 4.8 is nearest to 4; 7 makes the scale 2, and 3.5 goes to 4
    first[2, 0] = 6.9  # the scale stays 1
    rounded = np.float32([0, 0.25, 0.25000006, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 5.0001])
    first[3, :10] = rounded
    wanted = np.zeros((4, 64), np.float32)
    wanted[0, [0, 32]], wanted[1, [0, 32]], wanted[2, 0] = (3, 6), (1, 8), 6
    wanted[3, :10] = 0, 0, 0.5, 1, 1, 2, 2, 4, 4, 6
    np.testing.assert_allclose(values(jmoe.quantize(first, recipe)), wanted, rtol=1e-6)
    data = np.zeros((4, 32), np.uint8)
    data[0, :2] = 0x21, 0x43
    q = QTensor.make(data, np.full((4, 2), 127, np.uint8), scheme=jmoe.recipe("mxfp4").weight)
    q = q.with_input_scheme(jmoe.recipe(recipe).input)
    assert values(q)[0, :5] == pytest.approx([0.5, 1, 1.5, 2, 0])


@pytest.mark.parametrize("recipe", ["int4:group=32", "int4_fp8:group=32", "int4_int8:group=32,zero_point"])
def test_b03_d07_int4_keeps_its_sign_and_each_group_its_scale(recipe):
    scheme = jmoe.recipe(recipe).weight
    codes = np.tile(np.arange(16, dtype=np.uint8), (4, 4))
    zeros = np.full((4, 2), 8, np.uint8) if scheme.zero_point else None
    scale = np.tile(np.float32([1, 4]), (4, 1))
    w = QTensor.make(codes[:, ::2] | codes[:, 1::2] << 4, scale, zero_point=zeros, scheme=scheme)
    w = w.with_input_scheme(jmoe.recipe(recipe).input)
    wanted = np.tile(np.arange(-8, 8, dtype=np.float32), 4) * np.repeat(np.float32([1, 4]), 32)
    np.testing.assert_allclose(values(w), np.tile(wanted, (4, 1)), rtol=1e-6)


@pytest.mark.parametrize("group", [64, -1])
def test_b13_b14_b16_the_group_is_the_tensors_own_and_goes_with_its_shards(group):
    # Groups of 64 in which 128 would be as likely, and -1: one group over the whole of K.
    dense = np.random.default_rng(1).standard_normal((24, 256)) * np.repeat([1, 8, 0.1, 3], 64)
    w = jmoe.quantize(np.float32(dense), f"int4:group={group}")
    x = jax.random.normal(jax.random.key(0), (5, 256), jnp.bfloat16)
    wanted = np.asarray(x, np.float64) @ np.asarray(w.dequantize(), np.float64).T
    assert np.linalg.norm(product(x, w) - wanted) <= 3e-3 * np.linalg.norm(wanted)
    if group == 64:
        halves = [
            QTensor.make(w.data[:, i : i + 64], w.scale[:, i // 32 : i // 32 + 2], scheme=w.scheme) for i in (0, 64)
        ]
        y = sum(np.asarray(product(x[:, i : i + 128], half)) for i, half in zip((0, 128), halves, strict=True))
        np.testing.assert_allclose(y, product(x, w), rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match=r"scale has shape \(24, 4\), but data of logical shape \(24, 128\)"):
            QTensor.make(w.data[:, :64], w.scale, scheme=w.scheme)


def test_b18_scales_go_along_with_their_own_k():
    # K is H = 256 in the first product and I = 64 in the second; each group's scale tells its place.
    scheme = jmoe.recipe("int4:group=64").weight

    def weight(*shape):
        codes = np.random.default_rng(2).integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
        groups = shape[-1] // 64
        scale = 0.01 * (1 + np.arange(groups * shape[-2]).reshape(shape[-2], groups)) / shape[-2]
        scale = np.broadcast_to(scale, (*shape[:-2], *scale.shape)).astype(np.float32)
        return QTensor.make(codes, scale, scheme=scheme)

    w13, w2 = weight(2, 2, 64, 256), weight(2, 256, 64)
    x = jax.random.normal(jax.random.key(0), (3, 256), jnp.bfloat16)
    arguments = x, w13, w2, jnp.ones((3, 1)), jnp.array([[1], [0], [1]])
    y, wanted = (jmoe.fused_moe(*arguments, implementation=name) for name in ("triton", "reference"))
    assert np.linalg.norm(np.float64(y) - np.float64(wanted)) <= 5e-3 * np.linalg.norm(np.float64(wanted))


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4_a8"])
def test_c04_a_layout_is_part_of_the_type_and_gives_every_scale_back(recipe):
    scale = np.broadcast_to(120 + np.arange(256, dtype=np.uint8)[:, None] % 7, (256, 4))
    codes = np.random.default_rng(0).integers(0, 256, (256, 64)).astype(np.uint8)
    w = QTensor.make(codes, scale, scheme=jmoe.recipe("mxfp4").weight)
    w = w.with_input_scheme(jmoe.recipe(recipe).input)
    packed = jmoe.prepare(w, op="linear")
    assert jax.tree.structure(packed) != jax.tree.structure(w)
    np.testing.assert_array_equal(packed.in_layout(CANONICAL).scale, scale)
    np.testing.assert_array_equal(packed.dequantize(), w.dequantize())


def one_expert(gate, up, activation="silu", x=1.0, weight=1.0, **options):
    """y of one token, one expert, H = I = 1: int4 codes of 1 whose scales are gate and up."""
    scheme = jmoe.recipe("int4:group=-1").weight
    scale = np.float32([gate, up]).reshape(1, 2, 1, 1)
    w13 = QTensor.make(np.full((1, 2, 1, 1), 9, np.uint8), scale, scheme=scheme, k=1)
    w2 = QTensor.make(np.full((1, 1, 1), 9, np.uint8), np.ones((1, 1, 1), np.float32), scheme=scheme, k=1)
    routed = jnp.full((1, 1), weight, jnp.float32), jnp.zeros((1, 1), jnp.int32)
    x = jnp.full((1, 1), x, jnp.bfloat16)
    y = jmoe.fused_moe(x, w13, w2, *routed, activation=activation, implementation="triton", **options)
    return float(y[0, 0])


def test_e02_e03_e05_limits_and_constants_of_the_activation():
    near = functools.partial(pytest.approx, rel=2**-8)  # bfloat16's
    assert one_expert(10, -9, "silu:limit=7") == near(-48.9554)
    assert one_expert(5, 1, "silu:limit=1") == near(0.7310586)
    assert one_expert(5, 1, "silu:limit=100") == near(4.9665358)
    # 7 / (1 + e^-11.914) * (3 + 1), whether constants are static or arrays.
    assert one_expert(10, 3, "swigluoai") == near(27.999813)
    params = ActivationParams(alpha=jnp.float32(1.702), beta=jnp.ones(1), limit=7)
    assert one_expert(10, 3, activation_params=params) == near(27.999813)


def test_e08_the_router_weight_before_and_after_the_activation():
    assert one_expert(1, 1, x=2, weight=0.5) == pytest.approx(1.76159 / 2 * 2, rel=2**-8)
    assert one_expert(1, 1, x=2, weight=0.5, weight_on_input=True) == pytest.approx(0.73106, rel=2**-8)


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4_a8", "nvfp4_w4a16", "int4", "int4_int8"])
def test_h10_k_below_a_tile(recipe):
    w = jmoe.quantize(jax.random.normal(jax.random.key(0), (5, 32)), recipe)
    np.testing.assert_allclose(values(w), w.dequantize(), rtol=2**-8)


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4_a8"])
def test_an_expert_of_gpt_oss(recipe):
    # H = I = 2880, whose last tile of K is half full; gates reach the limit of 7.
    keys = jax.random.split(jax.random.key(0), 5)
    w13 = jmoe.quantize(jax.random.normal(keys[0], (1, 2, 2880, 2880)) * 2880**-0.5, recipe)
    w2 = jmoe.quantize(jax.random.normal(keys[1], (1, 2880, 2880)) * 2880**-0.5, recipe)
    biases = {"b13": jax.random.normal(keys[2], (1, 2, 2880)), "b2": jax.random.normal(keys[3], (1, 2880))}
    x = 8 * jax.random.normal(keys[4], (3, 2880), jnp.bfloat16)
    arguments = x, w13, w2, jnp.float32([[0.3], [0.7], [1]]), jnp.array([[0], [0], [-1]])
    options = {"activation": "swigluoai", "preferred_element_type": jnp.float32, **biases}
    y, wanted = (jmoe.fused_moe(*arguments, implementation=name, **options) for name in ("triton", "reference"))
    assert np.linalg.norm(y - wanted) <= 5e-3 * np.linalg.norm(wanted)
    assert not y[2].any()


@pytest.mark.parametrize("recipe", ["nvfp4_w4a16", "int4_fp8:group=32,scale_dtype=bfloat16", "int4:group=32"])
def test_scales_of_zero_below_zero_far_apart_and_nan(recipe):
    w = jmoe.quantize(jax.random.normal(jax.random.key(0), (5, 96)), recipe)
    scale = w.scale.at[0].set(0).at[1].multiply(-1).at[2, 0].set(jnp.nan).at[3, 0].multiply(2**-9).at[4, 1].set(400)
    w = dataclasses.replace(w, scale=scale.astype(w.scale.dtype))
    x = jax.random.normal(jax.random.key(1), (3, 96), jnp.bfloat16)
    options = {"implementation": "reference", "preferred_element_type": jnp.float32}
    np.testing.assert_allclose(product(x, w), jmoe.linear(x, w, **options), rtol=1e-2, atol=1e-2)
    assert np.isnan(product(x, w)[:, 2]).all() and not product(x, w)[:, 0].any()
