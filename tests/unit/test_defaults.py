"""Another default dtype or device changes nothing: engines set both (vLLM and SGLang load models under bfloat16)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own.tensors import quantizers
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.problem import Problem
from fp4dispatch.run import ops
from fp4dispatch.tune import tuning

PACKAGE = Path(formats.__file__).parent
DEFAULTS = (torch.bfloat16, torch.float16, torch.float64)
K, N = 128, 96

FACTORIES = {
    *("empty", "zeros", "ones", "full", "tensor", "arange", "linspace", "logspace", "eye", "rand", "randn", "randint"),
    *("randperm", "scalar_tensor", "empty_strided", "normal", "range", "Tensor", "FloatTensor"),
}
"""Functions of torch whose dtype, device or both follow a global default unless they are given."""
NEEDED = {"randperm": {"device"}, "randint": {"device"}}  # int64, whatever the default
MODULES = {"Linear", "LayerNorm", "Embedding", "Conv1d", "Conv2d", "RMSNorm"}


def unstated(tree: ast.AST) -> list[str]:
    """Return each call of a factory that leaves its dtype or device to a global default."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        if not (owner == "torch" and name in FACTORIES) and not (owner in ("nn", "torch.nn") and name in MODULES):
            continue
        given = {keyword.arg for keyword in node.keywords}
        missing = NEEDED.get(name, {"dtype", "device"}) - given
        if missing and None not in given:  # **options
            found.append(f"line {node.lineno}: {ast.unparse(node)} lacks {', '.join(sorted(missing))}")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_tensor_is_made_with_its_dtype_and_device(path):
    assert unstated(ast.parse(path.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    "code",
    [
        "torch.ones(())",
        "torch.ones((), device=d)",
        "torch.zeros(3, dtype=torch.uint8)",
        "torch.tensor(1.0, dtype=torch.float32)",
        "torch.randperm(3)",
        "nn.Linear(2, 2)",
        "[torch.full((), 1.0) for _ in x]",
    ],
)
def test_what_leaves_it_to_a_default_is_found(code):
    assert len(unstated(ast.parse(code))) == 1


def linear() -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(K, N, device="cpu", dtype=torch.float32)
    return made.to(torch.bfloat16).requires_grad_(False)


def layers() -> dict[str, QuantizedLinear]:
    """One layer of each format and activation, by name."""
    made: dict[str, QuantizedLinear] = {
        f"nvfp4 {activation}": FP4Linear.from_linear(linear(), activation=activation)
        for activation in ("bf16", "fp8", "nvfp4")
    }
    for scaling in ("tensor", "row", "block128"):
        for activation in ("bf16", "fp8"):
            kind = f"fp8 {scaling} {activation}"
            made[kind] = FP8Linear.from_linear(linear(), scaling=scaling, activation=activation)
    one = made["nvfp4 nvfp4"].weights()
    shards = LinearWeights(
        *("nvfp4_gemm", "nvfp4", N, K, one.weight, one.scale),
        one.global_scale.expand(2).contiguous(),
        (64, 32),
        torch.tensor(0.01, dtype=torch.float32, device="cpu"),
    )
    return made | {"nvfp4 fused, static": FP4Linear.from_weights(shards, activation="nvfp4")}


def results() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(33, K, dtype=torch.float32, device="cpu")
    found = {}
    for name, layer in layers().items():
        empty = type(layer)(K, N, **({"scaling": layer.scaling} if isinstance(layer, FP8Linear) else {}))
        if "fused" not in name:
            empty.load_state_dict(layer.state_dict())
            assert {k: v.dtype for k, v in empty.state_dict().items()} == {
                k: v.dtype for k, v in layer.state_dict().items()
            }
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            found[f"{name} {dtype}"] = layer(x.to(dtype))
    scale = torch.tensor(0.01, dtype=torch.float32, device="cpu")
    a, a_sf = ops.nvfp4_quantize(x.bfloat16(), scale)
    b = formats.nvfp4_quantize(linear().weight, sf_layout="128x4")
    found["raw nvfp4"] = ops.nvfp4_gemm(a, b.data, a_sf, b.sf, scale * b.global_scale)
    for scaling, of_a in (("tensor", "tensor"), ("row", "row"), ("block128", "1x128")):
        p, q = ops.fp8_quantize(x, of_a), formats.fp8_quantize(linear().weight, scaling)
        found[f"raw fp8 {scaling}"] = ops.fp8_gemm(p[0], q.data, p[1], q.scale, scaling=scaling)
    made = tuning.make_weights(Problem("fp8_gemm", 1, N, K, "fp8", "row"), "cpu")
    return found | {"codes": made.weight.view(torch.uint8), "scales": made.scale}


@pytest.fixture(scope="module")
def want():
    return results()


@pytest.fixture
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.parametrize("default_dtype", DEFAULTS, indirect=True, ids=str)
def test_layers_and_operators_give_the_same_bits_under_another_default_dtype(want, default_dtype):
    got = results()
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def test_layers_and_operators_give_the_same_bits_under_another_default_device(want):
    sources = {name: layer.state_dict() for name, layer in layers().items()}
    torch.manual_seed(1)
    x = torch.randn(33, K, dtype=torch.float32, device="cpu")
    made = layers()
    try:
        torch.set_default_device("meta")
        assert FP4Linear(K, N).weight.is_meta  # as nn.Linear
        for name, layer in made.items():
            layer.load_state_dict(sources[name])
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                got = layer(x.to(dtype))
                assert torch.equal(got, want[f"{name} {dtype}"]), name
            layer.to("cpu")
        again = FP4Linear.from_linear(made_on_cpu := linear())
        assert again.device == made_on_cpu.weight.device
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("default_dtype", DEFAULTS, indirect=True, ids=str)
def test_what_outlives_a_call_is_float32(default_dtype):
    quantizers.ones.cache_clear()
    assert quantizers.ones(torch.device("cpu")).dtype == torch.float32
    quantizers.ones.cache_clear()
