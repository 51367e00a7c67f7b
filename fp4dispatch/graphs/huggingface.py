"""The finders of Hugging Face decoders, as transformers 5 has them. transformers is not imported for it."""

from __future__ import annotations

from torch import nn

from fp4dispatch.graphs.finder import Finder, Inner, by_attributes, register_finder

_DENSE = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "phi3": "Phi3",
    "gemma3": "Gemma3",
}
_WITHOUT_SYNC = ("grouped_mm", "batched_mm")
"""Implementations of experts that never wait for the GPU. The others read on the host which experts are used."""


def _names(folder: str, prefix: str) -> tuple[tuple[str, str], ...]:
    """Return the classes of a family, with the path of the inner module in each."""
    module = f"transformers.models.{folder}.modeling_{folder}"
    text = f"{prefix}TextModel" if folder == "gemma3" else f"{prefix}Model"
    return (f"{module}.{prefix}ForCausalLM", "model"), (f"{module}.{text}", "")


def _experts(inner: str) -> Finder:
    """Return a finder that breaks at experts too, where their code waits for the GPU: that cannot be captured."""
    attention = by_attributes(inner, "layers", "self_attn", count="num_hidden_layers")

    def find(model: nn.Module) -> Inner:
        found = attention(model)
        if getattr(found.module.config, "_experts_implementation", None) in _WITHOUT_SYNC:
            return found
        sparse = [layer.mlp.experts for layer in found.layers if hasattr(layer.mlp, "experts")]
        marked = {*found.breaks, *sparse}
        breaks = tuple(module for layer in found.layers for module in layer.modules() if module in marked)
        return Inner(found.module, found.name, found.layers, breaks)

    return find


def register() -> None:
    """Register the finders: Llama, Qwen2, Qwen3, Gemma-3 (text), Mistral, Phi-3 and Qwen3-MoE."""
    for folder, prefix in _DENSE.items():
        for cls, inner in _names(folder, prefix):
            register_finder(cls, by_attributes(inner, "layers", "self_attn", count="num_hidden_layers"))
    for cls, inner in _names("qwen3_moe", "Qwen3Moe"):
        register_finder(cls, _experts(inner))
