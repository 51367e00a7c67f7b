"""``fp4dispatch explain`` as a user runs it."""

from __future__ import annotations

import json

import pytest

from fp4dispatch import dispatch, registry
from fp4dispatch.cli import HELP, main

ASK = ["explain", "nvfp4_gemm", "-m", "16", "-n", "4096", "-k", "4096"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(HELP, "explain", HELP.get("explain", "explain"))
    for name in ("FP4_GEMM_BACKEND", "FP4DISPATCH_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    dispatch.reset()


def test_text(capsys):
    assert main([*ASK, "--arch", "12.0", "--cuda", "12.8", "--cudnn", "9.7.1"]) == 0
    out = capsys.readouterr().out
    for part in (
        "nvfp4_gemm M=16 N=4096 K=4096 (nvfp4) -> bfloat16 on sm_120 (CUDA 12.8, cuDNN 9.7.1)",
        "cublaslt, auto".replace(",", " (nvfp4 activations),"),
        "cutlass",
        "LIBRARY     FlashInfer not found (needs 0.6)",
        "UNPROVEN    on sm_120/121",
        "https://github.com/sgl-project/sglang/issues/20043",
    ):
        assert part in out


def test_json(capsys):
    assert main([*ASK, "--arch", "9.0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["backend"] == "reference"
    assert data["arch"] == "9.0"
    assert data["problem"]["k"] == 4096
    assert {"backend", "activation", "reasons", "denied", "measured"} == set(data["verdicts"][0])


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
    assert "ARCH        GPU is sm_90" in capsys.readouterr().out


def test_an_alias_and_a_misspelt_name(capsys):
    assert main([*ASK, "--arch", "9.0", "--backend", "emulation"]) == 0
    assert ": reference" in capsys.readouterr().out
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
