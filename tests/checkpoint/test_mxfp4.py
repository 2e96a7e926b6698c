"""MXFP4 checkpoints: values against other libraries', gpt-oss's fused experts, and what is refused."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmoe
from jmoe import checkpoint
from jmoe.checkpoint import methods
from jmoe.checkpoint.safetensors import open_safetensors
from jmoe.checkpoint.safetensors_writer import write_safetensors
from jmoe.models import evaluate
from jmoe.scheme import recipe

DATA = Path(__file__).resolve().parents[1] / "data"
CONFIG = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
PREFIX = "model.layers.0.mlp.experts"
BF16 = ml_dtypes.bfloat16


def fused(rows=4, groups=1, **more):
    """gpt-oss's tensors of a layer with two experts, H = 32 * groups and I = rows / 2; the scales are 1, byte 127."""
    rng = np.random.default_rng(0)
    inner = -(-rows // 64)
    tensors = {
        "gate_up_proj_blocks": rng.integers(0, 256, (2, rows, groups, 16), np.uint8),
        "gate_up_proj_scales": np.full((2, rows, groups), 127, np.uint8),
        "down_proj_blocks": rng.integers(0, 256, (2, 32 * groups, inner, 16), np.uint8),
        "down_proj_scales": np.full((2, 32 * groups, inner), 127, np.uint8),
    }
    return {f"{PREFIX}.{leaf}": array for leaf, array in (tensors | more).items()}


def linear(n=3, groups=2, scale=None):
    scale = np.full((n, groups), 127, np.uint8) if scale is None else scale
    return {"a.weight": np.full((n, 16 * groups), 0x21, np.uint8), "a.weight_scale": scale}


def refusal(folder, load):
    with pytest.raises(checkpoint.CheckpointError) as caught, checkpoint.open(folder) as opened:
        load(opened)
    return str(caught.value)


def load_a(opened):
    return checkpoint.load_linear(opened, "a")


def load_layer(opened):
    return checkpoint.load_experts(opened, PREFIX)


@pytest.fixture
def gptoss(shared):
    """The gpt-oss checkpoint, opened, and transformers' values of it."""
    folder = shared / "vectors" / "ckpt_gptoss_mxfp4"
    with checkpoint.open(folder) as opened, np.load(folder / "expected.npz") as expected:
        yield opened, expected


@pytest.fixture(scope="module")
def model(shared):
    return checkpoint.load_model(shared / "fixtures" / "tiny-moe" / "mxfp4_gptoss_layout", dtype=jnp.float32)


def test_gate_and_up_rows_alternate_in_gptoss_and_values_are_transformers(gptoss):
    opened, expected = gptoss
    w13, w2 = checkpoint.load_experts(opened, PREFIX)
    assert (w13.scheme, w13.input_scheme) == (recipe("mxfp4").weight, None) == (w2.scheme, w2.input_scheme)
    np.testing.assert_array_equal(w13.dequantize()[:, 0], expected["gate_rows"])
    np.testing.assert_array_equal(w13.dequantize()[:, 1], expected["up_rows"])
    np.testing.assert_array_equal(w2.dequantize(), expected["down_dequant"].swapaxes(1, 2))


def test_a_gptoss_layer_computes_what_transformers_does(gptoss):
    # transformers' GptOssExperts in float32: biases, both clamps at 7, 1.702; |y| up to 22.
    opened, expected = gptoss
    w13, w2 = checkpoint.load_experts(opened, PREFIX)
    b13, b2 = checkpoint.load_expert_biases(opened, PREFIX, dtype=jnp.float32)
    assert (b13.shape, b2.shape) == ((2, 2, 32), (2, 96))
    x, weights = jnp.asarray(expected["moe_x"]), jnp.asarray(expected["moe_topk_weights"])
    ids = jnp.asarray(expected["moe_topk_ids"]).astype(jnp.int32)
    y = jmoe.fused_moe(x, w13, w2, weights, ids, activation="swigluoai", b13=b13, b2=b2)
    np.testing.assert_allclose(y, expected["moe_y"], rtol=0, atol=2e-5)


def test_biases_of_gate_and_up_alternate_too(gptoss, shared):
    stored = open_safetensors(shared / "vectors" / "ckpt_gptoss_mxfp4").read(f"{PREFIX}.gate_up_proj_bias")
    b13, _ = checkpoint.load_expert_biases(gptoss[0], PREFIX)
    np.testing.assert_array_equal(b13[:, 0], stored[:, 0::2])
    np.testing.assert_array_equal(b13[:, 1], stored[:, 1::2])


def test_the_vector_of_the_same_layer_loads_from_a_file_written_here(write_checkpoint):
    with np.load(DATA / "vectors" / "gptoss_mxfp4_moe.npz") as stored:
        tensors = {key[2:]: stored[key] for key in stored.files if key.startswith("t/")}
        tensors = {name: a.view(BF16) if name.endswith("bias") else a for name, a in tensors.items()}
        config = json.loads(stored["meta"].tobytes())["quantization_config"]
        opened = checkpoint.open(write_checkpoint(tensors, {"quantization_config": config}))
        w13, w2 = checkpoint.load_experts(opened, PREFIX)
        np.testing.assert_array_equal(w13.dequantize()[:, 0], stored["x/gate_rows"])
        np.testing.assert_array_equal(w13.dequantize()[:, 1], stored["x/up_rows"])
        np.testing.assert_array_equal(w2.dequantize(), stored["x/down_dequant"].swapaxes(1, 2))


@pytest.mark.usefixtures("optimised")
def test_a_whole_model_with_gptoss_experts_has_transformers_logits_and_loss(model, shared):
    tokens = np.fromfile(DATA / "heldout.bin", np.uint8)
    folder = shared / "fixtures" / "tiny-moe"
    logits = np.load(folder / "logits" / "mxfp4_gptoss_layout.npy")
    np.testing.assert_allclose(model(tokens[None, :64].astype(np.int32))[0], logits, rtol=0, atol=2e-3)
    known = json.loads((folder / "reference.json").read_text())["variants"]["mxfp4_gptoss_layout"]["nll_weight_only"]
    assert abs(evaluate(model, tokens) - known) < 2e-4


def test_a_fused_layer_is_shown_expert_by_expert_and_every_byte_is_counted(write_checkpoint):
    folder = write_checkpoint(fused(), CONFIG)
    with checkpoint.open(folder) as opened:
        assert opened.expert_prefixes == (PREFIX,)
        assert f"{PREFIX}.gate_up_proj_blocks" not in opened.tensors
        info = opened.tensors[f"{PREFIX}.1.up_proj.weight"]
        assert (info.name, info.shape, info.nbytes) == (f"{PREFIX}.gate_up_proj_blocks[1, 1::2]", (2, 16), 32)
        assert len(opened.tensors) == len(list(opened.tensors)) == 12
        stored = sum(i.nbytes for i in open_safetensors(folder).tensors.values())
        assert opened.summary().nbytes == stored == sum(i.nbytes for i in opened.tensors.values())
        w13, w2 = opened.summary().modules
        assert (w13.shape, w2.shape) == ((2, 2, 2, 32), (2, 32, 2 * 16))


def test_a_fused_layer_may_lie_in_several_files(tmp_path):
    tensors = fused(rows=64, down_proj_bias=np.arange(64, dtype=np.float32).reshape(2, 32))
    for i, name in enumerate(sorted(tensors), 1):
        write_safetensors(tmp_path / f"model-{i:05}-of-{len(tensors):05}.safetensors", {name: tensors[name]})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with checkpoint.open(tmp_path) as opened:
        w13, _ = checkpoint.load_experts(opened, PREFIX)
        _, b2 = checkpoint.load_expert_biases(opened, PREFIX)
    blocks = tensors[f"{PREFIX}.gate_up_proj_blocks"].reshape(2, 64, 16)
    np.testing.assert_array_equal(w13.data, np.stack([blocks[:, 0::2], blocks[:, 1::2]], axis=1))
    np.testing.assert_array_equal(b2, tensors[f"{PREFIX}.down_proj_bias"])


class Recorded:
    """Files that keep a list of what was let go of."""

    def __init__(self, files):
        self.tensors, self.read, self.close, self.released = files.tensors, files.read, files.close, []

    def release(self, name):
        self.released.append(name)


def test_a_fused_tensor_is_let_go_of_with_its_last_part(write_checkpoint):
    folder = write_checkpoint(fused() | {"lm_head.weight": np.ones((2, 2), np.float32)}, CONFIG)
    files = Recorded(open_safetensors(folder))
    shown = methods.mxfp4.Mxfp4({}).view(files)
    for e in range(2):
        for half in ("gate_proj", "up_proj"):
            assert files.released == []
            shown.release(f"{PREFIX}.{e}.{half}.weight")
    assert files.released == [f"{PREFIX}.gate_up_proj_blocks"]
    shown.release("lm_head.weight")
    assert files.released[1:] == ["lm_head.weight"]


def test_fused_codes_without_a_configuration_are_refused(write_checkpoint):
    message = refusal(write_checkpoint(fused()), load_layer)
    assert f"tensors {PREFIX}." in message and "of a quantized module, but no quantization_config" in message


def test_experts_with_tensors_of_their_own_load_too_and_rows_do_not_alternate(write_checkpoint):
    tensors = {}
    for e in range(2):
        for projection, (n, k) in {"w1": (4, 64), "w3": (4, 64), "w2": (64, 4)}.items():
            tensors[f"m.experts.{e}.{projection}.weight"] = np.full((n, k // 2), 0x22 * (e + 1), np.uint8)
            tensors[f"m.experts.{e}.{projection}.weight_scale"] = np.full((n, -(-k // 32)), 127 + e, np.uint8)
    w13, w2 = checkpoint.load_experts(checkpoint.open(write_checkpoint(tensors, CONFIG)), "m.experts")
    # Code 2 is 1 and code 4 is 2, at the scales 1 and 2.
    np.testing.assert_array_equal(w13.dequantize(), np.broadcast_to(np.float32([1, 4])[:, None, None, None], w13.shape))
    assert w13.shape == (2, 2, 4, 64) and w2.shape == (2, 64, 4) and w2.scale.shape == (2, 64, 1)


def test_a_linear_layer_with_e8m0_scales_by_either_dtype(write_checkpoint):
    for scale in (np.full((3, 2), 128, np.uint8), np.full((3, 2), 128, np.uint8).view(ml_dtypes.float8_e8m0fnu)):
        opened = checkpoint.open(write_checkpoint(linear(scale=scale), CONFIG))
        w = checkpoint.load_linear(opened, "a")
        assert opened.shape_for("a") == w.shape == (3, 64)
        np.testing.assert_array_equal(w.dequantize(), np.tile(np.float32([1, 2]), (3, 32)))


def test_scale_bytes_at_both_ends(write_checkpoint):
    with np.load(DATA / "vectors" / "mxfp4_scale_edges.npz") as stored:
        blocks, scales, expected = stored["t/blocks"][0], stored["t/scales"][0], stored["x/hf_f32"][0]
    assert scales[:, 0].tolist() == [0, 1, 2, 127, 254, 255]
    tensors = {"a.weight": blocks[:, 0], "a.weight_scale": scales}
    # Byte 255 is NaN by OCP, and no weight has it.
    message = refusal(write_checkpoint(tensors, CONFIG), load_a)
    assert "tensor 'a.weight_scale' holds the scale NaN (e8m0 byte 255) at [5, 0]" in message
    kept = {name: array[:5] for name, array in tensors.items()}
    w = checkpoint.load_linear(checkpoint.open(write_checkpoint(kept, CONFIG)), "a")
    np.testing.assert_array_equal(w.scale, scales[:5])
    np.testing.assert_array_equal(w.data, blocks[:5, 0])
    np.testing.assert_array_equal(w.dequantize()[2:], expected[2:5])


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"gate_up_proj_scales": np.zeros((2, 4), np.uint8)}, "has shape (2, 4), expected (2, 4, 1) beside"),
        ({"gate_up_proj_scales": np.zeros((2, 1, 4), np.uint8)}, "has shape (2, 1, 4), expected (2, 4, 1) beside"),
        ({"down_proj_bias": np.zeros((2, 31), BF16)}, "has shape (2, 31), expected (2, 32) beside"),
        ({"gate_up_proj_blocks": np.zeros((2, 4, 2, 8), np.uint8)}, "expected four axes (E, N, K/32, 16)"),
        ({"gate_up_proj_blocks": np.zeros((2, 4, 16), np.uint8)}, "expected four axes (E, N, K/32, 16)"),
        (
            {"gate_up_proj_blocks": np.zeros((2, 3, 1, 16), np.uint8)},
            "gate_up_proj_blocks' has 3 rows, expected as many of gate as of up",
        ),
        ({"gate_up_proj_scales": np.ones((2, 4, 1), np.float32)}, "has dtype F32, expected U8 or F8_E8M0"),
        ({"gate_up_proj_blocks": np.zeros((2, 4, 1, 16), np.int8)}, "has dtype I8, expected U8 codes beside"),
        ({"0.gate_proj.weight": np.zeros((2, 16), np.uint8)}, "holds what 'model.layers.0.mlp.experts.0.gate_proj"),
    ],
)
def test_fused_tensors_that_do_not_fit_are_refused(write_checkpoint, changed, says):
    assert says in refusal(write_checkpoint(fused(**changed), CONFIG), load_layer)


@pytest.mark.parametrize(
    "gone, says",
    [
        (
            "down_proj_scales",
            "down_proj_blocks' holds codes, but their scales 'model.layers.0.mlp.experts.down_proj_sc",
        ),
        ("down_proj_blocks", "down_proj_scales' belongs to 'model.layers.0.mlp.experts.down_proj_blocks', which is mi"),
    ],
)
def test_half_of_a_fused_tensor_is_refused(write_checkpoint, gone, says):
    tensors = fused()
    del tensors[f"{PREFIX}.{gone}"]
    assert says in refusal(write_checkpoint(tensors, CONFIG), load_layer)


def test_fused_experts_of_different_number_are_refused(write_checkpoint):
    tensors = fused()
    for leaf in ("blocks", "scales"):
        tensors[f"{PREFIX}.down_proj_{leaf}"] = np.concatenate(2 * [tensors[f"{PREFIX}.down_proj_{leaf}"]])
    message = refusal(write_checkpoint(tensors, CONFIG), load_layer)
    assert "experts.2.gate_proj is missing, though other experts have it" in message


@pytest.mark.parametrize(
    "tensors, says",
    [
        (
            {"a.weight_scale": np.zeros((2, 3), np.uint8)},
            "has shape (2, 3), expected (3, 2) for 'a.weight' of 3 rows of 64",
        ),
        ({"a.weight_scale": np.zeros((3, 4), np.uint8)}, "has shape (3, 4), expected (3, 2)"),
        ({"a.weight": np.zeros((3, 2, 16), np.uint8)}, "expected the two axes (N, K)"),
        ({"a.weight": np.zeros((3, 64), BF16)}, "has dtype BF16, expected U8 codes beside 'a.weight_scale'"),
        ({"b.weight": np.zeros((3, 32), np.uint8)}, "'b.weight' holds U8 codes, but their scale 'b.weight_scale' is m"),
        ({"b.weight_scale": np.zeros((3, 2), np.uint8)}, "is a scale, but 'b.weight' is missing"),
        (
            {"lm_head.weight": np.zeros((3, 32), np.uint8), "lm_head.weight_scale": np.zeros((3, 2), np.uint8)},
            "but the configuration's modules_to_not_convert entry 'lm_head' says that the module is not quantized",
        ),
    ],
)
def test_tensors_that_are_no_mxfp4_layer_are_refused(write_checkpoint, tensors, says):
    def load(opened):
        return checkpoint.load_linear(opened, next(iter(tensors)).rpartition(".")[0])

    assert says in refusal(write_checkpoint(linear() | tensors, CONFIG), load)


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"group_size": 64}, "has the key 'group_size' with the value 64, which is not known"),
        ({"dequantize": "no"}, "has dequantize 'no', expected true or false"),
        ({"modules_to_not_convert": "lm_head"}, "has modules_to_not_convert 'lm_head', expected a list of names"),
    ],
)
def test_settings_that_the_method_does_not_have_are_refused(write_checkpoint, changed, says):
    config = {"quantization_config": CONFIG["quantization_config"] | changed}
    assert says in refusal(write_checkpoint(linear(), config), load_a)


def test_a_configuration_without_any_code_in_the_files_is_refused(write_checkpoint):
    message = refusal(write_checkpoint({"a.weight": np.zeros((3, 64), BF16)}, CONFIG), load_a)
    assert "says quant_method 'mxfp4', but none of the 1 tensors" in message


def test_a_tensor_without_a_place_is_named(shared, tmp_path):
    source = shared / "fixtures" / "tiny-moe" / "mxfp4_gptoss_layout"
    files = open_safetensors(source)
    tensors = {name: files.read(name) for name in files.tensors}
    tensors["model.layers.1.mlp.experts.down_proj_bias"] = np.zeros((8, 256), BF16)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(
        checkpoint.CheckpointError, match=r"holds 'model.layers.1.mlp.experts.0.down_proj.bias', .* 5 more"
    ):
        checkpoint.load_model(tmp_path)
