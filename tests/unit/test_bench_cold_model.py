"""bench/cold_model.py without a GPU: what it runs, refuses and prints."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import pytest

from bench import cold_model
from fp4dispatch.jit.catalog.manifest import installed

SMALL = ("--shapes", "64x64", "32x64", "--tokens", "1", "3", "--device", "cpu")


def result(**changes):
    row = {"format": "nvfp4", "cold_s": 31.0, "again_s": 1.0, "replace_s": 25.0, "warmup_s": 6.0, "compile_s": 93.0}
    row |= {"kernels": {"w4a16_small/bf16-90a": 60.0, "fp8_quantize/any-90a": 33.0}, "compiled_again": []} | changes
    one_file = {"jobs": 2, "kernel": "w4a16_small/bf16-90a", "wall_s": 33.0, "proven": True, "each": []}
    return {"models": [row], "one_file": one_file, "failed": []}


def test_what_is_compiled_alone_is_built():
    for name in cold_model.KERNELS:
        kernel, variant = name.split("/")
        build, target = variant.rsplit("-", 1)
        known = installed().kernel(kernel)
        assert (build in known.variants, target in known.targets) == (True, True)


def test_a_model_is_started_twice_with_one_cache(monkeypatch):
    starts, fresh = [], cold_model.fresh
    monkeypatch.setattr(cold_model, "fresh", lambda *a, **k: starts.append(fresh(*a, **k)) or starts[-1])
    row = cold_model.measure_model("fp8_row", SMALL)
    assert (row["format"], row["kernels"], row["compiled_again"]) == ("fp8_row", {}, [])
    assert row["backends"] == ["reference (bf16)"]
    cold, again = starts
    for start in starts:  # not in the row: layers as small as these may take 0.00 s
        assert min(start["replace_s"], start["warmup_s"]) > 0
        assert start["replace_s"] + start["warmup_s"] == pytest.approx(start["total_s"])
    assert [row[name] for name in ("cold_s", "again_s", "replace_s", "warmup_s")] == [
        round(seconds, 2) for seconds in (cold["total_s"], again["total_s"], cold["replace_s"], cold["warmup_s"])
    ]


def test_the_cache_is_empty_and_the_cores_are_few(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, pathlib\n"
        "folder = os.environ['FP4DISPATCH_CACHE_DIR']\n"
        "print('noise')\n"
        "print(json.dumps({'left': os.listdir(folder), 'cores': len(os.sched_getaffinity(0)), "
        "'jobs': os.environ.get('MAX_JOBS')}))\n"
        "pathlib.Path(folder, 'kernel').write_text('')\n"
    )
    monkeypatch.setattr(cold_model, "AGAIN", (str(script),))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    cache = tmp_path / "cache"
    cache.mkdir()
    assert cold_model.fresh(str(cache), []) == {"left": [], "cores": len(os.sched_getaffinity(0)), "jobs": None}
    assert cold_model.fresh(str(cache), [], 1) == {"left": ["kernel"], "cores": 1, "jobs": "1"}
    script.write_text("import sys; print('said'); sys.exit('went wrong')")
    with pytest.raises(RuntimeError, match="went wrong"):
        cold_model.fresh(str(cache), ["--one", "x"])


def options(**changes):
    asked = {"tokens": [1], "shapes": ["64x64"], "formats": ["nvfp4"], "alone": 2, "jobs": 2, "kernels": ["k"]}
    wheel = {"blocks": 1, "wheel": None, "kernels_in": None}
    return argparse.Namespace(**asked | wheel | {"step_limit": 50} | changes)


def test_a_step_that_fails_costs_no_other_and_all_is_kept_at_once(monkeypatch):
    kept = []

    def start(fmt, asked, limit_s):
        if fmt == "nvfp4":
            raise RuntimeError("--warm nvfp4 failed")
        return result()["models"][0] | {"format": fmt}

    monkeypatch.setattr(cold_model, "measure_model", start)
    monkeypatch.setattr(cold_model, "measure_one", lambda names, cores, limit_s: {"names": names})
    keep = lambda found: kept.append(json.loads(json.dumps(found)))  # noqa: E731
    found = cold_model.measure(options(formats=["nvfp4", "fp8_row", "fp8"], alone=1), "9.0", keep)
    assert [(len(each["models"]), each["one_file"]) for each in kept] == [
        *((0, None), (1, None), (2, None)),
        (2, {"names": ["w4a16_small/bf16-90a"]}),
    ]
    assert kept[0]["failed"] == found["failed"] == ["--warm nvfp4 failed"]
    assert cold_model.faults(result() | {"failed": found["failed"]}, None, None) == ["--warm nvfp4 failed"]
    for alone in (options(alone=0), options(formats=[], alone=2)):  # no file of another machine in the place of ours
        assert cold_model.measure(alone, "9.0", keep)["one_file"] is None


def ended(status: Path, limit_s: float = 10) -> bool:
    """Whether a process is gone, or soon is: what was killed runs until the kernel comes to it."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        try:
            if "zombie" in status.read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_what_hangs_is_ended_with_its_compilers(tmp_path, monkeypatch):
    script, pid = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    monkeypatch.setattr(cold_model, "AGAIN", (str(script),))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="ended after 2 s"):
        cold_model.fresh(str(tmp_path), [], limit_s=2)
    assert time.monotonic() - began < 30  # a child that lives on keeps the pipes open for a minute
    status = Path("/proc", pid.read_text(), "status")
    assert ended(status)


def test_packages_that_are_found_by_pythonpath_are_found_by_the_process_too(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import json, os; print(json.dumps({'path': os.environ['PYTHONPATH']}))")
    monkeypatch.setattr(cold_model, "AGAIN", (str(script),))
    for before, after in (("/somewhere", f"{cold_model.ROOT}{os.pathsep}/somewhere"), ("", str(cold_model.ROOT))):
        monkeypatch.setenv("PYTHONPATH", before)
        assert cold_model.fresh(str(tmp_path), []) == {"path": after}


def test_the_slowest_kernels_of_the_models_are_compiled_alone(monkeypatch):
    walls, asked = {"a/one-90a": 5.0, "b/two-90a": 7.0}, []

    def fresh(folder, arguments, cores=None, *, limit_s=None, environment=None):
        assert environment is None  # a compiler is to be found
        assert limit_s == 50
        assert list(Path(folder).iterdir()) == []
        asked.append((arguments, cores))
        if arguments[0] == "--warm":
            return result()["models"][0] | {"total_s": 31.0, "backends": [], "kernels": walls | {"c/three-90a": 1.0}}
        return {"total_s": walls[arguments[1]] / 2, "proven": True}

    monkeypatch.setattr(cold_model, "fresh", fresh)
    found = cold_model.measure(options(), "9.0", lambda _: None)
    assert [arguments[:2] for arguments, cores in asked if cores == 2] == [
        ["--one", "b/two-90a"],
        ["--one", "a/one-90a"],
    ]
    assert (found["one_file"]["kernel"], found["one_file"]["wall_s"]) == ("b/two-90a", 3.5)


def test_without_a_gpu_it_says_what_it_cannot_measure(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(cold_model, "fresh", lambda *a, **k: {"total_s": 2.0, "proven": True})
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["cold_model.py", "--commit", "abc", "--json", str(out), "--one-limit", "1"])
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cold_model.main() == 1
    said = capsys.readouterr().out
    assert "No GPU: a model that is warmed up from an empty cache cannot be measured here" in said
    assert "limit 1.0" in said
    record = json.loads(out.read_text())
    assert (record["kind"], record["facts"]["commit"], record["cold_model"]["models"]) == ("cold model", "abc", [])
    assert record["cold_model"]["one_file"]["jobs"] == 2
    assert record["cores"] >= 1


def test_the_table():
    text = cold_model.table(result())
    assert "| nvfp4 | 31.0 | 1.0 | 25.0 | 6.0 | 2 | 93.0 | 3.0 |" in text
    assert text.index("w4a16_small/bf16-90a | 60.0") < text.index("fp8_quantize/any-90a | 33.0")
    assert "Slowest file alone on 2 cores: w4a16_small/bf16-90a, 33.0 s." in text
    assert cold_model.table({"models": [], "one_file": None}) == ""


def test_what_is_wrong_is_said():
    assert cold_model.faults(result(), 60, 40) == []
    assert "31.0 s from an empty cache, limit 30" in cold_model.faults(result(), 30, None)[0]
    assert "33.0 s on 2 cores, limit 30" in cold_model.faults(result(), None, 30)[0]
    other = result(kernels={"w4a16_small/fp16-90a": 1.0, "fp8_quantize/any-90a": 1.0})
    (fault,) = cold_model.faults(other, None, None)
    assert "w4a16_small/fp16-90a" in fault
    assert "fp8_quantize" not in fault
    assert "compiled again" in cold_model.faults(result(compiled_again=["x"]), None, None)[0]
