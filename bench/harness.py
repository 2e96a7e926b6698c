"""What benchmarks share: the loop over layers, recipes and row counts, and the three programs that a row is made of."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

import jmoe
from bench import clocks, report, timing
from jmoe.scheme import as_recipe

Ceilings = dict[str, float]

Measured = tuple[int | str, report.Row]
"""Row count, or what else ends a row's name, and row."""

Call = Callable[[Array, Any, Any, Any], Array]
"""(x, weights of all layers, what else a call takes, index of its layer) to y."""

Follow = Callable[[Array, Array], Array]
"""x and y of a call to the next call's x."""


class Inputs(NamedTuple):
    """What calls of one row count take, and what they cost at least.

    Attributes:
      x: the activation.
      others: what else a call takes, an entry a layer, or more: one a call.
      flops: floating-point operations of a call.
      moved: the fewest bytes that a call must move.
    """

    x: Array
    others: Sequence[Any]
    flops: float
    moved: float


def run(
    rows: Callable[[str, str, Sequence[int], Ceilings], Iterator[Measured]],
    layers: Sequence[str],
    recipes: Sequence[str],
    tokens: Sequence[int],
    save: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Measures every layer, recipe and row count; see ``report.result``. ``save`` gets what there is so far."""
    ceilings = timing.ceilings()
    found: dict[str, report.Row] = {}
    for layer in layers:
        for recipe in recipes:
            for t, row in rows(layer, recipe, tokens, ceilings):
                found[f"{layer}/{recipe}/{t}"] = row
                print(f"{layer}/{recipe}/{t}: {row}", flush=True)
                save(report.result(ceilings, found))
    return report.result(ceilings, found)


def peak_tflops(recipe: str, ceilings: Ceilings) -> float:
    """The ceiling of the matrix unit that a recipe (or a variant of it) could use."""
    recipe = recipe.split("+")[0]
    if recipe.endswith("bf16"):
        return ceilings["bf16_tflops"]
    x = as_recipe(recipe).input
    return ceilings["fp8_tflops" if x is not None and x.format in ("e4m3", "int8") else "bf16_tflops"]


@functools.cache
def bytes_each(recipe: str) -> float:
    """Bytes of a weight under a recipe, its share of the scales included."""
    if recipe.endswith("bf16"):
        return 2
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    return jax.eval_shape(lambda w: jmoe.quantize(w, as_recipe(recipe)), w).nbytes / w.size


def measure(
    call: Call,
    weights: Any,
    inputs: dict[int, Inputs],
    *,
    depth: int,
    calls: int,
    scan: bool,
    peak: float,
    ceilings: Ceilings,
    follow: Follow | None = None,
) -> Iterator[Measured]:
    """Times a call among others, so that none finds its weights in the L2 cache.

    Args:
      call: see ``Call``.
      weights: of ``depth`` layers.
      inputs: by row count.
      depth: layers, and independent calls, over which kernels are summed.
      calls: dependent calls, whose wall time is taken, unrolled and in a scan.
      scan: layers can be indexed by a traced number.
      peak: the ceiling of the matrix unit in TFLOP/s.
      ceilings: of the same run, see ``timing.ceilings``.
      follow: makes calls depend on each other; by default through a small kernel of its own.
    """
    follow = follow or _next

    def independent(xs: list[Array], weights: Any, others: Sequence[Any]) -> list[Array]:
        return [call(x, weights, other, i) for i, (x, other) in enumerate(zip(xs, others, strict=False))]

    def unrolled(x: Array, weights: Any, others: Sequence[Any]) -> Array:
        for i in range(calls):
            x = follow(x, call(x, weights, others[i % len(others)], i % depth))
        return x

    def scanned(x: Array, weights: Any, others: Sequence[Any]) -> Array:
        layers = jnp.arange(calls, dtype=jnp.int32) % depth
        each = [others[i % len(others)] for i in range(calls)]
        turns = layers, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) if others[0] is not None else None

        def step(x: Array, turn: Any) -> tuple[Array, None]:
            layer, other = turn
            return follow(x, call(x, weights, other, layer)), None

        return lax.scan(step, x, turns)[0]

    def one(x: Array, weights: Any, others: Sequence[Any]) -> Array:
        return call(x, weights, others[0], 0)

    functions: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
    for t, (x, others, *_) in inputs.items():
        functions[f"one {t}"] = one, (x, weights, others)
        functions[f"independent {t}"] = independent, ([x] * depth, weights, others)
        functions[f"unrolled {t}"] = unrolled, (x, weights, others)
        if scan:
            functions[f"scanned {t}"] = scanned, (x, weights, others)
    seconds: dict[str, float] = {}
    compiled = timing.compile_all(functions, seconds)
    for t, (x, others, flops, moved) in inputs.items():
        xs = [jnp.roll(x, i, axis=-1) for i in range(depth)]
        time.sleep(timing.REST)
        with clocks.watch() as samples:
            kernels = timing.kernel_times(compiled[f"independent {t}"], xs, weights, others, rest=0)
            us = timing.wall_us(compiled[f"unrolled {t}"], x, weights, others) / calls
        us_scan = None
        if scan:  # after a rest too: long layers leave the GPU at its limit of power, and a lower clock
            time.sleep(timing.REST)
            us_scan = timing.wall_us(compiled[f"scanned {t}"], x, weights, others) / calls
        row = report.row(
            us=us,
            us_scan=us_scan,
            us_kernels=sum(us for _, us in kernels) / depth if kernels else None,
            launches=len(kernels) // depth if kernels else None,
            flops=flops,
            moved=moved,
            peak_tflops=peak,
            ceilings=ceilings,
            kernels=by_name(kernels, depth),
            clock=clocks.summary(samples),
            compile_s=round(seconds[f"one {t}"], 2),
            extra_bytes=compiled[f"one {t}"].memory_analysis().temp_size_in_bytes,
        )
        yield t, row


def _next(x: Array, y: Array) -> Array:
    """The next call's input: x, made to depend on all rows of y. (A gated layer's y grows as x squared.)"""
    return x + y[:, :1] * jnp.asarray(1e-6, x.dtype)


def by_name(kernels: timing.Kernels | None, depth: int) -> dict[str, float]:
    """Microseconds a call of each kernel of ``depth`` calls."""
    sums: dict[str, float] = {}
    for name, us in kernels or []:
        sums[name] = sums.get(name, 0) + us / depth
    return {name: round(us, 1) for name, us in sums.items()}
