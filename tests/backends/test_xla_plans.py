"""The xla implementation's memory and its plans."""

import jax
import jax.numpy as jnp
import pytest

import jmoe
from jmoe.backends import xla
from jmoe.backends.spec import DEVICES
from pallas_kernels.layouts import Layout


def quantized(w, recipe):
    return w if recipe == "bf16" else jmoe.quantize(w, recipe)


def compiled_moe(recipe, tokens, *, layers=None, differentiate=(), experts=64, hidden=512, intermediate=256, k=4):
    """fused_moe compiled for shapes alone, and the bytes of one expert's float32 weights."""
    lead = () if layers is None else (layers,)

    def weight(*shape):
        return jax.eval_shape(lambda: quantized(jnp.zeros((*lead, *shape), jnp.bfloat16), recipe))

    args = (
        jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16),
        weight(experts, 2, intermediate, hidden),
        weight(experts, hidden, intermediate),
        jax.ShapeDtypeStruct((tokens, k), jnp.float32),
        jax.ShapeDtypeStruct((tokens, k), jnp.int32),
        None if layers is None else jax.ShapeDtypeStruct((), jnp.int32),
    )

    def run(x, w13, w2, weights, ids, layer):
        return jmoe.fused_moe(x, w13, w2, weights, ids, layer=layer, implementation="xla").astype(jnp.float32).sum()

    fn = jax.grad(run, argnums=differentiate) if differentiate else run
    return fn, args, 4 * 3 * intermediate * hidden


@pytest.mark.parametrize("layers", [None, 8])
@pytest.mark.parametrize("recipe", ["int4", "fp8_block", "nvfp4_w4a16", "bf16"])
def test_h19_memory_is_one_expert_and_activations(recipe, layers):
    fn, args, expert = compiled_moe(recipe, 16, layers=layers)
    # 64 slots in at most 64 blocks of 16 rows: x in 2 bytes, its float32 form and y, and the slots once more.
    activations = 64 * 16 * 512 * (2 + 4 + 4)
    used = jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert used < 1.5 * expert + activations
    # All experts' codes are 8 to 32 times as much, and dequantised 64 times.


@pytest.mark.parametrize("layers", [None, 8])
def test_h19_memory_of_gradients(layers):
    fn, args, expert = compiled_moe("fp8_block", 16, layers=layers, differentiate=(0, 3))
    activations = 64 * 16 * 512 * (2 + 4 + 4)
    used = jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert used < 2 * (1.5 * expert + activations)


def test_memory_of_gradients_of_plain_weights_is_their_own():
    fn, args, expert = compiled_moe("bf16", 16, differentiate=(1, 2), experts=32)
    weights = 32 * expert // 2  # bfloat16
    analysis = jax.jit(fn).lower(*args).compile().memory_analysis()
    assert analysis.output_size_in_bytes >= weights
    assert analysis.temp_size_in_bytes < weights


def test_decoding_one_token_needs_one_expert_at_a_time():
    fn, args, expert = compiled_moe("fp8_block", 1, experts=128, k=8)
    used = jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert used < 1.5 * expert


@pytest.mark.parametrize("layers", [None, 4])
@pytest.mark.parametrize("recipe", ["int4", "fp8_block", "fp8_w8a16:block=1001x128", "fp8_w8a16:block=15000x128"])
def test_memory_of_a_large_linear_is_a_piece(recipe, layers):
    n, k = 16384, 4096  # 256 MiB in float32
    shape = (n, k) if layers is None else (layers, n, k)
    w = jax.eval_shape(lambda: jmoe.quantize(jnp.zeros(shape, jnp.bfloat16), recipe))
    x = jax.ShapeDtypeStruct((4, k), jnp.bfloat16)
    layer = None if layers is None else jax.ShapeDtypeStruct((), jnp.int32)
    fn = lambda x, w, layer: jmoe.linear(x, w, layer=layer, implementation="xla")  # noqa: E731
    used = jax.jit(fn).lower(x, w, layer).compile().memory_analysis().temp_size_in_bytes
    assert used < 1.5 * xla._PIECE_BYTES


def test_h19_no_ragged_dot_and_no_product_over_all_experts():
    fn, args, _ = compiled_moe("fp8_block", 16, differentiate=(0, 3))
    text = str(jax.make_jaxpr(fn)(*args))
    assert "ragged_dot" not in text
    products = [line for line in text.splitlines() if "= dot_general" in line]
    assert products
    assert not any("[64," in line for line in products)


def moe_op(recipe="fp8_block", **changes):
    return jmoe.OpSpec(
        **{
            "op": "moe",
            "recipe": jmoe.recipe(recipe),
            "tokens": 64,
            "hidden": 512,
            "experts": 8,
            "global_experts": 8,
            "intermediate": 256,
            "top_k": 2,
        }
        | changes
    )


def plan(op, device="h100", explicit=True):
    return xla.plan(op, jmoe.DeviceSpec.named(device), explicit=explicit)


def operands(op, device="h100"):
    return dict(plan(op, device).tiles)["operands"]


def test_operands_are_part_of_the_plan():
    assert operands(moe_op("fp8_channel")) == "bfloat16"
    assert operands(moe_op("mxfp8")) == "bfloat16"
    assert operands(moe_op("nvfp4")) == "bfloat16"
    assert operands(moe_op("int4")) == "bfloat16"
    assert operands(moe_op("fp8_block")) == "tensorfloat32"
    assert operands(moe_op("int4_int8")) == "tensorfloat32"
    assert operands(moe_op("bf16")) == "bfloat16"
    assert operands(moe_op("bf16", dtype="float16")) == "float16"
    assert operands(moe_op("int4", dtype="float16")) == "tensorfloat32"
    assert operands(moe_op("int8", dtype="float16")) == "bfloat16"
    assert operands(moe_op("int8", second_recipe=jmoe.recipe("int4_fp8"))) == "tensorfloat32"
    for op in (moe_op("fp8_channel"), moe_op("bf16")):
        assert operands(op, "cpu") == operands(op, "t4") == operands(op.replace(dtype="float32")) == "float32"


def test_fp4_activations_are_emulated_on_a_gpu_only_where_asked_by_name():
    for recipe in ("nvfp4", "nvfp4_per_token", "mxfp4_a4"):
        op = moe_op(recipe)
        with pytest.raises(NotImplementedError, match=r"compute capability 10\.0\), and NVIDIA H100 80GB has none"):
            plan(op, "h100", explicit=False)
        for device, explicit in (("h100", True), ("cpu", False), ("b200", False)):
            assert "FP4 activations are emulated" in plan(op, device, explicit).note
        second = moe_op("int4", second_recipe=jmoe.recipe(recipe))
        with pytest.raises(NotImplementedError, match="FP4 activations"):
            plan(second, "h100", explicit=False)
    assert "emulated" not in plan(moe_op("mxfp4"), explicit=False).note
    selection = jmoe.select(moe_op("nvfp4"), "h100", implementation="xla")
    assert selection.implementation == "xla" and "emulated" in selection.note


def test_j06_what_is_asked_for_by_name_is_served_or_fails():
    packed = moe_op(layout=Layout("tiles"))
    with pytest.raises(NotImplementedError, match=r"'xla' cannot serve .*layout 'tiles', and it reads the canonical"):
        jmoe.select(packed, "h100", implementation="xla")


def test_accumulation_is_exact_and_says_so_where_fast_was_asked():
    assert plan(moe_op()).accumulation == "exact"
    fast = plan(moe_op(accumulation="fast"))
    assert fast.accumulation == "exact"
    assert "accumulation='fast' changes nothing" in fast.note
    assert "changes nothing" not in plan(moe_op("fp8_channel", accumulation="fast")).note  # its default


def test_notes_tell_of_dequantised_weights_and_meshes():
    assert (
        "weights are dequantised to float32, multiplied in tensorfloat32, one expert at a time" in plan(moe_op()).note
    )
    assert plan(moe_op("bf16")).note == ""
    assert "mesh (data=4)" in plan(moe_op(mesh=(("data", 4),))).note
    linear = jmoe.OpSpec(op="linear", recipe=jmoe.recipe("int4"), tokens=1, hidden=8192, features=28672)
    assert "4096 rows at a time" in plan(linear).note


def test_pieces_of_a_linear_split_no_block_of_scales_if_these_fit():
    for block, expected in ((128, 7168), (96, 7296)):
        recipe = jmoe.recipe("fp8_w8a16", block=block)
        op = jmoe.OpSpec(op="linear", recipe=recipe, tokens=1, hidden=4096, features=28672)
        features = dict(plan(op).tiles)["features"]
        assert features == expected
        assert features % block == 0 and features * 4096 * 2 <= xla._PIECE_BYTES
    for block in (1001, 28000):  # less than a block has to fit
        op = op.replace(recipe=jmoe.recipe("fp8_w8a16", block=(block, 128)))
        assert dict(plan(op).tiles)["features"] == 7168
    wide = op.replace(hidden=2**20, features=100)  # a tile of 128 does not fit: 100 rows in four pieces of 32 at most
    assert dict(plan(wide).tiles)["features"] == 25
    small = jmoe.OpSpec(op="linear", recipe=jmoe.recipe("int4"), tokens=1, hidden=64, features=100)
    assert dict(plan(small).tiles)["features"] == 100


def block_rows(device="cpu", **changes):
    return dict(plan(moe_op(**changes), device).tiles)["rows"]


def test_rows_of_a_block_follow_from_shapes_alone():
    # sqrt(2 n d) rows, to a power of two, for n rows an expert; d is 32 on a CPU and 256 on a GPU.
    assert block_rows(tokens=2048) == 256  # n = 512: 181
    assert block_rows(tokens=256) == 64  # n = 64: 64
    assert block_rows(tokens=4) == 16  # n = 1: 8
    assert block_rows(tokens=2048, device="h100") == 512  # n = 512: 512
    assert block_rows(tokens=2048, global_experts=64) == 64  # n = 64 with an expert map
    assert block_rows(tokens=1) == 1
    assert block_rows(tokens=2, experts=16, global_experts=16) == 1
    assert block_rows(tokens=2, experts=15, global_experts=15) == 16
    assert block_rows(tokens=1, batch_invariant=True) == block_rows(tokens=4096, batch_invariant=True) == 64
    assert all(isinstance(plan(moe_op(), name), xla.Plan) for name in DEVICES)
