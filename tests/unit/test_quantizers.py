"""Activations quantised by our kernels for cuDNN's and FlashInfer's GEMMs: kernels in torch stand in, on the CPU."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp4dispatch import formats
from fp4dispatch.backends.libraries import cudnn, cudnn_graphs
from fp4dispatch.backends.libraries import flashinfer as flashinfer_backends
from fp4dispatch.backends.own.tensors import quantizers
from fp4dispatch.backends.own.tensors.quantizers import ToScratch, quantized_nvfp4
from fp4dispatch.formats import round_up
from tests import contract, flashinfer_interpreter, quantizer_fake
from tests.cudnn_interpreter import Cudnn
from tests.unit.test_backend_cudnn import RTX
from tests.unit.test_backend_flashinfer import RUNNERS, supported

CPU = torch.device("cpu")
KINDS = [("tensor", False), ("tensor", True), ("row", False), ("block128", False), ("nvfp4", False), ("nvfp4", True)]
KERNEL = {("tensor", True): "tensor", ("block128", False): "1x128", ("nvfp4", False): "nvfp4", ("nvfp4", True): "nvfp4"}
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture
def kernels(monkeypatch):
    return quantizer_fake.install(monkeypatch)


def made(scaling, static, rows, monkeypatch, kp=256, ours=True):
    with monkeypatch.context() as patch:
        if not ours:
            quantizer_fake.without(patch, "no nvcc")
        return ToScratch(CPU, scaling, kp, static=static, rows=rows)


def scale_for(scaling, static, x):
    if static:
        return torch.tensor(0.02)
    return formats.nvfp4_global_scale(x) if scaling == "nvfp4" else None


@pytest.mark.parametrize("rows", [lambda m: m, lambda m: round_up(m, 4), cudnn.m_bucket], ids=["m", "4", "bucket"])
@pytest.mark.parametrize(("scaling", "static"), KINDS)
def test_the_bits_are_those_of_formats(scaling, static, rows, kernels, monkeypatch):
    """Ragged K, addresses and strides that the kernels refuse, and M on both sides of a tile of scales."""
    ours = made(scaling, static, rows, monkeypatch)
    plain = made(scaling, static, rows, monkeypatch, ours=False)
    assert (ours.note, plain.note) == ("", "no nvcc")
    for m, k, dtype in ((1, 256, DTYPES[0]), (3, 240, DTYPES[1]), (127, 256, DTYPES[1]), (129, 208, DTYPES[0])):
        wide = torch.randn(m, 2 * k + 1).to(dtype)
        for x in (wide[:, :k].contiguous(), wide[:, 1 : k + 1], wide[:, :-1:2]):
            scale = scale_for(scaling, static, x)
            before = len(kernels.calls)
            got, want = ours(x, scale), plain(x, scale)
            assert len(kernels.calls) == before + 1
            assert kernels.calls[-1][0] == KERNEL.get((scaling, static), "row")
            assert kernels.calls[-1][3] is False  # what follows may be launched with PDL
            assert got.data.shape == want.data.shape
            assert got.data.shape[0] == rows(m)
            written = m if scaling == "nvfp4" else rows(m)  # scratch holds NaN; FP8 has zeros behind the last token
            assert torch.equal(got.data[:written].view(torch.uint8), want.data[:written].view(torch.uint8))
            assert got.scale.shape == want.scale.shape
            assert got.scale.is_contiguous()
            if scaling == "nvfp4":
                assert torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8))
                assert torch.equal(got.global_scale, want.global_scale)
            else:
                assert torch.equal(got.scale, want.scale)


def test_whole_tiles_of_padding_scales_are_zeroed(kernels):
    """A kernel pads M to 128 itself; above that, and before the bucket ends, nobody else would."""
    x = torch.randn(2049, 64).bfloat16()
    scale = formats.nvfp4_global_scale(x)
    dirty = torch.full((2304, 32), 0x7F, dtype=torch.uint8), torch.full((2304, 4), 0x7F, dtype=torch.uint8)
    memory = dirty[0], dirty[1].view(torch.float8_e4m3fn)
    found, _ = quantizers.load_nvfp4(CPU)
    q = quantized_nvfp4(found, x, 2304, 64, scale, lambda: memory)
    assert q.data.data_ptr() == memory[0].data_ptr()
    want = formats.to_128x4(formats.zero_pad(formats.nvfp4_quantize(x, scale).sf, 2304, 4))
    assert torch.equal(q.scale.view(torch.uint8), want.view(torch.uint8))


def test_f32_activations_are_quantised_by_torch(kernels, monkeypatch):
    for scaling, static in KINDS:
        x = torch.randn(5, 256)
        scale = scale_for(scaling, static, x)
        got = made(scaling, static, cudnn.m_bucket, monkeypatch)(x, scale)
        want = made(scaling, static, cudnn.m_bucket, monkeypatch, ours=False)(x, scale)
        assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    assert kernels.calls == []


# ------------------------------------------------------------------------------------------------------------- backends


@pytest.fixture
def on_cudnn(monkeypatch):
    module = Cudnn()
    monkeypatch.setattr(cudnn_graphs, "frontend", lambda: module)
    monkeypatch.setattr(cudnn, "_on", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cudnn, "_current_stream", lambda device: threading.get_ident())
    return cudnn.CudnnBackend()


def _cudnn_cases():
    backend = cudnn.CudnnBackend()
    return [case for case in contract.cases(backend) if not contract.unsupported(backend, case, RTX)]


def test_there_are_cudnn_cases_of_every_kind():
    assert {case.scaling for case in _cudnn_cases()} == {"nvfp4", "tensor", "row"}


@pytest.mark.parametrize("case", _cudnn_cases(), ids=str)
def test_cudnn_holds_the_contract_with_our_quantisers(case, kernels, on_cudnn):
    contract.check(on_cudnn, case)
    assert len(kernels.calls) == (0 if case.raw else 2)


def _flashinfer_cases():
    for cls in RUNNERS:
        for arch in ("10.0", "12.0"):
            if cls is flashinfer_backends.FlashInferCuteDslBackend and arch == "12.0":
                continue
            for case in supported(cls(), arch, (1, 7, 129)):
                yield pytest.param(cls, arch, case, id=f"{cls.name}-{arch}-{case}")


@pytest.mark.parametrize(("cls", "arch", "case"), list(_flashinfer_cases()))
def test_flashinfer_holds_the_contract_with_our_quantisers(cls, arch, case, kernels, monkeypatch):
    flashinfer_interpreter.install(monkeypatch, arch)
    contract.check(cls(), case)
    assert len(kernels.calls) == (1 if case.raw else 3)  # the plan's trial


class Writes(TorchDispatchMode):
    """Where each operator wrote, and how many of our kernels were launched before it."""

    def __init__(self, kernels):
        super().__init__()
        self.kernels, self.seen = kernels, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.seen.append((result.untyped_storage().data_ptr(), len(self.kernels.calls), result))
        return result


@pytest.mark.parametrize("scaling", ["nvfp4", "tensor"])
@pytest.mark.parametrize("m", [1, 5])
def test_the_scales_that_flashinfers_epilogue_reads_are_written_before_the_quantiser(m, scaling, kernels, monkeypatch):
    """Its GEMM may start while our quantiser runs (PDL), and read them before it waits."""
    flashinfer_interpreter.install(monkeypatch, "10.0")
    op, activation = ("nvfp4_gemm", "nvfp4") if scaling == "nvfp4" else ("fp8_gemm", "fp8")
    case = contract.Case(op, scaling, activation, m, 256, 256, "bfloat16", False)
    backend = flashinfer_backends.FlashInferCutlassBackend()
    prepared = backend.prepare(contract.make_weights(case, "cpu", 1))
    plan = backend.plan(case.problem(), prepared)
    x, out = torch.randn(m, 256).bfloat16(), torch.empty(m, 256, dtype=torch.bfloat16)
    launches = []
    name, index = ("mm_fp4", 4) if scaling == "nvfp4" else ("bmm_fp8", 2)
    monkeypatch.setattr(
        flashinfer_backends.package.gemm_module(), name, lambda *args, **kw: launches.append(args[index])
    )
    kernels.calls.clear()
    with Writes(kernels) as writes:
        backend.run(plan, prepared, x, out)
    (scale,) = launches
    assert len(kernels.calls) == 1
    written = [done for storage, done, _ in writes.seen if storage == scale.untyped_storage().data_ptr()]
    assert set(written) == {0}
    assert kernels.calls[0][2] != scale.data_ptr()


@pytest.mark.parametrize("scaling", ["nvfp4", "tensor"])
def test_the_note_is_in_the_plan(scaling, kernels, on_cudnn, monkeypatch):
    quantizer_fake.without(monkeypatch, "by torch's operations: no nvcc")
    flashinfer_interpreter.install(monkeypatch, "10.0")
    op, activation = ("nvfp4_gemm", "nvfp4") if scaling == "nvfp4" else ("fp8_gemm", "fp8")
    case = contract.Case(op, scaling, activation, 3, 256, 256, "bfloat16", False)
    for backend in (on_cudnn, flashinfer_backends.FlashInferCutlassBackend()):
        plan = backend.plan(case.problem(), backend.prepare(contract.make_weights(case, "cpu", 1)))
        assert plan.note == "by torch's operations: no nvcc"
        contract.check(backend, case)
