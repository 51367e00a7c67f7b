"""Compile every Blackwell kernel for every target and record what its binary proves.

There is no Blackwell GPU behind these numbers: they say that a kernel compiles for the target, what it costs to
compile, and which instructions its machine code holds. Speed and results on the hardware are not among them.

    python bench/compile_targets.py                                  # all that the JSON does not hold yet
    python bench/compile_targets.py --only nvfp4_gemm_sm120/bf16     # ids that start with this, again
    python bench/compile_targets.py --table                          # docs/compiled-targets.md from the JSON

Needs nvcc, the CUTLASS headers, apache-tvm-ffi and the wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fp4dispatch.jit import manifest  # noqa: E402
from fp4dispatch.jit.barrier_order import unguarded_accesses  # noqa: E402
from fp4dispatch.jit.manifest import Kernel, Variant  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "2026-11-21-compiled-targets.json"
TABLE = ROOT / "docs" / "compiled-targets.md"
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Build:
    """One shared library: a kernel of the manifest, one of its variants, one of its targets."""

    kernel: Kernel
    variant: Variant
    target: str

    @property
    def id(self) -> str:
        """``kernel/variant/target``."""
        return f"{self.kernel.name}/{self.variant.id}/{self.target}"


def blackwell_builds() -> list[Build]:
    """List every GEMM build of the manifest for the 10x, 11x and 12x targets."""
    return [
        Build(kernel, variant, target)
        for kernel in manifest.installed().kernels.values()
        if kernel.mma is not None
        for variant in kernel.variants.values()
        for target in kernel.targets
        if target.startswith(("10", "11", "12"))
    ]


def tool(name: str) -> str:
    """Find a CUDA binary utility: its pip wheel first, else PATH."""
    for folder in map(Path, sys.path):
        for found in folder.glob(f"nvidia/cu*/bin/{name}"):
            return str(found)
    return name


def disassemble(library: Path) -> str:
    """Return the SASS of every kernel in a shared library."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [tool("cuobjdump"), "-xelf", "all", str(library.resolve())], cwd=folder, check=True, capture_output=True
        )
        cubins = sorted(Path(folder).glob("*.cubin"), key=lambda path: path.stat().st_size)
        command = [tool("nvdisasm"), "-c", cubins[-1].name]  # the others are empty
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def sass_facts(sass: str, mma: str) -> dict[str, Any]:
    """Count what the SASS of one GEMM kernel must show: barriers, MMA, spills, accesses before the barrier."""
    opcodes = _OPCODE.findall(sass)
    found = sorted({opcode for opcode in opcodes if re.match(mma, opcode)})
    return {
        "acqbulk": opcodes.count("ACQBULK"),
        "preexit": opcodes.count("PREEXIT"),
        "mma": found,
        "mma_count": sum(opcode in found for opcode in opcodes),
        "local_accesses": sum(opcode.split(".")[0] in ("LDL", "STL") for opcode in opcodes),
        "unguarded_accesses": len(unguarded_accesses(sass)),
    }


def resource_usage(library: Path) -> dict[str, int]:
    """Registers and stack bytes a thread, from the cubin."""
    text = subprocess.run(
        [tool("cuobjdump"), "--dump-resource-usage", str(library)], check=True, capture_output=True, text=True
    ).stdout
    registers, stack = max((int(r), int(s)) for r, s in re.findall(r"REG:(\d+) STACK:(\d+)", text))
    return {"registers": registers, "stack_bytes": stack}


def site_folder(name: str) -> Path:
    """Find an installed package's folder without importing it."""
    return next(Path(p) / name for p in sys.path if (Path(p) / name).is_dir())


def cutlass_folder() -> Path:
    """Return the CUTLASS tree of the flashinfer-python wheel."""
    return site_folder("flashinfer") / "data" / "cutlass"


def cutlass_version() -> str:
    """Read CUTLASS_MAJOR, _MINOR and _PATCH."""
    text = (cutlass_folder() / "include" / "cutlass" / "version.h").read_text()
    return ".".join(re.findall(r"define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", text))


def compile_command(build: Build, output: Path) -> list[str]:
    """Make the nvcc command of one build, from the same records as the package."""
    catalog = manifest.installed()
    common, record = catalog.common, catalog.record(build.target)
    cutlass = cutlass_folder()
    includes = [cutlass / "include", cutlass / "tools" / "util" / "include", site_folder("tvm_ffi") / "include"]
    defines = (*common.defines, *record.defines, *build.variant.defines)
    filled = {
        "{nvcc}": ["nvcc"],
        "{flags}": common.nvcc,
        "{target}": record.nvcc,
        "{defines}": [part for define in defines for part in common.spell("define", define)],
        "{includes}": [part for path in includes for part in common.spell("include", str(path))],
        "{depfile}": [],
        "{output}": common.spell("output", str(output)),
        "{source}": [str(catalog.csrc / build.kernel.source)],
    }
    return [part for word in common.command for part in filled[word]]


def compile_once(command: list[str], log: Path) -> dict[str, float]:
    """Run one compile and return its seconds and the largest resident set of its processes."""
    started = time.perf_counter()
    with log.open("w") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise RuntimeError(f"compile failed, see {log}: {' '.join(command)}")
    return {
        "wall_s": round(time.perf_counter() - started, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_gb": round(usage.ru_maxrss / 1e6, 2),
    }


def measure(build: Build, folder: Path) -> dict[str, Any]:
    """Compile one build and collect its row of the table."""
    import tvm_ffi

    library = folder / (build.id.replace("/", "-") + ".so")
    cost = compile_once(compile_command(build, library), library.with_suffix(".log"))
    module = tvm_ffi.load_module(str(library))
    sass = disassemble(library)
    return {
        "kernel": build.kernel.name,
        "variant": build.variant.id,
        "target": build.target,
        **cost,
        "library_bytes": library.stat().st_size,
        "shared_memory_bytes": int(module.shared_memory_bytes()),
        **resource_usage(library),
        **sass_facts(sass, build.kernel.mma or ""),
        "sass_sha256": hashlib.sha256(sass.encode()).hexdigest()[:16],
    }


def nvcc_version() -> str:
    """Return the release line of nvcc."""
    text = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    return re.search(r"V(\d+\.\d+\.\d+)", text).group(1)  # type: ignore[union-attr]


def run(only: str | None, folder: Path) -> None:
    """Measure the chosen builds and write the JSON after each, so that a long run can be stopped."""
    rows = {row["id"]: row for row in json.loads(RESULTS.read_text())["rows"]} if RESULTS.exists() else {}
    known = {build.id: build for build in blackwell_builds()}
    rows = {key: row for key, row in rows.items() if key in known}
    for key, build in sorted(known.items(), key=lambda item: "fp16" in item[0]):  # one dtype of all kernels first
        if (only is not None and not key.startswith(only)) or (only is None and key in rows):
            continue
        rows[key] = {"id": key, **measure(build, folder)}
        print(json.dumps(rows[key]), flush=True)
        document = {
            "nvcc": nvcc_version(),
            "cutlass": "4.5.0",
            "jobs": 1,
            "rows": [rows[k] for k in known if k in rows],
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")


_INTRO = """\
# Blackwell kernels: what was compiled and what the binaries prove

Generated by `python bench/compile_targets.py --table` from `bench/results/{name}`; do not edit.
nvcc {nvcc}, CUTLASS {cutlass}, one compile at a time on a 2-core machine that had other work: CPU seconds are what a
compile costs, and about its wall time on a quiet machine.

**None of these kernels has run on Blackwell hardware for this table.** It says that they compile for the target, that
the barriers of programmatic dependent launch are in the machine code and precede every access to global memory on every
path, and which tensor-core instruction a kernel uses. Argument checks and the scale layout are tested on the host
(`tests/compile/test_kernels_blackwell.py`).

ACQBULK waits for the previous kernel; PREEXIT lets the next one start early (CUTLASS leaves it out on SM120 by design).
Unguarded: accesses to global memory that some path reaches without ACQBULK. Spills: local-memory loads and stores.
"""


def cells(row: dict[str, Any]) -> dict[str, object]:
    """One line of the table, by column."""
    return {
        "kernel / variant": f"{row['kernel']} / {row['variant']}",
        "target": row["target"],
        "CPU s": f"{row['cpu_s']:.0f}",
        "wall s": f"{row['wall_s']:.0f}",
        "peak GB": f"{row['peak_gb']:.1f}",
        "library KB": f"{row['library_bytes'] / 1024:.0f}",
        "registers": row["registers"],
        "spills": row["local_accesses"],
        "shared KB": f"{row['shared_memory_bytes'] / 1024:.1f}",
        "ACQBULK": row["acqbulk"],
        "PREEXIT": row["preexit"],
        "unguarded": row["unguarded_accesses"],
        "MMA": " ".join(f"`{name}`" for name in row["mma"]),
        "count": row["mma_count"],
    }


def table(document: dict[str, Any]) -> Iterator[str]:
    """Lines of docs/compiled-targets.md."""
    yield _INTRO.format(name=RESULTS.name, nvcc=document["nvcc"], cutlass=document["cutlass"])
    lines = [cells(row) for row in document["rows"]]
    yield f"| {' | '.join(lines[0])} |"
    yield "|---" * len(lines[0]) + "|"
    for line in lines:
        yield f"| {' | '.join(map(str, line.values()))} |"


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="build ids that start with this, measured again")
    parser.add_argument("--table", action="store_true", help="write docs/compiled-targets.md and stop")
    parser.add_argument("--keep", type=Path, help="folder for the libraries and logs")
    arguments = parser.parse_args()
    if not arguments.table:
        with tempfile.TemporaryDirectory() as scratch:
            folder = arguments.keep or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            run(arguments.only, folder)
    TABLE.write_text("\n".join(table(json.loads(RESULTS.read_text()))) + "\n")


if __name__ == "__main__":
    main()
