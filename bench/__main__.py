"""``python -m bench NAME ...``: measure, print a table, write bench/results/NAME-<device>.json and .png."""

import argparse
import functools
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import harness, report, variants

BENCHMARKS = ("linear", "moe", "tiles")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    ways = f"with ways behind plus signs, such as fp8_block+zipf: {', '.join(variants.WAYS)}"
    parser.add_argument("--recipes", help=f"comma-separated; {ways}; the usual ones by default")
    parser.add_argument("--routing", default="uniform", help="of experts: uniform, zipf, or both with a comma between")
    parser.add_argument("--layers", help="comma-separated names of layers; the usual ones by default")
    parser.add_argument("--tokens", help="comma-separated row counts; all by default")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument("--label", default="", help="added to the files' names, so that a part keeps the whole")
    given = parser.parse_args()
    name = "-".join(filter(None, (given.benchmark, given.label)))
    benchmark = importlib.import_module(f"bench.{given.benchmark}")

    def is_known(option: str, value: str, known: Iterable[str]) -> bool:
        if option == "recipes":
            return variants.is_known(value, tuple(known), getattr(benchmark, "WAYS", ()))
        return value in known

    def chosen(option: str, known: Iterable[Any], kind: Callable[[str], Any] = str) -> list[Any]:
        text = getattr(given, option)
        names = getattr(benchmark, "USUAL", {}).get(option, tuple(known)) if text is None else text.split(",")
        try:
            values = [kind(name) for name in names]
        except ValueError:
            parser.error(f"--{option} {text!r} must be numbers with commas between them")
        wrong = [value for value in values if (value < 1 if kind is int else not is_known(option, value, known))]
        if wrong:
            parser.error(f"--{option} has {wrong[0]!r}; known are {', '.join(map(str, known))}")
        return values

    recipes = chosen("recipes", benchmark.RECIPES)
    routings = chosen("routing", ("uniform", "zipf"))
    if given.benchmark != "moe" and routings != ["uniform"]:
        parser.error(f"--routing {given.routing} is of experts, and {given.benchmark} has none")
    zipf = [recipe if "zipf" in recipe.split("+") else f"{recipe}+zipf" for recipe in recipes]
    recipes = list(dict.fromkeys(recipes * ("uniform" in routings) + zipf * ("zipf" in routings)))
    result = harness.run(
        benchmark.rows,
        chosen("layers", tuple(benchmark.LAYERS)),
        recipes,
        chosen("tokens", benchmark.TOKENS, int),
        functools.partial(report.save, folder=given.out, name=name),
    )
    report.write(result, given.out, name, chart=getattr(benchmark, "CHART", True))


if __name__ == "__main__":
    main()
