"""Which build of a kernel of ``csrc/`` runs a problem, and in which launch shape.

A timed launch comes first, then the one that the time models predict to be the fastest, then that of the rules. Where
nothing can be compiled, only finished builds are chosen from.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from fp4dispatch.backends.base import Backend, Prepared
from fp4dispatch.backends.own import finished
from fp4dispatch.backends.own.tensors.operands import gpu_of, speeds_on
from fp4dispatch.backends.own.tiling import launch_model, launches, search
from fp4dispatch.backends.own.tiling.launches import Tuned
from fp4dispatch.backends.own.tiling.search import Fastest
from fp4dispatch.backends.own.tiling.speeds import Speeds
from fp4dispatch.backends.own.tiling.speeds import of as speeds_of
from fp4dispatch.backends.own.tiling.tiles import runs_all, speed_of
from fp4dispatch.machine.gpu_models import GpuModel
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import Arch
from fp4dispatch.problem.decision import Reason
from fp4dispatch.problem.measurement import LaunchConfig

Build = tuple[str, str]
"""Names of a kernel and of one of its builds."""


class Layout(NamedTuple):
    """Sizes of prepared weights [n, k]; ``np`` and ``kp`` are those of the kernel's output and of K, padded."""

    n: int
    k: int
    np: int
    kp: int
    has_input_scale: bool = False


def _launch(gemm: Build, shape: Sequence[int] | None) -> LaunchConfig:
    return LaunchConfig(*gemm, None if shape is None else tuple(shape))


def gpu_and_speeds(device: torch.device) -> tuple[Arch, int, Speeds | None]:
    """Return the arch of a GPU, its number of SMs, and the constants of its time models."""
    return *gpu_of(device), speeds_on(device)


class LaunchChoice(Backend):
    """The part of a backend on kernels of ``csrc/`` that chooses a build and its launch shape."""

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

    def _finished_only(self, problem: Problem, device: torch.device) -> tuple[Build, ...]:
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

    def launch_for(self, problem: Problem, prepared: Prepared) -> LaunchConfig | None:
        """Return the launch that :meth:`plan` makes a plan of; None where no kernel serves the problem."""
        return self._cached_choice(problem, Layout(*prepared.layout), prepared.tensors[0].device)

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
        only = self._finished_only(problem, device)
        gemms = only or self.gemms(problem, arch, sms)
        found = [self.choice_without_times(problem, layout, arch, sms, known, only) for known in (speeds, None)]
        best = [] if speeds is None else launches.worth_timing(gemms, padded, speeds)
        without = [LaunchConfig(*gemm) for gemm in gemms if not launches.has_shapes(*gemm)]
        return tuple(dict.fromkeys(launch for launch in (*found, *best, *without) if launch is not None))

    def _cached_choice(self, problem: Problem, layout: Layout, device: torch.device) -> LaunchConfig | None:
        """Return :meth:`_chosen`, kept for all numbers of tokens that are alike, until other launches are timed."""
        known = speeds_on(device)
        if known is None:
            return self._chosen(problem, layout, device)
        key = (search.representative(problem), layout, device, self._tuned(problem, device))
        found = self._choices.get(key)
        if found is None or found[0] is not known:
            chosen = self._chosen(problem, layout, device)
            if chosen is None or self._finished_only(problem, device):  # what is finished may change
                return chosen
            found = self._choices[key] = known, chosen
        return found[1]

    @functools.cached_property
    def _choices(self) -> dict[Hashable, tuple[Speeds, LaunchConfig]]:
        return {}

    def _chosen(self, problem: Problem, layout: Layout, device: torch.device) -> LaunchConfig | None:
        """Return the launch for a plan; says so where the best build cannot be compiled."""
        only = self._finished_only(problem, device)
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

    def choice_without_times(
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
