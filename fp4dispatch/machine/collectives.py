"""Collectives of a forward pass: eager, in a CUDA graph, and compiled. An error is a RankError.

Eager and captured calls use ``torch.distributed``. Compiled calls use the functional operators, which Inductor knows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp4dispatch.errors import InputError, RankError
from fp4dispatch.machine.ranks import Group


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
    _run(lambda: torch.distributed.all_reduce(x, group=members.group), members, "all-reduce", what)
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
        _run(lambda: gather(flat, rows, group=members.group), members, "all-gather", what)
    return out


def local(x: Any, *, cut: bool = False) -> Tensor:
    """Return the plain tensor of a ``DTensor``: all of it, or (``cut``) the rank's part of its last dimension.

    A plain tensor is returned as it is: it holds what the layer needs.
    """
    if type(x) is Tensor or not hasattr(x, "redistribute"):
        return x  # type: ignore[no-any-return]
    from torch.distributed.tensor import Replicate, Shard

    return x.redistribute(placements=[Shard(x.ndim - 1) if cut else Replicate()]).to_local()  # type: ignore[no-any-return]


def _run(collective: Callable[[], object], members: Team, kind: str, what: Callable[[], str]) -> None:
    try:
        collective()
    except RuntimeError as error:  # torch's DistError and DistBackendError among them
        if isinstance(error, RankError):
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RankError(
            f"{kind} of {what()} on rank {members.rank} of {members.size} failed: another rank has ended, or the "
            f"network has ({first[:200]})"
        ) from error
