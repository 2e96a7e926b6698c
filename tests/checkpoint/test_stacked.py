"""Quantized experts of a layer in one tensor, OpenAI's names of gpt-oss, and NVFP4 experts among FP8 layers."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jmoe import checkpoint
from jmoe.checkpoint.safetensors import open_safetensors
from jmoe.scheme import Scheme, recipe

GPT_OSS = Path(__file__).resolve().parents[1] / "data" / "families" / "gpt_oss"
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
PREFIX = "model.layers.0.feed_forward.experts"
GATE_UP, DOWN = f"{PREFIX}.gate_up_proj", f"{PREFIX}.down_proj"
E, H, I = 2, 32, 48
RNG = np.random.default_rng(0)
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*router*", "lm_head"]}


def e4m3(*shape):
    return RNG.normal(0, 1, shape).astype(E4M3)


def positive(*shape):
    return RNG.uniform(0.01, 0.02, shape).astype(np.float32)


def nibbles(*shape):
    return RNG.integers(0, 256, shape, np.uint8)


def fbgemm():
    return {
        GATE_UP: e4m3(E, H, 2 * I),
        f"{GATE_UP}_scale": positive(E, 1, 2 * I),
        DOWN: e4m3(E, I, H),
        f"{DOWN}_scale": positive(E, H, 1),
        "model.layers.0.self_attn.o_proj.weight": e4m3(H, H),
        "model.layers.0.self_attn.o_proj.weight_scale": positive(H, 1),
        "model.layers.0.self_attn.o_proj.input_scale_ub": np.float32([1200]),
    }


def modelopt_fp8():
    tensors = {GATE_UP: e4m3(E, H, 2 * I), DOWN: e4m3(E, I, H)}
    for name in (GATE_UP, DOWN):
        tensors |= {f"{name}_weight_scale": positive(), f"{name}_input_scale": positive(1)}
    return tensors


def modelopt_nvfp4(*scalar):
    """``scalar`` is the shape of the scales above those of blocks."""
    tensors = {GATE_UP: nibbles(E, H // 2, 2 * I), DOWN: nibbles(E, I // 2, H)}
    tensors[f"{GATE_UP}_weight_scale"] = positive(E, H // 16, 2 * I).astype(E4M3)
    tensors[f"{DOWN}_weight_scale"] = positive(E, I // 16, H).astype(E4M3)
    for name in (GATE_UP, DOWN):
        tensors |= {f"{name}_weight_scale_2": positive(*scalar), f"{name}_input_scale": positive(*scalar)}
    return tensors


def open_(write_checkpoint, tensors, config):
    return checkpoint.open(write_checkpoint(tensors, {"quantization_config": config}))


def w13_of(gate_up, rows=None):
    """(E, 2, I, H) from (E, 2I, H)."""
    gate, up = rows or (slice(I), slice(I, None))
    return np.stack([gate_up[:, gate], gate_up[:, up]], axis=1)


def test_llama4_by_fbgemm_has_a_scale_a_row(write_checkpoint):
    tensors = fbgemm()
    with open_(write_checkpoint, tensors, FBGEMM) as opened:
        w13, w2 = checkpoint.load_experts(opened, PREFIX)
        o_proj = checkpoint.load_linear(opened, "model.layers.0.self_attn.o_proj")
    values = {name: array.astype(np.float32) for name, array in tensors.items()}
    np.testing.assert_array_equal(
        w13.dequantize(), w13_of((values[GATE_UP] * values[f"{GATE_UP}_scale"]).swapaxes(1, 2))
    )
    np.testing.assert_array_equal(w2.dequantize(), values[DOWN].swapaxes(1, 2) * values[f"{DOWN}_scale"])
    name = "model.layers.0.self_attn.o_proj.weight"
    np.testing.assert_array_equal(o_proj.dequantize(), values[name] * values[f"{name}_scale"])
    for w in (w13, w2, o_proj):
        assert (w.scheme, w.input_scheme) == (recipe("fp8_channel").weight, recipe("fp8_channel").input)


def test_llama4_by_modelopt_in_fp8(write_checkpoint):
    tensors = modelopt_fp8()
    with open_(write_checkpoint, tensors, FP8) as opened:
        w13, w2 = checkpoint.load_experts(opened, PREFIX)
        scales = checkpoint.load_expert_scales(opened, PREFIX)
        modules = {module.name: module for module in opened.summary().modules}
    gate_up = tensors[GATE_UP].astype(np.float32).swapaxes(1, 2) * tensors[f"{GATE_UP}_weight_scale"]
    np.testing.assert_array_equal(w13.dequantize(), w13_of(gate_up))
    down = tensors[DOWN].astype(np.float32).swapaxes(1, 2) * tensors[f"{DOWN}_weight_scale"]
    np.testing.assert_array_equal(w2.dequantize(), down)
    assert w13.input_scheme == recipe("fp8_tensor_static").input
    np.testing.assert_array_equal(scales[0], tensors[f"{GATE_UP}_input_scale"][0])
    np.testing.assert_array_equal(scales[1], np.repeat(tensors[f"{DOWN}_input_scale"], E))
    assert modules[f"{PREFIX}.w13"].shape == (E, 2, I, H) and modules[f"{PREFIX}.w2"].shape == (E, H, I)


def nvfp4_values(tensors, name):
    """(E, N, K) by the format's description."""
    packed = tensors[name].swapaxes(1, 2)
    codes = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1)]
    block = tensors[f"{name}_weight_scale"].astype(np.float32).swapaxes(1, 2)
    each = tensors[f"{name}_weight_scale_2"].reshape(-1, 1, 1)
    return codes * np.repeat(block * each, 16, -1)


@pytest.mark.parametrize("scalar", [(), (1,), (E,), (E, 1, 1)])
def test_llama4_by_modelopt_in_nvfp4(write_checkpoint, scalar):
    tensors = modelopt_nvfp4(*scalar)
    with open_(write_checkpoint, tensors, NVFP4) as opened:
        w13, w2 = checkpoint.load_experts(opened, PREFIX)
        input_scale, intermediate_scale = checkpoint.load_expert_scales(opened, PREFIX)
    np.testing.assert_array_equal(w13.dequantize(), w13_of(nvfp4_values(tensors, GATE_UP)))
    np.testing.assert_array_equal(w2.dequantize(), nvfp4_values(tensors, DOWN))
    assert (w13.scheme, w13.input_scheme) == (recipe("nvfp4").weight, recipe("nvfp4").input)
    np.testing.assert_array_equal(input_scale, tensors[f"{GATE_UP}_input_scale"].max())
    np.testing.assert_array_equal(intermediate_scale, np.broadcast_to(tensors[f"{DOWN}_input_scale"].ravel(), (E,)))


def test_gpt_oss_by_modelopt_keeps_gate_and_up_alternating(write_checkpoint):
    tensors = modelopt_nvfp4()
    biases = {f"{GATE_UP}_bias": positive(E, 2 * I), f"{DOWN}_bias": positive(E, H)}
    with open_(write_checkpoint, tensors | biases, NVFP4) as opened:
        w13, _ = checkpoint.load_experts(opened, PREFIX)
        b13, b2 = checkpoint.load_expert_biases(opened, PREFIX)
    alternating = slice(0, None, 2), slice(1, None, 2)
    np.testing.assert_array_equal(w13.dequantize(), w13_of(nvfp4_values(tensors, GATE_UP), alternating))
    np.testing.assert_array_equal(b13, biases[f"{GATE_UP}_bias"].reshape(E, I, 2).swapaxes(1, 2))
    np.testing.assert_array_equal(b2, biases[f"{DOWN}_bias"])


@pytest.mark.parametrize(
    "config, tensors, changed, says",
    [
        (FBGEMM, fbgemm, {DOWN: None}, f"has the first weights of experts, but '{DOWN}' is missing"),
        (FBGEMM, fbgemm, {DOWN: e4m3(E, H, I)}, f"expected (E, H, 2I) with '{DOWN}' (E, I, H); that is F8_E4M3 of"),
        (FBGEMM, fbgemm, {f"{DOWN}_scale": None}, f"{DOWN}[0]' is F8_E4M3, but its scale"),
        (
            FBGEMM,
            fbgemm,
            {f"{DOWN}_scale": positive(E, I, 1)},
            "has shape (2, 48, 1), expected (), (2,), (2, groups, 32)",
        ),
        (FBGEMM, fbgemm, {f"{DOWN}_scale": 0 * positive(E, H, 1)}, "holds the scale 0 at [0, 0]"),
        (NVFP4, modelopt_nvfp4, {DOWN: nibbles(E, I, H // 2)}, "H and I two to a byte in the middle axis"),
        (
            NVFP4,
            modelopt_nvfp4,
            {f"{GATE_UP}_weight_scale_2": None},
            "has no model.layers.0.feed_forward.experts.0.up_proj.weight_scale_2",
        ),
        (NVFP4, modelopt_nvfp4, {f"{GATE_UP}_bias": positive(E, I)}, "has shape (2, 48), expected (2, 96)"),
        (FBGEMM | {"activation_scheme": "static"}, fbgemm, {}, "has the key 'activation_scheme'"),
        (FBGEMM | {"activation_scale_ub": -1}, fbgemm, {}, "has activation_scale_ub -1, expected a positive number"),
        (
            FBGEMM | {"modules_to_not_convert": [PREFIX]},
            fbgemm,
            {},
            "feed_forward.experts' says that it is not quantized",
        ),
    ],
)
def test_what_does_not_fit_is_named(write_checkpoint, config, tensors, changed, says):
    tensors = {name: array for name, array in (tensors() | changed).items() if array is not None}
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(says)):
        checkpoint.load_experts(open_(write_checkpoint, tensors, config), PREFIX)


def test_openais_names_of_gpt_oss_are_the_same_experts(write_checkpoint):
    with open_safetensors(GPT_OSS) as file:
        tensors = {name: file.read(name) for name in file.tensors if ".experts." in name or "router" in name}
    renamed = {}
    for name, array in tensors.items():
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        rest = rest.replace("mlp.router", "mlp.gate").replace("experts.gate_up_proj", "mlp1")
        rest = rest.replace("experts.down_proj", "mlp2")
        rest = re.sub(r"_(blocks|scales)$", r"_weight.\1", rest)
        renamed[f"block.{layer}.{rest}"] = array
    assert "block.0.mlp.mlp1_weight.blocks" in renamed and "block.0.mlp.mlp2_bias" in renamed
    experts, prefix = "model.layers.1.mlp.experts", "block.1.mlp.experts"
    with checkpoint.open(GPT_OSS) as opened:
        expected = checkpoint.load_experts(opened, experts), checkpoint.load_expert_biases(opened, experts)
    with checkpoint.open(
        write_checkpoint(renamed, {"num_experts": len(tensors[f"{experts}.down_proj_bias"])})
    ) as opened:
        assert opened.method_name == "mxfp4"
        found = checkpoint.load_experts(opened, prefix), checkpoint.load_expert_biases(opened, prefix)
    for mine, theirs in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(mine.dequantize(), theirs.dequantize())
        assert mine.scheme == theirs.scheme == recipe("mxfp4").weight
    for mine, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(mine, theirs)


MIXED = {
    "quant_method": "fp8",
    "quant_algo": "MIXED_PRECISION",
    "moe_quant_algo": "NVFP4",
    "weight_block_size": [128, 128],
    "scale_fmt": "ue8m0",
    "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4", "group_size": 16}},
    "ignore": ["*.attn.*", "head"],
}


def mixed():
    """DeepSeek-V4 by ModelOpt: attention in blocks of FP8, though ``ignore`` lists it, and experts in NVFP4."""
    e8m0 = ml_dtypes.float8_e8m0fnu
    tensors = {"layers.0.attn.wo_a.weight": e4m3(64, 64), "layers.0.attn.wo_a.scale": np.ones((1, 1), e8m0)}
    for e in range(E):
        for name, (n, k) in {"w1": (I, H), "w3": (I, H), "w2": (H, I)}.items():
            module = f"layers.0.ffn.experts.{e}.{name}"
            tensors |= {
                f"{module}.weight": nibbles(n, k // 2),
                f"{module}.weight_scale": positive(n, k // 16).astype(E4M3),
            }
            tensors |= {f"{module}.weight_scale_2": positive(), f"{module}.input_scale": positive()}
    return tensors


def test_nvfp4_experts_among_fp8_layers(write_checkpoint):
    tensors = mixed()
    with open_(write_checkpoint, tensors, MIXED) as opened:
        dense = checkpoint.load_linear(opened, "layers.0.attn.wo_a")
        w13, w2 = checkpoint.load_experts(opened, "layers.0.ffn.experts")
        assert all(scale is not None for scale in checkpoint.load_expert_scales(opened, "layers.0.ffn.experts"))
    np.testing.assert_array_equal(dense.dequantize(), tensors["layers.0.attn.wo_a.weight"].astype(np.float32))
    assert dense.input_scheme == Scheme(format="e4m3", block=(1, 128), power_of_two=True)
    for w in (w13, w2):
        assert (w.scheme, w.input_scheme) == (recipe("nvfp4").weight, recipe("nvfp4").input)
    packed = tensors["layers.0.ffn.experts.1.w3.weight"]
    np.testing.assert_array_equal(w13.data[1, 1], packed)


@pytest.mark.parametrize(
    "config, says",
    [
        (
            {"quantized_layers": {}},
            "is a scale of NVFP4, but the configuration's quantized_layers do not list its module",
        ),
        ({"quantized_layers": None}, "has quant_algo 'MIXED_PRECISION' with quantized_layers None"),
        ({"quant_algo": "NVFP4"}, "has quant_method 'fp8' with quant_algo 'NVFP4', expected 'MIXED_PRECISION' or none"),
        (
            {"quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "FP8"}}},
            "has dtype U8, expected F8_E4M3 as the",
        ),
        ({"colour": "red"}, "has the key 'colour' with the value 'red', which is not known"),
    ],
)
def test_a_mixture_that_its_tensors_contradict_is_refused(write_checkpoint, config, says):
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(says)):
        checkpoint.load_experts(open_(write_checkpoint, mixed(), MIXED | config), "layers.0.ffn.experts")
