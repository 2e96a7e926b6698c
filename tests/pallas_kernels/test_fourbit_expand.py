"""MXFP4 weights expanded to e4m3 codes, and products with them, in interpret mode."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from pallas_kernels import quantize as kernels
from pallas_kernels.fourbit import expand
from pallas_kernels.fourbit.linear import linear
from pallas_kernels.moe import batched_experts, fused_moe
from pallas_kernels.tuning.heuristics import MatmulTile
from pallas_kernels.tuning.moe_heuristics import MoETiles
from tests.pallas_kernels import aot, lanes, moe_cases
from tests.pallas_kernels import fourbit_cases as cases
from tests.pallas_kernels.moe_cases import Case

TILE = MatmulTile(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=3)
FEW = jnp.zeros(1, jnp.int32)


def wide(shape: tuple[int, ...], exponents: int, rows: slice = slice(None), seed: int = 0) -> jax.Array:
    """Normal weights, in some rows with groups of 32 columns scaled by 2**-exponents to 1."""
    keys = jax.random.split(jax.random.key(seed))
    power = jax.random.randint(keys[0], (*shape[:-1], -(-shape[-1] // 32)), -exponents, 1).astype(jnp.float32)
    scale = jnp.repeat(jnp.exp2(power), 32, axis=-1)[..., : shape[-1]]
    row = jnp.zeros(shape[-2], bool).at[rows].set(True)[:, None]
    return jax.random.normal(keys[1], shape) * jnp.where(row, scale, 1.0)


@pytest.mark.parametrize("shape", [(70, 300), (64, 256), (3, 33)], ids=str)
def test_codes_times_scales_are_the_weights(shape):
    q = jmoe.quantize(wide(shape, 9), "mxfp4_a8")
    packing = cases.packing_of(q)
    w = jax.tree.map(lambda a: a[None], cases.packed(q))
    codes, scale, passes = expand.expand(w, packing, FEW, interpret=True)
    assert (codes.shape, codes.dtype, scale.shape, scale.dtype) == (shape, jnp.float8_e4m3fn, (shape[0], 1), "float32")
    np.testing.assert_array_equal(np.asarray(codes, np.float32) * scale, q.dequantize())
    assert passes.tolist() == [1] * packing.row_tiles
    assert codes.nbytes + scale.nbytes == packing.expanded_bytes


@pytest.mark.parametrize("layer", [0, 2, -1, 7])
def test_one_layer_of_several_is_expanded(layer):
    # A layer before the first is counted from the last, and one past it is the last, as JAX indexes.
    w = wide((3, 2, 70, 140), 9).at[1].mul(jnp.exp2(-30.0 * (jnp.arange(140) // 32)))
    q = jmoe.quantize(w, "mxfp4_a8")
    packing, index = cases.packing_of(q), jnp.full(1, layer, jnp.int32)
    codes, scale, passes = expand.expand(cases.packed(q), packing, index, interpret=True)
    wanted = q.dequantize()[min(layer, 2)]
    np.testing.assert_array_equal(np.asarray(codes, np.float32) * scale, wanted)
    assert passes.tolist() == [1] * 4
    *_, passes = expand.expand(cases.packed(q), packing, FEW + 1, interpret=True)
    assert passes.tolist() == [1 + 4 * 30 // 12] * 4


def test_scales_that_do_not_fold_are_refused():
    q = jmoe.quantize(wide((64, 128), 0), "mxfp4")
    with pytest.raises(ValueError, match="have no scales that go into an e4m3 exponent"):
        expand.expand(jax.tree.map(lambda a: a[None], cases.packed(q)), cases.packing_of(q), FEW, interpret=True)


def both(q, x, **options):
    """Of expanded and of packed weights."""
    codes, scale = kernels.quantize_tokens(x, codes=jnp.float8_e4m3fn, interpret=True)
    call = {"packing": cases.packing_of(q), "x_scale": scale, "out_dtype": jnp.float32, "interpret": True} | options
    w = cases.packed(q)
    return (np.asarray(linear(codes, w, tile=TILE, expands=expands, **call)) for expands in (True, False))


@pytest.mark.parametrize("exact", [True, False])
def test_products_with_expanded_weights_are_those_with_packed_ones(exact):
    q = jmoe.quantize(wide((130, 300), 9), "mxfp4_a8")
    x = jax.random.normal(jax.random.key(1), (70, 300), jnp.bfloat16)
    bias = jax.random.normal(jax.random.key(2), (130,))
    found, wanted = both(q, x, bias=bias, activation="gelu", exact=exact)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("exponents", [13, 40])
def test_rows_of_many_exponents_are_those_of_packed_weights(exponents):
    rows = slice(70, 75)
    w = wide((200, 300), exponents, rows)
    q = jmoe.quantize(jnp.stack([w, wide((200, 300), 9)]), "mxfp4_a8")
    # Large where weights of these rows are small, so that each group counts.
    x = (jax.random.normal(jax.random.key(1), (70, 300)) / jnp.abs(w[rows]).max(axis=0)).astype(jnp.bfloat16)
    found, wanted = both(q, x, layer=jnp.int32(0), bias=jnp.ones((2, 200)))
    codes, scale, passes = expand.expand(cases.packed(q), cases.packing_of(q), FEW, interpret=True)
    assert (passes > 1).tolist() == [False, True, False, False]
    expanded = np.asarray(codes, np.float32) * scale
    assert not np.array_equal(expanded[rows], q.dequantize()[0][rows])
    np.testing.assert_array_equal(
        np.delete(expanded, np.arange(70, 75), 0), np.delete(q.dequantize()[0], np.arange(70, 75), 0)
    )
    # Their tile of 64 rows is made by the kernel of packed weights.
    np.testing.assert_array_equal(found[:, 64:128], wanted[:, 64:128])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_a_nan_weight_makes_its_own_column_nan_and_a_nan_token_its_own_row():
    q = jmoe.quantize(wide((70, 160), 0).at[3, 100].set(jnp.nan), "mxfp4_a8")
    x = jax.random.normal(jax.random.key(1), (5, 160), jnp.bfloat16).at[2, 7].set(jnp.nan)
    found, _ = both(q, x)
    nan = np.zeros((5, 70), bool)
    nan[2], nan[:, 3] = True, True
    np.testing.assert_array_equal(np.isnan(found), nan)


SIZES: dict[str, Any] = {"tokens": 40, "hidden": 160, "intermediate": 144, "experts": 3, "top_k": 2}


def specs_of(case, layer):
    """Static facts of a layer whose weights are expanded, and of one whose are not."""
    spec = cases.spec_of(case, layer)
    first = replace(TILE, block_m=32, short=16, swap=True)
    return replace(spec, tiles=MoETiles(first=first, second=replace(first, block_n=128, pieces=2)), expands=True), spec


@pytest.mark.parametrize("exponents", [0, 30])
@pytest.mark.parametrize(
    "case",
    [
        Case(recipe="mxfp4_a8", bias=True, activation="swigluoai", exact=True, **SIZES),
        Case(recipe="mxfp4_a8", dtype="float16", gated=False, activation="relu2", **SIZES),
    ],
    ids=["gated", "ungated"],
)
def test_layers_of_experts(case, exponents):
    layer = moe_cases.layer(case)
    if exponents:
        w13, w2 = (
            jmoe.quantize(wide(w.shape, exponents, slice(60, 70), seed) * w.shape[-1] ** -0.5, case.recipe)
            for seed, w in enumerate((layer.w13, layer.w2))
        )
        layer = layer._replace(w13=w13, w2=w2)
    ids = moe_cases.routing("elsewhere", case)
    x, weights = moe_cases.spoiled(case, *moe_cases.tokens(case), ids)
    experts = cases.experts_of(layer)
    stacked = jax.tree.map(lambda a: jnp.stack([jnp.zeros_like(a), a]), experts)._replace(layer=jnp.int32(1))
    expands, packed = specs_of(case, layer)
    found = fused_moe(x, stacked, weights, jnp.asarray(ids), spec=expands, interpret=True)
    wanted = fused_moe(x, experts, weights, jnp.asarray(ids), spec=packed, interpret=True)
    reference = jmoe.fused_moe(
        x, layer.w13, layer.w2, weights, ids, implementation="reference", **moe_cases.options_of(case, layer)
    )
    # Sums in another order may round the intermediate elsewhere.
    assert moe_cases.relative_error(found, wanted) < case.bar
    assert moe_cases.relative_error(found, reference) < case.bar


@pytest.mark.parametrize("exponents", [0, 30])
def test_rows_of_each_expert(exponents):
    case = Case(recipe="mxfp4_a8", **SIZES)
    plain = moe_cases.layer(replace(case, recipe="bf16"))
    w13, w2 = (jmoe.quantize(wide(w.shape, exponents, slice(0, 3)) * 0.1, case.recipe) for w in (plain.w13, plain.w2))
    layer = plain._replace(w13=w13, w2=w2)
    x = jax.random.normal(jax.random.key(1), (3, 40, case.hidden), jnp.bfloat16)
    counts = jnp.array([40, 0, 33], jnp.int32)
    wanted = jmoe.batched_experts(x, counts, w13, w2, implementation="reference")
    y = batched_experts(x, counts, cases.experts_of(layer), spec=specs_of(case, layer)[0], interpret=True)
    assert moe_cases.relative_error(y, wanted) < case.bar
    assert not y[1].any() and not y[2, 33:].any()


def test_a_scale_of_all_of_the_intermediate_does_not_go_with_expanding():
    case = Case(recipe="mxfp4_a8", **SIZES)
    layer = moe_cases.layer(case)
    spec = specs_of(case, layer)[0]
    assert spec.intermediate_scheme is not None
    spec = replace(spec, intermediate_scheme=replace(spec.intermediate_scheme, scale="tensor"))
    x, weights = moe_cases.tokens(case)
    ids = jnp.zeros(weights.shape, jnp.int32)
    with pytest.raises(ValueError, match="the intermediate's scales are of tokens or given"):
        fused_moe(x, cases.experts_of(layer), weights, ids, spec=spec, interpret=True)


def weight(*shape: int) -> jmoe.QTensor:
    """A prepared MXFP4 weight as shapes."""
    q = cases.abstract_weight("mxfp4_a8", shape)
    return jax.eval_shape(lambda q: jmoe.prepare(q, op="moe", device="h200"), q)


def dense(x, w, layer):
    return jmoe.linear(x, w, layer=layer, implementation="triton")


def experts(x, w13, w2, weights, ids):
    return jmoe.fused_moe(x, w13, w2, weights, ids, implementation="triton")


DENSE = lanes.spec((4096, 2880), jnp.bfloat16), weight(2, 5760, 2880), lanes.spec((), jnp.int32)
EXPERTS = (
    lanes.spec((8192, 2880), jnp.bfloat16),
    weight(32, 2, 2880, 2880),
    weight(32, 2880, 2880),
    lanes.spec((8192, 4)),
    lanes.spec((8192, 4), jnp.int32),
)
ROOM = 32 * 2 * 2880 * (2880 + 4)
"""What w13 of ``EXPERTS`` needs."""
DEVICES = {89: "l4", 90: "h200", 100: "b200"}


@pytest.mark.lowering
@pytest.mark.parametrize("capability", DEVICES)
def test_every_kernel_lowers(capability):
    with jmoe.config(device=DEVICES[capability], workspace=ROOM):
        kernels = lanes.lower_for(dense, DENSE, capability)
        assert [k.name for k in kernels] == ["quantize_tokens", "expand_w4", "linear", "linear_w4_again"]
        assert kernels[1].count("tt.dot") == 0
        names = [k.name for k in lanes.lower_for(experts, EXPERTS, capability)]
    first, second = ["expand_w4", "moe_first", "moe_first_again"], ["expand_w4", "moe_second", "moe_second_again"]
    assert names == ["moe_prepare", "moe_prepare", *first, "moe_requantize", *second, "combine"]


@pytest.mark.aot
@aot.installed
@pytest.mark.parametrize("function, arguments", [(dense, DENSE), (experts, EXPERTS)], ids=["dense", "experts"])
def test_memory_grows_by_no_more_than_the_workspace(function, arguments):
    taken = {}
    for room in (0, ROOM):
        with jmoe.config(device="h200", workspace=room):
            [(_, selection)] = jmoe.explain(function, *arguments, device="h200").entries
            # Packed weights of layers of experts spill a few registers in JAX 0.10's Triton.
            compiled = aot.compile_for(function, arguments, spills=room == 0)
            taken[room] = compiled.temporary_bytes - selection.workspace
            assert (selection.workspace > 0) == (room > 0)
            assert len(compiled.launches) <= (10 if room else 6), compiled.launches
    # Beside it there is a number for each 64 rows. Results of slots may lie where expanded weights were.
    assert taken[ROOM] - taken[0] < 2**20


@pytest.mark.aot
@aot.installed
def test_weights_that_are_used_twice_are_expanded_twice():
    """Else the first expansion would be kept until the second use, beside all others in between."""
    x = lanes.spec((2048, 512), jnp.bfloat16)
    with jmoe.config(device="h200"):
        w = jax.eval_shape(lambda: jmoe.prepare(jmoe.quantize(jnp.zeros((512, 512)), "mxfp4_a8"), op="linear"))

    def twice(x: jax.Array, *weights: Any) -> jax.Array:
        for each in weights * 2:
            x = jmoe.linear(x, each, activation="silu", implementation="triton")
        return x

    taken = {}
    for room in (0, ROOM):
        with jmoe.config(device="h200", workspace=room):
            compiled = aot.compile_for(lambda *arrays: twice(*arrays), (x, w, w, w))
            taken[room] = compiled.temporary_bytes
            assert compiled.launches.count("expand_w4") == (6 if room else 0)
    assert taken[ROOM] - taken[0] < 2 * 512 * 516
