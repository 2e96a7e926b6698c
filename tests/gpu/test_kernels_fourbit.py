"""Packed four-bit weights on a GPU: ``pytest -m gpu tests/gpu/test_kernels_fourbit.py``.

Products and layers are compiled in threads before the first of them runs, with weights as arguments.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import jmoe
from jmoe.backends.spec import DeviceSpec
from pallas_kernels import lowering, quantize
from pallas_kernels.fourbit import decode
from pallas_kernels.fourbit.expand import expand
from pallas_kernels.fourbit.linear import linear
from pallas_kernels.lowering import arange, load, store
from pallas_kernels.moe import fused_moe
from pallas_kernels.tuning.fourbit import linear_tile
from tests.pallas_kernels import fourbit_cases as cases
from tests.pallas_kernels import moe_cases
from tests.pallas_kernels.moe_cases import Case

pytestmark = pytest.mark.gpu

OPTIONS = {"xla_gpu_autotune_level": 0}
"""Tuning XLA's own products would take longer than all the cases."""

_PAIR = np.uint32(0x00010001)
_EIGHTS = np.uint32(0xBE00BE00)  # -8 * 2**-6, a bfloat16 in each half
_REST = np.uint32(0x3A713A71)  # some small bfloat16

UNPACKERS: dict[str, tuple[Any, Callable[[jax.Array, jax.Array, int], jax.Array]]] = {
    "fold": (jnp.uint8, decode.fold),
    "fold some": (jnp.uint8, lambda w, s, run: decode.fold(w, s, run, jnp.full(w.shape, np.uint32(0x77007077)))),
    "e2m1": (jnp.uint16, decode.e2m1),
    "int4": (jnp.uint16, lambda w, s, run: decode.int4(w, None, [s], run)),
    "int4 scaled": (jnp.uint16, decode.scaled_int4),
    "int4 two parts": (
        jnp.uint16,
        lambda w, s, run: decode.int4(w, jnp.full(w.shape, _EIGHTS), [s, jnp.full(w.shape, _REST)], run),
    ),
}


def device_facts() -> dict[str, int]:
    device = DeviceSpec.of(jax.devices()[0])
    return {"capability": device.compute_capability}


def is_served(recipe: str) -> bool:
    return device_facts()["capability"] >= 89 or not recipe.startswith(("mxfp4_a8", "int4_fp8"))


def every_scale(unpacker: str) -> jax.Array:
    """Words of all scales that there are: 12 exponents, all e8m0 and e4m3 bytes, or many a bfloat16."""
    if "fold" in unpacker:
        return jnp.arange(12, dtype=jnp.uint32) * np.uint32(0x01010101)
    if unpacker == "e2m1":
        e4m3 = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float32) * np.float32(2.0**119)
        as_bfloat16 = e4m3.astype(jnp.bfloat16).view(np.uint16).astype(np.uint32)
        return jnp.concatenate([jnp.arange(255, dtype=jnp.uint32) << np.uint32(7), jnp.asarray(as_bfloat16)]) * _PAIR
    if unpacker == "int4 scaled":  # every mantissa of the largest exponent, and of others
        exponents = jnp.array([0x7F00, 0xE000], jnp.uint32)[:, None]
        return (exponents + jnp.arange(128, dtype=jnp.uint32)).reshape(-1) * _PAIR
    mantissas = np.uint32(0x3C00) + jnp.arange(128, dtype=jnp.uint32)
    return jnp.concatenate([mantissas, jnp.array([0, 0x8000, 0x7F80, 0x7FC0, 0xBC35], jnp.uint32)]) * _PAIR


def every_element(dtype: Any) -> jax.Array:
    """(512, 256): every byte in every place of a word, or every 16 bits in both; and random ones below."""
    row, col = np.arange(256)[:, None], np.arange(256)[None, :]
    all_of_them = (row + 37 * col) % 256 if dtype == jnp.uint8 else (row * 256 + (col ^ (row & 1)))
    return jnp.concatenate([jnp.asarray(all_of_them, dtype), jax.random.bits(jax.random.key(0), (256, 256), dtype)])


def _unpack_kernel(w_ref: Any, s_ref: Any, out_ref: Any, *, unpacker: str, run: int) -> None:
    row, col, scale = pl.program_id(0) * 64 + arange(64), pl.program_id(1) * 64 + arange(64), pl.program_id(2)
    w = load(w_ref, (row[:, None], col[None, :]))
    words = jnp.broadcast_to(load(s_ref, (scale,)), w.shape)
    store(out_ref, (scale, row[:, None], col[None, :]), UNPACKERS[unpacker][1](w, words, run))


def unpacked(unpacker: str, run: int) -> tuple[np.ndarray, np.ndarray]:
    """What the GPU's instructions make of every element under every scale, and the twin: (scales, rows, columns)."""
    element, function = UNPACKERS[unpacker]
    w, scales = every_element(element), every_scale(unpacker)
    dtype = jnp.float8_e4m3fn if "fold" in unpacker else jnp.bfloat16
    ours = lowering.kernel_call(
        _unpack_kernel,
        name="unpack",
        grid=(w.shape[0] // 64, w.shape[1] // 64, scales.size),
        out_shape=jax.ShapeDtypeStruct((scales.size, *w.shape), dtype),
        num_warps=4,
        num_stages=1,
        unpacker=unpacker,
        run=run,
    )
    twin = jax.jit(lambda w, s: lax.map(lambda word: function(w, jnp.full(w.shape, word), run), s))
    return np.asarray(jax.jit(ours)(w, scales)), np.asarray(twin(w, scales))


@pytest.mark.parametrize("unpacker", UNPACKERS)
def test_instructions_are_their_twins(unpacker):
    if "fold" in unpacker and not is_served("mxfp4_a8"):
        pytest.skip("no FP8 tensor cores")
    folds = "fold" in unpacker
    for run in range(2 if folds else 4):
        found, wanted = unpacked(unpacker, run)
        word = np.uint8 if folds else np.int16
        values = wanted.astype(np.float32)
        # Both may be any NaN, and XLA may flush subnormals.
        counts = ~np.isnan(values) & ((np.abs(values) >= 2.0**-126) | (values == 0))
        np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), np.isnan(values))
        apart = np.abs(found.view(word).astype(np.int32) - wanted.view(word).astype(np.int32))
        apart = np.where(counts & ~((values == 0) & (found.astype(np.float32) == 0)), apart, 0)
        # The twin of two parts rounds twice where the instruction rounds once.
        assert apart.max() <= (1 if "two" in unpacker else 0), (run, int((apart > 0).sum()))


DENSE = [
    (recipe, *shape) for recipe in cases.RECIPES for shape in ((1, 1000, 2880), (16, 1024, 8192), (300, 960, 2880))
]
DENSE += [("mxfp4_a8", 4096, 512, 1024), ("int4", 4096, 512, 1024), ("mxfp4", 64, 4096, 512)]
# Parts of K, of which the last has a step less, and steps that are cut short, in each of an H200's tiles.
DENSE += [(recipe, 50, 12800, 2100) for recipe in ("mxfp4", "mxfp4_a8", "nvfp4_w4a16", "int4")]
DENSE += [(recipe, m, 960, 2880) for recipe in ("mxfp4", "mxfp4_a8", "nvfp4_w4a16", "int4") for m in (24, 64, 200)]
DENSE += [(recipe, 4100, 896, 1100) for recipe in ("mxfp4", "mxfp4_a8", "nvfp4_w4a16", "int4")]
DENSE += [("mxfp4_a8", 60, 5760, 2880), ("mxfp4", 64, 5700, 2000), ("int4", 16, 960, 2400)]


def dense_error(key: jax.Array, recipe: str, m: int, n: int, k: int, exponents: int = 0) -> jax.Array:
    """Relative to the reference on the same quantized operands."""
    keys = jax.random.split(key)
    w = cases.of_wide_range(keys[0], (n, k), exponents)
    q = lax.optimization_barrier(jmoe.quantize(w, recipe))
    x = lax.optimization_barrier(jax.random.normal(keys[1], (m, k), jnp.bfloat16))
    options = {"implementation": "reference", "preferred_element_type": jnp.float32}
    wanted = jmoe.linear(x, q, **options)
    packing = cases.packing_of(q)
    codes, scale = x, None
    if q.input_scheme is not None:
        codes, scale = quantize.quantize_tokens(x, codes=q.input_scheme.fmt.storage)
    tile = linear_tile(m, n, k, kind=cases.kind_of(q), **device_facts())
    y = linear(codes, cases.packed(q), packing=packing, x_scale=scale, exact=False, tile=tile)
    return jnp.linalg.norm(y.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)


LAYERS: list[dict[str, Any]] = [
    {"tokens": 1, "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    {"tokens": 40, "hidden": 2880, "intermediate": 192, "experts": 32, "top_k": 4},
    {"tokens": 2048, "hidden": 1024, "intermediate": 512, "experts": 5, "top_k": 2},
    {"tokens": 300, "hidden": 1024, "intermediate": 1280, "experts": 8, "top_k": 2},
]
EXPERTS = [
    *(Case(recipe=recipe, **sizes) for recipe in ("mxfp4", "mxfp4_a8", "nvfp4_w4a16", "int4") for sizes in LAYERS),
    # Programs of the second product that make several tiles, of blocks of 16, 32 and 64 rows.
    *(Case(recipe=recipe, **LAYERS[0] | {"tokens": 64}) for recipe in ("mxfp4", "mxfp4_a8", "nvfp4_w4a16", "int4")),
    *(Case(recipe="mxfp4_a8", bias=True, **LAYERS[0] | {"tokens": tokens}) for tokens in (400, 1000)),
    *(Case(recipe="mxfp4_a8", **LAYERS[1] | {"tokens": tokens}) for tokens in (200, 500)),
    # Blocks of 128 rows whose last one is mostly full or mostly low; of 32 and 16 rows; and high ones of a ragged K.
    *(Case(recipe=recipe, **LAYERS[2] | {"tokens": 640}) for recipe in ("mxfp4", "mxfp4_a8", "nvfp4_w4a16", "int4")),
    *(
        Case(recipe=recipe, **LAYERS[1] | {"tokens": tokens})
        for recipe in ("mxfp4", "int4")
        for tokens in (130, 600, 1000)
    ),
    Case(recipe="int4_fp8", **LAYERS[1]),
    Case(recipe="int4_int8:group=32,zero_point", **LAYERS[2]),
    Case(recipe="int4:group=32,zero_point", gated=False, activation="relu2", bias=True, **LAYERS[1]),
    Case(recipe="mxfp4", activation="swigluoai", bias=True, **LAYERS[1]),
    Case(recipe="mxfp4_a8", activation="swigluoai", bias=True, exact=True, **LAYERS[1]),
    *(
        Case(recipe=recipe, activation="swigluoai", bias=True, **cases.LONG)
        for recipe in ("mxfp4", "mxfp4_a8", "int4", "int4:group=32,zero_point", "nvfp4_w4a16")
    ),
]
ROUTINGS = ("uniform", "zipf", "elsewhere", "empty experts")


def moe_error(key: jax.Array, ids: jax.Array, case: Case) -> tuple[jax.Array, jax.Array]:
    """Relative to the reference on the same quantized weights; and the layer's result."""
    layer = lax.optimization_barrier(moe_cases.layer(case, key))
    x, weights = lax.optimization_barrier(moe_cases.tokens(case, key))
    x, weights = moe_cases.spoiled(case, x, weights, ids)
    options = {"implementation": "reference", "preferred_element_type": jnp.float32}
    options |= moe_cases.options_of(case, layer)
    wanted = jmoe.fused_moe(x, layer.w13, layer.w2, weights, ids, **options)
    spec = cases.spec_of(case, layer, **device_facts())
    y = fused_moe(x, cases.experts_of(layer), weights, ids, spec=spec)
    return jnp.linalg.norm(y.astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted), y


def compile_all(functions: dict[Any, tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[Any, Any]:
    lowered = {name: jax.jit(function).lower(*arguments) for name, (function, arguments) in functions.items()}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        done = pool.map(lambda item: item.compile(compiler_options=OPTIONS), lowered.values())
        return dict(zip(lowered, done, strict=True))


@pytest.fixture(scope="module")
def products() -> dict[Any, Any]:
    key = jax.random.key(0)
    functions = {case: (functools.partial(_dense, case), (key,)) for case in DENSE if is_served(case[0])}
    wide = functools.partial(dense_error, recipe="mxfp4_a8", m=16, n=512, k=2880, exponents=40)
    return compile_all(functions | ({"wide": (wide, (key,))} if is_served("mxfp4_a8") else {}))


def _dense(case: tuple[str, int, int, int], key: jax.Array) -> jax.Array:
    return dense_error(key, *case)


@pytest.mark.parametrize("case", [*DENSE, "wide"], ids=str)
def test_products_are_the_references(case, products):
    if case not in products:
        pytest.skip("no FP8 tensor cores")
    assert products[case](jax.random.key(0)) < 3e-3


@pytest.fixture(scope="module")
def layers() -> dict[Case, Any]:
    functions = {}
    for case in EXPERTS:
        if is_served(case.recipe):
            ids = jax.ShapeDtypeStruct((case.tokens, case.top_k), jnp.int32)
            functions[case] = functools.partial(moe_error, case=case), (jax.random.key(0), ids)
    return compile_all(functions)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_layers_are_the_references(case, routing, layers):
    if case not in layers:
        pytest.skip("no FP8 tensor cores")
    ids = jnp.asarray(moe_cases.routing(routing, case))
    found, first = layers[case](jax.random.key(case.tokens), ids)
    assert found < case.bar
    if routing == "zipf":
        # I02: equal bits in twenty runs.
        for _ in range(19):
            assert jnp.array_equal(layers[case](jax.random.key(case.tokens), ids)[1], first)


@pytest.mark.parametrize("shape", [(2, 4096, 2048), (2, 1000, 2880), (2, 70, 333)], ids=str)
def test_expanded_weights_are_the_weights(shape):
    if not is_served("mxfp4_a8"):
        pytest.skip("no FP8 tensor cores")
    q = jmoe.quantize(jax.random.normal(jax.random.key(0), shape), "mxfp4_a8")
    codes, scale, passes = jax.jit(lambda w, layer: expand(w, cases.packing_of(q), layer))(
        cases.packed(q), jnp.ones(1, jnp.int32)
    )
    np.testing.assert_array_equal(np.asarray(codes, np.float32) * np.asarray(scale), np.asarray(q.dequantize()[1]))
    assert np.asarray(passes).max() == 1


@pytest.mark.parametrize("exponents", [0, 40])
@pytest.mark.parametrize("m, n, k", [(4096, 4096, 2048), (1030, 1000, 2880)])
def test_products_with_expanded_weights_are_the_references(m, n, k, exponents):
    if not is_served("mxfp4_a8"):
        pytest.skip("no FP8 tensor cores")
    keys = jax.random.split(jax.random.key(1))
    wide = cases.of_wide_range(keys[0], (n, k), exponents)
    w = jax.random.normal(keys[0], (n, k)).at[n // 2 :].set(wide[n // 2 :])
    q, x = jmoe.quantize(w, "mxfp4_a8"), jax.random.normal(keys[1], (m, k), jnp.bfloat16)
    product = functools.partial(jmoe.linear, preferred_element_type=jnp.float32)
    wanted = product(x, q, implementation="reference")
    with jmoe.config(workspace=2**30):
        found = jax.jit(functools.partial(product, implementation="triton"))(x, q)
    assert jnp.linalg.norm(found - wanted) < 3e-3 * jnp.linalg.norm(wanted)


@pytest.mark.parametrize("tokens, intermediate", [(3, 5200), (32, 768), (150, 768), (500, 768), (2048, 768)])
def test_rows_of_many_exponents_are_the_references(tokens, intermediate):
    """Some of each product's rows go through K in passes: shares of it, runs of tiles, and blocks of every height."""
    if not is_served("mxfp4_a8"):
        pytest.skip("no FP8 tensor cores")
    case = Case(recipe="mxfp4_a8", tokens=tokens, hidden=1000, intermediate=intermediate, experts=16, top_k=2)
    layer, (x, weights) = moe_cases.layer(case), moe_cases.tokens(case)
    wide = [q.dequantize().at[..., ::7, :].mul(_falling(q.shape[-1], 40)) for q in (layer.w13, layer.w2)]
    w13, w2 = (jmoe.quantize(w, case.recipe) for w in wide)
    ids = jnp.asarray(moe_cases.routing("uniform", case))
    product = functools.partial(jmoe.fused_moe, preferred_element_type=jnp.float32)
    wanted = product(x, w13, w2, weights, ids, implementation="reference")
    found = jax.jit(functools.partial(product, implementation="triton"))(x, w13, w2, weights, ids)
    assert moe_cases.relative_error(found, wanted) < case.bar


@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4_a8", "int4"])
@pytest.mark.parametrize("sizes", [cases.LONG, LAYERS[3]], ids=["shares of K", "blocks of 64"])
def test_a_layer_of_several_has_the_bits_of_one_alone(recipe, sizes):
    """Of mxfp4_a8 some rows go through K in passes."""
    if not is_served(recipe):
        pytest.skip("no FP8 tensor cores")
    case = Case(recipe=recipe, bias=True, **sizes)
    layer, (x, weights) = moe_cases.layer(case), moe_cases.tokens(case)
    wide = [q.dequantize().at[..., ::7, :].mul(_falling(q.shape[-1], 40)) for q in (layer.w13, layer.w2)]
    w13, w2 = (jmoe.quantize(w, recipe) for w in wide)
    layer = layer._replace(w13=w13, w2=w2)
    ids = jnp.asarray(moe_cases.routing("uniform", case))
    run = jax.jit(functools.partial(fused_moe, spec=cases.spec_of(case, layer, **device_facts())))
    alone = cases.experts_of(layer)
    stacked = jax.tree.map(lambda a: jnp.stack([jnp.zeros_like(a), a, jnp.ones_like(a)]), alone)
    y = run(x, alone, weights, ids)
    assert jnp.isfinite(y).all() and y.any()
    assert jnp.array_equal(run(x, stacked._replace(layer=jnp.int32(1)), weights, ids), y)


def _falling(columns: int, exponents: int) -> jax.Array:
    """Powers of two from 1 down to 2**-exponents, a group of 32 columns each, over and over."""
    return jnp.exp2(-(jnp.arange(columns) // 32 * 7 % (exponents + 1)).astype(jnp.float32))


@pytest.mark.parametrize("exponents", [0, 30])
def test_layers_with_expanded_weights_are_the_references(exponents):
    if not is_served("mxfp4_a8"):
        pytest.skip("no FP8 tensor cores")
    case = Case(recipe="mxfp4_a8", **LAYERS[2])
    layer, (x, weights) = moe_cases.layer(case), moe_cases.tokens(case)
    if exponents:  # half of the first expert's rows
        power = -(jnp.arange(case.hidden) // 32 % (exponents + 1)).astype(jnp.float32)
        w13 = layer.w13.dequantize().at[0, :, ::2].mul(jnp.exp2(power))
        layer = layer._replace(w13=jmoe.quantize(w13, case.recipe))
    ids = jnp.asarray(moe_cases.routing("zipf", case))
    product = functools.partial(jmoe.fused_moe, preferred_element_type=jnp.float32)
    wanted = product(x, layer.w13, layer.w2, weights, ids, implementation="reference")
    with jmoe.config(workspace=2**30):
        call = jax.jit(functools.partial(product, implementation="triton"))
        found = call(x, layer.w13, layer.w2, weights, ids)
        assert jnp.array_equal(call(x, layer.w13, layer.w2, weights, ids), found)
    assert moe_cases.relative_error(found, wanted) < case.bar
