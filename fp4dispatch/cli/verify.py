"""``fp4dispatch verify``: disassemble every finished kernel again and print its proof.

The stored proof of a kernel is compared with what the disassembler sees. A kernel without a proof gets one. Then the
self-check verdicts for this machine are printed: of the small problems of each backend, and of each bound layer. Exit
code 1 if a kernel is damaged, unproven or breaks a promise, if a backend failed its self-check, or if there is nothing
to verify.

``--race`` instead runs the race that the barriers prevent, on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp4dispatch.cli import verify_race
from fp4dispatch.cli.answers import answer
from fp4dispatch.cli.demangle import demangled
from fp4dispatch.errors import Fp4DispatchError, ToolchainError
from fp4dispatch.jit import packages, prove
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.compiler.toolchain import Disassembler, disassembler
from fp4dispatch.jit.kernels import caches
from fp4dispatch.jit.prove import KernelProof, Proof
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.jit.store.entries import Entry, damage
from fp4dispatch.machine import system as machine

if TYPE_CHECKING:
    from fp4dispatch.cli import Subparsers
    from fp4dispatch.trust.verdict import CheckResult


@dataclass(frozen=True)
class Checked:
    """One cache entry with its proof and all its faults."""

    entry: Entry
    proof: Proof | None
    faults: tuple[str, ...]

    @property
    def pdl_allowed(self) -> bool:
        """Whether this binary may be launched with PDL."""
        return not self.faults and self.proof is not None and self.proof.pdl_allowed(self.entry.request)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "name": self.entry.name,
            "folder": str(self.entry.folder),
            "ok": not self.faults,
            "pdl_allowed": self.pdl_allowed,
            "faults": list(self.faults),
            "proof": dataclasses.asdict(self.proof) if self.proof else None,
        }


def add_parser(subparsers: Subparsers) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("verify", help="prove the finished kernels again", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    verify_race.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Check and print every entry and verdict; 0 if all are sound and proven."""
    if args.race:
        return verify_race.run(args)
    if args.rounds is not None or args.requests is not None:
        args.wrong_usage("--rounds and --requests are about the race: add --race")
    note = ""
    tools: Disassembler | None = None
    try:
        tools = disassembler(installed().common.minimum["disassembler"])
    except ToolchainError as error:
        note = str(error)
    searched = caches()
    checked = [check(cache, entry, tools) for cache in searched for entry in cache.entries()]
    verdicts, unread = selfchecks()
    ok = bool(checked) and not any(row.faults for row in checked) and all(verdict.usable for verdict in verdicts)
    if args.json:
        plain = {"entries": [row.to_dict() for row in checked], "selfcheck": [v.to_dict() for v in verdicts]}
        answer(json.dumps({"ok": ok, "note": note, "selfcheck_note": unread, **plain}, indent=2))
        return 0 if ok else 1
    if note:
        print(f"only stored proofs are shown: {note}")
    names = demangled(kernel.name for row in checked if row.proof for kernel in row.proof.kernels)
    for row in checked:
        print(text(row, names))
    for line in packages.ignored():
        print(line)
    if not checked:
        print(f"no finished kernel in {', '.join(str(cache.root) for cache in searched)}")
        print("  fix: fp4dispatch build --arch 12.0 (or any capability)")
    for verdict in verdicts:
        print(verdict_text(verdict))
    if unread:
        print(unread)
    return 0 if ok else 1


def selfchecks() -> tuple[tuple[CheckResult, ...], str]:
    """Return the self-check verdicts for this machine, or why they cannot be read without torch."""
    try:
        import fp4dispatch.dispatch.here  # noqa: F401  (tells system.current() what is proven; verdicts depend on it)
        from fp4dispatch.trust import selfcheck
    except ImportError as error:
        return (), f"self-check: not shown, it needs torch ({error})"
    return selfcheck.results(machine.current()), ""


def verdict_text(verdict: CheckResult) -> str:
    """Return one verdict as text: one line, then every finding of a failed one."""
    findings = [f"    FAULT {finding}" for finding in verdict.findings]
    return "\n".join([f"self-check: {verdict.text()}", *findings])


def check(cache: Cache, entry: Entry, tools: Disassembler | None) -> Checked:
    """Verify one entry: its hash, its stored proof and, with a disassembler, a new proof."""
    try:
        if fault := damage(entry):
            return Checked(entry, None, (fault,))
        stored = prove.read(entry)
        seen = prove.prove(entry.library, entry.request, tools) if tools else stored
        if seen is None:
            return Checked(entry, None, ("not proven: it will run without PDL",))
        faults = seen.faults(entry.request)
        if stored is None and not faults:
            cache.add_proof(entry, seen.to_json())
        elif stored is not None and stored.kernels != seen.kernels:
            faults.append("the stored proof is not what the disassembler sees")
    except Fp4DispatchError as error:
        return Checked(entry, None, (str(error),))
    return Checked(entry, seen, tuple(faults))


def text(row: Checked, names: Mapping[str, str] | None = None) -> str:
    """Return one entry as text: one line, then one line per kernel and per fault; ``names`` are the readable ones."""
    state = "FAILED" if row.faults else "proven"
    lines = [f"{row.entry.name}  {state}{', PDL allowed' if row.pdl_allowed else ''}"]
    readable = names or {}
    kernels = row.proof.kernels if row.proof else ()
    lines += [f"    {_line(kernel)}  {readable.get(kernel.name, kernel.short)}" for kernel in kernels]
    lines += [f"    FAULT {fault}" for fault in row.faults]
    return "\n".join(lines)


def _line(kernel: KernelProof) -> str:
    mma = ", ".join(f"{opcode} x{count}" for opcode, count in kernel.mma.items()) or "no tensor-core instruction"
    order = f", {len(kernel.unguarded)} BEFORE THE BARRIER" if kernel.unguarded else ""
    return (
        f"ACQBULK {kernel.wait}, PREEXIT {kernel.signal}{order}; {mma}; {kernel.registers} registers, "
        f"{kernel.spills} spill instructions, {kernel.shared} B static shared memory"
    )
