"""The benchmark's judge: one bad tile is seen among many good ones, and nothing else is called bad."""

from __future__ import annotations

import math

import pytest
import torch

from fp4dispatch.benchmark.check import relative_error, worst_tile
from fp4dispatch.benchmark.methods.base import ROUNDING

torch.manual_seed(0)
WANT = torch.randn(1300, 700)
GOOD = WANT.bfloat16()


def harmed(change):
    got = GOOD.clone()
    change(got)
    return worst_tile(got, WANT)


def test_rounding_is_right():
    assert worst_tile(GOOD, WANT).error < ROUNDING / 2
    assert worst_tile(WANT, WANT).error == 0


@pytest.mark.parametrize(
    ("change", "tile", "error"),
    [
        (lambda t: t[:128, :128].zero_(), (0, 0), 1.0),
        (lambda t: t[1152:1280, 128:256].zero_(), (9, 1), 1.0),  # in the second piece that is compared
        (lambda t: t[1280:, 640:].zero_(), (10, 5), 1.0),  # ragged in both
        (lambda t: t[300, 300].fill_(math.nan), (2, 2), math.inf),
        (lambda t: t[300, 300].fill_(math.inf), (2, 2), math.inf),
        (lambda t: t[128:256, 256:384].mul_(1.02), (1, 2), 0.02),
        (lambda t: t[128:256, :128].copy_(GOOD[256:384, :128]), (1, 0), 2**0.5),
    ],
)
def test_one_bad_tile_is_found(change, tile, error):
    worst = harmed(change)
    assert worst.tile == tile
    assert worst.error == pytest.approx(error, rel=0.05)
    assert worst.error > ROUNDING


def test_the_worst_of_several_is_named():
    def change(t):
        t[:128, :128].mul_(1.1)
        t[512:640, 512:640].zero_()

    assert harmed(change).tile == (4, 4)


def test_a_tile_that_should_be_zero():
    want = torch.zeros(4, 4)
    assert worst_tile(want.bfloat16(), want).error == 0
    got = want.bfloat16()
    got[0, 0] = 1e-6
    assert worst_tile(got, want).error == math.inf


def test_one_row():
    assert worst_tile(GOOD[:1], WANT[:1]).error < ROUNDING


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="equal"):
        worst_tile(GOOD[:5], WANT)
    with pytest.raises(ValueError, match="non-empty"):
        worst_tile(GOOD[:0], WANT[:0])


def test_relative_error_of_everything():
    assert relative_error(WANT * 1.01, WANT) == pytest.approx(0.01, rel=1e-3)
    bad = WANT.clone()
    bad[-1, -1] = math.nan
    assert relative_error(bad, WANT) == math.inf
