"""Progress of slow work: a bar on a terminal, a line every ten seconds elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from fp4dispatch.settings import settings

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts towards a total; a context manager.

    Parameters
    ----------
    title
        What is being done.
    total
        Number of steps, files or bytes.
    unit
        What is counted, as a word for the lines, e.g. ``files``; ``bytes`` are shown as sizes.
    announce
        Without a terminal, print the title at once. For work that takes minutes.
    quiet
        Show nothing, e.g. with ``--json``.
    """

    def __init__(
        self, title: str, total: int, *, unit: str = "steps", announce: bool = False, quiet: bool = False
    ) -> None:
        self.title, self.total, self.done, self.text = title, total, 0, ""
        self._unit, self._announce, self._quiet = unit, announce, quiet
        self._bar: Any = None
        self._task: Any = None
        self._started = self._last_line = time.monotonic()

    def __enter__(self) -> Progress:
        if self._quiet:
            return self
        from rich.console import Console

        console = Console(stderr=True, no_color=bool(settings.no_color))
        if console.is_terminal:
            self._open(console)
        elif self._announce:
            _line(self.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """Show the current step."""
        self.text = text
        self._show()

    def step(self, count: int = 1) -> None:
        """Add finished units."""
        self.update(self.done + count)

    def update(self, done: int, total: int | None = None, note: str | None = None) -> None:
        """Set the number of finished units. Cheap enough for every step."""
        self.done = done
        self.total = self.total if total is None else total
        self.text = self.text if note is None else note
        self._show()

    def _open(self, console: Any) -> None:
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        count = DownloadColumn() if self._unit == "bytes" else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())
        self._bar = Bar(*columns, console=console, transient=True)
        self._task = self._bar.add_task(self.title, total=self.total)
        self._bar.start()

    def _show(self) -> None:
        if self._bar is not None:
            description = self.text[-48:] or self.title
            self._bar.update(self._task, completed=self.done, total=self.total, description=description)
            return
        now = time.monotonic()
        if not self._quiet and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            at = f", at {self.text}" if self.text else ""
            _line(f"{self.title}: {self._counted()}, {now - self._started:.0f} s{at}")

    def _counted(self) -> str:
        if self._unit == "bytes":
            return f"{self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB"
        return f"{self.done} of {self.total} {self._unit}"


def _line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201
