"""Problems for the kernels that multiply activations by W4P weights, with the check of their results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4dispatch import formats, jit
from fp4dispatch.backends.own.tensors.folding import FOLD, fold_e4m3
from fp4dispatch.backends.own.tensors.w4_layout import pack_w4p
from tests.gpu.sm90 import SM90
from tests.gpu.tiles import bits, check_replays, norm_errors, norm_limits, wrong_tiles

MANY_TO_PACK = ((300, 272), (270, 6160), (140, 14_336), (70, 28_672))
"""Tokens and k whose packer has 1 to 8 blocks a token."""
TILE_ERROR, FP8_TILE_ERROR = 2.5e-3, 4e-3
"""Of the norm of a tile: rounding to bf16 gives 1.7e-3, and FP8 sums are truncated. For the few elements that an edge
leaves of a tile, see ``norm_limits``."""
ONE_SIGN_ERROR = 5e-3
"""Most that truncation may take off FP8 sums of one sign."""


@functools.cache
def packer() -> Any:
    return jit.load("w4_activations", "any", SM90).module


@functools.cache
def weight(n: int, k: int, seed: int = 0, codes_of_scales: tuple[int, int] = (0, 127)) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales (subnormal ones and zero too) and packed, on the GPU."""
    draw = torch.Generator().manual_seed(n * k + seed)
    codes = torch.randint(256, (n, k // 2), generator=draw, dtype=torch.uint8).cuda()
    scale = torch.randint(*codes_of_scales, (n, k // 16), generator=draw).to(torch.uint8).cuda()
    scale = scale.view(torch.float8_e4m3fn)
    return codes, scale, pack_w4p(codes, scale)


def dense(fp8: bool, codes: Tensor, scale: Tensor) -> Tensor:
    """Return what a weight stands for, in fp64."""
    if fp8:
        return fold_e4m3(codes, scale).double() * FOLD
    return formats.decode_e2m1(formats.unpack_e2m1(codes)).double() * scale.double().repeat_interleave(16, 1)


def empty_packed(m: int, k: int) -> Tensor:
    """Poisoned bytes for a packed activation."""
    return torch.full((-(-k // 128), -(-m // 8), 1024), 0xFF, device="cuda", dtype=torch.uint8)


def activations(fp8: bool, x: Tensor, static: float | None = None) -> tuple[Tensor, Tensor | None, Tensor]:
    """(packed e4m3 with its scale, or x itself and None; what it stands for in float64); ``static``: one scale."""
    if not fp8:
        return x, None, x.double()
    return quantised(x, static, packer().w4_quantize_row, packer().w4_quantize_tensor)


def placed(x: Tensor, stride: int, *, first: tuple[int, int] = (0, 0), rows_after: int = 300) -> Tensor:
    """``x`` again, its rows ``stride`` apart and from a row and column on, among NaN."""
    (row, column), (m, k) = first, x.shape
    around = torch.full((row + m + rows_after, stride), torch.nan, device="cuda", dtype=x.dtype)
    return around[row : row + m, column : column + k].copy_(x)


def quantised(x: Tensor, static: float | None, row: Any, tensor: Any) -> tuple[Tensor, Tensor, Tensor]:
    """As ``activations`` in e4m3; ``row`` and ``tensor``: the kernels that quantise, ``static``: one scale for all."""
    m, k = x.shape
    packed = empty_packed(m, k)
    if static is not None:
        one = torch.full((1,), static, device="cuda")
        tensor(x, packed, one, False)
        return packed, one, formats.fp8_quantize(x, "tensor", one[0]).data.double() * one.double()
    scale = torch.full((m,), torch.nan, device="cuda")
    row(x, packed, scale, False)
    q = formats.fp8_quantize(x, "row")
    return packed, scale, q.data.double() * q.scale.double().view(-1, 1)


class Problem:
    """Operands, and an output full of NaN between guards. Bias and a vector of alphas come and go with M."""

    def __init__(
        self,
        fp8: bool,
        dtype: torch.dtype,
        mnk: tuple[int, int, int],
        *,
        static: float | None = None,
        alpha: float = 2.0**-9,
        scales: tuple[int, int] = (0, 127),
    ) -> None:
        m, n, k = self.mnk = mnk
        self.fp8, self.dtype = fp8, dtype
        draw = torch.Generator("cuda").manual_seed(m)
        x = torch.randn(m, k, generator=draw, device="cuda").to(dtype)
        self.x, self.x_scale, self.exact_x = activations(fp8, x, static)
        codes, scale, self.w = weight(n, k, 0, scales)
        self.dense = dense(fp8, codes, scale)
        self.complete(draw, alpha)

    def complete(self, draw: torch.Generator, alpha: float) -> None:
        """Add what is the same for every kind of weight."""
        m, n, _ = self.mnk
        self.alpha = (torch.rand(n if m % 2 else 1, generator=draw, device="cuda") + 0.5) * alpha
        self.bias = torch.randn(n, generator=draw, device="cuda").to(self.dtype) if m % 3 else None
        guarded = torch.full((m + 2, n), torch.nan, device="cuda", dtype=self.dtype)
        self.guard, self.out = guarded[:: m + 1], guarded[1:-1]

    def weights(self) -> Tensor:
        """Return what the weight stands for with its scales, in fp64."""
        return self.dense * self.alpha.double().view(-1, 1)

    def operands(self) -> dict[str, Tensor | None]:
        """Arguments of w4_gemm and w4a8_small by name, in their order."""
        return {name: getattr(self, name) for name in ("x", "x_scale", "w", "alpha", "bias", "out")}

    def run(self, call: Any, *more: Any, times: int = 2) -> None:
        """Launch without and with PDL; the bits must be the same. ``more``: what comes before the PDL flag."""
        first = None
        for turn in range(times):
            self.out.fill_(torch.nan)
            call(*self.operands().values(), *more, turn > 0)
            first = self.out.clone() if first is None else first
            assert torch.equal(bits(self.out), bits(first))

    def exact(self) -> Tensor:
        """Return the fp64 product of what the operands stand for, with its bias."""
        return self.exact_x @ self.weights().t() + (0 if self.bias is None else self.bias.double())

    def check_norms(self, what: object = "") -> None:
        """Compare the norms of tiles: of many elements that are all a little wrong, none is beyond ``check``."""
        m, n, k = self.mnk
        exact = self.exact()
        errors = norm_errors(self.out, exact)
        excess = errors / norm_limits(exact, self.dtype, FP8_TILE_ERROR if self.fp8 else TILE_ERROR)
        row, column = divmod(int(excess.argmax()), excess.shape[1])
        worst = f"error {float(errors[row, column]):.1e}, {float(excess[row, column]):.2f} of its limit"
        assert float(excess[row, column]) <= 1, f"{what} M={m} N={n} K={k}: tile {row}, {column}: {worst}"

    def check(self, what: object = "") -> None:
        """Compare every element with the fp64 product; report by tiles."""
        m, n, k = self.mnk
        w, exact = self.weights(), self.exact()
        # An MMA of 32 k cuts up to 2^-13 off an FP8 sum, which stays within 4 times its root-sum-square.
        sums = (self.exact_x.square() @ w.t().square()).sqrt() * 4 * (k / 32 + 2) * 2.0**-13
        allowed = sums if self.fp8 else 2.0**-17 * (self.exact_x.abs() @ w.t().abs())
        unit = torch.finfo(self.dtype).eps
        bad, of = wrong_tiles(~((self.out.double() - exact).abs() <= unit * exact.abs() + allowed + 2.0**-24))
        assert not bad, f"{what} M={m} N={n} K={k}: {bad} of {of} tiles wrong"
        assert self.guard.isnan().all(), f"{what} M={m} N={n} K={k}: wrote outside the output"


def check_nothing_around_enters(problem: Problem, call: Any, *more: Any) -> None:
    """16-bit activations are read where they lie: rows and columns around them, and behind K, are not theirs."""
    problem.run(call, *more)
    problem.check(more)
    x, expected = problem.x, problem.out.clone()
    k = x.shape[1]
    for view in (
        placed(x, k),  # only rows follow
        placed(x, k + 8),  # a row is followed at once by others' columns
        placed(x, 2 * k + 64, first=(5, k + 16)),
        placed(x, k + 24, first=(0, 8), rows_after=0),
    ):
        problem.x = view
        problem.run(call, *more)
        assert torch.equal(bits(problem.out), bits(expected)), (problem.mnk, view.stride())
        assert problem.guard.isnan().all()


def check_pdl_chain(call: Any, fp8: bool, m: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """12 square layers, each reads what the one before wrote, in FP8 quantised: a graph with PDL against none."""
    size = 2048
    weights = [weight(size, size, seed) for seed in range(3)]
    alpha = size**0.5 / dense(fp8, *weights[0][:2]).norm().float().view(1)
    buffers = [torch.zeros(m, size, device="cuda", dtype=dtype) for _ in range(2)]
    given = [activations(fp8, buffer)[0] for buffer in buffers]
    scales = [torch.full((m,), torch.nan, device="cuda") if fp8 else None for _ in buffers]
    start = torch.randn(m, size, device="cuda").to(dtype)

    def layers(pdl: bool) -> None:
        for i in range(12):
            x, scale = given[i % 2], scales[i % 2]
            if fp8:
                packer().w4_quantize_row(buffers[i % 2], x, scale, pdl)
            call(x, scale, weights[i % 3][2], alpha, None, buffers[(i + 1) % 2], pdl)

    check_replays(layers, buffers, start, 30)


def check_sums_of_one_sign(shaped: Any, shape: Sequence[int], what: object = "") -> None:
    """An FP8 sum is cut where it grows, always towards zero; ``shape`` adds up as much of K in a row as a build can."""
    for k in (4096, 14_336, 28_672):
        codes, block_scale, _ = weight(256, k, 0, (48, 72))
        codes = codes & 0x77  # no sign
        packed, scale, x = activations(True, torch.randn(256, k, device="cuda").half().abs())
        defined = x @ dense(True, codes, block_scale).t()
        alpha = (1 / defined.abs().mean()).float().view(1)
        out = torch.empty(256, 256, device="cuda", dtype=torch.float16)
        shaped(packed, scale, pack_w4p(codes, block_scale), alpha, None, out, list(shape), False)
        lost = float(((out.double() / alpha.double() - defined) / defined).mean())
        assert abs(lost) < ONE_SIGN_ERROR, f"{what} K={k}: {lost:.1e} of the sums"


def check_scales(call: Any, dtype: torch.dtype, tokens: tuple[int, ...], what: object = "") -> None:
    """One static scale for all tokens, and block scales that are subnormal or zero."""
    for m in tokens:
        for change in ({"static": 0.013}, {"scales": (0, 8), "alpha": 2.0**4}, {"scales": (0, 1)}):
            problem = Problem(True, dtype, (m, 264, 1040), **change)
            problem.run(call)
            problem.check(f"{what} {change}")


def check_capture(call: Any, m: int) -> None:
    """Quantise and multiply in a graph; its replay writes what an eager call wrote."""
    x = torch.randn(m, 512, device="cuda").bfloat16()
    packed, scale, _ = activations(True, x)
    w, alpha = weight(256, 512)[2], torch.ones(1, device="cuda")
    out = torch.full((m, 256), torch.nan, device="cuda", dtype=torch.bfloat16)
    call(packed, scale, w, alpha, None, out, True)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packer().w4_quantize_row(x, packed, scale, True)
        call(packed, scale, w, alpha, None, out, True)
    packed.fill_(0xFF)
    out.fill_(torch.nan)
    graph.replay()
    assert expected.isfinite().all()
    assert torch.equal(bits(out), bits(expected))


def check_no_tokens(
    call: Any,
    *more: Any,
    fp8: bool = True,
    w: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Nothing is written where there is no token. ``more``: what comes before the PDL flag; ``w``: [256, 512].

    ``scales``: of no tokens, and of ``w``.
    """
    w = weight(256, 512)[2] if w is None else w
    out = torch.full((3, 256), torch.nan, device="cuda", dtype=torch.bfloat16)
    sizes, dtype = ((4, 0, 1024), torch.uint8) if fp8 else ((0, 512), out.dtype)
    x = torch.zeros(sizes, device="cuda", dtype=dtype)
    one = torch.ones(1, device="cuda")
    x_scale, alpha = (one[:0] if fp8 else None, one) if scales is None else scales
    for pdl in (False, True):
        call(x, x_scale, w, alpha, None, out[:0], *more, pdl)
    torch.cuda.synchronize()
    assert out.isnan().all()


# What the tests of w4a8_small, w8a8_small and w8_gemm check; ``activations`` are (packed, scale, values) of tokens.
Activations = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def check_a_token_alone_and_with_others(
    call: Any, w: Tensor, activations: Activations, scales: tuple[int, ...] = (1,)
) -> None:
    """Of 16 tokens: they and one alone go to the same tile. ``w``: [1032, 2064]; ``scales``: size of its own."""
    x, alpha = torch.randn(16, 2064, device="cuda").bfloat16(), torch.full(scales, 2.0**-9, device="cuda")

    def product(rows: Tensor) -> Tensor:
        packed, scale, _ = activations(rows.contiguous())
        out = torch.full((rows.shape[0], 1032), torch.nan, device="cuda", dtype=torch.bfloat16)
        call(packed, scale, w, alpha, None, out, False)
        return out

    together = product(x)
    for token in range(16):
        assert torch.equal(bits(product(x[token : token + 1])[0]), bits(together[token]))


def check_tokens_stay_alone(call: Any, w: Tensor, activations: Activations, scales: tuple[int, ...] = (1,)) -> None:
    """Packed blocks hold 8 tokens: those beyond M are whatever lies there. ``w``: [136, 400]; ``scales``: its own."""
    x, alpha = torch.randn(21, 400, device="cuda").bfloat16(), torch.ones(scales, device="cuda")
    packed, scale, _ = activations(x)
    out = torch.zeros(2, 21, 136, device="cuda", dtype=torch.bfloat16)
    call(packed, scale, w, alpha, None, out[0], False)
    packed.view(-1, 3, 8, 128)[:, 2, 5:] = 0x7F  # NaN
    call(packed, scale, w, alpha, None, out[1], False)
    assert out[0].isfinite().all()
    assert torch.equal(bits(out[0]), bits(out[1]))
    x[3, 7] = torch.nan
    packed, scale, _ = activations(x)
    call(packed, scale, w, alpha, None, out[1], False)
    assert out[1, 3].isnan().all()
    others = torch.arange(21, device="cuda") != 3
    assert torch.equal(bits(out[1, others]), bits(out[0, others]))


def check_argument_refused(
    problem: Problem,
    call: Any,
    shaped: Any,
    name: str,
    change: Callable[[Problem], Any],
    message: str,
    shape: Sequence[int] = (16, 1, 2, 1, 1, 2, 2),
) -> None:
    """By the call whose launch is planned and by the one that is given a shape."""
    given = problem.operands() | {name: change(problem)}
    for launch, more in ((call, ()), (shaped, (list(shape),))):
        with pytest.raises((ValueError, TypeError), match=message):
            launch(*given.values(), *more, False)
    torch.cuda.synchronize()
    assert problem.out.isnan().all()


def check_shape_refused(problem: Problem, shaped: Any, shape: Sequence[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shaped(*problem.operands().values(), shape, False)
    assert problem.out.isnan().all()
