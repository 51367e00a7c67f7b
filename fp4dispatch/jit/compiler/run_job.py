"""Runs one command of a build folder; started by path, never imported, standard library only.

ninja passes its commands to a shell. To keep compiler arguments away from the shell, ninja's command is this script and
a number, and the arguments are in a JSON file. ``python run_job.py N [PARENT]`` runs command N of ``commands.json``;
its output goes to the log file named there. ``PARENT`` is the id of the process that started it.

A killed build must not leave a compiler running for minutes, and nvcc starts others (``cicc``, ``ptxas``) that outlive
it. So this process leads the compiler's process group. It kills the whole group on a signal, if the compiler was
killed, or if its own parent ends, which the kernel signals
(https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html). The command without a log is ninja. It replaces
this process, and is killed when its parent ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(number: int, parent: int | None) -> None:
    """Run command ``number`` and end as it ended."""
    command = json.loads(Path("commands.json").read_text())[number]
    if not command["log"]:
        _end_with(parent, signal.SIGKILL)
        Path("ninja.pid").write_text(str(os.getpid()))
        os.execv(command["argv"][0], command["argv"])
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    for ending in _ENDINGS:
        signal.signal(ending, _kill_group)
    _end_with(int(Path("ninja.pid").read_text()), signal.SIGTERM)
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    child = os.fork()
    if child == 0:
        for ending in _ENDINGS:
            signal.signal(ending, signal.SIG_DFL)
        try:
            os.execv(command["argv"][0], command["argv"])
        except OSError as error:
            os.write(2, f"error: {command['argv'][0]} cannot be run: {error}\n".encode())
            os._exit(127)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        os.write(2, f"error: the compiler was killed by signal {os.WTERMSIG(status)}\n".encode())
        _kill_group(signal.SIGKILL, None)
    sys.exit(os.WEXITSTATUS(status))


def _end_with(parent: int | None, number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), number)


def _kill_group(_number: int, _frame: FrameType | None) -> None:
    """Kill the compiler, everything that it started, and this process."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
