"""Parses the output of ``nvdisasm -c``: instructions and labels of every kernel of a cubin.

A line that looks like an instruction but cannot be parsed is an error. It is never skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
_OTHER_SECTION = re.compile(r"^\s*\.section\s")
_LABEL = re.compile(r"^([.$A-Za-z_][^\s:]*):\s*$")
_LOOKS_LIKE_CODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/")  # most lines of a listing
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);")
_STEP = 16  # bytes of an instruction from sm_70 on


class Instruction(NamedTuple):
    """One instruction. ``guard`` is its predicate, empty if it is unconditional."""

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def base(self) -> str:
        """The opcode before its first dot."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """The parts of the opcode after its dots."""
        return tuple(self.opcode.split(".")[1:])

    def __str__(self) -> str:
        return f"0x{self.address:x} {self.opcode} {self.operands}".strip()


@dataclass
class Kernel:
    """The code of one ``.text`` section: a kernel and its functions that were not inlined.

    ``instructions`` are in order of address; ``labels`` give the index of the instruction after each label.
    """

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def at(self, address: int) -> int | None:
        """Return the index of the instruction at an address, or None."""
        index, rest = divmod(address - self.instructions[0].address, _STEP)
        return index if rest == 0 and 0 <= index < len(self.instructions) else None


def parse(sass: str) -> list[Kernel]:
    """Return the kernels of a listing that hold code, in its order.

    Raises
    ------
    ValueError
        If a line of code cannot be parsed, or addresses have gaps. A listing without code yields no kernels; the caller
        compares the result with the kernels that the library names.
    """
    kernels: list[Kernel] = []
    current: Kernel | None = None
    for line in sass.splitlines():
        if _LOOKS_LIKE_CODE.match(line):
            if current is not None:
                current.instructions.append(_instruction(current, line))
        elif section := _SECTION.match(line):
            current = Kernel(section[1])
            kernels.append(current)
        elif _OTHER_SECTION.match(line):
            current = None
        elif current is not None and (label := _LABEL.match(line)):
            current.labels[label[1]] = len(current.instructions)
    return [kernel for kernel in kernels if kernel.instructions]


def _instruction(kernel: Kernel, line: str) -> Instruction:
    found = _INSTRUCTION.match(line)
    if found is None:
        raise ValueError(f"{kernel.name}: this line of code cannot be read: {line.strip()}")
    address, guard, opcode, operands = found.groups()
    instruction = Instruction(int(address, 16), guard or "", opcode, operands.strip())
    if kernel.instructions and instruction.address != kernel.instructions[-1].address + _STEP:
        raise ValueError(f"{kernel.name}: the code before 0x{instruction.address:x} is missing from the listing")
    return instruction
