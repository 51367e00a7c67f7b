"""Styles for ``torch.distributed.tensor.parallel.parallelize_module``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from fp4dispatch.errors import InputError
from fp4dispatch.machine.collectives import team
from fp4dispatch.models.parallel.layers import cut_layer, part_of
from fp4dispatch.models.parallel.plan import Column, Kind, Row


class _Style(ParallelStyle):  # type: ignore[misc,unused-ignore]
    """Cuts one layer in place. ``kind`` says how."""

    kind: Kind

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        what = getattr(module, "name", "") or f"the {type(module).__name__}"
        cut_layer(module, part_of(module, self.kind, team(device_mesh), what))
        return module

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind})"


class ColwiseParallel(_Style):
    """Cut the outputs (N) of an ``FP4Linear``, ``FP8Linear`` or ``nn.Linear``.

    Each rank keeps its rows of the weight, their scales and their bias; global and input scales stay. The input is the
    same on all ranks. No communication, unless the output is gathered.

    Every rank must hold the whole layer before. Tensors in and out are plain; a ``DTensor`` input is accepted.

    Parameters
    ----------
    output_layouts
        ``Shard(-1)``, the default: each rank returns its outputs. ``Replicate()``: all ranks return all of them.
    fused, pad
        As in :class:`~fp4dispatch.models.parallel.plan.Column`.

    Raises
    ------
    InputError
        For another layout; when applied: for a module of another class, or sizes that cannot be cut.
    """

    def __init__(
        self, *, output_layouts: Placement | None = None, fused: Sequence[int] = (), pad: bool = False
    ) -> None:
        super().__init__()
        layout: Any = Shard(-1) if output_layouts is None else output_layouts
        if layout not in (Shard(-1), Replicate()):
            raise InputError(f"output_layouts={layout}; need Shard(-1) or Replicate()")
        self.kind = Column(layout == Replicate(), tuple(fused), pad)


class RowwiseParallel(_Style):
    """Cut the inputs (K) of an ``FP4Linear``, ``FP8Linear`` or ``nn.Linear``.

    Each rank keeps its columns of the weight and their scales; global, row and input scales stay. The ranks add up
    their results with an all-reduce. The bias is added once, on rank 0.

    Every rank must hold the whole layer before. Tensors in and out are plain; a ``DTensor`` input is accepted.

    Parameters
    ----------
    input_layouts
        ``Shard(-1)``, the default: each rank gets its part, e.g. of a :class:`ColwiseParallel`. ``Replicate()``: all
        ranks get the whole input and take their part.
    pad
        As in :class:`~fp4dispatch.models.parallel.plan.Row`.

    Raises
    ------
    InputError
        For another layout; when applied: for a module of another class, or sizes that cannot be cut.
    """

    def __init__(self, *, input_layouts: Placement | None = None, pad: bool = False) -> None:
        super().__init__()
        layout: Any = Shard(-1) if input_layouts is None else input_layouts
        if layout not in (Shard(-1), Replicate()):
            raise InputError(f"input_layouts={layout}; need Shard(-1) or Replicate()")
        self.kind = Row(layout == Replicate(), pad)
