"""Humming's kernels are compiled by another process while the random suite runs; Humming itself is a fake."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fp4dispatch import cli
from fp4dispatch.benchmark import roofline
from fp4dispatch.benchmark.methods import background, humming_ahead, peers, roster
from fp4dispatch.benchmark.methods.base import BASELINE
from fp4dispatch.benchmark.problems import sampling
from fp4dispatch.jit.compiler import limits
from tests import humming_fake, random_cases

SUITE = ("bench", "--suite", "random", "--seed", "3", "--problems", "6", "--rounds", "2", "--no-regret")
HERE = torch.device("cpu")


@pytest.fixture
def humming(monkeypatch, tmp_path):
    """Install the fake here and for processes that are started; the folder of what was compiled."""
    for name, module in humming_fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(humming_fake.package(tmp_path / "path"))
    folder = tmp_path / "compiled"
    folder.mkdir()
    monkeypatch.setenv("HUMMING_FAKE", str(folder))
    return folder


@pytest.fixture
def suite(humming, monkeypatch):
    """Draw 5, 40, 37 and 200 tokens of each layer: three kernels, of which one serves two problems."""
    random_cases.hopper(monkeypatch)
    monkeypatch.setattr(sampling, "_tokens", lambda random_, least, most, count: [5, 40, 37, 200][:count])
    return humming


@pytest.fixture
def processes(monkeypatch):
    """Return the processes that were started."""
    started, real = [], background.subprocess.Popen

    def start(*args, **kwargs):
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(background.subprocess, "Popen", start)
    return started


# ----------------------------------------------------------------------------------------------------------- compiling


def test_each_kernel_is_compiled_once_in_the_order_of_the_problems(humming):
    problems = [(64, 128, [40, 5, 37, 41]), (32, 128, [1, 2]), (64, 256, [5]), (64, 128, [40, 1])]
    assert humming_ahead.compile_all(problems, HERE, 1) == []
    assert [kernel[:3] for kernel in humming_fake.compiled(humming)] == [
        *((64, 128, 64), (64, 128, 16), (32, 128, 8), (32, 128, 16), (64, 256, 16), (64, 128, 8))
    ]


def test_several_are_compiled_at_once(humming, monkeypatch):
    together = threading.Barrier(3, timeout=10)
    real = humming_fake.HummingKernel.__init__
    monkeypatch.setattr(
        humming_fake.HummingKernel, "__init__", lambda self, *given: (together.wait(), real(self, *given))[1]
    )
    assert humming_ahead.compile_all([(64, 128, [1, 5, 40])], HERE, 3) == []


def test_a_layer_without_kernels_or_a_kernel_that_fails_costs_no_other(humming, monkeypatch):
    problems = [(64, humming_fake.NO_TABLE_K, [1]), (64, 128, [1, 5])]
    assert humming_ahead.compile_all(problems, HERE, 2) == ["64x896: AssertionError"]
    assert len(humming_fake.compiled(humming)) == 2
    monkeypatch.setenv("HUMMING_FAKE_FAULT", "nvrtc:\nno")
    assert humming_ahead.compile_all(problems[1:], HERE, 2) == [
        "64x128, M=1: RuntimeError: nvrtc: no",
        "64x128, M=5: RuntimeError: nvrtc: no",
    ]


def test_no_kernel_is_loaded(humming):
    layer = humming_fake.LayerConfig(64, 128).to_str()
    with pytest.raises(AssertionError, match="loaded onto the GPU"):
        humming_fake.HummingKernel.prepare_kernels(layer, None, '[[0, 8, {"block": 8}]]', HERE)
    assert humming_ahead._compiled_only().prepare_kernels(layer, None, '[[0, 8, {"block": 16}]]', HERE) == [0]


@pytest.mark.parametrize(
    ("cores", "memory", "max_jobs", "some"),
    [(64, 99, None, 8), (4, 99, None, 2), (1, 99, None, 1), (64, 3, None, 3), (64, 99, 2, 2)],
)
def test_how_many_are_compiled_at_once(monkeypatch, cores, memory, max_jobs, some):
    monkeypatch.setattr(humming_ahead, "limits", lambda: limits.Limits(cores, memory))
    monkeypatch.delenv("MAX_JOBS", raising=False)
    if max_jobs:
        monkeypatch.setenv("MAX_JOBS", str(max_jobs))
    assert humming_ahead.workers() == some


# ----------------------------------------------------------------------------------------------------------- the suite


def run(capsys, tmp_path, *words):
    """Return the command's status, the document and what went to stderr."""
    path = tmp_path / "x.json"
    status = cli.main([*SUITE, "--formats", "nvfp4", *words, "--json", str(path)])
    return status, json.loads(path.read_text()), capsys.readouterr().err


def test_kernels_of_the_suite_are_compiled_by_another_process(suite, tmp_path, capsys, processes):
    """The fake layer waits until another process has compiled just its kernel."""
    status, doc, said = run(capsys, tmp_path, "--methods", roster.HUMMING)
    assert status == 0
    assert "ahead" not in said
    rows = [row for row in doc["measured"] if row["method"] == roster.HUMMING]
    assert [row["status"] for row in rows] == ["ok"] * 6
    (process,) = processes
    kernels = humming_fake.compiled(suite)
    assert {pid for *_, pid in kernels} == {process.pid} != {os.getpid()}
    needed = {(row["n"], row["k"], 16 if row["m"] <= 37 else 64) for row in rows}
    assert {kernel[:3] for kernel in kernels} == needed
    assert process.returncode is not None


def test_it_has_the_same_environment_but_humming_starts_nothing_else(suite, processes):
    with background.Background([peers.HummingNvfp4().ahead([(64, 128, (5,))], random_cases.HOPPER_ON_PAPER)]):
        (process,) = processes
        environment = [b""]
        until = time.monotonic() + 30
        while environment == [b""] and time.monotonic() < until:  # it is empty while the process starts
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    assert b"HUMMING_DISABLE_PARALLEL_BUILD=1" in environment
    assert f"HUMMING_FAKE={suite}".encode() in environment


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no compiler", r"M=5: RuntimeError: no compiler (and 3 more); the run waited for what was missing"),
        ("killed", "it was killed by signal 9; the run waited for what was missing"),
    ],
)
def test_a_process_that_fails_is_said_and_humming_is_measured(suite, monkeypatch, tmp_path, capsys, fault, said):
    monkeypatch.setenv("HUMMING_FAKE_FAULT", fault)
    end = background._Process.end

    def end_late(process):
        """The run may be over before a process has started, on a busy machine; that is no failure."""
        until = time.monotonic() + 30
        while not process._is_over() and time.monotonic() < until:
            time.sleep(0.01)
        return end(process)

    monkeypatch.setattr(background._Process, "end", end_late)
    status, doc, err = run(capsys, tmp_path, "--methods", roster.HUMMING)
    assert status == 0
    assert {row["status"] for row in doc["measured"]} == {"ok"}
    (line,) = [line for line in err.splitlines() if "ahead" in line]
    assert line.startswith("compiling kernels of humming/nvfp4 ahead: ")
    assert line.endswith(said)


def test_nothing_is_started_for_other_methods_or_without_humming(suite, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(background, "_Process", lambda job: pytest.fail(f"a process was started: {job}"))
    status, doc, _ = run(capsys, tmp_path, "--methods", "FP4Linear")
    assert status == 0
    assert {row["method"] for row in doc["measured"]} == {BASELINE, "FP4Linear"}
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    status, doc, _ = run(capsys, tmp_path, "--methods", roster.HUMMING)
    assert status == 0
    assert "is not installed" in doc["absent"][roster.HUMMING]


def test_the_process_ends_with_the_budget(suite, tmp_path, capsys, processes):
    status, doc, said = run(capsys, tmp_path, "--methods", roster.HUMMING, "--seconds", "0")
    assert (status, len(doc["left"])) == (0, 6)
    assert "ahead" not in said
    assert [process.returncode for process in processes] == [-signal.SIGTERM]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_the_process_ends_with_an_interrupted_run(suite, monkeypatch, tmp_path, processes, error):
    def interrupted(card, engine):
        raise error

    monkeypatch.setattr(roofline, "measure", interrupted)
    with suppress(KeyboardInterrupt, MemoryError):
        assert cli.main([*SUITE, "--methods", roster.HUMMING]) != 0
    assert [process.returncode for process in processes] == [-signal.SIGTERM]


def test_the_process_ends_when_the_run_is_killed(humming, monkeypatch):
    """A killed run closes its end of the pipe."""
    monkeypatch.setenv("HUMMING_FAKE_FAULT", "hangs")
    process = background._Process(humming_ahead.job("compiling", [(64, 128, (5,))], HERE))
    os.close(process._alive)
    process._alive = os.open(os.devnull, os.O_RDONLY)
    assert process._process.wait(60) == -signal.SIGKILL
    os.close(process._alive)
    process._said.close()
