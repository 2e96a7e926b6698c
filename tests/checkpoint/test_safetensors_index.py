"""Checkpoints of several files: indices, folders without one, and what makes them ambiguous or incomplete."""

import json
import os

import numpy as np
import pytest

from jmoe.checkpoint.safetensors import SafetensorsError, SafetensorsIndex, open_safetensors
from jmoe.checkpoint.safetensors_writer import write_safetensors


def refusal(path):
    """The sentence with which a checkpoint is refused; it always names the file and is one line."""
    with pytest.raises(SafetensorsError) as caught:
        open_safetensors(path)
    message = str(caught.value)
    assert "\n" not in message
    assert os.fspath(path) in message
    return message


def place(folder, content, name="model.safetensors.index.json"):
    path = folder / name
    path.write_bytes(content)
    return path


def shard(folder, name, **arrays):
    write_safetensors(folder / name, {key: np.array(value, np.uint8) for key, value in arrays.items()})


def index(folder, weight_map, name="model.safetensors.index.json"):
    return place(folder, json.dumps({"metadata": {"total_size": 4}, "weight_map": weight_map}).encode(), name)


def test_an_index_reads_tensors_from_their_shards(tmp_path):
    shard(tmp_path, "a.safetensors", x=[1, 2])
    shard(tmp_path, "b.safetensors", y=[3], z=4)
    path = index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors", "z": "b.safetensors"})
    for source in (tmp_path, path):
        with open_safetensors(source) as checkpoint:
            assert isinstance(checkpoint, SafetensorsIndex)
            assert list(checkpoint.tensors) == ["x", "y", "z"]
            assert len(checkpoint.tensors) == 3
            assert "y" in checkpoint.tensors
            assert "q" not in checkpoint.tensors
            assert checkpoint.tensors["z"].shape == ()
            assert checkpoint.tensors["y"].file == tmp_path / "b.safetensors"
            assert {name: checkpoint.read(name).tolist() for name in checkpoint.tensors} == {
                "x": [1, 2],
                "y": [3],
                "z": 4,
            }
            checkpoint.release("x")
            with pytest.raises(SafetensorsError, match="has no tensor 'q' among its 3"):
                checkpoint.read("q")
        with pytest.raises(SafetensorsError, match="was closed before"):
            checkpoint.read("x")


def test_a_shard_is_opened_only_when_needed(tmp_path):
    shard(tmp_path, "a.safetensors", x=[1])
    place(tmp_path, b"broken", "b.safetensors")
    index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    checkpoint = open_safetensors(tmp_path)
    assert list(checkpoint.tensors) == ["x", "y"]
    assert checkpoint.read("x").tolist() == [1]
    with pytest.raises(SafetensorsError, match=r"b\.safetensors: has 6 bytes"):
        checkpoint.read("y")
    checkpoint.close()
    with pytest.raises(SafetensorsError, match=r"was closed before b\.safetensors was read"):
        checkpoint.read("y")


def test_a_listed_tensor_must_be_in_its_shard(tmp_path):
    shard(tmp_path, "a.safetensors", x=[1])
    path = index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors"})
    with pytest.raises(SafetensorsError) as caught:
        open_safetensors(tmp_path).read("x")
    assert str(caught.value) == f"{path}: places 'y' in a.safetensors, which lacks it"


def test_a_shard_holds_nothing_that_the_index_does_not_list(tmp_path):
    shard(tmp_path, "a.safetensors", x=[1], y=[2])
    index(tmp_path, {"x": "a.safetensors"})
    with pytest.raises(SafetensorsError) as caught:
        open_safetensors(tmp_path).read("x")
    assert str(caught.value) == (
        f"{tmp_path / 'a.safetensors'}: holds 'y', which model.safetensors.index.json does not place in this file"
    )


def test_missing_shards_are_named_at_once(tmp_path):
    shard(tmp_path, "a.safetensors", x=[1])
    index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors", "z": "c" * 300 + ".safetensors"})
    message = refusal(tmp_path)
    assert "lists 3 files, of which 'b.safetensors', 'ccc" in message
    assert message.endswith(f"are not in {tmp_path}")


@pytest.mark.parametrize("name", ["../x", "/etc/x", "sub/x", "..", ".", "", "..\\x", "a\0b", 3, None, ["x"]])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path, name):
    shard(tmp_path, "x")
    folder = tmp_path / "inner"
    folder.mkdir()
    index(folder, {"w": name})
    assert "places tensor 'w' in" in refusal(folder)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "it is not valid JSON"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"[]", "it is a JSON list, expected an object"),
        (b"{}", "has weight_map None, expected an object"),
        (b'{"weight_map": []}', "has weight_map [], expected an object"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "key 'a' occurs twice"),
        (b"[" * 100_000, "it is JSON nested too deeply"),
    ],
)
def test_a_malformed_index_is_refused(tmp_path, content, words):
    place(tmp_path, content)
    assert words in refusal(tmp_path)


def test_metadata_of_shards_are_merged_unless_they_disagree(tmp_path):
    write_safetensors(tmp_path / "a.safetensors", {"x": np.zeros(1, np.uint8)}, {"format": "pt", "a": "1"})
    write_safetensors(tmp_path / "b.safetensors", {"y": np.zeros(1, np.uint8)}, {"format": "pt"})
    assert open_safetensors(tmp_path).metadata == {"format": "pt", "a": "1"}
    write_safetensors(tmp_path / "b.safetensors", {"y": np.zeros(1, np.uint8)}, {"format": "np"})
    checkpoint = open_safetensors(tmp_path)
    with pytest.raises(SafetensorsError, match="has 'np' for __metadata__ key 'format', expected 'pt'"):
        checkpoint.metadata  # noqa: B018
    assert [each.metadata["format"] for each in checkpoint.shards] == ["pt", "np"]


def test_a_folder_is_read_as_its_single_file(tmp_path):
    shard(tmp_path, "model.safetensors", x=[1])
    shard(tmp_path, "consolidated.safetensors", other=[2])  # the same weights under other names, in some releases
    assert list(open_safetensors(tmp_path).tensors) == ["x"]


def test_a_folder_with_one_file_of_another_name(tmp_path):
    shard(tmp_path, "weights.safetensors", x=[1])
    place(tmp_path, b"junk", "._weights.safetensors")
    assert open_safetensors(tmp_path).read("x").tolist() == [1]


def test_files_without_an_index_are_read_together(tmp_path):
    shard(tmp_path, "a.safetensors", x=[1])
    shard(tmp_path, "b.safetensors", y=[2])
    with open_safetensors(tmp_path) as checkpoint:
        assert {name: checkpoint.read(name).tolist() for name in checkpoint.tensors} == {"x": [1], "y": [2]}


def test_a_name_in_two_files_is_an_error(tmp_path):
    shard(tmp_path, "a.safetensors", x=[1])
    shard(tmp_path, "b.safetensors", x=[2])
    assert "tensor 'x' is in a.safetensors too, expected it in one file" in refusal(tmp_path)


@pytest.mark.parametrize("numbers, missing", [((1, 3), 2), ((1, 2), 3), ((2, 3), 1), ((0, 2), 1)])
def test_a_missing_numbered_shard_is_noticed_without_an_index(tmp_path, numbers, missing):
    for number in numbers:
        shard(tmp_path, f"model-{number:05}-of-00003.safetensors", **{f"x{number}": [number]})
    message = refusal(tmp_path)
    assert f"holds 2 of the 3 files model-*-of-*.safetensors, expected all, but number {missing} is missing" in message


@pytest.mark.parametrize("first", [0, 1])
def test_numbered_shards_without_an_index_are_read_together(tmp_path, first):
    for number in range(first, first + 3):
        shard(tmp_path, f"model-{number:05}-of-00003.safetensors", **{f"x{number}": [number]})
    assert len(open_safetensors(tmp_path).tensors) == 3


def test_the_only_index_decides_under_any_name(tmp_path):
    shard(tmp_path, "consolidated-1.safetensors", x=[1])
    shard(tmp_path, "stray.safetensors", x=[2])
    index(tmp_path, {"x": "consolidated-1.safetensors"}, "consolidated.safetensors.index.json")
    assert open_safetensors(tmp_path).read("x").tolist() == [1]
    index(tmp_path, {"x": "stray.safetensors"}, "other.safetensors.index.json")
    assert "holds 2 indices" in refusal(tmp_path)
    index(tmp_path, {"x": "stray.safetensors"})
    assert open_safetensors(tmp_path).read("x").tolist() == [2]


def test_an_index_beside_a_single_file_that_it_does_not_list_is_ambiguous(tmp_path):
    shard(tmp_path, "model.safetensors", x=[1])
    shard(tmp_path, "a.safetensors", x=[2])
    index(tmp_path, {"x": "a.safetensors"})
    assert "holds model.safetensors and model.safetensors.index.json that does not list it" in refusal(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    index(tmp_path, {"x": "model.safetensors"})
    assert open_safetensors(tmp_path).read("x").tolist() == [1]


def test_a_folder_without_safetensors_says_so(tmp_path):
    assert "holds no *.safetensors" in refusal(tmp_path)
    place(tmp_path, b"", "pytorch_model.bin")
    assert "'pytorch_model.bin' may be pickled, which can run code" in refusal(tmp_path)
