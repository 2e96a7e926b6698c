"""Dense products and quantisers on a GPU: ``pytest -m gpu tests/gpu/test_kernels_dense.py``.

Every case is one compiled function of a key (inputs, kernel, reference and errors), and all are compiled in threads
before the first runs.
"""

import concurrent.futures
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmoe
from jmoe.backends.spec import DeviceSpec
from jmoe.qtensor import QTensor
from jmoe.quantize import quantize
from jmoe.scheme import Scheme
from pallas_kernels import bits, body, lowering, matmul
from pallas_kernels import quantize as kernels
from pallas_kernels.lowering import arange, kernel_call, load, store
from pallas_kernels.tuning.heuristics import MatmulTile, matmul_tile

pytestmark = pytest.mark.gpu

OPTIONS = {"xla_gpu_autotune_level": 0}
"""Tuning XLA's own products would take longer than all the cases."""

SHAPES = [
    (1, 1, 1),
    (1, 4096, 4096),
    (3, 200, 300),
    (8, 1024, 8192),
    (16, 5760, 2880),
    (17, 192, 576),
    (33, 65, 2880),
    (64, 4096, 7168),
    (100, 1000, 1001),
    (128, 2048, 7168),
    (257, 513, 777),
    (512, 4096, 2880),
    (1024, 2880, 192),
    (2048, 2048, 2048),
    (4096, 7168, 2048),
]

RECIPES = [
    "bf16",
    "fp8_tensor",
    "fp8_channel",
    "fp8_block",
    "fp8_block:block=64",
    "fp8_block:block=32",
    "fp8_w8a16",
    "fp8_w8a16:block=1x-1",
    "mxfp8",
    "int8",
    "int8_w8a16",
    "int8_w8a16:group=32",
]


@dataclass(frozen=True)
class Case:
    recipe: str
    shape: tuple[int, int, int]
    dtype: str = "bfloat16"
    exact: bool = True
    activation: str | None = None
    split_k: int | None = None
    layer: bool = False

    def __str__(self) -> str:
        flags = [self.recipe, "x".join(map(str, self.shape)), self.dtype, "exact" if self.exact else "fast"]
        flags += [self.activation or "", f"split{self.split_k}" if self.split_k else "", "layer" if self.layer else ""]
        return "-".join(filter(None, flags))


CASES = [
    *(Case(recipe, shape) for recipe in RECIPES for shape in SHAPES),
    *(Case(recipe, shape, exact=False) for recipe in ("fp8_tensor", "fp8_channel") for shape in SHAPES[5:]),
    *(Case(r, s, dtype="float32") for r in ("bf16", "fp8_w8a16", "fp8_block", "int8") for s in SHAPES[2:9]),
    *(Case(r, SHAPES[8], dtype="float16") for r in ("bf16", "fp8_w8a16", "fp8_channel")),
    *(Case("fp8_block", (70, 300, 520), activation=a) for a in ("silu", "gelu", "gelu_tanh", "relu2")),
    *(Case(r, (40, 300, 2880), split_k=s) for r in ("bf16", "fp8_block", "fp8_channel", "int8") for s in (2, 16)),
    *(Case(r, (m, 300, 520), layer=True) for r in ("bf16", "fp8_block", "fp8_w8a16") for m in (5, 200)),
]


def device_facts():
    device = DeviceSpec.of(jax.devices()[0])
    return {"capability": device.compute_capability, "sm_count": device.sm_count}


def is_served(recipe):
    return device_facts()["capability"] >= 89 or recipe == "bf16" or "w8a16" in recipe or "int8" in recipe


def quantized_input(x, scheme):
    if scheme is None:
        return x, {}
    if scheme.block == (-1, -1):
        code, scale = kernels.quantize_tensor(x, codes=scheme.fmt.storage)
    elif scheme.block == (1, -1):
        code, scale = kernels.quantize_tokens(x, codes=scheme.fmt.storage)
    else:
        code, scale = kernels.quantize_groups(x, scheme.block[1], scale_dtype=scheme.scale_dtype)
    return code, {"x_scale": scale, "x_group": scheme.block[1]}


def linear(x, w, *, exact=True, split_k=None, batch_invariant=False, **options):
    """A product with the heuristics' tile; the activation is quantised as the weight asks."""
    (m, k), n = x.shape, w.shape[-2]
    options = {"out_dtype": x.dtype, **options}
    plain = not isinstance(w, QTensor)
    kind = "32bit" if x.dtype == jnp.float32 else "16bit" if plain else "w8a16"
    cell, weight, scales = None, (w,), {}
    if not plain:
        block = w.scheme.block
        if w.input_scheme is not None:
            x, scales = quantized_input(x, w.input_scheme)
            kind = "int8" if w.input_scheme.format == "int8" else "fp8"
        cell = None if block[1] == -1 else block[1]
        weight, options = (w.data, w.scale), {"w_block": block, **options}
    facts = device_facts()
    tile = matmul_tile(m, n, k, operands=kind, cell=cell, exact=exact, batch_invariant=batch_invariant, **facts)
    if split_k is not None:
        tile = MatmulTile(**{**tile.__dict__, "split_k": split_k})
    return matmul.linear(x, *weight, exact=exact, tile=tile, **scales, **options)


def error(y, expected):
    y, expected = y.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(y - expected) / jnp.linalg.norm(expected)


def errors(key, case):
    """Error to the reference on the same codes, and both's error to the product that is not quantised."""
    m, n, k = case.shape
    keys = jax.random.split(key, 3)
    x = jax.random.normal(keys[0], (m, k), case.dtype)
    plain = jax.random.normal(keys[1], (n, k), jnp.float32).astype(case.dtype)
    bias = jax.random.normal(keys[2], (n,), jnp.float32)
    x, plain, bias = lax.optimization_barrier((x, plain, bias))  # else XLA elides the rounding to x's dtype
    w = plain if case.recipe == "bf16" else jmoe.quantize(plain, case.recipe)
    options = {"bias": bias, "activation": case.activation}
    given = x
    if isinstance(w, QTensor) and w.input_scheme is not None:
        code, scales = quantized_input(x, w.input_scheme)
        given = QTensor.make(code, scales["x_scale"], scheme=w.input_scheme)
    reference = jmoe.linear(given, w, implementation="reference", preferred_element_type=jnp.float32, **options)
    truth = jmoe.linear(x.astype(jnp.float32), plain.astype(jnp.float32), implementation="reference", **options)
    if case.layer:
        w, bias = jax.tree.map(lambda a: jnp.stack([jnp.zeros_like(a), a, jnp.zeros_like(a)]), (w, bias))
        options = {**options, "bias": bias, "layer": jnp.int32(1)}
    y = linear(x, w, exact=case.exact, split_k=case.split_k, **options)
    rounded = bits.round_to(reference, case.dtype)  # a cast would be elided with the one back
    return {"reference": error(y, reference), "truth": error(y, truth), "of_reference": error(rounded, truth)}


@pytest.fixture(scope="module")
def compiled():
    """Every case's function, compiled."""
    key = jax.random.key(0)
    served = [case for case in CASES if is_served(case.recipe)]
    lowered = {case: jax.jit(functools.partial(errors, case=case)).lower(key) for case in served}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        done = pool.map(lambda item: item.compile(compiler_options=OPTIONS), lowered.values())
        return dict(zip(lowered, done, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_reference(case, compiled):
    if not is_served(case.recipe):
        pytest.skip("no FP8 tensor cores")
    found = {name: float(value) for name, value in compiled[case](jax.random.key(case.shape[0])).items()}
    quantized_dots = case.recipe != "bf16" and "w8a16" not in case.recipe
    bar = 1e-5 if case.dtype == "float32" and not quantized_dots else 3e-3
    assert found["reference"] < bar
    assert found["truth"] < 1.05 * found["of_reference"] + 1e-3


def on_cpu(function, *arguments):
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.tree.map(np.asarray, function(*(jnp.asarray(np.asarray(a)) for a in arguments)))


def activations(m, k, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((m, k)) * np.exp(4 * rng.standard_normal((m, 1)))
    x[0, :128], x[-1, k // 2], x[m // 2, -1] = 0, np.nan, np.inf
    return jnp.asarray(x, dtype)


QUANTISERS = {
    (1, 128): lambda x, p: kernels.quantize_groups(x, 128, power_of_two=p),
    (1, 32): lambda x, p: kernels.quantize_groups(x, 32, power_of_two=p),
    (1, 96): lambda x, p: kernels.quantize_groups(x, 96, power_of_two=p),
    (1, -1): lambda x, p: kernels.quantize_tokens(x, power_of_two=p),
    (-1, -1): lambda x, p: kernels.quantize_tensor(x, power_of_two=p),
}


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape, dtype", [((300, 7168), "bfloat16"), ((5, 10000), "float32"), ((3, 200), "float16")])
@pytest.mark.parametrize("block", QUANTISERS, ids=str)
def test_quantisers_give_the_codes_and_scales_of_the_cpu(block, shape, dtype, power_of_two):
    if not is_served("fp8_block"):
        pytest.skip("no FP8 conversions")
    x = activations(*shape, dtype)
    code, scale = jax.jit(QUANTISERS[block], static_argnums=1)(x, power_of_two)
    scheme = Scheme(format="e4m3", block=block, power_of_two=power_of_two)
    expected = on_cpu(lambda v: quantize(v, scheme), x)
    np.testing.assert_array_equal(np.asarray(scale), expected.scale)
    np.testing.assert_array_equal(np.asarray(code).view(np.uint8), expected.data.view(np.uint8))


@pytest.mark.parametrize("shape, dtype", [((300, 7168), "bfloat16"), ((5, 10000), "float32"), ((3, 200), "float16")])
@pytest.mark.parametrize("block", [(1, -1), (1, 32), (-1, -1)], ids=str)
def test_int8_quantisers_give_the_codes_and_scales_of_the_cpu(block, shape, dtype):
    quantiser = {
        (1, -1): kernels.quantize_tokens,
        (1, 32): lambda x, **codes: kernels.quantize_groups(x, 32, **codes),
        (-1, -1): kernels.quantize_tensor,
    }[block]
    x = activations(*shape, dtype)
    x = x if block[0] == 1 else jnp.nan_to_num(x, posinf=1.0)  # one that is not finite is all of a tensor's scale
    code, scale = jax.jit(lambda x: quantiser(x, codes=jnp.int8))(x)
    expected = on_cpu(lambda v: quantize(v, Scheme(format="int8", block=block)), x)
    np.testing.assert_array_equal(np.asarray(scale), expected.scale)
    known = np.isfinite(np.asarray(x, np.float32)).all(axis=1)
    np.testing.assert_array_equal(np.asarray(code)[known], expected.data[known])


def elementwise(function, x, dtype):
    def kernel(x_ref, o_ref):
        at = (lax.convert_element_type(0, jnp.int32) + arange(x.size),)
        store(o_ref, at, function(load(x_ref, at)))

    return kernel_call(
        kernel,
        name="elementwise",
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct(x.shape, dtype),
        num_warps=4,
        num_stages=1,
    )(x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_ptx_that_decodes_e4m3_agrees_with_its_twin_on_all_bytes(dtype):
    code = jnp.tile(jnp.arange(256, dtype=jnp.uint8), 8)
    found = elementwise(lambda c: body.decode_e4m3(c, dtype), code, dtype)
    expected = on_cpu(lambda c: body.e4m3_values(c, dtype), code)
    nan = np.isnan(np.float32(expected))
    np.testing.assert_array_equal(np.isnan(np.float32(found)), nan)
    np.testing.assert_array_equal(np.float32(found)[~nan], np.float32(expected)[~nan])


def test_reciprocals_are_correctly_rounded():
    x = np.random.default_rng(0).uniform(1e-20, 1e20, 8192).astype(np.float32)
    found = elementwise(lowering.reciprocal, jnp.asarray(x), jnp.float32)
    np.testing.assert_array_equal(np.asarray(found), (1 / np.float64(x)).astype(np.float32))


def test_erfc_is_the_cpus():
    x = jnp.linspace(-6, 6, 4096, dtype=jnp.float32)
    found = elementwise(lowering.erfc, x, jnp.float32)
    np.testing.assert_allclose(np.asarray(found), on_cpu(lax.erfc, x), rtol=2e-5, atol=1e-12)


def test_d09_rounding_to_bfloat16_is_not_elided():
    x = jax.random.normal(jax.random.key(0), (1024,), jnp.float32)
    found = elementwise(lambda v: lowering.round_to(v, jnp.bfloat16), x, jnp.float32)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(x).astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("m", [1, 64, 128])
def test_d11_exact_sums_keep_what_the_tensor_core_would_lose(m):
    """448 * 448 + 4095 = 204799; promoting every 128 of K loses at most 128 of it."""
    if not is_served("fp8_tensor"):
        pytest.skip("no FP8 tensor cores")
    x = jnp.ones((m, 4096), body.F8).at[:, 0].set(448)
    one = jnp.ones((1, 1), jnp.float32)
    w = jnp.ones((256, 4096), body.F8).at[:, 0].set(448)
    tile = matmul_tile(m, 256, 4096, operands="fp8", exact=True, **device_facts())
    y = matmul.linear(x, w, one, x_scale=one, exact=True, out_dtype=jnp.float32, tile=tile)
    assert np.abs(np.asarray(y) - 204799).max() <= 128


@pytest.mark.parametrize("layers", [70, 140], ids=["2.3 GB", "4.7 GB"])
@pytest.mark.parametrize("recipe", ["fp8_w8a16", "fp8_block"])
def test_h12_layers_beyond_2_31_bytes_are_found(recipe, layers):
    if not is_served(recipe):
        pytest.skip("no FP8 tensor cores")
    n, k, m = 8192, 4096, 32
    one_layer = jmoe.quantize(jax.random.normal(jax.random.key(1), (n, k), jnp.bfloat16), recipe)
    x = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=0)
    def put(stack, leaf):
        return lax.dynamic_update_index_in_dim(stack, leaf, layers - 1, 0)

    stacked = jax.tree.map(lambda leaf: put(jnp.zeros((layers, *leaf.shape), leaf.dtype), leaf), one_layer)
    y = jax.jit(linear)(x, stacked, layer=jnp.int32(layers - 1))
    np.testing.assert_array_equal(np.asarray(y), np.asarray(jax.jit(linear)(x, one_layer)))
    assert np.asarray(y).astype(np.float32).any()


def test_h12_rows_beyond_2_31_bytes_are_found():
    m, k = 2**19 + 128, 4096
    x = jnp.zeros((m, k), jnp.bfloat16).at[-1].set(1)
    w = jnp.ones((64, k), jnp.bfloat16)
    y = jax.jit(linear)(x, w)
    np.testing.assert_array_equal(np.asarray(y[-1], np.float32), k)
    assert not np.asarray(y[:-1], np.float32).any()


@pytest.mark.parametrize("shape", [(8, 1024, 8192), (300, 1000, 2880)], ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensor", "fp8_block", "fp8_w8a16"])
def test_i02_twenty_runs_have_equal_bits_and_rows_are_independent(recipe, shape):
    if not is_served(recipe):
        pytest.skip("no FP8 tensor cores")
    m, n, k = shape
    x = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (n, k), jnp.bfloat16)
    w = w if recipe == "bf16" else jmoe.quantize(w, recipe)
    run = jax.jit(linear)
    first = np.asarray(run(x, w))
    for _ in range(19):
        np.testing.assert_array_equal(np.asarray(run(x, w)), first)
    # The other rows change places, so that a scale shared by all rows stays.
    order = np.insert(np.delete(np.arange(m), 4)[::-1], 4, 4)
    np.testing.assert_array_equal(np.asarray(run(x[order], w))[4], first[4])


def test_batch_invariant_tiles_make_rows_equal_across_m():
    x = jax.random.normal(jax.random.key(0), (600, 2880), jnp.bfloat16)
    for recipe in ("bf16", "fp8_block", "fp8_w8a16"):
        if is_served(recipe):
            w = jax.random.normal(jax.random.key(1), (1000, 2880), jnp.bfloat16)
            w = w if recipe == "bf16" else jmoe.quantize(w, recipe)
            run = jax.jit(functools.partial(linear, batch_invariant=True))
            whole = np.asarray(run(x, w))
            for m in (1, 16, 65, 300):
                np.testing.assert_array_equal(np.asarray(run(x[:m], w)), whole[:m])


def test_h06_a_non_finite_element_makes_its_own_row_nan_and_changes_no_other():
    x = jax.random.normal(jax.random.key(0), (70, 520), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (300, 520), jnp.bfloat16)
    for recipe in ("bf16", "fp8_channel", "fp8_block", "fp8_w8a16"):
        if is_served(recipe):
            weight = w if recipe == "bf16" else jmoe.quantize(w, recipe)
            clean, y = (np.asarray(jax.jit(linear)(v, weight)) for v in (x, x.at[7, 3].set(jnp.nan)))
            assert np.isnan(np.float32(y[7])).all()
            np.testing.assert_array_equal(np.delete(y, 7, 0), np.delete(clean, 7, 0))


def test_a_scan_over_layers_and_vmap_give_what_single_calls_do():
    layers, m, n = 4, 48, 1024
    ws = [jmoe.quantize(jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16), "fp8_w8a16") for i in range(layers)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *ws)
    x = jax.random.normal(jax.random.key(9), (m, n), jnp.bfloat16)
    run = jax.jit(linear)

    @jax.jit
    def scanned(x, w):
        return lax.scan(lambda x, i: (linear(x, w, layer=i) / 32, None), x, jnp.arange(layers, dtype=jnp.int32))[0]

    y = x
    for w in ws:
        y = run(y, w) / 32
    np.testing.assert_array_equal(np.asarray(scanned(x, stacked)), np.asarray(y))
    mapped = jax.jit(jax.vmap(linear, in_axes=(0, None)))(x.reshape(3, 16, n), ws[0])
    assert float(error(mapped.reshape(m, n), run(x, ws[0]))) < 3e-3
