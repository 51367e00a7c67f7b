"""Match a checkpoint with its model: which linear layers can be quantised, and why other weights cannot."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fp4dispatch.checkpoints.files.reader import Checkpoint
from fp4dispatch.checkpoints.hf_names import Conversion, Names, names_in
from fp4dispatch.models.replacing.replaceable import (
    HEAD,
    leftover,
    output_head,
    output_heads,
    ties,
    why_left,
    why_no_linear,
)

NOT_LANGUAGE = "is outside the language model (vision, audio or projector), which stays as it is by default"


@dataclass(frozen=True)
class Survey:
    """A model's weights by their names in a checkpoint (of the module, without ``.weight``).

    Parameters
    ----------
    linears
        All ``nn.Linear`` modules; also those that the checkpoint does not store.
    left
        Why some of them cannot be quantised.
    by_default
        Why some are left unless they are asked for: those outside the language model of a multi-modal model, as engines
        and ModelOpt do, and output heads.
    others
        Why weights outside ``nn.Linear`` are not quantised: embeddings, experts, convolutions, routers.
    in_memory
        Names of the modules in transformers, where these differ. Several where it makes modules out of one weight.
    harmless
        Entries of ``others`` that no reader treats as a linear layer.
    """

    linears: tuple[str, ...]
    left: Mapping[str, str] = field(default_factory=dict)
    by_default: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    in_memory: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can carry."""
        return {
            "linears": list(self.linears),
            "left": dict(self.left),
            "by_default": dict(self.by_default),
            "others": dict(self.others),
            "in_memory": {name: list(modules) for name, modules in self.in_memory.items()},
            "harmless": sorted(self.harmless),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Survey:
        """Read :meth:`to_dict` back."""
        in_memory = {name: tuple(modules) for name, modules in data["in_memory"].items()}
        parts = {"harmless": frozenset(data["harmless"]), "linears": tuple(data["linears"]), "in_memory": in_memory}
        return cls(**{**data, **parts})


def survey(model: nn.Module, checkpoint: Checkpoint) -> Survey:
    """Match a model (it may be on the meta device) with a checkpoint's names, by transformers' own rules."""
    names = names_in(model, checkpoint)
    sources = {target: conversion for conversion in names.conversions for target in _targets(conversion, checkpoint)}
    left, tied, outside, heads = why_left(model), ties(model), _outside(model), output_heads(model)
    linears: dict[str, tuple[str, ...]] = {}
    reasons: dict[str, str] = {}
    by_default: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        conversion = sources.get(f"{name}.weight")
        file_name = names.module_in_file(name) if conversion is None else container(conversion)
        linears[file_name] = (*linears.get(file_name, ()), name)
        why = left.get(id(module), "")
        if conversion is not None:
            made = ", ".join(linears[file_name])
            why = f"transformers makes {made} out of {conversion.sources[0]}, which is not stored as the layer has it"
        elif not why and id(module) in tied and f"{file_name}.weight" in checkpoint:
            why = f"its weight is tied to {tied[id(module)]}"
        if why:
            reasons[file_name] = why
        if outside(name):
            by_default[file_name] = NOT_LANGUAGE
        elif id(module) in heads:
            by_default[file_name] = HEAD
    others, harmless, in_memory = _others(model, names, sources)
    in_memory |= {stored: names for stored, names in linears.items() if names != (stored,)}
    return Survey(tuple(linears), reasons, by_default, others, in_memory, harmless)


def _targets(conversion: Conversion, checkpoint: Checkpoint) -> list[str]:
    return list(conversion.run(lambda name: checkpoint[name].on_meta()))


def container(conversion: Conversion) -> str:
    """Return the module in the file that holds the sources of a conversion: that of all experts, or of one weight."""
    if len(conversion.sources) == 1:
        return module_of(conversion.sources[0])
    first, last = (source.split(".") for source in (min(conversion.sources), max(conversion.sources)))
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return ".".join(part for part, _ in shared)


def module_of(name: str) -> str:
    """Return the module to which a stored tensor belongs; for one of several experts, the module that holds all."""
    experts = re.match(r"(.*?\bexperts)\.\d+\.", name)
    if experts:
        return experts[1]
    return name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0] or name


def _others(
    model: nn.Module, names: Names, sources: Mapping[str, Conversion]
) -> tuple[dict[str, str], frozenset[str], dict[str, tuple[str, ...]]]:
    others: dict[str, str] = {}
    harmless: set[str] = set()
    in_memory: dict[str, tuple[str, ...]] = {}
    for name, owner, parameter in leftover(model):
        conversion = sources.get(name)
        stored = names.stored.get(name)
        if conversion is None and stored is None:
            continue
        module = container(conversion) if conversion is not None else module_of(stored or "")
        others.setdefault(module, why_no_linear(name, owner, parameter))
        if isinstance(owner, nn.modules.conv._ConvNd) or "Embedding" in type(owner).__name__:
            harmless.add(module)
        if (loaded := module_of(name)) != module:
            in_memory[module] = tuple(dict.fromkeys((*in_memory.get(module, ()), loaded)))
    return others, frozenset(harmless), in_memory


def _outside(model: nn.Module) -> Callable[[str], bool]:
    """Return whether a module is outside the language model; always False for models that are one."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        return lambda name: False
    try:
        text = config.get_text_config()
    except ValueError:  # several, as those of MusicGen: nothing is outside of all
        return lambda name: False
    head = output_head(model)
    language = [
        name
        for name, module in model.named_modules()
        if name and type(getattr(module, "config", None)) is type(text) and hasattr(module, "get_input_embeddings")
    ]
    if text is config or not language:
        return lambda name: False
    keep = {name for name, module in model.named_modules() if module is head}
    return lambda name: name not in keep and not any(name.startswith(f"{prefix}.") for prefix in language)
