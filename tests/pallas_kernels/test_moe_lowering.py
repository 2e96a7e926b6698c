"""What layers of experts become for GPUs that are not here: verified Triton IR, and where one can compile, launches."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jmoe
from pallas_kernels.tuning.heuristics import shared_memory
from tests.pallas_kernels import aot, lanes
from tests.pallas_kernels import moe_cases as cases
from tests.pallas_kernels.moe_cases import LAYERS, Case

FP8 = ("fp8_block", "fp8_channel", "fp8_tensor")
SUPPORTED = [
    (capability, recipe)
    for capability in (80, 89, 90, 100)
    for recipe in ("bf16", "fp8_w8a16", "int8", "int8_w8a16", *FP8)
    if capability >= 89 or recipe not in FP8
]
"""FP8 dots need sm89."""


@pytest.mark.lowering
@pytest.mark.parametrize("capability, recipe", SUPPORTED)
def test_every_kernel_lowers(capability, recipe):
    for tokens, sizes in ((1, "dsv3-tp8"), (64, "gpt-oss"), (8192, "qwen3-30b")):
        case = Case(recipe=recipe, tokens=tokens, **LAYERS[sizes], bias=True)
        call, shapes, _ = cases.abstract(case, capability=capability)
        kernels = lanes.lower_for(call, shapes, capability)
        names = [k.name for k in kernels]
        if tokens == 1:
            assert names == [*(["moe_prepare"] if recipe == "fp8_tensor" else []), "moe_first_few", "moe_second_few"]
        else:
            dots = [k.count("tt.dot") for k in kernels if k.name in ("moe_first", "moe_second")]
            assert len(dots) == 2 and min(dots) >= 1
            assert names[-1] == "combine"
        if recipe not in FP8:
            # A float8 type would end the process in compilers for GPUs before sm89.
            assert not any("f8E4M3" in k.text for k in kernels)


@pytest.mark.lowering
def test_h13_only_the_expert_and_the_layer_are_widened():
    # w13 has 2^32 - 2^24 elements: only scalar offsets need 64 bits.
    case = Case(recipe="fp8_block", tokens=64, hidden=4096, intermediate=2048, experts=255, top_k=8)
    call, shapes, _ = cases.abstract(case, layers=1)
    [first] = [k for k in lanes.lower_for(call, shapes) if k.name == "moe_first"]
    assert "i64" in first.text
    assert not re.search(r"tensor<[\dx]+xi64>", first.text)


@pytest.mark.lowering
def test_it_lowers_under_shard_map_with_its_check():
    case = Case(recipe="fp8_block", tokens=64, **LAYERS["qwen3-30b"])
    call, shapes, _ = cases.abstract(case)
    mesh, specs = lanes.mesh_of(90, e=2), [P(None, "e") if len(s.shape) > 3 else P() for s in shapes]

    def local(*arrays: jax.Array) -> jax.Array:
        return jax.lax.psum(call(*arrays), "e")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    names = [k.name for k in lanes.lower_for(sharded, shapes, mesh=mesh)]
    assert names == ["moe_prepare", "moe_first", "moe_second", "combine"]


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_block:block=32", "fp8_channel", "fp8_w8a16"])
@pytest.mark.parametrize("sizes", LAYERS)
def test_tiles_are_powers_of_two_that_fit(capability, recipe, sizes):
    for tokens in (1, 2, 7, 64, 300, 2048, 8192):
        case = Case(recipe=recipe, tokens=tokens, **LAYERS[sizes])
        shapes = jax.eval_shape(lambda case=case: cases.layer(case))
        tiles = cases.tiles_of(case, shapes, capability=capability)
        if tiles.single:
            assert all(n & (n - 1) == 0 for t in (tiles.first, tiles.second) for n in (t.block_n, t.block_k))
            continue
        assert tiles.first.block_m == tiles.second.block_m
        for tile, halves in ((tiles.first, 2), (tiles.second, 1)):
            extents = (tile.block_m, tile.block_n, tile.block_k)
            # H14: dots of eight columns were wrong on Hopper.
            assert all(n >= 16 and n & (n - 1) == 0 for n in extents)
            x_bytes, w_bytes = {"bf16": (2, 2), "fp8_w8a16": (2, 1)}.get(recipe, (1, 1))
            column = tile.block_m * x_bytes + halves * tile.block_n * w_bytes
            assert tile.num_stages * tile.block_k * column <= shared_memory(capability)


def test_tiles_that_may_not_depend_on_the_number_of_tokens_do_not():
    chosen = set()
    for tokens in (1, 64, 8192):
        case = Case(recipe="fp8_block", tokens=tokens, **LAYERS["qwen3-30b"])
        shapes = jax.eval_shape(lambda case=case: cases.layer(case))
        chosen.add(cases.tiles_of(case, shapes, batch_invariant=True))
    [tiles] = chosen
    assert (tiles.first.block_m, tiles.first.short, tiles.second.block_m, tiles.second.short) == (64, 0, 64, 0)


@pytest.mark.aot
@aot.installed
@pytest.mark.parametrize("capability, recipe", SUPPORTED)
def test_launches_of_a_layer(capability, recipe):
    for tokens, sizes in ((1, "dsv3-tp8"), (64, "gpt-oss"), (8192, "qwen3-30b")):
        case = Case(recipe=recipe, tokens=tokens, **LAYERS[sizes])
        call, shapes, spec = cases.abstract(case, capability=capability)
        # Tiles are Hopper's, where only the tall one that promotes its sums keeps a few values on the stack.
        spills = capability != 90 or (recipe == "fp8_block" and spec.tiles.first.block_m == 128)
        compiled = aot.compile_for(call, shapes, capability, spills=spills)
        most = 6 if recipe in ("fp8_channel", "fp8_tensor", "int8") else 5
        assert len(compiled.launches) <= most, compiled.launches
        assert "while" not in compiled.launches


@pytest.mark.aot
@aot.installed
@pytest.mark.parametrize("recipe", ["bf16", "fp8_w8a16", *FP8])
def test_scanning_over_layers_copies_no_weights_and_nests_no_loop(recipe):
    case = Case(recipe=recipe, tokens=64, **LAYERS["qwen3-30b"])
    call, shapes, _ = cases.abstract(case, layers=4)
    [index] = [i for i, s in enumerate(shapes) if s.shape == () and s.dtype == jnp.int32]

    def scanned(*arrays: jax.Array) -> jax.Array:
        def step(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            return call(x, *arrays[1:index], layer, *arrays[index + 1 :]), None

        return jax.lax.scan(step, arrays[0], jnp.arange(4, dtype=jnp.int32))[0]

    compiled = aot.compile_for(scanned, shapes)
    assert compiled.hlo.count(" while(") == 1
    weights = 128 * 768 * 2048  # bytes of the smallest weight of one layer, w2 in e4m3
    assert compiled.temporary_bytes < weights // 10


@pytest.mark.aot
@aot.installed
def test_chunks_share_their_temporary_memory():
    tokens, sizes = 65536, LAYERS["qwen3-30b"]
    h, i, e, k = (sizes[name] for name in ("hidden", "intermediate", "experts", "top_k"))

    def layer(x: jax.Array, w13: jax.Array, w2: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
        return jmoe.fused_moe(x, w13, w2, weights, ids, implementation="triton")

    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = jax.ShapeDtypeStruct((tokens, k), jnp.float32)
    ids = jax.ShapeDtypeStruct((tokens, k), jnp.int32)
    arguments = bf16((tokens, h)), bf16((e, 2, i, h)), bf16((e, h, i)), weights, ids
    taken = {}
    for chunk in (None, 16384):
        with jmoe.config(device="h200", moe_chunk=chunk):
            taken[chunk] = aot.compile_for(layer, arguments).temporary_bytes
    whole = 2 * tokens * k * (h + i)
    assert taken[None] > whole
    assert taken[16384] < 0.3 * whole + 2 * tokens * h * 2
