"""Measured limits of the GPU (memory bandwidth, bfloat16 and FP8 throughput), and the least time of a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from fp4dispatch.benchmark.methods.base import Card
from fp4dispatch.benchmark.problems.operands import WEIGHT_BYTES, Entering, Format
from fp4dispatch.tune.timing import Engine, take_turns

COPY_BYTES = 1 << 30
SIDE = 8192
_UNIT: dict[Entering, str] = {"bf16": "bf16", "tensor": "fp8", "row": "fp8", "1x128": "fp8", "nvfp4": "nvfp4"}


@dataclass(frozen=True)
class Peaks:
    """Measured ceilings; None where not measured.

    ``copy``: bytes per second, read plus written, of the fastest of a copy, a kernel that reads and writes, and one
    that reads. A copy alone is too slow in a CUDA graph. ``bf16``, ``fp8``: operations per second.
    """

    copy: float | None = None
    bf16: float | None = None
    fp8: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        """Return plain data."""
        return asdict(self)

    def operations(self, entering: Entering) -> float | None:
        """Return the peak of the unit that multiplies such activations."""
        return {"bf16": self.bf16, "fp8": self.fp8}.get(_UNIT[entering])


def least_us(peaks: Peaks, n: int, k: int, m: int, fmt: Format, entering: Entering) -> float | None:
    """Return the least microseconds of a problem: the larger of memory time and compute time.

    Bytes: the weight in its format, a bfloat16 activation read, a bfloat16 output written, each once. None if a limit
    that the format needs was not measured.
    """
    operations = peaks.operations(entering)
    if peaks.copy is None or operations is None:
        return None
    moved = n * k * WEIGHT_BYTES[fmt] + 2 * m * (k + n)
    return 1e6 * max(moved / peaks.copy, 2 * m * n * k / operations)


def measure(card: Card, engine: Engine, *, side: int = SIDE, copy_bytes: int = COPY_BYTES) -> Peaks:
    """Measure the limits of a GPU, in about 0.2 s. Measures nothing on a CPU.

    ``side`` (of square matrices) and ``copy_bytes`` are parameters for tests.
    """
    if card.arch is None:
        return Peaks()
    moves = _moves(card.device, copy_bytes)
    calls = {name: call for name, (call, _) in moves.items()} | {"bf16": _product(card.device, side)}
    try:
        calls["fp8"] = _fp8_product(card.device, side)
        calls["fp8"](0)
    except RuntimeError:  # this card or this torch has no FP8 product: its peak stays unknown
        del calls["fp8"]
    for call in calls.values():
        call(0)
    replays = {name: engine.record(call, 4, 1).replay for name, call in calls.items()}
    us = {name: sample.us for name, sample in take_turns(replays, dict.fromkeys(calls, 4), rounds=9).items()}
    flop = 2.0 * side**3
    return Peaks(
        copy=max(moved / us[name] * 1e6 for name, (_, moved) in moves.items()),
        bf16=flop / us["bf16"] * 1e6,
        fp8=flop / us["fp8"] * 1e6 if "fp8" in us else None,
    )


def _moves(device: torch.device, size: int) -> dict[str, tuple[Callable[[int], object], int]]:
    """Return ways to move bytes, each with its number of bytes. The fastest one is the limit."""
    source = torch.zeros(size // 4, device=device, dtype=torch.float32)
    target, total = torch.empty_like(source), torch.empty((), device=device, dtype=torch.float32)
    return {
        "copy": (lambda i: target.copy_(source), 2 * size),
        "map": (lambda i: torch.neg(source, out=target), 2 * size),
        "read": (lambda i: torch.sum(source, (0,), out=total), size),
    }


def _product(device: torch.device, side: int) -> Callable[[int], object]:
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda i: torch.mm(a, b.t(), out=out)


def _fp8_product(device: torch.device, side: int) -> Callable[[int], object]:
    a, b = (torch.randn(side, side, device=device, dtype=torch.float32).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device, dtype=torch.float32)
    out = torch.empty(side, side, device=device, dtype=torch.bfloat16)
    return lambda i: torch._scaled_mm(a, b.t(), one, one, out_dtype=out.dtype, out=out)
