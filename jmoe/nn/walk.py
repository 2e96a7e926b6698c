"""The modules of a model, by the paths that rules and reports name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flax import nnx

Replace = Callable[[nnx.Module], None]


@dataclass(frozen=True, slots=True)
class Node:
    """A module of a model.

    Attributes:
      path: "layers.0.self_attn.q_proj"; of a module that is held in several places, the first.
      module: itself.
      replace: puts another module in its place, wherever it is held.
    """

    path: str
    module: Any
    replace: Replace


def modules(model: nnx.Module) -> list[Node]:
    """Every module below ``model`` once, parents before children; the model itself has no place and is left out."""
    found: dict[int, tuple[str, nnx.Module, list[Replace]]] = {}
    for path, module, replace in _walk(model, (), {id(model)}):
        found.setdefault(id(module), (".".join(path), module, []))[2].append(replace)
    return [Node(path, module, _all_of(places)) for path, module, places in found.values()]


def _all_of(places: list[Replace]) -> Replace:
    def replace(new: nnx.Module) -> None:
        for place in places:
            place(new)

    return replace


def _walk(parent: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[tuple[str, ...], nnx.Module, Replace]]:
    """(path, module, how to replace it) for each place below ``parent`` that holds a module."""
    for key, child in _children(parent):
        here = (*path, str(key))
        if isinstance(child, nnx.Module):
            yield here, child, _setter(parent, key, here)
        elif not isinstance(child, dict | list | tuple):
            continue
        if id(child) not in seen:
            seen.add(id(child))
            yield from _walk(child, here, seen)


def _children(parent: Any) -> list[tuple[Any, Any]]:
    if isinstance(parent, nnx.Module):
        # An nnx.List that was merged from a state has its entries in the order of their names: 0, 1, 10, 11, 2.
        names = sorted(vars(parent), key=lambda name: int(name) if name.isdecimal() else -1)
        return [(name, vars(parent)[name]) for name in names if not name.startswith("_pytree__")]
    return list(parent.items() if isinstance(parent, dict) else enumerate(parent))


def _setter(parent: Any, key: Any, path: tuple[str, ...]) -> Replace:
    def replace(new: nnx.Module) -> None:
        if isinstance(parent, nnx.Module):
            setattr(parent, key, new)
        elif isinstance(parent, tuple):
            raise ValueError(f"{'.'.join(path)} is held by a tuple, which cannot be changed in place; use an nnx.List")
        else:
            parent[key] = new

    return replace
