"""Public functions on meshes with explicit axes: values as elsewhere, and results placed as the arguments were."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmoe

# A process of its own may have fewer devices; tests/conftest.py asks for four.
pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")

TOKENS, EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 4, 2, 32, 16


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, W = normal(0, 2, TOKENS, HIDDEN), normal(1, INTERMEDIATE, HIDDEN)
W13, W2 = normal(2, EXPERTS, 2, INTERMEDIATE, HIDDEN), normal(3, EXPERTS, HIDDEN, INTERMEDIATE)
LOGITS = normal(4, 2, TOKENS, EXPERTS)
ROUTING = jmoe.Routing(top_k=TOP_K, renormalize=True)
ROWS, COUNTS = normal(5, EXPERTS, TOKENS, HIDDEN), np.array([8, 0, 3, 1], np.int32)
RECIPES = ("bf16", "int4:group=8,zero_point", "fp8_block:block=8", "int8")


def mesh(kind=AxisType.Explicit, shape=(2, 2), names=("data", "model")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def put(value, *spec, on=None):
    return jax.device_put(value, NamedSharding(on or mesh(), P(*spec)))


def spec(x):
    """The mesh axes of each axis, as the array's type says."""
    axes = tuple(jax.typeof(x).sharding.spec)
    return (*axes, *(None,) * (x.ndim - len(axes)))


def quantized(w, recipe):
    return w if recipe == "bf16" else jmoe.quantize(w, recipe)


def assert_close(got, expected, limit=2e-6):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        ours, theirs = (np.asarray(a, np.float64) for a in (ours, theirs))
        assert ours.shape == theirs.shape
        assert np.linalg.norm(ours - theirs) <= limit * np.linalg.norm(theirs)


@pytest.fixture(params=["set_mesh", "arrays alone"])
def in_mesh(request):
    """With the mesh in force, and where only the arrays say that there is one."""
    if request.param == "arrays alone":
        yield mesh()
        return
    with jax.set_mesh(mesh()) as found:
        yield found


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_keeps_the_tokens_and_takes_n_from_the_weight(in_mesh, recipe):
    expected = np.asarray(jmoe.linear(X, quantized(W, recipe)))
    for x_spec, w_spec, y_spec in [
        (("data",), (), ("data", None, None)),
        ((None, "data"), ("model",), (None, "data", "model")),
        ((None, ("data", "model")), (), (None, ("data", "model"), None)),
        ((), ("model",), (None, None, "model")),
        (("data", None, "model"), (None, "model"), ("data", None, None)),  # a sum over K, on all devices
        (("data",), ("data",), ("data", None, None)),  # one axis cannot do both
    ]:
        w = quantized(put(W, *w_spec), recipe)
        for run in (jmoe.linear, jax.jit(jmoe.linear)):
            y = run(put(X, *x_spec), w)
            assert spec(y) == y_spec
            assert_close(y, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_routing_and_a_layer_of_experts_keep_the_tokens(in_mesh, recipe):
    def layer(x, logits, w13, w2):
        routed = jmoe.route(logits, ROUTING)
        return routed, jmoe.fused_moe(x, w13, w2, routed.weights, routed.ids)

    expected = layer(X, LOGITS, quantized(W13, recipe), quantized(W2, recipe))
    w13 = quantized(put(W13, None, None, "model"), recipe)
    w2 = quantized(put(W2, None, None, "model"), recipe)
    for run in (layer, jax.jit(layer)):
        routed, y = run(put(X, "data"), put(LOGITS, "data"), w13, w2)
        assert [spec(a) for a in (routed.weights, routed.ids, y)] == [("data", None, None)] * 3
        assert_close((routed, y), expected)
    by_expert = quantized(put(W13, "model"), recipe), quantized(put(W2, "model"), recipe)
    routed, y = layer(put(X, None, "data"), put(LOGITS, None, "data"), *by_expert)
    assert spec(y) == (None, "data", None)
    assert_close((routed, y), expected)


def test_batched_experts_stay_with_their_ranks(in_mesh):
    expected = jmoe.batched_experts(ROWS, COUNTS, quantized(W13, "int8"), quantized(W2, "int8"))
    w13, w2 = (quantized(put(w, "model"), "int8") for w in (W13, W2))
    y = jmoe.batched_experts(put(ROWS, "model", "data"), put(COUNTS, "model"), w13, w2)
    assert spec(y) == ("model", "data", None)
    assert_close(y, expected)


@pytest.mark.parametrize(
    "recipe, w_spec, parts",
    [
        ("int8", ("data", "model"), {"data": ("data", "model"), "scale": ("data", None)}),
        ("fp8_block:block=4", ("data", "model"), {"data": ("data", "model"), "scale": ("data", "model")}),
        # 24 rows are three blocks of 8, for two devices.
        ("fp8_block:block=8", ("data", "model"), {"data": ("data", "model"), "scale": (None, "model")}),
        # 24 rows are blocks of 16 and of 8.
        ("fp8_block:block=16", ("data", "model"), {"data": ("data", "model"), "scale": (None, "model")}),
        ("fp8_tensor", ("data", "model"), {"data": ("data", "model"), "scale": (None, None)}),
        (
            "int4:group=8,zero_point",
            ("data", "model"),
            dict.fromkeys(("data", "scale", "zero_point"), ("data", "model")),
        ),
        # Two groups of 16 do not lie on four devices; their 16 bytes do.
        ("int4:group=16", (None, ("data", "model")), {"data": (None, ("data", "model")), "scale": (None, None)}),
        (
            "nvfp4_w4a16",
            ("data", "model"),
            {"data": ("data", "model"), "scale": ("data", "model"), "global_scale": (None, None)},
        ),
    ],
)
def test_a_quantized_array_is_sharded_as_it_was_and_its_scales_with_their_blocks(in_mesh, recipe, w_spec, parts):
    w = normal(6, 24, HIDDEN)
    expected = jmoe.quantize(w, recipe)
    q = jmoe.quantize(put(w, *w_spec), recipe)
    assert {name: spec(getattr(q, name)) for name in parts} == parts
    for ours, theirs in zip(jax.tree.leaves(q), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in [
        (q.dequantize(), expected.dequantize()),
        (q.codes, expected.codes),
        (jmoe.requantize(q, "int8").data, jmoe.requantize(expected, "int8").data),
    ]:
        assert spec(ours) == w_spec
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(q.combined_scale(), expected.combined_scale())
    again = jmoe.QTensor.make(q.data, q.scale, scheme=q.scheme, global_scale=q.global_scale, zero_point=q.zero_point)
    assert jax.tree.map(spec, jax.tree.leaves(again)) == jax.tree.map(spec, jax.tree.leaves(q))


def test_an_axis_that_does_not_divide_what_is_stored_is_not_sharded(in_mesh):
    # Six 4-bit codes are three bytes, on two devices.
    q = jmoe.quantize(put(normal(7, 4, 6), None, "model"), "int4:group=2")
    assert (spec(q.data), spec(q.scale)) == ((None, None), (None, None))
    assert spec(q.dequantize()) == (None, None)


def test_blocks_are_refined_and_shards_merged_where_they_lie(in_mesh):
    q = jmoe.quantize(put(W, "data", "model"), "fp8_block:block=8")
    refined = jmoe.refine_blocks(q, (4, 4))
    assert (spec(refined.data), spec(refined.scale)) == (("data", "model"), ("data", "model"))
    merged = jmoe.merge_shards([q, jmoe.quantize(put(2 * W, "data", "model"), "fp8_block:block=8")])
    assert (spec(merged.data), spec(merged.scale)) == (("data", "model"), ("data", "model"))
    assert_close(merged.dequantize(), np.concatenate([q.dequantize(), 2 * q.dequantize()]))


def test_derivatives_and_batches(in_mesh):
    w13, w2 = (jmoe.quantize(w, "int4:group=8") for w in (W13, W2))
    routed = jmoe.route(LOGITS, ROUTING)

    def loss(x, weights, ids, w13=w13, w2=w2):
        return jnp.sum(jmoe.fused_moe(x, w13, w2, weights, ids) ** 2)

    gradient = jax.grad(loss, argnums=(0, 1))
    expected = gradient(X, routed.weights, routed.ids)
    placed = [put(a, None, "data") for a in (X, routed.weights, routed.ids)]
    sharded = functools.partial(gradient, w13=put(w13, None), w2=put(w2, None))
    got = jax.jit(sharded)(*placed)
    assert [spec(a) for a in got] == [(None, "data", None)] * 2
    assert_close(got, expected, 1e-5)
    got = jax.jit(jax.vmap(sharded))(*placed)
    assert [spec(a) for a in got] == [(None, "data", None)] * 2
    assert_close(got, expected, 1e-5)
    # The batch itself is sharded.
    got = jax.jit(jax.vmap(sharded))(*(put(a, "data") for a in (X, routed.weights, routed.ids)))
    assert [spec(a) for a in got] == [("data", None, None)] * 2
    assert_close(got, expected, 1e-5)


def test_a_shard_map_over_one_axis_leaves_the_other_explicit():
    on = mesh()
    with jax.set_mesh(on):
        w = put(W, "model", on=on)
        run = jax.shard_map(jmoe.linear, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
        y = jax.jit(run)(put(X, "data", on=on), w)
        assert spec(y) == ("data", None, "model")
        assert_close(y, jmoe.linear(X, W))


def test_explicit_axes_are_what_xla_partitions_over():
    with jax.set_mesh(mesh()):
        [(op, _)] = jmoe.explain(jmoe.linear, put(X, "data"), put(W)).entries
        assert op.mesh == (("data", 2), ("model", 2))
        with pytest.raises(NotImplementedError, match=r"inside jax\.shard_map over these axes"):
            jmoe.explain(lambda *a: jmoe.linear(*a, implementation="triton"), put(X), put(W), device="h100")


def test_two_meshes_are_named():
    other = mesh(shape=(4,), names=("x",))
    with pytest.raises(ValueError, match=r"explicit axes x=4, but .* has data=2, model=2"):
        jmoe.linear(put(X, "data"), put(W, on=other))
    with jax.set_mesh(other), pytest.raises(ValueError, match=r"explicit axes data=2, model=2, but .* has x=4"):
        jmoe.quantize(put(W, "data"), "int8")


def test_wrong_arguments_are_named_as_elsewhere():
    with jax.set_mesh(mesh()):
        with pytest.raises(ValueError, match="x has shape"):
            jmoe.linear(put(X, "data"), put(W[:, :-2]))
        with pytest.raises(TypeError, match="topk_ids"):
            jmoe.fused_moe(put(X, "data"), put(W13), put(W2), jnp.ones((2, 8, 1)), 0.5 * jnp.ones((2, 8, 1)))
