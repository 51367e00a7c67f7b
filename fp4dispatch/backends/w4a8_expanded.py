"""NVFP4 weights with FP8 activations, on an FP8 copy of the weights that is made once, in ``prepare``.

The copy holds the values that w4a8 multiplies (:mod:`~fp4dispatch.backends.own.tensors.folding`):
``e4m3(e2m1 * block_scale / 8)``. The global scales times 8 become the scales of its output columns. The copy is then an
FP8 layer with row scales, and another backend runs it: :mod:`~fp4dispatch.backends.own.w8a8` or
:mod:`~fp4dispatch.backends.libraries.cublaslt`, on the same tensors. The policy chooses between the two for each M, as
for any FP8 layer of this shape. ``FP4DISPATCH_FP8_BACKEND`` and ``FP4DISPATCH_DISABLE`` do not apply to this choice.

w4a8 unpacks its weights in every call. The copy saves that time and costs memory: 8 bits per weight, beside 4.5 of the
checkpoint and 4.5 of w4a16 and w4a8, which serve few tokens. So ``auto`` takes this backend only if
``FP4DISPATCH_FP8_COPY`` allows it (rule ``nvfp4-fp8-copy-not-allowed``).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation, Ready
from fp4dispatch.backends.libraries import cublaslt, cublaslt_weights
from fp4dispatch.backends.own import w8a8
from fp4dispatch.backends.own.launch_choice import Layout
from fp4dispatch.backends.own.tensors.folding import FOLD, fold_e4m3
from fp4dispatch.backends.own.tensors.operands import await_writes
from fp4dispatch.backends.predictions import predictions
from fp4dispatch.backends.weight_layout import global_scales
from fp4dispatch.errors import InputError
from fp4dispatch.machine import capture, gpu_models
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.gpu_models import GpuModel
from fp4dispatch.machine.system import System
from fp4dispatch.policy import resolve
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.decision import Decision, Reason

_STEP_ELEMENTS = 1 << 24
"""Weights that are folded at a time. More would need more memory: folding makes f32 copies."""

_FP8: dict[str, Backend] = {each.name: each for each in (w8a8.W8A8Backend(), cublaslt.CublasLtBackend())}
"""The backends that can multiply the copy."""


class _State(NamedTuple):
    """The backend that multiplies the copy, and its plan."""

    backend: Backend
    plan: Plan


class W4A8ExpandedBackend(Backend):
    """NVFP4 weights, written out as e4m3 once, by FP8 activations that are scaled per token. Plans are by M."""

    name = "w4a8_expanded"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("fp8",)}

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason against the problem: its own, or if there is none, those of the FP8 backends."""
        reasons = check(self.name, problem, system)
        if reasons:
            return reasons
        decision = _decide(problem, system)
        return () if decision.backend else tuple(r for name in _FP8 for r in decision.verdict(name).reasons)

    def predict(self, problem: Problem, gpu: GpuModel) -> float | None:
        """Return the predicted time of the FP8 backend that multiplies the copy."""
        row = _by_row(problem)
        return min((us for each in _FP8.values() if (us := each.predict(row, gpu)) is not None), default=None)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the kernels that a plan for this M will load."""
        return _backend_for(problem, device).builds(_by_row(problem), device)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Make the FP8 copy, N padded with zeros to a multiple of 16. NVFP4's K is one already. Synchronises.

        Tensors: weight, e4m3 [np, K]; scale of each output column, f32 [1, np]. The static input scale is for 4-bit
        activations and is not used.

        Raises
        ------
        InputError
            As :func:`~fp4dispatch.backends.own.tensors.folding.fold_e4m3`.
        """
        w = weights
        scale = (global_scales(w, w.n) * FOLD).expand(w.n)
        tensors, layout = cublaslt_weights.prepare(LinearWeights("fp8_gemm", "row", w.n, w.k, _folded(w), scale))
        await_writes(tensors[0])
        return Prepared(self.name, tuple(tensors), tuple(layout))

    def plan_key(self, problem: Problem, device: torch.device) -> Hashable:
        """Return the key of a plan: the FP8 backend for this M, and its own key."""
        backend = _backend_for(problem, device)
        return backend.name, backend.plan_key(_by_row(problem), device)

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Choose the FP8 backend for this M and make its plan.

        Raises
        ------
        CaptureError
            During capture.
        ToolchainError, CompileError, ProofError, CacheError
            As :meth:`fp4dispatch.backends.own.w8a8.W8A8Backend.plan`.
        InputError
            Where neither can run the problem.
        """
        capture.forbid_in_capture(f"planning {problem}", f"fp4dispatch.warmup(model, tokens=[{problem.m}])")
        backend = _backend_for(problem, prepared.tensors[0].device)
        plan = backend.plan(_by_row(problem), _held_by(backend, prepared))
        return Plan(self.name, problem, _State(backend, plan), plan.note)

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation, and launch the GEMM."""
        if not isinstance(x, Tensor):
            raise InputError(f"{self.name} takes 16-bit activations, not quantised ones: use FP4Linear")
        s: _State = plan.state
        s.backend.run(s.plan, prepared, x, out, bias)

    def out_rows(self, plan: Plan, m: int) -> int:
        """Return what the FP8 backend asks for."""
        s: _State = plan.state
        return s.backend.out_rows(s.plan, m)

    def ready(self, plan: Plan, prepared: Prepared) -> Ready:
        """Return the fast path of the FP8 backend."""
        s: _State = plan.state
        return s.backend.ready(s.plan, prepared)

    def swiglu(self, plan: Plan, prepared: Prepared) -> Ready | None:
        """Return the launch of the FP8 backend, if it has one."""
        s: _State = plan.state
        return s.backend.swiglu(s.plan, prepared)


def _by_row(problem: Problem) -> Problem:
    """Return the FP8 problem that the copy poses."""
    p = problem
    return Problem("fp8_gemm", p.m, p.n, p.k, "fp8", "row", p.out_dtype, p.bias)


def _decide(problem: Problem, system: System) -> Decision:
    """Let the policy choose the FP8 backend."""
    row = _by_row(problem)
    model = gpu_models.of(system.gpus[0]) if system.gpus else None
    return resolve.resolve(row, system, _FP8, predicted=predictions(row, model, _FP8) if model else None)


def _backend_for(problem: Problem, device: torch.device) -> Backend:
    decision = _decide(problem, _facts(device))
    if decision.backend is None:
        raise InputError(f"nothing can run the FP8 copy of the weights of {problem}\n{decision.text()}")
    return _FP8[decision.backend]


def _facts(device: torch.device) -> System:
    """Return the facts of the machine as seen from ``device``."""
    return _system.current().seen_from((device.index or 0) if device.type == "cuda" else None)


def _held_by(backend: Backend, prepared: Prepared) -> Prepared:
    """Return the same tensors with the layout that the other backend expects."""
    layout: tuple[Any, ...] = prepared.layout
    if isinstance(backend, w8a8.W8A8Backend):
        held = cublaslt_weights.Layout(*layout)
        layout = tuple(Layout(n=held.n, k=held.k, np=held.np, kp=held.kp, has_input_scale=False))
    return Prepared(backend.name, prepared.tensors, layout)


def _folded(w: LinearWeights) -> Tensor:
    """Return the weights as w4a8 multiplies them, e4m3 [N, K]; computed a few rows at a time to save memory."""
    scale = formats.from_128x4(w.scale, w.n, w.k // formats.NVFP4_BLOCK) if w.sf_layout == "128x4" else w.scale
    step = max(1, _STEP_ELEMENTS // w.k)
    if w.n <= step:
        return fold_e4m3(w.weight, scale)
    found = torch.empty(w.n, w.k, dtype=torch.float8_e4m3fn, device=w.weight.device)
    for start in range(0, w.n, step):
        rows = slice(start, start + step)
        found[rows] = fold_e4m3(w.weight[rows], scale[rows])
    return found
