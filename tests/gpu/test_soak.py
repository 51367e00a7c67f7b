"""Layers of random sizes on two streams at once, eager and in graphs: every output has the bits of the first."""

from __future__ import annotations

import random

import pytest
import torch

from bench import soak
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]

LAUNCHES = 4000


@pytest.mark.parametrize("tokens", [2048, 64])
@pytest.mark.parametrize("fmt", soak.FORMATS)
@torch.inference_mode()
def test_launches_on_two_streams_give_the_same_bits(fmt, tokens):
    draw = random.Random(7)
    torch.manual_seed(draw.getrandbits(32))
    cases, wrong = soak.cases_of(fmt, torch.device("cuda"), draw, 8192, tokens)
    assert not wrong
    done = soak.soak(cases, LAUNCHES, draw)
    assert min(done.values()) > LAUNCHES // 10
    assert not {case.name: case.wrong.tolist() for case in cases if case.wrong.any()}
