"""Compiles sources in a build folder: the ninja file, the commands, the errors.

A build folder holds links to the source and header folders (``src``, ``inc/cutlass``, ...), and every path in a command
is relative to it. There are two reasons. nvcc starts its passes through a shell without quoting, so blanks or
``$(...)`` in the name of a home folder must not reach a command line. And dependency files name headers the same on
every machine.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fp4dispatch.errors import CompileError
from fp4dispatch.jit.catalog.flags import CommonFlags, FlagRecord
from fp4dispatch.jit.catalog.manifest import Kernel, Variant
from fp4dispatch.jit.compiler.limits import limits
from fp4dispatch.jit.compiler.toolchain import CUDA, Toolchain
from fp4dispatch.jit.store.entries import LIBRARY, LOG, OWN, SYSTEM
from fp4dispatch.machine.progress import Progress
from fp4dispatch.settings import settings

_DEPFILE = "kernel.d"
# The only environment variables that a build sees. nvcc reads options from many others (INCLUDES, PTXAS_FLAGS,
# NVCC_APPEND_FLAGS, every name in its nvcc.profile), and so does g++ (CPATH, GCC_EXEC_PREFIX). They would
# change a build without being part of its cache key.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH")
_END = 10.0  # seconds that killed compilers get to end
_ERROR_LINE = re.compile(r"error|fatal|killed|undefined reference|no space left", re.IGNORECASE)
_FIRST_ERRORS = 5


@dataclass(frozen=True)
class Job:
    """One (kernel, variant, target) to compile, with the flags that apply."""

    kernel: Kernel
    variant: Variant
    record: FlagRecord
    common: CommonFlags

    @property
    def name(self) -> str:
        """``kernel/variant-target``, for messages and folders."""
        return f"{self.kernel.name}/{self.variant.id}-{self.record.target}"

    def recipe(self) -> tuple[str, ...]:
        """Return the command without the parts that depend on the machine. It is part of the cache key."""
        values = {"flags": self.common.nvcc, "target": self.record.nvcc, "defines": self._defines()}
        return tuple(part for word in self.common.command for part in values.get(word[1:-1], (word,)))

    def argv(self, toolchain: Toolchain, folder: str) -> list[str]:
        """Return the whole command, with paths relative to the build folder."""
        spell = self.common.spell
        includes = [OWN, *(f"inc/{name}" for name in toolchain.includes)]
        values = {
            "nvcc": [str(toolchain.nvcc)],
            "host": spell("host", str(toolchain.host)),
            "includes": [word for path in includes for word in spell("include", path)],
            "depfile": spell("depfile", f"{folder}/{_DEPFILE}"),
            "output": spell("output", f"{folder}/{LIBRARY}"),
            "source": [f"{OWN}/{self.kernel.source}"],
        }
        return [part for word in self.recipe() for part in values.get(word[1:-1], [word])]

    def _defines(self) -> tuple[str, ...]:
        early = self.kernel.before_wait.defines() if self.kernel.before_wait else ()
        macros = (*self.common.defines, *self.record.defines, *early, *self.variant.defines)
        return tuple(word for macro in macros for word in self.common.spell("define", macro))


@dataclass(frozen=True)
class Outcome:
    """Result of one job: its folder, the first errors (empty on success), and its seconds."""

    job: Job
    folder: Path
    errors: tuple[str, ...]
    seconds: float = 0.0


def compile_jobs(
    jobs: Sequence[Job], build: Path, csrc: Path, toolchains: Sequence[Toolchain], *, quiet: bool = False
) -> list[Outcome]:
    """Compile all jobs, as many in parallel as cores and memory allow. A failure does not stop the others.

    Parameters
    ----------
    jobs
        What to compile.
    build
        An empty private folder.
    csrc
        Folder of the sources.
    toolchains
        One per job: kernels with and without CUTLASS see different header folders.
    quiet
        Show no progress.

    Raises
    ------
    CompileError
        If ninja itself cannot be run. Compiler errors are in the outcomes.
    """
    size = max(job.common.memory_gb["cutlass" if job.kernel.cutlass else "plain"] for job in jobs)
    parallel = limits().jobs(size, len(jobs))
    _lay_out(jobs, build, csrc, toolchains, parallel)
    (build / "build.ninja").write_text(_ninja_file(len(jobs)))
    names = ", ".join(sorted({job.kernel.name for job in jobs}))
    targets = ", ".join(sorted({job.record.target for job in jobs}))
    title = f"compiling {names} for {targets} ({_count(len(jobs), 'file')}, {_count(parallel, 'job')})"
    outputs = [build / f"out{i}" / LIBRARY for i in range(len(jobs))]
    with Progress(title, len(jobs), unit="files", announce=True, quiet=quiet) as shown:
        _run_ninja(build, lambda: shown.update(sum(path.exists() for path in outputs)))
    took = _seconds(build)
    return [
        Outcome(job, output.parent, _errors(output.parent), took.get(f"{output.parent.name}/{LIBRARY}", 0.0))
        for job, output in zip(jobs, outputs, strict=True)
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def files_read(folder: Path, toolchain: Toolchain) -> list[tuple[str, str]]:
    """Return every file that a compilation read, as (root, path below it), from its dependency file.

    The roots are ``src``, those of :meth:`Toolchain.roots`, and ``/`` for everything else.
    """
    cuda = toolchain.roots()[CUDA]
    text = (folder / _DEPFILE).read_text().replace("\\\n", " ")
    paths = re.split(r"(?<!\\)\s+", text.partition(": ")[2].strip())
    found: dict[tuple[str, str], None] = {}
    for escaped in paths:
        path = re.sub(r"\\(.)", r"\1", escaped)
        if not path:
            continue
        if path.startswith("/"):
            real = Path(path).resolve()
            in_cuda = real.is_relative_to(cuda)
            found[(CUDA, str(real.relative_to(cuda))) if in_cuda else (SYSTEM, str(real.relative_to(SYSTEM)))] = None
            continue
        parts = Path(os.path.normpath(path)).parts
        root, rest = (parts[0], parts[1:]) if parts[0] == OWN else (parts[1], parts[2:])
        found[root, str(Path(*rest))] = None
    if not any(root == OWN for root, _ in found):
        raise CompileError(
            f"{folder / _DEPFILE} does not name the source: the compiler wrote no usable dependency file"
        )
    return list(found)


def _lay_out(jobs: Sequence[Job], build: Path, csrc: Path, toolchains: Sequence[Toolchain], parallel: int) -> None:
    (build / OWN).symlink_to(csrc.resolve())
    (build / "inc").mkdir()
    for name, path in {name: path for t in toolchains for name, path in t.includes.items()}.items():
        (build / "inc" / name).symlink_to(path.resolve())
    (build / "tmp").mkdir()
    (build / "run_job.py").write_bytes(Path(__file__).with_name("run_job.py").read_bytes())
    commands = []
    for i, (job, toolchain) in enumerate(zip(jobs, toolchains, strict=True)):
        (build / f"out{i}").mkdir()
        argv = job.argv(toolchain, f"out{i}")
        (build / f"out{i}" / LOG).write_text(_log_head(job, argv, csrc, toolchain))
        commands.append({"argv": argv, "log": f"out{i}/{LOG}"})
    # -k 0: keep going after a failure, so that what can be built is published
    ninja = [str(toolchains[0].ninja), "-k", "0", "-j", str(parallel)]
    commands.append({"argv": ninja, "log": ""})
    (build / "commands.json").write_text(json.dumps(commands))


def _log_head(job: Job, argv: Sequence[str], csrc: Path, toolchain: Toolchain) -> str:
    """The command and the targets of the links in it: enough to repeat it by hand."""
    links: Mapping[str, Path] = {
        OWN: csrc,
        **{f"inc/{name}": path for name, path in toolchain.includes.items()},
    }
    rows = [f"# {job.name}", f"# nvcc {toolchain.nvcc_version}, {toolchain.host_version}"]
    rows += [f"# {name} -> {path}" for name, path in links.items()]
    return "\n".join([*rows, shlex.join(argv), "", ""])


def _ninja_file(count: int) -> str:
    """The ninja file. A shell reads only the interpreter's path, quoted, and a number."""
    interpreter = shlex.quote(sys.executable).replace("$", "$$")
    if "\n" in interpreter:
        raise CompileError(f"the path of the Python interpreter holds a line break: {sys.executable!r}")
    rows = ["rule compile", f"  command = exec {interpreter} -I -S run_job.py $number", "  description = $number", ""]
    for i in range(count):
        rows += [f"build out{i}/{LIBRARY}: compile", f"  number = {i}", ""]
    return "\n".join(rows)


def _run_ninja(build: Path, tick: Callable[[], None]) -> None:
    environment = {key: value for key, value in settings.environment().items() if key in _ENVIRONMENT}
    environment |= {"TMPDIR": "tmp", "LC_ALL": "C"}
    number = len(json.loads((build / "commands.json").read_text())) - 1
    # Every process of the build holds the write end, so the read end reports when the last one has ended.
    gone, alive = os.pipe()
    try:
        with (build / "ninja.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "run_job.py", str(number), str(os.getpid())],
                cwd=build,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(alive,),
            )
        os.close(alive)
        alive = -1
        _wait(process, gone, tick)
    except OSError as error:
        raise CompileError(
            f"the build cannot be run: {error}\n  fix: free memory and file handles, then build again"
        ) from error
    finally:
        os.close(gone)
        if alive >= 0:
            os.close(alive)


def _wait(process: subprocess.Popen[bytes], gone: int, tick: Callable[[], None]) -> None:
    """Wait for ninja. If the wait is interrupted, end every compiler first: they still write into the folder.

    When ninja is killed, ``run_job.py`` kills the process group of each compiler.
    """
    try:
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.2)
            tick()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        select.select([gone], [], [], _END)
        raise


def _seconds(build: Path) -> dict[str, float]:
    """Return how long each output took, from ninja's log: start and end in ms, a time stamp, the output, a hash."""
    try:
        rows = [line.split("\t") for line in (build / ".ninja_log").read_text().splitlines()]
        return {row[3]: (int(row[1]) - int(row[0])) / 1e3 for row in rows if len(row) == 5}
    except (OSError, ValueError):
        return {}


def _errors(folder: Path) -> tuple[str, ...]:
    if (folder / LIBRARY).is_file():
        return ()
    lines = [line.strip() for line in (folder / LOG).read_text(errors="replace").splitlines()[1:]]
    found = [line for line in lines if _ERROR_LINE.search(line)]
    return tuple((found or lines[-_FIRST_ERRORS:])[:_FIRST_ERRORS])
