"""Choose the linear layers of a model to quantise, and their formats, from what a user asks for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from torch import nn

from fp4dispatch.errors import InputError
from fp4dispatch.formats import NVFP4_BLOCK
from fp4dispatch.formats.checks import check_module
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.name_patterns import NamePatterns
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replacing.replaceable import HEAD, leftover, output_heads, sizes, ties, why_left
from fp4dispatch.problem import Op, Scaling
from fp4dispatch.run import routes
from fp4dispatch.settings import did_you_mean

FORMATS: dict[str, Callable[..., QuantizedLinear]] = {
    "nvfp4": FP4Linear.from_linear,
    "fp8": FP8Linear.from_linear,
    "fp8_row": lambda linear, **kwargs: FP8Linear.from_linear(linear, scaling="row", **kwargs),
    "fp8_block": lambda linear, **kwargs: FP8Linear.from_linear(linear, scaling="block128", **kwargs),
}
EXCLUDE = ("lm_head", "*.lm_head", "*router*", "*.gate", "*.shared_expert_gate")
"""Not quantised by default, as in ModelOpt: the output head, because logits are sensitive and the head is often tied to
the embedding, and what chooses the experts of a mixture and weighs them, because it is small and one wrong choice is a
wrong expert. With these, what a model of transformers calls its output embeddings stays too, whatever its name."""

PROBLEM: dict[str, tuple[Op, Scaling]] = {
    "nvfp4": ("nvfp4_gemm", "nvfp4"),
    "fp8": ("fp8_gemm", "tensor"),
    "fp8_row": ("fp8_gemm", "row"),
    "fp8_block": ("fp8_gemm", "block128"),
}
"""Op and scaling of each format."""

Patterns = Sequence[str] | str
_matcher = NamePatterns


@dataclass(frozen=True)
class Chosen:
    """What to quantise in a model.

    Parameters
    ----------
    layers
        (name, layer, format) of each layer to quantise. A layer with several names comes once for each.
    skipped
        (name, reason) of each other linear layer.
    notes
        Exclude patterns that match nothing.
    """

    layers: tuple[tuple[str, nn.Linear, str], ...]
    skipped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def choose_layers(
    model: nn.Module,
    config: str | Mapping[str, str | None],
    include: Patterns,
    exclude: Patterns,
    *,
    lm_head: bool = False,
) -> Chosen:
    """Choose as :func:`~fp4dispatch.models.replace.replace_linears` does; arguments as there. Works on the meta device.

    Raises
    ------
    InputError
        For an argument of a wrong type, an unknown format, a pattern that is no regular expression or (``include``,
        ``config``) names no linear layer, or a model without any ``nn.Linear``. With ``lm_head``, if there is no output
        head, or it cannot be quantised.
    """
    _check_types(model, config, include, exclude)
    pick = picker(config, include, exclude)
    found = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    if not found:
        if done := sum(isinstance(module, QuantizedLinear) for module in model.modules()):
            raise InputError(f"{type(model).__name__} has no nn.Linear left: {done} layers are quantised already")
        kinds = ", ".join(sorted({type(owner).__name__ for _, owner, _ in leftover(model)}))
        raise InputError(
            f"{type(model).__name__} contains no nn.Linear; nothing to replace"
            + (f" (its weights are in {kinds}, which are not supported)" if kinds else "")
        )
    if "" in found:
        raise InputError("the model is itself an nn.Linear and cannot be replaced in place: use FP4Linear.from_linear")
    notes = _check_patterns(model, config, include, exclude)
    left, tied = why_left(model), ties(model)
    skipped: list[tuple[str, str]] = []
    layers: list[tuple[str, nn.Linear, str]] = []
    by_default = tuple(_listed(exclude)) == EXCLUDE
    output = output_heads(model)
    stay = output if by_default else frozenset()
    heads: dict[str, str] = {}
    if lm_head:
        heads, told = _heads(model, output, picker(config, "*", () if by_default else exclude), left, tied)
        notes += told
    picked = {name: heads.get(name) or pick(name) for name in found}
    elsewhere = _left_elsewhere(found, picked)
    for name, linear in found.items():
        fmt = picked[name]
        kept = HEAD if id(linear) in stay else ""
        if name in heads:
            reason = ""
        elif fmt is None:
            reason = kept or "excluded by name"
        elif id(linear) in elsewhere:
            reason = f"it is also {elsewhere[id(linear)]}, which is excluded by name"
        else:
            reason = left.get(id(linear)) or _unfit(linear, fmt, tied) or kept
        if reason or fmt is None:
            skipped.append((name, reason))
        else:
            layers.append((name, linear, fmt))
    return Chosen(tuple(layers), tuple(skipped), notes)


def _left_elsewhere(found: Mapping[str, nn.Linear], picked: Mapping[str, str | None]) -> dict[int, str]:
    """Return the name by which a layer with several names is excluded, by its id: it stays one layer, so it stays.

    Raises
    ------
    InputError
        If its names ask for different formats.
    """
    names: dict[int, list[str]] = {}
    for name, linear in found.items():
        names.setdefault(id(linear), []).append(name)
    left: dict[int, str] = {}
    for layer, places in names.items():
        formats = {name: picked[name] for name in places}
        if None in formats.values():
            left[layer] = next(name for name in places if formats[name] is None)
        elif len(set(formats.values())) > 1:
            asked = ", ".join(f"{name} {fmt}" for name, fmt in formats.items())
            raise InputError(f"one layer is asked for in several formats: {asked}; give all its names the same one")
    return left


def _heads(
    model: nn.Module,
    output: Set[int],
    pick: Callable[[str], str | None],
    left: Mapping[int, str],
    tied: Mapping[int, str],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the output heads to quantise, with their formats, and a note for each that is tied.

    ``output``: ids of those that the model names; others are called ``lm_head``.
    """
    every = model.named_modules(remove_duplicate=False)
    named = [(name, module) for name, module in every if _is_head(name) or id(module) in output]
    heads = [(name, module) for name, module in named if isinstance(module, nn.Linear)]
    if not heads and not any(isinstance(module, QuantizedLinear) for _, module in named):
        raise InputError(
            f"lm_head=True, but {type(model).__name__} has no linear layer of that name: name its head in include"
        )
    found: dict[str, str] = {}
    notes = []
    for name, linear in heads:
        fmt = pick(name)
        why = left.get(id(linear)) or (_unfit(linear, fmt, {}) if fmt else "config or exclude leaves it out")
        if fmt is None or why:
            raise InputError(f"lm_head=True, but {name} cannot be quantised: {why}")
        found[name] = fmt
        if id(linear) in tied:
            mb = linear.weight.numel() * linear.weight.element_size() / 1e6
            notes.append(
                f"{name} was tied to {tied[id(linear)]}, and has {fmt} weights of its own now, besides the {mb:.2f} MB "
                "that the embedding keeps"
            )
    return found, tuple(notes)


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"


def _check_types(model: object, config: object, include: object, exclude: object) -> None:
    check_module("model", model)
    if not isinstance(config, (str, Mapping)):
        raise InputError(f"config is a {type(config).__name__}; need one of {', '.join(FORMATS)}, or a mapping to them")
    if isinstance(config, Mapping) and not all(isinstance(pattern, str) for pattern in config):
        raise InputError(
            f"config has the keys {list(config)[:5]}; need patterns of module names, e.g. 'model.layers.*'"
        )
    for what, patterns in (("include", include), ("exclude", exclude)):
        listed = isinstance(patterns, (Sequence, Set)) and all(isinstance(pattern, str) for pattern in patterns)
        if not listed or isinstance(patterns, bytes):
            raise InputError(f"{what} is {patterns!r:.80}; need a pattern of module names, or a list of them")


def _check_patterns(
    model: nn.Module, config: str | Mapping[str, str | None], include: Patterns, exclude: Patterns
) -> tuple[str, ...]:
    """Refuse include and config patterns that match no layer. Return notes on exclude patterns that match nothing."""
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = [name for name, module in modules.items() if isinstance(module, (nn.Linear, QuantizedLinear))]
    others = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    chosen = [("include", pattern) for pattern in _listed(include)]
    chosen += [("config", pattern) for pattern in ([] if isinstance(config, str) else config)]
    for what, pattern in chosen:
        matches = _matcher(pattern)
        if any(map(matches, layers)):
            continue
        if named := [name for name in others if matches(name)]:
            raise InputError(
                f"{what} pattern {pattern!r} names {len(named)} modules or parameters, e.g. {named[0]!r}, but no "
                "nn.Linear, and nothing else can be quantised"
            )
        near = ", ".join(_nearest(pattern, layers))
        raise InputError(f"{what} pattern {pattern!r} names none of the {len(layers)} linear layers; nearest: {near}")
    mine = [p for p in _listed(exclude) if p not in EXCLUDE]
    return tuple(
        f"exclude pattern {pattern!r} names nothing in the model; nearest: {', '.join(_nearest(pattern, layers))}"
        for pattern in mine
        if not any(map(_matcher(pattern), others))
    )


def _nearest(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the three names nearest to a pattern, for a message."""
    word = re.sub(r"[*?\\^$]|\.\*", "", pattern.removeprefix("re:")).strip(".")
    ends = {name.rpartition(".")[2]: name for name in reversed(names)}
    near = [ends[end] for end in difflib.get_close_matches(word.rpartition(".")[2], list(ends), n=3, cutoff=0.5)]
    return list(dict.fromkeys([*difflib.get_close_matches(word, names, n=3, cutoff=0.6), *near, *names[:3]]))[:3]


def _listed(patterns: Patterns) -> Sequence[str]:
    return [patterns] if isinstance(patterns, str) else patterns


def picker(config: str | Mapping[str, str | None], include: Patterns, exclude: Patterns) -> Callable[[str], str | None]:
    """Return a function from a module's name to its format. None: do not quantise."""
    rules = {"*": config} if isinstance(config, str) else dict(config)
    for fmt in rules.values():
        if fmt is not None and (not isinstance(fmt, str) or fmt not in FORMATS):
            hint = did_you_mean(str(fmt), FORMATS)
            raise InputError(f"config={fmt!r} is not a format.{hint} Known: {', '.join(FORMATS)}")
    table = [(_matcher([pattern]), fmt) for pattern, fmt in rules.items()]
    wanted, unwanted = _matcher(include), _matcher(exclude)

    def pick(name: str) -> str | None:
        if not wanted(name) or unwanted(name):
            return None
        return next((fmt for matches, fmt in table if matches(name)), None)

    return pick


def _unfit(linear: nn.Linear, fmt: str, tied: Mapping[int, str]) -> str:
    """Return why a linear layer cannot have this format; empty if it can."""
    _, k = sizes(linear)
    if fmt == "nvfp4" and k % NVFP4_BLOCK:
        return f"in_features={k} is not a multiple of {NVFP4_BLOCK}, the NVFP4 block"
    if linear.weight.dtype not in routes.OUT_DTYPE:
        return f"weight is {linear.weight.dtype}"
    if linear.bias is not None and linear.bias.dtype not in routes.OUT_DTYPE:
        return f"bias is {linear.bias.dtype}"
    return f"its weight is tied to {tied[id(linear)]}" if id(linear) in tied else ""
