"""Producer -> GEMM -> consumer under PDL: no bad tile with the barriers, and the build without them is caught."""

from __future__ import annotations

import pytest

from fp4dispatch.race import CASES, run_race
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]


def test_no_tile_is_wrong_with_the_barriers():
    report = run_race(rounds=50, requests=64, streams=4)
    assert report.launches == 50 * 64
    assert {case.variant for case in report.cases if case.launches} == {case.variant for case in CASES}
    assert report.bad_tiles == 0, report


def test_the_build_without_barriers_is_caught():
    report = run_race(rounds=5, requests=64, streams=4, control=True)
    for case in report.cases:
        assert case.bad_launches > 0, f"{case.variant}: the chain did not show the missing barrier; {report}"
