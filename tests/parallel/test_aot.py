"""Layers in parts on two GPUs, compiled for these without having them: what is launched, and what moves."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jmoe
import jmoe.parallel
from tests.pallas_kernels import aot, lanes

pytestmark = [pytest.mark.aot, aot.installed]

EXPERTS, INTERMEDIATE, HIDDEN, TOKENS, TOP_K = 8, 512, 1024, 64, 2


def weight(recipe, *shape):
    if recipe == "bf16":
        return lanes.spec(shape, jnp.bfloat16)
    return jax.eval_shape(lambda: jmoe.quantize(jnp.zeros(shape), recipe))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_channel"])
@pytest.mark.parametrize("axes", ["expert_axes", "intermediate_axes"])
def test_experts_in_parts_run_our_kernels_and_only_their_results_are_summed(recipe, axes):
    if (recipe, axes) == ("fp8_channel", "intermediate_axes"):
        pytest.skip("w2's scales, one a row, are on both devices: one spec does not fit all its leaves")
    part = P("x") if axes == "expert_axes" else P(None, None, "x")

    def layer(x, w13, w2, weights, ids):
        with jmoe.config(device="h200"):
            return jmoe.parallel.fused_moe(x, w13, w2, weights, ids, **{axes: "x"})

    arguments = (
        lanes.spec((TOKENS, HIDDEN), jnp.bfloat16),
        weight(recipe, EXPERTS, 2, INTERMEDIATE, HIDDEN),
        weight(recipe, EXPERTS, HIDDEN, INTERMEDIATE),
        lanes.spec((TOKENS, TOP_K)),
        lanes.spec((TOKENS, TOP_K), jnp.int32),
    )
    compiled = aot.compile_for(layer, arguments, specs=(P(), part, part, P(), P()), x=2)
    kernels = [name for name in compiled.launches if name.startswith("moe_") or name == "combine"]
    expected = ["moe_prepare", "moe_first", "moe_second", "combine"]
    assert [name for name in kernels if name != "moe_requantize"] == expected
    moves = ("all-", "collective", "reduce-scatter")
    moved = [name.removesuffix("-start") for name in compiled.launches if name.startswith(moves)]
    moved = [name for name in moved if not name.endswith("-done")]
    assert moved == ["all-reduce"]
    assert compiled.temporary_bytes < EXPERTS * INTERMEDIATE * HIDDEN // 4  # far below the smallest weight
