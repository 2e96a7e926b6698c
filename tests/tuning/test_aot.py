"""Compiled for a GPU that is not here: what tuning would measure, and what a call takes beside its arrays."""

import dataclasses
import functools

import jax
import pytest

import jmoe
from jmoe import select
from jmoe.backends import triton
from jmoe.tuning import MODELS, catalogue, on_device
from jmoe.tuning.search import plan_of
from pallas_kernels.align import max_blocks
from pallas_kernels.tuning import table
from tests.pallas_kernels import aot

pytestmark = [pytest.mark.aot, aot.installed]


def arguments(op):
    """Shapes of a call's arguments."""
    key = jax.random.key(0)
    make = functools.partial(jax.eval_shape, on_device.weight, key)
    weights = tuple(make(shape, op.recipe, op.dtype) for shape in on_device.weight_shapes(op))
    return jax.eval_shape(lambda weights: on_device.arguments_of(op, weights, 0), weights)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_channel", "fp8_block"])
def test_candidates_of_a_dense_product_spill_no_registers(recipe):
    work = plan_of(catalogue.linear(8192, 8192, jmoe.recipe(recipe), 8192), "h200")
    chosen = select(work.op, "h200")
    given = arguments(work.op)
    for tiles in work.tiles:
        selection = dataclasses.replace(chosen, tiles=table.parts(tiles))
        compiled = aot.compile_for(lambda args, s=selection: triton.linear(work.op, s, args), (given,))
        assert compiled.launches[-1] == "linear"
    assert len(work.tiles) == 4


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_channel", "bf16"])
def test_extra_memory_of_a_layer_of_experts(recipe):
    """The formulas of CONTRIBUTING: slots in blocks, the intermediate, the slots' results; x's codes in their place."""
    op = catalogue.experts(MODELS["qwen3-30b"], jmoe.recipe(recipe), 512)
    chosen = select(op, "h200")
    call = functools.partial(triton.fused_moe, op.replace(accumulation=chosen.accumulation), chosen)
    extra = aot.compile_for(call, (arguments(op),), spills=True).temporary_bytes
    slots, rows = 512 * 8, chosen.tile("first").block_m
    blocks = 4 * (rows + 1) * max_blocks(slots, 128, rows)
    scales = {"fp8_block": 4 * 768 // 128, "fp8_channel": 4, "bf16": 0}[recipe]
    intermediate = slots * ((2 if recipe == "bf16" else 1) * 768 + scales)
    results = 2 * slots * 2048
    assert 0.98 * (intermediate + results) < extra < blocks + intermediate + results + 4096


@pytest.mark.parametrize("recipe", ["fp8_block", "bf16"])
def test_extra_memory_of_one_token_is_the_intermediate(recipe):
    op = catalogue.experts(MODELS["qwen3-30b"], jmoe.recipe(recipe), 1)
    chosen = select(op, "h200")
    assert chosen.tile("single")
    call = functools.partial(triton.fused_moe, op.replace(accumulation=chosen.accumulation), chosen)
    assert aot.compile_for(call, (arguments(op),)).temporary_bytes == 2 * 8 * 768
