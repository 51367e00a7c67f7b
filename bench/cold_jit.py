"""Time from an empty cache to the first NVFP4 GEMM for sm_120: ours and FlashInfer's, one after the other, same jobs.

No GPU takes part: both builds end with a library on disk. Ours is what the first call needs, one GEMM and the
activation quantiser; FlashInfer's is the module that its `cutlass` backend compiles before its first call, through
its own `JitSpec.build`.

    python -m bench.cold_jit --jobs 2 --json bench/results/cold-jit-x86_64.json

FlashInfer's module includes a header of cuRAND and links the driver: where they are not beside nvcc, say so with
`CPATH` and `FLASHINFER_EXTRA_LDFLAGS`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.shared import commandline
from bench.shared.commandline import ROOT
from fp4dispatch.benchmark import machine
from fp4dispatch.benchmark.reports import records

OURS = """
from pathlib import Path
import sys
from fp4dispatch.jit import kernels
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.jit.catalog.manifest import installed
catalog, cache = installed(), Cache(Path(sys.argv[1]) / "cache")
needed = (("nvfp4_gemm_sm120", "bf16_128x128"), ("nvfp4_quantize", "any"))
for built in kernels.build_all([kernels.job(catalog, *name, "120f") for name in needed], catalog, cache=cache):
    assert not built.cached and built.proven
    print("built", built.entry.library)
"""

THEIRS = """
from flashinfer.jit.gemm import gen_gemm_sm120_module_cutlass_fp4
spec = gen_gemm_sm120_module_cutlass_fp4()
spec.build()
print("built", spec.get_library_path())
"""


def timed(code: str, folder: str, jobs: int) -> dict[str, Any]:
    """Run ``code`` in a fresh process with an empty cache; wall seconds, CPU seconds and the libraries it left."""
    env = dict(
        os.environ,
        MAX_JOBS=str(jobs),
        FLASHINFER_WORKSPACE_BASE=folder,
        FLASHINFER_CUDA_ARCH_LIST="12.0f",
        PYTHONPATH=str(ROOT),
    )
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, folder], env=env, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    built = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.startswith("built ")]
    if done.returncode or not built or not all(Path(path).is_file() for path in built):
        sys.exit(f"the build failed ({done.returncode}):\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    objects = len(list(Path(folder).rglob("*.o")))
    return {"wall_s": round(wall, 1), "cpu_s": round(cpu, 1), "libraries": len(built), "objects_left": objects}


def main(words: Sequence[str] | None = None) -> None:
    """Measure both and write the record."""
    parser = commandline.parser(__doc__)
    commandline.takes_record(parser, needed=True)
    parser.add_argument("--jobs", type=int, default=2)
    args = commandline.parse(parser, words)
    record: dict[str, Any] = {
        "what": "cold JIT of the first NVFP4 GEMM for sm_120",
        "jobs": args.jobs,
        "cores": os.cpu_count(),
    }
    builds: dict[str, dict[str, Any]] = {}
    for name, code in (("fp4dispatch", OURS), ("flashinfer", THEIRS)):
        with tempfile.TemporaryDirectory() as folder:
            builds[name] = timed(code, folder, args.jobs)
        print(name, builds[name], flush=True)
    record["cold_jit"] = builds
    records.write(args.json, "cold jit", machine.facts(machine.card("cpu"), args.commit), record)
    print(
        f"ours takes {builds['fp4dispatch']['wall_s'] / builds['flashinfer']['wall_s']:.3f} of FlashInfer's wall time"
    )


if __name__ == "__main__":
    main()
