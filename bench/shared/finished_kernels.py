"""A wheel of finished kernels for ``bench/cold_model.py``: made, installed, and the only place to get kernels from."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "/no-nvcc-here"


def without_nvcc(site: Path) -> dict[str, str]:
    """Return the environment of a process that finds the packages in ``site``, and no nvcc.

    Compiling stays allowed: a kernel that the wheel lacks is an error of the machine, not of a setting. A path in
    FP4DISPATCH_NVCC that leads nowhere also ends the search of pip wheels.
    """
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    kept = {name: value for name, value in os.environ.items() if name != "FP4DISPATCH_JIT"}
    return kept | {"PYTHONPATH": path, "PATH": NOWHERE, "CUDA_HOME": "", "FP4DISPATCH_NVCC": f"{NOWHERE}/nvcc"}


def build(arch: str, folder: Path, dist: Path, limit_s: float | None = None) -> dict[str, Any]:
    """Make the wheel by the documented command.

    Parameters
    ----------
    arch
        Compute capability, e.g. ``9.0``.
    folder
        For the finished kernels. What an earlier call has finished there is used again; the user's cache is not, as its
        entries hold for one toolchain only.
    dist
        For the wheel.
    limit_s
        Seconds after which the build is ended; what is finished by then stays in ``folder``.

    Returns
    -------
    dict
        ``path`` of the wheel, ``build_s``, and how many kernels were ``finished_before``.

    Raises
    ------
    RuntimeError
        With the end of the output, if there is no wheel.
    """
    before = len(list(folder.glob("kernels/*/*/*/proof.json")))
    words = ["-m", "fp4dispatch", "build", "--arch", arch, "--out", str(folder), "--wheel", str(dist)]
    started = time.perf_counter()
    _must([sys.executable, *words], limit_s)
    wheels = list(dist.glob("*.whl"))
    if len(wheels) != 1:
        raise RuntimeError(f"{dist} holds {len(wheels)} wheels, needs 1: name an empty folder")
    return {"path": wheels[0], "build_s": round(time.perf_counter() - started, 1), "finished_before": before}


def install(wheel: Path, site: Path) -> dict[str, Any]:
    """Install a wheel into a folder, without what it requires; return its facts.

    Raises
    ------
    RuntimeError
        If pip refuses it, or if it holds no kernel.
    """
    words = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
    _must([sys.executable, *words])
    count = len(list(site.glob("*/kernels/*/*/*/proof.json")))
    if not count:
        raise RuntimeError(f"{wheel.name} holds no kernel: make it with fp4dispatch build --out DIR --wheel DIST")
    return {"name": wheel.name, "mb": round(wheel.stat().st_size / 1e6, 1), "kernels": count}


def made(file: str, arch: str, folder: Path | None, site: Path, limit_s: float | None = None) -> dict[str, Any]:
    """Install the wheel ``file``, or one that is built now where ``file`` is empty; return its facts."""
    if file:
        return install(Path(file).resolve(), site)
    with tempfile.TemporaryDirectory(prefix="fp4dispatch-") as scratch:
        kept = folder.resolve() if folder else Path(scratch, "kernels")
        found = build(arch, kept, Path(scratch, "dist"), limit_s)
        return install(found.pop("path"), site) | found


def used(site: Path) -> dict[str, Any]:
    """Return what this process has loaded, what it compiled, and whether it could have. Runs in the cold process."""
    from fp4dispatch.jit import kernels
    from fp4dispatch.machine import libraries

    loaded = kernels.loaded()
    nvcc, _ = libraries.nvcc()
    return {
        "from_wheel": sorted(built.entry.name for built in loaded if built.entry.folder.is_relative_to(site)),
        "from_elsewhere": sorted(built.entry.name for built in loaded if not built.entry.folder.is_relative_to(site)),
        "nvcc": nvcc.path if nvcc else None,
    }


def faults(row: Mapping[str, Any]) -> list[str]:
    """Return a sentence for all that keeps a start from being one with a wheel and without a compiler."""
    name, found = f"{row['format']} with wheel", []
    if row["kernels"]:
        found.append(f"{name}: compiled {', '.join(row['kernels'])}, which the wheel should have")
    if row["nvcc"]:
        found.append(f"{name}: the process could find {row['nvcc']}, so this was no machine without a compiler")
    if row["from_elsewhere"]:
        found.append(f"{name}: loaded from elsewhere: {', '.join(row['from_elsewhere'])}")
    if not row["from_wheel"]:
        found.append(f"{name}: no kernel of the wheel was loaded")
    if "reference" in " ".join(row["backends"]):
        found.append(f"{name}: layers run on {', '.join(row['backends'])}: `fp4dispatch doctor` says what is missing")
    return found


def sentence(wheel: Mapping[str, Any]) -> str:
    """Return what a wheel is, and what it took."""
    took = f", made in {wheel['build_s']} s" if "build_s" in wheel else ""
    took += f", {wheel['finished_before']} of its kernels finished before" if wheel.get("finished_before") else ""
    return f"`{wheel['name']}`: {wheel['kernels']} kernels, {wheel['mb']} MB{took}."


def _must(words: list[str], limit_s: float | None = None) -> None:
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(words[1:])} was ended after {limit_s:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[1:])} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
