"""Where a kernel's arguments lie in constant bank 0, read from the ``.nv.info`` sections of a cubin (an ELF file).

The records are those that ``cuobjdump -elf`` prints as EIATTR_PARAM_CBANK and EIATTR_KPARAM_INFO. Without them no
address can be traced, and every load that needs tracing is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_PARAM_CBANK, _KPARAM_INFO = 0x0A, 0x17
_SIZED = 4  # format of a record with a length; the others hold their value in two bytes
_INFO, _TEXT = ".nv.info.", ".text."


@dataclass(frozen=True)
class Parameters:
    """``base``: start of the arguments in constant bank 0; ``size``: of all; ``at``: offset and size of each. Bytes."""

    base: int
    size: int
    at: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def parse(cubin: bytes) -> dict[str, Parameters]:
    """Return the arguments of every kernel by name.

    Raises
    ------
    ValueError
        Where the file is no ELF file or a record is cut short.
    """
    try:
        found = ((name, data) for name, data in _sections(cubin) if name.startswith(_INFO))
        return {name[len(_INFO) :]: _parameters(data) for name, data in found}
    except struct.error as error:
        raise ValueError(f"the cubin's ELF sections cannot be read: {error}") from error


def holds_code(cubin: bytes) -> bool:
    """Return whether a cubin has machine code; nvcc's link step adds one without to some libraries.

    Raises
    ------
    ValueError
        As :func:`parse`.
    """
    try:
        return any(name.startswith(_TEXT) and data for name, data in _sections(cubin))
    except struct.error as error:
        raise ValueError(f"the cubin's ELF sections cannot be read: {error}") from error


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("the cubin is no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)

    def section(index: int) -> tuple[int, int, int]:
        name, _, _, _, offset, size = struct.unpack_from("<IIQQQQ", cubin, table + index * entry)
        return name, offset, size

    _, names, _ = section(names_index)
    for index in range(count):
        name_at, offset, size = section(index)
        name = cubin[names + name_at : cubin.index(b"\0", names + name_at)]
        yield name.decode(), cubin[offset : offset + size]


def _parameters(data: bytes) -> Parameters:
    base = size = 0
    at: dict[int, tuple[int, int]] = {}
    for attribute, value in _records(data):
        if attribute == _PARAM_CBANK:
            _, base, size = struct.unpack("<IHH", value)
        elif attribute == _KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack("<IHHI", value)
            at[ordinal] = (offset, packed >> 18)
    return Parameters(base, size, at)


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        shape, attribute, number = struct.unpack_from("<BBH", data, position)
        position += 4
        length = number if shape == _SIZED else 0
        if position + length > len(data):
            raise ValueError("a record of .nv.info is cut short")
        yield attribute, data[position : position + length]
        position += length
