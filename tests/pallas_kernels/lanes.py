"""Lowering kernels for GPUs that are not here: the Triton IR that a function's kernels become, parsed and verified."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jaxlib.triton import dialect as triton_dialect

KINDS = {80: "NVIDIA A100-SXM4-80GB", 89: "NVIDIA L4", 90: "NVIDIA H200", 100: "NVIDIA B200"}
"""A device of each compute capability, by the name that JAX knows it under."""


@dataclass(frozen=True)
class Kernel:
    """A kernel as it is handed to XLA: its Triton IR as text, and how it is launched."""

    name: str
    text: str
    num_warps: int
    num_stages: int
    grid: tuple[int, int, int]

    def count(self, operation: str) -> int:
        """Operations of that name, e.g. ``tt.dot``."""
        return sum(f"{operation} " in line or line.rstrip().endswith(operation) for line in self.text.splitlines())


def mesh_of(capability: int, **axes: int) -> AbstractMesh:
    """A mesh of such GPUs, of which Pallas-Triton asks the kind; before JAX 0.11 it takes sm90 where there is none."""
    device = AbstractDevice(KINDS[capability], None, "gpu")
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types, abstract_device=device)


def lower_for(
    function: Callable[..., Any], arguments: Sequence[Any], capability: int = 90, *, mesh: AbstractMesh | None = None
) -> list[Kernel]:
    """The kernels that ``jax.jit(function)`` launches on such a GPU, in order, each parsed and verified.

    ``arguments`` are arrays or ``jax.ShapeDtypeStruct``; ``mesh`` is one of ``mesh_of``, of one GPU by default.
    """
    with use_abstract_mesh(mesh or mesh_of(capability, x=1)):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    found: list[Kernel] = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            attributes = operation.attributes
            if ir.StringAttr(attributes["call_target_name"]).value == "__gpu$xla.gpu.triton":
                found.append(_kernel(ir.DictAttr(attributes["mhlo.backend_config"])))
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir()
    with module.context:
        module.operation.walk(visit)
    return found


def _kernel(config: Any) -> Kernel:
    def number(name: str) -> int:
        return ir.IntegerAttr(config[name]).value

    with ir.Context() as context:
        triton_dialect.register_dialect(context)
        context.load_all_available_dialects()
        module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
        assert module.operation.verify()
        text = module.operation.get_asm()
    grid = (number("grid_x"), number("grid_y"), number("grid_z"))
    return Kernel(ir.StringAttr(config["name"]).value, text, number("num_warps"), number("num_stages"), grid)


def spec(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
