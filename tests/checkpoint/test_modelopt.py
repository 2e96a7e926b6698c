"""ModelOpt checkpoints: values against the library's own, both forms of the configuration, and what is refused."""

import json
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmoe
from jmoe import checkpoint
from jmoe.models import evaluate
from jmoe.scheme import Scheme, recipe

DATA = Path(__file__).resolve().parents[1] / "data"
BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
RECIPES = {
    "ckpt_modelopt_fp8": recipe("fp8_tensor_static"),
    "ckpt_modelopt_fp8moe": recipe("fp8_tensor_static"),
    "ckpt_modelopt_nvfp4": recipe("nvfp4"),
    "ckpt_modelopt_nvfp4moe": recipe("nvfp4"),
    "ckpt_modelopt_w4a16nv": recipe("nvfp4_w4a16"),
}


def settings(algo, **more):
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"]} | more


def side_form(**quantization):
    return {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization}


def fp8(n=4, k=32, scale=0.5, given=2.0):
    scales = {"weight_scale": np.float32(scale), "input_scale": np.float32(given)}
    return {"weight": np.ones((n, k), E4M3)} | scales


def nvfp4(n=4, k=32, multiplier=0.25, given=2.0):
    """Every code is 2, which is 1, and every block's scale is 3."""
    return {
        "weight": np.full((n, k // 2), 0x22, np.uint8),
        "weight_scale": np.full((n, k // 16), 3, E4M3),
        "weight_scale_2": np.float32(multiplier),
        "input_scale": np.float32(given),
    }


def mxfp8(n=4, k=64):
    return {"weight": np.ones((n, k), E4M3), "weight_scale": np.full((n, k // 32), 128, np.uint8)}


def at(module, tensors):
    return {f"{module}.{leaf}": array for leaf, array in tensors.items()}


def without(tensors, *leaves):
    return {leaf: array for leaf, array in tensors.items() if leaf not in leaves}


def opened(write_checkpoint, tensors, config):
    return checkpoint.open(write_checkpoint(tensors, {"quantization_config": config}))


def refusal(write_checkpoint, tensors, config, module="a"):
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load_linear(opened(write_checkpoint, tensors, config), module)
    return str(caught.value)


def loaded_vector(write_checkpoint, path):
    """A golden vector, loaded as module ``a`` of a checkpoint; the library's values."""
    if not path.is_file():
        pytest.skip(f"needs {path.name} among the golden vectors")
    with np.load(path) as stored:
        meta = json.loads(stored["meta"].tobytes())
        views = {"F8_E4M3": E4M3}
        tensors = {
            leaf: stored[f"t/{leaf}"].view(views[info["dtype"]]) if info["dtype"] in views else stored[f"t/{leaf}"]
            for leaf, info in meta["tensors"].items()
        }
        source = opened(write_checkpoint, at("a", tensors), meta["quantization_config"])
        return source, checkpoint.load_linear(source, "a"), stored["x/dequant"]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("mo_fp8_pc_pt", recipe("fp8_channel")),
        ("mo_fp8_pb_wo_32", recipe("fp8_w8a16:block=32")),
        ("mo_mxfp4", recipe("mxfp4_a8")),
        ("mo_nvfp4", recipe("nvfp4")),
    ],
)
def test_values_of_a_vector_are_exactly_the_librarys(write_checkpoint, shared, name, expected):
    source, w, values = loaded_vector(write_checkpoint, shared / "vectors" / f"{name}.npz")
    assert (w.scheme, w.input_scheme) == (expected.weight, expected.input)
    assert source.recipe_for("a").name == expected.name
    assert source.shape_for("a") == w.shape == values.shape
    np.testing.assert_array_equal(w.dequantize(), values)


@pytest.mark.parametrize("name", RECIPES)
def test_every_module_of_a_checkpoint_is_exactly_the_librarys(shared, name):
    folder = shared / "vectors" / name
    with checkpoint.open(folder) as source, np.load(folder / "expected.npz") as expected:
        assert len(expected.files) >= 7
        for key in expected.files:
            module = key.removesuffix(".weight")
            w = checkpoint.load_linear(source, module)
            assert (w.scheme, w.input_scheme) == (RECIPES[name].weight, RECIPES[name].input)
            np.testing.assert_array_equal(w.dequantize(), expected[key])
            given = checkpoint.load_input_scale(source, module)
            if RECIPES[name].input is None:
                assert given is None
            else:
                assert given == source.read(f"{module}.input_scale")
        kept = [module.name for module in source.summary().unquantized if module.kind != "other"]
        gates = [f"model.layers.{i}.mlp.gate" for i in range(2)] if name.endswith("moe") else []
        assert sorted(kept) == sorted(["lm_head", "model.embed_tokens", *gates])


@pytest.mark.parametrize("name", ["ckpt_modelopt_fp8moe", "ckpt_modelopt_nvfp4moe"])
def test_experts_are_exactly_the_librarys_and_keep_a_scale_each(shared, name):
    folder = shared / "vectors" / name
    prefix = "model.layers.0.mlp.experts"
    with checkpoint.open(folder) as source, np.load(folder / "expected.npz") as expected:
        w13, w2 = checkpoint.load_experts(source, prefix)
        for e in range(4):
            for half, projection in enumerate(("gate_proj", "up_proj")):
                np.testing.assert_array_equal(w13.dequantize()[e, half], expected[f"{prefix}.{e}.{projection}.weight"])
            np.testing.assert_array_equal(w2.dequantize()[e], expected[f"{prefix}.{e}.down_proj.weight"])
        given, intermediate = checkpoint.load_expert_scales(source, prefix)
        halves = [source.read(f"{prefix}.{e}.{p}.input_scale") for e in range(4) for p in ("gate_proj", "up_proj")]
        assert given == max(halves)
        np.testing.assert_array_equal(
            intermediate, [source.read(f"{prefix}.{e}.down_proj.input_scale") for e in range(4)]
        )


@pytest.mark.parametrize("name", ["ckpt_modelopt_fp8", "ckpt_modelopt_nvfp4"])
def test_scales_of_a_kv_cache_are_told_apart(shared, name):
    with checkpoint.open(shared / "vectors" / name) as source:
        known = {f"model.layers.{i}.self_attn.{p}_proj.{p}_scale" for i in range(2) for p in "kv"}
        assert set(source.kv_scales) == known


@pytest.fixture(scope="module")
def model(shared):
    folder = shared / "fixtures" / "tiny-moe" / "modelopt_fp8"
    return checkpoint.load_model(folder, dtype=jnp.float32, weight_only=True)


@pytest.mark.usefixtures("optimised")
def test_a_whole_model_has_the_reference_logits_and_loss(model, shared):
    tokens = np.fromfile(DATA / "heldout.bin", np.uint8)
    folder = shared / "fixtures" / "tiny-moe"
    logits = np.load(folder / "logits" / "modelopt_fp8.npy")
    np.testing.assert_allclose(model(tokens[None, :64].astype(np.int32))[0], logits, rtol=0, atol=2e-3)
    known = json.loads((folder / "reference.json").read_text())["variants"]["modelopt_fp8"]["nll_weight_only"]
    assert abs(evaluate(model, tokens) - known) < 2e-4


def test_a_whole_model_with_its_given_activation_scales_has_the_reference_logits(shared):
    tokens = np.fromfile(DATA / "heldout.bin", np.uint8, 64).astype(np.int32)
    folder = shared / "fixtures" / "tiny-moe"
    model = checkpoint.load_model(folder / "modelopt_fp8", dtype=jnp.float32)
    expected = np.load(folder / "logits" / "modelopt_fp8.w_and_a.npy")
    # A code may fall to the other side of a rounding boundary: the worst logit found is 1.1e-3 off.
    np.testing.assert_allclose(model(tokens[None])[0], expected, rtol=0, atol=1e-2)
    assert np.linalg.norm(model(tokens[None])[0] - expected) < 1e-4 * np.linalg.norm(expected)


def test_the_side_file_alone_means_the_same(shared, tmp_path):
    folder = shared / "vectors" / "ckpt_modelopt_nvfp4moe"
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("hf_quant_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with checkpoint.open(tmp_path) as ours, checkpoint.open(folder) as theirs:
        assert ours.method_name == theirs.method_name == "modelopt"
        assert ours.summary().by_recipe().keys() == theirs.summary().by_recipe().keys()
        module = "model.layers.1.self_attn.q_proj"
        assert ours.recipe_for(module) == theirs.recipe_for(module) == recipe("nvfp4")


def test_quant_method_may_be_missing_where_the_producer_is_named(write_checkpoint):
    config = without(settings("fp8", producer={"name": "modelopt", "version": "0.30"}), "quant_method")
    with opened(write_checkpoint, at("a", fp8()), config) as source:
        assert source.method_name == "modelopt" and source.recipe_for("a").name == "fp8_tensor_static"


@pytest.mark.parametrize("algo", ["FP8_PB_WO", "fp8_pb_wo", "FP8_BLOCK_SCALES"])
def test_blocks_are_128_by_128_and_ragged_at_the_ends(write_checkpoint, algo):
    scale = np.float32([[1, 2], [4, 8]])
    tensors = {"weight": np.ones((160, 200), E4M3), "weight_scale": scale[:, None, :, None]}
    w = checkpoint.load_linear(opened(write_checkpoint, at("a", tensors), settings(algo)), "a")
    expected = recipe("fp8_block" if algo == "FP8_BLOCK_SCALES" else "fp8_w8a16")
    assert (w.scheme, w.input_scheme) == (expected.weight, expected.input)
    values = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:160, :200]
    np.testing.assert_array_equal(w.dequantize(), values)


def test_a_matrix_of_one_block_has_one_number_for_a_scale(write_checkpoint):
    tensors = {"weight": np.ones((96, 128), E4M3), "weight_scale": np.float32(3)}
    w = checkpoint.load_linear(opened(write_checkpoint, at("a", tensors), settings("FP8_PB_WO")), "a")
    assert w.scheme == recipe("fp8_w8a16").weight and w.scale.tolist() == [[3]]


@pytest.mark.parametrize("dtype", [np.uint8, E8M0])
def test_mxfp8_scales_are_e8m0_by_either_dtype(write_checkpoint, dtype):
    tensors = mxfp8() | {"weight_scale": np.full((4, 2), 128, np.uint8).view(dtype)}
    w = checkpoint.load_linear(opened(write_checkpoint, at("a", tensors), settings("MXFP8")), "a")
    assert (w.scheme, w.input_scheme) == (recipe("mxfp8").weight, recipe("mxfp8").input)
    np.testing.assert_array_equal(w.dequantize(), np.full((4, 64), 2))


def test_mxfp4_with_a_given_scale_of_e4m3_activations(write_checkpoint):
    tensors = {
        "weight": np.full((4, 16), 0x22, np.uint8),
        "weight_scale": np.full((4, 1), 127, np.uint8),
        "input_scale": np.float32(0.5),
    }
    with opened(write_checkpoint, at("a", tensors), settings("W4A8_MXFP4_FP8")) as source:
        w, given = checkpoint.load_linear(source, "a"), checkpoint.load_input_scale(source, "a")
    assert (w.scheme, w.input_scheme) == (recipe("mxfp4").weight, Scheme(format="e4m3", block=(-1, -1), static=True))
    # Codes of 1; x / 0.5 is a code of e4m3.
    y = jmoe.linear(jnp.ones((1, 32)), w, input_scale=given)
    np.testing.assert_array_equal(y, np.full((1, 4), 32))


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4"])
def test_nvfp4_without_activations_is_weight_only(write_checkpoint, algo):
    group = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "input_activations": None}
    tensors = nvfp4()  # older files still have an input_scale
    if algo == "NVFP4":
        del tensors["input_scale"]
    source = opened(write_checkpoint, at("a", tensors), settings(algo, config_groups={"group_0": group}))
    w = checkpoint.load_linear(source, "a")
    assert (w.scheme, w.input_scheme) == (recipe("nvfp4_w4a16").weight, None)
    assert checkpoint.load_input_scale(source, "a") is None
    np.testing.assert_array_equal(w.dequantize(), np.full((4, 32), 0.75))  # 1 * 3 * 0.25


def test_c07_shards_keep_their_own_multipliers_and_share_the_largest_input_scale(write_checkpoint):
    tensors = at("q", nvfp4(multiplier=0.25, given=2.0)) | at("k", nvfp4(n=2, multiplier=0.5, given=3.0))
    source = opened(write_checkpoint, tensors, settings("NVFP4"))
    w = checkpoint.load_linear(source, ["q", "k"])
    assert w.global_scale.tolist() == [[0.25]] * 4 + [[0.5]] * 2
    np.testing.assert_array_equal(w.dequantize()[:, 0], [0.75] * 4 + [1.5] * 2)
    assert checkpoint.load_input_scale(source, ["q", "k"]) == 3
    # x is exact in NVFP4 at the multiplier 3: 18 = 6 * 1 * 3, times 32 * 0.75 or 32 * 1.5.
    y = jmoe.linear(jnp.full((1, 32), 18.0), w, input_scale=checkpoint.load_input_scale(source, ["q", "k"]))
    np.testing.assert_array_equal(y, [[18 * 24] * 4 + [18 * 48] * 2])


def test_fp8_shards_keep_their_own_scales(write_checkpoint):
    tensors = at("gate", fp8(scale=0.5)) | at("up", fp8(scale=4))
    w = checkpoint.load_linear(opened(write_checkpoint, tensors, settings("FP8")), ["gate", "up"])
    assert w.scheme.block == (1, -1) and w.scale[:, 0].tolist() == [0.5] * 4 + [4] * 4


def test_a02_a_block_of_zeros_may_have_the_scale_0_in_nvfp4(write_checkpoint):
    tensors = nvfp4()
    tensors["weight_scale"][0, 0] = 0
    w = checkpoint.load_linear(opened(write_checkpoint, at("a", tensors), settings("NVFP4")), "a")
    np.testing.assert_array_equal(w.dequantize()[0], [0] * 16 + [0.75] * 16)


@pytest.mark.parametrize("value, shown", [(np.nan, "nan"), (-1, "-1")])
def test_a03_a_block_scale_that_is_none_is_refused(write_checkpoint, value, shown):
    tensors = nvfp4()
    tensors["weight_scale"][1, 1] = value
    message = refusal(write_checkpoint, at("a", tensors), settings("NVFP4"))
    assert (
        f"tensor 'a.weight_scale' holds the scale {shown} at [1, 1], expected finite numbers of at least 0" in message
    )


@pytest.mark.parametrize(
    "leaf, load", [("weight_scale_2", checkpoint.load_linear), ("input_scale", checkpoint.load_input_scale)]
)
def test_a05_a_multiplier_of_0_was_never_set(write_checkpoint, leaf, load):
    source = opened(write_checkpoint, at("a", nvfp4() | {leaf: np.float32(0)}), settings("NVFP4"))
    with pytest.raises(checkpoint.CheckpointError, match=f"tensor 'a.{leaf}' holds the scale 0, expected"):
        load(source, "a")


MIXED = {
    "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.0.self_attn.q_proj": {"quant_algo": "fp8"},
    "model.layers.1.self_attn.q_proj": {"quant_algo": "MXFP8", "group_size": 32},
}


def mixed_tensors(root="model"):
    experts = [f"{root}.layers.0.mlp.experts.{e}.{p}_proj" for e in range(2) for p in ("gate", "up", "down")]
    tensors = {name: array for module in experts for name, array in at(module, nvfp4(32, 32)).items()}
    tensors |= at(f"{root}.layers.0.self_attn.q_proj", fp8()) | at(f"{root}.layers.1.self_attn.q_proj", mxfp8())
    return tensors | {f"{root}.layers.2.self_attn.q_proj.weight": np.ones((4, 32), BF16)}


@pytest.mark.parametrize("root", ["model", "language_model.model", "model.language_model"])
def test_mixed_precision_gives_each_layer_its_own(write_checkpoint, root):
    config = settings("MIXED_PRECISION", quantized_layers=MIXED)
    with opened(write_checkpoint, mixed_tensors(root), config) as source:
        found = [source.recipe_for(f"{root}.layers.{i}.self_attn.q_proj").name for i in range(3)]
        assert found == ["fp8_tensor_static", "mxfp8", "bf16"]
        w13, _ = checkpoint.load_experts(source, f"{root}.layers.0.mlp.experts")
        assert w13.scheme == recipe("nvfp4").weight and w13.global_scale.shape == (2, 2, 1, 1)
        assert len(source.summary().modules) == 5


def test_layers_may_be_listed_in_the_side_file_only(write_checkpoint, tmp_path):
    side = side_form(quant_algo="MIXED_PRECISION", kv_cache_quant_algo=None, quantized_layers=MIXED)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(side))
    with opened(write_checkpoint, mixed_tensors(), settings("MIXED_PRECISION")) as source:
        assert source.recipe_for("model.layers.1.self_attn.q_proj").name == "mxfp8"


def test_two_configurations_that_contradict_each_other_are_refused(write_checkpoint, tmp_path):
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(side_form(quant_algo="NVFP4")))
    message = refusal(write_checkpoint, at("a", fp8()), settings("FP8"))
    assert "has quant_algo 'FP8', but hf_quant_config.json beside it has 'NVFP4'" in message
    other = side_form(quant_algo="MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}})
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(other))
    message = refusal(write_checkpoint, mixed_tensors(), settings("MIXED_PRECISION", quantized_layers=MIXED))
    assert "has quantized_layers other than those of hf_quant_config.json beside it" in message


def test_a_listed_layer_without_a_scale_is_refused_and_so_is_a_scale_that_is_not_listed(write_checkpoint):
    config = settings("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "FP8"}})
    tensors = at("a", fp8()) | {"b.weight": np.ones((4, 32), BF16)}
    message = refusal(write_checkpoint, tensors, config, "b")
    assert "'b.weight' is BF16 without a scale, but the configuration's quantized_layers entry 'b' has" in message
    message = refusal(write_checkpoint, tensors | at("c", fp8()), config, "c")
    assert (
        "'c.weight_scale' is a scale, but the configuration's quantized_layers, in which it is not listed," in message
    )


@pytest.mark.parametrize(
    "entry, module",
    [
        ("lm_head", "lm_head"),
        ("model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj"),
        ("model.layers.1*", "model.layers.1.mlp.gate"),
        ("*.mlp.gate", "model.layers.1.mlp.gate"),
        ("mlp.gate", "model.layers.1.mlp.gate"),
        ("self_attn", "model.layers.0.self_attn.q_proj"),
        ("model.layers.0.self_attn", "language_model.model.layers.0.self_attn.q_proj"),
        ("model.layers.0.self_attn*", "model.language_model.layers.0.self_attn.q_proj"),
        ("language_model.model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj"),
        ("model.layers.?.mlp.gate", "model.layers.7.mlp.gate"),
    ],
)
def test_entries_that_exclude_a_module(write_checkpoint, entry, module):
    tensors = at("other.proj", fp8()) | {f"{module}.weight": np.ones((4, 32), BF16)}
    source = opened(write_checkpoint, tensors, settings("FP8", ignore=[entry]))
    assert source.method.ignored_by(module) == f"ignore entry {entry!r}"
    assert source.recipe_for(module).name == "bf16"
    # The same module with a scale contradicts the configuration.
    message = refusal(write_checkpoint, tensors | at(module, fp8()), settings("FP8", exclude_modules=[entry]), module)
    assert f"'{module}.weight_scale' is a scale, but the configuration's" in message and repr(entry) in message


@pytest.mark.parametrize(
    "entry, module",
    [
        ("model.layers.1*", "model.layers.0.mlp.up_proj"),  # as a regular expression it would mean every layer
        ("model.layers.1", "model.layers.10.mlp.up_proj"),
        ("gate", "model.layers.0.mlp.gate_proj"),
        ("language_model.visual*", "model.layers.0.mlp.up_proj"),
        ("language_model.*", "model.layers.0.mlp.up_proj"),
    ],
)
def test_entries_that_exclude_no_such_module(write_checkpoint, entry, module):
    source = opened(write_checkpoint, at(module, fp8()), settings("FP8", ignore=[entry]))
    assert source.method.ignored_by(module) is None
    assert checkpoint.load_linear(source, module).scale.tolist() == [[0.5]]


def test_a_plain_layer_among_quantized_ones_must_be_excluded(write_checkpoint):
    tensors = at("layers.0.up_proj", fp8()) | {"layers.1.up_proj.weight": np.ones((4, 32), BF16)}
    message = refusal(write_checkpoint, tensors, settings("FP8"))
    assert "'layers.1.up_proj' has no scale, but 'layers.0.up_proj' has one" in message
    opened(write_checkpoint, tensors, settings("FP8", ignore=["layers.1*"]))


@pytest.mark.parametrize(
    "algo, tensors, says",
    [
        ("FP8", nvfp4(), "'a.weight' has dtype U8, expected F8_E4M3 as the configuration's quant_algo 'FP8' says"),
        ("NVFP4", fp8(), "'a.weight' has dtype F8_E4M3, expected U8 as the configuration's quant_algo 'NVFP4' says"),
        ("FP8", without(fp8(), "input_scale"), "'a.weight' has no a.input_scale, expected one as the configuration's"),
        ("NVFP4", without(nvfp4(), "input_scale"), "'a.weight' has no a.input_scale, expected one as"),
        ("NVFP4", without(nvfp4(), "weight_scale_2"), "'a.weight' has no a.weight_scale_2, expected one as"),
        ("NVFP4", without(nvfp4(), "weight_scale"), "'a.weight_scale_2' belongs to a quantized weight, but has no a.w"),
        ("NVFP4", without(nvfp4(), "weight"), "'a.weight_scale' is a scale, but 'a.weight' is missing"),
        ("FP8_PER_CHANNEL_PER_TOKEN", fp8(), "'a.input_scale' is there, expected only weight, weight_scale as"),
        ("NVFP4", nvfp4() | {"pre_quant_scale": np.ones(32, BF16)}, "'a.pre_quant_scale' is there, expected only"),
        ("FP8", fp8() | {"weight_scale": np.ones(4, np.float32)}, "has shape (4,), expected (1, 1)"),
        ("FP8", fp8() | {"weight_scale": np.ones((), np.int32)}, "has dtype I32, expected F32 or BF16 or F16 as the"),
        ("FP8", fp8() | {"input_scale": np.ones(4, np.float32)}, "'a.input_scale' is F32 of shape (4,), expected one"),
        (
            "FP8_PER_CHANNEL_PER_TOKEN",
            without(fp8(), "input_scale"),
            "has shape (), expected (4,), one a row of 'a.weight'",
        ),
        (
            "NVFP4",
            nvfp4() | {"weight_scale": np.ones((4, 1), E4M3)},
            "has shape (4, 1), expected (4, 2) for 'a.weight'",
        ),
        (
            "NVFP4",
            nvfp4() | {"weight_scale": np.ones((2, 4), E4M3)},
            "expected (4, 2) for 'a.weight' of 4 rows of 32 4-",
        ),
        ("NVFP4", nvfp4() | {"weight_scale": np.ones((4, 2), np.uint8)}, "has dtype U8, expected F8_E4M3 as the"),
        ("MXFP8", mxfp8() | {"weight_scale": np.ones((4, 2), np.float32)}, "has dtype F32, expected U8 or F8_E8M0 as"),
        ("MXFP8", mxfp8() | {"weight_scale": np.ones((4, 4), np.uint8)}, "has shape (4, 4), expected (4, 2) for"),
        (
            "FP8_PB_WO",
            {"weight": np.ones((160, 200), E4M3), "weight_scale": np.ones((2, 2), np.float32)},
            "has shape (2, 2), expected (2, 1, 2, 1) for 'a.weight' of shape (160, 200) in blocks of 128x128",
        ),
        (
            "FP8_PB_WO",
            {"weight": np.ones((160, 200), E4M3), "weight_scale": np.ones((2, 1, 4, 1), np.float32)},
            "has shape (2, 1, 4, 1), expected (2, 1, 2, 1)",
        ),
        (
            "FP8_PB_WO",
            {"weight": np.ones((160, 200), E4M3), "weight_scale": np.float32(1)},
            "has shape (), expected (2, 1, 2, 1)",
        ),
    ],
)
def test_tensors_that_contradict_the_configuration_are_refused(write_checkpoint, algo, tensors, says):
    assert says in refusal(write_checkpoint, at("a", tensors), settings(algo))


def group(weights=4, inputs=4, **more):
    return {
        "group_0": {
            "weights": {"num_bits": weights, "type": "float", "group_size": 16} | more,
            "input_activations": inputs and {"num_bits": inputs, "type": "float"},
        }
    }


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"quant_algo": "W4A16_AWQ"}, "has quant_algo 'W4A16_AWQ', which is not supported; known are FP8, "),
        ({"quant_algo": None}, "has quant_algo None, which is not supported"),
        ({"sparsity": "2:4"}, "has the key 'sparsity' with the value '2:4', which is not known"),
        ({"group_size": 32}, "has quant_algo 'NVFP4' with group_size 32, expected 16"),
        ({"config_groups": group(weights=8)}, "weights of its config_groups.group_0 has num_bits 8, expected 4"),
        (
            {"config_groups": group(inputs=8)},
            "input_activations of its config_groups.group_0 has num_bits 8, expected 4",
        ),
        (
            {"config_groups": group(type="int")},
            "weights of its config_groups.group_0 is of type 'int', expected 'float'",
        ),
        ({"config_groups": group(group_size=32)}, "quant_algo 'NVFP4' with group_size 32, expected 16"),
        ({"config_groups": ["Linear"]}, "has config_groups ['Linear'], expected an object of objects"),
        ({"quantized_layers": MIXED}, "has quantized_layers with quant_algo 'NVFP4', expected 'MIXED_PRECISION'"),
        (
            {"quant_algo": "MIXED_PRECISION"},
            "with quantized_layers None, expected an object of settings by module here",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W8A16"}}},
            "has for 'a' in quantized_layers the quant_algo 'W8A16', which is not supported",
        ),
        ({"kv_cache_quant_algo": "NVFP4"}, "has kv_cache_quant_algo 'NVFP4', expected 'FP8'"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "has kv_cache_scheme {'num_bits': 4, 'type': 'float'}"),
        ({"ignore": "lm_head"}, "has ignore 'lm_head', expected a list of names"),
        ({"quantization": "NVFP4"}, "has quantization 'NVFP4', expected an object"),
        ({"quantization": {"quant_algo": "FP8"}}, "has quant_algo 'NVFP4', but under quantization it has 'FP8'"),
    ],
)
def test_settings_that_are_unknown_or_contradict_each_other_are_refused(write_checkpoint, changed, says):
    assert says in refusal(write_checkpoint, at("a", nvfp4()), settings("NVFP4") | changed)


@pytest.mark.parametrize(
    "kv", [{"kv_cache_scheme": "FP8"}, {"kv_cache_quant_algo": "FP8"}, {"kv_cache_quant_algo": None}]
)
def test_a_kv_cache_in_fp8_does_not_matter_to_weights(write_checkpoint, kv):
    tensors = at("a.k_proj", nvfp4()) | {"a.k_proj.k_scale": np.float32(0.1), "a.v_proj.v_scale": np.float32(0.1)}
    source = opened(write_checkpoint, tensors, settings("NVFP4", **kv))
    assert source.kv_scales == ("a.k_proj.k_scale", "a.v_proj.v_scale")
    assert checkpoint.load_linear(source, "a.k_proj").shape == (4, 32)
