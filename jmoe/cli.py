"""The command line: compare, quantize, inspect, explain, tune, doctor."""

import contextlib
import importlib.metadata
import itertools
import os
import platform
import re
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import jmoe
from jmoe import checkpoint, tuning
from jmoe.backends.activation import as_activation
from jmoe.backends.select import IMPLEMENTATIONS, as_device, select
from jmoe.backends.spec import DeviceSpec, OpSpec, Selection
from jmoe.checkpoint.safetensors_header import parse_json
from jmoe.checkpoint.summary import ModuleSummary, Summary
from jmoe.compare import DEFAULT_RECIPES, ReasonedTable, read_tokens, split_recipes
from jmoe.compare import compare as run_comparison
from jmoe.ops.explain import describe
from jmoe.ops.warmup import BUCKETS
from jmoe.scheme import RECIPES, Recipe, as_recipe
from jmoe.tuning import command

app = typer.Typer(
    help="Quantized linear layers and Mixture-of-Experts for JAX: compare recipes, inspect checkpoints, see what runs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
# Tables fold into a terminal's width; a pipe, at whose other end names may be looked for, gets wider ones.
_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120
# What is printed holds paths and names, in which brackets and colons are just that.
console = Console(width=_WIDTH, markup=False, emoji=False, highlight=False)

# Extents that arrays have.
_MOST = 2**31 - 1
_RECIPES_HELP = f"e.g. fp8_block,int4:group=64; default: {','.join(DEFAULT_RECIPES)}."
_DeviceOption = Annotated[str | None, typer.Option("--device", help="A known device such as h100; default: this one.")]


def main() -> None:
    """Runs the command line; bad input ends in one sentence and exit code 1, wrong usage in 2."""
    if threading.current_thread() is threading.main_thread():
        # So that what is half written is taken away, as after an interrupt.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        app(prog_name="jmoe")
    except ExceptionGroup as group:
        reasons = "; ".join(str(error) for error in group.exceptions)
        sys.exit(_fail(f"{group.message}: {reasons}"))
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        sys.exit(_fail(f"{error.filename}: {error.strerror}" if named else str(error)))
    except (ValueError, TypeError, NotImplementedError) as error:
        sys.exit(_fail(str(error)))


def _fail(message: str) -> int:
    _say(message, "red")
    return 1


def _say(message: str, style: str) -> None:
    """A line on standard error."""
    stderr = Console(stderr=True, markup=False, emoji=False, highlight=False)
    stderr.print(f"jmoe: {message}", style=style, soft_wrap=True)


def _print_version(asked: bool) -> None:
    if asked:
        console.print(f"jmoe {jmoe.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of jmoe itself."""


@app.command()
def compare(
    path: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder with config.json and safetensors.")],
    text: Annotated[Path, typer.Option(help="What to score: bytes for 256 tokens, else token ids as .npy.")],
    recipes: Annotated[str | None, typer.Option(help=_RECIPES_HELP)] = None,
    out: Annotated[Path, typer.Option(help="Where JSON and chart go.")] = Path("compare-results"),
    dtype: Annotated[str | None, typer.Option(help="Computed in; default: float32 on CPUs, else bfloat16.")] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Score so many windows only.")] = None,
) -> None:
    """Quantizes a trained model with several recipes and shows what each costs and gains."""
    if dtype is not None:
        _check_dtype(dtype)
    names = None if recipes is None else split_recipes(recipes)
    _device(None)
    with _results_folder(out, "compare.json", "compare.png"), _progress() as progress:
        task = progress.add_task("starting", total=None)
        comparison = run_comparison(
            path,
            names,
            text=text,
            dtype=dtype,
            windows=windows,
            progress=lambda phase, done, total: progress.update(task, description=phase, completed=done, total=total),
        )
    console.print(comparison.table())
    written = [out / "compare.json"]
    written[0].write_text(comparison.to_json())
    if len(comparison.rows) > 1:
        written.append(out / "compare.png")
        comparison.save_chart(written[1])
    console.print(f"wrote {' and '.join(map(str, written))}", soft_wrap=True)


@contextlib.contextmanager
def _results_folder(folder: Path, *names: str) -> Iterator[None]:
    """The folder, made and written to before the work begins; taken away again if that fails and it is new."""
    new = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        for path in (folder / name for name in names):
            if path.exists():
                path.open("ab").close()
    except OSError as error:
        raise ValueError(f"--out {folder} cannot be written to: {error.strerror} ({error.filename})") from error
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # somebody else has put something there
            for path in new:
                path.rmdir()
        raise


def _progress() -> Progress:
    """A progress bar on standard error if that is a terminal; standard output holds results only."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    stderr = Console(stderr=True)
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)


def _check_dtype(name: str) -> None:
    if name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"--dtype {name!r} must be bfloat16, float16 or float32")


@app.command("quantize")
def quantize_command(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A folder with config.json and safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A new or an empty folder.")],
    recipe: Annotated[str, typer.Option(help="fp8_block, int4:group=64,scale_dtype=bfloat16, ...")],
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Modules to leave alone: self_attn, layers.0.*, re:.*down_proj; repeat."),
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Of a file of tensors: 5GB, 500MB, 2GiB.")] = "5GB",
    input_scales: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON, module to activation scale, where a recipe takes them.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="TEXT", help="Measure them instead while the model reads this, as compare's.")
    ] = None,
    kv_cache: Annotated[bool, typer.Option("--kv-cache", help="Measure an FP8 KV cache's scales too.")] = False,
) -> None:
    """Writes a checkpoint with quantized linear layers and experts, as inference engines read it."""
    _devices()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        written = checkpoint.quantize_checkpoint(
            source,
            target,
            recipe,
            ignore=ignore or (),
            input_scales=None if input_scales is None else _input_scales(input_scales),
            calibration=None if calibrate is None else _calibration(source, calibrate),
            kv_cache=kv_cache,
            shard_size=_byte_count(shard_size),
        )
    for warning in caught:
        _say(f"warning: {warning.message}", "yellow")
    console.print(
        f"wrote {target}: quant_method {written.method}, recipe {written.recipe}, {len(written.quantized)} linear "
        f"layers quantized and {len(written.left)} left alone, {_size(written.source_nbytes)} became "
        f"{_size(written.nbytes)} in {written.files} {'file' if written.files == 1 else 'files'}",
        soft_wrap=True,
    )


def _calibration(source: Path, text: Path) -> np.ndarray:
    """The tokens of a text for the model of a checkpoint."""
    with checkpoint.open(source) as opened:
        vocabulary = opened.text_config.get("vocab_size")
    if type(vocabulary) is not int:
        given = "no vocab_size" if vocabulary is None else f"vocab_size {vocabulary!r}"
        raise ValueError(f"{source}: config.json has {given}, but --calibrate takes a model with a number of tokens")
    return read_tokens(text, vocabulary)


def _byte_count(text: str) -> int:
    units = {"": 1, **{f"{prefix}B": 1000**i for i, prefix in enumerate(("", "k", "M", "G", "T"))}}
    units |= {f"{prefix}iB": 1024**i for i, prefix in enumerate(("K", "M", "G", "T"), 1)}
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([A-Za-z]*)", text)
    unit = {name.lower(): size for name, size in units.items()}.get(match[2].lower()) if match else None
    if match is None or unit is None or (count := int(float(match[1]) * unit)) < 1:
        raise ValueError(f"--shard-size {text!r} must be a number of bytes such as 5GB, 500MB or 2GiB")
    return count


def _input_scales(path: Path) -> dict[str, float]:
    scales = parse_json(f"--input-scales {path}: it", path.read_bytes())
    for module, scale in scales.items():
        if type(scale) not in (int, float):
            raise ValueError(f"--input-scales {path} has {scale!r} for {module!r}, expected a number")
    return scales


@app.command("explain")
def explain_command(
    op: Annotated[str, typer.Option(help="moe, batched_experts or linear.")] = "moe",
    recipe: Annotated[str, typer.Option(help="fp8_block, int4:group=32, ...; all: a line each.")] = "fp8_block",
    tokens: Annotated[
        int, typer.Option(min=0, max=_MOST, help="Rows of x (an expert's rows for batched_experts).")
    ] = 64,
    hidden: Annotated[int, typer.Option(min=1, max=_MOST, help="H, or K of a linear.")] = 4096,
    intermediate: Annotated[int, typer.Option(min=1, max=_MOST, help="I of an expert.")] = 2048,
    features: Annotated[int | None, typer.Option(min=1, max=_MOST, help="N of a linear; default: hidden.")] = None,
    experts: Annotated[int, typer.Option(min=1, max=_MOST, help="E.")] = 8,
    top_k: Annotated[int, typer.Option(min=1, max=_MOST, help="k, slots a token.")] = 2,
    activation: Annotated[
        str | None, typer.Option(help="e.g. silu, gelu_tanh, swigluoai; with --no-gated also relu2.")
    ] = None,
    gated: Annotated[bool, typer.Option(help="w13 has a gate and an up half.")] = True,
    dtype: Annotated[str, typer.Option(help="Of x: bfloat16, float16 or float32.")] = "bfloat16",
    implementation: Annotated[str | None, typer.Option(help="Ask for this one by name.")] = None,
    device: _DeviceOption = None,
) -> None:
    """Says which implementation would run an operation of these shapes on a device, and why."""
    spec = _device(device)
    if op not in ("moe", "batched_experts", "linear"):
        raise ValueError(f"--op {op!r} is unknown; it is moe, batched_experts or linear")
    _check_dtype(dtype)
    act = as_activation(activation) if activation is not None else (None if op == "linear" else as_activation("silu"))
    if act is not None:
        act.check_halves(2 if gated and op != "linear" else 1)
    if op == "moe" and top_k > experts:
        raise ValueError(f"--top-k {top_k} is more than --experts {experts}")
    operation = OpSpec(
        op=op,  # type: ignore[arg-type]  # checked above
        recipe=jmoe.recipe("bf16"),
        tokens=tokens,
        hidden=hidden,
        features=(features or hidden) if op == "linear" else 0,
        experts=0 if op == "linear" else experts,
        global_experts=0 if op == "linear" else experts,
        intermediate=0 if op == "linear" else intermediate,
        top_k=top_k if op == "moe" else 0,
        gated=gated,
        activation=act,
        dtype=dtype,
        out_dtype=dtype,
    )
    if recipe == "all":
        table = _recipe_table(operation, spec, implementation)
        console.print(f"on {spec.describe()}")
        console.print(table)
        return
    operation = operation.replace(recipe=as_recipe(recipe))
    selection = select(operation, spec, implementation=implementation)
    for line in [f"on {spec.describe()}", *describe(operation, selection), *_cost(operation, spec)]:
        console.print(line, soft_wrap=True)


def _cost(op: OpSpec, device: DeviceSpec) -> list[str]:
    """What the weights weigh, and the least time that reading them takes."""
    matrices = _weight_shapes(op)
    every = sum(weight_bytes(op.recipe, shape) for shape in matrices)
    lines = [
        f"  recipe {op.recipe.name}: {op.recipe.describe()}; default accumulation {op.default_accumulation}",
        f"  weights {_size(every)} a layer, {every / device.memory:.1%} of the device's memory",
    ]
    touched = every
    if op.op == "moe":
        active = min(op.experts, op.tokens * op.top_k)
        touched = every * active // op.experts
        lines.append(f"  at most {active} of {op.experts} experts read: {_size(touched)}")
    if device.bandwidth:
        microseconds = touched / device.bandwidth * 1e6
        lines.append(f"  reading them takes at least {microseconds:.1f} us at {device.bandwidth / 1e12:.2f} TB/s")
    return lines


def _weight_shapes(op: OpSpec) -> list[tuple[int, ...]]:
    if op.op == "linear":
        return [(op.features, op.hidden)]
    halves = 2 if op.gated else 1
    return [(op.experts, halves, op.intermediate, op.hidden), (op.experts, op.hidden, op.intermediate)]


def weight_bytes(recipe: Recipe, shape: tuple[int, ...]) -> int:
    """Bytes of a weight of that shape under a recipe, scales included."""
    dense = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    if recipe.weight is None:
        return 2 * dense.size
    return jax.eval_shape(lambda w: jmoe.quantize(w, recipe), dense).nbytes


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"


def _choice(op: OpSpec, device: DeviceSpec, implementation: str | None = None) -> tuple[Selection | None, str]:
    """What would run, or why nothing does."""
    try:
        selection = select(op, device, implementation=implementation)
    except NotImplementedError:
        return None, _refusal(op, device, implementation or jmoe.config.implementation)
    except ExceptionGroup as group:
        return None, "; ".join(str(error) for error in group.exceptions)
    return selection, selection.why


def _refusal(op: OpSpec, device: DeviceSpec, name: str) -> str:
    """Why an implementation that was asked for cannot serve, in its own words; "" where it can."""
    try:
        IMPLEMENTATIONS[name].plan(op, device, explicit=True)
    except NotImplementedError as refusal:
        return str(refusal)
    return ""


def _recipe_table(op: OpSpec, device: DeviceSpec, implementation: str | None) -> ReasonedTable:
    table = ReasonedTable(op.describe().replace(f" {op.recipe.name}", "", 1))
    table.add_column("recipe", no_wrap=True)
    table.add_column("weight x activation")
    table.add_column("weights", justify="right", no_wrap=True)
    table.add_column("takes", no_wrap=True)
    table.add_column("why", justify="right")
    for name in RECIPES:
        each = op.replace(recipe=jmoe.recipe(name))
        selection, note = _choice(each, device, implementation)
        size = _size(sum(weight_bytes(each.recipe, shape) for shape in _weight_shapes(each)))
        table.add_row(
            name, each.recipe.describe(), size, selection.implementation if selection else "none", table.why(note)
        )
    return table


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A folder with config.json and safetensors.")],
    device: _DeviceOption = None,
    tokens: Annotated[int, typer.Option(min=1, max=_MOST, help="Tokens a step that the choices are made for.")] = 64,
    modules: Annotated[bool, typer.Option("--modules", help="A line a module instead of one a kind.")] = False,
) -> None:
    """Shows what is in a checkpoint, whether it fits a device, and what would run where and why."""
    spec = _device(device)
    with checkpoint.open(path) as opened:
        summary = opened.summary()
        top_k = opened.text_config.get("num_experts_per_tok")
        scales = opened.input_scales()
        beyond = opened.rows_beyond()
    top_k = 1 if top_k is None else top_k
    if type(top_k) is not int or not 1 <= top_k <= _MOST:
        raise ValueError(f"{path}: config.json has num_experts_per_tok {top_k!r}, expected an integer of at least 1")
    model = summary.model_type or "unknown model type"
    console.print(
        f"{path}: {model}, quantization method {summary.method}, {summary.parameters / 1e6:,.2f} M parameters, "
        f"{_size(summary.nbytes)}",
        soft_wrap=True,
    )
    console.print(_module_table(summary, spec, tokens, top_k, each=modules))
    left = sum(module.nbytes for module in summary.unquantized)
    console.print(f"left unquantized: {_size(left)} of {_size(summary.nbytes)}")
    if scales:
        console.print(f"given activation scales: {len(scales)}{_spread(scales)}", soft_wrap=True)
    if beyond:
        rows, all_rows = (sum(column) for column in zip(*beyond.values(), strict=True))
        console.print(f"rows that FP8 products go through several times, for their exponents: {rows} of {all_rows}")
    if summary.kv_scales:
        console.print(f"scales of a KV cache: {len(summary.kv_scales)} tensors, not used here")
    verdict = "fit" if summary.nbytes < spec.memory else "do not fit"
    share = summary.nbytes / spec.memory
    console.print(
        f"the weights {verdict} on {spec.describe()}: {share:.1%} of its memory, before activations and KV cache",
        soft_wrap=True,
    )


def _spread(scales: dict[str, float]) -> str:
    """How far scales lie apart of which the largest serves: of what reads one input, over all experts of a layer."""
    groups: dict[str, list[float]] = {}
    for module, scale in scales.items():
        parent, _, projection = re.sub(r"(?<=\bexperts\.)\d+(?=\.)", "*", module).rpartition(".")
        first = projection in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")
        groups.setdefault(parent if first else module, []).append(scale)
    apart = {group: max(members) / min(members) for group, members in groups.items()}
    widest = max(apart, key=lambda group: apart[group])
    if apart[widest] == 1:
        return ""
    return f"; of layers with one input the largest serves, up to {apart[widest]:.3g} times the smallest (in {widest})"


def _module_table(summary: Summary, device: DeviceSpec, tokens: int, top_k: int, *, each: bool) -> ReasonedTable:
    table = ReasonedTable(f"modules, and what would run {tokens} tokens on {device.name}")
    table.add_column("modules", overflow="fold")
    table.add_column("recipe", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("runs on", justify="right", no_wrap=True)
    groups: dict[tuple[str, object], list[ModuleSummary]] = {}
    for module in summary.modules:
        name = module.name if each else re.sub(r"(?<=\.)\d+(?=\.)", "N", module.name.removeprefix("model."))
        if module.kind == "other" and not each:
            groups.setdefault(("norms and other vectors", ()), []).append(module)
            continue
        groups.setdefault((name, (module.kind, module.recipe, module.shape)), []).append(module)
    for (name, _), members in groups.items():
        first = members[0]
        same_shape = all(member.shape == first.shape for member in members)
        implementation, because = _would_run(first, device, tokens, top_k)
        table.add_row(
            f"{name}" + (f" ({len(members)})" if len(members) > 1 else ""),
            first.recipe.name if first.recipe else "-",
            "x".join(map(str, first.shape)) if same_shape else "",
            _size(sum(member.nbytes for member in members)),
            table.why(f"{implementation}: {because}") if implementation else "",
        )
    return table


def _would_run(module: ModuleSummary, device: DeviceSpec, tokens: int, top_k: int) -> tuple[str, str]:
    """Implementation and reason for a module that jmoe's operations run."""
    if module.recipe is None or module.kind not in ("linear", "experts"):
        return "", ""
    if module.name.rpartition(".")[2] in ("gate", "router"):
        return "jax", "a router is computed in float32, whatever its weight is held in"
    if module.kind == "linear":
        features, hidden = module.shape
        op = OpSpec(op="linear", recipe=module.recipe, tokens=tokens, hidden=hidden, features=features)
    else:
        # w13 is (E, halves, I, H), w2 (E, H, I); both are served by one fused operation.
        gated = len(module.shape) == 4 and module.shape[1] == 2
        hidden, intermediate = module.shape[-1:-3:-1] if len(module.shape) == 4 else module.shape[-2:]
        op = OpSpec(
            op="moe",
            recipe=module.recipe,
            tokens=tokens,
            hidden=hidden,
            intermediate=intermediate,
            experts=module.shape[0],
            global_experts=module.shape[0],
            top_k=min(top_k, module.shape[0]),
            gated=gated or len(module.shape) == 3,
            activation=as_activation("silu"),
        )
    selection, because = _choice(op, device)
    return (selection.implementation if selection else "none"), because


@app.command()
def doctor(device: _DeviceOption = None) -> None:
    """Shows versions, devices, and which implementations are usable here and why not."""
    versions = Table(title="versions", show_header=False)
    versions.add_row("python", platform.python_version())
    for package in ("jmoe", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy", "ml_dtypes"):
        try:
            versions.add_row(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            if "plugin" not in package:
                versions.add_row(package, "not installed")
    console.print(versions)
    console.print(f"JAX sees: {', '.join(str(d) for d in _devices())}")
    spec = _device(device)
    console.print(f"selecting for: {spec.describe()}")
    if spec.platform == "cpu":
        hint = "No GPU is used. For an NVIDIA GPU install jmoe[cuda13] or jmoe[cuda12]."
        console.print(hint)
    op = OpSpec(
        op="moe",
        recipe=jmoe.recipe("bf16"),
        tokens=64,
        hidden=4096,
        experts=8,
        global_experts=8,
        intermediate=2048,
        top_k=2,
        activation=as_activation("silu"),
    )
    console.print(_implementation_table(op, spec))
    selection, because = _choice(op, spec)
    console.print(f"in bf16 it takes {selection.implementation if selection else 'none'}: {because}")


@app.command("tune")
def tune_command(
    models: Annotated[
        list[str] | None, typer.Option("--model", help=f"Layers of {', '.join(tuning.MODELS)}; repeat or use commas.")
    ] = None,
    moe: Annotated[list[str] | None, typer.Option(metavar="HxIxExk", help="A layer of experts; repeat.")] = None,
    linear: Annotated[list[str] | None, typer.Option(metavar="NxK", help="A linear layer; repeat.")] = None,
    recipes: Annotated[str, typer.Option("--recipe", help="fp8_block,bf16,...")] = "fp8_block",
    tokens: Annotated[str, typer.Option(help="Rows of x.")] = ",".join(map(str, BUCKETS)),
    part: Annotated[str, typer.Option(help="Of a model: experts, linears or all.")] = "all",
    out: Annotated[Path, typer.Option(help="The file; what it has already is kept.")] = Path("tiles.json"),
    candidates: Annotated[int, typer.Option(min=1, help="Tiles to measure for each.")] = tuning.CANDIDATES,
    again: Annotated[bool, typer.Option("--again", help="Measure what the file has already.")] = False,
    every: Annotated[
        bool, typer.Option("--every", help="Show every candidate's time, not the fastest's only.")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry", help="Show what would be measured; takes no GPU.")] = False,
    device: Annotated[str | None, typer.Option(help="Of --dry: a known device such as h100.")] = None,
) -> None:
    """Measures tiles on this GPU and writes the fastest to a file, for jmoe.config(tuning=FILE) or JMOE_TUNING."""
    if device is not None and not dry:
        raise ValueError(f"--device {device} goes with --dry; tiles are measured on the GPU that JAX computes on")
    how = [as_recipe(name) for name in split_recipes(recipes)]
    ops = command.operations_to_tune(models or [], moe or [], linear or [], how, tokens, part)
    if dry:
        spec = _device(device)
        if spec.platform == "cpu":
            raise ValueError(f"--dry shows tiles of a GPU, and this is {spec.describe()}; --device names one, as h100")
        console.print(command.candidate_table(ops, spec, candidates))
        return
    _device(None)
    with _progress() as progress:
        task = progress.add_task("starting", total=None)
        trials = tuning.tune(
            ops,
            out,
            count=candidates,
            again=again,
            progress=lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
        )
    if trials:
        console.print(command.tried_table(trials) if every else command.trial_table(trials))
    console.print(
        f"measured {len(trials)} of {len(ops)} operations, the others are in the file already; "
        f"JMOE_TUNING={out} or jmoe.config(tuning={str(out)!r}) takes these tiles",
        soft_wrap=True,
    )


def _device(name: str | None) -> DeviceSpec:
    """The device that is asked for, or the one that JAX computes on."""
    if name is None and jmoe.config.device is None:
        _devices()
    return as_device(name)


def _devices() -> list[jax.Device]:
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # an unknown platform, and one whose plugin is not installed
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error) or "no plugin for it is installed"
        raise ValueError(f"JAX finds no device, with JAX_PLATFORMS={asked!r}: {reason}") from error


def _implementation_table(op: OpSpec, device: DeviceSpec) -> ReasonedTable:
    """A row for each answer of each implementation, with the recipes that get it."""
    table = ReasonedTable("implementations, for a layer of 8 experts")
    for heading in ("implementation", "usable", "recipes"):
        table.add_column(heading)
    table.add_column("why", justify="right")
    for name, module in IMPLEMENTATIONS.items():
        answers: dict[tuple[str, str], list[str]] = {}
        for recipe in RECIPES:
            try:
                plan = module.plan(op.replace(recipe=jmoe.recipe(recipe)), device, explicit=False)
                answer = ("yes", plan.note)
            except NotImplementedError as reason:
                answer = ("no", str(reason))
            answers.setdefault(answer, []).append(recipe)
        for (usable, because), recipes in answers.items():
            every = len(recipes) == len(RECIPES)
            table.add_row(name, usable, "every one" if every else ", ".join(recipes), table.why(because))
    return table


if __name__ == "__main__":
    main()
