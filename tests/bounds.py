"""Up to how many tokens the rules have which backend for the small layers of GPU tests, without predicted times.

GPU tests expect these; ``tests/unit/test_policy_anchors.py`` asks the policy for them where there is no GPU, so that a
rule that changes one is not found out on a GPU, months later.
"""

from __future__ import annotations

import pytest

from fp4dispatch.backends.own import w4a8_expanded
from fp4dispatch.dispatch import choose, predicted

W8A16 = 8
"""FP8 weights by row or tensor: w8a16, then w8a8."""
W8A8 = 768
"""FP8 weights by row or tensor: w8a8, then cublaslt."""
W4A16 = 8
"""NVFP4 weights: w4a16, then w4a8."""
W4A8_BESIDE_A_COPY = 128
"""NVFP4 weights with an FP8 copy: w4a8, then w4a8_expanded."""


def rules_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide by the rules, without predicted times, whatever GPU is there."""
    monkeypatch.setattr(predicted, "find", lambda *asked: None)
    monkeypatch.setattr(w4a8_expanded, "predictions", lambda *asked: None)
    choose.decide_anew()
