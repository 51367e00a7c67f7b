"""Which finished kernels count as proven: the entry's own proof decides, for every entry of the op and arch."""

from __future__ import annotations

import json

import pytest

from fp4dispatch.dispatch import choose
from fp4dispatch.jit import building, kernels, proven
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.prove import KernelProof, Proof, prover_sha256
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.jit.store.digests import digest
from fp4dispatch.jit.store.entries import OWN, PROOF
from fp4dispatch.machine import system

SM120 = {("nvfp4_gemm", "sm_120"), ("nvfp4_gemm", "sm_121")}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    proven.forget()
    yield Cache(tmp_path / "cache")
    proven.forget()


OMMA = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"


def publish(cache, tmp_path, *, kernel="nvfp4_gemm_sm120", variant="bf16_128x128", target="120f", mma=OMMA, wait=1):
    """Publish an entry as a build does, of a library that is only bytes."""
    catalog = installed()
    (job,) = (
        job
        for job in proven._every(catalog)
        if (job.kernel.name, job.variant.id, job.record.target) == (kernel, variant, target)
    )
    source = job.kernel.source
    built = tmp_path / f"built-{variant}-{target}"
    built.mkdir()
    (built / "kernel.so").write_bytes(variant.encode())
    request = kernels.request(job)
    found = KernelProof("k", wait, 1, {mma: 64}, (), (), 0, 168, 0, 0, 0)
    proof = Proof(digest(built / "kernel.so"), prover_sha256(), (f"sm_{target}",), "test", (found,))
    (built / PROOF).write_bytes(proof.to_json())
    files = {(OWN, source): digest(catalog.csrc / source)}
    proven.forget()
    return cache.publish(built, request, files, {}, pinned=True)


def test_nothing_built_is_nothing_proven(cache):
    assert proven.proven() == frozenset()


def test_a_proven_entry_reaches_the_policy(cache, tmp_path):
    publish(cache, tmp_path)
    assert proven.proven() == SM120
    assert system.current().proven == SM120
    choose.reset()


def test_one_entry_without_barrier_spoils_its_op_and_arch(cache, tmp_path):
    publish(cache, tmp_path)
    publish(cache, tmp_path, variant="fp16_128x128", wait=0)
    assert proven.proven() == frozenset()


HMMA = {"kernel": "w4a16_small", "variant": "bf16", "mma": "HMMA.16816.F32.BF16", "wait": 0}


def test_a_target_without_barriers_is_proven_by_its_other_promises(cache, tmp_path):
    """sm_80 knows no PDL, so there is nothing to wait for; a missing tensor-core instruction still counts."""
    publish(cache, tmp_path, **HMMA, target="80")
    assert proven.proven() == {("w4_gemm", "sm_80"), ("w4_gemm", "sm_86"), ("w4_gemm", "sm_89")}
    publish(cache, tmp_path, **HMMA | {"variant": "fp16", "mma": "FFMA"}, target="80")
    assert proven.proven() == frozenset()


def test_a_target_with_barriers_needs_them(cache, tmp_path):
    publish(cache, tmp_path, **HMMA, target="90a")
    assert proven.proven() == frozenset()


@pytest.mark.parametrize("damage", ["proof gone", "proof of another file", "library changed"])
def test_an_entry_whose_proof_does_not_hold_is_not_proven(cache, tmp_path, damage):
    entry = publish(cache, tmp_path)
    if damage == "proof gone":
        (entry.folder / PROOF).unlink()
    elif damage == "proof of another file":
        data = json.loads((entry.folder / PROOF).read_text())
        (entry.folder / PROOF).write_text(json.dumps(data | {"library_sha256": "0" * 64}))
    else:
        entry.library.write_bytes(b"something else")
    proven.forget()
    assert proven.proven() == frozenset()


def test_an_entry_of_other_sources_is_not_current(cache, tmp_path, monkeypatch):
    entry = publish(cache, tmp_path)
    record = json.loads((entry.folder / "entry.json").read_text())
    record["files"][0][2] = "0" * 64
    (entry.folder / "entry.json").write_text(json.dumps(record))
    proven.forget()
    assert proven.proven() == frozenset()


def test_a_build_in_this_process_is_seen(cache, tmp_path, monkeypatch):
    assert proven.proven() == frozenset()
    publish(cache, tmp_path)
    monkeypatch.setattr(building, "_compiled", [*building._compiled, ("tiny/one-120f", 1.0)])
    assert proven.proven() == SM120


def test_a_foreign_folder_is_reported_not_trusted(cache, tmp_path, caplog):
    publish(cache, tmp_path)
    cache.root.chmod(0o777)
    proven.forget()
    assert proven.proven() == frozenset()
    assert "cache" in caplog.text


def test_entries_are_of_gemms_only():
    assert {job.kernel.op for job in proven.jobs(installed())} == {"nvfp4_gemm", "fp8_gemm", "w4_gemm", "w8_gemm"}


def test_finished_are_the_builds_that_can_be_loaded_uncompiled(cache, tmp_path):
    assert proven.finished() == frozenset()
    publish(cache, tmp_path)
    expected = {("nvfp4_gemm_sm120", "bf16_128x128", arch) for _, arch in SM120}
    assert proven.finished() == expected
    assert system.current().finished == expected
    publish(cache, tmp_path, variant="fp16_128x128", wait=0)  # not proven: it runs without PDL
    expected |= {("nvfp4_gemm_sm120", "fp16_128x128", arch) for _, arch in SM120}
    assert proven.finished() == expected
    quantiser = publish(cache, tmp_path, kernel="fp8_quantize", variant="any", target="90a")
    assert proven.finished() == expected | {("fp8_quantize", "any", "sm_90")}
    assert proven.proven() == frozenset()  # of GEMMs
    quantiser.library.write_bytes(b"something else")
    proven.forget()
    assert proven.finished() == expected
    assert proven.proven() == frozenset()
