"""NVFP4 weights by FP8 activations, on an FP8 copy of the weights that is written out once.

The copy holds the very values that w4a8 multiplies (:mod:`~fp4dispatch.backends.own.folding`): ``e4m3(e2m1 *
block_scale / 8)``, and the global scales times 8 as scales of output columns, one per fused shard where shards differ.
From then on it is an FP8 layer scaled by token and by column, and other backends run it:
:mod:`~fp4dispatch.backends.own.w8a8` or :mod:`~fp4dispatch.backends.libraries.cublaslt`, both on the same tensors.
Which one, for how many tokens, is what the policy says of an FP8 layer of this shape on this machine, where a compiler
is needed for the first and either may have failed its self-check. ``FP4DISPATCH_FP8_BACKEND`` and
``FP4DISPATCH_DISABLE`` speak of the backends of layers, not of these two.

w4a8 unpacks its weights at each call, in registers or into scratch; here that is saved, for memory: 8 bits a weight
beside the checkpoint's 4.5 and the 4.5 of w4a16 and w4a8, which few tokens go to. So ``auto`` takes it only where
``FP4DISPATCH_FP8_COPY`` allows that (rule ``nvfp4-fp8-copy-not-allowed``), and whoever names it.
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
from fp4dispatch.backends.own.compiled import Layout
from fp4dispatch.backends.own.folding import FOLD, fold_e4m3
from fp4dispatch.backends.own.operands import await_writes, per_column
from fp4dispatch.errors import InputError
from fp4dispatch.machine import capture
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.system import System
from fp4dispatch.policy import resolve
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.decision import Decision, Reason

_STEP_ELEMENTS = 1 << 24
"""Weights that are folded at a time: in between they are f32."""

_FP8: dict[str, Backend] = {each.name: each for each in (w8a8.W8A8Backend(), cublaslt.CublasLtBackend())}
"""Who multiplies the copy."""


class _State(NamedTuple):
    """All that a plan knows: who multiplies, and its own plan."""

    backend: Backend
    plan: Plan


class W4A8ExpandedBackend(Backend):
    """NVFP4 weights, written out as e4m3 once, by FP8 activations that are scaled per token. Plans are by M."""

    name = "w4a8_expanded"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("fp8",)}

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem: its own, or all of those that run the copy."""
        reasons = check(self.name, problem, system)
        if reasons:
            return reasons
        decision = _decide(problem, system)
        return () if decision.backend else tuple(r for name in _FP8 for r in decision.verdict(name).reasons)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the kernels that a plan for this M will load."""
        return _backend_for(problem, device).builds(_by_row(problem), device)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Write the weights out, N padded with zeros to a multiple of 16. K is one, as NVFP4 blocks are. Synchronises.

        Tensors: weight e4m3 [np, K]; scale of each output column f32 [1, np]. A static input scale belongs to 4-bit
        activations and is not used.

        Raises
        ------
        InputError
            As :func:`~fp4dispatch.backends.own.folding.fold_e4m3`.
        """
        w = weights
        scale = (per_column(w, w.n) * FOLD).expand(w.n)
        tensors, layout = cublaslt_weights.prepare(LinearWeights("fp8_gemm", "row", w.n, w.k, _folded(w), scale))
        await_writes(tensors[0])
        return Prepared(self.name, tuple(tensors), tuple(layout))

    def plan_key(self, problem: Problem, device: torch.device) -> Hashable:
        """Return what a plan is kept by: many M share one where who multiplies needs but one."""
        backend = _backend_for(problem, device)
        return backend.name, backend.plan_key(_by_row(problem), device)

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Choose who multiplies for this M, and make its plan.

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

    def ready(self, plan: Plan, prepared: Prepared) -> Ready:
        """Return what who multiplies has for a warm layer."""
        s: _State = plan.state
        return s.backend.ready(s.plan, prepared)


def _by_row(problem: Problem) -> Problem:
    """Return the problem that the copy is."""
    p = problem
    return Problem("fp8_gemm", p.m, p.n, p.k, "fp8", "row", p.out_dtype, p.bias)


def _decide(problem: Problem, system: System) -> Decision:
    """Ask the policy who multiplies the copy."""
    return resolve.resolve(_by_row(problem), system, _FP8)


def _backend_for(problem: Problem, device: torch.device) -> Backend:
    decision = _decide(problem, _facts(device))
    if decision.backend is None:
        raise InputError(f"nothing can run the FP8 copy of the weights of {problem}\n{decision.text()}")
    return _FP8[decision.backend]


def _facts(device: torch.device) -> System:
    """Return what is known of the machine, its first GPU being ``device``."""
    return _system.current().seen_from((device.index or 0) if device.type == "cuda" else None)


def _held_by(backend: Backend, prepared: Prepared) -> Prepared:
    """Return the same tensors as another backend describes them: w8a8 pads N as it is padded here."""
    layout: tuple[Any, ...] = prepared.layout
    if isinstance(backend, w8a8.W8A8Backend):
        held = cublaslt_weights.Layout(*layout)
        layout = tuple(Layout(n=held.n, k=held.k, np=held.np, kp=held.kp, has_input_scale=False))
    return Prepared(backend.name, prepared.tensors, layout)


def _folded(w: LinearWeights) -> Tensor:
    """Return the weights as w4a8 multiplies them, e4m3 [N, K], a few rows at a time."""
    scale = formats.from_128x4(w.scale, w.n, w.k // formats.NVFP4_BLOCK) if w.sf_layout == "128x4" else w.scale
    step = max(1, _STEP_ELEMENTS // w.k)
    if w.n <= step:
        return fold_e4m3(w.weight, scale)
    found = torch.empty(w.n, w.k, dtype=torch.float8_e4m3fn, device=w.weight.device)
    for start in range(0, w.n, step):
        rows = slice(start, start + step)
        found[rows] = fold_e4m3(w.weight[rows], scale[rows])
    return found
