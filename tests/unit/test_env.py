from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp4dispatch
from fp4dispatch import cli
from fp4dispatch.cli import env
from fp4dispatch.machine.system import System

FAKE = System.fake(
    arch="12.0", gpus=2, driver="580.65", driver_cuda="13.0", cuda="13.0", torch="2.13.0", cudnn="9.10.2",
    cudnn_path="/x", proven=[("nvfp4_gemm", "sm_120")], quarantined=[("cutlass", "fp8_gemm", "sm_120")],
    notes=["two of them"],
)  # fmt: skip


def test_text() -> None:
    text = env.text(env.collect(FAKE))
    lines = {line.split("  ")[0].strip(): line for line in text.splitlines()}
    assert "580.65 (runs CUDA up to 13.0)" in lines["driver"]
    assert "9.10.2 /x" in lines["cudnn"]
    assert "capability 12.0" in lines["GPU 1"]
    assert "none" in lines["flashinfer"]
    assert "two of them" in lines["note"]
    assert "cutlass fp8_gemm sm_120" in lines["quarantined"]
    assert fp4dispatch.__version__ in lines["fp4dispatch"]


def test_shows_our_settings_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cudnn")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("FP4DISPATCH_API_KEY", "also secret")
    data = env.collect(FAKE)
    assert data["settings"]["FP4_GEMM_BACKEND"] == "cudnn"
    assert data["settings"]["CUDA_VISIBLE_DEVICES"] == ""
    everything = env.text(data) + json.dumps(data)
    assert "hf_secret" not in everything
    assert "also secret" not in everything
    assert "FP4DISPATCH_API_KEY is set but is not a setting" in everything
    assert "'cudnn'" in env.text(data)


def test_no_gpu() -> None:
    text = env.text(env.collect(System.fake()))
    assert "none visible" in text
    assert "CPU build" in text


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    assert "torch" in capsys.readouterr().out
    assert cli.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["system"]["torch"]["version"]


def test_runs_where_every_dependency_is_broken(tmp_path: Path) -> None:
    for name in ("torch", "rich", "packaging", "platformdirs", "numpy", "pynvml", "filelock", "safetensors", "ninja"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is broken')")
    path = os.pathsep.join([str(tmp_path), str(Path(fp4dispatch.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-m", "fp4dispatch", "env"],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "pynvml is broken" in done.stdout
