"""One checkpoint under several recipes: what each costs and gains, as rows, a table, a chart and JSON."""

import dataclasses
import datetime
import functools
import gc
import itertools
import json
import math
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich import box
from rich.table import Table
from rich.text import Text

import jmoe
from jmoe import checkpoint
from jmoe.arguments import COMPUTE_DTYPES, float_dtype
from jmoe.backends.select import IMPLEMENTATIONS, current_device
from jmoe.backends.spec import DeviceSpec
from jmoe.checkpoint.load import decoder_config
from jmoe.config import config
from jmoe.models import Decoder, evaluate
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

_EMULATOR = "xla"
"""The implementation that computes what a device has no units for, where it is asked for by name."""


class ReasonedTable(Table):
    """A table whose reasons are numbered, each written out once below it."""

    def __init__(self, title: str) -> None:
        super().__init__(
            title=Text(title),  # a path's brackets are no markup
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            collapse_padding=True,
            pad_edge=False,
        )
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
      loss_change: against the row of bf16; None where there is none.
      tokens_per_second: of the compiled evaluation, compilation excluded.
      implementation: what ran the quantized products (of bf16, all), and ``reason`` why.
      layers: every quantized layer's error.
    """

    recipe: str
    weight_bytes: int
    sqnr_db: float | None
    loss: float
    loss_change: float | None
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
        """All of it; a number that JSON does not have (an SQNR without noise is infinite) is null."""
        return json.dumps(_jsonable(dataclasses.asdict(self)), indent=1, allow_nan=False) + "\n"

    def table(self) -> ReasonedTable:
        """The rows for a terminal."""
        table = ReasonedTable(
            f"{self.checkpoint} on {self.device}, computed in {self.dtype}, {self.tokens:,} tokens scored"
        )
        table.add_column("recipe", overflow="fold")
        for heading in ("weights\nMB", "SQNR\ndB", f"loss\n{self.unit}", "change", "tokens/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("runs on", no_wrap=True)
        table.add_column("why", justify="right")
        for row in self.rows:
            table.add_row(
                row.recipe,
                f"{row.weight_bytes / 1e6:.2f}",
                "-" if row.sqnr_db is None else f"{row.sqnr_db:.1f}",
                f"{row.loss:.4f}",
                "-" if row.loss_change is None else _signed(row.loss_change),
                f"{row.tokens_per_second:,.0f}",
                row.implementation,
                table.why(row.reason),
            )
        return table

    def save_chart(self, path: Path) -> None:
        """A PNG: loss change against bytes, and the error of every layer.

        Raises:
          ValueError: only one row, which there is nothing to compare with.
        """
        if len(self.rows) < 2:
            raise ValueError(f"{self.checkpoint} has one row, {self.rows[0].recipe}; a chart compares at least two")
        from matplotlib.figure import Figure  # slow to import, needed only here

        figure = Figure(figsize=(14, 5.5), layout="constrained")
        by_bytes, by_layer = figure.subplots(1, 2)
        draw_error_by_layer(by_layer, self)
        draw_loss_against_bytes(by_bytes, self)
        figure.suptitle(f"{self.checkpoint} on {self.device}", parse_math=False)
        figure.savefig(path, dpi=130)


def compare(
    path: Path | str,
    recipes: Sequence[Recipe | str] | None = None,
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
    scored in windows of ``window`` tokens, each read on its own, all of its tokens but the first scored. Recipes with
    given activation scales are calibrated on the first windows.

    Args:
      path: the checkpoint, unquantized; one that is quantized already gets one row, as it is stored.
      recipes: recipes or their names, each scored once; ``DEFAULT_RECIPES`` by default. The first row is bf16, which
        the others' change is against, whether it is among them or not.
      text: a file of bytes for a model of 256 tokens, or of token ids (``.npy``, integers, one axis) for any.
      dtype: what is computed in; float32 on CPUs and bfloat16 elsewhere by default.
      window: tokens a window.
      batch: windows computed at once.
      windows: score just so many, the first of the text; all by default.
      progress: called as work proceeds.

    Raises:
      ValueError: an unknown recipe, a text of the wrong kind or too short, a model that is no decoder of
        ``jmoe.models``, recipes asked of a quantized checkpoint.
      OSError: a file that cannot be read.
    """
    for name, value, least in (("window", window, 2), ("batch", batch, 1), ("windows", windows, 1)):
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{name}={value!r} must be an int of at least {least}")
    device = _computing_device()
    default = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    computed = float_dtype("dtype", default if dtype is None else dtype, COMPUTE_DTYPES)
    with checkpoint.open(path) as opened:
        method = opened.method_name
        vocab_size = _vocab_size(opened)
    stored = method != "none"
    if stored and recipes is not None:
        raise ValueError(
            f"{path} is quantized already ({method}): recipes are compared on an unquantized checkpoint, "
            "and without them it is scored as it is stored"
        )
    chosen = _with_baseline(DEFAULT_RECIPES if recipes is None else recipes)
    tokens = _whole_windows(read_tokens(Path(text), vocab_size), window, windows, text)
    batch = min(batch, len(tokens) // window)
    names = [AS_STORED] if stored else [recipe.name for recipe in chosen]
    steps_a_row = -(-len(tokens) // (window * batch)) + 1
    report = _Steps(progress, steps_a_row * len(names))
    rows: list[Row] = []
    for name, recipe in zip(names, [None] if stored else chosen, strict=True):
        report.begin(name)
        score = functools.partial(_score, name, path, recipe, computed, tokens.reshape(-1, window), batch, report)
        try:
            row = score()
        except ExceptionGroup:
            # Nothing serves this recipe by default on this device, so it is emulated, and the row says so.
            with config(implementation=_EMULATOR):
                row = score()
        baseline = rows[0].loss if rows else row.loss
        rows.append(row if stored else dataclasses.replace(row, loss_change=row.loss - baseline))
        gc.collect()
    return Comparison(
        checkpoint=_shown(path),
        text=str(text),
        device=device.name,
        dtype=computed.name,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tokens=len(tokens) // window * (window - 1),
        unit="nats/byte" if Path(text).suffix != ".npy" else "nats/token",
        window=window,
        versions={module.__name__: module.__version__ for module in (jmoe, jax, flax, np)},
        rows=tuple(rows),
    )


def _computing_device() -> DeviceSpec:
    """The device that the rows are measured on, which must be the one that is selected for."""
    asked = current_device()
    with config(device=None):
        device = current_device()
    if asked != device:
        raise ValueError(
            f"the device is {asked.name}, as jmoe.config or JMOE_DEVICE says, but a comparison measures on the device "
            f"that computes, {device.name}; leave the setting out"
        )
    return device


def _shown(path: Path | str) -> str:
    """A checkpoint's path as it was given, but for one without a name, such as ``.``."""
    path = Path(path)
    return str(path if path.name.strip(".") else path.resolve())


def _vocab_size(opened: checkpoint.Checkpoint) -> int:
    """Tokens of the model, whose configuration must be one that ``jmoe.models`` has a decoder for."""
    return decoder_config(opened).vocab_size


def _with_baseline(recipes: Sequence[Recipe | str]) -> list[Recipe]:
    """The recipes, each once, bf16 before those that quantize."""
    if isinstance(recipes, str) or not isinstance(recipes, Sequence):
        raise TypeError(f"recipes={recipes!r} must be a sequence of recipes or their names")
    if not recipes:
        raise ValueError(f"recipes={recipes!r} names none; known recipes are {', '.join(RECIPES)}")
    quantizing = (recipe for recipe in map(as_recipe, recipes) if recipe.weight is not None)
    return list(dict.fromkeys([jmoe.recipe("bf16"), *quantizing]))


def _whole_windows(tokens: np.ndarray, window: int, windows: int | None, text: Path | str) -> np.ndarray:
    """The first ``windows`` windows of the tokens, all whole ones by default."""
    count = len(tokens) // window
    if not count:
        raise ValueError(f"{text} holds {len(tokens)} tokens, which is less than a window of {window}")
    if windows is not None and windows > count:
        raise ValueError(f"windows={windows} is more than the {count} windows of {window} tokens that {text} holds")
    return tokens[: window * (windows or count)]


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
        # Mapped, so that no header makes memory of a size that the file does not have; the last two are for headers
        # that NumPy's parser of Python literals chokes on.
        try:
            tokens: np.ndarray = np.lib.format.open_memmap(path, mode="r")
        except (ValueError, OverflowError, RecursionError, MemoryError, tokenize.TokenError) as error:
            raise ValueError(f"{path} is not an array of token ids: {error}") from error
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(f"{path} holds {tokens.dtype} of shape {tokens.shape}, but token ids are integers (n,)")
    elif vocab_size == 256:
        tokens = np.frombuffer(path.read_bytes(), np.uint8)
    else:
        raise ValueError(f"{path} is read as bytes, but the model has {vocab_size} tokens; give token ids as a .npy")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(
            f"{path} has token ids from {tokens.min()} to {tokens.max()}, but the model has {vocab_size} tokens"
        )
    return tokens.astype(np.int32)


@dataclass
class _Steps:
    """Counts steps for a progress bar."""

    progress: Progress | None
    total: int
    phase: str = ""
    done: int = 0

    def begin(self, phase: str) -> None:
        self.phase = phase
        self._tell(phase)

    def loading(self, done: int, total: int) -> None:
        self._tell(f"{self.phase}, loading {done / total:.0%}")

    def advance(self) -> None:
        self.done += 1
        self._tell(self.phase)

    def _tell(self, phase: str) -> None:
        if self.progress is not None:
            self.progress(phase, self.done, self.total)


def _score(
    name: str,
    path: Path | str,
    recipe: Recipe | None,
    dtype: jax.typing.DTypeLike,
    windows: np.ndarray,
    batch: int,
    report: _Steps,
) -> Row:
    """The row of a checkpoint under a recipe (None: as it is stored), compared with no other yet.

    Raises:
      ExceptionGroup: nothing serves it on this device unless it is asked for by name; nothing was computed then.
    """
    # Held as the file has it, so that a row's bytes are those of its weights whatever is computed in.
    model = checkpoint.load_model(path, dtype=dtype, param_dtype=jnp.bfloat16, progress=report.loading)
    report.begin(name)
    layers = () if recipe is None or recipe.weight is None else _quantize(model, recipe, windows)
    explanation = explain(model, jax.ShapeDtypeStruct((batch, windows.shape[1]), jnp.int32))
    parts = [windows[start : start + batch] for start in range(0, len(windows), batch)]

    def loss_of(part: np.ndarray) -> float:
        return evaluate(model, part.reshape(-1), window=part.shape[1], batch=batch)

    loss_of(parts[0])  # compiles
    report.advance()
    started = time.perf_counter()
    total = 0.0
    for part in parts:
        total += loss_of(part) * len(part)
        report.advance()
    seconds = time.perf_counter() - started
    implementation, reason = _choice(explanation)
    return Row(
        recipe=name,
        weight_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))),
        sqnr_db=_mean_sqnr(layers),
        loss=total / len(windows),
        loss_change=None,
        tokens_per_second=windows.size / seconds,
        implementation=implementation,
        reason=reason,
        layers=layers,
    )


def _quantize(model: Decoder, recipe: Recipe, windows: np.ndarray) -> tuple[LayerError, ...]:
    """Quantizes the model in place; a recipe with given activation scales is calibrated on the first windows."""
    calibration = None
    if recipe.input is not None and recipe.input.static:
        calibration = calibrate(model, [windows[:_CALIBRATION_WINDOWS]])
    report = quantize_model(model, quantization_rules(recipe), calibration=calibration, sqnr=True)
    return tuple(
        LayerError(path=layer.path, sqnr_db=layer.sqnr_db) for layer in report.layers if layer.sqnr_db is not None
    )


def _choice(explanation: Explanation) -> tuple[str, str]:
    """What runs the quantized products (all, where none is), and why; of emulation asked for also what is missing."""
    quantized = [(op, selection) for op, selection in explanation.entries if op.recipe.weight is not None]
    implementations: dict[str, None] = {}
    reasons: dict[str, None] = {}
    for op, selection in quantized or explanation.entries:
        implementations[selection.implementation] = reasons[selection.reason] = None
        try:
            IMPLEMENTATIONS[selection.implementation].plan(op, explanation.device, explicit=False)
        except NotImplementedError as refusal:
            reasons[str(refusal)] = None
        reasons |= dict.fromkeys(filter(None, selection.note.split("; ")))
    return ", ".join(implementations), "; ".join(reasons)


def _signed(change: float) -> str:
    """Four decimals with a sign; what rounds to zero is +0.0000, whichever side of it it is on."""
    return f"{round(change, 4) + 0.0:+.4f}"


def _mean_sqnr(layers: Sequence[LayerError]) -> float | None:
    """SQNR in dB of the layers' mean relative noise power."""
    if not layers:
        return None
    noise = sum(10 ** (-layer.sqnr_db / 10) for layer in layers) / len(layers)
    return math.inf if noise == 0 else -10 * math.log10(noise)


def _jsonable(value: Any) -> Any:
    """``value`` with None for what is not finite."""
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def draw_loss_against_bytes(axes: Any, comparison: Comparison) -> None:
    """A point a recipe: its weights' size and what they cost in loss, where that is a number.

    Labels are placed for the panel's size, which the rest of the figure decides: it is drawn last.
    """
    axes.set(xlabel="weights, MB", ylabel=f"loss change, 0.001 {comparison.unit}", title="Loss against bytes")
    named = [
        (row.recipe, style, (row.weight_bytes / 1e6, 1e3 * row.loss_change))
        for row, style in zip(comparison.rows, _styles(), strict=False)
        if row.loss_change is not None and math.isfinite(row.loss_change)
    ]
    if not named:
        return
    points = np.array([point for _, _, point in named])
    low, extent = points.min(axis=0), np.maximum(np.ptp(points, axis=0), 1e-3)
    axes.set_ylim(low[1] - 0.15 * extent[1], low[1] + 1.15 * extent[1])
    axes.figure.draw_without_rendering()
    panel = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    widths = [_LETTER_WIDTH * len(name) / (72 * panel.width) for name, _, _ in named]
    room = min(2 * _LABEL_GAP + max(widths), 0.6)  # for labels on the right
    axes.set_xlim(low[0] - 0.1 * extent[0], low[0] + 1.1 * extent[0] / (1 - room))
    axes.axhline(0, color="0.8", lw=1, zorder=0)
    in_panel = axes.transAxes.inverted().transform(axes.transData.transform(points))
    labels = _label_places(in_panel, widths, _LABEL_HEIGHT / (72 * panel.height))
    for (name, style, point), label in zip(named, labels, strict=True):
        axes.plot(*point, ls="", ms=7, **style)
        axes.annotate(
            name,
            point,
            xytext=label,
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            zorder=1,
            bbox={"fc": "white", "ec": "none", "pad": 0.5},
            arrowprops={"arrowstyle": "-", "color": "0.6", "lw": 0.6, "shrinkB": 4, "relpos": (0, 0.5)},
        )


def _styles() -> Iterator[dict[str, str]]:
    """Colour and marker of each row, the same in every panel."""
    return ({"color": f"C{i % 10}", "marker": "osD^v<>"[i % 7]} for i in itertools.count())


_LABEL_HEIGHT, _LETTER_WIDTH = 14.0, 5.6
"""Of a line of labels and of a letter, in points."""
_LABEL_GAP = 0.03
"""From points to their labels, in parts of a panel."""


def _label_places(points: np.ndarray, widths: Sequence[float], height: float) -> np.ndarray:
    """Where the labels of points start (n, 2), right of them; all in parts of the panel.

    No label covers another: points that are near each other, or that a label reaches, share a column whose labels are a
    line apart.
    """
    places = np.empty_like(points)
    for column in _columns(points[:, 0], widths):
        places[column, 1] = _apart(points[column, 1], height)
        for i in column:
            near = [x for x in points[column, 0] if abs(x - points[i, 0]) < _LABEL_GAP]
            places[i, 0] = max(near) + _LABEL_GAP
    return places


def _columns(xs: np.ndarray, widths: Sequence[float]) -> list[list[int]]:
    """Indices of points in groups that no label leaves to the right."""
    columns: list[list[int]] = []
    reach = -math.inf
    for i in np.argsort(xs, kind="stable").tolist():
        if xs[i] > reach:
            columns.append([])
        columns[-1].append(i)
        reach = max(reach, xs[i] + 2 * _LABEL_GAP + widths[i])
    return columns


def _apart(heights: np.ndarray, step: float) -> np.ndarray:
    """The nearest heights in the panel, by the sum of squares, that keep the order and are ``step`` apart."""
    order = np.argsort(heights, kind="stable")
    pools: list[list[float]] = []
    for rank, height in enumerate(heights[order]):
        pools.append([height - rank * step])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    lowest = np.concatenate([np.full(len(pool), np.mean(pool)) for pool in pools])
    lowest = np.clip(lowest, step / 2, max(step / 2, 1 - step * (len(heights) - 0.5)))
    moved = np.empty_like(heights)
    moved[order] = lowest + step * np.arange(len(heights))
    return moved


_MOST_TICKS = 40


def draw_error_by_layer(axes: Any, comparison: Comparison) -> None:
    """A line a recipe: relative error of each quantized layer's weights."""
    for row, style in zip(comparison.rows, _styles(), strict=False):
        if row.layers:
            errors = [10 ** (-layer.sqnr_db / 20) for layer in row.layers]
            axes.plot(range(len(errors)), errors, label=row.recipe, ms=4, **style)
    longest = max((row.layers for row in comparison.rows), key=len)
    named = range(0, len(longest), -(-len(longest) // _MOST_TICKS) or 1)
    axes.set_xticks(named, [longest[i].path for i in named], rotation=90, fontsize=7)
    axes.set_yscale("log")
    axes.set(ylabel="relative error of the weights", title="Error by layer")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
