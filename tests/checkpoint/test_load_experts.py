"""Experts stacked from a checkpoint: names, values, what is refused, and how much memory it takes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmoe
from jmoe import checkpoint
from jmoe.checkpoint import placement, weights
from jmoe.scheme import recipe

ROOT = Path(__file__).resolve().parents[2]
E4M3 = ml_dtypes.float8_e4m3fn
TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
F32 = np.float32
QWEN, MIXTRAL = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def plain(prefix, names, experts=3, hidden=4, intermediate=2):
    """Experts each of whose matrices is one number: 10 * expert + position in ``names``."""
    shapes = {name: (intermediate, hidden) for name in names[:-1]} | {names[-1]: (hidden, intermediate)}
    return {
        f"{prefix}.{e}.{name}.weight": np.full(shapes[name], 10 * e + i, np.float32)
        for e in range(experts)
        for i, name in enumerate(names)
    }


def quantized(prefix, names, experts=2, scales=None, **sizes):
    """The same in FP8 with one scale a matrix, 1 unless ``scales`` has another."""
    tensors = plain(prefix, names, experts, **sizes)
    scale = {name.removesuffix("weight") + "weight_scale": np.float32(1) for name in tensors}
    return {name: w.astype(E4M3) for name, w in tensors.items()} | scale | (scales or {})


@pytest.mark.parametrize(
    "prefix, names",
    [
        ("model.layers.0.mlp.experts", QWEN),
        ("model.layers.11.block_sparse_moe.experts", MIXTRAL),
        ("layers.0.ffn.experts", MIXTRAL),
        ("experts", QWEN),
    ],
)
def test_gated_experts_of_every_naming_are_gate_then_up(write_checkpoint, prefix, names):
    opened = checkpoint.open(write_checkpoint(plain(prefix, names)))
    w13, w2 = checkpoint.load_experts(opened, prefix)
    assert opened.expert_prefixes == (prefix,)
    assert (w13.shape, w2.shape) == ((3, 2, 2, 4), (3, 4, 2))
    np.testing.assert_array_equal(w13[:, :, 0, 0], [[0, 1], [10, 11], [20, 21]])
    np.testing.assert_array_equal(w2[:, 0, 0], [2, 12, 22])


def test_ungated_experts_have_one_half(write_checkpoint):
    opened = checkpoint.open(write_checkpoint(plain("backbone.mixer.experts", ("up_proj", "down_proj"))))
    w13, w2 = checkpoint.load_experts(opened, "backbone.mixer.experts")
    assert w13.shape == (3, 1, 2, 4)
    np.testing.assert_array_equal(w13[:, 0, 1, 3], [0, 10, 20])
    np.testing.assert_array_equal(w2[:, 3, 1], [1, 11, 21])


def test_experts_are_put_in_the_order_of_their_numbers_not_of_their_names(write_checkpoint):
    opened = checkpoint.open(write_checkpoint(plain("experts", QWEN, experts=12)))
    w13, _ = checkpoint.load_experts(opened, "experts")
    np.testing.assert_array_equal(w13[:, 0, 0, 0], 10 * np.arange(12))


def test_experts_over_two_shards_are_one_stack(write_checkpoint):
    tensors = plain("experts", QWEN)
    halves = [dict(list(tensors.items())[part]) for part in (slice(0, 4), slice(4, None))]
    files = [f"model-{i + 1:05}-of-00002.safetensors" for i in range(2)]
    for half, file in zip(halves, files, strict=True):
        folder = write_checkpoint(half, file=file)
    index = {name: file for half, file in zip(halves, files, strict=True) for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    w13, w2 = checkpoint.load_experts(checkpoint.open(folder), "experts")
    np.testing.assert_array_equal(w13[:, :, 0, 0], [[0, 1], [10, 11], [20, 21]])
    np.testing.assert_array_equal(w2[:, 0, 0], [2, 12, 22])


def test_the_deepseek_checkpoints_experts_are_exactly_transformers_values(shared):
    folder, prefix = shared / "vectors" / "ckpt_ds_fp8_moe", "model.layers.3.mlp.experts"
    with np.load(folder / "expected.npz") as expected, checkpoint.open(folder) as opened:
        w13, w2 = checkpoint.load_experts(opened, prefix)
        assert (w13.shape, w13.scale.shape) == ((2, 2, 64, 64), (2, 2, 2, 2))
        assert (w13.scheme, w2.input_scheme) == (
            recipe("fp8_block:block=32").weight,
            recipe("fp8_block:block=32").input,
        )
        for e in range(2):
            gate, up, down = (expected[f"{prefix}.{e}.{name}.weight"] for name in QWEN)
            np.testing.assert_array_equal(w13.dequantize()[e], [gate, up])
            np.testing.assert_array_equal(w2.dequantize()[e], down)


def test_scalar_scales_stay_apart_by_expert_and_half(write_checkpoint):
    scales = {f"experts.{e}.{n}.weight_scale": np.float32(s) for e, n, s in ((0, "up_proj", 4), (1, "down_proj", 0.5))}
    opened = checkpoint.open(
        write_checkpoint(quantized("experts", QWEN, scales=scales), {"quantization_config": TENSOR})
    )
    w13, w2 = checkpoint.load_experts(opened, "experts")
    assert (w13.scheme.block, w2.scheme.block) == ((-1, -1), (-1, -1))
    np.testing.assert_array_equal(w13.scale[..., 0, 0], [[1, 4], [1, 1]])
    np.testing.assert_array_equal(w2.scale[..., 0, 0], [1, 0.5])
    x = jnp.ones((1, 4), jnp.float32)
    y = jmoe.fused_moe(x, w13, w2, jnp.ones((1, 1)), jnp.zeros((1, 1), jnp.int32))
    # Expert 0 has gate 0: silu(0) * up = 0.
    np.testing.assert_array_equal(y, np.zeros((1, 4)))


def test_given_activation_scales_are_the_largest_for_x_and_each_experts_own_for_the_intermediate(write_checkpoint):
    tensors = quantized("experts", QWEN)
    values = {"gate_proj": (1, 2), "up_proj": (8, 4), "down_proj": (0.5, 0.25)}
    tensors |= {f"experts.{e}.{n}.input_scale": np.float32(v) for n, pair in values.items() for e, v in enumerate(pair)}
    config = {"quantization_config": TENSOR | {"activation_scheme": "static"}}
    opened = checkpoint.open(write_checkpoint(tensors, config))
    input_scale, intermediate_scale = checkpoint.load_expert_scales(opened, "experts")
    assert input_scale.shape == () and float(input_scale) == 8
    np.testing.assert_array_equal(intermediate_scale, [0.5, 0.25])
    _, in_slots = checkpoint.load_expert_scales(opened, "experts", slots=[1, -1, 0])
    np.testing.assert_array_equal(in_slots, [0.25, 1, 0.5])
    assert opened.input_scales()["experts.1.up_proj"] == 4


def test_dynamic_experts_have_no_given_scales(write_checkpoint):
    opened = checkpoint.open(write_checkpoint(quantized("experts", QWEN), {"quantization_config": TENSOR}))
    assert checkpoint.load_expert_scales(opened, "experts") == (None, None)


def test_biases_are_stacked_as_the_weights_are(write_checkpoint):
    tensors = plain("experts", QWEN, experts=2)
    biases = {
        f"experts.{e}.{n}.bias": np.full(2, 10 * e + i, np.float32) for e in range(2) for i, n in enumerate(QWEN[:2])
    }
    opened = checkpoint.open(write_checkpoint(tensors | biases))
    b13, b2 = checkpoint.load_expert_biases(opened, "experts", dtype=jnp.bfloat16)
    assert b2 is None and b13.dtype == jnp.bfloat16
    np.testing.assert_array_equal(b13.astype(jnp.float32), [[[0, 0], [1, 1]], [[10, 10], [11, 11]]])
    in_slots, _ = checkpoint.load_expert_biases(opened, "experts", slots=[1, -1])
    np.testing.assert_array_equal(in_slots, [[[10, 10], [11, 11]], [[0, 0], [0, 0]]])
    down = {"experts.0.down_proj.bias": np.ones(4, np.float32)}
    opened = checkpoint.open(write_checkpoint(tensors | biases | down))
    with pytest.raises(checkpoint.CheckpointError, match=r"'experts\.1\.down_proj' has not a bias"):
        checkpoint.load_expert_biases(opened, "experts")


def test_dtype_casts_plain_experts_and_weight_only_frees_the_activation(write_checkpoint):
    w13, w2 = checkpoint.load_experts(
        checkpoint.open(write_checkpoint(plain("experts", QWEN))), "experts", dtype="bfloat16"
    )
    assert w13.dtype == w2.dtype == jnp.bfloat16
    opened = checkpoint.open(write_checkpoint(quantized("experts", QWEN), {"quantization_config": TENSOR}))
    w13, w2 = checkpoint.load_experts(opened, "experts", weight_only=True)
    assert w13.input_scheme is None and w2.input_scheme is None


@pytest.mark.parametrize("how", ["nvfp4_w4a16", "int4:group=32,zero_point"])
def test_experts_that_are_quantized_as_they_are_read_are_those_that_are_quantized_together(write_checkpoint, how):
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(0, 1, w.shape).astype(F32) for name, w in plain("experts", QWEN, 3, 64, 32).items()}
    with checkpoint.open(write_checkpoint(tensors)) as opened:
        found = checkpoint.load_experts(opened, "experts", recipe=how, dtype=jnp.bfloat16)
        w13, w2 = checkpoint.load_experts(opened, "experts", dtype=jnp.bfloat16)
        only = checkpoint.load_experts(opened, "experts", recipe="int8", weight_only=True)
    # NVFP4's multiplier is one for gate and up.
    for mine, theirs in zip(found, (jmoe.quantize(w13, how, shared=(-3,)), jmoe.quantize(w2, how)), strict=True):
        assert jax.tree.structure(mine) == jax.tree.structure(theirs)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(a, b)
    assert only[0].input_scheme is None and only[0].scheme == recipe("int8").weight


@pytest.mark.parametrize("how, rows", [("fp8_block", 1), ("nvfp4_w4a16", 2)])
def test_one_expert_at_a_time_is_unquantized_while_experts_are_quantized(write_checkpoint, monkeypatch, how, rows):
    quantized_at_once, placed = [], []
    quantize, moved = weights.quantize, placement._moved
    monkeypatch.setattr(
        weights, "quantize", lambda w, *a, **k: quantized_at_once.append(w.shape) or quantize(w, *a, **k)
    )
    monkeypatch.setattr(placement, "_moved", lambda array, to: placed.append(array.dtype) or moved(array, to))
    tensors = plain("experts", QWEN, 3, 64, 32)
    with checkpoint.open(write_checkpoint(tensors)) as opened:
        checkpoint.load_experts(opened, "experts", recipe=how)
    # The first is seen twice, for what all are like.
    assert set(quantized_at_once) == {(rows, 32, 64), (1, 64, 32)}
    assert len(quantized_at_once) <= 6 // rows + 3 + 2
    assert placed[0] == (ml_dtypes.float8_e4m3fn if how == "fp8_block" else np.uint8)


def test_a_recipe_leaves_experts_alone_that_are_quantized(write_checkpoint):
    with checkpoint.open(write_checkpoint(quantized("experts", QWEN), {"quantization_config": TENSOR})) as opened:
        w13, _ = checkpoint.load_experts(opened, "experts", recipe="int8")
        assert w13.scheme == recipe("fp8_tensor").weight


def test_weights_go_where_the_device_function_says(write_checkpoint):
    devices, asked = jax.devices(), []

    def device(name, shape):
        asked.append((name, shape))
        return devices[-1]

    opened = checkpoint.open(write_checkpoint(quantized("experts", QWEN), {"quantization_config": TENSOR}))
    w13, w2 = checkpoint.load_experts(opened, "experts", device=device)
    assert asked == [
        ("w13", (2, 2, 2, 4)),
        ("w13_scale", (2, 2, 1, 1)),
        ("w2", (2, 4, 2)),
        ("w2_scale", (2, 1, 1)),
    ]
    assert {leaf.device for leaf in jax.tree.leaves((w13, w2))} == {devices[-1]}


def refusal(write_checkpoint, tensors, config=None, prefix="experts"):
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load_experts(checkpoint.open(write_checkpoint(tensors, config)), prefix)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "lost, says",
    [
        (
            ["experts.1.gate_proj.weight", "experts.1.up_proj.weight", "experts.1.down_proj.weight"],
            "experts.1 is missing, though there is experts.2",
        ),
        (["experts.1.up_proj.weight"], "experts.1.up_proj is missing, though other experts have it"),
    ],
)
def test_an_expert_or_projection_missing_in_the_middle_is_named(write_checkpoint, lost, says):
    tensors = {name: tensor for name, tensor in plain("experts", QWEN).items() if name not in lost}
    assert says in refusal(write_checkpoint, tensors)


def test_the_last_expert_is_missed_by_the_configurations_count(write_checkpoint):
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        message = refusal(write_checkpoint, plain("experts", QWEN), {key: 4})
        assert f"experts has 3 experts, expected 4 as config.json says ({key})" in message


@pytest.mark.parametrize("number", ["007", "10000000", "9" * 5000])
def test_numbers_that_no_expert_has_are_refused(write_checkpoint, number):
    tensors = plain("experts", QWEN) | {f"experts.{number}.up_proj.weight": np.ones((2, 4), np.float32)}
    assert f"is an expert of number {number[:20]}, expected one below ten million" in refusal(write_checkpoint, tensors)


def test_b10_an_intermediate_size_that_kernels_pad_pairs_each_gate_with_its_up(write_checkpoint):
    rng, weights = np.random.default_rng(0), {}
    for e in range(2):
        for name, shape in zip(QWEN, ((40, 24), (40, 24), (24, 40)), strict=True):
            weights[e, name] = rng.normal(0, 0.3, shape).astype(np.float32)
    tensors = {f"experts.{e}.{name}.weight": w for (e, name), w in weights.items()}
    x = rng.normal(0, 1, (5, 24)).astype(np.float32)
    with checkpoint.open(write_checkpoint(tensors)) as opened:
        w13, w2 = checkpoint.load_experts(opened, "experts")
    ids = np.int32([[0], [1], [1], [0], [1]])
    y = jmoe.fused_moe(x, w13, w2, np.ones((5, 1), np.float32), ids)
    for row, e, found in zip(x, ids[:, 0], y, strict=True):
        gate, up, down = (weights[e, name] for name in QWEN)
        g = gate @ row
        np.testing.assert_allclose(found, down @ (g / (1 + np.exp(-g)) * (up @ row)), rtol=1e-4, atol=1e-5)


def test_names_of_no_known_family_are_refused(write_checkpoint):
    message = refusal(write_checkpoint, plain("experts", ("fc1", "fc2")))
    assert "the experts of experts have fc1, fc2, expected one of gate_proj, up_proj, down_proj; w1, w3, w2" in message
    extra = plain("experts", QWEN) | {"experts.0.norm.weight": np.ones(2, np.float32)}
    assert "have norm beside gate_proj, up_proj, down_proj" in refusal(write_checkpoint, extra)


def test_a_prefix_without_experts_is_refused_with_those_that_have_some(write_checkpoint):
    tensors = plain("model.layers.1.mlp.experts", QWEN)
    message = refusal(write_checkpoint, tensors, prefix="model.layers.0.mlp.experts")
    assert "no experts <number>.<projection> below 'model.layers.0.mlp.experts'" in message
    assert "there are some below model.layers.1.mlp.experts" in message
    stacked = {"experts.gate_up_proj": np.ones((2, 4, 4), np.float32)}
    assert "there are none at all" in refusal(write_checkpoint, stacked)


DOWN = {f"experts.{e}.down_proj.weight": np.ones((5, 2), F32) for e in range(3)}


@pytest.mark.parametrize(
    "changed, says",
    [
        (
            {"experts.2.up_proj.weight": np.ones((3, 4), F32)},
            "up_proj.weight' loads as float32 (3, 4), expected float32 (2, 4)",
        ),
        ({"experts.2.up_proj.weight": np.ones((2, 4), np.float16)}, "'experts.2.up_proj' is unquantized (float16)"),
        (DOWN, "'experts.0.down_proj.weight' has shape (5, 2), expected (4, 2) to match"),
        ({"experts.2.up_proj.weight": np.ones(4, F32)}, "has shape (4,), expected the two axes (N, K)"),
    ],
)
def test_experts_that_differ_are_named(write_checkpoint, changed, says):
    assert says in refusal(write_checkpoint, plain("experts", QWEN) | changed)


def test_j05_experts_of_which_only_some_are_quantized_are_named(write_checkpoint):
    tensors = quantized("experts", QWEN)
    del tensors["experts.1.gate_proj.weight_scale"]
    tensors["experts.1.gate_proj.weight"] = np.ones((2, 4), np.float32)
    config = {"quantization_config": TENSOR | {"ignored_layers": ["experts.1.gate_proj"]}}
    message = refusal(write_checkpoint, tensors, config)
    assert "'experts.1.gate_proj' is unquantized (float32), but 'experts.0.gate_proj' is e4m3 per tensor" in message


def test_experts_scales_of_two_dtypes_are_refused(write_checkpoint):
    scales = {"experts.1.up_proj.weight_scale": np.array(1, ml_dtypes.bfloat16)}
    message = refusal(write_checkpoint, quantized("experts", QWEN, scales=scales), {"quantization_config": TENSOR})
    assert "'experts.1.up_proj' is e4m3 per tensor bfloat16" in message


_MEASURE = """
import json, sys, threading, time
import jax, ml_dtypes, numpy as np
from jmoe import checkpoint
from jmoe.checkpoint.safetensors_writer import write_safetensors

folder, dtype = sys.argv[1], sys.argv[2]
experts, intermediate, hidden = 24, 1024, 2048
fp8 = dtype == "fp8"
element = ml_dtypes.float8_e4m3fn if fp8 else ml_dtypes.bfloat16
rng = np.random.default_rng(0)
rows = rng.standard_normal((intermediate, hidden), np.float32).astype(element)

class Made(dict):
    # The same bytes under every name, made when asked for, so that writing takes no memory.
    def __getitem__(self, name):
        if name.endswith("scale_inv"):
            return np.ones((16, 8) if "down" in name else (8, 16), np.float32)
        return rows.reshape(hidden, intermediate) if "down" in name else rows

leaves = ("weight", "weight_scale_inv") if fp8 else ("weight",)
names = [f"experts.{e}.{p}_proj.{l}" for e in range(experts) for p in ("gate", "up", "down") for l in leaves]
write_safetensors(folder + "/model.safetensors", Made.fromkeys(names))
config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}} if fp8 else {}
open(folder + "/config.json", "w").write(json.dumps(config))

def resident():
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return np.array([1024 * int(fields[key].split()[0]) for key in ("RssAnon", "RssFile")])

small = jax.block_until_ready(jax.device_put(np.ones((64, 64))))
peak, done = resident(), threading.Event()

def watch():
    global peak
    while not done.wait(0.001):
        peak = np.maximum(peak, resident())

before = resident()
watcher = threading.Thread(target=watch)
watcher.start()
mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,)) if dtype == "sharded" else None
where = {} if mesh is None else {"mesh": mesh, "sharding": ("expert", None, None)}
loaded = checkpoint.load_experts(checkpoint.open(folder), "experts", **where)
done.set()
watcher.join()
above, mapped = (peak - before).tolist()
sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(weight)) for weight in loaded]
after = (resident() - before).tolist()[0]
print(json.dumps({"above": above - sum(sizes), "mapped": mapped, "after": after, "sizes": sizes}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads RssAnon from Linux's /proc")
@pytest.mark.parametrize("dtype", ["fp8", "bf16", "sharded"])
def test_streaming_needs_less_than_1_2_stacked_tensors_above_what_it_loads(tmp_path, dtype):
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path), dtype],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    measured = json.loads(re.findall(r"\{.*\}", run.stdout)[-1])
    w13, w2 = measured["sizes"]
    assert w13 + w2 > (150e6 if dtype == "fp8" else 300e6)
    # The watcher sees it: at some time a host buffer and its copy on the device are both there. On four devices that is
    # a quarter of each.
    parts = 4 if dtype == "sharded" else 1
    assert 0.5 * w2 < parts * measured["above"] < 1.2 * w13
    assert measured["after"] < 1.1 * (w13 + w2)
    # Of the file itself, little more than one expert's pages.
    assert measured["mapped"] < 0.2 * w2
