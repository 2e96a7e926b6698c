"""Derivatives of the operations: those of the float32 weight-only formula, quantised activations counting as identity.

The oracle is the formula written densely below, in plain jnp with dequantized weights, and JAX's own derivatives of it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.backends import xla
from jmoe.backends.activation import ActivationParams
from jmoe.qtensor import QTensor

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 9, 4, 2, 20, 12
COUNTS = np.array([9, 0, 4, 1])
IMPLEMENTATIONS = ("xla", "reference")


def normal(seed, *shape, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


X = normal(0, TOKENS, HIDDEN)
W13 = normal(1, EXPERTS, 2, INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5)
W2 = normal(2, EXPERTS, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5)
WEIGHTS = np.random.default_rng(3).uniform(0.1, 1.0, (TOKENS, TOP_K)).astype(np.float32)
IDS = np.random.default_rng(4).integers(-1, EXPERTS, (TOKENS, TOP_K))
IDS[2] = 3, 3  # one expert twice in a token
B13 = normal(5, EXPERTS, 2, INTERMEDIATE)
B2 = normal(6, EXPERTS, HIDDEN)
TARGET = normal(7, TOKENS, HIDDEN)


def error(y, expected):
    y, expected = (np.asarray(a, np.float64) for a in (y, expected))
    return np.linalg.norm(y - expected) / max(np.linalg.norm(expected), 1e-30)


def assert_same(got, expected, limit=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert error(ours, theirs) <= limit


def values(w):
    return w.dequantize() if isinstance(w, QTensor) else w


def dense_expert(x, w13, w2, b13, b2, alpha=1.0):
    gate, up = x @ w13[0].T + b13[0], x @ w13[1].T + b13[1]
    return gate * jax.nn.sigmoid(alpha * gate) * up @ w2.T + b2


def dense_moe(x, w13, w2, weights, b13, b2, ids=IDS, alpha=(1.0,) * EXPERTS):
    total = 0
    for e in range(EXPERTS):
        share = jnp.sum(jnp.where(ids == e, weights, 0), axis=1, keepdims=True)
        total += share * dense_expert(x, values(w13)[e], values(w2)[e], b13[e], b2[e], alpha[e])
    return total


def dense_batched(x, w13, w2, b13, b2):
    valid = np.arange(TOKENS) < COUNTS[:, None]
    y = [dense_expert(x[e], values(w13)[e], values(w2)[e], b13[e], b2[e]) for e in range(EXPERTS)]
    return jnp.where(valid[..., None], jnp.stack(y), 0)


def dense_linear(x, w, bias):
    return jax.nn.silu(x @ values(w).T + bias)


def loss(y):
    # Linear, so that its slope is the same whether or not activations were quantised on the way to y.
    return jnp.sum(y.astype(jnp.float32) * TARGET)


def moe(implementation, x, w13, w2, weights, b13, b2, **options):
    return jmoe.fused_moe(x, w13, w2, weights, IDS, b13=b13, b2=b2, implementation=implementation, **options)


def batched(implementation, x, w13, w2, b13, b2):
    return jmoe.batched_experts(x, COUNTS, w13, w2, b13=b13, b2=b2, implementation=implementation)


def linear(implementation, x, w, bias):
    return jmoe.linear(x, w, bias=bias, activation="silu", implementation=implementation)


def all_gradients(moe, batched, linear, w13, w2):
    """Of three operations, with respect to everything that is not quantized."""
    rows = np.stack([X * (e + 1) for e in range(EXPERTS)])
    first = jax.tree.map(lambda leaf: leaf[0, 0], w13)
    bias = B13[0, 0]

    def of(fn, *args):
        wanted = tuple(i for i, a in enumerate(args) if not isinstance(a, QTensor))
        return jax.grad(lambda *a: loss(fn(*a)), argnums=wanted)(*args)

    return (
        of(moe, X, w13, w2, WEIGHTS, B13, B2),
        of(batched, rows, w13, w2, B13, B2),
        of(lambda *a: linear(*a)[:, :1] * X, X, first, bias),
    )


@functools.cache
def oracle(recipe):
    return jax.jit(functools.partial(all_gradients, dense_moe, dense_batched, dense_linear))(*weights(recipe))


@functools.cache
def weights(recipe):
    return (W13, W2) if recipe == "bf16" else (jmoe.quantize(W13, recipe), jmoe.quantize(W2, recipe))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("recipe", ["bf16", "int4_fp8:group=8", "fp8_tensor", "nvfp4_per_token"])
def test_reverse_mode(recipe, implementation):
    ops = (functools.partial(fn, implementation) for fn in (moe, batched, linear))
    got = jax.jit(functools.partial(all_gradients, *ops))(*weights(recipe))
    assert_same(got, oracle(recipe))


def test_static_schemes_count_as_the_identity_too():
    w13, w2 = jmoe.quantize(W13, "nvfp4"), jmoe.quantize(W2, "nvfp4")
    scales = {"input_scale": 0.002, "intermediate_scale": np.full(EXPERTS, 0.002, np.float32)}
    expected = jax.grad(lambda x: loss(dense_moe(x, w13, w2, WEIGHTS, B13, B2)))(X)
    for implementation in IMPLEMENTATIONS:
        got = jax.jit(jax.grad(lambda x, i=implementation: loss(moe(i, x, w13, w2, WEIGHTS, B13, B2, **scales))))(X)
        assert error(got, expected) <= 1e-5


@pytest.mark.parametrize("recipe", ["fp8_block:block=8", "int4:group=8"])
def test_16_bit_operands(recipe):
    # What a Hopper computes: the forward rounds h and its operands to 16 bits, the backward its cotangents too.
    w13, w2 = weights(recipe)
    with jmoe.config(device="h100"):
        got = jax.jit(jax.grad(lambda x: loss(moe("xla", x, w13, w2, WEIGHTS, B13, B2))))(X.astype(jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    expected = jax.grad(lambda x: loss(dense_moe(x, w13, w2, WEIGHTS, B13, B2)))(X)
    assert error(got, expected) <= 3e-2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_forward_mode(implementation):
    w13, w2 = weights("int4_fp8:group=8")
    args = (X, WEIGHTS, B13, B2)
    direction = tuple(normal(20 + i, *a.shape) for i, a in enumerate(args))

    def of(fn):
        return jax.jit(lambda d: jax.jvp(lambda x, weights, b13, b2: fn(x, w13, w2, weights, b13, b2), args, d)[1])

    assert error(of(functools.partial(moe, implementation))(direction), of(dense_moe)(direction)) <= 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_second_order(implementation):
    w13, w2 = weights("int4_fp8:group=8")

    def curvature(fn):
        gradient = jax.grad(lambda x: loss(fn(x, w13, w2, WEIGHTS, B13, B2)))
        return jax.jit(jax.grad(lambda x: jnp.sum(gradient(x) * TARGET)))(X)

    assert error(curvature(functools.partial(moe, implementation)), curvature(dense_moe)) <= 1e-4


def test_vmap_of_grad_and_grad_of_vmap():
    w13, w2 = weights("int4_fp8:group=8")
    xs = np.stack([X, -X, 2 * X])

    def one(fn):
        return lambda x: loss(fn(x, w13, w2, WEIGHTS, B13, B2))

    expected = jax.jit(jax.vmap(jax.grad(one(dense_moe))))(xs)
    ours = one(functools.partial(moe, "xla"))
    assert error(jax.jit(jax.vmap(jax.grad(ours)))(xs), expected) <= 1e-5
    assert error(jax.jit(jax.grad(lambda xs: jnp.sum(jax.vmap(ours)(xs))))(xs), expected) <= 1e-5


def test_under_checkpoint_and_scan():
    w13, w2 = weights("int4:group=8")

    def twice(fn):
        step = jax.checkpoint(lambda x, _: (fn(x, w13, w2, WEIGHTS, B13, B2), None))
        return jax.jit(jax.grad(lambda x: loss(jax.lax.scan(step, x, None, length=2)[0])))(X)

    assert error(twice(functools.partial(moe, "xla")), twice(dense_moe)) <= 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_quantized_weights_get_none(implementation):
    for recipe in ("int4_fp8:group=8", "fp8_tensor"):
        w13, w2 = weights(recipe)

        def of_weights(w13, w2=w2):
            return loss(moe(implementation, X, w13, w2, WEIGHTS, B13, B2))

        gradient = jax.jit(jax.grad(of_weights, allow_int=True))(w13)
        assert gradient.scheme == w13.scheme
        integers = jnp.issubdtype(w13.data.dtype, jnp.integer)
        assert gradient.data.dtype == (jax.dtypes.float0 if integers else w13.data.dtype)
        if not integers:
            assert not np.any(np.asarray(gradient.data, np.float32))
        assert not np.any(gradient.scale)


def test_a_tree_of_parameters_with_integer_leaves_can_be_differentiated():
    w13, w2 = weights("int4_fp8:group=8")
    tree = {"experts": {"w13": w13, "w2": w2}, "b13": B13, "step": np.int32(3)}

    def of(tree):
        return loss(moe("xla", X, tree["experts"]["w13"], tree["experts"]["w2"], WEIGHTS, tree["b13"], B2))

    gradient = jax.jit(jax.grad(of, allow_int=True))(tree)
    expected = jax.grad(lambda b13: loss(dense_moe(X, w13, w2, WEIGHTS, b13, B2)))(B13)
    assert error(gradient["b13"], expected) <= 1e-5
    assert gradient["step"].dtype == gradient["experts"]["w13"].data.dtype == jax.dtypes.float0


def test_a_quantized_x_gets_none_and_the_others_theirs():
    w13, w2 = weights("fp8_tensor")
    codes = jmoe.quantize(X, w13.input_scheme)

    def of(weights):
        y = jmoe.fused_moe(codes, w13, w2, weights, IDS, preferred_element_type="float32", implementation="xla")
        return loss(y)

    zero13, zero2 = np.zeros_like(B13), np.zeros_like(B2)
    expected = jax.grad(lambda weights: loss(dense_moe(codes.dequantize(), w13, w2, weights, zero13, zero2)))(WEIGHTS)
    assert error(jax.jit(jax.grad(of))(WEIGHTS), expected) <= 1e-5


def _alone(index, a):
    """True for that entry of a's leading axis."""
    return np.arange(len(a)).reshape(-1, *[1] * (a.ndim - 1)) == index


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_where_nothing_reads_leaves_gradients_finite(implementation):
    # The weight of a slot without expert, a token without one, an expert without tokens, and rows beyond counts.
    ids = np.where(IDS == 1, 0, IDS)
    ids[4] = -1
    weights = np.where(ids < 0, np.float32(np.nan), WEIGHTS)
    w13, w2, b13, b2 = (np.where(_alone(1, w), np.float32(np.nan), w) for w in (W13, W2, B13, B2))
    x = np.where(_alone(4, X), np.float32(np.nan), X)

    def ours(*args):
        x, w13, w2, weights, b13, b2 = args
        return loss(jmoe.fused_moe(x, w13, w2, weights, ids, b13=b13, b2=b2, implementation=implementation))

    got = jax.jit(jax.grad(ours, argnums=range(6)))(x, w13, w2, weights, b13, b2)
    dense = jax.grad(lambda *a: loss(dense_moe(*a, ids=ids)), argnums=range(6))
    assert_same(got, jax.jit(dense)(X, W13, W2, WEIGHTS, B13, B2))

    rows = np.stack([X] * EXPERTS)
    invalid = np.arange(TOKENS) >= COUNTS[:, None]
    rows[invalid] = np.nan
    got = jax.jit(jax.grad(lambda *a: loss(batched(implementation, *a)), argnums=range(5)))(rows, W13, W2, B13, B2)
    assert all(np.all(np.isfinite(g)) for g in got)
    assert not np.any(np.asarray(got[0])[invalid])


def test_weight_on_input():
    weights, ids = WEIGHTS[:, :1], np.maximum(IDS[:, :1], 0)

    def ours(x, weights):
        y = jmoe.fused_moe(x, W13, W2, weights, ids, weight_on_input=True, implementation="xla")
        return loss(y)

    def dense(x, weights):
        return loss(dense_moe(x * weights, W13, W2, np.ones_like(WEIGHTS[:, :1]), 0 * B13, 0 * B2, ids=ids))

    assert_same(jax.jit(jax.grad(ours, argnums=(0, 1)))(X, weights), jax.grad(dense, argnums=(0, 1))(X, weights))


def test_constants_of_each_expert():
    alpha = np.float32([1.0, 1.7, 0.5, 2.0])
    got = jax.jit(
        jax.grad(lambda a: loss(moe("xla", X, W13, W2, WEIGHTS, B13, B2, activation_params=ActivationParams(alpha=a))))
    )(alpha)
    expected = jax.grad(lambda a: loss(dense_moe(X, W13, W2, WEIGHTS, B13, B2, alpha=a)))(alpha)
    assert error(got, expected) <= 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_stacked_plain_weights_get_the_gradient_of_their_layer(implementation):
    stacked = [np.stack([0 * a, a, 2 * a]) for a in (W13, W2, B13, B2)]
    got = jax.jit(
        jax.grad(lambda w13, w2, b13, b2: loss(moe(implementation, X, w13, w2, WEIGHTS, b13, b2, layer=1)), range(4))
    )(*stacked)
    expected = oracle("bf16")[0]
    for ours, theirs in zip(got, (expected[1], expected[2], expected[4], expected[5]), strict=True):
        assert error(ours[1], theirs) <= 1e-5
        assert not np.any(ours[0]) and not np.any(ours[2])


@pytest.mark.parametrize("layer", [None, 1])
def test_a_linear_in_pieces(layer, monkeypatch):
    w = jmoe.quantize(normal(8, *(() if layer is None else (2,)), 300, HIDDEN), "fp8_channel")
    monkeypatch.setattr(xla, "_PIECE_BYTES", 128 * HIDDEN * 4)

    target = normal(9, TOKENS, 300)

    def ours(x):
        return jnp.sum(jmoe.linear(x, w, layer=layer, implementation="xla") * target)

    assert dict(jmoe.explain(ours, X).entries[0][1].tiles)["features"] == 128
    dense = w.dequantize() if layer is None else w.dequantize()[layer]
    assert error(jax.jit(jax.grad(ours))(X), target @ dense) <= 1e-5


def products(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("= dot_general")


def test_what_nobody_differentiates_costs_no_products():
    def of(*args):
        return loss(moe("xla", *args))

    args = (X, W13, W2, WEIGHTS, B13, B2)
    forward = products(of, *args)
    assert forward == 2  # in the body of the one loop
    everything = products(jax.grad(of, argnums=range(6)), *args)
    assert products(jax.grad(of, argnums=(0, 3, 4, 5)), *args) == everything - 2  # no product for a weight's gradient
    # A function of x of which another argument is differentiated pays for the forward alone.
    assert products(jax.grad(lambda z, *a: of(*a) * z), 1.0, *args) == forward
