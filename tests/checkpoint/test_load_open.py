"""Opening a checkpoint: where the configuration is, which method reads it, what is refused, and the account of it."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jmoe import checkpoint
from jmoe.checkpoint import methods
from jmoe.checkpoint.methods import base
from jmoe.scheme import recipe

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "data" / "tiny-moe" / "bf16"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KNOWN = ", ".join(methods.known_methods())
E4M3 = ml_dtypes.float8_e4m3fn


def plain(*shape):
    return np.ones(shape, ml_dtypes.bfloat16)


def quantized(name, n=256, k=128):
    """A module in 128x128 blocks."""
    scale = np.ones((-(-n // 128), -(-k // 128)), np.float32)
    return {f"{name}.weight": np.ones((n, k), E4M3), f"{name}.weight_scale_inv": scale}


def refusal(call, *args, **kwargs):
    """The one sentence with which a checkpoint is refused."""
    with pytest.raises((checkpoint.CheckpointError, checkpoint.SafetensorsError)) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": FP8},
        {"text_config": {"quantization_config": FP8, "model_type": "inner"}, "model_type": "outer"},
        {"quantization_config": None, "text_config": {"quantization_config": FP8}},
        {"quantization_config": {}, "compression_config": FP8},
    ],
)
def test_the_quantization_config_is_found_wherever_config_json_hides_it(write_checkpoint, config):
    opened = checkpoint.open(write_checkpoint(quantized("a"), config))
    assert opened.method_name == "fp8"
    assert opened.quantization_config == FP8


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_the_quantization_config_may_be_in_a_file_beside_config_json(write_checkpoint, name):
    folder = write_checkpoint(quantized("a"))
    (folder / name).write_text(json.dumps(FP8))
    assert checkpoint.open(folder).method_name == "fp8"


def test_config_json_takes_precedence_over_the_files_beside_it(write_checkpoint):
    folder = write_checkpoint(quantized("a"), {"quantization_config": FP8})
    (folder / "quantize_config.json").write_text(json.dumps({"quant_method": "gptq"}))
    assert checkpoint.open(folder).method_name == "fp8"


@pytest.mark.parametrize(
    "side, config, name", [("quantize_config.json", {"bits": 4}, "gptq"), ("quant_config.json", {"w_bit": 4}, "awq")]
)
def test_a_method_that_is_not_named_follows_from_where_it_was_found(write_checkpoint, side, config, name):
    folder = write_checkpoint(quantized("a"))
    (folder / side).write_text(json.dumps(config))
    message = refusal(checkpoint.open, folder)
    assert f"has quant_method {name!r}, which is not supported; known are {KNOWN}" in message


@pytest.mark.parametrize("settings", [7, "fp8", {"bits": 4}, {"quant_method": 8}])
def test_a_malformed_quantization_config_is_refused(write_checkpoint, settings):
    message = refusal(checkpoint.open, write_checkpoint(quantized("a"), {"quantization_config": settings}))
    assert "config.json: its quantization_config" in message and "expected" in message


def test_unsupported_methods_name_themselves_and_the_known_ones(shared):
    for folder, name in (("awq_w4_g128", "awq"), ("gptq_w4_g128", "gptq"), ("bnb_nf4", "bitsandbytes")):
        message = refusal(checkpoint.open, shared / "fixtures" / "tiny-moe" / folder)
        assert f"{name!r}" in message and KNOWN in message


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"fmt": "e5m2"}, "fmt 'e5m2', expected 'e4m3'"),
        ({"activation_scheme": "token"}, "activation_scheme 'token'"),
        ({"activation_scheme": "static"}, "activation_scheme 'static' with weight_block_size [128, 128]"),
        ({"scale_fmt": "e5m3"}, "scale_fmt 'e5m3'"),
        ({"weight_block_size": [128]}, "weight_block_size [128]"),
        ({"weight_block_size": [0, 128]}, "weight_block_size [0, 128]"),
        ({"weight_block_size": [128, 2**31]}, "weight_block_size [128, 2147483648]"),
        ({"weight_block_size": None, "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0' without weight_block_size"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert 'lm_head', expected a list"),
        ({"quant_algo": "NVFP4"}, "quant_algo 'NVFP4', expected 'MIXED_PRECISION' or none"),
    ],
)
def test_settings_of_fp8_that_it_does_not_have_are_refused(write_checkpoint, changes, says):
    folder = write_checkpoint(quantized("a"), {"quantization_config": FP8 | changes})
    message = refusal(checkpoint.open, folder)
    assert message.startswith(f"{folder / 'config.json'}: its quantization_config has ") and says in message


def test_a_folder_without_config_json_is_refused(write_checkpoint):
    folder = write_checkpoint({"a.weight": plain(2, 2)})
    (folder / "config.json").unlink()
    assert refusal(checkpoint.open, folder) == f"{folder}: holds no config.json, expected one beside the weights"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": NaN}'])
def test_a_malformed_config_json_is_refused(write_checkpoint, text):
    folder = write_checkpoint({"a.weight": plain(2, 2)})
    (folder / "config.json").write_text(text)
    assert str(folder / "config.json") in refusal(checkpoint.open, folder)


def test_a_pickled_checkpoint_is_refused_unread(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a.weight": 1}))
    message = refusal(checkpoint.open, tmp_path)
    assert "holds no *.safetensors" in message and "pickled, which can run code" in message


def test_a_missing_path_a_missing_shard_and_a_truncated_file_are_refused(write_checkpoint, tmp_path):
    assert "does not exist" in refusal(checkpoint.open, tmp_path / "nowhere")
    folder = write_checkpoint({"a.weight": plain(64, 64)}, file="model-00001-of-00002.safetensors")
    index = {
        "weight_map": {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'model-00002-of-00002.safetensors' is not in" in refusal(checkpoint.open, folder)
    (folder / "model.safetensors.index.json").unlink()
    shard = folder / "model-00001-of-00002.safetensors"
    shard.rename(folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    assert "truncated" in refusal(checkpoint.open, folder)


def test_any_of_the_files_opens_the_checkpoint(write_checkpoint):
    folder = write_checkpoint({"a.weight": plain(2, 2)}, {"model_type": "m"})
    for path in (folder, folder / "model.safetensors", folder / "config.json", str(folder)):
        assert checkpoint.open(path).model_type == "m"


def test_quantized_by_the_configuration_but_not_by_the_tensors_is_refused(write_checkpoint):
    folder = write_checkpoint({"a.weight": plain(128, 128), "b.weight": plain(2)}, {"quantization_config": FP8})
    message = refusal(checkpoint.open, folder)
    assert "says quant_method 'fp8', but none of the 2 tensors" in message


def test_quantized_by_the_tensors_but_not_by_the_configuration_is_refused(write_checkpoint):
    message = refusal(checkpoint.open, write_checkpoint({"b.weight": plain(2, 2)} | quantized("a")))
    assert "a.weight_scale_inv" in message and "no quantization_config in config.json" in message


def test_fp8_codes_without_scale_or_configuration_are_refused(write_checkpoint):
    opened = checkpoint.open(write_checkpoint({"a.weight": np.ones((4, 4), E4M3)}))
    message = refusal(checkpoint.load_linear, opened, "a")
    assert "tensor 'a.weight' has dtype F8_E4M3, but neither the configuration nor a scale" in message


def test_a_norm_whose_parameter_is_called_scale_is_no_quantized_module(write_checkpoint):
    opened = checkpoint.open(write_checkpoint({"norm.scale": plain(4), "a.weight": plain(2, 2)}))
    assert opened.method_name == "none"


def test_a_layer_that_lost_its_scale_is_told_from_one_that_was_left_alone(write_checkpoint):
    tensors = quantized("layers.0.up") | {"layers.1.up.weight": plain(256, 128), "head.weight": plain(8, 128)}
    message = refusal(checkpoint.open, write_checkpoint(tensors, {"quantization_config": FP8}))
    assert "'layers.1.up' has no scale, but 'layers.0.up' has one" in message
    listed = FP8 | {"modules_to_not_convert": ["layers.1.up"]}
    opened = checkpoint.open(write_checkpoint(tensors, {"quantization_config": listed}))
    assert opened.recipe_for("layers.1.up") == opened.recipe_for("head") == recipe("bf16")
    assert opened.recipe_for("layers.0.up") == recipe("fp8_block")


@pytest.mark.parametrize("key", ["ignored_layers", "modules_to_not_convert"])
def test_a_module_that_is_listed_as_left_alone_but_quantized_is_refused(write_checkpoint, key):
    folder = write_checkpoint(quantized("layers.0.up"), {"quantization_config": FP8 | {key: ["layers.0"]}})
    message = refusal(checkpoint.open(folder).recipe_for, "layers.0.up")
    assert f"'layers.0.up.weight_scale_inv', but the configuration's {key} entry 'layers.0' says" in message


@pytest.mark.parametrize(
    "entry, module, matches",
    [
        ("lm_head", "lm_head", True),
        ("gate", "model.layers.0.mlp.gate", True),
        ("gate", "model.layers.0.mlp.gate_proj", False),
        ("gate", "model.layers.0.mlp.xgate", False),
        ("model.layers.0", "model.layers.0.mlp.gate", True),
        ("model.layers.1", "model.layers.10.mlp.gate", False),
        ("model.layers.*.self_attn", "model.layers.7.self_attn", True),
        ("model.layers.*.self_attn", "model.layers.7.self_attn.q_proj", True),
        ("*.attn.*", "layers.3.attn.wo_a", True),
        ("mtp*", "mtp.0.ffn", True),
        (r"model\.layers\.[0-2]", "model.layers.2.mlp", True),
        (r"model\.layers\.[0-2]", "model.layers.20.mlp", False),
        ("model.layers.0.", "model.layers.0.mlp", True),
        ("attn", "model.attn.q_proj", False),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_lists_of_modules_to_leave_alone_are_read_as_libraries_write_them(entry, module, matches):
    assert base.ModuleList(["unrelated", entry]).find(module) == (entry if matches else None)


def test_a_method_of_ones_own_is_found_under_its_name(write_checkpoint, monkeypatch):
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))

    @methods.register("mine")
    class Mine(methods.Method):
        """Halves of what is stored under ``twice``."""

        leaves = ("twice",)

        @classmethod
        def from_config(cls, config):
            return cls()

        def is_quantized(self, leaves):
            return "twice" in leaves

        def recipe_for(self, module, present):
            return recipe("bf16")

        def load_weight(self, tensors, module):
            return tensors.read(f"{module}.twice") / np.float32(2)

    folder = write_checkpoint(
        {"a.twice": np.full((2, 3), 8, np.float32)}, {"quantization_config": {"quant_method": "mine"}}
    )
    opened = checkpoint.open(folder)
    assert isinstance(opened.method, Mine)
    np.testing.assert_array_equal(checkpoint.load_linear(opened, "a"), np.full((2, 3), 4, np.float32))
    with pytest.raises(ValueError, match=r"name='mine' is taken by .*Mine"):
        methods.register("mine")(Mine)
    assert methods.known_methods()[-1] == "mine"


def test_the_account_of_the_tiny_checkpoint_is_complete_and_reads_no_data(monkeypatch):
    opened = checkpoint.open(TINY)
    monkeypatch.setattr(type(opened), "read", None)
    summary = opened.summary()
    assert (summary.model_type, summary.method, summary.kv_scales) == ("qwen3_moe", "none", ())
    assert summary.nbytes == sum(info.nbytes for info in opened.tensors.values())
    assert summary.parameters == summary.nbytes // 2
    assert sum(module.tensors for module in summary.modules) == len(opened.tensors)
    shapes = {module.name: (module.kind, module.shape) for module in summary.modules}
    assert shapes["model.layers.2.mlp.experts.w13"] == ("experts", (8, 2, 256, 256))
    assert shapes["model.layers.2.mlp.experts.w2"] == ("experts", (8, 256, 256))
    assert shapes["model.layers.0.self_attn.k_proj"] == ("linear", (128, 256))
    assert shapes["model.embed_tokens"] == ("embedding", (256, 256))
    assert shapes["model.norm"] == ("other", (256,))
    assert summary.unquantized == summary.modules and list(summary.by_recipe()) == ["bf16"]


def test_a_module_is_asked_for_by_its_name(write_checkpoint):
    with checkpoint.open(write_checkpoint({"a.weight": np.ones((2, 3), np.float32)})) as opened:
        assert opened.shape_for("a") == (2, 3)
        for ask in (opened.shape_for, opened.recipe_for):
            with pytest.raises(TypeError, match="module=3 must be the name of a module"):
                ask(3)


def test_a_tensor_without_a_module_is_in_the_account(write_checkpoint):
    with checkpoint.open(write_checkpoint({"weight": np.ones((2, 3), np.float32)})) as opened:
        [module] = opened.summary().modules
    assert (module.name, module.kind, module.recipe, module.shape, module.nbytes) == ("", "other", None, (2, 3), 24)


def test_the_account_of_an_fp8_checkpoint_tells_what_remains_unquantized(shared):
    summary = checkpoint.open(shared / "fixtures" / "tiny-moe" / "fp8_block_qwen3").summary()
    groups = summary.by_recipe()
    # Three layers of q, k, v, o and of w13 and w2.
    assert len(groups["fp8_block:scale_dtype=bfloat16"]) == 3 * 6
    assert {module.kind for module in groups["fp8_block:scale_dtype=bfloat16"]} == {"linear", "experts"}
    assert [m.name for m in summary.unquantized if m.kind == "linear"] == ["lm_head"] + [
        f"model.layers.{i}.mlp.gate" for i in range(3)
    ]
    w13 = next(m for m in summary.modules if m.name == "model.layers.0.mlp.experts.w13")
    assert w13.nbytes == 8 * 2 * (256 * 256 + 4 * 2) and w13.tensors == 8 * 2 * 2 and w13.parameters == 8 * 2 * 256**2


def test_scales_of_a_kv_cache_are_kept_apart_from_weights(write_checkpoint):
    tensors = quantized("attn.k_proj") | {"attn.k_proj.k_scale": np.ones(1, np.float32), "attn.v_scale": plain(1)}
    tensors |= {"attn.k_cache.scale": np.ones(1, np.float32)}
    opened = checkpoint.open(write_checkpoint(tensors, {"quantization_config": FP8}))
    summary = opened.summary()
    assert sorted(summary.kv_scales) == ["attn.k_cache.scale", "attn.k_proj.k_scale", "attn.v_scale"]
    assert [module.name for module in summary.modules] == ["attn.k_proj"]


def test_reading_files_and_headers_loads_no_models():
    program = (
        "import sys, jmoe.checkpoint.safetensors, jmoe.checkpoint\n"
        "jmoe.checkpoint.open\n"
        "print([m for m in sys.modules if m.startswith(('jmoe.models', 'jmoe.checkpoint.load'))])\n"
        "print(sorted(set(jmoe.checkpoint.__all__) - set(dir(jmoe.checkpoint))))\n"
        "try:\n    jmoe.checkpoint.nothing\nexcept AttributeError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["[]", "[]", "module 'jmoe.checkpoint' has no attribute 'nothing'"]


@pytest.mark.parametrize("dtype", ["int8", "bool"])
def test_a_weight_is_not_cast_to_integers(dtype):
    bf16 = Path(__file__).parents[1] / "data" / "tiny-moe" / "bf16"
    with checkpoint.open(bf16) as opened:
        with pytest.raises(TypeError, match=rf"dtype={dtype} must be bfloat16, float16 or float32"):
            checkpoint.load_linear(opened, "lm_head", dtype=dtype)
        with pytest.raises(TypeError, match=rf"dtype={dtype} must be bfloat16, float16 or float32"):
            checkpoint.load_experts(opened, "model.layers.0.mlp.experts", dtype=dtype)


def test_tensors_get_the_names_of_a_known_family(write_checkpoint):
    tensors = {
        f"transformer.h.0.ffn.experts.{e}.{name}.weight": np.full(shape, 10 * e + i, np.float32)
        for e in range(2)
        for i, (name, shape) in enumerate({"fc_gate": (2, 4), "fc_up": (2, 4), "fc_down": (4, 2)}.items())
    }
    names = [(r"^transformer\.h\.", "model.layers."), (r"\.fc_(\w+)", r".\1_proj")]
    with checkpoint.open(write_checkpoint(tensors), names=names) as opened:
        w13, w2 = checkpoint.load_experts(opened, "model.layers.0.ffn.experts")
        assert opened.tensors["model.layers.0.ffn.experts.0.up_proj.weight"].name.endswith("0.fc_up.weight")
    np.testing.assert_array_equal(w13[:, :, 0, 0], [[0, 1], [10, 11]])
    np.testing.assert_array_equal(w2[:, 0, 0], [2, 12])


@pytest.mark.parametrize(
    "names, error, says",
    [
        ([("(", "")], ValueError, "names[0]=('(', '') is no regular expression"),
        ([("a", r"\2")], ValueError, "has no replacement for it"),
        ([("a", "b"), ("x", "y")], ValueError, "names[1]=('x', 'y') changes none of the 2 tensors' names"),
        (
            [(r"\d", "")],
            checkpoint.CheckpointError,
            "tensor 'a1.weight' becomes 'a.weight' by names, as 'a0.weight' does",
        ),
        (["a"], TypeError, "names[0]='a' must be a pair"),
        ("a", TypeError, "names='a' must be a list"),
    ],
)
def test_names_that_are_none_are_refused(write_checkpoint, names, error, says):
    folder = write_checkpoint({"a0.weight": plain(2, 2), "a1.weight": plain(2, 2)})
    with pytest.raises(error) as caught:
        checkpoint.open(folder, names=names)
    assert says in str(caught.value)
