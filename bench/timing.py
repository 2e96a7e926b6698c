"""Times of compiled JAX functions: kernels through CUPTI, whole calls by the host's clock."""

import concurrent.futures
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

Kernels = list[tuple[str, float]]


def compile_all(functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]) -> dict[str, Any]:
    """Each function compiled for its arguments (arrays or shapes): traced one by one, compiled in threads."""
    lowered = {name: jax.jit(f).lower(*args) for name, (f, args) in functions.items()}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(lowered, pool.map(lambda item: item.compile(), lowered.values()), strict=True))


_REST = 0.5
"""Seconds before a measurement, so that no row finds the clocks that the one before it has pulled down."""


def kernel_times(f: Callable[..., Any], *args: Any, iterations: int = 5) -> Kernels | None:
    """(name, median us) of each kernel that one call of the compiled ``f`` launches; None where there is no CUPTI."""
    if jax.default_backend() != "gpu":
        return None
    time.sleep(_REST)
    _, runs = profiler.measure(f, aggregate=False, iterations=iterations)(*args)
    if runs is None:
        return None
    median = np.median([[ms for _, ms in run] for run in runs], axis=0) * 1e3
    return [(name, float(us)) for (name, _), us in zip(runs[0], median, strict=True)]


def wall_us(f: Callable[..., Any], *args: Any, calls: int = 5, rounds: int = 5) -> float:
    """Microseconds a call of the compiled ``f``: ``calls`` queued at a time, the fastest of some rounds."""
    jax.block_until_ready(f(*args))
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        outputs = [f(*args) for _ in range(calls)]
        jax.block_until_ready(outputs)
        best = min(best, time.perf_counter() - start)
    return best / calls * 1e6


def ceilings() -> dict[str, float]:
    """What this device reaches at best: GB/s of memory, TFLOP/s of a bf16 product.

    Memory is the better of a large copy (bytes read and written) and a large sum (bytes read): layers of experts mostly
    read, and reading alone is faster.

    FP8 matrix units do twice the operations; that ceiling is not measured but taken as twice bf16's.
    """
    large = jax.random.normal(jax.random.key(2), (1 << 14, 1 << 15), jnp.float32)
    copy, total = jax.jit(lambda x: x + 1), jax.jit(lambda x: jnp.sum(x, axis=1))
    n = 8192
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(lambda a, b: a @ b.T)

    def us(f: Callable[..., Any], *args: Any) -> float:
        times = kernel_times(f, *args)
        return sum(t for _, t in times) if times else wall_us(f, *args)

    gbs = max(2 * large.nbytes / us(copy, large), large.nbytes / us(total, large)) * 1e-3
    tflops = 2 * n**3 / us(product, a, b) * 1e-6
    return {"gbs": gbs, "bf16_tflops": tflops, "fp8_tflops": 2 * tflops}
