"""The tiny trained checkpoint, as a decoder."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmoe.checkpoint.safetensors import open_safetensors
from jmoe.models import Decoder, DecoderConfig
from jmoe.nn.param import assign

DATA = Path(__file__).resolve().parents[1] / "data"


@pytest.fixture(scope="session")
def heldout():
    """The first 65536 held-out bytes, as token ids."""
    return np.frombuffer((DATA / "heldout.bin").read_bytes(), np.uint8).astype(np.int32)


@pytest.fixture(scope="session")
def tiny_config():
    return json.loads((DATA / "tiny-moe" / "bf16" / "config.json").read_text())


@pytest.fixture(scope="session")
def tiny(tiny_config):
    """The trained decoder with its bfloat16 weights, computing in float32."""
    model = nnx.eval_shape(lambda: Decoder(DecoderConfig.from_hf(tiny_config), dtype=jnp.float32))
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    with open_safetensors(DATA / "tiny-moe" / "bf16" / "model.safetensors") as file:
        parts = {}
        for name, place in model.parameter_places().items():
            parts.setdefault((place.path, place.name), {})[place.index] = file.read(name)
        for (path, name), tensors in parts.items():
            first = next(iter(tensors.values()))
            array = np.empty(getattr(modules[path], name).get_raw_value().shape, first.dtype)
            for index, tensor in tensors.items():
                array[index] = tensor
            assign(modules[path], name, jnp.asarray(array))
    return model
