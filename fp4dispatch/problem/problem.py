"""What is to be computed: one GEMM of a linear layer, described without tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from fp4dispatch.errors import InputError

Op = Literal["nvfp4_gemm", "fp8_gemm"]
Activation = Literal["any", "nvfp4", "fp8", "bf16"]
Scaling = Literal["nvfp4", "tensor", "row", "block128"]
OutDtype = Literal["bfloat16", "float16", "float32"]
CaptureMode = Literal["none", "full", "piecewise"]
SfLayout = Literal["linear", "128x4"]

NVFP4_BLOCK = 16
"""Elements along K that share one block scale."""

OPS: tuple[Op, ...] = get_args(Op)
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
OUT_DTYPES: tuple[OutDtype, ...] = get_args(OutDtype)
CAPTURE_MODES: tuple[CaptureMode, ...] = get_args(CaptureMode)
SF_LAYOUTS: tuple[SfLayout, ...] = get_args(SfLayout)
HALVES_FROM = 16
"""Above so many tokens, ranges of M also end half way between two powers of two."""


@dataclass(frozen=True)
class Problem:
    """``D[M,N] = alpha * A[M,K] @ B[N,K]^T (+ bias[N])`` as the policy sees it.

    Parameters
    ----------
    op
        ``nvfp4_gemm``: B holds e2m1 values with e4m3 scales per 16 along K. ``fp8_gemm``: B holds e4m3 values.
    m, n, k
        Logical sizes in elements, before any padding.
    activation
        Format in which A enters the multiplication: ``nvfp4`` (w4a4), ``fp8`` (w4a8, or FP8 x FP8), ``bf16``
        (weight-only; A stays in its 16-bit dtype), or ``any``: the policy may choose.
    scaling
        How scales are laid over B (and A): ``nvfp4`` for ``nvfp4_gemm``; ``tensor``, ``row`` (per token x per
        channel) or ``block128`` (1x128 x 128x128) for ``fp8_gemm``.
    out_dtype
        Element type of D.
    bias
        Whether a bias of length N is added.
    capture
        ``none`` (eager), ``full`` (one CUDA graph around everything) or ``piecewise`` (graphs between attention calls).
    m_min
        Smallest M that the caller promises. ``FP4Linear`` returns early for M == 0 and so promises 1; an engine that
        captures pieces with a live token count may only promise 0.
    sf_layout
        Layout of the block scales as handed in; None where the backend's own ``prepare`` decides.
    raw
        Whether A comes quantised already, as raw operators take it; layers hand in floating-point activations.
    """

    op: Op
    m: int
    n: int
    k: int
    activation: Activation = "any"
    scaling: Scaling = "nvfp4"
    out_dtype: OutDtype = "bfloat16"
    bias: bool = False
    capture: CaptureMode = "none"
    m_min: int = 1
    sf_layout: SfLayout | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        one_of("op", self.op, OPS)
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("scaling", self.scaling, SCALINGS)
        one_of("out_dtype", self.out_dtype, OUT_DTYPES)
        one_of("capture", self.capture, CAPTURE_MODES)
        one_of("sf_layout", self.sf_layout, (None, *SF_LAYOUTS))
        if (self.op == "nvfp4_gemm") != (self.scaling == "nvfp4"):
            raise InputError(
                f"op={self.op!r} does not go with scaling={self.scaling!r}: nvfp4_gemm takes 'nvfp4', fp8_gemm takes "
                "'tensor', 'row' or 'block128'"
            )
        if self.op == "fp8_gemm" and self.activation == "nvfp4":
            raise InputError("op='fp8_gemm' does not take activation='nvfp4': pass 'fp8', 'bf16' or 'any'")
        for name, value, least in (("m", self.m, 0), ("n", self.n, 1), ("k", self.k, 1), ("m_min", self.m_min, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}={value!r} is not a size: need an integer of at least {least}")
        if self.op == "nvfp4_gemm" and self.k % NVFP4_BLOCK:
            raise InputError(
                f"k={self.k} is not a multiple of {NVFP4_BLOCK}, the NVFP4 block: no layer has such weights. Pad "
                "weights and inputs with zeros"
            )

    def __str__(self) -> str:
        return self.text(f"M={self.m}")

    def eager(self) -> Problem:
        """Return the problem as it is outside of a graph."""
        return self if self.capture == "none" and self.m_min == 1 else replace(self, capture="none", m_min=1)

    def any_m(self) -> Problem:
        """Return the problem of the layer, for any number of tokens and any capture."""
        return replace(self.eager(), m=1)

    def text(self, tokens: str) -> str:
        """Return the problem in words, with these words for M."""
        bias = " + bias" if self.bias else ""
        capture = "" if self.capture == "none" else f", {self.capture} capture"
        act = "" if self.activation == "any" else f", activation {self.activation}"
        act += ", quantised already" if self.raw else ""
        return f"{self.op} {tokens} N={self.n} K={self.k} ({self.scaling}{act}) -> {self.out_dtype}{bias}{capture}"


def m_bucket(m: int) -> int:
    """Return the last M of the range that ``m`` lies in: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96 and so on.

    Ranges end at powers of two, and above :data:`HALVES_FROM` also half way between two: there a tile that the last
    tokens leave half empty changes which kernel is fastest.
    """
    above = 1 << max(m - 1, 0).bit_length()
    half = above * 3 // 4
    return half if above > HALVES_FROM and m <= half else above


def m_before(m: int) -> int:
    """Return the last M of the range before that of ``m``; 0 for M of 1."""
    last = m_bucket(m)
    if last & (last - 1):
        return last * 2 // 3
    return last * 3 // 4 if last > HALVES_FROM else last // 2


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Require one of some values; InputError lists them."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise InputError(f"{name}={value!r} is not known; use one of {', '.join(map(repr, allowed))}")
