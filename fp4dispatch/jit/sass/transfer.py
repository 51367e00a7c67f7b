"""What an instruction does to registers: the values that its results may have, from those of its operands.

Only opcodes of the allow-list come here. Which of several operands matter, and how, is not modelled: a result is
computed from everything that the instruction names, except where it is a move or a sum and an exact offset is worth
keeping. So an error here can refuse a kernel, but a register never loses a word that flowed into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from fp4dispatch.jit.sass import opcodes
from fp4dispatch.jit.sass.listing import Instruction
from fp4dispatch.jit.sass.values import NUMBER, UNKNOWN, ZERO, Value, added, combined, constant, either, word

State = dict[str, Value]

_REGISTER = re.compile(r"(?<![A-Za-z0-9_.])(U?R)(\d+|Z)(?![A-Za-z0-9_])")
_PREDICATE = re.compile(r"!?U?P(?:\d+|T|R)")
_BANK = re.compile(r"c\[0x([0-9a-f]+)\]\[([^\]]*)\]")
_SPECIAL = re.compile(r"SR[\w.]*|B\d+|`.*|[-~|]*U?RZ[.\w|]*")  # special registers, barriers, labels, ~RZ
_ZERO = re.compile(r"-?U?RZ(?:\.reuse)?")
_HEX = re.compile(r"-?0x[0-9a-f]+")
_NUMBER = re.compile(r"[-+]?(?:0x[0-9a-f]+|[0-9][0-9.e+-]*|INF|QNAN|SNAN|NAN)\s*", re.IGNORECASE)

_CONVERSIONS = frozenset(("F2F", "F2I", "FRND", "I2F", "I2I", "UF2I", "UI2F"))
_LONG_SOURCES = {  # modifiers that make the source of a conversion 64 bits
    **dict.fromkeys(("F2F", "FRND", "F2I", "UF2I"), frozenset(("F64",))),
    **dict.fromkeys(("I2F", "I2I", "UI2F"), frozenset(("S64", "U64"))),
}
_LONG = frozenset(("64", "WIDE"))
_LONG_TYPES = frozenset(("F64", "S64", "U64"))
_SUMS = frozenset(("IADD", "IADD3", "UIADD3", "UVIADD", "VIADD"))
_MOVES = frozenset(("LDC", "LDCU", "MOV", "R2UR", "ULDC", "UMOV"))
_LITERAL_BANK = 2  # what the compiler put there: constants and jump tables
_MOST = 4  # registers that one load from shared memory writes


def operands_of(instruction: Instruction) -> list[str]:
    """Split the operands at the commas outside of brackets."""
    text, _, _ = instruction.operands.partition("(*")
    parts = re.split(r",\s*(?![^\[]*\])", text.strip())
    return [part.strip() for part in parts if part.strip()]


def banks(instruction: Instruction) -> set[int]:
    """Return the constant banks that an instruction reads; -1 stands for one that a register chooses."""
    found = {int(bank, 16) for bank, _ in _BANK.findall(instruction.operands)}
    return found | ({-1} if "cx[" in instruction.operands else set())


def registers_in(operand: str) -> list[str]:
    """Return the registers that an operand names, without the zero registers."""
    return [file + number for file, number in _REGISTER.findall(operand) if number != "Z"]


def beside(register: str, steps: int = 1) -> str:
    """Return the register that is so many further."""
    file = register.rstrip("0123456789")
    return f"{file}{int(register[len(file) :]) + steps}"


def apply(instruction: Instruction, state: State) -> None:
    """Change ``state``, the value of every register that was written, to what holds after the instruction."""
    known = opcodes.installed()
    base = instruction.base
    if base in known.acts or base in known.flow:
        return
    written, sources = _split(instruction)
    if written is None:
        return
    if base not in known.computes:  # memory of this thread or CTA, or a barrier's state
        results: Mapping[str, Value] = {beside(written, i): UNKNOWN for i in range(_loaded(instruction))}
    else:
        results = dict(_results(instruction, written, sources, state))
    # A BROADCAST runs in a loop over the lanes that ELECT picks one by one, so one lane has always written.
    certain = not instruction.guard or "BROADCAST" in instruction.modifiers
    for register, value in results.items():
        state[register] = value if certain or register not in state else either(state[register], value)


def _split(instruction: Instruction) -> tuple[str | None, list[str]]:
    """Return the first register that is written, None where there is none, and the operands that are read."""
    operands = operands_of(instruction)
    while operands and _PREDICATE.fullmatch(operands[0]):
        del operands[0]
    if not operands or not _REGISTER.fullmatch(operands[0].partition(".")[0]):
        return None, operands
    found = registers_in(operands[0])
    # A carry changes a sum by what its low word says: no word of memory comes in through a predicate.
    return (found[0] if found else None), [text for text in operands[1:] if not _PREDICATE.fullmatch(text)]


def _loaded(instruction: Instruction) -> int:
    """How many registers are written, at least."""
    by_size = {"64": 2, "128": 4}
    if instruction.base in ("LDS", "LDL"):
        return max([1, *(by_size.get(modifier, 1) for modifier in instruction.modifiers)])
    return _MOST


def _results(instruction: Instruction, written: str, sources: list[str], state: State) -> Iterator[tuple[str, Value]]:
    base, modifiers = instruction.base, set(instruction.modifiers)
    if base in ("LDC", "LDCU", "ULDC"):
        yield from _constants(instruction, written, sources)
        return
    long = bool(modifiers & _LONG) or (base == "CS2R" and "32" not in modifiers)
    pairs = "64" in modifiers or bool(modifiers & _LONG_SOURCES.get(base, frozenset()))
    third_is_long = bool(modifiers & {"WIDE", "HI"}) and base in ("IMAD", "UIMAD")
    low: list[Value] = []
    high: list[Value] = []
    for position, operand in enumerate(sources):
        first, second = _read(operand, state)
        low.append(first)
        if pairs or (third_is_long and position == 2):
            high.append(second)
    every = combined([*low, *high])
    if not long and base in _CONVERSIONS and modifiers & _LONG_TYPES:
        # Whether the result is the long side is not modelled: its second register holds this or what it held.
        second_register = beside(written)
        yield written, every
        yield second_register, either(every, state.get(second_register, every))
        return
    yield written, _exact(instruction, low) if _keeps_offset(instruction) else every
    if long:
        yield beside(written), every


def _keeps_offset(instruction: Instruction) -> bool:
    base, modifiers = instruction.base, set(instruction.modifiers)
    if base in _SUMS or base in _MOVES:
        return "X" not in modifiers
    return base in ("IMAD", "UIMAD") and bool(modifiers & {"MOV", "IADD", "U32"}) and "WIDE" not in modifiers


def _exact(instruction: Instruction, low: list[Value]) -> Value:
    if instruction.base in ("IMAD", "UIMAD"):
        if len(low) < 3:
            return combined(low)
        one, other, third = low[:3]
        if ZERO in (one, other):
            return added([third, *({one, other} & {ZERO})])
        if constant(1) in (one, other):
            return added([one if other == constant(1) else other, third])
        return combined(low)
    return added(low)


def _constants(instruction: Instruction, written: str, sources: list[str]) -> Iterator[tuple[str, Value]]:
    found = _BANK.search(" ".join(sources))
    count = {"64": 2, "128": 4, "256": 8}
    width = max([1, *(count.get(modifier, 1) for modifier in instruction.modifiers)])
    part = bool({"U8", "S8", "U16", "S16"} & set(instruction.modifiers))
    for i in range(width):
        value = UNKNOWN if found is None else _bank_value(int(found[1], 16), found[2], i)
        yield beside(written, i), combined([value]) if part else value


def _bank_value(bank: int, offset: str, index: int = 0) -> Value:
    """The value of a word of constant memory; of an offset that a register chooses nothing is known."""
    if bank == _LITERAL_BANK:
        return NUMBER
    if bank != 0 or not _HEX.fullmatch(offset.strip()):
        return UNKNOWN
    at = int(offset, 16) + 4 * index
    return word(at) if at % 4 == 0 else combined([word(at - at % 4)])


def _read(operand: str, state: State) -> tuple[Value, Value]:
    """Return the value of an operand and of the register or word after it."""
    text = operand.strip()
    if bank := _BANK.search(text):
        low, high = (_bank_value(int(bank[1], 16), bank[2], i) for i in range(2))
        plain = text == bank[0]
    elif registers := registers_in(text):
        values = [state.get(register, UNKNOWN) for register in registers]
        low, high = combined(values), state.get(beside(registers[0]), UNKNOWN)
        plain = re.fullmatch(r"U?R\d+(\.reuse)?", text) is not None
        low = values[0] if plain else low
    elif _ZERO.fullmatch(text):
        return ZERO, ZERO
    elif _HEX.fullmatch(text):
        return constant(int(text, 16)), constant(int(text, 16) >> 32)
    elif any(pattern.fullmatch(text) for pattern in (_NUMBER, _PREDICATE, _SPECIAL)):
        return NUMBER, NUMBER
    else:
        return UNKNOWN, UNKNOWN
    return (low if plain else combined([low])), high
