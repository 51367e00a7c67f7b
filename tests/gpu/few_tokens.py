"""Problems for the kernels of csrc/few_tokens/kernel.h, with the check of their results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fp4dispatch import formats, jit
from fp4dispatch.backends.own.tensors.w4_layout import pack_w4p
from fp4dispatch.backends.own.tiling import few_tokens
from fp4dispatch.backends.own.tiling.few_tokens import FewTokensShape
from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog.manifest import Catalog, installed
from fp4dispatch.problem.arch import Arch
from tests.gpu import tiles

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RAGGED_M = (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 70, 96, 97, 600)
# Tiles of wgmma hold up to 128 tokens.
WGMMA_M = (*RAGGED_M, 24, 25, 63, 65, 80, 81, 112, 113, 128, 129, 130, 200, 2048)
# Tails of N (multiples of 8) and K (multiples of 16) of chunks, stages and row blocks; two real layers.
NK = ((8, 16), (72, 80), (136, 48), (264, 144), (1032, 2064), (1024, 4096), (4096, 1040))
needs_sm80 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a GPU from SM80 on"
)
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


@functools.cache
def kernel(name: str, variant: str) -> Any:
    return jit.load(name, variant, Arch(*torch.cuda.get_device_capability()))


def with_ptx80() -> Catalog:
    """The catalog with PTX of compute_80 in its builds for SM80, which a later GPU compiles and runs."""
    catalog = installed()
    record = catalog.record("80")
    both = replace(record, nvcc=(*record.nvcc, "-gencode=arch=compute_80,code=compute_80"))
    return replace(catalog, records={**catalog.records, "80": both})


@functools.cache
def ptx80(name: str) -> Any:
    """Return the bfloat16 build for SM80 of a kernel, as PTX that this GPU runs."""
    tvm_ffi = pytest.importorskip("tvm_ffi")
    catalog = with_ptx80()
    (built,) = kernels.build_all([kernels.job(catalog, name, "bf16", "80")], catalog)
    assert built.proven, built.proof
    return tvm_ffi.load_module(str(built.entry.library))


def clusters() -> tuple[int, ...]:
    return few_tokens.CLUSTERS if torch.cuda.get_device_capability() >= (9, 0) else (1,)


class Problem:
    """Operands with every weight there is, NaN beside the rows of x, and a poisoned output between guard rows."""

    name: ClassVar[str]

    def __init__(self, variant: str, m: int, n: int, k: int, *, bias: bool = False, vector: bool = False) -> None:
        draw = torch.Generator("cuda").manual_seed(m)
        self.dtype, self.m, self.n, self.k = DTYPES[variant], m, n, k
        loaded = kernel(self.name, variant)
        self.module, self.pdl = loaded.module, loaded.pdl_allowed
        self.w, self.dense = self.weight(draw)
        wide = torch.full((m, k + 24), torch.nan, device="cuda", dtype=self.dtype)
        self.x = wide[:, 8 : 8 + k]
        self.x.copy_(torch.randn(m, k, generator=draw, device="cuda"))
        # Sums stay below fp16's largest number.
        self.alpha = (torch.rand(n if vector else 1, generator=draw, device="cuda") + 0.5) * 2.0**-9
        self.bias = torch.randn(n, generator=draw, device="cuda").to(self.dtype) if bias else None
        guarded = torch.full((m + 2, n), torch.nan, device="cuda", dtype=self.dtype)
        self.guard, self.out = guarded[:: m + 1], guarded[1 : m + 1]

    def weight(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the weight as the kernel takes it, and its values in fp64."""
        raise NotImplementedError

    def run(self, shape: tuple[int, ...] | None = None, pdl: bool = False, **replaced: Any) -> Tensor:
        arguments = {name: getattr(self, name) for name in ("x", "w", "alpha", "bias", "out")} | replaced
        if shape is None:
            getattr(self.module, self.name)(*arguments.values(), pdl)
        else:
            getattr(self.module, f"{self.name}_shaped")(*arguments.values(), list(shape), pdl)
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


class Nvfp4(Problem):
    """NVFP4 weights in W4P order, every block scale."""

    name = "w4a16_small"

    def weight(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        codes = torch.randint(256, (self.n, self.k // 2), generator=draw, device="cuda", dtype=torch.uint8)
        scale = torch.randint(127, (self.n, self.k // 16), generator=draw, device="cuda").to(torch.uint8)
        scale = scale.view(torch.float8_e4m3fn)
        table = torch.tensor(E2M1, device="cuda", dtype=torch.float64)
        dense = table[formats.unpack_e2m1(codes).long()] * scale.double().repeat_interleave(16, 1)
        return pack_w4p(codes, scale), dense


class E4m3(Problem):
    """FP8 weights in rows, every code but NaN."""

    name = "w8a16_small"

    def weight(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        codes = torch.randint(256, (self.n, self.k), generator=draw, device="cuda", dtype=torch.uint8)
        codes[codes & 0x7F == 0x7F] = 0x01
        w = codes.view(torch.float8_e4m3fn)
        return w, w.double()


def check_pdl_chain(layers: list[Problem], m: int) -> None:
    """Run square layers that each read what the one before wrote, in a graph with PDL, against the same without."""
    if not layers[0].pdl:
        pytest.skip("this GPU has no PDL")
    k = layers[0].k
    alpha = k**0.5 / layers[0].dense.norm().float().view(1)
    buffers = [torch.zeros(m, k, device="cuda", dtype=layers[0].dtype) for _ in range(2)]
    start = torch.randn(m, k, device="cuda").to(layers[0].dtype)

    def run(pdl: bool) -> None:
        for i in range(12):
            layers[i % 3].run(pdl=pdl, x=buffers[i % 2], alpha=alpha, out=buffers[(i + 1) % 2])

    tiles.check_replays(run, buffers, start, 50)


# What the tests of every such kernel check; ``kind`` is its Problem.

WRONG_ARGUMENTS: tuple[tuple[str, Callable[[Problem], Any], str], ...] = (
    ("x", lambda p: p.x.half(), "x: dtype is float16, needed bfloat16"),
    ("x", lambda p: p.x.cpu(), "on a CUDA device|w: is not on"),
    ("alpha", lambda p: p.alpha.expand(3).contiguous(), "alpha: has 3 elements, needed 1 or 136"),
    ("bias", lambda p: torch.zeros(136, device="cuda"), "bias: dtype is float32"),
    ("out", lambda p: p.out[:-1], "out: size of dimension 0 is 4, needed 5"),
    ("out", lambda p: p.out.t().contiguous().t(), "out: not contiguous"),
)
"""Operand, what takes its place and the refusal, for 5 tokens by [136, 208]."""
WRONG_SHAPES = (
    ((8, 1, 4, 2, 1, 2), "shape: has 6 numbers, needed 7"),
    ((8, 1, 4, 2, 0, 2, 0), "cluster is 0, needed 1 to 8"),
    ((8, 1, 4, 2, 9, 2, 0), "cluster is 9, needed 1 to 8"),
    ((8, 2, 2, 4, 1, 15, 0), "bytes of shared memory"),
    ((8, 1, 4, 2, 1, 2, -1), "trigger is -1"),
)


def check_every_m(kind: type[Problem], variant: str, nk: tuple[int, int]) -> None:
    for m in RAGGED_M:
        problem = kind(variant, m, *nk, bias=m % 2 == 1, vector=m % 3 == 1)
        problem.run()
        problem.check()


def check_launch_shapes(
    kind: type[Problem], variant: str, tile: tuple[int, ...], stages_and_triggers: tuple[tuple[int, int], ...]
) -> None:
    about, room = few_tokens.KERNELS[kind.name], torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    for m, (n, k) in ((33, (264, 144)), (33, (136, 2064)), (tile[0] + 1, (72, 528))):
        problem = kind(variant, m, n, k, bias=True, vector=True)
        for cluster in clusters():
            ran = 0
            for stages, trigger in stages_and_triggers:
                shape = FewTokensShape(*tile, cluster, stages, trigger)
                if about.shared_bytes(shape) > room:
                    continue
                problem.out.fill_(torch.nan)
                problem.run(shape)
                problem.check()
                ran += 1
            assert ran >= 2, f"{tile}, clusters of {cluster}: {ran} launch shapes fit"


def check_what_sm80_runs(kind: type[Problem]) -> None:
    """The build for SM80, without clusters and PDL: every M in the launch that it chooses, then every tile."""
    about, room = few_tokens.KERNELS[kind.name], torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    built = [tile for tile in (*about.instances, *few_tokens.WITHOUT_WGMMA.get(kind.name, ())) if tile[3] > 1]
    for nk in NK:
        for m in RAGGED_M:
            problem = kind("bf16", m, *nk, bias=m % 2 == 1, vector=m % 3 == 1)
            problem.module = ptx80(kind.name)
            problem.run()
            problem.check()
    for tile in built:
        for m, (n, k) in ((33, (264, 144)), (33, (136, 2064)), (tile[0] + 1, (72, 528))):
            problem = kind("bf16", m, n, k, bias=True, vector=True)
            problem.module = ptx80(kind.name)
            for stages, trigger in ((2, 1), (3, 100)):
                shape = FewTokensShape(*tile, 1, stages, trigger)
                if about.shared_bytes(shape) <= room:
                    problem.out.fill_(torch.nan)
                    problem.run(shape)
                    problem.check()


def check_repeats(kind: type[Problem], variant: str) -> None:
    for m, n, k in ((1, 4096, 4096), (16, 1032, 2064), (32, 4096, 1040)):
        problem = kind(variant, m, n, k, bias=True)
        first = problem.run().clone()
        for _ in range(20):
            problem.out.fill_(torch.nan)
            assert torch.equal(tiles.bits(problem.run(pdl=problem.pdl)), tiles.bits(first))


def check_a_token_alone_and_with_others(kind: type[Problem]) -> None:
    problem = kind("bf16", 8, 1032, 2064)
    together = problem.run().clone()
    for token in range(8):
        alone = torch.empty(1, 1032, device="cuda", dtype=torch.bfloat16)
        problem.run(x=problem.x[token : token + 1], out=alone)
        assert torch.equal(tiles.bits(alone[0]), tiles.bits(together[token]))


def check_not_finite_stays_alone(kind: type[Problem]) -> None:
    problem = kind("bf16", 5, 136, 208)
    problem.x[2, 207], problem.x[4, 0] = torch.inf, torch.nan
    problem.run()
    assert problem.out[4].isnan().all()
    assert not problem.out[2].isfinite().any()
    assert problem.out[[0, 1, 3]].isfinite().all()


def check_no_tokens(kind: type[Problem]) -> None:
    problem = kind("bf16", 0, 136, 144)
    problem.run()
    torch.cuda.synchronize()
    assert problem.guard.isnan().all()


def check_argument_refused(kind: type[Problem], name: str, change: Callable[[Problem], Any], message: str) -> None:
    problem = kind("bf16", 5, 136, 208)
    with pytest.raises((ValueError, TypeError), match=message):
        problem.run(**{name: change(problem)})
    torch.cuda.synchronize()
    assert problem.out.isnan().all()


def check_shape_refused(kind: type[Problem], shape: tuple[int, ...], message: str) -> None:
    problem = kind("bf16", 5, 136, 208)
    with pytest.raises(ValueError, match=message):
        problem.run(shape)
    assert problem.out.isnan().all()


def check_one_wrong_element_is_seen(kind: type[Problem]) -> None:
    problem = kind("bf16", 33, 264, 144)
    problem.run()
    tiles.sees_one_wrong_element(problem)
