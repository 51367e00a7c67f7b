"""The interface of a benchmark method, and the selection of methods."""

from __future__ import annotations

import abc
import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fp4dispatch.benchmark.methods.background import Job
from fp4dispatch.benchmark.problems.operands import Entering, Format, Operands
from fp4dispatch.errors import InputError
from fp4dispatch.problem.arch import Arch
from fp4dispatch.settings import did_you_mean

BASELINE = "torch/bf16"

ROUNDING = 6e-3
"""Largest error of a tile if the multiplied values are known exactly. Rounding the output to bfloat16 gives 1.7e-3."""
TOLERANCE: dict[tuple[Format, Entering], float] = {
    # A block scale that rounds the other way at a tie moves sixteen 4-bit codes.
    ("nvfp4", "nvfp4"): 2e-2,
}


@dataclass(frozen=True)
class Card:
    """The device and its properties. On a CPU ``arch`` is None and sizes are 0."""

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
        Format in which the activation is multiplied.
    backend
        The backend that runs it, for the report.
    out
        The output tensor if all calls share one, so that it can be poisoned; else None.
    ran
        Of a layer on kernels of ours: the backend, kernel and build, and the numbers of the launch shape, as in
        ``w4a16 w4a16_small/bf16 8,1,4,2,2,2,2``. Else empty.
    """

    call: Callable[[int], Tensor]
    entering: Entering
    backend: str = ""
    out: Tensor | None = None
    ran: str = ""


Prepared = Callable[[Tensor], Launch]
"""A method with its rotating weights: takes an activation, bfloat16 [M, K]."""

Problems = Sequence[tuple[int, int, Sequence[int]]]
"""N, K and the numbers of tokens of layers, in the order in which they are measured."""


class Method(abc.ABC):
    """One way to compute ``x @ W^T``.

    ``takes``: format of ``x`` when the clock starts, bfloat16 or e4m3 with scales. With e4m3 the time excludes
    quantisation. ``slow_start``: the first use compiles for minutes. ``copied``: format of the copy of the weight that
    is multiplied, if it differs from ``format``; the roofline counts its bytes. ``most_m``: larger M are left out.
    """

    name: str
    format: Format
    takes: Literal["bf16", "fp8"] = "bf16"
    ours: bool = False
    slow_start: bool = False
    copied: Format | None = None
    most_m: float = math.inf
    what: str = ""

    @property
    def held(self) -> Format:
        """Return the format of the weights that a call reads."""
        return self.copied or self.format

    @abc.abstractmethod
    def lacks(self, card: Card) -> str:
        """Return what the GPU or the installation lacks for this method; empty if it can run. Cheap."""

    @abc.abstractmethod
    def prepare(self, operands: Operands, copies: int, card: Card) -> Prepared:
        """Convert the weight to the method's layout, ``copies`` times."""

    def ahead(self, problems: Problems, card: Card) -> Job | None:
        """Return what another process can do for problems before their turn comes; None for nothing."""
        return None


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
    """Return the peers that a method of ours is compared with.

    They have the same weight format and take the same activation. If that is bfloat16, cuBLAS in bfloat16 is one too.
    """
    return tuple(
        peer.name
        for peer in available
        if not peer.ours and peer.takes == method.takes and peer.format in (method.format, "bf16")
    )


def tolerance(fmt: Format, entering: Entering, k: int) -> float:
    """Return the largest error of a tile that counts as right, for sums over K products.

    FP8 tensor cores of Hopper keep about 14 bits of a running sum. NVFP4 kernels do not promote it to f32 at every
    step, so the error grows with K: see ``UNPROMOTED_GROWTH`` in ``tests/contract.py``.
    """
    if fmt == "nvfp4" and entering == "row":
        return ROUNDING + 2.0**-13 * float(max(k / 128, 1.0) ** 0.75)
    return TOLERANCE.get((fmt, entering), ROUNDING)
