"""``warmup``: do all work that CUDA graph capture does not allow, before capture, in the same way on all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp4dispatch.backends import registry
from fp4dispatch.dispatch.request import check_request
from fp4dispatch.errors import InputError
from fp4dispatch.formats.checks import check_module
from fp4dispatch.machine import capture as _capture
from fp4dispatch.models.fusing.parents import downs, parents
from fp4dispatch.models.parallel.layers import group_of
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.problem import CAPTURE_MODES, CaptureMode, Problem, one_of
from fp4dispatch.run import prebuild, routes
from fp4dispatch.run.prebuild import Ask
from fp4dispatch.tune import agreement, tuning
from fp4dispatch.tune.agreement import Decisions, Group, Ranks

_Subjects = list[tuple[QuantizedLinear, torch.dtype]]


def warmup(
    model: nn.Module,
    tokens: Iterable[int] | int,
    dtype: torch.dtype | None = None,
    *,
    capture: CaptureMode | None = None,
    m_min: int | None = None,
    tune: bool = False,
    group: Group = None,
    agree: bool = True,
) -> int:
    """Build every plan, workspace and tuning that the layers need for these numbers of tokens, before capture.

    If ``torch.distributed`` is initialised, this is a collective call. The ranks agree on failed self-checks and on
    every choice before any plan is built. An error on one rank raises on all ranks.

    Parameters
    ----------
    model
        A module with ``FP4Linear`` or ``FP8Linear`` in it, on the device that it will run on. Offloaded layers are left
        out: they are bound at each call, and cannot be captured.
    tokens
        Numbers of rows (M) to prepare, e.g. the batch sizes to capture; or one number.
    dtype
        Dtype of the activations; each layer's own ``dtype`` by default.
    capture
        How CUDA graphs will capture the layers: ``full`` (one graph around everything), ``piecewise``
        (graphs between eager parts) or ``none``. The policy applies its capture rules, and the layers keep
        the mode. By default a layer keeps its mode, or gets ``full`` if it has none: backends that may be captured may
        also run without a graph. Inside :func:`fp4dispatch.machine.capture.mode` the declared mode is used, for
        graphs alone: what the layers use outside stays as it is, and ``capture`` and ``m_min`` may only repeat it.
    m_min
        Smallest number of tokens that the caller guarantees in a capture. 1 by default: for 0 tokens a layer returns
        before any launch. An engine whose captured pieces read M at replay passes 0. Then no backend is chosen that
        builds TMA descriptors from M.
    tune
        Measure the allowed backends, and the launches of our own kernels, for each shape first
        (:mod:`fp4dispatch.tune.tuning`), unless stored times of this GPU model exist. Use the fastest backend if it
        beats the rules' choice by more than the noise, and its fastest launch. Layers with a named backend are not
        tuned. On a CPU nothing is measured.
    group
        The ranks that run this model together. By default those that its layers are cut among, if they are; else all.
    agree
        False for a call that not all ranks of the group make.

    Returns
    -------
    int
        Number of (shape, tokens) pairs that were run, once each, on zeros. Layers of one shape share plans.

    Raises
    ------
    InputError
        If the model has no quantised layer or only offloaded ones, a number of tokens is not positive, the capture
        mode is unknown or not the declared one, or ranks tune different shapes.
    CaptureError
        If a CUDA graph is being captured already.
    BackendUnsupportedError, NoBackendError
        If a layer cannot run.
    UnknownBackendError, SettingsError
        If a backend name or the value of a variable is unknown.
    RankError
        If any of this happened on another rank.
    """
    _capture.forbid_in_capture("warming up", "fp4dispatch.warmup(model, tokens=[...])")
    ranks = Ranks(_group(model, group), alone=not agree)
    subjects, rows = ranks.attempt("warming up", lambda: _subjects(model, tokens, dtype))
    modes = ranks.attempt("warming up", lambda: _modes(subjects, capture, m_min))
    gated = ranks.attempt("warming up", lambda: _gated(model))
    ranks.attempt("compiling", lambda: prebuild.together(_asks(subjects, rows, modes, gated)))
    ranks.attempt("choosing backends", lambda: _choose(subjects, modes))
    if tune:
        _tune(ranks, subjects, rows)
    if tune or ranks.size > 1:
        agreement.settle(ranks, lambda: _decisions(subjects))
        ranks.attempt("planning", lambda: _plan_anew(subjects))
    return ranks.attempt("warming up", lambda: _run(subjects, rows, gated))


def _group(model: Any, group: Group) -> Group:
    """Return the ranks that share the model."""
    return group_of(model) if group is None and isinstance(model, nn.Module) else group


def _subjects(model: nn.Module, tokens: Iterable[int] | int, dtype: torch.dtype | None) -> tuple[_Subjects, list[int]]:
    check_module("model", model)
    if dtype is not None and dtype not in routes.OUT_DTYPE:
        raise InputError(f"dtype={dtype!r}; need torch.bfloat16, torch.float16 or torch.float32")
    found = [m for m in model.modules() if isinstance(m, QuantizedLinear)]
    layers = [layer for layer in found if layer.offload is None]  # no graph can capture the others
    if found and not layers:
        raise InputError(
            f"all {len(found)} quantised layers of {type(model).__name__} are offloaded and prepared at each call: "
            "there is nothing to warm up: load some of them on a GPU"
        )
    if not layers:
        raise InputError(
            f"{type(model).__name__} contains no FP4Linear or FP8Linear: call replace_linears(model) first"
        )
    rows: list[int] = list(tokens) if isinstance(tokens, Iterable) else [tokens]
    if any(not isinstance(m, int) or isinstance(m, bool) or m < 1 for m in rows):
        raise InputError(f"tokens={tokens!r:.80}: need a whole number of at least 1, or several")
    rows = sorted(set(rows))
    return [(layer, layer.dtype if dtype is None else dtype) for layer in layers], rows


def _modes(subjects: _Subjects, capture: CaptureMode | None, m_min: int | None) -> list[tuple[CaptureMode, int]]:
    """Check the requests of all layers. Return the capture mode and smallest M of each."""
    if capture is not None:
        one_of("capture", capture, CAPTURE_MODES)
    if m_min is not None and (type(m_min) is not int or m_min < 0):
        raise InputError(f"m_min={m_min!r} is not a number of tokens: need an integer of at least 0")
    declared = _capture.declared()
    if declared is not None and (capture not in (None, declared.capture) or m_min not in (None, declared.smallest_m)):
        raise InputError(
            f"capture={capture!r}, m_min={m_min!r} inside capture.mode({declared.capture!r}, "
            f"smallest_m={declared.smallest_m}): leave them out, or warm up outside of the block"
        )
    found: list[tuple[CaptureMode, int]] = []
    for layer, _ in subjects:
        check_request(layer.op, layer.backend)
        if declared is not None:
            found.append(declared)
            continue
        mode = capture or ("full" if layer.capture == "none" else layer.capture)
        found.append((mode, layer.m_min if m_min is None else m_min))
    return found


def _choose(subjects: _Subjects, modes: list[tuple[CaptureMode, int]]) -> None:
    for (layer, dtype), mode in zip(subjects, modes, strict=True):
        if _capture.declared() is None:
            layer.choose_for(*mode)
        else:
            layer.bind(dtype)


def _asks(subjects: _Subjects, rows: list[int], modes: list[tuple[CaptureMode, int]], gated: set[int]) -> list[Ask]:
    """Return the prebuild requests: for binding, and for these numbers of tokens."""
    tokens = tuple(sorted({*rows, *prebuild.SAMPLES}))
    return [
        Ask(
            replace(layer.problem(1, dtype), capture=mode, m_min=least),
            layer.backend,
            routes.gpu_of(layer.device),
            tokens,
            id(layer) in gated,
        )
        for (layer, dtype), (mode, least) in zip(subjects, modes, strict=True)
    ]


def _gated(model: nn.Module) -> set[int]:
    """Return the identities of the layers that fused modules give ``gate_up``."""
    return {id(layer) for _, parent in parents(model) for layer in downs(parent, type(parent))}


def _run(subjects: _Subjects, rows: list[int], gated: set[int]) -> int:
    """Run each shape once for each number of tokens; the ``gated`` layers from ``gate_up`` too."""
    seen, from_gate_up = set(), set()
    for layer, dtype in subjects:
        bound = layer.bind(dtype)
        for m in rows:
            key = (bound.spec.text, layer.device, layer.bias is None, dtype, m)
            if key not in seen:
                seen.add(key)
                with torch.inference_mode():
                    layer(torch.zeros(m, layer.in_features, dtype=dtype, device=layer.device))
            if id(layer) in gated and key not in from_gate_up:
                from_gate_up.add(key)
                with torch.inference_mode():
                    layer.swiglu(torch.zeros(m, 2 * layer.in_features, dtype=dtype, device=layer.device))
        layer._hold_once()
    return len(seen)


def _plan_anew(subjects: _Subjects) -> None:
    """Plan again what has other launches now, also for numbers of tokens that are not warmed up this time."""
    for layer, dtype in subjects:
        layer.bind(dtype).plan_anew()


def _decisions(subjects: _Subjects) -> Mapping[str, Decisions]:
    """Bind every layer again. Return the decisions by problem name."""
    found: dict[str, Decisions] = {}
    for layer, dtype in subjects:
        decisions = layer.rebind(dtype).decisions
        decision = decisions[0][1]
        named = "" if decision.requested == registry.AUTO else f", {decision.requested} by {decision.requested_by}"
        found[agreement.problem_name(decision.problem) + named] = decisions
    return found


def _tune(ranks: Ranks, subjects: _Subjects, rows: list[int]) -> None:
    """Measure each shape once for each bucket of the numbers of tokens, on all ranks in one order."""
    todo: dict[Problem, QuantizedLinear] = {}

    def collect() -> list[str]:
        for layer, dtype in subjects:
            if layer.bind(dtype).decisions[0][1].requested == registry.AUTO:
                for m in rows:
                    todo.setdefault(layer.problem(m, dtype).eager(), layer)
        return [str(problem) for problem in todo]

    everyone = ranks.gather(ranks.attempt("tuning", collect))
    if any(other != everyone[0] for other in everyone):
        raise InputError(
            "ranks tune different shapes or numbers of tokens: pass group= with the ranks that run the same layers, "
            "e.g. the tensor-parallel group"
        )
    for layer, problems in itertools.groupby(todo, key=todo.__getitem__):
        tuning.tune_each(problems, layer.weights(lend=False), gpu=routes.gpu_of(layer.device), ranks=ranks)
