"""Dense layers: recipes through Triton against XLA's bf16 (cuBLAS) and torch's ``_scaled_mm``.

Every measurement goes through a few distinct layers whose weights together are larger than the L2 cache. Kernels are
summed over independent calls; wall times are of calls that depend on each other, unrolled and in a scan over layers.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import jmoe
from bench import clocks, harness, report, variants

LAYERS = {
    "8192x8192": (8192, 8192),
    "llama3-8b-gate-up": (28672, 4096),
    "gpt-oss-qkv": (5120, 2880),
    "gpt-oss-gate-up": (5760, 2880),
    "16384x8192": (16384, 8192),
}
"""Name to (N, K)."""

RECIPES = (
    "xla-bf16",
    "torch-fp8",
    "bf16",
    "fp8_tensor",
    "fp8_channel",
    "fp8_channel+exact",
    "fp8_block",
    "fp8_block+batch_invariant",
    "fp8_w8a16",
    "int8",
    "int8_w8a16",
    "int4",
    "int4_fp8",
    "mxfp4",
    "mxfp4_a8",
    "mxfp4_a8+workspace",
    "nvfp4_w4a16",
)
WAYS = ("batch_invariant", "exact", "fast", "workspace")
USUAL = {
    "layers": ("8192x8192", "llama3-8b-gate-up", "gpt-oss-qkv"),
    "recipes": ("xla-bf16", "torch-fp8", "bf16", "fp8_tensor", "fp8_channel", "fp8_block", "fp8_w8a16"),
}
"""What is measured where nothing is chosen."""
TOKENS = (1, 16, 64, 512, 4096)

_CACHE = 1e8
"""Bytes that the layers' weights together exceed, if sixteen layers can."""


def _bytes_a_layer(recipe: str, n: int, k: int) -> float:
    return n * k * harness.bytes_each(recipe)


def _depth(recipe: str, n: int, k: int) -> int:
    return min(16, max(4, int(-(-_CACHE // _bytes_a_layer(recipe, n, k)))))


def _weights(recipe: str, n: int, k: int) -> Any:
    """Layers' weights: stacked for Triton, which indexes them, and a list for XLA, which would copy a slice."""
    keys = jax.random.split(jax.random.key(0), _depth(recipe, n, k))

    @jax.jit
    def make(key: Array) -> Any:
        w = jax.random.normal(key, (n, k), jnp.bfloat16)
        return w if recipe.endswith("bf16") else jmoe.prepare(jmoe.quantize(w, recipe), op="linear")

    if recipe == "xla-bf16":
        return [make(key) for key in keys]
    return jax.jit(lambda keys: lax.map(make, keys))(keys)


def rows(name: str, recipe: str, tokens: Sequence[int], ceilings: harness.Ceilings) -> Iterator[harness.Measured]:
    """Measures a layer under a recipe, in a variant of it; see ``harness.run``."""
    n, k = LAYERS[name]
    variant = variants.parse(recipe)
    recipe = variant.recipe
    if recipe == "torch-fp8":
        yield from _torch_rows(n, k, tokens, ceilings)
        return
    stacked, depth = recipe != "xla-bf16", _depth(recipe, n, k)

    def call(x: Array, weights: Any, _: None, layer: Any) -> Array:
        if stacked:
            with jmoe.config(**variant.settings):
                return jmoe.linear(x, weights, layer=layer, accumulation=variant.accumulation, implementation="triton")
        return lax.dot_general(x, weights[layer], (((1,), (1,)), ((), ())))

    inputs = {
        t: harness.Inputs(
            x=jax.random.normal(jax.random.key(t), (t, k), jnp.bfloat16),
            others=[None] * depth,
            flops=2 * t * n * k,
            moved=_bytes_a_layer(recipe, n, k) + 2 * t * (k + n),
        )
        for t in tokens
    }
    try:
        yield from harness.measure(
            call,
            _weights(recipe, n, k),
            inputs,
            depth=depth,
            calls=depth,
            scan=stacked,
            peak=harness.peak_tflops(recipe, ceilings),
            ceilings=ceilings,
        )
    except NotImplementedError as refusal:
        print(f"{name}/{recipe}: {refusal}", flush=True)


def _torch_rows(n: int, k: int, tokens: Sequence[int], ceilings: harness.Ceilings) -> Iterator[harness.Measured]:
    """``torch._scaled_mm`` with a scale a row of both operands; x comes quantised, so this is the product alone."""
    if importlib.util.find_spec("torch") is None or n % 16 or k % 16:
        return
    import torch

    if not torch.cuda.is_available():
        return
    depth = _depth("fp8_channel", n, k)
    device, e4m3 = torch.device("cuda"), torch.float8_e4m3fn
    weights = [torch.randn(n, k, device=device, dtype=torch.bfloat16).to(e4m3) for _ in range(depth)]
    scale_w = torch.ones(1, n, device=device)
    for t in tokens:
        x, scale_x = torch.randn(t, k, device=device).to(e4m3), torch.ones(t, 1, device=device)

        def step(x: Any = x, scale_x: Any = scale_x) -> None:
            for w in weights:
                torch._scaled_mm(
                    x, w.t(), scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16, use_fast_accum=True
                )

        with clocks.watch() as samples:
            us = _torch_us(step) / depth
        row = report.row(
            us=us,
            us_scan=None,
            us_kernels=None,
            launches=1,
            flops=2 * t * n * k,
            moved=n * k + t * (k + 2 * n),
            peak_tflops=ceilings["fp8_tflops"],
            ceilings=ceilings,
            clock=clocks.summary(samples),
        )
        yield t, row


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
