"""Map tensor names of a checkpoint to those of the model, with the rules of transformers.

For each model, transformers 5 defines which stored names it renames (``language_model.model.`` to
``model.language_model.``) and which tensors it converts (the weights of all experts into one tensor). This module calls
these rules; it has no copies of them.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp4dispatch.errors import CheckpointError

QUANTISED_SUFFIXES = (
    *("weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_scale_inv"),
    *("input_scale", "input_global_scale", "activation_scale"),
)
"""Suffixes of the tensors of a quantised weight. Renaming rules know only ``weight``."""


@dataclass(frozen=True)
class Conversion:
    """Stored tensors that transformers converts into parameters of another shape, in its order."""

    name: str
    """The (first) parameter."""
    sources: tuple[str, ...]
    patterns: tuple[str, ...]
    """For each source, which pattern of the converter it matched."""
    converter: Any
    model: nn.Module

    def run(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters by name; ``read`` gives a stored tensor (on meta: shapes are found without data).

        Raises
        ------
        CheckpointError
            The tensors do not fit together.
        """
        converter = copy.deepcopy(self.converter)
        for source, pattern in zip(self.sources, self.patterns, strict=True):
            converter.add_tensor(self.name, source, pattern, read(source))
        try:
            made = converter.convert(self.name, model=self.model, config=getattr(self.model, "config", None))
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"tensors {', '.join(self.sources[:3])} ... cannot be put together to {self.name!r} as transformers "
                f"does: {error}: is this a checkpoint of this model?"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True)
class Names:
    """Names in the model of the tensors of a checkpoint.

    Parameters
    ----------
    plain
        Name in the model by name in the checkpoint, for tensors that are stored as the model has them.
    conversions
        The others.
    lost
        Quantised tensors that transformers would convert, and the parameter that they would go into. They are in
        ``plain`` too, under the name that they have in the checkpoint.
    """

    plain: dict[str, str]
    conversions: tuple[Conversion, ...] = ()
    lost: dict[str, str] = field(default_factory=dict)
    stored: dict[str, str] = field(init=False, default_factory=dict)
    """The reverse of ``plain``."""

    def __post_init__(self) -> None:
        for name, target in self.plain.items():
            if target not in self.stored or name == target:
                self.stored[target] = name

    def module_in_file(self, name: str) -> str:
        """Return the checkpoint's name of a module; its own name if the checkpoint has no tensor of it."""
        for suffix in ("weight", *QUANTISED_SUFFIXES, "bias"):
            stored = self.stored.get(f"{name}.{suffix}")
            if stored is not None and stored.endswith(f".{suffix}"):
                return stored.removesuffix(f".{suffix}")
        return name


def names_in(model: nn.Module, stored: Iterable[str]) -> Names:
    """Map stored names to a model, as transformers does. For other models names stay unchanged."""
    names = list(stored)
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return Names({name: name for name in names})
    known: dict[str, Any] = dict.fromkeys((*model.state_dict(), *(n for n, _ in model.named_parameters())), True)
    rename = _renamer(model, known)
    plain: dict[str, str] = {}
    groups: dict[str, list[tuple[str, str]]] = {}
    lost: dict[str, str] = {}
    for name in sorted(names, key=_natural):
        parent, _, last = name.rpartition(".")
        asked = f"{parent}.weight" if last in QUANTISED_SUFFIXES and name not in known else name
        target, pattern = rename(asked)
        if pattern is None and asked is not name and target.endswith(".weight"):
            target = f"{target.removesuffix('.weight')}.{last}"
        if pattern is None:
            plain[name] = target
        elif asked is name:
            groups.setdefault(target, []).append((name, pattern))
        else:
            plain[name] = name  # a quantised tensor that transformers would convert has no place
            lost[name] = target
    converters = _converters(model)
    conversions = tuple(
        Conversion(target, tuple(n for n, _ in group), tuple(p for _, p in group), converters[group[0][1]], model)
        for target, group in groups.items()
    )
    return Names(plain, conversions, lost)


def cannot_convert(parameter: str) -> str:
    """Return why no quantised tensor goes into a parameter that transformers converts, and what to take instead."""
    if "expert" in parameter:
        return "quantised experts are not supported yet: take a checkpoint whose experts are not quantised"
    return (
        "codes and scales cannot be converted: take a checkpoint that has the layers under the names of the model, as "
        "fp4dispatch.save_quantized writes them"
    )


def lost_when_saved(model: Any, names: Iterable[str]) -> str | None:
    """Return why transformers would not read these tensors back that its ``save_pretrained`` writes; None if it would.

    It converts some when it saves, and renames others by patterns for ``weight`` alone: the file would have the weight
    and its scales under names that lead to different modules.
    """
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = getattr(model, "_weight_conversions", None)
    if mapping is None:
        mapping = get_model_conversion_mapping(model, add_legacy=False)
    # As loading.revert_weight_conversion, which writes the tensors.
    reverse: list[Any] = [entry.reverse_transform() for entry in mapping[::-1]]
    converters = [entry for entry in reverse if isinstance(entry, loading.WeightConverter)]
    back = [[e for e in entries if isinstance(e, loading.WeightRenaming)] for entries in (reverse, mapping)]
    kind = type(model).__name__
    places: dict[str, str] = {}
    for name in names:
        if loading.apply_converters(name, converters)[1] is not None:
            return f"convert {name!r} of {kind} into another tensor, and quantised weights without their scales"
        saved = loading.apply_renamings(name, back[0])
        read = loading.apply_renamings(saved, back[1])
        module = read.rpartition(".")[0]
        if places.setdefault(name.rpartition(".")[0], module) != module:
            return f"save {name!r} of {kind} as {saved!r}, and read that as {read!r}, apart from the rest of the layer"
    return None


def never_stored(model: nn.Module) -> set[str]:
    """Return the parameters and buffers that a model of transformers does not save: it computes them.

    Only the exact names of ``_keys_to_ignore_on_save`` count. ``_keys_to_ignore_on_load_missing`` has patterns too, for
    whole parts of models that a checkpoint may lack.
    """
    found = set()
    for prefix, module in model.named_modules():
        for name in getattr(module, "_keys_to_ignore_on_save", None) or ():
            found.add(f"{prefix}.{name}" if prefix else name)
    return found


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort experts by number, as transformers does: this is their order in the fused tensor."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _renamer(model: Any, known: dict[str, Any]) -> Callable[[str], tuple[str, str | None]]:
    prefix = model.base_model_prefix
    try:
        from transformers import core_model_loading as loading
    except ImportError:
        return lambda name: (_rename_v4(model, name, known), None)
    mapping = _mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]

    def rename(name: str) -> tuple[str, str | None]:
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:  # as transformers: better left as it is
            return loading.rename_source_key(name, [], [], prefix, known)
        return target, pattern

    return rename


def _converters(model: Any) -> dict[str, Any]:
    from transformers import core_model_loading as loading

    converters = [entry for entry in _mapping(model) if isinstance(entry, loading.WeightConverter)]
    return {pattern: converter for converter in converters for pattern in converter.source_patterns}


def _mapping(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def _rename_v4(model: Any, name: str, known: dict[str, Any]) -> str:
    """Rename as transformers 4 does: regular expressions at the class, and the base model's prefix."""
    renamed = name
    for pattern, target in (getattr(model, "_checkpoint_conversion_mapping", None) or {}).items():
        renamed, count = re.subn(pattern, target, renamed)
        if count:
            break
    prefix = f"{model.base_model_prefix}."
    for candidate in (renamed, renamed.removeprefix(prefix), prefix + renamed, name):
        if candidate in known:
            return candidate
    return renamed
