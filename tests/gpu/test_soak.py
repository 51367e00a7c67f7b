"""Layers of random sizes on two streams at once, eager and in graphs: every output has the bits of the first."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from bench import soak
from fp4dispatch.backends.own import w8a8
from fp4dispatch.backends.own.tiling import tiles
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]

LAUNCHES = 4000


def few_tokens_under_block_scales(problem, arch, sms, table):
    """The kernel for few tokens where the table has one row for any number (incident O-15)."""
    plain = next(tile for tile in tiles.tiles(table) if tile.kernel == "w8a8_small")
    blocks = dataclasses.replace(
        plain, scalings=("block128",), builds={"bfloat16": "block_bf16", "float16": "block_fp16"}
    )
    return blocks if problem.m <= 64 else tiles.tile_for(problem, arch, sms, table)


@pytest.mark.parametrize("fmt", [*soak.FORMATS, "fp8_block by w8a8_small"])
@torch.inference_mode()
def test_launches_on_two_streams_give_the_same_bits(fmt, monkeypatch):
    name, _, kernel = fmt.partition(" by ")
    if kernel:
        monkeypatch.setattr(w8a8, "tile_for", few_tokens_under_block_scales)
        monkeypatch.setenv("FP4DISPATCH_FP8_BACKEND", "w8a8")
    draw = random.Random(7)
    torch.manual_seed(draw.getrandbits(32))
    tokens = 64 if kernel else 2048
    cases, wrong = soak.cases_of(name, torch.device("cuda"), draw, 8192, tokens)
    assert not wrong
    done = soak.soak(cases, LAUNCHES, draw)
    assert min(done.values()) > LAUNCHES // 10
    assert not {case.name: case.wrong.tolist() for case in cases if case.wrong.any()}
