"""bench/shared/few_tokens.py on emulated kernels: a launch that is wrong in one tile has no time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench.kernels_w4 import KERNEL
from bench.kernels_w8 import Weight as Fp8Weight
from bench.shared import few_tokens
from fp4dispatch.backends.own.tiling.few_tokens import FewTokensShape
from tests import w4_fake
from tests.on_cpu import OnCpu, generators


@pytest.fixture
def timed(monkeypatch):
    generators(monkeypatch)
    monkeypatch.setattr(few_tokens, "COLD_BYTES", 1e5)
    monkeypatch.setattr(few_tokens, "capture", lambda call, copies, calls: (copies, calls))
    monkeypatch.setattr(few_tokens, "microseconds", lambda graphs, rounds: dict.fromkeys(graphs, 2.0))
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(few_tokens.few_tokens, "candidates", lambda *_: [SHAPE])
    with OnCpu():
        yield few_tokens.Timed.of(KERNEL.weight(264, 144))


SHAPE = FewTokensShape(8, 1, 4, 2, 1, 2, 1)


def module(spoil=lambda out: None, refused=""):
    real = w4_fake.Kernels().load("w4a16_small", "bf16", None).module.w4a16_small

    def small(*operands):
        real(*operands)
        spoil(operands[4])

    def shaped(*operands):
        assert operands[5] == list(SHAPE)
        if refused:
            raise ValueError(refused)
        small(*operands[:5], operands[6])

    return SimpleNamespace(w4a16_small=small, w4a16_small_shaped=shaped)


def test_what_is_right_is_timed(timed):
    row = few_tokens.time_problem(KERNEL, module(), timed, 8, True, alive := [])
    assert row["us"] == dict.fromkeys(("bf16", "bf16 default pdl", "bf16 default"), 2.0)
    assert row["shapes"] == [{"shape": list(SHAPE), "us": 2.0}]
    assert (row["wrong"], len(alive)) == ([], 4)
    assert (row["n"], row["k"], row["m"]) == (264, 144, 8)


def test_one_wrong_tile_of_three_is_seen_and_not_timed(timed):
    """Of the norm of all of the output it is 0.3 %, which rounding might be."""

    def spoil(out):
        out[:, 256:] *= 1.02

    row = few_tokens.time_problem(KERNEL, module(spoil), timed, 8, False, [])
    assert set(row["us"]) == {"bf16"}
    assert [line.partition(": error")[0] for line in row["wrong"]] == [
        "bf16 default pdl: tile (0, 2)",
        "bf16 default: tile (0, 2)",
    ]


def test_nan_and_a_refused_shape_are_not_timed(timed):
    row = few_tokens.time_problem(KERNEL, module(lambda out: out[0, 0].fill_(torch.nan)), timed, 8, False, [])
    assert all("error inf" in line for line in row["wrong"])
    row = few_tokens.time_problem(KERNEL, module(refused="too much shared memory"), timed, 8, True, [])
    assert row["wrong"] == [f"{SHAPE}: too much shared memory"]
    assert row["shapes"] == []


def test_peers_have_a_limit_of_their_own(timed):
    def peer(i, out):
        torch.mm(timed.x[:8], timed.dense[i].t(), out=out)
        out *= 1.03

    for limit, us in ((5e-2, 2.0), (1e-2, None)):
        row = few_tokens.time_problem(KERNEL, module(), timed, 8, False, [], {"peer": (peer, len(timed.dense), limit)})
        assert row["us"].get("peer") == us


def test_the_weights_are_what_they_stand_for(timed):
    weight = KERNEL.weight(72, 144)
    codes, scale = w4_fake.decode(weight.packed)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    exact = table[codes.long()] * scale.repeat_interleave(16, 1)
    assert torch.equal(weight.dense(torch.float32), exact[:72, :144])
    assert torch.equal(weight.dense(torch.bfloat16).float(), exact[:72, :144]), "of 6 bits: exact"
    rows = Fp8Weight(72, 144)
    assert torch.equal(rows.dense(torch.bfloat16).float(), rows.packed.float())
