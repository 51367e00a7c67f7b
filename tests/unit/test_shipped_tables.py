"""Shipped tables of tuned times: what a file must hold, when it is used, and the command that makes it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fp4dispatch import cli
from fp4dispatch.cli import tune_tables
from fp4dispatch.dispatch import choose, shipped, tuned
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.errors import InputError, SettingsError
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.machine import gpu_models
from fp4dispatch.problem import m_bucket
from fp4dispatch.problem.measurement import LaunchConfig, Measurement, Timing
from fp4dispatch.trust import facts
from fp4dispatch.tune import tuning
from tests.unit.test_tuned_launches import FP4, HERE, another, kernels, launched, new_process, tune  # noqa: F401

LAYER = ("nvfp4_gemm", "nvfp4", FP4.n, FP4.k)
FOLDER = shipped.FOLDER
KERNELS = facts.kernel_sources()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, kernels):  # noqa: F811
    """No table but those of the test."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "tables")
    monkeypatch.setattr(facts, "kernel_sources", lambda: "these kernels")
    (tmp_path / "tables").mkdir()
    return tmp_path / "tables"


def timing(backend, activation, us, launch=None):
    return Timing(backend, activation, us, 0.1, 15, launch)


def table(timings, m=16, layer=LAYER, **changes):
    found = shipped.Table(
        "H200 SXM", "these kernels", "2026-11-22", "replays", {"driver": "580.1"}, {layer: {m: timings}}
    )
    return replace(found, **changes)


def ship(folder, found):
    (folder / "h200-sxm.json").write_text(shipped.to_json(found))
    shipped._packaged.cache_clear()
    tuned.reset()
    choose.reset()


def good_table(us=10.0, slow=50.0):
    """w4a16 is faster than w4a8, which the rules choose, in a launch that is not the usual one."""
    good = another("w4a16", FP4)[1]
    return good, table((timing("w4a16", "bf16", us, good), timing("w4a8", "fp8", slow)))


# ------------------------------------------------------------------------------------------------------ when it is used

ONLY_A_LAYER = """
import sys
from fp4dispatch import FP4Linear
from fp4dispatch.backends.own.tiling import launches
from fp4dispatch.dispatch import shipped
from fp4dispatch.machine import system
from fp4dispatch.machine.nvml import Gpu
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90
from fp4dispatch.trust import facts

here = system.System(gpus=(Gpu(0, "NVIDIA H200", "GPU-1", SM90),))
system.current = lambda: here
facts.kernel_sources = lambda: shipped.of(here).kernels
print(launches.tuned("w4a8", Problem("nvfp4_gemm", 500, 4096, 4096, "fp8", "nvfp4"), 0).times[0])
"""


def test_a_process_that_only_runs_layers_finds_timed_launches():
    """No command that tunes or explains has been imported there."""
    run = subprocess.run([sys.executable, "-c", ONLY_A_LAYER], capture_output=True, text=True)
    assert "LaunchConfig(kernel='w4_gemm_sm90'" in run.stdout, run.stderr


def test_a_table_chooses_backend_and_launch_and_explain_says_so(folder, kernels):  # noqa: F811
    usual = another("w4a16", FP4)[0]
    assert choose.select(FP4).rule.id != "tuned"
    assert launched(kernels, "w4a16", FP4) == usual.shape
    good, found = good_table()
    ship(folder, found)
    decision = explain("nvfp4_gemm", 12, FP4.n, FP4.k)
    assert (decision.backend, decision.rule.id, decision.rule.source) == ("w4a16", "tuned", "shipped table of H200 SXM")
    assert (
        f"tuned: 10.0 us, launch shape {good} (quartiles 0.1 us apart, 15 repeats), on 2026-11-22, shipped table"
        in (str(decision))
    )
    assert launched(kernels, "w4a16", FP4) == good.shape
    for other in (replace(FP4, bias=True), replace(FP4, out_dtype="float16"), replace(FP4, activation="bf16")):
        assert choose.select(other).verdict("w4a16").measured
    assert choose.select(replace(FP4, m=17)).rule.id != "tuned"
    assert choose.select(replace(FP4, n=FP4.n + 8)).rule.id != "tuned"


def test_explain_of_a_gpu_by_name_decides_by_its_table_on_any_machine(folder, monkeypatch):
    asked = {"gpu": "H200 SXM", "cuda": "13.0", "nvcc": "13.0", "proven": True}
    _, found = good_table()
    ship(folder, found)
    decision = explain("nvfp4_gemm", 12, FP4.n, FP4.k, **asked)
    assert (decision.backend, decision.rule.id, decision.rule.source) == ("w4a16", "tuned", "shipped table of H200 SXM")
    assert explain("nvfp4_gemm", 12, FP4.n, FP4.k, **asked | {"gpu": "H100 SXM"}).rule.id != "tuned"
    assert explain("nvfp4_gemm", 12, FP4.n, FP4.k, backend="w4a8", **asked).backend == "w4a8"
    monkeypatch.setenv("FP4DISPATCH_TUNED", "off")
    assert explain("nvfp4_gemm", 12, FP4.n, FP4.k, **asked).rule.id != "tuned"


def test_what_the_user_has_tuned_comes_before_a_table(folder, kernels):  # noqa: F811
    good, found = good_table()
    ship(folder, found)
    usual = another("w4a16", FP4)[0]
    kernels.us = {usual: 20.0}
    mine = tune(FP4)  # measured, though a table holds
    assert mine.timings[0].launch == usual
    assert launched(kernels, "w4a16", FP4) == usual.shape != good.shape
    decision = choose.select(FP4)
    assert "20.0 us" in decision.verdict("w4a16").measured
    assert "fp4dispatch tune" in decision.rule.source
    tuned.clear()
    choose.reset()
    assert launched(kernels, "w4a16", FP4) == good.shape


@pytest.mark.parametrize("off", ["other kernels", "other GPU", "off", "ignored"])
def test_a_table_that_does_not_hold_is_not_used(folder, kernels, monkeypatch, off):  # noqa: F811
    usual = another("w4a16", FP4)[0]
    _, found = good_table()
    ship(folder, replace(found, kernels="others") if off == "other kernels" else found)
    if off == "other GPU":
        h100 = replace(HERE, gpus=(replace(HERE.gpus[0], name="NVIDIA H100 80GB HBM3"),))
        monkeypatch.setattr("fp4dispatch.machine.system.current", lambda: h100)
    elif off == "off":
        monkeypatch.setenv("FP4DISPATCH_TUNED", "off")
    elif off == "ignored":
        tuned.ignore(FP4)
    decision = explain("nvfp4_gemm", 16, FP4.n, FP4.k)
    assert decision.rule.id != "tuned"
    assert "tuned: " not in str(decision)
    assert launched(kernels, "w4a16", FP4) == usual.shape
    said = [note for note in decision.notes if "shipped table" in note]
    assert bool(said) is (off == "other kernels")
    assert not said or "is not used: it was measured with other sources of our kernels (others, here" in said[0]


def test_a_table_of_this_file_for_another_gpu_is_an_error(folder):
    _, found = good_table()
    ship(folder, replace(found, gpu="H100 SXM"))
    with pytest.raises(SettingsError, match=r"is the table of H100 SXM, not of H200 SXM"):
        choose.select(FP4)


# ------------------------------------------------------------------------------------------------------------- the file


def test_a_table_is_read_as_it_was_written(folder):
    _, found = good_table()
    path = folder / "t.json"
    path.write_text(shipped.to_json(found))
    assert shipped.load(path) == found
    assert shipped.file_name("RTX PRO 6000 Blackwell") == "rtx-pro-6000-blackwell.json"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(schema=2), "is of schema 2, this fp4dispatch reads 1"),
        (lambda d: d.pop("kernels"), "key 'kernels' is missing"),
        (lambda d: d.update(more=1), "unknown key 'more'"),
        (lambda d: d["facts"].update(driver=580), "driver must be str"),
        (lambda d: d["layers"].append(d["layers"][0]), "is there twice"),
        (lambda d: d["layers"][0].update(op="int4_gemm"), "int4_gemm"),
        (lambda d: d["layers"][0].update(n=0), "N=0 K=512 are no sizes"),
        (lambda d: d["layers"][0].update(m={"x": []}), "M='x' is no number of tokens"),
        (lambda d: d["layers"][0].update(m={"16": []}), "need timings, fastest first"),
        (lambda d: d["layers"][0]["m"]["16"].reverse(), "need timings, fastest first"),
        (lambda d: d["layers"][0]["m"]["16"][0].__setitem__(2, -1.0), "are no times"),
        (lambda d: d["layers"][0]["m"]["16"][0].__setitem__(1, "int4"), "is no timing"),
        (lambda d: d["layers"][0]["m"]["16"][0].__setitem__(5, ["k", "b", [1, "2"]]), "are not the numbers"),
        (lambda d: d["layers"][0]["m"]["16"][0].__setitem__(5, ["k", ""]), "M=16: "),
    ],
)
def test_a_wrong_file_is_refused(folder, change, said):
    _, found = good_table()
    data = json.loads(shipped.to_json(found))
    change(data)
    path = folder / "t.json"
    path.write_text(json.dumps(data))
    with pytest.raises(SettingsError, match=said):
        shipped.load(path)


def test_timings_are_checked_when_they_are_looked_up(folder):
    _, found = good_table()
    data = json.loads(shipped.to_json(found))
    data["layers"][0]["m"]["16"].reverse()
    path = folder / "t.json"
    path.write_text(json.dumps(data))
    (by_m,) = shipped.read(path).layers.values()
    with pytest.raises(SettingsError, match=r"layer 0, M=16: need timings, fastest first"):
        by_m[16]


def test_what_is_no_json_is_refused(folder):
    (folder / "t.json").write_text("{")
    with pytest.raises(SettingsError, match="cannot be read as JSON"):
        shipped.load(folder / "t.json")


def test_tables_that_ship_are_whole_and_name_builds_that_exist():
    catalog = installed()
    layers = set(tune_tables.layers([], None, None))
    assert sorted(path.name for path in FOLDER.glob("*")) == ["h100-sxm.json", "h200-sxm.json"]
    for path in FOLDER.glob("*"):
        found = shipped.load(path)
        assert set(found.layers) == layers
        assert {1, 16, 64, 1024} <= set.intersection(*map(set, found.layers.values()))
        assert found.kernels == KERNELS, "csrc or jit_flags have changed since (bench/notes/tuning.md)"
        assert path.name == shipped.file_name(found.gpu)
        assert gpu_models.named(found.gpu).name == found.gpu
        for by_m in found.layers.values():
            timed = [t for timings in by_m.values() for t in timings]
            for each in (t.launch for t in timed if t.launch):
                catalog.kernel(each.kernel).variant(each.build)
            named = {t.backend for t in timed}
            assert "cutlass" not in named, "it compiles for 45 s a tile: measure with FP4DISPATCH_DISABLE=cutlass"


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that is a CPU, one small model, and a measurement that takes no time."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    layer = SimpleNamespace(shard=lambda tp: (FP4.n // tp, FP4.k))
    small = SimpleNamespace(name="Small", layers=[layer], tp=(1, 2))
    monkeypatch.setattr(tune_tables.shapes, "catalogue", lambda: SimpleNamespace(models=(small,)))
    monkeypatch.setattr(tuning, "make_weights", lambda problem, device: problem)
    state = SimpleNamespace(asked=[], wrong=False, us=5.0)

    def tune_at(problem, copies, *, gpu, ranks, force):
        weights = copies.weights
        assert (weights.n, weights.k, weights.op) == (problem.n, problem.k, problem.op)
        state.asked.append((problem.scaling, problem.n, problem.m))
        launch = LaunchConfig("w4a16_small", "bf16", (16, 1, 2, 1, 1, 2, 2))
        left = (("w4a8", "wrong at this size: all of it"),) if state.wrong else ()
        return Measurement(problem, (timing("w4a16", "bf16", state.us, launch),), left, "2026-11-23", "replays")

    monkeypatch.setattr(tuning, "tune_at", tune_at)
    state.path = tmp_path / "out" / "h200-sxm.json"
    state.command = ["tune", "--model-shapes", "--out", str(tmp_path / "out"), "-m", "1,300"]
    return state


def test_it_measures_each_layer_of_the_models_and_writes_the_table(gpu, capsys):
    assert cli.main([*gpu.command, "--commit", "abc"]) == 0
    assert gpu.asked == [
        (scaling, n, m)
        for scaling in ("nvfp4", "row", "block128")
        for n in (FP4.n, FP4.n // 2)
        for m in (1, 384)
    ]  # fmt: skip
    found = shipped.load(gpu.path)
    assert (found.gpu, found.kernels, found.facts["commit"], found.method) == (
        *("H200 SXM", "these kernels", "abc", "replays"),
    )
    assert set(found.layers[LAYER]) == {1, 384}
    assert "6 layers measured, 0 left" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_refused_before_measuring(gpu, capsys):
    gpu.path.parent.write_text("a file")
    assert cli.main(gpu.command) == 1
    assert f"InputError: --out {gpu.path.parent}: no table can be written there" in capsys.readouterr().err
    assert gpu.asked == []


def test_it_goes_on_where_it_ended(gpu, capsys):
    assert cli.main([*gpu.command, "nvfp4_gemm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] == 2
    gpu.asked.clear()
    assert cli.main([*gpu.command, "--seconds", "0"]) == 0
    assert "0 layers measured, 4 left" in capsys.readouterr().out
    assert cli.main([*gpu.command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"] == 4
    assert {scaling for scaling, *_ in gpu.asked} == {"row", "block128"}
    assert len(shipped.load(gpu.path).layers) == 6
    gpu.us = 7.0
    assert cli.main([*gpu.command, "--force"]) == 0
    assert shipped.load(gpu.path).layers[LAYER][1][0].us == 7.0


def test_processes_share_a_table(gpu, capsys, monkeypatch):
    """A layer that another process measures is left to it; what it writes meanwhile is kept, and not measured again."""
    others = ("fp8_gemm", "block128", FP4.n, FP4.k)
    measure = tuning.tune_at

    def meanwhile(problem, *args, **options):
        if problem.scaling == "row":
            monkeypatch.setattr(tuning, "tune_at", measure)
            gpu.us = 9.0
            found = tune_tables.measure(others, (1,), 0, False)
            tune_tables.write(gpu.path, shipped.with_layer(shipped.load(gpu.path), others, found), found)
            gpu.us = 5.0
            gpu.asked.clear()
        return measure(problem, *args, **options)

    monkeypatch.setattr(tuning, "tune_at", meanwhile)
    with tune_tables.claimed(gpu.path, ("nvfp4_gemm", "nvfp4", FP4.n // 2, FP4.k)) as mine:
        assert mine
        assert cli.main([*gpu.command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["layers"], said["measured"], said["left"]) == (5, 4, 1)
    assert ("block128", FP4.n, 1) not in gpu.asked
    assert ("nvfp4", FP4.n // 2, 1) not in gpu.asked
    assert shipped.load(gpu.path).layers[others][1][0].us == 9.0
    assert cli.main([*gpu.command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["layers"], said["measured"], said["left"]) == (6, 1, 0)


def test_a_table_of_other_kernels_is_not_continued(gpu, monkeypatch, capsys):
    assert cli.main([*gpu.command, "nvfp4_gemm"]) == 0
    monkeypatch.setattr(facts, "kernel_sources", lambda: "other kernels")
    assert cli.main(gpu.command) == 1
    assert "measured with other kernels or libraries: it cannot be continued" in capsys.readouterr().err


def test_a_wrong_launch_is_exit_code_1_and_the_table_is_written(gpu, capsys):
    gpu.wrong = True
    assert cli.main([*gpu.command, "nvfp4_gemm"]) == 1
    assert "WRONG wrong at this size: all of it" in capsys.readouterr().err
    assert len(shipped.load(gpu.path).layers) == 2


def test_the_tokens_of_a_table_are_all_that_launches_are_timed_at():
    assert tune_tables.tokens()[:8] == (1, 2, 4, 8, 16, 24, 32, 48)
    assert tune_tables.tokens()[-2:] == (6144, 8192)
    assert {m_bucket(m) for m in range(1, 8193)} == set(tune_tables.tokens())


@pytest.mark.parametrize(
    "words",
    [
        ["--model-shapes"],
        ["--model-shapes", "--out", "x", "--list"],
        ["fp8_gemm", "--out", "x", "--nk", "64x64"],
        ["--model-shapes", "--out", "x", "--bias"],
    ],
)
def test_wrong_usage(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", *words])
    assert ended.value.code == 2
    assert "--model-shapes" in capsys.readouterr().err


def test_what_cannot_be_measured_is_refused(gpu, monkeypatch):
    with pytest.raises(InputError, match=r"'Smal' is not in shapes.toml. Did you mean Small\?"):
        tune_tables.layers(["Smal"], None, None)
    with pytest.raises(InputError, match="nvfp4_gemm has no weights of scaling row"):
        tune_tables.layers([], "nvfp4_gemm", "row")
    assert tune_tables.layers([], None, "tensor") == [("fp8_gemm", "tensor", n, FP4.k) for n in (FP4.n, FP4.n // 2)]
    unknown = replace(HERE, gpus=(replace(HERE.gpus[0], name="NVIDIA X1"),))
    with pytest.raises(InputError, match=r"NVIDIA X1 is not in gpu_models.toml"):
        tune_tables.model_of(unknown)


def test_list_names_the_table(folder, capsys):
    ship(folder, good_table()[1])
    assert cli.main(["tune", "--list"]) == 0
    assert "shipped table of H200 SXM, of 2026-11-22: 1 layers" in capsys.readouterr().out
