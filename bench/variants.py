"""Names of rows: a recipe or a peer, and behind plus signs how it is called: ``fp8_block+zipf+batch_invariant``."""

from collections.abc import Sequence
from typing import NamedTuple

from jmoe.backends.spec import Accumulation


class Variant(NamedTuple):
    """A row's name in parts.

    Attributes:
      recipe: of jmoe, or a peer's name.
      zipf: routing is skewed, expert i of some order is chosen in proportion to 1/i; else uniform.
      batch_invariant: under ``jmoe.config(batch_invariant=True)``.
      accumulation: asked for; None is the recipe's default.
    """

    recipe: str
    zipf: bool = False
    batch_invariant: bool = False
    accumulation: Accumulation | None = None


WAYS: dict[str, dict[str, object]] = {
    "zipf": {"zipf": True},
    "batch_invariant": {"batch_invariant": True},
    "exact": {"accumulation": "exact"},
    "fast": {"accumulation": "fast"},
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
