"""Equal layers as one stacked module, applied by ``lax.scan`` without copying their weights."""

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jmoe.arguments import check_type, type_of
from jmoe.nn import options, param
from jmoe.nn.compiled import Code, program
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
      ValueError: no layers, or layers that differ in more: structure, shapes, recipes; TypeError: what are no modules.
    """
    check_type("layers", layers, (list, tuple, nnx.List), "a list of modules")
    for i, layer in enumerate(layers):
        check_type(f"layers[{i}]", layer, nnx.Module, "an nnx.Module")
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
    return {path: jax.tree.map(lambda x: (x.shape, x.dtype), _raw(leaf)) for path, leaf in flat}


def _difference(layer: nnx.Module, first: nnx.Module) -> str:
    """Where two layers differ, as far as that can be said in a few words."""
    ours, theirs = (_shapes(nnx.state(m)) for m in (layer, first))
    for path in [*theirs, *ours]:
        if ours.get(path) != theirs.get(path):
            name = _name(path)
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
    variables and arrays (norms, routers, static scales) are sliced as a scan does.

    Variables of the second kind may change in ``body`` (statistics, counters): ``layers`` then holds the new values,
    stacked.

    ``body`` may scan over layers itself: of groups of layers, stacked twice, it is given one group.

    Outside ``jax.jit`` the loop is compiled once for a body, shapes and structure. It is compiled anew in each call
    where the body reads arrays that it is not given, from a closure or a global, for the program then holds them; and,
    as ``lax.scan`` is, under ``jax.grad``, ``jax.jvp`` and ``jax.vmap`` outside ``jax.jit``.

    Args:
      body: (layer, carry) -> carry, where layer is like ``layers`` without the leading axis.
      layers: a stacked module: from ``stack_layers``, or created under ``nnx.vmap``.
      carry: any pytree of arrays; its shapes and dtypes stay.
      slice_params: slice weights that are not quantized too. It is for training them: the gradient of an indexed stack
        is as large as the stack, in every step.
      unroll: layers a step of the compiled loop, at least 1.

    Returns:
      The last carry.

    Raises:
      ValueError: variables whose leading axes differ, or ``body`` changes a weight or adds a variable; TypeError:
        arguments of other types, or ``body`` returns a carry of another structure, shape or dtype.
    """
    if not callable(body):
        check_type("body", body, types.FunctionType, "a function (layer, carry) -> carry")
    check_type("layers", layers, nnx.Module, "a stacked nnx.Module")
    slice_params = options.flag("slice_params", slice_params)
    unroll = options.extent("unroll", unroll)
    for path, leaf in jax.tree.leaves_with_path(carry):
        _carried(f"carry{jax.tree_util.keystr(path)}", leaf)
    graphdef, state = nnx.split(layers)
    modules = [(path, m) for path, m in _weighted(layers) if m.layer is not None or not (slice_params and _is_dense(m))]
    how = _How(
        body=Code.of(body),
        graphdef=graphdef,
        modules=tuple((path, m.layer is not None) for path, m in modules),
        weights=tuple((*path, name) for path, m in modules for name in _indexed_names(m)),
        unroll=unroll,
    )
    run = program(_scan, how, how.body, state, carry)
    carry, changed = _scan(how, state, carry) if run is None else run(state, carry)
    if changed:
        flat = list(_leaves(how, state).items())
        nnx.update(layers, nnx.from_flat_state([(flat[i][0], _with(flat[i][1], v)) for i, v in changed.items()]))
    return carry


@dataclass(frozen=True, kw_only=True)
class _How:
    """What a scan is compiled for.

    Attributes:
      body: the caller's function.
      graphdef: of the stacked module.
      modules: paths of the modules whose operations index the layer, and whether a scan around this one has them index
        a group of layers already.
      weights: paths of the variables of theirs in which operations index; absent ones among them.
      unroll: steps a turn of the loop.
    """

    body: Code
    graphdef: Any
    modules: tuple[tuple[Path, bool], ...]
    weights: tuple[Path, ...]
    unroll: int


@dataclass(frozen=True)
class _Refuse:
    """A hook that keeps a weight from being set. (Values cannot tell: after ``nnx.remat`` all are new objects.)"""

    name: str

    def __call__(self, variable: nnx.Variable, value: Any) -> Any:
        raise ValueError(_changes_weight(self.name))


def _changes_weight(name: str) -> str:
    return f"body changes {name}, a weight that is shared by all steps; only other variables may change"


def _leaves(how: _How, state: nnx.State) -> dict[Path, Any]:
    """Variables and arrays by path, without the indices that a scan around this one has set."""
    indices = {(*path, "layer") for path, _ in how.modules}
    return {path: leaf for path, leaf in nnx.to_flat_state(state) if path not in indices}


def _scan(how: _How, state: nnx.State, carry: Carry) -> tuple[Carry, dict[int, Any]]:
    """The last carry, and the stacked new values of what ``body`` changes, by its number among ``_leaves``."""
    flat = _leaves(how, state)
    groups = {path for path, nested in how.modules if nested}
    length = _length(flat, {path for path in how.weights if path[:-1] in groups})
    weights = {path: flat[path] for path in how.weights if path in flat}
    weights = {path: _merged(leaf) if path[:-1] in groups else leaf for path, leaf in weights.items()}
    group_index = {path: leaf for path, leaf in nnx.to_flat_state(state) if path not in flat}
    sliced = {i: _raw(leaf) for i, (path, leaf) in enumerate(flat.items()) if path not in weights}

    def step(carry: Carry, xs: tuple[Array, dict[int, Any]]) -> tuple[Carry, dict[int, Any]]:
        index, values = xs
        own = {path: _with(leaf, values[i]) for i, (path, leaf) in enumerate(flat.items()) if i in values}
        shared = {path: _unchanging(path, leaf) for path, leaf in weights.items()}
        layer = nnx.merge(how.graphdef, nnx.from_flat_state({**shared, **own, **group_index}))
        before = _values(how, layer)
        modules = dict(_weighted(layer))
        for path, nested in how.modules:
            modules[path].layer = group_index[(*path, "layer")] * jnp.int32(length) + index if nested else index
        before_body = carry
        carry = how.body.function(layer, carry)
        _check_carry(before_body, carry)
        _check_shared(layer, shared)
        after = _values(how, layer)
        _check_same_names(before, after)
        changed = {i: after[path] for i, path in enumerate(flat) if i in values and after[path] is not before[path]}
        return carry, changed

    return lax.scan(step, carry, (jnp.arange(length, dtype=jnp.int32), sliced), unroll=how.unroll)


def _unchanging(path: Path, leaf: nnx.Variable) -> nnx.Variable:
    """A variable of a step's own, for Flax takes none that was made outside the trace; it cannot be set."""
    return leaf.replace(leaf.get_raw_value(), on_set_value=(_Refuse(_name(path)),))


def _merged(leaf: nnx.Variable) -> nnx.Variable:
    """A weight (groups, layers, ...) as (groups * layers, ...), which is no copy."""
    value = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), leaf.get_raw_value())
    axes = leaf.get_metadata("out_sharding", None)
    return leaf.replace(value, **({} if axes is None else {"out_sharding": tuple(axes)[1:]}))


def _length(flat: dict[Path, Any], grouped: set[Path]) -> int:
    """The extent of the leading axis that all leaves share; the second one where groups lead."""
    extents = {
        _name(path): leaf.shape[axis] if leaf.ndim > axis else None
        for path, value in flat.items()
        for axis in [int(path in grouped)]
        for leaf in jax.tree.leaves(_raw(value))
    }
    length = next(iter(extents.values()), None)
    if length is None or any(extent != length for extent in extents.values()):
        listed = ", ".join(f"{path}: {'no axis' if extent is None else extent}" for path, extent in extents.items())
        raise ValueError(f"layers is not stacked: its variables' leading axes are not one extent ({listed})")
    return length


def _name(path: Path) -> str:
    return ".".join(map(str, path))


def _weighted(module: nnx.Module) -> list[tuple[Path, Linear | FusedMoE]]:
    return [(path, m) for path, m in nnx.iter_modules(module) if isinstance(m, Linear | FusedMoE)]


def _is_dense(module: Linear | FusedMoE) -> bool:
    return all(getattr(module, name + "_format") is None for name in module.weight_names)


def _indexed_names(module: Linear | FusedMoE) -> list[str]:
    """Variables in which an operation finds the layer itself."""
    return [part for name in module.weight_names for part in param.part_names(name)] + list(module.bias_names)


def _raw(leaf: Any) -> Any:
    """The value of a variable, or an array that is held as it is."""
    return leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf


def _with(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


def _values(how: _How, module: nnx.Module) -> dict[Path, Any]:
    return {path: _raw(leaf) for path, leaf in _leaves(how, nnx.state(module)).items()}


def _carried(name: str, leaf: Any) -> Any:
    """The type of a carry's leaf; a TypeError names what is no array."""
    try:
        return jax.typeof(leaf)
    except (TypeError, OverflowError) as error:
        raise TypeError(f"{name} is {type_of(leaf)}, but a carry is a pytree of arrays ({error})") from error


def _check_carry(given: Any, found: Any) -> None:
    """Raises TypeError where a body returns another kind of carry than it was given."""
    structure: Any = jax.tree.structure(given)
    other: Any = jax.tree.structure(found)
    leaves, news = jax.tree.leaves_with_path(given), jax.tree.leaves(found)
    if other != structure:
        what = "None" if found is None else f"a carry of structure {other}"
        raise TypeError(f"body returns {what}, but it is given, and returns, a carry of structure {structure}")
    for (path, old), new in zip(leaves, news, strict=True):
        name = f"carry{jax.tree_util.keystr(path)}"
        was, now = _carried(name, old), _carried(f"body returns a {name} that", new)
        if not (isinstance(was, jax.core.ShapedArray) and isinstance(now, jax.core.ShapedArray)):
            continue
        # What starts as a Python number takes the dtype that it comes back in.
        if was.shape != now.shape or (was.dtype != now.dtype and not was.weak_type):
            returned, given_as = (_describe((aval.shape, aval.dtype)) for aval in (now, was))
            raise TypeError(f"body returns {name} as {returned}, but it is given {given_as}: both stay as they are")


def _check_shared(layer: nnx.Module, shared: dict[Path, Any]) -> None:
    """Raises ValueError where a body has put another variable in the place of one that all steps share."""
    now = dict(nnx.to_flat_state(nnx.state(layer)))
    for path, leaf in shared.items():
        if path not in now or now[path].get_metadata("on_set_value", ()) != leaf.get_metadata("on_set_value"):
            raise ValueError(_changes_weight(_name(path)))


def _check_same_names(before: dict[Path, Any], after: dict[Path, Any]) -> None:
    for path in [*after, *before]:
        name = _name(path)
        if path not in before:
            raise ValueError(f"body adds the variable {name} to a layer, and a scanned layer cannot keep it")
        if path not in after:
            raise ValueError(f"body removes the variable {name} from a layer, and the other layers have it")
