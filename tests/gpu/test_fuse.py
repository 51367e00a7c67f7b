"""Fused projections on a GPU: the results of the separate layers, in CUDA graphs and compiled, in less memory."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import fp4dispatch
from fp4dispatch.benchmark.check import relative_error
from fp4dispatch.models.linear import FP4Linear
from fp4dispatch.models.quantized_linear import QuantizedLinear
from tests.gpu.backend_cases import captured, tokens

pytest.importorskip("transformers", reason="transformers (extra `demo`) is not installed")

from bench import decoder

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

SIZES = decoder.SIZES | {
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FORMATS = ["nvfp4:bf16", "nvfp4:fp8", "nvfp4", "fp8_row", "fp8"]
TOKENS = (1, 3, 16, 33, 64, 200, 777)
ROUNDING = {"bf16": 4e-3, "fp8": 1e-2}
"""Of bfloat16 results whose sums were added up in another order, or by another kernel, by activation format."""
PACKING = 1 << 28
"""What it takes to pack a layer, some rows at a time."""


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode(), decoder.repeatable_attention():
        yield


def models(fmt, sizes=SIZES, family="Llama"):
    """The same model with separate layers, and with fused ones."""
    apart, fused = (decoder.build(sizes, torch.device("cuda"), family=family) for _ in range(2))
    decoder.quantise(apart, fmt)
    decoder.quantise(fused, f"{fmt}+fuse")
    return apart, fused


def pairs(apart, fused):
    """Each fused layer, with the layers that it replaced."""
    for mine, theirs in zip(fused.model.layers, apart.model.layers, strict=True):
        yield mine.self_attn.qkv_proj, [getattr(theirs.self_attn, name) for name in QKV]
        yield mine.mlp.gate_up_proj, [getattr(theirs.mlp, name) for name in GATE_UP]


def route(layer, m):
    bound = layer.bound_to(torch.bfloat16)
    return next((r for r in bound.spec.routes if m <= r.m_max), bound.spec.routes[-1])


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_fused_layer_computes_what_its_shards_do(fmt):
    apart, fused = models(fmt)
    checked = 0
    for layer, shards in pairs(apart, fused):
        for m in TOKENS:
            x = tokens(m, m, layer.in_features)
            got, want = layer(x), torch.cat([shard(x) for shard in shards], -1)
            formats = {route(each, m).activation for each in (layer, *shards)}
            # The policy may choose another activation format for the fused size: then both are near the exact result.
            limit = ROUNDING[formats.pop()] if len(formats) == 1 else 0.06
            assert relative_error(got, want) < limit, (fmt, m, formats)
            checked += limit < 0.06
    assert checked, "the policy chose other activations for each fused layer: nothing was compared closely"
    for name, tensor in apart.state_dict().items():
        mine = fused.state_dict()[name]
        assert torch.equal(mine.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_shards_keep_their_own_global_scales():
    torch.manual_seed(0)
    linears = [nn.Linear(1024, n, bias=False, device="cuda", dtype=torch.bfloat16) for n in (1024, 256, 256)]
    attention = Attention(*linears)
    for factor, linear in zip((1, 20, 0.01), linears, strict=True):
        linear.weight.mul_(factor)
    for name in QKV:  # one by one: together they would share a scale
        fp4dispatch.replace_linears(attention, include=name, activation="bf16")
    shards = [copy.deepcopy(getattr(attention, name)) for name in QKV]
    assert len(fp4dispatch.fuse(attention).fused) == 1
    assert attention.qkv_proj.weight_scale_2.numel() == 3
    for m in TOKENS:
        x = tokens(m, m, 1024)
        for got, shard in zip(attention(x), shards, strict=True):
            assert relative_error(got, shard(x)) < ROUNDING["bf16"]


class Attention(nn.Module):
    def __init__(self, q_proj, k_proj, v_proj):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = q_proj, k_proj, v_proj

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
def test_decoding_in_a_cuda_graph_is_that_of_separate_layers(family):
    sizes = dict(SIZES) if family == "Llama" else {k: v for k, v in SIZES.items() if k != "rope_parameters"}
    sizes |= {"head_dim": 64, **({"sliding_window": None} if family == "Mistral" else {})}
    apart, fused = models("nvfp4:bf16", sizes, family)
    agree = 0
    for batch in (1, 16):
        generator = torch.Generator("cuda").manual_seed(batch)
        prompts = torch.randint(sizes["vocab_size"], (batch, 32), device="cuda", generator=generator)
        found = {}
        for name, model in (("apart", apart), ("fused", fused)):
            fp4dispatch.warmup(model, tokens=[batch, batch * 32])
            steps = decoder.Decoder(model, prompts, 64)
            eager = decoder.run_steps(steps, steps.step, 4)
            graph = decoder.run_steps(steps, steps.captured(), 4)
            assert decoder.difference(graph, eager) == 0, (name, batch)
            steps.start()
            found[name] = steps.token.flatten().clone(), graph[0][0]
        (token, want), (other, got) = found["apart"], found["fused"]
        same = token == other  # rounding may choose another first token, and then all that follows differs
        agree += int(same.sum())
        assert not same.any() or relative_error(got[same], want[same]) < 0.03, batch
    assert agree >= 10, "of 17 first tokens"


def test_a_compiled_model_has_no_graph_breaks_and_other_inputs_work():
    _, fused = models("nvfp4:bf16")
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, mode="reduce-overhead")
    for seed in range(3):
        ids = torch.randint(2048, (2, 16), device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        fused(input_ids=ids, use_cache=False)  # plans
        got = compiled(input_ids=ids, use_cache=False).logits.float().clone()
        assert relative_error(got, fused(input_ids=ids, use_cache=False).logits.float()) < 0.03


def test_weights_are_held_once_and_fusing_needs_little_memory():
    sizes = SIZES | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    model = decoder.build(sizes, torch.device("cuda"))
    decoder.quantise(model, "nvfp4")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert len(fp4dispatch.fuse(model).fused) == 4
    gc.collect()
    torch.cuda.synchronize()
    group = 2 * 14336 * 4096 * 9 // 16
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert torch.cuda.max_memory_allocated() <= before + 4 * group + PACKING
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    fp4dispatch.warmup(model, tokens=[1])
    if fp4dispatch.gpu_arch == fp4dispatch.Arch(9, 0):
        assert all("weight" not in layer._buffers for layer in layers)


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_row"])
def test_a_quantised_head_in_a_graph(fmt):
    model = decoder.build(SIZES | {"vocab_size": 128256}, torch.device("cuda"))
    weight = model.lm_head.weight.float()
    fp4dispatch.replace_linears(model, fmt, include="lm_head", lm_head=True)
    assert isinstance(model.lm_head, QuantizedLinear)
    for m in (1, 16):
        x = tokens(m, m, 1024)
        fp4dispatch.warmup(model, tokens=[m])
        eager = model.lm_head(x)
        graph, out = captured(lambda x=x: model.lm_head(x))
        graph.replay()
        assert torch.equal(out, eager)
        limit = 0.15 if isinstance(model.lm_head, FP4Linear) else 0.05
        assert relative_error(eager, x.float() @ weight.T) < limit
