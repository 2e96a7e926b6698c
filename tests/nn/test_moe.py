"""jmoe.nn.FusedMoE: routing in float32, layouts of dense weights, shared experts, and the operation's results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmoe
from jmoe.nn import FusedMoE, Linear

E, H, I, K = 4, 32, 16, 2
ROUTING = jmoe.Routing(top_k=K, renormalize=True)


def weights(seed=0, experts=E, hidden=H, intermediate=I):
    keys = jax.random.split(jax.random.key(seed), 3)
    w13 = jax.random.normal(keys[0], (experts, 2, intermediate, hidden)) / hidden**0.5
    w2 = jax.random.normal(keys[1], (experts, hidden, intermediate)) / intermediate**0.5
    return w13, w2, jax.random.normal(keys[2], (experts, hidden))


def tokens(seed=9):
    return jax.random.normal(jax.random.key(seed), (2, 5, H))


def shapes(module):
    return jax.tree.map(lambda x: (x.shape, x.dtype), nnx.to_pure_dict(nnx.state(module)))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "int4:group=16", "nvfp4_per_token"])
def test_it_is_routing_and_the_operation(recipe):
    w13, w2, router = weights()
    moe = FusedMoE.from_dense(w13, w2, ROUTING, router_weight=router, recipe=recipe)
    x = tokens()
    routed = jmoe.route(jnp.einsum("bth,eh->bte", x, router, precision="highest"), ROUTING)
    if recipe != "bf16":
        # One global scale an expert, for gate and up together.
        w13, w2 = jmoe.quantize(w13, recipe, shared=(-3,)), jmoe.quantize(w2, recipe)
    expected = jmoe.fused_moe(x, w13, w2, routed.weights, routed.ids)
    np.testing.assert_allclose(moe(x), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(moe.route(x).ids, routed.ids)


def test_nvfp4_has_one_global_scale_an_expert():
    w13 = jnp.ones((2, 2, 16, 32)).at[0, 1].set(2.0).at[1].set(3.0)
    moe = FusedMoE.from_dense(
        w13, jnp.ones((2, 32, 16)), ROUTING, router_weight=jnp.ones((2, 32)), recipe="nvfp4_w4a16"
    )
    # amax / 2688, the up projection's amax of 2 for both halves of expert 0.
    expected = np.asarray([[2, 2], [3, 3]], np.float32) * (np.float32(1) / np.float32(2688))
    np.testing.assert_array_equal(moe.w13_global_scale.get_value()[..., 0, 0], expected)


def test_every_layout_of_dense_weights_gives_the_same_layer():
    w13, w2, router = weights()
    gate, up = w13[:, 0], w13[:, 1]
    rows = jnp.concatenate([gate, up], axis=1)
    forms = {
        "halves": (w13, w2, "out_in"),
        "rows": (rows, w2, "out_in"),
        "pair": ((gate, up), w2, "out_in"),
        "columns": (rows.swapaxes(1, 2), w2.swapaxes(1, 2), "in_out"),
        "pair of columns": ((gate.swapaxes(1, 2), up.swapaxes(1, 2)), w2.swapaxes(1, 2), "in_out"),
    }
    for recipe in ("bf16", "int8"):
        first, *others = (
            nnx.state(FusedMoE.from_dense(a, b, ROUTING, router_weight=router, layout=layout, recipe=recipe))
            for a, b, layout in forms.values()
        )
        for other in others:
            jax.tree.map(np.testing.assert_array_equal, first, other)


def test_layouts_that_do_not_fit_are_refused():
    w13, w2, router = weights()
    with pytest.raises(ValueError, match="layout='oi' must be 'out_in'"):
        FusedMoE.from_dense(w13, w2, ROUTING, router_weight=router, layout="oi")
    with pytest.raises(ValueError, match=r"w13 has shape \(4, 31, 32\), but with layout='out_in' it is \(E, 2I, H\)"):
        FusedMoE.from_dense(jnp.ones((4, 31, 32)), w2, ROUTING, router_weight=router)
    with pytest.raises(ValueError, match=r"w2 has shape \(4, 16, 32\), but this layer's is \(4, 32, 16\)"):
        FusedMoE.from_dense(w13, w2.swapaxes(1, 2), ROUTING, router_weight=router)
    with pytest.raises(ValueError, match=r"w13 has shape \(4, 16, 32\), but it is \(E, 2, I, H\)"):
        FusedMoE.from_quantized(w13[:, 0], w2, ROUTING, router_weight=router)
    with pytest.raises(ValueError, match=r"router_weight has shape \(4, 31\), but here it is \(4, 32\)"):
        FusedMoE.from_dense(w13, w2, ROUTING, router_weight=router[:, 1:])


def test_e01_gate_comes_first():
    # I = H = 1: silu(1 * x) * (2 * x) = 1.46212 for x = 1; the other order gives 1.76159.
    moe = FusedMoE.from_dense(
        (jnp.ones((1, 1, 1)), 2 * jnp.ones((1, 1, 1))),
        jnp.ones((1, 1, 1)),
        jmoe.Routing(top_k=1),
        router_weight=jnp.zeros((1, 1)),
    )
    assert float(moe(jnp.ones((1,)))[0]) == pytest.approx(1.46212, abs=1e-5)


def test_ungated_experts_have_one_half():
    w = jnp.full((1, 3, 2), 2.0)
    moe = FusedMoE.from_dense(
        w, jnp.ones((1, 2, 3)), jmoe.Routing(top_k=1), router_weight=jnp.zeros((1, 2)), gated=False, activation="relu2"
    )
    assert moe.w13.shape == (1, 1, 3, 2)
    assert np.asarray(moe(jnp.ones((2,)))).tolist() == [48.0, 48.0]  # 3 * (2 + 2)**2


def test_e06_biases_of_experts_and_of_the_shared_expert_are_added_once():
    zero13, zero2 = jnp.zeros((E, 2, I, H)), jnp.zeros((E, H, I))
    shared = Linear.from_dense(jnp.zeros((H, H)), jnp.full((H,), 10.0))
    moe = FusedMoE.from_dense(
        zero13,
        zero2,
        ROUTING,
        router_weight=weights()[2],
        b13=jnp.zeros((E, 2 * I)),
        b2=jnp.ones((E, H)),
        shared=shared,
    )
    # Router weights are renormalised, so a bias of 1 in every expert adds 1.
    np.testing.assert_allclose(moe(tokens()), 11.0, rtol=1e-6)


def test_f07_the_shared_expert_is_not_scaled_by_the_router():
    routing = jmoe.Routing(top_k=K, renormalize=True, scale=2.5)
    shared = Linear.from_dense(jnp.zeros((H, H)), jnp.ones((H,)))
    zero = FusedMoE.from_dense(
        jnp.zeros((E, 2, I, H)), jnp.zeros((E, H, I)), routing, router_weight=weights()[2], shared=shared
    )
    np.testing.assert_array_equal(zero(tokens()), jnp.ones((2, 5, H)))


def test_f05_the_routed_scaling_factor_is_applied_once():
    routing = jmoe.Routing(top_k=K, renormalize=True, scale=2.5)
    moe = FusedMoE.from_dense(
        jnp.zeros((E, 2, I, H)), jnp.zeros((E, H, I)), routing, router_weight=weights()[2], b2=jnp.ones((E, H))
    )
    np.testing.assert_allclose(moe(tokens()), 2.5, rtol=1e-6)


def test_a_shared_gate_multiplies_the_shared_expert():
    shared = Linear.from_dense(jnp.zeros((H, H)), jnp.full((H,), 4.0))
    moe = FusedMoE.from_dense(
        jnp.zeros((E, 2, I, H)),
        jnp.zeros((E, H, I)),
        ROUTING,
        router_weight=weights()[2],
        shared=shared,
        shared_gate_weight=jnp.zeros((H,)),
    )
    np.testing.assert_array_equal(moe(tokens()), jnp.full((2, 5, H), 2.0))  # sigmoid(0) = 1/2


def test_identity_experts_add_x_with_their_weight():
    # Router logits: experts 0 and 1 are real, 2 and 3 identities; the largest two are 2 and 3 for x = 1.
    routing = jmoe.Routing(top_k=2, renormalize=True, n_identity=2)
    moe = FusedMoE.from_dense(
        jnp.ones((2, 2, 1, 1)),
        jnp.ones((2, 1, 1)),
        routing,
        router_weight=jnp.asarray([[0.0], [0.0], [5.0], [5.0]]),
    )
    assert float(moe(jnp.ones((1,)))[0]) == pytest.approx(1.0)


def test_i05_the_router_is_float32_for_bfloat16_activations():
    # In bfloat16 8 and 8 + 2**-10 are one number; a router computed there ties and takes expert 0.
    x = jnp.asarray([8.0, 2.0**-10], jnp.bfloat16)
    router = jnp.asarray([[1.0, 0.0], [1.0, 1.0]], jnp.bfloat16)
    moe = FusedMoE.from_dense(
        jnp.ones((2, 2, 4, 2)), jnp.ones((2, 2, 4)), jmoe.Routing(top_k=1), router_weight=router, dtype="bfloat16"
    )
    assert moe.route(x).ids.tolist() == [1]
    assert moe.route(x).weights.dtype == jnp.float32


def test_e08_the_weight_on_the_input_goes_through_the_activation():
    routing = jmoe.Routing(top_k=1, score="sigmoid", order="topk_score", weight_on_input=True)
    moe = FusedMoE.from_dense(jnp.ones((1, 2, 1, 1)), jnp.ones((1, 1, 1)), routing, router_weight=jnp.zeros((1, 1)))
    # x = 2, weight sigmoid(0) = 0.5: silu(1) * 1.
    assert float(moe(jnp.full((1,), 2.0))[0]) == pytest.approx(0.73106, abs=1e-5)


def test_an_expert_map_leaves_out_what_is_elsewhere():
    w13, w2, router = weights()
    whole = FusedMoE.from_dense(w13, w2, ROUTING, router_weight=router)
    halves = [
        FusedMoE.from_dense(w13[part], w2[part], ROUTING, router_weight=router, expert_map=m)
        for part, m in ((slice(0, 2), [0, 1, -1, -1]), (slice(2, 4), [-1, -1, 0, 1]))
    ]
    assert halves[0].num_experts == 4 and halves[0].num_local_experts == 2
    np.testing.assert_allclose(sum(m(tokens()) for m in halves), whole(tokens()), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="num_local_experts=2 of 4 needs an expert_map"):
        FusedMoE.from_dense(w13[:2], w2[:2], ROUTING, router_weight=router)
    with pytest.raises(ValueError, match=r"expert_map has shape \(3,\)"):
        FusedMoE.from_dense(w13[:2], w2[:2], ROUTING, router_weight=router, expert_map=[0, 1, -1])


@pytest.mark.parametrize("recipe", jmoe.RECIPES)
def test_an_empty_layer_has_the_shapes_of_a_filled_one(recipe):
    how = jmoe.recipe(recipe)
    static = how.input is not None and how.input.static
    w13, w2, router = (w.astype(jnp.bfloat16) for w in weights(hidden=30, intermediate=15))
    filled = FusedMoE.from_dense(
        w13,
        w2,
        ROUTING,
        router_weight=router.astype(jnp.float32),
        recipe=recipe,
        input_scale=0.5 if static else None,
        intermediate_scale=jnp.ones((E,)) if static else None,
    )
    abstract = nnx.eval_shape(lambda: FusedMoE(30, 15, E, ROUTING, recipe=recipe))
    assert shapes(abstract) == shapes(filled)
    assert nnx.graphdef(abstract) == nnx.graphdef(filled)


def test_static_scales_are_variables():
    w13, w2, router = weights()
    scale2 = jnp.asarray([0.1, 0.2, 0.3, 0.4])
    moe = FusedMoE.from_dense(
        w13, w2, ROUTING, router_weight=router, recipe="fp8_tensor_static", input_scale=0.02, intermediate_scale=scale2
    )
    assert moe.w13_input_scale.shape == ()
    np.testing.assert_array_equal(moe.w2_input_scale.get_value(), scale2)
    with pytest.raises(ValueError, match="w2_input_scale is missing"):
        FusedMoE.from_dense(w13, w2, ROUTING, router_weight=router, recipe="fp8_tensor_static", input_scale=0.02)
    with pytest.raises(ValueError, match=r"w2_input_scale has shape \(3,\), but it is \(\) or \(4,\) here"):
        moe.set_w2(moe.qw2, input_scale=jnp.ones((3,)))


def test_w13_and_w2_may_be_quantized_differently():
    w13, w2, router = weights()
    moe = FusedMoE.from_dense(w13, w2, ROUTING, router_weight=router)
    moe.set_w13(jmoe.quantize(w13, "int4:group=16"))
    moe.set_w2(jmoe.quantize(w2, "int8_w8a16"))
    routed = moe.route(tokens())
    expected = jmoe.fused_moe(tokens(), moe.qw13.dequantize(), moe.qw2.dequantize(), routed.weights, routed.ids)
    np.testing.assert_allclose(moe(tokens()), expected, rtol=1e-4, atol=1e-5)


def test_gradients_reach_router_and_dense_experts():
    w13, w2, router = weights()
    moe = FusedMoE.from_dense(w13, w2, ROUTING, router_weight=router)
    gradient = nnx.grad(lambda m: jnp.sum(m(tokens()) ** 2))(moe)
    assert set(gradient) == {"w13", "w2", "router_weight"}
    assert all(float(jnp.linalg.norm(g)) > 0 for g in jax.tree.leaves(gradient))
    moe.set_w13(jmoe.quantize(w13, "int8_w8a16"))
    assert set(nnx.grad(lambda m: jnp.sum(m(tokens())))(moe)) == {"w2", "router_weight"}


def test_it_works_under_jit_strict_promotion_and_x64():
    w13, w2, router = weights()
    moe = FusedMoE.from_dense(w13, w2, ROUTING, router_weight=router, recipe="int8")
    x = tokens()
    expected = moe(x)
    with jax.numpy_dtype_promotion("strict"):
        np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(moe, x), expected, rtol=1e-5, atol=1e-6)
    with jax.enable_x64(True):
        np.testing.assert_allclose(moe(x), expected, rtol=1e-5, atol=1e-6)


def test_a_shared_gate_needs_a_shared_expert():
    with pytest.raises(ValueError, match="shared_gate=True gates a shared expert, but shared is None"):
        FusedMoE(H, I, E, ROUTING, shared_gate=True)
