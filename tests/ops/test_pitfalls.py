"""Faults that products and experts have had elsewhere, on the smallest inputs that show them.

Every implementation that runs anywhere must get them right. Expected values are computed by hand or in float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.qtensor import QTensor
from jmoe.scheme import Scheme

each_implementation = pytest.mark.parametrize("implementation", ["xla", "reference"])


def normal(seed, *shape, scale=1.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def f64(a):
    return np.asarray(a.dequantize() if isinstance(a, QTensor) else a).astype(np.float64)


def error(y, expected):
    y, expected = (np.asarray(a, np.float64) for a in (y, expected))
    assert y.shape == expected.shape
    return np.linalg.norm(y - expected) / np.linalg.norm(expected)


def jitted(fn, implementation, **options):
    return jax.jit(functools.partial(fn, implementation=implementation, **options))


def silu(x):
    return x / (1 + np.exp(-x))


def expert(x, w13, w2):
    """One expert of float64 weights (2, I, H) and (H, I)."""
    return silu(x @ w13[0].T) * (x @ w13[1].T) @ w2.T


def ones(shape, scale, block):
    """An e4m3 array of ones with the given scales."""
    scheme = Scheme(format="e4m3", block=block)
    return QTensor.make(jnp.ones(shape, jnp.float8_e4m3fn), np.asarray(scale, np.float32), scheme=scheme)


@each_implementation
def test_b03_every_group_of_k_has_its_own_scale(implementation):
    x = ones((1, 64), [[1, 2]], (1, 32))
    w = ones((1, 64), [[1, 4]], (1, 32)).with_input_scheme(x.scheme)
    y = jitted(jmoe.linear, implementation, preferred_element_type="float32")(x, w)
    assert y.item() == 32 * 1 * 1 + 32 * 2 * 4


@each_implementation
def test_b08_neither_n_nor_k_is_a_multiple_of_the_block(implementation):
    x = normal(0, 5, 300)
    w = jmoe.quantize(normal(1, 200, 300), "fp8_w8a16")
    assert w.scale.shape == (2, 3)
    assert error(jitted(jmoe.linear, implementation)(x, w), f64(x) @ f64(w).T) <= 1e-6


@each_implementation
def test_b12_fp8_products_over_k_2880_keep_28_db(implementation):
    x, w = normal(0, 16, 2880), normal(1, 4, 64, 2880)
    run = jitted(jmoe.linear, implementation)
    quantized = jmoe.quantize(w, "fp8_block")
    y = np.stack([run(x, quantized, layer=e) for e in range(4)])
    exact = np.einsum("mk,enk->emn", f64(x), f64(w))
    assert -20 * np.log10(error(y, exact)) >= 28


@each_implementation
@pytest.mark.parametrize("group", [64, -1])
def test_b14_b16_the_group_is_the_tensors_own(group, implementation):
    # Groups of 64 in which 128 would be as likely, and -1: one group over the whole of K.
    w = jmoe.quantize(normal(1, 24, 256) * np.repeat(np.float32([1, 8, 0.1, 3]), 64), f"int4:group={group}")
    assert w.scale.shape == (24, 256 // group if group > 0 else 1)
    x = normal(0, 5, 256)
    assert error(jitted(jmoe.linear, implementation)(x, w), f64(x) @ f64(w).T) <= 1e-6


@each_implementation
def test_b18_scales_go_along_with_their_own_k(implementation):
    # K is H = 256 in the first product and I = 64 in the second; each group's scale tells its place.
    scheme = Scheme(format="int4", block=(1, 64))

    def weight(*shape):
        codes = np.random.default_rng(2).integers(0, 256, (*shape[:-1], shape[-1] // 2)).astype(np.uint8)
        groups = shape[-1] // 64
        scale = 0.01 * (1 + np.arange(groups * shape[-2]).reshape(shape[-2], groups)) / shape[-2]
        return QTensor.make(
            codes, np.broadcast_to(scale, (*shape[:-2], *scale.shape)).astype(np.float32), scheme=scheme
        )

    w13, w2, x = weight(2, 2, 64, 256), weight(2, 256, 64), normal(0, 3, 256)
    y = jitted(jmoe.fused_moe, implementation)(x, w13, w2, np.ones((3, 1), np.float32), np.array([[1], [0], [1]]))
    expected = [expert(f64(x)[t], f64(w13)[e], f64(w2)[e]) for t, e in enumerate((1, 0, 1))]
    assert error(y, expected) <= 1e-5


@each_implementation
def test_c02_activation_scales_of_two_rows(implementation):
    x = ones((2, 256), [[1, 2], [4, 8]], (1, 128))
    w = ones((1, 256), [[1, 1]], (128, 128)).with_input_scheme(x.scheme)
    y = jitted(jmoe.linear, implementation, preferred_element_type="float32")(x, w)
    np.testing.assert_array_equal(y, [[128 * (1 + 2)], [128 * (4 + 8)]])


@each_implementation
@pytest.mark.parametrize("recipe", ["fp8_block:block=16", "int8"])
def test_c06_views_are_quantised_like_their_copies(recipe, implementation):
    w = jmoe.quantize(normal(1, 24, 40), recipe)
    wide = normal(0, 40, 30)
    run = functools.partial(jmoe.linear, implementation=implementation)
    y = jax.jit(lambda a, w: (run(a.T[3:20], w), run(a.T[::2], w)))(wide, w)
    for ours, view in zip(y, (wide.T[3:20], wide.T[::2]), strict=True):
        assert error(ours, jitted(jmoe.linear, implementation)(np.ascontiguousarray(view), w)) <= 1e-6


@each_implementation
def test_c07_a_given_global_scale_of_the_activation_counts_once(implementation):
    # Checkpoints hold its reciprocal, 2400: values up to 2688 / 2400.
    x = np.clip(normal(0, 6, 32, scale=0.3), -1, 1)
    w13, w2 = normal(1, 3, 2, 16, 32, scale=32**-0.5), normal(2, 3, 32, 16)
    ids = np.array([[0], [1], [2], [0], [1], [2]])
    run = jitted(jmoe.fused_moe, implementation, input_scale=1 / 2400, intermediate_scale=1 / 2400)
    y = run(x, jmoe.quantize(w13, "nvfp4"), jmoe.quantize(w2, "nvfp4"), np.ones((6, 1), np.float32), ids)
    exact = [expert(f64(x)[t], f64(w13)[e], f64(w2)[e]) for t, (e,) in enumerate(ids)]
    assert error(y, exact) <= 0.3  # the noise of FP4; dropped or applied twice it is off 2400-fold


@each_implementation
@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_channel", "int8"])
def test_c12_the_bias_is_not_scaled(recipe, implementation):
    w = jmoe.quantize(np.zeros((3, 8), np.float32), recipe)
    w = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.01) if leaf.dtype == jnp.float32 else leaf, w)
    y = jitted(jmoe.linear, implementation)(normal(0, 2, 8), w, bias=np.ones(3, np.float32))
    np.testing.assert_array_equal(y, np.ones((2, 3)))


@each_implementation
def test_e01_gate_first_up_second(implementation):
    w13 = np.float32([1, 2]).reshape(1, 2, 1, 1)
    args = (np.ones((1, 1), np.float32), w13, np.ones((1, 1, 1), np.float32), np.ones((1, 1), np.float32), [[0]])
    assert jitted(jmoe.fused_moe, implementation)(*args).item() == pytest.approx(silu(1) * 2, abs=1e-6)


@each_implementation
def test_e06_the_bias_counts_once_over_ranks_of_experts(implementation):
    # Both ranks see both slots, whose weights add up to one; each adds the bias of its own expert only.
    zero13, zero2 = np.zeros((1, 2, 4, 8), np.float32), np.zeros((1, 8, 4), np.float32)
    x, weights, ids = normal(0, 3, 8), np.float32([[0.25, 0.75]] * 3), np.array([[0, 1]] * 3)
    run = jitted(jmoe.fused_moe, implementation, b2=np.ones((1, 8), np.float32))
    parts = [run(x, zero13, zero2, weights, ids, expert_map=m) for m in (np.array([0, -1]), np.array([-1, 0]))]
    np.testing.assert_array_equal(parts[0] + parts[1], np.ones((3, 8)))


@functools.cache
def experts(count, recipe="bf16", hidden=16, intermediate=12):
    w13 = normal(1, count, 2, intermediate, hidden, scale=hidden**-0.5)
    w2 = normal(2, count, hidden, intermediate, scale=intermediate**-0.5)
    return (w13, w2) if recipe == "bf16" else (jmoe.quantize(w13, recipe), jmoe.quantize(w2, recipe))


def one_expert(x, w13, w2, e):
    return expert(f64(x), f64(w13)[e], f64(w2)[e])


@each_implementation
def test_f11_one_expert_may_get_every_slot(implementation):
    w13, w2 = experts(5, "int4:group=8")
    x, weights = normal(0, 8, 16), np.full((8, 4), 0.25, np.float32)
    y = jitted(jmoe.fused_moe, implementation)(x, w13, w2, weights, np.full((8, 4), 3))
    assert error(y, one_expert(x, w13, w2, 3)) <= 1e-5


@each_implementation
def test_g01_the_sentinel_of_an_expert_map_is_not_the_last_expert(implementation):
    w13, w2 = experts(2)
    x = normal(0, 1, 16)
    y = jitted(jmoe.fused_moe, implementation)(
        x, w13, w2, np.float32([[0.6, 0.4]]), np.array([[0, 2]]), expert_map=np.array([-1, -1, 0, 1])
    )
    assert error(y, 0.4 * one_expert(x, w13, w2, 0)) <= 1e-5


@each_implementation
def test_g05_global_ids_never_index_local_weights(implementation):
    w13, w2 = experts(8)
    x, ids = normal(0, 16, 16), np.arange(16)[:, None] * 17  # 0 to 255
    expert_map = np.where(np.arange(256) // 8 == 17 * 3 // 8, np.arange(256) % 8, -1)  # experts 48 to 55 are here
    y = np.asarray(
        jitted(jmoe.fused_moe, implementation)(x, w13, w2, np.ones((16, 1), np.float32), ids, expert_map=expert_map)
    )
    assert error(y[3], one_expert(x[3], w13, w2, 51 % 8)) <= 1e-5
    assert not np.any(np.delete(y, 3, axis=0))


@each_implementation
def test_g08_a_rank_without_experts_gives_zeros(implementation):
    w13, w2 = np.zeros((0, 2, 12, 16), np.float32), np.zeros((0, 16, 12), np.float32)
    ids, weights = np.array([[0, 1]] * 3), np.ones((3, 2), np.float32)
    y = jitted(jmoe.fused_moe, implementation)(normal(0, 3, 16), w13, w2, weights, ids, expert_map=np.array([-1, -1]))
    np.testing.assert_array_equal(y, np.zeros((3, 16)))


@each_implementation
@pytest.mark.parametrize("recipe", ["fp8_tensor", "int4_int8:group=8", "nvfp4_per_token"])
def test_h01_no_tokens(recipe, implementation):
    w13, w2 = experts(3, recipe)
    none = np.zeros((0, 16), np.float32)
    run = jitted(jmoe.fused_moe, implementation)
    assert run(none, w13, w2, np.zeros((0, 2), np.float32), np.zeros((0, 2), np.int32)).shape == (0, 16)
    rows = np.zeros((3, 0, 16), np.float32)
    assert jitted(jmoe.batched_experts, implementation)(rows, np.zeros(3, np.int32), w13, w2).shape == (3, 0, 16)
    first = jax.tree.map(lambda leaf: leaf[0, 0], w13)
    assert jitted(jmoe.linear, implementation)(none, first).shape == (0, 12)


@each_implementation
def test_h02_all_tokens_on_one_expert_of_eight(implementation):
    w13, w2 = experts(8, "fp8_w8a16")
    x = normal(0, 300, 16)
    y = jitted(jmoe.fused_moe, implementation)(x, w13, w2, np.ones((300, 1), np.float32), np.full((300, 1), 7))
    assert error(y, one_expert(x, w13, w2, 7)) <= 1e-5


@each_implementation
def test_h05_one_token_and_512_experts(implementation):
    w13, w2 = experts(512)
    x, ids = normal(0, 1, 16), np.arange(10) * 51 + 40
    weights = np.linspace(0.1, 1, 10, dtype=np.float32)
    y = jitted(jmoe.fused_moe, implementation)(x, w13, w2, weights[None], ids[None])
    expected = sum(weights[j] * one_expert(x, w13, w2, e) for j, e in enumerate(ids))
    assert error(y, expected) <= 1e-5


@each_implementation
@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_block:block=8", "int4_int8:group=8"])
def test_h06_nan_beyond_counts_leaks_nowhere(recipe, implementation):
    w13, w2 = experts(3, recipe)
    counts = np.array([0, 5, 3], np.int32)
    rows = normal(0, 3, 7, 16)
    beyond = np.arange(7) >= counts[:, None]
    run = jitted(jmoe.batched_experts, implementation)
    clean, poisoned = (run(np.where(beyond[..., None], np.float32(v), rows), counts, w13, w2) for v in (0, np.nan))
    np.testing.assert_array_equal(poisoned, clean)
    assert np.all(np.isfinite(clean)) and np.all(np.asarray(clean)[beyond] == 0)


OVER_ROWS = {
    "one scale": Scheme(format="e4m3", block=(-1, -1)),
    "square blocks": Scheme(format="int8", block=(4, 8)),
    "one global scale": Scheme(format="e2m1", block=(1, 16), scale_dtype="e4m3", global_scale="tensor"),
}
"""Activations whose scales are measured over several tokens."""


@each_implementation
@pytest.mark.parametrize("tokens", [2, 9], ids=["a block a slot", "sorted slots"])
@pytest.mark.parametrize("scheme", OVER_ROWS.values(), ids=OVER_ROWS)
def test_h06_tokens_without_an_expert_here_touch_no_scale(scheme, tokens, implementation):
    w13, w2 = experts(3, jmoe.Recipe(name="over rows", weight=Scheme(format="e4m3", block=(1, -1)), input=scheme))
    # Of 64 experts 0, 2 and 3 are here, so tokens 0 (no expert), 3 (out of range, elsewhere) and 6 (elsewhere) are not.
    expert_map = np.full(64, -1)
    expert_map[[0, 2, 3]] = 0, 2, 1
    ids = np.array([[-1, -1], [0, 2], [3, -1], [64, 7], [0, 0], [2, 3], [1, 1], [3, 0], [-1, 2]])[:tokens]
    elsewhere = np.isin(np.arange(tokens), [0, 3, 6])
    x, weights = normal(0, tokens, 16), np.ones((tokens, 2), np.float32)
    run = jitted(jmoe.fused_moe, implementation)
    y, *poisoned = (
        np.asarray(run(np.where(elsewhere[:, None], np.float32(v), x), w13, w2, weights, ids, expert_map=expert_map))
        for v in (0, 1e6, np.nan, -np.inf)
    )
    assert np.all(np.any(y, axis=1) != elsewhere)
    for other in poisoned:
        np.testing.assert_array_equal(other, y)


@pytest.mark.parametrize("scheme", OVER_ROWS.values(), ids=OVER_ROWS)
def test_scales_over_several_tokens_are_measured_over_all_of_them(scheme):
    w13, w2 = experts(3, jmoe.Recipe(name="over rows", weight=Scheme(format="e4m3", block=(1, -1)), input=scheme))
    x, ids = normal(0, 9, 16) * np.exp2(np.arange(-4, 5, dtype=np.float32))[:, None], np.arange(18).reshape(9, 2) % 3
    y, expected = (
        jitted(jmoe.fused_moe, implementation)(x, w13, w2, np.ones((9, 2), np.float32), ids)
        for implementation in ("xla", "reference")
    )
    assert error(y, expected) <= 1e-5


@each_implementation
@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_channel", "int4_int8:group=8"])
def test_h06_a_nan_token_stays_in_its_row(recipe, implementation):
    w13, w2 = experts(3, recipe)
    x, ids = normal(0, 5, 16), np.array([[0, 1], [1, 2], [0, 1], [2, -1], [1, 1]])
    x[2, 3] = np.nan
    y = np.asarray(jitted(jmoe.fused_moe, implementation)(x, w13, w2, np.ones((5, 2), np.float32), ids))
    assert np.all(np.isnan(y[2]))
    assert np.all(np.isfinite(np.delete(y, 2, axis=0)))


STATIC_INT8 = Scheme(format="int8", block=(-1, -1), static=True)


@each_implementation
@pytest.mark.parametrize("scheme", [*OVER_ROWS.values(), STATIC_INT8], ids=[*OVER_ROWS, "one given scale"])
def test_h06_a_nan_token_stays_in_its_row_where_rows_share_scales(scheme, implementation):
    recipe = jmoe.Recipe(name="over rows", weight=Scheme(format="int8", block=(1, -1)), input=scheme)
    w13, w2 = experts(3, recipe)
    w = jax.tree.map(lambda leaf: leaf[0, 0], w13)
    ids, weights = np.array([[0, 1], [1, 2], [0, 1], [2, -1], [1, 1]]), np.ones((5, 2), np.float32)
    given = {"input_scale": 0.02} if scheme.static else {}
    second = {"intermediate_scale": 0.02} if scheme.static else {}
    linear = jitted(jmoe.linear, implementation, **given)
    moe = jitted(jmoe.fused_moe, implementation, **given, **second)
    x, others = normal(0, 5, 16), [0, 1, 3, 4]
    x[2, 3] = 0
    expected = np.asarray(linear(x, w))
    for bad in (np.nan, np.inf):
        x[2, 3] = bad
        y, z = np.asarray(linear(x, w)), np.asarray(moe(x, w13, w2, weights, ids))
        assert np.all(np.isnan(y[2])) and np.all(np.isnan(z[2]))
        np.testing.assert_array_equal(y[others], expected[others])  # it counts for no scale either
        assert np.all(np.isfinite(z[others]))


@each_implementation
@pytest.mark.parametrize("recipe", ["fp8_block:block=8", "mxfp4", "bf16"])
def test_h07_an_expert_that_nobody_uses_may_hold_anything(recipe, implementation):
    w13, w2 = experts(4, recipe)

    def poison(leaf):
        kind = np.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 255
        return jnp.asarray(leaf).at[2].set(jnp.asarray(kind, leaf.dtype))

    x, ids, weights = normal(0, 6, 16), np.array([[0, 1], [1, 3], [-1, 3], [0, 0], [3, -1], [1, 0]]), np.ones((6, 2))
    run = jitted(jmoe.fused_moe, implementation)
    y = run(x, w13, w2, weights.astype(np.float32), ids)
    bad13, bad2 = jax.tree.map(poison, (w13, w2))
    np.testing.assert_array_equal(run(x, bad13, bad2, weights.astype(np.float32), ids), y)
    assert np.all(np.isfinite(y))


@each_implementation
@pytest.mark.parametrize("hidden, recipe", [(32, "mxfp4"), (2880, "fp8_w8a16")])
def test_h10_h18_sizes_below_a_tile_and_between_powers_of_two(hidden, recipe, implementation):
    w13, w2 = experts(2, recipe, hidden=hidden, intermediate=48)
    x = normal(0, 4, hidden)
    ids = np.array([[1], [0], [1], [1]])
    y = jitted(jmoe.fused_moe, implementation)(x, w13, w2, np.ones((4, 1), np.float32), ids)
    expected = [one_expert(x[t], w13, w2, e) for t, (e,) in enumerate(ids)]
    assert error(y, expected) <= 1e-5


@each_implementation
@pytest.mark.parametrize("recipe", ["fp8_channel", "int4_fp8:group=8"])
def test_j03_what_is_quantized_is_never_served_unquantised(recipe, implementation):
    w = normal(1, 24, 16)
    quantized, x = jmoe.quantize(w, recipe), normal(0, 5, 16)
    run = functools.partial(jmoe.linear, implementation=implementation)
    y = jax.jit(run)(x, quantized)
    codes = jmoe.quantize(x, quantized.input_scheme)
    assert error(y, f64(codes) @ f64(quantized).T) <= 1e-6
    assert error(y, f64(x) @ f64(w).T) >= 0.01
    ((op, _),) = jmoe.explain(run, x, quantized).entries
    assert op.recipe.name == recipe
