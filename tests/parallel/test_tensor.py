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
        (lambda x, w: parallel.linear(x, w, out_axes="data", token_axes=("data",)), "'data' is named twice"),
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
        w13, w2 = quantized(w13, "fp8_block:block=64"), quantized(w2, "fp8_block:block=32")
        w13 = jmoe.refine_blocks(w13, (64, 64))
        with pytest.raises(ValueError, match="w2 has a scale for every 32 of I, and the part of 16 that each of 4"):
            parallel.fused_moe(x, w13, w2, weights, ids, intermediate_axes=("data", "model"))


def test_b09_blocks_are_refined_before_they_are_split():
    x, w = normal(0, M, K), quantized(normal(1, N, K), "fp8_block:block=48")
    with jax.set_mesh(mesh()):
        y = parallel.linear(x, jmoe.refine_blocks(w, (16, 48)), out_axes="model")
    assert_close(y, jmoe.linear(x, w))


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
