"""``import fp4dispatch``: what it costs and what it must not do. Each case runs in a fresh interpreter."""

from __future__ import annotations

import ast
import importlib
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import fp4dispatch
from fp4dispatch import errors

BUDGET_MS = 60


def python(script: str, *options: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *options, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_costs_little_on_top_of_torch() -> None:
    script = """
import time, torch
start = time.perf_counter()
import fp4dispatch
print(1e3 * (time.perf_counter() - start))
"""
    python(script)  # writes the bytecode caches
    times = [float(python(script)) for _ in range(5)]
    assert statistics.median(times) < BUDGET_MS, times


def test_imports_neither_torch_nor_anything_heavy() -> None:
    script = """
import sys, fp4dispatch
heavy = {"torch", "numpy", "flashinfer", "cudnn", "triton", "transformers", "safetensors", "rich", "packaging"}
print(sorted(heavy & set(sys.modules)))
"""
    assert python(script).strip() == "[]"


def test_imports_none_of_torchs_compiler_after_torch() -> None:
    script = """
import sys, torch
before = set(sys.modules)
import fp4dispatch
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] in {"torch", "flashinfer", "cudnn"}))
"""
    assert python(script).strip() == "[]"


# Fails on any write, process, socket or change of a file; reading is free. Armed after torch, before us.
GUARD = """
import os, sys
def guard(event, args):
    if event == "open":
        path, mode, flags = args
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        bad = bool(writes) and not str(path).startswith(("/dev/nvidia", "/dev/null"))
    else:
        bad = event.startswith(("subprocess.", "os.exec", "os.posix_spawn", "os.fork", "os.system", "socket.",
            "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate",
            "os.putenv", "shutil.", "tempfile.", "pty.spawn"))
    if bad:
        raise SystemExit("the import did %s %r" % (event, args))
sys.dont_write_bytecode = True
"""


def test_writes_nothing_and_starts_nothing() -> None:
    python(f"{GUARD}\nsys.addaudithook(guard)\nimport fp4dispatch")


@pytest.mark.parametrize(
    "deed",
    [
        "open('/tmp/never-made', 'w')",
        "os.open('/tmp/never-made', os.O_CREAT | os.O_WRONLY)",
        "__import__('subprocess').run(['true'])",
        "__import__('socket').socket()",
        "os.mkdir('/tmp/never-made')",
        "os.system('true')",
    ],
)
def test_the_guard_catches(deed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{GUARD}\nsys.addaudithook(guard)\n{deed}"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the import did" in done.stderr


def test_leaves_logging_warnings_and_the_environment_alone() -> None:
    script = """
import logging, os, threading, warnings
def state():
    root = logging.root
    return list(root.handlers), root.level, dict(os.environ), list(warnings.filters), threading.active_count()
before = state()
import fp4dispatch
after = state()
assert before == after, (before, after)
real = [h for h in logging.getLogger("fp4dispatch").handlers if not isinstance(h, logging.NullHandler)]
assert not real, real
"""
    python(script)


def test_a_fork_after_import_works_and_there_is_no_cuda_context() -> None:
    script = """
import os, fp4dispatch, torch
assert not torch.cuda.is_initialized()
if not fp4dispatch.gpus:  # where NVML is present it maps libcuda itself, without a context
    assert "libcuda.so" not in open("/proc/self/maps").read()
pid = os.fork()
if pid == 0:
    from fp4dispatch.machine import system
    good = system.current().gpus == fp4dispatch.gpus and (torch.ones(4) * 2).sum().item() == 8
    os._exit(0 if good else 3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    python(script)


def test_is_not_troubled_by_a_broken_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch_cuda.so: undefined symbol')")
    path = os.pathsep.join([str(tmp_path), str(Path(fp4dispatch.__file__).parents[1])])
    script = """
import fp4dispatch
fp4dispatch.System.fake(arch="12.0"), fp4dispatch.gpus, dir(fp4dispatch)
try:
    fp4dispatch.nvfp4_dequantize
except ImportError as error:
    print(error)
"""
    assert "undefined symbol" in python(script, PYTHONPATH=path)


def test_every_lazy_name_is_there() -> None:
    assert len(fp4dispatch._LAZY) >= 5
    for name, module in fp4dispatch._LAZY.items():
        assert getattr(fp4dispatch, name) is getattr(importlib.import_module(f"fp4dispatch.{module}"), name)


def test_all_lists_exactly_the_public_names() -> None:
    raised = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, errors.Fp4DispatchError)}
    assert raised <= set(fp4dispatch.__all__)
    assert set(fp4dispatch._LAZY) <= set(fp4dispatch.__all__) <= set(dir(fp4dispatch))
    for name in fp4dispatch.__all__:
        assert hasattr(fp4dispatch, name), name


def test_type_checkers_see_the_lazy_names() -> None:
    tree = ast.parse(Path(fp4dispatch.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: str(node.module).removeprefix("fp4dispatch.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == fp4dispatch._LAZY


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = fp4dispatch.no_such_name


def test_submodules_are_not_shadowed() -> None:
    """``fp4dispatch.problem.arch`` stays the module; the GPU's arch is ``gpu_arch``."""
    package = Path(fp4dispatch.__file__).parent
    modules = {file.stem for file in package.glob("*.py")} | {f.parent.name for f in package.glob("*/__init__.py")}
    assert modules & set(fp4dispatch.__all__) == set()


def test_version_is_the_distributions() -> None:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    project = tomllib.loads((Path(fp4dispatch.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["version"] == fp4dispatch.__version__
