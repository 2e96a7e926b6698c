"""``open``: a checkpoint's configuration, the headers of its tensors, and the method that reads them."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmoe.arguments import check_type
from jmoe.checkpoint.experts import Experts, expert_prefix, experts_of, group_experts
from jmoe.checkpoint.fused import show_each_expert
from jmoe.checkpoint.methods import CheckpointError, Method, method_for, modelopt, mxfp4
from jmoe.checkpoint.methods.base import Files, present_leaves
from jmoe.checkpoint.renamed import Names, RenamedFiles
from jmoe.checkpoint.safetensors import ClosedOnExit, TensorInfo, open_safetensors
from jmoe.checkpoint.safetensors_header import MAX_JSON_BYTES, parse_json
from jmoe.checkpoint.summary import Kind, ModuleSummary, Summary
from jmoe.qtensor import rows_beyond
from jmoe.scheme import Recipe

CONFIG_FILE = "config.json"

_MODULE = "the name of a module, such as 'model.layers.0.self_attn.o_proj'"

# Files that hold the quantization configuration where config.json does not, and the method where they do not say.
_SIDE_FILES = ((modelopt.SIDE_FILE, "modelopt"), ("quantize_config.json", "gptq"), ("quant_config.json", "awq"))

# What the number of experts is called in config.json.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_KV_SCALE = re.compile(
    r"(.+\.)?((k|v|q|kv)_scale|(k|v)_zero_point|(k|v)_proj\.(k_scale|v_scale|output_scale)|prob_output_scale"
    r"|(k|v)_cache\.scale|(k|v)_fake_quantizer\.qscale_act)"
)


@dataclass(frozen=True)
class _Quantization:
    """Where a quantization configuration was found, whose it is, and what it says."""

    where: str
    name: str
    settings: Mapping[str, Any]


def open(path: str | os.PathLike[str], *, names: Names = ()) -> "Checkpoint":
    r"""Opens a checkpoint: the folder of ``config.json`` and ``*.safetensors``, or one of these files.

    Args:
      path: the folder or file.
      names: (regular expression, replacement) pairs that give tensors the names of a known family, one after the other
        as by ``re.sub``: ``[(r"\.ffn\.", ".mlp."), (r"\.fc1\.", ".up_proj.")]``. Lists of modules in the configuration
        are held against the new names.

    Raises:
      CheckpointError: no or a malformed config.json, a method that is not supported, or a configuration that says
        quantized where no tensor is, or the other way round.
      SafetensorsError: missing, truncated or malformed files, among them pickled ones.
      ValueError: an entry of ``names`` that is no expression or changes no name; TypeError: no path, or no such pairs.
    """
    check_type("path", path, (str, os.PathLike), "the path of a folder or file")
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    files: Files = open_safetensors(folder if path.name == CONFIG_FILE else path)
    if names:
        files = RenamedFiles(files, names)
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder}: holds no {CONFIG_FILE}, expected one beside the weights")
    config = _read_json(folder / CONFIG_FILE)
    found = _find_quantization(folder, config)
    if found.name == "none" and mxfp4.has_openai_names(files.tensors):
        found = replace(found, name="mxfp4")
    return Checkpoint(folder, config, found, method_for(found.name, found.settings, found.where), files)


class Checkpoint(ClosedOnExit):
    """A checkpoint on disk, made by `open`. A context manager.

    Attributes:
      path: its folder.
      config: what ``config.json`` says.
      quantization_config: the quantization configuration, wherever it was found; None for an unquantized checkpoint.
      method_name: the name of the quantization method; ``"none"`` for an unquantized checkpoint.
      method: the method, set up.
      tensors: name to header of every tensor; looking one up opens the file that holds it. Experts that a file has in
        one tensor are shown as tensors of each expert.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        quantization: _Quantization,
        method: Method,
        files: Files,
    ) -> None:
        self.path = path
        self.config = MappingProxyType(dict(config))
        self.quantization_config = quantization.settings or None
        self.method_name = quantization.name
        self.method = method
        self._files: Files = show_each_expert(method.view(files))
        self._check_quantization(quantization)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._files.tensors

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of ``config``: ``text_config`` where there is one, else all of it."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def model_type(self) -> str:
        """``model_type`` of the language model; empty where the configuration has none."""
        return str(self.text_config.get("model_type") or self.config.get("model_type") or "")

    @cached_property
    def leaves(self) -> Mapping[str, Mapping[str, str]]:
        """Module to leaf to the full name of the tensor; without the scales of KV caches (see `kv_scales`)."""
        found: dict[str, dict[str, str]] = {}
        for name in self.tensors:
            if not _KV_SCALE.fullmatch(name):
                module, _, leaf = name.rpartition(".")
                found.setdefault(module, {})[leaf] = name
        return found

    @cached_property
    def kv_scales(self) -> tuple[str, ...]:
        """The names of scales that belong to a KV cache and not to a weight."""
        return tuple(name for name in self.tensors if _KV_SCALE.fullmatch(name))

    @cached_property
    def expert_prefixes(self) -> tuple[str, ...]:
        """Where there are experts, such as ``model.layers.0.mlp.experts``."""
        return tuple(self._experts)

    @cached_property
    def _experts(self) -> dict[str, dict[int, set[str]]]:
        try:
            return group_experts(self.leaves)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None

    def experts(self, prefix: str) -> Experts:
        """The experts below ``prefix``, all of them there.

        Raises:
          CheckpointError: no experts there, one or a projection of one missing, names of no known family, or a number
            other than the configuration's.
        """
        check_type(
            "prefix", prefix, str, "what comes before the experts' numbers, such as 'model.layers.0.mlp.experts'"
        )
        if prefix not in self._experts:
            known = ", ".join(self.expert_prefixes[:3]) + (", ..." if len(self.expert_prefixes) > 3 else "")
            raise CheckpointError(
                f"{self.path}: has no experts <number>.<projection> below {prefix!r}; "
                + (f"there are some below {known}" if known else "there are none at all")
            )
        found = experts_of(str(self.path), prefix, self._experts[prefix])
        for key in EXPERT_COUNTS:
            count = self.text_config.get(key)
            if type(count) is int and count != found.count:
                raise CheckpointError(
                    f"{self.path}: {prefix} has {found.count} experts, expected {count} as {CONFIG_FILE} says ({key})"
                )
        return found

    def recipe_for(self, module: str) -> Recipe:
        """The recipe of a module; no data is read. Raises as `Method.recipe_for` does."""
        check_type("module", module, str, _MODULE)
        return self.method.recipe_for(module, present_leaves(self.tensors, module, self.method.leaves))

    def shape_for(self, module: str) -> tuple[int, ...]:
        """The logical shape of a module's weight; no weight is read. Raises as `Method.recipe_for` does."""
        check_type("module", module, str, _MODULE)
        present = present_leaves(self.tensors, module, self.method.leaves)
        self.method.recipe_for(module, present)
        return self.method.read_shape(self, module)

    def has_weight(self, module: str) -> bool:
        """Whether a module has a weight, or what only quantized weights have; tensors without a module are none."""
        if not module:
            return False
        leaves = self.leaves.get(module, {})
        return "weight" in leaves or self.method.is_quantized(leaves)

    def read(self, name: str) -> np.ndarray:
        """A tensor as a view of its file, exactly as stored; see ``SafetensorsFile.read``."""
        return self._files.read(name)

    def release(self, name: str) -> None:
        """Lets go of the memory in which the tensor's part of the file is cached for this process."""
        self._files.release(name)

    def release_module(self, module: str) -> None:
        """`release` for every tensor of a module."""
        for name in self.leaves.get(module, {}).values():
            self.release(name)

    def close(self) -> None:
        """Ends reading; arrays read before stay valid."""
        self._files.close()

    def input_scales(self) -> dict[str, float]:
        """The given activation scale of every module that has one. Reads these numbers, and no weight."""
        scales = ((m, self.method.load_input_scale(self, m)) for m in self.leaves if self.has_weight(m))
        return {module: float(scale) for module, scale in scales if scale is not None}

    def rows_beyond(self) -> dict[str, tuple[int, int]]:
        """Of MXFP4 weights for FP8 activations: how many rows ``qtensor.rows_beyond`` finds, and how many there are.

        Reads these weights, one at a time.
        """
        found = {}
        for module in self.leaves:
            if self.has_weight(module) and _goes_into_fp8(self.recipe_for(module)):
                rows = rows_beyond(jax.tree.map(jnp.asarray, self.method.load_weight(self, module)))
                found[module] = int(rows.sum()), rows.size
                self.release_module(module)
        return found

    def summary(self) -> Summary:
        """An account of every module, from headers alone.

        Raises:
          CheckpointError: tensors that are missing or do not fit; an experts' layer that is not whole.
        """
        return Summary(
            path=self.path,
            model_type=self.model_type,
            method=self.method_name,
            modules=tuple(self._summaries()),
            kv_scales=self.kv_scales,
        )

    def _summaries(self) -> Iterator[ModuleSummary]:
        done = set()
        for module, leaves in self.leaves.items():
            prefix = expert_prefix(module)
            if prefix is None:
                yield self._module_summary(module, leaves)
            elif prefix not in done:
                done.add(prefix)
                yield from self._expert_summaries(self.experts(prefix))

    def _module_summary(self, module: str, leaves: Mapping[str, str]) -> ModuleSummary:
        infos = {leaf: self.tensors[name] for leaf, name in leaves.items()}
        recipe = self.recipe_for(module) if self.has_weight(module) else None
        largest = max(infos.values(), key=lambda info: info.nbytes)
        shape = largest.shape if recipe is None else self.shape_for(module)
        kind: Kind = "other" if recipe is None or len(shape) != 2 else "embedding" if "embed" in module else "linear"
        return ModuleSummary(module, kind, recipe, shape, sum(i.nbytes for i in infos.values()), len(infos))

    def _expert_summaries(self, experts: Experts) -> Iterator[ModuleSummary]:
        for part, projections in (("w13", experts.names.halves), ("w2", (experts.names.down,))):
            modules = [experts.module(e, p) for e in range(experts.count) for p in projections]
            recipes = {self.recipe_for(module) for module in modules}
            infos = [self.tensors[name] for module in modules for name in self.leaves[module].values()]
            lead = (experts.count, len(projections)) if part == "w13" else (experts.count,)
            if len(recipes) != 1:
                names = " and ".join(sorted(recipe.name for recipe in recipes))
                raise CheckpointError(f"{self.path}: the experts of {experts.prefix} differ among each other: {names}")
            name, shape = f"{experts.prefix}.{part}", (*lead, *self.shape_for(modules[0]))
            nbytes = sum(info.nbytes for info in infos)
            yield ModuleSummary(name, "experts", recipes.pop(), shape, nbytes, len(infos))

    def _check_quantization(self, quantization: _Quantization) -> None:
        """What the configuration says of the whole checkpoint against the names of its tensors."""
        quantized = {module for module, leaves in self.leaves.items() if self.method.is_quantized(leaves)}
        if quantization.name == "none":
            if quantized:
                raise CheckpointError(
                    f"{self.path}: has the tensors {', '.join(self.leaves[min(quantized)].values())} of a quantized "
                    f"module, but no quantization_config in {CONFIG_FILE} or a file beside it"
                )
            return
        if not quantized:
            raise CheckpointError(
                f"{quantization.where} says quant_method {quantization.name!r}, but none of the {len(self.tensors)} "
                f"tensors in {self.path} is a scale or code of that method"
            )
        roles: dict[str, str] = {}
        for module in quantized:
            roles.setdefault(_role(module), module)
        for module, leaves in self.leaves.items():
            twin = roles.get(_role(module))
            plain = twin is not None and module not in quantized and "weight" in leaves
            if plain and self.method.ignored_by(module) is None:
                raise CheckpointError(
                    f"{self.path}: {module!r} has no scale, but {twin!r} has one and {quantization.where} does not "
                    "name it among the modules that are left unquantized"
                )


def _goes_into_fp8(recipe: Recipe) -> bool:
    """Whether the scales of a weight go into the exponents of FP8 operands."""
    weight, x = recipe.weight, recipe.input
    if weight is None or x is None or (weight.format, weight.scale_dtype) != ("e2m1", "e8m0"):
        return False
    return weight.block == (1, 32) and x.format == "e4m3" and x.block[1] == -1


def _role(module: str) -> str:
    """The module's name with every number left open: what repeats from layer to layer and expert to expert."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "#", module)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: is longer than {MAX_JSON_BYTES} bytes, the most that a configuration may have")
    return parse_json(f"{path}: it", raw)


def _find_quantization(folder: Path, config: Mapping[str, Any]) -> _Quantization:
    """The quantization configuration, in the order in which the places take precedence."""
    file = folder / CONFIG_FILE
    nested = config.get("text_config")
    places: list[tuple[Mapping[str, Any], str, str, str | None]] = [
        (config, "quantization_config", "quantization_config", None)
    ]
    if isinstance(nested, dict):
        places.append((nested, "quantization_config", "text_config.quantization_config", None))
    places.append((config, "compression_config", "compression_config", "compressed-tensors"))
    for holder, key, shown, default in places:
        if (value := holder.get(key)) is not None and value != {}:
            return _with_side_file(folder, _quantization(f"{file}: its {shown}", value, default))
    for name, default in _SIDE_FILES:
        if (folder / name).is_file():
            return _quantization(f"{folder / name}: it", _read_json(folder / name), default)
    return _Quantization(str(file), "none", {})


def _with_side_file(folder: Path, found: _Quantization) -> _Quantization:
    """ModelOpt's configuration is in two places at once, and one of them may say more."""
    side = folder / modelopt.SIDE_FILE
    if (found.name != "modelopt" and "quant_algo" not in found.settings) or not side.is_file():
        return found
    settings = _read_json(side)
    try:
        return replace(found, settings=modelopt.joined(found.settings, settings))
    except CheckpointError as error:
        raise CheckpointError(f"{found.where} {error}") from None


def _quantization(where: str, settings: object, default: str | None) -> _Quantization:
    if not isinstance(settings, dict):
        raise CheckpointError(f"{where} is {settings!r}, expected an object")
    producer = settings.get("producer")
    made_by = producer.get("name") if isinstance(producer, dict) else None
    name = settings.get("quant_method") or default or made_by
    if not isinstance(name, str):
        raise CheckpointError(f"{where} has quant_method {name!r}, expected the name of a method")
    return _Quantization(where, name, settings)
