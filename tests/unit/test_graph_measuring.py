"""Buckets that are slower than eager calls: from how many tokens on a replay pays, and what keeps to that."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from fp4dispatch.errors import CaptureError, InputError, RankError
from fp4dispatch.graphs import enable, measuring
from fp4dispatch.graphs.enabling import spec_of
from fp4dispatch.graphs.measuring import Measured, Point
from fp4dispatch.graphs.model import Graphs
from fp4dispatch.machine.ranks import Ranks
from tests import breakable
from tests.graph_fake import FakeClock, FakeTape
from tests.unit.test_graph_enabling import Own, found
from tests.unit.test_ranks import together

BUCKETS = [4, 8, 16, 32]


@pytest.fixture(autouse=True)
def without_grad():
    with torch.no_grad():
        yield


def measured(eager, replay, buckets=(8, 16, 32)):
    """What is measured where calls take ``eager(tokens)`` and ``replay(bucket)`` seconds, and the calls by size."""
    clock, calls = FakeClock(), []

    def run(tokens, seconds):
        calls.append(tokens)
        clock.now += seconds

    return measuring.measure(
        buckets,
        lambda n: run(n, eager(n)),
        lambda n: run(n, replay(min(b for b in buckets if b >= n))),
        clock,
        Ranks(),
    ), calls


def test_where_launches_bound_eager_calls_every_replay_pays_and_one_size_is_timed():
    found, calls = measured(eager=lambda n: 0.018, replay=lambda bucket: 0.008)
    assert {bucket: each.pays_from for bucket, each in found.items()} == {8: 1, 16: 1, 32: 1}
    assert sorted(set(calls)) == [4, 9, 17]
    assert len(calls) == 3 * 2 * (1 + measuring.ROUNDS)


def test_padding_that_costs_more_than_launches_is_not_replayed():
    found, calls = measured(eager=lambda n: 0.001 * n, replay=lambda bucket: 0.001 * bucket)
    for bucket, low in ((8, 4), (16, 9), (32, 17)):
        assert [p.tokens for p in found[bucket].points] == [low, bucket]
        assert low < found[bucket].pays_from <= bucket
        least = found[bucket].pays_from
        assert bucket <= least * (1 + measuring.MARGIN)
        assert bucket > (least - 1) * (1 + measuring.MARGIN)
    assert len(calls) <= 3 * 2 * 2 * (1 + measuring.ROUNDS)


def test_a_bucket_that_never_pays_is_never_used():
    found, _ = measured(eager=lambda n: 0.001 * n, replay=lambda bucket: 0.0011 * bucket)
    assert {bucket: each.pays_from for bucket, each in found.items()} == {8: 9, 16: 17, 32: 33}


def test_a_difference_within_noise_decides_nothing():
    found, _ = measured(eager=lambda n: 0.02, replay=lambda bucket: 0.02 * (1 + 0.9 * measuring.MARGIN))
    assert {each.pays_from for each in found.values()} == {1}
    found, _ = measured(eager=lambda n: 0.02, replay=lambda bucket: 0.02 * (1 + 1.1 * measuring.MARGIN))
    assert all(each.pays_from > bucket for bucket, each in found.items())


def test_one_slow_call_of_several_decides_nothing():
    count = iter(range(1000))
    found, _ = measured(eager=lambda n: 0.01, replay=lambda bucket: 0.009 if next(count) % 2 else 0.5)
    assert {each.pays_from for each in found.values()} == {1}


def test_long_calls_are_timed_less_often():
    _, calls = measured(eager=lambda n: 0.06, replay=lambda bucket: 0.05, buckets=(8,))
    assert len(calls) == 2 * measuring.ROUNDS


@pytest.mark.parametrize(("bucket", "smaller", "fewest"), [(1, 0, 1), (4, 0, 2), (16, 15, 16), (16, 4, 8), (33, 0, 17)])
def test_the_fewest_tokens_of_a_bucket_are_not_padded_too_much(bucket, smaller, fewest):
    assert measuring.fewest_tokens(bucket, smaller) == fewest
    assert Measured(bucket, (Point(fewest, 2.0, 1.0),)).pays_from == 1


class SlowMix(nn.Module):
    """A layer whose eager work takes time by its tokens."""

    clock: FakeClock
    seconds = 0.001

    def forward(self, x):
        self.clock.now += self.seconds * x.shape[0] * x.shape[1]
        return x.cumsum(1)


def slow_model(clock, replay, **options):
    """Return a model whose eager calls take 1 ms a token and a layer, and its graphs: ``replay`` seconds a segment."""
    model = Own().eval()
    for block in model.body.blocks:
        block.second = nn.Sequential(block.second, mix := SlowMix())
        mix.clock = clock
    spec = spec_of(found(model), ["angles"], lambda n: model.body(torch.zeros(1, n, 16)))
    held = Graphs(spec, BUCKETS, clock=clock, tapes=lambda: FakeTape(clock=clock, seconds=replay), **options)
    held.capture()
    assert not held.disabled
    return model, held


def test_calls_that_eager_runs_faster_stay_eager_and_are_counted_apart(caplog):
    caplog.set_level(logging.INFO, "fp4dispatch")
    model, held = slow_model(FakeClock(), replay=0.015, verify_replays=2)  # 4 segments: as 20 tokens
    assert {rows: each.pays_from for rows, each in held.measured.items()} == {4: 5, 8: 9, 16: 17, 32: 20}
    assert not any("runs eagerly" in r.message for r in caplog.records)  # measuring says nothing
    assert (held.stats.as_dict()["replays"], held.stats.as_dict()["rejects"]) == (0, 0)
    x = torch.randn(1, 12, 16)
    with held.declare({"decode_verify": True}):
        want = model(x)
    held.stats.reset()
    assert torch.equal(model(x), want)
    model(torch.randn(2, 9, 16))
    model(torch.randn(2, 10, 16))
    counted = held.stats.as_dict()
    assert counted["reasons"] == {"eager-faster": 2}
    assert breakable.replays(held) == {"32": 1}
    assert held._checked == {32: 1}  # and it verifies the calls of the user
    (said,) = [r.message for r in caplog.records if "[eager-faster]" in r.message]
    assert "12 tokens in the bucket of 16: its replays were measured to pay for no number of tokens" in said
    assert [reason.condition for reason in held.why_not(19, {})] == ["eager-faster"]
    assert held.why_not(20, {}) == ()


def test_without_a_clock_every_call_that_fits_is_replayed():
    held = breakable.captured(breakable.model(), BUCKETS, tapes=FakeTape)
    assert not held.measured
    assert held.stats.as_dict()["buckets"]["16"]["pays_from"] is None
    assert held.why_not(9, {}) == ()


def test_a_call_that_cannot_be_measured_leaves_the_graphs_in_use(caplog):
    clock = FakeClock()
    model = Own().eval()
    calls = []

    def example(n):
        calls.append(n)
        if len(calls) > len(BUCKETS):  # not while capturing
            raise ValueError("planted")
        return model.body(torch.zeros(1, n, 16))

    held = Graphs(spec_of(found(model), ["angles"], example), BUCKETS, clock=clock, tapes=FakeTape)
    held.capture()
    assert not held.disabled
    assert not held.measured
    assert [r.levelname for r in caplog.records if "planted" in r.message] == ["WARNING"]
    model(torch.randn(1, 12, 16))
    assert breakable.replays(held) == {"16": 1}


def test_a_rank_that_dies_meanwhile_leaves_the_model_as_it_was(monkeypatch):
    def dies(*_):
        raise RankError("rank 1 is gone")

    monkeypatch.setattr(measuring, "measure", dies)
    model = Own().eval()
    x = torch.randn(1, 8, 16)
    want = model(x)
    spec = spec_of(found(model), ["angles"], lambda n: model.body(torch.zeros(1, n, 16)))
    held = Graphs(spec, [8], clock=FakeClock(), tapes=FakeTape)
    with pytest.raises(RankError, match="rank 1 is gone"):
        held.capture()
    assert held.layers is None
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model(x), want)


def test_a_model_that_runs_eagerly_is_not_measured_against_itself(caplog):
    model = Own().eval()
    spec = spec_of(found(model), ["angles"], lambda n: model.body(torch.zeros(1, n, 16)))
    held = Graphs(spec, [8], clock=FakeClock(), tapes=FakeTape)
    torch.use_deterministic_algorithms(True)
    try:
        held.capture()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not held.measured
    assert "uses all its CUDA graphs, unmeasured" in caplog.text
    assert "it ran eagerly: {'deterministic': 1}" in caplog.text


def test_all_ranks_keep_to_the_slowest():
    def on_a_rank(rank):
        clock = FakeClock()

        def run(seconds):
            clock.now += seconds

        found = measuring.measure([16], lambda n: run(0.01), lambda n: run((0.009, 0.02)[rank]), clock, Ranks())
        return found[16].pays_from

    assert together(on_a_rank) == ["17", "17"]


def test_a_call_that_fails_on_one_rank_ends_the_measurement_on_all():
    def on_a_rank(rank):
        def call(n):
            if rank == 1:
                raise ValueError("planted")

        try:
            measuring.measure([16], call, call, FakeClock(), Ranks())
        except CaptureError as error:
            return str(error)

    for answer in together(on_a_rank):
        assert answer == "a call of 8 tokens failed: ValueError: planted"


def test_the_option_is_true_or_false():
    with pytest.raises(InputError, match="measure=1: need True or False"):
        enable(breakable.model(), [4], measure=1)
