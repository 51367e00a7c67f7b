"""What integrations of engines share: fused layers keep the scale of each shard, exactly, and odd ones are refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.checkpoints.config.quant_config import read_block
from fp4dispatch.checkpoints.schemes import SCHEMES
from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError, InputError
from fp4dispatch.integrations.engines.fused import group_of, renamed, scheme_of, shard_names, with_engine_names
from fp4dispatch.integrations.engines.parameters import loaded, register_parameters
from fp4dispatch.integrations.engines.refusals import READABLE, Host, check_readable
from fp4dispatch.integrations.engines.shards import check_blocks, check_split, weights_of_shards
from fp4dispatch.models.linear import FP4Linear, FP8Linear

ROWS = [32, 16, 16]
HOST = Host("vLLM", "leave it")
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def nvfp4(divides=False):
    """Tensors of three shards with different global scales, as an engine loads them, and their weight in fp64."""
    torch.manual_seed(0)
    parts = [formats.nvfp4_quantize(torch.randn(n, 64) * 3**i) for i, n in enumerate(ROWS)]
    global_scale = torch.cat([part.global_scale.reshape(1) for part in parts])
    input_scale = torch.tensor([0.5, 2.0, 1.0])
    if divides:
        global_scale = (2.0 ** torch.tensor([3, 5, 1])).float()
        input_scale = input_scale.reciprocal()
    scheme = SCHEMES["nvfp4-pack-quantized" if divides else "modelopt-nvfp4"]
    assert scheme.global_scale
    assert scheme.input_scale
    tensors = {
        scheme.weight: torch.cat([part.data for part in parts]),
        scheme.scale: torch.cat([part.sf.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn),
        scheme.global_scale: global_scale,
        scheme.input_scale: input_scale,
    }
    factors = global_scale.reciprocal() if divides else global_scale
    ones = [formats.nvfp4_dequantize(part.data, part.sf, torch.ones(1)).double() for part in parts]
    return scheme, tensors, torch.cat([one * f.double() for one, f in zip(ones, factors, strict=True)])


@pytest.mark.parametrize("divides", [False, True])
def test_each_shard_keeps_its_global_scale(divides):
    scheme, tensors, expected = nvfp4(divides)
    weights = weights_of_shards(scheme, tensors, ROWS, static=True, layer="x")
    assert weights.shard_rows == tuple(ROWS)
    assert float(weights.input_scale) == 2.0, "the largest: no more values saturate"
    layer = FP4Linear.from_weights(weights, dtype=torch.float32, activation="bf16")
    torch.testing.assert_close(layer(torch.eye(64)).double().t(), expected, rtol=1e-6, atol=1e-6)


def test_equal_scales_are_one_shard():
    scheme, tensors, _ = nvfp4()
    tensors["weight_scale_2"] = torch.full((3,), 0.25)
    weights = weights_of_shards(scheme, tensors, ROWS, static=None, layer="x")
    assert (weights.shard_rows, weights.global_scale.tolist()) == ((64,), [0.25])


def test_input_scales_that_are_not_static_or_not_there():
    scheme, tensors, _ = nvfp4()
    assert weights_of_shards(scheme, tensors, ROWS, static=False, layer="x").input_scale is None
    tensors["input_scale"] = torch.full((3,), torch.nan)
    assert weights_of_shards(scheme, tensors, ROWS, static=None, layer="x").input_scale is None
    with pytest.raises(CheckpointError, match="x: tensor 'input_scale' is missing or holds NaN"):
        weights_of_shards(scheme, tensors, ROWS, static=True, layer="x")


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_2"])
def test_a_scale_that_was_not_loaded(name):
    scheme, tensors, _ = nvfp4()
    tensors[name] = tensors[name].clone()
    tensors[name].view(torch.uint8)[-1] = 0x7F
    if name == "weight_scale_2":
        tensors[name][1] = torch.nan
    with pytest.raises(CheckpointError, match=f"x: tensor '{name}' is missing or holds NaN"):
        weights_of_shards(scheme, tensors, ROWS, static=None, layer="x")


def test_fp8_shards_with_different_scales_become_one_scale_a_row():
    torch.manual_seed(0)
    weight = (torch.randn(64, 64) * 40).to(torch.float8_e4m3fn)
    scales = torch.tensor([0.1, 0.01, 1.0])
    tensors = {"weight": weight, "weight_scale": scales, "input_scale": torch.ones(3)}
    weights = weights_of_shards(SCHEMES["fp8-tensor"], tensors, ROWS, static=True, layer="x")
    assert (weights.scaling, weights.input_scale) == ("row", None)
    layer = FP8Linear.from_weights(weights, dtype=torch.float32, activation="bf16")
    expected = weight.double() * scales.double().repeat_interleave(torch.tensor(ROWS))[:, None]
    torch.testing.assert_close(layer(torch.eye(64)).double().t(), expected, rtol=1e-6, atol=1e-6)
    tensors["weight_scale"] = torch.full((3,), 0.5)
    same = weights_of_shards(SCHEMES["fp8-tensor"], tensors, ROWS, static=True, layer="x")
    assert (same.scaling, float(same.scale), float(same.input_scale)) == ("tensor", 0.5, 1.0)
    tensors["weight_scale"] = torch.rand(64, 1)
    rows = weights_of_shards(SCHEMES["fp8-channel"], tensors, ROWS, static=False, layer="x")
    assert (rows.scaling, tuple(rows.scale.shape)) == ("row", (64,))


@pytest.mark.parametrize(("k", "size"), [(96, 2), (192, 1), (192, 4), (4096, 8), (16, 1)])
def test_parts_of_whole_blocks(k, size):
    check_split("x", k, k // size, 16)


def test_a_part_that_splits_a_block():
    with pytest.raises(InputError, match=r"x: K=96 on 4 ranks is 24 a rank.* size of 1, 2, 3, 6"):
        check_split("x", 96, 24, 16)
    with pytest.raises(InputError, match=r"K=4304 on 4 ranks is 1076 a rank.*of 1$"):
        check_split("x", 4304, 1076, 16)
    with pytest.raises(InputError, match="K=24 is not a multiple of 16"):
        check_split("x", 24, 24, 16)


class Parameter(torch.nn.Parameter):
    """A class of parameters as engines have them."""

    def __new__(cls, data, **more):
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data, weight_loader, **more):
        self.weight_loader = weight_loader


KINDS = SimpleNamespace(
    **{kind: type(kind, (Parameter,), {}) for kind in ("ModelWeightParameter", "GroupQuantScaleParameter")},
    **{kind: type(kind, (Parameter,), {}) for kind in ("ChannelQuantScaleParameter", "PerTensorScaleParameter")},
)


@pytest.mark.parametrize("name", READABLE)
def test_parameters_of_a_layer(name):
    scheme, layer, calls = SCHEMES[name], torch.nn.Module(), []
    register_parameters(layer, KINDS, scheme, [32, 16], 64, lambda *args: calls.append(args))
    tensors = loaded(layer, scheme)
    assert tuple(tensors) == scheme.names
    for suffix, spec in scheme.specs(48, 64).items():
        one = () in spec.shapes
        assert tuple(tensors[suffix].shape) == ((2,) if one else spec.shapes[0])
        assert one == (type(getattr(layer, suffix)).__name__ == "PerTensorScaleParameter")
        assert suffix == scheme.weight or bool(tensors[suffix].float().isnan().all())
    with pytest.raises(CheckpointError, match=r"'weight_scale' is missing"):
        weights_of_shards(scheme, tensors, [32, 16], static=None, layer="x")
    layer.weight_scale.weight_loader(layer.weight_scale, torch.ones(48), "q")
    column = scheme.scaling == "row"
    assert [(tuple(given.shape), shard) for _, given, shard in calls] == [((48, 1) if column else (48,), "q")]


def test_formats_that_engines_have_no_parameters_for():
    check_readable(modelopt(), HOST)
    with pytest.raises(
        CheckpointUnsupportedError, match=r"here: the format fp8-block-ct of modelopt .* in vLLM.*leave it"
    ):
        check_readable(modelopt(quant_algo="FP8_PB_WO"), HOST)
    blocks = read_block({"quant_method": "fp8", "weight_block_size": [128, 128]}, "here")
    with pytest.raises(CheckpointUnsupportedError, match="here: the format fp8-block of fp8 is not supported in vLLM"):
        check_readable(blocks, HOST)
    able = replace(HOST, blocks=True)
    check_readable(blocks, able)
    check_readable(modelopt(quant_algo="FP8_PB_WO"), able)
    check_readable(modelopt(), able)
    for odd in ({"quant_method": "fp8", "weight_block_size": None}, {"quant_method": "fbgemm_fp8"}):
        with pytest.raises(
            CheckpointUnsupportedError,
            match=r"format (fp8-tensor-inv|fbgemm_fp8|fp8-channel) of .*expected .*fp8-block",
        ):
            check_readable(read_block(odd, "here"), able)
    with pytest.raises(CheckpointUnsupportedError, match="here: the format other of other is not supported in vLLM"):
        check_readable(replace(modelopt(), method="other"), able)


def test_blocks_are_not_split():
    for rows, n, k, part in (([128, 256], 384, 256, 256), ([256, 100], 356, 200, 200), ([100], 100, 64, 64)):
        check_blocks("x", rows, n, k, part)
    for rows, n, k, part, text in (
        ([100, 256], 356, 256, 256, r"100 rows on each rank \(100, 256 of N=356\).*need a multiple of 128"),
        ([100], 200, 256, 256, r"100 rows on each rank \(100 of N=200\)"),
        ([128], 128, 384, 192, "K=384 on 2 ranks is 192 a rank.*tensor-parallel size of 1, 3"),
        ([128], 128, 320, 160, "K=320 is not a multiple of 128, the FP8 block"),
    ):
        with pytest.raises(InputError, match=text):
            check_blocks("x", rows, n, k, part)


def modelopt(**more):
    return read_block({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": [], **more}, "here")


def test_formats_of_fused_layers():
    names = shard_names("model.layers.0.self_attn.qkv_proj", PACKED)
    assert names == tuple(f"model.layers.0.self_attn.{x}_proj" for x in "qkv")
    assert shard_names("lm_head", PACKED) == ("lm_head",)
    group = group_of(modelopt(), names, "qkv", HOST)
    assert scheme_of(group).name == "modelopt-nvfp4"
    assert group_of(modelopt(ignore=["model.layers.0*"]), names, "qkv", HOST) is None
    assert group_of(modelopt(ignore=["lm_head"]), ("language_model.lm_head",), "x", HOST) is None
    with pytest.raises(CheckpointUnsupportedError, match=r"qkv: vLLM fuses 3 .*k_proj: not quantised.*leave it"):
        group_of(modelopt(ignore=["*k_proj"]), names, "qkv", HOST)


def test_patterns_get_the_names_of_the_engine():
    def rename(names):
        return [name.replace("model.language_model", "language_model.model") for name in names]

    found = renamed(["lm_head", "model.language_model.layers.0*", "re:.*x", "Linear"], rename)
    assert found[:4] == ("lm_head", "model.language_model.layers.0*", "re:.*x", "Linear")
    assert {"language_model.model.layers.0", "language_model.model.layers.0.*"} == set(found[4:])


def test_a_configuration_gets_the_names_of_the_engine():
    def rename(names):
        return [name.replace("model.language_model", "language_model.model") for name in names]

    config = modelopt(ignore=["model.language_model.layers.0.o_proj"])
    found = with_engine_names(config, rename)
    assert found.excludes("language_model.model.layers.0.o_proj")
    assert not config.excludes("language_model.model.layers.0.o_proj")
    assert [group.schemes for group in found.groups] == [group.schemes for group in config.groups]
