"""Experts that a file has in one unquantized tensor a layer, shown as tensors of each expert.

``experts.gate_up_proj`` and ``experts.down_proj`` come as products x w take them, (E, H, 2I) and (E, I, H), as in
Llama 4 and gpt-oss, or as products x w^T do, (E, 2I, H) and (E, H, I); which of the two, the pair's shapes say. Gate
and up are halves, gate first; in gpt-oss, whose experts alone have biases, ``gate_up_proj_bias`` (E, 2I) and
``down_proj_bias`` (E, H), they alternate, gate first. They are shown as ``experts.<e>.gate_proj.weight`` (I, H) and so
on, as other models have them in their files. Quantized experts in one tensor are left to the method.

Source: the published checkpoints.
"""

import re
from collections.abc import Iterator

from jmoe.checkpoint.methods import CheckpointError
from jmoe.checkpoint.methods.base import FLOAT_DTYPES, Files, where
from jmoe.checkpoint.methods.parts import FilesInParts, Part
from jmoe.checkpoint.safetensors import TensorInfo

_GATE_UP = re.compile(r"(?P<prefix>(?:.+\.)?experts)\.gate_up_proj")


def show_each_expert(files: Files) -> Files:
    """The files with experts of their own in place of the unquantized experts of a layer.

    Raises:
      CheckpointError: shapes that do not fit each other, or an expert's tensor that is there already.
    """
    parts = [part for name in files.tensors if (match := _GATE_UP.fullmatch(name)) for part in _parts(files, match[1])]
    return FilesInParts(files, parts) if parts else files


def _parts(files: Files, prefix: str) -> Iterator[Part]:
    """The parts of the experts below a prefix; none where they are quantized, or these files hold only half of them."""
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    if down not in files.tensors or any(files.tensors[name].dtype not in FLOAT_DTYPES for name in (gate_up, down)):
        return
    experts, hidden, intermediate, transposed = _sizes(files.tensors[gate_up], files.tensors[down])
    biases = {f"{gate_up}_bias": 2 * intermediate, f"{down}_bias": hidden}
    present = [name for name in biases if name in files.tensors]
    for name in present:
        info, expected = files.tensors[name], (experts, biases[name])
        if info.shape != expected:
            raise CheckpointError(f"{where(info)} has shape {info.shape}, expected {expected} as the weights have it")
    gate, up = (slice(0, None, 2), slice(1, None, 2)) if present else (slice(intermediate), slice(intermediate, None))
    for whole, projection, rows, shape in (
        (gate_up, "gate_proj", gate, (intermediate, hidden)),
        (gate_up, "up_proj", up, (intermediate, hidden)),
        (down, "down_proj", slice(None), (hidden, intermediate)),
    ):
        for e in range(experts):
            shown = f"{prefix}.{e}.{projection}"
            yield Part(f"{shown}.weight", whole, e, rows, shape, transposed)
            if f"{whole}_bias" in present:
                yield Part(f"{shown}.bias", f"{whole}_bias", e, rows, shape[:1])


def _sizes(gate_up: TensorInfo, down: TensorInfo) -> tuple[int, int, int, bool]:
    """E, H, I, and whether the matrices are transposed: (H, 2I) and (I, H)."""
    if len(gate_up.shape) == 3 == len(down.shape) and gate_up.shape[0] == down.shape[0]:
        experts, first, second = gate_up.shape
        if down.shape[1:] == (second // 2, first) and second % 2 == 0:
            return experts, first, second // 2, True
        if down.shape[1:] == (second, first // 2) and first % 2 == 0:
            return experts, second, first // 2, False
    raise CheckpointError(
        f"{where(gate_up)} has shape {gate_up.shape}, expected (E, H, 2I) with (E, I, H), or (E, 2I, H) with "
        f"(E, H, I); {down.name!r} has {down.shape}"
    )
