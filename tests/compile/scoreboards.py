"""Which loads from shared memory are under way where a warp arrives at a barrier, read from machine code.

An instruction has 128 bits. Control bits start at bit 105: 4 of stall, 1 of yield, 3 each of the scoreboard that it
releases when its result or its operands are done, and 6 for the scoreboards that it waits for first
(https://arxiv.org/abs/1804.06826, section 2.1; the same since Volta).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CODE = re.compile(
    r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?)\s*;\s+/\* 0x([0-9a-f]+) \*/\n\s+/\* 0x([0-9a-f]+) \*/", re.MULTILINE
)
_NONE = 7
ARRIVALS = "SYNCS.ARRIVE", "ATOMS.ARRIVE", "UCGABAR_ARV"
"""At a barrier in shared memory, from sm_90 on and before, and at that of a cluster."""


class Instruction(NamedTuple):
    """``writes``: the scoreboard that its result releases, or 7. ``waits``: a bit for each scoreboard."""

    address: int
    text: str
    writes: int
    waits: int

    @property
    def name(self) -> str:
        """Name, without a predicate."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]


def functions(cuobjdump: Path, library: Path) -> Iterator[tuple[str, list[Instruction]]]:
    """Yield the kernels of a library, by name."""
    text = subprocess.run([cuobjdump, "-sass", library], capture_output=True, text=True, check=True).stdout
    for part in re.split(r"\n\s+Function : ", text)[1:]:
        name, _, body = part.partition("\n")
        yield name, list(read(body))


def read(listing: str) -> Iterator[Instruction]:
    """Yield the instructions of one function of ``cuobjdump -sass``."""
    for address, text, _, high in _CODE.findall(listing):
        control = int(high, 16) >> (105 - 64)
        yield Instruction(int(address, 16), text, control >> 5 & 7, control >> 11 & 63)


def loads_under_way(code: list[Instruction]) -> dict[int, list[int]]:
    """Return, by the address of an arrival at a barrier, the loads from shared memory that may be under way there."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    seen: dict[int, frozenset[tuple[int, int]]] = {}
    found: dict[int, set[int]] = {}
    work = [(0, frozenset[tuple[int, int]]())]
    while work:
        i, loads = work.pop()
        while i < len(code):
            if i in seen and loads <= seen[i]:
                break
            seen[i] = loads = loads | seen.get(i, frozenset())
            here = code[i]
            loads = frozenset(load for load in loads if not here.waits >> load[1] & 1)
            if here.name.startswith(ARRIVALS) and loads:
                found.setdefault(here.address, set()).update(address for address, _ in loads)
            if here.name.startswith("LDS") and here.writes != _NONE:
                loads |= {(here.address, here.writes)}
            if here.name.startswith("BRA"):
                if (target := re.search(r"0x([0-9a-f]+)", here.text)) and int(target[1], 16) in index:
                    work.append((index[int(target[1], 16)], loads))
                if not here.text.startswith("@"):
                    break
            if here.name.startswith(("EXIT", "RET")) and not here.text.startswith("@"):
                break
            i += 1
    return {address: sorted(loads) for address, loads in found.items()}
