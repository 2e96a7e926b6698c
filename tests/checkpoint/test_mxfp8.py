"""MXFP8 checkpoints, and MXFP4 experts among FP8 layers as DeepSeek-V4 has them."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmoe
from jmoe import checkpoint
from jmoe.scheme import Scheme, recipe

VECTORS = Path(__file__).resolve().parents[1] / "data" / "vectors"
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
MXFP8 = {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}
V4 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}


def opened(write_checkpoint, tensors, config):
    return checkpoint.open(write_checkpoint(tensors, {"quantization_config": config}))


def refusal(write_checkpoint, tensors, config):
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load_linear(opened(write_checkpoint, tensors, config), "a")
    return str(caught.value)


@pytest.mark.parametrize("dtype", [np.uint8, E8M0])
def test_values_of_the_vector_are_transformers(write_checkpoint, dtype):
    with np.load(VECTORS / "mxfp8_u8_scale_inv.npz") as stored:
        config = json.loads(stored["meta"].tobytes())["quantization_config"]
        scale = stored["t/weight_scale_inv"].view(dtype)
        tensors = {"a.weight": stored["t/weight"].view(E4M3), "a.weight_scale_inv": scale}
        w = checkpoint.load_linear(opened(write_checkpoint, tensors, config), "a")
        assert config["quant_method"] == "mxfp8"
        assert (w.scheme, w.input_scheme) == (recipe("mxfp8").weight, recipe("mxfp8").input)
        np.testing.assert_array_equal(w.dequantize(), stored["x/dequant"])


def test_the_name_of_the_method_is_enough_and_a_ragged_group_has_a_scale(write_checkpoint):
    tensors = {"a.weight": np.ones((2, 40), E4M3), "a.weight_scale_inv": np.uint8([[127, 128], [129, 130]])}
    w = checkpoint.load_linear(opened(write_checkpoint, tensors, MXFP8), "a")
    np.testing.assert_array_equal(w.dequantize(), np.repeat(np.float32([[1, 2], [4, 8]]), [32, 8], 1))


@pytest.mark.parametrize(
    "config, tensors, says",
    [
        ({"weight_block_size": [128, 128]}, {}, "has weight_block_size [128, 128], expected [1, 32]"),
        ({"scale_fmt": "float"}, {}, "has scale_fmt 'float', expected 'ue8m0' with quant_method 'mxfp8'"),
        ({"activation_scheme": "static"}, {}, "has activation_scheme 'static', expected 'dynamic'"),
        (
            {},
            {"a.weight_scale_inv": np.ones((2, 2), np.float32)},
            "expected e4m3 with e8m0 scales as quant_method 'mxfp8'",
        ),
        ({}, {"a.weight_scale_inv": np.ones((2, 1), np.uint8)}, "has shape (2, 1), expected (2, 2)"),
        (
            {},
            {"a.weight": np.ones((2, 32), np.int8), "a.weight_scale_inv": np.ones((2, 2), np.uint8)},
            "is e2m1 1x32 e8m0 power_of_two, expected e4m3 with e8m0 scales as quant_method 'mxfp8' says",
        ),
        ({"ignored_layers": ["a"]}, {}, "the configuration's ignored_layers entry 'a' says that it is not quantized"),
    ],
)
def test_what_contradicts_mxfp8_is_refused(write_checkpoint, config, tensors, says):
    whole = {"a.weight": np.ones((2, 64), E4M3), "a.weight_scale_inv": np.full((2, 2), 127, np.uint8)}
    assert says in refusal(write_checkpoint, whole | tensors, MXFP8 | config)


def v4_expert(n, k, byte):
    scale = np.full((n, -(-k // 32)), 128, np.uint8).view(E8M0)
    return {"weight": np.full((n, k // 2), byte, np.uint8).view(np.int8), "scale": scale}


def v4_tensors():
    """A dense layer in FP8 blocks, and two experts in MXFP4 of H = 64 and I = 32."""
    tensors = {"layers.0.attn.wo_a.weight": np.ones((130, 64), E4M3)}
    tensors["layers.0.attn.wo_a.scale"] = np.uint8([[127], [129]]).view(E8M0)
    for e in range(2):
        for name, (n, k) in {"w1": (32, 64), "w3": (32, 64), "w2": (64, 32)}.items():
            # 0xA4: the even column is code 4, which is 2; the odd one code 10, which is -1.
            for leaf, array in v4_expert(n, k, 0xA4).items():
                tensors[f"layers.0.ffn.experts.{e}.{name}.{leaf}"] = array
    return tensors


def test_mxfp4_experts_among_fp8_layers(write_checkpoint):
    with opened(write_checkpoint, v4_tensors(), V4) as source:
        dense = checkpoint.load_linear(source, "layers.0.attn.wo_a")
        w13, w2 = checkpoint.load_experts(source, "layers.0.ffn.experts")
        shapes = {module.name.rpartition(".")[2]: module.shape for module in source.summary().modules}
    np.testing.assert_array_equal(dense.dequantize()[:, 0], [1] * 128 + [4] * 2)
    assert shapes == {"wo_a": (130, 64), "w13": (2, 2, 32, 64), "w2": (2, 64, 32)}
    for w in (w13, w2):
        assert w.scheme == recipe("mxfp4").weight
        assert w.input_scheme == dense.input_scheme == Scheme(format="e4m3", block=(1, 128), power_of_two=True)
        np.testing.assert_array_equal(w.dequantize()[..., :2], np.broadcast_to(np.float32([4, -2]), (*w.shape[:-1], 2)))


def test_a_layer_of_such_experts_computes(write_checkpoint):
    source = opened(write_checkpoint, v4_tensors(), V4)
    w13, w2 = checkpoint.load_experts(source, "layers.0.ffn.experts")
    y = jmoe.fused_moe(jnp.ones((1, 64)), w13, w2, jnp.float32([[1]]), jnp.int32([[1]]))
    # Gate and up are 32 * (4 - 2) = 64, which silu keeps; 64 * 64 is a power of two and so exact in e4m3.
    np.testing.assert_array_equal(y, np.full((1, 64), 64 * 64 * 32))


@pytest.mark.parametrize(
    "changed, says",
    [
        (
            {"scale": np.full((32, 4), 127, np.uint8)},
            "has shape (32, 4), expected (32, 2) for 'a.weight' of 32 rows of 64",
        ),
        ({"scale": np.ones((32, 2), np.float32)}, "'a.weight' has dtype I8, expected F8_E4M3 beside 'a.scale'"),
        ({"scale": np.full((32, 2), 255, np.uint8)}, "holds the scale NaN (e8m0 byte 255) at [0, 0]"),
    ],
)
def test_codes_of_mxfp4_that_do_not_fit_are_refused(write_checkpoint, changed, says):
    tensors = {f"a.{leaf}": array for leaf, array in (v4_expert(32, 64, 0) | changed).items()}
    assert says in refusal(write_checkpoint, tensors, V4)
