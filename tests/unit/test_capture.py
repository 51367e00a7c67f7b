from __future__ import annotations

import ast
import sys
import types
from pathlib import Path

import pytest
import torch

import fp4dispatch
from fp4dispatch.errors import CaptureError
from fp4dispatch.machine.capture import forbid_in_capture, is_capturing


def test_false_on_a_cpu() -> None:
    assert is_capturing() is False
    assert forbid_in_capture("building a plan", "warmup()") is None
    assert not torch.cuda.is_initialized()


def test_false_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    assert is_capturing() is False
    assert "torch" not in sys.modules


@pytest.mark.parametrize("initialised", [True, False])
@pytest.mark.parametrize("capturing", [True, False])
def test_asks_the_driver_only_once_cuda_is_up(
    monkeypatch: pytest.MonkeyPatch, initialised: bool, capturing: bool
) -> None:
    asked = []

    def ask() -> bool:
        asked.append(1)
        return capturing

    cuda = types.SimpleNamespace(is_initialized=lambda: initialised, is_current_stream_capturing=ask)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert is_capturing() is (initialised and capturing)
    assert len(asked) == int(initialised)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4dispatch.machine import capture

    monkeypatch.setattr(capture, "is_capturing", lambda: True)


def test_no_kernel_is_loaded_in_a_capture(capturing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4dispatch.jit import kernels
    from fp4dispatch.problem.arch import SM90

    monkeypatch.setattr(kernels, "_loaded", {})
    monkeypatch.setattr(kernels, "_load", lambda *args: pytest.fail("loaded"))
    with pytest.raises(CaptureError, match="loading the kernel fp8_quantize/any"):
        kernels.load("fp8_quantize", "any", SM90)


def test_no_kernel_is_compiled_in_a_capture(capturing: None, tmp_path: Path) -> None:
    from fp4dispatch.jit import kernels
    from fp4dispatch.jit.store.cache import Cache

    tmp_path.chmod(0o755)
    with pytest.raises(CaptureError, match=r"compiling fp8_quantize/any-90a .*\n.*fp4dispatch build"):
        kernels.build("fp8_quantize", "any", "90a", cache=Cache(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


def test_nothing_is_logged_in_a_capture(
    capturing: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import fp4dispatch.dispatch.choose  # noqa: F401  (it sets the filter)
    from fp4dispatch.jit.store import guard
    from fp4dispatch.machine import capture

    guard.warn("first")
    assert caplog.records == []
    monkeypatch.setattr(capture, "is_capturing", lambda: False)
    guard.warn("second")
    assert [record.message for record in caplog.records] == ["second"]


def test_an_alias_that_is_met_in_a_capture_is_said_after_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    from fp4dispatch.dispatch import choose
    from fp4dispatch.dispatch.request import requested
    from fp4dispatch.machine import capture

    choose.reset()
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        with monkeypatch.context() as patch:
            patch.setattr(capture, "is_capturing", lambda: True)
            requested("nvfp4_gemm", "marlin")
        assert caplog.records == []
        requested("nvfp4_gemm", "marlin")
    assert "marlin means w4a16" in caplog.text
    choose.reset()


def test_the_error_says_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    with pytest.raises(CaptureError) as caught:
        forbid_in_capture("no plan for M=48: building one", "fp4dispatch.warmup(model, tokens=[48])")
    assert str(caught.value) == (
        "no plan for M=48: building one would break the CUDA graph that is being captured.\n"
        "  Before capturing: fp4dispatch.warmup(model, tokens=[48])"
    )


def refusals() -> dict[str, str]:
    """Every call of forbid_in_capture in the package: where it is, and how its text begins."""
    found = {}
    for path in sorted(Path(fp4dispatch.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "forbid_in_capture":
                continue
            text = node.args[0]
            first = text.values[0] if isinstance(text, ast.JoinedStr) else text
            assert isinstance(first, ast.Constant), ast.unparse(node)
            found[f"{path.name}:{node.lineno}"] = str(first.value).strip()
    return found


def test_every_refusal_is_taken_away_in_a_case_of_the_gpu_tests() -> None:
    """A guard that no case removes could go unnoticed: tests/gpu/capture_cases.py has one for each."""
    source = (Path(__file__).parents[1] / "gpu" / "capture_cases.py").read_text("utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    removed = {ast.literal_eval(node.args[0]) for node in calls if getattr(node.func, "id", "") == "without"}
    elsewhere = {
        "making scratch memory for eager launches",  # reached by no launch; tests/unit/test_cutlass_run.py
        "the PDL trial of",  # tests/unit/test_pdl.py
        "loading weights",  # tests/unit/test_state_loading.py
        "fusing layers",  # tests/unit/test_fuse.py
        "moving",  # an offloaded layer: tests/unit/test_transformers_offload.py
        "the weights of",  # tests/gpu/test_stored_weights.py
        "loading the SwiGLU kernel",  # tests/gpu/test_swiglu.py
        "cutting the layers of a model",  # tests/unit/test_tensor_parallel_cut.py
        "waiting for writes to packed weights",  # tests/unit/test_stored_weights.py
        "comparing weights that were copied for this call",  # a compiler's copies: tests/unit/test_stored_weights.py
    }
    texts = refusals()
    assert len(texts) >= 12
    assert {w: t for w, t in texts.items() if not any(t.startswith(r) for r in removed)} == {
        where: text for where, text in texts.items() if text in elsewhere
    }
    assert {r for r in removed if not any(t.startswith(r) for t in texts.values())} == set()
