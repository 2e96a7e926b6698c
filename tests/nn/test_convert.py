"""quantize_model: what it replaces, what it reports, what it refuses, and how much memory it takes."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmoe
from jmoe.nn import Calibration, FusedMoE, Linear, convert, quantize_model, scan_layers, stack_layers

ROUTING = jmoe.Routing(top_k=2, renormalize=True)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(num_heads=2, in_features=32, qkv_features=32, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.mlp = nnx.List([nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)])

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp[1](nnx.relu(self.mlp[0](x)))


class Model(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.moe = FusedMoE(32, 16, 4, ROUTING, param_dtype="float32", rngs=rngs)
        self.head = Linear(32, 10, param_dtype="float32", rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.moe(x))


def inputs():
    return jax.random.normal(jax.random.key(3), (2, 5, 32))


def relative(a, b):
    return float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b))


def test_a_model_computes_with_quantized_weights_afterwards():
    model = Model()
    expected = model(inputs())
    report = quantize_model(model, [("head", None), (r".*\.mlp\..*", "int8_w8a16"), (".*", "fp8_channel")], sqnr=True)
    assert 1e-4 < relative(model(inputs()), expected) < 0.1
    assert isinstance(model.blocks[1].mlp[0], Linear)
    assert model.blocks[0].attention.query.weight.dtype == jnp.float8_e4m3fn
    assert model.moe.qw2.scheme.format == "e4m3"
    assert isinstance(model.blocks[0].norm, nnx.LayerNorm)

    rows = {row.path: row for row in report.layers}
    assert list(rows)[:2] == ["blocks.0.attention.query", "blocks.0.attention.key"]
    assert len(rows) == 2 * 6 + 2
    row = rows["blocks.1.mlp.0"]
    assert (row.kind, row.rule, row.pattern, row.recipe) == ("Linear", 1, r".*\.mlp\..*", "int8_w8a16")
    assert (row.bytes_before, row.bytes_after) == (64 * 32 * 4, 64 * 32 + 64 * 4)
    assert rows["head"].recipe is None and rows["head"].rule == 0 and rows["head"].sqnr_db is None
    dense = Model().blocks[1].mlp[0].kernel.get_value().T
    noise = model.blocks[1].mlp[0].qweight.dequantize() - dense
    expected = 10 * np.log10(float(jnp.sum(dense**2)) / float(jnp.sum(noise**2)))
    assert row.sqnr_db == pytest.approx(expected, abs=1e-3)
    assert 30 < rows["moe"].sqnr_db < 33  # 31.5 dB for normal data in fp8


def test_the_report_prints_as_a_table_with_a_row_for_every_layer():
    model = nnx.Sequential(nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(128, 10, rngs=nnx.Rngs(1)))
    report = quantize_model(model, [(r"layers\.0", "int4:group=32")])
    assert str(report).splitlines() == [
        "layer     kind    rule          recipe          bytes  quantized  SQNR dB",
        r"layers.0  Linear  0: layers\.0  int4:group=32  32,768      5,120",
        "layers.2  Linear  none          left as it is   5,120      5,120",
        "all                                            37,888     10,240",
    ]


def test_bytes_of_the_report_are_those_of_the_state():
    model = Model()
    report = quantize_model(model, [(".*", "int4:group=16")])
    kinds = nnx.state(model, jmoe.nn.QuantizedParam)
    assert report.bytes_after == sum(leaf.nbytes for leaf in jax.tree.leaves(kinds))


def test_dense_weights_are_freed_as_it_goes(monkeypatch):
    def live_bytes():
        return sum(x.nbytes for x in jax.live_arrays() if x.shape in ((256, 256), (256, 1)))

    gc.collect()
    others = live_bytes()  # of what ran before in this process
    model = nnx.List([nnx.Linear(256, 256, rngs=nnx.Rngs(i)) for i in range(8)])
    bytes_of_one = 256 * 256 * 4
    live = []

    def measured(*args):
        if not isinstance(args[0], jax.core.Tracer):  # which the rehearsal is made with
            live.append(live_bytes() - others)
        return jmoe.quantize(*args)

    monkeypatch.setattr(convert, "quantize", measured)
    quantize_model(model, [(".*", "int8")])
    assert len(live) == 8
    # Before each layer: the dense ones that are left, the transposed copy at hand, and a quarter for each one done.
    expected = [(8 - done + 1 + done / 4) * bytes_of_one for done in range(8)]
    np.testing.assert_allclose(live, expected, rtol=0.01)


def test_a_module_in_two_places_is_quantized_once_and_stays_one():
    class Tied(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.b = self.a

    model = Tied()
    report = quantize_model(model, [("a", "int8")])
    assert [row.path for row in report.layers] == ["a"]
    assert model.a is model.b and isinstance(model.b, Linear)


def test_layers_come_in_the_order_of_their_numbers():
    layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(i)) for i in range(12)])
    model = nnx.merge(*nnx.split(layers))
    assert [row.path for row in quantize_model(model, [(".*", "int8")]).layers] == [str(i) for i in range(12)]


def test_modules_in_plain_containers_are_found_and_replaced():
    class Nested(nnx.Module):
        def __init__(self):
            layer = lambda i: nnx.Linear(4, 4, rngs=nnx.Rngs(i))  # noqa: E731
            self.table = nnx.data({"x": [layer(0), layer(1)]})
            self.fixed = nnx.data((layer(2),))

    model = Nested()
    quantize_model(model, [(r"table\.x\.1", "int8")])
    assert isinstance(model.table["x"][1], Linear) and isinstance(model.table["x"][0], nnx.Linear)
    with pytest.raises(ValueError, match=r"fixed\.0 is held by a tuple"):
        quantize_model(model, [(r"fixed\.0", "int8")])


def test_stacked_flax_layers_stay_stacked_and_scan():
    @nnx.vmap
    def create(key):
        return Block(nnx.Rngs(key))

    class Scanned(nnx.Module):
        def __init__(self):
            self.blocks = create(jax.random.split(jax.random.key(0), 3))

    model = Scanned()
    dense = nnx.clone(model)
    quantize_model(model, [(r".*\.mlp\..*", "int8_w8a16"), (r".*\.query", "fp8_tensor")])
    assert model.blocks.mlp[0].weight.shape == (3, 64, 32)
    assert model.blocks.mlp[0].weight_scale.shape == (3, 64, 1)
    assert model.blocks.attention.query.weight_scale.shape == (3, 1, 1)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def forward(block, x):
        return block(x)

    expected = forward(dense.blocks, inputs())
    assert 1e-4 < relative(forward(model.blocks, inputs()), expected) < 0.1
    by_index = scan_layers(lambda block, x: block(x), model.blocks, inputs())
    np.testing.assert_allclose(by_index, forward(model.blocks, inputs()), rtol=1e-4, atol=1e-5)


def test_a_scanned_einsum_with_batch_axes_indexes_its_layer():
    class Experts(nnx.Module):
        def __init__(self, seed):
            self.up = nnx.Einsum("ebd,edf->ebf", (3, 6, 6), (3, 6), rngs=nnx.Rngs(seed))
            self.up.bias.set_value(jax.random.normal(jax.random.key(seed), (3, 6)))

        def __call__(self, x):
            return self.up(x)

    layers = [Experts(seed) for seed in range(2)]
    for layer in layers:
        quantize_model(layer, [("up", "int8")])
    x = jax.random.normal(jax.random.key(1), (3, 5, 6))
    expected = layers[1](layers[0](x))
    found = scan_layers(lambda layer, x: layer(x), stack_layers(layers), x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_stacked_experts_are_quantized_layer_by_layer():
    class Wrapped(nnx.Module):
        def __init__(self, moe):
            self.moe = moe

    layers = [FusedMoE(16, 8, 4, ROUTING, param_dtype="float32", rngs=nnx.Rngs(i)) for i in range(3)]
    model = Wrapped(stack_layers(layers))
    quantize_model(model, [("moe", "nvfp4_w4a16")])
    for i, layer in enumerate(layers):
        quantize_model(Wrapped(layer), [("moe", "nvfp4_w4a16")])
        np.testing.assert_array_equal(model.moe.w13_global_scale.get_value()[i], layer.w13_global_scale.get_value())
        np.testing.assert_array_equal(model.moe.w2.get_value()[i], layer.w2.get_value())


def test_quantizing_again_is_refused_and_nothing_is_changed():
    model = Model()
    quantize_model(model, [("head", "int8")])
    before = nnx.state(model)
    with pytest.raises(ValueError, match=r"head is quantized already \(weight: int8\), .*rule \('head', None\)"):
        quantize_model(model, [(".*", "int4")])
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    quantize_model(model, [("head", None), (".*", "int8")])


def test_static_recipes_need_calibration_of_the_layer():
    with pytest.raises(ValueError, match=r"recipe 'nvfp4' of head has given activation scales: pass calibration"):
        quantize_model(Model(), [("head", "nvfp4")])
    known = Calibration(inputs={"moe": np.float32(1)})
    with pytest.raises(ValueError, match="calibration has nothing on 'head'; its layers are moe"):
        quantize_model(Model(), [("head", "nvfp4")], calibration=known)
    with pytest.raises(ValueError, match="calibration has nothing on 'moe'"):
        quantize_model(Model(), [("moe", "nvfp4")], calibration=known)


def test_scales_of_a_calibration_are_amax_over_the_formats_range():
    model = Model()
    calibration = Calibration(
        inputs={"head": np.float32(448), "moe": np.float32(2688)},
        intermediates={"moe": np.asarray([2688, 1344, 2688, 5376], np.float32)},
        slots={"moe": np.ones(4, np.int64)},
    )
    quantize_model(model, [("head", "fp8_tensor_static"), ("moe", "nvfp4")], calibration=calibration)
    assert float(model.head.weight_input_scale.get_value()) == pytest.approx(1.0)
    assert float(model.moe.w13_input_scale.get_value()) == pytest.approx(1.0)
    np.testing.assert_allclose(model.moe.w2_input_scale.get_value(), [1, 0.5, 1, 2], rtol=1e-6)


def test_it_works_on_an_abstract_model():
    def quantized():
        model = Model()
        quantize_model(model, [(".*", "fp8_block")])
        return model

    abstract, concrete = nnx.eval_shape(quantized), quantized()
    shapes = lambda m: jax.tree.map(lambda x: (x.shape, x.dtype), nnx.to_pure_dict(nnx.state(m)))  # noqa: E731
    assert shapes(abstract) == shapes(concrete)


def test_prepare_checks_the_layout_and_leaves_plain_arrays():
    w = jnp.ones((8, 16))
    assert jmoe.prepare(w, op="linear") is w
    q = jmoe.quantize(w, "int8")
    assert jmoe.prepare(q, op="linear", device="h100") is q
    with pytest.raises(ValueError, match="op='gemm' must be 'linear'"):
        jmoe.prepare(q, op="gemm")


class Tied(nnx.Module):
    """One layer in two places, and two layers with one weight."""

    def __init__(self, cls=nnx.Linear):
        self.first = cls(32, 32, rngs=nnx.Rngs(0))
        self.again = self.first
        self.one, self.two = cls(32, 32, rngs=nnx.Rngs(1)), cls(32, 32, rngs=nnx.Rngs(2))
        name = "kernel" if cls is nnx.Linear else "weight"
        setattr(self.two, name, getattr(self.one, name))


@pytest.mark.parametrize("cls", [nnx.Linear, Linear])
def test_layers_and_weights_that_are_shared_are_shared_afterwards(cls):
    model = Tied(cls)
    x = jax.random.normal(jax.random.key(3), (2, 32))
    dense = model.two(x)
    report = quantize_model(model, [("again", "int4:group=16"), ("one|two", "int8")])
    assert [(layer.path, layer.recipe) for layer in report.layers] == [
        ("first", "int4:group=16"),
        ("one", "int8"),
        ("two", "int8"),
    ]
    assert model.again is model.first and isinstance(model.first, Linear) and model.first.weight.dtype == jnp.uint8
    assert model.two.weight is model.one.weight and model.two.weight_scale is model.one.weight_scale
    assert model.two is not model.one
    assert 0 < relative(model.two(x), dense) < 0.02


def test_a_weight_that_is_shared_may_be_quantized_in_one_place_alone():
    model = Tied()
    quantize_model(model, [("one", "int8"), ("two", "int4:group=16"), ("first", None)])
    assert (model.one.recipe.name, model.two.recipe.name) == ("int8", "int4:group=16")
    model = Tied()
    kernel = model.two.kernel
    quantize_model(model, [("one", "int8")])
    assert model.two.kernel is kernel


def refused_at_the_last_layer():
    """(model, keyword arguments of quantize_model, message): wrong in the second of two layers."""
    linear = lambda **options: nnx.Linear(4, 4, rngs=nnx.Rngs(0), **options)  # noqa: E731
    wrong_shape = Calibration(inputs={"a": np.float32(1), "b": np.ones((3,), np.float32)})
    yield nnx.Dict(a=linear(), b=linear(param_dtype=jnp.float8_e5m2)), {}, "weight has dtype float8_e5m2"
    yield nnx.Dict(a=linear(), b=linear(dtype=jnp.float8_e5m2)), {}, "dtype=float8_e5m2 must be"
    yield nnx.Dict(a=linear(), b=linear()), {"calibration": wrong_shape, "recipe": "nvfp4"}, "broadcast|shape|reshape"
    yield nnx.Dict(a=linear(), b=linear()), {"device": "h1000"}, "device 'h1000' is unknown"
    held = nnx.Dict(a=linear(), b=nnx.data((linear(),)))
    yield held, {}, "b.0 is held by a tuple, which cannot be changed in place; use an nnx.List"


@pytest.mark.parametrize("case", range(5))
def test_nothing_is_changed_where_a_later_layer_is_refused(case):
    model, options, message = list(refused_at_the_last_layer())[case]
    graphdef, before = nnx.split(model)
    with pytest.raises((ValueError, TypeError), match=message):
        quantize_model(model, [(".*", options.pop("recipe", "int8"))], **options)
    assert nnx.graphdef(model) == graphdef
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
