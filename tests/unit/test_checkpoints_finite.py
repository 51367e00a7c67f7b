"""NaN and Inf outside the quantised weights: refused by name wherever a tensor is carried over."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fp4dispatch
from fp4dispatch.checkpoints import load_quantized, quantize_checkpoint, save_quantized
from fp4dispatch.checkpoints.files.finite import check_finite
from fp4dispatch.cli import main
from fp4dispatch.errors import CheckpointError
from tests import checkpoint_cases
from tests.checkpoint_cases import CONFIGS, K, N, assert_untouched, state_of, tensors_of, write


class Net(nn.Module):
    """A layer to quantise, and one carried-over tensor of each kind."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.up_proj = nn.Linear(K, N)
        self.register_buffer("mask", torch.zeros(4, 4))


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: tensor.clone() for name, tensor in Net().state_dict().items()}


def poisoned(name: str, value: float) -> dict[str, torch.Tensor]:
    found = tensors()
    found[name].view(-1)[-1] = value
    return found


CASES = [
    *[(name, value) for name in ("norm.weight", "norm.bias", "up_proj.bias") for value in (torch.nan, -torch.inf)],
    ("mask", torch.nan),
    ("mask", torch.inf),
]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_refused_by_quantize_save_and_load(tmp_path, name, value):
    write(tmp_path / "in", poisoned(name, value))
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' holds NaN or Inf"):
        quantize_checkpoint(tmp_path / "in", tmp_path / "out", "fp8", ["up_proj"])

    write(tmp_path / "good", tensors())
    quantize_checkpoint(tmp_path / "good", tmp_path / "quantised", "fp8", ["up_proj"])
    model = Net()
    load_quantized(model, tmp_path / "quantised")
    with torch.no_grad():
        model.state_dict()[name].view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' holds NaN or Inf"):
        save_quantized(model, tmp_path / "saved", "fp8")

    file = tmp_path / "quantised" / "model.safetensors"
    stored = load_file(file)
    stored[name].view(-1)[-1] = value
    save_file(stored, file)
    fresh = Net()
    before = state_of(fresh)
    with pytest.raises(CheckpointError, match=rf"{file}: tensor '{name}' holds NaN or Inf"):
        load_quantized(fresh, tmp_path / "quantised")
    assert_untouched(fresh, before)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "good", "quantised"}


def test_a_mask_may_hold_minus_infinity(tmp_path):
    write(tmp_path / "in", poisoned("mask", -torch.inf))
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", "fp8", ["up_proj"])
    model = Net()
    load_quantized(model, tmp_path / "out")
    assert model.mask[-1, -1] == -torch.inf
    save_quantized(model, tmp_path / "again", "fp8")


def test_fused_biases_are_looked_at_too(tmp_path):
    stored = tensors_of("fp8-tensor")
    stored["up_proj.bias"][3] = torch.nan
    with pytest.raises(CheckpointError, match=r"'up_proj\.bias' holds NaN"):
        load_quantized(checkpoint_cases.Net(), write(tmp_path, stored, CONFIGS["fp8-tensor"]))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_float_is_read_to_its_last_element(dtype):
    good = torch.ones((1 << 22) + 3).to(dtype)
    check_finite("x", "a.weight", good)
    bad = good.clone()
    bad[-1] = torch.nan
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        check_finite("x", "a.weight", bad)
    with pytest.raises(CheckpointError, match=r"'a'"):
        check_finite("x", "a", bad.reshape(1, -1))


def test_bounds_that_clip_nothing_pass(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "output_proj_dims": 64}
    config = transformers.Gemma4AudioConfig(**sizes)
    model = transformers.Gemma4AudioModel(config)
    model.save_pretrained(tmp_path / "plain")
    assert main(["quantize", str(tmp_path / "plain"), str(tmp_path / "out"), "--format", "modelopt"]) == 0
    fp4dispatch.replace_linears(model)
    save_quantized(model, tmp_path / "saved")
    again = transformers.Gemma4AudioModel(config)
    load_quantized(again, tmp_path / "saved")
    assert again.layers[0].feed_forward1.ffw_layer_1.input_max == torch.inf
    for name, bad in (("a.input_max", torch.nan), ("a.input_min", torch.inf), ("a.amax", torch.inf)):
        with pytest.raises(CheckpointError, match=name):
            check_finite("x", name, torch.tensor(bad))


def test_what_holds_no_floats_passes():
    check_finite("x", "a.weight", torch.ones(3, dtype=torch.int64))
    check_finite("x", "a.weight", torch.ones(0))
    check_finite("x", "a.weight", torch.ones(3, device="meta"))
