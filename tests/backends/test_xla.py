"""The xla implementation against the reference.

The bars are relative Frobenius errors on the same quantized operands: dense 3e-3, experts 5e-3, or 8e-3 where h is FP8
(FP4 likewise: its codes are as coarse); 1e-5 in float32. There the two may still sum in another order, so a value of h
beside a rounding boundary may take the code next to it: that moves its own row only, and at most a row or two in a
hundred are let off to the coarser bar. The error to the unquantised float32 result is at most 1.05 times the
reference's plus 1e-3.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jmoe
from jmoe.backends import xla
from jmoe.backends.activation import ActivationParams

DENSE = 3e-3


def error(y, expected):
    y, expected = (np.asarray(a, np.float64) for a in (y, expected))
    return np.linalg.norm(y - expected) / max(np.linalg.norm(expected), 1e-30)


def bar(recipe, dtype):
    """The bar for experts."""
    scheme = jmoe.recipe(recipe).input
    if dtype == "float32" and scheme is None:
        return 1e-5
    return 8e-3 if scheme is not None and scheme.format in ("e4m3", "e2m1") else 5e-3


def check_experts(y, expected, recipe, dtype):
    y, expected = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (y, expected))
    assert error(y, expected) <= bar(recipe, dtype)
    if dtype == "float32":
        norm = np.maximum(np.linalg.norm(expected, axis=1), np.linalg.norm(expected) / max(len(expected), 1) ** 0.5)
        off = np.linalg.norm(y - expected, axis=1) > 1e-5 * np.maximum(norm, 1e-30)
        assert off.sum() <= 1 + len(expected) // 50


def quantized(w, recipe):
    return w if recipe == "bf16" else jmoe.quantize(w, recipe)


def is_static(recipe):
    scheme = jmoe.recipe(recipe).input
    return scheme is not None and scheme.static


def static_scales(recipe, experts):
    """Given scales of such activations as these tests have: within a few standard deviations of 0."""
    if not is_static(recipe):
        return {}
    unit = 4 / (448 * (6 if recipe == "nvfp4" else 1))
    each = unit * (1 + 0.1 * np.arange(experts, dtype=np.float32))
    return {"input_scale": np.float32(unit), "intermediate_scale": each}


@functools.cache
def problem(tokens, experts, k, hidden, intermediate, halves=2, seed=0):
    """x (T, H), w13, w2, weights, ids with -1 and experts named twice, b13, b2; NumPy float32 of order one."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    x = normal(tokens, hidden)
    w13 = normal(experts, halves, intermediate, hidden, scale=hidden**-0.5)
    w2 = normal(experts, hidden, intermediate, scale=intermediate**-0.5)
    weights = rng.uniform(0.1, 1.0, (tokens, k)).astype(np.float32)
    ids = rng.integers(-1, experts, (tokens, k)).astype(np.int32)
    return x, w13, w2, weights, ids, normal(experts, halves, intermediate), normal(experts, hidden)


def both(fn, *args):
    """``fn(implementation, *args)`` by xla and by the reference, each in one program."""
    return tuple(jax.jit(functools.partial(fn, name))(*args) for name in ("xla", "reference"))


SHAPE = (33, 5, 2, 150, 140)  # two ragged groups of 128 along both K


@functools.cache
def quantized_weights(recipe):
    _, w13, w2, *_ = problem(*SHAPE)
    return quantized(w13, recipe), quantized(w2, recipe)


@functools.cache
def reference_results(recipe, dtype):
    """Of a recipe, by the reference: linear, fused_moe and batched_experts."""
    return results(recipe, dtype, "reference")


def results(recipe, dtype, implementation, **options):
    x, _, _, weights, ids, b13, b2 = problem(*SHAPE)
    w13, w2 = quantized_weights(recipe)
    experts = SHAPE[1]
    scales = static_scales(recipe, experts)
    linear_scale = {"input_scale": scales["input_scale"]} if scales else {}
    x = x.astype(jnp.dtype(dtype))
    counts = np.array([0, 33, 16, 1, 20])
    rows = np.stack([np.roll(x, e, axis=0) for e in range(experts)])

    @jax.jit
    def run(x, w13, w2):
        first = jax.tree.map(lambda leaf: leaf[0, 0], w13)
        y = jmoe.linear(x, first, bias=b13[0, 0], implementation=implementation, **linear_scale)
        z = jmoe.fused_moe(x, w13, w2, weights, ids, b13=b13, b2=b2, implementation=implementation, **scales)
        b = jmoe.batched_experts(rows, counts, w13, w2, b13=b13, implementation=implementation, **scales)
        return y, z, b

    with jmoe.config(**options):
        return jax.tree.map(np.asarray, run(x, w13, w2))


@functools.cache
def unquantized_results():
    return results("bf16", "float32", "reference")


def check_all(got, recipe, dtype):
    expected, exact = reference_results(recipe, dtype), unquantized_results()
    linear, moe, batched = got
    assert linear.dtype == moe.dtype == batched.dtype == jnp.dtype(dtype)
    assert error(linear, expected[0]) <= (1e-5 if dtype == "float32" else DENSE)
    check_experts(moe, expected[1], recipe, dtype)
    check_experts(batched, expected[2], recipe, dtype)
    for ours, theirs, truth in zip(got, expected, exact, strict=True):
        assert error(ours, truth) <= 1.05 * error(theirs, truth) + 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", jmoe.RECIPES)
def test_every_recipe(recipe, dtype):
    check_all(results(recipe, dtype, "xla"), recipe, dtype)


@pytest.mark.parametrize("recipe", ["fp8_block", "int4"])
def test_float16(recipe):
    check_all(results(recipe, "float16", "xla"), recipe, "float16")


@pytest.mark.parametrize(
    "recipe",
    ["bf16", "fp8_tensor", "fp8_channel", "fp8_block", "fp8_w8a16", "mxfp8", "mxfp4", "mxfp4_a4", "nvfp4", "int8"]
    + ["int4", "int4_fp8", "int4_int8"],
)
def test_the_operands_of_a_gpu_are_within_the_bars(recipe):
    # The plan for a Hopper, computed here: bfloat16 or tensorfloat32 operands.
    check_all(results(recipe, "bfloat16", "xla", device="h100"), recipe, "bfloat16")


@pytest.mark.parametrize("recipe", ["fp8_block", "int4"])
def test_the_operands_of_a_gpu_with_float16_x(recipe):
    check_all(results(recipe, "float16", "xla", device="h100"), recipe, "float16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", jmoe.RECIPES)
def test_every_recipe_on_a_gpu(recipe, dtype):
    check_all(results(recipe, dtype, "xla"), recipe, dtype)


SCHEMES = (
    "bf16",
    "fp8_tensor",
    "fp8_channel",
    "fp8_block:block=32",
    "mxfp4_a8",
    "int4:group=32,zero_point",
    "int4_int8",
)


@st.composite
def cases(draw):
    tokens = draw(st.sampled_from([1, 15, 16, 17, 33]))
    return {
        "shape": (
            tokens,
            draw(st.integers(1, 9)),
            draw(st.integers(1, 4)),
            draw(st.integers(1, 80)),
            draw(st.integers(1, 80)),
            draw(st.sampled_from([1, 2])),
            draw(st.integers(0, 3)),
        ),
        "recipe": draw(st.sampled_from(SCHEMES)),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "biases": draw(st.booleans()),
        "spread": draw(st.booleans()),
        "layer": draw(st.booleans()),
    }


ONE_OF_EACH = {
    "shape": (17, 1, 4, 1, 1, 1, 0),
    "recipe": "int4:group=32,zero_point",
    "dtype": "float32",
    "biases": True,
    "spread": True,
    "layer": True,
}


@settings(max_examples=8)
@example(ONE_OF_EACH)
@given(cases())
def test_any_shape(case):
    """Ragged everything, with -1 and repeated ids; ``spread`` holds experts on two ranks and computes on the second."""
    x, w13, w2, weights, ids, b13, b2 = problem(*case["shape"])
    experts = case["shape"][1]
    layer, options = None, {}
    if case["layer"]:
        layer = 1
        w13, w2, b13, b2 = (np.stack([np.zeros_like(a), a]) for a in (w13, w2, b13, b2))
    if case["biases"]:
        options |= {"b13": b13, "b2": b2}
    if case["spread"]:
        half = (experts + 1) // 2
        options["expert_map"] = np.arange(experts) - np.where(np.arange(experts) < half, experts, half)
    w13, w2 = quantized(w13, case["recipe"]), quantized(w2, case["recipe"])

    def run(implementation, x, w13, w2):
        return jmoe.fused_moe(x, w13, w2, weights, ids, layer=layer, implementation=implementation, **options)

    y, expected = both(run, x.astype(jnp.dtype(case["dtype"])), w13, w2)
    check_experts(y, expected, case["recipe"].split(":")[0], case["dtype"])


@functools.cache
def routed(implementation):
    w13, w2 = quantized_weights("int4_fp8")
    x = problem(*SHAPE)[0][:17]
    return jax.jit(lambda weights, ids: jmoe.fused_moe(x, w13, w2, weights, ids, implementation=implementation))


EXPERTS = SHAPE[1]


@settings(max_examples=25)
@example([[-1, -1, -1]] * 17)
@example([[3, 3, 3]] * 17)
@example([[4, 4, 0]] + [[-1, 0, -1]] * 16)
@example([[e % EXPERTS, (e + 1) % EXPERTS, -1] for e in range(17)])
@given(st.lists(st.lists(st.integers(-2, EXPERTS + 1), min_size=3, max_size=3), min_size=17, max_size=17))
def test_any_routing(ids):
    ids = np.array(ids, np.int32)
    weights = np.where((ids >= 0) & (ids < EXPERTS), 0.5 + 0.1 * ids, np.nan).astype(
        np.float32
    )  # no expert: its weight is ignored
    check_experts(routed("xla")(weights, ids), routed("reference")(weights, ids), "int4_fp8", "float32")


@pytest.mark.parametrize("recipe", ["bf16", "int4_fp8", "fp8_tensor"])
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens(tokens, recipe):
    x, w13, w2, weights, ids, _, _ = problem(tokens, 8, 2, 40, 24)
    w13, w2 = quantized(w13, recipe), quantized(w2, recipe)
    y, expected = both(lambda i, *a: jmoe.fused_moe(*a, implementation=i), x, w13, w2, weights, ids)
    check_experts(y, expected, recipe, "float32")


@pytest.mark.parametrize(
    "activation",
    ["swigluoai", "swiglu:limit=0.5", "swiglustep:limit=0.5", "gelu", "ungated relu2", "ungated gelu_tanh"],
)
def test_activations(activation):
    x, w13, w2, weights, ids, b13, b2 = problem(16, 3, 2, 24, 20, 1 if "ungated" in activation else 2)

    def run(implementation):
        options = {"activation": activation.removeprefix("ungated "), "implementation": implementation}
        return jmoe.fused_moe(x, w13, w2, weights, ids, b13=b13, b2=b2, **options)

    check_experts(*both(run), "bf16", "float32")


def test_constants_of_each_expert_and_static_scales_of_each():
    x, w13, w2, weights, ids, _, _ = problem(16, 3, 2, 24, 20)
    w13, w2 = (jmoe.quantize(w, "fp8_tensor_static") for w in (w13, w2))
    params = ActivationParams(alpha=np.float32([1.0, 1.7, 0.5]), limit=np.float32([0.3, 7.0, 1.0]))
    each = np.float32([0.01, 0.02, 0.03])

    def run(implementation, w13, w2):
        options = {"activation_params": params, "input_scale": each, "intermediate_scale": each}
        options["implementation"] = implementation
        y = jmoe.fused_moe(x, w13, w2, weights, ids, **options)
        return y, jmoe.batched_experts(np.stack([x, x, x]), np.array([16, 0, 5]), w13, w2, **options)

    for y, expected in zip(*both(run, w13, w2), strict=True):
        check_experts(y, expected, "fp8_tensor_static", "float32")


@pytest.mark.parametrize("recipe", ["bf16", "fp8_channel"])
def test_weight_on_input(recipe):
    x, w13, w2, weights, ids, _, _ = problem(33, 4, 1, 24, 20)
    w13, w2 = quantized(w13, recipe), quantized(w2, recipe)
    weights = np.where(ids < 0, np.float32(np.nan), weights)

    def run(implementation, x, w13, w2):
        return jmoe.fused_moe(x, w13, w2, weights, ids, weight_on_input=True, implementation=implementation)

    y, expected = both(run, x.astype(jnp.bfloat16), w13, w2)
    check_experts(y, expected, recipe, "bfloat16")
    assert np.all(np.asarray(y, np.float32)[ids[:, 0] < 0] == 0)


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_block:block=16", "int8"])
def test_x_may_come_quantized(recipe, device):
    x, w13, w2, weights, ids, _, _ = problem(17, 4, 2, 40, 24)
    w13, w2 = jmoe.quantize(w13, recipe), jmoe.quantize(w2, recipe)
    codes = jmoe.quantize(x, w13.input_scheme)
    counts = np.array([3, 0, 17, 8])

    def run(implementation, codes, w13, w2):
        rows = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), codes)
        first = jax.tree.map(lambda leaf: leaf[1, 0], w13)
        with jmoe.config(device=device):
            return (
                jmoe.linear(codes, first, implementation=implementation),
                jmoe.fused_moe(codes, w13, w2, weights, ids, implementation=implementation),
                jmoe.batched_experts(rows, counts, w13, w2, implementation=implementation),
            )

    ours, expected = both(run, codes, w13, w2)
    assert error(ours[0], expected[0]) <= DENSE
    for y, wanted in zip(ours[1:], expected[1:], strict=True):
        check_experts(y, wanted, recipe.split(":")[0], "bfloat16")


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_two_recipes(device):
    x, w13, w2, weights, ids, _, _ = problem(17, 4, 2, 40, 24)
    w13, w2 = jmoe.quantize(w13, "int4:group=16"), jmoe.quantize(w2, "fp8_tensor")

    def run(implementation, x, w13, w2):
        with jmoe.config(device=device):
            return jmoe.fused_moe(x, w13, w2, weights, ids, implementation=implementation)

    check_experts(*both(run, x.astype(jnp.bfloat16), w13, w2), "fp8_tensor", "bfloat16")


@pytest.mark.parametrize("tokens", [1, 20, 70])
def test_batched_experts_of_any_counts(tokens):
    x, w13, w2, *_ = problem(tokens, 3, 1, 24, 20)
    w13, w2 = jmoe.quantize(w13, "int4_fp8"), jmoe.quantize(w2, "int4_fp8")
    rows = np.stack([x, -x, 2 * x])
    run = {
        i: jax.jit(lambda counts, i=i: jmoe.batched_experts(rows, counts, w13, w2, implementation=i))
        for i in ("xla", "reference")
    }
    for counts in ([0, 0, 0], [tokens, 0, 1], [1, tokens, tokens // 2]):
        y = run["xla"](np.array(counts))
        check_experts(y, run["reference"](np.array(counts)), "int4_fp8", "float32")
        beyond = np.arange(tokens) >= np.array(counts)[:, None]
        assert np.all(np.asarray(y)[beyond] == 0)


LINEARS = (
    ("bf16", 300, 70),
    ("fp8_block:block=32", 300, 70),
    ("fp8_channel", 300, 70),
    ("fp8_tensor", 257, 70),
    ("nvfp4_w4a16", 257, 71),
    ("int4:group=32,zero_point", 257, 71),
    ("mxfp8", 129, 64),
)


@pytest.mark.parametrize("layers", [None, 2])
@pytest.mark.parametrize("recipe, n, k", LINEARS)
def test_a_linear_in_pieces_is_the_same(recipe, n, k, layers, monkeypatch):
    rng = np.random.default_rng(1)
    w = quantized(rng.standard_normal((n, k) if layers is None else (layers, n, k)).astype(np.float32), recipe)
    x = rng.standard_normal((9, k)).astype(np.float32)
    layer = None if layers is None else 1
    whole, expected = both(lambda i, x, w: jmoe.linear(x, w, layer=layer, implementation=i), x, w)
    monkeypatch.setattr(xla, "_PIECE_BYTES", 128 * k * 4)
    pieces = jax.jit(lambda x, w: jmoe.linear(x, w, layer=layer, implementation="xla"))
    tiles = dict(jmoe.explain(pieces, x, w).entries[0][1].tiles)
    assert tiles["features"] == (n if recipe == "bf16" else 128)
    assert error(pieces(x, w), whole) <= 1e-6
    assert error(whole, expected) <= 1e-5


@pytest.mark.parametrize("layer", [None, 1])
@pytest.mark.parametrize("rows", [5, 48, 100, 131, 290, 300])
def test_pieces_may_begin_and_end_inside_of_blocks_of_scales(rows, layer, monkeypatch):
    scheme = jmoe.Scheme(format="int8", block=(rows, 16), zero_point=True)
    rng = np.random.default_rng(2)
    w = jmoe.quantize(rng.standard_normal((300, 40) if layer is None else (2, 300, 40)).astype(np.float32), scheme)
    x = rng.standard_normal((3, 40)).astype(np.float32)
    whole = np.asarray(w.dequantize() if layer is None else w.dequantize()[layer], np.float64)
    for most, features in ((128, 128), (96, 75), (1, 1)):
        monkeypatch.setattr(xla, "_PIECE_BYTES", most * 40 * 4)
        run = jax.jit(lambda x, w: jmoe.linear(x, w, layer=layer, implementation="xla"))
        assert dict(jmoe.explain(run, x, w).entries[0][1].tiles)["features"] == features
        assert error(run(x, w), x @ whole.T) <= 1e-6


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_global_scales_of_rows_in_pieces(device, monkeypatch):
    rng = np.random.default_rng(3)
    shards = [(s * rng.standard_normal((150, 48))).astype(np.float32) for s in (1.0, 30.0)]
    w = jmoe.merge_shards([jmoe.quantize(shard, "nvfp4_w4a16") for shard in shards])
    assert w.global_scale.shape == (300, 1)
    monkeypatch.setattr(xla, "_PIECE_BYTES", 128 * 48 * 4)

    def run(implementation, x, w):
        with jmoe.config(device=device):
            return jmoe.linear(x, w, implementation=implementation)

    x = rng.standard_normal((5, 48)).astype(np.float32)
    assert error(*both(run, x, w)) <= 1e-5
    assert error(*both(run, x.astype(jnp.bfloat16), w)) <= DENSE


@pytest.mark.parametrize("recipe", ["int4_fp8", "fp8_block"])
@pytest.mark.parametrize("tokens", [8, 40])
def test_runs_are_bit_identical_and_rows_independent_at_equal_tokens(tokens, recipe):
    x, w13, w2, weights, ids, _, _ = problem(tokens, 6, 2, 96, 80)
    w13, w2 = jmoe.quantize(w13, recipe), jmoe.quantize(w2, recipe)
    run = jax.jit(lambda x, weights, ids: jmoe.fused_moe(x, w13, w2, weights, ids, implementation="xla"))
    y = np.asarray(run(x, weights, ids))
    np.testing.assert_array_equal(y, run(x, weights, ids))
    for seed in range(4):
        # All tokens but three get other values, weights and experts, so those three lie elsewhere in their blocks.
        rng = np.random.default_rng(seed)
        others = rng.permutation(tokens)[3:]
        x2, weights2, ids2 = x.copy(), weights.copy(), ids.copy()
        x2[others] *= -2
        weights2[others] = 7
        ids2[others] = rng.integers(-1, 6, (tokens - 3, 2))
        kept = np.setdiff1d(np.arange(tokens), others)
        np.testing.assert_array_equal(np.asarray(run(x2, weights2, ids2))[kept], y[kept])


def test_batch_invariant_rows_do_not_depend_on_the_number_of_tokens():
    x, w13, w2, weights, ids, _, _ = problem(70, 4, 2, 96, 80)
    w13, w2 = jmoe.quantize(w13, "fp8_block"), jmoe.quantize(w2, "fp8_block")

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, x, weights, ids):
        first = jax.tree.map(lambda leaf: leaf[0, 0], w13)
        y = jmoe.fused_moe(x, w13, w2, weights, ids, implementation=implementation)
        return y, jmoe.linear(x, first, implementation=implementation)

    expected = run("reference", x, weights, ids)
    with jmoe.config(batch_invariant=True):
        y, z = run("xla", x, weights, ids)
        for tokens in (0, 1, 17, 64):
            few_y, few_z = run("xla", x[:tokens], weights[:tokens], ids[:tokens])
            np.testing.assert_array_equal(few_y, y[:tokens])
            np.testing.assert_array_equal(few_z, z[:tokens])
    check_experts(y, expected[0], "fp8_block", "float32")
    assert error(z, expected[1]) <= 1e-5
