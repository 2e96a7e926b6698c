import dataclasses
import re

import pytest

from jmoe.scheme import RECIPES, Recipe, Scheme, as_recipe, recipe, recipe_of

FP8_TENSOR = Scheme(format="e4m3", block=(-1, -1))
FP8_ROW = Scheme(format="e4m3", block=(1, -1))
INT8_ROW = Scheme(format="int8", block=(1, -1))
INT4 = Scheme(format="int4", block=(1, 128))
MXFP8 = Scheme(format="e4m3", block=(1, 32), scale_dtype="e8m0", power_of_two=True)
MXFP4 = Scheme(format="e2m1", block=(1, 32), scale_dtype="e8m0", power_of_two=True)
NVFP4 = Scheme(format="e2m1", block=(1, 16), scale_dtype="e4m3", global_scale="tensor")

# design.md's list: weight x activation.
EXPECTED = {
    "bf16": (None, None),
    "fp8_tensor": (FP8_TENSOR, FP8_TENSOR),
    "fp8_tensor_static": (FP8_TENSOR, FP8_TENSOR.replace(static=True)),
    "fp8_channel": (FP8_ROW, FP8_ROW),
    "fp8_block": (FP8_ROW.replace(block=(128, 128)), FP8_ROW.replace(block=(1, 128))),
    "fp8_w8a16": (FP8_ROW.replace(block=(128, 128)), None),
    "mxfp8": (MXFP8, MXFP8),
    "mxfp4": (MXFP4, None),
    "mxfp4_a8": (MXFP4, FP8_ROW),
    "mxfp4_mxfp8": (MXFP4, MXFP8),
    "mxfp4_a4": (MXFP4, MXFP4),
    "nvfp4": (NVFP4, NVFP4.replace(static=True)),
    "nvfp4_per_token": (NVFP4, NVFP4.replace(global_scale="token")),
    "nvfp4_w4a16": (NVFP4, None),
    "int8": (INT8_ROW, INT8_ROW),
    "int8_w8a16": (INT8_ROW, None),
    "int4": (INT4, None),
    "int4_fp8": (INT4, FP8_ROW),
    "int4_int8": (INT4, INT8_ROW),
}


def test_the_recipes_are_these():
    assert set(RECIPES) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_is_weight_times_activation(name):
    made = recipe(name)
    assert (made.name, made.weight, made.input) == (name, *EXPECTED[name])


@pytest.mark.parametrize("name", EXPECTED)
def test_recipe_of_finds_the_name_again(name):
    assert recipe_of(*EXPECTED[name]) == recipe(name)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_is_a_hashable_frozen_value(name):
    assert hash(recipe(name)) == hash(recipe(name))
    assert len({recipe(name), recipe(name), recipe("int4:group=16")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe(name).name = "other"


@pytest.mark.parametrize(
    "text, options, name, weight",
    [
        ("int4:group=32", {"group": 32}, "int4:group=32", INT4.replace(block=(1, 32))),
        (
            "int4:group=32,zero_point",
            {"group": 32, "zero_point": True},
            "int4:group=32,zero_point=True",
            INT4.replace(block=(1, 32), zero_point=True),
        ),
        ("int4:zero_point=false", {"zero_point": False}, "int4", INT4),
        (
            "int4: group = 64 , zero_point=True,",
            {"group": 64, "zero_point": True},
            "int4:group=64,zero_point=True",
            None,
        ),
        ("int4:group=128", {"group": 128}, "int4", INT4),
        ("int4:group=-1", {"group": -1}, "int4:group=-1", INT4.replace(block=(1, -1))),
        (
            "int8_w8a16:group=64,scale_dtype=bfloat16",
            {"group": 64, "scale_dtype": "bfloat16"},
            "int8_w8a16:group=64,scale_dtype=bfloat16",
            INT8_ROW.replace(block=(1, 64), scale_dtype="bfloat16"),
        ),
        (
            "fp8_block:block=64x32,power_of_two",
            {"block": (64, 32), "power_of_two": True},
            "fp8_block:block=64x32,power_of_two=True",
            FP8_ROW.replace(block=(64, 32), power_of_two=True),
        ),
        ("fp8_block:block=64", {"block": (64, 64)}, "fp8_block:block=64", FP8_ROW.replace(block=(64, 64))),
        ("fp8_block:block=128x128", {"block": 128}, "fp8_block", FP8_ROW.replace(block=(128, 128))),
        ("fp8_w8a16:block=1x-1", {"block": (1, -1)}, "fp8_w8a16:block=1x-1", FP8_ROW),
        ("fp8_w8a16:block=-1", {"block": -1}, "fp8_w8a16:block=-1", FP8_TENSOR),
        (
            "fp8_w8a16:scale_dtype=e8m0",
            {"scale_dtype": "e8m0"},
            "fp8_w8a16:scale_dtype=e8m0",
            MXFP8.replace(block=(128, 128)),
        ),
        (
            "mxfp4:scale_rounding=floor",
            {"scale_rounding": "floor"},
            "mxfp4:scale_rounding=floor",
            MXFP4.replace(scale_rounding="floor"),
        ),
        ("mxfp4_a8:", {}, "mxfp4_a8", MXFP4),
    ],
)
def test_options_read_the_same_in_python_and_on_a_command_line(text, options, name, weight):
    made = recipe(text)
    assert made.name == name
    assert made == recipe(text.partition(":")[0], **options)
    assert made == recipe(made.name)
    assert weight is None or made.weight == weight


def test_options_of_a_weight_leave_the_activation_alone_but_for_its_block():
    assert recipe("int4_fp8:group=32").input == FP8_ROW
    assert recipe("int4_int8:zero_point").input == INT8_ROW
    assert recipe("mxfp4_a4:scale_rounding=floor").input == MXFP4
    assert recipe("fp8_block:block=64x32").input == FP8_ROW.replace(block=(1, 32))
    # Power-of-two weight scales go with power-of-two activation scales, held as float32 (DeepSeek-V3.1's scale_fmt).
    assert recipe("fp8_block:scale_dtype=e8m0").input == FP8_ROW.replace(block=(1, 128), power_of_two=True)
    assert recipe("fp8_block:scale_dtype=bfloat16").input == FP8_ROW.replace(block=(1, 128))


def test_keywords_override_the_text():
    assert recipe("int4:group=32", group=64) == recipe("int4:group=64")


def test_as_recipe_takes_names_and_recipes():
    int8 = recipe("int8")
    assert as_recipe(int8) is int8
    assert as_recipe("int8") == int8
    with pytest.raises(TypeError, match="recipe=3 must be a Recipe or the name of one"):
        as_recipe(3)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("fp9", {}, "recipe 'fp9' is unknown; known recipes are bf16, fp8_tensor, "),
        ("", {}, "recipe '' is unknown"),
        ("int4:groups=32", {}, "recipe 'int4' has no option 'groups'; its options are group, zero_point, scale_dtype"),
        ("int8:group=32", {}, "recipe 'int8' has no option 'group'; it has no options"),
        ("int8", {"zero_point": True}, "recipe 'int8' has no option 'zero_point'; it has no options"),
        ("int4:group=0", {}, "group=0 must be a positive int, or -1 for one group over the whole of K"),
        ("int4:group=-2", {}, "group=-2 must be a positive int, or -1"),
        ("int4:group=many", {}, "group='many' must be a positive int, or -1"),
        ("int4:group", {}, "group=True must be a positive int, or -1"),
        ("int4:group=2x2", {}, r"group=\(2, 2\) must be a positive int, or -1"),
        ("int4:zero_point=2", {}, "zero_point=2 must be True or False"),
        (
            "int4:scale_dtype=f32",
            {},
            "scale_dtype='f32' is unknown; it is one of float32, bfloat16, float16, e4m3, e8m0",
        ),
        ("int4:scale_dtype=e4m3", {}, "e4m3 scales come with a global scale, and only they do"),
        ("int4:scale_dtype=e8m0,zero_point", {}, "zero_point=True needs scales that are neither powers of two nor"),
        ("fp8_block:block", {}, r"block=\(True, True\) must be two ints \(rows, cols\)"),
        ("fp8_block:block=0", {}, r"block=\(0, 0\) must be two ints \(rows, cols\), each positive or -1"),
        ("fp8_block", {"block": [64, 64]}, r"block=\[64, 64\] must be two ints \(rows, cols\)"),
        ("fp8_block:power_of_two=yes", {}, "power_of_two='yes' must be True or False"),
        ("mxfp4:scale_rounding=up", {}, "scale_rounding='up' must be 'even' or 'floor'"),
    ],
)
def test_a_wrong_recipe_is_told_what_would_be_right(name, options, message):
    with pytest.raises(ValueError, match=message):
        recipe(name, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"format": "e3m4"}, "format='e3m4' is unknown; known formats are e4m3, e5m2, e2m1, int8, int4"),
        ({"scale_dtype": "f32"}, "scale_dtype='f32' is unknown"),
        ({"block": (1,)}, r"block=\(1,\) must be two ints \(rows, cols\), each positive or -1 for the whole extent"),
        ({"block": (1, 0)}, r"block=\(1, 0\) must be"),
        ({"block": (1, -2)}, r"block=\(1, -2\) must be"),
        ({"block": (1, 2.0)}, r"block=\(1, 2.0\) must be"),
        ({"block": 128}, "block=128 must be"),
        ({"power_of_two": 1}, "power_of_two=1 must be True or False"),
        ({"static": None}, "static=None must be True or False"),
        ({"scale_rounding": "ceil"}, "scale_rounding='ceil' must be 'even' or 'floor'"),
        (
            {"scale_rounding": "floor"},
            "scale_rounding='floor' is for e2m1 codes with e8m0 scales, not e4m3 1xall float32",
        ),
        ({"global_scale": "row"}, "global_scale='row' must be None, 'tensor' or 'token'"),
        (
            {"global_scale": "tensor"},
            "scale_dtype='float32' with global_scale='tensor': e4m3 scales come with a global",
        ),
        ({"scale_dtype": "e4m3"}, "scale_dtype='e4m3' with global_scale=None"),
        ({"format": "e2m1"}, "e2m1 codes have e8m0 or e4m3 scales, not float32"),
        ({"zero_point": True}, "zero_point=True needs an integer format, not e4m3"),
        (
            {"format": "int4", "zero_point": True, "power_of_two": True},
            "zero_point=True needs scales that are neither powers of two nor under a global scale",
        ),
        (
            {"format": "int4", "zero_point": True, "scale_dtype": "e4m3", "global_scale": "tensor"},
            "zero_point=True needs scales that are neither powers of two nor under a global scale",
        ),
        (
            {"scale_dtype": "e4m3", "global_scale": "tensor", "power_of_two": True},
            "power_of_two=True is for scales without a global scale",
        ),
        (
            {"scale_dtype": "e4m3", "global_scale": "token", "block": (16, 16)},
            r"block=\(16, 16\): a global scale that is given, or one a token, needs blocks of one row",
        ),
        (
            {"scale_dtype": "e4m3", "global_scale": "tensor", "block": (16, 16), "static": True},
            r"block=\(16, 16\): a global scale that is given",
        ),
        (
            {"block": (1, 128), "static": True},
            r"static=True needs one scale a tensor or a row, or a global scale, not block=\(1, 128\)",
        ),
        (
            {"static": True, "scale_dtype": "bfloat16"},
            "static=True takes a plain float32 scale, not e4m3 1xall bfloat16",
        ),
        ({"static": True, "power_of_two": True}, "static=True takes a plain float32 scale"),
        ({"static": True, "format": "int8", "zero_point": True}, "static=True takes a plain float32 scale"),
    ],
)
def test_a_wrong_scheme_is_told_what_would_be_right(options, message):
    with pytest.raises(ValueError, match=message):
        Scheme(**{"format": "e4m3", "block": (1, -1), **options})


def test_e8m0_scales_are_powers_of_two():
    assert Scheme(format="e4m3", block=(1, 32), scale_dtype="e8m0") == MXFP8


def test_a_scheme_is_a_hashable_frozen_value():
    assert hash(FP8_ROW) == hash(Scheme(format="e4m3", block=(1, -1)))
    assert FP8_ROW.replace(block=(-1, -1)) == FP8_TENSOR
    with pytest.raises(dataclasses.FrozenInstanceError):
        FP8_ROW.format = "e5m2"
    with pytest.raises(ValueError, match="block="):
        FP8_ROW.replace(block=(0, 1))
    assert (FP8_ROW.fmt.max, FP8_ROW.weight_bits, INT4.weight_bits) == (448.0, 8, 4)


def test_a_recipe_refuses_what_no_product_has():
    with pytest.raises(ValueError, match="recipe 'odd' quantizes the activation but not the weight"):
        Recipe(name="odd", weight=None, input=FP8_ROW)
    with pytest.raises(ValueError, match="recipe 'odd': static=True is for activations; a weight has its scale"):
        Recipe(name="odd", weight=FP8_TENSOR.replace(static=True))
    with pytest.raises(ValueError, match="a weight that is not quantized takes no quantized activation"):
        recipe_of(None, FP8_ROW)


@pytest.mark.parametrize(
    "scheme, phrase",
    [
        (FP8_TENSOR.replace(static=True), "e4m3 per tensor float32 static"),
        (FP8_ROW, "e4m3 1xall float32"),
        (FP8_ROW.replace(block=(128, 128), power_of_two=True), "e4m3 128x128 float32 power_of_two"),
        (INT4.replace(scale_dtype="bfloat16", zero_point=True), "int4 1x128 bfloat16 zero_point"),
        (MXFP4.replace(scale_rounding="floor"), "e2m1 1x32 e8m0 power_of_two floor"),
        (NVFP4.replace(global_scale="token"), "e2m1 1x16 e4m3 global per token"),
    ],
)
def test_a_scheme_describes_itself(scheme, phrase):
    assert scheme.describe() == phrase


def test_a_recipe_describes_itself():
    assert recipe("bf16").describe() == "unquantized"
    assert recipe("int4").describe() == "int4 1x128 float32 x unquantized activation"
    assert recipe("fp8_channel").describe() == "e4m3 1xall float32 x e4m3 1xall float32"


@pytest.mark.parametrize(
    "name",
    [
        "int4:group=32",
        "int4:group=-1,zero_point=True,scale_dtype=float16",
        "int4_fp8:group=64",
        "int8_w8a16:group=64,scale_dtype=bfloat16",
        "fp8_block:block=64x32,power_of_two=True",
        "fp8_block:scale_dtype=e8m0",
        "fp8_w8a16:block=1x-1",
        "mxfp4_a8:scale_rounding=floor",
    ],
)
def test_recipe_of_finds_a_name_with_options(name):
    named = recipe(name)
    assert named.name == name
    assert recipe_of(named.weight, named.input) == named


def test_recipe_of_describes_what_has_no_name():
    e5m2 = Scheme(format="e5m2", block=(1, -1))
    assert recipe_of(e5m2, None) == Recipe(name="e5m2 1xall float32 weight-only", weight=e5m2)
    mixed = recipe_of(FP8_ROW, INT8_ROW)
    assert mixed.name == "e4m3 1xall float32 x int8 1xall float32"
    assert (mixed.weight, mixed.input) == (FP8_ROW, INT8_ROW)


def test_a12_power_of_two_scales_are_opt_in_and_visible():
    plain, rounded = recipe("fp8_block"), recipe("fp8_block:power_of_two")
    assert not plain.weight.power_of_two
    assert not plain.input.power_of_two
    assert re.search("power_of_two.*power_of_two", rounded.describe())
