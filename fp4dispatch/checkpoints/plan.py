"""What loading a checkpoint into a model will do: for each tensor its source and its place."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fp4dispatch.checkpoints.files.reader import FLOATS, Checkpoint, TensorInfo
from fp4dispatch.checkpoints.hf_names import Conversion, Names, cannot_convert
from fp4dispatch.checkpoints.schemes import Scheme
from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.problem import Activation


@dataclass(frozen=True)
class Shard:
    """One stored layer: ``tensors`` by name below ``name``, and its rows."""

    name: str
    tensors: dict[str, TensorInfo]
    rows: int


@dataclass(frozen=True)
class LayerPlan:
    """A linear layer that is stored quantised.

    ``bias`` holds one tensor per shard, or none. ``activation`` is the activation format of the checkpoint. ``keep``
    tells why the model's layer cannot be quantised; then its weight is dequantised.
    """

    names: tuple[str, ...]
    module: nn.Linear | QuantizedLinear
    scheme: Scheme
    shards: tuple[Shard, ...]
    bias: tuple[TensorInfo, ...]
    activation: Activation = "any"
    keep: str = ""


@dataclass(frozen=True)
class SlotPlan:
    """A parameter or buffer that is filled as it is; ``sources`` are concatenated along dimension 0."""

    names: tuple[str, ...]
    slots: tuple[tuple[dict[str, Any], str], ...]
    old: torch.Tensor
    sources: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class ConversionPlan:
    """Stored tensors that become parameters of another shape; ``targets`` holds these by name."""

    conversion: Conversion
    targets: dict[str, SlotPlan] = field(default_factory=dict)


@dataclass
class Plan:
    """Everything that loading will do."""

    layers: list[LayerPlan] = field(default_factory=list)
    kept: dict[str, SlotPlan] = field(default_factory=dict)
    """Places of the weights of layers with ``keep``, by the layer's first name."""
    slots: list[SlotPlan] = field(default_factory=list)
    conversions: list[ConversionPlan] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    unquantised: list[str] = field(default_factory=list)
    """Stored layers that are not quantised, against the configuration (not strict)."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    kv_cache: list[str] = field(default_factory=list)

    def refuse_orphans(self, checkpoint: Checkpoint, names: Names) -> None:
        """Refuse to leave a parameter unfilled whose module the checkpoint has tensors of, under other names.

        Tools store experts one by one, under names that transformers may not know. The model's experts would keep
        random values.

        Raises
        ------
        CheckpointUnsupportedError
            The tensors are quantised.
        CheckpointError
            They are not.
        """
        for missing in self.missing:
            module = missing.rpartition(".")[0]
            experts = re.match(r"((?:.*\.)?experts)\.\d+\.", missing)  # the checkpoint may have all in one tensor
            inside = tuple(f"{name}." for name in (module, experts and experts[1]) if name)
            there = [
                checkpoint[name]
                for name in self.unexpected
                if names.lost.get(name) == missing or (inside and names.plain.get(name, name).startswith(inside))
            ]
            if not there:
                continue
            quantised = next((info for info in there if info.dtype not in FLOATS), None)
            info = quantised or there[0]
            found = f"{info.file}: the model needs {missing!r}; the checkpoint has {info.name!r} ({info}) in its place"
            if quantised:
                raise CheckpointUnsupportedError(f"{found}, and {cannot_convert(missing)}")
            raise CheckpointError(
                f"{found}, a name that transformers does not put there: give the tensors the names that the "
                "unquantised checkpoint of the model has"
            )


def linears(model: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.Linear | QuantizedLinear]]:
    """Yield every linear layer once, with all names that it has."""
    names: dict[int, list[str]] = defaultdict(list)
    modules: dict[int, nn.Linear | QuantizedLinear] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.Linear, QuantizedLinear)) and name:
            names[id(module)].append(name)
            modules[id(module)] = module
    for key, module in modules.items():
        yield tuple(names[key]), module


def places(
    model: nn.Module, replaced: set[int]
) -> Iterator[tuple[tuple[str, ...], tuple[tuple[dict[str, Any], str], ...], torch.Tensor, bool]]:
    """Yield every parameter and buffer outside the replaced layers once: names, places, the tensor, persistent."""
    names: dict[int, list[str]] = defaultdict(list)
    held: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
    tensors: dict[int, tuple[torch.Tensor, bool]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if id(module) in replaced:
            continue
        if isinstance(module, QuantizedLinear):
            module._restore()  # a tensor that the layer dropped has its place too
        for slots in (module._parameters, module._buffers):
            for key, tensor in slots.items():
                if tensor is None:
                    continue
                names[id(tensor)].append(f"{prefix}.{key}" if prefix else key)
                held[id(tensor)].append((slots, key))
                tensors[id(tensor)] = (tensor, key not in module._non_persistent_buffers_set)
    for number, (tensor, persistent) in tensors.items():
        yield tuple(names[number]), tuple(held[number]), tensor, persistent
