"""A rank that raises, exits, is killed or hangs in a forward pass: the others raise a RankError within seconds."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn

from fp4dispatch.errors import InputError, RankError
from fp4dispatch.integrations.tensor_parallel import Column, Row, guard, parallelize
from fp4dispatch.models.linear import FP4Linear
from tests.unit.test_ranks import together

SECONDS = 2.0


def made():
    torch.set_num_threads(1)
    net = nn.Sequential(FP4Linear.from_linear(nn.Linear(96, 96)), FP4Linear.from_linear(nn.Linear(96, 96)))
    parallelize(net, None, {"0": Column(), "1": Row()})
    return net


def forward(rank, fault, victim=1):
    """What a rank comes to when one fails in its second step; and how long that took."""
    net, x = made(), torch.ones(2, 96)
    start = time.monotonic()
    try:
        with guard(seconds=SECONDS):
            net(x)
            if rank == victim:
                fault()
            net(x)
    except RankError as error:
        return f"{error} after {time.monotonic() - start:.1f}"
    except ValueError as error:
        return f"ValueError: {error}"
    return "ended"


def raises():
    raise ValueError("bad input on this rank")


def others(found, victim=1):
    texts = [text for rank, text in enumerate(found) if rank != victim]
    return [(text.rpartition(" after ")[0], float(text.rpartition(" ")[2])) for text in texts]


def test_nothing_fails():
    assert together(lambda rank: forward(rank, lambda: None), 2) == ["ended"] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_raises(victim):
    found = together(lambda rank: forward(rank, raises, victim), 3)
    assert found[victim] == "ValueError: bad input on this rank"
    for text, seconds in others(found, victim):
        assert "is gone: it has stopped: " in text
        assert seconds < 2
    assert any(
        f"rank {victim} is gone: it has stopped: ValueError: bad input" in text for text, _ in others(found, victim)
    )


@pytest.mark.parametrize("fault", [lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL)])
def test_a_rank_ends_without_a_word(fault):
    found = together(lambda rank: forward(rank, fault), 3)
    assert found[1] == "killed"
    for text, seconds in others(found):
        assert "all-reduce of FP4Linear" in text or "RowFP4Linear" in text or "is gone" in text, text
        assert seconds < SECONDS + 2


@pytest.mark.parametrize("fault", [lambda: time.sleep(60), lambda: os.kill(os.getpid(), signal.SIGSTOP)])
def test_a_rank_hangs(fault):
    found = together(lambda rank: forward(rank, fault), 2, hanging=1)
    ((text, seconds),) = others(found)
    assert "within 2 s: a rank hangs, or was killed" in text
    assert seconds < SECONDS + 2


def test_a_rank_fails_behind_its_last_collective():
    def work(rank):
        net, x = made(), torch.ones(2, 96)
        with guard(seconds=SECONDS):
            net(x)
            if rank:
                raise ValueError("late")

    found = together(work, 2)
    assert found[0].startswith("RankError: rank 1 is gone: it has stopped: ValueError: late")


def test_the_check_can_fail():
    """Without a guard, a rank waits for one that hangs: that is what the others show."""

    def work(rank):
        net, x = made(), torch.ones(2, 96)
        start = time.monotonic()
        if rank == 1:
            time.sleep(SECONDS + 3)
        net(x)
        return time.monotonic() - start

    assert float(together(work, 2)[0]) > SECONDS + 2


def test_an_error_while_cutting_is_an_error_of_all_and_no_layer_is_cut():
    def work(rank):
        torch.set_num_threads(1)
        net = nn.Sequential(FP4Linear(64, 64), FP4Linear(64, 48 if rank else 64))
        try:
            parallelize(net, None, {"*": Row()} if rank == 0 else {"0": Row(), "nothing": Row()})
        except (InputError, RankError) as error:
            return f"{type(error).__name__}: {error} {[type(layer).__name__ for layer in net]}"

    found = together(work, 2)
    assert found[0].startswith("RankError: planning tensor parallelism failed on 1 of 2 ranks")
    assert "names no linear layer" in found[1]
    assert all(text.endswith("['FP4Linear', 'FP4Linear']") for text in found)


def test_a_guard_inside_a_guard_is_refused():
    def work(rank):
        with guard(seconds=SECONDS), guard(seconds=SECONDS):
            pass

    assert all(text.startswith("InputError: this group is guarded already") for text in together(work, 2))
