"""The installed FlashInfer on the CPU: its own Python, with what it compiles replaced by float64 arithmetic.

Calls go through FlashInfer's public functions, its requirement checks for an arch that is not here, its AutoTuner and
its runners. Only the functions of its compiled modules and cuDNN are stood in for. They read raw memory as the sources
of those kernels do (``flashinfer/data/csrc``) and refuse what their checks refuse, so that a renamed argument, a wrong
stride or a wrong layout fails here as it would on a GPU.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from torch.utils._python_dispatch import _disable_current_modes

from fp4dispatch import formats
from fp4dispatch.backends.libraries import flashinfer_package as package
from fp4dispatch.problem.arch import Arch
from tests.cudnn_interpreter import E2M1


def load(module: str):
    """Import a part of FlashInfer, or skip where it is not installed. One whose *API* changed must fail, not skip."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            pytest.skip(f"{module} cannot be imported here: {error}")


def leaf(function):
    """Run a stand-in outside the caller's dispatch modes: a kernel may look at values, ``run`` may not."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _compact(name, tensor, dtype, align):
    assert tensor.is_contiguous(), f"{name} is {list(tensor.shape)} with strides {list(tensor.stride())}"
    assert tensor.dtype == dtype, f"{name} is {tensor.dtype}"
    assert tensor.data_ptr() % align == 0, f"{name} is not on {align} bytes"


def _fp4(data, scales):
    """Decode [rows, K/2] under scales in 128x4; their padding must be zero (vllm#48898)."""
    rows, k = data.shape[0], data.shape[1] * 2
    padded = -(-rows // 128) * 128, -(-k // 64) * 4
    assert scales.numel() == padded[0] * padded[1], f"{scales.numel()} scales for {rows} rows of {k}"
    unswizzle = load("flashinfer.trace.templates.gemm")._unswizzle_sf_128x4
    linear = unswizzle(scales.flatten().view(torch.uint8), *padded)
    assert not linear[rows:].any(), "padding rows of the scales are not zero"
    assert not linear[:, k // 16 :].any(), "padding columns of the scales are not zero"
    sf = linear[:rows, : k // 16].contiguous().view(torch.float8_e4m3fn).double()
    values = E2M1[torch.stack([data & 15, data >> 4], 2).reshape(rows, k).long()]
    return values * sf.repeat_interleave(16, 1)


class Kernels:
    """What FlashInfer would have compiled. ``calls``: (function, shape of the output) of every launch."""

    def __init__(self, arch: Arch) -> None:
        self.arch = arch
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.silent = False

    def _write(self, name, out, value):
        self.calls.append((name, tuple(out.shape)))
        if not self.silent:
            out.copy_(value.to(out.dtype))

    def fp4(self, name, a, b, a_sf, b_sf, alpha, out, *, n_multiple, k_multiple, shuffled=False):
        """A [M, K/2], B [N, K/2]: ``fp4_gemm_cutlass.cu`` and ``trtllm_gemm_runner.cu`` check the same things."""
        for label, tensor in (("a", a), ("b", b), ("a_sf", a_sf), ("b_sf", b_sf)):
            _compact(label, tensor, torch.uint8, 32)
        _compact("alpha", alpha, torch.float32, 4)
        _compact("out", out, out.dtype, 16)
        assert alpha.numel() == 1
        assert a.shape[1] == b.shape[1]
        assert out.shape == (a.shape[0], b.shape[0])
        assert b.shape[0] % n_multiple == 0, f"N={b.shape[0]}"
        assert b.shape[1] * 2 % k_multiple == 0, f"K={b.shape[1] * 2}"
        weight = _fp4(b, b_sf)
        if shuffled:  # rows of both were permuted alike: scales in 128x4 are rows again once unswizzled
            order = load("flashinfer.utils").get_shuffle_matrix_a_row_indices(b, 128)
            weight = torch.empty_like(weight).index_copy_(0, order, weight)
        self._write(name, out, alpha.double() * (_fp4(a, a_sf) @ weight.t()))

    def runner(self, name, **needs):
        """Return a TunableRunner factory for ``mm_fp4``'s list of inputs."""
        tunable = load("flashinfer.autotuner").TunableRunner
        kernels = self

        class Runner(tunable):
            def get_valid_tactics(self, inputs, profile):
                return [0]

            @leaf
            def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
                a, b, a_sf, b_sf, alpha, out_dtype, out, block, nvfp4, _ = inputs
                assert (tactic, block, nvfp4, out.dtype) == (-1, 16, True, out_dtype)
                kernels.fp4(name, a, b.T, a_sf, b_sf.T, alpha, out, **needs)

        return Runner

    @leaf
    def cutlass_fp4(self, a, b, a_sf, b_sf, alpha, out, workspace, tactic):
        self.fp4("cutlass", a, b, a_sf, b_sf, alpha, out, n_multiple=32, k_multiple=32)

    @leaf
    def cutlass_fp8(self, a, b, a_scale, b_scale, out, workspace, tactic):
        """``fp8_gemm_cutlass.cu``: A [1, M, K], B [1, N, K]."""
        for label, tensor in (("a", a), ("b", b)):
            _compact(label, tensor, torch.float8_e4m3fn, 16)
        self._write("cutlass", out, (a.double() @ b.double().transpose(1, 2)) * a_scale.double() * b_scale.double())

    def fp8_runner(self):
        """cuDNN's graph of ``bmm_fp8``: B [1, K, N] with K the fastest."""
        tunable = load("flashinfer.autotuner").TunableRunner
        kernels = self

        class Runner(tunable):
            def get_valid_tactics(self, inputs, profile):
                return [0]

            @leaf
            def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
                a, b, a_scale, b_scale, out, _ = inputs
                _compact("a", a, torch.float8_e4m3fn, 16)
                _compact("b", b.transpose(1, 2), torch.float8_e4m3fn, 16)
                assert a.shape[2] % 16 == b.shape[2] % 16 == 0
                assert (a_scale.numel(), b_scale.numel()) == (1, 1)
                kernels._write("cudnn", out, (a.double() @ b.double()) * a_scale.double() * b_scale.double())

        return Runner()

    @leaf
    def groupwise(self, workspace, a, b, a_scale, b_scale, out, gm, gn, gk, major, mma_sm=None):
        """``gemm_groupwise_sm100.cu`` and ``_sm120.cu``; 3-D operands come from ``bmm_fp8`` on sm_12x."""
        assert (gm, gn, gk) == (1, 128, 128)
        assert (mma_sm is None) == (self.arch.major == 12)
        if a.ndim == 3:
            assert major == "MN"  # its scales are one value, repeated
            a, b, out = a[0], b[0].t(), out[0]
        else:
            assert major == "K"
            assert a.shape[0] % 4 == 0, f"M={a.shape[0]}"
        _compact("a", a, torch.float8_e4m3fn, 16)
        _compact("b", b, torch.float8_e4m3fn, 16)
        _compact("a_scale", a_scale, torch.float32, 16)
        _compact("b_scale", b_scale, torch.float32, 4)
        _compact("out", out, out.dtype, 16)
        (m, k), n = a.shape, b.shape[0]
        assert n % 128 == k % 128 == 0
        assert tuple(a_scale.shape) == (m, k // 128)
        assert tuple(b_scale.shape) == (n // 128, k // 128)
        left = a.double() * a_scale.double().repeat_interleave(128, 1)
        right = b.double() * b_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        self._write("groupwise", out, left @ right.t())


class DeepGemmRunner:
    """The object that ``fp8_blockscale_gemm_sm90_binding.cu`` makes; names and order of arguments as there."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.workspace = None

    @staticmethod
    def _by_token(scales, m, blocks):
        """Read scales from memory as the kernels address them: [blocks, M], rows of M rounded up to 4."""
        assert scales.data_ptr() % 16 == 0
        stride = -(-m // 4) * 4
        storage = torch.empty(0, dtype=torch.float32).set_(scales.untyped_storage())
        assert storage.numel() - scales.storage_offset() >= blocks * stride, "scales are too small"
        return storage.as_strided((blocks, stride), (stride, 1), scales.storage_offset())[:, :m]

    def get_workspace_size(self, shape_m, shape_n, shape_k):
        raise AssertionError("the shared scratch is not to be used")

    def configure_workspace(self, workspace):
        self.workspace = workspace

    def fp8_quantize_1x128(self, input, outValueE4M3, outScaleFP8SF, use_ue8m0):
        raise AssertionError("it rounds otherwise at ties")

    @leaf
    def run_gemm(self, input, weight, output, scales_a, scales_b):
        assert self.workspace is not None, "workspace not configured"
        for name, tensor in (("input", input), ("weight", weight)):
            _compact(name, tensor, torch.float8_e4m3fn, 16)
        _compact("output", output, torch.bfloat16, 16)
        _compact("scales_b", scales_b, torch.float32, 4)
        (m, k), n = input.shape, weight.shape[0]
        assert k % 128 == n % 64 == 0
        assert tuple(scales_b.shape) == (-(-n // 128), k // 128)
        left = input.double() * self._by_token(scales_a, m, k // 128).t().double().repeat_interleave(128, 1)
        right = weight.double() * scales_b.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
        output.copy_((left @ right.t()).to(output.dtype))
        self.calls.append(("gemm", tuple(output.shape)))


def our_quantiser(x, q, scale, pdl):
    """What ``csrc/quantise/fp8_quantize.cu`` does, for ``jit.load`` without a GPU; bit-equal to formats on one."""
    with _disable_current_modes():
        _compact("x", x, x.dtype, 16)
        assert x.dtype in (torch.bfloat16, torch.float16)
        assert scale.stride(0) == 1
        assert scale.stride(1) % 4 == 0
        found = formats.fp8_quantize(x, "1x128")
        q.copy_(found.data)
        scale.copy_(found.scale)


def install(monkeypatch, arch: str) -> Kernels:
    """Make FlashInfer believe in an arch, and put stand-ins where its compiled modules would be."""
    gemm, utils = load("flashinfer.gemm.gemm_base"), load("flashinfer.utils")
    kernels = Kernels(Arch.parse(arch))
    capability = (kernels.arch.major, kernels.arch.minor)
    put = functools.partial(monkeypatch.setattr, gemm)
    for module in (gemm, utils):
        monkeypatch.setattr(module, "get_compute_capability", lambda device: capability)
    put("get_cuda_version", lambda: Version("13.0"))
    put("CUDNN_AVAILABLE", True)
    for check in ("_check_cudnn_fp4_availability", "_check_cute_dsl_availability"):
        put(check, lambda: None)
    put("_check_cute_dsl_arch", lambda device: None)
    put("is_sm12x_supported", lambda device: capability[0] == 12)
    put("is_sm100a_supported", lambda device: capability[0] == 10)
    fp4 = SimpleNamespace(fp4_gemm=kernels.cutlass_fp4, fp4_gemm_tactic_num=lambda: 1)
    put("get_cutlass_fp4_gemm_module", lambda *_: gemm._create_cutlass_fp4_gemm_module(fp4, "", ""))
    trtllm = SimpleNamespace(
        trtllm_fp4_gemm_runner=lambda use_8x4: (
            _never_8x4(use_8x4) or kernels.runner("trtllm", n_multiple=128, k_multiple=256, shuffled=True)()
        )
    )
    put("get_trtllm_gemm_module", lambda: trtllm)
    for name, function, n, k in (
        ("cudnn", "_cudnn_gemm_fp4_runner", 16, 32),
        ("cute-dsl", "_cute_dsl_gemm_fp4_runner", 8, 32),
        ("b12x", "_b12x_gemm_fp4_runner", 8, 32),
    ):
        put(function, lambda *_, name=name, n=n, k=k: kernels.runner(name, n_multiple=n, k_multiple=k)())
    put("_cudnn_gemm_fp8_runner", kernels.fp8_runner)
    # the functions below are cached by FlashInfer: the originals are called, so that no stand-in outlives its test
    fp8 = SimpleNamespace(fp8_gemm=kernels.cutlass_fp8, fp8_gemm_tactic_num=lambda: 1)
    put("gen_gemm_sm100_module_cutlass_fp8", lambda: SimpleNamespace(build_and_load=lambda: fp8))
    for function in ("get_gemm_sm100_module_cutlass_fp8", "get_gemm_sm120_module_cutlass_fp8"):
        put(function, getattr(gemm, function).__wrapped__)
    for function in ("get_gemm_sm100_module", "get_gemm_sm120_module"):
        put(function, lambda: SimpleNamespace(gemm_fp8_nt_groupwise=kernels.groupwise))
    package.gemm_module.cache_clear()
    return kernels


def _never_8x4(use_8x4):
    assert use_8x4 is False, "the 8x4 scale layout gives real rows the scales of padding rows (flashinfer#2861)"
