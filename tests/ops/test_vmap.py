"""Operations under ``jax.vmap``: what they give example by example, in the memory of one call.

The oracle is a Python loop over the examples.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmoe
from jmoe.qtensor import QTensor

BATCH, TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 3, 5, 4, 2, 24, 16
IMPLEMENTATIONS = ("xla", "reference")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def normal(seed, *shape, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


# Examples of different magnitude, so that a scale measured over all of them would be another.
XS = normal(0, BATCH, TOKENS, HIDDEN) * np.array([1.0, 30.0, 0.02], np.float32)[:, None, None]
W13 = normal(1, EXPERTS, 2, INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5)
W2 = normal(2, EXPERTS, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5)
WEIGHTS = np.random.default_rng(3).uniform(0.1, 1.0, (BATCH, TOKENS, TOP_K)).astype(np.float32)
IDS = np.random.default_rng(4).integers(-1, EXPERTS, (BATCH, TOKENS, TOP_K)).astype(np.int32)
ROWS = normal(5, BATCH, EXPERTS, TOKENS, HIDDEN) * np.array([1.0, 30.0, 0.02], np.float32)[:, None, None, None]
COUNTS = np.array([[5, 0, 2, 1], [0, 3, 2, 5], [1, 0, 0, 0]], np.int32)
B13, B2 = normal(6, EXPERTS, 2, INTERMEDIATE), normal(7, EXPERTS, HIDDEN)
STATIC = {"input_scale": np.float32(0.05), "intermediate_scale": np.linspace(0.1, 0.4, EXPERTS, dtype=np.float32)}


def assert_close(got, expected, limit=2e-6):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        assert ours.shape == theirs.shape
        assert np.linalg.norm(ours - theirs) <= limit * np.linalg.norm(theirs)


def stacked(results, axis=0):
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves], axis), *results)


def loop(fn, *args, in_axes):
    """``jax.vmap(fn, in_axes)(*args)`` by its definition."""

    def entry(value, axis, i):
        return value if axis is None else jax.tree.map(lambda leaf: jnp.take(jnp.asarray(leaf), i, axis), value)

    run = jax.jit(fn)
    return stacked([run(*(entry(a, axis, i) for a, axis in zip(args, in_axes, strict=True))) for i in range(BATCH)])


@functools.cache
def quantized(recipe):
    return (W13, W2) if recipe == "bf16" else (jmoe.quantize(W13, recipe), jmoe.quantize(W2, recipe))


def moe(recipe, implementation, **options):
    static = STATIC if recipe.endswith("static") else {}
    return functools.partial(jmoe.fused_moe, implementation=implementation, **static, **options)


# A scale a token; given; measured over the tensor; none.
RECIPES = ("int4_fp8:group=8", "fp8_tensor_static", "fp8_tensor", "bf16")


@each_implementation
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_batch_of_a_layer_of_experts_is_the_loop_over_examples(recipe, implementation):
    w13, w2 = quantized(recipe)
    run = moe(recipe, implementation)
    stack = functools.partial(jax.tree.map, lambda leaf: jnp.stack([leaf, leaf[::-1], jnp.roll(leaf, 1, 0)]))
    whole = (XS, stack(w13), stack(w2), WEIGHTS, IDS)
    alone = (XS[1], w13, w2, WEIGHTS[1], IDS[1])
    for in_axes in [(0, None, None, 0, 0), (0, None, None, None, None), (None, None, None, None, 0), (0, 0, 0, 0, 0)]:
        args = [alone[i] if axis is None else whole[i] for i, axis in enumerate(in_axes)]
        got = jax.jit(jax.vmap(run, in_axes))(*args)
        assert_close(got, loop(run, *args, in_axes=in_axes))


@each_implementation
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_is_the_loop_over_examples(recipe, implementation):
    ws = [jax.tree.map(lambda leaf, e=e: leaf[e, 0], quantized(recipe)[0]) for e in range(BATCH)]
    scale = {"input_scale": 0.05} if recipe.endswith("static") else {}
    biases = B13[:BATCH, 0]

    def run(x, w, bias):
        return jmoe.linear(x, w, bias=bias, activation="silu", implementation=implementation, **scale)

    stacks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ws)
    for in_axes in [(0, None, None), (0, 0, 0), (0, None, 0), (None, 0, None)]:
        args = [
            whole if axis == 0 else one
            for whole, one, axis in zip((XS, stacks, biases), (XS[1], ws[1], biases[1]), in_axes, strict=True)
        ]
        assert_close(jax.vmap(run, in_axes)(*args), loop(run, *args, in_axes=in_axes))


@each_implementation
@pytest.mark.parametrize("recipe", ["fp8_channel", "fp8_tensor"])
@pytest.mark.parametrize("counts_axis", [0, None])
def test_batched_experts_are_the_loop_over_examples(recipe, implementation, counts_axis):
    w13, w2 = quantized(recipe)
    counts = COUNTS if counts_axis == 0 else COUNTS[1]
    # Rows beyond an example's own counts may hold anything.
    rows = np.where(np.arange(TOKENS) < np.broadcast_to(counts, COUNTS.shape)[..., None], 1, np.nan)[..., None] * ROWS

    def run(x, counts):
        return jmoe.batched_experts(x, counts, w13, w2, b13=B13, b2=B2, implementation=implementation)

    args, in_axes = (rows.astype(np.float32), counts), (0, counts_axis)
    got = jax.jit(jax.vmap(run, in_axes))(*args)
    assert np.isfinite(got).all()
    assert_close(got, loop(run, *args, in_axes=in_axes))


def test_an_example_measures_the_scale_of_its_own_tensor():
    # Alone, 1.0625 has the scale 1.0625/448 and is the code 448. Beside 448 * 16 the scale is 16, and 1.0625/16 lies
    # between the codes 0.0625 and 0.0703125 (steps of 2**-7).
    w = jmoe.quantize(np.ones((1, 1), np.float32), "fp8_tensor")
    xs = np.array([[[448.0 * 16]], [[1.0625]]], np.float32)
    y = jax.vmap(lambda x: jmoe.linear(x, w))(xs)
    np.testing.assert_allclose(y[:, 0, 0], [7168, 1.0625], rtol=1e-6)
    together = jmoe.linear(xs, w)[1, 0, 0]
    np.testing.assert_allclose(together, 1.0, rtol=1e-6)  # what folding the two would give: 0.0625 * 16, or 1.125


def calls():
    """Operations of x and of what else has tokens, with their batches."""
    w13, w2 = quantized("int4_fp8:group=8")
    w = jax.tree.map(lambda leaf: leaf[0, 0], w13)
    return {
        "linear": (lambda x: jmoe.linear(x, w), (XS,)),
        "moe": (lambda x, weights, ids: jmoe.fused_moe(x, w13, w2, weights, ids), (XS, WEIGHTS, IDS)),
        "batched": (lambda x, counts: jmoe.batched_experts(x, counts, w13, w2), (ROWS, COUNTS)),
    }


each_call = pytest.mark.parametrize("name", ["linear", "moe", "batched"])


@each_call
def test_axes_names_and_nesting(name):
    run, args = calls()[name]
    expected = loop(run, *args, in_axes=(0,) * len(args))
    last = [np.moveaxis(a, 0, -1) for a in args]
    got = jax.vmap(run, in_axes=-1, out_axes=1, axis_name="examples")(*last)
    assert_close(got, np.moveaxis(expected, 0, 1))
    assert_close(jax.vmap(run, spmd_axis_name="examples")(*args), expected)
    twice = [np.stack([a, a[::-1]], 1) for a in args]  # (BATCH, 2, ...)
    got = jax.jit(jax.vmap(jax.vmap(run), out_axes=1))(*twice)
    assert_close(got, np.stack([expected, expected[::-1]]))
    mixed = jax.vmap(jax.vmap(run, in_axes=(0, *(None for _ in args[1:]))))(twice[0], *args[1:])
    assert_close(mixed[:, 0], expected)
    empty = jax.vmap(run)(*(a[:0] for a in args))
    assert empty.shape == (0, *expected.shape[1:])
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    assert jax.eval_shape(jax.vmap(run), *shapes).shape == expected.shape


@each_call
@pytest.mark.parametrize("x64", [False, True])
def test_strict_promotion_and_x64(name, x64):
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        run, args = calls()[name]
        got = jax.vmap(run)(*args)
        assert got.dtype == jnp.float32
        assert_close(got, loop(run, *args, in_axes=(0,) * len(args)))


@pytest.mark.parametrize("recipe", ["int4_fp8:group=8", "fp8_tensor"])
def test_an_activation_that_is_quantized_already(recipe):
    w = jax.tree.map(lambda leaf: leaf[0, 0], quantized(recipe)[0])
    xs = jax.vmap(lambda x: jmoe.quantize(x, w.input_scheme))(XS)
    run = functools.partial(jmoe.linear, preferred_element_type="float32")
    got = jax.vmap(run, (0, None))(xs, w)
    alone = [run(jax.tree.map(lambda leaf, i=i: leaf[i], xs), w) for i in range(BATCH)]
    assert_close(got, stacked(alone))


def test_one_global_scale_of_each_example():
    w = jmoe.quantize(normal(8, 16, 32), "nvfp4")
    x = np.repeat(normal(9, BATCH, TOKENS, 1) * np.array([1.0, 9.0, 0.1], np.float32)[:, None, None], 32, axis=2)
    xs = jax.vmap(lambda x, scale: jmoe.quantize(x, w.input_scheme, scale=scale))(x, np.float32([0.01, 0.1, 0.001]))
    assert isinstance(xs, QTensor) and xs.global_scale.shape == (BATCH, 1, 1)
    run = functools.partial(jmoe.linear, preferred_element_type="float32", implementation="xla")
    alone = [run(jax.tree.map(lambda leaf, i=i: leaf[i], xs), w) for i in range(BATCH)]
    assert_close(jax.vmap(run, (0, None))(xs, w), stacked(alone))


@pytest.mark.parametrize("recipe, implementation", [("int4_fp8:group=8", "xla"), ("fp8_tensor", "reference")])
def test_derivatives_of_each_example_and_of_the_batch(recipe, implementation):
    w13, w2 = quantized(recipe)
    target = normal(10, TOKENS, HIDDEN)

    def loss(x, weights, b13, ids):
        y = jmoe.fused_moe(x, w13, w2, weights, ids, b13=b13, b2=B2, implementation=implementation)
        return jnp.sum(y * target)

    args = XS, WEIGHTS, B13, IDS
    each, both = (0, 0, None, 0), (0, 1)
    for wrt in (both, (0, 1, 2)):  # with a bias, a gradient an example has no tokens to fold
        gradient = jax.grad(loss, argnums=wrt)
        expected = loop(gradient, *args, in_axes=each)
        assert_close(jax.jit(jax.vmap(gradient, each))(*args), expected)
    total = jax.grad(lambda *a: jnp.sum(jax.vmap(loss, each)(*a)), argnums=(0, 1, 2))(*args)
    assert_close(total, (expected[0], expected[1], np.sum(expected[2], axis=0)), 1e-5)
    direction = normal(11, BATCH, TOKENS, HIDDEN)

    def forward(x, dx, weights, ids):
        return jax.jvp(lambda x: loss(x, weights, B13, ids), (x,), (dx,))[1]

    slopes = jax.vmap(forward)(XS, direction, WEIGHTS, IDS)
    assert_close(slopes, np.sum(expected[0] * direction, axis=(1, 2)), 1e-5)
    # Batches of directions alone.
    small = functools.partial(jmoe.fused_moe, w13=w13, w2=w2, topk_ids=IDS[0, :1], implementation=implementation)
    point, share = XS[0, :1], WEIGHTS[0, :1]
    jacobians = [jacobian(lambda x: small(x, topk_weights=share))(point) for jacobian in (jax.jacfwd, jax.jacrev)]
    assert_close(*jacobians, 1e-5)


def test_second_derivatives_of_each_example():
    w13, w2 = quantized("int4:group=8")

    def loss(x, weights, ids):
        return jnp.sum(jnp.sin(jmoe.fused_moe(x, w13, w2, weights, ids)))

    def product(x, weights, ids):
        return jax.jvp(lambda x: jax.grad(loss, argnums=(0, 1))(x, weights, ids), (x,), (jnp.ones_like(x),))[1]

    def reverse_twice(x, weights, ids):
        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x, weights, ids)))(x)

    args = XS / 8, WEIGHTS, IDS
    expected = loop(product, *args, in_axes=(0, 0, 0))
    assert_close(jax.jit(jax.vmap(product))(*args), expected, 1e-4)
    assert_close(jax.jit(jax.vmap(reverse_twice))(*args), expected[0], 1e-4)


def test_the_slope_with_respect_to_a_layer_of_plain_weights():
    def loss(w13, x, weights, ids):
        return jnp.sum(jmoe.fused_moe(x, w13, W2, weights, ids) ** 2)

    args = W13, XS, WEIGHTS, IDS
    expected = loop(jax.grad(loss), *args, in_axes=(None, 0, 0, 0))
    assert_close(jax.vmap(jax.grad(loss), (None, 0, 0, 0))(*args), expected, 1e-5)
    total = jax.grad(lambda w, *rest: jnp.sum(jax.vmap(functools.partial(loss, w))(*rest)))(*args)
    assert_close(total, np.sum(expected, axis=0), 1e-5)


def test_batches_in_a_shard_map():
    if jax.device_count() < BATCH:
        pytest.skip(f"needs {BATCH} devices; tests/conftest.py asks for four")
    mesh = jax.make_mesh((BATCH,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:BATCH])
    w13, w2 = quantized("int4_fp8:group=8")

    def loss(x, weights, ids, b13):
        return jnp.sum(jnp.sin(jmoe.fused_moe(x, w13, w2, weights, ids, b13=b13)))

    each = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), (0, 0, 0, None))
    rows = P("x")
    parts = jax.shard_map(each, mesh=mesh, in_specs=(rows, rows, rows, P()), out_specs=(rows, (rows, rows)))
    args = XS, WEIGHTS, IDS, B13
    assert_close(jax.jit(parts)(*args), jax.jit(each)(*args))
    total = jax.shard_map(
        lambda *a: jax.lax.psum(jnp.sum(jax.vmap(loss, (0, 0, 0, None))(*a)), "x"),
        mesh=mesh,
        in_specs=(rows, rows, rows, P()),
        out_specs=P(),
    )
    whole = jax.grad(lambda *a: jnp.sum(jax.vmap(loss, (0, 0, 0, None))(*a)), argnums=3)
    assert_close(jax.jit(jax.grad(total, argnums=3))(*args), whole(*args), 1e-4)


def temporaries(fn, *args):
    return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_a_batch_takes_the_memory_of_one_call():
    batch, experts, tokens, hidden, intermediate = 16, 4, 8, 256, 128
    shape = jax.ShapeDtypeStruct

    def quantized_shape(*extents):
        return jax.eval_shape(lambda: jmoe.quantize(jnp.zeros(extents, jnp.bfloat16), "int4"))

    w13, w2 = quantized_shape(experts, 2, intermediate, hidden), quantized_shape(experts, hidden, intermediate)
    x = shape((batch, tokens, hidden), jnp.bfloat16)
    weights, ids = (shape((batch, tokens, TOP_K), dtype) for dtype in (jnp.float32, jnp.int32))

    def slope(x, w13, w2, weights, ids):
        def loss(x, weights):
            return jnp.sum(jmoe.fused_moe(x, w13, w2, weights, ids).astype(jnp.float32))

        return jax.grad(loss, argnums=(0, 1))(x, weights)

    tokens_of_each = (0, None, None, 0, 0)
    for fn in (jmoe.fused_moe, slope):
        flat = temporaries(fn, x, w13, w2, weights, ids)
        assert temporaries(jax.vmap(fn, tokens_of_each), x, w13, w2, weights, ids) <= 1.3 * flat
        nested = [jax.tree.map(lambda leaf: shape((4, 4, *leaf.shape[1:]), leaf.dtype), a) for a in (x, weights, ids)]
        twice = jax.vmap(jax.vmap(fn, tokens_of_each), tokens_of_each)
        assert temporaries(twice, nested[0], w13, w2, *nested[1:]) <= 1.3 * flat

    rows = shape((batch, experts, tokens, hidden), jnp.bfloat16)
    together = shape((experts, batch * tokens, hidden), jnp.bfloat16)
    flat = temporaries(jmoe.batched_experts, together, shape((experts,), jnp.int32), w13, w2)
    counts = shape((batch, experts), jnp.int32)
    assert temporaries(jax.vmap(jmoe.batched_experts, (0, 0, None, None)), rows, counts, w13, w2) <= 1.3 * flat

    # One after another, where every example has weights of its own: no more than a few experts at a time.
    stack = functools.partial(jax.tree.map, lambda leaf: shape((batch, *leaf.shape), leaf.dtype))
    each = temporaries(jax.vmap(jmoe.fused_moe), x, stack(w13), stack(w2), weights, ids)
    assert each <= 4 * 3 * intermediate * hidden * 4 + 4 * x.size


def test_kernels_get_one_call_for_the_batch():
    w = jmoe.quantize(normal(12, 64, 128), "fp8_block")
    xs = jnp.ones((6, 4, 128), jnp.bfloat16)
    [(op, selection)] = jmoe.explain(jax.vmap(lambda x: jmoe.linear(x, w)), xs, device="h100").entries
    assert (op.tokens, selection.implementation) == (24, "triton")
    with jmoe.config(device="h100"):
        jaxpr = str(jax.make_jaxpr(jax.vmap(lambda x: jmoe.linear(x, w)))(xs))
        assert "scan" not in jaxpr.split("default")[0]


def test_kernels_run_example_after_example_where_each_has_a_scale():
    w = jmoe.quantize(normal(12, 64, 128), "fp8_tensor")
    xs = jnp.ones((6, 4, 128), jnp.bfloat16)
    [(op, selection)] = jmoe.explain(jax.vmap(lambda x: jmoe.linear(x, w)), xs, device="h100").entries
    assert (op.tokens, selection.implementation) == (4, "triton")
    with jmoe.config(device="h100"):
        jaxpr = str(jax.make_jaxpr(jax.vmap(lambda x: jmoe.linear(x, w)))(xs))
    assert "length=6" in jaxpr


def test_checks_of_values_reach_every_example():
    w13, w2 = quantized("fp8_tensor_static")

    def run(x, weights, ids, scale):
        return jmoe.fused_moe(x, w13, w2, weights, ids, input_scale=scale, intermediate_scale=np.float32(0.1))

    with jmoe.config(check=True):
        checked = jax.jit(checkify.checkify(jax.vmap(run)))
        scales = np.float32([0.1, 0.2, 0.3])
        assert checked(XS, WEIGHTS, IDS, scales)[0].get() is None
        assert "topk_ids holds 4" in checked(XS, WEIGHTS, np.where(IDS == 3, 4, IDS), scales)[0].get()
        assert "input_scale must be" in checked(XS, WEIGHTS, IDS, scales - scales[1])[0].get()
