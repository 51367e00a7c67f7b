"""Ranks that die, hang, leave or differ in version: the others stop in time and say which. Real processes over gloo."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from fp4dispatch.errors import RankError
from fp4dispatch.machine import ranks
from fp4dispatch.machine.ranks import Ranks


def together(
    work: Callable[[int], object], size: int = 2, *, seconds: float = 40, tcp: bool = False, hanging: int = 0
) -> list[str]:
    """What each rank came to, as text; "killed" for one that was, "hangs" for one that is still there at the end."""
    with tempfile.TemporaryDirectory() as folder:
        if tcp:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                meet = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        else:
            meet = f"file://{folder}/store"
        children = [_fork(work, rank, size, meet, Path(folder)) for rank in range(size)]
        found = ["hangs"] * size
        deadline = time.monotonic() + 60
        while found.count("hangs") > hanging and time.monotonic() < deadline:
            for rank, child in enumerate(children):
                if found[rank] == "hangs" and os.waitpid(child, os.WNOHANG)[0]:
                    answer = Path(folder, f"answer-{rank}")
                    found[rank] = answer.read_text() if answer.exists() else "killed"
            time.sleep(0.02)
        for rank, child in enumerate(children):
            if found[rank] == "hangs":
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return found


def _fork(work: Callable[[int], object], rank: int, size: int, meet: str, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        ranks.DEAD_AFTER, ranks.LATE_AFTER, ranks.BEAT_EVERY = 2.0, 6.0, 0.1
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size)
        try:
            text = str(work(rank))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        (folder / f"writing-{rank}").write_text(text)
        (folder / f"writing-{rank}").rename(folder / f"answer-{rank}")
        if rank == 0:
            time.sleep(0.5)  # it may hold the store
    finally:
        os._exit(0)


def test_values_come_from_every_rank_in_order_and_step_by_step():
    def work(rank):
        group = Ranks()
        return [group.gather((rank, step, {"x"})) for step in range(3)] + [Ranks().gather(rank)]

    everyone = [[(rank, step, {"x"}) for rank in range(3)] for step in range(3)] + [[0, 1, 2]]
    assert together(work, 3) == [str(everyone)] * 3


def test_a_group_is_not_disturbed_by_the_others():
    def work(rank):
        pair = dist.new_group([1, 2])
        if rank == 0:
            return Ranks(alone=True).gather(rank)
        return [Ranks(pair).gather(rank), Ranks(pair).gather(-rank)]

    assert together(work, 3) == ["[0]", "[[1, 2], [-1, -2]]", "[[1, 2], [-1, -2]]"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_or_is_stopped_is_named(how, victim):
    def work(rank):
        group = Ranks()
        group.gather(0)
        if rank == victim:
            os.kill(os.getpid(), how)
            time.sleep(60)
        start = time.monotonic()
        try:
            group.gather(1)
        except RankError as error:
            return f"{error} after {time.monotonic() - start:.0f}"

    found = together(work, 3, hanging=how == signal.SIGSTOP)
    assert found.pop(victim) in ("killed", "hangs")
    for text in found:
        assert text.startswith((f"rank {victim} has shown no sign of life for 2 s", f"rank {victim} is gone")) or (
            "is gone: it has stopped: rank" in text and f"rank {victim} has shown" in text
        ), text
        assert int(text.rpartition(" ")[2]) <= 5


def test_a_rank_that_hangs_while_its_process_lives_is_named():
    def work(rank):
        group = Ranks()
        return group.attempt("compiling", lambda: time.sleep(60 if rank == 1 else 0))

    found = together(work, hanging=1)
    assert found[1] == "hangs"
    assert found[0].startswith("RankError: rank 1 has not come within 6 s: it hangs elsewhere")


def test_a_rank_that_never_begins_is_named_and_met_again_later():
    def work(rank):
        if rank == 0:
            try:
                Ranks().gather("early")
            except RankError as error:
                first = str(error)
        else:
            time.sleep(8)
            first = ""
        return first[:40], Ranks().gather("late")

    found = together(work)
    assert found[0] == "('rank 1 has not come within 6 s: it hangs', ['late', 'late'])"
    assert found[1] == "('', ['late', 'late'])"


def test_a_rank_that_goes_on_without_the_others_is_named_at_once():
    def work(rank):
        group = Ranks()
        group.gather(0)
        if rank == 1:
            del group
            time.sleep(3)
            return "went on"
        start = time.monotonic()
        try:
            group.gather(1)
        except RankError as error:
            return f"{error} {time.monotonic() - start < 1.5}"

    assert together(work) == ["rank 1 is gone: it has gone on without the others True", "went on"]


@pytest.mark.parametrize(("name", "value"), [("PROTOCOL", 2), ("version", "9.9.9")])
def test_ranks_of_different_versions_refuse_before_anything_is_unpickled(name, value):
    def work(rank):
        import fp4dispatch

        if rank == 1:
            if name == "PROTOCOL":
                ranks.PROTOCOL = value
            else:
                fp4dispatch.__version__ = value

        class Unreadable:
            def __reduce__(self):
                return (os._exit, (3,))

        return Ranks().gather(Unreadable())

    for text in together(work):
        assert text.startswith("RankError: the ranks run different versions of fp4dispatch"), text
        assert "rank 1: {" in text
        assert str(value) in text


def test_the_end_of_the_process_that_holds_the_store_is_no_raw_error():
    def work(rank):
        group = Ranks()
        group.gather(0)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return group.gather(1)

    found = together(work, 3, tcp=True)
    assert found[0] == "killed"
    for text in found[1:]:
        assert text.startswith("RankError: the store of the ranks cannot be reached: rank 0"), text


def test_a_self_check_is_shared_the_same_way():
    def work(rank):
        from fp4dispatch.trust import selfcheck
        from fp4dispatch.trust.verdict import CheckResult

        mine = CheckResult("w4a16", "nvfp4_gemm", "nvfp4", "bf16", "sm_90", "passed")
        assert selfcheck.agree(mine) is mine
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return selfcheck.agree(mine)

    found = together(work)
    assert found[1] == "killed"
    assert found[0].startswith("RankError: rank 1 has not come within 6 s")


def test_alone_nothing_is_shared():
    assert Ranks().gather(3) == [3]
    assert Ranks(alone=True).attempt("x", lambda: 4) == 4
