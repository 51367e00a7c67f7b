"""Every guard around CUDA graph capture holds, and each test fails where its guard is taken away.

The cases are in tests/gpu/capture_cases.py; each runs twice, in processes of its own, eight at a time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu.capture_cases import CASES

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
CANNOT_TRY = 5


@pytest.fixture(scope="module")
def outcomes():
    """By (case, whether the guard is there): exit status and output."""

    def run(subject):
        name, guarded = subject
        command = [sys.executable, "-m", "tests.gpu.capture_cases", name, *([] if guarded else ["--without"])]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=os.environ | {"FP4DISPATCH_TUNED": "off"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
                check=False,
            )
        except subprocess.TimeoutExpired as expired:
            return -1, f"FAILED TimeoutExpired: {expired}"
        return done.returncode, done.stdout

    subjects = [(name, guarded) for name in CASES for guarded in (True, False)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(subjects, pool.map(run, subjects), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_it_holds(outcomes, name):
    status, output = outcomes[name, True]
    if status == CANNOT_TRY:
        pytest.skip(output.strip().splitlines()[-1])
    assert status == 0, output


@pytest.mark.parametrize("name", CASES)
def test_it_fails_without_its_guard(outcomes, name):
    status, output = outcomes[name, False]
    if status == CANNOT_TRY:
        pytest.skip(output.strip().splitlines()[-1])
    assert status != 0, f"{name} does not notice that its guard is gone:\n{output}"
    said = output[output.rfind("FAILED ") :] if "FAILED " in output else f"the process died with status {status}"
    assert re.search(CASES[name].says, said), said
