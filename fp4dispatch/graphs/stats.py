"""Counters of CUDA graphs: captures, replays and rejects, by bucket. As a dict, a table and Prometheus text."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from fp4dispatch.machine.locks import ForkSafeLock

if TYPE_CHECKING:
    from rich.table import Table

NO_BUCKET = "none"
"""Label of calls that no bucket holds."""

_PREFIX = "fp4dispatch_graph_"


class Stats:
    """Counters of one model. Thread-safe. Reading and counting launches nothing.

    Parameters
    ----------
    model
        Name of the model: the label of the Prometheus metrics and the title of the table.
    """

    def __init__(self, model: str = "") -> None:
        self.model = model
        self._lock = ForkSafeLock()
        self.reset()

    def reset(self) -> None:
        """Set every counter to zero."""
        with self._lock:
            self._captures: Counter[int] = Counter()
            self._seconds: defaultdict[int, float] = defaultdict(float)
            self._bytes: Counter[int] = Counter()
            self._pays_from: dict[int, int] = {}
            self._replays: Counter[int] = Counter()
            self._rejects: Counter[int | None] = Counter()
            self._reasons: Counter[tuple[int | None, str]] = Counter()

    def captured(self, bucket: int, seconds: float = 0.0, nbytes: int = 0) -> None:
        """Count a capture of a bucket, the time that it took, and the memory that it added, in bytes."""
        with self._lock:
            self._captures[bucket] += 1
            self._seconds[bucket] += seconds
            self._bytes[bucket] += nbytes

    def measured(self, bucket: int, pays_from: int) -> None:
        """Keep from how many tokens on the replays of a bucket are worth it; larger than the bucket: never."""
        with self._lock:
            self._pays_from[bucket] = pays_from

    def replayed(self, bucket: int) -> None:
        """Count a call that ran in the graphs of a bucket."""
        with self._lock:
            self._replays[bucket] += 1

    def rejected(self, bucket: int | None, conditions: Iterable[str]) -> None:
        """Count a call that ran eagerly, under each of its reasons. ``bucket`` is None if no bucket holds the call."""
        with self._lock:
            self._rejects[bucket] += 1
            for condition in conditions:
                self._reasons[bucket, condition] += 1

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON.

        Returns
        -------
        dict
            ``model``; the totals ``captures``, ``replays`` and ``rejects`` (calls); ``reasons`` (rejects by reason;
            a call counts under each of its reasons); and ``buckets``: by number of tokens as text, or ``none``, the
            same with ``capture_seconds``, ``bytes`` and ``pays_from``: the smallest number of tokens that is replayed,
            larger than the bucket if none is, None if the bucket was not measured.
        """
        with self._lock:
            rows = {_label(bucket): self._row(bucket) for bucket in self._buckets()}
            reasons: Counter[str] = Counter()
            for (_, condition), count in self._reasons.items():
                reasons[condition] += count
            return {
                "model": self.model,
                "captures": self._captures.total(),
                "replays": self._replays.total(),
                "rejects": self._rejects.total(),
                "reasons": dict(sorted(reasons.items())),
                "buckets": rows,
            }

    def table(self) -> Table:
        """Return a table for a terminal, one row a bucket: ``rich.print(stats.table())``."""
        from rich.table import Table

        found = Table(title=f"CUDA graphs of {self.model}" if self.model else "CUDA graphs")
        for name in ("tokens", "captures", "capture s", "MiB", "pays from", "replays", "rejects"):
            found.add_column(name, justify="right")
        found.add_column("reasons")
        for bucket, row in self.as_dict()["buckets"].items():
            numbers = (row["captures"], f"{row['capture_seconds']:.2f}", f"{row['bytes'] / 2**20:.1f}")
            reasons = ", ".join(f"{name} {count}" for name, count in row["reasons"].items())
            least = row["pays_from"]
            pays = "" if least is None else "never" if least > int(bucket) else str(least)
            found.add_row(bucket, *map(str, numbers), pays, str(row["replays"]), str(row["rejects"]), reasons)
        return found

    def prometheus(self) -> str:
        """Return the counters in Prometheus' text exposition format 0.0.4, for a scrape or a textfile collector.

        ``..._rejects_total`` counts calls; ``..._reject_reasons_total`` counts a call under each of its reasons.
        """
        buckets = self.as_dict()["buckets"]
        metrics = (
            ("captures_total", "counter", "CUDA graph captures by bucket of tokens.", "captures"),
            ("capture_seconds_total", "counter", "Time spent on captures.", "capture_seconds"),
            ("memory_bytes", "gauge", "Memory that captures added.", "bytes"),
            ("pays_from_tokens", "gauge", "Smallest number of tokens that is replayed, where measured.", "pays_from"),
            ("replays_total", "counter", "Calls that ran in CUDA graphs.", "replays"),
            ("rejects_total", "counter", "Calls that ran eagerly.", "rejects"),
        )
        lines: list[str] = []
        for name, kind, text, key in metrics:
            rows = [({"bucket": bucket}, row[key]) for bucket, row in buckets.items() if row[key] is not None]
            lines += self._metric(name, kind, text, rows)
        reasons = [
            ({"bucket": bucket, "reason": reason}, count)
            for bucket, row in buckets.items()
            for reason, count in row["reasons"].items()
        ]
        lines += self._metric("reject_reasons_total", "counter", "Calls that ran eagerly, by reason.", reasons)
        return "\n".join(lines) + "\n"

    def _metric(self, name: str, kind: str, text: str, rows: Iterable[tuple[dict[str, str], float]]) -> Iterator[str]:
        yield f"# HELP {_PREFIX}{name} {text}"
        yield f"# TYPE {_PREFIX}{name} {kind}"
        for labels, value in rows:
            inside = ",".join(f'{key}="{_escaped(each)}"' for key, each in {"model": self.model, **labels}.items())
            yield f"{_PREFIX}{name}{{{inside}}} {value}"

    def _buckets(self) -> list[int | None]:
        counted = {*self._captures, *self._replays, *self._rejects}
        return sorted(counted, key=lambda bucket: (bucket is None, bucket or 0))

    def _row(self, bucket: int | None) -> dict[str, Any]:
        size = -1 if bucket is None else bucket
        return {
            "captures": self._captures[size],
            "capture_seconds": self._seconds.get(size, 0.0),
            "bytes": self._bytes[size],
            "pays_from": self._pays_from.get(size),
            "replays": self._replays[size],
            "rejects": self._rejects[bucket],
            "reasons": dict(sorted((name, n) for (of, name), n in self._reasons.items() if of == bucket)),
        }


def _label(bucket: int | None) -> str:
    return NO_BUCKET if bucket is None else str(bucket)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
