"""Launching kernels side by side: small ones that do not depend on each other share a launch.

A launch costs as much as a small kernel takes, so a layer's preparation (alignment of its routing, quantisation of its
input) runs as two chains of jobs, of which each step is one launch.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels import lowering

_WARPS = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """Programs of one kernel.

    Attributes:
      kernel: takes the program's number, a tree of refs for each of ``inputs`` and ``outputs``, and ``static``.
      programs: how many there are.
      inputs: trees of arrays.
      outputs: trees of ``jax.ShapeDtypeStruct``.
      static: the kernel's keyword arguments.
    """

    kernel: Callable[..., None]
    programs: int
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    static: dict[str, Any] = field(default_factory=dict)


Chain = Sequence[Callable[..., Job]]
"""Jobs that follow each other: each is made from the outputs of the one before, the first from nothing."""


def run(name: str, *jobs: Job, interpret: bool = False) -> list[tuple[Any, ...]]:
    """Launches jobs that do not depend on each other as one kernel; the outputs of each."""
    outputs = lowering.kernel_call(
        _beside,
        name=name,
        grid=(sum(job.programs for job in jobs),),
        out_shape=[job.outputs for job in jobs],
        num_warps=_WARPS,
        num_stages=1,
        interpret=interpret,
        jobs=tuple((job.kernel, job.programs, job.static) for job in jobs),
    )(*(job.inputs for job in jobs))
    return list(outputs)


def _beside(*refs: Any, jobs: Sequence[tuple[Callable[..., None], int, dict[str, Any]]]) -> None:
    program = pl.program_id(0)
    inputs, outputs = refs[: len(jobs)], refs[len(jobs) :]
    first = 0
    for (kernel, programs, static), given, made in zip(jobs, inputs, outputs, strict=True):
        work = functools.partial(kernel, program - first, *given, *made, **static)
        if len(jobs) == 1:
            work()
        else:
            pl.when((program >= first) & (program < first + programs))(work)
        first += programs


def run_chains(name: str, *chains: Chain, interpret: bool = False) -> list[tuple[Any, ...]]:
    """Runs chains side by side, a step a launch; the outputs of each chain's last job."""
    results: list[tuple[Any, ...]] = [()] * len(chains)
    for step in range(max(map(len, chains))):
        going = [i for i, chain in enumerate(chains) if step < len(chain)]
        outputs = run(name, *(chains[i][step](*results[i]) for i in going), interpret=interpret)
        for i, made in zip(going, outputs, strict=True):
            results[i] = made
    return results
