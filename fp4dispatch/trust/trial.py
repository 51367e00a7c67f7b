"""Run the canaries of one kind on a backend, judge every output, and time builds and checks separately.

Each canary (:mod:`fp4dispatch.trust.canary`) runs three times through one plan, into poisoned memory. The input buffer
is rewritten before each launch: first input, second, first again. Every output is judged tile by tile
(:mod:`fp4dispatch.trust.tilecheck`); the first and the last must be equal in every bit.

Build time is what a process spends once a shape: compile and load kernels, and :meth:`Backend.plan`. All plans are made
before the first launch. Everything else is check time, also what a backend builds in ``prepare`` or ``run``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fp4dispatch import jit
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation, builds_of
from fp4dispatch.backends.reference import without_autocast
from fp4dispatch.errors import CaptureError
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import reasons_of
from fp4dispatch.problem import Activation, Op, OutDtype, Problem, Scaling
from fp4dispatch.trust.canary import DTYPE, Canary, canaries
from fp4dispatch.trust.threads import one_thread
from fp4dispatch.trust.tilecheck import Finding, Poisoned, first_difference, judge

_RUNS = (0, 1, 0)
"""The input of each run."""

_Done = TypeVar("_Done")
_Next = TypeVar("_Next")


@dataclass
class Outcome:
    """What a run of canaries found. An exception skips the later canaries; the earlier ones are still judged.

    ``ran``: canaries that were judged. ``notes``: what was skipped, and why. ``stopped``: by an exception or by a lack
    of memory. ``dead``: the device no longer answers. ``lasting``: nothing outside the kernels stopped the run.
    ``build_seconds``: time to compile, load and plan. ``short_of_memory``: memory ran out.
    """

    ran: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lasting: bool = True
    stopped: bool = False
    dead: bool = False
    build_seconds: float = 0.0
    short_of_memory: bool = False

    @contextmanager
    def of(self, canary: object) -> Iterator[None]:
        """Record what a step for a canary raises; ``str(canary)`` is its name."""
        try:
            yield
        except (CaptureError, KeyboardInterrupt, GeneratorExit):
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            self.notes.append(f"{canary}: memory ran out: {error}")
            self.lasting, self.stopped, self.short_of_memory = self.dead, True, True
        except BaseException as error:  # a plug-in may do anything, sys.exit() too
            self.findings.append(Finding(str(canary), "raised", f"raised {type(error).__name__}: {error}"))
            self.dead |= "CUDA error" in str(error)
            self.lasting, self.stopped = self.dead, True  # if the device is dead, later processes must know

    @contextmanager
    def building(self) -> Iterator[None]:
        """Count the time of the body as build time."""
        started = time.perf_counter()
        yield
        self.build_seconds += time.perf_counter() - started


def run(
    backend: Backend,
    op: Op,
    scaling: Scaling,
    activation: Activation,
    system: System,
    device: torch.device,
    seed: int,
    half: OutDtype | None,
) -> Outcome:
    """Run every canary that a backend supports, and judge it.

    Arguments as of :func:`fp4dispatch.trust.selfcheck.check`. Synchronises the device.

    Raises
    ------
    CaptureError
        If the backend refuses to plan because a CUDA graph is being captured.
    """
    outcome = Outcome()
    with plain_torch(device):
        if system.arch is not None:
            names = builds(backend, op, scaling, activation, system, device, half)
            with outcome.building():
                jit.build_together(names, system.arch)
        laid = _lay_out(backend, canaries(op, scaling, activation, seed, half), system, device, outcome)
        with outcome.building():
            planned = _until_one_raises(laid, partial(_plan, backend, device), outcome)
        launched = _until_one_raises(planned, partial(_launch, backend, device), outcome)
        for canary, outputs in launched:
            with outcome.of(canary):
                on_cpu = [output.cpu() for output in outputs]
                with one_thread():
                    found = _judge(canary, on_cpu)
                outcome.findings += [found] if found else []
                outcome.ran.append(str(canary))
    return outcome


def builds(
    backend: Backend,
    op: Op,
    scaling: Scaling,
    activation: Activation,
    system: System,
    device: torch.device,
    half: OutDtype | None = None,
) -> set[tuple[str, str]]:
    """Return (kernel, variant) of our kernels that :func:`run` will load with these arguments; none on a CPU."""
    if device.type != "cuda":
        return set()
    each = (canary.problem for canary in canaries(op, scaling, activation, 0, half))
    return {name for p in each if _supported(backend, p, system) for name in builds_of(backend, p, device)}


def _supported(backend: Backend, problem: Problem, system: System) -> bool:
    """Whether a backend supports a problem. False where ``supports`` raises: then the run reports that."""
    try:
        return not reasons_of(backend, problem, system)
    except Exception:
        return False


# --------------------------------------------------------------------------------------------------------------- steps


def _lay_out(
    backend: Backend, each: tuple[Canary, ...], system: System, device: torch.device, outcome: Outcome
) -> list[tuple[Canary, Prepared]]:
    """Prepare the weights of the canaries that the backend supports. Waits for the device."""
    laid: list[tuple[Canary, Prepared]] = []
    for canary in each:
        if outcome.stopped:
            break
        with outcome.of(canary):
            if reasons := reasons_of(backend, canary.problem, system):
                outcome.notes.append(f"{canary}: {'; '.join(reason.sentence() for reason in reasons)}")
            else:
                prepared = backend.prepare(_weights(canary.weights, device))
                if not isinstance(prepared, Prepared):
                    raise TypeError(f"prepare() returned {repr(prepared)[:80]}; need a Prepared")
                finish(device)
                laid.append((canary, prepared))
    return laid


def _until_one_raises(
    each: list[tuple[Canary, _Done]], step: Callable[[Canary, _Done], _Next], outcome: Outcome
) -> list[tuple[Canary, _Next]]:
    """Do a step for each canary until one raises; return the results so far."""
    taken: list[tuple[Canary, _Next]] = []
    for before, (canary, done) in enumerate(each):
        with outcome.of(canary):
            taken.append((canary, step(canary, done)))
        if len(taken) == before:
            break
    return taken


def finish(device: torch.device) -> None:
    """Wait for the device, so that later times hold no earlier work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def plain_torch(device: torch.device) -> Iterator[None]:
    """Run the body on a device without inference mode, gradients and autocast, whatever the caller has set."""
    with torch.inference_mode(mode=False), torch.no_grad(), without_autocast():
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield


# ---------------------------------------------------------------------------------------------------------- one canary


def _plan(backend: Backend, device: torch.device, canary: Canary, prepared: Prepared) -> tuple[Prepared, Plan]:
    """Make a plan. Waits for the device."""
    plan = planned(backend, canary.problem, prepared)
    finish(device)
    return prepared, plan


def planned(backend: Backend, problem: Problem, prepared: Prepared) -> Plan:
    """Make a plan; TypeError where a backend returns something else."""
    plan = backend.plan(problem, prepared)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan() returned {repr(plan)[:80]}; need a Plan")
    return plan


def _launch(backend: Backend, device: torch.device, canary: Canary, ready: tuple[Prepared, Plan]) -> list[Tensor]:
    """Run a canary; return each output with its guards, on the device. Does not synchronise."""
    prepared, plan = ready
    problem = canary.problem
    bias = None if canary.bias is None else canary.bias.to(device, copy=True)
    inputs = [_activation(each.x, device) for each in canary.inputs]
    x = _activation(canary.inputs[0].x, device)
    target = Poisoned(problem.m, problem.n, DTYPE[problem.out_dtype], device)
    outputs = []
    for index in _RUNS:
        _rewrite(x, inputs[index])
        target.poison()
        backend.run(plan, prepared, x, target.out, bias)
        outputs.append(target.snapshot())
    return outputs


def _judge(canary: Canary, outputs: list[Tensor]) -> Finding | None:
    """Return the first fault in the runs of a canary."""
    dtype = DTYPE[canary.problem.out_dtype]

    def against(index: int, output: Tensor) -> Finding | None:
        answer = canary.inputs[index]
        return judge(str(canary), output, dtype, answer.product, answer.size, answer.allowed, canary.bias)

    for run, (index, output) in enumerate(zip(_RUNS, outputs, strict=True)):
        found = against(index, output)
        if found is None:
            continue
        if run and against(_RUNS[run - 1], output) is None:
            return replace(found, kind="stale", detail="holds the result of the call before, whose input was another")
        return found
    return first_difference(str(canary), outputs[0], outputs[-1], canary.problem.m, canary.problem.n)


def _weights(weights: LinearWeights, device: torch.device) -> LinearWeights:
    """Return a copy on the device, so that a backend cannot change the canary."""
    moved: dict[str, Any] = {
        each.name: value.to(device, copy=True)
        for each in fields(weights)
        if isinstance(value := getattr(weights, each.name), Tensor)
    }
    return replace(weights, **moved)


def _activation(x: Tensor | QuantizedActivation, device: torch.device) -> Tensor | QuantizedActivation:
    if isinstance(x, Tensor):
        return x.to(device, copy=True)
    return QuantizedActivation(x.data.to(device, copy=True), x.scale.to(device, copy=True))


def _rewrite(target: Tensor | QuantizedActivation, source: Tensor | QuantizedActivation) -> None:
    """Copy another activation into the same memory, so that a result cached by address shows."""
    if isinstance(target, Tensor):
        assert isinstance(source, Tensor)
        target.copy_(source)
        return
    assert isinstance(source, QuantizedActivation)
    target.data.copy_(source.data)
    target.scale.copy_(source.scale)
