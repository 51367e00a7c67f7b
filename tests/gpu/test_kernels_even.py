"""Even builds of w4_gemm_sm90: what whole tiles leave is shared out by stages, whoever ends a tile."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4dispatch import jit
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape, TileSpeed
from fp4dispatch.jit.catalog.manifest import installed
from tests import many_tokens
from tests.gpu.sm90 import OUT_DTYPES, SM90, needs_sm90
from tests.gpu.tiles import bits
from tests.gpu.w4_packed import Problem, check_no_tokens, check_pdl_chain

pytestmark = [pytest.mark.gpu, needs_sm90]

KERNEL = "w4_gemm_sm90"
BUILDS = tuple(variant for variant in installed().kernel(KERNEL).variants if variant.startswith("even_"))
SOME = ("even_a8_bf16_112", "even_a8_fp16_208")
# Parts of every length: more tiles than CTAs and fewer, the last tile of tokens nearly empty, K that ends in a stage.
SHAPES = ((72, 200, 1040), (209, 1032, 5136), (300, 2056, 1920), (97, 5120, 2064), (431, 6016, 1296))


def tile_of(variant: str) -> TileSpeed:
    return many_tokens.tile_of(KERNEL, variant)


@functools.cache
def module(variant: str) -> Any:
    return jit.load(KERNEL, variant, SM90).module


def problem_of(variant: str, mnk: tuple[int, int, int]) -> Problem:
    return Problem(True, OUT_DTYPES[variant.split("_")[2]], mnk)


def room_of(tile: TileSpeed, shape: Sequence[int], fill: int = 0xFF) -> Tensor:
    return torch.full((launch_model.room_bytes(tile, LaunchShape(*shape)),), fill, dtype=torch.uint8, device="cuda")


def launch_in(variant: str, room: Tensor) -> Any:
    """The function as other builds have it: room comes before the PDL flag."""
    return lambda *operands: module(variant).w4_gemm_even(*operands[:-1], room, operands[-1])


def shapes_of(tile: TileSpeed, m: int, n: int, k: int) -> list[LaunchShape]:
    """What the model considers, and clusters of other numbers, also more than run at once."""
    gpu = launch_model.gpu_with(torch.cuda.get_device_properties(0).multi_processor_count)
    found = list(launch_model.candidates(tile, m, n, k, gpu))
    for multicast, sharing in {(each.multicast, each.sharing) for each in found}:
        base = LaunchShape(multicast, 1, 1, sharing, 0, 1)
        count, stages = launch_model.tiles(tile, base, m, n), -(-k // tile.stage_k)
        for clusters in (1, 2, 7, 33, 61, count - 1, count + 1):
            rounds, left = divmod(count, max(clusters, 1))
            if clusters > 0 and left > 0 and 5 * clusters <= left * stages:
                found.append(base._replace(rounds=rounds, clusters=clusters))
    return list(dict.fromkeys(found))


def test_every_even_build_is_here() -> None:
    assert sorted(tile_of(variant).tokens for variant in BUILDS) == sorted([*range(96, 209, 16)] * 2)
    assert all(tile_of(variant).even for variant in BUILDS)
    assert set(SOME) <= set(BUILDS)


@pytest.mark.parametrize("variant", BUILDS)
def test_every_share_and_the_same_bits_twice(variant: str) -> None:
    tile, checked = tile_of(variant), 0
    for mnk in SHAPES:
        problem = problem_of(variant, mnk)
        for shape in shapes_of(tile, *mnk):
            problem.run(launch_in(variant, room_of(tile, shape)), list(shape), times=3)
            problem.check(f"{variant} {shape}")
            checked += 1
    assert checked >= 20


@pytest.mark.parametrize("variant", SOME)
def test_what_room_holds_does_not_matter_nor_what_runs_beside(variant: str) -> None:
    """Four streams at once, each with room of its own, beside replays of a graph whose room others write to between."""
    tile, mnk = tile_of(variant), (216, 5120, 4096)
    problem = problem_of(variant, mnk)
    for shape in shapes_of(tile, *mnk)[:4]:
        operands = problem.operands()
        problem.run(launch_in(variant, room_of(tile, shape, 0)), list(shape))
        problem.check(shape)
        expected = problem.out.clone()
        outs, rooms = ([make() for _ in range(5)] for make in (problem.out.clone, lambda s=shape: room_of(tile, s)))
        streams = [torch.cuda.Stream() for _ in range(4)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                launch_in(variant, rooms[4])(*(operands | {"out": outs[4]}).values(), list(shape), True)
        for turn in range(60):
            for out in outs:
                out.fill_(torch.nan)
            rooms[4].random_(0, 256)
            torch.cuda.synchronize()
            graph.replay()
            for stream, out, room in zip(streams, outs, rooms, strict=False):
                with torch.cuda.stream(stream):
                    for _ in range(3):
                        launch_in(variant, room)(*(operands | {"out": out}).values(), list(shape), True)
            torch.cuda.synchronize()
            assert all(torch.equal(bits(out), bits(expected)) for out in outs), (shape, turn)


@pytest.mark.parametrize("m", [100, 400])
@pytest.mark.parametrize("variant", [variant for variant in BUILDS if "bf16" in variant])
def test_a_chain_of_layers_with_pdl_in_one_room(variant: str, m: int) -> None:
    tile = tile_of(variant)
    shape = shapes_of(tile, m, 2048, 2048)[0]
    launch = launch_in(variant, room_of(tile, shape))
    check_pdl_chain(lambda *operands: launch(*operands[:-1], list(shape), operands[-1]), True, m)


@pytest.mark.parametrize("variant", SOME)
def test_marks_are_wiped(variant: str) -> None:
    """A mark that stayed would let the next replay take sums that are not there yet."""
    tile, mnk = tile_of(variant), (216, 5120, 4096)
    problem = problem_of(variant, mnk)
    for shape in shapes_of(tile, *mnk):
        room = room_of(tile, shape, 0)
        problem.run(launch_in(variant, room), list(shape))
        marks = room[: shape.clusters * shape.ctas * launch_model.MARK_BYTES]
        assert not marks.any(), shape
        assert room[len(marks) :].any() or shape.clusters == 1, "sums were left"


@pytest.mark.parametrize("variant", SOME)
def test_what_is_refused(variant: str) -> None:
    tile, mnk = tile_of(variant), (216, 5120, 4096)
    problem = problem_of(variant, mnk)
    shape = shapes_of(tile, *mnk)[0]
    count, room = launch_model.tiles(tile, shape, *mnk[:2]), room_of(tile, shape)
    problem.run(launch_in(variant, room), list(shape))
    wrong = {
        r"needed at least \d+ \(sums and marks": (shape, room[:-1]),
        "16": (shape, torch.cat((room, room))[8:]),
        "is even": (shape._replace(split=2), room),
        "tiles beside whole ones is 0": (shape._replace(rounds=1, clusters=count), room),
        "needed at most 1 ": (shape._replace(rounds=0, clusters=1), room),
        "shares of 5 stages": (shape._replace(rounds=0, clusters=count * 7), room_of(tile, (1, 1, 1, 1, 0, count * 7))),
        "CUDA": (shape, room.cpu()),
    }
    for match, (given, memory) in wrong.items():
        with pytest.raises((ValueError, TypeError, RuntimeError), match=match):
            launch_in(variant, memory)(*problem.operands().values(), list(given), False)


def test_no_tokens() -> None:
    variant = SOME[0]
    check_no_tokens(launch_in(variant, room_of(tile_of(variant), (1, 1, 1, 1, 0, 1))), [1, 1, 1, 1, 0, 1])
