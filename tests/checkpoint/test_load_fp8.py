"""FP8 linear layers from checkpoints: values against other libraries' vectors, scales, shapes, and what is refused."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmoe
from jmoe import checkpoint
from jmoe.scheme import Scheme, recipe

E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
TINY_F32 = float(np.finfo(np.float32).tiny)


def codes(*shape):
    """E4M3 codes of small integers, no two rows or columns alike."""
    n, k = shape
    return ((np.arange(n)[:, None] * 3 + np.arange(k)[None, :]) % 16 - 7).astype(np.float32).astype(E4M3)


def vector(shared, name, changed_config=None):
    """A golden vector as (tensors with their true dtypes, quantization_config, expected values)."""
    path = shared / "vectors" / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"needs {path.name} among the golden vectors")
    with np.load(path) as stored:
        meta = json.loads(stored["meta"].tobytes())
        views = {"F8_E4M3": E4M3, "F8_E8M0": E8M0, "BF16": ml_dtypes.bfloat16}
        tensors = {}
        for leaf, info in meta["tensors"].items():
            array = stored[f"t/{leaf}"]
            tensors[leaf] = array.view(views[info["dtype"]]) if info["dtype"] in views else array
        return tensors, changed_config or meta["quantization_config"], stored["x/dequant"]


def placed(tensors, module="model.layers.0.self_attn.o_proj"):
    return {f"{module}.{leaf}": array for leaf, array in tensors.items()}


def loaded(write_checkpoint, tensors, config, names="a", **options):
    with checkpoint.open(write_checkpoint(tensors, {"quantization_config": config})) as opened:
        return checkpoint.load_linear(opened, names, **options)


def refusal(write_checkpoint, tensors, config, names="a"):
    """The sentence with which loading ``names`` is refused."""
    with pytest.raises(checkpoint.CheckpointError) as caught:
        loaded(write_checkpoint, tensors, config, names)
    message = str(caught.value)
    assert "\n" not in message and "model.safetensors" in message
    return message


def test_a_ragged_block_grid_is_exactly_compressed_tensors_values(write_checkpoint, shared):
    # (160, 200) in 128x128 blocks: block = index // 128, not shape // grid.
    tensors, config, expected = vector(shared, "ds_fp8_block128_ragged")
    q = loaded(write_checkpoint, placed(tensors), config, "model.layers.0.self_attn.o_proj")
    assert q.scheme == recipe("fp8_block").weight and q.input_scheme == recipe("fp8_block").input
    np.testing.assert_array_equal(q.dequantize(), expected)


def test_e8m0_scales_under_deepseek_v4s_name_are_exactly_transformers_values(write_checkpoint, shared):
    tensors, config, expected = vector(shared, "ds_fp8_block_ue8m0")
    q = loaded(write_checkpoint, placed(tensors), config, "model.layers.0.self_attn.o_proj")
    named = recipe("fp8_block", block=32, scale_dtype="e8m0")
    assert (q.scheme, q.input_scheme) == (named.weight, named.input)
    np.testing.assert_array_equal(q.dequantize(), expected)


def test_one_static_scale_a_tensor_is_exactly_compressed_tensors_values(write_checkpoint, shared):
    # The same three tensors as AutoFP8 writes.
    tensors, _, expected = vector(shared, "ct_fp8_tensor_static")
    folder = write_checkpoint(placed(tensors, "a"), {"quantization_config": STATIC})
    opened = checkpoint.open(folder)
    q = checkpoint.load_linear(opened, "a")
    static = recipe("fp8_tensor_static")
    assert q.scheme == static.weight.replace(scale_dtype=q.scheme.scale_dtype) and q.input_scheme == static.input
    np.testing.assert_array_equal(q.dequantize(), expected)
    scale = checkpoint.load_input_scale(opened, "a")
    assert scale.shape == () and scale.dtype == jnp.float32
    assert float(scale) == float(tensors["input_scale"].astype(np.float32).reshape(()))
    assert opened.input_scales() == {"a": float(scale)}
    assert np.isfinite(jmoe.linear(jnp.ones((2, q.shape[1]), jnp.bfloat16), q, input_scale=scale)).all()


def test_every_module_of_the_deepseek_checkpoint_is_exactly_transformers_values(shared):
    folder = shared / "vectors" / "ckpt_ds_fp8_moe"
    with np.load(folder / "expected.npz") as expected, checkpoint.open(folder) as opened:
        assert len(expected) == 7
        for name in expected:
            q = checkpoint.load_linear(opened, name.removesuffix(".weight"))
            assert q.scheme.block == (32, 32)
            np.testing.assert_array_equal(q.dequantize(), expected[name])


@pytest.mark.parametrize(
    "scale, name, expected",
    [
        (np.float32([[2, 3]]), "float32", [2, 3]),
        (np.array([[2, 3]], ml_dtypes.bfloat16), "bfloat16", [2, 3]),
        (np.array([[2, 3]], np.float16), "float16", [2, 3]),
        (np.array([[128, 126]], np.uint8), "e8m0", [2, 0.5]),
        (np.array([[2, 0.5]]).astype(E8M0), "e8m0", [2, 0.5]),
    ],
)
def test_the_scales_dtype_is_the_tensors(write_checkpoint, scale, name, expected):
    weight = np.ones((128, 256), E4M3)
    q = loaded(write_checkpoint, {"a.weight": weight, "a.weight_scale_inv": scale}, BLOCK)
    assert q.scheme == Scheme(format="e4m3", block=(128, 128), scale_dtype=name)
    np.testing.assert_array_equal(q.dequantize()[0, ::128], expected)


def test_scale_fmt_ue8m0_rounds_the_activation_and_leaves_float32_scales_as_they_are(write_checkpoint):
    tensors = {"a.weight": codes(128, 128), "a.weight_scale_inv": np.float32([[0.75]])}
    q = loaded(write_checkpoint, tensors, BLOCK | {"scale_fmt": "ue8m0"})
    assert q.input_scheme == Scheme(format="e4m3", block=(1, 128), power_of_two=True)
    assert q.scheme.scale_dtype == "float32" and float(q.scale[0, 0]) == 0.75


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv"])
def test_a_per_tensor_scale_comes_in_three_shapes_and_two_names(write_checkpoint, shape, leaf):
    tensors = {"a.weight": codes(3, 5), f"a.{leaf}": np.full(shape, 0.5, np.float32)}
    q = loaded(write_checkpoint, tensors, TENSOR | {"weight_block_size": None})
    assert (q.scheme, q.input_scheme) == (recipe("fp8_tensor").weight, recipe("fp8_tensor").input)
    np.testing.assert_array_equal(q.dequantize(), codes(3, 5).astype(np.float32) * 0.5)


def test_one_block_may_have_its_scale_as_a_scalar(write_checkpoint):
    q = loaded(write_checkpoint, {"a.weight": codes(3, 5), "a.weight_scale_inv": np.float32(2)}, BLOCK)
    assert q.scale.shape == (1, 1)


def test_c09_merged_per_tensor_scales_1_and_4_stay_exact(write_checkpoint):
    tensors = {"q.weight": codes(3, 5), "q.weight_scale": np.float32([1])}
    tensors |= {"k.weight": codes(2, 5), "k.weight_scale": np.float32([4])}
    q = loaded(write_checkpoint, tensors, TENSOR, ["q", "k"])
    assert q.scheme.block == (1, -1) and q.input_scheme == recipe("fp8_tensor").input
    np.testing.assert_array_equal(q.scale[:, 0], [1, 1, 1, 4, 4])
    values = [codes(3, 5).astype(np.float32), codes(2, 5).astype(np.float32) * 4]
    np.testing.assert_array_equal(q.dequantize(), np.concatenate(values))


def test_merged_blocks_that_do_not_meet_at_the_seam_stay_exact(write_checkpoint):
    # 96 rows end inside a 128-row block: the next shard's blocks start there.
    scales = {"q": np.float32([[1, 2]]), "k": np.float32([[3, 4], [5, 6]])}
    tensors = {f"{m}.weight_scale_inv": s for m, s in scales.items()}
    tensors |= {"q.weight": np.ones((96, 256), E4M3), "k.weight": np.ones((160, 256), E4M3)}
    q = loaded(write_checkpoint, tensors, BLOCK, ("q", "k"))
    rows = np.array(q.dequantize())[:, ::128]
    np.testing.assert_array_equal(rows, np.repeat([[1, 2], [3, 4], [5, 6]], [96, 128, 32], axis=0))


def test_static_scales_of_merged_modules_give_their_largest(write_checkpoint):
    tensors = {f"{m}.weight": codes(2, 4) for m in "qkv"} | {f"{m}.weight_scale_inv": np.float32(1) for m in "qkv"}
    tensors |= {f"{m}.activation_scale": np.float32(s) for m, s in zip("qkv", (0.5, 2, 1), strict=True)}
    opened = checkpoint.open(write_checkpoint(tensors, {"quantization_config": STATIC}))
    assert float(checkpoint.load_input_scale(opened, ["q", "k", "v"])) == 2
    assert opened.input_scales() == {"q": 0.5, "k": 2, "v": 1}
    assert checkpoint.load_linear(opened, list("qkv")).input_scheme.static


def test_dynamic_modules_have_no_input_scale(write_checkpoint):
    tensors = {"a.weight": codes(2, 4), "a.weight_scale": np.float32(1), "n.weight": np.ones(4, np.float32)}
    opened = checkpoint.open(write_checkpoint(tensors, {"quantization_config": TENSOR}))
    assert checkpoint.load_input_scale(opened, "a") is None and opened.input_scales() == {}


def test_weight_only_leaves_the_activation_alone(write_checkpoint):
    tensors = {"a.weight": codes(2, 4), "a.weight_scale": np.float32(1)}
    q = loaded(write_checkpoint, tensors, TENSOR, weight_only=True)
    assert q.scheme == recipe("fp8_tensor").weight and q.input_scheme is None


def test_an_unquantized_module_is_its_tensor_and_dtype_casts_it(write_checkpoint):
    tensors = {"lm_head.weight": np.float32([[1, 2.5]]).astype(ml_dtypes.bfloat16)}
    tensors |= {"a.weight": codes(2, 4), "a.weight_scale": np.float32(1)}
    opened = checkpoint.open(write_checkpoint(tensors, {"quantization_config": TENSOR}))
    assert checkpoint.load_linear(opened, "lm_head").dtype == jnp.bfloat16
    cast = checkpoint.load_linear(opened, "lm_head", dtype=jnp.float32)
    assert cast.dtype == jnp.float32
    np.testing.assert_array_equal(cast, [[1, 2.5]])
    assert checkpoint.load_linear(opened, "a", dtype=jnp.float32).data.dtype == jnp.float8_e4m3fn


def test_what_is_loaded_does_not_alias_the_file(write_checkpoint):
    folder = write_checkpoint({"a.weight": np.ones((512, 512), np.float32)})
    opened = checkpoint.open(folder)
    w = checkpoint.load_linear(opened, "a")
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-512 * 512 * 4, 2)
        file.write(bytes(512 * 512 * 4))
    np.testing.assert_array_equal(opened.read("a.weight"), 0)
    np.testing.assert_array_equal(w, 1)


def test_biases_join_as_the_weights_do(write_checkpoint):
    tensors = {"q.weight": np.ones((2, 3), np.float32), "q.bias": np.float32([1, 2])}
    tensors |= {
        "k.weight": np.ones((1, 3), np.float32),
        "k.bias": np.float32([3]),
        "o.weight": np.ones((1, 3), np.float32),
    }
    tensors |= {"bad.weight": np.ones((2, 3), np.float32), "bad.bias": np.float32([3])}
    opened = checkpoint.open(write_checkpoint(tensors))
    np.testing.assert_array_equal(checkpoint.load_bias(opened, ["q", "k"]), [1, 2, 3])
    assert checkpoint.load_bias(opened, "o") is None
    assert checkpoint.load_bias(opened, "q", dtype=jnp.bfloat16).dtype == jnp.bfloat16
    with pytest.raises(checkpoint.CheckpointError, match="'o' has not a bias, though other modules of 'q' have"):
        checkpoint.load_bias(opened, ["q", "o"])
    with pytest.raises(checkpoint.CheckpointError, match=r"tensor 'bad.bias' has shape \(1,\), expected \(2,\)"):
        checkpoint.load_bias(opened, "bad")


def test_j05_shards_of_which_only_some_are_quantized_are_named(write_checkpoint):
    tensors = {"up.weight": codes(2, 4), "up.weight_scale": np.float32(1), "gate.weight": np.ones((2, 4), np.float32)}
    config = TENSOR | {"ignored_layers": ["gate"]}
    folder = write_checkpoint(tensors, {"quantization_config": config})
    with pytest.raises(checkpoint.CheckpointError, match=r"'up' is e4m3 .*, but 'gate' is unquantized"):
        checkpoint.load_linear(checkpoint.open(folder), ["gate", "up"])


def test_shards_of_different_k_are_refused(write_checkpoint):
    tensors = {"q.weight": codes(2, 4), "k.weight": codes(2, 5)} | {f"{m}.weight_scale": np.float32(1) for m in "qk"}
    assert "'k.weight' has K = 5, expected 4" in refusal(write_checkpoint, tensors, TENSOR, ["q", "k"])


@pytest.mark.parametrize(
    "value, shown",
    [
        (0.0, "0"),
        (1e-45, "1.4012984"),
        (TINY_F32 / 2, "5.87747175e-39"),
        (-1.0, "-1"),
        (np.nan, "nan"),
        (np.inf, "inf"),
        (np.finfo(np.float32).min, "-3.40282347e+38"),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a05_a06_a_scale_that_was_never_set_is_refused_by_name_and_value(write_checkpoint, value, shown, dtype):
    scale = np.ones((2, 3), dtype)
    scale[1, 2] = value
    tensors = {"a.weight": codes(256, 384), "a.weight_scale_inv": scale}
    message = refusal(write_checkpoint, tensors, BLOCK)
    assert "tensor 'a.weight_scale_inv' holds the scale " in message and " at [1, 2], expected" in message
    if dtype == np.float32:
        assert f"holds the scale {shown}" in message


@pytest.mark.parametrize("value", [0.0, 1e-45, -1.0, np.nan, np.inf])
def test_a05_a06_an_activation_scale_that_was_never_set_is_refused(write_checkpoint, value):
    tensors = {"a.weight": codes(2, 4), "a.weight_scale": np.float32(1), "a.input_scale": np.float32([value])}
    opened = checkpoint.open(write_checkpoint(tensors, {"quantization_config": STATIC}))
    with pytest.raises(checkpoint.CheckpointError, match=r"tensor 'a\.input_scale' holds the scale"):
        checkpoint.load_input_scale(opened, "a")


def test_the_smallest_normal_scale_is_taken(write_checkpoint):
    q = loaded(write_checkpoint, {"a.weight": codes(2, 4), "a.weight_scale": np.float32(TINY_F32)}, TENSOR)
    assert float(q.scale[0, 0]) == TINY_F32


def test_an_e8m0_scale_may_be_byte_0_but_not_nan(write_checkpoint):
    tensors = {"a.weight": codes(128, 256), "a.scale": np.array([[0, 127]], np.uint8)}
    assert loaded(write_checkpoint, tensors, BLOCK).scale.tolist() == [[0, 127]]
    tensors["a.scale"] = np.array([[0, 255]], np.uint8).view(E8M0)
    assert "holds the scale NaN (e8m0 byte 255) at [0, 1]" in refusal(write_checkpoint, tensors, BLOCK)


def test_c03_a_transposed_grid_of_scales_is_refused(write_checkpoint):
    tensors = {"a.weight": codes(256, 384), "a.weight_scale_inv": np.ones((3, 2), np.float32)}
    message = refusal(write_checkpoint, tensors, BLOCK)
    assert "has shape (3, 2), expected (2, 3) for 'a.weight' of shape (256, 384)" in message
    assert "transposed" in message


@pytest.mark.parametrize(
    "config, tensors, says",
    [
        (BLOCK, {"weight_scale_inv": np.float32([1])}, "has shape (1,), expected (2, 2) for 'a.weight'"),
        (BLOCK, {"weight_scale_inv": np.ones((2, 2, 1), np.float32)}, "has shape (2, 2, 1), expected (2, 2)"),
        (TENSOR, {"weight_scale": np.ones((2, 2), np.float32)}, "has shape (2, 2), expected (1, 1)"),
        (TENSOR, {"weight_scale": np.ones(200, np.float32)}, "has shape (200,), expected (1, 1)"),
        (TENSOR, {"weight_scale": np.float64(1)}, "has dtype F64, expected one of F32, BF16"),
        (
            TENSOR,
            {"weight_scale": np.float32(1), "weight_scale_inv": np.float32(1)},
            "'a.weight_scale_inv' and 'a.weight_scale' are two names of one scale",
        ),
        (
            TENSOR,
            {"weight_scale": np.float32(1), "input_scale": np.float32(1)},
            "tensor 'a.input_scale' is a given activation scale, but the configuration says",
        ),
        (STATIC, {"weight_scale": np.float32(1)}, "has no activation scale, expected one of a.input_scale"),
        (
            STATIC,
            {"weight_scale": np.float32(1), "input_scale": np.ones(2, np.float32)},
            "tensor 'a.input_scale' is F32 of shape (2,), expected one F32 number",
        ),
    ],
)
def test_tensors_that_contradict_the_configuration_are_refused(write_checkpoint, config, tensors, says):
    assert says in refusal(write_checkpoint, {"a.weight": codes(200, 200)} | placed(tensors, "a"), config)


@pytest.mark.parametrize(
    "tensors, says",
    [
        ({"a.weight_scale": np.float32(1)}, "tensor 'a.weight_scale' is a scale, but 'a.weight' is missing"),
        ({"a.weight": codes(2, 4)}, "tensor 'a.weight' is F8_E4M3, but its scale is missing"),
        (
            {"a.weight": np.ones((2, 4), ml_dtypes.bfloat16), "a.weight_scale": np.float32(1)},
            "tensor 'a.weight' has dtype BF16, expected F8_E4M3 beside 'a.weight_scale'",
        ),
        (
            {"a.weight": np.ones((2, 4), np.int8), "a.weight_scale": np.float32(1)},
            "tensor 'a.weight' has dtype I8, expected F8_E4M3",
        ),
        ({"a.weight": np.ones((2, 4), np.int8)}, "tensor 'a.weight' has dtype I8, but neither"),
        (
            {"a.weight": np.ones((2, 3, 4), E4M3), "a.weight_scale": np.float32(1)},
            "has shape (2, 3, 4), expected the two axes (N, K)",
        ),
        ({"a.weight": np.ones(4, np.float32)}, "has shape (4,), expected the two axes (N, K)"),
    ],
)
def test_modules_that_are_no_fp8_linear_layer_are_refused(write_checkpoint, tensors, says):
    whole = {"b.weight": codes(2, 4), "b.weight_scale": np.float32(1)}
    assert says in refusal(write_checkpoint, tensors | whole, TENSOR)


def test_a_module_that_is_not_there_is_named(write_checkpoint):
    opened = checkpoint.open(write_checkpoint({"a.weight": np.ones((2, 4), np.float32)}))
    with pytest.raises(checkpoint.CheckpointError, match=r"has no tensor of a module 'a.b'"):
        checkpoint.load_linear(opened, "a.b")
    for names in ([], [7], 7 * ()):
        with pytest.raises(TypeError, match="must be the name of a module or a sequence"):
            checkpoint.load_linear(opened, names)


def test_a_tensor_at_an_odd_offset_loads_right(tmp_path):
    # Other writers do not align: a header of odd length puts a bfloat16 tensor at an odd address.
    header = {"a.weight": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}
    raw = json.dumps(header).encode()
    raw += b" " * (1 - len(raw) % 2)
    data = np.array([[1, 2], [3, 4]], ml_dtypes.bfloat16).tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    (tmp_path / "config.json").write_text("{}")
    opened = checkpoint.open(tmp_path)
    assert not opened.read("a.weight").flags.aligned
    for dtype in (None, jnp.float32):
        np.testing.assert_array_equal(
            checkpoint.load_linear(opened, "a", dtype=dtype).astype(jnp.float32), [[1, 2], [3, 4]]
        )
