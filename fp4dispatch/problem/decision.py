"""The answer of the policy, and why: API object, log line, error text and CLI table in one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from fp4dispatch.problem import Activation, Problem
from fp4dispatch.problem.arch import Arch

ReasonCode = Literal[
    "ARCH",
    "DTYPE",
    "SHAPE",
    "LAYOUT",
    "LIBRARY",
    "TOOLCHAIN",
    "CAPTURE",
    "DENIED",
    "UNPROVEN",
    "QUARANTINED",
    "UNAVAILABLE",
]
REASON_CODES: tuple[ReasonCode, ...] = get_args(ReasonCode)


@dataclass(frozen=True)
class Reason:
    """Why a backend cannot or should not run a problem.

    Parameters
    ----------
    code
        Stable, for programs. ``UNAVAILABLE`` marks a backend that is not part of this installation.
    text
        For people: the value found and the value needed.
    fix
        What to do about it; empty where nothing helps.
    """

    code: ReasonCode
    text: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"   -> {self.fix}" if self.fix else ""
        return f"{self.code:<11} {self.text}{fix}"

    def sentence(self, *, fix: bool = False) -> str:
        """Return code and text for use inside a sentence; with ``fix``, also what to do."""
        return f"{self.code} {self.text}" + (f" (fix: {self.fix})" if fix and self.fix else "")


@dataclass(frozen=True)
class RuleHit:
    """A rule of the policy table that applied to a candidate.

    ``code`` says what a deny rule is about: ``DENIED``, ``UNPROVEN`` (barriers not proven) or ``CAPTURE``. ``measured``
    are the figures that the rule rests on, in words, each with its record in ``bench/results``.
    """

    id: str
    verb: str
    because: str
    source: str
    checked: str
    code: ReasonCode = "DENIED"
    fix: str = ""
    measured: tuple[str, ...] = ()

    def __str__(self) -> str:
        fix = f"   -> {self.fix}" if self.fix else ""
        return f"{self.code:<11} {self.because} [{self.id}; {self.source}, checked {self.checked}]{fix}"

    def sentence(self, *, fix: bool = False) -> str:
        """Return code, cause and source for use inside a sentence; with ``fix``, also what to do."""
        end = f" (fix: {self.fix})" if fix and self.fix else ""
        return f"{self.code} {self.because} [{self.id}; {self.source}]{end}"


@dataclass(frozen=True)
class Verdict:
    """The policy's verdict on one candidate backend.

    ``reasons`` (capability) and ``denied`` (safety) are kept apart: a denied backend that has no reasons may still be
    named explicitly, a backend with reasons may not. ``measured`` is its time where ``tune`` took it, and
    its launch shape.
    ``predicted`` is what time models say of a call, quantiser included.
    """

    backend: str
    activation: Activation
    reasons: tuple[Reason, ...] = ()
    denied: tuple[RuleHit, ...] = ()
    measured: str = ""
    predicted: str = ""

    @property
    def can_run(self) -> bool:
        """Whether the backend is able to run the problem."""
        return not self.reasons

    @property
    def accepted(self) -> bool:
        """Whether ``auto`` may choose the backend."""
        return not self.reasons and not self.denied


@dataclass(frozen=True)
class Decision:
    """One resolved choice with its whole trace.

    ``backend`` is None where nothing can run the problem. ``verdicts`` are in order of preference: candidates before
    the chosen one were rejected; those after it were judged too, but were not needed. ``notes`` say how the
    question was understood, if that is not obvious.
    """

    problem: Problem
    arch: Arch | None
    machine: str
    backend: str | None
    activation: Activation
    requested: str
    requested_by: str
    rule: RuleHit | None
    verdicts: tuple[Verdict, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def verdict(self, backend: str) -> Verdict:
        """Return the verdict on one backend; KeyError if it was no candidate."""
        for verdict in self.verdicts:
            if verdict.backend == backend:
                return verdict
        raise KeyError(backend)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        data = asdict(self)
        data["arch"] = self.arch.capability if self.arch else None
        return data

    def line(self, tokens: str = "") -> str:
        """Return the line for logs; ``tokens`` are the words for M where the decision holds for several."""
        rule = f" [{self.rule.id}: {self.rule.because}; {self.rule.source}]" if self.rule else ""
        act = "" if self.activation == "any" else f" ({self.activation} activations)"
        problem = self.problem.text(tokens) if tokens else str(self.problem)
        return f"{problem} on {self.machine}: {self.backend or 'nothing'}{act}, {self.requested_by}{rule}"

    def text(self) -> str:
        """Return the whole trace as text: the choice, then every candidate with every reason."""
        rows = [self.line()]
        width = max((len(verdict.backend) for verdict in self.verdicts), default=0)
        for verdict in self.verdicts:
            notes = [*map(str, verdict.reasons), *map(str, verdict.denied)]
            if verdict.backend == self.backend:
                notes.insert(0, "chosen")
            if verdict.measured:
                notes.append(f"tuned: {verdict.measured}")
            if verdict.predicted:
                notes.append(f"predicted {verdict.predicted}")
            notes = notes or ["can run"]
            rows += [f"  {verdict.backend if i == 0 else '':<{width}} {note}" for i, note in enumerate(notes)]
        rows += [f"  measured: {figures}" for figures in (self.rule.measured if self.rule else ())]
        rows += [f"  warning: {warning}" for warning in self.warnings]
        rows += [f"  note: {note}" for note in self.notes]
        return "\n".join(rows)

    def __str__(self) -> str:
        return self.text()
