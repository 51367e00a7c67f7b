"""Finished kernels that installed wheels carry: found through entry points, checked like any entry of a cache.

A wheel such as ``fp4dispatch-kernels-sm90`` (``fp4dispatch build --wheel``) names its package in the entry point group
:data:`GROUP`. The package holds ``kernels/`` as a cache does. It is never imported: only its folder is looked up. The
wheel of fp4dispatch itself may carry kernels too, in ``fp4dispatch/prebuilt``.

A prebuilt kernel depends on the sources and flags of this package, on nothing that the machine compiles with: not on
Python, torch, a compiler or a toolkit. It depends on the driver, which must run the CUDA major version that compiled it
(https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html), and on the C++ runtime, which the
dynamic loader checks. So an entry is used only if

- the request (names, flags, package version) and our sources are those of this installation,
- its stored proof is of this library, by this prover, and without a fault,
- the driver can run it,
- it belongs to this user, to root, or to the owner of fp4dispatch's own code, and not everybody can write it,
- the library has the hash that was published; this is checked again on the bytes that are loaded.

Anything else is ignored with the reason, which ``fp4dispatch doctor`` and ``explain`` show, and never loaded.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from fp4dispatch.errors import CompileError, FlagsError
from fp4dispatch.jit import prove
from fp4dispatch.jit.building import request
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.compiler.compile import Job
from fp4dispatch.jit.store import guard
from fp4dispatch.jit.store.cache import KERNELS, Cache
from fp4dispatch.jit.store.entries import LIBRARY, MANIFEST, OWN, PROOF, Entry, damage, first_line, stale
from fp4dispatch.machine import libraries
from fp4dispatch.machine import system as machine

GROUP = "fp4dispatch.kernels"
"""Entry point group. The value is the name of a top-level package with a folder ``kernels``."""

_OWN_FOLDER = "prebuilt"
_LOADER = re.compile(
    r".*Failed to load dynamic shared library \S+ |/proc/self/fd/\S+: | \(required by /proc/self/fd/\S+\)"
)
_refused: dict[Path, str] = {}
"""Folders of entries that the dynamic loader of this process has refused, and why."""


@dataclass(frozen=True)
class Package:
    """One installed distribution with kernels; ``fault`` says why nothing of it can be used."""

    name: str
    version: str
    folder: Path | None
    fault: str = ""


@dataclass(frozen=True)
class Report:
    """What one distribution offers here: the names of usable kernels, and how many are ignored for each reason."""

    package: Package
    usable: tuple[str, ...] = ()
    ignored: dict[str, int] = field(default_factory=dict)


class PackagedKernels(Cache):
    """The entries of one distribution. Only those that may be used here are found; nothing is written."""

    def __init__(self, package: Package, folder: Path) -> None:
        super().__init__(folder, installed=True)
        self.package = package

    def entries(self, below: str = "*/*") -> Iterator[Entry]:
        """Yield the entries that may be used here. Each reason to ignore one is logged once."""
        for entry, reason in self.judged(below):
            if not reason:
                yield entry
            elif entry.folder not in _refused:  # refuse() has said it
                guard.warn(
                    f"kernels of {self.package.name} {self.package.version} are ignored, e.g. {entry.name}: {reason}",
                    f"{self.package.name}: {reason}",
                )

    def judged(self, below: str = "*/*") -> Iterator[tuple[Entry, str]]:
        """Yield every readable entry with the reason to ignore it; empty if it may be used."""
        for entry in super().entries(below):
            try:
                yield entry, unusable(entry)
            except guard.UNREADABLE as error:
                yield entry, first_line(error)


def unusable(entry: Entry) -> str:
    """Return why an entry may not be used here; empty if it may. The hash of the library is not checked here."""
    if entry.folder in _refused:
        return _refused[entry.folder]
    return _not_ours(entry) or _other_inputs(entry) or _not_proven(entry) or _needs_driver(entry)


def refuse(entry: Entry, error: BaseException) -> None:
    """Ignore an entry for the rest of this process: it could not be loaded. Logged once per reason."""
    text = first_line(error.__cause__ if isinstance(error, CompileError) and error.__cause__ else error)
    reason = f"it cannot be loaded: {_LOADER.sub('', text)}"
    _refused[entry.folder] = reason
    guard.warn(f"{entry.library} is ignored: {reason}", reason)


def caches() -> list[Cache]:
    """Return the kernels of each installed distribution that carries some."""
    return [PackagedKernels(package, package.folder) for package in packages() if package.folder is not None]


@functools.cache
def packages() -> tuple[Package, ...]:
    """Return the installed distributions with kernels, fp4dispatch first. Looked up once per process."""
    from fp4dispatch import __version__

    found: dict[Path | str, Package] = {}
    own = Path(__file__).parents[1] / _OWN_FOLDER
    if own.is_dir():
        found[own] = Package("fp4dispatch", __version__, own)
    for point in importlib.metadata.entry_points(group=GROUP):
        package = _package(point)
        found.setdefault(package.folder or package.name, package)
    return tuple(found.values())


def forget() -> None:
    """Look for packages again at the next call, and try refused libraries again."""
    packages.cache_clear()
    _refused.clear()


def reports() -> tuple[Report, ...]:
    """Return what each distribution offers here. Reads and hashes every library."""
    found = []
    for package in packages():
        usable: list[str] = []
        ignored: Counter[str] = Counter()
        try:
            for entry, reason in PackagedKernels(package, package.folder).judged() if package.folder else ():
                if reason := reason or damage(entry):
                    ignored[reason] += 1
                else:
                    usable.append(entry.name)
        except guard.UNREADABLE as error:
            ignored[first_line(error)] += 1
        found.append(Report(package, tuple(sorted(usable)), dict(ignored)))
    return tuple(found)


def ignored() -> list[str]:
    """Return one sentence per distribution and reason for kernels that are not used here."""
    found = []
    for report in reports():
        name = f"{report.package.name} {report.package.version}"
        found += [f"{name} is not used: {report.package.fault}"] if report.package.fault else []
        found += [f"{count} kernels of {name} are ignored: {reason}" for reason, count in report.ignored.items()]
    return found


def _package(point: importlib.metadata.EntryPoint) -> Package:
    dist = point.dist
    name, version = (dist.name, dist.version) if dist else (point.name, "?")
    # The parent of a dotted name would be imported.
    folder = libraries.package_folder(point.value) if point.value.isidentifier() else None
    if folder is not None and (folder / KERNELS).is_dir():
        return Package(name, version, folder)
    return Package(name, version, None, f"its package {point.value} has no folder {KERNELS}")


def _not_ours(entry: Entry) -> str:
    """Why another user could have written an entry.

    Who owns fp4dispatch's code, or can write it, runs code in this process anyway. So its owner is trusted too: the
    administrator of a shared environment, for example.
    """
    owners = {os.geteuid(), 0, Path(__file__).lstat().st_uid}
    for path in (entry.folder, *(entry.folder / name for name in (MANIFEST, PROOF, LIBRARY))):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if status.st_uid not in owners:
            return f"{path} belongs to user {status.st_uid}, neither to you nor to root nor to the owner of fp4dispatch"
        if status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode):
            return f"{path} can be written by everybody (mode {stat.S_IMODE(status.st_mode):04o}): run chmod o-w on it"
    return ""


def _other_inputs(entry: Entry) -> str:
    """Why an entry is of another package version, other flags or other sources."""
    from fp4dispatch import __version__

    built_by = entry.request.get("package")
    if built_by != __version__:
        return f"it was built by fp4dispatch {built_by}, this is {__version__}"
    catalog = installed()
    try:
        kernel = catalog.kernel(entry.request["kernel"])
        job = Job(
            kernel, kernel.variant(entry.request["variant"]), catalog.record(entry.request["target"]), catalog.common
        )
    except FlagsError:
        return "this version has no such kernel"
    wanted = request(job)
    if entry.request != wanted:
        parts = [key for key in {**wanted, **entry.request} if entry.request.get(key) != wanted.get(key)]
        return f"it was built with another {', '.join(parts)}"
    return stale(entry, {OWN: catalog.csrc}, None)


def _not_proven(entry: Entry) -> str:
    """Why its stored proof does not hold."""
    proof = prove.read(entry)
    if proof is None:
        return "it carries no proof of this library by this version's prover"
    return "; ".join(proof.faults(entry.request))


def _needs_driver(entry: Entry) -> str:
    """Why the driver here cannot run it; empty without a driver."""
    compiled_by, runs = entry.compilers.get("nvcc", ""), machine.detected().driver_cuda
    try:
        if runs is None or Version(compiled_by).major <= Version(runs).major:
            return ""
    except InvalidVersion:
        return f"it does not say which nvcc compiled it, but {compiled_by!r}"
    return f"it was compiled by CUDA {compiled_by}, and the driver here runs CUDA up to {runs}"
