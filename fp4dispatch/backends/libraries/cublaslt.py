"""cuBLASLt through torch's scaled matmul (``torch._scaled_mm`` and ``_scaled_mm_v2``).

On Hopper, FP8 layers call cuBLASLt without torch's operator
(:mod:`~fp4dispatch.backends.libraries.cublaslt_direct`): the same GEMM for less host time.

What torch requires of the operands (https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/ScaledBlas.cpp):

* A row-major, B [N, K] row-major; K and N multiples of 16. ``prepare`` pads other sizes with zeros; the output is
  sliced.
* ``row`` scaling runs on cuBLASLt on sm_90 from CUDA 12.9 on. Elsewhere torch's own CUTLASS kernels run, which write
  bfloat16 only.
* ``block128`` needs sm_90 and cuBLASLt 12.9: scales of A [M, K/128] with M the fastest dimension, scales of B
  [K/128 rounded up to 4, N/128] with K the fastest. M is a multiple of 4: others are padded, and a layer gives the
  output these rows too (:meth:`~fp4dispatch.backends.base.Backend.out_rows`).
* NVFP4: e2m1 pairs, e4m3 scales in the 128x4 layout, and two f32 global scales whose product is alpha, on the device.

``use_fast_accum`` stays off: Hopper's FP8 tensor cores keep about 14 bits of a running sum; with it off, cuBLASLt adds
partial sums in f32.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from packaging.version import Version
from torch import Tensor

from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation, Ready
from fp4dispatch.backends.libraries.cublaslt_direct import M_OF_BLOCKS, DirectGemms, direct_gemms
from fp4dispatch.backends.libraries.cublaslt_gemms import (
    Kind,
    State,
    kind_of,
    launch_behind,
    launch_of,
    parts_of,
    run_block128,
    run_fp8,
    run_nvfp4,
    scales_rows,
    view_of,
)
from fp4dispatch.backends.libraries.cublaslt_weights import Layout, prepare
from fp4dispatch.backends.own import swiglu
from fp4dispatch.backends.own.scratch import ScratchByM
from fp4dispatch.backends.own.tensors import quantizers
from fp4dispatch.backends.own.tensors.operands import taken_as_is
from fp4dispatch.backends.own.tensors.quantizers import (
    Nvfp4Quantizer,
    Quantizers,
    ones,
)
from fp4dispatch.backends.own.tiling import predict, speeds
from fp4dispatch.formats import round_up, zero_pad
from fp4dispatch.machine import capture
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.gpu_models import GpuModel
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.policy.catalogue import parse_version
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.arch import SM90
from fp4dispatch.problem.decision import Reason

_ROWS_FROM = Version("12.9")
"""First CUDA whose cuBLASLt supports row scaling, on sm_90."""

DOUBT = 1.08
"""Times of what the model of cuBLASLt by row says: it is off by 4 to 5 % with corrections and by 10 % without, and a
choice is for a range of M. Of 1.08, 1.04 and 1.00 this costs least (bench/notes/corrections.md). Under block scales
1.00 costs least (bench/notes/block-scales.md)."""


_FRONTS: dict[Kind, str] = {
    "block": "fp8_swiglu_1x128",
    "row": "fp8_swiglu_row",
    "static": "fp8_swiglu_tensor",
    "static_row": "fp8_swiglu_tensor",
}
"""The function of SwiGLU that takes the place of a launch's quantiser."""


class CublasLtBackend(Backend):
    """FP8 (tensor, row, block128) and NVFP4 x NVFP4 on the cuBLASLt that torch brings."""

    name = "cublaslt"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"nvfp4_gemm": ("nvfp4",), "fp8_gemm": ("fp8",)}
    plans_by_m = False

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def predict(self, problem: Problem, gpu: GpuModel) -> float | None:
        """Return the predicted time of an FP8 GEMM, quantiser included; NVFP4 has no model."""
        found = speeds.of(gpu)
        if found is None or problem.op != "fp8_gemm":
            return None
        if problem.scaling == "block128":
            return predict.cublaslt_block(problem, found)
        return predict.quantiser(problem, found, packed=False) + DOUBT * predict.cublaslt(problem, found)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the quantiser that a plan will load."""
        return quantizers.builds(problem)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Pad with zeros to what cuBLASLt needs; weights that fit are not copied."""
        tensors, layout = prepare(weights)
        return Prepared(self.name, tuple(tensors), tuple(layout))

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Decide what is fused, and load our kernels for activations, compiling them first where needed.

        cuBLASLt's own heuristic runs at launch, is cached by torch and safe to capture.

        Raises
        ------
        CaptureError
            During capture.

        Notes
        -----
        Where our kernels cannot be compiled, torch's operations quantise: a warning and the plan's ``note`` say so.
        """
        capture.forbid_in_capture(f"planning {problem}", "fp4dispatch.warmup(model, tokens=[...])")
        layout = Layout(*prepared.layout)
        device = prepared.tensors[0].device
        block = layout.scaling == "block128"
        epilogue = (
            (layout.scaling == "nvfp4" and layout.per_row)
            or (problem.bias and (block or problem.out_dtype == "float32"))
            or (block and problem.out_dtype == "float16")
        )
        rows_need_bf16 = _rows_need_bf16(prepared.tensors[0])
        found, nvfp4, note = _kernels(layout, device)
        launch, behind = None, None
        rows_fit = not (layout.per_row and rows_need_bf16) or problem.out_dtype == "bfloat16"
        if (
            (found or nvfp4) is not None
            and (layout.np, layout.kp) == (layout.n, layout.k)
            and rows_fit
            and not epilogue
            and problem.out_dtype != "float32"
        ):
            launch, behind = launch_of(layout), functools.partial(launch_behind, layout)
            direct, why = _direct(layout, problem, device, found, prepared.tensors[0])
            note = note or why
            if direct is not None:
                launch, behind = direct.launch(layout), functools.partial(direct.behind, layout)
        scratch = ScratchByM(device, functools.partial(parts_of, layout), view_of(layout))
        m_multiple = M_OF_BLOCKS if block else 1
        state = State(layout, epilogue, rows_need_bf16, m_multiple, found, nvfp4, launch, behind, scratch, ones(device))
        return Plan(self.name, problem, state, note)

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation if it is not quantised yet, and launch the GEMM."""
        s: State = plan.state
        m = x.shape[0] if isinstance(x, Tensor) else x.data.shape[0]
        if (
            s.launch is not None
            and isinstance(x, Tensor)
            and x.dtype == out.dtype
            and not out.shape[0] % s.m_multiple
            and (bias is not None) == plan.problem.bias
            and taken_as_is(x, out, bias)
        ):
            s.launch(s, m, x, prepared.tensors, out, bias)
            return
        layout = s.layout
        epilogue = s.epilogue or (bias is not None and bias.dtype != out.dtype)
        row_scales = scales_rows(layout, x) and s.rows_need_bf16 and (epilogue or out.dtype != torch.bfloat16)
        epilogue = epilogue or row_scales
        mp = round_up(m, s.m_multiple)
        direct = not epilogue and (mp, layout.np) == tuple(out.shape) and out.is_contiguous()
        d = out if direct else out.new_empty(mp, layout.np, dtype=torch.float32 if epilogue else out.dtype)
        fused_bias = None if bias is None or epilogue else zero_pad(bias.reshape(1, -1), 1, layout.np).reshape(-1)
        if layout.scaling == "nvfp4":
            after = run_nvfp4(s, plan.problem, prepared, x, d, fused_bias)
        elif layout.scaling == "block128":
            after = run_block128(s, prepared, x, d, fused_bias)
        else:
            after = run_fp8(s, prepared, x, d, fused_bias, row_scales)
        if direct:
            return
        result = d[:m, : layout.n]
        if epilogue:
            for factor in after:
                result.mul_(factor)
            if bias is not None:
                result.add_(bias)
        out[:m].copy_(result)

    def out_rows(self, plan: Plan, m: int) -> int:
        """Pad M where the GEMM writes the output as it is: cuBLASLt takes M of a multiple of 4 under block scales."""
        s: State = plan.state
        return m if s.launch is None else round_up(m, s.m_multiple)

    def swiglu(self, plan: Plan, prepared: Prepared) -> Ready | None:
        """Return the launch behind the kernel of SwiGLU and the quantiser; None where something is padded."""
        s: State = plan.state
        layout, tensors = s.layout, prepared.tensors
        arch, function = _arch_of(tensors[0]), _FRONTS.get(kind_of(layout))
        if s.behind is None or function is None or arch is None or not swiglu.built_for(swiglu.ROWS, arch, layout.k):
            return None
        front = swiglu.front(function, arch, tensors[0].device)
        if front is None:
            return None
        behind = s.behind(front)

        def launch(gate_up: Tensor, out: Tensor, bias: Tensor | None) -> None:
            fits = not out.shape[0] % s.m_multiple and (bias is not None) == plan.problem.bias
            if fits and taken_as_is(gate_up, out, bias):
                behind(s, gate_up.shape[0], gate_up, tensors, out, bias)
            else:
                self.run(plan, prepared, swiglu.product(gate_up), out, bias)

        return launch

    def ready(self, plan: Plan, prepared: Prepared) -> Ready:
        """Return the launch alone if nothing is padded."""
        s: State = plan.state
        if s.launch is None or s.m_multiple != 1:
            return super().ready(plan, prepared)
        launch, tensors = s.launch, prepared.tensors

        def ready(x: Tensor, out: Tensor, bias: Tensor | None) -> None:
            launch(s, x.shape[0], x, tensors, out, bias)

        return ready


def _kernels(layout: Layout, device: torch.device) -> tuple[Quantizers | None, Nvfp4Quantizer | None, str]:
    """Return the quantisers that a layer needs, and if there is none, why."""
    if layout.scaling == "nvfp4":
        nvfp4, note = quantizers.load_nvfp4(device)
        return None, nvfp4, note
    fp8, note = quantizers.load(device)
    return fp8, None, note


def _rows_need_bf16(tensor: Tensor) -> bool:
    """Whether row scaling runs on torch's own kernels, which write bfloat16 only."""
    cuda = parse_version(_system.current().cuda or "")
    return _arch_of(tensor) != SM90 or (cuda is not None and cuda < _ROWS_FROM)


def _arch_of(tensor: Tensor) -> Any:
    """Return the arch of the GPU that a tensor is on; None on a CPU."""
    gpus = _system.current().gpus
    index = tensor.device.index
    return gpus[index].arch if tensor.is_cuda and index is not None and index < len(gpus) else None


def _direct(
    layout: Layout, problem: Problem, device: torch.device, found: Quantizers | None, weight: Tensor
) -> tuple[DirectGemms | None, str]:
    """Return the launches without torch's operator; or None, and why if they could be expected."""
    if found is None or found.library is None or layout.scaling == "nvfp4" or _arch_of(weight) != SM90:
        return None, ""
    return direct_gemms(found, device, layout, problem)
