"""Compile targets as data: ``jit_flags/*.toml``, loaded strictly.

The suffix of a target and the define that makes CUTLASS emit its barriers only work together, so one record holds both.
A contradictory record cannot be loaded: a plain target with GDC, or the define of another family, would compile without
a message and race on the GPU (flashinfer#2708, #2913).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from fp4dispatch import strict_toml
from fp4dispatch.errors import FlagsError, Fp4DispatchError
from fp4dispatch.problem.arch import Arch

_TARGET = re.compile(r"(\d{1,2})(\d)([af]?)")
_DEFINE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(=[A-Za-z0-9_.:+-]*)?")
_ARGUMENT = re.compile(r"[A-Za-z0-9_.,:=+-]+")
_SASS_ROLES = ("wait", "signal", "mma")


@dataclass(frozen=True)
class CommonFlags:
    """Settings of every build (``common.toml``): command template, flags, minimum versions, memory per job in GB."""

    command: tuple[str, ...]
    nvcc: tuple[str, ...]
    defines: tuple[str, ...]
    spelling: Mapping[str, tuple[str, ...]]
    gdc_defines: Mapping[int, str]
    minimum: Mapping[str, str]
    memory_gb: Mapping[str, float]

    def spell(self, word: str, value: str) -> list[str]:
        """Return the arguments for one host compiler, define, include folder, dependency file or output."""
        return [part.replace("{}", value) for part in self.spelling[word]]


@dataclass(frozen=True)
class FlagRecord:
    """One compile target, e.g. ``120f``.

    ``archs``: the GPUs that its machine code runs on. ``min_cuda``: the first nvcc that supports it. ``gdc``: whether
    its kernels have griddepcontrol. ``expect_sass``: regular expressions of SASS opcodes by role (``wait``, ``signal``,
    ``mma``).
    """

    target: str
    archs: tuple[Arch, ...]
    min_cuda: str
    defines: tuple[str, ...]
    nvcc: tuple[str, ...]
    gdc: bool
    expect_sass: Mapping[str, str]
    source: str
    note: str


def load_common(folder: Path) -> CommonFlags:
    """Load ``common.toml`` of a folder of flag files."""
    path = folder / "common.toml"
    table = strict_toml.load(path)
    where = str(path)
    strict_toml.check(where, table, *strict_toml.keys_of(CommonFlags))
    strict_toml.check(
        f"{where} [spelling]",
        table["spelling"],
        dict.fromkeys(("host", "define", "include", "depfile", "output"), list),
    )
    strict_toml.check(
        f"{where} [minimum]", table["minimum"], dict.fromkeys(("cutlass", "tvm_ffi", "disassembler"), str)
    )
    strict_toml.check(f"{where} [memory_gb]", table["memory_gb"], {"cutlass": float, "plain": float})
    for name, text in table["minimum"].items():
        version(f"{where} [minimum] {name}", text)
    return CommonFlags(
        command=strict_toml.texts(f"{where} command", table["command"]),
        nvcc=_arguments(where, table["nvcc"]),
        defines=defines(where, table["defines"]),
        spelling={key: strict_toml.texts(f"{where} {key}", value) for key, value in table["spelling"].items()},
        gdc_defines={int(key): str(value) for key, value in table["gdc_defines"].items()},
        minimum=dict(table["minimum"]),
        memory_gb={key: float(value) for key, value in table["memory_gb"].items()},
    )


def load_records(folder: Path, common: CommonFlags) -> dict[str, FlagRecord]:
    """Load every target of a folder, by name.

    Raises
    ------
    FlagsError
        For an unknown or missing key, a file that is not named after its target, a plain target with ``gdc``, a GDC
        define of the wrong family, or none.
    """
    records: dict[str, FlagRecord] = {}
    for path in sorted(folder.glob("sm*.toml")):
        record = _record(path, common)
        if path.name != f"sm{record.target}.toml":
            raise FlagsError(f"{path}: holds target {record.target}; its name must be sm{record.target}.toml")
        records[record.target] = record
    if not records:
        raise FlagsError(f"{folder}: holds no compile target (sm*.toml); reinstall fp4dispatch")
    return records


def _record(path: Path, common: CommonFlags) -> FlagRecord:
    table = strict_toml.load(path)
    where = str(path)
    strict_toml.check(where, table, *strict_toml.keys_of(FlagRecord))
    try:
        archs = tuple(Arch.parse(text) for text in strict_toml.texts(f"{where} archs", table["archs"]))
    except Fp4DispatchError as error:
        raise FlagsError(f"{where}: {error}") from error
    words = {"defines": defines(where, table["defines"]), "nvcc": _arguments(where, table["nvcc"])}
    record = FlagRecord(**(table | words | {"archs": archs}))
    version(f"{where} min_cuda", record.min_cuda)
    _check_target(where, record)
    _check_gdc(where, record, common)
    _check_sass(where, record)
    return record


def _check_target(where: str, record: FlagRecord) -> None:
    match = _TARGET.fullmatch(record.target)
    if match is None:
        raise FlagsError(f"{where}: {record.target!r} is not a compile target; write e.g. 90a or 120f")
    own = Arch(int(match[1]), int(match[2]))
    if own not in record.archs:
        raise FlagsError(f"{where}: target {record.target} must list its own arch {own.capability}")
    if any(arch.major != own.major for arch in record.archs):
        raise FlagsError(f"{where}: machine code of {record.target} runs on no other major capability than {own.major}")
    if match[3] == "a" and record.archs != (own,):
        raise FlagsError(f"{where}: {record.target} is specific to {own.capability}; it runs on no other arch")
    if not any(f"sm_{record.target}" in argument.split("=")[-1].split(",") for argument in record.nvcc):
        raise FlagsError(f"{where}: nvcc does not generate code for sm_{record.target}")


def _check_gdc(where: str, record: FlagRecord, common: CommonFlags) -> None:
    """Check the pair of suffix and define; a wrong pair compiles silently without barriers."""
    own = common.gdc_defines.get(record.archs[0].major)
    names = {define.split("=")[0] for define in record.defines}
    found = names & set(common.gdc_defines.values())
    if not record.gdc:
        if found:
            raise FlagsError(f"{where}: gdc = false, but {', '.join(sorted(found))} is defined")
        return
    if not record.target.endswith(("a", "f")):
        raise FlagsError(
            f"{where}: gdc = true on the plain target {record.target}: the barriers would compile to nothing; "
            f"use {record.target}a or {record.target}f"
        )
    if own is None:
        raise FlagsError(f"{where}: no GDC define is known for capability {record.archs[0].capability}")
    if wrong := found - {own}:
        raise FlagsError(f"{where}: {', '.join(sorted(wrong))} is of the wrong family; {record.target} needs {own}")
    if own not in found:
        raise FlagsError(f"{where}: gdc = true needs the define {own}=1")
    if f"{own}=1" not in record.defines:
        raise FlagsError(f"{where}: write the define as {own}=1")


def _check_sass(where: str, record: FlagRecord) -> None:
    needed = _SASS_ROLES if record.gdc else ("mma",)
    strict_toml.check(f"{where} expect_sass", dict(record.expect_sass), dict.fromkeys(needed, str))
    for role, pattern in record.expect_sass.items():
        regex(f"{where} expect_sass.{role}", pattern)


def defines(where: str, value: object) -> tuple[str, ...]:
    """Return macro definitions (``NAME`` or ``NAME=value``); FlagsError for one with special characters.

    nvcc starts its passes through a shell, so no shell syntax may reach it.
    """
    found = strict_toml.texts(f"{where} defines", value)
    for define in found:
        if not _DEFINE.fullmatch(define):
            raise FlagsError(f"{where}: {define!r} is not a definition; write NAME or NAME=value, letters and digits")
    return found


def regex(where: str, pattern: str) -> re.Pattern[str]:
    """Compile a regular expression; FlagsError for an invalid one or one that matches the empty text."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise FlagsError(f"{where}: {pattern!r} is not a regular expression: {error}") from error
    if compiled.fullmatch(""):
        raise FlagsError(f"{where}: {pattern!r} matches the empty text, so it would prove nothing")
    return compiled


def version(where: str, text: str) -> Version:
    """Parse a version; FlagsError for a malformed one."""
    try:
        return Version(text)
    except InvalidVersion as error:
        raise FlagsError(f"{where}: {text!r} is not a version") from error


def _arguments(where: str, value: object) -> tuple[str, ...]:
    found = strict_toml.texts(f"{where} nvcc", value)
    for argument in found:
        if not _ARGUMENT.fullmatch(argument):
            raise FlagsError(f"{where}: compiler argument {argument!r} holds characters that a shell reads")
    return found
