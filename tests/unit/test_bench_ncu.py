"""bench/ncu.py without a GPU: what it takes from ncu's table, and that nothing missing passes for a profile."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench import ncu

NAMES = ["ID", "Kernel Name", "gpu__time_duration.sum", "dram__bytes_read.sum", "launch__registers_per_thread"]
UNITS = ["", "", "ns", "Mbyte", "register/thread"]
VALUES = ["0", "few_tokens_kernel", "66,500", "265.1", "72"]
TENSOR = ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", "%", "41.5")


def table(*columns, left_out=()):
    rows = [[*row, *extra] for row, extra in zip((NAMES, UNITS, VALUES), zip(*columns, strict=True), strict=True)]
    kept = [i for i, name in enumerate(rows[0]) if name not in left_out]
    lines = [",".join(f'"{row[i]}"' for i in kept) for row in rows]
    return "==PROF== Connected\n" + "\n".join(lines) + "\n"


def test_values_come_in_microseconds_and_bytes():
    found = ncu.parse(table(TENSOR))
    assert (found["us"], found["dram_bytes"], found["registers"]) == pytest.approx((66.5, 265.1e6, 72))
    assert found["kernel"] == "few_tokens_kernel"
    assert found["tensor_metrics"] == {TENSOR[0]: 41.5}
    assert found["tensor_percent"] == 41.5


def test_no_tensor_metric_is_no_tensor_percent():
    assert "tensor_percent" not in ncu.parse(table(("other", "%", "3")))


@pytest.mark.parametrize("text", ["", "==ERROR== no permission", table(("other", "%", "3")).rsplit("\n", 2)[0]])
def test_no_profile_is_an_error(text):
    with pytest.raises(ValueError, match="no profile"):
        ncu.parse(text)


def test_no_duration_is_an_error():
    with pytest.raises(ValueError, match="gpu__time_duration"):
        ncu.parse(table(("other", "%", "3"), left_out=("gpu__time_duration.sum",)))


def test_it_says_what_it_needs():
    done = subprocess.run([sys.executable, ncu.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--out is needed" in done.stderr
