"""Results as JSON, as a table, and as a picture."""

import datetime
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jaxlib
import matplotlib
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
COLUMNS = ("us", "us_scan", "us_kernels", "launches", "tflops", "gbs", "floor")


def row(
    *,
    us: float | None,
    us_scan: float | None,
    us_kernels: float | None,
    launches: int | None,
    flops: float,
    moved: float,
    peak_tflops: float,
    ceilings: dict[str, float],
    kernels: dict[str, float] | None = None,
    clock: dict[str, Any] | None = None,
    compile_s: float | None = None,
    extra_bytes: int | None = None,
) -> Row:
    """One measurement.

    Args:
      us: microseconds of a call among dependent calls; ``us_scan``, inside a scan over layers; ``us_kernels``, the sum
        of its kernels; None where not measured.
      us_scan, us_kernels: see ``us``.
      launches: kernels a call.
      flops: floating-point operations of a call.
      moved: the fewest bytes a call must move.
      peak_tflops: the ceiling of the matrix unit it could use.
      ceilings: of the same run, see ``timing.ceilings``.
      kernels: microseconds a call of each kernel, by name.
      clock: of the GPU meanwhile, see ``clocks.summary``.
      compile_s: seconds that it took to trace, lower and compile one call, cold, beside other compilations.
      extra_bytes: temporary memory of one call.

    Returns:
      The columns, and the last four; ``floor`` is the least time that the ceilings allow, in us.
    """
    best = us_kernels or us
    return {
        "us": us,
        "us_scan": us_scan,
        "us_kernels": us_kernels,
        "launches": launches,
        "tflops": flops / best * 1e-6 if best else None,
        "gbs": moved / best * 1e-3 if best else None,
        "floor": max(flops / peak_tflops * 1e-6, moved / ceilings["gbs"] * 1e-3),
        "kernels": kernels or {},
        "clock": clock or {},
        "compile_s": compile_s,
        "extra_bytes": extra_bytes,
    }


def result(ceilings: dict[str, float], rows: dict[str, Row]) -> dict[str, Any]:
    """Everything that is written: device, date, versions, ceilings, rows by "layer/recipe/T"."""
    return {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "ceilings": ceilings,
        "rows": rows,
    }


def save(results: dict[str, Any], folder: Path, name: str) -> Path:
    """Writes the JSON of results, which may be partial, to ``folder``; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    device = re.sub(r"\W+", "-", results["device"].lower()).strip("-")
    path = folder / f"{name}-{device}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    return path


def write(results: dict[str, Any], folder: Path, name: str, *, chart: bool = True) -> None:
    """Writes JSON and, if there is a ``chart``, PNG to ``folder`` and prints the table."""
    written = [save(results, folder, name)]
    if chart:
        written.append(written[0].with_suffix(".png"))
        plot(results, written[1])
    print_table(results)
    print(f"wrote {' and '.join(map(str, written))}")


def print_table(results: dict[str, Any]) -> None:
    """The rows as a table."""
    limits = ", ".join(f"{key} {value:.0f}" for key, value in results["ceilings"].items())
    table = Table(title=f"{results['device']}, jax {results['versions']['jax']}; ceilings: {limits}")
    table.add_column("layer/recipe/T")
    for column in (*COLUMNS, "of floor", "compile s", "extra MB", "MHz"):
        table.add_column(column, justify="right")
    for key, values in results["rows"].items():
        best = values["us_kernels"] or values["us"]
        share = f"{values['floor'] / best:.0%}" if best else ""
        extra = values.get("extra_bytes")
        more = (values.get("compile_s"), None if extra is None else extra / 1e6, values.get("clock", {}).get("mhz"))
        table.add_row(key, *(_number(values[c]) for c in COLUMNS), share, *map(_number, more))
    console = Console(width=160)
    console.print(table)
    for name, ratios in costs(results["rows"]).items():
        console.print(
            f"{name} takes, of the plain call's time: {', '.join(f'{t}: {r:.2f}' for t, r in ratios.items())}"
        )


def costs(rows: dict[str, Row]) -> dict[str, dict[str, float]]:
    """Of each "layer/recipe+way", by row count, its time as a multiple of that of "layer/recipe"."""
    found: dict[str, dict[str, float]] = {}
    for key, row in rows.items():
        name, _, tokens = key.rpartition("/")
        plain = rows.get(f"{name.split('+')[0]}/{tokens}")
        if "+" in name and plain is not None and row["us"] and plain["us"]:
            found.setdefault(name, {})[tokens] = row["us"] / plain["us"]
    return found


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def plot(results: dict[str, Any], path: Path) -> None:
    """Time of a call over rows: a panel a layer, a line a recipe, the roofline of each format, and peers' points.

    The roofline is the least time that the ceilings measured in the same run allow.
    """
    matplotlib.use("agg")
    from matplotlib import pyplot

    panels: dict[str, dict[str, dict[int, Row]]] = {}
    for key, values in results["rows"].items():
        layer, recipe, tokens = key.rsplit("/", 2)
        panels.setdefault(layer, {}).setdefault(recipe, {})[int(tokens)] = values
    figure, axes = pyplot.subplots(1, len(panels), figsize=(max(6, 5 * len(panels)), 4.5), squeeze=False)
    for axis, (layer, recipes) in zip(axes[0], panels.items(), strict=True):
        colours = {}
        for recipe, points in recipes.items():
            times = {t: points[t]["us"] or points[t]["us_kernels"] for t in sorted(points)}
            [line] = axis.plot(list(times), list(times.values()), marker="o", markersize=4, label=recipe)
            colours[recipe] = line.get_color()
        for floor, named in _rooflines(recipes).items():
            axis.plot(*zip(*floor, strict=True), linestyle=":", color=colours[named[0]], label=f"roofline {named[0]}")
        for name, points in _peers_of(layer, recipes, results["device"]).items():
            colour = colours[_recipes_of(name.rsplit(" ", 1)[1], recipes)[0]]
            axis.plot(list(points), list(points.values()), "x--", linewidth=0.8, color=colour, label=name)
        axis.set(title=layer, xlabel="rows", ylabel="microseconds", xscale="log", yscale="log")
        axis.legend(fontsize="x-small")
    figure.suptitle(results["device"])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _rooflines(recipes: dict[str, dict[int, Row]]) -> dict[tuple[tuple[int, float], ...], list[str]]:
    """Floors over rows, each with the recipes that have it, but for those that are another's to a tenth."""
    found: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for recipe, points in recipes.items():
        floor = tuple((t, points[t]["floor"]) for t in sorted(points))
        alike = [other for other in found if _alike(dict(other), dict(floor))]
        found.setdefault(alike[0] if alike else floor, []).append(recipe)
    return found


def _alike(a: dict[int, float], b: dict[int, float]) -> bool:
    common = a.keys() & b.keys()
    return bool(common) and all(abs(a[t] - b[t]) <= 0.1 * b[t] for t in common)


PUBLISHED = Path(__file__).parent / "vllm-h200.json"
"""Times of vLLM's layers of experts: "layer/path recipe/T" to microseconds, and how they were measured."""


def _peers_of(layer: str, recipes: dict[str, Any], device: str) -> dict[str, dict[int, float]]:
    """Published times of a layer on that device, of the recipes that are drawn."""
    if "H200" not in device:
        return {}
    found: dict[str, dict[int, float]] = {}
    for key, us in json.loads(PUBLISHED.read_text())["rows"].items():
        of, name, tokens = key.rsplit("/", 2)
        if of == layer and _recipes_of(name.rsplit(" ", 1)[1], recipes):
            found.setdefault(name, {})[int(tokens)] = us
    return found


def _recipes_of(name: str, recipes: Iterable[str]) -> list[str]:
    """Those of that name, with whatever options: ``int4:group=64`` is an ``int4``."""
    return [recipe for recipe in recipes if recipe == name or recipe.split(":")[0] == name]


def main() -> None:
    """Draws the charts of results again: ``python -m bench.report bench/results/moe-*.json``."""
    for name in sys.argv[1:]:
        path = Path(name)
        results = json.loads(path.read_text())
        plot(results, path.with_suffix(".png"))
        print_table(results)


if __name__ == "__main__":
    main()
