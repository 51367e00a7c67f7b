"""``fp4dispatch bench --suite random`` and bench/launch_samples.py: whole, on layers of a tiny model and told times."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import launch_samples
from fp4dispatch import cli
from fp4dispatch.backends.own import w4, w8a8
from fp4dispatch.backends.own.tiling import launch_model, predict, speeds
from fp4dispatch.backends.own.tiling.few_tokens import KERNELS
from fp4dispatch.backends.own.tiling.launch_model import LaunchShape
from fp4dispatch.backends.own.tiling.tiles import speed_of
from fp4dispatch.benchmark import random_run
from fp4dispatch.benchmark.methods import launches
from fp4dispatch.benchmark.methods.base import BASELINE
from fp4dispatch.benchmark.problems import sampling
from fp4dispatch.benchmark.reports import records
from tests import random_cases, w4_fake
from tests.bench_cases import HOPPER_ON_PAPER, PEAKS, Planted, measure

SUITE = ("bench", "--suite", "random", "--seed", "3", "--problems", "2", "--rounds", "2")
NVFP4 = ("--formats", "nvfp4", "--methods", "FP4Linear", "--methods", "FP4Linear/bf16")


@pytest.fixture
def few(monkeypatch):
    """Draw 5 and 40 tokens."""
    random_cases.hopper(monkeypatch)
    monkeypatch.setattr(sampling, "_tokens", lambda random_, least, most, count: [5, 40, 100, 200][:count])


def test_the_whole_command(few, monkeypatch, tmp_path, capsys):
    shapes = random_cases.kernels(monkeypatch)
    path, md = tmp_path / "x.json", tmp_path / "x.md"
    assert cli.main([*SUITE, *NVFP4, "--commit", "abc1234", "--json", str(path), "--md", str(md)]) == 0
    out = capsys.readouterr().out
    assert "2 of 2 random problems of seed 3" in out
    assert "PARTIAL" not in out
    assert "weights of less than 8e6 elements" in out
    assert "FP4Linear/bf16" in out
    doc = json.loads(path.read_text())
    records.keep(tmp_path, doc)
    assert records.read(tmp_path / "random-suite-seed-3-h200.json.xz") == doc
    assert (doc["kind"], doc["seed"], doc["stopped"], doc["left"]) == ("random suite", 3, "", [])
    assert {row["status"] for row in (*doc["measured"], *doc["launches"])} == {"ok"}
    assert {row["method"] for row in doc["measured"]} == {BASELINE, "FP4Linear", "FP4Linear/bf16"}
    assert [problem[2] for problem in doc["tried"]] == [5, 40]
    for m in (5, 40):
        finalists = [row for row in doc["launches"] if row["m"] == m]
        assert len(finalists) == 2 * random_run.FINALISTS
        assert sorted(row["entering"] for row in finalists) == ["bf16", "bf16", "row", "row"]
    assert {kernel for kernel, _ in shapes} == {"w4a16_small", "w4a8_small"}
    assert "| FP4Linear |" in md.read_text()


def test_a_run_whose_time_has_ended_is_partial(few, tmp_path, capsys):
    path = tmp_path / "x.json"
    assert cli.main([*SUITE, *NVFP4, "--no-regret", "--seconds", "0", "--json", str(path)]) == 0
    assert "PARTIAL: 0 of 2" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["left"]) == 2


def test_without_regret_no_launch_is_timed(few, tmp_path, capsys):
    assert cli.main([*SUITE, *NVFP4, "--no-regret"]) == 0
    assert "\n0 launches of ours were checked" in capsys.readouterr().out


def test_a_launch_that_is_wrong_fails_the_command_and_one_that_does_not_fit_does_not(
    few, monkeypatch, tmp_path, capsys
):
    random_cases.kernels(monkeypatch, refuse=lambda kernel, shape: kernel == "w4a16_small" and shape[1:3] == (2, 2))
    path = tmp_path / "x.json"
    assert cli.main([*SUITE, *NVFP4, "--json", str(path)]) == 0
    refused = json.loads(path.read_text())["refused"]
    assert refused
    assert all(re.match(r"launch w4a16 w4a16_small/bf16 \d+,2,2,", name) for name in refused), refused
    assert "do not fit this GPU, e.g. launch w4a16 w4a16_small" in capsys.readouterr().out
    random_cases.kernels(monkeypatch, harm=lambda kernel, shape, out: out[:, 3].zero_() if shape[2] == 4 else None)
    assert cli.main([*SUITE, *NVFP4, "--json", str(path)]) == 1
    wrong = [row for row in json.loads(path.read_text())["launches"] if row["status"] == "WRONG"]
    assert wrong
    assert all(row["us"] is None and row["method"].split()[3].split(",")[2] == "4" for row in wrong)


def test_a_launch_that_raises_stops_nobody(few, monkeypatch, tmp_path):
    def broken(kernel, shape, out):
        raise RuntimeError("no such thing")

    random_cases.kernels(monkeypatch, harm=broken)
    path = tmp_path / "x.json"
    assert cli.main([*SUITE, *NVFP4, "--json", str(path)]) == 1
    doc = json.loads(path.read_text())
    failed = [row for row in doc["launches"] if row["status"] == "failed"]
    assert {row["detail"] for row in failed} == {"RuntimeError: no such thing"}
    assert all(count > 0 for *_, count in doc["tried"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--suite", "random"), "needs --seed"),
        (("--suite", "random", "--seed", "1", "-m", "3"), "-m: not with --suite random"),
        (("--suite", "random", "--seed", "1", "--csv"), "--csv: not with --suite random"),
        (("--suite", "random", "--seed", "1", "--formats", "fp3"), "--formats fp3: need some of nvfp4,"),
        (("--suite", "random", "--seed", "1", "--problems", "0"), "problems=0"),
        (("--suite", "random", "--seed", "1", "--rounds", "1"), "two rounds"),
        (("--suite", "full", "--seed", "1"), "--seed: only with --suite random"),
        (("--no-regret",), "--no-regret: only with --suite random"),
    ],
)
def test_wrong_words_are_refused(few, words, said, capsys):
    assert cli.main(["bench", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_seed_can_be_listed_anywhere(capsys):
    assert cli.main(["bench", "--suite", "random", "--seed", "1", "--problems", "5", "--device", "cpu", "--list"]) == 0
    out = capsys.readouterr().out
    (layer, ms), *_ = sampling.sample(1, 5).shapes
    assert out.startswith(f"{layer.n}x{layer.k} M={','.join(map(str, ms))}: {layer.owner}\n")
    assert "FP8Linear/row/w8a8" in out
    assert "not here: needs a CUDA GPU" in out


def test_it_is_for_a_gpu(capsys):
    assert cli.main(["bench", "--suite", "random", "--seed", "1", "--device", "cpu"]) == 1
    assert "the suite random is for a GPU" in capsys.readouterr().err


def test_a_method_is_left_out_above_its_most_tokens():
    short = Planted("short")
    short.most_m = 8
    rows = measure([Planted(), short], ms=(8, 9)).rows
    assert [(row.m, row.method) for row in rows] == [(8, BASELINE), (8, "short"), (9, BASELINE)]


# ------------------------------------------------------------------------------------------------------------ launches


def test_launches_hold_every_build_and_what_a_backend_would_launch():
    found = {m: list(launches.launches(m, 4096, 4096, HOPPER_ON_PAPER)) for m in (1, 33, 100, 300, 5000)}
    every = [each for some in found.values() for each in some]
    gemms = {each.build for each in every}
    quantisers = {("w4_activations", "any"), ("fp8_quantize", "any")}
    assert set(launches.builds()) == gemms | quantisers
    for some in found.values():
        names = [each.name for each in some]
        assert len(set(names)) == len(names)
    for backend, op, scaling in ((w4.W4A16Backend(), "bf16", "nvfp4"), (w4.W4A8Backend(), "fp8", "nvfp4")):
        for m, some in found.items():
            family = next(f for f in launches.FAMILIES if (f.backend, f.activation) == (backend.name, op))
            (chosen, *_) = backend._kernels(family.problem(m, 4096, 4096), HOPPER_ON_PAPER.arch, 132)
            assert chosen in {each.build for each in some if each.family == family}
            assert scaling == family.format
    blackwell = replace(HOPPER_ON_PAPER, arch=None)
    assert list(launches.launches(1, 4096, 4096, blackwell)) == []


@pytest.mark.parametrize("m", [24, 700])
def test_of_each_kernel_only_what_the_model_puts_first_may_be_asked_for(m):
    h200 = replace(HOPPER_ON_PAPER, name="NVIDIA H200")
    constants = speeds.fitted()["H200 SXM"]
    every, four = (list(launches.launches(m, 4096, 4096, h200, first=first)) for first in (None, 4))
    assert [each for each in every if each in four] == four, "in the same order"

    def times(some, family, kernel):
        problem = family.problem(m, 4096, 4096)
        found = [each for each in some if each.family == family and each.build[0] == kernel and each.shape is not None]
        return sorted(predict.launch(*b, speed_of(*b), shape, problem, constants) for _, b, shape in found)

    kernels = {(each.family, each.build[0]) for each in every if each.shape is not None}
    assert len(kernels) == (10 if m == 24 else 9)
    for family, kernel in kernels:
        assert times(four, family, kernel) == times(every, family, kernel)[:4], "of all builds of a kernel"
    assert {each.build[1] for each in every if each.build[0] == "w4_gemm_sm90"} > {
        each.build[1] for each in four if each.build[0] == "w4_gemm_sm90"
    }
    own = [each for each in every if each.shape is None]
    assert own == [each for each in four if each.shape is None], "what a kernel chooses itself"
    unknown = replace(HOPPER_ON_PAPER, name="NVIDIA H300")
    assert list(launches.launches(m, 4096, 4096, unknown, first=4)) == every


def test_a_plan_of_a_given_build_and_shape(monkeypatch):
    shapes = random_cases.kernels(monkeypatch)
    w, backend = w4_fake.weights(128, 256), w4.W4A8Backend()
    prepared = backend.prepare(w)
    family = launches.FAMILIES[1]
    problem, x = family.problem(20, 128, 256), torch.randn(20, 256).bfloat16()
    outs = []
    given = (("w4a8_small", "bf16"), (32, 1, 2, 1, 2, 2, 2)), (("w4_gemm_sm90", "a8_bf16_64"), (1, 1, 8, 1, 0, 1))
    for build, shape in (*given, (("w4a8_small", "bf16"), None)):
        plan = backend.plan_with(problem, prepared, build, shape)
        outs.append(torch.full((20, 128), torch.nan, dtype=torch.bfloat16))
        backend.run(plan, prepared, x, outs[-1])
        assert plan.state.shape == (shape if build[0] == "w4_gemm_sm90" else None)
    assert shapes == [("w4a8_small", (32, 1, 2, 1, 2, 2, 2))]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert isinstance(w8a8.W8A8Backend().gemms(problem, None, 132), tuple)


# ------------------------------------------------------------------------------------------------------------- samples


def sampled(monkeypatch, tmp_path, *words):
    monkeypatch.setattr("sys.argv", ["x", "--seed", "3", "--commit", "abc", "--json", str(tmp_path), *words])
    return launch_samples.main()


def test_samples_are_taken_once_and_kept(few, monkeypatch, tmp_path, capsys):
    random_cases.kernels(monkeypatch, refuse=lambda kernel, shape: kernel == "w4a8_small" and shape[2] == 4)
    assert sampled(monkeypatch, tmp_path, "--problems", "2") == 0
    text = capsys.readouterr().out
    assert "2 of 2 problems in" in text
    assert "PARTIAL" not in text
    assert "w4a8 w4_gemm_sm90/a8_bf16_64: 2 problems, regret mean 1.000" in text
    record = records.read(tmp_path / "launch-samples-seed-3-h200.json.xz")
    assert (record["drawn"], record["gpu"]["copy"]) == (2, PEAKS.copy)
    for problem in record["problems"]:
        assert set(problem["layers"]) == {"FP4Linear", "FP8Linear/row", "FP8Linear/block128"}
        assert [None, 5.0] in problem["launches"]["w8a8 w8a8_small/bf16"]
        assert {shape[3] for shape, _ in problem["launches"]["w4a16 w4_gemm_sm90/a16_bf16_64x128"]} == {1}
        assert all(why.startswith("refused: ") for why in problem["wrong"].values())
        assert set(problem["with_quantiser"]) == {f"{f.backend} {f.format}" for f in launches.FAMILIES}
    monkeypatch.setattr(launch_samples.Sampler, "shape", lambda *_: pytest.fail("measured again"))
    assert sampled(monkeypatch, tmp_path, "--problems", "2") == 0
    for other in (("--commit", "def"), ("--whole",)):
        with pytest.raises(SystemExit, match="name another --json"):
            sampled(monkeypatch, tmp_path, "--problems", "2", *other)


def test_samples_of_small_weights_alone(few, monkeypatch, tmp_path):
    random_cases.kernels(monkeypatch)
    asked = "--problems", "4", "--near", "0", "--families", "w4a8 nvfp4"
    assert sampled(monkeypatch, tmp_path, *asked) == 0
    every = records.read(tmp_path / "launch-samples-seed-3-h200.json.xz")["problems"]
    largest = max(each["n"] * each["k"] for each in every)
    monkeypatch.setattr(launch_samples.sampling, "SMALL", largest)
    assert sampled(monkeypatch, tmp_path, *asked, "--small") == 0
    found = records.read(tmp_path / "launch-samples-small-seed-3-h200.json.xz")
    drawn = [(each["n"], each["k"], each["m"]) for each in every if each["n"] * each["k"] < largest]
    assert [(each["n"], each["k"], each["m"]) for each in found["problems"]] == drawn
    assert 0 < found["drawn"] == len(drawn) < len(every)


def test_samples_of_some_numbers_of_rows(few, monkeypatch, tmp_path, capsys):
    random_cases.kernels(monkeypatch)
    asked = "--problems", "8", "--near", "0", "--families", "w4a8 nvfp4"
    assert sampled(monkeypatch, tmp_path, *asked) == 0
    every = records.read(tmp_path / "launch-samples-seed-3-h200.json.xz")["problems"]
    least, *_, most = sorted({each["n"] for each in every})
    for rows in ((least, most), (least + 1, most), (least, most - 1)):
        kept = [each for each in every if each["n"] in range(rows[0], rows[1] + 1)]
        assert sampled(monkeypatch, tmp_path, *asked, "--rows", *map(str, rows)) == 0
        found = records.read(tmp_path / f"launch-samples-rows-{rows[0]}-to-{rows[1]}-seed-3-h200.json.xz")
        assert [(each["n"], each["k"], each["m"]) for each in found["problems"]] == [
            (each["n"], each["k"], each["m"]) for each in kept
        ]
        assert 0 < found["drawn"] == len(kept) <= len(every)
    with pytest.raises(SystemExit, match="2"):
        sampled(monkeypatch, tmp_path, *asked, "--rows", str(most), str(least))
    assert f"none of the 8 problems drawn is left for rows {most} to {least} seed 3" in capsys.readouterr().err


FEW = "--near", "0"


@pytest.mark.parametrize("words", [(), FEW, ("--families", "w4a8 nvfp4"), (*FEW, "--families", "w4a8 nvfp4")])
def test_samples_of_some_kernels(few, monkeypatch, tmp_path, words):
    random_cases.kernels(monkeypatch)
    assert sampled(monkeypatch, tmp_path, "--problems", "1", "--m", "9", "64", *words) == 0
    (problem,) = records.read(tmp_path / "launch-samples-seed-3-h200.json.xz")["problems"]
    backends = {name.split()[0] for name in problem["launches"]}
    kernels = {name.split()[1].partition("/")[0] for name in problem["launches"]}
    assert backends == ({"w4a8"} if "--families" in words else {"w4a16", "w4a8", "w8a16", "w8a8"})
    small = {kernel for kernel in KERNELS if kernel[:4] == "w4a8" or "--families" not in words}
    assert small <= kernels
    assert (kernels == small) == ("--near" in words)


def test_samples_of_the_launches_that_the_model_puts_first(few, monkeypatch, tmp_path):
    random_cases.kernels(monkeypatch)
    times = {}
    for near in (1, 2, 100):
        out = tmp_path / str(near)
        assert sampled(monkeypatch, out, "--problems", "1", "--m", "200", "300", "--near", str(near)) == 0
        (problem,) = records.read(out / "launch-samples-seed-3-h200.json.xz")["problems"]
        times[near] = {name: {tuple(shape) for shape, _ in some if shape} for name, some in problem["launches"].items()}
    n, k, m = (problem[key] for key in "nkm")
    many = [name for name in times[100] if speed_of(*name.split()[1].split("/")) is not None]
    assert many
    h200 = speeds.fitted()["H200 SXM"].many_tokens
    for name in times[100]:
        one, two, all_ = (times[near].get(name, set()) for near in (1, 2, 100))
        assert one <= two <= all_
        if name in many:
            tile = speed_of(*name.split()[1].split("/"))
            first = min(launch_model.clocks(tile, LaunchShape(*s), m, n, k, h200) for s in all_)
            assert {launch_model.clocks(tile, LaunchShape(*s), m, n, k, h200) for s in one} == {first}


def test_samples_near_what_the_models_put_first_of_each_tile_and_of_all():
    sampler = launch_samples.Sampler(HOPPER_ON_PAPER, random_cases.OneTime(), launches.FAMILIES, near=2)
    every = list(launches.launches(40, 4096, 4096, HOPPER_ON_PAPER))
    weight = SimpleNamespace(all=lambda m: iter(every), operands=SimpleNamespace(n=4096, k=4096))
    kept = list(sampler.worth_timing(weight, 40))
    small = [each for each in every if each.build == ("w4a8_small", "bf16") and each.shape is not None]
    us = {each: sampler.predicted(weight, each, 40) for each in small}
    in_order = sorted(small, key=us.__getitem__)
    wanted = set(in_order[: 2 * launch_samples.FIRST])
    for tile in {each.shape[:4] for each in small}:
        wanted |= set([each for each in in_order if each.shape[:4] == tile][:2])
    assert {each for each in kept if each in us} == wanted
    assert 2 * launch_samples.FIRST < len(wanted) < len(small), "a tile has some of its own, and not all are kept"
    assert {each for each in every if each.shape is None} <= set(kept)


def test_cublaslt_is_not_sampled_where_no_weight_is_by_row():
    gpu = SimpleNamespace(x=SimpleNamespace(device=torch.device("cuda")))
    assert launch_samples._scaled_mm(gpu, SimpleNamespace(all=lambda m: iter(())), None) is None


def test_samples_with_their_quantiser(few, monkeypatch, tmp_path):
    """The call that is timed quantises: with ``--whole`` every launch does, else only the fastest of a family."""
    random_cases.kernels(monkeypatch)
    quantised = Counter()
    real = launch_samples.Launcher.at

    def at(self, launch, x, out=None):
        quantised[launch.name] += 1
        return real(self, launch, x, out)

    monkeypatch.setattr(launch_samples.Launcher, "at", at)
    for words in ((), ("--whole",)):
        quantised.clear()
        out = tmp_path / str(len(words))
        assert sampled(monkeypatch, out, "--problems", "1", "--m", "9", "64", *FEW, *words) == 0
        record = records.read(out / "launch-samples-seed-3-h200.json.xz")
        (problem,) = record["problems"]
        launched = sum(map(len, problem["launches"].values()))
        assert len(quantised) == (launched if words else len(problem["with_quantiser"]))
        assert problem.get("whole", False) == bool(words)
        assert ("the quantiser, if there is one, and the GEMM" in record["method"]) == bool(words)


def test_samples_say_what_was_wrong_and_that_time_ended(few, monkeypatch, tmp_path, capsys):
    assert sampled(monkeypatch, tmp_path, "--problems", "2", "--seconds", "0") == 0
    assert "PARTIAL: 0 of 2 problems" in capsys.readouterr().out
    random_cases.kernels(monkeypatch, harm=lambda kernel, shape, out: out.zero_())
    assert sampled(monkeypatch, tmp_path, "--problems", "1") == 1


def test_the_table_of_samples_judges_the_launch_model():
    shapes = [[[1, 1, 8, 1, 0, 32], 10.0], [[1, 3, 8, 1, 0, 32], 8.0]]
    problem = {"n": 4096, "k": 4096, "m": 128, "bf16": 20.0, "with_quantiser": {"w4a8 nvfp4": 10.0}}
    problem |= {"layers": {"FP4Linear": 8.0, "FP8Linear/row": 20.0, "FP8Linear/block128": 40.0}}
    problem["launches"] = {"w4a8 w4_gemm_sm90/a8_bf16_128": sorted(shapes, key=lambda s: s[1])}
    ((regret, bias),) = launch_samples.model_fit([problem], launch_model.H200)["w4a8 w4_gemm_sm90/a8_bf16_128"]
    assert regret == 1.0
    assert 0.5 < bias < 2
    text = launch_samples.table([problem], launch_model.H200)
    assert "M 65-128 (1)  w4a8 nvfp4 2.00  [FP4Linear 2.50]  [FP8Linear/row 1.00]  [FP8Linear/block128 0.50]" in text
    problem["launches"]["w4a8 w4_gemm_sm90/a8_bf16_128"] = [[[2, 1, 8, 1, 0, 16], 6.0], *shapes]
    ((regret, _),) = launch_samples.model_fit([problem], launch_model.H200)["w4a8 w4_gemm_sm90/a8_bf16_128"]
    assert regret == pytest.approx(8 / 6)
