"""The W4P kernels against an fp64 product of the exact dequantised weight, tile by tile."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fp4dispatch import formats, jit
from fp4dispatch.arch import Arch
from fp4dispatch.backends.w4_layout import pack_w4p
from tests.gpu import tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU from SM80 on"
    ),
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RAGGED_M = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 70)
# Tails of N (multiples of 8) and K (multiples of 16) of chunks, stages and row blocks; two real layers.
NK = ((8, 16), (72, 80), (136, 48), (264, 144), (1032, 2064), (1024, 4096), (4096, 1040))
# Tokens, row blocks, groups and units of what is built; 1 unit is wgmma.
TILES = (
    *((8, *tile) for tile in ((1, 4, 2), (2, 2, 4), (2, 4, 4))),
    *((16, *tile) for tile in ((1, 4, 2), (2, 2, 4), (2, 4, 4), (1, 2, 1))),
    *((32, *tile) for tile in ((1, 4, 2), (2, 2, 4))),
)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


@functools.cache
def small(variant: str) -> Any:
    return jit.load("w4a16_small", variant, Arch(*torch.cuda.get_device_capability()))


def clusters() -> tuple[int, ...]:
    return (1, 2, 4, 8) if torch.cuda.get_device_capability() >= (9, 0) else (1,)


class Problem:
    """Operands with every scale there is, NaN beside the rows of x, and a poisoned output between guard rows."""

    def __init__(self, variant: str, m: int, n: int, k: int, *, bias: bool = False, vector: bool = False) -> None:
        draw = torch.Generator("cuda").manual_seed(m)
        self.module, self.dtype, self.m, self.n, self.k = small(variant).module, DTYPES[variant], m, n, k
        codes = torch.randint(256, (n, k // 2), generator=draw, device="cuda", dtype=torch.uint8)
        scale = torch.randint(127, (n, k // 16), generator=draw, device="cuda").to(torch.uint8)
        scale = scale.view(torch.float8_e4m3fn)
        self.w = pack_w4p(codes, scale)
        table = torch.tensor(E2M1, device="cuda", dtype=torch.float64)
        self.dense = table[formats.unpack_e2m1(codes).long()] * scale.double().repeat_interleave(16, 1)
        wide = torch.full((m, k + 24), torch.nan, device="cuda", dtype=self.dtype)
        self.x = wide[:, 8 : 8 + k]
        self.x.copy_(torch.randn(m, k, generator=draw, device="cuda"))
        # Sums stay below fp16's largest number.
        self.alpha = (torch.rand(n if vector else 1, generator=draw, device="cuda") + 0.5) * 2.0**-9
        self.bias = torch.randn(n, generator=draw, device="cuda").to(self.dtype) if bias else None
        guarded = torch.full((m + 2, n), torch.nan, device="cuda", dtype=self.dtype)
        self.guard, self.out = guarded[:: m + 1], guarded[1 : m + 1]

    def run(self, shape: tuple[int, ...] | None = None, pdl: bool = False, **replaced: Any) -> torch.Tensor:
        arguments = {name: getattr(self, name) for name in ("x", "w", "alpha", "bias", "out")} | replaced
        if shape is None:
            self.module.w4a16_small(*arguments.values(), pdl)
        else:
            self.module.w4a16_small_shaped(*arguments.values(), list(shape), pdl)
        return self.out

    def check(self) -> None:
        weight = self.dense * self.alpha.double().view(-1, 1)
        exact = self.x.double() @ weight.t() + (0 if self.bias is None else self.bias.double())
        magnitude = self.x.double().abs() @ weight.t().abs()
        unit = torch.finfo(self.dtype).eps
        error = (self.out.double() - exact).abs()
        # One rounding to the output type, fp32 sums, and below the normal numbers a unit of fp16's subnormals.
        bad, of = tiles.wrong_tiles(~(error <= unit * exact.abs() + 2.0**-17 * magnitude + 2.0**-24))
        assert bad == 0, f"M={self.m} N={self.n} K={self.k}: {bad} of {of} tiles wrong"
        assert self.guard.isnan().all(), f"M={self.m} N={self.n} K={self.k}: wrote outside the output"


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("nk", NK, ids=str)
def test_every_tile_is_right_for_every_m(variant: str, nk: tuple[int, int]) -> None:
    for m in RAGGED_M:
        problem = Problem(variant, m, *nk, bias=m % 2 == 1, vector=m % 3 == 1)
        problem.run()
        problem.check()


@pytest.mark.parametrize("variant", DTYPES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_launch_shape_is_right(variant: str, tile: tuple[int, ...]) -> None:
    wgmma = tile[3] == 1
    if wgmma and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is Hopper's")
    for nk in ((264, 144), (136, 2064)):
        problem = Problem(variant, 33, *nk, bias=True, vector=True)
        for cluster in clusters():
            for stages, trigger in ((2 if wgmma else 1, 0), (2, 1), (3, 100)):
                problem.out.fill_(torch.nan)
                problem.run((*tile, cluster, stages, trigger))
                problem.check()


@pytest.mark.parametrize("variant", DTYPES)
def test_repeats_bit_for_bit(variant: str) -> None:
    for m, n, k in ((1, 4096, 4096), (16, 1032, 2064), (32, 4096, 1040)):
        problem = Problem(variant, m, n, k, bias=True)
        first = problem.run().clone()
        for _ in range(20):
            problem.out.fill_(torch.nan)
            assert torch.equal(tiles.bits(problem.run(pdl=small(variant).pdl_allowed)), tiles.bits(first))


def test_a_token_has_the_same_bits_whoever_shares_its_launch() -> None:
    problem = Problem("bf16", 8, 1032, 2064)
    together = problem.run().clone()
    for token in range(8):
        alone = torch.empty(1, 1032, device="cuda", dtype=torch.bfloat16)
        problem.run(x=problem.x[token : token + 1], out=alone)
        assert torch.equal(tiles.bits(alone[0]), tiles.bits(together[token]))


def test_not_finite_activations_stay_with_their_token() -> None:
    problem = Problem("bf16", 5, 136, 208)
    problem.x[2, 207], problem.x[4, 0] = torch.inf, torch.nan
    problem.run()
    assert problem.out[4].isnan().all()
    assert not problem.out[2].isfinite().any()
    assert problem.out[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("m", [1, 16, 32])
def test_a_chain_under_pdl_has_the_bits_of_one_without(m: int) -> None:
    """Each layer reads what the one before wrote, while its weights were already on their way."""
    if not small("bf16").pdl_allowed:
        pytest.skip("this GPU has no PDL")
    layers = [Problem("bf16", 1, 2048, 2048) for _ in range(3)]
    alpha = 2048**0.5 / layers[0].dense.norm().float().view(1)
    buffers = [torch.zeros(m, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    start = torch.randn(m, 2048, device="cuda").bfloat16()

    def run(pdl: bool) -> None:
        for i in range(12):
            layers[i % 3].run(pdl=pdl, x=buffers[i % 2], alpha=alpha, out=buffers[(i + 1) % 2])

    buffers[0].copy_(start)
    run(pdl=False)
    expected = buffers[0].clone()
    assert expected.isfinite().all()
    assert expected.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(pdl=True)
    for _ in range(50):
        buffers[0].copy_(start)
        buffers[1].fill_(torch.nan)
        graph.replay()
        assert torch.equal(tiles.bits(buffers[0]), tiles.bits(expected))


def test_no_tokens_is_no_launch() -> None:
    problem = Problem("bf16", 0, 136, 144)
    problem.run()
    torch.cuda.synchronize()
    assert problem.guard.isnan().all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda p: p.x.half(), "x: dtype is float16, needed bfloat16"),
        ("x", lambda p: p.x[:, :128], r"w: size of dimension 1 is 4, needed 2 \(ceil\(K/64\)\)"),
        ("x", lambda p: p.x.cpu(), "on a CUDA device|w: is not on"),
        ("w", lambda p: p.w[:2], "w: size of dimension 0"),
        ("w", lambda p: p.w.view(torch.int8), "w: dtype is int8"),
        ("alpha", lambda p: p.alpha.expand(3).contiguous(), "alpha: has 3 elements, needed 1 or 136"),
        ("bias", lambda p: torch.zeros(136, device="cuda"), "bias: dtype is float32"),
        ("out", lambda p: p.out[:-1], "out: size of dimension 0 is 4, needed 5"),
        ("out", lambda p: p.out.t().contiguous().t(), "out: not contiguous"),
    ],
)
def test_wrong_arguments_are_refused(name: str, change: Any, message: str) -> None:
    problem = Problem("bf16", 5, 136, 208)
    with pytest.raises((ValueError, TypeError), match=message):
        problem.run(**{name: change(problem)})
    torch.cuda.synchronize()
    assert problem.out.isnan().all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((8, 1, 4, 2, 1, 2), "shape: has 6 numbers, needed 7"),
        ((8, 3, 4, 2, 1, 2, 0), "no kernel for 8 tokens, 3 row blocks"),
        ((8, 1, 4, 2, 3, 2, 0), "cluster is 3"),
        ((8, 1, 4, 2, 1, 0, 0), "0 stages, needed 1 to 7"),
        ((8, 2, 2, 4, 1, 15, 0), "bytes of shared memory"),
        ((8, 1, 4, 2, 1, 2, -1), "trigger is -1"),
    ],
)
def test_wrong_launch_shapes_are_refused(shape: tuple[int, ...], message: str) -> None:
    problem = Problem("bf16", 5, 136, 208)
    with pytest.raises(ValueError, match=message):
        problem.run(shape)
    assert problem.out.isnan().all()


def test_the_check_sees_one_wrong_element() -> None:
    problem = Problem("bf16", 33, 264, 144)
    problem.run()
    problem.out[32, 263] += problem.out.abs().max()
    with pytest.raises(AssertionError, match="1 of 3 tiles wrong"):
        problem.check()
