"""jmoe's operations on kernels of its own, computed anywhere: in interpret mode, as if this were an H200."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from unittest import mock

import jmoe
from jmoe.ops import call
from pallas_kernels import lowering

# A name of its own, since what was traced for the real one may be cached.
DEVICE = dataclasses.replace(jmoe.DeviceSpec.named("h200"), name="interpreted H200")


class _OnCuda:
    """``jax.lax`` where every platform is CUDA."""

    def __init__(self, lax: object) -> None:
        self._lax = lax

    def __getattr__(self, name: str) -> object:
        return getattr(self._lax, name)

    @staticmethod
    def platform_dependent(*args, cuda, default):
        return cuda(*args)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within it ``implementation="triton"`` is computed by interpreted kernels."""
    kernel_call = functools.partial(lowering.kernel_call)

    def interpret(*args, **options):
        return kernel_call(*args, **options | {"interpret": True})

    with (
        mock.patch.object(lowering, "kernel_call", interpret),
        mock.patch.object(call, "lax", _OnCuda(call.lax)),
        jmoe.config(device=DEVICE),
    ):
        yield
