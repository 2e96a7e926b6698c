"""Quantized models through Orbax: saved, and restored into a model that was made without memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jmoe
from jmoe.nn import FusedMoE, Linear, quantize_model

ocp = pytest.importorskip("orbax.checkpoint")


class Model(nnx.Module):
    def __init__(self, recipes=("bf16", "bf16"), sharding=None, rngs=None):
        where = {} if sharding is None else {"sharding": sharding}
        self.dense = Linear(64, 64, use_bias=True, recipe=recipes[0], rngs=rngs)
        routing = jmoe.Routing(top_k=2)
        self.moe = FusedMoE(64, 32, 4, routing, recipe=recipes[1], rngs=rngs, **where)

    def __call__(self, x):
        return self.moe(self.dense(x))


def saved(tmp_path, recipes):
    model = Model(rngs=nnx.Rngs(0))
    quantize_model(model, [("dense", recipes[0]), ("moe", recipes[1])])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.as_pure(nnx.state(model)))
    return model


def restored(tmp_path, model, mesh=None):
    """``model``, abstract, with the values that were saved; on a mesh each in the sharding that it names."""
    graphdef, state = nnx.split(model)
    abstract = nnx.as_pure(state)
    if mesh is not None:
        where = nnx.as_pure(nnx.get_named_sharding(state, mesh))
        abstract = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), abstract, where)
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.replace_by_pure_dict(state, checkpointer.restore(tmp_path / "model", abstract))
    return nnx.merge(graphdef, state)


def assert_equal(again, model):
    for (path, mine), (_, theirs) in zip(
        nnx.to_flat_state(nnx.state(again)), nnx.to_flat_state(nnx.state(model)), strict=True
    ):
        assert mine.get_value().dtype == theirs.get_value().dtype, path
        np.testing.assert_array_equal(mine.get_value(), theirs.get_value(), err_msg=str(path))


@pytest.mark.parametrize("recipes", [("fp8_block:block=32", "nvfp4_w4a16"), ("int4:group=32,zero_point", "mxfp4")])
def test_a_quantized_model_comes_back_bit_by_bit(tmp_path, recipes):
    model = saved(tmp_path, recipes)
    again = restored(tmp_path, nnx.eval_shape(lambda: Model(recipes)))
    assert [again.dense.recipe.name, again.moe.recipe.name] == [model.dense.recipe.name, model.moe.recipe.name]
    assert_equal(again, model)
    x = jax.random.normal(jax.random.key(1), (3, 64), jnp.bfloat16)
    np.testing.assert_array_equal(again(x), model(x))


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_a_quantized_model_comes_back_in_the_sharding_of_its_metadata(tmp_path):
    recipes = ("int8", "mxfp4")
    model = saved(tmp_path, recipes)
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        again = restored(tmp_path, nnx.eval_shape(lambda: Model(recipes, sharding=("expert", None, None))), mesh)
    assert_equal(again, model)
    for name in ("w13", "w13_scale", "w2", "w2_scale"):
        shards = getattr(again.moe, name).get_value().addressable_shards
        assert [shard.data.shape[0] for shard in shards] == [1, 1, 1, 1]


def test_weights_packed_for_a_device_come_back_into_a_model_made_for_it(tmp_path):
    recipes = ("mxfp4_a8", "int4_fp8")
    with jmoe.config(device="h200"):
        model = saved(tmp_path, recipes)
        again = restored(tmp_path, nnx.eval_shape(lambda: Model(recipes)))
    assert {w.layout.name for w in (again.dense.qweight, again.moe.qw13)} == {"packed_e4m3", "packed_bfloat16"}
    assert_equal(again, model)
    x = jnp.ones((3, 64), jnp.bfloat16)
    np.testing.assert_array_equal(again(x), model(x))
