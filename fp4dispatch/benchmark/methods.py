"""What is compared: the interface of a method, and which of many are asked for."""

from __future__ import annotations

import abc
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fp4dispatch.benchmark.operands import Entering, Format, Operands
from fp4dispatch.errors import InputError
from fp4dispatch.problem.arch import Arch
from fp4dispatch.settings import did_you_mean

BASELINE = "torch/bf16"

ROUNDING = 6e-3
"""Largest error of a tile where what is multiplied is known exactly: bfloat16 output alone makes 1.7e-3."""
TOLERANCE: dict[tuple[Format, Entering], float] = {
    # A block scale that rounds the other way at a tie moves sixteen 4-bit codes.
    ("nvfp4", "nvfp4"): 2e-2,
}


@dataclass(frozen=True)
class Card:
    """Where it runs: the device and what is known of it. ``arch`` is None, the sizes 0 on a CPU."""

    device: torch.device
    name: str
    arch: Arch | None
    cache_bytes: float
    memory_bytes: float
    sms: int = 0


@dataclass(frozen=True)
class Launch:
    """A method on one activation, ready to run.

    Parameters
    ----------
    call
        Runs it on copy ``i`` of its weights and returns the output, bfloat16 [M, N].
    entering
        How the activation enters the multiplication.
    backend
        What ran it, for the report.
    out
        The output where it is always the same tensor, so that it can be poisoned; None where each call makes its own.
    """

    call: Callable[[int], Tensor]
    entering: Entering
    backend: str = ""
    out: Tensor | None = None


Prepared = Callable[[Tensor], Launch]
"""A method with its rotating weights: takes an activation, bfloat16 [M, K]."""


class Method(abc.ABC):
    """One way to compute ``x @ W^T``.

    ``takes`` says what ``x`` is when the clock starts: bfloat16, or e4m3 with its scales (then whoever calls has to
    quantise, and that is not in the time). ``slow_start``: compiles something for minutes on first use. ``copied``: the
    format of the copy that it multiplies, where that is not ``format`` itself: of as many bytes is its roofline.
    """

    name: str
    format: Format
    takes: Literal["bf16", "fp8"] = "bf16"
    ours: bool = False
    slow_start: bool = False
    copied: Format | None = None
    what: str = ""

    @property
    def held(self) -> Format:
        """Return the format of the weights that a call reads."""
        return self.copied or self.format

    @abc.abstractmethod
    def lacks(self, card: Card) -> str:
        """Return what this method needs and the card or the installation lacks; empty where it can run. Cheap."""

    @abc.abstractmethod
    def prepare(self, operands: Operands, copies: int, card: Card) -> Prepared:
        """Bring the weight into the method's layout, ``copies`` times."""


def choose(available: Sequence[Method], patterns: Iterable[str]) -> tuple[Method, ...]:
    """Return the methods that match a glob pattern, and the baseline first.

    Raises
    ------
    InputError
        For a pattern that matches nothing.
    """
    names = [method.name for method in available]
    wanted: set[str] = set()
    for pattern in patterns:
        matched = fnmatch.filter(names, pattern)
        if not matched:
            known = ", ".join(names)
            raise InputError(f"{pattern!r} matches no method.{did_you_mean(pattern, names)} Known: {known}")
        wanted.update(matched)
    return tuple(method for method in available if method.name in wanted or method.name == BASELINE)


def rivals(method: Method, available: Iterable[Method]) -> tuple[str, ...]:
    """Return the peers that a method of ours is held against.

    Those of its format that take the same activation; and, where that is bfloat16, cuBLAS in bfloat16, which is what a
    user would run otherwise.
    """
    return tuple(
        peer.name
        for peer in available
        if not peer.ours and peer.takes == method.takes and peer.format in (method.format, "bf16")
    )


def tolerance(fmt: Format, entering: Entering, k: int) -> float:
    """Return the largest error of a tile that counts as right, for sums over K products.

    FP8 tensor cores of Hopper keep about 14 bits of a running sum. Where nobody promotes it to f32 on the way, as under
    NVFP4 weights, what is cut off adds up: see ``UNPROMOTED_GROWTH`` in ``tests/contract.py``.
    """
    if fmt == "nvfp4" and entering == "row":
        return ROUNDING + 2.0**-13 * float(max(k / 128, 1.0) ** 0.75)
    return TOLERANCE.get((fmt, entering), ROUNDING)
