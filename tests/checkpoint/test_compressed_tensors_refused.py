"""What compressed-tensors checkpoints are refused for, and what is said."""

import numpy as np
import pytest

from jmoe import checkpoint
from tests.checkpoint.test_compressed_tensors import (
    E4M3,
    FP8,
    INT4,
    INT8,
    MXFP4,
    NVFP4,
    PLAIN,
    QUANTIZED,
    TOKEN,
    config,
    e4m3,
    group,
    nvfp4_tensors,
    opened,
    packed,
    words,
)
from tests.checkpoint.test_load_fp8 import placed


@pytest.mark.parametrize(
    "weights, activation, settings, says",
    [
        (FP8, None, {"bits": 4}, "has the key bits, which is not known; known are config_groups, "),
        (FP8 | {"group": 4}, None, {}, "has the key config_groups.group_0.weights.group, which is not known"),
        (FP8 | {"num_bits": 9}, None, {}, "weights.num_bits 9, expected 1 to 8"),
        (FP8 | {"num_bits": 6}, None, {}, "weights.num_bits 6 of type 'float', expected 4 or 8"),
        (FP8 | {"type": "nf"}, None, {}, "weights.type 'nf', expected 'int' or 'float'"),
        (FP8 | {"symmetric": False}, None, {}, "weights.symmetric false with type 'float'"),
        (INT8 | {"symmetric": None}, None, {}, "weights.symmetric None, expected true or false"),
        (INT8 | {"strategy": "tensor", "symmetric": False}, None, {}, "symmetric false with strategy 'tensor'"),
        (FP8 | {"dynamic": True}, None, {}, "weights.dynamic True, expected false for weights"),
        (FP8 | {"strategy": "row"}, None, {}, "weights.strategy 'row', expected one of tensor, channel"),
        (FP8 | {"strategy": "token"}, None, {}, "weights.strategy 'token', which no weight has"),
        (FP8 | {"group_size": 32}, None, {}, "strategy 'tensor' with group_size 32, expected 'group' with it"),
        (FP8 | {"group_size": 0}, None, {}, "group_size 0, expected a positive number, -1 or none"),
        (FP8 | {"strategy": "group"}, None, {}, "strategy 'group' with group_size None, expected a positive one"),
        (FP8 | {"strategy": "block"}, None, {}, "block_structure None, expected two positive numbers"),
        (NVFP4 | {"group_size": 32}, None, {}, "expected 'tensor_group' and 16 (NVFP4) or 'group' and 32 (MXFP4)"),
        (INT4 | {"actorder": "columns"}, None, {}, "weights.actorder 'columns'"),
        (INT4 | {"actorder": "group"}, TOKEN, {}, "actorder 'group' with input_activations, expected weights alone"),
        (INT8 | {"actorder": "group"}, None, {}, "actorder 'group' with int of 8 bits with strategy 'channel'"),
        (FP8 | {"scale_dtype": "torch.int8"}, None, {}, "weights.scale_dtype 'torch.int8', expected one of"),
        (FP8 | {"scale_dtype": []}, None, {}, "weights.scale_dtype [], expected one of"),
        (7, None, {}, "config_groups.group_0.weights 7, expected an object"),
        (None, TOKEN, {}, "input_activations without weights"),
        (INT8, TOKEN | {"symmetric": False}, {}, "symmetric false, expected true: activations have no zero points"),
        (INT8, TOKEN | {"num_bits": 4}, {}, "int of 4 bits with strategy 'token', which no operation takes"),
        (INT8, TOKEN | {"dynamic": False}, {}, "dynamic False, which no operation takes"),
        (NVFP4, NVFP4 | {"dynamic": True}, {}, "block 1x16 and dynamic True, which no operation takes"),
        (FP8, FP8 | {"strategy": "block", "block_structure": [2, 2]}, {}, "block 2x2 and dynamic False"),
        (
            FP8,
            None,
            {"format": "marlin-24"},
            "has format 'marlin-24', which is not supported; known are pack-quantized",
        ),
        (FP8, None, {"format": "mxfp6-pack-quantized"}, "has format 'mxfp6-pack-quantized', which is not supported"),
        (FP8, None, {"quantization_status": "calibration"}, "has quantization_status 'calibration'"),
        (FP8, None, {"sparsity_config": {"format": "sparse-24"}}, "has sparsity_config {'format': 'sparse-24'}"),
        (FP8, None, {"transform_config": {"config_groups": {"r": {}}}}, "has transform_config "),
        (FP8, None, {"kv_cache_scheme": INT8}, "has kv_cache_scheme int of 8 bits"),
        (FP8, None, {"ignore": "lm_head"}, "has ignore 'lm_head', expected a list of names"),
        (FP8, None, {"ignore": ["re:("]}, "has ignore 're:(', which is no regular expression"),
        (FP8, None, {"config_groups": {}}, "has config_groups {}, expected an object of groups"),
        (FP8, None, {"config_groups": {"g": 7}}, "has config_groups.g 7, expected an object, or a list of targets"),
        (FP8, None, {"config_groups": {"W4": ["Linear"]}}, "has config_groups.W4 as a list, but no preset"),
        (FP8, None, {"config_groups": {"W8A16": ["Linear"]}}, "'W8A16', which versions of the library read as"),
        (FP8, None, {"config_groups": {"g": group(FP8) | {"targets": None}}}, "config_groups.g.targets None"),
        (
            FP8,
            None,
            {"config_groups": {"g": group(FP8, "Linear", output_activations=FP8)}},
            "outputs are not quantized",
        ),
    ],
)
def test_settings_that_are_unknown_or_contradict_each_other(write_checkpoint, weights, activation, settings, says):
    folder = write_checkpoint(placed(QUANTIZED, "a"), {"quantization_config": config(weights, activation) | settings})
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.open(folder)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'config.json'}: its quantization_config has ") and says in message
    assert "\n" not in message


INTS = {"weight": np.int8([[1, -8, 7]]), "weight_scale": np.float32([[1]])}
NIBBLES = packed([[1, 2, 3]], 4, np.float32([[1]]))
MX = {"weight_packed": np.ones((2, 16), np.uint8), "weight_scale": np.ones((2, 1), np.uint8)}


def without(tensors, leaf):
    return {name: tensor for name, tensor in tensors.items() if name != leaf}


@pytest.mark.parametrize(
    "tensors, settings, says",
    [
        (
            QUANTIZED,
            config(INT8),
            "'a.weight' is F8_E4M3, but the configuration's config_groups.group_0.weights says int of 8",
        ),
        (
            INTS,
            config(FP8),
            "'a.weight' is I8, but the configuration's config_groups.group_0.weights says float of 8 bits",
        ),
        (NIBBLES, config(MXFP4), "'a.weight_packed' is I32, but the configuration's"),
        (nvfp4_tensors(), config(MXFP4), "'a.weight_packed' is U8 with a global scale, but the configuration's"),
        (MX, config(NVFP4), "'a.weight_packed' is U8 without a global scale, but the configuration's"),
        (
            INTS,
            config(INT4, format="pack-quantized"),
            "is I8, but the configuration says format 'pack-quantized' for group 'group_0'",
        ),
        (MX, config(MXFP4, format="nvfp4-pack-quantized"), "but the configuration says format 'nvfp4-pack-quantized'"),
        (QUANTIZED | {"weight_packed": MX["weight_packed"]}, config(FP8), "are two weights of one module"),
        (
            without(QUANTIZED, "weight"),
            config(FP8),
            "'a.weight_scale' is a scale, but 'a.weight' and 'a.weight_packed' are missing",
        ),
        (without(MX, "weight_scale"), config(MXFP4), "is packed, but its scale 'a.weight_scale' is missing"),
        (without(NIBBLES, "weight_shape"), config(INT4), "is packed, but 'a.weight_shape' is missing"),
        (
            PLAIN | {"weight_scale": np.float32([1])},
            config(FP8),
            "has dtype F32, expected I8 or F8_E4M3 beside 'a.weight_scale'",
        ),
        (
            PLAIN | {"weight_g_idx": np.zeros(3, np.int32)},
            config(FP8),
            "belongs to a quantized weight, but 'a.weight_scale' is missing",
        ),
        ({"weight": e4m3(2, 2, 3), "weight_scale": np.float32([1])}, config(FP8), "expected the two axes (N, K)"),
        (
            QUANTIZED | {"weight_g_idx": np.zeros(3, np.int32)},
            config(FP8),
            "'a.weight_g_idx' does not go with 'a.weight' of dtype F8_E4M3",
        ),
        (MX | {"weight_scale": np.ones((2, 1), np.float32)}, config(MXFP4), "has dtype F32, expected U8 or F8_E8M0"),
        (INTS | {"weight_scale": np.uint8([[1]])}, config(INT8), "has dtype U8, expected F32 or BF16 or F16"),
        (
            QUANTIZED,
            config(FP8 | {"scale_dtype": "torch.uint8"}),
            "has dtype F32, but the configuration's config_groups.group_0.weights or its format says that scales are ",
        ),
        (QUANTIZED, config(FP8, format="mxfp8-quantized"), "or its format says that scales are e8m0"),
        (
            QUANTIZED | {"weight_scale": np.ones((1, 2), np.float32)},
            config(FP8 | {"strategy": "channel"}),
            "has shape (1, 2), expected (2, 1)",
        ),
        (
            QUANTIZED | {"weight_scale": np.ones(3, np.float32)},
            config(FP8 | {"strategy": "channel"}),
            "has shape (3,), expected (2, 1)",
        ),
        (NIBBLES | {"weight_scale": np.ones((1, 2), np.float32)}, config(INT4), "has shape (1, 2), expected (1, 1)"),
        (NIBBLES | {"weight_scale": np.ones((2, 1), np.float32)}, config(INT4), "has shape (2, 1), expected 1 rows"),
        (
            NIBBLES | {"weight_shape": np.int64([1, 9])},
            config(INT4),
            "holds [1, 9], which does not fit 'a.weight_packed' of shape (1, 1) with 4 bits",
        ),
        (NIBBLES | {"weight_shape": np.int64([2, 3])}, config(INT4), "holds [2, 3], which does not fit"),
        (NIBBLES | {"weight_shape": np.int64([3])}, config(INT4), "expected the two I64 numbers N, K"),
        (
            packed([[1] * 20], 3, np.float32([[1]])),
            config(INT8 | {"num_bits": 3}),
            "2 words for 20 elements of 3 bits, which versions of the library read in two ways",
        ),
        (
            INTS,
            config(INT4 | {"num_bits": 3}),
            "'a.weight' holds integers from -8 to 7, but the configuration's config_groups.group_0.weights says int",
        ),
        (
            NIBBLES,
            config(INT4 | {"symmetric": False}),
            "has no zero points, but config_groups.group_0.weights has symmetric false",
        ),
        (
            NIBBLES | {"weight_zero_point": np.int8([[0]])},
            config(INT4 | {"symmetric": False}),
            "has dtype I8, expected I32",
        ),
        (
            NIBBLES | {"weight_zero_point": np.int32([[0, 0]])},
            config(INT4 | {"symmetric": False}),
            "has shape (1, 2), expected (1, 1), packed along N",
        ),
        (NIBBLES | {"weight_zero_point": words([[7]], 4)}, config(INT4), "holds zero points other than 0"),
        (NIBBLES, config(INT4 | {"actorder": "group"}), "has no weight_g_idx, but the configuration's"),
        (
            NIBBLES | {"weight_g_idx": np.int32([0, 1, 0])},
            config(INT4),
            "puts columns out of the order of their groups",
        ),
        (NIBBLES | {"weight_g_idx": np.int32([0, 1])}, config(INT4), "has shape (2,), expected (3,), a group a column"),
        (
            NIBBLES | {"weight_g_idx": np.int32([0, 1, 0])},
            config(INT4 | {"actorder": "group"}),
            "holds groups from 0 to 1, expected 0 to 0",
        ),
        (
            NIBBLES | {"weight_g_idx": np.float32([0, 0, 0])},
            config(INT4),
            "is F32 of shape (3,), expected I32 of shape (K,)",
        ),
        (
            QUANTIZED,
            config(FP8, FP8),
            "has no a.input_scale, expected one since the configuration's config_groups.group_0.input_activations",
        ),
        (
            QUANTIZED | {"input_scale": np.float32([1])},
            config(FP8),
            "'a.input_scale' is a given activation scale, but the configuration's",
        ),
        (
            QUANTIZED | {"input_scale": np.float32([1])},
            config(FP8, FP8 | {"dynamic": True}),
            "input_activations says e4m3 per tensor float32",
        ),
        (
            QUANTIZED | {"input_scale": np.float32([1, 1])},
            config(FP8, FP8),
            "is F32 of shape (2,), expected one F32 number",
        ),
        (
            QUANTIZED | {"input_zero_point": np.int8([0])},
            config(FP8),
            "'a.input_zero_point' is an activation's zero point",
        ),
        (
            INTS | {"input_zero_point": np.int8([3])},
            config(INT8, TOKEN),
            "'a.input_zero_point' holds zero points other than 0",
        ),
        (nvfp4_tensors(), config(NVFP4), "'a.input_global_scale' is a given activation scale, but the configuration's"),
        (
            nvfp4_tensors(given=None),
            config(NVFP4, NVFP4 | {"dynamic": "local"}),
            "has no a.input_global_scale, expected one",
        ),
    ],
)
def test_tensors_that_contradict_the_configuration_or_each_other(write_checkpoint, tensors, settings, says):
    tensors = placed(tensors, "a") | placed(QUANTIZED, "other")
    with (
        opened(write_checkpoint, tensors, settings) as files,
        pytest.raises(checkpoint.CheckpointError) as caught,
    ):
        checkpoint.load_linear(files, "a")
    message = str(caught.value)
    assert says in message and "model.safetensors: tensor 'a." in message and "\n" not in message


def test_packed_scales_of_another_grid_are_refused_by_the_account_of_a_checkpoint(write_checkpoint):
    tensors = placed(NIBBLES | {"weight_scale": np.ones((1, 2), np.float32)}, "a")
    with (
        opened(write_checkpoint, tensors, config(INT4)) as files,
        pytest.raises(checkpoint.CheckpointError, match=r"'a.weight_scale' has shape \(1, 2\), expected \(1, 1\)"),
    ):
        files.summary()


def test_a_weight_of_another_shape_is_named_by_its_codes(write_checkpoint):
    wide = nvfp4_tensors() | {"weight_packed": np.ones((2, 16), np.uint8), "weight_scale": np.ones((2, 2), E4M3)}
    tensors = placed(nvfp4_tensors(), "a") | placed(wide, "b")
    settings = config(NVFP4, NVFP4 | {"dynamic": "local"})
    with (
        opened(write_checkpoint, tensors, settings) as files,
        pytest.raises(checkpoint.CheckpointError, match=r"tensor 'b.weight_packed' has K = 32, expected 16 as 'a' has"),
    ):
        checkpoint.load_linear(files, ["a", "b"])
