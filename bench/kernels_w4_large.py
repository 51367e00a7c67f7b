"""How long w4_gemm_sm90 and w4a8_small take in every tile, beside bf16 cuBLAS and torch._scaled_mm.

Each method and launch shape is compared tile by tile with what it should give before it is timed (all else that must
hold: tests/gpu). A measurement is a CUDA graph of calls on rotating copies of the weights (more than 256 MB, so they
come from memory), methods in turn, medians. "a8" includes quantising the activations, "gemm" is without it; "a16" reads
them as they are. "small" among the tiles is w4a8_small, for few tokens, and "w4a16" w4a16_small, which kernels_w4.py
times.

    python -m bench.kernels_w4_large --json w4_large.json [--tune] [--no-time] [--m 64 128 ...]
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import tvm_ffi
from torch import Tensor

from bench.shared import commandline
from bench.shared.few_tokens import NK, Nvfp4Weight
from bench.shared.graphs import COLD_BYTES, METHOD, capture, microseconds, watched
from fp4dispatch import formats
from fp4dispatch.backends.own.tensors.folding import FOLD, fold_e4m3
from fp4dispatch.backends.own.tiling import few_tokens, launch_model
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.check import worst_tile
from fp4dispatch.benchmark.reports import records
from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog.manifest import installed
from tests import many_tokens
from tests.w4a8_small import H200

M = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TILES = ("small", 32, 64, "64x128", 80, 96, 112, 128, "128x128", 144, 160, 176, 192, 208, 224, 240, 256)
MOST_M = {"small": 64, 32: 64, 64: 192, "64x128": 192}
LEAST_M = {"128x128": 65} | dict.fromkeys((80, 96, 112), 65) | dict.fromkeys(range(144, 257, 16), 129)
TIMED = {f"{act}_bf16_{tile}" for act in ("a8", "a16") for tile in TILES}
W4A16_MOST_M = 32
ROUNDS = 7
TIMED_TILE_ERROR = 7e-3  # against a bf16 product, which is rounded too


class FewTokens:
    """w4a8_small, called as many_tokens.Gemm calls w4_gemm_sm90."""

    def __init__(self, module: Any) -> None:
        self.planned, self.shaped = module.w4a8_small, module.w4a8_small_shaped
        self._plan = module.w4a8_small_plan

    def plan(self, m: int, n: int, k: int) -> list[int]:
        """Return the 7 numbers of its launch shape."""
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        return list(self._plan(m, n, k, sms, *H200[1:]))


class Operand:
    """Activations in the form that a build reads, ``given``."""

    def __init__(self, activations: Any, x: Tensor, fp8: bool) -> None:
        self.x, self.fp8, self.module = x, fp8, activations
        m, k = x.shape
        self.given, self.scale = x, None
        if fp8:
            self.given = torch.full((-(-k // 128), -(-m // 8), 1024), 0xA5, device="cuda", dtype=torch.uint8)
            self.scale = torch.full((m,), torch.nan, device="cuda")

    def pack(self, pdl: bool) -> None:
        """Launch the quantiser, if ``given`` is not x itself."""
        if self.fp8:
            self.module.w4_quantize_row(self.x, self.given, self.scale, pdl)


def tiles_of(modules: dict[str, Any], act: str, m: int) -> Iterator[Any]:
    """Yield the tiles of a format that are worth a try for m tokens."""
    for tile in TILES:
        if LEAST_M.get(tile, 1) <= m <= MOST_M.get(tile, m) and f"{act}_bf16_{tile}" in modules:
            yield tile


class Timed:
    """Rotating copies of one weight in the formats of the methods."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self.weight = Nvfp4Weight(n, k)
        self.dense_first = self.weight.dense(torch.bfloat16)
        fold = fold_e4m3(self.weight.codes, self.weight.scale)
        self.packed = self._copies(self.weight.packed)
        self.dense = self._copies(self.dense_first)
        self.fp8 = self._copies(fold)
        self.fold = fold.bfloat16()
        self.column_scale = torch.full((1, n), FOLD, device="cuda")

    @staticmethod
    def _copies(tensor: Tensor) -> list[Tensor]:
        count = max(2, math.ceil(COLD_BYTES / (tensor.numel() * tensor.element_size())))
        return [tensor] + [tensor.clone() for _ in range(count - 1)]


def products(timed: Timed, x: Tensor) -> dict[str, Tensor]:
    """Return what the product is with activations in each format, weights and all, rounded to bf16."""
    q, scale = formats.fp8_quantize(x, "row")
    rows = (q.bfloat16() @ timed.fold.t()).float() * scale.view(-1, 1) * FOLD
    return {"a16": x @ timed.dense_first.t(), "a8": rows.bfloat16()}


def methods(modules: dict[str, Any], timed: Timed, x: Tensor, out: Tensor) -> Iterator[tuple[str, Any, int, Tensor]]:
    """Yield (name, call, copies, what it should give) of every method for one problem."""
    m = x.shape[0]
    activations = modules["activations"]
    right = products(timed, x)
    exact = right["a16"]
    q, scale = formats.fp8_quantize(x, "row")
    q1, scale1 = formats.fp8_quantize(x, "tensor")
    alpha = torch.ones(1, device="cuda")
    eight = torch.full((1, 1), FOLD, device="cuda")
    yield "bf16", lambda i: torch.mm(x, timed.dense[i].t(), out=out), len(timed.dense), exact
    if m <= W4A16_MOST_M:
        small = modules["w4a16"].w4a16_small
        yield "w4a16", lambda i: small(x, timed.packed[i], alpha, None, out, True), len(timed.packed), exact
    tensor_exact = ((q1.bfloat16() @ timed.fold.t()).float() * scale1 * FOLD).bfloat16()

    def scaled(a: Tensor, a_scale: Tensor, b_scale: Tensor) -> Callable[[int], Any]:
        return lambda i: torch._scaled_mm(
            a, timed.fp8[i].t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, out=out
        )

    yield "fp8 tensor", scaled(q1, scale1.view(1, 1), eight), len(timed.fp8), tensor_exact
    yield "fp8 row", scaled(q, scale.view(-1, 1), timed.column_scale), len(timed.fp8), right["a8"]
    for act in ("a8", "a16"):
        operand = Operand(activations, x, act == "a8")
        operand.pack(False)

        if act == "a8":
            yield "a8 pack", lambda i, operand=operand: operand.pack(True), 1, exact
        for tile in tiles_of(modules, act, m):
            module = modules[f"{act}_bf16_{tile}"]

            def gemm(i: int, module: Any = module, operand: Operand = operand) -> None:
                module.planned(operand.given, operand.scale, timed.packed[i], alpha, None, out, True)

            def both(i: int, gemm: Any = gemm, operand: Operand = operand) -> None:
                operand.pack(True)
                gemm(i)

            yield f"{act} {tile}", both, len(timed.packed), right[act]
            if act == "a8":
                yield f"{act} {tile} gemm", gemm, len(timed.packed), right[act]


def calls_of(copies: int, flops: float) -> int:
    """Calls of a replay: a multiple of the copies, about half a millisecond at least."""
    guess_us = max(5.0, flops / 1e9)
    return copies * max(1, round(max(6.0, 500 / guess_us) / copies))


def time_problem(modules: dict[str, Any], timed: Timed, m: int) -> dict[str, Any]:
    """Check and time every method on one problem."""
    n, k = timed.n, timed.k
    x = torch.randn(m, k, device="cuda").bfloat16()
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    graphs, alive, wrong = {}, [], {}
    for name, call, copies, expected in methods(modules, timed, x, out):
        out.fill_(torch.nan)
        with watched(f"M={m} N={n} K={k} {name}"):
            call(0)
            torch.cuda.synchronize()
        if "pack" not in name:
            error = worst_tile(out, expected.float()).error
            if error > TIMED_TILE_ERROR:
                wrong[name] = error
                continue
        graphs[name] = capture(call, copies, calls_of(copies, 2.0 * m * n * k))
        alive.append(call)
    times = microseconds(graphs, ROUNDS)
    row = {"n": n, "k": k, "m": m, "us": times, "wrong": wrong}
    cells = ", ".join(f"{name} {us:.1f}" for name, us in times.items())
    print(f"N={n} K={k} M={m}: {cells}" + "".join(f"; WRONG {name} {e:.1e}" for name, e in wrong.items()), flush=True)
    return row


def best(row: dict[str, Any], act: str) -> tuple[float, str]:
    """Return the fastest tile's time with its quantiser, and its tokens or "small"."""
    tiles = {f"{act} {tile}" for tile in TILES}
    found = {name: us for name, us in row["us"].items() if name in tiles}
    name = min(found, key=found.__getitem__, default="")
    return (found[name], name.split()[1]) if name else (math.nan, "-")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The compact table: bf16 time over each method's."""
    lines = [
        "bf16 us / ratio bf16:method; a8 with its quantiser (tile), g = gemm alone, p = quantiser us; a16, w4a16: none"
    ]
    for row in rows:
        us = row["us"]
        bf16 = us.get("bf16", math.nan)
        cells = [f"{row['n']:>6}x{row['k']:<6}{row['m']:>5} {bf16:8.1f}"]
        cells += [f"{name} {bf16 / us.get(name, math.nan):.2f}" for name in ("fp8 tensor", "fp8 row")]
        for act in ("a8", "a16"):
            time_, tile = best(row, act)
            gemm, quantiser = us.get(f"{act} {tile} gemm", math.nan), us.get(f"{act} pack", math.nan)
            alone = f", g {bf16 / gemm:.2f}, p {quantiser:.1f}" if act == "a8" else ""
            cells.append(f"{act} {bf16 / time_:.2f} ({tile}, {time_:.1f} us{alone})")
        if "w4a16" in us:
            cells.append(f"w4a16 {bf16 / us['w4a16']:.2f} ({us['w4a16']:.1f} us)")
        lines.append("  ".join(cells))
    for m in sorted({row["m"] for row in rows}):
        cells = [f"geometric mean M={m}:"]
        some = [row for row in rows if row["m"] == m]
        for name in ("fp8 tensor", "fp8 row", "a8", "a16", "w4a16"):
            ratios = [
                row["us"].get("bf16", math.nan)
                / (best(row, name)[0] if name.startswith("a") else row["us"].get(name, math.nan))
                for row in some
            ]
            finite = [ratio for ratio in ratios if math.isfinite(ratio)]
            if not finite and name == "w4a16":
                continue
            mean = statistics.geometric_mean(finite) if finite else math.nan
            cells.append(f"{name} {mean:.3f}" + ("" if len(finite) == len(some) else f" of {len(finite)}"))
        lines.append("  ".join(cells) + f"  ({len(some)} shapes)")
    return lines


def shapes_to_tune(module: Any, tile: Any, mnk: tuple[int, int, int]) -> tuple[Any, set[Any]]:
    """Return what the build itself chooses, and every launch shape that is worth a try beside it."""
    m, n, k = mnk
    if tile == "small":
        auto, sms = tuple(module.plan(m, n, k)), torch.cuda.get_device_properties(0).multi_processor_count
        return auto, {auto, *few_tokens.candidates("w4a8_small", m, n, k, sms)}
    auto = module.plan(m, n, k).shape[:3]
    shapes = {auto}
    for multicast, split in itertools.product((1, 2), launch_model.SPLITS):
        if split > module.tile.most_split or multicast * split > launch_model.LARGEST_CLUSTER or k // 128 < 2 * split:
            continue
        # Split tiles in two waves at most, or whole ones first and what they leave in one.
        shape = launch_model.laid_out(module.tile, m, n, module.gpu, multicast=multicast, split=split)
        if split == 1 or shape.rounds > 0 or shape.clusters <= 2 * launch_model.slots(module.tile, shape, module.gpu):
            shapes.add((multicast, split, auto[2]))
    return auto, shapes | {(auto[0], auto[1], raster) for raster in (4, 16) if m // module.tile.tokens > 4}


def tune(modules: dict[str, Any], timed: Timed, m: int, acts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Check and time the GEMM alone in every sensible launch shape of every tile."""
    n, k = timed.n, timed.k
    x = torch.randn(m, k, device="cuda").bfloat16()
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    alpha = torch.ones(1, device="cuda")
    right = products(timed, x)
    rows = []
    for act in acts:
        operand = Operand(modules["activations"], x, act == "a8")
        operand.pack(False)
        graphs: dict[Any, Any] = {}
        alive, wrong = [], []
        for tile in tiles_of(modules, act, m):
            module = modules[f"{act}_bf16_{tile}"]
            auto, shapes = shapes_to_tune(module, tile, (m, n, k))
            for shape in sorted(shapes):

                def gemm(i: int, module: Any = module, shape: Any = shape, operand: Operand = operand) -> None:
                    module.shaped(operand.given, operand.scale, timed.packed[i], alpha, None, out, list(shape), True)

                out.fill_(torch.nan)
                with watched(f"tune M={m} N={n} K={k} {act} {tile} {shape}"):
                    gemm(0)
                    torch.cuda.synchronize()
                    error = worst_tile(out, right[act].float()).error
                    if error > TIMED_TILE_ERROR:
                        wrong.append((tile, shape, error))
                        continue
                    copies = len(timed.packed)
                    graphs[tile, shape, shape == auto] = capture(gemm, copies, calls_of(copies, 2.0 * m * n * k))
                alive.append(gemm)
        times = microseconds(graphs, 5)
        for tile in TILES:
            mine = sorted((us, shape, auto) for (t, shape, auto), us in times.items() if t == tile)
            bad = {str(shape): error for t, shape, error in wrong if t == tile}
            if mine or bad:
                chosen = next((us for us, _, auto in mine if auto), None)
                row = {"n": n, "k": k, "m": m, "act": act, "tile": tile, "auto_us": chosen, "shapes": mine}
                rows.append(row | {"wrong": bad})
                shown = ", ".join(f"{shape} {us:.1f}{'*' if auto else ''}" for us, shape, auto in mine[:5])
                print(f"tune N={n} K={k} M={m} {act} T{tile}: auto {chosen or math.nan:.1f}; {shown}", flush=True)
                print(*(f"    WRONG {shape} {e:.1e}" for shape, e in bad.items()), sep="\n", end="\n" * bool(bad))
    return rows


# ---- Everything ----


@functools.cache
def build_all() -> dict[str, Any]:
    """Compile every build that is timed at once; name -> module."""
    start = time.perf_counter()
    catalog = installed()
    names = [("w4_activations", "any"), ("w4a16_small", "bf16"), ("w4a8_small", "bf16")]
    names += [("w4_gemm_sm90", v) for v in catalog.kernel("w4_gemm_sm90").variants if v in TIMED]
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    built = kernels.build_all([kernels.job(catalog, kernel, variant, "90a") for kernel, variant in names], catalog)
    modules = {}
    for (kernel, variant), result in zip(names, built, strict=True):
        if not result.pdl_allowed:
            raise SystemExit(f"{kernel} {variant} is not proven: {result.proof}")
        module = tvm_ffi.load_module(str(result.entry.library))
        if kernel == "w4a8_small":
            modules["a8_bf16_small"] = FewTokens(module)
        elif kernel == "w4_gemm_sm90":
            modules[variant] = many_tokens.Gemm(module, kernel, variant, sms)
        else:
            modules[{"w4_activations": "activations", "w4a16_small": "w4a16"}[kernel]] = module
    print(f"builds: {time.perf_counter() - start:.1f} s", flush=True)
    return modules


def main(words: Sequence[str] | None = None) -> int:
    """Run everything; the JSON file is written after every problem, so that a time limit loses nothing."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True)
    parser.add_argument("--tune", action="store_true", help="time every launch shape too")
    parser.add_argument("--no-time", action="store_true", help="with --tune: that alone")
    parser.add_argument("--tune-acts", nargs="*", default=("a8", "a16"), help="formats that --tune takes")
    parser.add_argument("--m", type=int, nargs="*", default=M)
    parser.add_argument("--seconds", type=float, default=140, help="start no new weight after this")
    arguments = commandline.parse(parser, words)
    if arguments.no_time and not arguments.tune:
        parser.error("--no-time leaves nothing to do without --tune")
    begin = time.perf_counter()
    torch.manual_seed(0)
    modules = build_all()
    facts = machine.facts(machine.card("cuda"), arguments.commit)
    result: dict[str, Any] = {"method": METHOD, "problems": [], "tune": []}

    def save() -> None:
        records.write(arguments.json, "many tokens", facts, result, "w4_gemm_sm90")

    for n, k in NK:
        if time.perf_counter() - begin > arguments.seconds:
            print(f"not timed from N={n} K={k} on")
            break
        timed = Timed(n, k)
        for m in arguments.m:
            if not arguments.no_time:
                result["problems"].append(time_problem(modules, timed, m))
            if arguments.tune and m <= 1024:
                result["tune"] += tune(
                    modules, timed, m, tuple(act for act in arguments.tune_acts if act == "a8" or m >= 256)
                )
        save()
        del timed
    print(*table(result["problems"]), sep="\n")
    wrong = sum(len(row["wrong"]) for row in (*result["problems"], *result["tune"]))
    print(f"total {time.perf_counter() - begin:.1f} s; faults: {wrong}")
    save()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
