"""Corrections of the launch models: what the file cites and covers, what is refused, and that choices cost less."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from fp4dispatch.backends.own.tiling import (
    corrections,
    few_tokens_model,
    launch_model,
    launches,
    predict,
    search,
    speeds,
    tiles,
)
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS, FewTokensShape
from fp4dispatch.backends.own.tiling.tiles import speed_of
from fp4dispatch.benchmark.reports import records
from fp4dispatch.errors import FlagsError
from fp4dispatch.machine import gpu_models
from fp4dispatch.problem import Problem
from tests.cited import RESULTS, cited

H200, H100, NVL = (gpu_models.named(name) for name in ("H200 SXM", "H100 SXM", "H100 NVL"))
FEW, MANY = Problem("nvfp4_gemm", 24, 5120, 2560, "fp8"), Problem("fp8_gemm", 700, 6144, 4096, "fp8", "row")


@pytest.fixture(scope="module")
def packaged():
    return json.loads(corrections.FILE.read_text("utf-8"))


# ---- The file ----


def test_it_is_for_the_constants_that_ship(packaged, tmp_path):
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    now = fit_corrections.digest_of_speeds()
    assert packaged["speeds"] == now, "run bench/fit_corrections.py"
    text = speeds.FILE.read_text("utf-8")
    for key, counts in (("unfold", False), ("before_cublaslt", False), ("cublaslt", True), ("w8_row", True)):
        changed = re.sub(rf"^({key} = {{ start = )", r"\g<1>1", text, flags=re.MULTILINE)
        assert changed != text
        (tmp_path / "speeds.toml").write_text(changed, "utf-8")
        assert (fit_corrections.digest_of_speeds(tmp_path / "speeds.toml") != now) == counts, key


def test_it_cites_records_of_every_gpu_that_has_constants(packaged):
    gpus = {gpu_models.named(record.read()["facts"]["device"]).name for record in cited(packaged["records"])}
    assert gpus == set(speeds.fitted()), "of every GPU that has constants"


def test_every_build_with_a_launch_model_is_in_a_group():
    """So no build competes without a correction against others that have one."""
    found = {corrections.group(kernel, "bf16", blocks=False) for kernel in KERNELS}
    found |= {corrections.group("w8a8_small", "block_bf16", blocks=True), corrections.CUBLASLT}
    for table in ("w4", "w8"):
        for tile in tiles.tiles(table):
            if tile.speed is not None:
                found.add(
                    corrections.group(tile.kernel, tile.builds["bfloat16"], blocks=tile.scalings == ("block128",))
                )
    assert found == set(corrections.packaged())
    assert len(found) == 12


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(depth=4), "made for other features"),
        (lambda data: data["few"].reverse(), "made for other features"),
        (lambda data: data["many"].pop(), "made for other features"),
        (lambda data: data["cublaslt"].pop(0), "made for other features"),
        (lambda data: data["trees"]["cublaslt"][0][0].__setitem__(0, len(corrections.LT)), "asks for a feature"),
        (lambda data: data["trees"]["w4a8_small"][3][2].pop(), "needs 6 questions and 64 leaves"),
        (lambda data: data["trees"]["w4a8_small"][3][0].append(1), "needs 6 questions and 64 leaves"),
        (lambda data: data["trees"]["w8_gemm_sm90"][0][0].__setitem__(0, len(corrections.MANY)), "asks for a feature"),
        (lambda data: data["trees"]["w4a8_small"][0][0].__setitem__(0, -1), "asks for a feature"),
    ],
)
def test_a_file_that_does_not_fit_the_code_is_refused(packaged, change, said):
    data = json.loads(json.dumps(packaged))
    corrections.load(data)
    change(data)
    with pytest.raises(FlagsError, match=said):
        corrections.load(data)


# ---- The trees ----


def asked_one_by_one(trees, row):
    total = 0
    for features, bounds, leaves in trees:
        at = 0
        for feature, bound in zip(features, bounds, strict=True):
            at = 2 * at + (row[feature] > bound)
        total += leaves[at]
    return math.exp(corrections.UNIT * total)


@pytest.mark.parametrize("name", ["w4a8_small", "w8_gemm_sm90 block", "cublaslt"])
def test_all_trees_at_once_say_what_they_say_one_by_one(packaged, name):
    """On bounds, too: the answer there is no."""
    trees, found, draw = packaged["trees"][name], corrections.packaged()[name], random.Random(1)
    values = {i: [0.0] for i in range(max(map(len, (corrections.FEW, corrections.MANY, corrections.LT))))}
    for features, bounds, _ in trees:
        for feature, bound in zip(features, bounds, strict=True):
            values[feature] += [bound, bound * 1.001, bound - 0.001]
    factors = set()
    for _ in range(100):
        row = [draw.choice(values[i]) for i in values]
        want = min(max(asked_one_by_one(trees, row), 1 / corrections.MOST), corrections.MOST)
        assert found.factor(row) == pytest.approx(want, rel=1e-12)
        factors.add(found.factor(row))
    assert len(factors) > 50


@pytest.mark.parametrize(("leaf", "factor"), [(9000, corrections.MOST), (-9000, 1 / corrections.MOST), (1000, 1.10517)])
def test_a_correction_is_bounded(leaf, factor):
    tree = corrections.Tree([0] * corrections.DEPTH, [1.0] * corrections.DEPTH, [leaf] * 2**corrections.DEPTH)
    assert corrections.Correction([tree]).factor([0.0]) == pytest.approx(factor, rel=1e-5)


def test_a_fit_learns_what_features_do_together():
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    draw = np.random.default_rng(2)
    rows = draw.integers(0, 6, (2000, 4)).astype(float)
    left = 0.2 * (rows[:, 0] > 2) * (rows[:, 2] > 3) - 0.1 * (rows[:, 1] > 4)
    trees = fit_corrections.grown(rows[:1500], left[:1500], np.ones(1500), fit_corrections.TREES)
    said = np.array([math.log(asked_one_by_one(trees, row)) for row in rows[1500:]])
    assert np.abs(said - left[1500:]).max() < 0.02
    assert {feature for tree in trees[:5] for feature in tree.features} <= {0, 1, 2}, "the fourth says nothing"
    light = fit_corrections.grown(rows[:1500], left[:1500], np.full(1500, 1e-3), fit_corrections.TREES)
    assert max(abs(leaf) for leaf in light[0].leaves) < 0.1 * max(abs(leaf) for leaf in trees[0].leaves)


def test_bounds_lie_between_values():
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    assert fit_corrections.bounds_of(np.array([1.0, 1, 2, 4, 4])).tolist() == [1.5, 3.0]
    assert fit_corrections.bounds_of(np.array([3.0, 3, 3])).tolist() == []
    many = fit_corrections.bounds_of(np.arange(1000.0))
    assert 20 <= len(many) <= fit_corrections.BOUNDS
    assert all(each % 1 == 0.5 for each in many)


# ---- Predictions ----


def test_a_prediction_is_the_formula_times_the_factor():
    own = speeds.of(H100)
    plain = replace(own, corrections={})
    shape = FewTokensShape(24, 1, 2, 1, 2, 4, 4)
    row = corrections.of_few_tokens("w4a8_small", shape, 24, FEW.n, FEW.k, own.many_tokens, blocks=False)
    times = [predict.launch("w4a8_small", "bf16", None, shape, FEW, each) for each in (plain, own)]
    factor = own.corrections["w4a8_small"].factor(row)
    assert times[1] == pytest.approx(times[0] * factor)
    assert factor != 1.0
    tile = speed_of("w8_gemm_sm90", "bf16_128")
    for many in launch_model.first(tile, MANY.m, MANY.n, MANY.k, own.many_tokens, 3):
        row = corrections.of_many_tokens(tile, many.shape, MANY.m, MANY.n, MANY.k, own.many_tokens)
        asked = "w8_gemm_sm90", "bf16_128", tile, many.shape, MANY
        factor = own.corrections["w8_gemm_sm90"].factor(row)
        assert predict.launch(*asked, own) == pytest.approx(predict.launch(*asked, plain) * factor)


def test_features_are_those_that_are_named():
    gpu = speeds.of(H100).many_tokens
    usable = gpu.usable
    shape = FewTokensShape(24, 1, 2, 1, 2, 4, 4)  # two on an SM: registers
    few = dict(
        zip(
            corrections.FEW,
            corrections.of_few_tokens("w4a8_small", shape, 40, 5100, 2560, gpu, blocks=False),
            strict=True,
        )
    )
    assert (few["tokens"], few["cluster"], few["stages"], few["resident"]) == (24, 2, 4, 2)
    assert few["ctas_by_sms"] == pytest.approx(320 / 132)  # 80 row blocks, two parts of K, two tiles of tokens
    assert few["ctas_by_slots"] == pytest.approx(320 / (2 * gpu.usable[1]))
    assert few["last_by_slots"] == pytest.approx(few["ctas_by_slots"] - 1)
    whole = corrections.of_few_tokens("w4a8_small", shape, 24, 64 * usable[1], 2560, gpu, blocks=False)
    assert whole[corrections.FEW.index("last_by_slots")] == 1.0, "two waves that are full"
    assert (few["stages_of_k"], few["rings"], few["even"]) == (5, 1.25, 1.0)  # 20 stages on four groups
    assert (few["token_tiles"], few["tokens_filled"]) == (2, pytest.approx(40 / 48))
    assert few["rows_filled"] == pytest.approx(5100 / 5120)
    three = corrections.of_few_tokens("w4a8_small", shape, 3, 5100, 2560, gpu, blocks=False)
    eight = corrections.of_few_tokens("w4a8_small", shape, 8, 5100, 2560, gpu, blocks=False)
    at = corrections.FEW.index("m")
    assert (three[at], eight[at]) == (3, 8)
    assert (*three[:at], *three[at + 1 :]) == (*eight[:at], *eight[at + 1 :]), "all else is for 8 tokens"
    assert [few[name] for name in corrections.SIZES] == [40, 5100, 2560, 5100 * 2560, gpu.memory_bytes]
    assert gpu.memory_bytes < speeds.of(H200).many_tokens.memory_bytes
    tile = speed_of("w8_gemm_sm90", "bf16_128")
    shape = launch_model.LaunchShape(1, 2, 8, 1, 1, 66)
    many = dict(zip(corrections.MANY, corrections.of_many_tokens(tile, shape, 700, 6100, 4096, gpu), strict=True))
    assert (many["tokens"], many["rows"], many["split"], many["rounds"], many["clusters"]) == (128, 128, 2, 1, 66)
    assert (many["token_tiles"], many["row_tiles"]) == (6, 48)
    assert (many["waves"], many["last_wave"]) == (pytest.approx(288 / 132), pytest.approx(24 / 132))
    assert (many["parts_by_slots"], many["stages_of_k"], many["stages_of_part"]) == (pytest.approx(576 / 132), 32, 16)
    assert (many["tokens_filled"], many["rows_filled"]) == (pytest.approx(700 / 768), pytest.approx(6100 / 6144))
    assert [many[name] for name in corrections.SIZES] == [700, 6100, 4096, 6100 * 4096, gpu.memory_bytes]


def test_the_launch_that_is_chosen_is_the_fastest_of_those_that_the_formulas_put_first():
    own = speeds.of(H100)
    few, usable, moved = own.few_tokens["w4a8_small"], own.many_tokens.usable, 0
    for m in (8, 24, 40, 64, 96):
        asked = replace(FEW, m=m)
        first = few_tokens_model.first("w4a8_small", few, m, FEW.n, FEW.k, usable, False, search.FEW_CORRECTED)
        times = {each.shape: predict.launch("w4a8_small", "bf16", None, each.shape, asked, own) for each in first}
        found = search.few_tokens("w4a8_small", asked, own)
        assert (found.shape, found.us) == min(times.items(), key=lambda each: each[1])
        assert [each.us for each in first] == sorted(each.us for each in first)
        assert len({each.shape.stages for each in first}) > 1, "with any ring"
        moved += found.shape != first[0].shape
    assert moved, "some are corrected"
    tile = speed_of("w8_gemm_sm90", "bf16_128")
    many = search.many_tokens("w8_gemm_sm90", "bf16_128", tile, MANY, own)
    times = {
        each.shape: predict.launch("w8_gemm_sm90", "bf16_128", tile, each.shape, MANY, own)
        for each in launch_model.first(tile, MANY.m, MANY.n, MANY.k, own.many_tokens, search.MANY_CORRECTED)
    }
    assert (many.shape, many.us) == min(times.items(), key=lambda each: each[1])
    assert search.gemm("w8_gemm_sm90", "bf16_128", tile, MANY, own) == many.us


def test_builds_for_float16_get_the_launches_of_bfloat16():
    own = speeds.of(H100)
    asked = [replace(MANY, m=m) for m in range(130, 1000, 50)]
    shapes = {
        dtype: [launches.best_shape("w8_gemm_sm90", f"{dtype}_128", each, own) for each in asked]
        for dtype in ("bf16", "fp16")
    }
    assert shapes["fp16"] == shapes["bf16"]
    tile = speed_of("w8_gemm_sm90", "bf16_128")
    formulas = [tuple(launch_model.best(tile, each.m, each.n, each.k, own.many_tokens).shape) for each in asked]
    assert shapes["bf16"] != formulas, "some are corrected"


def test_scaled_constants_have_no_corrections():
    """Nobody has measured that they hold on other GPUs."""
    assert not speeds.of(NVL).corrections
    assert speeds.of(H100).corrections == speeds.of(H200).corrections == corrections.packaged()
    scaled = speeds.of(NVL)
    found = search.few_tokens("w4a8_small", FEW, scaled)
    few = scaled.few_tokens["w4a8_small"]
    usable = scaled.many_tokens.usable
    assert found == few_tokens_model.best("w4a8_small", few, 24, FEW.n, FEW.k, usable, False)


def test_cublaslt_is_corrected_by_its_problem_alone_also_behind_weights_that_are_written_out():
    own = speeds.of(H100)
    plain = replace(own, corrections={})
    factor = own.corrections["cublaslt"].factor(corrections.of_cublaslt(MANY.m, MANY.n, MANY.k, own.many_tokens))
    assert factor != 1.0
    assert predict.cublaslt(MANY, own) == pytest.approx(predict.cublaslt(MANY, plain) * factor)
    fp4 = replace(MANY, op="nvfp4_gemm", scaling="nvfp4")
    with_, without = (search.gemm(predict.UNFOLD, "any", None, fp4, each) for each in (own, plain))
    assert with_ - without == pytest.approx(predict.cublaslt(MANY, own) - predict.cublaslt(MANY, plain))
    assert predict.cublaslt(MANY, speeds.of(NVL)) == speeds.of(NVL).cublaslt.microseconds(700, 6144, 4096, 132)


def test_features_of_cublaslt():
    gpu = speeds.of(H200).many_tokens
    found = dict(zip(corrections.LT, corrections.of_cublaslt(700, 6100, 4100, gpu), strict=True))
    assert found["waves_128x256"] == 2  # 6 x 24 tiles on 132 SMs
    assert found["wave_filled_128x256"] == pytest.approx(144 / 264)
    assert (found["waves_64x128"], found["tokens_filled_64x128"]) == (4, pytest.approx(700 / 704))
    assert found["rows_filled_256x128"] == pytest.approx(6100 / 6144)
    assert (found["stages_of_k"], found["m"], found["k"]) == (33, 700, 4100)
    assert (found["weights"], found["memory"]) == (6100 * 4100, gpu.memory_bytes)


# ---- Samples ----


def test_choices_cost_less_on_samples_that_nothing_was_fitted_to(packaged):
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    path = RESULTS / "launch-samples-seed-92-h100.json.xz"
    fitted_to = cited([*packaged["records"], *speeds.of(H100).records])
    assert records.stem(path) not in {record.name for record in fitted_to}
    some = [*fit_corrections.launches_of([path], few=True), *fit_corrections.launches_of([path], few=False)]
    rows = fit_corrections.judged(some, corrections.packaged())[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert {row[0] for row in cells} == {
        *("w4_gemm_sm90 a8", "w4a8_small", "w8_gemm_sm90", "w8_gemm_sm90 block", "w8a8_small", "w8a8_small block128"),
    }
    weights = [int(row[2]) for row in cells]

    def mean(column, part=0):
        values = [float(row[column].split(",")[part]) for row in cells]
        return statistics.fmean(v * w for v, w in zip(values, weights, strict=True)) / statistics.fmean(weights)

    assert mean(3) - 1 > 1.6 * (mean(4) - 1), "what a choice costs, in the mean"
    assert mean(3, 1) - 1 > 1.4 * (mean(4, 1) - 1), "and at 95 %"
    assert mean(5) > 1.4 * mean(6), "spread of predictions"


def test_cublaslt_is_predicted_better_on_samples_that_nothing_was_fitted_to(packaged):
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    paths = [RESULTS / f"launch-samples-seed-{seed}-h100.json.xz" for seed in (92, 86)]
    fitted_to = cited([*packaged["records"], *speeds.of(H100).records])
    assert not {records.stem(path) for path in paths} & {record.name for record in fitted_to}
    rows = fit_corrections.judged_cublaslt(fit_corrections.cublaslt_of(paths), corrections.packaged())[2:]
    table = [row.strip("| ").split(" | ") for row in rows]
    counts = {"1-16": 34, "17-64": 86, "65-128": 55, "129-1024": 91, "from 1025": 80}
    assert {tokens: int(problems) for tokens, problems, *_ in table} == counts, "as the records have"
    off = {tokens: [float(each) for each in cells] for tokens, _, *cells in table}
    for tokens in ("65-128", "129-1024", "from 1025"):
        assert off[tokens][0] > 1.4 * off[tokens][1], tokens


def test_a_problem_without_cublaslt_has_no_row_for_it():
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    p = {"n": 1024, "k": 8192, "m": 64}
    record = {"subject": "x", "facts": {"device": "y"}, "problems": [p, p | {"scaled_mm": 7.5, "m": 65}]}
    ((problem, us),) = fit_corrections.timed_cublaslt(record)
    assert (problem.op, problem.m, problem.scaling, us) == ("fp8_gemm", 65, "row", 7.5)


def test_launches_that_layers_do_not_choose_are_not_fitted_to():
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    own = replace(speeds.of(H100), corrections={})
    few = {"w4a8 w4a8_small/bf16": [[None, 3.0], [[64, 1, 2, 1, 1, 7, 7], 9.0], [[64, 1, 2, 1, 1, 8, 8], 9.0]]}
    few |= {"w8a16 w8a16_small/bf16": [[[8, 1, 4, 2, 1, 2, 1], 9.0]]}
    few |= {"w8a8 w8_gemm_sm90/bf16_128": [[[1, 1, 8, 1, 0, 8], 7.0]]}
    p = {"n": 1024, "k": 8192, "m": 64, "launches": few}
    record = {"subject": "x", "facts": {"device": "NVIDIA H100 80GB HBM3"}, "problems": [p | {"whole": True}]}

    def found(record, few):
        return [(each.kernel, each.us) for each in fit_corrections.timed(record, own, few=few)]

    less = 9.0 - own.quantisers["w4_row"].microseconds(64, 8192)
    assert found(record, True) == [("w4a8_small", pytest.approx(less)), ("w8a16_small", 9.0)], "no ring fills an SM"
    assert [kernel for kernel, _ in found(record, False)] == ["w8_gemm_sm90"]
    assert found(record | {"problems": [p]}, True) == [("w8a16_small", 9.0)], "FP8 activations: with their quantiser"


def test_fp8_launches_for_few_tokens_of_older_kernels_are_judged_on_but_not_fitted_to(monkeypatch):
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    few = {"w4a8 w4a8_small/bf16": [[[64, 1, 2, 1, 1, 7, 7], 9.0]]}
    few |= {
        "w8a16 w8a16_small/bf16": [[[8, 1, 4, 2, 1, 2, 1], 9.0]],
        "w8a8 w8_gemm_sm90/bf16_128": [[[1, 1, 8, 1, 0, 8], 7.0]],
    }
    problem = {"n": 1024, "k": 8192, "m": 64, "launches": few, "whole": True}
    own = replace(speeds.of(H100), corrections={})

    def found(date, **options):
        record = {"subject": "x", "facts": {"device": "NVIDIA H100 80GB HBM3", "date": date}, "problems": [problem]}
        monkeypatch.setattr(fit_corrections, "records_of", lambda paths: [(record, own)])
        return [each.kernel for each, _ in fit_corrections.launches_of([], **options)]

    both = ["w4a8_small", "w8a16_small"]
    assert found("2026-11-25", few=True, since=fit_corrections.SINCE) == ["w8a16_small"]
    assert found(fit_corrections.SINCE, few=True, since=fit_corrections.SINCE) == both
    assert found("2026-11-25", few=True) == both, "judging"
    assert found("2026-11-25", few=False) == ["w8_gemm_sm90"], "many tokens"


def suite(*rows, layers=()):
    """A record of a random suite, of launches: M, the name, microseconds; and of layers: the method before them."""
    size = {"n": 1024, "k": 8192}
    launches = [size | {"m": m, "method": f"launch {name}", "us": us} for m, name, us in rows]
    measured = [size | {"m": m, "method": method, "ran": ran, "us": us} for method, m, ran, us in layers]
    formats = {"FP4Linear": "nvfp4", "FP8Linear/tensor": "tensor", "torch/bf16": "bf16"}
    return {
        "methods": {name: {"format": fmt} for name, fmt in formats.items()},
        "measured": measured,
        "kind": "random suite",
        "subject": "seed 1",
        "facts": {"device": "NVIDIA H100 80GB HBM3", "date": "2026-11-28"},
        "problems": 200,
        "launches": launches,
    }


def test_launches_that_a_suite_timed_are_read_as_samples_are():
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    small, many = "w4a8 w4a8_small/bf16", "w8a8 w8_gemm_sm90/bf16_128"
    record = fit_corrections.as_samples(
        suite(
            (64, f"{small} 64,1,2,1,1,7,7", 9.0),
            (64, f"{small} 64,1,2,1,1,6,6", 8.0),
            (64, small, 7.0),
            (64, f"{small} 48,1,2,1,1,6,6", None),
            (64, f"{many} 1,1,8,1,0,8", 6.0),
            (32, f"{many} 1,1,8,1,0,8", 5.0),
            layers=(
                ("torch/bf16", 64, "", 10.0),
                ("FP4Linear", 64, f"{small} 64,1,2,1,1,7,7", 9.1),  # among the launches too
                ("FP4Linear", 64, f"{small} 16,1,2,1,1,4,4", 8.5),
                ("FP4Linear", 32, small, 7.0),
                ("FP8Linear/tensor", 64, f"{many} 1,1,8,1,0,7", 4.0),  # quantises otherwise
            ),
        )
    )
    first, second = record["problems"]
    assert (first["n"], first["k"], first["m"], second["m"]) == (1024, 8192, 64, 32)
    assert first["launches"] == {
        small: [[[64, 1, 2, 1, 1, 7, 7], 9.0], [[64, 1, 2, 1, 1, 6, 6], 8.0], [[16, 1, 2, 1, 1, 4, 4], 8.5]],
        many: [[[1, 1, 8, 1, 0, 8], 6.0]],
    }
    own = replace(speeds.of(H100), corrections={})
    quantised = own.quantisers["w4_row"].microseconds(64, 8192)
    found = [each.us for each in fit_corrections.timed(record, own, few=True)]
    assert found == [pytest.approx(us - quantised) for us in (9.0, 8.0, 8.5)], "timed with their quantiser"
    samples = {"kind": "launch samples", "problems": []}
    assert fit_corrections.as_samples(samples) is samples


def test_a_suite_says_which_launch_is_faster_and_not_how_fast_all_are():
    """Twice the time of each launch of a problem changes nothing; twice that of one does."""
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    known = speeds.of(H100)
    plain = replace(known, corrections={})
    small = [(64, f"w4a8 w4a8_small/bf16 64,1,2,1,1,{stages},{stages}") for stages in (5, 6, 7)]
    small.append((32, "w8a16 w8a16_small/bf16 32,1,2,2,2,2,1"))

    def found(*times):
        record = fit_corrections.as_samples(suite(*((*each, us) for each, us in zip(small, times, strict=True))))
        launches = [(each, plain) for each in fit_corrections.timed(record, plain, few=True)]
        return [each.us for each, _ in fit_corrections.levelled(launches, known.corrections)]

    less = plain.quantisers["w4_row"].microseconds(64, 8192)
    once, twice = found(8 + less, 9 + less, 10 + less, 5), found(16 + less, 18 + less, 20 + less, 5)
    assert twice == pytest.approx(once)
    assert once[1] / once[0] == pytest.approx(9 / 8)
    assert found(8 + less, 9 + less, 20 + less, 5)[2] == pytest.approx(2 * once[2])
    alone = fit_corrections.Timed(
        (), "w8a16_small", "bf16", (32, 1, 2, 2, 2, 2, 1), Problem("fp8_gemm", 32, 1024, 8192, "bf16", "row"), 1.0
    )
    assert once[3] == pytest.approx(fit_corrections.predicted(alone, known)), (
        "the only one of its problem: as predicted"
    )


def test_what_a_suite_timed_changes_the_trees(monkeypatch):
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    monkeypatch.setattr(fit_corrections, "TREES", 3)
    plain = replace(speeds.of(H100), corrections={})
    shapes = [(64, 1, 2, 1, 1, stages, stages) for stages in (4, 5, 6, 7)]

    def launch(shape, times):
        empty = fit_corrections.Timed(shape, "w4a8_small", "bf16", shape, replace(FEW, m=64), 1.0)
        return empty._replace(us=times * fit_corrections.predicted(empty, plain)), plain

    samples, of_suite = [launch(shape, 1.0) for shape in shapes], [launch(shapes[-1], 1.3)] * 40
    assert fit_corrections.by_group(of_suite).keys() == {"w4a8_small"}
    none, some = (fit_corrections.fit(samples, of_suites=suites)["w4a8_small"] for suites in ((), of_suite))
    assert not any(unit for tree in none for unit in tree.leaves), "nothing is left of what is predicted"
    assert any(unit > 0 for tree in some for unit in tree.leaves)
    monkeypatch.setattr(fit_corrections, "OF_SUITE", 0.0)
    without = fit_corrections.fit(samples, of_suites=of_suite)["w4a8_small"]
    assert not any(unit for tree in without for unit in tree.leaves), "a suite without weight says nothing"
    assert fit_corrections.fit(samples, ["w8a8_small"], of_suite) == {}


def test_judging_on_what_was_fitted_to_is_refused(monkeypatch, capsys):
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    monkeypatch.setattr("sys.argv", ["x", "--few", "a.json", "--many", "b.json", "--judge", "b.json"])
    with pytest.raises(SystemExit):
        fit_corrections.main()
    assert "b.json: judged on what it is fitted to" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["x", "--few", "a", "--many", "b", "--suites", "c.json", "--judge", "c.json"])
    with pytest.raises(SystemExit):
        fit_corrections.main()
    assert "c.json: judged on what it is fitted to" in capsys.readouterr().err


def test_groups_that_are_not_asked_for_keep_their_trees(packaged, tmp_path, monkeypatch, capsys):
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    path, asked = tmp_path / "corrections.json", "w8_gemm_sm90"
    path.write_text(corrections.FILE.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(corrections, "FILE", path)
    monkeypatch.setattr(fit_corrections, "TREES", 2)
    sample = str(RESULTS / "launch-samples-seed-131-h200.json.xz")
    fitted = {each.path for each in cited(packaged["records"])}
    suites = sorted(RESULTS.glob("random-suite-seed-*-h200.json.xz"))
    suite_of_h200 = str(next(each for each in suites if each not in fitted))
    monkeypatch.setattr("sys.argv", ["x", "--many", sample, "--only", asked, "--write"])
    fit_corrections.main()
    found = json.loads(path.read_text("utf-8"))
    assert len(found["trees"][asked]) == 2
    assert {**found["trees"], asked: None} == {**packaged["trees"], asked: None}
    assert {*found["records"]} > {*packaged["records"]}
    monkeypatch.setattr("sys.argv", ["x", "--many", sample, "--suites", suite_of_h200, "--only", asked, "--write"])
    fit_corrections.main()
    with_suite = json.loads(path.read_text("utf-8"))
    assert with_suite["trees"][asked] != found["trees"][asked]
    assert {**with_suite["trees"], asked: None} == {**packaged["trees"], asked: None}
    (added,) = {*with_suite["records"]} - {*found["records"]}
    (record,) = cited([added])
    assert record.path == Path(suite_of_h200)
    record.read()
    for words, said in ((["--only", "w9"], "--only w9: groups are "), ([], "needs --few and --many, or --only")):
        monkeypatch.setattr("sys.argv", ["x", "--many", sample, *words])
        with pytest.raises(SystemExit):
            fit_corrections.main()
        assert said in capsys.readouterr().err


def test_the_file_is_written_as_it_is_read(packaged):
    pytest.importorskip("scipy", reason="scipy is not installed")
    from bench import fit_corrections

    trees = {name: [corrections.Tree(*each) for each in some] for name, some in packaged["trees"].items()}
    assert fit_corrections.text(trees, packaged["records"]) == corrections.FILE.read_text("utf-8")
