"""Compares two runs: which rows are slower by more than the noise, or wrong.

Times of different machines are not comparable, and those of one GPU drift with clocks and load. So each time is divided
by the baseline's time of the same problem in the same run, and only these ratios are compared.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp4dispatch.benchmark.methods.base import BASELINE, Method
from fp4dispatch.benchmark.reports.report import Document, by_problem
from fp4dispatch.errors import InputError

THRESHOLD = 0.05
"""Noise: the share by which two runs of one commit may differ, in addition to their measured spreads."""

_Key = tuple[int, int, int, str]
_Rows = Mapping[_Key, Mapping[str, Any]]


@dataclass(frozen=True)
class Change:
    """One row of both runs. ``ratio``: new time / old time, each relative to the baseline. ``allowed``: its noise."""

    n: int
    k: int
    m: int
    method: str
    ratio: float | None
    allowed: float
    what: str

    def __str__(self) -> str:
        return f"N={self.n} K={self.k} M={self.m} {self.method}: {self.what}"


@dataclass(frozen=True)
class Comparison:
    """Changes of the ``shared`` rows of both runs.

    ``worse`` fails the command. ``better`` and ``peers`` (changes of peers) are only reported. ``gone``: number of rows
    of ours that only the old run has.
    """

    worse: tuple[Change, ...]
    better: tuple[Change, ...]
    peers: tuple[Change, ...]
    shared: int
    gone: int
    threshold: float

    @property
    def ok(self) -> bool:
        """Whether nothing of ours became worse."""
        return not self.worse

    def text(self) -> str:
        """Return the result as text."""
        lines = [
            f"compared {self.shared} rows, times over the baseline's of the same run; noise: {self.threshold:.0%} plus "
            "the spreads of the rows",
            *(f"WORSE: {change}" for change in self.worse),
            *(f"better: {change}" for change in self.better),
            *(f"a peer: {change}" for change in self.peers),
        ]
        if self.gone:
            lines.append(f"{self.gone} rows of the old run were not measured in this one")
        lines.append("no regression" if self.ok else f"{len(self.worse)} regressions")
        return "\n".join(lines)


def check(old: Document, device: str, problems: Iterable[tuple[int, int, int]], methods: Sequence[Method]) -> None:
    """Refuse, before a run of these (N, K, M) on a device, an old run that it could not be compared with.

    Raises
    ------
    InputError
        For another card, or where no row of ours would be in both.
    """
    _same_card(old["facts"]["device"], device)
    _have_ours(by_problem(old), {(*each, method.name) for each in problems for method in methods}, _ours_of(old))


def _same_card(old: str, new: str) -> None:
    if old != new:
        raise InputError(f"the old run is of {old}, this one of {new}: compare runs of one kind of card")


def _have_ours(before: Iterable[_Key], now: Container[_Key], ours: Container[str]) -> None:
    if not any(key in now and key[3] in ours for key in before):
        raise InputError(
            "the two runs have no row of ours in common, and only ours can be worse: measure the same suite, shapes "
            "and methods"
        )


def _ours_of(doc: Document) -> set[str]:
    return {name for name, about in doc["methods"].items() if about["ours"]}


def compare(old: Document, new: Document, threshold: float = THRESHOLD) -> Comparison:
    """Compare two runs on one kind of card.

    Parameters
    ----------
    old, new
        Documents.
    threshold
        Share by which a time may grow, in addition to the spreads of its rows, before it counts as a regression.

    Raises
    ------
    InputError
        For different cards, runs that share no row of ours, or a threshold that is negative.
    """
    if not 0 <= threshold < 10:
        raise InputError(f"threshold={threshold!r}: need a share of at least 0, e.g. 0.05 for 5 %")
    _same_card(old["facts"]["device"], new["facts"]["device"])
    before, now = by_problem(old), by_problem(new)
    ours = _ours_of(old) | _ours_of(new)
    _have_ours(before, now, ours)
    keys = [key for key in before if key in now]
    changes = [
        (change, bad) for key in keys if (found := _change(key, before, now, threshold)) for change, bad in [found]
    ]
    mine = [(change, bad) for change, bad in changes if change.method in ours]
    return Comparison(
        tuple(change for change, bad in mine if bad),
        tuple(change for change, bad in mine if not bad),
        tuple(change for change, _ in changes if change.method not in ours),
        len(keys),
        sum(key not in now and key[3] in ours for key in before),
        threshold,
    )


def _change(key: _Key, before: _Rows, now: _Rows, threshold: float) -> tuple[Change, bool] | None:
    """Return the change of a row beyond the noise, and whether it is a regression; None without one."""
    old, new = before[key], now[key]
    if old["status"] != new["status"]:
        detail = f" ({new['detail']})" if new["detail"] else ""
        return Change(*key, None, 0.0, f"was {old['status']}, is {new['status']}{detail}"), old["status"] == "ok"
    if new["status"] != "ok":
        return None
    base = (*key[:3], BASELINE)
    base_then, base_now = (rows.get(base, {}).get("us") for rows in (before, now))
    relative = bool(base_then and base_now and key[3] != BASELINE)
    spreads = old["spread"] + new["spread"]
    ratio = new["us"] / old["us"]
    if base_then and base_now and relative:
        ratio *= base_then / base_now
        spreads += before[base]["spread"] + now[base]["spread"]
    allowed = threshold + spreads
    if 1 / (1 + allowed) <= ratio <= 1 + allowed:
        return None
    what = f"{old['us']:.1f} us -> {new['us']:.1f} us, {ratio:.3f} times" + (
        f" over the baseline's (noise {allowed:.0%})" if relative else f" (noise {allowed:.0%})"
    )
    return Change(*key, ratio, allowed, what), ratio > 1
