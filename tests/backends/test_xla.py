"""The xla implementation against the reference, its plans and its memory.

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
from jmoe.backends.spec import DEVICES
from pallas_kernels.layouts import Layout

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


# Determinism


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


# Memory


def compiled_moe(recipe, tokens, *, layers=None, differentiate=(), experts=64, hidden=512, intermediate=256, k=4):
    """fused_moe compiled for shapes alone, and the bytes of one expert's float32 weights."""
    lead = () if layers is None else (layers,)

    def weight(*shape):
        return jax.eval_shape(lambda: quantized(jnp.zeros((*lead, *shape), jnp.bfloat16), recipe))

    args = (
        jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16),
        weight(experts, 2, intermediate, hidden),
        weight(experts, hidden, intermediate),
        jax.ShapeDtypeStruct((tokens, k), jnp.float32),
        jax.ShapeDtypeStruct((tokens, k), jnp.int32),
        None if layers is None else jax.ShapeDtypeStruct((), jnp.int32),
    )

    def run(x, w13, w2, weights, ids, layer):
        return jmoe.fused_moe(x, w13, w2, weights, ids, layer=layer, implementation="xla").astype(jnp.float32).sum()

    fn = jax.grad(run, argnums=differentiate) if differentiate else run
    return fn, args, 4 * 3 * intermediate * hidden


@pytest.mark.parametrize("layers", [None, 8])
@pytest.mark.parametrize("recipe", ["int4", "fp8_block", "nvfp4_w4a16", "bf16"])
def test_h19_memory_is_one_expert_and_activations(recipe, layers):
    fn, args, expert = compiled_moe(recipe, 16, layers=layers)
    # 64 slots in at most 64 blocks of 16 rows: x in 2 bytes, its float32 form and y, and the slots once more.
    activations = 64 * 16 * 512 * (2 + 4 + 4)
    used = jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert used < 1.5 * expert + activations
    # All experts' codes are 8 to 32 times as much, and dequantised 64 times.


@pytest.mark.parametrize("layers", [None, 8])
def test_h19_memory_of_gradients(layers):
    fn, args, expert = compiled_moe("fp8_block", 16, layers=layers, differentiate=(0, 3))
    activations = 64 * 16 * 512 * (2 + 4 + 4)
    used = jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert used < 2 * (1.5 * expert + activations)


def test_memory_of_gradients_of_plain_weights_is_their_own():
    fn, args, expert = compiled_moe("bf16", 16, differentiate=(1, 2), experts=32)
    weights = 32 * expert // 2  # bfloat16
    analysis = jax.jit(fn).lower(*args).compile().memory_analysis()
    assert analysis.output_size_in_bytes >= weights
    assert analysis.temp_size_in_bytes < weights


def test_decoding_one_token_needs_one_expert_at_a_time():
    fn, args, expert = compiled_moe("fp8_block", 1, experts=128, k=8)
    used = jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert used < 1.5 * expert


@pytest.mark.parametrize("layers", [None, 4])
@pytest.mark.parametrize("recipe", ["int4", "fp8_block", "fp8_w8a16:block=1001x128", "fp8_w8a16:block=15000x128"])
def test_memory_of_a_large_linear_is_a_piece(recipe, layers):
    n, k = 16384, 4096  # 256 MiB in float32
    shape = (n, k) if layers is None else (layers, n, k)
    w = jax.eval_shape(lambda: jmoe.quantize(jnp.zeros(shape, jnp.bfloat16), recipe))
    x = jax.ShapeDtypeStruct((4, k), jnp.bfloat16)
    layer = None if layers is None else jax.ShapeDtypeStruct((), jnp.int32)
    fn = lambda x, w, layer: jmoe.linear(x, w, layer=layer, implementation="xla")  # noqa: E731
    used = jax.jit(fn).lower(x, w, layer).compile().memory_analysis().temp_size_in_bytes
    assert used < 1.5 * xla._PIECE_BYTES


def test_h19_no_ragged_dot_and_no_product_over_all_experts():
    fn, args, _ = compiled_moe("fp8_block", 16, differentiate=(0, 3))
    text = str(jax.make_jaxpr(fn)(*args))
    assert "ragged_dot" not in text
    products = [line for line in text.splitlines() if "= dot_general" in line]
    assert products
    assert not any("[64," in line for line in products)


# Plans


def moe_op(recipe="fp8_block", **changes):
    return jmoe.OpSpec(
        **{
            "op": "moe",
            "recipe": jmoe.recipe(recipe),
            "tokens": 64,
            "hidden": 512,
            "experts": 8,
            "global_experts": 8,
            "intermediate": 256,
            "top_k": 2,
        }
        | changes
    )


def plan(op, device="h100", explicit=True):
    return xla.plan(op, jmoe.DeviceSpec.named(device), explicit=explicit)


def operands(op, device="h100"):
    return dict(plan(op, device).tiles)["operands"]


def test_operands_are_part_of_the_plan():
    assert operands(moe_op("fp8_channel")) == "bfloat16"
    assert operands(moe_op("mxfp8")) == "bfloat16"
    assert operands(moe_op("nvfp4")) == "bfloat16"
    assert operands(moe_op("int4")) == "bfloat16"
    assert operands(moe_op("fp8_block")) == "tensorfloat32"
    assert operands(moe_op("int4_int8")) == "tensorfloat32"
    assert operands(moe_op("bf16")) == "bfloat16"
    assert operands(moe_op("bf16", dtype="float16")) == "float16"
    assert operands(moe_op("int4", dtype="float16")) == "tensorfloat32"
    assert operands(moe_op("int8", dtype="float16")) == "bfloat16"
    assert operands(moe_op("int8", second_recipe=jmoe.recipe("int4_fp8"))) == "tensorfloat32"
    for op in (moe_op("fp8_channel"), moe_op("bf16")):
        assert operands(op, "cpu") == operands(op, "t4") == operands(op.replace(dtype="float32")) == "float32"


def test_fp4_activations_are_emulated_on_a_gpu_only_where_asked_by_name():
    for recipe in ("nvfp4", "nvfp4_per_token", "mxfp4_a4"):
        op = moe_op(recipe)
        with pytest.raises(NotImplementedError, match=r"compute capability 10\.0\), and NVIDIA H100 80GB has none"):
            plan(op, "h100", explicit=False)
        for device, explicit in (("h100", True), ("cpu", False), ("b200", False)):
            assert "FP4 activations are emulated" in plan(op, device, explicit).note
        second = moe_op("int4", second_recipe=jmoe.recipe(recipe))
        with pytest.raises(NotImplementedError, match="FP4 activations"):
            plan(second, "h100", explicit=False)
    assert "emulated" not in plan(moe_op("mxfp4"), explicit=False).note
    selection = jmoe.select(moe_op("nvfp4"), "h100", implementation="xla")
    assert selection.implementation == "xla" and "emulated" in selection.note


def test_j06_what_is_asked_for_by_name_is_served_or_fails():
    packed = moe_op(layout=Layout("tiles"))
    with pytest.raises(NotImplementedError, match=r"'xla' cannot serve .*layout 'tiles', and it reads the canonical"):
        jmoe.select(packed, "h100", implementation="xla")


def test_accumulation_is_exact_and_says_so_where_fast_was_asked():
    assert plan(moe_op()).accumulation == "exact"
    fast = plan(moe_op(accumulation="fast"))
    assert fast.accumulation == "exact"
    assert "accumulation='fast' changes nothing" in fast.note


def test_notes_tell_of_dequantised_weights_and_meshes():
    assert "weights are dequantised to tensorfloat32, one expert at a time" in plan(moe_op()).note
    assert plan(moe_op("bf16")).note == ""
    assert "mesh (data=4)" in plan(moe_op(mesh=(("data", 4),))).note
    linear = jmoe.OpSpec(op="linear", recipe=jmoe.recipe("int4"), tokens=1, hidden=8192, features=28672)
    assert "4096 rows at a time" in plan(linear).note


def test_pieces_of_a_linear_split_no_block_of_scales_if_these_fit():
    for block, expected in ((128, 7168), (96, 7296)):
        recipe = jmoe.recipe("fp8_w8a16", block=block)
        op = jmoe.OpSpec(op="linear", recipe=recipe, tokens=1, hidden=4096, features=28672)
        features = dict(plan(op).tiles)["features"]
        assert features == expected
        assert features % block == 0 and features * 4096 * 2 <= xla._PIECE_BYTES
    for block in (1001, 28000):  # less than a block has to fit
        op = op.replace(recipe=jmoe.recipe("fp8_w8a16", block=(block, 128)))
        assert dict(plan(op).tiles)["features"] == 7168
    wide = op.replace(hidden=2**20, features=100)  # a tile of 128 does not fit: 100 rows in four pieces of 32 at most
    assert dict(plan(wide).tiles)["features"] == 25
    small = jmoe.OpSpec(op="linear", recipe=jmoe.recipe("int4"), tokens=1, hidden=64, features=100)
    assert dict(plan(small).tiles)["features"] == 100


def block_rows(device="cpu", **changes):
    return dict(plan(moe_op(**changes), device).tiles)["rows"]


def test_rows_of_a_block_follow_from_shapes_alone():
    # sqrt(2 n d) rows, to a power of two, for n rows an expert; d is 32 on a CPU and 256 on a GPU.
    assert block_rows(tokens=2048) == 256  # n = 512: 181
    assert block_rows(tokens=256) == 64  # n = 64: 64
    assert block_rows(tokens=4) == 16  # n = 1: 8
    assert block_rows(tokens=2048, device="h100") == 512  # n = 512: 512
    assert block_rows(tokens=2048, global_experts=64) == 64  # n = 64 with an expert map
    assert block_rows(tokens=1) == 1
    assert block_rows(tokens=2, experts=16, global_experts=16) == 1
    assert block_rows(tokens=2, experts=15, global_experts=15) == 16
    assert block_rows(tokens=1, batch_invariant=True) == block_rows(tokens=4096, batch_invariant=True) == 64
    assert all(isinstance(plan(moe_op(), name), xla.Plan) for name in DEVICES)
