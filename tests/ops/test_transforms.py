"""The operations under JAX's transformations, by the implementations that run anywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmoe
from jmoe.backends import reference, xla

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 16, 8, 2, 20, 12
IMPLEMENTATIONS = ("xla", "reference")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def normal(seed, *shape, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


X = normal(0, TOKENS, HIDDEN)
W13 = normal(1, EXPERTS, 2, INTERMEDIATE, HIDDEN, scale=HIDDEN**-0.5)
W2 = normal(2, EXPERTS, HIDDEN, INTERMEDIATE, scale=INTERMEDIATE**-0.5)
WEIGHTS = np.random.default_rng(3).uniform(0.1, 1.0, (TOKENS, TOP_K)).astype(np.float32)
IDS = np.random.default_rng(4).integers(-1, EXPERTS, (TOKENS, TOP_K)).astype(np.int32)
COUNTS = np.array([2, 0, 16, 1, 3, 16, 0, 5], np.int32)


def error(y, expected):
    y, expected = (np.asarray(a, np.float64) for a in (y, expected))
    assert y.shape == expected.shape
    return np.linalg.norm(y - expected) / np.linalg.norm(expected)


@functools.cache
def quantized(recipe="int4_fp8:group=8"):
    return jmoe.quantize(W13, recipe), jmoe.quantize(W2, recipe)


@functools.cache
def expected(recipe="int4_fp8:group=8"):
    return np.asarray(jmoe.fused_moe(X, *quantized(recipe), WEIGHTS, IDS, implementation="reference"))


@pytest.fixture(params=IMPLEMENTATIONS)
def traces(request, monkeypatch):
    """Counts how often the implementation's fused_moe is traced, and names it."""
    module = {"xla": xla, "reference": reference}[request.param]
    original, seen = module.fused_moe, []

    def counting(op, *args):
        seen.append(op)
        return original(op, *args)

    monkeypatch.setattr(module, "fused_moe", counting)
    return request.param, seen


def test_equal_shapes_are_traced_once_whatever_the_values(traces):
    implementation, seen = traces
    w13, w2 = quantized()
    # A number of tokens that no other test has, so that nothing is traced yet.
    x, weights, ids = X[:13], WEIGHTS[:13], IDS[:13]
    run = jax.jit(lambda x, weights, ids: jmoe.fused_moe(x, w13, w2, weights, ids, implementation=implementation))
    run(x, weights, ids)
    assert len(seen) == 1
    run(2 * x, weights[::-1], np.zeros_like(ids))
    jmoe.fused_moe(3 * x, w13, w2, weights, ids, implementation=implementation)  # eager calls share the trace
    jax.jit(lambda x: jmoe.fused_moe(x, w13, w2, weights, ids, implementation=implementation) * 2)(x)
    assert len(seen) == 1
    run(x[:12], weights[:12], ids[:12])
    assert len(seen) == 2


def test_a_changed_setting_is_traced_anew_and_its_return_is_not(traces):
    implementation, seen = traces
    w13, w2 = quantized()
    x, weights, ids = X[:11], WEIGHTS[:11], IDS[:11]
    run = jax.jit(lambda x, weights, ids: jmoe.fused_moe(x, w13, w2, weights, ids, implementation=implementation))
    run(x, weights, ids)
    with jmoe.config(batch_invariant=True):
        run(x, weights, ids)
    assert [op.batch_invariant for op in seen] == [False, True]
    run(x, weights, ids)
    assert len(seen) == 2


@each_implementation
def test_vmap_over_batches_of_tokens(implementation):
    w13, w2 = quantized()
    run = functools.partial(jmoe.fused_moe, implementation=implementation)
    xs, weights, ids = (np.stack([a, a[::-1], np.roll(a, 3, 0)]) for a in (X, WEIGHTS, IDS))
    y = jax.jit(jax.vmap(run, in_axes=(0, None, None, 0, 0)))(xs, w13, w2, weights, ids)
    whole = expected()
    assert error(y, np.stack([whole, whole[::-1], np.roll(whole, 3, 0)])) <= 1e-5
    # The same tokens as leading axes need no vmap.
    assert error(jax.jit(run)(xs, w13, w2, weights, ids), y) <= 1e-5


@functools.cache
def layers(recipe="int4_fp8:group=8"):
    """Three layers: another one's, the one that ``expected`` has, and another."""
    return tuple(jax.tree.map(lambda leaf: jnp.stack([leaf[::-1], leaf, leaf[::-1]]), w) for w in quantized(recipe))


@each_implementation
def test_vmap_and_scan_over_layers(implementation):
    w13, w2 = layers()

    def layer(x, i):
        return jmoe.fused_moe(x, w13, w2, WEIGHTS, IDS, layer=i, implementation=implementation)

    y = jax.jit(jax.vmap(layer, in_axes=(None, 0)))(X, jnp.arange(3))
    assert error(y[1], expected()) <= 1e-5
    np.testing.assert_array_equal(y[0], y[2])
    last, each = jax.jit(lambda x: jax.lax.scan(lambda x, i: (x, layer(x, i)), x, jnp.arange(3)))(X)
    assert error(each, y) <= 1e-5
    np.testing.assert_array_equal(last, X)
    # Experts' weights with a batch of their own.
    stacked = jax.jit(jax.vmap(lambda w13, w2: jmoe.fused_moe(X, w13, w2, WEIGHTS, IDS, implementation=implementation)))
    assert error(stacked(w13, w2), y) <= 1e-5


@each_implementation
@pytest.mark.parametrize("recipe", ["fp8_block:block=8", "nvfp4_w4a16"])
def test_a_layer_of_stacked_linears(recipe, implementation):
    w = jmoe.quantize(W13.reshape(EXPERTS, -1, HIDDEN), recipe)
    run = jax.jit(lambda i: jmoe.linear(X, w, layer=i, implementation=implementation))
    for i in (0, 5):
        alone = jmoe.linear(X, jax.tree.map(lambda leaf, i=i: leaf[i], w), implementation="reference")
        assert error(run(i), alone) <= 1e-5


def mesh():
    return jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))


@each_implementation
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_tokens(implementation, check_vma):
    w13, w2 = quantized()

    @functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=(P("x"), P(), P(), P("x"), P("x")), out_specs=P("x"), check_vma=check_vma
    )
    def run(x, w13, w2, weights, ids):
        return jmoe.fused_moe(x, w13, w2, weights, ids, implementation=implementation)

    assert error(jax.jit(run)(X, w13, w2, WEIGHTS, IDS), expected()) <= 1e-5


def expert_parallel(implementation, check_vma=True):
    """Two experts a rank, an expert map for each, and a sum over ranks."""
    local = EXPERTS // 4

    @functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=(P(), P("x"), P("x"), P(), P()), out_specs=P(), check_vma=check_vma
    )
    def run(x, w13, w2, weights, ids):
        slot = jnp.arange(EXPERTS) - local * jax.lax.axis_index("x")
        expert_map = jnp.where((slot >= 0) & (slot < local), slot, -1)
        y = jmoe.fused_moe(x, w13, w2, weights, ids, expert_map=expert_map, implementation=implementation)
        return jax.lax.psum(y, "x")

    return run


@each_implementation
def test_shard_map_over_experts(implementation):
    w13, w2 = quantized()
    assert error(jax.jit(expert_parallel(implementation))(X, w13, w2, WEIGHTS, IDS), expected()) <= 1e-5
    unchecked = expert_parallel(implementation, check_vma=False)
    assert error(jax.jit(unchecked)(X, w13, w2, WEIGHTS, IDS), expected()) <= 1e-5


@each_implementation
def test_gradients_through_shard_map(implementation):
    args = (X, W13, W2, WEIGHTS)
    run = expert_parallel(implementation)
    got = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(run(*a, IDS))), argnums=range(4)))(*args)
    whole = functools.partial(jmoe.fused_moe, implementation="reference")
    wanted = jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(whole(*a, IDS))), argnums=range(4)))(*args)
    for ours, theirs in zip(got, wanted, strict=True):
        assert error(ours, theirs) <= 1e-5


@each_implementation
def test_batched_experts_under_shard_map(implementation):
    w13, w2 = quantized("fp8_channel")
    rows = np.stack([X * (e + 1) for e in range(EXPERTS)])
    run = jax.shard_map(
        functools.partial(jmoe.batched_experts, implementation=implementation),
        mesh=mesh(),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    whole = jmoe.batched_experts(rows, COUNTS, w13, w2, implementation="reference")
    assert error(jax.jit(run)(rows, COUNTS, w13, w2), whole) <= 1e-5


@each_implementation
def test_a_linear_in_pieces_under_shard_map(implementation, monkeypatch):
    w = jmoe.quantize(normal(5, 300, HIDDEN), "fp8_block:block=32")
    whole = jmoe.linear(X, w, implementation="reference")
    monkeypatch.setattr(xla, "_PIECE_BYTES", 64 * HIDDEN * 4)
    run = jax.shard_map(
        functools.partial(jmoe.linear, implementation=implementation),
        mesh=mesh(),
        in_specs=(P("x"), P()),
        out_specs=P("x"),
    )
    assert error(jax.jit(run)(X, w), whole) <= 1e-5


def test_sharded_arguments_are_partitioned_by_xla():
    # Tensor parallel: I is sharded, and XLA adds up the parts; the plan says that it partitions.
    w13, w2 = quantized()
    place = functools.partial(jax.sharding.NamedSharding, mesh())
    sharded13 = jax.tree.map(lambda leaf: jax.device_put(leaf, place(P(None, None, "x"))), w13)
    run = jax.jit(lambda x, w13, w2: jmoe.fused_moe(x, w13, w2, WEIGHTS, IDS, implementation="xla"))
    assert error(run(X, sharded13, w2), expected()) <= 1e-5


@each_implementation
@pytest.mark.parametrize("x64", [False, True])
def test_x64_and_strict_promotion_change_nothing(implementation, x64):
    w13, w2 = quantized()
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        y = jmoe.fused_moe(
            X, w13, w2, WEIGHTS, IDS.astype(np.int64 if x64 else np.int32), implementation=implementation
        )
        assert y.dtype == jnp.float32
        assert error(y, expected()) <= 1e-5
        stacked13, stacked2 = layers()
        y = jmoe.fused_moe(X, stacked13, stacked2, WEIGHTS, IDS, layer=1, implementation=implementation)
        assert error(y, expected()) <= 1e-5
        gradient = jax.grad(lambda x: jnp.sum(jmoe.fused_moe(x, w13, w2, WEIGHTS, IDS, implementation=implementation)))(
            X
        )
        assert gradient.dtype == jnp.float32
        rows = np.stack([X] * EXPERTS)
        assert jmoe.batched_experts(rows, COUNTS, w13, w2, implementation=implementation).dtype == jnp.float32
        first = jax.tree.map(lambda leaf: leaf[0, 0], w13)
        y = jmoe.linear(X.astype(jnp.bfloat16), first, bias=X[0, :INTERMEDIATE], implementation=implementation)
        assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize("x64", [False, True])
def test_x64_and_strict_promotion_in_pieces_and_16_bits(x64, monkeypatch):
    monkeypatch.setattr(xla, "_PIECE_BYTES", 64 * HIDDEN * 2)
    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"), jmoe.config(device="h100"):
        w = jmoe.quantize(jnp.asarray(normal(5, 300, HIDDEN)), "int4:group=8,zero_point")
        y = jmoe.linear(X.astype(jnp.bfloat16), w, implementation="xla")
    assert error(y, X @ np.asarray(w.dequantize()).T) <= 6e-3  # x, w and y in bfloat16


@each_implementation
def test_eval_shape_needs_no_values(implementation):
    def shapes(tree):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), tree)

    w13, w2 = quantized()
    run = functools.partial(jmoe.fused_moe, implementation=implementation)
    out = jax.eval_shape(run, *shapes((X.astype(jnp.bfloat16), w13, w2, WEIGHTS, IDS)))
    assert (out.shape, out.dtype) == (X.shape, jnp.bfloat16)
    run = functools.partial(jmoe.batched_experts, preferred_element_type="float32", implementation=implementation)
    out = jax.eval_shape(run, *shapes((np.stack([X] * EXPERTS).astype(jnp.bfloat16), COUNTS, w13, w2)))
    assert (out.shape, out.dtype) == ((EXPERTS, *X.shape), jnp.float32)


@each_implementation
def test_a_donated_input(implementation):
    w13, w2 = quantized()
    run = jax.jit(lambda x: jmoe.fused_moe(x, w13, w2, WEIGHTS, IDS, implementation=implementation), donate_argnums=0)
    x = jnp.array(X)
    assert error(run(x), expected()) <= 1e-5
    assert x.is_deleted()
