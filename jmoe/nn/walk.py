"""The modules of a model, by the paths that rules and reports name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from flax import nnx

Replace = Callable[[nnx.Module], None]


@dataclass(frozen=True, slots=True)
class Node:
    """A module of a model.

    Attributes:
      paths: "layers.0.self_attn.q_proj"; several of a module that is held in several places.
      module: itself.
      replace: puts another module in its place, wherever it is held.
      fixed: the place, if any, where it cannot be replaced, for a tuple holds it.
    """

    paths: tuple[str, ...]
    module: Any
    replace: Replace
    fixed: str | None

    @property
    def path(self) -> str:
        """The first place."""
        return self.paths[0]


def modules(model: nnx.Module) -> list[Node]:
    """Every module below ``model`` once, parents before children; the model itself has no place and is left out."""
    found: dict[int, tuple[nnx.Module, list[_Place]]] = {}
    for place, module in _walk(model, (), {id(model)}):
        found.setdefault(id(module), (module, []))[1].append(place)
    return [
        Node(
            tuple(place.path for place in places),
            module,
            _all_of([place.replace for place in places]),
            next((place.path for place in places if place.fixed), None),
        )
        for module, places in found.values()
    ]


class _Place(NamedTuple):
    path: str
    replace: Replace
    fixed: bool


def _all_of(places: list[Replace]) -> Replace:
    def replace(new: nnx.Module) -> None:
        for place in places:
            place(new)

    return replace


def _walk(parent: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[_Place, nnx.Module]]:
    """Each place below ``parent`` that holds a module, and the module."""
    for key, child in _children(parent):
        here = (*path, str(key))
        if isinstance(child, nnx.Module):
            yield _Place(".".join(here), _setter(parent, key), isinstance(parent, tuple)), child
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


def _setter(parent: Any, key: Any) -> Replace:
    def replace(new: nnx.Module) -> None:
        if isinstance(parent, nnx.Module):
            setattr(parent, key, new)
        else:
            parent[key] = new

    return replace
