"""``quant_method: "modelopt"``: what NVIDIA's Model Optimizer writes, FP8, NVFP4 and MX formats, also side by side.

| quant_algo | weight | weight_scale | others |
|---|---|---|---|
| FP8 | F8_E4M3 (N, K) | F32 () | input_scale F32 () |
| FP8_PER_CHANNEL_PER_TOKEN | F8_E4M3 (N, K) | F32 (N,) | |
| FP8_PB_WO, FP8_BLOCK_SCALES | F8_E4M3 (N, K) | F32 (N/128, 1, K/128, 1), () for one block | |
| NVFP4, W4A16_NVFP4 | U8 (N, K/2) | F8_E4M3 (N, K/16) | weight_scale_2 F32 (); NVFP4: input_scale F32 () |
| MXFP8 | F8_E4M3 (N, K) | U8 (N, K/32), e8m0 | |
| W4A8_MXFP4_FP8 | U8 (N, K/2) | U8 (N, K/32), e8m0 | input_scale F32 (), where there is one |

All scales multiply. FP8_PB_WO ("weight only") leaves activations as they are; FP8_BLOCK_SCALES, TensorRT-LLM's name,
quantises them too. The configuration is that of ``hf_quant_config.json`` (settings under ``quantization``), of
``config.json``, or both; with MIXED_PRECISION its ``quantized_layers`` give every layer its quant_algo. Experts may be
in one tensor a layer (`jmoe.checkpoint.methods.stacked`).

Source: the files that Model Optimizer writes.
"""

import fnmatch
import functools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from jmoe.checkpoint.methods import stacked
from jmoe.checkpoint.methods.base import (
    SCALE_DTYPES,
    CheckpointError,
    Files,
    HostWeight,
    Method,
    Tensors,
    check_keys,
    host_qtensor,
    list_of_names,
    logical_shape,
    present_leaves,
    read_scale,
    register,
    require_grid,
    require_groups,
    require_matrix,
    where,
)
from jmoe.checkpoint.methods.mxfp4 import check_mxfp4
from jmoe.checkpoint.methods.none import unquantized_recipe
from jmoe.checkpoint.safetensors import TensorInfo
from jmoe.qtensor import scale_grid
from jmoe.scheme import Block, Recipe, recipe, recipe_of

SIDE_FILE = "hf_quant_config.json"

_MIXED = "MIXED_PRECISION"
_IGNORE_KEYS = ("exclude_modules", "ignore")
_KEYS = (
    *("quant_method", "quant_algo", "group_size", "quantized_layers", "config_groups", "producer"),
    *("kv_cache_quant_algo", "kv_cache_scheme", *_IGNORE_KEYS),
)
_FLOAT_SCALES = ("F32", "BF16", "F16")
_STACKED = {f"_{leaf}": leaf for leaf in ("weight_scale", "weight_scale_2", "input_scale")}
_BLOCK = 128


@dataclass(frozen=True)
class _Algo:
    """What a quant_algo has in files.

    Attributes:
      weight: dtype of the codes.
      leaves: the other tensors of a module, all there.
      optional: tensors that may be there.
      bits, group: of the weights in ``config_groups``; what of K shares a scale, None where it is no such group.
      input_bits: of activations; None where they are not quantized.
    """

    weight: str
    leaves: tuple[str, ...]
    bits: int
    group: int | None
    input_bits: int | None
    optional: tuple[str, ...] = ()


_NVFP4 = ("weight_scale", "weight_scale_2")
_ALGOS: Mapping[str, _Algo] = {
    "FP8": _Algo("F8_E4M3", ("weight_scale", "input_scale"), 8, None, 8),
    "FP8_PER_CHANNEL_PER_TOKEN": _Algo("F8_E4M3", ("weight_scale",), 8, None, 8),
    "FP8_PB_WO": _Algo("F8_E4M3", ("weight_scale",), 8, _BLOCK, None),
    "FP8_BLOCK_SCALES": _Algo("F8_E4M3", ("weight_scale",), 8, _BLOCK, 8),
    "NVFP4": _Algo("U8", (*_NVFP4, "input_scale"), 4, 16, 4),
    # Older files still have a scale of activations that are not quantized.
    "W4A16_NVFP4": _Algo("U8", _NVFP4, 4, 16, None, ("input_scale",)),
    "MXFP8": _Algo("F8_E4M3", ("weight_scale",), 8, 32, 8),
    "W4A8_MXFP4_FP8": _Algo("U8", ("weight_scale",), 4, 32, 8, ("input_scale",)),
}


@register("modelopt")
class ModelOpt(Method):
    """Weights of one quant_algo, or of one each; activation scales measured or given."""

    leaves = ("weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")

    def __init__(self, algo: str | None, layers: Mapping[str, str], ignored: Mapping[str, str]) -> None:
        self._uniform = algo
        self._layers = {_plain(name): (name, layer_algo) for name, layer_algo in layers.items()}
        self._ignored = _Excluded(ignored)
        self._keys = dict(ignored)  # entry -> the key it stands under

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        config = _flat(config)
        algo = _algo_of("", config)
        check_keys(config, _KEYS)
        _check_kv_cache(config)
        ignored = {entry: key for key in _IGNORE_KEYS for entry in list_of_names(config, key)}
        layers = config.get("quantized_layers")
        if algo != _MIXED:
            if layers:
                raise CheckpointError(f"has quantized_layers with quant_algo {algo!r}, expected {_MIXED!r} with them")
            return cls(_check_groups(config, algo), {}, ignored)
        if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
            raise CheckpointError(
                f"has quant_algo {_MIXED!r} with quantized_layers {layers!r}, expected an object of settings by module "
                f"here or in {SIDE_FILE}"
            )
        return cls(None, {name: _layer_algo(name, layer) for name, layer in layers.items()}, ignored)

    def view(self, files: Files) -> Files:
        return stacked.show_each_expert(files, _STACKED)

    def is_quantized(self, leaves: Collection[str]) -> bool:
        return not {"weight_scale", "weight_scale_2"}.isdisjoint(leaves)

    def lists(self, module: str) -> bool:
        """Whether quantized_layers has the module, or one that it belongs to."""
        return self._listed(module) is not None

    def ignored_by(self, module: str) -> str | None:
        if self._uniform is None:
            # What is listed by itself is quantized, whatever wildcard means its surroundings.
            if self._listed(module) is not None:
                return None
            if (entry := self._ignored.find(module)) is None:
                return "quantized_layers, in which it is not listed,"
        elif (entry := self._ignored.find(module)) is None:
            return None
        return f"{self._keys[entry]} entry {entry!r}"

    def recipe_for(self, module: str, present: Mapping[str, TensorInfo]) -> Recipe:
        if "weight_scale" not in present:
            self._check_unquantized(module, present)
            return unquantized_recipe(module, present)
        scale = present["weight_scale"]
        if (ignored := self.ignored_by(module)) is not None:
            raise CheckpointError(
                f"{where(scale)} is a scale, but the configuration's {ignored} says that the module is not quantized"
            )
        name = self._algo(module)
        if (weight := present.get("weight")) is None:
            raise CheckpointError(f"{where(scale)} is a scale, but {module + '.weight'!r} is missing")
        _check_tensors(name, module, weight, present)
        return _recipe_of(name, weight, scale, given_input="input_scale" in present)

    def shape_for(self, module: str, present: Mapping[str, TensorInfo]) -> tuple[int, ...]:
        return logical_shape(present["weight"], packed=present["weight"].dtype == "U8")

    def load_weight(self, tensors: Tensors, module: str) -> HostWeight:
        present = present_leaves(tensors.tensors, module, self.leaves)
        found = self.recipe_for(module, present)
        data = tensors.read(f"{module}.weight")
        if found.weight is None:
            return data
        scale = read_scale(tensors, f"{module}.weight_scale")
        n, k = self.shape_for(module, present)
        grid = scale.reshape(scale_grid((n, k), found.weight.block))
        multiplier = None
        if found.weight.global_scale is not None:
            multiplier = _number(tensors, f"{module}.weight_scale_2").reshape(1, 1)
        return host_qtensor(data, grid, found.weight, found.input, global_scale=multiplier)

    def load_input_scale(self, tensors: Tensors, module: str) -> np.float32 | None:
        found = self.recipe_for(module, present_leaves(tensors.tensors, module, self.leaves))
        if found.input is None or not found.input.static:
            return None
        return np.float32(_number(tensors, f"{module}.input_scale").reshape(()))

    def _listed(self, module: str) -> tuple[str, str] | None:
        """The entry of quantized_layers that means the module, and its quant_algo."""
        parts = _plain(module).split(".")
        names = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
        return next((self._layers[name] for name in names if name in self._layers), None)

    def _algo(self, module: str) -> str:
        if self._uniform is not None:
            return self._uniform
        listed = self._listed(module)
        assert listed is not None  # else `ignored_by` has said so
        return listed[1]

    def _check_unquantized(self, module: str, present: Mapping[str, TensorInfo]) -> None:
        others = [info for leaf, info in present.items() if leaf != "weight"]
        if others:
            raise CheckpointError(f"{where(others[0])} belongs to a quantized weight, but has no {module}.weight_scale")
        entry, algo = self._layers.get(_plain(module), ("", ""))
        if entry and (weight := present.get("weight")) is not None:
            raise CheckpointError(
                f"{where(weight)} is {weight.dtype} without a scale, but the configuration's quantized_layers entry "
                f"{entry!r} has quant_algo {algo!r}"
            )


def joined(config: Mapping[str, Any], side: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json's quantization_config and hf_quant_config.json say together.

    The former counts; only the latter may have ``quantized_layers``.

    Raises:
      CheckpointError: they contradict each other.
    """
    ours, theirs = _flat(config), _flat(side)
    algos = [str(settings["quant_algo"]).upper() for settings in (ours, theirs) if settings.get("quant_algo")]
    if len(set(algos)) > 1:
        raise CheckpointError(f"has quant_algo {algos[0]!r}, but {SIDE_FILE} beside it has {algos[1]!r}")
    if not (layers := theirs.get("quantized_layers")):
        return config
    if not (known := ours.get("quantized_layers")):
        return {**config, "quantized_layers": layers}
    if known != layers:
        raise CheckpointError(f"has quantized_layers other than those of {SIDE_FILE} beside it")
    return config


class _Excluded:
    """Modules by name, also by some components of it in a row, or by shell patterns of the whole name."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._names: dict[str, str] = {}
        self._patterns: list[tuple[re.Pattern[str], str]] = []
        for entry in entries:
            for form in dict.fromkeys((entry, _plain(entry))):
                if re.fullmatch(r"[\w.\-]+", form):
                    self._names.setdefault(form.strip("."), entry)
                # What is left of "language_model.*" would mean everything.
                elif form == entry or re.match(r"\w", form):
                    self._patterns.append((re.compile(fnmatch.translate(form)), entry))
        # Tens of thousands of modules against a pattern a layer, and each is asked about several times.
        self.find = functools.cache(self._find)

    def _find(self, module: str) -> str | None:
        """An entry that means this module, or None."""
        for name in dict.fromkeys((module, _plain(module))):
            for run in _runs(name):
                if run in self._names:
                    return self._names[run]
            for pattern, entry in self._patterns:
                if pattern.match(name):
                    return entry
        return None


def _runs(name: str) -> Iterator[str]:
    """Every part of a name that is made of whole components."""
    parts = name.split(".")
    return (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))


def _plain(name: str) -> str:
    """The name without the component ``language_model``, which tensors and configurations have or lack at will."""
    return re.sub(r"(^|\.)language_model\.", r"\1", name)


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings, those under ``quantization`` among them."""
    inner = config.get("quantization")
    if inner is None:
        return config
    if not isinstance(inner, dict):
        raise CheckpointError(f"has quantization {inner!r}, expected an object")
    outer = {key: value for key, value in config.items() if key != "quantization"}
    for key in outer.keys() & inner.keys():
        if outer[key] != inner[key]:
            raise CheckpointError(f"has {key} {outer[key]!r}, but under quantization it has {inner[key]!r}")
    return {**outer, **inner}


def _algo_of(prefix: str, settings: Mapping[str, Any]) -> str:
    """The quant_algo in capitals; files have some of them in small letters."""
    algo = settings.get("quant_algo")
    name = algo.upper() if isinstance(algo, str) else ""
    known = (*_ALGOS, _MIXED) if not prefix else tuple(_ALGOS)
    if name not in known:
        raise CheckpointError(f"has {prefix}quant_algo {algo!r}, which is not supported; known are {', '.join(known)}")
    _check_group_size(prefix, name, settings.get("group_size"))
    return name


def _check_group_size(prefix: str, name: str, size: object) -> None:
    group = None if name == _MIXED else _ALGOS[name].group
    if size is not None and group is not None and size != group and group != _BLOCK:
        raise CheckpointError(f"has {prefix}quant_algo {name!r} with group_size {size!r}, expected {group}")


def _layer_algo(name: str, layer: Mapping[str, Any]) -> str:
    return _algo_of(f"for {name!r} in quantized_layers the ", layer)


def _check_kv_cache(config: Mapping[str, Any]) -> None:
    """A KV cache in FP8 has its scales in the file, or 1; the weights do not depend on it."""
    for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
        value = config.get(key)
        fp8 = value in (None, "FP8") or (
            isinstance(value, dict) and (value.get("num_bits"), value.get("type")) == (8, "float")
        )
        if not fp8:
            raise CheckpointError(f"has {key} {value!r}, expected 'FP8', 8 bits of type 'float', or none")


def _check_groups(config: Mapping[str, Any], name: str) -> str:
    """The quant_algo as the groups have it: NVFP4 without activations is W4A16_NVFP4.

    Raises:
      CheckpointError: a group that contradicts quant_algo.
    """
    groups = config.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise CheckpointError(f"has config_groups {groups!r}, expected an object of objects")
    if name == "NVFP4" and groups and all(not group.get("input_activations") for group in groups.values()):
        name = "W4A16_NVFP4"
    algo = _ALGOS[name]
    for key, group in groups.items():
        for part, bits in (("weights", algo.bits), ("input_activations", algo.input_bits)):
            args = group.get(part)
            found = args.get("num_bits") if isinstance(args, dict) else None
            if found != bits:
                raise CheckpointError(
                    f"has quant_algo {config['quant_algo']!r}, but {part} of its config_groups.{key} has "
                    f"num_bits {found!r}, expected {bits!r}"
                )
            if isinstance(args, dict):
                if args.get("type", "float") != "float":
                    raise CheckpointError(
                        f"has quant_algo {config['quant_algo']!r}, but {part} of its config_groups.{key} is of type "
                        f"{args['type']!r}, expected 'float'"
                    )
                if part == "weights":
                    _check_group_size(f"in config_groups.{key} the ", name, args.get("group_size"))
    return name


def _check_tensors(name: str, module: str, weight: TensorInfo, present: Mapping[str, TensorInfo]) -> None:
    """The tensors of a module against those that its quant_algo has."""
    algo = _ALGOS[name]
    says = f"as the configuration's quant_algo {name!r} says"
    if weight.dtype != algo.weight:
        raise CheckpointError(f"{where(weight)} has dtype {weight.dtype}, expected {algo.weight} {says}")
    for leaf, info in present.items():
        if leaf not in ("weight", *algo.leaves, *algo.optional):
            raise CheckpointError(f"{where(info)} is there, expected only {', '.join(('weight', *algo.leaves))} {says}")
    for leaf in algo.leaves:
        if leaf not in present:
            raise CheckpointError(f"{where(weight)} has no {module}.{leaf}, expected one {says}")
    for leaf in ("weight_scale_2", "input_scale"):
        if leaf in present and (present[leaf].shape not in ((), (1,)) or present[leaf].dtype not in _FLOAT_SCALES):
            info = present[leaf]
            raise CheckpointError(f"{where(info)} is {info.dtype} of shape {info.shape}, expected one F32 number")


def _recipe_of(name: str, weight: TensorInfo, scale: TensorInfo, *, given_input: bool) -> Recipe:
    """The recipe of a module, its scale checked."""
    n, _ = require_matrix(weight)
    if name in ("NVFP4", "W4A16_NVFP4"):
        _require_dtype(name, scale, ("F8_E4M3",))
        require_groups(weight, scale, 16)
        return recipe("nvfp4" if name == "NVFP4" else "nvfp4_w4a16")
    if name == "W4A8_MXFP4_FP8":
        check_mxfp4(weight.name.removesuffix(".weight"), weight, scale)
        given = recipe_of(recipe("mxfp4").weight, recipe("fp8_tensor_static").input)
        return given if given_input else recipe("mxfp4_a8")
    if name == "MXFP8":
        _require_dtype(name, scale, ("U8", "F8_E8M0"))
        require_grid(scale, weight, (1, 32))
        return recipe("mxfp8")
    _require_dtype(name, scale, _FLOAT_SCALES)
    scale_dtype = SCALE_DTYPES[scale.dtype]
    if name == "FP8":
        require_grid(scale, weight, (-1, -1))
        of = recipe("fp8_tensor_static")
    elif name == "FP8_PER_CHANNEL_PER_TOKEN":
        if scale.shape not in ((n,), (n, 1)):
            raise CheckpointError(
                f"{where(scale)} has shape {scale.shape}, expected ({n},), one a row of {weight.name!r}"
            )
        of = recipe("fp8_channel")
    else:
        of = recipe("fp8_w8a16" if name == "FP8_PB_WO" else "fp8_block", block=_block_of(weight, scale))
    assert of.weight is not None
    return recipe_of(of.weight.replace(scale_dtype=scale_dtype), of.input)


def _block_of(weight: TensorInfo, scale: TensorInfo) -> Block:
    """The block of scales (N/b, 1, K/b, 1): 128, ragged at the ends, or another one that divides both extents."""
    n, k = require_matrix(weight)
    if scale.shape in ((), (1,)) and scale_grid((n, k), (_BLOCK, _BLOCK)) == (1, 1):
        return _BLOCK, _BLOCK
    if len(scale.shape) == 4 and scale.shape[1] == scale.shape[3] == 1 and 0 not in scale.shape:
        rows, cols = scale.shape[0], scale.shape[2]
        if (rows, cols) == scale_grid((n, k), (_BLOCK, _BLOCK)):
            return _BLOCK, _BLOCK
        if n % rows == 0 and k % cols == 0 and n // rows == k // cols:
            return n // rows, k // cols
    rows, cols = scale_grid((n, k), (_BLOCK, _BLOCK))
    raise CheckpointError(
        f"{where(scale)} has shape {scale.shape}, expected {(rows, 1, cols, 1)} for {weight.name!r} of shape {(n, k)} "
        f"in blocks of {_BLOCK}x{_BLOCK}, or a grid of other squares that divide it"
    )


def _require_dtype(name: str, scale: TensorInfo, dtypes: tuple[str, ...]) -> None:
    if scale.dtype not in dtypes:
        raise CheckpointError(
            f"{where(scale)} has dtype {scale.dtype}, expected {' or '.join(dtypes)} as the configuration's quant_algo "
            f"{name!r} says"
        )


def _number(tensors: Tensors, name: str) -> np.ndarray:
    """A scale that is one number, float32."""
    return np.asarray(read_scale(tensors, name), np.float32)
