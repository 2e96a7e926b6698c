"""Names of rows: a recipe or a peer, and behind plus signs how it is called: ``fp8_block+zipf+batch_invariant``."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jmoe.backends.spec import Accumulation

_WORKSPACE = 8 * 2**30
"""Bytes that one layer of any model here fits."""


class Variant(NamedTuple):
    """A row's name in parts.

    Attributes:
      recipe: of jmoe, or a peer's name.
      zipf: routing is skewed, expert i of some order is chosen in proportion to 1/i; else uniform.
      batch_invariant: under ``jmoe.config(batch_invariant=True)``.
      accumulation: asked for; None is the recipe's default.
      workspace: weights are expanded before products of many rows, under ``jmoe.config(workspace=...)``.
    """

    recipe: str
    zipf: bool = False
    batch_invariant: bool = False
    accumulation: Accumulation | None = None
    workspace: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What ``jmoe.config`` is called with."""
        return {"batch_invariant": self.batch_invariant, "workspace": _WORKSPACE if self.workspace else 0}


WAYS: dict[str, dict[str, object]] = {
    "zipf": {"zipf": True},
    "batch_invariant": {"batch_invariant": True},
    "exact": {"accumulation": "exact"},
    "fast": {"accumulation": "fast"},
    "workspace": {"workspace": True},
}
"""Behind the plus signs."""


def parse(name: str) -> Variant:
    """The parts of a name; raises KeyError for a way that there is not."""
    recipe, *ways = name.split("+")
    changes: dict[str, object] = {}
    for way in ways:
        changes |= WAYS[way]
    return Variant(recipe)._replace(**changes)


def is_known(name: str, defaults: Sequence[str], ways: Sequence[str]) -> bool:
    """Whether a benchmark has rows of that name: one of its recipes, with any options, in any of its ways."""
    recipe, *asked = name.split("+")
    bases = {default.split("+")[0] for default in defaults}
    return recipe.split(":")[0] in bases and set(asked) <= set(ways)
