"""Judge one output of a GEMM tile by tile: never written, NaN, zero or wrong.

A similarity over the whole output is no check: with dozens of all-zero tiles, the cosine of a large output stays above
0.99. Here every element has its own error bound. In addition, the gain of every row and column of a 128x128 tile is
checked: a scale of another row shows there, where rounding would hide it in single elements.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128
ROWS_AT_A_TIME = 8 * TILE
"""Rows that are compared at a time. Bounds the memory for a large output."""
GUARD = 1 << 14
"""Elements before and after an output that nothing may write: twice a tile of 64 x 128."""

_POISON = {torch.bfloat16: (torch.int16, 0x7FAB), torch.float16: (torch.int16, 0x7DAB)}
_POISON_F32 = (torch.int32, 0x7FABABAB)
"""A signalling NaN with a payload. Arithmetic gives quiet NaNs only, so an element that still has it is unwritten."""

GAIN_TOLERANCE = 0.03
"""Truncated accumulation shrinks a whole row by about K/32 * 2^-14, at most 0.3 % here; a scale rounded to bfloat16
changes it by 0.4 %. Scales of two rows differ by 6 % or more."""
_SIGMAS = 8.0
_LEAST_ELEMENTS = 12.0


class Poisoned:
    """An output [M, N] between two guards, all of it poisoned.

    ``whole``: ``out`` and the rows beyond M, of ``rows`` in all, which may be written too; None: there are none.
    """

    def __init__(self, m: int, n: int, dtype: torch.dtype, device: torch.device, rows: int | None = None) -> None:
        self.bits, self.value = _POISON.get(dtype, _POISON_F32)
        rows = m if rows is None else rows
        self.memory = torch.full((rows * n + 2 * GUARD,), self.value, dtype=self.bits, device=device)
        self.whole = self.memory.view(dtype)[GUARD : GUARD + rows * n].view(rows, n)
        self.out = self.whole[:m]

    def poison(self) -> None:
        """Poison everything again."""
        self.memory.fill_(self.value)

    def guards(self) -> tuple[Tensor, Tensor]:
        """Return the memory before and after the output."""
        return self.memory[:GUARD], self.memory[GUARD + self.whole.numel() :]

    def snapshot(self) -> Tensor:
        """Return a copy of all memory on the same device; no sync."""
        return self.memory.clone()


@dataclass(frozen=True)
class Finding:
    """One fault of one output.

    ``kind`` is ``never written``, ``NaN``, ``zero``, ``wrong values``, ``row gain``, ``column gain``, ``outside``,
    ``stale``, ``not repeatable`` or ``raised``. ``tile`` counts tiles of 128x128 in M and N; ``agree`` of ``tiles``
    tiles hold. ``element``, ``got``, ``want`` and ``allowed``: the element that is farthest off, and its bound.
    """

    canary: str
    kind: str
    detail: str
    tile: tuple[int, int] | None = None
    agree: int = 0
    tiles: int = 0
    element: tuple[int, int] | None = None
    got: str = ""
    want: str = ""
    allowed: str = ""

    def __str__(self) -> str:
        where = f"tile {self.tile} " if self.tile is not None else ""
        count = f"; {self.agree} of {self.tiles} tiles agree" if self.tiles else ""
        return f"{self.canary}: {where}{self.detail}{count}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Finding:
        """Read :meth:`to_dict` back, also after JSON."""
        pairs = {name: tuple(data[name]) if data[name] is not None else None for name in ("tile", "element")}
        return cls(**(data | pairs))


def judge(
    canary: str,
    snapshot: Tensor,
    dtype: torch.dtype,
    product: Tensor,
    size: Tensor,
    allowed: Tensor,
    bias: Tensor | None,
) -> Finding | None:
    """Compare one output with its answer.

    Parameters
    ----------
    canary
        Name for messages.
    snapshot
        Memory of a :class:`Poisoned`, on the CPU.
    dtype
        Of the output.
    product, size, allowed, bias
        As in :class:`fp4dispatch.trust.canary.Input` and :class:`fp4dispatch.trust.canary.Canary`.

    Returns
    -------
    Finding or None
        The worst finding, in its first tile.
    """
    m, n = product.shape
    bits, poison = _POISON.get(dtype, _POISON_F32)
    assert snapshot.dtype == bits
    outside = torch.cat([snapshot[:GUARD], snapshot[GUARD + m * n :]])
    stray = int((outside != poison).sum())
    if stray:
        return Finding(canary, "outside", f"{stray} elements outside the output were written")
    body = snapshot[GUARD : GUARD + m * n].view(m, n)
    got = body.view(dtype).double()
    want = product if bias is None else product + bias.double()
    never = body == poison
    finite = got.isfinite()
    error = (got - want).abs()
    wrong = finite & ~(error <= allowed)
    masks = {
        "never written": never,
        "NaN": ~finite & ~never,
        "zero": wrong & (got == 0),
        "wrong values": wrong,
        "row gain": torch.zeros_like(wrong),
        "column gain": torch.zeros_like(wrong),
    }
    rows, columns, gains = _gains(got if bias is None else got - bias.double(), product, size, allowed, finite)
    masks["row gain"], masks["column gain"] = rows, columns
    return _gravest(canary, masks, got, want, error, allowed, gains)


def _gravest(
    canary: str,
    masks: dict[str, Tensor],
    got: Tensor,
    want: Tensor,
    error: Tensor,
    allowed: Tensor,
    gains: tuple[Tensor, Tensor],
) -> Finding | None:
    if not any(bool(mask.any()) for mask in masks.values()):
        return None
    bad = torch.stack([_per_tile(mask) for mask in masks.values()]).sum(0) > 0
    tiles, agree = bad.numel(), int((~bad).sum())
    for kind, mask in masks.items():
        counts = _per_tile(mask)
        if kind == "zero" and counts.sum() < 0.5 * _per_tile(masks["wrong values"]).sum():
            continue  # a few of many wrong values happen to be zero
        if counts.sum() == 0:
            continue
        flat = int(counts.flatten().argmax() if kind == "wrong values" else (counts.flatten() > 0).int().argmax())
        i, j = divmod(flat, counts.shape[1])
        excess = torch.where(mask, (error / allowed).nan_to_num(nan=torch.inf), -1.0)
        tile = excess[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
        r, c = divmod(int(tile.flatten().argmax()), tile.shape[1])
        r, c = i * TILE + r, j * TILE + c
        values = got[r, c].item(), want[r, c].item(), allowed[r, c].item()
        gain = gains[0][r, c // TILE].item() if kind == "row gain" else gains[1][r // TILE, c].item()
        detail = _detail(kind, int(counts[i, j]), tile.numel(), (r, c), values, gain)
        return Finding(canary, kind, detail, (i, j), agree, tiles, (r, c), *(f"{v:.6g}" for v in values))
    raise AssertionError("a bad tile has a kind")


def _detail(
    kind: str, count: int, total: int, where: tuple[int, int], values: tuple[float, float, float], gain: float
) -> str:
    got, want, allowed = values
    if kind == "never written":
        return "was never written" if count == total else f"was not written in {count} of {total} elements"
    if kind == "NaN":
        return f"is NaN or infinite in {count} of {total} elements"
    if kind == "zero":
        return "is all zero" if count == total else f"is zero in {count} of {total} elements that are not"
    at = f"element {where} is {got:.6g}, needs {want:.6g} within {allowed:.2g}"
    if kind == "wrong values":
        return f"is wrong in {count} of {total} elements ({at})"
    line = f"row {where[0]}" if kind == "row gain" else f"column {where[1]}"
    return f"has {line} scaled by {gain:.3f}"


def _gains(
    got: Tensor, product: Tensor, size: Tensor, allowed: Tensor, finite: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Fit got = gain x product along each row and column of each tile; return masks of wrong gains, and the gains.

    Elements are scaled to one magnitude first, so that a few large ones do not decide. Elements that rounding may
    erase (a small product plus a large bias) are left out: their errors are not independent. A gain is wrong
    if it is off by more than the tolerance plus eight standard errors of the fit, over at least twelve elements.
    """
    usable = finite & (allowed <= 0.5 * size)
    p = torch.where(usable, product / size, 0.0)
    g = torch.where(usable, got / size, 0.0)
    masks, gains = [], []
    for along in (1, 0):
        gg, gp, pp, quartic = (_sum_tiles(t, along) for t in (g * g, g * p, p * p, p**4))
        gain = gp / pp.clamp(min=1e-300)
        count = pp.square() / quartic.clamp(min=1e-300)
        residual = (gg - gain * gp).clamp(min=0)
        sigma = (residual / (count - 1).clamp(min=1) / pp.clamp(min=1e-300)).sqrt()
        off = (gain - 1).abs() > GAIN_TOLERANCE + _SIGMAS * sigma
        off &= count >= _LEAST_ELEMENTS
        shown = off.repeat_interleave(TILE, along)
        masks.append(shown[: got.shape[0], : got.shape[1]])
        gains.append(gain)
    return masks[0], masks[1], (gains[0], gains[1])


def _sum_tiles(x: Tensor, along: int) -> Tensor:
    """Sum pieces of 128 along one dimension of a matrix."""
    pad = -x.shape[along] % TILE
    x = F.pad(x, (0, pad) if along == 1 else (0, 0, 0, pad))
    shape = (x.shape[0], -1, TILE) if along == 1 else (-1, TILE, x.shape[1])
    return x.reshape(shape).sum(along + 1)


def _per_tile(mask: Tensor) -> Tensor:
    """Count the true elements of each 128x128 tile."""
    return _sum_tiles(_sum_tiles(mask.double(), 1), 0)


def first_difference(canary: str, a: Tensor, b: Tensor, m: int, n: int) -> Finding | None:
    """Return a finding where two snapshots of the same call differ in any bit."""
    x, y = (t[GUARD : GUARD + m * n].view(m, n) for t in (a, b))
    counts = _per_tile(x != y)
    if counts.sum() == 0:
        return None
    i, j = divmod(int((counts.flatten() > 0).int().argmax()), counts.shape[1])
    return Finding(
        canary,
        "not repeatable",
        f"differs between two runs of the same input in {int(counts[i, j])} elements",
        (i, j),
        int((counts == 0).sum()),
        counts.numel(),
    )


@dataclass(frozen=True)
class Worst:
    """The tile with the largest relative error (Frobenius norm; NaN counts as infinite), and its place."""

    error: float
    tile: tuple[int, int]


def worst_tile(got: Tensor, want: Tensor) -> Worst:
    """Compare an output [M, N] with the exact f32 [M, N]. Synchronises.

    In a tile that should be all zero, any other value is an infinite error.
    """
    if got.shape != want.shape or got.numel() == 0:
        raise ValueError(f"need two equal, non-empty shapes, found {list(got.shape)} and {list(want.shape)}")
    worst = Worst(-1.0, (0, 0))
    for start in range(0, got.shape[0], ROWS_AT_A_TIME):
        some = slice(start, start + ROWS_AT_A_TIME)
        true = want[some].float()
        off, size = (_norms(x) for x in (got[some].float() - true, true))
        error = torch.where(size > 0, off / size, torch.where(off == 0, 0.0, math.inf))
        error = error.nan_to_num(nan=math.inf, posinf=math.inf)
        place = int(error.flatten().argmax())
        value = float(error.flatten()[place])
        if value > worst.error:
            i, j = divmod(place, error.shape[1])
            worst = Worst(value, (start // TILE + i, j))
    return worst


def _norms(x: Tensor) -> Tensor:
    """Return the norm of each tile, f32 [ceil(M / 128), ceil(N / 128)]."""
    pad = (0, -x.shape[1] % TILE, 0, -x.shape[0] % TILE)
    padded = torch.nn.functional.pad(x, pad)
    tiles = padded.view(padded.shape[0] // TILE, TILE, padded.shape[1] // TILE, TILE)
    return tiles.square().sum(dim=(1, 3)).sqrt()
