"""FlashInfer, imported on first use: what the ``flashinfer_*`` backends call, and how a call is kept safe.

Importing flashinfer takes seconds, initialises CUDA, writes to its cache folder and adds log handlers, so only
``prepare`` and ``plan`` import it. Decisions use its version from the package metadata
(:mod:`fp4dispatch.machine.libraries`).

Hazards, read in flashinfer-python 0.7.2.post1, ``flashinfer/gemm/gemm_base.py``:

* The first call of a shape compiles modules, fetches cubins, builds cuDNN plans and makes workspaces. :func:`try_out`
  makes that call eagerly, before any capture. A workspace made in a capture would stay in FlashInfer's cache and point
  into the memory of that graph.
* Later calls pass ``skip_check=True``, which skips the requirement checks. That is safe only because the runner is
  always named: otherwise FlashInfer would use the candidates of the previous call.
* The cuDNN handle of a device, the runner object and the map of loaded kernels have no lock: calls are made under
  :data:`LOCK`.
* In an ``autotune()`` context a call profiles kernels; :func:`refuse_tuning_in_capture` refuses that in a capture.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fp4dispatch.errors import BackendUnsupportedError, CaptureError, Fp4DispatchError
from fp4dispatch.machine import capture
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.problem import Problem

LOCK = ForkSafeLock()
"""Held around every call into FlashInfer that may share state with another."""

_UNTOUCHED = -1232.0
"""Value of an output before a trial: exact in 16 bits, and not the result of a GEMM of zeros."""


@functools.cache
def gemm_module() -> Any:
    """Import FlashInfer and return ``flashinfer.gemm.gemm_base``.

    Raises
    ------
    BackendUnsupportedError
        If it cannot be imported.
    """
    return _imported("flashinfer.gemm.gemm_base")


@functools.cache
def tuner() -> Any:
    """Return FlashInfer's one AutoTuner."""
    return _imported("flashinfer.autotuner").AutoTuner.get()


def shuffle_rows(matrix: Tensor, scales: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """Return weights and linear block scales in the row order of trtllm-gen's kernels of this FlashInfer.

    Parameters
    ----------
    matrix, scales
        uint8 [N, K/2] and one byte a scale [N, K/16], N a multiple of 128.
    tile
        Rows of the epilogue tile.
    """
    utils, bits = _imported("flashinfer.utils"), scales.view(torch.uint8)
    rows = utils.get_shuffle_matrix_a_row_indices(matrix, tile).to(matrix.device)
    scale_rows = utils.get_shuffle_matrix_sf_a_row_indices(bits, tile).to(matrix.device)
    return matrix[rows], bits[scale_rows].view(scales.dtype)


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # its import runs code of a dozen packages
        raise BackendUnsupportedError(
            f"flashinfer-python cannot be imported: {short(error)}\n  fix: pip install -U flashinfer-python"
        ) from error


def refuse_tuning_in_capture(name: str) -> None:
    """Refuse a call that FlashInfer would profile while a CUDA graph is being captured.

    Raises
    ------
    CaptureError
        In a ``flashinfer.autotune()`` context during capture. No sync; an attribute is read otherwise.
    """
    if tuner().is_tuning_mode and capture.is_capturing():
        raise CaptureError(
            f"{name}: flashinfer.autotune() is on, and would profile kernels inside the CUDA graph that is being "
            "captured.\n  Before capturing: leave the autotune() context; its results stay in use"
        )


def try_out(name: str, problem: Problem, launch: Callable[[Tensor], None], out: Tensor) -> None:
    """Make the first call of a shape: compile, load and launch, and see that the launch wrote its output.

    ``gemm_fp8_nt_groupwise`` on sm_120 ignores the status of its launch: a kernel that cannot run does nothing.

    Parameters
    ----------
    name, problem
        For messages.
    launch
        Runs the GEMM of a zero activation into the tensor it is given.
    out
        [M, np], any content.

    Raises
    ------
    BackendUnsupportedError
        With what FlashInfer says, or how much of the output was left untouched. Synchronises.
    """
    out.fill_(_UNTOUCHED)
    try:
        with LOCK:
            launch(out)
        untouched = int((out == out.new_tensor(_UNTOUCHED)).sum())
    except (Fp4DispatchError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # compilers, downloads, cuDNN, CUTLASS: no common base
        raise BackendUnsupportedError(
            f"{name}: FlashInfer cannot run {problem}: {short(error)}\n"
            "  fix: fp4dispatch doctor; kernels are compiled with the nvcc in CUDA_HOME or on PATH, and those of "
            "flashinfer_trtllm are downloaded, or come with flashinfer-cubin"
        ) from error
    if untouched:
        raise BackendUnsupportedError(
            f"{name}: FlashInfer returned from {problem} without an error, and left {untouched} of {out.numel()} "
            "outputs unwritten"
        )


def on(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: several of FlashInfer's launchers take the current device, whatever their tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def short(error: BaseException) -> str:
    """Return an exception in one line of at most 600 characters, the end of long ones: compilers end with the error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 600 else '... ' + text[-600:]}"
