"""Settings of the whole suite: the device lane, threads, simulated devices, hypothesis, and the shared data."""

import os
import re
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


def gpu_lane(config: pytest.Config) -> bool:
    """Whether -m chooses tests that need a CUDA device."""
    return re.search(r"(?<!not )\bgpu\b", config.getoption("markexpr")) is not None


def pytest_configure(config: pytest.Config) -> None:
    # JAX reads these once: JAX_PLATFORMS when it is imported, which no plugin does, and XLA_FLAGS at its first device.
    if gpu_lane(config):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = {"xla_force_host_platform_device_count": "4"}
    if config.getoption("numprocesses", None) or "PYTEST_XDIST_WORKER" in os.environ:
        # The processes share the cores already. Workers inherit the controller's environment, so NumPy sees it too.
        flags["xla_cpu_multi_thread_eigen"] = "false"
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"):
            os.environ.setdefault(name, "1")
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([given, *(f"--{k}={v}" for k, v in flags.items() if k not in given)]).strip()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    if not gpu_lane(item.config):
        pytest.skip("needs a CUDA device; -m gpu chooses these tests")
    import jax

    if jax.default_backend() != "gpu":
        pytest.fail(f"-m gpu was chosen, but JAX computes on {jax.default_backend()!r}", pytrace=False)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the repository with golden vectors and quantized checkpoints."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared, the golden vectors and checkpoints, beside the repository")
    return SHARED
