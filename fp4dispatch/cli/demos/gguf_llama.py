"""A Llama model out of a GGUF file, as plain ``nn.Linear`` layers in 16 or 32 bits.

``from_pretrained(gguf_file=...)`` of transformers 5.23 gives the same model. It parses the metadata twice and takes
three times as long, which is most of the time of a demo.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4dispatch.errors import InputError

if TYPE_CHECKING:
    import torch

CONFIG = {
    "vocab_size": "llama.vocab_size",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "max_position_embeddings": "llama.context_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}
"""Names in ``LlamaConfig`` and in the file."""
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
"""Names of tensors in the file and of modules; those of a block stand behind ``blk.<number>.``."""


def load(file: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Return the model of a GGUF file on the CPU, weights decoded to ``dtype``; embedding and head are tied.

    Raises
    ------
    InputError
        If the file holds another architecture, or other tensors than such a model has.
    ImportError
        Without gguf or transformers.
    """
    import gguf
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = _reader(file)
    fields = {
        name: field.contents() for name, field in reader.fields.items() if not name.endswith(("tokens", "merges"))
    }
    if fields.get("general.architecture") != "llama" or any(
        tensor.name == "output.weight" for tensor in reader.tensors
    ):
        raise InputError(f"{file}: needs a Llama model whose head is tied to its embedding")
    values = {key: fields[name] for key, name in CONFIG.items()}
    rope = {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]}
    config = LlamaConfig(**values, rope_parameters=rope, tie_word_embeddings=True, dtype=dtype)
    heads = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        prefix, _, last = tensor.name.removesuffix(".weight").rpartition(".")
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        if last in heads:
            weight = _halves(weight, heads[last])
        block = f"model.layers.{prefix.removeprefix('blk.')}." if prefix else ""
        state[f"{block}{NAMES.get(last, last)}.weight"] = weight.to(dtype)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    found = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:
        raise InputError(f"{file}: missing {found.missing_keys}, unexpected {found.unexpected_keys}")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are computed, not stored
    return model.eval()  # type: ignore[no-any-return]


def _reader(file: Path) -> Any:
    """Return gguf's reader of a file, over a plain array.

    It takes a slice for each word of the vocabulary, and a slice of ``np.memmap`` costs four times as much.
    """
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> Any:
            return self.array

        @data.setter
        def data(self, mapped: Any) -> None:
            self.array = np.asarray(mapped)

    return Reader(file)


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rows: it rotates neighbours, transformers rotates the two halves of a head."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
