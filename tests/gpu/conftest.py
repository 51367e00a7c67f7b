"""Fixtures of GPU tests."""

from __future__ import annotations

import pytest

from fp4dispatch.dispatch import choose
from fp4dispatch.machine import gpu_models, system
from fp4dispatch.problem.arch import SM90
from tests import bounds


@pytest.fixture
def rules_alone(monkeypatch):
    """Choices are those of the rules: predicted times of this GPU would move them."""
    bounds.rules_alone(monkeypatch)
    yield
    choose.decide_anew()


@pytest.fixture
def cublaslt_for_many(rules_alone, monkeypatch):
    """Choices are those of the rules, and of told times: FP8 by row goes to cublaslt above bounds.W8A8 tokens."""
    facts = system.current().seen_from(0)
    if facts.arch == SM90 and gpu_models.of(facts.gpus[0]) is None:
        pytest.skip("gpu_models.toml does not know this GPU: nothing is predicted on it")
    bounds.cublaslt_for_many(monkeypatch)
