"""Reads the text of ``nvdisasm -c``: the instructions and labels of every kernel of a cubin.

A line that looks like an instruction and cannot be read is an error, never skipped: what is not seen is not proven.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
_OTHER_SECTION = re.compile(r"^\s*\.section\s")
_LABEL = re.compile(r"^([.$A-Za-z_][^\s:]*):\s*$")
_LOOKS_LIKE_CODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P[0-9T]+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);")
_STEP = 16  # bytes of an instruction from sm_70 on


@dataclass(frozen=True)
class Instruction:
    """One instruction. ``guard``: the predicate under which it runs, empty where it always runs."""

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
        """What follows the dots of the opcode."""
        return tuple(self.opcode.split(".")[1:])

    def __str__(self) -> str:
        return f"0x{self.address:x} {self.opcode} {self.operands}".strip()


@dataclass
class Kernel:
    """The code of one ``.text`` section: a kernel and the functions that were not inlined into it.

    ``instructions`` are in order of address; ``labels`` give the index of the instruction after each label.
    """

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def at(self, address: int) -> int | None:
        """Return the index of the instruction at an address; None where there is none."""
        index, rest = divmod(address - self.instructions[0].address, _STEP)
        return index if rest == 0 and 0 <= index < len(self.instructions) else None


def parse(sass: str) -> list[Kernel]:
    """Return the kernels of a listing that hold code, in its order.

    Raises
    ------
    ValueError
        Where a line of code cannot be read, or addresses have gaps. A listing without code has no kernels: whether some
        are missing only the library knows, which names all that it holds.
    """
    kernels: list[Kernel] = []
    current: Kernel | None = None
    for line in sass.splitlines():
        if section := _SECTION.match(line):
            current = Kernel(section[1])
            kernels.append(current)
        elif _OTHER_SECTION.match(line):
            current = None
        elif current is None:
            continue
        elif label := _LABEL.match(line):
            current.labels[label[1]] = len(current.instructions)
        elif _LOOKS_LIKE_CODE.match(line):
            current.instructions.append(_instruction(current, line))
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
