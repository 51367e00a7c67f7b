"""Builds and the cache, done for real with processes, kills and file systems; only the compiler is pretended."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fp4dispatch.errors import CacheError, CompileError, ToolchainError
from fp4dispatch.jit import kernels, prove
from fp4dispatch.jit.catalog.manifest import Catalog
from fp4dispatch.jit.store import cache as cache_module
from fp4dispatch.jit.store import evict, guard, loading, private
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.jit.store.entries import damage
from tests.jit_cases import BUILD_ONE, JIT_FLAGS, REPOSITORY, Fake, fake_toolchain, start_build, tiny_sources

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user or mount a tmpfs")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A pretended toolchain with a blank in its headers' path, in this process's environment."""
    made = fake_toolchain(tmp_path / "toolchain")
    monkeypatch.setenv("FP4DISPATCH_NVCC", str(made.nvcc))
    monkeypatch.setenv("PATH", f"{made.nvcc.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    return made


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog.load(tiny_sources(tmp_path / "csrc"), JIT_FLAGS)


def build(catalog: Catalog, target: str = "120f", variant: str = "one") -> kernels.Built:
    return kernels.build("tiny", variant, target, catalog=catalog)


def build_in(catalog: Catalog, variant: str = "one") -> kernels.Built:
    """Build into the cache by name, as ``fp4dispatch build`` does: what is wrong with it is an error."""
    cache = Cache(cache_module.default_folder())
    return kernels.build("tiny", variant, "120f", catalog=catalog, cache=cache)


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "building").iterdir())


def test_a_build_is_published_once_and_private(fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    first, second = build(catalog), build(catalog)
    assert (first.cached, second.cached, fake.calls()) == (False, True, 1)
    assert first.entry == second.entry
    assert sorted(path.name for path in first.entry.folder.iterdir()) == [
        "build.log",
        "entry.json",
        "kernel.so",
        "proof.json",
    ]
    assert leftovers(tmp_path / "cache") == []
    for path in (tmp_path / "cache").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_the_files_that_were_read_are_remembered_by_root(fake: Fake, catalog: Catalog) -> None:
    read = {(root, Path(path).name) for root, path in build(catalog).entry.files}
    assert {("src", "tiny.cu"), ("src", "tiny.h"), ("tvm_ffi", "tvm_ffi.h")} < read
    assert [root for root, name in read if name == "system header.h"] in (["/"], ["cuda"])


def test_a_build_is_proven(fake: Fake, catalog: Catalog) -> None:
    built = build(catalog)
    assert built.proven
    assert built.pdl_allowed


NOT_PROVEN: dict[str, dict[str, object] | None] = {
    "by another prover": {"prover_sha256": "0" * 64},
    "of another schema": {"schema": 1},
    "of another library": {"library_sha256": "0" * 64},
    "absent": None,
}


@pytest.mark.parametrize("stored", NOT_PROVEN)
def test_a_proof_is_made_anew_on_the_next_hit(stored: str, fake: Fake, catalog: Catalog) -> None:
    path = build(catalog).entry.folder / "proof.json"
    good, change = path.read_text(), NOT_PROVEN[stored]
    path.unlink()
    if change:
        path.write_text(json.dumps({**json.loads(good), **change}))
        path.chmod(0o600)
    again = build(catalog)
    assert (again.cached, again.pdl_allowed, fake.calls()) == (True, True, 1)
    assert path.read_text() == good
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "name",
    ["jit/prove.py", "jit/catalog/early_loads.py", "jit/sass/judge.py", "jit/sass/opcodes.toml", "strict_toml.py"],
)
def test_a_prover_that_changed_proves_again(
    name: str, fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = build(catalog).entry
    assert prove.read(entry) is not None
    package = Path(prove.__file__).parents[1]
    shutil.copytree(package / "jit", tmp_path / "jit")
    shutil.copy(package / "strict_toml.py", tmp_path)
    assert (tmp_path / name).is_file()
    with (tmp_path / name).open("a") as file:
        file.write("# changed\n")
    monkeypatch.setattr(prove, "__file__", str(tmp_path / "jit" / "prove.py"))
    prove.prover_sha256.cache_clear()
    try:
        assert prove.read(entry) is None
    finally:
        prove.prover_sha256.cache_clear()


@pytest.mark.parametrize("who", ["others can write", pytest.param("another user", marks=root_only)])
def test_a_proof_that_others_could_have_written_is_refused(who: str, fake: Fake, catalog: Catalog) -> None:
    entry = build(catalog).entry
    path = entry.folder / "proof.json"
    if who == "another user":
        os.chown(path, 65534, 65534)
    else:
        path.chmod(0o622)
    with pytest.raises(CacheError, match="code from it is not run"):
        prove.read(entry)
    assert kernels.find("tiny", "one", "120f", catalog=catalog) is None
    assert not build(catalog).cached


@pytest.mark.parametrize("missing", ["disassembler", "room for it"])
def test_what_cannot_be_proven_now_is_not_published(
    missing: str, fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if missing == "disassembler":
        tool = fake.nvcc.with_name("nvdisasm")
        tool.write_text(tool.read_text().replace("13.0", "9.0"))
    else:
        full = tmp_path / "full"
        full.touch()  # no folder, so nothing can be written below it
        monkeypatch.setattr(tempfile, "tempdir", str(full))
    with pytest.raises(ToolchainError, match=r"the disassembler .* is 9\.0|cannot be disassembled"):
        build(catalog)
    assert list((tmp_path / "cache").glob("kernels/*/*/*")) == []
    assert fake.calls() == (0 if missing == "disassembler" else 1)


def test_an_entry_without_proof_runs_without_pdl_where_nothing_can_prove_it(fake: Fake, catalog: Catalog) -> None:
    (build(catalog).entry.folder / "proof.json").unlink()
    fake.nvcc.with_name("nvdisasm").write_text("#!/bin/sh\nexit 1\n")
    built = build(catalog)
    assert built.cached
    assert built.proof is None
    assert not built.pdl_allowed


@pytest.mark.parametrize("what", ["source", "own header", "system header", "compiler", "flags", "variant", "package"])
def test_every_input_is_part_of_the_key(
    what: str, fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = build(catalog)
    flags, variant = JIT_FLAGS, "one"
    if what == "source":
        (catalog.csrc / "tiny.cu").write_text((catalog.csrc / "tiny.cu").read_text() + "// new\n")
    elif what == "own header":
        (catalog.csrc / "tiny.h").write_text("#define TINY 4\n")
    elif what == "system header":
        (fake.folder / "system header.h").write_text("// upgraded\n")
    elif what == "compiler":
        fake.set_version("13.1.5")
    elif what == "variant":
        variant = "two"
    elif what == "package":
        monkeypatch.setattr("fp4dispatch.__version__", "9.9.9")
    else:
        flags = shutil.copytree(JIT_FLAGS, tmp_path / "flags")
        (flags / "common.toml").write_text((flags / "common.toml").read_text().replace("-O3", "-O2"))
    after = build(Catalog.load(catalog.csrc, flags), variant=variant)
    assert not after.cached
    assert after.entry.folder != before.entry.folder
    assert fake.calls() == 2


def test_changing_back_finds_the_old_entry(fake: Fake, catalog: Catalog) -> None:
    header = catalog.csrc / "tiny.h"
    text, first = header.read_text(), build(catalog)
    header.write_text("#define TINY 4\n")
    build(catalog)
    header.write_text(text)
    assert build(catalog).entry.folder == first.entry.folder
    assert fake.calls() == 2


def test_a_note_in_a_flag_file_does_not_rebuild(fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    build(catalog)
    flags = Path(shutil.copytree(JIT_FLAGS, tmp_path / "flags"))
    record = flags / "sm120f.toml"
    record.write_text(re.sub(r'note = ".*"', 'note = "other words"', record.read_text()))
    assert build(Catalog.load(catalog.csrc, flags)).cached


def test_a_finished_entry_needs_no_toolchain(
    fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = build(catalog)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("FP4DISPATCH_NVCC", str(tmp_path / "nothing" / "nvcc"))
    shutil.rmtree(fake.folder)
    found = kernels.find("tiny", "one", "120f", catalog=catalog)
    assert found is not None
    assert found.entry == built.entry
    with pytest.raises(ToolchainError, match="cannot compile for target 90a"):
        build(catalog, "90a")
    (catalog.csrc / "tiny.h").write_text("#define TINY 4\n")
    assert kernels.find("tiny", "one", "120f", catalog=catalog) is None


def test_switched_off_jit_uses_finished_entries_only(
    fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(catalog)
    monkeypatch.setenv("FP4DISPATCH_JIT", "0")
    fake.set_version("13.1.5")
    assert build(catalog).cached
    with pytest.raises(ToolchainError, match="FP4DISPATCH_JIT=0 forbids it"):
        build(catalog, variant="two")


@pytest.mark.parametrize("damage", ["truncated", "bit flip", "empty", "missing", "manifest", "manifest emptied"])
def test_a_damaged_entry_is_rebuilt(
    damage: str, fake: Fake, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    built = build(catalog)
    library, record = built.entry.library, built.entry.folder / "entry.json"
    good = library.read_bytes()
    if damage == "truncated":
        os.truncate(library, len(good) // 2)
    elif damage == "bit flip":
        library.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    elif damage == "empty":
        os.truncate(library, 0)
    elif damage == "missing":
        library.unlink()
    else:
        os.truncate(record, 0 if "emptied" in damage else record.stat().st_size - 5)
    again = build(catalog)
    assert not again.cached
    assert again.entry.library.read_bytes() == good
    assert fake.calls() == 2
    assert "damaged cache entry" in caplog.text
    assert build(catalog).cached


def test_a_library_that_changes_before_it_is_opened_is_not_opened(
    fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(catalog)
    monkeypatch.setattr(kernels, "find", lambda *_, **__: built)
    built.entry.library.write_bytes(b"not what was looked up")
    with pytest.raises(CacheError, match="is not the one published"):
        loading.module(built.entry)
    with pytest.raises(CompileError, match="invalid ELF header"):  # built anew, and it is only pretended
        kernels.load("tiny", "one", catalog.record("120f").archs[0], catalog=catalog)
    assert fake.calls() == 2


def test_a_compile_error_tells_the_first_errors_the_log_and_the_command(
    fake: Fake, catalog: Catalog, tmp_path: Path
) -> None:
    (catalog.csrc / "tiny.cu").write_text("BROKEN\n")
    with pytest.raises(CompileError) as caught:
        build(catalog)
    text = str(caught.value)
    assert "tiny/one-120f failed after" in text
    assert "(1 of 1 files)" in text
    assert "tiny.cu(3): error: this does not compile" in text
    assert "rerun: fp4dispatch build --arch 12.0 --ops nvfp4_quantize --verbose" in text
    assert caught.value.log is not None
    assert "-gencode=arch=compute_120f" in caught.value.log.read_text()
    assert leftovers(tmp_path / "cache") == []
    assert kernels.find("tiny", "one", "120f", catalog=catalog) is None


def test_one_broken_file_does_not_lose_the_others(fake: Fake, catalog: Catalog) -> None:
    jobs = [kernels.job(catalog, "tiny", variant, "120f") for variant in ("one", "two")]
    fake.nvcc.write_text(
        fake.nvcc.read_text().replace('if "BROKEN"', 'if any("ADD=2" in word for word in sys.argv) or "BROKEN"')
    )
    with pytest.raises(CompileError, match=r"tiny/two-120f failed .*\(1 of 2 files\)"):
        kernels.build_all(jobs, catalog)
    assert kernels.find("tiny", "one", "120f", catalog=catalog) is not None


def test_sources_that_change_during_a_build_are_not_published(fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    fake.set_seconds(1.5)
    process = start_build(catalog.csrc, tmp_path / "cache", dict(os.environ))
    wait_for_compiler(tmp_path / "cache", process)
    (catalog.csrc / "tiny.h").write_text("#define TINY 5\n")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "changed while tiny/one-120f was being compiled" in errors
    assert list((tmp_path / "cache" / "kernels").glob("*/*/*")) == []


def test_no_argument_reaches_a_shell(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = tmp_path / "a b;touch PWNED '$(touch PWNED)' `touch PWNED` \"x\""
    catalog = Catalog.load(tiny_sources(hostile / "csrc"), JIT_FLAGS)
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(hostile / "cache"))
    monkeypatch.chdir(tmp_path)
    assert build(catalog).entry.library.is_file()
    arguments = json.loads((fake.folder / "calls").read_text().splitlines()[0])
    assert not [word for word in arguments if re.search(r"[\s;$`'\"]", word)]
    assert list(tmp_path.rglob("PWNED")) == []


def test_an_nvcc_in_a_hostile_folder_is_refused(
    fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(fake.folder, tmp_path / "tool $(x)")
    monkeypatch.setenv("FP4DISPATCH_NVCC", str(tmp_path / "tool $(x)" / "bin" / "nvcc"))
    with pytest.raises(ToolchainError, match="holds characters that its own shell commands cannot carry"):
        build(catalog)


def test_hidden_compiler_options_are_not_passed_on(
    fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = fake.folder / "environment"
    fake.nvcc.write_text(
        fake.nvcc.read_text().replace(
            "source = Path", f"Path({str(seen)!r}).write_text(repr(dict(os.environ)))\nsource = Path"
        )
    )
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
    build(catalog)
    assert "TMPDIR" in seen.read_text()
    assert "NVCC_APPEND_FLAGS" not in seen.read_text()


# ---- processes ----


def wait_for_compiler(cache: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while not list(cache.glob("building/build-*/out0/partial")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_that_build_at_once_build_once_and_say_that_they_wait(
    fake: Fake, catalog: Catalog, tmp_path: Path
) -> None:
    fake.set_seconds(3)
    first = start_build(catalog.csrc, tmp_path / "cache", dict(os.environ))
    wait_for_compiler(tmp_path / "cache", first)
    others = [start_build(catalog.csrc, tmp_path / "cache", dict(os.environ)) for _ in range(2)]
    results = [process.communicate(timeout=60) for process in (first, *others)]
    assert [out.split()[0] for out, _ in results] == ["built", "cached", "cached"], results
    assert len({out.split()[1] for out, _ in results}) == 1
    assert fake.calls() == 1
    for _, errors in results[1:]:
        assert f"waiting for process {first.pid}, which is building tiny-one-120f" in errors


@pytest.mark.parametrize("nowhere", [False, True])
def test_a_file_system_without_locks_builds_all_the_same(
    nowhere: bool, fake: Fake, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLock:
        def __init__(self, path: object) -> None:
            self.lock_file = str(path)

        def acquire(self, **_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        def release(self) -> None: ...

    real = cache_module.filelock.FileLock
    monkeypatch.setattr(
        cache_module.filelock,
        "FileLock",
        lambda path, **kw: NoLock(path) if Path(path).parent.name == "locks" or nowhere else real(path, **kw),
    )
    assert not build(catalog).cached
    assert build(catalog).cached


@pytest.mark.parametrize("moment", ["at once", "locked", "compiling"])
def test_a_build_that_is_killed_leaves_nothing(moment: str, fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    """SIGKILL; then a second build must succeed, and nothing of the first may remain, not even its compiler."""
    cache = tmp_path / "cache"
    fake.set_seconds(60)
    process = start_build(catalog.csrc, cache, dict(os.environ))
    if moment == "at once":
        time.sleep(0.3)
    elif moment == "locked":
        while not list(cache.glob("locks/*.pid")):
            time.sleep(0.005)
    else:
        wait_for_compiler(cache, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close(), process.stderr.close()  # type: ignore[union-attr]
    assert list(cache.glob("kernels/*/*/*")) == []
    deadline = time.monotonic() + 30
    while running(fake.nvcc):
        assert time.monotonic() < deadline, "the compiler outlived the build"
        time.sleep(0.05)
    fake.set_seconds(0)
    assert not build(catalog).cached
    assert leftovers(cache) == []
    assert build(catalog).cached


KILL_AT = """
import os, signal, sys
from fp4dispatch.jit.store import cache, private
name, count = sys.argv[4], int(sys.argv[5])
def deadly(real):
    def call(*args, **kwargs):
        global count
        count -= 1
        if count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return call
if name == "rename":
    cache.Cache._rename = deadly(cache.Cache._rename)
else:
    setattr(private, name, deadly(getattr(private, name)))
"""


@pytest.mark.parametrize(("step", "count"), [("write_synced", 1), ("sync", 1), ("sync", 3), ("rename", 1), ("sync", 6)])
def test_a_publication_that_is_killed_is_whole_or_absent(
    step: str, count: int, fake: Fake, catalog: Catalog, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    killed = subprocess.run(
        [sys.executable, "-c", KILL_AT + BUILD_ONE, str(catalog.csrc), str(JIT_FLAGS), str(cache), step, str(count)],
        cwd=REPOSITORY,
        check=False,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed
    found = kernels.find("tiny", "one", "120f", catalog=catalog)
    assert (found is not None) == (count == 6), "only the sync of the parent comes after the rename"
    after = build(catalog)
    assert after.cached == (found is not None)
    assert damage(after.entry) == ""
    build(catalog, variant="two")
    assert leftovers(cache) == []


def running(program: Path) -> list[int]:
    """Processes that run a program, or a script of that name."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(program) in entry.read_bytes().decode(errors="replace").split("\0")[:3]:
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def test_an_interrupt_ends_the_compiler(fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    fake.set_seconds(60)
    process = start_build(catalog.csrc, tmp_path / "cache", dict(os.environ))
    wait_for_compiler(tmp_path / "cache", process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    assert not running(fake.nvcc)
    assert leftovers(tmp_path / "cache") == []


FAIL_LATE = """
import time
from fp4dispatch.machine.progress import Progress
started = time.monotonic()
def update(self, done):
    if time.monotonic() > started + 3:
        raise OSError(5, "I/O error")
Progress.update = update
"""


@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGKILL", "exception", "compiler killed"])
def test_what_a_compiler_started_ends_with_the_build(end: str, fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    """nvcc starts cicc, which is not its group's head: it must not compile on for a minute when the build has ended."""
    slow = fake.folder / "bin" / "slow_cicc"
    slow.write_text("#!/bin/sh\nwhile :; do sleep 0.2; done\n")
    slow.chmod(0o755)
    fake.nvcc.write_text(
        fake.nvcc.read_text().replace("time.sleep(seconds)", f"__import__('subprocess').run([{str(slow)!r}])")
    )
    program = FAIL_LATE + BUILD_ONE if end == "exception" else BUILD_ONE
    process = start_build(catalog.csrc, tmp_path / "cache", dict(os.environ), program)
    deadline = time.monotonic() + 30
    while not (found := running(slow)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if end == "compiler killed":
        os.kill(max(running(fake.nvcc)), signal.SIGKILL)
    elif end != "exception":
        process.send_signal(getattr(signal, end))
    process.communicate(timeout=30)
    assert process.returncode != 0
    deadline = time.monotonic() + (0 if end in ("SIGINT", "exception") else 5)
    while running(slow) or running(fake.nvcc):
        assert time.monotonic() < deadline, f"{found} outlived the build"
        time.sleep(0.02)
    if end in ("SIGINT", "exception", "compiler killed"):
        assert leftovers(tmp_path / "cache") == []


# ---- who may write ----


def test_nothing_is_read_from_a_cache_that_others_can_write(
    fake: Fake, catalog: Catalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = build(catalog).entry
    for path in (tmp_path / "cache", entry.folder.parent, entry.folder, entry.library, entry.folder / "entry.json"):
        mode = path.stat().st_mode & 0o777
        for extra in (0o020, 0o002):
            path.chmod(mode | extra)
            caplog.clear()
            guard.reset()
            assert kernels.find("tiny", "one", "120f", catalog=catalog) is None
            assert f"{path} can be written by other users" in caplog.text
        path.chmod(mode)
    (tmp_path / "cache").chmod(0o770)
    with pytest.raises(CacheError, match=rf"{tmp_path}/cache can be written by other users.*\n  fix: .*chmod go-w"):
        build_in(catalog)
    (tmp_path / "cache").chmod(0o700)
    assert build(catalog).cached


@root_only
def test_nothing_is_read_from_another_users_cache(
    fake: Fake, catalog: Catalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = build(catalog).entry
    for path in (tmp_path / "cache", entry.folder, entry.library, entry.folder / "entry.json"):
        os.chown(path, 65534, 65534)
        caplog.clear()
        guard.reset()
        assert kernels.find("tiny", "one", "120f", catalog=catalog) is None
        assert f"{path} belongs to user 65534, not to you" in caplog.text
        os.chown(path, 0, 0)
    assert build(catalog).cached


def test_a_planted_link_is_not_followed(
    fake: Fake, catalog: Catalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = build(catalog).entry
    moved = tmp_path / "elsewhere.so"
    entry.library.rename(moved)
    entry.library.symlink_to(moved)
    assert not build(catalog).cached
    assert "is a symbolic link" in caplog.text
    assert not entry.library.is_symlink()


def test_a_parent_that_anybody_can_change_is_refused(fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    build(catalog)
    tmp_path.chmod(0o777)
    with pytest.raises(CacheError, match=r"can be written by other users \(mode 0777\), who could replace"):
        build_in(catalog)
    tmp_path.chmod(0o1777)
    assert build_in(catalog).cached


def test_the_default_folder_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FP4DISPATCH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_module.default_folder() == tmp_path / "fp4dispatch"
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "own"))
    assert cache_module.default_folder() == tmp_path / "own"


# ---- file systems ----


@pytest.fixture
def small_disk(tmp_path: Path):  # type: ignore[no-untyped-def]
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(folder)], check=False
    ).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@root_only
@pytest.mark.parametrize("room_kib", [0, 4, 12, 20, 28])
def test_a_full_disk_is_said_and_leaves_nothing(
    room_kib: int, fake: Fake, catalog: Catalog, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Little enough room that a build fails at each of its steps: folders, sources, output, entry."""
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(small_disk / "cache"))
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (shutil.disk_usage(small_disk).free - room_kib * 1024))
    with pytest.raises(CacheError, match=r"no space is left for the kernel cache .*\n  fix: .*cache prune"):
        build_in(catalog)
    assert list(small_disk.glob("cache/kernels/*/*/*")) == []
    ballast.unlink()
    assert not build(catalog).cached
    assert leftovers(small_disk / "cache") == []


def test_a_file_size_limit_is_said_like_a_full_disk(fake: Fake, catalog: Catalog, tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", BUILD_ONE, str(catalog.csrc), str(JIT_FLAGS), str(tmp_path / "cache")],
        cwd=REPOSITORY,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert "CacheError: no space is left for the kernel cache" in process.stderr
    assert list(tmp_path.glob("cache/kernels/*/*/*")) == []
    assert leftovers(tmp_path / "cache") == []


@root_only
def test_a_read_only_cache_still_serves_what_is_finished(
    fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(catalog)
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    subprocess.run(["mount", "--bind", str(tmp_path / "cache"), str(mounted)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(mounted)], check=True)
        monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(mounted))
        assert build(catalog).cached
        with pytest.raises(CacheError, match=r"cannot be written or .*Read-only file system\)\n  fix: .*still load"):
            build_in(catalog, variant="two")
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_a_cache_at_a_file_is_refused(fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheError, match="Not a directory"):
        build_in(catalog)


# ---- ahead of time ----


def test_entries_made_ahead_of_time_travel(
    fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    kernels.build_all(
        [kernels.job(catalog, "tiny", "one", "120f")], catalog, cache=Cache(out, portable=True), pinned=True
    )
    assert {path.stat().st_mode & 0o777 for path in out.glob("kernels/tiny/*/*/*")} == {0o644}
    assert {path.stat().st_mode & 0o777 for path in [out, *out.glob("kernels/tiny/*/*")]} == {0o755}
    carried = Path(shutil.copytree(out, tmp_path / "image"))
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(carried))
    fake.set_version("13.1.5")  # another toolchain in the image changes nothing
    found = kernels.find("tiny", "one", "120f", catalog=catalog)
    assert found is not None
    assert found.entry.pinned
    (catalog.csrc / "tiny.h").write_text("#define TINY 4\n")
    assert kernels.find("tiny", "one", "120f", catalog=catalog) is None


def test_kernels_inside_the_package_are_trusted_like_the_package(
    fake: Fake, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared environment may belong to someone else and be group-writable; its Python code runs all the same."""
    bundle = tmp_path / "site-packages" / "prebuilt"
    jobs = [kernels.job(catalog, "tiny", "one", "120f")]
    kernels.build_all(jobs, catalog, cache=Cache(bundle, portable=True), pinned=True)
    for path in bundle.rglob("*"):
        path.chmod(path.stat().st_mode | 0o020)
    searched = [Cache(tmp_path / "cache"), Cache(bundle, installed=True)]
    monkeypatch.setattr(kernels, "caches", lambda: searched)
    assert build(catalog).cached
    library = next(bundle.glob("kernels/*/*/*/kernel.so"))
    library.write_bytes(b"changed")
    assert not build(catalog).cached, "its content is checked like any other's"


def test_clear_removes_everything_and_names_the_bytes(fake: Fake, catalog: Catalog) -> None:
    built = build(catalog)
    cache = Cache(cache_module.default_folder())
    assert evict.clear(cache) > len(built.entry.library_sha256)
    assert list(cache.entries()) == []
    assert [path.name for path in cache.root.iterdir()] == ["CACHEDIR.TAG"]
    assert not build(catalog).cached


def test_private_files_are_never_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(CacheError, match="File exists"):
        private.write_synced(tmp_path / "link", b"x", 0o600)
    assert not (tmp_path / "target").exists()
