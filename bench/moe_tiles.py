"""``python -m bench.moe_tiles``: times of the two products of an MoE layer under many tiles, for choosing heuristics.

A product's tile only changes that product's kernel, but for the rows of a block, which both share: so the i-th
candidates of both are compiled together, and each kernel is timed by its name.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import jmoe
from bench import harness, moe, timing
from jmoe.backends import triton
from jmoe.backends.activation import swiglu
from jmoe.backends.spec import DeviceSpec, MoEArgs, OpSpec, Selection
from pallas_kernels.tuning.heuristics import MatmulTile, shared_memory
from pallas_kernels.tuning.moe_heuristics import MoETiles


def candidates(
    base: MatmulTile, block_m: int, columns: tuple[int, ...], halves: int, bytes_each: int
) -> list[MatmulTile]:
    """Tiles of that many rows, with other columns, warps, stages and orientations, that fit Hopper's shared memory."""
    found = []
    for block_n, warps, stages, swap in itertools.product(columns, (4, 8), (2, 3, 4), (False, True)):
        size = stages * base.block_k * (block_m + halves * block_n) * bytes_each
        work = block_m * block_n * halves
        if size > shared_memory(90) or (swap and block_m > 64) or not 2**10 <= work // warps <= 2**13:
            continue
        changes = {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages, "swap": swap}
        found.append(dataclasses.replace(base, **changes, split_k=1))
    return found


def variants(base: MoETiles, rows: float, group: int | None, bytes_each: int) -> Iterator[MoETiles]:
    """What to try for that many rows an expert on average."""
    for block_m in (16, 32, 64, 128):
        if (base.single and block_m > 16) or not rows / 8 <= block_m <= max(16, 4 * rows):
            continue
        first = candidates(base.first, block_m, (group,) if group else (64, 128), 2, bytes_each)
        second = candidates(base.second, block_m, (64, 128, 256), 1, bytes_each)
        for a, b in itertools.zip_longest(first, second):
            yield MoETiles(first=a or first[0], second=b or second[0], single=base.single)


def sweep(name: str, recipe: str, tokens: int, show: int) -> None:
    """Prints the fastest tiles of each product, and the heuristic's."""
    hidden, intermediate, experts, top_k = moe.LAYERS[name]
    how = jmoe.recipe(recipe)
    op = OpSpec(
        op="moe",
        recipe=how,
        tokens=tokens,
        hidden=hidden,
        experts=experts,
        global_experts=experts,
        intermediate=intermediate,
        top_k=top_k,
        activation=swiglu(),
        layers=moe.DEPTH,
    )
    chosen = jmoe.select(op, DeviceSpec.of(jax.devices()[0]))
    base = MoETiles(first=chosen.tile("first"), second=chosen.tile("second"), single=chosen.tile("single"))
    group = how.input.block[1] if how.input is not None and how.input.block[1] != -1 else None
    weights = moe.make_weights(name, recipe)
    x = jax.random.normal(jax.random.key(0), (tokens, hidden), jnp.bfloat16)
    routings = [jax.tree.map(jnp.asarray, moe.routing(tokens, name, seed)) for seed in range(moe.DEPTH)]

    def calls(x: Array, weights: Any, routings: Any, selection: Selection) -> list[Array]:
        args = [MoEArgs(x, *weights, *r, layer=jnp.int32(i)) for i, r in enumerate(routings)]
        return [triton.fused_moe(op, selection, a) for a in args]

    tried = [base, *variants(base, tokens * top_k / experts, group, 1 if how.weight else 2)]
    functions = {}
    for i, tiles in enumerate(tried):
        parts = tuple((f.name, getattr(tiles, f.name)) for f in dataclasses.fields(tiles))
        selection = dataclasses.replace(chosen, tiles=parts)
        functions[str(i)] = (lambda x, w, r, s=selection: calls(x, w, r, s)), (x, weights, routings)
    times: dict[str, dict[MatmulTile, float]] = {"moe_first": {}, "moe_second": {}}
    for i, compiled in timing.compile_all(functions).items():
        kernels = harness.by_name(timing.kernel_times(compiled, x, weights, routings, iterations=3), moe.DEPTH)
        for kernel, tile in (("moe_first", tried[int(i)].first), ("moe_second", tried[int(i)].second)):
            times[kernel][tile] = sum(us for key, us in kernels.items() if key.startswith(kernel))
    for kernel, results in times.items():
        tile = getattr(base, kernel.removeprefix("moe_"))
        print(f"{name} {recipe} T={tokens} {kernel}: {results[tile]:.1f} us with the heuristic's {tile}")
        for tile, us in sorted(results.items(), key=lambda item: item[1])[:show]:
            print(f"  {us:9.1f} us  {tile}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.moe_tiles", description=__doc__)
    parser.add_argument("--layers", default="qwen3-30b")
    parser.add_argument("--recipes", default="fp8_block")
    parser.add_argument("--tokens", default="8,64,2048,8192")
    parser.add_argument("--show", type=int, default=6, help="how many of the fastest to print")
    given = parser.parse_args()
    for name, recipe in itertools.product(given.layers.split(","), given.recipes.split(",")):
        for tokens in given.tokens.split(","):
            sweep(name, recipe, int(tokens), given.show)


if __name__ == "__main__":
    main()
