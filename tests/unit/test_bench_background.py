"""Processes beside a benchmark: they get their task, end with the run whatever ends it, and a failure is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fp4dispatch.benchmark.methods import background
from fp4dispatch.benchmark.methods.background import Background, Job

SLEEPS = """
import os, pathlib, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
pathlib.Path(json.load(sys.stdin)).write_text(f"{os.getpid()} {grandchild.pid}")
time.sleep(120)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module onto the search path, and return the job that runs it."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text, task=None, **given):
        (tmp_path / "background_work.py").write_text("import json\n" + textwrap.dedent(text))
        return Job("working", "background_work", task, **given)

    return write


@pytest.fixture(autouse=True)
def open_files():
    before = {file.name for file in Path("/proc/self/fd").iterdir()}
    yield
    assert {file.name for file in Path("/proc/self/fd").iterdir()} == before


def until(what, limit_s=30.0):
    ends = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.01)


def wait_for_all(running):
    until(lambda: all(process._is_over() for _, process in running._running))


def started(file):
    """Return the processes that wrote their numbers into a file."""
    until(lambda: file.exists() and len(file.read_text().split()) == 2)
    return [int(pid) for pid in file.read_text().split()]


def is_gone(pid):
    try:
        return "zombie" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_process_gets_its_task_the_search_path_and_its_environment(module, tmp_path):
    job = module(
        """
        import os, sys
        task = json.load(sys.stdin)
        seen = [task["long"], os.environ["MORE"], os.environ["HOME"], sys.path, __name__, os.getpgrp() == os.getpid()]
        open(task["out"], "w").write(json.dumps(seen))
        print("x" * 1_000_000)  # more than a pipe holds
        """,
        {"out": str(tmp_path / "out"), "long": "y" * 1_000_000},
        environment={"MORE": "1"},
    )
    with Background([job]) as running:
        wait_for_all(running)
    assert running.lost == []
    seen = background.json.loads((tmp_path / "out").read_text())
    assert seen == ["y" * 1_000_000, "1", os.environ["HOME"], sys.path, "__main__", True]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('no compiler')", "working: ValueError: no compiler"),
        ("raise SystemExit('one\\ntwo\\n\\n')", "working: two"),
        ("raise SystemExit(3)", "working: it ended with status 3"),
        ("import os; print('busy', flush=True); os.kill(os.getpid(), 9)", "working: it was killed by signal 9"),
        ("", None),
    ],
)
def test_a_process_that_fails_is_said_and_stops_nobody(module, text, said):
    with Background([module(text)]) as running:
        wait_for_all(running)
    assert running.lost == ([said] if said else [])


def test_a_process_that_cannot_be_started_is_said(module, monkeypatch):
    monkeypatch.setattr(background.sys, "executable", "/no/such/python")
    with Background([module("")]) as running:
        pass
    (lost,) = running.lost
    assert lost.startswith("working: ")
    assert "/no/such/python" in lost


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_it_ends_with_the_block_and_so_does_all_that_it_started(module, tmp_path, error):
    running, began = Background([module(SLEEPS, str(tmp_path / "pids"))]), time.monotonic()
    try:
        with running:
            pids = started(tmp_path / "pids")
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        assert error
    assert running.lost == [], "what still works at the end has not failed"
    assert all(map(is_gone, pids))
    assert time.monotonic() - began < 60


def test_what_ignores_the_request_to_end_is_killed(module, tmp_path, monkeypatch):
    monkeypatch.setattr(background, "GRACE", 0.2)
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS
    with Background([module(stubborn, str(tmp_path / "pids"))]):
        pids = started(tmp_path / "pids")
    until(lambda: all(map(is_gone, pids)))


def test_a_process_may_clean_up_when_it_is_asked_to_end(module, tmp_path):
    clean = f"""
        import os, pathlib, signal, time
        def end(*_):
            pathlib.Path({str(tmp_path / "cleaned")!r}).touch()
            raise SystemExit
        signal.signal(signal.SIGTERM, end)
        pathlib.Path({str(tmp_path / "pids")!r}).write_text(f"{{os.getpid()}} 0")
        time.sleep(120)
        """
    with Background([module(clean)]):
        started(tmp_path / "pids")
    assert (tmp_path / "cleaned").exists()


def test_compilers_of_a_process_that_died_are_ended_too(module, tmp_path):
    dies = SLEEPS.replace("time.sleep(120)\n", "os.kill(os.getpid(), 9)\n")
    assert dies != SLEEPS
    with Background([module(dies, str(tmp_path / "pids"))]) as running:
        _, grandchild = started(tmp_path / "pids")
        wait_for_all(running)
        assert not is_gone(grandchild)
    until(lambda: is_gone(grandchild))
    assert running.lost == ["working: it was killed by signal 9"]


def test_an_interrupt_while_one_ends_leaves_none(module, tmp_path, monkeypatch):
    def interrupted(seconds):
        monkeypatch.undo()
        raise KeyboardInterrupt

    job = module("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS, str(tmp_path / "pids"))
    running = Background([job]).__enter__()
    pids = started(tmp_path / "pids")
    monkeypatch.setattr(background.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.__exit__(None, None, None)
    until(lambda: all(map(is_gone, pids)))


def test_it_ends_when_the_run_is_killed(module, tmp_path):
    job = module(
        "import sys\nfrom fp4dispatch.benchmark.methods import background\nbackground.end_with(int(sys.argv[1]))\n"
        + SLEEPS,
        str(tmp_path / "pids"),
    )
    run = f"""
import sys, time
sys.path[:] = {sys.path!r}
from fp4dispatch.benchmark.methods.background import Background, Job
with Background([Job("working", {job.module!r}, {job.task!r})]):
    time.sleep(120)
"""
    with subprocess.Popen([sys.executable, "-c", run]) as killed:
        pids = started(tmp_path / "pids")
        killed.send_signal(signal.SIGKILL)
    until(lambda: all(map(is_gone, pids)))
