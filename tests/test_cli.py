"""The command line: what it prints, where, and how it exits."""

import contextlib
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from jmoe import RECIPES, __version__, cli
from jmoe.checkpoint.safetensors import open_safetensors
from jmoe.checkpoint.safetensors_writer import write_safetensors

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "tests" / "data" / "tiny-moe" / "bf16"
HELDOUT = ROOT / "tests" / "data" / "heldout.bin"


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str


def jmoe(*arguments: object, width: int = 80) -> Run:
    """Runs the command in this process, its tables folded into ``width`` columns."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(cli.console, "_width", width),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["jmoe", *map(str, arguments)]),
        pytest.raises(SystemExit) as exit_,
    ):
        cli.main()
    return Run(exit_.value.code or 0, out.getvalue(), err.getvalue())


def succeeds(*arguments: object, width: int = 80) -> str:
    """What the command prints; it has nothing to say on standard error."""
    run = jmoe(*arguments, width=width)
    assert (run.code, run.err) == (0, "")
    return run.out


def fails(*arguments: object) -> str:
    """The one sentence of a command that bad input ends."""
    run = jmoe(*arguments)
    assert (run.code, run.out) == (1, "")
    assert re.fullmatch(r"jmoe: [^\n]+\n", run.err), run.err
    return run.err.removeprefix("jmoe: ").removesuffix("\n")


def columns(table: str) -> list[list[str]]:
    """The cells that are filled, of each line below a printed table's headings."""
    lines = table.splitlines()
    rule = next(i for i, line in enumerate(lines) if "───" in line)
    return [re.split(r"\s{2,}", line.strip()) for line in lines[rule + 1 :] if line.strip()]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """One comparison: what the command printed, and the folder that it wrote."""
    out = tmp_path_factory.mktemp("compare") / "new" / "folder"
    recipes = "fp8_block,nvfp4"
    with mock.patch.dict("os.environ", {"TTY_COMPATIBLE": "1"}):  # rich then draws progress as on a terminal
        run = jmoe("compare", TINY, "--text", HELDOUT, "--windows", 4, "--recipes", recipes, "--out", out, width=100)
    assert run.code == 0, run.err
    return run, out


def test_compare_prints_a_row_for_each_recipe_with_bf16_first(comparison):
    run, out = comparison
    rows = json.loads((out / "compare.json").read_text())["rows"]
    assert [row["recipe"] for row in rows] == ["bf16", "fp8_block", "nvfp4"]
    printed = [cells for cells in columns(run.out) if cells[0] in ("bf16", "fp8_block", "nvfp4")]
    reasons = list(dict.fromkeys(row["reason"] for row in rows))
    assert printed == [
        [
            row["recipe"],
            f"{row['weight_bytes'] / 1e6:.2f}",
            "-" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}",
            f"{row['loss']:.4f}",
            f"{row['loss_change']:+.4f}",
            f"{row['tokens_per_second']:,.0f}",
            row["implementation"],
            str(reasons.index(row["reason"]) + 1),
        ]
        for row in rows
    ]
    assert f"1: {rows[0]['reason']}" in re.sub(r"\s+", " ", run.out)


def test_compare_measures_what_is_known_of_the_checkpoint(comparison):
    _, out = comparison
    result = json.loads((out / "compare.json").read_text())
    bf16, fp8, nvfp4 = result["rows"]
    with open_safetensors(TINY / "model.safetensors") as file:
        assert bf16["weight_bytes"] == sum(info.nbytes for info in file.tensors.values())
    assert bf16["loss_change"] == 0 and bf16["sqnr_db"] is None and bf16["layers"] == []
    assert (result["tokens"], result["unit"], result["window"]) == (4 * 255, "nats/byte", 256)
    assert fp8["sqnr_db"] == pytest.approx(31.5, abs=0.3)  # numerics: normal data, fp8
    assert nvfp4["sqnr_db"] == pytest.approx(20.4, abs=0.3)
    assert abs(fp8["loss_change"]) < 0.005 and abs(nvfp4["loss_change"]) < 0.05
    # Four attention projections and the experts of each of three layers.
    assert [len(row["layers"]) for row in (fp8, nvfp4)] == [15, 15]


def test_compare_draws_a_png_and_says_where(comparison):
    run, out = comparison
    png = (out / "compare.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in png[-12:]
    assert run.out.endswith(f"wrote {out / 'compare.json'} and {out / 'compare.png'}\n")


def test_progress_goes_to_standard_error_and_results_to_standard_output(comparison):
    run, _ = comparison
    assert all(phase in run.err for phase in ("bf16", "fp8_block", "nvfp4"))
    assert "\x1b[" in run.err and "\x1b[" not in run.out
    assert "nats/byte" in run.out and "nats/byte" not in run.err


def test_a_quantized_checkpoint_is_scored_as_it_is_stored(shared, tmp_path):
    stored = shared / "fixtures" / "tiny-moe" / "fp8_block_qwen3"
    out = succeeds("compare", stored, "--text", HELDOUT, "--windows", 1, "--out", tmp_path, width=120)
    [row] = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert (row["recipe"], row["loss_change"], row["sqnr_db"]) == ("as_stored", None, None)
    assert 1 < row["loss"] < 1.5
    # One row has nothing to be compared with: no change, and no chart.
    assert ["as_stored", "5.59", "-", f"{row['loss']:.4f}", "-"] in [cells[:5] for cells in columns(out)]
    assert [path.name for path in tmp_path.iterdir()] == ["compare.json"]
    assert out.endswith(f"wrote {tmp_path / 'compare.json'}\n")


def checkpoint(folder, **changes):
    """The tiny checkpoint with another configuration; None removes a key."""
    folder.mkdir()
    config = json.loads((TINY / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (folder / "model.safetensors").symlink_to(TINY / "model.safetensors")
    return folder


def test_quantize_writes_a_checkpoint_and_says_what_it_is(tmp_path):
    out = succeeds("quantize", TINY, tmp_path / "out", "--recipe", "fp8_block", "--shard-size", "2MB")
    # 5.45 M parameters, 5.31 M of them in 84 quantized matrices; 5 others are the router's, embeddings and lm_head.
    assert out == (
        f"wrote {tmp_path / 'out'}: quant_method fp8, recipe fp8_block, 84 linear layers quantized and 5 left alone, "
        "10.90 MB became 5.59 MB in 3 files\n"
    )
    assert "quantization method fp8" in succeeds("inspect", tmp_path / "out", width=200)


def test_quantize_leaves_modules_alone_and_takes_scales_from_a_file(tmp_path):
    scales = tmp_path / "scales.json"
    projections = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(3) for name in "qkvo"]
    scales.write_text(json.dumps(dict.fromkeys(projections, 0.5)))
    arguments = ["--ignore", "experts", "--ignore", "re:lm_head", "--input-scales", scales]
    out = succeeds("quantize", TINY, tmp_path / "out", "--recipe", "nvfp4", *arguments)
    assert "quant_method compressed-tensors, recipe nvfp4, 12 linear layers quantized and 77 left alone" in out
    with open_safetensors(tmp_path / "out") as file:
        assert file.read(f"{projections[0]}.input_global_scale") == 2  # compressed-tensors divides by it


def test_quantize_measures_scales_over_a_text_and_warns_of_experts_that_got_no_token(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(b"a" * 256)
    arguments = ("--calibrate", text, "--kv-cache", "--ignore", "re:.*layers\\.[12]")
    run = jmoe("quantize", TINY, tmp_path / "out", "--recipe", "fp8_tensor_static", *arguments)
    assert run.code == 0 and "quant_method fp8, recipe fp8_tensor_static, 28 linear layers quantized" in run.out
    # One letter over and over reaches few of the experts of a layer.
    assert re.match(r"jmoe: warning: layers\.0\.mlp: experts \d.* got no token in calibration; the scale of", run.err)
    with open_safetensors(tmp_path / "out") as file:
        assert sum(name.endswith(".input_scale") for name in file.tensors) == 28
        assert sum(name.endswith(("self_attn.k_scale", "self_attn.v_scale")) for name in file.tensors) == 6
    npy = tmp_path / "no.npy"
    np.save(npy, np.zeros((2, 2), np.int32))
    message = fails("quantize", TINY, tmp_path / "out2", "--recipe", "nvfp4", "--calibrate", npy)
    assert message.startswith(f"{npy} holds int32 of shape (2, 2)")


def test_quantize_refuses_bad_input_before_it_writes(tmp_path, shared):
    def refuses(*arguments, source=TINY, recipe="int8"):
        message = fails("quantize", source, tmp_path / "out", "--recipe", recipe, *arguments)
        assert not [path for path in tmp_path.iterdir() if path.name != "scales.json"]
        return message

    assert refuses(recipe="fp9").startswith("recipe 'fp9' is unknown; known recipes are bf16,")
    assert refuses("--ignore", "nope").startswith("ignore='nope' matches none of the 102 modules of")
    for size in ("0", "many", "5XB", "-1GB", "1e9"):
        expected = f"--shard-size {size!r} must be a number of bytes such as 5GB, 500MB or 2GiB"
        assert refuses("--shard-size", size) == expected
    quantized = shared / "fixtures" / "tiny-moe" / "fp8_block_qwen3"
    assert refuses(source=quantized).startswith(f"{quantized}: is quantized already (quant_method 'fp8')")
    scales = tmp_path / "scales.json"
    for text, reason in (
        ("[", "it is not valid JSON: "),
        ("[" * 100_000, "it is JSON nested too deeply to be read"),
        ("[]", "it is a JSON list, expected an object"),
        ('{"a": 1, "a": 2}', "it is not valid JSON: key 'a' occurs twice"),
        ('{"a": "1"}', "has '1' for 'a', expected a number"),
    ):
        scales.write_text(text)
        assert (
            refuses("--input-scales", scales, recipe="nvfp4")
            .replace(f"{scales}:", f"{scales}")
            .startswith(f"--input-scales {scales} {reason}")
        )
    message = fails("quantize", TINY, TINY, "--recipe", "int8")
    assert message == f"dst={str(TINY)!r} exists and is not empty; it must be a new or an empty folder"


@pytest.mark.parametrize(
    "text, count", [("7", 7), ("1.5kB", 1500), ("5 GB", 5 * 10**9), ("2GiB", 2**31), ("1mb", 10**6)]
)
def test_sizes_of_files(text, count):
    assert cli._byte_count(text) == count


@pytest.mark.parametrize("command", ["inspect", "compare"])
class TestBadCheckpoints:
    def run(self, command, path):
        return fails(command, path, *(["--text", HELDOUT] if command == "compare" else []))

    def test_a_missing_folder(self, command, tmp_path):
        assert self.run(command, tmp_path / "nope").startswith(f"{tmp_path / 'nope'}: does not exist")

    def test_a_folder_without_tensors(self, command, tmp_path):
        assert self.run(command, tmp_path) == f"{tmp_path}: holds no *.safetensors"

    def test_a_folder_without_a_configuration(self, command, tmp_path):
        (tmp_path / "model.safetensors").symlink_to(TINY / "model.safetensors")
        assert self.run(command, tmp_path) == f"{tmp_path}: holds no config.json, expected one beside the weights"

    def test_a_truncated_file(self, command, tmp_path):
        shutil.copy(TINY / "config.json", tmp_path)
        (tmp_path / "model.safetensors").write_bytes((TINY / "model.safetensors").read_bytes()[:1_000_000])
        message = self.run(command, tmp_path)
        assert message.startswith(f"{tmp_path / 'model.safetensors'}: tensor 'model.layers.")
        assert "it is truncated or its header is wrong" in message

    def test_a_method_that_is_not_supported(self, command, shared):
        path = shared / "fixtures" / "tiny-moe" / "gptq_w4_g128"
        message = self.run(command, path)
        assert message.startswith(f"{path / 'config.json'}: ") and "'gptq', which is not supported" in message


def test_a_model_that_compare_has_no_decoder_for(tmp_path):
    path = checkpoint(tmp_path / "dbrx", model_type="dbrx")
    message = f"{path / 'config.json'}: config has model_type='dbrx', but this decoder is for "
    assert fails("compare", path, "--text", HELDOUT).startswith(message)
    assert "dbrx, quantization method none" in succeeds("inspect", path)


def test_a_configuration_without_a_vocabulary(tmp_path):
    path = checkpoint(tmp_path / "novocab", vocab_size=None)
    expected = f"{path / 'config.json'}: config has no vocab_size, which a qwen3_moe model needs"
    assert fails("compare", path, "--text", HELDOUT) == expected


def test_more_experts_a_token_than_there_are(tmp_path):
    path = checkpoint(tmp_path / "nine", num_experts_per_tok=9)
    message = fails("compare", path, "--text", HELDOUT, "--windows", 1)
    assert message == f"{path / 'config.json'}: num_experts_per_tok=9 is more than num_experts=8"
    assert fails("explain", "--top-k", 9) == "--top-k 9 is more than --experts 8"


def test_recipes_are_not_compared_on_a_quantized_checkpoint(shared):
    path = shared / "fixtures" / "tiny-moe" / "fp8_block_qwen3"
    message = fails("compare", path, "--text", HELDOUT, "--recipes", "int8")
    assert message.startswith(f"{path} is quantized already (fp8)")


@pytest.mark.parametrize(
    "recipes, message",
    [
        ("fp9", "recipe 'fp9' is unknown; known recipes are bf16, fp8_tensor,"),
        ("int4:group=--3", "group='--3' must be a positive int, or -1 for one group over the whole of K"),
        ("int4:groups=32", "recipe 'int4' has no option 'groups'; its options are group, zero_point, scale_dtype"),
        (",", "recipes=',' names none"),
    ],
)
def test_unknown_recipes(recipes, message):
    assert fails("compare", TINY, "--text", HELDOUT, "--recipes", recipes).startswith(message)


def test_texts_that_cannot_be_scored(tmp_path):
    def refuses(text, *arguments, model=TINY):
        return fails("compare", model, "--text", text, "--recipes", "bf16", *arguments).replace(f"{text}", "TEXT")

    short, floats, large = (tmp_path / name for name in ("short.bin", "floats.npy", "large.npy"))
    short.write_bytes(HELDOUT.read_bytes()[:100])
    np.save(floats, np.zeros(1000))
    np.save(large, np.array([3, 300] * 500))
    assert refuses(tmp_path / "nope.txt") == "TEXT: No such file or directory"
    assert refuses(tmp_path) == "TEXT: Is a directory"
    assert refuses(short) == "TEXT holds 100 tokens, which is less than a window of 256"
    assert refuses(floats) == "TEXT holds float64 of shape (1000,), but token ids are integers (n,)"
    assert refuses(large) == "TEXT has token ids from 3 to 300, but the model has 256 tokens"
    # 65536 bytes are 256 windows.
    assert (
        refuses(HELDOUT, "--windows", 257) == "windows=257 is more than the 256 windows of 256 tokens that TEXT holds"
    )
    words = checkpoint(tmp_path / "words", vocab_size=32000)
    assert refuses(HELDOUT, model=words) == (
        "TEXT is read as bytes, but the model has 32000 tokens; give token ids as a .npy"
    )


def test_other_bad_values_of_compare(tmp_path):
    assert fails("compare", TINY, "--text", HELDOUT, "--dtype", "float8") == (
        "--dtype 'float8' must be bfloat16, float16 or float32"
    )
    file = tmp_path / "file"
    file.touch()
    for out, reason in ((file, "File exists"), (file / "below", "Not a directory")):
        message = fails("compare", TINY, "--text", HELDOUT, "--out", out)
        assert message == f"--out {out} cannot be written to: {reason} ({out})"


def test_a_folder_for_results_is_tried_before_anything_is_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "run_comparison", lambda *_, **__: pytest.fail("computed"))
    (tmp_path / "compare.png").mkdir()
    message = fails("compare", TINY, "--text", HELDOUT, "--out", tmp_path)
    assert message == f"--out {tmp_path} cannot be written to: Is a directory ({tmp_path / 'compare.png'})"
    with mock.patch("tempfile.TemporaryFile", side_effect=PermissionError(13, "Permission denied", "there")):
        message = fails("compare", TINY, "--text", HELDOUT, "--out", tmp_path)
    assert message == f"--out {tmp_path} cannot be written to: Permission denied (there)"


def test_a_command_that_is_terminated_leaves_nothing_behind(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "run_comparison", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    try:
        assert jmoe("compare", TINY, "--text", HELDOUT, "--out", tmp_path / "new").code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not list(tmp_path.iterdir())


def test_a_comparison_that_fails_leaves_no_folder_behind(tmp_path):
    fails("compare", tmp_path / "nope", "--text", HELDOUT, "--out", tmp_path / "new" / "folder")
    assert list(tmp_path.iterdir()) == []
    fails("compare", tmp_path / "nope", "--text", HELDOUT, "--out", tmp_path)
    assert tmp_path.is_dir()


@pytest.mark.parametrize("width", [80, 120])
def test_inspect_shows_modules_bytes_and_what_would_run(width):
    out = succeeds("inspect", TINY, "--device", "h100", width=width)
    assert out.startswith(f"{TINY}: qwen3_moe, quantization method none, 5.45 M parameters, 10.90 MB\n")
    cells = columns(out)
    # w13 of three layers: 3 * 8 experts * 2 halves * 256 * 256 weights of two bytes.
    assert ["layers.N.mlp.experts.w13 (3)", "bf16", "8x2x256x256", "6.29 MB", "1"] in cells
    assert ["layers.N.self_attn.k_proj (3)", "bf16", "128x256", "196.61 kB", "1"] in cells
    assert ["norms and other vectors (13)", "bf16", "4.35 kB"] in cells
    assert "a router is computed in float32" in out
    assert "left unquantized: 10.90 MB of 10.90 MB\n" in out
    assert "the weights fit on NVIDIA H100 80GB (sm90, 132 SMs, 80 GB): 0.0% of its memory" in out


def test_inspect_tells_how_far_scales_lie_apart_of_which_the_largest_serves(tmp_path):
    scales = {"layers.0.self_attn.q_proj": 1.0, "layers.0.self_attn.k_proj": 4.0, "layers.0.self_attn.o_proj": 99.0}
    for e, scale in enumerate((2.0, 3.0)):
        scales |= {f"layers.0.mlp.experts.{e}.{name}_proj": scale for name in ("gate", "up", "down")}
    tensors = {f"{module}.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn) for module in scales}
    tensors |= {f"{module}.weight_scale": np.ones(1, np.float32) for module in scales}
    tensors |= {f"{module}.input_scale": np.float32([scale]) for module, scale in scales.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = "given activation scales: 9; of layers with one input the largest serves, up to 4 times the smallest"
    assert f"{told} (in layers.0.self_attn)" in succeeds("inspect", tmp_path)


def test_inspect_counts_rows_that_fp8_products_go_through_several_times(tmp_path):
    # Exponents 12 apart are one too many for e4m3's; but not where the smaller group is of zeros.
    scale = np.array([[127, 127], [127, 116], [127, 115], [127, 115]], np.uint8)
    codes = np.full((4, 32), 0x22, np.uint8)
    codes[3, 16:] = 0
    quantization = {"quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}
    write_safetensors(tmp_path / "model.safetensors", {"a.weight": codes, "a.weight_scale": scale})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    out = succeeds("inspect", tmp_path)
    assert "rows that FP8 products go through several times, for their exponents: 1 of 4\n" in out


def test_inspect_of_a_quantized_checkpoint_in_80_columns(shared):
    path = shared / "fixtures" / "tiny-moe" / "fp8_block_qwen3"
    out = succeeds("inspect", path, "--device", "h100")
    assert "quantization method fp8" in out and "left unquantized: 278.78 kB of 5.59 MB" in out
    table = out[out.index("modules, and") : out.index("left unquantized")]
    assert max(map(len, table.splitlines())) <= 80 and "…" not in table
    rows = folded(table)
    assert rows["layers.N.mlp.experts.w2(3)"] == ["fp8_block:scale_dtype=bfloat16", "8x256x256", "1.57MB"]
    assert rows["layers.N.self_attn.v_proj(3)"] == ["fp8_block:scale_dtype=bfloat16", "128x256", "98.32kB"]


def folded(table):
    """The first cell of each row to the next three, spaces left out: a row begins where the third cell is filled."""
    lines = table.splitlines()
    rule = next(i for i, line in enumerate(lines) if "───" in line)
    starts = [lines[rule - 1].index(heading) for heading in ("recipe", "shape", "size", "runs on")]
    starts[2] -= 5  # sizes are aligned right
    rows = []
    for line in lines[rule + 1 :]:
        if not line.strip():
            break
        cells = [line[a:b].replace(" ", "") for a, b in zip([0, *starts], starts, strict=False)]
        if cells[3]:
            rows.append(cells)
        else:
            rows[-1] = [a + b for a, b in zip(rows[-1], cells, strict=True)]
    return {name: rest for name, *rest in rows}


def test_inspect_names_every_module_where_asked():
    out = succeeds("inspect", TINY, "--modules", width=120)
    for name in ("model.layers.2.self_attn.q_proj", "model.layers.0.mlp.experts.w13", "model.layers.1.mlp.gate"):
        assert name in [cells[0] for cells in columns(out)]
    assert "model.norm" in out and "lm_head" in out


def test_a_pipe_gets_wide_tables_and_a_real_process_exits_with_the_code():
    program = "from jmoe.cli import main; main()"
    command = [sys.executable, "-c", program, "inspect", str(TINY), "--modules"]
    environment = {"PATH": "", "JAX_PLATFORMS": "cpu"}
    good = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (good.returncode, good.stderr) == (0, "")
    assert "model.layers.2.post_attention_layernorm " in good.stdout
    bad = subprocess.run([*command, "--device", "h1000"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (bad.returncode, bad.stdout) == (1, "")
    assert bad.stderr.startswith("jmoe: device 'h1000' is unknown; known devices are cpu, t4,")
    assert bad.stderr.count("\n") == 1


README_COMMAND = "--op moe --recipe fp8_block --experts 256 --hidden 7168 --intermediate 2048 --top-k 8 --tokens 64"


def test_explain_says_what_runs_and_what_the_weights_cost():
    out = succeeds("explain", *README_COMMAND.split(), "--device", "h100").splitlines()
    assert out[:2] == [
        "on NVIDIA H100 80GB (sm90, 132 SMs, 80 GB)",
        "moe fp8_block T=64 H=7168 I=2048 E=256 k=8 bfloat16",
    ]
    assert re.fullmatch(r"  takes (triton|xla): first in order that can.*", out[2])
    # 256 experts of 3 * 7168 * 2048 bytes, and four bytes of scale for each 128 x 128 of them; read at 3.35 TB/s.
    codes = 256 * 3 * 7168 * 2048
    total = codes + 4 * codes // 128**2
    assert f"  weights {total / 1e9:.2f} GB a layer, {total / 80e9:.1%} of the device's memory" in out
    assert f"  at most 256 of 256 experts read: {total / 1e9:.2f} GB" in out
    assert f"  reading them takes at least {total / 3.35e6:.1f} us at 3.35 TB/s" in out


def test_explain_of_few_tokens_counts_the_experts_that_they_can_reach():
    out = succeeds("explain", "--tokens", 3, "--experts", 64, "--top-k", 2, "--device", "h200")
    assert "at most 6 of 64 experts read" in out
    assert "at most 0 of 8 experts read: 0 bytes" in succeeds("explain", "--tokens", 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_explain_of_every_recipe(recipe):
    out = succeeds("explain", "--recipe", recipe, "--device", "cpu")
    assert f"moe {recipe} T=64" in out and "  takes xla: " in out and f"  recipe {recipe}: " in out


@pytest.mark.parametrize("op, shapes", [("linear", "M=64 N=512 K=4096"), ("batched_experts", "T=64 H=4096 I=2048 E=8")])
def test_explain_of_the_other_operations(op, shapes):
    out = succeeds("explain", "--op", op, "--features", 512, "--recipe", "int4:group=32,zero_point", "--device", "cpu")
    assert f"{op} int4:group=32,zero_point=True {shapes} bfloat16" in out
    # Half a byte a weight, and five bytes (scale and zero point) for each 32 of them.
    weights = 512 * 4096 if op == "linear" else 8 * 3 * 2048 * 4096
    assert f"weights {weights * (1 / 2 + 5 / 32) / 1e6:.2f} MB a layer" in out
    assert "experts read" not in out


@pytest.mark.parametrize("width", [80, 120])
def test_explain_of_all_recipes_gives_each_a_line(width):
    out = succeeds("explain", "--recipe", "all", "--device", "h100", width=width)
    assert "…" not in out and max(map(len, out.splitlines())) <= width
    takes = {cells[0]: cells[-2] for cells in columns(out) if cells[0] in RECIPES}
    assert list(takes) == list(RECIPES)
    emulated = {"mxfp4_a4", "nvfp4", "nvfp4_per_token"}  # FP4 activations, which Hopper has no units for
    assert {name for name, taken in takes.items() if taken == "none"} == emulated


def test_what_runs_only_where_it_is_asked_for():
    arguments = ("explain", "--recipe", "nvfp4", "--device", "h100")
    message = fails(*arguments)
    assert message.startswith("no implementation serves moe nvfp4 T=64")
    assert "xla: FP4 activations need FP4 matrix units" in message
    assert "  takes xla: asked for by name\n" in succeeds(*arguments, "--implementation", "xla")
    table = succeeds(*arguments[:2], "all", *arguments[3:], "--implementation", "xla")
    assert {cells[-2] for cells in columns(table) if cells[0] in RECIPES} == {"xla"}
    table = succeeds(*arguments[:2], "all", "--device", "cpu", "--implementation", "triton")
    assert {cells[-2] for cells in columns(table) if cells[0] in RECIPES} == {"none"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--recipe", "fp9"), "recipe 'fp9' is unknown"),
        (("--op", "conv"), "--op 'conv' is unknown; it is moe, batched_experts or linear"),
        (("--device", "h1000"), "device 'h1000' is unknown"),
        (("--dtype", "int8"), "--dtype 'int8' must be bfloat16, float16 or float32"),
        (("--activation", ""), "activation '' is unknown"),
        (("--activation", "mish"), "activation 'mish' is unknown"),
        (("--activation", "relu2"), "activation relu2 has no gated form"),
        (("--implementation", "cutlass"), "implementation='cutlass' is unknown"),
        (("--recipe", "all", "--implementation", "cutlass"), "implementation='cutlass' is unknown"),
        (("--implementation", "triton", "--device", "cpu"), "implementation='triton' cannot serve"),
    ],
)
def test_bad_values_of_explain(arguments, message):
    assert fails("explain", *arguments).startswith(message)


def test_extents_that_no_array_has():
    for option in ("--hidden", "--intermediate", "--experts", "--features", "--tokens"):
        run = jmoe("explain", option, 2**31)
        assert run.code == 2
        assert f"Invalid value for '{option}': Input should be less than or equal to 2147483647" in run.err


@pytest.mark.parametrize("value", ["two", [2], -3, 0, 2.5, True])
def test_inspect_names_a_number_of_experts_a_token_that_is_none(tmp_path, value):
    path = checkpoint(tmp_path / "wrong", num_experts_per_tok=value)
    expected = f"{path}: config.json has num_experts_per_tok {value!r}, expected an integer of at least 1"
    assert fails("inspect", path) == expected


def test_relu2_is_served_ungated():
    assert "takes" in succeeds("explain", "--activation", "relu2", "--no-gated")
    assert re.search(r"with --no-gated\s+also relu2", succeeds("explain", "--help"))


def test_version():
    assert succeeds("--version") == f"jmoe {__version__}\n"


@pytest.mark.parametrize("device", [None, "h100"])
def test_doctor_shows_versions_devices_and_implementations(device):
    out = succeeds("doctor", *(["--device", device] if device else []))
    assert "…" not in out and max(map(len, out.splitlines())) <= 80
    for package in ("jmoe", "jax", "jaxlib", "flax", "numpy", "ml_dtypes"):
        assert re.search(rf"{package} +│ +\d", out)
    assert "JAX sees: " in out
    assert f"selecting for: {'NVIDIA H100' if device else 'cpu'}" in out
    assert ("No GPU is used." in out) == (device is None)
    rows = [line.split()[:2] for line in out.splitlines()]
    for implementation in ("triton", "xla", "reference"):
        assert any(row in ([implementation, "yes"], [implementation, "no"]) for row in rows)


WRONG = {
    "JAX_PLATFORMS=abacus": "JAX finds no device, with JAX_PLATFORMS='abacus': ",
    "JMOE_CHECK=yes": "JMOE_CHECK='yes' must be 1, true, 0 or false",
    "JMOE_DEVICE=h1000": "jmoe.config.device (or JMOE_DEVICE): device 'h1000' is unknown; known devices are cpu,",
    "JMOE_IMPLEMENTATION=cuda": "implementation='cuda' is unknown; it is one of triton, xla, reference, or None; ",
}


@pytest.mark.parametrize(
    "command, variable, message",
    [
        *(("doctor", *wrong) for wrong in WRONG.items()),
        *((command, *wrong) for command, wrong in zip(("explain", "inspect", "compare"), WRONG.items(), strict=False)),
    ],
)
def test_a_variable_with_a_wrong_value_is_named(command, variable, message, tmp_path):
    name, _, value = variable.partition("=")
    environment = {"PATH": "", "JAX_PLATFORMS": "cpu", name: value}
    program = ["-c", "from jmoe.cli import main; main()", command]
    program += {"inspect": [TINY], "compare": [TINY, "--text", HELDOUT, "--out", tmp_path / "out"]}.get(command, [])
    run = subprocess.run([sys.executable, *program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith(f"jmoe: {message}") and run.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("guess",),
        ("compare",),
        ("compare", TINY),
        ("compare", TINY, "--text", HELDOUT, "--windows", 0),
        ("compare", TINY, "--text", HELDOUT, "--windows", "few"),
        ("inspect", TINY, "--tokens", 0),
        ("explain", "--tokens", "many"),
        ("explain", "--experts", 0),
        ("explain", "--speed", "high"),
    ],
)
def test_wrong_usage_exits_with_two(arguments):
    run = jmoe(*arguments)
    assert run.code == 2 and run.out == ""
    assert "Usage: jmoe" in run.err and "Traceback" not in run.err


@pytest.mark.parametrize("command", ["compare", "inspect", "explain", "doctor"])
def test_help(command):
    assert f"Usage: jmoe {command}" in succeeds(command, "--help")
    assert command in succeeds("--help")


def test_brackets_and_colons_in_a_path_are_printed_as_they_are(tmp_path):
    path = checkpoint(tmp_path / "[red]x:cat:")
    assert "[red]x:cat:: qwen3_moe" in succeeds("inspect", path)
    assert fails("inspect", tmp_path / "[bold]nope").startswith(f"{tmp_path}/[bold]nope: does not exist")
