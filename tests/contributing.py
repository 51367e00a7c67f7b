"""CONTRIBUTING.md as a program: its labelled code blocks, done to a copy of the tree."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = dict(re.findall(r"<!-- ([^>]+?) -->\s*```\w+\n(.*?)```", TEXT, re.DOTALL))
BUILTIN = "fp4dispatch/backends/float64.py"


def follow(tree: Path, part: str) -> list[str]:
    """Do the steps of ``## PART``, and return the paths that they touched."""
    steps = re.search(rf"^## {part}\n(.*?)^## ", TEXT, re.DOTALL | re.MULTILINE)
    assert steps, f"CONTRIBUTING.md has no part {part!r}"
    touched = []
    for label in re.findall(r"<!-- ([^>]+?) -->", steps[1]):
        block = BLOCKS[label]
        kind, _, rest = label.partition(": ")
        if kind == "above":
            anchor, _, path = rest.rpartition(" in ")
            before, found, after = (tree / path).read_text().partition(anchor)
            assert found, f"{path} has no {anchor!r}"
            at = before.rindex("\n") + 1
            (tree / path).write_text(before[:at] + block + before[at:] + found + after)
        elif kind == "end of":
            path = rest
            (tree / path).write_text((tree / path).read_text() + "\n" + block)
        elif label == "file: float64_backend.py":
            path = BUILTIN
            (tree / path).write_text(block)
        elif kind == "file":
            path = rest
            (tree / path).write_text(block)
        else:  # an entry point, or a command that the test runs itself
            continue
        touched.append(path)
    return touched
