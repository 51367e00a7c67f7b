"""Small checkpoints for the tests, written with the safetensors library and with formulas of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from fp4dispatch import formats

N, K = 192, 160  # neither is a multiple of 128, so that 128x128 blocks have ragged edges

ROWS = (
    "modelopt-nvfp4",
    "nvfp4-pack-quantized",
    "fp8-tensor",
    "fp8-channel",
    "fp8-block",
    "fp8-block-ct",
)

NVFP4_ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8_ARGS = {"num_bits": 8, "type": "float"}

CONFIGS: dict[str, dict[str, Any]] = {
    "modelopt-nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["head*"]},
    "nvfp4-pack-quantized": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": NVFP4_ARGS,
                "input_activations": NVFP4_ARGS | {"dynamic": "local"},
            }
        },
        "ignore": ["re:head.*"],
    },
    "fp8-tensor": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["head"]},
    "fp8-channel": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": FP8_ARGS | {"strategy": "channel"},
                "input_activations": FP8_ARGS | {"strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["head"],
    },
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["head"]},
    "fp8-block-ct": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": ["re:.*proj"],
                "weights": FP8_ARGS | {"strategy": "block", "block_structure": [128, 128]},
                "input_activations": FP8_ARGS | {"strategy": "group", "group_size": 128, "dynamic": True},
            }
        },
        "ignore": ["head"],
    },
}


def stored_layer(row: str, n: int, k: int, seed: int, *, static: bool = True) -> dict[str, torch.Tensor]:
    """Random codes and scales in the tensors of one format; every layer has its own global scale."""
    g = torch.Generator().manual_seed(seed)
    scale = 0.01 * (1 + torch.rand((), generator=g))
    if "nvfp4" in row:
        codes = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
        block = (torch.rand(n, k // 16, generator=g) + 0.1).to(torch.float8_e4m3fn)
        if row == "modelopt-nvfp4":
            extra = {"input_scale": torch.tensor(0.5 + seed)} if static else {}
            return {"weight": codes, "weight_scale": block, "weight_scale_2": scale, **extra}
        extra = {"input_global_scale": torch.tensor([2.0 + seed])} if static else {}
        return {"weight_packed": codes, "weight_scale": block, "weight_global_scale": (1 / scale).reshape(1), **extra}
    weight = torch.randn(n, k, generator=g).to(torch.float8_e4m3fn)
    if row == "fp8-tensor":
        extra = {"input_scale": torch.tensor(0.5 + seed)} if static else {}
        return {"weight": weight, "weight_scale": scale, **extra}
    if row == "fp8-channel":
        return {"weight": weight, "weight_scale": torch.rand(n, 1, generator=g) + 0.1}
    blocks = torch.rand(-(-n // 128), -(-k // 128), generator=g) + 0.1
    return {"weight": weight, "weight_scale_inv" if row == "fp8-block" else "weight_scale": blocks}


def dequantised(row: str, t: dict[str, torch.Tensor]) -> torch.Tensor:
    """Weights by the formulas of the formats, in float64, from e2m1 values spelled out here."""
    if "nvfp4" in row:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
        packed = t["weight" if row == "modelopt-nvfp4" else "weight_packed"].long()
        q = torch.stack((values[packed & 15], values[packed >> 4]), -1).flatten(1)
        q = q * t["weight_scale"].double().repeat_interleave(16, 1)
        if row == "modelopt-nvfp4":
            return q * t["weight_scale_2"].double()
        return q / t["weight_global_scale"].double()
    q = t["weight"].double()
    if row in ("fp8-tensor", "fp8-channel"):
        return q * t["weight_scale"].double()
    scale = t["weight_scale_inv" if row == "fp8-block" else "weight_scale"].double()
    return q * scale.repeat_interleave(128, 0)[: q.shape[0]].repeat_interleave(128, 1)[:, : q.shape[1]]


class Net(nn.Module):
    """Two linear layers to quantise, one to leave, an embedding that is tied to the head, and a buffer."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, K)
        self.up_proj = nn.Linear(K, N, bias=bias)
        self.down_proj = nn.Linear(N, K, bias=bias)
        self.head = nn.Linear(K, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.down_proj(torch.relu(self.up_proj(self.embed(tokens)))))


def tensors_of(row: str, *, static: bool = True) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint for Net."""
    g = torch.Generator().manual_seed(9)
    tensors = {
        "embed.weight": torch.randn(32, K, generator=g),
        "steps": torch.tensor(7),
        "up_proj.bias": torch.randn(N, generator=g),
        "down_proj.bias": torch.randn(K, generator=g),
    }
    for seed, (name, n, k) in enumerate((("up_proj", N, K), ("down_proj", K, N))):
        tensors |= {f"{name}.{key}": value for key, value in stored_layer(row, n, k, seed, static=static).items()}
    return tensors


def write(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None, shards: int = 1) -> Path:
    """Write a checkpoint directory."""
    path.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
    else:
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = names[number::shards]
            save_file({name: tensors[name] for name in part}, path / file)
            weight_map |= dict.fromkeys(part, file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if config is not None:
        (path / "config.json").write_text(json.dumps({"model_type": "net", "quantization_config": config}))
    return path


def layer_weight(module: nn.Module) -> torch.Tensor:
    """The float64 weight of a quantised layer, by our formats."""
    w = module.weights()
    if w.op == "nvfp4_gemm":
        unit = formats.nvfp4_dequantize(w.weight, w.scale, torch.ones(1)).double()
        return unit * formats.expand_shards(w.global_scale, w.shard_rows).double().unsqueeze(1)
    if w.scaling == "block128":
        rows = w.scale.double().repeat_interleave(128, 0)[: w.n]
        return w.weight.double() * rows.repeat_interleave(128, 1)[:, : w.k]
    return w.weight.double() * (w.scale.double() if w.scaling == "tensor" else w.scale.double().unsqueeze(1))


def state_of(model: nn.Module) -> tuple[list[tuple[str, int]], dict[str, torch.Tensor], list[int]]:
    """Everything that must not change when loading fails: module objects, values, parameter objects."""
    modules = [(name, id(module)) for name, module in model.named_modules()]
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return modules, values, [id(p) for p in model.parameters()]


def assert_untouched(model: nn.Module, before: tuple[Any, ...]) -> None:
    modules, values, parameters = state_of(model)
    assert modules == before[0]
    assert parameters == before[2]
    assert values.keys() == before[1].keys()
    assert all(torch.equal(values[name], before[1][name]) for name in values)
