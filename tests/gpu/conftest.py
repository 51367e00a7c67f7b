"""Fixtures of GPU tests."""

from __future__ import annotations

import pytest

from fp4dispatch.dispatch import choose
from tests import bounds


@pytest.fixture
def rules_alone(monkeypatch):
    """Choices are those of the rules: predicted times of this GPU would move them."""
    bounds.rules_alone(monkeypatch)
    yield
    choose.decide_anew()
