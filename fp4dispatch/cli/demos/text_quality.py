"""How well a language model predicts a text: perplexity, and KL divergence from the unquantised model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROWS = 128
"""Tokens whose probabilities are held at a time."""


@dataclass(frozen=True)
class TextQuality:
    """How well a model predicts the tokens of a text, each from all before it.

    Parameters
    ----------
    tokens
        Predicted tokens.
    perplexity
        exp of the mean negative log-likelihood.
    kl
        Mean KL divergence of the next-token distribution from the original model's, in nats; 0 for the original.
    same_top
        Share of positions at which the most likely token is the original's.
    """

    tokens: int
    perplexity: float
    kl: float
    same_top: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return logits [tokens, vocabulary] of one text, in the dtype and on the device of the model.

    Parameters
    ----------
    ids
        int64 [tokens], on any device.
    """
    import torch

    device = next(model.parameters()).device
    with torch.inference_mode():
        return model(ids.to(device).unsqueeze(0), use_cache=False).logits[0]  # type: ignore[no-any-return]


def quality(found: torch.Tensor, ids: torch.Tensor, original: torch.Tensor | None = None) -> TextQuality:
    """Return the quality of logits, computed in float32.

    Parameters
    ----------
    found
        Logits [tokens, vocabulary] of a text.
    ids
        int64 [tokens], the text.
    original
        Logits of the unquantised model; None: these are the original.
    """
    import torch

    loss = kl = same = 0.0
    count = len(ids) - 1
    for start in range(0, count, ROWS):
        rows = slice(start, min(start + ROWS, count))
        log_p = found[rows].float().log_softmax(dim=-1)
        target = ids[rows.start + 1 : rows.stop + 1].to(found.device)
        loss -= float(log_p.gather(1, target.unsqueeze(1)).double().sum())
        if original is not None:
            log_q = original[rows].to(found.device).float().log_softmax(dim=-1)
            kl += float((log_q.exp() * (log_q - log_p)).sum(dim=-1).double().sum())
            same += float((log_q.argmax(dim=-1) == log_p.argmax(dim=-1)).sum())
    perplexity = float(torch.tensor(loss / count, dtype=torch.float64).exp())
    return TextQuality(count, perplexity, kl / count, same / count if original is not None else 1.0)
