"""``report``: what the layers of a model are, which backends they use and why, and what was left alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from fp4dispatch.errors import Fp4DispatchError
from fp4dispatch.formats.checks import check_module
from fp4dispatch.models.fusing.parents import shards_in
from fp4dispatch.models.linear import FP8Linear
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replacing.replaceable import leftover, model_bytes, ties, why_left, why_no_linear

LARGE = 1 << 20
"""Bytes from which on a parameter that was left alone is named."""


@dataclass(frozen=True)
class LayerGroup:
    """Quantised layers that differ only in the numbers of their blocks.

    Parameters
    ----------
    name
        Their name, with ``*`` in place of the numbers.
    count
        How many they are.
    format
        ``nvfp4``, or ``fp8`` with its scaling.
    n, k
        Their sizes.
    activation
        The activation format that the policy may choose at most.
    backend
        The choice for each range of M.
    rule, reason
        Why.
    nbytes
        Bytes of them all, backend layouts included.
    dropped_bytes
        Bytes of stored tensors that they do not hold, as a backend layout holds the same bits.
    shards
        The layers that were fused into each (:func:`fp4dispatch.fuse`), by the last part of their names.
    """

    name: str
    count: int
    format: str
    n: int
    k: int
    activation: str
    backend: str
    rule: str
    reason: str
    nbytes: int
    dropped_bytes: int = 0
    shards: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftAlone:
    """Parameters that are not quantised and differ only in the numbers of their blocks; ``nbytes`` is of them all."""

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    reason: str


@dataclass(frozen=True)
class ModelReport:
    """What :func:`report` found. ``str()`` is a table, and rich and notebooks show one.

    Parameters
    ----------
    groups
        The quantised layers.
    left
        Large parameters that are not quantised.
    small_bytes
        Bytes of the other parameters and buffers.
    model_bytes
        Bytes of all parameters and buffers. Shared memory counts once.
    """

    groups: tuple[LayerGroup, ...]
    left: tuple[LeftAlone, ...]
    small_bytes: int
    model_bytes: int

    @property
    def dropped_bytes(self) -> int:
        """Bytes of stored tensors that no layer holds, as a backend layout holds the same bits."""
        return sum(group.dropped_bytes for group in self.groups)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can carry."""
        return {
            "groups": [asdict(group) | {"shards": list(group.shards)} for group in self.groups],
            "left": [asdict(left) | {"shape": list(left.shape)} for left in self.left],
            "small_bytes": self.small_bytes,
            "model_bytes": self.model_bytes,
            "dropped_bytes": self.dropped_bytes,
        }

    def to_html(self) -> str:
        """Return an HTML document with the tables."""
        console = _console(record=True)
        console.print(self)
        return str(console.export_html(inline_styles=True))

    def _repr_html_(self) -> str:
        return self.to_html()

    def __str__(self) -> str:
        console = _console(record=False)
        console.print(self)
        return str(console.file.getvalue()).rstrip()

    def __rich__(self) -> Any:
        from rich.console import Group

        return Group(*_tables(self))


def report(model: nn.Module, *, large: int = LARGE) -> ModelReport:
    """Report on a model with ``FP4Linear`` and ``FP8Linear`` layers. Layers that are not bound yet are bound.

    Parameters
    ----------
    model
        Any module.
    large
        Bytes from which on a parameter that was left alone is named; 0 names all.

    Returns
    -------
    ModelReport
        Groups of layers with their backends, the parameters that were left alone, with the reason, and bytes.

    Raises
    ------
    InputError
        ``model`` is no module.
    CaptureError
        During CUDA graph capture, if a layer is not bound.
    """
    check_module("model", model)
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, QuantizedLinear)]
    fused = {name: tuple(shard.rpartition(".")[2] for shard in shards) for name, shards in shards_in(model).items()}
    groups = grouped([_layer(name, layer, fused.get(name, ())) for name, layer in layers], ("nbytes", "dropped_bytes"))
    found = _left(model)
    left = grouped([one for one in found if one.nbytes >= large], ("nbytes",))
    total = model_bytes(model)
    named = sum(group.nbytes for group in groups) + sum(one.nbytes for one in left)
    return ModelReport(tuple(groups), tuple(left), max(0, total - named), total)


def decision_text(layer: QuantizedLinear) -> tuple[str, str, str]:
    """Return backend, rule and reason of a layer. A layer that cannot run here has its error as the reason."""
    if layer.offload is not None:
        reason = f"offloaded to {layer.offload.place}: moved to {layer.offload.device} for each call"
        return layer.offload.backend or "chosen at the first call", "", reason
    try:
        last = layer.decisions()[-1][1]
    except Fp4DispatchError as error:
        return "none on this device", "", str(error).splitlines()[0]
    rule = last.rule.id if last.rule else ""
    asked = "" if last.requested == "auto" else f"{last.requested} was named by {last.requested_by}"
    reason = f"{last.rule.because} ({last.rule.source})" if last.rule else asked or "; ".join(last.warnings)
    return layer.backend_text(), rule, reason


def _layer(name: str, layer: QuantizedLinear, shards: tuple[str, ...]) -> LayerGroup:
    backend, rule, reason = decision_text(layer)
    kind = f"fp8 {layer.scaling}" if isinstance(layer, FP8Linear) else "nvfp4"
    size = (layer.out_features, layer.in_features)
    held, dropped = layer.nbytes(), layer.dropped_nbytes()
    return LayerGroup(pattern_of(name), 1, kind, *size, layer.activation, backend, rule, reason, held, dropped, shards)


def _left(model: nn.Module) -> list[LeftAlone]:
    """Return the parameters of at least two dimensions that are not quantised, each once."""
    why, tied = why_left(model), ties(model)
    seen: set[int] = set()
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.LazyLinear):
            continue  # has no size yet
        if isinstance(module, nn.Linear) and id(module.weight) not in seen:
            seen.add(id(module.weight))
            shared = f"its weight is tied to {tied[id(module)]}" if id(module) in tied else ""
            reason = why.get(id(module)) or shared or "a linear layer that was excluded, or is stored unquantised"
            found.append(_parameter(f"{name}.weight" if name else "weight", module.weight, reason))
    for name, owner, parameter in leftover(model):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found.append(_parameter(name, parameter, why_no_linear(name, owner, parameter)))
    return found


def _parameter(name: str, parameter: torch.Tensor, reason: str) -> LeftAlone:
    dtype = str(parameter.dtype).removeprefix("torch.")
    nbytes = parameter.numel() * parameter.element_size()
    return LeftAlone(pattern_of(name), 1, tuple(parameter.shape), dtype, nbytes, reason)


def pattern_of(name: str) -> str:
    """Return a name with ``*`` in place of the numbers of blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def grouped(items: Iterable[Any], sums: Sequence[str]) -> list[Any]:
    """Add up items that are equal but for their counts and bytes."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        values = asdict(item)
        key = tuple((name, value) for name, value in values.items() if name not in (*sums, "count"))
        groups.setdefault(key, []).append(item)
    return [
        type(same[0])(**(asdict(same[0]) | {"count": len(same)} | {s: sum(getattr(i, s) for i in same) for s in sums}))
        for same in groups.values()
    ]


def _console(*, record: bool) -> Any:
    import io

    from rich.console import Console

    return Console(file=io.StringIO(), record=record, width=160, color_system=None if not record else "truecolor")


def _tables(found: ModelReport) -> list[Any]:
    from rich.markup import escape
    from rich.table import Table

    layers = Table(title=f"{sum(group.count for group in found.groups)} quantised layers", title_justify="left")
    for head in ("layers", "", "format", "N x K", "activation", "MB", "backend", "why"):
        layers.add_column(head, justify="right" if head in ("", "MB") else "left", overflow="fold")
    for group in found.groups:
        why = f"{group.rule}: {group.reason}" if group.rule else group.reason
        size, mb = f"{group.n} x {group.k}", f"{group.nbytes / 1e6:.2f}"
        name = f"{group.name} = {' + '.join(group.shards)}" if group.shards else group.name
        cells = (name, str(group.count), group.format, size, group.activation, mb, group.backend, why)
        layers.add_row(*map(escape, cells))
    left = Table(title="left alone", title_justify="left")
    for head in ("parameters", "", "shape", "dtype", "MB", "why"):
        left.add_column(head, justify="right" if head in ("", "MB") else "left", overflow="fold")
    for one in found.left:
        mb = f"{one.nbytes / 1e6:.2f}"
        left.add_row(*map(escape, (one.name, str(one.count), str(list(one.shape)), one.dtype, mb, one.reason)))
    total = (
        f"whole model: {found.model_bytes / 1e6:.2f} MB, {found.small_bytes / 1e6:.2f} MB of them in small parameters"
    )
    if found.dropped_bytes:
        total += (
            f"\nheld once: {found.dropped_bytes / 1e6:.2f} MB of stored tensors are in the layout of the kernels alone"
        )
    return [layers, *([left] if found.left else []), total]
