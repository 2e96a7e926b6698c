"""``jmoe tune`` on the command line."""

from unittest import mock

import pytest
from typer.testing import CliRunner

import jmoe
from jmoe import cli, recipe
from jmoe.tuning import command, search

BLOCK = [recipe("fp8_block")]


def run(*arguments):
    with mock.patch.object(cli.console, "_width", 120):
        return CliRunner().invoke(cli.app, ["tune", *arguments])


def test_operations_of_models_and_of_shapes():
    ops = command.operations_to_tune(["mixtral"], ["64x32x4x2"], ["128x256"], BLOCK, "1,64", "experts")
    assert [op.describe() for op in ops] == [
        "moe fp8_block T=1 H=4096 I=14336 E=8 k=2 bfloat16",
        "moe fp8_block T=64 H=4096 I=14336 E=8 k=2 bfloat16",
        "moe fp8_block T=1 H=64 I=32 E=4 k=2 bfloat16",
        "moe fp8_block T=64 H=64 I=32 E=4 k=2 bfloat16",
        "linear fp8_block M=1 N=128 K=256 bfloat16",
        "linear fp8_block M=64 N=128 K=256 bfloat16",
    ]
    linears = command.operations_to_tune(["mixtral,qwen3-30b"], [], [], BLOCK, "8", "linears")
    assert [(op.features, op.hidden) for op in linears] == [(6144, 4096), (4096, 4096), (5120, 2048), (2048, 4096)]
    # What two models share is tuned once.
    both = command.operations_to_tune(["gpt-oss-20b", "gpt-oss-120b"], [], [], BLOCK, "8", "all")
    assert [op.experts for op in both] == [32, 0, 0, 128]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "nothing to tune: give a --model, or shapes with --moe or --linear"),
        (["--model", "gpt-5"], "model 'gpt-5' is unknown; known are dsv3,"),
        (["--linear", "8192"], "--linear '8192' must be 2 positive numbers with 'x' between them"),
        (["--moe", "64x32x4x0"], "--moe '64x32x4x0' must be 4 positive numbers with 'x' between them"),
        (["--moe", "64x32x4x5"], "--moe 64x32x4x5: k is more than E"),
        (["--model", "dsv3", "--tokens", "1,,8"], "--tokens '1,,8' must be some positive numbers with ',' between"),
        (["--model", "dsv3", "--part", "moe"], "--part 'moe' must be experts, linears or all"),
        (["--model", "dsv3", "--device", "h100"], "--device h100 goes with --dry"),
        (["--model", "dsv3", "--dry"], "--dry shows tiles of a GPU, and this is cpu"),
        (["--model", "dsv3"], "tiles are measured on an NVIDIA GPU, and this is cpu"),
    ],
)
def test_wrong_options_are_told_of(arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, ValueError) and message in str(result.exception)


def test_a_dry_run_shows_candidates_and_takes_no_gpu():
    result = run("--linear", "8192x8192", "--tokens", "8192", "--dry", "--device", "h200", "--candidates", "2")
    assert result.exit_code == 0, result.exception
    assert "linear fp8_block M=8192 N=8192 K=8192" in result.output
    assert "tile 64x128x128 4 warps 3 stages" in result.output


def test_what_was_measured_is_shown_and_goes_to_the_file(tmp_path, monkeypatch):
    out = tmp_path / "tiles.json"
    monkeypatch.setattr("jmoe.tuning.on_device.OnDevice", lambda: lambda op, tiles: [[("k", 20.0)], [("k", 15.0)]])
    arguments = ("--linear", "8192x8192", "--tokens", "8192", "--candidates", "2", "--out", str(out))
    with jmoe.config(device="h200"):
        result = run(*arguments)
        assert result.exit_code == 0, result.exception
        assert "20.0" in result.output and "15.0" in result.output and "25%" in result.output
        assert f"JMOE_TUNING={out}" in result.output and out.exists()
        assert "measured 0 of 1 operations" in run(*arguments).output
        lines = [
            line
            for line in run(*arguments, "--again", "--every").output.splitlines()
            if "k 15.0" in line or "k 20.0" in line
        ]
        assert ["k 15.0" in line for line in lines] == [True, False]


def test_tiles_in_a_line():
    work = search.plan_of(command.operations_to_tune(["qwen3-30b"], [], [], BLOCK, "1", "experts")[0], "h200")
    line = search.describe_tiles(work.tiles[0])
    assert line.startswith("first 1x") and ", second 1x" in line and line.endswith(", single")
