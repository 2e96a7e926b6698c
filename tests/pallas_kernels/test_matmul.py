"""Dense products: in interpret mode against the reference implementation, and as Triton IR."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.qtensor import QTensor
from pallas_kernels import body, matmul
from pallas_kernels import quantize as kernels
from pallas_kernels.tuning.heuristics import MatmulTile, matmul_tile, step_of_k
from tests.pallas_kernels import lanes

TILE = MatmulTile(block_m=16, block_n=32, block_k=64, num_warps=4, num_stages=2)


def operands(m, n, k, recipe, dtype=jnp.bfloat16, seed=0):
    """x, w quantized by the recipe (plain for bf16), and a bias."""
    keys = jax.random.split(jax.random.key(seed), 3)
    x = jax.random.normal(keys[0], (m, k), dtype)
    w = jax.random.normal(keys[1], (n, k), dtype)
    return x, w if recipe == "bf16" else jmoe.quantize(w, recipe), jax.random.normal(keys[2], (n,), jnp.float32)


def quantized_input(x, scheme):
    """What ``matmul.linear`` takes for an activation quantised so."""
    if scheme is None:
        return x, {}
    if scheme.block == (-1, -1):
        code, scale = kernels.quantize_tensor(x, codes=scheme.fmt.storage, interpret=True)
    elif scheme.block == (1, -1):
        code, scale = kernels.quantize_tokens(x, codes=scheme.fmt.storage, interpret=True)
    else:
        group = scheme.block[1]
        code, scale = kernels.quantize_groups(x, group, scale_dtype=scheme.scale_dtype, interpret=True)
    return code, {"x_scale": scale, "x_group": scheme.block[1]}


def linear(x, w, tile=TILE, **options):
    options = {"interpret": True, "out_dtype": x.dtype, **options}
    if not isinstance(w, QTensor):
        return matmul.linear(x, w, tile=tile, **options)
    x, scales = quantized_input(x, w.input_scheme)
    cells = [b for b in (w.scheme.block[1], scales.get("x_group", -1)) if b != -1]
    if cells:
        tile = dataclasses.replace(tile, block_k=step_of_k(int(np.gcd.reduce(cells)), tile.block_k))
    return matmul.linear(x, w.data, w.scale, w_block=w.scheme.block, tile=tile, **scales, **options)


def error(y, expected):
    y, expected = np.float64(np.asarray(y)), np.float64(np.asarray(expected))
    return np.linalg.norm(y - expected) / np.linalg.norm(expected)


CASES = [
    ("bf16", (5, 70, 200), {}),
    ("bf16", (33, 20, 64), {"swap": True}),
    ("fp8_tensor", (5, 70, 200), {"split_k": 2}),
    ("fp8_channel", (5, 70, 200), {"swap": True}),
    ("fp8_channel", (1, 1, 1), {}),
    ("fp8_block", (33, 200, 300), {}),
    ("fp8_block", (3, 130, 2880), {"swap": True, "split_k": 4, "block_k": 128}),
    ("fp8_block:block=64", (5, 70, 200), {"block_n": 128}),
    ("fp8_block:block=48", (5, 70, 200), {}),
    ("fp8_block:block=32x160", (5, 70, 500), {"split_k": 2}),
    ("fp8_w8a16", (5, 200, 300), {"swap": True}),
    ("fp8_w8a16:block=1x-1", (5, 70, 200), {}),
    ("fp8_w8a16:block=128,scale_dtype=e8m0", (5, 200, 300), {"split_k": 2}),
    ("mxfp8", (5, 70, 200), {}),
    ("int8", (5, 70, 200), {}),
    ("int8", (3, 70, 520), {"swap": True, "split_k": 4}),
    ("int8_w8a16", (5, 70, 200), {"swap": True}),
    ("int8_w8a16:group=24", (5, 70, 200), {}),
]


@pytest.mark.parametrize("recipe, shape, changes", CASES, ids=[f"{r}-{s}" for r, s, _ in CASES])
def test_it_is_the_reference(recipe, shape, changes):
    x, w, bias = operands(*shape, recipe)
    y = linear(x, w, dataclasses.replace(TILE, **changes), bias=bias, exact=True)
    assert error(y, jmoe.linear(x, w, bias=bias, implementation="reference")) < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_channel", "fp8_w8a16", "int8", "int8_w8a16"])
def test_other_dtypes_of_x(recipe, dtype):
    x, w, bias = operands(5, 70, 200, recipe, dtype)
    y = linear(x, w, bias=bias)
    assert y.dtype == dtype
    assert error(y, jmoe.linear(x, w, bias=bias, implementation="reference")) < (1e-6 if dtype == "float32" else 3e-4)


def test_plain_operands_of_two_dtypes_are_multiplied_in_float32():
    x, w, _ = operands(5, 70, 200, "bf16", jnp.float32)
    x = x.astype(jnp.bfloat16)
    assert error(linear(x, w, out_dtype=jnp.float32), np.float32(x) @ np.asarray(w).T) < 1e-6


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("split_k", [1, 2])
def test_activations(activation, split_k):
    x, w, bias = operands(5, 70, 200, "bf16", jnp.float32)
    y = linear(x * 0.2, w, dataclasses.replace(TILE, split_k=split_k), bias=bias, activation=activation)
    assert error(y, jmoe.linear(x * 0.2, w, bias=bias, activation=activation, implementation="reference")) < 1e-6


def test_fast_and_exact_sums_are_one_function_in_float32():
    x, w, _ = operands(5, 70, 300, "fp8_channel", jnp.float32)
    assert error(linear(x, w, exact=False), linear(x, w, exact=True)) < 1e-6


def test_b03_a_step_of_k_never_straddles_a_scale():
    """Steps of 64 over blocks of 32: 32 * 1 * 1 + 32 * 2 * 4 = 288, and 64 if only the first scale were used."""
    ones = jnp.ones((1, 64), body.F8)
    x_scale, w_scale = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 4.0]])
    y = matmul.linear(ones, ones, w_scale, x_scale=x_scale, w_block=(32, 32), x_group=32, tile=TILE, interpret=True)
    assert y.item() == 288


def test_weight_and_activation_may_have_blocks_of_different_width():
    """Blocks of 64 and 48 of K = 96 share cells of 16: the columns fall into three ranges."""
    ones = jnp.ones((1, 96), body.F8)
    x_scale, w_scale = jnp.array([[1.0, 2.0]]), jnp.array([[1.0, 4.0]])
    y = matmul.linear(ones, ones, w_scale, x_scale=x_scale, w_block=(1, 64), x_group=48, tile=TILE, interpret=True)
    # columns 0..47: 1 * 1; 48..63: 2 * 1; 64..95: 2 * 4
    assert y.item() == 48 * 1 + 16 * 2 + 32 * 8


@pytest.mark.parametrize("split_k", [1, 2])
def test_sums_of_int8_products_are_exact(split_k):
    """127 * 127 * 3000 + 1 * 1 is no float32; its float32 is the nearest one, 48387000."""
    k = 3001
    x = jnp.full((1, k), 127, jnp.int8).at[0, -1].set(1)
    one = jnp.ones((1, 1), jnp.float32)
    tile = dataclasses.replace(TILE, split_k=split_k)
    minus = jnp.concatenate([x, -x.at[0, -1].set(0)])  # 48387001 and -48387000
    y = matmul.linear(x, minus, one, x_scale=one, tile=tile, out_dtype=jnp.float32, interpret=True)
    assert y.tolist() == [[48387000.0, -48387000.0]]


def test_int8_partial_sums_are_scaled_as_they_are_promoted():
    """Columns 0..47 at scales 1 * 1, 48..63 at 2 * 1, 64..95 at 2 * 4; see the widths of e4m3's blocks above."""
    ones = jnp.ones((1, 96), jnp.int8)
    scales = {"x_scale": jnp.array([[1.0, 2.0]]), "w_block": (1, 64), "x_group": 48}
    y = matmul.linear(ones, ones, jnp.array([[1.0, 4.0]]), tile=TILE, interpret=True, **scales)
    assert y.item() == 48 * 1 + 16 * 2 + 32 * 8


def test_int8_sums_that_int32_may_not_hold_are_refused():
    x, one = jnp.ones((1, 131072), jnp.int8), jnp.ones((1, 1), jnp.float32)
    with pytest.raises(ValueError, match="K=131072, but sums of int8 products are sure to fit int32 only up to 131071"):
        matmul.linear(x, x, one, x_scale=one, tile=TILE, interpret=True)


def test_b12_k_2880_keeps_the_signal():
    x, w, _ = operands(16, 64, 2880, "fp8_block", jnp.float32)
    exact = np.float64(np.asarray(x)) @ np.float64(np.asarray(operands(16, 64, 2880, "bf16", jnp.float32)[1])).T
    assert -20 * np.log10(error(linear(x, w), exact)) > 28


def test_c12_the_bias_is_not_scaled():
    zeros = jnp.zeros((2, 128), body.F8)
    scale = jnp.full((1, 1), 0.01, jnp.float32)
    y = matmul.linear(zeros, zeros, scale, x_scale=scale, bias=jnp.ones(2), tile=TILE, interpret=True)
    np.testing.assert_array_equal(y, 1)


def test_c02_every_row_has_its_own_group_scales():
    """x_scale is (M, K/group), row-major: rows of 128 * 1 + 128 * 2 and 128 * 4 + 128 * 8."""
    ones = jnp.ones((2, 256), body.F8)
    x_scale = jnp.array([[1.0, 2.0], [4.0, 8.0]])
    y = matmul.linear(
        ones, ones[:1], jnp.ones((1, 2)), x_scale=x_scale, w_block=(128, 128), x_group=128, tile=TILE, interpret=True
    )
    np.testing.assert_array_equal(np.float32(y), [[384], [1536]])


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "fp8_channel", "fp8_w8a16"])
def test_h06_a_non_finite_element_makes_its_own_row_nan_and_changes_no_other(recipe):
    x, w, bias = operands(5, 70, 200, recipe)
    y, clean = (linear(v, w, bias=bias) for v in (x.at[2, 7].set(jnp.nan), x))
    assert np.isnan(np.float32(y[2])).all()
    others = np.array([0, 1, 3, 4])
    np.testing.assert_array_equal(np.asarray(y)[others], np.asarray(clean)[others])


@pytest.mark.parametrize("recipe, split_k", [("bf16", 1), ("fp8_block", 1), ("fp8_channel", 2), ("fp8_w8a16", 1)])
def test_layer_indexes_stacked_weights(recipe, split_k):
    tile = dataclasses.replace(TILE, split_k=split_k)
    layers = [operands(5, 70, 200, recipe, seed=seed) for seed in range(3)]
    x = layers[0][0]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(w for _, w, _ in layers))
    biases = jnp.stack([bias for *_, bias in layers])
    run = jax.jit(functools.partial(linear, tile=tile))
    last = linear(x, layers[2][1], tile, bias=layers[2][2])
    for layer in (2, 7, -1):  # one outside is the nearest, one from the end as JAX counts
        np.testing.assert_array_equal(run(x, stacked, bias=biases, layer=jnp.int32(layer)), last)


def test_i02_a_row_does_not_depend_on_others_nor_on_how_many_there_are():
    x, w, bias = operands(40, 70, 300, "fp8_block")
    y = linear(x, w, bias=bias)
    np.testing.assert_array_equal(linear(x[17:20], w, bias=bias), y[17:20])


@pytest.mark.parametrize("m, n, k", [(0, 4, 8), (3, 0, 8), (3, 4, 0)])
def test_h01_empty_extents_give_the_bias(m, n, k):
    bias = jnp.arange(n, dtype=jnp.float32)
    x, w = jnp.ones((m, k), jnp.bfloat16), jnp.ones((n, k), jnp.bfloat16)
    y = matmul.linear(x, w, bias=bias, activation="relu2", tile=TILE)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.float32(y), np.broadcast_to(np.square(np.arange(n)), (m, n)))


def test_it_works_under_vmap_strict_promotion_and_x64():
    x, w, bias = operands(6, 70, 300, "fp8_block")
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        y = jax.vmap(lambda v: linear(v, w, bias=bias))(x.reshape(2, 3, 300))
    np.testing.assert_array_equal(y.reshape(6, 70), linear(x, w, bias=bias))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_e4m3_decoded_by_bits_is_e4m3(dtype):
    codes = jnp.arange(256, dtype=jnp.uint8)
    values = jax.lax.bitcast_convert_type(codes, body.F8).astype(jnp.float32)
    decoded = body.decode_e4m3(codes, dtype)
    assert decoded.dtype == dtype
    np.testing.assert_array_equal(np.float32(decoded), values)
    assert np.signbit(np.float32(decoded)[0x80])


@pytest.mark.parametrize(
    "changes, error_type, message",
    [
        ({"w": jnp.ones((4, 6), jnp.bfloat16)}, ValueError, "must be"),
        ({"w": jnp.ones((4, 8), jnp.int16)}, TypeError, "w int16"),
        ({"x": jnp.ones((2, 8), body.F8)}, TypeError, "x is float8_e4m3fn, so w must be so too"),
        ({"w_scale": jnp.ones((1, 1))}, ValueError, "w_scale is given, but its operand is bfloat16"),
        ({"w": jnp.ones((4, 8), body.F8)}, ValueError, "w_scale is missing"),
        ({"w": jnp.ones((4, 8), body.F8), "w_scale": jnp.ones((2, 1))}, ValueError, "w_scale has shape"),
        ({"bias": jnp.ones(3)}, ValueError, "bias has shape"),
        ({"activation": "swish"}, ValueError, "activation='swish' must be"),
    ],
)
def test_bad_arguments_are_named(changes, error_type, message):
    arguments = {"x": jnp.ones((2, 8), jnp.bfloat16), "w": jnp.ones((4, 8), jnp.bfloat16), **changes}
    with pytest.raises(error_type, match=message):
        matmul.linear(**arguments, tile=TILE, interpret=True)


def lowered(m, n, k, recipe, capability, dtype=jnp.bfloat16, **options):
    """Kernels of a product with the tile that the heuristics choose; x comes quantised."""
    x, w, _ = jax.eval_shape(lambda: operands(m, n, k, recipe, dtype))
    cell = None
    scale = None
    kinds = {"bf16": "16bit", "fp8_w8a16": "w8a16", "int8_w8a16": "w8a16", "int8": "int8"}
    operand_kind = kinds.get(recipe, "fp8")
    if dtype == jnp.float32 and operand_kind not in ("fp8", "int8"):
        operand_kind = "32bit"
    if isinstance(w, QTensor):
        cell = None if w.scheme.block[1] == -1 else w.scheme.block[1]
        if w.input_scheme is not None:
            x = lanes.spec(x.shape, w.input_scheme.fmt.storage)
            scale = lanes.spec((m, -(-k // cell)) if cell else (m, 1) if w.scheme.block[0] == 1 else (1, 1))
    tile = matmul_tile(m, n, k, operands=operand_kind, cell=cell, capability=capability)

    def call(x, w, scale):
        if not isinstance(w, QTensor):
            return matmul.linear(x, w, tile=tile, **options)
        block = w.scheme.block
        group = {} if scale is None else {"x_scale": scale, "x_group": cell or -1}
        return matmul.linear(x, w.data, w.scale, w_block=block, tile=tile, **group, **options)

    return lanes.lower_for(call, (x, w, scale), capability)


W8A8 = ("fp8_tensor", "fp8_channel", "fp8_block", "mxfp8")
ANYWHERE = ("bf16", "fp8_w8a16", "int8", "int8_w8a16")
SERVED = [(r, c) for r in (*ANYWHERE, *W8A8) for c in lanes.KINDS if r not in W8A8 or c >= 89]


@pytest.mark.lowering
@pytest.mark.parametrize("recipe, capability", SERVED)
def test_it_lowers_for_every_gpu_that_serves_the_recipe(recipe, capability):
    for m, n, k in ((1, 200, 300), (100, 4096, 2880)):
        kernels = lowered(m, n, k, recipe, capability)
        assert len(kernels) <= 2
        assert kernels[0].count("tt.dot") >= 1
        assert ("f8E4M3FN" in kernels[0].text) == (recipe in W8A8)


@pytest.mark.lowering
def test_h18_sizes_that_are_no_powers_of_two_lower():
    assert len(lowered(2880, 2880, 2880, "fp8_block", 90)) == 1


@pytest.mark.lowering
@pytest.mark.parametrize("recipe", ["bf16", "fp8_w8a16"])
def test_float32_is_never_tf32(recipe):
    [kernel, *_] = lowered(64, 256, 256, recipe, 90, jnp.float32)
    dots = [line for line in kernel.text.splitlines() if "tt.dot" in line]
    assert dots and all("inputPrecision = tf32" not in line and "xf32>" in line for line in dots)


@pytest.mark.lowering
def test_d10_no_float8_is_cast_to_bfloat16():
    for recipe in ("fp8_block", "fp8_channel", "fp8_w8a16"):
        for kernel in lowered(64, 256, 256, recipe, 90):
            assert "tt.fp_to_fp" not in kernel.text


@pytest.mark.lowering
def test_int8_products_are_summed_in_int32_and_weights_alone_become_16_bit():
    [kernel, *_] = lowered(512, 4096, 4096, "int8", 90)
    dots = [line for line in kernel.text.splitlines() if "tt.dot" in line]
    assert dots and all("xi8>" in line and "xi32>" in line for line in dots)
    [kernel, *_] = lowered(512, 4096, 4096, "int8_w8a16", 90)
    assert "arith.sitofp" in kernel.text and "bf16>" in next(s for s in kernel.text.splitlines() if "tt.dot" in s)


@pytest.mark.lowering
def test_exact_and_fast_sums_differ_in_where_they_are_added():
    fast, exact = (lowered(512, 4096, 4096, "fp8_channel", 90, exact=e)[0].text for e in (False, True))
    assert "maxNumImpreciseAcc = 1073741824" in fast and "maxNumImpreciseAcc = 1073741824" in exact
    assert exact.count("arith.addf") == fast.count("arith.addf") + 1
