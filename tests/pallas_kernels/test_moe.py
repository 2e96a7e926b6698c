"""Layers of experts in interpret mode against jmoe's reference, over odd shapes and routings."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from pallas_kernels.activation import Activation
from pallas_kernels.experts import Experts, ExpertsSpec, InputScheme
from pallas_kernels.moe import batched_experts, fused_moe
from pallas_kernels.tuning.heuristics import MatmulTile
from pallas_kernels.tuning.moe_heuristics import MoETiles
from tests.pallas_kernels import moe_cases as cases
from tests.pallas_kernels.moe_cases import Case, Layer, relative_error


def tiles(
    block_n: int = 32, block_k: int = 32, *, swap: bool = True, run: int = 1, tall: bool = False, split: int = 1
) -> MoETiles:
    """One small tile for both products, the second one's K split; a tall one has twice as many rows, or 16."""
    rows, short = (32, 16) if tall else (16, 0)
    tile = MatmulTile(
        block_m=rows, block_n=block_n, block_k=block_k, num_warps=4, num_stages=2, swap=swap, run=run, short=short
    )
    return MoETiles(first=tile, second=replace(tile, split_k=split))


def single(block_n: int = 4, block_k: int = 32, stages: int = 2) -> MoETiles:
    """The same for matrices times vectors."""
    tile = MatmulTile(block_m=1, block_n=block_n, block_k=block_k, num_warps=4, num_stages=stages)
    return MoETiles(first=tile, second=tile, single=True)


HOWS = {
    "swapped": tiles(),
    "plain": tiles(swap=False),
    "single": single(),
    "run": tiles(16, run=2),
    "tall": tiles(tall=True),
    "split": tiles(split=4),  # K has two steps: half of the shares are of none
    "split, tall": tiles(tall=True, split=2),
}
SWAPPED, PLAIN, TALL = HOWS["swapped"], HOWS["plain"], HOWS["tall"]


@functools.partial(jax.jit, static_argnames="spec")
def layer_of(
    x: jax.Array, experts: Experts, weights: jax.Array, ids: jax.Array, spec: ExpertsSpec, **more: Any
) -> jax.Array:
    return fused_moe(x, experts, weights, ids, spec=spec, interpret=True, **more)


@functools.partial(jax.jit, static_argnames="spec")
def batch_of(x: jax.Array, counts: jax.Array, experts: Experts, spec: ExpertsSpec, **more: Any) -> jax.Array:
    return batched_experts(x, counts, experts, spec=spec, interpret=True, **more)


def reference(case: Case, layer: Layer, x: Any, weights: jax.Array, ids: jax.Array, **more: Any) -> jax.Array:
    options = cases.options_of(case, layer) | more
    return jmoe.fused_moe(x, layer.w13, layer.w2, weights, ids, implementation="reference", **options)


def check(case: Case, how: MoETiles, routings: tuple[str, ...] = cases.ROUTINGS) -> None:
    """Our layer agrees with the reference under each routing."""
    layer = cases.layer(case)
    spec = cases.spec_of(case, layer, how)
    for name in routings:
        ids = jnp.asarray(cases.routing(name, case))
        x, weights = cases.spoiled(case, *cases.tokens(case), ids)
        found = layer_of(x, cases.arrays(layer), weights, ids, spec)
        assert relative_error(found, reference(case, layer, x, weights, ids)) < case.bar, name


ODD = {"tokens": 7, "hidden": 72, "intermediate": 40, "experts": 5, "top_k": 3}
BLOCKS = {"tokens": 6, "hidden": 200, "intermediate": 160, "experts": 3, "top_k": 2}


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
def test_every_routing_over_extents_that_divide_nothing(how):
    check(Case(**ODD, bias=True), how)


@pytest.mark.parametrize("tokens", [16, 17, 31, 32, 33])
def test_blocks_as_high_as_their_rows_need(tokens):
    check(Case(**{**ODD, "tokens": tokens}), TALL, ("one expert", "uniform"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes(dtype):
    check(Case(**ODD, dtype=dtype, gated=False, activation="gelu"), PLAIN, ("uniform", "elsewhere"))


@pytest.mark.parametrize(
    "recipe, how",
    [
        ("fp8_block", tiles(128, 128)),
        ("fp8_block", tiles(128, 64, swap=False)),
        ("fp8_block", tiles(128, 128, run=3)),
        ("fp8_block", tiles(128, 64, run=3)),
        ("fp8_block", tiles(128, 64, run=3, tall=True)),
        ("mxfp8", tiles(32, 32, run=4)),
        ("fp8_block", tiles(128, 128, split=2)),
        ("fp8_block", tiles(128, 32, swap=False, split=4)),
        ("fp8_block:block=48", tiles(16, 32, split=4)),
        ("fp8_tensor", tiles(64, 64, split=2)),
        ("mxfp8", tiles(32, 32, split=2)),
        ("int8", tiles(32, 32, split=4)),
        ("int8_w8a16:group=32", tiles(64, 32, split=2)),
        ("int8", tiles(32, 32, run=4)),
        ("fp8_block", tiles(128, 128, tall=True)),
        ("fp8_tensor", tiles(64, 64, tall=True)),
        ("fp8_tensor", tiles(64, 64, run=2)),
        ("fp8_block", single(8, 128)),
        ("fp8_block", single(4, 64)),
        ("fp8_block:block=64", single(2, 64, 3)),
        ("fp8_block:block=32", tiles(32, 64)),
        ("fp8_block:scale_dtype=e8m0", tiles(64, 128)),
        ("fp8_tensor", tiles(64, 64)),
        ("fp8_channel", tiles(64, 64)),
        ("fp8_tensor", single()),
        ("fp8_channel", single()),
        ("fp8_w8a16:block=1x32", single()),
        ("mxfp8", single(1, 128, 1)),
        ("fp8_w8a16", tiles(64, 64)),
        ("fp8_w8a16:block=1x32", tiles(64, 32)),
        ("mxfp8", tiles(32, 32)),
        ("int8", tiles(64, 64)),
        ("int8", tiles(64, 64, swap=False)),
        ("int8", single()),
        ("int8_w8a16", tiles(64, 64)),
        ("int8_w8a16:group=32", tiles(64, 32, swap=False)),
    ],
)
def test_recipes(recipe, how):
    check(Case(recipe=recipe, **BLOCKS), how, ("one expert", "elsewhere", "padding"))


@pytest.mark.parametrize("how", [tiles(32, 32), tiles(64, 32, swap=False), single(8)], ids=["fits", "wider", "single"])
@pytest.mark.parametrize("block", [(1, 32), (-1, -1)], ids=["groups", "tensor"])
def test_int8_scales_of_groups_and_of_a_tensor(block, how):
    recipe = jmoe.Recipe(
        name="mine",
        weight=jmoe.Scheme(format="int8", block=(1, block[1])),
        input=jmoe.Scheme(format="int8", block=block),
    )
    plain = cases.layer(Case(**BLOCKS))
    layer = plain._replace(w13=jmoe.quantize(plain.w13, recipe), w2=jmoe.quantize(plain.w2, recipe))
    case = Case(recipe="int8", **BLOCKS)
    ids = jnp.asarray(cases.routing("elsewhere", case))
    x, weights = cases.spoiled(case, *cases.tokens(case), ids)
    found = layer_of(x, cases.arrays(layer), weights, ids, cases.spec_of(case, layer, how))
    assert relative_error(found, reference(case, layer, x, weights, ids)) < case.bar


def test_static_scales_one_an_expert():
    case = Case(recipe="fp8_tensor_static", **BLOCKS)
    layer = cases.layer(case)
    spec = cases.spec_of(case, layer, tiles(64, 64))
    x, weights = cases.tokens(case)
    ids = jnp.asarray(cases.routing("elsewhere", case))
    expert_map = jnp.array([2, -1, 0, 1], jnp.int32)
    scales = {
        "input_scale": jnp.array([0.01, 0.02, 0.03], jnp.float32),
        "intermediate_scale": jnp.array([0.003, 0.004, 0.002], jnp.float32),
    }
    wanted = reference(case, layer, x, weights, ids, expert_map=expert_map, **scales)
    found = layer_of(x, cases.arrays(layer, **scales), weights, ids, spec, expert_map=expert_map)
    assert relative_error(found, wanted) < case.bar
    one = {name: scale[0] for name, scale in scales.items()}
    wanted = reference(case, layer, x, weights, ids, **one)
    assert relative_error(layer_of(x, cases.arrays(layer, **one), weights, ids, spec), wanted) < case.bar


def test_an_input_that_is_quantized_already():
    case = Case(recipe="fp8_block", **BLOCKS)
    layer = cases.layer(case)
    x, weights = cases.tokens(case)
    codes = jmoe.quantize(x, layer.w13.input_scheme)
    ids = jnp.asarray(cases.routing("uniform", case))
    spec = cases.spec_of(case, layer, tiles(128, 128))
    found = layer_of(codes.data, cases.arrays(layer), weights, ids, spec, x_scale=codes.scale)
    assert relative_error(found, reference(case, layer, codes, weights, ids)) < case.bar


def test_the_kernels_index_stacked_layers():
    case = Case(recipe="fp8_channel", tokens=4, hidden=40, intermediate=48, experts=3, bias=True)
    layers = [cases.layer(case, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(cases.arrays(layer) for layer in layers))
    spec = cases.spec_of(case, layers[0], tiles(64, 64))
    x, weights = cases.tokens(case)
    ids = jnp.asarray(cases.routing("uniform", case))

    @jax.jit
    def scanned(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = layer_of(x, stacked._replace(layer=index), weights, ids, spec)
            return y, y

        return jax.lax.scan(step, x, jnp.array([0, 1, 2, 9], jnp.int32))[1]

    for layer, found in zip([*layers, layers[2]], scanned(x), strict=True):  # one outside is the nearest
        assert relative_error(found, reference(case, layer, x, weights, ids)) < case.bar
        x = found


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_tensor", "fp8_channel", "int8"])
def test_h06_batched_rows_beyond_counts_are_zero_and_touch_nothing(recipe):
    case = Case(recipe=recipe, tokens=19, hidden=136, intermediate=72, experts=4, bias=True)
    layer = cases.layer(case)
    spec = cases.spec_of(case, layer, tiles(64, 64, swap=recipe != "bf16", tall=recipe == "fp8_block"))
    counts = jnp.array([19, 0, 16, 5], jnp.int32)
    x = jax.random.normal(jax.random.key(3), (4, 19, 136), jnp.bfloat16)
    valid = jnp.arange(19) < counts[:, None]
    anything = jnp.where(jnp.arange(136) % 2, 1e4, jnp.nan).astype(x.dtype)
    found = batch_of(jnp.where(valid[..., None], x, anything), counts, cases.arrays(layer), spec)
    wanted = jmoe.batched_experts(
        x, counts, layer.w13, layer.w2, implementation="reference", **cases.options_of(case, layer)
    )
    assert relative_error(found, wanted) < case.bar
    assert not np.asarray(found, np.float32)[~valid].any()


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_channel", "int8"])
def test_a_token_that_is_not_finite_spoils_its_own_row(recipe):
    case = Case(recipe=recipe, **BLOCKS)
    layer = cases.layer(case)
    spec = cases.spec_of(case, layer, tiles(128, 64))
    x, weights = cases.tokens(case)
    ids = jnp.asarray(cases.routing("one expert", case))
    clean = layer_of(x, cases.arrays(layer), weights, ids, spec)
    dirty = layer_of(x.at[2, 5].set(jnp.nan), cases.arrays(layer), weights, ids, spec)
    assert np.isnan(np.asarray(dirty[2], np.float32)).all()
    others = jnp.array([0, 1, 3, 4, 5])
    np.testing.assert_array_equal(*(np.asarray(y[others], np.float32) for y in (dirty, clean)))


def test_experts_on_two_devices_add_up_to_the_layer():
    case = Case(recipe="fp8_block", **{**BLOCKS, "experts": 4})
    layer = cases.layer(case)
    spec = cases.spec_of(case, layer, tiles(128, 128))
    x, weights = cases.tokens(case)
    ids = jnp.asarray(cases.routing("uniform", case))
    mesh = jax.make_mesh((2,), ("experts",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x: jax.Array, experts: Experts, weights: jax.Array, ids: jax.Array) -> jax.Array:
        first = 2 * jax.lax.axis_index("experts")
        slots = jnp.arange(4, dtype=jnp.int32) - first
        expert_map = jnp.where((slots >= 0) & (slots < 2), slots, -1)
        y = fused_moe(x, experts, weights, ids, spec=spec, expert_map=expert_map, interpret=True)
        return jax.lax.psum(y.astype(jnp.float32), "experts")

    P = jax.sharding.PartitionSpec
    specs = P(), P("experts"), P(), P()
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    found = sharded(x, cases.arrays(layer), weights, ids)
    assert relative_error(found, reference(case, layer, x, weights, ids)) < case.bar


def test_h01_no_tokens_and_no_rows():
    case = Case(tokens=0)
    layer = cases.layer(case)
    spec = cases.spec_of(case, layer, SWAPPED)
    x, weights = cases.tokens(case)
    assert layer_of(x, cases.arrays(layer), weights, jnp.zeros((0, 2), jnp.int32), spec).shape == (0, 64)
    empty = jnp.zeros((4, 0, 64), jnp.bfloat16)
    assert batch_of(empty, jnp.zeros(4, jnp.int32), cases.arrays(layer), spec).shape == (4, 0, 64)


# With gate alone, alpha 0 and beta 2, the activation is the identity: g * sigmoid(0) * (0 + 2) = g.
GATE_ALONE = Activation(alpha=0.0, beta=2.0)


def first_product_alone(x: Any, gate: Any, how: MoETiles, *, x_scale: Any, gate_scale: Any, **facts: Any) -> np.ndarray:
    """x gate^T, float32, through the first product of a layer of one expert whose w2 copies."""
    gate, gate_scale = (jnp.stack([a, jnp.zeros_like(a)])[None] for a in (gate, gate_scale))
    columns, hidden = gate.shape[2:]
    spec = ExpertsSpec(tiles=how, dtype="float32", out_dtype="float32", activation=GATE_ALONE, **facts)
    experts = Experts(gate, jnp.eye(hidden, columns)[None], w13_scale=gate_scale)
    ones = jnp.ones((x.shape[0], 1), jnp.float32)
    found = layer_of(x, experts, ones, jnp.zeros(ones.shape, jnp.int32), spec, x_scale=x_scale)
    return np.asarray(found[:, :columns])


def test_b03_a_step_of_k_never_straddles_scales():
    # 32 products at scales 1 * 1 and 32 at 2 * 4, with steps of 64 asked for.
    ones = jnp.ones((1, 64), jnp.float8_e4m3fn)
    found = first_product_alone(
        ones,
        jnp.repeat(ones, 16, axis=0),
        tiles(16, 64),
        x_scale=jnp.array([[1, 2]], jnp.float32),
        gate_scale=jnp.array([[1, 4]], jnp.float32),
        w13_block=(32, 32),
        input_scheme=InputScheme(scale="group", group=32),
    )
    assert found.tolist() == [[288.0] * 16]


def test_b12_k_2880_in_blocks_keeps_28_decibels():
    keys = jax.random.split(jax.random.key(0), 2)
    x, gate = (jax.random.normal(key, (rows, 2880)) for key, rows in zip(keys, (16, 64), strict=True))
    w, a = jmoe.quantize(gate, "fp8_block"), jmoe.quantize(x, jmoe.recipe("fp8_block").input)
    found = first_product_alone(
        a.data,
        w.data,
        tiles(64, 128),
        x_scale=a.scale,
        gate_scale=w.scale,
        w13_block=(128, 128),
        input_scheme=InputScheme(scale="group", group=128),
    )
    wanted = np.asarray(x, np.float64) @ np.asarray(gate, np.float64).T
    noise = found - wanted
    assert 10 * np.log10((wanted**2).sum() / (noise**2).sum()) > 28


def test_g01_the_sentinel_is_not_the_last_expert():
    # Token 0 chooses experts 0 (elsewhere) and 2 (here as 0): 0.4 f(x), f with weights of ones is silu(2) * 2 a column.
    ones = Experts(jnp.ones((2, 2, 16, 2), jnp.float32), jnp.ones((2, 2, 16), jnp.float32))
    spec = ExpertsSpec(tiles=SWAPPED, dtype="float32", out_dtype="float32")
    ids, weights = jnp.array([[0, 2]], jnp.int32), jnp.array([[0.6, 0.4]], jnp.float32)
    expert_map = jnp.array([-1, -1, 0, 1], jnp.int32)
    found = layer_of(jnp.ones((1, 2), jnp.float32), ones, weights, ids, spec, expert_map=expert_map)
    np.testing.assert_allclose(found, np.full((1, 2), 0.4 * 16 * 2 * 2 / (1 + np.exp(-2))), rtol=1e-6)


def test_it_works_with_strict_promotion_and_64_bit_types():
    case = Case(recipe="fp8_block", **BLOCKS, bias=True)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        check(case, tiles(128, 128), ("uniform",))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"w2": jnp.zeros((4, 64, 40), jnp.bfloat16)}, r"w2 has shape \(4, 64, 40\).*\(4, 64, 48\)"),
        ({"b13": jnp.zeros((4, 96), jnp.bfloat16)}, r"b13 has shape \(4, 96\).*\(4, 2, 48\)"),
        ({"w13_scale": jnp.zeros((4, 2, 1, 1))}, r"w13_scale has shape"),
        ({"input_scale": jnp.ones(())}, "input_scale is given"),
    ],
)
def test_arrays_that_do_not_fit_are_named(change, message):
    case = Case()
    layer = cases.layer(case)
    x, weights = cases.tokens(case)
    spec = cases.spec_of(case, layer, SWAPPED)
    with pytest.raises(ValueError, match=message):
        layer_of(x, cases.arrays(layer)._replace(**change), weights, jnp.zeros((5, 2), jnp.int32), spec)


@pytest.mark.parametrize(
    "how, message",
    [
        (replace(SWAPPED, first=replace(SWAPPED.first, split_k=2)), "first product's tile .*K split in 2.* whole sums"),
        (replace(SWAPPED, second=replace(SWAPPED.second, split_k=2, run=2)), "second product's tile .*K split in 2"),
        (replace(single(), second=replace(single().second, split_k=2)), "second product's tile .*K split in 2"),
    ],
)
def test_k_that_cannot_be_split(how, message):
    case = Case()
    layer = cases.layer(case)
    x, weights = cases.tokens(case)
    with pytest.raises(ValueError, match=message):
        layer_of(x, cases.arrays(layer), weights, jnp.zeros((5, 2), jnp.int32), cases.spec_of(case, layer, how))


def test_nothing_sums_shares_of_batched_experts():
    case = Case()
    layer = cases.layer(case)
    counts = jnp.zeros(4, jnp.int32)
    with pytest.raises(ValueError, match=r"second\.split_k 4 must be 1"):
        batch_of(jnp.zeros((4, 8, 64)), counts, cases.arrays(layer), cases.spec_of(case, layer, HOWS["split"]))


def test_expanded_weights_are_not_in_shares():
    case = Case()
    layer = cases.layer(case)
    spec = replace(cases.spec_of(case, layer, HOWS["split"]), expands=True)
    x, weights = cases.tokens(case)
    with pytest.raises(ValueError, match="splits K of a run of tiles, single slots or expanded weights"):
        layer_of(x, cases.arrays(layer), weights, jnp.zeros((5, 2), jnp.int32), spec)


def test_shares_are_not_rounded_before_they_are_added_up():
    # 257 and -256, of which bfloat16 holds 256 and -256.
    w2 = jnp.concatenate([jnp.full(32, 8.0).at[0].set(9), jnp.full(32, -8.0)])
    w13 = jnp.stack([jnp.ones((64, 16)), jnp.zeros((64, 16))]) / 16
    experts = Experts(w13[None].astype(jnp.bfloat16), jnp.broadcast_to(w2, (1, 16, 64)).astype(jnp.bfloat16))
    spec = ExpertsSpec(tiles=tiles(split=2), activation=GATE_ALONE)
    ones = jnp.ones((1, 1), jnp.float32)
    found = layer_of(jnp.ones((1, 16), jnp.bfloat16), experts, ones, jnp.zeros((1, 1), jnp.int32), spec)
    assert found.tolist() == [[1.0] * 16]
