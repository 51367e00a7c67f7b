"""Speed targets of the project on an H200, as speed-ups over cuBLAS in bfloat16, and a table of targets and results.

Each number is a geometric mean over the six shapes of the suite ``targets``, including quantisation of activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Means = Mapping[str, Mapping[int, tuple[float, int]]]
"""By method and M: the geometric mean, and over how many shapes (``speedups`` of ``report.py``)."""


class Target(NamedTuple):
    """``method`` must be ``least`` times as fast as bfloat16 for ``first`` to ``last`` tokens; ``peer`` is shown."""

    what: str
    method: str
    peer: str
    first: int
    last: int
    least: float


_FP4, _HUMMING = "NVFP4 weights", "humming/nvfp4"
_FEW = tuple(Target(_FP4, "FP4Linear", _HUMMING, *each) for each in ((1, 16, 2.7), (32, 32, 2.4), (64, 64, 2.1)))
_MORE = tuple(Target(_FP4, "FP4Linear", _HUMMING, *each) for each in ((128, 128, 1.6), (256, 4096, 1.55)))
TARGETS = (
    *_FEW,
    *_MORE,
    Target("NVFP4 weights, an FP8 copy allowed", "FP4Linear/w4a8_expanded", _HUMMING, 256, 4096, 1.55),
    Target("NVFP4 weights, bfloat16 pinned", "FP4Linear/bf16", _HUMMING, 256, 4096, 0.95),
    Target("FP8 by row", "FP8Linear/row", "torch/row+q", 1, 64, 1.7),
    Target("FP8 by row", "FP8Linear/row", "torch/row+q", 1024, 4096, 1.85),
)
HEAD = ["target for", "M", "at least", "found", "", "peer", "its"]


def table(means: Means, shapes: int) -> list[list[str]]:
    """Return the rows of a table: a head, then one row per target and measured M.

    ``shapes``: number of shapes of a complete mean. A mean over fewer says so and gets no verdict.
    """
    lines = [HEAD]
    for target in TARGETS:
        for m in sorted(means.get(target.method, {})):
            if target.first <= m <= target.last:
                mean, count = means[target.method][m]
                peer = mean_text(means.get(target.peer, {}).get(m), shapes, "-")
                ours = mean_text((mean, count), shapes)
                verdict = "" if count < shapes else _verdict(mean, target.least)
                lines.append([target.what, str(m), f"{target.least:.2f}", ours, verdict, target.peer, peer])
    return lines


def mean_text(found: tuple[float, int] | None, shapes: int, none: str = "") -> str:
    """Return a mean as text, with its number of shapes if that is below ``shapes``; ``none`` without a mean."""
    if found is None:
        return none
    mean, count = found
    return f"{mean:.2f}" + ("" if count >= shapes else f" ({count})")


def _verdict(mean: float, least: float) -> str:
    return "met" if mean >= least else f"{1 - mean / least:.1%} short"
