"""Writing safetensors files: the bytes, any memory layout, all or nothing, and back again."""

import json
import math
import os
import re
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jmoe.checkpoint.safetensors import (
    SafetensorsError,
    SafetensorsFile,
    open_safetensors,
)
from jmoe.checkpoint.safetensors_header import NUMPY_DTYPES
from jmoe.checkpoint.safetensors_writer import SafetensorsWriter, write_safetensors


def test_written_bytes_are_those_of_the_format(tmp_path):
    path = tmp_path / "w.safetensors"
    write_safetensors(path, {"w": np.array([1, 2], "<u2")}, {"k": "v"})
    header = b'{"__metadata__":{"k":"v"},"w":{"dtype":"U16","shape":[2],"data_offsets":[0,4]}}'
    assert len(header) == 79
    assert path.read_bytes() == struct.pack("<Q", 80) + header + b" " + b"\x01\0\x02\0"


def test_written_tensors_are_aligned_and_ordered_by_size_then_name(tmp_path):
    path = tmp_path / "w.safetensors"
    tensors = {
        "c": np.ones(3, np.uint8),
        "b": np.ones(3, ml_dtypes.bfloat16),
        "a": np.ones((), np.float64),
        "d": np.ones(1, np.float32),
        "0": np.ones(1, np.float32),
    }
    write_safetensors(path, tensors)
    infos = SafetensorsFile(path).tensors
    assert list(infos) == ["a", "0", "d", "b", "c"]
    assert all(info.start % info.np_dtype.itemsize == 0 for info in infos.values())
    shuffled = tmp_path / "v.safetensors"
    write_safetensors(shuffled, dict(reversed(tensors.items())))
    assert shuffled.read_bytes() == path.read_bytes()


def test_any_memory_layout_is_written_by_value(tmp_path):
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = {
        "transposed": base.T,
        "strided": base[:, ::2],
        "big_endian": base.astype(">f4"),
        "scalar": np.asarray(np.float32(7)),
        "empty": base[:0],
        "bf16": base.T.astype(ml_dtypes.bfloat16)[::-1],
    }
    path = tmp_path / "w.safetensors"
    write_safetensors(path, tensors)
    with SafetensorsFile(path) as file:
        for name, array in tensors.items():
            np.testing.assert_array_equal(file.read(name), array)
            assert file.read(name).dtype == array.dtype.newbyteorder("<")


def test_bytes_are_written_under_the_dtype_given(tmp_path):
    path = tmp_path / "w.safetensors"
    strided = memoryview(b"\x01\xaa\x02\xaa")[::2]
    write_safetensors(path, {"w": ("F4", (2, 4), b"\x10\x32\x54\x76"), "s": ("F8_E8M0", [2], strided)})
    with SafetensorsFile(path) as file:
        assert file.tensors["w"].dtype == "F4"
        assert file.read("w").tobytes() == b"\x10\x32\x54\x76"
        assert file.read("s").tobytes() == b"\x01\x02"


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    class Changing(dict):
        def __getitem__(self, name):
            self.looked_up = getattr(self, "looked_up", 0) + 1
            return np.zeros(self.looked_up, np.uint8)

    path = tmp_path / "w.safetensors"
    write_safetensors(path, {"w": np.ones(2, np.uint8)})
    with pytest.raises(SafetensorsError, match=r"tensors\['w'\] changed between its two look-ups"):
        write_safetensors(path, Changing(w=None))
    assert os.listdir(tmp_path) == ["w.safetensors"]
    assert SafetensorsFile(path).read("w").tolist() == [1, 1]


def test_a_file_being_read_may_be_replaced(tmp_path):
    path = tmp_path / "w.safetensors"
    write_safetensors(path, {"w": np.ones(2, np.uint8)})
    with SafetensorsFile(path) as old:
        write_safetensors(path, {"w": old.read("w") + np.uint8(1)})
        assert old.read("w").tolist() == [1, 1]
    assert SafetensorsFile(path).read("w").tolist() == [2, 2]


@pytest.mark.parametrize(
    "tensors, metadata, error, words",
    [
        ({"w": np.zeros(1, "U3")}, None, ValueError, "tensors['w'] has dtype <U3, expected one of bool, uint8"),
        ({"w": np.zeros(1, object)}, None, ValueError, "tensors['w'] has dtype object"),
        ({"w": np.zeros(2, ml_dtypes.float4_e2m1fn)}, None, ValueError, 'as ("F4", shape, bytes)'),
        ({"w": np.zeros(2, ml_dtypes.float8_e4m3fnuz)}, None, ValueError, "has dtype float8_e4m3fnuz"),
        ({"w": [1, 2]}, None, TypeError, "tensors['w'] is [1, 2], expected a NumPy array or a tuple"),
        ({"w": ("U8", (1,), "x")}, None, TypeError, "expected a NumPy array or a tuple"),
        ({"w": ("U8", (2,), b"x")}, None, ValueError, "tensors['w'] has 1 bytes, expected 2 for U8 of shape (2,)"),
        ({"w": ("F9", (1,), b"x")}, None, ValueError, "tensors['w'] has dtype 'F9', expected one of"),
        ({"w": ("F4", (3,), b"xx")}, None, ValueError, "expected an even last axis"),
        ({1: np.zeros(1)}, None, TypeError, "tensors has the key 1, expected a string"),
        ({"__metadata__": np.zeros(1)}, None, ValueError, "tensors has the key __metadata__"),
        ({"\ud800": np.zeros(1)}, None, ValueError, "a name or metadata text cannot be written"),
        ({}, {"a": 1}, TypeError, "metadata is {'a': 1}, expected strings to strings"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, tensors, metadata, error, words):
    with pytest.raises(error, match=re.escape(words)):
        write_safetensors(tmp_path / "w.safetensors", tensors, metadata)
    assert os.listdir(tmp_path) == []


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(set(NUMPY_DTYPES) - {"F4"})), st.lists(st.integers(0, 3), max_size=4)),
        max_size=5,
    )
)
def test_any_names_dtypes_and_shapes_come_back(tmp_path_factory, described):
    path = tmp_path_factory.mktemp("round") / "w.safetensors"
    tensors = {}
    for name, (dtype, shape) in described.items():
        # Every byte is 1, which each dtype holds, BOOL too.
        tensors[name] = (dtype, shape, b"\x01" * (math.prod(shape) * NUMPY_DTYPES[dtype].itemsize))
    write_safetensors(path, tensors)
    with SafetensorsFile(path) as file:
        assert file.tensors.keys() == tensors.keys()
        for name, (dtype, shape, data) in tensors.items():
            info = file.tensors[name]
            assert (info.dtype, info.shape) == (dtype, tuple(shape))
            assert file.read(name).shape == tuple(shape)
            assert file.read(name).tobytes() == data


def test_a_real_checkpoint_survives_sharding_and_rewriting(tmp_path, shared):
    with open_safetensors(shared / "fixtures" / "tiny-moe" / "fp8_block_qwen3") as source:
        names = list(source.tensors)
        weight_map = {}
        for number, part in enumerate((names[::2], names[1::2]), 1):
            name = f"model-{number:05}-of-00002.safetensors"
            write_safetensors(tmp_path / name, {key: source.read(key) for key in part}, source.metadata)
            weight_map |= dict.fromkeys(part, name)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with open_safetensors(tmp_path) as copy:
            assert copy.metadata == {"format": "pt"}
            assert set(copy.tensors) == set(names)
            for name in names:
                assert copy.tensors[name].dtype == source.tensors[name].dtype
                assert copy.read(name).tobytes() == source.read(name).tobytes()


def test_the_safetensors_library_agrees_where_it_knows_the_dtype(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    tensors = {
        "f32": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
        "f16": np.linspace(-1, 1, 5, dtype=np.float16),
        "i32": np.arange(-3, 3, dtype=np.int32).reshape(2, 1, 3),
    }
    library.save_file(tensors, tmp_path / "theirs.safetensors", {"format": "np"})
    write_safetensors(tmp_path / "ours.safetensors", tensors, {"format": "np"})
    theirs = library.load_file(tmp_path / "ours.safetensors")
    with SafetensorsFile(tmp_path / "theirs.safetensors") as file:
        assert file.metadata == {"format": "np"}
        for name, array in tensors.items():
            np.testing.assert_array_equal(file.read(name), array)
            np.testing.assert_array_equal(theirs[name], array)


def test_tensors_written_in_any_order_give_the_same_file(tmp_path):
    tensors = {"b": np.arange(3, dtype=np.uint8), "a": np.ones((2, 2), np.float32), "c": np.zeros(0, np.int64)}
    write_safetensors(tmp_path / "at_once", tensors, {"format": "pt"})
    announced = {"a": ("F32", (2, 2)), "b": ("U8", (3,)), "c": ("I64", (0,))}
    with SafetensorsWriter(tmp_path / "one_by_one", announced, {"format": "pt"}) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
        writer.finish()
    assert (tmp_path / "one_by_one").read_bytes() == (tmp_path / "at_once").read_bytes()


def test_a_file_is_held_to_what_was_announced(tmp_path):
    with SafetensorsWriter(tmp_path / "w", {"a": ("F32", (2,)), "b": ("F4", (4,))}) as writer:
        with pytest.raises(SafetensorsError, match=r"'a' is F32 of shape \(3,\), expected F32 of shape \(2,\)"):
            writer.write("a", np.ones(3, np.float32))
        with pytest.raises(SafetensorsError, match="'c' was not announced, or is written already"):
            writer.write("c", np.ones(3, np.float32))
        writer.write("b", ("F4", (4,), b"\x21\x43"))
        with pytest.raises(SafetensorsError, match="'b' was not announced, or is written already"):
            writer.write("b", ("F4", (4,), b"\x21\x43"))
        with pytest.raises(SafetensorsError, match="'a' was announced and not written"):
            writer.finish()
