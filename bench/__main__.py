"""``python -m bench NAME ...``: measure, print a table, write bench/results/NAME-<device>.json and .png."""

import argparse
import functools
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import harness, report

BENCHMARKS = ("linear", "moe", "tiles")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--recipes", help="comma-separated; all by default")
    parser.add_argument("--layers", help="comma-separated names of layers; all by default")
    parser.add_argument("--tokens", help="comma-separated row counts; all by default")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    parser.add_argument("--label", default="", help="added to the files' names, so that a part keeps the whole")
    given = parser.parse_args()
    name = "-".join(filter(None, (given.benchmark, given.label)))
    benchmark = importlib.import_module(f"bench.{given.benchmark}")

    def chosen(option: str, known: Iterable[Any], kind: Callable[[str], Any] = str) -> list[Any]:
        text = getattr(given, option)
        names = list(known) if text is None else text.split(",")
        try:
            values = [kind(name) for name in names]
        except ValueError:
            parser.error(f"--{option} {text!r} must be numbers with commas between them")
        wrong = [value for value in values if (value < 1 if kind is int else value not in known)]
        if wrong:
            parser.error(f"--{option} has {wrong[0]!r}; known are {', '.join(map(str, known))}")
        return values

    result = harness.run(
        benchmark.rows,
        chosen("layers", tuple(benchmark.LAYERS)),
        chosen("recipes", benchmark.RECIPES),
        chosen("tokens", benchmark.TOKENS, int),
        functools.partial(report.save, folder=given.out, name=name),
    )
    report.write(result, given.out, name, chart=getattr(benchmark, "CHART", True))


if __name__ == "__main__":
    main()
