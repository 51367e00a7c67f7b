"""The script of tensor parallel on a tiny stack over gloo: it runs, cut and whole agree, and it can say WRONG."""

from __future__ import annotations

import json

import torch
from torch import nn

from bench import tensor_parallel as script
from fp4dispatch.benchmark.reports import records

CPU = torch.device("cpu")


class Alone:
    """A rank without others."""

    def gather(self, value):
        return [value]


def test_the_sizes_are_those_of_the_model():
    from fp4dispatch.benchmark.problems.shapes import catalogue

    known = {layer.name: (layer.n, layer.k) for layer in catalogue().models[0].layers}
    s, rows = script.SIZES, script.fused(script.SIZES)
    assert known["qkv"] == (sum(rows["*qkv"]), s["hidden"])
    assert known["gate_up"] == (sum(rows["*gate_up"]), s["hidden"])


def test_two_ranks(tmp_path, capsys):
    words = ["--tiny", "--device", "cpu", "--ranks", "2", "--depth", "1", "--tokens", "1", "3", "--formats", "bf16"]
    assert script.main([*words, "nvfp4", "--json", str(tmp_path), "--commit", "abc"]) == 0
    said = capsys.readouterr().out
    assert said.count("| 2 | nvfp4 |") == 2
    assert "WRONG" not in said
    (file,) = tmp_path.iterdir()
    record = records.read(file)
    (world,) = record["ranks"]
    assert [each["format"] for each in world["formats"]] == ["bf16", "nvfp4"]
    assert world["formats"][1]["bytes_rank"] < 0.51 * world["formats"][1]["bytes_whole"]
    assert all(0 < row["error"] < 0.01 for each in world["formats"] for row in each["rows"])


@torch.inference_mode()
def test_a_wrong_stack_has_no_times():
    whole = script.build("nvfp4", script.TINY, 1, CPU)
    reference = script.exact(whole)
    x = torch.randn(2, script.TINY["hidden"]).bfloat16()
    clock = script.Clock(Alone(), CPU)
    good = script.measure(whole, whole, reference, x, clock)
    assert (good["status"], good["largest"]) == ("ok", 0)
    assert good["one_eager_us"] > 0
    bad = script.build("nvfp4", script.TINY, 1, CPU)
    bad[0].down.weight_scale_2.mul_(1.05)
    row = script.measure(whole, bad, reference, x, clock)
    assert row["status"] == "WRONG"
    assert "eager_us" not in row
    document = {"depth": 1, "ranks": [{"ranks": 2, "formats": [{"format": "nvfp4", "rows": [row]}]}]}
    assert "| 2 | nvfp4 | 2 | WRONG | - |" in script.table(document)


def test_a_rank_that_fails_ends_the_run(tmp_path, capfd):
    words = ["--tiny", "--device", "cpu", "--ranks", "2", "--depth", "1", "--tokens", "1", "--formats", "nothing"]
    assert script.main([*words, "--json", str(tmp_path / "record.json"), "--commit", "abc"]) == 1
    assert "2 ranks: exit codes [1, 1]" in capfd.readouterr().out
    assert json.loads((tmp_path / "record.json").read_text())["ranks"] == [{"ranks": 2, "formats": []}]


def test_more_ranks_than_gpus_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert script.main(["--device", "cuda", "--ranks", "2", "4"]) == 1
    assert capsys.readouterr().out.count("left out, torch sees 1 GPUs") == 2


def test_the_reference_has_the_weights_of_the_layers():
    whole = script.build("fp8_block", script.TINY, 1, CPU)
    exact = script.exact(whole)
    assert {type(module) for module in exact[0].children()} == {nn.Linear}
    x = torch.randn(2, script.TINY["hidden"])
    assert torch.allclose(exact[0].o(x), whole[0].o(x), rtol=1e-4, atol=1e-4)
