"""What the operations take for an argument, and the checks of values that one can ask for."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.experimental import checkify

import jmoe
from jmoe import ActivationParams, batched_experts, fused_moe, linear, quantize
from tests.ops.example_calls import (
    COUNTS,
    IDS,
    K_SLOTS,
    STACKED,
    W2,
    W13,
    WEIGHTS,
    XE,
    E,
    H,
    I,
    T,
    W,
    X,
    call_batched,
    call_moe,
)

SPREAD = (jnp.arange(E, dtype=jnp.float32)[:, None, None, None] + 1) * W13  # experts that differ
CHOICE = np.array([[0, 1], [2, 3], [3, -1], [1, 1], [-1, -1]])


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_f14_ids_of_any_signed_dtype(dtype):
    expected = call_moe(w13=SPREAD, topk_ids=jnp.array(CHOICE, jnp.int32))
    ids = CHOICE.astype(dtype)
    np.testing.assert_array_equal(call_moe(w13=SPREAD, topk_ids=ids), expected)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(call_moe(w13=SPREAD, topk_ids=jnp.asarray(ids)), expected)
        np.testing.assert_array_equal(jax.jit(lambda i: call_moe(w13=SPREAD, topk_ids=i))(jnp.asarray(ids)), expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_f14_ids_of_any_unsigned_dtype(dtype):
    """-1 wraps to the largest value there, which is no expert either."""
    expected = call_moe(w13=SPREAD, topk_ids=jnp.array(CHOICE, jnp.int32))
    ids = CHOICE.astype(dtype)
    np.testing.assert_array_equal(call_moe(w13=SPREAD, topk_ids=ids), expected)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(call_moe(w13=SPREAD, topk_ids=jnp.asarray(ids)), expected)


@pytest.mark.parametrize("x64", [False, True])
def test_f14_large_values_do_not_wrap_into_range(x64):
    """As int32, 2^32 + 1 is 1, 2^32 - 1 is -1 and -2^32 + 2 is 2."""
    wide = np.array([[2**32 + 1, 0], [2**32, 2**40 + 3], [-(2**32) + 2, -(2**63)], [2**63 - 1, 3], [2**31, -2]])
    expected = call_moe(w13=SPREAD, topk_ids=jnp.array([[-1, 0], [-1, -1], [-1, -1], [-1, 3], [-1, -1]]))
    with jax.enable_x64(x64):
        np.testing.assert_array_equal(call_moe(w13=SPREAD, topk_ids=wide), expected)
        np.testing.assert_array_equal(call_moe(w13=SPREAD, topk_ids=wide.tolist()), expected)
        if x64:
            np.testing.assert_array_equal(call_moe(w13=SPREAD, topk_ids=jnp.asarray(wide)), expected)
    narrow = np.array([[250, 1], [256 - 4, 0]], np.uint8)  # -6 and -4 as int8
    np.testing.assert_array_equal(
        call_moe(x=X[:2], w13=SPREAD, topk_ids=narrow, topk_weights=WEIGHTS[:2]),
        call_moe(x=X[:2], w13=SPREAD, topk_ids=[[-1, 1], [-1, 0]], topk_weights=WEIGHTS[:2]),
    )


def test_f14_expert_maps_and_counts_do_not_wrap_either():
    ids = jnp.array([[0, 1], [2, 3], [4, 5], [0, 5], [1, 4]])
    wide = np.array([2**32 + 1, 0, -(2**32), 3, -1, 2])
    np.testing.assert_array_equal(
        call_moe(w13=SPREAD, topk_ids=ids, expert_map=wide),
        call_moe(w13=SPREAD, topk_ids=ids, expert_map=[-1, 0, -1, 3, -1, 2]),
    )
    np.testing.assert_array_equal(
        call_batched(counts=np.array([2**32 + 1, -(2**32) + 3, 2**31, 2])), call_batched(counts=[T, 0, T, 2])
    )
    rows = jnp.ones((E, 300, H), jnp.bfloat16)  # more rows than an int8 counts to
    np.testing.assert_array_equal(
        call_batched(x=rows, counts=np.array([127, -128, 5, 0], np.int8)), call_batched(x=rows, counts=[127, 0, 5, 0])
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float64, ml_dtypes.bfloat16])
def test_f13_router_weights_of_any_float_dtype_are_cast_by_value(dtype):
    weights = np.linspace(-2, 2, T * K_SLOTS).reshape(T, K_SLOTS).astype(jnp.bfloat16)  # exact in all of them
    expected = call_moe(topk_weights=weights.astype(np.float32))
    np.testing.assert_array_equal(call_moe(topk_weights=weights.astype(dtype)), expected)


def test_numpy_arrays_and_lists_are_arrays_everywhere():
    def lists(*arrays):
        return [np.asarray(a).tolist() for a in arrays]

    x, w, bias = lists(X, W, jnp.arange(I, dtype=jnp.float32))
    np.testing.assert_array_equal(linear(x, w, bias=bias), linear(X, W, bias=jnp.arange(I, dtype=jnp.float32)))
    options = {"b13": jnp.ones((E, 2, I)), "b2": jnp.ones((E, H)), "expert_map": jnp.arange(E)}
    params = ActivationParams(alpha=[1.5] * E, beta=1, limit=np.float64(7))
    expected = fused_moe(X, W13, W2, WEIGHTS, IDS, activation_params=jax.tree.map(jnp.asarray, params), **options)
    for form in (np.asarray, lambda a: np.asarray(a).tolist()):
        arrays = [form(a) for a in (X, W13, W2, WEIGHTS, IDS)]
        got = fused_moe(*arrays, activation_params=params, **{name: form(a) for name, a in options.items()})
        np.testing.assert_array_equal(got, expected)
        got = batched_experts(form(XE), form(COUNTS), form(W13), form(W2))
        np.testing.assert_array_equal(got, batched_experts(XE, COUNTS, W13, W2))
    assert quantize(x, "int8").shape == (T, H)


def test_variables_of_flax_are_arrays():
    w = nnx.Param(jnp.ones((3, 8, 16)))
    layer = nnx.Variable(jnp.int32(2))
    np.testing.assert_array_equal(linear(X, w, layer=layer, bias=nnx.Param(jnp.ones((3, 8)))), np.full((T, 8), 17))
    traced = jax.jit(lambda i: linear(X, w, layer=nnx.Variable(i)))(2)
    np.testing.assert_array_equal(traced, np.full((T, 8), 16))
    np.testing.assert_array_equal(call_moe(topk_ids=nnx.Variable(IDS)), call_moe())


def test_lists_that_hold_traced_values():
    ids = jax.jit(lambda a: call_moe(topk_ids=[[a, a + 1]] * T))(jnp.int32(1))
    np.testing.assert_array_equal(ids, call_moe(topk_ids=[[1, 2]] * T))


# Values, where asked.


@pytest.mark.parametrize(
    "call, changes, message",
    [
        (call_moe, {"topk_ids": IDS.at[3, 1].set(E)}, r"topk_ids holds 4, but it lies in \[-1, 3\]"),
        (call_moe, {"topk_ids": IDS.at[0, 0].set(-2)}, r"topk_ids holds -2, but it lies in \[-1, 3\]"),
        (call_moe, {"topk_ids": np.full((T, K_SLOTS), 2**40)}, r"topk_ids holds 2147483647, but"),
        (call_moe, {"expert_map": [0, 1, 2, 3, 4]}, r"expert_map holds 4, but it lies in \[-1, 3\]"),
        (call_moe, {"expert_map": [0, 1], "topk_ids": IDS + 2}, r"topk_ids holds 2, but it lies in \[-1, 1\]"),
        (call_batched, {"counts": COUNTS.at[1].set(T + 1)}, r"counts holds 6, but it lies in \[0, 5\]"),
        (call_batched, {"counts": COUNTS.at[2].set(-1)}, r"counts holds -1, but it lies in \[0, 5\]"),
        (call_moe, {**STACKED, "layer": jnp.int32(3)}, r"layer holds 3, but it lies in \[0, 2\]"),
    ],
)
def test_values_out_of_range_raise_under_check_and_only_there(call, changes, message):
    traced = {k: v for k, v in changes.items() if k in ("topk_ids", "expert_map", "counts") or isinstance(v, jax.Array)}
    fixed = {k: v for k, v in changes.items() if k not in traced}
    traced = {k: jnp.asarray(np.clip(v, -(2**31), 2**31 - 1)) for k, v in traced.items()}
    run = jax.jit(lambda kw: call(**fixed, **kw))
    assert np.isfinite(call(**changes)).all()
    assert np.isfinite(run(traced)).all()
    with jmoe.config(check=True):
        with pytest.raises(checkify.JaxRuntimeError, match=message):
            call(**changes)
        error, _ = checkify.checkify(run)(traced)
        with pytest.raises(checkify.JaxRuntimeError, match=message):
            error.throw()


def test_values_in_range_pass_the_check():
    with jmoe.config(check=True):
        assert call_moe(topk_ids=IDS.at[0, 0].set(-1), expert_map=jnp.array([-1, 3, 0, 1])).shape == (T, H)
        assert call_moe(x=X[:0], topk_ids=IDS[:0], topk_weights=WEIGHTS[:0]).shape == (0, H)
        assert call_batched().shape == (E, T, H)
        error, _ = checkify.checkify(jax.jit(jax.vmap(lambda ids: call_moe(topk_ids=ids))))(jnp.stack([IDS, IDS]))
        error.throw()


def test_check_traces_again_and_its_absence_leaves_no_check():
    run = jax.jit(lambda ids: call_moe(topk_ids=ids))
    run(IDS)
    with jmoe.config(check=True), pytest.raises(ValueError, match=r"checkify"):
        run(IDS)
    assert "check" not in str(jax.make_jaxpr(run)(IDS))
