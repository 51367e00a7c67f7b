"""Operands for the check of a bound layer: activations drawn on its device, and exact products of sampled outputs.

Every activation is exact in the format that it is quantised to, as in :mod:`fp4dispatch.trust.canary`, so the answer is
that of the GEMM alone. The last elements along K are large, so that a dropped tail shows. Products are float64, where
torch never uses TensorFloat-32. Only sampled rows of x and W are dequantised, a few columns of K at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own.tensors.folding import FOLD, fold_e4m3
from fp4dispatch.problem import Activation
from fp4dispatch.trust.tilecheck import TILE

_K_STEP = 512
"""Columns of K that are dequantised and multiplied at a time; a multiple of every block of scales."""
_ELEMENTS = 1 << 20
"""Elements of x that are drawn at a time."""
_SEED = 0x5EED_F0_1A7E
"""Not 0, which many scripts use: weights from the same random stream would correlate with x."""
_TAIL = 16
_TYPICAL = 8.0
"""Typical size of a product, which float16 can hold."""
_ROW_OCTAVES = 3


@dataclass(frozen=True, eq=False)
class Answer:
    """Exact products of sampled rows and columns, float64 [rows, columns], without bias.

    ``size``: the root of the sum of squares of the K terms of each product. ``rows`` and ``columns``: int64 indices
    into the output.
    """

    rows: Tensor
    columns: Tensor
    product: Tensor
    size: Tensor


class Operands:
    """Draws the operands of one layer.

    Parameters
    ----------
    weights
        Canonical weights of the layer.
    activation
        The format that is multiplied: ``nvfp4``, ``fp8`` or ``bf16``.
    dtype
        Of x, the output and the bias.
    seed
        Of the numbers.
    """

    def __init__(self, weights: LinearWeights, activation: Activation, dtype: torch.dtype, seed: int = 0) -> None:
        self.w, self.activation, self.dtype = weights, activation, dtype
        self.device = weights.weight.device
        self.draw = torch.Generator(device=self.device).manual_seed(_SEED + seed)
        self.static = self._static_scale()
        self.boost = min(max(0.5 * math.sqrt(weights.k / _TAIL), 1.0), 24.0)
        self.typical = _TYPICAL
        self.factor = self._factor()

    # ---- activations

    def x(self, m: int) -> Tensor:
        """Return an activation [M, K]."""
        x = torch.empty(m, self.w.k, dtype=self.dtype, device=self.device)
        step = max(1, _ELEMENTS // self.w.k)
        for start in range(0, m, step):
            rows = x[start : start + step]
            rows.copy_(self._unit(rows.shape[0], start).mul_(self.factor))
        return x

    def bias(self) -> Tensor:
        """Return a bias [N] of the size of the products."""
        drawn = torch.randn(self.w.n, generator=self.draw, device=self.device, dtype=torch.float32)
        return drawn.mul_(self.typical).to(self.dtype)

    def _static_scale(self) -> Tensor | None:
        """Return the static scale of the activation; None if there is none."""
        w = self.w
        quantised = {"nvfp4_gemm": "nvfp4", "fp8_gemm": "fp8"}[w.op] == self.activation
        if w.input_scale is None or not quantised or w.scaling == "block128":
            return None
        return w.input_scale.reshape(())

    def _factor(self) -> Tensor:
        """Return the factor from drawn units to activations: the static scale, or a power of two. Synchronises."""
        x = self._unit(8, 0)
        rows = torch.arange(min(TILE, self.w.n), dtype=torch.int64, device=self.device)
        w = torch.cat([self._weight(rows, stop - _K_STEP, stop) for stop in self._k_sample()], 1)
        size = (x.double().square().mean() * w.square().mean()).sqrt().item() * math.sqrt(self.w.k)
        if self.static is not None:
            self.typical = size * self.static.item() if 0 < size < math.inf else _TYPICAL
            return self.static
        exponent = round(math.log2(_TYPICAL / size)) if 0 < size < math.inf else 0
        if self.dtype == torch.float16:
            exponent = min(max(exponent, -8), 2)  # the largest unit is 2688, the least that matters 1/4
        exponent = min(max(exponent, -60), 60)
        self.typical = size * 2.0**exponent if 0 < size < math.inf else _TYPICAL
        return torch.full((), 2.0**exponent, dtype=torch.float32, device=self.device)

    def _k_sample(self) -> tuple[int, ...]:
        """Return the ends of the parts of K that are sampled to estimate the size of the weights."""
        return tuple(dict.fromkeys((min(_K_STEP, self.w.k), self.w.k)))

    def _unit(self, rows: int, first: int) -> Tensor:
        """Draw rows of codes times scales, f32 [rows, K]: codes of four bits, and a power of two for each row.

        Rows differ in size by up to four, so that a swap of two rows' scales shows.
        """
        k, device = self.w.k, self.device
        number = torch.arange(first, first + rows, dtype=torch.int64, device=device)
        octave = torch.remainder(number, _ROW_OCTAVES).float()
        by_row = torch.exp2(-octave).unsqueeze(1)
        if self.activation == "nvfp4":
            return self._nvfp4_unit(rows).mul_(by_row)
        x = self._normal(rows, k)
        if self.activation == "bf16":
            x[:, -_TAIL:] *= self.boost
            x = x.bfloat16().float()
            return x.mul_(by_row)
        if self.w.scaling == "block128":
            return self._blocks_unit(x).mul_(by_row)
        x.mul_(150.0 / self.boost)
        x[:, -_TAIL:] *= self.boost
        x = _e4m3(x if self.static is None else x.mul_(by_row))
        if self.static is not None:
            return x
        x[:, -1] = 448.0  # the scale of the row is then exactly that power of two
        return x.mul_(by_row)

    def _normal(self, rows: int, k: int) -> Tensor:
        return torch.randn(rows, k, generator=self.draw, device=self.device, dtype=torch.float32)

    def _blocks_unit(self, x: Tensor) -> Tensor:
        """Return e4m3 codes whose 1x128 blocks all have the largest code, the last one scaled up."""
        k = x.shape[1]
        x = x.mul_(64.0)
        x[:, -_TAIL:] *= 4
        x = _e4m3(x)
        x[:, :: formats.FP8_BLOCK] = 448.0
        last = (k - 1) // formats.FP8_BLOCK * formats.FP8_BLOCK
        blocks = max(k / formats.FP8_BLOCK, 1.0)
        x[:, last:] *= 2.0 ** round(math.log2(max(0.5 * math.sqrt(blocks), 1.0)))
        return x

    def _nvfp4_unit(self, rows: int) -> Tensor:
        """Return e2m1 codes times e4m3 block scales; each block holds a 6, and the last one has the scale 448."""
        groups = self.w.k // formats.NVFP4_BLOCK
        size = (rows, groups, formats.NVFP4_BLOCK)
        table = torch.tensor(formats.E2M1_VALUES, dtype=torch.float32, device=self.device)
        codes = torch.randint(0, 16, size, generator=self.draw, device=self.device, dtype=torch.int32)
        values = table.index_select(0, (codes & 7).flatten()).view(size) * (1 - 2 * (codes >> 3)).float()
        values[..., 0] = formats.E2M1_MAX
        mantissa = torch.randint(8, 16, size[:2], generator=self.draw, device=self.device, dtype=torch.int32)
        octave = torch.randint(0, 2, size[:2], generator=self.draw, device=self.device, dtype=torch.int32)
        body = math.floor(math.log2(formats.E4M3_MAX / (2 * self.boost)))
        sf = mantissa.float() / 8 * torch.exp2((octave + body - 1).float())
        sf[:, -1] = formats.E4M3_MAX
        return values.mul_(sf.unsqueeze(-1)).flatten(1)

    # ---- answers

    def answer(self, x: Tensor, rows: Tensor, columns: Tensor) -> Answer:
        """Return the exact products of some rows of x and some columns of the output. Its peak is about 30 MB."""
        device, k = self.device, self.w.k
        product = torch.zeros(len(rows), len(columns), dtype=torch.float64, device=device)
        square = torch.zeros_like(product)
        for start in range(0, k, _K_STEP):
            stop = min(start + _K_STEP, k)
            a = self._values(x[:, start:stop].index_select(0, rows))
            b = self._weight(columns, start, stop)
            product.addmm_(a, b.t())
            square.addmm_(a.square_(), b.square_().t())
        return Answer(rows, columns, product, square.sqrt_())

    def _values(self, x: Tensor) -> Tensor:
        """Return x after quantisation, float64. x lies within 2^-8 of a code, so rounding is unambiguous."""
        scale = self.static
        if scale is None:
            return x.double()
        if self.activation == "nvfp4":
            q = formats.nvfp4_quantize(x, scale)
            return formats.nvfp4_dequantize(q.data, q.sf, torch.ones_like(scale)).double().mul_(scale.double())
        return _e4m3(x.float() / scale).double().mul_(scale.double())

    def _weight(self, columns: Tensor, start: int, stop: int) -> Tensor:
        """Return some rows of W, columns ``start`` to ``stop`` of K, in the values that are multiplied, float64."""
        w, start = self.w, max(start, 0)
        if w.op == "nvfp4_gemm":
            return self._nvfp4_weight(columns, start, stop)
        codes = _take(w.weight, columns, start, stop).float().double()
        if w.scaling == "tensor":
            return codes.mul_(w.scale.reshape(()).double())
        if w.scaling == "row":
            return codes.mul_(w.scale.reshape(-1).index_select(0, columns).double().unsqueeze(1))
        block = formats.FP8_BLOCK
        start_block = start // block
        grid = w.scale.index_select(0, columns // block)[:, start_block : -(-stop // block)].double()
        grid = grid.repeat_interleave(block, 1)[:, start - start_block * block :][:, : stop - start]
        return codes.mul_(grid)

    def _nvfp4_weight(self, columns: Tensor, start: int, stop: int) -> Tensor:
        w, block = self.w, formats.NVFP4_BLOCK
        start = start // block * block
        data = _take(w.weight, columns, start // 2, stop // 2)
        sf = self._block_scales(columns)[:, start // block : stop // block]
        assert w.global_scale is not None
        per_row = formats.expand_shards(w.global_scale, w.shard_rows or (w.n,)).index_select(0, columns)
        if self.activation == "fp8":
            values = fold_e4m3(data, sf.contiguous()).float().double().mul_(FOLD)
        else:
            one = torch.ones((), dtype=torch.float32, device=self.device)
            values = formats.nvfp4_dequantize(data, sf.contiguous(), one).double()
        return values.mul_(per_row.double().unsqueeze(1))

    def _block_scales(self, columns: Tensor) -> Tensor:
        """Return the block scales of some rows of W, linear, e4m3 [len(columns), K/16]."""
        w, groups = self.w, self.w.k // formats.NVFP4_BLOCK
        raw = w.scale.view(torch.uint8)
        if w.sf_layout == "linear":
            return raw.index_select(0, columns).view(torch.float8_e4m3fn)
        padded = raw.shape[1]  # 128x4: tiles of 512 bytes, (N/128, K/64, 32, 4, 4)
        tiles = raw.view(-1, padded // 4, 32, 4, 4)
        found = tiles[columns // 128, :, columns % 32, columns % 128 // 32]
        return found.reshape(len(columns), padded)[:, :groups].contiguous().view(torch.float8_e4m3fn)


def _take(matrix: Tensor, rows: Tensor, start: int, stop: int) -> Tensor:
    """Return some rows of a one-byte matrix, columns ``start`` to ``stop``."""
    return matrix.view(torch.uint8)[:, start:stop].index_select(0, rows).view(matrix.dtype)


def _e4m3(x: Tensor) -> Tensor:
    """Round to e4m3, f32."""
    return x.clamp(-formats.E4M3_MAX, formats.E4M3_MAX).to(torch.float8_e4m3fn).float()
