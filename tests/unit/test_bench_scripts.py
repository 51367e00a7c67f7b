"""The scripts of bench/: how each is run, what all of them take, and the table that says which answers what."""

from __future__ import annotations

import argparse
import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from bench.shared import commandline
from fp4dispatch.benchmark.reports import records
from tests.site import scripts

BENCH = Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(path.stem for path in BENCH.glob("*.py") if path.stem != "__init__")
NEEDS = {"generated_text": "transformers", "breakable": "transformers", "fit_speeds": "scipy"}
NEEDS |= {"architectures": "transformers", "fit_launch_model": "scipy", "kernels_w4_large": "tvm_ffi"}


@pytest.mark.parametrize("path", sorted(BENCH.rglob("*.py")), ids=lambda path: path.stem)
def test_no_script_changes_where_modules_are_looked_for(path):
    tree = ast.parse(path.read_text("utf-8"))
    named = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert "sys.path" not in named, "run it as python -m bench.NAME"
    others = {*SCRIPTS, *(path.stem for path in (BENCH / "shared").glob("*.py"))}
    bare = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module in others]
    assert bare == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_how_to_run_it_before_it_does_anything(name, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    script = importlib.import_module(f"bench.{name}")
    with pytest.raises(SystemExit) as ended:
        script.main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m bench.{name} [-h]")
    assert f"    python -m bench.{name}" in script.__doc__
    options = {line.split()[0] for line in said.splitlines() if line.startswith("  --")}
    assert "--out" not in options
    assert "--json" not in options or "--commit" in options


def test_the_table_has_every_script_once_and_every_record():
    named = [name for names in scripts.ABOUT.values() for name in names]
    assert sorted(named) == SCRIPTS
    found = {kind for name in SCRIPTS for kind in scripts.kinds(name)}
    by_hand = {"sweep", "two gpus"}
    assert found == set(records.KINDS) - by_hand - {"random suite"}, "of fp4dispatch bench, and kept by hand"
    rows = scripts.table().splitlines()
    assert "[race](race.py) | The launch race of every kernel family" in "\n".join(rows)
    assert rows[-1].endswith("| `proof-cost-*` |")
    assert "| - |" in next(row for row in rows if "[fit_speeds]" in row)
    assert "`few-tokens-*`" in next(row for row in rows if "[kernels_w8]" in row)
    assert all(len(row) < 240 for row in rows)


def parser(**options):
    made = commandline.parser("What for.\n\n    python -m bench.x\n")
    commandline.takes_record(made, **options)
    return made


def test_the_commit_is_what_git_says_unless_it_is_given(tmp_path, monkeypatch, capsys):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@x", "-c", "commit.gpgsign=false"]
    assert commandline.checked_out(tmp_path) is None
    monkeypatch.setattr(commandline, "ROOT", tmp_path)
    assert commandline.parse(parser(), []).commit == "unknown"
    with pytest.raises(SystemExit):
        commandline.parse(parser(), ["--json", "x.json"])
    assert "python -m bench.x: error: --commit HASH is needed: a record says what" in capsys.readouterr().err
    assert commandline.parse(parser(), ["--json", "x.json", "--commit", "abc"]).commit == "abc"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    record = tmp_path / "bench" / "results" / "x.json"
    record.parent.mkdir(parents=True)
    for file in (tmp_path / "file", record):
        file.write_text("1")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    subprocess.run([*git, "tag", "v1"], check=True)
    clean = commandline.parse(parser(), ["--json", "x.json"]).commit
    assert len(clean) >= 7
    assert int(clean, 16) >= 0
    record.write_text("2")
    assert commandline.parse(parser(default=Path("y")), []).commit == clean, "what the script before this one wrote"
    (tmp_path / "file").write_text("2")
    assert commandline.parse(parser(default=Path("y")), []).commit == f"{clean}-dirty"


def test_a_record_may_be_needed_and_have_a_place_of_its_own():
    with pytest.raises(SystemExit):
        commandline.parse(parser(needed=True), ["--commit", "abc"])
    assert commandline.parse(parser(default=Path("y")), ["--commit", "abc"]).json == Path("y")
    assert "folder of the record" in parser(folder=True).format_help()
    only = argparse.ArgumentParser()
    assert vars(commandline.parse(only, [])) == {}


def test_a_docstring_without_the_command_is_an_error():
    with pytest.raises(AssertionError, match="how to run it"):
        commandline.parser("Measure.")


def test_the_command_line_alone_imports_nothing_large():
    """bench/first_command.py measures memory of a child, which at first counts as large as its parent."""
    code = "import sys, bench.shared.commandline; print(sorted({'torch', 'numpy', 'fp4dispatch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCH.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
