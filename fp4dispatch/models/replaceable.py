"""Which linear layers of a model may become quantised ones, and what moves along when they do.

``replace_linears``, ``load_quantized`` and ``fp4dispatch quantize`` all ask here, so that they agree.
"""

from __future__ import annotations

import torch
from torch import nn

from fp4dispatch.models.weight_reads import weight_reads

_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Parents whose fused paths read ``linear.weight`` themselves instead of calling the layer."""

_PLAIN = frozenset({"transformers.models.falcon.modeling_falcon.FalconLinear"})
"""Subclasses of ``nn.Linear`` that compute nothing else: this one writes out ``x @ W.T + b``."""

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_OTHER_HOOKS = {
    "_backward_hooks": "backward hooks, and a quantised layer has no backward pass",
    "_backward_pre_hooks": "backward hooks, and a quantised layer has no backward pass",
    "_state_dict_hooks": "state_dict hooks, which expect its weight",
    "_state_dict_pre_hooks": "state_dict hooks, which expect its weight",
    "_load_state_dict_pre_hooks": "load_state_dict hooks, which expect its weight",
    "_load_state_dict_post_hooks": "load_state_dict hooks, which expect its weight",
}
_OWN = frozenset(vars(nn.Linear(1, 1, device="meta", dtype=torch.float32)))
"""What every ``nn.Linear`` has; anything else on one was put there by its user."""


def why_left(model: nn.Module) -> dict[int, str]:
    """Return why linear layers of a model must stay what they are, by ``id`` of the layer.

    Left are: subclasses of ``nn.Linear``; layers with parameters, buffers or children besides weight and bias
    (weight_norm, adapters); layers with a ``forward`` of their own (accelerate); layers with hooks that cannot work on
    a quantised one; and layers whose weight is read by other code of the model
    (:mod:`fp4dispatch.models.weight_reads`). Works on the meta device. Ties are another question, see :func:`ties`.
    """
    reads = weight_reads(model)
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, _READS_WEIGHTS):
            label = f"{name or 'the model'} is an {type(module).__name__}, which reads the weight"
            for child in module.modules():
                if isinstance(child, nn.Linear):
                    found.setdefault(id(child), label)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            why = _own_reason(module) or found.get(id(module)) or reads.get(id(module))
            if why:
                found[id(module)] = why
    return found


def _own_reason(linear: nn.Linear) -> str:
    kind = type(linear)
    if kind is not nn.Linear and f"{kind.__module__}.{kind.__qualname__}" not in _PLAIN:
        return f"is a {kind.__name__}, not a plain nn.Linear"
    extra = {*linear._parameters, *linear._buffers, *linear._modules} - {"weight", "bias"}
    if extra or not isinstance(linear._parameters.get("weight"), nn.Parameter):
        return f"holds {', '.join(sorted(extra)) or 'no weight'} besides weight and bias"
    if "forward" in vars(linear):
        return "its forward was replaced on the module (accelerate does so for offloaded models)"
    return next((f"has {why}" for hooks, why in _OTHER_HOOKS.items() if getattr(linear, hooks, None)), "")


def ties(model: nn.Module) -> dict[int, str]:
    """Return with which other module a linear layer shares its weight, by ``id`` of the layer."""
    holders: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((name, module))
    found = {}
    for sharing in holders.values():
        for _, module in sharing:
            other = next((name for name, m in sharing if m is not module), None)
            if isinstance(module, nn.Linear) and other is not None:
                found[id(module)] = other
    return found


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """Give a quantised layer the mode, the forward hooks and the attributes that were set on the one it replaces.

    Hook handles keep working. Attributes that the quantised layer has itself stay its own.
    """
    new.train(old.training)
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))
    if isinstance(old, nn.Linear):
        for name, value in vars(old).items():
            if name not in _OWN and name not in vars(new) and not hasattr(type(new), name):
                object.__setattr__(new, name, value)


def why_no_linear(name: str, owner: nn.Module, tensor: torch.Tensor) -> str:
    """Return why a parameter of at least two dimensions, which belongs to no linear layer, stays as it is."""
    kind = type(owner).__name__
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in kind:
        return f"{kind}: an embedding, not a linear layer"
    if isinstance(owner, nn.modules.conv._ConvNd):
        return f"{kind}: a convolution, not a linear layer"
    if kind == "Conv1D" and tensor.dim() == 2:
        return "Conv1D: its weight is [K, N]; only nn.Linear, which has [N, K], is quantised"
    if tensor.dim() >= 3 and "expert" in f"{kind} {name}".lower():
        return f"{kind}: experts in one tensor {list(tensor.shape)}, which are not supported yet"
    return f"{kind}: a parameter {list(tensor.shape)}, not the weight of an nn.Linear"


def leftover(model: nn.Module) -> list[tuple[str, nn.Module, nn.Parameter]]:
    """Return the parameters of at least two dimensions outside linear layers, each once: name, owner, parameter."""
    found = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Linear):
            seen.update(id(p) for p in module.parameters(recurse=False))
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() >= 2 and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"{prefix}.{key}" if prefix else key, module, parameter))
    return found


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers, what is shared once."""
    tensors = [t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    return sum(
        {(id(t) if t.is_meta else t.data_ptr() or id(t)): t.numel() * t.element_size() for t in tensors}.values()
    )
