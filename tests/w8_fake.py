"""The kernel of w8a16 in torch, on any device: what the backend launches where there is no GPU.

It has the signature of its CUDA namesake, refuses what that refuses, and reads NaN among the weights as a number.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fp4dispatch.arch import Arch
from fp4dispatch.backends import w8a16
from fp4dispatch.jit.manifest import installed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Kernels:
    """The modules that ``jit.load`` would return, and a record of what was loaded and launched."""

    def __init__(self, pdl_allowed=True):
        self.pdl_allowed = pdl_allowed
        self.loaded, self.launched = [], []

    def load(self, kernel, build, arch):
        catalog = installed()
        assert catalog.target_for(catalog.kernel(kernel), arch) is not None
        self.loaded.append((kernel, build))
        dtype = DTYPES[build]

        def w8a16_small(x, w, alpha, bias, out, enable_pdl):
            (m, k), n = x.shape, out.shape[1]
            assert (x.dtype, out.dtype) == (dtype, dtype)
            assert m >= 1
            assert m == out.shape[0]
            assert k % 16 == n % 8 == 0
            assert x.stride(1) == 1
            assert x.stride(0) % 8 == 0
            assert w.dtype == torch.float8_e4m3fn
            assert w.shape[1] == k
            assert n - 8 < w.shape[0] <= n
            assert alpha.dtype == torch.float32
            assert alpha.numel() in (1, n)
            assert bias is None or (tuple(bias.shape) == (n,) and bias.dtype == dtype)
            for operand in (w, alpha, out, *([] if bias is None else [bias])):
                assert operand.is_contiguous()
            for operand in (x, w, out):
                assert operand.data_ptr() % 16 == 0
            weight = w.float()
            codes = w.view(torch.uint8)
            weight[codes & 0x7F == 0x7F] = 480.0
            sums = x.new_zeros(m, n, dtype=torch.float32)
            sums[:, : w.shape[0]] = x.float() @ weight.t()
            result = sums * alpha
            out.copy_(result if bias is None else result + bias.float())
            self.launched.append((kernel, m, n, k, enable_pdl))

        return SimpleNamespace(module=SimpleNamespace(w8a16_small=w8a16_small), pdl_allowed=self.pdl_allowed)


def install(monkeypatch, capability="9.0", **options):
    """Let the backend plan as on a GPU and launch this; returns the record."""
    kernels = Kernels(**options)
    monkeypatch.setattr(w8a16.jit, "load", kernels.load)
    monkeypatch.setattr(w8a16, "_arch_of", lambda device: Arch.parse(capability))
    return kernels
