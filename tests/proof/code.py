"""Compiles to a cubin, without host code, and judges what is in it as a build does."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog.early_loads import EarlyLoads
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.compiler.compile import Job
from fp4dispatch.jit.compiler.toolchain import disassembler, locate
from fp4dispatch.jit.sass import judge, listing, parameters

_HOST_ONLY = ("-shared", "-cudart=static", "-Xptxas=-v")


@dataclass(frozen=True)
class Code:
    """The kernels of a cubin and where their arguments lie."""

    kernels: tuple[listing.Kernel, ...]
    arguments: dict[str, parameters.Parameters]

    def refused(self, kernel: listing.Kernel, declared: EarlyLoads | None) -> list[str]:
        """Return why a kernel may not be launched with PDL; empty where it may."""
        if not any(instruction.base == "ACQBULK" for instruction in kernel.instructions):
            return ["no grid barrier"]
        return judge.judge(kernel, self.arguments.get(kernel.name), declared).refused


def read(cubin: Path) -> Code:
    """Disassemble a cubin."""
    tool = disassembler(installed().common.minimum["disassembler"]).nvdisasm
    text = subprocess.run([tool, "-c", cubin], check=True, capture_output=True, text=True).stdout
    return Code(tuple(listing.parse(text)), parameters.parse(cubin.read_bytes()))


def of_library(library: Path) -> Code:
    """Disassemble a built library."""
    tool = disassembler(installed().common.minimum["disassembler"]).cuobjdump
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([tool, "--extract-elf", "all", library], check=True, capture_output=True, cwd=folder)
        found = [read(cubin) for cubin in Path(folder).iterdir()]
    (with_code,) = (code for code in found if code.kernels)  # beside it lies one without code
    return with_code


def small(source: Path, target: str) -> Code:
    """Compile one file of small kernels."""
    record = installed().record(target)
    cubin = source.with_suffix(".cubin")
    nvcc = locate(record, installed().common, needs_cutlass=False).nvcc
    subprocess.run([nvcc, "-std=c++17", "-O3", "-w", *record.nvcc, "-cubin", "-o", cubin, source], check=True)
    return read(cubin)


def shipped(job: Job, csrc: Path, folder: Path) -> Code:
    """Compile the device code of a shipped kernel from a folder of sources, with its own flags."""
    toolchain = locate(job.record, job.common, needs_cutlass=job.kernel.cutlass)
    flags = [word for word in job.recipe() if word[0] != "{" and word not in _HOST_ONLY and "-Xcompiler" not in word]
    includes = [f"-I{path}" for path in (csrc, *toolchain.includes.values())]
    cubin = folder / "kernel.cubin"
    command = [toolchain.nvcc, *flags, "-w", *includes, "-cubin", "-o", cubin, csrc / job.kernel.source]
    subprocess.run(command, check=True)
    return read(cubin)


def job_of(kernel: str, variant: str, target: str) -> Job:
    """Return the job of a shipped kernel."""
    return kernels.job(installed(), kernel, variant, target)
