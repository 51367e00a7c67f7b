"""Arch has no order; a Problem is checked when it is made."""

from __future__ import annotations

import operator

import pytest

from fp4dispatch.errors import InputError
from fp4dispatch.problem import Problem, m_before, m_bucket
from fp4dispatch.problem.arch import KNOWN_ARCHS, SM100, SM120, Arch


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
def test_archs_have_no_order(compare):
    with pytest.raises(TypeError, match="have no order"):
        compare(SM120, SM100)


def test_archs_have_equality_and_membership():
    assert Arch(12, 0) == SM120
    assert SM120 in {SM120, SM100}
    assert SM120 != SM100
    assert len(set(KNOWN_ARCHS)) == 10


@pytest.mark.parametrize("arch", KNOWN_ARCHS)
def test_spellings_round_trip(arch):
    assert Arch.parse(arch.sm) == Arch.parse(arch.capability) == Arch.parse(arch.sm.upper()) == arch
    assert str(arch) == arch.sm


@pytest.mark.parametrize("text", ["120f", "120", "12", "", "sm_", "sm_120a", "compute_90", "12.0.0", "-1.0", "٩.٠x"])
def test_other_spellings_are_refused(text):
    with pytest.raises(InputError, match="is not a GPU architecture"):
        Arch.parse(text)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"op": "gemm"}, "op='gemm'"),
        ({"scaling": "row"}, "does not go with"),
        ({"op": "fp8_gemm"}, "does not go with"),
        ({"op": "fp8_gemm", "scaling": "row", "activation": "nvfp4"}, "does not take"),
        ({"activation": "int8"}, "activation='int8'"),
        ({"out_dtype": "int8"}, "out_dtype"),
        ({"capture": "partial"}, "capture"),
        ({"sf_layout": "8x4"}, "sf_layout"),
        ({"m": -1}, "m=-1"),
        ({"n": 0}, "n=0"),
        ({"k": 1.0}, r"k=1\.0"),
        ({"m": True}, "m=True"),
        ({"m_min": -1}, "m_min=-1"),
    ],
)
def test_a_wrong_problem_is_refused(change, text):
    with pytest.raises(InputError, match=text):
        Problem(**({"op": "nvfp4_gemm", "m": 1, "n": 16, "k": 16} | change))


def test_a_problem_reads_well():
    assert str(Problem("nvfp4_gemm", 16, 64, 32)) == "nvfp4_gemm M=16 N=64 K=32 (nvfp4) -> bfloat16"
    text = str(Problem("fp8_gemm", 0, 64, 32, "bf16", "row", "float16", True, "piecewise", 0))
    assert text == "fp8_gemm M=0 N=64 K=32 (row, activation bf16) -> float16 + bias, piecewise capture"


def test_ranges_of_m_end_at_powers_of_two_and_half_way_between_them():
    tokens = (0, 1, 2, 3, 4, 5, 9, 12, 17, 25, 48, 49, 96, 97, 127, 128, 129, 193)
    assert [m_bucket(m) for m in tokens] == [1, 1, 2, 4, 4, 8, 16, 16, 24, 32, 48, 64, 96, 128, 128, 128, 192, 256]


def test_ranges_follow_each_other():
    for m in range(1, 5000):
        last, before = m_bucket(m), m_before(m)
        assert before < m <= last
        assert m_bucket(before + 1) == last
        assert before == 0 or m_bucket(before) == before
