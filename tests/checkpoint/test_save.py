"""Writing quantized checkpoints: what files hold, that it is exactly what was quantized, and what is refused."""

import io
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jmoe
from jmoe import checkpoint
from jmoe.checkpoint.encode import form_of
from jmoe.checkpoint.safetensors import open_safetensors
from jmoe.checkpoint.safetensors_writer import write_safetensors
from jmoe.qtensor import QTensor
from jmoe.scheme import Recipe, Scheme, recipe

DATA = Path(__file__).resolve().parents[1] / "data"
TINY = DATA / "tiny-moe" / "bf16"
BF16 = ml_dtypes.bfloat16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
ATTENTION = "model.layers.0.self_attn"
EXPERTS = "model.layers.0.mlp.experts"


def normal(*shape, seed=0, dtype=BF16):
    return np.random.default_rng(seed).normal(0, 0.05, shape).astype(dtype)


def small():
    """A layer with attention and two experts, H = 128 and I = 256, its names and dtypes as Qwen3-MoE has them."""
    tensors = {
        "lm_head.weight": normal(10, 128),
        "model.embed_tokens.weight": normal(10, 128),
        "model.norm.weight": normal(128),
        "model.layers.0.input_layernorm.weight": normal(128),
        "model.layers.0.mlp.gate.weight": normal(2, 128),
        f"{ATTENTION}.q_proj.weight": normal(256, 128, seed=1),
        f"{ATTENTION}.q_proj.bias": normal(256),
        f"{ATTENTION}.k_proj.weight": normal(16, 128, seed=2) * BF16(8),
        f"{ATTENTION}.v_proj.weight": normal(16, 128, seed=3),
        f"{ATTENTION}.o_proj.weight": normal(128, 256, seed=4),
        f"{ATTENTION}.q_norm.weight": normal(24),
    }
    for e in range(2):
        tensors[f"{EXPERTS}.{e}.gate_proj.weight"] = normal(256, 128, seed=10 + e)
        tensors[f"{EXPERTS}.{e}.up_proj.weight"] = normal(256, 128, seed=20 + e) * BF16(4)
        tensors[f"{EXPERTS}.{e}.down_proj.weight"] = normal(128, 256, seed=30 + e)
    return tensors


LINEARS = [name.removesuffix(".weight") for name in small() if name.endswith("_proj.weight")]


def source(folder, tensors, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "none", **config}))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


def written(tmp_path, tensors, how, **options):
    """Every tensor and the quantization_config of what ``quantize_checkpoint`` writes."""
    checkpoint.quantize_checkpoint(source(tmp_path / "in", tensors), tmp_path / "out", how, **options)
    return contents(tmp_path / "out")


def contents(folder):
    with open_safetensors(folder) as files:
        tensors = {name: files.read(name) for name in files.tensors}
    return tensors, json.loads((folder / "config.json").read_text())["quantization_config"]


def refusal(tmp_path, tensors, how, kind=ValueError, **options):
    """The one sentence of what is refused, after which nothing is left beside the source."""
    folder = source(tmp_path / "in", tensors)
    with pytest.raises(kind) as caught:
        checkpoint.quantize_checkpoint(folder, tmp_path / "out", how, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(folder), "IN")


def fields(words, bits, count):
    """Bit fields of int32 words (R, W), the first in the lowest bits, as formats describe: (R, count)."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words.view(np.uint32)[..., None] >> shifts & (2**bits - 1)).reshape(len(words), -1)[:, :count].astype(int)


def e8m0(codes):
    return np.ldexp(np.float32(1), codes.view(np.uint8).astype(int) - 127).astype(np.float32)


def spread(scale, block, shape):
    rows, columns = (extent if b == -1 else b for b, extent in zip(block, shape, strict=True))
    return np.repeat(np.repeat(scale, rows, 0), columns, 1)[: shape[0], : shape[1]]


def decoded(tensors, settings, module):
    """A module's weight as the description of its format decodes it, float32."""
    leaves = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.rpartition(".")[0] == module}
    if settings["quant_method"] == "fp8":
        block = settings.get("weight_block_size", (-1, -1))
        scale = leaves["weight_scale_inv" if "weight_block_size" in settings else "weight_scale"]
        scale = e8m0(scale) if scale.dtype == ml_dtypes.float8_e8m0fnu else scale.astype(np.float32)
        codes = leaves["weight"].astype(np.float32)
        return codes * spread(scale.reshape(scale.shape or (1, 1)), block, codes.shape)
    weights = settings["config_groups"]["group_0"]["weights"]
    bits, group = weights["num_bits"], weights["group_size"] or -1
    block = tuple(weights["block_structure"] or (-1 if weights["strategy"] == "tensor" else 1, group))
    scale = leaves["weight_scale"]
    scale = e8m0(scale) if weights["scale_dtype"] == "torch.uint8" else scale.astype(np.float32)
    zero_point = np.float32(0)
    if settings["format"] == "pack-quantized":
        n, k = leaves["weight_shape"]
        codes = fields(leaves["weight_packed"], bits, k) - 2 ** (bits - 1)
        if "weight_zero_point" in leaves:
            packed = np.ascontiguousarray(leaves["weight_zero_point"].T)
            zero_point = spread(fields(packed, bits, n).T - 2 ** (bits - 1), block, (n, k))
    elif bits == 4 and weights["type"] == "float":
        packed = leaves["weight_packed"]
        codes = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)]
    else:
        codes = leaves["weight"]
    if "weight_global_scale" in leaves:
        scale = scale / leaves["weight_global_scale"]
    return (codes - zero_point).astype(np.float32) * spread(np.atleast_2d(scale), block, codes.shape)


EXACT = [
    "fp8_tensor",
    "fp8_block",
    "fp8_block:block=64,scale_dtype=bfloat16",
    "fp8_block:power_of_two",
    "fp8_block:scale_dtype=e8m0",
    "fp8_channel",
    "fp8_w8a16",
    "mxfp8",
    "mxfp4",
    "mxfp4_a8",
    "mxfp4_mxfp8",
    "mxfp4_a4:scale_rounding=floor",
    "int8",
    "int8_w8a16:group=64",
    "int8_w8a16:zero_point,scale_dtype=float16",
    "int4",
    "int4:group=32,zero_point,scale_dtype=bfloat16",
    "int4:group=-1",
    "int4_fp8",
    "int4_int8:group=64",
]


@pytest.mark.parametrize("how", EXACT)
def test_files_hold_exactly_what_quantize_gives(tmp_path, how):
    tensors, settings = written(tmp_path, small(), how)
    for module in LINEARS:
        weight = small()[f"{module}.weight"]
        np.testing.assert_array_equal(decoded(tensors, settings, module), jmoe.quantize(weight, how).dequantize())
        assert f"{module}.weight" not in tensors or tensors[f"{module}.weight"].dtype != BF16


@pytest.mark.parametrize("shape", [(1, 1), (5, 37), (130, 200)])
@pytest.mark.parametrize(
    "how", ["fp8_tensor", "fp8_block", "fp8_channel", "int8", "int4:group=-1", "int4:group=-1,zero_point", "int8_w8a16"]
)
def test_b08_odd_shapes_are_exact(tmp_path, how, shape):
    weight = normal(*shape, dtype=np.float32)
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        tensors, settings = written(tmp_path, {"layers.0.proj.weight": weight}, how)
        expected = np.asarray(jmoe.quantize(weight, how).dequantize())
    np.testing.assert_array_equal(decoded(tensors, settings, "layers.0.proj"), expected)


def test_nvfp4_has_the_codes_of_quantize_and_one_multiplier_for_what_engines_fuse(tmp_path):
    tensors, settings = written(tmp_path, small(), "nvfp4_w4a16")
    for fused in [
        [f"{ATTENTION}.{name}_proj" for name in "qkv"],
        [f"{ATTENTION}.o_proj"],
        *([f"{EXPERTS}.{e}.{name}_proj" for name in ("gate", "up")] for e in range(2)),
        [f"{EXPERTS}.0.down_proj"],
    ]:
        weight = np.concatenate([small()[f"{module}.weight"] for module in fused])
        q = jmoe.quantize(weight, "nvfp4_w4a16")
        joined = [np.concatenate([tensors[f"{m}.{leaf}"] for m in fused]) for leaf in ("weight_packed", "weight_scale")]
        np.testing.assert_array_equal(joined[0], q.data)
        np.testing.assert_array_equal(joined[1], q.scale)
        # The file's number divides: 2688 / amax.
        [divisor] = {float(tensors[f"{module}.weight_global_scale"][0]) for module in fused}
        assert divisor == np.float32(1 / np.float64(q.global_scale[0, 0]))
        assert divisor == pytest.approx(2688 / np.abs(weight.astype(np.float32)).max(), rel=2e-7)
        # A multiplier is not always the reciprocal of a float32: values differ by an ulp or two of it and the product.
        values = np.concatenate([decoded(tensors, settings, module) for module in fused])
        np.testing.assert_allclose(values, q.dequantize(), rtol=3e-7, atol=0)
        with checkpoint.open(tmp_path / "out") as opened:
            loaded = checkpoint.load_linear(opened, fused)
        assert loaded.scheme == q.scheme
        np.testing.assert_allclose(loaded.dequantize(), q.dequantize(), rtol=3e-7, atol=0)


def test_a02_blocks_of_zeros_stay_zero(tmp_path):
    weight = np.zeros((32, 128), np.float32)
    weight[0, 0] = 1
    for i, how in enumerate(["nvfp4_w4a16", "fp8_block", "mxfp4", "int4"]):
        (tmp_path / str(i)).mkdir()
        tensors, settings = written(tmp_path / str(i), {"layers.0.proj.weight": weight}, how)
        if how != "int4":  # 1 is no multiple of 1 / 7.5
            np.testing.assert_array_equal(decoded(tensors, settings, "layers.0.proj"), weight)
        else:
            assert not decoded(tensors, settings, "layers.0.proj").reshape(-1)[1:].any()
    # What compressed-tensors stores for such a block; a reader may divide by it.
    scale = contents(tmp_path / "0" / "out")[0]["layers.0.proj.weight_scale"].astype(np.float32)
    assert scale[0, 0] == 448 and set(scale.reshape(-1)[1:]) == {0.125}


def test_a03_an_nvfp4_scale_is_never_nan(tmp_path):
    weight = np.full((1, 32), 3e38, np.float32)
    tensors, _ = written(tmp_path, {"layers.0.proj.weight": weight}, "nvfp4_w4a16")
    assert (tensors["layers.0.proj.weight_scale"].view(np.uint8) == 0x7E).all()  # 448


def vector(name):
    with np.load(DATA / "vectors" / f"{name}.npz") as stored:
        return json.loads(stored["meta"].tobytes()), dict(stored)


@pytest.mark.parametrize("name, zero_point", [("ct_pack_w4a16_asym_g16_out44", True), ("ct_pack_w8a16_sym_g64", False)])
def test_packed_words_are_those_of_compressed_tensors(name, zero_point):
    meta, stored = vector(name)
    args = meta["quantization_config"]["config_groups"]["group_0"]["weights"]
    bits, group = args["num_bits"], args["group_size"]
    codes, scale = stored["x/q_int8"], stored["t/weight_scale"].view(BF16)
    how = recipe("int4" if bits == 4 else "int8_w8a16", group=group, zero_point=zero_point, scale_dtype="bfloat16")
    if bits == 4:
        unsigned = (codes + 8).astype(np.uint8)
        data = unsigned[:, ::2] | unsigned[:, 1::2] << 4
        zeros = fields(np.ascontiguousarray(stored["t/weight_zero_point"].T), 4, 44).T.astype(np.uint8)
    else:
        data, zeros = codes, None
    q = QTensor.make(
        jnp.asarray(data),
        jnp.asarray(scale),
        scheme=how.weight,
        zero_point=None if zeros is None else jnp.asarray(zeros),
    )
    np.testing.assert_array_equal(q.dequantize(), stored["x/dequant"])
    encoded = form_of(how).encode(q)
    assert set(encoded) == {leaf.removeprefix("t/") for leaf in stored if leaf.startswith("t/")}
    for leaf, array in encoded.items():
        np.testing.assert_array_equal(array.view(np.uint8), stored[f"t/{leaf}"].view(np.uint8), err_msg=leaf)
        assert array.shape == tuple(meta["tensors"][leaf]["shape"])


def with_scales(how, dtype):
    """A recipe with its weight's scales held in another dtype."""
    base = recipe(how)
    return Recipe(name=f"{how}_{dtype}", weight=base.weight.replace(scale_dtype=dtype), input=base.input)


@pytest.mark.parametrize(
    "fixture, how",
    [
        ("fp8_block_qwen3", recipe("fp8_block:scale_dtype=bfloat16")),
        ("ct_fp8_dynamic", with_scales("fp8_channel", "bfloat16")),
        ("ct_w8a8_int8", with_scales("int8", "bfloat16")),
        ("ct_w4a16_g128", recipe("int4:scale_dtype=bfloat16")),
        ("ct_nvfp4a16", recipe("nvfp4_w4a16")),
        ("ct_nvfp4", recipe("nvfp4")),
        ("ct_mxfp4", recipe("mxfp4_a4")),
    ],
)
def test_names_dtypes_shapes_and_configuration_are_llm_compressors(tmp_path, shared, fixture, how):
    published = shared / "fixtures" / "tiny-moe" / fixture
    with open_safetensors(published) as files:
        expected = {name: (info.dtype, info.shape) for name, info in files.tensors.items()}
    modules = [name.removesuffix(".weight_packed") for name in expected if name.endswith(".weight_packed")]
    scales = dict.fromkeys(modules, 0.01) if fixture == "ct_nvfp4" else None
    report = checkpoint.quantize_checkpoint(TINY, tmp_path / "out", how, input_scales=scales)
    with open_safetensors(tmp_path / "out") as files:
        assert {name: (info.dtype, info.shape) for name, info in files.tensors.items()} == expected
        assert files.metadata == {"format": "pt"}
        assert report.nbytes == sum(info.nbytes for info in files.tensors.values())
    config, other = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", published))
    ours, theirs = config.pop("quantization_config"), other.pop("quantization_config")
    key = "modules_to_not_convert" if fixture.startswith("fp8") else "ignore"
    names, published_names = set(ours.pop(key)), set(theirs.pop(key))
    # Qwen3's own lists name norms too, which are no linear layers.
    assert names == {name for name in published_names if "norm" not in name}
    assert (ours, config) == (theirs, other)
    assert (len(report.quantized), len(report.left), report.files) == (84, 5, 1)


# What reads as another scheme of the same values: a power of two held as float32 is no other number for it.
READ_AS = {"fp8_block:power_of_two": "fp8_block", "mxfp4_a4:scale_rounding=floor": "mxfp4_a4"}


@pytest.mark.parametrize("how", EXACT)
def test_layers_are_loaded_as_they_were_quantized(tmp_path, how):
    folder = source(tmp_path / "in", small())
    checkpoint.quantize_checkpoint(folder, tmp_path / "out", how, shard_size=100_000)
    with checkpoint.open(folder) as plain, checkpoint.open(tmp_path / "out") as opened:
        expected = jmoe.quantize(checkpoint.load_linear(plain, f"{ATTENTION}.k_proj"), how)
        loaded = checkpoint.load_linear(opened, f"{ATTENTION}.k_proj")
        assert loaded.scheme == recipe(READ_AS.get(how, how)).weight
        assert loaded.input_scheme == expected.input_scheme
        np.testing.assert_array_equal(loaded.dequantize(), expected.dequantize())
        bias = checkpoint.load_bias(opened, f"{ATTENTION}.q_proj")
        np.testing.assert_array_equal(bias, small()[f"{ATTENTION}.q_proj.bias"])
        pairs = zip(checkpoint.load_experts(opened, EXPERTS), checkpoint.load_experts(plain, EXPERTS), strict=True)
        for ours, dense in pairs:
            np.testing.assert_array_equal(ours.dequantize(), jmoe.quantize(dense, how).dequantize())


@pytest.mark.parametrize("how", ["fp8_block", "int4"])
def test_a_model_is_loaded_as_if_rules_had_quantized_it(tmp_path, how):
    checkpoint.quantize_checkpoint(TINY, tmp_path / "out", how, shard_size=2_000_000)
    rules = [(r".*self_attn\..*|.*\.mlp", how)]
    expected, loaded = (
        nnx.to_flat_state(nnx.state(model))
        for model in (checkpoint.load_model(TINY, rules=rules), checkpoint.load_model(tmp_path / "out"))
    )
    assert [path for path, _ in loaded] == [path for path, _ in expected]
    codes = 0
    for (path, ours), (_, theirs) in zip(loaded, expected, strict=True):
        ours, theirs = np.asarray(ours.get_value()), np.asarray(theirs.get_value())
        assert ours.dtype == theirs.dtype
        codes += ours.dtype in (np.uint8, ml_dtypes.float8_e4m3fn) and "scale" not in path[-1]
        np.testing.assert_array_equal(ours, theirs, err_msg=str(path))
    assert codes == 3 * 6  # four projections, w13 and w2 a layer


def test_given_activation_scales_are_written_and_read_back(tmp_path):
    scales = {module: 0.25 * (i + 1) for i, module in enumerate(LINEARS)}
    checkpoint.quantize_checkpoint(
        source(tmp_path / "in", small()), tmp_path / "fp8", "fp8_tensor_static", input_scales=scales
    )
    with checkpoint.open(tmp_path / "fp8") as opened:
        assert opened.input_scales() == scales
        assert opened.recipe_for(LINEARS[0]) == recipe("fp8_tensor_static")
    checkpoint.quantize_checkpoint(tmp_path / "in", tmp_path / "nvfp4", "nvfp4", input_scales=scales)
    tensors, _ = contents(tmp_path / "nvfp4")
    for module, scale in scales.items():  # compressed-tensors divides by what it stores
        assert tensors[f"{module}.input_global_scale"] == np.float32(1 / scale)


def test_what_is_no_linear_layer_of_a_numbered_layer_is_copied(tmp_path):
    tensors = small() | {
        "visual.blocks.0.attn.proj.weight": normal(4, 128),
        "model.layers.0.mlp.shared_expert_gate.weight": normal(1, 128),
        "model.layers.0.mlp.shared_expert.up_proj.weight": normal(8, 128),
        "model.layers.0.linear_attn.conv1d.weight": normal(4, 1, 4),
        "model.layers.0.mlp.gate.e_score_correction_bias": normal(2, dtype=np.float32),
        "model.layers.0.steps": np.arange(3),
    }
    found, settings = written(tmp_path, tensors, "fp8_channel")
    quantized = {name for name, tensor in found.items() if tensor.dtype == ml_dtypes.float8_e4m3fn}
    assert quantized == {f"{m}.weight" for m in [*LINEARS, "model.layers.0.mlp.shared_expert.up_proj"]}
    for name in tensors.keys() - quantized:
        np.testing.assert_array_equal(found[name], tensors[name])
        assert found[name].dtype == tensors[name].dtype
    # Every matrix that a reader could take for a quantized one; embeddings are no linear layers.
    assert settings["ignore"] == [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate",
        "visual.blocks.0.attn.proj",
    ]


def test_a_tied_lm_head_is_named_though_it_has_no_tensor(tmp_path):
    tensors = {name: tensor for name, tensor in small().items() if name != "lm_head.weight"}
    _, settings = written(tmp_path, tensors, "fp8_block")
    assert settings["modules_to_not_convert"] == ["lm_head", "model.layers.0.mlp.gate"]


@pytest.mark.parametrize(
    "entry, left",
    [
        ("self_attn", [m for m in LINEARS if "self_attn" in m]),
        ("mlp.experts", [m for m in LINEARS if "experts" in m]),
        ("layers.*.o_proj", [f"{ATTENTION}.o_proj"]),
        (f"{ATTENTION}.o_proj", [f"{ATTENTION}.o_proj"]),
        (r"re:.*\.(q|k|v)_proj$", [f"{ATTENTION}.{name}_proj" for name in "qkv"]),
        ("lm_head", []),
    ],
)
def test_patterns_leave_modules_alone(tmp_path, entry, left):
    tensors, settings = written(tmp_path, small(), "int8", ignore=[entry])
    assert {m for m in LINEARS if tensors[f"{m}.weight"].dtype == BF16} == set(left)
    assert settings["ignore"] == sorted({"lm_head", "model.layers.0.mlp.gate", *left})
    for module in left:
        np.testing.assert_array_equal(tensors[f"{module}.weight"], small()[f"{module}.weight"])


@pytest.mark.parametrize("entry", ["proj", "layers.1", "model.layers.0.self_attn.o", "", "re:self_attn"])
def test_patterns_that_match_nothing_are_refused(tmp_path, entry):
    message = refusal(tmp_path, small(), "int8", ignore=["self_attn", entry])
    assert message.startswith(f"ignore={entry!r} matches none of the 16 modules of IN; it is whole components")


def test_j05_patterns_that_tear_apart_what_engines_fuse_are_refused(tmp_path):
    for i, (entry, alone, twin) in enumerate(
        [
            ("gate_proj", f"{EXPERTS}.0.gate_proj", f"{EXPERTS}.0.up_proj"),
            ("q_proj", f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj"),
            ("down_proj", f"{EXPERTS}.0.down_proj", f"{EXPERTS}.1.up_proj"),
            ("experts.1", f"{EXPERTS}.1.gate_proj", f"{EXPERTS}.0"),
        ]
    ):
        (tmp_path / str(i)).mkdir()
        message = refusal(tmp_path / str(i), small(), "int8", ignore=[entry])
        assert re.fullmatch(
            rf"ignore='{entry}' leaves {EXPERTS if 'experts' in alone else ATTENTION}\S+ alone, but not "
            rf"{EXPERTS if 'experts' in twin else ATTENTION}\S+, and engines make one layer of them: ignore all of it "
            r"or nothing",
            message,
        )


def test_layers_that_are_not_whole_are_refused(tmp_path):
    up = f"{EXPERTS}.1.up_proj.weight"
    for i, (name, tensor, reason) in enumerate(
        [
            (up, None, f"IN: {EXPERTS}.1.up_proj is missing, though other experts have it"),
            (up, np.ones((256, 128), np.int16), f"IN/model.safetensors: tensor {up!r} has dtype I16, but"),
            (
                f"{ATTENTION}.q_proj.weight",
                normal(256 * 128),
                f"IN/model.safetensors: tensor '{ATTENTION}.q_proj.weight' has shape (32768,), expected the two axes",
            ),
        ]
    ):
        (tmp_path / str(i)).mkdir()
        tensors = {key: value for key, value in (small() | {name: tensor}).items() if value is not None}
        assert refusal(tmp_path / str(i), tensors, "int8", kind=checkpoint.CheckpointError).startswith(reason)


def test_files_are_no_larger_than_asked_for_and_listed_in_an_index(tmp_path):
    report = checkpoint.quantize_checkpoint(
        source(tmp_path / "in", small()), tmp_path / "out", "fp8_block", shard_size=60_000
    )
    files = sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix == ".safetensors")
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert report.files == len(files) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": report.nbytes}
    for file in files:
        with open_safetensors(tmp_path / "out" / file) as shard:
            assert {name for name, of in index["weight_map"].items() if of == file} == set(shard.tensors)
            assert sum(info.nbytes for info in shard.tensors.values()) <= 60_000
    whole, _ = contents(tmp_path / "out")
    checkpoint.quantize_checkpoint(tmp_path / "in", tmp_path / "one", "fp8_block")
    one, _ = contents(tmp_path / "one")
    assert set(whole) == set(one)
    for name, tensor in one.items():
        np.testing.assert_array_equal(whole[name], tensor)


def test_other_files_are_copied_and_weights_in_other_forms_are_not(tmp_path):
    folder = source(tmp_path / "in", small(), torch_dtype="bfloat16")
    for name in ("tokenizer.json", "templates/chat.jinja", "pytorch_model.bin", "a.gguf", ".hidden", ".git/HEAD"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    (folder / "generation_config.json").symlink_to(folder / "tokenizer.json")
    checkpoint.quantize_checkpoint(folder, folder / "out", "int8")
    found = {str(path.relative_to(folder / "out")) for path in (folder / "out").rglob("*") if path.is_file()}
    others = {"tokenizer.json", "templates/chat.jinja", "generation_config.json"}
    assert found == {"config.json", "model.safetensors"} | others
    assert (folder / "out" / "templates" / "chat.jinja").read_text() == "templates/chat.jinja"
    assert not (folder / "out" / "generation_config.json").is_symlink()
    config = json.loads((folder / "out" / "config.json").read_text())
    assert (config["model_type"], config["torch_dtype"]) == ("none", "bfloat16")


def test_nothing_looks_complete_before_it_is(tmp_path):
    seen = []

    def progress(done, total):
        assert not (tmp_path / "out").exists()
        [hidden] = [path for path in tmp_path.iterdir() if path.name != "in"]
        assert hidden.name.startswith(".out.") and not (hidden / "config.json").exists()
        seen.append((done, total))

    written(tmp_path, small(), "fp8_block", progress=progress)
    total = sum(tensor.nbytes for tensor in small().values())
    assert seen[-1] == (total, total) and [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(tmp_path, monkeypatch, terminal):
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr("jmoe.checkpoint.progress._SECONDS_BEFORE_PROGRESS", -1)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", stderr)
    written(tmp_path, small(), "fp8_block")
    assert ("in" in stderr.getvalue() and "kB" in stderr.getvalue()) is terminal
    assert terminal or stderr.getvalue() == ""


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_run_leaves_nothing(tmp_path, error):
    def progress(done, total):
        if done > total // 2:
            raise error

    folder = source(tmp_path / "in", small())
    with pytest.raises(error):
        checkpoint.quantize_checkpoint(folder, tmp_path / "out", "fp8_block", progress=progress)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_an_empty_folder_is_filled_and_any_other_is_left_as_it_is(tmp_path):
    folder = source(tmp_path / "in", small())
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    checkpoint.quantize_checkpoint(folder, tmp_path / "out", "int8")
    before = contents(tmp_path / "real")[1]
    for target in ("out", "in", "in/config.json"):
        kind = "is no folder" if target.endswith("json") else "is not empty"
        with pytest.raises(ValueError, match=f"dst=.* exists and {kind}; it must be a new or an empty folder"):
            checkpoint.quantize_checkpoint(folder, tmp_path / target, "fp8_block")
    assert contents(tmp_path / "real")[1] == before


def test_memory_holds_what_is_quantized_together_and_no_more(tmp_path, monkeypatch):
    quantized = []
    original = jmoe.quantize

    def spy(x, how):
        quantized.append(x.shape)
        return original(x, how)

    monkeypatch.setattr("jmoe.checkpoint.save.quantize", spy)
    written(tmp_path, small(), "nvfp4_w4a16")
    # q, k and v; o; gate with up, and down, of two experts.
    assert sorted(quantized) == sorted([(288, 128), (128, 256), *[(512, 128), (128, 256)] * 2])


class TestRefused:
    def test_a_quantized_source(self, tmp_path):
        checkpoint.quantize_checkpoint(source(tmp_path / "in", small()), tmp_path / "out", "fp8_block")
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.quantize_checkpoint(tmp_path / "out", tmp_path / "again", "int8")
        assert str(caught.value) == (
            f"{tmp_path / 'out'}: is quantized already (quant_method 'fp8'), expected an unquantized checkpoint"
        )
        assert not (tmp_path / "again").exists()

    def test_a_recipe_that_is_unknown_or_quantizes_nothing(self, tmp_path):
        with pytest.raises(ValueError, match="recipe 'fp9' is unknown; known recipes are"):
            checkpoint.quantize_checkpoint(tmp_path, tmp_path / "out", "fp9")
        with pytest.raises(ValueError, match="recipe 'bf16' leaves weights as they are; there is nothing to quantize"):
            checkpoint.quantize_checkpoint(tmp_path, tmp_path / "out", "bf16")

    @pytest.mark.parametrize(
        "how, reason",
        [
            ("nvfp4_per_token", "compressed-tensors cannot say that activations are e2m1 1x16 e4m3 global per token"),
            ("int4_int8:zero_point", "no checkpoint format that engines read holds weights of int4 1x128 float32 zero"),
            ("int4:scale_dtype=e8m0", "no checkpoint format that engines read holds weights of int4 1x128 e8m0"),
            (Recipe(name="mine", weight=Scheme(format="e5m2", block=(1, -1))), "weights of e5m2 1xall float32"),
        ],
    )
    def test_a_recipe_that_no_format_can_say(self, tmp_path, how, reason):
        assert reason in refusal(tmp_path, small(), how)

    @pytest.mark.parametrize(
        "how, k, form, group",
        [
            ("int4", 192, "pack-quantized", 128),
            ("nvfp4_w4a16", 24, "nvfp4-pack-quantized", 16),
            ("mxfp4", 48, "mxfp4-pack-quantized", 32),
            ("mxfp8", 33, "mxfp8-quantized", 32),
        ],
    )
    def test_b14_columns_that_do_not_fill_their_groups(self, tmp_path, how, k, form, group):
        message = refusal(tmp_path, {"layers.0.proj.weight": normal(4, k)}, how)
        assert message == (
            f"IN/model.safetensors: tensor 'layers.0.proj.weight' has K={k}, but {form} takes a multiple of {group}, "
            "the columns that share a scale; leave it alone with ignore, or take another recipe"
        )

    @pytest.mark.parametrize("shape", [(0, 128), (4, 0)])
    def test_weights_without_elements(self, tmp_path, shape):
        message = refusal(tmp_path, small() | {"layers.0.proj.weight": np.zeros(shape, BF16)}, "int4_int8")
        assert message == (
            f"IN/model.safetensors: tensor 'layers.0.proj.weight' has shape {shape}, which leaves nothing to quantize; "
            "leave it alone with ignore, or take another recipe"
        )

    def test_experts_in_one_tensor(self, tmp_path):
        tensors = small() | {"model.layers.1.mlp.experts.down_proj": normal(2, 8, 8)}
        assert refusal(tmp_path, tensors, "int8") == (
            "IN/model.safetensors: tensor 'model.layers.1.mlp.experts.down_proj' holds all experts of a layer, "
            "expected tensors of each expert"
        )

    def test_experts_in_one_tensor_may_be_ignored(self, tmp_path):
        tensors = small() | {"model.layers.1.mlp.experts.down_proj": normal(2, 8, 8)}
        _, settings = written(tmp_path, tensors, "int8", ignore=["layers.1.mlp.experts"])
        assert "model.layers.1.mlp.experts" in settings["ignore"]

    def test_elements_that_are_not_finite(self, tmp_path):
        tensors = small()
        tensors[f"{EXPERTS}.1.up_proj.weight"][3, 5] = np.nan
        message = refusal(tmp_path, tensors, "nvfp4_w4a16")
        assert message == (
            f"IN/model.safetensors: tensor '{EXPERTS}.1.up_proj.weight' holds nan at [3, 5], expected finite numbers"
        )

    def test_nothing_to_quantize(self, tmp_path):
        message = refusal(tmp_path, small(), "int8", ignore=["layers"])
        assert message == "IN: has no linear layer to quantize beside what ignore=['layers'] leaves alone"

    def test_activation_scales_that_do_not_fit(self, tmp_path):
        scales = dict.fromkeys(LINEARS, 1.0)
        cases = [
            ("nvfp4", None, f"input_scales has none for {EXPERTS}.0.down_proj, but recipe 'nvfp4' takes one a layer"),
            ("nvfp4", None, "'nvfp4_w4a16' needs none"),
            ("fp8_tensor_static", {}, "'fp8_tensor' needs none"),
            ("nvfp4", scales | {"lm_head": 1.0}, "input_scales has one for 'lm_head', which is no layer that is"),
            ("nvfp4", scales | {LINEARS[0]: 0.0}, f"input_scales['{LINEARS[0]}'] has the value 0, but a scale is"),
            ("int8", scales, "input_scales is given, but recipe 'int8' takes no activation scale"),
        ]
        for i, (how, given, reason) in enumerate(cases):
            (tmp_path / str(i)).mkdir()
            assert reason in refusal(tmp_path / str(i), small(), how, input_scales=given)

    def test_arguments_of_another_kind(self, tmp_path):
        with pytest.raises(TypeError, match=r"ignore='self_attn' must be a sequence of patterns"):
            checkpoint.quantize_checkpoint(TINY, tmp_path / "out", "int8", ignore="self_attn")
        with pytest.raises(ValueError, match=r"ignore='re:\(' must be 're:' and a regular expression"):
            checkpoint.quantize_checkpoint(TINY, tmp_path / "out", "int8", ignore=["re:("])
        with pytest.raises(ValueError, match="shard_size=0 must be a positive number of bytes"):
            checkpoint.quantize_checkpoint(TINY, tmp_path / "out", "int8", shard_size=0)
        with pytest.raises(checkpoint.CheckpointError, match="is a file, expected the folder of a whole checkpoint"):
            checkpoint.quantize_checkpoint(TINY / "model.safetensors", tmp_path / "out", "int8")
        assert list(tmp_path.iterdir()) == []

    def test_a_name_that_a_scale_takes(self, tmp_path):
        tensors = small() | {f"{ATTENTION}.o_proj.weight_shape": np.array([1, 2])}
        assert refusal(tmp_path, tensors, "int4") == (
            f"IN: has a tensor '{ATTENTION}.o_proj.weight_shape', a name that the scales of a layer take"
        )
