"""``fp4dispatch.report``: layers by group, backends with their reasons, and what was left alone, in bytes."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console
from torch import nn

import fp4dispatch
from fp4dispatch.errors import InputError
from fp4dispatch.models.replace import replace_linears


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(64, 128, bias=False), nn.Linear(128, 64)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 32))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(Block() for _ in range(12))
        self.experts = Experts()
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.lm_head.weight = self.embed.weight
        self.odd = nn.Linear(24, 10, bias=False)


def model() -> nn.Module:
    torch.manual_seed(0)
    made = Model().to(torch.bfloat16)
    replace_linears(made, {"*.0.down_proj": "fp8_row", "*": "nvfp4"}, exclude=("lm_head", "odd"))
    return made


def test_groups_and_bytes():
    found = fp4dispatch.report(model(), large=0)
    groups = {(g.name, g.format): g for g in found.groups}
    assert {key: g.count for key, g in groups.items()} == {
        ("layers.*.up_proj", "nvfp4"): 12,
        ("layers.*.down_proj", "nvfp4"): 11,
        ("layers.*.down_proj", "fp8 row"): 1,
    }
    up = groups["layers.*.up_proj", "nvfp4"]
    assert (up.n, up.k, up.activation, up.backend) == (128, 64, "any", "reference (bf16)")
    assert up.nbytes == sum(block.up_proj.nbytes() for block in model().layers)
    assert up.reason
    left = {one.name: one for one in found.left}
    assert {name: one.nbytes for name, one in left.items()} == {
        "lm_head.weight": 6400,
        "odd.weight": 480,
        "experts.gate_up_proj": 16384,
    }
    assert left["lm_head.weight"].reason == "its weight is tied to embed"
    assert "experts in one tensor" in left["experts.gate_up_proj"].reason
    total = sum(t.numel() * t.element_size() for t in {id(t): t for t in [*model().parameters()]}.values())
    assert found.model_bytes > total
    assert found.model_bytes == found.small_bytes + sum(g.nbytes for g in (*found.groups, *found.left))


def test_small_parameters_are_only_counted():
    found = fp4dispatch.report(model(), large=10_000)
    assert [one.name for one in found.left] == ["experts.gate_up_proj"]
    assert found.small_bytes == 6400 + 480
    assert fp4dispatch.report(model()).left == ()


def test_text_rich_html_and_json(capsys):
    found = fp4dispatch.report(model(), large=0)
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    Console(width=160).print(found)
    html = found.to_html()
    assert html.startswith("<!DOCTYPE html>")
    assert html == found._repr_html_()
    wanted = ("24 quantised layers", "layers.*.up_proj", "reference (bf16)", "experts.gate_up_proj", "whole model")
    for text in (str(found), html, capsys.readouterr().out):
        assert [one for one in wanted if one not in text] == []


def test_layers_that_cannot_run_here_say_why(monkeypatch):
    made = model()
    for block in made.layers:
        block.up_proj._forget()
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cutlass")
    found = fp4dispatch.report(made)
    up = next(group for group in found.groups if group.name == "layers.*.up_proj")
    assert up.backend == "none on this device"
    assert "cutlass" in up.reason


def test_an_unquantised_model_and_what_is_no_model():
    found = fp4dispatch.report(nn.Sequential(nn.Linear(16, 16)), large=0)
    assert found.groups == ()
    assert found.left[0].reason == "a linear layer that was excluded, or is stored unquantised"
    with pytest.raises(InputError, match="model is a list"):
        fp4dispatch.report([])


@torch.no_grad()
def test_a_model_with_graphs_around_it_has_the_same_report():
    pytest.importorskip("transformers")
    from tests import breakable
    from tests.graph_fake import FakeTape

    causal = breakable.model(num_hidden_layers=2)
    replace_linears(causal, "nvfp4")
    before = fp4dispatch.report(causal, large=0)
    graphs = breakable.captured(causal, [8], tapes=FakeTape)
    causal(torch.arange(8).view(1, 8), use_cache=False)
    assert breakable.replays(graphs) == {"8": 1}
    after = fp4dispatch.report(causal, large=0)
    assert {(g.name, g.count, g.n, g.k) for g in after.groups} == {(g.name, g.count, g.n, g.k) for g in before.groups}
    assert [one.name for one in after.left] == [one.name for one in before.left]
    assert all(group.backend.startswith("reference") for group in after.groups)
    assert after.model_bytes == before.model_bytes
