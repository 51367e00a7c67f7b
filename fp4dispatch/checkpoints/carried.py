"""What a checkpoint holds besides the model: kept with the model that it was loaded into, and saved again."""

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
    """Facts of a checkpoint that no module of the model has a place for.

    Parameters
    ----------
    kv_cache
        How the KV cache is quantised.
    tensors
        Scales of the KV cache by their full names; on the CPU.
    activations
        What the checkpoint says about activations, by layer: a later load may replace it, unlike a user's pin.
    inverse_scales
        Whether FP8 scales per tensor were called ``weight_scale_inv``, as transformers has them.
    """

    kv_cache: KvCache | None = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    activations: dict[str, Activation] = field(default_factory=dict)
    inverse_scales: bool = False


def carry(model: nn.Module, carried: Carried) -> None:
    """Attach to the model that was loaded, in place of what an earlier checkpoint left."""
    object.__setattr__(model, _ATTRIBUTE, carried)


def carried_by(model: nn.Module) -> Carried | None:
    """Return what the checkpoint left that was loaded into this very module."""
    return getattr(model, _ATTRIBUTE, None)


def all_carried(model: nn.Module) -> Iterator[tuple[str, Carried]]:
    """Yield what checkpoints left in a model and in parts of it, with the prefix of their names."""
    for name, module in model.named_modules():
        carried = carried_by(module)
        if carried is not None:
            yield f"{name}." if name else "", carried
