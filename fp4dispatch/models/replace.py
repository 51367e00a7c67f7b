"""``replace_linears``: quantise a model's linear layers in place, one at a time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from fp4dispatch.dispatch.request import check_request
from fp4dispatch.errors import InputError
from fp4dispatch.formats import Calibration, check_calibration
from fp4dispatch.formats.amax import largest
from fp4dispatch.machine.progress import Progress
from fp4dispatch.models.choose_layers import EXCLUDE, FORMATS, PROBLEM, Patterns, choose_layers
from fp4dispatch.models.model_report import decision_text, pattern_of
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replacing.fusion import fusion_groups, shared_scale
from fp4dispatch.models.replacing.replaceable import carry_over, leftover, model_bytes, why_no_linear
from fp4dispatch.models.warming import warmup
from fp4dispatch.problem import Activation, Problem
from fp4dispatch.run import prebuild, routes
from fp4dispatch.run.prebuild import Ask

__all__ = ["FORMATS", "LayerReport", "ReplaceReport", "replace_linears", "warmup"]

_DEFAULT = "nvfp4"
_log = logging.getLogger("fp4dispatch")

_Planned = tuple[str, nn.Linear, str]
"""Name, layer and format."""


@dataclass(frozen=True)
class LayerReport:
    """One replaced layer. ``backend`` has the choice for each range of M; ``rule`` and ``reason`` tell why.

    ``bytes_after`` counts all that it holds now, backend layouts included. ``bytes_dropped`` are of stored tensors that
    it does not hold beside their layout.
    """

    name: str
    format: str
    n: int
    k: int
    bytes_before: int
    bytes_after: int
    backend: str
    rule: str
    reason: str
    bytes_dropped: int = 0


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
    def bytes_dropped(self) -> int:
        """Bytes of stored tensors that the layers do not hold, as a backend layout holds the same bits."""
        return sum(layer.bytes_dropped for layer in self.layers)

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
            "bytes_dropped": self.bytes_dropped,
            "others": [asdict(other) for other in self.others],
            "model_bytes_before": self.model_bytes_before,
            "model_bytes_after": self.model_bytes_after,
            "saved_percent": self.saved_percent,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """Return a table in which equal layers, whose names differ only in numbers, are one row."""
        head = ("layers", "", "format", "N x K", "MB before", "after", "backend", "why")
        groups = Counter[LayerReport]()
        for layer in self.layers:
            groups[replace(layer, name=pattern_of(layer.name))] += 1
        rows = [
            (
                group.name,
                str(count),
                group.format,
                f"{group.n} x {group.k}",
                f"{count * group.bytes_before / 1e6:.2f}",
                f"{count * group.bytes_after / 1e6:.2f}",
                group.backend,
                f"{group.rule}: {group.reason}" if group.rule else group.reason,
            )
            for group, count in groups.items()
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
        ]
        lines += self.totals()
        left = Counter((pattern_of(name), reason) for name, reason in self.skipped)
        lines += [f"  left alone: {name}: {reason}{_times(count)}" for (name, reason), count in left.items()]
        others = Counter((pattern_of(o.name), o.nbytes, o.reason) for o in self.others)
        for (name, nbytes, reason), count in others.items():
            lines.append(f"  left alone: {name} ({count * nbytes / 1e6:.2f} MB): {reason}{_times(count)}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def totals(self) -> list[str]:
        """Return the lines with the sums: of the layers, and of the whole model."""
        left = f"{len(self.skipped)} linear layers left alone"
        if self.others:
            left += f", and {len(self.others)} other parameters ({sum(o.nbytes for o in self.others) / 1e6:.2f} MB)"
        once = f"held once: {self.bytes_dropped / 1e6:.2f} MB of stored tensors are in the layout of the kernels alone"
        return [
            f"{len(self.layers)} layers: {self.bytes_before / 1e6:.2f} MB -> {self.bytes_after / 1e6:.2f} MB; {left}",
            f"whole model: {self.model_bytes_before / 1e6:.2f} MB -> {self.model_bytes_after / 1e6:.2f} MB "
            f"({self.saved_percent:.1f} % saved)",
            *([once] if self.bytes_dropped else []),
        ]


def replace_linears(
    model: nn.Module,
    config: str | Mapping[str, str | None] = "nvfp4",
    include: Patterns = ("*",),
    exclude: Patterns = EXCLUDE,
    *,
    activation: Activation = "any",
    backend: str | None = None,
    keep_stored: bool = False,
    calibrate: Calibration = "max",
    progress: Callable[[int, int, str], None] | None = None,
    format: str | Mapping[str, str | None] | None = None,
) -> ReplaceReport:
    """Replace the ``nn.Linear`` modules of a model by quantised ones, in place, one at a time.

    First everything is checked: names, all weights, and one layer of each kind on its device. An error of these checks
    leaves the model unchanged. Then each new layer replaces the old one as soon as it is made, so memory must hold the
    model and one layer more. If that is interrupted or runs out of memory, each layer is the old one or the new one, a
    WARNING says how many are new, and another call replaces the rest. Forward hooks and attributes move to the new
    module. A module that is used at several places stays shared. The report lists the layers that were not replaced,
    and why.

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
    keep_stored
        Whether NVFP4 layers keep their stored tensors beside a layout that holds the same bits, see
        :class:`~fp4dispatch.models.linear.FP4Linear`.
    calibrate
        How NVFP4 block scales are chosen. ``max``: the largest magnitude of a block maps to 6. ``mse``: the scale of
        least squared error, from a search of about nine times the work
        (:func:`fp4dispatch.formats.nvfp4_quantize_mse`).
    progress
        Called with (done, total, name) before each layer and once at the end. None: a bar on a terminal; elsewhere a
        line on stderr every ten seconds, so none for short work.
    format
        Another name of ``config``; give one of the two.

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
    if format is not None:
        if config != _DEFAULT:
            raise InputError(f"config={config!r} and format={format!r} mean the same: give one of them")
        config = format
    chosen = choose_layers(model, config, include, exclude)
    for fmt in {config} if isinstance(config, str) else set(config.values()) - {None}:
        check_request(PROBLEM[str(fmt)][0], backend)
    asked = config.values() if isinstance(config, Mapping) else [config]
    check_calibration(calibrate, nvfp4="nvfp4" in asked)
    skipped, notes, plan = chosen.skipped, chosen.notes, list(chosen.layers)
    del chosen  # each old layer is to be freed as soon as it is replaced
    before = model_bytes(model)
    options = {"activation": activation, "backend": backend, "keep_stored": keep_stored}
    prebuild.together(_asks([(linear, fmt) for _, linear, fmt in plan], activation, backend))
    shared = _shared_scales(plan)
    if calibrate != "max":
        for name, _, fmt in plan:
            if fmt == "nvfp4":
                shared.setdefault(name, {})["calibrate"] = calibrate
    _check(plan, options, shared)
    with ExitStack() as shown:
        reports = _replace(model, plan, options, shared, progress or _bar(shown, len(plan)))
    others = tuple(
        LeftParameter(key, tuple(p.shape), p.numel() * p.element_size(), why_no_linear(key, owner, p))
        for key, owner, p in leftover(model)
    )
    report = ReplaceReport(tuple(reports), skipped, others, before, model_bytes(model), notes)
    if not reports:
        _log.warning("replace_linears: nothing was replaced in %s; %s", type(model).__name__, report)
    return report


def _times(count: int) -> str:
    return f" ({count} of these)" if count > 1 else ""


def _bar(shown: ExitStack, total: int) -> Callable[[int, int, str], None]:
    """Return what shows the progress until ``shown`` is closed."""
    bar = shown.enter_context(Progress("quantising", total, unit="layers"))
    return lambda done, total, name: bar.update(done, total, note=name)


def _check(plan: list[_Planned], options: dict[str, Any], shared: dict[str, dict[str, Any]]) -> None:
    """Raise what would stop the replacing: weights that are not finite, and kinds of layers that cannot run here."""
    kinds = set()
    for name, linear, fmt in plan:
        weight, bias = linear.weight, linear.bias
        finite = weight.is_meta or bool(torch.isfinite(largest(weight)))
        shape = (fmt, weight.shape, weight.dtype, weight.device, None if bias is None else (bias.dtype, bias.shape))
        if not finite or weight.is_meta or (weight.is_cuda and shape not in kinds):
            _quantise(name, linear, fmt, options, shared)  # raises, or shows that such a layer runs
        kinds.add(shape)


def _replace(
    model: nn.Module,
    plan: list[_Planned],
    options: dict[str, Any],
    shared: dict[str, dict[str, Any]],
    progress: Callable[[int, int, str], None],
) -> list[LayerReport]:
    """Replace each layer at all its places, and free it. Empties ``plan``."""
    reports: list[LayerReport] = []
    places: dict[int, list[str]] = {}
    for name, linear, _ in plan:
        places.setdefault(id(linear), []).append(name)
    count = len(plan)
    try:
        for done in range(count):
            name, linear, fmt = plan[0]
            progress(done, count, name)
            if id(linear) in places:
                new = _quantise(name, linear, fmt, options, shared)
                carry_over(linear, new)
                reports.append(_report(name, linear, fmt, new))
                for place in places.pop(id(linear)):
                    parent, _, child = place.rpartition(".")
                    setattr(model.get_submodule(parent), child, new)
                del new
            plan.pop(0)
            del linear
    except BaseException:
        if reports:
            _log.warning(
                "replace_linears stopped before %s: %d layers are replaced, %d are not; another call replaces these",
                plan[0][0] if plan else "the end", len(reports), len(places),
            )  # fmt: skip
        raise
    progress(count, count, "")
    return reports


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
    name: str, linear: nn.Linear, fmt: str, options: dict[str, Any], shared: dict[str, dict[str, Any]]
) -> QuantizedLinear:
    if linear.weight.is_meta:
        raise InputError(f"{name} is on the meta device and has no weights to quantise: load them first")
    layer = FORMATS[fmt](linear, name=name, **options, **shared.get(name, {}))
    if layer.device.type == "cuda":
        layer.bind()
    return layer


def _report(name: str, linear: nn.Linear, fmt: str, layer: QuantizedLinear) -> LayerReport:
    before = sum(p.numel() * p.element_size() for p in linear.parameters())
    backend, rule, reason = decision_text(layer)
    after, dropped = layer.nbytes(), layer.dropped_nbytes()
    return LayerReport(name, fmt, layer.out_features, layer.in_features, before, after, backend, rule, reason, dropped)
