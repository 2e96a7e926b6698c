"""Settings that change what a call does: one frozen value in one jit-cache-sensitive context.

``jmoe.config(check=True)`` is a context manager; ``jmoe.config.check`` reads the value in force. Because the value is
part of the jit key, a function traced under one setting is traced again under another.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class Shards:
    """How a surrounding ``jax.shard_map`` spreads an operation: over which mesh axes an activation, and its experts.

    A scale of a whole tensor is then measured over all of the axes, one of a row over those of its columns.

    Attributes:
      rows: axes over which its rows are.
      columns: axes over which its columns are: K of a linear, I of experts.
      experts: devices among which a layer's experts are; rows of other devices' experts have an id of -1 here.
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    experts: int = 1


NOT_SPREAD = Shards()


@dataclass(frozen=True)
class TuningFile:
    """A file of measured tiles; time and size are part of its value, so that a changed one is traced with anew."""

    path: str
    mtime_ns: int
    size: int

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> "TuningFile":
        """The file as it is now; raises ValueError where there is none."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise ValueError(
                f"config tuning={os.fspath(path)!r} (or JMOE_TUNING) cannot be read: {error.strerror}"
            ) from error
        return cls(os.path.abspath(path), status.st_mtime_ns, status.st_size)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings.

    Attributes:
      device: what to select for: the name of a known device (``"h100"``) or a DeviceSpec; None is the device that JAX
        computes on. JMOE_DEVICE.
      implementation: taken where a call gives none (``"xla"``); None lets the selector choose. JMOE_IMPLEMENTATION.
      batch_invariant: fix tiles and instruction kinds so that a row's bits do not depend on how many rows there are.
        JMOE_BATCH_INVARIANT.
      check: raise on values that can only be checked at run time (expert ids, static scales); under jit the caller
        functionalises with ``jax.experimental.checkify``. JMOE_CHECK.
      tuning: path of a file of measured tiles, as ``jmoe tune`` writes it, asked before those that jmoe brings; the
        value is a ``TuningFile``. JMOE_TUNING.
      moe_chunk: tokens of a layer of experts that the kernels take at a time, where there are more, so that its
        temporary memory stays bounded; results are the same. None is all at once. JMOE_MOE_CHUNK, where 0 is None.
      workspace: bytes that the expanded weights of one layer may take while it computes: MXFP4 weights with FP8
        activations are written as e4m3 codes, exactly, before products of many rows, which are faster than those that
        unpack in their loops. 0 is none. JMOE_WORKSPACE.
      recorder: where ``jmoe.explain`` gathers selections; a fresh one makes every function trace anew.
      shards: how activations are spread; ``jmoe.parallel`` sets it around the operations that it calls.
    """

    device: Any = None
    implementation: str | None = None
    batch_invariant: bool = False
    check: bool = False
    tuning: Any = None
    moe_chunk: int | None = 32768
    workspace: int = 0
    recorder: Any = None
    shards: Shards = NOT_SPREAD

    def __post_init__(self) -> None:
        for name in ("batch_invariant", "check"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"config {name}={value!r} must be True or False")
        if self.moe_chunk is not None and (type(self.moe_chunk) is not int or self.moe_chunk < 1):
            raise ValueError(
                f"config moe_chunk={self.moe_chunk!r} must be a number of tokens, an int from 1 on, or None"
            )
        if type(self.workspace) is not int or self.workspace < 0:
            raise ValueError(f"config workspace={self.workspace!r} must be a number of bytes, an int from 0 on")
        if isinstance(self.tuning, str | os.PathLike):
            object.__setattr__(self, "tuning", TuningFile.at(self.tuning))
        elif not isinstance(self.tuning, TuningFile | None):
            raise ValueError(f"config tuning={self.tuning!r} must be the path of a file or None")
        if not isinstance(self.shards, Shards):
            raise ValueError(f"config shards={self.shards!r} must be a Shards")
        if self.recorder is not None and not callable(getattr(self.recorder, "add", None)):
            raise ValueError(f"config recorder={self.recorder!r} must be a Recorder, as jmoe.explain makes it, or None")
        if self.implementation is not None and not isinstance(self.implementation, str):
            raise ValueError(f"config implementation={self.implementation!r} must be a name or None")


def _flag(name: str, text: str) -> bool:
    known = {"1": True, "true": True, "0": False, "false": False, "": False}
    if text.lower() not in known:
        raise ValueError(f"{name}={text!r} must be 1, true, 0 or false")
    return known[text.lower()]


def _number(name: str, text: str, what: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{name}={text!r} must be a number of {what}")
    return int(text)


def from_environment(environ: Mapping[str, str]) -> Settings:
    """The settings that JMOE_* variables ask for."""
    return Settings(
        device=environ.get("JMOE_DEVICE") or None,
        implementation=environ.get("JMOE_IMPLEMENTATION") or None,
        batch_invariant=_flag("JMOE_BATCH_INVARIANT", environ.get("JMOE_BATCH_INVARIANT", "")),
        check=_flag("JMOE_CHECK", environ.get("JMOE_CHECK", "")),
        tuning=environ.get("JMOE_TUNING") or None,
        moe_chunk=_number(
            "JMOE_MOE_CHUNK", environ.get("JMOE_MOE_CHUNK") or str(Settings.moe_chunk), "tokens, or 0 for no limit"
        )
        or None,
        workspace=_number("JMOE_WORKSPACE", environ.get("JMOE_WORKSPACE") or "0", "bytes, or 0 for none"),
    )


class Config:
    """``jmoe.config``: attributes read the settings in force, a call changes some for the time of a ``with`` block."""

    def __init__(self, default: Settings, wrong: str = "") -> None:
        """Starts from ``default``; where something is ``wrong`` with it, every use says so."""
        self._context = jax.make_user_context(default_value=default)
        self._wrong = wrong

    @property
    def settings(self) -> Settings:
        """The settings in force; raises ValueError where a variable of the environment has no such value."""
        if self._wrong:
            raise ValueError(self._wrong)
        return self._context.value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.settings, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"config.{name} is not assigned to; write `with jmoe.config({name}={value!r}):`")
        super().__setattr__(name, value)

    @contextlib.contextmanager
    def __call__(self, **changes: Any) -> Iterator[Settings]:
        known = [f.name for f in dataclasses.fields(Settings)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            raise ValueError(f"config has no setting {unknown[0]!r}; it has {', '.join(known)}")
        settings = dataclasses.replace(self.settings, **changes)
        with self._context(settings):
            yield settings


def _of_process() -> Config:
    """A wrong variable is told of at the first use, where the command line can say it in one line, not at import."""
    try:
        return Config(from_environment(os.environ))
    except ValueError as error:
        return Config(Settings(), wrong=str(error))


config = _of_process()
