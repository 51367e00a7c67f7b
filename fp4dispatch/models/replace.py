"""``replace_linears``: quantise a model's linear layers in place, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fp4dispatch.dispatch.request import check_request
from fp4dispatch.errors import FormatError, InputError
from fp4dispatch.formats import Calibration, check_calibration
from fp4dispatch.formats.amax import largest
from fp4dispatch.machine import log as _log
from fp4dispatch.machine.progress import Progress
from fp4dispatch.models.choose_layers import EXCLUDE, FORMATS, PROBLEM, Patterns, choose_layers
from fp4dispatch.models.fusing.fuse import NOTHING_FUSED, FusedLayer
from fp4dispatch.models.fusing.fuse import fuse as _fuse
from fp4dispatch.models.model_report import decision_text
from fp4dispatch.models.quantized_linear import LayerOptions, QuantizedLinear
from fp4dispatch.models.replace_report import LayerReport, LeftParameter, ReplaceReport
from fp4dispatch.models.replacing.fusion import fusion_groups, shared_scale
from fp4dispatch.models.replacing.replaceable import (
    carry_over,
    leftover,
    model_bytes,
    models_with_ties,
    sizes,
    untie,
    why_no_linear,
)
from fp4dispatch.models.warming import warmup
from fp4dispatch.problem import Activation, Problem
from fp4dispatch.run import prebuild, routes
from fp4dispatch.run.prebuild import Ask

__all__ = ["FORMATS", "LayerReport", "ReplaceReport", "replace_linears", "warmup"]

_DEFAULT = "nvfp4"

_Planned = tuple[str, nn.Linear, str]
"""Name, layer and format."""


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
    fuse: bool = False,
    lm_head: bool = False,
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
        compressed-tensors. By default the output head (``lm_head``, or what ``get_output_embeddings`` of a transformers
        model returns) and the routers of mixtures of experts are excluded
        (:data:`~fp4dispatch.models.choose_layers.EXCLUDE`). Each ``include`` pattern must match a linear layer. The
        report's ``notes`` list each ``exclude`` pattern that matches nothing.
    activation, backend
        Pinned for every layer, see :class:`~fp4dispatch.models.linear.FP4Linear`.
    keep_stored
        Whether NVFP4 layers keep their stored tensors beside a layout that holds the same bits, see
        :class:`~fp4dispatch.models.linear.FP4Linear`.
    calibrate
        How NVFP4 block scales are chosen. ``max``: the largest magnitude of a block maps to 6. ``mse``: the scale of
        least squared error, from a search of about nine times the work
        (:func:`fp4dispatch.formats.nvfp4_quantize_mse`).
    fuse
        Whether to make q, k and v projections one layer then, and gate and up projections another, where that is exact
        (:func:`fp4dispatch.fuse`). The report has the fused layers, and those that were not, with the reason.
    lm_head
        Whether to quantise the output head too, which ``exclude`` leaves out by default. A head that is tied to the
        embedding is untied: the embedding keeps its weight, and a note tells the bytes of both.
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
        If a weight or bias holds NaN or Inf; the message names the layer.
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
    chosen = choose_layers(model, config, include, exclude, lm_head=lm_head)
    for fmt in {config} if isinstance(config, str) else set(config.values()) - {None}:
        check_request(PROBLEM[str(fmt)][0], backend)
    asked = config.values() if isinstance(config, Mapping) else [config]
    check_calibration(calibrate, nvfp4="nvfp4" in asked)
    skipped, notes, plan = chosen.skipped, chosen.notes, list(chosen.layers)
    del chosen  # each old layer is to be freed as soon as it is replaced
    before = model_bytes(model)
    options = LayerOptions(activation=activation, backend=backend, keep_stored=keep_stored)
    prebuild.together(_asks([(linear, fmt) for _, linear, fmt in plan], activation, backend))
    shared = _shared_scales(plan)
    if calibrate != "max":
        for name, _, fmt in plan:
            if fmt == "nvfp4":
                shared.setdefault(name, {})["calibrate"] = calibrate
    _check(plan, options, shared)
    with ExitStack() as shown:
        reports = _replace(model, plan, options, shared, progress or _bar(shown, len(plan)))
    fusing = _fuse(model) if fuse else NOTHING_FUSED
    reports = fusing.merged(reports, lambda fused, parts: _fused_report(model, fused, parts))
    others = tuple(
        LeftParameter(key, tuple(p.shape), p.numel() * p.element_size(), why_no_linear(key, owner, p))
        for key, owner, p in leftover(model)
    )
    report = ReplaceReport(tuple(reports), skipped, others, before, model_bytes(model), notes, fusing)
    if not reports:
        _log.warning("replace_linears: nothing was replaced in %s; %s", type(model).__name__, report)
    return report


def _bar(shown: ExitStack, total: int) -> Callable[[int, int, str], None]:
    """Return what shows the progress until ``shown`` is closed."""
    bar = shown.enter_context(Progress("quantising", total, unit="layers"))
    return lambda done, total, name: bar.update(done, total, note=name)


def _check(plan: list[_Planned], options: LayerOptions, shared: dict[str, dict[str, Any]]) -> None:
    """Raise what would stop the replacing: values that are not finite, and kinds of layers that cannot run here."""
    kinds = set()
    for name, linear, fmt in plan:
        weight, bias = linear.weight, linear.bias
        finite = weight.is_meta or bool(torch.isfinite(largest(weight)))
        if bias is not None and not bias.is_meta and not bool(torch.isfinite(largest(bias))):
            raise FormatError(f"{name}: the bias holds NaN or Inf, expected finite values")
        shape = (fmt, weight.shape, weight.dtype, weight.device, None if bias is None else (bias.dtype, bias.shape))
        if not finite or weight.is_meta or (weight.is_cuda and shape not in kinds):
            _quantise(name, linear, fmt, options, shared)  # raises, or shows that such a layer runs
        kinds.add(shape)


def _replace(
    model: nn.Module,
    plan: list[_Planned],
    options: LayerOptions,
    shared: dict[str, dict[str, Any]],
    progress: Callable[[int, int, str], None],
) -> list[LayerReport]:
    """Replace each layer at all its places, and free it. Empties ``plan``."""
    reports: list[LayerReport] = []
    places: dict[int, list[str]] = {}
    for name, linear, _ in plan:
        places.setdefault(id(linear), []).append(name)
    count, tied = len(plan), models_with_ties(model)
    try:
        for done in range(count):
            name, linear, fmt = plan[0]
            progress(done, count, name)
            if id(linear) in places:
                new = _quantise(name, linear, fmt, options, shared)
                carry_over(linear, new)
                before = sum(p.numel() * p.element_size() for p in linear.parameters())
                reports.append(_report(name, before, fmt, new))
                untie(tied, places[id(linear)], new)
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
    for names in fusion_groups({name: (fmt, sizes(linear)[1]) for name, (linear, fmt) in linears.items()}):
        scaling = PROBLEM[linears[names[0]][1]][1]
        scale = shared_scale((linears[name][0].weight for name in names), scaling)
        if scale is not None:
            shared |= {name: {"global_scale" if scaling == "nvfp4" else "scale": scale} for name in names}
    return shared


def _quantise(
    name: str, linear: nn.Linear, fmt: str, options: LayerOptions, shared: dict[str, dict[str, Any]]
) -> QuantizedLinear:
    if linear.weight.is_meta:
        raise InputError(f"{name} is on the meta device and has no weights to quantise: load them first")
    layer = FORMATS[fmt](linear, name=name, **options, **shared.get(name, {}))
    if layer.device.type == "cuda":
        layer.bind()
    return layer


def _fused_report(model: nn.Module, fused: FusedLayer, parts: list[LayerReport]) -> LayerReport:
    layer = model.get_submodule(fused.name)
    assert isinstance(layer, QuantizedLinear)
    return _report(fused.name, sum(part.bytes_before for part in parts), parts[0].format, layer, fused.shards)


def _report(name: str, before: int, fmt: str, layer: QuantizedLinear, shards: tuple[str, ...] = ()) -> LayerReport:
    backend, rule, reason = decision_text(layer)
    size, after, dropped = (layer.out_features, layer.in_features), layer.nbytes(), layer.dropped_nbytes()
    return LayerReport(name, fmt, *size, before, after, backend, rule, reason, dropped, shards)
