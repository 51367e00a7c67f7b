"""Reads a compiled library's machine code and records what is really in it.

Flags say what should be there; only the binary says what is. A proof lists, for every kernel of a library, the barriers
(``ACQBULK`` waits for the previous grid, ``PREEXIT`` lets the next one start), global accesses that some path reaches
before the wait, tensor-core instructions, registers, spills and shared memory. It is bound to the library by hash: no
proof of that very file, no PDL launch.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp4dispatch.errors import ProofError, ToolchainError
from fp4dispatch.jit import barrier_order, guard, private
from fp4dispatch.jit.cache import PROOF, Entry, digest
from fp4dispatch.jit.toolchain import Disassembler
from fp4dispatch.settings import settings

SCHEMA = 1
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)")
_ELF_ARCH = re.compile(r"^arch = (sm_\w+)$", re.MULTILINE)
_RESOURCES = re.compile(r"^ Function (\S+):\n\s+(.+)$", re.MULTILINE)
_SPILLS = ("STL", "LDL")  # stores to and loads from local memory


@dataclass(frozen=True)
class KernelProof:
    """One kernel of a library.

    ``wait``, ``signal`` and ``spills`` count instructions; ``mma`` counts tensor-core opcodes; ``unguarded`` are
    accesses of global memory that can run before the wait; ``registers`` are per thread, ``stack``, ``shared`` (static)
    and ``local`` in bytes.
    """

    name: str
    wait: int
    signal: int
    mma: Mapping[str, int]
    unguarded: tuple[str, ...]
    spills: int
    registers: int
    stack: int
    shared: int
    local: int

    @property
    def short(self) -> str:
        """The mangled name, cut for people; CUTLASS's run to thousands of characters."""
        return self.name if len(self.name) <= 80 else f"{self.name[:77]}..."


@dataclass(frozen=True)
class Proof:
    """What the disassembler saw in one library, whose SHA-256 is ``library_sha256``."""

    library_sha256: str
    archs: tuple[str, ...]
    disassembler: str
    kernels: tuple[KernelProof, ...]

    def faults(self, request: Mapping[str, Any]) -> list[str]:
        """Return every promise of a build request that the binary breaks; empty means that it is proven."""
        needed = f"sm_{request['target']}"
        found = [] if self.archs == (needed,) else [f"machine code is for {', '.join(self.archs)}, not for {needed}"]
        if not self.kernels:
            found.append("the library holds no kernel")
        for kernel in self.kernels:
            if request["mma"] and not any(re.match(request["mma"], opcode) for opcode in kernel.mma):
                seen = ", ".join(kernel.mma) or "none"
                found.append(f"{kernel.short}: no tensor-core instruction {request['mma']} (found: {seen})")
            if request["pdl"]:
                found += _barrier_faults(kernel)
        return found

    def pdl_allowed(self, request: Mapping[str, Any]) -> bool:
        """Whether a launch may carry the PDL attribute: asked for, and nothing stands against it."""
        return bool(request["pdl"]) and not self.faults(request)

    def to_json(self) -> bytes:
        """Return the text of ``proof.json``."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1).encode()


def _barrier_faults(kernel: KernelProof) -> list[str]:
    if not kernel.wait:
        return [f"{kernel.short}: no grid barrier (ACQBULK): it would race with the previous kernel under PDL"]
    if kernel.unguarded:
        count, first = len(kernel.unguarded), kernel.unguarded[0]
        return [f"{kernel.short}: {count} accesses of global memory can run before the grid barrier, e.g. {first}"]
    return []


def read(entry: Entry) -> Proof | None:
    """Return an entry's proof; None where it is absent, malformed or of another library: then nothing is proven."""
    try:
        data = json.loads(private.read(entry.folder / PROOF, trusted=entry.installed))
        if data.pop("schema") != SCHEMA or data["library_sha256"] != entry.library_sha256:
            return None
        kernels = tuple(
            KernelProof(**{**row, "mma": dict(row["mma"]), "unguarded": tuple(row["unguarded"])})
            for row in data.pop("kernels")
        )
        proof = Proof(**{**data, "kernels": kernels, "archs": tuple(data["archs"])})
        _check_types(proof)
    except guard.UNREADABLE:
        return None
    return proof


def _check_types(proof: Proof) -> None:
    numbers = ("wait", "signal", "spills", "registers", "stack", "shared", "local")
    for kernel in proof.kernels:
        counts = [*(getattr(kernel, name) for name in numbers), *kernel.mma.values()]
        if not isinstance(kernel.name, str) or any(type(count) is not int for count in counts):
            raise TypeError(kernel.name)


def prove(library: Path, request: Mapping[str, Any], tools: Disassembler) -> Proof:
    """Disassemble a library.

    Parameters
    ----------
    library
        Shared library with machine code for one target.
    request
        The build request: ``expect_sass`` holds the opcodes to look for, ``pdl`` whether barriers matter,
        ``before_wait``, where it is there, what may come before them.
    tools
        Where ``cuobjdump`` and ``nvdisasm`` are.

    Raises
    ------
    ToolchainError
        Where the disassembler fails.
    ProofError
        Where its output cannot be understood. Broken promises are not raised here but returned by
        :meth:`Proof.faults`.
    """
    library = library.resolve()
    resources = _run(tools, tools.cuobjdump, "--dump-resource-usage", str(library))
    usage = {name: _numbers(line) for name, line in _RESOURCES.findall(resources)}
    with tempfile.TemporaryDirectory(prefix="fp4dispatch-") as folder:
        _run(tools, tools.cuobjdump, "--extract-elf", "all", str(library), cwd=folder)
        texts = [_run(tools, tools.nvdisasm, "-c", str(cubin)) for cubin in sorted(Path(folder).glob("*.cubin"))]
    kernels: list[KernelProof] = []
    for sass in texts:
        opcodes = _opcodes(sass)
        unguarded = _unguarded(sass, request.get("before_wait", ())) if request["pdl"] and opcodes else {}
        kernels += [_kernel(name, seen, unguarded, usage, request) for name, seen in opcodes.items()]
    if {kernel.name for kernel in kernels} != set(usage):
        raise ProofError(
            f"{library}: the disassembler lists kernels {sorted(usage)} but code of {[k.name for k in kernels]}"
        )
    archs = tuple(sorted(set(_ELF_ARCH.findall(resources))))
    return Proof(digest(library), archs, tools.version, tuple(kernels))


def _kernel(
    name: str,
    opcodes: Counter[str],
    unguarded: Mapping[str, list[str]],
    usage: Mapping[str, Mapping[str, int]],
    request: Mapping[str, Any],
) -> KernelProof:
    expect = request["expect_sass"]

    def count(role: str) -> int:
        return sum(n for opcode, n in opcodes.items() if role in expect and re.match(expect[role], opcode))

    numbers = usage.get(name, {})
    return KernelProof(
        name=name,
        wait=count("wait"),
        signal=count("signal"),
        mma={opcode: n for opcode, n in sorted(opcodes.items()) if re.match(expect["mma"], opcode)},
        unguarded=tuple(unguarded.get(name, ())),
        spills=sum(n for opcode, n in opcodes.items() if opcode.split(".")[0] in _SPILLS),
        registers=numbers.get("REG", 0),
        stack=numbers.get("STACK", 0),
        shared=numbers.get("SHARED", 0),
        local=numbers.get("LOCAL", 0),
    )


def _opcodes(sass: str) -> dict[str, Counter[str]]:
    """Count the opcodes of every kernel in the text of ``nvdisasm -c``."""
    kernels: dict[str, Counter[str]] = {}
    current: Counter[str] | None = None
    for line in sass.splitlines():
        if section := _SECTION.match(line):
            current = kernels.setdefault(section[1], Counter())
        elif current is not None and (found := _OPCODE.match(line)):
            current[found[1]] += 1
    return {name: seen for name, seen in kernels.items() if seen}


def _unguarded(sass: str, before_wait: Collection[str]) -> dict[str, list[str]]:
    try:
        accesses = barrier_order.unguarded_accesses(sass, before_wait)
    except ValueError as error:
        raise ProofError(f"the order of barrier and memory accesses cannot be read from the binary: {error}") from error
    found: dict[str, list[str]] = {}
    for access in accesses:
        found.setdefault(access.kernel, []).append(f"0x{access.address:x} {access.instruction}")
    return found


def _numbers(line: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", line)}


def _run(tools: Disassembler, *command: str | Path, cwd: str | None = None) -> str:
    # cuobjdump starts nvdisasm and looks for it here: https://docs.nvidia.com/cuda/cuda-binary-utilities/
    environment = {**settings.environment(), "NVDISASM_PATH": str(tools.nvdisasm.parent), "LC_ALL": "C"}
    try:
        answer = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, check=False, cwd=cwd, env=environment
        )
    except OSError as error:
        raise ToolchainError(f"{command[0]} cannot be run: {error}") from error
    if answer.returncode:
        said = (answer.stderr or answer.stdout).strip().splitlines()[:3]
        raise ToolchainError(
            f"{Path(command[0]).name} {tools.version} failed: {' '.join(said)}\n"
            "  fix: pip install -U nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    return answer.stdout
