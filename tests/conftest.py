"""Markers that need something of the machine: tests are skipped with the reason where it is missing."""

import re

import pytest

from fp4dispatch.jit.store import guard
from fp4dispatch.machine import system
from tests import tiers


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


def _mark_thorough(config, items):
    """Skip the longest tests where everything is run; those of a file that is named on the command line run."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    listed = tiers.thorough()
    found = {item.nodeid.partition("[")[0]: item for item in items}
    if whole and (stale := sorted(listed - found.keys())):
        raise pytest.UsageError(f"tests/thorough.txt lists tests that are not there: {', '.join(stale)}")
    for item in items:
        if item.nodeid.partition("[")[0] in listed:
            item.add_marker("thorough")
            if whole and not {"thorough", "slow"} & set(re.findall(r"\w+", config.option.markexpr)):
                item.add_marker(pytest.mark.skip(reason="thorough: among the longest, run with -m thorough"))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    _mark_thorough(config, items)
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
