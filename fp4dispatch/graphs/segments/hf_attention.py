"""Break at the attention of Hugging Face models: projections and rotary embedding are captured, attention is not.

Their attention modules look the attention function up by ``config._attn_implementation``, after the projections and the
cache update. While a model is captured, this name is that of a function that breaks. At replay the break updates the
cache and calls the function that the model was made with
(https://huggingface.co/docs/transformers/attention_interface).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from fp4dispatch.errors import CaptureError
from fp4dispatch.graphs.segments import program
from fp4dispatch.graphs.segments.program import Batch, name_of

NAME = "fp4dispatch_break"
ROLE = "attention"
CACHE = "past_key_values"
_COPYING = {"DynamicLayer", "DynamicSlidingWindowLayer", "StaticLayer", "StaticSlidingWindowLayer"}
"""Cache layers whose ``update`` copies keys and values. Others get copies: the next layer writes to the bridges."""

Attention = Callable[..., tuple[Tensor, Any]]
_original: dict[int, str] = {}
"""Names of the attention functions of models that are being captured, by id of their config."""


@contextmanager
def breaking(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Make the attention modules break for the ``with`` block, in the thread that records."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _at_break)
    AttentionMaskInterface.register(NAME, _mask)
    configs: dict[int, Any] = {id(module.config): module.config for module in modules}
    with ExitStack() as undo:
        for key, config in configs.items():
            before = config._attn_implementation_internal
            if before == NAME:  # inside another such block
                continue
            _original[key] = before
            undo.callback(_original.pop, key, None)
            undo.callback(setattr, config, "_attn_implementation_internal", before)
            config._attn_implementation_internal = NAME
        yield


def _own(config: Any) -> str:
    """Return the name of a model's own attention function, inside of a block or not: in another thread it may end."""
    found: str = _original.get(id(config)) or config._attn_implementation_internal
    return found


def _mask(*args: Any, config: Any, **kwargs: Any) -> Any:
    """Make the mask of the model's own attention: another thread runs the model meanwhile."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    make = ALL_MASK_ATTENTION_FUNCTIONS.get(_own(config))
    return None if make is None or make is _mask else make(*args, config=config, **kwargs)


def _at_break(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stand in for the attention function: [1, heads, rows, head_dim] each -> [1, rows, heads, value_dim]."""
    recorder = program.current()
    if recorder is None:  # another thread runs the model meanwhile
        return _function(module, _own(module.config))(module, query, key, value, attention_mask, **kwargs)
    rows = query.shape[2]
    if query.shape[0] != 1 or key.shape[2] != rows:
        raise CaptureError(
            f"attention of {type(module).__name__} gets queries {list(query.shape)} and keys {list(key.shape)}; a "
            "captured bucket needs one sequence, and keys of its own tokens only"
        )
    work = _Attention(module, name_of(attention_mask), attention_mask, kwargs)
    inputs = [x.transpose(1, 2)[0] for x in (query, key, value)]
    out = recorder.at_break(
        f"attention of layer {module.layer_idx}",
        ROLE,
        work,
        inputs,
        (query.shape[1], value.shape[3]),
        query.dtype,
    )
    return out.unsqueeze(0), None


class _Attention:
    """The eager work of a break: cache update and attention on the sequences of the batch."""

    def __init__(self, module: Any, mask_name: str | None, mask: Any, kwargs: Mapping[str, Any]) -> None:
        self._module, self._mask_name, self._mask = module, mask_name, None if mask_name else mask
        self._fixed = {name: value for name, value in kwargs.items() if name_of(value) is None}
        self._later = {name: found for name, value in kwargs.items() if (found := name_of(value)) is not None}

    def __call__(self, batch: Batch, inputs: Sequence[Tensor], arguments: Mapping[str, Any]) -> Tensor:
        module = self._module
        query, key, value = (
            x[: batch.tokens].view(batch.sequences, batch.length, *x.shape[1:]).transpose(1, 2) for x in inputs
        )
        cache = arguments.get(CACHE)
        if cache is not None:
            layers, index = getattr(cache, "layers", ()), module.layer_idx
            if len(layers) <= index or type(layers[index]).__name__ not in _COPYING:
                key, value = key.clone(), value.clone()
            key, value = cache.update(key, value, index)
        mask = arguments.get(self._mask_name) if self._mask_name else self._mask
        later = {name: arguments.get(source) for name, source in self._later.items()}
        extra = {name: arguments[name] for name in VARLEN if name in arguments}
        function = _function(module, _own(module.config))
        out, _ = function(module, query, key, value, mask, **(self._fixed | later | extra))
        return out.reshape(batch.tokens, *out.shape[2:])


VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What flash attention takes for several sequences in one row of tokens."""


def _function(module: nn.Module, name: str) -> Attention:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    found: Attention = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return found


def supported(module: nn.Module) -> bool:
    """Whether an attention module looks its function up as described above."""
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and hasattr(getattr(module, "config", None), "_attn_implementation_internal")
        and hasattr(sys.modules[type(module).__module__], "eager_attention_forward")
        and hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")
    )
