"""Rotation, rounds and statistics of the benchmark, on a clock that is told what time it is."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.shared import graphs
from fp4dispatch.tune import timing
from fp4dispatch.tune.timing import calls_for, copies_for, is_cold, summarise, take_turns


def test_median_least_and_spread():
    sample = summarise([10.0, 12.0, 11.0, 50.0, 9.0])
    assert (sample.us, sample.low, sample.rounds) == (11.0, 9.0, 5)
    assert sample.spread == pytest.approx(2.0 / 11.0)  # quartiles 10 and 12: the outlier does not count
    assert summarise([3.0, 3.0]).spread == 0


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_times_that_are_none_are_refused(times):
    with pytest.raises(ValueError, match="two or more positive times"):
        summarise(times)


@pytest.mark.parametrize("weight", [1e4, 9.4e6, 25e6, 49.9e6, 50e6, 117e6, 149e6, 151e6, 9e8])
def test_weights_rotate_over_more_than_three_caches(weight):
    copies = copies_for(weight, 50e6)
    assert 2 <= copies <= timing.MOST_COPIES
    assert is_cold(copies, weight, 50e6) == (copies * weight > 150e6)
    if weight > 150e6 / timing.MOST_COPIES:
        assert is_cold(copies, weight, 50e6)
    assert copies == 2 or (copies - 1) * weight <= 150e6  # no more than needed


def test_a_weight_too_small_to_rotate_is_called_warm():
    assert not is_cold(copies_for(83e3, 50e6), 83e3, 50e6)


def test_calls_fill_a_replay_and_use_every_copy():
    assert calls_for(20, 2.0, 30.0) == 260 >= timing.REPLAY_US / 2.0  # that long at the floor
    assert calls_for(7, 2.0, 30.0) % 7 == 0
    assert calls_for(2, 11_000.0, 11_000.0) == 2
    assert calls_for(20, 2.0, 20_000.0) == 20  # slow: no more than one turn of the copies
    assert calls_for(4, None, 100.0) == 8
    assert calls_for(2, None, 100.0, 0.0) == 2


def replays_of(us, log):
    counts = {name: itertools.count() for name in us}

    def replay(name):
        log.append(name)
        return us[name](next(counts[name]))

    return {name: lambda name=name: replay(name) for name in us}


def test_methods_take_turns_and_nobody_always_follows_the_same():
    log: list[str] = []
    steady = {name: lambda turn: 30.0 for name in "abc"}
    times = take_turns(replays_of(steady, log), dict.fromkeys("abc", 3), rounds=6, warmup=2)
    assert {name: sample.us for name, sample in times.items()} == dict.fromkeys("abc", 10.0)
    assert "".join(log[:6]) == "abcabc"  # warm-up
    assert "".join(log[6:]) == "abcbcacab" * 2
    assert all(sample.rounds == 6 for sample in times.values())


def test_the_warm_up_does_not_count():
    first = {"a": lambda turn: 1e5 if turn < 2 else 10.0}
    assert take_turns(replays_of(first, []), {"a": 1}, rounds=5).keys() == {"a"}
    assert take_turns(replays_of(first, []), {"a": 1}, rounds=5)["a"].us == 10.0


def test_long_problems_get_fewer_rounds():
    slow = {name: lambda turn: 1e5 for name in "ab"}
    assert take_turns(replays_of(slow, []), {"a": 1, "b": 1}, rounds=15, limit_us=2e6)["a"].rounds == 10
    assert take_turns(replays_of(slow, []), {"a": 1, "b": 1}, rounds=15, limit_us=1.0)["a"].rounds == 5


def test_no_method_takes_no_time():
    assert take_turns({}, {}) == {}


class Clock:
    """Seconds that pass only while a call runs."""

    def __init__(self):
        self.now = 0.0
        self.seen = []

    def call(self, i):
        self.seen.append(i)
        self.now += 1e-3
        return f"result of {i}"


def test_the_wall_engine_reads_its_clock_around_the_calls():
    clock = Clock()
    engine = timing.WallEngine(lambda: clock.now)
    assert engine.once(clock.call) == pytest.approx(1000.0)
    recording = engine.record(clock.call, 5, 2)
    assert clock.seen == [0]
    assert recording.replay() == pytest.approx(5000.0)
    assert clock.seen == [0, 0, 1, 0, 1, 0]
    assert recording.latest == ["result of 0"]


class Sums(TorchDispatchMode):
    """Puts the bytes of each tensor that is summed up into a log."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.sum.default:
            self.log.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def test_other_data_fills_the_cache_before_the_head_start_of_timed_work(monkeypatch):
    log = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return 0.25

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: log.append(("sleep", clocks)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("finish"))
    engine = timing.GraphEngine(torch.device("cpu"), cache_bytes=5000.0)
    with Sums(log):
        assert engine.once(lambda i: log.append(f"call {i}")) == 250.0
    timed = [2 * 5000, ("sleep", timing.CALL_HEAD_START), "event", "call 0", "event", "wait"]
    assert log == ["finish", *timed]
    assert timing.CALL_HEAD_START > 2 * timing.HEAD_START


def test_the_kernel_scripts_time_by_the_same_harness():
    order = []

    def captured(name, times, calls):
        left = iter(times)
        return graphs.Captured(timing.Recording(lambda: order.append(name) or next(left), []), calls, lambda i: None)

    found = graphs.microseconds({("a", 1): captured("a", [99, 8, 2, 4], 2), "b": captured("b", [99, 30, 10, 20], 5)}, 3)
    assert found == {("a", 1): 2.0, "b": 4.0}  # medians of one call, without the warm-up
    assert "".join(order) == "ababbaab"
