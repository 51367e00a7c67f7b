"""Which backend was asked for: by the argument, by the environment, or none (``auto``). No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fp4dispatch.backends import registry
from fp4dispatch.dispatch.report import ARGUMENT
from fp4dispatch.dispatch.whatif import default_scaling
from fp4dispatch.errors import BackendUnsupportedError, SettingsError, UnknownBackendError
from fp4dispatch.machine import log
from fp4dispatch.policy import resolve
from fp4dispatch.policy.catalogue import Alias
from fp4dispatch.problem import OPS, Op, Problem
from fp4dispatch.settings import SETTINGS, settings

SETTING = {"nvfp4_gemm": "fp4_gemm_backend", "fp8_gemm": "fp8_backend"}
"""The setting that names a backend, by op."""

Request = tuple[str, str, tuple[str, ...]]
"""The name; who asked for it (:data:`~fp4dispatch.dispatch.report.ARGUMENT`, a variable, ``auto``); the disabled."""


def requested(op: Op, backend: object) -> Request:
    """Return the name that was asked for (or ``auto``), who asked, and the disabled backends.

    Raises
    ------
    UnknownBackendError, SettingsError
        If a name, from the argument or from the environment, is not a backend.
    """
    disabled = tuple(canonical_all(settings.disable or (), SETTINGS["disable"].name))
    if backend is not None and not isinstance(backend, str):
        raise UnknownBackendError(
            f"backend={backend!r} is a {type(backend).__name__}, not a name. Known: {', '.join(registry.known())}"
        )
    if backend:
        name, alias = registry.canonical(backend)
        requested_by = ARGUMENT
    else:
        requested_by = SETTINGS[SETTING[op]].name
        name, alias = _named_by(requested_by, getattr(settings, SETTING[op]))
    if alias is not None:
        log.once(("alias", alias.name), logging.INFO, f"{alias.name} means {alias.backend} here: {alias.note}")
    return (name, requested_by if name != registry.AUTO else registry.AUTO, disabled)


def check_request(op: Op, backend: object) -> None:
    """Refuse, before a model is changed, what :func:`~fp4dispatch.dispatch.choose.select` refuses for every problem.

    That is: an unknown backend name, from the argument or from the environment; a backend that never runs the op; and
    a variable of ours with a value that cannot be understood.

    Raises
    ------
    UnknownBackendError, SettingsError
        If the name is unknown, or a value cannot be understood.
    BackendUnsupportedError
        If the backend is disabled, or runs other ops only.
    """
    settings.check()
    name, requested_by, disabled = requested(op, backend)
    by = "" if requested_by == ARGUMENT else f" by {requested_by}"
    if name in disabled:
        raise BackendUnsupportedError(
            f'backend="{name}" was requested{by}, and {SETTINGS["disable"].name} forbids it: change one of both'
        )
    found = registry.backends().get(name)
    if found is not None and not isinstance(found, registry.BrokenBackend) and not _runs(found, op):
        runs = ", ".join(other for other in OPS if _runs(found, other)) or "nothing"
        others = ", ".join(n for n, candidate in registry.backends().items() if _runs(candidate, op))
        raise BackendUnsupportedError(
            f'backend="{name}" was requested{by} and never runs {op}; it runs {runs}. For {op}: {others}'
        )


def _runs(backend: resolve.SupportsProblem, op: Op) -> bool:
    """Whether a backend has any activation format for an op. True where it raises: the decision handles that."""
    try:
        return backend.activation_for(Problem(op, 1, 16, 16, scaling=default_scaling(op))) is not None
    except Exception:
        return True


def _named_by(variable: str, value: str) -> tuple[str, Alias | None]:
    try:
        return registry.canonical(value)
    except UnknownBackendError as error:
        raise SettingsError(f"{variable}={error}") from None


def canonical_all(names: Iterable[str], variable: str = "") -> list[str]:
    """Return our names of backends that are disabled; SettingsError for ``auto``, which is no backend."""
    found = [_named_by(variable, name)[0] if variable else registry.canonical(name)[0] for name in names]
    if registry.AUTO in found:
        raise SettingsError(f"{variable or 'disabled'}: auto is no backend and cannot be disabled")
    return found
