"""Checks of the integration inside vLLM: configurations, loading and sharding of layers, the operator.

A script: its interpreter has vLLM. It runs each function ``check_*`` and prints a JSON object of names and errors.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader import reload
from vllm.model_executor.models import deepseek_v2
from vllm.model_executor.models.utils import WeightsMapper

from fp4dispatch import formats
from fp4dispatch.errors import CheckpointError, CheckpointUnsupportedError, InputError, IntegrationError
from fp4dispatch.integrations import vllm as integration
from fp4dispatch.integrations.vllm import engine, operator
from fp4dispatch.integrations.vllm.config import Fp4DispatchConfig
from fp4dispatch.integrations.vllm.on_the_fly import Fp4DispatchOnlineLinearMethod
from fp4dispatch.integrations.vllm.stored import Fp4DispatchLinearMethod
from fp4dispatch.models.linear import FP4Linear, FP8Linear

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
SHARDS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
HEADS, KV_HEADS, HEAD, K, INNER = 4, 2, 32, 128, 192


def compressed(weights=None, inputs=None, **more):
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    group = {"targets": ["Linear"], "weights": weights or nvfp4, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


def config_of(block):
    config = Fp4DispatchConfig(copy.deepcopy(block))
    config.packed_modules_mapping = SHARDS
    return config


def on_ranks(size, rank):
    """Let vLLM make layers as on one rank of several, without other processes."""
    for module in (linear, parameter, vocab_parallel_embedding):
        module.get_tensor_model_parallel_world_size = lambda: size
        module.get_tensor_model_parallel_rank = lambda: rank


def raises(kind, *texts):
    class Expect:
        def __enter__(self):
            return self

        def __exit__(self, found, value, trace):
            assert found is not None, f"{kind.__name__} was not raised"
            assert isinstance(value, kind), f"{found.__name__}: {value}"
            for text in texts:
                assert text in str(value), f"{text!r} is not in {value}"
            return True

    return Expect()


def make(kind, config, *args, prefix, **kwargs):
    options = {"bias": False, "quant_config": config, "prefix": prefix, "params_dtype": torch.float32}
    return kind(*args, **(options | kwargs))


def random(n, k, scale=1.0):
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * 7 + k)) * scale


def stored(weight, divides=False, **more):
    """Return the tensors of a layer in the format of ModelOpt or compressed-tensors, and what they mean."""
    q = formats.nvfp4_quantize(weight)
    exact = formats.nvfp4_dequantize(q.data, q.sf, q.global_scale)
    if divides:
        tensors = {"weight_packed": q.data, "weight_scale": q.sf, "weight_global_scale": 1 / q.global_scale.reshape(1)}
    else:
        tensors = {"weight": q.data, "weight_scale": q.sf, "weight_scale_2": q.global_scale.reshape(())}
    return tensors | more, exact


def load(layer, tensors, shard=None):
    for name, tensor in tensors.items():
        found = getattr(layer, name)
        found.weight_loader(found, tensor, *(() if shard is None else (shard,)))


def finish(layer):
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def qkv(config, **options):
    return make(
        linear.QKVParallelLinear,
        config,
        K,
        HEAD,
        HEADS,
        KV_HEADS,
        prefix="model.layers.0.self_attn.qkv_proj",
        **options,
    )


def loaded_qkv(block=MODELOPT, **options):
    layer, exact = qkv(config_of(block), **options), []
    for shard, rows, scale in (("q", HEADS, 0.5), ("k", KV_HEADS, 0.1), ("v", KV_HEADS, 1.0)):
        tensors, meant = stored(random(rows * HEAD, K, scale), block["quant_method"] != "modelopt")
        load(layer, tensors, shard)
        exact.append(meant)
    return finish(layer), exact


def check_the_method_is_registered_and_asked_for():
    integration.register()
    integration.register(strict=True)
    assert get_quantization_config("fp4dispatch") is Fp4DispatchConfig
    assert Fp4DispatchConfig.override_quantization_method(MODELOPT, "fp4dispatch") == "fp4dispatch"
    assert Fp4DispatchConfig.override_quantization_method(MODELOPT, None, hf_config=None) is None
    assert Fp4DispatchConfig.override_quantization_method(MODELOPT, "modelopt_fp4") is None


def check_configurations_are_pickled_also_after_use():
    for block in (None, MODELOPT, compressed()):
        config = config_of(block)
        qkv(config)
        again = pickle.loads(pickle.dumps(config))
        assert again.block == block
        assert type(qkv(again).quant_method) is type(qkv(config).quant_method)


def check_exclusions():
    config = config_of(MODELOPT | {"ignore": ["lm_head", "model.layers.1.self_attn*", "*gate_proj", "*up_proj"]})
    plain = linear.UnquantizedLinearMethod
    assert isinstance(qkv(config).quant_method, Fp4DispatchLinearMethod)
    gate_up = make(linear.MergedColumnParallelLinear, config, K, [INNER] * 2, prefix="model.layers.0.mlp.gate_up_proj")
    assert isinstance(gate_up.quant_method, plain)
    other = make(linear.RowParallelLinear, config, K, K, prefix="model.layers.1.self_attn.o_proj")
    assert isinstance(other.quant_method, plain)
    for prefix in ("lm_head", "language_model.lm_head"):
        head = vocab_parallel_embedding.ParallelLMHead(64, K, quant_config=config, prefix=prefix)
        assert isinstance(head.quant_method, plain), prefix
    embedding = vocab_parallel_embedding.VocabParallelEmbedding(64, K, quant_config=config, prefix="model.embed_tokens")
    assert isinstance(embedding.quant_method, vocab_parallel_embedding.UnquantizedEmbeddingMethod)


def check_names_of_vllm_are_followed():
    mapper = WeightsMapper(
        orig_to_new_prefix={"model.language_model.": "language_model.model.", "model.visual.": "visual."}
    )
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.language_model.layers.0.mlp.down_proj": {"quant_algo": "NVFP4", "group_size": 16},
            "model.language_model.layers.1.mlp.down_proj": {"quant_algo": "FP8"},
        },
    }
    for block, schemes in (
        (MODELOPT | {"ignore": ["model.visual*"]}, ("modelopt-nvfp4", "modelopt-nvfp4", None)),
        (mixed, ("modelopt-nvfp4", "fp8-tensor", None)),
        (compressed(ignore=["model.visual.a.down_proj"]), ("nvfp4-pack-quantized", "nvfp4-pack-quantized", None)),
    ):
        config = config_of(block)
        config.apply_vllm_mapper(mapper)
        names = ("language_model.model.layers.0.mlp", "language_model.model.layers.1.mlp", "visual.a")
        methods = [
            make(linear.RowParallelLinear, config, INNER, K, prefix=f"{n}.down_proj").quant_method for n in names
        ]
        found = tuple(method.scheme.name if isinstance(method, Fp4DispatchLinearMethod) else None for method in methods)
        assert found == schemes, found


def check_old_exports_have_a_file_of_their_own():
    with tempfile.TemporaryDirectory() as folder:
        inside = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16, "kv_cache_quant_algo": None}
        (Path(folder) / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": inside}))
        config = config_of(None)
        config.maybe_update_config(folder, hf_config=None, revision=None)
        assert isinstance(qkv(config).quant_method, Fp4DispatchLinearMethod)
        assert type(config._theirs).__name__ == "ModelOptNvFp4Config"
    config = config_of(None)
    with tempfile.TemporaryDirectory() as empty:
        config.maybe_update_config(empty, hf_config=None, revision=None)
    assert isinstance(qkv(config).quant_method, Fp4DispatchOnlineLinearMethod)


def check_what_is_quantised_already_is_not_quantised_again():
    with tempfile.TemporaryDirectory() as folder:
        for name, block in (("a.weight", None), ("a.weight_scale", None), ("a.weight_scale", MODELOPT)):
            save_file({name: torch.zeros(1)}, Path(folder) / "model.safetensors")
            config = config_of(block)
            if name == "a.weight_scale" and block is None:
                with raises(CheckpointUnsupportedError, "tensor 'a.weight_scale': the checkpoint is quantised already"):
                    config.maybe_update_config(folder, hf_config=None, revision=None)
            else:
                config.maybe_update_config(folder, hf_config=None, revision=None)


def check_experts_and_the_kv_cache_stay_with_vllm():
    experts, asked = object.__new__(RoutedExperts), []
    for block, kind in (
        (MODELOPT, "ModelOptNvFp4Config"),
        (MODELOPT | {"quant_algo": "FP8"}, "ModelOptFp8Config"),
        (compressed(format="nvfp4-pack-quantized"), "CompressedTensorsConfig"),
    ):
        config = config_of(block)
        theirs = config._theirs
        assert type(theirs).__name__ == kind
        type(theirs).get_quant_method, before = (
            lambda self, layer, prefix: asked.append((layer, prefix)) or "theirs",
            type(theirs).get_quant_method,
        )
        try:
            assert config.get_quant_method(experts, "model.layers.0.mlp.experts") == "theirs"
            assert asked.pop() == (experts, "model.layers.0.mlp.experts")
        finally:
            type(theirs).get_quant_method = before
    assert config_of(None).get_quant_method(experts, "model.layers.0.mlp.experts") is None


def check_unknown_formats_are_refused():
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    for bad, text in (
        (MODELOPT | {"quant_algo": "MXFP8"}, "quant_algo 'MXFP8' is not supported"),
        (compressed(int4), "weights of type 'int', num_bits 4, strategy 'group', group_size 128 are not supported"),
        ({"quant_method": "awq"}, "quant_method 'awq' is not supported (AWQ, integers of 4 bits)"),
        (BLOCKS | {"weight_block_size": None}, "fp8-tensor-inv of fp8 is not supported in vLLM"),
        (BLOCKS | {"weight_block_size": [64, 128]}, "weight_block_size [64, 128] is not supported"),
    ):
        with raises(CheckpointUnsupportedError, text, "expected"):
            Fp4DispatchConfig.from_config(bad)
    with raises(InputError, "['formt'] are not known; use format, include"):
        Fp4DispatchConfig.from_config({"quant_method": "fp4dispatch", "formt": "fp8"})
    with raises(CheckpointUnsupportedError, "vLLM fuses 3 layers", "k_proj: not quantised"):
        qkv(config_of(MODELOPT | {"ignore": ["*k_proj"]}))


def check_fused_shards_keep_their_global_scales():
    for block in (MODELOPT, compressed()):
        layer, exact = loaded_qkv(block)
        assert layer.fp4dispatch.shard_rows == (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD)
        x = random(5, K)
        expected = x @ torch.cat(exact).t()
        torch.testing.assert_close(layer(x)[0], expected, rtol=1e-5, atol=1e-5)
        assert layer.weight.numel() == 1, "vLLM keeps no weights beside ours"
        finish(layer)  # a second call changes nothing
        torch.testing.assert_close(layer(x)[0], expected, rtol=1e-5, atol=1e-5)


def check_one_scale_of_all_shards_is_one_scale():
    layer = qkv(config_of(MODELOPT))
    for shard, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        tensors, _ = stored(random(rows * HEAD, K))
        load(layer, tensors | {"weight_scale_2": torch.tensor(0.5)}, shard)
    assert finish(layer).fp4dispatch.shard_rows == ()


def check_parts_of_two_ranks_are_exact():
    whole, exact = loaded_qkv()
    x = random(3, K)
    expected = whole(x)[0].split([part.shape[0] for part in exact], -1)
    for rank in (0, 1):
        on_ranks(2, rank)
        part, _ = loaded_qkv()
        mine = torch.cat([t.chunk(2, -1)[rank] for t in expected], -1)
        assert torch.equal(part(x)[0], mine)
    tensors, meant = stored(random(K, INNER))
    total, x = 0, random(3, INNER)
    for rank in (0, 1):
        on_ranks(2, rank)
        row = make(linear.RowParallelLinear, config_of(MODELOPT), INNER, K, prefix="m.down_proj", reduce_results=False)
        load(row, tensors)
        total = total + finish(row)(x.chunk(2, -1)[rank])[0]
    torch.testing.assert_close(total, x @ meant.t(), rtol=1e-5, atol=1e-5)


def check_a_part_that_splits_a_block_is_refused():
    on_ranks(8, 0)
    sizes = "K=192 on 8 ranks is 24 a rank, which splits a block of 16", "tensor-parallel size of 1, 2, 3, 4, 6, 12"
    for config in (config_of(MODELOPT), config_of(None)):
        with raises(InputError, "model.layers.0.mlp.down_proj: ", *sizes):
            make(linear.RowParallelLinear, config, INNER, K, prefix="model.layers.0.mlp.down_proj")
    fp8 = make(linear.RowParallelLinear, config_of(MODELOPT | {"quant_algo": "FP8"}), INNER, K, prefix="m.down_proj")
    assert fp8.weight.shape == (K, 24)


def check_biases():
    tensors, meant = stored(random(K, INNER))
    x, bias = random(2, INNER), random(1, K)[0]
    for rank in (0, 1):
        on_ranks(2, rank)
        options = {"prefix": "m.down_proj", "bias": True}
        row = make(linear.RowParallelLinear, config_of(MODELOPT), INNER, K, **options)
        load(row, tensors | {"bias": bias})
        assert (finish(row).fp4dispatch.bias is None) == (rank == 1)
        mine = slice(rank * 96, rank * 96 + 96)
        expected = x[:, mine] @ meant[:, mine].t() + (bias if rank == 0 else 0)
        row.reduce_results = False
        torch.testing.assert_close(row(x[:, mine])[0], expected, rtol=1e-5, atol=1e-5)
    on_ranks(1, 0)
    column = make(
        linear.ColumnParallelLinear, config_of(MODELOPT), INNER, K, prefix="m.up", bias=True, skip_bias_add=True
    )
    load(column, tensors | {"bias": bias})
    out, given = finish(column)(x)
    assert column.fp4dispatch.bias is None
    assert given is column.bias
    torch.testing.assert_close(out, x @ meant.t(), rtol=1e-5, atol=1e-5)
    other = column.quant_method.apply(column, x, bias)
    torch.testing.assert_close(other, x @ meant.t() + bias, rtol=1e-5, atol=1e-5)


def check_input_scales():
    w4a4, weight_only = config_of(MODELOPT), config_of(MODELOPT | {"quant_algo": "W4A16_NVFP4"})
    for config, expected, activation in ((w4a4, 0.5, "any"), (weight_only, None, "bf16")):
        layer = make(linear.MergedColumnParallelLinear, config, K, [64, 64], prefix="m.gate_up_proj")
        for shard, value in ((0, 0.25), (1, 0.5)):
            tensors, _ = stored(random(64, K), input_scale=torch.tensor(value))
            load(layer, tensors, shard)
        inner = finish(layer).fp4dispatch
        assert (inner.input_scale if inner.input_scale is None else float(inner.input_scale)) == expected
        assert inner.activation == activation


def check_fp8():
    fp8 = config_of(MODELOPT | {"quant_algo": "FP8"})
    layer, exact = make(linear.MergedColumnParallelLinear, fp8, K, [64, 32], prefix="m.gate_up_proj"), []
    for shard, rows, scale in ((0, 64, 1.0), (1, 32, 0.1)):
        q = formats.fp8_quantize(random(rows, K, scale), "tensor")
        load(layer, {"weight": q.data, "weight_scale": q.scale.reshape(()), "input_scale": torch.tensor(0.01)}, shard)
        exact.append(formats.fp8_dequantize(q.data, q.scale, "tensor"))
    assert isinstance(finish(layer).fp4dispatch, FP8Linear)
    assert layer.fp4dispatch.scaling == "row", "one scale a shard is one scale a row"
    x = random(4, K)
    torch.testing.assert_close(layer(x)[0], x @ torch.cat(exact).t(), rtol=1e-5, atol=1e-5)


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def check_fp8_blocks():
    ct = compressed({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]})
    modelopt = MODELOPT | {"quant_algo": "FP8_PB_WO"}
    for block, name, shape in (
        (BLOCKS, "weight_scale_inv", (2, 3)),
        (ct, "weight_scale", (2, 3)),
        (modelopt, "weight_scale", (2, 1, 3, 1)),
    ):
        config, exact = config_of(block), []
        layer = make(linear.MergedColumnParallelLinear, config, 384, [256, 256], prefix="m.gate_up_proj")
        for shard, scale in ((0, 1.0), (1, 0.01)):
            q = formats.fp8_quantize(random(256, 384, scale), "block128")
            load(layer, {"weight": q.data, name: q.scale.reshape(shape)}, shard)
            exact.append(formats.fp8_dequantize(q.data, q.scale, "block128"))
        assert finish(layer).fp4dispatch.scaling == "block128"
        x = random(4, 384)
        torch.testing.assert_close(layer(x)[0], x @ torch.cat(exact).t(), rtol=1e-5, atol=1e-5)


def check_fp8_blocks_of_each_rank():
    exact = formats.fp8_quantize(random(512, 512), "block128")
    whole = formats.fp8_dequantize(exact.data, exact.scale, "block128")
    tensors, x = {"weight": exact.data, "weight_scale_inv": exact.scale}, random(3, 512)
    for rank in range(2):
        on_ranks(2, rank)
        mine = slice(rank * 256, (rank + 1) * 256)
        column = make(linear.ColumnParallelLinear, config_of(BLOCKS), 512, 512, prefix="m.up_proj")
        load(column, tensors)
        torch.testing.assert_close(finish(column)(x)[0], x @ whole[mine].t(), rtol=1e-5, atol=1e-4)
        row = make(linear.RowParallelLinear, config_of(BLOCKS), 512, 512, prefix="m.down_proj", reduce_results=False)
        load(row, tensors)
        torch.testing.assert_close(finish(row)(x[:, mine])[0], x[:, mine] @ whole[:, mine].t(), rtol=1e-5, atol=1e-4)


def check_fp8_blocks_that_would_be_split():
    config, merged = config_of(BLOCKS), linear.MergedColumnParallelLinear
    with raises(InputError, "m.gate_up_proj: a shard has 192 rows", "192, 192 of N=384", "need a multiple of 128"):
        make(merged, config, 256, [192, 192], prefix="m.gate_up_proj")
    make(merged, config, 256, [256, 192], prefix="m.gate_up_proj")  # a ragged end splits no block
    make(linear.ColumnParallelLinear, config, 320, 320, prefix="m.up_proj")
    on_ranks(2, 0)
    with raises(InputError, "m.up_proj: a shard has 192 rows on each rank (192 of N=384)"):
        make(linear.ColumnParallelLinear, config, 256, 384, prefix="m.up_proj")
    with raises(InputError, "m.down_proj: K=384 on 2 ranks is 192 a rank", "tensor-parallel size of 1, 3"):
        make(linear.RowParallelLinear, config, 384, 256, prefix="m.down_proj")
    layer = make(linear.ColumnParallelLinear, config, 256, 512, prefix="m.up_proj")
    load(layer, {"weight": torch.zeros(512, 256).to(torch.float8_e4m3fn)})
    with raises(CheckpointError, "m.up_proj: tensor 'weight_scale_inv' is missing or holds NaN"):
        finish(layer)


def check_a_quantised_head():
    head = vocab_parallel_embedding.ParallelLMHead(
        70, K, quant_config=config_of(MODELOPT | {"ignore": []}), prefix="lm_head", params_dtype=torch.float32
    )
    tensors, meant = stored(random(70, K))
    load(head, tensors)
    x = random(2, K)
    out = finish(head).quant_method.apply(head, x, bias=None)
    assert out.shape == (2, 128), "vLLM pads the vocabulary to a multiple of 64"
    torch.testing.assert_close(out[:, :70], x @ meant.t(), rtol=1e-5, atol=1e-5)
    assert not out[:, 70:].any()
    with raises(IntegrationError, "lm_head: the model ties its head to the embedding"):
        head.tie_weights(None)


def check_missing_tensors():
    for left in ("weight_scale", "weight_scale_2"):
        layer = make(linear.ColumnParallelLinear, config_of(MODELOPT), K, 64, prefix="m.up_proj")
        tensors, _ = stored(random(64, K))
        del tensors[left]
        load(layer, tensors)
        with raises(CheckpointError, f"m.up_proj: tensor '{left}' is missing or holds NaN"):
            finish(layer)


def check_other_weights_are_refused():
    layer, _ = loaded_qkv()
    layer.register_parameter("weight", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    with raises(IntegrationError, "loading other weights into a running engine is not supported"):
        finish(layer)
    layer, _ = loaded_qkv(compressed())
    del layer.weight  # as a reload of vLLM does, where the stored weight has another name
    layer.register_parameter("weight_packed", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    with raises(IntegrationError, "loading other weights into a running engine is not supported"):
        finish(layer)


def check_a_reload_is_refused_before_it_changes_anything():
    """So that the engine goes on with the weights that it has, also in CUDA graphs, which nothing can stop."""
    for block in (MODELOPT, compressed(), None):
        layer = qkv(config_of(block), bias=True)
        model = torch.nn.Sequential(torch.nn.LayerNorm(K), torch.nn.ModuleList([layer]), torch.nn.LayerNorm(256))
        reload.record_metadata_for_reloading(model)
        for shard, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weight = random(rows * HEAD, K)
            divides = block is not None and block["quant_method"] != "modelopt"
            load(layer, {"weight": weight} if block is None else stored(weight, divides)[0], shard)
            load(layer, {"bias": random(1, rows * HEAD)[0]}, shard)
        finish(layer)
        before, key = layer(random(3, K))[0], layer.weight
        tensors = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
        for _ in range(2):
            with raises(IntegrationError, "qkv_proj: loading other weights into a running engine is not supported"):
                reload.initialize_layerwise_reload(model)
            now = model.state_dict()
            assert now.keys() == tensors.keys()
            assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
            assert all(now[name].data_ptr() == place for name, (place, _) in tensors.items())
            assert all(torch.equal(now[name], was) for name, (_, was) in tensors.items())
            assert layer.weight is key
            assert torch.equal(layer(random(3, K))[0], before)
        with raises(IntegrationError, "qkv_proj: loading other weights into a running engine is not supported"):
            layer.weight.weight_loader(layer.weight, random(128, K), "q")


def check_the_operator():
    layer, exact = loaded_qkv()
    x = random(4, K)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.ops.fp4dispatch.engine_linear(mode.from_tensor(x), layer.weight, None, 256)
    assert (fake.shape, fake.dtype) == (layer(x)[0].shape, layer(x)[0].dtype)
    with raises(InputError, "no layer has the key at"):
        torch.ops.fp4dispatch.engine_linear(x, torch.zeros(1, dtype=torch.uint8), None, 4)
    compiled = torch.compile(lambda x: layer.quant_method.apply(layer, x), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), x @ torch.cat(exact).t(), rtol=1e-5, atol=1e-5)


def check_the_operator_as_graphs_need_it():
    """No mutation, no alias, a right fake, any number of tokens: what PIECEWISE and FULL graphs rely on."""
    layer, _ = loaded_qkv()
    operator_ = torch.ops.fp4dispatch.engine_linear.default
    assert not operator_._schema.is_mutable
    assert not any(argument.alias_info for argument in (*operator_._schema.arguments, *operator_._schema.returns))
    for bias in (None, torch.zeros(256)):
        given = (random(4, K), layer.weight, bias)
        before = [None if tensor is None else tensor.clone() for tensor in given]
        out = operator_(*given, 256)  # not by opcheck, which passes copies: the key names its layer by its address
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = operator_(mode.from_tensor(given[0]), *given[1:], 256)
        assert (fake.shape, fake.dtype, fake.stride()) == (out.shape, out.dtype, out.stride())
        for tensor, was in zip(given, before, strict=True):
            assert tensor is None or torch.equal(tensor, was)
            assert tensor is None or tensor.untyped_storage().data_ptr() != out.untyped_storage().data_ptr()
    graphs = []
    keep = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
    compiled = torch.compile(lambda x: layer.quant_method.apply(layer, x), fullgraph=True, dynamic=True, backend=keep)
    for tokens in (3, 7, 16):
        assert torch.equal(compiled(random(tokens, K)), layer(random(tokens, K))[0])
    assert len(graphs) == 1, "one graph for all numbers of tokens"


def check_models_that_cast_to_the_dtype_of_a_weight():
    """Gemma 4 and Isaac do; models of images ask for the dtype of their first parameter."""
    for block in (MODELOPT, compressed(), BLOCKS, None):
        for dtype in (torch.bfloat16, torch.float32):
            layer = make(
                linear.ReplicatedLinear, config_of(block), K, K, prefix="m.embedding_projection", params_dtype=dtype
            )
            if block is None:
                tensors = {"weight": random(K, K).to(dtype)}
            elif block is BLOCKS:
                tensors = {"weight": torch.zeros(K, K).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)}
            else:
                tensors, _ = stored(random(K, K), block["quant_method"] != "modelopt")
            load(layer, tensors)
            if block is not None:  # the loader of vLLM finishes one that is quantised on the fly
                finish(layer)
            assert (layer.weight.dtype, next(layer.parameters()).dtype) == (dtype, dtype)
            assert layer(random(2, K).to(layer.weight.dtype))[0].dtype == dtype


def check_compiled_graphs_do_not_depend_on_the_choice():
    """VLLM stores them under a key that the choice is no part of."""
    layer, _ = loaded_qkv()
    graphs = []
    keep = lambda graph, inputs: graphs.append(graph) or graph.forward  # noqa: E731
    torch.compile(lambda x: layer.quant_method.apply(layer, x), fullgraph=True, backend=keep)(random(4, K))
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in calls] == ["fp4dispatch.engine_linear.default"]
    assert "reference" not in graph.code


def check_plans_are_made_before_graphs_are_captured():
    layer, _ = loaded_qkv()
    inner, shared = layer.fp4dispatch, engine.Engine()
    shared.prepare(inner, "piecewise", [1, 8, 24], 1)
    assert inner.capture == "piecewise"
    assert {1, 8, 24} <= set(inner.bind().ready)
    other, _ = loaded_qkv()
    shared.prepare(other.fp4dispatch, "piecewise", [1, 8, 24], 1)
    assert other.fp4dispatch.capture == "piecewise"
    assert not other.fp4dispatch.bind().ready, "layers of one shape share their plans"


def check_a_key_names_one_layer():
    first, second = loaded_qkv()[0], loaded_qkv()[0]
    assert operator.names(first.weight, first.fp4dispatch)
    assert not operator.names(first.weight, second.fp4dispatch)
    key = first.weight.detach().clone()
    assert not operator.names(key, first.fp4dispatch)


def check_on_the_fly():
    config = config_of(None)
    layer = qkv(config)
    assert layer.weight.is_meta, "the 16-bit model is never in memory as a whole"
    weights = [random(rows * HEAD, K, scale) for rows, scale in ((HEADS, 0.5), (KV_HEADS, 0.1), (KV_HEADS, 1.0))]
    for shard, weight in zip("qkv", weights, strict=True):
        load(layer, {"weight": weight}, shard)
    finish(layer)
    whole = torch.nn.Linear(K, HEAD * (HEADS + 2 * KV_HEADS), bias=False)
    whole.weight.data = torch.cat(weights)
    expected = FP4Linear.from_linear(whole)
    assert torch.equal(layer.fp4dispatch.weight, expected.weight)
    assert torch.equal(layer.fp4dispatch.weight_scale_2, expected.weight_scale_2)


def check_layers_with_kernels_of_their_own_stay_in_16_bits():
    """DeepSeek's decides by the dtype and the shape that its weight has before it is loaded."""
    size, request = (7168, [1536, 576]), config_of(None)
    before, deepseek_v2.current_platform = (
        deepseek_v2.current_platform,
        SimpleNamespace(is_cuda=lambda: True, is_device_capability=lambda _: True),
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = deepseek_v2.DeepSeekV2FusedQkvAProjLinear(*size, quant_config=request, prefix="m.fused_qkv_a_proj")
        stored_ = deepseek_v2.DeepSeekV2FusedQkvAProjLinear(*size, quant_config=config_of(MODELOPT), prefix="m.a")
    finally:
        deepseek_v2.current_platform = before
        torch.set_default_dtype(torch.float32)
    assert layer._use_min_latency_gemm
    assert isinstance(layer.quant_method, linear.UnquantizedLinearMethod)
    assert not stored_._use_min_latency_gemm
    assert isinstance(stored_.quant_method, Fp4DispatchLinearMethod)
    for kind, sizes in (
        (linear.ReplicatedLinear, (K, K)),
        (linear.ColumnParallelLinear, (K, K)),
        (linear.MergedColumnParallelLinear, (K, [K, K])),
        (linear.RowParallelLinear, (K, K)),
    ):
        method = make(kind, request, *sizes, prefix="m.x").quant_method
        assert isinstance(method, Fp4DispatchOnlineLinearMethod), kind


def main() -> None:
    found = {}
    init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, backend="gloo")
    with set_current_vllm_config(VllmConfig()):
        initialize_model_parallel(1, 1)
        for name, check in list(globals().items()):
            if name.startswith("check_") and (len(sys.argv) < 2 or name in sys.argv[1:]):
                on_ranks(1, 0)
                try:
                    check()
                    found[name] = ""
                except Exception:
                    found[name] = traceback.format_exc()
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
