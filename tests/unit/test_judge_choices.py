"""bench/judge_choices.py: what a quantiser counts beside a GEMM that was timed alone."""

from __future__ import annotations

import pytest

from bench import judge_choices
from fp4dispatch.backends.own.tiling import speeds
from fp4dispatch.backends.own.tiling.predict import UNFOLD
from fp4dispatch.machine import gpu_models

H200 = speeds.of(gpu_models.named("H200 SXM"))
ALONE = {"w4a8 row w4_gemm_sm90": 3.0, f"w4a8 row {UNFOLD}": 3.0}


def sample(quantise):
    return judge_choices.Sample({"n": 4096, "k": 4096, "m": 4096, "quantise": quantise, "scaled_mm": 100.0}, H200)


def test_a_quantiser_before_a_kernel_of_ours_counts_as_it_was_measured():
    assert sample(ALONE).quantiser("w4a8", "nvfp4", "w4_gemm_sm90") == 3.0
    assert sample({}).quantiser("w4a8", "nvfp4", "w4_gemm_sm90") == H200.quantisers["w4_row"].microseconds(4096, 4096)


def test_one_before_cublaslt_counts_what_it_costs_the_gemm():
    """Alone it takes less than it adds."""
    added = H200.before_cublaslt.microseconds(4096, 4096)
    assert added > 3.0
    assert sample(ALONE).quantiser("w4a8", "nvfp4", UNFOLD) == added
    assert sample(ALONE).cublaslt() == pytest.approx(100.0 + added)
