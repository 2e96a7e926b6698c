"""Equal layers as one stacked module, applied by ``lax.scan`` without copying their weights."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jmoe.nn import param
from jmoe.nn.linear import Linear
from jmoe.nn.moe import FusedMoE

Carry = TypeVar("Carry")
Module = TypeVar("Module", bound=nnx.Module)
Path = tuple[Any, ...]


def stack_layers(layers: Sequence[Module]) -> Module:
    """One module whose variables have those of the equal ``layers`` along a new leading axis.

    Args:
      layers: modules that differ in the values of their variables only.

    Returns:
      A module of their kind, for ``scan_layers`` or ``nnx.scan``. Sharding metadata get a leading None.

    Raises:
      ValueError: no layers, or layers that differ in more: structure, shapes, recipes.
    """
    if not layers:
        raise ValueError("layers is empty; stacking needs at least one")
    graphdef, first = nnx.split(layers[0])
    states = [first]
    for i, layer in enumerate(layers[1:], 1):
        other, state = nnx.split(layer)
        if other != graphdef or _shapes(state) != _shapes(first):
            raise ValueError(f"layers[{i}] differs from layers[0]{_difference(layer, layers[0])}")
        states.append(state)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    nnx.spmd.add_axis(stacked, 0, {nnx.PARTITION_NAME: None})
    return nnx.merge(graphdef, stacked)


def _shapes(state: nnx.State) -> dict[Path, Any]:
    flat = nnx.to_flat_state(state)
    return {path: jax.tree.map(lambda x: (x.shape, x.dtype), v.get_raw_value()) for path, v in flat}


def _difference(layer: nnx.Module, first: nnx.Module) -> str:
    """Where two layers differ, as far as that can be said in a few words."""
    ours, theirs = (_shapes(nnx.state(m)) for m in (layer, first))
    for path in [*theirs, *ours]:
        if ours.get(path) != theirs.get(path):
            name = ".".join(map(str, path))
            return f": {name} is {_describe(ours.get(path))}, not {_describe(theirs.get(path))}"
    return " in structure; stacked layers are equal but for the values of their variables"


def _describe(shape: Any) -> str:
    return "absent" if shape is None else f"{shape[1]}{list(shape[0])}" if isinstance(shape, tuple) else str(shape)


def scan_layers(
    body: Callable[[Module, Carry], Carry],
    layers: Module,
    carry: Carry,
    *,
    slice_params: bool = False,
    unroll: int = 1,
) -> Carry:
    """``for layer in layers: carry = body(layer, carry)``, compiled once for all layers, weights in place.

    The loop runs over the index. Weights and biases of ``Linear`` and ``FusedMoE`` are closed over as they are, and the
    operations index the layer; a scan over the weights themselves would copy one layer's of them each step. All other
    variables (norms, routers, static scales) are sliced as a scan does.

    Variables of the second kind may change in ``body`` (statistics, counters): ``layers`` then holds the new values,
    stacked.

    Args:
      body: (layer, carry) -> carry, where layer is like ``layers`` without the leading axis.
      layers: a stacked module: from ``stack_layers``, or created under ``nnx.vmap``.
      carry: any pytree of arrays; its shapes and dtypes stay.
      slice_params: slice weights that are not quantized too. It is for training them: the gradient of an indexed stack
        is as large as the stack, in every step.
      unroll: layers a step of the compiled loop.

    Returns:
      The last carry.

    Raises:
      ValueError: variables whose leading axes differ, or ``body`` changes a weight or adds a variable.
    """
    graphdef, state = nnx.split(layers)
    flat: dict[Path, nnx.Variable] = dict(nnx.to_flat_state(state))
    length = _length(flat)
    whole = {
        (*path, name)
        for path, module in _weighted(layers)
        if not (slice_params and _is_dense(module))
        for name in _indexed_names(module)
    } & flat.keys()
    sliced = {path: v.get_raw_value() for path, v in flat.items() if path not in whole}

    def step(carry: Carry, xs: tuple[Array, dict[Path, Any]]) -> tuple[Carry, dict[Path, Any]]:
        index, values = xs
        variables = {path: v.replace(values.get(path, v.get_raw_value())) for path, v in flat.items()}
        layer = nnx.merge(graphdef, nnx.from_flat_state(variables))
        before = _values(layer)
        for path, module in _weighted(layer):
            if any((*path, name) in whole for name in module.weight_names):
                module.layer = index
        carry = body(layer, carry)
        return carry, _changes(before, _values(layer), whole)

    carry, changed = lax.scan(step, carry, (jnp.arange(length, dtype=jnp.int32), sliced), unroll=unroll)
    if changed:
        nnx.update(layers, nnx.from_flat_state([(path, flat[path].replace(v)) for path, v in changed.items()]))
    return carry


def _length(variables: dict[Path, nnx.Variable]) -> int:
    """The extent of the leading axis that all variables share."""
    extents = {
        ".".join(map(str, path)): leaf.shape[0] if leaf.ndim else None
        for path, v in variables.items()
        for leaf in jax.tree.leaves(v.get_raw_value())
    }
    length = next(iter(extents.values()), None)
    if length is None or any(extent != length for extent in extents.values()):
        listed = ", ".join(f"{path}: {extent or 'no axis'}" for path, extent in extents.items())
        raise ValueError(f"layers is not stacked: its variables' leading axes are not one extent ({listed})")
    return length


def _weighted(module: nnx.Module) -> list[tuple[Path, Linear | FusedMoE]]:
    return [(path, m) for path, m in nnx.iter_modules(module) if isinstance(m, Linear | FusedMoE)]


def _is_dense(module: Linear | FusedMoE) -> bool:
    return all(getattr(module, name + "_format") is None for name in module.weight_names)


def _indexed_names(module: Linear | FusedMoE) -> list[str]:
    """Variables in which an operation finds the layer itself."""
    return [part for name in module.weight_names for part in param.part_names(name)] + list(module.bias_names)


def _values(module: nnx.Module) -> dict[Path, Any]:
    return {path: v.get_raw_value() for path, v in nnx.to_flat_state(nnx.state(module, nnx.Variable))}


def _changes(before: dict[Path, Any], after: dict[Path, Any], whole: set[Path]) -> dict[Path, Any]:
    """New values of the variables that a body has set; setting one replaces the object that it holds."""
    changed = {path: value for path, value in after.items() if value is not before.get(path)}
    for path in changed:
        name = ".".join(map(str, path))
        if path not in before:
            raise ValueError(f"body adds the variable {name} to a layer, and a scanned layer cannot keep it")
        if path in whole:
            raise ValueError(
                f"body changes {name}, a weight that is shared by all steps; only other variables may change"
            )
    return changed
