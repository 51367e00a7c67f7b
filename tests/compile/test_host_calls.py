"""What a launch calls in CUDA, counted without a GPU: a small layer waits for the host, and each call costs it.

The very host code that is shipped, but linked with a runtime (cuda_calls.c) that counts.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp4dispatch import jit
from fp4dispatch.backends.own.tiling import few_tokens
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.machine import libraries

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
GEMM, FEW, MANY, MANY_W4 = "fp8_gemm_sm90", "w8a8_small", "w8_gemm_sm90", "w4_gemm_sm90"
FEW_W4 = "w4a16_small"
PACKED = [[*U8, [2, 1, 1024], [1024, 1024, 1]], rows(F32, M), rows(E4M3, N, K), rows(F32, N)]
OUT, SHAPE = [None, rows(BF16, M, N)], {"numbers": [1, 1, 8, 1, 0, 4]}
W4P = [*U8, [N // 64, K // 64, 2304], [K // 64 * 2304, 2304, 1]]
AS_THEY_ARE = [rows(BF16, M, K), None, W4P, rows(F32, N), *OUT, SHAPE, True]

# kernel, variant, function, arguments, TMA descriptors of a launch
CASES = [
    ("fp8_quantize", "any", "fp8_quantize_row", [rows(BF16, M, K), rows(E4M3, M, K), rows(F32, M), True], 0),
    (GEMM, "row_bf16_swap_64x16", "fp8_gemm", gemm(BY_ROW), 3),
    (GEMM, "row_bf16_128x128", "fp8_gemm", gemm(BY_ROW), 3),
    (GEMM, "block_bf16_swap_128x16", "fp8_gemm", gemm(BY_BLOCK), 3),
    (GEMM, "block_bf16_128x128", "fp8_gemm", gemm(BY_BLOCK), 4),
    (FEW, "bf16", "w8a8_small", [*PACKED, *OUT, True], 1),
    (FEW_W4, "bf16", FEW_W4, [rows(BF16, 40, K), W4P, rows(F32, N), None, rows(BF16, 40, N), True], 1),
    (MANY, "bf16_128", "w8_gemm", [*PACKED, *OUT, SHAPE, True], 2),
    (MANY, "a16_bf16_128", "w8_gemm", [rows(BF16, M, K), None, *PACKED[2:], *OUT, SHAPE, True], 3),
    (MANY_W4, "a16_bf16_128x128", "w4_gemm", AS_THEY_ARE, 2),
]
QUICK = ("any", "row_bf16_swap_64x16", "bf16", "bf16_128", "a16_bf16_128x128")
FOUND, VERSION = {"cudaGetDriverEntryPoint": 1}, {"cudaDriverGetVersion": 1}
SIZED = {"cudaFuncSetAttribute": 1, "cudaDeviceGetAttribute": 1}
TILES = {
    kernel: {
        "cudaFuncGetAttributes": 1,
        "cudaFuncSetAttribute": len(few_tokens.KERNELS[kernel].instances),
        "cudaDeviceGetAttribute": 3,
    }
    for kernel in (FEW, FEW_W4)
}
ONCE: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "fp8_quantize": ({}, VERSION),
    GEMM: (SIZED, FOUND | VERSION),
    **{kernel: (of_tiles, FOUND | VERSION) for kernel, of_tiles in TILES.items()},
    MANY: ({"cudaFuncSetAttribute": 1}, FOUND | VERSION),
    MANY_W4: ({"cudaFuncSetAttribute": 1}, FOUND | VERSION),
}
"""What a kernel library asks once a device, and once a process."""


def cases(wanted: Callable[[str, str], bool] = lambda kernel, variant: True) -> list[Any]:
    return [
        pytest.param(case, id=f"{case[0]}-{case[1]}", marks=() if case[1] in QUICK else pytest.mark.slow)
        for case in CASES
        if wanted(*case[:2])
    ]


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


def launches(runtime: Path, case: tuple[Any, ...], *steps: tuple[Any, ...], driver: int = 13000) -> list[Any]:
    kernel, variant, function, arguments, _ = case
    command = [sys.executable, str(HERE / "host_calls.py"), str(runtime), str(unlinked(kernel, variant)), function]
    defaults: tuple[Any, ...] = (0, "", {}, False)
    whole = [(*step, *defaults[len(step) :]) for step in steps]
    given = json.dumps({"arguments": arguments, "steps": whole, "driver": driver})
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", cases())
def test_a_launch_calls_cuda_for_nothing_that_can_be_done_once(case: tuple[Any, ...], runtime: Path) -> None:
    maps = case[-1]
    each = {"cudaGetDevice": 1, "cudaLaunchKernelExC": 1}
    a_device, process = ONCE[case[0]]
    operands = {"cuTensorMapEncodeTiled": maps} if maps else {}
    there_and_back = {"cudaSetDevice": 2}

    steps = launches(runtime, case, *((device,) for device in (0, 0, 1, 1, 0)), (0, "", {}, True))
    assert [step["error"] for step in steps] == [""] * 6
    assert {step["current"] for step in steps} == {0}
    first, second, other, other_again, back, thread = (step["calls"] for step in steps)
    assert second == back == each
    assert first == each | a_device | process | operands
    assert thread == each | operands, "descriptors are a thread's own"
    assert other == each | a_device | there_and_back, "attributes of a kernel are a device's own"
    assert other_again == each | there_and_back


@pytest.mark.parametrize("case", cases())
def test_an_error_is_raised_and_what_failed_is_done_by_the_next_launch(case: tuple[Any, ...], runtime: Path) -> None:
    a_device, process = ONCE[case[0]]
    encode = ["cuTensorMapEncodeTiled"] if case[-1] else []
    failing = [*a_device, *list(process)[:1], *encode, *list(process)[1:], "cudaGetDevice", "cudaLaunchKernelExC"]
    named = {name: name for name in (*encode, *process)} | {"cudaGetDriverEntryPoint": "cuTensorMapEncodeTiled"}
    *failed, last = launches(runtime, case, *((0, name) for name in failing), (0, ""))
    for name, step in zip(failing, failed, strict=True):
        assert named.get(name, "planted") in step["error"], name
        assert step["calls"][name] == 1
        assert ("cudaLaunchKernelExC" in step["calls"]) == (name == "cudaLaunchKernelExC")
        if name == "cudaDriverGetVersion" and encode:
            maps = 1 if case[0] == GEMM else case[-1]
            assert step["calls"]["cuTensorMapEncodeTiled"] == maps, "a descriptor that was refused was not kept"
    assert last["error"] == ""
    assert last["calls"]["cudaLaunchKernelExC"] == 1


@pytest.mark.parametrize("case", cases())
@pytest.mark.parametrize(("driver", "wanted"), [(13000, 100), (12080, 100), (12070, -1)])
def test_every_kernel_asks_for_the_largest_shared_memory(
    case: tuple[Any, ...], driver: int, wanted: int, runtime: Path
) -> None:
    """Or a GEMM finds no room beside a kernel before it. In percent; an older driver is not asked."""
    (step,) = launches(runtime, case, (0,), driver=driver)
    assert (step["error"], step["carveout"], step["pdl"]) == ("", wanted, 1)


def at_once(variant: str, scales: list[Any], quantize: str) -> tuple[Any, ...]:
    """Return the case of a quantiser and a GEMM in one call."""
    function = {"library": str(unlinked("fp8_quantize", "any")), "function": quantize}
    a, b, *_ = gemm(scales)
    arguments = [function, rows(BF16, M, K), a, b, *scales, None, rows(BF16, M, N), True, True]
    return GEMM, variant, "fp8_quantize_gemm", arguments, 3


AT_ONCE = [
    pytest.param("row_bf16_swap_64x16", BY_ROW, "fp8_quantize_row"),
    pytest.param("row_bf16_swap_64x16", [rows(F32, 1), rows(F32, 1)], "fp8_quantize_tensor"),
    pytest.param("block_bf16_swap_128x16", BY_BLOCK, "fp8_quantize_1x128", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("variant", "scales", "quantize"), AT_ONCE)
def test_one_call_quantises_and_multiplies(variant: str, scales: list[Any], quantize: str, runtime: Path) -> None:
    case = at_once(variant, scales, quantize)
    wrong = [
        {"5": rows(F32, 3, 3)},  # the GEMM's
        {"1": rows(BF16, M + 1, K)},  # the quantiser's
        {"2": rows(E4M3, M, K + 16)},  # of both
    ]
    each = {"cudaGetDevice": 2, "cudaLaunchKernelExC": 2}
    steps = [(0,), (0,), (1,), (0, "cudaLaunchKernelExC"), *((0, "", replaced) for replaced in wrong), (0,)]
    first, second, other, fails, *refused, last = launches(runtime, case, *steps)
    assert first["error"] == second["error"] == other["error"] == last["error"] == ""
    assert first["calls"].items() >= each.items()
    assert first["calls"]["cuTensorMapEncodeTiled"] == 3
    assert second["calls"] == last["calls"] == each
    assert other["calls"]["cudaSetDevice"] == 4
    assert other["current"] == 0
    assert "planted" in fails["error"]
    assert fails["calls"] == {"cudaGetDevice": 1, "cudaLaunchKernelExC": 1}, "no GEMM of what was not quantised"
    for step in refused:
        assert "needed" in step["error"]
        assert step["calls"] == {}


def at(index: int, offset: int = 0) -> int:
    return (1 << 44) + (index << 32) + offset


@pytest.mark.parametrize("case", cases(lambda kernel, variant: variant.startswith("row_")))
def test_a_launch_has_the_descriptors_of_its_own_operands(case: tuple[Any, ...], runtime: Path) -> None:
    arguments = case[3]
    moves: list[dict[int, int]] = [{}, {}, {0: 4096}, {1: 4096}, {5: 4096}, {}, {0: 4096, 1: 4096, 5: 4096}]
    moves += [{5: i << 12} for i in range(1500)]  # more than are kept
    moves += [{5: i << 12} for i in (1499, 1499, 1, 0, 0, 700)]
    wanted, steps = [], []
    for i, moved in enumerate(moves):
        m = M if i % 7 else 2 * M  # the same addresses for another M
        shapes = {0: rows(E4M3, m, K), 1: arguments[1], 2: rows(F32, m), 5: rows(BF16, m, N)}
        replaced = {i: [*shape, at(i, moved.get(i, 0))] for i, shape in shapes.items()}
        steps.append((0, "", replaced))
        sizes = {0: (K, m), 1: (K, N), 5: (N, m)}
        # CUTLASS clears a bit of descriptors of small tensors, below 128 KiB, on drivers such as this one's.
        wanted.append(sorted([at(i, moved.get(i, 0)), *sizes[i], i != 1] for i in sizes))
    found = launches(runtime, case, *steps)
    assert {step["error"] for step in found} == {""}
    assert [sorted(step["maps"][:3]) for step in found] == wanted
    made = [step["calls"].get("cuTensorMapEncodeTiled", 0) for step in found]
    assert made[:7] == [3, 2, 1, 1, 1, 0, 0]
    assert sum(made[7:]) < 1500 * 1.4
    again = made[-6:]
    assert again[1] == again[4] == 0


@pytest.mark.parametrize("case", cases(lambda kernel, variant: kernel in (FEW, MANY)))
def test_a_weight_has_one_descriptor_whatever_the_tokens(case: tuple[Any, ...], runtime: Path) -> None:
    weights = [
        *((0, N, K), (0, N, K), (4096, N, K), (0, N, K)),  # another address
        *((0, N - 1, K), (0, N, K)),  # rows of the same memory
        *((0, N, K + 16), (0, N, K)),
    ]
    steps: list[Any] = []
    for i, (offset, n, k) in enumerate(weights):
        m = M + 8 * (i % 2)
        x = [*U8, [-(-k // 128), -(-m // 8), 1024], [-(-m // 8) * 1024, 1024, 1]]
        replaced = {0: x, 1: rows(F32, m), 2: [*rows(E4M3, n, k), at(2, offset)], 5: rows(BF16, m, N)}
        steps.append((0, "", replaced))
    found = launches(runtime, case, *steps)
    assert {step["error"] for step in found} == {""}
    assert [step["maps"][0] for step in found] == [[at(2, offset), k, n, False] for offset, n, k in weights]
    made = [step["calls"].get("cuTensorMapEncodeTiled", 0) for step in found]
    outputs = [1, 1] if case[0] == MANY else [0, 0]  # of one address, for two M
    assert made == [1 + outputs[0], outputs[1], 1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("case", cases(lambda kernel, variant: kernel == MANY_W4))
def test_tokens_and_outputs_have_descriptors_of_where_they_are(case: tuple[Any, ...], runtime: Path) -> None:
    """One for each address, M, K and row stride; weights, which are elsewhere each time, need none."""
    tokens = [
        *((0, M, K, K), (0, M, K, K), (4096, M, K, K), (0, M, K, K)),  # another address
        *((0, M + 8, K, K), (0, M, K, K)),  # rows of the same memory
        *((0, M, K - 16, K), (0, M, K, K)),  # columns of it
        *((0, M, K, 2 * K), (0, M, K, 2 * K), (0, M, K, K)),  # every other row: of one slot, which the last one has
        *((0, 1, K, K), (0, 1, K, 2 * K)),  # a row has no stride
    ]
    steps: list[Any] = []
    for i, (offset, m, k, stride) in enumerate(tokens):
        x = [*BF16, [m, k], [stride, 1], at(0, offset)]
        steps.append((0, "", {0: x, 2: [*W4P, at(2, i << 12)], 5: [*rows(BF16, m, N), at(5)]}))
    found = launches(runtime, case, *steps)
    assert {step["error"] for step in found} == {""}
    assert [step["maps"][0] for step in found] == [[at(0, offset), k, m, False] for offset, m, k, _ in tokens]
    assert [step["maps"][1] for step in found] == [[at(5), N, m, False] for _, m, *_ in tokens]
    made = [step["calls"].get("cuTensorMapEncodeTiled", 0) for step in found]
    assert made == [2, 0, 1, 0, 2, 0, 1, 0, 1, 0, 1, 2, 0]
