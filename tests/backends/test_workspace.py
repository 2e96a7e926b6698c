"""Weights that are expanded into a workspace: where, what of it is seen, and that results are right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.scheme import Recipe
from tests.interpreted import DEVICE, interpreted

M, N, K = 1024, 130, 300
T, H, I, E, TOP = 520, 130, 96, 2, 1
NEEDED = N * (K + 4)
NEEDED_MOE = E * 2 * I * (H + 4)
ROOM = 10**6


def dense(recipe: str | Recipe = "mxfp4_a8", m: int = M) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (m, K), jnp.bfloat16)
    return x, jmoe.quantize(jax.random.normal(keys[1], (N, K)), recipe)


def experts(tokens: int = T, recipe: str | Recipe = "mxfp4_a8") -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (tokens, H), jnp.bfloat16)
    w13 = jmoe.quantize(jax.random.normal(keys[1], (E, 2, I, H)) * H**-0.5, recipe)
    w2 = jmoe.quantize(jax.random.normal(keys[2], (E, H, I)) * I**-0.5, recipe)
    weights, ids = jax.lax.top_k(jax.nn.softmax(jax.random.normal(keys[3], (tokens, E))), TOP)
    return x, w13, w2, weights, ids


linear = functools.partial(jmoe.linear, implementation="triton")
layer = functools.partial(jmoe.fused_moe, implementation="triton")
batched = functools.partial(jmoe.batched_experts, implementation="triton")


def selected(function, *args, **settings):
    with jmoe.config(device=DEVICE, **settings):
        [(_, selection)] = jmoe.explain(function, *args, device=DEVICE).entries
    return selection


def error(found, wanted):
    found, wanted = (np.asarray(a, np.float64) for a in (found, wanted))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def test_nothing_is_expanded_by_default():
    selection = selected(linear, *dense())
    assert selection.workspace == 0
    assert "expanded" not in selection.note
    assert selected(layer, *experts()).workspace == 0


def test_explain_says_what_is_taken_and_shows_the_tiles_of_fp8():
    selection = selected(linear, *dense(), workspace=NEEDED)
    assert selection.workspace == NEEDED
    assert selection.note.startswith("weights are expanded to e4m3 in a workspace of 1 MB, in every call")
    assert selection.tiles == selected(linear, *dense("fp8_channel")).tiles
    assert selection.layout == selected(linear, *dense()).layout
    selection = selected(layer, *experts(), workspace=NEEDED_MOE)
    assert selection.workspace == NEEDED_MOE
    assert selection.tiles == selected(layer, *experts(recipe="fp8_channel")).tiles


@pytest.mark.parametrize(
    "function, args, settings",
    [
        (linear, dense(), {"workspace": NEEDED - 1}),
        (linear, dense(m=M - 1), {"workspace": ROOM}),
        (linear, dense("mxfp4"), {"workspace": ROOM}),
        (linear, dense("int4_fp8"), {"workspace": ROOM}),
        (linear, dense("fp8_channel"), {"workspace": ROOM}),
        (linear, dense(), {"workspace": ROOM, "batch_invariant": True}),
        (layer, experts(), {"workspace": NEEDED_MOE - 1}),
        (layer, experts(2 * 256 - 1), {"workspace": ROOM}),
        (layer, experts(), {"workspace": ROOM, "moe_chunk": 256}),
    ],
    ids=["room", "rows", "bfloat16", "int4", "fp8", "invariant", "room of w13", "rows an expert", "chunks"],
)
def test_where_it_does_not_fit_or_pay_the_loop_unpacks(function, args, settings):
    selection = selected(function, *args, **settings)
    without = selected(function, *args, **settings | {"workspace": 0})
    assert selection == without
    assert selection.workspace == 0


def test_a_measured_scale_of_all_of_the_intermediate_is_not_served():
    recipe = jmoe.recipe("mxfp4_a8")
    assert recipe.input is not None
    tensor = Recipe(name="of tensors", weight=recipe.weight, input=recipe.input.replace(block=(-1, -1)))
    assert selected(layer, *experts(recipe=tensor), workspace=ROOM).workspace == 0
    assert selected(linear, *dense(tensor), workspace=ROOM).workspace == NEEDED


def test_a_linear_is_the_references_and_a_change_of_the_setting_retraces():
    x, w = dense()
    traces = []

    @jax.jit
    def call(x, w):
        traces.append(jmoe.config.workspace)
        return linear(x, w)

    with interpreted():
        for room in (0, ROOM, 0, ROOM):
            with jmoe.config(workspace=room):
                assert error(call(x, w), jmoe.linear(x, w, implementation="reference")) < 3e-3
    assert traces == [0, ROOM]


def test_a_layer_of_stacked_linears_with_its_bias():
    x, _ = dense()
    w = jmoe.quantize(jax.random.normal(jax.random.key(3), (3, N, K)), "mxfp4_a8")
    bias = jax.random.normal(jax.random.key(4), (3, N))
    call = functools.partial(jmoe.linear, bias=bias, activation="silu")
    with interpreted(), jmoe.config(workspace=NEEDED):
        found = jax.jit(lambda layer: call(x, w, layer=layer, implementation="triton"))(jnp.int32(2))
    assert error(found, call(x, w, layer=2, implementation="reference")) < 3e-3


@pytest.mark.parametrize("chunk", [None, 512])
def test_a_layer_of_experts_is_the_references(chunk):
    args = experts(T if chunk is None else 600)
    with interpreted(), jmoe.config(workspace=NEEDED_MOE, moe_chunk=chunk):
        found = jax.jit(layer)(*args)
    assert error(found, jmoe.fused_moe(*args, implementation="reference")) < 2e-2


def test_rows_of_each_expert_are_the_references():
    _, w13, w2, _, _ = experts()
    x = jax.random.normal(jax.random.key(5), (E, 256, H), jnp.bfloat16)
    counts = jnp.array([256, 9], jnp.int32)
    with interpreted(), jmoe.config(workspace=NEEDED_MOE):
        assert "expanded" in selected(batched, x, counts, w13, w2, workspace=NEEDED_MOE).note
        found = jax.jit(batched)(x, counts, w13, w2)
    assert error(found, jmoe.batched_experts(x, counts, w13, w2, implementation="reference")) < 2e-2
    assert not found[1, 9:].any()


@pytest.mark.parametrize("wrong", [-1, 2.5, True, None, "8"])
def test_what_is_no_number_of_bytes_is_refused(wrong):
    with pytest.raises(ValueError, match=r"workspace=.* must be a number of bytes, an int from 0 on"):
        jmoe.config(workspace=wrong).__enter__()
