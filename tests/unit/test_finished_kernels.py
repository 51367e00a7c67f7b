"""Machines without a compiler: finished kernels run what they can, and other backends run the rest."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
import torch

from fp4dispatch import cli, formats
from fp4dispatch.backends import registry
from fp4dispatch.backends.own import cutlass, finished, w4, w8a8
from fp4dispatch.backends.own.launch_choice import Layout
from fp4dispatch.backends.own.tiling import launches, speeds
from fp4dispatch.dispatch import choose, here, whatif
from fp4dispatch.machine import gpu_models, log
from fp4dispatch.machine.nvml import Gpu
from fp4dispatch.machine.system import System
from fp4dispatch.policy import resolve
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90
from fp4dispatch.problem.measurement import LaunchConfig
from tests import hopper, w4_fake
from tests.w4_fake import weights

TOOLS = {"nvcc": "13.0", "cutlass": "4.5"}
PROVEN = [(op, "sm_90") for op in ("w4_gemm", "w8_gemm", "fp8_gemm")]
ONE = ("w4_gemm_sm90", "a8_bf16_128")
QUANTIZER = ("w4_activations", "any")


def machine(*builds, **facts):
    known = {"cuda": "13.0", "torch": "2.11", "proven": PROVEN, "finished": [(*build, "sm_90") for build in builds]}
    system = System.fake("9.0", **known | facts)
    return replace(system, gpus=(Gpu(0, "NVIDIA H200", "GPU-1", SM90),))


def nvfp4(m=300, activation="fp8", dtype="bfloat16"):
    return Problem("nvfp4_gemm", m, 4096, 4096, activation, out_dtype=dtype)


def codes(reasons):
    return [reason.code for reason in reasons]


@pytest.mark.parametrize("activation", ["fp8", "any"])
def test_one_finished_gemm_with_its_quantiser_is_enough(activation):
    backend, problem = w4.W4A8Backend(), nvfp4(activation=activation)
    assert backend.supports(problem, machine(ONE, QUANTIZER)) == ()
    for there in ((), (ONE,), (QUANTIZER,), (QUANTIZER, ("w4_gemm_sm90", "a16_bf16_128"))):
        (reason,) = backend.supports(problem, machine(*there))
        assert reason.code == "TOOLCHAIN"
        assert reason.text == "nvcc not found (needs 12.0 for sm_90), and no finished kernel runs this"
        assert "pip install" in reason.fix
    assert codes(backend.supports(nvfp4(activation=activation, dtype="float16"), machine(ONE, QUANTIZER))) == [
        "TOOLCHAIN"
    ]


def test_a_build_for_another_arch_is_none():
    elsewhere = replace(machine(), finished=frozenset({(*ONE, "sm_100"), (*QUANTIZER, "sm_100")}))
    assert codes(w4.W4A8Backend().supports(nvfp4(), elsewhere)) == ["TOOLCHAIN"]


def test_where_kernels_can_be_compiled_or_nobody_knows_what_is_finished_nothing_is_asked_for():
    assert w4.W4A8Backend().supports(nvfp4(), machine(**TOOLS)) == ()
    assert w4.W4A8Backend().supports(nvfp4(), replace(machine(), finished=None)) == ()


def test_a_switched_off_compiler_is_none(monkeypatch):
    monkeypatch.setenv("FP4DISPATCH_JIT", "0")
    backend = w4.W4A8Backend()
    (reason,) = backend.supports(nvfp4(), machine(**TOOLS))
    assert reason.text == "FP4DISPATCH_JIT=0 forbids compiling, and no finished kernel runs this"
    assert "fp4dispatch build" in reason.fix
    assert backend.supports(nvfp4(), machine(ONE, QUANTIZER, **TOOLS)) == ()
    assert backend.supports(nvfp4(), replace(machine(**TOOLS), finished=None)) == ()


def test_auto_takes_the_library_where_the_build_that_it_needs_is_not_there():
    """Another build of CUTLASS's GEMM was enough for `cutlass`, which then asked for headers."""
    raw = Problem("fp8_gemm", 8, 4096, 4096, "fp8", "row", raw=True)
    backends = {name: registry.backends()[name] for name in ("cutlass", "cublaslt")}

    def chosen(*builds):
        return resolve.resolve(raw, machine(*builds), backends).backend

    other = ("fp8_gemm_sm90", "block_bf16_128x128"), ("fp8_quantize", "any")
    assert cutlass.CutlassBackend().supports(replace(raw, scaling="block128"), machine(*other)) == ()
    assert chosen(*other) == "cublaslt"
    assert chosen(("fp8_gemm_sm90", "row_bf16_swap_64x16"), ("fp8_quantize", "any")) == "cutlass"


def test_a_choice_is_made_anew_when_compiling_is_switched_off(monkeypatch):
    with hopper.seems_to_be_here(monkeypatch):
        monkeypatch.setattr(here, "seen_from", lambda facts, gpu: machine(**TOOLS))
        assert choose.select(nvfp4(), say=False).backend == "w4a8"
        monkeypatch.setenv("FP4DISPATCH_JIT", "0")
        assert choose.select(nvfp4(), say=False).backend == "reference"
        monkeypatch.delenv("FP4DISPATCH_JIT")
        assert choose.select(nvfp4(), say=False).backend == "w4a8"


QUESTIONS = {
    "nvfp4": Problem("nvfp4_gemm", 16, 4096, 4096),
    "fp8": Problem("fp8_gemm", 16, 4096, 4096, scaling="row"),
    "raw": Problem("fp8_gemm", 16, 4096, 4096, "fp8", "row", raw=True),
}
W8A8_ALONE = (("w8_gemm_sm90", "bf16_128"), QUANTIZER)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(
    ("there", "jit"),
    [
        (machine(), "1"),
        (machine(*W8A8_ALONE), "1"),
        (machine(("w4a16_small", "bf16")), "1"),
        (machine(("fp8_gemm_sm90", "row_bf16_128x128"), ("fp8_quantize", "any")), "1"),
        (machine(*W8A8_ALONE, **TOOLS), "0"),
        (machine(*W8A8_ALONE, **TOOLS | {"proven": []}), "0"),
    ],
)
def test_the_printed_command_makes_the_same_choice(there, jit, question, capsys, monkeypatch):
    """It is run where builds are not known and compiling is allowed."""
    monkeypatch.setenv("FP4DISPATCH_JIT", jit)
    decision = resolve.resolve(QUESTIONS[question], there, registry.backends())
    command = whatif.reproduce(decision, there)
    monkeypatch.delenv("FP4DISPATCH_JIT")
    cli.main([*shlex.split(command)[1:], "--json"])
    again = json.loads(capsys.readouterr().out)
    assert again["backend"] == decision.backend
    can = {v["backend"] for v in again["verdicts"] if not v["reasons"] and not v["denied"]}
    assert can == {v.backend for v in decision.verdicts if v.accepted}


# --------------------------------------------------------------------------------------------------------------- plans


@pytest.fixture
def seen(monkeypatch):
    """Kernels that are emulated, on a machine without a compiler; what it finds finished can be set."""
    kernels = w4_fake.install(monkeypatch)

    def become(*builds, **facts):
        monkeypatch.setattr(finished, "seen_from", lambda device: machine(*builds, **facts))
        return kernels

    return become


@pytest.mark.parametrize("m", [1, 64, 300, 4096])
def test_a_plan_takes_a_finished_build_and_gives_right_results(seen, m):
    kernels = seen(ONE, QUANTIZER)
    backend, w = w4.W4A8Backend(), weights(256, 512)
    problem, prepared = replace(nvfp4(m), n=256, k=512), backend.prepare(w)
    assert backend.builds(problem, torch.device("cpu")) == (ONE, QUANTIZER)
    x, out = torch.randn(m, 512).bfloat16(), torch.empty(m, 256, dtype=torch.bfloat16)
    backend.run(backend.plan(problem, prepared), prepared, x, out)
    assert kernels.loaded == [ONE, QUANTIZER]
    expected = x.float() @ formats.nvfp4_dequantize(w.weight, w.scale, w.global_scale).T
    assert float((out.float() - expected).norm() / expected.norm()) < 0.06


def test_of_several_finished_builds_the_fastest_runs(seen):
    """By the models; a GPU that they do not know takes the first of the table."""
    problem, layout = nvfp4(4096), Layout(4096, 4096, 4096, 4096)
    narrow, wide = ("w4_gemm_sm90", "a8_bf16_96"), ("w4_gemm_sm90", "a8_bf16_176")
    seen(narrow, wide, QUANTIZER)
    backend = w4.W4A8Backend()
    only = backend._finished_only(problem, torch.device("cpu"))
    assert set(only) == {narrow, wide}
    known = speeds.of(gpu_models.named("H200 SXM"))
    chosen = backend._predicted(problem, layout, SM90, 132, known, only)
    assert chosen is not None
    assert chosen.gemm == wide
    unknown = backend._predicted(problem, layout, SM90, 132, None, only)
    assert unknown == LaunchConfig(*only[0])


def test_a_warning_says_which_build_is_missing_once(seen, caplog):
    seen(ONE, QUANTIZER)
    log.reset()
    backend, cpu = w4.W4A8Backend(), torch.device("cpu")
    for _ in range(2):
        backend.builds(nvfp4(1), cpu)
    (said,) = caplog.messages
    assert said.startswith("w4a8: w4a8_small/bf16 fits best, is not finished and cannot be compiled here; ")
    assert "w4_gemm_sm90/a8_bf16_128 runs in its place" in said
    assert "fp4dispatch build" in said
    caplog.clear()
    every = w4.W4A8Backend().gemms(nvfp4(1), SM90, 132)
    seen(*every, QUANTIZER)
    backend.builds(nvfp4(7), cpu)
    assert not caplog.messages


def test_timed_launches_of_builds_that_are_missing_are_passed_over(seen, monkeypatch, caplog):
    seen(ONE, QUANTIZER)
    log.reset()
    fast = LaunchConfig("w4a8_small", "bf16", None)
    slow = LaunchConfig(*ONE, (1, 1, 8, 1, 0, 32))
    monkeypatch.setattr(launches, "tuned", lambda *_: launches.Tuned(300, ((fast, 1.0), (slow, 2.0))))
    assert w4.W4A8Backend()._chosen(nvfp4(), Layout(4096, 4096, 4096, 4096), torch.device("cpu")).gemm == ONE
    assert "w4a8_small/bf16 fits best" in caplog.text


def test_what_is_tuned_needs_no_compiler(seen):
    seen(ONE, QUANTIZER)
    backend, w = w4.W4A8Backend(), weights(256, 512)
    problem = replace(nvfp4(300), n=256, k=512)
    found = backend.launches(problem, backend.prepare(w))
    assert found
    assert {launch.gemm for launch in found} == {ONE}


def test_without_any_finished_build_loading_says_what_is_missing(seen):
    seen()
    problem = Problem("fp8_gemm", 300, 4096, 4096, "fp8", "row")
    backend, cpu = w8a8.W8A8Backend(), torch.device("cpu")
    assert backend._finished_only(problem, cpu) == ()
    missing = backend.builds(problem, cpu)
    seen(**TOOLS)
    assert missing == backend.builds(problem, cpu)


def test_with_a_compiler_the_best_build_runs_whatever_is_finished(seen):
    seen(ONE, QUANTIZER, **TOOLS)
    backend = w4.W4A8Backend()
    assert backend.builds(nvfp4(1), torch.device("cpu"))[0][0] == "w4a8_small"


def test_a_device_that_is_no_visible_gpu_has_no_facts():
    assert finished.seen_from(torch.device("cpu")) is None
    assert finished.seen_from(torch.device("cuda:63")) is None
