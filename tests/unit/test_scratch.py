"""Folders that several tests share are gone when the process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.tiers import ROOT

PROGRAM = """
import os, sys
from tests import scratch
first, second = scratch.folder("a"), scratch.folder("a")
(first / "file").write_text("x")
if os.fork() == 0:
    mine = scratch.folder("child")
    print(mine.parent != first.parent)
    sys.exit()
os.wait()
print((first / "file").is_file(), first != second, first.parent == second.parent)
"""


def test_nothing_stays_and_a_forked_child_takes_nothing_away(tmp_path: Path) -> None:
    env = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"] * 4
    assert list(tmp_path.iterdir()) == []


def test_no_other_test_makes_folders_that_stay() -> None:
    call = "tempfile." + "mkdtemp("
    made = [path for path in (ROOT / "tests").rglob("*.py") if call in path.read_text("utf-8")]
    assert [path.name for path in made] == ["scratch.py"]
