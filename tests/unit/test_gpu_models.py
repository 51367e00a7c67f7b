"""Facts of GPU models: the table, NVML where the table has none, and predictions in ``explain``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import pytest

from fp4dispatch import cli, explain, strict_toml
from fp4dispatch.backends import predictions as asked
from fp4dispatch.backends import registry
from fp4dispatch.backends.libraries import cublaslt
from fp4dispatch.backends.own.tiling import predict, search, speeds
from fp4dispatch.benchmark.reports import records
from fp4dispatch.dispatch import here
from fp4dispatch.errors import FlagsError, InputError
from fp4dispatch.machine import gpu_models, nvml
from fp4dispatch.machine.nvml import Gpu
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90, Arch
from fp4dispatch.problem.prediction import MARGIN
from tests import many_tokens

H200 = gpu_models.named("H200 SXM")


def test_the_models_that_users_have_are_there():
    names = {model.name for model in gpu_models.models()}
    assert {"H100 SXM", "H100 PCIe", "H100 NVL", "H200 SXM", "L40S", "RTX 4090", "RTX 5090", "B200"} <= names
    assert gpu_models.named("nvidia h100 80gb hbm3").name == "H100 SXM"
    assert gpu_models.named("H100") is None, "there are three of that name"


def test_what_is_fitted_names_a_record():
    fitted = {model.name: model.fitted for model in gpu_models.models() if model.fitted}
    assert set(fitted) == {"H200 SXM"}
    for name in fitted.values():
        assert records.read(many_tokens.RESULTS / f"{name}.json")["facts"]["device"] == "NVIDIA H200"


GOOD = """
[[gpu]]
name = "A"
names = ["NVIDIA A"]
arch = "9.0"
sms = 132
clock_mhz = 1980
memory_gbs = 3350
l2_mib = 50
source = "https://example.com/a"
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("sms = 132", "sms = 0", "sms is 0"),
        ("sms = 132", "sms = 132.5", "sms must be int"),
        ("memory_gbs = 3350", "memory_gbs = -1", "memory_gbs is -1"),
        ('["NVIDIA A"]', "[]", "need the names"),
        ("https://example.com/a", "a book", "need an address"),
        ("l2_mib = 50\n", "", "'l2_mib' is missing"),
        ('["NVIDIA A"]', '["A"]', "A is there twice"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, old, new, said):
    path = tmp_path / "gpu_models.toml"
    path.write_text(GOOD)
    assert gpu_models.load(path)[0].memory_gbs == 3350
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(FlagsError, match=said):
        gpu_models.load(path)


def test_a_gpu_of_the_table_a_part_of_one_and_one_of_another_arch():
    assert gpu_models.of(Gpu(0, "NVIDIA H200", "GPU-1", SM90)) == H200
    assert gpu_models.of(Gpu(0, "NVIDIA H200 MIG 1g.18gb", "MIG-1", SM90)) is None
    assert gpu_models.of(Gpu(0, "NVIDIA H200", "GPU-1", Arch(8, 0))) is None


def nvml_of(monkeypatch, **answers):
    """An NVML that answers so; None: not supported."""
    known = {"cores": 16896, "sm": 1980, "memory": 3201, "bits": 6144} | answers

    def ask(key):
        if known[key] is None:
            raise RuntimeError("NVML_ERROR_NOT_SUPPORTED")
        return known[key]

    fake = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetNumGpuCores=lambda handle: ask("cores"),
        nvmlDeviceGetMaxClockInfo=lambda handle, which: ask(which),
        nvmlDeviceGetMemoryBusWidth=lambda handle: ask("bits"),
        NVML_CLOCK_SM="sm",
        NVML_CLOCK_MEM="memory",
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    gpu_models._asked.cache_clear()


def test_nvml_answers_for_a_model_that_is_not_in_the_table(monkeypatch):
    nvml_of(monkeypatch)
    found = gpu_models.of(Gpu(0, "NVIDIA H300", "GPU-1", SM90))
    assert (found.name, found.arch, found.sms, found.clock_mhz) == ("NVIDIA H300", SM90, 132, 1980)
    assert found.memory_gbs == pytest.approx(H200.memory_gbs, rel=0.03)
    assert (found.l2_mib, found.source, found.fitted) == (0, "NVML", "")
    nvml_of(monkeypatch, cores=6912)
    assert gpu_models.of(Gpu(0, "NVIDIA A300", "GPU-2", Arch(8, 0))).sms == 108


@pytest.mark.parametrize("lacking", ["cores", "sm", "memory", "bits"])
def test_what_nvml_does_not_know_is_no_guess(monkeypatch, lacking):
    nvml_of(monkeypatch, **{lacking: None})
    assert gpu_models.of(Gpu(0, "NVIDIA H300", "GPU-1", SM90)) is None


def test_without_nvml_there_are_no_facts(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.speed("GPU-1") is None


# --------------------------------------------------------------------------------------------------------- predictions


MACHINE = {"cuda": "13.0", "nvcc": "13.0", "proven": True}


def test_a_backend_predicts_its_fastest_build_and_its_quantiser():
    found = speeds.of(H200)
    tiles = [many_tokens.tile_of("w4_gemm_sm90", name) for name in many_tokens.A16_BUILDS]
    builds = [f"w4_gemm_sm90/{name}" for name in many_tokens.A16_BUILDS]
    many = Problem("nvfp4_gemm", 300, 28672, 4096, "bf16")
    times = [search.gemm(*build.split("/"), tile, many, found) for tile, build in zip(tiles, builds, strict=True)]
    us = registry.instance("w4a16").predict(many, H200)
    assert min(times) <= us <= min(times) / (1 - MARGIN)
    few = Problem("nvfp4_gemm", 8, 4096, 4096, "bf16")
    assert registry.instance("w4a16").predict(few, H200) == search.few_tokens("w4a16_small", few, found).us
    rows = Problem("fp8_gemm", 3000, 4096, 4096, "fp8", "row")
    expected = predict.quantiser(rows, found, packed=False) + cublaslt.DOUBT * predict.cublaslt(rows, found)
    assert registry.instance("cublaslt").predict(rows, H200) == expected
    asked = Problem("nvfp4_gemm", 16, 4096, 4096, "fp8")
    gemm = search.few_tokens("w4a8_small", asked, found).us
    assert registry.instance("w4a8").predict(asked, H200) == pytest.approx(gemm + predict.quantiser(asked, found))
    assert registry.instance("w4a8").predict(asked, gpu_models.named("B200")) is None, "no GPU of its arch was measured"
    assert registry.instance("reference").predict(asked, H200) is None


def test_explain_decides_by_predicted_times_and_says_so():
    found = explain("nvfp4_gemm", 70, 2560, 3072, gpu="H200 SXM", **MACHINE)
    shown = {v.backend: v.predicted for v in found.verdicts if v.predicted}
    assert {"w4a8", "w4a16"} <= set(shown)
    mean = "in the mean of M=72, 84, 96"
    assert all(text.endswith(f" us, fitted on H200 SXM, {mean}") for text in shown.values())
    assert f"predicted {shown['w4a8']}" in found.text()
    few = explain("nvfp4_gemm", 40, 2560, 3072, gpu="H200 SXM", **MACHINE)
    assert few.verdict("w4a8").predicted.endswith(" us, fitted on H200 SXM")
    other = explain("nvfp4_gemm", 70, 2560, 3072, gpu="H100 NVL", **MACHINE)
    assert other.verdict("w4a8").predicted.endswith(f" us, scaled from H100 SXM to H100 NVL, {mean}")
    without = explain("nvfp4_gemm", 70, 2560, 3072, arch="9.0", **MACHINE)
    assert not any(v.predicted for v in without.verdicts)
    assert any("no GPU model is named" in note for note in without.notes)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({"w4a8": 100.0, "w4a16": 96.9}, "w4a16"),
        ({"w4a8": 100.0, "w4a16": 97.1}, "w4a8"),
        ({"w4a8": 100.0, "w4a8_expanded": 1.0}, "w4a8"),
    ],
)
def test_predictions_move_a_choice_by_a_margin_and_only_to_what_may_run(monkeypatch, times, chosen):
    monkeypatch.setenv("FP4DISPATCH_TUNED", "off")  # no shipped table: its times come before predictions
    for name in ("w4a8", "w4a16", "w4a8_expanded"):
        us = times.get(name)
        monkeypatch.setattr(registry.instance(name), "predict", lambda problem, gpu, us=us: us, raising=False)
    found = explain("nvfp4_gemm", 300, 4096, 4096, gpu="H200 SXM", **MACHINE)
    assert found.backend == chosen
    if chosen == "w4a16":
        assert found.rule.id == "predicted"
        assert "predicted 96.9 us; w4a8 (fp8), preferred by nvfp4-sm90-w4a8, 100.0 us; fitted on" in found.rule.because


@pytest.mark.parametrize(
    ("m", "tokens"),
    [
        (1, (1,)),
        (64, (64,)),
        (65, (65,)),
        (96, (72, 84, 96)),
        (128, (104, 116, 128)),
        (1536, (1152, 1344, 1536)),
        (2048, (1664, 1856, 2048)),
    ],
)
def test_a_range_of_tokens_is_asked_at_its_end_and_within(m, tokens):
    assert asked.tokens(m) == tokens


def test_a_choice_counts_the_whole_range(monkeypatch):
    """At 384 tokens w4a16 is predicted to be faster, at 288 and 336 it is slower by more: w4a8 runs."""
    times = {"w4a8": {288: 50.0, 336: 60.0, 384: 100.0}, "w4a16": {288: 80.0, 336: 90.0, 384: 80.0}}
    for name, by_m in times.items():
        monkeypatch.setattr(registry.instance(name), "predict", lambda problem, gpu, by_m=by_m: by_m[problem.m], False)
    found = explain("nvfp4_gemm", 300, 4096, 4000, gpu="H200 SXM", **MACHINE)
    assert found.backend == "w4a8"
    assert found.verdict("w4a8").predicted == "66.9 us, fitted on H200 SXM, in the mean of M=288, 336, 384"
    times["w4a16"].update({288: 40.0, 336: 50.0})
    assert explain("nvfp4_gemm", 300, 4096, 4000, gpu="H200 SXM", **MACHINE).backend == "w4a16"
    times["w4a8"][336] = None
    assert explain("nvfp4_gemm", 300, 4096, 4000, gpu="H200 SXM", **MACHINE).verdict("w4a8").predicted == ""


@pytest.mark.parametrize(
    ("us", "chosen"), [(96.0, ("w4a16", "nvfp4-sm90-decode-w4a16")), (94.0, ("w4a8", "predicted"))]
)
def test_predictions_move_to_coarser_activations_only_where_the_finer_are_not_worth_it(monkeypatch, us, chosen):
    for name, each in (("w4a8", us), ("w4a16", 100.0)):
        monkeypatch.setattr(registry.instance(name), "predict", lambda problem, gpu, us=each: us, raising=False)
    found = explain("nvfp4_gemm", 8, 4096, 4000, gpu="H200 SXM", **MACHINE)
    assert (found.backend, found.rule.id) == chosen


def test_explain_knows_the_gpu_of_this_machine(monkeypatch):
    from fp4dispatch.machine.system import System

    system = System.fake("9.0", cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5")
    system = System(**(vars(system) | {"gpus": (Gpu(0, "NVIDIA H200", "GPU-1", SM90),)}))
    monkeypatch.setattr(here, "machine", lambda: system)
    found = explain("nvfp4_gemm", 300, 28672, 4096)
    assert "fitted on H200 SXM" in found.verdict("w4a8").predicted


def test_a_plug_in_that_fails_to_predict_is_not_asked_again_for_a_decision(monkeypatch):
    def broken(problem, gpu):
        raise RuntimeError("no")

    monkeypatch.setattr(registry.instance("w4a8"), "predict", broken, raising=False)
    found = explain("nvfp4_gemm", 300, 28672, 4096, gpu="H200 SXM", cuda="13.0", nvcc="13.0", proven=True)
    assert found.backend == "w4a8"
    assert found.verdict("w4a8").predicted == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gpu": "H100"}, "gpu='H100' is not known. Did you mean H100"),
        ({"gpu": "H100 SXM", "arch": "12.0"}, "is sm_90, and arch='12.0' was given"),
    ],
)
def test_a_wrong_gpu_is_refused(given, said):
    with pytest.raises(InputError, match=said):
        explain("nvfp4_gemm", 1, 4096, 4096, **given)


def test_the_command_takes_a_gpu(capsys):
    words = ["explain", "nvfp4_gemm", "-m", "300", "-n", "4096", "-k", "4096", "--gpu", "H200 SXM", "--proven"]
    assert cli.main([*words, "--cuda", "13.0", "--nvcc", "13.0"]) == 0
    assert " us, fitted on H200 SXM" in capsys.readouterr().out


@dataclass
class Row:
    name: str
    kind: Literal["a", "b"]
    sizes: tuple[int, ...]
    facts: Mapping[str, float]
    arch: Arch
    ratio: float = 1.0
    most: int | None = None


def test_keys_of_a_table_come_from_the_dataclass():
    required, optional = strict_toml.keys_of(Row, arch=str)
    assert required == {"name": str, "kind": str, "sizes": list, "facts": dict, "arch": str}
    assert optional == {"ratio": float, "most": int}
