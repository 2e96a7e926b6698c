import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.backends.activation import (
    Activation,
    ActivationParams,
    as_activation,
    gated,
    known_activations,
    swiglu,
    ungated,
)

IMPLEMENTATIONS = ("reference", "xla")


def one_expert(gate, up, activation, implementation="reference", **options):
    """The output of an expert with H = I = 1 whose first product is (gate, up) and whose w2 is 1."""
    w13 = jnp.array([gate, up], jnp.float32).reshape(1, 2, 1, 1)
    one = jnp.ones((1, 1), jnp.float32)
    y = jmoe.fused_moe(
        one,
        w13,
        one[None],
        one,
        jnp.zeros((1, 1), jnp.int32),
        activation=activation,
        implementation=implementation,
        **options,
    )
    return float(y[0, 0])


# silu(x) = x / (1 + e^-x): silu(1) = 0.7310586, silu(2) = 1.7615942, silu(5) = 4.9665358, silu(7) = 6.9936226.
# gelu(1) = (1 + erf(1/sqrt 2)) / 2 = 0.8413447; its tanh form is 0.8411920.
@pytest.mark.parametrize(
    "name, gate, up, expected",
    [
        ("silu", 1, 2, 1.4621172),
        ("silu", -1, 3, -0.8068243),  # -1 / (1 + e) * 3
        ("swiglu", 1, 2, 1.4621172),
        ("swiglu:limit=7", 10, -9, -48.955358),  # silu(7) * -7
        ("swiglu:limit=7", -20, 9, -2.8856151e-07),  # silu(-20) * 7: the gate has no lower clamp
        ("swiglu:beta=1", 1, 2, 2.1931757),  # silu(1) * 3
        ("swiglu:alpha=2", 1, 1, 0.8807971),  # 1 / (1 + e^-2)
        ("swigluoai", 1, 2, 2.5373873),  # 1 / (1 + e^-1.702) * 3
        ("swigluoai", 8, -9, -41.999719),  # 7 / (1 + e^-11.914) * (-7 + 1)
        ("swigluoai", -8, 1, -1.9532858e-05),  # -8 / (1 + e^13.616) * 2
        ("swiglustep:limit=7", 10, -9, -49.0),  # min(silu(10) = 9.9995, 7) * -7
        ("swiglustep:limit=7", 5, 2, 9.9330715),  # silu(5) * 2
        ("gelu", 1, 2, 1.6826895),
        ("gelu", -1, 1, -0.15865525),
        ("gelu_tanh", 1, 2, 1.6823840),
        ("gelu_pytorch_tanh", 1, 2, 1.6823840),
    ],
)
def test_gated_values(name, gate, up, expected):
    got = gated(as_activation(name), jnp.float32(gate), jnp.float32(up))
    np.testing.assert_allclose(got, expected, rtol=2e-6)


@pytest.mark.parametrize(
    "name, x, expected",
    [
        ("silu", 2, 1.7615942),
        ("swiglu", -1, -0.26894143),
        ("gelu", 1, 0.8413447),
        ("gelu", -1, -0.15865525),
        ("gelu_tanh", 1, 0.8411920),
        ("gelu_pytorch_tanh", -1, -0.1588080),
        ("relu2", 3, 9.0),
        ("relu2", -2, 0.0),
    ],
)
def test_ungated_values(name, x, expected):
    np.testing.assert_allclose(ungated(as_activation(name), jnp.float32(x)), expected, rtol=2e-6)


def test_the_two_gelus_differ_by_what_is_known():
    # At 2 the exact form is 1.9544997 and the tanh form 1.9545977.
    np.testing.assert_allclose(ungated(as_activation("gelu"), jnp.float32(2)), 1.9544997, rtol=1e-7)
    np.testing.assert_allclose(ungated(as_activation("gelu_tanh"), jnp.float32(2)), 1.9545977, rtol=1e-7)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_e01_half_0_is_the_gate_and_half_1_is_up(implementation):
    assert one_expert(1, 2, "silu", implementation) == pytest.approx(1.46212, abs=5e-6)  # 1.76159 if swapped


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_e02_the_limit_clamps_gate_from_above_and_up_on_both_sides(implementation):
    assert one_expert(10, -9, "silu:limit=7", implementation) == pytest.approx(-48.9554, abs=5e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_e03_different_limits_give_different_results(implementation):
    assert one_expert(5, 1, "silu:limit=1", implementation) == pytest.approx(0.7310586)
    assert one_expert(5, 1, "silu:limit=100", implementation) == pytest.approx(4.9665358)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_e05_scalar_constants_may_be_static_or_arrays(implementation):
    static = one_expert(10, 3, swiglu(1.702, 1.0, 7.0), implementation)
    assert static == pytest.approx(27.999813, rel=1e-6)  # 7 / (1 + e^-11.914) * 4
    params = ActivationParams(alpha=jnp.float32(1.702), beta=jnp.ones((), jnp.float32), limit=7)
    assert one_expert(10, 3, "silu", implementation, activation_params=params) == pytest.approx(static)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_e05_none_is_alpha_1_beta_0_and_no_limit(implementation):
    plain = one_expert(10, 3, "silu", implementation)
    assert plain == pytest.approx(29.998638, rel=1e-6)  # silu(10) * 3
    for params in (
        ActivationParams(),
        ActivationParams(alpha=1.0),
        ActivationParams(beta=0.0),
        ActivationParams(limit=math.inf),
    ):
        assert one_expert(10, 3, "silu", implementation, activation_params=params) == pytest.approx(plain)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_e05_constants_of_each_expert(implementation):
    """Expert 0 has no limit, expert 1 the limit 1; each of two tokens goes to one of them, with gate 5 and up 2."""
    w13 = jnp.broadcast_to(jnp.array([5.0, 2.0], jnp.float32).reshape(1, 2, 1, 1), (2, 2, 1, 1))
    one = jnp.ones((2, 1), jnp.float32)
    params = ActivationParams(limit=jnp.array([jnp.inf, 1.0], jnp.float32), beta=np.array([0.0, 1.0]))
    y = jmoe.fused_moe(
        one,
        w13,
        jnp.ones((2, 1, 1), jnp.float32),
        one,
        jnp.array([[0], [1]]),
        activation_params=params,
        implementation=implementation,
    )
    # silu(5) * 2 and silu(1) * (1 + 1)
    np.testing.assert_allclose(y[:, 0], [9.9330715, 1.4621172], rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_e05_given_arrays_replace_only_their_own_constant(implementation):
    params = ActivationParams(beta=jnp.zeros(1, jnp.float32))
    got = one_expert(10, 3, "swigluoai", implementation, activation_params=params)
    assert got == pytest.approx(20.999860, rel=1e-6)  # 7 / (1 + e^-11.914) * 3: alpha and limit stay


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_e08_the_router_weight_before_and_after_the_activation(implementation):
    x, ones = jnp.full((1, 1), 2.0, jnp.float32), jnp.ones((1, 2, 1, 1), jnp.float32)
    weights, ids = jnp.full((1, 1), 0.5, jnp.float32), jnp.zeros((1, 1), jnp.int32)
    for on_input, expected in ((True, 0.73106), (False, 1.76159)):  # silu(1) * 1 and 0.5 * silu(2) * 2
        y = jmoe.fused_moe(x, ones, ones[:, 0], weights, ids, weight_on_input=on_input, implementation=implementation)
        np.testing.assert_allclose(y, [[expected]], atol=5e-6)


@pytest.mark.parametrize(
    "text, activation",
    [
        ("silu", Activation(name="swiglu")),
        ("swiglu", swiglu()),
        ("swigluoai", swiglu(1.702, 1.0, 7.0)),
        ("swiglu:alpha=1.702,beta=1,limit=7", swiglu(1.702, 1.0, 7.0)),
        ("silu:limit=7", swiglu(limit=7.0)),
        ("swiglustep:limit=7", Activation(name="swiglustep", limit=7.0)),
        ("gelu", Activation(name="gelu")),
        ("gelu_pytorch_tanh", Activation(name="gelu_tanh")),
        ("relu2", Activation(name="relu2")),
    ],
)
def test_names(text, activation):
    assert as_activation(text) == activation
    assert as_activation(activation) is activation


def test_every_known_name_is_one():
    for name in known_activations():
        text = name + ":limit=7" if name == "swiglustep" else name
        assert isinstance(as_activation(text), Activation)


@pytest.mark.parametrize(
    "text", ["silu", "swiglu:alpha=1.702,beta=1,limit=7", "swiglustep:limit=7", "gelu_tanh", "relu2"]
)
def test_an_activation_prints_as_the_text_it_is_made_from(text):
    assert str(as_activation(text)) == text
    assert as_activation(str(as_activation(text))) == as_activation(text)


def test_equal_activations_are_one_jit_key():
    assert hash(swiglu(1, 0, None)) == hash(Activation(name="silu"))
    assert swiglu(limit=7) == swiglu(limit=np.float32(7))
    assert swiglu(limit=math.inf) == swiglu()


@pytest.mark.parametrize(
    "text, message",
    [
        ("swish", r"activation 'swish' is unknown; known are .*swiglustep.*relu2.*silu.*swigluoai"),
        ("SiLU", r"activation 'SiLU' is unknown"),
        ("", r"activation '' is unknown"),
        ("relu2:limit=7", r"activation 'relu2' takes no limit, only swiglu and swiglustep do"),
        ("gelu:alpha=2", r"activation 'gelu' takes no alpha or beta, only swiglu does"),
        ("swiglustep", r"activation 'swiglustep' needs its limit, e\.g\. swiglustep:limit=7"),
        ("swiglustep:limit=7,beta=1", r"activation 'swiglustep' takes no alpha or beta"),
        ("swigluoai:limit=5", r"activation 'swigluoai:limit=5': swigluoai has fixed constants; write swiglu:"),
        ("swiglu:gamma=1", r"activation 'swiglu' has no option 'gamma'; options are alpha, beta and limit"),
        ("swiglu:limit=high", r"activation 'swiglu': limit='high' is not a number"),
        ("swiglu:limit", r"activation 'swiglu': limit='' is not a number"),
        ("swiglu:limit=0", r"activation limit=0\.0 must be positive, or None"),
        ("swiglu:limit=-7", r"activation limit=-7\.0 must be positive"),
        ("swiglu:limit=nan", r"activation limit=nan must be finite"),
        ("swiglu:alpha=inf", r"activation alpha=inf must be finite"),
    ],
)
def test_a_wrong_text_is_refused_in_a_sentence(text, message):
    with pytest.raises(ValueError, match=message):
        as_activation(text)


@pytest.mark.parametrize("value", [None, 7, jax.nn.silu])
def test_what_is_no_activation_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"activation=.* must be an Activation or the name of one"):
        as_activation(value)


@pytest.mark.parametrize("value", [jnp.ones(4), "7", True, None])
def test_arrays_are_no_static_constants(value):
    with pytest.raises(TypeError, match=r"activation alpha=.* must be a number; arrays.* go in activation_params"):
        swiglu(alpha=value)


@pytest.mark.parametrize("name", ["silu", "swigluoai", "swiglustep:limit=7", "gelu", "gelu_tanh"])
def test_gated_forms(name):
    as_activation(name).check_halves(2)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_ungated_forms(name):
    as_activation(name).check_halves(1)


def test_gated_relu2_is_refused():
    with pytest.raises(ValueError, match=r"activation relu2 has no gated form, but w13 has two halves"):
        as_activation("relu2").check_halves(2)


@pytest.mark.parametrize("name", ["swigluoai", "silu:limit=7", "swiglu:beta=1", "swiglustep:limit=7"])
def test_a_gated_activation_needs_both_halves(name):
    with pytest.raises(ValueError, match=r"activation swiglu\S+ is gated, but here it is of one array"):
        as_activation(name).check_halves(1)


@pytest.mark.parametrize("name", known_activations())
def test_activations_stay_float32_under_strict_promotion_and_x64(name):
    activation = as_activation(name + ":limit=7" if name == "swiglustep" else name)
    x = jnp.linspace(-3, 3, 7, dtype=jnp.float32)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        y = ungated(activation, x) if activation.name == "relu2" else gated(activation, x, x)
    assert y.dtype == jnp.float32
