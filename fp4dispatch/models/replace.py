"""``replace_linears``: quantise a model's linear layers in place."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from fp4dispatch.dispatch.request import check_request
from fp4dispatch.errors import Fp4DispatchError, InputError
from fp4dispatch.formats import NVFP4_BLOCK
from fp4dispatch.models.fusion import fusion_groups, shared_scale
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.name_patterns import NamePatterns
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replaceable import carry_over, leftover, model_bytes, ties, why_left, why_no_linear
from fp4dispatch.models.warming import warmup
from fp4dispatch.problem import Activation, Op, Problem, Scaling
from fp4dispatch.run import prebuild, routes
from fp4dispatch.run.prebuild import Ask
from fp4dispatch.settings import did_you_mean

__all__ = ["FORMATS", "LayerReport", "ReplaceReport", "replace_linears", "warmup"]

FORMATS: dict[str, Callable[..., QuantizedLinear]] = {
    "nvfp4": FP4Linear.from_linear,
    "fp8": FP8Linear.from_linear,
    "fp8_row": lambda linear, **kwargs: FP8Linear.from_linear(linear, scaling="row", **kwargs),
    "fp8_block": lambda linear, **kwargs: FP8Linear.from_linear(linear, scaling="block128", **kwargs),
}
EXCLUDE = ("lm_head", "*.lm_head")
"""Not quantised by default: logits are sensitive, and the head is often tied to the embedding."""

_log = logging.getLogger("fp4dispatch")

_PATTERNS = Sequence[str] | str
_matcher = NamePatterns


@dataclass(frozen=True)
class LayerReport:
    """One replaced layer. ``backend`` has the choice for each range of M; ``rule`` and ``reason`` tell why."""

    name: str
    format: str
    n: int
    k: int
    bytes_before: int
    bytes_after: int
    backend: str
    rule: str
    reason: str


@dataclass(frozen=True)
class LeftParameter:
    """A parameter with two or more dimensions that is not in a linear layer. It is not changed."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    reason: str


@dataclass(frozen=True)
class ReplaceReport:
    """What :func:`replace_linears` did; ``str()`` is a table.

    Parameters
    ----------
    layers
        The layers that are quantised now.
    skipped
        (name, reason) of each linear layer that was left alone.
    others
        Other weights that were not quantised: experts in one tensor, convolutions, embeddings, ``Conv1D`` of GPT-2.
    model_bytes_before, model_bytes_after
        Bytes of all parameters and buffers of the model.
    notes
        Notes for the caller, e.g. an exclude pattern that matches nothing.
    """

    layers: tuple[LayerReport, ...]
    skipped: tuple[tuple[str, str], ...]
    others: tuple[LeftParameter, ...] = ()
    model_bytes_before: int = 0
    model_bytes_after: int = 0
    notes: tuple[str, ...] = ()

    @property
    def bytes_before(self) -> int:
        """Bytes of the replaced layers before."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of the replaced layers now, backend layouts included."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def saved_percent(self) -> float:
        """Reduction of the whole model's bytes in percent. Negative if backend layouts made it larger."""
        return 100 * (1 - self.model_bytes_after / self.model_bytes_before) if self.model_bytes_before else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "others": [asdict(other) for other in self.others],
            "model_bytes_before": self.model_bytes_before,
            "model_bytes_after": self.model_bytes_after,
            "saved_percent": self.saved_percent,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        head = ("layer", "format", "N x K", "MB before", "after", "backend", "why")
        rows = [
            (
                layer.name,
                layer.format,
                f"{layer.n} x {layer.k}",
                f"{layer.bytes_before / 1e6:.2f}",
                f"{layer.bytes_after / 1e6:.2f}",
                layer.backend,
                f"{layer.rule}: {layer.reason}" if layer.rule else layer.reason,
            )
            for layer in self.layers
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]
        ]
        lines += self.totals()
        lines += [f"  left alone: {name}: {reason}" for name, reason in self.skipped]
        lines += [f"  left alone: {o.name} ({o.nbytes / 1e6:.2f} MB): {o.reason}" for o in self.others]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def totals(self) -> list[str]:
        """Return the lines with the sums: of the layers, and of the whole model."""
        left = f"{len(self.skipped)} linear layers left alone"
        if self.others:
            left += f", and {len(self.others)} other parameters ({sum(o.nbytes for o in self.others) / 1e6:.2f} MB)"
        return [
            f"{len(self.layers)} layers: {self.bytes_before / 1e6:.2f} MB -> {self.bytes_after / 1e6:.2f} MB; {left}",
            f"whole model: {self.model_bytes_before / 1e6:.2f} MB -> {self.model_bytes_after / 1e6:.2f} MB "
            f"({self.saved_percent:.1f} % saved)",
        ]


def replace_linears(
    model: nn.Module,
    config: str | Mapping[str, str | None] = "nvfp4",
    include: _PATTERNS = ("*",),
    exclude: _PATTERNS = EXCLUDE,
    *,
    activation: Activation = "any",
    backend: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> ReplaceReport:
    """Replace the ``nn.Linear`` modules of a model by quantised ones, in place, all or nothing.

    All new layers are made before the first one replaces an old one. So memory must hold the quantised weights beside
    the originals, and an error leaves the model unchanged. Forward hooks and attributes move to the new module. A
    module that is used at several places stays shared. The report lists the layers that were not replaced, and why.

    Parameters
    ----------
    model
        Any module that contains ``nn.Linear``. Not replaced: subclasses of ``nn.Linear``, layers whose weight other
        code of the model reads (``wo`` of T5, ``dt_proj`` of Mamba), and the other cases of
        :func:`fp4dispatch.models.replaceable.why_left`.
    config
        ``nvfp4``, ``fp8`` (one scale a tensor), ``fp8_row`` or ``fp8_block``; or a mapping from patterns to these.
        The first match counts. None: do not quantise. Each pattern must match a linear layer.
    include, exclude
        Patterns of module names: globs, or regular expressions behind ``re:`` that match from the start, as in
        compressed-tensors. ``lm_head`` is excluded by default. Each ``include`` pattern must match a linear layer.
        The report's ``notes`` list each ``exclude`` pattern that matches nothing.
    activation, backend
        Pinned for every layer, see :class:`~fp4dispatch.models.linear.FP4Linear`.
    progress
        Called with (done, total, name) before each layer and once at the end.

    Returns
    -------
    ReplaceReport
        Layers, formats, bytes and backends, what was left alone, with the reason, and the bytes of the whole model.

    Raises
    ------
    InputError
        For an argument of a wrong type, an unknown format, a pattern that is no regular expression or (``include``,
        ``config``) names no linear layer, a model without any ``nn.Linear``, or a model on the meta device.
    FormatError
        If a weight holds NaN or Inf; the message names the layer.
    UnknownBackendError, SettingsError
        If the backend name (argument or environment) or the value of a variable is unknown.
    BackendUnsupportedError, NoBackendError
        If the backend never runs such layers, or if a layer on a GPU cannot run there. For a layer on a CPU this is
        only reported: it may move to a GPU later.
    """
    _check_types(model, config, include, exclude)
    pick = _picker(config, include, exclude)
    for fmt in {config} if isinstance(config, str) else set(config.values()) - {None}:
        check_request(_PROBLEM[str(fmt)][0], backend)
    found = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    if not found:
        kinds = ", ".join(sorted({type(owner).__name__ for _, owner, _ in leftover(model)}))
        raise InputError(
            f"{type(model).__name__} contains no nn.Linear; nothing to replace"
            + (f" (its weights are in {kinds}, which are not supported)" if kinds else "")
        )
    if "" in found:
        raise InputError("the model is itself an nn.Linear and cannot be replaced in place: use FP4Linear.from_linear")
    notes = _check_patterns(model, config, include, exclude)
    before = model_bytes(model)
    left, tied = why_left(model), ties(model)
    skipped: list[tuple[str, str]] = []
    plan: list[tuple[str, nn.Linear, str]] = []
    for name, linear in found.items():
        fmt = pick(name)
        reason = "excluded by name" if fmt is None else left.get(id(linear)) or _unfit(linear, fmt, tied)
        if reason or fmt is None:
            skipped.append((name, reason))
        else:
            plan.append((name, linear, fmt))
    new: dict[int, QuantizedLinear] = {}
    reports = []
    prebuild.together(_asks([(linear, fmt) for _, linear, fmt in plan], activation, backend))
    shared = _shared_scales(plan)
    for done, (name, linear, fmt) in enumerate(plan):
        if progress:
            progress(done, len(plan), name)
        if id(linear) not in new:
            new[id(linear)] = _quantise(name, linear, fmt, activation, backend, shared.get(name, {}))
            reports.append(_report(name, linear, fmt, new[id(linear)]))
    for name, linear, _ in plan:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new[id(linear)])
    if progress:
        progress(len(plan), len(plan), "")
    others = tuple(
        LeftParameter(key, tuple(p.shape), p.numel() * p.element_size(), why_no_linear(key, owner, p))
        for key, owner, p in leftover(model)
    )
    report = ReplaceReport(tuple(reports), tuple(skipped), others, before, model_bytes(model), notes)
    if not plan:
        _log.warning("replace_linears: nothing was replaced in %s; %s", type(model).__name__, report)
    return report


def _check_types(model: object, config: object, include: object, exclude: object) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; need a torch.nn.Module")
    if not isinstance(config, (str, Mapping)):
        raise InputError(f"config is a {type(config).__name__}; need one of {', '.join(FORMATS)}, or a mapping to them")
    if isinstance(config, Mapping) and not all(isinstance(pattern, str) for pattern in config):
        raise InputError(f"config has the keys {list(config)[:5]}; need patterns of module names")
    for what, patterns in (("include", include), ("exclude", exclude)):
        listed = isinstance(patterns, (Sequence, Set)) and all(isinstance(pattern, str) for pattern in patterns)
        if not listed or isinstance(patterns, bytes):
            raise InputError(f"{what} is {patterns!r:.80}; need a pattern of module names, or a list of them")


def _check_patterns(
    model: nn.Module, config: str | Mapping[str, str | None], include: _PATTERNS, exclude: _PATTERNS
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
    mine = [] if exclude is EXCLUDE else [p for p in _listed(exclude) if p not in EXCLUDE]
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


def _listed(patterns: _PATTERNS) -> Sequence[str]:
    return [patterns] if isinstance(patterns, str) else patterns


def _picker(
    config: str | Mapping[str, str | None], include: _PATTERNS, exclude: _PATTERNS
) -> Callable[[str], str | None]:
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
    if fmt == "nvfp4" and linear.in_features % NVFP4_BLOCK:
        return f"in_features={linear.in_features} is not a multiple of {NVFP4_BLOCK}, the NVFP4 block"
    if linear.weight.dtype not in routes.OUT_DTYPE:
        return f"weight is {linear.weight.dtype}"
    return f"its weight is tied to {tied[id(linear)]}" if id(linear) in tied else ""


_PROBLEM: dict[str, tuple[Op, Scaling]] = {
    "nvfp4": ("nvfp4_gemm", "nvfp4"),
    "fp8": ("fp8_gemm", "tensor"),
    "fp8_row": ("fp8_gemm", "row"),
    "fp8_block": ("fp8_gemm", "block128"),
}


def _asks(plan: list[tuple[nn.Linear, str]], activation: Activation, backend: str | None) -> list[Ask]:
    """Return the prebuild requests of the new layers."""
    asks = []
    for linear, fmt in plan:
        op, scaling = _PROBLEM[fmt]
        n, k = linear.weight.shape
        dtype = routes.OUT_DTYPE[linear.weight.dtype]
        problem = Problem(op, 1, n, k, activation, scaling, dtype, linear.bias is not None)
        asks.append(Ask(problem, backend, routes.gpu_of(linear.weight.device)))
    return asks


def _shared_scales(plan: list[tuple[str, nn.Linear, str]]) -> dict[str, dict[str, Tensor]]:
    """Return the shared scales of layers that engines fuse: the model may be saved for such an engine."""
    linears = {name: (linear, fmt) for name, linear, fmt in plan if not linear.weight.is_meta}
    shared: dict[str, dict[str, Tensor]] = {}
    for names in fusion_groups({name: (fmt, linear.in_features) for name, (linear, fmt) in linears.items()}):
        scaling = _PROBLEM[linears[names[0]][1]][1]
        scale = shared_scale((linears[name][0].weight for name in names), scaling)
        if scale is not None:
            shared |= {name: {"global_scale" if scaling == "nvfp4" else "scale": scale} for name in names}
    return shared


def _quantise(
    name: str, linear: nn.Linear, fmt: str, activation: Activation, backend: str | None, scale: dict[str, Tensor]
) -> QuantizedLinear:
    if linear.weight.is_meta:
        raise InputError(f"{name} is on the meta device and has no weights to quantise: load them first")
    layer = FORMATS[fmt](linear, activation=activation, backend=backend, name=name, **scale)
    if layer.weight.is_cuda:
        layer.bind()
    carry_over(linear, layer)
    return layer


def _report(name: str, linear: nn.Linear, fmt: str, layer: QuantizedLinear) -> LayerReport:
    before = sum(p.numel() * p.element_size() for p in linear.parameters())
    try:
        decisions = layer.decisions()
        last = decisions[-1][1]
        rule = last.rule.id if last.rule else ""
        asked = "" if last.requested == "auto" else f"{last.requested} was named by {last.requested_by}"
        reason = f"{last.rule.because} ({last.rule.source})" if last.rule else asked or "; ".join(last.warnings)
        backend = layer.backend_text()
    except Fp4DispatchError as error:
        rule, reason, backend = "", str(error).splitlines()[0], "none on this device"
    return LayerReport(name, fmt, layer.out_features, layer.in_features, before, layer.nbytes(), backend, rule, reason)
