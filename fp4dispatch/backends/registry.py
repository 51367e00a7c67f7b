"""Which backends there are: built-ins, then plug-ins from the entry-point group ``fp4dispatch.backends``.

A backend that fails to import or breaks the contract stays in the list as a rejected candidate, with its exception as
the reason. It never stops the others. A plug-in whose name is taken is listed so too, under a name that says whose it
is.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any

from fp4dispatch.backends.base import Backend
from fp4dispatch.errors import PluginError, UnknownBackendError
from fp4dispatch.machine.system import System
from fp4dispatch.policy.catalogue import Alias, catalogue
from fp4dispatch.problem import ACTIVATIONS, OPS, Activation, Problem
from fp4dispatch.problem.decision import Reason
from fp4dispatch.settings import did_you_mean

GROUP = "fp4dispatch.backends"
AUTO = "auto"

BUILTINS: dict[str, str] = {
    "cublaslt": "fp4dispatch.backends.libraries.cublaslt:CublasLtBackend",
    "cutlass": "fp4dispatch.backends.own.cutlass:CutlassBackend",
    "cudnn": "fp4dispatch.backends.libraries.cudnn:CudnnBackend",
    "w4a16": "fp4dispatch.backends.own.w4:W4A16Backend",
    "w4a8": "fp4dispatch.backends.own.w4:W4A8Backend",
    "w4a8_expanded": "fp4dispatch.backends.w4a8_expanded:W4A8ExpandedBackend",
    "w8a16": "fp4dispatch.backends.own.w8a16:W8A16Backend",
    "w8a8": "fp4dispatch.backends.own.w8a8:W8A8Backend",
    "flashinfer_cudnn": "fp4dispatch.backends.libraries.flashinfer:FlashInferCudnnBackend",
    "flashinfer_cutlass": "fp4dispatch.backends.libraries.flashinfer:FlashInferCutlassBackend",
    "flashinfer_trtllm": "fp4dispatch.backends.libraries.flashinfer:FlashInferTrtllmBackend",
    "flashinfer_cutedsl": "fp4dispatch.backends.libraries.flashinfer:FlashInferCuteDslBackend",
    "flashinfer_b12x": "fp4dispatch.backends.libraries.flashinfer:FlashInferB12xBackend",
    "flashinfer_deepgemm": "fp4dispatch.backends.libraries.flashinfer_deepgemm:FlashInferDeepGemmBackend",
    "reference": "fp4dispatch.backends.reference:ReferenceBackend",
}
"""Name to ``module:Class``, imported on first use. A name in ``policy/capabilities.toml`` that is not here is known to
the policy and unavailable."""


class BrokenBackend:
    """A backend that could not be loaded: a candidate whose one reason is the exception."""

    def __init__(self, name: str, origin: str, error: BaseException) -> None:
        self.name = name
        self.error = error
        self.reason = Reason(
            "UNAVAILABLE",
            f"{origin} cannot be loaded: {type(error).__name__}: {error}",
            f"repair or uninstall {origin.split(':')[0]}",
        )

    def supports(self, problem: Problem, system: System) -> tuple[Reason, ...]:
        """Return the exception as the reason."""
        return (self.reason,)

    def activation_for(self, problem: Problem) -> Activation | None:
        """Return None: it runs nothing."""
        return None


AnyBackend = Backend | BrokenBackend


@functools.cache
def backends() -> Mapping[str, AnyBackend]:
    """Return every backend by name: built-ins in their order, then plug-ins by name. Loaded once."""
    found = builtins() | plugins(entry_points(group=GROUP))
    return MappingProxyType(found)


def is_plugin(name: str) -> bool:
    """Whether a backend comes from another package. What is not built in has to pass the self-check on a CPU too."""
    return name not in BUILTINS


def builtins() -> dict[str, AnyBackend]:
    """Return the backends of this package."""
    return {name: _load(name, target, f"built-in {target}") for name, target in BUILTINS.items()}


def plugins(points: Iterable[EntryPoint]) -> dict[str, AnyBackend]:
    """Return the backends of other packages. An error in one does not affect the others.

    One that claims a name of this package is rejected under ``NAME of DISTRIBUTION``. Of several that claim one name
    all are rejected, under that name: nothing says which one is meant.
    """
    ours = {*BUILTINS, *catalogue().backends, *catalogue().aliases, AUTO}
    by_name: dict[str, list[tuple[EntryPoint, str]]] = {}
    for point in points:
        by_name.setdefault(point.name, []).append((point, _owner(point)))
    found: dict[str, AnyBackend] = {}
    for name, claims in sorted(by_name.items()):
        if name in ours:
            for point, owner in claims:
                error = PluginError(
                    f"the name {name!r} is fp4dispatch's own: rename the entry point in the group {GROUP}"
                )
                found[f"{name} of {owner}"] = BrokenBackend(f"{name} of {owner}", f"{owner}: {point.value}", error)
        elif len({(owner, point.value) for point, owner in claims}) > 1:
            owners = ", ".join(sorted(f"{owner} ({point.value})" for point, owner in claims))
            error = PluginError(f"the name {name!r} clashes: it is claimed by {owners}; uninstall all of them but one")
            found[name] = BrokenBackend(name, claims[0][1], error)
        else:
            point, owner = claims[0]
            found[name] = _load(name, point.value, f"{owner}: {point.value}")
    return found


def _owner(point: EntryPoint) -> str:
    """Return the distribution of an entry point, with its version; its import path if the metadata do not say."""
    try:
        return f"{point.dist.name} {point.dist.version}" if point.dist else point.value
    except Exception:  # damaged metadata of somebody else's package
        return point.value


def _load(name: str, target: str, origin: str) -> AnyBackend:
    module, _, attribute = target.partition(":")
    try:
        made: Any = importlib.import_module(module)
        for part in attribute.split("."):
            made = getattr(made, part)
        return _checked(name, made())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() at import too: one module must not end the process of all
        return BrokenBackend(name, origin, error)


def _checked(name: str, made: Any) -> Backend:
    """Return an object that is a backend of that name, or raise TypeError."""
    if not isinstance(made, Backend):
        raise TypeError(f"{type(made).__name__} is not a fp4dispatch.backends.base.Backend")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise TypeError(f"{name!r} is not a backend name: use lower-case letters, digits and _")
    if made.name != name:
        raise TypeError(f"its name is {made.name!r}, its entry point says {name!r}")
    if not isinstance(made.activations, Mapping):
        raise TypeError(f"activations is {made.activations!r}: need a dict from ops to tuples of formats")
    for op, formats in made.activations.items():
        if op not in OPS or not isinstance(formats, tuple) or not formats or not set(formats) <= set(ACTIVATIONS[1:]):
            raise TypeError(
                f"activations[{op!r}] is {formats!r}: need one of the ops {OPS} and a tuple of {ACTIVATIONS[1:]}"
            )
    for attribute, kind in (("auto", bool), ("plans_by_m", bool), ("layout", str), ("layout_name", str)):
        value = getattr(made, attribute)
        if not isinstance(value, kind):
            raise TypeError(f"{attribute} is {value!r}: need a {kind.__name__}")
    _check_layout(name, made)
    return made


def _check_layout(name: str, made: Backend) -> None:
    """Refuse a plug-in that claims a layout of ours: a layer would hand its tensors to our kernels."""
    module = type(made).__module__
    if not is_plugin(name) or made.layout_name == name:
        return
    if made.layout_name in BUILTINS or made.layout_name in _builtin_layouts():
        raise TypeError(
            f"layout is {made.layout_name!r}, which is fp4dispatch's own: leave it out, or use a name of {module}'s own"
        )


@functools.cache
def _builtin_layouts() -> frozenset[str]:
    return frozenset(b.layout_name for b in builtins().values() if isinstance(b, Backend))


# --------------------------------------------------------------------------------------------------------------- names


def known() -> tuple[str, ...]:
    """Return every name that may be asked for: ``auto``, backends, declared backends, then other projects' names."""
    named = (name for name in backends() if " of " not in name)  # else a plug-in with a name of ours
    return tuple(dict.fromkeys((AUTO, *catalogue().backends, *named, *catalogue().aliases)))


def canonical(name: str) -> tuple[str, Alias | None]:
    """Return the backend that a user's word means, and the alias it was reached by.

    ``-`` and ``_`` are the same, and so are upper and lower case.

    Raises
    ------
    UnknownBackendError
        With the nearest known name, and all of them.
    """
    word = name.strip().lower().replace("-", "_")
    alias = catalogue().aliases.get(word)
    if alias is not None:
        return alias.backend, alias
    names = known()
    if word not in names:
        raise UnknownBackendError(f"{name!r} is not a backend.{did_you_mean(word, names)} Known: {', '.join(names)}")
    return word, None


def instance(name: str) -> Backend:
    """Return the one instance of a backend, by its canonical name.

    Raises
    ------
    UnknownBackendError
        If there is none of that name, or it could not be loaded.
    """
    backend = backends().get(name)
    if backend is None:
        raise UnknownBackendError(f"{name!r} is not part of this fp4dispatch. Available: {', '.join(backends())}")
    if isinstance(backend, BrokenBackend):
        raise UnknownBackendError(backend.reason.text) from backend.error
    return backend
