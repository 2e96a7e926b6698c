"""scan_layers and stack_layers: equality with a Python loop, gradients, state, and memory."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmoe
from jmoe.nn import FusedMoE, Linear, scan_layers, stack_layers

H, I, E, L = 16, 8, 4, 3
ROUTING = jmoe.Routing(top_k=2, renormalize=True)


class Block(nnx.Module):
    """A norm's scale, a linear with a bias, and experts: something of every kind of variable."""

    def __init__(self, recipe, seed):
        rngs = nnx.Rngs(seed)
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (H,)))
        self.proj = Linear(H, H, use_bias=True, recipe=recipe, param_dtype="float32", rngs=rngs)
        self.proj.set_bias(jax.random.normal(rngs.params(), (H,)))
        self.moe = FusedMoE(H, I, E, ROUTING, use_bias=True, recipe=recipe, param_dtype="float32", rngs=rngs)
        self.moe.set_biases(jax.random.normal(rngs.params(), (E, 2, I)), jax.random.normal(rngs.params(), (E, H)))
        if self.proj.weight_input_scale is not None:
            self.proj.weight_input_scale.set_value(jnp.float32(0.01 * (seed + 1)))
            self.moe.w2_input_scale.set_value(0.01 * jnp.arange(1, E + 1, dtype=jnp.float32))

    def __call__(self, x):
        x = x + self.proj(x * self.scale.get_value())
        return x + self.moe(x)


def blocks(recipe):
    return [Block(recipe, seed) for seed in range(L)]


def inputs():
    return jax.random.normal(jax.random.key(7), (5, H))


def loop(layers, carry):
    for layer in layers:
        carry = body(layer, carry)
    return carry


def body(layer, carry):
    return {"x": layer(carry["x"]), "layers": carry["layers"] + 1}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor_static", "int4:group=8,zero_point"])
def test_it_is_a_python_loop(recipe):
    layers = blocks(recipe)
    start = {"x": inputs(), "layers": 0}
    expected = loop(layers, start)
    stacked = stack_layers(layers)
    result = jax.jit(lambda m, c: scan_layers(body, m, c))(stacked, start)
    np.testing.assert_allclose(result["x"], expected["x"], rtol=1e-5, atol=1e-5)
    assert int(result["layers"]) == L


def test_stacked_variables_have_a_leading_axis_and_the_same_names():
    layers = blocks("int4:group=8")
    stacked = stack_layers(layers)
    assert stacked.moe.w13.shape == (L, E, 2, I, H // 2)
    assert stacked.moe.w13_scale.shape == (L, E, 2, I, 2)
    assert stacked.proj.bias.shape == (L, H)
    assert stacked.proj.qweight.shape == (L, H, H)
    np.testing.assert_array_equal(stacked.proj.weight.get_value()[1], layers[1].proj.weight.get_value())


@pytest.mark.parametrize("slice_params", [False, True])
def test_gradients_are_those_of_the_loop(slice_params):
    layers = blocks("bf16")

    def by_loop(state):
        return jnp.sum(loop(layers_from(state), {"x": inputs(), "layers": 0})["x"] ** 2)

    def layers_from(state):
        return [nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], state)) for i in range(L)]

    def by_scan(state):
        stacked = nnx.merge(graphdef, state)
        return jnp.sum(scan_layers(body, stacked, {"x": inputs(), "layers": 0}, slice_params=slice_params)["x"] ** 2)

    graphdef, state = nnx.split(stack_layers(layers))
    expected, found = jax.jit(jax.grad(by_loop))(state), jax.jit(jax.grad(by_scan))(state)
    # Relative to each array: its small entries are differences of large ones.
    errors = jax.tree.map(lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)), found, expected)
    assert max(jax.tree.leaves(errors)) < 1e-5


def test_variables_that_the_body_changes_are_kept_in_the_stacked_module():
    class Counted(nnx.Module):
        def __init__(self, start):
            self.proj = Linear.from_dense(jnp.eye(2))
            self.seen = nnx.BatchStat(jnp.asarray(start))

        def __call__(self, x):
            self.seen.set_value(self.seen.get_value() + jnp.sum(x))
            return self.proj(x) * 2

    stacked = stack_layers([Counted(0.0), Counted(10.0), Counted(20.0)])
    y = scan_layers(lambda layer, x: layer(x), stacked, jnp.ones((2,)))
    assert y.tolist() == [8, 8]
    assert stacked.seen.get_value().tolist() == [2, 14, 28]


def test_changing_a_weight_or_adding_a_variable_is_refused():
    stacked = stack_layers([Linear.from_dense(jnp.eye(2))] * 2)

    def scales(layer, x):
        layer.weight.set_value(layer.weight.get_value() * 2)
        return x

    def adds(layer, x):
        layer.extra = nnx.Param(x)
        return x

    with pytest.raises(ValueError, match="body changes weight, a weight that is shared by all steps"):
        scan_layers(scales, stacked, jnp.ones((2,)))
    with pytest.raises(ValueError, match="body adds the variable extra"):
        scan_layers(adds, stacked, jnp.ones((2,)))


def test_layers_that_differ_are_not_stacked():
    with pytest.raises(ValueError, match="layers is empty"):
        stack_layers([])
    with pytest.raises(
        ValueError, match=r"layers\[1\] differs from layers\[0\]: weight is bfloat16\[3, 2\], not bfloat16\[2, 2\]"
    ):
        stack_layers([Linear(2, 2), Linear(2, 3)])
    with pytest.raises(
        ValueError,
        match=r"layers\[1\] differs from layers\[0\]: weight_scale is float32\[2, 1\], not absent|weight is int8",
    ):
        stack_layers([Linear(2, 2), Linear(2, 2, recipe="int8")])
    with pytest.raises(ValueError, match=r"layers\[1\] differs from layers\[0\] in structure"):
        stack_layers([Linear(2, 2), Linear(2, 2, activation="silu")])


def test_a_module_that_is_not_stacked_is_refused():
    layer = stack_layers([Linear(2, 2, use_bias=True)] * 3)
    layer.bias = nnx.Param(jnp.ones((4, 2)))
    with pytest.raises(ValueError, match=r"leading axes are not one extent \(bias: 4, weight: 3\)"):
        scan_layers(lambda layer, x: layer(x), layer, jnp.ones((2,)))


@pytest.mark.parametrize("recipe", ["bf16", "int8_w8a16", "nvfp4_w4a16"])
def test_no_step_copies_a_layers_experts(recipe):
    hidden, intermediate, experts, layers = 256, 128, 64, 4
    one = FusedMoE(hidden, intermediate, experts, ROUTING, recipe=recipe, implementation="xla")
    graphdef, state = nnx.split(nnx.eval_shape(lambda: stack_layers([one] * layers)))

    def run(state, x):
        return scan_layers(lambda layer, x: layer(x), nnx.merge(graphdef, state), x)

    x = jax.ShapeDtypeStruct((2, hidden), jnp.float32)
    compiled = jax.jit(run).lower(state, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < one.w13.get_value().nbytes
    # No array of any dtype is one layer's w13; the stack of four is there.
    assert f"[{layers},{experts},2,{intermediate}," in compiled.as_text()
    assert f"[{experts},2,{intermediate}," not in compiled.as_text()


def groups(recipe):
    """Two groups of two blocks, and the blocks."""
    layers = [Block(recipe, seed) for seed in range(4)]
    return stack_layers([stack_layers(layers[:2]), stack_layers(layers[2:])]), layers


def over_groups(inner, outer=lambda f: f, **options):
    def run(model, x):
        body = lambda group, x: scan_layers(inner(lambda layer, x: layer(x)), group, x, **options)  # noqa: E731
        return scan_layers(outer(body), model, x, **options)

    return run


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor_static", "int4:group=8,zero_point"])
@pytest.mark.parametrize("slice_params", [False, True])
def test_a_scan_over_groups_of_layers_is_a_python_loop(recipe, slice_params):
    model, layers = groups(recipe)
    expected = inputs()
    for layer in layers:
        expected = layer(expected)
    run = over_groups(lambda f: f, slice_params=slice_params)
    np.testing.assert_allclose(nnx.jit(run)(model, inputs()), expected, rtol=1e-5, atol=1e-5)


def test_scans_nest_three_times():
    layers = [Linear.from_dense(jnp.asarray([[1.0, i], [0.0, 1.0]]), dtype="float32") for i in range(8)]
    model = stack_layers(
        [stack_layers([stack_layers(layers[4 * g + 2 * h :][:2]) for h in range(2)]) for g in range(2)]
    )

    def run(depth, model, x):
        return model(x) if depth == 0 else scan_layers(lambda m, x: run(depth - 1, m, x), model, x)

    # Each layer adds i times the second entry to the first: 0 + 1 + ... + 7 = 28.
    assert jax.jit(lambda x: run(3, model, x))(jnp.asarray([0.0, 1.0])).tolist() == [28, 1]


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
@pytest.mark.parametrize("recipe", ["bf16", "int8"])
def test_bodies_may_be_transformed_and_gradients_are_those_of_the_loop(transform, recipe):
    model, layers = groups(recipe)

    def by_loop(layers, x):
        for layer in layers:
            x = layer(x)
        return jnp.sum(x**2)

    def by_scan(model, x):
        return jnp.sum(over_groups(transform, transform)(model, x) ** 2)

    value, found = nnx.value_and_grad(by_scan)(model, inputs())
    loss, expected = nnx.value_and_grad(by_loop)(nnx.List(layers), inputs())
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    expected = [expected[i] for i in range(4)]
    stacked = jax.tree.map(lambda *g: jnp.stack(g).reshape(2, 2, *g[0].shape), *expected)
    errors = jax.tree.map(
        lambda a, b: float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)),
        nnx.to_pure_dict(found),
        nnx.to_pure_dict(stacked),
    )
    assert max(jax.tree.leaves(errors)) < 1e-5


def test_a_weight_is_refused_a_change_under_remat_too():
    stacked = stack_layers([Linear.from_dense(jnp.eye(2), jnp.ones((2,)))] * 2)

    def doubled(layer, x):
        layer.weight.set_value(layer.weight.get_value() * 2)
        return layer(x)

    def replaced(layer, x):
        layer.set_weight(jnp.ones((2, 2)))
        return x

    def removed(layer, x):
        layer.set_bias(None)
        return layer(x)

    for body in (doubled, replaced, removed):
        for transform in (lambda f: f, nnx.remat):
            with pytest.raises(ValueError, match=r"body changes (weight|bias), a weight that is shared by all steps"):
                scan_layers(transform(body), stacked, jnp.ones((2,)))


def test_arrays_that_are_no_variables_are_stacked_and_sliced():
    class Shifted(nnx.Module):
        def __init__(self, shift):
            self.shift = nnx.data(jnp.asarray(shift))

        def __call__(self, x):
            return x * 2 + self.shift

    stacked = stack_layers([Shifted(1.0), Shifted(10.0)])
    assert float(scan_layers(lambda layer, x: layer(x), stacked, jnp.asarray(0.0))) == 12
    with pytest.raises(ValueError, match=r"layers\[1\] differs from layers\[0\]: shift is float32\[2\]"):
        stack_layers([Shifted(1.0), Shifted([1.0, 2.0])])


@pytest.fixture
def compilations():
    """A function that says how many programs a call compiles."""
    events = []

    def listen(event, duration, **facts):
        events.extend([event] * ("backend_compile" in event))

    jax.monitoring.register_event_duration_secs_listener(listen)

    def count(call):
        before = len(events)
        jax.block_until_ready(call())
        return len(events) - before

    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_second_call_outside_jit_compiles_nothing(compilations):
    stacked, other = (
        stack_layers([Linear(4, 4, recipe="int8", rngs=nnx.Rngs(i + s)) for i in range(2)]) for s in (0, 9)
    )
    scale = 2.0

    def call(model):
        return scan_layers(lambda layer, x: layer(x) * scale, model, jnp.ones((3, 4)))

    assert compilations(lambda: call(stacked)) > 0
    assert compilations(lambda: call(stacked)) == 0
    # Another model of that structure is another argument of the same program.
    assert compilations(lambda: call(other)) == 0
    assert not np.array_equal(call(stacked), call(other))
    scale = 3.0
    np.testing.assert_allclose(call(stacked), scan_layers(lambda layer, x: layer(x) * 3.0, stacked, jnp.ones((3, 4))))
    assert compilations(lambda: call(stacked)) == 0


def test_what_a_body_reads_from_elsewhere_is_read_in_every_call():
    stacked = stack_layers([Linear.from_dense(jnp.eye(2))] * 2)
    for read in (lambda: SHIFT.get_value(), lambda: LOCAL[0].get_value()):
        for value in (1.0, 5.0):
            SHIFT.set_value(jnp.full((2,), value))
            body = lambda layer, x: layer(x) + read()  # noqa: B023, E731
            assert scan_layers(body, stacked, jnp.zeros((2,))).tolist() == [2 * value] * 2
        for value in (1.0, 5.0):
            SHIFT.set_value(jnp.full((2,), value))
            assert scan_layers(_shifted, stacked, jnp.zeros((2,))).tolist() == [2 * value] * 2


SHIFT = nnx.Param(jnp.zeros((2,)))
LOCAL = [SHIFT]


def _shifted(layer, x):
    return layer(x) + SHIFT.get_value()


def test_a_model_is_not_kept_alive_by_the_compiled_loop():
    stacked = stack_layers([Linear(4, 4)] * 2)
    scan_layers(lambda layer, x: layer(x), stacked, jnp.ones((3, 4)))
    alive = weakref.ref(stacked.weight.get_raw_value())
    del stacked
    gc.collect()
    assert alive() is None
