"""Checks the meaning of settings: known backend names, an existing arch, existing files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fp4dispatch.backends.registry import AUTO, BUILTINS
from fp4dispatch.errors import InputError
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem import Op
from fp4dispatch.problem.arch import Arch
from fp4dispatch.settings import SETTINGS, did_you_mean

_OP: dict[str, Op] = {"fp4_gemm_backend": "nvfp4_gemm", "fp8_backend": "fp8_gemm"}


def wrong_values(values: Mapping[str, Any], plugins: Iterable[str]) -> Iterator[str]:
    """Yield one sentence per setting without meaning. Imports no backend, because backends may need torch.

    Parameters
    ----------
    values
        The parsed settings, by key.
    plugins
        Names of the backends that other packages add.
    """
    names = tuple(dict.fromkeys((AUTO, *catalogue().backends, *BUILTINS, *plugins, *catalogue().aliases)))
    meant = {key: _canonical(values.get(key)) for key in _OP}
    disabled = {_canonical(word) for word in values.get("disable") or ()}
    for key, op in _OP.items():
        variable, word = SETTINGS[key].name, values.get(key)
        if not word:
            continue
        if meant[key] not in names:
            near = did_you_mean(str(meant[key]), names)
            yield f"{variable}={word!r} is not a backend.{near} Known: {', '.join(names)}"
        elif any(c.backend == meant[key] for c in catalogue().capabilities) and not any(
            c.backend == meant[key] and c.op == op for c in catalogue().capabilities
        ):
            yield f"{variable}={word!r}: {meant[key]} never runs {op}"
        elif meant[key] in disabled:
            yield f"{variable}={word!r} names a backend that {SETTINGS['disable'].name} forbids: nothing can run"
    for word in values.get("disable") or ():
        if _canonical(word) == AUTO:
            yield f"{SETTINGS['disable'].name}: auto is no backend and cannot be disabled"
        elif _canonical(word) not in names:
            near = did_you_mean(word, names)
            yield f"{SETTINGS['disable'].name}: {word!r} is not a backend.{near} Known: {', '.join(names)}"
    yield from _arch(values.get("arch"))
    yield from _paths(values)


def _canonical(word: str | None) -> str | None:
    if word is None:
        return None
    name = word.strip().lower().replace("-", "_")
    alias = catalogue().aliases.get(name)
    return alias.backend if alias else name


def _arch(text: str | None) -> Iterator[str]:
    if not text:
        return
    try:
        Arch.real(text)
    except InputError as error:
        yield f"{SETTINGS['arch'].name}={text!r}: {error}"


def _paths(values: Mapping[str, Any]) -> Iterator[str]:
    for key, kind in (("nvcc", "file"), ("cuda_home", "folder"), ("cutlass_path", "folder")):
        path = values.get(key)
        if path is not None and not (path.is_file() if kind == "file" else path.is_dir()):
            yield f"{SETTINGS[key].name}={str(path)!r}: there is no such {kind}"
    order = values.get("cuda_device_order")
    if order and order not in ("FASTEST_FIRST", "PCI_BUS_ID"):
        yield f"{SETTINGS['cuda_device_order'].name}={order!r} is not known. Known: FASTEST_FIRST, PCI_BUS_ID"
