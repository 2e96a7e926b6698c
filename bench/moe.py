"""Fused Mixture-of-Experts layers, from quantising x to the sum over the chosen experts; routing itself is not in it.

Calls go through four distinct stacked layers in turn, so that no call finds its weights in the L2 cache. Kernels are
summed over independent calls with routings of their own; wall times are of calls that depend on each other, unrolled
and in a scan over the index of the layer. Routing is uniform, and a token's experts are distinct.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jmoe
from bench import report, timing
from jmoe.qtensor import QTensor, scale_grid

LAYERS = {
    "dsv3": (7168, 2048, 256, 8),
    "dsv3-tp8": (7168, 256, 256, 8),
    "qwen3-30b": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
}
"""Name to (H, I, E, k)."""

RECIPES = ("fp8_block", "fp8_channel", "fp8_tensor", "fp8_w8a16", "bf16")
TOKENS = (1, 8, 64, 512, 2048, 8192)

DEPTH = 4
_CALLS = 8


def run(
    recipes: Sequence[str] = RECIPES,
    layers: Sequence[str] = tuple(LAYERS),
    tokens: Sequence[int] = TOKENS,
    *,
    save: Callable[[dict[str, Any]], object] = lambda results: None,
) -> dict[str, Any]:
    """Measures every layer, recipe and token count; see ``report.result``. ``save`` gets what there is so far."""
    ceilings = timing.ceilings()
    rows: dict[str, report.Row] = {}
    for name in layers:
        for recipe in recipes:
            if _bytes(name, recipe) > 0.8 * _memory():
                print(f"{name}/{recipe}: {DEPTH} layers do not fit this device's memory", flush=True)
                continue
            weights = make_weights(name, recipe)
            for t, (values, kernels) in _rows(name, recipe, weights, tokens, ceilings):
                rows[f"{name}/{recipe}/{t}"] = values
                print(f"{name}/{recipe}/{t}: {values} {kernels}", flush=True)
                save(report.result(ceilings, rows))
            del weights
    return report.result(ceilings, rows)


def _bytes(name: str, recipe: str) -> int:
    hidden, intermediate, experts, _ = LAYERS[name]
    return DEPTH * experts * 3 * hidden * intermediate * (2 if recipe == "bf16" else 1)


def _memory() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get("bytes_limit", float("inf")))


def make_weights(name: str, recipe: str) -> tuple[Any, Any]:
    """w13 (L, E, 2, I, H) and w2 (L, E, H, I), random, such that values stay near 1."""
    hidden, intermediate, experts, _ = LAYERS[name]
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = (2, intermediate, hidden), (hidden, intermediate)
    how = jmoe.recipe(recipe)

    def weight(key: Array, shape: tuple[int, ...]) -> Any:
        keys = jax.random.split(key, DEPTH * experts)
        lead, spread = (DEPTH, experts), shape[-1] ** -0.5
        if how.weight is None:
            values = lax.map(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(spread), keys)
            return values.reshape(*lead, *shape)
        codes = lax.map(functools.partial(_codes, shape=shape), keys).reshape(*lead, *shape)
        grid = (*lead, *shape[:-2], *scale_grid(shape[-2:], how.weight.block))
        scale = jax.random.uniform(key, grid, jnp.float32, 0.8, 1.2) * jnp.float32(spread / _CODE_SPREAD)
        return QTensor.make(codes, scale, scheme=how.weight, input_scheme=how.input)

    w13, w2 = (jax.jit(weight, static_argnums=1)(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return w13, w2


_CODE_SPREAD = 64.0
"""Standard deviation of the values of random codes, of which the largest are 448."""


def _codes(key: Array, shape: tuple[int, ...]) -> Array:
    """Normal values as e4m3 codes."""
    return (jax.random.normal(key, shape, jnp.bfloat16) * _CODE_SPREAD).clip(-448, 448).astype(jnp.float8_e4m3fn)


def routing(tokens: int, name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Router weights that add up to one, and ids."""
    _, _, experts, top_k = LAYERS[name]
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)
    weights = rng.random((tokens, top_k), np.float32) + np.float32(0.1)
    return weights / weights.sum(1, keepdims=True), ids


def _rows(name: str, recipe: str, weights: tuple[Any, Any], tokens: Sequence[int], ceilings: dict[str, float]) -> Any:
    """Yields (T, (row, microseconds of each kernel)) for each token count."""
    hidden, intermediate, _, top_k = LAYERS[name]

    def call(x: Array, weights: tuple[Any, Any], routing: tuple[Array, Array], layer: Any) -> Array:
        layer = jnp.asarray(layer, jnp.int32)
        return jmoe.fused_moe(x, *weights, *routing, layer=layer, implementation="triton")

    def independent(xs: list[Array], weights: Any, routings: Any) -> list[Array]:
        return [call(x, weights, routing, i) for i, (x, routing) in enumerate(zip(xs, routings, strict=True))]

    def unrolled(x: Array, weights: Any, routings: Any) -> Array:
        for i in range(_CALLS):
            x = _next(x, call(x, weights, routings[i % DEPTH], i % DEPTH))
        return x

    def scanned(x: Array, weights: Any, routings: Any) -> Array:
        layers = jnp.arange(_CALLS, dtype=jnp.int32) % DEPTH
        return lax.scan(lambda x, layer: (_next(x, call(x, weights, routings[0], layer)), None), x, layers)[0]

    inputs, functions = {}, {}
    for t in tokens:
        x = jax.random.normal(jax.random.key(t), (t, hidden), jnp.bfloat16)
        routings = [jax.tree.map(jnp.asarray, routing(t, name, seed)) for seed in range(DEPTH)]
        inputs[t] = x, routings
        functions[f"independent {t}"] = independent, ([x] * DEPTH, weights, routings)
        functions[f"unrolled {t}"] = unrolled, (x, weights, routings)
        functions[f"scanned {t}"] = scanned, (x, weights, routings)
    compiled = timing.compile_all(functions)

    for t, (x, routings) in inputs.items():
        xs = [x + jnp.bfloat16(i) for i in range(DEPTH)]
        kernels = timing.kernel_times(compiled[f"independent {t}"], xs, weights, routings)
        active = float(np.mean([len(np.unique(np.asarray(ids))) for _, ids in routings]))
        fp8 = recipe in ("fp8_tensor", "fp8_channel", "fp8_block")
        row = report.row(
            us=timing.wall_us(compiled[f"unrolled {t}"], x, weights, routings) / _CALLS,
            us_scan=timing.wall_us(compiled[f"scanned {t}"], x, weights, routings) / _CALLS,
            us_kernels=sum(us for _, us in kernels) / DEPTH if kernels else None,
            launches=len(kernels) // DEPTH if kernels else None,
            flops=6 * t * top_k * hidden * intermediate,
            moved=active * 3 * hidden * intermediate * (2 if recipe == "bf16" else 1) + 4 * t * hidden,
            peak_tflops=ceilings["fp8_tflops" if fp8 else "bf16_tflops"],
            ceilings=ceilings,
        )
        yield t, (row, by_name(kernels))


def _next(x: Array, y: Array) -> Array:
    """The next call's input: x, made to depend on all rows of y. (A gated layer's y grows as x squared.)"""
    return x + y[:, :1] * jnp.asarray(1e-6, x.dtype)


def by_name(kernels: timing.Kernels | None) -> dict[str, float]:
    """Microseconds a call of each kernel."""
    sums: dict[str, float] = {}
    for name, us in kernels or []:
        sums[name] = sums.get(name, 0) + us / DEPTH
    return {name: round(us, 1) for name, us in sums.items()}
