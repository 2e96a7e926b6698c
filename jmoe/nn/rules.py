"""Rules that say which layers are quantized, and how."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jmoe.scheme import Recipe, as_recipe

Rules = Sequence[tuple[str, Recipe | str | None]]
"""(regular expression on the whole module path, recipe or None) pairs; the first that matches decides."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rules say of one layer.

    Attributes:
      rule: index of the rule that decides, None where none matches.
      recipe: how the layer is quantized, None where it is left as it is.
    """

    rule: int | None
    recipe: Recipe | None


def decide(rules: Rules, path: str) -> Decision:
    """The first rule whose expression matches all of ``path``; an empty expression never does."""
    for index, (pattern, recipe) in enumerate(rules):
        if path and re.fullmatch(pattern, path):
            how = None if recipe is None else as_recipe(recipe)
            return Decision(index, None if how is None or how.weight is None else how)
    return Decision(None, None)


def decide_all(rules: Rules, paths: Sequence[str]) -> dict[str, Decision]:
    """A decision for every layer.

    Raises:
      ValueError: an expression that is none, or a rule that decides nothing: no layer matches it, or earlier rules
        decide all that do.
    """
    for index, (pattern, _) in enumerate(rules):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"rule {index} ({pattern!r}) is not a regular expression: {error}") from error
    decisions = {path: decide(rules, path) for path in paths}
    for index, (pattern, _) in enumerate(rules):
        if any(decision.rule == index for decision in decisions.values()):
            continue
        matched = [path for path in paths if path and re.fullmatch(pattern, path)]
        if matched:
            first = decisions[matched[0]].rule
            raise ValueError(
                f"rule {index} ({pattern!r}) decides nothing: all that it matches, {_some(matched)}, is decided by "
                f"earlier rules, the first of them rule {first}; put the special rule before the general one"
            )
        raise ValueError(
            f"rule {index} ({pattern!r}) matches no layer; it must match a whole path, and layers are {_some(paths)}"
        )
    return decisions


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(map(repr, paths[:6])) or "none"
    return shown if len(paths) <= 6 else f"{shown} and {len(paths) - 6} more"
