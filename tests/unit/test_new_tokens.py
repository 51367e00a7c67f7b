"""bench/new_tokens.py on a CPU: which numbers of tokens it draws, what it times and prints."""

from __future__ import annotations

import json
import platform

import pytest
import torch

from bench import new_tokens
from fp4dispatch.backends.own.tiling import search
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records


@pytest.mark.parametrize(("low", "high"), new_tokens.RANGES)
def test_each_number_of_tokens_is_new_and_its_neighbour_is_alike(low, high):
    for seed in range(5):
        ms = new_tokens.drawn(low, high, 10, seed)
        assert ms == new_tokens.drawn(low, high, 10, seed)
        assert all(low <= m <= high for m in ms)
        assert len({-(-m // new_tokens.APART) for m in ms}) == 10
        for m in ms:
            assert new_tokens.neighbour(m) != m
            assert search.alike(new_tokens.neighbour(m)) == search.alike(m)


def test_it_times_each_kind_of_layer_and_writes_the_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(new_tokens, "RANGES", ((17, 48), (49, 80)))
    monkeypatch.setattr(new_tokens, "SIZES", {"small": ((64, 128), (128, 64))})
    path = tmp_path / f"new-tokens-{platform.machine()}.json"
    monkeypatch.setattr(
        "sys.argv", ["new_tokens.py", "--commit", "0" * 7, "--device", "cpu", "--count", "2", "--json", str(path)]
    )
    assert new_tokens.main() == 0
    rows = json.loads(path.read_text())["new_tokens"]["rows"]
    assert [row["layers"] for row in rows[::2]] == list(new_tokens.KINDS)
    for row in rows:
        assert len(row["tokens"]) == 2
        assert all(us > 0 for name in ("first", "alike", "again") for us in row[name])
    said = capsys.readouterr().out
    assert "| FP4Linear | small | 49-80 |" in said
    assert records.read(path)["kind"] == "new tokens"


def test_a_first_call_is_told_from_a_later_one(monkeypatch):
    """A layer that waits for each number of tokens that it has not seen."""

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def forward(self, x):
            if x.shape[0] not in self.seen:
                self.seen.add(x.shape[0])
                for _ in range(200):
                    x = x + 1
            return x

    monkeypatch.setattr(new_tokens, "RANGES", ((17, 48),))
    monkeypatch.setattr(new_tokens, "KINDS", {"slow": lambda linear: Slow()})
    (row,) = new_tokens.run(machine.card("cpu"), {"small": ((64, 128),)}, 3, 1)
    assert min(row["first"]) > max(row["again"])
    assert min(row["alike"]) > max(row["again"])
