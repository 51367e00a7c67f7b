"""Layers that engines fuse share one scale: what is quantised, replaced or saved is right under vLLM's rule too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fp4dispatch.checkpoints import load_quantized, quantize_checkpoint, save_quantized
from fp4dispatch.errors import CheckpointError, FormatError
from fp4dispatch.models.replace import replace_linears
from fp4dispatch.models.replacing.fusion import FUSED_BY_ENGINES, SharedScales, fusion_groups, shared_scale
from tests.checkpoint_cases import layer_weight, write

K = 64
SIZES = {"q_proj": (64, 1.0), "k_proj": (32, 3.0), "v_proj": (32, 0.2), "o_proj": (64, 0.5)}
FUSED = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        for name, (n, size) in SIZES.items():
            layer = nn.Linear(K, n, bias=False)
            layer.weight.data = size * torch.randn(n, K, generator=g)
            setattr(self, name, layer)


def vllm_merge(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight of qkv_proj as vLLM 0.32 computes it: one scale, the largest, for codes that nobody rescales.

    ``quantization/modelopt.py``: ``weight_global_scale = layer.weight_scale_2.max()``.
    """
    parts = []
    largest = max(tensors[f"{name}.weight_scale_2"] for name in FUSED)
    for name in FUSED:
        # A checkpoint of this one layer, with vLLM's scale in place of its own.
        one = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        parts.append(dequantise(one | {"weight_scale_2": largest}))
    return torch.cat(parts)


def dequantise(one: dict[str, torch.Tensor]) -> torch.Tensor:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    codes = one["weight"].long()
    q = torch.stack((values[codes & 15], values[codes >> 4]), -1).flatten(1)
    return q * one["weight_scale"].double().repeat_interleave(16, 1) * one["weight_scale_2"].double()


def source(path: Path) -> tuple[Path, Attention]:
    model = Attention()
    write(path, dict(model.state_dict()))
    return path, model


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours - exact.double()).norm() / exact.double().norm())


def directories(tmp_path: Path, format: str) -> tuple[Path, Attention]:
    """The same model, quantised as a directory, and in memory and then saved."""
    path, model = source(tmp_path / "in")
    quantize_checkpoint(path, tmp_path / "quantized", format, list(SIZES))
    return tmp_path / "quantized", model


def replaced(tmp_path: Path, format: str) -> tuple[Path, Attention]:
    model = Attention()
    replace_linears(model, "nvfp4" if format in ("modelopt", "compressed-tensors") else "fp8")
    save_quantized(model, tmp_path / "saved", "compressed-tensors" if format == "fp8" else format)
    return tmp_path / "saved", Attention()


@pytest.mark.parametrize("make", [directories, replaced])
def test_fused_layers_share_one_global_scale_and_survive_the_largest(tmp_path, make):
    path, model = make(tmp_path, "modelopt")
    tensors = load_file(path / "model.safetensors")
    scales = {name: tensors[f"{name}.weight_scale_2"] for name in SIZES}
    assert torch.equal(scales["q_proj"], scales["k_proj"])
    assert torch.equal(scales["q_proj"], scales["v_proj"])
    assert not torch.equal(scales["q_proj"], scales["o_proj"])
    assert scales["q_proj"] == max(getattr(model, name).weight.abs().max() for name in FUSED) / 2688
    again = Attention()
    load_quantized(again, path)
    ours = torch.cat([layer_weight(getattr(again, name)) for name in FUSED])
    assert torch.equal(vllm_merge(tensors), ours), "vLLM would multiply by other weights"
    for name in SIZES:
        alone = Attention()
        replace_linears(alone, "nvfp4", include=[name])  # its group has one member, so the scale is its own
        exact = getattr(model, name).weight.detach()
        error = relative_error(layer_weight(getattr(again, name)), exact)
        assert error < 1.1 * relative_error(layer_weight(getattr(alone, name)), exact)


@pytest.mark.parametrize("make", [directories, replaced])
def test_the_reciprocals_of_compressed_tensors_are_equal_too(tmp_path, make):
    path, _ = make(tmp_path, "compressed-tensors")
    tensors = load_file(path / "model.safetensors")
    assert len({float(tensors[f"{name}.weight_global_scale"]) for name in FUSED}) == 1
    assert len({float(tensors[f"{name}.weight_global_scale"]) for name in SIZES}) == 2


@pytest.mark.parametrize("make", [directories, replaced])
def test_fp8_per_tensor_is_not_rounded_twice(tmp_path, make):
    """vLLM quantises shards with different scales again, with the largest (``requantize_with_max_scale``)."""
    path, model = make(tmp_path, "fp8")
    tensors = load_file(path / "model.safetensors")
    largest = max(tensors[f"{name}.weight_scale"] for name in FUSED)
    for name in FUSED:
        codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        again = (codes.float() * scale / largest).to(torch.float8_e4m3fn)
        assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
        assert relative_error(codes.double() * scale.double(), getattr(model, name).weight.detach()) < 0.03


@pytest.mark.parametrize("format", ["fp8-channel", "fp8-block"])
def test_scales_of_rows_and_blocks_stay_their_own(tmp_path, format):
    path, _ = source(tmp_path / "in")
    quantize_checkpoint(path, tmp_path / "all", format, list(SIZES))
    together = load_file(tmp_path / "all" / "model.safetensors")
    quantize_checkpoint(path, tmp_path / "one", format, ["v_proj"])
    alone = load_file(tmp_path / "one" / "model.safetensors")
    for name in (n for n in alone if n.startswith("v_proj.")):
        assert torch.equal(together[name].float(), alone[name].float())


def test_groups():
    kinds = dict.fromkeys(("a.q_proj", "a.k_proj", "b.q_proj", "a.o_proj", "up_proj", "gate_proj"), 64)
    kinds |= {"a.v_proj": 32, "c.q_a_proj": 64, "c.kv_a_proj_with_mqa": 64, "c.q_b_proj": 64}
    assert fusion_groups(kinds) == [
        ("a.q_proj", "a.k_proj"),  # another K, or another parent, is never fused
        ("up_proj", "gate_proj"),
        ("c.q_a_proj", "c.kv_a_proj_with_mqa"),
    ]
    members = [last for group in FUSED_BY_ENGINES for last in group]
    assert len(members) == len(set(members))


def test_a_layer_that_is_all_zero_does_not_spoil_its_group():
    weights = [torch.zeros(4, 16), torch.full((4, 16), -2688.0)]
    assert shared_scale(weights, "nvfp4") == 1
    assert shared_scale([torch.full((4, 16), 0.5 * 448), torch.zeros(4, 16)], "tensor") == 0.5
    assert shared_scale(weights, "row") is None


def test_the_layer_that_holds_nan_is_the_one_that_is_named(tmp_path):
    model = Attention()
    model.k_proj.weight.data[0, 0] = torch.nan
    before = dict(model.named_modules())
    with pytest.raises(FormatError, match="k_proj"):
        replace_linears(model, "nvfp4")
    assert dict(model.named_modules()) == before
    write(tmp_path / "in", dict(model.state_dict()))
    with pytest.raises(CheckpointError, match=r"'k_proj\.weight' holds NaN or Inf"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", "modelopt", list(SIZES))


def test_shared_scales_are_read_once_and_only_for_whole_groups():
    read = []

    def weight(name):
        read.append(name)
        return torch.full((2, K), float(len(name)))

    kinds = dict.fromkeys(("a.q_proj", "a.k_proj", "a.o_proj", "b.q_proj", "b.k_proj"), ("nvfp4", K))
    stored = {"a.q_proj": "A.Q.weight", "a.k_proj": "A.K.w", "a.o_proj": "A.O", "b.q_proj": "B.Q"}
    scales = SharedScales(kinds, stored, weight)
    assert read == []
    assert float(scales.of("a.k_proj")) * 2688 == pytest.approx(len("A.Q.weight"))
    assert scales.of("a.q_proj") is scales.of("a.k_proj")
    assert scales.of("a.o_proj") is None, "nothing is fused with it"
    assert scales.of("b.q_proj") is None, "the weight of b.k_proj is not there"
    assert read == ["A.Q.weight", "A.K.w"]
