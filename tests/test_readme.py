"""The README's code runs, and the commands, recipes and files that it names exist."""

import contextlib
import io
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jmoe
from jmoe import cli
from jmoe.backends.select import IMPLEMENTATIONS
from jmoe.checkpoint.methods import known_methods

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = re.sub(r"```.*?```", "", README, flags=re.DOTALL)


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for tag, text in found if tag == language]


def test_there_are_two_programs_of_at_most_ten_statements():
    counts = [sum(bool(line) for line in block.splitlines()) for block in blocks("python")]
    assert len(counts) == 2 and max(counts) <= 10


def run(program, monkeypatch):
    """What the program prints, started in the repository, and its names."""
    monkeypatch.chdir(ROOT)
    names: dict = {}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(program, "README.md", "exec"), names)
    return out.getvalue(), names


def test_a_layer(monkeypatch):
    printed, names = run(blocks("python")[0], monkeypatch)
    y = names["y"]
    assert y.shape == (64, 512) and y.dtype == jnp.bfloat16 and bool(jnp.isfinite(y).all())
    assert printed.startswith("on NVIDIA H100 80GB")
    assert "moe fp8_block T=64 H=512 I=256 E=8 k=2 bfloat16" in printed
    # The quantized layer is the dense one but for the noise of FP8, about 30 dB below it in each of two products.
    dense = jmoe.fused_moe(
        names["x"], names["w13"].dequantize(), names["w2"].dequantize(), names["routed"].weights, names["routed"].ids
    )
    difference = y.astype(jnp.float32) - dense.astype(jnp.float32)
    assert float(jnp.linalg.norm(difference) / jnp.linalg.norm(dense.astype(jnp.float32))) < 0.06


def test_a_model(monkeypatch):
    printed, _ = run(blocks("python")[1], monkeypatch)
    lines = printed.splitlines()
    before, after = float(lines[0]), float(lines[-2])
    # 1.25 nats a byte over the whole text; groups of 64 cost less than the 0.006 of test_compare's groups of 128.
    assert before == pytest.approx(1.25, abs=0.05)
    assert 0 < abs(after - before) < 0.006
    assert re.match(r"layer +kind +rule +recipe +bytes +quantized", lines[1])
    assert sum("1: .+" in line and "int4:group=64" in line for line in lines) == 15
    assert sum("0: lm_head" in line and "left as it is" in line for line in lines) == 1
    generated = eval(lines[-1])
    assert isinstance(generated, bytes) and len(generated) == 64 and re.fullmatch(rb"[ -~\n]+", generated)


def test_linen_users_wrap_a_module():
    [expression] = re.findall(r"`(nnx\.bridge\.to_linen\([^`]*\))`", PROSE)
    module = eval(expression, {"nnx": nnx, "jmoe": jmoe})
    x = jnp.ones((3, 512), jnp.bfloat16)
    variables = module.init(jax.random.key(0), x)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"int8", "float32"}
    assert module.apply(variables, x).shape == (3, 256)


def test_recipes_and_their_options_are_those_that_exist():
    named = {}
    for row in re.findall(r"^\| (`[^|]*) \|.*\|.*\|$", PROSE.partition("| recipe |")[2].partition("\n\n")[0], re.M):
        names, _, options = row.partition(" (")
        for name in re.findall(r"`(\w+)`", names):
            named[name] = set(re.findall(r"`(\w+)`", options))
    assert list(named) == list(jmoe.RECIPES)
    for name, options in named.items():
        with pytest.raises(ValueError, match=r"has no option") as error:
            jmoe.recipe(name, nonsense=1)
        assert options == set(re.findall(r"\w+", str(error.value).partition("its options are ")[2])), name


def test_implementations_are_those_that_exist():
    table = PROSE.partition("| implementation |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(IMPLEMENTATIONS)


def test_recipes_run_on_what_the_table_says():
    table = PROSE.partition("\n| recipes |")[2].partition("\n\n")[0].splitlines()
    devices, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    told = {}
    for names, *cells in rows:
        for name in re.findall(r"`(\w+)`", names):
            for column, cell in zip(devices, cells, strict=True):
                alike = column.split(", ")
                choices = cell.split(", ") if ", " in cell else [cell] * len(alike)
                told |= {(name, device): choice for device, choice in zip(alike, choices, strict=True)}
    assert {name for name, _ in told} == set(jmoe.RECIPES)
    assert told == {(name, device): served(name, device) for name, device in told}


def served(name, device):
    """What runs linears and experts of a recipe on a device."""
    sizes = {"recipe": jmoe.recipe(name), "tokens": 64, "hidden": 512}
    experts = {"intermediate": 512, "experts": 8, "global_experts": 8, "top_k": 2, "activation": jmoe.swiglu()}
    chosen = set()
    for op in (jmoe.OpSpec(op="linear", features=512, **sizes), jmoe.OpSpec(op="moe", **sizes, **experts)):
        try:
            chosen.add(jmoe.select(op, device).implementation)
        except ExceptionGroup:
            chosen.add("none")
    [implementation] = chosen
    return implementation


def test_methods_of_checkpoints_are_those_that_exist():
    table = PROSE.partition("| `quant_method` |")[2].partition("\n\n")[0]
    methods = re.findall(r"^\| `([\w-]+)` \|", table, re.M)
    assert methods and set(methods) <= set(known_methods())


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"make ([a-z][\w-]*)", README))
    assert targets == {"demo", "test"}
    assert all(re.search(rf"^{target}:.*##", makefile, re.M) for target in targets)


def test_commands_are_those_of_the_command_line():
    [commands] = [block for block in blocks("") if "jmoe compare" in block]
    lines = [re.split(r"\s{3,}", line)[0].split() for line in commands.splitlines()]
    assert [line[1] for line in lines] == ["compare", "quantize", "inspect", "explain", "tune", "doctor"]
    for program, command, *arguments in lines:
        assert program == "jmoe"
        known = cli_output([command, "--help"])
        for option in re.findall(r"--[\w-]+", " ".join(arguments)):
            assert re.search(rf"  {option} ", known), f"jmoe {command} has no {option}"
    assert "moe fp8_block T=64 H=7168 I=2048 E=256 k=8" in cli_output(lines[3][1:])


def cli_output(arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.app(arguments, prog_name="jmoe", standalone_mode=False)
    return out.getvalue()


def test_files_that_are_named_exist():
    for name in re.findall(r"`([\w./-]+\.(?:md|ipynb))`", PROSE) + re.findall(r'"(tests/data/[^"]+)"', README):
        assert (ROOT / name).exists(), name


def speed_table(number):
    """The cells of a table of the section on speed, line by line, its head first."""
    text = README.split("## Speed")[1].split("\n| T |")[1 + number].split("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in f"| T |{text}".splitlines() if not line.startswith("|---")]


INT4 = "int4:scale_dtype=bfloat16"


def test_the_table_of_times_is_what_was_measured():
    measured_in = {
        "`fp8_block`": ("moe", "fp8_block"),
        "`bf16`": ("moe", "bf16"),
        "`mxfp4_a8`": ("moe-a8", "mxfp4_a8"),
        f"`{INT4}`": ("moe-fourbit", INT4),
        "`lax.ragged_dot`, bf16": ("moe-peers", "ragged-bf16"),
    }
    head, *lines = speed_table(0)
    assert {line[0] for line in lines} == set(measured_in)
    for name, *times in lines:
        run, recipe = measured_in[name]
        rows = json.loads((ROOT / f"bench/results/{run}-nvidia-h200.json").read_text())["rows"]
        measured = [rows[f"qwen3-30b/{recipe}/{tokens}"]["us"] for tokens in head[1:]]
        assert [int(time) for time in times] == [round(us) for us in measured]


def test_the_table_of_gpt_oss_is_what_was_measured():
    rows = json.loads((ROOT / "bench/results/moe-gpt-oss-nvidia-h200.json").read_text())["rows"]
    head, *lines = speed_table(2)
    assert len(lines) == 4
    for name, *times in lines:
        measured = [rows.get(f"gpt-oss-120b/{name.strip('`')}/{t}") for t in head[1:]]
        assert times == ["-" if row is None else str(round(row["us"])) for row in measured]
    assert sum(line.count("-") for line in lines) == 1


def test_another_gpu_took_no_longer_than_is_said():
    runs = ("moe", "moe-again")
    first, again = (json.loads((ROOT / f"bench/results/{run}-nvidia-h200.json").read_text())["rows"] for run in runs)
    [percent] = re.findall(r"up to (\d+)% more \(`moe-again`\)", README)
    assert max(again[row]["us"] / first[row]["us"] for row in again) <= 1 + int(percent) / 100


def test_other_times_that_are_named_are_what_was_measured():
    prefill = json.loads((ROOT / "bench/results/moe-prefill-nvidia-h200.json").read_text())["rows"]
    text = " ".join(README.split())
    again = [round(prefill[f"qwen3-30b/fp8_block/{t}"]["us"]) for t in (8192, 2048)]
    assert f"which took {again[0]} on one more H200 (`moe-prefill`; T = 2048" in text
    before = json.loads((ROOT / "bench/results/moe-nvidia-h200.json").read_text())["rows"]["qwen3-30b/fp8_block/2048"][
        "us"
    ]
    assert f"took {again[1]} there and {before:.0f} in `moe`)" in text


def test_kernels_take_all_but_as_much_as_is_said():
    [percent] = re.findall(r"kernels take these times but for (\d+)% at most", README)
    for run, recipe in (("moe", "fp8_block"), ("moe", "bf16"), ("moe-a8", "mxfp4_a8"), ("moe-fourbit", INT4)):
        rows = json.loads((ROOT / f"bench/results/{run}-nvidia-h200.json").read_text())["rows"]
        measured = [rows[f"qwen3-30b/{recipe}/{t}"] for t in (1, 8, 32, 128, 512)]
        assert all(row["us"] <= (1 + int(percent) / 100) * row["us_kernels"] for row in measured), run


def test_the_table_of_ratios_is_what_was_measured_and_published():
    layers = {
        "DeepSeek-V3": "dsv3",
        "DeepSeek-V3, I = 256": "dsv3-tp8",
        "Qwen3-30B-A3B": "qwen3-30b",
        "Mixtral-8x7B": "mixtral",
    }
    runs = {"dsv3": "moe-dsv3", "mixtral": "moe-mixtral"}
    published = json.loads((ROOT / "bench/vllm-h200.json").read_text())["rows"]
    (_, *tokens), *lines = speed_table(1)
    assert len(lines) == 8
    for name, *ratios in lines:
        model, recipe = re.fullmatch(r"(.+) `(.+)`", name).groups()
        layer, packed = layers[model], recipe.startswith("int4")
        run = "moe-fourbit" if packed else runs.get(layer, "moe")
        rows = json.loads((ROOT / f"bench/results/{run}-nvidia-h200.json").read_text())["rows"]
        peer = "vLLM Marlin int4" if packed else f"vLLM Triton {recipe}"
        ours = [rows[f"{layer}/{recipe}/{t}"]["us"] for t in tokens]
        assert ratios == [f"{published[f'{layer}/{peer}/{t}'] / us:.2f}" for t, us in zip(tokens, ours, strict=True)]
        assert min(map(float, ratios)) > 1 / 1.03
