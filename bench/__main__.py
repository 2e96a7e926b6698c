"""``python -m bench NAME ...``: measure, print a table, write bench/results/NAME-<device>.json and .png."""

import argparse
import functools
import importlib
from pathlib import Path

from bench import report

BENCHMARKS = ("linear", "moe")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--recipes", help="comma-separated; all by default")
    parser.add_argument("--layers", help="comma-separated names of layers; all by default")
    parser.add_argument("--tokens", help="comma-separated row counts; all by default")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the results")
    given = parser.parse_args()
    chosen = {name: getattr(given, name).split(",") for name in ("recipes", "layers", "tokens") if getattr(given, name)}
    if "tokens" in chosen:
        chosen["tokens"] = [int(t) for t in chosen["tokens"]]
    save = functools.partial(report.save, folder=given.out, name=given.benchmark)
    result = importlib.import_module(f"bench.{given.benchmark}").run(**chosen, save=save)
    report.write(result, given.out, given.benchmark)


if __name__ == "__main__":
    main()
