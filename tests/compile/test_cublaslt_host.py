"""What our host code asks cuBLASLt for, without a GPU: a library that only writes it down (cublaslt_calls.c).

The numbers are those of cublasLt.h of CUDA 12.9 and 13; the values are those that torch's operator passes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp4dispatch.machine import libraries
from tests.compile.test_host_calls import BF16, E4M3, F32, HERE, U8, rows, unlinked

tvm_ffi = pytest.importorskip("tvm_ffi")

pytestmark = [pytest.mark.compile, pytest.mark.skipif(libraries.nvcc()[0] is None, reason="needs nvcc")]

F16 = (2, 16)
M, N, K = 5, 48, 256
TENSOR, ROW, BLOCK = range(3)
CUDA_16F, CUDA_16BF, CUDA_E4M3 = 2, 14, 28
NAMES = ("a", "b", "a_scale", "b_scale", "bias", "d", "workspace", "x", "x_scale")
AT = {name: (i + 1) << 20 for i, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The runtime, cuBLASLt and our library."""
    nvcc, folder = libraries.nvcc()[0], tmp_path_factory.mktemp("libraries")
    assert nvcc is not None
    flags = [nvcc.path, "-shared", "-cudart=none", "-Xcompiler=-fPIC,-w"]
    runtime, cublaslt = folder / "libcounts.so", folder / "libcublasLt.so.13"
    subprocess.run([*flags, "-o", str(runtime), str(HERE / "cuda_calls.c")], check=True)
    soname = ["-Xlinker=-soname,libcublasLt.so.13"]
    subprocess.run([*flags, *soname, "-o", str(cublaslt), str(HERE / "cublaslt_calls.c")], check=True)
    return [str(path) for path in (runtime, cublaslt, unlinked("fp8_quantize", "any"))]


def rows_of(scales: int) -> int:
    """M of a plan: under block scales 5 tokens are 8."""
    return 8 if scales == BLOCK else M


def tensors(scales: int = ROW, fp16: bool = False, biased: bool = True, **replaced: Any) -> dict[str, Any]:
    out, m = F16 if fp16 else BF16, rows_of(scales)
    a_scale = {TENSOR: rows(F32, 1), ROW: rows(F32, m), BLOCK: [*F32, [m, 2], [1, m]]}[scales]
    b_scale = {TENSOR: rows(F32, 1), ROW: rows(F32, N), BLOCK: rows(F32, 1, 4)}[scales]
    made: dict[str, Any] = {
        "x": rows(out, M, K),
        "x_scale": rows(F32, 1) if scales == TENSOR else None,
        "a": rows(E4M3, m, K),
        "b": rows(E4M3, N, K),
        "a_scale": a_scale,
        "b_scale": b_scale,
        "bias": rows(out, N) if biased else None,
        "d": rows(out, m, N),
        "workspace": rows(U8, 64),
    } | replaced
    return {name: given and [*given, AT[name]][:5] for name, given in made.items()}


def plan(scales: int = ROW, fp16: bool = False, biased: bool = True, major: int = 13, device: int = 0) -> list[Any]:
    return [major, device, rows_of(scales), N, K, scales, fp16, biased, True]


def outcome(shared: list[str], *steps: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, str(HERE / "cublaslt_host.py"), *shared]
    env = os.environ | {"LD_LIBRARY_PATH": str(Path(shared[1]).parent)}  # it could be loaded, but is not to be
    given = json.dumps(steps)
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def operation(scales: int, fp16: bool, biased: bool, at: dict[str, int]) -> list[str]:
    def attribute(number: int, size: int, value: int) -> str:
        return f"cublasLtMatmulDescSetAttribute {number} {size} {value}"

    # CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, _OUTER_VEC_32F; _BLK128x128_32F of the weight, _VEC128_32F of tokens
    weight_mode, token_mode = {TENSOR: (0, 0), ROW: (3, 3), BLOCK: (5, 4)}[scales]
    bias = [attribute(8, 8, at["bias"]), attribute(7, 4, 4), attribute(26, 4, CUDA_16F if fp16 else CUDA_16BF)]
    return [
        "cublasLtMatmulDescCreate 68 0",  # CUBLAS_COMPUTE_32F, CUDA_R_32F
        attribute(3, 4, 1),  # TRANSA: CUBLAS_OP_T
        attribute(4, 4, 0),  # TRANSB: CUBLAS_OP_N
        attribute(17, 8, at["b_scale"]),  # A_SCALE_POINTER: columns come first, so A is the weight
        attribute(18, 8, at["a_scale"]),
        attribute(25, 1, 0),  # FAST_ACCUM
        *(bias if biased else []),
        attribute(31, 4, weight_mode),
        attribute(32, 4, token_mode),
    ]


@pytest.mark.parametrize("scales", [TENSOR, ROW, BLOCK])
@pytest.mark.parametrize("fp16", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_asked_for_what_torch_asks_it(scales: int, fp16: bool, biased: bool, shared: list[str]) -> None:
    kind, m = (scales, fp16, biased), rows_of(scales)
    step = {"plan": plan(*kind), "tensors": tensors(*kind), "answer": (1, 64, 130000)}
    versions, first, second = outcome(shared, step, step)
    assert versions == {"before": 0, "after": 130000}, "only what the process has loaded"
    out = CUDA_16F if fp16 else CUDA_16BF
    shapes = f"{K * 100000 + N} {K * 100000 + m} {N * 100000 + m} {N * 100000 + m}"
    planned = [
        f"cublasLtMatrixLayoutCreate {CUDA_E4M3} {K} {N} {K}",
        f"cublasLtMatrixLayoutCreate {CUDA_E4M3} {K} {m} {K}",
        f"cublasLtMatrixLayoutCreate {out} {N} {m} {N}",
        *operation(*kind, dict.fromkeys(AT, 1 << 32)),
        "cublasLtMatmulPreferenceCreate ",
        f"cublasLtMatmulPreferenceSetAttribute 1 8 {1 << 20}",
        f"cublasLtMatmulAlgoGetHeuristic {shapes}",
    ]
    addresses = f"{AT['b']} {AT['a']} 1 {AT['d']} {AT['workspace']} 64"
    changed = [pointer(17, AT["b_scale"]), pointer(18, AT["a_scale"])]
    changed += [pointer(8, AT["bias"])] if biased else []
    held = f"{AT['b_scale']} {AT['a_scale']} {AT['bias'] if biased else 0}"
    launched = [*changed, f"cublasLtMatmul 1 0 {addresses} 40 47 | {shapes} | {held}"]
    assert first["planned"] == ["cublasLtCreate ", *planned]
    assert second["planned"] == planned, "one handle for a device"
    for step in (first, second):
        assert step["error"] == ""
        assert step["workspace"] == 64
        assert step["launched"] == [launched]
        assert step["kernels"] == [1], "the quantiser's"
        assert step["alive_launched"] - step["alive"] == 4, "a plan keeps its descriptors and gives them back"
    assert first["alive"] == second["alive"] == 1, "the handle"


def pointer(number: int, address: int) -> str:
    return f"cublasLtMatmulDescSetAttribute {number} 8 {address}"


def test_a_further_launch_says_only_what_changed(shared: list[str]) -> None:
    def moved(*names: str) -> dict[str, Any]:
        return {name: [*tensors()[name][:4], AT[name] + 4096] for name in names}

    again = [{}, moved("d", "a", "b", "x", "workspace"), moved("a_scale"), moved("b_scale"), moved("bias"), {}]
    step = {"plan": plan(), "tensors": tensors(), "answer": (1, 64, 130000), "again": again}
    _, row = outcome(shared, step)
    assert row["error"] == ""
    first, *others = [[line for line in lines if "Set" in line] for lines in row["launched"]]
    numbers = {"b_scale": 17, "a_scale": 18, "bias": 8}
    assert first == [pointer(number, AT[name]) for name, number in numbers.items()]
    changed = [[], [], *([pointer(numbers[n], AT[n] + 4096)] for n in ("a_scale", "b_scale", "bias")), []]
    assert others == changed
    held, at = [lines[-1].split(" | ")[-1] for lines in row["launched"]], dict(AT)
    for found, replaced in zip(held, [{}, *again], strict=True):
        at |= {name: AT[name] + 4096 for name in replaced}
        assert found == f"{at['b_scale']} {at['a_scale']} {at['bias']}"
    assert all(len(lines) == 1 + len(sets) for lines, sets in zip(row["launched"], [first, *others], strict=True))
    assert row["kernels"] == [1] * 7


def test_a_launch_beside_another_has_a_descriptor_of_its_own(shared: list[str]) -> None:
    other = {"a_scale": [*tensors()["a_scale"][:4], 1 << 30], "bias": [*tensors()["bias"][:4], 1 << 31]}
    step = {"plan": plan(), "tensors": tensors(), "answer": (1, 64, 130000), "again": [other], "nested": True}
    _, row = outcome(shared, step)
    assert row["error"] == ""
    (lines,) = row["launched"]
    inner, outer = [line.split(" | ")[-1] for line in lines if line.startswith("cublasLtMatmul ")]
    assert inner == f"{AT['b_scale']} {1 << 30} {1 << 31}"
    assert outer == f"{AT['b_scale']} {AT['a_scale']} {AT['bias']}"
    assert row["alive_launched"] - row["alive"] == 5


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"a": rows(E4M3, M + 1, K)}, "a: size of dimension 0 is 6, needed 5"),
        ({"b": rows(E4M3, N, K + 16)}, "b: size of dimension 1 is 272"),
        ({"b": rows(U8, N, K)}, "b: dtype is uint8"),
        ({"a_scale": rows(F32, 1)}, "a_scale: has 1 elements, needed 5"),
        ({"b_scale": rows(F32, M)}, "b_scale: has 5 elements, needed 48"),
        ({"bias": None}, "bias: the plan is for one"),
        ({"bias": rows(F16, N)}, "bias: dtype is float16, needed bfloat16"),
        ({"d": rows(F16, M, N)}, "d: dtype is float16, needed bfloat16"),
        ({"d": [*BF16, [M, N], [1, M]]}, "d: not contiguous"),
        ({"workspace": rows(U8, 63)}, "workspace: has 63 bytes, needed 64"),
        ({"workspace": None}, "workspace: has 0 bytes, needed 64"),
        ({"x": rows(F16, M, K)}, "x: dtype is float16, needed bfloat16"),
        ({"x": rows(BF16, M + 1, K)}, "q: size of dimension 0 is 5, needed 6"),
        ({"x_scale": rows(F32, 2)}, "scale: has 2 elements, needed 1"),
        ({"x": None, "x_scale": rows(F32, 1)}, "x_scale: is for x, which is None"),
    ],
)
def test_wrong_operands_are_refused_before_any_call(replaced: dict[str, Any], message: str, shared: list[str]) -> None:
    step = {"plan": plan(), "tensors": tensors(**replaced), "answer": (1, 64, 130000)}
    _, row = outcome(shared, step)
    assert message in row["error"]
    assert row["launched"] == []
    assert row["kernels"] == [0]


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"x": rows(BF16, 4, K)}, "x: has 4 rows, the plan is for 5 to 8"),
        ({"x": rows(BF16, 9, K)}, "x: has 9 rows, the plan is for 5 to 8"),
        ({"x": rows(BF16, 0, K)}, "x: has 0 rows, the plan is for 5 to 8"),
        ({"x": rows(BF16, M, K + 16)}, "x: size of dimension 1 is 272"),
        ({"a": rows(E4M3, M, K)}, "a: size of dimension 0 is 5, needed 8"),
        ({"d": rows(BF16, M, N)}, "d: size of dimension 0 is 5, needed 8"),
        ({"a_scale": rows(F32, 8, 2)}, "a_scale: strides are 2 and 1, needed 1 and 8"),
        ({"a_scale": [*F32, [8, 2], [1, 12]]}, "a_scale: strides are 1 and 12, needed 1 and 8"),
        ({"a_scale": [*F32, [8, 3], [1, 8]]}, "a_scale: size of dimension 1 is 3, needed 2"),
        ({"a_scale": rows(F32, 8)}, "a_scale"),
        ({"b_scale": rows(F32, 1, 2)}, "b_scale: size of dimension 1 is 2, needed 4"),
        ({"b_scale": rows(F32, 2, 4)}, "b_scale: size of dimension 0 is 2, needed 1"),
    ],
)
def test_wrong_operands_under_block_scales_are_refused_before_any_call(
    replaced: dict[str, Any], message: str, shared: list[str]
) -> None:
    step = {"plan": plan(BLOCK), "tensors": tensors(BLOCK, **replaced), "answer": (1, 64, 130000)}
    _, row = outcome(shared, step)
    assert message in row["error"]
    assert row["launched"] == []
    assert row["kernels"] == [0]


def test_block_scales_take_every_m_up_to_the_plans(shared: list[str]) -> None:
    again = [{"x": [*rows(BF16, m, K), AT["x"]]} for m in (6, 7, 8)]
    step = {"plan": plan(BLOCK), "tensors": tensors(BLOCK), "answer": (1, 64, 130000), "again": again}
    _, row = outcome(shared, step)
    assert row["error"] == ""
    assert row["kernels"] == [1] * 4
    assert [lines[-1].split(" ")[0] for lines in row["launched"]] == ["cublasLtMatmul"] * 4


@pytest.mark.parametrize("scales", [TENSOR, ROW, BLOCK])
def test_activations_that_are_ready_are_multiplied_alone(scales: int, shared: list[str]) -> None:
    given = tensors(scales, x=None, x_scale=None)
    _, row = outcome(shared, {"plan": plan(scales), "tensors": given, "answer": (1, 64, 130000)})
    assert row["error"] == ""
    assert row["kernels"] == [0]
    assert row["launched"][0][-1].startswith(f"cublasLtMatmul 1 0 {AT['b']} {AT['a']} ")


def test_an_operand_that_is_not_aligned_or_is_elsewhere_is_refused(shared: list[str]) -> None:
    moved = tensors()
    moved["d"][4] += 8
    _, row, other = outcome(
        shared,
        {"plan": plan(), "tensors": moved},
        {"plan": plan(), "tensors": tensors(), "device": 1},
    )
    assert "d: address is 8 past a multiple of 16" in row["error"]
    assert "a: is on cuda:1, the plan is for cuda:0" in other["error"]
    assert row["launched"] == other["launched"] == []


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"plan": plan(major=12)}, "cuBLASLt of CUDA 12: not loaded"),
        ({"plan": [13, 0, M, N, K, BLOCK, False, True, True]}, "M is 5, needed a multiple of 4"),
        ({"plan": [13, 0, M, N, K, 3, False, True, True]}, "scales: 3, needed 0 (tensor), 1 (row) or 2 (block)"),
        ({"answer": (1, 0, 120804)}, "too old (120804)"),
        ({"answer": (0, 0, 130000)}, "no algorithm for M=5, N=48, K=256"),
        ({"answer": (1, (1 << 20) + 1, 130000)}, "no algorithm for M=5, N=48, K=256"),
        ({"fail": "cublasLtCreate"}, "cublasLtCreate failed with status 7"),
        ({"fail": "cublasLtMatrixLayoutCreate"}, "cublasLtMatrixLayoutCreate failed"),
        ({"fail": "cublasLtMatmulDescCreate"}, "cublasLtMatmulDescCreate failed"),
        ({"fail": "cublasLtMatmulDescSetAttribute"}, "cublasLtMatmulDescSetAttribute failed"),
        ({"fail": "cublasLtMatmulPreferenceSetAttribute"}, "cublasLtMatmulPreferenceSetAttribute failed"),
        ({"fail": "cublasLtMatmulAlgoGetHeuristic"}, "cublasLtMatmulAlgoGetHeuristic failed"),
        ({"fail": "cublasLtMatmul"}, "cublasLtMatmul failed with status 7"),
    ],
)
def test_what_fails_says_so_and_the_next_plan_works(step: dict[str, Any], message: str, shared: list[str]) -> None:
    good = {"plan": plan(), "tensors": tensors()}
    _, failed, after = outcome(shared, good | step, good)
    assert message in failed["error"]
    assert after["error"] == ""
    assert after["launched"]
    assert after["alive"] == 1, "nothing of the failed plan is left"


def test_a_device_has_a_handle_of_its_own(shared: list[str]) -> None:
    steps = [{"plan": plan(device=d), "tensors": tensors(workspace=None), "device": d} for d in (0, 1, 1, 0)]
    _, *found = outcome(shared, *steps)
    assert ["cublasLtCreate " in row["planned"] for row in found] == [True, True, False, False]
    assert all(row["error"] == "" and row["launched"] for row in found)
