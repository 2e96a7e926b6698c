"""Settings of the whole suite: lanes, how XLA compiles, simulated devices, hypothesis, and the shared data."""

import gc
import importlib.metadata
import os
import re
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"

# Compilation dominates an example's time and varies with the machine's load: no deadline, and few examples.
hypothesis.settings.register_profile(
    "local", deadline=None, max_examples=25, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("local"), derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def lane(config: pytest.Config, marker: str) -> bool:
    """Whether -m chooses tests of that marker."""
    return re.search(rf"(?<!not )\b{marker}\b", config.getoption("markexpr")) is not None


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(100_000, 20, 20)  # tracing makes many objects, of which few are garbage; it is a tenth faster so
    # JAX reads these once: its own settings when it is imported, which no plugin does, and XLA_FLAGS at its first
    # device.
    if lane(config, "gpu"):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = {"xla_force_host_platform_device_count": "4"}
    if not lane(config, "aot"):  # its GPU code is what users run
        flags |= quick_compilation()
    if config.getoption("numprocesses", None) or "PYTEST_XDIST_WORKER" in os.environ:
        # The processes share the cores already. Workers inherit the controller's environment, so NumPy sees it too.
        flags["xla_cpu_multi_thread_eigen"] = "false"
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"):
            os.environ.setdefault(name, "1")
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([given, *(f"--{k}={v}" for k, v in flags.items() if k not in given)]).strip()


def quick_compilation() -> dict[str, str]:
    """Flags that take half of the suite's time: what XLA makes of a function is the same, LLVM's work on it is less."""
    flags = {"xla_backend_optimization_level": "0"}
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones have no other emitters
        flags["xla_cpu_use_fusion_emitters"] = "false"
    return flags


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if not lane(item.config, "gpu"):
        pytest.skip("needs a CUDA device; -m gpu chooses these tests")
    import jax

    if jax.default_backend() != "gpu":
        pytest.fail(f"-m gpu was chosen, but JAX computes on {jax.default_backend()!r}", pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def bounded_mappings() -> Iterator[None]:
    """Lets go of compiled functions before they take all the memory mappings that Linux gives a process.

    Each takes several, and LLVM crashes where there are no more (65530 by default).
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


_MAPPINGS = 20_000


@pytest.fixture
def optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are scored by optimised code: a whole one takes longer to compute than to compile."""
    import jax

    from jmoe.models import decoder

    options = {"xla_backend_optimization_level": 2}
    score = jax.jit(decoder._token_losses.__wrapped__, static_argnums=0, compiler_options=options)
    monkeypatch.setattr(decoder, "_token_losses", score)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the repository with golden vectors and quantized checkpoints."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared, the golden vectors and checkpoints, beside the repository")
    return SHARED
