from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmoe.qtensor import QTensor, expand, expand_axis, index_leading, scale_grid
from jmoe.quantize import quantize
from jmoe.scheme import Scheme, recipe
from pallas_kernels.layouts import Layout

FP8_BLOCK = Scheme(format="e4m3", block=(2, 4))
FP8_ROW = Scheme(format="e4m3", block=(1, -1))
INT4 = Scheme(format="int4", block=(1, 4))
INT4_ZP = INT4.replace(zero_point=True)
INT8_ZP = Scheme(format="int8", block=(1, 4), zero_point=True, scale_dtype="float16")
MXFP4 = recipe("mxfp4").weight
NVFP4 = recipe("nvfp4").weight

# One recipe for every kind of leaf: none but data and scale, a zero point, a global scale, e8m0 bytes, an odd K.
KINDS = ["fp8_block", "int4:group=8,zero_point,scale_dtype=bfloat16", "nvfp4", "mxfp4", "mxfp8", "int8"]


def zeros(shape, dtype):
    return jnp.zeros(shape, dtype)


def weights(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


dequantize = jax.jit(lambda q: q.dequantize())


def assert_equal(a: QTensor, b: QTensor):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


def make_args(scheme, n=6, k=8, batch=()):
    """Arrays of the right shapes and dtypes, by name."""
    grid = (*batch, *scale_grid((n, k), scheme.block))
    four = scheme.fmt.bits == 4
    scale = {"float32": jnp.float32, "float16": jnp.float16, "e8m0": jnp.uint8, "e4m3": jnp.float8_e4m3fn}
    args = {
        "data": zeros((*batch, n, (k + 1) // 2 if four else k), scheme.fmt.storage),
        "scale": zeros(grid, scale[scheme.scale_dtype]),
        "global_scale": zeros((*batch, 1, 1), jnp.float32) if scheme.global_scale else None,
        "zero_point": zeros(grid, jnp.uint8 if four else jnp.int8) if scheme.zero_point else None,
    }
    return {name: a for name, a in args.items() if a is not None}


@pytest.mark.parametrize("scheme", [FP8_BLOCK, FP8_ROW, INT4, INT4_ZP, INT8_ZP, MXFP4, NVFP4])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,)])
def test_make_takes_what_fits(scheme, batch):
    q = QTensor.make(**make_args(scheme, batch=batch), scheme=scheme)
    assert q.shape == (*batch, 6, 8)
    assert q.ndim == len(batch) + 2
    assert q.dtype == jnp.dtype(scheme.fmt.dtype)
    assert (q.input_scheme, q.odd_k) == (None, False)
    assert jax.eval_shape(lambda q: q.dequantize(), q) == jax.ShapeDtypeStruct(q.shape, jnp.float32)


@pytest.mark.parametrize("n, k", [(1, 1), (1, 7), (5, 3), (0, 4), (4, 0), (7, 9)])
@pytest.mark.parametrize("scheme", [FP8_BLOCK, INT4_ZP])
def test_make_takes_ragged_shapes(scheme, n, k):
    q = QTensor.make(**make_args(scheme, n, k), scheme=scheme, k=k)
    assert q.shape == (n, k)
    assert q.scale.shape == (-(-n // scheme.block[0]), -(-k // 4))
    assert q.odd_k == (scheme is INT4_ZP and k % 2 == 1)
    assert jax.eval_shape(lambda q: q.dequantize(), q).shape == (n, k)


def wrong(scheme, message, error=ValueError, k=None, **changes):
    return pytest.param(scheme, changes, k, error, message)


@pytest.mark.parametrize(
    "scheme, changes, k, error, message",
    [
        wrong(
            FP8_BLOCK,
            "data has dtype uint8, but e4m3 codes are float8_e4m3fn",
            TypeError,
            data=zeros((6, 8), jnp.uint8),
        ),
        wrong(FP8_BLOCK, "data has dtype float8_e5m2, but e4m3 codes", TypeError, data=zeros((6, 8), jnp.float8_e5m2)),
        wrong(
            INT4,
            "data has dtype int8, but int4 codes are uint8, two to a byte, or an int4 array",
            TypeError,
            data=zeros((6, 4), jnp.int8),
        ),
        wrong(
            INT4_ZP,
            "data has dtype int4, but int4 codes are uint8, two to a byte$",
            TypeError,
            data=zeros((6, 8), jnp.int4),
        ),
        wrong(
            MXFP4,
            "data has dtype int4, but e2m1 codes are uint8, two to a byte, or a float4_e2m1fn array",
            TypeError,
            data=zeros((6, 8), jnp.int4),
        ),
        wrong(
            FP8_BLOCK,
            r"scale has dtype bfloat16, but this scheme's scales are float32 \(float32\)",
            TypeError,
            scale=zeros((3, 2), jnp.bfloat16),
        ),
        wrong(
            MXFP4,
            r"scale has dtype float32, but this scheme's scales are e8m0 \(uint8\)",
            TypeError,
            scale=zeros((6, 1), jnp.float32),
        ),
        wrong(
            NVFP4,
            r"scale has dtype uint8, but this scheme's scales are e4m3 \(float8_e4m3fn\)",
            TypeError,
            scale=zeros((6, 1), jnp.uint8),
        ),
        wrong(
            NVFP4,
            "global_scale has dtype bfloat16, but it is float32",
            TypeError,
            global_scale=zeros((1, 1), jnp.bfloat16),
        ),
        wrong(
            INT4_ZP, "zero_point has dtype int8, but it is uint8 here", TypeError, zero_point=zeros((6, 2), jnp.int8)
        ),
        wrong(
            INT8_ZP, "zero_point has dtype uint8, but it is int8 here", TypeError, zero_point=zeros((6, 2), jnp.uint8)
        ),
        wrong(
            FP8_BLOCK,
            r"data has shape \(8,\), but a quantized array has at least two axes",
            data=zeros((8,), jnp.float8_e4m3fn),
        ),
        wrong(INT4, r"data has shape \(\), but a quantized array has at least two axes", data=zeros((), jnp.uint8)),
        wrong(
            FP8_BLOCK,
            r"scale has shape \(3,\), but data of logical shape \(6, 8\) in blocks of \(2, 4\) has scales of "
            r"shape \(3, 2\)",
            scale=zeros((3,), jnp.float32),
        ),
        wrong(FP8_ROW, r"scale has shape \(6,\).* has scales of shape \(6, 1\)", scale=zeros((6,), jnp.float32)),
        wrong(
            FP8_BLOCK,
            r"scale has shape \(1, 3, 2\).* has scales of shape \(3, 2\)",
            scale=zeros((1, 3, 2), jnp.float32),
        ),
        wrong(NVFP4, "global_scale is missing, but the scheme has global_scale='tensor'", global_scale=None),
        wrong(
            FP8_BLOCK,
            "global_scale is given, but the scheme has global_scale=None",
            global_scale=zeros((1, 1), jnp.float32),
        ),
        wrong(NVFP4, r"global_scale has shape \(\), but it is \(1, 1\) or \(6, 1\) here", global_scale=np.float32(1)),
        wrong(
            NVFP4,
            r"global_scale has shape \(6,\), but it is \(1, 1\) or \(6, 1\) here",
            global_scale=zeros((6,), jnp.float32),
        ),
        wrong(INT4_ZP, "zero_point is missing, but the scheme has zero_point=True", zero_point=None),
        wrong(INT4, "zero_point is given, but the scheme has zero_point=False", zero_point=zeros((6, 2), jnp.uint8)),
        wrong(
            INT4_ZP,
            r"zero_point has shape \(6, 1\), but it has the scale's shape \(6, 2\)",
            zero_point=zeros((6, 1), jnp.uint8),
        ),
        wrong(INT4, "k=9 does not fit rows of 4 bytes of two 4-bit codes", k=9),
        wrong(INT4, "k=6 does not fit rows of 4 bytes of two 4-bit codes", k=6),
        wrong(FP8_BLOCK, "k=7 but data has rows of 8", k=7),
        wrong(INT4, "k=7 but data has rows of 8", k=7, data=zeros((6, 8), jnp.int4)),
    ],
)
def test_make_names_what_does_not_fit(scheme, changes, k, error, message):
    with pytest.raises(error, match=message):
        QTensor.make(**{**make_args(scheme), **changes}, scheme=scheme, k=k)


def test_c03_a_transposed_scale_grid_is_rejected():
    data = zeros((6, 8), jnp.float8_e4m3fn)
    assert QTensor.make(data, jnp.ones((3, 2)), scheme=FP8_BLOCK).scale.shape == (3, 2)
    with pytest.raises(ValueError, match=r"scale has shape \(2, 3\).* has scales of shape \(3, 2\)"):
        QTensor.make(data, jnp.ones((2, 3)), scheme=FP8_BLOCK)


def test_make_packs_float4_and_e8m0_arrays():
    values = jnp.array([[0.5, -6, 1.5, 0, 3]], jnp.float4_e2m1fn)
    scale = jnp.array([[2]], jnp.float8_e8m0fnu)
    q = QTensor.make(values, scale, scheme=MXFP4)
    assert q.data.tolist() == [[0xF1, 0x03, 0x05]]
    assert q.scale.tolist() == [[128]]
    assert q.odd_k
    assert q.dequantize().tolist() == [[1, -12, 3, 0, 6]]
    assert q.codes.dtype == jnp.float4_e2m1fn
    assert q.codes.astype(jnp.float32).tolist() == values.astype(jnp.float32).tolist()
    assert q.scales.dtype == jnp.float8_e8m0fnu
    assert q.scales.astype(jnp.float32).tolist() == [[2]]
    assert_equal(QTensor.make(q.codes, q.scales, scheme=MXFP4), q)


def test_every_e8m0_byte_is_taken_as_it_is():
    scale = np.arange(256, dtype=np.uint8)[:, None]
    q = QTensor.make(zeros((256, 16), jnp.uint8), scale.view(ml_dtypes.float8_e8m0fnu), scheme=MXFP4)
    np.testing.assert_array_equal(q.scale, scale)
    np.testing.assert_array_equal(np.asarray(q.scales).view(np.uint8), scale)


def test_d07_int4_keeps_its_sign():
    values = np.arange(-8, 8, dtype=np.int8).reshape(2, 8)
    q = QTensor.make(jnp.asarray(values, jnp.int4), jnp.ones((2, 2)), scheme=INT4)
    assert q.data.tolist() == [[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]]
    assert q.codes.dtype == jnp.int4
    np.testing.assert_array_equal(q.codes.astype(jnp.int8), values)
    np.testing.assert_array_equal(q.dequantize(), values)
    np.testing.assert_array_equal(jax.jit(lambda q: q.codes.astype(jnp.int8))(q), values)


def test_codes_of_the_other_formats_are_as_stored():
    q = QTensor.make(
        jnp.array([[0x21]], jnp.uint8), jnp.ones((1, 1)), zero_point=jnp.full((1, 1), 3, jnp.uint8), scheme=INT4_ZP
    )
    assert (q.codes.dtype, q.codes.tolist()) == (jnp.uint8, [[1, 2]])
    fp8 = quantize(weights(2, 4), FP8_ROW)
    assert fp8.codes is fp8.data
    assert fp8.scales is fp8.scale


def test_a_value_is_code_less_zero_point_times_scale():
    q = QTensor.make(
        jnp.array([[0xF0, 0x28]], jnp.uint8), jnp.array([[0.5]]), zero_point=jnp.array([[8]], jnp.uint8), scheme=INT4_ZP
    )
    assert q.dequantize().tolist() == [[-4, 3.5, 0, -3]]
    eight = QTensor.make(
        jnp.array([[-128, 127]], jnp.int8),
        jnp.array([[2]], jnp.float16),
        zero_point=jnp.array([[-128]], jnp.int8),
        scheme=INT8_ZP,
    )
    assert eight.dequantize().tolist() == [[0, 510]]


def test_a_global_scale_may_be_one_a_row():
    data, scale = jnp.full((2, 8), 0x22, jnp.uint8), jnp.full((2, 1), 2, jnp.float8_e4m3fn)
    q = QTensor.make(data, scale, global_scale=jnp.array([[1], [10]], jnp.float32), scheme=NVFP4)
    assert q.dequantize()[:, 0].tolist() == [2, 20]
    assert q.combined_scale().tolist() == [[2], [20]]
    blocks = NVFP4.replace(block=(2, 16))
    q = QTensor.make(data, scale[:1], global_scale=jnp.array([[1], [10]], jnp.float32), scheme=blocks)
    assert q.dequantize()[:, 0].tolist() == [2, 20]


def test_scale_and_global_scale_are_multiplied_first():
    # 3 * (1.125 * g) and (3 * 1.125) * g differ in the last bit for this g.
    g = np.float32(1.3000003)
    data, scale = jnp.full((1, 8), 0x55, jnp.uint8), jnp.full((1, 1), 1.125, jnp.float8_e4m3fn)
    q = QTensor.make(data, scale, global_scale=g.reshape(1, 1), scheme=NVFP4)
    expected = np.float32(3) * (np.float32(1.125) * g)
    assert expected != np.float32(3 * 1.125) * g
    assert q.dequantize()[0, 0] == expected


def test_dequantize_casts_once():
    q = QTensor.make(jnp.full((1, 2), 3, jnp.float8_e4m3fn), jnp.array([[1 / 3]]), scheme=FP8_ROW)
    for dtype in (jnp.bfloat16, jnp.float16):
        cast = q.dequantize(dtype)
        assert cast.dtype == dtype
        assert cast[0, 0] == (np.float32(3) * np.float32(1 / 3)).astype(dtype)


def test_b08_a_ragged_grid_repeats_each_scale_over_its_block():
    scale = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    q = QTensor.make(jnp.ones((200, 300), jnp.float8_e4m3fn), scale, scheme=FP8_BLOCK.replace(block=(128, 128)))
    expected = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:200, :300]
    np.testing.assert_array_equal(q.dequantize(), expected)
    assert (expected[127, 127], expected[128, 128], expected[199, 299]) == (1, 5, 6)


def test_a_kernels_layout_is_not_read_as_canonical():
    q = quantize(weights(2, 4), FP8_ROW)
    packed = QTensor(q.data, q.scale, None, None, q.scheme, layout=Layout("swizzled"))
    with pytest.raises(ValueError, match="layout='swizzled': there is no way from or to it for e4m3"):
        packed.dequantize()


@pytest.mark.parametrize("kind", KINDS)
def test_reading_works_under_strict_promotion_and_x64(kind):
    with jax.numpy_dtype_promotion("strict"), jax.enable_x64(True):
        q = quantize(weights(3, 17), kind)
        assert dequantize(q).dtype == jax.jit(lambda q: q.combined_scale())(q).dtype == jnp.float32
        assert q.codes.shape == (3, 17)
        assert q.scales.shape == q.scale.shape
        assert QTensor.make(q.codes if q.zero_point is None else q.data, q.scales, global_scale=q.global_scale,
                            zero_point=q.zero_point, scheme=q.scheme, k=17).shape == (3, 17)  # fmt: skip


def test_scale_grid_and_expand():
    assert scale_grid((200, 300), (128, 128)) == (2, 3)
    assert scale_grid((200, 300), (-1, -1)) == (1, 1)
    assert scale_grid((0, 5), (1, 2)) == (0, 3)
    x = jnp.array([[1, 2, 3]])
    assert expand_axis(x, -1, 2, 5).tolist() == [[1, 1, 2, 2, 3]]
    assert expand_axis(x, 0, 4, 4) is x
    assert expand_axis(x, -1, 1, 3) is x
    assert expand(x, (2, 2), (4, 5)).shape == (1, 5)
    assert expand(jnp.ones((2, 1)), (3, -1), (5, 7)).shape == (5, 1)


def test_static_facts_are_hashable_and_part_of_the_structure():
    a, b = quantize(weights(2, 8), "int4:group=4"), quantize(weights(2, 7), "int4:group=4")
    assert hash(jax.tree.structure(a)) == hash(jax.tree.structure(quantize(weights(3, 8), "int4:group=4")))
    assert jax.tree.structure(a) != jax.tree.structure(b)  # odd_k
    assert jax.tree.structure(a) != jax.tree.structure(a.with_input_scheme(FP8_ROW))
    assert len(jax.tree.leaves(a)) == 2
    assert [str(path[0]) for path, _ in jax.tree_util.tree_flatten_with_path(a)[0]] == [".data", ".scale"]


@pytest.mark.parametrize("kind, k", [(kind, 17) for kind in KINDS] + [("mxfp4", 16)])
def test_shape_follows_the_data(kind, k):
    q = quantize(weights(3, 2, 5, k), kind)
    assert q.shape == (3, 2, 5, k)
    entry = jax.tree.map(lambda leaf: leaf[1], q)
    assert entry.shape == (2, 5, k)
    assert_equal(entry, index_leading(q, 1))
    shapes = []

    @jax.jit
    def by_vmap_and_by_scan(q):
        values = jax.vmap(lambda q: shapes.append(q.shape) or q.dequantize())(q)
        _, stacked = lax.scan(lambda c, q: (shapes.append(q.shape) or c, q), 0, q)
        return values, stacked

    values, stacked = by_vmap_and_by_scan(q)
    assert shapes == [(2, 5, k)] * 2
    np.testing.assert_array_equal(values, dequantize(q))
    np.testing.assert_array_equal(values[1], dequantize(entry))
    assert_equal(stacked, q)
    abstract = jax.eval_shape(lambda x: quantize(x, kind), weights(3, 2, 5, k))
    assert (abstract.shape, abstract.dtype, abstract.nbytes) == (q.shape, q.dtype, q.nbytes)
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), entry, entry)
    assert stack.shape == (2, 2, 5, k)


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_of_quantize_is_quantize_of_the_batch(kind):
    x = weights(3, 5, 17)
    assert_equal(jax.vmap(lambda x: quantize(x, kind))(x), quantize(x, kind))


def test_nbytes_counts_all_leaves():
    q = quantize(weights(4, 32), "nvfp4")
    assert q.nbytes == 4 * 16 + 4 * 2 + 4
    assert quantize(weights(4, 33), "mxfp4").nbytes == 4 * 17 + 4 * 2


@pytest.mark.parametrize("kind", ["fp8_block", "int4:group=8,zero_point,scale_dtype=bfloat16", "nvfp4"])
def test_shard_map_sees_its_share(kind):
    if len(jax.devices()) < 4:
        pytest.skip("needs four simulated devices")
    mesh = Mesh(np.array(jax.devices()[:4]), ("expert",))
    mapped = partial(jax.shard_map, mesh=mesh, out_specs=P("expert"))
    x = weights(4, 5, 17)
    q = quantize(x, kind)
    seen = []
    passed_on = jax.jit(mapped(lambda q: seen.append(q.shape) or q, in_specs=P("expert")))
    assert_equal(passed_on(q), q)
    assert_equal(jax.jit(mapped(lambda x: quantize(x, kind), in_specs=P("expert")))(x), q)
    # Specs leaf by leaf: a QTensor of PartitionSpecs.
    specs = jax.tree.map(lambda _: P("expert"), q)
    values = jax.jit(mapped(lambda q: q.dequantize(), in_specs=(specs,)))(q)
    np.testing.assert_array_equal(values, dequantize(q))
    assert seen == [(1, 5, 17)]
    placed = jax.device_put(q, NamedSharding(mesh, P("expert")))
    assert placed.shape == (4, 5, 17)
    assert_equal(placed, q)


def test_jit_donates_its_leaves():
    q = quantize(weights(4, 32), "nvfp4")
    before = dequantize(q)
    same = jax.jit(lambda q: q.with_input_scheme(None), donate_argnums=0)(q)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(q))
    np.testing.assert_array_equal(dequantize(same), before)


def test_repr_says_shape_and_schemes():
    q = quantize(weights(4, 32), "fp8_channel")
    assert repr(q) == "QTensor(shape=(4, 32), e4m3 1xall float32, input e4m3 1xall float32)"
    assert repr(q.with_input_scheme(None)) == "QTensor(shape=(4, 32), e4m3 1xall float32, weight-only)"
    assert "shape=(2, 4, 32)" in repr(jax.eval_shape(lambda x: quantize(x, "mxfp4"), weights(2, 4, 32)))


FORMS = {
    "shapes": (lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), "shape=(4, 8)"),
    "specs": (lambda leaf: P("model", None), f"data={P('model', None)!r}, scale={P('model', None)!r}"),
    "axes": (lambda leaf: 0, "data=0, scale=0"),
    "scalars": (lambda leaf: np.float32(2), f"data={np.float32(2)!r}, scale={np.float32(2)!r}"),
    "tuples": (lambda leaf: leaf.shape, "data=(4, 8), scale=(2, 2)"),
    "None": (lambda leaf: None, ""),
}


@pytest.mark.parametrize("form", FORMS)
def test_repr_of_a_tree_in_a_qtensors_form(form):
    leaf, said = FORMS[form]
    q = jax.tree.map(leaf, QTensor.make(zeros((4, 8), jnp.float8_e4m3fn), jnp.ones((2, 2)), scheme=FP8_BLOCK))
    assert repr(q) == f"QTensor({said}{', ' if said else ''}e4m3 2x4 float32, weight-only)"


def test_repr_of_traced_leaves_is_that_of_arrays():
    q = quantize(weights(4, 8), "fp8_block")
    seen = []
    jax.eval_shape(lambda q: seen.append(repr(q)), q)
    assert seen == [repr(q)]


def test_two_are_equal_where_they_are_one():
    q = quantize(weights(4, 8), "fp8_block")
    twin = jax.tree.map(jnp.array, q)
    assert q == q and q != twin
    assert twin in [q, twin] and [q, twin].index(twin) == 1
    assert {q: "first", twin: "second"}[twin] == "second"


@pytest.mark.parametrize(
    "use",
    [
        np.asarray,
        np.sum,
        lambda q: np.array(q, np.float32),
        lambda q: np.stack([q, q]),
        lambda q: np.ones((2, 8)) @ q,
        jnp.asarray,
        jnp.sum,
        lambda q: jnp.stack([q, q]),
        lambda q: jnp.ones((2, 8)) @ q,
        lambda q: q @ jnp.ones((8, 2)),
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_array_functions_refuse_it_and_name_dequantize(use, traced):
    q = quantize(weights(4, 8), "fp8_block")
    with pytest.raises(TypeError, match=r"is no array; its values are those of \.dequantize\(\)"):
        jax.eval_shape(lambda q: use(q), q) if traced else use(q)


@pytest.mark.parametrize("kind", KINDS)
def test_orbax_round_trip(kind, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    q = quantize(weights(2, 5, 17), kind)
    tree = {"layer": {"w": q, "bias": jnp.ones(3)}}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "saved", jax.eval_shape(lambda: tree))
    assert_equal(restored["layer"]["w"], q)


class QuantizedParam(nnx.Variable):
    """A variable that holds one leaf, as jmoe's modules do."""


class ByLeaf(nnx.Module):
    def __init__(self, q):
        self.weight = QuantizedParam(q.data)
        self.weight_scale = QuantizedParam(q.scale)
        self.weight_global_scale = nnx.data(None) if q.global_scale is None else QuantizedParam(q.global_scale)
        self.scheme = q.scheme

    def tensor(self):
        g = self.weight_global_scale
        return QTensor.make(self.weight[...], self.weight_scale[...], global_scale=None if g is None else g[...],
                            scheme=self.scheme)  # fmt: skip


class Whole(nnx.Module):
    def __init__(self, q):
        self.w = QuantizedParam(q)

    def tensor(self):
        return self.w.get_value()


@pytest.mark.parametrize("module", [ByLeaf, Whole])
@pytest.mark.parametrize("kind", ["nvfp4_w4a16", "mxfp4", "fp8_w8a16"])
def test_a_module_holds_a_qtensor_through_split_and_merge(module, kind):
    q = quantize(weights(4, 32), kind)
    graph, state = nnx.split(module(q))
    assert sorted(str(leaf.dtype) for leaf in jax.tree.leaves(state)) == sorted(
        str(leaf.dtype) for leaf in jax.tree.leaves(q)
    )
    assert_equal(nnx.merge(graph, state).tensor(), q)
    values = nnx.jit(lambda m: m.tensor().dequantize())(module(q))
    np.testing.assert_array_equal(values, q.dequantize())
    moved = jax.jit(lambda state: nnx.merge(graph, state).tensor())(state)
    assert_equal(moved, q)
