"""cuBLASLt's FP8 GEMM from our own host code (``csrc/cublaslt/cublaslt_gemm.h``), on Hopper.

``torch._scaled_mm`` makes descriptors and asks for an algorithm in every call, which costs the host more than the
launch (docs/measurements.md, host cost). Here both are done once for each M, and one call quantises and multiplies. The
request to cuBLASLt is torch's, so the algorithm and the bits are, too. If cuBLASLt cannot be called like this, torch's
operator runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.libraries.cublaslt_gemms import Kind, Launch, kind_of, parts_of, view_of
from fp4dispatch.backends.libraries.cublaslt_weights import Layout
from fp4dispatch.backends.own.scratch import ARENA_BYTES, Part, Scratch
from fp4dispatch.backends.own.swiglu import Front
from fp4dispatch.backends.own.tensors.quantizers import Quantizers, ones, ones_for
from fp4dispatch.machine import system as _system
from fp4dispatch.problem import Problem

OLDEST = 120900
"""First cuBLASLt whose heuristics support row scaling and block scaling, on sm_90."""

_TENSOR, _ROW, _BLOCK = range(3)  # ``scales`` of csrc/quantise/fp8_quantize.cu

M_OF_BLOCKS = 4
"""Under block scales cuBLASLt takes M of multiples of this."""

_MOST = 512
"""Most M that are remembered; a prefill may bring any."""

Gemm = Callable[..., None]
"""``gemm(x, x_scale, a, a_scale, b, b_scale, bias, d, workspace)``, as ``csrc/quantise/fp8_quantize.cu`` says.

``x`` None: ``a`` is quantised already.
"""


class DirectGemms:
    """Quantises and multiplies, for one N, K and output dtype, and every M.

    ``row``, ``static``, ``static_row`` and ``block`` are launches as the ``cublaslt`` backend has them: of x [M, K] in
    bfloat16 or float16 by prepared weights into d [M, N], both contiguous on 16 bytes. Safe to capture, also for a new
    M: like torch, which asks for an algorithm in a capture too.

    Parameters
    ----------
    make
        Returns the GEMM for M tokens and its workspace in bytes.
    device
        Of the layer.
    parts
        What a launch for M tokens writes before the GEMM.
    view
        Brings these tensors, and a workspace behind them, into the form that the GEMM takes.
    """

    def __init__(
        self,
        make: Callable[[int], tuple[Gemm, int]],
        device: torch.device,
        parts: Callable[[int], Sequence[Part]],
        view: Callable[[list[Tensor]], tuple[Tensor, ...]],
    ) -> None:
        self._make, self._device, self._parts, self._view = make, device, parts, view
        self._ones = ones(device)
        self._known: dict[int, tuple[Gemm, Scratch, int | None]] = {}

    def launch(self, layout: Layout) -> Launch:
        """Return the launch for FP8 weights of a layout."""
        launches: dict[Kind, Launch] = {
            "block": self.block,
            "row": self.row,
            "static": self.static,
            "static_row": self.static_row,
        }
        return launches[kind_of(layout)]

    def behind(self, layout: Layout, front: Front) -> Launch:
        """Return :meth:`launch` behind a kernel that quantises something else in place of x."""

        def make(m: int) -> tuple[Gemm, int]:
            gemm, workspace = self._make(m)

            def both(x: Tensor, x_scale: Tensor | None, a: Tensor, a_scale: Tensor, *others: Tensor | None) -> None:
                rows = x.shape[0]
                if x_scale is None:
                    front.function(x, a[:rows], a_scale[:rows], front.pdl)
                else:
                    front.function(x, a, x_scale, front.pdl)
                gemm(None, None, a, a_scale, *others)

            return both, workspace

        return DirectGemms(make, self._device, self._parts, self._view).launch(layout)

    def row(self, _: object, m: int, x: Tensor, w: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
        """Launch with one scale a token, from its own values."""
        gemm, (q, scale), workspace = self.of(m)
        gemm(x, None, q, scale, w[0], w[1], bias, d, workspace)

    def static(self, _: object, m: int, x: Tensor, w: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
        """Launch with one static scale for all tokens and one for the weight."""
        gemm, (q,), workspace = self.of(m)
        gemm(x, w[2], q, w[2], w[0], w[1], bias, d, workspace)

    def static_row(self, _: object, m: int, x: Tensor, w: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
        """Launch with one static scale for all tokens, already multiplied into the row scales of the weight."""
        gemm, (q,), workspace = self.of(m)
        gemm(x, w[3], q, ones_for(self._ones, m), w[0], w[2], bias, d, workspace)

    def block(self, _: object, __: int, x: Tensor, w: tuple[Tensor, ...], d: Tensor, bias: Tensor | None) -> None:
        """Launch with a scale for 128 k of a token. ``d`` has rows for M up to a multiple of 4."""
        gemm, (q, scale), workspace = self.of(d.shape[0])
        gemm(x, None, q, scale, w[0], w[1], bias, d, workspace)

    def of(self, m: int) -> tuple[Gemm, tuple[Tensor, ...], Tensor | None]:
        """Return the GEMM for M tokens, scratch memory for a launch as ``parts`` says, and the workspace, if any.

        Raises
        ------
        RuntimeError
            If cuBLASLt has no algorithm for this M.
        """
        found = self._known.get(m)
        if found is None:
            found = self._plan(m)
            if len(self._known) < _MOST:
                self._known[m] = found
        gemm, scratch, apart = found
        if apart == 0:
            return gemm, scratch(), None
        if apart is None:
            *parts, workspace = scratch()
            return gemm, tuple(parts), workspace
        return gemm, scratch(), torch.empty(apart, dtype=torch.uint8, device=self._device)

    def _plan(self, m: int) -> tuple[Gemm, Scratch, int | None]:
        """Make a GEMM, its scratch memory, and its workspace in bytes; None if that is the last part of the scratch."""
        gemm, size = self._make(m)
        parts, workspace = list(self._parts(m)), Part((size,), torch.uint8)
        # A workspace of megabytes comes from the allocator: it would not fit the arena.
        if size == 0 or sum(part.nbytes for part in parts) + workspace.nbytes > ARENA_BYTES:
            return gemm, Scratch(self._device, parts, self._view), size
        return gemm, Scratch(self._device, [*parts, workspace], self._view), None


def direct_gemms(
    quantizers: Quantizers,
    device: torch.device,
    layout: Layout,
    problem: Problem,
) -> tuple[DirectGemms | None, str]:
    """Return the launches of a layer, tried for the M of ``problem``; or None, and why torch's operator runs instead.

    Parameters
    ----------
    quantizers
        Of the device.
    device
        A GPU of sm_90.
    layout
        Of the weights, nothing padded.
    problem
        Says the output's dtype, bfloat16 or float16, and whether there is a bias, in that dtype.
    """
    library, cuda = quantizers.library, (_system.current().cuda or "").split(".")[0]
    major = int(cuda) if cuda.isdigit() else 0
    version = library.cublaslt_version(major)
    if version < OLDEST:
        found = f"is {version}" if version else "is not loaded as a library of its own"
        return None, f"{_INSTEAD}: that of CUDA {cuda or 'unknown'} {found}, needed {OLDEST} or newer"
    fp16 = problem.out_dtype == "float16"
    block = layout.scaling == "block128"
    scales = _BLOCK if block else _ROW if layout.per_row else _TENSOR

    def make(m: int) -> tuple[Gemm, int]:
        gemm, workspace = library.cublaslt_fp8_plan(
            major, device.index or 0, m, layout.n, layout.k, scales, fp16, problem.bias, quantizers.pdl
        )
        return gemm, int(workspace)

    gemms = DirectGemms(make, device, functools.partial(parts_of, layout), view_of(layout))
    try:
        make(formats.round_up(problem.m, M_OF_BLOCKS) if block else problem.m)
    except RuntimeError as error:
        return None, f"{_INSTEAD}: {error}"
    return gemms, ""


_INSTEAD = "cuBLASLt is called through torch, which costs the host about 9 us more"
