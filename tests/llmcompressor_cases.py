"""Checkpoints that llm-compressor itself wrote, stored in ``tests/data/llmcompressor``, and how they were written.

llm-compressor 0.14 needs an older Transformers than the integration (5.17), so it has an environment of its own::

    pip install llmcompressor==0.14.0.1
    python -m tests.llmcompressor_cases tests/data/llmcompressor
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

STORED = Path(__file__).parent / "data" / "llmcompressor"

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_QWEN_EXPERTS = {"num_experts": 2, "moe_intermediate_size": 32, "num_experts_per_tok": 1}

# folder: class of the model, class of its configuration, more sizes, scheme of llm-compressor, what it leaves alone
CASES: dict[str, tuple[str, str, dict[str, Any], str, tuple[str, ...]]] = {
    "llama-nvfp4": ("LlamaForCausalLM", "LlamaConfig", {}, "NVFP4", ("lm_head",)),
    "llama-nvfp4a16": ("LlamaForCausalLM", "LlamaConfig", {}, "NVFP4A16", ("lm_head",)),
    "qwen3-nvfp4": ("Qwen3ForCausalLM", "Qwen3Config", {}, "NVFP4", ("lm_head",)),
    "gemma3-nvfp4a16": ("Gemma3ForCausalLM", "Gemma3TextConfig", {}, "NVFP4A16", ("lm_head",)),
    "phi3-nvfp4": ("Phi3ForCausalLM", "Phi3Config", {}, "NVFP4", ("lm_head",)),
    "mixtral-nvfp4a16": ("MixtralForCausalLM", "MixtralConfig", _EXPERTS, "NVFP4A16", ("lm_head", "re:.*gate$")),
    "mixtral-attention": (
        *("MixtralForCausalLM", "MixtralConfig", _EXPERTS, "NVFP4A16"),
        ("lm_head", "re:.*gate$", "re:.*experts.*"),
    ),
    "qwen3moe-nvfp4a16": (
        *("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _QWEN_EXPERTS, "NVFP4A16"),
        ("lm_head", "re:.*gate$"),
    ),
}


def source(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Build the unquantised model of a case, with the same random weights each time."""
    import transformers

    model_class, config_class, more, _, _ = CASES[name]
    torch.manual_seed(7)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**{**_SIZES, **more}))
    for parameter in model.parameters():  # the buffers of rotary embeddings stay in fp32, as from_pretrained has them
        parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
    return model.eval()


def write(name: str, out: Path) -> None:
    """Quantise and save a case with llm-compressor."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from torch.utils.data import DataLoader

    *_, scheme, ignore = CASES[name]
    samples = [{"input_ids": torch.arange(i, i + 16), "attention_mask": torch.ones(16).long()} for i in (3, 9, 17)]
    with tempfile.TemporaryDirectory() as plain:
        source(name).save_pretrained(plain)
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=list(ignore))
        data = {} if scheme == "NVFP4A16" else {"dataset": DataLoader(samples, batch_size=1), "processor": _tokenizer()}  # type: ignore[arg-type]
        oneshot(model=model, recipe=recipe, **data)
        model.save_pretrained(out, save_compressed=True)
    for file in ("recipe.yaml", "generation_config.json"):
        (out / file).unlink(missing_ok=True)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x")), pad_token="x")


def main() -> None:
    """Write all cases below the folder that is named on the command line."""
    for name in CASES:
        write(name, Path(sys.argv[1]) / name)


if __name__ == "__main__":
    main()
