"""Operands as our kernels read them. Shared by the backends on :mod:`fp4dispatch.jit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.own.scratch import Part
from fp4dispatch.backends.own.tiling import speeds
from fp4dispatch.backends.own.tiling.speeds import Speeds
from fp4dispatch.formats import zero_pad
from fp4dispatch.machine import gpu_models, system
from fp4dispatch.problem.arch import Arch

QUANTIZER = "w4_activations"
"""Kernels that quantise and pack activations, for W4P and for FP8 weights. One build reads bfloat16 and float16."""
_PACKED_TOKENS, _PACKED_BYTES = 8, 1024  # a block of packed activations: 128 k of each of 8 tokens


def arch_of(device: torch.device) -> Arch:
    """Return the arch of a GPU."""
    return Arch(*torch.cuda.get_device_capability(device))


def gpu_of(device: torch.device) -> tuple[Arch, int]:
    """Return the arch of a GPU and its number of SMs."""
    return arch_of(device), torch.cuda.get_device_properties(device).multi_processor_count


def speeds_on(device: torch.device) -> Speeds | None:
    """Return the constants of the time models on a GPU; None for a model that has none, or only a part of a GPU."""
    gpus, index = system.current().gpus, device.index or 0
    model = gpu_models.of(gpus[index]) if index < len(gpus) else None
    return None if model is None or model.sms != gpu_of(device)[1] else speeds.of(model)


def taken_as_is(x: Tensor, out: Tensor, bias: Tensor | None) -> bool:
    """Whether a launch takes these operands as they are: contiguous, on 16 bytes, the bias in the dtype of ``out``.

    Operands of a layer mostly are. Each view that is not made saves a microsecond.
    """
    return (
        not (x.data_ptr() | out.data_ptr()) % 16
        and x.is_contiguous()
        and out.is_contiguous()
        and (bias is None or (bias.dtype == out.dtype and bias.is_contiguous()))
    )


def aligned(x: Tensor, k: int) -> Tensor:
    """Return x [M, K] padded with zeros to ``k`` columns, rows contiguous and on 16 bytes; ``x`` itself if it fits."""
    x = zero_pad(x, x.shape[0], k)
    rows = x.stride(0) * x.element_size() % 16 == 0 and (x.shape[0] < 2 or x.stride(0) >= k)
    ok = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and rows
    return x if ok else x.clone(memory_format=torch.contiguous_format)


def packed_part(m: int, k: int) -> Part:
    """Return the memory for an activation packed by ``quantise/pack_e4m3.h``: e4m3, 8 tokens by 128 k."""
    return Part((-(-k // 128), -(-m // _PACKED_TOKENS), _PACKED_BYTES), torch.uint8)


def block_scales_part(m: int, k: int) -> Part:
    """Return the memory for scales per token and 128 k, as ``w8_quantize_block`` writes them."""
    tokens = formats.round_up(m, _PACKED_TOKENS)
    return Part((-(-k // formats.FP8_BLOCK), tokens), torch.float32)


def stored_rows(weight: Tensor, n: int, kp: int) -> Tensor:
    """Return a weight padded with zeros to [n, kp] and on 16 bytes; ``weight`` itself if it fits."""
    weight = zero_pad(weight, n, kp)
    return weight.clone() if weight.data_ptr() % 16 else weight


def await_writes(weight: Tensor) -> None:
    """Wait until a prepared weight is written: with PDL a GEMM reads weights before the kernel ahead has finished."""
    if weight.is_cuda:
        torch.cuda.current_stream(weight.device).synchronize()


def bias_row(bias: Tensor | None, dtype: torch.dtype, np: int) -> Tensor | None:
    """Return the bias [np] in the output's dtype, contiguous, padded with zeros; None for none."""
    if bias is None:
        return None
    return zero_pad(bias.to(dtype).reshape(1, -1), 1, np).reshape(-1).contiguous()


def direct(out: Tensor, np: int) -> bool:
    """Whether a kernel that stores ``np`` columns, 16 bytes at a time, may write into ``out`` [M, N] itself."""
    return out.shape[1] == np and out.is_contiguous() and out.data_ptr() % 16 == 0


def launch_numbers(shape: Sequence[int]) -> Any:
    """Return a launch shape as kernels take it: an array of tvm_ffi. A tuple would be converted in each call."""
    import tvm_ffi  # there wherever a kernel has been loaded

    return tvm_ffi.Array(shape)
