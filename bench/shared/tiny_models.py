"""Tiny models of the architectures of Transformers: default configurations made small by rules, no downloads."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 320
LARGEST = 60_000_000
"""Parameters of a model that still counts as tiny."""
GENERATE = ("CAUSAL_LM", "MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CTC")
GENERATE += ("TEXT_TO_WAVEFORM", "TEXT_TO_SPECTROGRAM", "RNNT", "TDT", "MASKED_LM", "RETRIEVAL")
"""Tasks of which a model type gives at most two classes; a type without any gives one of ``OTHERS``."""
OTHERS = ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "OBJECT_DETECTION")


class NotBuiltError(Exception):
    """No tiny model came of the rules; the text says what the last attempt ended with."""


@dataclass(frozen=True)
class Attempt:
    """One way to make a configuration small: most models need the first, some one of the others."""

    layers: int = 2
    image: int = 56
    width: int = 64
    head: int | None = None
    all_heads: bool = False
    """As many key and value heads as query heads."""
    whole_lists: bool = False
    """Lists of layer numbers stay as they are."""
    channels: bool = True
    """Lists of channels become small."""
    only_layers: bool = False


ATTEMPTS = (
    *(Attempt(), Attempt(all_heads=True), Attempt(layers=4), Attempt(whole_lists=True), Attempt(channels=False)),
    *(Attempt(head=32), Attempt(image=32), Attempt(image=224), Attempt(width=128), Attempt(only_layers=True)),
)


def _at_most(largest: int) -> Callable[[int, Attempt], int]:
    return lambda value, attempt: min(value, largest)


RULES: tuple[tuple[str, Callable[[int, Attempt], int]], ...] = (
    (r"^(mamba_d_head|mamba_head_dim)$", lambda value, attempt: 32),
    (r"^codebook_size$", _at_most(256)),
    (r"^(num_.*experts_per_tok|num_experts_per_token|experts_per_token|moe_topk|moe_top_k|moe_k)$", _at_most(2)),
    (r"^(top_k_experts|num_selected_experts|n_activated_experts|experts_top_k)$", _at_most(2)),
    (r"^(num|num_local|n_routed|moe_num|num_routed|n|num_moe|ffn_num)_?experts$", _at_most(4)),
    (r"^(n_group|topk_group|num_expert_group|n_groups_experts|topk_groups)$", lambda value, attempt: 1),
    (r"^(n_shared_experts|num_shared_experts|num_zero_experts|zero_expert_num)$", _at_most(1)),
    (r"(_layers|^n_layers?|^layers|depth|_blocks|num_hidden_groups)$", _at_most(2)),
    (r"(kv_heads|key_value_heads|num_query_groups|multi_query_group_num|num_key_heads)$", _at_most(2)),
    (r"(mamba_n_heads|mamba_num_heads|n_mamba_heads)$", lambda value, attempt: 8),
    (r"(_heads|n_heads?|^heads|^n_head)$", _at_most(4)),
    (r"^(head_dim|d_kv|kv_channels|d_head|head_size|.*_head_dim|.*_head_size)$", _at_most(16)),
    (r"(_rank|_lora_r|lora_dim)$", _at_most(16)),
    (
        r"(intermediate_(size|dim|channels)|ffn_?dim|ff_dim|d_ff|n_inner|mlp_dim|_ffn|f?f?n?_?hidden_mlp)$",
        _at_most(128),
    ),
    (r"(feedforward|ff[n_]*_(hidden_)?size|hidden_dim_mlp|ffn_hidden|mlp_hidden_size|feed_forward.*)$", _at_most(128)),
    (r"(n_vocab|.*vocab_size.*|vocabulary_size|num_embeddings)$", _at_most(VOCABULARY)),
    (r"(hidden_size.*|d_model|n_embd|_dim|^dim|embedding_size|embed_size|_size_per_layer_input)$", _at_most(64)),
    (r"(_width|^width|d_embed|(hidden|out|conv)_channels|(en|de)coder_hidden|num_channels_hidden)$", _at_most(64)),
    (r"(mm_hidden_size|projector_hidden_size|d_inner|mamba_d_ssm)$", _at_most(64)),
    (r"(max_.*positions|max_position_embeddings|n_positions|max_(seq|sequence)_len(gth)?|n_ctx)$", _at_most(512)),
    (r"^(image_size|img_size|crop_size|base_image_size|input_size)$", lambda value, attempt: min(value, attempt.image)),
)
"""Key of a configuration -> its small value; the first rule that fits counts."""
LAYER_KINDS = re.compile(r"(layer_types|layers_block_type|_types|block_types|layer_type)$")
CHANNELS = re.compile(
    r"(hidden_sizes|embed_dims|dims|channels|conv_dim|tdnn_dim|_hidden_size|(embedding|feature)_sizes)$"
)
IMAGE = re.compile(r"(image_size|img_size|input_size)$")
DERIVED = frozenset(
    {"per_layer_config", "stage_names"} | {f"{u}{w}" for u in ("", "_") for w in ("out_features", "out_indices")}
)
UNWANTED = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype", "id2label", "label2id"})
UNWANTED |= {"architectures"}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
_AUDIO = {"num_filters": 4, "hidden_size": 16}
_SPARSE = {"intermediate_size": 128, "activation_sparsity_pattern": [0.0, 0.0], "num_kv_shared_layers": 0}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
_HEADS = {"num_key_value_heads": 4}
_EXPERTS = {"n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
OF_TYPE: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"text_config": _ROPE},
    "qwen2_5_vl": {"text_config": _ROPE},
    "vibevoice": {"acoustic_tokenizer_config": _AUDIO, "semantic_tokenizer_config": _AUDIO},
    **{f"vibevoice_acoustic_tokenizer{part}": _AUDIO for part in ("", "_encoder", "_decoder")},
    **{
        f"{name}_assistant": {"text_config": {"hidden_size_per_layer_input": 0}}
        for name in ("gemma4", "gemma4_unified")
    },
    "cohere_compass_text": _BOTH,
    "cohere_compass": {"text_config": _BOTH},
    "dots3_note_text": _HEADS,
    "dots3_note": {"text_config": _HEADS},
    "dots1": _EXPERTS,
    "csm": {"codec_config": {"hidden_size": 512}},
    "colqwen2": {"vlm_config": {"text_config": _ROPE}},
    "gemma3n_text": _SPARSE,
    "gemma3n": {"text_config": _SPARSE},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "blt": {"encoder_hash_byte_group_vocab": 500},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "emu3": {"vocabulary_map": {"<image>": 100}},
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
}
"""What single model types need beside the rules."""


def classes() -> list[tuple[str, str]]:
    """Return (model type, class) of all that the auto classes of Transformers know, sorted."""
    names = [name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("MAPPING_NAMES")]
    types = {model_type for name in names for model_type in getattr(modeling_auto, name)}
    return [(model_type, name) for model_type in sorted(types) for name in _of_type(model_type)]


def _of_type(model_type: str) -> list[str]:
    found = [name for task in GENERATE for name in _named(f"MODEL_FOR_{task}", model_type)]
    if not found:
        places = (*(f"MODEL_FOR_{task}" for task in OTHERS), "MODEL", "MODEL_FOR_PRETRAINING")
        found = [name for place in places for name in _named(place, model_type)][:1]
    return list(dict.fromkeys(found))[:2]


def _named(place: str, model_type: str) -> list[str]:
    found = getattr(modeling_auto, f"{place}_MAPPING_NAMES").get(model_type, [])
    return [found] if isinstance(found, str) else list(found)


def tiny_models(model_type: str, name: str) -> Iterator[nn.Module]:
    """Yield tiny float32 models of a class, one for each attempt that Transformers takes; weights are random.

    Raises
    ------
    NotBuiltError
        If there is none.
    """
    reasons: list[str] = []
    built = 0
    for attempt in ATTEMPTS:
        if len(reasons) >= 3 and len(set(reasons)) == 1:
            break
        try:
            model = _built(getattr(transformers, name), configuration(model_type, attempt))
        except Exception as error:  # of any kind: these are guesses at what a configuration may hold
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
            continue
        built += 1
        yield model
    if not built:
        raise NotBuiltError(reasons[0])


def _built(cls: Any, config: Any) -> nn.Module:
    config = _own_part(cls, config)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise NotBuiltError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model: nn.Module = cls(copy.deepcopy(config)).eval().float()
    _fill(model)
    return model.requires_grad_(False)


def _own_part(cls: Any, config: Any) -> Any:
    """Return the part of a configuration that a class is for: some types map to the class of their text model."""
    if cls.config_class is None or isinstance(config, cls.config_class):
        return config
    parts = [getattr(config, name, None) for name in ("text_config", "vision_config", "decoder", "audio_config")]
    return next((part for part in parts if isinstance(part, cls.config_class)), config)


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Give layers weights that keep the size of activations, so that an error in any of them reaches the output."""
    torch.manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            module.weight.normal_(0, module.weight.shape[-1] ** -0.5)
            if getattr(module, "bias", None) is not None:
                module.bias.normal_(0, 0.02)
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            parameter.normal_(0, 0.05)
        if parameter.dim() >= 3 and "expert" in name:
            parameter.normal_(0, parameter.shape[-1] ** -0.5)


def configuration(model_type: str, attempt: Attempt) -> Any:
    """Return the default configuration of a type, made small."""
    cls = CONFIG_MAPPING[model_type]
    values = _plain(cls().to_dict())
    values.pop("model_type", None)
    values = _few_layers(values) if attempt.only_layers else _in_step(_small(values, attempt), attempt)
    _merge(values, OF_TYPE.get(model_type, {}))
    config = cls.from_dict(values)
    config._attn_implementation = "eager"
    return config


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Leave out what says nothing about sizes; the type of an inner configuration says which class it has."""
    kept = {key: value for key, value in values.items() if key not in UNWANTED}
    return {key: _plain(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _merge(values: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _few_layers(values: dict[str, Any]) -> dict[str, Any]:
    def small(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _few_layers(value)
        counted = type(value) is int and re.search(r"(_layers|^n_layers?)$", key)
        return min(value, 2) if counted else value

    return {key: small(str(key), value) for key, value in values.items()}


def _small(values: dict[str, Any], attempt: Attempt) -> dict[str, Any]:
    kept = {key: value for key, value in values.items() if key not in DERIVED}
    return {key: _value(key, value, attempt) if isinstance(key, str) else value for key, value in kept.items()}


def _value(key: str, value: Any, attempt: Attempt) -> Any:
    if isinstance(value, dict):
        return _rope(value) if key in ("rope_parameters", "rope_scaling") else _small(value, attempt)
    if type(value) is int:
        return _number(key, value, attempt)
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(each, str) for each in value) and LAYER_KINDS.search(key):
            kinds = list(dict.fromkeys(value))
            return [*kinds, *value][: attempt.layers]
        if all(type(each) is int for each in value):
            return _numbers(key, list(value), attempt)
    return value


def _number(key: str, value: int, attempt: Attempt) -> int:
    if _is_token(key):
        return _token(value)
    return next((rule(value, attempt) for pattern, rule in RULES if re.search(pattern, key)), value)


def _is_token(key: str) -> bool:
    named = re.search(r"(token_ids?|token_index|_id|_token|_index|_idx|_start|_end)$", key)
    return bool(named) and not re.search(r"(layer|depth|select)", key)


def _token(value: int) -> int:
    return value if value < VOCABULARY - 20 else VOCABULARY - 1 - value % 17


def _numbers(key: str, values: list[int], attempt: Attempt) -> list[int]:
    if key.endswith("mrope_section"):
        return [2, 3, 3]
    if _is_token(key) and max(values) >= VOCABULARY:
        return [_token(value) for value in values]
    if re.search(r"(layer|idx|index)", key) and not re.search(r"layers_per|num_layers", key):
        return values if attempt.whole_lists else [value for value in values if value < attempt.layers]
    if re.search(r"(depths|layers)$", key):
        return [min(value, 1) for value in values]
    if IMAGE.search(key):
        return [attempt.image] * len(values)
    if CHANNELS.search(key) and attempt.channels and max(values) > 64:
        return [min(value, 32 * (1 + i)) for i, value in enumerate(values)]
    return values


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    fixed = {"mrope_section": [2, 3, 3], "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    return {key: _rope(value) if isinstance(value, dict) else fixed.get(key, value) for key, value in values.items()}


def _in_step(values: dict[str, Any], attempt: Attempt) -> dict[str, Any]:
    """Return a configuration whose lists of layers have as many entries as there are layers."""
    made = {key: _in_step(value, attempt) if isinstance(value, dict) else value for key, value in values.items()}
    kinds = [
        v for k, v in made.items() if isinstance(v, list) and v and isinstance(v[0], str) and LAYER_KINDS.search(k)
    ]
    for key, value in made.items():
        if type(value) is not int:
            continue
        if key in ("num_hidden_layers", "n_layers", "num_layers", "n_layer") and (kinds or attempt.layers != 2):
            made[key] = len(kinds[0]) if kinds else min(max(value, 1), attempt.layers)
        elif attempt.all_heads and re.search(r"(kv_heads|key_value_heads|num_key_heads)$", key):
            made[key] = 4
        elif attempt.head and key == "head_dim":
            made[key] = attempt.head
        elif value == 64 and attempt.width != 64:
            made[key] = attempt.width
    return made
