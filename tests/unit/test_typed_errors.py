"""What a caller gets wrong about layers, operators and formats is an InputError that says what is needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4dispatch import formats
from fp4dispatch.errors import InputError, UnknownBackendError
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.run import ops

K, N = 64, 48


def linear(**options):
    torch.manual_seed(0)
    return nn.Linear(K, N, dtype=torch.bfloat16, **options).requires_grad_(False)


def layers():
    return FP4Linear.from_linear(linear()), FP8Linear.from_linear(linear(), scaling="row")


def x(*shape, dtype=torch.bfloat16):
    return torch.ones(*(shape or (4, K)), dtype=dtype)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("layer", layers(), ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: None, r"is None; need a torch\.Tensor"),
        (lambda: [1.0] * K, r"is a list; need a torch\.Tensor"),
        (lambda: x().float().numpy(), r"is a ndarray"),
        (lambda: 1.0, r"is a float"),
        (lambda: x().to_sparse(), r"is torch\.sparse_coo; need torch\.strided: call \.to_dense\(\)"),
        (lambda: x().float().to_sparse_csr(), r"is torch\.sparse_csr"),
        (lambda: x(dtype=torch.int64), r"int64 input; need torch\.bfloat16.*convert it"),
        (lambda: x(dtype=torch.bool), "bool"),
        (lambda: x(dtype=torch.complex64), "complex64"),
        (lambda: x(dtype=torch.float64), r"float64 input; need torch\.bfloat16.*convert it"),
        (lambda: torch.ones((), dtype=torch.bfloat16), "in_features"),
        (lambda: x(4, K + 1), "in_features"),
        (lambda: x().to("meta"), "meta"),
    ],
)
def test_input(layer, warm, make, says):
    if warm:
        layer(x())
        layer(x())
    with pytest.raises(InputError, match=says):
        layer(make())
    if warm:
        assert layer(x()).shape == (4, N)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool])
def test_autocast_casts_what_it_casts_for_torch(dtype):
    layer = layers()[0]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match=str(dtype)):
        layer(x(dtype=dtype))


def test_a_layer_keeps_its_bias_where_a_model_goes_to_float64():
    for layer in layers():
        want = layer(x())
        layer.double()
        assert layer.bias.dtype == torch.bfloat16
        assert torch.equal(layer(x()), want)
        with pytest.raises(InputError, match="float64 input"):
            layer(x(dtype=torch.float64))


@pytest.mark.parametrize("cls", [FP4Linear, FP8Linear])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda: None, "got None; need an nn.Linear"),
        (lambda: nn.Conv2d(K, N, 1), "got a Conv2d; need an nn.Linear"),
        (lambda: nn.Embedding(N, K), "got a Embedding"),
        (lambda: linear().weight, "got a Parameter"),
        (lambda: layers()[0], "quantised already"),
        (lambda: layers()[1], "quantised already"),
        (lambda: nn.LazyLinear(N), "no shape yet"),
        (lambda: linear().double(), "float64"),
        (lambda: linear().to(torch.complex64), "complex64"),
    ],
)
def test_from_linear(cls, given, says):
    with pytest.raises(InputError, match=says):
        cls.from_linear(given())


@pytest.mark.parametrize("cls", [FP4Linear, FP8Linear])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backend": 3}, "backend=3 is a int, not a name"),
        ({"backend": ["w4a16"]}, "is a list, not a name"),
        ({"activation": 8}, "activation=8"),
        ({"dtype": "bf16"}, "dtype=bf16"),
        ({"dtype": torch.int8}, "int8"),
        ({"in_features": 64.0}, "need to be int"),
        ({"out_features": "48"}, "need to be int"),
        ({"out_features": True}, "need to be int"),
        ({"in_features": 0}, "at least 1"),
    ],
)
def test_construction(cls, options, says):
    with pytest.raises((InputError, UnknownBackendError), match=says):
        cls(**({"in_features": K, "out_features": N} | options))
    with pytest.raises(InputError, match="shard_rows=3"):
        FP4Linear(K, N, shard_rows=3)


@pytest.mark.parametrize("cls", [FP4Linear, FP8Linear])
def test_from_weights(cls):
    good = cls.from_linear(linear()).weights()
    for given in (None, good.weight):
        with pytest.raises(InputError, match="need a fp4dispatch"):
            cls.from_weights(given)
    for bias in (1.0, [0.0] * N, torch.zeros(N, dtype=torch.int32), torch.zeros(N).to_sparse()):
        with pytest.raises(InputError, match="bias"):
            cls.from_weights(good, bias)


def quantised():
    a, b = formats.nvfp4_quantize(x(), sf_layout="128x4"), formats.nvfp4_quantize(x(N, K), sf_layout="128x4")
    return a.data, b.data, a.sf, b.sf, a.global_scale * b.global_scale


CALLS = {
    "nvfp4_quantize with a float scale": lambda: ops.nvfp4_quantize(x(), 1.0),
    "nvfp4_quantize of None": lambda: ops.nvfp4_quantize(None),
    "formats.nvfp4_quantize with a float scale": lambda: formats.nvfp4_quantize(x(), 1.0),
    "formats.nvfp4_quantize of None": lambda: formats.nvfp4_quantize(None),
    "formats.nvfp4_quantize of a sparse matrix": lambda: formats.nvfp4_quantize(x().to_sparse()),
    "nvfp4_global_scale of a list": lambda: formats.nvfp4_global_scale([1.0]),
    "fp8_quantize of None": lambda: ops.fp8_quantize(None, "row"),
    "fp8_quantize with a float scale": lambda: ops.fp8_quantize(x(), "tensor", 1.0),
    "formats.fp8_quantize with a float scale": lambda: formats.fp8_quantize(x(), "tensor", 1.0),
    "nvfp4_dequantize with a float scale": lambda: formats.nvfp4_dequantize(*formats.nvfp4_quantize(x())[:2], 1.0),
    "nvfp4_dequantize to int8": lambda: formats.nvfp4_dequantize(*formats.nvfp4_quantize(x()), dtype=torch.int8),
    "nvfp4_dequantize to float64": lambda: formats.nvfp4_dequantize(*formats.nvfp4_quantize(x()), dtype=torch.float64),
    "fp8_dequantize to int8": lambda: formats.fp8_dequantize(*formats.fp8_quantize(x(), "row"), "row", torch.int8),
    "fp8_dequantize to bool": lambda: formats.fp8_dequantize(*formats.fp8_quantize(x(), "row"), "row", torch.bool),
    "fp8_dequantize to a string": lambda: formats.fp8_dequantize(*formats.fp8_quantize(x(), "row"), "row", "bf16"),
    "fp8_dequantize of a float scale": lambda: formats.fp8_dequantize(
        formats.fp8_quantize(x(), "row").data, 1.0, "row"
    ),
    "nvfp4_gemm with backend=3": lambda: ops.nvfp4_gemm(*quantised(), backend=3),
    "nvfp4_gemm with a float alpha": lambda: ops.nvfp4_gemm(*quantised()[:4], 1.0),
    "nvfp4_gemm with out_dtype='bf16'": lambda: ops.nvfp4_gemm(*quantised(), out_dtype="bf16"),
    "nvfp4_gemm with a float bias": lambda: ops.nvfp4_gemm(*quantised(), 1.0),
    "fp8_gemm of None": lambda: ops.fp8_gemm(None, None, None, None),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_operators_and_formats(call):
    with pytest.raises((InputError, UnknownBackendError), match=r"need|not a name"):
        call()
