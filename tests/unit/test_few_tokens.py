"""The launch shapes of the kernels for few tokens: what is built, shared memory, and which are worth a measurement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp4dispatch.backends.own.tiling import few_tokens
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, SM90, FewTokensShape, candidates
from tests import w4a8_small

CSRC = Path(__file__).parents[2] / "csrc" / "few_tokens"


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_instances_are_those_of_the_source(kernel):
    (path,) = CSRC.rglob(f"{kernel}.cu")
    found = re.findall(r"instance<Weights, (\d+), (\d+), (\d+), (\d+)>", path.read_text())
    assert sorted(tuple(map(int, each)) for each in found) == sorted(KERNELS[kernel].instances)


def test_shared_memory_is_counted_as_in_the_source():
    for shape in w4a8_small.launch_shapes((2, 3, 5)):
        assert KERNELS["w4a8_small"].shared_bytes(FewTokensShape(*shape)) == w4a8_small.shared_bytes(shape)
    # By hand from tile.h: a ring of 4 x 2 stages of 8704 bytes (4608 weights, 8 x 272 tokens), sums of 4 groups.
    assert (
        KERNELS["w4a16_small"].shared_bytes(FewTokensShape(8, 1, 4, 2, 2, 2, 2)) == 512 + 8 * 6784 + 4 * 2 * 4 * 8 * 36
    )
    assert (
        KERNELS["w4a16_small"].shared_bytes(FewTokensShape(16, 1, 2, 1, 1, 2, 2)) == 1024 + 4 * 9216 + 2 * 4 * 16 * 68
    )
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
        assert shape.ctas(m, n) >= 0.45 * 132 or shape.cluster == 8
    assert {shape.cluster for shape in candidates(kernel, 1, 2**20, k, 132)} == {1}


def test_tiles_of_tokens_and_how_many_hold_them():
    tiles = {m: KERNELS["w4a8_small"].tiles(m) for m in (7, 33, 65, 97, 129, 257, 512)}
    assert tiles == {
        7: {16: 1},
        33: {16: 3, 32: 2, 64: 1},
        65: {16: 5, 32: 3, 64: 2, 96: 1},
        97: {16: 7, 32: 4, 64: 2, 128: 1},
        129: {32: 5, 64: 3, 96: 2},
        257: {64: 5, 96: 3},
        512: {64: 8, 96: 6, 128: 4},
    }
    assert KERNELS["w8a16_small"].tiles(40) == {8: 5, 16: 3, 32: 2}
    most = {kernel: about.most_tokens() for kernel, about in KERNELS.items()}
    assert most == {"w4a16_small": 256, "w8a16_small": 256, "w4a8_small": 512, "w8a8_small": 512}


def test_several_small_tiles_are_for_small_weights():
    """Where all their CTAs, with K in one part, are at most two for each SM."""
    sizes = {
        n: {shape.tokens for shape in candidates("w4a8_small", 120, n, 4096, 132)} for n in (1024, 4096, 8192, 16384)
    }
    assert sizes == {1024: {16, 32, 64}, 4096: {32, 64, 128}, 8192: {64, 128}, 16384: {128}}
    assert not list(candidates("w4a8_small", 400, 16384, 4096, 132))
    assert {shape.tokens for shape in candidates("w4a16_small", 40, 16384, 4096, 132)} == {32}


def test_wide_tiles_share_k_out_to_two_ctas_at_most():
    clusters = {}
    for shape in candidates("w8a8_small", 120, 1024, 8192, 132):
        clusters.setdefault(shape.tokens, set()).add(shape.cluster)
    assert max(clusters[64]) == 8
    assert 128 not in clusters
    assert {shape.cluster for shape in candidates("w8a8_small", 120, 4096, 8192, 132) if shape.tokens == 128} == {1, 2}


def test_a_gpu_with_little_shared_memory_has_fewer_shapes():
    small = few_tokens.SharedMemory(102400, 101376)
    few, many = (set(candidates("w8a16_small", 32, 4096, 4096, 84, memory)) for memory in (small, SM90))
    assert few < many | few
    assert all(KERNELS["w8a16_small"].shared_bytes(shape) <= small.cta for shape in few)
