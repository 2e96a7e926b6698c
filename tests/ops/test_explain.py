import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmoe
from jmoe import explain

X = jnp.ones((4, 32), jnp.bfloat16)
W = jmoe.quantize(jnp.ones((16, 32)), "fp8_channel")
W2 = jmoe.quantize(jnp.ones((32, 16)), "int8")


def layer(x):
    return jmoe.linear(jmoe.linear(x, W), W2)


def operations(explanation):
    return [op.describe() for op, _ in explanation.entries]


BOTH = ["linear fp8_channel M=4 N=16 K=32 bfloat16", "linear int8 M=4 N=32 K=16 bfloat16"]


@pytest.mark.parametrize("fn", [layer, jax.jit(layer), jax.jit(jax.jit(layer)), functools.partial(layer)])
def test_operations_come_in_the_order_of_the_call(fn):
    assert operations(explain(fn, X)) == BOTH


def test_a_function_that_was_traced_before_is_explained_again_and_again():
    jitted = jax.jit(layer)
    jitted(X)
    assert operations(explain(jitted, X)) == operations(explain(jitted, X)) == BOTH
    jitted(X)
    assert operations(explain(jitted, X)) == BOTH


def test_nothing_is_computed_and_shapes_are_enough():
    calls = []

    def fn(x, w):
        jax.debug.callback(lambda: calls.append(1))
        return jmoe.linear(x, w)

    struct = jax.eval_shape(lambda: (X, W))
    assert operations(explain(fn, *struct)) == BOTH[:1]
    x, w = struct
    assert operations(explain(fn, x, w=w)) == BOTH[:1]
    jax.effects_barrier()
    assert calls == []


def test_shapes_too_large_to_hold():
    w13 = jax.ShapeDtypeStruct((256, 2, 2048, 7168), jnp.bfloat16)
    w2 = jax.ShapeDtypeStruct((256, 7168, 2048), jnp.bfloat16)
    quantized = jax.eval_shape(lambda *w: [jmoe.quantize(v, "fp8_block") for v in w], w13, w2)
    x = jax.ShapeDtypeStruct((4096, 7168), jnp.bfloat16)
    slots = [jax.ShapeDtypeStruct((4096, 8), dtype) for dtype in (jnp.float32, jnp.int32)]
    explanation = explain(jmoe.fused_moe, x, *quantized, *slots, device="h200")
    assert operations(explanation) == ["moe fp8_block T=4096 H=7168 I=2048 E=256 k=8 bfloat16"]


def test_an_operation_in_a_scan_appears_once():
    def body(carry, _):
        return layer(carry), None

    scanned = jax.jit(lambda x: jax.lax.scan(body, x, None, length=5)[0])
    scanned(X)
    assert operations(explain(scanned, X)) == BOTH


def test_vmap_and_grad():
    rows = jnp.ones((3, 4, 32), jnp.bfloat16)
    # A batch is one call, of all its tokens.
    assert operations(explain(jax.vmap(layer), rows)) == [op.replace("M=4", "M=12") for op in BOTH]
    assert operations(explain(jax.grad(lambda x: layer(x).astype(jnp.float32).sum()), X)) == BOTH


def test_branches_and_loops():
    def fn(x):
        x = jax.lax.cond(x[0, 0] > 0, lambda v: jmoe.linear(v, W), lambda v: v[:, :16], x)
        return jax.lax.fori_loop(0, 3, lambda i, v: jmoe.linear(jmoe.linear(v, W2), W), x)

    assert operations(explain(fn, X)) == [BOTH[0], BOTH[1], BOTH[0]]


def mesh(count=2):
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices; tests simulate them on a CPU")
    return Mesh(np.array(jax.devices()[:count]), ("tp",))


def test_inside_shard_map_shapes_are_local_and_axes_are_manual():
    fn = jax.shard_map(lambda x, w: jmoe.linear(x, w), mesh=mesh(), in_specs=(P(), P("tp")), out_specs=P(None, "tp"))
    [(op, _)] = explain(fn, X, W).entries
    assert (op.features, op.mesh) == (8, ())


def test_sharded_arguments_outside_shard_map_name_the_axis():
    x = jax.device_put(X, NamedSharding(mesh(), P()))
    w = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh(), P("tp"))), W)
    jmoe.linear(x, w)  # served by XLA, which partitions it
    explanation = explain(jax.jit(jmoe.linear), x, w, device="h100")
    [(op, selection)] = explanation.entries
    assert op.mesh == (("tp", 2),)
    assert "on a mesh (tp=2)" in str(explanation)
    assert selection.implementation != "triton"


def test_a_mesh_in_force_counts_too_and_an_axis_of_one_does_not():
    with jax.set_mesh(mesh(2)):
        assert explain(jmoe.linear, X, W).entries[0][0].mesh == (("tp", 2),)
    with jax.set_mesh(mesh(1)):
        assert explain(jmoe.linear, X, W).entries[0][0].mesh == ()


def test_another_device_is_one_that_need_not_be_here():
    explanation = explain(layer, X, device="h100")
    assert explanation.device.name == "NVIDIA H100 80GB"
    here = explain(layer, X, device=jax.devices()[0])
    assert here.device.platform == "cpu"
    assert explain(layer, X).device == here.device
    with jmoe.config(device="a100"):
        assert explain(layer, X).device.name == "NVIDIA A100 80GB"
        assert explain(layer, X, device="h100").device.name == "NVIDIA H100 80GB"


def test_the_text_names_the_implementation_the_reason_and_every_other_ones_reason():
    text = str(explain(lambda x: jmoe.linear(x, W), X, device="t4"))
    refusal = "it needs compute capability 8.0, and NVIDIA T4 has 7.5"
    assert text.split("\n")[:3] == [
        "on NVIDIA T4 (sm75, 40 SMs, 16 GB):",
        "linear fp8_channel M=4 N=16 K=32 bfloat16",
        f"  takes xla: first in order that can (triton: {refusal})",
    ]
    assert text.split("\n")[-3:] == [f"  triton: cannot: {refusal}", "  xla: can serve", "  reference: can serve"]
    assert "accumulation exact, layout canonical" in text


def test_the_text_of_a_choice_by_name():
    text = str(explain(lambda x: jmoe.linear(x, W, implementation="reference"), X))
    assert "  takes reference: asked for by name" in text
    assert "  note: float32 definition" in text


def test_a_function_without_operations():
    assert str(explain(jnp.sin, X)).endswith("no jmoe operation is called")
    assert explain(jnp.sin, X).entries == ()


def test_what_cannot_be_served_fails_as_the_call_would():
    with pytest.raises(NotImplementedError, match=r"implementation='triton' cannot serve"):
        explain(lambda x: jmoe.linear(x, W, implementation="triton"), X, device="cpu")
    with pytest.raises(ValueError, match=r"device 'h1000' is unknown"):
        explain(layer, X, device="h1000")


def test_checks_do_not_stand_in_the_way():
    ids, weights = jnp.zeros((4, 1), jnp.int32), jnp.ones((4, 1))
    w13, w2 = jnp.ones((2, 2, 16, 32)), jnp.ones((2, 32, 16))
    with jmoe.config(check=True):
        assert len(explain(jax.jit(jmoe.fused_moe), X, w13, w2, weights, ids).entries) == 1


def test_nothing_is_recorded_after():
    explanation = explain(layer, X)
    layer(X)
    assert len(explanation.entries) == 2
    assert jmoe.config.recorder is None
