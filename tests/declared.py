"""Backends known from data only: they say what they support, and cannot run. The golden table is computed with them."""

from __future__ import annotations

from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.decision import Reason


class DeclaredBackend:
    """A backend known from data only: it can say what it supports, and cannot run.

    The golden table is computed with these, so that the policy is reviewed for backends before they are written.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._activations: dict[Op, tuple[Activation, ...]] = {}
        for record in catalogue().capabilities:
            if record.backend == name:
                self._activations.setdefault(record.op, record.activations)

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason against, as :func:`check` does."""
        return check(self.name, problem, system)

    def activation_for(self, problem: Problem) -> Activation | None:
        """Return the activation format that the backend would use, or None where it has none."""
        formats = self._activations.get(problem.op, ())
        if problem.activation == "any":
            return formats[0] if formats else None
        return problem.activation if problem.activation in formats else None
