"""FP8 activations by our kernels (``csrc/fp8_quantize.cu``), for backends whose GEMM is another library's.

The same bits as :func:`fp4dispatch.formats.fp8_quantize` in one kernel, where that takes about ten, and f32 copies of
the activation. They are compiled on first use; where that cannot be, a plan quantises with torch's operations and says
so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dispatch import formats, jit
from fp4dispatch.arch import Arch
from fp4dispatch.backends.activations import quantize_activation
from fp4dispatch.backends.base import QuantizedActivation
from fp4dispatch.backends.operands import aligned
from fp4dispatch.errors import CacheError, CompileError, FlagsError, ProofError, ToolchainError
from fp4dispatch.formats import zero_pad
from fp4dispatch.problem import Scaling
from fp4dispatch.settings import settings

_log = logging.getLogger("fp4dispatch")
_said: set[str] = set()


class Quantizers(NamedTuple):
    """The kernels of one GPU: ``row(x, q, scale, pdl)``, ``tensor`` and ``block`` (1x128) likewise.

    ``pdl``: whether they may be launched with PDL, by their proof and the setting. They wait for what is ahead of them
    before they read or write anything, and a GEMM that is launched without PDL waits for all of them.
    """

    row: Callable[..., None]
    tensor: Callable[..., None]
    block: Callable[..., None]
    pdl: bool


def load(device: torch.device) -> tuple[Quantizers | None, str]:
    """Return the kernels for a device, compiled first where needed; or None, and why a plan goes without them.

    None without a reason on a CPU. A reason is logged as a warning, once.

    Raises
    ------
    CaptureError
        If they are not loaded yet and a CUDA graph is being captured.
    """
    if device.type != "cuda":
        return None, ""
    try:
        kernel = jit.load("fp8_quantize", "any", Arch(*torch.cuda.get_device_capability(device)))
    except (CacheError, CompileError, FlagsError, ProofError, ToolchainError) as error:
        why = f"FP8 activations are quantised by torch's operations, which can take longer than the GEMM: {error}"
        if why not in _said:
            _said.add(why)
            _log.warning("%s", why)
        return None, why
    m = kernel.module
    pdl = settings.pdl != "off" and kernel.pdl_allowed
    return Quantizers(m.fp8_quantize_row, m.fp8_quantize_tensor, m.fp8_quantize_1x128, pdl), ""


def quantized(
    quantizers: Quantizers | None, x: Tensor, mp: int, kp: int, scaling: Scaling, input_scale: Tensor | None = None
) -> QuantizedActivation:
    """Return what :func:`~fp4dispatch.backends.activations.quantize_activation` does of ``x`` [M, K], padded.

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

    Returns
    -------
    QuantizedActivation
        data: e4m3 [mp, kp], zeros beyond K; what is in rows beyond M does not matter, and is not written. scale: f32 []
        (the static scale), [M], or [M, ceil(K/128)] with stride 1 along M and columns of ``mp``.
    """
    m = x.shape[0]
    if quantizers is None or x.dtype == torch.float32:
        q = quantize_activation(x, "fp8", scaling, None if scaling == "block128" else input_scale)
        scale = q.scale
        if scaling == "block128":
            scale = tokens_fastest(x, mp, scale.shape[1]).copy_(scale)
        return QuantizedActivation(zero_pad(q.data, mp, kp), scale)
    x = aligned(x, kp)
    data = x.new_empty(mp, kp, dtype=torch.float8_e4m3fn)
    rows = data if mp == m else data[:m]
    if scaling == "block128":
        scale = tokens_fastest(x, mp, -(-kp // formats.FP8_BLOCK))
        quantizers.block(x, rows, scale, quantizers.pdl)
    elif input_scale is not None:
        scale = input_scale
        quantizers.tensor(x, rows, scale, quantizers.pdl)
    else:
        scale = x.new_empty(m, dtype=torch.float32)
        quantizers.row(x, rows, scale, quantizers.pdl)
    return QuantizedActivation(data, scale)


def tokens_fastest(x: Tensor, mp: int, blocks: int) -> Tensor:
    """Return empty scales f32 [M, blocks] for ``x`` [M, K], stride 1 along M, columns of ``mp``."""
    return x.new_empty(blocks, mp, dtype=torch.float32).t()[: x.shape[0]]


@functools.cache
def ones(device: torch.device) -> Tensor:
    """Return f32 [32768, 1] of ones, made once a device: scales of tokens whose scale the weight's hold already."""
    with torch.inference_mode(mode=False):  # it outlives the call
        return torch.ones(1 << 15, 1, device=device)


def ones_for(known: Tensor, m: int) -> Tensor:
    """Return f32 [M, 1] of ones, contiguous: of those of :func:`ones`, as far as they go."""
    return known[:m] if m <= known.shape[0] else known.new_ones(m, 1)
