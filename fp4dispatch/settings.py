"""The environment variables that fp4dispatch reads. No other file reads ``os.environ`` (a test enforces it).

Values are read lazily, at each use, and parsed strictly: an invalid value raises
:class:`~fp4dispatch.errors.SettingsError`. It is never replaced by a default.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4dispatch.errors import SettingsError

PREFIX = "FP4DISPATCH_"
_OURS = (PREFIX, "FP4_GEMM_")
"""Prefixes of the variables of this package."""


@dataclass(frozen=True)
class Setting:
    """One environment variable: name, parser, default as text, and one sentence for docs/reference/settings.md."""

    name: str
    parse: Callable[[str, str], Any]
    default: str
    doc: str


def _text(name: str, value: str) -> str:
    return value


def _path(name: str, value: str) -> Path:
    """Return an absolute path: compilers run in another folder, and every folder above a cache is checked."""
    if "\0" in value:
        raise SettingsError(f"{name}={value!r} is not a path: it contains a NUL byte")
    try:
        return Path(value).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # OSError: a relative path, and the current folder is gone
        raise SettingsError(f"{name}={value!r} is not a path: {error}") from None


def _switch(name: str, value: str) -> bool:
    words = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}
    try:
        return words[value.strip().lower()]
    except KeyError:
        raise SettingsError(f"{name}={value!r} is not a switch: use 1/on/true/yes or 0/off/false/no") from None


def _choice(*allowed: str) -> Callable[[str, str], str]:
    def parse(name: str, value: str) -> str:
        word = value.strip().lower()
        if word not in allowed:
            raise SettingsError(
                f"{name}={value!r} is not known.{did_you_mean(word, allowed)} Known: {', '.join(allowed)}"
            )
        return word

    return parse


def _jobs(name: str, value: str) -> int:
    text = value.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) >= 1):
        raise SettingsError(f"{name}={value!r} is not a number of jobs: need an integer from 1 to 999999")
    return int(text)


def _names(name: str, value: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip().lower() for part in value.split(",")) if word)


SETTINGS: dict[str, Setting] = {
    "fp4_gemm_backend": Setting(
        "FP4_GEMM_BACKEND",
        _text,
        "auto",
        "Backend of NVFP4 GEMMs: one of our names or an SGLang/FlashInfer/vLLM name; honoured or refused.",
    ),
    "fp8_backend": Setting(PREFIX + "FP8_BACKEND", _text, "auto", "Backend of FP8 GEMMs; honoured or refused."),
    "disable": Setting(
        PREFIX + "DISABLE", _names, "", "Comma-separated backends that are never used, not even by name."
    ),
    "pdl": Setting(
        PREFIX + "PDL",
        _choice("auto", "off"),
        "auto",
        "`off` launches every kernel without PDL; `auto` uses PDL only where the binary has its barriers proven.",
    ),
    "selfcheck": Setting(
        PREFIX + "SELFCHECK",
        _choice("off", "auto", "force"),
        "auto",
        "Numeric self-check of a backend before `auto` trusts it. `auto` keeps verdicts in the cache, `force` checks "
        "again in each process, `off` checks nothing.",
    ),
    "tuned": Setting(
        PREFIX + "TUNED",
        _choice("off", "auto"),
        "auto",
        "`off` ignores tuned times, shipped ones too; `auto` lets what is faster replace the rules' choice.",
    ),
    "fp8_copy": Setting(
        PREFIX + "FP8_COPY",
        _switch,
        "0",
        "`1` allows NVFP4 layers a copy of their weights in FP8, 8 bits each, for many tokens on sm_89 and sm_90.",
    ),
    "cache_dir": Setting(
        PREFIX + "CACHE_DIR", _path, "", "Folder of compiled kernels; default: the user cache folder."
    ),
    "arch": Setting(
        PREFIX + "ARCH",
        _text,
        "",
        "Pretend that the GPU has this capability (e.g. `12.0`) when building or explaining.",
    ),
    "jit": Setting(
        PREFIX + "JIT", _switch, "1", "`0` forbids compiling at run time; only finished cache entries are used."
    ),
    "log": Setting(
        PREFIX + "LOG",
        _choice("debug", "info", "warning", "error", "off"),
        "",
        "Level of the `fp4dispatch` logger with a handler on stderr; unset leaves logging to the application.",
    ),
    "nvtx": Setting(
        PREFIX + "NVTX",
        _switch,
        "0",
        "`1` puts an NVTX range around each launch of a layer: op, sizes, backend. Set it before the first call.",
    ),
    "nvcc": Setting(PREFIX + "NVCC", _path, "", "The nvcc to compile with, ahead of every other place."),
    "max_jobs": Setting("MAX_JOBS", _jobs, "", "Upper bound on parallel compile jobs."),
    "cuda_home": Setting("CUDA_HOME", _path, "", "CUDA toolkit folder."),
    "cuda_visible_devices": Setting(
        "CUDA_VISIBLE_DEVICES", _text, "", "Which GPUs exist for this process (indices, UUIDs, MIG)."
    ),
    "cuda_device_order": Setting(
        "CUDA_DEVICE_ORDER", _text, "FASTEST_FIRST", "Numbering of GPUs: `FASTEST_FIRST` or `PCI_BUS_ID`."
    ),
    "no_color": Setting("NO_COLOR", _text, "", "Any non-empty value turns colours off."),
    "xdg_cache_home": Setting("XDG_CACHE_HOME", _path, "", "Parent of the default cache folder."),
    "cutlass_path": Setting(
        "CUTLASS_PATH", _path, "", "CUTLASS checkout to compile against, ahead of the one in flashinfer-python."
    ),
}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""


_ignored: set[str] = set()


class Settings:
    """Typed, lazy view of the environment: ``settings.max_jobs`` is an int, or None where unset or empty."""

    def __getattr__(self, key: str) -> Any:
        try:
            setting = SETTINGS[key]
        except KeyError:
            raise AttributeError(key) from None
        raw = None if key in _ignored else os.environ.get(setting.name)
        if raw is not None and key in ("cuda_visible_devices", "cuda_device_order"):
            return raw  # unset and empty differ: empty hides every GPU
        if raw is None or raw == "":
            return setting.parse(setting.name, setting.default) if setting.default else None
        return setting.parse(setting.name, raw)

    def errors(self) -> dict[str, str]:
        """Return the error of each invalid setting, by its key.

        Backend names and GPU architectures are plain text here; :mod:`fp4dispatch.dispatch.choose` checks them.
        """
        found = {}
        for key in SETTINGS:
            try:
                getattr(self, key)
            except SettingsError as error:
                found[key] = str(error)
        return found

    def check(self) -> None:
        """Check every ``FP4DISPATCH_*`` variable that is set.

        Raises
        ------
        SettingsError
            For the first invalid one.
        """
        for key, setting in SETTINGS.items():
            if setting.name.startswith(PREFIX) and setting.name in os.environ:
                getattr(self, key)

    def unknown(self) -> tuple[str, ...]:
        """Return one sentence per set variable that has our prefix, in any case, but is not a setting."""
        names = [setting.name for setting in SETTINGS.values()]
        return tuple(
            f"{name} is set but is not a setting of fp4dispatch.{did_you_mean(name.upper(), names)}"
            for name in sorted(os.environ)
            if name.upper().startswith(_OURS) and name not in names
        )

    def is_set(self, key: str) -> bool:
        """Whether the variable is present and not empty."""
        return bool(os.environ.get(SETTINGS[key].name))

    def texts(self, keys: Iterable[str]) -> tuple[str | None, ...]:
        """Return the texts of settings, not parsed. What was made under them holds until one is another text."""
        return tuple(None if key in _ignored else os.environ.get(SETTINGS[key].name) for key in keys)

    def environment(self) -> dict[str, str]:
        """Return a copy of the environment for child processes, without the ignored settings."""
        ignored = {SETTINGS[key].name for key in _ignored}
        return {name: value for name, value in os.environ.items() if name not in ignored}

    @contextmanager
    def ignoring(self, keys: Iterable[str]) -> Iterator[None]:
        """Treat these settings as unset inside the block. ``doctor`` uses it after reporting an invalid one."""
        added = set(keys) - _ignored
        _ignored.update(added)
        try:
            yield
        finally:
            _ignored.difference_update(added)


settings = Settings()


def markdown_table() -> str:
    """Return the settings as the table of docs/reference/settings.md."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    rows += [f"| `{s.name}` | {f'`{s.default}`' if s.default else ''} | {s.doc} |" for s in SETTINGS.values()]
    return "\n".join(rows)
