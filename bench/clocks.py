"""The clock, the power and the reasons to slow down that ``nvidia-smi`` tells of a GPU while something runs.

A GPU at its limit of power or temperature lowers its clock, and a product takes longer by as much: read beside a time,
the clock tells whether the kernel or the GPU is slower than in another run.
"""

import contextlib
import os
import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

_EVERY_MS = 20
_PATIENCE = 5.0
"""Seconds to wait for the first sample."""

_REASONS = {
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal limit",
    0x040: "hardware thermal limit",
    0x080: "power brake",
    0x100: "display clocks",
}
"""Bits of what NVML calls clocks event reasons (nvml.h), but for 1, an idle GPU."""


class Sample(NamedTuple):
    """SM clock in MHz, power in W, and why the clock is not higher."""

    mhz: int
    watts: float
    reasons: int


def parse(line: str) -> Sample | None:
    """A line of ``clocks.sm, power.draw, clocks_throttle_reasons.active``, without units; None for anything else."""
    try:
        mhz, watts, reasons = line.split(",")
        return Sample(int(mhz), float(watts), int(reasons, 16))
    except ValueError:
        return None


def summary(samples: list[Sample]) -> dict[str, Any]:
    """What a row holds: the least and the median clock, the highest power, and all reasons; {} of no samples."""
    if not samples:
        return {}
    clocks = [sample.mhz for sample in samples]
    told = 0
    for sample in samples:
        told |= sample.reasons
    return {
        "mhz": round(statistics.median(clocks)),
        "mhz_least": min(clocks),
        "watts": max(sample.watts for sample in samples),
        "slowed_by": [name for bit, name in _REASONS.items() if told & bit],
    }


@contextlib.contextmanager
def watch() -> Iterator[list[Sample]]:
    """Samples, taken while the block runs, of the GPU that JAX computes on; none where there is no ``nvidia-smi``.

    The block begins after the first sample, which is dropped again once there is another.
    """
    samples: list[Sample] = []
    program = shutil.which("nvidia-smi")
    if program is None or jax.default_backend() != "gpu":
        yield samples
        return
    query = "--query-gpu=clocks.sm,power.draw,clocks_throttle_reasons.active"
    arguments = [program, query, "--format=csv,noheader,nounits", f"--id={_gpu()}", f"--loop-ms={_EVERY_MS}"]
    begun = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            sample = parse(line)
            if sample is not None:
                samples.append(sample)
                begun.set()
        begun.set()

    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        begun.wait(_PATIENCE)
        try:
            yield samples
        finally:
            process.terminate()
            reader.join()
    if len(samples) > 1:
        del samples[0]


def _gpu() -> str:
    """JAX's device as ``nvidia-smi`` counts: CUDA_VISIBLE_DEVICES renumbers them for JAX only."""
    number = int(jax.local_devices()[0].local_hardware_id or 0)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",")[number] if visible else str(number)
