"""Layers cut among processes over gloo are the whole ones, for every format, with bias, in models too."""

from __future__ import annotations

from typing import Any

import pytest

from tests import parallel

ROUNDING = 2e-6
"""float32 sums in another order."""
TWO = [
    *(parallel.pairs, parallel.gathered, parallel.fused_layers, parallel.padded, parallel.models),
    *(parallel.saving, parallel.saving_fails, parallel.compiled),
]
FOUR = [parallel.pairs, parallel.gathered, parallel.fused_layers, parallel.padded, parallel.models, parallel.two_groups]


def wrong(found: list[dict[str, Any]], name: str) -> dict[str, float]:
    return {
        f"{case}, rank {rank}": error
        for rank, result in enumerate(found)
        for case, error in result[name].items()
        if not error < ROUNDING and not case.endswith("layers")
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return parallel.start(TWO, 2, "cpu")


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return parallel.start(FOUR, 4, "cpu")


@pytest.mark.parametrize("scenario", TWO, ids=lambda scenario: scenario.__name__)
def test_two_ranks(two, scenario):
    assert two[0][scenario.__name__]
    assert not wrong(two, scenario.__name__)


@pytest.mark.parametrize("scenario", FOUR, ids=lambda scenario: scenario.__name__)
def test_four_ranks(four, scenario):
    assert four[0][scenario.__name__]
    assert not wrong(four, scenario.__name__)


def test_all_layers_of_the_models_are_cut(two):
    counts = {case: n for case, n in two[0]["models"].items() if case.endswith("layers")}
    assert set(counts.values()) == {7}
