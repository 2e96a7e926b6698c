"""One checkpoint under several recipes: what each costs and gains, as rows, a table, a chart and JSON."""

import dataclasses
import datetime
import gc
import importlib.metadata
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich import box
from rich.table import Table
from rich.text import Text

import jmoe
from jmoe import checkpoint
from jmoe.backends.select import current_device
from jmoe.config import config
from jmoe.models import Decoder
from jmoe.models.decoder import evaluate
from jmoe.nn import calibrate, quantize_model
from jmoe.nn.rules import Rules
from jmoe.ops.explain import Explanation, explain
from jmoe.scheme import RECIPES, Recipe, as_recipe

DEFAULT_RECIPES = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block", "int8", "int4", "mxfp4", "nvfp4")

AS_STORED = "as_stored"
"""The row of a checkpoint that is quantized already."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, steps done and steps in all."""

_CALIBRATION_WINDOWS = 16


class ReasonedTable(Table):
    """A table whose reasons are numbered, each written out once below it."""

    def __init__(self, title: str) -> None:
        super().__init__(title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        self._reasons: list[str] = []

    def why(self, reason: str) -> str:
        """The number of a reason, "" of an empty one."""
        if not reason:
            return ""
        if reason not in self._reasons:
            self._reasons.append(reason)
            self.caption = Text("\n".join(f"{number}: {text}" for number, text in enumerate(self._reasons, 1)))
        return str(self._reasons.index(reason) + 1)


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """How far a quantized layer's weights are from the dense ones."""

    path: str
    sqnr_db: float


@dataclass(frozen=True, kw_only=True)
class Row:
    """A checkpoint under one recipe.

    Attributes:
      recipe: its name.
      weight_bytes: bytes of all the model's weights, scales included.
      sqnr_db: signal to quantisation noise of the quantized weights in dB; None where none is quantized.
      loss: held-out loss in nats a token.
      loss_change: against the row of bf16.
      tokens_per_second: of the compiled evaluation, compilation excluded.
      implementation: what ran, and ``reason`` why.
      layers: every quantized layer's error.
    """

    recipe: str
    weight_bytes: int
    sqnr_db: float | None
    loss: float
    loss_change: float
    tokens_per_second: float
    implementation: str
    reason: str
    layers: tuple[LayerError, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What ``compare`` found, with what it takes to find it again."""

    checkpoint: str
    text: str
    device: str
    dtype: str
    date: str
    tokens: int
    unit: str
    window: int
    versions: dict[str, str]
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    def table(self) -> ReasonedTable:
        """The rows for a terminal."""
        table = ReasonedTable(
            f"{self.checkpoint} on {self.device}, computed in {self.dtype}, {self.tokens:,} tokens scored"
        )
        table.add_column("recipe", no_wrap=True)
        for heading in ("weights\nMB", "SQNR\ndB", f"loss\n{self.unit}", "change", "tokens/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("runs on")
        table.add_column("why", justify="right")
        for row in self.rows:
            table.add_row(
                row.recipe,
                f"{row.weight_bytes / 1e6:.2f}",
                "-" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
                f"{row.loss:.4f}",
                f"{row.loss_change:+.4f}",
                f"{row.tokens_per_second:,.0f}",
                row.implementation,
                table.why(row.reason),
            )
        return table

    def save_chart(self, path: Path) -> None:
        """A PNG: loss change against bytes, and the error of every layer."""
        from matplotlib.figure import Figure  # slow to import, needed only here

        figure = Figure(figsize=(14, 5.5), layout="constrained")
        by_bytes, by_layer = figure.subplots(1, 2)
        draw_loss_against_bytes(by_bytes, self)
        draw_error_by_layer(by_layer, self)
        figure.suptitle(f"{self.checkpoint} on {self.device}")
        figure.savefig(path, dpi=130)


def compare(
    path: Path | str,
    recipes: Sequence[Recipe | str] = DEFAULT_RECIPES,
    *,
    text: Path | str,
    dtype: jax.typing.DTypeLike | None = None,
    window: int = 256,
    batch: int = 16,
    windows: int | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Loads a checkpoint, quantizes it with each recipe in turn, and scores a text.

    Every projection of attention and every expert is quantized; router, embedding, norms and lm_head are not. A text is
    scored in windows of ``window`` tokens, each read on its own, all of its tokens but the first scored.

    Args:
      path: the checkpoint, unquantized; one that is quantized already gets one row, as it is stored.
      recipes: recipes or their names. The first row is always bf16, which the others' change is against.
      text: a file of bytes for a model of 256 tokens, or of token ids (``.npy``, integers, one axis) for any.
      dtype: what is computed in; float32 on CPUs and bfloat16 elsewhere by default.
      window: tokens a window.
      batch: windows computed at once.
      windows: score just so many; all by default.
      progress: called as work proceeds.

    Raises:
      ValueError: an unknown recipe, a text of the wrong kind or too short, recipes asked of a quantized checkpoint.
      OSError: a file that cannot be read.
    """
    device = current_device()
    dtype = jnp.dtype(dtype or (jnp.float32 if device.platform == "cpu" else jnp.bfloat16))
    with checkpoint.open(path) as opened:
        method = opened.summary().method
        tokens = read_tokens(Path(text), int(opened.text_config["vocab_size"]))
    tokens = tokens[: window * min(len(tokens) // window, windows or len(tokens))]
    stored = method != "none"
    chosen = [as_recipe(recipe) for recipe in recipes]
    if stored and tuple(recipes) != DEFAULT_RECIPES:
        raise ValueError(
            f"{path} is quantized already ({method}): recipes are compared on an unquantized checkpoint, "
            "and without --recipes it is scored as it is stored"
        )
    if not stored and chosen[0].weight is not None:
        chosen.insert(0, jmoe.recipe("bf16"))
    names = [AS_STORED] if stored else [recipe.name for recipe in chosen]
    steps_a_row = -(-len(tokens) // (window * batch)) + 1
    report = _Steps(progress, steps_a_row * len(names))
    rows: list[Row] = []
    for name, recipe in zip(names, [None] if stored else chosen, strict=True):
        report.phase = name
        # Held as the file has it, so that a row's bytes are those of its weights whatever is computed in.
        model = checkpoint.load_model(path, dtype=dtype, param_dtype=jnp.bfloat16)
        layers = _quantize(model, recipe, tokens, window) if recipe is not None and recipe.weight is not None else ()
        rows.append(_score(name, model, layers, tokens, window, batch, rows[0].loss if rows else None, report))
        del model
        gc.collect()
    return Comparison(
        checkpoint=str(path),
        text=str(text),
        device=device.name,
        dtype=dtype.name,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tokens=len(tokens) // window * (window - 1),
        unit="nats/byte" if Path(text).suffix != ".npy" else "nats/token",
        window=window,
        versions={package: importlib.metadata.version(package) for package in ("jmoe", "jax", "flax", "numpy")},
        rows=tuple(rows),
    )


def quantization_rules(recipe: Recipe | str) -> Rules:
    """The rules for a decoder: every projection and expert but lm_head."""
    return [(r"lm_head", None), (r".+", recipe)]


def split_recipes(text: str) -> list[str]:
    """The recipes of a list such as ``fp8_block,int4:group=64,zero_point,nvfp4``; a comma also separates options."""
    names: list[str] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        is_option = names and ":" in names[-1] and item.partition(":")[0] not in RECIPES
        if is_option:
            names[-1] += f",{item}"
        else:
            names.append(item)
    if not names:
        raise ValueError(f"recipes={text!r} names none; known recipes are {', '.join(RECIPES)}")
    return names


def read_tokens(path: Path, vocab_size: int) -> np.ndarray:
    """Token ids (n,) from a file: bytes for a vocabulary of 256, a ``.npy`` of integers for any."""
    if path.suffix == ".npy":
        tokens = np.load(path, allow_pickle=False)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"{path} holds {tokens.dtype} of shape {tokens.shape}, but token ids are integers (n,)")
    elif vocab_size == 256:
        tokens = np.frombuffer(path.read_bytes(), np.uint8)
    else:
        raise ValueError(f"{path} is read as bytes, but the model has {vocab_size} tokens; give token ids as a .npy")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(f"{path} has token ids up to {tokens.max()}, but the model has {vocab_size} tokens")
    return tokens.astype(np.int32)


@dataclass
class _Steps:
    """Counts steps for a progress bar."""

    progress: Progress | None
    total: int
    phase: str = ""
    done: int = 0

    def advance(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.phase, self.done, self.total)


def _quantize(model: Decoder, recipe: Recipe, tokens: np.ndarray, window: int) -> tuple[LayerError, ...]:
    """Quantizes the model in place; a recipe with given activation scales is calibrated on the head of the text."""
    calibration = None
    if recipe.input is not None and recipe.input.static:
        head = tokens[: window * _CALIBRATION_WINDOWS]
        head = head[: len(head) // window * window].reshape(-1, window)
        calibration = calibrate(model, [head])
    report = quantize_model(model, quantization_rules(recipe), calibration=calibration, sqnr=True)
    return tuple(
        LayerError(path=layer.path, sqnr_db=layer.sqnr_db) for layer in report.layers if layer.sqnr_db is not None
    )


def _score(
    name: str,
    model: Decoder,
    layers: tuple[LayerError, ...],
    tokens: np.ndarray,
    window: int,
    batch: int,
    baseline: float | None,
    report: _Steps,
) -> Row:
    sample = jax.ShapeDtypeStruct((batch, window), jnp.int32)
    asked = None
    try:
        explanation = explain(model, sample)
    except ExceptionGroup:
        # Nothing serves this recipe by default on this device, so it is emulated, and the row says so.
        asked = "xla"
        with config(implementation=asked):
            explanation = explain(model, sample)
    step = window * batch
    parts = [tokens[start : start + step] for start in range(0, len(tokens), step)]
    with config(implementation=asked or config.implementation):
        evaluate(model, parts[0], window=window, batch=batch)  # compiles
        report.advance()
        started = time.perf_counter()
        total = 0.0
        for part in parts:
            total += evaluate(model, part, window=window, batch=batch) * (len(part) // window)
            report.advance()
        seconds = time.perf_counter() - started
    loss = total / (len(tokens) // window)
    implementation, reason = _summary(explanation)
    return Row(
        recipe=name,
        weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))),
        sqnr_db=_mean_sqnr(layers),
        loss=loss,
        loss_change=0.0 if baseline is None else loss - baseline,
        tokens_per_second=len(tokens) / seconds,
        implementation=implementation,
        reason=reason,
        layers=layers,
    )


def _summary(explanation: Explanation) -> tuple[str, str]:
    """What ran the products, and why, once each."""
    selections = [selection for op, selection in explanation.entries]
    implementations = dict.fromkeys(selection.implementation for selection in selections)
    reasons = dict.fromkeys(selection.reason for selection in selections)
    return ", ".join(implementations), "; ".join(reasons)


def _mean_sqnr(layers: Sequence[LayerError]) -> float | None:
    """SQNR in dB of the layers' mean relative noise power."""
    if not layers:
        return None
    return -10 * math.log10(sum(10 ** (-layer.sqnr_db / 10) for layer in layers) / len(layers))


def draw_loss_against_bytes(axes: Any, comparison: Comparison) -> None:
    """A point a recipe: its weights' size and what they cost in loss."""
    rows = comparison.rows
    axes.axhline(0, color="0.8", zorder=0)
    # Recipes of one size share a column of points: their labels are spread by rank so that none covers another.
    axes.scatter([r.weight_bytes / 1e6 for r in rows], [1e3 * r.loss_change for r in rows], s=45, color="C0", zorder=2)
    spread = _label_heights([1e3 * r.loss_change for r in rows])
    for row, height in zip(rows, spread, strict=True):
        point = (row.weight_bytes / 1e6, 1e3 * row.loss_change)
        axes.annotate(
            row.recipe,
            point,
            xytext=(point[0] + 0.02 * max(r.weight_bytes for r in rows) / 1e6, height),
            va="center",
            arrowprops={"arrowstyle": "-", "color": "0.7", "lw": 0.6},
        )
    axes.margins(x=0.25, y=0.1)
    axes.set(xlabel="weights, MB", ylabel=f"loss change, 0.001 {comparison.unit}", title="What the bytes buy")


def _label_heights(values: Sequence[float]) -> list[float]:
    """Heights near ``values`` that keep a distance from each other."""
    step = 0.045 * max(max(values) - min(values), 1e-9)
    heights = list(values)
    order = sorted(range(len(values)), key=lambda i: values[i])
    for below, above in itertools.pairwise(order):
        heights[above] = max(heights[above], heights[below] + step)
    return heights


def draw_error_by_layer(axes: Any, comparison: Comparison) -> None:
    """A line a recipe: relative error of each quantized layer's weights."""
    for row in comparison.rows:
        if row.layers:
            errors = [10 ** (-layer.sqnr_db / 20) for layer in row.layers]
            axes.plot(range(len(errors)), errors, marker=".", label=row.recipe)
    longest = max((row.layers for row in comparison.rows), key=len, default=())
    axes.set_xticks(range(len(longest)), [layer.path for layer in longest], rotation=90, fontsize=6)
    axes.set_yscale("log")
    axes.set(ylabel="relative error of the weights", title="Where the error is")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
