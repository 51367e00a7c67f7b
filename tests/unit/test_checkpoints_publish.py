"""A directory that is published: whole or not at all, and nothing of anybody else is lost on the way.

Savers are forked processes on a real file system; a kill comes before each file operation in turn. The way without
``renameat2`` is forced by the answers that kernels and file systems give.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp4dispatch.checkpoints import open_checkpoint
from fp4dispatch.checkpoints.files import publish, rename
from fp4dispatch.checkpoints.files.publish import atomic_directory
from fp4dispatch.errors import CheckpointError

WAYS = ("renameat2", "EINVAL", "ENOSYS", "no libc")
FILES = ("model.safetensors", "config.json")


@pytest.fixture
def way(request, monkeypatch):
    """How directories are renamed: by the system call, or as where there is none."""
    if request.param == "no libc":
        monkeypatch.setattr(rename, "_libc", lambda: None)
    elif request.param != "renameat2":

        def answers(*args):
            ctypes.set_errno(getattr(errno, request.param))
            return -1

        monkeypatch.setattr(rename, "_libc", lambda: answers)
    return request.param


both_ways = pytest.mark.parametrize("way", ["renameat2", "EINVAL"], indirect=True)


def put(out: Path, content: str, *, overwrite: bool = False, between: Callable[[Path], object] = lambda path: None):
    with atomic_directory(out, overwrite=overwrite) as directory:
        for name in FILES:
            (directory / name).write_text(content)
        between(directory)


def content(out: Path) -> str | None:
    """What lies there: a whole directory's content, None for nothing; an assertion fails on anything else."""
    if not out.exists():
        return None
    assert {path.name for path in out.iterdir()} == set(FILES)
    (text,) = {path.read_text() for path in out.iterdir()}
    return text


def forked(work: Callable[[], object]) -> int:
    """Run in a child and return its process id; it exits with 3 after a CheckpointError."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except CheckpointError:
        os._exit(3)
    finally:
        os._exit(1)


def code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("way", WAYS, indirect=True)
def test_new_and_overwritten(tmp_path, way):
    out = tmp_path / "out"
    put(out, "one")
    assert content(out) == "one"
    with pytest.raises(CheckpointError, match="already exists"):
        put(out, "two")
    assert content(out) == "one"
    put(out, "two", overwrite=True)
    assert content(out) == "two"
    (tmp_path / "empty").mkdir()
    put(tmp_path / "empty", "three", overwrite=True)
    assert content(tmp_path / "empty") == "three"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "empty"}


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_appears_meanwhile_stays(tmp_path, way, overwrite):
    out = tmp_path / "out"

    def appears(_):
        out.mkdir()
        (out / "thesis.tex").write_text("years of work")

    with pytest.raises(CheckpointError, match="is not a checkpoint directory" if overwrite else "already exists"):
        put(out, "new", overwrite=overwrite, between=appears)
    assert (out / "thesis.tex").read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@both_ways
@pytest.mark.parametrize("what", ["folder", "file", "link", "dangling link", "empty folder"])
def test_what_appears_after_the_last_check_stays(tmp_path, way, what, monkeypatch):
    """Not even the moment between the check and the rename is enough to lose something."""
    out, home = tmp_path / "out", tmp_path / "home"
    home.mkdir()
    real = publish._check_target

    def late(path, overwrite):
        real(path, overwrite)
        if list(tmp_path.glob(".out.tmp-*/config.json")) and not os.path.lexists(out):
            if what in ("folder", "empty folder"):
                out.mkdir()
                if what == "folder":
                    (out / "thesis.tex").write_text("years of work")
            elif what == "file":
                out.write_text("years of work")
            else:
                out.symlink_to(home if what == "link" else tmp_path / "nowhere")

    monkeypatch.setattr(publish, "_check_target", late)
    with pytest.raises(CheckpointError, match="already exists"):
        put(out, "new")
    assert out.is_symlink() == ("link" in what)
    assert out.is_dir() == (what in ("folder", "empty folder", "link"))
    assert what != "folder" or (out / "thesis.tex").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"home", "out"}


@both_ways
def test_a_folder_that_takes_the_checkpoints_place_meanwhile_is_given_back(tmp_path, way, monkeypatch):
    """With overwrite: after the last check the old checkpoint goes and somebody's folder comes."""
    out = tmp_path / "out"
    put(out, "old")
    real, swapped = publish.exchange, []

    def late(source, target):
        if not swapped:
            swapped.append(out.rename(tmp_path / "moved"))
            out.mkdir()
            (out / "thesis.tex").write_text("years of work")
        return real(source, target)

    monkeypatch.setattr(publish, "exchange", late)
    with pytest.raises(CheckpointError, match="is not a checkpoint directory"):
        put(out, "new", overwrite=True)
    assert (out / "thesis.tex").read_text() == "years of work"
    assert content(tmp_path / "moved") == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"moved", "out"}


@both_ways
def test_of_two_savers_the_first_wins_and_loses_nothing(tmp_path, way):
    out = tmp_path / "out"
    ready, go = tmp_path / "ready", tmp_path / "go"
    ready.mkdir()

    def save(name):
        def wait(_):
            (ready / name).touch()
            while not go.exists():
                time.sleep(0.001)

        put(out, name, between=wait)

    for round_ in range(10):
        children = {name: forked(lambda name=name: save(name)) for name in ("a", "b", "c")}
        while len(list(ready.iterdir())) < 3:
            time.sleep(0.001)
        go.touch()
        codes = {name: code(child) for name, child in children.items()}
        assert sorted(codes.values()) == [0, 3, 3], round_
        assert codes[content(out)] == 0
        assert {path.name for path in tmp_path.iterdir()} == {"ready", "go", "out"}
        for path in [*out.iterdir(), *ready.iterdir(), go]:
            path.unlink()
        out.rmdir()


def test_two_savers_that_overwrite_leave_a_whole_checkpoint_at_every_moment(tmp_path):
    out = tmp_path / "out"
    put(out, "a0")

    def save(name):
        for number in range(40):
            put(out, f"{name}{number}", overwrite=True)

    children = [forked(lambda name=name: save(name)) for name in ("a", "b")]
    seen = 0
    while children:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            children.remove(done)
        folder = os.open(out, os.O_RDONLY)  # fails where there is nothing
        try:
            names = os.listdir(folder)  # noqa: PTH208 - by descriptor: the name may mean another one by now
        finally:
            os.close(folder)
        seen += set(names) == set(FILES)  # one that has just been replaced may be half removed
    assert seen > 10
    assert content(out) in ("a39", "b39")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def _kill_before(number: int, root: Path) -> None:
    """Have this process killed before its file operation of this number below a folder."""
    left = number
    operations = {"open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.truncate", "os.listdir", "os.scandir"}

    def hook(event, args):
        nonlocal left
        if event in operations and args and isinstance(args[0], str | os.PathLike) and str(root) in str(args[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@both_ways
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_before_any_file_operation_loses_nothing(tmp_path, way, overwrite):
    kill_everywhere(tmp_path, way, overwrite)


def kill_everywhere(tmp_path: Path, way: str, overwrite: bool) -> None:
    outcomes = []
    for number in range(200):
        root = tmp_path / str(number)
        out = root / "out"
        root.mkdir()
        if overwrite:
            put(out, "old")

        def save(number=number, root=root, out=out):
            _kill_before(number, root)
            put(out, "new", overwrite=overwrite)

        ended = code(forked(save))
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        if out.is_dir() and not any(out.iterdir()):
            assert way != "renameat2"  # the name was claimed, no more
            outcomes.append("claimed")
        elif overwrite and not out.exists():
            assert way != "renameat2"
            (aside,) = root.glob("out.old-*")
            with pytest.raises(CheckpointError, match=rf"{aside} is what an interrupted overwrite left whole"):
                open_checkpoint(out)
            assert content(aside) == "old"
            outcomes.append("aside")
        else:
            outcomes.append(content(out))
        put(out, "again", overwrite=True)  # and whatever it left is in nobody's way
        assert content(out) == "again"
    assert ended == 0
    assert len(outcomes) > 8
    assert outcomes[0] == ("old" if overwrite else None)
    assert outcomes[-1] == "new"
    allowed = {"old" if overwrite else None, "new"} | ({"claimed", "aside"} if way != "renameat2" else set())
    assert set(outcomes) <= allowed


def test_the_kill_finds_two_renames_in_a_row(tmp_path, monkeypatch):
    """The check itself: moving the old one aside by plain renames does leave nothing at the target once."""

    def two_renames(temporary, out, overwrite):
        aside = out.with_name("aside")
        if out.exists():
            out.rename(aside)
        temporary.rename(out)

    monkeypatch.setattr(publish, "_publish", two_renames)
    monkeypatch.setattr(rename, "_libc", lambda: None)
    with pytest.raises(AssertionError, match="renameat2"):
        kill_everywhere(tmp_path, "renameat2", True)


@pytest.mark.parametrize("way", ["EINVAL"], indirect=True)
def test_the_old_one_comes_back_when_the_second_rename_fails(tmp_path, way, monkeypatch):
    out = tmp_path / "out"
    put(out, "old")
    real = Path.rename

    def failing(self, target):
        if ".tmp-" in self.name:
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        put(out, "new", overwrite=True)
    assert content(out) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EACCES, errno.EIO, errno.EBUSY])
def test_an_error_of_the_rename_changes_nothing(tmp_path, monkeypatch, number):
    """EXDEV is what overlayfs answers for a directory of a lower layer."""
    out = tmp_path / "out"
    put(out, "old")

    def fails(*args):
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(rename, "_libc", lambda: fails)
    for target, overwrite in ((out, True), (tmp_path / "fresh", False)):
        with pytest.raises(CheckpointError, match=os.strerror(number)):
            put(target, "new", overwrite=overwrite)
    assert content(out) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("way", WAYS, indirect=True)
@pytest.mark.parametrize("name", ["n" * 255, "é" * 127])
def test_a_name_as_long_as_names_may_be(tmp_path, way, name):
    out = tmp_path / name
    put(out, "old")
    put(out, "new", overwrite=True)
    assert content(out) == "new"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@both_ways
def test_an_old_checkpoint_that_cannot_be_removed_is_named(tmp_path, way, monkeypatch, caplog):
    """As in a shared folder, where the files in it are another user's."""
    out = tmp_path / "out"
    put(out, "old")
    monkeypatch.setattr(publish.shutil, "rmtree", lambda path, ignore_errors=False: None)
    put(out, "new", overwrite=True)
    (left,) = [path for path in tmp_path.iterdir() if path != out]
    assert (content(out), content(left)) == ("new", "old")
    assert str(left) in caplog.text


@pytest.fixture
def image(monkeypatch):
    """Refuse to rename ``out``, as overlayfs does for a directory of a container's image."""

    def refused(source, target):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(publish, "exchange", refused)


def test_a_checkpoint_of_an_image_is_overwritten(tmp_path, image):
    out = tmp_path / "out"
    put(out, "old")
    (out / "1_Pooling").mkdir()
    (out / "1_Pooling" / "config.json").write_text("old")
    (out / "latest").symlink_to(tmp_path)
    put(out, "new", overwrite=True)
    assert content(out) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_kill_while_a_checkpoint_of_an_image_is_overwritten_leaves_the_old_or_the_new_one_whole(tmp_path, image):
    outcomes = set()
    for number in range(200):
        root = tmp_path / str(number)
        out = root / "out"
        root.mkdir()
        put(out, "old")

        def save(number=number, root=root, out=out):
            _kill_before(number, root)
            put(out, "new", overwrite=True)

        if (ended := code(forked(save))) == 0:
            break
        assert ended == -signal.SIGKILL
        found = list(root.glob("out.new-*"))
        if found and not out.exists():
            with pytest.raises(CheckpointError, match=rf"{found[0]} is what an interrupted overwrite left whole"):
                open_checkpoint(out)
        outcomes.add(content(found[0]) if found else content(out))
        put(out, "again", overwrite=True)
        assert content(out) == "again"
    assert ended == 0
    assert outcomes == {"old", "new"}


def test_a_checkpoint_of_an_image_that_cannot_be_removed_costs_no_work(tmp_path, image, monkeypatch):
    out = tmp_path / "out"
    put(out, "old")

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(publish, "_remove_weights_last", refused)
    with pytest.raises(CheckpointError, match=r"Permission denied: the new checkpoint lies whole in ") as said:
        put(out, "new", overwrite=True)
    (new,) = tmp_path.glob("out.new-*")
    assert str(new) in str(said.value)
    assert (content(out), content(new)) == ("old", "new")


def test_links_and_mount_points_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    home = tmp_path / "home"
    put(home, "mine")
    (tmp_path / "link").symlink_to(home)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("link", "dangling"):
        with pytest.raises(CheckpointError, match="already exists"):
            put(tmp_path / name, "new")
        with pytest.raises(CheckpointError, match="or a link"):
            put(tmp_path / name, "new", overwrite=True)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == home)
    with pytest.raises(CheckpointError, match="is a mount point"):
        put(home, "new", overwrite=True)
    assert content(home) == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"home", "link", "dangling"}


def test_a_parent_that_is_a_link_to_another_disk(tmp_path):
    """The directory is written beside its target, on the same disk, wherever the path leads."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or not os.access(shared, os.W_OK) or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system to write to")
    other = shared / f"fp4dispatch-test-{os.getpid()}"
    other.mkdir()
    try:
        (tmp_path / "far").symlink_to(other)
        put(tmp_path / "far" / "out", "one")
        put(tmp_path / "far" / "out", "two", overwrite=True)
        assert content(other / "out") == "two"
        assert [path.name for path in other.iterdir()] == ["out"]
    finally:
        for path in sorted(other.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
        other.rmdir()


def test_a_target_that_is_exchanged_while_it_is_listed_is_listed_again(tmp_path, monkeypatch):
    """The listing is of the directory that another saver has replaced, and is removing."""
    out, other, listed = tmp_path / "out", tmp_path / "other", os.listdir
    put(out, "one")
    put(other, "two")
    left = ["config.json"]

    def listdir(path):
        if not left:
            return listed(path)
        rename.exchange(other, out)
        return [left.pop()]

    monkeypatch.setattr(os, "listdir", listdir)
    put(out, "three", overwrite=True)
    monkeypatch.undo()
    assert (content(out), content(other)) == ("three", "one")
