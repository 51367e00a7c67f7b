"""Code that asks for a GPU, run on the CPU: for emulated kernels."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Tensors that ask for a GPU are made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def generators(monkeypatch):
    """Random numbers of the GPU are the CPU's; call it before the mode is on."""
    monkeypatch.setattr(torch, "Generator", lambda device="cpu", real=torch.Generator: real("cpu"))
