"""Our kernels that quantise activations (``csrc/quantise/*_quantize.cu``), for backends on the GEMM of a library.

Same bits as :func:`fp4dispatch.formats.fp8_quantize` and :func:`~fp4dispatch.formats.nvfp4_quantize`, in one kernel
instead of ten or more. Compiled on first use. If that fails, a plan quantises with torch's operations and says so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4dispatch import formats, jit
from fp4dispatch.backends.activations import quantize_activation
from fp4dispatch.backends.base import QuantizedActivation
from fp4dispatch.backends.own.pdl_trial import pdl
from fp4dispatch.backends.own.scratch import Part, ScratchByM
from fp4dispatch.backends.own.tensors.operands import aligned, arch_of
from fp4dispatch.errors import CacheError, CompileError, FlagsError, ProofError, ToolchainError
from fp4dispatch.formats import NVFP4_BLOCK, round_up, zero_pad
from fp4dispatch.jit.kernels import LoadedKernel
from fp4dispatch.machine import log
from fp4dispatch.problem import Problem, Scaling

Memory = Callable[[], tuple[Tensor, ...]]


class Quantizers(NamedTuple):
    """The FP8 kernels of one GPU: ``row(x, q, scale, pdl)``, ``tensor`` and ``block`` (1x128) likewise.

    ``pdl``: whether to launch them with PDL, as their proof and the setting allow. They wait for earlier kernels before
    they read or write, and a GEMM launched without PDL waits for them. ``library``: their module, which can call
    cuBLASLt too (:mod:`~fp4dispatch.backends.libraries.cublaslt_direct`).
    """

    row: Callable[..., None]
    tensor: Callable[..., None]
    block: Callable[..., None]
    pdl: bool
    library: Any = None


class Nvfp4Quantizer(NamedTuple):
    """The NVFP4 kernel of one GPU, ``quantize(x, global_scale, q, sf, pdl)``; ``pdl`` as in :class:`Quantizers`."""

    quantize: Callable[..., None]
    pdl: bool


def load(device: torch.device) -> tuple[Quantizers | None, str]:
    """Return the FP8 kernels for a device, compiled if needed; or None, and why there are none.

    None without a reason on a CPU. A reason is logged as a warning, once.

    Raises
    ------
    CaptureError
        If they are not loaded yet and a CUDA graph is being captured.
    """
    kernel, why = _loaded("fp8_quantize", "FP8", device)
    if kernel is None:
        return None, why
    m, may = kernel.module, pdl.allowed(kernel, device)
    return Quantizers(m.fp8_quantize_row, m.fp8_quantize_tensor, m.fp8_quantize_1x128, may, m), ""


def load_nvfp4(device: torch.device) -> tuple[Nvfp4Quantizer | None, str]:
    """Return the NVFP4 kernel for a device, as :func:`load` does."""
    kernel, why = _loaded("nvfp4_quantize", "NVFP4", device)
    if kernel is None:
        return None, why
    return Nvfp4Quantizer(kernel.module.nvfp4_quantize, pdl.allowed(kernel, device)), ""


def builds(problem: Problem) -> tuple[tuple[str, str], ...]:
    """Return (kernel, variant) of the quantiser for a problem."""
    return (("nvfp4_quantize" if problem.op == "nvfp4_gemm" else "fp8_quantize", "any"),)


def _loaded(name: str, label: str, device: torch.device) -> tuple[LoadedKernel | None, str]:
    if device.type != "cuda":
        return None, ""
    try:
        return jit.load(name, "any", arch_of(device)), ""
    except (CacheError, CompileError, FlagsError, ProofError, ToolchainError) as error:
        why = f"{label} activations are quantised by torch's operations, which can take longer than the GEMM: {error}"
        log.once(why, logging.WARNING, why)
        return None, why


def quantized(
    quantizers: Quantizers | None,
    x: Tensor,
    mp: int,
    kp: int,
    scaling: Scaling,
    input_scale: Tensor | None = None,
    memory: Memory | None = None,
) -> QuantizedActivation:
    """Return :func:`~fp4dispatch.backends.activations.quantize_activation` of ``x`` [M, K], padded.

    Parameters
    ----------
    quantizers
        Of the device of ``x``; None, and any ``x`` in float32, means torch's operations.
    x
        float32, bfloat16 or float16 [M, K].
    mp, kp
        Sizes of the result; ``kp`` a multiple of 16.
    scaling, input_scale
        As there; ``block128`` has no input scale.
    memory
        Returns the tensors to write, which are then returned whole: e4m3 [mp, kp] and, unless the scale is static, f32
        [mp] or [mp, kp/128]. If None, they are allocated.

    Returns
    -------
    QuantizedActivation
        data: e4m3 [mp, kp], zeros beyond K; rows beyond M are not written. scale: f32 [] (the static scale), [M], or
        [M, ceil(K/128)] with stride 1 along M and columns of ``mp``.
    """
    m = x.shape[0]
    if quantizers is None or x.dtype == torch.float32:
        q = quantize_activation(x, "fp8", scaling, None if scaling == "block128" else input_scale)
        scale = q.scale
        if scaling == "block128":
            scale = tokens_fastest(x, mp, scale.shape[1]).copy_(scale)
        return QuantizedActivation(zero_pad(q.data, mp, kp), scale)
    x = aligned(x, kp)
    data, *scales = (x.new_empty(mp, kp, dtype=torch.float8_e4m3fn),) if memory is None else memory()
    rows = data if mp == m else data[:m]
    if scaling == "block128":
        scale = scales[0] if scales else tokens_fastest(x, mp, -(-kp // formats.FP8_BLOCK))
        quantizers.block(x, rows, scale[:m], quantizers.pdl)
    elif input_scale is not None:
        scale = input_scale
        quantizers.tensor(x, rows, scale, quantizers.pdl)
    else:
        scale = scales[0] if scales else x.new_empty(m, dtype=torch.float32)
        quantizers.row(x, rows, scale[:m], quantizers.pdl)
    return QuantizedActivation(data, scale)


def nvfp4_parts(mp: int, kp: int) -> list[Part]:
    """Return the memory for an NVFP4 activation [mp, kp]: uint8 [mp, kp/2], and its block scales in 128x4."""
    sf = (round_up(mp, 128), round_up(kp // NVFP4_BLOCK, 4))
    return [Part((mp, kp // 2), torch.uint8), Part(sf, torch.float8_e4m3fn)]


def quantized_nvfp4(
    quantizer: Nvfp4Quantizer | None,
    x: Tensor,
    mp: int,
    kp: int,
    global_scale: Tensor,
    memory: Memory | None = None,
) -> QuantizedActivation:
    """Return ``x`` [M, K] in NVFP4 with block scales in 128x4, padded.

    Parameters
    ----------
    quantizer
        Of the device of ``x``; None, and any ``x`` in float32, means torch's operations.
    x
        float32, bfloat16 or float16 [M, K].
    mp, kp
        Sizes of the result; ``kp`` a multiple of 16.
    global_scale
        f32, one element.
    memory
        Returns the tensors to write, as :func:`nvfp4_parts` has them. If None, they are allocated.

    Returns
    -------
    QuantizedActivation
        data: uint8 [mp, kp/2]; rows beyond M are not written, since their scales are zero and no code is NaN. scale:
        e4m3 [pad128(mp), pad4(kp/16)], padding zero.
    """
    m = x.shape[0]
    if quantizer is None or x.dtype == torch.float32:
        q = formats.nvfp4_quantize(zero_pad(x, m, kp), global_scale)
        sf = formats.to_128x4(zero_pad(q.sf, mp, kp // NVFP4_BLOCK))
        return QuantizedActivation(zero_pad(q.data, mp, kp // 2), sf, q.global_scale)
    data, sf = [x.new_empty(p.shape, dtype=p.dtype) for p in nvfp4_parts(mp, kp)] if memory is None else memory()
    written = round_up(m, 128)
    quantizer.quantize(aligned(x, kp), global_scale, data[:m], sf[:written], quantizer.pdl)
    if written < sf.shape[0]:
        sf[written:].view(torch.uint8).zero_()
    return QuantizedActivation(data, sf, global_scale)


class ToScratch:
    """Quantises the activations of a plan, of any M, into its scratch memory.

    The kernels are launched without PDL, since the library may launch its GEMM with it (FlashInfer does for CUTLASS).
    Such a GEMM may start while the quantiser runs, but all kernels before the quantiser have finished. So it may read
    early what was written before the quantiser, such as a static scale.

    Parameters
    ----------
    device
        Of the layer.
    scaling, static
        Of its weights, and whether they have an input scale.
    kp
        Columns of the result, a multiple of 16; of 128 for ``block128``.
    rows
        Gives the rows of the result for M tokens.

    Raises
    ------
    CaptureError
        If the kernels are not loaded yet and a CUDA graph is being captured.

    Attributes
    ----------
    note
        Why our kernels are not used; empty where they are, and on a CPU.
    """

    def __init__(
        self, device: torch.device, scaling: Scaling, kp: int, *, static: bool, rows: Callable[[int], int]
    ) -> None:
        self._scaling, self._kp, self._static, self._rows = scaling, kp, static, rows
        fp8: Quantizers | None = None
        nvfp4: Nvfp4Quantizer | None = None
        if scaling == "nvfp4":
            nvfp4, self.note = load_nvfp4(device)
        else:
            fp8, self.note = load(device)
        self._fp8 = fp8 and fp8._replace(pdl=False)
        self._nvfp4 = nvfp4 and nvfp4._replace(pdl=False)
        self._scratch = ScratchByM(device, self._parts)

    def __call__(self, x: Tensor, scale: Tensor | None = None) -> QuantizedActivation:
        """Return ``x`` [M, K] quantised.

        Parameters
        ----------
        x
            float32, bfloat16 or float16.
        scale
            The input scale of a static layer; NVFP4: the global scale, always.

        Returns
        -------
        QuantizedActivation
            As :func:`quantized_nvfp4` and :func:`quantized` say, but FP8 scales are [rows] or row-major
            [rows, kp/128], and FP8 rows beyond M are zeros, as are their scales: scratch memory may hold NaN, which
            must not reach a library's GEMM.
        """
        m = x.shape[0]
        mp = self._rows(m)
        if self._scaling == "nvfp4":
            assert scale is not None
            return quantized_nvfp4(self._nvfp4, x, mp, self._kp, scale, lambda: self._scratch(m))
        q = quantized(self._fp8, x, mp, self._kp, self._scaling, scale, lambda: self._scratch(m))
        if m < mp:
            q.data[m:].view(torch.uint8).zero_()
        if self._static or m == mp:
            return q._replace(scale=q.scale.contiguous())
        if q.scale.shape[0] == mp:
            q.scale[m:].zero_()
            return q
        return q._replace(scale=zero_pad(q.scale.reshape(m, -1), mp, q.scale.numel() // m).view(mp, *q.scale.shape[1:]))

    def _parts(self, m: int) -> list[Part]:
        mp = self._rows(m)
        if self._scaling == "nvfp4":
            return nvfp4_parts(mp, self._kp)
        parts = [Part((mp, self._kp), torch.float8_e4m3fn)]
        if self._scaling == "block128":
            parts.append(Part((mp, self._kp // formats.FP8_BLOCK), torch.float32))
        elif not self._static:
            parts.append(Part((mp,), torch.float32))
        return parts


def tokens_fastest(x: Tensor, mp: int, blocks: int) -> Tensor:
    """Return empty scales f32 [M, blocks] for ``x`` [M, K], stride 1 along M, columns of ``mp``."""
    return x.new_empty(blocks, mp, dtype=torch.float32).t()[: x.shape[0]]


@functools.cache
def ones(device: torch.device) -> Tensor:
    """Return f32 [32768, 1] of ones, made once per device: token scales that are already in the weight's scales.

    They are written when this returns, because launches on any stream read them. Not to be called in a capture.
    """
    with torch.inference_mode(mode=False):  # it outlives the call
        made = torch.ones(1 << 15, 1, dtype=torch.float32, device=device)
    if made.is_cuda:
        torch.cuda.current_stream(made.device).synchronize()
    return made


def ones_for(known: Tensor, m: int) -> Tensor:
    """Return f32 [M, 1] of ones, contiguous; a slice of ``known`` if it is long enough."""
    return known[:m] if m <= known.shape[0] else known.new_ones(m, 1)
