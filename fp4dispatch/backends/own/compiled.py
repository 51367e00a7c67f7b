"""What the backends on kernels of ``csrc/`` share: loading the kernels of a plan, and launching on any operands.

A backend of this kind says which kernels serve a problem (``_kernels``), lays out the weights (``prepare``) and makes
the plan's :class:`State` of the loaded kernels (``_state``). All else is here.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import jit
from fp4dispatch.backends.base import Backend, Plan, Prepared, QuantizedActivation, Ready
from fp4dispatch.backends.own import finished, swiglu
from fp4dispatch.backends.own.pdl_trial import pdl
from fp4dispatch.backends.own.scratch import eager
from fp4dispatch.backends.own.swiglu import Front
from fp4dispatch.backends.own.tensors.operands import (
    aligned,
    bias_row,
    direct,
    gpu_of,
    launch_numbers,
    speeds_on,
    taken_as_is,
)
from fp4dispatch.backends.own.tiling import launch_model, launches, search
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape
from fp4dispatch.backends.own.tiling.launches import Tuned
from fp4dispatch.backends.own.tiling.search import Fastest
from fp4dispatch.backends.own.tiling.speeds import Speeds
from fp4dispatch.backends.own.tiling.speeds import of as speeds_of
from fp4dispatch.backends.own.tiling.tiles import runs_all, speed_of
from fp4dispatch.errors import InputError
from fp4dispatch.machine.gpu_models import GpuModel
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import Arch
from fp4dispatch.problem.decision import Reason
from fp4dispatch.problem.measurement import LaunchConfig

N_MULTIPLE = 8
"""Columns of the output that a kernel stores at a time: 16 bytes."""

Build = tuple[str, str]
"""Names of a kernel and of one of its builds."""

Weights = tuple[Tensor, ...]
"""``Prepared.tensors``."""

Launch = Callable[..., None]
"""``launch(x, out, bias, weights)``, on operands that fit as they are: contiguous, on 16 bytes, the bias like ``out``.

A closure, so that a call looks nothing up. Layers of one shape share a plan and its launch; each passes its weights.
"""

MakeLaunch = Callable[..., Launch]
"""``make_launch(state, weights=())`` returns a launch; with weights, one that needs no last argument."""


class Layout(NamedTuple):
    """Sizes of prepared weights [n, k]; ``np`` and ``kp`` are those of the kernel's output and of K, padded."""

    n: int
    k: int
    np: int
    kp: int
    has_input_scale: bool = False


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


def _launch(gemm: Build, shape: Sequence[int] | None) -> LaunchConfig:
    return LaunchConfig(*gemm, None if shape is None else tuple(shape))


def _shaped(loaded: Loaded, shape: Sequence[int]) -> Callable[..., None]:
    """Return the function of a kernel for few tokens with a launch shape of ours in place of its own."""
    function, numbers = getattr(loaded.module, f"{loaded.kernel}_shaped"), launch_numbers(shape)

    def gemm(*operands: Any) -> None:
        function(*operands[:-1], numbers, operands[-1])  # the last one is whether to launch with PDL

    return gemm


def gpu_and_speeds(device: torch.device) -> tuple[Arch, int, Speeds | None]:
    """Return the arch of a GPU, its number of SMs, and the constants of its time models."""
    return *gpu_of(device), speeds_on(device)


class CompiledBackend(Backend):
    """A backend on kernels of ``csrc/``, compiled, proved and loaded through :mod:`fp4dispatch.jit`."""

    @abc.abstractmethod
    def _kernels(self, problem: Problem, arch: Arch, sms: int, speeds: Speeds | None = None) -> tuple[Build, ...]:
        """Return the builds that serve a problem: the GEMM, then its quantiser, if any. Empty where none serves it.

        ``speeds``: the constants of the GPU, where it has any.
        """

    def _fastest(self, problem: Problem, arch: Arch, sms: int, speeds: Speeds) -> tuple[Build, Fastest] | None:
        """Return the build that is predicted to be the fastest, and its launch; None where the rules choose."""
        return None

    @abc.abstractmethod
    def gemms(self, problem: Problem, arch: Arch | None, sms: int) -> tuple[Build, ...]:
        """Name every build of a GEMM that runs a problem, also those that are slower for its M than others."""

    def with_quantizer(self, problem: Problem, gemm: Build) -> tuple[Build, ...]:
        """Return a GEMM with the quantiser that it needs, if any."""
        return (gemm,)

    @abc.abstractmethod
    def _state(self, problem: Problem, layout: Layout, device: torch.device, loaded: tuple[Loaded, ...]) -> State:
        """Return the state of a plan; ``loaded`` in the order of ``_kernels``."""

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem.

        Where nothing can be compiled, one finished GEMM with its quantiser is enough.
        """
        reasons = check(self.name, problem, system)
        if reasons or not (lacks := finished.lacking(self.name, problem, system)):
            return reasons
        return () if self._finished(problem, system) else lacks

    def _finished(self, problem: Problem, system: System) -> tuple[Build, ...]:
        """Return the GEMMs that run a problem and need no compiling, nor does what runs before them."""
        this = replace(problem, activation=self.activation_for(problem) or problem.activation)
        gemms = self.gemms(this, system.arch, 0)
        found = tuple(gemm for gemm in gemms if finished.all_there(self.with_quantizer(this, gemm), system))
        return found if any(runs_all(*gemm) for gemm in found) else ()

    def _only(self, problem: Problem, device: torch.device) -> tuple[Build, ...]:
        """Return the GEMMs that a plan is limited to, where nothing can be compiled: the finished ones.

        Empty where any will do, and where none is finished: loading one then says what is missing.
        """
        system = finished.seen_from(device)
        if system is None or not finished.lacking(self.name, problem, system):
            return ()
        return self._finished(problem, system)

    def builds(self, problem: Problem, device: torch.device) -> tuple[Build, ...]:
        """Name the kernels that a plan will load."""
        chosen = self._chosen(problem, Layout(problem.n, problem.k, problem.n, problem.k), device)
        return () if chosen is None else self.with_quantizer(problem, chosen.gemm)

    def predict(self, problem: Problem, gpu: GpuModel) -> float | None:
        """Return what the models say of the build that serves a problem; None for a GPU or a build without a model."""
        speeds = speeds_of(gpu)
        if speeds is None:
            return None
        if (found := self._fastest(problem, gpu.arch, gpu.sms, speeds)) is not None:
            return found[1].us
        builds = self._kernels(problem, gpu.arch, gpu.sms, speeds)
        return launches.microseconds(LaunchConfig(*builds[0]), problem, speeds) if builds else None

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

    def launch_for(self, problem: Problem, prepared: Prepared) -> LaunchConfig | None:
        """Return the launch that :meth:`plan` makes a plan of; None where no kernel serves the problem."""
        return self._kept(problem, Layout(*prepared.layout), prepared.tensors[0].device)

    def plan_key(self, problem: Problem, device: torch.device) -> Hashable:
        """Return the key of a plan. Other launches that ``tune`` has timed need another plan."""
        return super().plan_key(problem, device), self._tuned(problem, device)

    def _tuned(self, problem: Problem, device: torch.device) -> Tuned | None:
        """Return the timed launches that serve a problem."""
        return launches.tuned(self.name, search.representative(problem), device.index or 0)

    def launches(self, problem: Problem, prepared: Prepared) -> tuple[LaunchConfig, ...]:
        """Return the launches that are worth timing: first what the models or the rules alone choose, then others."""
        device, layout = prepared.tensors[0].device, Layout(*prepared.layout)
        arch, sms, speeds = gpu_and_speeds(device)
        padded = replace(problem, n=layout.np, k=layout.kp)
        only = self._only(problem, device)
        gemms = only or self.gemms(problem, arch, sms)
        found = [self._untuned(problem, layout, arch, sms, known, only) for known in (speeds, None)]
        best = [] if speeds is None else launches.worth_timing(gemms, padded, speeds)
        without = [LaunchConfig(*gemm) for gemm in gemms if not launches.has_shapes(*gemm)]
        return tuple(dict.fromkeys(launch for launch in (*found, *best, *without) if launch is not None))

    def plan_launch(self, problem: Problem, prepared: Prepared, launch: LaunchConfig) -> Plan:
        """Make a plan of one of :meth:`launches`; errors as of :meth:`plan_with`."""
        return self.plan_with(problem, prepared, launch.gemm, launch.shape)

    def _kept(self, problem: Problem, layout: Layout, device: torch.device) -> LaunchConfig | None:
        """Return :meth:`_chosen`, kept for all numbers of tokens that are alike, until other launches are timed."""
        known = speeds_on(device)
        if known is None:
            return self._chosen(problem, layout, device)
        key = (search.representative(problem), layout, device, self._tuned(problem, device))
        found = self._choices.get(key)
        if found is None or found[0] is not known:
            chosen = self._chosen(problem, layout, device)
            if chosen is None or self._only(problem, device):  # what is finished may change
                return chosen
            found = self._choices[key] = known, chosen
        return found[1]

    @functools.cached_property
    def _choices(self) -> dict[Hashable, tuple[Speeds, LaunchConfig]]:
        return {}

    def _chosen(self, problem: Problem, layout: Layout, device: torch.device) -> LaunchConfig | None:
        """Return the launch for a plan; says so where the best build cannot be compiled."""
        only = self._only(problem, device)
        chosen = self._best(problem, layout, device, only)
        if chosen is not None and only:
            wanted = self._best(problem, layout, device, ())
            if wanted is not None and wanted.gemm != chosen.gemm:
                finished.say(self.name, wanted.gemm, chosen.gemm)
        return chosen

    def _best(
        self, problem: Problem, layout: Layout, device: torch.device, only: Sequence[Build]
    ) -> LaunchConfig | None:
        """Return a launch: a timed one, else the predicted one, else that of the rules.

        ``only``: the builds that it may be; empty for any. With models, numbers of tokens that are alike get the same.
        """
        if gpu_and_speeds(device)[2] is not None:
            problem = search.representative(problem.eager())
        timed = self._tuned(problem, device)
        if timed is not None and (launch := self._timed(timed, problem, layout, device, only)) is not None:
            return launch
        return self._predicted(problem, layout, *gpu_and_speeds(device), only)

    def _predicted(
        self,
        problem: Problem,
        layout: Layout,
        arch: Arch,
        sms: int,
        speeds: Speeds | None,
        only: Sequence[Build],
    ) -> LaunchConfig | None:
        """Return the launch that the models choose; without ``speeds`` the build of the rules.

        If that is not among ``only``: the one of these that is predicted to be the fastest, or the first.
        """
        as_stored = (layout.np, layout.kp) == (problem.n, problem.k)
        found = None if speeds is None else self._fastest(problem, arch, sms, speeds)
        if found is not None and as_stored and (not only or found[0] in only):
            return _launch(found[0], found[1].shape)
        builds = self._kernels(problem, arch, sms, speeds)
        if not builds:
            return None
        gemm = builds[0]
        if only and gemm not in only:
            padded = replace(problem, n=layout.np, k=layout.kp)
            first = None if speeds is None else launches.put_first(tuple(only), padded, speeds)
            gemm = only[0] if first is None else first[1].gemm
        return _launch(gemm, None if speeds is None else self._shape(problem, layout, gemm, speeds))

    def _timed(
        self, timed: Tuned, problem: Problem, layout: Layout, device: torch.device, only: Sequence[Build]
    ) -> LaunchConfig | None:
        """Return the fastest of timed launches for a problem; None where none fits it."""
        arch, sms, speeds = gpu_and_speeds(device)
        padded = replace(problem, n=layout.np, k=layout.kp)
        gpu = launch_model.gpu_with(sms) if speeds is None else speeds.many_tokens
        return launches.fastest(timed, padded, tuple(only) or self.gemms(problem, arch, sms), speeds, gpu)

    def _untuned(
        self,
        problem: Problem,
        layout: Layout,
        arch: Arch,
        sms: int,
        speeds: Speeds | None,
        only: Sequence[Build],
    ) -> LaunchConfig | None:
        """Return the launch for a problem's M without timed ones; without ``speeds`` that of the rules."""
        chosen = self._predicted(problem, layout, arch, sms, speeds, only)
        if chosen is None or speeds is not None or (tile := speed_of(*chosen.gemm)) is None:
            return chosen
        found = launch_model.best(tile, problem.m, layout.np, layout.kp, launch_model.gpu_with(sms))
        return _launch(chosen.gemm, found.shape)

    def _shape(self, problem: Problem, layout: Layout, gemm: Build, speeds: Speeds) -> Sequence[int] | None:
        """Return the launch shape that the models say is fastest; None for a kernel that is given none."""
        return launches.best_shape(*gemm, replace(problem, n=layout.np, k=layout.kp), speeds)

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
