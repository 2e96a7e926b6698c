"""Times of compiled JAX functions: kernels through CUPTI, whole calls by the host's clock."""

import concurrent.futures
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Kernels = list[tuple[str, float]]
"""(name, microseconds) of kernels, in the order in which they are launched."""


def compile_all(
    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]], seconds: dict[str, float] | None = None
) -> dict[str, Any]:
    """Each function compiled for its arguments (arrays or shapes): traced one by one, compiled in threads.

    ``seconds`` gets what each took to trace, lower and compile.
    """
    took: dict[str, float] = {} if seconds is None else seconds

    def lower(name: str) -> Any:
        f, args = functions[name]
        start = time.perf_counter()
        lowered = jax.jit(f).lower(*args)
        took[name] = time.perf_counter() - start
        return lowered

    def compiled(name: str, lowered: Any) -> Any:
        start = time.perf_counter()
        result = lowered.compile()
        took[name] += time.perf_counter() - start
        return result

    lowered = {name: lower(name) for name in functions}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(lowered, pool.map(compiled, lowered.keys(), lowered.values()), strict=True))


REST = 0.5
"""Seconds before a measurement, so that none finds the clocks that the one before it has pulled down."""


def kernel_times(f: Callable[..., Any], *args: Any, iterations: int = 5, rest: float = REST) -> Kernels | None:
    """(name, median us) of each kernel that one call of the compiled ``f`` launches; None where there is no CUPTI.

    The device is left idle for ``rest`` seconds before.
    """
    if jax.default_backend() != "gpu":
        return None
    from jax.experimental.mosaic.gpu import profiler  # takes the GPU's libraries

    time.sleep(rest)
    _, runs = profiler.measure(f, aggregate=False, iterations=iterations)(*args)
    if runs is None:
        return None
    median = np.median([[ms for _, ms in run] for run in runs], axis=0) * 1e3
    return [(name, float(us)) for (name, _), us in zip(runs[0], median, strict=True)]


_CALLS = 5
_ROUND = 0.03
"""Calls and seconds of a round at least: what it takes to send the first call and to hear of the last one's end, about
0.3 ms, is no call's."""


def wall_us(f: Callable[..., Any], *args: Any, rounds: int = 9) -> float:
    """Microseconds a call of the compiled ``f`` among calls that are queued one behind the other.

    The median of some rounds, of as many calls as take 30 ms, at least five.
    """
    jax.block_until_ready(f(*args))

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        outputs = [f(*args) for _ in range(calls)]
        jax.block_until_ready(outputs)
        return time.perf_counter() - start

    calls = _CALLS
    while seconds(calls) < _ROUND:
        calls *= 2
    return statistics.median(seconds(calls) for _ in range(rounds)) / calls * 1e6
