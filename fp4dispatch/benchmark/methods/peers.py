"""Peers: cuBLAS in bfloat16, ``torch._scaled_mm``, FlashInfer's block-scale GEMM, Humming's NVFP4 kernel.

FlashInfer (0.7) and Humming (0.1.19, PyPI ``humming-kernels``) are optional and imported only when they are measured.
``HummingLayer`` takes ModelOpt's tensors, repacks them in ``transform()``, and compiles kernels at its first call. It
needs the NVRTC and CUDA headers of an installed toolkit of torch's CUDA version. By default it compiles the kernels of
all ranges of M of a shape, e.g. 33. A ``tuning_config`` for the range of M gives the same kernel and launch with one
compilation, which another process can do ahead (``humming_ahead``).
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from fp4dispatch import formats, jit
from fp4dispatch.benchmark.methods import humming_ahead, humming_kernels
from fp4dispatch.benchmark.methods.background import Job
from fp4dispatch.benchmark.methods.base import BASELINE, Card, Launch, Method, Prepared, Problems
from fp4dispatch.benchmark.problems.operands import Format, Operands
from fp4dispatch.problem.arch import SM90, Arch

_E4M3_NAN = 0x7F
_SCALINGS: tuple[Literal["tensor", "row"], ...] = ("tensor", "row")
_FP8_ARCHS = frozenset(map(Arch.parse, ("8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")))
_NOT_AHEAD = (
    "Humming's layers are configured in another way than humming_kernels.py says: kernels compiled ahead are others"
)


def methods() -> tuple[Method, ...]:
    """Return every peer, the baseline first."""
    tensor, row = ([ScaledMm(fmt, quantise) for quantise in (False, True)] for fmt in _SCALINGS)
    return (Bf16(), *tensor, *row, FlashInferBlock(), HummingNvfp4())


def _output(x: Tensor, n: int) -> Tensor:
    return torch.empty(x.shape[0], n, dtype=torch.bfloat16, device=x.device)


class Bf16(Method):
    """cuBLAS in bfloat16 through ``torch.mm``."""

    name = BASELINE
    format: Format = "bf16"
    what = "torch.mm in bfloat16: cuBLAS on a GPU"

    def lacks(self, card: Card) -> str:
        """Return an empty text: it runs anywhere."""
        return ""

    def prepare(self, operands: Operands, copies: int, card: Card) -> Prepared:
        """Clone the weight."""
        weights = [operands.bf16, *(operands.bf16.clone() for _ in range(copies - 1))]

        def at(x: Tensor) -> Launch:
            out = _output(x, operands.n)
            return Launch(lambda i: torch.mm(x, weights[i].t(), out=out), "bf16", "torch", out)

        return at


class ScaledMm(Method):
    """``torch._scaled_mm`` with one scale a tensor or a row, with or without the activation's quantisation.

    With it (``+q``) our own quantiser runs first: one static scale for ``tensor``, one per token for ``row``.
    """

    def __init__(self, fmt: Literal["tensor", "row"], quantise: bool) -> None:
        self.format, self.scaling = fmt, fmt
        self.quantise = quantise
        self.name = f"torch/{fmt}" + ("+q" if quantise else "")
        self.takes = "bf16" if quantise else "fp8"
        first = f"our {fmt} quantiser, then " if quantise else ""
        self.what = f"{first}torch._scaled_mm, e4m3, one scale a {fmt}"

    def lacks(self, card: Card) -> str:
        """Return what FP8 matmuls of torch need."""
        if card.arch not in _FP8_ARCHS:
            return f"FP8 needs one of {', '.join(sorted(a.sm for a in _FP8_ARCHS))}, found {card.arch or 'no GPU'}"
        return ""

    def prepare(self, operands: Operands, copies: int, card: Card) -> Prepared:
        """Clone the weight; load the quantiser where it is needed."""
        w = operands.weights(self.format)
        weights = [w.weight, *(w.weight.clone() for _ in range(copies - 1))]
        entering = self.scaling
        kernels = jit.load("fp8_quantize", "any", card.arch).module if self.quantise and card.arch else None

        def at(x: Tensor) -> Launch:
            q = formats.fp8_quantize(x, entering)
            a, scale = q.data, q.scale
            row = entering == "row"
            a_scale, b_scale = (scale.view(-1, 1), w.scale.view(1, -1)) if row else (scale, w.scale)
            out = _output(x, operands.n)
            quantise = _quantiser(kernels, entering, x, a, scale) if kernels is not None else None
            if quantise is not None:
                a.view(torch.uint8).fill_(_E4M3_NAN)  # elements that the quantiser does not write stay NaN

            def call(i: int) -> Tensor:
                if quantise is not None:
                    quantise()
                torch._scaled_mm(a, weights[i].t(), a_scale, b_scale, out_dtype=out.dtype, out=out)
                return out

            return Launch(call, entering, "torch", out)

        return at


def _quantiser(kernels: Any, entering: str, x: Tensor, a: Tensor, scale: Tensor) -> Callable[[], object]:
    """Return our quantiser on one activation; it overwrites ``a`` (and ``scale`` per row) with the same values."""
    if entering == "row":
        return lambda: kernels.fp8_quantize_row(x, a, scale, False)
    static = scale.reshape(1)
    return lambda: kernels.fp8_quantize_tensor(x, a, static, False)


class FlashInferBlock(Method):
    """FlashInfer's SM90 block-scale GEMM (DeepGEMM): takes bfloat16 and quantises inside."""

    name = "flashinfer/block128+q"
    format: Format = "block128"
    slow_start = True
    what = "flashinfer.gemm.fp8_blockscale_gemm_sm90, bfloat16 activations"

    def lacks(self, card: Card) -> str:
        """Return what is missing: a Hopper GPU, or the package."""
        if card.arch != SM90:
            return f"needs sm_90, found {card.arch or 'no GPU'}"
        return "" if importlib.util.find_spec("flashinfer") else "flashinfer-python is not installed"

    def prepare(self, operands: Operands, copies: int, card: Card) -> Prepared:
        """Clone the weight; the scales stay one."""
        gemm = importlib.import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90
        w = operands.weights("block128")
        weights = [w.weight, *(w.weight.clone() for _ in range(copies - 1))]

        def at(x: Tensor) -> Launch:
            out = _output(x, operands.n)

            def call(i: int) -> Tensor:
                gemm(x, weights[i], None, w.scale, out=out)
                return out

            return Launch(call, "1x128", "DeepGEMM", out)

        return at


class HummingNvfp4(Method):
    """Humming's NVFP4 weights with bfloat16 activations."""

    name = "humming/nvfp4"
    format: Format = "nvfp4"
    slow_start = True
    what = "humming.layer.HummingLayer, ModelOpt NVFP4 weights, bfloat16 activations, its own choice of kernel"

    def lacks(self, card: Card) -> str:
        """Return what is missing: a GPU, or the package."""
        if card.arch is None:
            return "needs a CUDA GPU"
        return "" if importlib.util.find_spec("humming") else "humming-kernels is not installed (extra `bench`)"

    def prepare(self, operands: Operands, copies: int, card: Card) -> Prepared:
        """Repack the weight, then copy the layer; kernels are compiled at the first call."""
        module = importlib.import_module("humming.layer")
        w = operands.weights("nvfp4")
        schema, dtype = humming_kernels.schema(), humming_kernels.DTYPE
        layer = module.HummingLayer(w.n, w.k, schema, torch_dtype=dtype).to(card.device)
        layer.load_from_tensors({"weight": w.weight, "weight_scale": w.scale, "weight_scale_2": w.global_scale})
        layer.transform()
        layers = [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]
        table = humming_kernels.table(layer.humming_config, card.device)
        if not humming_kernels.is_layer_config(layer.humming_config, w.n, w.k, card.device):
            warnings.warn(_NOT_AHEAD, RuntimeWarning, stacklevel=2)

        def at(x: Tensor) -> Launch:
            out = _output(x, operands.n)
            chosen = humming_kernels.choice(table, x.shape[0])

            def call(i: int) -> Tensor:
                layers[i](x, outputs=out, tuning_config=chosen)
                return out

            return Launch(call, "bf16", "humming", out)

        return at

    def ahead(self, problems: Problems, card: Card) -> Job:
        """Compile the kernels of all problems."""
        return humming_ahead.job(f"compiling kernels of {self.name} ahead", problems, card.device)
