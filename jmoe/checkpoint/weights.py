"""Weights from a checkpoint to devices: one linear layer, or all experts of a layer stacked.

Bytes go from the mapped file into memory of our own and from there to their device (`jmoe.checkpoint.placement`), and
the file's pages are let go of right after, so that loading needs little more memory than what it loads. On a mesh every
process reads the experts, and touches the rows and columns, of its own devices only.
"""

import contextlib
import gc
import operator
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh

from jmoe.arguments import COMPUTE_DTYPES, check_type, float_dtype
from jmoe.checkpoint.experts import Experts
from jmoe.checkpoint.methods import CheckpointError, HostWeight
from jmoe.checkpoint.methods.base import FLOAT_DTYPES, where
from jmoe.checkpoint.methods.none import UNQUANTIZED
from jmoe.checkpoint.placement import Block, Device, Placement, place_array, place_parts
from jmoe.checkpoint.reader import Checkpoint
from jmoe.qtensor import QTensor
from jmoe.quantize import merge_shards, quantize
from jmoe.scheme import Recipe, as_recipe
from jmoe.sharding import AxisName

Names = str | Sequence[str]

_OUT_IN = ("out", "in")
_EXPERT_AXES = ("experts", "intermediate", "hidden")


def load_linear(
    checkpoint: Checkpoint,
    names: Names,
    *,
    weight_only: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    device: Device = None,
    mesh: Mesh | None = None,
    sharding: Sequence[AxisName] | None = None,
) -> QTensor | Array:
    """The weight of a linear layer, exactly as the checkpoint has it, as ``jmoe.linear`` takes it.

    Args:
      checkpoint: from ``open``.
      names: the module, such as ``"model.layers.0.self_attn.o_proj"``; several are concatenated along N in this order,
        each keeping its own scales exactly.
      weight_only: leave the activation alone, whatever the checkpoint says of it.
      dtype: cast a plain weight to this dtype; a quantized one has none to cast.
      device: where to: what ``jax.device_put`` takes, or a function of a name (``weight``, ``weight_scale``, ...) and a
        shape that gives such a thing. A sharding gets each device's own part from the file.
      mesh: shard over this mesh instead (default: the one in force, where ``sharding`` is given).
      sharding: the mesh axis over which each of the axes (out, in) is sharded, as for ``jmoe.nn.Linear``; scales follow
        where every device's part has whole blocks, else every device has all of them.

    Returns:
      A QTensor (N, K), or an array where the module is not quantized.

    Raises:
      CheckpointError: tensors missing, of the wrong shape or dtype, a scale that is none, or modules that cannot be one
        weight: quantized and not, or in different ways.
      ValueError: ``device`` with ``mesh`` or ``sharding``, mesh axes that there are not, or whose devices do not divide
        an axis of the weight; TypeError: an argument of another kind, such as a path that was not opened.
    """
    names = _as_names(checkpoint, names)
    dtype = _as_dtype(dtype)
    placement = Placement(device, mesh, sharding, _OUT_IN)
    out, into = placement.axes
    source = _Source(checkpoint, weight_only, dtype)
    if len(names) == 1:
        return _load_stack(source, "weight", names, (), placement, (out, into))
    # Rows are split when they are joined: those of one module need not be as many for each device.
    shards = [_load_stack(source, "weight", [name], (), placement, (None, into)) for name in names]
    _check_alike(checkpoint, names, shards)
    joined: QTensor | Array
    if isinstance(shards[0], QTensor):
        joined = merge_shards(cast(list[QTensor], shards))
    else:
        joined = jnp.concatenate(cast(list[Array], shards), axis=0)
    if placement.mesh is None:
        return joined
    targets = [part.target for part in placement.parts("weight", joined, placement.axes)]
    return jax.tree.unflatten(jax.tree.structure(joined), jax.device_put(jax.tree.leaves(joined), targets))


def load_bias(
    checkpoint: Checkpoint,
    names: Names,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    device: Device = None,
    mesh: Mesh | None = None,
    sharding: Sequence[AxisName] | None = None,
) -> Array | None:
    """The bias (N,) that goes with ``load_linear`` of these modules; None if they have none.

    Arguments are as for ``load_linear``.

    Raises:
      CheckpointError: no such module, some have one and some do not, or a shape or dtype that no bias has.
    """
    names = _as_names(checkpoint, names)
    dtype = _as_dtype(dtype)
    parts = [_host_bias(checkpoint, name) for name in names]
    if all(part is None for part in parts):
        return None
    _require_all(checkpoint, "a bias", names, parts)
    joined = np.concatenate(cast(list[np.ndarray], parts))
    placement = Placement(device, mesh, sharding, _OUT_IN)
    return place_array("bias", joined if dtype is None else joined.astype(dtype), placement, placement.axes[:1])


def load_input_scale(checkpoint: Checkpoint, names: Names) -> Array | None:
    """The given activation scale float32 () that goes with ``load_linear`` of these modules: the largest of theirs.

    None where the activation's scale is measured, or the activation is not quantized.
    """
    names = _as_names(checkpoint, names)
    scales = [checkpoint.method.load_input_scale(checkpoint, name) for name in names]
    if all(scale is None for scale in scales):
        return None
    _require_all(checkpoint, "an activation scale", names, scales)
    return jnp.asarray(max(cast(list[np.float32], scales)), jnp.float32)


def load_experts(
    checkpoint: Checkpoint,
    prefix: str,
    *,
    slots: Sequence[int] | None = None,
    recipe: Recipe | str | None = None,
    weight_only: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    device: Device = None,
    mesh: Mesh | None = None,
    sharding: Sequence[AxisName] | None = None,
) -> tuple[QTensor | Array, QTensor | Array]:
    """The experts of a layer, exactly as the checkpoint has them, as ``jmoe.fused_moe`` takes them.

    Experts are streamed, one after another, into one host array for each part of the result; beyond the result itself
    that is the largest amount of memory in use. On a mesh it is what one device holds of them.

    Args:
      checkpoint: from ``open``.
      prefix: what comes before the experts' numbers, such as ``"model.layers.0.mlp.experts"``.
      slots: the expert in each slot of the result, -1 for a spare one of zeros (default: every expert once, in order);
        ``jmoe.parallel.experts_on(...).reshape(-1)`` gives every device of a mesh as many. E is then their number.
      recipe: quantize experts that are not, as they are read, one by one: neither the host nor a device ever holds the
        others unquantized. NVFP4's multiplier is one for gate and up. What is quantized already stays as it is.
      weight_only, dtype, device, mesh: as for ``load_linear``.
      sharding: the mesh axis over which each of the axes (experts, intermediate, hidden) is sharded, as for
        ``jmoe.nn.FusedMoE``.

    Returns:
      w13 (E, 2, I, H), half 0 gate and half 1 up, or (E, 1, I, H) for ungated experts; w2 (E, H, I).

    Raises:
      CheckpointError: as for ``load_linear``; no experts there, one missing, or experts that differ in shape or format.
      ValueError, TypeError: as for ``load_linear``; slots that are no experts' numbers.
    """
    dtype = _as_dtype(dtype)
    experts = _experts(checkpoint, prefix)
    order = _checked_slots(experts, slots)
    placement = Placement(device, mesh, sharding, _EXPERT_AXES)
    up, down = (experts.module(0, projection) for projection in (experts.names.up, experts.names.down))
    if checkpoint.shape_for(down) != checkpoint.shape_for(up)[::-1]:
        raise CheckpointError(
            f"{where_weight(checkpoint, down)} has shape {checkpoint.shape_for(down)}, expected "
            f"{checkpoint.shape_for(up)[::-1]} to match {up!r} of shape {checkpoint.shape_for(up)}"
        )
    over, intermediate, hidden = placement.axes
    halves, second = experts.names.halves, (experts.names.down,)
    how = None if recipe is None else as_recipe(recipe)

    def stack(name: str, projections: tuple[str, ...], lead: tuple[int, ...], *axes: AxisName) -> QTensor | Array:
        source = _Source(checkpoint, weight_only, dtype)
        if how is not None and how.weight is not None:
            every = _modules(experts, projections, range(experts.count))
            source = _Quantized(checkpoint, weight_only, dtype, how, every, len(projections))
        return _load_stack(source, name, _in_slots(experts, projections, order), lead, placement, axes)

    w13 = stack("w13", halves, (len(order), len(halves)), over, None, intermediate, hidden)
    return w13, stack("w2", second, (len(order),), over, hidden, intermediate)


def load_expert_biases(
    checkpoint: Checkpoint,
    prefix: str,
    *,
    slots: Sequence[int] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    device: Device = None,
    mesh: Mesh | None = None,
    sharding: Sequence[AxisName] | None = None,
) -> tuple[Array | None, Array | None]:
    """The biases b13 (E, halves, I) and b2 (E, H) of the experts of a layer; None where they have none.

    Arguments are as for ``load_experts``.
    """
    dtype = _as_dtype(dtype)
    placement = Placement(device, mesh, sharding, _EXPERT_AXES)
    over, intermediate, hidden = placement.axes
    experts = _experts(checkpoint, prefix)
    order = _checked_slots(experts, slots)

    def stack(name: str, projections: Sequence[str]) -> Array | None:
        modules = _modules(experts, projections, order)
        parts = [_host_bias(checkpoint, module) for module in modules]
        if all(part is None for part in parts):
            return None
        _require_all(checkpoint, "a bias", modules, parts)
        _check_same_length(checkpoint, modules, cast(list[np.ndarray], parts))
        held = np.stack(cast(list[np.ndarray], parts)).reshape(-1, len(projections), len(cast(np.ndarray, parts[0])))
        stacked = np.zeros((len(order), *held.shape[1:]), held.dtype)
        stacked[np.asarray(order) >= 0] = held
        if name == "b2":
            stacked = stacked[:, 0]
        axes = (over, None, intermediate) if name == "b13" else (over, hidden)
        return place_array(name, stacked if dtype is None else stacked.astype(dtype), placement, axes)

    return stack("b13", experts.names.halves), stack("b2", (experts.names.down,))


def load_expert_scales(
    checkpoint: Checkpoint, prefix: str, *, slots: Sequence[int] | None = None
) -> tuple[Array | None, Array | None]:
    """The given activation scales of a layer's experts: ``input_scale`` () and ``intermediate_scale`` (E,), float32.

    The first product's x is quantised once, with the largest scale of all experts and halves; the second product's
    input belongs to one expert and keeps its own. None where scales are measured. ``slots`` is as for ``load_experts``;
    a spare one has the scale 1.
    """
    experts = _experts(checkpoint, prefix)
    order = _checked_slots(experts, slots)
    input_scale = load_input_scale(checkpoint, _modules(experts, experts.names.halves, range(experts.count)))
    down = _modules(experts, (experts.names.down,), order)
    scales = [checkpoint.method.load_input_scale(checkpoint, module) for module in down]
    if all(scale is None for scale in scales):
        return input_scale, None
    _require_all(checkpoint, "an activation scale", down, scales)
    held = np.ones(len(order), np.float32)
    held[np.asarray(order) >= 0] = cast(list[np.float32], scales)
    return input_scale, jnp.asarray(held)


def _check_open(checkpoint: Checkpoint) -> None:
    check_type("checkpoint", checkpoint, Checkpoint, "what jmoe.checkpoint.open makes of a path")


def _as_names(checkpoint: Checkpoint, names: Names) -> list[str]:
    """The names of one or more modules that there are."""
    _check_open(checkpoint)
    found = [names] if isinstance(names, str) else list(names) if isinstance(names, Sequence) else []
    if not found or not all(isinstance(name, str) for name in found):
        raise TypeError(f"names={names!r} must be the name of a module or a sequence of such names")
    for name in found:
        if name not in checkpoint.leaves:
            raise CheckpointError(f"{checkpoint.path}: has no tensor of a module {name!r}")
    return found


def _experts(checkpoint: Checkpoint, prefix: str) -> Experts:
    _check_open(checkpoint)
    return checkpoint.experts(prefix)


def _checked_slots(experts: Experts, slots: Sequence[int] | None) -> list[int]:
    """The expert in each slot, -1 in a spare one."""
    if slots is None:
        return list(range(experts.count))
    given = np.asarray(slots)
    if given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        raise TypeError(f"slots={slots!r} must be a sequence of experts' numbers, and -1 for a spare slot")
    if outside := [e for e in given.tolist() if not -1 <= e < experts.count]:
        raise ValueError(f"slots names the expert {outside[0]}, but there are 0 to {experts.count - 1}, and -1")
    if not (given >= 0).any():
        raise ValueError(f"slots={given.tolist()} has no expert")
    return given.tolist()


def _modules(experts: Experts, projections: Sequence[str], order: Iterable[int]) -> list[str]:
    """The modules of these experts, expert by expert; a spare slot has none."""
    return [experts.module(e, projection) for e in order if e >= 0 for projection in projections]


def _in_slots(experts: Experts, projections: Sequence[str], order: Iterable[int]) -> list[str | None]:
    """The modules in each slot, None in a spare one."""
    return [None if e < 0 else experts.module(e, projection) for e in order for projection in projections]


def _as_dtype(dtype: jax.typing.DTypeLike | None) -> np.dtype | None:
    """A dtype that a plain weight can be held in, or None."""
    return None if dtype is None else float_dtype("dtype", dtype, COMPUTE_DTYPES)


def host_tensor(checkpoint: Checkpoint, name: str, dtype: jax.typing.DTypeLike | None = None) -> np.ndarray:
    """A copy of a plain float tensor of any shape, such as a norm's weight, cast to ``dtype`` if given."""
    if name not in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.path}: has no tensor {name!r}")
    info = checkpoint.tensors[name]
    if info.dtype not in FLOAT_DTYPES:
        raise CheckpointError(f"{where(info)} has dtype {info.dtype}, expected {', '.join(FLOAT_DTYPES)}")
    view = checkpoint.read(name)
    copy = np.array(view, view.dtype if dtype is None else jnp.dtype(dtype))
    checkpoint.release(name)
    return copy


def _host_bias(checkpoint: Checkpoint, module: str) -> np.ndarray | None:
    """The bias (N,) of a module, checked against its weight."""
    name = f"{module}.bias"
    if name not in checkpoint.tensors:
        return None
    rows = checkpoint.shape_for(module)[:1] if checkpoint.has_weight(module) else None
    info = checkpoint.tensors[name]
    if len(info.shape) != 1 or (rows is not None and info.shape != rows):
        expected = "(N,)" if rows is None else str(rows)
        raise CheckpointError(f"{where(info)} has shape {info.shape}, expected {expected}")
    return host_tensor(checkpoint, name)


class _Source:
    """Weights (N, K) on the host, as the checkpoint has them; leaves may be views of the file."""

    def __init__(self, checkpoint: Checkpoint, weight_only: bool, dtype: np.dtype | None) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self._weight_only = weight_only

    def load(self, module: str) -> HostWeight:
        """The weight of a module."""
        weight = self.checkpoint.method.load_weight(self.checkpoint, module)
        if weight.ndim != 2:
            raise CheckpointError(
                f"{where_weight(self.checkpoint, module)} has shape {weight.shape}, expected the two axes (N, K) of a "
                "linear layer"
            )
        if self._weight_only and isinstance(weight, QTensor):
            return weight.with_input_scheme(None)
        return weight


class _Quantized(_Source):
    """Weights that are quantized when they are read, an expert's halves together where they share a multiplier.

    Args:
      checkpoint, weight_only, dtype: as for a `_Source`; the dtype is what weights are cast to before.
      recipe: how.
      modules: all of them, an expert's halves next to each other.
      halves: how many these are.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        weight_only: bool,
        dtype: np.dtype | None,
        recipe: Recipe,
        modules: Sequence[str],
        halves: int,
    ) -> None:
        super().__init__(checkpoint, weight_only, dtype)
        self._recipe = recipe
        assert recipe.weight is not None
        together = halves if recipe.weight.global_scale is not None else 1
        groups = (tuple(modules[i : i + together]) for i in range(0, len(modules), together))
        self._groups = {module: group for group in groups for module in group}
        self._held: dict[str, HostWeight] = {}

    def load(self, module: str) -> HostWeight:
        if module not in self._held:
            group = self._groups[module]
            weights = [super(_Quantized, self).load(name) for name in group]
            if any(isinstance(weight, QTensor) for weight in weights):
                return weights[group.index(module)]
            for name, weight in zip(group, weights, strict=True):
                _check_same_stack(self.checkpoint, group[0], weights[0], name, weight)
            self._held = dict(zip(group, self._quantize(cast(list[np.ndarray], weights)), strict=True))
        return self._held[module]

    def _quantize(self, weights: Sequence[np.ndarray]) -> list[HostWeight]:
        # On one device of this process, whatever mesh is in force: other processes quantize other experts.
        alone = Mesh(np.array(jax.local_devices()[:1]), ("alone",), axis_types=(AxisType.Auto,))
        with contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(alone):
            stacked = jnp.asarray(np.stack(weights) if self.dtype is None else np.stack(weights).astype(self.dtype))
            q = jax.device_get(quantize(stacked, self._recipe, shared=(-3,)))
        del stacked
        gc.collect(0)  # JAX lets go of the host's array at the next collection only
        if self._weight_only:
            q = q.with_input_scheme(None)
        return [jax.tree.map(operator.itemgetter(i), q) for i in range(len(weights))]


def _load_stack(
    source: _Source,
    name: str,
    modules: Sequence[str | None],
    lead: tuple[int, ...],
    placement: Placement,
    axes: Sequence[AxisName],
) -> QTensor | Array:
    """The weights of modules stacked on the axes ``lead``, under a variable's name; one is (N, K) itself.

    ``axes`` are the mesh axes of all axes of the stack. Where there is no module, there are zeros.
    """
    checkpoint = source.checkpoint
    like = next(module for module in modules if module is not None)
    first = source.load(like)
    plain = None if isinstance(first, QTensor) else source.dtype
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape), plain or leaf.dtype), first)
    parts = placement.parts(name, abstract, axes)
    positions = list(np.ndindex(lead))

    def fill(blocks: list[Block]) -> None:
        for module, position in zip(modules, positions, strict=True):
            mine = [block for block in blocks if _holds(block, position)]
            if not mine:
                continue
            leaves: list[Any] = []
            if module is not None:
                weight = source.load(module)
                _check_same_stack(checkpoint, like, first, module, weight)
                leaves = jax.tree.leaves(weight)
            for block in mine:
                at = tuple(i - start for i, (start, _) in zip(position, block.bounds[: len(lead)], strict=True))
                block.array[at] = leaves[block.part][block.index[len(lead) :]] if leaves else 0
            if module is not None:
                checkpoint.release_module(module)

    return jax.tree.unflatten(jax.tree.structure(first), place_parts(parts, fill))


def _holds(block: Block, position: tuple[int, ...]) -> bool:
    """Whether a stack's entry at ``position`` is in the block, in part or whole."""
    return all(start <= i < stop for i, (start, stop) in zip(position, block.bounds, strict=False))


def _check_same_stack(
    checkpoint: Checkpoint, first_module: str, first: HostWeight, module: str, weight: HostWeight
) -> None:
    """Raises unless the weight's parts are those of the first, so that they can be entries of one stack."""
    _check_alike(checkpoint, [first_module, module], [first, weight])
    if _parts_of(weight) != _parts_of(first):
        raise CheckpointError(
            f"{where_weight(checkpoint, module)} loads as {_parts_of(weight)}, expected {_parts_of(first)} as for "
            f"{first_module!r}"
        )


def _parts_of(weight: HostWeight) -> str:
    return " with ".join(f"{leaf.dtype} {leaf.shape}" for leaf in jax.tree.leaves(weight))


def _check_alike(checkpoint: Checkpoint, modules: Sequence[str], weights: Sequence[Any]) -> None:
    """Raises unless all are plain, or all are quantized in one way and with the same K."""
    first = weights[0]
    for module, weight in zip(modules, weights, strict=True):
        if _format(weight) != _format(first):
            raise CheckpointError(
                f"{checkpoint.path}: {module!r} is {_format(weight)}, but {modules[0]!r} is {_format(first)}: "
                "they cannot be one weight"
            )
        if weight.shape[-1] != first.shape[-1]:
            raise CheckpointError(
                f"{where_weight(checkpoint, module)} has K = {weight.shape[-1]}, expected "
                f"{first.shape[-1]} as {modules[0]!r} has"
            )


def _check_same_length(checkpoint: Checkpoint, modules: Sequence[str], biases: Sequence[np.ndarray]) -> None:
    for module, bias in zip(modules, biases, strict=True):
        if bias.shape != biases[0].shape:
            raise CheckpointError(
                f"{where(checkpoint.tensors[f'{module}.bias'])} has shape {bias.shape}, expected {biases[0].shape} as "
                f"{modules[0]!r} has"
            )


def where_weight(checkpoint: Checkpoint, module: str) -> str:
    """File and tensor of a module's weight, as errors begin; codes, whatever their name, have the most bytes in it."""
    leaves = checkpoint.leaves[module]
    if "weight" in leaves:
        return where(checkpoint.tensors[leaves["weight"]])
    return where(max((checkpoint.tensors[name] for name in leaves.values()), key=lambda info: info.nbytes))


def _format(weight: Any) -> str:
    if not isinstance(weight, QTensor):
        return f"{UNQUANTIZED.describe()} ({weight.dtype})"
    return weight.scheme.describe() + (f" x {weight.input_scheme.describe()}" if weight.input_scheme else "")


def _require_all(checkpoint: Checkpoint, what: str, modules: Sequence[str], parts: Sequence[object]) -> None:
    """Raises if some modules that belong together lack what others have."""
    lacking = [module for module, part in zip(modules, parts, strict=True) if part is None]
    if lacking:
        raise CheckpointError(
            f"{checkpoint.path}: {lacking[0]!r} has not {what}, though other modules of {modules[0]!r} have"
        )
