"""``fuse``: q, k and v of attention as one layer, and gate and up of an MLP: one GEMM in place of two or three."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from fp4dispatch.errors import FormatError, Fp4DispatchError
from fp4dispatch.formats.checks import check_module
from fp4dispatch.machine import capture
from fp4dispatch.models.fusing.parents import FusedProjections, Groups, downs, fused_class
from fp4dispatch.models.fusing.rewrite import CannotFuse, uses_of_others, uses_outside_forward
from fp4dispatch.models.fusing.rows import join
from fp4dispatch.models.linear import FP4Linear, FP8Linear, layer_of
from fp4dispatch.models.model_report import pattern_of
from fp4dispatch.models.parallel.layers import ParallelLinear
from fp4dispatch.models.projections import FUSED
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.run import prebuild, routes
from fp4dispatch.run.prebuild import Ask

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_SAME = ("activation", "backend", "dtype", "keep_stored", "capture", "m_min", "in_features", "device")
"""Attributes that all layers of a group must have in common."""


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


_Named = TypeVar("_Named", bound=_HasName)


@dataclass(frozen=True)
class FusedLayer:
    """A fused layer, the layers that it replaces, in the order of its rows, and its sizes."""

    name: str
    shards: tuple[str, ...]
    n: int
    k: int


@dataclass(frozen=True)
class FuseReport:
    """What :func:`fuse` did; ``str()`` has a line for each kind of layer.

    Parameters
    ----------
    fused
        The fused layers.
    left
        (names, reason) of each group of layers that was not fused.
    """

    fused: tuple[FusedLayer, ...] = ()
    left: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return {
            "fused": [asdict(layer) | {"shards": list(layer.shards)} for layer in self.fused],
            "left": [{"name": name, "reason": reason} for name, reason in self.left],
        }

    def merged(self, layers: Iterable[_Named], make: Callable[[FusedLayer, list[_Named]], _Named]) -> list[_Named]:
        """Return descriptions of layers, with one of each fused layer in place of those of its shards.

        ``make`` gets a fused layer and the descriptions of its shards.
        """
        found = {layer.name: layer for layer in layers}
        fused = [one for one in self.fused if found.keys() >= set(one.shards)]
        first = {one.shards[0]: one for one in fused}
        inside = {shard for one in fused for shard in one.shards[1:]}
        return [
            make(first[name], [found[shard] for shard in first[name].shards]) if name in first else layer
            for name, layer in found.items()
            if name not in inside
        ]

    def lines(self) -> list[str]:
        """Return the lines of ``str()``."""
        fused = Counter(
            f"fused: {pattern_of(one.name)} = {' + '.join(s.rpartition('.')[2] for s in one.shards)}"
            for one in self.fused
        )
        left = Counter(f"not fused: {pattern_of(name)}: {reason}" for name, reason in self.left)
        return [f"{line}{f' ({count} of these)' if count > 1 else ''}" for line, count in (fused | left).items()]

    def __str__(self) -> str:
        return "\n".join(self.lines()) or "nothing to fuse"


NOTHING_FUSED = FuseReport()


@dataclass(frozen=True)
class _Candidate:
    """Layers of one module that may become one."""

    parent: nn.Module
    path: str
    fused: str
    shards: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.path}.{self.fused}" if self.path else self.fused

    @property
    def label(self) -> str:
        joined = ", ".join(self.shards)
        return f"{self.path}.({joined})" if self.path else joined

    def layers(self) -> list[QuantizedLinear]:
        return [layer for s in self.shards if isinstance(layer := self.parent._modules.get(s), QuantizedLinear)]


def fuse(model: nn.Module) -> FuseReport:
    """Make q, k and v projections one layer, and gate and up projections another, in place, where that is exact.

    ``self_attn.q_proj``, ``k_proj`` and ``v_proj`` become ``self_attn.qkv_proj``; ``mlp.gate_proj`` and ``up_proj``
    become ``mlp.gate_up_proj``. Codes and scales keep their bits. NVFP4 shards keep their own global scales. A fused
    layer gives the results of the separate ones bit for bit where the same kernel adds in the same order, else to the
    rounding of the sums. The policy chooses backends and activation formats for the fused size.

    Where an MLP computes ``down_proj(act_fn(gate) * up)`` with SiLU, the down projection gets the fused result
    (:meth:`QuantizedLinear.swiglu`): one operator, with the bits of separate ones. Other activations, and modules with
    hooks, are called as before.

    The module around gets a subclass of its class, whose ``forward`` calls the fused layer
    (:mod:`fp4dispatch.models.fusing.rewrite`). It works for any class whose ``forward`` calls the projections once, on
    one input: Llama, Qwen2, Qwen3, Mistral, Gemma and others of Transformers. ``state_dict``, ``load_state_dict``,
    :func:`fp4dispatch.save_quantized` and ``save_pretrained`` keep the names of the separate layers. So a saved model
    loads unfused. The results of the projections are slices of one tensor, so not contiguous.

    Call it before ``warmup``, ``torch.compile`` and CUDA graphs.

    Left as they are, with the reason in the report: layers that are not all quantised, or in different formats; a bias
    on some of them only; FP8 scales per tensor, or static activation scales, that differ; FP8 blocks that two layers
    would share; hooks or attributes of their own; layers that are shared, cut among ranks, or in a CUDA graph; and
    classes whose ``forward`` or other code uses the layers in another way.

    Parameters
    ----------
    model
        A module with ``FP4Linear`` or ``FP8Linear`` in it.

    Returns
    -------
    FuseReport
        What was fused, and what was not, with the reason.

    Raises
    ------
    InputError
        If ``model`` is no module.
    CaptureError
        During CUDA graph capture.
    """
    check_module("model", model)
    capture.forbid_in_capture("fusing layers", "fp4dispatch.fuse(model)")
    places = Counter(id(child) for module in model.modules() for child in module._modules.values() if child is not None)
    foreign = _named_elsewhere(model)
    todo: list[_Candidate] = []
    left: list[tuple[str, str]] = []
    for candidate in _candidates(model):
        why = _why_not(candidate, places, foreign)
        if why:
            left.append((candidate.label, why))
        else:
            todo.append(candidate)
    prebuild.together(_asks(todo))
    fused: list[FusedLayer] = []
    for candidate in todo:
        try:
            fused.append(_fuse(candidate))
        except CannotFuse as error:
            left.append((candidate.label, str(error)))
    return FuseReport(tuple(fused), tuple(left))


def _candidates(model: nn.Module) -> Iterator[_Candidate]:
    """Yield groups of which at least one layer is quantised."""
    for path, module in model.named_modules():
        for fused, shards in FUSED.items():
            here = [module._modules.get(shard) for shard in shards]
            quantised = sum(isinstance(layer, QuantizedLinear) for layer in here)
            if quantised and sum(isinstance(layer, nn.Module) for layer in here) > 1:
                yield _Candidate(module, path, fused, shards)


def _named_elsewhere(model: nn.Module) -> dict[str, str]:
    """Return which code of the model reaches for these layers of another module, by the last part of their names."""
    names = {shard for shards in FUSED.values() for shard in shards}
    found: dict[str, str] = {}
    for cls in dict.fromkeys(_base(module) for module in model.modules()):
        for where, name in uses_of_others(cls, names):
            found[name] = f"{where} uses {name} of another module"
    return found


def _why_not(candidate: _Candidate, places: Mapping[int, int], foreign: Mapping[str, str]) -> str:
    """Return why layers cannot be fused, empty if they can. Does not look at values of tensors."""
    layers = candidate.layers()
    if len(layers) < len(candidate.shards):
        here = candidate.parent._modules
        absent = next(shard for shard in candidate.shards if not isinstance(here.get(shard), QuantizedLinear))
        there = here.get(absent)
        return f"there is no {absent}" if there is None else f"{absent} is a {type(there).__name__}, not quantised"
    for shard, layer in zip(candidate.shards, layers, strict=True):
        if isinstance(layer, ParallelLinear):
            return f"{shard} is cut among ranks"
        if places[id(layer)] > 1:
            return f"{shard} is shared with another place"
        if any(getattr(layer, hooks, None) for hooks in _HOOKS):
            return f"{shard} has hooks"
        if "forward" in vars(layer):
            return f"the forward of {shard} was replaced"
        if layer.device.type == "meta":
            return f"{shard} is on the meta device"
        if layer._state.captured or any(bound.captured for bound in layer._state.every_bound()):
            return f"a CUDA graph was captured with {shard}"
        if shard in foreign:
            return foreign[shard]
    parent = candidate.parent
    if "forward" in vars(parent):
        return f"the forward of the {type(parent).__name__} was replaced"
    if hasattr(parent, candidate.fused):
        return f"the {type(parent).__name__} has another {candidate.fused}"
    why = _differ(candidate, layers) or uses_outside_forward(_base(parent), candidate.shards)
    if not why:
        try:
            _class_for(candidate)
        except CannotFuse as error:
            return str(error)
    return why


def _differ(candidate: _Candidate, layers: list[QuantizedLinear]) -> str:
    """Return in what the layers differ, empty if one layer can stand for them."""
    first = layers[0]
    kinds = {f"{type(layer).__name__} {layer._kind()[1]}" for layer in layers}
    if len(kinds) > 1:
        return f"they have different formats: {', '.join(sorted(kinds))}"
    for key in _SAME:
        values = {str(getattr(layer, key)) for layer in layers}
        if len(values) > 1:
            return f"they have different {key}: {', '.join(sorted(values))}"
    for what in ("bias", "input_scale"):
        having = [
            shard for shard, layer in zip(candidate.shards, layers, strict=True) if getattr(layer, what) is not None
        ]
        if having and len(having) < len(layers):
            return f"only {', '.join(having)} {'have' if len(having) > 1 else 'has'} {what}"
    if first.bias is not None and len({layer.bias.dtype for layer in layers if layer.bias is not None}) > 1:
        return "their biases have different dtypes"
    if any(getattr(layer, "shard_rows", ()) for layer in layers):
        return "one of them is fused already"
    for shard, layer in zip(candidate.shards, layers, strict=True):
        for key, value in _extra(layer).items():
            if not all(key in vars(other) and _equal(vars(other)[key], value) for other in layers):
                return f"{shard} has an attribute of its own, {key}"
    return ""


def _fuse(candidate: _Candidate) -> FusedLayer:
    """Make the fused layer and put it into the model, or change nothing.

    Raises
    ------
    CannotFuse
        If the class does not allow it, or one layer cannot hold the weights or cannot run here.
    """
    layers, cls = candidate.layers(), _class_for(candidate)
    first = layers[0]
    try:
        layer = _joined(candidate, layers)
        if layer.device.type == "cuda":
            layer.bind()
    except FormatError as error:
        raise CannotFuse(str(error)) from None
    except Fp4DispatchError as error:
        raise CannotFuse(f"one layer cannot run here: {str(error).splitlines()[0]}") from None
    layer.train(first.training)
    for key, value in _extra(first).items():
        object.__setattr__(layer, key, value)
    _put_in(candidate, layer, cls, [each.out_features for each in layers])
    return FusedLayer(
        candidate.name,
        tuple(f"{candidate.path}.{shard}" if candidate.path else shard for shard in candidate.shards),
        layer.out_features,
        layer.in_features,
    )


def _class_for(candidate: _Candidate) -> type[FusedProjections]:
    """Return the class that the module gets. Raises CannotFuse if there can be none."""
    parent = candidate.parent
    before = parent.fused_groups if isinstance(parent, FusedProjections) else ()
    groups: Groups = (*before, (candidate.fused, candidate.shards))
    try:
        return fused_class(_base(parent), groups)
    except TypeError as error:  # __init_subclass__, or a metaclass
        raise CannotFuse(f"{type(parent).__name__} cannot have a subclass: {error}") from None


def _put_in(candidate: _Candidate, layer: QuantizedLinear, cls: type[nn.Module], rows: list[int]) -> None:
    """Put the layer in the place of the first shard, remove the shards, and change the class: all, or nothing."""
    parent = candidate.parent
    modules: dict[str, nn.Module | None] = {}
    for name, child in parent._modules.items():
        if name == candidate.shards[0]:
            modules[candidate.fused] = layer
        if name not in candidate.shards:
            modules[name] = child
    held, was = dict(vars(parent)), type(parent)
    try:
        vars(parent).update(_modules=modules, _fused_rows={**held.get("_fused_rows", {}), candidate.fused: rows})
        parent.__class__ = cls
    except BaseException:  # an interrupt
        vars(parent).update({"_fused_rows": {}, **held})
        parent.__class__ = was
        raise


def _joined(candidate: _Candidate, layers: list[QuantizedLinear]) -> QuantizedLinear:
    """Return one layer with the weights and options of all."""
    first = layers[0]
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    weights = join([layer.weights(lend=False) for layer in layers])
    layer = layer_of(
        weights,
        torch.cat(biases) if biases else None,
        activation=first.activation,
        backend=first.backend,
        dtype=first.dtype,
        name=candidate.name,
        keep_stored=first.keep_stored,
    )
    layer.capture, layer.m_min = first.capture, first.m_min
    if (first.capture, first.m_min) != ("none", 1):
        layer._refresh()
    del weights  # so that no other code holds what the layer can drop
    layer._hold_once()
    return layer


def _base(parent: nn.Module) -> type[nn.Module]:
    return parent.fused_base if isinstance(parent, FusedProjections) else type(parent)


def _extra(layer: QuantizedLinear) -> dict[str, Any]:
    """Return the attributes that other code set on a layer."""
    return {key: value for key, value in vars(layer).items() if key not in _own()}


@functools.cache
def _own() -> frozenset[str]:
    """Return the attributes of every quantised layer."""
    return frozenset(
        {*vars(FP4Linear(16, 1, device="meta")), *vars(FP8Linear(16, 1, device="meta")), *_SAME, "_strict"}
    )


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (bool, int, float, str)) and a == b)


def _asks(candidates: Iterable[_Candidate]) -> list[Ask]:
    """Return the prebuild requests of the fused layers, and of those that they give ``gate_up``."""
    asks = []
    for candidate in candidates:
        layers = candidate.layers()
        first = layers[0]
        problem = replace(first.problem(1), n=sum(layer.out_features for layer in layers))
        asks.append(Ask(problem, first.backend, routes.gpu_of(first.device)))
        for down in downs(candidate.parent, _class_for(candidate)):
            asks.append(Ask(down.problem(1), down.backend, routes.gpu_of(down.device), gated=True))
    return asks
