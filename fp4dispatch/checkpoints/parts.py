"""Read only this rank's part of a checkpoint: slices of the stored tensors, never a whole one that is cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.checkpoints.files.reader import Checkpoint, TensorInfo
from fp4dispatch.checkpoints.plan import LayerPlan, Plan, SlotPlan
from fp4dispatch.checkpoints.schemes import Scheme, fuse_shards, to_linear
from fp4dispatch.errors import InputError
from fp4dispatch.machine.collectives import Team, team
from fp4dispatch.models.fusing.parents import refuse_fused
from fp4dispatch.models.parallel.cut import Cut, Range, assemble, scale_entries, unit
from fp4dispatch.models.parallel.layers import ParallelLinear, Part, cut_layer, fill_plain
from fp4dispatch.models.parallel.plan import Column, TensorParallel, cut_for, dim_of, fused_rows, planned
from fp4dispatch.models.replacing.replaceable import sizes

Stored = list[tuple[TensorInfo, torch.Tensor, bool]]
"""Tensors read for a layer, each with whether it is the weight."""


def asked(tp: Any) -> TensorParallel | None:
    """Return what ``load_quantized(tp=)`` means: a group or mesh stands for the plan that the model has."""
    return tp if tp is None or isinstance(tp, TensorParallel) else TensorParallel(tp)


def members_of(tp: TensorParallel | None) -> Team | None:
    """Return the ranks that share the model. Raises as :func:`fp4dispatch.machine.collectives.team`."""
    return None if tp is None else team(tp.group)


def parts_for(model: nn.Module, plan: Plan, tp: TensorParallel | None, members: Team | None) -> dict[str, Part]:
    """Return this rank's part of each linear layer that is cut, by the layer's first name. Reads nothing.

    Raises
    ------
    InputError
        A plan that does not fit the model, or sizes that cannot be cut.
    """
    if tp is None or members is None:
        return {}
    stored = {layer.names[0]: layer for layer in plan.layers}
    parts = {}
    refuse_fused(model)
    for name, kind in planned(model, tp.plan, members.size).items():
        module: Any = model.get_submodule(name)
        if isinstance(module, ParallelLinear):
            raise InputError(f"{name} is cut already ({module.part.label}): load into a model whose layers are whole")
        (n, k), dim = sizes(module), dim_of(kind)
        layer = stored.get(name)
        if layer is not None and layer.keep:
            raise InputError(f"{name} {layer.keep}, so it is dequantised, whole: leave it out of the plan")
        rows = tuple(shard.rows for shard in layer.shards) if layer else ()
        shards = fused_rows(kind, rows, name)
        step = 1
        if layer is not None:
            step = unit(layer.scheme.op, layer.scheme.scaling, "K" if kind.pad else dim)
        cuts = cut_for(kind, n if dim == "N" else k, step, shards, members, name)
        parts[name] = Part(kind, members, tuple(cuts), (n, k), rows if len(rows) > 1 else (n,))
    return parts


def read_layer(layer: LayerPlan, checkpoint: Checkpoint, part: Part | None) -> tuple[LinearWeights, Stored]:
    """Read a layer's tensors, or the rank's part of them, and put its shards together."""
    shards, stored = [], []
    for shard, where in zip(layer.shards, _cuts(layer, part), strict=True):
        tensors = {
            suffix: checkpoint.tensor(info.name)
            if part is None or where is None
            else _read(checkpoint, info, layer.scheme, suffix, part, where)
            for suffix, info in shard.tensors.items()
        }
        stored += [(info, tensors[suffix], suffix == layer.scheme.weight) for suffix, info in shard.tensors.items()]
        shards.append(to_linear(layer.scheme, tensors))
    weights = fuse_shards(shards)
    return weights, stored


def _cuts(layer: LayerPlan, part: Part | None) -> Iterator[Cut | None]:
    """Yield what the rank holds of each stored shard, counted from the shard's start."""
    offset = 0
    for index, shard in enumerate(layer.shards):
        if part is None or len(layer.shards) == 1 or not isinstance(part.kind, Column):
            yield None if part is None else part.mine
        else:
            r = part.mine.ranges[index]
            yield Cut((Range(r.start - offset, r.stop - offset, r.zeros),))
        offset += shard.rows


def _read(
    checkpoint: Checkpoint, info: TensorInfo, scheme: Scheme, suffix: str, part: Part, where: Cut
) -> torch.Tensor:
    """Read the rank's part of one stored tensor of a layer."""
    dim = dim_of(part.kind)
    axis = 0 if dim == "N" else 1
    if suffix == scheme.weight:
        return _slices(checkpoint, info, axis, where, 2 if scheme.op == "nvfp4_gemm" and dim == "K" else 1)
    per = scale_entries(scheme.scaling, dim) if suffix == scheme.scale else 0
    if not per:
        return checkpoint.tensor(info.name)
    if prod(info.shape) == 1 and len(info.shape) < 2:  # one block, stored without its dimensions
        whole = checkpoint.tensor(info.name).reshape(1, 1)
        return assemble(lambda low, high: whole.narrow(axis, low, high - low), axis, where, per, 1)
    axis *= 2 if len(info.shape) == 4 else 1  # ModelOpt: [rows, 1, columns, 1]
    return _slices(checkpoint, info, axis, where, per, 0 if scheme.scaling == "nvfp4" else 1)


def _slices(
    checkpoint: Checkpoint, info: TensorInfo, axis: int, where: Cut, per: int = 1, fill: float = 0
) -> torch.Tensor:
    return assemble(lambda low, high: checkpoint.part(info.name, axis, low, high), axis, where, per, fill)


def read_bias(layer: LayerPlan, checkpoint: Checkpoint, part: Part | None) -> list[torch.Tensor]:
    """Read a stored bias, or the rank's part of it, one tensor for each stored shard."""
    if part is None:
        return [checkpoint.tensor(info.name) for info in layer.bias]
    if isinstance(part.kind, Column):
        pairs = zip(layer.bias, _cuts(layer, part), strict=True)
        return [_slices(checkpoint, info, 0, where) for info, where in pairs if where is not None]
    whole = [checkpoint.tensor(info.name) for info in layer.bias]
    return whole if part.team.rank == 0 else [torch.zeros_like(tensor) for tensor in whole]


class PlainParts:
    """The ``nn.Linear`` modules of a model that are cut and that the checkpoint stores unquantised."""

    def __init__(self, plan: Plan, parts: Mapping[str, Part]) -> None:
        quantised = {layer.names[0] for layer in plan.layers}
        self.parts = {name: part for name, part in parts.items() if name not in quantised}
        self.filled: set[str] = set()

    def part(self, slot: SlotPlan) -> Part | None:
        """Return the part that a parameter belongs to.

        Raises
        ------
        InputError
            If the parameter is shared with another module, which needs all of it.
        """
        owners = {name.rpartition(".")[0] for name in slot.names}
        cut = owners & self.parts.keys()
        if not cut:
            return None
        if len(owners) > 1:
            raise InputError(
                f"{slot.names[0]} is shared by {', '.join(sorted(owners))}: leave {min(cut)} out of the plan"
            )
        self.filled.add(slot.names[0])
        return self.parts[cut.pop()]

    def read(self, slot: SlotPlan, checkpoint: Checkpoint, part: Part) -> list[torch.Tensor]:
        """Read the rank's part of a weight or bias."""
        weight = slot.names[0].endswith(".weight")
        if not weight and not isinstance(part.kind, Column):
            whole = [checkpoint.tensor(info.name) for info in slot.sources]
            return whole if part.team.rank == 0 else [torch.zeros_like(tensor) for tensor in whole]
        axis = 0 if isinstance(part.kind, Column) else 1
        if len(slot.sources) == 1:
            return [_slices(checkpoint, slot.sources[0], axis, part.mine)]
        if axis == 1:
            return [_slices(checkpoint, info, axis, part.mine) for info in slot.sources]
        raise InputError(
            f"{slot.names[0]} is stored in {len(slot.sources)} shards, unquantised: leave it out of the plan"
        )

    def settle(self, model: nn.Module) -> None:
        """Turn the modules, whose tensors are in place, into parts."""
        for name, part in self.parts.items():
            layer = model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            if f"{name}.weight" in self.filled:
                bias = None if layer.bias is None else layer.bias.detach()
                fill_plain(layer, layer.weight.detach(), bias, part, requires_grad=layer.weight.requires_grad)
            else:
                cut_layer(layer, part)
