"""Activation and KV-cache scales that quantize_checkpoint measures with the model itself, against NumPy's."""

import json
import re
import warnings

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jmoe import checkpoint
from jmoe.checkpoint.safetensors import open_safetensors
from jmoe.checkpoint.safetensors_writer import write_safetensors

BF16 = ml_dtypes.bfloat16
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
}
LAYER = "model.layers.0"
SHAPES = {
    "model.embed_tokens": (16, 32),
    "lm_head": (16, 32),
    "model.norm": (32,),
    f"{LAYER}.input_layernorm": (32,),
    f"{LAYER}.post_attention_layernorm": (32,),
    f"{LAYER}.self_attn.q_proj": (32, 32),
    f"{LAYER}.self_attn.k_proj": (16, 32),
    f"{LAYER}.self_attn.v_proj": (16, 32),
    f"{LAYER}.self_attn.o_proj": (32, 32),
    f"{LAYER}.self_attn.q_norm": (16,),
    f"{LAYER}.self_attn.k_norm": (16,),
    f"{LAYER}.mlp.gate": (4, 32),
    **{f"{LAYER}.mlp.experts.{e}.{name}": (32, 32) for e in range(4) for name in ("gate_proj", "up_proj", "down_proj")},
}
TOKENS = np.random.default_rng(7).integers(0, 16, 700)  # two windows and a half
MODULES = sorted(module for module in SHAPES if module.endswith("_proj"))


@pytest.fixture
def source(tmp_path):
    """A small model whose router is zero: of equal experts the first two are taken, and no other gets a token."""
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.normal(0, 0.5, shape).astype(BF16) for name, shape in SHAPES.items()}
    tensors[f"{LAYER}.mlp.gate.weight"] *= 0
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def quantized(source, recipe, **options):
    """What is written, after the warning about the experts without tokens."""
    with pytest.warns(UserWarning, match=r"layers\.0\.mlp: experts 2, 3 got no token in calibration"):
        checkpoint.quantize_checkpoint(source, source.parent / "out", recipe, calibration=TOKENS, **options)
    return source.parent / "out"


def first_layer(source):
    """float32 by NumPy: the normed input of attention, its keys after the rotary embedding, and its values."""
    with open_safetensors(source) as file:
        weight = {name: file.read(f"{name}.weight").astype(np.float32) for name in SHAPES}

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight[name]

    x = norm(weight["model.embed_tokens"][TOKENS[:512].reshape(2, 256)], f"{LAYER}.input_layernorm")
    k = norm(x @ weight[f"{LAYER}.self_attn.k_proj"].T, f"{LAYER}.self_attn.k_norm")
    angle = np.arange(256)[:, None] * 100.0 ** (-np.arange(8) / 8)
    low, high = k[..., :8], k[..., 8:]
    rotated = low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)
    return x, np.concatenate(rotated, -1), x @ weight[f"{LAYER}.self_attn.v_proj"].T


@pytest.mark.parametrize("recipe, largest, leaf", [("fp8_tensor_static", 448, "fp8"), ("nvfp4", 2688, "")])
def test_scales_are_the_largest_magnitudes_over_what_codes_express(source, recipe, largest, leaf):
    folder = quantized(source, recipe, kv_cache=True)
    x, keys, values = first_layer(source)
    with checkpoint.open(folder) as opened:
        scales = opened.input_scales()
        assert opened.method_name == ("fp8" if leaf else "compressed-tensors")
        assert sorted(scales) == MODULES
        for name in "qkv":
            assert scales[f"{LAYER}.self_attn.{name}_proj"] == pytest.approx(np.abs(x).max() / largest, rel=1e-5)
        cache = {name: float(opened.read(name).reshape(())) for name in opened.kv_scales}
    assert cache == {
        f"{LAYER}.self_attn.k_scale": pytest.approx(np.abs(keys).max() / 448, rel=1e-5),
        f"{LAYER}.self_attn.v_scale": pytest.approx(np.abs(values).max() / 448, rel=1e-5),
    }
    # The experts' input is one, so that its scale is; an expert that got no token has its layer's largest.
    experts = f"{LAYER}.mlp.experts"
    assert len({scales[f"{experts}.{e}.{name}"] for e in range(4) for name in ("gate_proj", "up_proj")}) == 1
    down = [scales[f"{experts}.{e}.down_proj"] for e in range(4)]
    assert down[0] != down[1] and down[2] == down[3] == max(down)
    model = checkpoint.load_model(folder, dtype=jnp.float32)
    np.testing.assert_allclose(model.layers[0].mlp.w2_input_scale.get_value(), down, rtol=1e-6)


def test_a_kv_cache_needs_no_recipe_with_given_scales(source):
    with warnings.catch_warnings(action="error"):
        checkpoint.quantize_checkpoint(source, source.parent / "out", "int8", calibration=TOKENS, kv_cache=True)
    with checkpoint.open(source.parent / "out") as opened:
        assert len(opened.kv_scales) == 2 and not opened.input_scales()
        said = opened.quantization_config["kv_cache_scheme"]
    assert {key: said[key] for key in ("num_bits", "type", "strategy", "symmetric", "dynamic")} == {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }


def test_modules_that_are_left_alone_have_no_scale(source):
    folder = quantized(source, "fp8_tensor_static", ignore=["self_attn"])
    with checkpoint.open(folder) as opened:
        assert sorted(opened.input_scales()) == [module for module in MODULES if "experts" in module]


@pytest.mark.parametrize(
    "recipe, options, says",
    [
        ("int8", {"calibration": TOKENS}, "recipe 'int8' takes no activation scale"),
        ("fp8_tensor_static", {"kv_cache": True}, "kv_cache=True takes calibration"),
        ("nvfp4", {"calibration": TOKENS, "input_scales": {}}, "input_scales and calibration are both given"),
        ("nvfp4", {"calibration": TOKENS[:255]}, "has 255 tokens, but it takes at least one window of 256"),
        ("nvfp4", {"calibration": TOKENS + 1}, "holds the token 16, but the model's are 0 to 15"),
        ("nvfp4", {"calibration": TOKENS[None]}, "it is integer ids (n,)"),
    ],
)
def test_calibration_that_is_none_is_refused(source, recipe, options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        checkpoint.quantize_checkpoint(source, source.parent / "out", recipe, **options)
    assert [path.name for path in source.parent.iterdir()] == ["in"]
