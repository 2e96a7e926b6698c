"""Dense products alone, operands quantized, under the tiles that ``jmoe tune`` would try: which wins, at what clock.

The first tile of a recipe is the heuristic's. XLA's bf16 product and torch's ``_scaled_mm`` are measured in the same
run, since a GPU that lowers its clock lowers theirs too.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jmoe
from bench import clocks, harness, linear, report, timing
from jmoe.backends import triton
from jmoe.backends.spec import DeviceSpec, LinearArgs, OpSpec, Selection
from jmoe.qtensor import QTensor
from jmoe.scheme import as_recipe
from pallas_kernels.tuning.candidates import Problem, matmul_candidates
from pallas_kernels.tuning.heuristics import MatmulTile

LAYERS = {"8192x8192": linear.LAYERS["8192x8192"]}
RECIPES = ("xla-bf16", "torch-fp8", "bf16", "fp8_channel", "fp8_block")
TOKENS = (8192,)
CHART = False

_CANDIDATES = 8
_DEPTH = 4
"""Layers with weights of their own."""


def rows(name: str, recipe: str, tokens: Sequence[int], ceilings: harness.Ceilings) -> Iterator[harness.Measured]:
    """Measures a product under several tiles; see ``harness.run``. Rows end in row count and tile."""
    if recipe in ("xla-bf16", "torch-fp8"):
        yield from linear.rows(name, recipe, tokens, ceilings)
        return
    n, k = LAYERS[name]
    for t in tokens:
        yield from _tiles(n, k, recipe, t, ceilings)


def _tiles(n: int, k: int, recipe: str, m: int, ceilings: harness.Ceilings) -> Iterator[harness.Measured]:
    how = as_recipe(recipe)
    op = OpSpec(op="linear", recipe=how, tokens=m, hidden=k, features=n, quantized_input=how.input is not None)
    device = DeviceSpec.of(jax.devices()[0])
    chosen = jmoe.select(op, device, implementation="triton")
    op = op.replace(accumulation=chosen.accumulation)
    x: Array | QTensor = _operand(0, m, k)
    if how.input is not None:
        x = jmoe.quantize(x, how.input)
    weights = [_operand(1 + i, n, k) for i in range(_DEPTH)]
    if how.weight is not None:
        weights = [jmoe.quantize(w, how) for w in weights]

    def call(tile: MatmulTile) -> Any:
        selection: Selection = dataclasses.replace(chosen, tiles=(("tile", tile),))
        return lambda x, weights: [triton.linear(op, selection, LinearArgs(x, w)) for w in weights]

    problem = Problem(
        m=m,
        n=n,
        k=k,
        operands="16bit" if how.weight is None else "fp8",
        promoted=how.weight is not None and chosen.accumulation == "exact",
        capability=device.compute_capability,
        sm_count=device.sm_count,
    )
    tiles = matmul_candidates(chosen.tile("tile"), problem, _CANDIDATES)
    compiled = timing.compile_all({str(tile): (call(tile), (x, weights)) for tile in tiles})
    for tile, function in compiled.items():
        time.sleep(timing.REST)
        with clocks.watch() as samples:
            kernels = timing.kernel_times(function, x, weights, rest=0)
        bytes_each = 1 if isinstance(x, QTensor) else 2
        row = report.row(
            us=timing.wall_us(function, x, weights) / _DEPTH,
            us_scan=None,
            us_kernels=sum(us for _, us in kernels) / _DEPTH if kernels else None,
            launches=len(kernels) // _DEPTH if kernels else None,
            flops=2 * m * n * k,
            moved=bytes_each * k * (m + n) + 2 * m * n,
            peak_tflops=harness.peak_tflops(recipe, ceilings),
            ceilings=ceilings,
            kernels=harness.by_name(kernels, _DEPTH),
            clock=clocks.summary(samples),
        )
        yield f"{m}/{tile}", row


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _operand(number: int, rows: int, columns: int) -> Array:
    return jax.random.normal(jax.random.key(number), (rows, columns), jnp.bfloat16)
