import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmoe import Routing, route


def logit(p):
    """The logit whose sigmoid is p."""
    return np.log(p / (1 - np.asarray(p, np.float64))).astype(np.float32)


def check(routed, ids, weights, tolerance=1e-6):
    np.testing.assert_array_equal(routed.ids, ids)
    np.testing.assert_allclose(routed.weights, weights, rtol=tolerance)
    assert (routed.ids.dtype, routed.weights.dtype) == (jnp.int32, jnp.float32)


# e^1 = 2.7182818, e^2 = 7.3890561, e^3 = 20.085537: of logits (0, 1, 2, 3) softmax is (1, e, e^2, e^3) / 31.192875.
ROW = [[0.5, 2.0, -1.0, 0.25]]
LADDER = jnp.array([[0.0, 1, 2, 3], [3, 2, 1, 0]], jnp.float32)


@pytest.mark.parametrize(
    "routing, weights",
    [
        (Routing(top_k=2), [0.6439143, 0.2368828]),
        (Routing(top_k=2, renormalize=True), [0.7310586, 0.2689414]),  # 1 / (1 + e^-1) and the rest
        (Routing(top_k=2, order="topk_score"), [0.7310586, 0.2689414]),  # softmax over the two: the same numbers
        (Routing(top_k=2, score="sigmoid"), [0.9525741, 0.8807971]),
        (Routing(top_k=2, score="sigmoid", order="topk_score"), [0.9525741, 0.8807971]),
        (Routing(top_k=2, score="sigmoid", renormalize=True), [0.5195752, 0.4804248]),
        (Routing(top_k=2, score="sqrtsoftplus"), [1.7460204, 1.4583991]),  # sqrt(log(1 + e^3)), sqrt(log(1 + e^2))
        (Routing(top_k=2, scale=2.5), [1.6097858, 0.5922070]),
        (Routing(top_k=1, score="sigmoid", order="topk_score", weight_on_input=True), [0.9525741]),
    ],
)
def test_scores_orders_and_scale(routing, weights):
    ids = [[3, 2], [0, 1]]
    check(route(LADDER, routing), [row[: routing.top_k] for row in ids], [weights, weights])


def test_identity_weight_is_none_without_identity_experts():
    assert route(LADDER, Routing(top_k=2)).identity_weight is None


def test_identity_experts_add_x_itself():
    """Of six logits the last two are identity experts; scores are sigmoids."""
    logits = logit([[0.9, 0.1, 0.2, 0.3, 0.8, 0.05], [0.1, 0.2, 0.3, 0.05, 0.9, 0.8], [0.9, 0.8, 0.1, 0.2, 0.3, 0.4]])
    routed = route(logits, Routing(top_k=2, score="sigmoid", scale=2.0, n_identity=2))
    check(routed, [[0, -1], [-1, -1], [0, 1]], [[1.8, 0], [0, 0], [1.8, 1.6]])
    np.testing.assert_allclose(routed.identity_weight, [1.6, 3.4, 0], rtol=1e-6)
    assert routed.identity_weight.dtype == jnp.float32


def test_identity_experts_take_their_share_of_a_renormalised_sum():
    routed = route(logit([[0.6, 0.1, 0.2, 0.3]]), Routing(top_k=2, score="sigmoid", renormalize=True, n_identity=1))
    check(routed, [[0, -1]], [[2 / 3, 0]])
    np.testing.assert_allclose(routed.identity_weight, [1 / 3], rtol=1e-6)


def test_f01_experts_of_lost_groups_stay_out_even_when_all_choices_are_negative():
    routing = Routing(top_k=2, score="sigmoid", n_group=2, topk_group=1)
    routed = route(logit([[0.9, 0.8, 0.1, 0.2]]), routing, bias=jnp.full(4, -10.0))
    check(routed, [[0, 1]], [[0.9, 0.8]])


def test_f02_a_group_scores_the_sum_of_its_two_best_with_a_bias():
    """[.9, 0] against [.6, .5]: 1.1 is more than .9."""
    routing = Routing(top_k=1, score="sigmoid", n_group=2, topk_group=1)
    logits = logit([[0.9, 1e-6, 0.6, 0.5]])
    check(route(logits, routing, bias=jnp.zeros(4)), [[2]], [[0.6]])
    # Without a bias it is the best one alone.
    check(route(logits, routing), [[0]], [[0.9]])


def test_a_group_of_one_expert_scores_that_one():
    routing = Routing(top_k=2, score="sigmoid", n_group=4, topk_group=2)
    check(route(logit([[0.2, 0.9, 0.1, 0.6]]), routing, bias=jnp.zeros(4)), [[1, 3]], [[0.9, 0.6]])


def test_the_bias_chooses_and_does_not_weigh():
    routed = route(
        logit([[0.9, 0.8, 0.1, 0.2]]), Routing(top_k=2, score="sigmoid"), bias=jnp.array([0, -1, 0.85, 0], jnp.float32)
    )
    check(routed, [[2, 0]], [[0.1, 0.9]])


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("order", ["score_topk", "topk_score"])
def test_f04_of_equal_logits_the_lowest_ids_win(score, order):
    routed = route(jnp.full((3, 8), 0.25), Routing(top_k=4, score=score, order=order))
    np.testing.assert_array_equal(routed.ids, [[0, 1, 2, 3]] * 3)


def test_f04_of_equal_groups_the_lowest_win():
    routing = Routing(top_k=3, score="sigmoid", n_group=4, topk_group=2)
    np.testing.assert_array_equal(route(jnp.zeros((1, 8)), routing, bias=jnp.zeros(8)).ids, [[0, 1, 2]])


def test_f05_the_scale_counts_exactly_once():
    logits = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    routing = Routing(top_k=4, score="sigmoid", renormalize=True, n_group=4, topk_group=2, scale=2.5)
    np.testing.assert_allclose(route(logits, routing, bias=np.zeros(16)).weights.sum(axis=-1), [2.5] * 5, rtol=1e-6)


@pytest.mark.parametrize(
    "routing",
    [
        Routing(top_k=3),
        Routing(top_k=3, renormalize=True),
        Routing(top_k=3, order="topk_score"),
        Routing(top_k=3, score="sigmoid", n_group=4, topk_group=2),
        Routing(top_k=3, score="sqrtsoftplus", renormalize=True),
    ],
)
@pytest.mark.parametrize("bias", [None, np.linspace(-1, 1, 8, dtype=np.float32)])
def test_f09_nan_logits_stay_in_their_row_and_ids_stay_distinct(routing, bias):
    if routing.order == "topk_score":
        bias = None
    logits = np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32)
    clean = route(logits, routing, bias=bias)
    logits[1] = np.nan
    logits[2, 5] = np.nan
    routed = route(logits, routing, bias=bias)
    assert all(len(set(row)) == 3 for row in np.asarray(routed.ids).tolist())
    assert np.all((routed.ids >= 0) & (routed.ids < 8))
    assert np.isnan(routed.weights[1]).all()
    for row in (0, 3):
        np.testing.assert_array_equal(routed.ids[row], clean.ids[row])
        np.testing.assert_array_equal(routed.weights[row], clean.weights[row])


@pytest.mark.parametrize(
    "routing, experts, message",
    [
        (Routing(top_k=2, n_group=4), 6, r"n_group=4 does not divide 6 experts"),
        (Routing(top_k=2, n_group=8), 4, r"n_group=8 does not divide 4 experts"),
        (Routing(top_k=3, n_group=4, topk_group=1), 8, r"top_k=3 is more than the 2 experts that routing leaves"),
        (Routing(top_k=9), 8, r"top_k=9 is more than the 8 experts that routing leaves"),
        (Routing(top_k=1, n_identity=8), 8, r"n_identity=8 leaves none of 8 experts"),
    ],
)
def test_f16_groups_and_top_k_that_do_not_fit_are_refused(routing, experts, message):
    with pytest.raises(ValueError, match=message):
        route(jnp.zeros((2, experts)), routing)


def test_i05_bfloat16_logits_are_scored_in_float32():
    """1 / (1 + e^-2^-4) is 0.5156199, and 0.515625 in bfloat16."""
    logits = jnp.array([[8.0625, 8.0, -100.0]], jnp.bfloat16)
    check(route(logits, Routing(top_k=2)), [[0, 1]], [[0.5156199, 0.4843801]])


def test_i05_logits_that_differ_in_the_last_bits_of_float32_stay_apart():
    """2^-10 at magnitude 8 is lost in bfloat16, where 8 is followed by 8.0625; ids 1 and 3 win, not ids 0 and 1."""
    logits = jnp.array([[8.0, 8 + 2**-10, 8 - 2**-10, 8 + 2**-11]], jnp.float32)
    np.testing.assert_array_equal(route(logits, Routing(top_k=2)).ids, [[1, 3]])
    rounded = route(logits.astype(jnp.bfloat16), Routing(top_k=2))
    np.testing.assert_array_equal(rounded.ids, [[0, 1]])


@pytest.mark.parametrize(
    "logits", [jnp.array(ROW, jnp.bfloat16), jnp.array(ROW, jnp.float16), np.array(ROW, np.float64), ROW]
)
def test_logits_of_any_float_dtype_give_float32_weights(logits):
    check(route(logits, Routing(top_k=2)), [[1, 0]], [[0.6912325, 0.1542348]])


def test_lists_are_logits_and_biases():
    check(route([[0.0, 1, 2, 3]], Routing(top_k=1), bias=[0.9, 0, 0, 0.0]), [[0]], [[0.0320586]])


def test_no_tokens():
    routed = route(jnp.zeros((0, 8)), Routing(top_k=2, score="sigmoid", n_group=2, n_identity=1), bias=jnp.zeros(8))
    assert routed.weights.shape == routed.ids.shape == (0, 2)
    assert routed.identity_weight.shape == (0,)


def test_any_leading_axes():
    logits = np.random.default_rng(2).standard_normal((2, 3, 8)).astype(np.float32)
    routing = Routing(top_k=2, score="sigmoid", n_group=2, topk_group=1, n_identity=1)
    whole = route(logits, routing)
    flat = route(logits.reshape(6, 8), routing)
    assert (whole.ids.shape, whole.identity_weight.shape) == ((2, 3, 2), (2, 3))
    for a, b in zip(whole, flat, strict=True):
        np.testing.assert_array_equal(a.reshape(b.shape), b)
    one = route(logits[0, 0], routing)
    assert (one.ids.shape, one.identity_weight.shape) == ((2,), ())
    np.testing.assert_array_equal(one.ids, whole.ids[0, 0])


def test_jit_vmap_and_eval_shape_agree_with_eager():
    logits = np.random.default_rng(3).standard_normal((4, 5, 8)).astype(np.float32)
    bias = np.linspace(-0.1, 0.1, 8, dtype=np.float32)
    routing = Routing(top_k=2, score="sigmoid", n_group=4, topk_group=2, renormalize=True)
    eager = route(logits, routing, bias=bias)
    jitted = jax.jit(route, static_argnums=1)(logits, routing, bias=bias)
    mapped = jax.vmap(lambda one: route(one, routing, bias=bias))(logits)
    for got in (jitted, mapped):
        np.testing.assert_array_equal(got.ids, eager.ids)
        np.testing.assert_allclose(got.weights, eager.weights, rtol=1e-6)
    shapes = jax.eval_shape(lambda x: route(x, routing), jax.ShapeDtypeStruct((4, 5, 8), jnp.bfloat16))
    assert (shapes.weights.shape, shapes.weights.dtype) == ((4, 5, 2), jnp.float32)
    assert (shapes.ids.shape, shapes.ids.dtype) == ((4, 5, 2), jnp.int32)


def test_strict_promotion_and_x64_change_nothing():
    logits = np.random.default_rng(4).standard_normal((3, 8)).astype(np.float32)
    routing = Routing(top_k=2, score="sqrtsoftplus", n_group=2, renormalize=True, scale=2.5, n_identity=1)
    plain = route(logits, routing, bias=np.zeros(8, np.float32))
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        strict = route(logits, routing, bias=np.zeros(8))
    for a, b in zip(plain, strict, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_gradients_flow_through_the_weights():
    """d softmax_i / d logit_j = s_i (1[i = j] - s_j), also for experts that were not chosen."""
    gradient = jax.grad(lambda x: route(x, Routing(top_k=1)).weights[0, 0])(LADDER[:1])
    s = np.exp([0, 1, 2, 3]) / np.exp([0, 1, 2, 3]).sum()
    np.testing.assert_allclose(gradient[0], s[3] * (np.array([0, 0, 0, 1]) - s), rtol=1e-5)


def test_gradients_of_a_renormalised_biased_choice():
    """w = s_0 / (s_0 + s_1) with sigmoids s, so dw/dx_0 = w (1 - w) (1 - s_0); the bias and the loser get none."""
    routing = Routing(top_k=2, score="sigmoid", renormalize=True)
    logits, bias = jnp.array(logit([0.8, 0.4, 0.9])), jnp.array([0, 0, -5], jnp.float32)
    gradient, bias_gradient = jax.grad(lambda x, b: route(x, routing, bias=b).weights[0], argnums=(0, 1))(logits, bias)
    w = 0.8 / 1.2
    np.testing.assert_allclose(gradient, [w * (1 - w) * 0.2, -w * (1 - w) * 0.6, 0], rtol=1e-5)
    np.testing.assert_array_equal(bias_gradient, np.zeros(3))


def numpy_route(logits, routing, bias):
    """One row at a time, float64: ids in order of choice, weights, and the smallest gap that a choice hung on."""
    ids, weights, gaps = [], [], []
    for row in logits.astype(np.float64):
        if routing.score == "softmax":
            scores = np.exp(row - row.max())
            scores /= scores.sum()
        else:
            scores = 1 / (1 + np.exp(-row)) if routing.score == "sigmoid" else np.sqrt(np.log1p(np.exp(row)))
        choice = scores.copy() if bias is None else scores + bias
        if routing.order == "topk_score":
            choice = row.copy()
        size = len(row) // routing.n_group
        group_scores = []
        for g in range(routing.n_group):
            best = np.sort(choice[g * size : (g + 1) * size])[::-1]
            group_scores.append(best[:2].sum() if bias is not None else best[0])
        kept = sorted(range(routing.n_group), key=lambda g: -group_scores[g])[: routing.topk_group]
        open_to = [e for e in range(len(row)) if e // size in kept]
        order = sorted(open_to, key=lambda e: -choice[e])
        chosen = order[: routing.top_k]
        w = scores[chosen]
        if routing.order == "topk_score" and routing.score == "softmax":
            w = np.exp(row[chosen] - row.max())
            w /= w.sum()
        w = w / w.sum() if routing.renormalize else w
        ids.append(chosen)
        weights.append(w * routing.scale)
        ranked = [np.sort(group_scores), np.sort(choice[order[: routing.top_k + 1]])]
        gaps.append(min(np.diff(r).min(initial=np.inf) for r in ranked))
    shape = (len(logits), routing.top_k)
    return np.array(ids).reshape(shape), np.array(weights).reshape(shape), np.array(gaps)


@st.composite
def routings(draw):
    n_group = draw(st.sampled_from([1, 1, 2, 4]))
    experts = n_group * draw(st.sampled_from([1, 2, 3, 8]))
    topk_group = draw(st.integers(1, n_group))
    order = "score_topk" if n_group > 1 else draw(st.sampled_from(["score_topk", "topk_score"]))
    routing = Routing(
        top_k=draw(st.integers(1, topk_group * experts // n_group)),
        score=draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"])),
        order=order,
        renormalize=draw(st.booleans()),
        n_group=n_group,
        topk_group=topk_group,
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    biased = order == "score_topk" and draw(st.booleans())
    return routing, experts, biased, draw(st.integers(0, 2**32 - 1))


@given(routings())
def test_any_routing_against_numpy(case):
    routing, experts, biased, seed = case
    rng = np.random.default_rng(seed)
    logits = (2 * rng.standard_normal((7, experts))).astype(np.float32)
    bias = (0.3 * rng.standard_normal(experts)).astype(np.float32) if biased else None
    got = route(logits, routing, bias=bias)
    ids, weights, gaps = numpy_route(logits, routing, bias)
    clear = gaps > 1e-5  # float32 may order closer choices differently
    np.testing.assert_array_equal(np.asarray(got.ids)[clear], ids[clear])
    np.testing.assert_allclose(np.asarray(got.weights)[clear], weights[clear], rtol=1e-5)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"top_k": 0}, ValueError, r"top_k=0 must be at least 1"),
        ({"top_k": 2.0}, TypeError, r"top_k=2\.0 must be an integer"),
        ({"top_k": True}, TypeError, r"top_k=True must be an integer"),
        ({"top_k": 2, "score": "tanh"}, ValueError, r"score='tanh' must be 'softmax', 'sigmoid' or 'sqrtsoftplus'"),
        ({"top_k": 2, "order": "first"}, ValueError, r"order='first' must be 'score_topk' or 'topk_score'"),
        ({"top_k": 2, "n_group": 2, "topk_group": 3}, ValueError, r"topk_group=3 must lie in \[1, n_group=2\]"),
        ({"top_k": 2, "n_group": 2, "topk_group": 0}, ValueError, r"topk_group=0 must lie in \[1, n_group=2\]"),
        ({"top_k": 2, "n_group": "4"}, TypeError, r"n_group='4' must be an integer"),
        ({"top_k": 2, "n_group": 2, "order": "topk_score"}, ValueError, r"n_group=2 chooses groups by score, which"),
        ({"top_k": 2, "weight_on_input": True}, ValueError, r"weight_on_input=True needs top_k=1, not 2"),
        ({"top_k": 2, "n_identity": -1}, ValueError, r"n_identity=-1 must not be negative"),
        ({"top_k": 2, "scale": float("nan")}, ValueError, r"scale=nan must be finite"),
        ({"top_k": 2, "scale": "big"}, TypeError, r"scale='big' must be a number"),
    ],
)
def test_a_wrong_routing_is_refused_in_a_sentence(options, error, message):
    with pytest.raises(error, match=message):
        Routing(**options)


@pytest.mark.parametrize(
    "logits, options, error, message",
    [
        (jnp.zeros((2, 4), jnp.int32), {}, TypeError, r"logits has dtype int32, but router logits are floating point"),
        (jnp.float32(1), {}, ValueError, r"logits has shape \(\), but it is \(\.\.\., E\)"),
        (None, {}, TypeError, r"logits is None, but it is an array"),
        (
            jnp.zeros((2, 4)),
            {"bias": jnp.zeros(3)},
            ValueError,
            r"bias has shape \(3,\), but .* \(E,\) = \(4,\)",
        ),
        (jnp.zeros((2, 4)), {"bias": jnp.zeros((1, 4))}, ValueError, r"bias has shape \(1, 4\)"),
        (jnp.zeros((2, 4)), {"bias": jnp.zeros(4, int)}, TypeError, r"bias has dtype int32, but it is floating point"),
    ],
)
def test_wrong_arguments_of_route_are_refused_in_a_sentence(logits, options, error, message):
    with pytest.raises(error, match=message):
        route(logits, Routing(top_k=2), **options)


def test_a_bias_needs_scores_to_correct():
    with pytest.raises(ValueError, match=r"bias is given, but it corrects scores, which order='topk_score' has only"):
        route(jnp.zeros((2, 4)), Routing(top_k=2, order="topk_score"), bias=jnp.zeros(4))


def test_a_number_is_no_routing():
    with pytest.raises(TypeError, match=r"routing=2 must be a Routing"):
        route(jnp.zeros((2, 4)), 2)


# Gradients where float32 underflows on the way, against the formulas in float64.


def test_gradients_of_sqrtsoftplus_at_any_logit():
    logits = np.array([[-np.inf, -1e4, -250, -105, -88, -40, -20.5, -19.5, -1, 0, 5, 100]], np.float32)
    routing = Routing(top_k=logits.shape[-1], score="sqrtsoftplus")
    x = logits.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        root = np.sqrt(np.log1p(np.exp(x)))
        slope = np.nan_to_num(1 / (1 + np.exp(-x)) / (2 * root))  # sqrt(f)' = f' / (2 sqrt(f)), f' = sigmoid
        slope = np.where(x < -40, np.exp(x / 2) / 2, slope)
    np.testing.assert_allclose(route(logits, routing).weights, root[:, ::-1], rtol=1e-6, atol=1e-37)
    gradient = jax.grad(lambda logits: jnp.sum(route(logits, routing).weights))(logits)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus", "softmax"])
@pytest.mark.parametrize("top", [-300.0, -84.0, -60.0, -46.0, -30.0, 0.0, 3.0])
def test_gradients_of_renormalised_weights_of_any_size(score, top):
    # Sigmoids of -46 and sums of 1e-20 are alike; the square of either underflows.
    logits = np.array([[0, -0.5, -1.25, -3]], np.float32) + np.float32(top)
    each = np.array([[1.0, -2.0, 3.0]], np.float32)
    routing = Routing(top_k=3, score=score, renormalize=True)
    gradient = jax.grad(lambda logits: jnp.sum(route(logits, routing).weights * each))(logits)

    def formula(logits):
        scores = {
            "sigmoid": jax.nn.sigmoid,
            "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
            "softmax": jax.nn.softmax,
        }[score](logits)[:, :3]
        return jnp.sum(scores / (jnp.sum(scores) + 1e-20) * each)

    with jax.enable_x64(True):
        expected = np.asarray(jax.grad(formula)(logits.astype(np.float64)))
    # Softmax sees differences of logits, which a float32 of -300 holds to 3e-5.
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7 * np.abs(expected).max() + 1e-37)


def test_renormalised_weights_are_the_quotient_bit_for_bit():
    logits = np.random.default_rng(0).uniform(-60, 20, (64, 8)).astype(np.float32)
    for score in ("sigmoid", "sqrtsoftplus"):
        plain = route(logits, Routing(top_k=3, score=score)).weights
        found = route(logits, Routing(top_k=3, score=score, renormalize=True)).weights
        expected = jax.jit(lambda w: w / (jnp.sum(w, axis=-1, keepdims=True) + 1e-20))(plain)
        np.testing.assert_array_equal(found, expected)
