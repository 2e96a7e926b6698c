"""An operation on random data on the GPU here, timed with each of some tiles."""

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jmoe.backends import triton
from jmoe.backends.select import select
from jmoe.backends.spec import BatchedArgs, LinearArgs, MoEArgs, OpSpec
from jmoe.ops.prepare import prepare
from jmoe.qtensor import QTensor
from jmoe.quantize import quantize
from jmoe.scheme import Recipe
from pallas_kernels.tuning import table, timing
from pallas_kernels.tuning.timing import Kernels

_BYTES = 1e9
"""Of the weights of all layers together, so that no call finds its own in the L2 cache."""

_ROUTINGS = 8
"""Routings at least: with one or two, few experts may have tokens, or all, and tiles that suit that would win."""

_ITERATIONS = 3
_REST = 0.1
"""Seconds before each measurement."""

FUNCTIONS: dict[str, Callable[..., Array]] = {
    "linear": triton.linear,
    "moe": triton.fused_moe,
    "batched_experts": triton.batched_experts,
}


class OnDevice:
    """Measures operations; the weights of the last one are kept, since the next is mostly the same with other rows."""

    def __init__(self) -> None:
        self._kept: tuple[Any, list[tuple[Any, ...]]] | None = None

    def __call__(self, op: OpSpec, tiles: Sequence[table.Tiles]) -> list[Kernels | None]:
        """Kernels' times of one call with each of the tiles, summed over calls with weights of their own."""
        layers = self._layers(op)
        w = layers[0][0]
        op = op.replace(layout=w.layout.kind) if isinstance(w, QTensor) else op
        calls = max(_ROUTINGS, len(layers)) if op.op == "moe" else len(layers)
        arguments = [arguments_of(op, layers[number % len(layers)], number) for number in range(calls)]
        # Tiles are of kernels that unpack in their loops, whatever workspace is in force.
        chosen = dataclasses.replace(select(op, implementation=triton.NAME), workspace=0)
        functions = [
            functools.partial(_calls, op, dataclasses.replace(chosen, tiles=table.parts(each))) for each in tiles
        ]
        lowered = [jax.jit(function).lower(arguments) for function in functions]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled = list(pool.map(_compiled, lowered))
        return [None if f is None else _times(f, arguments, calls) for f in compiled]

    def _layers(self, op: OpSpec) -> list[tuple[Any, ...]]:
        key = op.replace(tokens=1, top_k=min(op.top_k, 1))
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # before the next ones take memory
            shapes = weight_shapes(op)
            each = sum(map(math.prod, shapes)) * (2 if op.recipe.weight is None else 1)
            count = max(2, min(16, round(_BYTES / each)))
            keys = jax.random.split(jax.random.key(0), (count, len(shapes)))
            made = [
                tuple(weight(key, shape, op.recipe, op.dtype) for key, shape in zip(of_layer, shapes, strict=True))
                for of_layer in keys
            ]
            self._kept = key, [tuple(prepare(w, op=op) for w in layer) for layer in made]
        return self._kept[1]


def weight_shapes(op: OpSpec) -> list[tuple[int, ...]]:
    """Of w, or of w13 and w2."""
    if op.op == "linear":
        return [(op.features, op.hidden)]
    halves = 2 if op.gated else 1
    return [(op.experts, halves, op.intermediate, op.hidden), (op.experts, op.hidden, op.intermediate)]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def weight(key: Array, shape: tuple[int, ...], recipe: Recipe, dtype: str) -> Array | QTensor:
    """A random weight such that values stay near 1, made one matrix at a time."""
    lead, matrix = shape[:-2], shape[-2:]

    def make(key: Array) -> Array | QTensor:
        w = jax.random.normal(key, matrix, jnp.float32) * matrix[1] ** -0.5
        return w.astype(dtype) if recipe.weight is None else quantize(w, recipe)

    made = lax.map(make, jax.random.split(key, math.prod(lead)))
    return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), made)


def arguments_of(op: OpSpec, weights: tuple[Any, ...], number: int) -> Any:
    """A call's arguments; routings differ from call to call, and are uniform."""
    keys = jax.random.split(jax.random.key(number), 3)
    dtype = jnp.dtype(op.dtype)
    lead = (op.experts, op.tokens) if op.op == "batched_experts" else (op.tokens,)
    x = jax.random.normal(keys[0], (*lead, op.hidden), dtype)
    second = (op.second_recipe or op.recipe).input
    scale = {"input_scale": jnp.float32(0.01)} if op.recipe.input is not None and op.recipe.input.static else {}
    if op.op == "linear":
        return LinearArgs(x, *weights, **scale)
    if second is not None and second.static:
        scale["intermediate_scale"] = jnp.float32(0.01)
    w13, w2 = weights
    if op.op == "batched_experts":
        return BatchedArgs(x, jnp.full((op.experts,), op.tokens, jnp.int32), w13, w2, **scale)
    _, ids = lax.top_k(jax.random.uniform(keys[1], (op.tokens, op.experts)), op.top_k)
    topk_weights = jax.random.uniform(keys[2], ids.shape, jnp.float32)
    return MoEArgs(x, w13, w2, topk_weights, ids.astype(jnp.int32), **scale)


def _calls(op: OpSpec, selection: Any, arguments: Sequence[Any]) -> list[Array]:
    return [FUNCTIONS[op.op](op, selection, each) for each in arguments]


def _compiled(lowered: Any) -> Callable[..., Any] | None:
    """None where the compiler refuses, for want of shared memory or registers."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError:
        return None


def _times(compiled: Callable[..., Any], arguments: Sequence[Any], calls: int) -> Kernels | None:
    try:
        kernels = timing.kernel_times(compiled, arguments, iterations=_ITERATIONS, rest=_REST)
        if kernels is None:  # no CUPTI here
            kernels = [("call", timing.wall_us(compiled, arguments))]
    except jax.errors.JaxRuntimeError:  # such as a launch with more registers than there are
        return None
    sums: dict[str, float] = {}
    for name, us in kernels:
        sums[name] = sums.get(name, 0.0) + us / calls
    return list(sums.items())
