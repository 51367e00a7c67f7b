"""One decode step of a Llama-like model under ``torch.compile``, in three pieces; each compiles once per batch size.

The pieces are what comes before the decoder layers, one decoder layer, and what follows them. All layers share the
code of the second piece: it gets the cache of its layer, and no number of it, which would be a constant of the code.
A whole model of 32 layers compiles for minutes instead. Inductor makes no CUDA graphs here: the caller captures one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from fp4dispatch.benchmark.check import relative_error

BACKEND = "inductor"
"""Of ``torch.compile``."""
Step = tuple[Tensor, Tensor]
"""Logits f32 [batch, vocabulary] and token int64 [batch, 1] of a step."""


class LayerCache:
    """The cache of one decoder layer, whatever its number: code that reads a number is compiled for each."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values; return all."""
        found: tuple[Tensor, Tensor] = self.layer.update(keys, values)
        return found


def _before(model: nn.Module, token: Tensor, position: Tensor, room: int) -> tuple[Any, ...]:
    """Return hidden states, mask, position and rotary embedding of one new token a sequence.

    The mask is added to the scores, as attention does with it, and made once, not in each layer.
    """
    hidden = model.embed_tokens(token)
    where = position.view(1, 1)
    seen = torch.arange(room, device=token.device) <= position
    mask = torch.where(seen, 0.0, -torch.inf).to(hidden.dtype).view(1, 1, 1, room)
    return hidden, mask, where, model.rotary_emb(hidden, position_ids=where)


def _layer(layer: nn.Module, hidden: Tensor, mask: Tensor, where: Tensor, rotary: Any, cache: LayerCache) -> Tensor:
    found: Tensor = layer(
        hidden,
        attention_mask=mask,
        position_ids=where,
        past_key_values=cache,
        use_cache=True,
        position_embeddings=rotary,
    )
    return found


def _after(norm: nn.Module, head: nn.Module, hidden: Tensor, logits: Tensor, token: Tensor) -> None:
    logits.copy_(head(norm(hidden))[:, -1])
    token.copy_(logits.argmax(-1, keepdim=True))


@functools.cache
def _compiled(piece: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return torch.compile(piece, fullgraph=True, dynamic=False, backend=backend)


class CompiledStep:
    """Feed the last token and choose the next one; the state is in tensors that the caller made.

    Parameters
    ----------
    model
        A causal language model with Llama's modules.
    cache
        A static cache of Transformers that holds the prompt.
    token, logits
        int64 [batch, 1] and [batch, vocabulary]: the last token, read, and both results, written.
    """

    def __init__(self, model: nn.Module, cache: Any, token: Tensor, logits: Tensor) -> None:
        self.model, self.cache, self.token, self.logits = model, cache, token, logits
        self.caches = [LayerCache(layer) for layer in cache.layers]
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values, layer.cumulative_length):
                # Transformers marks them with a guard on their identity: each layer would compile anew.
                torch._dynamo.mark_static_address(tensor, guard=False)

    def __call__(self) -> None:
        """Run the step."""
        before, layer, after = (_compiled(piece, BACKEND) for piece in (_before, _layer, _after))
        inner, first = self.model.model, self.cache.layers[0]
        hidden, *rest = before(inner, self.token, first.cumulative_length, first.keys.shape[2])
        for each, cache in zip(inner.layers, self.caches, strict=True):
            hidden = layer(each, hidden, *rest, cache)
        after(inner.norm, self.model.lm_head, hidden, self.logits, self.token)


def compilations() -> int:
    """Return how many graphs ``torch.compile`` has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def forget() -> None:
    """Drop all compiled code, and with it what it holds of models."""
    torch._dynamo.reset()


def against_eager(
    start: Callable[[], None], step: Callable[[], None], token: Tensor, logits: Tensor, eager: Sequence[Step]
) -> dict[str, Any]:
    """Compare steps with eager ones, each after the tokens that the eager ones chose.

    Returns
    -------
    dict
        ``off``: the worst relative error of logits. ``same_tokens``: the share of equal tokens. ``greedy``: whether
        each token has the greatest of its own logits.
    """
    off, same, greedy = 0.0, 0, True
    start()
    for wanted, chosen in eager:
        step()
        off = max(off, relative_error(logits.float(), wanted))
        same += int((token == chosen).sum())
        greedy &= torch.equal(logits.gather(1, token), logits.max(-1, keepdim=True).values)
        token.copy_(chosen)
    return {"off": off, "same_tokens": same / (len(eager) * token.numel()), "greedy": greedy}
