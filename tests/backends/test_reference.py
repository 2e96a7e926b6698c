"""The reference against the definition written once more: NumPy, float64, one token and one slot at a time.

Only the quantisers are shared; they have tests of their own.
"""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmoe
from jmoe.backends import reference
from jmoe.backends.activation import ActivationParams
from jmoe.qtensor import QTensor
from pallas_kernels import bits

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE, LAYERS = 6, 2, 3, 40, 24, 2


dequantize = jax.jit(QTensor.dequantize)


def f64(a):
    return np.asarray(dequantize(a) if isinstance(a, QTensor) else a).astype(np.float64)


def quantised(rows, w, scale=None):
    """``rows`` (S, K) as the weight ``w`` asks for them; ``scale`` is () or (S, 1)."""
    scheme = w.input_scheme if isinstance(w, QTensor) else None
    if scheme is None:
        return rows
    scale = jnp.asarray(scale, jnp.float32) if scheme.static else None
    return f64(jmoe.quantize(jnp.asarray(rows, jnp.float32), scheme, scale=scale))


def rounded(values, dtype):
    return values if dtype == jnp.float32 else values.astype(dtype).astype(np.float64)


def silu(x, alpha=1.0):
    return x / (1 + np.exp(-alpha * x))


FORMULAS = {
    "silu": lambda g, u: silu(g) * u,
    "swigluoai": lambda g, u: silu(np.minimum(g, 7), 1.702) * (np.clip(u, -7, 7) + 1),
    "swiglu:limit=0.5": lambda g, u: silu(np.minimum(g, 0.5)) * np.clip(u, -0.5, 0.5),
    "swiglustep:limit=0.5": lambda g, u: np.minimum(silu(g), 0.5) * np.clip(u, -0.5, 0.5),
    "gelu": lambda g, u: g * 0.5 * (1 + np.vectorize(math.erf)(g / math.sqrt(2))) * u,
    "gelu_tanh": lambda g, u: g * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
    "ungated silu": silu,
    "ungated gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "ungated relu2": lambda x: np.maximum(x, 0) ** 2,
}


def numpy_moe(
    x,
    w13,
    w2,
    topk_weights,
    topk_ids,
    *,
    formula=FORMULAS["silu"],
    b13=None,
    b2=None,
    input_scale=None,
    intermediate_scale=None,
    weight_on_input=False,
    expert_map=None,
    h_dtype=None,
):
    """The sum over slots, float64 (T, H)."""
    experts, _, intermediate, hidden = w13.shape
    tokens, k = topk_ids.shape
    h_dtype = x.dtype if h_dtype is None else h_dtype
    w13_values, w2_values = f64(w13), f64(w2)
    input_scales, intermediate_scales = (
        None if s is None else np.broadcast_to(np.asarray(s), experts) for s in (input_scale, intermediate_scale)
    )

    def expert_of(t, j):
        e = int(topk_ids[t, j])
        if expert_map is not None:
            e = int(expert_map[e]) if 0 <= e < len(expert_map) else -1
        return e if 0 <= e < experts else None

    @functools.cache
    def inputs(e):
        rows = f64(x)
        if not isinstance(x, QTensor):  # what goes to no expert does not count where a scale is measured
            chosen = [any(expert_of(t, j) is not None for j in range(k)) for t in range(tokens)]
            rows = np.where(np.array(chosen)[:, None], rows, 0)
        if weight_on_input:
            factors = [topk_weights[t, 0] if expert_of(t, 0) is not None else 1 for t in range(tokens)]
            rows = rounded(rows * np.array(factors, np.float64)[:, None], x.dtype)
        if isinstance(x, QTensor):
            return rows
        return quantised(rows, w13, None if input_scales is None else input_scales[e])

    h = np.zeros((tokens, k, intermediate))
    for t in range(tokens):
        for j in range(k):
            if (e := expert_of(t, j)) is not None:
                products = [half @ inputs(e)[t] for half in w13_values[e]]
                if b13 is not None:
                    products = [p + b for p, b in zip(products, f64(b13)[e], strict=True)]
                h[t, j] = formula(*products)
    scale = None
    if intermediate_scales is not None:
        scale = [[intermediate_scales[expert_of(t, j) or 0]] for t in range(tokens) for j in range(k)]
    h = quantised(rounded(h, h_dtype).reshape(tokens * k, intermediate), w2, scale).reshape(h.shape)

    y = np.zeros((tokens, hidden))
    for t in range(tokens):
        for j in range(k):
            if (e := expert_of(t, j)) is not None:
                out = w2_values[e] @ h[t, j]
                if b2 is not None:
                    out = out + f64(b2)[e]
                y[t] += out * (1 if weight_on_input else float(topk_weights[t, j]))
    return y


def error(got, expected):
    """Relative Frobenius error."""
    return np.linalg.norm(f64(got) - expected) / np.linalg.norm(expected)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@functools.cache
def weights(recipe="bf16", halves=2, lead=(EXPERTS,)):
    w13 = normal(1, *lead, halves, INTERMEDIATE, HIDDEN) / math.sqrt(HIDDEN)
    w2 = normal(2, *lead, HIDDEN, INTERMEDIATE) / math.sqrt(INTERMEDIATE)
    return (w13, w2) if recipe == "bf16" else (jmoe.quantize(w13, recipe), jmoe.quantize(w2, recipe))


X = normal(0, TOKENS, HIDDEN)
# No expert (with NaN weight), an id out of range, one twice, and the rest.
IDS = np.array([[0, 1], [2, -1], [1, 1], [0, 3], [-1, -1], [2, 0]], np.int32)
WEIGHTS = np.array([[0.5, 0.25], [1.5, np.nan], [0.5, 0.75], [1, 2], [np.nan, 3], [-0.5, 0.125]], np.float32)

RECIPES = [
    "bf16",
    "fp8_tensor",
    "fp8_channel",
    "fp8_block:block=16",
    "fp8_w8a16:block=16",
    "mxfp8",
    "mxfp4",
    "mxfp4_a8",
    "mxfp4_a4",
    "nvfp4_per_token",
    "nvfp4_w4a16",
    "int8",
    "int4:group=16,zero_point",
    "int4_int8:group=16",
]


def moe(*args, **options):
    return jmoe.fused_moe(*args, implementation="reference", **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe):
    w13, w2 = weights(recipe)
    assert error(moe(X, w13, w2, WEIGHTS, IDS), numpy_moe(X, w13, w2, WEIGHTS, IDS)) < 1e-5


@pytest.mark.parametrize("recipe, dtype", [("bf16", jnp.bfloat16), ("bf16", jnp.float16), ("int8", jnp.bfloat16)])
def test_the_intermediate_is_rounded_to_the_dtype_of_x(recipe, dtype):
    w13, w2 = weights(recipe)
    x = X.astype(dtype)
    got = moe(x, w13, w2, WEIGHTS, IDS, preferred_element_type=jnp.float32)
    assert got.dtype == jnp.float32
    assert error(got, numpy_moe(x, w13, w2, WEIGHTS, IDS)) < 1e-5
    assert error(got, numpy_moe(x, w13, w2, WEIGHTS, IDS, h_dtype=jnp.float32)) > 1e-5


def test_the_result_has_the_dtype_of_x_and_is_rounded_once():
    w13, w2 = weights()
    x = X.astype(jnp.bfloat16)
    got = moe(x, w13, w2, WEIGHTS, IDS)
    wide = moe(x, w13, w2, WEIGHTS, IDS, preferred_element_type=jnp.float32)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("name", [n for n in FORMULAS if not n.startswith("ungated")])
@pytest.mark.parametrize("biased", [False, True])
def test_gated_activations_and_biases(name, biased):
    w13, w2 = weights()
    biases = {"b13": normal(3, EXPERTS, 2, INTERMEDIATE), "b2": normal(4, EXPERTS, HIDDEN)} if biased else {}
    got = moe(X, w13, w2, WEIGHTS, IDS, activation=name, **biases)
    assert error(got, numpy_moe(X, w13, w2, WEIGHTS, IDS, formula=FORMULAS[name], **biases)) < 1e-5


@pytest.mark.parametrize("name, recipe", [("silu", "fp8_channel"), ("gelu", "bf16"), ("relu2", "bf16")])
def test_ungated_activations_have_one_half(name, recipe):
    w13, w2 = weights(recipe, halves=1)
    b13 = normal(3, EXPERTS, 1, INTERMEDIATE, dtype=jnp.bfloat16)
    got = moe(X, w13, w2, WEIGHTS, IDS, activation=name, b13=b13)
    assert error(got, numpy_moe(X, w13, w2, WEIGHTS, IDS, formula=FORMULAS[f"ungated {name}"], b13=b13)) < 1e-5


def test_constants_of_each_expert():
    w13, w2 = weights()
    alpha, limit = np.array([1, 2, 0.5]), np.array([np.inf, 0.5, 0.25])
    got = moe(X, w13, w2, WEIGHTS, IDS, activation_params=ActivationParams(alpha=alpha, limit=limit))
    expected = np.zeros((TOKENS, HIDDEN))
    for e in range(EXPERTS):

        def formula(g, u, a=alpha[e], top=limit[e]):
            return silu(np.minimum(g, top), a) * np.clip(u, -top, top)

        only = np.where(e == IDS, IDS, -1)
        expected += numpy_moe(X, w13, w2, WEIGHTS, only, formula=formula)
    assert error(got, expected) < 1e-5


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor", "int8"])
def test_weight_on_input_multiplies_before_quantisation(recipe):
    w13, w2 = weights(recipe)
    x, ids, wts = X.astype(jnp.bfloat16), IDS[:, :1], WEIGHTS[:, :1]
    got = moe(x, w13, w2, wts, ids, weight_on_input=True, preferred_element_type=jnp.float32)
    assert error(got, numpy_moe(x, w13, w2, wts, ids, weight_on_input=True)) < 1e-5


def test_g01_the_sentinel_of_an_expert_map_is_not_the_last_expert():
    """Global experts 2 and 3 are here: .4 of the first of them is all that [0, 2] gives."""
    w13, w2 = (w[:2] for w in weights())
    got = moe(X[:1], w13, w2, np.array([[0.6, 0.4]]), [[0, 2]], expert_map=np.array([-1, -1, 0, 1]))
    alone = moe(X[:1], w13, w2, np.array([[0.4]]), [[0]])
    np.testing.assert_allclose(got, alone, rtol=1e-5, atol=1e-6)


def test_expert_maps_of_every_kind():
    """Two global experts on one slot (replicas), one elsewhere, and ids beyond the map or below it."""
    w13, w2 = weights("fp8_channel")
    expert_map = np.array([2, -1, 0, 2, 1], np.int32)
    ids = np.array([[0, 3], [1, 2], [4, 5], [-1, 2], [-7, 0], [100, 4]], np.int32)
    wts = np.nan_to_num(WEIGHTS, nan=0.5)
    got = moe(X, w13, w2, wts, ids, expert_map=expert_map)
    assert error(got, numpy_moe(X, w13, w2, wts, ids, expert_map=expert_map)) < 1e-5


def test_the_weight_of_no_expert_is_ignored_even_nan():
    w13, w2 = weights()
    y = moe(X, w13, w2, WEIGHTS, IDS)
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(y[4], np.zeros(HIDDEN))  # its ids are -1 and -1
    np.testing.assert_array_equal(y, moe(X, w13, w2, np.nan_to_num(WEIGHTS, nan=7), IDS))


def test_an_expert_chosen_twice_counts_twice():
    w13, w2 = weights()
    twice = moe(X[2:3], w13, w2, [[0.5, 0.75]], [[1, 1]])
    np.testing.assert_allclose(twice, moe(X[2:3], w13, w2, [[1.25]], [[1]]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", ["fp8_tensor_static", "nvfp4"])
@pytest.mark.parametrize(
    "input_scale, intermediate_scale",
    [
        (0.02, 0.01),
        (0.02, [0.01, 0.002, 0.03]),
        ([0.02, 0.005, 0.01], 0.01),
        ([0.02, 0.005, 0.01], [0.01, 0.002, 0.03]),
    ],
)
def test_static_scales_for_all_experts_or_one_each(recipe, input_scale, intermediate_scale):
    w13, w2 = weights(recipe)
    scales = {"input_scale": input_scale, "intermediate_scale": intermediate_scale}
    if recipe == "nvfp4":  # a global multiplier, under block scales of up to 448
        scales = {name: np.asarray(scale) / 100 for name, scale in scales.items()}
    assert error(moe(X, w13, w2, WEIGHTS, IDS, **scales), numpy_moe(X, w13, w2, WEIGHTS, IDS, **scales)) < 1e-5


@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_block:block=16", "int8"])
def test_x_may_come_quantized(recipe):
    w13, w2 = weights(recipe)
    x = jmoe.quantize(X, w13.input_scheme)
    got = moe(x, w13, w2, WEIGHTS, IDS, preferred_element_type=jnp.float32)
    assert error(got, numpy_moe(x, w13, w2, WEIGHTS, IDS, h_dtype=jnp.float32)) < 1e-5
    np.testing.assert_array_equal(got, moe(X, w13, w2, WEIGHTS, IDS))


def test_a_quantized_x_gives_bfloat16_unless_told():
    w13, w2 = weights("fp8_channel")
    got = moe(jmoe.quantize(X, w13.input_scheme), w13, w2, WEIGHTS, IDS)
    assert got.dtype == jnp.bfloat16


def test_a_quantized_x_with_a_static_scheme_has_its_scale_in_it():
    w13, w2 = weights("fp8_tensor_static")
    x = jmoe.quantize(X, w13.input_scheme, scale=0.02)
    got = moe(x, w13, w2, WEIGHTS, IDS, intermediate_scale=0.01, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(got, moe(X, w13, w2, WEIGHTS, IDS, input_scale=0.02, intermediate_scale=0.01))


@pytest.mark.parametrize("recipe", ["fp8_block:block=16", "nvfp4_w4a16", "int4:group=16,zero_point"])
def test_stacked_layers_are_indexed(recipe):
    w13, w2 = weights(recipe, lead=(LAYERS, EXPERTS))
    b13, b2 = normal(3, LAYERS, EXPERTS, 2, INTERMEDIATE), normal(4, LAYERS, EXPERTS, HIDDEN)
    for layer in range(LAYERS):
        one = [jax.tree.map(lambda leaf, i=layer: leaf[i], w) for w in (w13, w2)]
        got = moe(X, w13, w2, WEIGHTS, IDS, b13=b13, b2=b2, layer=layer)
        expected = numpy_moe(X, *one, WEIGHTS, IDS, b13=b13[layer], b2=b2[layer])
        assert error(got, expected) < 1e-5


def test_the_two_products_may_have_different_recipes():
    w13, _ = weights("int4:group=16,zero_point")
    _, w2 = weights("fp8_channel")
    assert error(moe(X, w13, w2, WEIGHTS, IDS), numpy_moe(X, w13, w2, WEIGHTS, IDS)) < 1e-5


def test_a_recipe_for_one_call_replaces_the_input_scheme_of_both_weights():
    w13, w2 = weights("fp8_channel")
    got = moe(X, w13, w2, WEIGHTS, IDS, recipe=jmoe.Recipe(name="w8a16", weight=w13.scheme))
    plain = [w.with_input_scheme(None) for w in (w13, w2)]
    assert error(got, numpy_moe(X, *plain, WEIGHTS, IDS)) < 1e-5


def test_leading_axes_of_x_are_tokens():
    w13, w2 = weights("fp8_block:block=16")
    got = moe(X.reshape(2, 3, HIDDEN), w13, w2, WEIGHTS.reshape(2, 3, TOP_K), IDS.reshape(2, 3, TOP_K))
    np.testing.assert_array_equal(got.reshape(TOKENS, HIDDEN), moe(X, w13, w2, WEIGHTS, IDS))
    one = moe(X[0], w13, w2, WEIGHTS[0], IDS[0])
    np.testing.assert_allclose(one, got[0, 0], rtol=1e-5, atol=1e-6)


COUNTS = np.array([2, 0, 4], np.int32)


def as_slots(x, counts):
    """Rows of experts as tokens with one slot each, rows beyond the count as zeros without an expert."""
    experts, rows, hidden = x.shape
    valid = np.arange(rows) < np.asarray(counts)[:, None]
    ids = np.where(valid, np.arange(experts)[:, None], -1)
    return jnp.where(valid[..., None], x, 0).reshape(-1, hidden), ids.reshape(-1, 1)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor", "fp8_block:block=16", "nvfp4_per_token", "int8"])
def test_batched_experts_are_slots_in_order(recipe):
    w13, w2 = weights(recipe)
    x = normal(5, EXPERTS, 4, HIDDEN)
    x = jnp.where(jnp.arange(4)[None, :, None] < COUNTS[:, None, None], x, jnp.nan)  # h06: pads may be anything
    got = jmoe.batched_experts(x, COUNTS, w13, w2, implementation="reference")
    rows, ids = as_slots(x, COUNTS)
    expected = numpy_moe(rows, w13, w2, np.ones(ids.shape), ids)
    assert got.shape == (EXPERTS, 4, HIDDEN)
    assert error(got.reshape(-1, HIDDEN), expected) < 1e-5
    np.testing.assert_array_equal(got[1], np.zeros((4, HIDDEN)))


def test_batched_experts_with_every_option():
    w13, w2 = weights("fp8_tensor_static", lead=(LAYERS, EXPERTS))
    x = normal(5, EXPERTS, 4, HIDDEN)
    options = {"b13": normal(3, LAYERS, EXPERTS, 2, INTERMEDIATE), "b2": normal(4, LAYERS, EXPERTS, HIDDEN)}
    scales = {"input_scale": np.array([0.02, 0.005, 0.01]), "intermediate_scale": np.array([0.01, 0.002, 0.03])}
    got = jmoe.batched_experts(
        x, COUNTS, w13, w2, activation="swigluoai", layer=1, implementation="reference", **options, **scales
    )
    rows, ids = as_slots(x, COUNTS)
    one = [jax.tree.map(lambda leaf: leaf[1], w) for w in (w13, w2)]
    biases = {name: b[1] for name, b in options.items()}
    formula = FORMULAS["swigluoai"]
    expected = numpy_moe(rows, *one, np.ones(ids.shape), ids, formula=formula, **biases, **scales)
    # Rows beyond the counts are zero, biases and all.
    assert error(got.reshape(-1, HIDDEN), expected) < 1e-5


def test_batched_experts_take_a_quantized_x():
    w13, w2 = weights("fp8_channel")
    x = normal(5, EXPERTS, 4, HIDDEN)
    options = {"implementation": "reference", "preferred_element_type": jnp.float32}
    got = jmoe.batched_experts(jmoe.quantize(x, w13.input_scheme), COUNTS, w13, w2, **options)
    np.testing.assert_array_equal(got, jmoe.batched_experts(x, COUNTS, w13, w2, **options))


@pytest.mark.parametrize("recipe", [*RECIPES, "fp8_tensor_static", "nvfp4"])
def test_linear(recipe):
    w = normal(1, 24, HIDDEN) / math.sqrt(HIDDEN)
    w = w if recipe == "bf16" else jmoe.quantize(w, recipe)
    x, bias = X.astype(jnp.bfloat16), normal(3, 24, dtype=jnp.bfloat16)
    static = isinstance(w, QTensor) and w.input_scheme is not None and w.input_scheme.static
    scale = {"input_scale": 0.0002 if recipe == "nvfp4" else 0.02} if static else {}
    options = {"implementation": "reference", "preferred_element_type": jnp.float32, **scale}
    product = quantised(f64(x), w, *scale.values()) @ f64(w).T
    got = jmoe.linear(x, w, bias=bias, activation="silu", **options)
    assert error(got, silu(product + f64(bias))) < 1e-5


@pytest.mark.parametrize("name", ["gelu", "relu2"])
def test_linear_in_float32_with_an_activation(name):
    w = normal(1, 24, HIDDEN)
    got = jmoe.linear(X, w, activation=name, implementation="reference")
    assert error(got, FORMULAS[f"ungated {name}"](f64(X) @ f64(w).T)) < 1e-5


def test_linear_with_stacked_layers_and_leading_axes():
    w = jmoe.quantize(normal(1, LAYERS, 24, HIDDEN), "int4:group=16")
    bias = normal(3, LAYERS, 24)
    got = jmoe.linear(X.reshape(2, 3, HIDDEN), w, bias=bias, layer=1, implementation="reference")
    assert got.shape == (2, 3, 24)
    assert error(got.reshape(TOKENS, 24), f64(X) @ f64(w)[1].T + f64(bias)[1]) < 1e-5


def test_linear_of_one_vector():
    w = normal(1, 24, HIDDEN)
    got = jmoe.linear(X[0], w, implementation="reference")
    assert got.shape == (24,)
    assert error(got, f64(w) @ f64(X[0])) < 1e-5


def test_c12_the_bias_is_not_scaled():
    w = jmoe.quantize(jnp.zeros((3, 32), jnp.float32), "fp8_tensor_static")
    got = jmoe.linear(X[:, :32], w, bias=jnp.ones(3), input_scale=0.01, implementation="reference")
    np.testing.assert_array_equal(got, np.ones((TOKENS, 3)))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor", "fp8_block", "int8", "nvfp4_per_token", "mxfp4_a4"])
def test_a_non_finite_element_makes_its_own_row_nan_and_no_other(recipe):
    w13, w2 = weights(recipe)
    wts = np.nan_to_num(WEIGHTS, nan=0.5)
    for bad in (np.nan, np.inf, -np.inf):
        y = moe(X.at[2, 5].set(bad), w13, w2, wts, IDS)
        assert np.isnan(y[2]).all()
        assert np.isfinite(np.delete(y, 2, axis=0)).all()


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor", "fp8_block", "nvfp4_per_token"])
def test_h01_no_tokens_no_slots_and_no_experts_give_zeros_of_the_right_shape(recipe):
    w13, w2 = weights(recipe)
    assert moe(X[:0], w13, w2, WEIGHTS[:0], IDS[:0]).shape == (0, HIDDEN)
    np.testing.assert_array_equal(moe(X, w13, w2, WEIGHTS[:, :0], IDS[:, :0]), np.zeros(X.shape))
    none = [jax.tree.map(lambda leaf: leaf[:0], w) for w in (w13, w2)]
    np.testing.assert_array_equal(moe(X, *none, WEIGHTS, IDS), np.zeros(X.shape))  # a rank that holds none
    batched = jmoe.batched_experts(jnp.zeros((EXPERTS, 0, HIDDEN)), COUNTS, w13, w2, implementation="reference")
    assert batched.shape == (EXPERTS, 0, HIDDEN)
    empty = jmoe.batched_experts(jnp.zeros((0, 4, HIDDEN)), COUNTS[:0], *none, implementation="reference")
    assert empty.shape == (0, 4, HIDDEN)


def test_the_sum_over_slots_is_in_ascending_order():
    """1e8 + 1 - 1e8 is 0 in float32, and 1e8 - 1e8 + 1 is 1."""
    y = jnp.array([[[1e8], [1.0], [-1e8]], [[1e8], [-1e8], [1.0]]])
    ids = jnp.zeros((2, 3), jnp.int32)
    np.testing.assert_array_equal(reference.combine(y, jnp.ones((2, 3)), ids), [[0.0], [1.0]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounding_is_that_of_a_cast(dtype):
    values = np.array(
        [0, 1, 1 + 2**-8, 1 + 2**-9, 1 + 3 * 2**-9, -1.0009766, 3.14159274, 1e-3, 65519, 65520, 1e30, np.inf, np.nan]
        # float16's subnormals, ties to even among them: 2**-24 is the smallest, 2**-14 the first normal number
        + [2**-14, 2**-14 - 2**-25, 2**-15 + 2**-24, 2**-24, 2**-25, 3 * 2**-25, -5 * 2**-25, 1.1 * 2**-25, 1e-30],
        np.float32,
    )
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16 if dtype == jnp.float16 else ml_dtypes.bfloat16).astype(np.float32)
    name = jnp.dtype(dtype).name
    np.testing.assert_array_equal(bits.round_to(jnp.asarray(values), name), expected)
    np.testing.assert_array_equal(jax.jit(bits.round_to, static_argnums=1)(values, name), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounding_has_the_derivative_of_the_identity(dtype):
    x = jnp.array([1.2345678, 1e-6, -300.7], jnp.float32)
    tangent = jnp.array([0.1234567, 1e-9, 7.654321], jnp.float32)
    _, forward = jax.jvp(lambda v: bits.round_to(v, dtype), (x,), (tangent,))
    np.testing.assert_array_equal(forward, tangent)
    _, pullback = jax.vjp(lambda v: bits.round_to(v, dtype), x)
    np.testing.assert_array_equal(pullback(tangent)[0], tangent)
