"""bench/fit_launch_model.py on samples that are made from known constants."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace

import pytest

pytest.importorskip("scipy", reason="scipy is not installed")

from bench import fit_launch_model as fits
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.backends.own.tiling.launch_model import H200
from fp4dispatch.backends.own.tiling.tiles import speed_of
from tests.bench_cases import FACTS

BUILDS = {"w4a8": ("w4_gemm_sm90", "a8_bf16_128"), "w8a8": ("w8_gemm_sm90", "bf16_128")}
TRUE_GPU = replace(
    H200, clock_mhz=1500.0, memory_bytes=1600.0, tile_clocks=9000.0, part_clocks=600.0, late_clocks=3000.0
)
MOVES = replace(TRUE_GPU, slowing=0.01, slowing_moved=0.002)
SLOW = 1.2
"""Times of stages of w4a8, over those that are in use."""


def record(seed, gpu=TRUE_GPU, slow=1.0, problems=24):
    draw = random.Random(seed)
    found = []
    for _ in range(problems):
        n, k, m = 128 * draw.randint(8, 400), 128 * draw.randint(8, 200), draw.randint(65, 2000)
        launches = {}
        for family, build in BUILDS.items():
            tile = speed_of(*build)
            if family == "w4a8":
                tile = replace(tile, stage=tile.stage * slow, pair=tile.pair * slow)
            shapes = launch_model.candidates(tile, m, n, k, gpu)
            times = [
                [list(s), launch_model.clocks(tile, s, m, n, k, gpu) / gpu.clock_mhz * draw.uniform(0.99, 1.01)]
                for s in shapes
            ]
            launches[f"{family} {'/'.join(build)}"] = times
        launches["w4a8 w4a8_small/bf16"] = [[None, 1.0]]
        found.append({"n": n, "k": k, "m": m, "launches": launches})
    return {"seed": seed, "facts": FACTS, "gpu": {"sms": 132}, "problems": found}


def test_the_constants_of_a_gpu_are_found_again():
    some = fits.points([record(1, problems=60)])
    assert {point.build for point in some} == set(BUILDS.values()), "kernels without a model are left out"
    start = fits.in_use(launch_model.gpu_with(132), some)
    found = fits.fitted(start, some, builds=False)
    assert found.gpu.clock_mhz == pytest.approx(1500, rel=0.02)
    assert found.gpu.memory_bytes == pytest.approx(1600, rel=0.05)
    assert found.gpu.tile_clocks == pytest.approx(9000, rel=0.05)
    in_eight = [gpu.split_clocks + 6 * gpu.part_clocks for gpu in (found.gpu, TRUE_GPU)]
    assert in_eight[0] == pytest.approx(in_eight[1], rel=0.15)
    assert found.gpu.late_clocks == pytest.approx(3000, rel=0.1)
    assert found.tiles == start.tiles
    others = fits.points([record(2)])
    before, after = (
        statistics.median(point.predicted(model) / point.us for point in others) for model in (start, found)
    )
    assert after == pytest.approx(1, abs=0.01)
    assert before < 0.9
    assert "; regret within a build mean 1.00" in fits.verdict("x", found, others)


def test_what_launches_slow_down_by_is_told_apart_by_the_bytes_that_they_move():
    some = fits.points([record(1, MOVES, problems=60)])
    found = fits.fitted(fits.in_use(launch_model.gpu_with(132), some), some, builds=False).gpu
    plain, paired = (launch_model.LaunchShape(each, 1, 8, 1, 0, 132 // each) for each in (1, 2))
    tile = speed_of(*BUILDS["w8a8"])

    def more(gpu):
        """How many times as long the unpaired launch takes."""
        return launch_model.clocks(tile, plain, 8192, 8192, 8192, gpu) / launch_model.clocks(
            tile, paired, 8192, 8192, 8192, gpu
        )

    assert more(MOVES) > 1.06
    assert more(found) == pytest.approx(more(MOVES), abs=0.01)


def test_a_build_that_is_slower_than_it_says_does_not_change_the_gpu():
    some = fits.points([record(1, slow=SLOW)])
    found = fits.fitted(fits.in_use(launch_model.gpu_with(132), some), some, builds=False)
    assert found.gpu.tile_clocks == pytest.approx(9000, rel=0.15)
    assert found.gpu.slowing_fp4 < 0.03, "slower builds are of NVFP4 weights"


def test_a_slower_build_is_found():
    some = fits.points([record(1, slow=SLOW)])
    start = fits.Model(TRUE_GPU, fits.in_use(TRUE_GPU, some).tiles)
    found = fits.fitted(start, some, builds=True)
    for build, factor in zip(BUILDS.values(), (SLOW, 1.0), strict=True):
        assert found.tiles[build].stage == pytest.approx(factor * speed_of(*build).stage, rel=0.03)
    assert found.gpu.clock_mhz == TRUE_GPU.clock_mhz


def test_regret_is_within_what_can_replace_each_other():
    shape = launch_model.LaunchShape(1, 1, 8, 1, 0, 32)
    build, other = BUILDS.values()
    block = ("w8_gemm_sm90", "block_bf16_128")
    some = [
        fits.Point((4096, 4096, 128), family, each, s, us)
        for family, each, s, us in (
            ("w4a8", build, shape, 12.0),
            ("w4a8", build, shape._replace(split=3), 10.0),
            ("w8a8", other, shape, 8.0),
            ("w8a8", block, shape, 16.0),
        )
    ]
    model = fits.in_use(H200, some)
    assert sorted(fits.regrets(model, some, within="family")) == [1.0, 1.0, 1.0]
    twice = some[0]._replace(shape=shape._replace(split=8, clusters=32), us=1000.0)
    assert not fits.modelled(twice), "8 parts of 32 tiles do not run at once"
    assert sorted(fits.regrets(model, [*some, twice], within="family")) == [1.0, 1.0, 1.0]
    assert sorted(fits.regrets(model, [*some, twice._replace(us=5.0)], within="family")) == [1.0, 1.0, 2.0]
    slow_split = fits.Model(replace(H200, split_clocks=1e6), model.tiles)
    assert sorted(fits.regrets(slow_split, some, within="family")) == [1.0, 1.0, 1.2]
    assert fits.weights_of([*some, some[0]._replace(us=14.0)]) == [1, 1, 1, 1, fits.FAR_WEIGHT]


def test_the_command(tmp_path, monkeypatch, capsys):
    paths = [tmp_path / f"{seed}.json" for seed in (1, 2)]
    for seed, path in zip((1, 2), paths, strict=True):
        path.write_text(json.dumps(record(seed, problems=4)))
    monkeypatch.setattr("sys.argv", ["x", "--fit", str(paths[0]), "--judge", str(paths[1])])
    fits.main()
    out = capsys.readouterr().out
    assert "judged on" in out
    assert out.count("regret within a family") == 3
    assert "w4_gemm_sm90/a8_bf16_128: stage = " in out
    monkeypatch.setattr("sys.argv", ["x", "--fit", str(paths[0]), "--judge", str(paths[0])])
    with pytest.raises(SystemExit):
        fits.main()
    assert "need other seeds of one GPU model" in capsys.readouterr().err
