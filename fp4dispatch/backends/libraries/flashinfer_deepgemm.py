"""FlashInfer's FP8 block-scale GEMM for Hopper: TensorRT-LLM's copy of DeepGEMM, with swapped operands below M = 32.

The name is SGLang's (``--fp8-gemm-backend flashinfer_deepgemm``). This backend uses the module that
``flashinfer.gemm.fp8_blockscale_gemm_sm90`` loads, and differs from that function:

* Our kernel (``csrc/quantise/fp8_quantize.cu``) quantises activations, so FlashInfer's scratch is not used. It is N*K
  bytes too large, and not thread-safe: bfloat16 activations are placed in it by the largest M that any thread has asked
  about. FlashInfer multiplies by 448 / amax, we divide by amax / 448 as :mod:`fp4dispatch.formats` does; results differ
  at ties, which bfloat16 inputs have.
* nvcc compiles a GEMM kernel in the first call of its (N, K, tile), and the tile follows from M. So plans are made for
  one M, and :meth:`FlashInferDeepGemmBackend.plan` launches once.
* FlashInfer accepts a float16 ``out`` but writes bfloat16: only bfloat16 is supported here. It accepts weight scales
  [N, K/128] but reads them as [N/128, K/128]: only the latter are passed.

Read in flashinfer-python 0.7.2.post1: ``data/csrc/fp8_blockscale_gemm_sm90_binding.cu`` and
``data/csrc/nv_internal/tensorrt_llm``; the binding's functions are those of its first version (flashinfer#2131).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import jit
from fp4dispatch.backends.activations import quantize_activation
from fp4dispatch.backends.base import Backend, LinearWeights, Plan, Prepared, QuantizedActivation
from fp4dispatch.backends.libraries import flashinfer_package as package
from fp4dispatch.backends.own.pdl_trial import pdl
from fp4dispatch.backends.own.tensors import quantizers
from fp4dispatch.backends.weight_layout import on_bytes
from fp4dispatch.errors import BackendUnsupportedError
from fp4dispatch.formats import FP8_BLOCK, round_up, zero_pad
from fp4dispatch.machine import capture
from fp4dispatch.machine.system import System
from fp4dispatch.policy.capability import check
from fp4dispatch.problem import Activation, Op, Problem
from fp4dispatch.problem.arch import SM90
from fp4dispatch.problem.decision import Reason

_N_MULTIPLE = 64
_ALIGN = 16
"""Bytes: every operand is loaded or stored by TMA."""


class _Layout(NamedTuple):
    """Sizes of prepared weights; ``np``, ``kp`` are padded with zeros, which is exact."""

    n: int
    k: int
    np: int
    kp: int


class _Functions(NamedTuple):
    """A plan's functions; ``pdl``: whether our quantiser may be launched with it, by its own proof and the setting."""

    gemm: Any
    quantize: Any
    pdl: bool


class FlashInferDeepGemmBackend(Backend):
    """FP8 weights scaled 128x128, activations scaled 1x128, bfloat16 output, on sm_90."""

    name = "flashinfer_deepgemm"
    activations: ClassVar[dict[Op, tuple[Activation, ...]]] = {"fp8_gemm": ("fp8",)}

    def __init__(self) -> None:
        self._run_gemm: Any = None
        self._workspace: Tensor | None = None

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Collect every reason why this backend cannot run the problem."""
        return check(self.name, problem, system)

    def builds(self, problem: Problem, device: torch.device) -> tuple[tuple[str, str], ...]:
        """Name the quantiser that a plan will load."""
        return quantizers.builds(problem)

    def prepare(self, weights: LinearWeights) -> Prepared:
        """Pad with zeros to N % 64 == 0 and K % 128 == 0, which adds no block of scales; what fits is not copied.

        Tensors: weight e4m3 [np, kp]; scale f32 [ceil(N/128), kp/128].
        """
        w = weights
        layout = _Layout(w.n, w.k, round_up(w.n, _N_MULTIPLE), round_up(w.k, FP8_BLOCK))
        tensors = (on_bytes(zero_pad(w.weight, layout.np, layout.kp), _ALIGN), on_bytes(w.scale, _ALIGN))
        return Prepared(self.name, tensors, tuple(layout))

    def plan(self, problem: Problem, prepared: Prepared) -> Plan:
        """Build the module on first use (about 100 s on 16 cores), compile this shape's GEMM kernel, launch it once.

        Raises
        ------
        CaptureError
            During capture.
        BackendUnsupportedError
            With what FlashInfer says against it.
        ToolchainError, CompileError, ProofError, CacheError
            If our quantiser cannot be built; each with what to do.
        """
        capture.forbid_in_capture(f"compiling DeepGEMM for {problem}", "fp4dispatch.warmup(model, tokens=[...])")
        layout = _Layout(*prepared.layout)
        weight = prepared.tensors[0]
        with package.on(weight.device):
            quantize = jit.load("fp8_quantize", "any", SM90)
            functions = _Functions(
                self._gemm(weight), quantize.module.fp8_quantize_1x128, pdl.allowed(quantize, weight.device)
            )
            x = weight.new_zeros(problem.m, layout.kp, dtype=torch.bfloat16)
            out = weight.new_empty(problem.m, layout.np, dtype=torch.bfloat16)
            a, scale = _quantized(functions, x)
            package.try_out(self.name, problem, lambda d: _launch(functions, prepared, a, scale, d), out)
        return Plan(self.name, problem, functions)

    def run(
        self,
        plan: Plan,
        prepared: Prepared,
        x: Tensor | QuantizedActivation,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Quantise the activation if it is not quantised yet, and launch the GEMM; the bias is added to the result."""
        layout, functions = _Layout(*prepared.layout), plan.state
        m = out.shape[0]
        direct = layout.np == layout.n and out.is_contiguous() and out.data_ptr() % _ALIGN == 0
        d = out if direct else out.new_empty(m, layout.np)
        if isinstance(x, Tensor) and x.dtype != torch.float32:
            a, scale = _quantized(functions, on_bytes(zero_pad(x, m, layout.kp), _ALIGN))
        else:
            q = quantize_activation(x, "fp8", "block128") if isinstance(x, Tensor) else x
            a = on_bytes(zero_pad(q.data, m, layout.kp), _ALIGN)
            scale = _by_token(a).copy_(q.scale)
        _launch(functions, prepared, a, scale, d)
        if not direct:
            out.copy_(d[:, : layout.n])
        if bias is not None:
            out.add_(bias)

    def _gemm(self, like: Tensor) -> Any:
        with package.LOCK:
            if self._run_gemm is None:
                gemm = package.gemm_module()
                try:
                    runner = gemm.get_fp8_blockscale_gemm_runner_sm90()
                    self._workspace = like.new_empty(256, dtype=torch.uint8)
                    runner.configure_workspace(self._workspace)  # asked of every caller; FP8 x FP8 does not touch it
                    self._run_gemm = runner.run_gemm
                except Exception as error:
                    raise BackendUnsupportedError(
                        f"{self.name}: FlashInfer cannot build its SM90 module: {package.short(error)}\n"
                        "  fix: point CUDA_HOME at a CUDA toolkit with nvcc 12.8 or later"
                    ) from error
            return self._run_gemm


def _by_token(a: Tensor) -> Tensor:
    """Return an empty f32 [M, kp/128], tokens contiguous, columns of M rounded up to 4: the layout TMA is told."""
    m, kp = a.shape
    return a.new_empty(kp // FP8_BLOCK, round_up(m, 4), dtype=torch.float32).t()[:m]


def _quantized(functions: _Functions, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return 16-bit x [M, kp] as e4m3, and its scales [M, kp/128]."""
    q, scale = x.new_empty(x.shape, dtype=torch.float8_e4m3fn), _by_token(x)
    functions.quantize(x, q, scale, functions.pdl)
    return q, scale


def _launch(functions: _Functions, prepared: Prepared, a: Tensor, a_scale: Tensor, d: Tensor) -> None:
    weight, w_scale = prepared.tensors
    with package.LOCK:
        functions.gemm(a, weight, d, a_scale, w_scale)
