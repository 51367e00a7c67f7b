"""NVFP4 block scales of least squared error: never worse in any block, the same format, found by brute force too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4dispatch
from fp4dispatch import formats as f
from fp4dispatch.cli import main
from fp4dispatch.errors import InputError
from fp4dispatch.formats import nvfp4_mse


def weights(m=96, k=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * 0.02
    x[3] = 0.0
    x[4] *= 1e-6
    x[5, ::16] = 0.9
    return x


def errors(x, q):
    return (f.nvfp4_dequantize(*q).double() - x.double()).square().reshape(x.shape[0], -1, 16).sum(-1)


def test_no_block_is_worse_and_all_together_are_much_better():
    x = weights()
    usual, best = errors(x, f.nvfp4_quantize(x)), errors(x, f.nvfp4_quantize_mse(x))
    assert bool((best <= usual * (1 + 1e-5)).all())
    assert float(best[6:].sum()) < 0.8 * float(usual[6:].sum())


def test_each_scale_is_the_best_of_its_candidates():
    x = weights(8, 64)
    usual, found = f.nvfp4_quantize(x), f.nvfp4_quantize_mse(x)
    got = errors(x, found)
    for step in (0, *nvfp4_mse.STEPS):
        sf = (usual.sf.view(torch.uint8).short() + step).clamp(1, 126).to(torch.uint8).view(torch.float8_e4m3fn)
        scaled = x.reshape(8, -1, 16) / (sf.float() * usual.global_scale).unsqueeze(-1)
        values = f.decode_e2m1(f.encode_e2m1(scaled)) * (sf.float() * usual.global_scale).unsqueeze(-1)
        other = (values.double() - x.reshape(8, -1, 16).double()).square().sum(-1)
        assert bool((got <= other * (1 + 1e-5)).all()), step


def test_four_over_six_is_among_the_candidates():
    x = torch.zeros(2, 32)
    x[0, 0] = 2688.0  # the global scale is 1
    x[1, :16] = torch.tensor([4.0, 3.0, 2.0, 1.0] * 4)  # exact with scale 1: the largest maps to 4
    found = f.nvfp4_quantize_mse(x)
    assert float(errors(x, found)[1, 0]) == 0.0
    assert float(errors(x, f.nvfp4_quantize(x))[1, 0]) > 0.0
    assert float(found.sf[1, 0]) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_inf_zeros_and_chunks_are_as_with_the_usual_scales(dtype, monkeypatch):
    x = weights().to(dtype)
    x[7, 3], x[8, 20] = float("nan"), float("inf")
    usual, found = f.nvfp4_quantize(x), f.nvfp4_quantize_mse(x)
    assert torch.equal(usual.sf.float().isnan(), found.sf.float().isnan())
    assert torch.equal(found.sf[3].float(), torch.ones(16))
    assert torch.equal(usual.global_scale, found.global_scale)
    monkeypatch.setattr(nvfp4_mse, "CHUNK", 700)  # two rows at a time
    for whole, parts in zip(found, f.nvfp4_quantize_mse(x), strict=True):
        assert torch.equal(whole.reshape(-1).view(torch.uint8), parts.reshape(-1).view(torch.uint8))
    swizzled = f.nvfp4_quantize_mse(x, sf_layout="128x4")
    back = f.from_128x4(swizzled.sf, 96, 16)
    assert torch.equal(back.view(torch.uint8), found.sf.view(torch.uint8))
    assert f.nvfp4_quantize_mse(x[:0]).data.shape == (0, 128)


def test_layers_take_it_and_shared_scales_stay():
    def model():
        torch.manual_seed(0)
        return nn.ModuleDict({name: nn.Linear(64, 32) for name in ("q_proj", "k_proj", "v_proj")}).bfloat16()

    usual, best = model(), model()
    fp4dispatch.replace_linears(usual, "nvfp4")
    fp4dispatch.replace_linears(best, "nvfp4", calibrate="mse")
    for name, layer in best.items():
        assert torch.equal(layer.weight_scale_2, usual[name].weight_scale_2)
        assert not torch.equal(layer.weight_scale.view(torch.uint8), usual[name].weight_scale.view(torch.uint8))
        want = f.nvfp4_quantize_mse(model()[name].weight.detach(), layer.weight_scale_2)
        assert torch.equal(layer.weight, want.data)
    mixed = model()
    fp4dispatch.replace_linears(mixed, {"q_proj": "nvfp4", "*": "fp8_row"}, calibrate="mse")


@pytest.mark.parametrize(("fmt", "calibrate", "words"), [("nvfp4", "best", "is not known"), ("fp8", "mse", "no layer")])
def test_a_calibration_that_does_not_fit_is_refused(fmt, calibrate, words):
    model = nn.Sequential(nn.Linear(64, 32))
    with pytest.raises(InputError, match=words):
        fp4dispatch.replace_linears(model, fmt, calibrate=calibrate)
    assert isinstance(model[0], nn.Linear)


def test_the_command_writes_a_checkpoint_with_less_error(tmp_path, capsys):
    from safetensors.torch import save_file

    source, weight = tmp_path / "model", weights().to(torch.bfloat16)
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "unheard-of"}')
    save_file({"a.fc.weight": weight}, source / "model.safetensors")
    found = {}
    for name in ("max", "mse"):
        out = tmp_path / name
        words = ["--format", "modelopt", "--include", "a.fc", "--calibrate", name]
        assert main(["quantize", str(source), str(out), *words]) == 0, capsys.readouterr().err
        with fp4dispatch.open_checkpoint(out) as made:
            parts = [made.tensor(f"a.fc.{part}") for part in ("weight", "weight_scale", "weight_scale_2")]
        found[name] = float(errors(weight.float(), parts)[6:].sum())
    assert found["mse"] < 0.8 * found["max"]
    refused = [
        "quantize",
        str(source),
        str(tmp_path / "x"),
        "--format",
        "fp8",
        "--include",
        "a.fc",
        "--calibrate",
        "mse",
    ]
    assert main(refused) == 1
    assert "no layer becomes NVFP4" in capsys.readouterr().err
