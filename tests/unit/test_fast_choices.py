"""Choices in a fraction of the time: the same launches as with all of them corrected, for tokens that are alike."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.backends.own.launch_choice import Layout
from fp4dispatch.backends.own.tiling import few_tokens_model, launch_model, launches, predict, search, speeds, tiles
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS
from fp4dispatch.backends.own.tiling.launches import Tuned
from fp4dispatch.machine import gpu_models
from fp4dispatch.policy.rules import m_bucket
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90
from fp4dispatch.problem.measurement import LaunchConfig

GPUS = {name: speeds.of(gpu_models.named(name)) for name in ("H200 SXM", "H100 SXM")}
KINDS = (
    ("w4", "nvfp4_gemm", "fp8", "nvfp4"),
    ("w4", "nvfp4_gemm", "bf16", "nvfp4"),
    ("w8", "fp8_gemm", "fp8", "row"),
    ("w8", "fp8_gemm", "bf16", "row"),
    ("w8", "fp8_gemm", "fp8", "block128"),
)


def problems(count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        n, k = (128 * int(math.exp(draw.uniform(math.log(4), math.log(200)))) for _ in range(2))
        table, op, activation, scaling = draw.choice(KINDS)
        m = int(math.exp(draw.uniform(0, math.log(8192))))
        yield table, Problem(op, m, n, k, activation, scaling), GPUS[draw.choice(sorted(GPUS))]


def gemms(table, problem):
    return tuple(tile.gemm for tile in tiles.tiles(table) if tile.runs(problem, SM90) and tile.kernel != predict.UNFOLD)


def exhaustive(asked, problem, known):
    """Each launch that a build alone would have corrected, by all trees."""
    for i, (kernel, build, tile) in enumerate(asked):
        if predict.covers(kernel, build, tile, problem, known):
            for us, shape in search._put_first(kernel, build, tile, problem, known):
                yield us * predict.correction(kernel, build, tile, shape, problem, known), i, shape


def test_it_is_nearly_always_the_best_of_all_launches():
    lost = []
    for table, problem, known in problems(250, 1):
        asked = gemms(table, problem)
        best = min(us for us, *_ in exhaustive(asked, problem, known))
        found = search.fastest(asked, problem, known)
        lost.append((found.us - predict.quantiser(problem, known)) / best)
    assert min(lost) > 1 - 1e-9
    assert statistics.mean(lost) < 1.0005
    assert max(lost) < 1.05


def test_no_launch_is_predicted_to_be_faster_than_the_least():
    shares = []
    for table, problem, known in problems(150, 2):
        for gemm in gemms(table, problem):
            if predict.covers(*gemm, problem, known) and (first := search._put_first(*gemm, problem, known)):
                share = search._least_us(*gemm, problem, known) / min(us for us, _ in first)
                assert share < 1.001, (gemm[:2], problem)
                shares.append(share)
    assert statistics.mean(shares) > 0.4, "what says nothing leaves no build out"


def test_a_kernel_without_a_tile_for_so_many_tokens_is_not_looked_at():
    known = GPUS["H200 SXM"]
    speed = known.few_tokens["w4a8_small"]
    usable = known.many_tokens.usable
    assert few_tokens_model.least("w4a8_small", speed, 1 << 14, 4096, 4096, usable) == math.inf
    assert few_tokens_model.least("w4a8_small", speed, 64, 4096, 4096, usable) < 20


@pytest.mark.parametrize("m", [1, 2, 9, 16, 17, 24, 25, 255, 256, 257, 272, 777, 5000])
def test_numbers_of_tokens_that_are_alike_have_the_same_tiles(m):
    same = search.alike(m)
    assert m <= same < m + search.WIDE_APART
    assert search.alike(same) == same
    assert m > search.APART_FROM or same == m
    tokens = {tile.speed.tokens for table in ("w4", "w8") for tile in tiles.tiles(table) if tile.speed}
    assert tokens
    for each in tokens:
        assert -(-m // each) == -(-same // each), each
    if m <= search.WIDE_APART_FROM:
        for kernel in KERNELS.values():
            assert kernel.tiles(m) == kernel.tiles(same)


@pytest.mark.parametrize("op", ["nvfp4_gemm", "fp8_gemm"])
def test_tokens_that_are_alike_lie_in_one_range_of_decisions(op):
    """Launches are timed at the end of each range, and serve it alone."""
    assert m_bucket(9, op, SM90) != m_bucket(8, op, SM90)
    assert all(m_bucket(search.alike(m), op, SM90) == m_bucket(m, op, SM90) for m in range(1, 8193))


class Asked(Exception):
    """A model was asked."""


def refuse(*_, **__):
    raise Asked


@pytest.mark.parametrize("timed", [False, True], ids=["predicted", "timed"])
def test_a_number_of_tokens_like_one_before_asks_no_model(monkeypatch, timed):
    known, backend, layout = GPUS["H200 SXM"], registry.instance("w4a8"), Layout(5376, 3328, 5376, 3328)
    given = Problem("nvfp4_gemm", 777, layout.n, layout.k, "fp8", "nvfp4")
    launch = LaunchConfig("w4_gemm_sm90", "a8_bf16_128", (1, 1, 8, 1, 0, 132))
    monkeypatch.setattr("fp4dispatch.backends.own.launch_choice.gpu_and_speeds", lambda _: (SM90, 132, known))
    found = Tuned(1024, ((launch, 50.0),)) if timed else None
    monkeypatch.setattr(launches, "tuned", lambda *_: found)
    device = type("Device", (), {"index": 0})()
    first = backend._best(given, layout, device, ())
    for name in ("clocks", "first"):
        monkeypatch.setattr(launch_model, name, refuse)
    assert backend._best(replace(given, m=784), layout, device, ()) == first
    assert backend._best(replace(given, m=769), layout, device, ()) == first
    assert backend._best(replace(given, capture="full", m_min=0), layout, device, ()) == first
    with pytest.raises(Asked):
        backend._best(replace(given, m=785), layout, device, ())


def test_a_choice_is_kept_until_other_launches_are_timed(monkeypatch):
    known, backend, layout = GPUS["H200 SXM"], registry.instance("w4a8"), Layout(5376, 3328, 5376, 3328)
    given, device = Problem("nvfp4_gemm", 777, 5376, 3328, "fp8", "nvfp4"), type("Device", (), {"index": 0})()
    state = {"timed": None, "only": (), "chosen": 1, "speeds": known}
    monkeypatch.setitem(vars(backend), "_choices", {})
    monkeypatch.setattr(type(backend), "_finished_only", lambda *_: state["only"])
    monkeypatch.setattr(type(backend), "_chosen", lambda *_: state["chosen"])
    monkeypatch.setattr("fp4dispatch.backends.own.launch_choice.speeds_on", lambda _: state["speeds"])
    monkeypatch.setattr(launches, "tuned", lambda *_: state["timed"])

    def kept(m=777):
        return backend._cached_choice(replace(given, m=m), layout, device)

    assert kept() == 1
    state["chosen"] = 2
    assert (kept(), kept(784), kept(785)) == (1, 1, 2)
    state["timed"] = Tuned(1024, ())
    assert kept() == 2, "other launches were timed"
    state["timed"], state["speeds"] = None, GPUS["H100 SXM"]
    assert kept() == 2, "another GPU's constants"
    state["only"], state["chosen"] = (("w4_gemm_sm90", "a8_bf16_128"),), 3
    assert kept(900) == 3
    state["chosen"] = 4
    assert kept(900) == 4, "what is finished may change"
    state["speeds"], state["chosen"] = None, 5
    assert kept() == 5, "rules have bounds at any M"


def test_the_launch_comes_with_the_build(monkeypatch):
    """And is not looked for again; sizes that are padded are laid out as padded."""
    known, backend = GPUS["H200 SXM"], registry.instance("w4a8")
    given = Problem("nvfp4_gemm", 500, 5376, 3328, "fp8", "nvfp4")
    again = []
    shape = type(backend)._shape
    monkeypatch.setattr(type(backend), "_shape", lambda self, *args: again.append(1) or shape(self, *args))
    chosen = backend._predicted(given, Layout(5376, 3328, 5376, 3328), SM90, 132, known, ())
    gemm = chosen.gemm
    assert not again
    monkeypatch.setattr(search, "_put_first", refuse)
    assert backend._fastest(replace(given, capture="piecewise"), SM90, 132, known)[0] == gemm
    monkeypatch.undo()
    monkeypatch.setattr(type(backend), "_shape", lambda self, *args: again.append(1) or shape(self, *args))
    assert chosen.shape == launches.best_shape(*gemm, given, known)
    assert backend._predicted(given, Layout(5376, 3328, 5384, 3328), SM90, 132, known, ()).gemm == gemm
    assert again
    other = next(each for each in backend.gemms(given, SM90, 132) if each != gemm)
    assert backend._predicted(given, Layout(5376, 3328, 5376, 3328), SM90, 132, known, (other,)).gemm == other


def test_an_even_launch_keeps_its_ctas_at_another_m():
    """An even build has several launches of one cluster, on more or fewer CTAs."""
    gpu = GPUS["H200 SXM"].many_tokens
    tile = tiles.speed_of("w4_gemm_sm90", "even_a8_bf16_112")
    given = Problem("nvfp4_gemm", 216, 5120, 8960, "fp8", "nvfp4")
    several = [s for s in launch_model.candidates(tile, 216, 5120, 8960, gpu) if s.multicast == 1]
    assert len({s.clusters for s in several}) > 2
    for shape in several:
        launch = LaunchConfig("w4_gemm_sm90", "even_a8_bf16_112", tuple(shape))
        assert launches.laid_out(launch, replace(given, m=200), gpu) == launch
