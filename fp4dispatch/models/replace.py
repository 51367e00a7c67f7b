"""``replace_linears``: quantise a model's linear layers in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from fp4dispatch.dispatch.request import check_request
from fp4dispatch.errors import InputError
from fp4dispatch.formats import Calibration, check_calibration
from fp4dispatch.models.choose_layers import EXCLUDE, FORMATS, PROBLEM, Patterns, choose_layers
from fp4dispatch.models.model_report import decision_text
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replacing.fusion import fusion_groups, shared_scale
from fp4dispatch.models.replacing.replaceable import carry_over, leftover, model_bytes, why_no_linear
from fp4dispatch.models.warming import warmup
from fp4dispatch.problem import Activation, Problem
from fp4dispatch.run import prebuild, routes
from fp4dispatch.run.prebuild import Ask

__all__ = ["FORMATS", "LayerReport", "ReplaceReport", "replace_linears", "warmup"]

_log = logging.getLogger("fp4dispatch")


@dataclass(frozen=True)
class LayerReport:
    """One replaced layer. ``backend`` has the choice for each range of M; ``rule`` and ``reason`` tell why."""

    name: str
    format: str
    n: int
    k: int
    bytes_before: int
    bytes_after: int
    backend: str
    rule: str
    reason: str


@dataclass(frozen=True)
class LeftParameter:
    """A parameter with two or more dimensions that is not in a linear layer. It is not changed."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str


@dataclass(frozen=True)
class ReplaceReport:
    """What :func:`replace_linears` did; ``str()`` is a table.

    Parameters
    ----------
    layers
        The layers that are quantised now.
    skipped
        (name, reason) of each linear layer that was left alone.
    others
        Other weights that were not quantised: experts in one tensor, convolutions, embeddings, ``Conv1D`` of GPT-2.
    model_bytes_before, model_bytes_after
        Bytes of all parameters and buffers of the model.
    notes
        Notes for the caller, e.g. an exclude pattern that matches nothing.
    """

    layers: tuple[LayerReport, ...]
    skipped: tuple[tuple[str, str], ...]
    others: tuple[LeftParameter, ...] = ()
    model_bytes_before: int = 0
    model_bytes_after: int = 0
    notes: tuple[str, ...] = ()

    @property
    def bytes_before(self) -> int:
        """Bytes of the replaced layers before."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of the replaced layers now, backend layouts included."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def saved_percent(self) -> float:
        """Reduction of the whole model's bytes in percent. Negative if backend layouts made it larger."""
        return 100 * (1 - self.model_bytes_after / self.model_bytes_before) if self.model_bytes_before else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "others": [asdict(other) for other in self.others],
            "model_bytes_before": self.model_bytes_before,
            "model_bytes_after": self.model_bytes_after,
            "saved_percent": self.saved_percent,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        head = ("layer", "format", "N x K", "MB before", "after", "backend", "why")
        rows = [
            (
                layer.name,
                layer.format,
                f"{layer.n} x {layer.k}",
                f"{layer.bytes_before / 1e6:.2f}",
                f"{layer.bytes_after / 1e6:.2f}",
                layer.backend,
                f"{layer.rule}: {layer.reason}" if layer.rule else layer.reason,
            )
            for layer in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
        ]
        lines += self.totals()
        lines += [f"  left alone: {name}: {reason}" for name, reason in self.skipped]
        lines += [f"  left alone: {o.name} ({o.nbytes / 1e6:.2f} MB): {o.reason}" for o in self.others]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def totals(self) -> list[str]:
        """Return the lines with the sums: of the layers, and of the whole model."""
        left = f"{len(self.skipped)} linear layers left alone"
        if self.others:
            left += f", and {len(self.others)} other parameters ({sum(o.nbytes for o in self.others) / 1e6:.2f} MB)"
        return [
            f"{len(self.layers)} layers: {self.bytes_before / 1e6:.2f} MB -> {self.bytes_after / 1e6:.2f} MB; {left}",
            f"whole model: {self.model_bytes_before / 1e6:.2f} MB -> {self.model_bytes_after / 1e6:.2f} MB "
            f"({self.saved_percent:.1f} % saved)",
        ]


def replace_linears(
    model: nn.Module,
    config: str | Mapping[str, str | None] = "nvfp4",
    include: Patterns = ("*",),
    exclude: Patterns = EXCLUDE,
    *,
    activation: Activation = "any",
    backend: str | None = None,
    calibrate: Calibration = "max",
    progress: Callable[[int, int, str], None] | None = None,
) -> ReplaceReport:
    """Replace the ``nn.Linear`` modules of a model by quantised ones, in place, all or nothing.

    All new layers are made before the first one replaces an old one. So memory must hold the quantised weights beside
    the originals, and an error leaves the model unchanged. Forward hooks and attributes move to the new module. A
    module that is used at several places stays shared. The report lists the layers that were not replaced, and why.

    Parameters
    ----------
    model
        Any module that contains ``nn.Linear``. Not replaced: subclasses of ``nn.Linear``, layers whose weight other
        code of the model reads (``wo`` of T5, ``dt_proj`` of Mamba), and the other cases of
        :func:`fp4dispatch.models.replacing.replaceable.why_left`.
    config
        ``nvfp4``, ``fp8`` (one scale a tensor), ``fp8_row`` or ``fp8_block``; or a mapping from patterns to these.
        The first match counts. None: do not quantise. Each pattern must match a linear layer.
    include, exclude
        Patterns of module names: globs, or regular expressions behind ``re:`` that match from the start, as in
        compressed-tensors. ``lm_head`` is excluded by default. Each ``include`` pattern must match a linear layer.
        The report's ``notes`` list each ``exclude`` pattern that matches nothing.
    activation, backend
        Pinned for every layer, see :class:`~fp4dispatch.models.linear.FP4Linear`.
    calibrate
        How NVFP4 block scales are chosen. ``max``: the largest magnitude of a block maps to 6. ``mse``: the scale of
        least squared error, from a search of about nine times the work
        (:func:`fp4dispatch.formats.nvfp4_quantize_mse`).
    progress
        Called with (done, total, name) before each layer and once at the end.

    Returns
    -------
    ReplaceReport
        Layers, formats, bytes and backends, what was left alone, with the reason, and the bytes of the whole model.

    Raises
    ------
    InputError
        For an argument of a wrong type, an unknown format or calibration, a calibration that no layer could use, a
        pattern that is no regular expression or (``include``, ``config``) names no linear layer, a model without any
        ``nn.Linear``, or a model on the meta device.
    FormatError
        If a weight holds NaN or Inf; the message names the layer.
    UnknownBackendError, SettingsError
        If the backend name (argument or environment) or the value of a variable is unknown.
    BackendUnsupportedError, NoBackendError
        If the backend never runs such layers, or if a layer on a GPU cannot run there. For a layer on a CPU this is
        only reported: it may move to a GPU later.
    """
    chosen = choose_layers(model, config, include, exclude)
    for fmt in {config} if isinstance(config, str) else set(config.values()) - {None}:
        check_request(PROBLEM[str(fmt)][0], backend)
    plan = list(chosen.layers)
    asked = config.values() if isinstance(config, Mapping) else [config]
    check_calibration(calibrate, nvfp4="nvfp4" in asked)
    before = model_bytes(model)
    new: dict[int, QuantizedLinear] = {}
    reports = []
    prebuild.together(_asks([(linear, fmt) for _, linear, fmt in plan], activation, backend))
    shared = _shared_scales(plan)
    searched: dict[str, Any] = {"calibrate": calibrate} if calibrate != "max" else {}
    for done, (name, linear, fmt) in enumerate(plan):
        if progress:
            progress(done, len(plan), name)
        if id(linear) not in new:
            scales = shared.get(name, {}) | (searched if fmt == "nvfp4" else {})
            new[id(linear)] = _quantise(name, linear, fmt, activation, backend, scales)
            reports.append(_report(name, linear, fmt, new[id(linear)]))
    for name, linear, _ in plan:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new[id(linear)])
    if progress:
        progress(len(plan), len(plan), "")
    others = tuple(
        LeftParameter(key, tuple(p.shape), p.numel() * p.element_size(), why_no_linear(key, owner, p))
        for key, owner, p in leftover(model)
    )
    report = ReplaceReport(tuple(reports), chosen.skipped, others, before, model_bytes(model), chosen.notes)
    if not plan:
        _log.warning("replace_linears: nothing was replaced in %s; %s", type(model).__name__, report)
    return report


def _asks(plan: list[tuple[nn.Linear, str]], activation: Activation, backend: str | None) -> list[Ask]:
    """Return the prebuild requests of the new layers."""
    asks = []
    for linear, fmt in plan:
        op, scaling = PROBLEM[fmt]
        n, k = linear.weight.shape
        dtype = routes.OUT_DTYPE[linear.weight.dtype]
        problem = Problem(op, 1, n, k, activation, scaling, dtype, linear.bias is not None)
        asks.append(Ask(problem, backend, routes.gpu_of(linear.weight.device)))
    return asks


def _shared_scales(plan: list[tuple[str, nn.Linear, str]]) -> dict[str, dict[str, Any]]:
    """Return the shared scales of layers that engines fuse: the model may be saved for such an engine."""
    linears = {name: (linear, fmt) for name, linear, fmt in plan if not linear.weight.is_meta}
    shared: dict[str, dict[str, Any]] = {}
    for names in fusion_groups({name: (fmt, linear.in_features) for name, (linear, fmt) in linears.items()}):
        scaling = PROBLEM[linears[names[0]][1]][1]
        scale = shared_scale((linears[name][0].weight for name in names), scaling)
        if scale is not None:
            shared |= {name: {"global_scale" if scaling == "nvfp4" else "scale": scale} for name in names}
    return shared


def _quantise(
    name: str, linear: nn.Linear, fmt: str, activation: Activation, backend: str | None, scales: dict[str, Any]
) -> QuantizedLinear:
    if linear.weight.is_meta:
        raise InputError(f"{name} is on the meta device and has no weights to quantise: load them first")
    layer = FORMATS[fmt](linear, activation=activation, backend=backend, name=name, **scales)
    if layer.weight.is_cuda:
        layer.bind()
    carry_over(linear, layer)
    return layer


def _report(name: str, linear: nn.Linear, fmt: str, layer: QuantizedLinear) -> LayerReport:
    before = sum(p.numel() * p.element_size() for p in linear.parameters())
    backend, rule, reason = decision_text(layer)
    return LayerReport(name, fmt, layer.out_features, layer.in_features, before, layer.nbytes(), backend, rule, reason)
