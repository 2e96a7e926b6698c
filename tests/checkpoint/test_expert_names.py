"""Layers of every family under the names of its published files, and experts in one tensor a layer."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmoe
from jmoe import checkpoint
from jmoe.checkpoint.safetensors import open_safetensors

FAMILIES = Path(__file__).resolve().parents[1] / "data" / "families"
PROJECTIONS, LETTERS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")

# Layer, experts in it, their projections, and some of the linears beside them.
NAMES = {
    "mixtral": ("model.layers.3", "block_sparse_moe.experts", LETTERS, ("self_attn.q_proj", "block_sparse_moe.gate")),
    "qwen2_moe": (
        "model.layers.3",
        "mlp.experts",
        PROJECTIONS,
        ("mlp.shared_expert.up_proj", "mlp.shared_expert_gate"),
    ),
    "qwen3_moe": ("model.layers.3", "mlp.experts", PROJECTIONS, ("self_attn.o_proj", "mlp.gate")),
    "deepseek_v2": ("model.layers.3", "mlp.experts", PROJECTIONS, ("self_attn.kv_a_proj_with_mqa", "self_attn.q_proj")),
    "deepseek_v3": (
        "model.layers.3",
        "mlp.experts",
        PROJECTIONS,
        ("self_attn.q_a_proj", "mlp.shared_experts.down_proj"),
    ),
    "glm4_moe": ("model.layers.3", "mlp.experts", PROJECTIONS, ("self_attn.k_proj", "mlp.shared_experts.gate_proj")),
    "kimi_k2": ("model.layers.3", "mlp.experts", PROJECTIONS, ("self_attn.kv_b_proj", "mlp.gate")),
    "kimi_k25": ("language_model.model.layers.3", "mlp.experts", PROJECTIONS, ("self_attn.q_b_proj", "mlp.gate")),
    "minimax": ("model.layers.3", "block_sparse_moe.experts", LETTERS, ("self_attn.v_proj", "block_sparse_moe.gate")),
    "llama4": ("language_model.model.layers.3", "feed_forward.experts", PROJECTIONS, ("feed_forward.router",)),
    "gpt_oss": ("model.layers.3", "mlp.experts", PROJECTIONS, ("self_attn.q_proj", "mlp.router")),
}
EXPERTS, HIDDEN, INTERMEDIATE = 3, 4, 2


@pytest.mark.parametrize("family", NAMES)
def test_layers_of_every_family_load_by_its_names(write_checkpoint, family):
    layer, experts, (gate, up, down), linears = NAMES[family]
    prefix = f"{layer}.{experts}"
    tensors = {f"{layer}.{name}.weight": np.full((5, 4), i, np.float32) for i, name in enumerate(linears)}
    for e in range(EXPERTS):
        tensors[f"{prefix}.{e}.{gate}.weight"] = np.full((INTERMEDIATE, HIDDEN), 10 * e, np.float32)
        tensors[f"{prefix}.{e}.{up}.weight"] = np.full((INTERMEDIATE, HIDDEN), 10 * e + 1, np.float32)
        tensors[f"{prefix}.{e}.{down}.weight"] = np.full((HIDDEN, INTERMEDIATE), 10 * e + 2, np.float32)
    opened = checkpoint.open(write_checkpoint(tensors))
    assert opened.expert_prefixes == (prefix,)
    w13, w2 = checkpoint.load_experts(opened, prefix)
    np.testing.assert_array_equal(w13[:, :, 1, 3], [[0, 1], [10, 11], [20, 21]])
    np.testing.assert_array_equal(w2[:, 3, 1], [2, 12, 22])
    for i, name in enumerate(linears):
        np.testing.assert_array_equal(checkpoint.load_linear(opened, f"{layer}.{name}"), np.full((5, 4), i))


def halves(w13, w2):
    """Gate and up as halves."""
    return {"gate_up_proj": w13.reshape(EXPERTS, -1, HIDDEN), "down_proj": w2}


def transposed_halves(w13, w2):
    return {name: np.ascontiguousarray(w.swapaxes(1, 2)) for name, w in halves(w13, w2).items()}


def transposed_alternating(w13, w2, b13, b2):
    """gpt-oss's, with their biases."""
    return {
        "gate_up_proj": np.ascontiguousarray(w13.transpose(0, 3, 2, 1)).reshape(EXPERTS, HIDDEN, -1),
        "gate_up_proj_bias": np.ascontiguousarray(b13.swapaxes(1, 2)).reshape(EXPERTS, -1),
        "down_proj": np.ascontiguousarray(w2.swapaxes(1, 2)),
        "down_proj_bias": b2,
    }


@pytest.fixture
def weights():
    rng = np.random.default_rng(0)
    shapes = ((EXPERTS, 2, INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@pytest.fixture
def biases():
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape, np.float32) for shape in ((EXPERTS, 2, INTERMEDIATE), (EXPERTS, HIDDEN))]


def under(prefix, tensors):
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("prefix", ["experts", "language_model.model.layers.0.feed_forward.experts"])
@pytest.mark.parametrize("stored", [halves, transposed_halves])
def test_halves_of_experts_in_one_tensor_are_taken_apart_whichever_way_they_lie(
    write_checkpoint, weights, stored, prefix
):
    opened = checkpoint.open(write_checkpoint(under(prefix, stored(*weights))))
    loaded = checkpoint.load_experts(opened, prefix)
    for array, expected in zip(loaded, weights, strict=True):
        np.testing.assert_array_equal(array, expected)
    assert checkpoint.load_expert_biases(opened, prefix) == (None, None)
    up = checkpoint.load_linear(opened, f"{prefix}.2.up_proj")
    np.testing.assert_array_equal(up, weights[0][2, 1])


def test_gate_and_up_of_experts_with_biases_alternate(write_checkpoint, weights, biases):
    opened = checkpoint.open(write_checkpoint(under("experts", transposed_alternating(*weights, *biases))))
    loaded = (*checkpoint.load_experts(opened, "experts"), *checkpoint.load_expert_biases(opened, "experts"))
    for array, expected in zip(loaded, (*weights, *biases), strict=True):
        np.testing.assert_array_equal(array, expected)


def test_a_summary_counts_every_byte_of_experts_in_one_tensor_once(write_checkpoint, weights, biases):
    tensors = under("experts", transposed_alternating(*weights, *biases))
    summary = checkpoint.open(write_checkpoint(tensors)).summary()
    assert [(m.name, m.kind, m.shape) for m in summary.modules] == [
        ("experts.w13", "experts", (EXPERTS, 2, INTERMEDIATE, HIDDEN)),
        ("experts.w2", "experts", (EXPERTS, HIDDEN, INTERMEDIATE)),
    ]
    assert sum(m.nbytes for m in summary.modules) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("family", ["llama4", "gpt_oss"])
def test_layers_in_one_tensor_compute_what_transformers_does(shared, write_checkpoint, family):
    file = shared / "fixtures" / "moe_layers" / f"{family}.safetensors"
    if not file.is_file():
        pytest.skip("needs ../shared/fixtures/moe_layers")
    with open_safetensors(file) as opened:
        t = {name: np.array(opened.read(name)) for name in opened.tensors if name.startswith(("state.", "main."))}
    prefix = {"llama4": "language_model.model.layers.1.feed_forward", "gpt_oss": "model.layers.1.mlp"}[family]
    stored = {name.replace("state", prefix, 1): tensor for name, tensor in t.items() if name.startswith("state.")}
    loaded = checkpoint.open(write_checkpoint(stored))
    w13, w2 = checkpoint.load_experts(loaded, f"{prefix}.experts")
    b13, b2 = checkpoint.load_expert_biases(loaded, f"{prefix}.experts")
    x, expected = t["main.input"].reshape(-1, 256), t["main.output"].reshape(-1, 256)
    y = jmoe.fused_moe(
        jnp.asarray(x),
        w13,
        w2,
        jnp.asarray(t["main.topk_weights"]),
        jnp.asarray(t["main.topk_ids"]),
        b13=b13,
        b2=b2,
        activation="swigluoai" if family == "gpt_oss" else "silu",
        weight_on_input=family == "llama4",
    )
    if family == "llama4":
        gate, up, down = (checkpoint.load_linear(loaded, f"{prefix}.shared_expert.{name}") for name in PROJECTIONS)
        hidden = jmoe.linear(jnp.asarray(x), gate)
        y = y + jmoe.linear(hidden / (1 + jnp.exp(-hidden)) * jmoe.linear(jnp.asarray(x), up), down)
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def gpt_oss_in_bfloat16():
    """The tiny gpt-oss with its MXFP4 experts, which bfloat16 holds exactly, as unquantized ones in one tensor."""
    config = json.loads((FAMILIES / "gpt_oss" / "config.json").read_text())
    del config["quantization_config"]
    with checkpoint.open(FAMILIES / "gpt_oss") as opened, open_safetensors(FAMILIES / "gpt_oss") as file:
        tensors = {n: np.array(file.read(n)) for n in file.tensors if not n.endswith(("_blocks", "_scales"))}
        for prefix in opened.expert_prefixes:
            w13, w2 = (np.asarray(w.dequantize()) for w in checkpoint.load_experts(opened, prefix))
            fused = np.ascontiguousarray(w13.transpose(0, 3, 2, 1)).reshape(4, 32, 64)
            tensors[f"{prefix}.gate_up_proj"] = fused.astype(ml_dtypes.bfloat16)
            tensors[f"{prefix}.down_proj"] = np.ascontiguousarray(w2.swapaxes(1, 2)).astype(ml_dtypes.bfloat16)
    return tensors, config


def test_gpt_oss_with_unquantized_experts_has_transformers_logits(write_checkpoint):
    model = checkpoint.load_model(write_checkpoint(*gpt_oss_in_bfloat16()), dtype=jnp.float32)
    logits = model(np.load(FAMILIES / "tokens.npy"))
    np.testing.assert_allclose(logits, np.load(FAMILIES / "gpt_oss_logits.npy"), rtol=0, atol=1e-4)


def test_gpt_oss_can_be_quantized_anew_and_loaded(write_checkpoint, tmp_path):
    source = write_checkpoint(*gpt_oss_in_bfloat16())
    checkpoint.quantize_checkpoint(source, tmp_path / "out", "int8_w8a16")
    written = checkpoint.load_model(tmp_path / "out", dtype=jnp.float32)
    assert written.layers[0].mlp.recipe.name == "int8_w8a16"
    rules = [(r"layers\..+", "int8_w8a16")]
    quantized = checkpoint.load_model(source, dtype=jnp.float32, rules=rules)
    tokens = np.load(FAMILIES / "tokens.npy")
    np.testing.assert_allclose(written(tokens), quantized(tokens), rtol=0, atol=1e-5)


def test_experts_in_one_tensor_whose_other_half_or_format_is_elsewhere_are_left_alone(write_checkpoint, weights):
    tensors = under("experts", halves(*weights))
    alone = {"experts.gate_up_proj": tensors["experts.gate_up_proj"]}
    assert set(checkpoint.open(write_checkpoint(alone)).tensors) == set(alone)
    codes = {name: tensor.astype(np.int8) for name, tensor in tensors.items()}
    assert set(checkpoint.open(write_checkpoint(codes)).tensors) == set(codes)


@pytest.mark.parametrize(
    "changed, says",
    [
        (
            {"gate_up_proj": (3, 4, 5)},
            "gate_up_proj' has shape (3, 4, 5), expected (E, H, 2I) with (E, I, H), or (E, 2I, H) with (E, H, I); "
            "'experts.down_proj' has (3, 4, 2)",
        ),
        ({"gate_up_proj": (2, 4, 4)}, "gate_up_proj' has shape (2, 4, 4), expected"),
        ({"gate_up_proj": (4, 4)}, "gate_up_proj' has shape (4, 4), expected"),
        ({"gate_up_proj_bias": (3, 2)}, "gate_up_proj_bias' has shape (3, 2), expected (3, 4) as the weights have it"),
        ({"down_proj_bias": (4,)}, "down_proj_bias' has shape (4,), expected (3, 4) as the weights have it"),
        ({"0.up_proj.weight": (2, 4)}, "holds what 'experts.0.up_proj.weight' holds too"),
    ],
)
def test_experts_in_one_tensor_that_do_not_fit_are_named(write_checkpoint, weights, changed, says):
    tensors = halves(*weights) | {name: np.ones(shape, np.float32) for name, shape in changed.items()}
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.open(write_checkpoint(under("experts", tensors)))
    assert says in str(caught.value) and "model.safetensors: tensor 'experts." in str(caught.value)
