"""Producer -> kernel -> consumer under PDL: right with the barriers, and every build without them is caught."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp4dispatch import jit
from fp4dispatch.backends.own.pdl_trial import pdl
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.kernels import CHAIN
from fp4dispatch.problem.arch import SM90
from fp4dispatch.trust.race import CASES, run_race, without_barriers
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]


def test_no_launch_is_wrong_with_the_barriers():
    report = run_race(rounds=50, requests=64, streams=4)
    assert report.launches == 50 * 64
    assert {case.name for case in report.cases if case.launches} == {case.name for case in CASES}
    assert report.bad_launches == 0, report


def test_the_build_without_barriers_is_caught():
    report = run_race(rounds=5, requests=64, streams=4, control=True)
    for case in report.cases:
        assert case.bad_launches > 0, f"{case.name}: the chain did not show the missing barrier; {report}"


def test_the_pdl_trial_passes_our_builds_and_stops_those_without_barriers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdl.store, "folder", lambda: tmp_path / "pdl")
    pdl.reset()
    device, catalog = torch.device("cuda", torch.cuda.current_device()), installed()
    chain = jit.load(*CHAIN, SM90).module
    for kernel, variant in dict.fromkeys((case.kernel, case.variant) for case in CASES):
        ours = jit.load(kernel, variant, SM90)
        found = pdl.verdict(ours, device)
        print(f"{kernel}/{variant}: {found.launches} launches, {found.ms:.1f} ms, {found.evidence or 'passed'}")
        assert found.passed, found
        assert pdl.allowed(ours, device)
        control = jit.load(kernel, variant, SM90, catalog=without_barriers(catalog, kernel))
        assert not pdl.allowed(control, device)  # by its proof
        found = pdl.trial(control, chain, device)  # and by what it does
        assert not found.passed, f"{kernel}/{variant}: the trial did not see the missing barrier"
    kept = list((tmp_path / "pdl").iterdir())
    assert len(kept) == len({(case.kernel, case.variant) for case in CASES})
