"""Runs in a process of its own, started by test_cublaslt_host.py: plans and launches on tensors that only seem on GPUs.

    python cublaslt_host.py RUNTIME CUBLASLT LIBRARY < steps.json

A step is a dict: ``plan`` (arguments), ``tensors`` (name to ``[dlpack code, bits, shape, strides, address]``, or None),
``again`` (tensors of further launches of that plan, which replace those before), ``nested`` (the last of them launches
while the one before it multiplies, as another thread's may), ``fail`` (a call), ``answer`` (algorithms, workspace,
version). Prints JSON: for each step the lines that cuBLASLt wrote while planning and at each launch, how many kernels
of ours each launched, the size of the workspace, the error, and how many descriptors are alive.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import sys
from typing import Any

from host_calls import OnGpu  # first: it keeps torch out

import tvm_ffi  # isort: skip

ORDER = ("x", "x_scale", "a", "a_scale", "b", "b_scale", "bias", "d", "workspace")
KEEP: list[OnGpu] = []


def main(runtime: str, cublaslt: str, library: str) -> None:
    """Do the steps."""
    fake = ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    fake.counted_name.restype, fake.counted_calls.restype = ctypes.c_char_p, ctypes.c_long
    module = tvm_ffi.load_module(library)
    before = module.cublaslt_version(13)
    lt = ctypes.CDLL(cublaslt, mode=ctypes.RTLD_GLOBAL)
    lt.lt_log.restype = ctypes.c_char_p
    lt.lt_answer.argtypes = (ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t)

    def log() -> list[str]:
        lines: list[str] = lt.lt_log().decode().splitlines()
        lt.lt_reset()
        return lines

    def kernels() -> int:
        names = list(iter(map(fake.counted_name, itertools.count()).__next__, None))
        launched = sum(fake.counted_calls(i) for i, name in enumerate(names) if name == b"cudaLaunchKernelExC")
        fake.counts_reset()
        return launched

    rows: list[dict[str, Any]] = [{"before": before, "after": module.cublaslt_version(13)}]
    for step in json.load(sys.stdin):
        lt.lt_fail(step.get("fail", "").encode())
        lt.lt_answer(*step.get("answer", (1, 0, 130000)))
        row: dict[str, Any] = {"error": "", "launched": [], "kernels": [], "alive_before": lt.lt_alive()}
        gemm = callback = None
        kernels()
        try:
            gemm, row["workspace"] = module.cublaslt_fp8_plan(*step["plan"])
            row["planned"] = log()
            tensors = step["tensors"]
            calls = [_arguments(tensors, step.get("device", 0))]
            for replaced in step.get("again", []):
                tensors = tensors | replaced
                calls.append(_arguments(tensors, step.get("device", 0)))
            if step.get("nested"):
                inner = calls.pop()
                callback = ctypes.CFUNCTYPE(None)(functools.partial(gemm, *inner))
                lt.lt_during(callback)
            for arguments in calls:
                gemm(*arguments)
                row["launched"].append(log())
                row["kernels"].append(kernels())
            row["alive_launched"] = lt.lt_alive()
        except (RuntimeError, TypeError, ValueError) as raised:
            row["error"] = str(raised)
            row["launched" if "planned" in row else "planned"] = log()
            row["kernels"].append(kernels())
        del gemm, callback
        rows.append(row | {"alive": lt.lt_alive()})
    print(json.dumps(rows))


def _arguments(tensors: dict[str, Any], device: int) -> list[Any]:
    made = []
    for name in ORDER:
        given = tensors[name]
        if given is not None:
            KEEP.append(OnGpu(*given[:4], device, given[4]))
        made.append(None if given is None else tvm_ffi.from_dlpack(KEEP[-1]))
    return made


if __name__ == "__main__":
    main(*sys.argv[1:])
