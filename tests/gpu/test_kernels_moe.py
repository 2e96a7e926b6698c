"""Layers of experts on a GPU: ``pytest -m gpu tests/gpu/test_kernels_moe.py``.

A case is one compiled function of a key and of expert ids (inputs, weights, kernels, reference, and errors), and runs
under eight routings. All are compiled in threads before the first runs.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmoe
from jmoe.backends.spec import DeviceSpec
from jmoe.qtensor import QTensor
from pallas_kernels import align as alignment
from pallas_kernels import bits
from pallas_kernels.activation import Activation
from pallas_kernels.experts import Experts, ExpertsSpec
from pallas_kernels.moe import batched_experts, fused_moe
from pallas_kernels.tuning.moe_heuristics import moe_tiles
from tests.pallas_kernels import moe_cases as cases
from tests.pallas_kernels.moe_cases import Case, Layer

pytestmark = pytest.mark.gpu

OPTIONS = {"xla_gpu_autotune_level": 0}
"""Tuning XLA's own products would take longer than all the cases."""

RECIPES = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block", "fp8_w8a16")

SIZES: list[dict[str, Any]] = [
    {"tokens": 1, "hidden": 7168, "intermediate": 256, "experts": 256, "top_k": 8},  # one token: matrices times vectors
    {"tokens": 8, "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    {"tokens": 1, "hidden": 512, "intermediate": 128, "experts": 512, "top_k": 10},  # H05
    {"tokens": 16, "hidden": 512, "intermediate": 128, "experts": 512, "top_k": 10},
    {"tokens": 33, "hidden": 300, "intermediate": 200, "experts": 1, "top_k": 1},
    {"tokens": 64, "hidden": 2880, "intermediate": 192, "experts": 32, "top_k": 4},
    {"tokens": 300, "hidden": 2880, "intermediate": 192, "experts": 160, "top_k": 6},
    {"tokens": 2048, "hidden": 1024, "intermediate": 512, "experts": 5, "top_k": 2},
]

SMALL, ONE, GPT, MANY, TALL = SIZES[1], SIZES[4], SIZES[5], SIZES[6], SIZES[7]

CASES = [
    *(Case(recipe=recipe, **sizes) for recipe in RECIPES for sizes in SIZES),
    *(Case(recipe=f"fp8_block:block={block}", **GPT) for block in (32, 64)),
    Case(recipe="fp8_block:scale_dtype=e8m0", **GPT),
    Case(recipe="mxfp8", **GPT),
    Case(recipe="fp8_channel", exact=True, **MANY),
    Case(recipe="fp8_w8a16:block=1x-1", **MANY),
    *(
        Case(recipe=recipe, **sizes)
        for recipe in ("int8", "int8_w8a16")
        for sizes in (SIZES[0], SMALL, GPT, MANY, TALL)
    ),
    Case(recipe="int8_w8a16:group=32", **GPT),
    Case(dtype="float16", activation="gelu", **GPT),
    Case(dtype="float32", activation="gelu_tanh", **ONE),
    Case(recipe="fp8_w8a16", dtype="float32", **ONE),
    Case(recipe="fp8_block", activation="swigluoai", bias=True, **GPT),
    Case(recipe="fp8_channel", activation="relu2", gated=False, bias=True, **MANY),
]


def named(case: Case) -> str:
    sizes = "x".join(str(n) for n in (case.tokens, case.hidden, case.intermediate, case.experts, case.top_k))
    rest = [case.activation, case.dtype] if (case.activation, case.dtype) != ("silu", "bfloat16") else []
    return "-".join([case.recipe, sizes, *rest, *(["exact"] if case.exact else [])])


def device_facts() -> dict[str, int]:
    device = DeviceSpec.of(jax.devices()[0])
    return {"capability": device.compute_capability, "sm_count": device.sm_count}


def is_served(case: Case) -> bool:
    return (
        device_facts()["capability"] >= 89 or case.recipe == "bf16" or "w8a16" in case.recipe or "int8" in case.recipe
    )


def skip_if_not_served(case: Case) -> None:
    if not is_served(case):
        pytest.skip("no FP8 tensor cores")


def kernels(case: Case, layer: Layer, x: Any, weights: Any, ids: Any, **more: Any) -> jax.Array:
    """Our layer with the heuristics' tiles."""
    spec = cases.spec_of(case, layer, cases.tiles_of(case, layer, **device_facts()))
    return fused_moe(x, cases.arrays(layer, **more), weights, ids, spec=spec)


def made(case: Case) -> tuple[Layer, jax.Array, jax.Array]:
    """The case's layer, x and router weights, by one program."""
    return jax.jit(functools.partial(_made, case)).lower().compile(compiler_options=OPTIONS)()


def _made(case: Case) -> tuple[Layer, jax.Array, jax.Array]:
    return cases.layer(case), *cases.tokens(case)


def in_shares(case: Case, layer: Layer, shares: int) -> Callable[..., jax.Array]:
    """The layer in one program, with K of its second product in so many shares."""
    tiles = cases.tiles_of(case, layer, **device_facts())
    if shares > 1:
        tiles = replace(tiles, second=replace(tiles.second, split_k=shares, run=1))
    return jax.jit(functools.partial(fused_moe, spec=cases.spec_of(case, layer, tiles)))


def error(y: jax.Array, expected: jax.Array) -> jax.Array:
    y, expected = y.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected)


def errors(key: jax.Array, ids: jax.Array, case: Case) -> dict[str, jax.Array]:
    """Error to the reference on the same quantized weights, and both's error to the layer that is not quantized."""
    plain_case = replace(case, recipe="bf16", dtype="float32")
    # Else XLA elides roundings to the weights' and x's dtype.
    plain = lax.optimization_barrier(cases.layer(plain_case, key))
    layer = lax.optimization_barrier(cases.layer(case, key))
    x, weights = lax.optimization_barrier(cases.tokens(case, key))
    x, weights = cases.spoiled(case, x, weights, ids)
    options = {"implementation": "reference", "preferred_element_type": jnp.float32}
    wanted = jmoe.fused_moe(x, layer.w13, layer.w2, weights, ids, **cases.options_of(case, layer), **options)
    x_plain = x.astype(jnp.float32)
    truth_options = {**cases.options_of(plain_case, plain), **options}
    truth = jmoe.fused_moe(x_plain, plain.w13, plain.w2, weights, ids, **truth_options)
    y = kernels(case, layer, x, weights, ids)
    rounded = bits.round_to(wanted, case.dtype)  # a cast would be elided with the one back
    return {"reference": error(y, wanted), "truth": error(y, truth), "of_reference": error(rounded, truth)}


@pytest.fixture(scope="module")
def compiled() -> dict[Case, Any]:
    """Every case's function, compiled."""
    key = jax.random.key(0)
    lowered = {}
    for case in filter(is_served, CASES):
        ids = jax.ShapeDtypeStruct((case.tokens, case.top_k), jnp.int32)
        lowered[case] = jax.jit(functools.partial(errors, case=case)).lower(key, ids)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        done = pool.map(lambda item: item.compile(compiler_options=OPTIONS), lowered.values())
        return dict(zip(lowered, done, strict=True))


@pytest.mark.parametrize("routing", cases.ROUTINGS)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_it_is_the_reference(case, routing, compiled):
    skip_if_not_served(case)
    ids = jnp.asarray(cases.routing(routing, case))
    if not ((ids >= 0) & (ids < case.experts)).any():
        pytest.skip("no token has an expert, so there is nothing to compare")
    found = {name: float(value) for name, value in compiled[case](jax.random.key(case.tokens), ids).items()}
    # Where all of a token's slots have one expert they err alike, and their sum does not average the errors.
    assert found["reference"] < case.bar * (1.25 if routing == "one expert" and case.top_k > 1 else 1)
    assert found["truth"] < 1.05 * found["of_reference"] + 1e-3


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor", "fp8_channel", "fp8_block", "fp8_w8a16", "int8"])
def test_h06_batched_experts_are_the_reference_and_pads_do_not_leak(recipe):
    case = Case(recipe=recipe, tokens=150, hidden=2880, intermediate=192, experts=9, bias=True)
    skip_if_not_served(case)
    layer, _, _ = made(case)
    counts = jnp.array([150, 0, 1, 16, 17, 64, 149, 128, 3], jnp.int32)
    x = jax.random.normal(jax.random.key(5), (9, 150, 2880), jnp.bfloat16)
    valid = (jnp.arange(150) < counts[:, None])[..., None]
    spec = cases.spec_of(case, layer, cases.tiles_of(replace(case, top_k=1), layer, batched=True, **device_facts()))
    run = jax.jit(functools.partial(batched_experts, spec=spec))
    y = run(jnp.where(valid, x, jnp.nan), counts, cases.arrays(layer))
    options = cases.options_of(case, layer)
    wanted = jmoe.batched_experts(x, counts, layer.w13, layer.w2, implementation="reference", **options)
    assert error(y, wanted) < case.bar
    assert not jnp.where(valid, 0, y).any()
    assert jnp.array_equal(y, run(jnp.where(valid, x, 0), counts, cases.arrays(layer)))


def random_codes(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Finite e4m3 codes, an expert at a time."""

    def one(key: jax.Array) -> jax.Array:
        bits = jax.random.bits(key, shape[1:], jnp.uint8)
        return lax.bitcast_convert_type(jnp.where(bits & 0x7F > 0x70, bits & 0x8F, bits), jnp.float8_e4m3fn)

    return jax.jit(lambda keys: lax.map(one, keys))(jax.random.split(key, shape[0]))


@pytest.mark.parametrize("stacked", [False, True], ids=["experts", "layers"])
@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_channel", "fp8_w8a16"])
def test_h12_experts_beyond_2_31_bytes_are_found(recipe, stacked):
    case = Case(recipe=recipe, tokens=16, hidden=7168, intermediate=2048, experts=80, top_k=2)
    skip_if_not_served(case)
    last = case.experts - 1
    sample = cases.layer(replace(case, experts=1, hidden=256, intermediate=256))

    def weight(key: jax.Array, shape: tuple[int, ...], like: QTensor) -> QTensor:
        block = like.scheme.block
        grid = tuple(1 if b == -1 else -(-n // b) for n, b in zip(shape[-2:], block, strict=True))
        scale = jax.random.uniform(key, (*shape[:-2], *grid), jnp.float32, 0.5, 1.5) * (2e-2 * shape[-1] ** -0.5)
        return QTensor.make(random_codes(key, shape), scale, scheme=like.scheme, input_scheme=like.input_scheme)

    keys = jax.random.split(jax.random.key(7), 2)
    w13 = weight(keys[0], (80, 2, 2048, 7168), sample.w13)
    w2 = weight(keys[1], (80, 7168, 2048), sample.w2)
    assert 2**31 < w13.data.size < 2**32
    x, weights = cases.tokens(case)
    ids = jnp.full((16, 2), last, jnp.int32).at[3:6, 0].set(last - 1)
    pair = Layer(*(jax.tree.map(lambda leaf: leaf[last - 1 :], w) for w in (w13, w2)), None, None)
    wanted = kernels(replace(case, experts=2), pair, x, weights, ids - (last - 1))
    spec = cases.spec_of(case, pair, cases.tiles_of(replace(case, experts=2), pair, **device_facts()))
    if stacked:  # two layers of half the experts: the last of the second one
        w13, w2 = (jax.tree.map(lambda leaf: leaf.reshape(2, 40, *leaf.shape[1:]), w) for w in (w13, w2))
        experts = cases.arrays(Layer(w13, w2, None, None), layer=jnp.int32(1))
        ids = ids - 40
    else:
        experts = cases.arrays(Layer(w13, w2, None, None))
    y = jax.jit(functools.partial(fused_moe, spec=spec))(x, experts, weights, ids)
    assert jnp.array_equal(y, wanted)
    options = cases.options_of(case, pair)
    reference = jmoe.fused_moe(
        x, pair.w13, pair.w2, weights, ids % 2, implementation="reference", preferred_element_type="float32", **options
    )
    assert error(y, reference) < case.bar


@pytest.mark.parametrize("tokens", [96, 3000])
@pytest.mark.parametrize("hidden", [1000, 1024])  # block FP8 of the latter makes its tiles in pieces
@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor", "fp8_block", "int8"])
def test_programs_that_make_several_tiles_make_equal_bits(recipe, hidden, tokens):
    case = Case(recipe=recipe, tokens=tokens, hidden=hidden, intermediate=768, experts=9, top_k=2, bias=True)
    skip_if_not_served(case)
    layer, x, weights = made(case)
    ids = jnp.asarray(cases.routing("zipf", case))
    found = []
    for runs in ((1, 1), (2, 3)):
        tiles = cases.tiles_of(case, layer, **device_facts())
        first, second = (replace(t, run=run) for t, run in zip((tiles.first, tiles.second), runs, strict=True))
        spec = cases.spec_of(case, layer, replace(tiles, first=first, second=second))
        found.append(jax.jit(functools.partial(fused_moe, spec=spec))(x, cases.arrays(layer), weights, ids))
    assert jnp.array_equal(*found)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor", "fp8_block", "fp8_w8a16", "int8"])
@pytest.mark.parametrize("tokens, shares", [(7, 1), (7, 2), (1500, 1)])
def test_a_layer_of_several_has_the_bits_of_one_alone(recipe, tokens, shares):
    case = Case(recipe=recipe, tokens=tokens, hidden=1000, intermediate=1000, experts=6, top_k=2, bias=True)
    skip_if_not_served(case)
    layer, x, weights = made(case)
    ids = jnp.asarray(cases.routing("zipf", case))
    run = in_shares(case, layer, shares)
    alone = cases.arrays(layer)
    stacked = jax.tree.map(lambda a: jnp.stack([jnp.zeros_like(a), a, jnp.ones_like(a)]), alone)
    y = run(x, alone, weights, ids)
    assert jnp.isfinite(y).all() and y.any()
    assert jnp.array_equal(run(x, stacked._replace(layer=jnp.int32(1)), weights, ids), y)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor", "fp8_channel", "fp8_block", "fp8_block:block=64", "int8"])
@pytest.mark.parametrize("shares, tokens", [(2, 7), (4, 40), (8, 300)])
def test_shares_of_k_are_the_reference(recipe, shares, tokens):
    case = Case(recipe=recipe, tokens=tokens, hidden=1000, intermediate=1000, experts=6, top_k=2, bias=True)
    skip_if_not_served(case)
    layer, x, weights = made(case)
    ids = jnp.asarray(cases.routing("elsewhere", case))
    x, weights = cases.spoiled(case, x, weights, ids)
    run = in_shares(case, layer, shares)
    y = run(x, cases.arrays(layer), weights, ids)
    options = cases.options_of(case, layer)
    assert (
        error(y, jmoe.fused_moe(x, layer.w13, layer.w2, weights, ids, implementation="reference", **options)) < case.bar
    )
    assert jnp.array_equal(y, run(x, cases.arrays(layer), weights, ids))


REPEATED = [Case(recipe=recipe, **sizes) for recipe in RECIPES for sizes in (SIZES[0], SMALL, MANY, TALL)]


@pytest.fixture(scope="module")
def programs() -> dict[Case, tuple[Any, Any]]:
    """Of every case that is run again: what makes its arrays, and its layer; compiled."""
    lowered = {}
    for case in filter(is_served, REPEATED):
        make = jax.jit(functools.partial(_made, case))
        ids = jax.ShapeDtypeStruct((case.tokens, case.top_k), jnp.int32)
        layer = jax.jit(functools.partial(kernels, case)).lower(*jax.eval_shape(make), ids)
        lowered[case] = make.lower(), layer
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        flat = [item for pair in lowered.values() for item in pair]
        done = list(pool.map(lambda item: item.compile(compiler_options=OPTIONS), flat))
    return dict(zip(lowered, zip(done[::2], done[1::2], strict=True), strict=True))


@pytest.mark.parametrize("case", REPEATED, ids=named)
def test_i02_twenty_runs_have_equal_bits(case, programs):
    skip_if_not_served(case)
    make, run = programs[case]
    arrays, ids = make(), jnp.asarray(cases.routing("zipf", case))
    first = run(*arrays, ids)
    assert all(jnp.array_equal(run(*arrays, ids), first) for _ in range(19))


@pytest.mark.parametrize("case", [case for case in REPEATED if case.recipe != "fp8_tensor"], ids=named)
def test_rows_do_not_depend_on_other_rows(case, programs):
    skip_if_not_served(case)
    make, run = programs[case]
    layer, x, weights = make()
    ids = jnp.asarray(cases.routing("duplicates", case))
    others = jax.random.normal(jax.random.key(9), x.shape, x.dtype)
    keep = jnp.arange(case.tokens)[:, None] % 3 == 0
    other_ids = jnp.where(keep, ids, jnp.asarray(cases.routing("one expert", case)))
    rows = keep[:, 0]
    y, other = run(layer, x, weights, ids), run(layer, jnp.where(keep, x, others), weights, other_ids)
    assert jnp.array_equal(y[rows], other[rows])


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_w8a16"])
def test_batch_invariant_tiles_make_rows_equal_across_tokens(recipe):
    case = Case(recipe=recipe, **MANY)
    skip_if_not_served(case)
    layer, x, weights = made(case)
    spec = cases.spec_of(case, layer, cases.tiles_of(case, layer, batch_invariant=True, **device_facts()))
    ids = jnp.asarray(cases.routing("zipf", case))
    run = jax.jit(functools.partial(fused_moe, spec=spec))
    experts = cases.arrays(layer)
    whole = run(x, experts, weights, ids)
    for tokens in (1, 7, 64):
        assert jnp.array_equal(run(x[:tokens], experts, weights[:tokens], ids[:tokens]), whole[:tokens])


@pytest.mark.parametrize("tokens", [1, 17, 130])
def test_d11_exact_sums_keep_what_the_tensor_core_would_lose(tokens):
    """448 * 448 + 4095 = 204799; promoting every 128 of K loses at most 128 of it."""
    if device_facts()["capability"] < 89:
        pytest.skip("no FP8 tensor cores")
    x = jnp.ones((tokens, 4096), jnp.float8_e4m3fn).at[:, 0].set(448)
    gate = jnp.ones((1, 2, 128, 4096), jnp.float8_e4m3fn).at[..., 0].set(448)
    scale = jnp.array([1, 0], jnp.float32).reshape(1, 2, 1, 1)  # of gate and up: up is zero
    # The activation is the identity of gate: g * sigmoid(0) * (0 + 2) = g; w2 copies it.
    tiles = moe_tiles(tokens, 4096, 128, 1, operands="fp8", exact=True, **device_facts())
    spec = ExpertsSpec(
        tiles=replace(tiles, second=replace(tiles.second, block_n=32, block_k=32)),  # w2 is float32
        dtype="float32",
        out_dtype="float32",
        activation=Activation(alpha=0.0, beta=2.0),
        input_scheme=cases.InputScheme(scale="tensor"),
    )
    experts = Experts(gate, jnp.eye(4096, 128)[None], w13_scale=scale)
    ones = jnp.ones((tokens, 1), jnp.float32)
    y = fused_moe(x, experts, ones, jnp.zeros((tokens, 1), jnp.int32), spec=spec, x_scale=jnp.ones((1, 1), jnp.float32))
    assert jnp.abs(y[:, :128] - 204799).max() <= 128


@pytest.mark.parametrize("experts", [1, 5, 256, 512])
@pytest.mark.parametrize("tokens", [1, 8, 500, 513, 8192])
@pytest.mark.parametrize("rows", [16, 128])
def test_alignment_is_a_stable_sort(experts, tokens, rows):
    case = Case(tokens=tokens, experts=experts, top_k=min(8, experts))
    run = jax.jit(lambda ids: alignment.align(ids, experts=experts, rows=rows))
    for name in ("uniform", "zipf", "one expert", "elsewhere"):
        ids = cases.routing(name, case)
        blocks = jax.tree.map(np.asarray, run(jnp.asarray(ids)))
        flat = ids.reshape(-1)
        kept = np.flatnonzero((flat >= 0) & (flat < experts))
        order = kept[np.argsort(flat[kept], kind="stable")]
        counts = np.bincount(flat[kept], minlength=experts)
        sizes = -(-counts // rows)
        used = int(blocks.used[0])
        assert used == sizes.sum()
        np.testing.assert_array_equal(blocks.experts[:used], np.repeat(np.arange(experts), sizes))
        slots = blocks.slots[: used * rows]
        np.testing.assert_array_equal(slots[slots < flat.size], order)
        padding = np.concatenate([np.arange(size * rows) >= count for size, count in zip(sizes, counts, strict=True)])
        np.testing.assert_array_equal(slots == flat.size, padding)
