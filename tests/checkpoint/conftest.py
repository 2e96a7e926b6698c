"""A folder with a small checkpoint, written by hand."""

import json

import numpy as np
import pytest

from jmoe.checkpoint.safetensors_writer import write_safetensors


@pytest.fixture
def write_checkpoint(tmp_path):
    """A function of (tensors, config or None, name of the weights' file) that gives the folder."""

    def write(tensors, config=None, file="model.safetensors"):
        (tmp_path / "config.json").write_text(json.dumps(config or {}))
        write_safetensors(tmp_path / file, {name: np.asarray(tensor) for name, tensor in tensors.items()})
        return tmp_path

    return write
