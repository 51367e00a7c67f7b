"""Facts of GPU models: the table, NVML where the table has none, and predictions in ``explain``."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from fp4dispatch import cli, explain
from fp4dispatch.backends import registry
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.benchmark.reports import records
from fp4dispatch.dispatch import here
from fp4dispatch.errors import FlagsError, InputError
from fp4dispatch.machine import gpu_models, nvml
from fp4dispatch.machine.nvml import Gpu
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90, Arch
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


def test_a_backend_predicts_what_the_launch_model_says_of_its_build():
    problem = Problem("nvfp4_gemm", 300, 28672, 4096, "bf16")
    facts = launch_model.gpu_of(H200)
    tiles = [many_tokens.tile_of("w4_gemm_sm90", f"a16_bf16_{name}") for name in ("128", "128x128", "192", "256")]
    best = min(launch_model.best(tile, 300, 28672, 4096, facts).microseconds(facts) for tile in tiles)
    assert registry.instance("w4a16").predict(problem, H200) == pytest.approx(best)
    assert registry.instance("w4a16").predict(Problem("nvfp4_gemm", 1, 4096, 4096, "bf16"), H200) is None, "no model"
    assert (
        registry.instance("w4a8").predict(Problem("nvfp4_gemm", 300, 4096, 4096, "fp8"), gpu_models.named("B200"))
        is None
    )
    assert registry.instance("reference").predict(problem, H200) is None


def test_explain_shows_predictions_of_a_named_gpu_and_decides_as_without():
    machine = {"cuda": "13.0", "nvcc": "13.0", "proven": True}
    with_gpu = explain("nvfp4_gemm", 300, 28672, 4096, gpu="H100 SXM", **machine)
    without = explain("nvfp4_gemm", 300, 28672, 4096, arch="9.0", **machine)
    assert (with_gpu.backend, with_gpu.rule) == (without.backend, without.rule)
    assert [v.backend for v in with_gpu.verdicts] == [v.backend for v in without.verdicts]
    shown = {v.backend: v.predicted for v in with_gpu.verdicts if v.predicted}
    assert set(shown) == {"w4a8", "w4a16"}
    assert all("for the GEMM alone on H100 SXM; this does not order the candidates" in text for text in shown.values())
    assert not any(v.predicted for v in without.verdicts)
    assert f"predicted {shown['w4a8']}" in with_gpu.text()
    assert {row["backend"]: row["predicted"] for row in with_gpu.to_dict()["verdicts"]}["w4a8"] == shown["w4a8"]


def test_predictions_do_not_order(monkeypatch):
    for name, us in (("w4a8", 100.0), ("w4a16", 1.0)):
        monkeypatch.setattr(registry.instance(name), "predict", lambda problem, gpu, us=us: us, raising=False)
    found = explain("nvfp4_gemm", 300, 28672, 4096, gpu="H200 SXM", cuda="13.0", nvcc="13.0", proven=True)
    assert [(v.backend, v.predicted[:5]) for v in found.verdicts[:2]] == [("w4a8", "100.0"), ("w4a16", "1.0 u")]
    assert found.backend == "w4a8"


def test_explain_knows_the_gpu_of_this_machine(monkeypatch):
    from fp4dispatch.machine.system import System

    system = System.fake("9.0", cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5")
    system = System(**(vars(system) | {"gpus": (Gpu(0, "NVIDIA H200", "GPU-1", SM90),)}))
    monkeypatch.setattr(here, "machine", lambda: system)
    found = explain("nvfp4_gemm", 300, 28672, 4096)
    assert "on H200 SXM" in found.verdict("w4a8").predicted


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
    assert "us for the GEMM alone on H200 SXM" in capsys.readouterr().out
