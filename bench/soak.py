"""Launch layers of random sizes for a while, eager and in CUDA graphs, beside other work, and compare every output.

    python -m bench.soak --commit HASH --json bench/results --launches 12800

Sizes and numbers of tokens are drawn anew from ``--seed``. The first output of each layer and number of tokens is held
to the exact product, tile by tile. Every later one must have the same bits; the comparison runs on the device, so that
launches follow each other closely. Launches take turns between two streams and graphs of several layers; a third stream
multiplies matrices all the time. Exits with 1 if an output differs, or a first output is wrong.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.shared import commandline
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.check import QUANTISED_TILE_ERROR, worst_tile
from fp4dispatch.benchmark.reports import records
from fp4dispatch.models.linear import FP4Linear, FP8Linear

FORMATS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "nvfp4": FP4Linear.from_linear,
    "nvfp4_bf16": lambda linear: FP4Linear.from_linear(linear, activation="bf16"),
    "fp8_tensor": lambda linear: FP8Linear.from_linear(linear, scaling="tensor"),
    "fp8_row": lambda linear: FP8Linear.from_linear(linear, scaling="row"),
    "fp8_block": lambda linear: FP8Linear.from_linear(linear, scaling="block128"),
    "fp8_row_bf16": lambda linear: FP8Linear.from_linear(linear, scaling="row", activation="bf16"),
}
LAYERS, COUNTS = 8, 6
"""Layers of each format, and numbers of tokens of each layer."""
STREAMS = 2
GRAPHS, GRAPH = 8, 24
"""Graphs, and launches in each."""


@dataclass
class Case:
    """One layer with one input: what it must return, and how many launches on each stream returned other bits."""

    name: str
    layer: nn.Module
    x: Tensor
    want: Tensor
    wrong: Tensor

    def launch(self, stream: int) -> None:
        """Run the layer and count, on the device, an output with other bits. Streams have counters of their own."""
        self.wrong[stream].add_((self.layer(self.x).view(torch.int16) != self.want.view(torch.int16)).any())


def cases_of(
    fmt: str, device: torch.device, draw: random.Random, largest: int, tokens: int
) -> tuple[list[Case], list[str]]:
    """Return the cases of a format, and one sentence for each first output that is wrong."""
    cases, faults = [], []
    for _ in range(LAYERS):
        n, k = (16 * draw.randint(8, largest // 16) for _ in range(2))
        linear = nn.Linear(k, n, bias=draw.random() < 0.5, device=device, dtype=torch.bfloat16).requires_grad_(False)
        layer = FORMATS[fmt](linear)
        exact = nn.Linear(k, n, bias=linear.bias is not None, device=device).requires_grad_(False)
        exact.load_state_dict(linear.state_dict())
        for _ in range(COUNTS):
            m = round(tokens ** draw.random())
            x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
            want = layer(x).clone()
            error = worst_tile(want, exact(x.float())).error
            name = f"{fmt} N={n} K={k} M={m}"
            if not error <= (limit := QUANTISED_TILE_ERROR[fmt.split("_")[0]]):
                faults.append(f"{name}: a tile is off by {error:.3f}, limit {limit}")
            cases.append(Case(name, layer, x, want, torch.zeros(STREAMS, dtype=torch.int64, device=device)))
    return cases, faults


def graph_of(cases: list[Case], stream: int) -> torch.cuda.CUDAGraph:
    """Return a graph that launches these cases, for replays on one of the streams."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for case in cases:
            case.launch(stream)
    return graph


def soak(cases: list[Case], launches: int, draw: random.Random) -> dict[str, int]:
    """Launch until ``launches`` are done; return how many were eager and how many in a graph."""
    done = {"eager": 0, "graph": 0}
    if not cases[0].x.is_cuda:
        for _ in range(launches):
            draw.choice(cases).launch(0)
        return done | {"eager": launches}
    graphs = [graph_of(draw.choices(cases, k=GRAPH), i % STREAMS) for i in range(GRAPHS)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    load, square = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    for step in range(10**9):
        if sum(done.values()) >= launches:
            break
        with torch.cuda.stream(load):
            torch.mm(square, square)
        i = draw.randrange(GRAPHS)
        with torch.cuda.stream(streams[i % STREAMS]):
            if draw.random() < 0.1:
                graphs[i].replay()
                done["graph"] += GRAPH
            else:
                draw.choice(cases).launch(i % STREAMS)
                done["eager"] += 1
        if step % 256 == 0:  # the queue of a driver holds a thousand launches
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return done


@torch.inference_mode()
def main(words: Sequence[str] | None = None) -> int:
    """Run every format and keep what was found."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser)
    parser.add_argument("--device")
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--launches", type=int, default=12800, help="of each format")
    parser.add_argument("--largest", type=int, default=8192, help="N and K")
    parser.add_argument("--tokens", type=int, default=2048, help="at most")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    arguments = commandline.parse(parser, words)
    card = machine.card(arguments.device)
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    for fmt in arguments.formats:
        draw = random.Random(f"{arguments.seed} {fmt}")
        torch.manual_seed(draw.getrandbits(32))
        started = time.monotonic()
        cases, found = cases_of(fmt, card.device, draw, arguments.largest, arguments.tokens)
        done = soak(cases, arguments.launches, draw)
        differ = {case.name: count for case in cases if (count := int(case.wrong.sum()))}
        faults += found + [f"{name}: {count} launches gave other bits" for name, count in differ.items()]
        rows.append(
            {"format": fmt, **done, "cases": len(cases), "wrong": sum(differ.values()), "first_wrong": len(found)}
            | {"seconds": round(time.monotonic() - started, 1)}
        )
    facts = machine.facts(card, arguments.commit)
    if arguments.json:
        records.write(arguments.json, "soak", facts, {"seed": arguments.seed, "soak": rows})
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
