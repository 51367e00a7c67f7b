"""Compares the machine code of kernels before and after a change: ``python -m tests.machine_code BEFORE AFTER``.

BEFORE and AFTER are kernel caches, folders that ``fp4dispatch build --out`` made, folders of ``.so`` and ``.cubin``
files, or two such files. Builds are matched by name (``w4a16_small/bf16-90a``; without ``entry.json`` by path), kernels
by symbol.

Two kernels are equal where these are:

* every instruction with all its bits, which ``nvdisasm -hex`` lists: opcode, operands, scheduling;
* the constants that they load (``.nv.constant1`` and up, ``.nv.global.init``);
* registers, stack, shared and local memory and the size of their arguments (``cuobjdump --dump-resource-usage``).

Five things are normalised in the text, and nothing else: where a kernel lies in its file, the numbers of labels and of
functions that the compiler adds (``$__internal_5_$__cuda_sm20_rcp_rz_f32_slowpath``), which count through the whole
file, the kernel's own symbol, and the hashes of a build in names of internal linkage
(``_INTERNAL_<hash>_16_fp8_gemm_sm90_cu_<hash>``). ``--renamed`` also pairs kernels of a build whose symbols
differ, such as after a change of namespaces or template arguments: those with the same machine code are equal.

Exit code 0: all equal. 1: something differs, or is on one side only. 2: nothing was compared.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp4dispatch.errors import ToolchainError
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.compiler.toolchain import Disassembler, disassembler

_SUFFIXES = (".so", ".cubin")
_SECTION = re.compile(r"^\s*\.section\s+([^,\s]+)")
_LABEL = re.compile(r"^(\.L_[\w$]+):\s*$")
_MODULE = re.compile(r"(_INTERNAL|_GLOBAL__N_)_[0-9a-f]{8}(_\d+_\w+?_cu)_[0-9a-f]{8}")
_LABEL_USE = re.compile(r"\.L_[\w$]+")
_ADDED = re.compile(r"(?<=\$__internal_)\d+(?=_\$)")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+([^.\s].*?)\s*/\* (0x[0-9a-f]{16}) \*/\s*$")
_REST = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/\s*$")
_LOOKS_LIKE_CODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/")
_DATA = re.compile(r"^\s*(?:/\*[0-9a-f]{4,}\*/)?\s*(\.(?:byte|short|word|dword|zero|string)\s.*?)\s*$")
_CONSTANTS = re.compile(r"^\.nv\.(constant[1-9]\d*|global\.init)(?:\.(.+))?$")
_RESOURCES = re.compile(r"^ Function (\S+):\n\s+(.+)$", re.MULTILINE)
EQUAL, DIFFERENT, MISSING, NEW = "equal", "DIFFERENT", "MISSING", "NEW"


class Incomparable(Exception):
    """What was given cannot be read as machine code."""


@dataclass(frozen=True)
class Code:
    """One kernel. ``instructions``: text and bits of each. ``constants``, ``resources``: rows of text."""

    name: str
    instructions: tuple[tuple[str, str], ...]
    constants: tuple[str, ...] = ()
    resources: str = ""


@dataclass(frozen=True)
class Row:
    """One line of the table. ``note``: what differs first, or the other name of a renamed kernel."""

    build: str
    kernel: str
    verdict: str
    note: str = ""


# ------------------------------------------------------------------------------------------------ reading a listing


def parse(listing: str, resources: Mapping[str, str] | None = None) -> dict[str, Code]:
    """Return the kernels in a listing of ``nvdisasm -hex`` by symbol.

    Raises
    ------
    Incomparable
        Where a line of code cannot be read: what is not read is not compared.
    """
    text, data = _split(_MODULE.sub(r"\1\2", listing))
    resources = resources or {}
    shared = [row for (_, kernel), rows in data.items() if kernel is None for row in rows]
    return {
        name: Code(
            name,
            tuple(_instructions(name, lines)),
            (*(row for (_, kernel), rows in data.items() if kernel == name for row in rows), *shared),
            resources.get(name, ""),
        )
        for name, lines in text.items()
        if any(_LOOKS_LIKE_CODE.match(line) for line in lines)
    }


def _split(listing: str) -> tuple[dict[str, list[str]], dict[tuple[str, str | None], list[str]]]:
    """Return the lines of each ``.text`` section, and the data of each section of constants, of a kernel or of all."""
    text: dict[str, list[str]] = {}
    data: dict[tuple[str, str | None], list[str]] = {}
    lines: list[str] | None = None
    rows: list[str] | None = None
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            name, lines, rows = section[1], None, None
            if name.startswith(".text."):
                lines = text.setdefault(name[len(".text.") :], [])
            elif constants := _CONSTANTS.match(name):
                rows = data.setdefault((constants[1], constants[2]), [f"section {constants[1]}"])
        elif lines is not None:
            lines.append(line)
        elif rows is not None and (found := _DATA.match(line)):
            rows.append(_LABEL_USE.sub(".L", found[1]))
    return text, data


def _instructions(name: str, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    labels: dict[str, str] = {}
    added: dict[str, str] = {}

    def short(text: str) -> str:
        text = _ADDED.sub(lambda found: added.setdefault(found[0], str(len(added))), text)
        text = _LABEL_USE.sub(lambda found: labels.setdefault(found[0], f"L{len(labels)}"), text)
        return text.replace(name, "KERNEL")

    pending: tuple[str, str] | None = None
    for line in lines:
        if found := _INSTRUCTION.match(line):
            if pending is not None:
                raise Incomparable(f"{name}: the second half of this instruction is missing: {pending[0]}")
            pending = short(" ".join(found[2].split())), found[3]
        elif rest := _REST.match(line):
            if pending is None:
                raise Incomparable(f"{name}: bits without an instruction: {line.strip()}")
            yield pending[0], f"{pending[1]} {rest[1]}"
            pending = None
        elif label := _LABEL.match(line):
            short(label[1])
        elif _LOOKS_LIKE_CODE.match(line):
            raise Incomparable(f"{name}: this line of code cannot be read: {line.strip()}")
    if pending is not None:
        raise Incomparable(f"{name}: the second half of this instruction is missing: {pending[0]}")


# ------------------------------------------------------------------------------------------------ comparing


def difference(before: Code, after: Code) -> str:
    """Return what differs first between two kernels; empty where they are equal."""
    for i, (old, new) in enumerate(zip(before.instructions, after.instructions, strict=False)):
        if old[0] != new[0]:
            return f"instruction {i}: {old[0]} -> {new[0]}"
        if old[1] != new[1]:
            return f"instruction {i}, bits of {old[0]}: {old[1]} -> {new[1]}"
    if len(before.instructions) != len(after.instructions):
        return f"{len(before.instructions)} -> {len(after.instructions)} instructions"
    for old_row, new_row in zip(before.constants, after.constants, strict=False):
        if old_row != new_row:
            return f"constants: {old_row} -> {new_row}"
    if len(before.constants) != len(after.constants):
        return f"constants: {len(before.constants)} -> {len(after.constants)} rows"
    if before.resources != after.resources:
        return f"resources: {before.resources} -> {after.resources}"
    return ""


def compare(build: str, before: Mapping[str, Code], after: Mapping[str, Code], *, renamed: bool = False) -> list[Row]:
    """Return a row for every kernel of a build, on whichever side it is."""
    rows = []
    for name in before.keys() & after.keys():
        note = difference(before[name], after[name])
        rows.append(Row(build, name, DIFFERENT if note else EQUAL, note))
    gone = {name: before[name] for name in sorted(before.keys() - after.keys())}
    new = {name: after[name] for name in sorted(after.keys() - before.keys())}
    if renamed:
        rows += _pair(build, gone, new)
    rows += [Row(build, name, MISSING, "only in BEFORE") for name in gone]
    rows += [Row(build, name, NEW, "only in AFTER") for name in new]
    return sorted(rows, key=lambda row: row.kernel)


def _pair(build: str, gone: dict[str, Code], new: dict[str, Code]) -> Iterator[Row]:
    """Take out of both what is the same code under another name, and the last two, whatever they are."""
    for old in list(gone):
        for name in list(new):
            if not difference(gone[old], new[name]):
                yield Row(build, old, EQUAL, f"renamed to {name}")
                del gone[old], new[name]
                break
    if len(gone) == len(new) == 1:
        (old, code), (name, other) = gone.popitem(), new.popitem()
        yield Row(build, old, DIFFERENT, f"renamed to {name}; {difference(code, other)}")


# ------------------------------------------------------------------------------------------------ reading files


def builds(path: Path) -> dict[str, Path]:
    """Return the libraries at a path by name of build.

    Raises
    ------
    Incomparable
        Where there is none, or two are of one build, as in a cache that was filled from several versions of a source.
    """
    if path.is_file():
        return {"": path}
    found: dict[str, Path] = {}
    entries = {entry.parent: _name(entry) for entry in sorted(path.rglob("entry.json"))}
    for file in sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES):
        name = entries.get(file.parent) or str(file.relative_to(path).with_suffix(""))
        if name in found:
            raise Incomparable(f"{found[name]} and {file} are both {name}; build each version into a folder of its own")
        found[name] = file
    if not found:
        raise Incomparable(f"{path} holds no {' and no '.join(_SUFFIXES)} file")
    return found


def _name(entry: Path) -> str:
    request = json.loads(entry.read_text())["request"]
    return f"{request['kernel']}/{request['variant']}-{request['target']}"


def read(file: Path, tools: Disassembler) -> dict[str, Code]:
    """Disassemble a library or cubin; Incomparable where it holds no kernel, or two of one name."""
    file = file.resolve()
    resources = dict(_RESOURCES.findall(_run(tools, tools.cuobjdump, "--dump-resource-usage", file)))
    with tempfile.TemporaryDirectory() as folder:
        cubins = [file]
        if file.suffix != ".cubin":
            _run(tools, tools.cuobjdump, "--extract-elf", "all", file, cwd=folder)
            cubins = sorted(Path(folder).glob("*.cubin"))
        listings = [_run(tools, tools.nvdisasm, "-hex", cubin) for cubin in cubins]
    found: dict[str, Code] = {}
    for kernels in (parse(listing, resources) for listing in listings):
        if twice := found.keys() & kernels.keys():
            raise Incomparable(f"{file} holds {', '.join(twice)} twice, for several GPUs")
        found |= kernels
    if resources.keys() - found.keys() or not found:
        raise Incomparable(f"{file}: the disassembler lists code of {sorted(found)}, kernels are {sorted(resources)}")
    return found


def _run(tools: Disassembler, *command: str | Path, cwd: str | None = None) -> str:
    environment = {"NVDISASM_PATH": str(tools.nvdisasm.parent), "LC_ALL": "C"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=environment)
    if done.returncode:
        raise Incomparable(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout).strip()[:300]}")
    return done.stdout


# ------------------------------------------------------------------------------------------------ the command


def compare_paths(before: Path, after: Path, *, only: str = "*", renamed: bool = False) -> list[Row]:
    """Compare all builds at two paths whose names fit a pattern; ToolchainError without a disassembler."""
    old, new = builds(before), builds(after)
    tools = disassembler(installed().common.minimum["disassembler"])
    rows = []
    for name in sorted(name for name in old.keys() | new.keys() if fnmatch.fnmatch(name, only)):
        if name not in new:
            rows.append(Row(name, "(all)", MISSING, "only in BEFORE"))
        elif name not in old:
            rows.append(Row(name, "(all)", NEW, "only in AFTER"))
        else:
            rows += compare(name, read(old[name], tools), read(new[name], tools), renamed=renamed)
    return rows


def exit_code(rows: Sequence[Row]) -> int:
    """Return 0 where all are equal, 1 where one is not, 2 where no kernel was on both sides."""
    if not any(row.verdict in (EQUAL, DIFFERENT) for row in rows):
        return 2
    return int(any(row.verdict != EQUAL for row in rows))


def _print(rows: Sequence[Row], *, brief: bool) -> None:
    for build in dict.fromkeys(row.build for row in rows):
        mine = [row for row in rows if row.build == build]
        print(f"{build or 'file'}: {sum(row.verdict == EQUAL for row in mine)} of {len(mine)} equal")
        for row in mine:
            if not (brief and row.verdict == EQUAL):
                name = row.kernel if len(row.kernel) <= 90 else f"{row.kernel[:87]}..."
                print(f"  {row.verdict:<9}  {name}" + (f"  {row.note[:400]}" if row.note else ""))
    counts = ", ".join(
        f"{sum(row.verdict == verdict for row in rows)} {verdict.lower()}"
        for verdict in (EQUAL, DIFFERENT, MISSING, NEW)
    )
    print(f"total: {counts}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine_code", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, metavar="BEFORE")
    parser.add_argument("after", type=Path, metavar="AFTER")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only builds of such names, e.g. 'w4a16_*-90a'")
    parser.add_argument("--renamed", action="store_true", help="pair kernels of the same code whose symbols differ")
    parser.add_argument("--brief", action="store_true", help="print no row for a kernel that is equal")
    given = parser.parse_args(arguments)
    try:
        rows = compare_paths(given.before, given.after, only=given.only, renamed=given.renamed)
    except (Incomparable, ToolchainError, OSError, ValueError, KeyError) as error:
        print(f"nothing was compared: {error}", file=sys.stderr)
        return 2
    _print(rows, brief=given.brief)
    if exit_code(rows) == 2:
        print("nothing was compared: no kernel is on both sides", file=sys.stderr)
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main())
