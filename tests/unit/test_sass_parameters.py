"""Sections of a cubin, on ELF files made by hand."""

from __future__ import annotations

import struct

import pytest

from fp4dispatch.jit.sass import parameters


def elf(**sections: bytes) -> bytes:
    """A 64-bit ELF file with these sections; ``__`` in a name stands for a dot."""
    names, bodies = b"\0", b""
    rows = [struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)]
    for name, body in sections.items():
        rows.append(struct.pack("<IIQQQQIIQQ", len(names), 1, 0, 0, 64 + len(bodies), len(body), 0, 0, 1, 0))
        names += name.replace("__", ".").encode() + b"\0"
        bodies += body
    strings = 64 + len(bodies)
    rows.append(struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, strings, len(names), 0, 0, 1, 0))
    head = b"\x7fELF\x02\x01\x01".ljust(0x28, b"\0") + struct.pack("<Q", strings + len(names))
    head = head.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(rows), len(rows) - 1)
    return head + bodies + names + b"".join(rows)


@pytest.mark.parametrize(
    ("cubin", "expected"),
    [
        (elf(__text__kernel=b"\1" * 16), True),
        (elf(__nv__info=b"", __text__kernel=b""), False),
        (elf(__symtab=b"\1" * 24), False),
    ],
)
def test_a_cubin_without_machine_code_is_told_from_one_with(cubin: bytes, expected: bool) -> None:
    assert parameters.holds_code(cubin) == expected


@pytest.mark.parametrize("cubin", [b"", b"no ELF file at all", elf(__text__kernel=b"\1" * 16)[:-40]])
def test_what_cannot_be_read_is_an_error_not_an_empty_cubin(cubin: bytes) -> None:
    with pytest.raises(ValueError, match="ELF"):
        parameters.holds_code(cubin)


def test_arguments_are_found_beside_other_sections() -> None:
    bank = struct.pack("<BBHIHH", 4, 0x0A, 8, 0, 0x210, 16)
    argument = struct.pack("<BBHIHHI", 4, 0x17, 12, 0, 0, 0, 8 << 18)
    found = parameters.parse(elf(__text__kernel=b"\1" * 16, __nv__info__kernel=bank + argument))
    assert found == {"kernel": parameters.Parameters(0x210, 16, {0: (0, 8)})}
