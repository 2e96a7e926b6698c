"""The seam to Pallas-Triton: memory, registers' operations, launches; in interpret mode and as Triton IR."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec as P

from pallas_kernels import lowering
from pallas_kernels.lowering import arange, kernel_call, load, loop, store
from tests.pallas_kernels import lanes


def run(kernel, *arrays, out, interpret=True, **static):
    call = kernel_call(
        kernel, name="probe", grid=(1,), out_shape=out, num_warps=4, num_stages=1, interpret=interpret, **static
    )
    return call(*arrays)


def test_masked_lanes_read_the_other_value_and_write_nothing_wherever_they_point():
    def kernel(x_ref, o_ref):
        i = arange(8)
        x = load(x_ref, (i * 1000,), mask=i < 1, other=-1)
        store(o_ref, (jnp.where(i < 2, i, 0),), x, mask=i < 2)

    out = run(kernel, jnp.array([7.0, 8.0, 9.0]), out=lanes.spec((4,)))
    np.testing.assert_array_equal(out[:2], [7, -1])


def test_interpret_mode_shows_a_read_outside_the_array():
    def kernel(x_ref, o_ref):
        store(o_ref, (arange(4),), load(x_ref, (arange(4),)))

    out = run(kernel, jnp.arange(3.0), out=lanes.spec((4,)))
    np.testing.assert_array_equal(out, [0, 1, 2, np.nan])


def test_interpret_mode_shows_a_write_outside_the_array():
    def kernel(o_ref):
        store(o_ref, (arange(4),), jnp.ones(4, jnp.float32))

    assert np.isnan(run(kernel, out=lanes.spec((3,)))).all()


def test_a_kernel_sees_a_scalar_index_and_tiles_of_two_axes_together():
    def kernel(x_ref, o_ref):
        row, col = arange(2)[:, None], arange(4)[None, :]
        store(o_ref, (col, row), load(x_ref, (1, row, col)))

    x = jnp.arange(16.0).reshape(2, 2, 4)
    np.testing.assert_array_equal(run(kernel, x, out=lanes.spec((4, 2))), x[1].T)


@pytest.mark.parametrize(
    "indices, mask, message",
    [
        ((0,), None, "1 indices for a ref of shape"),
        ((0, np.zeros(2, np.int64)), None, "int32"),
        ((0, 0), "wide", "mask"),
    ],
)
def test_indices_that_do_not_fit_are_refused(indices, mask, message):
    def kernel(x_ref, o_ref):
        load(x_ref, indices, mask=jnp.ones(3, bool) if mask else None, other=0 if mask else None)

    with jax.enable_x64(True), pytest.raises((TypeError, ValueError), match=message):
        run(kernel, jnp.zeros((2, 2), jnp.float32), out=lanes.spec((2,)))


@pytest.mark.parametrize("x64", [False, True])
def test_loops_and_ranges_count_in_int32(x64):
    def kernel(o_ref):
        total = loop(5, lambda i, total: total + i * arange(4), jnp.zeros(4, jnp.int32), start=2)
        store(o_ref, (arange(4),), total)

    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        out = run(kernel, out=lanes.spec((4,), jnp.int32))
        lanes.lower_for(lambda: run(kernel, out=lanes.spec((4,), jnp.int32), interpret=False), ())
    np.testing.assert_array_equal(out, [0, 9, 18, 27])  # (2 + 3 + 4) * lane


def test_dot_multiplies_by_the_transpose_and_adds():
    def kernel(a_ref, b_ref, o_ref):
        i, j = arange(16)[:, None], arange(16)[None, :]
        acc = lowering.dot(load(a_ref, (i, j)), load(b_ref, (i, j)), jnp.full((16, 16), 100.0, jnp.float32))
        store(o_ref, (i, j), acc)

    a = jax.random.normal(jax.random.key(0), (16, 16), jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (16, 16), jnp.bfloat16)
    out = run(kernel, a, b, out=lanes.spec((16, 16)))
    np.testing.assert_allclose(out, 100 + np.float32(a) @ np.float32(b).T, rtol=1e-6)


def test_h14_dot_refuses_an_extent_below_16():
    def kernel(o_ref):
        lowering.dot(jnp.ones((16, 16), jnp.float16), jnp.ones((8, 16), jnp.float16))

    with pytest.raises(ValueError, match="no extent may be below 16"):
        run(kernel, out=lanes.spec((1,)))


@pytest.mark.parametrize("a, b", [(jnp.uint8, jnp.uint8), (jnp.bfloat16, jnp.float16)])
def test_dot_refuses_unsigned_and_unlike_operands(a, b):
    def kernel(o_ref):
        lowering.dot(jnp.ones((16, 16), a), jnp.ones((16, 16), b))

    with pytest.raises(TypeError, match="Triton's operands share a dtype that is not unsigned"):
        run(kernel, out=lanes.spec((1,)))


def test_histogram_counts_live_entries_and_gather_looks_up():
    def kernel(x_ref, count_ref, found_ref):
        x = load(x_ref, (arange(8),))
        count = lowering.histogram(x, arange(8) < 6, 4)
        store(count_ref, (arange(4),), count)
        store(found_ref, (arange(8),), lowering.gather(count, x))

    x = jnp.array([3, 0, 3, 3, 1, 0, 2, 2], jnp.int32)
    count, found = run(kernel, x, out=[lanes.spec((4,), jnp.int32), lanes.spec((8,), jnp.int32)])
    np.testing.assert_array_equal(count, [2, 1, 0, 3])
    np.testing.assert_array_equal(found, [3, 2, 3, 3, 1, 2, 0, 0])


def test_d09_rounding_to_bfloat16_is_not_elided():
    def kernel(x_ref, o_ref):
        store(o_ref, (arange(2),), lowering.round_to(load(x_ref, (arange(2),)), jnp.bfloat16))

    out = jax.jit(lambda x: run(kernel, x, out=lanes.spec((2,))))(jnp.array([1.00390625, 1.01171875]))
    np.testing.assert_array_equal(out, [1.0, 1.015625])  # both lie midway: ties to even


def test_reciprocal_is_correctly_rounded():
    def kernel(x_ref, o_ref):
        store(o_ref, (arange(1024),), lowering.reciprocal(load(x_ref, (arange(1024),))))

    x = np.random.default_rng(0).uniform(1, 2, 1024).astype(np.float32)
    np.testing.assert_array_equal(run(kernel, x, out=lanes.spec((1024,))), (1 / np.float64(x)).astype(np.float32))


def scale_kernel(x_ref, o_ref, *, factor):
    i = arange(4)
    store(o_ref, (i,), load(x_ref, (i,)) * factor)


def test_fma_multiplies_by_what_broadcasts_and_adds_in_one_operation():
    def kernel(x_ref, o_ref):
        x = load(x_ref, (arange(4)[:, None], arange(2)[None, :]))
        row = load(x_ref, (arange(4), 1))
        store(o_ref, (arange(4)[:, None], arange(2)[None, :]), lowering.fma(x, row[:, None], x))

    x = jnp.arange(8.0).reshape(4, 2)
    np.testing.assert_array_equal(run(kernel, x, out=lanes.spec((4, 2))), x * x[:, 1:] + x)
    [lowered] = lanes.lower_for(lambda x: run(kernel, x, out=lanes.spec((4, 2)), interpret=False), (x,))
    assert lowered.count("math.fma") == 1


def test_a_product_or_nan_keeps_zeros_signs():
    def kernel(x_ref, o_ref):
        store(o_ref, (arange(8),), lowering.times_or_nan(load(x_ref, (arange(8),)), load(x_ref, (1,))))

    x = np.array([0.0, 3.0, -0.0, np.inf, -np.inf, np.nan, -2.5, 1e-40], np.float32)
    found = run(kernel, x, out=lanes.spec((8,)))
    wanted = np.array([0.0, 9.0, -0.0, np.nan, np.nan, np.nan, -7.5, np.float32(1e-40) * 3], np.float32)
    np.testing.assert_array_equal(found[:7], wanted[:7])
    np.testing.assert_array_equal(np.signbit(found[:3]), [False, False, True])
    assert abs(found[7]) <= wanted[7]  # subnormal numbers may be flushed
    [lowered] = lanes.lower_for(lambda x: run(kernel, x, out=lanes.spec((8,)), interpret=False), (x,))
    assert lowered.count("math.fma") == lowered.count("arith.mulf") == 1


def test_vmap_adds_an_axis_of_programs():
    def double(x, interpret=True):
        return run(scale_kernel, x, out=lanes.spec((4,)), interpret=interpret, factor=2)

    x = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(jax.vmap(double)(x), 2 * x)
    [kernel] = lanes.lower_for(jax.vmap(lambda x: double(x, False)), (x,))
    assert kernel.grid == (1, 3, 1)


def test_a_kernel_runs_under_shard_map():
    mesh = jax.make_mesh((2,), ("e",), axis_types=(jax.sharding.AxisType.Auto,))

    def double(x):
        return run(scale_kernel, x, out=lanes.spec((4,)), factor=2)

    x = jnp.arange(8.0)
    sharded = jax.shard_map(double, mesh=mesh, in_specs=P("e"), out_specs=P("e"), check_vma=False)
    np.testing.assert_array_equal(jax.jit(sharded)(x), 2 * x)


@pytest.mark.lowering
def test_a_kernel_lowers_under_shard_map_with_its_check():
    mesh = lanes.mesh_of(90, e=2)

    def double(x):
        return run(scale_kernel, x, out=lanes.spec((4,)), interpret=False, factor=2)

    sharded = jax.shard_map(double, mesh=mesh, in_specs=P("e"), out_specs=P("e"))
    assert len(lanes.lower_for(sharded, (lanes.spec((8,)),), mesh=mesh)) == 1


def big_kernel(w_ref, e_ref, o_ref):
    e = load(e_ref, (0,))
    row, col = arange(16), arange(32)
    store(o_ref, (row[:, None], col[None, :]), load(w_ref, (e, row[:, None], col[None, :])))


def big(w, e):
    return run(big_kernel, w, e, out=lanes.spec((16, 32), w.dtype), interpret=False)


@pytest.mark.lowering
@pytest.mark.parametrize("experts, wide", [(64, False), (65, True), (200, True)])
def test_h12_h13_only_the_base_of_a_tile_is_addressed_with_64_bits(experts, wide):
    """Expert 64 of (E, 8192, 4096) bytes starts at 2**31, where a 32-bit offset is negative."""
    [kernel] = lanes.lower_for(big, (lanes.spec((experts, 8192, 4096), jnp.uint8), lanes.spec((1,), jnp.int32)))
    assert ("arith.muli" in kernel.text) and ("tensor<16x32xi32>" in kernel.text)
    assert ("i64" in kernel.text) == wide
    assert "xi64>" not in kernel.text  # tiles stay in 32 bits
    if wide:
        assert "tt.addptr" in kernel.text and ": !tt.ptr<i8>, i64" in kernel.text


@pytest.mark.lowering
def test_h12_an_axis_that_alone_reaches_beyond_32_bits_is_widened():
    def kernel(x_ref, row_ref, o_ref):
        row, col = load(row_ref, (arange(16),)), arange(32)
        store(o_ref, (arange(16)[:, None], col[None, :]), load(x_ref, (row[:, None], col[None, :])))

    def gathered(x, row):
        return run(kernel, x, row, out=lanes.spec((16, 32), x.dtype), interpret=False)

    rows = lanes.spec((16,), jnp.int32)
    [narrow] = lanes.lower_for(gathered, (lanes.spec((2**19, 4096), jnp.uint8), rows))
    [wide] = lanes.lower_for(gathered, (lanes.spec((2**19 + 1, 4096), jnp.uint8), rows))
    assert "i64" not in narrow.text
    assert "tensor<16x1xi64>" in wide.text and "tensor<16x32xi64>" not in wide.text


def test_nothing_warns_of_deprecation_but_other_peoples_kernels_still_do():
    def theirs(x):
        def kernel(x_ref, o_ref):
            plgpu.store(o_ref.at[:], plgpu.load(x_ref.at[:]))

        params = plgpu.CompilerParams(num_warps=4, num_stages=1)
        return pl.pallas_call(kernel, out_shape=lanes.spec((4,)), compiler_params=params)(x)

    def ours(x):
        return run(scale_kernel, x, out=lanes.spec((4,)), interpret=False, factor=2)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        lanes.lower_for(ours, (lanes.spec((4,)),))
        assert not [w for w in seen if "Pallas Triton" in str(w.message)]
        lanes.lower_for(theirs, (lanes.spec((4,)),))
        deprecated = jax.__version_info__ >= (0, 11)
        assert bool([w for w in seen if "Pallas Triton" in str(w.message)]) == deprecated


@pytest.mark.lowering
@pytest.mark.parametrize("capability", sorted(lanes.KINDS))
def test_every_operation_lowers_to_valid_triton(capability):
    def kernel(x_ref, o_ref):
        i, j = arange(16)[:, None], arange(32)[None, :]
        x = load(x_ref, (i, j))
        y = lowering.dot(x, x, max_num_imprecise_acc=32)
        y = lowering.erfc(lowering.round_to(lowering.reciprocal(y), jnp.float16))
        count = lowering.histogram(arange(16), arange(16) < 9, 16)
        store(o_ref, (i, arange(16)[None, :]), y + lowering.gather(count, arange(16))[:, None].astype(jnp.float32))

    def call(x):
        return run(kernel, x, out=lanes.spec((16, 16)), interpret=False)

    [triton] = lanes.lower_for(call, (lanes.spec((16, 32), jnp.bfloat16),), capability)
    for operation in ("tt.dot", "tt.histogram", "tt.gather", "tt.precise_divf", "tt.extern_elementwise"):
        assert triton.count(operation) == 1, operation
    assert "maxNumImpreciseAcc = 32" in triton.text
    assert (triton.name, triton.num_warps, triton.num_stages, triton.grid) == ("probe", 4, 1, (1, 1, 1))
