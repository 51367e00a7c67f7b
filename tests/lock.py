"""Write requirements-ci.lock: what the tests run with, each file by its hash::

    pip install uv && python -m tests.lock

Versions are those of constraints.txt. Left out: torch, which a machine brings as its CPU build or the build for its
CUDA, and the CUDA libraries and Triton, which only a build of torch for CUDA needs. No address of an index is written.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements-ci.lock"
BY_TORCH = (
    "torch", "triton", "cuda-bindings", "cuda-toolkit", "nvidia-cublas", "nvidia-cuda-cupti", "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-cufft", "nvidia-cufile", "nvidia-curand", "nvidia-cusolver",
    "nvidia-cusparse", "nvidia-cusparselt-cu13", "nvidia-nccl-cu13", "nvidia-nvjitlink", "nvidia-nvshmem-cu13",
    "nvidia-nvtx",
)  # fmt: skip
HEAD = """\
# Written by `python -m tests.lock`: what the tests run with on Python 3.11 or later, each file by its hash. Use it as
#   pip install --require-hashes --no-deps -r requirements-ci.lock
# torch is not in it: a machine brings its own build, of the version in constraints.txt.
"""


def compiled(*arguments: str) -> str:
    """Return what uv resolves: names, versions, markers and hashes."""
    command = ["uv", "pip", "compile", *arguments, "-c", "constraints.txt", "--universal", "--python-version", "3.11"]
    command += ["--generate-hashes", "--no-emit-index-url", "--no-header", "--no-annotate", "--quiet"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    left_out = [word for name in BY_TORCH for word in ("--no-emit-package", name)]
    tests = compiled("pyproject.toml", "--extra", "test", *left_out)
    LOCK.write_text(HEAD + tests + compiled("tests/requirements-oracles.txt", "--no-deps"), encoding="utf-8")


if __name__ == "__main__":
    main()
