"""Problems for the kernels that multiply activations by FP8 weights in rows, and what they must keep.

Activations are packed e4m3, but for :class:`AsTheyAre`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from fp4dispatch import formats, jit
from tests import many_tokens
from tests.gpu import w4_packed
from tests.gpu.sm90 import SM90
from tests.gpu.tiles import bits, check_replays
from tests.gpu.w4_packed import empty_packed, packer, quantised

E4M3 = torch.float8_e4m3fn
BLOCK = 128
TILES_16_BIT = tuple(range(64, 257, 16))
"""Tokens, of builds by 16-bit activations."""

# multicast, split, raster, sharing: alone, in pairs and fours of either kind, and each with parts of K
LAUNCHES = (
    *(None, (1, 1, 1, 1), (2, 1, 2, 1), (4, 1, 1, 1), (1, 1, 1, 2), (2, 1, 2, 2), (4, 1, 1, 2)),
    *((1, 2, 1, 1), (1, 3, 2, 1), (1, 4, 1, 1), (1, 8, 1, 1), (2, 2, 1, 1), (2, 3, 1, 1), (2, 4, 1, 1), (4, 2, 1, 1)),
    *((1, 2, 1, 2), (1, 3, 1, 2), (1, 4, 1, 2), (2, 2, 1, 2)),
)
# Tails of tokens (of blocks of 8, of tiles), of rows (of blocks of 64, of tiles) and of K (of 16, of a stage).
SHAPES = (
    *((1, 8, 16), (9, 72, 128), (65, 72, 48), (77, 136, 208), (100, 64, 144), (127, 264, 1040), (128, 128, 128)),
    *((129, 520, 2064), (200, 392, 528), (255, 136, 272), (256, 256, 256), (257, 200, 1040), (300, 648, 2064)),
)


@functools.cache
def kernel(variant: str = "bf16") -> Any:
    """The one for few tokens."""
    return jit.load("w8a8_small", variant, SM90).module


@functools.cache
def gemm(variant: str = "bf16", tile: int = 128) -> Any:
    """The one for many, with tiles of so many tokens."""
    build, sms = f"{variant}_{tile}", torch.cuda.get_device_properties(0).multi_processor_count
    return many_tokens.Gemm(jit.load("w8_gemm_sm90", build, SM90).module, "w8_gemm_sm90", build, sms)


def activations(x: Tensor, static: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(packed, scale, what they stand for in float64); ``static``: one scale for all tokens."""
    return quantised(x, static, packer().w8_quantize_row, packer().w8_quantize_tensor)


def block_scales(m: int, k: int) -> Tensor:
    """Poisoned scales for 128 k of a token each."""
    return torch.full((-(-k // BLOCK), -(-m // 8) * 8), torch.nan, device="cuda")


def block_activations(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``activations``, scaled in blocks."""
    packed, scale = empty_packed(*x.shape), block_scales(*x.shape)
    packer().w8_quantize_block(x, packed, scale, False)
    q = formats.fp8_quantize(x, "1x128")
    return packed, scale, q.data.double() * q.scale.double().repeat_interleave(BLOCK, 1)[:, : x.shape[1]]


@functools.cache
def weight(n: int, k: int, seed: int = 0) -> Tensor:
    """Every code but NaN, in no order, on the GPU."""
    draw = torch.Generator().manual_seed(n * k + seed)
    codes = torch.randint(256, (n, k), generator=draw, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x01
    return codes.cuda().view(E4M3)


class Problem(w4_packed.Problem):
    """As that of W4P weights, with a weight in rows; ``missing``: so many of its last rows are not there."""

    build: ClassVar[str] = ""
    """What the names of builds for it begin with."""
    fp8 = True

    def __init__(
        self,
        dtype: torch.dtype,
        mnk: tuple[int, int, int],
        *,
        static: float | None = None,
        alpha: float = 2.0**-9,
        missing: int = 0,
    ) -> None:
        m, n, k = self.mnk = mnk
        self.dtype = dtype
        draw = torch.Generator("cuda").manual_seed(m)
        x = torch.randn(m, k, generator=draw, device="cuda")
        self.x, self.x_scale, self.exact_x = self.quantise(x, static)
        self.w = weight(n, k)
        self.dense = self.w.double()
        if missing:
            self.dense[n - missing :] = 0
            after = self.w.view(torch.uint8).clone()
            after[n - missing :] = 0x7F  # NaN, in memory after the shorter weight
            self.w = after.view(E4M3)[: n - missing]
        self.complete(draw, alpha)

    def quantise(self, x: Tensor, static: float | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return what the kernel reads of tokens, and their values in float64."""
        return activations(x.to(self.dtype), static)


class AsTheyAre(Problem):
    """With 16-bit activations, which are not quantised."""

    build = "a16_"
    fp8 = False

    def quantise(self, x: Tensor, static: float | None) -> tuple[Tensor, Tensor | None, Tensor]:
        assert static is None
        return x.to(self.dtype), None, x.to(self.dtype).double()


class Blocks(Problem):
    """With block scales, each up to 64 times its neighbours: one in the wrong place shows."""

    build = "block_"

    def quantise(self, x: Tensor, static: float | None) -> tuple[Tensor, Tensor | None, Tensor]:
        m, k = x.shape
        factors = torch.randint(-3, 4, (m, -(-k // BLOCK)), generator=torch.Generator().manual_seed(k))
        assert static is None
        return block_activations((x * (2.0**factors).cuda().repeat_interleave(BLOCK, 1)[:, :k]).to(self.dtype))

    def complete(self, draw: torch.Generator, alpha: float) -> None:
        super().complete(draw, alpha)
        _, n, k = self.mnk
        sizes = -(-n // BLOCK), -(-k // BLOCK)
        factors = torch.randint(-3, 4, sizes, generator=torch.Generator().manual_seed(n))
        # Products of the two stay below fp16's largest number.
        self.alpha = (torch.rand(sizes, generator=draw, device="cuda") + 0.5) * (2.0 ** (factors - 4)).cuda() * alpha

    def weights(self) -> Tensor:
        _, n, k = self.mnk
        scales = self.alpha.double().repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
        return self.dense * scales


def check_pdl_chain(
    call: Any, m: int, static: float | None = None, blocks: bool = False, quantised: bool = True
) -> None:
    """12 square layers, each reads what the one before wrote, ``quantised``: as FP8: a graph with PDL against none."""
    size = 2048
    weights = [weight(size, size, seed) for seed in range(3)]
    alpha = size**0.5 / weights[0].double().norm().float().view(1)
    alpha = alpha.expand(size // BLOCK, size // BLOCK).contiguous() if blocks else alpha
    buffers = [torch.zeros(m, size, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    packed = [empty_packed(m, size) for _ in buffers]
    scales = [torch.full((m if static is None else 1,), static or torch.nan, device="cuda") for _ in buffers]
    scales = [block_scales(m, size) for _ in buffers] if blocks else scales
    start = torch.randn(m, size, device="cuda").bfloat16()
    dynamic = packer().w8_quantize_block if blocks else packer().w8_quantize_row
    quantize = dynamic if static is None else packer().w8_quantize_tensor

    def layers(pdl: bool) -> None:
        for i in range(12):
            x, q, scale = buffers[i % 2], packed[i % 2], scales[i % 2]
            if quantised:
                quantize(x, q, scale, pdl)
            given = (q, scale) if quantised else (x, None)
            call(*given, weights[i % 3], alpha, None, buffers[(i + 1) % 2], pdl)

    check_replays(layers, buffers, start, 30)


def check_capture(call: Any, m: int, blocks: bool = False) -> None:
    """Quantise and multiply in a graph; its replay writes what an eager call wrote."""
    x = torch.randn(m, 512, device="cuda").bfloat16()
    packed, scale, _ = block_activations(x) if blocks else activations(x)
    w, alpha = weight(256, 512), torch.full((2, 4) if blocks else (1,), 2.0**-9, device="cuda")
    quantize = packer().w8_quantize_block if blocks else packer().w8_quantize_row
    out = torch.full((m, 256), torch.nan, device="cuda", dtype=torch.bfloat16)
    call(packed, scale, w, alpha, None, out, True)
    expected = out.clone()
    assert expected.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quantize(x, packed, scale, True)
        call(packed, scale, w, alpha, None, out, True)
    packed.fill_(0xFF)
    scale.fill_(torch.nan)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(bits(out), bits(expected))


def check_every_finite_code(call: Any, dtype: torch.dtype, m: int, quantised: bool = True) -> None:
    """Subnormals and -0 too: one weight a product, so that nothing is rounded, and k that meets no other."""
    codes = (torch.arange(256).view(256, 1) + 7 * torch.arange(272)).remainder(256).to(torch.uint8).cuda()
    codes[codes & 0x7F == 0x7F] = 0x80
    w, one = codes.view(E4M3), torch.ones(1, device="cuda")
    for first in range(0, 272, m):
        x = torch.zeros(m, 272, device="cuda", dtype=dtype)
        x[torch.arange(m), torch.arange(first, first + m) % 272] = 1
        packed, _, exact = activations(x, 1.0)
        assert torch.equal(exact, x.double())
        out = torch.full((m, 256), torch.nan, device="cuda", dtype=x.dtype)
        call(*((packed, one) if quantised else (x, None)), w, one, None, out, False)
        assert torch.equal(out.double(), exact @ w.double().t())


def check_nan_among_the_weights(call: Any, m: int, kind: type[Problem] = Problem) -> None:
    """It makes its column NaN and no other."""
    problem = kind(torch.bfloat16, (m, 136, 208))
    problem.w = problem.w.clone()
    problem.w.view(torch.uint8)[[3, 135], [7, 207]] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8, device="cuda")
    problem.run(call)
    assert problem.out.isnan().all(0).nonzero().flatten().tolist() == [3, 135]
    assert int(problem.out.isnan().sum()) == 2 * m


WRONG_OPERANDS: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
    ("x", lambda p: p.x.view(torch.int8), "x: dtype is int8, needed uint8"),
    ("x", lambda p: p.x[:1], r"x: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
    ("x", lambda p: p.x[:, :2].contiguous(), r"x: size of dimension 1 is 2, needed 3 \(ceil\(M/8\)\)"),
    ("x", lambda p: p.x.transpose(0, 1).contiguous().transpose(0, 1), "x: not contiguous"),
    ("x", lambda p: p.x.cpu(), "x: is not on a CUDA device"),
    ("x_scale", lambda p: p.x_scale[:20], r"x_scale: has 20 elements, needed 1 or 21 \(M\)"),
    ("x_scale", lambda p: p.x_scale.half(), "x_scale: dtype is float16, needed float32"),
    ("x_scale", lambda p: p.x_scale.cpu(), "x_scale: is not on a CUDA device"),
    ("w", lambda p: p.w[:128], r"w: size of dimension 0 is 128, needed 136 \(N\), or up to 7 less"),
    ("w", lambda p: p.w.view(torch.uint8), "w: dtype is uint8, needed float8_e4m3fn"),
    ("w", lambda p: p.w[:, :200].contiguous(), "K is 200, needed a multiple of 16"),
    ("w", lambda p: p.w[:, :128], "w: not contiguous|x: size of dimension 0 is 2, needed 1"),
    ("w", lambda p: p.w.cpu(), "w: is not on a CUDA device"),
    ("alpha", lambda p: torch.ones(3, device="cuda"), "alpha: has 3 elements, needed 1 or 136"),
    ("bias", lambda p: torch.zeros(136, device="cuda"), "bias: dtype is float32, needed bfloat16"),
    ("bias", lambda p: torch.zeros(136, dtype=torch.bfloat16), "bias: is not on a CUDA device"),
    ("out", lambda p: p.out.view(torch.float16), "out: dtype is float16, needed bfloat16"),
    ("out", lambda p: p.out[:, :128], "out: not contiguous"),
    ("out", lambda p: p.out[:16], r"x: size of dimension 1 is 3, needed 2 \(ceil\(M/8\)\)"),
)
"""Operand, what takes its place and the refusal, for 21 tokens by [136, 208]."""
