from __future__ import annotations

import operator
import pickle
from typing import Any

import pytest

from fp4dispatch.errors import InputError
from fp4dispatch.problem import arch
from fp4dispatch.problem.arch import KNOWN_ARCHS, SM90, SM100, SM120, Arch


@pytest.mark.parametrize("text", ["12.0", " 12.0 ", "sm_120", "SM_120", "sm120"])
def test_parse(text: str) -> None:
    assert Arch.parse(text) == SM120


@pytest.mark.parametrize("known", KNOWN_ARCHS)
def test_spellings_round_trip(known: Arch) -> None:
    assert Arch.parse(known.capability) == Arch.parse(known.sm) == Arch.parse(str(known)) == known


@pytest.mark.parametrize(
    "text", ["", "120", "120f", "sm_120a", "12", "12.0f", "compute_90", "9,0", "-9.0", "sm_", "9.0.0"]
)
def test_a_target_is_not_an_arch(text: str) -> None:
    with pytest.raises(InputError, match="is not a GPU architecture"):
        Arch.parse(text)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
@pytest.mark.parametrize("other", [SM100, SM120, (10, 0), 100, "10.0"])
def test_there_is_no_order(compare: Any, other: Any) -> None:
    with pytest.raises(TypeError, match="no order"):
        compare(SM120, other)
    with pytest.raises(TypeError):
        compare(other, SM120)
    with pytest.raises(TypeError, match="no order"):
        sorted([SM120, SM90])


def test_equality_and_sets() -> None:
    assert Arch(12, 0) == SM120
    assert SM120 != SM100
    assert Arch(12, 0) in {SM100, SM120}
    assert SM120 != (12, 0)
    assert pickle.loads(pickle.dumps(SM120)) == SM120


def test_every_known_arch_has_a_name() -> None:
    named = {name: value for name, value in vars(arch).items() if isinstance(value, Arch)}
    assert {f"SM{a.major}{a.minor}": a for a in KNOWN_ARCHS} == named
    assert len(set(KNOWN_ARCHS)) == len(KNOWN_ARCHS) == 10
