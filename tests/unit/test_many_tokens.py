"""The model of the kernels for many tokens, worked out by hand, and the tiles that it chooses, on a kept sweep."""

from __future__ import annotations

import collections
import statistics
from dataclasses import asdict, replace

import pytest

from fp4dispatch.backends.own import tiles
from fp4dispatch.backends.own.launch_model import TileSpeed, clocks
from fp4dispatch.errors import FlagsError
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import KNOWN_ARCHS
from tests import many_tokens

SM90 = next(arch for arch in KNOWN_ARCHS if arch.sm == "sm_90")
KERNEL = "w4_gemm_sm90"
SPEED = TileSpeed(128, 128, 128, 9216, ctas=1, most_split=8, alone=0, stage=788, pair=820)
ROW = {
    "kernel": KERNEL,
    "scalings": ["nvfp4"],
    "activations": ["fp8"],
    "builds": {"bfloat16": "a8_bf16_128"},
    "speed": asdict(SPEED),
}


def wide(m, n, k, activation="fp8", out="float16"):
    """In float16 no weights are written out for cuBLASLt."""
    return Problem("nvfp4_gemm", m, n, k, activation, out_dtype=out)


# ------------------------------------------------------------------------------------------------------------ the model


@pytest.mark.parametrize(
    ("changes", "mnk", "expected"),
    [
        # The start, and 1 stage, or 8: halves of them would cost 5148 more.
        ({}, (128, 128, 128), 7800 + 788),
        ({}, (1, 128, 1024), 7800 + 8 * 788),
        ({}, (128, 129, 1024), 7800 + 8 * 788),
        # 32 stages in 8 parts, which meet: 3100 and the tile's sums at 32 bytes a clock.
        ({}, (128, 128, 4096), 7800 + 4 * 788 + 3100 + 128 * 128 * 4 / 32),
        ({"most_split": 4}, (128, 128, 4096), 7800 + 8 * 788 + 3100 + 2048),
        # 40 tiles: 39 clusters of 3 run at once, so 2 parts; of 39 tiles, 3.
        ({}, (128, 40 * 128, 6144), 7800 + 24 * 788 + 5148),
        ({}, (128, 39 * 128, 6144), 7800 + 16 * 788 + 5148),
        # Whole tiles, 4 of each CTA, and 10 or 66 in halves; 67 are a round of their own.
        ({}, (128, 538 * 128, 4096), 7800 + (4 * 32 + 16) * 788 + 5148),
        ({}, (128, (528 + 66) * 128, 4096), 7800 + (4 * 32 + 16) * 788 + 5148),
        ({}, (128, (528 + 67) * 128, 4096), 7800 + 5 * 32 * 788),
        # Pairs, where they are faster: 67 of two rounds.
        ({"pair": 700}, (128, (128 + 5) * 128, 1024), 7800 + 2 * 8 * 700),
        # Memory: 132 stages of 9216 bytes at 2350 a clock, which two tiles of tokens share; a CTA's own at least.
        ({"stage": 100, "pair": 900}, (128, 132 * 128, 4096), 7800 + 32 * 132 * 9216 / 2350),
        ({"stage": 100, "pair": 900}, (256, 66 * 128, 4096), 7800 + 32 * 132 * 9216 / 2 / 2350),
        ({"stage": 100, "pair": 900, "alone": 600}, (128, 132 * 128, 4096), 7800 + 32 * 600),
        # Two CTAs of a multiprocessor share it where both are there.
        ({"ctas": 2}, (128, 264 * 128, 1024), 7800 + 8 * 2 * 788),
        ({"ctas": 2}, (128, 198 * 128, 1024), 7800 + 8 * 1.5 * 788),
    ],
)
def test_clocks_are_those_of_the_best_launch_shape(changes, mnk, expected):
    assert clocks(replace(SPEED, **changes), *mnk, 132) == int(expected)


# ----------------------------------------------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("activation", "act", "builds", "tokens", "least"),
    [
        ("fp8", "a8", ("a8_bf16_128", "a8_bf16_176"), (256, 384, 512, 768, 1024, 1536, 2048), (0.97, 0.99)),
        ("bf16", "a16", ("a16_bf16_64", "a16_bf16_64x128"), (40, 64), (0.97, 0.99)),
        ("bf16", "a16", ("a16_bf16_128", "a16_bf16_128x128"), (96, 128), (0.97, 0.99)),
        ("bf16", "a16", ("a16_bf16_128x128", "a16_bf16_192", "a16_bf16_256"), (192, 256, 320, 384), (0.97, 0.99)),
        ("bf16", "a16", ("a16_bf16_192", "a16_bf16_256"), (512, 768, 1024), (0.97, 0.99)),
    ],
)
def test_the_chosen_tile_is_the_fastest_that_was_measured(activation, act, builds, tokens, least):
    of_tokens, chosen = collections.defaultdict(list), collections.Counter()
    for problem in many_tokens.problems(act):
        m, n, k = problem["m"], problem["n"], problem["k"]
        if m not in tokens:
            continue
        best = {build: min(us for _, us in problem["builds"][f"{KERNEL}/{build}"]) for build in builds}
        tile = tiles.tile_for(wide(m, n, k, activation), SM90, 132, "w4")
        of_best = min(best.values()) / best[tile.builds["bfloat16"]]
        assert of_best >= least[0], f"M={m} N={n} K={k}: {best}"
        of_tokens[m].append(of_best)
        chosen[tile.builds["bfloat16"]] += 1
    assert {m: len(found) for m, found in of_tokens.items()} == dict.fromkeys(tokens, 8)
    assert min(chosen[build] for build in builds) >= 2  # each is the fastest somewhere
    for m, found in of_tokens.items():
        assert statistics.geometric_mean(found) >= least[1], f"M={m}: {found}"


def test_the_fastest_tile_is_chosen_only_of_those_that_fit_and_are_taken():
    def tile(takes=lambda _: True):
        found = tiles.tile_for(wide(1024, 28672, 4096), SM90, 132, "w4", takes)
        return found and found.builds["float16"]

    assert tile() == "a8_fp16_176"
    assert tile(lambda t: t.speed is None or t.speed.tokens != 176) == "a8_fp16_128"
    assert tile(lambda t: t.speed is None or t.speed.tokens != 128) == "a8_fp16_176"
    assert tile(lambda t: t.speed is None) is None


def test_a_first_row_without_a_speed_comes_before_any_that_has_one():
    first = tiles.tile_for(wide(32, 28672, 4096), SM90, 132, "w4")
    assert (first.builds["float16"], first.speed) == ("a8_fp16_32", None)
    assert any(tile.speed and tile.fits(wide(32, 28672, 4096), SM90, 132) for tile in tiles.tiles("w4"))


# ----------------------------------------------------------------------------------------------------------------- rows


def test_speeds_are_of_the_tiles_of_their_builds():
    timed = [tile for tile in tiles.tiles("w4") if tile.speed]
    assert {tile.activations for tile in timed} == {("fp8",), ("bf16",)}
    for tile in timed:
        speed = tile.speed
        for build in tile.builds.values():
            assert (speed.tokens, speed.rows, speed.ctas) == many_tokens.tile_of(build)
            defines = installed().kernel(tile.kernel).variant(build).defines
            assert f"FP4D_TOKENS={speed.tokens}" in defines
            assert ("FP4D_ACT=8" in defines) == (speed.stage_k == 128) == (tile.activations == ("fp8",))
        assert speed.stage_k in (64, 128)
        assert speed.weight_bytes == speed.rows * speed.stage_k * 9 // 16  # 4 bits, and 8 a block of 16


@pytest.mark.parametrize("key", ["token", "share", "clocks"])
def test_an_unknown_key_of_speed_is_refused(key):
    assert tiles.load({"tile": [ROW]}, installed(), "w4")[0].speed == SPEED
    with pytest.raises(FlagsError, match=f"w4_tiles.toml, {KERNEL} speed: unknown key '{key}' .known: "):
        tiles.load({"tile": [ROW | {"speed": ROW["speed"] | {key: 1}}]}, installed(), "w4")


def test_a_speed_without_all_of_its_keys_is_refused():
    speed = {key: value for key, value in ROW["speed"].items() if key not in ("stage", "pair")}
    with pytest.raises(FlagsError, match=f"w4_tiles.toml, {KERNEL} speed: key 'stage' is missing; key 'pair'"):
        tiles.load({"tile": [ROW | {"speed": speed}]}, installed(), "w4")
