"""The operands of one (N, K): a weight in every format, activations, and the exact products to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own.tensors.folding import FOLD, fold_e4m3
from fp4dispatch.backends.reference import without_autocast
from fp4dispatch.problem import Scaling

Format = Literal["bf16", "nvfp4", "tensor", "row", "block128"]
"""A weight's format: the last three are e4m3 under that scaling."""
Entering = Literal["bf16", "tensor", "row", "1x128", "nvfp4"]
"""Format in which an activation is multiplied: as given, e4m3 under a scaling, or NVFP4."""

BLOCK = 1 << 26
"""Number of weight elements dequantised at a time for an exact product."""

WEIGHT_BYTES: dict[Format, float] = {
    "bf16": 2.0,
    "nvfp4": 0.5 + 1 / 16,
    "tensor": 1.0,
    "row": 1.0,
    "block128": 1.0 + 4 / 128**2,
}
"""Bytes an element, block scales included."""


class Operands:
    """Gaussian weights and activations. Each row has its own scale, so that swapped rows show up.

    Parameters
    ----------
    n, k
        Sizes of the weight [N, K]; K a multiple of 16.
    device
        Where everything lives.
    seed
        Of the random numbers.
    """

    def __init__(self, n: int, k: int, device: torch.device, seed: int = 0) -> None:
        self.n, self.k, self.device = n, k, device
        self._random = torch.Generator(device)
        self._random.manual_seed(seed * 1_000_003 + n * 131 + k)
        self.bf16 = self._rows(n, 0.02)
        self._weights: dict[Format, LinearWeights] = {}

    def _rows(self, rows: int, size: float) -> Tensor:
        """Return bfloat16 [rows, K]; each row's scale lies between half and double ``size``."""
        f32: dict[str, Any] = {"device": self.device, "dtype": torch.float32, "generator": self._random}
        scale = torch.rand(rows, 1, **f32).mul_(2).sub_(1).exp2_().mul_(size)
        out = torch.empty(rows, self.k, device=self.device, dtype=torch.bfloat16)
        for start in range(0, rows, 8192):
            some = slice(start, start + 8192)
            part = torch.randn(out[some].shape, **f32)
            out[some] = part.mul_(scale[some])
        return out

    def activation(self, m: int) -> Tensor:
        """Return new activations, bfloat16 [M, K]."""
        return self._rows(m, 1.0)

    def weights(self, fmt: Format) -> LinearWeights:
        """Return the weight, quantised once per format."""
        if fmt not in self._weights:
            n, k = self.n, self.k
            if fmt == "nvfp4":
                q = formats.nvfp4_quantize(self.bf16)
                made = LinearWeights("nvfp4_gemm", "nvfp4", n, k, q.data, q.sf, q.global_scale.reshape(1), (n,))
            elif fmt == "bf16":
                raise ValueError("bf16 weights are not quantised: use .bf16")
            else:
                made = LinearWeights("fp8_gemm", _scaling(fmt), n, k, *formats.fp8_quantize(self.bf16, fmt))
            self._weights[fmt] = made
        return self._weights[fmt]

    def rows(self, fmt: Format, start: int, stop: int, *, folded: bool = False) -> Tensor:
        """Return rows of the weight in f32, exactly as the format holds them; cut at multiples of 128.

        ``folded``: an NVFP4 weight as w4a8 multiplies it, its block scales rounded into e4m3.
        """
        if fmt == "bf16":
            return self.bf16[start:stop].float()
        w = self.weights(fmt)
        if fmt == "nvfp4":
            assert w.global_scale is not None
            if folded:
                return fold_e4m3(w.weight[start:stop], w.scale[start:stop]).float() * (FOLD * w.global_scale)
            return formats.nvfp4_dequantize(w.weight[start:stop], w.scale[start:stop], w.global_scale)
        blocks = slice(start // formats.FP8_BLOCK, -(-stop // formats.FP8_BLOCK))
        scale = w.scale if fmt == "tensor" else w.scale[start:stop] if fmt == "row" else w.scale[blocks]
        return formats.fp8_dequantize(w.weight[start:stop], scale, fmt)

    def product(self, x: Tensor, fmt: Format, *, folded: bool = False) -> Tensor:
        """Return ``x @ W^T`` in f32 for f32 x [M, K], in full IEEE precision (no TF32)."""
        out = torch.empty(x.shape[0], self.n, device=self.device, dtype=torch.float32)
        step = max(BLOCK // (self.k * formats.FP8_BLOCK), 1) * formats.FP8_BLOCK
        with _ieee():
            for start in range(0, self.n, step):
                stop = min(start + step, self.n)
                out[:, start:stop] = x @ self.rows(fmt, start, stop, folded=folded).t()
        return out


class Truth:
    """Exact products of one activation, each computed once."""

    def __init__(self, operands: Operands, m: int) -> None:
        self.operands, self.x = operands, operands.activation(m)
        self._products: dict[tuple[Format, Entering], Tensor] = {}

    def want(self, fmt: Format, entering: Entering) -> Tensor:
        """Return f32 [M, N]: the exact product of the weight and the activation as they are multiplied.

        The weight is used as stored. With FP8 activations an NVFP4 weight is folded to e4m3.
        """
        key = (fmt, entering)
        if key not in self._products:
            self._products[key] = self.operands.product(
                as_entering(self.x, entering), fmt, folded=fmt == "nvfp4" and entering not in ("bf16", "nvfp4")
            )
        return self._products[key]


def as_entering(x: Tensor, entering: Entering) -> Tensor:
    """Return an activation as it is multiplied, in f32: rounded to its format and back."""
    if entering == "bf16":
        return x.float()
    if entering == "nvfp4":
        return formats.nvfp4_dequantize(*formats.nvfp4_quantize(x))
    return formats.fp8_dequantize(*formats.fp8_quantize(x, entering), entering)


def _scaling(fmt: Format) -> Scaling:
    assert fmt != "bf16"
    return fmt


@contextmanager
def _ieee() -> Iterator[None]:
    """Use IEEE f32 products, whatever the application has set; no autocast."""
    groups = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [group.fp32_precision for group in groups]
    try:
        for group in groups:
            group.fp32_precision = "ieee"
        with without_autocast():
            yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group.fp32_precision = value
