"""Checks of the W4P kernels for kernels_w4_large.py: packing, every build tile by tile, what FP8 sums lose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.shared.graphs import watched
from bench.kernels_w4 import DTYPES, Weight
from fp4dispatch import formats
from fp4dispatch.backends.own.tensors.folding import FOLD, fold_e4m3
from fp4dispatch.backends.own.tensors.w4_layout import pack_w4p
from fp4dispatch.benchmark.check import relative_error
from tests import many_tokens
from tests.w4_model import pack_activations
from tests.w4a8_small import H200, INSTANCES, launch_shapes

SHAPES = ((8, 16), (72, 48), (200, 144), (264, 400), (520, 2064), (1032, 1040), (768, 4096))
TOKENS = (1, 64, 65, 77, 127, 192, 200, 256, 385)
FEW_TOKENS = (1, 7, 16, 17, 33, 64, 65, 100)
RAGGED = {tile: (tile, tile + 1, 2 * tile + 9) for tile in (96, 112, 144, 160, 176, 192, 208)}
"""Whole tiles, and pieces of 16 tokens at their end."""
LAUNCHES = (
    *((1, 1, 8), (2, 1, 1), (4, 1, 2), (1, 2, 1), (2, 2, 1), (4, 2, 1)),
    *((1, 3, 2), (2, 3, 1), (1, 4, 3), (2, 4, 1), (1, 8, 1)),
)
"""multicast, split, raster"""
WHOLE_FIRST = (((1, 2, 8), 2, "many"), ((1, 3, 1), 1, "few"), ((1, 4, 8), 3, "few"), ((2, 2, 2), 1, "many"))
"""Launch shapes that split what whole tiles leave, rounds of those, and what is left."""
TILE_ERROR, FP8_TILE_ERROR = 2.5e-3, 4e-3
"""Of a 128x128 tile: rounding to bf16 gives 1.7e-3, and FP8 sums are truncated. For the few elements that an edge
leaves of a tile, see tile_limits."""
SUMMED = ("small", 32, 64, 96, 112, 128, 144, 160, 176, 192, 208)
"""Tiles whose FP8 sums are measured."""
ONE_SIGN_ERROR = 5e-3
"""Most that truncation may take off FP8 sums of one sign."""


class FewTokens:
    """w4a8_small, called as many_tokens.Gemm calls w4_gemm_sm90."""

    def __init__(self, module: Any) -> None:
        self.planned, self.shaped = module.w4a8_small, module.w4a8_small_shaped
        self._plan = module.w4a8_small_plan

    def plan(self, m: int, n: int, k: int) -> list[int]:
        """Return the 7 numbers of its launch shape."""
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        return list(self._plan(m, n, k, sms, *H200[1:]))


def tile_of(variant: str) -> Any:
    """Tokens of a build's tile, or "small"."""
    tile = variant.split("_")[2]
    return int(tile) if tile.isdigit() else tile


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
    """Activations in the form that a build reads, ``given``, and what they stand for in fp64."""

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
        operand = Operand(activations, x.cuda(), True)
        with watched(f"packing M={m} K={k}"):
            operand.pack(False)
            torch.cuda.synchronize()
        q = formats.fp8_quantize(x, "row")
        expected = pack_activations(q.data)
        count += 1
        wrong = int((operand.given.cpu() != expected).sum())
        if wrong:
            faults.append(f"{dtype} M={m} K={k}: {wrong} of {expected.numel()} bytes differ")
        if not torch.equal(operand.scale.cpu(), q.scale):
            faults.append(f"{dtype} M={m} K={k}: scales differ")
        static = torch.full((1,), 0.013)
        packed = torch.full_like(operand.given, 0xA5)
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
    wide = torch.full((m + 2, k + 24), torch.nan, device="cuda", dtype=dtype)  # NaN around the rows of x
    x = wide[1 : m + 1, 8 : 8 + k]
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
        if fp8:
            operand.given.fill_(0xFF)
        operand.pack(pdl)
        arguments = (operand.given, operand.scale, weight.packed, alpha, bias, out)
        if shape is None:
            module.planned(*arguments, pdl)
        else:
            module.shaped(*arguments, list(shape), pdl)
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
            module.planned(operand.given, operand.scale, packed, alpha, None, buffers[(i + 1) % 2], pdl)

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


def launches_of(variant: str, k: int) -> list[tuple[int, ...]]:
    """Every launch shape to check of a build for this K; parts of K without a stage are w4a8_small's alone."""
    if tile_of(variant) == "small":
        return list(launch_shapes())
    tile = many_tokens.tile_of("w4_gemm_sm90", variant)
    most = min(tile.most_split, -(-k // tile.stage_k))
    return [shape for shape in LAUNCHES if shape[1] <= most]


def problems_of(variant: str, weights: list[Any]) -> Iterator[tuple[Any, Any, int, list[Any]]]:
    """Yield (weight, what it stands for, tokens, launch shapes) to check: a third of the shapes for each M, in turn."""
    tile = tile_of(variant)
    tokens = {"small": FEW_TOKENS, 32: (*FEW_TOKENS, *TOKENS[3:])}.get(tile, (*TOKENS, *RAGGED.get(tile, ())))
    for number, (weight, exact, fold) in enumerate(weights):
        shapes = launches_of(variant, weight.k)
        for i, m in enumerate(tokens):
            yield weight, fold if variant.startswith("a8") else exact, m, [None, *shapes[(i + number) % 3 :: 3]]


def whole_tiles_first(variant: str) -> Iterator[tuple[Any, Any, int, list[Any]]]:
    """Yield, as ``problems_of``, problems of more tiles than run at once, of which the last ones have K shared out."""
    if tile_of(variant) == "small":
        return
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for shape, rounds, parts in WHOLE_FIRST:
        tile = many_tokens.tile_of("w4_gemm_sm90", variant)
        m, n = many_tokens.whole_tiles_first(tile, shape, sms, rounds, parts)
        weight = Weight(n, 528)
        yield weight, folded(weight) if variant.startswith("a8") else weight.dense64, m, [shape]


def check_build(module: Any, activations: Any, variant: str, weights: list[Any]) -> dict[str, Any]:
    """Return the number of problems, what was wrong, and the worst tile's error of any that was right."""
    faults, count, worst = [], 0, 0.0
    for weight, dense, m, shapes in itertools.chain(problems_of(variant, weights), whole_tiles_first(variant)):
        for shape in shapes:
            count += 1
            what = f"M={m} N={weight.n} K={weight.k} shape={shape}"
            with watched(f"{variant} {what}"):
                fault, error = check_one(module, activations, variant, weight, dense, m, shape)
            if fault:
                faults.append(f"{what}: {fault}")
            else:
                worst = max(worst, error)
    for m in (1, 16, 64) if tile_of(variant) in ("small", 32) else (64, 200):
        count += 1
        with watched(f"{variant} chain M={m}"):
            fault = check_chain(module, activations, variant, m)
        if fault:
            faults.append(f"chain M={m}: {fault}")
    print(f"check {variant}: {count - len(faults)} of {count} right, worst tile {worst:.1e}", flush=True)
    print(*(f"  {fault}" for fault in faults[:10]), sep="\n", end="\n" if faults else "", flush=True)
    return {"build": variant, "problems": count, "faults": faults, "worst_tile": worst}


def whole_k(tile: Any) -> tuple[int, ...]:
    """Return the launch shape that adds up the most of K in a row."""
    return (*min(INSTANCES, key=lambda instance: instance[2]), 1, 2, 2) if tile == "small" else (1, 1, 1)


def sum_errors(module: Any, activations: Any, tile: Any) -> list[dict[str, Any]]:
    """What FP8 sums lose: the a8 fp16 build against fp64, sums of random sign and of one sign."""
    rows, shape = [], list(whole_k(tile))
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
            module.shaped(operand.given, operand.scale, weight.packed, alpha, None, out, shape, False)
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


def check_everything(modules: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Check packing and every build but "w4a16"; return what was found, and the errors of FP8 sums."""
    activations = modules["activations"]
    weights = []
    for n, k in SHAPES:
        weight = Weight(n, k, every_scale=n % 64 != 0)
        weights.append((weight, weight.dense64, folded(weight)))
    builds = {variant: module for variant, module in modules.items() if variant not in ("activations", "w4a16")}
    checks = [check_packing(activations)]
    checks += [check_build(module, activations, variant, weights) for variant, module in builds.items()]
    sums = [sum_errors(modules[f"a8_fp16_{tile}"], activations, tile) for tile in SUMMED]
    return checks, [row for rows in sums for row in rows]
