"""Every method that can be compared."""

from __future__ import annotations

from fp4dispatch.benchmark.methods import ours, peers
from fp4dispatch.benchmark.methods.base import Method


def everything() -> tuple[Method, ...]:
    """Return every method: the baseline, the peers, ours."""
    return (*peers.methods(), *ours.methods())
