"""The start from a wheel in bench/cold_model.py: how the wheel is made and installed, and what makes a start false."""

from __future__ import annotations

import argparse
import json
import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import cold_model
from bench.shared import finished_kernels
from fp4dispatch.jit import kernels, packages
from fp4dispatch.machine import libraries

SMALL = ("--shapes", "64x64", "--tokens", "1", "--device", "cpu")
PACKAGE = "fp4dispatch_kernels_sm90"
ENTRY = f"{PACKAGE}/kernels/row_amax/amax-90a/0123"


def wheel(folder: Path, *files: str) -> Path:
    """A wheel with these files; they are empty, so no kernel of it is of any use."""
    folder.mkdir(exist_ok=True)
    info, made = f"{PACKAGE}-0.1.0.dist-info", folder / f"{PACKAGE}-0.1.0-py3-none-any.whl"
    texts = dict.fromkeys((f"{PACKAGE}/__init__.py", *files), "") | {
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: fp4dispatch-kernels-sm90\nVersion: 0.1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{packages.GROUP}]\n{PACKAGE} = {PACKAGE}\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in texts.items():
            archive.writestr(name, text)
    return made


def row(**changes):
    """What ``measure_model`` returns for a start from a wheel that is as it should be."""
    seconds = {"cold_s": 2.5, "again_s": 1.0, "replace_s": 2.0, "warmup_s": 0.5, "compile_s": 0}
    found = {"format": "nvfp4", "wheel": True, "from_wheel": ["w4a16_small/bf16-90a"], "from_elsewhere": []}
    return found | seconds | {"nvcc": None, "kernels": {}, "compiled_again": [], "backends": ["w4a16 (bf16)"]} | changes


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernels": {"w4a16_small/bf16-90a": 9.0}}, "compiled w4a16_small/bf16-90a, which the wheel should have"),
        ({"nvcc": "/usr/local/cuda/bin/nvcc"}, "could find /usr/local/cuda/bin/nvcc"),
        ({"from_elsewhere": ["fp8_quantize/any-90a"]}, "loaded from elsewhere: fp8_quantize/any-90a"),
        ({"from_wheel": []}, "no kernel of the wheel was loaded"),
        ({"backends": ["reference (bf16)"]}, "layers run on reference (bf16)"),
        ({"cold_s": 5.5}, "nvfp4 with wheel: 5.5 s from an empty cache, limit 5"),
    ],
)
def test_a_start_that_shows_nothing_is_a_fault(changes, said):
    result = {"models": [row()], "one_file": None, "failed": []}
    assert cold_model.faults(result, 1, None, 5) == []  # --limit is of a start with a compiler
    (fault,) = cold_model.faults(result | {"models": [row(**changes)]}, None, None, 5)
    assert said in fault


def test_the_process_finds_the_wheel_and_no_compiler(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "from fp4dispatch.jit import kernels, packages\n"
        "from fp4dispatch.machine import libraries\n"
        "from fp4dispatch.settings import settings\n"
        "nvcc, _ = libraries.nvcc()\n"
        "print(json.dumps({'nvcc': nvcc and nvcc.path, 'jit': settings.jit,"
        " 'packages': [str(p.folder) for p in packages.packages()]}))\n"
    )
    monkeypatch.setattr(cold_model, "AGAIN", (str(script),))
    monkeypatch.setenv("FP4DISPATCH_JIT", "0")
    compiler = tmp_path / "bin" / "nvcc"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho release 13.0, V13.0.88\n")
    compiler.chmod(0o755)
    for name, value in (("FP4DISPATCH_NVCC", str(compiler)), ("CUDA_HOME", str(tmp_path)), ("PATH", compiler.parent)):
        monkeypatch.setenv(name, str(value))
    site = tmp_path / "site"
    facts = finished_kernels.install(wheel(tmp_path / "dist", f"{ENTRY}/proof.json"), site)
    assert (facts["kernels"], facts["name"]) == (1, f"{PACKAGE}-0.1.0-py3-none-any.whl")
    here, there = (
        cold_model.fresh(str(tmp_path), [], environment=environment)
        for environment in (None, finished_kernels.without_nvcc(site))
    )
    assert here["nvcc"] == str(compiler)
    assert there == {"nvcc": None, "jit": True, "packages": [str(site / PACKAGE)]}


def test_a_start_on_the_cpu_uses_no_kernel_of_the_wheel_and_says_so(tmp_path):
    site = tmp_path / "site"
    finished_kernels.install(wheel(tmp_path / "dist", f"{ENTRY}/proof.json"), site)
    found = cold_model.measure_model("fp8_row", SMALL, site=site)
    assert (found["wheel"], found["nvcc"], found["from_wheel"]) == (True, None, [])
    said = " ".join(cold_model.faults({"models": [found], "one_file": None, "failed": []}, None, None))
    assert "no kernel of the wheel was loaded" in said
    assert "layers run on reference" in said


def test_what_a_process_has_loaded_is_told_by_where_it_lies(tmp_path, monkeypatch):
    def built(name, folder):
        return SimpleNamespace(built=SimpleNamespace(entry=SimpleNamespace(name=name, folder=folder)))

    mine, other = built("a/b-90a", tmp_path / "site" / ENTRY), built("c/d-90a", tmp_path / "cache" / "c")
    monkeypatch.setattr(kernels, "_loaded", {1: mine, 2: other})
    monkeypatch.setattr(libraries, "nvcc", lambda: (libraries.Library("13.0", "/x/nvcc"), ()))
    found = finished_kernels.used(tmp_path / "site")
    assert found == {"from_wheel": ["a/b-90a"], "from_elsewhere": ["c/d-90a"], "nvcc": "/x/nvcc"}


def test_a_wheel_without_kernels_and_a_file_that_is_none_are_refused(tmp_path):
    with pytest.raises(RuntimeError, match="holds no kernel"):
        finished_kernels.install(wheel(tmp_path / "dist"), tmp_path / "site")
    (tmp_path / "x-1-py3-none-any.whl").write_text("no archive")
    with pytest.raises(RuntimeError, match="pip install"):
        finished_kernels.install(tmp_path / "x-1-py3-none-any.whl", tmp_path / "other")


def test_the_wheel_is_made_by_the_documented_command_and_kernels_are_kept(tmp_path, monkeypatch):
    asked = []

    def must(words, limit_s=None):
        asked.append((words, limit_s))
        if "build" in words:
            kept = Path(words[words.index("--out") + 1], *ENTRY.split("/")[1:])
            kept.mkdir(parents=True, exist_ok=True)
            (kept / "proof.json").write_text("")
            wheel(Path(words[words.index("--wheel") + 1]), f"{ENTRY}/proof.json")
        else:
            real(words, limit_s)

    real = finished_kernels._must
    monkeypatch.setattr(finished_kernels, "_must", must)
    monkeypatch.chdir(tmp_path)
    kept = Path("kernels")  # the command runs elsewhere
    first = finished_kernels.made("", "9.0", kept, tmp_path / "one", 60)
    second = finished_kernels.made("", "9.0", kept, tmp_path / "two", 60)
    assert (first["finished_before"], second["finished_before"]) == (0, 1)
    assert "build_s" in first
    words, limit_s = asked[0]
    assert words[1:8] == ["-m", "fp4dispatch", "build", "--arch", "9.0", "--out", str(tmp_path / "kernels")]
    assert limit_s == 60
    text = finished_kernels.sentence(first | {"build_s": 90.5, "mb": 31.2})
    assert text == f"`{PACKAGE}-0.1.0-py3-none-any.whl`: 1 kernels, 31.2 MB, made in 90.5 s."
    assert finished_kernels.sentence(second).endswith("1 of its kernels finished before.")


def options(**changes):
    asked = {"tokens": [1], "shapes": ["64x64"], "formats": ["nvfp4", "fp8_row"], "alone": 0, "jobs": 2, "kernels": []}
    return argparse.Namespace(**asked | {"blocks": 32, "wheel": "", "kernels_in": None, "step_limit": 9} | changes)


def test_each_format_starts_without_and_with_the_wheel(monkeypatch):
    asked = []

    def start(fmt, words, limit_s, site=None):
        asked.append((fmt, site is not None, words[-1]))
        return row(format=fmt) if site else row(format=fmt, wheel=False, cold_s=20.0, kernels={"a/b_bf16-90a": 9.0})

    monkeypatch.setattr(cold_model, "measure_model", start)
    facts = {"name": "w.whl", "mb": 31.2, "kernels": 53, "build_s": 90.0}
    monkeypatch.setattr(finished_kernels, "made", lambda *_: facts)
    found = cold_model.measure(options(), "9.0", lambda _: None)
    assert asked == [(fmt, wheel, "32") for wheel in (False, True) for fmt in ("nvfp4", "fp8_row")]
    text = cold_model.table(json.loads(json.dumps(found)))
    assert "| nvfp4 | 20.0 | 1.0 | 2.0 | 0.5 | 1 |" in text
    assert "| nvfp4 with wheel | 2.5 | 1.0 | 2.0 | 0.5 | 1 | 0 | 0.0 |" in text
    assert "`w.whl`: 53 kernels, 31.2 MB, made in 90.0 s." in text

    def no_wheel(*_):
        raise RuntimeError("nvcc was not found")

    monkeypatch.setattr(finished_kernels, "made", no_wheel)
    asked.clear()
    found = cold_model.measure(options(), "9.0", lambda _: None)
    assert (len(asked), found["failed"]) == (2, ["nvcc was not found"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--wheel-limit", "5"], "--wheel-limit and --kernels-in need --wheel"),
        (["--wheel", "no-such.whl"], "--wheel no-such.whl: needs a file"),
        (["--wheel", __file__, "--kernels-in", "x"], "no --kernels-in, as nothing is built"),
        (["--wheel"], "torch sees no GPU here"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, said, monkeypatch, capsys, tmp_path):
    out = tmp_path / "out.json"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["cold_model.py", "--commit", "abc", "--json", str(out), *words])
    with pytest.raises(SystemExit):
        cold_model.main()
    assert said in capsys.readouterr().err
    assert not os.path.lexists(out)
