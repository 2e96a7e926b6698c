"""``warmup``: a function compiled for several numbers of tokens before it is called."""

import concurrent.futures
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from jmoe.arguments import type_of
from jmoe.progress import Progress, steps

BUCKETS = (1, 8, 32, 128, 512, 2048, 8192)


def warmup(
    fn: Callable[..., Any],
    arguments: Callable[[int], tuple[Any, ...]],
    tokens: Iterable[int] = BUCKETS,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[int, float]:
    """Compiles ``fn`` for each number of tokens, in threads, so that calls of these shapes do not compile again.

    Nothing is computed. A model or a layer of Flax NNX is an argument of a function under ``nnx.jit``::

        step = nnx.jit(lambda model, tokens: model(tokens))
        jmoe.warmup(step, lambda t: (model, jax.ShapeDtypeStruct((1, t), jnp.int32)), tokens=(1, 8, 512))

    What is compiled is what a call under the same ``jmoe.config`` runs; a call under another one compiles anew.

    Args:
      fn: a jitted function, of ``jax.jit`` or ``nnx.jit``.
      arguments: of a number of tokens, to the arguments of a call: arrays (or modules), and
        ``jax.ShapeDtypeStruct`` in place of those that are not there yet.
      tokens: the numbers, each at least 1.
      threads: compile so many at a time; the number of cores by default.
      progress: called with (description, done, total) instead of a bar on standard error.

    Returns:
      For each number of tokens the seconds that tracing, lowering and compiling took.

    Raises:
      TypeError: ``fn`` is not jitted, or ``arguments`` gives no tuple.
      ValueError: a number of tokens, or of threads, below 1.
    """
    if not hasattr(fn, "lower"):
        raise TypeError(f"fn is {type_of(fn)}, but it is a jitted function, such as jax.jit(fn)")
    asked = list(tokens)
    wrong = [t for t in asked if not isinstance(t, int) or isinstance(t, bool) or t < 1]
    if wrong:
        raise ValueError(f"tokens has {wrong[0]!r}, but each is an int of at least 1")
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads!r} must be at least 1, or None")
    buckets = list(dict.fromkeys(asked))
    seconds: dict[int, float] = {}

    def compiled(lowered: Any) -> float:
        start = time.perf_counter()
        lowered.compile()
        return time.perf_counter() - start

    pool = concurrent.futures.ThreadPoolExecutor(threads or os.cpu_count())
    with steps(progress) as tell, pool:
        running = {}
        for t in buckets:
            tell(f"tracing {t} tokens", 0, len(buckets))
            start = time.perf_counter()
            given = arguments(t)
            if not isinstance(given, tuple):
                raise TypeError(f"arguments({t}) is {type_of(given)}, but it is a tuple of the call's arguments")
            # Traced here: settings and meshes in force are this thread's.
            lowered = fn.lower(*given)
            seconds[t] = time.perf_counter() - start
            running[pool.submit(compiled, lowered)] = t
        for done, future in enumerate(concurrent.futures.as_completed(running), 1):
            seconds[running[future]] += future.result()
            tell("compiling", done, len(buckets))
    return seconds
