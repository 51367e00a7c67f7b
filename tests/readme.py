"""Print the README's commands by name, so that CI and tests run what the README says.

A command is a fenced ``bash`` block preceded by a comment line ``<!-- command: NAME -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"<!-- command: (?P<name>[\w-]+) -->\s*```bash\n(?P<body>.*?)```", re.DOTALL)


def commands(text: str | None = None) -> dict[str, str]:
    """Return the named commands of the README, in order."""
    found = {m["name"]: m["body"].strip() for m in BLOCK.finditer(README.read_text() if text is None else text)}
    if not found:
        raise SystemExit("README.md holds no named command")
    return found


if __name__ == "__main__":
    print(commands()[sys.argv[1]])
