"""bench/first_command.py on a small repository: what it runs, measures, refuses and writes; and the page made of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from bench import first_command
from fp4dispatch.benchmark.reports import records
from tests.readme import commands
from tests.site import first

MAKE = "mkdir .venv && echo kept > .venv/file && cat said.txt"


@pytest.fixture
def source(tmp_path):
    """A repository with one commit, and a file that is not in it."""
    if shutil.which("git") is None:
        pytest.skip("git is not on PATH")
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "said.txt").write_text("a demo\nok: within the bounds\n\n")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(folder), *words], check=True)
    (folder / "said.txt").write_text("changed since\n")
    return folder


def test_each_part_runs_in_a_clone_and_is_measured(source):
    found = first_command.measure(MAKE, source, "HEAD")
    assert [step["command"] for step in found["steps"]] == ["mkdir .venv", "echo kept > .venv/file", "cat said.txt"]
    assert all(step["peak_mb"] > 0 and step["wall_s"] >= 0 for step in found["steps"])
    assert found["output"] == ["a demo", "ok: within the bounds"]
    assert first_command.faults(found) == []
    with pytest.raises(RuntimeError, match=r"cat gone failed:(.|\n)*No such file"):
        first_command.measure(f"{MAKE} && cat gone", source, "HEAD")


def test_memory_is_that_of_the_part_and_caches_are_its_own(tmp_path, monkeypatch):
    """From a small process, as the script is one: to Linux the memory of a child is at least that of who starts it."""
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", "/elsewhere")
    program = (
        "import os; x = b'x' * 300_000_000; print(os.getenv('XDG_CACHE_HOME'), os.getenv('FP4DISPATCH_CACHE_DIR'))"
    )
    part = f'{sys.executable} -c "{program}"'
    measured = (
        "import json, pathlib, sys\nfrom bench import first_command\n"
        "part, folder, caches = sys.argv[1], *map(pathlib.Path, sys.argv[2:])\n"
        "print(json.dumps(first_command.run(part, folder, caches)))"
    )
    words = [sys.executable, "-c", measured, part, str(tmp_path), str(tmp_path / "caches")]
    done = subprocess.run(words, cwd=first_command.ROOT, capture_output=True, text=True, check=True)
    step, printed = json.loads(done.stdout)
    assert 300 < step["peak_mb"] < 1000
    assert printed.split() == [str(tmp_path / "caches"), "None"]


def test_lines_that_are_too_wide_and_a_demo_that_is_not_ok_are_faults():
    assert first_command.faults({"output": ["ok: x", "y" * 100]}) == []
    wide, bad = first_command.faults({"output": ["x" * 101]})
    assert wide.startswith("wider than 100 columns: xxx")
    assert bad == "the demo did not print ok"


def test_the_record_and_its_page(source, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(first_command, "commands", lambda: {"demo": MAKE})
    monkeypatch.setattr(first_command, "ROOT", source)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["first_command.py", "--commit", "HEAD", "--json", str(tmp_path)])
    assert first_command.main() == 0
    assert "ok: within the bounds" in capsys.readouterr().out
    (path,) = tmp_path.glob("first-command-*.json")
    assert json.loads(path.read_text())["first_command"]["output"] == ["a demo", "ok: within the bounds"]
    monkeypatch.setattr(first, "RESULTS", tmp_path)
    shown = first.first()
    assert "| `cat said.txt` | 0 |" in shown
    assert "```text\na demo\nok: within the bounds\n```" in shown


def test_the_kept_record_is_of_the_command_of_the_readme():
    for record in records.kept(first.RESULTS, "first command"):
        found = record["first_command"]
        assert [step["command"] for step in found["steps"]] == first_command.parts(commands()["demo"])
        assert first_command.faults(found) == []
