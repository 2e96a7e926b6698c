"""Dense products with packed four-bit weights, in interpret mode, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from pallas_kernels import quantize as kernels
from pallas_kernels.fourbit.linear import linear
from pallas_kernels.tuning.heuristics import MatmulTile
from tests.pallas_kernels import fourbit_cases as cases

BAR = 3e-3


def tile(**extents):
    return MatmulTile(**{"block_m": 16, "block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 3} | extents)


def quantized(x, q):
    if q.input_scheme is None:
        return x, None
    return kernels.quantize_tokens(x, codes=q.input_scheme.fmt.storage, interpret=True)


def error(q, m, *, tile, bias=None, activation=None, layer=None, exact=True, x=None):
    """Relative to the reference, both on the same quantized operands."""
    k = q.shape[-1]
    x = jax.random.normal(jax.random.key(7), (m, k), jnp.bfloat16) if x is None else x
    options = {"bias": bias, "activation": activation}
    wanted = jmoe.linear(x, q, layer=layer, implementation="reference", preferred_element_type=jnp.float32, **options)
    codes, scale = quantized(x, q)
    index = None if layer is None else jnp.int32(layer)
    y = linear(
        codes,
        cases.packed(q),
        packing=cases.packing_of(q),
        x_scale=scale,
        layer=index,
        exact=exact,
        tile=tile,
        interpret=True,
        **options,
    )
    y, wanted = (np.asarray(a, np.float64) for a in (y, wanted))
    return np.linalg.norm(y - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("recipe", cases.RECIPES)
def test_of_ragged_extents_in_steps_that_overshoot(recipe):
    q = jmoe.quantize(jax.random.normal(jax.random.key(0), (70, 333)), recipe)
    bias = jax.random.normal(jax.random.key(1), (70,))
    assert error(q, 5, tile=tile(block_k=256, block_n=128), bias=bias, activation="gelu") < BAR


@pytest.mark.parametrize("recipe", ["mxfp4_a8", "int4:group=32,scale_dtype=bfloat16"])
def test_of_a_layer_with_k_in_parts(recipe):
    q = jmoe.quantize(jax.random.normal(jax.random.key(0), (2, 130, 520)), recipe)
    bias = jax.random.normal(jax.random.key(1), (2, 130))
    assert error(q, 20, tile=tile(block_m=32, split_k=3), bias=bias, layer=1) < BAR


@pytest.mark.parametrize("recipe", cases.RECIPES)
@pytest.mark.parametrize("k, block_k, parts", [(600, 128, 4), (1100, 256, 4), (1100, 512, 2), (384, 128, 2)])
def test_parts_of_k_that_steps_do_not_fill(recipe, k, block_k, parts):
    """The last parts have fewer steps than the others, or none."""
    w, x = (jax.random.normal(key, (70, k)) for key in jax.random.split(jax.random.key(0)))
    x = x[:5].astype(jnp.bfloat16)
    q = jmoe.quantize(w, recipe)
    packing, (codes, scale) = cases.packing_of(q), quantized(x, q)
    made = [
        linear(codes, cases.packed(q), packing=packing, x_scale=scale, tile=tile(**facts), exact=False, interpret=True)
        for facts in ({"block_k": block_k, "split_k": parts}, {"block_m": 64, "split_k": parts}, {"block_m": 64})
    ]
    wanted = jmoe.linear(x, q, implementation="reference", preferred_element_type=jnp.float32)
    for y in made:
        assert jnp.linalg.norm(y.astype(jnp.float32) - wanted) < BAR * jnp.linalg.norm(wanted)


def test_a_step_longer_than_exact_sums_take():
    q = jmoe.quantize(jax.random.normal(jax.random.key(0), (64, 1100)), "mxfp4_a8")
    with pytest.raises(ValueError, match=r"block_k 512 .* must be 256 at most for exact sums"):
        error(q, 5, tile=tile(block_k=512))
    assert error(q, 5, tile=tile(block_k=256)) < BAR


def test_accumulation_in_the_tensor_core_takes_the_same_operands():
    q = jmoe.quantize(jax.random.normal(jax.random.key(0), (64, 256)), "mxfp4_a8")
    assert error(q, 16, tile=tile(), exact=False) < BAR


@pytest.mark.parametrize(
    "exponents, k, steps",
    [(13, 520, {}), (40, 520, {"split_k": 3}), (40, 384, {"block_k": 256})],
    ids=["13", "40 in shares", "40 in long steps"],
)
def test_rows_whose_exponents_e4m3_does_not_hold(exponents, k, steps):
    """Passes go over K in steps of 128, of which a longer step at its end has one too many."""
    w = cases.of_wide_range(jax.random.key(0), (70, k), exponents)
    q = jmoe.quantize(w, "mxfp4_a8")
    # Large where weights are small, so that each group counts.
    x = jax.random.normal(jax.random.key(1), (5, k)) / jnp.abs(w).max(axis=0)
    assert error(q, 5, tile=tile(**steps), x=x.astype(jnp.bfloat16)) < BAR


def test_b07_scales_of_any_byte():
    # One weight of 1 a group; x picks the group, so results are the scales: 2**(byte - 127), and 255 makes NaN.
    scale = jnp.array([[1, 2, 100, 127], [130, 133, 254, 140], [255, 127, 127, 127], [0, 127, 127, 127]], jnp.uint8)
    data = jnp.zeros((4, 64), jnp.uint8).at[:, ::16].set(2)
    recipe = jmoe.recipe("mxfp4")
    q = jmoe.QTensor.make(data, scale, scheme=recipe.weight)
    x = jnp.zeros((4, 128), jnp.bfloat16).at[jnp.arange(4), 32 * jnp.arange(4)].set(1)
    y = linear(x, cases.packed(q), packing=cases.packing_of(q), tile=tile(), out_dtype=jnp.float32, interpret=True)
    exponent = np.asarray(scale.astype(jnp.int32)) - 127
    np.testing.assert_array_equal(y[:, 1], np.ldexp(1.0, exponent[1]).astype(np.float32))
    np.testing.assert_array_equal(y[:, 0], np.ldexp(1.0, exponent[0]).astype(np.float32))
    assert np.isnan(y[:, 2]).all()
    assert y[1:, 3].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("recipe", ["nvfp4_w4a16", "int4:group=32", "mxfp4_a8", "int4_int8"])
def test_a_nan_weight_makes_its_own_column_nan_and_a_nan_token_its_own_row(recipe):
    w = jax.random.normal(jax.random.key(0), (70, 160)).at[3, 100].set(jnp.nan)
    q = jmoe.quantize(w, recipe)
    x = jax.random.normal(jax.random.key(1), (5, 160), jnp.bfloat16).at[2, 7].set(jnp.nan)
    codes, scale = quantized(x, q)
    y = linear(codes, cases.packed(q), packing=cases.packing_of(q), x_scale=scale, tile=tile(), interpret=True)
    nan = np.zeros((5, 70), bool)
    nan[2], nan[:, 3] = True, True
    np.testing.assert_array_equal(np.isnan(y), nan)


def test_extents_of_zero_and_operands_that_do_not_fit():
    q = jmoe.quantize(jax.random.normal(jax.random.key(0), (70, 160)), "mxfp4")
    arguments = {"packing": cases.packing_of(q), "tile": tile(), "interpret": True}
    w = cases.packed(q)
    assert linear(jnp.zeros((0, 160), jnp.bfloat16), w, **arguments).shape == (0, 70)
    with pytest.raises(TypeError, match="x is float16, but e2m1 weights packed for bfloat16 operands go with bfloat16"):
        linear(jnp.zeros((4, 160), jnp.float16), w, **arguments)
    with pytest.raises(ValueError, match=r"x has shape \(4, 161\), but it is \(M, K\) with K = 160"):
        linear(jnp.zeros((4, 161), jnp.bfloat16), w, **arguments)
    with pytest.raises(ValueError, match=r"bias has shape \(1, 71\)"):
        linear(jnp.zeros((4, 160), jnp.bfloat16), w, bias=jnp.zeros(71), **arguments)
    # B05: scales of another kind are no words.
    with pytest.raises(ValueError, match=r"w.scale has shape \(1, 70, 5\)"):
        linear(jnp.zeros((4, 160), jnp.bfloat16), w._replace(scale=q.scale), **arguments)
