"""bench/generated_text.py: it compares what a model writes with and without graphs, and a difference is an error."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers (extra `demo`) is not installed")

from bench import generated_text
from fp4dispatch.benchmark.reports import records

FACTS = {"commit": "abc", "date": "2026-11-23", "device": "NVIDIA H200", "driver": "1", "torch": "2", "cuda": "13"}


class Writer(nn.Module):
    """Writes numbers that depend on the prompt alone; with graphs, other ones for a prompt of so many tokens."""

    device = torch.device("cpu")

    def __init__(self, spoiled=0):
        super().__init__()
        self.spoiled, self.graphs = spoiled, False

    def to(self, device):
        return self

    def generate(self, input_ids, attention_mask, max_new_tokens, **options):
        rows = input_ids.sum(1, keepdim=True) + torch.arange(max_new_tokens)
        wrong = self.graphs and len(input_ids) == 1 and input_ids.shape[1] == self.spoiled
        return torch.cat([input_ids, rows + 1 if wrong else rows], 1)


class Tokenizer:
    pad_token, eos_token, pad_token_id = "-", "-", 0

    def __call__(self, prompts, **options):
        words = [[len(word) for word in prompt.split()] for prompt in prompts]
        longest = max(map(len, words))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in words])
        return Given(input_ids=ids, attention_mask=ids != 0)

    def decode(self, ids):
        return " ".join(map(str, ids))


class Given(dict):
    def to(self, device):
        return self

    def __getattr__(self, name):
        return self[name]


def run(folder, monkeypatch, **model):
    def enable(writer, **options):
        writer.graphs = True
        stats = SimpleNamespace(as_dict=lambda: {"replays": 3, "reasons": {}})
        return SimpleNamespace(stats=stats, decode_stats=stats, disabled="")

    monkeypatch.setattr(generated_text.graphs, "enable", enable)
    made = SimpleNamespace(from_pretrained=lambda *a, **k: Writer(**model))
    monkeypatch.setattr(generated_text, "AutoModelForCausalLM", made)
    monkeypatch.setattr(generated_text, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda *a, **k: Tokenizer()))
    monkeypatch.setattr(generated_text.machine, "card", lambda name: None)
    monkeypatch.setattr(generated_text.machine, "facts", lambda card, commit: FACTS)
    arguments = ["x", "--commit", "abc", "--folder", "d", "--gguf", "f", "--formats", "bf16", "--json", str(folder)]
    monkeypatch.setattr(sys, "argv", arguments)
    code = generated_text.main()
    (path,) = folder.glob("*.json")
    return code, records.read(path)["formats"][0]["same"], json.loads(path.read_text())["model"]


def test_the_same_text(tmp_path, monkeypatch):
    same = {"one batch": [20, 20], "one by one": [20, 20], "static cache": [6, 6]}
    assert run(tmp_path, monkeypatch) == (0, same, "f")


def test_another_text_is_an_error(tmp_path, monkeypatch, capsys):
    code, same, _ = run(tmp_path, monkeypatch, spoiled=3)
    three = [len(prompt.split()) == 3 for prompt in generated_text.PROMPTS]
    assert code == 1
    assert same["one batch"] == [20, 20]
    assert same["one by one"] == [20 - sum(three), 20]
    assert "other text: bf16" in capsys.readouterr().out
