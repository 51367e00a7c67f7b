"""A process that forks while another thread holds a lock: the child goes on."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import fp4dispatch
from fp4dispatch.backends import registry
from fp4dispatch.backends.libraries.cudnn import CudnnBackend
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.dispatch import choose
from fp4dispatch.machine import locks
from fp4dispatch.machine.locks import ForkSafeLock
from fp4dispatch.problem import Problem

ROOT = Path(fp4dispatch.__file__).parent
RAW = {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier", "allocate_lock", "Queue"}


def test_every_lock_of_the_package_is_a_fork_safe_one():
    found = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                text = ast.unparse(node.func)
                module, _, name = text.rpartition(".")
                if name in RAW and module in ("", "threading", "_thread", "queue", "multiprocessing"):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}()")
    # An event of one conversation, which no other thread waits for: a child never inherits a use of it.
    allowed = ("machine/locks.py:", "machine/ranks.py:", "machine/collectives.py:")
    assert [one for one in found if not one.startswith(allowed)] == []


def child(work: Callable[[], object], seconds: float = 10.0) -> object:
    """What a forked child answers in time, as text; "hangs" where it does not."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, str(work()).encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], seconds)[0]:
            os.kill(pid, signal.SIGKILL)
            return "hangs"
        return os.read(reading, 1000).decode()
    finally:
        os.close(reading)
        os.waitpid(pid, 0)


class Holder:
    """A thread that holds a lock for as long as the block runs."""

    def __init__(self, *held):
        self.held, self.has, self.done = held, threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        with ExitStack() as stack:
            for lock in self.held:
                stack.enter_context(lock)
            self.has.set()
            self.done.wait(30)

    def __enter__(self):
        self.thread.start()
        assert self.has.wait(10)

    def __exit__(self, *args):
        self.done.set()
        self.thread.join()


def take(lock):
    with lock:
        return "taken"


def test_a_child_can_take_every_lock_of_the_package():
    """Of every module, and of every object that has one by now, such as a backend."""
    backend = CudnnBackend()
    for module in pkgutil.walk_packages(fp4dispatch.__path__, "fp4dispatch."):
        if not module.name.startswith(("fp4dispatch.csrc", "fp4dispatch.jit_flags", "fp4dispatch.__main__")):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name not in ("sglang", "vllm"):  # engines that need not be installed
                    raise
    everyone = list(locks._locks)
    assert len(everyone) >= 9
    assert backend._lock in everyone
    with Holder(*everyone):
        assert child(lambda: [take(lock) for lock in everyone].count("taken")) == str(len(everyone))


def test_the_check_can_fail():
    raw = threading.RLock()
    with Holder(raw):
        assert child(lambda: take(raw), seconds=1.0) == "hangs"


def test_a_decision_can_be_made_while_the_parent_makes_one(monkeypatch):
    """The class of the fault: one thread is inside the policy, another forks, and the child decides."""
    inside, parent = threading.Event(), os.getpid()

    class Slow(ReferenceBackend):
        name = "slow"

        def supports(self, problem, system):
            if os.getpid() == parent:
                inside.set()
                time.sleep(1.5)
            return super().supports(problem, system)

    known = {**registry.backends(), "slow": Slow()}
    monkeypatch.setattr(registry, "backends", lambda: known)
    choose.reset()
    problem = Problem("nvfp4_gemm", 16, 256, 256, "any", "nvfp4", "bfloat16", False)
    thread = threading.Thread(target=lambda: choose.select(problem), daemon=True)
    thread.start()
    assert inside.wait(20)
    assert child(lambda: choose.select(problem).backend) in ("reference", "slow")
    thread.join()
    choose.reset()


def test_the_thread_that_forks_keeps_what_it_holds():
    lock = ForkSafeLock()

    def work():
        free = []
        thread = threading.Thread(target=lambda: (take(lock), free.append(True)), daemon=True)
        thread.start()
        thread.join(0.3)
        held = not free
        lock.__exit__(None, None, None)
        lock.__exit__(None, None, None)
        thread.join(5)
        return held, free

    with lock, lock:
        assert child(work) == "(True, [True])"
    assert child(lambda: take(lock)) == "taken"


def test_it_is_a_lock():
    lock, total = ForkSafeLock(), [0]

    def add():
        for _ in range(2000):
            with lock, lock:
                value = total[0]
                time.sleep(0)
                total[0] = value + 1

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total == [8000]
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    with Holder(lock):
        pass
