"""The contract of a backend: four methods, one file, one class.

The life of a backend::

    reasons  = backend.supports(problem, system)      # pure and cheap: every reason against, empty = can run
    prepared = backend.prepare(weights)               # once per layer: owns layout, pads zero-filled
    plan     = backend.plan(problem, prepared)        # host work: JIT, cuDNN graph, tuning; refused during capture
    backend.run(plan, prepared, x, out)               # launches only: no compile, sync, logging or environment read

A warm layer calls what ``backend.ready(plan, prepared)`` returned: ``run``, unless a backend has something quicker.

A plan never keeps a weight alive and never bakes in its address, so that layers of one shape share it: a 32-layer model
holds one plan (and one tuning) per distinct shape, and ``torch.compile`` sees the weights as ordinary tensor inputs.

``run`` takes the scratch it needs from torch's caching allocator on the current stream, or from
:mod:`~fp4dispatch.backends.own.scratch`. Both are safe on many streams and threads at once, and inside a CUDA graph
capture the memory belongs to the graph's own pool, so a replay can never read scratch that someone else freed or grew
(flashinfer#4666 is what a shared, growing workspace does).
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fp4dispatch.machine import log as _log
from fp4dispatch.problem import Activation, Op, Problem, Scaling, SfLayout
from fp4dispatch.problem.decision import Reason
from fp4dispatch.problem.measurement import LaunchConfig

if TYPE_CHECKING:
    import torch

    from fp4dispatch.machine.gpu_models import GpuModel
    from fp4dispatch.machine.system import System


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """Canonical weights of one linear layer, as a checkpoint holds them.

    Parameters
    ----------
    op, scaling
        As in :class:`~fp4dispatch.problem.Problem`.
    n, k
        Logical output and input features.
    weight
        ``nvfp4_gemm``: uint8 [N, K/2], two e2m1 codes a byte, even element in the low nibble.
        ``fp8_gemm``: float8_e4m3fn [N, K]. Row-major, contiguous.
    scale
        nvfp4: float8_e4m3fn, [N, K/16] where ``sf_layout`` is ``linear``, [pad128(N), pad4(K/16)] in ``128x4``;
        tensor: f32 []; row: f32 [N]; block128: f32 [ceil(N/128), ceil(K/128)]. The weight is ``q * scale`` (times
        ``global_scale``).
    global_scale
        nvfp4 only: f32 [S], one multiplying global scale per fused shard (ModelOpt's ``weight_scale_2``).
    shard_rows
        nvfp4 only: rows of each shard, summing to N; ``(N,)`` for a layer that is not fused.
    input_scale
        Static activation scale, f32 [] (value = q * input_scale; for nvfp4 the activation's global scale), or None
        where the activation is scaled from its own values at run time.
    sf_layout
        Layout of ``scale`` for nvfp4.
    """

    op: Op
    scaling: Scaling
    n: int
    k: int
    weight: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None
    shard_rows: tuple[int, ...] = ()
    input_scale: torch.Tensor | None = None
    sf_layout: SfLayout = "linear"


class QuantizedActivation(NamedTuple):
    """An activation that the caller has quantised already (raw operators).

    data: nvfp4 uint8 [M, K/2] or float8_e4m3fn [M, K]; scale: as ``LinearWeights.scale`` with M for N (``block128``
    activations are scaled 1x128: f32 [M, ceil(K/128)]); global_scale: f32 [] for nvfp4, else None.
    """

    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A layer's weights in one backend's own layout.

    ``backend``: name of the backend that made it. ``tensors``: all its tensors, in an order that the backend defines;
    ``layout`` is plain hashable data (sizes, padding, layout names) and equal for layers of one shape, so that it can
    key plans.
    """

    backend: str
    tensors: tuple[torch.Tensor, ...]
    layout: tuple[Any, ...]

    def nbytes(self) -> int:
        """Bytes held on the device."""
        return sum(t.numel() * t.element_size() for t in self.tensors)


@dataclass(eq=False)
class Plan:
    """What host work produced for one problem: kernels, handles, tuning. Holds no weights.

    ``note``: a fallback that the plan uses, and why; empty if it uses none.
    """

    backend: str
    problem: Problem
    state: Any = field(default=None, repr=False)
    note: str = ""


Ready = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor | None"], None]
"""``ready(x, out, bias)`` launches one plan on one layer's weights: what :meth:`Backend.ready` returns."""


class Backend(abc.ABC):
    """One way to run the GEMM of a linear layer."""

    name: ClassVar[str]
    """Public name, as in ``FP4_GEMM_BACKEND``."""

    activations: ClassVar[dict[Op, tuple[Activation, ...]]]
    """Activation formats per op that the backend runs, preferred first; an op that is absent is not supported."""

    auto: ClassVar[bool] = False
    """For plug-ins: whether ``auto`` may choose it, once it has passed the self-check on the device.

    One that does not say ``auto = True`` runs only where it is named. Built-ins need not say it: see
    :func:`fp4dispatch.policy.capability.offered`."""

    plans_by_m: ClassVar[bool] = True
    """Whether a plan holds for one M alone. False: one plan serves every M, so one warm-up covers them all."""

    layout: ClassVar[str] = ""
    """Name of the weights' layout, where backends share one; empty: this backend's own.

    Backends of one layout make the same ``tensors`` and ``layout`` of the same weights, so that a layer that switches
    between them by M holds the weights once."""

    @property
    def layout_name(self) -> str:
        """Name of the weights' layout; the backend's own name if it shares none."""
        return self.layout or self.name

    @abc.abstractmethod
    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem; empty means that it can. Pure and cheap."""

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the (kernel, variant) of ours that :meth:`plan` will load on a GPU, so that they can compile at once.

        Only speed depends on it: a kernel that is not named compiles when it is loaded.
        """
        return ()

    def predict(self, problem: Problem, gpu: GpuModel) -> float | None:
        """Return the predicted microseconds of a call, quantiser included, weights in memory; None without a model.

        Pure. ``problem.activation`` is resolved. Candidates are compared by it: of one GPU, all must be in one unit.
        """
        return None

    @abc.abstractmethod
    def prepare(self, weights: LinearWeights) -> Prepared:
        """Bring weights into this backend's layout, once. Padding is zero-filled. Copies nothing that already fits."""

    def canonical(self, prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return weight and scale exactly as :meth:`prepare` was given them (``linear``), or None where it cannot.

        A layer may then do without its own copy. Host work; new tensors.
        """
        return None

    @abc.abstractmethod
    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Do all host work for a problem (``problem.activation`` is resolved, not ``any``). Refused during capture."""

    def launches(self, problem: Problem, prepared: Prepared) -> tuple[LaunchConfig, ...]:
        """Return the launches of its own kernels that ``tune`` should time, first the one that :meth:`plan` chooses.

        Empty where there is nothing to choose: then the plan of :meth:`plan` is timed.
        """
        return ()

    def plan_launch(self, problem: Problem, prepared: Prepared, launch: LaunchConfig) -> Plan:
        """Make the plan of one of :meth:`launches`. Errors as of :meth:`plan`; ``run`` may refuse what does not fit."""
        raise NotImplementedError(f"{self.name} lists no launches")

    def plan_key(self, problem: Problem, device: torch.device) -> Hashable:
        """Return the key of a plan: a plan made for one problem serves every problem of the same key."""
        return problem if self.plans_by_m else replace(problem, m=1)

    @abc.abstractmethod
    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: torch.Tensor | QuantizedActivation,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Launch ``out[M,N] = x[M,K] @ W^T (+ bias)``; M >= 1. No compile, sync, logging or environment read.

        ``out`` has M rows, or as many as :meth:`out_rows` says: what is in those beyond M does not matter.
        """

    def out_rows(self, plan: Plan, m: int) -> int:
        """Return the rows, at least M, of the memory that a layer gives :meth:`run` for the output of M tokens.

        More than M is for GEMMs that pad M: they then write the output in place, where they would copy it. Only
        speed depends on it: ``run`` takes an ``out`` of M rows too.
        """
        return m

    def ready(self, plan: Plan, prepared: Prepared) -> Ready:
        """Return :meth:`run` of a plan and weights as the eager fast path of a layer calls it, ``ready(x, out, bias)``.

        Same launches and results, for less host time: do the look-ups here, not in each call. The layer guarantees for
        each call: M is the plan's; ``x`` [M, K] has the planned dtype, is contiguous, on 16 bytes and on the device of
        the weights, which is the current device; ``out`` [M, N], or with the rows of :meth:`out_rows`, is fresh from
        the allocator; ``bias`` has the dtype of ``out`` and is contiguous; the current stream is not being captured.
        """
        return functools.partial(self.run, plan, prepared)

    def swiglu(self, plan: Plan, prepared: Prepared) -> Ready | None:
        """Return a launch that starts from ``gate_up``, ``launch(gate_up, out, bias)``; None where there is none.

        It gives the bits of :meth:`run` on ``silu(gate) * up`` by torch's two operations
        (:func:`fp4dispatch.backends.activations.swiglu`). ``gate_up`` [M, 2K] holds K of the gate, then K of up; any
        strides and alignment, the planned dtype, on the device of the weights, which is the current device. ``out`` is
        as :meth:`ready` takes it. Safe to capture. To make it is host work: it may load a kernel, and raises
        CaptureError where that comes too late.
        """
        return None

    def release(self, plan: Plan) -> None:  # noqa: B027  (most plans hold nothing)
        """Give back what this backend itself keeps for a plan. Only for plans that neither a layer nor a graph uses."""

    def activation_for(self, problem: Problem) -> Activation | None:
        """Return the activation format this backend would use for a problem, or None where it has none."""
        formats = self.activations.get(problem.op, ())
        if problem.activation == "any":
            return formats[0] if formats else None
        return problem.activation if problem.activation in formats else None


def rows_for(backend: Backend, plan: Plan, m: int) -> int:
    """Return the rows of the memory of an output of M tokens: what the backend asks for, at least M."""
    return max(m, backend.out_rows(plan, m))


def builds_of(backend: Backend, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
    """Ask a backend which kernels to compile ahead. Empty if its ``builds`` fails: only speed depends on the answer."""
    try:
        return tuple((str(kernel), str(variant)) for kernel, variant in backend.builds(problem, device))
    except Exception as error:  # an error of a plug-in is reported when it plans
        _log.debug("%s cannot name what it builds for %s: %s: %s", backend.name, problem, type(error).__name__, error)
        return ()
