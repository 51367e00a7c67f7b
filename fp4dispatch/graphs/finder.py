"""Find what CUDA graphs capture of a model, and where they break: by registered class or by argument, never by guess.

What is captured is the stack of decoder layers between embedding and final norm. Breaks are the modules that run
eagerly between graphs: attention, whose kernels and metadata depend on the requests of a batch. Embedding, final norm,
LM head and logits run eagerly, outside of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from fp4dispatch.errors import InnerNotFoundError, InputError
from fp4dispatch.formats.checks import check_module

ATTRIBUTE = "__fp4dispatch_inner__"
"""A model may have a method of this name, which takes nothing and returns an :class:`Inner`."""

Marked = nn.Module | str | type[nn.Module]
"""A module of the model, its dotted name, or a class: each instance of it."""


@dataclass(frozen=True, eq=False)
class Inner:
    """What CUDA graphs capture of a model.

    Parameters
    ----------
    module
        The module whose ``forward`` runs embedding, layers and final norm, e.g. ``LlamaModel``; or, without layers,
        what is captured as a whole.
    name
        Its dotted name in the model; empty for the model itself.
    layers
        What is captured, in the order in which it runs. Empty: ``module`` as a whole.
    breaks
        The modules that run eagerly between graphs, in the order of the modules. Empty: one graph for everything.
    """

    module: nn.Module
    name: str
    layers: tuple[nn.Module, ...]
    breaks: tuple[nn.Module, ...]


Finder = Callable[[nn.Module], Inner]


def by_attributes(inner: str, layers: str, *breaks: str, count: str = "") -> Finder:
    """Return a finder that reads attributes.

    Parameters
    ----------
    inner
        Dotted name of the inner module in the model; empty for the model itself.
    layers
        Name of the ``ModuleList`` of layers in the inner module.
    breaks
        Dotted names of the breaks in each layer.
    count
        Name of the field of ``inner.config`` that says how many of the layers run; empty: all.
    """

    def find(model: nn.Module) -> Inner:
        module = _submodule(model, inner)
        held = _submodule(module, layers)
        if not isinstance(held, nn.ModuleList):
            raise _changed(model, f"{layers} is a {type(held).__name__}, not a ModuleList")
        stack = tuple(held)
        if count:
            running = getattr(getattr(module, "config", None), count, None)
            if not isinstance(running, int):
                raise _changed(model, f"its config has no number {count}")
            stack = stack[:running]
        found = dict.fromkeys(_submodule(layer, name) for layer in stack for name in breaks)
        return Inner(module, inner, stack, tuple(found))

    return find


_finders: dict[str, Finder] = {}
"""Finders by qualified name of the class of the model, so that no library is imported for it."""


def register_finder(cls: type[nn.Module] | str, finder: Finder) -> None:
    """Say how the inner stack of a class of models is found. A later call for the class replaces an earlier one.

    Subclasses of the class have the finder too, unless they define ``forward`` anew: then their stack may be another.

    Parameters
    ----------
    cls
        The class of the whole model, or its qualified name, e.g.
        ``transformers.models.llama.modeling_llama.LlamaForCausalLM``.
    finder
        Takes the model and returns its :class:`Inner`. :func:`by_attributes` makes one.

    Raises
    ------
    InputError
        If ``cls`` is neither a class of modules nor a qualified name, or the finder cannot be called.
    """
    if isinstance(cls, type) and issubclass(cls, nn.Module):
        name = _qualified(cls)
    elif isinstance(cls, str) and "." in cls:
        name = cls
    else:
        raise InputError(f"cls={cls!r:.80}; need a class of torch.nn.Module, or its qualified name as text")
    if not callable(finder):
        raise InputError(f"finder={finder!r:.80}; need a function from the model to an Inner, e.g. by_attributes(...)")
    _finders[name] = finder


def find_inner(
    model: nn.Module,
    *,
    inner: nn.Module | str | None = None,
    layers: Sequence[Marked] | None = None,
    breaks: Sequence[Marked] | None = None,
) -> Inner:
    """Return what CUDA graphs capture of a model, and where they break.

    Parameters
    ----------
    model
        Any module. Without ``inner``, its method ``__fp4dispatch_inner__`` or the finder of its class answers.
    inner
        The module to capture, or its dotted name. Then ``breaks`` has to be given as well; it may be empty.
    layers
        The layers that are captured, in the order in which they run, if not all of ``inner`` is. With ``inner`` only.
    breaks
        The modules that run eagerly between graphs: modules, dotted names, or classes (each instance inside).
        Replaces what a finder says.

    Raises
    ------
    InnerNotFoundError
        If nothing says what the inner stack of this class is, or the class is not what its finder expects.
    InputError
        If an argument names nothing, lies outside of the inner module, or breaks lie inside one another.
    """
    check_module("model", model)
    if inner is not None:
        if breaks is None:
            raise InputError("inner= without breaks=: say what runs eagerly between graphs; breaks=[] for one graph")
        return _checked(model, _explicit(model, inner, layers, breaks))
    if layers is not None:
        raise InputError("layers= without inner=: say which module runs them")
    found = _asked(model)
    if breaks is not None:
        found = Inner(found.module, found.name, found.layers, _marked("breaks", found.module, breaks))
    return _checked(model, found)


def _asked(model: nn.Module) -> Inner:
    """Ask the model, or the finder of its class."""
    own = getattr(type(model), ATTRIBUTE, None)
    finder: Finder | None = own if callable(own) else _finder_of(type(model))
    if finder is None:
        anew = any(_qualified(base) in _finders for base in type(model).__mro__)
        why = "it defines forward anew, so the finder of its base does not hold" if anew else "no finder is registered"
        wrapped = next((name for name in ("_orig_mod", "module", "base_model") if name in model._modules), "")
        unwrap = f"enable graphs on the module that it wraps (.{wrapped}); or " if wrapped else ""
        raise InnerNotFoundError(
            f"{_qualified(type(model))}: {why}. What to capture of it is not known, and is not guessed."
            f"\n  {unwrap}pass inner='model' and breaks=[the attention modules, or their class], with your "
            "names; or register_finder(type(model), by_attributes('model', 'layers', 'self_attn'))"
        )
    found = finder(model)
    if not isinstance(found, Inner):
        raise InputError(f"the finder of {_qualified(type(model))} returned a {type(found).__name__}; need an Inner")
    return found


def _finder_of(cls: type[nn.Module]) -> Finder | None:
    for base in cls.__mro__:
        finder = _finders.get(_qualified(base))
        if finder is not None:
            same = getattr(cls, "forward", None) is getattr(base, "forward", None)
            return finder if same else None
    return None


def _explicit(
    model: nn.Module, inner: nn.Module | str, layers: Sequence[Marked] | None, breaks: Sequence[Marked]
) -> Inner:
    names = {module: name for name, module in model.named_modules()}
    (module,) = _marked("inner", model, [inner])
    stack = () if layers is None else _marked("layers", module, layers)
    if layers is not None and not stack:
        raise InputError("layers=[] captures nothing: leave it out to capture all of inner")
    return Inner(module, names[module], stack, _marked("breaks", module, breaks))


def _marked(what: str, root: nn.Module, marks: Iterable[Marked]) -> tuple[nn.Module, ...]:
    """Return the modules that marks name inside a module, in the order of the modules; layers keep the given order."""
    modules = dict(root.named_modules())
    found: dict[nn.Module, None] = {}
    if isinstance(marks, str):
        raise InputError(f"{what}={marks!r}: need a list of names")
    for mark in marks:
        if isinstance(mark, str):
            hits = [modules[mark]] if mark in modules else []
        elif isinstance(mark, type):
            hits = [module for module in modules.values() if isinstance(module, mark)]
        else:
            hits = [module for module in modules.values() if module is mark]
        if not hits:
            shown = mark if isinstance(mark, str) else getattr(mark, "__name__", type(mark).__name__)
            raise InputError(f"{what}: {shown} is no module inside {type(root).__name__}")
        found |= dict.fromkeys(hits)
    return tuple(found) if what == "layers" else tuple(module for module in modules.values() if module in found)


def _checked(model: nn.Module, found: Inner) -> Inner:
    """Refuse a stack that lies outside of the model, and breaks that are no part of it or lie in one another."""
    if not any(module is found.module for module in model.modules()):
        raise InputError(
            f"the inner module ({type(found.module).__name__}) is no part of {type(model).__name__}: "
            "pass one of its modules"
        )
    roots = found.layers or (found.module,)
    inside = {module for root in roots for module in root.modules()}
    outside = [each for each in (*found.layers, *found.breaks) if each not in set(found.module.modules())]
    outside += [each for each in found.breaks if each not in inside]
    if outside:
        raise InputError(
            f"{type(outside[0]).__name__} is marked, but is no part of what is captured: mark modules inside of "
            f"{type(found.module).__name__} and its layers"
        )
    if any(each in roots for each in found.breaks):
        raise InputError("a break is all of a captured layer: nothing would be captured of it; mark a module inside")
    for each in found.breaks:
        if held := next((other for other in each.modules() if other is not each and other in found.breaks), None):
            raise InputError(f"the break {type(held).__name__} lies inside the break {type(each).__name__}: mark one")
    return found


def _submodule(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        raise _changed(module, f"it has no module {name!r}") from None


def _changed(model: nn.Module, what: str) -> InnerNotFoundError:
    return InnerNotFoundError(
        f"{_qualified(type(model))} is not what its finder expects: {what}.\n  Another version of its library? Pass "
        "inner= and breaks=, or register a finder for it with register_finder"
    )


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
