"""Checks what a kernel can do before it waits for the previous grid (``griddepcontrol.wait``, SASS ``ACQBULK``).

Every path from the entry to the barrier is followed. On it, only instructions of the allow-list (``opcodes.toml``) may
run, no thread may end, and a declared load of weights passes only if its address comes from the declared argument
alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from fp4dispatch.jit.catalog.early_loads import MAP_BYTES, POINTER_BYTES, EarlyLoads
from fp4dispatch.jit.sass import opcodes, operands, transfer
from fp4dispatch.jit.sass.listing import Instruction, Kernel
from fp4dispatch.jit.sass.parameters import Parameters
from fp4dispatch.jit.sass.paths import CannotFollow, Place, barrier_is_certain, is_trap, successors
from fp4dispatch.jit.sass.transfer import State
from fp4dispatch.jit.sass.values import UNKNOWN, Value, either

_READABLE_BANKS = frozenset((0, 2, 4))  # arguments, the compiler's literals, addresses: no grid writes them
_MAX_VISITS = 200_000


@dataclass
class Judgement:
    """Findings before the barrier: ``refused`` with the reason, ``accepted`` with the source of the address."""

    refused: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)


def judge(kernel: Kernel, parameters: Parameters | None, declared: EarlyLoads | None) -> Judgement:
    """Check one kernel.

    Parameters
    ----------
    kernel
        Its code.
    parameters
        Layout of its arguments; None if unknown, so that no address can be traced.
    declared
        The loads that it may do before the barrier, or None.

    Raises
    ------
    ValueError
        If the kernel is too large to analyse, or ``declared`` names an opcode that cannot be declared.
    """
    if declared is not None and declared.access not in opcodes.installed().declared:
        raise ValueError(f"{declared.access} cannot be declared to come before the barrier")
    return _Judge(kernel, parameters, declared).run()


class _Judge:
    def __init__(self, kernel: Kernel, parameters: Parameters | None, declared: EarlyLoads | None) -> None:
        self.kernel, self.parameters, self.declared = kernel, parameters, declared
        self.leaders = {0, *kernel.labels.values()}
        self.states: dict[Place, State] = {}
        self.found: dict[int, dict[str, bool]] = {}  # index -> reason -> whether it is refused

    def run(self) -> Judgement:
        entry = ((), self.kernel.labels.get(self.kernel.name, 0))
        work: list[Place] = [entry]
        self.states[entry] = State()
        visits = 0
        while work:
            visits += 1
            if visits > _MAX_VISITS:
                raise ValueError(f"{self.kernel.name}: what comes before the barrier is too large to be followed")
            for place, state in self._block(heapq.heappop(work)).items():
                if self._merge(place, state) and place not in work:
                    heapq.heappush(work, place)
        for place in self.states:
            self._block(place, judging=True)
        judgement = Judgement()
        for index, reasons in sorted(self.found.items()):
            for reason, refused in reasons.items():
                row = f"{self.kernel.instructions[index]}: {reason}"
                (judgement.refused if refused else judgement.accepted).append(row)
        return judgement

    def _merge(self, place: Place, state: State) -> bool:
        """Merge the state of one more path to a place; return whether the merged state changed."""
        known = self.states.get(place)
        if known is None:
            self.states[place] = state
            return True
        merged = State(known)
        merged.update((name, either(known.get(name, value), value)) for name, value in state.items())
        if merged == known:
            return False
        self.states[place] = merged
        return True

    def _block(self, place: Place, *, judging: bool = False) -> Mapping[Place, State]:
        """Execute a block; return its successors with the state at each."""
        calls, index = place
        state = State(self.states[place])
        while True:
            instruction = self.kernel.instructions[index]
            if barrier_is_certain(instruction):
                return {}
            if judging:
                self._judge(index, instruction, state)
            transfer.apply(instruction, state)
            try:
                found = successors(self.kernel, (calls, index), state)
            except CannotFollow as reason:
                self.found.setdefault(index, {})[str(reason)] = True
                return {}
            if found != [(calls, index + 1)] or index + 1 in self.leaders:
                return {after: State(state) for after in found}
            index += 1

    def _judge(self, index: int, instruction: Instruction, state: State) -> None:
        known = opcodes.installed()
        base, opcode = instruction.base, instruction.opcode
        reason = ""
        if base == "EXIT":
            reason = "a thread can end before it has waited"
        elif bad := operands.banks(instruction.operands) - _READABLE_BANKS:
            reason = f"reads constant bank {', '.join(map(str, sorted(bad)))}, which a grid can write"
        elif opcode in known.of_arguments.spellings:
            at = self._in_arguments(self._address(instruction, known.of_arguments.address, state))
            reason = "" if at is not None else "is not traced to a tensor map among the kernel's arguments"
        elif self.declared is not None and opcode in known.declared[self.declared.access].spellings:
            self._judge_declared(index, instruction, state, self.declared)
        elif base == "ACQBULK":
            reason = "waits under a condition, so it guards nothing" if instruction.guard else ""
        elif opcode not in known.spelled and not is_trap(instruction):
            allowed = base in known.computes | known.loads | known.multiplies | known.acts | known.flow
            reason = "" if allowed else "is not among what may run before the barrier"
        if reason:
            self.found.setdefault(index, {})[reason] = True

    def _judge_declared(self, index: int, instruction: Instruction, state: State, declared: EarlyLoads) -> None:
        address = self._address(instruction, opcodes.installed().declared[declared.access].address, state)
        first, last = declared.weights
        if last - first == MAP_BYTES:
            at = self._in_arguments(address)
            good = at is not None and at - self._first() == first
            source = "its tensor map" if at is None else f"the tensor map at byte {at - self._first()} of the arguments"
        else:
            good, source = self._from_pointer(address, declared), "its address"
        reason = (
            f"loads weights from bytes {first} to {last} of the arguments"
            if good
            else f"{source} is not traced to the declared weights (bytes {first} to {last} of the arguments) alone"
        )
        self.found.setdefault(index, {})[reason] = not good

    def _first(self) -> int:
        """Offset of the first argument within the arguments."""
        return self.parameters.at[0][0] if self.parameters and 0 in self.parameters.at else 0

    def _address(self, instruction: Instruction, operand: int, state: State) -> tuple[Value, Value]:
        """Return both words of the address that an operand takes from a pair of registers."""
        texts = operands.split(instruction.operands)
        text = texts[operand] if operand < len(texts) else ""
        registers = operands.registers_in(text)
        if len(registers) != 1 or text not in (f"[{registers[0]}]", f"[{registers[0]}.64]"):
            return UNKNOWN, UNKNOWN
        low, high = registers[0], operands.beside(registers[0])
        return transfer.read(state, low, instruction.guard), transfer.read(state, high, instruction.guard)

    def _in_arguments(self, address: tuple[Value, Value]) -> int | None:
        """Return the byte offset of an address within the arguments; None if it is not in them or unknown."""
        low, high = address
        if self.parameters is None:
            return None
        window = opcodes.installed().window.get(self.parameters.base)
        if window is None or not (low.traced and high.traced) or low.words != {window} or low.exact is None:
            return None
        if window + 4 not in high.words or not high.words <= {window, window + 4}:
            return None
        return low.exact if low.exact + MAP_BYTES <= self.parameters.size else None

    def _from_pointer(self, address: tuple[Value, Value], declared: EarlyLoads) -> bool:
        """Whether an address is the declared pointer plus numbers, and nothing else."""
        if self.parameters is None or 0 not in self.parameters.at:
            return False
        start = self.parameters.base + self._first()
        pointer = start + declared.weights[0]
        numbers = {start + byte for byte in range(*declared.numbers, 4)} if declared.numbers else set()
        allowed = numbers | {pointer, pointer + 4}
        low, high = address
        if not (low.traced and high.traced) or declared.weights[1] - declared.weights[0] != POINTER_BYTES:
            return False
        return pointer in low.words and pointer + 4 in high.words and (low.words | high.words) <= allowed
