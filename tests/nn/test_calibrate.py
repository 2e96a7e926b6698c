"""calibrate: amax of inputs and intermediates, and the scales that follow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmoe
from jmoe.nn import FusedMoE, Linear, calibrate, quantize_model, scan_layers, stack_layers


class Small(nnx.Module):
    """Two flax layers, one of jmoe's, and one that is never called."""

    def __init__(self):
        self.first = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
        self.first.kernel.set_value(2 * jnp.eye(2))
        self.second = Linear.from_dense(3 * jnp.eye(2))
        self.unused = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.second(self.first(x))


def one_hot_moe(experts=3, **options):
    """Token t is a one-hot vector that the router sends to expert t; expert e's intermediate is silu(1) * (e + 1)."""
    eye = jnp.eye(experts)
    gate = jnp.ones((experts, 1, experts))
    up = jnp.arange(1.0, experts + 1)[:, None, None] * jnp.ones((experts, 1, experts))
    return FusedMoE.from_dense(
        (gate, up), jnp.ones((experts, experts, 1)), jmoe.Routing(top_k=1), router_weight=10 * eye, **options
    )


SILU_1 = 0.7310586


def test_inputs_are_measured_over_all_batches():
    batches = [jnp.asarray([[1.0, -3.0]]), jnp.asarray([[2.0, 0.5]])]
    calibration = calibrate(Small(), batches)
    assert calibration.inputs == {"first": 3.0, "second": 6.0}


def test_forward_may_be_compiled_and_take_pytrees():
    forward = nnx.jit(lambda model, batch: model(batch["x"]))
    calibration = calibrate(Small(), [{"x": jnp.asarray([[1.0, -3.0]])}], forward=forward)
    assert calibration.inputs == {"first": 3.0, "second": 6.0}


def test_the_model_is_as_before():
    model = Small()
    before = nnx.graphdef(model)
    calibrate(model, [jnp.ones((1, 2))])
    assert nnx.graphdef(model) == before
    assert type(model.second) is Linear and not hasattr(model.second, "observed_input")


def test_intermediates_are_measured_an_expert_over_its_own_tokens():
    class Model(nnx.Module):
        def __init__(self):
            self.moe = one_hot_moe()

        def __call__(self, x):
            return self.moe(x)

    x = jnp.eye(3)[jnp.asarray([0, 2, 2, 0, 1])]
    calibration = calibrate(Model(), [x, x[:2]])
    np.testing.assert_allclose(calibration.intermediates["moe"], SILU_1 * np.asarray([1, 2, 3]), rtol=1e-6)
    assert calibration.slots["moe"].tolist() == [3, 1, 3]
    assert calibration.inputs["moe"] == 1.0


def test_j02_an_expert_without_tokens_takes_the_largest_scale_with_a_warning():
    class Model(nnx.Module):
        def __init__(self):
            self.moe = one_hot_moe()

        def __call__(self, x):
            return self.moe(x)

    model = Model()
    calibration = calibrate(model, [jnp.eye(3)[:2]])
    assert calibration.slots["moe"].tolist() == [1, 1, 0]
    with pytest.warns(UserWarning, match="moe: experts 2 got no token in calibration"):
        quantize_model(model, [("moe", "fp8_tensor_static")], calibration=calibration)
    expected = SILU_1 * np.asarray([1, 2, 2]) / 448
    np.testing.assert_allclose(model.moe.w2_input_scale.get_value(), expected, rtol=1e-6)


def test_an_input_that_is_zero_throughout_has_scale_1():
    model = Small()
    calibration = calibrate(model, [jnp.zeros((1, 2))])
    quantize_model(model, [("second", "fp8_tensor_static")], calibration=calibration)
    assert float(model.second.weight_input_scale.get_value()) == 1.0


def test_stacked_layers_are_measured_one_by_one():
    class Stack(nnx.Module):
        def __init__(self):
            self.layers = stack_layers([Linear.from_dense(s * jnp.eye(2)) for s in (2.0, 5.0, 1.0)])

        def __call__(self, x):
            return scan_layers(lambda layer, x: layer(x), self.layers, x)

    class Model(nnx.Module):
        def __init__(self):
            self.stack = Stack()

        def __call__(self, x):
            return self.stack(x)

    model = Model()
    calibration = calibrate(model, [jnp.asarray([[1.0, -1.0]])])
    assert calibration.inputs["stack.layers"].tolist() == [1, 2, 10]
    quantize_model(model, [(r"stack\.layers", "fp8_tensor_static")], calibration=calibration)
    np.testing.assert_allclose(model.stack.layers.weight_input_scale.get_value() * 448, [1, 2, 10], rtol=1e-6)
    np.testing.assert_allclose(model(jnp.asarray([[1.0, -1.0]])), [[10.0, -10.0]], rtol=0.1)


def test_stacked_experts_are_measured_layer_by_layer():
    class Model(nnx.Module):
        def __init__(self):
            self.layers = stack_layers([one_hot_moe(), one_hot_moe()])

        def __call__(self, x):
            return scan_layers(lambda layer, x: (layer(x), x)[1], self.layers, x)

    calibration = calibrate(Model(), [jnp.eye(3)])
    np.testing.assert_allclose(calibration.intermediates["layers"], SILU_1 * np.asarray([[1, 2, 3]] * 2), rtol=1e-6)


def test_calibrated_static_recipes_are_close_to_the_dense_model():
    class Model(nnx.Module):
        def __init__(self):
            self.moe = FusedMoE(32, 32, 4, jmoe.Routing(top_k=2), param_dtype="float32", rngs=nnx.Rngs(0))
            self.head = nnx.LinearGeneral(32, (4, 8), rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.head(self.moe(x))

    x = jax.random.normal(jax.random.key(0), (64, 32))
    for recipe, bound in (("fp8_tensor_static", 0.08), ("nvfp4", 0.3)):
        model = Model()
        expected = model(x)
        quantize_model(model, [(".*", recipe)], calibration=calibrate(model, [x]))
        assert float(jnp.linalg.norm(model(x) - expected) / jnp.linalg.norm(expected)) < bound


def test_what_is_not_finite_and_no_batches_are_refused():
    with pytest.raises(ValueError, match="batches is empty"):
        calibrate(Small(), [])
    with pytest.raises(ValueError, match="first met an input that is not finite"):
        calibrate(Small(), [jnp.asarray([[jnp.inf, 0.0]])])


def test_a_second_calibration_compiles_nothing():
    events = []

    def listen(event, duration, **facts):
        events.extend([event] * ("backend_compile" in event))

    model = nnx.Sequential(Linear(4, 4, rngs=nnx.Rngs(0)), Linear(4, 4, rngs=nnx.Rngs(1)))
    batch = jnp.ones((3, 4))

    def forward(model, batch):
        return model(batch * 2)

    for run in (lambda: calibrate(model, [batch]), lambda: calibrate(model, [batch], forward=forward)):
        run()
        jax.monitoring.register_event_duration_secs_listener(listen)
        again = run()
        jax.monitoring.unregister_event_duration_listener(listen)
        assert not events
    assert float(again.inputs["layers.0"]) == 2


def test_what_a_forward_pass_reads_from_elsewhere_is_read_in_every_call():
    shift = nnx.Param(jnp.zeros((4,)))
    model = nnx.Sequential(Linear(4, 4))
    for value in (1.0, 5.0):
        shift.set_value(jnp.full((4,), value))
        found = calibrate(model, [jnp.zeros((1, 4))], forward=lambda m, x: m(x + shift.get_value()))
        assert float(found.inputs["layers.0"]) == value
