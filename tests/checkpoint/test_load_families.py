"""Whole models of Mixtral and gpt-oss against transformers' logits of tiny random ones, and against themselves."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmoe import checkpoint
from jmoe.checkpoint.safetensors import open_safetensors
from jmoe.models.decoder import Place
from jmoe.scheme import recipe

FAMILIES = Path(__file__).resolve().parents[1] / "data" / "families"
TOKENS = np.load(FAMILIES / "tokens.npy")
NAMES = ("mixtral", "mixtral_window", "gpt_oss")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The models by name, computing in float32; ``mixtral_window`` is Mixtral with a sliding window of 5."""
    windowed = tmp_path_factory.mktemp("mixtral_window")
    shutil.copy(FAMILIES / "mixtral" / "model.safetensors", windowed)
    config = json.loads((FAMILIES / "mixtral" / "config.json").read_text()) | {"sliding_window": 5}
    (windowed / "config.json").write_text(json.dumps(config))
    folders = {"mixtral": FAMILIES / "mixtral", "mixtral_window": windowed, "gpt_oss": FAMILIES / "gpt_oss"}
    return {name: checkpoint.load_model(folder, dtype=jnp.float32) for name, folder in folders.items()}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_transformers(models, name):
    expected = np.load(FAMILIES / f"{name}_logits.npy")
    logits = models[name](jnp.asarray(TOKENS))
    assert np.abs(expected).max() > 5
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)  # float32 in another order


@pytest.mark.parametrize("name", NAMES)
def test_decode_steps_give_the_logits_of_the_whole_sequence(models, name):
    # Eight tokens are more than the window of 5; then one at a time, and at last several at once.
    model, whole = models[name], models[name](jnp.asarray(TOKENS))
    step = nnx.jit(lambda model, tokens, cache: model.decode_step(tokens, cache))
    logits, cache = model.decode_step(TOKENS[:, :8], model.init_cache(2, 32))
    np.testing.assert_allclose(logits, whole[:, 7], atol=1e-4)
    for s in range(8, 17):
        logits, cache = step(model, TOKENS[:, s], cache)
        np.testing.assert_allclose(logits, whole[:, s], atol=1e-4)
    logits, cache = step(model, TOKENS[:, 17:], cache)
    np.testing.assert_allclose(logits, whole[:, -1], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_generate_takes_the_most_likely_token_each_time(models, name):
    generated = np.asarray(models[name].generate(TOKENS[:, :3], 12))
    whole = np.concatenate([TOKENS[:, :3], generated], axis=1)
    expected = np.argmax(np.asarray(models[name](jnp.asarray(whole))), axis=-1)[:, 2:-1]
    np.testing.assert_array_equal(generated, expected)


def test_a_model_in_bfloat16_is_close(models):
    model = checkpoint.load_model(FAMILIES / "gpt_oss")
    assert model.layers[0].self_attn.sinks.get_value().dtype == jnp.bfloat16
    logits, expected = model(jnp.asarray(TOKENS)), np.load(FAMILIES / "gpt_oss_logits.npy")
    assert np.linalg.norm(logits - expected) < 0.1 * np.linalg.norm(expected)


def test_experts_of_gpt_oss_stay_in_mxfp4_and_every_other_tensor_is_the_files(models):
    layer = models["gpt_oss"].layers[1]
    assert layer.mlp.recipe == recipe("mxfp4")
    prefix = "model.layers.1"
    with open_safetensors(FAMILIES / "gpt_oss" / "model.safetensors") as file:
        sinks, bias = file.read(f"{prefix}.self_attn.sinks"), file.read(f"{prefix}.mlp.router.bias")
        down, gate_up = (file.read(f"{prefix}.mlp.experts.{name}_proj_bias") for name in ("down", "gate_up"))
        np.testing.assert_array_equal(layer.self_attn.sinks.get_value(), sinks)
        np.testing.assert_array_equal(layer.mlp.router_bias.get_value(), bias)
        np.testing.assert_array_equal(layer.mlp.b2.get_value(), down)
        np.testing.assert_array_equal(layer.mlp.b13.get_value(), np.stack([gate_up[:, 0::2], gate_up[:, 1::2]], 1))
        np.testing.assert_array_equal(
            layer.self_attn.o_proj.bias.get_value(), file.read(f"{prefix}.self_attn.o_proj.bias")
        )


def test_names_are_the_families_and_module_paths_the_decoders(models):
    mixtral, gpt_oss = models["mixtral"].parameter_places(), models["gpt_oss"].parameter_places()
    assert mixtral["model.layers.1.block_sparse_moe.gate.weight"] == Place("layers.1.mlp", "router_weight")
    assert mixtral["model.layers.1.block_sparse_moe.experts.3.w1.weight"] == Place("layers.1.mlp", "w13", (3, 0))
    assert mixtral["model.layers.1.block_sparse_moe.experts.3.w3.weight"] == Place("layers.1.mlp", "w13", (3, 1))
    assert mixtral["model.layers.1.block_sparse_moe.experts.3.w2.weight"] == Place("layers.1.mlp", "w2", (3,))
    assert gpt_oss["model.layers.0.mlp.router.bias"] == Place("layers.0.mlp", "router_bias")
    assert gpt_oss["model.layers.0.self_attn.sinks"] == Place("layers.0.self_attn", "sinks")
    assert gpt_oss["model.layers.0.mlp.experts.2.up_proj.bias"] == Place("layers.0.mlp", "b13", (2, 1))
    assert gpt_oss["model.layers.0.mlp.experts.2.down_proj.bias"] == Place("layers.0.mlp", "b2", (2,))


def test_rules_quantize_mixtral_by_the_decoders_paths():
    model = checkpoint.load_model(FAMILIES / "mixtral", rules=[(r"layers\.0\.mlp", "int8_w8a16")])
    assert [layer.mlp.recipe.name for layer in model.layers] == ["int8_w8a16", "bf16"]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_every_byte_is_counted_once_as_it_arrives(family):
    seen = []
    checkpoint.load_model(FAMILIES / family, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert sorted(seen) == seen


def test_every_variable_of_gpt_oss_goes_where_the_device_function_says():
    asked = {}

    def device(name, shape):
        asked[name] = shape
        return jax.devices()[1]

    model = checkpoint.load_model(FAMILIES / "gpt_oss", device=device)
    state = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}
    assert asked == {name: leaf.shape for name, leaf in state.items()}
    assert {leaf.device for leaf in state.values()} == {jax.devices()[1]}


@pytest.mark.parametrize(
    "family, name, says",
    [
        ("gpt_oss", "model.layers.1.self_attn.sinks", "lacks 'model.layers.1.self_attn.sinks'"),
        ("gpt_oss", "model.layers.1.mlp.router.bias", "lacks 'model.layers.1.mlp.router.bias'"),
        ("gpt_oss", "model.layers.2.mlp.experts.down_proj_bias", "lacks 'model.layers.2.mlp.experts.0.down_proj.bias'"),
        ("gpt_oss", "model.layers.0.self_attn.k_proj.bias", "lacks 'model.layers.0.self_attn.k_proj.bias'"),
        ("mixtral", "model.layers.1.block_sparse_moe.gate.weight", "block_sparse_moe.gate.weight'"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.2.w3.weight", "block_sparse_moe.experts.2.w3.weight'"),
    ],
)
def test_what_a_family_must_have_is_missed_by_its_name(write_checkpoint, family, name, says):
    config = json.loads((FAMILIES / family / "config.json").read_text())
    with open_safetensors(FAMILIES / family / "model.safetensors") as file:
        tensors = {n: file.read(n) for n in file.tensors if n != name}
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.load_model(write_checkpoint(tensors, config))
    assert says in str(caught.value)


def test_a_shape_other_than_the_configurations_is_named(write_checkpoint):
    config = json.loads((FAMILIES / "gpt_oss" / "config.json").read_text())
    with open_safetensors(FAMILIES / "gpt_oss" / "model.safetensors") as file:
        tensors = {n: file.read(n) for n in file.tensors} | {"model.layers.1.self_attn.sinks": np.ones(3, np.float32)}
        with pytest.raises(checkpoint.CheckpointError, match=r"self_attn.sinks' has shape \(3,\), expected \(4,\)"):
            checkpoint.load_model(write_checkpoint(tensors, config))


def test_gpt_oss_works_under_strict_promotion_and_x64(models):
    expected, generated = models["gpt_oss"](TOKENS), models["gpt_oss"].generate(TOKENS[:, :4], 3)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        model = checkpoint.load_model(FAMILIES / "gpt_oss", dtype=jnp.float32)
        np.testing.assert_allclose(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(model.generate(TOKENS[:, :4], 3), generated)
