"""Progress of slow work: a rich bar on a terminal, otherwise a line every ten seconds. Always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from fp4dispatch.settings import settings

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts steps towards a total; a context manager.

    Parameters
    ----------
    total
        Number of steps.
    quiet
        Show nothing, e.g. with ``--json``.
    """

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self.total, self.done, self.quiet, self.text = total, 0, quiet, ""
        self._bar: Any = None
        self._task: Any = None
        self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            console = Console(stderr=True, no_color=bool(settings.no_color))
            columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
            self._bar = Bar(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=self.total)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Say what is being done now."""
        self.text = text
        self._show()

    def step(self, count: int = 1) -> None:
        """Count finished steps."""
        self.done += count
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, description=self.text)
        elif not self.quiet and time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"{self.done}/{self.total} {self.text}", file=sys.stderr, flush=True)
