"""What a run of the random suite says of a layer: means by range of M, losses to peers, inversions in M, and regret.

A row of the document is one method on one problem. Only rows that are ``ok`` count.

* A *peer* multiplies weights of the same format, or of bfloat16, and is not ours.
* An *inversion*: fewer tokens of one (N, K) take longer than more tokens of it.
* *Regret*: the time of a layer over the best of ours that could have run instead. That is every other layer and every
  launch of the same weight format, with activations that are not coarser, and without a copy of the weights in another
  format, unless the layer itself has one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fp4dispatch.benchmark.methods.base import BASELINE
from fp4dispatch.benchmark.problems.sampling import SMALL

Document = dict[str, Any]
Row = Mapping[str, Any]
Problem = tuple[int, int, int]
"""N, K, M."""

ANY_MORE = 1 << 30
RANGES = ((1, 16), (17, 64), (65, 128), (129, 1024), (1025, ANY_MORE))
"""Of M: first and last."""
SUBJECTS = ("FP4Linear", "FP4Linear/w4a8_expanded", "FP8Linear/tensor", "FP8Linear/row", "FP8Linear/block128")
"""Layers as users make them; all other methods are measured to compare these with."""
TIE = 0.02
"""A loss to a peer below this share counts as a tie."""
INVERSION = 0.05
"""More tokens must be faster by this share before it counts."""
FINENESS = {"nvfp4": 0, "row": 1, "tensor": 1, "1x128": 1, "bf16": 2}


class Loss(NamedTuple):
    """Two times and where: ``ratio`` is the first over the second, above 1 for a loss; ``to`` names the second."""

    ratio: float
    problem: Problem
    to: str

    def __str__(self) -> str:
        n, k, m = self.problem
        return f"{self.ratio:.3f} ({n}x{k} M={m}, {self.to})"


def is_small(problem: Problem) -> bool:
    """Whether the weight is listed apart."""
    return problem[0] * problem[1] < SMALL


def times(doc: Document) -> dict[Problem, dict[str, Row]]:
    """Return the rows that have a time, by problem and method, launches among them."""
    found: dict[Problem, dict[str, Row]] = {}
    for row in (*doc["measured"], *doc["launches"]):
        if row["status"] == "ok":
            found.setdefault((row["n"], row["k"], row["m"]), {})[row["method"]] = row
    return found


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of positive numbers; NaN of none."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else math.nan


def means(doc: Document, method: str, *, small: bool) -> list[tuple[float, int]]:
    """Return, for each of :data:`RANGES`, how many times as fast as bfloat16 a method is, and over how many problems.

    ``small``: over weights below :data:`~fp4dispatch.benchmark.problems.sampling.SMALL` instead of the others.
    """
    found = []
    for first, last in RANGES:
        ratios = [
            rows[BASELINE]["us"] / rows[method]["us"]
            for problem, rows in times(doc).items()
            if first <= problem[2] <= last and is_small(problem) == small and BASELINE in rows and method in rows
        ]
        found.append((geometric_mean(ratios), len(ratios)))
    return found


def to_peers(doc: Document, subject: str) -> list[Loss]:
    """Return the time of a layer over that of the best peer, for each problem."""
    rivals = doc["methods"][subject]["rivals"]
    found = []
    for problem, rows in times(doc).items():
        peers = {name: rows[name]["us"] for name in rivals if name in rows}
        if subject in rows and peers:
            best = min(peers, key=peers.__getitem__)
            found.append(Loss(rows[subject]["us"] / peers[best], problem, best))
    return found


def inversions(doc: Document, subject: str) -> tuple[list[Loss], int]:
    """Return the worst inversion of each problem that has one, and how many problems have more tokens beside them."""
    by_shape: dict[tuple[int, int], dict[int, float]] = {}
    for (n, k, m), rows in times(doc).items():
        if subject in rows:
            by_shape.setdefault((n, k), {})[m] = rows[subject]["us"]
    found, compared = [], 0
    for (n, k), us in by_shape.items():
        for m in us:
            more = {other: us[m] / us[other] for other in us if other > m}
            if not more:
                continue
            compared += 1
            fastest = max(more, key=more.__getitem__)
            if more[fastest] > 1 + INVERSION:
                found.append(Loss(more[fastest], (n, k, m), f"M={fastest}"))
    return found, compared


def regrets(doc: Document, subject: str) -> list[Loss]:
    """Return the time of a layer over the best of ours, at least 1, where launches of its format were timed."""
    about = doc["methods"][subject]
    found = []
    for problem, rows in times(doc).items():
        launched = any(row["launch"]["format"] == about["format"] for row in rows.values() if "launch" in row)
        if subject not in rows or not launched:
            continue
        mine = rows[subject]
        best = min(_instead(doc, about, mine, rows.values()), key=lambda row: row["us"], default=mine)
        if best["us"] >= mine["us"]:
            best = mine
        found.append(Loss(mine["us"] / best["us"], problem, best["method"]))
    return found


def _instead(doc: Document, about: Mapping[str, Any], mine: Row, rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the rows of ours that could have run in the place of a layer."""
    for row in rows:
        other = row["launch"] if "launch" in row else doc["methods"][row["method"]]
        fits = other["format"] == about["format"] and FINENESS[row["entering"]] >= FINENESS[mine["entering"]]
        if other["ours"] and fits and other["copied"] in (None, about["copied"]):
            yield row


class Standing(NamedTuple):
    """A layer in a run. ``slower``: share of problems that lose more than :data:`TIE` to a peer."""

    subject: str
    problems: int
    slower: float
    worst: Loss | None
    small: int
    small_slower: float
    small_worst: Loss | None
    inversions: list[Loss]
    compared: int
    regrets: list[Loss]

    def regret(self, share: float) -> float:
        """Return a quantile of the regret; NaN if none was measured."""
        return quantile([each.ratio for each in self.regrets], share)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, linear between the sorted values; NaN of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def standing(doc: Document, subject: str) -> Standing:
    """Return all of a layer."""
    every = to_peers(doc, subject)
    parts = [[loss for loss in every if is_small(loss.problem) == small] for small in (False, True)]
    large, small = ((len(some), _share_slower(some), max(some, default=None)) for some in parts)
    inverted, compared = inversions(doc, subject)
    return Standing(subject, *large, *small, inverted, compared, regrets(doc, subject))


def _share_slower(losses: Sequence[Loss]) -> float:
    return sum(loss.ratio > 1 + TIE for loss in losses) / len(losses) if losses else math.nan


def subjects(doc: Document) -> list[str]:
    """Return the layers that a run measured."""
    measured = {row["method"] for row in doc["measured"] if row["status"] == "ok"}
    return [name for name in SUBJECTS if name in measured]
