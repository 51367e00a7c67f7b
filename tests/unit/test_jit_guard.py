"""Never worse than without a cache: whatever is wrong with its folder, layers run; one warning, one line of doctor.

Each fault is planted in a real folder and met by a real forward pass, kernel build, verdict and tuned time.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fp4dispatch
from fp4dispatch.cli import checks
from fp4dispatch.dispatch import choose, tuned
from fp4dispatch.errors import CacheError, CompileError, SettingsError
from fp4dispatch.jit import kernels, proven
from fp4dispatch.jit.catalog.manifest import Catalog
from fp4dispatch.jit.store import cache as cache_module
from fp4dispatch.jit.store import guard, loading, private, records, temporary
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.machine import log
from fp4dispatch.machine.system import System
from fp4dispatch.trust import quarantine
from tests.jit_cases import JIT_FLAGS, REPOSITORY, Fake, fake_toolchain, tiny_sources

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run as another user or mount a tmpfs")


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


class Heard(logging.Handler):
    """The warnings of this package that are about the cache."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "reference backend" not in record.getMessage() and "not proven" not in record.getMessage():
            self.texts.append(record.getMessage())


def work(catalog: Catalog) -> tuple[list[str], Path]:
    """Do all that a cache is for: a layer on the CPU, a verdict, a tuned time and two builds of a kernel.

    Return the warnings, and the folder of the kernel.
    """
    heard = Heard()
    choose.reset()
    proven.forget()
    logging.getLogger("fp4dispatch").addHandler(heard)
    try:
        with torch.inference_mode():
            layer = fp4dispatch.FP8Linear.from_linear(torch.nn.Linear(64, 64, bias=False))
            assert layer(torch.ones(1, 64)).shape == (1, 64)
        assert list(quarantine.store.all()) == []
        for store in (quarantine.store, tuned.store):
            assert store.load(store.folder() / f"{'0' * 40}.json") is None
            with guard.optional("keeping a record"):
                records.write(store.folder() / "1.json", {})
        folder = build(catalog).entry.folder
        assert build(catalog).cached
    finally:
        logging.getLogger("fp4dispatch").removeHandler(heard)
        choose.reset()
        proven.forget()
    return heard.texts, folder


def elsewhere(catalog: Catalog, text: str) -> None:
    """The work is done, in a folder of this process, with one warning that says ``text`` and what to do."""
    warnings, folder = work(catalog)
    assert len(warnings) == 1, warnings
    assert text in warnings[0]
    assert "fix:" in warnings[0]
    assert folder.is_relative_to(str(guard.made()))


# ---- the folder ----


def test_a_cache_that_works_is_used(fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    warnings, folder = work(catalog)
    assert warnings == []
    assert folder.is_relative_to(tmp_path / "cache")


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
def test_a_folder_that_cannot_be_a_cache(
    fault: str, fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, text = PLANTED[fault]
    place = tmp_path / "place"
    place.mkdir(mode=0o755)
    plant(place / "cache")
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(place / "cache"))
    elsewhere(catalog, text)
    line = cache_line(place / "cache")
    assert (line.status, text in line.text, bool(line.fix)) == ("fail", True, True)
    with pytest.raises(CacheError, match=text):  # who asks for this very folder is told
        kernels.build("tiny", "one", "120f", catalog=catalog, cache=Cache(place / "cache"))


@pytest.mark.parametrize("below", ["file/cache", "x" * 300, "loop/cache"])
def test_a_path_that_cannot_be(
    below: str, fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / below))
    elsewhere(catalog, "the kernel cache cannot be at")
    assert cache_line(tmp_path / below).status == "fail"


def without_rights() -> None:
    """Take the rights of root from this process at its next exec: then it is a user like any other."""
    for capability in range(64):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


ALONE = """
import pwd, sys
from pathlib import Path
from fp4dispatch.cli import checks
from fp4dispatch.jit.catalog.manifest import Catalog
from fp4dispatch.jit.store import cache, guard
from tests.unit import test_jit_guard as cases
def nobody(_):
    raise KeyError("no such user")
if sys.argv[1] == "no home":
    pwd.getpwuid = nobody
catalog = Catalog.load(Path(sys.argv[2]), cases.JIT_FLAGS)
cases.elsewhere(catalog, sys.argv[3])
line = cases.cache_line(cache.default_folder())
assert line.status in ("warn", "fail") and line.fix, line
print(guard.made())
"""


@root_only
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("private", "belongs to user 4321, not to you"),
        ("readable", "belongs to user 4321, not to you"),
        ("home", "belongs to user 4321, not to you"),
        ("no home", "the user has no home folder"),
    ],
)
def test_a_user_whose_cache_it_is_not(case: str, text: str, fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    """In processes without root's rights: a cache or a home of another user, and no home at all."""
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    theirs.chmod(0o755 if case == "readable" else 0o700)
    os.chown(theirs, 4321, 4321)
    names = ("FP4DISPATCH_CACHE_DIR", "XDG_CACHE_HOME", "HOME")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"home": {"HOME": str(theirs)}, "no home": {}}.get(case, {"FP4DISPATCH_CACHE_DIR": str(theirs)})
    answer = subprocess.run(
        [sys.executable, "-c", ALONE, case, str(catalog.csrc), text],
        cwd=REPOSITORY,
        env=environment,
        preexec_fn=without_rights,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    assert not Path(answer.stdout.strip()).exists(), "the folder of a process ends with it"
    assert not (REPOSITORY / "~").exists()


@root_only
@pytest.mark.parametrize("room_kib", [None, 0, 8, 24])
def test_a_file_system_that_is_read_only_or_full(
    room_kib: int | None, fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "mounted"
    place.mkdir(mode=0o700)
    options = "ro,mode=700" if room_kib is None else "size=64k,mode=700"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=False).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(place / "cache"))
    try:
        if room_kib is not None:
            (place / "ballast").write_bytes(b"x" * (shutil.disk_usage(place).free - room_kib * 1024))
        elsewhere(catalog, "Read-only file system" if room_kib is None else "no space is left")
        assert cache_line(place / "cache").status == "warn"
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_place_that_runs_no_code(
    fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a noexec mount nothing can be loaded: the kernel is built where it can."""
    loaded: list[Path] = []

    def flags(descriptor: int) -> os.statvfs_result:
        loaded.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        real = list(os.statvfs("/proc"))
        real[8] = os.ST_NOEXEC if loaded[-1].is_relative_to(tmp_path) else 0
        return os.statvfs_result(real)

    monkeypatch.setattr(loading.os, "fstatvfs", flags)
    with pytest.raises(CompileError, match="cannot be loaded"):  # the second is loaded, but is only pretended
        kernels.load("tiny", "one", catalog.record("120f").archs[0], catalog=catalog)
    assert [path.is_relative_to(tmp_path) for path in loaded] == [True, False]
    assert "runs no code (noexec)" in caplog.text


def test_a_stale_handle_of_a_network_file_system(fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    build(catalog)
    root, real = str(cache_module.default_folder()), Path.lstat

    def stale(path: Path) -> os.stat_result:
        if str(path).startswith(root):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path)

    monkeypatch.setattr(private.Path, "lstat", stale)
    elsewhere(catalog, os.strerror(errno.ESTALE))


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


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "deep", "null"])
@pytest.mark.parametrize("name", ["kernel.so", "entry.json", "proof.json"])
def test_a_file_of_an_entry_that_is_something_else(name: str, kind: str, fake: Fake, catalog: Catalog) -> None:
    """Met by finding, proving, listing and building; a FIFO would hang, deep JSON overflow the stack."""
    entry = build(catalog).entry
    replaced(entry.folder / name, kind)
    found = kernels.find("tiny", "one", "120f", catalog=catalog)
    assert (found is None) == (name != "proof.json")  # a proof that is no proof is made anew
    proven.forget()
    proven.proven()
    built = build(catalog)
    assert built.entry.library.read_bytes().startswith(b"library")
    assert built.entry.folder == entry.folder, "the sound one takes the place of the other"
    assert build(catalog).cached


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "huge", "deep", "words", "null", "list", "bytes"])
def test_a_record_that_is_something_else(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    for store in (quarantine.store, tuned.store):
        path = store.folder() / f"{'0' * 40}.json"
        records.write(path, {})
        replaced(path, kind)
        assert store.load(path) is None
    assert list(quarantine.store.all()) == []


@pytest.mark.parametrize("kind", ["fifo", "loop", "words"])
@pytest.mark.parametrize("store", ["kernels", "building", "locks", "logs", "selfcheck", "tuning"])
def test_a_store_that_is_something_else(
    store: str, kind: str, fake: Fake, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    root = cache_module.default_folder()
    private.make_folder(root, 0o700)
    replaced(root / store, kind)
    warnings, _ = work(catalog)
    assert len(warnings) <= 2, warnings
    line = cache_line(root)
    assert (line.status, str(root / store) in line.text) == ("fail", True)


@pytest.mark.parametrize("kind", ["fifo", "folder", "loop", "words"])
@pytest.mark.parametrize("suffix", ["lock", "pid"])
def test_a_lock_that_is_something_else(suffix: str, kind: str, fake: Fake, catalog: Catalog) -> None:
    locks = cache_module.default_folder() / "locks"
    private.make_folder(locks, 0o700)
    replaced(locks / f"tiny-one-120f.{suffix}", kind)
    assert build(catalog).entry.library.exists()


def test_a_log_that_cannot_be_kept_hides_no_error(fake: Fake, catalog: Catalog) -> None:
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

    monkeypatch.setattr(temporary.tempfile, "mkdtemp", nowhere)
    with pytest.raises(CacheError, match=r"no folder for temporary files can be made .*\n  fix: set TMPDIR"):
        build(catalog)


_FOLDER = (
    "import os, sys, time; from fp4dispatch.jit.store import guard; print(guard.temporary(), flush=True); "
    "(guard.temporary() / 'kernel').mkdir(); {then}"
)


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    other = tmp_path / f"{temporary._prefix()}link"
    other.symlink_to(tmp_path)

    def start(then: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", _FOLDER.format(then=then)]
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)

    with start("sys.stdin.read()") as killed, start("sys.stdin.read()") as alive:
        folders = [Path(str(each.stdout and each.stdout.readline()).strip()) for each in (killed, alive)]
        killed.kill()
        killed.wait()
        assert all(folder.is_dir() for folder in folders)
        with start("") as third:
            third.communicate()
        assert [folder.is_dir() for folder in folders] == [False, True]
        alive.communicate("")
    assert list(tmp_path.iterdir()) == [other]


def test_nothing_is_said_twice_or_during_a_capture(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        with monkeypatch.context() as patch:
            patch.setattr(guard.log.capture, "is_capturing", lambda: True)
            guard.warn("a fault")
        assert caplog.records == []
        guard.warn("a fault")
        guard.warn("a fault")
    assert [record.message for record in caplog.records] == ["a fault"]


def test_what_a_wrong_log_level_kept_back_is_logged_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log.reset()
    monkeypatch.setenv("FP4DISPATCH_LOG", "loud")
    with pytest.raises(SettingsError, match="FP4DISPATCH_LOG"):
        guard.warn("a fault")
    monkeypatch.delenv("FP4DISPATCH_LOG")
    guard.warn("a fault")
    assert caplog.messages == ["a fault"]


def test_commands_show_warnings_and_leave_no_handler_behind(capsys: pytest.CaptureFixture[str]) -> None:
    log.warning("before")
    for round_ in ("first", "second"):
        with log.shown():
            log.warning("in the %s", round_)
        assert capsys.readouterr().err == f"fp4dispatch WARNING: in the {round_}\n"
    assert [type(handler) for handler in log.logger.handlers] == [logging.NullHandler]


@pytest.mark.parametrize(
    ("level", "shown"), [("off", ""), ("error", ""), ("warning", "fp4dispatch WARNING: a fault\n")]
)
def test_the_log_level_holds_for_the_first_warning_too(level: str, shown: str) -> None:
    code = "from fp4dispatch.jit.store import guard; guard.warn('a fault')"
    environment = os.environ | {"FP4DISPATCH_LOG": level}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stderr == shown


# ---- doctor ----


def cache_line(folder: Path) -> checks.Check:
    """Return what ``doctor`` says about a cache folder."""
    facts = checks.Facts(System.fake(None), checks.Child(), (3, 11, 7), (), folder, frozenset())
    (check,) = checks.state.check_cache(facts)
    return check


def test_doctor_says_that_a_cache_is_fine(fake: Fake, catalog: Catalog) -> None:
    work(catalog)
    assert cache_line(cache_module.default_folder()).status == "ok"
