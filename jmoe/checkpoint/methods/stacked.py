"""Quantized experts that a file has in one tensor a layer, as products x w take them: Llama 4, gpt-oss by ModelOpt.

``experts.gate_up_proj`` is (E, H, 2I) and ``experts.down_proj`` (E, I, H); of 4-bit codes, two of which share a byte, H
and I are half as many. Scales stand beside them under flat names, such as ``experts.gate_up_proj_weight_scale``: one
for all, one an expert (E,), or a grid of each expert's, (E, groups, N) as the weight lies, or (E, N, 1). Gate and up
are halves, gate first; where experts have biases, which only gpt-oss's do, they alternate.

Source: the published checkpoints, and the libraries that write them.
"""

import math
import re
from collections.abc import Iterator, Mapping

from jmoe.checkpoint.methods.base import CheckpointError, Files, where
from jmoe.checkpoint.methods.parts import FilesInParts, Part
from jmoe.checkpoint.safetensors import TensorInfo

_GATE_UP = re.compile(r"(?P<prefix>(?:.+\.)?experts)\.gate_up_proj")
_CODES = {"F8_E4M3": 1, "U8": 2}
"""Dtypes of codes, and how many share an element of the file."""


def show_each_expert(files: Files, leaves: Mapping[str, str]) -> Files:
    """The files with the tensors of each expert, ``experts.<e>.gate_proj.weight`` and so on, in place of such ones.

    Args:
      files: any files.
      leaves: what follows the projection in a scale's name to the leaf that it is, such as "_scale" to "weight_scale".

    Raises:
      CheckpointError: shapes that do not fit each other, or an expert's tensor that is there already.
    """
    parts = [
        part
        for name in files.tensors
        if (match := _GATE_UP.fullmatch(name)) and files.tensors[name].dtype in _CODES
        for part in _parts(files, match["prefix"], leaves)
    ]
    return FilesInParts(files, parts) if parts else files


def _parts(files: Files, prefix: str, leaves: Mapping[str, str]) -> Iterator[Part]:
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    _check_shapes(files, gate_up, down)
    intermediate = files.tensors[gate_up].shape[2] // 2
    alternate = f"{gate_up}_bias" in files.tensors
    halves = slice(0, None, 2), slice(1, None, 2)
    gate, up = halves if alternate else (slice(intermediate), slice(intermediate, None))
    for whole, projection, rows in ((gate_up, "gate_proj", gate), (gate_up, "up_proj", up), (down, "down_proj", None)):
        weight = files.tensors[whole]
        experts, columns, every = weight.shape
        count = every if rows is None else intermediate
        for e in range(experts):
            shown = f"{prefix}.{e}.{projection}"
            yield Part(f"{shown}.weight", whole, e, rows or slice(None), (count, columns), transposed=True)
            if (bias := f"{whole}_bias") in files.tensors:
                _check_bias(files.tensors[bias], (experts, every))
                yield Part(f"{shown}.bias", bias, e, rows or slice(None), (count,))
            for suffix, leaf in leaves.items():
                if (scale := whole + suffix) in files.tensors:
                    yield _scale_part(f"{shown}.{leaf}", files.tensors[scale], e, rows or slice(None), weight, count)


def _check_shapes(files: Files, gate_up: str, down: str) -> None:
    first = files.tensors[gate_up]
    if down not in files.tensors:
        raise CheckpointError(f"{where(first)} has the first weights of experts, but {down!r} is missing")
    second = files.tensors[down]
    pack = _CODES[first.dtype]
    if second.dtype == first.dtype and len(first.shape) == 3 and first.shape[2] % (2 * pack) == 0:
        experts, hidden, both = first.shape
        if second.shape == (experts, both // 2 // pack, hidden * pack):
            return
    per = "" if pack == 1 else ", H and I two to a byte in the middle axis"
    raise CheckpointError(
        f"{where(first)} is {first.dtype} of shape {first.shape}, expected (E, H, 2I) with {down!r} (E, I, H){per}; "
        f"that is {second.dtype} of shape {second.shape}"
    )


def _check_bias(info: TensorInfo, expected: tuple[int, int]) -> None:
    if info.shape != expected:
        raise CheckpointError(f"{where(info)} has shape {info.shape}, expected {expected} as the weights have it")


def _scale_part(name: str, info: TensorInfo, expert: int, rows: slice, weight: TensorInfo, count: int) -> Part:
    """The part of a scale that belongs to some rows of an expert."""
    experts, _, every = weight.shape
    if math.prod(info.shape) == 1:
        return Part(name, info.name, None, slice(None), ())
    if info.shape in ((experts,), (experts, 1), (experts, 1, 1)):
        return Part(name, info.name, expert, slice(None), ())
    if len(info.shape) == 3 and info.shape[0] == experts and every in info.shape[1:]:
        if info.shape[2] == every:
            return Part(name, info.name, expert, rows, (count, info.shape[1]), transposed=True)
        if info.shape[2] == 1:
            return Part(name, info.name, expert, rows, (count, 1))
    raise CheckpointError(
        f"{where(info)} has shape {info.shape}, expected (), ({experts},), ({experts}, groups, {every}) or "
        f"({experts}, {every}, 1) beside {weight.name!r} of {weight.shape}"
    )
