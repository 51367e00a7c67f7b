"""Runs in a process of its own, started by test_cublaslt_host.py: plans and launches on tensors that only seem on GPUs.

    python cublaslt_host.py RUNTIME CUBLASLT LIBRARY < steps.json

A step is a dict: ``plan`` (arguments), ``tensors`` (name to ``[dlpack code, bits, shape, strides, address]``, or None),
``fail`` (a call), ``answer`` (algorithms, workspace, version). Prints JSON: for each step the lines that cuBLASLt wrote
while planning and while launching, the size of the workspace, the error, and how many descriptors are alive.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

from host_calls import OnGpu  # first: it keeps torch out

import tvm_ffi  # isort: skip

ORDER = ("a", "b", "a_scale", "b_scale", "bias", "d", "workspace")


def main(runtime: str, cublaslt: str, library: str) -> None:
    """Do the steps."""
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    module = tvm_ffi.load_module(library)
    before = module.cublaslt_version(13)
    lt = ctypes.CDLL(cublaslt, mode=ctypes.RTLD_GLOBAL)
    lt.lt_log.restype = ctypes.c_char_p
    lt.lt_answer.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t)

    def log() -> list[str]:
        lines: list[str] = lt.lt_log().decode().splitlines()
        lt.lt_reset()
        return lines

    keep: list[Any] = []
    rows: list[dict[str, Any]] = [{"before": before, "after": module.cublaslt_version(13)}]
    for step in json.load(sys.stdin):
        lt.lt_fail(step.get("fail", "").encode())
        lt.lt_answer(*step.get("answer", (1, 0, 130000)))
        row: dict[str, Any] = {"error": "", "launched": [], "alive_before": lt.lt_alive()}
        gemm = None
        try:
            gemm, row["workspace"] = module.cublaslt_fp8_plan(*step["plan"])
            row["planned"] = log()
            arguments = []
            for name in ORDER:
                given = step["tensors"][name]
                if given is not None:
                    keep.append(OnGpu(*given[:4], step.get("device", 0), given[4]))
                arguments.append(None if given is None else tvm_ffi.from_dlpack(keep[-1]))
            gemm(*arguments)
            row["alive_launched"] = lt.lt_alive()
        except (RuntimeError, TypeError, ValueError) as raised:
            row["error"] = str(raised)
        row["launched" if "planned" in row else "planned"] = log()
        del gemm
        rows.append(row | {"alive": lt.lt_alive()})
    print(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
