"""A machine that seems to have an H200, where there is no GPU. What its launches do is up to each test's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from fp4dispatch.dispatch import choose, here
from fp4dispatch.machine.nvml import Gpu
from fp4dispatch.machine.system import System
from fp4dispatch.problem.arch import SM90
from fp4dispatch.run import routes

HOPPER = System.fake("9.0", cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5")
H200 = System(**(vars(HOPPER) | {"gpus": (Gpu(0, "NVIDIA H200", "GPU-1", SM90),)}))
"""The same machine, with a GPU that time models know."""


@contextlib.contextmanager
def seems_to_be_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let choices be made for HOPPER, with what the settings allow, and leave none of them and no plan behind."""
    monkeypatch.setattr(here, "seen_from", lambda facts, gpu: here.allowed(HOPPER))
    monkeypatch.setattr(here, "arch_on", lambda facts, gpu: HOPPER.arch)
    monkeypatch.setattr(routes, "_plans", {})
    monkeypatch.delenv("FP4DISPATCH_FP8_COPY", raising=False)
    choose.reset()
    routes.LayerSpec.parse.cache_clear()
    try:
        yield
    finally:
        choose.reset()
        routes.LayerSpec.parse.cache_clear()
