"""What a launch calls in CUDA, counted without a GPU: a small layer waits for the host, and each call costs it.

The very host code that is shipped, but linked with a runtime (cuda_calls.c) that counts.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp4dispatch import jit, libraries
from fp4dispatch.jit.manifest import installed

tvm_ffi = pytest.importorskip("tvm_ffi")

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        libraries.nvcc()[0] is None or libraries.cutlass() is None, reason="needs nvcc and the CUTLASS headers"
    ),
]

HERE = Path(__file__).parent
E4M3, F32, BF16, U8 = (10, 8), (2, 32), (4, 16), (1, 8)
M, N, K = 5, 512, 256


def rows(kind: tuple[int, int], *shape: int) -> list[Any]:
    return [*kind, list(shape), [shape[1], 1] if len(shape) == 2 else [1]]


def gemm(scales: list[Any]) -> list[Any]:
    return [rows(E4M3, M, K), rows(E4M3, N, K), *scales, None, rows(BF16, M, N), rows(U8, 0), True]


BY_ROW = [rows(F32, M), rows(F32, N)]
BY_BLOCK = [[*F32, [M, K // 128], [1, 8]], rows(F32, N // 128, K // 128)]
GEMM = "fp8_gemm_sm90"

# kernel, variant, function, arguments, TMA descriptors of a launch
CASES = [
    ("fp8_quantize", "any", "fp8_quantize_row", [rows(BF16, M, K), rows(E4M3, M, K), rows(F32, M), True], 0),
    (GEMM, "row_bf16_swap_64x16", "fp8_gemm", gemm(BY_ROW), 3),
    (GEMM, "row_bf16_128x128", "fp8_gemm", gemm(BY_ROW), 3),
    (GEMM, "block_bf16_swap_128x16", "fp8_gemm", gemm(BY_BLOCK), 3),
    (GEMM, "block_bf16_128x128", "fp8_gemm", gemm(BY_BLOCK), 4),
]
QUICK = ("any", "row_bf16_swap_64x16")


def cases() -> list[Any]:
    return [pytest.param(case, id=case[1], marks=() if case[1] in QUICK else pytest.mark.slow) for case in CASES]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runtime that counts."""
    nvcc, built = libraries.nvcc()[0], tmp_path_factory.mktemp("runtime") / "libcounts.so"
    assert nvcc is not None
    flags = ["-shared", "-cudart=none", "-Xcompiler=-fPIC,-w"]
    subprocess.run([nvcc.path, *flags, "-o", str(built), str(HERE / "cuda_calls.c")], check=True)
    return built


def unlinked(kernel: str, variant: str) -> Path:
    """Return a kernel's library that takes its CUDA runtime from whoever loads it."""
    catalog = installed()
    flags = tuple("-cudart=none" if flag == "-cudart=static" else flag for flag in catalog.common.nvcc)
    assert flags != catalog.common.nvcc
    common = dataclasses.replace(catalog.common, nvcc=flags)
    return jit.build(kernel, variant, "90a", catalog=dataclasses.replace(catalog, common=common)).entry.library


def launches(runtime: Path, case: tuple[Any, ...], *steps: tuple[int, str]) -> list[Any]:
    kernel, variant, function, arguments, _ = case
    command = [sys.executable, str(HERE / "host_calls.py"), str(runtime), str(unlinked(kernel, variant)), function]
    given = json.dumps({"arguments": arguments, "steps": steps})
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", cases())
def test_a_launch_calls_cuda_for_nothing_that_can_be_done_once(case: tuple[Any, ...], runtime: Path) -> None:
    maps = case[-1]
    each = {"cudaGetDevice": 1, "cudaLaunchKernelExC": 1}
    if maps:  # CUTLASS asks the version for each
        each |= {"cuTensorMapEncodeTiled": maps, "cudaDriverGetVersion": maps}
    a_device = {"cudaFuncSetAttribute": 1, "cudaDeviceGetAttribute": 1} if maps else {}
    process = {"cudaGetDriverEntryPoint": 1} if maps else {}
    there_and_back = {"cudaSetDevice": 2}

    steps = launches(runtime, case, *((device, "") for device in (0, 0, 1, 1, 0)))
    assert [step["error"] for step in steps] == [""] * 5
    assert {step["current"] for step in steps} == {0}
    first, second, other, other_again, back = (step["calls"] for step in steps)
    assert second == back == each
    assert first == each | a_device | process
    assert other == each | a_device | there_and_back, "attributes of a kernel are a device's own"
    assert other_again == each | there_and_back


@pytest.mark.parametrize("case", cases())
def test_an_error_is_raised_and_what_failed_is_done_by_the_next_launch(case: tuple[Any, ...], runtime: Path) -> None:
    failing = ["cudaGetDevice", "cudaLaunchKernelExC"]
    if case[-1]:
        once = ["cudaFuncSetAttribute", "cudaDeviceGetAttribute", "cudaGetDriverEntryPoint"]
        failing = [*once, "cuTensorMapEncodeTiled", *failing]
    *failed, last = launches(runtime, case, *((0, name) for name in failing), (0, ""))
    for name, step in zip(failing, failed, strict=True):
        wanted = (
            "cuTensorMapEncodeTiled" if name in ("cuTensorMapEncodeTiled", "cudaGetDriverEntryPoint") else "planted"
        )
        assert wanted in step["error"], name
        assert step["calls"][name] == 1
        assert ("cudaLaunchKernelExC" in step["calls"]) == (name == "cudaLaunchKernelExC")
    assert last["error"] == ""
    assert last["calls"]["cudaLaunchKernelExC"] == 1
