"""The SM90 FP8 GEMMs against a float64 product of the exact dequantised operands, tile by tile."""

from __future__ import annotations

import pytest
import torch

from fp4dispatch.formats import FP8_BLOCK, round_up
from tests.gpu import tiles
from tests.gpu.sm90 import OUT_DTYPES, VARIANTS, gemm_module, needs_sm90, promoted_every, variants_of

pytestmark = [pytest.mark.gpu, needs_sm90]

RAGGED_M = (1, 2, 7, 16, 17, 33, 64, 65, 127, 128, 129, 200, 1000, 4096)
# Tails of N (multiples of 8) and K (multiples of 16) of every tile, and one real layer.
NK = ((8, 16), (136, 48), (264, 144), (520, 2064), (1536, 1040), (4096, 4096))


class Problem:
    """Operands of one GEMM with a poisoned output that has a guard row before and after it."""

    def __init__(self, variant, m, n, k, *, scaling="row", bias=False, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(*shape):
            return torch.randn(shape, device="cuda", generator=generator)

        def scales(*shape):
            return torch.rand(shape, device="cuda", generator=generator) + 0.5

        self.module, self.m, self.n, self.k = gemm_module(variant), m, n, k
        self.dtype = OUT_DTYPES[variant.split("_")[1]]
        self.a, self.b = randn(m, k).to(torch.float8_e4m3fn), randn(n, k).to(torch.float8_e4m3fn)
        self.bias = randn(n).mul(k**0.5).to(self.dtype) if bias else None
        if variant.startswith("block"):
            blocks = -(-k // FP8_BLOCK)
            self.a_scale = scales(blocks, round_up(m, 4)).t()[:m]
            self.b_scale = scales(-(-n // FP8_BLOCK), blocks)
        else:
            self.a_scale, self.b_scale = (scales(m), scales(n)) if scaling == "row" else (scales(1), scales(1))
        guarded = torch.full((m + 2, n), torch.nan, device="cuda", dtype=self.dtype)
        self.guard, self.d = guarded[:: m + 1], guarded[1 : m + 1]

    def run(self, **replaced):
        arguments = {name: getattr(self, name) for name in ("a", "b", "a_scale", "b_scale", "bias", "d")} | replaced
        workspace = torch.empty(self.module.workspace_size(self.m, self.n, self.k), device="cuda", dtype=torch.uint8)
        self.module.fp8_gemm(*arguments.values(), workspace, False)
        return self.d

    def reference(self):
        """Return the exact result and the sum of magnitudes, both with scales applied."""
        a, b = self.a.double(), self.b.double()
        if self.a_scale.ndim == 2:
            a = a * self.a_scale.double().repeat_interleave(FP8_BLOCK, 1)[:, : self.k]
            b_scale = self.b_scale.double().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
            b = b * b_scale[: self.n, : self.k]
        else:
            a, b = a * self.a_scale.double().view(-1, 1), b * self.b_scale.double().view(-1, 1)
        bias = 0 if self.bias is None else self.bias.double()
        return a @ b.t() + bias, a.abs() @ b.abs().t()

    def check(self):
        bad, of = tiles.wrong_tiles(tiles.beyond_rounding(self.d, *self.reference()))
        assert bad == 0, f"M={self.m} N={self.n} K={self.k}: {bad} of {of} tiles wrong"
        assert self.guard.isnan().all(), f"M={self.m} N={self.n} K={self.k}: wrote outside the output"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("nk", NK, ids=str)
def test_every_tile_is_right_for_every_m(variant, nk):
    for m in RAGGED_M:
        problem = Problem(variant, m, *nk, bias=m % 2 == 1, seed=m)
        problem.run()
        problem.check()


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "fast" not in name])
def test_long_sums_keep_their_bits(variant):
    """All terms positive, so nothing cancels: truncation in the tensor core's accumulator would add up."""
    for m in (1, 64, 129):
        problem = Problem(variant, m, 264, 14336, seed=m)
        problem.a, problem.b = problem.a.float().abs().to(problem.a.dtype), problem.b.float().abs().to(problem.b.dtype)
        problem.run()
        exact, _ = problem.reference()
        unit = torch.finfo(problem.dtype).eps / 2
        error = ((problem.d.double() - exact) / exact).abs().max().item()
        assert error <= unit + 2.0**-10 * (promoted_every(variant) / 128) ** 2, f"M={m}: relative error {error:.2e}"


@pytest.mark.parametrize("variant", variants_of("row"))
def test_tensor_scales(variant):
    for m in (1, 17, 200):
        problem = Problem(variant, m, 264, 144, scaling="tensor", bias=True, seed=m)
        problem.run()
        problem.check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_repeats_bit_for_bit(variant):
    for m, n, k in ((1, 4096, 4096), (129, 520, 2064), (1000, 1536, 1040)):
        problem = Problem(variant, m, n, k, bias=True)
        first = problem.run().clone()
        for _ in range(20):
            problem.d.fill_(torch.nan)
            assert torch.equal(tiles.bits(problem.run()), tiles.bits(first))


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_may_be_strided(variant):
    problem = Problem(variant, 65, 136, 144)
    expected = problem.run().clone()
    wide_a = torch.zeros(65, 144 + 32, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide_a.view(torch.uint8)[:, 16:160] = problem.a.view(torch.uint8)
    wide_d = torch.full((65, 136 + 16), torch.nan, device="cuda", dtype=problem.dtype)
    problem.run(a=wide_a[:, 16:160], d=wide_d[:, 8:144])
    assert torch.equal(tiles.bits(wide_d[:, 8:144]), tiles.bits(expected))
    assert wide_d[:, :8].isnan().all()
    assert wide_d[:, 144:].isnan().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rows_is_no_launch(variant):
    problem = Problem(variant, 0, 136, 144)
    problem.run()
    torch.cuda.synchronize()
    assert problem.guard.isnan().all()


def test_runs_on_the_current_stream_and_in_a_graph():
    for variant in VARIANTS:
        problem = Problem(variant, 33, 264, 144, bias=True)
        expected = problem.run().clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            problem.run()
        problem.d.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(tiles.bits(problem.d), tiles.bits(expected)), variant


@pytest.mark.parametrize("variant", ["row_bf16_128x128", "block_bf16_128x128"])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("a", lambda p: p.a.t().contiguous().t(), "stride"),
        ("a", lambda p: p.a.view(torch.uint8), "a: dtype is uint8"),
        ("a", lambda p: p.a[:, :64], "b: size of dimension 1"),
        ("a", lambda p: p.a.cpu(), "not on a CUDA device"),
        ("b", lambda p: p.b[:-4], "N is 132, needed a multiple of 8"),
        ("d", lambda p: p.d.float(), "d: dtype is float32"),
        ("d", lambda p: p.d[:-1], "d: size of dimension 0 is 64, needed 65"),
        ("bias", lambda p: torch.zeros(3, device="cuda", dtype=p.dtype), "bias: size of dimension 0 is 3"),
        ("a_scale", lambda p: p.a_scale.double(), "a_scale: dtype is float64"),
        ("a_scale", lambda p: p.a_scale[:-1], "a_scale"),
    ],
)
def test_wrong_arguments_are_refused(variant, name, change, message):
    problem = Problem(variant, 65, 136, 144)
    with pytest.raises((ValueError, TypeError), match=message):
        problem.run(**{name: change(problem)})
    torch.cuda.synchronize()
    assert problem.d.isnan().all()


def test_row_major_block_scales_are_refused():
    problem = Problem("block_bf16_128x128", 65, 136, 272)
    with pytest.raises(ValueError, match="a_scale: strides are"):
        problem.run(a_scale=problem.a_scale.contiguous())


def test_k_that_tma_cannot_address_is_refused():
    problem = Problem("row_bf16_128x128", 65, 136, 24)
    with pytest.raises(ValueError, match="K is 24, needed a multiple of 16"):
        problem.run()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu():
    problem = Problem("row_bf16_128x128", 65, 136, 144)
    expected = problem.run().clone()
    names = ("a", "b", "a_scale", "b_scale", "d")
    moved = {name: getattr(problem, name).to("cuda:1", copy=True) for name in names}
    workspace = torch.empty(0, device="cuda:1", dtype=torch.uint8)
    problem.module.fp8_gemm(*(moved[n] for n in names[:4]), None, moved["d"], workspace, False)
    torch.cuda.synchronize(1)
    assert torch.equal(tiles.bits(moved["d"].cpu()), tiles.bits(expected.cpu()))
    assert torch.cuda.current_device() == 0


def test_tile_check_sees_one_wrong_element():
    problem = Problem("row_bf16_128x128", 200, 264, 144)
    problem.run()
    problem.d[199, 263] += problem.d.abs().max()
    with pytest.raises(AssertionError, match="1 of 6 tiles wrong"):
        problem.check()


@pytest.mark.parametrize("variant", ["row_bf16_swap_64x16", "row_bf16_128x128", "block_bf16_128x128"])
def test_memory_that_is_used_again_is_described_again(variant):
    """Descriptors are kept by what they describe: other operands at the same addresses, and the first ones again."""
    memory = {"a": torch.float8_e4m3fn, "b": torch.float8_e4m3fn, "d": torch.bfloat16}
    memory = {name: torch.empty(1 << 20, device="cuda", dtype=dtype) for name, dtype in memory.items()}
    for seed in range(3):
        for m, n, k in ((64, 512, 256), (128, 512, 256), (64, 256, 512), (4, 1024, 128), (64, 512, 256)):
            subject = Problem(variant, m, n, k, bias=True, seed=seed)
            want = subject.run()
            moved = {
                name: memory[name][: size.numel()].view(size)
                for name, size in (("a", subject.a.shape), ("b", subject.b.shape), ("d", subject.d.shape))
            }
            moved["a"].copy_(subject.a)
            moved["b"].copy_(subject.b)
            moved["d"].fill_(torch.nan)
            subject.run(**moved)
            assert torch.equal(moved["d"], want), f"{m}x{n}x{k}"
