"""What ptxas says of the kernels of a layer of experts, or a linear one: ``python -m tests.pallas_kernels.ptx RECIPE
LAYER TOKENS``, where a linear layer is NxK.

A process of its own, since XLA writes down the PTX that it makes only where it is told to before it starts. Prints a
JSON object: kernel to what ``read`` found.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def ptxas() -> Path | None:
    """The assembler of the package nvidia-cuda-nvcc, where that is installed."""
    nvidia = find_spec("nvidia")
    folders = list(nvidia.submodule_search_locations or []) if nvidia else []
    found = [path for folder in folders for path in Path(folder).glob("*/bin/ptxas")]
    return found[0] if found else None


def read(path: Path, assembler: Path) -> tuple[str, dict[str, Any]]:
    """The kernel of a file of PTX.

    Its registers, the bytes that it spills, whether ptxas lets its tensor core products wait for each other, how often
    loops with such products write to shared memory other than by asynchronous copies, and how many registers they write
    while a product may still read them.
    """
    command = [str(assembler), "-arch=sm_90a", "-v", str(path), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    text = path.read_text()
    [kernel] = re.findall(r"\.entry (\w+)\(", text)
    lines, starts, stores, overwritten = text.splitlines(), {}, 0, 0
    for number, line in enumerate(lines):
        if label := re.match(r"(\$L\w+):", line):
            starts[label[1]] = number
        back = re.search(r"\bbra\S*\s+(\$L\w+);", line)
        if back and back[1] in starts:
            body = "\n".join(lines[starts[back[1]] : number])
            if "wgmma.mma_async" in body:
                stores += len(re.findall(r"\b(?:st\.shared|stmatrix)", body))
                overwritten += written_early(body.splitlines())
    return kernel, {
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spilled": int(re.findall(r"(\d+) bytes spill stores", said)[0]),
        "serialised": "wgmma.mma_async instructions are serialized" in said,
        "stores": stores,
        "overwritten": overwritten,
    }


def written_early(loop: list[str]) -> int:
    """How many registers a loop's instructions write that products under way have as operands, or copies of them.

    A product of an earlier turn may be under way, so the loop is gone through twice. ptxas of CUDA 13.0 takes a copy
    and what it is of for one register though the product still reads it.
    """
    groups: list[set[str]] = []  # of products, committed, from the oldest
    current: set[str] = set()
    copy_of: dict[str, str] = {}
    found = 0
    for line in loop * 2:
        operation, _, operands = line.strip().replace("\t", " ").partition(" ")
        if operation.startswith("wgmma.mma_async"):
            _, first = re.findall(r"\{([^}]*)\}", operands)[:2] if operands.count("{") > 1 else ("", "")
            operand = re.findall(r"%\w+", first)
            current |= {*operand, *(copy_of.get(register, register) for register in operand)}
        elif operation.startswith("wgmma.commit_group"):
            groups, current = [*groups, current], set()
        elif operation.startswith("wgmma.wait_group"):
            left = int(re.findall(r"\d+", operands)[0])
            groups = groups[-left:] if left else []
        else:
            written = _written(operation, operands)
            found += len(written & current.union(*groups))
            copy_of = {copy: of for copy, of in copy_of.items() if copy not in written}
            of = [register for register in re.findall(r"%\w+", operands) if register not in written]
            if operation.startswith("mov.") and len(of) == 1:
                copy_of |= {register: copy_of.get(of[0], of[0]) for register in written}
    return found


def _written(operation: str, operands: str) -> set[str]:
    """The registers that an instruction writes."""
    nothing = ("st.", "stmatrix", "red.", "bra", "cp.", "bar.", "mbarrier", "@", "//", "{", "}", ".")
    target = re.match(r"\s*(?:\{[^}]*\}|%\w+)", operands)
    return set(re.findall(r"%\w+", target[0])) if target and not operation.startswith(nothing) else set()


def main(recipe: str, layer: str, tokens: int) -> dict[str, Any]:
    """The products of a layer, by the tiles that the heuristics choose for an H200."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_emitter_re=.* --xla_gpu_dump_llvmir=true"
        import jax
        import jax.numpy as jnp

        import jmoe
        from jmoe.backends import triton
        from jmoe.backends.select import select
        from jmoe.backends.spec import LinearArgs, MoEArgs
        from jmoe.scheme import as_recipe
        from jmoe.tuning.catalogue import MODELS, experts, linear
        from jmoe.tuning.on_device import weight_shapes
        from tests.pallas_kernels import aot

        if layer in MODELS:
            op = experts(MODELS[layer], as_recipe(recipe), tokens)
        else:
            op = linear(*map(int, layer.split("x")), as_recipe(recipe), tokens)

        def made(shape: tuple[int, ...]) -> Any:
            w = jnp.zeros(shape, jnp.bfloat16)
            w = w if op.recipe.weight is None else jmoe.quantize(w, op.recipe)
            return jmoe.prepare(w, op=op, device="h200")

        weights = [jax.eval_shape(lambda shape=shape: made(shape)) for shape in weight_shapes(op)]
        layout = getattr(weights[0], "layout", None)
        op = op if layout is None else op.replace(layout=layout.kind)
        selection = select(op, "h200", implementation=triton.NAME)
        op = op.replace(accumulation=selection.accumulation)
        tiles = triton.heuristic_tiles(op, jmoe.DeviceSpec.named("h200"), selection.accumulation)
        selection = dataclasses.replace(selection, tiles=tiles)
        arrays = [jax.ShapeDtypeStruct((tokens, op.hidden), jnp.bfloat16), *weights]
        if op.op == "moe":
            arrays += [jax.ShapeDtypeStruct((tokens, op.top_k), dtype) for dtype in (jnp.float32, jnp.int32)]

        def call(*arrays: Any) -> Any:
            if op.op == "moe":
                return triton.fused_moe(op, selection, MoEArgs(*arrays))
            return triton.linear(op, selection, LinearArgs(*arrays))

        aot.compile_for(call, arrays, spills=True)
        assembler = ptxas()
        assert assembler is not None
        files = [path for path in Path(folder).glob("*.ptx") if ".entry" in path.read_text()]
        found = dict(read(path, assembler) for path in files)
    chosen = dict(tiles)
    products = {
        "moe_first": chosen.get("first"),
        "moe_second": chosen.get("second"),
        "linear_w4": chosen.get("tile"),
        "linear": chosen.get("tile"),
    }
    products = {name: tile for name, tile in products.items() if name in found and tile is not None}
    # A run of tiles has in its loop what stores results, of 16 bits, through shared memory: words a thread.
    stored = {name: t.block_m * t.block_n // (64 * t.num_warps) * (t.run > 1) for name, t in products.items()}
    return {name: facts | {"results": stored[name]} for name, facts in found.items() if name in products}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
