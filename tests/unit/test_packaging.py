"""The wheel and the editable install, made for real: what is in them, and that they work from another folder."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from fp4dispatch.jit import kernels, proven
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.prove import KernelProof, Proof, prover_sha256
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.jit.store.digests import digest
from fp4dispatch.jit.store.entries import OWN, PROOF

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository, whose files git lists")

PROGRAM = """
import fp4dispatch, json
from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog import manifest
catalog = manifest.installed()
print(json.dumps({
    "file": fp4dispatch.__file__,
    "csrc": str(catalog.csrc),
    "kernels": sorted(catalog.kernels),
    "targets": sorted(catalog.records),
    "caches": [str(cache.root) for cache in kernels.caches()],
    "found": kernels.find("nvfp4_gemm_sm120", "bf16_128x128", "120f") is not None,
}))
"""


def command(words: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FP4DISPATCH_", "PYTHON", "BUNDLE_"))}
    return subprocess.run(
        words, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False, timeout=300
    )


def must(words: list[str], cwd: Path, **environment: str) -> str:
    done = command(words, cwd, **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git knows, so that building leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    listed = must(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def isolation() -> list[str]:
    """Build with the setuptools that is here where it is new enough: nothing is downloaded then."""
    try:
        return ["--no-build-isolation"] if int(version("setuptools").split(".")[0]) >= 77 else []
    except PackageNotFoundError:
        return []


def wheel(source: Path, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    return command([*pip, "wheel", "--no-deps", *isolation(), "-w", str(out), str(source)], out.parent, **environment)


def install(out: Path, target: Path) -> Path:
    (built,) = out.glob("*.whl")
    must([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(built)], out.parent)
    return built


@pytest.fixture(scope="module")
def installed_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, and the folder it is installed into."""
    folder = tmp_path_factory.mktemp("wheel")
    done = wheel(source, folder / "out")
    assert done.returncode == 0, done.stderr[-4000:]
    return install(folder / "out", folder / "site"), folder / "site"


def ask(python: str, cwd: Path, **environment: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(must([python, "-c", PROGRAM], cwd, **environment))
    return found


def explains(python: str, cwd: Path, **environment: str) -> None:
    sizes = ["-m", "1", "-n", "64", "-k", "64", "--arch", "12.0", "--cuda", "13.0", "--json"]
    done = command([python, "-m", "fp4dispatch", "explain", "nvfp4_gemm", *sizes], cwd, **environment)
    assert '"cudnn"' in done.stdout, done.stderr


def test_the_wheel_is_for_any_platform_and_holds_every_file(source: Path, installed_wheel: tuple[Path, Path]) -> None:
    built, folder = installed_wheel
    assert built.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
    kept = {".py", ".toml", ".json", ".cu", ".h", ".cuh", ".typed"}
    places = {"fp4dispatch": "fp4dispatch", "csrc": "fp4dispatch/csrc", "jit_flags": "fp4dispatch/jit_flags"}
    wanted = {
        f"{place}/{path.relative_to(source / top).as_posix()}"
        for top, place in places.items()
        for path in (source / top).rglob("*")
        if path.suffix in kept or path.name == "py.typed"
    }
    assert wanted - names == set()
    for name in (
        *("csrc/cutlass_gemm/nvfp4_gemm_sm120.cu", "csrc/common/gdc_guard.h", "csrc/kernels.toml"),
        "jit_flags/sm120f.toml",
        *("policy/rules.toml", "policy/capabilities.toml", "backends/own/tiling/cutlass_tiles.toml"),
        *("backends/own/tiling/corrections.json", "cli/demos/sentence_pairs.toml", "py.typed"),
    ):
        assert f"fp4dispatch/{name}" in names
    assert not any(name.startswith(("tests/", "bench/", "fp4dispatch/prebuilt")) for name in names)
    assert (folder / "fp4dispatch" / "csrc" / "kernels.toml").is_file()


def test_the_wheel_works_from_another_folder(installed_wheel: tuple[Path, Path], tmp_path: Path) -> None:
    folder = installed_wheel[1]
    found = ask(sys.executable, tmp_path, PYTHONPATH=str(folder))
    assert Path(found["file"]).is_relative_to(folder)
    assert Path(found["csrc"]).is_relative_to(folder)
    assert found["kernels"] == sorted(installed().kernels)
    assert found["targets"] == sorted(installed().records)
    explains(sys.executable, tmp_path, PYTHONPATH=str(folder))


def test_an_editable_install_works_from_another_folder(source: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    must([sys.executable, "-m", "venv", "--without-pip", str(venv)], tmp_path)
    python = str(venv / "bin" / "python")
    here = must([python, "-c", "import site; print(site.getsitepackages()[0])"], tmp_path).strip()
    # What this environment has, but without running its .pth files: one may lead to another fp4dispatch.
    Path(here, "outer.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    if not isolation():
        pytest.skip("an editable build with isolation would download setuptools")
    words = [
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--prefix",
        str(venv),
        "-e",
        str(source),
    ]
    must([python, *words], tmp_path)
    found = ask(python, tmp_path)
    assert Path(found["file"]).is_relative_to(source)
    assert Path(found["csrc"], "kernels.toml").samefile(source / "csrc" / "kernels.toml")
    assert found["kernels"] == sorted(installed().kernels)
    assert found["targets"] == sorted(installed().records)
    explains(python, tmp_path)


# ------------------------------------------------------------------------------------------------ embedded kernels


@pytest.fixture
def made_ahead(tmp_path: Path) -> Path:
    """What ``fp4dispatch build --out`` leaves, with one entry of a library that is only bytes."""
    catalog = installed()
    (job,) = (
        job
        for job in proven.jobs(catalog)
        if (job.kernel.name, job.variant.id, job.record.target) == ("nvfp4_gemm_sm120", "bf16_128x128", "120f")
    )
    built = tmp_path / "built"
    built.mkdir()
    (built / "kernel.so").write_bytes(b"a library")
    kernel = KernelProof("k", 1, 1, {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 64}, (), (), 0, 168, 0, 0, 0)
    proof = Proof(digest(built / "kernel.so"), prover_sha256(), ("sm_120f",), "test", (kernel,))
    (built / PROOF).write_bytes(proof.to_json())
    source = "cutlass_gemm/nvfp4_gemm_sm120.cu"
    files = {(OWN, source): digest(catalog.csrc / source)}
    cache = Cache(tmp_path / "ahead", portable=True)
    cache.publish(built, kernels.request(job), files, {"nvcc": "13.0"}, pinned=True)
    (cache.root / "locks").mkdir()
    return cache.root


def test_a_wheel_with_kernels_is_of_one_platform_and_they_are_found(
    source: Path, made_ahead: Path, tmp_path: Path
) -> None:
    done = wheel(source, tmp_path / "out", BUNDLE_KERNELS=str(made_ahead))
    assert done.returncode == 0, done.stderr[-4000:]
    built = install(tmp_path / "out", tmp_path / "site")
    assert built.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    prebuilt = tmp_path / "site" / "fp4dispatch" / "prebuilt"
    assert sorted(path.name for path in prebuilt.iterdir()) == ["kernels"]
    found = ask(sys.executable, tmp_path, PYTHONPATH=str(tmp_path / "site"), FP4DISPATCH_CACHE_DIR=str(tmp_path / "c"))
    assert found["caches"] == [str(tmp_path / "c"), str(prebuilt)]
    assert found["found"]


@pytest.mark.parametrize("bundle", [True, False])
def test_kernels_of_an_earlier_build_are_not_left_over(
    source: Path, made_ahead: Path, tmp_path: Path, bundle: bool
) -> None:
    prebuilt = tmp_path / "lib" / "fp4dispatch" / "prebuilt"
    (prebuilt / "kernels" / "old").mkdir(parents=True)
    words = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    must(words, source, BUNDLE_KERNELS=str(made_ahead) if bundle else "")
    assert not (prebuilt / "kernels" / "old").exists()
    assert prebuilt.exists() is bundle


def record_of(folder: Path) -> Path:
    (found,) = folder.rglob("entry.json")
    return found


def edit(folder: Path, **values: Any) -> None:
    path = record_of(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: shutil.rmtree(folder / "kernels"), "no finished kernel"),
        (lambda folder: record_of(folder).with_name("kernel.so").write_bytes(b"x"), "not the library"),
        (lambda folder: record_of(folder).with_name("proof.json").unlink(), "proof.json"),
        (lambda folder: edit(folder, pinned=False), "a user's cache"),
        (lambda folder: edit(folder, request={"package": "0.0.1"}), "built by version 0.0.1"),
        (
            lambda folder: edit(folder, files=[["src", "common/gdc_guard.h", "0" * 64]]),
            "another csrc/common/gdc_guard.h",
        ),
    ],
)
def test_another_folder_is_refused(source: Path, made_ahead: Path, tmp_path: Path, damage: Any, words: str) -> None:
    damage(made_ahead)
    done = command(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")],
        source,
        BUNDLE_KERNELS=str(made_ahead),
    )
    assert done.returncode == 1
    assert words in done.stderr
    assert "fix: make it with `fp4dispatch build" in done.stderr
    assert not (tmp_path / "lib" / "fp4dispatch" / "prebuilt").exists()


# ------------------------------------------------------------------------------------------------- what an index shows


def metadata(built: Path) -> str:
    with zipfile.ZipFile(built) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)]+)\)", text)


def test_the_page_of_an_index_has_no_link_into_the_repository(
    source: Path, installed_wheel: tuple[Path, Path], tmp_path: Path
) -> None:
    page = metadata(installed_wheel[0])
    assert "Description-Content-Type: text/markdown" in page
    assert "## Use it" in page
    assert [link for link in links(page) if not link.startswith(("https://", "#"))] == []
    assert not re.search(r"^!", page, re.MULTILINE)  # a picture, or what is left of one
    done = wheel(source, tmp_path / "out", PROJECT_URL="https://example.org/us/fp4dispatch/")
    assert done.returncode == 0, done.stderr[-4000:]
    (built,) = (tmp_path / "out").glob("*.whl")
    there = [link for link in links(metadata(built)) if "example.org" in link]
    base = "https://example.org/us/fp4dispatch"
    at = re.compile(rf"{base}/(blob|raw)/v{re.escape(version('fp4dispatch'))}/([^#]+)(#.*)?")
    assert there
    for link in there:
        found = at.fullmatch(link)
        assert found, link
        assert found[1] == ("raw" if found[2].endswith(".svg") else "blob"), link
        assert (source / found[2]).exists(), link
    assert f"]({base}/raw/" in metadata(built)


def test_tools_of_an_index_accept_wheel_and_sdist(
    source: Path, installed_wheel: tuple[Path, Path], tmp_path: Path
) -> None:
    for tool in ("build", "twine", "check_wheel_contents"):
        pytest.importorskip(tool, reason=f"{tool} (extra `test`) is not installed")
    isolated = [] if isolation() == [] else ["--no-isolation"]
    must([sys.executable, "-m", "build", "--sdist", *isolated, "-o", str(tmp_path), str(source)], tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    must([sys.executable, "-m", "twine", "check", "--strict", str(installed_wheel[0]), str(archive)], tmp_path)
    must([sys.executable, "-m", "check_wheel_contents", str(installed_wheel[0])], tmp_path)
    with tarfile.open(archive) as held:
        names = {name.partition("/")[2] for name in held.getnames()}
    for name in ("LICENSE", "setup.py", "csrc/kernels.toml", "jit_flags/sm90a.toml", "fp4dispatch/policy/rules.toml"):
        assert name in names


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.search(rf"^version: {re.escape(version('fp4dispatch'))}$", text, re.MULTILINE)
    assert re.search(r"^license: Apache-2.0$", text, re.MULTILINE)


def test_each_python_of_the_classifiers_is_one_that_is_allowed() -> None:
    page = (ROOT / "pyproject.toml").read_text("utf-8")
    named = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', page)
    assert named == ["10", "11", "12", "13"]
    assert 'requires-python = ">=3.10"' in page
