"""SGLang 0.5.23 on a CPU: the selection returns our class, and layers loaded by its own loader multiply right."""

from __future__ import annotations

import inspect

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("sglang", reason="SGLang is not installed; tests/sglang_cases.py says how to get an environment")
transformers = pytest.importorskip("transformers")
from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError, InputError, IntegrationError  # noqa: E402
from tests import sglang_cases  # noqa: E402
from tests.transformers_cases import _dequantised  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SHARDS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
OURS = ("--quantization", "fp4dispatch")
BACKEND = ("--fp4-gemm-backend", "fp4dispatch")


@pytest.fixture(autouse=True, scope="module")
def plugins():
    sglang_cases.prepare()


def stored_layers(path):
    """Dequantised weights of a checkpoint by the name of the layer, with the largest shard scale too."""
    tensors = load_file(path / "model.safetensors")
    found = {}
    for key in tensors:
        module, _, last = key.rpartition(".")
        if last in ("weight_scale_2", "weight_global_scale", "weight_scale") and module not in found:
            found[module] = {k.rpartition(".")[2]: t for k, t in tensors.items() if k.rpartition(".")[0] == module}
    return found


def check_layers(model, path, count):
    """Each layer's product is that of the checkpoint's dequantised weights, in fp64; one scale for all is not."""
    stored = stored_layers(path)
    layers = {name: m for name, m in model.named_modules() if getattr(m, "fp4dispatch", None) is not None}
    assert len(layers) == count
    wrong = []
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        shards = [stored[f"{parent}.{shard}"] for shard in SHARDS.get(last, (last,))]
        weight = torch.cat([_dequantised(shard) for shard in shards]).double()
        x = torch.randn(5, weight.shape[1]).to(torch.bfloat16)
        found = layer(x)[0]
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), x.double() @ weight.t(), rtol=2e-2, atol=2e-2 * float(weight.std()))
        one = _with_one_scale(shards)
        if one is not None:
            off = (found.double() - x.double() @ one.t()).norm() / found.double().norm()
            wrong.append(float(off))
    return wrong


def _with_one_scale(shards):
    """The negative control: all shards with the largest global scale, as SGLang's own methods have them."""
    key = next((k for k in ("weight_scale_2", "weight_global_scale") if k in shards[0]), None)
    if key is None or len(shards) == 1:
        return None
    most = torch.stack([shard[key] for shard in shards]).amax(0)
    return torch.cat([_dequantised({**shard, key: most}) for shard in shards]).double()


# The selection.


def test_the_plugin_is_registered_and_asked_first():
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers import quantization
    from sglang.srt.layers.linear import WEIGHT_LOADER_V2_SUPPORTED

    from fp4dispatch.integrations.sglang import register
    from fp4dispatch.integrations.sglang.config import Fp4DispatchConfig

    register(strict=True)  # a second call changes nothing
    assert next(iter(quantization.QUANTIZATION_METHODS)) == "fp4dispatch"
    assert quantization.get_quantization_config("fp4dispatch") is Fp4DispatchConfig
    assert choices.QUANTIZATION_CHOICES.count("fp4dispatch") == 1
    assert choices.FP4_GEMM_RUNNER_BACKEND_CHOICES.count("fp4dispatch") == 1
    assert WEIGHT_LOADER_V2_SUPPORTED.count("Fp4DispatchLinearMethod") == 1


@pytest.mark.parametrize("format", ["modelopt", "modelopt-a16", "fp8", "llama-nvfp4", "llama-nvfp4a16"])
def test_layers_of_a_checkpoint(tmp_path, format):
    from fp4dispatch.integrations.sglang.linear_method import Fp4DispatchLinearMethod

    path = sglang_cases.checkpoint(format, tmp_path / "in")
    model = sglang_cases.load(path, *OURS)
    layers = [m for m in model.modules() if getattr(m, "fp4dispatch", None) is not None]
    assert {type(layer.quant_method) for layer in layers} == {Fp4DispatchLinearMethod}
    assert {layer.fp4dispatch.activation for layer in layers} == {"bf16" if "a16" in format else "any"}
    wrong = check_layers(model, path, 4 if "llama" in format else 8)
    assert all(off > 0.1 for off in wrong)
    assert bool(wrong) == (format != "fp8")


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize("format", ["modelopt", "modelopt-a16", "llama-nvfp4", "llama-nvfp4a16"])
def test_the_gemm_backend_alone(tmp_path, monkeypatch, format, capability):
    """SGLang reads the checkpoint with its own classes, which it chooses by the GPU; we multiply."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    path = sglang_cases.checkpoint(format, tmp_path / "in")
    method = "modelopt_fp4" if "modelopt" in format else "compressed-tensors"
    model = sglang_cases.load(path, "--quantization", method, *BACKEND)
    layer = model.model.layers[0].self_attn.qkv_proj
    assert type(layer.quant_method).__module__.startswith("sglang.")
    assert layer.fp4dispatch.activation == ("bf16" if "a16" in format else "any")
    wrong = check_layers(model, path, 4 if "llama" in format else 8)
    assert all(off > 0.1 for off in wrong)
    assert wrong


def test_without_our_backend_the_hooks_change_nothing(tmp_path):
    """SGLang's own method runs, and needs a GPU."""
    path = sglang_cases.checkpoint("modelopt", tmp_path / "in")
    with pytest.raises((ValueError, AssertionError), match=r"SM100|not compiled with CUDA"):
        sglang_cases.load(path, "--quantization", "modelopt_fp4", "--fp4-gemm-backend", "flashinfer_cutlass")


def test_the_enumeration_of_backends():
    from sglang.srt.layers.quantization.fp4_utils import Fp4GemmRunnerBackend as Backend

    ours = Backend("fp4dispatch")
    asked = [name for kind in Backend.__mro__ for name in vars(kind) if name.startswith("is_")]
    assert len(asked) > 6
    assert [name for name in asked if getattr(ours, name)()] == ["is_fp4dispatch"]
    assert not ours.supports_swiglu_fusion()
    assert (Backend.MARLIN.is_marlin(), Backend.FLASHINFER_CUTLASS.supports_swiglu_fusion()) == (True, True)
    assert Backend.FLASHINFER_CUTEDSL.get_flashinfer_backend() == "cute-dsl"
    with pytest.raises(IntegrationError, match="take another --fp4-gemm-backend"):
        ours.get_flashinfer_backend()


# Parts of a layer.


@pytest.mark.parametrize("rank", [0, 1])
def test_tensor_parallel_parts(tmp_path, rank):
    """Two ranks, one after the other: SGLang's loaders give each its part of weights and scales."""
    from sglang.srt.layers import linear

    from fp4dispatch.integrations.sglang.config import Fp4DispatchConfig

    path = sglang_cases.checkpoint("modelopt", tmp_path / "in")
    sglang_cases.configure(path, *OURS)
    config, stored = Fp4DispatchConfig.from_config(sglang_cases.quant_config(path)), stored_layers(path)
    at = "model.layers.0"
    options = {"bias": False, "quant_config": config, "params_dtype": torch.bfloat16, "parallel_group": "tp"}
    with sglang_cases.ranks(rank, 2):
        qkv = linear.QKVParallelLinear(64, 16, 4, 2, prefix=f"{at}.self_attn.qkv_proj", **options)
        row = linear.RowParallelLinear(64, 64, prefix=f"{at}.self_attn.o_proj", **options)
        both = linear.MergedColumnParallelLinear(64, [96, 96], prefix=f"{at}.mlp.gate_up_proj", **options)
    for layer, names, ids in (
        (qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("q", "k", "v")),
        (both, ("mlp.gate_proj", "mlp.up_proj"), (0, 1)),
        (row, ("self_attn.o_proj",), (None,)),
    ):
        for name, shard in zip(names, ids, strict=True):
            for key, tensor in stored[f"{at}.{name}"].items():
                parameter = getattr(layer, key)
                parameter.weight_loader(parameter, tensor, *(() if shard is None else (shard,)))
        layer.quant_method.process_weights_after_loading(layer)
        whole = [_dequantised(stored[f"{at}.{name}"]).double() for name in names]
        dim = 1 if layer is row else 0
        weight = torch.cat([part.chunk(2, dim)[rank] for part in whole])
        x = torch.randn(3, weight.shape[1]).to(torch.bfloat16)
        found = layer.quant_method.apply(layer, x, None).double()
        torch.testing.assert_close(found, x.double() @ weight.t(), rtol=2e-2, atol=2e-2 * float(weight.std()))


def test_a_part_that_splits_a_block_is_refused(tmp_path):
    from sglang.srt.layers import linear

    from fp4dispatch.integrations.sglang.config import Fp4DispatchConfig

    path = sglang_cases.checkpoint("modelopt", tmp_path / "in")
    sglang_cases.configure(path, *OURS)
    config = Fp4DispatchConfig.from_config(sglang_cases.quant_config(path))
    with (
        sglang_cases.ranks(0, 4),
        pytest.raises(InputError, match=r"K=96 on 4 ranks is 24 a rank.*tensor-parallel size of 1, 2, 3, 6"),
    ):
        linear.RowParallelLinear(
            *(96, 64),
            bias=False,
            quant_config=config,
            params_dtype=torch.bfloat16,
            prefix="model.layers.0.mlp.down_proj",
            parallel_group="tp",
        )


def test_bias_and_other_inputs(tmp_path):
    from sglang.srt.layers import linear

    from fp4dispatch.integrations.sglang.config import Fp4DispatchConfig

    path = sglang_cases.checkpoint("modelopt", tmp_path / "in")
    sglang_cases.configure(path, *OURS)
    config = Fp4DispatchConfig.from_config(sglang_cases.quant_config(path))
    name = "model.layers.0.self_attn.o_proj"
    stored = stored_layers(path)[name]
    for kind in (linear.ColumnParallelLinear, linear.ReplicatedLinear, linear.RowParallelLinear):
        layer = kind(64, 64, bias=True, quant_config=config, params_dtype=torch.bfloat16, prefix=name)
        for key, tensor in stored.items():
            parameter = getattr(layer, key)
            parameter.weight_loader(parameter, tensor)
        with torch.no_grad():
            layer.bias.copy_(torch.arange(64))
        layer.quant_method.process_weights_after_loading(layer)
        layer.quant_method.process_weights_after_loading(layer)  # harmless
        x = torch.randn(2, 3, 64).to(torch.bfloat16)
        expected = x.double() @ _dequantised(stored).double().t() + torch.arange(64)
        for found in (layer.quant_method.apply(layer, x, layer.bias), layer(x)[0]):
            torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
        assert layer.weight.shape == (64, 0), "for code that reads its dtype or device"
        cast = layer(x.float().to(layer.weight.dtype))[0]  # as models do
        torch.testing.assert_close(cast.double(), expected, rtol=2e-2, atol=2e-2)
        with pytest.raises(InputError, match="got quantised activations"):
            layer.quant_method.apply(layer, (x, x), None)
        with pytest.raises(IntegrationError, match="start it again"):
            layer.quant_method.restore_weights_before_loading(layer)


# What is refused.


def test_a_missing_scale_is_named(tmp_path):
    from safetensors.torch import save_file

    path = sglang_cases.checkpoint("modelopt", tmp_path / "in")
    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.layers.1.self_attn.k_proj.weight_scale_2")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.qkv_proj: tensor 'weight_scale_2' is missing"):
        sglang_cases.load(path, *OURS)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "ignore": []}, "FP8_PB_WO|fp8-block-ct"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    ],
)
def test_formats_that_are_not_supported(block, said):
    from fp4dispatch.integrations.sglang.config import Fp4DispatchConfig

    with pytest.raises(CheckpointUnsupportedError, match=said):
        Fp4DispatchConfig.from_config(block)


def test_a_fused_layer_with_two_formats_and_a_quantised_head():
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    from fp4dispatch.integrations.sglang.config import Fp4DispatchConfig

    base = {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}
    config = Fp4DispatchConfig.from_config({**base, "ignore": ["model.layers.0.self_attn.k_proj"]})
    with pytest.raises(CheckpointUnsupportedError, match=r"fuses 3 layers.*k_proj: not quantised"):
        config.get_quant_method(LinearBase(64, 64), "model.layers.0.self_attn.qkv_proj")
    config = Fp4DispatchConfig.from_config({**base, "ignore": ["model.layers.0*"]})
    layer = LinearBase(64, 64)
    left = config.get_quant_method(layer, "model.layers.0.self_attn.qkv_proj")
    assert isinstance(left, UnquantizedLinearMethod)
    assert config.is_linear_unquantized("model.layers.0.mlp.down_proj")
    assert not config.is_linear_unquantized("model.layers.1.mlp.down_proj")


def test_other_versions_are_refused(monkeypatch, caplog):
    from fp4dispatch.integrations import versions
    from fp4dispatch.integrations.sglang import registry

    monkeypatch.setattr(versions, "version", lambda _: "0.6.0")
    with pytest.raises(IntegrationError, match=r"sglang 0\.6\.0 is installed.*tested with ==0\.5\.23"):
        registry.register(strict=True)
    registry.register()
    assert "is not available in SGLang" in caplog.text


# The contract: what cannot be run on a CPU.


def test_what_we_use_of_sglang():
    from sglang.srt.layers.quantization import modelopt_quant
    from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as w4a4
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a16_nvfp4 as w4a16
    from sglang.srt.model_executor.cuda_graph_config import Backend, default_cuda_graph_config
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    names = ["self", "layer", "input_size_per_partition", "output_partition_sizes", "input_size", "output_size"]
    create = list(inspect.signature(LinearMethodBase.create_weights).parameters)
    assert create == [*names, "params_dtype", "extra_weight_attrs"]
    assert list(inspect.signature(LinearMethodBase.apply).parameters) == ["self", "layer", "x", "bias"]
    override = inspect.signature(QuantizationConfig.override_quantization_method).parameters
    assert list(override) == ["hf_quant_cfg", "user_quant"]
    for kind, method in (
        (modelopt_quant.ModelOptFp4LinearMethod, "apply"),
        (modelopt_quant.ModelOptNvFp4A16LinearMethod, "apply"),
        (w4a4.CompressedTensorsW4A4Fp4, "apply_weights"),
        (w4a16.CompressedTensorsW4A16Fp4, "apply_weights"),
    ):
        assert list(inspect.signature(getattr(kind, method)).parameters) == ["self", "layer", "x", "bias"]
        assert list(inspect.signature(kind.process_weights_after_loading).parameters) == ["self", "layer"]
        assert any(f".{kind.__name__}.{method}" in target for target in HookRegistry._patched)
    assert {"REPLACE", "AROUND"} <= HookType.__members__.keys()
    graphs = default_cuda_graph_config()
    assert graphs.decode.backend == Backend.FULL
    assert {"bs", "backend"} <= vars(graphs.prefill).keys()


def test_graphs_of_the_server(monkeypatch):
    """The sizes that plans are made for, and the mode: pieces where prefill is captured with breaks."""
    from types import SimpleNamespace

    from sglang.srt.model_executor.cuda_graph_config import Backend, default_cuda_graph_config

    from fp4dispatch.integrations.sglang import layers

    config = default_cuda_graph_config()
    config.decode.bs, config.prefill.bs = [1, 2, 4], [64, 128]
    config.prefill.backend = Backend.BREAKABLE
    monkeypatch.setattr(layers, "get_exec", lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=config)))
    assert layers.graphs() == ("none", []), "no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert layers.graphs() == ("piecewise", [1, 2, 4, 64, 128])
    config.prefill.backend = Backend.DISABLED
    assert layers.graphs() == ("full", [1, 2, 4])
    config.decode.backend = Backend.DISABLED
    assert layers.graphs() == ("none", [])
