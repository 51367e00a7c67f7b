"""Linear layers that hold one rank's part: of their outputs (column) or of their inputs (row).

They are layers like others: the same buffers under the same names, with the rank's part in them. Backends see a smaller
problem. A collective follows the GEMM where one is needed.

The bias of a row layer is added on rank 0 alone, inside its GEMM. On other ranks it is zero. So it is added once, all
ranks solve the same problem, and the keys of the ``state_dict`` stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp4dispatch.errors import CheckpointError, InputError
from fp4dispatch.machine import collectives
from fp4dispatch.machine.collectives import Team
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.parallel.cut import Cut, cut_weights, take, unit
from fp4dispatch.models.parallel.plan import Column, Kind, Row, cut_for, dim_of, fused_rows
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replacing.replaceable import sizes


@dataclass(frozen=True, eq=False)
class Part:
    """What a layer holds of a whole one.

    Parameters
    ----------
    kind, team
        How it is cut, and among which ranks.
    cuts
        What each rank holds, in rank order.
    whole
        N and K of the whole layer.
    shard_rows
        Rows of the shards fused into the whole layer, as in :class:`~fp4dispatch.backends.base.LinearWeights`.
    """

    kind: Kind
    team: Team
    cuts: tuple[Cut, ...]
    whole: tuple[int, int]
    shard_rows: tuple[int, ...] = ()

    @property
    def mine(self) -> Cut:
        """What this rank holds."""
        return self.cuts[self.team.rank]

    @property
    def label(self) -> str:
        """Text for ``extra_repr`` and errors."""
        n, k = self.whole
        return f"rank {self.team.rank} of {self.team.size}, {dim_of(self.kind)} cut, whole {n}x{k}"


class ParallelLinear(nn.Module):
    """The part that column and row layers share. ``isinstance(layer, ParallelLinear)`` tells a layer that is cut."""

    part: Part

    def extra_repr(self) -> str:
        """Show the layer, and which part it is."""
        return f"{super().extra_repr()}, {self.part.label}"

    def _name(self) -> str:
        return self._label() if isinstance(self, QuantizedLinear) else type(self).__name__


class ColumnLinear(ParallelLinear):
    """A layer with some rows of the weight, and their bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the rank's outputs, or all with ``gather_output``; arguments and errors as of the whole layer.

        Raises
        ------
        RankError
            If another rank has ended, with ``gather_output``.
        """
        out: Tensor = super().forward(collectives.local(x))
        part = self.part
        if not (isinstance(part.kind, Column) and part.kind.gather_output):
            return out
        everyone = collectives.all_gather(out, part.team, self._name)
        if len(part.mine.ranges) == 1:
            joined = everyone.movedim(0, -2).flatten(-2)
            return joined if joined.shape[-1] == part.whole[0] else joined[..., : part.whole[0]].contiguous()
        pieces = torch.split(everyone, list(part.mine.rows), dim=-1)
        sizes = [sum(c.ranges[i].stop - c.ranges[i].start for c in part.cuts) for i in range(len(pieces))]
        return torch.cat(
            [p.movedim(0, -2).flatten(-2)[..., :size] for p, size in zip(pieces, sizes, strict=True)], dim=-1
        )


class RowLinear(ParallelLinear):
    """A layer with some columns of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole output, the same on all ranks; arguments and errors as of the whole layer.

        The ranks add their results up in the dtype of the output, so it can differ from one GPU's by its rounding.

        Raises
        ------
        RankError
            If another rank has ended.
        """
        part = self.part
        split = isinstance(part.kind, Row) and part.kind.split_input
        x = collectives.local(x, cut=not split)
        if split:
            if x.shape[-1] != part.whole[1]:
                raise InputError(f"{self._name()}: the input has {x.shape[-1]} elements, need all {part.whole[1]}")
            mine = part.mine.ranges[0]
            x = x[..., mine.start : mine.stop]
            x = nn.functional.pad(x, (0, mine.zeros)) if mine.zeros else x.contiguous()
        return collectives.all_reduce(super().forward(x), part.team, self._name)


class ColumnFP4Linear(ColumnLinear, FP4Linear):
    """One rank's rows of an :class:`FP4Linear`."""


class RowFP4Linear(RowLinear, FP4Linear):
    """One rank's columns of an :class:`FP4Linear`."""


class ColumnFP8Linear(ColumnLinear, FP8Linear):
    """One rank's rows of an :class:`FP8Linear`."""


class RowFP8Linear(RowLinear, FP8Linear):
    """One rank's columns of an :class:`FP8Linear`."""


class ColumnPlainLinear(ColumnLinear, nn.Linear):
    """One rank's rows of an ``nn.Linear``."""


class RowPlainLinear(RowLinear, nn.Linear):
    """One rank's columns of an ``nn.Linear``."""


_CLASSES: dict[tuple[type[nn.Module], type[Kind]], type[ParallelLinear]] = {
    (FP4Linear, Column): ColumnFP4Linear,
    (FP4Linear, Row): RowFP4Linear,
    (FP8Linear, Column): ColumnFP8Linear,
    (FP8Linear, Row): RowFP8Linear,
    (nn.Linear, Column): ColumnPlainLinear,
    (nn.Linear, Row): RowPlainLinear,
}


def part_of(layer: nn.Module, kind: Kind, members: Team, what: str) -> Part:
    """Return the part that this rank is to hold of a whole layer. Changes nothing.

    Raises
    ------
    InputError
        A layer of another class, one that is cut already, or sizes that cannot be cut.
    """
    if isinstance(layer, ParallelLinear):
        raise InputError(f"{what} is cut already ({layer.part.label}): cut the whole layer once")
    if (type(layer), type(kind)) not in _CLASSES:
        raise InputError(f"{what} is a {type(layer).__name__}; need an FP4Linear, FP8Linear or nn.Linear")
    assert isinstance(layer, (FP4Linear, FP8Linear, nn.Linear))
    dim = dim_of(kind)
    n, k = sizes(layer)
    rows = layer.shard_rows if isinstance(layer, FP4Linear) else ()
    shards = fused_rows(kind, rows, what)
    # A padded column layer ends where a scale block of the row layer behind it can end.
    step = unit(*layer._kind(), "K" if kind.pad else dim) if isinstance(layer, QuantizedLinear) else 1
    cuts = cut_for(kind, n if dim == "N" else k, step, shards, members, what)
    return Part(kind, members, tuple(cuts), (n, k), rows if len(rows) > 1 else (n,))


def cut_bias(bias: Tensor | None, part: Part) -> Tensor | None:
    """Return the rank's bias: its elements of a column layer's; all of a row layer's on rank 0, zeros on others."""
    if bias is None:
        return None
    if isinstance(part.kind, Column):
        return take(bias.detach(), 0, part.mine)
    return bias.detach().clone() if part.team.rank == 0 else torch.zeros_like(bias)


def cut_layer(layer: nn.Module, part: Part) -> None:
    """Turn a whole layer into the rank's part, in place. Its hooks, name and options stay.

    Raises
    ------
    InputError, FormatError
        If the stored tensors do not fit the format.
    """
    dim = dim_of(part.kind)
    if isinstance(layer, QuantizedLinear):
        weights, bias = cut_weights(layer.weights(lend=False), dim, part.mine), cut_bias(layer.bias, part)
        layer._forget()
        become(layer, part)
        assert isinstance(layer, (FP4Linear, FP8Linear))
        layer.in_features, layer.out_features = weights.k, weights.n
        if isinstance(layer, FP4Linear):
            layer.shard_rows = weights.shard_rows if len(weights.shard_rows) > 1 else ()
        layer.fill(weights, bias)
        del weights
        layer._hold_once()
        return
    assert isinstance(layer, nn.Linear)
    keep = layer.weight.requires_grad
    weight, bias = take(layer.weight.detach(), 0 if dim == "N" else 1, part.mine), cut_bias(layer.bias, part)
    fill_plain(layer, weight, bias, part, requires_grad=keep)


def fill_plain(layer: nn.Linear, weight: Tensor, bias: Tensor | None, part: Part, *, requires_grad: bool) -> None:
    """Turn an ``nn.Linear`` into the rank's part, with tensors that are cut already."""
    layer.weight = nn.Parameter(weight, requires_grad=requires_grad)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=requires_grad))
    layer.out_features, layer.in_features = weight.shape
    become(layer, part)


def become(layer: nn.Module, part: Part) -> None:
    """Give a layer the class of its part. The class of a module can be swapped as FSDP2 does it."""
    base = next(base for base in (FP4Linear, FP8Linear, nn.Linear) if isinstance(layer, base))
    layer.__class__ = _CLASSES[base, type(part.kind)]
    assert isinstance(layer, ParallelLinear)
    layer.part = part


def parallel_layers(model: nn.Module) -> Iterator[tuple[str, ParallelLinear]]:
    """Yield every layer that is cut, with its first name."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelLinear):
            yield name, module


def refuse_cut(model: nn.Module, doing: str) -> None:
    """Refuse a model with layers that are cut: this rank holds a part of each only.

    Raises
    ------
    CheckpointError
        If there is one.
    """
    for name, layer in parallel_layers(model):
        raise CheckpointError(
            f"{doing}: layer {name!r} is cut ({layer.part.label}), so this rank cannot write the whole model: call "
            "fp4dispatch.integrations.tensor_parallel.save(model, ...) on all ranks"
        )


def group_of(model: nn.Module) -> Any:
    """Return the process group of a model's layers; None if none is cut.

    Raises
    ------
    InputError
        If they belong to several groups: name the one that is meant.
    """
    groups = {id(layer.part.team.group): layer.part.team.group for _, layer in parallel_layers(model)}
    if len(groups) > 1:
        raise InputError(f"the layers are cut among {len(groups)} process groups: pass group=")
    return next(iter(groups.values()), None)
