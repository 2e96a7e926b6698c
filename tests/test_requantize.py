"""Changes of a tensor's scheme: refining and merging lose nothing, requantizing computes codes anew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmoe.qtensor import QTensor, scale_grid
from jmoe.quantize import merge_shards, quantize, refine_blocks, requantize
from jmoe.scheme import Scheme, recipe
from pallas_kernels.layouts import Layout
from tests.quantizer_oracle import dequantize

FP8 = Scheme(format="e4m3", block=(4, 6))
TENSOR = FP8.replace(block=(-1, -1))
INT4_ZP = Scheme(format="int4", block=(1, 12), zero_point=True)
NVFP4 = recipe("nvfp4").weight


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def packed(q: QTensor) -> QTensor:
    return QTensor(q.data, q.scale, q.global_scale, q.zero_point, q.scheme, layout=Layout("swizzled"), odd_k=q.odd_k)


@pytest.mark.parametrize(
    "old, new, grid",
    [
        ((4, 6), (4, 6), (3, 3)),
        ((4, 6), (2, 6), (5, 3)),
        ((4, 6), (1, 2), (10, 7)),
        ((4, 6), (4, 3), (3, 5)),
        ((-1, -1), (1, -1), (10, 1)),
        ((-1, -1), (4, 6), (3, 3)),
        ((-1, -1), (128, 128), (1, 1)),
        ((1, -1), (1, 4), (10, 4)),
        ((128, 128), (64, 64), (1, 1)),
        ((128, 128), (8, 4), (2, 4)),
        ((128, 128), (-1, -1), (1, 1)),
        ((12, 128), (10, 13), (1, 1)),
        ((10, 13), (-1, -1), (1, 1)),
    ],
)
def test_refined_blocks_hold_the_same_values(old, new, grid):
    q = quantize(normal(2, 10, 13), FP8.replace(block=old)).with_input_scheme(TENSOR)
    refined = jax.jit(refine_blocks, static_argnums=1)(q, new)
    assert refined.scheme == q.scheme.replace(block=new)
    assert refined.scale.shape == (2, *grid)
    assert refined.input_scheme == TENSOR
    np.testing.assert_array_equal(refined.data, q.data)
    np.testing.assert_array_equal(dequantize(refined), dequantize(q))
    QTensor.make(refined.data, refined.scale, scheme=refined.scheme)


@settings(max_examples=12)
@given(
    n=st.integers(1, 13),
    k=st.integers(1, 13),
    rows=st.sampled_from([-1, 1, 2, 4, 8]),
    cols=st.sampled_from([-1, 1, 3, 6, 12]),
    row_divisor=st.sampled_from([1, 2, 4]),
    col_divisor=st.sampled_from([1, 2, 3]),
)
def test_any_divisor_refines_losslessly(n, k, rows, cols, row_divisor, col_divisor):
    grid = scale_grid((n, k), (rows, cols))
    scale = 1 + np.arange(np.prod(grid), dtype=np.float32).reshape(grid)
    q = QTensor.make(jnp.ones((n, k), jnp.int8), scale, scheme=Scheme(format="int8", block=(rows, cols)))
    new = tuple(
        d if b == -1 else b // d if b % d == 0 else b
        for b, d in zip((rows, cols), (row_divisor, col_divisor), strict=True)
    )
    np.testing.assert_array_equal(refine_blocks(q, new).dequantize(), dequantize(q))


def test_zero_points_global_scales_and_odd_k_are_kept():
    q = quantize(normal(3, 23), INT4_ZP)
    refined = refine_blocks(q, (1, 4))
    assert (refined.odd_k, refined.zero_point.shape) == (True, (3, 6))
    np.testing.assert_array_equal(dequantize(refined), dequantize(q))
    q = quantize(normal(3, 40), NVFP4)
    refined = refine_blocks(q, (1, 8))
    assert refined.global_scale.shape == (1, 1)
    np.testing.assert_array_equal(dequantize(refined), dequantize(q))


@pytest.mark.parametrize("new", [(3, 6), (4, 4), (8, 6), (4, 12), (-1, 6), (4, -1), (128, 128)])
def test_a_block_that_straddles_scales_is_refused(new):
    q = quantize(normal(10, 13), FP8)
    with pytest.raises(ValueError, match=r"block=\(.*\) does not divide the tensor's blocks \(4, 6\)"):
        refine_blocks(q, new)


def test_refining_refuses_what_is_no_block_and_what_is_not_canonical():
    q = quantize(normal(10, 13), FP8)
    with pytest.raises(ValueError, match=r"block=\(0, 6\) must be two ints \(rows, cols\)"):
        refine_blocks(q, (0, 6))
    with pytest.raises(ValueError, match="layout='swizzled': blocks are refined in the canonical layout"):
        refine_blocks(packed(q), (2, 6))


def concatenated(shards) -> np.ndarray:
    return np.concatenate([np.asarray(dequantize(s)) for s in shards], -2)


def test_c09_merged_tensor_scales_become_one_a_row_and_no_value_changes():
    codes = jnp.array([[1, 2], [3, 4]], jnp.float8_e4m3fn)
    shards = [QTensor.make(codes, jnp.array([[s]]), scheme=TENSOR, input_scheme=TENSOR) for s in (1.0, 4.0)]
    merged = merge_shards(shards)
    assert merged.scheme == TENSOR.replace(block=(1, -1))
    assert merged.input_scheme == TENSOR
    assert merged.scale.tolist() == [[1], [1], [4], [4]]
    assert merged.dequantize().tolist() == [[1, 2], [3, 4], [4, 8], [12, 16]]


@pytest.mark.parametrize(
    "rows, block, merged_block",
    [
        ((8, 8), (4, 6), (4, 6)),
        ((8, 3), (4, 6), (4, 6)),  # a ragged last shard meets no seam
        ((6, 8), (4, 6), (2, 6)),
        ((7, 8), (4, 6), (1, 6)),
        ((12, 6, 8), (4, 6), (2, 6)),
        ((3, 5), (1, 6), (1, 6)),
        ((3, 5), (1, -1), (1, -1)),
        ((3, 5, 2), (-1, 6), (1, 6)),
        ((4,), (-1, -1), (-1, -1)),
        ((1, 1), (-1, -1), (1, -1)),
    ],
)
@pytest.mark.parametrize("batch", [(), (2, 2)])
def test_merged_shards_hold_their_values(rows, block, merged_block, batch):
    shards = [quantize(normal(*batch, n, 13, seed=n), FP8.replace(block=block)) for n in rows]
    merged = jax.jit(merge_shards)(shards)
    assert merged.scheme.block == merged_block
    assert merged.shape == (*batch, sum(rows), 13)
    np.testing.assert_array_equal(dequantize(merged), concatenated(shards))
    QTensor.make(merged.data, merged.scale, scheme=merged.scheme)


def test_shards_of_different_row_blocks_merge():
    shards = [quantize(normal(8, 13), FP8), quantize(normal(12, 13), FP8.replace(block=(6, 6)))]
    merged = merge_shards(shards)
    assert merged.scheme.block == (2, 6)
    np.testing.assert_array_equal(dequantize(merged), concatenated(shards))


def test_merged_zero_points_stay_with_their_rows():
    shards = [quantize(normal(n, 23) + shift, INT4_ZP) for n, shift in ((3, -2), (2, 5))]
    merged = merge_shards(shards)
    assert merged.zero_point.shape == merged.scale.shape == (5, 2)
    assert merged.odd_k
    np.testing.assert_array_equal(dequantize(merged), concatenated(shards))


def test_merged_global_scales_become_one_a_row():
    shards = [quantize(normal(2, n, 40) * s, NVFP4) for n, s in ((3, 1), (1, 100))]
    merged = merge_shards(shards)
    assert merged.global_scale.shape == (2, 4, 1)
    np.testing.assert_array_equal(merged.global_scale[:, :3], np.repeat(shards[0].global_scale, 3, 1))
    np.testing.assert_array_equal(dequantize(merged), concatenated(shards))
    twice = merge_shards([merged, shards[0]])
    np.testing.assert_array_equal(dequantize(twice), concatenated([merged, shards[0]]))


def test_one_shard_is_itself():
    q = quantize(normal(2, 8), TENSOR)
    assert merge_shards([q]) is q


@pytest.mark.parametrize(
    "other, message",
    [
        (
            lambda: quantize(normal(2, 13), "int8").with_input_scheme(None),
            r"shards\[1\] is QTensor\(shape=\(2, 13\), int8",
        ),
        (lambda: quantize(normal(2, 13), FP8.replace(block=(4, 3))), r"shards\[1\] is .* which cannot follow"),
        (lambda: quantize(normal(2, 13), FP8.replace(power_of_two=True)), r"shards\[1\] is .* which cannot follow"),
        (lambda: quantize(normal(2, 13), FP8).with_input_scheme(TENSOR), r"shards\[1\] is .* which cannot follow"),
        (lambda: packed(quantize(normal(2, 13), FP8)), r"shards\[1\] is .* which cannot follow"),
        (
            lambda: quantize(normal(2, 12), FP8),
            r"shards\[1\] has shape \(2, 12\), but only N may differ from \(4, 13\)",
        ),
        (lambda: quantize(normal(1, 2, 13), FP8), r"shards\[1\] has shape \(1, 2, 13\), but only N may differ"),
    ],
)
def test_shards_that_differ_in_more_than_n_are_refused(other, message):
    with pytest.raises(ValueError, match=message):
        merge_shards([quantize(normal(4, 13), FP8), other()])


def test_merging_refuses_nothing_and_a_kernels_layout():
    with pytest.raises(ValueError, match="shards is empty; merging needs at least one"):
        merge_shards([])
    q = packed(quantize(normal(4, 13), FP8))
    with pytest.raises(ValueError, match="layout='swizzled'"):
        merge_shards([q, q])


def test_b01_codes_follow_scales_that_are_rounded_up():
    w = quantize(np.ones((1, 128), np.float32), TENSOR)
    assert w.codes.astype(jnp.float32)[0, 0] == 448
    rounded = requantize(w, TENSOR.replace(power_of_two=True))
    assert rounded.scale.tolist() == [[2**-8]]
    assert (rounded.codes.astype(jnp.float32) == 256).all()
    assert (rounded.dequantize() == 1).all()


def test_requantizing_is_quantizing_the_values():
    q = quantize(normal(4, 40), "int8")
    for how in ("int4:group=8", NVFP4, recipe("fp8_block")):
        anew, direct = requantize(q, how), quantize(q.dequantize(), how)
        for a, b in zip(jax.tree.leaves(anew), jax.tree.leaves(direct), strict=True):
            np.testing.assert_array_equal(a, b)
    static = requantize(q, TENSOR.replace(static=True), scale=0.5)
    assert static.scale.tolist() == [[0.5]]


def test_a_scheme_keeps_the_input_scheme_and_a_recipe_brings_its_own():
    q = quantize(normal(4, 40), "fp8_channel")
    assert requantize(q, TENSOR).input_scheme == q.input_scheme
    assert requantize(q, "int8").input_scheme == recipe("int8").input
    assert requantize(q, "int4").input_scheme is None
