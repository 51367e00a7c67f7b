"""Collectives of a forward pass: eager, in a CUDA graph, and compiled. An error is a RankError.

Eager and captured calls use ``torch.distributed``. Compiled calls use the functional operators, which Inductor knows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4dispatch.errors import InputError, RankError
from fp4dispatch.machine import log as _log
from fp4dispatch.machine.ranks import Group, Ranks


@dataclass(frozen=True, eq=False)
class Team:
    """The ranks that share a layer, and this one's place among them.

    Parameters
    ----------
    group
        A ``torch.distributed.ProcessGroup``; None for all ranks, or where there is only one.
    name
        The group's name, which compiled graphs hold.
    rank, size
        This rank's number in the group, from 0, and how many there are.
    """

    group: Group
    name: str
    rank: int
    size: int

    def __deepcopy__(self, memo: dict[int, Any]) -> Team:
        return self

    def __reduce__(self) -> Any:
        raise InputError(
            "a tensor-parallel layer cannot be pickled: it belongs to a process group; save its state_dict, or the "
            "model with fp4dispatch.integrations.tensor_parallel.save"
        )


def team(where: Any = None) -> Team:
    """Return the team of a group.

    Parameters
    ----------
    where
        A ``DeviceMesh`` of one dimension, a ``ProcessGroup``, a :class:`Team`, or None for all ranks.

    Raises
    ------
    InputError
        For anything else, a mesh of more dimensions, a group that this rank is not in, or if
        ``torch.distributed`` has not been initialised.
    """
    if isinstance(where, Team):
        return where
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise InputError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    mesh = getattr(where, "get_group", None)
    if mesh is not None:
        if where.ndim != 1:
            raise InputError(f"the mesh has {where.ndim} dimensions, need 1: pass the one to cut along, mesh['tp']")
        where = mesh()
    if where is not None and not isinstance(where, torch.distributed.ProcessGroup):
        raise InputError(f"got a {type(where).__name__}; need a DeviceMesh, a ProcessGroup, or None for all ranks")
    group: Any = torch.distributed.group.WORLD if where is None else where
    rank = torch.distributed.get_rank(group)
    if rank < 0:
        raise InputError("this rank is not in the group: call this on the ranks of the group only")
    return Team(group, group.group_name, rank, torch.distributed.get_world_size(group))


def all_reduce(x: Tensor, members: Team, what: Callable[[], str]) -> Tensor:
    """Return the sum of all ranks' ``x``; eagerly, ``x`` itself is overwritten.

    Safe to capture in a CUDA graph with NCCL, once the group has run a collective before.

    Parameters
    ----------
    x
        Contiguous, of one shape and dtype on all ranks.
    what
        Gives a name for errors.

    Raises
    ------
    RankError
        If another rank has ended, or the transport fails.
    """
    if members.size == 1 or not x.numel():
        return x
    if torch.compiler.is_compiling():
        summed = torch.ops._c10d_functional.all_reduce(x, "sum", members.name)
        return torch.ops._c10d_functional.wait_tensor(summed)  # type: ignore[no-any-return]
    _run(
        lambda wait: torch.distributed.all_reduce(x, group=members.group, async_op=wait),
        x,
        members,
        "all-reduce",
        what,
    )
    return x


def all_gather(x: Tensor, members: Team, what: Callable[[], str]) -> Tensor:
    """Return all ranks' ``x``, stacked in rank order. Parameters and errors as of :func:`all_reduce`."""
    if members.size == 1:
        return x.unsqueeze(0)
    if torch.compiler.is_compiling():
        rows = x.reshape(1, -1)
        found = torch.ops._c10d_functional.all_gather_into_tensor(rows, members.size, members.name)
        return torch.ops._c10d_functional.wait_tensor(found).view(members.size, *x.shape)  # type: ignore[no-any-return]
    out = x.new_empty(members.size, *x.shape)
    if x.numel():
        flat, rows = out.view(-1), x.contiguous().view(-1)
        # torch 2.13 has another name for it
        gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
        _run(lambda wait: gather(flat, rows, group=members.group, async_op=wait), x, members, "all-gather", what)
    return out


def local(x: Any, *, cut: bool = False) -> Tensor:
    """Return the plain tensor of a ``DTensor``: all of it, or (``cut``) the rank's part of its last dimension.

    A plain tensor is returned as it is: it holds what the layer needs.
    """
    if type(x) is Tensor or not hasattr(x, "redistribute"):
        return x  # type: ignore[no-any-return]
    from torch.distributed.tensor import Replicate, Shard

    return x.redistribute(placements=[Shard(x.ndim - 1) if cut else Replicate()]).to_local()  # type: ignore[no-any-return]


def _run(collective: Callable[[bool], Any], x: Tensor, members: Team, kind: str, what: Callable[[], str]) -> None:
    """Run a collective; ``collective(True)`` starts it and returns its work."""
    watch = _watches.get(members.name)
    try:
        if watch is None or x.is_cuda:
            collective(False)
        else:
            watch.wait(collective(True), f"{kind} of {what()}")
    except RuntimeError as error:  # torch's DistError and DistBackendError among them
        if isinstance(error, RankError):
            raise
        lost = watch.trouble() if watch else ""
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankError(
            f"{kind} of {what()} on rank {members.rank} of {members.size} failed: "
            f"{lost or 'another rank has ended, or the network has'} ({first[:200]})"
        ) from error


class _Watch:
    """Looks after the other ranks while one block runs."""

    def __init__(self, ranks: Ranks, members: Team, seconds: float) -> None:
        self._ranks, self._members, self._seconds = ranks, members, seconds
        self._deadline = time.monotonic() + seconds
        self._over = threading.Event()
        self.found = ""
        """Why the block cannot end well; empty while it can."""

    def start(self) -> None:
        """Look after NCCL groups in a thread: the thread of the block may wait for a GPU."""
        if torch.distributed.get_backend(self._members.group) == "nccl":
            threading.Thread(target=self._look, name="fp4dispatch-watch", daemon=True).start()

    def stop(self) -> None:
        """The block has ended."""
        self._over.set()

    def trouble(self) -> str:
        """Return why the block cannot end well; empty while it can."""
        if not self.found:
            self.found = self._ranks.lost()
        if not self.found and time.monotonic() > self._deadline:
            self.found = f"the block has not ended within {self._seconds:.0f} s: a rank hangs, or was killed"
        return self.found

    def wait(self, work: Any, what: str) -> None:
        """Wait for a collective of the CPU, as long as all ranks take part."""
        pause = 0.0002
        while not work.is_completed():
            if pause > 0.02 and (found := self.trouble()):
                raise RankError(f"{what} on rank {self._members.rank} of {self._members.size}: {found}")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.03)
        work.wait()

    def _look(self) -> None:
        while not self._over.wait(0.1):
            if self.trouble():
                _abort(self._members.group)  # ends the kernels that wait for the other ranks
                return


_watches: dict[str, _Watch] = {}
"""By name of the group."""


def _abort(group: Group) -> None:
    try:
        group.abort()
    except Exception as error:  # the block raises in any case
        _log.debug("aborting the process group: %s", error)


@contextmanager
def guard(where: Any = None, seconds: float = 60.0) -> Iterator[None]:
    """Run a block on all ranks of a group, or raise on all. A collective call.

    If a rank raises inside, exits, is killed or hangs, the others raise a :class:`~fp4dispatch.errors.RankError` that
    names it: at once where it can still say so, else after ``seconds``. Without a guard, a collective that waits for
    such a rank ends after the timeout of the process group, which is minutes.

    An NCCL group is aborted then, and cannot be used again: end the process. Do not open guards of one group in each
    other or in several threads, or inside a CUDA graph capture.

    Parameters
    ----------
    where
        As in :func:`team`.
    seconds
        How long the block may take at most on a rank, and how long it waits for others at its start and end.

    Raises
    ------
    RankError
        If another rank did not get to the end of the block.
    InputError
        As :func:`team`, or for a guard inside a guard of the same group.
    """
    members = team(where)
    if members.name in _watches:
        raise InputError("this group is guarded already: leave the outer block first")
    ranks = Ranks(members.group, late_after=seconds)
    ranks.gather("begin")
    watch = _watches[members.name] = _Watch(ranks, members, seconds)
    watch.start()
    try:
        yield
        watch.stop()
        ranks.gather("end")
    except Exception as error:
        ranks.leave(f"it has stopped: {type(error).__name__}: {error}")
        if watch.found and not isinstance(error, RankError):
            raise RankError(f"on rank {members.rank} of {members.size}: {watch.found}") from error
        raise
    except BaseException as error:  # e.g. SystemExit
        ranks.leave(f"it has stopped: {type(error).__name__}")
        raise
    finally:
        watch.stop()
        del _watches[members.name]
    if watch.found:
        raise RankError(f"on rank {members.rank} of {members.size}: {watch.found}")
