"""For testing the random suite without a GPU: a tiny model, and all kernels of ours for sm_90 in torch."""

from __future__ import annotations

from types import SimpleNamespace

from fp4dispatch.backends.own import compiled
from fp4dispatch.backends.own.tensors import operands
from fp4dispatch.benchmark import machine, roofline
from fp4dispatch.benchmark.problems import models, sampling
from fp4dispatch.tune.timing import Recording
from tests import w4_fake, w8_fake
from tests.bench_cases import FACTS, HOPPER_ON_PAPER, PEAKS, ToldEngine

TINY = models.Dense("Tiny", "https://example.com/tiny", 64, 128, 4, 2, 16, 1, 1024, 1e-6)


class OneTime(ToldEngine):
    """Every call takes 5 us."""

    def record(self, call, calls, copies):
        latest = [call(0)]

        def replay():
            if (result := call(0)) is not None:
                latest[0].copy_(result)
            return 5.0 * calls

        return Recording(replay, latest)


class Shaped:
    """A module whose entries also take a launch shape before the last operand; records the shapes."""

    def __init__(self, kernel, module, shapes, refuse, harm):
        self.kernel, self.module, self.shapes, self.refuse, self.harm = kernel, module, shapes, refuse, harm

    def __getattr__(self, name):
        if not name.endswith("_shaped"):
            return getattr(self.module, name)
        real = getattr(self.module, name.removesuffix("_shaped"))

        def call(*given):
            *operands, shape, pdl = given
            if self.refuse(self.kernel, tuple(shape)):
                raise ValueError("shape: needs 300000 bytes of shared memory, a CTA has 232448")
            self.shapes.append((self.kernel, tuple(shape)))
            real(*operands, pdl)
            self.harm(self.kernel, tuple(shape), operands[-1])

        return call


def kernels(monkeypatch, refuse=lambda kernel, shape: False, harm=lambda kernel, shape, out: None):
    """Let every launch of ours run here; returns the launch shapes that kernels for few tokens were given.

    ``refuse``: whether such a kernel refuses a shape. ``harm`` may spoil its output.
    """
    fake = w8_fake.install(monkeypatch, beside=w4_fake.install(monkeypatch))
    shapes: list[tuple[str, tuple[int, ...]]] = []

    def load(kernel, build, arch):
        module = Shaped(kernel, fake.load(kernel, build, arch).module, shapes, refuse, harm)
        return SimpleNamespace(module=module, pdl_allowed=True)

    monkeypatch.setattr(compiled.jit, "load", load)
    for module in (operands, compiled):
        monkeypatch.setattr(module, "launch_numbers", tuple)
    return shapes


def hopper(monkeypatch):
    """Let benchmarks take the CPU for an H200, draw layers of the tiny model alone, and be told every time."""
    monkeypatch.setattr(machine, "card", lambda device: HOPPER_ON_PAPER)
    monkeypatch.setattr(machine, "engine_for", lambda card: OneTime())
    monkeypatch.setattr(machine, "facts", lambda card, commit: FACTS | {"commit": commit})
    monkeypatch.setattr(roofline, "measure", lambda card, engine: PEAKS)
    monkeypatch.setattr(sampling, "models", lambda: (TINY,))
