"""Blackwell kernels without a Blackwell GPU: they compile, the binary is proved, the host code refuses what is wrong.

One kernel runs by default; the rest are marked slow (`-m "compile and slow"`), about a minute each.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import compile_targets
from bench.compile_targets import Build
from fp4dispatch.errors import CompileError, ProofError
from fp4dispatch.jit import Built, kernels
from fp4dispatch.jit.catalog import manifest
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.machine import libraries

tvm_ffi = pytest.importorskip("tvm_ffi")

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(
        libraries.nvcc()[0] is None or libraries.cutlass() is None, reason="needs nvcc and the CUTLASS headers"
    ),
]

CI = "nvfp4_gemm_sm120/bf16_128x128/120f"
NVFP4_SM100 = "nvfp4_gemm_sm100/bf16_1sm_128x128/100f"
FP8_SM100 = "fp8_gemm_sm100/bf16_1sm_128x128/100f"
FP8_SM120 = "fp8_gemm_sm120/bf16_128x128/120f"
BUILDS = {build.id: build for build in compile_targets.blackwell_builds()}
# The most shared memory a block may ask for, CUDA programming guide, table of technical specifications.
MAX_SHARED = {"10": 232448, "11": 232448, "12": 101376}


def builds(*ids: str) -> list[Any]:
    return [pytest.param(BUILDS[key], id=key, marks=() if key == CI else pytest.mark.slow) for key in ids or BUILDS]


@functools.cache
def built(build: Build) -> Built:
    """From the kernel cache, compiled first where needed."""
    return build.built()


def module(build: Build) -> Any:
    return tvm_ffi.load_module(str(built(build).entry.library))


def test_the_manifest_holds_every_family() -> None:
    assert {(build.kernel, build.target) for build in BUILDS.values()} == {
        (f"{op}_gemm_{family}", target)
        for op in ("nvfp4", "fp8")
        for family, targets in {"sm100": ("100f", "103a", "110a"), "sm120": ("120f", "121a")}.items()
        for target in targets
    }


@pytest.mark.parametrize("build", builds())
def test_binary(build: Build) -> None:
    assert built(build).pdl_allowed, "the proof of this very library"
    proof = built(build).proof
    assert proof is not None
    (kernel,) = proof.kernels
    assert kernel.wait >= 3, "load warp, scheduler warp and epilogue each wait for the previous kernel"
    assert kernel.unguarded == ()
    assert sum(kernel.mma.values()) >= 4
    assert (kernel.spills, kernel.stack) == (0, 0)
    assert (kernel.signal > 0) == build.kernel.endswith("sm100"), "CUTLASS signals early on SM100 alone"
    assert module(build).shared_memory_bytes() <= MAX_SHARED[build.target[:2]]


def build_with_defines(build: Build, cache: Path, *defines: str) -> None:
    """Build with these defines in place of the target's own."""
    catalog = manifest.installed()
    record = dataclasses.replace(catalog.record(build.target), defines=defines)
    changed = dataclasses.replace(catalog, records={**catalog.records, build.target: record})
    kernels.build(build.kernel, build.variant, build.target, catalog=changed, cache=Cache(cache))


def test_source_refuses_to_build_without_the_define(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="no GDC define"):
        build_with_defines(BUILDS[CI], tmp_path / "cache")


@pytest.mark.slow
def test_binary_without_the_define_is_caught(tmp_path: Path) -> None:
    """The negative control: the same source without the GDC define compiles, and waits for nothing."""
    with pytest.raises(ProofError, match="no grid barrier"):
        build_with_defines(BUILDS[CI], tmp_path / "cache", "FP4D_TEST_ALLOW_NO_GDC")


@pytest.mark.parametrize("build", builds(CI, NVFP4_SM100))
@pytest.mark.parametrize(("rows", "k"), [(128, 64), (1, 32), (300, 96), (257, 1056), (4096, 512)])
def test_scale_layout_is_128x4(build: Build, rows: int, k: int) -> None:
    """The layout of the collective itself against (M/128, 4, 32, K/64, 4) -> (M/128, K/64, 32, 4, 4)."""
    found = torch.full((rows, k // 16), -1, dtype=torch.int32)
    module(build).scale_offsets(rows, k, found)
    tiles_m, tiles_k = -(-rows // 128), -(-k // 64)
    stored = torch.arange(tiles_m * tiles_k * 512, dtype=torch.int32).view(tiles_m, tiles_k, 32, 4, 4)
    needed = stored.permute(0, 3, 2, 1, 4).reshape(tiles_m * 128, tiles_k * 4)[:rows, : k // 16]
    assert torch.equal(found, needed)


@pytest.mark.parametrize("build", builds(CI, NVFP4_SM100))
def test_library_needs_no_driver(build: Build) -> None:
    """The driver is found at the first launch, so a library loads where there is none."""
    command = ["readelf", "-d", str(built(build).entry.library)]
    dynamic = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "NEEDED" in dynamic
    assert "libcuda.so" not in dynamic
    assert "libcudart.so" not in dynamic


@pytest.mark.parametrize(
    "build", builds(CI, *(f"{k}/bf16_1sm_128x128/100f" for k in ("nvfp4_gemm_sm100", "fp8_gemm_sm100")))
)
def test_workspace_is_empty(build: Build) -> None:
    """No split-K: nothing to share between streams and nothing to grow during capture."""
    assert {module(build).workspace_size(m, 5120, 34816) for m in (1, 16, 128, 257, 8192)} == {0}


M, N, K = 5, 64, 96
Arguments = dict[str, Any]


def nvfp4_arguments(m: int = M, n: int = N, k: int = K) -> Arguments:
    def scales(rows: int) -> torch.Tensor:
        return torch.zeros(-(-rows // 128) * 128 * -(-k // 64) * 4, dtype=torch.uint8)

    return {
        "a": torch.zeros(m, k // 2, dtype=torch.uint8),
        "b": torch.zeros(n, k // 2, dtype=torch.uint8),
        "a_sf": scales(m),
        "b_sf": scales(n).view(torch.float8_e4m3fn),
        "alpha": torch.ones(1),
        "bias": None,
        "d": torch.empty(m, n, dtype=torch.bfloat16),
        "workspace": torch.empty(0, dtype=torch.uint8),
        "enable_pdl": False,
    }


def fp8_arguments(m: int = M, n: int = N, k: int = K) -> Arguments:
    return {
        "a": torch.zeros(m, k).to(torch.float8_e4m3fn),
        "b": torch.zeros(n, k).to(torch.float8_e4m3fn),
        "a_scale": torch.ones(m),
        "b_scale": torch.ones(n),
        "bias": torch.zeros(n, dtype=torch.bfloat16),
        "d": torch.empty(m, n, dtype=torch.bfloat16),
        "workspace": torch.empty(0, dtype=torch.uint8),
        "enable_pdl": False,
    }


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """Equal values one element past a 16-byte boundary."""
    flat = torch.empty(tensor.numel() + 16, dtype=tensor.dtype)
    return flat[1 : 1 + tensor.numel()].view(tensor.shape)


BF16 = torch.bfloat16
COMMON: list[tuple[str, dict[str, int], Callable[[Arguments], Arguments], type[Exception], str]] = [
    ("ndim", {}, lambda x: {"a": x["a"].flatten()}, ValueError, r"a: has 1 dimensions, needed 2"),
    ("b_k", {}, lambda x: {"b": x["b"][:, :32].contiguous()}, ValueError, r"b: size of dimension 1 is 32, needed \d+"),
    ("d_rows", {}, lambda x: {"d": torch.empty(M + 1, N, dtype=BF16)}, ValueError, r"dimension 0 is 6, needed 5"),
    ("d_columns", {}, lambda x: {"d": torch.empty(M, N + 8, dtype=BF16)}, ValueError, r"dimension 1 is 72, needed 64"),
    ("d_dtype", {}, lambda x: {"d": x["d"].half()}, TypeError, r"d: dtype is float16, needed bfloat16"),
    ("n_multiple", {"n": 68}, lambda x: {}, ValueError, r"N is 68, needed a multiple of 8"),
    ("n_zero", {"n": 0}, lambda x: {}, ValueError, r"N is 0, needed at least 8"),
    ("k_zero", {"k": 0}, lambda x: {}, ValueError, r"K is 0, needed at least"),
    ("bias_length", {}, lambda x: {"bias": torch.zeros(N + 8, dtype=BF16)}, ValueError, r"bias: .* is 72, needed 64"),
    ("bias_dtype", {}, lambda x: {"bias": torch.zeros(N)}, TypeError, r"bias: dtype is float32, needed bfloat16"),
    ("workspace", {}, lambda x: {"workspace": torch.empty(0)}, TypeError, r"workspace: dtype is float32, needed uint8"),
    ("strided_a", {}, lambda x: {"a": x["a"].repeat(2, 1)[::2]}, ValueError, r"a: not contiguous"),
    ("strided_d", {}, lambda x: {"d": torch.empty(N, M, dtype=BF16).t()}, ValueError, r"d: not contiguous"),
    ("address_a", {}, lambda x: {"a": misaligned(x["a"])}, ValueError, r"a: address is 1 past a multiple of 16"),
    ("address_d", {}, lambda x: {"d": misaligned(x["d"])}, ValueError, r"d: address is 2 past a multiple of 16"),
    ("device", {}, lambda x: {}, ValueError, r"a: is not on a CUDA device"),
]  # fmt: skip
NVFP4_REFUSALS = [
    *COMMON,
    ("a_dtype", {}, lambda x: {"a": x["a"].char()}, TypeError, r"a: dtype is int8, needed uint8 or float4_e2m1fn"),
    ("sf_dtype", {}, lambda x: {"a_sf": x["a_sf"].view(torch.float8_e5m2)}, TypeError, r"a_sf: dtype is float8_e5m2"),
    ("k_multiple", {"k": 48}, lambda x: {}, ValueError, r"K is 48, needed a multiple of 32"),
    ("a_sf_linear", {}, lambda x: {"a_sf": x["a_sf"][: M * K // 16]}, ValueError, r"a_sf: has 30 elements, needed 1"),
    ("b_sf_long", {}, lambda x: {"b_sf": x["b_sf"].repeat(2)}, ValueError, r"b_sf: has 2048 elements, needed 1024"),
    ("alpha_m", {}, lambda x: {"alpha": torch.ones(M)}, ValueError, r"alpha: has 5 elements, needed 1 or 64"),
    ("alpha_dtype", {}, lambda x: {"alpha": torch.ones(1, dtype=BF16)}, TypeError, r"alpha: .* needed float32"),
    ("address_sf", {}, lambda x: {"a_sf": misaligned(x["a_sf"])}, ValueError, r"a_sf: address is 1 past"),
]  # fmt: skip
FP8_REFUSALS = [
    *COMMON,
    ("a_dtype", {}, lambda x: {"a": x["a"].view(torch.float8_e5m2)}, TypeError, r"a: dtype is float8_e5m2:8, needed"),
    ("a_bytes", {}, lambda x: {"a": x["a"].view(torch.uint8)}, TypeError, r"a: dtype is uint8, needed float8_e4m3fn"),
    ("k_multiple", {"k": 40}, lambda x: {}, ValueError, r"K is 40, needed a multiple of 16"),
    ("a_scale", {}, lambda x: {"a_scale": torch.ones(N)}, ValueError, r"a_scale: has 64 elements, needed 1 or 5"),
    ("b_scale", {}, lambda x: {"b_scale": torch.ones(M)}, ValueError, r"b_scale: has 5 elements, needed 1 or 64"),
    ("scale_dtype", {}, lambda x: {"b_scale": torch.ones(N).double()}, TypeError, r"b_scale: dtype is float64, needed"),
]  # fmt: skip


def cases(refusals: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("sizes", "change", "error", "text"), [case[1:] for case in refusals], ids=[case[0] for case in refusals]
    )


@pytest.mark.parametrize("build", builds(CI, NVFP4_SM100))
@cases(NVFP4_REFUSALS)
def test_nvfp4_refuses(build, sizes, change, error, text) -> None:
    arguments = nvfp4_arguments(**sizes)
    entry = module(build).nvfp4_gemm
    with pytest.raises(error, match=text):
        entry(*{**arguments, **change(arguments)}.values())


@pytest.mark.parametrize("build", builds(FP8_SM120, FP8_SM100))
@cases(FP8_REFUSALS)
def test_fp8_refuses(build, sizes, change, error, text) -> None:
    arguments = fp8_arguments(**sizes)
    entry = module(build).fp8_gemm
    with pytest.raises(error, match=text):
        entry(*{**arguments, **change(arguments)}.values())
