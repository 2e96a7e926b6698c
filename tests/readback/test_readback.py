"""Written checkpoints, read back by compressed-tensors and by transformers: equal dequantized weights.

Needs the extra ``readback``; `make test-readback` has an environment of its own for it.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import jmoe
from jmoe import checkpoint
from jmoe.checkpoint.encode import form_of
from jmoe.checkpoint.safetensors import open_safetensors
from jmoe.checkpoint.safetensors_writer import write_safetensors

REASON = "needs the extra readback"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)
BaseCompressor = pytest.importorskip("compressed_tensors.compressors", reason=REASON).BaseCompressor
QuantizationConfig = pytest.importorskip("compressed_tensors.quantization", reason=REASON).QuantizationConfig
load_file = pytest.importorskip("safetensors.torch", reason=REASON).load_file

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny-moe" / "bf16"

COMPRESSED = [
    "fp8_channel",
    "fp8_w8a16",
    "int8",
    "int8_w8a16:group=64",
    "int8_w8a16:zero_point,scale_dtype=bfloat16",
    "int4",
    "int4:group=32,zero_point,scale_dtype=bfloat16",
    "int4:group=-1",
    "int4_fp8",
    "int4_int8:group=64",
    "mxfp8",
    "mxfp4",
    "mxfp4_a8",
    "mxfp4_a4",
    "nvfp4",
    "nvfp4_w4a16",
]
# Of experts, transformers 5.24 reads blocks of FP8, FP8 a row, and packed weights that have but one scale and no zero
# point; of dense layers all that compressed-tensors does. It knows no scale of FP8 per tensor by vLLM's name.
EXPERTS = [
    *("fp8_block", "fp8_block:power_of_two", "fp8_channel", "int8_w8a16:group=64", "int4", "int4:group=-1", "int4_fp8"),
    *("mxfp4", "mxfp4_a8", "mxfp4_a4"),
]
DENSE = [recipe for recipe in COMPRESSED if recipe not in EXPERTS]


def first_layer(folder, **changes):
    """The tiny model with its first layer alone; as a dense model the first expert is its MLP."""
    folder.mkdir()
    config = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": 1} | changes
    config.pop("layer_types", None)
    dense = config["model_type"] == "qwen3"
    (folder / "config.json").write_text(json.dumps(config))
    with open_safetensors(TINY) as file:
        names = {name: name for name in file.tensors if not re.search(r"\.layers\.[1-9]", name)}
        if dense:
            names = {n: n.replace("experts.0.", "") for n in names if not re.search(r"experts\.[1-9]|mlp\.gate\.", n)}
        write_safetensors(folder / "model.safetensors", {name: file.read(source) for source, name in names.items()})
    return folder


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory):
    return first_layer(tmp_path_factory.mktemp("source") / "moe")


@pytest.fixture(scope="module")
def without_experts(tmp_path_factory):
    changes = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "intermediate_size": 256}
    return first_layer(tmp_path_factory.mktemp("source") / "dense", **changes)


def quantized(source, tmp_path, recipe):
    """The folder of what is written, and the modules that are quantized."""
    scales = None
    if recipe == "nvfp4":
        names = checkpoint.quantize_checkpoint(source, tmp_path / "plan", "int8").quantized
        scales = dict.fromkeys(names, 0.01)
    written = checkpoint.quantize_checkpoint(source, tmp_path / "out", recipe, input_scales=scales)
    return written.path, written.quantized


def ours(folder, modules):
    """float32 values by module, as this library reads them."""
    with checkpoint.open(folder) as opened:
        return {m: np.asarray(checkpoint.load_linear(opened, m, weight_only=True).dequantize()) for m in modules}


def assert_equal(found, expected, recipe, module, dtype):
    """Equal in the dtype that values are computed in; NVFP4's multiplier is rounded once more, to its reciprocal."""
    values = found.float().numpy()
    if recipe.startswith("nvfp4"):
        ulp = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7}[dtype]
        np.testing.assert_allclose(values, expected, rtol=ulp, atol=0, err_msg=module)
    else:
        rounded = torch.tensor(expected).to(dtype).float().numpy()
        np.testing.assert_array_equal(values, rounded, err_msg=module)


@pytest.mark.parametrize("recipe", COMPRESSED)
def test_compressed_tensors_decompresses_the_same_values(with_experts, tmp_path, recipe):
    folder, modules = quantized(with_experts, tmp_path, recipe)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(settings)
    (scheme,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
    tensors = load_file(folder / "model.safetensors")
    for module, expected in ours(folder, modules).items():
        leaves = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == module}
        found = compressor.decompress(leaves, scheme)["weight"]
        assert tuple(found.shape) == expected.shape
        assert_equal(found, expected, recipe, module, found.dtype)


def test_compressed_tensors_reads_what_is_said_of_a_kv_cache():
    scheme = QuantizationConfig.model_validate(form_of(jmoe.recipe("int8")).config([], kv_cache=True)).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.strategy) == (8, "float", "tensor")
    assert scheme.symmetric and not scheme.dynamic


def loaded_by_transformers(folder):
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    how = transformers.FineGrainedFP8Config if method == "fp8" else transformers.CompressedTensorsConfig
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=how(dequantize=True)
    )
    return model.state_dict()


@pytest.mark.parametrize("recipe", EXPERTS)
def test_transformers_loads_the_same_values(with_experts, tmp_path, recipe):
    folder, modules = quantized(with_experts, tmp_path, recipe)
    state = loaded_by_transformers(folder)
    for module, values in ours(folder, modules).items():
        assert_equal(of_transformers(state, module), values, recipe, module, torch.float32)


@pytest.mark.parametrize("recipe", DENSE)
def test_transformers_loads_the_same_values_of_dense_layers(without_experts, tmp_path, recipe):
    folder, modules = quantized(without_experts, tmp_path, recipe)
    assert len(modules) == 7
    state = loaded_by_transformers(folder)
    # Values are computed in the scales' dtype, and NVFP4's in bfloat16, before they become the model's float32.
    dtype = torch.bfloat16 if recipe.startswith("nvfp4") or "bfloat16" in recipe else torch.float32
    for module, values in ours(folder, modules).items():
        assert_equal(state[f"{module}.weight"], values, recipe, module, dtype)


def of_transformers(state, module):
    """A module's weight; transformers has experts in one tensor a layer, gate over up."""
    if "experts" not in module:
        return state[f"{module}.weight"]
    prefix, expert, projection = module.rsplit(".", 2)
    if projection == "down_proj":
        return state[f"{prefix}.down_proj"][int(expert)]
    both = state[f"{prefix}.gate_up_proj"][int(expert)]
    half = len(both) // 2
    return both[:half] if projection == "gate_proj" else both[half:]
