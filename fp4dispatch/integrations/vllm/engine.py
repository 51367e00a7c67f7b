"""The engine around the layers: how it captures CUDA graphs, and where it logs."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.warming import warmup
from fp4dispatch.problem import CaptureMode
from fp4dispatch.settings import settings

_log = init_logger("vllm.fp4dispatch")


class _ToEngine(logging.Handler):
    """Passes the records of this package to the logger of vLLM, which has the handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on."""
        if _log.isEnabledFor(record.levelno):
            _log.handle(record)


def log_through_vllm() -> None:
    """Show the decisions of this package in the log of vLLM, unless ``FP4DISPATCH_LOG`` says where they go."""
    ours = logging.getLogger("fp4dispatch")
    if settings.log is None and not any(isinstance(handler, _ToEngine) for handler in ours.handlers):
        ours.addHandler(_ToEngine())
        if ours.level == logging.NOTSET:
            ours.setLevel(_log.getEffectiveLevel())


class Engine:
    """What the layers of one model share: facts of vLLM's configuration, and which shapes have plans."""

    def __init__(self) -> None:
        self._planned: set[object] = set()

    def prepare(self, layer: QuantizedLinear, capture: CaptureMode, tokens: list[int], tp_size: int) -> None:
        """Choose for the engine's CUDA graphs, and make the plans for all its graphs. Host work.

        With tensor parallelism a collective call of the group: the ranks agree on the choice.
        """
        if capture == "none":
            return
        layer.choose_for(capture)
        shape = (layer.op, layer.out_features, layer.in_features, layer.activation, layer.dtype, tuple(tokens))
        if shape not in self._planned:
            self._planned.add(shape)  # the bias is no part of it: only one rank of a row-parallel layer adds it
            group = get_tp_group().cpu_group if tp_size > 1 else None
            warmup(layer, tokens, capture=capture, group=group, agree=tp_size > 1)


def graphs() -> tuple[CaptureMode, list[int]]:
    """Return how vLLM captures CUDA graphs, and the numbers of tokens to make plans for. Call it while a model is made.

    A graph that is captured in pieces runs with at least one token.
    """
    config: Any = get_current_vllm_config_or_none()
    mode = None if config is None else config.compilation_config.cudagraph_mode
    if not mode or not torch.cuda.is_available():
        return "none", []
    capture: CaptureMode = "piecewise" if mode.has_piecewise_cudagraphs() else "full"
    sizes = config.compilation_config.cudagraph_capture_sizes or []
    return capture, sorted({1, *sizes})
