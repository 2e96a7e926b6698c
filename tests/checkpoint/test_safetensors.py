"""Reading one safetensors file: hand-made bytes, every malformation, random mutations, and real checkpoints."""

import json
import math
import mmap
import os
import pickle
import random
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jmoe.checkpoint import safetensors_header
from jmoe.checkpoint.safetensors import (
    SafetensorsError,
    SafetensorsFile,
    TensorInfo,
    open_safetensors,
)
from jmoe.checkpoint.safetensors_writer import write_safetensors

LOCAL = Path(__file__).resolve().parents[1] / "data" / "tiny-moe" / "bf16"
# Folders of ../shared: every published layout of weights and scales, and between them each dtype in use.
FIXTURES = ("awq_w4_g128", "bf16", "bnb_nf4", "ct_fp8_block", "ct_fp8_dynamic", "ct_mxfp4", "ct_nvfp4", "ct_nvfp4a16")
FIXTURES += ("ct_w4a16_g128", "ct_w8a8_int8", "fp8_block_qwen3", "gptq_w4_g128", "modelopt_fp8", "mxfp4_gptoss_layout")
VECTORS = ("ct_mxfp4_moe", "ct_w4a16_kimi_moe", "ds_fp8_moe", "gptoss_mxfp4", "modelopt_fp8", "modelopt_fp8moe")
VECTORS += ("modelopt_nvfp4", "modelopt_nvfp4moe", "modelopt_w4a16nv")
SHARED_CHECKPOINTS = [f"fixtures/tiny-moe/{name}" for name in FIXTURES] + [f"vectors/ckpt_{name}" for name in VECTORS]


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def pack(header, data=b"", length=None):
    """A file's bytes. ``header`` may be text that is no JSON, and ``length`` a lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def place(folder, content, name="model.safetensors"):
    path = folder / name
    path.write_bytes(content)
    return path


def refusal(path, opener=SafetensorsFile):
    """The sentence with which a file is refused; it always names the file and is one line."""
    with pytest.raises(SafetensorsError) as caught:
        opener(path)
    message = str(caught.value)
    assert "\n" not in message
    assert os.fspath(path) in message
    assert len(message) < 1000
    return message


# Bytes of two elements, and their values by the formats' definitions.
ELEMENTS = {
    "BOOL": (b"\x01\x00", [1, 0]),
    "U8": (b"\x01\xff", [1, 255]),
    "I8": (b"\x01\xff", [1, -1]),
    "U16": (b"\x01\x00\xff\xff", [1, 65535]),
    "I16": (b"\x01\x00\xff\xff", [1, -1]),
    "U32": (b"\x01\x00\x00\x00\xff\xff\xff\xff", [1, 2**32 - 1]),
    "I32": (b"\x01\x00\x00\x00\xff\xff\xff\xff", [1, -1]),
    "U64": (b"\x01" + bytes(7) + b"\xff" * 8, [1, 2**64 - 1]),
    "I64": (b"\x01" + bytes(7) + b"\xff" * 8, [1, -1]),
    "F16": (b"\x00\x3c\x00\xc0", [1, -2]),
    "BF16": (b"\x80\x3f\x00\xc0", [1, -2]),
    "F32": (b"\x00\x00\x80\x3f\x00\x00\x00\xc0", [1, -2]),
    "F64": (bytes(6) + b"\xf0\x3f" + bytes(7) + b"\xc0", [1, -2]),
    "F8_E4M3": (b"\x38\x7e", [1, 448]),
    "F8_E5M2": (b"\x3c\x7b", [1, 57344]),
    "F8_E8M0": (b"\x7f\x00", [1, 2.0**-127]),
}


@pytest.mark.parametrize("dtype", ELEMENTS)
def test_each_dtype_has_the_value_its_bytes_stand_for(tmp_path, dtype):
    data, values = ELEMENTS[dtype]
    path = place(tmp_path, pack({"w": entry(dtype, (2,), (0, len(data)))}, data))
    with SafetensorsFile(path) as file:
        array = file.read("w")
        assert array.shape == (2,)
        assert array.dtype == file.tensors["w"].np_dtype
        assert [value.item() for value in array] == values
        assert file.tensors["w"].nbytes == len(data)


def test_every_supported_dtype_is_covered_by_the_table_above():
    assert set(ELEMENTS) | {"F4"} == set(safetensors_header.NUMPY_DTYPES)


def test_bf16_and_fp8_are_ml_dtypes(tmp_path):
    names = {
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }
    for dtype, expected in names.items():
        data = ELEMENTS[dtype][0]
        path = place(tmp_path, pack({"w": entry(dtype, (2,), (0, len(data)))}, data))
        assert SafetensorsFile(path).read("w").dtype == np.dtype(expected)


def test_f4_counts_elements_in_the_header_and_bytes_in_the_array(tmp_path):
    path = place(tmp_path, pack({"w": entry("F4", (2, 4), (0, 4))}, b"\x10\x32\x54\x76"))
    with SafetensorsFile(path) as file:
        assert file.tensors["w"].shape == (2, 4)
        assert file.tensors["w"].np_shape == (2, 2)
        np.testing.assert_array_equal(file.read("w"), np.array([[0x10, 0x32], [0x54, 0x76]], np.uint8))


def test_f4_of_zero_size_is_an_empty_uint8_array(tmp_path):
    path = place(tmp_path, pack({"w": entry("F4", (3, 0), (0, 0)), "v": entry("F4", (0, 6), (0, 0))}))
    with SafetensorsFile(path) as file:
        assert file.read("w").shape == (3, 0)
        assert file.read("v").shape == (0, 3)


def test_info_locates_the_tensor_in_the_file(tmp_path):
    content = pack({"a": entry("U8", (2,), (0, 2)), "b": entry("BF16", (1, 1), (2, 4))}, b"\x01\x02\x80\x3f")
    path = place(tmp_path, content)
    info = SafetensorsFile(path).tensors["b"]
    assert info == TensorInfo("b", "BF16", (1, 1), path, len(content) - 2, len(content))
    assert content[info.start : info.stop] == b"\x80\x3f"


def test_tensors_come_in_the_order_of_their_bytes(tmp_path):
    header = {"late": entry("U8", (1,), (1, 2)), "early": entry("U8", (1,), (0, 1))}
    assert list(SafetensorsFile(place(tmp_path, pack(header, b"\x01\x02"))).tensors) == ["early", "late"]


def test_a_scalar_has_shape_of_no_axes(tmp_path):
    path = place(tmp_path, pack({"s": entry("F32", (), (0, 4))}, struct.pack("<f", 0.5)))
    scalar = SafetensorsFile(path).read("s")
    assert scalar.shape == ()
    assert scalar == np.float32(0.5)


def test_zero_size_tensors_stand_anywhere_between_the_others(tmp_path):
    header = {
        "first": entry("F32", (0,), (0, 0)),
        "w": entry("U8", (2,), (0, 2)),
        "v": entry("U8", (1,), (2, 3)),
        "middle": entry("BF16", (3, 0, 2), (2, 2)),  # behind its successor, which has the same start
        "last": entry("F64", (0, 2**40), (3, 3)),
    }
    with SafetensorsFile(place(tmp_path, pack(header, b"\x01\x02\x03"))) as file:
        assert {name: file.read(name).shape for name in header} == {
            "first": (0,),
            "w": (2,),
            "middle": (3, 0, 2),
            "v": (1,),
            "last": (0, 2**40),
        }


def test_a_file_without_tensors_is_legal(tmp_path):
    with SafetensorsFile(place(tmp_path, pack(b"{}"))) as file:
        assert dict(file.tensors) == {}
        assert file.metadata == {}


def test_metadata_are_strings_and_the_header_may_be_padded_with_spaces(tmp_path):
    raw = json.dumps({"__metadata__": {"format": "pt", "naïve": "ω"}, "w": entry()}).encode() + b"     "
    with SafetensorsFile(place(tmp_path, pack(raw, bytes(4)))) as file:
        assert file.metadata == {"format": "pt", "naïve": "ω"}
        assert list(file.tensors) == ["w"]


def test_arrays_are_read_only_views_of_the_map(tmp_path):
    path = place(tmp_path, pack({"w": entry()}, b"\x01\x02\x03\x04"))
    array = SafetensorsFile(path).read("w")
    assert type(array.base).__name__ == "mmap"
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 9


def test_an_unaligned_tensor_is_read_all_the_same(tmp_path):
    data = b"\xff" + struct.pack("<2f", 1.5, -2.0)
    path = place(
        tmp_path, pack(json.dumps({"b": entry("U8", (1,), (0, 1)), "w": entry("F32", (2,), (1, 9))}).encode(), data)
    )
    first = SafetensorsFile(path).tensors["w"].start
    # One file in four would be aligned by chance: shift the header until it is not.
    if first % 4 == 0:
        path = place(
            tmp_path,
            pack(json.dumps({"b": entry("U8", (1,), (0, 1)), "w": entry("F32", (2,), (1, 9))}).encode() + b" ", data),
        )
    array = SafetensorsFile(path).read("w")
    assert not array.flags.aligned
    assert array.tolist() == [1.5, -2.0]


def test_arrays_outlive_the_file_but_nothing_is_read_after_close(tmp_path):
    path = place(tmp_path, pack({"w": entry()}, b"\x01\x02\x03\x04"))
    with SafetensorsFile(path) as file:
        array = file.read("w")
    assert array.tolist() == [1, 2, 3, 4]
    with pytest.raises(SafetensorsError, match="was closed before tensor 'w' was read"):
        file.read("w")
    file.close()


def test_an_unknown_name_is_refused(tmp_path):
    file = SafetensorsFile(place(tmp_path, pack({"w": entry()}, bytes(4))))
    with pytest.raises(SafetensorsError, match="has no tensor 'q' among its 1"):
        file.read("q")
    assert file.tensors.get("q") is None


def test_a_file_cut_short_while_open_is_an_error_and_no_crash(tmp_path):
    path = place(tmp_path, pack({"w": entry("U8", (100_000,), (0, 100_000))}, bytes(100_000)))
    with SafetensorsFile(path) as file:
        os.truncate(path, 200)
        with pytest.raises(SafetensorsError, match="was cut to 200 bytes while open, but tensor 'w' ends at byte"):
            file.read("w")


def test_a_bool_other_than_0_and_1_never_reaches_numpy(tmp_path):
    path = place(tmp_path, pack({"mask": entry("BOOL", (3,), (0, 3))}, b"\x01\x00\x02"))
    with pytest.raises(SafetensorsError, match="BOOL tensor 'mask' holds the byte 2, expected 0 or 1"):
        SafetensorsFile(path).read("mask")


def resident_kib(path):
    """``Rss`` of the mappings of ``path`` in this process."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(os.fspath(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's account of mapped pages")
def test_release_gives_pages_back_and_arrays_stay_valid(tmp_path):
    size = 4 << 20
    names = [f"w{i}" for i in range(4)]
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {name: np.full(size, i + 1, np.uint8) for i, name in enumerate(names)})
    with SafetensorsFile(path) as file:
        arrays = {}
        for name in names:
            arrays[name] = file.read(name)
            assert int(arrays[name].sum(dtype=np.int64)) == (int(name[1]) + 1) * size
            assert resident_kib(path) >= size >> 10
            file.release(name)
            assert resident_kib(path) < 256
        assert arrays["w2"][-1] == 3


def test_release_of_a_zero_size_tensor_does_nothing(tmp_path):
    # It lies at the end of a file of whole pages, so that its page is beyond the mapping.
    header = json.dumps({"w": entry("F32", (0,), (0, 0))}).encode().ljust(mmap.PAGESIZE - 8)
    with SafetensorsFile(place(tmp_path, pack(header))) as file:
        assert file.tensors["w"].start == mmap.PAGESIZE
        file.release("w")


# Everything that may be wrong with a header: the file's bytes, and words of the sentence that refuses it.
MALFORMED = {
    "empty file": (b"", "has 0 bytes, expected at least 8"),
    "no room for a length": (b"\x02\0\0\0", "has 4 bytes, expected at least 8"),
    "length 0": (pack(b"", bytes(16)), "has header length 0 in a file of 24 bytes"),
    "length 0 and nothing else": (bytes(8), "has header length 0"),
    "length -1": (b"\xff" * 8 + b"{}", f"has header length {2**64 - 1}"),
    "length -2^63": (pack(b"{}", length=2**63), f"has header length {2**63}"),
    "length beyond the file": (pack(b"{}", length=3), "has header length 3 in a file of 10 bytes"),
    "length overflows with its own 8 bytes": (pack(b"{}", length=2**64 - 4), "has header length"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "its header is not UTF-8 text at its byte 2"),
    "not an object: list": (pack(b"[]"), "has a header that begins with b'[]', expected '{'"),
    "not an object: number": (pack(b"3"), "has a header that begins with b'3'"),
    "byte order mark": (pack(b"\xef\xbb\xbf{}"), "has a header that begins with"),
    "leading space": (pack(b" {}"), "has a header that begins with"),
    "not JSON": (pack(b'{"w":}'), "its header is not valid JSON: Expecting value"),
    "JSON cut off": (pack(b'{"w": {"dtype"'), "its header is not valid JSON"),
    "two JSON values": (pack(b"{}{}"), "its header is not valid JSON: Extra data"),
    "padded with zeros": (pack(b"{}\0\0"), "its header is not valid JSON: Extra data"),
    "NaN": (pack(b'{"w": NaN}'), "its header is not valid JSON: NaN is not a JSON value"),
    "an integer of 5000 digits": (pack(b'{"w": ' + b"9" * 5000 + b"}"), "its header is not valid JSON"),
    "deep nesting": (pack(b'{"w": ' + b"[" * 200_000), "its header is JSON nested too deeply"),
    "deep nesting of objects": (pack(b'{"w":' * 200_000), "its header is JSON nested too deeply"),
    "tensor twice": (
        pack(b'{"w": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "w": 1}', b"\0"),
        "its header is not valid JSON: key 'w' occurs twice",
    ),
    "key twice in a tensor": (pack(b'{"w": {"dtype":"U8","dtype":"I8"}}'), "key 'dtype' occurs twice"),
    "lone surrogate in a name": (pack(b'{"\\ud800": 1}'), "its header is not valid JSON: 'utf-8' codec can't encode"),
    "metadata a list": (pack({"__metadata__": []}), "has __metadata__ [], expected an object of strings"),
    "metadata null": (pack({"__metadata__": None}), "has __metadata__ None, expected an object of strings"),
    "metadata with a number": (pack({"__metadata__": {"a": 1}}), "has __metadata__ {'a': 1}, expected an object"),
    "metadata nested": (pack({"__metadata__": {"a": {"b": "c"}}}), "expected an object of strings"),
    "tensor a list": (pack({"w": [1]}), "tensor 'w' is described by [1], expected the keys dtype, shape, data_offsets"),
    "tensor without shape": (pack({"w": {"dtype": "U8", "data_offsets": [0, 0]}}), "expected the keys dtype, shape"),
    "unknown dtype": (pack({"w": entry("F7")}, bytes(4)), "tensor 'w' has dtype 'F7', expected one of BOOL, U8"),
    "dtype in lower case": (pack({"w": entry("u8")}, bytes(4)), "has dtype 'u8', expected one of"),
    "dtype a number": (pack({"w": entry(8)}, bytes(4)), "has dtype 8, expected one of"),
    "dtype a list": (pack({"w": entry(["U8"])}, bytes(4)), "has dtype ['U8'], expected one of"),
    "AMD e4m3": (pack({"w": entry("F8_E4M3FNUZ")}, bytes(4)), "has dtype F8_E4M3FNUZ, AMD's FP8"),
    "AMD e5m2": (pack({"w": entry("F8_E5M2FNUZ")}, bytes(4)), "has dtype F8_E5M2FNUZ, AMD's FP8"),
    "6-bit e2m3": (pack({"w": entry("F6_E2M3", (4,), (0, 3))}, bytes(3)), "F6_E2M3, a 6-bit float"),
    "6-bit e3m2": (pack({"w": entry("F6_E3M2", (4,), (0, 3))}, bytes(3)), "F6_E3M2, a 6-bit float"),
    "complex": (pack({"w": entry("C64", (1,), (0, 8))}, bytes(8)), "C64, a complex number"),
    "shape a number": (pack({"w": {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]}}, bytes(4)), "has shape 4"),
    "shape null": (pack({"w": {"dtype": "U8", "shape": None, "data_offsets": [0, 4]}}, bytes(4)), "has shape None"),
    "negative extent": (pack({"w": entry("U8", (-2, -2))}, bytes(4)), "has shape [-2, -2], expected a list of non-neg"),
    "extent true": (pack({"w": entry("U8", (True, 4))}, bytes(4)), "has shape [True, 4], expected a list of non-neg"),
    "extent a float": (pack({"w": entry("U8", (4.0,))}, bytes(4)), "has shape [4.0]"),
    "extent a string": (pack({"w": entry("U8", ("4",))}, bytes(4)), "has shape ['4']"),
    "65 axes": (pack({"w": entry("U8", (1,) * 65, (0, 1))}, b"\0"), "has 65 dimensions, expected at most 64"),
    "2^62 elements": (pack({"w": entry("U8", (2**62,))}, bytes(4)), f"expected {2**62} for U8"),
    "2^62 * 4 elements, 0 modulo 2^64": (pack({"w": entry("U8", (2**62, 4), (0, 0))}), "expected at most 2**63 - 1"),
    "2^62 8-byte elements": (pack({"w": entry("F64", (2**62,), (0, 0))}), "expected at most 2**63 - 1 bytes"),
    "empty, but of huge extents": (pack({"w": entry("U8", (0, 2**62, 2**62), (0, 0))}), "at most 2**63 - 1 bytes"),
    "one extent of 4000 digits": (
        pack(b'{"w": {"dtype":"U8","shape":[' + b"9" * 4000 + b'],"data_offsets":[0,0]}}'),
        "expected at most 2**63 - 1 bytes",
    ),
    "offsets a number": (pack({"w": {"dtype": "U8", "shape": [4], "data_offsets": 4}}, bytes(4)), "has data_offsets 4"),
    "one offset": (pack({"w": entry(offsets=(0,))}, bytes(4)), "has data_offsets [0], expected two integers"),
    "three offsets": (pack({"w": entry(offsets=(0, 2, 4))}, bytes(4)), "has data_offsets [0, 2, 4]"),
    "offsets reversed": (pack({"w": entry(offsets=(4, 0))}, bytes(4)), "has data_offsets [4, 0]"),
    "offset negative": (pack({"w": entry(offsets=(-4, 0))}, bytes(4)), "has data_offsets [-4, 0]"),
    "offset a bool": (pack({"w": entry(shape=(1,), offsets=(False, True))}, b"\0"), "has data_offsets [False, True]"),
    "offset a float": (pack({"w": entry(offsets=(0, 4.0))}, bytes(4)), "has data_offsets [0, 4.0]"),
    "offset of 4000 digits": (
        pack(b'{"w": {"dtype":"U8","shape":[4],"data_offsets":[0,' + b"9" * 4000 + b"]}}", bytes(4)),
        "but the file has only 4 bytes of data",
    ),
    "truncated": (pack({"w": entry()}, bytes(3)), "has data_offsets [0, 4], but the file has only 3 bytes of data"),
    "too few bytes for its shape": (pack({"w": entry(offsets=(0, 3))}, bytes(3)), "has 3 bytes by its data_offsets"),
    "too many bytes for its shape": (pack({"w": entry(offsets=(0, 5))}, bytes(5)), "has 5 bytes by its data_offsets"),
    "overlap": (
        pack({"w": entry(), "v": entry(offsets=(2, 6))}, bytes(6)),
        "tensor 'v' overlaps tensor 'w': it starts at offset 2, expected 4",
    ),
    "the same bytes twice": (pack({"w": entry(), "v": entry()}, bytes(4)), "overlaps tensor 'w'"),
    "empty tensor inside another": (
        pack({"w": entry(), "v": entry("U8", (0,), (2, 2))}, bytes(4)),
        "tensor 'v' overlaps tensor 'w'",
    ),
    "hole at the start": (
        pack({"w": entry(offsets=(1, 5))}, bytes(5)),
        "tensor 'w' leaves a hole behind the header: it starts at offset 1, expected 0",
    ),
    "hole in the middle": (
        pack({"w": entry(), "v": entry(offsets=(5, 9))}, bytes(9)),
        "tensor 'v' leaves a hole behind tensor 'w': it starts at offset 5, expected 4",
    ),
    "bytes behind the last tensor": (pack({"w": entry()}, bytes(6)), "2 bytes follow tensor 'w', expected the end"),
    "bytes but no tensor": (pack(b"{}", bytes(6)), "6 bytes follow the header, expected the end of the file"),
    "F4 with an odd last axis": (
        pack({"w": entry("F4", (2, 3), (0, 3))}, bytes(3)),
        "has dtype F4 and shape [2, 3], expected an even last axis",
    ),
    "F4 scalar": (pack({"w": entry("F4", (), (0, 1))}, b"\0"), "has dtype F4 and shape [], expected an even last axis"),
    "F4 with half of its bytes": (pack({"w": entry("F4", (4, 8), (0, 8))}, bytes(8)), "expected 16 for F4"),
    "GGUF": (b"GGUF\x03" + bytes(40), "is a GGUF file, expected a safetensors file"),
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a Git LFS pointer"),
    "pickle": (pickle.dumps({"w": list(range(50))}, protocol=4), "is a pickle, which can run code when it is loaded"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_in_one_sentence(tmp_path, case):
    content, words = MALFORMED[case]
    assert words in refusal(place(tmp_path, content))


def test_a_header_beyond_the_cap_is_refused_though_the_file_has_the_bytes(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:  # sparse: takes no disk
        file.write(struct.pack("<Q", 100_000_001) + b"{}")
        file.truncate(100_000_100)
    assert (
        "has header length 100000001 in a file of 100000100 bytes, expected at least 1, at most 100000000"
        in refusal(path)
    )


def test_claimed_sizes_allocate_nothing(tmp_path):
    contents = [
        pack(b"{}", length=99_000_000),
        pack({"w": entry("F64", (2**40,), (0, 2**43))}, bytes(8)),
        pack({"w": entry("F64", (2**59,), (0, 8))}, bytes(8)),
    ]
    paths = [place(tmp_path, content, f"{i}.safetensors") for i, content in enumerate(contents)]
    tracemalloc.start()
    try:
        for path in paths:
            refusal(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_long_names_and_values_do_not_flood_the_message(tmp_path):
    path = place(tmp_path, pack({"w" * 100_000: {"dtype": "X" * 100_000, "shape": [1], "data_offsets": [0, 0]}}))
    refusal(path)  # asserts that the sentence is short


def test_pickled_checkpoints_are_refused_by_content_and_by_name(tmp_path):
    zipped = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([1, 2]))
    assert "is a zip archive, such as PyTorch pickles checkpoints into, which can run code" in refusal(zipped)
    text = place(tmp_path, pickle.dumps([1, 2, 3], protocol=0), "old.pt")
    assert "its name is that of a pickled checkpoint" in refusal(text)


def test_a_header_whose_length_looks_like_a_zip_magic_is_still_read(tmp_path):
    length = int.from_bytes(b"PK\x03\x04", "little")  # 67 MB, a legal header length
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", length) + b"{}")
        file.truncate(8 + length)
    # The rest are zeros where only spaces may pad: reading got as far as the JSON.
    assert "its header is not valid JSON: Extra data" in refusal(path)


def test_folders_and_pipes_are_no_files(tmp_path):
    assert "is a directory, expected a file" in refusal(tmp_path)
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    assert "is a pipe, socket or device, expected a file" in refusal(pipe)
    assert "is a pipe, socket or device, expected a file" in refusal(pipe, open_safetensors)


def test_a_missing_file_names_what_is_there(tmp_path):
    place(tmp_path, pack(b"{}"))
    place(tmp_path, b"{}", "config.json")
    assert f"does not exist; {tmp_path} holds model.safetensors" in refusal(tmp_path / "modle.safetensors")
    assert f"does not exist; {tmp_path} holds model.safetensors" in refusal(tmp_path / "zzz", open_safetensors)
    assert f"does not exist; {tmp_path} holds" in refusal(tmp_path / "no" / "such" / "file.safetensors")
    assert "does not exist" in refusal(tmp_path / "config.json" / "model.safetensors")


def test_a_dangling_link_names_its_target(tmp_path):
    link = tmp_path / "model.safetensors"
    link.symlink_to("../blobs/gone")
    assert "links to ../blobs/gone, which does not exist" in refusal(link)


def test_names_that_no_file_can_have_are_refused(tmp_path):
    assert "cannot be opened" in refusal(tmp_path / ("x" * 300))
    with pytest.raises(SafetensorsError, match="is no valid file name"):
        SafetensorsFile("a\0b")


def good_file():
    header = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, dtype, shape in (
        ("layers.0.weight", "F8_E4M3", (3, 5)),
        ("layers.0.scale", "F32", ()),
        ("layers.0.codes", "F4", (2, 6)),
        ("layers.0.mask", "BOOL", (4,)),
        ("layers.1.weight", "BF16", (2, 3)),
        ("layers.1.shape", "I64", (2,)),
        ("layers.1.none", "U8", (0, 7)),
    ):
        bits = {"F4": 4}.get(dtype, 4 * len(ELEMENTS.get(dtype, (b"",))[0]))
        size = math.prod(shape) * bits // 8
        header[name] = entry(dtype, shape, (len(data), len(data) + size))
        data += b"\x01" * size
    return json.dumps(header).encode(), data


def mutate(rng, header, data):
    """One random fault. Edits of the header keep its length true, so that they get past the first check."""
    kind = rng.randrange(7)
    if kind == 0:  # flip bits anywhere
        content = bytearray(pack(header, data))
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        return bytes(content)
    if kind == 1:  # flip bits of the header only
        edited = bytearray(header)
        for _ in range(rng.randint(1, 3)):
            edited[rng.randrange(len(edited))] ^= 1 << rng.randrange(8)
        return pack(bytes(edited), data)
    if kind == 2:  # cut or extend the file
        content = pack(header, data)
        return content[: rng.randrange(len(content))] if rng.random() < 0.7 else content + bytes(rng.randint(1, 9))
    if kind == 3:  # another number
        numbers = list(re.finditer(rb"\d+", header))
        spot = rng.choice(numbers)
        value = rng.choice(["-1", "0", "1", "2", "7", str(2**31), str(2**62), str(2**64), "1e3", "true", "null", "NaN"])
        return pack(header[: spot.start()] + value.encode() + header[spot.end() :], data)
    if kind == 4:  # drop, repeat or move a piece of the header
        start = rng.randrange(len(header))
        stop = rng.randint(start, min(len(header), start + 40))
        put = rng.randrange(len(header))
        edited = header[:start] + header[stop:] if rng.random() < 0.5 else header
        return pack(edited[:put] + header[start:stop] * rng.randint(0, 2) + edited[put:], data)
    if kind == 5:  # another token where a string stood
        spot = rng.choice(list(re.finditer(rb'"[^"]*"', header)))
        token = rng.choice(
            [b'"F32"', b'"BOOL"', b'"F4"', b'"shape"', b'"__metadata__"', b"[]", b"{}", b'"\\ud800"', b""]
        )
        return pack(header[: spot.start()] + token + header[spot.end() :], data)
    return pack(header, data, length=rng.choice([rng.randrange(2 * len(header)), rng.getrandbits(64)]))


def test_any_mutation_of_a_good_file_is_read_or_refused(tmp_path):
    header, data = good_file()
    rng = random.Random(20240229)
    outcomes = {"read": 0, "refused": 0}
    for case in range(10_000):
        # A new file each time: to cut an old one that was mapped takes a millisecond.
        path = place(tmp_path, mutate(rng, header, data), f"{case}.safetensors")
        try:
            with SafetensorsFile(path) as file:
                for name, info in file.tensors.items():
                    array = file.read(name)
                    assert array.nbytes == info.nbytes
                    array.tobytes()
            outcomes["read"] += 1
        except SafetensorsError:
            outcomes["refused"] += 1
        path.unlink()
    assert outcomes["read"] > 300
    assert outcomes["refused"] > 6000


def decode(dtype, raw):
    """Values as float64 by the formats' definitions, without ml_dtypes; integers as they are."""
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "F8_E4M3":
        code = np.frombuffer(raw, np.uint8).astype(np.int64)
        exponent, mantissa = (code >> 3) & 15, code & 7
        size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
        return np.where(code & 127 == 127, np.nan, np.where(code >> 7, -size, size))
    native = {"U8": "u1", "I8": "i1", "F16": "<f2", "F32": "<f4", "I32": "<i4", "I64": "<i8"}
    return np.frombuffer(raw, native[dtype]).astype(np.float64)


def check_against_an_independent_reading(folder):
    content = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    with open_safetensors(folder) as file:
        assert file.metadata == metadata
        assert file.tensors.keys() == header.keys()
        for name, described in header.items():
            start, stop = (8 + length + offset for offset in described["data_offsets"])
            assert file.tensors[name].dtype == described["dtype"]
            array = file.read(name)
            assert array.shape == tuple(described["shape"])
            expected = decode(described["dtype"], content[start:stop]).reshape(array.shape)
            np.testing.assert_array_equal(array.astype(np.float64), expected)
            file.release(name)


def test_the_checkpoint_of_this_repository_agrees_with_an_independent_reading():
    check_against_an_independent_reading(LOCAL)


@pytest.mark.parametrize("folder", SHARED_CHECKPOINTS)
def test_real_checkpoints_agree_with_an_independent_reading(shared, folder):
    check_against_an_independent_reading(shared / folder)
