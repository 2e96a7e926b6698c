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
    with pytest.raises(ValueError, match="mesh"):
        Linear(8, 8, sharding=("model", None))
    with nnx.use_eager_sharding(False):
        layer = Linear(8, 8, sharding=("model", None))
    assert specs(layer) == {"weight": ("model", None)}
