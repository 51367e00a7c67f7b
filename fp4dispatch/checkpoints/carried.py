"""Checkpoint data without a place in the model. It is attached to the loaded model, and saved with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from fp4dispatch.checkpoints.kv_cache import KvCache
from fp4dispatch.problem import Activation

_ATTRIBUTE = "_fp4dispatch_carried"


@dataclass
class Carried:
    """Data of a checkpoint that no module of the model holds.

    Parameters
    ----------
    kv_cache
        How the KV cache is quantised.
    tensors
        Scales of the KV cache by their full names; on the CPU.
    activations
        The checkpoint's activation format by layer. A later load may replace it. A user's pin stays.
    inverse_scales
        Whether per-tensor FP8 scales had the name ``weight_scale_inv``, as transformers writes them.
    """

    kv_cache: KvCache | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    activations: dict[str, Activation] = field(default_factory=dict)
    inverse_scales: bool = False


def carry(model: nn.Module, carried: Carried) -> None:
    """Attach the data to a loaded model. Replaces the data of an earlier checkpoint."""
    object.__setattr__(model, _ATTRIBUTE, carried)


def carried_by(model: nn.Module) -> Carried | None:
    """Return the data attached to this module, or None. Does not look at children."""
    return getattr(model, _ATTRIBUTE, None)


def all_carried(model: nn.Module) -> Iterator[tuple[str, Carried]]:
    """Yield the data attached to a model and to its children, each with its name prefix."""
    for name, module in model.named_modules():
        carried = carried_by(module)
        if carried is not None:
            yield f"{name}." if name else "", carried
