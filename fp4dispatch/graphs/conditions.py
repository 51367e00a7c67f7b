"""The conditions under which a call does not run in CUDA graphs: data (``conditions.toml``), reasons, log lines."""

from __future__ import annotations

import functools
import itertools
import logging
import re
import string
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from fp4dispatch import strict_toml
from fp4dispatch.errors import SettingsError
from fp4dispatch.graphs.batch import PREDICATES, Batch
from fp4dispatch.machine.log import once
from fp4dispatch.problem.decision import Reason

FILE = Path(__file__).with_name("conditions.toml")

_WHERE = "graphs/conditions.toml"
_TEXTS = ("name", "when", "level", "why", "message", "fix", "source")
_SHOWN = 4
"""Names of a fact that a reason lists."""
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING}
_FACTS = frozenset({*(field.name for field in fields(Batch)), "bucket", "largest_bucket", "pays"})


@dataclass(frozen=True)
class GraphReason(Reason):
    """Why a call does not run in CUDA graphs.

    Parameters
    ----------
    code, text, fix
        As of :class:`~fp4dispatch.problem.decision.Reason`; the code is ``CAPTURE``.
    condition
        Name of the condition; stable, for programs.
    why, source
        What would go wrong, and where that is known from.
    """

    condition: str = ""
    why: str = ""
    source: str = ""


@dataclass(frozen=True)
class GraphCondition:
    """One row of ``conditions.toml``. ``when`` names a predicate of :data:`~fp4dispatch.graphs.batch.PREDICATES`."""

    name: str
    when: str
    level: str
    why: str
    message: str
    fix: str
    source: str
    checked: str

    def holds(self, batch: Batch) -> bool:
        """Whether the condition is true of a batch."""
        return PREDICATES[self.when](batch)

    def reason(self, batch: Batch) -> GraphReason:
        """Return the reason in words, with the values of a batch for which the condition holds."""
        facts = {name: _words(getattr(batch, name)) for name in _FACTS}
        return GraphReason(
            "CAPTURE", self.message.format(**facts), self.fix.format(**facts), self.name, self.why, self.source
        )


def reasons(batch: Batch) -> tuple[GraphReason, ...]:
    """Return all reasons why a batch must not run in CUDA graphs, in the file's order; empty means that it can.

    Parameters
    ----------
    batch
        The facts of the call.

    Returns
    -------
    tuple of GraphReason
        Reads nothing but the batch, launches nothing and logs nothing: safe during capture.
    """
    return tuple(condition.reason(batch) for condition in conditions() if condition.holds(batch))


class Said:
    """Logs each condition once: the first time that it keeps a call from the graphs of one model.

    Parameters
    ----------
    model
        Name of the model in the log lines.
    """

    _numbers = itertools.count()

    def __init__(self, model: str) -> None:
        self._model = model
        self._number = next(self._numbers)

    def say(self, found: Iterable[GraphReason]) -> None:
        """Log each reason whose condition was not logged before. During a capture nothing is logged or counted."""
        for reason in found:
            level = _LEVELS[by_name()[reason.condition].level]
            text = (
                f"{self._model} runs eagerly, not in CUDA graphs, whenever this holds [{reason.condition}]: "
                f"{reason.text}; {reason.why} ({reason.source}). Fix: {reason.fix}"
            )
            once(("graphs", self._number, reason.condition), level, text)


@functools.cache
def conditions() -> tuple[GraphCondition, ...]:
    """Return the packaged conditions, read once, in the file's order."""
    return load(strict_toml.load(FILE, error=SettingsError))


@functools.cache
def by_name() -> dict[str, GraphCondition]:
    """Return the packaged conditions by name."""
    return {condition.name: condition for condition in conditions()}


def load(data: dict[str, Any]) -> tuple[GraphCondition, ...]:
    """Check the parsed file strictly and return it typed.

    Raises
    ------
    SettingsError
        For a key that is missing, unknown, empty or of the wrong type; a name or a predicate that is used twice; an
        unknown predicate, level or fact; a source that is no https URL; a predicate without a condition.
    """
    strict_toml.check(_WHERE, data, {"condition": list}, error=SettingsError)
    found = tuple(_condition(row) for row in data["condition"])
    for key in ("name", "when"):
        values = [getattr(condition, key) for condition in found]
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise SettingsError(f"{_WHERE}: {key} {', '.join(twice)} is used twice")
    if unused := sorted(PREDICATES.keys() - {condition.when for condition in found}):
        raise SettingsError(f"{_WHERE}: no condition uses the predicate {', '.join(unused)}")
    return found


def markdown_table() -> str:
    """Return the conditions as a table for the documentation."""
    lines = ["| condition | said when it first happens | why | what to do |", "|---|---|---|---|"]
    for c in conditions():
        message, fix = (re.sub(r"\{(\w+)\}", r"`\1`", text) for text in (c.message, c.fix))
        lines.append(f"| `{c.name}` | {message} | {c.why} ([source]({c.source})) | {fix} |")
    return "\n".join(lines)


def _condition(row: Any) -> GraphCondition:
    name = row.get("name") if isinstance(row, dict) else None
    where = f"{_WHERE}: condition {name!r}"
    strict_toml.check(where, row, {**dict.fromkeys(_TEXTS, str), "checked": date}, error=SettingsError)
    if empty := [key for key in _TEXTS if not row[key].strip()]:
        raise SettingsError(f"{where}: {', '.join(empty)} is empty")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", row["name"]):
        raise SettingsError(f"{where}: the name must be lower-case words joined by -")
    for key, known in (("when", PREDICATES), ("level", _LEVELS)):
        if row[key] not in known:
            raise SettingsError(f"{where}: {key} {row[key]!r} is not known; use one of {', '.join(known)}")
    if not row["source"].startswith("https://"):
        raise SettingsError(f"{where}: source {row['source']!r} is no https URL")
    for key in ("message", "fix"):
        _check_template(f"{where}: {key}", row[key])
    return GraphCondition(**{key: row[key] for key in _TEXTS}, checked=row["checked"].isoformat())


def _check_template(where: str, text: str) -> None:
    try:
        named = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None
    if unknown := sorted(set(named) - _FACTS):
        raise SettingsError(f"{where}: {{{unknown[0]}}} is no fact of Batch; known: {', '.join(sorted(_FACTS))}")


def _words(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    more = f" and {len(value) - _SHOWN} more" if len(value) > _SHOWN else ""
    return (", ".join(map(str, value[:_SHOWN])) or "none") + more
