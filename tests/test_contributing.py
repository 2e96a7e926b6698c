"""What CONTRIBUTING says of names, files, commands and forms is so."""

import dataclasses
import re
from pathlib import Path

import pytest

from bench import __main__ as benchmarks
from bench import peers, report, timing
from jmoe import config
from jmoe.backends.select import IMPLEMENTATIONS
from jmoe.backends.spec import OpSpec, Plan, Selection
from jmoe.config import from_environment

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(heading):
    """The text below a heading, up to the next."""
    [text] = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", TEXT, re.DOTALL | re.MULTILINE)
    return text


def names(text):
    return set(re.findall(r"`(\w+)`", text))


def fields(cls):
    return {field.name for field in dataclasses.fields(cls)}


def test_rooms_and_files_exist():
    rows = re.findall(r"^\| (`[^|]*) \|", section("The map of the house"), re.MULTILINE)
    assert len(rows) > 10
    for row in rows:
        room, *files = re.findall(r"`([\w./]+)`", row)
        for path in [room, *files]:
            inside = ROOT / room / path if room.endswith("/") and path != room else ROOT / path
            assert inside.exists(), inside
    for path in re.findall(r"`((?:jmoe|pallas_kernels|ops|backends|bench)/[\w./]+\.py)`", TEXT):
        assert (ROOT / path).exists() or (ROOT / "jmoe" / path).exists(), path


def test_every_module_of_jmoe_has_a_row_in_the_map():
    rooms = re.findall(r"`(jmoe/[\w./]+)`", section("The map of the house"))
    modules = [
        f"jmoe/{p.name}{'/' if p.is_dir() else ''}" for p in (ROOT / "jmoe").iterdir() if not p.name.startswith("_")
    ]
    assert set(modules) - {"jmoe/py.typed"} <= set(rooms)


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([\w-]+)`", TEXT))
    assert {"test", "test-py312", "test-aot", "test-readback", "format"} <= targets
    assert all(re.search(rf"^{target}:.*##", makefile, re.MULTILINE) for target in targets)
    markers = set(re.findall(r"`pytest -m (\w+)`", TEXT))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert markers and all(re.search(rf'^    "{marker}: ', project, re.MULTILINE) for marker in markers)
    assert set(re.findall(r"`python -m bench (\w+)`", TEXT)) == set(benchmarks.BENCHMARKS)


def test_values_have_the_fields_that_are_told():
    assert fields(OpSpec) <= names(section("OpSpec"))
    told = names(section("Plan and Selection"))
    assert fields(Plan) <= told and fields(Selection) <= told | fields(Plan)


@pytest.mark.parametrize("module", IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))
def test_an_implementation_is_a_module_with(module):
    for name in ("NAME", "plan", "linear", "fused_moe", "batched_experts"):
        assert f"`{name}" in section("How a call runs") and hasattr(module, name)


def test_variables_are_those_that_are_read():
    variables = set(re.findall(r"`(JMOE_\w+)`", section("Settings")))
    read = {}

    class Environment(dict):
        def get(self, key, default=None):
            read[key] = default
            return default

    assert from_environment(Environment()) == config.settings
    assert variables == set(read)


def test_results_of_benchmarks_have_the_form_that_is_told():
    text = section("Results of benchmarks")
    ceilings = {"gbs": 1.0, "bf16_tflops": 1.0, "fp8_tflops": 1.0}
    assert set(re.findall(r'"(\w+)": \.\.\.', text.partition('"ceilings"')[2].partition("}")[0])) == set(ceilings)
    assert all(f'"{key}"' in Path(timing.__file__).read_text() for key in ceilings)
    row = re.findall(r'"(\w+)": \.\.\.', text.partition('"layer/recipe/T"')[2])
    assert row == list(report.COLUMNS)
    result = report.result(ceilings, {})
    assert all(f'"{key}": ' in text for key in result)
    assert set(peers.PEERS) | {"torch-fp8", "xla-bf16"} == set(re.findall(r"`([\w-]+-(?:bf16|fp8))`", text))
