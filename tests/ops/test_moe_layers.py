"""Whole MoE layers of model families against what their own modules computed (../shared/fixtures/moe_layers)."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmoe
from jmoe.checkpoint.safetensors import open_safetensors


@dataclass(frozen=True)
class Family:
    """How a family routes, and how its file lays out experts."""

    routing: jmoe.Routing
    activation: str = "silu"
    transposed: bool = False  # (in, out)
    interleaved: bool = False  # gate and up take turns
    shared: str | None = None


FAMILIES = {
    "mixtral": Family(jmoe.Routing(top_k=2, renormalize=True)),
    "qwen3_moe_norm": Family(jmoe.Routing(top_k=2, renormalize=True)),
    # Its config has norm_topk_prob true, whatever its name says, and its weights sum to 1.
    "qwen3_moe_nonorm": Family(jmoe.Routing(top_k=2, renormalize=True)),
    "qwen3_next": Family(jmoe.Routing(top_k=2, renormalize=True), shared="shared_expert"),
    "deepseek_v3": Family(
        jmoe.Routing(top_k=2, score="sigmoid", renormalize=True, n_group=4, topk_group=2, scale=2.5),
        shared="shared_experts",
    ),
    "gpt_oss": Family(
        jmoe.Routing(top_k=4, order="topk_score"),
        activation="swigluoai",
        transposed=True,
        interleaved=True,
    ),
    "llama4": Family(
        jmoe.Routing(top_k=1, score="sigmoid", order="topk_score", weight_on_input=True),
        transposed=True,
        shared="shared_expert",
    ),
}
GROUPS = ("main", "one", "empty", "hot", "single")


@pytest.fixture(scope="module")
def tensors(shared):
    folder = shared / "fixtures" / "moe_layers"
    if not folder.is_dir():
        pytest.skip("needs ../shared/fixtures/moe_layers")

    @functools.cache
    def read(family):
        with open_safetensors(folder / f"{family}.safetensors") as file:
            return {name: file.read(name) for name in file.tensors}

    return read


def routed_of(family, t, group):
    """The decisions for a group's logits, and for which rows they are the only right ones (no ties)."""
    routing = FAMILIES[family].routing
    if group == "single":
        routing = replace(routing, top_k=1)
    bias = t.get(f"{group}.e_score_correction_bias", t.get("state.gate.e_score_correction_bias"))
    logits = t[f"{group}.router_logits"]
    untied = np.array([len(np.unique(row)) == len(row) for row in logits.astype(np.float32)], bool)
    return jmoe.route(logits, routing, bias=bias), untied


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group", [*GROUPS, "bf16"])
def test_router_decisions(tensors, family, group):
    t = tensors(family)
    routed, untied = routed_of(family, t, group)
    expected_ids, expected_weights = t[f"{group}.topk_ids"], t[f"{group}.topk_weights"].astype(np.float32)
    assert routed.weights.dtype == jnp.float32 and routed.ids.dtype == jnp.int32
    assert routed.ids.shape == expected_ids.shape
    assert np.count_nonzero(untied) >= len(untied) * 0.8
    # DeepSeek's order within a row means nothing, so slots are compared by id.
    by_id, expected_by_id = np.argsort(routed.ids, axis=-1), np.argsort(expected_ids, axis=-1)
    ids, weights = (np.take_along_axis(np.asarray(a), by_id, -1)[untied] for a in (routed.ids, routed.weights))
    np.testing.assert_array_equal(ids, np.take_along_axis(expected_ids, expected_by_id, -1)[untied])
    # A bfloat16 model rounds its weights (gpt-oss its softmax too); ours stay float32.
    tolerance = 2**-7 if group == "bf16" else 2e-6
    expected = np.take_along_axis(expected_weights, expected_by_id, -1)[untied]
    np.testing.assert_allclose(weights, expected, rtol=tolerance, atol=1e-7)


def experts_of(family, t):
    """w13, w2 and their biases as fused_moe takes them."""
    w13, w2 = t["state.experts.gate_up_proj"], t["state.experts.down_proj"]
    b13, b2 = t.get("state.experts.gate_up_proj_bias"), t.get("state.experts.down_proj_bias")
    if FAMILIES[family].transposed:
        w13, w2 = np.swapaxes(w13, 1, 2), np.swapaxes(w2, 1, 2)
    experts, rows, hidden = w13.shape
    if FAMILIES[family].interleaved:
        w13 = w13.reshape(experts, rows // 2, 2, hidden).swapaxes(1, 2)
        b13 = b13.reshape(experts, rows // 2, 2).swapaxes(1, 2)
    else:
        w13 = w13.reshape(experts, 2, rows // 2, hidden)
    return w13, w2, {"b13": b13, "b2": b2}


def sigmoid(x):
    return 0.5 * (1 + np.tanh(0.5 * x))


def shared_expert(family, t, x):
    """The shared expert's part of the output, in NumPy's float64."""
    name = FAMILIES[family].shared
    if name is None:
        return 0
    x = x.astype(np.float64)
    gate, up, down = (t[f"state.{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    g = x @ gate.T
    y = (g * sigmoid(g) * (x @ up.T)) @ down.T
    gate_name = f"state.{name}_gate.weight"
    return y * sigmoid(x @ t[gate_name].T) if gate_name in t else y


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_in_float32(tensors, family, implementation):
    t = tensors(family)
    w13, w2, biases = experts_of(family, t)
    options = {
        "activation": FAMILIES[family].activation,
        "weight_on_input": FAMILIES[family].routing.weight_on_input,
        "implementation": implementation,
    }
    layer = jax.jit(functools.partial(jmoe.fused_moe, **options))
    for group in GROUPS:
        x = t[f"{group}.input"][0]
        routed, _ = routed_of(family, t, group)
        y = np.asarray(layer(x, w13, w2, routed.weights, routed.ids, **biases)) + shared_expert(family, t, x)
        expected = t[f"{group}.output"].reshape(y.shape)
        # Each row by its own size: row 17 is fifty times as large, row 5 is zero in all families without biases.
        size = np.linalg.norm(expected, axis=-1)
        assert np.all(np.linalg.norm(y - expected, axis=-1) <= 1e-5 * size), group
