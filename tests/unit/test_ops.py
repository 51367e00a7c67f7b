"""The torch operators: schema, fake and autograd by opcheck, operands refused before any launch, results."""

import pytest
import torch
from torch import nn

import fp4dispatch
from fp4dispatch import formats
from fp4dispatch.backends.base import Plan
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import BackwardError, CaptureError, InputError, UnknownBackendError
from fp4dispatch.machine import capture
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.run import ops, routes

M, N, K = 5, 48, 64


def nvfp4_operands(layout="128x4", m=M):
    torch.manual_seed(0)
    a = formats.nvfp4_quantize(torch.randn(m, K), sf_layout=layout)
    b = formats.nvfp4_quantize(torch.randn(N, K), sf_layout=layout)
    return a, b, a.global_scale * b.global_scale


def fp8_operands(scaling, m=M, k=K):
    torch.manual_seed(0)
    a = formats.fp8_quantize(torch.randn(m, k), "1x128" if scaling == "block128" else scaling)
    return a, formats.fp8_quantize(torch.randn(N, k), scaling)


def linear_args(layer, x):
    bound = layer.bind(x.dtype)
    return x, list(bound.tensors), layer.bias, bound.spec.text


LAYERS = []
"""Those of the arguments: an operator that is given a layer's tensors asks the layer."""


def stored_args(layer, x):
    LAYERS.append(layer)
    x, tensors, bias, spec = linear_args(layer, x)
    return x, tensors, [b for name, b in layer.named_buffers() if not name.startswith("layout")], bias, spec


def _allclose(a, b, equal_nan=False, _allclose=torch.allclose):
    """opcheck compares operands before and after with allclose, which torch (2.13) does not have for float8."""
    if a.dtype == torch.float8_e4m3fn:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    return _allclose(a, b, equal_nan=equal_nan)


def every_op():
    a, b, alpha = nvfp4_operands()
    bias = torch.randn(N, dtype=torch.bfloat16)
    raw = (a.data, b.data, a.sf, b.sf, alpha)
    yield "nvfp4_gemm", (*raw, None, torch.bfloat16, "128x4", None)
    yield "nvfp4_gemm", (*raw, bias, torch.float32, "128x4", "reference")
    for scaling in ("tensor", "row", "block128"):
        fa, fb = fp8_operands(scaling)
        yield "fp8_gemm", (fa.data, fb.data, fa.scale, fb.scale, bias, torch.bfloat16, scaling, None)
    yield "nvfp4_quantize", (torch.randn(M, K), torch.tensor(0.01), "128x4")
    yield "nvfp4_quantize", (torch.randn(M, K), torch.tensor(0.01), "linear")
    yield "fp8_quantize", (torch.randn(M, K), "row", None)
    yield "fp8_quantize", (torch.randn(M, K), "tensor", torch.tensor(0.01))
    x = torch.randn(2, 3, K, dtype=torch.bfloat16)
    yield "linear", linear_args(FP4Linear.from_linear(torch.nn.Linear(K, N)), x)
    yield "linear", linear_args(FP8Linear.from_linear(torch.nn.Linear(K, N, bias=False), scaling="row"), x)
    yield "linear_stored", stored_args(FP4Linear.from_linear(torch.nn.Linear(K, N)), x)
    yield "linear_stored", stored_args(FP8Linear.from_linear(torch.nn.Linear(K, N), scaling="block128"), x)
    gate_up = torch.randn(2, 3, 2 * K, dtype=torch.bfloat16)
    yield "swiglu_linear", stored_args(FP4Linear.from_linear(torch.nn.Linear(K, N)), gate_up)
    yield "swiglu_linear", stored_args(FP8Linear.from_linear(torch.nn.Linear(K, N, bias=False), scaling="row"), gate_up)


@pytest.mark.parametrize(("name", "args"), list(every_op()), ids=lambda v: v if isinstance(v, str) else "")
def test_opcheck(name, args, monkeypatch):
    monkeypatch.setattr(torch, "allclose", _allclose)
    op = getattr(torch.ops.fp4dispatch, name).default
    results = torch.library.opcheck(op, args)
    assert set(results.values()) == {"SUCCESS"}


def test_every_operator_is_checked_here():
    registered = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fp4dispatch::")
    }
    elsewhere = {"refuse_backward", "engine_linear"}  # the second: tests/unit/test_vllm_interface.py
    assert registered - elsewhere == {name for name, _ in every_op()}


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nvfp4_gemm_is_the_product(layout, out_dtype):
    a, b, alpha = nvfp4_operands(layout)
    bias = torch.randn(N)
    y = ops.nvfp4_gemm(a.data, b.data, a.sf, b.sf, alpha, bias, out_dtype=out_dtype, sf_layout=layout)
    want = (
        formats.nvfp4_dequantize(*a, sf_layout=layout).double()
        @ formats.nvfp4_dequantize(*b, sf_layout=layout).double().t()
        + bias
    )
    assert y.dtype == out_dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[out_dtype]
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scaling", ["tensor", "row", "block128"])
@pytest.mark.parametrize("k", [K, 200])
def test_fp8_gemm_is_the_product(scaling, k):
    a, b = fp8_operands(scaling, k=k)
    y = ops.fp8_gemm(a.data, b.data, a.scale, b.scale, out_dtype=torch.float32, scaling=scaling)
    left = formats.fp8_dequantize(*a, "1x128" if scaling == "block128" else scaling).double()
    want = left @ formats.fp8_dequantize(*b, scaling).double().t()
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-4)


def test_quantisers_are_those_of_formats():
    x = torch.randn(M, K)
    gs = formats.nvfp4_global_scale(x)
    data, sf = ops.nvfp4_quantize(x, gs)
    want = formats.nvfp4_quantize(x, gs, sf_layout="128x4")
    assert torch.equal(data, want.data)
    assert torch.equal(sf.view(torch.uint8), want.sf.view(torch.uint8))
    data, scale = ops.fp8_quantize(x, "row")
    assert torch.equal(data.view(torch.uint8), formats.fp8_quantize(x, "row").data.view(torch.uint8))
    assert torch.equal(scale, formats.fp8_quantize(x, "row").scale)


def test_m_zero_is_an_empty_tensor_and_no_launch(monkeypatch):
    monkeypatch.setattr(routes, "launch", lambda *args: pytest.fail("launched"))
    a, b, alpha = nvfp4_operands(m=0)
    assert ops.nvfp4_gemm(a.data, b.data, a.sf, b.sf, alpha).shape == (0, N)
    fa, fb = fp8_operands("row", m=0)
    assert ops.fp8_gemm(fa.data, fb.data, fa.scale, fb.scale, scaling="row").shape == (0, N)


def spoiled():
    a, b, alpha = nvfp4_operands()
    good = {"a": a.data, "b": b.data, "a_sf": a.sf, "b_sf": b.sf, "alpha": alpha}
    yield good | {"a": a.data.view(torch.int8)}, "torch.int8"
    yield good | {"a": a.data[:, :-8].contiguous()}, "need one K"
    yield good | {"a": a.data.repeat(1, 2)[:, ::2]}, "strides"
    yield good | {"b": torch.cat([b.data, b.data])[::2]}, "strides"
    yield good | {"a_sf": a.sf[:64]}, "block scales"
    yield good | {"a_sf": a.sf.float()}, "torch.float32"
    yield good | {"b_sf": b.sf.t().contiguous().t()}, "strides"
    yield good | {"alpha": alpha.bfloat16()}, "bfloat16"
    yield good | {"alpha": torch.ones(2)}, "alpha has 2"
    yield good | {"alpha": torch.ones(N)}, "alpha has 48"
    yield good | {"bias": torch.zeros(N + 1)}, "bias"
    yield good | {"bias": torch.zeros(N, dtype=torch.int32)}, "bias"
    yield good | {"out_dtype": torch.float64}, "out_dtype"
    yield good | {"sf_layout": "8x4"}, "8x4"
    yield good | {"sf_layout": "linear"}, "linear layout"
    yield good | {"b": b.data.to("meta")}, "meta"


@pytest.mark.parametrize(("kwargs", "says"), list(spoiled()), ids=lambda v: v if isinstance(v, str) else "")
def test_nvfp4_gemm_refuses_before_any_launch(monkeypatch, kwargs, says):
    monkeypatch.setattr(routes, "launch", lambda *args: pytest.fail("launched"))
    with pytest.raises(InputError, match=says):
        ops.nvfp4_gemm(**kwargs)


def test_fp8_gemm_refuses_before_any_launch(monkeypatch):
    monkeypatch.setattr(routes, "launch", lambda *args: pytest.fail("launched"))
    a, b = fp8_operands("row")
    for change, says in (
        ({"scaling": "tensor"}, "'tensor' scaling"),
        ({"scaling": "mx"}, "not known"),
        ({"a": a.data.float()}, "torch.float32"),
        ({"a": a.data[:, :32].contiguous()}, "need one K"),
        ({"b_scale": b.scale.double()}, "torch.float64"),
        ({"a_scale": a.scale.reshape(M, 1)}, r"\[5, 1\]"),
        ({"b": b.data.view(torch.uint8).repeat(1, 2)[:, ::2].view(torch.float8_e4m3fn)}, "strides"),
    ):
        good = {"a": a.data, "b": b.data, "a_scale": a.scale, "b_scale": b.scale, "scaling": "row"}
        with pytest.raises(InputError, match=says):
            ops.fp8_gemm(**(good | change))


def test_an_unknown_backend_is_refused_with_the_nearest():
    a, b, alpha = nvfp4_operands()
    with pytest.raises(UnknownBackendError, match="Did you mean reference"):
        ops.nvfp4_gemm(a.data, b.data, a.sf, b.sf, alpha, backend="referense")


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_of_a_raw_gemm_raises(compiled):
    a, b, alpha = nvfp4_operands()

    def f(alpha, bias):
        return ops.nvfp4_gemm(a.data, b.data, a.sf, b.sf, alpha, bias)

    fn = torch.compile(f, backend="aot_eager", fullgraph=True) if compiled else f
    y = fn(alpha.clone().requires_grad_(), torch.zeros(N, requires_grad=True))
    with pytest.raises(BackwardError):
        y.sum().backward()


def test_compile_of_a_chain_with_dynamic_m():
    from torch._dynamo.testing import CompileCounterWithBackend

    _, b, _ = nvfp4_operands()

    def chain(x):
        gs = formats.nvfp4_global_scale(x)
        data, sf = ops.nvfp4_quantize(x, gs)
        return ops.nvfp4_gemm(data, b.data, sf, b.sf, gs * b.global_scale)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fn = torch.compile(chain, backend=counter, fullgraph=True, dynamic=True)
    seen = []
    for m in (2, 7, 130):
        x = torch.randn(m, K)
        torch.testing.assert_close(fn(x), chain(x))
        seen.append(counter.frame_count)
    assert seen[0] == seen[-1] > 0


@pytest.mark.parametrize("compiler", [None, "eager", "aot_eager"])
def test_autocast_does_not_reach_into_an_operator(compiler):
    torch.manual_seed(0)
    linear, x = nn.Linear(512, 256), torch.randn(16, 512)
    torch._dynamo.reset()
    for layer in (FP4Linear.from_linear(linear), FP8Linear.from_linear(linear)):
        call = torch.compile(layer, backend=compiler) if compiler else layer
        for dtype in (torch.float16, torch.bfloat16):
            want = layer(x.to(dtype))
            assert want.isfinite().all()
            with torch.autocast("cpu", dtype):
                assert torch.equal(call(x), want)
    a, b = formats.fp8_quantize(x, "row"), formats.fp8_quantize(linear.weight.detach(), "row")

    def gemm():
        return ops.fp8_gemm(a.data, b.data, a.scale, b.scale, scaling="row", out_dtype=torch.float32)

    want = gemm()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal((torch.compile(gemm, backend=compiler) if compiler else gemm)(), want)


# --------------------------------------------------------------------------------------------------------- specs, plans


def test_layers_of_one_shape_have_one_spec_and_nothing_of_this_process_in_it():
    import json

    first, second = (FP4Linear.from_linear(torch.nn.Linear(K, N), name=f"layer.{i}") for i in range(2))
    text = first.bind().spec.text
    assert text == second.bind().spec.text
    assert first.bind().spec is second.bind().spec is routes.LayerSpec.parse(text)
    data = json.loads(text)
    assert set(data) == {"op", "scaling", "n", "k", "routes"}
    assert data["routes"] == [[32768, "reference", "bf16", 0, 3, ["nvfp4_gemm", "nvfp4", N, K, "linear", False]]]
    assert "layer.0" not in text


class Split(ReferenceBackend):
    """Plans hold for one M; counts them."""

    plans_by_m = True

    def __init__(self):
        self.planned = []

    def plan(self, problem, prepared):
        self.planned.append(problem.m)
        return Plan(self.name, problem)


@pytest.fixture
def split(monkeypatch):
    backend = Split()
    monkeypatch.setattr(choose, "instance", lambda name: backend)
    monkeypatch.setattr(routes, "_plans", {})
    routes.LayerSpec.parse.cache_clear()
    yield backend
    routes.LayerSpec.parse.cache_clear()


def test_plans_are_shared_by_layers_of_one_shape(split):
    layers = [FP8Linear.from_linear(torch.nn.Linear(K, N), scaling="row") for _ in range(3)]
    for layer in layers:
        for m in (1, 3, 3, 8):
            layer(torch.zeros(m, K))
    assert split.planned == [1, 3, 8]


def test_a_missing_plan_during_capture_names_the_call(split, monkeypatch):
    layer = FP8Linear.from_linear(torch.nn.Linear(K, N), scaling="row")
    for m in (1, 8, 16):
        layer(torch.zeros(m, K))
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    assert layer(torch.zeros(8, K)).shape == (8, N)
    with pytest.raises(CaptureError) as error:
        layer(torch.zeros(48, K))
    assert str(error.value) == (
        "no plan for M=48 while a CUDA graph is being captured; building one now would break the capture.\n"
        "  Before capturing: fp4dispatch.warmup(model, tokens=[48])   Planned for this layer: M = 1, 8, 16"
    )
    with pytest.raises(CaptureError, match="warmup"):
        layer(torch.zeros(8, K, dtype=torch.float16))


def test_a_plan_for_any_m_needs_one_warm_up(monkeypatch):
    layer = FP8Linear.from_linear(torch.nn.Linear(K, N), scaling="tensor")
    layer(torch.zeros(1, K))
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    assert layer(torch.zeros(48, K)).shape == (48, N)


def by_m(monkeypatch, m_max, small, large):
    """Let the policy choose one backend up to some M and another one beyond."""
    from dataclasses import replace

    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "off")  # these stand-ins are registered nowhere
    real, instance, both = choose.select, choose.instance, {b.name: b for b in (small, large)}
    monkeypatch.setattr(
        choose,
        "select",
        lambda problem, **kwargs: replace(
            real(problem, **kwargs), backend=(small if problem.m <= m_max else large).name
        ),
    )
    monkeypatch.setattr(choose, "instance", lambda name: both.get(name) or instance(name))


@pytest.mark.parametrize("shared", [True, False])
def test_backends_of_one_layout_hold_the_weights_once(monkeypatch, shared):
    made = []

    class Copies(ReferenceBackend):
        layout = "copied" if shared else ""

        def prepare(self, weights):
            made.append(self.name)
            prepared = super().prepare(weights)
            return type(prepared)(self.name, tuple(t.clone() for t in prepared.tensors), prepared.layout)

        def run(self, plan, prepared, x, out, bias=None):
            assert prepared.backend == plan.backend == self.name
            super().run(plan, prepared, x, out, bias)

    class Few(Copies):
        name = "few"

    class Many(Copies):
        name = "many"

    by_m(monkeypatch, 16, Few(), Many())
    layer = FP4Linear.from_linear(torch.nn.Linear(K, N))
    canonical = sum(t.numel() * t.element_size() for t in layer.state_dict().values())
    copies = layer.bind().spec.routes[0].stop
    assert "few (bf16) up to M=16, then many (bf16)" in repr(layer)
    assert made == (["few"] if shared else ["few", "many"])
    assert len(layer.bind().tensors) == (copies if shared else 2 * copies)
    weights = canonical - layer.bias.numel() * layer.bias.element_size()
    assert layer.nbytes() == canonical + weights * (1 if shared else 2)
    for m in (1, 17):
        x = torch.randn(m, K)
        want = (
            x.double() @ formats.nvfp4_dequantize(layer.weight, layer.weight_scale, layer.weight_scale_2).double().t()
        )
        torch.testing.assert_close(layer(x).double(), want + layer.bias.double(), rtol=1e-4, atol=1e-4)
    layer.bind(torch.bfloat16)  # another output dtype takes the same copies
    assert made == (["few"] if shared else ["few", "many"])


def test_backends_may_change_with_m(monkeypatch):
    class Small(ReferenceBackend):
        name = "small"

        def prepare(self, weights):
            prepared = super().prepare(weights)
            return type(prepared)("small", tuple(t.clone() for t in prepared.tensors), prepared.layout)

        def run(self, plan, prepared, x, out, bias=None):
            assert prepared.backend == "small"
            out.fill_(7)

    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "off")  # the stand-in is registered nowhere
    real, instance, small = choose.select, choose.instance, Small()

    def select(problem, **kwargs):
        from dataclasses import replace

        decision = real(problem, **kwargs)
        return replace(decision, backend="small") if problem.m <= 16 else decision

    monkeypatch.setattr(choose, "select", select)
    monkeypatch.setattr(choose, "instance", lambda name: small if name == "small" else instance(name))
    layer = FP4Linear.from_linear(torch.nn.Linear(K, N))
    assert "small (bf16) up to M=16, then reference (bf16)" in repr(layer)
    assert [m for m, _ in layer.decisions()] == [16, 32768]
    assert len(layer.bind().tensors) == 6
    for m, small_one in ((1, True), (16, True), (17, False), (40000, False)):
        assert bool((layer(torch.ones(m, K)) == 7).all()) is small_one
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        assert bool((compiled(torch.ones(16, K)) == 7).all())
        assert not bool((compiled(torch.ones(17, K)) == 7).all())


def test_nvfp4_quantize_finds_its_scale_and_round_trips():
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    q = fp4dispatch.nvfp4_quantize(x)
    assert torch.equal(q.global_scale, fp4dispatch.nvfp4_global_scale(x))
    back = fp4dispatch.nvfp4_dequantize(*q)
    assert torch.equal(back, formats.nvfp4_dequantize(*formats.nvfp4_quantize(x)))
    assert 0 < (back - x.float()).norm() / x.float().norm() < 0.12  # a step of e2m1 is at most a third of a value
    # With a scale: as kernels want it, and without it in the answer.
    data, sf = fp4dispatch.nvfp4_quantize(x, q.global_scale)
    assert torch.equal(data, q.data)
    assert torch.equal(formats.from_128x4(sf, 5, 4).view(torch.uint8), q.sf.view(torch.uint8))
    assert fp4dispatch.nvfp4_quantize(x, sf_layout="128x4").sf.shape == sf.shape


def test_nvfp4_quantize_without_a_scale_compiles_whole():
    x = torch.randn(4, 64)
    compiled = torch.compile(lambda x: fp4dispatch.nvfp4_dequantize(*fp4dispatch.nvfp4_quantize(x)), fullgraph=True)
    assert torch.equal(compiled(x), fp4dispatch.nvfp4_dequantize(*fp4dispatch.nvfp4_quantize(x)))


@pytest.mark.parametrize(("call", "says"), [
    (lambda x, one, q: fp4dispatch.nvfp4_quantize(x, one, sf_layout=3), "nvfp4_quantize: sf_layout=3; need a str"),
    (lambda x, one, q: fp4dispatch.fp8_quantize(x, 3), "fp8_quantize: scaling=3; need a str"),
    (lambda x, one, q: fp4dispatch.fp8_gemm(q, q, one, one, scaling=None), "fp8_gemm: scaling=None; need a str"),
    (lambda x, one, q: fp4dispatch.nvfp4_gemm(q, q, q, q, one, sf_layout=3), "nvfp4_gemm: sf_layout=3; need a str"),
])  # fmt: skip
def test_words_of_a_wrong_type_are_refused(call, says):
    x = torch.ones(16, 16, dtype=torch.bfloat16)
    with pytest.raises(InputError, match=says):
        call(x, torch.ones(()), x.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_wrong_operands_of_quantisers_are_refused_without_values_too(device):
    x, scale = torch.zeros(4, 32, device=device), torch.ones((), device=device)
    wrong = [
        (lambda: ops.nvfp4_quantize(x, scale, "128x5"), "sf_layout='128x5'"),
        (lambda: ops.nvfp4_quantize(x[:, :20], scale), "K=20"),
        (lambda: ops.nvfp4_quantize(x[None], scale), r"need \[M, K\]"),
        (lambda: ops.nvfp4_quantize(x.double(), scale), "float64"),
        (lambda: ops.nvfp4_quantize(x, torch.ones(2, device=device)), "one element"),
        (lambda: ops.nvfp4_quantize(x, scale.bfloat16()), "bfloat16"),
        (lambda: ops.fp8_quantize(x, "rows"), "scaling='rows'"),
        (lambda: ops.fp8_quantize(x[0], "row"), r"need \[M, K\]"),
        (lambda: ops.fp8_quantize(x[:, :0], "row"), "K > 0"),
        (lambda: ops.fp8_quantize(x, "row", torch.ones(3, device=device)), r"needs torch\.float32 \[4\]"),
        (lambda: ops.fp8_quantize(x, "tensor", torch.ones((), device=device).half()), "float16"),
    ]
    for call, says in wrong:
        with pytest.raises(InputError, match=says):
            call()
