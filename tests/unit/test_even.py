"""Even builds: what the models consider, on which GPUs, and that nobody needs one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.backends.own.tiling import launch_model, launches, predict, search, speeds, tiles
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90
from fp4dispatch.problem.measurement import LaunchConfig

KERNEL, BUILD = "w4_gemm_sm90", "even_a8_bf16_112"
TILE = tiles.speed_of(KERNEL, BUILD)
H200, H100 = (speeds.fitted()[name] for name in ("H200 SXM", "H100 SXM"))


def problem(m: int, n: int, k: int) -> Problem:
    return Problem("nvfp4_gemm", m, n, k, activation="fp8", scaling="nvfp4")


def test_an_even_build_is_the_tile_of_another_build():
    rows = {tuple(tile.builds.values()): tile for tile in tiles.tiles("w4")}
    even = [tile for tile in rows.values() if tile.even]
    assert len(even) == 8
    for tile in even:
        same = rows[tuple(build.removeprefix("even_") for build in tile.builds.values())]
        assert tile.speed == replace(same.speed, even=True)
        assert (tile.scalings, tile.activations) == (same.scalings, same.activations)


def test_room_is_for_the_sums_and_marks_of_all_ctas():
    shape = launch_model.LaunchShape(2, 1, 8, 1, 0, 66)
    assert launch_model.room_bytes(TILE, shape) == 132 * (128 * 112 * 4 + 8 * 8)
    assert launch_model.room_bytes(tiles.speed_of(KERNEL, "a8_bf16_112"), shape) == 0


def test_where_nothing_is_left_to_share_out_there_is_no_launch():
    one = launch_model.gpu_with(132)
    full = 112, 128 * 132, 4096
    assert not [s for s in launch_model.candidates(TILE, *full, one) if s.clusters == 132 and s.multicast == 1]
    short = 112, 4096, 256  # two stages
    assert list(launch_model.candidates(TILE, *short, one)) == []
    with pytest.raises(ValueError, match="nothing to share out; use another build"):
        launch_model.best(TILE, *short, one)
    assert search.many_tokens(KERNEL, BUILD, TILE, problem(*short), H200) is None
    assert launches.best_shape(KERNEL, BUILD, problem(*short), H200) is None


def test_only_a_gpu_on_which_it_was_measured_considers_it():
    given = problem(216, 5120, 8960)
    found = search.many_tokens(KERNEL, BUILD, TILE, given, H200)
    assert found is not None
    assert predict.launch(KERNEL, BUILD, TILE, found.shape, given, H200) == found.us
    assert search.many_tokens(KERNEL, BUILD, TILE, given, H100) is not None
    nobody = replace(H200, builds={})
    assert search.many_tokens(KERNEL, BUILD, TILE, given, nobody) is None
    assert predict.launch(KERNEL, BUILD, TILE, found.shape, given, nobody) is None
    gemms = registry.instance("w4a8").gemms(given, SM90, 132)
    assert (KERNEL, BUILD) in gemms
    assert not [each for each in launches.worth_timing(gemms, given, nobody) if each.build.startswith("even_")]


def test_an_h200_launches_evenly_where_tiles_leave_sms_idle():
    """5120x8960 at 216 tokens: 80 tiles of 112 tokens on 132 SMs."""
    given = problem(216, 5120, 8960)
    chosen = tiles.tile_for(given, SM90, 132, "w4", speeds=H200)
    assert chosen.even
    assert launches.best_shape(KERNEL, chosen.builds["bfloat16"], given, H200)[5] > 100


def test_after_many_whole_tiles_only_times_choose_an_even_launch():
    """At 6335 tokens CTAs do eight whole tiles each before they share the rest out."""
    given, gpu = problem(6335, 4096, 2048), H200.many_tokens
    shapes = [each.shape for each in launch_model.every(TILE, given.m, given.n, given.k, gpu)]
    assert min(shape.rounds for shape in shapes) > search.MOST_EVEN_ROUNDS
    assert search.many_tokens(KERNEL, BUILD, TILE, given, H200) is None
    launch = LaunchConfig(KERNEL, BUILD, tuple(shapes[0]))
    assert launches.laid_out(launch, given, gpu) == launch
    assert launches.microseconds(launch, given, H200) > 50
    few = problem(216, 5120, 8960)
    assert any(each.shape.rounds == 0 for each in launch_model.every(TILE, few.m, few.n, few.k, gpu))
    assert search.many_tokens(KERNEL, BUILD, TILE, few, H200).shape.rounds <= search.MOST_EVEN_ROUNDS


def test_bounds_choose_no_even_build():
    for m in (1, 33, 216, 1000, 4096):
        assert not tiles.tile_for(problem(m, 5120, 8960), SM90, 132, "w4").even
        takes_even = tiles.tile_for(problem(m, 5120, 8960), SM90, 132, "w4", lambda tile: tile.even)
        assert takes_even is None


def test_even_builds_alone_serve_nothing(monkeypatch):
    """Where nothing can be compiled and only these are finished, another backend runs."""
    backend, given = registry.instance("w4a8"), problem(216, 5120, 8960)
    there = set()
    monkeypatch.setattr(
        "fp4dispatch.backends.own.finished.all_there", lambda builds, _: {*builds} - {(QUANTIZER, "any")} <= there
    )
    system = type("System", (), {"arch": SM90})()
    even = [gemm for gemm in backend.gemms(given, SM90, 0) if not tiles.runs_all(*gemm)]
    assert len(even) >= 8
    there |= set(even)
    assert backend._finished(given, system) == ()
    other = next(gemm for gemm in backend.gemms(given, SM90, 0) if gemm[0].endswith("_sm90"))
    there.add(other)
    assert backend._finished(given, system)[0] == other
    assert set(backend._finished(given, system)) == {other, *even}


QUANTIZER = "w4_activations"
