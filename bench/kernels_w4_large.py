"""Check, then time the W4P kernels for many tokens beside bf16 cuBLAS and torch._scaled_mm, in one run.

Every build is checked first, tile by tile, against an fp64 product of what it defines: the exact dequantised weight
(16-bit activations), or the folded e4m3 weight and the quantised activations (FP8): ragged M, N and K, bias, vector
alpha, an output full of NaN between guards, the same bits in repetition and under PDL, every launch shape, and a PDL
chain of layers. Packing is checked bit for bit. Then the error that FP8 sums add, and times: a CUDA graph of calls on
rotating copies of the weights (more than 256 MB, so they come from memory), methods in turn, medians. "a8" and "a16"
include packing (and quantising) the activations, "gemm" is without it.

    python bench/kernels_w4_large.py --out w4_large.json [--tune] [--no-check] [--no-time] [--m 64 128 ...]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import tvm_ffi
from kernels_w4 import COLD_BYTES, DTYPES, NK, Weight, capture, environment, microseconds, watched
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.folding import FOLD, fold_e4m3
from fp4dispatch.backends.w4_layout import pack_w4p
from fp4dispatch.benchmark.check import relative_error, worst_tile
from fp4dispatch.jit import kernels
from fp4dispatch.jit.manifest import installed
from tests.w4_model import pack_activations

M = (64, 128, 256, 512, 1024, 2048, 4096)
TILES = (64, 128, 192, 256)


def tiles_of(modules: dict[str, Any], act: str, m: int) -> Iterator[int]:
    """Yield the tiles of a format that are worth a try for m tokens."""
    for tile in TILES:
        sensible = not (tile > 128 and m <= 64) and not (tile == 64 and m > 192)
        if sensible and f"{act}_bf16_{tile}" in modules:
            yield tile


SHAPES = ((8, 16), (72, 48), (200, 144), (264, 400), (520, 2064), (1032, 1040), (768, 4096))
TOKENS = (1, 64, 65, 77, 127, 192, 200, 256, 385)
LAUNCHES = ((1, 1, 8), (2, 1, 1), (4, 1, 2), (1, 2, 1), (2, 2, 1), (1, 4, 3), (4, 2, 1), (2, 4, 1), (1, 8, 1))
"""multicast, split, raster"""
ROUNDS = 7
TILE_ERROR, FP8_TILE_ERROR = 2.5e-3, 4e-3
"""Of a 128x128 tile: rounding to bf16 gives 1.7e-3, and FP8 sums are truncated. For the few elements that an edge
leaves of a tile, see tile_limits."""
ONE_SIGN_ERROR = 5e-3
"""Most that truncation may take off FP8 sums of one sign."""
TIMED_TILE_ERROR = 7e-3  # against a bf16 product, which is rounded too


def by_tile(x: Tensor) -> Tensor:
    """Sums of a matrix over its 128x128 tiles."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 128, 0, -x.shape[0] % 128))
    return padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).sum(dim=(1, 3))


def tile_limits(exact: Tensor, dtype: torch.dtype, base: float) -> Tensor:
    """Largest error of each 128x128 tile of a result that is rounded to ``dtype``.

    Rounding alone gives one value a relative error of up to eps / 2, and a full tile a norm of 0.22 eps. The square of
    a norm over n normal values scatters around that like one over n / 3 equal values: four standard deviations, about
    sqrt(3 / n) each, are allowed. Only below some 40 elements that is more than ``base``.
    """
    count = by_tile(torch.ones_like(exact))
    rounding = 0.22 * torch.finfo(dtype).eps * (1 + 4 * (3 / count).sqrt()).sqrt()
    return rounding.clamp(min=base)


def tile_errors(got: Tensor, exact: Tensor) -> Tensor:
    """Relative error of each 128x128 tile; what is not finite is infinitely wrong."""
    off, size = by_tile((got.double() - exact).square()).sqrt(), by_tile(exact.square()).sqrt()
    return torch.where(off == 0, 0.0, off / size).nan_to_num(nan=math.inf, posinf=math.inf)


class Operand:
    """Activations in the form that a build reads, and what they stand for in fp64."""

    def __init__(self, activations: Any, x: Tensor, fp8: bool) -> None:
        self.x, self.fp8, self.module = x, fp8, activations
        m, k = x.shape
        block = 128 if fp8 else 64
        self.packed = torch.full((-(-k // block), -(-m // 8), 1024), 0xA5, device="cuda", dtype=torch.uint8)
        self.scale = torch.full((m,), torch.nan, device="cuda") if fp8 else None

    def pack(self, pdl: bool) -> None:
        """Launch the packing kernel."""
        if self.fp8:
            self.module.w4_quantize_row(self.x, self.packed, self.scale, pdl)
        else:
            self.module.w4_pack(self.x, self.packed, pdl)

    def exact(self) -> Tensor:
        """Return [M, K] in fp64."""
        if not self.fp8:
            return self.x.double()
        q = formats.fp8_quantize(self.x, "row")
        return q.data.double() * q.scale.double().view(-1, 1)


def folded(weight: Weight) -> Tensor:
    """Return a weight as FP8 activations meet it, in fp64."""
    return fold_e4m3(weight.codes, weight.scale).double() * FOLD


# ---- Checks ----


def check_packing(activations: Any) -> dict[str, Any]:
    """Bits of packed operands against the model."""
    faults, count = [], 0
    for dtype, (m, k) in itertools.product(
        (torch.bfloat16, torch.float16), ((1, 16), (13, 208), (65, 144), (40, 2064), (300, 272), (3, 40_000))
    ):
        draw = torch.Generator().manual_seed(m + k)
        x = (torch.randn(m, k, generator=draw) * 3).to(dtype)
        x[m // 2] = 0
        x[-1, k // 2] = torch.inf
        for fp8 in (False, True):
            operand = Operand(activations, x.cuda(), fp8)
            with watched(f"packing M={m} K={k} fp8={fp8}"):
                operand.pack(False)
                torch.cuda.synchronize()
            q = formats.fp8_quantize(x, "row") if fp8 else None
            expected = pack_activations(q.data if q is not None else x)
            count += 1
            wrong = int((operand.packed.cpu() != expected).sum())
            if wrong:
                faults.append(f"{dtype} M={m} K={k} fp8={fp8}: {wrong} of {expected.numel()} bytes differ")
            if q is not None and not torch.equal(operand.scale.cpu(), q.scale):
                faults.append(f"{dtype} M={m} K={k}: scales differ")
        static = torch.full((1,), 0.013)
        packed = torch.full_like(operand.packed, 0xA5)
        activations.w4_quantize_tensor(x.cuda(), packed, static.cuda(), False)
        expected = pack_activations(formats.fp8_quantize(x, "tensor", static[0]).data)
        count += 1
        if not torch.equal(packed.cpu(), expected):
            faults.append(f"{dtype} M={m} K={k}: static scale differs")
    print(f"check packing: {count - len(faults)} of {count} right", *faults[:8], sep="\n  ", flush=True)
    return {"build": "w4_activations", "problems": count, "faults": faults}


def check_one(
    module: Any, activations: Any, variant: str, weight: Weight, dense: Tensor, m: int, shape: Any
) -> tuple[str, float]:
    """Run one problem; return what is wrong with it, or nothing, and the worst tile's error."""
    dtype, fp8 = DTYPES[variant.split("_")[1]], variant.startswith("a8")
    draw = torch.Generator("cuda").manual_seed(m)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=draw, device="cuda")

    n, k = weight.n, weight.k
    wide = torch.full((m, k + 24), torch.nan, device="cuda", dtype=dtype)  # NaN beside the rows of x
    x = wide[:, 8 : 8 + k]
    x.copy_(randn(m, k))
    operand = Operand(activations, x, fp8)
    alpha = torch.rand(n if m % 2 else 1, generator=draw, device="cuda") * 2.0**-9 + 2.0**-10
    bias = randn(n).mul(k**0.5 * 2**-9).to(dtype) if m % 3 else None
    guarded = torch.full((m + 2, n), torch.nan, device="cuda", dtype=dtype)
    out = guarded[1 : m + 1]
    if (out.data_ptr() % 16) != 0:
        raise AssertionError("the check itself is not aligned")
    exact_x = operand.exact()
    scaled = dense * alpha.double().view(-1, 1)
    exact = exact_x @ scaled.t() + (0 if bias is None else bias.double())
    magnitude = exact_x.abs() @ scaled.t().abs()
    results = []
    for pdl in (False, True, True):
        out.fill_(torch.nan)
        operand.packed.fill_(0xFF)
        operand.pack(pdl)
        arguments = (operand.packed, operand.scale, weight.packed, alpha, bias, out)
        if shape is None:
            module.w4_gemm(*arguments, pdl)
        else:
            module.w4_gemm_shaped(*arguments, list(shape), pdl)
        results.append(out.clone())
    if not all(torch.equal(result.view(torch.int16), results[0].view(torch.int16)) for result in results):
        return "bits differ between runs", math.inf
    if not (guarded[0].isnan().all() and guarded[-1].isnan().all()):
        return "wrote outside the output", math.inf
    # FP8 sums: every MMA of 32 k may cut 2^-13 off the sum so far, which stays within 4 times its root-sum-square.
    unit = torch.finfo(dtype).eps
    size = (exact_x.square() @ scaled.t().square()).sqrt()
    allowed = 2.0**-13 * 4 * (k / 32 + 2) * size if fp8 else 2.0**-17 * magnitude
    wrong = ~((results[0].double() - exact).abs() <= unit * exact.abs() + allowed + 2.0**-24)
    errors = tile_errors(results[0], exact)
    error = float(errors.max())
    if wrong.any():
        where = wrong.nonzero()
        return f"{len(where)} of {wrong.numel()} wrong, first {where[0].tolist()}, tile error {error:.1e}", error
    excess = errors / tile_limits(exact, dtype, FP8_TILE_ERROR if fp8 else TILE_ERROR)
    if excess.max() > 1:
        tile = divmod(int(excess.argmax()), excess.shape[1])
        return f"tile {tile}: error {float(errors[tile]):.1e}, {float(excess.max()):.2f} of its limit", error
    return "", error


def check_chain(module: Any, activations: Any, variant: str, m: int) -> str:
    """12 layers under PDL in a graph, each on the output of the one before, against the same without PDL."""
    size = 2048
    dtype = DTYPES[variant.split("_")[1]]
    weights = [Weight(size, size, seed) for seed in range(3)]
    alpha = size**0.5 / weights[0].dense(torch.float32).norm().view(1)
    buffers = [torch.zeros(m, size, device="cuda", dtype=dtype) for _ in range(2)]
    operands = [Operand(activations, buffer, variant.startswith("a8")) for buffer in buffers]
    start = torch.randn(m, size, device="cuda").to(dtype)

    def layers(pdl: bool) -> None:
        for i in range(12):
            operand = operands[i % 2]
            operand.pack(pdl)
            packed = weights[i % 3].packed
            module.w4_gemm(operand.packed, operand.scale, packed, alpha, None, buffers[(i + 1) % 2], pdl)

    buffers[0].copy_(start)
    layers(False)
    expected = buffers[0].clone()
    if not expected.isfinite().all() or not expected.any():
        return "the chain of the check itself is not finite or zero"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(True)
    for _ in range(20):
        buffers[0].copy_(start)
        buffers[1].fill_(torch.nan)
        graph.replay()
        if not torch.equal(buffers[0].view(torch.int16), expected.view(torch.int16)):
            return "a PDL chain has other bits than the same without PDL"
    return ""


def check_build(module: Any, activations: Any, variant: str, weights: list[Any]) -> dict[str, Any]:
    """Return the number of problems, what was wrong, and the worst tile's error of any that was right."""
    faults, count, worst = [], 0, 0.0
    for number, (weight, exact, fold) in enumerate(weights):
        dense = fold if variant.startswith("a8") else exact
        block = 128 if variant.startswith("a8") else 64
        for i, m in enumerate(TOKENS):
            shapes: list[Any] = [None]
            shapes += [s for s in LAUNCHES if s[1] <= -(-weight.k // block)][(i + number) % 3 :: 3]
            for shape in shapes:
                count += 1
                what = f"M={m} N={weight.n} K={weight.k} shape={shape}"
                with watched(f"{variant} {what}"):
                    fault, error = check_one(module, activations, variant, weight, dense, m, shape)
                if fault:
                    faults.append(f"{what}: {fault}")
                else:
                    worst = max(worst, error)
    for m in (64, 200):
        count += 1
        with watched(f"{variant} chain M={m}"):
            fault = check_chain(module, activations, variant, m)
        if fault:
            faults.append(f"chain M={m}: {fault}")
    print(f"check {variant}: {count - len(faults)} of {count} right, worst tile {worst:.1e}", flush=True)
    print(*(f"  {fault}" for fault in faults[:10]), sep="\n", end="\n" if faults else "", flush=True)
    return {"build": variant, "problems": count, "faults": faults, "worst_tile": worst}


def sum_errors(module: Any, activations: Any, tile: int) -> list[dict[str, Any]]:
    """What FP8 sums lose: the a8 fp16 build against fp64, sums of random sign and of one sign."""
    rows = []
    for k in (4096, 14336, 28672):
        weight = Weight(256, k)
        for one_sign in (False, True):
            if one_sign:
                weight = Weight(256, k)
                weight.codes &= 0x77
                weight.packed = pack_w4p(weight.codes, weight.scale)
            x = torch.randn(256, k, device="cuda").half()
            operand = Operand(activations, x.abs() if one_sign else x, True)
            operand.pack(False)
            defined = operand.exact() @ folded(weight).t()
            exact = operand.x.double() @ weight.dense(torch.float64).t()
            alpha = (1 / defined.abs().mean()).float().view(1)
            out = torch.empty(256, 256, device="cuda", dtype=torch.float16)
            module.w4_gemm_shaped(operand.packed, operand.scale, weight.packed, alpha, None, out, [1, 1, 1], False)
            got = out.double() / alpha.double()
            row = {
                "tile": tile,
                "k": k,
                "one_sign": one_sign,
                "sums": relative_error(got, defined),
                "all": relative_error(got, exact),
                "without_sums": relative_error(defined, exact),
                "mean": float(((got - defined) / defined).mean()) if one_sign else None,
            }
            rows.append(row)
            print("FP8 sums (fp16 rounding alone: 2e-4)", row, flush=True)
    return rows


# ---- Times ----


class Timed:
    """Rotating copies of one weight in the formats of the methods."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k
        self.weight = Weight(n, k)
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


def methods(modules: dict[str, Any], timed: Timed, x: Tensor, out: Tensor) -> Iterator[tuple[str, Any, int, Tensor]]:
    """Yield (name, call, copies, what it should give) of every method for one problem."""
    m = x.shape[0]
    activations = modules["activations"]
    exact = x @ timed.dense_first.t()
    q, scale = formats.fp8_quantize(x, "row")
    fp8_exact = ((q.bfloat16() @ timed.fold.t()).float() * scale.view(-1, 1) * FOLD).bfloat16()
    q1, scale1 = formats.fp8_quantize(x, "tensor")
    alpha = torch.ones(1, device="cuda")
    eight = torch.full((1, 1), FOLD, device="cuda")
    yield "bf16", lambda i: torch.mm(x, timed.dense[i].t(), out=out), len(timed.dense), exact
    tensor_exact = ((q1.bfloat16() @ timed.fold.t()).float() * scale1 * FOLD).bfloat16()

    def scaled(a: Tensor, a_scale: Tensor, b_scale: Tensor) -> Callable[[int], Any]:
        return lambda i: torch._scaled_mm(
            a, timed.fp8[i].t(), scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, out=out
        )

    yield "fp8 tensor", scaled(q1, scale1.view(1, 1), eight), len(timed.fp8), tensor_exact
    yield "fp8 row", scaled(q, scale.view(-1, 1), timed.column_scale), len(timed.fp8), fp8_exact
    for act in ("a8", "a16"):
        operand = Operand(activations, x, act == "a8")
        operand.pack(False)

        def packing(i: int, operand: Operand = operand) -> None:
            operand.pack(True)

        yield f"{act} pack", packing, 1, exact
        for tile in tiles_of(modules, act, m):
            module = modules[f"{act}_bf16_{tile}"]

            def gemm(i: int, module: Any = module, operand: Operand = operand) -> None:
                module.w4_gemm(operand.packed, operand.scale, timed.packed[i], alpha, None, out, True)

            def both(i: int, gemm: Any = gemm, operand: Operand = operand) -> None:
                operand.pack(True)
                gemm(i)

            expected = fp8_exact if act == "a8" else exact
            yield f"{act} {tile}", both, len(timed.packed), expected
            yield f"{act} {tile} gemm", gemm, len(timed.packed), expected


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
    """Return the fastest tile's time with packing, and its tokens."""
    found = {name: us for name, us in row["us"].items() if name.startswith(act + " ") and name.split()[-1].isdigit()}
    name = min(found, key=found.__getitem__, default="")
    return (found[name], name.split()[1]) if name else (math.nan, "-")


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The compact table: bf16 time over each method's."""
    lines = ["bf16 us / ratio bf16:method; a8, a16 with packing (tile), g = gemm alone, p = packing us"]
    for row in rows:
        us = row["us"]
        bf16 = us.get("bf16", math.nan)
        cells = [f"{row['n']:>6}x{row['k']:<6}{row['m']:>5} {bf16:8.1f}"]
        cells += [f"{name} {bf16 / us.get(name, math.nan):.2f}" for name in ("fp8 tensor", "fp8 row")]
        for act in ("a8", "a16"):
            time_, tile = best(row, act)
            gemm = us.get(f"{act} {tile} gemm", math.nan)
            cells.append(
                f"{act} {bf16 / time_:.2f} (T{tile}, {time_:.1f} us, g {bf16 / gemm:.2f}, "
                f"p {us.get(f'{act} pack', math.nan):.1f})"
            )
        lines.append("  ".join(cells))
    for m in sorted({row["m"] for row in rows}):
        cells = [f"geometric mean M={m}:"]
        some = [row for row in rows if row["m"] == m]
        for name in ("fp8 tensor", "fp8 row", "a8", "a16"):
            ratios = [
                row["us"].get("bf16", math.nan)
                / (best(row, name)[0] if name.startswith("a") else row["us"].get(name, math.nan))
                for row in some
            ]
            finite = [ratio for ratio in ratios if math.isfinite(ratio)]
            mean = statistics.geometric_mean(finite) if finite else math.nan
            cells.append(f"{name} {mean:.3f}" + ("" if len(finite) == len(some) else f" of {len(finite)}"))
        lines.append("  ".join(cells) + f"  ({len(some)} shapes)")
    return lines


def tune(modules: dict[str, Any], timed: Timed, m: int, acts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Time the GEMM alone in every sensible launch shape of every tile."""
    n, k = timed.n, timed.k
    x = torch.randn(m, k, device="cuda").bfloat16()
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    alpha = torch.ones(1, device="cuda")
    rows = []
    for act in acts:
        operand = Operand(modules["activations"], x, act == "a8")
        operand.pack(False)
        graphs: dict[Any, Any] = {}
        alive = []
        for tile in tiles_of(modules, act, m):
            module = modules[f"{act}_bf16_{tile}"]
            sms = torch.cuda.get_device_properties(0).multi_processor_count
            auto = tuple(module.w4_gemm_plan(m, n, k, sms))[:3]
            tiles = -(-n // (128 if tile == 256 or act == "a8" else 256)) * -(-m // tile)
            shapes = {auto}
            for multicast, split in itertools.product((1, 2, 4), (1, 2, 4, 8)):
                slots = sms * (2 if tile == 64 and act == "a8" else 1)
                fits = multicast * split <= 8 and (split == 1 or tiles * split <= 2 * slots)
                if fits and k // 128 >= 2 * split and multicast <= 2:
                    shapes.add((multicast, split, auto[2]))
            for raster in (4, 16) if m // tile > 4 else ():
                shapes.add((auto[0], auto[1], raster))
            for shape in sorted(shapes):

                def gemm(i: int, module: Any = module, shape: Any = shape, operand: Operand = operand) -> None:
                    module.w4_gemm_shaped(
                        operand.packed, operand.scale, timed.packed[i], alpha, None, out, list(shape), True
                    )

                with watched(f"tune M={m} N={n} K={k} {act} {tile} {shape}"):
                    copies = len(timed.packed)
                    graphs[tile, shape, shape == auto] = capture(gemm, copies, calls_of(copies, 2.0 * m * n * k))
                alive.append(gemm)
        times = microseconds(graphs, 5)
        for tile in TILES:
            mine = sorted((us, shape, auto) for (t, shape, auto), us in times.items() if t == tile)
            if mine:
                chosen = next(us for us, _, auto in mine if auto)
                rows.append({"n": n, "k": k, "m": m, "act": act, "tile": tile, "auto_us": chosen, "shapes": mine})
                shown = ", ".join(f"{shape} {us:.1f}{'*' if auto else ''}" for us, shape, auto in mine[:5])
                print(f"tune N={n} K={k} M={m} {act} T{tile}: auto {chosen:.1f}; {shown}", flush=True)
    return rows


# ---- Everything ----


@functools.cache
def build_all() -> dict[str, Any]:
    """Compile every build at once; name -> module."""
    start = time.perf_counter()
    catalog = installed()
    names = [("w4_activations", "any"), *(("w4_gemm_sm90", v) for v in catalog.kernel("w4_gemm_sm90").variants)]
    built = kernels.build_all([kernels.job(catalog, kernel, variant, "90a") for kernel, variant in names], catalog)
    modules = {}
    for (_, variant), result in zip(names, built, strict=True):
        if not result.pdl_allowed:
            raise SystemExit(f"{variant} is not proven: {result.proof}")
        modules["activations" if variant == "any" else variant] = tvm_ffi.load_module(str(result.entry.library))
    print(f"builds: {time.perf_counter() - start:.1f} s", flush=True)
    return modules


def main() -> None:
    """Run everything; the JSON file is written after every problem, so that a time limit loses nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune", action="store_true", help="time every launch shape too")
    parser.add_argument("--no-check", action="store_true", help="times alone")
    parser.add_argument("--no-time", action="store_true", help="checks (and tuning) alone")
    parser.add_argument("--tune-acts", nargs="*", default=("a8", "a16"), help="formats that --tune takes")
    parser.add_argument("--m", type=int, nargs="*", default=M)
    parser.add_argument("--seconds", type=float, default=140, help="start no new weight after this")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    torch.manual_seed(0)
    modules = build_all()
    activations = modules["activations"]
    result = environment(arguments.commit) | {"checks": [], "sums": [], "problems": [], "tune": []}

    def save() -> None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    if not arguments.no_check:
        result["checks"].append(check_packing(activations))
        weights = []
        for n, k in SHAPES:
            weight = Weight(n, k, every_scale=n % 64 != 0)
            weights.append((weight, weight.dense64, folded(weight)))
        for variant, module in modules.items():
            if variant != "activations":
                result["checks"].append(check_build(module, activations, variant, weights))
        for tile in (64, 192):  # promoted every 256 and 512 k
            result["sums"] += sum_errors(modules[f"a8_fp16_{tile}"], activations, tile)
        print(f"after the checks: {time.perf_counter() - begin:.1f} s", flush=True)
        save()
    for n, k in NK:
        if (arguments.no_time and not arguments.tune) or time.perf_counter() - begin > arguments.seconds:
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
    wrong = sum(len(check["faults"]) for check in result["checks"]) + sum(len(r["wrong"]) for r in result["problems"])
    wrong += sum(row["one_sign"] and not abs(row["mean"]) < ONE_SIGN_ERROR for row in result["sums"])
    print(f"total {time.perf_counter() - begin:.1f} s; faults: {wrong}")
    save()
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
