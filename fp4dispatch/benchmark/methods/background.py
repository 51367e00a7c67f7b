"""Work that another process does while this one measures, e.g. compiling.

Such a process must not load the GPU, and must not outlive the run. It leads a group of processes, so that the compilers
that it starts end with it. It also holds the read end of a pipe whose write end only the run holds: when the run is
killed, the pipe closes, and the process ends itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from fp4dispatch.settings import settings

GRACE = 2.0
"""Seconds to end after SIGTERM, before SIGKILL."""
_END = 10.0  # seconds for the kernel to end what was killed
_TICK = 0.01
_LONGEST = 300  # characters of what a process said last

# The search path is that of this process: the same packages, and the same headers for compilers that look along it.
_START = """
import json, runpy, sys
sys.path[:] = json.loads(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Job:
    """What a process is to do.

    Parameters
    ----------
    what
        Names the work in a message.
    module
        Run as ``__main__``. It reads ``task`` as JSON from stdin, calls :func:`end_with` on its first argument, and
        exits with 0 if all was done. Else its last line says why.
    task
        Plain data.
    environment
        Variables to add.
    """

    what: str
    module: str
    task: Any
    environment: Mapping[str, str] = field(default_factory=dict)


class Background:
    """Processes that run inside a ``with`` block and end with it, also if it raises.

    A process that cannot be started or fails does not stop the block, and raises nothing. ``lost`` says so after the
    block, in one line each. A process that still runs at the end is ended; that is no failure.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.jobs = tuple(jobs)
        self.lost: list[str] = []
        self._running: list[tuple[Job, _Process]] = []

    def __enter__(self) -> Background:
        try:
            for job in self.jobs:
                try:
                    self._running.append((job, _Process(job)))
                except OSError as error:
                    self.lost.append(f"{job.what}: {error}")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        while self._running:
            job, process = self._running.pop()
            try:
                why = process.end()
            except BaseException:
                self._end()
                raise
            if why:
                self.lost.append(f"{job.what}: {why}")


class _Process:
    """A started job. Its group keeps its number until :meth:`end` has asked for the status of its leader."""

    def __init__(self, job: Job) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # not a pipe, which nobody reads and which would fill
        ended, self._alive = os.pipe()
        try:
            with tempfile.TemporaryFile("w+") as task:  # a pipe would hold up this process until the other one reads
                json.dump(job.task, task)
                task.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, json.dumps(sys.path), job.module, str(ended)],
                    env={**settings.environment(), **job.environment},
                    stdin=task,
                    stdout=self._said,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(ended,),
                )
        except BaseException:
            os.close(self._alive)
            self._said.close()
            raise
        finally:
            os.close(ended)

    def end(self) -> str:
        """End the group and return why the job failed; empty if it did not."""
        by_itself = self._is_over()
        try:
            if not by_itself:
                self._ask_to_end()
        finally:  # Ctrl-C may end the grace
            self._signal(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END)
            why = self._why() if by_itself else ""
            os.close(self._alive)
            self._said.close()
        return why

    def _ask_to_end(self) -> None:
        self._signal(signal.SIGTERM)
        until = time.monotonic() + GRACE
        while not self._is_over() and time.monotonic() < until:
            time.sleep(_TICK)

    def _is_over(self) -> bool:
        """Whether the leader has ended. It is not waited for, so the number of its group stays taken."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _why(self) -> str:
        status = self._process.returncode
        if status == 0:
            return ""
        if status < 0:
            return f"it was killed by signal {-status}"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:_LONGEST] if lines else f"it ended with status {status}"


def end_with(alive: int) -> None:
    """Kill this process and its group when the pipe ``alive`` closes. The module of a job calls it before its work."""

    def wait() -> None:
        os.read(alive, 1)  # nothing is ever written
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
