"""Which modules may reach Pallas-Triton and JAX's internals. import-linter sees packages, not their submodules."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jmoe

ROOT = Path(__file__).resolve().parents[1]
SEAM = ROOT / "pallas_kernels" / "lowering.py"
GUARDED = ("jax._src", "jax.experimental.pallas.triton")


def _dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, names)
        return None if base is None else f"{base}.{node.attr}"
    return None


def guarded_uses(source: str) -> list[str]:
    """The guarded modules that the source reaches, by an import, an attribute of an import, or a name in a string."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    reached: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                reached.append(alias.name)
                top = alias.name.partition(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                reached.append(f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node, names)) is not None:
            reached.append(name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            reached.append(node.value)
    return sorted({g for name in reached for g in GUARDED if f"{name}.".startswith(f"{g}.")})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import jax._src.core", ["jax._src"]),
        ("from jax import _src", ["jax._src"]),
        ("from jax._src.lib import gpu_triton as t", ["jax._src"]),
        ("def f():\n    from jax._src import core", ["jax._src"]),
        ("import jax\njax._src.core.Trace", ["jax._src"]),
        ("import importlib\nimportlib.import_module('jax._src.core')", ["jax._src"]),
        ("from jax.experimental.pallas import triton", ["jax.experimental.pallas.triton"]),
        ("import jax.experimental.pallas.triton as plt", ["jax.experimental.pallas.triton"]),
        ("from jax.experimental import pallas as pl\npl.triton.load", ["jax.experimental.pallas.triton"]),
        ("from jax.experimental import pallas as pl\npl.pallas_call", []),
        ("from . import triton\nfrom jmoe.backends import triton", []),
        ("import jax\njax.numpy", []),
    ],
)
def test_guarded_uses_finds_every_spelling(source, expected):
    assert guarded_uses(source) == expected


def test_only_lowering_reaches_pallas_triton_and_jax_internals():
    files = [path for package in ("jmoe", "pallas_kernels") for path in (ROOT / package).rglob("*.py")]
    assert files
    found = {str(p.relative_to(ROOT)): guarded_uses(p.read_text(encoding="utf-8")) for p in files if p != SEAM}
    assert {path: uses for path, uses in found.items() if uses} == {}


def test_importing_jmoe_leaves_its_packages_and_flax_for_when_they_are_used():
    packages = {path.parent.name for path in (ROOT / "jmoe").glob("*/__init__.py")} - {"ops", "backends"}
    late = sorted(f"jmoe.{name}" for name in packages)
    program = (
        "import sys, jmoe\n"
        f"late = {late}\n"
        "print([m for m in sys.modules if any(f'{m}.'.startswith(f'{u}.') for u in (*late, 'flax', 'rich'))])\n"
        "print([f'jmoe.{name}' for name in dir(jmoe) if f'jmoe.{name}' in late])\n"
        "print(jmoe.nn.Linear.__name__, jmoe.checkpoint.open.__name__, jmoe.models.Decoder.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "[]",
        str(late),
        "Linear open Decoder",
    ]


def test_what_jmoe_has_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jmoe' has no attribute 'nonsense'"):
        _ = jmoe.nonsense


def test_importing_pallas_kernels_and_its_jnp_modules_loads_neither_triton_nor_jmoe():
    # `import jax` itself loads jaxlib.gpu_triton, a thin binding that compiles nothing, so the names are listed.
    program = (
        "import sys, pallas_kernels.bits, pallas_kernels.layouts\n"
        "unwanted = ('triton', 'jax.experimental.pallas.triton', 'jax._src.pallas.triton', 'jmoe')\n"
        "print([m for m in sys.modules if any(f'{m}.'.startswith(f'{u}.') for u in unwanted)])"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
