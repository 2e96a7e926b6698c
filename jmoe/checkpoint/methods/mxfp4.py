"""``quant_method: "mxfp4"``: e2m1 codes with one e8m0 scale for 32 of K, activations as they are (gpt-oss).

gpt-oss has all experts of a layer in one tensor, with blocks apart: ``experts.gate_up_proj_blocks`` (E, 2I, H/32, 16),
``_scales`` (E, 2I, H/32), ``_bias`` (E, 2I), and ``down_proj_*`` likewise. Rows of gate and up alternate, gate first.
They are shown as tensors of each expert, ``experts.<e>.gate_proj.weight`` and so on, as other models have them in their
files: ``weight`` (N, K/2), two codes a byte, low nibble first, and ``weight_scale`` (N, K/32). Which of the two a file
has, its tensors say: it occurs under any ``model_type``. OpenAI's own files of gpt-oss have other names for the same,
``mlp.mlp1_weight.blocks``, ``.scales``, ``mlp.mlp1_bias`` and ``mlp2_*``, and no configuration of the quantization.

Source: the published checkpoints; OCP Microscaling Formats (MX) 1.0.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Self

from jmoe.checkpoint.methods.base import (
    CheckpointError,
    Files,
    HostWeight,
    Method,
    ModuleList,
    Tensors,
    check_keys,
    host_qtensor,
    list_of_names,
    logical_shape,
    present_leaves,
    read_scale,
    register,
    require_groups,
    where,
)
from jmoe.checkpoint.methods.none import unquantized_recipe
from jmoe.checkpoint.methods.parts import FilesInParts, Part
from jmoe.checkpoint.safetensors import TensorInfo
from jmoe.scheme import Recipe, recipe

GROUP = 32

_IGNORE_KEYS = ("modules_to_not_convert", "ignored_layers")
_KEYS = ("quant_method", "dequantize", *_IGNORE_KEYS)
_FUSED = re.compile(
    r"(?P<prefix>(?:.+\.)?experts)\.(?P<projection>gate_up_proj|down_proj)_(?P<kind>blocks|scales|bias)"
)
_OPENAI = re.compile(r"(?P<layer>(?:.+\.)?mlp)\.(?P<projection>mlp[12])_(?:weight\.(?P<kind>blocks|scales)|bias)")
_OPENAI_PROJECTIONS = {"mlp1": "gate_up_proj", "mlp2": "down_proj"}
_LEAVES = {"blocks": "weight", "scales": "weight_scale", "bias": "bias"}


@register("mxfp4")
class Mxfp4(Method):
    """MXFP4 weights, activations as they are."""

    leaves = ("weight", "weight_scale")

    def __init__(self, ignored: Mapping[str, str]) -> None:
        self._ignored = ModuleList(ignored)
        self._keys = dict(ignored)  # entry -> the key it stands under

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        check_keys(config, _KEYS)
        # A wish about loading, of the library that wrote the file; it says nothing of the tensors.
        if not isinstance(dequantize := config.get("dequantize", False), bool):
            raise CheckpointError(f"has dequantize {dequantize!r}, expected true or false")
        return cls({entry: key for key in _IGNORE_KEYS for entry in list_of_names(config, key)})

    def view(self, files: Files) -> Files:
        return FilesInParts(files, _parts(files))

    def is_quantized(self, leaves: Collection[str]) -> bool:
        return "weight_scale" in leaves

    def ignored_by(self, module: str) -> str | None:
        entry = self._ignored.find(module)
        return None if entry is None else f"{self._keys[entry]} entry {entry!r}"

    def recipe_for(self, module: str, present: Mapping[str, TensorInfo]) -> Recipe:
        weight, scale = present.get("weight"), present.get("weight_scale")
        if scale is None:
            if weight is not None and weight.dtype == "U8":
                raise CheckpointError(
                    f"{where(weight)} holds U8 codes, but their scale {module + '.weight_scale'!r} is missing"
                )
            return unquantized_recipe(module, present)
        check_mxfp4(module, weight, scale)
        if (ignored := self.ignored_by(module)) is not None:
            raise CheckpointError(
                f"{where(scale)} is a scale of MXFP4 codes, but the configuration's {ignored} says that the module is "
                "not quantized"
            )
        return recipe("mxfp4")

    def shape_for(self, module: str, present: Mapping[str, TensorInfo]) -> tuple[int, ...]:
        return logical_shape(present["weight"], packed="weight_scale" in present)

    def load_weight(self, tensors: Tensors, module: str) -> HostWeight:
        found = self.recipe_for(module, present_leaves(tensors.tensors, module, self.leaves))
        data = tensors.read(f"{module}.weight")
        if found.weight is None:
            return data
        return host_qtensor(data, read_scale(tensors, f"{module}.weight_scale"), found.weight, found.input)


def check_mxfp4(module: str, weight: TensorInfo | None, scale: TensorInfo) -> None:
    """Raises a CheckpointError unless these are codes (N, K/2), U8, and their e8m0 scales (N, K/32)."""
    if weight is None:
        raise CheckpointError(f"{where(scale)} is a scale, but {module + '.weight'!r} is missing")
    if weight.dtype != "U8":
        raise CheckpointError(f"{where(weight)} has dtype {weight.dtype}, expected U8 codes beside {scale.name!r}")
    if scale.dtype not in ("U8", "F8_E8M0"):
        raise CheckpointError(f"{where(scale)} has dtype {scale.dtype}, expected U8 or F8_E8M0")
    require_groups(weight, scale, GROUP)


def has_openai_names(names: Iterable[str]) -> bool:
    """Whether tensors are named as in OpenAI's own files of gpt-oss, whose configuration says nothing of MXFP4."""
    return any((match := _OPENAI.fullmatch(name)) and match["kind"] == "blocks" for name in names)


def _parts(files: Files) -> Iterator[Part]:
    """The parts of every tensor that holds the experts of a layer."""
    for name in files.tensors:
        if match := _FUSED.fullmatch(name):
            prefix, projection, kind = match.groups()
            yield from _parts_of(files, name, prefix, projection, kind, f"{prefix}.{projection}_")
        elif match := _OPENAI.fullmatch(name):
            layer, projection, kind = match.groups()
            base = f"{layer}.{projection}_weight."
            if kind is not None or f"{base}blocks" in files.tensors:  # other models may have an mlp1_bias
                shown = _OPENAI_PROJECTIONS[projection]
                yield from _parts_of(files, name, f"{layer}.experts", shown, kind or "bias", base)


def _parts_of(files: Files, name: str, prefix: str, projection: str, kind: str, base: str) -> Iterator[Part]:
    """The parts of one such tensor; ``base`` is what its ``blocks`` and ``scales`` begin with."""
    info = files.tensors[name]
    blocks = f"{base}blocks"
    if blocks not in files.tensors:
        raise CheckpointError(f"{where(info)} belongs to {blocks!r}, which is missing")
    if kind == "blocks" and (scales := f"{base}scales") not in files.tensors:
        raise CheckpointError(f"{where(info)} holds codes, but their scales {scales!r} are missing")
    of = files.tensors[blocks].shape
    if len(of) != 4 or of[3] != GROUP // 2:
        raise CheckpointError(
            f"{where(files.tensors[blocks])} has shape {of}, expected four axes (E, N, K/{GROUP}, {GROUP // 2})"
        )
    expected = {"blocks": of, "scales": of[:3], "bias": of[:2]}[kind]
    if info.shape != expected:
        raise CheckpointError(f"{where(info)} has shape {info.shape}, expected {expected} beside {blocks!r} of {of}")
    halves = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    if of[1] % len(halves):
        raise CheckpointError(f"{where(info)} has {of[1]} rows, expected as many of gate as of up")
    rows = of[1] // len(halves)
    shape = {"blocks": (rows, of[2] * of[3]), "scales": (rows, of[2]), "bias": (rows,)}[kind]
    for expert in range(of[0]):
        for start, half in enumerate(halves):
            shown = f"{prefix}.{expert}.{half}.{_LEAVES[kind]}"
            alternate = slice(None) if len(halves) == 1 else slice(start, None, len(halves))
            yield Part(shown, name, expert, alternate, shape)
