"""NVTX ranges around the launches of layers, for Nsight Systems and the profiler of torch. Off by default.

The setting is read when a layer plans for a number of tokens. Where it is off, a launch runs exactly as it would
without this module. Replays of CUDA graphs run no host code, so they have no ranges.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation, Ready
from fp4dispatch.machine import log as _log
from fp4dispatch.settings import settings

if TYPE_CHECKING:
    from fp4dispatch.machine.system import System
    from fp4dispatch.problem import Problem
    from fp4dispatch.problem.decision import Reason


def _push(name: str) -> None:
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]


def _pop() -> None:
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def ranged(backend: Backend, problem: Problem) -> Backend:
    """Return the backend, or with ``FP4DISPATCH_NVTX=1`` one that puts a range around each launch of a problem.

    Ranges are named ``fp4dispatch nvfp4_gemm M=16 N=4096 K=14336 w4a16 (bf16)``: op, sizes, backend, activation format.
    """
    if not settings.nvtx or not _available():
        return backend
    return Ranged(backend, problem)


@functools.cache
def _available() -> bool:
    """Whether this torch has NVTX: builds without CUDA do not. Warns once."""
    try:
        _push("fp4dispatch")
        _pop()
    except RuntimeError as error:
        _log.warning("FP4DISPATCH_NVTX=1 has no effect: %s (torch %s)", error, torch.__version__)
        return False
    return True


class Ranged(Backend):
    """Another backend, with a range around each launch."""

    activations: dict = {}  # type: ignore[type-arg, misc]  # noqa: RUF012

    def __init__(self, inner: Backend, problem: Problem) -> None:
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]
        self._before = f"fp4dispatch {problem.op} M="
        self._behind = f" N={problem.n} K={problem.k} {inner.name} ({problem.activation})"

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Ask the other backend."""
        return self.inner.supports(problem, system)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Ask the other backend."""
        return self.inner.prepare(weights)

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Ask the other backend."""
        return self.inner.plan(problem, prepared)

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Launch inside a range."""
        tokens = x.shape[0] if isinstance(x, Tensor) else x.data.shape[0]
        _push(f"{self._before}{tokens}{self._behind}")
        try:
            self.inner.run(plan, prepared, x, out, bias)
        finally:
            _pop()

    def out_rows(self, plan: Plan, m: int) -> int:
        """Ask the other backend."""
        return self.inner.out_rows(plan, m)

    def ready(self, plan: Plan, prepared: Prepared) -> Ready:
        """Return the other backend's fast launch inside a range."""
        return self._inside(self.inner.ready(plan, prepared))

    def swiglu(self, plan: Plan, prepared: Prepared) -> Ready | None:
        """Return the other backend's launch, if it has one, inside a range."""
        inner = self.inner.swiglu(plan, prepared)
        return None if inner is None else self._inside(inner)

    def _inside(self, inner: Ready) -> Ready:
        before, behind = self._before, self._behind

        def launch(x: Tensor, out: Tensor, bias: Tensor | None) -> None:
            _push(f"{before}{x.shape[0]}{behind}")
            try:
                inner(x, out, bias)
            finally:
                _pop()

        return launch
