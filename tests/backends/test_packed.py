"""Four-bit weights in the layouts of the Triton kernels: made by prepare, invisible everywhere else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmoe
from jmoe.nn import Linear, quantize_model
from pallas_kernels.layouts import CANONICAL, PACKED_BFLOAT16, PACKED_E4M3
from tests.pallas_kernels import lanes

RECIPES = {
    "mxfp4": PACKED_BFLOAT16,
    "mxfp4_a8": PACKED_E4M3,
    "nvfp4_w4a16": PACKED_BFLOAT16,
    "int4:group=32,zero_point,scale_dtype=float16": PACKED_BFLOAT16,
    "int4:group=-1": PACKED_BFLOAT16,
    "int4_int8": PACKED_BFLOAT16,
}


def weight(recipe, shape=(2, 3, 70, 97), seed=0):
    return jmoe.quantize(jax.random.normal(jax.random.key(seed), shape), recipe)


def equal(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("recipe, layout", RECIPES.items())
def test_prepared_weights_are_the_same_tensor(recipe, layout):
    q = weight(recipe)
    packed = jmoe.prepare(q, op="moe", device="h200")
    assert packed.layout.kind == layout
    assert packed.shape == q.shape == (2, 3, 70, 97)
    assert jmoe.prepare(packed, op="moe", device="h200") is packed
    np.testing.assert_array_equal(packed.dequantize(), q.dequantize())
    np.testing.assert_array_equal(packed.codes.astype(jnp.float32), q.codes.astype(jnp.float32))
    # Other devices read the canonical layout, and get all bytes back.
    assert equal(jmoe.prepare(packed, op="moe", device="cpu"), q)
    assert equal(packed.in_layout(CANONICAL), q)
    one = jax.tree.map(lambda leaf: leaf[1, 2], packed)
    assert one.shape == (70, 97)
    np.testing.assert_array_equal(one.dequantize(), q.dequantize()[1, 2])


def test_preparing_is_traced_and_evaluated_abstractly():
    q = weight("mxfp4_a8")
    prepare = functools.partial(jmoe.prepare, op="moe", device="h200")
    with jax.numpy_dtype_promotion("strict"):
        packed = jax.jit(prepare)(q)
    abstract = jax.eval_shape(prepare, q)
    assert equal(packed, prepare(q))
    assert [(s.shape, s.dtype) for s in jax.tree.leaves(abstract)] == [
        (a.shape, a.dtype) for a in jax.tree.leaves(packed)
    ]


@pytest.mark.parametrize("name", ["int4:group=48", "int4_fp8:group=16", "fp8_block"])
def test_what_the_kernels_do_not_serve_so_stays_canonical(name):
    q = weight(name, (70, 96))
    assert jmoe.prepare(q, op="linear", device="h200") is q
    with pytest.raises(ValueError, match="there is no way from or to it for "):
        q.in_layout(PACKED_E4M3)


@pytest.mark.parametrize("recipe", ["mxfp4_a8", "int4:group=-1"])
def test_operations_give_the_same_with_prepared_weights(recipe):
    w, w13, w2 = weight(recipe, (70, 96)), weight(recipe, (3, 2, 48, 96)), weight(recipe, (3, 96, 48))
    prepared = [jmoe.prepare(q, op="moe", device="h200") for q in (w, w13, w2)]
    x = jax.random.normal(jax.random.key(1), (5, 96), jnp.bfloat16)
    ids, weights = jnp.array([[0, 1], [2, 1], [1, -1], [0, 2], [2, 0]]), jnp.full((5, 2), 0.5)
    for implementation in ("xla", "reference"):

        def loss(x, w, implementation=implementation):
            return jmoe.linear(x, w, implementation=implementation).astype(jnp.float32).sum()

        assert equal(jax.grad(loss)(x, prepared[0]), jax.grad(loss)(x, w))
        layer = functools.partial(jmoe.fused_moe, implementation=implementation)
        assert equal(layer(x, *prepared[1:], weights, ids), layer(x, w13, w2, weights, ids))


def test_a_repacking_in_the_call_is_told_of():
    x, q = jnp.ones((4, 96), jnp.bfloat16), weight("int4:group=32", (70, 96))
    told = str(jmoe.explain(jmoe.linear, x, q, device="h200"))
    assert "takes triton" in told and "layout packed_bfloat16" in told
    assert "weights are packed for its kernels in every call; jmoe.prepare does it once" in told
    packed = jmoe.prepare(q, op="linear", device="h200")
    assert "in every call" not in str(jmoe.explain(jmoe.linear, x, packed, device="h200"))
    elsewhere = str(jmoe.explain(jmoe.linear, x, packed, device="cpu"))
    assert "brought from the layout 'packed_bfloat16' to the canonical one in every call" in elsewhere
    # A weight prepared for its own recipe is packed anew for another.
    a8 = weight("mxfp4_a8", (70, 96))
    packed = jmoe.prepare(a8, op="linear", device="h200")
    told = str(jmoe.explain(functools.partial(jmoe.linear, recipe="mxfp4"), x, packed, device="h200"))
    assert "layout packed_bfloat16" in told and "in every call" in told


def test_what_runs_on_a_gpu_is_the_packed_kernel():
    q = jmoe.prepare(weight("mxfp4_a8", (2, 70, 96)), op="linear", device="h200")
    x = lanes.spec((4, 96), jnp.bfloat16)
    with jmoe.config(device="h200"):
        kernels = lanes.lower_for(lambda x, q: jmoe.linear(x, q, layer=1, bias=jnp.ones((2, 70))), (x, q))
        assert [k.name for k in kernels] == ["quantize_tokens", "linear_w4"]
        w13, w2 = (jmoe.prepare(weight("int4:group=-1", s), op="moe") for s in ((3, 2, 48, 96), (3, 96, 48)))
        layer = lambda x, w13, w2, weights, ids: jmoe.fused_moe(x, w13, w2, weights, ids)  # noqa: E731
        routing = lanes.spec((4, 2)), lanes.spec((4, 2), jnp.int32)
        kernels = lanes.lower_for(layer, (x, w13, w2, *routing))
    assert [k.name for k in kernels] == ["moe_prepare", "moe_first", "moe_second", "combine"]


def test_modules_prepare_their_weights_and_those_that_are_split_stay_canonical():
    x = jax.random.normal(jax.random.key(3), (5, 96), jnp.bfloat16)
    packed, canonical = (Linear(96, 70, rngs=nnx.Rngs(0)) for _ in range(2))
    for layer, device in ((packed, "h200"), (canonical, "cpu")):
        model = nnx.List([layer])
        quantize_model(model, [(".*", "int4:group=32")], device=device)
    assert packed.qweight.layout.kind == PACKED_BFLOAT16
    assert canonical.qweight.layout == CANONICAL
    assert equal(packed(x), canonical(x))
    with nnx.use_eager_sharding(False):
        split = Linear(96, 70, sharding=("model", None), rngs=nnx.Rngs(0))
        split.set_weight(packed.qweight)
    assert split.qweight.layout == CANONICAL
