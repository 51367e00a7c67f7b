"""Tiny random models of real architectures, built by transformers from configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _text(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 16}
    return {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **more}


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def _causal(name: str, **more: Any) -> Callable[[Any], Any]:
    return lambda t: getattr(t, f"{name}ForCausalLM")(getattr(t, f"{name}Config")(**_text(**more)))


def _deepseek(t: Any) -> Any:
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 12, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = _text(first_k_dense_replace=1, moe_intermediate_size=32, **heads, **experts)
    del config["head_dim"]
    return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**{**config, "num_key_value_heads": 4}))


def _llava(t: Any) -> Any:
    config = t.LlavaConfig(vision_config=t.CLIPVisionConfig(**_VISION), text_config=t.LlamaConfig(**_text()))
    return t.LlavaForConditionalGeneration(config)


def _gemma3(t: Any) -> Any:
    vision, text = t.SiglipVisionConfig(**_VISION), t.Gemma3TextConfig(**_text())
    config = t.Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=4)
    return t.Gemma3ForConditionalGeneration(config)


def _qwen2_vl(t: Any) -> Any:
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "patch_size": 14}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    text = _text(rope_parameters=rope, bos_token_id=0, eos_token_id=1)
    return t.Qwen2VLForConditionalGeneration(t.Qwen2VLConfig(vision_config=vision, text_config=text))


def dia(t: Any) -> Any:
    """Make a model with a ``generate`` of its own, and a head that no method of Transformers returns."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 96, "head_dim": 16}
    cross = {"cross_num_attention_heads": 4, "cross_num_key_value_heads": 4, "cross_head_dim": 16}
    encoder, decoder = t.DiaEncoderConfig(**sizes), t.DiaDecoderConfig(**sizes, **cross, cross_hidden_size=64)
    return t.DiaForConditionalGeneration(t.DiaConfig(encoder_config=encoder, decoder_config=decoder))


def _small(architecture: str, config: str, **sizes: Any) -> Callable[[Any], Any]:
    return lambda t: getattr(t, architecture)(getattr(t, config)(**sizes))


_ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}

MODELS: dict[str, Callable[[Any], Any]] = {
    "Mixtral": _causal("Mixtral", num_local_experts=4),
    "Qwen3-MoE": _causal("Qwen3Moe", num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2),
    "DeepSeek-V3": _deepseek,
    "LLaVA": _llava,
    "Gemma-3": _gemma3,
    "Qwen2-VL": _qwen2_vl,
    "Llama": _causal("Llama"),
    "Qwen2": _causal("Qwen2"),
    "Qwen3": _causal("Qwen3"),
    "Mistral": _causal("Mistral"),
    "Gemma-3 text": lambda t: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**_text())),
    "Phi-3": _causal("Phi3", pad_token_id=0),
    "GPT-2": _small(
        *("GPT2LMHeadModel", "GPT2Config"),
        n_layer=1,
        n_embd=64,
        n_head=2,
        vocab_size=128,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "OPT": _small(
        *("OPTForCausalLM", "OPTConfig"),
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=128,
        word_embed_proj_dim=64,
    ),
    "Falcon": _small(
        *("FalconForCausalLM", "FalconConfig"),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=128,
    ),
    "Bloom": _small("BloomForCausalLM", "BloomConfig", hidden_size=64, n_layer=1, n_head=4, vocab_size=128),
    "BERT": _small("BertForMaskedLM", "BertConfig", vocab_size=128, **_ENCODER),
    "T5": _small(
        *("T5ForConditionalGeneration", "T5Config"),
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=1,
        num_heads=4,
        vocab_size=128,
    ),
    "Mamba": _small(
        "MambaForCausalLM", "MambaConfig", hidden_size=64, state_size=16, num_hidden_layers=1, vocab_size=128
    ),
}

_SPREAD = {"q_proj": 0.5, "k_proj": 0.25, "up_proj": 0.4, "lm_head": 0.5}
"""Factors that give the shards of fused layers different global scales."""


def _for_engines(name: str, **more: int) -> Callable[[Any], Any]:
    """Make a model of sizes that vLLM runs, whose predictions depend on its weights."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 256, "initializer_range": 0.2}
    sizes |= more

    def make(transformers: Any) -> Any:
        model = _causal(name, **sizes)(transformers)
        with torch.no_grad():
            for parameter, tensor in model.named_parameters():
                tensor.mul_(_SPREAD.get(parameter.split(".")[-2], 1.0))
        return model

    return make


ENGINE_MODELS: dict[str, Callable[[Any], Any]] = {
    f"{name} for engines": _for_engines(name) for name in ("Llama", "Qwen2", "Qwen3")
} | {"Llama in blocks": _for_engines("Llama", hidden_size=256, intermediate_size=384, head_dim=64)}


def build(name: str, transformers: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of the dictionaries above with the same random weights each time, in evaluation mode."""
    torch.manual_seed(0)
    return (MODELS | ENGINE_MODELS)[name](transformers).to(dtype).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Return the logits of 16 tokens."""
    ids = torch.arange(1, 17).view(1, 16)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    result: torch.Tensor = model(input_ids=ids, **more).logits.float()
    return result
