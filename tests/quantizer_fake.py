"""The kernels of ``csrc/*_quantize.cu`` in torch: they refuse what those refuse, and remember what was launched."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from fp4dispatch import formats
from fp4dispatch.backends.own import scratch
from fp4dispatch.backends.own.tensors import quantizers
from fp4dispatch.machine import capture
from tests.flashinfer_interpreter import leaf

POISON = 0x7F
"""NaN as e4m3; what scratch memory holds before a kernel writes it."""


class Kernels:
    """``calls``: (kernel, address of the values, address of the scales, pdl) of every launch."""

    def __init__(self):
        self.calls = []

    def _input(self, x, multiple):
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert x.stride(1) == 1
        assert x.shape[1] % multiple == 0
        assert x.shape[0] == 1 or x.stride(0) % 8 == 0
        assert x.data_ptr() % 16 == 0

    def _fp8(self, x, q, scale, scaling, pdl, made):
        self._input(x, 8)
        assert q.shape == x.shape
        assert q.is_contiguous()
        assert q.data_ptr() % 8 == 0
        self.calls.append((scaling, q.data_ptr(), scale.data_ptr(), pdl))
        q.view(torch.uint8).copy_(made.data.view(torch.uint8))
        if scaling != "tensor":
            scale.copy_(made.scale.reshape(scale.shape))

    @leaf
    def fp8_quantize_row(self, x, q, scale, pdl):
        assert scale.numel() == x.shape[0]
        assert scale.is_contiguous()
        self._fp8(x, q, scale, "row", pdl, formats.fp8_quantize(x, "row"))

    @leaf
    def fp8_quantize_tensor(self, x, q, scale, pdl):
        assert scale.numel() == 1
        self._fp8(x, q, scale, "tensor", pdl, formats.fp8_quantize(x, "tensor", scale.reshape(())))

    @leaf
    def fp8_quantize_1x128(self, x, q, scale, pdl):
        assert scale.shape == (x.shape[0], -(-x.shape[1] // 128))
        self._fp8(x, q, scale, "1x128", pdl, formats.fp8_quantize(x, "1x128"))

    @leaf
    def nvfp4_quantize(self, x, global_scale, q, sf, pdl):
        self._input(x, 16)
        (m, k), columns = x.shape, x.shape[1] // 16
        assert (global_scale.dtype, global_scale.numel()) == (torch.float32, 1)
        assert (q.dtype, tuple(q.shape)) == (torch.uint8, (m, k // 2))
        assert sf.numel() == formats.round_up(m, 128) * formats.round_up(columns, 4)
        assert q.is_contiguous()
        assert sf.is_contiguous()
        assert q.data_ptr() % 8 == sf.data_ptr() % 4 == 0
        self.calls.append(("nvfp4", q.data_ptr(), sf.data_ptr(), pdl))
        made = formats.nvfp4_quantize(x, global_scale, sf_layout="128x4")
        q.copy_(made.data)
        sf.view(torch.uint8).copy_(made.sf.view(torch.uint8).view(sf.shape))


def install(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Let backends find these kernels, on a machine without a GPU; scratch memory is poisoned where it is taken."""
    made = Kernels()
    fp8 = quantizers.Quantizers(made.fp8_quantize_row, made.fp8_quantize_tensor, made.fp8_quantize_1x128, True)
    monkeypatch.setattr(quantizers, "load", lambda device: (fp8, ""))
    nvfp4 = quantizers.Nvfp4Quantizer(made.nvfp4_quantize, True)
    monkeypatch.setattr(quantizers, "load_nvfp4", lambda device: (nvfp4, ""))
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: False)
    monkeypatch.setattr(scratch, "_stream", lambda index: 7)
    monkeypatch.setattr(scratch, "_arenas", {})
    take = scratch.Scratch.__call__

    def poisoned(self):
        parts = take(self)
        with _disable_current_modes():
            for part in parts:
                part.view(torch.uint8).fill_(POISON) if part.element_size() == 1 else part.fill_(torch.nan)
        return parts

    monkeypatch.setattr(scratch.Scratch, "__call__", poisoned)
    return made


def without(monkeypatch: pytest.MonkeyPatch, note: str = "") -> None:
    """Let backends find none of our kernels."""
    monkeypatch.setattr(quantizers, "load", lambda device: (None, note))
    monkeypatch.setattr(quantizers, "load_nvfp4", lambda device: (None, note))
