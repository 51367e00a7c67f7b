"""The command line as a whole: the table of commands, exit codes, errors."""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fp4dispatch
from fp4dispatch import cli
from fp4dispatch.cli import help_text
from fp4dispatch.errors import NoBackendError

FOLDER = Path(cli.__file__).parent


def test_every_listed_command_exists() -> None:
    assert {"env", "doctor"} <= set(cli.HELP)
    for name, line in cli.HELP.items():
        module = importlib.import_module(f"fp4dispatch.cli.{name}")
        assert callable(module.run), name
        parser = argparse.ArgumentParser()
        subparsers = parser.add_subparsers(dest="command")
        module.add_parser(subparsers)
        assert list(subparsers.choices) == [name], f"{name} must declare itself under its own name"
        assert line, name


def test_every_command_that_exists_is_listed() -> None:
    files = {file.stem for file in FOLDER.glob("[a-z]*.py") if "\ndef add_parser(" in file.read_text()}
    assert files == set(cli.HELP)


@pytest.mark.parametrize("name", sorted(cli.HELP))
def test_every_command_has_help_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_no_arguments_print_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(line in out for line in cli.HELP.values())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fp4dispatch {fp4dispatch.__version__}\n"


@pytest.mark.parametrize("words", [["nonsense"], ["env", "--nonsense"], ["--json"], ["env", "extra"]])
def test_wrong_usage_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (NoBackendError("nothing can run it"), 1, "NoBackendError: nothing can run it\n"),
        (ImportError("No module named 'torch'"), 1, "fp4dispatch doctor"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors(
    raised: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fp4dispatch.cli import env

    def run(args: Any) -> int:
        raise raised

    monkeypatch.setattr(env, "run", run)
    assert cli.main(["env"]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4dispatch.cli import env

    def run(args: Any) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(env, "run", run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["env"])


def module(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fp4dispatch", *words],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_as_a_module() -> None:
    assert module("--version").stdout == f"fp4dispatch {fp4dispatch.__version__}\n"
    assert module("nonsense").returncode == 2


def test_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "fp4dispatch", "env"]
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, timeout=60, env=environment
    )
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 1


@pytest.mark.parametrize("name", ["env", "doctor"])
def test_a_command_does_not_import_the_others(name: str) -> None:
    script = (
        "import sys\nfrom fp4dispatch import cli\n"
        f"try:\n    cli.main(['{name}', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted(m for m in sys.modules if m == 'torch' or m.startswith('fp4dispatch.cli.')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    others = {"torch", *(f"fp4dispatch.cli.{other}" for other in cli.HELP if other != name)}
    loaded = [m for m in eval(done.stderr) if m in others]
    assert loaded == []


@pytest.mark.parametrize("name", sorted(cli.HELP))
def test_help_is_plain_text_with_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    out = capsys.readouterr().out
    assert "`" not in out
    assert ":mod:" not in out
    assert help_text.EXAMPLES[name]
    for example in help_text.EXAMPLES[name]:
        assert example in out
        program, *words = shlex.split(example)
        assert program == "fp4dispatch"
        assert cli._parser((name,)).parse_args(words).command == name


@pytest.mark.parametrize("example", help_text.EXAMPLES["explain"])
def test_examples_of_explain_name_a_backend_that_runs(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(example)[1:]) == 0
    assert ", runs " in capsys.readouterr().out.splitlines()[0] or "--all" in example


def test_help_keeps_paragraphs_and_loses_marks() -> None:
    text = "``fp4dispatch verify``: look at ``x`` and :func:`~a.b`.\n\nSecond\nparagraph.\n\n  kept  as it is"
    parser = argparse.ArgumentParser(formatter_class=help_text.Formatter, description=help_text.plain(text))
    assert "Look at x and a.b.\n\nSecond paragraph.\n\n  kept  as it is\n" in parser.format_help()


def test_a_completion_script_knows_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab (extra `completion`) is not installed")
    assert cli.main(["--print-completion", "bash"]) == 0
    out = capsys.readouterr().out
    for word in (*cli.HELP, "--wheel", "--budget-s", "--max-shard-size"):
        assert word in out
    assert cli.main(["--print-completion", "cmd.exe"]) == 2
    assert "usage:" in capsys.readouterr().err


def test_without_shtab_the_fix_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["--print-completion", "bash"]) == 1
    assert "pip install 'shtab" in capsys.readouterr().err


def test_only_public_names_are_listed_by_dir() -> None:
    listed = {name for name in dir(fp4dispatch) if not name.startswith("__")}
    assert listed == {name for name in fp4dispatch.__all__ if not name.startswith("__")} | {"graphs"}
