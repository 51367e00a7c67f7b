"""bench/activations.py on emulated kernels: bits are compared on what is timed, before SwiGLU and behind it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bench import activations
from fp4dispatch import formats
from fp4dispatch.backends.activations import swiglu
from tests import w4_model
from tests.on_cpu import OnCpu


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with OnCpu():
        yield


def modules(kernel, spoil):
    """The library of a kernel, whose entry does what formats.py says, and then ``spoil``."""

    def entry(x, data, scale, pdl):
        made, its_scale = formats.fp8_quantize(x if kernel.behind is None else swiglu(x), kernel.scaling)
        codes = w4_model.pack_activations(made) if kernel.packed else made
        data.view(torch.uint8).copy_(codes.view(torch.uint8))
        scale.copy_(its_scale)
        spoil(data.view(torch.uint8), scale)

    return {kernel.library: SimpleNamespace(**{kernel.entry: entry})}


def one_bit(data, scale):
    data.view(-1)[5] ^= 1


def one_scale(data, scale):
    scale.view(-1)[0] *= 2


@pytest.mark.parametrize("name", activations.KERNELS)
def test_a_wrong_bit_is_seen(name):
    kernel = activations.KERNELS[name]
    x = torch.randn(13, 272 if kernel.behind is None else 544).bfloat16()
    assert kernel.fault(modules(kernel, lambda *_: None), x, "M=13 K=272") == ""
    assert kernel.fault(modules(kernel, one_bit), x, "M=13 K=272") == f"{kernel.entry} M=13 K=272: 1 bytes differ"
    assert kernel.fault(modules(kernel, one_scale), x, "M=13 K=272") == f"{kernel.entry} M=13 K=272: scales differ"


def test_a_wrong_kernel_is_named_and_not_timed(monkeypatch, capsys, tmp_path):
    timed = []
    kernels = {name: activations.KERNELS[name] for name in ("fp8 row", "SwiGLU, fp8 row")}
    plain, gated = kernels.values()
    known = modules(plain, one_bit) | modules(gated, lambda *_: None)
    monkeypatch.setattr(activations, "KERNELS", kernels)
    monkeypatch.setattr(activations, "M", (8,))
    monkeypatch.setattr(activations, "K", (256,))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(activations.jit, "load", lambda name, variant, arch: SimpleNamespace(module=known[name]))
    monkeypatch.setattr(
        activations, "graphs", lambda kernel, modules, x: timed.append((kernel.entry, [*x.shape])) or {}
    )
    monkeypatch.setattr(activations, "microseconds", lambda graphs, rounds: {"cold": 3.0})
    monkeypatch.setattr(activations.machine, "card", lambda device: None)
    monkeypatch.setattr(activations.machine, "facts", lambda card, commit: {})
    monkeypatch.setattr(activations.records, "write", lambda path, kind, facts, body: timed.append(body["problems"]))
    assert activations.main(["--json", str(tmp_path), "--commit", "abc"]) == 1
    assert "WRONG fp8_quantize_row M=8 K=256: 1 bytes differ" in capsys.readouterr().out
    (entry, shape), problems = timed
    assert (entry, shape) == (gated.entry, [8, 512])
    assert [row["kernel"] for row in problems] == ["SwiGLU, fp8 row"]
