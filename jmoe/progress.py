"""A bar of steps on a terminal, while something takes a while."""

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many steps are done, and how many there are."""


@contextlib.contextmanager
def steps(progress: Progress | None) -> Iterator[Progress]:
    """``progress`` itself, or a bar of its own on standard error, where that is a terminal."""
    if progress is not None:
        yield progress
        return
    # Imported when used: operations alone need no Rich.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
