"""Readable names of kernels: ``cu++filt`` of the CUDA toolkit, or ``c++filt``; the names as they are without either."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from fp4dispatch.machine import libraries

LONGEST = 160
"""Characters of a name that are shown; CUTLASS's have thousands."""


def demangled(names: Iterable[str]) -> dict[str, str]:
    """Return the readable name of each mangled one, cut to :data:`LONGEST`; itself where no tool can read it."""
    unique = list(dict.fromkeys(names))
    tool = _tool()
    rows = _ask(tool, unique) if tool and unique else unique
    return {name: _shortened(row) for name, row in zip(unique, rows, strict=True)}


def _tool() -> str | None:
    nvcc, _ = libraries.nvcc()
    beside = [str(Path(nvcc.path).with_name("cu++filt"))] if nvcc and nvcc.path else []
    return next((found for name in (*beside, "cu++filt", "c++filt") if (found := shutil.which(name))), None)


def _ask(tool: str, names: list[str]) -> list[str]:
    try:
        answer = subprocess.run(
            [tool], input="\n".join(names) + "\n", capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return names
    rows = answer.stdout.splitlines()
    return rows if answer.returncode == 0 and len(rows) == len(names) and all(rows) else names


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."
