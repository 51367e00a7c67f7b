"""Cut the linear layers of a model that is in memory, by a plan."""

from __future__ import annotations

from typing import Any

from torch import nn

from fp4dispatch.formats.checks import check_module
from fp4dispatch.machine import capture
from fp4dispatch.machine.collectives import Team, team
from fp4dispatch.machine.ranks import Ranks
from fp4dispatch.models.fusing.parents import refuse_fused
from fp4dispatch.models.parallel.layers import Part, cut_layer, part_of
from fp4dispatch.models.parallel.plan import Kind, Plan, planned


def parallelize(model: nn.Module, group: Any = None, plan: Plan | str = "auto") -> dict[str, Kind]:
    """Cut the linear layers of a model among the ranks of a group, in place. A collective call.

    Every rank must hold the whole model, with the same weights. To read only the rank's part from a checkpoint, use
    ``fp4dispatch.load_quantized(model, path, tp=TensorParallel(group, plan))``.

    All layers are checked first. If one cannot be cut, on any rank, all models stay as they were. Quantised layers and
    ``nn.Linear`` can be cut. The output head of Transformers' plans stays whole where it is not quantised.

    Parameters
    ----------
    model
        Holds ``FP4Linear``, ``FP8Linear`` or ``nn.Linear``.
    group
        A ``DeviceMesh`` of one dimension, a ``ProcessGroup``, or None for all ranks.
    plan
        As in :class:`~fp4dispatch.models.parallel.plan.TensorParallel`.

    Returns
    -------
    dict
        How each layer that is cut now is cut, by its name.

    Raises
    ------
    InputError
        A plan that does not fit the model, or sizes that cannot be cut: the text has the numbers of ranks that work.
    CaptureError
        During CUDA graph capture.
    RankError
        If any of this happened on another rank, or another rank has ended.
    """
    capture.forbid_in_capture("cutting the layers of a model", "parallelize(model)")
    members = team(group)
    ranks = Ranks(members.group)
    parts = ranks.attempt("planning tensor parallelism", lambda: _parts(model, members, plan))

    def cut_all() -> None:
        for name, part in parts.items():
            cut_layer(model.get_submodule(name), part)

    ranks.attempt("cutting layers", cut_all)
    return {name: part.kind for name, part in parts.items()}


def _parts(model: nn.Module, members: Team, plan: Plan | str) -> dict[str, Part]:
    check_module("model", model)
    refuse_fused(model)
    found = planned(model, plan, members.size)
    return {name: part_of(model.get_submodule(name), kind, members, name) for name, kind in found.items()}
