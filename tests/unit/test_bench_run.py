"""The runner: a method that is wrong gets no time, one that fails stops nobody, and a budget is kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fp4dispatch.benchmark import roofline, run
from fp4dispatch.benchmark.methods.base import BASELINE
from fp4dispatch.benchmark.roofline import Peaks, least_us
from tests.bench_cases import CPU, PEAKS, Planted, ToldEngine, measure

BASE = Planted(us=10.0)


def rows_of(outcome):
    return {(row.m, row.method): row for row in outcome.rows}


def test_a_method_that_is_right_gets_its_time():
    outcome = measure([BASE, Planted("fast", us=4.0, ours=True)])
    row = rows_of(outcome)[130, "fast"]
    assert (row.status, row.us, row.low, row.spread, row.rounds) == ("ok", 4.0, 4.0, 0.0, 15)
    assert row.backend == "planted"
    assert 0 < row.off < 6e-3
    assert 0 < row.error < 6e-3
    assert rows_of(outcome)[130, BASELINE].us == 10.0
    assert outcome.left == []
    assert outcome.stopped == ""


def one_tile(method, out, truth):
    out[128:, 128:] = 0  # two rows of the last tile


def nan(method, out, truth):
    out[0, 0] = math.nan


@pytest.mark.parametrize(
    ("harm", "tile"), [(one_tile, (1, 1)), (nan, (0, 0)), (lambda p, out, t: out.mul_(1.02), None)]
)
def test_a_wrong_method_prints_wrong_and_no_time(harm, tile):
    engine = ToldEngine()
    outcome = measure([BASE, Planted("bad", us=1.0, harm=harm, ours=True)], engine=engine)
    row = rows_of(outcome)[130, "bad"]
    assert row.status == "WRONG"
    assert row.us is row.low is row.spread is None
    assert row.roofline is None
    assert tile is None or row.tile == tile
    assert "is off by" in row.detail
    assert rows_of(outcome)[130, BASELINE].us == 10.0
    assert all(call.us == 10.0 for call in engine.replays)  # it was never replayed


class Unwritten(Planted):
    """Never writes one tile of its output: what was there before stays."""

    def prepare(self, operands, copies, card):
        ready = super().prepare(operands, copies, card)

        def at(x):
            launch = ready(x)
            inner = launch.call
            launch.out.copy_(operands.product(x.float(), "bf16"))  # a right answer left over from before

            def call(i):
                before = launch.out[:128, :128].clone()
                inner(i)
                launch.out[:128, :128] = before
                return launch.out

            call.us = self.us
            return run.Launch(call, "bf16", "planted", launch.out)

        return at


def test_a_tile_that_is_never_written_is_seen_though_memory_held_the_answer():
    row = rows_of(measure([BASE, Unwritten("bad")]))[130, "bad"]
    assert row.status == "WRONG"
    assert row.off == math.inf
    assert row.tile == (0, 0)


def test_what_is_wrong_only_in_replays_gets_no_time():
    def later(method, out, truth):
        if method.calls > 4:  # the check, the calibration and the recording are right
            out[:1].zero_()

    row = rows_of(measure([BASE, Planted("race", us=1.0, harm=later)]))[130, "race"]
    assert row.status == "WRONG"
    assert row.us is None
    assert row.detail.endswith("in replays")


class Says(Planted):
    def prepare(self, operands, copies, card):
        ready = super().prepare(operands, copies, card)
        return lambda x: replace(ready(x), ran="w4a16 w4a16_small/bf16 8,1,4,2,2,2,2")


def test_a_row_has_the_launch_that_a_method_says_it_ran():
    rows = rows_of(measure([BASE, Says("ours")]))
    assert (rows[130, "ours"].ran, rows[130, BASE.name].ran) == ("w4a16 w4a16_small/bf16 8,1,4,2,2,2,2", "")
    assert rows[130, "ours"].to_dict()["ran"] == rows[130, "ours"].ran


class Raises(Planted):
    def __init__(self, name, where):
        super().__init__(name)
        self.where = where

    def prepare(self, operands, copies, card):
        if self.where == "prepare":
            raise ValueError("no kernel\nfor this shape")
        ready = super().prepare(operands, copies, card)

        def at(x):
            launch = ready(x)

            def call(i):
                self.calls += 1
                if self.where == "call" or (self.where == "record" and self.calls > 2):
                    raise RuntimeError("misaligned address")
                return launch.call(i)

            call.us = 1.0
            return run.Launch(call, "bf16", "planted", launch.out)

        return at


@pytest.mark.parametrize("where", ["prepare", "call", "record"])
def test_a_method_that_raises_stops_nobody(where):
    outcome = measure([BASE, Raises("bad", where), Planted("good", us=2.0)], ms=(1, 130))
    for m in (1, 130):
        row = rows_of(outcome)[m, "bad"]
        assert row.status == "failed"
        assert row.us is None
        words = "ValueError: no kernel for this shape" if where == "prepare" else "RuntimeError: misaligned address"
        assert row.detail == words
        assert rows_of(outcome)[m, "good"].us == 2.0
    assert outcome.stopped == ""


def test_a_device_that_cannot_go_on_ends_the_run_and_keeps_what_was_measured():
    engine = ToldEngine()

    def kill(method, out, truth):
        if out.shape[0] == 130:
            engine.broken = True

    outcome = measure(
        [BASE, Planted("killer", harm=kill)], ms=(1, 130, 200), nk=((256, 128), (128, 128)), engine=engine
    )
    assert "killer at 256x128, M=130" in outcome.stopped
    assert "illegal memory access" in outcome.stopped
    assert {row.m for row in outcome.rows if row.us} == {1}
    assert (256, 128, 200) in outcome.left
    assert (128, 128, 1) in outcome.left


def test_no_time_after_a_replay_that_fails():
    class Engine(ToldEngine):
        def record(self, call, calls, copies):
            made = super().record(call, calls, copies)

            def replay():
                raise RuntimeError("CUDA error: launch failure")

            return run.Recording(replay, made.latest)

    outcome = measure([BASE], engine=Engine())
    assert [(row.status, row.us) for row in outcome.rows] == [("failed", None)]
    assert "launch failure" in outcome.rows[0].detail


def test_methods_that_lack_something_are_listed_and_not_run():
    class Absent(Planted):
        def lacks(self, card):
            return "needs a unicorn"

        def prepare(self, operands, copies, card):
            raise AssertionError

    outcome = measure([BASE, Absent("gone")])
    assert outcome.absent == {"gone": "needs a unicorn"}
    assert [row.method for row in outcome.rows] == [BASELINE]


def test_a_budget_is_kept_and_what_it_left_out_is_said():
    now = [0.0]
    said = []

    def say(done, text):
        said.append((done, text))
        now[0] += 1.0

    outcome = measure([BASE], nk=((128, 128), (256, 128)), ms=(1, 2), budget_s=2.5, clock=lambda: now[0], say=say)
    assert [(row.n, row.m) for row in outcome.rows] == [(128, 1), (128, 2)]
    assert outcome.left == [(256, 128, 1), (256, 128, 2)]
    assert said[0] == (0, "128x128: weights")
    assert outcome.seconds == 3.0
    within = measure([BASE], nk=((128, 128),), ms=(1, 2, 3), budget_s=1.5, clock=lambda: now[0], say=say)
    assert within.left == [(128, 128, 2), (128, 128, 3)]


def test_a_budget_that_is_short_costs_rounds_before_it_costs_problems():
    """Problems that take 0.1 s a round: 17 rounds each would be 1.7 s."""
    now = [0.0]

    class Slow(ToldEngine):
        def record(self, call, calls, copies):
            inner = super().record(call, calls, copies)

            def replay():
                now[0] += 0.1
                inner.replay()
                return 1e5

            return run.Recording(replay, inner.latest)

    def rounds(budget_s):
        now[0] = 0.0
        some = measure([BASE], ms=(1, 2, 3), budget_s=budget_s, clock=lambda: now[0], engine=Slow())
        assert some.left == []
        return [row.rounds for row in some.rows]

    assert rounds(None) == [15, 15, 15]
    assert rounds(30.0) == [15, 15, 15]
    first, second, third = rounds(6.0)
    assert first in (9, 10)  # half of the 2 s that are its share; the two rounds that do not count are beside that
    assert first < second < third <= 15  # what one did not use is for the others
    assert rounds(1.9) == [5, 5, 5]


def test_what_there_is_after_each_shape_is_kept():
    kept = []
    shapes = ((128, 128), (256, 128))
    outcome = measure([BASE], nk=shapes, ms=(1, 2), keep=lambda o: kept.append((len(o.rows), list(o.left))))
    assert kept == [(2, [(256, 128, 1), (256, 128, 2)]), (4, [])]
    assert outcome.left == []


def test_weights_are_rotated_and_rows_say_whether_they_were_cold():
    seen = []

    class Watch(Planted):
        def prepare(self, operands, copies, card):
            seen.append((self.format, copies))
            return super().prepare(operands, copies, card)

    engine = ToldEngine(cache_bytes=1e6)
    outcome = measure([Watch(), Watch("w", fmt="row")], nk=((1024, 1024), (128, 128)), ms=(1,), engine=engine)
    assert seen == [("bf16", 2), ("row", 3), ("bf16", 92), ("row", 184)]
    assert all(row.cold for row in outcome.rows)
    tiny = measure([Watch()], nk=((16, 16),), ms=(1,), engine=engine)
    assert not tiny.rows[0].cold


def test_copies_and_rooflines_count_the_bytes_that_are_read():
    class Expanded(Planted):
        copied = "row"

        def prepare(self, operands, copies, card):
            seen.append(copies)
            return super().prepare(operands, copies, card)

    seen = []
    some = [BASE, Expanded("w", fmt="nvfp4", entering="bf16"), Planted("v", fmt="nvfp4")]
    outcome = measure(some, nk=((1024, 1024),), ms=(1,), engine=ToldEngine(cache_bytes=1e6))
    assert seen == [3]  # of 1 MiB; 6 of those that are read packed
    least = {row.method: row.least_us for row in outcome.rows}
    assert least["w"] / least["v"] == pytest.approx(1 / 0.5625, rel=0.01)


def test_the_roofline():
    assert least_us(PEAKS, 4096, 4096, 1, "nvfp4", "bf16") == pytest.approx(4096 * 4096 * 0.5625 / 4e12 * 1e6, rel=2e-3)
    assert least_us(PEAKS, 8192, 8192, 8192, "bf16", "bf16") == pytest.approx(2 * 8192**3 / 8e14 * 1e6)
    assert least_us(PEAKS, 8192, 8192, 8192, "nvfp4", "row") == pytest.approx(2 * 8192**3 / 16e14 * 1e6)
    assert least_us(PEAKS, 64, 64, 1, "nvfp4", "nvfp4") is None  # its peak is not measured
    assert least_us(Peaks(), 64, 64, 1, "bf16", "bf16") is None
    assert roofline.measure(CPU, ToldEngine()) == Peaks()
    row = rows_of(measure([Planted(us=1.0)]))[130, BASELINE]
    assert row.roofline == pytest.approx(row.least_us)
    assert row.to_dict()["roofline"] == pytest.approx(row.roofline)


@pytest.mark.parametrize(("times", "moved"), [((100, 80, 90), 2 * 65536 / 80), ((100, 100, 40), 65536 / 40)])
def test_ceilings_come_from_the_times_of_known_work(times, moved):
    recorded = []

    class Engine(ToldEngine):
        def record(self, call, calls, copies):
            call(0)
            recorded.append(call)
            us = times[len(recorded) - 1] if len(recorded) <= 3 else 100.0
            return run.Recording(lambda: us * calls, [None])

    from tests.bench_cases import HOPPER_ON_PAPER

    found = roofline.measure(HOPPER_ON_PAPER, Engine(), side=64, copy_bytes=1 << 16)
    assert found.copy == pytest.approx(moved * 1e6)  # the fastest way counts: the others are no ceiling
    assert found.bf16 == pytest.approx(2 * 64**3 / 100e-6)
    assert found.fp8 is None or found.fp8 == pytest.approx(found.bf16)


def test_ways_to_move_bytes_read_and_write_what_they_say():
    for name, (call, moved) in roofline._moves(torch.device("cpu"), 4096).items():
        cells = {v: c.cell_contents for v, c in zip(call.__code__.co_freevars, call.__closure__, strict=True)}
        cells["source"].fill_(3.0)
        call(0)
        assert cells["source"].nbytes == 4096
        assert moved == 4096 * (1 if name == "read" else 2)
        wanted = {"copy": 3.0, "map": -3.0, "read": 3.0 * 1024}[name]
        left = cells["total" if name == "read" else "target"]
        assert torch.equal(left, torch.full_like(left, wanted))


def test_a_fixed_output_is_poisoned_before_it_is_checked():
    out = torch.zeros(4, 4, dtype=torch.bfloat16)
    run._poison(run.Launch(lambda i: out, "bf16", out=out), 4, 4, torch.device("cpu"))
    assert torch.isnan(out).all()
