"""Layers cut among 2 and 4 processes over gloo are the whole ones, for every format, with bias, in models too."""

from __future__ import annotations

from typing import Any

import pytest

from tests import parallel

ROUNDING = 2e-6
"""float32 sums in another order."""
SCENARIOS = [
    parallel.pairs,
    parallel.gathered,
    parallel.fused_layers,
    parallel.padded,
    parallel.models,
    parallel.compiled,
]


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return parallel.start(SCENARIOS, request.param, "cpu")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_equal_to_one_process(found, scenario):
    everyone = [
        (rank, case, error) for rank, result in enumerate(found) for case, error in result[scenario.__name__].items()
    ]
    assert not [each for each in everyone if "layers" not in each[1] and not each[2] < ROUNDING]
