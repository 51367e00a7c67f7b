"""Time a kernel for few tokens beside others: cold weights, launches chained by PDL, launch shapes, one table."""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.shared import commandline
from bench.shared.graphs import COLD_BYTES, COPY_BYTES_PER_US, METHOD, capture, microseconds, watched
from fp4dispatch import formats, jit
from fp4dispatch.backends.own.tensors.w4_layout import pack_w4p
from fp4dispatch.backends.own.tiling import few_tokens
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.check import worst_tile
from fp4dispatch.benchmark.reports import records
from fp4dispatch.problem.arch import Arch

NK = ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (8192, 28672))
EXTRA_NK = ((1024, 4096), (6144, 4096))
M = (1, 8, 16, 32)
MOST_M = 128
ROUNDS = 9
TILE_ERROR = 6e-3  # bf16 rounding alone gives 1.7e-3
Shape = tuple[int, ...]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """One kernel of csrc/ for few tokens, and how to call it."""

    name: str
    weight: Callable[..., Any]
    """Makes one of (n, k), with what :class:`Nvfp4Weight` has."""

    def call(self, module: Any, shape: Shape | None, pdl: bool, *operands: Tensor | None) -> None:
        """Launch with a shape, or with the one that the kernel chooses."""
        if shape is None:
            getattr(module, self.name)(*operands, pdl)
        else:
            getattr(module, f"{self.name}_shaped")(*operands, list(shape), pdl)


class Nvfp4Weight:
    """A random NVFP4 weight: packed, and dequantised in fp32 (without its alpha)."""

    def __init__(self, n: int, k: int) -> None:
        draw = torch.Generator("cuda").manual_seed(0)
        self.n, self.k = n, k
        self.codes = torch.randint(256, (n, k // 2), generator=draw, device="cuda", dtype=torch.uint8)
        scale = torch.randint(48, 72, (n, k // 16), generator=draw, device="cuda").to(torch.uint8)
        self.scale = scale.view(torch.float8_e4m3fn)
        self.packed = pack_w4p(self.codes, self.scale)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised weight [N, K] without alpha."""
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device="cuda")
        out = torch.empty(self.n, self.k, device="cuda", dtype=dtype)
        step = max(1, (1 << 26) // self.k)  # small beside the result
        for start in range(0, self.n, step):
            rows = slice(start, start + step)
            values = table[formats.unpack_e2m1(self.codes[rows]).long()]
            out[rows] = (values * self.scale[rows].float().repeat_interleave(16, 1)).to(dtype)
        return out


@dataclass
class Timed:
    """Operands of one (N, K): rotating copies of the weight in both formats."""

    weight: Any
    packed: list[Tensor]
    dense: list[Tensor]
    x: Tensor
    exact: Tensor

    @classmethod
    def of(cls, weight: Any) -> Timed:
        """Make more copies than the L2 cache holds."""
        copies = max(2, math.ceil(COLD_BYTES / weight.packed.numel()))
        first = weight.dense(torch.bfloat16)
        dense_copies = max(2, math.ceil(COLD_BYTES / (2 * first.numel())))
        x = torch.randn(MOST_M, weight.k, device="cuda").bfloat16()
        exact = x.float() @ first.float().t()
        packed = [weight.packed] + [weight.packed.clone() for _ in range(copies - 1)]
        dense = [first] + [first.clone() for _ in range(dense_copies - 1)]
        return cls(weight, packed, dense, x, exact)


Peer = tuple[Callable[[int, Tensor], Any], int, float]
"""Launches with a copy of the weight into an output, the number of copies, and the error of a tile to allow."""


def time_problem(
    kernel: Kernel,
    module: Any,
    timed: Timed,
    m: int,
    sweep: bool,
    alive: list[Any],
    peers: dict[str, Peer] | None = None,
) -> dict[str, Any]:
    """Time bf16, ``peers``, the default launch shape (with and without PDL) and, with ``sweep``, others."""
    n, k = timed.weight.n, timed.weight.k
    x, exact = timed.x[:m].contiguous(), timed.exact[:m]
    alpha = torch.ones(1, device="cuda")
    floor = timed.weight.packed.numel() / COPY_BYTES_PER_US
    graphs, wrong = {}, []

    def add(
        key: Any, launch: Callable[[int, Tensor], Any], copies: int, guess: float, limit: float = TILE_ERROR
    ) -> None:
        out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        call = functools.partial(launch, out=out)
        with watched(f"M={m} N={n} K={k} {key}"):
            try:
                call(0)
            except ValueError as refused:
                wrong.append(f"{key}: {refused}")
                return
            found = worst_tile(out, exact)
        if not found.error <= limit:
            wrong.append(f"{key}: tile {found.tile}: error {found.error:.1e}")
            return
        calls = copies * max(1, round(max(8, 300 / guess) / copies))
        graphs[key] = capture(call, copies, calls)
        alive.append(call)  # a graph does not own the memory that it uses

    def ours(shape: Shape | None, pdl: bool) -> Callable[[int, Tensor], Any]:
        return lambda i, out: kernel.call(module, shape, pdl, x, timed.packed[i], alpha, None, out)

    add("bf16", lambda i, out: torch.mm(x, timed.dense[i].t(), out=out), len(timed.dense), 4 * floor)
    add("bf16 default pdl", ours(None, True), len(timed.packed), floor)
    for name, (launch, copies, limit) in (peers or {}).items():
        add(name, launch, copies, floor, limit)
    add("bf16 default", ours(None, False), len(timed.packed), floor)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for shape in few_tokens.candidates(kernel.name, m, n, k, sms) if sweep else ():
        add(shape, ours(shape, True), len(timed.packed), floor)
    times = microseconds(graphs, 5 if sweep else ROUNDS)
    shapes = {key: us for key, us in times.items() if isinstance(key, tuple)}
    return {
        "n": n,
        "k": k,
        "m": m,
        "floor_us": floor,
        "us": {key: us for key, us in times.items() if isinstance(key, str)},
        "shapes": [{"shape": list(shape), "us": us} for shape, us in sorted(shapes.items(), key=lambda row: row[1])],
        "wrong": wrong,
    }


def print_problem(row: dict[str, Any]) -> None:
    """One line for a problem, and its best launch shapes."""
    bf16, default = row["us"].get("bf16", math.nan), row["us"].get("bf16 default pdl", math.nan)
    others = ", ".join(f"{name} {us:.2f}" for name, us in row["us"].items())
    print(f"N={row['n']} K={row['k']} M={row['m']} floor {row['floor_us']:.2f}: {others}; ratio {bf16 / default:.2f}")
    for shape in row["shapes"][:5]:
        print(f"    {shape['us']:8.2f} us  ratio {bf16 / shape['us']:.2f}  {shape['shape']}")
    best: dict[tuple[int, ...], dict[str, Any]] = {}
    for shape in row["shapes"]:
        best.setdefault(tuple(shape["shape"][1:4]), shape)
    print("    best of " + "; ".join(f"{tile} {tried['us']:.2f} {tried['shape'][4:]}" for tile, tried in best.items()))
    for line in row["wrong"][:5]:
        print(f"    WRONG {line}")
    sys.stdout.flush()


def print_table(rows: list[dict[str, Any]]) -> None:
    """The compact table, last: ratio to bf16, microseconds, percent of the copy bandwidth."""
    print("\nratio to bf16 (us, % of 4.28 TB/s): default with PDL | best shape of the sweep")
    tokens = sorted({row["m"] for row in rows})
    for n, k in dict.fromkeys((row["n"], row["k"]) for row in rows):
        cells = []
        for m in tokens:
            row = next((row for row in rows if (row["n"], row["k"], row["m"]) == (n, k, m)), None)
            if row is None or "bf16 default pdl" not in row["us"]:
                cells.append(f"M={m}: -")
                continue
            bf16, us = row["us"]["bf16"], row["us"]["bf16 default pdl"]
            cell = f"M={m}: {bf16 / us:.2f} ({us:.1f}, {100 * row['floor_us'] / us:.0f}%)"
            if row["shapes"]:
                best = row["shapes"][0]["us"]
                cell += f" | {bf16 / best:.2f} ({best:.1f}, {100 * row['floor_us'] / best:.0f}%)"
            cells.append(cell)
        print(f"{n:>6}x{k:<6}" + "  ".join(f"{cell:<44}" for cell in cells))
    for label in ("default", "best"):
        means = []
        for m in tokens:
            ratios = [ratio(row, label) for row in rows if row["m"] == m and (row["n"], row["k"]) in NK]
            found = [value for value in ratios if value]
            means.append(f"M={m}: {statistics.geometric_mean(found):.3f} of {len(found)}" if found else f"M={m}: -")
        print(f"geometric mean, {label}: " + "  ".join(means))


def ratio(row: dict[str, Any], label: str) -> float | None:
    """bf16 time over ours, of the default launch shape or the best one of the sweep."""
    default, shapes = row["us"].get("bf16 default pdl"), [tried["us"] for tried in row["shapes"]]
    us = default if label == "default" else min(shapes, default=None)
    return row["us"]["bf16"] / us if us else None


def load(kernel: Kernel) -> Any:
    """Return the module of the bfloat16 build, which must be proven to start under PDL."""
    loaded = jit.load(kernel.name, "bf16", Arch(*torch.cuda.get_device_capability()))
    if not loaded.pdl_allowed:
        raise SystemExit(f"{kernel.name} bf16 is not proven: it may not start under PDL here")
    return loaded.module


def run(
    what: str | None,
    kernel: Kernel,
    peers: Callable[[Timed, Tensor], dict[str, Peer]],
    words: Sequence[str] | None = None,
    before: Callable[[], None] = lambda: None,
) -> int:
    """Time a kernel, ``before`` which its peers are built; return 1 if a launch was wrong.

    The JSON file is written after every problem, so that a time limit loses nothing.
    """
    parser = commandline.parser(what)
    commandline.takes_record(parser, needed=True)
    parser.add_argument("--sweep", action="store_true", help="time other launch shapes too")
    parser.add_argument("--m", type=int, nargs="*", default=M)
    parser.add_argument("--seconds", type=float, default=140, help="start no new problem after this")
    arguments = commandline.parse(parser, words)
    begin = time.perf_counter()
    torch.manual_seed(0)
    facts = machine.facts(machine.card("cuda"), arguments.commit)
    result: dict[str, Any] = {"method": METHOD, "problems": []}
    before()
    module = load(kernel)
    print(f"loaded after {time.perf_counter() - begin:.1f} s", flush=True)
    for n, k in (*NK, *EXTRA_NK):
        if time.perf_counter() - begin > arguments.seconds:
            print(f"out of time before N={n} K={k}")
            break
        timed = Timed.of(kernel.weight(n, k))
        alive: list[Any] = []
        for m in arguments.m:
            others = peers(timed, timed.x[:m].contiguous())
            row = time_problem(kernel, module, timed, m, arguments.sweep, alive, others)
            result["problems"].append(row)
            print_problem(row)
        records.write(arguments.json, "few tokens", facts, result, kernel.name)
        del timed, alive
    print_table(result["problems"])
    wrong = sum(len(row["wrong"]) for row in result["problems"])
    print(f"total {time.perf_counter() - begin:.1f} s; faults: {wrong}")
    records.write(arguments.json, "few tokens", facts, result, kernel.name)
    return 1 if wrong else 0
