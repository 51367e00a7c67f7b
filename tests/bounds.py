"""Up to how many tokens which backend runs the small layers of GPU tests: by the rules, and by told predicted times.

GPU tests expect these; ``tests/unit/test_policy_anchors.py`` asks the policy for them where there is no GPU, so that a
rule that changes one is not found out on a GPU, months later.
"""

from __future__ import annotations

import pytest

from fp4dispatch.backends import w4a8_expanded
from fp4dispatch.dispatch import choose, predicted
from fp4dispatch.problem import Problem
from fp4dispatch.problem.prediction import PredictedTime, Predictions

W8A16 = 8
"""FP8 weights by row or tensor: w8a16, then w8a8."""
W8A8_BY_RULES = 2048
"""FP8 weights by row or tensor: w8a8, then cublaslt, by the rules alone."""
W8A8 = 1024
"""The same with :func:`cublaslt_for_many`."""
W4A16 = 8
"""NVFP4 weights: w4a16, then w4a8."""
W4A8_BESIDE_A_COPY = 128
"""NVFP4 weights with an FP8 copy: w4a8, then w4a8_expanded."""


def rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide by the rules, without predicted times, whatever GPU is there."""
    monkeypatch.setattr(predicted, "find", lambda *asked: None)
    monkeypatch.setattr(w4a8_expanded, "predictions", lambda *asked: None)
    choose.decide_anew()


def cublaslt_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict that cublaslt is faster than w8a8 above ``W8A8`` tokens, whatever the models say; nothing of NVFP4.

    The GPU must be a model that is known: others have no predicted times.
    """

    def told(problem: Problem, *_: object) -> Predictions | None:
        if problem.op != "fp8_gemm":
            return None
        ours, theirs = (1.0, 2.0) if problem.m <= W8A8 else (2.0, 1.0)
        return Predictions((PredictedTime("w8a8", "fp8", ours), PredictedTime("cublaslt", "fp8", theirs)), "as told")

    monkeypatch.setattr(predicted, "find", told)
    monkeypatch.setattr(w4a8_expanded, "predictions", told)
    choose.decide_anew()
