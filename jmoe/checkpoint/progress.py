"""A bar of bytes, while a checkpoint is loaded or written."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import rich.progress
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

_SECONDS_BEFORE_PROGRESS = 1.0

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@contextlib.contextmanager
def advancing(name: str, total: int, progress: Progress | None) -> Iterator[Callable[[int], None]]:
    """A function that counts bytes and tells ``progress`` of them, or else a bar of its own, under that name."""
    if progress is not None and not callable(progress):
        raise TypeError(f"progress={progress!r} must be a function of bytes done and bytes in all, or None")
    with contextlib.nullcontext(progress) if progress is not None else _bar(name, total) as tell:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            tell(done, total)

        yield advance


@contextlib.contextmanager
def _bar(name: str, total: int) -> Iterator[Progress]:
    """A bar of bytes, where stderr is a terminal and it takes a while."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = rich.progress.Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(name, total=total)
    visible, since = sys.stderr.isatty(), time.monotonic()

    def tell(done: int, total: int) -> None:
        bar.update(task, completed=done)
        if visible and time.monotonic() - since > _SECONDS_BEFORE_PROGRESS:
            bar.start()

    try:
        yield tell
    finally:
        if visible:
            bar.stop()
