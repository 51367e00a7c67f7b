"""The launch shapes of the kernels for few tokens: what is built, shared memory, and which are worth a measurement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp4dispatch.backends.own.tiling import few_tokens
from fp4dispatch.backends.own.tiling.few_tokens import (
    KERNELS,
    QUANTISER,
    RESERVED,
    SM90,
    STAGE_K,
    FewTokensShape,
    candidates,
)
from tests import w4a8_small

CSRC = Path(__file__).parents[2] / "csrc" / "few_tokens"


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_instances_are_those_of_the_source(kernel):
    (path,) = CSRC.rglob(f"{kernel}.cu")
    hopper, *others = re.split(r"#else|#endif", path.read_text().partition("built()")[2].partition("return {std")[0])
    found, elsewhere = instances_in(hopper), instances_in("".join(others))
    assert sorted(found) == sorted(KERNELS[kernel].instances)
    assert sorted(elsewhere) == sorted(few_tokens.WITHOUT_WGMMA.get(kernel, ()))


def instances_in(source):
    found = re.findall(r"instance<Weights, (\d+), (\d+), (\d+), (\d+)>", source)
    return [tuple(map(int, each)) for each in found]


def test_shared_memory_is_counted_as_in_the_source():
    shapes = list(w4a8_small.launch_shapes((2, 3, 5)))
    assert {shape[4] for shape in shapes} == set(few_tokens.CLUSTERS)
    for shape in shapes:
        assert KERNELS["w4a8_small"].shared_bytes(FewTokensShape(*shape)) == w4a8_small.shared_bytes(shape)
    # By hand from tile.h: 4 x 2 stages of 6784 bytes (4608 weights, 8 x 272 tokens); at the end two numbers for each of
    # 64 rows, sums of 4 groups for 8 tokens of 64 + 4 rows, and 8 tokens of 32 rows from each of 2 CTAs.
    two = FewTokensShape(8, 1, 4, 2, 2, 2, 2)
    assert KERNELS["w4a16_small"].shared_bytes(two) == 512 + 8 * 6784 + 512 + 4 * 8 * 68 * 4 + 2 * 8 * 32 * 4
    three = two._replace(cluster=3)  # 6, 5 and 5 fours of rows: room for 8 of each CTA
    assert KERNELS["w4a16_small"].shared_bytes(three) == 512 + 8 * 6784 + 512 + 4 * 8 * 68 * 4 + 3 * 8 * 32 * 4
    ring = 1024 + 3 * 2 * (4608 + 16384 + 512)  # more than the sums, which take its place
    assert KERNELS["w4a16_small"].shared_bytes(FewTokensShape(64, 1, 2, 1, 1, 3, 3)) == ring
    assert KERNELS["w8a16_small"].shared_bytes(FewTokensShape(16, 1, 4, 2, 1, 3, 3)) == 1024 + 12 * (8192 + 5120)
    assert KERNELS["w8a8_small"].shared_bytes(FewTokensShape(64, 1, 2, 1, 1, 4, 4)) == 1024 + 8 * 16384
    blocks = KERNELS["w8a8_small"].shared_bytes(FewTokensShape(64, 1, 2, 1, 1, 4, 4), block_scales=True)
    assert blocks == 1024 + 8 * (8192 + 9216)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "mnk", [(1, 4096, 4096), (16, 28672, 4096), (33, 1536, 896), (64, 8192, 28672), (128, 4096, 4096)]
)
def test_candidates_fit_and_fill_the_gpu(kernel, mnk):
    m, n, k = mnk
    found = list(candidates(kernel, m, n, k, 132))
    assert found
    assert len(set(found)) == len(found)
    for shape in found:
        assert shape[:4] in KERNELS[kernel].instances
        assert shape.tokens in KERNELS[kernel].tiles(m)
        assert KERNELS[kernel].shared_bytes(shape) <= SM90.cta
        assert shape.trigger == max(shape.stages // KERNELS[kernel].trigger_part, 1)
        assert shape.stages >= 2
        assert shape.stages <= max(2, -(-k // (128 * shape.cluster * shape.groups)))
        assert shape.ctas(m, n) >= 0.45 * 132 or shape.cluster in (8, -(-k // (128 * shape.groups)))
    assert {shape.cluster for shape in candidates(kernel, 1, 2**20, k, 132)} == {1}


def test_a_short_k_is_not_only_shared_out_to_ctas_without_a_stage():
    """384 are three stages: one for each of the four groups of warps of one CTA."""
    found = {(each.groups, each.cluster) for each in candidates("w4a16_small", 5, 3072, 384, 132)}
    assert (4, 1) in found
    assert (2, 2) in found


def test_tiles_of_tokens_and_how_many_hold_them():
    tiles = {m: KERNELS["w4a8_small"].tiles(m) for m in (7, 33, 65, 97, 129, 257, 512, 2048)}
    assert tiles == {
        7: {16: 1},
        33: {16: 3, 24: 2, 48: 1},
        65: {16: 5, 24: 3, 48: 2, 80: 1},
        97: {16: 7, 24: 5, 32: 4, 48: 3, 64: 2, 112: 1},
        129: {16: 9, 24: 6, 32: 5, 48: 3, 80: 2},
        257: {24: 11, 32: 9, 48: 6, 64: 5, 80: 4, 96: 3},
        512: {32: 16, 48: 11, 64: 8, 80: 7, 96: 6, 112: 5, 128: 4},
        2048: {128: 16},
    }
    assert KERNELS["w8a16_small"].tiles(40) == {8: 5, 16: 3, 32: 2}
    most = {kernel: about.most_tokens() for kernel, about in KERNELS.items()}
    assert most == {"w4a16_small": 1536, "w8a16_small": 256, "w4a8_small": 2048, "w8a8_small": 2048}


def test_several_small_tiles_are_for_small_weights():
    """Where all their CTAs, with K in one part, are at most two for each SM."""
    sizes = {
        n: {shape.tokens for shape in candidates("w4a8_small", 120, n, 4096, 132)} for n in (1024, 4096, 8192, 16384)
    }
    every = {16, 24, 32, 48, 64, 128}
    assert sizes == {1024: every, 4096: every - {24}, 8192: {48, 64, 128}, 16384: {64, 128}}
    assert not list(candidates("w4a8_small", 400, 16384, 4096, 132))
    assert {shape.tokens for shape in candidates("w4a16_small", 40, 32768, 4096, 132)} == {48}


def test_wide_tiles_share_k_out_to_four_ctas_at_most():
    clusters = {}
    for shape in candidates("w8a8_small", 120, 896, 8192, 132):
        clusters.setdefault(shape.tokens, set()).add(shape.cluster)
    assert max(clusters[64]) == 8
    assert 128 not in clusters  # four CTAs for each of 14 row blocks leave over half of the GPU idle
    wide = {shape.cluster for shape in candidates("w8a8_small", 120, 4096, 8192, 132) if shape.tokens == 128}
    assert wide == {1, 2, 3, 4}


def test_a_gpu_with_little_shared_memory_has_fewer_shapes():
    small = few_tokens.SharedMemory(102400, 101376)
    few, many = (set(candidates("w8a16_small", 32, 4096, 4096, 84, memory)) for memory in (small, SM90))
    assert few < many | few
    assert all(KERNELS["w8a16_small"].shared_bytes(shape) <= small.cta for shape in few)


def many_candidates(kernel, *, block_scales=False):
    """The candidates of a kernel for many problems."""
    return {
        shape
        for m in (9, 30, 50, 64, 100, 128, 300)
        for n in (1024, 4096, 8192)
        for shape in candidates(kernel, m, n, 8192, 132, block_scales=block_scales)
    }


@pytest.mark.parametrize(
    ("kernel", "block_scales"), [("w4a8_small", False), ("w4a8_small", True), ("w8a8_small", True)]
)
def test_a_cta_with_fp8_activations_leaves_room_for_the_next_quantiser(kernel, block_scales):
    about = KERNELS[kernel]
    shapes = many_candidates(kernel, block_scales=block_scales)
    free = [SM90.sm - RESERVED - about.shared_bytes(shape, block_scales=block_scales) for shape in shapes]
    assert min(free) >= QUANTISER
    deepest = {}
    for shape in shapes:
        tile = shape._replace(stages=0, trigger=0)
        deepest[tile] = max(shape.stages, deepest.get(tile, 0))
    filled = [tile._replace(stages=stages + 1) for tile, stages in deepest.items()]
    assert not all(about.leaves_room(shape, SM90, block_scales=block_scales) for shape in filled)


def test_fp8_weights_by_row_may_fill_an_sm_and_may_leave_room():
    about = KERNELS["w8a8_small"]
    most = {}  # of each tile, the deepest ring that is a candidate and the deepest that leaves room
    for shape in many_candidates("w8a8_small"):
        deepest, roomy = most.get(shape[:5], (0, 0))
        free = SM90.sm - RESERVED - about.shared_bytes(shape)
        assert free >= 0
        most[shape[:5]] = max(deepest, shape.stages), max(roomy, shape.stages if free >= QUANTISER else 0)
    assert all(roomy for _, roomy in most.values())
    assert any(deepest > roomy for deepest, roomy in most.values())
    for (*tile, cluster), (deepest, roomy) in most.items():
        one = FewTokensShape(*tile, cluster, 1, 1)
        whole = -(8192 // STAGE_K // -(cluster * one.groups))  # all of K
        fits = [
            stages
            for stages in range(1, 64 // one.groups)
            if about.shared_bytes(one._replace(stages=stages)) <= SM90.cta
        ]
        room = [
            stages
            for stages in fits
            if SM90.sm - about.shared_bytes(one._replace(stages=stages)) >= RESERVED + QUANTISER
        ]
        assert (deepest, roomy) == (min(whole, max(fits)), min(whole, max(room)))


@pytest.mark.parametrize(
    ("kernel", "shape", "block_scales", "needs"),
    [
        ("w4a8_small", (64, 1, 2, 1, 1, 6, 6), False, True),
        ("w8a8_small", (64, 1, 2, 1, 1, 6, 6), True, True),
        ("w8a8_small", (64, 1, 2, 1, 1, 6, 6), False, False),
        ("w8a16_small", (8, 1, 4, 2, 1, 4, 2), False, False),
    ],
)
def test_room_for_a_quantiser_counts_to_the_byte_and_only_where_it_is_needed(kernel, shape, block_scales, needs):
    about, filled = KERNELS[kernel], FewTokensShape(*shape)
    enough = about.shared_bytes(filled, block_scales=block_scales) + RESERVED + QUANTISER
    memories = [few_tokens.SharedMemory(sm, SM90.cta) for sm in (enough, enough - 1)]
    assert [about.leaves_room(filled, memory, block_scales=block_scales) for memory in memories] == [True, not needs]
