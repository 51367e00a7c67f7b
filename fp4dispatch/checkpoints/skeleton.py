"""Build the model of a checkpoint with transformers, in a restricted child process.

A ``config.json`` is untrusted, and transformers follows it: it downloads and runs a ``backbone`` or the kernels of an
``attn_implementation``, and builds any number of layers. So a forked child builds the model on the meta device. It
has no network, no subprocesses, no unpickling and no writing, and limits on memory and time. It returns plain data. The
process of the caller does not change.
"""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import nn

from fp4dispatch.checkpoints.files.paths import CONFIG_FILE
from fp4dispatch.checkpoints.files.reader import Checkpoint
from fp4dispatch.errors import CheckpointError

SECONDS = 120.0
"""Time limit. The largest models take a few seconds."""

BYTES = 4 << 30
"""Memory limit, beyond the memory of the parent process."""

MAX_RESULT = 256 << 20

_LEFT_OUT = {
    "auto_map", "quantization_config", "compression_config", "attn_implementation", "_attn_implementation",
    "_attn_implementation_internal", "experts_implementation", "_experts_implementation",
    "_experts_implementation_internal", "_name_or_path", "name_or_path", "_commit_hash",
}  # fmt: skip
"""Keys that do not change the structure, but name code or repositories to download."""

_COUNT = re.compile(r"(?:^|_)(?:layers?|blocks?|experts?|depths?|stages)$")
"""Keys that are counts of modules."""

_FORBIDDEN = (
    "socket.", "subprocess.", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system",
    "pickle.find_class", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate",
    "ftplib.", "smtplib.", "urllib.Request", "webbrowser.open",
)  # fmt: skip
"""Audit events (https://docs.python.org/3/library/audit_events.html) that raise in the child."""

_T = TypeVar("_T")


def examine(checkpoint: Checkpoint, work: Callable[[nn.Module], _T], *, advice: str) -> _T:
    """Build a checkpoint's model on the meta device in a child process. Return the result of ``work``.

    Parameters
    ----------
    checkpoint
        Its ``config.json`` names one architecture of transformers.
    work
        Runs in the child; returns plain data that JSON can carry.
    advice
        What to do where there is no skeleton; the end of every error.

    Raises
    ------
    CheckpointError
        No architecture, one that transformers does not know, counts that the tensors do not bear out, and whatever
        transformers says against the configuration.
    """
    source = f"{checkpoint.path / CONFIG_FILE}"
    config = checkpoint.config(CONFIG_FILE) or {}
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise CheckpointError(f"{source}: no architecture named in it: {advice}")
    model_class = _model_class(source, architectures[0], advice)
    try:
        config = _without_code_keys(config)
        _check_counts(source, model_class, config, checkpoint, advice)
    except RecursionError:
        raise CheckpointError(f"{source}: nested too deeply: {advice}") from None
    answer = _in_child(lambda: work(_build(model_class, config)))
    if "error" in answer:
        import transformers

        raise CheckpointError(
            f"{source}: transformers {transformers.__version__} builds no {architectures[0]} from it: "
            f"{answer['error']}: {advice}"
        )
    found: _T = answer["found"]
    return found


def _model_class(source: str, name: str, advice: str) -> Any:
    """Return the class of an architecture: a model of transformers, or nothing."""
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(
            f"the model's layers are found with transformers, which is missing ({error}): {advice}"
        ) from None
    known = f"transformers {transformers.__version__}"
    try:
        found = getattr(transformers, name, None) if name.isidentifier() else None
    except Exception as error:  # it imports the model's module, which may lack a library
        raise CheckpointError(f"{source}: {known} cannot import {name}: {_first_line(error)}: {advice}") from error
    if found is None:
        raise CheckpointError(f"{source}: {known} does not know {name[:200]}: {advice}")
    base = transformers.PreTrainedModel
    if not isinstance(found, type) or not issubclass(found, base) or getattr(found, "config_class", None) is None:
        raise CheckpointError(f"{source}: {name} of {known} is no model: expected a PreTrainedModel: {advice}")
    return found


def _without_code_keys(config: Any) -> Any:
    """Copy a configuration without the keys that only name code, and with the floats that JSON cannot hold."""
    if isinstance(config, dict):
        if config.keys() == {"__float__"} and str(config["__float__"]).removeprefix("-") in ("Infinity", "NaN"):
            return float(config["__float__"])  # as transformers writes them
        return {key: _without_code_keys(value) for key, value in config.items() if key not in _LEFT_OUT}
    return [_without_code_keys(value) for value in config] if isinstance(config, list) else config


def _check_counts(source: str, model_class: Any, config: dict[str, Any], checkpoint: Checkpoint, advice: str) -> None:
    """Refuse to build much more than the file has tensors for."""
    tensors = len(checkpoint)
    most = max(1024, 4 * tensors)
    for key, value in _numbers(config):
        if _COUNT.search(key) and value > most and not _needs_no_tensors(model_class, key, value, checkpoint):
            raise CheckpointError(
                f"{source}: {key[:200]} is {value}, but the file has {tensors} tensors: expected at most {most}: the "
                f"configuration is of another model, or damaged: {advice}"
            )


def _needs_no_tensors(model_class: Any, key: str, value: float, checkpoint: Checkpoint) -> bool:
    """Whether a count is no number of modules: of experts that are rows of one tensor, or that no layer has (Doge)."""
    if not key.endswith("experts"):
        return False
    by_default = getattr(model_class.config_class, key, None) == value
    return by_default or any(list(checkpoint[name].shape[:1]) == [value] for name in checkpoint)


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, int | float]]:
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from _numbers(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, key)
    elif isinstance(value, int | float):
        yield key, value


def _build(model_class: Any, config: dict[str, Any]) -> nn.Module:
    """Build the model; runs in the child."""
    from transformers import CONFIG_MAPPING

    config_class, kind = model_class.config_class, config.get("model_type")
    if kind is not None:
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            raise ValueError(f"it does not know model_type {str(kind)[:80]!r}")
        config_class = CONFIG_MAPPING[kind]
    made = config_class.from_dict(config)
    made._attn_implementation = "eager"  # needs no kernel of anybody; the structure is the same
    with torch.device("meta"):
        model: nn.Module = model_class(made)
    return model


# ------------------------------------------------------------------------------------------------------- the child


def _in_child(work: Callable[[], Any]) -> dict[str, Any]:
    """Run in a forked child; return ``{"found": result}`` or ``{"error": text}``."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: a child that hangs is killed in time
        child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(writing, work)
    os.close(writing)
    try:
        raw = _read(reading, time.monotonic() + SECONDS)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if raw is None:
        return {"error": f"it takes more than {SECONDS:.0f} s"}
    try:
        answer = json.loads(raw)
    except ValueError:
        return {"error": f"its process ended with status {status}"}
    return answer if isinstance(answer, dict) else {"error": "no answer"}


def _read(descriptor: int, deadline: float) -> bytes | None:
    """Read to the end; None where that does not come in time, or is too long."""
    parts: list[bytes] = []
    size = 0
    while (left := deadline - time.monotonic()) > 0 and size <= MAX_RESULT:
        if select.select([descriptor], [], [], left)[0]:
            part = os.read(descriptor, 1 << 20)
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
    return None


def _answer(descriptor: int, work: Callable[[], Any]) -> None:
    """Work in the child and never return from it."""
    text = '{"error": "out of memory"}'
    try:
        _restrict_process()
        try:
            text = json.dumps({"found": work()})
        except MemoryError:
            pass
        except BaseException as error:  # whatever a configuration can make a library raise, SystemExit too
            text = json.dumps({"error": f"{type(error).__name__}: {_first_line(error)}"})
        data = memoryview(text.encode())
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os._exit(0)


def _restrict_process() -> None:
    """Restrict this process to what building a model needs. This cannot be undone."""
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent, stream)
    sys.dont_write_bytecode = True
    with suppress(ImportError):
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = True  # says so in its errors, before a socket is opened
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, int(SECONDS) + 5)
    _limit(resource.RLIMIT_DATA, _data_bytes() + BYTES)
    sys.addaudithook(_refuse)


def _limit(what: int, soft: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _data_bytes() -> int:
    """Return what RLIMIT_DATA counts of this process: the child shares it with its parent."""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - Path.open would do the same
        return int(file.read().split()[5]) * resource.getpagesize()


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        flags = args[2] if isinstance(args[2], int) else 0
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if writes and args[0] != os.devnull:
            raise PermissionError(f"a configuration may not write files ({str(args[0])[:80]})")
    elif event == "import":
        if str(args[0]).startswith("transformers_modules"):
            raise PermissionError("a configuration may not load code of a repository")
    elif event.startswith(_FORBIDDEN):
        raise PermissionError(f"a configuration may not use the network, files or processes ({event})")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300]
