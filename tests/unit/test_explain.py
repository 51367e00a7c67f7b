"""``fp4dispatch explain`` as a user runs it."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.cli import HELP, explain_text, main
from fp4dispatch.dispatch import choose
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.errors import InputError, SettingsError
from fp4dispatch.jit import packages
from fp4dispatch.machine.system import System
from fp4dispatch.policy.rules import rules
from fp4dispatch.problem.arch import SM90, SM120

ASK = ["explain", "nvfp4_gemm", "-m", "16", "-n", "4096", "-k", "4096"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(HELP, "explain", HELP.get("explain", "explain"))
    for name in ("FP4_GEMM_BACKEND", "FP4DISPATCH_DISABLE", "FP4DISPATCH_ARCH", "FP4DISPATCH_FP8_COPY"):
        monkeypatch.delenv(name, raising=False)
    choose.reset()


def test_text(capsys):
    assert main([*ASK, "--arch", "12.0", "--cuda", "12.8", "--cudnn", "9.7.1"]) == 0
    out = capsys.readouterr().out
    for part in (
        "nvfp4_gemm M=16 N=4096 K=4096 (nvfp4) -> bfloat16 on sm_120 (CUDA 12.8, cuDNN 9.7.1)",
        "  auto: w4a4",
        "cutlass",
        "LIBRARY  FlashInfer not found (needs 0.6)",
        "UNPROVEN  on sm_120/121",
        "https://github.com/sgl-project/sglang/issues/20043",
    ):
        assert part in out
    assert out.startswith("cublaslt, with nvfp4 activations, runs nvfp4_gemm M=16 N=4096 K=4096")
    assert "\x1b" not in out


def test_a_named_backend_that_cannot_run_is_told_from_nothing_that_can(capsys):
    assert main([*ASK, "--arch", "9.0", "--backend", "cutlass"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("cutlass cannot run nvfp4_gemm")
    assert "could run it, in order of preference\n  reference" in out


def test_candidates_are_grouped_and_foreign_ones_only_named(capsys):
    here = [*ASK, "--arch", "12.0", "--cuda", "13.0", "--nvcc", "13.0", "--proven", "none"]
    assert main(here) == 0
    out = capsys.readouterr().out
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    assert titles[1:4] == [
        "could run too, in order of preference",
        "run only where they are named",
        "cannot run here, but could",
    ]
    named, missing = out.split("run only where they are named")[1].split("cannot run here, but could")
    assert "cutlass " in named
    assert "flashinfer_cutlass" in missing.split("not for this problem")[0]
    assert "not for this problem or GPU: w4a8, w4a8_expanded, w8a16, w8a8" in out
    assert "needs sm_90" not in out
    assert main([*here, "--all"]) == 0
    assert re.search(r"w4a8 +ARCH  GPU is sm_120, needs sm_90", capsys.readouterr().out)


def test_every_candidate_is_in_exactly_one_group():
    decision = explain("nvfp4_gemm", 16, 4096, 4096, arch="12.0", cuda="12.8", cudnn="9.7.1")
    labels = [line.label.strip() for line in explain_text.lines(decision, everything=True) if line.label.strip()]
    assert sorted([*labels, decision.backend]) == sorted(verdict.backend for verdict in decision.verdicts)


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_gets_its_width_and_colours_unless_no_color(monkeypatch, no_color):
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_color)
    decision = explain("nvfp4_gemm", 16, 4096, 4096, arch="12.0", cuda="12.8", cudnn="9.7.1")
    explain_text.show(explain_text.lines(decision))
    out = screen.getvalue()
    assert ("\x1b[" in out) is not bool(no_color)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert max(len(line) for line in plain.splitlines() if "://" not in line) <= 60
    words = " ".join(line.label + line.text for line in explain_text.lines(decision)).split()
    assert plain.split() == words


def test_ignored_kernels_of_a_wheel_are_told_of_this_machine_only(capsys, monkeypatch):
    monkeypatch.setattr(packages, "ignored", lambda: ["3 kernels of a wheel are ignored: why"])
    monkeypatch.setattr("fp4dispatch.cli.explain.explain", lambda *a, **kw: explain("nvfp4_gemm", 1, 64, 64))
    main(ASK)
    assert "note: 3 kernels of a wheel are ignored: why" in capsys.readouterr().out
    main([*ASK, "--arch", "9.0"])
    assert "ignored" not in capsys.readouterr().out


def test_json(capsys):
    assert main([*ASK, "--arch", "9.0", "--proven", "none", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["backend"] == "reference"
    assert data["arch"] == "9.0"
    assert data["problem"]["k"] == 4096
    assert {"backend", "activation", "reasons", "denied", "measured", "predicted"} == set(data["verdicts"][0])


def test_a_backend_that_is_not_there_is_listed_and_never_chosen(capsys, monkeypatch):
    fewer = {name: made for name, made in registry.backends().items() if name != "flashinfer_cutlass"}
    monkeypatch.setattr(registry, "backends", lambda: fewer)
    assert main([*ASK, "--arch", "12.0", "--cuda", "13.0", "--cudnn", "9.19", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    absent = [v for v in data["verdicts"] if any(r["code"] == "UNAVAILABLE" for r in v["reasons"])]
    assert "flashinfer_cutlass" in {v["backend"] for v in absent}
    assert data["backend"] not in {v["backend"] for v in absent}


def test_nothing_can_run_it_is_exit_code_1(capsys):
    assert main([*ASK, "--arch", "9.0", "--backend", "cublaslt"]) == 1
    assert "ARCH  GPU is sm_90" in capsys.readouterr().out


def test_an_alias_and_a_misspelt_name(capsys):
    assert main([*ASK, "--arch", "9.0", "--backend", "emulation"]) == 0
    assert capsys.readouterr().out.startswith("reference, ")
    assert main([*ASK, "--arch", "9.0", "--backend", "cudn"]) == 1
    assert "Did you mean cudnn?" in capsys.readouterr().err


def test_flashinfer_cutlass_by_version(capsys):
    for version, denied in (("0.6.4", True), ("0.6.7", False)):
        main([*ASK, "--arch", "12.0", "--flashinfer", version])
        assert ("flashinfer/issues/2708" in capsys.readouterr().out) is denied


def test_this_machine_without_facts(capsys):
    assert main([*ASK, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requested_by"] == "auto"


@pytest.mark.parametrize("words", [["explain", "gemm"], [*ASK[:-2]], [*ASK, "--capture", "some"]])
def test_wrong_usage_is_exit_code_2(words, capsys):
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert raised.value.code == 2


def test_a_bad_version_or_arch_is_told(capsys):
    assert main([*ASK, "--arch", "120f"]) == 1
    assert "is not a GPU architecture" in capsys.readouterr().err
    assert main([*ASK, "--arch", "12.0", "--cuda", "new"]) == 1
    assert "is not a version" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------- questions that make no sense


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-m", "1", "-n", "64", "-k", "7"], "k=7 is not a multiple of 16, the NVFP4 block"),
        (["-m", "1", "-n", "64", "-k", "0"], "k=0 is not a size: need an integer of at least 1"),
        (["-m", "1", "-n", "64", "-k", "-16"], "k=-16 is not a size"),
        (["-m", "-1", "-n", "64", "-k", "64"], "m=-1 is not a size: need an integer of at least 0"),
        (["-m", "1", "-n", "0", "-k", "64"], "n=0 is not a size"),
        (["-m", "1", "-n", "64", "-k", "64", "--m-min", "-1"], "m_min=-1 is not a size"),
    ],
)
def test_sizes_that_no_layer_takes_are_refused(words, text, capsys):
    assert main(["explain", "nvfp4_gemm", *words, "--arch", "12.0"]) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["fp8_gemm", "--arch", "9.0", "--fp8-copy"], "--fp8-copy: fp8_gemm has no NVFP4 weights"),
        (["fp8_gemm", "--arch", "9.0", "--quarantined", "cutlass,auto"], "--quarantined auto: auto is no backend"),
        (["fp8_gemm", "--cuda", "13.0", "--proven"], "proven=fp8_gemm, w8_gemm: kernels are proven for an arch"),
        (["nvfp4_gemm", "--arch", "none", "--proven", "w4_gemm"], "proven=w4_gemm: kernels are proven for an arch"),
    ],
)
def test_options_without_an_effect_are_refused(words, text, capsys):
    assert main(["explain", words[0], "-m", "1", "-n", "64", "-k", "64", *words[1:]]) == 1
    assert text in capsys.readouterr().err


def test_any_k_is_fine_for_fp8():
    assert explain("fp8_gemm", 1, 7, 7, arch="12.0").backend


@pytest.mark.parametrize("arch", ["13.7", "12.2", "sm_101", "4.0", "99.9"])
def test_a_gpu_that_does_not_exist_is_refused_with_those_that_do(arch, capsys, monkeypatch):
    exists = arch == "sm_101"  # what CUDA 12 calls sm_110
    assert main([*ASK, "--arch", arch]) == (0 if exists else 1)
    if not exists:
        err = capsys.readouterr().err
        for part in ("not the capability of a GPU", "7.5, 8.0, 8.6", "12.0, 12.1", "update fp4dispatch"):
            assert part in err
        monkeypatch.setenv("FP4DISPATCH_ARCH", arch)
        assert main(ASK) == 1
        assert main(["build"]) in (1, 2)


def test_numbers_for_versions_are_refused():
    for facts, words in (
        ({"arch": 12.0}, "arch=12.0 is a float; need a text such as '12.0'"),
        ({"arch": "12.0", "cuda": 12.8}, "cuda=12.8 is a float; need a text"),
        ({"arch": "12.0", "nvcc": 13}, "nvcc=13 is a int; need a text"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            explain("nvfp4_gemm", 1, 64, 64, **facts)
    with pytest.raises(InputError, match=r"cudnn=9\.19 is a float"):
        System.fake("12.0", cudnn=9.19)
    with pytest.raises(InputError, match=r"arch=12\.0 is a float"):
        System.fake(12.0)


# -------------------------------------------------------------------------------------------- what the environment says


def test_the_arch_of_the_environment_is_the_gpu_of_the_question(monkeypatch, capsys):
    monkeypatch.setenv("FP4DISPATCH_ARCH", "12.0")
    here = explain("nvfp4_gemm", 16, 4096, 4096)
    assert here.arch == SM120
    assert here.notes == (
        "FP4DISPATCH_ARCH=12.0: as if the GPU were sm_120",
        "everything else is as on this machine",
    )
    with_facts = explain("nvfp4_gemm", 16, 4096, 4096, cuda="13.0")
    assert (with_facts.arch, with_facts.backend) == (SM120, "cublaslt")
    assert explain("nvfp4_gemm", 16, 4096, 4096, arch="9.0").arch == SM90  # the argument comes first
    assert main(ASK) == 0
    assert "note: FP4DISPATCH_ARCH=12.0: as if the GPU were sm_120" in capsys.readouterr().out
    monkeypatch.setenv("FP4DISPATCH_ARCH", "120f")
    with pytest.raises(InputError, match="is not a GPU architecture"):
        explain("nvfp4_gemm", 16, 4096, 4096)


def test_requests_of_the_environment_hold_here_and_are_told_of_elsewhere(monkeypatch):
    monkeypatch.setenv("FP4_GEMM_BACKEND", "marlin")
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "cublaslt")
    monkeypatch.setenv("FP4DISPATCH_FP8_COPY", "1")
    here = explain("nvfp4_gemm", 16, 4096, 4096)
    assert (here.requested, here.notes) == ("w4a16", ())
    there = explain("nvfp4_gemm", 16, 4096, 4096, arch="12.0", cuda="13.0")
    assert (there.requested, there.backend) == ("auto", "cublaslt")
    for note, part in zip(
        there.notes, ("FP4_GEMM_BACKEND", "FP4DISPATCH_DISABLE", "FP4DISPATCH_FP8_COPY"), strict=True
    ):
        assert note.startswith(f"{part} is set here and not applied")
    assert "--backend w4a16 does" in there.notes[0]
    asked = explain("nvfp4_gemm", 16, 4096, 4096, arch="12.0", backend="cudnn", disabled=(), fp8_copy=False)
    assert asked.notes == ()
    assert explain("fp8_gemm", 16, 4096, 4096, system=System.fake("12.0"), disabled=()).notes == ()
    monkeypatch.setenv("FP4_GEMM_BACKEND", "marlin9")
    with pytest.raises(SettingsError, match="FP4_GEMM_BACKEND='marlin9'"):
        explain("nvfp4_gemm", 16, 4096, 4096, arch="12.0")


def test_a_proof_that_build_has_made_is_seen_for_the_machine_that_is_asked_about(monkeypatch, capsys):
    facts = ["--arch", "12.0", "--cuda", "13.0", "--nvcc", "13.0"]
    monkeypatch.setattr("fp4dispatch.jit.proven.proven", lambda: frozenset())
    before = explain("nvfp4_gemm", 16, 4096, 4096, arch="12.0", cuda="13.0", nvcc="13.0")
    assert [hit.code for hit in before.verdict("cutlass").denied] == ["UNPROVEN"]
    monkeypatch.setattr(
        "fp4dispatch.jit.proven.proven", lambda: frozenset({("nvfp4_gemm", "sm_120"), ("w4_gemm", "sm_90")})
    )
    after = explain("nvfp4_gemm", 16, 4096, 4096, arch="12.0", cuda="13.0", nvcc="13.0")
    assert after.backend == "cutlass"
    assert after.notes == ("built and proven for sm_120 on this machine, and taken to be there: nvfp4_gemm",)
    assert main([*ASK, *facts]) == 0
    assert "cutlass, with nvfp4 activations" in capsys.readouterr().out
    assert main([*ASK, *facts, "--proven", "none"]) == 0
    assert "cublaslt, with nvfp4 activations" in capsys.readouterr().out
    other = explain("nvfp4_gemm", 16, 4096, 4096, arch="12.1", cuda="13.0", nvcc="13.0")
    assert other.backend == "cublaslt"
    assert explain("nvfp4_gemm", 16, 4096, 4096, arch="12.0", cuda="13.0", proven=False).backend == "cublaslt"


# ----------------------------------------------------------------------------------------------------------- the reason


def test_the_reason_is_that_of_the_backend_that_was_chosen():
    """Each backend of each prefer rule is made the first that can run, and what is printed speaks of it."""
    for rule in rules():
        if rule.verb != "prefer":
            continue
        reasons = [rule.hit(name).because for name in rule.backends]
        assert len(set(reasons)) == len(reasons), rule.id
        for other in rule.backends[1:]:
            assert rule.hit(other).because == dict(rule.others)[other]
    chosen = explain("nvfp4_gemm", 16, 4096, 4096, arch="12.0", cuda="13.0")
    assert chosen.backend == "cublaslt"
    assert "w4a4 by torch, without a compiler" in chosen.line()
    assert "clean over 3,200 requests" not in chosen.line()
    first = explain("nvfp4_gemm", 16, 4096, 4096, arch="12.0", cuda="13.0", cudnn="9.23.1")
    assert first.backend == "cudnn"
    assert "cuDNN was clean over 3,200 requests" in first.line()


def test_the_gpu_of_given_facts_is_known_by_its_name():
    """As ``gpu=`` would name it: with its predicted times, which may decide."""
    named = explain("nvfp4_gemm", 17, 4096, 128, gpu="H200 NVL", cuda="13.0", nvcc="13.0.88", proven=("w4_gemm",))
    (gpu,) = System.fake("9.0").gpus
    system = System.fake("9.0", torch="", cuda="13.0", nvcc="13.0.88", cutlass="", proven=[("w4_gemm", "sm_90")])
    given = explain("nvfp4_gemm", 17, 4096, 128, system=replace(system, gpus=(replace(gpu, name="NVIDIA H200 NVL"),)))
    assert any(verdict.predicted for verdict in named.verdicts)
    assert given.verdicts == named.verdicts
    assert (given.backend, given.activation, given.rule) == (named.backend, named.activation, named.rule)
    other = explain("nvfp4_gemm", 17, 4096, 128, system=replace(system, gpus=(replace(gpu, name="NVIDIA L4"),)))
    assert not any(verdict.predicted for verdict in other.verdicts), "an L4 is no sm_90"
