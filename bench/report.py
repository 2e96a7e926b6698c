"""Results as JSON, as a table, and as a picture."""

import datetime
import json
import re
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

    Returns:
      The columns, ``kernels`` and ``clock``; ``floor`` is the least time that the ceilings allow, in us.
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
        _plot(results, written[1])
    print_table(results)
    print(f"wrote {' and '.join(map(str, written))}")


def print_table(results: dict[str, Any]) -> None:
    """The rows as a table."""
    limits = ", ".join(f"{key} {value:.0f}" for key, value in results["ceilings"].items())
    table = Table(title=f"{results['device']}, jax {results['versions']['jax']}; ceilings: {limits}")
    table.add_column("layer/recipe/T")
    for column in (*COLUMNS, "of floor", "MHz"):
        table.add_column(column, justify="right")
    for key, values in results["rows"].items():
        best = values["us_kernels"] or values["us"]
        share = f"{values['floor'] / best:.0%}" if best else ""
        clock = values.get("clock", {}).get("mhz", "")
        table.add_row(key, *(_number(values[c]) for c in COLUMNS), share, str(clock))
    Console(width=160).print(table)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.1f}"


def _plot(results: dict[str, Any], path: Path) -> None:
    """Time over rows, a panel a layer and a line a recipe, with the floor of the fastest format below."""
    matplotlib.use("agg")
    from matplotlib import pyplot

    panels: dict[str, dict[str, dict[int, Row]]] = {}
    for key, values in results["rows"].items():
        layer, recipe, tokens = key.rsplit("/", 2)
        panels.setdefault(layer, {}).setdefault(recipe, {})[int(tokens)] = values
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    for axis, (layer, recipes) in zip(axes[0], panels.items(), strict=True):
        for recipe, points in recipes.items():
            times = {t: v["us_kernels"] or v["us"] for t, v in points.items()}
            axis.plot(list(times), list(times.values()), marker="o", label=recipe)
        least = {t: min(r[t]["floor"] for r in recipes.values() if t in r) for r in recipes.values() for t in r}
        axis.plot(sorted(least), [least[t] for t in sorted(least)], linestyle=":", color="black", label="least floor")
        axis.set(title=layer, xlabel="rows", ylabel="microseconds", xscale="log", yscale="log")
    axes[0][-1].legend(fontsize="small")
    figure.suptitle(results["device"])
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
