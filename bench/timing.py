"""Times of compiled functions, see ``pallas_kernels.tuning.timing``, and what the device reaches at best."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tuning.timing import REST, Kernels, compile_all, kernel_times, wall_us

__all__ = ["REST", "Kernels", "ceilings", "compile_all", "kernel_times", "wall_us"]


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
