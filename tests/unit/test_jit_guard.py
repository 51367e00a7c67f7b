"""Never worse than without a cache: whatever is wrong with its folder, layers run, with one warning and a line of doctor.

Each fault is planted in a real folder and met by a real forward pass, kernel build, verdict and tuned time. Processes
run as a user without rights where root would not meet the fault.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fp4dispatch import records
from fp4dispatch.cli import doctor_checks
from fp4dispatch.errors import CacheError
from fp4dispatch.jit import cache as cache_module
from fp4dispatch.jit import guard, kernels, private
from fp4dispatch.jit.cache import Cache
from fp4dispatch.jit.manifest import Catalog
from tests.jit_cases import JIT_FLAGS, REPOSITORY, Fake, fake_toolchain, tiny_sources

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run as another user or mount a tmpfs")

# A layer on a CPU, a verdict, a tuned time and a kernel, in this order; prints what it did and each warning.
WORK = """
import json, logging, sys
from pathlib import Path
warnings = []
class Heard(logging.Handler):
    def emit(self, record):
        warnings.append(record.getMessage())
logging.getLogger("fp4dispatch").addHandler(Heard(logging.WARNING))
import torch
import fp4dispatch
from fp4dispatch import dispatch, quarantine, records, system, tuned
from fp4dispatch.jit import guard, kernels
from fp4dispatch.jit.manifest import Catalog
torch.set_num_threads(1)
with torch.inference_mode():
    layer = fp4dispatch.FP8Linear.from_linear(torch.nn.Linear(64, 64, bias=False))
    done = {"layer": list(layer(torch.ones(1, 64)).shape)}
list(quarantine.all_stored())
done["record"] = records.read(quarantine.folder() / "0.json")
with guard.optional("a record"):
    records.write(quarantine.folder() / "1.json", {})
csrc, flags = map(Path, sys.argv[1:3])
built = kernels.build("tiny", "one", "120f", catalog=Catalog.load(csrc, flags))
done["kernel"] = str(built.entry.folder)
again = kernels.build("tiny", "one", "120f", catalog=Catalog.load(csrc, flags))
done["again"] = again.cached
done["warnings"] = [text for text in warnings if "not proven" not in text and "no GPU" not in text]
print(json.dumps(done))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = fake_toolchain(tmp_path / "toolchain")
    monkeypatch.setenv("FP4DISPATCH_NVCC", str(made.nvcc))
    monkeypatch.setenv("PATH", f"{made.nvcc.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    return made


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog.load(tiny_sources(tmp_path / "csrc"), JIT_FLAGS)


def build(catalog: Catalog) -> kernels.Built:
    return kernels.build("tiny", "one", "120f", catalog=catalog)


def work(catalog: Catalog, environment: dict[str, str], user: int | None = None) -> dict[str, object]:
    answer = subprocess.run(
        [sys.executable, "-c", WORK, str(catalog.csrc), str(JIT_FLAGS)],
        cwd=REPOSITORY,
        env=environment,
        user=user,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    found: dict[str, object] = json.loads(answer.stdout.splitlines()[-1])
    return found


def faults_of(catalog: Catalog, text: str, *, user: int | None = None, **changed: str | None) -> dict[str, object]:
    """Run the work; it is done, elsewhere, with one warning that says ``text``, and leaves nothing behind."""
    environment = {name: value for name, value in {**os.environ, **changed}.items() if value is not None}
    done = work(catalog, environment, user)
    warnings = done["warnings"]
    assert isinstance(warnings, list)
    assert len(warnings) == 1, warnings
    assert text in warnings[0]
    assert "fix:" in warnings[0]
    assert (done["layer"], done["record"], done["again"]) == ([1, 64], None, True)
    folder = Path(str(done["kernel"]))
    assert folder.parents[3].name.startswith("fp4dispatch-")
    assert not folder.exists(), "the folder of a process ends with it"
    return done


# ---- the folder ----


def test_a_cache_that_works_is_used(fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    done = work(catalog, dict(os.environ))
    assert (done["warnings"], done["again"]) == ([], True)
    assert Path(str(done["kernel"])).is_relative_to(tmp_path / "cache")


def a_file(root: Path) -> None:
    root.write_text("")


def a_fifo(root: Path) -> None:
    os.mkfifo(root, 0o600)


def a_loop(root: Path) -> None:
    root.symlink_to(root.name)


def a_link(root: Path) -> None:
    (root.parent / "elsewhere").mkdir(mode=0o700)
    root.symlink_to("elsewhere")


def open_to_others(root: Path) -> None:
    root.mkdir()
    root.chmod(0o777)


def below_an_open_folder(root: Path) -> None:
    root.mkdir(mode=0o700)
    root.parent.chmod(0o775)


PLANTED: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file": (a_file, "is not a folder"),
    "a FIFO": (a_fifo, "is not a folder"),
    "a link to itself": (a_loop, "is a symbolic link"),
    "a link": (a_link, "is a symbolic link"),
    "open to others": (open_to_others, "can be written by other users"),
    "below an open folder": (below_an_open_folder, "who could replace what is below"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_folder_that_cannot_be_a_cache(fault: str, fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    plant, text = PLANTED[fault]
    place = tmp_path / "place"
    place.mkdir(mode=0o755)
    plant(place / "cache")
    faults_of(catalog, text, FP4DISPATCH_CACHE_DIR=str(place / "cache"))
    assert any(text in fault for fault in guard.faults(place / "cache", doctor_checks._STORES))
    with pytest.raises(CacheError, match=text):  # who asks for this very folder is told
        kernels.build("tiny", "one", "120f", catalog=catalog, cache=Cache(place / "cache"))


@pytest.mark.parametrize("below", ["file/cache", "x" * 300, "loop/cache"])
def test_a_path_that_cannot_be(below: str, fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    faults_of(catalog, "the kernel cache cannot be at", FP4DISPATCH_CACHE_DIR=str(tmp_path / below))


@pytest.fixture
def nobody(fake: Fake, catalog: Catalog, tmp_path: Path) -> Iterator[int]:
    """A user without rights who can run the tests' tools: what leads to them is opened, read-only."""
    if os.geteuid() != 0:
        pytest.skip("needs root to run as another user")
    tmp_path.parent.chmod(0o755)
    tmp_path.parent.parent.chmod(0o755)
    (fake.folder / "calls").touch()
    (fake.folder / "calls").chmod(0o666)
    reached = subprocess.run(
        [sys.executable, "-c", "import torch, fp4dispatch"], cwd=REPOSITORY, user=65534, check=False
    )
    if reached.returncode:
        pytest.skip("another user cannot start this Python")
    yield 65534
    tmp_path.parent.chmod(0o700)
    tmp_path.parent.parent.chmod(0o700)


@root_only
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_cache_of_another_user(mode: int, nobody: int, catalog: Catalog, tmp_path: Path) -> None:
    build(catalog)
    (tmp_path / "cache").chmod(mode)
    os.chown(tmp_path / "cache", 4321, -1)
    faults_of(catalog, "belongs to user 4321, not to you", user=nobody)


@root_only
def test_the_home_of_another_user(nobody: int, catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "root").mkdir(mode=0o700)
    done = {"FP4DISPATCH_CACHE_DIR": None, "XDG_CACHE_HOME": None, "HOME": str(tmp_path / "root")}
    faults_of(catalog, "Permission denied", user=nobody, **done)


@root_only
def test_a_user_without_a_home(nobody: int, catalog: Catalog, tmp_path: Path) -> None:
    """No HOME and no entry in passwd, as with ``docker run --user 4711``; the current folder stays as it is."""
    environment = {"FP4DISPATCH_CACHE_DIR": None, "XDG_CACHE_HOME": None, "HOME": None}
    faults_of(catalog, "the user has no home folder", user=47110815, **environment)
    assert not (REPOSITORY / "~").exists()


@root_only
def test_a_read_only_folder_without_kernels(fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    place = tmp_path / "mounted"
    place.mkdir(mode=0o700)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,mode=700", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        faults_of(catalog, "Read-only file system", FP4DISPATCH_CACHE_DIR=str(place))
    finally:
        subprocess.run(["umount", str(place)], check=True)


@root_only
@pytest.mark.parametrize("room_kib", [0, 8, 24])
def test_a_full_disk(room_kib: int, fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    place = tmp_path / "mounted"
    place.mkdir(mode=0o700)
    options = "size=64k,mode=700"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        (place / "ballast").write_bytes(b"x" * (shutil.disk_usage(place).free - room_kib * 1024))
        faults_of(catalog, "no space is left", FP4DISPATCH_CACHE_DIR=str(place / "cache"))
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_place_that_runs_no_code(
    fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a noexec mount nothing can be loaded: the kernel is built where it can."""
    from fp4dispatch.jit import loading

    loaded = []

    class Everywhere:
        f_flag = os.ST_NOEXEC

    def found(descriptor: int) -> object:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return Everywhere() if path.startswith(str(tmp_path)) else os.statvfs("/proc")

    monkeypatch.setattr(loading.os, "fstatvfs", found)
    real = loading._load
    monkeypatch.setattr(loading, "_load", lambda entry: loaded.append(entry) or real(entry))
    with pytest.raises(Exception, match="noexec|cannot be loaded"):  # the second is only pretended to be a library
        kernels.load("tiny", "one", catalog.record("120f").archs[0], catalog=catalog)
    assert [str(entry.folder).startswith(str(tmp_path)) for entry in loaded] == [True, False]
    assert "runs no code (noexec)" in caplog.text


def test_a_stale_handle_of_a_network_file_system(
    fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build(catalog)

    def stale(path: object) -> object:
        raise OSError(116, os.strerror(116), str(path))

    root = str(cache_module.default_folder())
    real = private.Path.lstat
    monkeypatch.setattr(private.Path, "lstat", lambda self: stale(self) if str(self).startswith(root) else real(self))
    built = build(catalog)
    assert str(built.entry.folder).startswith(str(guard.made()))
    assert records.read(Path(root) / "selfcheck" / "0.json") is None
    assert caplog.text.count(os.strerror(116)) == 1


# ---- what is in it ----

DEEP = "[" * 200_000


def replaced(path: Path, kind: str) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir(mode=0o700)
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 33)
        path.chmod(0o600)
    else:
        path.write_text({"deep": DEEP, "words": "no JSON", "null": "null", "list": "[1]", "bytes": "\xff"}[kind])
        path.chmod(0o600)


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "huge", "deep", "words", "null", "list", "bytes"])
@pytest.mark.parametrize("name", ["kernel.so", "entry.json", "proof.json"])
def test_a_file_of_an_entry_that_is_something_else(name: str, kind: str, fake: Fake, catalog: Catalog) -> None:
    """Met by finding, proving, listing and building; a FIFO would hang, deep JSON overflow the stack."""
    from fp4dispatch.jit import proven

    entry = build(catalog).entry
    if name == "proof.json" or (name, kind) != ("kernel.so", "huge"):  # hashing 8 GB of nothing takes long
        replaced(entry.folder / name, kind)
    found = kernels.find("tiny", "one", "120f", catalog=catalog)
    if name == "proof.json":
        assert found is not None
        assert not found.pdl_allowed
    elif (name, kind) != ("kernel.so", "huge"):
        assert found is None
    proven.forget()
    proven.proven()
    built = build(catalog)
    assert built.entry.library.read_bytes().startswith(b"library")
    assert build(catalog).cached


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "huge", "deep", "words", "null", "list", "bytes"])
def test_a_record_that_is_something_else(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4dispatch import quarantine, tuned

    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    for store, read in ((quarantine, quarantine.load), (tuned, tuned.load)):
        path = store.folder() / f"{'0' * 40}.json"
        records.write(path, {})
        replaced(path, kind)
        assert read(path) is None
    assert list(quarantine.all_stored()) == []


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "words"])
@pytest.mark.parametrize("store", ["kernels", "building", "locks", "logs", "selfcheck", "tuning"])
def test_a_store_that_is_something_else(
    store: str, kind: str, fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cache_module.default_folder()
    build(catalog)
    records.write(root / "selfcheck" / "0.json", {})
    if kind == "folder":
        (root / store).chmod(0o000 if os.geteuid() else 0o777)
    else:
        replaced(root / store, kind)
    assert build(catalog).entry.library.exists()
    (catalog.csrc / "tiny.h").write_text("#define TINY 4\n")
    assert build(catalog).entry.library.exists()
    records.read(root / store / "0.json")
    list(records.paths(root / store))
    with guard.optional("a record"):
        records.write(root / store / "0.json", {})
    if (root / store).exists() or (root / store).is_symlink():
        assert guard.faults(root, [store]) or kind == "folder"


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "words"])
@pytest.mark.parametrize("suffix", ["lock", "pid"])
def test_a_lock_that_is_something_else(suffix: str, kind: str, fake: Fake, catalog: Catalog) -> None:
    locks = cache_module.default_folder() / "locks"
    private.make_folder(locks, 0o700)
    replaced(locks / f"tiny-one-120f.{suffix}", kind)
    assert build(catalog).entry.library.exists()


def test_a_log_that_cannot_be_kept_hides_no_error(fake: Fake, catalog: Catalog) -> None:
    from fp4dispatch.errors import CompileError

    private.make_folder(cache_module.default_folder(), 0o700)
    os.mkfifo(cache_module.default_folder() / "logs")
    (catalog.csrc / "tiny.cu").write_text("BROKEN")
    with pytest.raises(CompileError, match="this does not compile") as caught:
        build(catalog)
    assert caught.value.log is None


# ---- the folder in its place ----


def test_no_place_at_all_is_an_error_that_says_so(
    fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "toolchain" / "version" / "cache"))

    def nowhere(**_: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(guard.tempfile, "mkdtemp", nowhere)
    with pytest.raises(CacheError, match=r"no folder for temporary files can be made .*\n  fix: set TMPDIR"):
        build(catalog)


def test_nothing_is_said_twice_or_during_a_capture(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        with monkeypatch.context() as patch:
            patch.setattr(guard.capture, "is_capturing", lambda: True)
            guard.warn("a fault")
        assert caplog.records == []
        guard.warn("a fault")
        guard.warn("a fault")
    assert [record.message for record in caplog.records] == ["a fault"]


# ---- doctor ----


def cache_line(folder: Path) -> doctor_checks.Check:
    from tests.unit.test_doctor import facts

    (check,) = doctor_checks._check_cache(facts(cache_dir=folder))
    return check
