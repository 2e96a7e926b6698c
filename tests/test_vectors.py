"""Golden dequantisations by the libraries that define each checkpoint format, held by a QTensor exactly.

The tensors are unpacked here, in NumPy and by the formats' own descriptions, so that nothing but ``QTensor`` is tested.
The files come from ``tests/data/vectors``, or from the shared folder where they are too large to be copied.
"""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jmoe.qtensor import QTensor
from jmoe.scheme import Scheme
from tests.quantizer_oracle import dequantize

DATA = Path(__file__).parent / "data" / "vectors"
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
TINY = np.finfo(np.float32).tiny
ULP = 2.0**-23

Arrays = Mapping[str, np.ndarray]
Held = list[tuple[QTensor, np.ndarray]]
"""Tensors as QTensors, each with the library's values."""


# How the tensors lie in the files.


def fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """``count`` unsigned fields a row from int32 words, least significant first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    split = (words.view(np.uint32)[..., None] >> shifts) & (2**bits - 1)
    return split.reshape(*words.shape[:-1], -1)[..., :count]


def nibbles(codes: np.ndarray) -> np.ndarray:
    """Canonical bytes of 4-bit codes (even K): the even element is the low nibble."""
    codes = codes.astype(np.uint8)
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def awq_order(codes: np.ndarray) -> np.ndarray:
    """AWQ's words hold the columns 0, 2, 4, 6, 1, 3, 5, 7 of each eight."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8)
    return eights[..., [0, 4, 1, 5, 2, 6, 3, 7]].reshape(codes.shape)


# The schemes, and tensors of each.


def fp8(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> QTensor:
    names = {"float32": "float32", "bfloat16": "bfloat16", "uint8": "e8m0"}
    scheme = Scheme(format="e4m3", block=block, scale_dtype=names[scale.dtype.name])
    return QTensor.make(weight.view(E4M3), scale, scheme=scheme)


def mxfp4(packed: np.ndarray, scale: np.ndarray) -> QTensor:
    return QTensor.make(packed, scale, scheme=Scheme(format="e2m1", block=(1, 32), scale_dtype="e8m0"))


def nvfp4(packed: np.ndarray, scale: np.ndarray, multiplier: np.ndarray) -> QTensor:
    scheme = Scheme(format="e2m1", block=(1, 16), scale_dtype="e4m3", global_scale="tensor")
    return QTensor.make(packed, scale.view(E4M3), global_scale=multiplier.reshape(1, 1), scheme=scheme)


def integers(codes: np.ndarray, scale: np.ndarray, group: int, zero_point: np.ndarray | None = None) -> QTensor:
    """4-bit codes are unsigned (N, K), 8-bit ones int8."""
    fmt = "int8" if codes.dtype == np.int8 else "int4"
    scheme = Scheme(format=fmt, block=(1, group), scale_dtype=scale.dtype.name, zero_point=zero_point is not None)
    if zero_point is not None and fmt == "int4":
        zero_point = zero_point.astype(np.uint8)
    return QTensor.make(codes if fmt == "int8" else nibbles(codes), scale, zero_point=zero_point, scheme=scheme)


def gptq(t: Arrays, x: Arrays, *, zero_is_stored_less_one: bool, symmetric: bool = False) -> Held:
    """qweight (K/8, N) and qzeros (K/g, N/8); version 1 stores zero points less one, over whole int32 words."""
    n = t["scales"].shape[1]
    k = 8 * t["qweight"].shape[0]
    codes = fields(np.ascontiguousarray(t["qweight"].T), 4, k)
    words = t["qzeros"].view(np.uint32) + np.uint32(0x11111111 if zero_is_stored_less_one else 0)
    zero_point = fields(words.view(np.int32), 4, n).T
    np.testing.assert_array_equal(zero_point.T, x["x/zp"])
    group = k // t["scales"].shape[0]
    if "g_idx" in t:
        np.testing.assert_array_equal(t["g_idx"], np.arange(k) // group)
    asymmetric = integers(codes, t["scales"].T, group, zero_point)
    made = [(asymmetric, x["x/dequant_in_out"].T)]
    if symmetric:  # the zero point is 8 everywhere, so none need be kept
        assert (zero_point == 8).all()
        made.append((integers(codes, t["scales"].T, group), x["x/dequant_in_out"].T))
    return made


def autoround(t: Arrays, x: Arrays) -> Held:
    return gptq(t, x, zero_is_stored_less_one=True)


def awq(t: Arrays, x: Arrays) -> Held:
    n = t["scales"].shape[1]
    codes = awq_order(fields(t["qweight"], 4, n)).T
    zero_point = awq_order(fields(t["qzeros"], 4, n)).T
    return [(integers(codes, t["scales"].T, 32, zero_point), x["x/dequant_in_out"].T)]


def quark_uint4(t: Arrays, x: Arrays) -> Held:
    n = t["weight_scale"].shape[1]
    codes, zero_point = fields(t["weight"], 4, n).T, fields(t["weight_zero_point"], 4, n).T
    return [(integers(codes, t["weight_scale"].view(BF16).T, 32, zero_point), x["x/dequant"])]


def ct_packed(t: Arrays, x: Arrays, bits: int) -> Held:
    """Compressed-tensors' pack-quantized: u = q + 2**(bits - 1); zero points are packed along N."""
    n, k = t["weight_shape"].tolist()
    codes, scale = fields(t["weight_packed"], bits, k), t["weight_scale"].view(BF16)
    assert codes.shape[0] == n
    zero_point = None
    if "weight_zero_point" in t:
        zero_point = fields(np.ascontiguousarray(t["weight_zero_point"].T), bits, n).T
    if bits == 8:
        codes = (codes.astype(np.int32) - 128).astype(np.int8)
    return [(integers(codes, scale, k // scale.shape[1], zero_point), x["x/dequant"])]


def ct_nvfp4(t: Arrays, x: Arrays) -> Held:
    """The library divides by its global scale, so the multiplier is a reciprocal and the last bit may differ."""
    multiplier = np.float32(1) / t["weight_global_scale"]
    return [(nvfp4(t["weight_packed"], t["weight_scale"], multiplier), x["x/dequant"])]


def gptoss(t: Arrays, x: Arrays, prefix: str = "x/") -> Held:
    """Experts at once; the library's values are transposed, and gate and up rows alternate."""
    made = []
    for name in ("gate_up", "down"):
        blocks = t[f"model.layers.0.mlp.experts.{name}_proj_blocks"]
        q = mxfp4(blocks.reshape(*blocks.shape[:2], -1), t[f"model.layers.0.mlp.experts.{name}_proj_scales"])
        made.append((q, x[f"{prefix}{name}_dequant"].swapaxes(1, 2)))
        if name == "gate_up":
            for start, half in enumerate(("gate", "up")):
                rows = mxfp4(q.data[:, start::2], q.scale[:, start::2])
                made.append((rows, x[f"{prefix}{half}_rows"]))
    return made


def gguf_halves(data: np.ndarray, header: int) -> tuple[np.ndarray, np.ndarray]:
    """GGUF's blocks of 32: a header, then 16 bytes whose low nibbles are the first half and whose high are the last."""
    blocks = data.reshape(data.shape[0], -1, header + 16)
    packed = blocks[..., header:]
    codes = np.concatenate([packed & 15, packed >> 4], -1).reshape(data.shape[0], -1)
    return codes, np.ascontiguousarray(blocks[..., :header])


def gguf_q4_0(t: Arrays, x: Arrays) -> Held:
    codes, d = gguf_halves(t["data"], 2)
    return [(integers(codes, d.view(np.float16)[..., 0], 32), x["x/dequant"])]


def gguf_mxfp4(t: Arrays, x: Arrays) -> Held:
    codes, e = gguf_halves(t["data"], 1)
    return [(mxfp4(nibbles(codes), e[..., 0]), x["x/dequant"])]


def gguf_q8_0(t: Arrays, x: Arrays) -> Held:
    blocks = t["data"].reshape(t["data"].shape[0], -1, 34)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(blocks.shape[0], -1)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    return [(integers(codes, scale, 32), x["x/dequant"])]


def scale_edges(t: Arrays, x: Arrays) -> Held:
    """Scale bytes 0, 1, 2, 127, 254 and 255; the last is NaN by OCP, and the library reads it as 2**128."""
    assert t["scales"][0, :, 0].tolist() == [0, 1, 2, 127, 254, 255]
    return [(mxfp4(t["blocks"][0, :5, 0], t["scales"][0, :5]), x["x/hf_f32"][0, :5])]


def bnb_int8(t: Arrays, x: Arrays) -> Held:
    """The library computes (w * SCB) * f32(1/127); one scale a row is rounded once more or less."""
    return [(integers(t["weight"], (t["SCB"] * np.float32(1 / 127))[:, None], -1), x["x/dequant"])]


def mxfp8(t: Arrays, x: Arrays) -> Held:
    return [(fp8(t["weight"], t["weight_scale_inv"], (1, 32)), x["x/dequant"])]


EXACT: dict[str, Callable[[Arrays, Arrays], Held]] = {
    "ct_fp8_block_ragged": lambda t, x: [(fp8(t["weight"], t["weight_scale"].view(BF16), (128, 128)), x["x/dequant"])],
    "ct_fp8_channel": lambda t, x: [(fp8(t["weight"], t["weight_scale"].view(BF16), (1, -1)), x["x/dequant"])],
    "ct_fp8_tensor_static": lambda t, x: [
        (fp8(t["weight"], t["weight_scale"].view(BF16).reshape(1, 1), (-1, -1)), x["x/dequant"])
    ],
    "ct_int_w8a8_channel": lambda t, x: [(integers(t["weight"], t["weight_scale"].view(BF16), -1), x["x/dequant"])],
    "ct_mxfp4": lambda t, x: [(mxfp4(t["weight_packed"], t["weight_scale"]), x["x/dequant"])],
    "ct_pack_w4a16_asym_g16_out44": lambda t, x: ct_packed(t, x, 4),
    "ct_pack_w4a16_sym_g32": lambda t, x: ct_packed(t, x, 4),
    "ct_pack_w8a16_sym_g64": lambda t, x: ct_packed(t, x, 8),
    "ds_fp8_block128_ragged": lambda t, x: [(fp8(t["weight"], t["weight_scale_inv"], (128, 128)), x["x/dequant"])],
    "ds_fp8_block_ue8m0": lambda t, x: [
        (fp8(t["weight"], t["scale"], (32, 32)), x["x/dequant"]),
        # The same scales as float32 powers of two, as DeepSeek-V3.1 holds them.
        (fp8(t["weight"], np.ldexp(np.float32(1), t["scale"].astype(int) - 127), (32, 32)), x["x/dequant"]),
    ],
    "mo_fp8_pb_wo_32": lambda t, x: [(fp8(t["weight"], t["weight_scale"][:, 0, :, 0], (32, 32)), x["x/dequant"])],
    "mo_fp8_pc_pt": lambda t, x: [(fp8(t["weight"], t["weight_scale"][:, None], (1, -1)), x["x/dequant"])],
    "mo_mxfp4": lambda t, x: [(mxfp4(t["weight"], t["weight_scale"]), x["x/dequant"])],
    "mo_nvfp4": lambda t, x: [(nvfp4(t["weight"], t["weight_scale"], t["weight_scale_2"]), x["x/dequant"])],
    "mxfp8_u8_scale_inv": mxfp8,
    "quark_mxfp4": lambda t, x: [(mxfp4(t["weight"], t["weight_scale"]), x["x/dequant"])],
    "quark_uint4_order": quark_uint4,
    "gptoss_mxfp4_moe": gptoss,
    "gptq_v1_asym_g32": lambda t, x: gptq(t, x, zero_is_stored_less_one=True),
    "gptq_v1_sym_g32": lambda t, x: gptq(t, x, zero_is_stored_less_one=True, symmetric=True),
    "gptq_v2_asym_g32": lambda t, x: gptq(t, x, zero_is_stored_less_one=False),
    "autoround_gptq_asym_g32": autoround,
    "awq_gemm_g32": awq,
    "gguf_q4_0": gguf_q4_0,
    "gguf_q8_0": gguf_q8_0,
    "gguf_mxfp4": gguf_mxfp4,
}

ONE_ULP = {"ct_nvfp4": ct_nvfp4, "ct_nvfp4a16": ct_nvfp4, "bnb_int8": bnb_int8}

ELSEWHERE = {
    "dtype_tables": "tests/pallas_kernels/test_bits.py decodes it byte by byte",
    "mxfp4_scale_edges": "below, for its subnormal scales",
    "torchao_int8": "below: the library's values are bfloat16 only",
    "torchao_float8": "below: the library's values are bfloat16 only",
}

NOT_HELD = {
    "bnb_nf4": "the codes are indices into a table of 16 values, in blocks over the flattened array",
    "bnb_nf4_nested": "as bnb_nf4, and the block scales are quantized themselves",
    "ct_pack_w3a16_sym_g32": "3-bit codes cross words; there is no such format",
    "ctold_pack_w4a16_sym_gidx": "columns take their scales through a permutation (g_idx)",
    "gptq_v1_sym_g32_descact": "columns take their scales through a permutation (g_idx)",
    "gguf_q3_k": "scales of two levels inside blocks of 256",
    "gguf_q4_1": "an offset in float16 is no integer zero point",
    "gguf_q4_k": "scales and offsets of two levels inside blocks of 256",
    "gguf_q5_k": "5-bit codes",
    "gguf_q6_k": "6-bit codes",
}

CHECKPOINTS = {
    "ckpt_ct_mxfp4_moe",
    "ckpt_ct_w4a16_kimi_moe",
    "ckpt_ds_fp8_moe",
    "ckpt_gptoss_mxfp4",
    "ckpt_modelopt_fp8",
    "ckpt_modelopt_fp8moe",
    "ckpt_modelopt_nvfp4",
    "ckpt_modelopt_nvfp4moe",
    "ckpt_modelopt_w4a16nv",
}


def find(name: str, request: pytest.FixtureRequest) -> Path:
    copied = DATA / name
    return copied if copied.exists() else request.getfixturevalue("shared") / "vectors" / name


def load(name: str, request: pytest.FixtureRequest) -> tuple[Arrays, Arrays]:
    """The file's own tensors, by name, and everything in it under the names of the archive."""
    archive = np.load(find(f"{name}.npz", request))
    return {key[2:]: archive[key] for key in archive.files if key.startswith("t/")}, archive


def test_no_vector_is_forgotten(shared):
    there = {path.stem for path in (shared / "vectors").iterdir() if path.suffix == ".npz" or path.is_dir()}
    named = [*EXACT, *ONE_ULP, *ELSEWHERE, *NOT_HELD, *CHECKPOINTS]
    assert len(named) == len(set(named))
    assert set(named) == there


def test_the_copies_are_the_shared_files(shared):
    for path in DATA.glob("*.npz"):
        assert path.read_bytes() == (shared / "vectors" / path.name).read_bytes()


@pytest.mark.parametrize("name", EXACT)
def test_values_are_exactly_the_librarys(name, request):
    for q, expected in EXACT[name](*load(name, request)):
        assert q.shape == expected.shape
        np.testing.assert_array_equal(dequantize(q), expected)


@pytest.mark.parametrize("name", ONE_ULP)
def test_values_are_the_librarys_to_the_last_bit(name, request):
    for q, expected in ONE_ULP[name](*load(name, request)):
        assert q.shape == expected.shape
        np.testing.assert_allclose(dequantize(q), expected, rtol=ULP, atol=0)


def test_mxfp4_scale_bytes_at_both_ends(request):
    ((q, expected),) = scale_edges(*load("mxfp4_scale_edges", request))
    values = np.asarray(dequantize(q))
    np.testing.assert_array_equal(values[2:], expected[2:])
    # The scale 2**-127, and products of 2**-126 with 0.5, are subnormal: exact, or flushed to zero.
    assert ((values[:2] == expected[:2]) | (values[:2] == 0)).all()
    assert values[1, 2] == expected[1, 2] == TINY  # 1 * 2**-126


@pytest.mark.parametrize("name", ["torchao_int8", "torchao_float8"])
def test_torchao_values_in_bfloat16(name, request):
    t, x = load(name, request)
    codes, scale = t["q_proj._weight_qdata"], t["q_proj._weight_scale"]
    q = integers(codes, scale, -1) if name == "torchao_int8" else fp8(codes, scale, (1, -1))
    np.testing.assert_array_equal(np.asarray(q.dequantize(BF16)).view(np.uint16), x["x/dequant_bf16"])


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Header length, JSON header, bytes; float8 as bytes and bfloat16 as uint16, as in the archives."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    dtypes = {"F8_E4M3": "u1", "U8": "u1", "BF16": "<u2", "F32": "<f4", "I32": "<i4", "I64": "<i8"}
    tensors = {}
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        if name != "__metadata__":
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(raw[start:stop], dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def module(tensors: Arrays, name: str, expected: np.ndarray) -> tuple[QTensor, np.ndarray]:
    """One module of a checkpoint, told by the tensors it has."""
    t = {key.removeprefix(f"{name}."): a for key, a in tensors.items() if key.startswith(f"{name}.")}
    if "weight_shape" in t:
        return ct_packed(t, {"x/dequant": expected}, 4)[0]
    if "weight_packed" in t:
        return mxfp4(t["weight_packed"], t["weight_scale"]), expected
    if "weight_scale_inv" in t:
        return fp8(t["weight"], t["weight_scale_inv"], (32, 32)), expected
    if "weight_scale_2" in t:
        return nvfp4(t["weight"], t["weight_scale"], t["weight_scale_2"]), expected
    return fp8(t["weight"], t["weight_scale"].reshape(1, 1), (-1, -1)), expected


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_every_quantized_module_of_a_checkpoint(name, request):
    folder = find(name, request)
    tensors, expected = read_safetensors(folder / "model.safetensors"), np.load(folder / "expected.npz")
    if name == "ckpt_gptoss_mxfp4":
        made = gptoss(tensors, expected, prefix="")
    else:
        modules = [key.removesuffix(".weight") for key in expected.files]
        scaled = [m for m in modules if any(key.startswith(f"{m}.weight_scale") for key in tensors)]
        made = [module(tensors, m, expected[f"{m}.weight"]) for m in scaled]
    assert len(made) >= 4
    for q, values in made:
        assert q.shape == values.shape
        np.testing.assert_array_equal(dequantize(q), values)
