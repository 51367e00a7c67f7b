"""``capture.mode``: inside it layers choose for CUDA graphs, apart from what eager calls use."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading

import pytest
import torch

import fp4dispatch
from fp4dispatch import FP4Linear, FP8Linear, formats
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Prepared
from fp4dispatch.errors import CaptureDeniedError, CaptureError, InputError
from fp4dispatch.machine import capture
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.run.routes import LayerSpec
from tests.parallel import off
from tests.unit.test_capture_policy import EACH, FORMATS, K, capturing, chosen, describe, machine, make

__all__ = ["capturing", "machine"]  # fixtures

X = torch.randn(3, K, dtype=torch.bfloat16)


@pytest.mark.parametrize(("rule", "kind", "arch", "facts", "denied", "beside", "mode", "least"), EACH, ids=describe)
def test_auto_takes_another_backend_and_says_so_once(
    machine, capturing, caplog, rule, kind, arch, facts, denied, beside, mode, least
):
    machine(arch, denied, *(() if beside == "reference" else (beside,)), **facts)
    layer, alike = make(kind), make(kind)
    want = layer(X)
    if denied not in chosen(layer):
        pytest.skip("unproven there, or last: auto does not take it; the next test names it")
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        for each in (layer, alike, layer):
            with capture.mode(mode, smallest_m=least):
                assert each.problem(3).capture == mode
                got = each(X)
                fp4dispatch.warmup(each, [3])
                assert chosen(each) == {beside}
            assert denied in chosen(each)
            assert (each.capture, each.m_min) == ("none", 1)
    assert off(got, want) < FORMATS
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING and denied in r.message]
    lines = [r.message for r in caplog.records if r.levelno == logging.INFO and f"{mode} capture" in r.message]
    assert len(warnings) == 1
    assert ("pip install" if beside == "reference" else rule) in warnings[0]
    assert len(lines) == 1
    with capture.mode(mode, smallest_m=least):
        capturing(True)
        assert layer.bind().launch(3, bias=True)[0].name == beside
        assert off(layer(X), want) < FORMATS
    capturing(False)
    assert layer.bind().launch(3, bias=True)[0].name == denied


@pytest.mark.parametrize(("rule", "kind", "arch", "facts", "denied", "beside", "mode", "least"), EACH, ids=describe)
def test_a_named_backend_is_refused_for_the_graph_and_kept_outside(
    machine, monkeypatch, caplog, rule, kind, arch, facts, denied, beside, mode, least
):
    machine(arch, denied, *(() if beside == "reference" else (beside,)), **facts)
    variable = "FP4_GEMM_BACKEND" if kind is FP4Linear else "FP4DISPATCH_FP8_BACKEND"
    by_argument = make(kind, backend=denied)
    monkeypatch.setenv(variable, denied)
    by_variable = make(kind)
    for layer, by in ((by_argument, ""), (by_variable, f" by {variable}")):
        layer(X)
        caplog.clear()
        with capture.mode(mode, smallest_m=least):
            for call in (lambda layer=layer: layer(X), lambda layer=layer: fp4dispatch.warmup(layer, [3])):
                with pytest.raises(CaptureDeniedError, match=f'"{denied}" was requested{by} and must not run') as e:
                    call()
        assert rule in str(e.value)
        assert "Run it without graphs, or name another backend" in str(e.value)
        assert f"{mode} capture" in str(e.value)
        assert rule in {hit.id for hit in e.value.decision.verdict(denied).denied}
        assert not [r for r in caplog.records if r.levelno == logging.WARNING]
        layer(X)
        assert chosen(layer) == {denied}


def test_a_rule_that_is_not_about_capture_does_not_refuse_a_name(machine):
    machine("12.0", "cutlass")
    layer = make(FP4Linear, backend="cutlass")
    assert "cutlass-sm12x-unproven" in {hit.id for _, d in layer.decisions() for hit in d.verdict("cutlass").denied}
    with capture.mode("piecewise", smallest_m=1):
        layer(X)
        assert chosen(layer) == {"cutlass"}


def test_with_a_smallest_m_of_one_the_rule_about_live_m_is_silent(machine):
    machine("10.0", "cutlass", "cudnn")
    layer = make(FP4Linear)
    for least, backend in ((0, "cudnn"), (1, "cutlass"), (16, "cutlass")):
        with capture.mode("piecewise", smallest_m=least):
            layer(X)
            assert chosen(layer) == {backend}
            assert layer.problem(3).m_min == least
        assert chosen(layer) == {"cutlass"}


def test_the_same_choice_shares_plans_and_memory(machine):
    machine("10.0", "cutlass", "cudnn")
    layer = make(FP4Linear)
    layer(X)
    own, bytes_before = layer.bind(), layer.nbytes()
    with capture.mode("full", 16):
        fp4dispatch.warmup(layer, [3])
        bound = layer.bind()
    assert bound is not own
    assert bound.spec is own.spec
    assert all(a is b for a, b in zip(bound.tensors, own.tensors, strict=True))
    assert bound.decisions[0][1].problem.capture == "full"
    assert own.decisions[0][1].problem.capture == "none"
    assert layer.nbytes() == bytes_before
    assert "graphs" not in repr(layer)


def test_a_layer_shows_what_graphs_run(machine):
    machine("10.0", "cutlass", "cudnn")
    layer = make(FP4Linear)
    with capture.mode("piecewise", 0):
        layer(X)
    assert "backend=cutlass (nvfp4) [piecewise graphs from M=0: cudnn (nvfp4)]" in repr(layer)


def test_warm_layers_can_be_captured_and_others_say_what_to_call(machine, capturing):
    machine("10.0", "cutlass", "cudnn")
    layer, cold = make(FP4Linear), make(FP4Linear)
    cold(X)
    with capture.mode("piecewise", 0):
        fp4dispatch.warmup(layer, [3], capture="piecewise", m_min=0)
        capturing(True)
        layer(X)
        with pytest.raises(CaptureError, match=r"warmup\(model, tokens=\[\.\.\.\]\), inside capture\.mode\('piece"):
            cold(X)
    capturing(False)


def test_a_missing_plan_names_the_mode(machine, capturing, monkeypatch):
    machine("10.0", "cutlass", "cudnn")
    layer = make(FP4Linear)
    with capture.mode("piecewise", 0):
        layer.bind()
        layer.bind().spec._launches.clear()
        capturing(True)
        with pytest.raises(CaptureError, match=r"tokens=\[3\]\), inside capture\.mode\('piecewise', smallest_m=0\)"):
            layer(X)


def test_a_capture_without_a_mode_counts_as_one_full_graph(machine, capturing):
    machine("12.0", "cudnn", "cublaslt", cudnn="9.19.0")
    layer = make(FP4Linear)
    layer(X)
    with capture.mode("full"):
        fp4dispatch.warmup(layer, [3])
    capturing(True)
    with pytest.raises(CaptureError, match="cudnn-nvfp4-sm12x-graphs"):
        layer.bind().launch(3, bias=True)
    with capture.mode("none"), pytest.raises(CaptureError, match="cudnn-nvfp4-sm12x-graphs"):
        layer(X)
    with capture.mode("full"):
        assert layer.bind().launch(3, bias=True)[0].name == "cublaslt"
        layer(X)


def test_blocks_nest_and_end_with_errors():
    assert capture.declared() is None
    with capture.mode("piecewise", 16):
        assert capture.declared() == ("piecewise", 16)
        with capture.mode("none"):
            assert capture.declared() is None
        with pytest.raises(ZeroDivisionError), capture.mode("full"):
            assert 1 / (capture.declared() != ("full", 1))
        assert capture.declared() == ("piecewise", 16)
    assert capture.declared() is None
    assert capture.modes_open == 0


def test_a_mode_belongs_to_one_thread_and_one_task(machine):
    machine("10.0", "cutlass", "cudnn")
    layer = make(FP4Linear)
    found = {}

    def look(name):
        layer(X)
        found[name] = (capture.declared(), *chosen(layer))

    with capture.mode("piecewise", 0):
        thread = threading.Thread(target=look, args=("thread",))
        thread.start()
        thread.join()
        look("here")
    assert found == {"thread": (None, "cutlass"), "here": (("piecewise", 0), "cudnn")}

    async def task(name, mode):
        with capture.mode(*mode):
            await asyncio.sleep(0)
            look(name)
            await asyncio.sleep(0)
            look(name)

    async def both():
        await asyncio.gather(task("a", ("piecewise", 0)), task("b", ("full", 1)))

    asyncio.run(both())
    assert found["a"] == (("piecewise", 0), "cudnn")
    assert found["b"] == (("full", 1), "cutlass")


@pytest.mark.parametrize(
    ("wrong", "says"), [(("some",), "capture='some'"), (("full", -1), "smallest_m=-1"), (("full", True), "True")]
)
def test_wrong_modes_are_refused(wrong, says):
    with pytest.raises(InputError, match=says), capture.mode(*wrong):
        pass
    assert capture.modes_open == 0


@pytest.mark.parametrize("other", [{"capture": "full"}, {"m_min": 1}, {"capture": "none"}])
def test_warmup_refuses_another_mode_than_the_declared_one(machine, other):
    machine("10.0", "cutlass", "cudnn")
    layer = make(FP4Linear)
    with capture.mode("piecewise", 0), pytest.raises(InputError, match=r"inside capture\.mode\('piecewise'"):
        fp4dispatch.warmup(layer, [3], **other)


def test_an_eager_call_outside_asks_nothing(machine, monkeypatch):
    machine("10.0", "cutlass", "cudnn")
    layer = make(FP4Linear)
    with capture.mode("piecewise", 0):
        layer(X)
    layer(X)
    monkeypatch.setattr(capture, "declared", lambda: pytest.fail("the fast path asked"))
    monkeypatch.setattr(QuantizedLinear, "_call", lambda self, x: pytest.fail("the long way"))
    layer(X)


@pytest.mark.parametrize("kind", [FP4Linear, FP8Linear])
def test_compiled_calls_choose_for_the_mode_too(machine, kind):
    machine("10.0", "cutlass", "cudnn")
    layer = make(kind)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    compiled(X)
    ran = []
    bound = layer.bind()
    with capture.mode("piecewise", 0):
        layer(X)
        in_graph = layer.bind()
        for each in (bound, in_graph):
            each_launch = each.spec.launch_on
            each.spec.launch_on = lambda *a, name=each.spec.routes[0].backend, f=each_launch: ran.append(name) or f(*a)
        compiled(X)
    compiled(X)
    for each in (bound, in_graph):
        del each.spec.launch_on
    assert ran == ["cudnn", "cutlass"]


def test_a_warm_call_runs_what_its_mode_chose(machine, monkeypatch):
    machine("10.0", "cutlass", "cudnn")
    ran = []
    for name in ("cutlass", "cudnn"):
        kind = type(registry.backends()[name])
        real = kind.run
        monkeypatch.setattr(kind, "run", lambda self, *a, real=real: ran.append(self.name) or real(self, *a))
    LayerSpec.parse.cache_clear()  # it holds the stand-ins of other tests
    layer = make(FP4Linear)
    for _ in range(2):
        for _ in range(2):
            layer(X)
        with capture.mode("piecewise", 0):
            for _ in range(2):
                layer(X)
    assert ran == ["cutlass", "cutlass", "cudnn", "cudnn"] * 2


def test_a_write_reaches_the_layout_of_a_graph(machine, monkeypatch):
    machine("10.0", "cutlass", "cudnn")
    kind = type(registry.backends()["cudnn"])
    real = kind.prepare

    def packed(self, weights):
        made = real(self, weights)
        return Prepared(made.backend, tuple(tensor.clone() for tensor in made.tensors), made.layout)

    monkeypatch.setattr(kind, "layout", "packed")
    monkeypatch.setattr(kind, "prepare", packed)
    layer, other = make(FP4Linear), make(FP4Linear)
    with capture.mode("piecewise", 0):
        layer(X)
        bound = layer.bind()
    assert bound.tensors[0].data_ptr() != layer.bind().tensors[0].data_ptr()
    assert any(buffer is bound.tensors[0] for buffer in layer.buffers())
    layer.load_state_dict(other.state_dict())
    assert torch.equal(bound.tensors[0], other.weight)  # as a replay would read it
    layer.backend = "reference"
    layer.rebind()  # drops what nothing uses
    assert any(buffer is bound.tensors[0] for buffer in layer.buffers())
    with capture.mode("piecewise", 0):
        assert layer.bind() is bound
        assert torch.equal(layer(X), other(X))


def test_autograd_inputs_and_writes_reach_what_graphs_read(machine):
    machine("10.0", "cutlass", "cudnn")
    layer = make(FP4Linear)
    with capture.mode("piecewise", 0):
        layer(X)
        bound = layer.bind()
        wanted = layer(X.clone().requires_grad_())  # the operator finds the layer by the tensors of the mode
        torch.testing.assert_close(wanted.detach(), layer(X))
    addresses = [t.data_ptr() for t in bound.tensors]
    other = make(FP4Linear)
    layer.load_state_dict(other.state_dict())
    with capture.mode("piecewise", 0):
        assert layer.bind() is bound
        assert torch.equal(layer(X), other(X))
    assert [t.data_ptr() for t in bound.tensors] == addresses
    layer.weight = layer.weight.clone()  # replaced: bound anew, in both modes
    with capture.mode("piecewise", 0):
        assert torch.equal(layer(X), other(X))
        assert layer.bind() is not bound
    assert torch.equal(layer(X), other(X))


def test_what_a_graph_holds_is_kept_when_the_choice_changes(machine, capturing):
    machine("10.0", "cutlass", "cudnn")
    layer = make(FP4Linear)
    with capture.mode("piecewise", 0):
        fp4dispatch.warmup(layer, [3])
        layer.bind().captured = True
        before = layer.bind()
        layer.backend = "cudnn"
        layer.rebind()
        layer.backend = "reference"
        after = layer.rebind()
    assert after is not before
    assert before in layer._state.captured
    assert chosen(layer) == {"cutlass"}


def test_modes_are_not_copied_and_a_copy_binds_again(machine):
    machine("10.0", "cutlass", "cudnn")
    layer = make(FP4Linear)
    with capture.mode("piecewise", 0):
        layer(X)
        other = copy.deepcopy(layer)
        assert torch.equal(other(X), layer(X))
        assert chosen(other) == {"cudnn"}
    assert chosen(other) == {"cutlass"}


def test_raw_operators_ask_with_the_mode(machine, capturing):
    machine("12.0", "cudnn", "cublaslt", cudnn="9.19.0")
    a, b = (formats.nvfp4_quantize(torch.randn(64, 64), sf_layout="128x4") for _ in range(2))

    def run(**kwargs):
        return fp4dispatch.nvfp4_gemm(a.data, b.data, a.sf, b.sf, a.global_scale * b.global_scale, **kwargs)

    want = run()
    with capture.mode("full"):
        torch.testing.assert_close(run(), want)
        with pytest.raises(CaptureDeniedError, match="cudnn-nvfp4-sm12x-graphs"):
            run(backend="cudnn")
        capturing(True)
        torch.testing.assert_close(run(), want)
    with pytest.raises(CaptureError, match="cudnn-nvfp4-sm12x-graphs"):
        run()
