"""Small decoders of transformers, with graphs around them."""

from __future__ import annotations

import torch

from fp4dispatch.graphs.enabling import spec_of
from fp4dispatch.graphs.finder import find_inner
from fp4dispatch.graphs.model import Graphs

SIZES = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
OPTIONS = {
    "Gemma3Text": {"head_dim": 64, "sliding_window": 32},
    "Mistral": {"sliding_window": None},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
CAUSAL = {"Gemma3Text": "Gemma3"}
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Gemma3Text", "Qwen3Moe"]


def model(family="Llama", device="cpu", dtype=torch.float32, seed=0, **options):
    import transformers

    options = OPTIONS.get(family, {}) | options
    options = {"attn_implementation": "sdpa", "pad_token_id": 0} | options
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    torch.manual_seed(seed)
    made = getattr(transformers, f"{CAUSAL.get(family, family)}ForCausalLM")(config)
    return made.to(device, dtype).eval().requires_grad_(False)


def spec(causal):
    return spec_of(find_inner(causal))


def captured(causal, tokens, **options):
    graphs = Graphs(spec(causal), tokens, **options)
    graphs.capture()
    assert not graphs.disabled, graphs.disabled
    return graphs


def replays(graphs):
    return {rows: row["replays"] for rows, row in graphs.stats.as_dict()["buckets"].items() if row["replays"]}


def rejects(graphs):
    return graphs.stats.as_dict()["reasons"]


def steps(graphs):
    """Captures and replays of decode steps."""
    found = graphs.decode_stats.as_dict()
    return found["captures"], found["replays"]
