"""Every wrong argument of the operations gives one sentence: the argument, what it is, what it should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import jmoe
from jmoe import ActivationParams, quantize, recipe
from tests.ops.example_calls import (
    COUNTS,
    FP8,
    IDS,
    K_SLOTS,
    SCALES,
    STACKED,
    STATIC,
    W2,
    W13,
    WEIGHTS,
    XE,
    E,
    H,
    I,
    L,
    T,
    W,
    X,
    call_batched,
    call_linear,
    call_moe,
)


def refuses(call, error, message, **changes):
    """The call raises just that, also while it is traced."""
    with pytest.raises(error, match=message) as caught:
        call(**changes)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: call(**changes))


def test_the_unchanged_calls_are_right():
    assert call_linear().shape == (T, I)
    assert call_moe().shape == (T, H)
    assert call_batched().shape == (E, T, H)
    assert call_moe(**STACKED).shape == (T, H)
    assert call_moe(**STATIC, **SCALES).shape == (T, H)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"x": jnp.ones((T, H + 1))},
            ValueError,
            r"x has shape \(5, 17\), but w has K = 16 \(w is \(N, K\) = \(8, 16\)",
        ),
        ({"x": jnp.float32(1)}, ValueError, r"x has shape \(\), but it is \(\.\.\., K\)"),
        ({"x": jnp.ones((T, H), int)}, TypeError, r"x has dtype int32, but it is bfloat16, float16 or float32"),
        ({"x": jnp.ones((T, H), bool)}, TypeError, r"x has dtype bool, but it is bfloat16, float16 or float32"),
        ({"x": jnp.ones((T, H), complex)}, TypeError, r"x has dtype complex64, but it is bfloat16"),
        ({"x": jnp.ones((T, H), jnp.float8_e4m3fn)}, TypeError, r"x has dtype float8_e4m3fn, but it is bfloat16"),
        ({"x": None}, TypeError, r"x is None, but it is an array"),
        ({"x": "ones"}, TypeError, r"x is a str, but it is an array"),
        ({"x": [[1.0, 2.0], [3.0]]}, TypeError, r"x is a list, but it is an array"),
        ({"w": jnp.ones(H)}, ValueError, r"w has shape \(16,\), but it is \(N, K\)"),
        ({"w": jnp.ones((L, I, H))}, ValueError, r"w has shape \(3, 8, 16\), but it is \(N, K\); stacked .* layer="),
        ({"w": W.T}, ValueError, r"x has shape \(5, 16\), but w has K = 8"),
        ({"w": jnp.ones((I, H), jnp.int8)}, TypeError, r"w has dtype int8, but a plain weight is bf.*one is a QTensor"),
        ({"w": jnp.ones((I, H), jnp.float8_e4m3fn)}, TypeError, r"w has dtype float8_e4m3fn, but a plain weight is"),
        ({"w": None}, TypeError, r"w is None, but it is an array"),
        ({"bias": jnp.ones(H)}, ValueError, r"bias has shape \(16,\), but here it is \(N,\) = \(8,\)"),
        ({"bias": jnp.ones((1, I))}, ValueError, r"bias has shape \(1, 8\), but here it is \(N,\) = \(8,\)"),
        ({"bias": jnp.ones(I, int)}, TypeError, r"bias has dtype int32, but it is bfloat16, float16 or float32"),
        ({"bias": 1.0}, ValueError, r"bias has shape \(\), but here it is \(N,\) = \(8,\)"),
        ({"activation": "swish"}, ValueError, r"activation 'swish' is unknown; known are "),
        ({"activation": "swigluoai"}, ValueError, r"activation swiglu:alpha=1\.702,beta=1,limit=7 is gated, but here"),
        ({"activation": 3}, TypeError, r"activation=3 must be an Activation or the name of one"),
        ({"recipe": "fp9"}, ValueError, r"recipe 'fp9' is unknown; known recipes are bf16, "),
        ({"recipe": 8}, TypeError, r"recipe=8 must be a Recipe or the name of one"),
        (
            {"recipe": "fp8_block"},
            ValueError,
            r"recipe='fp8_block' is for weights that are e4m3 128x128 float32, but w "
            r"is not quantized; jmoe\.quantize does that",
        ),
        ({"input_scale": 1.0}, ValueError, r"input_scale is given, but the activation is not quantized"),
        ({"accumulation": "slow"}, ValueError, r"accumulation='slow' must be 'exact', 'fast' or None"),
        (
            {"preferred_element_type": int},
            TypeError,
            r"preferred_element_type=int\d+ must be bfloat16, float16 or float",
        ),
        ({"preferred_element_type": "floaty"}, TypeError, r"preferred_element_type='floaty' is no dtype"),
        (
            {"implementation": "cuda"},
            ValueError,
            r"implementation='cuda' is unknown; it is one of triton, xla, reference",
        ),
    ],
)
def test_linear(changes, error, message):
    refuses(call_linear, error, message, **changes)


LAYERED = {"w": jnp.ones((L, I, H))}


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"w": W, "layer": 0},
            ValueError,
            r"w has shape \(8, 16\), but it is \(N, K\); with layer given, it has a lead",
        ),
        ({"layer": L}, ValueError, r"layer=3 is outside the 3 stacked layers"),
        ({"layer": -1}, ValueError, r"layer=-1 is outside the 3 stacked layers"),
        ({"layer": np.int64(2**32)}, ValueError, r"layer=4294967296 is outside the 3 stacked layers"),
        ({"layer": 2**70}, TypeError, r"layer has dtype object, but it holds integers"),
        ({"layer": 1.0}, TypeError, r"layer has dtype float64, but it holds integers"),
        ({"layer": True}, TypeError, r"layer has dtype bool, but it holds integers"),
        ({"layer": jnp.float32(1)}, TypeError, r"layer has dtype float32, but it holds integers"),
        ({"layer": jnp.array([0, 1])}, ValueError, r"layer has shape \(2,\), but it is one integer"),
        ({"layer": [0]}, ValueError, r"layer has shape \(1,\), but it is one integer"),
        ({"layer": "first"}, TypeError, r"layer is a str, but it is an array"),
        ({"layer": 0, "bias": jnp.ones(I)}, ValueError, r"bias has shape \(8,\), but here it is \(L, N\) = \(3, 8\)"),
    ],
)
def test_stacked_layers(changes, error, message):
    refuses(call_linear, error, message, **{**LAYERED, **changes})


def test_a_layer_is_any_integer_scalar():
    w = jnp.arange(L, dtype=jnp.float32)[:, None, None] * jnp.ones((L, I, H))
    for layer in (2, np.int64(2), np.uint8(2), jnp.int32(2), jnp.uint8(2), np.array(2)):
        np.testing.assert_array_equal(call_linear(w=w, layer=layer), np.full((T, I), 2 * H))
    np.testing.assert_array_equal(jax.jit(lambda i: call_linear(w=w, layer=i))(2), np.full((T, I), 2 * H))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        # x
        ({"x": jnp.ones((T, H + 1))}, ValueError, r"x has shape \(5, 17\), but w13 has H = 16"),
        ({"x": jnp.float32(1)}, ValueError, r"x has shape \(\), but it is \(\.\.\., H\)"),
        ({"x": jnp.ones((T, H), int)}, TypeError, r"x has dtype int32, but it is bfloat16, float16 or float32"),
        # w13 and w2
        (
            {"w13": jnp.ones((E, 2 * I, H))},
            ValueError,
            r"w13 has shape \(4, 16, 16\), but it is \(E, halves, I, H\), half "
            r"0 gate and half 1 up; a merged \(E, 2 I, H\) is reshaped to it",
        ),
        (
            {"w13": jnp.ones((E, 2, H, I))},
            ValueError,
            r"w2 has shape \(4, 16, 8\), but w13 of shape \(4, 2, 16, 8\) goes with \(E, H, I\) = \(4, 8, 16\); "
            r"weights are \(out, in\), not transposed",
        ),
        ({"w2": jnp.ones((E, I, H))}, ValueError, r"w2 has shape \(4, 8, 16\), but w13 of shape \(4, 2, 8, 16\)"),
        ({"w2": jnp.ones((E + 1, H, I))}, ValueError, r"w2 has shape \(5, 16, 8\), but w13 of shape \(4, 2, 8, 16\)"),
        ({"w2": jnp.ones((H, I))}, ValueError, r"w2 has shape \(16, 8\), but it is \(E, H, I\)"),
        ({"w13": jnp.ones((E, 3, I, H))}, ValueError, r"w13 has shape \(4, 3, 8, 16\), but .* with one or two halves"),
        (
            {"w13": jnp.ones((L, E, 2, I, H))},
            ValueError,
            r"w13 has shape \(3, 4, 2, 8, 16\), but .*; stacked layers go",
        ),
        (
            {"w2": jnp.ones((L, E, H, I))},
            ValueError,
            r"w2 has shape \(3, 4, 16, 8\), but .*; stacked layers go with lay",
        ),
        ({"w13": jnp.ones((E, 2, I, H), jnp.int8)}, TypeError, r"w13 has dtype int8, but a plain weight is bfloat16"),
        ({"w2": jnp.ones((E, H, I), jnp.uint8)}, TypeError, r"w2 has dtype uint8, but a plain weight is bfloat16"),
        ({"w2": None}, TypeError, r"w2 is None, but it is an array"),
        # biases
        (
            {"b13": jnp.ones((E, 2 * I))},
            ValueError,
            r"b13 has shape \(4, 16\), but here it is \(E, halves, I\) = \(4, 2, ",
        ),
        ({"b13": jnp.ones((E, 2, I), int)}, TypeError, r"b13 has dtype int32, but it is bfloat16"),
        ({"b2": jnp.ones((E, I))}, ValueError, r"b2 has shape \(4, 8\), but here it is \(E, H\) = \(4, 16\)"),
        ({"b2": jnp.ones(H)}, ValueError, r"b2 has shape \(16,\), but here it is \(E, H\) = \(4, 16\)"),
        # router decisions
        ({"topk_ids": jnp.zeros((T, K_SLOTS))}, TypeError, r"topk_ids has dtype float32, but it holds integers"),
        ({"topk_ids": jnp.zeros((T, K_SLOTS), bool)}, TypeError, r"topk_ids has dtype bool, but it holds integers"),
        ({"topk_ids": None}, TypeError, r"topk_ids is None, but it is an array"),
        ({"topk_ids": [[0, 1], [2]]}, TypeError, r"topk_ids is a list, but it is an array"),
        (
            {"topk_ids": IDS[:-1]},
            ValueError,
            r"topk_ids has shape \(4, 2\), but x has tokens of shape \(5,\): it is \(5, ",
        ),
        ({"topk_ids": IDS[:, 0]}, ValueError, r"topk_ids has shape \(5,\), but x has tokens of shape \(5,\)"),
        (
            {"topk_weights": WEIGHTS[:, :1]},
            ValueError,
            r"topk_weights has shape \(5, 1\), but here it is topk_ids' shape",
        ),
        ({"topk_weights": IDS}, TypeError, r"topk_weights has dtype int32, but router weights are floating point"),
        ({"topk_weights": WEIGHTS * 1j}, TypeError, r"topk_weights has dtype complex64, but router weights are floati"),
        ({"topk_weights": None}, TypeError, r"topk_weights is None, but it is an array"),
        ({"weight_on_input": True}, ValueError, r"weight_on_input=True multiplies x by one weight, but .* has k = 2"),
        # expert_map
        (
            {"expert_map": jnp.zeros((8, 1), int)},
            ValueError,
            r"expert_map has shape \(8, 1\), but it is \(E_global,\), a ",
        ),
        ({"expert_map": jnp.zeros(0, int)}, ValueError, r"expert_map has shape \(0,\), but it is \(E_global,\)"),
        ({"expert_map": jnp.zeros(8)}, TypeError, r"expert_map has dtype float32, but it holds integers"),
        # options
        ({"activation": "swish"}, ValueError, r"activation 'swish' is unknown; known are "),
        ({"activation": None}, TypeError, r"activation=None must be an Activation or the name of one"),
        ({"activation": "relu2"}, ValueError, r"activation relu2 has no gated form, but w13 has two halves"),
        (
            {"w13": W13[:, :1], "activation": "swigluoai"},
            ValueError,
            r"activation swiglu:\S+ is gated, but here it is of",
        ),
        ({"activation_params": {"alpha": 1}}, TypeError, r"activation_params is a dict, but it is an ActivationParams"),
        (
            {"activation_params": ActivationParams(alpha=jnp.ones(E + 1))},
            ValueError,
            r"activation_params\.alpha has shape "
            r"\(5,\), but it is \(\) or \(E,\) = \(4,\)",
        ),
        (
            {"activation_params": ActivationParams(limit=jnp.ones(E, bool))},
            TypeError,
            r"activation_params\.limit has dty",
        ),
        (
            {"activation_params": ActivationParams(), "activation": "gelu"},
            ValueError,
            r"activation_params go with a gated "
            r"swiglu, not with gelu",
        ),
        ({"recipe": "fp9"}, ValueError, r"recipe 'fp9' is unknown"),
        (
            {"recipe": "int4"},
            ValueError,
            r"recipe='int4' is for weights that are int4 1x128 float32, but w13 is not quant",
        ),
        ({"accumulation": 1}, ValueError, r"accumulation=1 must be 'exact', 'fast' or None"),
        ({"preferred_element_type": jnp.int8}, TypeError, r"preferred_element_type=int8 must be bfloat16, float16 or"),
        ({"implementation": "vllm"}, ValueError, r"implementation='vllm' is unknown"),
    ],
)
def test_fused_moe(changes, error, message):
    refuses(call_moe, error, message, **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"w2": W2},
            r"w2 has shape \(4, 16, 8\), but it is \(E, H, I\); with layer given, it has a leading axis of layers",
        ),
        (
            {"w13": W13},
            r"w13 has shape \(4, 2, 8, 16\), but it is \(E, halves, I, H\); with layer given, it has a leading",
        ),
        ({"layer": 3}, r"layer=3 is outside the 3 stacked layers"),
        ({"w2": jnp.ones((L + 1, E, H, I))}, r"w2 has shape \(4, 4, 16, 8\), but .* goes with \(L, E, H, I\) = \(3, 4"),
        (
            {"b13": jnp.ones((E, 2, I))},
            r"b13 has shape \(4, 2, 8\), but here it is \(L, E, halves, I\) = \(3, 4, 2, 8\)",
        ),
        ({"b2": jnp.ones((E, H))}, r"b2 has shape \(4, 16\), but here it is \(L, E, H\) = \(3, 4, 16\)"),
    ],
)
def test_stacked_experts(changes, message):
    refuses(call_moe, ValueError, message, **{**STACKED, **changes})


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"x": X}, ValueError, r"x has shape \(5, 16\), but it is \(E, T_max, H\)"),
        ({"x": jnp.ones((E + 1, T, H))}, ValueError, r"x has shape \(5, 5, 16\), but it is \(E, T_max, H\) with E = 4"),
        ({"x": jnp.ones((E, T, I))}, ValueError, r"x has shape \(4, 5, 8\), but w13 has H = 16"),
        ({"counts": COUNTS[:2]}, ValueError, r"counts has shape \(2,\), but here it is \(E,\) = \(4,\)"),
        ({"counts": jnp.ones(E)}, TypeError, r"counts has dtype float32, but it holds integers"),
        ({"counts": None}, TypeError, r"counts is None, but it is an array"),
        (
            {"w13": jnp.ones((E, 2 * I, H))},
            ValueError,
            r"w13 has shape \(4, 16, 16\), but .*; a merged \(E, 2 I, H\) is",
        ),
        ({"b2": jnp.ones((E, I))}, ValueError, r"b2 has shape \(4, 8\), but here it is \(E, H\) = \(4, 16\)"),
        ({"activation": "relu2"}, ValueError, r"activation relu2 has no gated form"),
        ({"input_scale": 1.0}, ValueError, r"input_scale is given, but the activation is not quantized"),
        ({"accumulation": "slow"}, ValueError, r"accumulation='slow' must be 'exact', 'fast' or None"),
        ({"preferred_element_type": int}, TypeError, r"preferred_element_type=int\d+ must be"),
        ({"implementation": "vllm"}, ValueError, r"implementation='vllm' is unknown"),
    ],
)
def test_batched_experts(changes, error, message):
    refuses(call_batched, error, message, **changes)


@pytest.mark.parametrize("call", [call_moe, call_batched])
def test_recipes_that_are_about_other_weights(call):
    refuses(
        call,
        ValueError,
        r"recipe='fp8_block' is for weights that are e4m3 128x128 float32, but w13 is e4m3 1xall float32",
        **FP8,
        recipe="fp8_block",
    )
    refuses(
        call, ValueError, r"recipe='bf16' is for weights that are not quantized, but w13 is e4m3", **FP8, recipe="bf16"
    )
    mixed = {"w13": FP8["w13"], "w2": quantize(W2, "int8")}
    refuses(call, ValueError, r"recipe='fp8_channel' is for .* but w2 is int8", **mixed, recipe=recipe("fp8_channel"))


def test_a_recipe_without_activation_makes_the_call_weight_only():
    weight_only = jmoe.Recipe(name="fp8_channel_w8a16", weight=FP8["w13"].scheme)
    x = X.at[0, 0].set(1.03125)
    np.testing.assert_array_equal(
        call_moe(x=x, **FP8, recipe=weight_only),
        call_moe(x=x, **{name: w.with_input_scheme(None) for name, w in FP8.items()}),
    )


def test_a_quantized_x_of_another_scheme():
    x = quantize(X, FP8["w13"].input_scheme)
    other = quantize(X, recipe("int8").input)
    fp8_w = quantize(W, "fp8_channel")
    message = r"x is quantized as int8 1xall float32, but here the activation is e4m3 1xall float32"
    refuses(call_linear, ValueError, message, x=other, w=fp8_w)
    refuses(call_moe, ValueError, message, x=other, **FP8)
    refuses(call_linear, ValueError, r"x is quantized as e4m3 .*, but here the activation is not quantized", x=x)
    flat = quantize(XE, FP8["w13"].input_scheme)
    refuses(
        call_linear,
        ValueError,
        r"x is a QTensor of shape \(4, 5, 16\), but a quantized activation is \(M, K\)",
        x=flat,
        w=fp8_w,
    )
    refuses(call_moe, ValueError, r"x is a QTensor of shape \(4, 5, 16\), but .* is \(T, H\)", x=flat, **FP8)
    refuses(call_batched, ValueError, r"x is a QTensor of shape \(5, 16\), but .* is \(E, T_max, H\)", x=x, **FP8)
    one = {"topk_ids": IDS[:, :1], "topk_weights": WEIGHTS[:, :1]}
    message = r"weight_on_input=True multiplies x before it is quantised, but x is a QTensor"
    refuses(call_moe, ValueError, message, x=x, **FP8, **one, weight_on_input=True)


@pytest.mark.parametrize("call, static", [(call_moe, STATIC), (call_batched, STATIC)])
@pytest.mark.parametrize("name", ["input_scale", "intermediate_scale"])
@pytest.mark.parametrize(
    "scale, error, message",
    [
        (
            None,
            ValueError,
            r" is missing: the activation's scheme \(e4m3 per tensor float32 static\) has a given scale",
        ),
        (0.0, ValueError, r" has the value 0, but a scale is finite and at least 1\.17549e-38"),
        (1e-45, ValueError, r" has the value 1\.4013e-45, but a scale is finite and at least"),
        (-1.0, ValueError, r" has the value -1, but a scale is finite and at least"),
        (np.nan, ValueError, r" has the value nan, but a scale is finite and at least"),
        (np.inf, ValueError, r" has the value inf, but a scale is finite and at least"),
        ([1.0, 1.0, np.nan, 1.0], ValueError, r" has the value nan, but a scale is finite and at least"),
        (np.ones(E + 1), ValueError, r" has shape \(5,\), but it is \(\) or \(4,\) here"),
        (np.ones((E, 1)), ValueError, r" has shape \(4, 1\), but it is \(\) or \(4,\) here"),
        (1j, TypeError, r" has dtype complex64, but it is floating point"),
        (True, TypeError, r" has dtype bool, but it is floating point"),
        ("1", TypeError, r" is a str, but it is an array"),
    ],
)
def test_a05_static_scales_of_experts(call, static, name, scale, error, message):
    with pytest.raises(error, match="^" + name + message):
        call(**static, **{**SCALES, name: scale})


@pytest.mark.parametrize(
    "scale, message",
    [
        (None, r"input_scale is missing: the activation's scheme \(e4m3 per tensor float32 static\) has a given scale"),
        (0.0, r"input_scale has the value 0, but a scale is finite and at least"),
        (np.float32(1e-45), r"input_scale has the value 1\.4013e-45"),
        (jnp.float32(np.nan), r"input_scale has the value nan"),
        (np.ones(1), r"input_scale has shape \(1,\), but it is \(\) here"),
    ],
)
def test_a05_static_scales_of_a_linear(scale, message):
    with pytest.raises(ValueError, match=message):
        call_linear(w=quantize(W, "fp8_tensor_static"), input_scale=scale)


def test_a05_traced_scales_are_checked_at_run_time_where_asked():
    w = quantize(W, "fp8_tensor_static")
    run = jax.jit(lambda scale: call_linear(w=w, input_scale=scale))
    assert run(jnp.float32(0)).shape == (T, I)
    with jmoe.config(check=True):
        checked = checkify.checkify(run)
        for bad in (0.0, np.nan, np.inf, -1.0):
            assert "input_scale must be finite and positive" in checked(jnp.float32(bad))[0].get()
        assert checked(jnp.float32(0.5))[0].get() is None


@pytest.mark.parametrize("name", ["input_scale", "intermediate_scale"])
@pytest.mark.parametrize("call", [call_moe, call_batched])
def test_scales_that_nothing_uses(call, name):
    message = rf"{name} is given, but the activation is quantized as e4m3 1xall float32, with measured scales"
    refuses(call, ValueError, message, **FP8, **{name: 1.0})
    refuses(call, ValueError, rf"{name} is given, but the activation is not quantized", **{name: 1.0})


def test_a_quantized_x_has_its_scale():
    x = quantize(X, STATIC["w13"].input_scheme, scale=0.5)
    assert call_moe(x=x, **STATIC, intermediate_scale=0.5).shape == (T, H)
    refuses(
        call_moe, ValueError, r"input_scale is given, but x is a QTensor, which has its scales", x=x, **STATIC, **SCALES
    )
    w = quantize(W, "fp8_tensor_static")
    refuses(call_linear, ValueError, r"input_scale is given, but x is a QTensor", x=x, w=w, input_scale=0.5)


def test_float64_in_x64_mode_is_refused_and_not_halved():
    with jax.enable_x64(True):
        x = jnp.ones((T, H), jnp.float64)
        for call, name, value in (
            (call_linear, "x", x),
            (call_linear, "bias", jnp.ones(I, jnp.float64)),
            (call_moe, "x", x),
            (call_moe, "b2", jnp.ones((E, H), jnp.float64)),
            (call_batched, "x", jnp.ones((E, T, H), jnp.float64)),
        ):
            refuses(
                call, TypeError, rf"{name} has dtype float64, but it is bfloat16, float16 or float32", **{name: value}
            )
        for call, name, value in ((call_linear, "w", W), (call_moe, "w13", W13), (call_moe, "w2", W2)):
            wide = value.astype(jnp.float64)
            refuses(call, TypeError, rf"{name} has dtype float64, but a plain weight is bfloat16", **{name: wide})
        # Router weights and given scales are cast.
        assert call_moe(topk_weights=WEIGHTS.astype(jnp.float64)).dtype == jnp.float32
        assert call_moe(**STATIC, input_scale=np.float64(0.5), intermediate_scale=np.ones(E)).dtype == jnp.float32


# quantize


@pytest.mark.parametrize(
    "args, options, error, message",
    [
        (
            (jnp.ones((4, 4), int), "int8"),
            {},
            TypeError,
            r"x has dtype int32, but only floating point arrays are quant",
        ),
        ((jnp.ones(4), "int8"), {}, ValueError, r"x has shape \(4,\), but a quantized array has at least two axes"),
        ((X, "bf16"), {}, ValueError, r"recipe 'bf16' leaves the weight as it is; there is nothing to quantize"),
        ((X, "fp9"), {}, ValueError, r"recipe 'fp9' is unknown; known recipes are bf16"),
        ((X, "int4:size=3"), {}, ValueError, r"recipe 'int4' has no option 'size'; its options are group, zero_point"),
        ((X, 4), {}, TypeError, r"how=4 must be a Recipe, a Scheme or a recipe's name"),
        ((X, "int8"), {"scale": 1.0}, ValueError, r"scale is given, but the scheme .* has static=False"),
        ((X, STATIC["w13"].input_scheme), {}, ValueError, r"scale is missing, but the scheme .* has static=True"),
        (
            (X, STATIC["w13"].input_scheme),
            {"scale": 0},
            ValueError,
            r"scale has the value 0, but a scale is finite and",
        ),
        (
            (X, STATIC["w13"].input_scheme),
            {"scale": np.ones(3)},
            ValueError,
            r"scale has shape \(3,\), but x of shape \(5",
        ),
        (
            (X, "int8"),
            {"shared": (0,)},
            ValueError,
            r"shared=\(0,\) must name leading axes of x, which has shape \(5, 16\)",
        ),
    ],
)
def test_quantize(args, options, error, message):
    with pytest.raises(error, match=message):
        quantize(*args, **options)


@pytest.mark.parametrize(
    "field, value, wanted",
    [
        ("renormalize", "no", "must be True or False"),
        ("renormalize", None, "must be True or False"),
        ("weight_on_input", 1, "must be True or False"),
        ("scale", True, "must be a number"),
        ("scale", "2.5", "must be a number"),
        ("top_k", 2.0, "must be an integer"),
        ("n_group", True, "must be an integer"),
    ],
)
def test_a_routing_holds_fields_of_the_right_kind(field, value, wanted):
    with pytest.raises(TypeError, match=f"{field}={value!r} {wanted}"):
        jmoe.Routing(**{"top_k": 1, field: value})
