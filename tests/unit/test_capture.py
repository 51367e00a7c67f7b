from __future__ import annotations

import sys
import types

import pytest
import torch

from fp4dispatch.capture import forbid_in_capture, is_capturing
from fp4dispatch.errors import CaptureError


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


def test_the_error_says_what_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = types.SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    with pytest.raises(CaptureError) as caught:
        forbid_in_capture("no plan for M=48: building one", "fp4dispatch.warmup(model, tokens=[48])")
    assert str(caught.value) == (
        "no plan for M=48: building one would break the CUDA graph that is being captured.\n"
        "  Before capturing: fp4dispatch.warmup(model, tokens=[48])"
    )
