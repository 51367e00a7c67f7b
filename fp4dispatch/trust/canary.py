"""Canaries, small GEMMs with known answers for the self-check: operands, exact products, and allowed errors.

Every activation is exact in the format that it is quantised to. Codes are drawn first; a value is code x scale, and
each scaled part holds the largest code. So every quantiser finds the same codes, whether it divides or multiplies by a
reciprocal, and the answer (float64) is that of the GEMM alone. Scales differ from row to row over many octaves, so that
a swap of two shows. The last elements along K are large, so that a dropped tail shows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights, QuantizedActivation
from fp4dispatch.backends.own.tensors.folding import FOLD, fold_e4m3
from fp4dispatch.problem import Activation, Op, OutDtype, Problem, Scaling, SfLayout
from fp4dispatch.trust.threads import one_thread

DTYPE: dict[OutDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
FP16_UNDERFLOW = 2.0**-25

ACCUMULATE = {"fp8": 2.0**-13, "nvfp4": 2.0**-13, "bf16": 2.0**-22}
"""What a tensor core truncates from each addend when it adds up products, relative to the largest addend.

FP8 on Hopper and Ada keeps 13 bits behind the point and truncates: DeepSeek-V3, section 3.3.2
(https://arxiv.org/abs/2412.19437), and
https://pytorch.org/blog/some-matrix-multiplication-engines-are-not-as-accurate-as-we-thought/. What Blackwell keeps for
NVFP4 is not documented; the same value is used. 16-bit inputs: f32 sums that truncate, with one bit to spare."""

_PEAK, _DENSE = 4.0, 8.0
"""A sum of K terms with random signs stays within this many times its root-sum-square (Hoeffding: 2 exp(-t^2/2)). 4 for
running sums, where only all truncations at that height would matter; 8 for rounding errors of the weights."""

_TAIL = 16
_TYPICAL = 8.0


@dataclass(frozen=True)
class Shape:
    """One canary. ``static``: a static activation scale; ``raw``: an activation that is quantised already."""

    m: int
    n: int
    k: int
    out_dtype: OutDtype = "bfloat16"
    bias: bool = False
    static: bool = False
    shards: tuple[int, ...] = ()
    raw: bool = False
    sf_layout: SfLayout = "linear"


SHAPES: tuple[Shape, ...] = (
    Shape(1, 136, 256),  # one token
    Shape(200, 264, 208),  # M and N end inside a 128x128 tile, K inside a tile of 64 or 128
    Shape(128, 128, 256, out_dtype="float32", static=True, sf_layout="128x4"),  # full tiles
    Shape(37, 208, 272, out_dtype="float16", bias=True, shards=(64, 96, 48)),  # K/16 = 17 is padded to 20
    Shape(17, 144, 784, bias=True, static=True),  # more K than a pipeline has stages; asks for split-K
    Shape(130, 160, 144, raw=True, sf_layout="128x4"),
)
"""N and K are multiples of 8 and 16, as in any model. The contract tests have odder sizes."""


@dataclass(frozen=True, eq=False)
class Input:
    """One activation and its answer, on the CPU.

    x: [M, K] in the output's dtype, or quantised. product: float64 [M, N], without bias. size: float64 [M, N], the
    root of the sum of squares of the K terms of each product. allowed: float64 [M, N], the largest legitimate error.
    """

    x: Tensor | QuantizedActivation
    product: Tensor
    size: Tensor
    allowed: Tensor


@dataclass(frozen=True, eq=False)
class Canary:
    """One canary with all its operands, on the CPU. Has two ``inputs``, so that a stale output shows."""

    problem: Problem
    weights: LinearWeights
    bias: Tensor | None
    inputs: tuple[Input, Input]

    def __str__(self) -> str:
        return f"M={self.problem.m} N={self.problem.n} K={self.problem.k}"


@functools.cache
def canaries(
    op: Op, scaling: Scaling, activation: Activation, seed: int = 0, half: OutDtype | None = None
) -> tuple[Canary, ...]:
    """Return the canaries of a kind, the same in every process.

    Parameters
    ----------
    op, scaling
        As in :class:`~fp4dispatch.problem.Problem`.
    activation
        ``nvfp4``, ``fp8`` or ``bf16``.
    seed
        For tests that need other numbers.
    half
        ``bfloat16`` or ``float16``: all 16-bit canaries have this dtype, so no kernel of the other is needed. None uses
        both.
    """
    draw = torch.Generator(device="cpu").manual_seed(seed)
    raw = {"nvfp4_gemm": "nvfp4", "fp8_gemm": "fp8"}[op] == activation
    with one_thread(), torch.inference_mode(mode=False), torch.no_grad():
        shapes = [replace(s, out_dtype=half) if half and s.out_dtype != "float32" else s for s in SHAPES]
        return tuple(_canary(op, scaling, activation, s, draw) for s in shapes if raw or not s.raw)


def _canary(op: Op, scaling: Scaling, activation: Activation, shape: Shape, draw: torch.Generator) -> Canary:
    problem = Problem(
        op,
        shape.m,
        shape.n,
        shape.k,
        activation,
        scaling,
        shape.out_dtype,
        shape.bias,
        sf_layout="128x4" if shape.raw and op == "nvfp4_gemm" else None,
        raw=shape.raw,
    )
    make = _Maker(problem, shape, draw)
    static = make.static_scale()
    drawn = [make.activation(static), make.activation(static)]
    weights, exact = make.weights(static, drawn[0][1])
    bias = None
    dtype = DTYPE[shape.out_dtype]
    if shape.bias:
        spread = exact.square().mean(1).sqrt() * drawn[0][1].square().sum(1).median().sqrt()
        bias = (torch.randn(shape.n, dtype=torch.float64, device="cpu", generator=draw) * spread).to(dtype)
    first, second = (_input(activation, dtype, x, values, exact, bias) for x, values in drawn)
    return Canary(problem, weights, bias, (first, second))


def _input(
    activation: Activation,
    dtype: torch.dtype,
    x: Tensor | QuantizedActivation,
    values: Tensor,
    weights: Tensor,
    bias: Tensor | None,
) -> Input:
    """Compute the answer, and the largest error that a correct kernel makes.

    * Accumulation: K addends, and the running sum once every 32 (the K of an FP8 MMA). Each is truncated by at most
      ``ACCUMULATE`` times the largest magnitude.
    * Weight-only: dequantised weights are rounded to bfloat16, at most twice.
    * Output: one rounding of the product and one after the bias, plus underflow in float16.
    """
    k = values.shape[1]
    product = values @ weights.t()
    total = values.abs() @ weights.abs().t()
    size = (values.square() @ weights.square().t()).sqrt()
    allowed = (k * 33 / 32 + 4) * ACCUMULATE[activation] * torch.minimum(total, _PEAK * size)
    if activation == "bf16":
        allowed += 2 * UNIT_ROUNDOFF[torch.bfloat16] * torch.minimum(total, _DENSE * size)
    result = product if bias is None else product + bias.double()
    allowed += 1.01 * UNIT_ROUNDOFF[dtype] * (product.abs() + result.abs()) + 2.0**-20 * total
    if dtype == torch.float16:
        allowed += 2 * FP16_UNDERFLOW
    return Input(x, product, size, allowed)


class _Maker:
    """Draws the operands of one canary."""

    def __init__(self, problem: Problem, shape: Shape, draw: torch.Generator) -> None:
        self.p, self.shape, self.draw = problem, shape, draw
        self.mild = shape.out_dtype == "float16"  # five bits of exponent

    # ---- drawing

    def uniform(self, *size: int) -> Tensor:
        return torch.rand(*size, device="cpu", dtype=torch.float64, generator=self.draw)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, device="cpu", dtype=torch.float64, generator=self.draw)

    def below(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, device="cpu", generator=self.draw)

    def shuffled(self, values: Tensor) -> Tensor:
        return values[torch.randperm(len(values), device="cpu", generator=self.draw)]

    def octaves(self, count: int, octaves: float) -> Tensor:
        """Return ``count`` values from 2^-octaves to 2^octaves, shuffled, no two close to each other."""
        exponents = torch.linspace(-octaves, octaves, count, device="cpu", dtype=torch.float64)
        return self.shuffled(exponents.exp2())

    def short_octaves(self, count: int, octaves: int) -> Tensor:
        """Return the same with 4-bit mantissas, so that a value times an e4m3 code is exact in 16 bits."""
        step = torch.linspace(0, 16 * octaves - 1, count, device="cpu", dtype=torch.float64).round()
        return self.shuffled((1 + step % 8 / 8) * (step.div(8, rounding_mode="floor") - octaves).exp2())

    # ---- activations: the operand, and its exact values in float64

    def static_scale(self) -> Tensor | None:
        """Return the canary's static activation scale, a power of two; None if it has none."""
        quantised = (self.p.op, self.p.activation) == ("nvfp4_gemm", "nvfp4") or self.p.scaling == "tensor"
        if not (self.shape.static and quantised) or self.p.activation == "bf16":
            return None
        return torch.tensor(2.0**-3, dtype=torch.float32, device="cpu")

    def activation(self, static: Tensor | None) -> tuple[Tensor | QuantizedActivation, Tensor]:
        if self.p.activation == "nvfp4":
            values, raw = self._nvfp4(static)
        elif self.p.activation == "fp8":
            values, raw = self._fp8(static)
        else:
            values, raw = self._16bit(), None
        if self.shape.raw and raw is not None:
            return raw, values
        x = values.to(DTYPE[self.p.out_dtype])
        assert torch.equal(x.double(), values), f"a canary's activation is not exact in {x.dtype}"
        return x, values

    def _16bit(self) -> Tensor:
        m, k = self.p.m, self.p.k
        x = self.normal(m, k) * self.octaves(m, 1 if self.mild else 12).unsqueeze(1)
        x[:, -_TAIL:] *= 4
        x = x.bfloat16()
        return x.masked_fill(x.abs() < 2.0**-12, 0).double() if self.mild else x.double()

    def _fp8(self, static: Tensor | None) -> tuple[Tensor, QuantizedActivation]:
        m, k = self.p.m, self.p.k
        block = formats.FP8_BLOCK if self.p.scaling == "block128" else k
        codes = self.normal(m, k) * 64
        codes[:, -_TAIL:] *= 4
        codes = codes.clamp(-448, 448).float().to(torch.float8_e4m3fn).double()
        if self.mild:  # the least values of e4m3 times a small scale are subnormal in float16
            codes = codes.masked_fill(codes.abs() < 0.25, 0)
        for start in range(0, k, block):
            width = min(block, k - start)
            peak = start + self.below(width, m, 1)
            codes.scatter_(1, peak, 448.0 * (1 - 2.0 * self.below(2, m, 1).double()))
        blocks = -(-k // block)
        if static is not None or (self.shape.raw and self.p.scaling == "tensor"):
            scale = torch.full((m, 1), 2.0**-3, dtype=torch.float64, device="cpu")
        elif block == k:
            scale = self.short_octaves(m, 1 if self.mild else 13).unsqueeze(1)
        else:  # powers of two: some recipes round these scales up to one
            scale = (self.below(3 if self.mild else 21, m, blocks) - 1 - (0 if self.mild else 9)).double().exp2()
        values = codes * scale.repeat_interleave(block, 1)[:, :k]
        shaped = scale if block != k else scale[0, 0] if self.p.scaling == "tensor" else scale[:, 0]
        raw = QuantizedActivation(codes.float().to(torch.float8_e4m3fn), shaped.float().contiguous())
        return values, raw

    def _nvfp4(self, static: Tensor | None) -> tuple[Tensor, QuantizedActivation]:
        m, k = self.p.m, self.p.k
        groups = k // formats.NVFP4_BLOCK
        codes = self.below(16, m, groups, formats.NVFP4_BLOCK)
        peak = self.below(formats.NVFP4_BLOCK, m, groups, 1)
        codes.scatter_(2, peak, 7 + 8 * self.below(2, m, groups, 1))  # 6.0 in every block
        exponent = -5 * self.uniform(m, groups) - (0 if self.mild else 4) * self.uniform(m, 1)
        exponent[:, -1] /= 4
        exponent.view(-1)[self.below(m * groups, 1)] = 0.0  # amax = 2688 x the global scale
        sf = (formats.E4M3_MAX * exponent.exp2()).float().to(torch.float8_e4m3fn)
        global_scale = 1.0 if self.shape.raw else 2.0**-3 if static is not None else 2.0**-6
        table = torch.tensor(formats.E2M1_VALUES, dtype=torch.float64, device="cpu")
        values = (table[codes % 8] * (1 - 2.0 * (codes // 8)) * sf.double().unsqueeze(-1) * global_scale).flatten(1)
        packed = formats.pack_e2m1(codes.flatten(1).to(torch.uint8))
        return values, QuantizedActivation(packed, formats.to_128x4(sf))

    # ---- weights, and their exact values in float64

    def weights(self, static: Tensor | None, x: Tensor) -> tuple[LinearWeights, Tensor]:
        """Draw weights; their size makes typical products about 8."""
        n, k = self.p.n, self.p.k
        typical = x.square().sum(1).median().sqrt().item()
        if self.p.scaling == "nvfp4":
            return self._nvfp4_weights(static, typical)
        codes = (self.normal(n, k) * 64).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        base = _TYPICAL / (64 * typical)
        if self.p.scaling == "tensor":
            scale = torch.tensor(base, dtype=torch.float64, device="cpu")
            grid: Tensor = scale
        elif self.p.scaling == "row":
            scale = self.octaves(n, 1 if self.mild else 12) * base
            grid = scale.float().double().unsqueeze(1)
        else:
            rows, cols = -(-n // formats.FP8_BLOCK), -(-k // formats.FP8_BLOCK)
            scale = self.octaves(rows * cols, 2).view(rows, cols) * base
            grid = scale.repeat_interleave(formats.FP8_BLOCK, 0).repeat_interleave(formats.FP8_BLOCK, 1)[:n, :k]
        weights = LinearWeights("fp8_gemm", self.p.scaling, n, k, codes, scale.float(), input_scale=static)
        return weights, codes.double() * grid.float().double()

    def _nvfp4_weights(self, static: Tensor | None, typical: float) -> tuple[LinearWeights, Tensor]:
        n, k = self.p.n, self.p.k
        data = self.below(256, n, k // 2).to(torch.uint8)
        row = self.octaves(n, 1 if self.mild else 4).unsqueeze(1)
        sf = (4 * row * (3 * self.uniform(n, k // formats.NVFP4_BLOCK) - 1.5).exp2()).float().to(torch.float8_e4m3fn)
        shards = self.shape.shards or (n,)
        factor = torch.tensor((1.0, 2.7, 0.4), dtype=torch.float64, device="cpu")[: len(shards)]
        global_scale = (factor * _TYPICAL / (14 * typical)).float()
        if self.p.activation == "fp8":  # w4a8 is defined by the folded weights, and they are multiplied exactly
            values = fold_e4m3(data, sf).double() * FOLD
        else:
            ones = torch.ones((), dtype=torch.float32, device="cpu")
            values = formats.nvfp4_dequantize(data, sf, ones).double()
        values *= formats.expand_shards(global_scale, shards).double().unsqueeze(1)
        stored = formats.to_128x4(sf) if self.shape.sf_layout == "128x4" else sf
        weights = LinearWeights(
            "nvfp4_gemm", "nvfp4", n, k, data, stored, global_scale, shards, static, self.shape.sf_layout
        )
        return weights, values


def kinds(activations: dict[Op, tuple[Activation, ...]]) -> Iterator[tuple[Op, Scaling, Activation]]:
    """Yield every kind of canary for these activation formats."""
    scalings: dict[Op, tuple[Scaling, ...]] = {"nvfp4_gemm": ("nvfp4",), "fp8_gemm": ("tensor", "row", "block128")}
    for op, formats_of in activations.items():
        for scaling in scalings[op]:
            for activation in formats_of:
                yield op, scaling, activation
