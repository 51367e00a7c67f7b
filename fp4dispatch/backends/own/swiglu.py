"""SwiGLU and the quantiser of a down projection as one kernel: ``csrc/quantise/swiglu_activations.cu``.

A GEMM on e4m3 activations does not see who quantised them. So the kernel takes the place of the quantiser in a launch,
packed for our kernels or in rows for cuBLASLt. It reads ``gate_up`` [M, 2K] where the quantiser reads
``silu(gate) * up`` [M, K]. Before a GEMM on 16-bit activations a kernel without quantiser runs, which lets the GEMM
load its first weights meanwhile.

The bytes are those of torch's two operations and the quantiser. torch brings its own compiled ``exp`` and division, so
this is checked where it runs: with every gate that bfloat16 and float16 have, once in a process for each GPU. Where a
result differs, torch's operations run instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fp4dispatch import formats, jit
from fp4dispatch.backends.activations import swiglu
from fp4dispatch.backends.own.pdl_trial import pdl
from fp4dispatch.backends.own.tensors.operands import QUANTIZER
from fp4dispatch.formats import round_up
from fp4dispatch.machine import capture
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.problem.arch import SM90, Arch

KERNEL = "swiglu_activations"
"""One build reads bfloat16 and float16."""
REPLACED_OR_NEXT = (QUANTIZER, "fp8_quantize", "w4a16_small", "w4_gemm_sm90", "w8a16_small")
"""Kernels of launches that it is for: the quantisers whose place it takes, and GEMMs on 16-bit activations."""
PRODUCT = "swiglu_product"
"""The function that does not quantise."""
_K_MULTIPLE = 16

_log = logging.getLogger("fp4dispatch")
_lock = ForkSafeLock()
_known: dict[torch.device, _Loaded | None] = {}


class _Loaded(NamedTuple):
    module: Any
    pdl: bool


class Front(NamedTuple):
    """A function of the kernel, and whether to launch it with PDL."""

    function: Callable[..., None]
    pdl: bool


def built_for(arch: Arch, k: int) -> bool:
    """Whether a GPU has the kernel, for K elements of the product."""
    return arch == SM90 and k % _K_MULTIPLE == 0


def front(function: str, arch: Arch, device: torch.device) -> Front | None:
    """Return a function of the kernel for a GPU; None where its results are not those of torch.

    The first call on a GPU compiles, proves and tries the kernel.

    Parameters
    ----------
    function
        ``w4_swiglu_row``, ``w8_swiglu_row``, ``w8_swiglu_tensor``, ``w8_swiglu_block``, ``fp8_swiglu_row``,
        ``fp8_swiglu_tensor``, ``fp8_swiglu_1x128`` or ``swiglu_product``.
    arch, device
        A GPU. Its arch has the kernel (:func:`built_for`).

    Raises
    ------
    CaptureError
        If the kernel would have to be loaded while a CUDA graph is being captured.
    ToolchainError, CompileError, ProofError, CacheError
        If it cannot be compiled, proved or loaded.
    """
    if device not in _known:
        capture.forbid_in_capture("loading the SwiGLU kernel", capture.warmup_call("..."))
        with _lock:
            if device not in _known:
                _known[device] = _load(arch, device)
    found = _known[device]
    return None if found is None else Front(getattr(found.module, function), found.pdl)


def _load(arch: Arch, device: torch.device) -> _Loaded | None:
    kernel = jit.load(KERNEL, "any", arch)
    if not all(_as_torch_does(kernel.module.w8_swiglu_row, dtype, device) for dtype in (torch.bfloat16, torch.float16)):
        _log.warning(
            "the SwiGLU kernel on %s gives other bits than torch %s: silu(gate) * up runs as torch's operations",
            device,
            torch.__version__,
        )
        return None
    return _Loaded(kernel.module, pdl.allowed(kernel, device))


def _as_torch_does(quantize: Callable[..., None], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel computes what torch does, for every gate of a dtype. Synchronises.

    A token holds one gate, so its scale tells the magnitude of the product, and a code its sign. Small products are
    multiplied by 2^64 once more, as there is a least scale.
    """
    with torch.inference_mode():
        gate = torch.arange(-(1 << 15), 1 << 15, device=device).to(torch.int16).view(dtype).view(-1, 1).expand(-1, 16)
        m = gate.shape[0]
        for factor in (1.0, -(2.0**64) if dtype == torch.bfloat16 else 1.7):
            x = torch.cat([gate, torch.full_like(gate, factor)], 1)
            packed = torch.empty(1, round_up(m, 8) // 8, 1024, dtype=torch.uint8, device=device)
            scale = torch.empty(m, dtype=torch.float32, device=device)
            quantize(x, packed, scale, False)
            want = formats.fp8_quantize(swiglu(x), "row")
            token = torch.arange(m, device=device)
            first = packed.view(-1)[token * 128 + token % 8 * 16]  # column 0 of token i is stored at i % 8
            codes = want.data.view(torch.uint8)[:, 0]
            same = (first == codes) | ((first & 0x7F == 0x7F) & (codes & 0x7F == 0x7F))
            if not bool((same & (scale == want.scale)).all()):
                return False
    return True
