"""Bind a layer: ask the policy for each range of M, prepare the weights, check the backends on this layer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fp4dispatch.backends import registry
from fp4dispatch.backends.base import LinearWeights, Prepared
from fp4dispatch.dispatch import choose, report
from fp4dispatch.errors import BackendUnsupportedError, CaptureError, NoBackendError, SelfCheckFailed
from fp4dispatch.machine import capture
from fp4dispatch.policy import resolve
from fp4dispatch.problem import Activation, CaptureMode, Problem
from fp4dispatch.problem.decision import Decision
from fp4dispatch.run import prebuild, routes
from fp4dispatch.run.routes import OUT_DTYPE, Bound, LayerSpec
from fp4dispatch.trust import quarantine, selfcheck

Choice = tuple[LayerSpec, tuple[tuple[int, Decision], ...]]
"""What :func:`bind` chose: the routes, and the largest M and the Decision of each range of M."""

Choices = dict[torch.dtype, Choice]
"""By output dtype."""


def refuse_in_capture(layer: str) -> None:
    """Refuse to bind a layer while a CUDA graph is captured.

    Raises
    ------
    CaptureError
        If the current stream is being captured; it names the call that binds before.
    """
    capture.forbid_in_capture(f"choosing backends for {layer or 'a layer'}", capture.warmup_call("..."))


def bind(
    weights: LinearWeights,
    *,
    dtype: torch.dtype,
    bias: Tensor | None,
    activation: Activation = "any",
    backend: str | None = None,
    layer: str = "",
    prepared: dict[str, Prepared] | None = None,
    capture_mode: CaptureMode = "none",
    m_min: int = 1,
) -> Bound:
    """Ask the policy for every bucket of M and prepare the weights for each backend that it names.

    Then each backend is checked on this layer (:mod:`fp4dispatch.trust.layercheck`), once for each shape and GPU model.
    On a CPU only plug-ins are checked. A backend that ``auto`` chose and that fails goes into quarantine, and the
    policy is asked again.

    Parameters
    ----------
    weights
        Canonical weights, on the device that they will run on.
    dtype
        Output (and input) dtype: float32, bfloat16 or float16.
    bias
        [N], floating point, on the device of the weights, or None.
    activation, backend, layer
        Of the layer; ``activation`` and ``backend`` pin what the policy may choose.
    prepared
        Prepared weights by layout (:attr:`~fp4dispatch.backends.base.Backend.layout_name`). New layouts are added.
    capture_mode, m_min
        How CUDA graphs will capture the layer, and the smallest M there, as in
        :class:`~fp4dispatch.problem.Problem`. With ``none``, a range of M refuses capture if the rules do not allow its
        backend in a graph. A backend that was named gets a warning instead.

    Returns
    -------
    Bound
        ``decisions`` holds the largest M and the Decision of each range of M.

    Raises
    ------
    BackendUnsupportedError, NoBackendError, UnknownBackendError, SettingsError
        As :func:`fp4dispatch.dispatch.choose.select` does.
    SelfCheckFailed
        If a backend that was named gives wrong numbers for this layer. ``prepared`` is then unchanged.
    CaptureDeniedError
        Inside :func:`fp4dispatch.machine.capture.mode`, if a rule about capture forbids a backend that was named.
    """
    refuse_in_capture(layer)
    prepared = {} if prepared is None else prepared
    gpu = routes.gpu_of(weights.weight.device)
    any_m = Problem(
        weights.op,
        1,
        weights.n,
        weights.k,
        activation,
        weights.scaling,
        OUT_DTYPE[dtype],
        bias is not None,
        capture_mode,
        m_min,
    )
    prebuild.together([prebuild.Ask(any_m, backend, gpu)])
    decisions, refusals, found = _settle(any_m, backend, layer, weights, prepared, dtype)
    prepared.update(found)
    spec, tensors = _spec(weights, decisions, refusals, prepared)
    return Bound(spec, tensors, tuple(decisions), dtype, bias)


def _settle(
    any_m: Problem,
    backend: str | None,
    layer: str,
    weights: LinearWeights,
    prepared: Mapping[str, Prepared],
    dtype: torch.dtype,
) -> tuple[list[tuple[int, Decision]], list[str], dict[str, Prepared]]:
    """Decide, prepare and check until each backend that is chosen has passed.

    Return the ranges of M, why each must not be captured, and the prepared weights that they use.

    Raises
    ------
    NoBackendError
        If the policy keeps to a backend that is not trusted.
    """
    gpu = routes.gpu_of(weights.weight.device)
    found = dict(prepared)
    before: list[tuple[int, Decision]] = []
    while True:
        decisions, refusals = _decide(any_m, backend, layer, gpu)
        if _choices(decisions) == _choices(before):  # each round excludes at least one backend
            raise NoBackendError(
                f"{layer or 'a layer'}: {decisions[0][1].backend} is not trusted here and nothing else is chosen; "
                "fp4dispatch verify has the evidence",
                decisions[0][1],
            )
        before = decisions
        for _, decision in decisions:
            layout = choose.instance(str(decision.backend)).layout_name
            if layout not in found:
                found[layout] = choose.instance(str(decision.backend)).prepare(weights)
        if _checked(decisions, weights, found, dtype, gpu):
            break
    used = {choose.instance(str(decision.backend)).layout_name for _, decision in decisions}
    return decisions, refusals, {layout: made for layout, made in found.items() if layout in used}


def _spec(
    weights: LinearWeights,
    decisions: list[tuple[int, Decision]],
    refusals: list[str],
    prepared: Mapping[str, Prepared],
) -> tuple[LayerSpec, tuple[Tensor, ...]]:
    """Return the routes of a layer, and the tensors that they name by position."""
    tensors: list[Tensor] = []
    spans: dict[str, tuple[int, int]] = {}
    table = []
    for (m_max, decision), refused in zip(decisions, refusals, strict=True):
        name = str(decision.backend)
        layout = choose.instance(name).layout_name
        if layout not in spans:
            spans[layout] = (len(tensors), len(tensors) + len(prepared[layout].tensors))
            tensors += prepared[layout].tensors
        route = (m_max, name, decision.activation, *spans[layout], prepared[layout].layout)
        table.append((*route, refused) if refused else route)
    text = json.dumps(
        {"op": weights.op, "scaling": weights.scaling, "n": weights.n, "k": weights.k, "routes": table},
        separators=(",", ":"),
    )
    return LayerSpec.parse(text), tuple(tensors)


def again(weights: LinearWeights, choice: Choice, dtype: torch.dtype, bias: Tensor | None) -> Bound | None:
    """Bind weights as others of their format and sizes were bound, without asking the policy.

    Parameters
    ----------
    weights, dtype, bias
        As :func:`bind`.
    choice
        Of a layer that :func:`bind` bound, which thereby was checked.

    Returns
    -------
    Bound or None
        None if the weights have another layout than those.
    """
    spec, decisions = choice
    prepared: dict[str, Prepared] = {}
    tensors: list[Tensor] = []
    for route in spec.routes:
        backend = choose.instance(route.backend)
        if backend.layout_name in prepared:
            continue
        made = prepared[backend.layout_name] = backend.prepare(weights)
        if tuple(made.layout) != route.layout or (len(tensors), len(tensors) + len(made.tensors)) != route[3:5]:
            return None
        tensors += made.tensors
    return Bound(spec, tuple(tensors), decisions, dtype, bias)


def still_chosen(bound: Bound, any_m: Problem, backend: str | None, layer: str) -> bool:
    """Whether the policy still chooses the bound backends. If so, update ``bound.decisions``.

    Raises as :func:`bind`.
    """
    decisions = _same_choice(bound, any_m, backend, layer)
    bound.decisions = decisions or bound.decisions
    return decisions is not None


def like(bound: Bound, any_m: Problem, backend: str | None, layer: str) -> Bound | None:
    """Return a binding for another capture mode with the spec and tensors of this one; None if the choice differs.

    Raises as :func:`bind`.
    """
    decisions = _same_choice(bound, any_m, backend, layer)
    return None if decisions is None else Bound(bound.spec, bound.tensors, decisions, bound.dtype, bound.bias)


def _same_choice(
    bound: Bound, any_m: Problem, backend: str | None, layer: str
) -> tuple[tuple[int, Decision], ...] | None:
    """Return the decisions for a problem if they are the bound backends, else None."""
    decisions, refusals = _decide(any_m, backend, layer, routes.gpu_of(bound.tensors[0].device))
    found = [
        (m, str(decision.backend), decision.activation, refused)
        for (m, decision), refused in zip(decisions, refusals, strict=True)
    ]
    if found != [(route.m_max, route.backend, route.activation, route.refused) for route in bound.spec.routes]:
        return None
    return tuple(decisions)


def _decide(
    any_m: Problem, backend: str | None, layer: str, gpu: int | None
) -> tuple[list[tuple[int, Decision]], list[str]]:
    """Ask the policy for each bucket of M. Return the merged ranges, and why each must not be captured."""
    try:
        all_m = [
            (m, choose.select(replace(any_m, m=m), backend=backend, layer=layer, gpu=gpu, say=False))
            for m in choose.m_ranges(any_m.op, gpu, routes.LARGEST_M)
        ]
    except BackendUnsupportedError as error:
        raise _failed_before(any_m, error) or error from None
    report.report_ranges(all_m)
    decisions: list[tuple[int, Decision]] = []
    refusals: list[str] = []
    for m, decision in all_m:
        if decision.backend is None:
            raise NoBackendError(f"nothing can run {decision.problem}", decision)
        refused = choose.not_for_capture(decision, gpu)
        if refused and decision.requested != registry.AUTO:
            report.warn_of_capture(decision, refused)
            refused = ""
        if decisions and _same(decisions[-1][1], decision) and refusals[-1] == refused:
            decisions.pop()
            refusals.pop()
        decisions.append((m, decision))
        refusals.append(refused)
    return decisions, refusals


def check_capture(decision: Decision, gpu: int | None) -> None:
    """Refuse, during capture, a backend that the rules do not allow in a graph. Outside, warn if it was named.

    Raises
    ------
    CaptureError
        With the reason of the rules.
    """
    named = decision.requested != registry.AUTO
    if named == capture.is_capturing():  # a named backend was warned of before; auto outside capture is fine
        return
    refused = choose.not_for_capture(decision, gpu)
    if refused and named:
        report.warn_of_capture(decision, refused)
    elif refused:
        raise CaptureError(
            f"{decision.problem} runs on {decision.backend} outside of CUDA graphs, which may not be captured: "
            f"{refused}.\n  Before capturing: run it once with backend= another one (fp4dispatch explain lists them)"
        )


def _failed_before(problem: Problem, error: BackendUnsupportedError) -> SelfCheckFailed | None:
    """Return the stored evidence if a named backend is refused because this layer failed its check before.

    A layer binds when it is moved or loaded, and drops a refusal then. So its first call raises it.
    """
    asked = error.decision.requested if error.decision is not None else ""
    for verdict in quarantine.known():
        about = (verdict.status, verdict.backend, verdict.op, verdict.scaling)
        if about == ("failed", asked, problem.op, problem.scaling) and verdict.layer.startswith(
            f"N={problem.n} K={problem.k} "
        ):
            return verdict.error()
    return None


def _checked(
    decisions: list[tuple[int, Decision]],
    weights: LinearWeights,
    prepared: dict[str, Prepared],
    dtype: torch.dtype,
    gpu: int | None,
) -> bool:
    """Check the layer on each chosen backend. Return False if the policy has to choose again.

    Raises
    ------
    SelfCheckFailed
        If a backend that was named fails.
    """
    again = False
    for subject, decision in _subjects(decisions, weights, prepared, dtype):
        name = subject.backend.name
        verdict = selfcheck.trusted_layer(subject, choose.facts(gpu))
        if verdict.status == "failed" and decision.requested != registry.AUTO:
            raise verdict.error()
        if verdict.vouches_for(plugin=registry.is_plugin(name)) or decision.requested != registry.AUTO:
            continue
        if verdict.status != "failed":
            choose.exclude(name, weights.op, weights.scaling, choose.not_checked(verdict))
        again = True
    return not again


def _subjects(
    decisions: list[tuple[int, Decision]],
    weights: LinearWeights,
    prepared: dict[str, Prepared],
    dtype: torch.dtype,
) -> Iterator[tuple[selfcheck.Subject, Decision]]:
    """Yield each backend and activation format to check, with the range of M that it serves."""
    spans: dict[tuple[str, Activation], tuple[int, int, Decision]] = {}
    first = 1
    for last, decision in decisions:
        key = (str(decision.backend), decision.activation)
        spans[key] = (spans[key][0] if key in spans else first, last, decision)
        first = last + 1
    for (name, activation), (first, last, decision) in spans.items():
        if name == resolve.REFERENCE or (weights.weight.device.type != "cuda" and not registry.is_plugin(name)):
            continue
        backend = choose.instance(name)
        problem = replace(decision.problem, m=first, activation=activation)
        made = prepared[backend.layout_name]
        held = Prepared(name, made.tensors, made.layout)
        yield selfcheck.Subject(backend, problem, first, last, weights, held, dtype), decision


def _choices(decisions: list[tuple[int, Decision]]) -> list[tuple[int, str | None, Activation]]:
    return [(m, decision.backend, decision.activation) for m, decision in decisions]


def _same(a: Decision, b: Decision) -> bool:
    return (a.backend, a.activation) == (b.backend, b.activation)
