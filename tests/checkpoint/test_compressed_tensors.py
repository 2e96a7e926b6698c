"""compressed-tensors checkpoints: values against the library's vectors, every layout by hand, and what is refused."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jmoe
from jmoe import checkpoint
from jmoe.checkpoint.safetensors_writer import write_safetensors
from jmoe.models import evaluate
from jmoe.qtensor import QTensor
from jmoe.scheme import Scheme, recipe
from tests.checkpoint.test_load_fp8 import placed, vector
from tests.checkpoint.test_load_model import DATA, logits_of, reference, reference_loss, tokens

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
ULP = 2.0**-23

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 4}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def config(weights, activation=None, *, targets=("Linear",), **settings):
    group = {"targets": list(targets), "weights": weights, "input_activations": activation}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, **settings}


def opened(write_checkpoint, tensors, settings):
    return checkpoint.open(write_checkpoint(tensors, {"quantization_config": settings}))


def loaded(write_checkpoint, tensors, settings, names="a"):
    with opened(write_checkpoint, placed(tensors, "a"), settings) as files:
        return checkpoint.load_linear(files, names)


def values(weight):
    return np.asarray(weight.dequantize() if isinstance(weight, QTensor) else weight, np.float32)


def words(codes, bits, whole_fields=False):
    """Unsigned codes (rows, count) as int32 words, bit after bit, or as many whole fields as a word holds."""
    every = [[(int(code) >> bit) & 1 for code in row for bit in range(bits)] for row in codes]
    if whole_fields:
        step = 32 // bits * bits
        every = [[b for i in range(0, len(row), step) for b in row[i : i + step] + [0] * (32 - step)] for row in every]
    every = [row + [0] * (-len(row) % 32) for row in every]
    return np.packbits(np.array(every, np.uint8), axis=1, bitorder="little").view(np.int32)


def packed(codes, bits, scale, **options):
    shape = np.array(np.shape(codes), np.int64)
    return {"weight_packed": words(codes, bits, **options), "weight_scale": scale, "weight_shape": shape}


# Against the library.

EXACT = [
    "ct_fp8_block_ragged",
    "ct_fp8_channel",
    "ct_fp8_tensor_static",
    "ct_int_w8a8_channel",
    "ct_mxfp4",
    "ct_pack_w3a16_sym_g32",
    "ct_pack_w4a16_asym_g16_out44",
    "ct_pack_w4a16_sym_g32",
    "ct_pack_w8a16_sym_g64",
    "ctold_pack_w4a16_sym_gidx",
]
ONE_ULP = ["ct_nvfp4", "ct_nvfp4a16"]  # the library divides by its global scale

RECIPES = {
    "ct_fp8_block_ragged": recipe("fp8_block:scale_dtype=bfloat16"),
    "ct_mxfp4": recipe("mxfp4_a4"),
    "ct_nvfp4": recipe("nvfp4"),
    "ct_nvfp4a16": recipe("nvfp4_w4a16"),
    "ct_pack_w3a16_sym_g32": recipe("int4:group=32,scale_dtype=bfloat16"),
    "ct_pack_w4a16_asym_g16_out44": recipe("int4:group=16,zero_point,scale_dtype=bfloat16"),
    "ct_pack_w4a16_sym_g32": recipe("int4:group=32,scale_dtype=bfloat16"),
    "ct_pack_w8a16_sym_g64": recipe("int8_w8a16:group=64,scale_dtype=bfloat16"),
    "ctold_pack_w4a16_sym_gidx": recipe("bf16"),
}


def test_every_vector_of_the_format_is_here(shared):
    there = {path.stem for path in (shared / "vectors").glob("ct*.npz")}
    assert there == {*EXACT, *ONE_ULP}


@pytest.mark.parametrize("name", EXACT + ONE_ULP)
def test_values_are_the_librarys(write_checkpoint, shared, name):
    tensors, settings, expected = vector(shared, name)
    with opened(write_checkpoint, placed(tensors), settings) as files:
        module = "model.layers.0.self_attn.o_proj"
        weight = checkpoint.load_linear(files, module)
        if name in RECIPES:
            assert files.recipe_for(module) == RECIPES[name]
        assert weight.shape == files.shape_for(module) == expected.shape
    np.testing.assert_allclose(values(weight), expected, rtol=ULP if name in ONE_ULP else 0, atol=0)


@pytest.mark.parametrize("name", ["ckpt_ct_mxfp4_moe", "ckpt_ct_w4a16_kimi_moe"])
def test_every_module_of_a_checkpoint_is_the_librarys(shared, name):
    folder = shared / "vectors" / name
    with np.load(folder / "expected.npz") as expected, checkpoint.open(folder) as files:
        assert len(expected) == 7
        for tensor in expected:
            weight = checkpoint.load_linear(files, tensor.removesuffix(".weight"))
            np.testing.assert_array_equal(values(weight), expected[tensor])
        w13, w2 = checkpoint.load_experts(files, "model.layers.1.mlp.experts")
        gate, up, down = (
            [expected[f"model.layers.1.mlp.experts.{e}.{p}_proj.weight"] for e in (0, 1)]
            for p in ("gate", "up", "down")
        )
        np.testing.assert_array_equal(values(w13), np.stack([gate, up], 1))
        np.testing.assert_array_equal(values(w2), down)
        quantized = {module.name for module in files.summary().modules if module.quantized}
        assert quantized == {"model.layers.1.mlp.experts.w13", "model.layers.1.mlp.experts.w2"}


MODELS = ["ct_fp8_block", "ct_fp8_dynamic", "ct_mxfp4", "ct_nvfp4", "ct_nvfp4a16", "ct_w4a16_g128", "ct_w8a8_int8"]


def load_model(shared, name, **options):
    return checkpoint.load_model(shared / "fixtures" / "tiny-moe" / name, dtype=jnp.float32, **options)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_transformers(shared, name):
    model = load_model(shared, name, weight_only=True)
    difference = np.abs(logits_of(model, tokens()) - reference(shared, name)).max()
    assert difference < 2e-4  # of logits up to 20: float32 in another order


@pytest.mark.parametrize("name", ["ct_mxfp4", "ct_nvfp4"])
def test_logits_with_fp4_activations_are_the_librarys(shared, name):
    model = load_model(shared, name)
    expected = reference(shared, f"{name}.w_and_a")
    assert np.abs(logits_of(model, tokens()) - expected).max() < 2e-3
    assert np.abs(reference(shared, name) - expected).max() > 1  # what quantising activations changes


def test_logits_with_blocks_of_fp8_activations_are_close_to_the_librarys(shared):
    expected = reference(shared, "ct_fp8_block.w_and_a")
    difference = np.abs(logits_of(load_model(shared, "ct_fp8_block"), tokens()) - expected).max(-1)
    # Where a code at a rounding boundary falls to the other side, logits are off from that token on.
    assert np.median(difference) < 1e-4 and difference.max() < 0.2
    assert np.median(np.abs(reference(shared, "ct_fp8_block") - expected).max(-1)) > 0.01


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", MODELS)
def test_held_out_losses_are_transformers(shared, name):
    loss = evaluate(load_model(shared, name, weight_only=True), np.fromfile(DATA / "heldout.bin", np.uint8))
    assert abs(loss - reference_loss(shared, name, "nll_weight_only")) < 2e-4


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", ["ct_fp8_dynamic", "ct_w8a8_int8"])
def test_held_out_losses_with_quantized_activations_are_the_librarys(shared, name):
    # A scale of int8 activations is amax / 127 here, as in engines; the library simulates amax / 127.5 and codes from
    # -128 on, where the largest element is a tie. Logits differ by up to 0.26 for it, the loss by 2.2e-4.
    loss = evaluate(load_model(shared, name), np.fromfile(DATA / "heldout.bin", np.uint8))
    tolerance = 4e-4 if name == "ct_w8a8_int8" else 1e-4
    assert abs(loss - reference_loss(shared, name, "nll_weights_and_activations")) < tolerance


def test_every_leaf_of_a_model_stays_as_it_is_stored(shared):
    model = load_model(shared, "ct_nvfp4")
    found = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}
    stored = checkpoint.open(shared / "fixtures" / "tiny-moe" / "ct_nvfp4")
    up = "model.layers.2.mlp.experts.5.up_proj"
    np.testing.assert_array_equal(found["layers.2.mlp.w13"][5, 1], stored.read(f"{up}.weight_packed"))
    np.testing.assert_array_equal(found["layers.2.mlp.w13_scale"][5, 1], stored.read(f"{up}.weight_scale"))
    divisor = stored.read(f"{up}.weight_global_scale")[0]
    assert found["layers.2.mlp.w13_global_scale"][5, 1, 0, 0] == np.float32(1) / divisor


# Integers by hand.


def test_a_packed_weight_by_hand(write_checkpoint):
    # Nibbles 0, 1, 8, 9, 15 are -8, -7, 0, 1, 7; 5 columns in groups of 4 have two scales.
    tensors = packed([[0, 1, 8, 9, 15]], 4, np.float32([[2, 0.5]]))
    assert tensors["weight_packed"].view(np.uint32).tolist() == [[0xF9810]]
    q = loaded(write_checkpoint, tensors, config(INT4))
    assert q.scheme == recipe("int4", group=4).weight and q.odd_k
    np.testing.assert_array_equal(values(q), [[-16, -14, 0, 2, 3.5]])


@given(
    bits=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]),
    shape=st.tuples(st.integers(1, 19), st.integers(1, 70)),
    group=st.sampled_from([-1, 1, 3, 8, 32]),
    symmetric=st.booleans(),
    scale_dtype=st.sampled_from([np.float32, np.float16, BF16]),
    whole_fields=st.booleans(),
    unpacked=st.booleans(),
    seed=st.integers(0, 9),
)
def test_integers_of_any_width_and_shape(
    tmp_path_factory, bits, shape, group, symmetric, scale_dtype, whole_fields, unpacked, seed
):
    rng = np.random.default_rng(seed)
    (n, k), size = shape, shape[1] if group == -1 else group
    codes = rng.integers(0, 2**bits, (n, k))
    zeros = np.full((n, -(-k // size)), 2 ** (bits - 1)) if symmetric else rng.integers(0, 2**bits, (n, -(-k // size)))
    scale = rng.uniform(0.5, 2, zeros.shape).astype(scale_dtype)
    of_column = np.arange(k) // size
    expected = (codes - zeros[:, of_column]).astype(np.float32) * scale.astype(np.float32)[:, of_column]
    half = 2 ** (bits - 1)
    if unpacked:
        tensors = {"weight": (codes - half).astype(np.int8), "weight_scale": scale}
        tensors |= {"weight_zero_point": (zeros - half).astype(np.int8)}
    else:
        tensors = packed(codes, bits, scale, whole_fields=whole_fields)
        # Symmetric weights may carry zero points, which are zero.
        tensors |= {"weight_zero_point": np.ascontiguousarray(words(zeros.T, bits, whole_fields).T)}
    weights = {"num_bits": bits, "type": "int", "group_size": group, "symmetric": symmetric}
    folder = tmp_path_factory.mktemp("integers")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config(weights)}))
    write_safetensors(folder / "model.safetensors", placed(tensors, "a"))
    in_two_ways = any(
        count > 32 // bits and 32 % bits and -(-count * bits // 32) == -(-count // (32 // bits)) for count in (k, n)
    )
    with checkpoint.open(folder) as files:
        if in_two_ways and not unpacked:
            with pytest.raises(checkpoint.CheckpointError, match="read in two ways"):
                checkpoint.load_linear(files, "a")
            return
        weight = checkpoint.load_linear(files, "a")
        assert files.shape_for("a") == weight.shape == (n, k)
    assert weight.scheme.format == ("int4" if bits <= 4 else "int8")
    np.testing.assert_array_equal(values(weight), expected)


def test_fields_across_words_and_whole_ones_are_told_apart_by_the_number_of_words(write_checkpoint):
    codes = np.arange(64)[None] % 8
    scale = np.float32([[1]])
    weights = INT8 | {"num_bits": 3}
    for whole_fields, count in ((False, 6), (True, 7)):
        tensors = packed(codes, 3, scale, whole_fields=whole_fields)
        assert tensors["weight_packed"].shape == (1, count)
        np.testing.assert_array_equal(values(loaded(write_checkpoint, tensors, config(weights))), codes - 4.0)


def test_unpacked_int4_with_int8_tokens_is_held_in_4_bits(write_checkpoint):
    tensors = {"weight": np.int8([[-8, 7, 1]]), "weight_scale": np.float32([[0.5]])}
    q = loaded(write_checkpoint, tensors, config(INT4, TOKEN, format="int-quantized"))
    assert (q.scheme, q.input_scheme) == (recipe("int4_int8", group=4).weight, recipe("int4_int8").input)
    assert q.data.tolist() == [[0xF0, 0x09]]
    np.testing.assert_array_equal(values(q), [[-4, 3.5, 0.5]])


def test_columns_out_of_order_are_the_values_of_their_groups(write_checkpoint):
    tensors = packed([[9, 10, 11, 12]], 4, np.float32([[1, 10]])) | {"weight_g_idx": np.int32([1, 0, 0, 1])}
    weights = INT4 | {"group_size": 2, "actorder": "group"}
    np.testing.assert_array_equal(loaded(write_checkpoint, tensors, config(weights)), [[10, 2, 3, 40]])
    tensors |= {"weight_zero_point": words([[9], [8]], 4).T}  # +1 and 0
    weights |= {"symmetric": False}
    np.testing.assert_array_equal(loaded(write_checkpoint, tensors, config(weights)), [[10, 1, 2, 40]])
    tensors["weight_g_idx"] = np.int32([-1] * 4)
    np.testing.assert_array_equal(loaded(write_checkpoint, tensors, config(weights)), [[0, 1, 30, 40]])


@pytest.mark.parametrize("index", [[0, 0, 1, 1], [-1] * 4])
@pytest.mark.parametrize("actorder", [None, False, "weight", "static"])
def test_an_index_that_is_in_order_changes_nothing(write_checkpoint, index, actorder):
    tensors = packed([[9, 10, 11, 12]], 4, np.float32([[1, 10]])) | {"weight_g_idx": np.int32(index)}
    q = loaded(write_checkpoint, tensors, config(INT4 | {"group_size": 2, "actorder": actorder}))
    assert isinstance(q, QTensor)
    np.testing.assert_array_equal(values(q), [[1, 2, 30, 40]])


# Floats by hand.


def e4m3(*shape):
    return ((np.arange(np.prod(shape)) % 15) - 7).reshape(shape).astype(np.float32).astype(E4M3)


@pytest.mark.parametrize(
    "weights, scale, expected",
    [
        (FP8, np.float32([2]), [[2, 2, 2]] * 3),
        (FP8, np.float32(2), [[2, 2, 2]] * 3),
        (FP8 | {"strategy": "channel"}, np.float32([[1], [2], [3]]), [[1] * 3, [2] * 3, [3] * 3]),
        (FP8 | {"strategy": "channel"}, np.float32([1, 2, 3]), [[1] * 3, [2] * 3, [3] * 3]),
        (FP8 | {"strategy": "group", "group_size": 2}, np.float32([[1, 2]] * 3), [[1, 1, 2]] * 3),
        (FP8 | {"strategy": None, "group_size": 2}, np.float32([[1, 2]] * 3), [[1, 1, 2]] * 3),
        (
            FP8 | {"strategy": "block", "block_structure": "2x2"},
            np.float32([[1, 2], [3, 4]]),
            [[1, 1, 2], [1, 1, 2], [3, 3, 4]],
        ),
        (FP8 | {"strategy": "block", "block_structure": [2, 3]}, np.float32([[1], [2]]), [[1] * 3, [1] * 3, [2] * 3]),
        (
            FP8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
            np.uint8([[126, 127, 128]]).T,
            [[0.5] * 3, [1] * 3, [2] * 3],
        ),
    ],
)
def test_what_shares_a_scale_of_fp8(write_checkpoint, weights, scale, expected):
    q = loaded(write_checkpoint, {"weight": np.ones((3, 3), E4M3), "weight_scale": scale}, config(weights))
    np.testing.assert_array_equal(values(q), expected)


def test_mxfp8_is_the_recipe_of_that_name(write_checkpoint):
    weights = FP8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    tensors = {"weight": e4m3(2, 40), "weight_scale": np.uint8([[127, 130], [1, 0]])}
    settings = config(weights, weights | {"dynamic": True}, format="mxfp8-quantized")
    q = loaded(write_checkpoint, tensors, settings)
    assert (q.scheme, q.input_scheme) == (recipe("mxfp8").weight, recipe("mxfp8").input)


def nvfp4_tensors(n=2, divisor=2.0, given=4.0):
    tensors = {"weight_packed": np.full((n, 8), 0x21, np.uint8), "weight_scale": np.full((n, 1), 3, E4M3)}
    tensors |= {"weight_global_scale": np.float32([divisor])}
    return tensors if given is None else tensors | {"input_global_scale": np.float32([given])}


def test_c07_global_scales_divide_in_the_file_and_multiply_here(write_checkpoint):
    settings = config(NVFP4, NVFP4 | {"dynamic": "local"}, format="nvfp4-pack-quantized")
    with opened(write_checkpoint, placed(nvfp4_tensors(), "a"), settings) as files:
        q, scale = checkpoint.load_linear(files, "a"), checkpoint.load_input_scale(files, "a")
        assert files.recipe_for("a") == recipe("nvfp4")
    # Codes 1 and 2 are 0.5 and 1.
    np.testing.assert_array_equal(values(q), [[0.75, 1.5] * 8] * 2)
    assert scale.dtype == jnp.float32 and scale.shape == () and float(scale) == 0.25


def test_c09_merged_nvfp4_weights_keep_their_global_scales_and_share_the_activations_largest(write_checkpoint):
    tensors = placed(nvfp4_tensors(1, 2.0, 4.0), "q") | placed(nvfp4_tensors(2, 8.0, 16.0), "k")
    with opened(write_checkpoint, tensors, config(NVFP4, NVFP4 | {"dynamic": "local"})) as files:
        q = checkpoint.load_linear(files, ["q", "k"])
        np.testing.assert_array_equal(q.global_scale[:, 0], [0.5, 0.125, 0.125])
        np.testing.assert_array_equal(values(q)[:, 1], [1.5, 0.375, 0.375])
        assert float(checkpoint.load_input_scale(files, ["q", "k"])) == 0.25


@pytest.mark.parametrize("kind, codes", [("float", e4m3(4, 6)), ("int", np.arange(24, dtype=np.int8).reshape(4, 6))])
def test_given_activation_scales(write_checkpoint, kind, codes):
    weights = FP8 | {"type": kind}
    tensors = {"weight": codes, "weight_scale": np.float32([0.5]), "input_scale": np.array([0.25], BF16)}
    tensors |= {"input_zero_point": np.int8([0])}
    with opened(write_checkpoint, placed(tensors, "a"), config(weights, weights)) as files:
        q, scale = checkpoint.load_linear(files, "a"), checkpoint.load_input_scale(files, "a")
        assert files.input_scales() == {"a": 0.25}
    assert q.input_scheme == Scheme(format="e4m3" if kind == "float" else "int8", block=(-1, -1), static=True)
    y = jmoe.linear(np.float32([[1, 2, 3, 4, 5, 6]]), q, input_scale=scale, implementation="reference")
    np.testing.assert_array_equal(y, np.float32([[1, 2, 3, 4, 5, 6]]) @ (codes.astype(np.float32) * 0.5).T)


@pytest.mark.parametrize("leaf", ["weight_scale", "input_scale", "weight_global_scale", "input_global_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e-45])
def test_a05_a06_scales_that_were_never_set_are_refused(write_checkpoint, leaf, value):
    if "global" in leaf:
        tensors, settings = nvfp4_tensors(), config(NVFP4, NVFP4 | {"dynamic": "local"})
    else:
        tensors, settings = {"weight": e4m3(2, 3), "weight_scale": np.float32([1])}, config(FP8, FP8)
        tensors |= {"input_scale": np.float32([1])}
    tensors[leaf] = np.full_like(tensors[leaf], value)
    load = checkpoint.load_input_scale if leaf.startswith("input") else checkpoint.load_linear
    with (
        opened(write_checkpoint, placed(tensors, "a"), settings) as files,
        pytest.raises(checkpoint.CheckpointError, match=rf"tensor 'a\.{leaf}' holds the scale"),
    ):
        load(files, "a")


def test_a_global_scale_whose_reciprocal_is_no_normal_number_is_refused(write_checkpoint):
    with pytest.raises(checkpoint.CheckpointError, match=r"holds the global scale 3\.0.*e\+38, expected at most 8\.5"):
        loaded(write_checkpoint, nvfp4_tensors(divisor=3e38, given=None), config(NVFP4))


# Which modules a group is for.

PLAIN = {"weight": np.ones((2, 3), np.float32)}
QUANTIZED = {"weight": e4m3(2, 3), "weight_scale": np.float32([1])}


def group(weights, *targets, **settings):
    return {"targets": list(targets), "weights": weights, **settings}


def test_names_come_before_patterns_and_these_before_classes(write_checkpoint):
    channel = FP8 | {"strategy": "channel"}
    blocks = FP8 | {"strategy": "block", "block_structure": [2, 2]}
    groups = {
        "linears": group(FP8, "Linear"),
        "mlp": group(channel, r"re:.*mlp\.(up|down)_proj"),
        "one": group(blocks, "layers.1.mlp.up_proj"),
    }
    tensors = {}
    for module, scale in (("attn.q_proj", (1,)), ("mlp.up_proj", (2, 1)), ("mlp.down_proj", (2, 1))):
        tensors |= placed({"weight": e4m3(2, 3), "weight_scale": np.ones(scale, np.float32)}, f"layers.0.{module}")
    tensors |= placed({"weight": e4m3(2, 3), "weight_scale": np.ones((1, 2), np.float32)}, "layers.1.mlp.up_proj")
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    with opened(write_checkpoint, tensors, settings) as files:
        found = {m: files.recipe_for(m).weight.block for m in files.leaves}
    assert found == {
        "layers.0.attn.q_proj": (-1, -1),
        "layers.0.mlp.up_proj": (1, -1),
        "layers.0.mlp.down_proj": (1, -1),
        "layers.1.mlp.up_proj": (2, 2),
    }


@pytest.mark.parametrize(
    "module, settings",
    [
        ("x.b", config(FP8, ignore=["x.b"])),
        ("model.x.b", config(FP8, ignore=["x.b"])),
        ("x.b", config(FP8, ignore=["re:x"])),
        ("x.b", config(FP8, targets=["re:.*a"])),
        ("x.b", config(FP8, targets=["Linear"])),
        ("x.b", config(FP8, targets=["re:.*"], ignore=["re:.*b"])),
    ],
)
def test_modules_that_are_ignored_or_no_target_are_left_alone(write_checkpoint, module, settings):
    with opened(write_checkpoint, placed(QUANTIZED, "a") | placed(PLAIN, module), settings) as files:
        assert {m.name: m.quantized for m in files.summary().modules} == {"a": True, module: False}


def test_kimis_router_is_no_linear_layer_that_the_list_forgot(write_checkpoint):
    # Only a class is named, and files do not say what a module's class is.
    with opened(write_checkpoint, placed(QUANTIZED, "mlp.up") | placed(PLAIN, "mlp.gate"), config(FP8)) as files:
        assert files.recipe_for("mlp.gate") == recipe("bf16")


@pytest.mark.parametrize(
    "plain, settings, says",
    [
        (False, config(FP8, ignore=["a"]), "the configuration's ignore entry 'a' says that it is not quantized"),
        (False, config(FP8, ignore=["re:.*a"]), "ignore entry 're:.*a' says that it is not quantized"),
        (False, config(FP8, targets=["re:b", "Embedding"]), "config_groups, of whose targets none is for it,"),
        (False, config(None), "group 'group_0' without weights says that it is not quantized"),
        (True, config(FP8, targets=["a", "b"]), "F32 without a scale, but the configuration quantizes it"),
        (True, config(FP8, targets=["re:[ab]"]), "config_groups.group_0 has the target 're:[ab]'"),
        (True, config(FP8, targets=["Linear"], ignore=["b"]), None),
    ],
)
def test_tensors_and_targets_that_disagree_are_refused_with_both_facts(write_checkpoint, plain, settings, says):
    tensors = placed(PLAIN if plain else QUANTIZED, "a") | placed(QUANTIZED, "b" if plain else "c")
    with opened(write_checkpoint, tensors, settings) as files:
        if says is None:
            assert checkpoint.load_linear(files, "a").shape == (2, 3)
            return
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.load_linear(files, "a")
    assert "tensor 'a.weight' is " in str(caught.value) and says in str(caught.value)


def test_a_layer_of_which_others_are_quantized_may_not_lack_its_scale(write_checkpoint):
    tensors = placed(QUANTIZED, "l.0.up") | placed(PLAIN, "l.1.up")
    with pytest.raises(checkpoint.CheckpointError, match=r"'l.1.up' has no scale, but 'l.0.up' has one"):
        opened(write_checkpoint, tensors, config(FP8))
    opened(write_checkpoint, tensors, config(FP8, ignore=["l.1.up"])).close()


@pytest.mark.parametrize(
    "name, tensors, expected",
    [
        ("FP8_DYNAMIC", QUANTIZED | {"weight_scale": np.ones((2, 1), np.float32)}, recipe("fp8_channel")),
        ("fp8_block", QUANTIZED | {"weight_scale": np.ones((1, 1), np.float32)}, recipe("fp8_block")),
        ("W4A16", packed(np.ones((2, 8)), 4, np.ones((2, 1), np.float32)), recipe("int4")),
        ("W4AFP8", packed(np.ones((2, 8)), 4, np.ones((2, 1), np.float32)), recipe("int4_fp8")),
        ("W8A8", {"weight": np.ones((2, 8), np.int8), "weight_scale": np.ones((2, 1), np.float32)}, recipe("int8")),
        ("NVFP4", nvfp4_tensors(), recipe("nvfp4")),
        ("NVFP4A16", nvfp4_tensors(given=None), recipe("nvfp4_w4a16")),
        (
            "MXFP4A16",
            {"weight_packed": np.ones((2, 8), np.uint8), "weight_scale": np.ones((2, 1), np.uint8)},
            recipe("mxfp4"),
        ),
        ("MXFP8", QUANTIZED | {"weight_scale": np.ones((2, 1), np.uint8)}, recipe("mxfp8")),
    ],
)
def test_a_group_may_be_a_list_of_targets_under_a_presets_name(write_checkpoint, name, tensors, expected):
    settings = {"quant_method": "compressed-tensors", "config_groups": {name: ["Linear"]}}
    with opened(write_checkpoint, placed(tensors, "a"), settings) as files:
        assert files.recipe_for("a") == expected
        checkpoint.load_linear(files, "a")


def test_an_old_configuration_has_another_key_and_no_method(write_checkpoint):
    settings = config(FP8, sparsity_config={"format": "dense"}, quantization_status="frozen")
    del settings["quant_method"]
    with checkpoint.open(write_checkpoint(placed(QUANTIZED, "a"), {"compression_config": settings})) as files:
        assert files.method_name == "compressed-tensors" and files.recipe_for("a").weight.format == "e4m3"


def test_scales_of_a_kv_cache_belong_to_no_weight(write_checkpoint):
    tensors = placed(QUANTIZED, "l.self_attn.k_proj") | {
        "l.self_attn.k_scale": np.float32([1]),
        "l.self_attn.v_proj.output_scale": np.float32([1]),
    }
    with opened(write_checkpoint, tensors, config(FP8, kv_cache_scheme=FP8 | {"strategy": "tensor"})) as files:
        assert files.kv_scales == ("l.self_attn.k_scale", "l.self_attn.v_proj.output_scale")
        assert checkpoint.load_linear(files, "l.self_attn.k_proj").shape == (2, 3)


def test_biases_fit_packed_weights(write_checkpoint):
    tensors = placed(packed(np.ones((2, 3)), 4, np.ones((2, 1), np.float32)), "a")
    with opened(write_checkpoint, tensors | {"a.bias": np.float32([1, 2])}, config(INT4)) as files:
        assert checkpoint.load_bias(files, "a").tolist() == [1, 2]
    with (
        opened(write_checkpoint, tensors | {"a.bias": np.float32([1, 2, 3])}, config(INT4)) as files,
        pytest.raises(checkpoint.CheckpointError, match=r"'a.bias' has shape \(3,\), expected \(2,\)"),
    ):
        checkpoint.load_bias(files, "a")
