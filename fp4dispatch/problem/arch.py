"""GPU architectures as values without an order.

SM120 is not "more than" SM100: kernels for one do not run on the other, and a range check such as ``cc >= 10.0`` is how
SM120 cards end up in SM100 kernels. So an :class:`Arch` can be compared for equality and put in sets, and nothing else.

Three spellings exist and are never mixed: the arch ``sm_120`` (hardware), the compile target ``120f`` (compiler; see
``jit_flags/``) and the capability ``12.0`` (what users type and read).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from fp4dispatch.errors import InputError

_CAPABILITY = re.compile(r"(\d{1,2})\.(\d)")
_SM = re.compile(r"(?:sm_?)(\d{1,2})(\d)")


@dataclass(frozen=True)
class Arch:
    """One GPU architecture, e.g. ``Arch(12, 0)``; hashable, equal by value, never ordered."""

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> Arch:
        """Read ``12.0`` or ``sm_120``.

        Raises
        ------
        InputError
            For anything else; a compile target such as ``120f`` names a compiler flag, not a GPU, and is refused too.
        """
        if not isinstance(text, str):
            raise InputError(
                f"arch={text!r} is a {type(text).__name__}; need a text such as '12.0' (as a number, 12.1 and 12.10 "
                "would be one)"
            )
        match = _CAPABILITY.fullmatch(text.strip()) or _SM.fullmatch(text.strip().lower())
        if match is None:
            raise InputError(
                f"{text!r} is not a GPU architecture; write a capability such as 12.0, or an arch such as sm_120"
            )
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def real(cls, text: str) -> Arch:
        """Read the architecture of a GPU that exists, for a question about a machine that is not here.

        Raises
        ------
        InputError
            As :meth:`parse`, and for an architecture that NVIDIA has not made (:data:`REAL_ARCHS`). One that is newer
            than this release is refused too: nothing is known about it.
        """
        arch = text if isinstance(text, Arch) else cls.parse(text)
        if arch not in REAL_ARCHS:
            known = ", ".join(a.capability for a in REAL_ARCHS)
            raise InputError(
                f"{arch.capability} is not the capability of a GPU that this release knows. Known: {known}. For a GPU "
                "that is newer than this list, update fp4dispatch"
            )
        return arch

    @property
    def sm(self) -> str:
        """The hardware spelling, ``sm_120``."""
        return f"sm_{self.major}{self.minor}"

    @property
    def capability(self) -> str:
        """The user's spelling, ``12.0``."""
        return f"{self.major}.{self.minor}"

    def __str__(self) -> str:
        return self.sm

    def _no_order(self, other: object) -> NoReturn:
        raise TypeError(
            f"architectures have no order ({self} against {other}): "
            "test membership instead, e.g. arch in {SM100, SM103}"
        )

    __lt__ = __le__ = __gt__ = __ge__ = _no_order


SM75 = Arch(7, 5)
SM80 = Arch(8, 0)
SM86 = Arch(8, 6)
SM89 = Arch(8, 9)
SM90 = Arch(9, 0)
SM100 = Arch(10, 0)
SM103 = Arch(10, 3)
SM110 = Arch(11, 0)
SM120 = Arch(12, 0)
SM121 = Arch(12, 1)

KNOWN_ARCHS: tuple[Arch, ...] = (SM75, SM80, SM86, SM89, SM90, SM100, SM103, SM110, SM120, SM121)
"""What the rules and capabilities may name."""

REAL_ARCHS: tuple[Arch, ...] = tuple(
    Arch(*map(int, capability.split(".")))
    for capability in (
        *("5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.8", "8.9", "9.0"),
        *("10.0", "10.1", "10.3", "11.0", "12.0", "12.1"),
    )
)
"""Every GPU that CUDA 12 or 13 compiles for, read on 2026-11-23 in the lists of targets of
https://docs.nvidia.com/cuda/archive/12.9.0/cuda-compiler-driver-nvcc and
https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc (10.1 is what CUDA 12 calls 11.0)."""
