"""Whole models from checkpoints: logits and losses against the reference implementation's, and what is refused."""

import io
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jmoe
from jmoe import checkpoint
from jmoe.checkpoint import load, progress
from jmoe.checkpoint.safetensors import open_safetensors
from jmoe.checkpoint.safetensors_writer import write_safetensors
from jmoe.models import Decoder, DecoderConfig, evaluate
from jmoe.qtensor import QTensor
from jmoe.quantize import quantize
from jmoe.scheme import recipe

DATA = Path(__file__).resolve().parents[1] / "data"
BF16 = DATA / "tiny-moe" / "bf16"
E4M3 = ml_dtypes.float8_e4m3fn

# One layer of a model that is small enough to write out.
SMALL = {
    "model_type": "qwen3_moe",
    "vocab_size": 16,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "moe_intermediate_size": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (16, 8),
    "model.norm.weight": (8,),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8),
    "model.layers.0.self_attn.v_proj.weight": (4, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_norm.weight": (4,),
    "model.layers.0.self_attn.k_norm.weight": (4,),
    "model.layers.0.mlp.gate.weight": (2, 8),
    "model.layers.0.mlp.experts.0.gate_proj.weight": (4, 8),
    "model.layers.0.mlp.experts.0.up_proj.weight": (4, 8),
    "model.layers.0.mlp.experts.0.down_proj.weight": (8, 4),
    "model.layers.0.mlp.experts.1.gate_proj.weight": (4, 8),
    "model.layers.0.mlp.experts.1.up_proj.weight": (4, 8),
    "model.layers.0.mlp.experts.1.down_proj.weight": (8, 4),
}
PROJECTIONS = [name for name in SHAPES if "_proj" in name]
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


def small(dtype=np.float32):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in SHAPES.items()}


def small_static():
    """The small model in FP8 with given activation scales, expert 1's twice as large as expert 0's."""
    tensors = small(ml_dtypes.bfloat16)
    for name in PROJECTIONS:
        module = name.removesuffix(".weight")
        tensors[name] = tensors[name].astype(E4M3)
        tensors[f"{module}.weight_scale"] = np.float32(0.5)
        tensors[f"{module}.input_scale"] = np.float32(2 if ".1." in module else 1)
    return tensors


def leaves(model):
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def tokens(count=64):
    return np.fromfile(DATA / "heldout.bin", np.uint8, count).astype(np.int32)


@nnx.jit
def logits_of(model, ids):
    return model(ids[None])[0]


def reference(shared, name):
    return np.load(shared / "fixtures" / "tiny-moe" / "logits" / f"{name}.npy")


def reference_loss(shared, variant, key):
    return json.loads((shared / "fixtures" / "tiny-moe" / "reference.json").read_text())["variants"][variant][key]


@pytest.fixture(scope="module")
def bf16():
    return checkpoint.load_model(BF16, dtype=jnp.float32)


@pytest.fixture(scope="module")
def fp8(shared):
    return checkpoint.load_model(shared / "fixtures" / "tiny-moe" / "fp8_block_qwen3", dtype=jnp.float32)


@pytest.fixture(scope="module")
def fp8_weight_only(shared):
    folder = shared / "fixtures" / "tiny-moe" / "fp8_block_qwen3"
    return checkpoint.load_model(folder, dtype=jnp.float32, weight_only=True)


def test_logits_of_the_bf16_checkpoint_are_transformers(bf16, shared):
    difference = np.abs(logits_of(bf16, tokens()) - reference(shared, "bf16")).max()
    assert difference < 2e-4  # of logits up to 20: float32 in another order


def test_logits_of_the_fp8_checkpoint_are_transformers(fp8_weight_only, shared):
    difference = np.abs(logits_of(fp8_weight_only, tokens()) - reference(shared, "fp8_block_qwen3")).max()
    assert difference < 2e-4


def test_logits_with_quantized_activations_are_close_to_compressed_tensors(fp8, fp8_weight_only, shared):
    expected = reference(shared, "fp8_block_qwen3.w_and_a")
    difference = np.abs(logits_of(fp8, tokens()) - expected).max()
    # A code at a rounding boundary may fall to the other side; without any quantisation the difference is far larger.
    assert difference < 0.02
    assert np.abs(logits_of(fp8_weight_only, tokens()) - expected).max() > 5 * difference


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    "model, variant, key, tolerance",
    [
        ("fp8_weight_only", "fp8_block_qwen3", "nll_weight_only", 2e-4),
        ("fp8", "fp8_block_qwen3", "nll_weights_and_activations", 5e-4),
    ],
)
def test_held_out_losses_are_transformers(request, shared, model, variant, key, tolerance):
    loss = evaluate(request.getfixturevalue(model), np.fromfile(DATA / "heldout.bin", np.uint8))
    assert abs(loss - reference_loss(shared, variant, key)) < tolerance


def test_every_weight_is_the_checkpoints(bf16):
    stored, found = open_safetensors(BF16), leaves(bf16)
    assert sum(leaf.size for leaf in found.values()) == sum(np.prod(info.shape) for info in stored.tensors.values())
    for name, place in bf16.parameter_places().items():
        weight = found[f"{place.path}.{place.name}"]
        np.testing.assert_array_equal(weight[place.index], stored.read(name).astype(np.float32))


def test_weights_stay_in_their_format_and_dtype_is_that_of_the_others(fp8):
    found = leaves(fp8)
    assert found["layers.0.mlp.w13"].dtype == jnp.float8_e4m3fn
    assert found["layers.0.mlp.w13_scale"].dtype == jnp.bfloat16
    assert found["layers.0.self_attn.q_norm.weight"].dtype == found["lm_head.weight"].dtype == jnp.float32
    assert found["layers.0.mlp.router_weight"].dtype == jnp.bfloat16  # the file's
    named = recipe("fp8_block:scale_dtype=bfloat16")
    assert fp8.layers[1].mlp.recipe == fp8.layers[2].self_attn.o_proj.recipe == named
    assert fp8.lm_head.recipe == recipe("bf16")


def test_weight_only_leaves_activations_alone(fp8_weight_only):
    assert fp8_weight_only.layers[0].mlp.recipe == recipe("fp8_w8a16:scale_dtype=bfloat16")
    assert fp8_weight_only.layers[0].self_attn.q_proj.recipe.input is None


def test_rules_quantize_what_the_checkpoint_has_unquantized_as_the_decoder_itself_would():
    rules = [("layers.0.*", None), (r".*\.mlp", "int4:group=64"), (r".*_proj", "fp8_channel")]
    model = checkpoint.load_model(BF16, rules=rules)
    assert model.layers[0].mlp.recipe == model.layers[0].self_attn.q_proj.recipe == recipe("bf16")
    assert model.layers[1].mlp.recipe == recipe("int4:group=64")
    assert model.layers[2].self_attn.q_proj.recipe == recipe("fp8_channel")
    assert model.lm_head.recipe == recipe("bf16")
    with checkpoint.open(BF16) as opened:
        w13, _ = checkpoint.load_experts(opened, "model.layers.2.mlp.experts")
        expected = quantize(w13, "int4:group=64")
    jax.tree.map(np.testing.assert_array_equal, model.layers[2].mlp.qw13, expected)


def test_weight_only_holds_for_rules_too():
    model = checkpoint.load_model(BF16, rules=[(r"layers\.0\.mlp", "fp8_block")], weight_only=True)
    assert model.layers[0].mlp.recipe == recipe("fp8_w8a16")


def test_rules_may_change_the_activation_but_not_the_weight_of_a_quantized_layer(shared):
    folder = shared / "fixtures" / "tiny-moe" / "fp8_block_qwen3"
    rules = [(r"layers\.0\.mlp", "fp8_w8a16:scale_dtype=bfloat16")]
    model = checkpoint.load_model(folder, rules=rules)
    assert model.layers[0].mlp.recipe == recipe("fp8_w8a16:scale_dtype=bfloat16")
    assert model.layers[1].mlp.recipe == recipe("fp8_block:scale_dtype=bfloat16")
    with pytest.raises(ValueError, match=r"rules give layers\.0\.mlp the recipe 'int8', but the checkpoint has it as"):
        checkpoint.load_model(folder, rules=[(r"layers\.0\.mlp", "int8")])


def test_rules_cannot_give_a_scale_that_needs_calibration():
    for path in (r"layers\.0\.mlp", r"layers\.0\.self_attn\.q_proj"):
        with pytest.raises(ValueError, match="whose activation scale is a given one, and the checkpoint has none"):
            checkpoint.load_model(BF16, rules=[(path, "fp8_tensor_static")])


def test_given_activation_scales_reach_their_modules(write_checkpoint):
    folder = write_checkpoint(small_static(), SMALL | {"quantization_config": STATIC})
    model = checkpoint.load_model(folder)
    moe = model.layers[0].mlp
    assert moe.recipe == model.layers[0].self_attn.k_proj.recipe == recipe("fp8_tensor_static")
    assert float(moe.w13_input_scale.get_value()) == 2
    np.testing.assert_array_equal(moe.w2_input_scale.get_value(), [1, 2])
    assert float(model.layers[0].self_attn.k_proj.weight_input_scale.get_value()) == 1
    assert bool(jnp.isfinite(logits_of(model, jnp.asarray([1, 2, 3]))).all())
    mesh = jax.make_mesh((1,), ("model",))
    on_mesh = checkpoint.load_model(folder, mesh=mesh).layers[0].mlp.w2_input_scale.get_value()
    assert on_mesh.sharding.mesh == mesh and on_mesh.tolist() == [1, 2]
    weight_only = checkpoint.load_model(folder, weight_only=True)
    assert weight_only.layers[0].mlp.w13_input_scale is None
    assert weight_only.layers[0].mlp.recipe.input is None


def test_biases_are_loaded(write_checkpoint):
    tensors = small()
    for name, features in (("q", 8), ("k", 4), ("v", 4), ("o", 8)):
        tensors[f"model.layers.0.self_attn.{name}_proj.bias"] = np.arange(features, dtype=np.float32)
    model = checkpoint.load_model(write_checkpoint(tensors, SMALL | {"attention_bias": True}), dtype=jnp.float32)
    np.testing.assert_array_equal(model.layers[0].self_attn.v_proj.bias.get_value(), [0, 1, 2, 3])


def test_a_dtype_that_nothing_is_computed_in_is_refused():
    with pytest.raises(TypeError, match="dtype=int8 must be bfloat16, float16 or float32"):
        checkpoint.load_model(BF16, dtype=jnp.int8)


def test_progress_that_cannot_be_called_is_refused(write_checkpoint):
    with pytest.raises(TypeError, match="progress=3 must be a function of bytes done and bytes in all"):
        checkpoint.load_model(write_checkpoint(small(), SMALL), progress=3)


def test_an_open_checkpoint_is_taken_and_stays_open(write_checkpoint):
    with checkpoint.open(write_checkpoint(small(), SMALL)) as opened:
        checkpoint.load_model(opened)
        assert opened.read("model.norm.weight").shape == (8,)


def test_the_small_models_tensors_are_those_that_the_decoder_names(write_checkpoint):
    model = checkpoint.load_model(write_checkpoint(small(), SMALL), dtype=jnp.float32)
    assert set(model.parameter_places()) == set(SHAPES)
    empty = nnx.eval_shape(lambda: Decoder(DecoderConfig.from_hf(SMALL), param_dtype=jnp.float32))
    assert nnx.graphdef(model) == nnx.graphdef(empty)


def test_variables_go_where_the_device_function_says(write_checkpoint):
    asked = {}

    def device(name, shape):
        asked[name] = shape
        return jax.devices()[1]

    model = checkpoint.load_model(write_checkpoint(small(), SMALL), dtype=jnp.float32, device=device)
    found = leaves(model)
    assert asked == {name: leaf.shape for name, leaf in found.items()}
    assert {leaf.device for leaf in found.values()} == {jax.devices()[1]}


def refusal(write_checkpoint, tensors, config=SMALL):
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load_model(write_checkpoint(tensors, config))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_that_the_model_makes_itself_are_left_alone(write_checkpoint):
    tensors = small() | {
        "lm_head.weight": np.ones((16, 8), np.float32),  # tied to the embedding
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
        "model.layers.0.self_attn.k_proj.k_scale": np.ones(1, np.float32),
    }
    assert checkpoint.load_model(write_checkpoint(tensors, SMALL)).lm_head is None


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.mlp.experts.2.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.g_idx",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "stray",
    ],
)
def test_a_tensor_without_a_place_is_named(write_checkpoint, name):
    message = refusal(write_checkpoint, small() | {name: np.ones(8, np.float32)})
    assert message.endswith(f": holds {name!r}, for which the model has no place")


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_tensor_is_named(write_checkpoint, name):
    tensors = small()
    del tensors[name]
    assert refusal(write_checkpoint, tensors).endswith(f": lacks {name!r}, which the model has")


def test_many_missing_tensors_are_counted(write_checkpoint):
    message = refusal(write_checkpoint, {"model.norm.weight": np.ones(8, np.float32)})
    assert f"and {len(SHAPES) - 1 - 3} more, which the model has" in message


@pytest.mark.parametrize(
    "key, held", [("num_hidden_layers", "layers with tensors is 1"), ("num_experts", "experts with tensors is 2")]
)
def test_numbers_that_no_tensors_are_of_are_refused_before_a_model_is_made(write_checkpoint, key, held):
    message = refusal(write_checkpoint, small(), SMALL | {key: 10**9})
    assert message.endswith(f"config.json: {key}=1000000000, but the number of {held}")


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_other_than_the_configurations_is_named_before_anything_is_read(write_checkpoint, monkeypatch, name):
    monkeypatch.setattr(checkpoint.Checkpoint, "read", None)
    wrong = (*SHAPES[name][:-1], SHAPES[name][-1] + 1)
    message = refusal(write_checkpoint, small() | {name: np.ones(wrong, np.float32)})
    says = f"model.safetensors: tensor {name!r} has shape {wrong}, expected {SHAPES[name]} as config.json says"
    assert message.endswith(says)


def test_a_shape_is_checked_for_quantized_layers_too(write_checkpoint):
    tensors = small_static()
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"] = np.ones((4, 9), E4M3)
    message = refusal(write_checkpoint, tensors, SMALL | {"quantization_config": STATIC})
    assert "experts.1.up_proj.weight' has shape (4, 9), expected (4, 8) as config.json says" in message


@pytest.mark.parametrize(
    "changes, says",
    [({"model_type": "llama"}, "model_type='llama'"), ({"num_experts": None}, "has no num_experts")],
)
def test_a_model_that_is_not_there_is_refused(write_checkpoint, changes, says):
    message = refusal(write_checkpoint, small(), SMALL | changes)
    assert "config.json: config" in message and says in message


@pytest.mark.parametrize("key", ["num_experts", "hidden_size", "num_hidden_layers", "vocab_size", "head_dim"])
@pytest.mark.parametrize("value", ["8", 0, 1.5, [], True])
def test_a_configuration_of_the_wrong_kind_is_refused_by_file_and_key(write_checkpoint, key, value):
    message = refusal(write_checkpoint, small(), SMALL | {key: value})
    assert "config.json: " in message and f"{key}={value!r} must be an integer of at least 1" in message


def test_a_checkpoint_in_two_shards_is_the_same_model(tmp_path, bf16):
    shutil.copy(BF16 / "config.json", tmp_path)
    with open_safetensors(BF16) as whole:
        names = list(whole.tensors)
        files = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            write_safetensors(tmp_path / file, {name: whole.read(name) for name in names if files[name] == file})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    model = checkpoint.load_model(tmp_path, dtype=jnp.float32)
    for name, leaf in leaves(model).items():
        np.testing.assert_array_equal(leaf, leaves(bf16)[name])


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(write_checkpoint, monkeypatch, terminal):
    monkeypatch.setattr(progress, "_SECONDS_BEFORE_PROGRESS", -1)
    monkeypatch.setenv("TERM", "xterm")
    stderr = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    folder = write_checkpoint(small(), SMALL)
    checkpoint.load_model(folder)
    if terminal:
        assert folder.name in stderr.getvalue()
    else:
        assert stderr.getvalue() == ""


def test_quick_loads_show_no_progress(write_checkpoint, monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    checkpoint.load_model(write_checkpoint(small(), SMALL))
    assert stderr.getvalue() == ""


def test_progress_that_is_asked_for_takes_the_place_of_the_bar(write_checkpoint, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_BEFORE_PROGRESS", -1)
    monkeypatch.setattr("sys.stderr", Terminal())
    told = []
    checkpoint.load_model(write_checkpoint(small(), SMALL), progress=lambda *counts: told.append(counts))
    total = sum(tensor.nbytes for tensor in small().values())
    done = [count for count, of in told if of == total]
    assert len(done) == len(told) > 5
    assert done == sorted(done) and done[-1] == total
    assert sys.stderr.getvalue() == ""


def test_quantized_weights_are_prepared_for_their_operation(write_checkpoint, monkeypatch):
    prepared = []

    def prepare(w, *, op):
        prepared.append((op, w.shape))
        return w.with_input_scheme(None) if isinstance(w, QTensor) else w

    monkeypatch.setattr(load, "prepare", prepare)
    model = checkpoint.load_model(write_checkpoint(small(), SMALL), rules=[(r".*o_proj", "int8"), (r".*mlp", "int8")])
    assert {shape for op, shape in prepared if op == "moe"} == {(2, 2, 4, 8), (2, 8, 4)}
    assert {shape for op, shape in prepared if op == "linear"} == {(8, 8), (4, 8)}
    layer = model.layers[0]
    for weight in (layer.self_attn.o_proj.qweight, layer.mlp.qw13, layer.mlp.qw2):
        assert weight.input_scheme is None  # as prepared, not as the rule says


def test_weights_that_nothing_serves_here_are_refused_unless_what_serves_them_is_named(write_checkpoint):
    folder, rules = write_checkpoint(small(), SMALL), [(r".*mlp", "nvfp4_per_token")]
    with jmoe.config(device="h100"):
        with pytest.raises(ExceptionGroup, match="no implementation serves moe nvfp4_per_token"):
            checkpoint.load_model(folder, rules=rules)
        model = checkpoint.load_model(folder, rules=rules, implementation="xla")
    assert model.layers[0].mlp.recipe.name == "nvfp4_per_token"


def test_loading_works_under_strict_promotion_and_x64(write_checkpoint):
    tensors = small_static()
    folder = write_checkpoint(tensors, SMALL | {"quantization_config": STATIC})
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        model = checkpoint.load_model(folder, implementation="reference")
        merged = checkpoint.load_linear(
            checkpoint.open(folder), [f"model.layers.0.self_attn.{n}_proj" for n in ("q", "k", "v")]
        )
        assert isinstance(merged, QTensor) and merged.scale.dtype == jnp.float32
        assert bool(jnp.isfinite(logits_of(model, jnp.asarray([1, 2, 3], jnp.int32))).all())
