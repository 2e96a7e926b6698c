"""Layers of experts with packed four-bit weights, in interpret mode, against the reference."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from pallas_kernels import few
from pallas_kernels.fourbit.packing import Packing
from pallas_kernels.moe import batched_experts, fused_moe
from pallas_kernels.tuning import fourbit
from pallas_kernels.tuning.heuristics import MatmulTile
from tests.pallas_kernels import fourbit_cases as cases
from tests.pallas_kernels import moe_cases
from tests.pallas_kernels.moe_cases import Case

SIZES: dict[str, Any] = {"tokens": 9, "hidden": 96, "intermediate": 80, "experts": 4, "top_k": 2}
"""K of neither product is a whole tile, nor is N."""


def error(case, routing, tiles=None, **tile):
    layer, (x, weights) = moe_cases.layer(case), moe_cases.tokens(case)
    ids = moe_cases.routing(routing, case)
    x, weights = moe_cases.spoiled(case, x, weights, ids)
    options = moe_cases.options_of(case, layer)
    wanted = jmoe.fused_moe(
        x,
        layer.w13,
        layer.w2,
        weights,
        ids,
        implementation="reference",
        preferred_element_type=jnp.float32,
        **options,
    )
    spec = cases.spec_of(case, layer)
    tiles = tiles or spec.tiles
    tiles = replace(tiles, first=replace(tiles.first, **tile), second=replace(tiles.second, **tile))
    spec = replace(spec, tiles=tiles)
    y = fused_moe(x, cases.experts_of(layer), weights, jnp.asarray(ids), spec=spec, interpret=True)
    return moe_cases.relative_error(y, wanted)


@pytest.mark.parametrize(
    "case",
    [
        Case(recipe="mxfp4", bias=True, activation="swigluoai", **SIZES),
        Case(recipe="nvfp4_w4a16", **SIZES),
        Case(recipe="int4:group=32,zero_point", gated=False, activation="relu2", bias=True, **SIZES),
        Case(recipe="int4", **SIZES),
        Case(recipe="mxfp4_a8", bias=True, activation="swigluoai", exact=True, **SIZES),
        Case(recipe="mxfp4_a8", dtype="float16", **SIZES),
        Case(recipe="int4_fp8:group=32", bias=True, **SIZES),
        Case(recipe="int4_int8", dtype="float16", **SIZES),
    ],
    ids=lambda case: f"{case.recipe}-{case.dtype}",
)
def test_of_ragged_sizes_with_experts_that_are_elsewhere(case):
    assert error(case, "elsewhere") < case.bar


def test_a_layer_of_several_under_an_expert_map():
    case = Case(recipe="int4:group=32,scale_dtype=bfloat16", **SIZES)
    layer = moe_cases.layer(case)
    x, weights = moe_cases.tokens(case)
    # Experts 5, 4, 3, 2 are here, in this order; 0 and 1 are elsewhere.
    expert_map = jnp.array([-1, -1, 3, 2, 1, 0], jnp.int32)
    ids = jnp.asarray(np.random.default_rng(0).integers(-1, 6, (case.tokens, case.top_k)), jnp.int32)
    wanted = jmoe.fused_moe(x, layer.w13, layer.w2, weights, ids, expert_map=expert_map, implementation="reference")
    spec = cases.spec_of(case, layer)
    experts = cases.experts_of(layer)
    stacked = jax.tree.map(lambda a: jnp.stack([jnp.zeros_like(a), a]), experts)
    y = fused_moe(
        x, stacked._replace(layer=jnp.int32(1)), weights, ids, spec=spec, expert_map=expert_map, interpret=True
    )
    assert moe_cases.relative_error(y, wanted) < case.bar


def test_rows_of_each_expert():
    case = Case(recipe="mxfp4", **SIZES)
    layer = moe_cases.layer(case)
    x = jax.random.normal(jax.random.key(1), (4, 7, case.hidden), jnp.bfloat16)
    counts = jnp.array([7, 0, 3, 1], jnp.int32)
    wanted = jmoe.batched_experts(x, counts, layer.w13, layer.w2, implementation="reference")
    y = batched_experts(x, counts, cases.experts_of(layer), spec=cases.spec_of(case, layer), interpret=True)
    assert moe_cases.relative_error(y, wanted) < case.bar
    assert not y[1].any() and not y[2, 3:].any()


@pytest.mark.parametrize("recipe", ["mxfp4", "int4:scale_dtype=bfloat16", "int4:group=32,zero_point", "mxfp4_a8"])
def test_a_token_of_a_ragged_layer_whose_slots_are_products_with_vectors(recipe):
    case = Case(recipe=recipe, bias=True, **SIZES | {"tokens": 1, "hidden": 200, "intermediate": 144})
    sizes = (case.hidden, case.intermediate, case.experts, case.top_k)
    tiles = fourbit.moe_tiles(1, *sizes, kind=fourbit.Kind(operand="bfloat16", words=1, codes="int4"))
    assert tiles.single
    assert error(case, "elsewhere", tiles) < case.bar


def test_threads_of_products_with_vectors_have_whole_words():
    # A tile of 4 rows and 128 columns is 4 * 64 bytes of e2m1 codes: 64 words of four, for two warps.
    p = Packing(codes="e2m1", operand="e4m3", scale="e8m0", group=32, n=64, k=128)
    tile = MatmulTile(block_m=1, block_n=4, block_k=128, num_warps=4, num_stages=1)
    facts = few.Facts(tile=tile, k=2, experts=4, scheme=None, w_block=(-1, -1), packing=p)
    assert (facts.warps(1), facts.warps(2)) == (2, 4)
    with pytest.raises(ValueError, match="has 64 packed elements, and a warp takes at least 128"):
        replace(facts, tile=replace(tile, block_n=1)).warps(1)


@pytest.mark.parametrize("recipe", ["int4", "mxfp4_a8"])
def test_programs_that_make_several_tiles(recipe):
    # 3 tiles of w13's rows and 4 of w2's, two a program; K is two steps of 128 or three.
    case = Case(recipe=recipe, bias=True, **SIZES | {"hidden": 250, "intermediate": 150, "experts": 2})
    assert error(case, "uniform", run=2, block_n=64, block_k=128) < case.bar


@pytest.mark.parametrize("recipe", ["int4", "mxfp4", "mxfp4_a8", "nvfp4_w4a16", "int4_fp8:group=32", "int4_int8"])
@pytest.mark.parametrize("split", [2, 4])
def test_k_of_the_second_product_in_shares(recipe, split):
    # Three steps of 128, of which the last is cut short.
    case = Case(recipe=recipe, bias=True, **SIZES | {"intermediate": 350})
    layer = moe_cases.layer(case)
    tiles = cases.spec_of(case, layer).tiles
    tiles = replace(tiles, second=replace(tiles.second, block_k=128, split_k=split, run=1))
    assert error(case, "elsewhere", tiles) < case.bar


def wide(w: jax.Array, key: jax.Array) -> jax.Array:
    """``w`` with powers of two from 2**-30 to 1 on its groups of 32 columns: rows that fold in several passes."""
    *lead, k = w.shape
    power = jax.random.randint(key, (*lead, -(-k // 32)), -30, 1).astype(jnp.float32)
    return w.astype(jnp.float32) * jnp.repeat(jnp.exp2(power), 32, axis=-1)[..., :k]


LOW = {"block_m": 16, "short": 0, "run": 1}


@pytest.mark.parametrize(
    "tile, split, half, first_row",
    [
        (LOW | {"run": 2}, 1, 0, 0),
        (LOW | {"block_m": 32, "short": 16}, 1, 0, 0),
        (LOW, 2, 0, 0),
        (LOW, 1, 1, 0),
        (LOW | {"run": 2}, 1, 0, 64),
    ],
    ids=["run", "short", "split", "of up alone", "of a run's second tile alone"],
)
def test_rows_of_many_exponents_go_over_k_again(tile, split, half, first_row):
    case = Case(recipe="mxfp4_a8", tokens=40, hidden=160, intermediate=144, experts=2, top_k=1)
    plain, keys = moe_cases.layer(replace(case, recipe="bf16")), jax.random.split(jax.random.key(1))
    w13 = plain.w13.at[:, half:, first_row:].set(wide(plain.w13[:, half:, first_row:], keys[0]).astype(jnp.bfloat16))
    w2 = plain.w2.at[:, first_row:].set(wide(plain.w2[:, first_row:], keys[1]).astype(jnp.bfloat16))
    w13, w2 = (jmoe.quantize(w, case.recipe) for w in (w13, w2))
    layer = plain._replace(w13=w13, w2=w2)
    x, weights = moe_cases.tokens(case)
    ids = jnp.asarray(moe_cases.routing("uniform", case))
    spec = cases.spec_of(case, layer)
    tiles = replace(
        spec.tiles,
        first=replace(spec.tiles.first, block_n=64, block_k=128, **tile),
        second=replace(spec.tiles.second, block_n=64, block_k=128, split_k=split, **tile),
    )
    found = fused_moe(x, cases.experts_of(layer), weights, ids, spec=replace(spec, tiles=tiles), interpret=True)
    wanted = jmoe.fused_moe(x, w13, w2, weights, ids, implementation="reference")
    assert moe_cases.relative_error(found, wanted) < case.bar
