"""Makes a wheel of finished kernels, which :mod:`fp4dispatch.jit.packages` finds where it is installed.

The wheel holds entries of a folder that ``fp4dispatch build --out`` made, nothing else: no code but a docstring. It
requires exactly this version of fp4dispatch, and an apache-tvm-ffi that is not older than the headers which the kernels
were compiled with. setuptools makes it, through pip.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from fp4dispatch.errors import CacheError
from fp4dispatch.jit.building import Built
from fp4dispatch.jit.packages import GROUP
from fp4dispatch.jit.store import private
from fp4dispatch.jit.store.cache import KERNELS
from fp4dispatch.jit.store.digests import digest_once
from fp4dispatch.jit.store.entries import LIBRARY, MANIFEST, PROOF, Entry
from fp4dispatch.machine import libraries
from fp4dispatch.problem.arch import Arch
from fp4dispatch.settings import settings

LARGEST_MB = 50.0
"""Aim for the size of a wheel; an index takes 100 MB by default (https://docs.pypi.org/project-management/storage-limits)."""

_SETUPTOOLS = 77  # the first with license expressions (PEP 639)
_TVM_FFI = "tvm_ffi"  # name of its header folder in entries
_SETUP = '''
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    """The kernels depend on the platform, not on Python."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


class Binary(Distribution):
    def has_ext_modules(self):
        return True


setup(cmdclass={"bdist_wheel": Wheel}, distclass=Binary)
'''


def name_of(archs: Sequence[Arch]) -> str:
    """Return the distribution's name, e.g. ``fp4dispatch-kernels-sm90`` or ``fp4dispatch-kernels-sm80-sm89``."""
    return "-".join(["fp4dispatch-kernels", *(arch.sm.replace("_", "") for arch in archs)])


def pack(builts: Sequence[Built], archs: Sequence[Arch], out: Path) -> Path:
    """Make a wheel of finished kernels and return its path.

    Parameters
    ----------
    builts
        The kernels, each made ahead of time and proven.
    archs
        What they are for; this names the wheel.
    out
        Folder for the wheel; created if it is missing.

    Raises
    ------
    CacheError
        If a kernel is from a user's cache, not proven, or of another apache-tvm-ffi, or the wheel cannot be made.
    """
    tvm_ffi = _headers_version([built.entry for built in builts])
    for built in builts:
        if not built.entry.pinned:
            raise CacheError(
                f"{built.entry.folder} is from a user's cache, which holds for one toolchain only\n"
                "  fix: build into a folder of its own, fp4dispatch build --out DIR --wheel DIST"
            )
        if not built.proven:
            raise CacheError(
                f"{built.entry.name} is not proven, so nothing would load it\n  fix: fp4dispatch build --verbose"
            )
    name = name_of(archs)
    with tempfile.TemporaryDirectory(prefix="fp4dispatch-") as folder, private.explained(Path(folder)):
        project, made = Path(folder) / "project", Path(folder) / "made"
        _write_project(project, name, [built.entry for built in builts], tvm_ffi)
        _run_pip(project, made)
        (wheel,) = made.glob("*.whl")
        try:
            out.mkdir(parents=True, exist_ok=True)
            return Path(shutil.copy(wheel, out / wheel.name))
        except OSError as error:
            raise CacheError(
                f"the wheel cannot be put into {out} ({error.strerror or error})\n"
                "  fix: name another folder: --wheel DIST"
            ) from error


def _write_project(project: Path, name: str, entries: Sequence[Entry], tvm_ffi: Version) -> None:
    from fp4dispatch import __version__

    package = name.replace("-", "_")
    inside = project / package
    for entry in entries:
        target = inside / KERNELS / entry.name / entry.folder.name
        target.mkdir(parents=True)
        for file in (LIBRARY, MANIFEST, PROOF):
            shutil.copyfile(entry.folder / file, target / file)
    compilers = sorted({entry.compilers["nvcc"] for entry in entries})
    (inside / "__init__.py").write_text(f'"""Finished kernels for fp4dispatch {__version__}. Holds no code."""\n')
    (project / "setup.py").write_text(_SETUP)
    (project / "README.md").write_text(
        f"# {name}\n\n{len(entries)} finished kernels of fp4dispatch {__version__}, compiled by CUDA "
        f"{', '.join(compilers)} and proved. fp4dispatch finds them where this wheel is installed; no compiler is "
        "needed. `fp4dispatch doctor` says which of them this machine uses.\n"
    )
    # JSON texts and arrays are TOML ones too.
    rows = [
        "[build-system]",
        f'requires = ["setuptools>={_SETUPTOOLS}"]',
        'build-backend = "setuptools.build_meta"',
        "[project]",
        f"name = {json.dumps(name)}",
        f"version = {json.dumps(__version__)}",
        f"description = {json.dumps(f'Finished kernels of fp4dispatch {__version__}, without a compiler')}",
        'readme = "README.md"',
        'license = "Apache-2.0"',
        'requires-python = ">=3.10"',
        f"dependencies = {json.dumps([f'fp4dispatch=={__version__}', _tvm_ffi_range(tvm_ffi)])}",
        f"[project.entry-points.{json.dumps(GROUP)}]",
        f"{package} = {json.dumps(package)}",
        "[tool.setuptools]",
        f"packages = [{json.dumps(package)}]",
        "[tool.setuptools.package-data]",
        f'{package} = ["{KERNELS}/**"]',
    ]
    (project / "pyproject.toml").write_text("\n".join(rows) + "\n")


def _tvm_ffi_range(oldest: Version) -> str:
    """A library may use what its headers declare, so an older runtime may lack it; minor versions break the ABI."""
    return f"apache-tvm-ffi>={oldest.public},<{oldest.major}.{oldest.minor + 1}"


def _headers_version(entries: Sequence[Entry]) -> Version:
    """Return the version of apache-tvm-ffi that the kernels were compiled with: the installed one, or CacheError."""
    folder = libraries.package_folder("tvm_ffi")
    if folder is None:
        raise CacheError(
            "apache-tvm-ffi is not installed, so its version is not known\n  fix: pip install apache-tvm-ffi"
        )
    for entry in entries:
        for (root, path), sha in entry.files.items():
            file = folder / "include" / path
            if root == _TVM_FFI and not (file.is_file() and digest_once(file) == sha):
                raise CacheError(
                    f"{entry.name} was compiled with another apache-tvm-ffi than the {version('apache-tvm-ffi')} here\n"
                    f"  fix: remove {entry.folder} and build again"
                )
    return Version(version("apache-tvm-ffi"))


def _run_pip(project: Path, out: Path) -> None:
    try:
        here = int(version("setuptools").split(".")[0]) >= _SETUPTOOLS
    except PackageNotFoundError:
        here = False
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "-w", str(out)]
    words += ["--no-build-isolation"] if here else []
    done = subprocess.run(
        [*words, str(project)], capture_output=True, text=True, check=False, env=settings.environment()
    )
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise CacheError(f"the wheel could not be made:\n{said}\n  fix: pip install -U pip setuptools")
