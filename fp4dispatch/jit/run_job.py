"""Runs one command of a build folder; started by path, never imported, standard library only.

ninja hands its commands to a shell. So that no compiler argument meets one, ninja's command is this script and a
number, and the arguments stand in a JSON file. ``python run_job.py N`` becomes command N of ``commands.json``; its
output goes to the file named there.

The kernel is asked to end this process when its parent ends: a killed build must not leave a compiler running for
minutes (https://man7.org/linux/man-pages/man2/PR_SET_PDEATHSIG.2const.html).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def main(number: int) -> None:
    """Replace this process by command ``number``."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
    command = json.loads(Path("commands.json").read_text())[number]
    if command["log"]:
        log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    os.execv(command["argv"][0], command["argv"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
