"""Small kernels, a compiler that only pretends, and helpers to run builds in other processes.

The pretended compiler answers like nvcc, writes a dependency file and an output, counts its calls and can be slow. So
the cache and the build can be tried for real (ninja, processes, kills) in milliseconds and without CUDA. The code gets
it through FP4DISPATCH_NVCC, like any other nvcc.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from fp4dispatch.jit.catalog.manifest import Catalog

REPOSITORY = Path(__file__).parents[1]
JIT_FLAGS = REPOSITORY / "jit_flags"

MANIFEST = """
[[kernel]]
name = "tiny"
op = "nvfp4_quantize"
source = "tiny.cu"
targets = ["90a", "120f", "80"]
cutlass = false
pdl = true
variants = [{ id = "one", defines = ["ADD=1"] }, { id = "two", defines = ["ADD=2"] }]
"""

TINY = """
#include "gdc_guard.h"
#include "tiny.h"
#include <tvm/ffi/tvm_ffi.h>
__global__ void add(float* p) {
  fp4d::grid_dependency_wait();
  p[threadIdx.x] += ADD + TINY;
  fp4d::grid_dependency_launch_dependents();
}
int run(int64_t x) { return int(x) + ADD; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
"""

FAKE_NVCC = """\
#!{python} -IS
import json, os, sys, time
from pathlib import Path
here = Path({here!r})
if "--version" in sys.argv:
    print("Cuda compilation tools, release 13.0, V" + (here / "version").read_text())
    sys.exit(0)
with (here / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
source = Path(sys.argv[-1])
output = Path(sys.argv[sys.argv.index("-o") + 1])
seconds = float((here / "seconds").read_text())
(Path(os.environ["TMPDIR"]) / "half").write_text("x")
output.with_name("partial").write_text("x")
time.sleep(seconds)
if "BROKEN" in source.read_text():
    print("tiny.cu(3): error: this does not compile", file=sys.stderr)
    sys.exit(1)
headers = [source.parent / "tiny.h", Path("inc/tvm_ffi/tvm/ffi/tvm_ffi.h"), here / "system header.h"]
listed = " ".join(str(path).replace(" ", "\\\\ ") for path in [source, *headers])
Path(sys.argv[sys.argv.index("-MF") + 1]).write_text(f"{{output}} : {{listed}}\\n")
output.write_bytes(b"library " + source.read_bytes() + " ".join(sys.argv[1:]).encode())
"""

# Beside the pretended nvcc, so found before all others. They read the target from the library: its text is the command.
FAKE_CUOBJDUMP = """\
#!/bin/sh
case $1 in
--version) echo 'Cuda compilation tools, release 13.0, V13.0.1' ;;
--dump-resource-usage)
  code=$(grep -ao 'code=sm_[0-9a-f]*' "$2" | head -n 1)
  echo "arch = ${code#code=}"
  printf ' Function add:\\n  REG:8 STACK:0 SHARED:0 LOCAL:0\\n' ;;
*) : > x.cubin ;;
esac
"""
FAKE_NVDISASM = """\
#!/bin/sh
if [ "$1" = --version ]; then echo 'Cuda compilation tools, release 13.0, V13.0.1'; exit; fi
cat <<END
	.section	.text.add,"ax",@progbits
        /*0000*/                   ACQBULK ;
        /*0010*/                   EXIT ;
END
"""

BUILD_ONE = """
import logging, sys
from pathlib import Path
from fp4dispatch.jit import kernels
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.jit.catalog.manifest import Catalog
logging.basicConfig(level=logging.WARNING)
logging.getLogger("filelock").setLevel(logging.ERROR)
csrc, flags, cache = map(Path, sys.argv[1:4])
built = kernels.build("tiny", "one", "120f", catalog=Catalog.load(csrc, flags), cache=Cache(cache))
print("cached" if built.cached else "built", built.entry.library_sha256)
"""


@dataclass(frozen=True)
class Fake:
    """The pretended toolchain in one folder."""

    folder: Path

    @property
    def nvcc(self) -> Path:
        return self.folder / "bin" / "nvcc"

    def calls(self) -> int:
        """How many files it compiled."""
        file = self.folder / "calls"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def set_seconds(self, seconds: float) -> None:
        (self.folder / "seconds").write_text(str(seconds))

    def set_version(self, version: str) -> None:
        (self.folder / "version").write_text(version)


def fake_toolchain(folder: Path) -> Fake:
    """Write a pretended nvcc, g++ and disassembler into ``folder/bin``."""
    (folder / "bin").mkdir(parents=True)
    fake = Fake(folder)
    fake.set_seconds(0)
    fake.set_version("13.0.88")
    (folder / "system header.h").write_text("// of the system\n")
    fake.nvcc.write_text(FAKE_NVCC.format(python=sys.executable, here=str(folder)))
    (folder / "bin" / "g++").write_text("#!/bin/sh\necho 'g++ (pretended) 1.0'\n")
    (folder / "bin" / "cuobjdump").write_text(FAKE_CUOBJDUMP)
    (folder / "bin" / "nvdisasm").write_text(FAKE_NVDISASM)
    for path in (folder / "bin").iterdir():
        path.chmod(0o755)
    return fake


def tiny_sources(folder: Path, source: str = TINY, manifest: str = MANIFEST) -> Path:
    """Write a folder of sources with one small kernel."""
    folder.mkdir(parents=True)
    shutil.copy(REPOSITORY / "csrc" / "gdc_guard.h", folder)
    (folder / "tiny.cu").write_text(source)
    (folder / "tiny.h").write_text("#define TINY 3\n")
    (folder / "kernels.toml").write_text(manifest)
    return folder


def tiny_catalog(folder: Path, source: str = TINY, manifest: str = MANIFEST) -> Catalog:
    """Load a catalog of one small kernel with the real compile targets."""
    return Catalog.load(tiny_sources(folder, source, manifest), JIT_FLAGS)


def start_build(
    csrc: Path, cache: Path, environment: dict[str, str], program: str = BUILD_ONE
) -> subprocess.Popen[str]:
    """Start a process that builds the small kernel for 120f and prints ``built`` or ``cached`` and the hash."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(csrc), str(JIT_FLAGS), str(cache)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it runs in the background with SIGINT ignored, which children would inherit.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
