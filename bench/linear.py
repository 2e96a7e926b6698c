"""Dense layers: recipes through Triton against XLA's bf16 (cuBLAS) and torch's ``_scaled_mm``.

Every measurement goes through a few distinct layers whose weights together are larger than the L2 cache. Kernels are
summed over independent calls; wall times are of calls that depend on each other, unrolled and in a scan over layers.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import jmoe
from bench import report, timing

LAYERS = {
    "8192x8192": (8192, 8192),
    "llama3-8b-gate-up": (28672, 4096),
    "gpt-oss-qkv": (5120, 2880),
}
"""Name to (N, K)."""

RECIPES = ("xla-bf16", "torch-fp8", "bf16", "fp8_tensor", "fp8_channel", "fp8_block", "fp8_w8a16")
TOKENS = (1, 16, 64, 512, 4096)

_CACHE = 1e8
"""Bytes that the layers' weights together exceed, if eight layers can."""


def run(
    recipes: Sequence[str] = RECIPES,
    layers: Sequence[str] = tuple(LAYERS),
    tokens: Sequence[int] = TOKENS,
    *,
    save: Callable[[dict[str, Any]], object] = lambda results: None,
) -> dict[str, Any]:
    """Measures every layer, recipe and row count; see ``report.result``. ``save`` gets what there is so far."""
    ceilings = timing.ceilings()
    rows = {}
    for name in layers:
        n, k = LAYERS[name]
        for recipe in recipes:
            torch = recipe == "torch-fp8"
            measured = (_torch_rows if torch else functools.partial(_rows, recipe))(n, k, tokens, ceilings)
            for t, values in measured.items():
                rows[f"{name}/{recipe}/{t}"] = values
                print(f"{name}/{recipe}/{t}: {values}", flush=True)
            save(report.result(ceilings, rows))
    return report.result(ceilings, rows)


def _bytes_a_layer(recipe: str, n: int, k: int) -> int:
    return n * k * (2 if recipe.endswith("bf16") else 1)


def _depth(recipe: str, n: int, k: int) -> int:
    return min(8, max(4, int(-(-_CACHE // _bytes_a_layer(recipe, n, k)))))


def _weights(recipe: str, n: int, k: int) -> Any:
    """Layers' weights: stacked for Triton, which indexes them, and a list for XLA, which would copy a slice."""
    keys = jax.random.split(jax.random.key(0), _depth(recipe, n, k))

    @jax.jit
    def make(key: Array) -> Any:
        w = jax.random.normal(key, (n, k), jnp.bfloat16)
        return w if recipe.endswith("bf16") else jmoe.quantize(w, recipe)

    if recipe == "xla-bf16":
        return [make(key) for key in keys]
    return jax.jit(lambda keys: lax.map(make, keys))(keys)


def _rows(recipe: str, n: int, k: int, tokens: Sequence[int], ceilings: dict[str, float]) -> dict[int, report.Row]:
    weights, depth = _weights(recipe, n, k), _depth(recipe, n, k)
    stacked = recipe != "xla-bf16"

    def call(x: Array, weights: Any, layer: Any) -> Array:
        if stacked:
            return jmoe.linear(x, weights, layer=layer, implementation="triton")
        return lax.dot_general(x, weights[layer], (((1,), (1,)), ((), ())))

    def independent(xs: list[Array], weights: Any) -> list[Array]:
        return [call(x, weights, i) for i, x in enumerate(xs)]

    def unrolled(x: Array, weights: Any) -> Array:
        return functools.reduce(lambda x, i: _next(x, call(x, weights, i)), range(depth), x)

    def scanned(x: Array, weights: Any) -> Array:
        return lax.scan(lambda x, i: (_next(x, call(x, weights, i)), None), x, jnp.arange(depth, dtype=jnp.int32))[0]

    xs = {t: jax.random.normal(jax.random.key(t), (t, k), jnp.bfloat16) for t in tokens}
    functions = {}
    for t, x in xs.items():
        functions[f"independent {t}"] = independent, ([x] * depth, weights)
        functions[f"unrolled {t}"] = unrolled, (x, weights)
        if stacked:
            functions[f"scanned {t}"] = scanned, (x, weights)
    compiled = timing.compile_all(functions)

    def measured(t: int) -> report.Row:
        x = xs[t]
        kernels = timing.kernel_times(compiled[f"independent {t}"], [x + i for i in range(depth)], weights)
        fp8 = recipe in ("fp8_tensor", "fp8_channel", "fp8_block")
        return report.row(
            us=timing.wall_us(compiled[f"unrolled {t}"], x, weights) / depth,
            us_scan=timing.wall_us(compiled[f"scanned {t}"], x, weights) / depth if stacked else None,
            us_kernels=sum(us for _, us in kernels) / depth if kernels else None,
            launches=len(kernels) // depth if kernels else None,
            flops=2 * t * n * k,
            moved=_bytes_a_layer(recipe, n, k) + 2 * t * (k + n),
            peak_tflops=ceilings["fp8_tflops" if fp8 else "bf16_tflops"],
            ceilings=ceilings,
        )

    return {t: measured(t) for t in tokens}


def _next(x: Array, y: Array) -> Array:
    """The next layer's input: x, made to depend on all rows of y."""
    return x + y[:, :1] * jnp.asarray(1e-6, x.dtype)


def _torch_rows(n: int, k: int, tokens: Sequence[int], ceilings: dict[str, float]) -> dict[int, report.Row]:
    """``torch._scaled_mm`` with a scale a row of both operands; x comes quantised, so this is the product alone."""
    if importlib.util.find_spec("torch") is None or n % 16 or k % 16:
        return {}
    import torch

    if not torch.cuda.is_available():
        return {}
    depth = _depth("fp8_channel", n, k)
    device, e4m3 = torch.device("cuda"), torch.float8_e4m3fn
    weights = [torch.randn(n, k, device=device, dtype=torch.bfloat16).to(e4m3) for _ in range(depth)]
    scale_w = torch.ones(1, n, device=device)
    rows = {}
    for t in tokens:
        x, scale_x = torch.randn(t, k, device=device).to(e4m3), torch.ones(t, 1, device=device)

        def step(x: Any = x, scale_x: Any = scale_x) -> None:
            for w in weights:
                torch._scaled_mm(
                    x, w.t(), scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16, use_fast_accum=True
                )

        us = _torch_us(step) / depth
        rows[t] = report.row(
            us=us,
            us_scan=None,
            us_kernels=None,
            launches=1,
            flops=2 * t * n * k,
            moved=n * k + t * (k + 2 * n),
            peak_tflops=ceilings["fp8_tflops"],
            ceilings=ceilings,
        )
    return rows


def _torch_us(step: Callable[[], None], replays: int = 20) -> float:
    """Microseconds of ``step`` replayed as a CUDA graph, the median replay."""
    import torch

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(sorted(times)[replays // 2] * 1e3)
