"""For testing the random suite without a GPU: a tiny model, and all kernels of ours for sm_90 in torch."""

from __future__ import annotations

from types import SimpleNamespace

from fp4dispatch.backends.own import compiled
from fp4dispatch.backends.own.tensors import operands
from fp4dispatch.benchmark.problems import sampling
from tests import w4_fake, w8_fake

TINY = sampling.Dense("Tiny", "https://example.com/tiny", 64, 128, 4, 2, 16, 1, 1024, 1e-6)


class Shaped:
    """A module whose entries also take a launch shape before the last operand; records the shapes."""

    def __init__(self, kernel, module, shapes, refuse):
        self.kernel, self.module, self.shapes, self.refuse = kernel, module, shapes, refuse

    def __getattr__(self, name):
        if not name.endswith("_shaped"):
            return getattr(self.module, name)
        real = getattr(self.module, name.removesuffix("_shaped"))

        def call(*given):
            shape = tuple(given[-2])
            if self.refuse(self.kernel, shape):
                raise ValueError("shape: needs more shared memory than a CTA has")
            self.shapes.append((self.kernel, shape))
            real(*given[:-2], given[-1])

        return call


def install(monkeypatch, refuse=lambda kernel, shape: False):
    """Let every launch of ours run here; returns the launch shapes that kernels for few tokens were given.

    ``refuse``: whether a kernel refuses a launch shape.
    """
    kernels = w8_fake.install(monkeypatch, beside=w4_fake.install(monkeypatch))
    shapes: list[tuple[str, tuple[int, ...]]] = []

    def load(kernel, build, arch):
        module = kernels.load(kernel, build, arch).module
        return SimpleNamespace(module=Shaped(kernel, module, shapes, refuse), pdl_allowed=True)

    monkeypatch.setattr(compiled.jit, "load", load)
    monkeypatch.setattr(operands, "launch_numbers", tuple)
    monkeypatch.setattr(compiled, "launch_numbers", tuple)
    return shapes
