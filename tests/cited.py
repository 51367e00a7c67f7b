"""Records that a data file cites, each with its name, its number of problems and the SHA-256 of its text."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fp4dispatch.benchmark.reports import random_report, records

RESULTS = Path(__file__).parents[1] / "bench" / "results"
_TEXT = re.compile(r"(\S+), (\d+) problems, sha256 ([0-9a-f]{64})")


class Cited(NamedTuple):
    """One citation."""

    name: str
    problems: int
    sha256: str

    @property
    def path(self) -> Path:
        """Return where the record is kept."""
        return RESULTS / f"{self.name}.json.xz"

    def read(self) -> dict[str, Any]:
        """Return the record, which must be the file that was cited."""
        data = records.unpacked(self.path)
        assert hashlib.sha256(data).hexdigest() == self.sha256, self.name
        found: dict[str, Any] = json.loads(data)
        timed = found["problems"] if found["kind"] != random_report.KIND else _timed_by(found)
        assert len(timed) == self.problems, self.name
        return found


def _timed_by(suite: dict[str, Any]) -> set[tuple[int, int, int]]:
    """Return the problems of which a random suite timed launches."""
    return {(row["n"], row["k"], row["m"]) for row in suite["launches"] if row["us"] is not None}


def cited(texts: Iterable[str]) -> list[Cited]:
    """Return the citations of a file."""
    found = []
    for text in texts:
        match = _TEXT.fullmatch(text)
        assert match, text
        found.append(Cited(match.group(1), int(match.group(2)), match.group(3)))
    assert found
    assert all(each.problems > 0 for each in found)
    return found
