"""What the proof costs: at most a tenth of a build (the kept record), and nothing per call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import fp4dispatch
from bench import proof_cost
from fp4dispatch.benchmark.reports import records
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from tests import w4_fake, w8_fake
from tests.hopper import seems_to_be_here

PACKAGE = Path(fp4dispatch.__file__).parent
PROOF = ("jit/", "backends/own/pdl_trial/pdl.py", "backends/own/pdl_trial/launch_chain.py")
"""What decides whether a launch may use PDL, and all strict checks of builds and caches."""
ROWS = {row["id"]: row for row in records.read(proof_cost.RESULTS)["rows"]}


def test_what_is_measured_is_built() -> None:
    assert set(ROWS) <= {"/".join(build) for build in proof_cost.builds()}


def test_proof_and_checks_take_at_most_a_tenth_of_the_builds() -> None:
    for row in ROWS.values():
        assert row["compile_s"] + row["proof_s"] + row["checks_s"] == pytest.approx(row["total_s"], abs=0.03)
        assert min(row["proof_s"], row["checks_s"]) > 0
        assert row["share"] == pytest.approx((row["proof_s"] + row["checks_s"]) / row["total_s"], abs=0.002)
        assert row["share"] <= 0.12, row  # a single build on a machine with other work
    total = sum(row["total_s"] for row in ROWS.values())
    assert sum(row["proof_s"] + row["checks_s"] for row in ROWS.values()) <= 0.1 * total


def ran(function: Callable[[], object]) -> set[str]:
    """Return the files of the package in which a Python function was called."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return {file for file in files if file.startswith(PROOF)}


@pytest.mark.parametrize(("scaling", "backend"), [
    ("nvfp4", "w4a16"), ("nvfp4", "w4a8"), ("row", "w8a16"), ("row", "w8a8"), ("block128", "w8a8"),
])  # fmt: skip
def test_a_call_runs_nothing_of_the_proof(scaling: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (w4_fake if scaling == "nvfp4" else w8_fake).install(monkeypatch)
    linear = nn.Linear(208, 96, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(5, 208, dtype=torch.bfloat16)
    with seems_to_be_here(monkeypatch), torch.inference_mode():
        if scaling == "nvfp4":
            layer: nn.Module = FP4Linear.from_linear(linear, backend=backend)
        else:
            layer = FP8Linear.from_linear(linear, scaling=scaling, backend=backend)
        assert "backends/own/pdl_trial/pdl.py" in ran(lambda: layer(x))  # the plan asks, once
        assert ran(lambda: layer(x)) == set()
