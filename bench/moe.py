"""Fused Mixture-of-Experts layers, from quantising x to the sum over the chosen experts; routing itself is not in it.

Calls go through four distinct stacked layers in turn, so that no call finds its weights in the L2 cache. Kernels are
summed over independent calls with routings of their own; wall times are of calls that depend on each other, unrolled
and in a scan over the index of the layer: y is the next call's x, and router weights keep it as large. Routing is
uniform, or skewed (``+zipf``), and a token's experts are distinct. Peers are what else there is in JAX, in bfloat16;
their layers are not scanned over, which would copy a layer's weights each step.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import jmoe
from bench import harness, timing, variants
from bench.peers import PEERS, Dot, fused_moe, is_here
from jmoe.qtensor import QTensor, scale_grid
from jmoe.scheme import as_recipe
from jmoe.tuning import MODELS

LAYERS = {name: (m.hidden, m.intermediate, m.experts, m.top_k) for name, m in MODELS.items()}
"""Name to (H, I, E, k); activations are silu, and there are no biases."""

RECIPES = (
    "fp8_block",
    "fp8_block+zipf",
    "fp8_block+batch_invariant",
    "fp8_block+fast",
    "fp8_channel",
    "fp8_channel+exact",
    "fp8_tensor",
    "fp8_w8a16",
    "bf16",
    "int8",
    "int4",
    "int4_fp8",
    "mxfp4",
    "mxfp4_a8",
    "mxfp4_a8+workspace",
    "nvfp4_w4a16",
    *PEERS,
)
WAYS = ("zipf", "batch_invariant", "exact", "fast", "workspace")
USUAL = {
    "layers": ("dsv3", "dsv3-tp8", "qwen3-30b", "mixtral"),
    "recipes": (
        "fp8_block",
        "fp8_block+zipf",
        "fp8_block+batch_invariant",
        "fp8_channel",
        "fp8_tensor",
        "bf16",
        *PEERS,
    ),
}
"""What is measured where nothing is chosen."""
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)

DEPTH = 4
_CALLS = 8


def _bytes(name: str, recipe: str) -> float:
    hidden, intermediate, experts, _ = LAYERS[name]
    return DEPTH * experts * 3 * hidden * intermediate * harness.bytes_each(recipe)


def _memory() -> float:
    stats = jax.devices()[0].memory_stats() or {}
    return float(stats.get("bytes_limit", float("inf")))


def make_weights(name: str, recipe: str) -> tuple[Any, Any]:
    """w13 (L, E, 2, I, H) and w2 (L, E, H, I), random, such that values stay near 1."""
    hidden, intermediate, experts, _ = LAYERS[name]
    keys = jax.random.split(jax.random.key(0), 2)
    shapes = (2, intermediate, hidden), (hidden, intermediate)
    how = as_recipe(recipe)

    def weight(key: Array, shape: tuple[int, ...]) -> Any:
        keys = jax.random.split(key, DEPTH * experts)
        lead, spread = (DEPTH, experts), shape[-1] ** -0.5
        if how.weight is None:
            values = lax.map(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * jnp.bfloat16(spread), keys)
            return values.reshape(*lead, *shape)
        if how.weight.format != "e4m3" or how.weight.global_scale is not None:
            made = lax.map(lambda key: jmoe.quantize(jax.random.normal(key, shape) * spread, how), keys)
            return jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), made)
        codes = lax.map(functools.partial(_codes, shape=shape), keys).reshape(*lead, *shape)
        grid = (*lead, *shape[:-2], *scale_grid(shape[-2:], how.weight.block))
        scale = jax.random.uniform(key, grid, jnp.float32, 0.8, 1.2) * jnp.float32(spread / _CODE_SPREAD)
        return QTensor.make(codes, scale, scheme=how.weight, input_scheme=how.input)

    w13, w2 = (jax.jit(weight, static_argnums=1)(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return jmoe.prepare(w13, op="moe"), jmoe.prepare(w2, op="moe")


_CODE_SPREAD = 64.0
"""Standard deviation of the values of random codes, of which the largest are 448."""


def _codes(key: Array, shape: tuple[int, ...]) -> Array:
    """Normal values as e4m3 codes."""
    return (jax.random.normal(key, shape, jnp.bfloat16) * _CODE_SPREAD).clip(-448, 448).astype(jnp.float8_e4m3fn)


def routing(tokens: int, name: str, seed: int, *, zipf: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Router weights that add up to one, and ids; with ``zipf`` the i-th expert of a random order weighs 1/i."""
    _, _, experts, top_k = LAYERS[name]
    rng = np.random.default_rng(seed)
    share = 1 / (1 + rng.permutation(experts)) if zipf else np.ones(experts)
    # The first k of exponential arrivals are k draws without replacement.
    ids = np.argsort(rng.exponential(size=(tokens, experts)) / share, axis=1)[:, :top_k].astype(np.int32)
    weights = rng.random((tokens, top_k), np.float32) + np.float32(0.1)
    return weights / weights.sum(1, keepdims=True), ids


def rows(name: str, recipe: str, tokens: Sequence[int], ceilings: harness.Ceilings) -> Iterator[harness.Measured]:
    """Measures a layer under a recipe or a peer, in a variant of it; see ``harness.run``."""
    variant = variants.parse(recipe)
    recipe = variant.recipe
    if _bytes(name, recipe) > 0.8 * _memory():
        print(f"{name}/{recipe}: {DEPTH} layers do not fit this device's memory", flush=True)
        return
    measure = functools.partial(
        harness.measure, depth=DEPTH, calls=_CALLS, peak=harness.peak_tflops(recipe, ceilings), ceilings=ceilings
    )
    inputs = {t: _inputs(name, variant, t) for t in tokens}
    if recipe not in PEERS:
        try:
            call, weights = functools.partial(_call, variant), make_weights(name, recipe)
            yield from measure(call, weights, _levelled(call, weights, inputs), scan=True, follow=lambda x, y: y)
        except NotImplementedError as refusal:
            print(f"{name}/{recipe}: {refusal}", flush=True)
        return
    if not is_here(recipe):
        print(f"{name}/{recipe}: not installed", flush=True)
        return
    weights = _peer_weights(name)
    for t, each in inputs.items():
        try:
            yield from measure(functools.partial(_peer_call, PEERS[recipe]), weights, {t: each}, scan=False)
        except NotImplementedError as refusal:
            print(f"{name}/{recipe}/{t}: {refusal}", flush=True)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            print(f"{name}/{recipe}/{t}: does not fit this device's memory", flush=True)


def _inputs(name: str, variant: variants.Variant, t: int) -> harness.Inputs:
    hidden, intermediate, _, top_k = LAYERS[name]
    routings = [routing(t, name, seed, zipf=variant.zipf) for seed in range(DEPTH)]
    active = float(np.mean([len(np.unique(ids)) for _, ids in routings]))
    return harness.Inputs(
        x=jax.random.normal(jax.random.key(t), (t, hidden), jnp.bfloat16),
        others=[jax.tree.map(jnp.asarray, each) for each in routings],
        flops=6 * t * top_k * hidden * intermediate,
        moved=active * 3 * hidden * intermediate * harness.bytes_each(variant.recipe) + 4 * t * hidden,
    )


def _levelled(call: harness.Call, weights: Any, inputs: dict[int, harness.Inputs]) -> dict[int, harness.Inputs]:
    """Router weights of each call, scaled so that chained calls give values as large as x: alone they would grow."""
    steps = {str(t): (call, (each.x, weights, each.others[0], jnp.int32(0))) for t, each in inputs.items()}
    compiled = timing.compile_all(steps)
    return {t: _with_gains(compiled[str(t)], weights, each) for t, each in inputs.items()}


def _with_gains(call: harness.Call, weights: Any, given: harness.Inputs) -> harness.Inputs:
    x, others = given.x, []
    size = jnp.linalg.norm(x.astype(jnp.float32))
    for i in range(_CALLS):
        router, ids = given.others[i % DEPTH]
        y = call(x, weights, (router, ids), jnp.int32(i % DEPTH))
        gain = size / jnp.linalg.norm(y.astype(jnp.float32))
        others.append((router * gain, ids))
        x = (y * gain).astype(x.dtype)
    return given._replace(others=others)


def _call(
    variant: variants.Variant, x: Array, weights: tuple[Any, Any], routing: tuple[Array, Array], layer: Any
) -> Array:
    layer = jnp.asarray(layer, jnp.int32)
    with jmoe.config(**variant.settings):
        return jmoe.fused_moe(
            x, *weights, *routing, layer=layer, accumulation=variant.accumulation, implementation="triton"
        )


def _peer_call(
    dot: Dot, x: Array, weights: Sequence[tuple[Array, Array]], routing: tuple[Array, Array], layer: Any
) -> Array:
    return fused_moe(dot, x, *weights[layer], *routing)


def _peer_weights(name: str) -> list[tuple[Array, Array]]:
    """w13 (E, H, 2I) and w2 (E, I, H) of each layer, apart, since a slice of stacked ones would be a copy."""
    hidden, intermediate, experts, _ = LAYERS[name]

    @functools.partial(jax.jit, static_argnums=1)
    def weight(key: Array, shape: tuple[int, int]) -> Array:
        keys = jax.random.split(key, experts)
        spread = jnp.bfloat16(shape[0] ** -0.5)
        return lax.map(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * spread, keys)

    shapes = (hidden, 2 * intermediate), (intermediate, hidden)
    pairs = jax.random.split(jax.random.key(0), (DEPTH, 2))
    return [(weight(first, shapes[0]), weight(second, shapes[1])) for first, second in pairs]
