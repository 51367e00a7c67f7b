"""The proof accepts every shipped kernel and refuses every mutant. docs/proof.md shows the table.

Small mutants are compiled for every target. Faults in shipped kernels are put into a copy of the sources, and, because
CUTLASS takes a minute to compile, into the machine code of what is built anyway. ``bench/mutants.py`` tries all of
them and keeps what it found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp4dispatch.machine import libraries
from tests.proof import cases, shipped, small
from tests.proof.cases import CONTROL, Build, Planted

pytestmark = [pytest.mark.compile, pytest.mark.skipif(libraries.nvcc()[0] is None, reason="needs nvcc")]

CLASSES = {*small.MUTANTS}


def test_there_are_enough_mutants() -> None:
    names = [name for classes in (small.MUTANTS, small.MAP_MUTANTS) for rows in classes.values() for name in rows]
    assert len(names) >= 60
    assert len(CLASSES) >= 12
    assert set(small.MAP_MUTANTS) <= CLASSES
    assert set(shipped.FAULTS) == CLASSES
    assert {case.kind for case in cases.planted()} == {*CLASSES, CONTROL}


@pytest.mark.parametrize("target", cases.SMALL_TARGETS)
def test_small_kernels(target: str, tmp_path: Path) -> None:
    found = cases.judge_small(target, tmp_path)
    assert {name: why[:2] for name, why in found.items() if bool(why) == name.startswith("good__")} == {}
    assert len(found) >= 60 + len(small.GOOD)


# ---- faults in the sources of shipped kernels ----

QUICK = {  # one build of a family, and what the issue of a moved load or a deleted barrier is about
    ("few_tokens", "moved_activations", "w4a16_small", "90a"),
    ("few_tokens", "deleted_producers_wait", "w8a16_small", "120f"),
    ("few_tokens", "pointer_of_activations", "w4a16_small", "120f"),
    ("few_tokens", "conditional", "w8a8_small", "90a"),
    ("many_tokens", "moved_activations", "w4_gemm_sm90", "90a"),
    ("many_tokens", "exit_of_idle_lanes", "w8_gemm_sm90", "90a"),
    ("many_tokens", "helper", "w4_gemm_sm90", "90a"),
    ("nvfp4_quantize", "moved", "nvfp4_quantize", "100f"),
    ("race_chain", "exit", "race_chain", "120f"),
    ("w4_to_e4m3", "store", "w4_to_e4m3", "90a"),
}

CONTROLS = (("w4a16_small", "bf16", "120f"), ("w8_gemm_sm90", "bf16_128", "90a"), ("nvfp4_quantize", "any", "100f"))


def planted() -> list[Any]:
    rows = []
    seen = set()
    for case in cases.planted():
        name = (case.family, case.fault, case.build.kernel, case.build.target)
        quick = case.build in CONTROLS if case.fault == CONTROL else name in QUICK and name not in seen
        seen |= {name} if quick else set()
        rows.append(pytest.param(case, id=case.id, marks=() if quick else pytest.mark.slow))
    return rows


@pytest.mark.parametrize("case", planted())
def test_a_fault_in_a_shipped_kernel(case: Planted) -> None:
    refused = cases.judge_planted(case)
    if case.fault == CONTROL:
        assert refused == [[]] * len(refused), "a copy without fault is not accepted"
    else:
        assert any(refused), "not one of its kernels was refused"


# ---- faults in the machine code of shipped kernels ----


def everything() -> list[Any]:
    """Every kernel x variant x target with barriers; quick: one of each kernel that other tests build anyway."""
    quick = {
        *(("w4a16_small", "bf16", "90a"), ("w8a16_small", "bf16", "90a"), ("w8a8_small", "bf16", "90a")),
        *(("w4a8_small", "bf16", "90a"), ("w4_activations", "any", "90a"), ("nvfp4_quantize", "any", "90a")),
        *(
            ("swiglu_activations", "any", "90a"),
            ("swiglu_rows", "any", "90a"),
            ("fp8_quantize", "any", "90a"),
            ("nvfp4_gemm_sm120", "bf16_128x128", "120f"),
        ),
        *(("fp8_gemm_sm90", "row_bf16_swap_64x16", "90a"),),
    }
    return [
        pytest.param(build, id=build.id, marks=() if build in quick else pytest.mark.slow) for build in cases.builds()
    ]


@pytest.mark.parametrize("build", everything())
def test_shipped_kernels_are_accepted_and_their_mutants_refused(build: Build) -> None:
    found = cases.judge_shipped(build)
    assert found.accepted
    assert found.accepted_mutants == []
    assert {*found.mutants} >= CLASSES - {"pointer"}
