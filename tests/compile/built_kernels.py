"""What the compile tests of the W4 and W8 kernels share: built modules, proofs, launch plans, operands on the CPU."""

from __future__ import annotations

import collections
import itertools
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4dispatch import jit
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, FewTokensShape
from fp4dispatch.benchmark.reports import records
from fp4dispatch.jit import prove
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.compiler.toolchain import disassembler
from fp4dispatch.machine import libraries
from tests import many_tokens
from tests.w4a8_small import H200

NEEDS_NVCC = [pytest.mark.compile, pytest.mark.skipif(libraries.nvcc()[0] is None, reason="needs nvcc")]
RESULTS = Path(__file__).parents[2] / "bench" / "results"
Machine = tuple[int, int, int, bool]
MACHINES: Mapping[str, Machine] = {
    "H200": H200,
    "A100": (108, 167936, 166912, False),
    "RTX4090": (128, 102400, 101376, False),
    "RTX5090": (170, 102400, 101376, True),
}
"""Multiprocessors, shared memory of one and of a CTA, clusters: what the plans of kernels for few tokens ask for."""
PlanOf = Callable[..., Sequence[int]]
REAL = ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (8192, 28672))
"""[N, K] of real layers."""


def module(kernel: str, variant: str, target: str = "90a") -> Any:
    tvm_ffi = pytest.importorskip("tvm_ffi")
    return tvm_ffi.load_module(str(jit.build(kernel, variant, target).entry.library))


def variants(kernel: str, *quick: str) -> list[Any]:
    """Every variant that is built for Hopper; slow but for the ``quick`` ones."""
    return [
        pytest.param(name, marks=() if name in quick else pytest.mark.slow)
        for name in installed().kernel(kernel).variants
    ]


def builds(kernel: str) -> list[Any]:
    """(variant, target) of everything that is built; slow but for bf16 on Hopper."""
    known = installed().kernel(kernel)
    return [
        pytest.param(variant, target, marks=() if (variant, target) == ("bf16", "90a") else pytest.mark.slow)
        for variant, target in itertools.product(known.variants, known.targets)
    ]


def tile_in(name: str) -> tuple[int, ...]:
    """Tokens, row blocks, groups and units in the mangled name of a kernel."""
    tile = re.search(r"TileILi(\d+)ELi(\d+)ELi(\d+)ELi(\d+)E", name)
    assert tile is not None
    return tuple(map(int, tile.groups()))


def check_few_tokens_proved(
    name: str, variant: str, target: str, most_registers: Mapping[tuple[int, ...], int]
) -> None:
    """Every tile of ``most_registers`` is built, proved, within its registers, and ready for PDL where that exists."""
    built = jit.build(name, variant, target)
    assert built.proven
    assert built.proof is not None
    assert built.pdl_allowed == (target not in ("80", "89"))
    assert sorted(tile_in(kernel.name) for kernel in built.proof.kernels) == sorted(most_registers)
    for found in built.proof.kernels:
        assert (found.spills, found.stack) == (0, 0)
        assert found.registers <= most_registers[tile_in(found.name)]
        check_registers_of_the_model(name, variant, target, found)
        if built.pdl_allowed:
            assert found.wait in (2, 3)  # the producer, the consumers, and who loads tokens where that is another warp
            assert found.signal >= 1


def check_registers_of_the_model(name: str, variant: str, target: str, found: Any) -> None:
    """By registers, as many CTAs fit on a multiprocessor as the launch model counts."""
    if (variant, target) == ("bf16", "90a"):
        shape, about = FewTokensShape(*tile_in(found.name), 1, 2, 2), KERNELS[name]
        fits, counted = (
            max(1, 65536 // (about.threads(shape) * registers))
            for registers in (-(-found.registers // 8) * 8, about.registers_of(shape))
        )
        assert fits == counted, (shape, found.registers, about.registers_of(shape))


def block_scaled(given: Mapping[str, Any], m: int, n: int, k: int) -> dict[str, Any]:
    """Operands of w8a8_small and w8_gemm with the scales of builds for 128x128 block scales."""
    x_scale, alpha = torch.ones(-(-k // 128), -(-m // 8) * 8), torch.ones(-(-n // 128), -(-k // 128))
    return {**given, "x_scale": x_scale, "alpha": alpha}


BLOCK_SCALES_REFUSED = (
    ({}, "x: is not on a CUDA device"),
    ({"x_scale": torch.ones(21)}, "x_scale: has 1 dimensions, needed 2"),
    ({"x_scale": torch.ones(1, 24)}, r"x_scale: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
    ({"x_scale": torch.ones(2, 21)}, r"x_scale: size of dimension 1 is 21, needed 24 \(8 ceil\(M/8\)\)"),
    ({"x_scale": torch.ones(24, 2).t()}, "x_scale: not contiguous"),
    ({"x_scale": torch.ones(2, 24).half()}, "x_scale: dtype is float16, needed float32"),
    (
        {"x_scale": torch.ones(49)[1:].view(2, 24)},
        "x_scale: address is 4 past a multiple of 16 bytes, needed a multiple of 16",
    ),
    ({"alpha": torch.ones(1)}, "alpha: has 1 dimensions, needed 2"),
    ({"alpha": torch.ones(136)}, "alpha: has 1 dimensions, needed 2"),
    ({"alpha": torch.ones(1, 2)}, r"alpha: size of dimension 0 is 1, needed 2 \(ceil\(N/128\)\)"),
    ({"alpha": torch.ones(2, 3)}, r"alpha: size of dimension 1 is 3, needed 2 \(ceil\(K/128\)\)"),
    ({"alpha": torch.ones(2, 2).t()}, "alpha: not contiguous"),
    ({"alpha": torch.ones(2, 2).double()}, "alpha: dtype is float64, needed float32"),
)
"""Of ``block_scaled(..., 21, 136, 208)``: what takes an operand's place, and the refusal."""


def mma_kinds(kernel: prove.KernelProof) -> dict[str, int]:
    """Count tensor-core instructions by kind and rows: ``QGMMA.64x128x32.F32...`` is a ``QGMMA.64``."""
    kinds: collections.Counter[str] = collections.Counter()
    for opcode, count in kernel.mma.items():
        kinds[opcode.partition("x")[0]] += count
    return dict(kinds)


def check_wgmmas_overlap(built: jit.Built) -> None:
    """Each kernel of small e4m3 tiles has the MMAs of one stage, four of 32 k, and none that waits for another."""
    assert built.proof is not None
    for kernel in built.proof.kernels:
        assert mma_kinds(kernel) == {"QGMMA.64": 4}
        assert kernel.unguarded == ()
    check_no_mma_waits(built)


def check_no_mma_waits(built: jit.Built) -> None:
    """The compiler has not made wgmma wait for each other: ptxas would say so (C7513)."""
    log = (built.entry.folder / "build.log").read_text()
    assert "ptxas info" in log
    assert "serialized" not in log


def check_early_accesses(kernel: str, instruction: str, variant: str = "bf16") -> None:
    """They, or kinds of them, are all that comes before the wait, and only their declaration lets them pass."""
    built = jit.build(kernel, variant, "90a")
    assert built.proof is not None
    for found in built.proof.kernels:
        assert found.early
        assert all(f" {instruction}" in access and "loads weights" in access for access in found.early)
    request = {key: value for key, value in built.entry.request.items() if key != "before_wait"}
    proof = prove.prove(built.entry.library, request, disassembler(installed().common.minimum["disassembler"]))
    for found in proof.kernels:
        assert found.unguarded
        assert all(f" {instruction}" in access for access in found.unguarded)
    assert not proof.pdl_allowed(request)


def check_plans_fit(
    plan_of: PlanOf,
    machine: Machine,
    tiles: Collection[tuple[int, ...]],
    most_slots: int,
    shared_bytes: Callable[[list[int]], int],
) -> None:
    """``tiles``: those that are built. ``most_slots``: stages of all rings together."""
    sizes = sorted({tile[0] for tile in tiles})
    for m, n, k in itertools.product(
        (1, 8, 9, 16, 17, 32, 33, 64, 65, 500), (8, 64, 1024, 4096, 28672, 151936), (16, 64, 128, 4096, 14336, 28672)
    ):
        plan = list(plan_of(m, n, k, *machine))
        tokens, _, groups, _, cluster, stages, trigger = plan
        assert tokens == next((size for size in sizes if size >= m), sizes[-1])
        assert tuple(plan[:4]) in tiles
        assert cluster in (1, 2, 4, 8)
        assert machine[3] or cluster == 1
        assert stages >= 2
        assert groups * stages <= most_slots
        assert trigger >= 0
        assert shared_bytes(plan) <= machine[2]


def check_same_plan_for_all_tokens_of_a_tile(
    plan_of: PlanOf, layers: Iterable[tuple[int, int]], tokens: Iterable[tuple[int, int]]
) -> None:
    """So a token has the same bits whether it decodes alone or with others of its tile. ``tokens``: (few, many)."""
    for (n, k), (few, many) in itertools.product(layers, tokens):
        assert list(plan_of(few, n, k, *H200)) == list(plan_of(many, n, k, *H200))


def check_plans_near_the_best(
    plan_of: PlanOf,
    sweep: str,
    least: Callable[[int, int], float],
    least_mean: Callable[[int], float],
    tokens: Collection[int] = (1, 8, 16, 32),
) -> None:
    """In a sweep that bench/results keeps. ``least(m, n)``, ``least_mean(m)``: parts of the best speed."""
    of_tokens = collections.defaultdict(list)
    for problem in records.one(RESULTS, "sweep", sweep)["problems"]:
        m, n, k = problem["m"], problem["n"], problem["k"]
        if m not in tokens:
            continue
        us: dict[tuple[int, ...], float] = {}
        for shape, each in problem["shapes"]:  # older than what lets the next grid start: any trigger counts
            us[tuple(shape[:6])] = min(each, us.get(tuple(shape[:6]), each))
        plan = tuple(plan_of(m, n, k, *H200))[:6]
        assert plan in us, f"M={m} N={n} K={k}: {plan} was not measured"
        of_best = min(us.values()) / us[plan]
        assert of_best >= least(m, n), f"M={m} N={n} K={k}: {plan} has {of_best:.3f} of the best speed"
        of_tokens[m].append(of_best)
    assert {m: len(found) for m, found in of_tokens.items()} == dict.fromkeys(tokens, 8)
    for m, found in of_tokens.items():
        assert statistics.geometric_mean(found) >= least_mean(m), f"M={m}: {found}"


TAKEN, NEEDED = "x: is not on a CUDA device", "whole tiles and split up to"
UNCOVERED = (
    ([1, 1, 1, 1, 0, 42], TAKEN),
    ([1, 1, 1, 1, 0, 5], TAKEN),  # a CTA goes on until no tile is left
    ([1, 1, 1, 1, 0, 0], r"shape: clusters is 0, needed at least 1 \(tiles\)"),
    ([1, 1, 1, 1, 0, 43], r"shape: clusters is 43, needed at most 42 \(tiles\)"),
    ([1, 1, 1, 1, 1, 42], r"shape: rounds is 1, needed at most 0 \(tiles; 0 where K is not split\)"),
    ([1, 2, 1, 1, 0, 42], TAKEN),
    ([2, 2, 1, 1, 0, 21], TAKEN),
    ([1, 2, 1, 1, 0, 41], f"0 rounds of 41 clusters do 0 {NEEDED} 41, but there are 42 tiles"),
    ([2, 2, 1, 1, 0, 22], r"shape: clusters is 22, needed at most 21 \(tiles\)"),
    ([1, 2, 1, 1, 1, 14], TAKEN),  # 28 whole tiles, and 14 in halves
    ([1, 2, 1, 1, 1, 21], TAKEN),  # and none
    ([1, 2, 1, 1, 1, 13], f"1 rounds of 13 clusters do 26 {NEEDED} 13, but there are 42 tiles"),
    ([1, 2, 1, 1, 1, 22], f"1 rounds of 22 clusters do 44 {NEEDED} 22, but there are 42 tiles"),
    ([1, 3, 1, 1, 4, 3], f"4 rounds of 3 clusters do 36 {NEEDED} 3, but there are 42 tiles"),
    ([1, 3, 1, 1, -1, 3], "shape: rounds is -1, needed at least 0"),
    ([1, 3, 1, 1, 2**62, 3], "shape: rounds is 4611686018427387904, needed at most 42"),
)
"""Launch shapes for 42 tiles of a kernel for many tokens, and what it says: the first ones it takes."""


def check_tile(numbers: Sequence[int], kernel: str, variant: str) -> None:
    """The tile that a kernel for many tokens says that it has is the one that the launch model knows."""
    tile = many_tokens.tile_of(kernel, variant)
    *sizes, shares = numbers
    assert sizes == [tile.tokens, tile.rows, tile.stage_k, tile.weight_bytes, tile.ctas, tile.most_split]
    assert bool(shares) == (tile.share > 0)


def check_takes_shapes(
    call: Callable[..., None], given: Mapping[str, Any], kernel: str, variant: str, mnk: tuple[int, int, int]
) -> None:
    """The kernel refuses none that the model considers: it goes on to ask for a GPU."""
    tile = many_tokens.tile_of(kernel, variant)
    for shape in launch_model.candidates(tile, *mnk, launch_model.H200):
        with pytest.raises(ValueError, match=TAKEN):
            call(*given.values(), list(shape), False)


def packed_operands(m: int, n: int, k: int) -> dict[str, Any]:
    """Operands of w4_gemm and w4a8_small for e4m3 activations, by name, in their order."""
    return {
        "x": torch.zeros(-(-k // 128), -(-m // 8), 1024, dtype=torch.uint8),
        "x_scale": torch.ones(m),
        "w": torch.zeros(-(-n // 64), -(-k // 64), 2304, dtype=torch.uint8),
        "alpha": torch.ones(1),
        "bias": None,
        "out": torch.zeros(m, n, dtype=torch.bfloat16),
    }


def check_operands_refused(name: str, given: Mapping[str, Any], message: str, variant: str = "bf16") -> None:
    """By w4a8_small or w8a8_small, with its own launch shape and with one that is given."""
    built = module(name, variant)
    for call in (
        lambda: getattr(built, name)(*given.values(), False),
        lambda: getattr(built, f"{name}_shaped")(*given.values(), [16, 1, 2, 1, 1, 2, 2], True),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()
