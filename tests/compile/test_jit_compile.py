"""Real nvcc, real disassembler, small kernels: wrong flags do not compile, broken promises are not published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fp4dispatch.errors import CompileError, FlagsError, ProofError, ToolchainError
from fp4dispatch.jit import building, kernels, prove
from fp4dispatch.jit.catalog.manifest import Catalog
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.problem.arch import SM100, SM120, SM121
from tests.jit_cases import JIT_FLAGS, MANIFEST, REPOSITORY, tiny_catalog

pytestmark = pytest.mark.compile

# Everything lies below a folder whose name a shell would run.
HOSTILE = "a b;touch PWNED '$(touch PWNED)'"
DEVICE_ONLY = """
#include "gdc_guard.h"
__global__ void add(float* p) {
  fp4d::grid_dependency_wait();
  p[threadIdx.x] += ADD;
  fp4d::grid_dependency_launch_dependents();
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jit") / HOSTILE


@pytest.fixture(autouse=True)
def cache_dir(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(folder / "cache"))
    return folder / "cache"


@pytest.fixture(scope="module")
def catalog(folder: Path) -> Catalog:
    return tiny_catalog(folder / "csrc")


@pytest.mark.parametrize("target", ["90a", "120f"])
def test_a_kernel_with_barriers_is_proven_and_loads(target: str, catalog: Catalog) -> None:
    built = kernels.build("tiny", "one", target, catalog=catalog)
    assert built.proven
    assert built.pdl_allowed
    assert built.proof is not None
    assert built.proof.archs == (f"sm_{target}",)
    (kernel,) = built.proof.kernels
    assert (kernel.wait, kernel.signal, kernel.spills, kernel.unguarded) == (1, 1, 0, ())
    assert kernel.registers > 0
    read = {root for root, _ in built.entry.files}
    assert {"src", "tvm_ffi", "cuda", "/"} == read
    assert list(REPOSITORY.glob("**/PWNED")) == []


def test_a_finished_kernel_loads_and_runs_without_any_toolchain(catalog: Catalog, cache_dir: Path) -> None:
    kernels.build("tiny", "one", "120f", catalog=catalog)
    program = """
import json, sys
from pathlib import Path
from fp4dispatch.problem.arch import Arch
from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog.manifest import Catalog
from fp4dispatch.machine import libraries
assert libraries.nvcc()[0] is None and libraries.cutlass() is None
catalog = Catalog.load(Path(sys.argv[1]), Path(sys.argv[2]))
loaded = kernels.load("tiny", "one", Arch.parse(sys.argv[3]), catalog=catalog)
print(json.dumps([loaded.module.run(41), loaded.pdl_allowed, loaded.built.cached]))
"""
    nothing = "/nonexistent"
    environment = {
        "PATH": nothing,
        "FP4DISPATCH_NVCC": nothing,
        "CUTLASS_PATH": nothing,
        "FP4DISPATCH_CACHE_DIR": str(cache_dir),
    }
    for arch in (SM120, SM121):
        answer = subprocess.run(
            [sys.executable, "-c", program, str(catalog.csrc), str(JIT_FLAGS), arch.capability],
            cwd=REPOSITORY,
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        assert json.loads(answer.stdout) == [42, True, True]


def test_an_arch_without_target_is_refused(catalog: Catalog) -> None:
    with pytest.raises(FlagsError, match=r"tiny has no compile target that runs on sm_100; it is for sm_90, sm_120"):
        kernels.load("tiny", "one", SM100, catalog=catalog)


def with_record(
    catalog: Catalog, target: str, *, plain: bool = False, defines: tuple[str, ...] | None = None
) -> Catalog:
    """The catalog with a target record that the loader would refuse, to see what the compiler says to it."""
    record = catalog.record(target)
    nvcc = tuple(argument.replace(target, target[:-1]) for argument in record.nvcc) if plain else record.nvcc
    changed = replace(record, nvcc=nvcc, defines=record.defines if defines is None else defines)
    return replace(catalog, records={**catalog.records, target: changed})


SM90_DEFINE, SM100_DEFINE = "CUTLASS_ENABLE_GDC_FOR_SM90=1", "CUTLASS_ENABLE_GDC_FOR_SM100=1"


@pytest.mark.parametrize(
    ("target", "plain", "defines", "message"),
    [
        ("120f", True, None, "plain target"),
        ("90a", True, None, "plain target"),
        ("120f", False, (), "no GDC define"),
        ("90a", False, (), "no GDC define"),
        ("120f", False, (SM90_DEFINE,), "wrong family"),
        ("90a", False, (SM100_DEFINE,), "wrong family"),
        ("121a", False, (SM90_DEFINE,), "wrong family"),
        ("100f", True, None, "plain target"),
    ],
)
def test_wrong_flags_do_not_compile(
    target: str, plain: bool, defines: tuple[str, ...] | None, message: str, folder: Path, tmp_path: Path
) -> None:
    manifest = MANIFEST.replace('["90a", "120f", "80"]', '["90a", "100f", "120f", "121a"]')
    wrong = with_record(
        tiny_catalog(tmp_path / "csrc", source=DEVICE_ONLY, manifest=manifest), target, plain=plain, defines=defines
    )
    with pytest.raises(CompileError, match=rf"error.*fp4dispatch: {message}"):
        kernels.build("tiny", "one", target, catalog=wrong)


@pytest.mark.parametrize("target", ["90a", "120f"])
def test_without_the_define_the_binary_has_no_barrier_and_is_not_published(
    target: str, tmp_path: Path, cache_dir: Path
) -> None:
    """What the guard is for: switched off, the build succeeds without a word, and only the binary shows the fault."""
    plain = tiny_catalog(tmp_path / "csrc", source=DEVICE_ONLY)
    wrong = with_record(plain, target, defines=("FP4D_TEST_ALLOW_NO_GDC=1",))
    with pytest.raises(ProofError, match=r"no grid barrier \(ACQBULK\): it would race"):
        kernels.build("tiny", "one", target, catalog=wrong)
    assert kernels.find("tiny", "one", target, catalog=wrong) is None


@pytest.mark.parametrize(
    ("source", "manifest", "message"),
    [
        (
            DEVICE_ONLY.replace("fp4d::grid_dependency_wait();", "p[64] = p[65]; fp4d::grid_dependency_wait();"),
            MANIFEST,
            "instructions stand before the grid barrier that may not, e.g. 0x",
        ),
        (
            DEVICE_ONLY + "__global__ void other(float* p) { *p = 1; }\n",
            MANIFEST,
            r"other.*: no grid barrier \(ACQBULK\)",
        ),
        (DEVICE_ONLY, MANIFEST.replace("pdl = true", "pdl = true\nmma = 'OMMA'"), "no tensor-core instruction OMMA"),
    ],
    ids=["load before the barrier", "second kernel without barrier", "no tensor-core instruction"],
)
def test_a_broken_promise_is_not_published(source: str, manifest: str, message: str, tmp_path: Path) -> None:
    broken = tiny_catalog(tmp_path / "csrc", source=source, manifest=manifest)
    with pytest.raises(ProofError, match=message):
        kernels.build("tiny", "one", "120f", catalog=broken)


def test_machine_code_of_another_target_is_a_fault(catalog: Catalog) -> None:
    built = kernels.build("tiny", "one", "120f", catalog=catalog)
    assert built.proof is not None
    assert built.proof.faults({**built.entry.request, "target": "121a"}) == [
        "machine code is for sm_120f, not for sm_121a"
    ]


def test_before_sm90_there_is_no_pdl(tmp_path: Path) -> None:
    built = kernels.build("tiny", "one", "80", catalog=tiny_catalog(tmp_path / "csrc", source=DEVICE_ONLY))
    assert built.proven
    assert not built.pdl_allowed


def none_found(minimum: str) -> None:
    raise ToolchainError(f"no disassembler {minimum}")


@pytest.mark.parametrize("damage", ["absent", "empty", "truncated", "other library", "not a table", "wrong types"])
def test_without_a_sound_proof_of_this_very_library_pdl_is_off(
    damage: str, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    entry = kernels.build("tiny", "one", "120f", catalog=catalog).entry
    path = entry.folder / "proof.json"
    good = path.read_bytes()
    data = json.loads(good)
    try:
        if damage == "absent":
            path.unlink()
        else:
            path.write_text(
                {
                    "empty": "",
                    "truncated": good.decode()[:-10],
                    "other library": json.dumps({**data, "library_sha256": "0" * 64}),
                    "not a table": "[1]",
                    "wrong types": json.dumps({**data, "kernels": [{**data["kernels"][0], "wait": "1"}]}),
                }[damage]
            )
        with monkeypatch.context() as patch:
            patch.setattr(building, "disassembler", none_found)
            found = kernels.find("tiny", "one", "120f", catalog=catalog)
        assert found is not None
        assert found.proof is None
        assert not found.pdl_allowed
        found = kernels.find("tiny", "one", "120f", catalog=catalog)
        assert found is not None
        assert found.pdl_allowed, "proved again where it can be"
        assert path.read_bytes() == good
    finally:
        path.write_bytes(good)
    again = kernels.find("tiny", "one", "120f", catalog=catalog)
    assert again is not None
    assert again.pdl_allowed


def test_a_proof_that_lists_no_kernel_allows_nothing(catalog: Catalog) -> None:
    built = kernels.build("tiny", "one", "120f", catalog=catalog)
    assert built.proof is not None
    empty = replace(built.proof, kernels=())
    assert empty.faults(built.entry.request) == ["the library holds no kernel"]
    assert not empty.pdl_allowed(built.entry.request)


@pytest.mark.parametrize("source", ["FP4DISPATCH_NVCC", "CUDA_HOME", "PATH"])
def test_each_place_of_nvcc(
    source: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_nvcc: Path
) -> None:
    for name in ("FP4DISPATCH_NVCC", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    system = tmp_path / "bin"
    system.mkdir()
    for tool in ("sh", "g++", "gcc", "as", "ld", "cc1plus", "collect2"):
        for place in ("/usr/bin", "/bin"):
            if (Path(place) / tool).exists():
                (system / tool).symlink_to(Path(place) / tool)
                break
    places = {"FP4DISPATCH_NVCC": str(real_nvcc), "CUDA_HOME": str(real_nvcc.parent.parent)}
    if source == "PATH":
        monkeypatch.setenv("PATH", f"{real_nvcc.parent}:{system}:{Path(sys.executable).parent}")
    else:
        monkeypatch.setenv("PATH", f"{system}:{Path(sys.executable).parent}")
        monkeypatch.setenv(source, places[source])
    built = kernels.build(
        "tiny", "one", "120f", catalog=tiny_catalog(tmp_path / "csrc", source=DEVICE_ONLY), cache=Cache(tmp_path / "c")
    )
    assert not built.cached
    assert built.pdl_allowed
    log = (built.entry.folder / "build.log").read_text()
    assert f"\n{real_nvcc} -ccbin=" in log


@pytest.fixture(scope="module")
def real_nvcc() -> Path:
    """The nvcc itself, not a script on PATH that starts it."""
    from fp4dispatch.machine import libraries

    found, _ = libraries.nvcc()
    assert found is not None
    says = subprocess.run([found.path, "--dryrun", "-c", "x.cu"], capture_output=True, text=True, check=False).stderr
    top = next(line.split("=", 1)[1] for line in says.splitlines() if "TOP=" in line)
    return (Path(top) / "bin" / "nvcc").resolve()


@pytest.mark.slow
def test_nvcc_from_pip_wheels(tmp_path: Path) -> None:
    wheels = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
    target = tmp_path / "wheels"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), *wheels]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install the wheels here: {done.stderr.strip().splitlines()[-1]}")
    catalog = tiny_catalog(tmp_path / "csrc")
    program = """
import sys
from pathlib import Path
from fp4dispatch.jit import kernels
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.jit.catalog.manifest import Catalog
catalog = Catalog.load(Path(sys.argv[1]), Path(sys.argv[2]))
built = kernels.build("tiny", "one", "120f", catalog=catalog, cache=Cache(Path(sys.argv[3])))
print(built.pdl_allowed, (built.entry.folder / "build.log").read_text())
"""
    environment = {key: value for key, value in os.environ.items() if key not in ("FP4DISPATCH_NVCC", "CUDA_HOME")}
    environment |= {"PYTHONPATH": f"{target}:{REPOSITORY}", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    answer = subprocess.run(
        [sys.executable, "-c", program, str(catalog.csrc), str(JIT_FLAGS), str(tmp_path / "cache")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("True")
    assert f"\n{target}/nvidia/" in answer.stdout


def test_ahead_of_time_and_verify_on_the_command_line(tmp_path: Path) -> None:
    """The shipped quantiser for two archs into a folder; then verify from it, and see a planted fault."""

    def run(*words: str) -> tuple[int, dict[str, object]]:
        answer = subprocess.run(
            [sys.executable, "-m", "fp4dispatch", *words, "--json"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "FP4DISPATCH_CACHE_DIR": str(tmp_path / "out")},
        )
        return answer.returncode, json.loads(answer.stdout)

    code, report = run("verify")
    assert code == 1, "nothing to verify is no success"
    code, report = run("build", "--arch", "9.0,12.0", "--ops", "fp8_quantize", "--out", str(tmp_path / "out"))
    assert code == 0, report
    assert len(report["kernels"]) >= 2  # type: ignore[arg-type]
    assert {row["pdl"] for row in report["kernels"]} == {True}  # type: ignore[attr-defined, index]
    code, report = run("verify")
    assert code == 0, report
    assert all(row["pdl_allowed"] for row in report["entries"])  # type: ignore[attr-defined, index]
    code, listed = run("cache", "list")
    assert code == 0
    library = next((tmp_path / "out").glob("kernels/*/*/*/kernel.so"))
    with library.open("r+b") as file:
        file.write(b"X")
    code, report = run("verify")
    assert code == 1
    assert "is not the one published" in json.dumps(report)
    code, listed = run("cache", "list")
    assert code == 1
    assert "damaged" in json.dumps(listed)


def test_verify_finds_a_proof_that_is_not_what_the_binary_holds(catalog: Catalog, cache_dir: Path) -> None:
    from fp4dispatch.cli import verify
    from fp4dispatch.jit.compiler.toolchain import disassembler

    entry = kernels.build("tiny", "one", "120f", catalog=catalog).entry
    tools = disassembler(catalog.common.minimum["disassembler"])
    cache = Cache(cache_dir)
    assert verify.check(cache, entry, tools).pdl_allowed
    path = entry.folder / "proof.json"
    good = path.read_bytes()
    data = json.loads(good)
    data["kernels"][0]["wait"] = 7
    path.write_text(json.dumps(data))
    assert verify.check(cache, entry, tools).faults == ("the stored proof is not what the disassembler sees",)
    path.unlink()
    assert verify.check(cache, entry, tools).pdl_allowed, "a missing proof is made and stored"
    assert path.read_bytes() == good
    assert prove.read(entry) is not None


def test_the_environment_changes_no_build(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvcc takes options from these; a kernel built under them would be found by all who ask for the plain one."""
    source = DEVICE_ONLY + (
        "#include <tvm/ffi/tvm_ffi.h>\n#ifdef POISON\n#define ANSWER 13\n#else\n#define ANSWER 42\n#endif\n"
        "int run(int64_t x) { return ANSWER; }\nTVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);\n"
    )
    catalog = tiny_catalog(tmp_path / "csrc", source=source)
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("INCLUDES", "SYSTEM_INCLUDES", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "CUDAFE_FLAGS"):
        monkeypatch.setenv(name, "-DPOISON")
    monkeypatch.setenv("PTXAS_FLAGS", "-O0")
    monkeypatch.setenv("NVCC_CCBIN", "/nonexistent/g++")
    (tmp_path / "planted").mkdir()
    (tmp_path / "planted" / "dlpack.h").write_text("#define POISON\n")
    for name in ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH"):
        monkeypatch.setenv(name, str(tmp_path / "planted"))
    loaded = kernels.load("tiny", "one", SM120, catalog=catalog)
    assert loaded.module.run(0) == 42
    assert loaded.pdl_allowed


def test_the_same_key_is_the_same_bytes(tmp_path: Path) -> None:
    """Built twice, from sources in different folders, into different caches: neither folder is in the library."""
    built = []
    for place in ("one", "an other/below"):
        catalog = tiny_catalog(tmp_path / place / "csrc")
        built.append(kernels.build("tiny", "one", "90a", catalog=catalog, cache=Cache(tmp_path / place / "cache")))
    first, second = built
    assert not first.cached
    assert not second.cached
    assert first.entry.folder.name == second.entry.folder.name
    assert first.entry.library.read_bytes() == second.entry.library.read_bytes()
    assert b"tmpxft" not in first.entry.library.read_bytes()
