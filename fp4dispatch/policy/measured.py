"""The figures behind a rule: ``measured`` of ``policy/rules.toml``, typed and read strictly. No torch, no files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fp4dispatch.errors import SettingsError
from fp4dispatch.policy.catalogue import catalogue, check, subset

_RECORD = re.compile(r"[a-z0-9_-]+")


@dataclass(frozen=True)
class Speedup:
    """How many times as fast a backend is as something else, in one record of ``bench/results``.

    Parameters
    ----------
    backend
        The backend that ran.
    record
        The file's name without ``.json``.
    method, over
        Two methods of the record: that of ``backend``, and what it is compared with. A figure is the time of ``over``
        divided by the time of ``method``.
    m
        Tokens of each figure.
    times
        The figures, in the order of ``m``, with two decimals: geometric means over the N x K of the record where both
        have a time.
    nk
        The one N x K that the figures are of; None for all of the record.
    """

    backend: str
    record: str
    method: str
    over: str
    m: tuple[int, ...]
    times: tuple[float, ...]
    nk: tuple[int, int] | None = None

    def __str__(self) -> str:
        figures = ", ".join(f"{times:.2f} at M={m}" for m, times in zip(self.m, self.times, strict=True))
        where = f"N={self.nk[0]} K={self.nk[1]}, " if self.nk else ""
        source = f"{self.method} in bench/results/{self.record}.json"
        return f"{self.backend}, times as fast as {self.over}: {figures} ({where}{source})"


def load(where: str, rows: Any) -> tuple[Speedup, ...]:
    """Return the checked figures of a rule.

    Raises
    ------
    SettingsError
        If it is not a list of tables, or for an unknown or missing key or a value of another type.
    """
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise SettingsError(f"{where}: measured {rows!r} is not a list of tables")
    return tuple(_speedup(f"{where}: measured", row) for row in rows)


def _speedup(where: str, row: dict[str, Any]) -> Speedup:
    texts, lists = ("backend", "record", "method", "over"), ("m", "times")
    check(where, row, {**dict.fromkeys(texts, str), **dict.fromkeys(lists, list)}, {"nk": list})
    backend = subset(where, [row["backend"]], catalogue().backends)[0]
    for key in ("method", "over"):
        if not row[key]:
            raise SettingsError(f"{where}: {key} is empty")
    if not _RECORD.fullmatch(row["record"]):
        raise SettingsError(f"{where}: record {row['record']!r} is not the name of a file in bench/results, no .json")
    m = _numbers(where, row, "m", int)
    times = _numbers(where, row, "times", float)
    if len(m) != len(times):
        raise SettingsError(f"{where}: {len(times)} times for {len(m)} m; need one for each")
    nk = _numbers(where, row, "nk", int) if "nk" in row else None
    if nk is not None and len(nk) != 2:
        raise SettingsError(f"{where}: nk {row['nk']!r} is not N and K")
    return Speedup(
        backend, row["record"], row["method"], row["over"], m, times, (nk[0], nk[1]) if nk is not None else None
    )


def _numbers(where: str, row: dict[str, Any], key: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    values: list[Any] = row[key]
    if not values or any(type(v) is not kind or not v > 0 for v in values):
        raise SettingsError(f"{where}: {key} {values!r} is not a list of positive {kind.__name__}s")
    return tuple(values)
