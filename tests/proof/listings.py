"""Shipped kernels with a fault put into their machine code: for those that take too long to compile again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from fp4dispatch.jit.catalog.early_loads import EarlyLoads
from fp4dispatch.jit.sass.listing import Instruction, Kernel
from fp4dispatch.jit.sass.parameters import Parameters

# In place of an instruction near the entry, which every thread runs before it waits.
_EARLY = {
    "moved": ("LDG.E", "R2, desc[UR4][R2.64]"),
    "helper": ("CALL.ABS.NOINC", "R14"),
    "loop": ("BRX", "R2 -0x120"),
    "prefetch": ("CCTL.E.PF2", "[R2.64]"),
    "texture": ("TEX.B.LL", "RZ, R2, R2, RZ, UR4, 1D, 0x1"),
    "surface": ("SUST.D.BA.1D.STRONG.SM.TRAP", "[R0], R9, UR6, 0x0"),
    "multimem": ("LDGMC.E.ADD.F32.STRONG.SYS", "R2, desc[UR4][R2.64]"),
    "bulk": ("UBLKCP.G.S", "[UR8], [UR12], UR5"),
    "atomic": ("ATOMG.E.ADD", "R2, desc[UR4][R2.64], R3"),
    "store": ("STG.E", "desc[UR4][R2.64], R3"),
}


def mutants(kernel: Kernel, arguments: Parameters, declared: EarlyLoads | None) -> Iterator[tuple[str, Kernel]]:
    """Yield (class, kernel with a fault of this class)."""
    for kind, (opcode, operands) in _EARLY.items():
        yield kind, _changed(kernel, 1, lambda old, o=opcode, t=operands: old._replace(opcode=o, operands=t, guard=""))
    yield "exit", _changed(kernel, 1, lambda old: Instruction(old.address, "P0", "EXIT", ""))
    triggered = _changed(kernel, 1, lambda old: Instruction(old.address, "", "PREEXIT", ""))
    yield "trigger", _changed(triggered, 2, lambda old: Instruction(old.address, "P0", "EXIT", ""))
    yield "deleted", _waits(kernel, lambda old: Instruction(old.address, "", "NOP", ""))
    yield "conditional", _waits(kernel, lambda old: old._replace(guard="P0"))
    if declared is not None:
        yield "pointer", _other_pointer(kernel, arguments, declared)


def _changed(kernel: Kernel, index: int, change: Callable[[Instruction], Instruction]) -> Kernel:
    instructions = list(kernel.instructions)
    instructions[index] = change(instructions[index])
    return Kernel(kernel.name, instructions, kernel.labels)


def _waits(kernel: Kernel, change: Callable[[Instruction], Instruction]) -> Kernel:
    changed = [change(old) if old.base == "ACQBULK" else old for old in kernel.instructions]
    assert changed != kernel.instructions
    return Kernel(kernel.name, changed, kernel.labels)


def _other_pointer(kernel: Kernel, arguments: Parameters, declared: EarlyLoads) -> Kernel:
    """The weights' pointer or tensor map, replaced by what lies 64 bytes behind it."""
    start = arguments.at[0][0] + declared.weights[0]
    if declared.access == "UTMALDG":  # its address is added to that of the arguments, or is that where they begin
        pattern, shift = re.compile(rf"(?<=, )0x{start:x}(?=, URZ)|(?<=c\[0x0\]\[0x)(198|348)(?=\])"), None
    else:
        pattern, shift = re.compile(rf"(?<=c\[0x0\]\[)0x{arguments.base + start:x}(?=\])"), 64
    changed = [
        old._replace(
            operands=pattern.sub(
                lambda found: hex(int(found[0], 16) + 64) if shift or "x" in found[0] else f"{int(found[0], 16) + 8:x}",
                old.operands,
            ),
        )
        for old in kernel.instructions
    ]
    assert changed != kernel.instructions
    return Kernel(kernel.name, changed, kernel.labels)
