"""Standard output of ``--json`` holds the JSON alone, whatever plug-ins and libraries print, and by which way."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp4dispatch import cli
from fp4dispatch.cli import answers, env

FOLDER = Path(cli.__file__).parent
ROOT = FOLDER.parents[1]

LOUD = """
import atexit, ctypes, os, sys
print("LOUD in Python")
sys.__stdout__.write("LOUD in the stream of the interpreter\\n")
os.write(1, b"LOUD below Python\\n")
os.system("echo LOUD in a child")
ctypes.CDLL(None).puts(b"LOUD in C")
atexit.register(print, "LOUD at exit")
"""
WAYS = 6


def command(tmp_path: Path, group: str, *words: str, redirect: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command beside a plug-in that prints in every way when it is imported."""
    info = tmp_path / "site" / "loud-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nloud = loud_plugin:Loud\n")
    (tmp_path / "site" / "loud_plugin.py").write_text(LOUD + "def Loud(): pass\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(tmp_path / "site"))),
        "FP4DISPATCH_CACHE_DIR": str(tmp_path / "cache"),
    }
    shell = f'exec "{sys.executable}" -m fp4dispatch "$@" {redirect}'
    return subprocess.run(
        ["sh", "-c", shell, "sh", *words], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "fp8_gemm", "-m", "16", "-n", "4096", "-k", "4096", "--json"),
        ("verify", "--json"),
        ("tune", "--list", "--json"),
    ],
    ids=lambda words: words[0],
)
def test_what_a_plugin_prints_is_not_in_the_json(words, tmp_path):
    done = command(tmp_path, "fp4dispatch.backends", *words)
    json.loads(done.stdout)
    assert done.stderr.count("LOUD") == WAYS
    assert "Traceback" not in done.stderr


def test_what_is_printed_while_a_command_is_imported_is_not_in_its_answer(tmp_path):
    """``quantize`` imports torch, and torch what is registered with it."""
    pytest.importorskip("shtab", reason="shtab (extra `completion`) is not installed")
    done = command(tmp_path, "torch.backends", "--print-completion", "bash")
    assert "--max-shard-size" in done.stdout
    assert done.stdout.count("LOUD") <= 1  # at exit, where no JSON is awaited
    assert done.stderr.count("LOUD") >= WAYS - 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_what_a_plugin_prints_may_be_lost(tmp_path):
    done = command(
        tmp_path,
        "fp4dispatch.backends",
        "explain",
        "fp8_gemm",
        *("-m", "1", "-n", "64", "-k", "64", "--json"),
        redirect="2>/dev/full",
    )
    assert done.returncode == 0
    json.loads(done.stdout)


@pytest.mark.parametrize(
    ("out", "said"),
    [("/dev/full", "fp4dispatch: standard output cannot be written: [Errno 28] No space left on device\n"), (None, "")],
    ids=["full", "a reader that left"],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_answer_that_cannot_be_written_is_not_in_standard_error(out, said):
    """In a stream with a buffer, which PYTHONUNBUFFERED takes away."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if out is None:
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open(out, os.O_WRONLY)
    words = [sys.executable, "-m", "fp4dispatch", "env", "--json"]
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, said)


def test_in_a_process_of_others_standard_output_is_as_it_was_afterwards(monkeypatch):
    real = env.collect

    def loud(system):
        print("LOUD")
        os.write(1, b"LOUD\n")
        return real(system)

    monkeypatch.setattr(env, "collect", loud)
    copy, out = os.dup(1), sys.stdout
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    try:
        monkeypatch.setattr(sys, "stdout", os.fdopen(1, "w", closefd=False))
        assert cli.main(["env", "--json"]) == 0
        os.write(1, b"after\n")
    finally:
        os.dup2(copy, 1)
        os.close(copy)
        monkeypatch.setattr(sys, "stdout", out)
    with os.fdopen(read) as said:
        answer, after = said.read().rsplit("}\n", 1)
    assert json.loads(answer + "}")["fp4dispatch"]
    assert after == "after\n"


def test_a_stream_that_is_no_descriptor_is_kept_too(capsys):
    with answers.kept():
        print("LOUD")
        answers.answer("said")
    print("after")
    assert capsys.readouterr() == ("said\nafter\n", "LOUD\n")


def test_every_command_answers_by_answer():
    """``print(json.dumps(...))`` would go to standard error."""
    found = [
        f"{path.name}:{call.lineno}"
        for path in FOLDER.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "print" and "json.dumps" in ast.unparse(call)
    ]
    assert found == []
