"""Time models of what runs beside our GEMMs: quantisers of activations, cuBLASLt's FP8 GEMM, weights written out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fp4dispatch.backends.own.tiling.launch_model import LONG_US
from fp4dispatch.problem.integers import ceil_div

NORM = 4
"""As in :mod:`~fp4dispatch.backends.own.tiling.few_tokens_model`."""
STAGE_K = 128
LT_TILES = ((64, 128), (128, 64), (128, 128), (64, 256), (128, 256), (256, 128))
"""Tokens and rows of the tiles that cuBLASLt may take."""
BLOCK_TILE = 128
"""Tokens and rows of cuBLASLt's tile under block scales. Others beside it (64x128, 128x256, 256x128) fit no better."""
UNFOLD_BYTES = 0.5625 + 1
"""Of a weight: read as NVFP4, written as FP8."""
FAR = 4_000_000
"""Elements of activations from which on each costs more before cuBLASLt's GEMM (bench/notes/quantisers.md)."""


@dataclass(frozen=True)
class QuantiserSpeed:
    """A quantiser in front of a GEMM of ours: microseconds of its start, per k of a token, and per element."""

    start: float
    row: float
    element: float

    def microseconds(self, m: Any, k: Any) -> Any:
        """Return the predicted time for [m, k] activations."""
        return self.start + self.row * k + self.element * m * k

    def scaled(self, clock: float, memory: float) -> QuantiserSpeed:
        """Return the constants of a GPU whose clock and memory bandwidth are so many times as high."""
        return QuantiserSpeed(self.start / clock, self.row / clock, self.element / clock)


@dataclass(frozen=True)
class RowsQuantiserSpeed:
    """The quantiser in front of cuBLASLt's GEMM, with what it costs that GEMM.

    Microseconds of its start, per token, per element up to :data:`FAR`, and per element from there on.
    """

    start: float
    token: float
    element: float
    far: float

    def microseconds(self, m: Any, k: Any) -> Any:
        """Return the predicted time for [m, k] activations; numbers may be arrays."""
        beyond = (m * k - FAR + abs(m * k - FAR)) / 2
        return self.start + self.token * m + self.element * (m * k - beyond) + self.far * beyond

    def scaled(self, clock: float, memory: float) -> RowsQuantiserSpeed:
        """Return the constants of a GPU whose clock and memory bandwidth are so many times as high."""
        return RowsQuantiserSpeed(self.start / clock, self.token / clock, self.element / clock, self.far / clock)


@dataclass(frozen=True)
class CublasLtSpeed:
    """cuBLASLt's FP8 GEMM with scales by row and column: whole waves of its fastest tile, or the read of the weights.

    Parameters
    ----------
    start
        Microseconds before and after.
    memory
        Bytes of weights per microsecond.
    end
        What the end of a tile takes, in times of 128 k.
    slowing
        As of :class:`~fp4dispatch.backends.own.tiling.launch_model.Gpu`.
    tiles
        For each of :data:`LT_TILES`: microseconds of 128 k.
    """

    start: float
    memory: float
    end: float
    slowing: float
    tiles: tuple[float, ...]

    def microseconds(self, m: int, n: int, k: int, sms: int) -> float:
        """Return the predicted time of [m, k] by [n, k]."""
        waves = [ceil_div(ceil_div(m, tokens) * ceil_div(n, rows), sms) for tokens, rows in LT_TILES]
        each = [w * t for w, t in zip(waves, self.tiles, strict=True)]
        return float(lt_time(self.start, self.memory, self.end, self.slowing, each, n, k))

    def scaled(self, clock: float, memory: float) -> CublasLtSpeed:
        """Return the constants of a GPU whose clock and memory bandwidth are so many times as high."""
        return replace(
            self, start=self.start / clock, memory=self.memory * memory, tiles=tuple(t / clock for t in self.tiles)
        )


@dataclass(frozen=True)
class BlockScaledSpeed:
    """cuBLASLt's FP8 GEMM under block scales with our quantiser before it: whole waves of its one tile.

    Parameters
    ----------
    start, memory, end, slowing
        As of :class:`CublasLtSpeed`.
    tile
        Microseconds of 128 k of a tile of 128 tokens by 128 rows.
    token, element
        Of the quantiser: microseconds per token, and per element.
    """

    start: float
    memory: float
    end: float
    slowing: float
    tile: float
    token: float
    element: float

    def microseconds(self, m: Any, n: Any, k: Any, sms: int) -> Any:
        """Return the predicted time of [m, k] by [n, k]; numbers may be arrays."""
        waves = ceil_div(ceil_div(m, BLOCK_TILE) * ceil_div(n, BLOCK_TILE), sms)
        gemm = lt_time(self.start, self.memory, self.end, self.slowing, [waves * self.tile], n, k)
        return gemm + self.token * m + self.element * m * k

    def scaled(self, clock: float, memory: float) -> BlockScaledSpeed:
        """Return the constants of a GPU whose clock and memory bandwidth are so many times as high."""
        slower = {name: getattr(self, name) / clock for name in ("start", "tile", "token", "element")}
        return replace(self, memory=self.memory * memory, **slower)


def lt_time(start: Any, memory: Any, end: Any, slowing: Any, waves: Any, n: Any, k: Any) -> Any:
    """Return the microseconds of a GEMM whose ``waves`` take so long for 128 k by each tile; numbers may be arrays."""
    fastest = waves[0]
    for each in waves[1:]:
        fastest = (fastest + each - abs(fastest - each)) / 2  # the smaller one, of arrays too
    us = start + ((fastest * (k / STAGE_K + end)) ** NORM + (n * k / memory) ** NORM) ** (1 / NORM)
    return us * ((us / LONG_US + 1 + abs(us / LONG_US - 1)) / 2) ** slowing


@dataclass(frozen=True)
class UnfoldSpeed:
    """The kernel that writes NVFP4 weights out as FP8: microseconds of its start, bytes per microsecond."""

    start: float
    memory: float

    def microseconds(self, n: Any, k: Any) -> Any:
        """Return the predicted time for an [n, k] weight."""
        return self.start + n * k * UNFOLD_BYTES / self.memory

    def scaled(self, clock: float, memory: float) -> UnfoldSpeed:
        """Return the constants of a GPU whose clock and memory bandwidth are so many times as high."""
        return UnfoldSpeed(self.start / clock, self.memory * memory)
