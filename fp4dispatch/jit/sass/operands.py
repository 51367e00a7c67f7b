"""Decodes which registers an instruction reads and writes, from its text. Results are cached by text."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import Enum

from fp4dispatch.jit.sass import opcodes
from fp4dispatch.jit.sass.values import NUMBER, UNKNOWN, ZERO, Value, combined, constant, word

_REGISTER = re.compile(r"(?<![A-Za-z0-9_.])(U?R)(\d+|Z)(?![A-Za-z0-9_])")
_PLAIN = re.compile(r"U?R\d+(\.reuse)?")
_PREDICATE = re.compile(r"!?U?P(?:\d+|T|R)")
_BANK = re.compile(r"c\[0x([0-9a-f]+)\]\[([^\]]*)\]")
_SPECIAL = re.compile(r"SR[\w.]*|B\d+|`.*|[-~|]*U?RZ[.\w|]*")  # special registers, barriers, labels, ~RZ
_ZERO = re.compile(r"-?U?RZ(?:\.reuse)?")
_HEX = re.compile(r"-?0x[0-9a-f]+")
_NUMBER = re.compile(r"[-+]?(?:0x[0-9a-f]+|[0-9][0-9.e+-]*|INF|QNAN|SNAN|NAN)\s*", re.IGNORECASE)
_COMMA = re.compile(r",\s*(?![^\[]*\])")

_CONVERSIONS = frozenset(("F2F", "F2I", "FRND", "I2F", "I2I", "UF2I", "UI2F"))
_LONG_SOURCES = {  # modifiers that make the source of a conversion 64 bits
    **dict.fromkeys(("F2F", "FRND", "F2I", "UF2I"), frozenset(("F64",))),
    **dict.fromkeys(("I2F", "I2I", "UI2F"), frozenset(("S64", "U64"))),
}
_LONG_RESULTS = {  # those that make its result 64 bits; elsewhere the listing does not say which side is meant
    **dict.fromkeys(("F2I", "UF2I"), frozenset(("S64", "U64"))),
    **dict.fromkeys(("I2F", "UI2F"), frozenset(("F64",))),
}
_LONG_TYPES = frozenset(("F64", "S64", "U64"))
_CONSTANTS = frozenset(("LDC", "LDCU", "ULDC"))
_SUMS = frozenset(("IADD", "IADD3", "MOV", "R2UR", "UIADD3", "UMOV", "UVIADD", "VIADD"))  # of one, two or three
_WORDS = {"64": 2, "128": 4, "256": 8}
_LITERAL_BANK = 2  # what the compiler put there: constants and jump tables
_MAX_WARP = 4  # registers that one load from shared memory or one MMA of a warp writes
_MAX_WARPGROUP = 128  # and one MMA of a warpgroup


class Kind(Enum):
    """How a result depends on the operands: any function, a sum, a multiply-add, or unknown."""

    ANY, SUM, MULTIPLY_ADD, UNKNOWN = range(4)


@dataclass(frozen=True)
class Source:
    """One operand: registers, or a fixed value. ``exact``: the whole first register, not a part of it."""

    registers: tuple[str, ...]
    second: str  # register after the first, for an operand of 64 bits that is read whole; else empty
    exact: bool
    value: tuple[Value, ...]  # of what is no register: the low word, and the high one where it is read


@dataclass(frozen=True)
class Decoded:
    """``written``: registers that hold the result. ``perhaps``: a register that may hold a part of it."""

    kind: Kind
    written: tuple[str, ...] = ()
    perhaps: str = ""
    sources: tuple[Source, ...] = ()
    constants: tuple[Value, ...] = ()  # what a load from constant memory puts into each written register


def split(operands: str) -> list[str]:
    """Split operands at the commas outside of brackets."""
    return [part.strip() for part in _COMMA.split(operands.partition("(*")[0].strip()) if part.strip()]


@functools.lru_cache(maxsize=1 << 14)
def banks(operands: str) -> frozenset[int]:
    """Return the constant banks that are read; -1 for a bank that a register selects."""
    found = frozenset(int(bank, 16) for bank, _ in _BANK.findall(operands))
    return found | {-1} if "cx[" in operands else found


def registers_in(operand: str) -> list[str]:
    """Return the registers that an operand names, without the zero registers."""
    return [file + number for file, number in _REGISTER.findall(operand) if number != "Z"]


def beside(register: str, steps: int = 1) -> str:
    """Return the register ``steps`` after this one."""
    file = register.rstrip("0123456789")
    return f"{file}{int(register[len(file) :]) + steps}"


@functools.lru_cache(maxsize=1 << 16)
def decode(opcode: str, operands: str) -> Decoded | None:
    """Return the effect of an allow-listed instruction on registers; None if it writes none.

    Only moves and sums are modelled exactly. For all others the result is assumed to depend on every operand. This is
    conservative: a register may seem to depend on more than it does, never on less.
    """
    known = opcodes.installed()
    base, *spelled = opcode.split(".")
    modifiers = frozenset(spelled)
    if base in known.acts or base in known.flow:
        return None
    texts = split(operands)
    while texts and _PREDICATE.fullmatch(texts[0]):
        del texts[0]
    if not texts or not _REGISTER.fullmatch(texts[0].partition(".")[0]) or not registers_in(texts[0]):
        return None
    first = registers_in(texts[0])[0]
    # A carry changes a sum by what its low word says: no word of memory comes in through a predicate.
    texts = [text for text in texts[1:] if not _PREDICATE.fullmatch(text)]
    if base not in known.computes:  # memory of this thread or CTA, or a barrier's state
        return Decoded(Kind.UNKNOWN, tuple(beside(first, i) for i in range(_loaded(base, modifiers))))
    if base in _CONSTANTS:
        return _constant_load(first, modifiers, texts)
    pairs = "64" in modifiers or bool(modifiers & _LONG_SOURCES.get(base, frozenset()))
    third = base in ("IMAD", "UIMAD") and bool(modifiers & {"WIDE", "HI"})
    sources = tuple(_source(text, whole=pairs or (third and i == 2)) for i, text in enumerate(texts))
    long = bool(modifiers & {"64", "WIDE"}) or (base == "CS2R" and "32" not in modifiers)
    long |= bool(modifiers & _LONG_RESULTS.get(base, frozenset()))
    unsaid = base in _CONVERSIONS and base not in _LONG_RESULTS and bool(modifiers & _LONG_TYPES)
    perhaps = beside(first) if unsaid and not long else ""
    written = (first, beside(first)) if long else (first,)
    return Decoded(_kind(base, modifiers), written, perhaps, sources)


def _kind(base: str, modifiers: frozenset[str]) -> Kind:
    if base in _SUMS and "X" not in modifiers:
        return Kind.SUM
    if base in ("IMAD", "UIMAD") and modifiers & {"MOV", "IADD", "U32"} and not modifiers & {"WIDE", "HI", "X"}:
        return Kind.MULTIPLY_ADD
    return Kind.ANY


def _loaded(base: str, modifiers: frozenset[str]) -> int:
    """The largest number of registers that are written."""
    if base in ("LDS", "LDL"):
        return max([1, *(_WORDS.get(name, 1) for name in modifiers)])
    return _MAX_WARPGROUP if base.endswith("GMMA") else _MAX_WARP


def _constant_load(first: str, modifiers: frozenset[str], texts: list[str]) -> Decoded:
    found = _BANK.search(" ".join(texts))
    width = max([1, *(_WORDS.get(name, 1) for name in modifiers)])
    values = [_word(found[1], found[2], i) if found else UNKNOWN for i in range(width)]
    if modifiers & {"U8", "S8", "U16", "S16"}:
        values = [combined([value]) for value in values]
    return Decoded(Kind.ANY, tuple(beside(first, i) for i in range(width)), constants=tuple(values))


def _word(bank: str, offset: str, index: int) -> Value:
    """The value of a word of constant memory; UNKNOWN if a register selects the offset."""
    if int(bank, 16) == _LITERAL_BANK:
        return NUMBER
    if int(bank, 16) != 0 or not _HEX.fullmatch(offset.strip()):
        return UNKNOWN
    at = int(offset, 16) + 4 * index
    return word(at) if at % 4 == 0 else combined([word(at - at % 4), word(at - at % 4 + 4)])


def _source(text: str, *, whole: bool) -> Source:
    if bank := _BANK.search(text):
        values = [_word(bank[1], bank[2], i) for i in range(2)]
        low = values[0] if text == bank[0] else combined(values[:1])
        return Source((), "", exact=True, value=(low, values[1]) if whole else (low,))
    if registers := tuple(registers_in(text)):
        exact = _PLAIN.fullmatch(text) is not None
        return Source(registers, beside(registers[0]) if whole else "", exact, ())
    if _ZERO.fullmatch(text):
        value = ZERO
    elif _HEX.fullmatch(text):
        value = constant(int(text, 16))
    elif any(pattern.fullmatch(text) for pattern in (_NUMBER, _SPECIAL)):
        value = NUMBER
    else:
        value = UNKNOWN
    return Source((), "", exact=True, value=(value,))
