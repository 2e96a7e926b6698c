"""How a validated operation reaches its implementation: selection, jit, and what its derivatives and batches are.

Derivatives are those of the weight-only operation: quantising an activation counts as the identity (straight-through)
and quantized weights get none. ``jmoe.ops.transform`` differentiates and batches.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jmoe.backends import triton, xla
from jmoe.backends.select import IMPLEMENTATIONS, current_device, select
from jmoe.backends.spec import BatchedArgs, DeviceSpec, LinearArgs, MoEArgs, OpSpec, Selection
from jmoe.config import config
from jmoe.ops.transform import Leaf, execute
from jmoe.qtensor import QTensor
from jmoe.scheme import Scheme, recipe_of
from pallas_kernels.layouts import Layout

Args = LinearArgs | MoEArgs | BatchedArgs

_FUNCTIONS = {"linear": "linear", "moe": "fused_moe", "batched_experts": "batched_experts"}
_ROWS = {"linear": ("x",), "moe": ("x", "topk_weights", "topk_ids"), "batched_experts": ("x",)}
_STATIC_SCALES = ("input_scale", "intermediate_scale")
_CONSTANT = (*_STATIC_SCALES, "topk_ids", "expert_map", "layer", "counts")


def call(op: OpSpec, args: Args, implementation: str | None) -> Array:
    """Adds what the surroundings say to ``op``, selects, records the choice for ``explain``, and runs."""
    op = op.replace(mesh=mesh_axes(args), batch_invariant=config.batch_invariant, shards=config.shards)
    device = current_device()
    selection = select(op, device, implementation=implementation)
    if config.recorder is not None:
        config.recorder.add(op, selection)
    return _call(op, selection, device, _Tiling.in_force(), args)


class _Tiling(NamedTuple):
    """The settings that say how a chosen implementation computes."""

    tuning: Any
    moe_chunk: int | None
    workspace: int

    @classmethod
    def in_force(cls) -> "_Tiling":
        return cls(*(getattr(config, name) for name in cls._fields))

    def again(self, **others: Any) -> AbstractContextManager[Any]:
        """These in force once more, with others."""
        return config(**self._asdict(), **others)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _call(op: OpSpec, selection: Selection, device: DeviceSpec, tiling: _Tiling, args: Args) -> Array:
    leaves, tree = jax.tree.flatten(args)
    return execute(_Operation(op, selection, device, tiling, tree), leaves)[0]


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An operation as a function of the leaves of its arguments."""

    op: OpSpec
    selection: Selection
    device: DeviceSpec
    tiling: _Tiling
    tree: Any

    @functools.cached_property
    def _args(self) -> Args:
        """The arguments, with numbers of leaves in place of arrays."""
        return self.tree.unflatten(range(self.tree.num_leaves))

    @functools.cached_property
    def inputs(self) -> tuple[Leaf, ...]:
        rows = 1 if self.op.op == "batched_experts" else 0
        found = []
        for name, value in self._args._asdict().items():
            axis = rows if name in _ROWS[self.op.op] else None
            differentiable = not isinstance(value, QTensor) and name not in _CONSTANT
            found += [Leaf(name, axis, differentiable) for _ in jax.tree.leaves(value)]
        return tuple(found)

    @property
    def outputs(self) -> tuple[Leaf, ...]:
        return (Leaf("y", 1 if self.op.op == "batched_experts" else 0, True),)

    @property
    def operation(self) -> "_Operation":
        return self

    def on(self, operation: Any) -> Any:
        return operation

    @property
    def tokens(self) -> int:
        return self.op.tokens

    @property
    def independent_rows(self) -> bool:
        x, op = self._args.x, self.op
        schemes = [x.scheme.replace(static=False) if isinstance(x, QTensor) else op.recipe.input]
        if op.op != "linear":
            schemes.append((op.second_recipe or op.recipe).input)
        return all(map(_is_of_rows, schemes))

    def folded(self, size: int) -> "_Operation":
        op = self.op.replace(tokens=self.op.tokens * size)
        with self.tiling.again():
            selection = select(op, self.device, implementation=self.selection.implementation)
        return dataclasses.replace(self, op=op, selection=selection)

    def record_instead_of(self, other: Any) -> None:
        if config.recorder is not None:
            config.recorder.replace(other.op, self.op, self.selection)

    def suits_jax(self, names: set[str]) -> bool:
        if self.selection.implementation == triton.NAME:
            return False
        if self.op.op == "linear":
            # There is nothing to dequantise in a plain weight, and a batched product of XLA's own is one.
            return "layer" not in names and ("w" not in names or self.op.recipe.weight is None)
        return names <= {"x", "topk_weights", "b13", "b2", "activation_params", *_STATIC_SCALES}

    def weight_only(self) -> tuple["_Operation", list[int]]:
        """With the activation as it is, hence without static scales, by an implementation that has derivatives."""
        args = self._args
        changes: dict[str, Any] = {
            name: value.with_input_scheme(None)
            for name, value in args._asdict().items()
            if name in ("w", "w13", "w2") and isinstance(value, QTensor)
        }
        changes.update({name: None for name in _STATIC_SCALES if name in args._fields})
        taken, tree = jax.tree.flatten(args._replace(**changes))
        second = self.op.second_recipe
        op = self.op.replace(
            recipe=recipe_of(self.op.recipe.weight, None),
            second_recipe=None if second is None else recipe_of(second.weight, None),
        )
        selection = self.selection
        if selection.implementation == triton.NAME:
            # Kernels of our own have no derivatives; those of XLA are the same function's.
            selection = select(op, self.device, implementation=xla.NAME)
        return _Operation(op, selection, self.device, self.tiling, tree), taken

    def __call__(self, *leaves: Array) -> tuple[Array]:
        op, args = self.op, self.tree.unflatten(leaves)
        if op.op != "linear" and op.experts == 0:  # a rank may hold no expert, and none cannot be indexed
            return (jnp.zeros((*args.x.shape[:-1], op.hidden), op.out_dtype),)
        # Derivatives and batches are traced after the call, where what was in force then is no more. Arguments are
        # checked already, and checkify does not see into a primitive.
        with self.tiling.again(shards=op.shards, check=False):
            return (self._run(args),)

    def _run(self, args: Args) -> Array:
        op, run = self.op, _function(self.op, self.selection)
        if self.selection.implementation != triton.NAME:
            return run(args)
        # Chosen for a GPU, perhaps not the one that this is lowered for: elsewhere there is no Triton.
        elsewhere = _function(op, select(op, self.device, implementation=xla.NAME))
        return lax.platform_dependent(args, cuda=run, default=elsewhere)


def _function(op: OpSpec, selection: Selection) -> Callable[[Args], Array]:
    """The implementation's function, which gets weights in the layout that it wants."""
    module = IMPLEMENTATIONS[selection.implementation]
    run = functools.partial(getattr(module, _FUNCTIONS[op.op]), op, selection)
    return lambda args: run(_arranged(args, selection.layout))


def _arranged(args: Args, layout: Layout) -> Args:
    weights = {name: getattr(args, name) for name in ("w", "w13", "w2") if name in args._fields}
    arranged: dict[str, Any] = {n: w.in_layout(layout) for n, w in weights.items() if isinstance(w, QTensor)}
    return args._replace(**arranged)


def _is_of_rows(scheme: Scheme | None) -> bool:
    """Whether each row is quantized by itself, or by what is given."""
    return scheme is None or scheme.static or (scheme.block[0] == 1 and scheme.global_scale != "tensor")


def mesh_axes(args: Args) -> tuple[tuple[str, int], ...]:
    """Axes larger than one over which XLA itself would partition: those of the mesh in force, or of the arrays'.

    Explicit axes are automatic by now (``jmoe.sharding``).
    """
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(args)]
    axes = {}
    for mesh in meshes:
        for axis, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
            if size > 1 and kind != jax.sharding.AxisType.Manual:
                axes[axis] = size
    return tuple(axes.items())
