"""What modules refuse, where: at construction what they are made with, and a refused call changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmoe
from jmoe.nn import (
    FusedMoE,
    KVCache,
    Linear,
    QuantizedParam,
    calibrate,
    quantize_model,
    scan_layers,
    stack_layers,
)

E, H, I = 4, 8, 16
ROUTING = jmoe.Routing(top_k=2, renormalize=True)


def moe(**options):
    return FusedMoE(H, I, E, ROUTING, param_dtype="float32", rngs=nnx.Rngs(0), **options)


def values(module):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module)))


def assert_refused(module, call, message, error=ValueError):
    """``call`` raises and leaves ``module`` with its variables and its static attributes."""
    graphdef, before = nnx.graphdef(module), values(module)
    with pytest.raises(error, match=message):
        call()
    assert nnx.graphdef(module) == graphdef
    jax.tree.map(np.testing.assert_array_equal, values(module), before)


@pytest.mark.parametrize(
    "weight, scale, message",
    [
        ("fp8_tensor_static", None, "weight_input_scale is missing"),
        ("fp8_tensor_static", 0.0, "weight_input_scale has the value 0"),
        ("fp8_tensor_static", jnp.ones((2,)), r"weight_input_scale has shape \(2,\)"),
        ("int8", 1.0, "weight_input_scale is given, but recipe 'int8' has no given activation scale"),
        ("bf16", 1.0, "weight_input_scale is given, but recipe 'bf16'"),
    ],
)
def test_a_linear_is_as_it_was_after_a_weight_is_refused(weight, scale, message):
    layer = Linear(H, I, rngs=nnx.Rngs(0))
    dense = jnp.ones((I, H))
    new = dense if weight == "bf16" else jmoe.quantize(dense, weight)
    assert_refused(layer, lambda: layer.set_weight(new, input_scale=scale), message)
    assert layer(jnp.ones((2, H))).shape == (2, I)


def test_a_kept_input_scale_must_fit_the_new_weight():
    layer = Linear(H, I, recipe="fp8_tensor_static")
    layer.weight_input_scale = QuantizedParam(jnp.ones((3,)))
    weight = jmoe.quantize(jnp.ones((I, H)), "fp8_tensor_static")
    assert_refused(layer, lambda: layer.set_weight(weight), r"weight_input_scale has shape \(3,\), but it is \(\) here")


@pytest.mark.parametrize("recipe", ["bf16", "int8"])
def test_setters_keep_the_number_of_stacked_layers(recipe):
    layers = [Linear(H, H, use_bias=True, param_dtype="float32", rngs=nnx.Rngs(i)) for i in range(2)]
    single, stacked = Linear(H, H), stack_layers(layers)

    def weight(*shape):
        return jmoe.quantize(jnp.ones(shape), recipe) if recipe != "bf16" else jnp.ones(shape)

    three, one, two = weight(3, H, H), weight(H, H), weight(2, H, H)
    assert_refused(stacked, lambda: stacked.set_weight(three), r"weight has shape \(3, 8, 8\), .* = \(2, 8, 8\)")
    assert_refused(stacked, lambda: stacked.set_weight(one), r"weight has shape \(8, 8\), .* = \(2, 8, 8\)")
    assert_refused(single, lambda: single.set_weight(two), r"weight has shape \(2, 8, 8\), .* = \(8, 8\)")
    assert_refused(stacked, lambda: stacked.set_bias(jnp.ones((3, H))), r"bias has shape \(3, 8\), .* is \(2, 8\)")
    assert_refused(single, lambda: single.set_bias(jnp.ones((2, H))), r"bias has shape \(2, 8\), .* is \(8,\)")
    stacked.set_weight(two)
    stacked.set_bias(jnp.zeros((2, H)))
    # Each layer of ones multiplies equal entries by 8.
    assert scan_layers(lambda layer, x: layer(x), stacked, jnp.ones((H,))).tolist() == [64] * H


def test_setters_keep_the_number_of_stacked_layers_of_experts():
    stacked = stack_layers([moe(use_bias=True)] * 2)
    w13, w2 = jnp.ones((3, E, 2, I, H)), jnp.ones((3, E, H, I))
    assert_refused(stacked, lambda: stacked.set_w13(w13), r"w13 has shape \(3, .* is \(2, 4, 2, 16, 8\)")
    assert_refused(stacked, lambda: stacked.set_w2(w2), r"w2 has shape \(3, .* is \(2, 4, 8, 16\)")
    assert_refused(
        stacked,
        lambda: stacked.set_biases(jnp.ones((2, E, 2, I)), jnp.ones((3, E, H))),
        r"b2 has shape \(3, 4, 8\), .* is \(2, 4, 8\)",
    )
    single = moe()
    assert_refused(single, lambda: single.set_w13(w13), r"w13 has shape \(3, .* is \(4, 2, 16, 8\)")
    stacked.set_w13(w13[:2])
    stacked.set_w2(w2[:2])
    assert stacked.stack_shape == (2,) and single.stack_shape == ()


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_a_moe_is_as_it_was_after_a_weight_is_refused(name):
    layer = moe()
    dense = getattr(layer, name).get_value()
    call = getattr(layer, f"set_{name}")
    static = jmoe.quantize(dense, "fp8_tensor_static")
    assert_refused(layer, lambda: call(static), f"{name}_input_scale is missing")
    assert_refused(layer, lambda: call(static, input_scale=jnp.ones((3,))), rf"{name}_input_scale has shape \(3,\)")
    assert_refused(layer, lambda: call(dense.astype(jnp.int32)), f"{name} has dtype int32", TypeError)
    assert layer(jnp.ones((2, H))).shape == (2, H)


def test_both_biases_are_checked_before_either_is_set():
    layer = moe()
    assert_refused(
        layer,
        lambda: layer.set_biases(jnp.ones((E, 2, I)), jnp.ones((E, I))),
        r"b2 has shape \(4, 16\), but this layer's is \(4, 8\)",
    )
    assert layer.b13 is None


def test_weights_and_biases_are_arrays_of_floats():
    layer = Linear(2, 2, use_bias=True)
    assert_refused(layer, lambda: layer.set_weight(np.ones((2, 2), np.int8)), "weight has dtype int8", TypeError)
    assert_refused(layer, lambda: layer.set_weight("none"), "weight is a str, but it is an array", TypeError)
    assert_refused(layer, lambda: layer.set_bias(np.ones((2,), np.int8)), "bias=int8 must be bfloat16", TypeError)
    assert_refused(layer, lambda: layer.set_bias(jnp.float32(1)), r"bias has shape \(\)")
    layer.set_weight([[1.0, 2.0], [3.0, 4.0]])
    assert layer.weight.dtype == jnp.float32


def test_use_bias_without_a_bias_is_a_bias_of_zeros():
    layer = Linear.from_dense(jnp.eye(2), use_bias=True, param_dtype="float32")
    assert layer.bias.get_value().tolist() == [0, 0] and layer.bias.dtype == jnp.float32
    assert layer(jnp.asarray([3.0, 4.0])).tolist() == [3, 4]
    stacked = Linear.from_dense(jnp.stack([jnp.eye(2)] * 3), use_bias=True)
    assert stacked.bias.get_value().shape == (3, 2)
    experts = FusedMoE.from_dense(
        jnp.ones((E, 2, I, H)), jnp.ones((E, H, I)), ROUTING, router_weight=jnp.ones((E, H)), use_bias=True
    )
    assert experts.b13.get_value().shape == (E, 2, I) and not experts.b2.get_value().any()
    assert experts(jnp.ones((1, H))).shape == (1, H)


def test_what_given_weights_decide_is_no_option():
    with pytest.raises(TypeError, match="recipe is no option here: the weight that is given decides"):
        Linear.from_quantized(jnp.eye(2), recipe="int8")
    with pytest.raises(TypeError, match="rngs is no option here"):
        Linear.from_dense(jnp.eye(2), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="shared_gate is no option here: the arrays that are given decide"):
        FusedMoE.from_quantized(
            jnp.ones((E, 2, I, H)), jnp.ones((E, H, I)), ROUTING, router_weight=jnp.ones((E, H)), shared_gate=True
        )


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"in_features": 0}, ValueError, "in_features=0 must be at least 1"),
        ({"out_features": -1}, ValueError, "out_features=-1 must be at least 1"),
        ({"out_features": 2.0}, TypeError, "out_features=2.0 must be an integer"),
        ({"activation": "tanh"}, ValueError, "activation 'tanh' is unknown"),
        ({"activation": "swigluoai"}, ValueError, "is gated"),
        ({"activation": 3}, TypeError, "activation=3 must be an Activation or the name of one"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda' is unknown; it is one of triton, xla"),
        ({"dtype": "int8"}, TypeError, "dtype=int8 must be bfloat16, float16 or float32"),
        ({"dtype": "floaty"}, TypeError, "dtype='floaty' must be"),
        ({"param_dtype": "int4"}, TypeError, "param_dtype=int4 must be"),
        ({"preferred_element_type": "float64"}, TypeError, "preferred_element_type=float64 must be"),
        ({"recipe": "int5"}, ValueError, "int5"),
        ({"use_bias": "a"}, TypeError, "use_bias='a' must be True or False"),
        ({"rngs": 3}, TypeError, "rngs=3 must be an nnx.Rngs, such as"),
        ({"rngs": jax.random.key(0)}, TypeError, "rngs is .* must be an nnx.Rngs"),
    ],
)
def test_a_linear_is_refused_where_it_is_made(changes, error, message):
    with pytest.raises(error, match=message):
        Linear(**{"in_features": 2, "out_features": 2, **changes})


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"hidden_size": 0}, ValueError, "hidden_size=0 must be at least 1"),
        ({"intermediate_size": 0}, ValueError, "intermediate_size=0 must be at least 1"),
        ({"num_experts": 0}, ValueError, "num_experts=0 must be at least 1"),
        ({"num_experts": True}, TypeError, "num_experts=True must be an integer"),
        ({"routing": 2}, TypeError, "routing=2 must be a jmoe.Routing"),
        ({"activation": "relu2"}, ValueError, "no gated form"),
        ({"activation": "swigluoai", "gated": False}, ValueError, "is gated"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda' is unknown"),
        ({"dtype": "float64"}, TypeError, "dtype=float64 must be"),
        ({"router_dtype": "int8"}, TypeError, "router_dtype=int8 must be a floating point dtype"),
        ({"expert_map": [0, 1, 2, 9]}, ValueError, "expert_map holds 9, but it holds local slots from 0 to 3, and -1"),
        ({"expert_map": np.asarray([0, -2, 1, 2])}, ValueError, "expert_map holds -2"),
        ({"expert_map": [0, 1, -1, 2], "num_local_experts": 2}, ValueError, "expert_map holds 2, .* from 0 to 1"),
        ({"gated": "a"}, TypeError, "gated='a' must be True or False"),
        ({"use_bias": "a"}, TypeError, "use_bias='a' must be True or False"),
        ({"router_bias": 1}, TypeError, "router_bias=1 must be True or False"),
        ({"correction_bias": None}, TypeError, "correction_bias=None must be True or False"),
        ({"shared_gate": "a"}, TypeError, "shared_gate='a' must be True or False"),
        ({"shared": 3}, TypeError, "shared=3 must be an nnx.Module"),
        ({"shared": nnx.List([])}, TypeError, "shared is a List, which cannot be called"),
        ({"rngs": 3}, TypeError, "rngs=3 must be an nnx.Rngs, such as"),
        ({"num_local_experts": -1, "expert_map": [-1] * 4}, ValueError, "num_local_experts=-1 must be at least 0"),
    ],
)
def test_a_moe_is_refused_where_it_is_made(changes, error, message):
    arguments = {"hidden_size": H, "intermediate_size": I, "num_experts": E, "routing": ROUTING}
    with pytest.raises(error, match=message):
        FusedMoE(**{**arguments, **changes})


def test_a_map_of_given_experts_is_checked_too():
    with pytest.raises(ValueError, match="expert_map holds 2, but it holds local slots from 0 to 1"):
        FusedMoE.from_dense(
            jnp.ones((2, 2, I, H)),
            jnp.ones((2, H, I)),
            ROUTING,
            router_weight=jnp.ones((E, H)),
            expert_map=[2, 3, -1, -1],
        )


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((-1, 8, 2, 4), ValueError, "batch=-1 must be at least 0"),
        ((1, -8, 2, 4), ValueError, "max_len=-8 must be at least 0"),
        ((1, 8, 0, 4), ValueError, "heads=0 must be at least 1"),
        ((1, 8, 2, 0.5), TypeError, "head_dim=0.5 must be an integer"),
        ((1, 8, 2, 4, "int8"), TypeError, "dtype=int8 must be"),
    ],
)
def test_a_cache_is_refused_where_it_is_made(arguments, error, message):
    with pytest.raises(error, match=message):
        KVCache.init(*arguments)


@pytest.mark.parametrize(
    "x, error, message",
    [
        (np.ones((5, 3), np.float32), ValueError, r"x has shape \(5, 3\), but it is \(..., H\) with H = 8"),
        (np.float32(1), ValueError, r"x has shape \(\), but it is"),
        (None, TypeError, "x is None, but it is an array"),
        ("x", TypeError, "x is a str, but it is an array"),
        (np.ones((5, H), np.complex64), TypeError, "x has dtype complex64, but it is floating point"),
        (jmoe.quantize(jnp.ones((5, H)), jmoe.recipe("int8").input), TypeError, "x is a QTensor, but the router"),
    ],
)
def test_experts_refuse_what_they_cannot_route(x, error, message):
    layer = moe()
    for call in (layer, layer.route, jax.jit(layer.route) if isinstance(x, np.ndarray) else layer):
        with pytest.raises(error, match=message):
            call(x)


def test_inputs_may_be_lists():
    layer = moe(dtype="float32")
    row = [0.5] * H
    np.testing.assert_array_equal(layer(row), layer(jnp.asarray(row)))
    eye = Linear.from_dense(jnp.eye(2), dtype="float32")
    assert eye([3.0, 4.0]).tolist() == [3, 4]
    with pytest.raises(TypeError, match="x is None, but it is an array"):
        eye(None)
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        eye(1.0)


def test_a_stack_of_layers_is_not_called_itself():
    message = r"is a stack of layers, with the leading axes \(2,\); jmoe.nn.scan_layers applies it"
    experts, linears = stack_layers([moe()] * 2), stack_layers([Linear(H, H)] * 2)
    for call in (experts, experts.route, linears):
        with pytest.raises(ValueError, match=message):
            call(jnp.ones((3, H)))


def test_dtype_is_the_results_where_x_comes_quantized():
    x = jmoe.quantize(jnp.asarray([[127.0, 0.0], [0.0, 127.0]]), jmoe.recipe("int8").input)
    weight = jmoe.quantize(jnp.eye(2), "int8")
    for dtype, expected in ((None, "bfloat16"), ("float32", "float32"), ("float16", "float16")):
        y = Linear.from_quantized(weight, dtype=dtype)(x)
        assert y.dtype == expected
        np.testing.assert_allclose(y.astype(jnp.float32), [[127, 0], [0, 127]], rtol=2**-7)
    y = Linear.from_quantized(weight, dtype="float16", preferred_element_type="float32")(x)
    assert y.dtype == jnp.float32


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor_static"])
def test_a_rank_without_experts_has_the_router_of_the_others(recipe):
    nowhere = moe(num_local_experts=0, expert_map=[-1] * E, recipe=recipe)
    assert nowhere.qw13.shape == (0, 2, I, H) and nowhere.qw2.shape == (0, H, I)
    np.testing.assert_array_equal(nowhere.router_weight.get_value(), moe(recipe=recipe).router_weight.get_value())
    assert nowhere(jnp.ones((3, H))).tolist() == [[0] * H] * 3


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"w13": (jnp.ones((E, I, H)),)}, ValueError, "w13 is a tuple of 1, but gate and up are a pair of arrays"),
        ({"w13": (jnp.ones((E, I, H)), None)}, TypeError, r"w13\[1\] is None, but it is an array"),
        ({"w13": jnp.ones((H,))}, ValueError, r"w13 has shape \(8,\), but with layout='out_in' it is"),
        ({"w2": None}, TypeError, "w2 is None, but it is an array"),
        ({"b13": (jnp.ones((E, I)),)}, ValueError, "b13 is a tuple of 1, but gate and up are a pair of arrays"),
        (
            {"b13": (jnp.ones((E, I)), jnp.ones((E, H)))},
            ValueError,
            r"b13 has shapes \(4, 16\) and \(4, 8\), but a pair",
        ),
        ({"b13": jnp.ones((E, 3))}, ValueError, r"b13 has shape \(4, 3\), but it is \(E, 2I\) or \(E, 2, I\)"),
        ({"b13": 1.0}, ValueError, r"b13 has shape \(\), but it is"),
        ({"gated": 2}, TypeError, "gated=2 must be True or False"),
        ({"shared": "a"}, TypeError, "shared='a' must be an nnx.Module"),
    ],
)
def test_what_is_no_experts_weight_is_named(changes, error, message):
    arguments = {"w13": (jnp.ones((E, I, H)), jnp.ones((E, I, H))), "w2": jnp.ones((E, H, I)), "routing": ROUTING}
    with pytest.raises(error, match=message):
        FusedMoE.from_dense(**{**arguments, "router_weight": jnp.ones((E, H)), **changes})


def test_a_pair_of_biases_is_gate_and_up():
    w = jnp.ones((1, 3, 2))
    layer = FusedMoE.from_dense(
        (w, w),
        jnp.ones((1, 2, 3)),
        jmoe.Routing(top_k=1),
        router_weight=jnp.ones((1, 2)),
        b13=[[[1.0] * 3], [[2.0] * 3]],
    )
    assert layer.b13.get_value().tolist() == [[[1, 1, 1], [2, 2, 2]]]


def applied(layer, x):
    return layer(x)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"slice_params": "a"}, TypeError, "slice_params='a' must be True or False"),
        ({"unroll": 0}, ValueError, "unroll=0 must be at least 1"),
        ({"unroll": 1.5}, TypeError, "unroll=1.5 must be an integer"),
        ({"body": 3}, TypeError, "body=3 must be a function"),
        ({"layers": 3}, TypeError, "layers=3 must be a stacked nnx.Module"),
        ({"carry": "a"}, TypeError, "carry is a str, but a carry is a pytree of arrays"),
        ({"carry": {"x": [1, object()]}}, TypeError, r"carry\['x'\]\[1\] is an object, but a carry"),
        ({"body": lambda layer, x: None}, TypeError, "body returns None, but it is given, and returns, a carry"),
        ({"body": lambda layer, x: (x, x)}, TypeError, r"body returns a carry of structure PyTreeDef\(\(\*, \*\)\)"),
        (
            {"body": lambda layer, x: x.astype("float16")},
            TypeError,
            r"body returns carry as float16\[2\], but it is given float32\[2\]",
        ),
        (
            {"body": lambda layer, c: {"x": c["x"][None]}, "carry": {"x": np.ones(2)}},
            TypeError,
            r"body returns carry\['x'\] as float32\[1, 2\], but it is given float32\[2\]",
        ),
        ({"body": lambda layer, x: "a"}, TypeError, "body returns a carry that is a str, but a carry"),
    ],
)
def test_a_scan_is_refused_before_jax_meets_it(changes, error, message):
    arguments = {"body": applied, "layers": stack_layers([Linear(2, 2)] * 2), "carry": jnp.ones((2,)), **changes}
    with pytest.raises(error, match=message):
        scan_layers(**arguments)
    with pytest.raises(error, match=message):
        jax.jit(lambda: scan_layers(**arguments))()


def test_a_carry_that_starts_as_a_number_takes_its_dtype_from_the_body():
    layers = stack_layers([Linear.from_dense(jnp.eye(2))] * 3)
    _, count = scan_layers(lambda layer, c: (layer(c[0]), c[1] + c[0][0]), layers, (jnp.ones((2,)), 0))
    assert count.dtype == jnp.float32 and count == 3


def test_what_is_stacked_are_modules():
    with pytest.raises(TypeError, match="layers=3 must be a list of modules"):
        stack_layers(3)
    with pytest.raises(TypeError, match="layers is a Linear, but it must be a list of modules"):
        stack_layers(Linear(2, 2))
    with pytest.raises(TypeError, match=r"layers\[1\]=3 must be an nnx.Module"):
        stack_layers([Linear(2, 2), 3])
    assert stack_layers(nnx.List([Linear(2, 2)])).stack_shape == (1,)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m: quantize_model(3, []), "model=3 must be an nnx.Module"),
        (
            lambda m: quantize_model(m, [], calibration=3),
            "calibration=3 must be what jmoe.nn.calibrate returns, or None",
        ),
        (lambda m: quantize_model(m, [], sqnr="a"), "sqnr='a' must be True or False"),
        (lambda m: calibrate(3, []), "model=3 must be an nnx.Module"),
        (lambda m: calibrate(m, 3), "batches is an int, but it is an iterable of pytrees of arrays"),
        (lambda m: calibrate(m, jnp.float32(3)), "batches is .*, but it is an iterable"),
        (lambda m: calibrate(m, [], forward=3), "forward=3 must be a function"),
        (lambda m: calibrate(nnx.List([m]), []), "model is a List, which cannot be called: pass forward"),
    ],
)
def test_models_calibration_and_batches_are_what_they_are_called(call, message):
    with pytest.raises(TypeError, match=message):
        call(nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0))))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda c: c.mask(-1), ValueError, "queries=-1 must be at least 0"),
        (lambda c: c.mask("a"), TypeError, "queries='a' must be an integer"),
        (lambda c: c.update(3, 4), ValueError, r"keys has shape \(\), but this cache takes \(1, S <= 4, 1, 1\)"),
        (lambda c: c.update(c.keys, None), TypeError, "values is None, but it is an array"),
    ],
)
def test_a_cache_refuses_what_it_cannot_hold(call, error, message):
    with pytest.raises(error, match=message):
        call(KVCache.init(1, 4, 1, 1))
