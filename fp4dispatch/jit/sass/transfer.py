"""Transfer function of the analysis: the possible values of results, from those of the operands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from fp4dispatch.jit.sass.listing import Instruction
from fp4dispatch.jit.sass.operands import Decoded, Kind, Source, decode
from fp4dispatch.jit.sass.values import UNKNOWN, ZERO, Value, added, combined, constant, either

_ONE = constant(1)
_PREDICATES = re.compile(r"(?<![A-Za-z0-9_])U?P(?:\d|R)")


class State(dict[str, Value]):
    """The value of every written register.

    ``guarded``: within a block, by register and predicate, the value that the register has for code under the predicate
    of its last write. A copy and the state at the end of a block have none: the predicate may change.
    """

    def __init__(self, values: Mapping[str, Value] = MappingProxyType({})) -> None:
        super().__init__(values)
        self.guarded: dict[tuple[str, str], Value] = {}


def read(state: State, register: str, guard: str) -> Value:
    """Return the value of a register for an instruction under a guard; UNKNOWN if it was never written."""
    value = state.guarded.get((register, guard)) if guard else None
    return state.get(register, UNKNOWN) if value is None else value


def apply(instruction: Instruction, state: State) -> None:
    """Update ``state`` to the state after the instruction."""
    guard = instruction.guard
    if state.guarded:
        _forget_guards(instruction, state)
    decoded = decode(instruction.opcode, instruction.operands)
    if decoded is None:
        return
    # A BROADCAST runs in a loop over the lanes that ELECT picks one by one, so one lane has always written.
    certain = not guard or ".BROADCAST" in instruction.opcode
    for register, value in _results(decoded, state, guard):
        old = None if certain else state.get(register)
        state[register] = value if old is None else either(old, value)
        if state.guarded:
            state.guarded = {key: kept for key, kept in state.guarded.items() if key[0] != register}
        if not certain:
            state.guarded[register, guard] = value


def _forget_guards(instruction: Instruction, state: State) -> None:
    """Drop values under every predicate that an instruction names, because it may write the predicate."""
    named = set(_PREDICATES.findall(instruction.operands))
    state.guarded = {key: kept for key, kept in state.guarded.items() if not named & {"PR", "UPR", key[1].lstrip("!")}}


def _results(decoded: Decoded, state: State, guard: str) -> list[tuple[str, Value]]:
    if decoded.kind is Kind.UNKNOWN:
        return [(register, UNKNOWN) for register in decoded.written]
    if decoded.constants:
        return list(zip(decoded.written, decoded.constants, strict=True))
    low = [_low(source, state, guard) for source in decoded.sources]
    high = [value for source in decoded.sources for value in _high(source, state, guard)]
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


def _low(source: Source, state: State, guard: str) -> Value:
    if not source.registers:
        return source.value[0]
    if source.exact:
        return read(state, source.registers[0], guard)
    return combined([read(state, register, guard) for register in source.registers])


def _high(source: Source, state: State, guard: str) -> list[Value]:
    return [read(state, source.second, guard)] if source.second else list(source.value[1:])
