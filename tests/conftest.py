"""Markers that need something of the machine: tests are skipped with the reason where it is missing."""

import pytest

from fp4dispatch.jit.store import guard
from fp4dispatch.machine import system


@pytest.fixture(autouse=True)
def own_warnings():
    """Each test is told of a cache that cannot be used, and gets a folder of its own in its place."""
    yield
    guard.reset()


def _no_gpu() -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    return "" if torch.cuda.is_available() else "no NVIDIA GPU is visible to torch"


def _no_compiler() -> str:
    facts = system.current()
    missing = [name for name, fact in (("nvcc", facts.nvcc), ("the CUTLASS headers", facts.cutlass)) if fact is None]
    return f"not found: {' and '.join(missing)}" if missing else ""


def pytest_collection_modifyitems(config, items):
    if "slow" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason='slow: over 30 s each, run with -m "slow or not slow"'))
    for marker, lacks in (("gpu", _no_gpu), ("compile", _no_compiler)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = lacks() if marked else ""
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))
