"""Weights that are expanded into a workspace: where, what of it is seen, and that results are right."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.backends import packed, tuned
from jmoe.backends.select import select
from jmoe.scheme import Recipe
from jmoe.tuning import on_device
from pallas_kernels.tuning import table
from pallas_kernels.tuning.heuristics import MatmulTile
from pallas_kernels.tuning.moe_heuristics import MoETiles
from tests.interpreted import DEVICE, interpreted

M, N, K = 1024, 130, 300
T, H, I, E, TOP = 1540, 130, 96, 2, 1
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
    assert selection.note.startswith(f"weights are expanded to e4m3 in a workspace of {NEEDED:,} bytes, in every call")
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
        (layer, experts(2 * 768 - 1), {"workspace": ROOM}),
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


@pytest.mark.parametrize("chunk", [None, 1536])
def test_a_layer_of_experts_is_the_references(chunk):
    args = experts(T if chunk is None else 1600)
    with interpreted(), jmoe.config(workspace=NEEDED_MOE, moe_chunk=chunk):
        found = jax.jit(layer)(*args)
    assert error(found, jmoe.fused_moe(*args, implementation="reference")) < 2e-2


def test_rows_of_each_expert_are_the_references():
    _, w13, w2, _, _ = experts()
    x = jax.random.normal(jax.random.key(5), (E, 768, H), jnp.bfloat16)
    counts = jnp.array([768, 9], jnp.int32)
    with interpreted(), jmoe.config(workspace=NEEDED_MOE):
        assert "expanded" in selected(batched, x, counts, w13, w2, workspace=NEEDED_MOE).note
        found = jax.jit(batched)(x, counts, w13, w2)
    assert error(found, jmoe.batched_experts(x, counts, w13, w2, implementation="reference")) < 2e-2
    assert not found[1, 9:].any()


@pytest.mark.parametrize("wrong", [-1, 2.5, True, None, "8"])
def test_what_is_no_number_of_bytes_is_refused(wrong):
    with pytest.raises(ValueError, match=r"workspace=.* must be a number of bytes, an int from 0 on"):
        jmoe.config(workspace=wrong).__enter__()


def test_a_batch_keeps_the_settings_of_the_call_that_it_is_of():
    """The call under ``vmap`` is made of its examples after the block that the settings were for."""
    x, w = dense(m=M // 4)
    tokens = experts(T // 4)

    @jax.jit
    def inside(x):
        with jmoe.config(workspace=ROOM):
            return linear(x, w)

    @jax.jit
    def in_parts(x):
        with jmoe.config(moe_chunk=200, workspace=0):
            return layer(x, *tokens[1:])

    batch = jnp.stack([x] * 4)
    assert selected(jax.vmap(inside), batch).workspace == NEEDED
    assert "200 tokens at a time" in selected(jax.vmap(in_parts), jnp.stack([tokens[0]] * 4), workspace=ROOM).note
    assert selected(jax.vmap(in_parts), jnp.stack([tokens[0]] * 4), workspace=ROOM).workspace == 0


VECTOR = MatmulTile(block_m=1, block_n=8, block_k=32, num_warps=4, num_stages=1)
WHOLE = MatmulTile(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=3)


@pytest.mark.parametrize(
    "tiles",
    [
        MoETiles(first=VECTOR, second=VECTOR, single=True),
        MoETiles(first=WHOLE, second=replace(WHOLE, split_k=2)),
    ],
    ids=["vectors", "shares of K"],
)
def test_tiles_of_few_tokens_are_not_of_expanded_weights(tiles, tmp_path):
    x, w13, w2, weights, ids = experts()
    op = layer_op(T)
    key = tuned.key_of(packed.expanded(op), DEVICE, "fast")
    entry = table.Entry(
        key=key,
        tokens=T,
        tiles=tiles,
        us=1.0,
        heuristic_us=2.0,
        date="2026-11-30",
        jax="0.11.2",
    )
    table.save(tmp_path / "t.json", [entry])
    selection = selected(layer, x, w13, w2, weights, ids, workspace=ROOM, tuning=tmp_path / "t.json")
    assert selection.workspace and selection.tiles_from == "heuristic"


def layer_op(tokens, **changes):
    with jmoe.config(device=DEVICE):
        [(op, _)] = jmoe.explain(layer, *experts(tokens), device=DEVICE).entries
    return op.replace(**changes)


def test_rows_of_an_expert_are_those_of_all_devices_experts():
    """A device that holds E of E_global experts gets E / E_global of the rows."""
    with jmoe.config(workspace=ROOM):
        assert select(layer_op(1536), DEVICE, implementation="triton").workspace
        elsewhere = select(layer_op(1536, global_experts=4 * E), DEVICE, implementation="triton")
    assert not elsewhere.workspace
    alone = select(layer_op(384), DEVICE, implementation="triton")
    assert elsewhere.tile("first").block_m == alone.tile("first").block_m


def test_tiles_are_measured_of_kernels_that_unpack_in_their_loops(monkeypatch):
    seen = []
    monkeypatch.setattr(on_device, "_calls", lambda op, selection, arguments: seen.append(selection) or [])
    monkeypatch.setattr(on_device, "_times", lambda *_: [])
    op = layer_op(T).replace(accumulation="fast")
    tiles = MoETiles(**dict(select(op, DEVICE, implementation="triton").tiles))
    with interpreted(), jmoe.config(workspace=ROOM):
        on_device.OnDevice()(op, [tiles])
    assert [selection.workspace for selection in seen] == [0]
