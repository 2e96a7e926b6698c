"""jmoe.nn.Linear: variables, formats, and agreement with the operation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmoe
from jmoe.nn import Linear, QuantizedParam
from jmoe.nn.param import assign


def dense(n=24, k=64, seed=0):
    return jax.random.normal(jax.random.key(seed), (n, k), jnp.float32)


def inputs(k=64, seed=1):
    return jax.random.normal(jax.random.key(seed), (3, 5, k), jnp.float32)


def shapes(module):
    return jax.tree.map(lambda x: (x.shape, x.dtype), nnx.to_pure_dict(nnx.state(module)))


def test_dense_layer_is_x_w_transposed_plus_bias():
    layer = Linear.from_dense(jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), jnp.asarray([10.0, 20.0, 30.0]))
    assert np.asarray(layer(jnp.asarray([1.0, 1.0]))).tolist() == [13.0, 27.0, 41.0]


def test_activation_is_applied_after_the_bias():
    layer = Linear.from_dense(jnp.asarray([[1.0], [1.0]]), jnp.asarray([-3.0, 1.0]), activation="relu2")
    assert np.asarray(layer(jnp.asarray([1.0]))).tolist() == [0.0, 4.0]


@pytest.mark.parametrize("recipe", ["fp8_block", "int4:group=16,zero_point", "nvfp4_w4a16", "mxfp4_a8"])
def test_quantized_layer_is_the_operation_on_the_quantized_weight(recipe):
    w, x, bias = dense(), inputs(), jnp.arange(24.0)
    layer = Linear.from_dense(w, bias, recipe=recipe)
    expected = jmoe.linear(x, jmoe.quantize(w, recipe), bias=bias)
    np.testing.assert_array_equal(layer(x), expected)
    assert layer.recipe == jmoe.recipe(recipe)


def test_variables_are_named_as_in_checkpoints_and_absent_ones_are_none():
    layer = Linear.from_dense(dense(24, 63), recipe="int4:group=32,zero_point")
    assert shapes(layer) == {
        "weight": ((24, 32), jnp.uint8),
        "weight_scale": ((24, 2), jnp.float32),
        "weight_zero_point": ((24, 2), jnp.uint8),
    }
    assert layer.weight_global_scale is None
    assert layer.weight_input_scale is None
    assert layer.bias is None
    assert all(isinstance(v, QuantizedParam) for _, v in nnx.to_flat_state(nnx.state(layer)))
    assert layer.qweight.shape == (24, 63)


def test_a_dense_weight_trains_and_a_quantized_one_has_only_its_bias_to_train():
    x = inputs()

    def loss(layer):
        return jnp.sum(layer(x) ** 2)

    layer = Linear.from_dense(dense(), jnp.zeros((24,)))
    gradient = nnx.grad(loss)(layer)
    assert set(gradient) == {"weight", "bias"}
    layer.set_weight(jmoe.quantize(dense(), "fp8_channel"))
    gradient = nnx.grad(loss)(layer)
    assert set(gradient) == {"bias"}
    expected = 2 * jnp.sum(layer(x), axis=(0, 1))
    np.testing.assert_allclose(gradient["bias"].get_value(), expected, rtol=1e-5)


def test_an_optimizer_step_changes_the_bias_and_leaves_the_codes():
    layer = Linear.from_dense(dense(), jnp.zeros((24,)), recipe="int8_w8a16")
    before = layer.weight.get_value()
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.update(layer, nnx.grad(lambda m: jnp.sum(m(inputs())))(layer))
    np.testing.assert_allclose(layer.bias.get_value(), -1.5, rtol=1e-6)  # 15 rows, a gradient of 15, a rate of 0.1
    assert layer.weight.get_value() is before


@pytest.mark.parametrize("recipe", jmoe.RECIPES)
def test_an_empty_layer_has_the_shapes_of_a_filled_one_without_memory(recipe):
    how = jmoe.recipe(recipe)
    scale = 0.5 if how.input is not None and how.input.static else None
    filled = Linear.from_dense(dense(23, 37).astype(jnp.bfloat16), recipe=recipe, input_scale=scale)
    abstract = nnx.eval_shape(lambda: Linear(37, 23, recipe=recipe))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(nnx.state(abstract)))
    assert shapes(abstract) == shapes(filled)
    assert nnx.graphdef(abstract) == nnx.graphdef(filled)


def test_without_rngs_all_is_zero_and_with_them_the_variance_is_that_of_lecun():
    x = inputs(256)
    assert not np.any(np.asarray(Linear(256, 512, recipe="int4", use_bias=True)(x)))
    layer = Linear(256, 512, recipe="int8_w8a16", rngs=nnx.Rngs(0))
    # lecun_normal: variance 1 / fan_in.
    assert float(jnp.var(layer.qweight.dequantize())) == pytest.approx(1 / 256, rel=0.05)


def test_dtype_casts_x_and_the_result_follows_it():
    layer = Linear.from_dense(dense(), dtype="bfloat16")
    assert layer(inputs()).dtype == jnp.bfloat16
    layer = Linear.from_dense(dense(), dtype="bfloat16", preferred_element_type="float32")
    assert layer(inputs()).dtype == jnp.float32
    assert Linear.from_dense(dense())(inputs()).dtype == jnp.float32


def test_a_static_recipe_takes_its_input_scale_as_a_variable():
    layer = Linear.from_dense(dense(), recipe="fp8_tensor_static", input_scale=0.01)
    assert layer.weight_input_scale.get_value() == jnp.float32(0.01)
    expected = jmoe.linear(inputs(), jmoe.quantize(dense(), "fp8_tensor_static"), input_scale=0.01)
    np.testing.assert_array_equal(layer(inputs()), expected)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), 1e-45])
def test_an_input_scale_that_is_none_is_refused_by_name(scale):
    with pytest.raises(ValueError, match="weight_input_scale has the value"):
        Linear.from_dense(dense(), recipe="fp8_tensor_static", input_scale=scale)


def test_a_missing_or_unwanted_input_scale_is_refused():
    with pytest.raises(ValueError, match="weight_input_scale is missing: recipe 'nvfp4' needs it"):
        Linear.from_dense(dense(), recipe="nvfp4")
    with pytest.raises(ValueError, match="weight_input_scale is given, but recipe 'int8'"):
        Linear.from_dense(dense(), recipe="int8", input_scale=1.0)


def test_set_weight_changes_the_format_in_place_and_refuses_other_shapes():
    layer = Linear.from_dense(dense(), recipe="fp8_block")
    layer.set_weight(jmoe.quantize(dense(), "int4:group=32"))
    assert layer.recipe == jmoe.recipe("int4:group=32")
    with pytest.raises(ValueError, match=r"weight has shape \(64, 24\), but this layer's is \(out, in\) = \(24, 64\)"):
        layer.set_weight(dense(64, 24))
    with pytest.raises(ValueError, match=r"weight has shape \(64,\), but it is \(out, in\)"):
        Linear.from_dense(jnp.ones((64,)))
    with pytest.raises(ValueError, match=r"bias has shape \(64,\), but this layer's is \(24,\)"):
        layer.set_bias(jnp.zeros((64,)))


def test_an_empty_layer_is_filled_variable_by_variable():
    q = jmoe.quantize(dense(), "mxfp4")
    layer = nnx.eval_shape(lambda: Linear(64, 24, recipe="mxfp4"))
    assign(layer, "weight", q.data)
    assign(layer, "weight_scale", q.scale)
    np.testing.assert_array_equal(layer.qweight.dequantize(), q.dequantize())
    with pytest.raises(ValueError, match=r"weight_scale of Linear has shape \(24, 2\), not \(2, 24\)"):
        assign(layer, "weight_scale", q.scale.T)
    with pytest.raises(ValueError, match="Linear has no variable 'weight_zero_point'"):
        assign(layer, "weight_zero_point", q.scale)


def test_it_works_under_jit_vmap_strict_promotion_and_x64():
    layer, x = Linear.from_dense(dense(), jnp.ones((24,)), recipe="fp8_block"), inputs()
    expected = layer(x)
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(layer, x), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(jax.vmap(layer)(x), expected, rtol=1e-5, atol=1e-5)
    with jax.enable_x64(True):
        assert layer(x).dtype == jnp.float32
        assert shapes(Linear(64, 24, recipe="nvfp4")) == shapes(
            Linear.from_dense(dense(), recipe="nvfp4", input_scale=1)
        )


def test_nnx_vmap_creates_stacked_layers_that_apply_one_by_one():
    @nnx.vmap
    def create(key):
        return Linear(64, 24, recipe="fp8_channel", rngs=nnx.Rngs(key))

    stacked = create(jax.random.split(jax.random.key(0), 3))
    assert stacked.weight.shape == (3, 24, 64)
    x = jax.random.normal(jax.random.key(1), (3, 2, 64))
    y = nnx.vmap(lambda m, x: m(x))(stacked, x)
    third = Linear.from_quantized(jax.tree.map(lambda leaf: leaf[2], stacked.qweight))
    np.testing.assert_allclose(y[2], third(x[2]), rtol=1e-6)


def test_linen_bridge_keeps_codes_out_of_params():
    model = nnx.bridge.to_linen(Linear, 64, 24, use_bias=True, recipe="int8_w8a16")
    y, variables = model.init_with_output(jax.random.key(0), inputs())
    assert y.shape == (3, 5, 24)
    assert set(variables["params"]) == {"bias"}
    assert set(variables["quantized_params"]) == {"weight", "weight_scale"}
    np.testing.assert_array_equal(model.apply(variables, inputs()), y)


def test_sharding_names_one_axis_each():
    with pytest.raises(
        ValueError, match=r"sharding=\('model',\) must name one mesh axis, or None, for each of \(out, in\)"
    ):
        Linear(8, 8, sharding=("model",))
