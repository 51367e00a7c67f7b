"""Loads that a kernel may do before it waits for the previous grid: ``before_wait`` in ``csrc/kernels.toml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp4dispatch import strict_toml
from fp4dispatch.errors import FlagsError

MAP_BYTES, POINTER_BYTES = 128, 8
ACCESSES = {"UBLKCP": POINTER_BYTES, "UTMALDG": MAP_BYTES}
"""Opcodes that may be declared, with the size of their address operand in bytes: bulk copies read from a pointer, TMA
loads by a tensor map."""
Bytes = tuple[int, int]


@dataclass(frozen=True)
class EarlyLoads:
    """Loads of weights from global to shared memory. No kernel writes weights.

    ``access`` is the opcode. ``weights`` is the byte range ``[first, end)`` of the pointer or tensor map in the
    kernel's first argument. ``numbers`` is the range of the sizes and strides there that may be added to the pointer.
    """

    access: str
    weights: Bytes
    numbers: Bytes | None = None

    @classmethod
    def parse(cls, where: str, row: object) -> EarlyLoads:
        """Return a checked declaration; FlagsError that names ``where`` for anything else."""
        strict_toml.check(where, row, {"access": str, "weights": list}, {"numbers": list})
        assert isinstance(row, dict)
        access = row["access"]
        if access not in ACCESSES:
            raise FlagsError(f"{where}: access is {access!r}, needed one of {', '.join(ACCESSES)}")
        weights = _bytes(f"{where} weights", row["weights"])
        if weights[1] - weights[0] != ACCESSES[access]:
            raise FlagsError(f"{where}: weights are {weights[1] - weights[0]} bytes, {access} needs {ACCESSES[access]}")
        numbers = _bytes(f"{where} numbers", row["numbers"]) if "numbers" in row else None
        if numbers and (access != "UBLKCP" or (weights[0] < numbers[1] and numbers[0] < weights[1])):
            raise FlagsError(f"{where}: numbers are for UBLKCP alone, and lie beside the weights")
        return cls(access, weights, numbers)

    @classmethod
    def of_request(cls, request: Mapping[str, Any]) -> EarlyLoads | None:
        """Return what a build request declares; None where it declares nothing."""
        return cls.parse("before_wait", request["before_wait"]) if "before_wait" in request else None

    def to_plain(self) -> dict[str, Any]:
        """Return plain data for a build request."""
        numbers = {"numbers": list(self.numbers)} if self.numbers else {}
        return {"access": self.access, "weights": list(self.weights), **numbers}

    def defines(self) -> tuple[str, ...]:
        """Return the macros by which the source checks the declaration (``csrc/weights/early_loads.h``)."""
        ranges = {"WEIGHTS": self.weights, **({"NUMBERS": self.numbers} if self.numbers else {})}
        return tuple(
            f"FP4D_{name}_{end}={byte}"
            for name, found in ranges.items()
            for end, byte in zip(("FIRST", "LAST"), found, strict=True)
        )


def _bytes(where: str, value: object) -> Bytes:
    if not isinstance(value, list) or len(value) != 2 or any(type(number) is not int for number in value):
        raise FlagsError(f"{where}: need the first byte and the one after the last, found {value!r}")
    first, last = value
    if first < 0 or last <= first or first % 4 or last % 4:
        raise FlagsError(f"{where}: [{first}, {last}] is no range of whole 32-bit words")
    return first, last
