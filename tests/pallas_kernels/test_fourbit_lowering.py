"""What products with packed four-bit weights become for GPUs that are not here."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jmoe
from pallas_kernels.experts import Experts
from pallas_kernels.fourbit.linear import linear
from pallas_kernels.moe import fused_moe
from pallas_kernels.tuning.fourbit import Kind, linear_tile, moe_tiles
from tests.pallas_kernels import aot, lanes, moe_cases
from tests.pallas_kernels import fourbit_cases as cases
from tests.pallas_kernels.moe_cases import LAYERS, Case

SUPPORTED = [
    (capability, recipe)
    for capability in (80, 89, 90, 100)
    for recipe in (
        *("mxfp4", "nvfp4_w4a16", "int4", "int4:group=32,scale_dtype=bfloat16,zero_point", "mxfp4_a8"),
        *("int4_fp8", "int4_int8:group=32"),
    )
    if capability >= 89 or recipe not in ("mxfp4_a8", "int4_fp8")
]
"""FP8 dots need sm89."""


def product(recipe, m, n, k, capability, *, layers=None, exact=False):
    """A dense product as a function, and its arguments as shapes."""
    stack = () if layers is None else (layers,)
    q = cases.abstract_weight(recipe, (*stack, n, k))
    packing = cases.packing_of(q)
    tile = linear_tile(m, n, k, kind=cases.kind_of(q), exact=exact, capability=capability)
    x = lanes.spec((m, k), jnp.bfloat16 if q.input_scheme is None else q.input_scheme.fmt.storage)
    layer = None if layers is None else lanes.spec((), jnp.int32)

    def call(x, x_scale, w, layer):
        return linear(x, w, packing=packing, x_scale=x_scale, layer=layer, exact=exact, tile=tile)

    return call, (x, None if q.input_scheme is None else lanes.spec((m, 1)), jax.eval_shape(cases.packed, q), layer)


@pytest.mark.lowering
@pytest.mark.parametrize("capability, recipe", SUPPORTED)
def test_every_kernel_lowers(capability, recipe):
    for m in (1, 300):
        call, arguments = product(recipe, m, 5760, 2880, capability, layers=2)
        kernels = lanes.lower_for(call, arguments, capability)
        assert [k.name for k in kernels] == (["linear_w4", "linear_finish"] if m == 1 else ["linear_w4"])
        assert kernels[0].count("tt.dot") >= 1
        # A float8 type would end the process in compilers for GPUs before sm89.
        assert ("f8E4M3" in kernels[0].text) == (recipe in ("mxfp4_a8", "int4_fp8"))


@pytest.mark.lowering
def test_weights_are_unpacked_in_the_layout_that_they_are_loaded_in():
    # 64 rows of 64 bytes a tile of K: nothing wider than the packed tile is loaded, and its parts are not shuffled.
    call, arguments = product("mxfp4_a8", 16, 16384, 8192, 90)
    [kernel] = lanes.lower_for(call, arguments)
    assert kernel.count("tt.gather") == 0
    assert kernel.count("tt.elementwise_inline_asm") >= 2


@pytest.mark.aot
@aot.installed
@pytest.mark.parametrize("capability, recipe", SUPPORTED)
def test_every_tile_of_the_heuristics_compiles_without_spilling(capability, recipe):
    for n, k in ((16384, 8192), (5760, 2880)):
        for m in (16, 64, 100, 4096):
            for exact in {False, recipe == "mxfp4_a8"}:
                call, arguments = product(recipe, m, n, k, capability, exact=exact)
                # On Ada a masked last step and promotion put a few values on the stack.
                aot.compile_for(call, arguments, capability, spills=capability == 89 and exact)


@pytest.mark.aot
@aot.installed
def test_a_scan_over_layers_copies_no_weights():
    layers, m, n = 4, 16, 4096
    call, (x, _, w, _) = product("int4", m, n, n, 90, layers=layers)

    def scanned(x, w):
        step = functools.partial(lambda w, x, layer: (call(x, None, w, layer), None), w)
        return jax.lax.scan(step, x, jnp.arange(layers, dtype=jnp.int32))[0]

    assert aot.compile_for(scanned, (x, w)).temporary_bytes < n * n // 4


def layer_of_experts(case, capability, layers=2, tiles=None):
    """fused_moe of one of so many stacked layers, and its arguments as shapes; by the heuristics' tiles or others."""
    one = jax.eval_shape(lambda: moe_cases.layer(case))
    spec = cases.spec_of(case, one, capability=capability)
    spec = spec if tiles is None else replace(spec, tiles=tiles)
    experts = jax.eval_shape(lambda: cases.experts_of(moe_cases.layer(case)))
    stacked = jax.tree.map(lambda s: lanes.spec((layers, *s.shape), s.dtype), experts)
    x, weights = jax.eval_shape(lambda: moe_cases.tokens(case))

    def call(x: jax.Array, experts: Experts, weights: jax.Array, ids: jax.Array) -> jax.Array:
        return fused_moe(x, experts, weights, ids, spec=spec)

    return call, (x, stacked._replace(layer=lanes.spec((), jnp.int32)), weights, lanes.spec(weights.shape, jnp.int32))


@pytest.mark.lowering
@pytest.mark.parametrize("capability, recipe", SUPPORTED)
def test_a_layer_of_experts_lowers(capability, recipe):
    for tokens, sizes in ((1, "qwen3-30b"), (8, "qwen3-30b"), (8192, "gpt-oss")):
        case = Case(recipe=recipe, tokens=tokens, **LAYERS[sizes], bias=True)
        kernels = lanes.lower_for(*layer_of_experts(case, capability), capability)
        if tokens == 1 and recipe == "mxfp4_a8":
            # Its codes would be decoded twice, so the heuristics have no products with vectors, but a table may.
            names = [k.name for k in kernels]
            assert names == ["moe_prepare", "moe_first", "moe_requantize", "moe_second", "combine"]
            few = moe_tiles(
                1,
                case.hidden,
                case.intermediate,
                case.experts,
                case.top_k,
                kind=Kind(operand="bfloat16", words=1, codes="e2m1"),
                capability=capability,
            )
            kernels = lanes.lower_for(*layer_of_experts(case, capability, tiles=few), capability)
        if tokens == 1:
            assert [k.name for k in kernels] == ["moe_first_few", "moe_second_few"]
        else:
            assert [k.count("tt.dot") >= 1 for k in kernels if k.name in ("moe_first", "moe_second")] == [True, True]


@pytest.mark.aot
@aot.installed
@pytest.mark.parametrize("capability, recipe", SUPPORTED)
def test_a_layer_of_experts_takes_few_launches_and_copies_no_weights(capability, recipe):
    for tokens, sizes, exact in ((1, "qwen3-30b", True), (256, "gpt-oss", False), (8192, "gpt-oss", True)):
        case = Case(recipe=recipe, tokens=tokens, exact=exact, **LAYERS[sizes])
        # Tiles are Hopper's; GPUs before it keep a few values of two accumulators on the stack.
        compiled = aot.compile_for(*layer_of_experts(case, capability), capability, spills=capability < 90)
        quantises = jmoe.recipe(recipe).input is not None
        assert len(compiled.launches) <= (6 if quantises else 5), compiled.launches
        if tokens < 8192:
            assert compiled.temporary_bytes < case.experts * case.hidden * case.intermediate // 10
