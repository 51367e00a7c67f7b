"""Reads the machine code of a compiled library and records what is in it.

Flags say what should be there; only the binary shows what is. For every kernel of a library a proof lists the barriers
(``ACQBULK`` waits for the previous grid, ``PREEXIT`` lets the next one start), forbidden instructions before the wait
(:mod:`fp4dispatch.jit.sass`), tensor-core instructions, registers, spills and shared memory. A proof is bound by hash
to the library and to the prover. Without a proof of this file by this prover there is no PDL launch.
"""

from __future__ import annotations

import functools
import json
import re
import stat
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp4dispatch.errors import FlagsError, ProofError, ToolchainError
from fp4dispatch.jit.catalog.early_loads import EarlyLoads
from fp4dispatch.jit.compiler.toolchain import Disassembler
from fp4dispatch.jit.sass import judge, listing, parameters
from fp4dispatch.jit.store import private
from fp4dispatch.jit.store.digests import digest, sources_sha256
from fp4dispatch.jit.store.entries import PROOF, Entry
from fp4dispatch.settings import settings

SCHEMA = 2
_ELF_ARCH = re.compile(r"^arch = (sm_\w+)$", re.MULTILINE)
_RESOURCES = re.compile(r"^ Function (\S+):\n\s+(.+)$", re.MULTILINE)
_SPILLS = ("STL", "LDL")  # stores to and loads from local memory
_PROVER = ("jit/prove.py", "jit/catalog/early_loads.py", "strict_toml.py", "jit/sass")
"""The files and the folder of the prover, below the package."""


@dataclass(frozen=True)
class KernelProof:
    """One kernel of a library.

    ``wait``, ``signal`` and ``spills`` count instructions; ``mma`` counts tensor-core opcodes. ``unguarded`` lists the
    forbidden instructions that can run before the wait, with the reason. ``early`` lists the declared loads of weights
    before it, with the source of their addresses. ``registers`` are per thread; ``stack``, ``shared`` (static) and
    ``local`` are bytes.
    """

    name: str
    wait: int
    signal: int
    mma: Mapping[str, int]
    unguarded: tuple[str, ...]
    early: tuple[str, ...]
    spills: int
    registers: int
    stack: int
    shared: int
    local: int

    @property
    def short(self) -> str:
        """The mangled name, at most 80 characters; CUTLASS's have thousands."""
        return self.name if len(self.name) <= 80 else f"{self.name[:77]}..."


@dataclass(frozen=True)
class Proof:
    """What the disassembler saw in one library.

    ``library_sha256`` is the library's hash, ``prover_sha256`` that of the code and data which made the proof.
    """

    library_sha256: str
    prover_sha256: str
    archs: tuple[str, ...]
    disassembler: str
    kernels: tuple[KernelProof, ...]

    def faults(self, request: Mapping[str, Any]) -> list[str]:
        """Return every promise of a build request that the binary breaks; empty if the binary is proven."""
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
        """Whether a launch may use PDL: the request asks for it, and the binary has no fault."""
        return bool(request["pdl"]) and not self.faults(request)

    def to_json(self) -> bytes:
        """Return the text of ``proof.json``."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1).encode()


def _barrier_faults(kernel: KernelProof) -> list[str]:
    if not kernel.wait:
        return [f"{kernel.short}: no grid barrier (ACQBULK): it would race with the previous kernel under PDL"]
    if kernel.unguarded:
        count, first = len(kernel.unguarded), kernel.unguarded[0]
        return [f"{kernel.short}: {count} instructions stand before the grid barrier that may not, e.g. {first}"]
    return []


@functools.cache
def prover_sha256() -> str:
    """Return the hash of the prover: the code and data that decide what a proof says.

    Raises
    ------
    CacheError
        If a part of the prover is missing.
    """
    package = Path(__file__).parents[1]
    return sources_sha256(package / name for name in _PROVER)


def read(entry: Entry) -> Proof | None:
    """Return an entry's proof; None if it is absent, malformed, of another library or by another prover.

    Raises
    ------
    CacheError
        If another user could have written it.
    """
    path = entry.folder / PROOF
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        raw = private.read(path, trusted=entry.installed)
    except FileNotFoundError:
        return None
    try:
        data = json.loads(raw)
        made_by = (data.pop("schema"), data["prover_sha256"], data["library_sha256"])
        if made_by != (SCHEMA, prover_sha256(), entry.library_sha256):
            return None
        kernels = tuple(
            KernelProof(**{**row, "unguarded": tuple(row["unguarded"]), "early": tuple(row["early"])})
            for row in data.pop("kernels")
        )
        proof = Proof(**{**data, "kernels": kernels, "archs": tuple(data["archs"])})
        _check_types(proof)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return proof


def _check_types(proof: Proof) -> None:
    numbers = ("wait", "signal", "spills", "registers", "stack", "shared", "local")
    for kernel in proof.kernels:
        counts = [*(getattr(kernel, name) for name in numbers), *kernel.mma.values()]
        rows = (*kernel.unguarded, *kernel.early)
        if not all(isinstance(text, str) for text in (kernel.name, *rows)) or any(type(n) is not int for n in counts):
            raise TypeError(kernel.name)


def prove(library: Path, request: Mapping[str, Any], tools: Disassembler) -> Proof:
    """Disassemble a library.

    Parameters
    ----------
    library
        Shared library with machine code for one target.
    request
        The build request: ``expect_sass`` holds the opcodes to look for, ``pdl`` whether barriers matter,
        ``before_wait``, where it is there, the loads that may come before them.
    tools
        Where ``cuobjdump`` and ``nvdisasm`` are.

    Raises
    ------
    ToolchainError
        If the disassembler fails, or there is no disk space for its output.
    ProofError
        If its output cannot be parsed. Broken promises are not raised here; :meth:`Proof.faults` returns them.
    """
    library = library.resolve()
    resources = _run(tools, tools.cuobjdump, "--dump-resource-usage", str(library))
    usage = {name: _numbers(line) for name, line in _RESOURCES.findall(resources)}
    kernels = [
        _kernel(code, arguments.get(code.name), usage, request)
        for sass, arguments in _disassembled(library, tools)
        for code in _listed(sass)
    ]
    if {kernel.name for kernel in kernels} != set(usage):
        raise ProofError(
            f"{library}: the disassembler lists kernels {sorted(usage)} but code of {[k.name for k in kernels]}"
        )
    archs = tuple(sorted(set(_ELF_ARCH.findall(resources))))
    return Proof(digest(library), prover_sha256(), archs, tools.version, tuple(kernels))


def _disassembled(library: Path, tools: Disassembler) -> list[tuple[str, dict[str, parameters.Parameters]]]:
    """Return the listing of each cubin in a library, and the argument layout of its kernels."""
    try:
        with tempfile.TemporaryDirectory(prefix="fp4dispatch-") as folder:
            _run(tools, tools.cuobjdump, "--extract-elf", "all", str(library), cwd=folder)
            cubins = [path for path in sorted(Path(folder).glob("*.cubin")) if _holds_code(path)]
            return [(_run(tools, tools.nvdisasm, "-c", str(cubin)), _parameters(cubin)) for cubin in cubins]
    except OSError as error:
        raise ToolchainError(
            f"{library} cannot be disassembled in {tempfile.gettempdir()}: {error}\n"
            "  fix: free some space there, or set TMPDIR to a folder with room"
        ) from error


def _holds_code(cubin: Path) -> bool:
    """Whether a cubin holds code; True if it cannot be read, so that the disassembler reports the fault."""
    try:
        return parameters.holds_code(cubin.read_bytes())
    except ValueError:
        return True


def _parameters(cubin: Path) -> dict[str, parameters.Parameters]:
    """Argument layout by kernel; empty if it cannot be read, so that no address can be traced and early loads fail."""
    try:
        return parameters.parse(cubin.read_bytes())
    except ValueError:
        return {}


def _listed(sass: str) -> list[listing.Kernel]:
    try:
        return listing.parse(sass)
    except ValueError as error:
        raise ProofError(f"the machine code cannot be read from the disassembler's listing: {error}") from error


def _kernel(
    code: listing.Kernel,
    arguments: parameters.Parameters | None,
    usage: Mapping[str, Mapping[str, int]],
    request: Mapping[str, Any],
) -> KernelProof:
    expect = request["expect_sass"]
    opcodes = Counter(instruction.opcode for instruction in code.instructions)

    def count(role: str) -> int:
        return sum(n for opcode, n in opcodes.items() if role in expect and re.match(expect[role], opcode))

    try:
        declared = EarlyLoads.of_request(request)
        found = judge.judge(code, arguments, declared) if request["pdl"] else judge.Judgement()
    except (ValueError, FlagsError) as error:
        raise ProofError(f"what comes before the grid barrier cannot be judged: {error}") from error
    numbers = usage.get(code.name, {})
    return KernelProof(
        name=code.name,
        wait=count("wait"),
        signal=count("signal"),
        mma={opcode: n for opcode, n in sorted(opcodes.items()) if re.match(expect["mma"], opcode)},
        unguarded=tuple(found.refused),
        early=tuple(found.accepted),
        spills=sum(n for opcode, n in opcodes.items() if opcode.split(".")[0] in _SPILLS),
        registers=numbers.get("REG", 0),
        stack=numbers.get("STACK", 0),
        shared=numbers.get("SHARED", 0),
        local=numbers.get("LOCAL", 0),
    )


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
