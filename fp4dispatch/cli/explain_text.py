"""The text of ``fp4dispatch explain``: the answer first, then what could run too, then what cannot and what helps."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp4dispatch.problem.decision import Decision, Verdict
from fp4dispatch.settings import settings

_FIXED = ("ARCH", "DTYPE", "SHAPE", "LAYOUT")
"""Reasons that no installation changes: the backend is not for this problem, or not for this GPU."""


@dataclass(frozen=True)
class Line:
    """One line before wrapping: a label in a column of its own, the text, and the style of both on a terminal."""

    text: str
    label: str = ""
    indent: int = 0
    style: str = ""


def lines(decision: Decision, *, everything: bool = False, notes: Sequence[str] = ()) -> list[Line]:
    """Return the lines for a decision; ``everything``: also why backends are not for this problem or GPU.

    Where nothing can run the problem, that is always said.
    """
    others = [verdict for verdict in decision.verdicts if verdict.backend != decision.backend]
    can = [verdict for verdict in others if verdict.accepted]
    denied = [verdict for verdict in others if verdict.can_run and not verdict.accepted]
    foreign = [verdict for verdict in others if any(reason.code in _FIXED for reason in verdict.reasons)]
    lacking = [verdict for verdict in others if verdict.reasons and verdict not in foreign]
    found = list(_answer(decision))
    also = "too" if decision.backend else "it"
    found += _group(f"could run {also}, in order of preference", can, "green")
    found += _group("run only where they are named", denied, "yellow")
    found += _group("cannot run here, but could", lacking, "yellow")
    if everything or decision.backend is None:
        found += _group("not for this problem or GPU", foreign, "dim")
    elif foreign:
        names = ", ".join(verdict.backend for verdict in foreign)
        found += [Line(""), Line(f"not for this problem or GPU: {names} (--all says why)", style="dim")]
    said = [*(("warning", text) for text in decision.warnings), *(("note", text) for text in (*decision.notes, *notes))]
    found += [Line("")] if said else []
    found += [Line(f"{kind}: {text}", style="yellow" if kind == "warning" else "dim") for kind, text in said]
    return found


def _answer(decision: Decision) -> Iterator[Line]:
    activations = "" if decision.activation == "any" else f", with {decision.activation} activations"
    problem = f"{decision.problem} on {decision.machine}"
    if decision.backend is None:
        who = "nothing can" if decision.requested == "auto" else f"{decision.requested} cannot"
        yield Line(f"{who} run {problem}", style="bold red")
        yield Line(f"asked for: {decision.requested}, by {decision.requested_by}", indent=2)
        return
    yield Line(f"{decision.backend}{activations}, runs {problem}", style="bold green")
    rule = decision.rule
    because = f"{rule.because} [{rule.id}; {rule.source}]" if rule else ""
    by = "auto" if decision.requested == "auto" else f"{decision.requested} was asked for by {decision.requested_by}"
    yield Line(f"{by}: {because}" if because else by, indent=2)
    verdict = next((one for one in decision.verdicts if one.backend == decision.backend), None)
    for text in _notes(verdict) if verdict else ():
        yield Line(text, indent=2)
    for figures in rule.measured if rule else ():
        yield Line(f"measured: {figures}", indent=2)


def _group(title: str, verdicts: Sequence[Verdict], style: str) -> Iterator[Line]:
    if not verdicts:
        return
    yield Line("")
    yield Line(title, style="bold")
    width = max(len(verdict.backend) for verdict in verdicts)
    for verdict in verdicts:
        for number, text in enumerate(list(_notes(verdict)) or [""]):
            name = verdict.backend if number == 0 else ""
            yield Line(text, label=f"{name:<{width}}  ", indent=2, style=style)


def _notes(verdict: Verdict) -> Iterator[str]:
    for reason in verdict.reasons:
        yield f"{reason.code}  {reason.text}" + (f" -> {reason.fix}" if reason.fix else "")
    for hit in verdict.denied:
        fix = f" -> {hit.fix}" if hit.fix else ""
        yield f"{hit.code}  {hit.because} [{hit.id}; {hit.source}, checked {hit.checked}]{fix}"
    if verdict.measured:
        yield f"tuned: {verdict.measured}"
    if verdict.predicted:
        yield f"predicted {verdict.predicted}"


def wrapped(line: Line, width: int | None) -> list[str]:
    """Return a line as rows of at most ``width`` characters; in one row without a width. Words are never cut."""
    first = " " * line.indent + line.label
    if width is None:
        return [f"{first}{line.text}".rstrip()]
    hanging = " " * (len(first) if line.label else line.indent + 2)
    rows = textwrap.wrap(
        line.text,
        width,
        initial_indent=first,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return rows or [first.rstrip()]


def show(found: Sequence[Line]) -> None:
    """Print lines: wrapped and coloured on a terminal; one row each, without colour, elsewhere."""
    if not sys.stdout.isatty():
        for line in found:
            print("\n".join(wrapped(line, None)))
        return
    width = max(40, shutil.get_terminal_size().columns)
    if settings.no_color:
        for line in found:
            print("\n".join(wrapped(line, width)))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width)
    for line in found:
        console.print(Text("\n".join(wrapped(line, width)), style=line.style), soft_wrap=True)
