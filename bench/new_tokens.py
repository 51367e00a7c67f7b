"""What the first call for a number of tokens costs the host: a launch is chosen and a plan made for each.

    python -m bench.new_tokens --commit HASH --json bench/results/new-tokens-CARD.json

Serving engines call layers with other numbers of tokens all the time, so a prompt of a length that has not been seen
waits for this. The layers are those of one block of a decoder: of Llama-3.1-8B, for which tables of timed launches
ship, and of sizes that no table has. Both are first called at the end of each range of tokens, as a warm-up does. Then
numbers of tokens are drawn: ``first`` is the first call for one; ``alike`` the first for its neighbour, which gets the
same launch; ``again`` a later call. Wall clock from an idle GPU until all launches are queued, four layers together, in
milliseconds, beside ``nn.Linear``, which asks cuBLAS.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared import commandline
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.methods.base import Card
from fp4dispatch.benchmark.reports import records
from fp4dispatch.errors import Fp4DispatchError
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.problem import m_bucket

SIZES = {
    "Llama-3.1-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "no table": ((5376, 3328), (3328, 3328), (19968, 3328), (3328, 9984)),
}
"""N x K of qkv, out, gate and up, down."""
KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "nn.Linear": lambda linear: linear,
    "FP4Linear": FP4Linear.from_linear,
    "FP8Linear row": lambda linear: FP8Linear.from_linear(linear, scaling="row"),
}
RANGES = ((17, 128), (129, 1024), (1025, 8192))
APART = 8
"""Neighbours lie between the same two multiples of this."""


def drawn(low: int, high: int, count: int, seed: int) -> list[int]:
    """Return numbers of tokens of a range, no two of them alike."""
    groups = random.Random(seed).sample(range(low // APART + 1, high // APART), count)
    return [group * APART + 1 + random.Random(seed + group).randrange(APART) for group in groups]


def neighbour(m: int) -> int:
    """Return a number of tokens that lies between the same multiples."""
    return m - 1 if m % APART == 0 else m + 1


def run(card: Card, sizes: dict[str, Sequence[tuple[int, int]]], count: int, seed: int) -> list[dict[str, Any]]:
    """Measure every kind of layer; return rows as plain data."""
    rows = []
    for name, shapes in sizes.items():
        xs = {k: torch.randn(RANGES[-1][1], k, device=card.device, dtype=torch.bfloat16) for _, k in shapes}
        for kind, make in KINDS.items():
            layers = [make(_linear(n, k, card.device)) for n, k in shapes]
            with torch.inference_mode():
                rows += _of_layers(name, kind, layers, [xs[k] for _, k in shapes], card, count, seed)
    return rows


def _linear(n: int, k: int, device: torch.device) -> nn.Linear:
    return nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)


def _of_layers(
    name: str, kind: str, layers: Sequence[nn.Module], xs: Sequence[Tensor], card: Card, count: int, seed: int
) -> list[dict[str, Any]]:
    engine = machine.engine_for(card)

    def milliseconds(m: int) -> float:
        engine.finish()
        start = time.perf_counter()
        for layer, x in zip(layers, xs, strict=True):
            layer(x[:m])
        return 1e3 * (time.perf_counter() - start)

    for m in {m_bucket(m) for m in range(1, RANGES[-1][1] + 1)}:
        milliseconds(m)
    rows = []
    for low, high in RANGES:
        ms = drawn(low, high, count, seed)
        first, alike, again = ([milliseconds(m) for m in each] for each in (ms, map(neighbour, ms), ms))
        row = {"sizes": name, "layers": kind, "low": low, "high": high, "tokens": ms}
        rows.append(row | {"first": first, "alike": alike, "again": again})
    return rows


def table(result: dict[str, Any]) -> str:
    """Return the kept rows as markdown: medians of each range, and the worst first call."""
    lines = ["| layers | sizes | tokens | first, ms | at most | alike | again |", "|---|---|---|---|---|---|---|"]
    for row in result["new_tokens"]["rows"]:
        first, alike, again = (statistics.median(row[name]) for name in ("first", "alike", "again"))
        cells = f"{first:.2f} | {max(row['first']):.1f} | {alike:.2f} | {again:.2f}"
        lines.append(f"| {row['layers']} | {row['sizes']} | {row['low']}-{row['high']} | {cells} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the record."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True)
    parser.add_argument("--device")
    parser.add_argument("--count", type=int, default=12, help="numbers of tokens of a range")
    parser.add_argument("--seed", type=int, default=0)
    arguments = commandline.parse(parser, words)
    try:
        card = machine.card(arguments.device)
    except Fp4DispatchError as error:
        parser.error(str(error))
    rows = run(card, dict(SIZES), arguments.count, arguments.seed)
    method = f"{arguments.count} numbers of tokens of each range, seed {arguments.seed}; medians, four layers together"
    result = {"new_tokens": {"rows": rows, "method": method}}
    records.write(arguments.json, "new tokens", machine.facts(card, arguments.commit), result)
    print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
