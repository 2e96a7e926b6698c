"""The notebook runs from beginning to end, and is committed as a run left it."""

import json
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "notebooks" / "accuracy.ipynb"


def cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(notebook):
    """What the cells printed, and the text of what they showed."""
    outputs = [output for cell in cells(notebook) for output in cell.outputs]
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return re.sub(r"\x1b\[[\d;]*m", "", "\n".join(parts))


def images(notebook):
    return [o.data["image/png"] for c in cells(notebook) for o in c.outputs if "image/png" in o.get("data", {})]


SUMMARY = re.compile(r"^(\S+) +([\d.]+)% of the bytes, loss ([+-][\d.]+), output of layer 1 ([\d.]+)$", re.M)


def summary(notebook):
    """Recipe to its part of the bytes in percent, its loss change, and the error of the layer's output."""
    return {name: tuple(map(float, numbers)) for name, *numbers in SUMMARY.findall(text(notebook))}


def check_run(notebook):
    """Every cell ran, in order, and none complained."""
    assert [cell.execution_count for cell in cells(notebook)] == list(range(1, len(cells(notebook)) + 1))
    outputs = [output for cell in cells(notebook) for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
    assert len(images(notebook)) == 3


@pytest.mark.slow
def test_it_runs_from_its_folder(monkeypatch):
    monkeypatch.setenv("NOTEBOOK_WINDOWS", "2")
    monkeypatch.setenv("NOTEBOOK_RECIPES", "fp8_block,int4")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(FILE, as_version=4)
    resources = {"metadata": {"path": str(FILE.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
    check_run(notebook)
    found = summary(notebook)
    assert set(found) == {"fp8_block", "int4"}
    # Bytes as in the whole comparison; errors and losses of 510 bytes are rough.
    assert found["fp8_block"][0] == pytest.approx(51.3, abs=0.1) and found["int4"][0] == pytest.approx(28.4, abs=0.1)
    assert abs(found["fp8_block"][1]) < 0.01 and abs(found["int4"][1]) < 0.05
    assert 0.015 < found["fp8_block"][2] < 0.04 < found["int4"][2] < 0.15
    printed = text(notebook)
    assert "bf16 loss 1." in printed and "over 510 bytes" in printed
    assert "on NVIDIA H100 80GB (sm90, 132 SMs, 80 GB):\nmoe fp8_block T=512 H=256 I=256 E=8 k=2" in printed


@pytest.mark.parametrize("folder", ["notebooks", "."])
def test_it_finds_its_data_from_its_folder_and_from_the_root(folder, monkeypatch):
    monkeypatch.chdir(ROOT / folder)
    monkeypatch.delenv("NOTEBOOK_WINDOWS", raising=False)
    monkeypatch.delenv("NOTEBOOK_RECIPES", raising=False)
    names: dict = {}
    exec(cells(nbformat.read(FILE, as_version=4))[0].source, names)
    assert (names["CHECKPOINT"] / "config.json").is_file() and names["TEXT"].is_file()
    assert names["WINDOWS"] == 16 and len(names["RECIPES"]) == 7


def test_it_is_committed_as_a_whole_run_left_it():
    notebook = nbformat.read(FILE, as_version=4)
    nbformat.validate(notebook)
    check_run(notebook)
    recipes = ["fp8_tensor", "fp8_channel", "fp8_block", "int8", "int4", "mxfp4", "nvfp4"]
    found = summary(notebook)
    assert list(found) == recipes
    # 16 windows of 255 scored bytes.
    assert "over 4,080 bytes" in text(notebook)
    assert all(abs(change) < 0.02 and 0.001 < error < 0.15 for _, change, error in found.values())
    # Four bits err more than eight, and FP8 no less than int8 on weights that have no outliers.
    assert found["int8"][2] < found["fp8_block"][2] < min(found[name][2] for name in ("int4", "mxfp4", "nvfp4"))


def test_it_is_small_and_knows_no_machine():
    raw = FILE.read_text(encoding="utf-8")
    assert len(raw) < 500_000
    notebook = json.loads(raw)
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        cell["outputs"] = [o for o in cell.get("outputs", []) if "image/png" not in o.get("data", {})]
    assert not re.findall(r"(?<![.\w])/(?:home|root|tmp|work|usr|opt|Users)/", json.dumps(notebook))
