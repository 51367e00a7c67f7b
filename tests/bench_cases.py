"""For testing the benchmark without a GPU: an engine whose clock is told, methods with planted faults, a document."""

from __future__ import annotations

import copy

import torch

from fp4dispatch.benchmark import run
from fp4dispatch.benchmark.methods import roster
from fp4dispatch.benchmark.methods.base import BASELINE, Card, Launch, Method
from fp4dispatch.benchmark.problems import shapes
from fp4dispatch.benchmark.reports import report
from fp4dispatch.benchmark.roofline import Peaks
from fp4dispatch.problem.arch import SM90
from fp4dispatch.tune.timing import Engine, Recording

CPU = Card(torch.device("cpu"), "a CPU", None, 0.0, 0.0)
HOPPER_ON_PAPER = Card(torch.device("cpu"), "NVIDIA H200", SM90, 50e6, 140e9, 132)
PEAKS = Peaks(copy=4e12, bf16=8e14, fp8=16e14)


class ToldEngine(Engine):
    """Runs each call once a replay and says that every one took ``us`` of its method, which the call carries."""

    device = torch.device("cpu")

    def __init__(self, cache_bytes=0.0):
        self.cache_bytes = cache_bytes
        self.replays = []
        self.broken = False

    def finish(self):
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def once(self, call):
        call(0)
        return 1e6

    def record(self, call, calls, copies):
        latest = [call(0)]

        def replay():
            self.replays.append(call)
            latest[0].copy_(call((calls - 1) % copies))
            return call.us * calls

        return Recording(replay, latest)


class Planted(Method):
    """Multiplies exactly, then does ``harm`` to the output; takes ``us``."""

    def __init__(self, name=BASELINE, us=10.0, harm=None, ours=False, fmt="bf16", takes="bf16", entering="bf16"):
        self.name, self.us, self.harm, self.ours, self.format = name, us, harm, ours, fmt
        self.takes, self.entering, self.calls, self.what = takes, entering, 0, f"planted {name}"

    def lacks(self, card):
        return ""

    def prepare(self, operands, copies, card):
        def at(x):
            truth = operands.product(x.float(), self.format)
            out = torch.empty(truth.shape, dtype=torch.bfloat16)

            def call(i):
                self.calls += 1
                assert 0 <= i < copies
                out.copy_(truth)
                if self.harm is not None:
                    self.harm(self, out, truth)
                return out

            call.us = self.us
            return Launch(call, self.entering, "planted", out)

        return at


def measure(some, nk=((256, 128),), ms=(130,), engine=None, card=HOPPER_ON_PAPER, **kwargs):
    """Run planted methods; return the outcome."""
    runner = run.Runner(card, engine or ToldEngine(), some, peaks=kwargs.pop("peaks", PEAKS), **kwargs)
    return runner.run(nk, ms)


FACTS = {
    "commit": "abc1234",
    "date": "2026-11-21",
    "fp4dispatch": "0.1.0",
    "device": "NVIDIA H200",
    "arch": "sm_90",
    "l2_mb": 60.0,
    "sms": 132,
    "driver": "580.159.04",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "python": "3.12.3",
}


def row(n, k, m, method, us, **more):
    """Return one measured row as the document holds it."""
    made = run.Row(
        n, k, m, method, "ok", us, us * 0.99, 0.01, 15, "planted", "bf16", 1.7e-3, (0, 0), 1.7e-3, us / 2, True
    )
    return made.to_dict() | more


def document(rows=None, host=()):
    """Return a document of a GPU run: the real methods, and rows of our choice."""
    suite = shapes.catalogue().suite("targets")
    outcome = run.Outcome(absent={"humming/nvfp4": "humming-kernels is not installed (extra `bench`)"}, seconds=12.0)
    doc = report.document(suite, FACTS, PEAKS, roster.everything(), outcome, host)
    if rows is None:
        rows = [
            row(n, k, m, name, us)
            for n, k in suite.shapes
            for m in (1, 64, 1024)
            for name, us in ((BASELINE, 40.0), ("FP4Linear", 12.5), ("torch/row+q", 30.0), ("FP8Linear/row", 29.0))
        ]
    doc["measured"] = copy.deepcopy(rows)
    return doc
