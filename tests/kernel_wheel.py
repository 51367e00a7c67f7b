"""A wheel of finished kernels, made and installed by the documented command, and a process that has only that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def install(folder: Path, *build: str) -> Path:
    """Build kernels for sm_90, pack them, install the wheel, and return the folder it is installed into."""
    words = ["build", "--arch", "9.0", *build, "--out", str(folder / "kernels"), "--wheel", str(folder / "dist")]
    must([sys.executable, "-m", "fp4dispatch", *words], folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    assert wheel.stat().st_size < 50e6
    site = folder / "site"
    must([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)], folder)
    return site


def run(site: Path, program: str, cache: Path) -> str:
    """Run a program in a fresh process: an empty cache, no nvcc, no compiling."""
    settings = {"FP4DISPATCH_CACHE_DIR": str(cache), "FP4DISPATCH_JIT": "0", "FP4DISPATCH_NVCC": "", "CUDA_HOME": ""}
    return must([sys.executable, "-c", program], site, PYTHONPATH=f"{site}:{ROOT}", PATH="/nowhere", **settings)


def must(words: list[str], cwd: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FP4DISPATCH_", "PYTHON"))}
    done = subprocess.run(
        words, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
