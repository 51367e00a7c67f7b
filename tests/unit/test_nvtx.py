"""FP4DISPATCH_NVTX=1 puts a range around each launch of a layer; without it, nothing of that is there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.run import nvtx, routes
from fp4dispatch.settings import SETTINGS

RANGE = "fp4dispatch {} M={} N=48 K=64 reference (bf16)"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Plans that other tests made have no ranges, and those of these tests must not stay."""
    routes.LayerSpec.parse.cache_clear()
    nvtx._available.cache_clear()
    yield
    routes.LayerSpec.parse.cache_clear()
    nvtx._available.cache_clear()


@pytest.fixture
def ranges(monkeypatch):
    """The names of all ranges; a range that is not closed has no ``/``."""
    found = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", found.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: found.append("/"))
    return found


def make(kind=FP4Linear):
    torch.manual_seed(0)
    return kind.from_linear(nn.Linear(64, 48), activation="bf16")


def on(monkeypatch):
    monkeypatch.setenv(SETTINGS["nvtx"].name, "1")


@pytest.mark.parametrize(("kind", "op"), [(FP4Linear, "nvfp4_gemm"), (FP8Linear, "fp8_gemm")])
def test_each_launch_has_a_range(ranges, monkeypatch, kind, op):
    want = make(kind)(torch.ones(3, 64))
    routes.LayerSpec.parse.cache_clear()
    on(monkeypatch)
    layer = make(kind)
    del ranges[:]
    for _ in range(3):  # with a plan to make, and on the fast path
        assert torch.equal(layer(torch.ones(3, 64)), want)
    assert ranges[-6:] == [RANGE.format(op, 3), "/"] * 3
    layer(torch.ones(2, 600, 64))  # many tokens never take the fast path
    assert ranges[-2:] == [RANGE.format(op, 1200), "/"]


def test_a_range_names_the_tokens_where_the_output_has_more_rows(ranges, monkeypatch):
    on(monkeypatch)
    layer, x = make(), torch.ones(3, 64)
    layer(x)
    reference = type(routes.choose.instance("reference"))
    run = reference.run
    monkeypatch.setattr(reference, "out_rows", lambda *_: 4)
    monkeypatch.setattr(
        reference, "run", lambda self, plan, prepared, x, out, bias: run(self, plan, prepared, x, out[:3], bias)
    )
    layer._forget()
    routes.LayerSpec.parse.cache_clear()
    del ranges[:]
    for _ in range(2):  # with a plan to make, and on the fast path
        assert layer(x).shape == (3, 48)
    assert ranges == [RANGE.format("nvfp4_gemm", 3), "/"] * 2


def test_a_range_ends_when_a_launch_fails(ranges, monkeypatch):
    on(monkeypatch)
    layer = make()
    x = torch.ones(3, 64)
    layer(x)
    _, plan, prepared = layer.bind(torch.float32).ready[3]
    monkeypatch.setattr(type(routes.choose.instance("reference")), "run", lambda *_: 1 / 0)
    del ranges[:]
    launch = nvtx.ranged(routes.choose.instance("reference"), layer.problem(3))
    with pytest.raises(ZeroDivisionError):
        launch.run(plan, prepared, x, x.new_empty(3, 48))
    with pytest.raises(ZeroDivisionError):
        launch.ready(plan, prepared)(x, x.new_empty(3, 48), None)
    assert [name for name in ranges if name == "/"] == ["/"] * (len(ranges) // 2)


def test_a_compiled_call_has_its_range_too(ranges, monkeypatch):
    on(monkeypatch)
    layer = make()
    fn = torch.compile(layer, fullgraph=True, backend="aot_eager")
    fn(torch.ones(3, 64))
    del ranges[:]
    fn(torch.ones(3, 64))
    assert ranges == [RANGE.format("nvfp4_gemm", 3), "/"]


def test_nothing_is_wrapped_without_the_setting(ranges):
    layer = make()
    layer(torch.ones(3, 64))
    spec = layer.bind(torch.float32).spec
    assert ranges == []
    assert {type(found.backend).__name__ for found in spec._launches.values()} == {"ReferenceBackend"}


def test_a_torch_without_nvtx_says_so_once(monkeypatch, caplog):
    def missing(_):
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", missing)
    on(monkeypatch)
    layer = make()
    layer(torch.ones(3, 64))
    layer(torch.ones(4, 64))
    assert caplog.text.count("FP4DISPATCH_NVTX=1 has no effect") == 1
