"""``replace_linears``: quantise a model's linear layers in place."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from fp4dispatch import prebuild, routes
from fp4dispatch.errors import Fp4DispatchError, InputError
from fp4dispatch.formats import NVFP4_BLOCK
from fp4dispatch.fusion import fusion_groups, shared_scale
from fp4dispatch.linear import FP4Linear, FP8Linear
from fp4dispatch.prebuild import Ask
from fp4dispatch.problem import Activation, Op, Problem, Scaling
from fp4dispatch.quantized_linear import QuantizedLinear
from fp4dispatch.settings import did_you_mean
from fp4dispatch.warming import warmup

__all__ = ["FORMATS", "LayerReport", "ReplaceReport", "replace_linears", "warmup"]

FORMATS: dict[str, Callable[..., QuantizedLinear]] = {
    "nvfp4": FP4Linear.from_linear,
    "fp8": FP8Linear.from_linear,
    "fp8_row": lambda linear, **kwargs: FP8Linear.from_linear(linear, scaling="row", **kwargs),
    "fp8_block": lambda linear, **kwargs: FP8Linear.from_linear(linear, scaling="block128", **kwargs),
}
EXCLUDE = ("lm_head", "*.lm_head")
"""What is left alone by default: logits are sensitive, and the head is often tied to the embedding."""

_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Parents whose fused paths read ``linear.weight`` themselves instead of calling the layer."""

_PATTERNS = Sequence[str] | str


@dataclass(frozen=True)
class LayerReport:
    """One replaced layer. ``backend`` names the choice for every range of M, ``rule`` and ``reason`` why."""

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
class ReplaceReport:
    """What :func:`replace_linears` did; ``str()`` is a table. ``skipped`` holds (name, reason)."""

    layers: tuple[LayerReport, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def bytes_before(self) -> int:
        """Bytes of the replaced layers before."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Bytes of the replaced layers now, backend layouts included."""
        return sum(layer.bytes_after for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "layers": [asdict(layer) for layer in self.layers],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
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
        saved = 100 * (1 - self.bytes_after / self.bytes_before) if self.bytes_before else 0.0
        lines.append(
            f"{len(self.layers)} layers: {self.bytes_before / 1e6:.2f} MB -> {self.bytes_after / 1e6:.2f} MB "
            f"({saved:.1f} % saved), {len(self.skipped)} left alone"
        )
        lines += [f"  left alone: {name}: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)


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

    Every replacement is made before the first is put in, so the quantised weights are held beside the originals for a
    moment, and an error leaves the model untouched. Forward hooks move to the new module; a module that is used at
    several places stays shared.

    Parameters
    ----------
    model
        Any module that contains ``nn.Linear``. Subclasses of ``nn.Linear`` are left alone: they may do more than it.
    config
        ``nvfp4``, ``fp8`` (one scale a tensor), ``fp8_row`` or ``fp8_block``; or a mapping from patterns to these, the
        first match counts, None leaves a layer alone.
    include, exclude
        Patterns of module names: globs, or regular expressions behind ``re:`` that match from the start, as in
        compressed-tensors. ``lm_head`` is excluded by default.
    activation, backend
        Pinned for every layer, see :class:`~fp4dispatch.linear.FP4Linear`.
    progress
        Called with (done, total, name) before each layer and once at the end.

    Returns
    -------
    ReplaceReport
        Layers, formats, bytes and backends, and what was left alone, with the reason.

    Raises
    ------
    InputError
        For an unknown format, a pattern that is no regular expression, a model without any ``nn.Linear``, or a model
        on the meta device.
    FormatError
        If a weight holds NaN or Inf; the message names the layer.
    BackendUnsupportedError, NoBackendError
        If a layer on a GPU cannot run there. On a CPU that is only reported: the layer may be on its way to a GPU.
    """
    pick = _picker(config, include, exclude)
    found = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)}
    if not found:
        raise InputError(f"{type(model).__name__} contains no nn.Linear; nothing to replace")
    if "" in found:
        raise InputError("the model is itself an nn.Linear and cannot be replaced in place: use FP4Linear.from_linear")
    skipped: list[tuple[str, str]] = []
    plan: list[tuple[str, nn.Linear, str]] = []
    for name, linear in found.items():
        fmt = pick(name)
        reason = "excluded by name" if fmt is None else _unfit(model, name, linear, fmt)
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
    return ReplaceReport(tuple(reports), tuple(skipped))


def _picker(
    config: str | Mapping[str, str | None], include: _PATTERNS, exclude: _PATTERNS
) -> Callable[[str], str | None]:
    """Return the function from a module's name to its format, None where it is to be left alone."""
    rules = {"*": config} if isinstance(config, str) else dict(config)
    for fmt in rules.values():
        if fmt is not None and fmt not in FORMATS:
            raise InputError(f"config={fmt!r} is not a format.{did_you_mean(fmt, FORMATS)} Known: {', '.join(FORMATS)}")
    table = [(_matcher([pattern]), fmt) for pattern, fmt in rules.items()]
    wanted, unwanted = _matcher(include), _matcher(exclude)

    def pick(name: str) -> str | None:
        if not wanted(name) or unwanted(name):
            return None
        return next((fmt for matches, fmt in table if matches(name)), None)

    return pick


def _matcher(patterns: _PATTERNS) -> Callable[[str], bool]:
    compiled = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        text = pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern)
        try:
            compiled.append(re.compile(text))
        except re.error as error:
            raise InputError(f"{pattern!r} is not a regular expression: {error}") from None
    return lambda name: any(p.match(name) for p in compiled)


def _unfit(model: nn.Module, name: str, linear: nn.Linear, fmt: str) -> str:
    """Return why a linear layer has to be left alone; empty if it can be replaced."""
    if type(linear) is not nn.Linear:
        return f"is a {type(linear).__name__}, not a plain nn.Linear"
    if fmt == "nvfp4" and linear.in_features % NVFP4_BLOCK:
        return f"in_features={linear.in_features} is not a multiple of {NVFP4_BLOCK}, the NVFP4 block"
    if linear.weight.dtype not in routes.OUT_DTYPE:
        return f"weight is {linear.weight.dtype}"
    parent = name
    while parent:
        parent = parent.rpartition(".")[0]
        if isinstance(model.get_submodule(parent), _READS_WEIGHTS):
            return f"{parent or 'the model'} is an {type(model.get_submodule(parent)).__name__}, which reads the weight"
    for other, module in model.named_modules():
        if module is not linear and any(p is linear.weight for p in module.parameters(recurse=False)):
            return f"its weight is tied to {other}"
    return ""


_PROBLEM: dict[str, tuple[Op, Scaling]] = {
    "nvfp4": ("nvfp4_gemm", "nvfp4"),
    "fp8": ("fp8_gemm", "tensor"),
    "fp8_row": ("fp8_gemm", "row"),
    "fp8_block": ("fp8_gemm", "block128"),
}


def _asks(plan: list[tuple[nn.Linear, str]], activation: Activation, backend: str | None) -> list[Ask]:
    """Return what the new layers will need compiled."""
    asks = []
    for linear, fmt in plan:
        op, scaling = _PROBLEM[fmt]
        n, k = linear.weight.shape
        dtype = routes.OUT_DTYPE[linear.weight.dtype]
        problem = Problem(op, 1, n, k, activation, scaling, dtype, linear.bias is not None)
        asks.append(Ask(problem, backend, routes.gpu_of(linear.weight.device)))
    return asks


def _shared_scales(plan: list[tuple[str, nn.Linear, str]]) -> dict[str, dict[str, Tensor]]:
    """Return the scales that layers share which engines fuse: the model may be saved for one of them."""
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
    layer.train(linear.training)
    layer._forward_hooks, layer._forward_pre_hooks = linear._forward_hooks, linear._forward_pre_hooks
    layer._forward_hooks_with_kwargs = linear._forward_hooks_with_kwargs
    layer._forward_hooks_always_called = linear._forward_hooks_always_called
    layer._forward_pre_hooks_with_kwargs = linear._forward_pre_hooks_with_kwargs
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
