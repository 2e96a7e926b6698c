"""Kernels compiled for GPUs that are not here: they compile, spill no registers, and copy nothing."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels import body, matmul
from pallas_kernels import quantize as kernels
from pallas_kernels.tuning.heuristics import matmul_tile
from tests.pallas_kernels import aot, lanes

pytestmark = [pytest.mark.aot, aot.installed]

SM_COUNT = {80: 108, 89: 142, 90: 132, 100: 148}


def product(recipe, m, n, k, capability, layers=None, exact=False):
    """A dense product with a quantised activation, and its arguments."""
    stack = () if layers is None else (layers,)
    grid = (-(-n // 128), -(-k // 128))
    scales = {"fp8_tensor": (1, 1), "fp8_channel": (n, 1), "fp8_block": grid, "fp8_w8a16": grid}
    scale = (scales | {"int8": (n, 1), "int8_w8a16": (n, 1)}).get(recipe)
    block = {"fp8_tensor": (-1, -1), "fp8_block": (128, 128), "fp8_w8a16": (128, 128)}.get(recipe, (1, -1))
    kinds = {"bf16": "16bit", "float32": "32bit", "fp8_w8a16": "w8a16", "int8_w8a16": "w8a16", "int8": "int8"}
    kind = kinds.get(recipe, "fp8")
    codes = jnp.int8 if "int8" in recipe else body.F8
    dtype = jnp.float32 if recipe == "float32" else jnp.bfloat16
    cell = 128 if recipe in ("fp8_block", "fp8_w8a16") else None
    facts = {"capability": capability, "sm_count": SM_COUNT[capability]}
    tile = matmul_tile(m, n, k, operands=kind, cell=cell, exact=exact, **facts)
    quantizer = {
        "fp8_tensor": kernels.quantize_tensor,
        "fp8_channel": kernels.quantize_tokens,
        "int8": functools.partial(kernels.quantize_tokens, codes=jnp.int8),
        "fp8_block": functools.partial(kernels.quantize_groups, group=128),
    }.get(recipe)

    def call(x, w, w_scale, layer):
        x, x_scale = quantizer(x) if quantizer else (x, None)
        group = 128 if recipe == "fp8_block" else -1
        return matmul.linear(
            x, w, w_scale, x_scale=x_scale, w_block=block, x_group=group, layer=layer, exact=exact, tile=tile
        )

    weight = lanes.spec((*stack, n, k), codes if scale else dtype)
    w_scale = None if scale is None else lanes.spec((*stack, *scale))
    layer = None if layers is None else lanes.spec((), jnp.int32)
    return call, (lanes.spec((m, k), dtype), weight, w_scale, layer), tile


W8A8 = ("fp8_tensor", "fp8_channel", "fp8_block")
ANYWHERE = ("bf16", "float32", "fp8_w8a16", "int8", "int8_w8a16")
SERVED = [(r, c) for r in (*ANYWHERE, *W8A8) for c in SM_COUNT if r not in W8A8 or c >= 89]


@pytest.mark.parametrize("recipe, capability", SERVED)
def test_every_tile_of_the_heuristics_compiles_without_spilling(recipe, capability):
    tiles = set()
    for n in (640, 8192):
        for m in (1, 32, 64, 100, 512, 8192):
            for exact in {False, recipe == "fp8_channel"}:
                call, arguments, tile = product(recipe, m, n, 2880, capability, exact=exact)
                if (tile, exact) not in tiles:
                    tiles.add((tile, exact))
                    # ptxas gives the smallest tile of Ada 96 registers, and two values go to the stack.
                    smallest = capability == 89 and (tile.block_m, tile.block_n) == (64, 64)
                    aot.compile_for(call, arguments, capability, spills=smallest)
    assert len(tiles) > 2


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("capability", [89, 90, 100])
def test_quantisers_compile_without_spilling(group, capability):
    for shape in ((1, 7168), (8192, 7168), (300, 200)):
        x = lanes.spec(shape, jnp.bfloat16)
        for call in (lambda v: kernels.quantize_groups(v, group), kernels.quantize_tokens, kernels.quantize_tensor):
            aot.compile_for(call, (x,), capability)


@pytest.mark.parametrize("m, launches", [(8, 3), (512, 2)], ids=["K is split", "K is whole"])
def test_a_block_fp8_layer_is_a_quantisation_and_a_product(m, launches):
    call, arguments, tile = product("fp8_block", m, 4096, 7168, 90)
    assert (tile.split_k > 1) == (launches == 3)
    expected = ["quantize_groups", "linear", "linear_finish"][:launches]
    assert aot.compile_for(call, arguments).launches == expected


def test_a_scan_over_layers_copies_no_weights_and_a_scan_over_weights_does():
    layers, m, n = 4, 16, 4096
    one_layer = n * n
    call, arguments, _ = product("fp8_block", m, n, n, 90, layers=layers)

    def over_layers(x, w, w_scale):
        def step(x, layer):
            return call(x, w, w_scale, layer), None

        return lax.scan(step, x, jnp.arange(layers, dtype=jnp.int32))[0]

    def over_weights(x, w, w_scale):
        return lax.scan(lambda x, leaves: (call(x, *leaves, None), None), x, (w, w_scale))[0]

    assert aot.compile_for(over_layers, arguments[:3]).temporary_bytes < one_layer // 2
    assert aot.compile_for(over_weights, arguments[:3]).temporary_bytes > one_layer


def test_weights_sharded_along_n_are_not_gathered():
    call, arguments, _ = product("fp8_channel", 64, 1024, 2048, 90)
    mesh = lanes.mesh_of(90, tp=2)
    specs = (P(), P("tp"), P("tp"))
    sharded = jax.shard_map(lambda x, w, s: call(x, w, s, None), mesh=mesh, in_specs=specs, out_specs=P(None, "tp"))
    compiled = aot.compile_for(sharded, arguments[:3], specs=specs, tp=2)
    assert "all-gather" not in compiled.hlo
    assert compiled.launches[:2] == ["quantize_tokens", "linear"]
