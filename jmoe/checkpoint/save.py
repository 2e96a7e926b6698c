"""``quantize_checkpoint``: an unquantized checkpoint written anew with quantized weights, one tensor after another."""

import contextlib
import fnmatch
import itertools
import json
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jmoe.arguments import check_type
from jmoe.checkpoint import reader
from jmoe.checkpoint.calibrate import Measured, measure
from jmoe.checkpoint.encode import Form, form_of
from jmoe.checkpoint.experts import expert_prefix, family_of, group_experts
from jmoe.checkpoint.methods import CheckpointError
from jmoe.checkpoint.methods.base import require_matrix, where
from jmoe.checkpoint.progress import Progress, advancing
from jmoe.checkpoint.reader import CONFIG_FILE, Checkpoint
from jmoe.checkpoint.safetensors_header import PICKLE_SUFFIXES, TensorInfo, checked_nbytes
from jmoe.checkpoint.safetensors_writer import SafetensorsWriter
from jmoe.qtensor import QTensor
from jmoe.quantize import check_static_scale, quantize
from jmoe.scheme import Recipe, as_recipe, recipe_of

DEFAULT_SHARD_SIZE = 5 * 10**9

# Modules of a layer that are left alone: routers, embeddings, norms, heads, small ones that engines do not expect to be
# quantized (of multi-token prediction, sparse and linear attention), and GPT-2's, which are held transposed.
_LEFT_ALONE = re.compile(
    r".*embed.*|.*norm.*|wte|wpe|gate|router|shared_expert_gate|(lm_)?head|eh_proj|weights_proj|in_proj_ba"
    r"|c_attn|c_proj|c_fc"
)
# Towers that see and hear, whose own layers are left alone.
_TOWERS = ("visual", "vision", "image", "audio", "speech")
# Projections that engines make one of, so that they are quantized alike and share what is one a tensor.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))

_WEIGHT_SUFFIXES = PICKLE_SUFFIXES | {".safetensors", ".gguf", ".h5", ".msgpack", ".onnx"}
_WEIGHT_INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True)
class Written:
    """What `quantize_checkpoint` wrote.

    Attributes:
      path: the folder.
      method: its ``quant_method``.
      recipe: the name of the recipe.
      quantized: the modules that are quantized.
      left: the modules with a matrix that are left alone, embeddings included.
      files: how many files hold the tensors.
      source_nbytes, nbytes: bytes of all tensors, before and after.
    """

    path: Path
    method: str
    recipe: str
    quantized: tuple[str, ...]
    left: tuple[str, ...]
    files: int
    source_nbytes: int
    nbytes: int


@dataclass(frozen=True)
class _Unit:
    """What is read and written at a time.

    Attributes:
      names: tensors of the source, of one module each; none of a scale that was measured.
      modules: the modules that are quantized together, in the order of ``names``; none where one tensor is copied.
      tensors: name to (dtype, shape) of what is written.
    """

    names: tuple[str, ...]
    modules: tuple[str, ...]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]

    @property
    def nbytes(self) -> int:
        return sum(checked_nbytes(name, dtype, shape) for name, (dtype, shape) in self.tensors.items())


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    recipe: Recipe | str,
    *,
    ignore: Sequence[str] = (),
    input_scales: Mapping[str, float] | None = None,
    calibration: np.ndarray | None = None,
    kv_cache: bool = False,
    shard_size: int = DEFAULT_SHARD_SIZE,
    progress: Progress | None = None,
) -> Written:
    """Writes a checkpoint with the linear layers of ``src`` quantized, in the form that inference engines read.

    Attention, MLPs and experts are quantized, weight by weight exactly as ``jmoe.quantize(w, recipe)`` does. Routers,
    embeddings, norms, ``lm_head`` and whatever stands outside a numbered layer are copied. Recipes of e4m3 weights in
    blocks or per tensor become ``quant_method: "fp8"``, others compressed-tensors. A weight's NVFP4 multiplier is one
    for all projections that engines fuse (q, k and v; gate and up), and its reciprocal is what files hold.

    Memory holds one weight at a time, or those that are fused. The folder appears under its name when it is complete:
    until then everything is in a hidden one beside it, which is removed when anything fails.

    Args:
      src: the folder of an unquantized checkpoint, ``config.json`` and ``*.safetensors``; float32, float16 or bfloat16.
      dst: a folder that does not exist, or is empty.
      recipe: how, such as ``"fp8_block"`` or ``"int4:group=64,scale_dtype=bfloat16"``.
      ignore: modules to leave alone besides: whole components of their names, in which ``*`` stands for anything, or
        ``re:`` and a regular expression that the beginning of the name matches.
      input_scales: module to given activation scale, for recipes that take one (``nvfp4``, ``fp8_tensor_static``); as
        ``jmoe.linear`` takes it.
      calibration: token ids (n,) instead: the scales are measured while the model reads them, in windows of 256. The
        model is one that ``load_model`` knows, and is held in memory whole.
      kv_cache: write scales of a KV cache in e4m3 too, ``self_attn.k_scale`` and ``v_scale``, measured likewise.
      shard_size: bytes of tensors that a file holds at most, if no single layer has more.
      progress: called with bytes read and bytes in all; without it a bar is shown on standard error where that is a
        terminal and it takes a while.

    Returns:
      What was written.

    Raises:
      CheckpointError: ``src`` is quantized already, has nothing to quantize, experts stacked in one tensor or not all
        there, a weight of another dtype, of a shape that the format cannot hold or with an element that is not finite,
        or as ``open`` raises.
      ValueError: a recipe that is unknown, or that no checkpoint format can say; a pattern that no module matches or
        that tears projections apart which engines fuse; an activation scale that is missing, unknown or no positive
        number; a calibration that is of no use, too short or of ids that the model has not; a ``dst`` that exists and
        is not empty; TypeError: an argument of another kind.
      OSError: files cannot be written.
    """
    check_type("dst", dst, (str, os.PathLike), "the path of a folder")
    if isinstance(ignore, str):
        raise TypeError(f"ignore={ignore!r} must be a sequence of patterns, such as [{ignore!r}]")
    if type(shard_size) is not int or shard_size <= 0:
        raise ValueError(f"shard_size={shard_size!r} must be a positive number of bytes")
    form = form_of(as_recipe(recipe))
    _check_calibration(form, input_scales, calibration, kv_cache)
    target = Path(os.path.realpath(dst))
    _check_target(Path(dst), target)
    with reader.open(src) as checkpoint:
        if not Path(src).is_dir():
            raise CheckpointError(f"{src}: is a file, expected the folder of a whole checkpoint")
        if checkpoint.method_name != "none":
            raise CheckpointError(
                f"{src}: is quantized already (quant_method {checkpoint.method_name!r}), expected an unquantized "
                "checkpoint"
            )
        chosen, left, ignored = _choose_modules(checkpoint, ignore)
        units = _plan(checkpoint, form, chosen)
        measured = Measured({}, {})
        if calibration is not None:
            scheme = None if form.input_scale is None else form.recipe.input
            measured = measure(checkpoint, scheme, calibration, kv_cache=kv_cache)
            if scheme is not None:
                input_scales = {module: measured.inputs[module] for module in chosen if module in measured.inputs}
        scales = _check_input_scales(form, chosen, input_scales)
        units += _cache_units(checkpoint, form, measured)
        shards = _shards(units, shard_size)
        source_nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
        with _appearing(target) as folder, advancing(checkpoint.path.resolve().name, source_nbytes, progress) as tell:
            placed: dict[str, str] = {}
            for number, shard in enumerate(shards, 1):
                file = "model.safetensors"
                if len(shards) > 1:
                    file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                announced = {name: entry for unit in shard for name, entry in unit.tensors.items()}
                with SafetensorsWriter(folder / file, announced, {"format": "pt"}) as writer:
                    for unit in shard:
                        _write_unit(writer, checkpoint, form, unit, scales, measured)
                        tell(sum(checkpoint.tensors[name].nbytes for name in unit.names))
                    writer.finish()
                placed.update(dict.fromkeys(announced, file))
            nbytes = sum(unit.nbytes for unit in units)
            if len(shards) > 1:
                index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(placed.items()))}
                _write_json(folder / "model.safetensors.index.json", index)
            _copy_other_files(checkpoint.path, folder)
            # Last: what has no configuration is no checkpoint.
            _write_json(
                folder / CONFIG_FILE, {**checkpoint.config, "quantization_config": form.config(ignored, kv_cache)}
            )
    return Written(
        Path(dst), form.method, form.recipe.name, tuple(chosen), tuple(left), len(shards), source_nbytes, nbytes
    )


def _check_target(named: Path, target: Path) -> None:
    if target.is_dir() and next(target.iterdir(), None) is None:
        return
    if target.exists():
        kind = "is not empty" if target.is_dir() else "is no folder"
        raise ValueError(f"dst={str(named)!r} exists and {kind}; it must be a new or an empty folder")


def _choose_modules(
    checkpoint: Checkpoint, ignore: Sequence[str]
) -> tuple[dict[str, TensorInfo], list[str], list[str]]:
    """The weights to quantize by module, the matrices left alone, and the modules that the configuration must name."""
    by_entry = _ignored_by(checkpoint, ignore)
    chosen: dict[str, TensorInfo] = {}
    left: list[str] = []
    named = {"lm_head"}  # also where it is tied to the embeddings, and has no tensor
    for module, leaves in checkpoint.leaves.items():
        stacked = [name for name in leaves.values() if _is_stacked(module, checkpoint.tensors[name])]
        if stacked and module not in by_entry:
            raise CheckpointError(
                f"{where(checkpoint.tensors[stacked[0]])} holds all experts of a layer, expected tensors of each expert"
            )
        info = checkpoint.tensors[leaves["weight"]] if "weight" in leaves else None
        if info is None or len(info.shape) != 2:
            named.update([module] if stacked else [])
        elif _is_layer_linear(module) and module not in by_entry:
            checkpoint.recipe_for(module)  # raises where its dtype is none of an unquantized weight
            chosen[module] = info
        else:
            left.append(module)
            named.update([] if "embed" in module.rpartition(".")[2] else [module])
    if not chosen:
        besides = f" beside what ignore={list(ignore)!r} leaves alone" if ignore else ""
        raise CheckpointError(f"{checkpoint.path}: has no linear layer to quantize{besides}")
    _check_whole(checkpoint, chosen, by_entry)
    return chosen, left, sorted(named)


def _ignored_by(checkpoint: Checkpoint, ignore: Sequence[str]) -> dict[str, str]:
    """Modules that entries of ``ignore`` mean, each with the first one that does."""
    found: dict[str, str] = {}
    for entry in ignore:
        matches = _matcher(entry)
        meant = [module for module in checkpoint.leaves if matches(module)]
        if not meant:
            raise ValueError(
                f"ignore={entry!r} matches none of the {len(checkpoint.leaves)} modules of {checkpoint.path}; it is "
                "whole components of a name, such as 'self_attn' or 'layers.0.*.o_proj', or 're:' and a regular "
                "expression"
            )
        found = {**dict.fromkeys(meant, entry), **found}
    return found


def _matcher(entry: str) -> Callable[[str], bool]:
    check_type("ignore", entry, str, "a sequence of patterns, such as ['self_attn']")
    if not entry.startswith("re:"):
        pattern = re.compile(fnmatch.translate(f"*.{entry}.*"))
        return lambda module: pattern.match(f".{module}.") is not None
    try:
        expression = re.compile(entry[3:])
    except re.error as error:
        raise ValueError(f"ignore={entry!r} must be 're:' and a regular expression: {error}") from error
    return lambda module: expression.match(module) is not None


def _is_layer_linear(module: str) -> bool:
    """Whether a matrix of that name is a linear layer that is quantized by default."""
    *above, last = module.split(".")
    in_layer = any(part.isdecimal() for part in above) and not any(part.startswith(_TOWERS) for part in above)
    return in_layer and _LEFT_ALONE.fullmatch(last) is None


def _is_stacked(module: str, info: TensorInfo) -> bool:
    """Whether a tensor holds the weights of all experts of a layer."""
    return module.rpartition(".")[2] == "experts" and len(info.shape) == 3


def _fused_with(module: str) -> tuple[str, ...]:
    """The modules that engines fuse with this one, itself among them."""
    parent, dot, last = module.rpartition(".")
    return next((tuple(f"{parent}{dot}{name}" for name in names) for names in _FUSED if last in names), (module,))


def _check_whole(checkpoint: Checkpoint, chosen: Mapping[str, TensorInfo], by_entry: Mapping[str, str]) -> None:
    """What engines make one layer of is whole, and quantized throughout or not at all."""
    for layer, found in group_experts(chosen).items():
        if family_of(found) is not None:
            checkpoint.experts(layer)
    for other in itertools.chain.from_iterable(map(_fused_with, chosen)):
        if other not in chosen and other not in by_entry and "weight" in checkpoint.leaves.get(other, ()):
            require_matrix(checkpoint.tensors[checkpoint.leaves[other]["weight"]])
    experts = {prefix: module for module in chosen if (prefix := expert_prefix(module)) is not None}
    for module, entry in by_entry.items():
        if not _is_layer_linear(module):
            continue
        twin = next((other for other in _fused_with(module) if other in chosen), None)
        twin = twin or experts.get(expert_prefix(module) or "")
        if twin is not None:
            raise ValueError(
                f"ignore={entry!r} leaves {module} alone, but not {twin}, and engines make one layer of them: ignore "
                "all of it or nothing"
            )


def _check_input_scales(
    form: Form, chosen: Mapping[str, TensorInfo], given: Mapping[str, float] | None
) -> dict[str, np.float32]:
    """The given activation scales as the file holds them; none where the recipe has no use for any."""
    name = form.recipe.name
    if form.input_scale is None:
        if given is not None:
            raise ValueError(f"input_scales is given, but recipe {name!r} takes no activation scale")
        return {}
    given = given or {}
    if missing := [module for module in chosen if module not in given]:
        assert form.recipe.input is not None
        measured = None if form.scheme.global_scale else form.recipe.input.replace(static=False)
        raise ValueError(
            f"input_scales has none for {missing[0]}, but recipe {name!r} takes one a layer, as calibration gives; "
            f"{recipe_of(form.scheme, measured).name!r} needs none"
        )
    if unknown := [module for module in given if module not in chosen]:
        raise ValueError(f"input_scales has one for {unknown[0]!r}, which is no layer that is quantized")
    return {
        module: np.float32(check_static_scale(f"input_scales[{module!r}]", given[module]).reshape(()))
        for module in chosen
    }


def _check_calibration(
    form: Form, input_scales: Mapping[str, float] | None, calibration: np.ndarray | None, kv_cache: bool
) -> None:
    if calibration is None:
        if kv_cache:
            raise ValueError("kv_cache=True takes calibration, token ids over which keys and values are measured")
        return
    if form.input_scale is None and not kv_cache:
        raise ValueError(f"calibration is given, but recipe {form.recipe.name!r} takes no activation scale")
    if input_scales is not None:
        raise ValueError("input_scales and calibration are both given, but one of them says what the scales are")


def _cache_units(checkpoint: Checkpoint, form: Form, measured: Measured) -> list[_Unit]:
    """What is written of a KV cache's scales: with no source of its own."""
    if measured.kv_cache and checkpoint.kv_scales:
        raise CheckpointError(f"{checkpoint.path}: has {checkpoint.kv_scales[0]!r} already, a scale of its KV cache")
    return [_Unit((), (), {name: ("F32", form.scalar)}) for name in measured.kv_cache]


def _plan(checkpoint: Checkpoint, form: Form, chosen: Mapping[str, TensorInfo]) -> list[_Unit]:
    """Everything that is read and written, in the order of the files."""
    units: list[_Unit] = []
    done: set[str] = set()
    for name in checkpoint.tensors:
        module, _, leaf = name.rpartition(".")
        info = checkpoint.tensors[name]
        if module not in chosen or leaf != "weight":
            units.append(_Unit((name,), (), {name: (info.dtype, info.shape)}))
        elif module not in done:
            shared = form.scheme.global_scale is not None
            modules = tuple(other for other in _fused_with(module) if other in chosen) if shared else (module,)
            if len({chosen[other].shape[1] for other in modules}) > 1:
                modules = (module,)
            done.update(modules)
            units.append(_quantized_unit(checkpoint, form, {other: chosen[other] for other in modules}))
    repeated = [name for name, uses in Counter(name for unit in units for name in unit.tensors).items() if uses > 1]
    if repeated:
        raise CheckpointError(
            f"{checkpoint.path}: has a tensor {repeated[0]!r}, a name that the scales of a layer take"
        )
    return units


def _quantized_unit(checkpoint: Checkpoint, form: Form, weights: Mapping[str, TensorInfo]) -> _Unit:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for module, info in weights.items():
        shape = require_matrix(info)
        if reason := form.refusal(shape):
            raise CheckpointError(f"{where(info)} {reason}; leave it alone with ignore, or take another recipe")
        tensors |= {f"{module}.{leaf}": entry for leaf, entry in form.leaves(shape).items()}
    return _Unit(tuple(checkpoint.leaves[module]["weight"] for module in weights), tuple(weights), tensors)


def _shards(units: Iterable[_Unit], size: int) -> list[list[_Unit]]:
    """Units in their order, as many to a file as it may hold."""
    shards: list[list[_Unit]] = [[]]
    held = 0
    for unit in units:
        if shards[-1] and held + unit.nbytes > size:
            shards.append([])
            held = 0
        shards[-1].append(unit)
        held += unit.nbytes
    return shards


def _write_unit(
    writer: SafetensorsWriter,
    checkpoint: Checkpoint,
    form: Form,
    unit: _Unit,
    scales: Mapping[str, np.float32],
    measured: Measured,
) -> None:
    if unit.modules:
        for module, q in zip(unit.modules, _quantize(checkpoint, form.recipe, unit.names), strict=True):
            for leaf, array in form.encode(q, scales.get(module)).items():
                writer.write(f"{module}.{leaf}", array)
    elif not unit.names:
        [(name, (_, shape))] = unit.tensors.items()
        writer.write(name, np.full(shape, measured.kv_cache[name], np.float32))
    else:
        [(name, (dtype, shape))] = unit.tensors.items()
        data = np.ascontiguousarray(checkpoint.read(name)).reshape(-1).view(np.uint8)
        writer.write(name, (dtype, shape, data.data))
    for name in unit.names:
        checkpoint.release(name)


def _quantize(checkpoint: Checkpoint, recipe: Recipe, names: Sequence[str]) -> Iterator[QTensor]:
    """The named weights, those of several as one, so that they share what is one a tensor."""
    weights = []
    for name in names:
        weights.append(jnp.asarray(checkpoint.read(name)))
        if not bool(jnp.isfinite(weights[-1]).all()):
            index = np.argwhere(~np.isfinite(np.asarray(weights[-1], np.float32)))[0].tolist()
            raise CheckpointError(
                f"{where(checkpoint.tensors[name])} holds {weights[-1][tuple(index)]} at {index}, expected finite "
                "numbers"
            )
    if len(weights) == 1:
        yield quantize(weights[0], recipe)
        return
    dtype = jnp.result_type(*weights)
    q = quantize(jnp.concatenate([weight.astype(dtype) for weight in weights]), recipe)
    rows = itertools.accumulate((weight.shape[0] for weight in weights), initial=0)
    for start, stop in itertools.pairwise(rows):
        # Blocks have one row wherever a global scale is shared.
        yield replace(q, data=q.data[start:stop], scale=q.scale[start:stop])


@contextlib.contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A hidden folder that takes the name ``target`` if all goes well, and is removed if anything does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    folder.mkdir()
    try:
        yield folder
        folder.replace(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _copy_other_files(source: Path, folder: Path) -> None:
    """Copies what is beside the weights, such as the tokenizer's files."""
    for above, folders, files in os.walk(source):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(above, name)
            weights = path.suffix in _WEIGHT_SUFFIXES or name.endswith(_WEIGHT_INDEX_SUFFIX)
            if not weights and not name.startswith(".") and path.is_file() and path != source / CONFIG_FILE:
                copy = folder / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    with path.open("x", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
