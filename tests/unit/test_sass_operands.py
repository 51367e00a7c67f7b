"""Which registers a conversion writes: a stale neighbour must not be believed, nor an untouched one forgotten."""

from __future__ import annotations

import pytest

from fp4dispatch.jit.sass.operands import decode


@pytest.mark.parametrize(
    ("opcode", "operands", "written", "perhaps"),
    [
        ("I2F.U64.RP", "R4, UR14", ("R4",), ""),  # 64-bit integer to f32, as a division by 64 bits begins
        ("I2F.S64", "R4, R6", ("R4",), ""),
        ("I2F.F64.S64", "R4, R6", ("R4", "R5"), ""),
        ("I2F.F64", "R4, R6", ("R4", "R5"), ""),
        ("F2I.U64.TRUNC", "R2, R2", ("R2", "R3"), ""),
        ("F2I.F64.TRUNC", "R2, R4", ("R2",), ""),
        ("F2F.F32.F64", "R2, R4", ("R2",), "R3"),
        ("F2F.F64.F32", "R2, R4", ("R2",), "R3"),
    ],
)
def test_conversions_write_as_many_registers_as_their_result_has(
    opcode: str, operands: str, written: tuple[str, ...], perhaps: str
) -> None:
    found = decode(opcode, operands)
    assert found is not None
    assert (found.written, found.perhaps) == (written, perhaps)
