"""A standard output that cannot be written, for every command: an exit code and one line, never a traceback."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fp4dispatch import cli
from fp4dispatch.cli.output import write_file
from fp4dispatch.errors import InputError
from tests.checkpoint_cases import K, N, write

EXPLAIN = ["explain", "nvfp4_gemm", "-m", "16", "-n", "4096", "-k", "4096", "--arch", "12.0"]
OUTPUTS = ("closed", "full", "nobody reads")

for command in cli.HELP:  # here, so that a forked child need not
    importlib.import_module(f"fp4dispatch.cli.{command}")

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


def ended(words: list[str], output: str, *, errors: str = "read") -> tuple[int, str]:
    """Run a command in a forked child with such a standard output; the exit code, and what it said on the other."""
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            code = 120  # as the interpreter has it where the last flush fails
            try:
                _redirect(output, said.fileno() if errors == "read" else None)
                try:
                    code = cli.main(words)
                except SystemExit as stop:
                    code = stop.code if isinstance(stop.code, int) else 1
                except BaseException:
                    import traceback

                    os.write(said.fileno(), traceback.format_exc().encode())
                for stream in (sys.stdout, sys.stderr):
                    if stream is not None:
                        stream.flush()
            except BaseException:
                code = 120
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return code, said.read().decode()


def _redirect(output: str, errors: int | None) -> None:
    """Give this process the streams that a shell would give it."""
    sys.stdout = sys.stderr = None
    if output == "closed":
        os.close(1)
    elif output == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    elif output == "nobody reads":
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)
    else:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if output != "closed":
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as the interpreter does
    if errors is None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    else:
        os.dup2(errors, 2)
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115


def judge(code: int, said: str, output: str) -> None:
    assert code == 1, said
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if "standard output cannot be written" in line]
    assert len(lines) == (output != "nobody reads"), said


@needs_full
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("name", sorted(cli.HELP))
def test_every_command_ends_with_a_code(name, output):
    judge(*ended([name, "--help"], output), output)


@needs_full
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize(
    "words",
    [[], ["--version"], ["env"], ["env", "--json"], EXPLAIN, [*EXPLAIN, "--json"], ["cache", "list"], ["verify"]],
    ids=" ".join,
)
def test_what_commands_print_is_not_lost_in_silence(words, output, tmp_path, monkeypatch):
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    judge(*ended(words, output), output)
    assert ended(words, "null")[0] in (0, 1)


@needs_full
@pytest.mark.parametrize("output", OUTPUTS)
def test_the_work_is_done_though_nobody_hears_of_it(output, tmp_path):
    source = write(tmp_path / "in", {"a.weight": torch.ones(N, K)})
    words = ["quantize", str(source), str(tmp_path / "out"), "--format", "fp8", "--include", "a"]
    judge(*ended(words, output), output)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > N * K


@needs_full
@pytest.mark.parametrize("words", [["env"], ["explain", "nonsense"], ["cache", "--nonsense"]], ids=" ".join)
def test_a_full_standard_error_changes_no_code(words):
    code, said = ended(words, "null")
    assert ended(words, "null", errors="full")[0] == code, said


def test_no_file_becomes_standard_output(tmp_path):
    """A file opened while descriptor 1 is free gets it, and what is printed below Python would land in the file."""
    source = write(tmp_path / "in", {"a.weight": torch.ones(N, K)})
    code = (
        "import os, sys\nfrom fp4dispatch import cli\nfrom fp4dispatch.checkpoints.files import writer\n"
        "real = writer._write\ndef write(*args):\n    os.write(1, b'printed below Python'); real(*args)\n"
        "writer._write = write; sys.exit(cli.main(sys.argv[1:]))"
    )
    words = ["quantize", str(source), str(tmp_path / "out"), "--format", "fp8", "--include", "a"]
    shell = f'exec "{sys.executable}" -c "$0" "$@" >&-'
    done = subprocess.run(["sh", "-c", shell, code, *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "standard output cannot be written" in done.stderr
    for file in (tmp_path / "out").iterdir():
        assert b"printed below" not in file.read_bytes()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "utf-16"])
@pytest.mark.parametrize("name", ["\u0142\u00fc".encode(), b"no \xfc text"])
def test_a_path_that_the_terminal_cannot_spell_loses_no_output(name, encoding, tmp_path):
    folder = os.fsencode(tmp_path) + b"/" + name
    environment = {**os.environb, b"FP4DISPATCH_CACHE_DIR": folder, b"PYTHONIOENCODING": f"{encoding}:strict".encode()}
    done = subprocess.run(
        [sys.executable, "-m", "fp4dispatch", "cache", "path"], env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    said = done.stdout.decode(encoding)
    assert said.startswith(f"{tmp_path}/")
    assert said.count("\n") == 1


def test_a_file_that_is_there_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    file, link = tmp_path / "bench.json", tmp_path / "link.json"
    link.symlink_to(file.name)
    write_file("json", str(link), "old")
    assert link.is_symlink()

    def full(path, text, encoding="utf-8"):
        with path.open("w", encoding=encoding) as half:
            half.write(text[:2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(InputError, match=r"--json .*No space left"):
            write_file("json", str(link), "new and longer")
    assert file.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "link.json"]
    write_file("json", os.devnull, "gone")
    assert not Path(os.devnull).is_file()


def test_what_no_rename_can_replace_is_written_in_place(tmp_path, monkeypatch):
    read, written = os.pipe()
    write_file("json", f"/dev/fd/{written}", "text")
    assert os.read(read, 9) == b"text"
    long = tmp_path / ("x" * 250 + ".json")
    write_file("json", str(long), "long")
    assert long.read_text() == "long"
    file = tmp_path / "bench.json"
    file.write_text("old")
    file.chmod(0o664)
    write_file("json", str(file), "new")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("new", 0o664)

    def forbidden(path, target):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))  # a file that is mounted

    monkeypatch.setattr(Path, "replace", forbidden)
    write_file("json", str(file), "newer")
    assert file.read_text() == "newer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", long.name]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError, match="cannot be written"):
        write_file("json", str(tmp_path / "loop"), "text")


@needs_full
@pytest.mark.parametrize("redirection", [">&-", ">/dev/full", "| head -1"])
def test_by_a_shell(redirection):
    command = f"set -o pipefail; {sys.executable} -m fp4dispatch env {redirection}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode in ((0, 1) if "head" in redirection else (1,))
