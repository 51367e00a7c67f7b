"""Nobody else's code: who could swap a kernel, what a build takes from its surroundings, what ``clear`` may remove."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fp4dispatch import cli
from fp4dispatch.errors import CacheError, CompileError
from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog.manifest import Catalog
from fp4dispatch.jit.store import cache as cache_module
from fp4dispatch.jit.store import digests, evict, loading, private
from fp4dispatch.jit.store.cache import MARKER, Cache
from fp4dispatch.jit.store.digests import digest
from fp4dispatch.jit.store.entries import LIBRARY, Entry
from tests.jit_cases import JIT_FLAGS, REPOSITORY, Fake, fake_toolchain, tiny_sources

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")

ANSWER = """
#include <tvm/ffi/tvm_ffi.h>
int answer(int64_t x) { return int(x) + ADD; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(answer, answer);
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = fake_toolchain(tmp_path / "toolchain")
    monkeypatch.setenv("FP4DISPATCH_NVCC", str(made.nvcc))
    monkeypatch.setenv("PATH", f"{made.nvcc.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "own" / "cache"))
    return made


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog.load(tiny_sources(tmp_path / "csrc"), JIT_FLAGS)


def build(catalog: Catalog) -> kernels.Built:
    return kernels.build("tiny", "one", "120f", catalog=catalog)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Libraries that can be loaded: ``answer(x)`` is x + 1 in the first, x + 2 in the second."""
    import tvm_ffi

    folder = tmp_path_factory.mktemp("libraries")
    (folder / "answer.cc").write_text(ANSWER)
    include = Path(tvm_ffi.__file__).parent / "include"
    made = [folder / f"{add}.so" for add in (1, 2)]
    for add, path in enumerate(made, 1):
        flags = ["-std=c++17", "-O0", "-shared", "-fPIC", f"-DADD={add}", f"-I{include}"]
        subprocess.run(["g++", *flags, str(folder / "answer.cc"), "-o", str(path)], check=True)
    return made


def entry_of(library: Path, folder: Path) -> Entry:
    folder.mkdir(parents=True, mode=0o700)
    shutil.copy(library, folder / LIBRARY)
    (folder / LIBRARY).chmod(0o600)
    return Entry(folder, {}, {}, {}, digest(library), pinned=False)


# ---- who may replace a kernel ----


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o722])
@pytest.mark.parametrize("above", [1, 2, 3])
def test_every_folder_above_counts(above: int, mode: int, tmp_path: Path) -> None:
    cache = tmp_path / "a" / "b" / "c" / "cache"
    cache.mkdir(parents=True, mode=0o700)
    open_one = cache.parents[above - 1]
    private.check_place(cache)
    open_one.chmod(mode)
    with pytest.raises(CacheError, match=rf"{open_one} can be written by other users.*\n  fix: chmod go-w {open_one}"):
        private.check_place(cache)
    open_one.chmod(mode | 0o1000)
    private.check_place(cache)


@root_only
def test_a_folder_above_of_another_user_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "theirs" / "mine" / "cache"
    cache.mkdir(parents=True, mode=0o700)
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(CacheError, match="theirs belongs to user 12345, not to you"):
        private.check_place(cache)


def test_links_above_are_followed_and_judged(tmp_path: Path) -> None:
    real, link = tmp_path / "real" / "place", tmp_path / "link"
    (real / "cache").mkdir(parents=True, mode=0o700)
    link.symlink_to("real/../real/place")
    private.check_place(link / "cache")
    (tmp_path / "real").chmod(0o777)
    with pytest.raises(CacheError, match=f"{tmp_path}/real can be written"):
        private.check_place(link / "cache")
    (tmp_path / "real").chmod(0o755)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        private.check_above(tmp_path / "loop" / "cache")


@root_only
def test_a_link_above_that_another_user_could_turn_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real" / "cache").mkdir(parents=True, mode=0o700)
    tmp_path.chmod(0o1777)
    (tmp_path / "link").symlink_to("real")
    os.lchown(tmp_path / "link", 12345, -1)
    with pytest.raises(CacheError, match="link belongs to user 12345, not to you"):
        private.check_place(tmp_path / "link" / "cache")


@pytest.mark.parametrize("mode", [0o770, 0o777])
@pytest.mark.parametrize("above", [1, 2])
def test_no_kernel_verdict_or_time_is_read_below_an_open_folder(
    above: int, mode: int, fake: Fake, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    from fp4dispatch.jit.store import records

    built = build(catalog)
    root = cache_module.default_folder()
    for store in ("selfcheck", "tuning"):
        records.write(root / store / "0.json", {"kept": True})
        assert records.read(root / store / "0.json") == {"kept": True}
    root.parents[above - 1].chmod(mode)
    try:
        assert kernels.find("tiny", "one", "120f", catalog=catalog) is None
        assert [records.read(root / store / "0.json") for store in ("selfcheck", "tuning")] == [None, None]
        with pytest.raises(CacheError, match="who could replace"):
            loading.module(built.entry)
    finally:
        root.parents[above - 1].chmod(0o755)
    assert caplog.text.count("who could replace") == 1, "one warning for all stores"


# ---- from the hash to the loader ----


def test_what_was_hashed_is_what_is_loaded(libraries: list[Path], tmp_path: Path) -> None:
    """A thread swaps the library as fast as it can: either the published one is loaded, or none."""
    good, foreign = libraries
    stop = threading.Event()
    outcomes = {"published": 0, "refused": 0}
    for i in range(12):
        entry = entry_of(good, tmp_path / str(i))
        for name, library in (("good", good), ("foreign", foreign)):
            shutil.copy(library, entry.folder / name)
            (entry.folder / name).chmod(0o600)
        stop.clear()

        def swap(folder: Path = entry.folder) -> None:
            while not stop.is_set():
                for name in ("foreign", "good"):
                    (folder / "next").unlink(missing_ok=True)
                    os.link(folder / name, folder / "next")
                    (folder / "next").replace(folder / LIBRARY)

        thread = threading.Thread(target=swap)
        thread.start()
        try:
            assert loading.module(entry).answer(40) == 41
            outcomes["published"] += 1
        except CacheError:
            outcomes["refused"] += 1
        finally:
            stop.set()
            thread.join()
    assert sum(outcomes.values()) == 12


def test_a_swap_between_the_hash_and_the_loader_changes_nothing(
    libraries: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = entry_of(libraries[0], tmp_path / "entry")
    real = loading.open_library

    def then_swap(entry: Entry) -> int:
        descriptor = real(entry)
        shutil.copy(libraries[1], tmp_path / "foreign")
        (tmp_path / "foreign").replace(entry.library)
        return descriptor

    monkeypatch.setattr(loading, "open_library", then_swap)
    assert loading.module(entry).answer(40) == 41


def test_two_libraries_are_two_however_descriptors_are_numbered(libraries: list[Path], tmp_path: Path) -> None:
    entries = [entry_of(library, tmp_path / library.stem) for library in libraries]
    assert [loading.module(entry).answer(40) for entry in entries] == [41, 42]
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    assert [loading.module(entry).answer(40) for entry in entries] == [41, 42]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "open to others"])
def test_what_is_no_private_file_is_not_loaded(kind: str, libraries: list[Path], tmp_path: Path) -> None:
    entry = entry_of(libraries[0], tmp_path / "entry")
    if kind == "open to others":
        entry.library.chmod(0o620)
    else:
        entry.library.rename(tmp_path / "moved")
    if kind == "fifo":
        os.mkfifo(entry.library, 0o600)
    elif kind == "folder":
        entry.library.mkdir()
    elif kind == "link":
        entry.library.symlink_to(tmp_path / "moved")
    with pytest.raises(CacheError):
        loading.module(entry)


# ---- what a build takes from its surroundings ----

OPTIONS = (
    *("INCLUDES", "SYSTEM_INCLUDES", "LIBRARIES", "CUDAFE_FLAGS", "PTXAS_FLAGS", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS"),
    *("NVCC_APPEND_FLAGS", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "GCC_EXEC_PREFIX"),
    *("COMPILER_PATH", "DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "LD_RUN_PATH", "SOURCE_DATE_EPOCH", "LD_PRELOAD"),
    *("NINJA_STATUS", "MAKEFLAGS", "NOBODY_KNOWS_THIS_ONE"),
)


def test_a_compiler_sees_the_environment_that_is_listed(
    fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fake.folder / "environment"
    fake.nvcc.write_text(
        fake.nvcc.read_text().replace(
            "source = Path", f"Path({str(seen)!r}).write_text(json.dumps(dict(os.environ)))\nsource = Path"
        )
    )
    for name in OPTIONS:
        if name != "LD_PRELOAD":  # the dynamic loader would say so, in every process here
            monkeypatch.setenv(name, "-DPOISON")
    build(catalog)
    assert set(json.loads(seen.read_text())) <= {"PATH", "LD_LIBRARY_PATH", "TMPDIR", "LC_ALL", "LC_CTYPE", "PWD"}


def test_a_toolchain_may_be_named_by_a_relative_path(
    fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fake.folder.parent)
    monkeypatch.setenv("FP4DISPATCH_NVCC", "toolchain/bin/nvcc")
    assert build(catalog).proven
    assert fake.calls() == 1


def test_every_folder_above_a_relative_cache_counts(
    fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp4dispatch.jit.store import records

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", "open/cache")
    path = cache_module.default_folder() / "tuning" / "0.json"
    records.write(path, {"kept": True})
    assert records.read(path) == {"kept": True}
    (tmp_path / "open").chmod(0o777)
    assert records.read(path) is None


def test_the_host_compiler_is_the_one_that_was_asked_for_its_version(fake: Fake, catalog: Catalog) -> None:
    build(catalog)
    (arguments,) = [json.loads(line) for line in (fake.folder / "calls").read_text().splitlines()]
    assert f"-ccbin={fake.folder}/bin/g++" in arguments


# ---- headers ----


def test_a_header_that_is_replaced_with_its_old_date_and_size_is_seen(fake: Fake, catalog: Catalog) -> None:
    """Once in this process, which has hashed it before, and with the inode and the date that it had."""
    header = catalog.csrc / "tiny.h"
    os.utime(header, (1e9, 1e9))
    status = header.stat()
    build(catalog)
    assert build(catalog).cached
    with header.open("r+") as file:
        file.write("#define TINY 4\n")
    os.utime(header, ns=(status.st_atime_ns, status.st_mtime_ns))
    now = header.stat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (status.st_ino, status.st_size, status.st_mtime_ns)
    assert not build(catalog).cached


@pytest.mark.parametrize("how", ["new file, old date", "in place, old date", "folder swapped"])
def test_a_header_that_changes_during_a_build_is_noticed(
    how: str, fake: Fake, catalog: Catalog, tmp_path: Path
) -> None:
    """The compiler has read the old text; an entry with the hash of the new one would keep the old code."""
    header = catalog.csrc / "tiny.h"
    os.utime(header, (1e9, 1e9))
    other = tmp_path / "other"
    shutil.copytree(catalog.csrc, other)  # with the dates
    (other / "tiny.h").write_text("#define TINY 4\n")
    os.utime(other / "tiny.h", (1e9, 1e9))
    change = {
        "new file, old date": f"os.replace({str(other / 'tiny.h')!r}, {str(header)!r})",
        "in place, old date": f"Path({str(header)!r}).write_text('// new'); os.utime({str(header)!r}, (1e9, 1e9))",
        "folder swapped": f"os.rename({str(catalog.csrc)!r}, {str(tmp_path / 'old')!r}); "
        f"os.rename({str(other)!r}, {str(catalog.csrc)!r})",
    }[how]
    fake.nvcc.write_text(fake.nvcc.read_text() + f"\n{change}\n")
    with pytest.raises(CompileError, match="changed while tiny/one-120f was being compiled"):
        build(catalog)
    assert kernels.find("tiny", "one", "120f", catalog=catalog) is None


def test_an_old_header_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "header.h"
    path.write_text("x")
    monkeypatch.setattr(digests, "_SETTLED", -1.0)
    first = digests.digest_once(path)
    with monkeypatch.context() as patch:
        patch.setattr(digests, "digest", lambda _: pytest.fail("hashed again"))
        assert digests.digest_once(path) == first
    path.write_text("y")
    assert digests.digest_once(path) != first


# ---- removing ----


def test_clear_leaves_what_is_not_ours(fake: Fake, catalog: Catalog) -> None:
    root = cache_module.default_folder()
    mine = [
        *(
            "logs/server.log",
            "logs/tiny-one-120f-run.log",
            "logs/a/b.log",
            "kernels/mine.py",
            "kernels/rbf/k-90a/x.txt",
        ),
        *("kernels/tiny/one-120f/notes.txt", "building/house.dwg", "building/build-plan/x", "locks/door.lock", "x.txt"),
    ]
    for name in mine:
        (root / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        (root / name).write_text("the user's")
    built = build(catalog)
    (built.entry.folder / "README").write_text("the user's")
    (catalog.csrc / "tiny.cu").write_text("BROKEN")
    with pytest.raises(CompileError):
        build(catalog)
    assert (root / "logs" / "tiny-one-120f.log").exists()
    assert evict.clear(Cache(root)) > 0
    left = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    assert left == sorted([*mine, str((built.entry.folder / "README").relative_to(root)), MARKER])


def test_without_the_marker_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    for name in ("logs", "kernels", "building", "locks"):
        (project / name).mkdir(parents=True, mode=0o700)
        (project / name / "precious").write_text("the user's")
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(project))
    for words in (("clear",), ("prune", "--max-size", "1KB")):
        assert cli.main(("cache", *words)) == 1
        assert "holds no CACHEDIR.TAG of fp4dispatch, so nothing in it is removed" in capsys.readouterr().err
    assert len(list(project.glob("*/precious"))) == 4


def entries(catalog: Catalog, count: int) -> list[Entry]:
    """Make entries, the first the longest unused."""
    made = []
    for i in range(count):
        (catalog.csrc / "tiny.h").write_text(f"#define TINY {i}\n")
        made.append(build(catalog).entry)
        used = 1.6e9 + i * 86400
        for path in made[-1].folder.iterdir():
            os.utime(path, (used, used))
    return made


def test_prune_by_age(fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    made = entries(catalog, 3)
    monkeypatch.setattr(evict.time, "time", lambda: 1.6e9 + 3 * 86400)
    removed, freed = evict.prune(Cache(cache_module.default_folder()), max_age=2.5 * 86400)
    assert removed == 1
    assert freed > 0
    assert [entry.folder.exists() for entry in made] == [False, True, True]
    assert build(catalog).cached


def test_prune_by_size_takes_the_longest_unused(fake: Fake, catalog: Catalog) -> None:
    made = entries(catalog, 3)
    size = sum(path.stat().st_size for path in made[0].folder.iterdir())
    removed, _ = evict.prune(Cache(cache_module.default_folder()), max_size=2 * size + size // 2)
    assert removed == 1
    assert [entry.folder.exists() for entry in made] == [False, True, True]
    assert evict.prune(Cache(cache_module.default_folder()), max_size=0)[0] == 2
    assert list(Cache(cache_module.default_folder()).entries()) == []
    assert not list((cache_module.default_folder() / "building").iterdir())


LOAD = """
import sys
from pathlib import Path
from fp4dispatch.jit.store import loading
from fp4dispatch.jit.store.digests import digest
from fp4dispatch.jit.store.entries import Entry
folder = Path(sys.argv[1])
module = loading.module(Entry(folder, {}, {}, {}, digest(folder / "kernel.so"), pinned=False))
print("loaded", flush=True)
sys.stdin.readline()
print(module.answer(40), flush=True)
"""


def test_prune_leaves_what_a_process_has_loaded(fake: Fake, catalog: Catalog, libraries: list[Path]) -> None:
    used, unused = entries(catalog, 2)
    shutil.copyfile(libraries[0], used.library)
    process = subprocess.Popen(
        [sys.executable, "-c", LOAD, str(used.folder)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "loaded\n"
    cache = Cache(cache_module.default_folder())
    assert evict.prune(cache, max_size=0)[0] == 1
    assert (used.folder.exists(), unused.folder.exists()) == (True, False)
    shutil.rmtree(used.folder)  # even so, what is loaded runs on
    assert process.communicate("go\n", timeout=60)[0] == "41\n"


def test_prune_leaves_what_was_made_ahead_of_time(fake: Fake, catalog: Catalog) -> None:
    cache = Cache(cache_module.default_folder())
    kernels.build_all([kernels.job(catalog, "tiny", "one", "120f")], catalog, cache=cache, pinned=True)
    assert evict.prune(cache, max_age=0, max_size=0) == (0, 0)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("prune",), 2),
        (("list", "--max-age", "1d"), 2),
        (("prune", "--max-age", "1y"), 2),
        (("prune", "--max-size", "lots"), 2),
        (("prune", "--max-size", "-1GB"), 2),
        (("prune", "--max-age", "30d", "--max-size", "1.5GB"), 0),
    ],
)
def test_limits_on_the_command_line(words: tuple[str, ...], code: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    if code == 2:
        with pytest.raises(SystemExit) as caught:
            cli.main(("cache", *words))
        assert caught.value.code == 2
    else:
        assert cli.main(("cache", *words)) == 0


# ---- entries of a container's image ----


@pytest.fixture
def image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse to rename entries, as overlayfs does for folders of the image."""
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.parents[2].name == "kernels":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)


def test_an_entry_of_an_image_is_pruned(fake: Fake, catalog: Catalog, image: None) -> None:
    built = build(catalog)
    cache = Cache(cache_module.default_folder())
    removed, freed = evict.prune(cache, max_size=0)
    assert removed == 1
    assert freed > 0
    assert not built.entry.folder.exists()
    assert evict.prune(cache, max_size=0) == (0, 0)


def test_a_damaged_entry_of_an_image_is_replaced(fake: Fake, catalog: Catalog, image: None) -> None:
    first = build(catalog)
    first.entry.library.write_bytes(b"damaged")
    second = build(catalog)
    assert second.entry.folder == first.entry.folder
    assert not second.cached
    assert build(catalog).cached
    assert fake.calls() == 2


# ---- fp4dispatch cache list ----


def listed(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Return the exit code, and the state of each entry."""
    code = cli.main(["cache", "list", "--json"])
    return code, [row["state"] for row in json.loads(capsys.readouterr().out)["entries"]]


def test_an_odd_entry_is_listed_and_hides_no_other(
    fake: Fake, catalog: Catalog, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = build(catalog), kernels.build("tiny", "two", "120f", catalog=catalog)
    (first.entry.folder / ".nfs0001").symlink_to("nowhere")  # as a file that another process has just removed
    assert listed(capsys) == (0, ["proven", "proven"])
    (first.entry.folder / "proof.json").chmod(0o660)
    code, states = listed(capsys)
    assert (code, sorted(states)) == (1, ["damaged", "proven"])

    def pruned(entry: Entry) -> str:
        shutil.rmtree(entry.folder)
        return ""

    (first.entry.folder / "proof.json").chmod(0o600)
    monkeypatch.setattr("fp4dispatch.cli.cache.damage", pruned)  # by another process, while it is being listed
    assert listed(capsys) == (0, [])
    assert not second.entry.folder.exists()
