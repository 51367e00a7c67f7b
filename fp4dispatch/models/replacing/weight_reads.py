"""Find layers that a model uses in other ways than calling them, from the source of its modules.

T5 casts to ``self.wo.weight.dtype``. Mamba multiplies ``self.dt_proj.weight``. Such code fails or computes wrong values
if the layer holds packed weights. No test run is needed: this module parses the code that ``forward`` can reach. It
follows expressions like ``self.layers[i].wo`` through local names, loops and helper functions. For code without source
it uses the names in the byte code, and assumes a read when in doubt. Code that multiplies what ``named_parameters()``
of a module gives reads all layers in it; code that only asks for a dtype or a device reads none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import FunctionType

from torch import nn

from fp4dispatch.models.replacing.source_scan import FOREIGN, Path, Read, functions_of, mentioned, reads_of

_ENTRY = re.compile(r"forward|__call__|(get_\w+_features|generate|prepare_inputs|encode|decode|predict|sample)\w*")
NEVER = frozenset({"__init__", "_init_weights", "init_weights", "reset_parameters", "extra_repr", "__repr__"})
"""Methods that do not run in a forward."""


def weight_reads(model: nn.Module) -> dict[int, str]:
    """Return how linear layers are used besides being called, by ``id`` of the layer; others are not in it."""
    classes: dict[type, list[FunctionType]] = {}
    for module in model.modules():
        classes.setdefault(type(module), [])
    names: set[str] = set()
    seen: set[FunctionType] = set()
    while True:  # collect the functions that entries can reach
        fresh = {function: cls for cls in classes for function in _methods(cls, names) if function not in classes[cls]}
        for function, cls in fresh.items():
            classes[cls].append(function)
            if function not in seen:
                seen.add(function)
                names |= mentioned(function.__code__)
        if not fresh:
            break
    found: dict[int, str] = {}
    reads = {cls: reads_of(cls, functions) for cls, functions in classes.items()}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            continue  # whether its own code can be replaced is another question
        for read in (*reads[type(module)], *_patched(module)):
            for layer in _resolve(module, read.path):
                if isinstance(layer, nn.Linear) and all(guard.may_hold(module) for guard in read.guards):
                    found.setdefault(id(layer), f"{read.where} {read.what}, which a quantised layer cannot serve")
    return found


def _resolve(module: nn.Module, path: Path) -> Iterator[nn.Module]:
    if not path:
        yield module
        return
    head, rest = path[0], path[1:]
    if head == "**":
        yield from module.modules()
        return
    children = module._modules.values() if head == "*" else [module._modules.get(head)]
    for child in children:
        if child is not None:
            yield from _resolve(child, rest)


def _methods(cls: type, names: set[str]) -> Iterator[FunctionType]:
    """Yield the methods and properties of a class and its bases with these names, and its entry points."""
    for base in cls.__mro__:
        if f"{base.__module__}.".startswith(FOREIGN) or base is object:
            continue
        for name, member in vars(base).items():
            # The others get no module; calls of them are followed.
            bound = not isinstance(member, (staticmethod, classmethod))
            if bound and name not in NEVER and (name in names or _ENTRY.fullmatch(name)):
                yield from functions_of(member)


def _patched(module: nn.Module) -> Iterator[Read]:
    """Yield the reads of a ``forward`` that was put on the module itself."""
    for function in functions_of(vars(module).get("forward")):
        if not f"{function.__module__}.".startswith(FOREIGN):
            yield from reads_of(type(module), (function,))
