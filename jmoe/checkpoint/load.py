"""``load_model``: a whole checkpoint as a model."""

import contextlib
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jmoe.arguments import COMPUTE_DTYPES, float_dtype
from jmoe.checkpoint import reader
from jmoe.checkpoint.experts import expert_prefix
from jmoe.checkpoint.methods import CheckpointError
from jmoe.checkpoint.methods.base import where
from jmoe.checkpoint.placement import Device, Placement, place_array
from jmoe.checkpoint.progress import Progress, advancing
from jmoe.checkpoint.reader import CONFIG_FILE, EXPERT_COUNTS, Checkpoint
from jmoe.checkpoint.weights import (
    host_tensor,
    load_bias,
    load_expert_biases,
    load_expert_scales,
    load_experts,
    load_input_scale,
    load_linear,
    where_weight,
)
from jmoe.config import config
from jmoe.models import Decoder, DecoderConfig
from jmoe.models.decoder import Place, Rules, ShardingRules
from jmoe.nn import FusedMoE, Linear, param
from jmoe.ops.prepare import prepare
from jmoe.qtensor import QTensor
from jmoe.quantize import quantize
from jmoe.scheme import Recipe
from jmoe.sharding import AxisName

# Tensors that files carry and the model makes itself.
_COMPUTED = re.compile(r"(.+\.)?rotary_emb\.inv_freq")

_NUMBERED = re.compile(r"\b(layers|experts)\.([0-9]+)\b")
# Layers or experts of a model of which no tensor is there; what it lacks is named then.
_MOST_WITHOUT_TENSORS = 1024


def load_model(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    param_dtype: jax.typing.DTypeLike | None = None,
    rules: Rules | None = None,
    weight_only: bool = False,
    implementation: str | None = None,
    device: Device = None,
    mesh: Mesh | None = None,
    sharding: ShardingRules = (),
    progress: Progress | None = None,
) -> Decoder:
    """The model of a checkpoint, its weights quantized as the checkpoint has them and prepared (``jmoe.prepare``).

    Every tensor of the checkpoint is accounted for before any is read: it has a place in the model, the model has no
    use for it (rotary frequencies, scales of a KV cache, the lm_head of tied embeddings), or it is an error. Weights
    are then streamed: beyond the model, memory holds one stacked tensor.

    Args:
      path: a checkpoint's folder or file, or what ``open`` made of it.
      dtype: what is computed in.
      param_dtype: what weights that are not quantized are held in (the router keeps the file's); dtype by default.
      rules: (regular expression, recipe or None) pairs on the model's module paths; the first that matches the whole
        path decides, and quantizes a weight that the checkpoint has unquantized as it is loaded; None leaves it alone.
      weight_only: leave activations alone, whatever the checkpoint or rules say of them.
      implementation: of the products, by name; None lets the selector choose.
      device: where to: what ``jax.device_put`` takes, or a function of a variable's path (``layers.0.mlp.w13_scale``)
        and shape that gives such a thing, for instance a sharding.
      mesh: shard over this mesh instead (default: the one in force, where there are rules of sharding). Every process
        reads the parts of its own devices; the model is called with the mesh in force (``jax.set_mesh``).
      sharding: (regular expression, mesh axes) pairs on the model's module paths, as for ``Decoder``: (out, in) for
        linear layers, (experts, intermediate, hidden) for ``layers.0.mlp``. What no rule matches is on every device.
      progress: called with bytes loaded and bytes in all as weights arrive; without it a bar is shown on standard error
        where that is a terminal and loading takes a while.

    Returns:
      A ``jmoe.models.Decoder``.

    Raises:
      CheckpointError: no model of that kind, tensors missing, unknown or of another shape than the configuration says,
        or as for ``load_linear`` and ``load_experts``.
      ValueError: a rule for a weight that the checkpoint has quantized otherwise, or with a given activation scale that
        the checkpoint has not; a rule of sharding that matches nothing, or axes that the mesh has not or that do not
        divide a weight; ``device`` and a mesh; TypeError: a dtype that nothing is computed in.
      Whatever ``jmoe.select`` raises, where nothing serves a weight or ``implementation`` does not.
    """
    dtype = float_dtype("dtype", dtype, COMPUTE_DTYPES)
    param_dtype = dtype if param_dtype is None else float_dtype("param_dtype", param_dtype, COMPUTE_DTYPES)
    placement = Placement(device, mesh, () if sharding else None)
    with contextlib.ExitStack() as stack:
        if placement.mesh is not None:
            stack.enter_context(jax.set_mesh(placement.mesh))
        checkpoint = path if isinstance(path, Checkpoint) else stack.enter_context(reader.open(path))
        model = _empty_model(checkpoint, dtype, param_dtype, rules or (), sharding, implementation)
        modules = {".".join(map(str, keys)): module for keys, module in nnx.iter_modules(model)}
        places = model.parameter_places()
        _check_complete(checkpoint, places, model.config.tie_word_embeddings)
        _check_shapes(checkpoint, places, modules)
        total = sum(info.nbytes for info in checkpoint.tensors.values())
        advance = stack.enter_context(advancing(checkpoint.path.resolve().name, total, progress))
        if implementation is not None:
            stack.enter_context(config(implementation=implementation))  # what weights are prepared for
        loader = _Loader(checkpoint, param_dtype, weight_only, placement)
        done = set()
        for name, place in places.items():
            module = modules[place.path]
            source = name.rpartition(".")[0]
            if place.index:
                source = expert_prefix(source) or source
            elif not isinstance(module, Linear):
                source = name
            if source not in done:
                done.add(source)
                loader.fill(module, place, source)
                advance(_nbytes(checkpoint, source))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(model)))
    return model


class _Loader:
    """Fills modules of a model from a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: jax.typing.DTypeLike, weight_only: bool, placement: Placement
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._weight_only = weight_only
        self._placement = placement

    def fill(self, module: nnx.Module, place: Place, source: str) -> None:
        """Loads ``source`` into the model's ``module``: a linear, the experts below a prefix, or else one tensor."""
        if place.index:
            assert isinstance(module, FusedMoE)
            self._fill_experts(module, place.path, source)
        elif isinstance(module, Linear):
            self._fill_linear(module, place.path, source)
        else:
            # A router's logits are float32 whatever its weight is in, so it is not rounded.
            dtype = None if isinstance(module, FusedMoE) else self._dtype
            host = host_tensor(self._checkpoint, source, dtype)
            whole = f"{place.path}.{place.name}"
            param.assign(module, place.name, place_array(whole, host, self._placement))

    def _fill_linear(self, module: Linear, path: str, source: str) -> None:
        where = self._where(path, module.sharding)
        weight = load_linear(self._checkpoint, source, dtype=self._dtype, **where)
        weight = prepare(self._as_ruled(path, module.recipe, weight), op="linear")
        scale = load_input_scale(self._checkpoint, source)
        module.set_weight(weight, input_scale=self._input_scale(path, "weight", weight, scale))
        if module.bias is not None:
            module.set_bias(load_bias(self._checkpoint, source, dtype=self._dtype, **where))

    def _fill_experts(self, module: FusedMoE, path: str, prefix: str) -> None:
        target, where = module.recipe, self._where(path, module.sharding)
        # A recipe whose activation scale is a given one is refused below.
        recipe = None if target.input is not None and target.input.static else target
        w13, w2 = load_experts(self._checkpoint, prefix, recipe=recipe, dtype=self._dtype, **where)
        w13 = prepare(self._as_ruled(path, target, w13), op="moe")
        w2 = prepare(self._as_ruled(path, target, w2), op="moe")
        input_scale, intermediate_scale = load_expert_scales(self._checkpoint, prefix)
        module.set_w13(w13, input_scale=self._input_scale(path, "w13", w13, input_scale))
        module.set_w2(w2, input_scale=self._input_scale(path, "w2", w2, intermediate_scale))
        if module.b13 is not None:
            module.set_biases(*load_expert_biases(self._checkpoint, prefix, dtype=self._dtype, **where))

    def _input_scale(self, path: str, name: str, weight: QTensor | Array, scale: Array | None) -> Array | None:
        """The given scale of the activation that meets a weight, if it has one; on a mesh every device has it."""
        if scale is None or not _is_static(weight):
            return None
        return place_array(f"{path}.{param.input_scale_name(name)}", np.asarray(scale), self._placement)

    def _where(self, path: str, sharding: Sequence[AxisName]) -> dict[str, Any]:
        """Where the variables of the module at ``path`` go, as arguments of the functions that load them."""
        if self._placement.mesh is not None:
            return {"mesh": self._placement.mesh, "sharding": sharding}
        whole = self._placement.device
        return {"device": (lambda name, shape: whole(f"{path}.{name}", shape)) if callable(whole) else whole}

    def _as_ruled(self, path: str, target: Recipe, weight: QTensor | Array) -> QTensor | Array:
        """A loaded weight as a rule wants it: ``target`` is unquantized where no rule says otherwise."""
        if target.weight is not None:
            scheme = weight.scheme if isinstance(weight, QTensor) else None
            if scheme not in (None, target.weight):
                raise ValueError(
                    f"rules give {path} the recipe {target.name!r}, but the checkpoint has it as {weight!r}"
                )
            given = weight.input_scheme if isinstance(weight, QTensor) else None
            if target.input is not None and target.input.static and given != target.input:
                raise ValueError(
                    f"rules give {path} the recipe {target.name!r}, whose activation scale is a given one, and the "
                    "checkpoint has none: load it otherwise, then calibrate"
                )
            if isinstance(weight, QTensor):
                weight = weight.with_input_scheme(target.input)
            else:
                weight = quantize(weight, target)
        return weight.with_input_scheme(None) if self._weight_only and isinstance(weight, QTensor) else weight


def _is_static(weight: QTensor | Array) -> bool:
    """Whether the activation that meets the weight has a given scale."""
    return isinstance(weight, QTensor) and weight.input_scheme is not None and weight.input_scheme.static


def decoder_config(checkpoint: Checkpoint) -> DecoderConfig:
    """The configuration of a checkpoint's model, none of more layers or experts than there are tensors of.

    Raises:
      CheckpointError: no model of that kind, a value that it does not have, or such a number.
    """
    file = checkpoint.path / CONFIG_FILE
    settings = checkpoint.text_config
    # Before a model is made, which takes time and memory for each of them.
    numbered: dict[str, set[str]] = {"layers": set(), "experts": set()}
    for module in checkpoint.leaves:
        for what, number in _NUMBERED.findall(module):
            numbered[what].add(number)
    for what, keys in (("layers", ("num_hidden_layers",)), ("experts", EXPERT_COUNTS)):
        held = len(numbered[what])
        for key in keys:
            count = settings.get(key)
            if type(count) is int and count > (held or _MOST_WITHOUT_TENSORS):
                raise CheckpointError(f"{file}: {key}={count}, but the number of {what} with tensors is {held}")
    try:
        return DecoderConfig.from_hf(settings)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _empty_model(
    checkpoint: Checkpoint,
    dtype: jax.typing.DTypeLike,
    param_dtype: jax.typing.DTypeLike,
    rules: Rules,
    sharding: ShardingRules,
    implementation: str | None,
) -> Decoder:
    """The model without memory; rules have given their recipes to its modules."""
    model_config = decoder_config(checkpoint)
    return nnx.eval_shape(
        lambda: Decoder(
            model_config,
            rules=rules,
            dtype=dtype,
            param_dtype=param_dtype,
            sharding=sharding,
            implementation=implementation,
        )
    )


def _check_complete(checkpoint: Checkpoint, places: dict[str, Place], tied: bool) -> None:
    """Every tensor has a place or is known to be of no use, and every place has its tensors."""
    missing = []
    wanted: dict[str, set[str]] = {}
    for name in places:
        module, _, leaf = name.rpartition(".")
        leaves = wanted.setdefault(module, set())
        if leaf == "weight":
            leaves.update(("weight", *checkpoint.method.leaves))
            found = checkpoint.has_weight(module)
        else:
            leaves.add(leaf)
            found = name in checkpoint.tensors
        if not found:
            missing.append(name)
    if missing:
        raise CheckpointError(f"{checkpoint.path}: lacks {_list(missing)}, which the model has")
    unknown = [
        name
        for module, leaves in checkpoint.leaves.items()
        for leaf, name in leaves.items()
        if leaf not in wanted.get(module, ()) and not _COMPUTED.fullmatch(name) and not (tied and module == "lm_head")
    ]
    if unknown:
        raise CheckpointError(f"{checkpoint.path}: holds {_list(unknown)}, for which the model has no place")


def _check_shapes(checkpoint: Checkpoint, places: dict[str, Place], modules: dict[str, nnx.Module]) -> None:
    """Shapes from the headers against those of the model, which follow from the configuration."""
    for name, place in places.items():
        module, _, leaf = name.rpartition(".")
        shape = checkpoint.shape_for(module) if leaf == "weight" else checkpoint.tensors[name].shape
        expected = _shape_in_model(modules[place.path], place.name)[len(place.index) :]
        if shape != expected:
            at = where_weight(checkpoint, module) if leaf == "weight" else where(checkpoint.tensors[name])
            raise CheckpointError(f"{at} has shape {shape}, expected {expected} as {CONFIG_FILE} says")


def _shape_in_model(module: nnx.Module, name: str) -> tuple[int, ...]:
    if isinstance(module, Linear) and name == "weight":
        return tuple(module.qweight.shape)
    if isinstance(module, FusedMoE) and name in ("w13", "w2"):
        return tuple((module.qw13 if name == "w13" else module.qw2).shape)
    return tuple(getattr(module, name).get_raw_value().shape)


def _list(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _nbytes(checkpoint: Checkpoint, source: str) -> int:
    """Bytes in the files of a tensor, of a module, or of all modules below an experts' prefix."""
    if source in checkpoint.tensors:
        return checkpoint.tensors[source].nbytes
    modules = [source]
    if source in checkpoint.expert_prefixes:
        modules = list(checkpoint.experts(source).modules())
    return sum(checkpoint.tensors[name].nbytes for module in modules for name in checkpoint.leaves[module].values())
