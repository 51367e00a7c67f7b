"""What keeps the layers of a model from being captured at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from fp4dispatch.graphs.batch import Batch
from fp4dispatch.graphs.conditions import reasons
from fp4dispatch.graphs.segments.layers import Spec


def unfit(spec: Spec, rows: Sequence[int]) -> str:
    """Return why the layers cannot be captured; empty if they can. ``rows``: the buckets, ascending."""
    facts = Batch(rows[0], tuple(rows), training=_trains(spec), offloaded=_offloaded(spec), compiled=_compiled(spec))
    if found := reasons(facts):
        return "; ".join(map(str, found))
    hooked = [
        name
        for layer in spec.layers
        for name, module in layer.named_modules()
        if module is not layer and (module._forward_hooks or module._forward_pre_hooks)
    ]
    if hooked:
        return f"hooks of {', '.join(sorted(set(hooked))[:4])} would not run at replay: remove them, or break there"
    return ""


def _trains(spec: Spec) -> bool:
    """Whether layers drop values or count them. Other modules that were put in later may say so without effect."""
    acting = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
    inside = [module for layer in spec.layers for module in layer.modules() if isinstance(module, acting)]
    return any(module.training for module in (spec.inner, *spec.layers, *inside))


def _offloaded(spec: Spec) -> tuple[str, ...]:
    device = next(spec.inner.parameters()).device
    found: list[str] = []
    for layer in spec.layers:
        found += [name for name, tensor in layer.named_parameters() if tensor.device != device]
        found += [name or "a layer" for name, module in layer.named_modules() if hasattr(module, "_hf_hook")]
    return tuple(dict.fromkeys(found))


def _compiled(spec: Spec) -> bool:
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        for root in (spec.inner, *spec.layers)
        for module in root.modules()
    )


def adapters(spec: Spec) -> list[Any]:
    """Return the modules with LoRA adapters, as peft makes them."""
    return [module for module in spec.inner.modules() if hasattr(module, "active_adapters")]


def active_adapters(modules: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of the active adapters of modules that :func:`adapters` found."""
    found: dict[str, None] = {}
    for module in modules:
        if not module.disable_adapters:
            found |= dict.fromkeys(module.active_adapters)
    return tuple(found)
