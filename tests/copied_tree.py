"""A copy of the source tree that a test may change: what runs in it imports the copy, not the installed package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (".ci", "bench", "csrc", "docs", "fp4dispatch", "jit_flags", "tests")
INSIDE = ("csrc", "jit_flags")
"""Folders that setup.py puts into the package."""


def copy_to(tree: Path) -> Path:
    """Copy the sources to a new folder."""
    tree.mkdir()
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, tree)
    for folder in INSIDE:
        link = tree / "fp4dispatch" / folder
        link.unlink(missing_ok=True)  # in a copy of a copy
        link.symlink_to(tree / folder, target_is_directory=True)
    return tree


def run(tree: Path, *command: str, timeout: float = 600) -> str:
    """Run ``python COMMAND`` in a copy; what it printed. Fails with that where it does not end with 0."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{' '.join(command)} in {tree}:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    return done.stdout
