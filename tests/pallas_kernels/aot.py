"""Compiling for a GPU that is not here: JAX's CUDA plugin does it without a driver and without CUDA's libraries."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from tests.pallas_kernels import lanes

installed = pytest.mark.skipif(
    find_spec("jax_cuda12_plugin") is None,
    reason="compiling for a GPU that is not here needs JAX's CUDA plugin: pip install 'jmoe[aot]'",
)
"""Put on every test of this lane, beside the marker ``aot``."""

_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: {shared}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{kind}"
"""

_FACTS = {80: (108, 166912), 89: (142, 101376), 90: (132, 232448), 100: (148, 232448)}
"""Multiprocessors, and bytes of shared memory a block can have, of a device of each capability."""


@dataclass(frozen=True)
class Compiled:
    """What XLA made: the optimised HLO and the bytes of temporary memory."""

    hlo: str
    temporary_bytes: int

    @property
    def launches(self) -> list[str]:
        """Instructions of the entry computation that launch something, by opcode; Triton kernels by their name."""
        found = []
        entry = self.hlo[self.hlo.index("\nENTRY ") :]
        for line in entry.splitlines():
            match = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = .*? ([\w-]+)\(", line)
            if match and match[1] not in _FREE:
                name = re.search(r', name = "(\w+)", num_stages', line) if match[1] == "custom-call" else None
                found.append(name[1] if name else match[1])
        return found


_FREE = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")


def topology(capability: int, gpus: int = 1) -> Any:
    """Devices of a host with that many GPUs of that capability."""
    cores, shared = _FACTS[capability]
    major, minor = divmod(capability, 10)
    text = _TARGET.format(cores=cores, shared=shared, major=major, minor=minor, kind=lanes.KINDS[capability])
    return topologies.get_topology_desc(
        platform="cuda", topology_name="described", topology=f"1x1x{gpus}", target_config=text
    )


def compile_for(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    capability: int = 90,
    *,
    specs: Sequence[PartitionSpec] | None = None,
    spills: bool = False,
    **axes: int,
) -> Compiled:
    """``jax.jit(function)`` compiled at the shapes of ``arguments`` (trees); fails where registers spill.

    Args:
      function: of the arguments.
      arguments: trees of arrays or ``jax.ShapeDtypeStruct``.
      capability: of the GPUs.
      specs: how each argument lies on the mesh; replicated by default.
      spills: let registers spill.
      **axes: the mesh, one GPU by default.
    """
    axes = axes or {"x": 1}
    devices = np.array(topology(capability, math.prod(axes.values())).devices).reshape(*axes.values())
    mesh = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))

    def placed(tree: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

    specs = specs or [PartitionSpec()] * len(arguments)
    with use_abstract_mesh(lanes.mesh_of(capability, **axes)):
        traced = jax.jit(function).trace(*map(placed, arguments, specs))
        lowered = traced.lower(lowering_platforms=("cuda",))
    options = {"xla_gpu_fail_ptx_compilation_on_register_spilling": not spills}
    compiled = lowered.compile(compiler_options=options)
    return Compiled(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes)
