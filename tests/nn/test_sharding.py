"""Sharding metadata of weights and scales, in Flax's form, and modules on meshes of four simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jmoe
from jmoe.nn import FusedMoE, Linear, quantize_model, scan_layers, stack_layers

ROUTING = jmoe.Routing(top_k=2, renormalize=True)

# A process of its own may have fewer devices; tests/conftest.py asks for four.
pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")


def mesh(kind=AxisType.Auto, shape=(4,), names=("model",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def specs(module):
    """Partition specs by name; trailing Nones and absent variables left out."""
    found = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(module)))
    return {".".join(map(str, path)): tuple(v.get_value()) for path, v in found}


def create(make):
    return nnx.jit(make)()


def on_one_device(module):
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state))


def assert_placed(module):
    """Every variable with sharding metadata lies as they say."""
    shardings = nnx.get_named_sharding(nnx.state(module), jax.sharding.get_mesh())
    for (path, v), (_, s) in zip(nnx.to_flat_state(nnx.state(module)), nnx.to_flat_state(shardings), strict=True):
        if any(s.get_value().spec):
            assert v.get_value().sharding.is_equivalent_to(s.get_value(), v.get_value().ndim), path


@pytest.mark.parametrize(
    "recipe, sharding, expected",
    [
        ("fp8_block:block=64", ("model", None), {"weight": ("model", None), "weight_scale": ("model", None)}),
        ("fp8_block:block=64", (None, "model"), {"weight": (None, "model"), "weight_scale": (None, "model")}),
        # One scale over all of K, or of the tensor: extent 1 is not sharded.
        ("fp8_channel", ("model", None), {"weight": ("model", None), "weight_scale": ("model", None)}),
        ("fp8_channel", (None, "model"), {"weight": (None, "model"), "weight_scale": ()}),
        ("fp8_tensor", ("model", None), {"weight": ("model", None), "weight_scale": ()}),
        # Two blocks of 128 do not lie on four devices, though 256 rows do.
        ("fp8_block", ("model", None), {"weight": ("model", None), "weight_scale": ()}),
        (
            "int4:group=32,zero_point",
            (None, "model"),
            dict.fromkeys(("weight", "weight_scale", "weight_zero_point"), (None, "model")),
        ),
        (
            "nvfp4_w4a16",
            ("model", None),
            {"weight": ("model", None), "weight_scale": ("model", None), "weight_global_scale": ()},
        ),
    ],
)
def test_scales_are_sharded_with_their_weight_where_every_shard_has_whole_blocks(recipe, sharding, expected):
    with jax.set_mesh(mesh()):
        layer = create(lambda: Linear(256, 256, recipe=recipe, sharding=sharding))
        assert specs(layer) == expected
        assert_placed(layer)


def test_a_ragged_last_block_is_not_sharded_even_where_the_grid_divides():
    with jax.set_mesh(mesh(shape=(2,))):
        layer = create(lambda: Linear(64, 96, recipe="fp8_block:block=64", sharding=("model", None)))
        # 96 rows on two devices are 48 each, and the first block of 64 lies on both.
        assert specs(layer) == {"weight": ("model", None), "weight_scale": ()}


def test_a_layer_on_a_mesh_computes_what_it_computes_without():
    w = jax.random.normal(jax.random.key(0), (256, 128))
    x, bias = jax.random.normal(jax.random.key(1), (6, 128)), jnp.arange(256.0)
    expected = Linear.from_dense(w, bias, recipe="fp8_block:block=32")(x)
    for kind in (AxisType.Auto, AxisType.Explicit):
        for sharding in (("model", None), (None, "model")):
            with jax.set_mesh(mesh(kind)):
                q = jmoe.quantize(w, "fp8_block:block=32")
                layer = Linear.from_quantized(q, bias, sharding=sharding)
                assert_placed(layer)
                assert len(layer.weight_scale.get_value().addressable_shards[0].data) == (2 if sharding[0] else 8)
                y = nnx.jit(lambda m, x: m(x))(layer, x)
                np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
                y = layer(x, out_sharding=PartitionSpec(None, "model"))
                assert y.sharding.spec == PartitionSpec(None, "model")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "sharding, w13, w13_scale, w2, w2_scale",
    [
        (
            ("model", None, None),
            ("model", None, None, None),
            ("model", None, None, None),
            ("model", None, None),
            ("model", None, None),
        ),
        (
            (None, "model", None),
            (None, None, "model", None),
            (None, None, "model", None),
            (None, None, "model"),
            (None, None, "model"),
        ),
    ],
)
def test_experts_or_their_intermediate_are_sharded(kind, sharding, w13, w13_scale, w2, w2_scale):
    def make():
        moe = FusedMoE(32, 128, 4, ROUTING, recipe="int4:group=32", use_bias=True, sharding=sharding, rngs=nnx.Rngs(0))
        moe.set_biases(jnp.ones((4, 2, 128)), jnp.ones((4, 32)))
        return moe

    x = jax.random.normal(jax.random.key(1), (2, 3, 32))
    with jax.set_mesh(mesh(kind)):
        moe = create(make)
        found = specs(moe)
        assert (found["w13"], found["w13_scale"], found["w2"], found["w2_scale"]) == (w13, w13_scale, w2, w2_scale)
        assert found["b13"] == w13[:3] and found["b2"] == (("model", None) if sharding[0] else ())
        assert found["router_weight"] == ()
        assert_placed(moe)
        y = nnx.jit(lambda m, x: m(x))(moe, x)
    np.testing.assert_allclose(y, on_one_device(moe)(x), rtol=1e-4, atol=1e-4)


def test_an_axis_of_extent_one_loses_its_name():
    with jax.set_mesh(mesh()):
        moe = create(lambda: FusedMoE(32, 128, 1, jmoe.Routing(top_k=1), sharding=("model", None, None)))
        assert specs(moe)["w13"] == () and specs(moe)["w2"] == ()


def test_logical_names_go_through_the_rules():
    from flax import linen

    with jax.set_mesh(mesh()), linen.logical_axis_rules((("ff", "model"),)):
        layer = create(lambda: Linear(256, 256, recipe="fp8_block", sharding=("ff", None)))
        assert specs(layer) == {"weight": ("model", None), "weight_scale": ()}
        layer = create(lambda: Linear(256, 512, recipe="fp8_block", sharding=("ff", None)))
        assert specs(layer)["weight_scale"] == ("model", None)


def test_stacked_layers_get_a_leading_none_and_scan_on_the_mesh():
    x = jax.random.normal(jax.random.key(1), (3, 64))
    make = lambda i: Linear(64, 64, recipe="int8", sharding=("model", None), rngs=nnx.Rngs(i))  # noqa: E731
    with jax.set_mesh(mesh()):
        stacked = nnx.jit(lambda: stack_layers([make(0), make(1)]))()
        assert specs(stacked) == {"weight": (None, "model", None), "weight_scale": (None, "model", None)}
        y = jax.jit(lambda m, x: scan_layers(lambda layer, x: layer(x), m, x))(stacked, x)
    first, second = (
        Linear.from_quantized(jax.tree.map(lambda leaf, i=i: leaf[i], on_one_device(stacked).qweight)) for i in range(2)
    )
    np.testing.assert_allclose(y, second(first(x)), rtol=1e-5, atol=1e-5)


def test_a_sharded_flax_model_keeps_its_sharding_when_it_is_quantized():
    class Model(nnx.Module):
        def __init__(self):
            self.up = nnx.Linear(64, 128, rngs=nnx.Rngs(0), kernel_metadata={"out_sharding": (None, "model")})

        def __call__(self, x):
            return self.up(x)

    x = jax.random.normal(jax.random.key(1), (3, 64))
    with jax.set_mesh(mesh()):
        model = create(Model)
        expected = model(x)
        quantize_model(model, [("up", "int8")])
        assert specs(model) == {"up.weight": ("model", None), "up.weight_scale": ("model", None), "up.bias": ("model",)}
        assert model.up.weight.get_value().addressable_shards[0].data.shape == (32, 64)
        assert float(jnp.linalg.norm(model(x) - expected) / jnp.linalg.norm(expected)) < 0.02


def test_as_in_flax_a_name_needs_a_mesh():
    message = r"sharding names 'model' for weight, but no mesh is in force: enter one with jax\.set_mesh, or keep names"
    with pytest.raises(ValueError, match=message):
        Linear(8, 8, sharding=("model", None))
    with nnx.use_eager_sharding(False):
        layer = Linear(8, 8, sharding=("model", None))
    assert specs(layer) == {"weight": ("model", None)}


@pytest.mark.parametrize(
    "sharding, error, message",
    [
        ("abc", TypeError, r"sharding='abc' must name one mesh axis, or None, for each of \(.*\), in a sequence"),
        (3, TypeError, r"sharding=3 must name one mesh axis, or None, for each of \(.*\), in a sequence"),
        (("model",), ValueError, r"sharding=\('model',\) must name one mesh axis, or None, for each of \(.*\)$"),
        ((1, 2, 3), TypeError, "and 1 is no name and no tuple of names"),
        ((None, ("model", 2), None), TypeError, r"and \('model', 2\) is no name and no tuple of names"),
    ],
)
def test_a_sharding_is_names(sharding, error, message):
    with pytest.raises(error, match=message):
        FusedMoE(8, 8, 4, ROUTING, sharding=sharding)


def test_a_sharding_of_a_linear_is_two_names():
    for sharding in ((1, 2), "abc", "ab"):
        with pytest.raises(TypeError, match=r"must name one mesh axis, or None, for each of \(out, in\)"):
            Linear(8, 8, sharding=sharding)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: Linear(64, 30, sharding=("model", None)),
            r"weight has N = 30, no multiple of the 4 devices along model ",
        ),
        (
            lambda: Linear(62, 32, sharding=(None, "model")),
            r"weight has K = 62, no multiple of the 4 devices along model ",
        ),
        (
            lambda: Linear(62, 32, sharding=(None, ("data", "model"))),
            r"weight has K = 62, no multiple of the 4 devices along data, model that sharding splits it over",
        ),
        (
            lambda: Linear(20, 32, recipe="int4:group=1", sharding=(None, "model")),
            r"weight has K = 20 in 10 bytes of two codes each, no multiple of the 4 devices along model that",
        ),
        (
            lambda: Linear(64, 32, sharding=("tensor", None)),
            "'tensor' is no axis of the mesh in force; it has data, model",
        ),
        (lambda: Linear(64, 32, sharding=("model", "model")), "names the mesh axis 'model' twice for weight"),
        (
            lambda: Linear.from_dense(jnp.ones((30, 64)), recipe="int8", sharding=("model", None)),
            r"weight has N = 30, no multiple of the 4 devices along model",
        ),
        (
            lambda: FusedMoE(32, 64, 6, ROUTING, sharding=("model", None, None)),
            r"w13 has E = 6, no multiple of the 4 devices along model that sharding splits it over; spare slots",
        ),
        (
            lambda: FusedMoE(32, 62, 4, ROUTING, sharding=(None, "model", None)),
            r"w13 has I = 62, no multiple of the 4 devices along model that sharding splits it over",
        ),
        (
            lambda: FusedMoE(32, 20, 4, ROUTING, recipe="int4:group=1", sharding=(None, "model", None)),
            r"w2 has I = 20 in 10 bytes of two codes each, no multiple of the 4 devices along model that",
        ),
        (
            lambda: FusedMoE(30, 64, 4, ROUTING, sharding=(None, None, "model")),
            r"w13 has H = 30, no multiple of the 4 devices along model that sharding splits it over",
        ),
        (
            lambda: FusedMoE(32, 64, 4, ROUTING, sharding=("model", "model", None)),
            "sharding names the mesh axis 'model' twice for w13, but it splits one axis",
        ),
    ],
)
def test_a_mesh_that_cannot_hold_a_weight_is_named_with_what_does_not_fit(make, message, kind):
    with jax.set_mesh(mesh(kind, (1, 4), ("data", "model"))):
        for build in (make, lambda: create(make)):
            with pytest.raises(ValueError, match=message):
                build()


def test_a_logical_name_without_a_rule_is_no_axis_and_two_may_not_come_to_one():
    from flax import linen

    with jax.set_mesh(mesh()), linen.logical_axis_rules((("ff", "model"), ("embed", None), ("heads", "model"))):
        with pytest.raises(ValueError, match="'vocab' is no axis of the mesh in force; it has model"):
            Linear(64, 32, sharding=("vocab", None))
        with pytest.raises(ValueError, match="the mesh axis 'model' twice"):
            Linear(64, 32, sharding=("ff", "heads"))
        assert specs(Linear(63, 32, sharding=("ff", "embed"))) == {"weight": ("model", None)}


@pytest.mark.parametrize("sharding", [(None, "model"), ("model", None)])
def test_a_layer_refuses_groups_of_its_input_on_several_devices_and_takes_its_output(sharding):
    w, x = (
        jmoe.quantize(jax.random.normal(jax.random.key(0), (64, 64)), "mxfp8"),
        jnp.linspace(-1, 1, 128).reshape(2, 64),
    )
    with jax.set_mesh(mesh()):
        layer = Linear.from_quantized(w, sharding=sharding)
        if sharding[1]:
            with pytest.raises(
                ValueError, match=r"every 32 of K, and the part of 16 that each of 4 devices along model"
            ):
                layer(x)
        else:
            np.testing.assert_allclose(layer(x), jmoe.linear(x, w), rtol=1e-5, atol=1e-5)


def chosen(call, *args, device="h100"):
    """(operation, implementation) pairs that a call would run there."""
    entries = jmoe.explain(call, *args, device=device).entries
    return [(op, selection.implementation) for op, selection in entries]


BY_EXPERT, BY_COLUMN, BY_BOTH = ("model", None, None), (None, "model", None), ("data", "model", None)


@pytest.mark.parametrize(
    "kind, recipe, sharding",
    [  # every recipe with every sharding, and every kind of mesh with either
        (AxisType.Auto, "fp8_tensor", BY_EXPERT),
        (AxisType.Auto, "fp8_block:block=16", BY_EXPERT),
        (AxisType.Explicit, "bf16", BY_EXPERT),
        (AxisType.Explicit, "int8", BY_EXPERT),
        (AxisType.Auto, "fp8_tensor", BY_COLUMN),
        (AxisType.Auto, "int8", BY_COLUMN),
        (AxisType.Explicit, "bf16", BY_COLUMN),
        (AxisType.Explicit, "fp8_block:block=16", BY_COLUMN),
        (AxisType.Auto, "bf16", BY_BOTH),
        (AxisType.Auto, "fp8_block:block=16", BY_BOTH),
        (AxisType.Explicit, "fp8_tensor", BY_BOTH),
        (AxisType.Explicit, "int8", BY_BOTH),
    ],
)
def test_a_moe_computes_with_its_parts_as_one_device_does(kind, recipe, sharding):
    def make():
        moe = FusedMoE(32, 64, 4, ROUTING, recipe=recipe, use_bias=True, sharding=sharding, rngs=nnx.Rngs(0))
        moe.set_biases(jnp.ones((4, 2, 64)), jnp.ones((4, 32)))
        return moe

    x = jax.random.normal(jax.random.key(1), (4, 3, 32)).at[1, 1].multiply(20)
    with jax.set_mesh(mesh(kind, (2, 2), ("data", "model"))):
        moe = create(make)
        spread = jax.device_put(x, PartitionSpec("data"))
        y = nnx.jit(lambda m, x: m(x))(moe, spread)
        slope = nnx.jit(lambda m, x: jax.grad(lambda x: jnp.sum(m(x) ** 2))(x))(moe, spread)
        assert all(not op.mesh for op, _ in chosen(moe, spread))
    one = on_one_device(moe)
    np.testing.assert_allclose(y, one(x), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(slope, jax.grad(lambda x: jnp.sum(one(x) ** 2))(x), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "sharding, recipe", [(("model", None), "fp8_channel"), ((None, "model"), "fp8_block:block=32")]
)
def test_kernels_see_the_parts_of_one_device(kind, sharding, recipe):
    x = jax.random.normal(jax.random.key(1), (4, 128))
    with jax.set_mesh(mesh(kind, (2, 2), ("data", "model"))):
        layer = create(lambda: Linear(128, 256, recipe=recipe, sharding=sharding, rngs=nnx.Rngs(0)))
        spread = jax.device_put(x, PartitionSpec("data"))
        ((op, implementation),) = chosen(layer, spread)
        assert implementation == "triton"
        n, k = (128 if name else whole for name, whole in zip(sharding, (256, 128), strict=True))
        k = 64 if sharding[1] else k
        assert (op.tokens, op.features, op.hidden, op.mesh) == (2, n, k, ())
        with jmoe.config(device="h100"):  # chosen for it, and lowered for what is here
            layer.implementation = "triton"
            y = nnx.jit(lambda m, x: m(x))(layer, spread)
    layer = on_one_device(layer)
    layer.implementation = None
    np.testing.assert_allclose(y, layer(x), rtol=1e-4, atol=1e-4)


def test_a_module_without_metadata_is_left_to_xla_and_kernels_name_the_axis():
    with jax.set_mesh(mesh()):
        layer = Linear(64, 64, recipe="fp8_channel", rngs=nnx.Rngs(0))
        x = jnp.ones((4, 64))
        assert [implementation for _, implementation in chosen(layer, x)] == ["xla"]
        layer.implementation = "triton"
        with pytest.raises(NotImplementedError, match=r"on a mesh \(model=4\)"):
            chosen(layer, x)


def test_a_placement_that_splits_blocks_is_refused():
    x = jnp.ones((4, 128))
    with jax.set_mesh(mesh()):
        layer = create(lambda: Linear(128, 256, recipe="fp8_block", sharding=("model", None)))
        message = r"w has a scale for every 128 of N, and the part of 64 that each of 4 devices along model has"
        with pytest.raises(ValueError, match=message):
            layer(x)


def test_experts_elsewhere_are_found_through_the_map_of_the_module():
    x = jax.random.normal(jax.random.key(1), (5, 32))
    maps = [2, 0, 3, 1]
    with jax.set_mesh(mesh()):
        make = lambda: FusedMoE(  # noqa: E731
            32, 16, 4, ROUTING, expert_map=maps, sharding=("model", None, None), rngs=nnx.Rngs(0)
        )
        moe = create(make)
        y = nnx.jit(lambda m, x: m(x))(moe, x)
    np.testing.assert_allclose(y, on_one_device(moe)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_stacked_layers_of_experts_scan_over_their_parts(kind):
    def make(seed):
        return FusedMoE(32, 64, 4, ROUTING, recipe="int8", sharding=("data", "model", None), rngs=nnx.Rngs(seed))

    x = jax.random.normal(jax.random.key(1), (4, 32))
    with jax.set_mesh(mesh(kind, (2, 2), ("data", "model"))):
        groups = nnx.jit(lambda: stack_layers([stack_layers([make(0), make(1)]), stack_layers([make(2), make(3)])]))()
        run = lambda m, x: scan_layers(  # noqa: E731
            lambda group, x: scan_layers(lambda layer, x: x + layer(x), group, x), m, x
        )
        y = nnx.jit(run)(groups, x)
    np.testing.assert_allclose(y, run(on_one_device(groups), x), rtol=1e-4, atol=1e-4)


def test_layers_over_several_axes_compute_with_their_parts():
    def make():
        model = nnx.Dict(
            up=nnx.LinearGeneral(
                (4, 16),
                (8, 16),
                axis=(-2, -1),
                rngs=nnx.Rngs(0),
                kernel_metadata={"out_sharding": (None, None, "model")},
            )
        )
        quantize_model(model, [("up", "int8")])
        return model

    x = jax.random.normal(jax.random.key(1), (3, 4, 16))
    with jax.set_mesh(mesh()):
        model = create(make)
        ((op, _),) = chosen(model.up, x)
        assert (op.features, op.mesh) == (32, ())
        y = nnx.jit(lambda m, x: m(x))(model.up, x)
    np.testing.assert_allclose(y, on_one_device(model).up(x), rtol=1e-5, atol=1e-5)


def test_no_weight_of_a_module_is_gathered():
    x = jax.ShapeDtypeStruct((4, 32), jnp.float32)
    with jax.set_mesh(mesh(shape=(2, 2), names=("data", "model"))):
        moe = create(lambda: FusedMoE(32, 64, 4, ROUTING, recipe="int8", sharding=("data", "model", None)))
        text = jax.jit(lambda m, x: m(x)).lower(moe, x).compile().as_text()
    assert "all-reduce" in text and "all-gather" not in text and "all-to-all" not in text


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_tokens_on_the_axis_of_the_experts_are_brought_together_and_the_shared_expert_is_split_too(kind):
    def make():
        shared = Linear(32, 32, recipe="int8", sharding=("model", None), rngs=nnx.Rngs(1))
        routing = jmoe.Routing(top_k=2, n_identity=2)
        return FusedMoE(
            32, 64, 4, routing, recipe="fp8_tensor", sharding=("model", None, None), shared=shared, rngs=nnx.Rngs(0)
        )

    x = jax.random.normal(jax.random.key(1), (4, 32))
    with jax.set_mesh(mesh(kind)):
        moe = create(make)
        y = nnx.jit(lambda m, x: m(x))(moe, jax.device_put(x, PartitionSpec("model")))
    assert kind == AxisType.Auto or y.sharding.spec[0] == "model"
    np.testing.assert_allclose(y, on_one_device(moe)(x), rtol=1e-5, atol=1e-5)
