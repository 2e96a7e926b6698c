"""How a validated operation reaches its implementation: selection, jit, derivatives.

Derivatives are those of the weight-only operation: quantising an activation counts as the identity (straight-through)
and quantized weights get none. They are written once, as a forward rule that JAX also transposes, so forward and
reverse mode both work; everything the backward pass needs is computed again from the inputs, so no intermediate and no
dequantised weight is kept.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jmoe.backends import triton, xla
from jmoe.backends.select import IMPLEMENTATIONS, select
from jmoe.backends.spec import BatchedArgs, LinearArgs, MoEArgs, OpSpec, Selection
from jmoe.config import config
from jmoe.qtensor import QTensor
from jmoe.scheme import Recipe, recipe_of

Args = LinearArgs | MoEArgs | BatchedArgs

_FUNCTIONS = {"linear": "linear", "moe": "fused_moe", "batched_experts": "batched_experts"}


def call(op: OpSpec, args: Args, implementation: str | None) -> Array:
    """Adds what the surroundings say to ``op``, selects, records the choice for ``explain``, and runs."""
    op = op.replace(mesh=mesh_axes(args), batch_invariant=config.batch_invariant)
    selection = select(op, implementation=implementation)
    if config.recorder is not None:
        config.recorder.add(op, selection)
    return _call(op, selection, args)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(op: OpSpec, selection: Selection, args: Args) -> Array:
    return _differentiable(op, selection, args)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable(op: OpSpec, selection: Selection, args: Args) -> Array:
    return _run(op, selection, args)


def _run(op: OpSpec, selection: Selection, args: Args) -> Array:
    if op.op != "linear" and op.experts == 0:  # a rank may hold no expert, and none cannot be indexed
        return jnp.zeros((*args.x.shape[:-1], op.hidden), op.out_dtype)
    if selection.implementation != triton.NAME:
        return _function(op, selection)(args)
    # Chosen for a GPU, perhaps not the one that this is lowered for: elsewhere there is no Triton.
    return lax.platform_dependent(args, cuda=_function(op, selection), default=_function(op, _of_xla(op)))


def _function(op: OpSpec, selection: Selection) -> Callable[[Args], Array]:
    module = IMPLEMENTATIONS[selection.implementation]
    return functools.partial(getattr(module, _FUNCTIONS[op.op]), op, selection)


def _of_xla(op: OpSpec) -> Selection:
    return select(op, implementation=xla.NAME)


def _jvp(op: OpSpec, selection: Selection, primals: tuple[Args], tangents: tuple[Args]) -> tuple[Array, Array]:
    (args,), (directions,) = primals, tangents
    out = _differentiable(op, selection, args)
    active = {
        name: value
        for name, value in args._asdict().items()
        if _is_differentiable(value) and _is_perturbed(getattr(directions, name))
    }
    if not active:
        return out, jnp.zeros_like(out)
    weight_only_op = op.replace(
        recipe=_weight_only_recipe(op.recipe),
        second_recipe=None if op.second_recipe is None else _weight_only_recipe(op.second_recipe),
    )

    # Kernels of our own have no derivatives; those of XLA are the same function's.
    differentiated = _of_xla(weight_only_op) if selection.implementation == triton.NAME else selection

    @jax.checkpoint
    def weight_only(active: dict[str, Any]) -> Array:
        return _run(weight_only_op, differentiated, _weight_only(args._replace(**active)))

    directions_of = {name: jax.tree.map(_instantiate, getattr(directions, name), is_leaf=_is_zero) for name in active}
    _, tangent = jax.jvp(weight_only, (active,), (directions_of,))
    return out, tangent


# Symbolic zeros: what nobody differentiates with respect to must not cost products with zeros.
_differentiable.defjvp(_jvp, symbolic_zeros=True)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero)


def _is_perturbed(tangents: Any) -> bool:
    """Whether any of an argument's tangents is not known to be zero."""
    return not all(map(_is_zero, jax.tree.leaves(tangents, is_leaf=_is_zero)))


def _instantiate(tangent: Any) -> Array:
    return jnp.zeros(tangent.shape, tangent.dtype) if _is_zero(tangent) else tangent


def _is_differentiable(value: Any) -> bool:
    if isinstance(value, QTensor):
        return False
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves)


def _weight_only(args: Args) -> Args:
    """The operation with the activation as it is: no input schemes, hence no static scales."""
    changes: dict[str, Any] = {
        name: value.with_input_scheme(None)
        for name, value in args._asdict().items()
        if name in ("w", "w13", "w2") and isinstance(value, QTensor)
    }
    changes.update({name: None for name in ("input_scale", "intermediate_scale") if name in args._fields})
    return args._replace(**changes)


def _weight_only_recipe(recipe: Recipe) -> Recipe:
    return recipe_of(recipe.weight, None)


def mesh_axes(args: Args) -> tuple[tuple[str, int], ...]:
    """Axes larger than one over which XLA itself would partition: those of the mesh in force, or of the arrays'."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(args)]
    axes = {}
    for mesh in meshes:
        for axis, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True):
            if size > 1 and kind != jax.sharding.AxisType.Manual:
                axes[axis] = size
    return tuple(axes.items())
