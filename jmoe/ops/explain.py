"""``explain``: what a function would run, where and why, without running it."""

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from jmoe.arguments import type_of
from jmoe.backends.select import as_device
from jmoe.backends.spec import DeviceSpec, OpSpec, Selection
from jmoe.config import config


@dataclass(eq=False)
class Recorder:
    """Gathers the selections made while a function is traced."""

    entries: list[tuple[OpSpec, Selection]] = field(default_factory=list)

    def add(self, op: OpSpec, selection: Selection) -> None:
        self.entries.append((op, selection))

    def replace(self, op: OpSpec, by: OpSpec, selection: Selection) -> None:
        """What ``op``, last recorded, turned out to be a part of: the whole batch of ``jax.vmap``."""
        for i, (recorded, _) in reversed(list(enumerate(self.entries))):
            if recorded == op:
                self.entries[i] = (by, selection)
                return


@dataclass(frozen=True)
class Explanation:
    """Every jmoe operation of a function, in the order in which it was traced, with its Selection.

    Attributes:
      device: what was selected for.
      entries: (operation, selection) pairs; what JAX traces once appears once, such as the body of ``lax.scan`` and a
        jitted function called again with arguments of the same shapes.
    """

    device: DeviceSpec
    entries: tuple[tuple[OpSpec, Selection], ...]

    def __str__(self) -> str:
        lines = [f"on {self.device.describe()}:"]
        calls = collections.Counter(tuple(describe(op, selection)) for op, selection in self.entries)
        for (head, *rest), count in calls.items():
            lines += [head if count == 1 else f"{head}, {count} calls", *rest]
        if not self.entries:
            lines.append("no jmoe operation is called")
        return "\n".join(lines)


def describe(op: OpSpec, selection: Selection) -> list[str]:
    """The lines that tell of one selection."""
    lines = [op.describe(), f"  takes {selection.implementation}: {selection.reason}"]
    facts = [f"accumulation {selection.accumulation}", f"layout {selection.layout.name}"]
    facts += [f"{name} {value}" for name, value in selection.tiles]
    facts += [f"tiles: {selection.tiles_from}"] if selection.tiles_from else []
    if selection.launches is not None:
        facts.append(f"{selection.launches} launches")
    lines.append("  " + ", ".join(facts))
    if selection.note:
        lines.append(f"  note: {selection.note}")
    for other in selection.considered:
        lines.append(f"  {other.implementation}: " + ("can serve" if other.accepted else f"cannot: {other.reason}"))
    return lines


def explain(
    fn: Callable[..., Any], *args: Any, device: DeviceSpec | jax.Device | str | None = None, **kwargs: Any
) -> Explanation:
    """What ``fn(*args, **kwargs)`` would run, where and why.

    The function is traced with abstract values; nothing is computed, and arguments may be ``jax.ShapeDtypeStruct``.
    Bind those that are no arrays first (``functools.partial``).

    Args:
      fn: any function of JAX arrays (jitted or not) that calls jmoe's operations.
      *args, **kwargs: its arguments.
      device: what to select for, here or not: a name such as ``"h100"``, a DeviceSpec, a JAX device; None is the
        current one.

    Returns:
      An Explanation; print it.

    Raises:
      TypeError: ``fn`` is no function, or an argument holds what is no array.
      Whatever the operations raise, such as NotImplementedError where an implementation asked for cannot serve.
    """
    if not callable(fn):
        raise TypeError(f"fn is {type_of(fn)}, but it is a function")
    recorder, spec = Recorder(), as_device(device)
    for path, leaf in jax.tree.leaves_with_path((args, kwargs)):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, bool | int | float | complex):
            name = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
            raise TypeError(f"{name} is {leaf!r}, which is no array; bind it first (functools.partial)")
    with config(recorder=recorder, device=spec):
        jax.eval_shape(fn, *args, **kwargs)
    return Explanation(spec, tuple(recorder.entries))
