"""The verdict of a self-check: its subject, its findings, and the facts under which it holds. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fp4dispatch.errors import SelfCheckFailed
from fp4dispatch.jit.store import records
from fp4dispatch.problem import Activation, Op, Scaling

SCHEMA = 1
Status = Literal["passed", "failed", "unchecked", "off"]

_LONGEST = 1e12
"""No time in a record is longer, in whatever unit."""
_RACE = ("never written", "stale", "not repeatable")


@dataclass(frozen=True)
class CheckResult:
    """The result of the self-check of one backend, for one op, scaling and activation format on one GPU model.

    Parameters
    ----------
    backend, op, scaling, activation
        The subject.
    arch
        Such as ``sm_90``; empty on a machine without a GPU.
    status
        ``passed``; ``failed`` (quarantined); ``unchecked`` (nothing could be run, ``notes`` say why); ``off``.
    ran
        The canaries that ran, as text.
    kind, findings
        The worst kind of failure, and every finding as text.
    evidence
        The findings as plain data (:class:`fp4dispatch.trust.tilecheck.Finding`).
    gdc
        Whether the barriers of the kernels are proven: ``yes``, ``no``, or ``not known`` for kernels of others.
    seconds
        Time of the whole check, in seconds, builds included.
    build_ms, check_ms
        Its two parts in milliseconds: builds (compile and load kernels, make plans) and the rest
        (:mod:`fp4dispatch.trust.trial`). None where they are not known.
    lasting
        Whether the verdict may be kept on disk. False where something outside the kernel stopped the check.
    notes
        What was skipped, and why.
    facts
        The verdict holds under these (:mod:`fp4dispatch.trust.facts`). Where one differs, the verdict is void.
    half
        The 16-bit dtype of the canaries; empty where they used both.
    layer
        The shape of the checked layer (:mod:`fp4dispatch.trust.layercheck`); empty for the canaries.
    """

    backend: str
    op: Op
    scaling: Scaling
    activation: Activation
    arch: str
    status: Status
    ran: tuple[str, ...] = ()
    kind: str = ""
    findings: tuple[str, ...] = ()
    evidence: tuple[dict[str, Any], ...] = ()
    gdc: str = "not known"
    seconds: float = 0.0
    lasting: bool = True
    notes: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    half: str = ""
    build_ms: float | None = None
    check_ms: float | None = None
    layer: str = ""

    @property
    def name(self) -> str:
        """Name of the record: the hash of the subject and the facts."""
        subject = [SCHEMA, self.backend, self.op, self.scaling, self.activation, sorted(self.facts.items())]
        subject += [self.half] if self.half else []
        subject += [["layer", self.layer]] if self.layer else []
        return records.name_of(subject)

    @property
    def usable(self) -> bool:
        """Whether the backend has not failed. ``auto`` needs more: :meth:`vouches_for`."""
        return self.status != "failed"

    def vouches_for(self, *, plugin: bool) -> bool:
        """Whether ``auto`` may use the backend after this verdict.

        - Passed, or ``FP4DISPATCH_SELFCHECK=off``: yes. Failed: no.
        - Unchecked plug-in: no.
        - Unchecked built-in that supports none of the canaries, or whose layer check does not fit into memory: yes,
          with a warning. Each release tests its kernels, and the layer check follows or has been tried.
        - Built-in whose canaries did not fit into memory: no. They need a few megabytes, so the layer would not fit.
        """
        if self.status == "unchecked":
            return not plugin and (self.lasting or bool(self.layer))
        return self.status != "failed"

    def text(self) -> str:
        """Return the verdict as one or two sentences."""
        subject = f"{self.backend} {self.op}"
        kind = f"{self.scaling}, {self.activation} activations" + (f", {self.half}" if self.half else "")
        if self.layer:
            subject, kind = f"{subject} layer", f"{self.layer}, {self.scaling}, {self.activation} activations"
        if self.status == "failed":
            race = " Signature of a launch race." if self.kind in _RACE else ""
            return f"{subject} {self.findings[0]}.{race} GDC proven: {self.gdc}. Quarantined."
        if self.status == "passed":
            what = "numbers of tokens" if self.layer else "canaries"
            return f"{subject} ({kind}): {len(self.ran)} {what} passed {self._times()}"
        why = "; ".join(self.notes) or "FP4DISPATCH_SELFCHECK=off"
        return f"{subject} ({kind}): not checked: {why}"

    def _times(self) -> str:
        if self.build_ms is None or self.check_ms is None:
            return f"in {self.seconds * 1e3:.0f} ms, building included"
        return f"in {self.check_ms:.0f} ms, after {self.build_ms:.0f} ms of building"

    def __str__(self) -> str:
        return self.text()

    def error(self) -> SelfCheckFailed:
        """Return the exception of a failed verdict."""
        return SelfCheckFailed(self.text())

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        plain: dict[str, Any] = json_ready(asdict(self))
        return plain

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CheckResult:
        """Read :meth:`to_dict` back.

        Raises
        ------
        TypeError, ValueError
            If the data is no verdict.
        """
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        result = cls(**values)
        texts = (
            *(result.backend, result.op, result.scaling, result.activation, result.arch, result.kind, result.gdc),
            *(result.half, result.layer),
        )
        if not all(isinstance(text, str) for text in texts) or result.status not in ("passed", "failed", "unchecked"):
            raise ValueError("not a verdict")
        times = (result.seconds, *(time for time in (result.build_ms, result.check_ms) if time is not None))
        if not all(0 <= time <= _LONGEST for time in times):  # a TypeError where it is no number
            raise ValueError("not a verdict")
        if not isinstance(result.facts, dict) or (result.status == "failed") != bool(result.findings):
            raise ValueError("not a verdict")
        return result


def json_ready(value: Any) -> Any:
    """Return plain data as JSON returns it: lists in place of tuples."""
    if isinstance(value, dict):
        return {str(k): json_ready(v) for k, v in value.items()}
    return [json_ready(v) for v in value] if isinstance(value, list | tuple) else value
