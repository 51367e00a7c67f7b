"""Host time of a call: our layers and ``nn.Linear``, and the share that this package adds to the backend.

On a GPU calls are launched without waiting, so only host time is measured. On a CPU the time includes the product,
64x64 by one token; the overhead of this package is the difference to a direct call of the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp4dispatch.benchmark.methods.base import Card
from fp4dispatch.dispatch import choose
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.problem import Problem
from fp4dispatch.tune.timing import Call, Engine, Sample, WallEngine, take_turns

CALLS = 200
"""Calls per block. After about a thousand queued launches the driver would make the host wait."""
SIDE = 64
DIRECT = ", its backend alone"
LOOKUP, RESOLVE = "look-up of a choice made before", "a choice from scratch"


@dataclass(frozen=True)
class HostRow:
    """One kind of call: host time in microseconds. ``adds``: the part outside the backend, if that was timed too."""

    what: str
    us: float
    spread: float
    adds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def measure(card: Card, engine: Engine, *, rounds: int = 21, wall: WallEngine | None = None) -> list[HostRow]:
    """Time every kind of call in turns.

    Parameters
    ----------
    card, engine
        Where; the engine only waits for the device between blocks.
    rounds
        Blocks of ``CALLS`` calls.
    wall
        Reads the clock; the real one by default.
    """
    wall = wall or WallEngine()
    kinds = calls(card)
    for call in kinds.values():
        call(0)
    counts = {name: 1 if name == RESOLVE else CALLS for name in kinds}

    def block(name: str) -> Callable[[], float]:
        replay = wall.record(kinds[name], counts[name], 1).replay

        def run() -> float:
            engine.finish()
            took = replay()
            engine.finish()
            return took

        return run

    with torch.inference_mode():
        times = take_turns({name: block(name) for name in kinds}, counts, rounds=rounds)
    return [_row(name, times) for name in kinds if not name.endswith(DIRECT)]


def _row(name: str, times: dict[str, Sample]) -> HostRow:
    direct = times.get(name + DIRECT)
    return HostRow(name, times[name].us, times[name].spread, times[name].us - direct.us if direct else None)


def calls(card: Card) -> dict[str, Call]:
    """Return the calls that are timed, by name."""
    x = torch.randn(1, SIDE, device=card.device, dtype=torch.bfloat16)
    linear = nn.Linear(SIDE, SIDE, bias=False, device=card.device, dtype=torch.bfloat16).requires_grad_(False)
    found: dict[str, Call] = {"nn.Linear, bfloat16": lambda i: linear(x)}
    layers: dict[str, QuantizedLinear] = {
        "FP4Linear": FP4Linear.from_linear(linear),
        "FP8Linear, row": FP8Linear.from_linear(linear, scaling="row"),
    }
    for name, layer in layers.items():
        found[name] = _forward(layer, x)
        found[name + DIRECT] = _direct(layer, x)
    problem = Problem("nvfp4_gemm", 1, SIDE, SIDE)
    gpu = card.device.index if card.device.type == "cuda" else None
    found[LOOKUP] = lambda i: choose.select(problem, gpu=gpu)
    found[RESOLVE] = lambda i: explain("nvfp4_gemm", 1, SIDE, SIDE)
    return found


def _forward(layer: QuantizedLinear, x: Tensor) -> Call:
    return lambda i: layer(x)


def _direct(layer: QuantizedLinear, x: Tensor) -> Call:
    """Return a direct call of the layer's backend, with plan and operands ready."""
    bound = layer.bind(x.dtype)
    ready, prepared = bound.spec.launch(x.shape[0], x.dtype, False, bound.tensors)
    out = torch.empty(x.shape[0], layer.out_features, device=x.device, dtype=x.dtype)
    return lambda i: ready.backend.run(ready.plan, prepared, x, out)
