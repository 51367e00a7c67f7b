"""Every method that can be compared."""

from __future__ import annotations

from fp4dispatch.benchmark.methods import ours, peers
from fp4dispatch.benchmark.methods.base import Method

HUMMING = peers.HummingNvfp4.name


def everything() -> tuple[Method, ...]:
    """Return every method: the baseline, the peers, ours."""
    return (*peers.methods(), *ours.methods())


def for_random() -> tuple[Method, ...]:
    """Return what the random suite compares: all that takes bfloat16 activations, and layers with fixed backends."""
    return (*(method for method in everything() if method.takes == "bf16"), *ours.paths())
