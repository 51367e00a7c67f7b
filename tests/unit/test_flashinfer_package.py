"""What this project believes of FlashInfer, held to the installed one: names, arguments, archs, alignments, sources."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from pathlib import Path

import pytest
import torch

from fp4dispatch.backends.libraries import flashinfer as backends
from fp4dispatch.backends.libraries import flashinfer_package as package
from fp4dispatch.backends.libraries.flashinfer_deepgemm import FlashInferDeepGemmBackend
from fp4dispatch.errors import BackendUnsupportedError
from fp4dispatch.machine import libraries
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem.arch import KNOWN_ARCHS
from tests import contract
from tests.flashinfer_interpreter import DeepGemmRunner, install, load

RUNNERS = {
    cls.name: cls
    for cls in (
        backends.FlashInferCutlassBackend,
        backends.FlashInferCudnnBackend,
        backends.FlashInferTrtllmBackend,
        backends.FlashInferCuteDslBackend,
        backends.FlashInferB12xBackend,
    )
}
FUNCTION = {"nvfp4": "mm_fp4", "tensor": "bmm_fp8", "block128": "gemm_fp8_nt_groupwise"}
CLAIMS = [c for c in catalogue().capabilities if c.backend in RUNNERS]


@pytest.fixture
def gemm():
    return load("flashinfer.gemm.gemm_base")


def data(path: str) -> str:
    """Return the text of one of FlashInfer's sources."""
    return (Path(load("flashinfer").__file__).parent / "data" / path).read_text()


def called(name: str, scaling: str) -> str:
    runner = RUNNERS[name].runner
    return {"nvfp4": runner.fp4, "tensor": runner.tensor, "block128": runner.groupwise}[scaling]


# ---------------------------------------------------------------------------------------------------------- python side


def test_the_version_is_that_of_the_metadata():
    assert load("flashinfer").__version__ == importlib.metadata.version("flashinfer-python")


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: f"{c.backend}-{c.op}-{'-'.join(c.scalings)}-{c.archs[0]}")
def test_archs_are_those_of_its_requirement_checks(claim, gemm):
    (scaling,) = claim.scalings
    function, name = getattr(gemm, FUNCTION[scaling]), called(claim.backend, scaling)
    assert function.has_backend(name)
    ours = {
        a for c in CLAIMS if (c.backend, c.op, c.scalings) == (claim.backend, claim.op, (scaling,)) for a in c.archs
    }
    theirs = {a.sm for a in KNOWN_ARCHS if function.is_backend_supported(name, a.major * 10 + a.minor)}
    assert ours == theirs


def test_what_a_runner_has_no_name_for_is_not_claimed():
    for cls in RUNNERS.values():
        claimed = {s for c in CLAIMS if c.backend == cls.name for s in c.scalings}
        assert claimed == {s for s in FUNCTION if called(cls.name, s)}


@pytest.mark.parametrize("scaling", FUNCTION)
def test_every_argument_that_is_passed_is_in_its_signature(scaling, gemm, monkeypatch):
    install(monkeypatch, "10.0")
    function, passed = FUNCTION[scaling], []
    real = getattr(gemm, function)
    monkeypatch.setattr(gemm, function, lambda *a, **k: passed.append((a, k)) or real(*a, **k))
    op, activation = ("nvfp4_gemm", "nvfp4") if scaling == "nvfp4" else ("fp8_gemm", "fp8")
    contract.check(
        backends.FlashInferCutlassBackend(), contract.Case(op, scaling, activation, 7, 200, 144, "bfloat16", False)
    )
    assert len(passed) == 3
    for positional, named in passed:
        assert named.pop("skip_check") in (True, False)  # taken by the decorator, not by the function
        assert "backend" in named  # the default one would use the list of backends of the call before
        assert "out" in named
        inspect.signature(real).bind(*positional, **named)


@pytest.mark.parametrize("gone", ["use_8x4_sf_layout", "out", "block_size"])
def test_a_renamed_argument_is_a_refusal_with_its_name(gone, gemm, monkeypatch):
    install(monkeypatch, "10.0")
    real = gemm.mm_fp4

    def mm_fp4(*args, **kwargs):
        if gone in kwargs:
            raise TypeError(f"mm_fp4() got an unexpected keyword argument '{gone}'")
        return real(*args, **kwargs)

    monkeypatch.setattr(gemm, "mm_fp4", mm_fp4)
    backend = backends.FlashInferCutlassBackend()
    case = contract.Case("nvfp4_gemm", "nvfp4", "nvfp4", 7, 256, 256, "bfloat16", False)
    prepared = backend.prepare(contract.make_weights(case, "cpu", 1))
    with pytest.raises(BackendUnsupportedError, match=f"TypeError: .*{gone}"):
        backend.plan(case.problem(), prepared)


@pytest.mark.parametrize("shards", [1, 3])
def test_cute_dsl_on_sm_120_objects_to_nothing_but_the_cpu(shards, monkeypatch):
    """Its checks of shapes, dtypes, strides and scale storage come before the one that the tensors are on a GPU."""
    install(monkeypatch, "12.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    backend = backends.FlashInferCuteDslBackend()
    case = contract.Case("nvfp4_gemm", "nvfp4", "nvfp4", 7, 200, 144, "bfloat16", False, shards)
    prepared = backend.prepare(contract.make_weights(case, "cpu", 1))
    with pytest.raises(BackendUnsupportedError, match="SM12x cute-dsl requires tensors on one CUDA device"):
        backend.plan(case.problem(), prepared)
    monkeypatch.setattr(backend, "runner", backend.runner._replace(n_multiple=8))
    prepared = backend.prepare(contract.make_weights(case, "cpu", 1))
    with pytest.raises(BackendUnsupportedError, match="requires M > 0, N % 64 = 0, K % 64 = 0"):
        backend.plan(case.problem(), prepared)


def test_the_tuner_has_the_switch_that_is_read():
    assert package.tuner().is_tuning_mode is False
    load("flashinfer.autotuner")
    with load("flashinfer").autotune(True):
        assert package.tuner().is_tuning_mode is True
    assert package.tuner().is_tuning_mode is False


# ---------------------------------------------------------------------------------------------------------- C++ sources


def test_padding_meets_the_alignment_that_its_sources_check():
    """N and K of NVFP4 operands: the C++ files check what the Python ones do not."""
    for source in ("fp4_gemm_cutlass.cu", "fp4_gemm_cutlass_sm103.cu"):
        text = data(f"csrc/{source}")
        (alignment,) = re.findall(r"constexpr int alignment = (\d+);", text)
        assert re.findall(r"ICHECK_EQ\((\w) % alignment, 0\)", text) == ["k", "n"]
        runner = backends.FlashInferCutlassBackend.runner
        assert (runner.n_multiple, runner.k_multiple) == (int(alignment), int(alignment))
    groupwise = data("csrc/gemm_groupwise_sm120.cu")
    assert "CHECK_CONTIGUOUS(SFA)" in groupwise
    assert '"K"' in groupwise


def test_padding_meets_what_the_capabilities_ask_of_raw_operands():
    for claim in (c for c in CLAIMS if c.op == "nvfp4_gemm"):
        runner = RUNNERS[claim.backend].runner
        assert runner.n_multiple % claim.n_multiple == 0
        assert runner.k_multiple % claim.k_multiple == 0


def test_the_deepgemm_binding_has_these_functions_with_these_arguments(gemm):
    text = data("csrc/fp8_blockscale_gemm_sm90_binding.cu")
    found = {
        name: re.findall(r"(\w+)\s*(?:,|$)", arguments)
        for name, arguments in re.findall(r'name == "(\w+)"\)\s*\{.*?\[this\]\((.*?)\)', text, re.DOTALL)
    }
    for name in ("run_gemm", "configure_workspace"):
        assert found[name] == list(inspect.signature(getattr(DeepGemmRunner(), name)).parameters)
    assert list(inspect.signature(gemm.get_fp8_blockscale_gemm_runner_sm90).parameters) == []
    source = inspect.getsource(gemm.get_fp8_blockscale_gemm_runner_sm90.__wrapped__)
    assert "module.init()" in source
    assert "init, init" in text


def test_deepgemm_takes_these_sizes(gemm):
    """The public function's checks, which the binding leaves out, and the layout of the activation's scales."""
    source = inspect.getsource(gemm.fp8_blockscale_gemm_sm90)
    assert "BLOCK_SIZE = 128" in source
    assert re.search(r"if N % 64 != 0", source)
    assert '["90", "90a"]' in source
    (claim,) = (c for c in catalogue().capabilities if c.backend == FlashInferDeepGemmBackend.name)
    assert (claim.archs, claim.activations, claim.out_dtypes) == (("sm_90",), ("fp8",), ("bfloat16",))
    tma = data("csrc/nv_internal/tensorrt_llm/deep_gemm/fp8_gemm.cuh")
    (scales,) = re.findall(r"CUtensorMap make_2d_tma_scales_a_desc\(.*?\n\}", tma, re.DOTALL)
    assert "kAlignment = 16 / sizeof(T)" in scales  # M rounded up to 4 floats, M the fastest
    assert "Layout::ColMajor, shape_m" in scales


def test_headers_without_code_are_not_flashinfer(tmp_path, monkeypatch):
    """A wheel that was unpacked for its CUTLASS headers alone has metadata, and nothing to import."""
    package_folder = tmp_path / "flashinfer"
    package_folder.mkdir()
    monkeypatch.setattr(libraries, "package_folder", lambda name: package_folder)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.7.2")
    assert libraries.distribution("flashinfer-python", "flashinfer") is None
    (package_folder / "__init__.py").touch()
    assert libraries.distribution("flashinfer-python", "flashinfer").version == "0.7.2"
