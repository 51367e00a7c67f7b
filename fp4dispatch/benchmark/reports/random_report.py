"""The result of the random suite: the document, and tables as plain text or Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp4dispatch.benchmark.methods.base import BASELINE, Method, rivals
from fp4dispatch.benchmark.methods.launches import PREFIX
from fp4dispatch.benchmark.problems.operands import Format
from fp4dispatch.benchmark.problems.sampling import SMALL, Sample
from fp4dispatch.benchmark.reports import report, standing
from fp4dispatch.benchmark.reports.standing import ANY_MORE, RANGES, Document, Loss, Standing
from fp4dispatch.benchmark.roofline import Peaks
from fp4dispatch.benchmark.run import Outcome, Row

KIND, SCHEMA = "random suite", 1
SHOWN = 5
"""Losses of a kind that are listed."""


def document(
    sample: Sample,
    facts: Mapping[str, Any],
    peaks: Peaks,
    methods: Iterable[Method],
    outcome: Outcome,
    tried: Mapping[tuple[int, int, int], int],
    formats: Mapping[str, Format],
    refused: Mapping[str, str],
) -> Document:
    """Return the result of a run as plain data.

    ``tried``: how many launches each problem had. ``formats``: weight format of each launch, by its name.
    ``refused``: launches that do not fit the GPU -> why.
    """
    every = tuple(methods)
    return {
        "kind": KIND,
        "subject": f"seed {sample.seed}",
        "schema": SCHEMA,
        "facts": dict(facts),
        "seed": sample.seed,
        "problems": sample.problems,
        "owners": {f"{layer.n}x{layer.k}": layer.owner for layer, _ in sample.shapes},
        "peaks": peaks.to_dict(),
        "methods": {
            method.name: {
                "what": method.what,
                "format": method.format,
                "copied": method.copied,
                "ours": method.ours,
                "rivals": list(rivals(method, every)) if method.ours else [],
            }
            for method in every
        },
        "absent": dict(outcome.absent),
        "left": [list(problem) for problem in outcome.left],
        "stopped": outcome.stopped,
        "seconds": round(outcome.seconds, 1),
        "tried": [[*problem, count] for problem, count in tried.items()],
        "refused": dict(refused),
        "measured": [row.to_dict() for row in outcome.rows if not row.method.startswith(PREFIX)],
        "launches": [_launch(row, formats) for row in outcome.rows if row.method.startswith(PREFIX)],
    }


def _launch(row: Row, formats: Mapping[str, Format]) -> dict[str, Any]:
    return row.to_dict() | {"launch": {"format": formats[row.method], "ours": True, "copied": None}}


def text(doc: Document) -> str:
    """Return everything as plain text."""
    return "\n\n".join(_parts(doc, report.plain))


def markdown(doc: Document) -> str:
    """Return the same as GitHub's Markdown."""
    return "\n\n".join(_parts(doc, report.github)) + "\n"


def _parts(doc: Document, grid: report.Grid) -> Iterable[str]:
    yield _head(doc)
    names = [name for name in doc["methods"] if name != BASELINE]
    for small in (False, True):
        over = f"weights of {'less than' if small else 'at least'} {SMALL / 1e6:g}e6 elements"
        if lines := [line for name in names if (line := _means(doc, name, small))]:
            yield f"times as fast as {BASELINE}, geometric means by number of tokens (problems); {over}:"
            yield grid([["", *(_range(*each) for each in RANGES)], *lines])
    found = [standing.standing(doc, subject) for subject in standing.subjects(doc)]
    if found:
        yield (
            f"beside the best peer (share that loses more than {standing.TIE:.0%}), more tokens of the same weight "
            f"(more than {standing.INVERSION:.0%} faster), and the best of our own launches (regret):"
        )
        yield grid(_standings(found))
    for each in found:
        yield from _worst(each)
    yield "\n".join(_notes(doc))


def _head(doc: Document) -> str:
    done = len({(row["n"], row["k"], row["m"]) for row in doc["measured"]})
    share = "PARTIAL: " if doc["left"] or doc["stopped"] else ""
    seeds = f"seed{'s' if isinstance(doc['seed'], str) else ''} {doc['seed']}"
    line = f"{share}{done} of {doc['problems']} random problems of {seeds}, {doc['seconds']:.0f} s"
    return f"{report.headline(doc)}\n{line}"


def _range(first: int, last: int) -> str:
    return f"M {first}-{last}" if last < ANY_MORE else f"M {first}-"


def _means(doc: Document, method: str, small: bool) -> list[str]:
    """Return a row of means; empty where nothing was measured."""
    found = standing.means(doc, method, small=small)
    if not any(count for _, count in found):
        return []
    return [method, *(f"{mean:.2f} ({count})" if count else "" for mean, count in found)]


def _standings(found: Iterable[Standing]) -> list[list[str]]:
    head = ["", "problems", "lose", "worst", "small", "lose", "worst", "inversions", "regret: median", "95 %", "worst"]
    rows = [head]
    for s in found:
        regret = [_number(s.regret(share)) for share in (0.5, 0.95, 1.0)]
        large = [str(s.problems), _share(s.slower), _ratio(s.worst)]
        small = [str(s.small), _share(s.small_slower), _ratio(s.small_worst)]
        rows.append([s.subject, *large, *small, f"{len(s.inversions)} of {s.compared}", *regret])
    return rows


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.1%}"


def _ratio(loss: Loss | None) -> str:
    return "" if loss is None else f"{loss.ratio:.3f}"


def _worst(found: Standing) -> Iterable[str]:
    """Yield where a layer is worst, one line a kind."""
    kinds: Mapping[str, Sequence[Loss | None]] = {
        "worst beside a peer": [found.worst, found.small_worst],
        "inversions": sorted(found.inversions, reverse=True),
        "regret": sorted((each for each in found.regrets if each.ratio > 1 + standing.TIE), reverse=True),
    }
    for kind, losses in kinds.items():
        some = [str(loss) for loss in losses if loss is not None][:SHOWN]
        if some:
            yield f"{found.subject}, {kind}: {'; '.join(some)}"


def _notes(doc: Document) -> Iterable[str]:
    some = "; ".join(f"{name}: {why}" for name, why in list(doc["refused"].items())[:2])
    refused = f"; {len(doc['refused'])} do not fit this GPU, e.g. {some}" if some else ""
    yield f"{sum(count for *_, count in doc['tried'])} launches of ours were checked and timed{refused}"
    faults: dict[str, list[str]] = {}
    for row in (*doc["measured"], *doc["launches"]):
        if row["status"] != "ok":
            faults.setdefault(f"{row['status']}: {row['method']}: {row['detail']}", []).append(
                f"{row['n']}x{row['k']} M={row['m']}"
            )
    for fault, where in faults.items():
        yield f"{fault} ({len(where)}: {', '.join(where[:3])})"
    for name, why in doc["absent"].items():
        yield f"not measured: {name}: {why}"
    if doc["left"]:
        yield f"not measured: {len(doc['left'])} problems: {'the run stopped' if doc['stopped'] else 'the time ended'}"
    if doc["stopped"]:
        yield f"STOPPED: {doc['stopped']}"
