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


def check_rules(rules: Rules) -> None:
    """Raises TypeError where rules are no pairs of an expression and a recipe, ValueError where either is not known."""
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise TypeError(f"rules={rules!r} must be a list of (regular expression, recipe or None) pairs")
    for index, rule in enumerate(rules):
        if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
            raise TypeError(f"rule {index} is {rule!r}, but it is a pair of a regular expression and a recipe or None")
        try:
            re.compile(rule[0])
        except re.error as error:
            raise ValueError(f"rule {index} ({rule[0]!r}) is not a regular expression: {error}") from error
        if rule[1] is not None:
            as_recipe(rule[1])


def decide(rules: Rules, *paths: str) -> Decision:
    """The first rule whose expression matches all of a path of the layer's; an empty path is never matched."""
    for index, (pattern, recipe) in enumerate(rules):
        if any(path and re.fullmatch(pattern, path) for path in paths):
            how = None if recipe is None else as_recipe(recipe)
            return Decision(index, None if how is None or how.weight is None else how)
    return Decision(None, None)


def first_match(patterns: Sequence[str], path: str) -> int | None:
    """Index of the first expression that matches all of ``path``, None where none does."""
    return next((index for index, pattern in enumerate(patterns) if re.fullmatch(pattern, path)), None)


def decide_all(rules: Rules, layers: Sequence[tuple[str, ...]]) -> dict[str, Decision]:
    """A decision for every layer, by the first of its paths: a layer that is held in several places has several.

    Raises:
      ValueError: an expression that is none, or a rule that decides nothing: no layer matches it, or earlier rules
        decide all that do; TypeError: rules that are no pairs of an expression and a recipe.
    """
    check_rules(rules)
    decisions = {paths[0]: decide(rules, *paths) for paths in layers}
    for index, (pattern, _) in enumerate(rules):
        if any(decision.rule == index for decision in decisions.values()):
            continue
        matched = [paths[0] for paths in layers if any(path and re.fullmatch(pattern, path) for path in paths)]
        if matched:
            first = decisions[matched[0]].rule
            raise ValueError(
                f"rule {index} ({pattern!r}) decides nothing: all that it matches, {_some(matched)}, is decided by "
                f"earlier rules, the first of them rule {first}; put the special rule before the general one"
            )
        known = [path for paths in layers for path in paths]
        raise ValueError(
            f"rule {index} ({pattern!r}) matches no layer; it must match a whole path, and layers are {_some(known)}"
        )
    return decisions


def _some(paths: Sequence[str]) -> str:
    shown = ", ".join(map(repr, paths[:6])) or "none"
    return shown if len(paths) <= 6 else f"{shown} and {len(paths) - 6} more"
