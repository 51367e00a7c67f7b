"""The random suite, from its seed to its tables: on kernels in torch and on times that are told."""

from __future__ import annotations

import pytest

from fp4dispatch import cli
from fp4dispatch.benchmark import machine, roofline
from fp4dispatch.benchmark.problems import sampling
from tests import random_cases
from tests.bench_cases import FACTS, HOPPER_ON_PAPER, PEAKS, ToldEngine


@pytest.fixture
def here(monkeypatch):
    shapes = random_cases.install(monkeypatch)

    class Engine(ToldEngine):
        def record(self, call, calls, copies):
            call.us = 5.0
            return super().record(call, calls, copies)

    monkeypatch.setattr(machine, "card", lambda device: HOPPER_ON_PAPER)
    monkeypatch.setattr(machine, "engine_for", lambda card: Engine())
    monkeypatch.setattr(machine, "facts", lambda card, commit: FACTS | {"commit": commit})
    monkeypatch.setattr(roofline, "measure", lambda card, engine: PEAKS)
    monkeypatch.setattr(sampling, "models", lambda: (random_cases.TINY,))
    return shapes


def test_x(here, capsys, tmp_path):
    print(
        cli.main(
            [
                "bench",
                "--suite",
                "random",
                "--seed",
                "3",
                "--problems",
                "4",
                "--json",
                str(tmp_path / "x.json"),
                "--methods",
                "FP*Linear*",
                "--methods",
                "torch/row+q",
                "--rounds",
                "2",
            ]
        )
    )
    with capsys.disabled():
        print(capsys.readouterr().out)
