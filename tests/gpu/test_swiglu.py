"""SwiGLU with the quantiser in one kernel, bit for bit against torch's operations and the quantiser after them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp4dispatch import jit
from fp4dispatch.backends.activations import swiglu
from fp4dispatch.backends.own import swiglu as front
from fp4dispatch.errors import CaptureError
from fp4dispatch.models.fusing import parents
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replace import warmup
from tests.gpu import layers
from tests.gpu.backend_cases import captured
from tests.gpu.sm90 import OUT_DTYPES, SM90, needs_sm90
from tests.gpu.test_kernels_quantize import any_bits, ordinary
from tests.gpu.tiles import bits
from tests.gpu.w4_packed import empty_packed, packer
from tests.gpu.w8_packed import block_scales

pytestmark = [pytest.mark.gpu, needs_sm90, pytest.mark.usefixtures("rules_alone")]

FUNCTIONS = {
    "w4_swiglu_row": "w4_quantize_row",
    "w8_swiglu_row": "w8_quantize_row",
    "w8_swiglu_tensor": "w8_quantize_tensor",
    "w8_swiglu_block": "w8_quantize_block",
    "fp8_swiglu_row": "fp8_quantize_row",
    "fp8_swiglu_tensor": "fp8_quantize_tensor",
    "fp8_swiglu_1x128": "fp8_quantize_1x128",
}
"""Each function, and the quantiser whose bytes it writes for ``silu(gate) * up``: packed, or in rows."""
SIZES = (
    *((m, 4096) for m in (1, 2, 7, 8, 9, 16, 33, 64, 65, 128, 200, 300, 777, 1000, 2048, 2100)),
    *((m, 14_336) for m in (1, 3, 17, 64, 129, 512, 2100)),
    *((m, k) for m in (1, 5, 70, 1021) for k in (16, 128, 144, 272, 1040, 2080, 20_000, 28_672)),
    (3, 140_000),
)
each = pytest.mark.parametrize("function", FUNCTIONS)
dtypes = pytest.mark.parametrize("dtype", OUT_DTYPES.values(), ids=str)


@functools.cache
def module(function: str) -> Any:
    return jit.load(front.kernel_of(function), "any", SM90).module


@functools.cache
def by_rows() -> Any:
    return jit.load("fp8_quantize", "any", SM90).module


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def scale_for(function: str, m: int, k: int) -> Tensor:
    """A poisoned scale, or the static one."""
    if function.endswith("tensor"):
        return torch.full((1,), 0.013, device="cuda")
    if function.endswith("1x128"):  # tokens are the fastest, as cuBLASLt takes them
        return torch.full((-(-k // 128), m), torch.nan, device="cuda").t()
    return block_scales(m, k) if function.endswith("block") else torch.full((m,), torch.nan, device="cuda")


def codes_for(function: str, m: int, k: int) -> Tensor:
    """Poisoned codes."""
    if not function.startswith("fp8"):
        return empty_packed(m, k)
    return torch.full((m, k), 0xFF, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)


def fused(function: str, x: Tensor, pdl: bool = False) -> tuple[Tensor, Tensor]:
    m, k = x.shape[0], x.shape[1] // 2
    codes, scale = codes_for(function, m, k), scale_for(function, m, k)
    getattr(module(function), function)(x, codes, scale, pdl)
    return codes, scale


def apart(function: str, x: Tensor) -> tuple[Tensor, Tensor]:
    m, k = x.shape[0], x.shape[1] // 2
    codes, scale = codes_for(function, m, k), scale_for(function, m, k)
    quantizers = by_rows() if function.startswith("fp8") else packer()
    getattr(quantizers, FUNCTIONS[function])(swiglu(x), codes, scale, False)
    return codes, scale


def check(function: str, x: Tensor) -> None:
    want = apart(function, x)
    for pdl in (False, True):
        for what, a, b in zip(("codes", "scales"), fused(function, x, pdl), want, strict=True):
            wrong = bits(a) != bits(b)
            assert not wrong.any(), f"{what} of {x.dtype} {list(x.shape)}: {int(wrong.sum())} of {wrong.numel()} differ"


# -------------------------------------------------------------------------------------------------------------- kernel


@dtypes
def test_the_product_alone_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    """Every gate, many sizes, any bits, rows apart; outputs are poisoned first."""
    gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype).view(-1, 1).expand(-1, 16)
    inputs = [torch.cat([gate, torch.full_like(gate, up)], 1) for up in (1.0, 1.7)]
    inputs += [ordinary(m, 2 * k, dtype).cuda() for m, k in SIZES]
    inputs += [any_bits(33, 2080, dtype).cuda(), ordinary(9, 4096 + 16, dtype).cuda()[:, :4096]]
    for x in inputs:
        want = swiglu(x)
        for pdl in (False, True):
            out = torch.full_like(want, torch.nan)
            module(front.PRODUCT).swiglu_product(x, out, pdl)
            same = (bits(out) == bits(want)) | (out.isnan() & want.isnan())
            assert same.all(), f"{x.dtype} {list(x.shape)}: {int((~same).sum())} of {out.numel()} differ"


@dtypes
@each
def test_every_gate_gives_the_bits_of_torch(function: str, dtype: torch.dtype) -> None:
    """A token holds one gate, so its scale and codes show all bits; up is a power of two, then any."""
    gate = torch.arange(-(2**15), 2**15, device="cuda").to(torch.int16).view(dtype).view(-1, 1).expand(-1, 16)
    ups = [1.0, -(2.0**64) if dtype == torch.bfloat16 else -32.0, 1.7]
    some = torch.randn(gate.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).to(dtype)
    for up in (*(torch.full_like(gate, up) for up in ups), some, any_bits(*gate.shape, dtype).cuda()):
        check(function, torch.cat([gate, up], 1))


@dtypes
@each
def test_many_sizes(function: str, dtype: torch.dtype) -> None:
    for m, k in SIZES:
        check(function, ordinary(m, 2 * k, dtype).cuda())


@dtypes
@each
def test_every_pattern_of_bits(function: str, dtype: torch.dtype) -> None:
    """NaN, Inf and subnormals on both sides, and tokens and blocks of zeros."""
    for m, k in ((33, 1040), (300, 272), (5, 14_336), (1, 16)):
        x = any_bits(m, 2 * k, dtype).cuda()
        check(function, x)
        x[m // 2] = 0
        x[:, k : k + k // 2] = 0
        check(function, x)


@each
def test_tokens_with_a_non_finite_element_leave_the_others_alone(function: str) -> None:
    x = ordinary(20, 2 * 400, torch.bfloat16).cuda()
    x[3, 7], x[11, 400 + 9], x[12, 5], x[19, 399] = torch.nan, torch.inf, -torch.inf, torch.inf
    assert int((~swiglu(x).isfinite()).sum()) == 4
    check(function, x)


@each
def test_rows_with_a_stride(function: str) -> None:
    wide = torch.full((33, 2 * 272 + 40), torch.nan).bfloat16()
    wide[:, 16 : 16 + 544] = ordinary(33, 544, torch.bfloat16)
    check(function, wide.cuda()[:, 16 : 16 + 544])
    check(function, wide.cuda()[::2, 16 : 16 + 544])


@each
def test_no_tokens(function: str) -> None:
    x, scale = torch.zeros(0, 64, device="cuda").bfloat16(), scale_for(function, 1, 32)
    before = scale.clone()
    given = scale if function.endswith("tensor") else scale[:0] if scale.ndim == 1 else scale_for(function, 0, 32)
    for pdl in (False, True):
        getattr(module(function), function)(x, codes_for(function, 0, 32), given, pdl)
    torch.cuda.synchronize()
    assert torch.equal(bits(scale), bits(before))


@each
def test_replays_of_a_graph_with_pdl(function: str) -> None:
    """A chain in one buffer: each kernel reads what torch wrote just before it, and the next write must wait."""
    m, k = 70, 2080
    inputs = [ordinary(m, 2 * k, torch.bfloat16).cuda() * factor for factor in (1, 2, 0.5)]
    wants = [apart(function, x) for x in inputs]
    x, results = torch.empty_like(inputs[0]), [(codes_for(function, m, k), scale_for(function, m, k)) for _ in inputs]
    launch = getattr(module(function), function)

    def chain() -> None:
        for given, (codes, scale) in zip(inputs, results, strict=True):
            x.copy_(given)
            launch(x, codes, scale, True)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        for codes, _scale in results:
            codes.view(torch.uint8).fill_(0xFF)
        graph.replay()
        for got, want in zip(results, wants, strict=True):
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda t: t.float(), "x: dtype is float32"),
        ("x", lambda t: t[:, :400].contiguous(), "K is 400, needed a multiple of 32"),
        ("x", lambda t: t[:, : 2 * 80].contiguous(), r"packed: size of dimension 0 is 2, needed 1 \(ceil\(K/128\)\)"),
        ("x", lambda t: t.t().contiguous().t(), "x: the last dimension has stride 21, needed 1"),
        ("x", lambda t: t.cpu(), "CUDA device|packed: is not on"),
        ("packed", lambda t: t[:1], r"packed: size of dimension 0 is 1, needed 2 \(ceil\(K/128\)\)"),
        ("scale", lambda t: t[:20], "scale: has 20 elements, needed 21"),
        ("scale", lambda t: t.half(), "scale: dtype is float16, needed float32"),
    ],
)
def test_wrong_operands_are_refused(name: str, change: Callable[..., Any], message: str) -> None:
    given = {"x": torch.randn(21, 416, device="cuda").bfloat16(), "packed": empty_packed(21, 208)}
    given["scale"] = scale_for("w8_swiglu_row", 21, 208)
    with pytest.raises((ValueError, TypeError), match=message):
        module("w8_swiglu_row").w8_swiglu_row(*(given | {name: change(given[name])}).values(), False)
    torch.cuda.synchronize()
    assert bool((given["packed"] == 0xFF).all())


@pytest.mark.parametrize(
    ("function", "name", "change", "message"),
    [
        ("row", "x", lambda t: t[:, :408].contiguous(), "K is 408, needed a multiple of 16"),
        ("row", "x", lambda t: t[:, :400].contiguous(), r"q: size of dimension 1 is 208, needed 200 \(K\)"),
        ("row", "codes", lambda t: t[:20], r"q: size of dimension 0 is 20, needed 21 \(M\)"),
        ("row", "codes", lambda t: t[:, :192].contiguous(), r"q: size of dimension 1 is 192, needed 208 \(K\)"),
        ("row", "codes", lambda t: t.t().contiguous().t(), "q: not contiguous"),
        ("row", "scale", lambda t: t[:20], r"scale: has 20 elements, needed 21 \(M\)"),
        ("row", "scale", lambda t: t.half(), "scale: dtype is float16, needed float32"),
        ("tensor", "scale", lambda t: t.expand(21).contiguous(), "scale: has 21 elements, needed 1"),
        ("1x128", "scale", lambda t: t[:, :1], r"scale: size of dimension 1 is 1, needed 2 \(ceil\(K/128\)\)"),
    ],
)
def test_wrong_rows_are_refused(function: str, name: str, change: Callable[..., Any], message: str) -> None:
    function = f"fp8_swiglu_{function}"
    given = {"x": torch.randn(21, 416, device="cuda").bfloat16(), "codes": codes_for(function, 21, 208)}
    given["scale"] = scale_for(function, 21, 208)
    with pytest.raises((ValueError, TypeError), match=message):
        getattr(module(function), function)(*(given | {name: change(given[name])}).values(), False)
    torch.cuda.synchronize()
    assert bool((bits(given["codes"]) == 0xFF).all())


# ---------------------------------------------------------------------------------------------------- torch's own bits


def test_the_kernels_are_trusted_here_and_another_silu_is_not() -> None:
    """The check of every gate refuses a product that is rounded once."""
    device = torch.device("cuda", 0)

    def product_once(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    def packed_once(x: Tensor, packed: Tensor, scale: Tensor, pdl: bool) -> None:
        packer().w8_quantize_row(product_once(x), packed, scale, pdl)

    def rows_once(x: Tensor, out: Tensor, pdl: bool) -> None:
        out.copy_(product_once(x))

    once = SimpleNamespace(w8_swiglu_row=packed_once, swiglu_product=rows_once)
    for kernel, function in ((front.PACKED, "w8_swiglu_row"), (front.ROWS, front.PRODUCT)):
        for dtype in OUT_DTYPES.values():
            assert front.as_torch_does(kernel, module(function), dtype, device)
            assert not front.as_torch_does(kernel, once, dtype, device)
        assert front.front(function, SM90, device) is not None


@dtypes
def test_the_product_for_others_is_one_kernel(dtype: torch.dtype) -> None:
    wide = torch.randn(40, 4120, device="cuda").to(dtype)
    strided = wide[:, 8:4104], wide[:, 3:4099], wide.t().clone().t()[:, :64]
    for x in (gate_up(1, dtype=dtype), gate_up(300, dtype=dtype), *strided):
        assert torch.equal(front.product(x), swiglu(x))
    x = gate_up(300, dtype=dtype)
    (name,) = kernels_of(lambda: front.product(x))
    assert "swiglu_rows" in name
    graph, out = captured(lambda: front.product(x))
    x.mul_(2)
    graph.replay()
    assert torch.equal(out, swiglu(x))


# -------------------------------------------------------------------------------------------------------------- layers

CASES = {
    "w4a8": lambda **o: nvfp4_layer(activation="fp8", backend="w4a8", **o),
    "w4a16": lambda **o: nvfp4_layer(activation="bf16", backend="w4a16", **o),
    "any": lambda **o: nvfp4_layer(**o),
    "w8a8 row": lambda **o: fp8_layer("row", activation="fp8", backend="w8a8", **o),
    "w8a8 tensor": lambda **o: fp8_layer("tensor", activation="fp8", backend="w8a8", **o),
    "w8a8 static": lambda **o: static(fp8_layer("tensor", activation="fp8", backend="w8a8", **o)),
    "w8a8 block": lambda **o: fp8_layer("block128", activation="fp8", backend="w8a8", **o),
    "cublaslt row": lambda **o: fp8_layer("row", backend="cublaslt", **o),
    "cublaslt tensor": lambda **o: fp8_layer("tensor", backend="cublaslt", **o),
    "cublaslt static": lambda **o: static(fp8_layer("tensor", backend="cublaslt", **o)),
    "cublaslt static row": lambda **o: static(fp8_layer("row", backend="cublaslt", **o)),
    "cublaslt block": lambda **o: fp8_layer("block128", backend="cublaslt", **(o | {"bias": False})),
    "cutlass row": lambda **o: fp8_layer("row", backend="cutlass", **o),
    "cutlass static": lambda **o: static(fp8_layer("tensor", backend="cutlass", **o)),
    "cutlass block": lambda **o: fp8_layer("block128", backend="cutlass", **o),
    "fp8": lambda **o: fp8_layer("row", **o),
}
CUBLASLT = ("cublaslt row", "cublaslt tensor", "cublaslt static", "cublaslt static row", "cublaslt block")
BY_ROWS = (*CUBLASLT, "cutlass row", "cutlass static", "cutlass block")
FUSED = ("w4a8", "w8a8 row", "w8a8 tensor", "w8a8 static", "w8a8 block", *BY_ROWS)
TOKENS = (1, 2, 8, 9, 16, 33, 64, 65, 128, 200, 513, 1000, 2100)
kinds = pytest.mark.parametrize("kind", CASES)


def nvfp4_layer(**options: Any) -> FP4Linear:
    return layers.nvfp4_layer(**({"k": 2048, "n": 1024} | options))


def fp8_layer(
    scaling: Any, *, k: int = 2048, n: int = 1024, dtype: torch.dtype = torch.bfloat16, bias: bool = True, **o: Any
) -> FP8Linear:
    return FP8Linear.from_linear(layers.dense(k, n, dtype, bias, 0), scaling=scaling, **o)


def static(layer: FP8Linear) -> FP8Linear:
    layer.input_scale = torch.tensor(0.011, device="cuda")
    return layer


def gate_up(m: int, k: int = 2048, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    draw = torch.Generator("cuda").manual_seed(m)
    return torch.randn(m, 2 * k, device="cuda", generator=draw).to(dtype)


@dtypes
@kinds
def test_a_layer_gives_the_bits_of_separate_operations(kind: str, dtype: torch.dtype) -> None:
    for n, bias in ((1024, True), (1000 - 8, False)):
        layer = CASES[kind](k=2048, n=n, dtype=dtype, bias=bias)
        for m in TOKENS:
            x = gate_up(m, dtype=dtype)
            assert torch.equal(layer.swiglu(x), layer(swiglu(x))), (n, m)
            if kind in FUSED and m <= 64:
                rounded_after = kind == "cublaslt block" and dtype == torch.float16
                assert (layer.bound_to(dtype).swiglu(m, layer.bias is not None) is None) == rounded_after, m


@pytest.mark.parametrize("kind", ["w4a8", "w8a8 row", "w8a8 block", "cublaslt row", "cublaslt block"])
def test_any_strides_and_sizes(kind: str) -> None:
    for n, k in ((1003, 2048), (264, 1040)):
        layer = CASES[kind](k=k, n=n)
        wide = torch.randn(40, 2 * k + 24, device="cuda").bfloat16()
        for x in (
            wide[:, : 2 * k],
            wide[:, 3 : 3 + 2 * k],
            wide[::2, 8 : 8 + 2 * k],
            wide[:, : 2 * k].t().clone().t(),
            wide[:, : 2 * k].reshape(4, 10, 2 * k).transpose(0, 1),
        ):
            assert torch.equal(layer.swiglu(x), layer(swiglu(x)))


@pytest.mark.parametrize("kind", ["rounded after", "padded"])
def test_before_other_gemms_the_product_is_one_kernel(kind: str) -> None:
    """By what the profiler saw: an output in float16 or a padded one is copied, which no launch from gate_up does."""
    padded, dtype = kind == "padded", torch.bfloat16 if kind == "padded" else torch.float16
    layer = fp8_layer("row" if padded else "block128", n=1001 if padded else 1024, dtype=dtype, backend="cublaslt")
    x = gate_up(33, dtype=dtype)
    together = kernels_of(lambda: layer.swiglu(x))
    assert torch.equal(layer.swiglu(x), layer(swiglu(x)))
    assert "swiglu_rows" in together[0]
    assert not any("silu" in name for name in together)


def kernels_of(call: Callable[[], Any]) -> list[str]:
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in seen.events() if event.device_type == torch.profiler.DeviceType.CUDA]
    return [name for name in names if not name.startswith("Mem")]


@pytest.mark.parametrize("kind", FUSED)
def test_one_kernel_takes_the_place_of_three(kind: str) -> None:
    """By what the profiler saw: the operations of torch would give the same bits."""
    layer, x = CASES[kind](**({"bias": False} if kind in BY_ROWS else {})), gate_up(33)
    h = swiglu(x)
    apart, together = kernels_of(lambda: layer(h)), kernels_of(lambda: layer.swiglu(x))
    assert len(together) == len(apart)
    assert ["SwiGlu" in name for name in together] == [True, *[False] * (len(apart) - 1)]
    assert not any("elementwise" in name for name in together)


def test_few_tokens_of_16_bits_take_two_kernels() -> None:
    """By what the profiler saw: SwiGLU, then the GEMM."""
    for kind in ("w4a16", "fp8"):
        layer, x = CASES[kind](), gate_up(1)
        together = kernels_of(lambda layer=layer, x=x: layer.swiglu(x))
        assert len(together) == 2
        assert "swiglu_rows" in together[0]


@kinds
def test_graphs_replay_it(kind: str) -> None:
    layer = CASES[kind]()
    for m in (1, 16, 33, 64, 200):
        x = gate_up(m)
        warmup(layer, tokens=[m])
        layer.swiglu(x)
        graph, out = captured(lambda x=x: layer.swiglu(x))
        for factor in (1, 0.5, 3):
            x.copy_(gate_up(m) * factor)
            out.fill_(torch.nan)
            graph.replay()
            assert torch.equal(out, layer(swiglu(x))), (m, factor)


def test_a_capture_does_not_load_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = CASES["w4a8"]()
    warmup(layer, tokens=[16])
    monkeypatch.setattr(front, "_known", {})
    x = gate_up(16)
    with pytest.raises(CaptureError, match="loading the SwiGLU kernel"):
        captured(lambda: layer.swiglu(x))
    torch.cuda.synchronize()
    layer.swiglu(x)
    graph, out = captured(lambda: layer.swiglu(x))
    graph.replay()
    assert torch.equal(out, layer(swiglu(x)))


@pytest.mark.parametrize("kind", ["w4a8", "any", "w8a8 row", "fp8", "cublaslt row", "cublaslt block"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_it_compiles(kind: str, mode: str) -> None:
    torch._dynamo.reset()
    layer = CASES[kind]()
    compiled = torch.compile(layer.swiglu, fullgraph=True, mode=mode, dynamic=False)
    for m in (1, 16, 200):
        x = gate_up(m)
        for _ in range(3):
            assert torch.equal(compiled(x).clone(), layer(swiglu(x))), m


# -------------------------------------------------------------------------------------------------------------- models


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4:fp8", "fp8_row", "fp8"])
def test_a_fused_model_gives_the_bits_it_gave_without(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers (extra `demo`) is not installed")
    from bench import decoder
    from tests.gpu.test_fuse import SIZES as MODEL

    with decoder.repeatable_attention():
        model = decoder.build(MODEL, torch.device("cuda"))
        decoder.quantise(model, f"{fmt}+fuse")
        mlp = model.model.layers[0].mlp
        assert mlp.fused_downs == (("down_proj", "act_fn"),)
        tokens = (1, 16, 33, 200)
        warmup(model, tokens=tokens)
        for m in tokens:
            x = gate_up(m, mlp.gate_up_proj.in_features // 2)
            graph, out = captured(lambda x=x: mlp(x))
            with monkeypatch.context() as patch:
                patch.setattr(parents, "takes_gate_up", lambda down: False)
                want = mlp(x)
            assert torch.equal(mlp(x), want)
            graph.replay()
            assert torch.equal(out, want)
