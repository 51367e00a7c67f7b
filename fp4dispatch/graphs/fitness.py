"""What keeps the layers of a model from being captured at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from fp4dispatch.graphs.batch import Batch
from fp4dispatch.graphs.conditions import reasons
from fp4dispatch.graphs.segments.layers import Spec


class Hooks:
    """The forward hooks of captured modules. A replay calls no module, so it would run none of them.

    Those of modules inside a break run, as it is called. So do those that Transformers installs to record hidden states
    and attentions: they do nothing in calls that ask for none, and others run eagerly.
    """

    def __init__(self, spec: Spec) -> None:
        called = {inside for each in spec.breaks for inside in each.modules() if inside is not each}
        named = [(name, module) for layer in spec.layers for name, module in layer.named_modules()]
        self._modules = [(name or "a layer", module) for name, module in named if module not in called]

    def found(self) -> tuple[str, ...]:
        """Return the names of modules that have hooks now, in their layer."""
        found: dict[str, None] = {}
        if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
            found["all modules"] = None
        for name, module in self._modules:
            after, before = module._forward_hooks, module._forward_pre_hooks
            if (after or before) and any(map(_acts, (*after.values(), *before.values()))):
                found[name] = None
        return tuple(found)


def _acts(hook: object) -> bool:
    return getattr(hook, "__module__", "") != "transformers.utils.output_capturing"


def unfit(spec: Spec, rows: Sequence[int], hooks: Hooks) -> str:
    """Return why the layers cannot be captured; empty if they can. ``rows``: the buckets, ascending."""
    facts = Batch(
        rows[0],
        tuple(rows),
        training=_trains(spec),
        offloaded=_offloaded(spec),
        compiled=_compiled(spec),
        hooked=hooks.found(),
    )
    return "; ".join(map(str, reasons(facts)))


def _trains(spec: Spec) -> bool:
    """Whether the layers, their attention, dropout or norms are in training mode.

    Other modules are in training mode when new, e.g. our quantised layers; that has no effect.
    """
    acting = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
    inside = [module for layer in spec.layers for module in layer.modules() if isinstance(module, acting)]
    return any(module.training for module in (spec.inner, *spec.layers, *spec.attention, *inside))


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
    """Return the modules with LoRA adapters, as peft makes them. Models of Transformers have methods of the names."""
    return [module for module in spec.inner.modules() if isinstance(getattr(module, "disable_adapters", None), bool)]


def active_adapters(modules: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of the active adapters of modules that :func:`adapters` found."""
    found: dict[str, None] = {}
    for module in modules:
        if not module.disable_adapters:
            found |= dict.fromkeys(module.active_adapters)
    return tuple(found)


def adapter_state(modules: Iterable[Any]) -> list[Any]:
    """Return what a graph follows of no module's adapters: which are active, which are merged, and their scales.

    A merge writes to weights in place, and a scale is a number of Python.
    """
    return [
        (
            *(module.disable_adapters, tuple(module.active_adapters)),
            *(tuple(getattr(module, "merged_adapters", ())), tuple(getattr(module, "scaling", {}).items())),
        )
        for module in modules
    ]
