"""Decide which linear layers of a model can be quantised, and move hooks and attributes to the new layers.

``replace_linears``, ``load_quantized`` and ``fp4dispatch quantize`` use this module, so they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replacing.weight_reads import weight_reads

HEAD = "is the output head, which stays as it is by default"
_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Parent modules whose fused code paths read ``linear.weight`` directly and do not call the layer."""

_PLAIN = frozenset({"transformers.models.falcon.modeling_falcon.FalconLinear"})
"""Subclasses of ``nn.Linear`` that compute exactly ``x @ W.T + b``."""

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
"""Attributes of every ``nn.Linear``. Others were set by the user."""


def output_head(module: Any) -> nn.Module | None:
    """Return what a model of transformers calls its output embeddings; None where it, or another module, has none."""
    try:
        head = module.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head if isinstance(head, nn.Module) else None


def output_heads(model: nn.Module) -> frozenset[int]:
    """Return the ids of the output heads of a model and of all models in it.

    FSMT of transformers names the embedding of its decoder: there it is the linear layer that its class ties to it.
    MusicGen names a list of layers. Dia names none: there it is the layer of the model itself that makes the logits.
    """
    found: set[int] = set()
    for module in model.modules():
        head = output_head(module)
        if isinstance(head, nn.Embedding):
            # The shape alone proves nothing: fc1 has it too where ffn_dim is the size of the vocabulary. The class
            # names its ties in any case; an instance forgets those of layers that are quantised (see untie).
            tied = {key.removesuffix(".weight") for key in getattr(type(module), "_tied_weights_keys", None) or ()}
            shape = (head.num_embeddings, head.embedding_dim)
            found |= {id(each) for name, each in module.named_modules() if name in tied and _shape(each) == shape}
        elif head is not None:
            found |= {id(each) for each in head.modules()}
        else:
            found |= {id(each) for each in module.children() if _makes_logits(module, each)}
    return frozenset(found)


def _makes_logits(model: Any, layer: nn.Module) -> bool:
    """Whether a model of transformers that generates has in this layer one row for each token, or several."""
    generates = getattr(model, "can_generate", None)
    config: Any = getattr(model, "config", None)
    if not isinstance(layer, (nn.Linear, QuantizedLinear)) or not hasattr(config, "get_text_config"):
        return False
    if not callable(generates) or not generates():
        return False
    try:
        rows = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    except ValueError:  # several
        return False
    return isinstance(rows, int) and rows > 0 and sizes(layer)[0] % rows == 0


def sizes(layer: nn.Linear | QuantizedLinear) -> tuple[int, int]:
    """Return N and K of a linear layer. ``nn.Linear`` keeps what a model gave it, also tensors (Inkling)."""
    return int(layer.out_features), int(layer.in_features)


def _shape(module: nn.Module) -> tuple[Any, Any]:
    """Return outputs and inputs of a linear layer, quantised or not; other modules lack one of them."""
    return getattr(module, "out_features", None), getattr(module, "in_features", None)


def why_left(model: nn.Module) -> dict[int, str]:
    """Return why linear layers of a model cannot be quantised, by ``id`` of the layer.

    Not quantised: subclasses of ``nn.Linear``; layers with parameters, buffers or children besides weight and bias
    (weight_norm, adapters); layers with a ``forward`` of their own (accelerate); layers with hooks that cannot work on
    a quantised one; layers that a module also keeps in a plain list, dict or attribute, which would call the old layer
    (Mask2Former); and layers whose weight is read by other code of the model
    (:mod:`fp4dispatch.models.replacing.weight_reads`). Works on the meta device. For ties see :func:`ties`.
    """
    reads, listed = weight_reads(model), dict(_listed(model))
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, _READS_WEIGHTS):
            label = f"{name or 'the model'} is an {type(module).__name__}, which reads the weight"
            for child in module.modules():
                if isinstance(child, nn.Linear):
                    found.setdefault(id(child), label)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            why = _own_reason(module) or found.get(id(module)) or reads.get(id(module)) or listed.get(id(module))
            if why:
                found[id(module)] = why
    return found


def _listed(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Yield layers that a module keeps beside its children too, e.g. in a plain list, and where."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            kind = type(value).__name__
            for each in _held(value) if attribute != "_modules" else ():
                if isinstance(each, nn.Linear):
                    where = f"{name}.{attribute}".lstrip(".")
                    what = "a plain attribute" if each is value else f"a {kind}"
                    yield id(each), f"is also in {where}, {what} that would keep the old layer"


def _held(value: object) -> Iterable[object]:
    """Return what a plain attribute holds: itself, or the values of a list, tuple or dict."""
    if isinstance(value, (list, tuple)):
        return value
    return value.values() if isinstance(value, dict) else (value,)


def _own_reason(linear: nn.Linear) -> str:
    kind = type(linear)
    if kind is not nn.Linear and f"{kind.__module__}.{kind.__qualname__}" not in _PLAIN:
        return f"is a {kind.__name__}, not a plain nn.Linear"
    extra = {*linear._parameters, *linear._buffers, *linear._modules} - {"weight", "bias"}
    weight = linear._parameters.get("weight")
    if extra or not isinstance(weight, nn.Parameter):
        return f"holds {', '.join(sorted(extra)) or 'no weight'} besides weight and bias"
    if type(weight) is not nn.Parameter:  # quantised by torchao, distributed, ...
        return f"its weight is a {type(weight).__name__}, not a plain tensor"
    if weight.layout is not torch.strided:
        return f"its weight is {weight.layout}, not torch.strided"
    if weight.dim() != 2 or not weight.numel():
        return f"its weight has the shape {list(weight.shape)}, not [N, K] with elements"
    if "forward" in vars(linear):
        return "its forward was replaced on the module (accelerate does so for offloaded models)"
    return next((f"has {why}" for hooks, why in _OTHER_HOOKS.items() if getattr(linear, hooks, None)), "")


def ties(model: nn.Module) -> dict[int, str]:
    """Return the name of the module that shares its weight with a linear layer, by ``id`` of the layer."""
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


Tied = list[tuple[str, nn.Module]]
"""Models of Transformers that list ties, with their names in the whole model."""


def models_with_ties(model: nn.Module) -> Tied:
    """Return the models of Transformers in a model, itself included, that list ties."""
    return [(name, m) for name, m in model.named_modules() if isinstance(vars(m).get("all_tied_weights_keys"), dict)]


def untie(models: Tied, names: Iterable[str], new: nn.Module) -> None:
    """Make models of Transformers forget the ties of a layer that has a weight, and a bias, of its own now.

    ``tie_weights`` finds the ties again, from ``_tied_weights_keys`` and ``tie_word_embeddings``. So the model gets a
    list of its own of those that are left, and where none are, the configuration says so. T5 keeps other ties, and the
    configuration, which tells some of its kind to scale the input of the head.
    """
    shared = False
    own: Any
    for prefix, own in models:
        tied: dict[str, str] = own.all_tied_weights_keys
        start = f"{prefix}." if prefix else ""
        below = [name.removeprefix(start) for name in names if name.startswith(start)]
        mine = {f"{name}.{last}" for name in below for last in ("weight", "bias")}
        cut = [target for target, source in tied.items() if mine & {target, source}]
        if not cut:
            continue
        for target in cut:
            del tied[target]
        own._tied_weights_keys = dict(tied)
        shared |= any(target.endswith(".bias") for target in cut)
        config: Any = getattr(own, "config", None)
        if not tied and config is not None:
            config.get_text_config(decoder=True).tie_word_embeddings = False
            config.tie_word_embeddings = False
    bias = new._parameters.get("bias")
    if shared and bias is not None and not bias.is_meta:
        # Transformers saves one of two tensors in common memory, and would not find the other one when it loads.
        new.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """Copy training mode, forward hooks and user attributes from the old layer to the quantised one.

    Hook handles keep working. Attributes that the quantised layer already has are not changed.
    """
    new.train(old.training)
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))
    if isinstance(old, nn.Linear):
        for name, value in vars(old).items():
            if name not in _OWN and name not in vars(new) and not hasattr(type(new), name):
                object.__setattr__(new, name, value)


def why_no_linear(name: str, owner: nn.Module, tensor: torch.Tensor) -> str:
    """Return why a parameter outside linear layers, with two or more dimensions, is not quantised."""
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
            if parameter is None or nn.parameter.is_lazy(parameter):
                continue  # has no size yet
            if parameter.dim() >= 2 and id(parameter) not in seen:
                seen.add(id(parameter))
                found.append((f"{prefix}.{key}" if prefix else key, module, parameter))
    return found


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers. Shared memory counts once."""
    tensors = [t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    return sum(dict(part for tensor in tensors for part in _memory(tensor)).values())


def _memory(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the key and the bytes of each piece of memory of a tensor. A sparse one has several."""
    if nn.parameter.is_lazy(tensor):
        return
    if tensor.layout is not torch.strided:
        for part in _parts(tensor):
            yield from _memory(part)
        return
    yield id(tensor) if tensor.is_meta else tensor.data_ptr() or id(tensor), tensor.numel() * tensor.element_size()


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()
