"""Capabilities: every reason with the value found, the value needed and a fix; the file is read strictly."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import date

import pytest

from fp4dispatch.errors import SettingsError
from fp4dispatch.machine.system import Library, System
from fp4dispatch.policy.capability import check
from fp4dispatch.policy.catalogue import catalogue, load, parse_version
from fp4dispatch.problem import Problem
from tests.declared import DeclaredBackend

NVFP4 = Problem("nvfp4_gemm", 16, 4096, 4096)
FP8 = Problem("fp8_gemm", 16, 4096, 4096, scaling="tensor")
FACTS = {
    "cuda": "13.0",
    "torch": "2.11",
    "nvcc": "13.0",
    "cutlass": "4.5",
    "cudnn": "9.23.1",
    "cudnn_frontend": "1.25",
    "flashinfer": "0.7.2.post1",
}


def codes(name, problem, system):
    return [reason.code for reason in check(name, problem, system)]


@pytest.mark.parametrize("name", catalogue().backends)
def test_each_backend_runs_somewhere_and_not_everywhere(name):
    record = next(c for c in catalogue().capabilities if c.backend == name)
    problem = Problem(record.op, 16, 4096, 4096, scaling=record.scalings[0])
    arch = None if record.archs == ("any",) else record.archs[0]
    assert check(name, problem, System.fake(arch, **FACTS)) == ()
    if arch is not None:
        assert "ARCH" in codes(name, problem, System.fake("5.0", **FACTS))
        assert codes(name, problem, System.fake(None, **FACTS)) == ["ARCH"]


@pytest.mark.parametrize("name", catalogue().backends)
def test_each_requirement_is_asked_for(name):
    """Taking one required fact away, or making it ancient, gives exactly one reason more."""
    for record in catalogue().capabilities:
        if record.backend != name or record.archs == ("any",):
            continue
        problem = Problem(record.op, 16, 4096, 4096, scaling=record.scalings[0])
        whole = System.fake(record.archs[0], **FACTS)
        needed = {need.what for need in record.requires} | ({"nvcc"} if record.compiles else set())
        assert check(name, problem, whole) == ()
        for what in FACTS:
            for value in (None, "0.0.1"):
                facts = FACTS | {what: value}
                reasons = check(name, problem, System.fake(record.archs[0], **facts))
                assert len(reasons) == (what in needed), (what, reasons)
                for reason in reasons:
                    assert reason.code == ("TOOLCHAIN" if what in ("nvcc", "cutlass") else "LIBRARY")
                    assert "needs" in reason.text
                    assert reason.fix
                    assert (value or "not found") in reason.text


def test_toolkit_minimum_depends_on_the_arch():
    cuda128 = {**FACTS, "cuda": "12.8", "nvcc": "12.9"}
    assert check("cublaslt", FP8, System.fake("10.0", **cuda128)) == ()
    (reason,) = check("cublaslt", FP8, System.fake("10.3", **cuda128))
    assert reason.text == "CUDA 12.8 (needs 12.9 for sm_103)"
    (reason,) = check("cutlass", NVFP4, System.fake("11.0", **cuda128))
    assert reason.text == "nvcc 12.9 (needs 13.0 for sm_110)"
    assert "cu13" in reason.fix


def test_the_place_of_a_library_is_told():
    system = System.fake("12.0", **FACTS | {"cudnn": "9.7.1"}, cudnn_path="/usr/lib/libcudnn.so.9")
    (reason,) = check("cudnn", NVFP4, system)
    assert reason.text == "cuDNN 9.7.1 loaded from /usr/lib/libcudnn.so.9 (needs 9.19)"
    assert reason.fix == "pip install -U nvidia-cudnn-cu13"


def test_a_proven_binary_replaces_compiler_and_headers_of_that_op_and_arch():
    bare = System.fake("12.0", proven=[("nvfp4_gemm", "sm_120")])
    assert check("cutlass", NVFP4, bare) == ()
    assert codes("cutlass", FP8, bare) == ["TOOLCHAIN", "TOOLCHAIN"]
    assert codes("w4a16", NVFP4, bare) == ["TOOLCHAIN"]
    weight_only = System.fake("12.0", proven=[("w4_gemm", "sm_120")])
    assert check("w4a16", NVFP4, weight_only) == ()
    assert codes("cutlass", NVFP4, weight_only) == ["TOOLCHAIN", "TOOLCHAIN"]


def test_raw_operands_are_held_to_alignment_and_layout_and_layers_are_not():
    system = System.fake("10.0", **FACTS)
    ragged = replace(NVFP4, n=100, k=7152)
    assert check("cutlass", ragged, system) == ()
    raw = check("cutlass", replace(ragged, sf_layout="linear"), system)
    assert [r.code for r in raw] == ["SHAPE", "SHAPE", "LAYOUT"]
    assert [r.text for r in raw] == [
        "N=100 is not a multiple of 8",
        "K=7152 is not a multiple of 32",
        "b_sf is linear, needs 128x4",
    ]
    assert check("cutlass", replace(NVFP4, sf_layout="128x4"), system) == ()


def test_operands_that_are_quantised_already_go_to_backends_that_take_them():
    system = System.fake("9.0", **FACTS)
    raw = replace(FP8, activation="fp8", raw=True)
    assert codes("cutlass", raw, system) == codes("w8a8", replace(raw, raw=False), system) == []
    (reason,) = check("w8a8", raw, system)
    assert (reason.code, reason.text) == (
        "LAYOUT",
        "operands are quantised already (raw operator), needs 16-bit activations",
    )
    for problem in (replace(NVFP4, raw=True), replace(NVFP4, sf_layout="linear")):  # the layout says it too
        for name in ("w4a16", "w4a8", "w4a8_expanded"):
            assert codes(name, problem, system) == ["LAYOUT"]


def test_formats():
    system = System.fake("10.0", **FACTS)
    assert codes("cutlass", replace(NVFP4, activation="bf16"), system) == ["DTYPE"]
    assert codes("cutlass", replace(NVFP4, out_dtype="float32"), system) == ["DTYPE"]
    assert codes("cudnn", replace(FP8, scaling="block128"), system) == ["DTYPE"]
    assert codes("w4a16", FP8, system) == ["DTYPE"]
    (reason,) = check("flashinfer_cutlass", replace(FP8, scaling="row"), system)
    assert reason.text == "scaling is row, needs tensor or block128"


def test_the_scaling_picks_the_record():
    thor = System.fake("11.0", **FACTS)
    assert check("flashinfer_cutlass", FP8, thor) == ()
    assert codes("flashinfer_cutlass", replace(FP8, scaling="block128"), thor) == ["ARCH"]


def test_the_arch_picks_among_records_of_one_scaling():
    datacenter, consumer, thor = (System.fake(arch, **FACTS) for arch in ("10.0", "12.0", "11.0"))
    half = replace(NVFP4, out_dtype="float16")
    assert check("flashinfer_cutedsl", half, datacenter) == ()
    assert codes("flashinfer_cutedsl", half, consumer) == ["DTYPE"]
    raw = replace(NVFP4, n=200, k=96, sf_layout="128x4")
    assert check("flashinfer_cutedsl", raw, datacenter) == ()
    assert [r.text for r in check("flashinfer_cutedsl", raw, consumer)] == [
        "N=200 is not a multiple of 64",
        "K=96 is not a multiple of 64",
    ]
    (reason,) = check("flashinfer_cutedsl", NVFP4, thor)
    assert reason.text == "GPU is sm_110, needs sm_100 or sm_103 or sm_120 or sm_121"
    (reason,) = check("flashinfer_cutedsl", NVFP4, System.fake(None, **FACTS))
    assert reason.text.startswith("no NVIDIA GPU is used, needs sm_100 or")


def test_quarantine_is_a_reason_for_that_op_and_arch_only():
    system = System.fake("10.0", **FACTS, quarantined=[("cutlass", "nvfp4_gemm", "sm_100")])
    assert codes("cutlass", NVFP4, system) == ["QUARANTINED"]
    assert check("cutlass", FP8, system) == ()
    nowhere = System.fake(quarantined=[("reference", "nvfp4_gemm", "")])
    assert "this machine" in check("reference", NVFP4, nowhere)[0].text


def test_a_version_that_nobody_can_place_is_refused_and_an_unstated_one_is_taken():
    odd = replace(System.fake("10.0", **FACTS), cudnn=Library("custom build"))
    assert codes("cudnn", NVFP4, odd) == ["LIBRARY"]
    unstated = replace(System.fake("10.0", **FACTS), cudnn_frontend=Library(""))
    assert check("cudnn", NVFP4, unstated) == ()
    assert parse_version("custom build") is None


def test_an_arch_that_nobody_declared_is_refused():
    assert codes("cublaslt", FP8, System.fake("13.0", **FACTS)) == ["ARCH"]
    assert check("reference", FP8, System.fake("13.0", **FACTS)) == ()


def test_unknown_backend():
    with pytest.raises(KeyError):
        check("nonsense", NVFP4, System.fake())


def test_declared_backends():
    assert DeclaredBackend("cutlass").activation_for(NVFP4) == "nvfp4"
    assert DeclaredBackend("cutlass").activation_for(replace(NVFP4, activation="bf16")) is None
    assert DeclaredBackend("w4a16").activation_for(FP8) is None


# ---------------------------------------------------------------------------------------------------------- the file

DAY = date(2026, 11, 20)
GOOD = {
    "toolkit": [{"archs": ["sm_90"], "cuda": "12.0", "nvcc": "12.0", "source": "https://x", "checked": DAY}],
    "capability": [
        {
            "backend": "toy",
            "op": "fp8_gemm",
            "archs": ["sm_90"],
            "activations": ["fp8"],
            "scalings": ["row"],
            "out_dtypes": ["bfloat16"],
            "source": "https://x",
            "checked": DAY,
        }
    ],
    "alias": [{"name": "play", "backend": "toy", "note": "a word"}],
}


def test_a_good_file_loads():
    loaded = load(GOOD)
    assert loaded.backends == ("toy",)
    assert loaded.aliases["play"].backend == "toy"
    assert loaded.toolkits["sm_90"].nvcc == "12.0"


@pytest.mark.parametrize(
    ("table", "changes", "text"),
    [
        ("capability", {"surprise": 1}, "unknown key 'surprise'"),
        ("capability", {"op": "gemm"}, "must be a list of"),
        ("capability", {"archs": ["sm_77"]}, "must be a list of"),
        ("capability", {"archs": "sm_90"}, "archs must be list, found str"),
        ("capability", {"activations": ["any"]}, "must be a list of"),
        ("capability", {"n_multiple": 0}, "positive integer"),
        ("capability", {"k_multiple": "8"}, "k_multiple must be int"),
        ("capability", {"sf_layouts": ["128x4"]}, "belongs to nvfp4_gemm"),
        ("capability", {"requires": [{"what": "magic", "min": "1"}]}, "must be a list of"),
        ("capability", {"requires": [{"what": "cuda", "min": "soon"}]}, "not a version"),
        ("capability", {"requires": [{"what": "cuda"}]}, "'min' is missing"),
        ("capability", {"source": "somewhere"}, "https"),
        ("capability", {"kernel_op": "w4_gemm"}, "belongs to proof"),
        ("capability", {"kernel_op": 4, "proof": True}, "kernel_op must be str"),
        ("capability", {"raw": "no"}, "raw must be bool, found str 'no'"),
        ("capability", {"auto": 1}, "auto must be bool, found int 1"),
        ("capability", {"checked": "2026"}, "checked must be date"),
        ("toolkit", {"nvcc": "newest"}, "not a version"),
        ("toolkit", {"archs": []}, "must be a list of"),
        ("alias", {"backend": "nobody"}, "alias"),
        ("alias", {"name": "toy"}, "alias"),
        ("alias", {"why": "x"}, "unknown key 'why'"),
    ],
)
def test_a_bad_file_is_refused(table, changes, text):
    data = copy.deepcopy(GOOD)
    data[table][0].update(changes)
    with pytest.raises(SettingsError, match=text):
        load(data)


def test_duplicates_and_strange_tables_are_refused():
    with pytest.raises(SettingsError, match="twice"):
        load(GOOD | {"capability": GOOD["capability"] * 2})
    (record,) = GOOD["capability"]
    other = record | {"archs": ["sm_120"]}
    assert len(load(GOOD | {"capability": [record | {"archs": ["sm_100"]}, other]}).capabilities) == 2
    with pytest.raises(SettingsError, match="sm_120 is declared twice"):
        load(GOOD | {"capability": [record | {"archs": ["sm_100", "sm_120"]}, other]})
    with pytest.raises(SettingsError, match="unknown key 'capabilities'"):
        load(GOOD | {"capabilities": []})


def test_every_known_arch_has_a_toolkit():
    from fp4dispatch.problem.arch import KNOWN_ARCHS

    assert set(catalogue().toolkits) == {arch.sm for arch in KNOWN_ARCHS}
