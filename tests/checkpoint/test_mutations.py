"""Checkpoints with a random fault in configuration or tensors: they are read, or refused in one sentence."""

import copy
import json
import random

import ml_dtypes
import numpy as np
import pytest

from jmoe import checkpoint
from jmoe.checkpoint.safetensors import SafetensorsError, open_safetensors
from jmoe.checkpoint.safetensors_writer import write_safetensors

NAMES = (
    *("ckpt_ct_mxfp4_moe", "ckpt_ct_w4a16_kimi_moe", "ckpt_ds_fp8_moe", "ckpt_gptoss_mxfp4"),
    *("ckpt_modelopt_fp8moe", "ckpt_modelopt_nvfp4moe", "ckpt_modelopt_w4a16nv"),
)
CASES = 60


def contents(folder):
    with open_safetensors(folder) as file:
        tensors = {name: np.array(file.read(name)) for name in file.tensors}
    return tensors, json.loads((folder / "config.json").read_text())


def change_setting(rng, settings):
    """Removes a setting, adds one, or gives one another value, at any depth."""
    holder = settings
    while True:
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        if not isinstance(holder[key], dict | list) or not holder[key] or rng.random() < 0.2:
            break
        holder = holder[key]
    kind = rng.randrange(4)
    if kind == 0 and isinstance(holder, dict):
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder["colour"] = "red"
    else:
        old = holder[key]
        holder[key] = rng.choice([None, [], {}, "x", -1, 0, True, 3.5, 2**70, [old], {"a": old}])


def change_tensor(rng, tensors):
    """Removes a tensor, renames a copy of one, or gives one another shape, dtype or value."""
    name = rng.choice(list(tensors))
    array, kind = tensors[name], rng.randrange(6)
    if kind == 0:
        del tensors[name]
    elif kind == 1:
        tensors[name + rng.choice(["_scale", "x", "_2", ".weight", ".weight_scale"])] = array
    elif kind == 2 and array.ndim:
        tensors[name] = array[..., : array.shape[-1] - rng.choice([1, array.shape[-1] // 2, array.shape[-1]])]
    elif kind == 3:
        tensors[name] = rng.choice([array[None], array.reshape(-1), np.zeros((), array.dtype)])
    elif kind == 4:
        tensors[name] = array.astype(rng.choice([np.float32, np.int64, np.uint8, ml_dtypes.bfloat16]))
    else:
        flipped = array.copy()
        if flipped.size:
            flipped.reshape(-1).view(np.uint8)[rng.randrange(flipped.nbytes)] ^= 1 << rng.randrange(8)
        tensors[name] = flipped


def load_all(folder):
    with checkpoint.open(folder) as opened:
        opened.summary()
        opened.input_scales()
        for prefix in opened.expert_prefixes:
            checkpoint.load_experts(opened, prefix)
            checkpoint.load_expert_biases(opened, prefix)
            checkpoint.load_expert_scales(opened, prefix)
        for module in opened.leaves:
            if "experts" not in module and opened.has_weight(module) and len(opened.shape_for(module)) == 2:
                checkpoint.load_linear(opened, module)


@pytest.mark.parametrize("name", NAMES)
def test_any_fault_is_read_or_refused_in_one_sentence(shared, tmp_path, name):
    tensors, config = contents(shared / "vectors" / name)
    rng = random.Random(name)
    refusals = []
    for case in range(CASES):
        folder = tmp_path / str(case)
        folder.mkdir()
        faulty, settings = dict(tensors), copy.deepcopy(config)
        if case % 3:
            change_tensor(rng, faulty)
        else:
            change_setting(rng, settings["quantization_config"])
        write_safetensors(folder / "model.safetensors", faulty)
        (folder / "config.json").write_text(json.dumps(settings))
        try:
            with np.errstate(all="ignore"):
                load_all(folder)
        except (checkpoint.CheckpointError, SafetensorsError) as error:
            refusals.append(str(error))
    assert not any("\n" in refusal for refusal in refusals)
    assert CASES // 10 < len(refusals) < CASES - CASES // 10
