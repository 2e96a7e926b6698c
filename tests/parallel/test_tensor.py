"""Operations on a mesh of four simulated devices against the same operations on one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmoe
from jmoe import parallel
from jmoe.parallel import expert_map, experts_on

# A process of its own may have fewer devices; tests/conftest.py asks for four.
pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")

M, N, K = 6, 64, 128
T, E, H, I, SLOTS = 6, 4, 32, 64, 2

# A scale of x and of h that is measured over a tensor, a token, a token and a block, a block, given, and none.
RECIPES = ["bf16", "fp8_tensor", "int8", "nvfp4_per_token", "fp8_block:block=16", "int4:group=16,zero_point"]
LINEAR = {
    "columns": {"out_axes": "model", "token_axes": ("data",)},
    "rows": {"in_axes": "model", "token_axes": ("data",)},
    "columns and rows": {"out_axes": "data", "in_axes": "model"},
    "rows over both": {"in_axes": ("data", "model")},
}
MOE = {
    "experts": {"expert_axes": "model", "token_axes": ("data",)},
    "intermediate": {"intermediate_axes": "model", "token_axes": ("data",)},
    "experts and intermediate": {"expert_axes": "data", "intermediate_axes": "model"},
    "experts over both": {"expert_axes": ("data", "model")},
}


def mesh(shape=(2, 2), names=("data", "model")):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def quantized(w, recipe):
    return w if recipe == "bf16" else jmoe.quantize(w, recipe)


def assert_close(got, expected, bound=1e-5):
    assert got.shape == expected.shape and got.dtype == expected.dtype
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(got - expected) <= bound * np.linalg.norm(expected)


def moe_arguments(recipe="bf16", experts=E):
    w13, w2 = normal(0, experts, 2, I, H) / 6, normal(1, experts, H, I) / 8
    weights = jax.nn.softmax(normal(2, T, SLOTS))
    ids = jnp.asarray(np.random.default_rng(3).integers(-1, experts, (T, SLOTS)), jnp.int32)
    # One token is far larger than the others, so that scales measured over a part of them would be others.
    x = normal(4, T, H).at[2].multiply(20)
    return x, quantized(w13, recipe), quantized(w2, recipe), weights, ids


@pytest.mark.parametrize("split", LINEAR)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_is_that_of_one_device(recipe, split):
    x, w, bias = normal(0, M, K).at[2].multiply(20), quantized(normal(1, N, K), recipe), normal(2, N)
    how = {"bias": bias, "activation": "silu"}
    expected = jmoe.linear(x, w, **how)
    with jax.set_mesh(mesh()):
        y = jax.jit(lambda x, w: parallel.linear(x, w, **how, **LINEAR[split]))(x, w)
    assert_close(y, expected)


@pytest.mark.parametrize("split", MOE)
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_are_those_of_one_device(recipe, split):
    arguments = moe_arguments(recipe)
    biases = {"b13": normal(5, E, 2, I), "b2": normal(6, E, H)}
    expected = jmoe.fused_moe(*arguments, **biases)
    with jax.set_mesh(mesh()):
        y = jax.jit(lambda *a: parallel.fused_moe(*a, **biases, **MOE[split]))(*arguments)
    assert_close(y, expected)


def test_tokens_are_spread_over_the_experts_of_all_devices():
    with jax.set_mesh(mesh()):
        for how in MOE.values():
            plan = jmoe.explain(lambda *a, how=how: parallel.fused_moe(*a, **how), *moe_arguments())
            [(op, _)] = plan.entries
            assert op.global_experts == E
            assert op.experts == (E // op.shards.experts if how.get("expert_axes") else E)


def test_the_reference_is_that_of_one_device_too():
    arguments, reference = moe_arguments("int8"), {"implementation": "reference"}
    expected = jmoe.fused_moe(*arguments, **reference)
    with jax.set_mesh(mesh()):
        assert_close(parallel.fused_moe(*arguments, **reference, **MOE["experts and intermediate"]), expected)


def test_given_scales_go_with_their_experts():
    x, w13, w2, weights, ids = moe_arguments("fp8_tensor_static")
    scales = {
        "input_scale": jnp.asarray([0.1, 0.2, 0.3, 0.4]),
        "intermediate_scale": jnp.asarray([0.04, 0.03, 0.02, 1]),
    }
    expected = jmoe.fused_moe(x, w13, w2, weights, ids, **scales)
    with jax.set_mesh(mesh()):
        for how in MOE.values():
            assert_close(parallel.fused_moe(x, w13, w2, weights, ids, **scales, **how), expected)


def test_e06_a_bias_is_added_once_whatever_is_split():
    # Weights of zero and a weight of one: the result is the bias.
    x, ids, weights = jnp.ones((T, H)), jnp.zeros((T, 1), jnp.int32), jnp.ones((T, 1))
    zeros = jnp.zeros((E, 2, I, H)), jnp.zeros((E, H, I))
    with jax.set_mesh(mesh()):
        for how in MOE.values():
            y = parallel.fused_moe(x, *zeros, weights, ids, b2=jnp.full((E, H), 3.0), **how)
            np.testing.assert_array_equal(y, 3)
        for how in LINEAR.values():
            y = parallel.linear(jnp.ones((M, K)), jnp.zeros((N, K)), bias=jnp.full((N,), 3.0), **how)
            np.testing.assert_array_equal(y, 3)


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
def test_g06_experts_are_found_where_they_were_placed_and_five_of_them_lie_on_four_devices(strategy):
    x, w13, w2, weights, ids = moe_arguments(experts=5)
    expected = jmoe.fused_moe(x, w13, w2, weights, ids)
    slots = experts_on(5, 4, strategy=strategy).reshape(-1)
    # Spare slots hold an expert that no id leads to.
    w13, w2 = (jnp.where((slots >= 0).reshape(-1, *(1,) * (w.ndim - 1)), w[slots], jnp.nan) for w in (w13, w2))
    with jax.set_mesh(mesh()):
        y = parallel.fused_moe(
            x, w13, w2, weights, ids, expert_axes=("data", "model"), expert_map=expert_map(5, 4, strategy=strategy)
        )
    assert_close(y, expected)


def test_layers_of_stacked_weights_are_indexed():
    w13, w2 = normal(0, 3, E, 2, I, H), normal(1, 3, E, H, I)
    x, _, _, weights, ids = moe_arguments()
    w13, w2 = quantized(w13, "int8"), quantized(w2, "int8")
    with jax.set_mesh(mesh()):
        for how in MOE.values():
            run = jax.jit(lambda layer, how=how: parallel.fused_moe(x, w13, w2, weights, ids, layer=layer, **how))
            assert_close(run(2), jmoe.fused_moe(x, w13, w2, weights, ids, layer=2))
        w, bias = normal(5, 3, N, K), normal(6, 3, N)
        for how in LINEAR.values():
            y = parallel.linear(normal(7, M, K), w, bias=bias, layer=1, **how)
            assert_close(y, jmoe.linear(normal(7, M, K), w[1], bias=bias[1]))


@pytest.mark.parametrize("recipe", ["bf16", "int8"])
@pytest.mark.parametrize("split", MOE)
def test_gradients_are_those_of_one_device(recipe, split):
    x, w13, w2, weights, ids = moe_arguments(recipe)
    differentiated = (0, 1, 2, 3) if recipe == "bf16" else (0, 3)

    def loss(run):
        return jax.grad(lambda *a: jnp.sum(run(*a, ids) ** 2), argnums=differentiated)

    expected = loss(jmoe.fused_moe)(x, w13, w2, weights)
    with jax.set_mesh(mesh()):
        found = jax.jit(loss(lambda *a: parallel.fused_moe(*a, **MOE[split])))(x, w13, w2, weights)
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("split", LINEAR)
def test_gradients_of_a_linear_are_those_of_one_device(split):
    x, w = normal(0, M, K), jmoe.quantize(normal(1, N, K), "int8")
    expected = jax.grad(lambda x: jnp.sum(jmoe.linear(x, w, activation="silu") ** 2))(x)
    with jax.set_mesh(mesh()):
        run = jax.jit(jax.grad(lambda x: jnp.sum(parallel.linear(x, w, activation="silu", **LINEAR[split]) ** 2)))
        assert_close(run(x), expected)


@pytest.mark.parametrize("split", MOE)
def test_no_weight_is_gathered(split):
    x, *weights, router_weights, ids = moe_arguments("int8")
    e, i = MOE[split].get("expert_axes"), MOE[split].get("intermediate_axes")
    with jax.set_mesh(mesh()):
        w13, w2 = (
            jax.tree.map(lambda leaf, axes=axes: jax.device_put(leaf, parts(leaf, axes)), w)
            for w, axes in zip(weights, ((e, None, i, None), (e, None, i)), strict=True)
        )
        run = jax.jit(lambda *a: parallel.fused_moe(*a, **MOE[split]))
        text = run.lower(x, w13, w2, router_weights, ids).compile().as_text()
    moved = re.findall(r"= (\S+) (all-gather|all-to-all|collective-permute|all-reduce)\(", text)
    assert moved and not [shape for shape, kind in moved if kind != "all-reduce" or "s8" in shape]


def parts(leaf, axes):
    spec = P(*(None if extent == 1 else axis for axis, extent in zip(axes, leaf.shape, strict=True)))
    return NamedSharding(jax.sharding.get_mesh(), spec)


def test_no_tokens_and_one_token():
    x, w13, w2, weights, ids = moe_arguments()
    with jax.set_mesh(mesh()):
        for tokens in (0, 1):
            part = x[:tokens], w13, w2, weights[:tokens], ids[:tokens]
            y = parallel.fused_moe(*part, expert_axes="data", intermediate_axes="model")
            assert_close(y, jmoe.fused_moe(*part))


def test_leading_axes_are_split_each_for_itself():
    x, w = normal(0, 2, 4, K), normal(1, N, K)
    with jax.set_mesh(mesh((2, 2), ("data", "sequence"))):
        y = parallel.linear(x, w, token_axes=("data", "sequence"))
        assert y.sharding.spec == P("data", "sequence")
    assert_close(y, jmoe.linear(x, w))


def test_tokens_are_spread_over_the_axes_that_are_left():
    with jax.set_mesh(mesh((2, 2, 1), ("data", "sequence", "model"))):
        assert parallel.spread_tokens((4, 8), ("model",)) == (("data", "sequence"), None)
        assert parallel.spread_tokens((2, 8), ("model",)) == (("data",), ("sequence",))
        assert parallel.spread_tokens((3, 5), ("model",)) == (None, None)
        assert parallel.spread_tokens((3, 4), ("data", "model")) == (None, ("sequence",))


def test_axes_that_a_shard_map_around_has_are_left_alone():
    x, w = normal(0, M, K), quantized(normal(1, N, K), "int8")

    def local(x):
        return parallel.linear(x, w, in_axes="model")

    with jax.set_mesh(mesh()):
        run = jax.jit(jax.shard_map(local, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}))
        assert_close(run(x), jmoe.linear(x, w))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, w: parallel.linear(x, w, out_axes="tensor"), "'tensor' is no axis of the mesh in force"),
        (lambda x, w: parallel.linear(x, w, out_axes="model", in_axes="model"), "'model' is named twice"),
        (
            lambda x, w: parallel.linear(x, w, out_axes="data", token_axes=("data",)),
            "'data' is named twice, in token_axes and in out_axes",
        ),
        (lambda x, w: parallel.linear(x, w, out_axes=("data", "data")), "'data' is named twice, in out_axes, but"),
        (lambda x, w: parallel.linear(x, w, token_axes=("tensor",)), "token_axes names 'tensor', but"),
        (lambda x, w: parallel.linear(x[:, :3], w, in_axes="model"), r"x has shape \(6, 3\), but w has K = 128"),
        (lambda x, w: parallel.linear(x[0, 0], w, in_axes="model"), r"x has shape \(\), but w has K = 128"),
        (lambda x, w: parallel.linear(x, w, bias=jnp.ones(3)), r"bias has shape \(3,\), but here it is \(N,\)"),
        (
            lambda x, w: parallel.linear(x, w, in_axes="model", activation="swigluoai"),
            "activation",
        ),
        (
            lambda x, w: parallel.linear(x, jmoe.quantize(w, "int8"), in_axes="model", input_scale=1.0),
            "input_scale is given, but the activation is quantized as int8",
        ),
        (lambda x, w: parallel.linear(x[:, :-1], w[:, :-1], in_axes="model"), r"w has K = 127, no multiple of the 2"),
        (lambda x, w: parallel.linear(x[:5], w, token_axes=("data",)), "x has 5 tokens along an axis that is split"),
        (lambda x, w: parallel.linear(x, w, token_axes=(None, None)), "token_axes=.* is longer than the leading axes"),
        (
            lambda x, w: parallel.linear(x, jmoe.quantize(w, "fp8_block:block=48"), out_axes="model"),
            r"w has a scale for every 48 of N, and the part of 32 that each of 2 devices along model has .*"
            r"jmoe.refine_blocks\(w, \(16, 48\)\) first",
        ),
        (
            lambda x, w: parallel.linear(x[:, :6], jmoe.quantize(w[:, :6], "int4:group=3"), in_axes="model"),
            "w has two codes of K to a byte, and an odd part of 3",
        ),
    ],
)
def test_what_cannot_be_split_is_refused(call, message):
    with jax.set_mesh(mesh()), pytest.raises(ValueError, match=message):
        call(normal(0, M, K), normal(1, N, K))


def test_experts_that_cannot_be_split_are_refused():
    x, w13, w2, weights, ids = moe_arguments(experts=3)
    with jax.set_mesh(mesh()):
        with pytest.raises(ValueError, match="w13 has E = 3, no multiple of the 2 devices along data; spare slots"):
            parallel.fused_moe(x, w13, w2, weights, ids, expert_axes="data")
        w13, w2 = (jmoe.quantize(w, jmoe.recipe("fp8_w8a16", block=b)) for w, b in ((w13, (16, 32)), (w2, (32, 32))))
        with pytest.raises(ValueError, match="w2 has a scale for every 32 of I, and the part of 16 that each of 4"):
            parallel.fused_moe(x, w13, w2, weights, ids, intermediate_axes=("data", "model"))


# Groups of 16, 32 and 128 of an activation whose K (or I) is a part of that, or a whole number of them, on a device.
@pytest.mark.parametrize(
    "recipe, extent, group, hint",
    [
        ("fp8_block", 64, 128, ""),
        ("fp8_block", 256, 128, "split {} over a number of devices that divides 2, or "),
        ("mxfp8", 32, 32, ""),
        ("mxfp8", 96, 32, "split {} over a number of devices that divides 3, or "),
        ("mxfp4_a4", 64, 32, "split {} over a number of devices that divides 2, or "),
        ("nvfp4_per_token", 16, 16, ""),
        ("nvfp4_per_token", 40, 16, ""),
        ("nvfp4", 32, 16, "split {} over a number of devices that divides 2, or "),
    ],
)
def test_groups_of_an_activation_lie_on_one_device_each(recipe, extent, group, hint):
    part = extent // 4
    scale = {"input_scale": 1.0} if recipe == "nvfp4" else {}
    w, x = jmoe.quantize(normal(0, 8, extent), recipe), normal(1, 2, extent)
    text = (
        "{} asks for an activation with a measured scale for every {} of {}, and the part of {} that each of 4 devices "
        "along model has is no multiple of that: {}split {} instead, or take a recipe whose activation has one scale a "
        "row or is not quantized"
    )
    with jax.set_mesh(mesh((4,), ("model",))):
        refused = text.format("w", group, "K", part, hint.format("K"), "N")
        with pytest.raises(ValueError, match=f"^{re.escape(refused)}$"):
            parallel.linear(x, w, in_axes="model", **scale)
        w13, w2 = jmoe.quantize(normal(2, 4, 2, extent, 32), recipe), jmoe.quantize(normal(3, 4, 32, extent), recipe)
        scales = {"input_scale": 1.0, "intermediate_scale": 1.0} if scale else {}
        arguments = normal(4, 2, 32), w13, w2, jnp.ones((2, 1)), jnp.zeros((2, 1), jnp.int32)
        refused = text.format("w2", group, "I", part, hint.format("I"), "E")
        with pytest.raises(ValueError, match=f"^{re.escape(refused)}$"):
            parallel.fused_moe(*arguments, intermediate_axes="model", **scales)
        # What the message names instead is the operation.
        assert_close(parallel.linear(x, w, out_axes="model", **scale), jmoe.linear(x, w, **scale))
        y = parallel.fused_moe(*arguments, expert_axes="model", **scales)
        assert_close(y, jmoe.fused_moe(*arguments, **scales))


def test_blocks_are_not_said_to_be_refined_where_groups_of_the_activation_stay_split():
    w = jmoe.refine_blocks(jmoe.quantize(normal(0, 8, 256), "fp8_block"), (128, 64))
    with jax.set_mesh(mesh()), pytest.raises(ValueError, match=r"every 128 of K, and the part of 64 .* divides 2"):
        parallel.linear(normal(1, 2, 256), w, in_axes=("data", "model"))
    with jax.set_mesh(mesh()):
        y = parallel.linear(normal(1, 2, 256), w, in_axes="model")
    assert_close(y, jmoe.linear(normal(1, 2, 256), w))


def test_scales_that_a_few_tokens_share_are_measured_on_one_device():
    scheme = jmoe.Scheme(format="int8", block=(2, -1))
    w = jmoe.quantize(normal(1, 8, K), "int8").with_input_scheme(scheme)
    message = r"w asks for an activation with a measured scale for every 2 tokens, and each of the 2 devices along data"
    with jax.set_mesh(mesh()):
        for x in (normal(0, 6, K), normal(0, 2, 3, K)):  # 3 tokens on each device, and the two of each pair apart
            with pytest.raises(ValueError, match=message):
                parallel.linear(x, w, token_axes=("data",))
        x = normal(0, 8, K)
        assert_close(parallel.linear(x, w, token_axes=("data",), in_axes="model"), jmoe.linear(x, w))
        x, w13, w2, weights, ids = moe_arguments("int8")
        w13 = w13.with_input_scheme(scheme)
        for how in ({"token_axes": ("data",)}, {"expert_axes": "data"}):
            with pytest.raises(ValueError, match="w13" + message[1:]):
                parallel.fused_moe(x, w13, w2, weights, ids, **how)


def test_b09_blocks_are_refined_before_they_are_split():
    x, w = normal(0, M, K), quantized(normal(1, N, K), "fp8_block:block=48")
    with jax.set_mesh(mesh()):
        y = parallel.linear(x, jmoe.refine_blocks(w, (16, 48)), out_axes="model")
    assert_close(y, jmoe.linear(x, w))


@pytest.mark.parametrize(
    "how, error, message",
    [
        (
            {"expert_axes": 3},
            TypeError,
            "expert_axes=3 must be the name of a mesh axis, a tuple of such names, or None",
        ),
        ({"intermediate_axes": ("model", 1)}, TypeError, r"intermediate_axes=\('model', 1\) must be the name"),
        ({"token_axes": 3}, TypeError, "token_axes=3 must be a sequence with a mesh axis's name"),
        ({"token_axes": "data"}, TypeError, "token_axes='data' must be a sequence with a mesh axis's name"),
        ({"token_axes": (3,)}, TypeError, r"token_axes\[0\]=3 must be the name of a mesh axis"),
        ({"b13": jnp.ones(3)}, ValueError, r"b13 has shape \(3,\), but here it is \(E, halves, I\) = \(4, 2, 64\)"),
        ({"b2": jnp.ones((E, I))}, ValueError, r"b2 has shape \(4, 64\), but here it is \(E, H\) = \(4, 32\)"),
        ({"input_scale": 1.0}, ValueError, "input_scale is given, but the activation is not quantized"),
        ({"topk_weights": jnp.ones((T, 1))}, ValueError, r"topk_weights has shape \(6, 1\), but here it is"),
        ({"topk_ids": jnp.zeros((3, 1), jnp.int32)}, ValueError, r"topk_ids has shape \(3, 1\), but x has tokens"),
        ({"expert_map": jnp.zeros((2, 2), jnp.int32)}, ValueError, r"expert_map has shape \(2, 2\), but it is"),
        ({"w2": jnp.ones((E, I, H))}, ValueError, r"w2 has shape \(4, 64, 32\), but w13 of shape"),
        ({"x": jnp.ones((T, 3))}, ValueError, r"x has shape \(6, 3\), but w13 has H = 32"),
        ({"activation": "relu2"}, ValueError, "relu2"),
    ],
)
def test_what_experts_are_given_is_checked_before_it_is_split(how, error, message):
    names = ("x", "w13", "w2", "topk_weights", "topk_ids")
    given = dict(zip(names, moe_arguments(), strict=True))
    with jax.set_mesh(mesh()), pytest.raises(error, match=message):
        parallel.fused_moe(**{**given, "expert_axes": "model", **how})


def test_axes_of_a_linear_are_names():
    x, w = normal(0, M, K), normal(1, N, K)
    with jax.set_mesh(mesh()):
        for argument in ("out_axes", "in_axes"):
            with pytest.raises(TypeError, match=f"{argument}=3 must be the name of a mesh axis, a tuple of such names"):
                parallel.linear(x, w, **{argument: 3})
        with pytest.raises(TypeError, match=r"lead=3 must be the shape of the tokens, such as x\.shape\[:-1\]"):
            parallel.spread_tokens(3, ())
        with pytest.raises(TypeError, match=r"lead\[1\]='a' must be an integer"):
            parallel.spread_tokens((2, "a"), ())
        with pytest.raises(TypeError, match="used=3 must be the name of a mesh axis"):
            parallel.spread_tokens((2,), 3)
        assert parallel.spread_tokens((4,), "model") == (("data",),)


def test_a_mesh_is_needed():
    with pytest.raises(ValueError, match=r"no mesh is in force: enter one with jax\.set_mesh"):
        parallel.linear(normal(0, M, K), normal(1, N, K), out_axes="model")


def test_a_scale_across_devices_is_not_for_kernels_that_measure_on_one():
    x, w = normal(0, M, K), normal(1, N, K)
    taken = {}
    for recipe, split in (("fp8_channel", "columns"), ("fp8_channel", "rows"), ("fp8_tensor", "columns")):
        q = jmoe.quantize(w, recipe)
        with jax.set_mesh(mesh()):
            plan = jmoe.explain(lambda x, q=q, how=LINEAR[split]: parallel.linear(x, q, **how), x, device="h100")
        ((op, selection),) = plan.entries
        taken[recipe, split] = selection.implementation
        assert not op.mesh
    assert taken == {
        ("fp8_channel", "columns"): "triton",
        ("fp8_channel", "rows"): "xla",  # a token's scale is over all of K
        ("fp8_tensor", "columns"): "xla",  # a tensor's over all tokens
    }


def test_a_batch_of_linears_is_split_alike():
    x, w = normal(0, 3, M, K), quantized(normal(1, N, K), "int8")
    with jax.set_mesh(mesh()):
        y = jax.jit(jax.vmap(lambda x: parallel.linear(x, w, **LINEAR["rows"])))(x)
    assert_close(y, jmoe.linear(x, w))


def test_values_are_checked_where_that_is_asked_for():
    x, w13, w2, weights, ids = moe_arguments()
    with jax.set_mesh(mesh()), jmoe.config(check=True):
        for how in MOE.values():
            with pytest.raises(checkify.JaxRuntimeError, match="topk_ids holds 4"):
                parallel.fused_moe(x, w13, w2, weights, ids.at[3, 1].set(4), **how)
        with pytest.raises(checkify.JaxRuntimeError, match="expert_map holds 4"):
            parallel.fused_moe(x, w13, w2, weights, ids, expert_axes="data", expert_map=[0, 1, 2, 4])
        with pytest.raises(ValueError, match="input_scale has the value 0"):
            parallel.linear(normal(0, M, K), quantized(normal(1, N, K), "fp8_tensor_static"), input_scale=0.0)
        with pytest.raises(ValueError, match="layer=3 is outside the 3 stacked layers"):
            parallel.linear(normal(0, M, K), normal(1, 3, N, K), layer=3)


def test_axes_are_added_explicitly_and_dtypes_promoted_so():
    x, w13, w2, weights, ids = moe_arguments("int8")
    biases = {"b13": normal(5, E, 2, I), "b2": normal(6, E, H)}
    with jax.set_mesh(mesh()), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for how in MOE.values():
            parallel.fused_moe(x, w13, w2, weights, ids, **biases, **how)
        for how in LINEAR.values():
            parallel.linear(normal(0, M, K), quantized(normal(1, N, K), "int8"), bias=normal(2, N), **how)
