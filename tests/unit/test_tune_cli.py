"""``fp4dispatch tune``: arguments, what it prints and stores; measuring itself is test_tuning.py's business."""

from __future__ import annotations

import json

import pytest
import torch

from fp4dispatch import cli
from fp4dispatch.dispatch import choose, tuned
from fp4dispatch.tune import tuning
from tests.unit.test_tuning import HERE, PROBLEM, Clock, machine, new_process  # noqa: F401  (machine is a fixture)

COMMAND = ["tune", "fp8_gemm", "--nk", "64x96", "--scaling", "row", "-m", "1,16"]


@pytest.fixture
def gpu(machine, monkeypatch):  # noqa: F811
    """A GPU that is a CPU."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tuning, "engine_of", lambda device: Clock())
    real = tuning.make_weights
    monkeypatch.setattr(tuning, "make_weights", lambda problem, device: real(problem, cpu))
    return machine


def test_it_measures_prints_and_stores(gpu, capsys):
    assert cli.main(COMMAND) == 0
    out = capsys.readouterr().out
    for part in ("fp8_gemm M=16 N=64 K=96 (row)", "second (fp8)  8.0 us", "-> auto runs second (fp8) [tuned]"):
        assert part in out
    new_process()
    assert choose.select(PROBLEM).backend == "second"


def test_json(gpu, capsys):
    assert cli.main([*COMMAND, "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert err == ""
    assert data["ok"]
    assert [row["problem"]["m"] for row in data["shapes"]] == [1, 16]
    assert data["shapes"][1]["auto"] == {"backend": "second", "activation": "fp8", "rule": "tuned"}
    assert data["shapes"][1]["timings"][0]["us"] == 8.0


def test_list_and_clear(gpu, capsys):
    assert cli.main(["tune", "--list"]) == 0
    assert "no tuned times in" in capsys.readouterr().out
    cli.main([*COMMAND, "--json"])
    capsys.readouterr()
    assert cli.main(["tune", "--list"]) == 0
    assert capsys.readouterr().out.count("measured 20") == 2
    assert cli.main(["tune", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert cli.main(["tune", "--clear"]) == 0
    assert "2 stored measurements removed" in capsys.readouterr().out
    assert list(tuned.store.folder().iterdir()) == []
    assert choose.select(PROBLEM).backend == "first"


def test_force_measures_again(gpu, capsys):
    cli.main(COMMAND)
    gpu["third"].us = 1.0
    cli.main(COMMAND)
    assert "-> auto runs second" in capsys.readouterr().out
    cli.main([*COMMAND, "--force"])
    assert "-> auto runs third" in capsys.readouterr().out


def test_wrong_numbers_are_exit_code_1(gpu, capsys):
    def write(plan, out, result):
        out.copy_(result)
        if out.shape[1] == PROBLEM.n:
            out.zero_()

    gpu["second"].write = write
    assert cli.main(COMMAND) == 1
    out, err = capsys.readouterr()
    assert "WRONG wrong at this size: M=1" in err
    assert "-> auto runs third" in out


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(COMMAND) == 1
    assert "InputError: tune measures on a GPU, and torch sees none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fp8_gemm"],
        ["--nk", "64x64"],
        ["fp8_gemm", "--nk", "64"],
        ["fp8_gemm", "--nk", "0x64"],
        ["fp8_gemm", "--nk", "64x64", "-m", "0"],
        ["fp8_gemm", "--nk", "64x64", "-m", "1,,2"],
        ["fp8_gemm", "--nk", "64x64", "--list"],
        ["--list", "--clear"],
        ["--list", "--bias"],
        ["--list", "-m", "16"],
        ["--clear", "--force"],
        ["--clear", "--scaling", "row"],
        ["--list", "--activation", "fp8"],
        ["--model-shapes", "--out", "tables", "--out-dtype", "float16"],
        ["--model-shapes", "--out", "tables", "--activation", "fp8"],
        ["--model-shapes", "--out", "tables", "--bias"],
        ["int4_gemm", "--nk", "64x64"],
        ["--model-shapes", "--out", "tables", "--seconds=nan"],
        ["--model-shapes", "--out", "tables", "--seconds=inf"],
        ["--model-shapes", "--out", "tables", "--seconds=-1"],
    ],
)
def test_wrong_usage(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", *words])
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err
