"""Wheels of finished kernels: made by ``build --wheel``, found without an import, and used only where they match."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp4dispatch import cli
from fp4dispatch.cli.checks.kernels import check_kernels
from fp4dispatch.errors import CacheError, CompileError
from fp4dispatch.jit import kernels, packages, packing
from fp4dispatch.jit.building import Built
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.prove import KernelProof, Proof, prover_sha256, read
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.jit.store.digests import digest
from fp4dispatch.jit.store.entries import OWN, PROOF
from fp4dispatch.machine import libraries
from fp4dispatch.machine import system as machine
from fp4dispatch.problem.arch import SM90

KERNEL, VARIANT, TARGET = "fp8_quantize", "any", "90a"
NAME = "fp4dispatch-kernels-sm90"
PACKAGE = NAME.replace("-", "_")


def publish(root: Path, **changes):
    """An entry as ``build --out`` leaves it, of a library that is only bytes."""
    catalog = installed()
    job = kernels.job(catalog, KERNEL, VARIANT, TARGET)
    built = root.parent / "built"
    built.mkdir(parents=True)
    (built / "kernel.so").write_bytes(b"a library")
    row = KernelProof("k", changes.get("waits", 1), 1, {}, (), (), 0, 32, 0, 0, 0)
    proof = Proof(digest(built / "kernel.so"), prover_sha256(), ("sm_90a",), "test", (row,))
    (built / PROOF).write_bytes(proof.to_json())
    source = catalog.kernel(KERNEL).source
    tvm_ffi = libraries.package_folder("tvm_ffi")
    header = "tvm/ffi/c_api.h"
    files = {
        (OWN, source): changes.get("source", digest(catalog.csrc / source)),
        ("tvm_ffi", header): digest(tvm_ffi / "include" / header),
    }
    versions = {"nvcc": changes.get("nvcc", "13.0.88"), "host": "g++"}
    request = kernels.request(job) | changes.get("request", {})
    return Cache(root, portable=True).publish(built, request, files, versions, pinned=changes.get("pinned", True))


def distribution(site: Path, value: str = PACKAGE) -> None:
    """The metadata of an installed wheel."""
    info = site / f"{PACKAGE}-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {NAME}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[{packages.GROUP}]\nsm90 = {value}\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder of installed packages; no compiler and no driver is here."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FP4DISPATCH_JIT", "0")
    monkeypatch.setattr(machine, "detected", lambda: SimpleNamespace(driver_cuda=None, gpus=()))
    packages.forget()
    yield folder
    packages.forget()


def put(site: Path, **changes):
    distribution(site)
    (site / PACKAGE).mkdir()
    (site / PACKAGE / "__init__.py").write_text("raise RuntimeError('kernels must not need any import')\n")
    return publish(site / PACKAGE, **changes)


def find():
    return kernels.find(KERNEL, VARIANT, TARGET)


def report():
    (only,) = (found for found in packages.reports() if found.package.name == NAME)
    return only


def test_a_kernel_of_a_wheel_is_found_without_importing_it(site):
    entry = put(site)
    found = find()
    assert found is not None
    assert found.entry.folder == entry.folder
    assert found.pdl_allowed
    assert PACKAGE not in sys.modules
    assert report().usable == (f"{KERNEL}/{VARIANT}-{TARGET}",)
    assert report().ignored == {}
    (check,) = check_kernels(SimpleNamespace(kernels=(report(),)))
    assert (check.status, "1 kernels for 90a" in check.text) == ("ok", True)


def test_the_cache_of_the_user_comes_first(site, tmp_path):
    put(site)
    mine = publish(tmp_path / "mine" / "cache", pinned=False)
    shutil.copytree(tmp_path / "mine" / "cache", tmp_path / "cache")
    assert find().entry.folder == tmp_path / "cache" / mine.folder.relative_to(tmp_path / "mine" / "cache")


def test_a_driver_of_the_same_major_version_runs_it(site, monkeypatch):
    put(site, nvcc="13.1.2")
    monkeypatch.setattr(machine, "detected", lambda: SimpleNamespace(driver_cuda="13.0"))
    assert find() is not None


def other_prover(entry):
    path = entry.folder / PROOF
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prover_sha256": "0" * 64}))


REFUSED = {
    "other version": ({"request": {"package": "0.0.1"}}, None, "built by fp4dispatch 0.0.1, this is"),
    "other flags": ({"request": {"recipe": ["-O0"]}}, None, "built with another recipe"),
    "other sources": ({"source": "0" * 64}, None, "has changed"),
    "unknown variant": ({"request": {"variant": "gone"}}, None, "no such kernel"),
    "newer CUDA": ({"nvcc": "14.0.1"}, None, "compiled by CUDA 14.0.1, and the driver here runs CUDA up to 13.0"),
    "no compiler named": ({"nvcc": "?"}, None, "does not say which nvcc"),
    "no proof": ({}, lambda entry: (entry.folder / PROOF).unlink(), "no proof of this library by this version's"),
    "other prover": ({}, other_prover, "no proof of this library by this version's prover"),
    "fault in the proof": ({"waits": 0}, None, "no grid barrier"),
    "damaged library": ({}, lambda entry: entry.library.write_bytes(b"another"), "is not the one published"),
    "everybody writes": ({}, lambda entry: entry.library.chmod(0o666), "can be written by everybody"),
    "a link": ({}, lambda entry: relink(entry.library), "symbolic link"),
}


def relink(library: Path) -> None:
    library.rename(library.with_name("real.so"))
    library.symlink_to("real.so")


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_match_is_ignored_with_the_reason(site, monkeypatch, case):
    changes, damage, words = REFUSED[case]
    entry = put(site, **changes)
    if case in ("newer CUDA", "no compiler named"):
        monkeypatch.setattr(machine, "detected", lambda: SimpleNamespace(driver_cuda="13.0"))
    if damage:
        damage(entry)
    assert find() is None
    assert report().usable == ()
    ((reason, count),) = report().ignored.items()
    assert words in reason
    assert count == 1
    assert words in packages.ignored()[0]
    (check,) = check_kernels(SimpleNamespace(kernels=(report(),)))
    assert check.status == "warn"
    assert words in check.text
    assert check.fix


def test_files_of_another_user_are_ignored(site, monkeypatch):
    put(site)
    real, entry_owner = Path.lstat, 12345

    def lstat(path):
        status = real(path)
        return os.stat_result((*status[:4], entry_owner, *status[5:10])) if path.suffix == ".so" else status

    monkeypatch.setattr(Path, "lstat", lstat)
    assert find() is None
    assert "belongs to user 12345" in next(iter(report().ignored))


def test_the_owner_of_the_code_is_trusted_as_the_code_is(site, monkeypatch):
    put(site)
    real = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda path: os.stat_result((*real(path)[:4], 12345, *real(path)[5:10])))
    assert find() is not None


@pytest.mark.parametrize(
    ("value", "words"), [("not_there", "has no folder kernels"), ("a.package", "a.package has no folder kernels")]
)
def test_an_entry_point_without_kernels_is_reported(site, value, words):
    distribution(site, value)
    (site / "a" / "package" / "kernels").mkdir(parents=True)
    (site / "a" / "__init__.py").write_text("raise RuntimeError('looking for kernels must not import anything')\n")
    assert words in report().package.fault
    assert words in packages.ignored()[0]
    assert kernels.caches()[1:] == []
    (check,) = check_kernels(SimpleNamespace(kernels=(report(),)))
    assert (check.status, words in check.text) == ("warn", True)


def test_a_library_that_the_loader_refuses_is_not_tried_again(site, monkeypatch, caplog):
    put(site)
    tried = []

    def module(entry):
        tried.append(entry.folder)
        raise CompileError("long text") from RuntimeError(
            "Check failed: Failed to load dynamic shared library /proc/self/fd/3 /lib/libstdc++.so.6: version "
            "`GLIBCXX_3.4.32' not found (required by /proc/self/fd/3)"
        )

    monkeypatch.setattr(kernels, "module", module)
    kernels.build_together([(KERNEL, VARIANT)], SM90)
    with pytest.raises(Exception, match="FP4DISPATCH_JIT=0 forbids"):  # the next step, where no other entry is left
        kernels.load(KERNEL, VARIANT, SM90)
    assert len(tried) == 1
    assert "/lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found" in caplog.text
    assert "cannot be loaded: /lib/libstdc++.so.6" in next(iter(report().ignored))


def test_the_wheel_holds_the_kernels_and_what_they_need(site, tmp_path):
    entry = publish(tmp_path / "ahead" / "cache")
    (entry.folder / "build.log").write_text("paths of the machine that built it")
    wheel = packing.pack([Built(entry, read(entry), cached=True)], [SM90], tmp_path / "dist")
    assert wheel.name.startswith(f"{PACKAGE}-0.1.0-py3-none-linux_")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(f"{PACKAGE}-0.1.0.dist-info/METADATA").decode()
    inside = f"{PACKAGE}/kernels/{KERNEL}/{VARIANT}-{TARGET}/{entry.folder.name}"
    held = {f"{inside}/{name}" for name in ("kernel.so", "entry.json", "proof.json")} | {f"{PACKAGE}/__init__.py"}
    assert {name for name in names if "dist-info" not in name} == held
    assert "Requires-Dist: fp4dispatch==0.1.0" in metadata
    assert f"apache-tvm-ffi<0.2,>={libraries.distribution('apache-tvm-ffi', 'tvm_ffi').version}" in metadata
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True, timeout=120, cwd=tmp_path)
    packages.forget()
    found = find()
    assert found is not None
    assert found.entry.folder.is_relative_to(site)
    assert found.pdl_allowed


@pytest.mark.parametrize(
    ("changes", "damage", "words"),
    [
        ({"pinned": False}, None, "from a user's cache"),
        ({"waits": 0}, None, "is not proven"),
        ({}, lambda plain: plain["files"].append(["tvm_ffi", "tvm/ffi/c_api.h", "0" * 64]), "another apache-tvm-ffi"),
    ],
)
def test_a_wheel_is_refused_for_what_nothing_could_load(tmp_path, changes, damage, words):
    entry = publish(tmp_path / "ahead" / "cache", **changes)
    if damage:
        from fp4dispatch.jit.store.entries import MANIFEST, read_entry

        plain = json.loads((entry.folder / MANIFEST).read_text())
        damage(plain)
        (entry.folder / MANIFEST).write_text(json.dumps(plain))
        entry = read_entry(entry.folder)
    with pytest.raises(CacheError, match=words):
        packing.pack([Built(entry, read(entry), cached=True)], [SM90], tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_a_wheel_that_cannot_be_put_there_hides_no_kernel(tmp_path, capsys, monkeypatch):
    ahead = tmp_path / "ahead"
    publish(ahead)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(kernels, "build_all", lambda *_, **__: [])  # it is built already
    words = ["build", "--arch", "9.0", "--ops", "fp8_quantize", "--variant", VARIANT, "--out", str(ahead)]
    monkeypatch.setattr("fp4dispatch.cli.build._jobs", lambda *_: [kernels.job(installed(), KERNEL, VARIANT, TARGET)])
    code = cli.main([*words, "--wheel", str(tmp_path / "file"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["ok"], report["kernels"][0]["proven"]) == (1, False, True)
    assert "the wheel cannot be put into" in report["error"]
    assert "wheel" not in report
