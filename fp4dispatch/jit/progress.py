"""Says what a long build is doing: a bar on a terminal, a line every ten seconds elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fp4dispatch.settings import settings

_EVERY = 10.0


class Progress:
    """A build of ``total`` files; :meth:`update` may be called as often as one likes."""

    def __init__(self, title: str, total: int, bar: Any, task: Any) -> None:
        self._title, self._total, self._bar, self._task = title, total, bar, task
        self._started = self._said = time.monotonic()

    def update(self, done: int) -> None:
        """Show how many files are done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            return
        now = time.monotonic()
        if now - self._said >= _EVERY:
            self._said = now
            print(f"{self._title}: {done} of {self._total} files, {now - self._started:.0f} s", file=sys.stderr)  # noqa: T201


@contextmanager
def progress(title: str, total: int, *, quiet: bool = False) -> Iterator[Progress]:
    """Open the display of one build.

    Parameters
    ----------
    title
        What is built, for which target, with how many jobs.
    total
        Number of files.
    quiet
        Show nothing.
    """
    if quiet or not sys.stderr.isatty():
        shown = Progress(title, total, None, None)
        if quiet:
            shown._said = float("inf")
        else:
            print(title, file=sys.stderr)  # noqa: T201
        yield shown
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, no_color=settings.no_color is not None)
    with Bar(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        yield Progress(title, total, bar, bar.add_task(title, total=total))
