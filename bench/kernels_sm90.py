"""How long our CUTLASS FP8 GEMMs and the quantisers take on SM90, beside torch._scaled_mm and bf16 cuBLAS.

Every GEMM is checked before it is timed; a wrong one prints WRONG and no time, and the exit code is 1. The bits of the
quantisers are what tests/gpu checks. A measurement is one replay of a CUDA graph that holds calls on rotating copies of
the weights (more than three L2 caches), so weights come from memory; the methods take turns, and the median is
reported.

    python -m bench.kernels_sm90 --json out.json [--commit HASH]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.shared import commandline
from bench.shared.graphs import capture, microseconds
from fp4dispatch import formats, jit
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.problem.arch import Arch
from fp4dispatch.trust.tilecheck import worst_tile

SM90 = Arch(9, 0)
NK = ((6144, 4096), (28672, 4096), (4096, 14336))
M = (1, 16, 64, 128, 256, 1024, 4096)
COLD_BYTES = 200e6
ROUNDS = 15
TILE_ERROR = 6e-3  # bf16 rounding alone gives 1.7e-3


class Weights:
    """Rotating copies of one weight in the formats of the methods."""

    def __init__(self, n: int, k: int) -> None:
        w = torch.randn(n, k, device="cuda") * 0.05
        self.row = formats.fp8_quantize(w, "row")
        self.block = formats.fp8_quantize(w, "block128")
        copies = max(2, math.ceil(COLD_BYTES / (n * k)))
        self.fp8 = [self.row.data.clone() for _ in range(copies)]
        self.fp8_block = [self.block.data.clone() for _ in range(copies)]
        self.bf16 = [w.bfloat16() for _ in range(copies)]
        self.n, self.k, self.copies = n, k, copies


def gemm(variant: str, pdl: bool) -> Callable[[Weights, Tensor], tuple[Callable[[int], Any], Tensor, Tensor]]:
    """Return a maker of (call with a copy's index, its output, the exact result) for one build."""
    module = jit.load("fp8_gemm_sm90", variant, SM90).module
    block = variant.startswith("block")

    def make(weights: Weights, x: Tensor) -> tuple[Callable[[int], Any], Tensor, Tensor]:
        m = x.shape[0]
        copies, b_scale = (weights.fp8_block, weights.block.scale) if block else (weights.fp8, weights.row.scale)
        a, a_scale = formats.fp8_quantize(x, "1x128" if block else "row")
        exact = formats.fp8_dequantize(a, a_scale, "1x128" if block else "row") @ (
            formats.fp8_dequantize(copies[0], b_scale, "block128" if block else "row").t()
        )
        if block:
            columns = torch.zeros(a_scale.shape[1], formats.round_up(m, 4), device="cuda")
            columns[:, :m] = a_scale.t()
            a_scale = columns.t()[:m]
        d = torch.full((m, weights.n), torch.nan, device="cuda", dtype=torch.bfloat16)
        workspace = torch.empty(module.workspace_size(m, weights.n, weights.k), device="cuda", dtype=torch.uint8)
        return lambda i: module.fp8_gemm(a, copies[i], a_scale, b_scale, None, d, workspace, pdl), d, exact

    return make


def scaled_mm(rowwise: bool) -> Callable[[Weights, Tensor], tuple[Callable[[int], Any], Tensor, Tensor]]:
    """As :func:`gemm`, for torch's kernel."""

    def make(weights: Weights, x: Tensor) -> tuple[Callable[[int], Any], Tensor, Tensor]:
        a, a_scale = formats.fp8_quantize(x, "row" if rowwise else "tensor")
        b_scale = weights.row.scale if rowwise else weights.row.scale.amax()
        exact = (a.float() * a_scale.view(-1, 1)) @ (weights.fp8[0].float() * b_scale.view(-1, 1)).t()
        scale_a, scale_b = (a_scale.view(-1, 1), b_scale.view(1, -1)) if rowwise else (a_scale, b_scale)
        d = torch.full((x.shape[0], weights.n), torch.nan, device="cuda", dtype=torch.bfloat16)

        def call(i: int) -> None:
            torch._scaled_mm(a, weights.fp8[i].t(), scale_a=scale_a, scale_b=scale_b, out_dtype=d.dtype, out=d)

        return call, d, exact

    return make


def bf16_mm(weights: Weights, x: Tensor) -> tuple[Callable[[int], Any], Tensor, Tensor]:
    """As what :func:`gemm` returns, for cuBLAS in bf16."""
    a = x.bfloat16()
    d = torch.full((x.shape[0], weights.n), torch.nan, device="cuda", dtype=torch.bfloat16)
    exact = a.float() @ weights.bf16[0].float().t()
    return lambda i: torch.mm(a, weights.bf16[i].t(), out=d), d, exact


def calls_of(copies: int) -> int:
    """Calls of a replay: a multiple of the copies, at least 8."""
    return copies * max(1, math.ceil(8 / copies))


def bench_gemms() -> list[dict[str, Any]]:
    """Check, then time every method on every problem."""
    methods: dict[str, Any] = {"bf16": bf16_mm, "scaled_mm tensor": scaled_mm(False), "scaled_mm row": scaled_mm(True)}
    for variant in installed().kernel("fp8_gemm_sm90").variants:
        if "fp16" not in variant:
            methods[variant] = gemm(variant, False)
            methods[f"{variant} pdl"] = gemm(variant, True)
    rows = []
    for n, k in NK:
        weights = Weights(n, k)
        for m in M:
            x = torch.randn(m, k, device="cuda")
            graphs, wrong, errors = {}, {}, {}
            for name, make in methods.items():
                call, d, exact = make(weights, x)
                call(0)
                errors[name] = worst_tile(d, exact).error
                if errors[name] > TILE_ERROR:
                    wrong[name] = errors[name]
                else:
                    graphs[name] = capture(call, weights.copies, calls_of(weights.copies))
                del exact
            us = microseconds(graphs, ROUNDS, warmup=2)
            rows.append({"n": n, "k": k, "m": m, "us": us, "wrong": wrong, "tile_error": errors})
            print(table_row(rows[-1]), flush=True)
    return rows


def table_row(row: dict[str, Any]) -> str:
    """Return one line for a problem."""
    cells = [f"{name} {us:.1f}" for name, us in row["us"].items()] + [f"{name} WRONG" for name in row["wrong"]]
    return f"N={row['n']} K={row['k']} M={row['m']}: " + ", ".join(cells)


def bench_quantizers() -> list[dict[str, Any]]:
    """Time the quantisers; their bits are what tests/gpu checks."""
    fp8, nvfp4 = (jit.load(name, "any", SM90).module for name in ("fp8_quantize", "nvfp4_quantize"))
    rows = []
    for k in (4096, 14336):
        for m in (1, 16, 256, 4096):
            copies = max(2, min(64, math.ceil(COLD_BYTES / (m * k * 2))))
            xs = [torch.randn(m, k, device="cuda").bfloat16() for _ in range(copies)]
            q = torch.empty(m, k, device="cuda", dtype=torch.float8_e4m3fn)
            row, one = torch.empty(m, device="cuda"), torch.ones(1, device="cuda")
            block = torch.empty(k // 128, formats.round_up(m, 4), device="cuda").t()[:m]
            packed = torch.empty(m, k // 2, device="cuda", dtype=torch.uint8)
            sf = torch.empty(formats.round_up(m, 128) * k // 16, device="cuda", dtype=torch.uint8)
            calls = {
                "fp8 row": lambda i, xs=xs, q=q, row=row: fp8.fp8_quantize_row(xs[i], q, row, False),
                "fp8 tensor": lambda i, xs=xs, q=q, one=one: fp8.fp8_quantize_tensor(xs[i], q, one, False),
                "fp8 1x128": lambda i, xs=xs, q=q, block=block: fp8.fp8_quantize_1x128(xs[i], q, block, False),
                "nvfp4": lambda i, xs=xs, one=one, p=packed, sf=sf: nvfp4.nvfp4_quantize(xs[i], one, p, sf, False),
            }
            recorded = {name: capture(call, copies, calls_of(copies)) for name, call in calls.items()}
            us = microseconds(recorded, ROUNDS, warmup=2)
            rows.append({"m": m, "k": k, "us": us})
            print(f"quantise M={m} K={k}: " + ", ".join(f"{name} {t:.1f}" for name, t in us.items()), flush=True)
    return rows


METHOD = f"CUDA graph replay, cold weights (> {COLD_BYTES / 1e6:.0f} MB rotated), median of {ROUNDS}, us"


def main(words: Sequence[str] | None = None) -> int:
    """Run everything and write the JSON file; return 1 if a method was wrong."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True)
    arguments = commandline.parse(parser, words)
    torch.manual_seed(0)
    facts = machine.facts(machine.card("cuda"), arguments.commit)
    result: dict[str, Any] = {"method": METHOD, "gemm": bench_gemms(), "quantise": bench_quantizers()}
    records.write(arguments.json, "sm90 kernels", facts, result)
    return 1 if any(row["wrong"] for row in result["gemm"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
