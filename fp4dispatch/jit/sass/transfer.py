"""What an instruction does to registers: the values that its results may have, from those of its operands."""

from __future__ import annotations

from fp4dispatch.jit.sass.listing import Instruction
from fp4dispatch.jit.sass.operands import Decoded, Kind, Source, decode
from fp4dispatch.jit.sass.values import UNKNOWN, ZERO, Value, added, combined, constant, either

State = dict[str, Value]

_ONE = constant(1)


def apply(instruction: Instruction, state: State) -> None:
    """Change ``state``, the value of every register that was written, to what holds after the instruction."""
    decoded = decode(instruction.opcode, instruction.operands)
    if decoded is None:
        return
    # A BROADCAST runs in a loop over the lanes that ELECT picks one by one, so one lane has always written.
    certain = not instruction.guard or ".BROADCAST" in instruction.opcode
    for register, value in _results(decoded, state):
        old = None if certain else state.get(register)
        state[register] = value if old is None else either(old, value)


def _results(decoded: Decoded, state: State) -> list[tuple[str, Value]]:
    if decoded.kind is Kind.UNKNOWN:
        return [(register, UNKNOWN) for register in decoded.written]
    if decoded.constants:
        return list(zip(decoded.written, decoded.constants, strict=True))
    low = [_low(source, state) for source in decoded.sources]
    high = [value for source in decoded.sources for value in _high(source, state)]
    every = combined([*low, *high])
    first = added(low) if decoded.kind is Kind.SUM else every
    if decoded.kind is Kind.MULTIPLY_ADD and len(low) == 3:
        first = _multiply_add(*low)
    found = [(decoded.written[0], first), *((register, every) for register in decoded.written[1:])]
    if decoded.perhaps:
        found.append((decoded.perhaps, either(every, state.get(decoded.perhaps, every))))
    return found


def _multiply_add(one: Value, other: Value, third: Value) -> Value:
    if ZERO in (one, other):
        return third
    if _ONE in (one, other):
        return added([one if other == _ONE else other, third])
    return combined([one, other, third])


def _low(source: Source, state: State) -> Value:
    if not source.registers:
        return source.value[0]
    if source.exact:
        return state.get(source.registers[0], UNKNOWN)
    return combined([state.get(register, UNKNOWN) for register in source.registers])


def _high(source: Source, state: State) -> list[Value]:
    return [state.get(source.second, UNKNOWN)] if source.second else list(source.value[1:])
