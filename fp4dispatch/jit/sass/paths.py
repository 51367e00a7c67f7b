"""Control flow: branches, jump tables, calls and returns. Flow that cannot be followed is an error, never a guess."""

from __future__ import annotations

import re

from fp4dispatch.jit.sass.listing import Instruction, Kernel
from fp4dispatch.jit.sass.operands import registers_in, split
from fp4dispatch.jit.sass.transfer import State, read

Place = tuple[tuple[int, ...], int]
"""Return addresses of the active calls (instruction indices), and an instruction index."""

_TARGET = re.compile(r"`\(([^)]+)\)")
_BRANCH_TARGETS = re.compile(r'BRANCH_TARGETS ([^"]+)"')
_ONLY_TARGET = re.compile(r"`\([^)]+\)")
_MAX_DEPTH = 8


class CannotFollow(Exception):
    """The listing does not say where control goes."""


def barrier_is_certain(instruction: Instruction) -> bool:
    """Whether every thread that reaches this waits for the previous grid."""
    return instruction.base == "ACQBULK" and not instruction.guard


def is_trap(instruction: Instruction) -> bool:
    """Whether this aborts the grid: nothing after it runs."""
    return instruction.base == "KILL" or instruction.opcode.startswith("BPT.TRAP")


def successors(kernel: Kernel, place: Place, state: State) -> list[Place]:
    """Return every place that can follow an instruction.

    Raises
    ------
    CannotFollow
        With the reason: an indirect call, a recursion, a return whose address is not known, an unknown label.
    """
    calls, index = place
    instruction = kernel.instructions[index]
    base = instruction.base
    following = [(calls, index + 1)]
    if base == "EXIT" or is_trap(instruction):
        found = following if instruction.guard else []
    elif base in ("BRX", "BRXU"):
        found = [(calls, target) for target in _table(kernel, instruction)]
        found += following if instruction.guard else []
    elif base == "BRA":
        always = not instruction.guard and _ONLY_TARGET.match(instruction.operands) is not None
        found = [(calls, target) for target in _targets(kernel, instruction)] + ([] if always else following)
    elif base == "CALL":
        found = [_call(kernel, place, instruction), *(following if instruction.guard else [])]
    elif base == "RET":
        found = [_return(kernel, place, instruction, state), *(following if instruction.guard else [])]
    elif base in ("BSSY", "WARPSYNC"):
        found = following + [(calls, target) for target in _reconvergence(kernel, instruction)]
    else:
        found = following
    if any(target >= len(kernel.instructions) for _, target in found):
        raise CannotFollow("control runs past the end of the code")
    return found


def _targets(kernel: Kernel, instruction: Instruction) -> list[int]:
    names = _TARGET.findall(instruction.operands)
    unknown = [name for name in names if name not in kernel.labels]
    if unknown or not names:
        raise CannotFollow(f"unknown branch target {', '.join(unknown) or instruction.operands or 'without a name'}")
    return [kernel.labels[name] for name in names]


def _table(kernel: Kernel, instruction: Instruction) -> list[int]:
    """The targets of a jump table, as the compiler recorded them and nvdisasm prints them."""
    named = _BRANCH_TARGETS.search(instruction.operands)
    if named is None:
        raise CannotFollow("an indirect branch without a list of its targets")
    names = [name.strip() for name in named[1].split(",")]
    if unknown := [name for name in names if name not in kernel.labels]:
        raise CannotFollow(f"unknown branch target {', '.join(unknown)}")
    return [kernel.labels[name] for name in names]


def _call(kernel: Kernel, place: Place, instruction: Instruction) -> Place:
    calls, index = place
    if _ONLY_TARGET.match(instruction.operands) is None:
        raise CannotFollow("an indirect call")
    (target,) = _targets(kernel, instruction)
    if index + 1 in calls:
        raise CannotFollow("a recursive call")
    if len(calls) == _MAX_DEPTH:
        raise CannotFollow(f"calls nested deeper than {_MAX_DEPTH}")
    return (*calls, index + 1), target


def _return(kernel: Kernel, place: Place, instruction: Instruction, state: State) -> Place:
    """The place after the call. The register with the return address must provably hold it."""
    calls, _ = place
    if not calls:
        raise CannotFollow("a return where nothing was called")
    registers = registers_in(split(instruction.operands)[0]) if instruction.operands else []
    value = read(state, registers[0], instruction.guard) if registers else None
    if value is None or value.words or value.exact is None or kernel.at(value.exact) != calls[-1]:
        raise CannotFollow("a return whose address is not known to be that of the call")
    return calls[:-1], calls[-1]


def _reconvergence(kernel: Kernel, instruction: Instruction) -> list[int]:
    """Where threads of a warp reconverge. BSSY names the place after its BSYNC, to which BSYNC falls through."""
    if "`" not in instruction.operands:
        return []
    targets = _targets(kernel, instruction)
    if instruction.base == "WARPSYNC":
        return targets
    barrier = split(instruction.operands)[0]
    for target in targets:
        around = kernel.instructions[max(target - 1, 0) : target + 1]
        if not any(other.base == "BSYNC" and split(other.operands)[:1] == [barrier] for other in around):
            raise CannotFollow(f"{barrier} does not end where its BSYNC is")
    return []
