"""Proves from SASS that a kernel touches global memory only after it waited for the previous grid.

Counting ``ACQBULK`` shows that the barrier is in the binary, not that it comes first: a warp role that never waits, or
a load hoisted above the wait, still reads what the previous kernel has not written. Stock CUTLASS 4.5 kernels for SM100
do exactly that with the scale vectors of their epilogue. Here the control-flow graph is rebuilt from the text of
``nvdisasm -c``, and every global access that some path reaches without the barrier is reported.

Instruction names: https://docs.nvidia.com/cuda/cuda-binary-utilities/ (instruction set reference).
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
_LABEL = re.compile(r"^(\.L_[A-Za-z0-9_]+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[0-9T]+)\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_TARGET = re.compile(r"`\((\.L_[^)]+)\)")

_BRANCH_TARGETS = re.compile(r'BRANCH_TARGETS ([^"]+)"')

_BARRIER = "ACQBULK"
# Loads and stores of global memory, plain, asynchronous and through TMA. Descriptor prefetches are not accesses.
_PLAIN_ACCESS = ("LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG")
_GLOBAL_ACCESS = frozenset((*_PLAIN_ACCESS, "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED"))
# What a kernel may declare to do before it waits, and the spellings that this allows, whole: UBLKCP.S.G copies from
# global to shared memory, UBLKCP.G.S would write global memory. UTMALDG only ever loads; 2D is what weights need, for
# one CTA or for several of a cluster.
_DECLARED = {
    "UBLKCP": frozenset(("UBLKCP.S.G",)),
    "UTMALDG": frozenset(("UTMALDG.2D", "UTMALDG.2D.MULTICAST")),
}
_ENDS = frozenset(("EXIT", "RET", "KILL", "BPT"))
_JUMPS = frozenset(("BRA", "JMP"))
_MAY_JUMP = frozenset(("CALL", "WARPSYNC", "BREAK"))
_INDIRECT = frozenset(("BRX", "JMX", "BRXU", "JMXU"))


@dataclass(frozen=True)
class Access:
    """One global access that can run before the barrier."""

    kernel: str
    address: int
    instruction: str


@dataclass
class _Kernel:
    name: str
    # (address, predicated, opcode, operands) in order of address
    instructions: list[tuple[int, bool, str, str]] = field(default_factory=list)
    # label -> index of the instruction after it
    labels: dict[str, int] = field(default_factory=dict)


def unguarded_accesses(sass: str, before_wait: Collection[str] = ()) -> list[Access]:
    """Find the global accesses that some path reaches without an ``ACQBULK``.

    Parameters
    ----------
    sass
        Output of ``nvdisasm -c`` for one cubin; it may hold several kernels.
    before_wait
        Accesses that the kernels declare (``before_wait`` in ``csrc/kernels.toml``) and that are not reported:
        ``UBLKCP``, bulk copies from global to shared memory, and ``UTMALDG``, loads of a box of a matrix by TMA.
        Nothing else can be declared.

    Returns
    -------
    list of Access
        Empty when every access of every kernel is behind the barrier. A kernel without any ``ACQBULK`` reports all of
        its accesses.

    Raises
    ------
    ValueError
        When the text holds no instruction, or a branch whose target is unknown: an empty answer would then prove
        nothing. When ``before_wait`` names something that cannot be declared.
    """
    if unknown := sorted(set(before_wait) - set(_DECLARED)):
        raise ValueError(f"{', '.join(unknown)} cannot be declared to come before the barrier")
    declared = frozenset().union(*(_DECLARED[name] for name in before_wait))
    kernels = [kernel for kernel in _parse(sass) if kernel.instructions]
    if not kernels:
        raise ValueError("no SASS instruction found; expected the output of `nvdisasm -c` for a cubin with code")
    return [access for kernel in kernels for access in _analyse(kernel, declared)]


def _parse(sass: str) -> list[_Kernel]:
    kernels: list[_Kernel] = []
    for line in sass.splitlines():
        if section := _SECTION.match(line):
            kernels.append(_Kernel(section.group(1)))
        elif not kernels:
            continue
        elif label := _LABEL.match(line):
            kernels[-1].labels[label.group(1)] = len(kernels[-1].instructions)
        elif found := _INSTRUCTION.match(line):
            address, predicate, opcode, operands = found.groups()
            kernels[-1].instructions.append((int(address, 16), predicate is not None, opcode, operands.strip()))
    return kernels


def _successors(kernel: _Kernel, index: int) -> list[int]:
    address, predicated, opcode, operands = kernel.instructions[index]
    base = opcode.split(".")[0]
    following = [index + 1] if index + 1 < len(kernel.instructions) else []
    if base in _INDIRECT:
        # nvdisasm names the targets where it knows them (a jump table); else every label may be one.
        named = _BRANCH_TARGETS.search(operands)
        labels = named.group(1).split(",") if named else kernel.labels
        return sorted({kernel.labels[label.strip()] for label in labels})
    if base in _ENDS:
        return following if predicated else []
    if base not in _JUMPS and base not in _MAY_JUMP:
        return following
    targets = _TARGET.findall(operands)
    unknown = [target for target in targets if target not in kernel.labels]
    if unknown or (base in _JUMPS and not targets):
        raise ValueError(f"{kernel.name}: unknown branch target at 0x{address:x}: {opcode} {operands}")
    jumps = [kernel.labels[target] for target in targets]
    always = base in _JUMPS and not predicated and operands.startswith("`(")
    return jumps if always else jumps + following


def _analyse(kernel: _Kernel, declared: Collection[str]) -> list[Access]:
    """Spread "not yet guarded" from the entry; a barrier stops it, so what it reaches is unguarded."""
    seen = {0}
    work = [0]
    while work:
        index = work.pop()
        _, predicated, opcode, _ = kernel.instructions[index]
        if opcode.split(".")[0] == _BARRIER and not predicated:
            continue
        for following in _successors(kernel, index):
            if following < len(kernel.instructions) and following not in seen:
                seen.add(following)
                work.append(following)
    return [
        Access(kernel.name, address, f"{opcode} {operands}".strip())
        for address, _, opcode, operands in (kernel.instructions[index] for index in sorted(seen))
        if opcode.split(".")[0] in _GLOBAL_ACCESS and opcode not in declared
    ]
