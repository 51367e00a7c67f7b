"""What the backends on kernels of ``csrc/`` share: loading the kernels of a plan, and launching on any operands.

A backend of this kind says which kernels serve a problem (``_kernels``), lays out the weights (``prepare``) and makes
the plan's :class:`State` of the loaded kernels (``_state``). Which build a plan loads, and in which launch shape, is
chosen in :mod:`fp4dispatch.backends.own.launch_choice`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import jit
from fp4dispatch.backends.base import Plan, Prepared, QuantizedActivation, Ready
from fp4dispatch.backends.own import swiglu
from fp4dispatch.backends.own.launch_choice import Build, LaunchChoice, Layout
from fp4dispatch.backends.own.pdl_trial import pdl
from fp4dispatch.backends.own.scratch import eager
from fp4dispatch.backends.own.swiglu import Front
from fp4dispatch.backends.own.tensors.operands import (
    aligned,
    bias_row,
    direct,
    gpu_of,
    launch_numbers,
    taken_as_is,
)
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape
from fp4dispatch.backends.own.tiling.tiles import speed_of
from fp4dispatch.errors import InputError
from fp4dispatch.problem import Problem
from fp4dispatch.problem.measurement import LaunchConfig

N_MULTIPLE = 8
"""Columns of the output that a kernel stores at a time: 16 bytes."""

Weights = tuple[Tensor, ...]
"""``Prepared.tensors``."""

Launch = Callable[..., None]
"""``launch(x, out, bias, weights)``, on operands that fit as they are: contiguous, on 16 bytes, the bias like ``out``.

A closure, so that a call looks nothing up. Layers of one shape share a plan and its launch; each passes its weights.
"""

MakeLaunch = Callable[..., Launch]
"""``make_launch(state, weights=())`` returns a launch; with weights, one that needs no last argument."""


class Loaded(NamedTuple):
    """A loaded kernel.

    ``pdl``: launch it with PDL, as its binary's proof and the setting allow. ``shape``: the launch shape for the plan's
    problem, as the kernel takes it; None for kernels that choose it themselves. ``room``: bytes of memory that an even
    build needs for a launch in that shape; 0 for all others.
    """

    kernel: str
    module: Any
    pdl: bool
    shape: Any = None
    room: int = 0


def no_quantizer(*_: object) -> None:
    """The quantiser of a plan that has none."""
    raise AssertionError("16-bit activations are not quantised")


@dataclass(slots=True, eq=False)
class State:
    """State of a plan.

    Parameters
    ----------
    m
        The M that the plan is for.
    layout
        Layout of the weights.
    make_launch
        Makes the launch. It quantises if the GEMM needs that, then multiplies, with ``quantize`` and ``gemm``.
    gemm, gemm_pdl, quantize, quantize_pdl
        Functions of the loaded kernels, and whether to launch each with PDL.
    scratch
        Returns the temporaries of one launch, such as the quantised activation and its scales.
    shape
        The launch shape that ``gemm`` takes; None if it takes none.
    swiglu
        The function of :mod:`~fp4dispatch.backends.own.swiglu` that can take the place of ``quantize``, or that can run
        before a GEMM that does not quantise; empty if none.
    """

    m: int
    layout: Layout
    make_launch: MakeLaunch
    gemm: Callable[..., None]
    gemm_pdl: bool
    quantize: Callable[..., None] = no_quantizer
    quantize_pdl: bool = False
    scratch: Callable[[], tuple[Tensor, ...]] = tuple
    shape: Any = None
    swiglu: str = ""
    launch: Launch = field(init=False)
    fits: bool = field(init=False)
    """Whether nothing is padded."""

    def __post_init__(self) -> None:
        self.launch = self.make_launch(self)
        self.fits = (self.layout.np, self.layout.kp) == (self.layout.n, self.layout.k)


def _shaped(loaded: Loaded, shape: Sequence[int]) -> Callable[..., None]:
    """Return the function of a kernel for few tokens with a launch shape of ours in place of its own."""
    function, numbers = getattr(loaded.module, f"{loaded.kernel}_shaped"), launch_numbers(shape)

    def gemm(*operands: Any) -> None:
        function(*operands[:-1], numbers, operands[-1])  # the last one is whether to launch with PDL

    return gemm


class CompiledBackend(LaunchChoice):
    """A backend on kernels of ``csrc/``, compiled, proved and loaded through :mod:`fp4dispatch.jit`."""

    @abc.abstractmethod
    def _state(self, problem: Problem, layout: Layout, device: torch.device, loaded: tuple[Loaded, ...]) -> State:
        """Return the state of a plan; ``loaded`` in the order of ``_kernels``."""

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Load the kernels; compile and prove them first if they are not in the cache.

        Raises
        ------
        ToolchainError, CompileError, ProofError, CacheError
            If a kernel cannot be compiled, proved or loaded.
        InputError
            If no kernel serves the problem.
        """
        launch = self.launch_for(problem, prepared)
        if launch is None:
            raise InputError(
                f"{self.name} has no kernel for {problem} on {gpu_of(prepared.tensors[0].device)[0]}; "
                "fp4dispatch explain lists what can run it"
            )
        return self.plan_launch(problem, prepared, launch)

    def plan_launch(self, problem: Problem, prepared: Prepared, launch: LaunchConfig) -> Plan:
        """Make a plan of one of :meth:`launches`; errors as of :meth:`plan_with`."""
        return self.plan_with(problem, prepared, launch.gemm, launch.shape)

    def plan_with(self, problem: Problem, prepared: Prepared, gemm: Build, shape: Sequence[int] | None = None) -> Plan:
        """Make a plan of one of :meth:`gemms`. :meth:`plan` chooses the build and the shape itself.

        Parameters
        ----------
        problem, prepared
            As of :meth:`plan`.
        gemm
            The build.
        shape
            Numbers of its launch shape; by default those that the launch model of an H200 or the kernel chooses.

        Raises
        ------
        ToolchainError, CompileError, ProofError, CacheError
            As of :meth:`plan`. A shape that the kernel cannot launch raises ValueError in ``run``.
        """
        device = prepared.tensors[0].device
        arch, sms = gpu_of(device)
        layout = Layout(*prepared.layout)
        loaded: list[Loaded] = []
        for name, build in self.with_quantizer(problem, gemm):
            kernel = jit.load(name, build, arch)
            numbers, room = None, 0
            if (tile := speed_of(name, build)) is not None:
                fallback = (tile, problem.m, layout.np, layout.kp, launch_model.gpu_with(sms))
                chosen = LaunchShape(*shape) if shape is not None else launch_model.best(*fallback).shape
                numbers, room = launch_numbers(chosen), launch_model.room_bytes(tile, chosen)
            loaded.append(Loaded(name, kernel.module, pdl.allowed(kernel, device), numbers, room))
        state = self._state(problem, layout, device, tuple(loaded))
        if shape is not None and loaded[0].shape is None:
            state = replace(state, gemm=_shaped(loaded[0], shape))
        return Plan(self.name, problem, state)

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation where the GEMM needs that, and launch it."""
        s: State = plan.state
        if s.fits and isinstance(x, Tensor) and out.shape[0] == s.m and taken_as_is(x, out, bias):
            s.launch(x, out, bias, prepared.tensors)
            return
        m, layout = out.shape[0], s.layout
        if s.m != m:
            raise InputError(f"{self.name}: out has {m} rows, the plan is for M={s.m}: make one for this M")
        d = out if direct(out, layout.np) else out.new_empty(m, layout.np)
        bias = bias_row(bias, out.dtype, layout.np)
        if isinstance(x, Tensor):
            s.launch(aligned(x, layout.kp), d, bias, prepared.tensors)
        else:
            self._run_quantized(plan, prepared.tensors, x, d, bias)
        if d is not out:
            out.copy_(d[:, : layout.n])

    def _run_quantized(self, plan: Plan, w: Weights, x: QuantizedActivation, d: Tensor, bias: Tensor | None) -> None:
        """Launch on an activation that the caller has quantised; ``d`` and ``bias`` fit."""
        layer = "FP4Linear" if plan.problem.op == "nvfp4_gemm" else "FP8Linear"
        raise InputError(f"{self.name} takes 16-bit activations, not quantised ones: use {layer}")

    def swiglu(self, plan: Plan, prepared: Prepared) -> Ready | None:
        """Return the launches with SwiGLU in the quantiser, or in a kernel before a GEMM on 16-bit activations."""
        s: State = plan.state
        layout, w = s.layout, prepared.tensors
        device = w[0].device
        if not s.swiglu or layout.kp != layout.k:
            return None
        arch = gpu_of(device)[0]
        if not swiglu.built_for(swiglu.kernel_of(s.swiglu), arch, layout.k):
            return None
        front = swiglu.front(s.swiglu, arch, device)
        if front is None:
            return None
        if s.swiglu == swiglu.PRODUCT:
            return self._product_first(plan, prepared, front)
        both = s.make_launch(replace(s, quantize=front.function, quantize_pdl=front.pdl))

        def launch(gate_up: Tensor, out: Tensor, bias: Tensor | None) -> None:
            if s.fits and taken_as_is(gate_up, out, bias):
                both(gate_up, out, bias, w)
                return
            d = out if direct(out, layout.np) else out.new_empty(out.shape[0], layout.np)
            both(aligned(gate_up, 2 * layout.k), d, bias_row(bias, out.dtype, layout.np), w)
            if d is not out:
                out.copy_(d[:, : layout.n])

        return launch

    def _product_first(self, plan: Plan, prepared: Prepared, front: Front) -> Ready:
        """Return the launches of SwiGLU, then of the GEMM on its 16-bit result."""
        s: State = plan.state
        k = s.layout.k

        def launch(gate_up: Tensor, out: Tensor, bias: Tensor | None) -> None:
            product = gate_up.new_empty(gate_up.shape[0], k)
            if s.fits and out.shape[0] == s.m and taken_as_is(gate_up, out, bias):
                front.function(gate_up, product, front.pdl)
                s.launch(product, out, bias, prepared.tensors)
                return
            front.function(aligned(gate_up, 2 * k), product, front.pdl)
            self.run(plan, prepared, product, out, bias)

        return launch

    def ready(self, plan: Plan, prepared: Prepared) -> Ready:
        """Return the launches alone, where nothing is padded."""
        s: State = plan.state
        if not s.fits:
            return super().ready(plan, prepared)
        return s.make_launch(replace(s, scratch=eager(s.scratch)), prepared.tensors)
