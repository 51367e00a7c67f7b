"""Check, then time the W4P kernels beside bf16 cuBLAS, in one run: launch shapes, tokens, PDL on and off.

Every build is checked first, tile by tile, against an fp64 product of the exact dequantised weight: ragged M, N and K,
bias, vector alpha, an output full of NaN between guards, the same bits in repetition, and a PDL chain of layers that
each read what the one before wrote. Then times: a CUDA graph of launches on rotating copies of the weights (more than
256 MB, so they come from memory), the launches chained by PDL, all methods in turn, medians.

    python -m bench.kernels_w4 --out w4.json [--sweep] [--ptx80] [--commit HASH]
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from torch import Tensor

from bench.shared.graphs import capture, microseconds, watched
from fp4dispatch import formats
from fp4dispatch.backends.own.tensors.w4_layout import pack_w4p
from fp4dispatch.backends.own.tiling import few_tokens
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records
from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog.manifest import Catalog, installed
from fp4dispatch.problem.arch import Arch

NK = ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (8192, 28672))
EXTRA_NK = ((1024, 4096), (6144, 4096))
M = (1, 8, 16, 32)
MOST_M = 128
COPY_BYTES_PER_US = 4.28e6  # what a copy reaches on an H200
COLD_BYTES = 300e6
ROUNDS = 9
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TILE = 128
Shape = tuple[int, ...]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Kernel:
    """One kernel of csrc/ for few tokens, and how to call it."""

    name: str
    weight: Callable[..., Any]
    """Makes one of (n, k, seed, every_scale), with what :class:`Weight` has."""
    also: Callable[[Any, torch.dtype], str] = lambda module, dtype: ""
    """One more check of a build; returns what is wrong, or nothing."""

    def tiles(self, m: int, sm90: bool) -> list[Shape]:
        """Return the tiles that are built of the size that takes m tokens."""
        about = few_tokens.KERNELS[self.name]
        built = [*about.instances, *few_tokens.WITHOUT_WGMMA.get(self.name, ())]
        return [tile for tile in built if tile[0] == about.tokens(m) and (sm90 or tile[3] > 1)]

    def call(self, module: Any, shape: Shape | None, pdl: bool, *operands: Tensor | None) -> None:
        """Launch with a shape, or with the one that the kernel chooses."""
        if shape is None:
            getattr(module, self.name)(*operands, pdl)
        else:
            getattr(module, f"{self.name}_shaped")(*operands, list(shape), pdl)


class Weight:
    """A random NVFP4 weight: packed, and dequantised in fp32 (without its alpha)."""

    def __init__(self, n: int, k: int, seed: int = 0, every_scale: bool = False) -> None:
        draw = torch.Generator("cuda").manual_seed(seed)
        self.n, self.k = n, k
        self.codes = torch.randint(256, (n, k // 2), generator=draw, device="cuda", dtype=torch.uint8)
        low, high = (0, 127) if every_scale else (48, 72)
        scale = torch.randint(low, high, (n, k // 16), generator=draw, device="cuda").to(torch.uint8)
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

    @functools.cached_property
    def dense64(self) -> Tensor:
        """The same in fp64, kept."""
        return self.dense(torch.float64)


SMALL = Kernel("w4a16_small", Weight)


def worst_tiles(out: Tensor, exact: Tensor, magnitude: Tensor) -> tuple[int, int]:
    """Return (tiles of 128 x 128 with any element wrong, all tiles); NaN is wrong.

    Allowed: one rounding to the output type, one of the bias sum, and 2^-17 of the sum of magnitudes for fp32 sums.
    """
    unit = torch.finfo(out.dtype).eps
    wrong = ~((out.double() - exact).abs() <= unit * exact.abs() + 2.0**-17 * magnitude + 2.0**-24)
    rows, columns = (-(-size // TILE) for size in wrong.shape)
    padded = wrong.new_zeros(rows * TILE, columns * TILE)
    padded[: wrong.shape[0], : wrong.shape[1]] = wrong
    return int(padded.view(rows, TILE, columns, TILE).amax(dim=(1, 3)).sum()), rows * columns


def check_one(kernel: Kernel, module: Any, dtype: torch.dtype, weight: Any, m: int, shape: Shape | None) -> str:
    """Run one problem; return what is wrong with it, or nothing."""
    draw = torch.Generator("cuda").manual_seed(m)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, device="cuda")

    n, k = weight.n, weight.k
    wide = torch.full((m, k + 24), torch.nan, device="cuda", dtype=dtype)  # NaN beside the rows of x
    x = wide[:, 8 : 8 + k]
    x.copy_(randn(m, k))
    alpha = torch.rand(n if m % 2 else 1, generator=draw, device="cuda") * 2.0**-9 + 2.0**-10
    bias = randn(n).mul(k**0.5).to(dtype) if m % 3 else None
    guarded = torch.full((m + 2, n), torch.nan, device="cuda", dtype=dtype)
    out = guarded[1 : m + 1]
    dense = weight.dense64 * alpha.double().view(-1, 1)
    exact = x.double() @ dense.t() + (0 if bias is None else bias.double())
    magnitude = x.double().abs() @ dense.t().abs()
    results = []
    for pdl in (False, True, True):
        out.fill_(torch.nan)
        kernel.call(module, shape, pdl, x, weight.packed, alpha, bias, out)
        results.append(out.clone())
    bad, of = worst_tiles(results[0], exact, magnitude)
    if bad:
        worst = float(((results[0].double() - exact).abs() / (magnitude + 1e-30)).nan_to_num(nan=math.inf).max())
        return f"{bad} of {of} tiles wrong, worst error {worst:.2e} of the magnitudes"
    if not all(torch.equal(result.view(torch.int16), results[0].view(torch.int16)) for result in results):
        return "bits differ between runs"
    if not (guarded[0].isnan().all() and guarded[-1].isnan().all()):
        return "wrote outside the output"
    return ""


def check_chain(kernel: Kernel, module: Any, dtype: torch.dtype, m: int) -> str:
    """24 layers under PDL in a graph, each on the output of the one before, against the same without PDL."""
    weights = [kernel.weight(2048, 2048, seed) for seed in range(4)]
    alpha = 2048**0.5 / weights[0].dense(torch.float32).norm().view(1)  # so that no layer shrinks or grows
    buffers = [torch.zeros(m, 2048, device="cuda", dtype=dtype) for _ in range(2)]
    start = torch.randn(m, 2048, device="cuda").to(dtype)

    def layers(pdl: bool) -> None:
        for i in range(24):
            kernel.call(module, None, pdl, buffers[i % 2], weights[i % 4].packed, alpha, None, buffers[(i + 1) % 2])

    buffers[0].copy_(start)
    layers(False)
    expected = buffers[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(True)
    for _ in range(30):
        buffers[0].copy_(start)
        buffers[1].fill_(torch.nan)
        graph.replay()
        if not torch.equal(buffers[0].view(torch.int16), expected.view(torch.int16)):
            return "a PDL chain has other bits than the same without PDL"
    if not expected.isfinite().all() or not expected.any():
        return "the chain of the check itself is not finite or zero"
    return ""


def check_kernel(kernel: Kernel, module: Any, name: str, sm90: bool) -> dict[str, Any]:
    """Return the number of problems and what was wrong."""
    dtype = DTYPES[name.split()[0]]
    faults, count = [], 0
    for n, k in ((8, 16), (136, 48), (264, 144), (1032, 2064), (512, 4096), (4096, 1040)):
        weight = kernel.weight(n, k, every_scale=n % 64 != 0)
        for m in (1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 70):
            shapes: list[Shape | None] = [None]
            if m in (1, 9, 17, 70):
                for tile in kernel.tiles(m, sm90):
                    for cluster in few_tokens.CLUSTERS if sm90 else (1,):
                        first = (*tile, cluster)
                        shapes += [(*first, 2, 1), (*first, 3, 9)]
            for shape in shapes:
                count += 1
                try:
                    with watched(f"{name} M={m} N={n} K={k} shape={shape}"):
                        fault = check_one(kernel, module, dtype, weight, m, shape)
                except ValueError as error:  # a refused launch shape, e.g. for too much shared memory
                    fault = "" if "shared memory" in str(error) else str(error)
                if fault:
                    faults.append(f"M={m} N={n} K={k} shape={shape}: {fault}")
    count += 1
    if fault := kernel.also(module, dtype):
        faults.append(fault)
    for m in (1, 16, 32):
        count += 1
        with watched(f"{name} chain M={m}"):
            fault = check_chain(kernel, module, dtype, m)
        if fault:
            faults.append(f"chain M={m}: {fault}")
    print(f"check {kernel.name} {name}: {count - len(faults)} of {count} right", *faults[:12], sep="\n  ", flush=True)
    return {"kernel": kernel.name, "build": name, "problems": count, "faults": faults}


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
"""Launches with a copy of the weight into an output, the number of copies, and the relative error to allow."""


def time_problem(
    kernel: Kernel,
    modules: dict[str, Any],
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

    def add(key: Any, launch: Callable[[int, Tensor], Any], copies: int, guess: float, limit: float = 3e-3) -> None:
        out = torch.full((m, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        call = functools.partial(launch, out=out)
        with watched(f"M={m} N={n} K={k} {key}"):
            try:
                call(0)
            except ValueError as refused:
                wrong.append(f"{key}: {refused}")
                return
            error = float(((out.float() - exact).norm() / exact.norm()).nan_to_num(nan=math.inf))
        if error > limit:
            wrong.append(f"{key}: relative error {error:.1e}")
            return
        calls = copies * max(1, round(max(8, 300 / guess) / copies))
        graphs[key] = capture(call, copies, calls)
        alive.append(call)  # a graph does not own the memory that it uses

    def ours(name: str, shape: Shape | None, pdl: bool) -> Callable[[int, Tensor], Any]:
        return lambda i, out: kernel.call(modules[name], shape, pdl, x, timed.packed[i], alpha, None, out)

    add("bf16", lambda i, out: torch.mm(x, timed.dense[i].t(), out=out), len(timed.dense), 4 * floor)
    add("bf16 default pdl", ours("bf16", None, True), len(timed.packed), floor)
    for name, (launch, copies, limit) in (peers or {}).items():
        add(name, launch, copies, floor, limit)
    for name in modules:
        add(f"{name} default", ours(name, None, False), len(timed.packed), floor)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for shape in few_tokens.candidates(kernel.name, m, n, k, sms) if sweep else ():
        add(shape, ours("bf16", shape, True), len(timed.packed), floor)
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


def with_ptx80() -> Catalog:
    """The catalog with PTX of compute_80 in its SM80 builds, so that this GPU can run what SM80 and SM89 run."""
    catalog = installed()
    record = catalog.record("80")
    both = replace(record, nvcc=(*record.nvcc, "-gencode=arch=compute_80,code=compute_80"))
    return replace(catalog, records={**catalog.records, "80": both})


def build_all(kernel: Kernel, ptx80: bool) -> dict[str, Any]:
    """Compile every build at once; name -> module."""
    arch = Arch(*torch.cuda.get_device_capability())
    start = time.perf_counter()
    catalog = with_ptx80()
    known = catalog.kernel(kernel.name)
    target = catalog.target_for(known, arch)
    assert target is not None
    jobs = [kernels.job(catalog, kernel.name, variant, target) for variant in known.variants]
    if ptx80:
        jobs.append(kernels.job(catalog, kernel.name, "bf16", "80"))
    built = kernels.build_all(jobs, catalog)
    names = [*known.variants, "bf16 ptx80"]
    for name, result in zip(names, built, strict=False):
        if not result.proven or (name in known.variants and not result.pdl_allowed):
            raise SystemExit(f"{kernel.name} {name} is not proven: {result.proof}")
    print(f"builds: {time.perf_counter() - start:.1f} s", flush=True)
    return {name: tvm_ffi.load_module(str(result.entry.library)) for name, result in zip(names, built, strict=False)}


METHOD = f"CUDA graph replay, cold weights (> {COLD_BYTES / 1e6:.0f} MB rotated), medians, us"


def main() -> None:
    """Run everything."""
    run(__doc__, SMALL, lambda timed, x: {})


def run(what: str | None, kernel: Kernel, peers: Callable[[Timed, Tensor], dict[str, Peer]]) -> None:
    """Check and time a kernel; the JSON file is written after every problem, so that a time limit loses nothing."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true", help="time other launch shapes too")
    parser.add_argument("--ptx80", action="store_true", help="also what SM80 runs, from its PTX")
    parser.add_argument("--no-check", action="store_true", help="times alone")
    parser.add_argument("--m", type=int, nargs="*", default=M)
    parser.add_argument("--seconds", type=float, default=140, help="start no new problem after this")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    facts = machine.facts(machine.card("cuda"), arguments.commit)
    result: dict[str, Any] = {"method": METHOD, "checks": [], "problems": []}
    modules = build_all(kernel, arguments.ptx80)
    if not arguments.no_check:
        for name, module in modules.items():
            result["checks"].append(check_kernel(kernel, module, name, sm90="ptx80" not in name))
    print(f"after the checks: {time.perf_counter() - begin:.1f} s", flush=True)
    timed_modules = {name: module for name, module in modules.items() if name != "fp16"}
    for n, k in (*NK, *EXTRA_NK):
        if time.perf_counter() - begin > arguments.seconds:
            print(f"out of time before N={n} K={k}")
            break
        timed = Timed.of(kernel.weight(n, k))
        alive: list[Any] = []
        for m in arguments.m:
            others = peers(timed, timed.x[:m].contiguous())
            row = time_problem(kernel, timed_modules, timed, m, arguments.sweep, alive, others)
            result["problems"].append(row)
            print_problem(row)
        records.write(arguments.out, "few tokens", facts, result, kernel.name)
        del timed, alive
    print_table(result["problems"])
    wrong = sum(len(check["faults"]) for check in result["checks"])
    wrong += sum(len(row["wrong"]) for row in result["problems"])
    print(f"total {time.perf_counter() - begin:.1f} s; faults: {wrong}")
    records.write(arguments.out, "few tokens", facts, result, kernel.name)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
