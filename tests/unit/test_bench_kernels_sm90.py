"""bench/kernels_sm90.py without a GPU: what is wrong has no time, and the script fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench import kernels_sm90
from tests.on_cpu import OnCpu


@pytest.mark.parametrize("factor", [1.0, 1.05, torch.nan])
def test_what_is_wrong_has_no_time_and_the_script_fails(factor, monkeypatch, capsys, tmp_path):
    def ours(weights, x):
        call, out, exact = kernels_sm90.bf16_mm(weights, x)
        return lambda i: (call(i), out[:, 256:].mul_(factor)), out, exact

    def peer(rowwise):
        return kernels_sm90.bf16_mm

    written = []
    for name, stand_in in (
        ("NK", ((264, 256),)),
        ("M", (8,)),
        ("COLD_BYTES", 1e5),
        ("gemm", lambda variant, pdl: ours),
        ("scaled_mm", peer),
        ("installed", lambda: SimpleNamespace(kernel=lambda name: SimpleNamespace(variants=("row_bf16", "row_fp16")))),
        ("capture", lambda call, copies, calls: None),
        ("microseconds", lambda graphs, rounds, warmup: dict.fromkeys(graphs, 2.0)),
        ("bench_quantizers", list),
    ):
        monkeypatch.setattr(kernels_sm90, name, stand_in)
    monkeypatch.setattr(kernels_sm90.machine, "card", lambda device: None)
    monkeypatch.setattr(kernels_sm90.machine, "facts", lambda card, commit: {})
    monkeypatch.setattr(kernels_sm90.records, "write", lambda path, kind, facts, body: written.extend(body["gemm"]))
    with OnCpu():
        assert kernels_sm90.main(["--json", str(tmp_path), "--commit", "abc"]) == (factor != 1)
    (row,) = written
    wrong = {"row_bf16", "row_bf16 pdl"} if factor != 1 else set()
    assert set(row["wrong"]) == wrong
    assert set(row["us"]) == {"bf16", "scaled_mm tensor", "scaled_mm row", "row_bf16", "row_bf16 pdl"} - wrong
    assert capsys.readouterr().out.count("WRONG") == len(wrong)
