"""What a proof allows, judged from kernel tables; reading machine code itself is tried in tests/compile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp4dispatch.errors import ProofError, ToolchainError
from fp4dispatch.jit import prove
from fp4dispatch.jit.compiler.toolchain import Disassembler
from fp4dispatch.jit.prove import KernelProof, Proof
from fp4dispatch.jit.store.entries import Entry

GOOD = KernelProof(
    name="_Z4gemm",
    wait=1,
    signal=1,
    mma={"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 64},
    unguarded=(),
    early=("0x20 UBLKCP.S.G: loads weights",),
    spills=0,
    registers=168,
    stack=0,
    shared=1024,
    local=0,
)
PROOF = Proof("a" * 64, prove.prover_sha256(), ("sm_120f",), "13.5.37", (GOOD,))
REQUEST: dict[str, Any] = {
    "target": "120f",
    "pdl": True,
    "mma": r"OMMA\.SF",
    "expect_sass": {"wait": "ACQBULK", "signal": "PREEXIT", "mma": "OMMA|QMMA"},
}


def test_a_sound_proof_allows_pdl() -> None:
    assert PROOF.faults(REQUEST) == []
    assert PROOF.pdl_allowed(REQUEST)
    assert not PROOF.pdl_allowed({**REQUEST, "pdl": False})


@pytest.mark.parametrize(
    ("proof", "message"),
    [
        (replace(PROOF, kernels=()), "the library holds no kernel"),
        (replace(PROOF, archs=("sm_120",)), "machine code is for sm_120, not for sm_120f"),
        (replace(PROOF, archs=("sm_120f", "sm_90a")), "machine code is for sm_120f, sm_90a, not for sm_120f"),
        (replace(PROOF, kernels=(GOOD, replace(GOOD, name="other", wait=0))), "other: no grid barrier (ACQBULK)"),
        (
            replace(PROOF, kernels=(replace(GOOD, unguarded=("0x10 LDG.E",)),)),
            "1 instructions stand before the grid barrier that may not",
        ),
        (replace(PROOF, kernels=(replace(GOOD, mma={"QMMA.16832": 4}),)), "no tensor-core instruction OMMA"),
        (replace(PROOF, kernels=(replace(GOOD, mma={}),)), "(found: none)"),
    ],
)
def test_one_fault_is_enough_to_forbid_pdl(proof: Proof, message: str) -> None:
    (fault,) = proof.faults(REQUEST)
    assert message in fault
    assert not proof.pdl_allowed(REQUEST)


def test_signalling_dependents_is_recorded_but_not_required() -> None:
    assert replace(PROOF, kernels=(replace(GOOD, signal=0),)).pdl_allowed(REQUEST)


def test_a_long_mangled_name_is_cut_for_people() -> None:
    assert len(replace(GOOD, name="_ZN" + "x" * 4000).short) == 80


def entry(folder: Path, sha256: str) -> Entry:
    if (folder / "proof.json").exists():
        (folder / "proof.json").chmod(0o600)
    return Entry(folder, REQUEST, {}, {}, sha256, pinned=False)


def test_a_proof_comes_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "proof.json").write_bytes(PROOF.to_json())
    assert prove.read(entry(tmp_path, "a" * 64)) == PROOF


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        PROOF.to_json().decode()[:-1],
        PROOF.to_json().decode().replace('"schema": 2', '"schema": 1'),
        PROOF.to_json().decode().replace('"wait": 1', '"wait": true'),
        PROOF.to_json().decode().replace('"wait": 1', '"wait": "1"'),
        PROOF.to_json().decode().replace('"wait": 1,', ""),
        PROOF.to_json().decode().replace('"wait": 1', '"wait": 1, "more": 1'),
        PROOF.to_json().decode().replace('"0x20 UBLKCP.S.G: loads weights"', "1"),
        PROOF.to_json().decode().replace("aaaa", "bbbb"),
        PROOF.to_json().decode().replace(prove.prover_sha256(), "c" * 64),
        "[" * 100_000,
    ],
)
def test_a_malformed_proof_is_no_proof(text: str, tmp_path: Path) -> None:
    (tmp_path / "proof.json").write_text(text)
    assert prove.read(entry(tmp_path, "a" * 64)) is None


def test_no_proof_is_no_proof(tmp_path: Path) -> None:
    assert prove.read(entry(tmp_path, "a" * 64)) is None


SASS = """
	.section	.text.{name},"ax",@progbits
.text.{name}:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/                   ACQBULK ;
        /*0020*/               @P0 LDG.E R0, desc[UR4][R2.64] ;
        /*0030*/                   OMMA.SF.16864.F32 R0, R0, R0, R0 ;
        /*0040*/              @!P1 STL [R1], R0 ;
        /*0050*/                   EXIT ;
"""
USAGE = """
Fatbin elf code:
================
arch = sm_120f

Resource usage:
 Common:
  GLOBAL:0
 Function gemm:
  REG:168 STACK:8 SHARED:1024 LOCAL:4 CONSTANT[0]:904 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def tools(folder: Path, sass: str, usage: str, code: int = 0) -> Disassembler:
    """Disassemblers that print these texts."""
    (folder / "sass").write_text(sass)
    (folder / "usage").write_text(usage)
    cuobjdump, nvdisasm = folder / "cuobjdump", folder / "nvdisasm"
    cuobjdump.write_text(
        f"#!/bin/sh\nif [ $1 = --dump-resource-usage ]; then cat {folder}/usage; else touch x.cubin; fi; exit {code}\n"
    )
    nvdisasm.write_text(f"#!/bin/sh\ncat {folder}/sass\n")
    for tool in (cuobjdump, nvdisasm):
        tool.chmod(0o755)
    return Disassembler(cuobjdump, nvdisasm, "13.0")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.so"
    path.write_bytes(b"library")
    return path


def test_the_disassembly_is_counted(tmp_path: Path, library: Path) -> None:
    proof = prove.prove(library, REQUEST, tools(tmp_path, SASS.format(name="gemm"), USAGE))
    assert proof.kernels == (
        KernelProof("gemm", 1, 0, {"OMMA.SF.16864.F32": 1}, (), (), 1, registers=168, stack=8, shared=1024, local=4),
    )
    assert proof.pdl_allowed(REQUEST)


def test_an_access_above_the_barrier_is_seen(tmp_path: Path, library: Path) -> None:
    sass = SASS.format(name="gemm").replace("LDC R1, c[0x0][0x37c]", "LDG.E R1, desc[UR4][R2.64]")
    proof = prove.prove(library, REQUEST, tools(tmp_path, sass, USAGE))
    assert "0x0 LDG.E" in proof.faults(REQUEST)[0]
    assert not proof.pdl_allowed(REQUEST)


DECLARED = {**REQUEST, "before_wait": {"access": "UBLKCP", "weights": [0, 8]}}


def test_a_declared_copy_whose_address_is_not_traced_is_refused(tmp_path: Path, library: Path) -> None:
    sass = SASS.format(name="gemm").replace("LDC R1, c[0x0][0x37c]", "UBLKCP.S.G [UR12], [UR8], UR5")
    disassembler = tools(tmp_path, sass, USAGE)
    for request in (REQUEST, DECLARED):
        assert "0x0 UBLKCP.S.G" in prove.prove(library, request, disassembler).faults(request)[0]


def test_a_declaration_that_cannot_be_understood_is_an_error(tmp_path: Path, library: Path) -> None:
    disassembler = tools(tmp_path, SASS.format(name="gemm"), USAGE)
    for declared in (["UBLKCP"], {"access": "LDG", "weights": [0, 8]}, {"access": "UBLKCP", "weights": [8, 0]}):
        with pytest.raises(ProofError, match="cannot be judged"):
            prove.prove(library, {**REQUEST, "before_wait": declared}, disassembler)


def test_a_declaration_does_not_replace_the_barrier(tmp_path: Path, library: Path) -> None:
    sass = SASS.format(name="gemm").replace("ACQBULK", "UBLKCP.S.G [UR12], [UR8], UR5")
    proof = prove.prove(library, DECLARED, tools(tmp_path, sass, USAGE))
    assert "no grid barrier" in proof.faults(DECLARED)[0]


def test_a_kernel_whose_code_is_not_seen_is_an_error(tmp_path: Path, library: Path) -> None:
    hidden = USAGE + " Function hidden:\n  REG:8 STACK:0\n"
    with pytest.raises(ProofError, match="hidden"):
        prove.prove(library, REQUEST, tools(tmp_path, SASS.format(name="gemm"), hidden))


def test_code_without_instructions_is_an_error(tmp_path: Path, library: Path) -> None:
    with pytest.raises(ProofError):
        prove.prove(library, REQUEST, tools(tmp_path, "nothing that looks like SASS", USAGE))


def test_a_branch_that_cannot_be_followed_is_a_fault(tmp_path: Path, library: Path) -> None:
    sass = SASS.format(name="gemm").replace("LDC R1, c[0x0][0x37c] ;", "BRA R2 ;")
    proof = prove.prove(library, REQUEST, tools(tmp_path, sass, USAGE))
    assert "unknown branch target" in proof.faults(REQUEST)[0]


def test_a_line_of_code_that_cannot_be_read_is_an_error(tmp_path: Path, library: Path) -> None:
    sass = SASS.format(name="gemm").replace("ACQBULK ;", "?")
    with pytest.raises(ProofError, match="cannot be read from the disassembler's listing"):
        prove.prove(library, REQUEST, tools(tmp_path, sass, USAGE))


def test_a_disassembler_that_fails_is_said(tmp_path: Path, library: Path) -> None:
    with pytest.raises(ToolchainError, match=r"cuobjdump 13\.0 failed"):
        prove.prove(library, REQUEST, tools(tmp_path, "", "cuobjdump fatal: no", code=1))


def test_json_is_plain() -> None:
    assert json.loads(PROOF.to_json())["kernels"][0]["name"] == "_Z4gemm"
