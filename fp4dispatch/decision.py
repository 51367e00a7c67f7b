"""The public path for plug-ins. The code is in ``problem/decision.py``."""

from __future__ import annotations

from fp4dispatch.problem.decision import REASON_CODES, Decision, Reason, ReasonCode, RuleHit, Verdict

__all__ = ["REASON_CODES", "Decision", "Reason", "ReasonCode", "RuleHit", "Verdict"]
