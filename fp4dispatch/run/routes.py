"""Routes of a layer: which backend runs which range of M, and the plans to run it.

A :class:`LayerSpec` is JSON text. It describes a layer without its tensors, so layers of one shape have the same text.
``torch.compile`` stores the text as a constant of the graph. It holds no handle and no state of this process, so
repeated blocks share one compiled graph.
"""

from __future__ import annotations

import functools
import json
from bisect import bisect_left
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4dispatch.backends.base import Backend, Plan, Prepared, QuantizedActivation, Ready, rows_for
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import CaptureError
from fp4dispatch.machine import capture
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.problem import Activation, Op, OutDtype, Problem, Scaling
from fp4dispatch.problem.decision import Decision
from fp4dispatch.run.nvtx import ranged

LARGEST_M = 1 << 15
"""The largest M that a layer asks the policy about. The answer also holds for larger M."""


OUT_DTYPE: dict[torch.dtype, OutDtype] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


class Route(NamedTuple):
    """The backend for up to ``m_max`` tokens, its activation format, and its slice ``[start, stop)`` of the tensors.

    ``refused``: why it must not run during CUDA graph capture; empty where it may.
    """

    m_max: int
    backend: str
    activation: Activation
    start: int
    stop: int
    layout: tuple[Any, ...]
    refused: str = ""


class _Launch(NamedTuple):
    """A route with its plan, ready to run."""

    backend: Backend
    plan: Plan
    route: Route


class LayerSpec:
    """Description of a layer without its tensors. Immutable. :meth:`parse` returns one object per text."""

    def __init__(self, text: str) -> None:
        data = json.loads(text)
        self.text = text
        self.op: Op = data["op"]
        self.scaling: Scaling = data["scaling"]
        self.n: int = data["n"]
        self.k: int = data["k"]
        self.routes = tuple(
            Route(m_max, name, activation, start, stop, _tuples(layout), *refused)
            for m_max, name, activation, start, stop, layout, *refused in data["routes"]
        )
        self._limits = [route.m_max for route in self.routes[:-1]]
        self._launches: dict[tuple[int, torch.dtype, bool, torch.device], _Launch] = {}

    @staticmethod
    @functools.cache
    def parse(text: str) -> LayerSpec:
        """Return the spec of a text."""
        return LayerSpec(text)

    def launch(self, m: int, dtype: torch.dtype, bias: bool, prepared: tuple[Tensor, ...]) -> tuple[_Launch, Prepared]:
        """Return plan and weights for M tokens. Makes a plan on the host if this M has none.

        Raises
        ------
        CaptureError
            During CUDA graph capture, if there is no plan, or if the rules do not allow this backend in a graph.
        """
        index = self.index(m)
        weights = self.weights(index, prepared)
        return self.launch_on(m, dtype, bias, index, weights), weights

    def index(self, m: int) -> int:
        """Return the index of the route for M tokens."""
        return bisect_left(self._limits, m)

    def weights(self, index: int, prepared: tuple[Tensor, ...]) -> Prepared:
        """Return the prepared weights of one route."""
        route = self.routes[index]
        return Prepared(route.backend, prepared[route.start : route.stop], route.layout)

    def launch_on(self, m: int, dtype: torch.dtype, bias: bool, index: int, weights: Prepared) -> _Launch:
        """Return the plan of a route; arguments and errors as of :meth:`launch`."""
        if self.routes[index].refused and capture.is_capturing():
            raise _not_for_capture(self, m, index)
        key = (m, dtype, bias, weights.tensors[0].device)
        launch = self._launches.get(key) or self._launches.get((-index - 1, *key[1:]))
        return launch or self._build(key, index, self.routes[index], weights)

    def planned(self) -> list[int]:
        """Return each M that has a plan. For a backend whose plans serve every M: the largest M of the route."""
        return sorted({m if m > 0 else self.routes[-m - 1].m_max for m, *_ in self._launches})

    def plan_anew(self, weights: Callable[[int], Prepared], device: torch.device) -> None:
        """Make the plans of a device again where other launches have been timed since. CUDA graphs keep their plans.

        ``weights`` returns the prepared weights of a route.
        """
        capture.forbid_in_capture(f"planning {self.op} N={self.n} K={self.k} anew", capture.warmup_call("..."))
        for key, launch in list(self._launches.items()):
            if key[3] == device:
                index = self.index(key[0]) if key[0] > 0 else -key[0] - 1
                problem = self._problem(max(key[0], 1), key[1], key[2], launch.route)
                plan = plan_for(choose.instance(launch.route.backend), problem, weights(index))
                self._launches[key] = launch._replace(plan=plan)

    def _build(
        self, key: tuple[int, torch.dtype, bool, torch.device], index: int, route: Route, weights: Prepared
    ) -> _Launch:
        m, dtype, bias, device = key
        if capture.is_capturing():
            planned = ", ".join(map(str, self.planned())) or "none"
            raise CaptureError(
                f"no plan for M={m} while a CUDA graph is being captured; building one now would break the capture.\n"
                f"  Before capturing: {capture.warmup_call(str(m))}   Planned for this layer: M = {planned}"
            )
        backend = choose.instance(route.backend)
        if not backend.plans_by_m:
            key = (-index - 1, dtype, bias, device)
        problem = self._problem(m, dtype, bias, route)
        launch = _Launch(ranged(backend, problem), plan_for(backend, problem, weights), route)
        self._launches[key] = launch
        return launch

    def _problem(self, m: int, dtype: torch.dtype, bias: bool, route: Route) -> Problem:
        return Problem(self.op, m, self.n, self.k, route.activation, self.scaling, OUT_DTYPE[dtype], bias)


READY_M = 512
"""A layer keeps its ready launches for M up to this limit. Above it, the kernel takes longer than the lookup."""


class Gated(NamedTuple):
    """A launch that starts from ``gate_up`` (:meth:`fp4dispatch.backends.base.Backend.swiglu`), and ``rows_for`` it."""

    launch: Ready
    rows: int

    def into_new(self, gate_up: Tensor, n: int, bias: Tensor | None) -> Tensor:
        """Run it on gate_up [M, 2K]; return a new output [M, N], whose memory has ``rows``."""
        m = gate_up.shape[0]
        out = gate_up.new_empty(self.rows, n)
        on_device_of(out, self.launch, gate_up, out, bias)
        return out if self.rows == m else out.resize_(m, n)


class Bound:
    """A layer bound to backends for one output dtype.

    Parameters
    ----------
    spec
        What the layer computes and how.
    tensors
        The prepared weights of all backends, in the spec's order.
    decisions
        The largest M and the Decision of each range of M.
    dtype, bias
        Output dtype, and the checked bias of the layer, [N] or None.
    """

    __slots__ = (
        *(
            "_prepared",
            "_swiglu",
            "apart",
            "bias",
            "captured",
            "cuda",
            "decisions",
            "device",
            "dtype",
            "gated",
            "index",
            "ready",
            "rows",
            "spec",
        ),
        "tensors",
    )

    def __init__(
        self,
        spec: LayerSpec,
        tensors: tuple[Tensor, ...],
        decisions: tuple[tuple[int, Decision], ...],
        dtype: torch.dtype,
        bias: Tensor | None = None,
    ) -> None:
        self.spec, self.tensors, self.decisions, self.dtype, self.bias = spec, tensors, decisions, dtype, bias
        self.device = tensors[0].device
        self.cuda, self.index = self.device.type == "cuda", tensors[0].get_device()
        self.captured = False
        """Whether a CUDA graph may hold the addresses of ``tensors``."""
        self.ready: dict[int, tuple[Ready, Plan, Prepared]] = {}
        """Ready launches by M, for each M that ran before. The eager fast path is one lookup here."""
        self.rows: dict[int, int] = {}
        """Rows of the output's memory, for each M of ``ready`` where a backend asks for more than M."""
        self.apart: set[int] = set()
        """Each M that ran before for which :meth:`swiglu` returns None. Only speed depends on it."""
        self.gated: dict[int, Gated] = {}
        """As ``ready``, of launches that start from ``gate_up``."""
        self._swiglu: dict[tuple[int, bool], tuple[Plan, Gated | None]] = {}
        self._prepared = tuple(spec.weights(index, tensors) for index in range(len(spec.routes)))

    def launch(self, m: int, bias: bool) -> tuple[Backend, Plan, Prepared]:
        """Return backend, plan and weights for M tokens. Makes a plan on the host if this M has none.

        Raises
        ------
        CaptureError
            As :meth:`LayerSpec.launch`.
        """
        index = self.spec.index(m)
        prepared = self._prepared[index]
        found = self.spec.launch_on(m, self.dtype, bias, index, prepared)
        if m <= READY_M and m not in self.ready and bias == (self.bias is not None):
            if (rows := rows_for(found.backend, found.plan, m)) != m:
                self.rows[m] = rows
            ready = found.backend.ready(found.plan, prepared)
            if self.cuda and torch.cuda.device_count() > 1:
                ready = _on_its_device(ready, found.backend, found.plan, prepared)
            self.ready[m] = (ready, found.plan, prepared)
        return found.backend, found.plan, prepared

    def swiglu(self, m: int, bias: bool) -> Gated | None:
        """Return the launch for M tokens that starts from ``gate_up``; None where the route has none.

        Arguments, host work and errors as of :meth:`launch` and :meth:`fp4dispatch.backends.base.Backend.swiglu`.
        """
        index = self.spec.index(m)
        prepared = self._prepared[index]
        found = self.spec.launch_on(m, self.dtype, bias, index, prepared)
        kept = self._swiglu.get((m, bias))
        if kept is None or kept[0] is not found.plan:
            launch = found.backend.swiglu(found.plan, prepared)
            rows = m if launch is None else rows_for(found.backend, found.plan, m)
            kept = found.plan, None if launch is None else Gated(launch, rows)
            if m <= READY_M:
                self._swiglu[m, bias] = kept
                if kept[1] is None:
                    self.apart.add(m)
                elif bias == (self.bias is not None):
                    self.gated[m] = kept[1]
        return kept[1]

    def plan_anew(self) -> None:
        """Plan again what ``tune`` has found a faster launch for. Refused during capture."""
        self.spec.plan_anew(self._prepared.__getitem__, self.device)
        self.ready.clear()
        self.rows.clear()
        self.apart.clear()
        self.gated.clear()


def _not_for_capture(spec: LayerSpec, m: int, index: int) -> CaptureError:
    route = spec.routes[index]
    return CaptureError(
        f"{spec.op} N={spec.n} K={spec.k} runs on {route.backend} for M={m}, which was chosen for calls outside of "
        f"CUDA graphs and may not be captured: {route.refused}.\n"
        f"  Before capturing: fp4dispatch.warmup(model, tokens=[{m}]), which chooses for a CUDA graph "
        "(capture='full' or 'piecewise')"
    )


def gpu_of(device: torch.device) -> int | None:
    """Return the index of a CUDA device, as :func:`fp4dispatch.dispatch.choose.select` takes it; None for a CPU."""
    return device.index if device.type == "cuda" else None


_plans: dict[tuple[str, Hashable, tuple[Any, ...], torch.device], Plan] = {}


_lock = ForkSafeLock()


def plan_for(backend: Backend, problem: Problem, prepared: Prepared) -> Plan:
    """Return the plan of a problem: one per layout and device. Plans are never dropped: CUDA graphs may use them.

    Raises
    ------
    CaptureError
        If one would have to be made while a CUDA graph is being captured.
    """
    device = prepared.tensors[0].device
    key = (backend.name, backend.plan_key(problem, device), prepared.layout, device)
    plan = _plans.get(key)
    if plan is None:
        capture.forbid_in_capture(f"no plan for {problem} on {backend.name}: building one", "run it once, eagerly")
        with _lock:
            plan = _plans.get(key)
            if plan is None:
                plan = _plans[key] = backend.plan(problem, prepared)
    return plan


def launch(
    backend: Backend,
    plan: Plan,
    prepared: Prepared,
    x: Tensor | QuantizedActivation,
    out: Tensor,
    bias: Tensor | None,
) -> None:
    """Run a plan on the device of its operands, whatever the current device is."""
    on_device_of(out, backend.run, plan, prepared, x, out, bias)


def launch_into_new(backend: Backend, plan: Plan, prepared: Prepared, x: Tensor, n: int, bias: Tensor | None) -> Tensor:
    """Run a plan on x [M, K], contiguous, as :func:`launch` does; return a new output [M, N].

    Its memory has the rows that the backend asks for. ``resize_`` keeps that memory, and makes no view: autograd
    refuses to change views in place that were made without gradients.
    """
    m = x.shape[0]
    rows = rows_for(backend, plan, m)
    out = x.new_empty(rows, n)
    launch(backend, plan, prepared, x, out, bias)
    return out if rows == m else out.resize_(m, n)


def on_device_of(out: Tensor, call: Callable[..., None], *arguments: object) -> None:
    """Make a call with the device of ``out`` as the current one."""
    if out.is_cuda and out.device.index != torch.cuda.current_device():
        with torch.cuda.device(out.device):
            call(*arguments)
    else:
        call(*arguments)


def _on_its_device(ready: Ready, backend: Backend, plan: Plan, prepared: Prepared) -> Ready:
    """Return ``ready`` for any current device. The caller asked about capture on the current device only."""
    device = prepared.tensors[0].device

    def launch(x: Tensor, out: Tensor, bias: Tensor | None) -> None:
        if torch.cuda.current_device() == device.index:
            ready(x, out, bias)
            return
        with torch.cuda.device(device):
            if capture.stream_is_capturing():
                backend.run(plan, prepared, x, out, bias)
            else:
                ready(x, out, bias)

    return launch


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
