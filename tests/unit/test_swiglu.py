"""SwiGLU before a layer: the bits of separate operations on every backend, one operator, and fused MLPs that use it."""

from __future__ import annotations

import contextlib
import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp4dispatch
from fp4dispatch import formats
from fp4dispatch.backends import w4a8_expanded
from fp4dispatch.backends.activations import swiglu
from fp4dispatch.backends.own import compiled, launch_choice, w4, w8a8, w8a16
from fp4dispatch.backends.own import swiglu as front
from fp4dispatch.errors import BackwardError, CaptureError, InputError, ToolchainError
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.machine import capture
from fp4dispatch.models.fusing import parents
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replace import warmup
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90, Arch
from fp4dispatch.run import nvtx, ops, prebuild, routes
from tests import pdl_fake, swiglu_fake, tiny_models, w4_fake, w8_fake
from tests.hopper import seems_to_be_here

K, N = 64, 48
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IDS = torch.arange(1, 17).view(1, 16)


def layer(kind="nvfp4", dtype=torch.bfloat16, k=K, n=N, bias=True, **options):
    torch.manual_seed(0)
    dense = nn.Linear(k, n, bias).to(dtype)
    if kind == "nvfp4":
        return FP4Linear.from_linear(dense, **options)
    return FP8Linear.from_linear(dense, scaling=kind, **options)


def gate_up(*lead, k=K, dtype=torch.bfloat16):
    return torch.randn(*lead, 2 * k, generator=torch.Generator().manual_seed(sum(lead))).to(dtype)


def raw(tensor):
    return tensor.contiguous().view(torch.uint8)


# -------------------------------------------------------------------------------------------- the reference backend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["nvfp4", "tensor", "row", "block128"])
def test_a_layer_gives_the_bits_of_separate_operations(kind, dtype):
    lin = layer(kind, dtype)
    wide = gate_up(8, k=K + 4, dtype=dtype)
    for x in (
        gate_up(1, dtype=dtype),
        gate_up(5, dtype=dtype),
        gate_up(2, 3, dtype=dtype),
        gate_up(3, 1, 2, dtype=dtype),
        gate_up(dtype=dtype),
        wide[:, 3 : 3 + 2 * K],
        wide[::2, : 2 * K],
        gate_up(4, 3, dtype=dtype).transpose(0, 1),
    ):
        gate, up = x[..., :K], x[..., K:]
        want = lin(F.silu(gate) * up)
        for _ in range(2):  # with a plan to make, and without
            got = lin.swiglu(x)
            assert (got.shape, got.dtype) == (want.shape, dtype)
            assert torch.equal(raw(got), raw(want))
        bound = lin.bind(dtype)
        stored = [b for name, b in lin.named_buffers() if not name.startswith("layout")]
        by_operator = ops.swiglu_linear(x, bound.tensors, stored, lin.bias, bound.spec.text)
        assert torch.equal(raw(by_operator), raw(want))


def test_non_finite_elements_are_those_of_separate_operations():
    lin, x = layer(), gate_up(6)
    x[1, 3], x[2, 5], x[3, K + 2], x[4, 7] = torch.nan, torch.inf, torch.inf, -torch.inf
    got, want = lin.swiglu(x), lin(F.silu(x[:, :K]) * x[:, K:])
    assert torch.equal(raw(got), raw(want))
    assert (~got.isfinite()).any(1).tolist() == [False, True, True, True, True, False]


def test_no_tokens_give_an_empty_tensor_and_no_launch(monkeypatch):
    lin = layer()
    monkeypatch.setattr(routes, "launch", lambda *args: pytest.fail("launched"))
    for lead in ((0,), (2, 0), (0, 3)):
        assert lin.swiglu(gate_up(*lead)).shape == (*lead, N)
    fake = torch.empty(3, 2 * K, device="meta")
    assert lin.bind(torch.float32).spec.k == K
    out = torch.ops.fp4dispatch.swiglu_linear.default(
        fake, [t.to("meta") for t in lin.bind(torch.float32).tensors], [], None, lin.bind(torch.float32).spec.text
    )
    assert (out.shape, out.device.type) == ((3, N), "meta")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            gate_up(3)[:, :-1],
            rf"gate_up has shape \[3, {2 * K - 1}\]; need \[\.\.\., {2 * K}\], K elements of the gate",
        ),
        (torch.tensor(1.0), r"gate_up has shape \[\]"),
        (gate_up(3).double(), "float64"),
        (None, "gate_up"),
        (gate_up(3).to_sparse(), "gate_up"),
        (gate_up(3).to("meta"), "meta"),
    ],
)
def test_wrong_inputs_are_refused(x, message):
    with pytest.raises(InputError, match=message):
        layer().swiglu(x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": gate_up(3)[:, :K]}, rf"swiglu_linear: gate_up has shape \[3, {K}\]; need .* twice the layer's"),
        ({"gate_up": gate_up(3).long()}, "torch.int64 input; need torch.bfloat16"),
        ({"gate_up": 3}, "gate_up"),
        ({"bias": torch.ones(N + 1)}, "swiglu_linear: .*bias"),
    ],
)
def test_the_operator_refuses_wrong_operands(change, message):
    lin = layer()
    bound = lin.bind(torch.bfloat16)
    given = {"gate_up": gate_up(3), "tensors": bound.tensors, "stored": [lin.weight, lin.weight_scale], "bias": None}
    stored = [b for name, b in lin.named_buffers() if not name.startswith("layout")]
    with pytest.raises(InputError, match=message):
        ops.swiglu_linear(*(given | {"stored": stored} | change).values(), bound.spec.text)


def test_it_is_for_inference():
    lin, x = layer(dtype=torch.float32), gate_up(3, dtype=torch.float32).requires_grad_()
    y = lin.swiglu(x)
    assert torch.equal(y, lin(F.silu(x[:, :K]) * x[:, K:]))
    with pytest.raises(BackwardError):
        y.sum().backward()


def test_autocast_casts_the_product():
    """Not what goes into it."""
    lin, x = layer(dtype=torch.float32), gate_up(40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        want = lin(F.silu(x[:, :K]) * x[:, K:])
        assert torch.equal(raw(lin.swiglu(x)), raw(want))
        assert torch.equal(raw(lin.swiglu(x.bfloat16())), raw(lin(swiglu(x.bfloat16()))))
    assert want.dtype == torch.bfloat16
    assert not torch.equal(want, lin(swiglu(x.bfloat16())))


def test_a_layer_with_a_forward_of_its_own_keeps_it():
    class Doubled(FP4Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    lin = layer()
    lin.__class__ = Doubled
    x = gate_up(3)
    assert torch.equal(lin.swiglu(x), 2 * FP4Linear.forward(lin, swiglu(x)))


def test_written_weights_are_seen():
    lin, other, x = layer(), layer(), gate_up(3)
    before = lin.swiglu(x)
    with torch.no_grad():
        other.weight_scale_2.mul_(3)
        lin.weight_scale_2.mul_(3)
    assert torch.equal(lin.swiglu(x), other(swiglu(x)))
    assert not torch.equal(lin.swiglu(x), before)


# ------------------------------------------------------------------------------------------------------- compiled


def operators(compiled_of, *inputs):
    """Compile without breaks and call; return the result and the operators of the graph."""
    torch._dynamo.reset()
    found = []

    def backend(graph, _):
        found.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    with torch.inference_mode():
        return torch.compile(compiled_of, fullgraph=True, backend=backend)(*inputs), found


def test_it_compiles_to_one_operator():
    lin, x = layer(), gate_up(2, 3)
    got, found = operators(lin.swiglu, x)
    assert torch.equal(got, lin(swiglu(x)))
    assert found == ["fp4dispatch.swiglu_linear.default"]


def test_compiled_calls_see_written_weights_and_any_number_of_tokens():
    torch._dynamo.reset()
    lin = layer()
    compiled = torch.compile(lin.swiglu, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.inference_mode():
        for m in (2, 3, 40):
            assert torch.equal(compiled(gate_up(m)), lin(swiglu(gate_up(m))))
    before = compiled(gate_up(3))
    with torch.no_grad():
        lin.weight_scale_2.mul_(3)
    assert torch.equal(compiled(gate_up(3)), lin(swiglu(gate_up(3))))
    assert not torch.equal(compiled(gate_up(3)), before)


def test_a_compiled_call_under_autocast_casts_the_product():
    lin, x = layer(dtype=torch.float32), gate_up(40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        want = lin(swiglu(x))
        got, found = operators(lin.swiglu, x)
    assert torch.equal(raw(got), raw(want))
    assert "fp4dispatch.swiglu_linear.default" not in found


def test_a_compiled_layer_with_a_forward_of_its_own_keeps_it():
    class Doubled(FP4Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    lin, x = layer(), gate_up(3)
    lin.__class__ = Doubled
    got, _ = operators(lin.swiglu, x)
    assert torch.equal(got, 2 * FP4Linear.forward(lin, swiglu(x)))


def test_an_exported_program_runs_without_the_layer():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.down_proj = layer()

        def forward(self, x):
            return self.down_proj.swiglu(x)

    made, x = Mlp(), gate_up(3)
    want = made(x)
    program = torch.export.export(made, (x,))
    del made
    assert torch.equal(program.module()(x), want)


# ------------------------------------------------------------------------------- our kernels, emulated: the launches


def nvfp4(n, k):
    return w4_fake.weights(n, k)


def fp8(n, k, scaling="row", static=None):
    torch.manual_seed(0)
    q = formats.fp8_quantize(torch.randn(n, k), scaling)
    return w8_fake.LinearWeights("fp8_gemm", scaling, n, k, q.data, q.scale, input_scale=static)


W4A8, W4A16, W8A8, W8A16 = w4.W4A8Backend(), w4.W4A16Backend(), w8a8.W8A8Backend(), w8a16.W8A16Backend()
STATIC = torch.tensor(0.05)
EACH = [
    *((W4A8, nvfp4(n, 128), m, "w4_swiglu_row") for n in (64, 61) for m in (1, 9, 64, 65, 500)),
    (W4A8, nvfp4(64, 144), 17, "w4_swiglu_row"),
    *((W8A8, fp8(n, 128), m, "w8_swiglu_row") for n in (64, 61) for m in (1, 9, 64, 65, 500)),
    *((W8A8, fp8(64, 208, "tensor"), m, "w8_swiglu_row") for m in (3, 70)),
    *((W8A8, fp8(64, 208, "tensor", STATIC), m, "w8_swiglu_tensor") for m in (3, 70)),
    *((W8A8, fp8(130, 208, "block128"), m, "w8_swiglu_block") for m in (3, 129, 300)),
    *((W4A16, nvfp4(n, 128), m, "swiglu_product") for n in (64, 61) for m in (1, 8, 40, 70, 300)),
    *((W8A16, fp8(n, 128), m, "swiglu_product") for n in (64, 61) for m in (1, 8, 40)),
]
OTHERS = [
    (W8A16, fp8(64, 100), 9, "K is padded"),
    (W4A8, nvfp4(64, 128), 8192, "cuBLASLt takes rows"),
    (W8A8, fp8(64, 100), 9, "K is padded"),
]


def planned(monkeypatch, backend, w, m, dtype=torch.bfloat16):
    kernels = (w4_fake if w.op == "nvfp4_gemm" else w8_fake).install(monkeypatch)
    prepared = backend.prepare(w)
    activation = "bf16" if backend in (W4A16, W8A16) else "fp8"
    out_dtype = str(dtype).removeprefix("torch.")
    plan = backend.plan(Problem(w.op, m, w.n, w.k, activation, w.scaling, out_dtype=out_dtype), prepared)
    return kernels, plan, prepared


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("backend", "w", "m", "function"), EACH)
def test_the_kernel_takes_the_place_of_the_quantiser(monkeypatch, backend, w, m, function, dtype):
    kernels, plan, prepared = planned(monkeypatch, backend, w, m, dtype)
    launch = backend.swiglu(plan, prepared)
    bias = torch.randn(w.n)
    wide = torch.randn(m, 2 * w.k + 24).to(dtype)
    for x in (gate_up(m, k=w.k, dtype=dtype), wide[:, : 2 * w.k], wide[:, 3 : 3 + 2 * w.k]):
        for b in (None, bias, bias.to(dtype)):
            got, want = (torch.full((m, w.n), torch.nan, dtype=dtype) for _ in range(2))
            backend.run(plan, prepared, swiglu(x), want, b)
            gemm = kernels.launched[-1][0]
            kernels.launched.clear()
            launch(x, got, b)
            assert [name for name, *_ in kernels.launched] == [function, gemm]
            assert torch.equal(got, want)


@pytest.mark.parametrize(("backend", "w", "m", "why"), OTHERS)
def test_other_routes_have_no_such_launch(monkeypatch, backend, w, m, why):
    _, plan, prepared = planned(monkeypatch, backend, w, m)
    assert backend.swiglu(plan, prepared) is None, why
    assert not front._known


@pytest.mark.parametrize(
    ("capability", "backend", "w", "m"),
    [((7, 5), W4A16, nvfp4(64, 128), 1), ((8, 9), W4A8, nvfp4(64, 128), 9), ((10, 0), W8A8, fp8(64, 128), 9)],
)
def test_a_gpu_without_the_kernel_has_no_such_launch(monkeypatch, capability, backend, w, m):
    """Packed activations are for the GEMMs of sm_90 alone; no kernel is for sm_75."""
    _, plan, prepared = planned(monkeypatch, backend, w, m)
    for module in (compiled, launch_choice):
        monkeypatch.setattr(module, "gpu_of", lambda device: (Arch(*capability), 142))
    assert backend.swiglu(plan, prepared) is None
    assert not front._known


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_the_product_is_one_kernel_on_other_gpus_too(monkeypatch, capability):
    kernels, plan, prepared = planned(monkeypatch, W4A16, nvfp4(64, 128), 1)
    for module in (compiled, launch_choice):
        monkeypatch.setattr(module, "gpu_of", lambda device: (Arch(*capability), 142))
    x, got, want = gate_up(1, k=128), torch.empty(1, 64).bfloat16(), torch.empty(1, 64).bfloat16()
    W4A16.run(plan, prepared, swiglu(x), want)
    launch = W4A16.swiglu(plan, prepared)
    kernels.launched.clear()
    launch(x, got, None)
    assert torch.equal(got, want)
    assert kernels.launched[0] == ("swiglu_product", 1, 256)
    assert (front.ROWS, "any") in kernels.loaded


class Product:
    """``product`` on a machine that seems to have a GPU, with the kernel in torch; ``launched``: what ran of it."""

    def __init__(self, monkeypatch, capability=(8, 9), silu=F.silu):
        self.launched, self.loaded = [], []
        kernel = SimpleNamespace(module=swiglu_fake.module(self.launched, silu), pdl_allowed=True)
        monkeypatch.setattr(front.jit, "load", lambda *names: self.loaded.append(names) or kernel)
        monkeypatch.setattr(front, "_known", {})
        monkeypatch.setattr(front, "arch_of", lambda device: Arch(*capability))
        monkeypatch.setattr(front, "_readable", lambda x: x.dtype != torch.float32)
        pdl_fake.passes(monkeypatch)


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 64), (64,)])
def test_the_product_is_that_of_torch_by_one_kernel(monkeypatch, shape):
    made, x = Product(monkeypatch), torch.randn(shape).bfloat16()
    for _ in range(2):
        assert torch.equal(front.product(x), swiglu(x))
    assert made.launched == [("swiglu_product", x.numel() // 64, 64)] * 2
    assert made.loaded == [(front.ROWS, "any", Arch(8, 9))]
    wide = torch.randn(4, 70).bfloat16()
    for each in (wide[:, 3:67], wide[:, :64], wide[:2].t().contiguous().t()[:, :64]):
        assert torch.equal(front.product(each), swiglu(each))
    assert len(made.launched) == 5


@pytest.mark.parametrize(
    ("x", "capability"),
    [
        (torch.ones(3, 64), (8, 9)),  # f32
        (torch.ones(3, 40).bfloat16(), (8, 9)),  # K is no multiple of 16
        (torch.ones(3, 64).bfloat16().requires_grad_(), (8, 9)),
        (torch.ones(3, 64).bfloat16(), (7, 5)),
    ],
)
def test_the_product_of_others_is_torchs(monkeypatch, x, capability):
    made = Product(monkeypatch, capability)
    for _ in range(2):
        got = front.product(x)
        assert torch.equal(got, swiglu(x))
        assert got.requires_grad == x.requires_grad
    assert not made.loaded


def test_a_capture_does_not_load_the_product(monkeypatch):
    made, x = Product(monkeypatch), torch.randn(3, 64).bfloat16()
    with monkeypatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda: True)
        assert torch.equal(front.product(x), swiglu(x))
        assert not made.loaded
    front.product(x)
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    front.product(x)
    assert len(made.launched) == 2


def test_other_routes_take_the_product_of_one_kernel(monkeypatch):
    """Planned, on the fast path, and by the operator."""
    made, lin = Product(monkeypatch), layer()
    x = gate_up(3)
    want = lin(swiglu(x))
    bound = lin.bind()
    stored = [lin._buffers[name] for name in lin._state.names[torch.bfloat16][1]]
    for launches in (1, 2):
        assert torch.equal(lin.swiglu(x), want)
        assert len(made.launched) == launches
    assert torch.equal(ops.swiglu_linear(x, bound.tensors, stored, lin.bias, bound.spec.text), want)
    assert len(made.launched) == 3


def test_a_launch_gets_the_rows_that_its_backend_asks_for(monkeypatch):
    lin, x, shapes = layer(), gate_up(3), []
    want = lin(swiglu(x))
    reference = type(routes.choose.instance("reference"))

    def from_gate_up(self, plan, prepared):
        def launch(given, out, bias):
            shapes.append(tuple(out.shape))
            self.run(plan, prepared, swiglu(given), out[:3], bias)

        return launch

    monkeypatch.setattr(reference, "out_rows", lambda *_: 4)
    monkeypatch.setattr(reference, "swiglu", from_gate_up)
    bound = lin.bind()
    stored = [lin._buffers[name] for name in lin._state.names[torch.bfloat16][1]]
    got = [lin.swiglu(x), lin.swiglu(x), ops.swiglu_linear(x, bound.tensors, stored, lin.bias, bound.spec.text)]
    for y in got:
        assert torch.equal(y, want)
        assert y.untyped_storage().nbytes() == 4 * N * 2
    assert shapes == [(4, N)] * 3
    assert bound.gated[3].rows == 4


def test_a_product_with_other_bits_or_without_a_compiler_is_torchs(monkeypatch, caplog):
    made, x = Product(monkeypatch, silu=lambda gate: F.silu(gate) * 1.01), torch.randn(3, 64).bfloat16()
    for _ in range(2):
        assert torch.equal(front.product(x), swiglu(x))
    assert not made.launched
    assert "swiglu_rows on cpu gives other bits than torch" in caplog.text
    caplog.clear()
    monkeypatch.setattr(front, "_known", {})

    def without(*names):
        raise ToolchainError("no nvcc")

    monkeypatch.setattr(front.jit, "load", without)
    for _ in range(2):
        assert torch.equal(front.product(x), swiglu(x))
    assert [r.getMessage() for r in caplog.records] == [
        "the SwiGLU kernel swiglu_rows on cpu: no nvcc. silu(gate) * up runs as torch's operations"
    ]


def test_fp8_copies_have_it_too(monkeypatch):
    backend, w, kernels = w4a8_expanded.W4A8ExpandedBackend(), nvfp4(64, 128), w8_fake.install(monkeypatch)
    monkeypatch.setattr(w4a8_expanded, "_backend_for", lambda problem, device: w4a8_expanded._FP8["w8a8"])
    prepared = backend.prepare(w)
    plan = backend.plan(Problem("nvfp4_gemm", 9, 64, 128, "fp8"), prepared)
    got, want, x = torch.empty(9, 64).bfloat16(), torch.empty(9, 64).bfloat16(), gate_up(9, k=128)
    backend.run(plan, prepared, swiglu(x), want)
    kernels.launched.clear()
    backend.swiglu(plan, prepared)(x, got, None)
    assert [name for name, *_ in kernels.launched] == ["w8_swiglu_row", "w8a8_small"]
    assert torch.equal(got, want)


def test_the_kernel_is_there_wherever_they_run():
    catalog = installed()
    for kernel in ("w4a8_small", "w8a8_small", "w8_gemm_sm90"):
        assert catalog.kernel(front.PACKED).targets == catalog.kernel(kernel).targets
    assert catalog.kernel(front.ROWS).targets == catalog.kernel("fp8_quantize").targets


def rounded_once(gate):
    return F.silu(gate.float())


def wrong_for_one_gate(gate):
    return torch.where(gate == -1.5, F.silu(gate) * 1.01, F.silu(gate))


def without_the_sign_of_zero(gate):
    return F.silu(gate) + 0.0


@pytest.mark.parametrize("wrong", [rounded_once, wrong_for_one_gate, without_the_sign_of_zero])
def test_a_kernel_with_other_bits_than_torch_is_not_used(monkeypatch, caplog, wrong):
    kernels, plan, prepared = planned(monkeypatch, W4A8, nvfp4(64, 128), 9)
    kernels.swiglu = lambda: swiglu_fake.module(kernels.launched, wrong)
    assert W4A8.swiglu(plan, prepared) is None
    assert W4A8.swiglu(plan, prepared) is None
    assert [r.message for r in caplog.records if "other bits than torch" in r.message] == [caplog.records[-1].message]
    assert kernels.loaded.count((front.PACKED, "any")) == 1


def test_a_capture_does_not_load_it(monkeypatch):
    kernels, plan, prepared = planned(monkeypatch, W4A8, nvfp4(64, 128), 9)
    with monkeypatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda: True)
        with pytest.raises(CaptureError, match=r"loading the SwiGLU kernel.*\n.*warmup"):
            W4A8.swiglu(plan, prepared)
        assert (front.PACKED, "any") not in kernels.loaded
    assert W4A8.swiglu(plan, prepared) is not None
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    assert W4A8.swiglu(plan, prepared) is not None


def test_the_setting_and_the_proof_decide_about_pdl(monkeypatch):
    for allowed in (True, False):
        kernels = w4_fake.install(monkeypatch, pdl_allowed=allowed)
        found = front.front("w4_swiglu_row", SM90, torch.device("cpu"))
        assert found.pdl == allowed
        assert kernels.loaded == [(front.PACKED, "any")]


def test_a_layer_takes_the_route_of_each_m(monkeypatch):
    kernels = w4_fake.install(monkeypatch)
    with seems_to_be_here(monkeypatch):
        lin = layer(k=256, n=256)
        assert [r.backend for r in lin.bind().spec.routes] == ["w4a16", "w4a8"]
        for m in (1, 2, 100, 600):  # the last is not kept
            x = gate_up(m, k=256)
            want = lin(swiglu(x))
            for _ in range(2):
                kernels.launched.clear()
                assert torch.equal(lin.swiglu(x), want)
                names = [name.split()[0] for name, *_ in kernels.launched]
                assert names == (["swiglu_product", "w4a16_small"] if m <= 8 else ["w4_swiglu_row", "w4_gemm"])
        stored = [lin._buffers[name] for name in lin._state.names[torch.bfloat16][1]]
        bound = lin.bind()
        kernels.launched.clear()
        x = gate_up(100, k=256)
        by_operator = ops.swiglu_linear(x, bound.tensors, stored, lin.bias, bound.spec.text)
        assert kernels.launched[0][0] == "w4_swiglu_row"
        assert torch.equal(by_operator, lin(swiglu(x)))


def test_our_kernels_are_for_inference_too(monkeypatch):
    w4_fake.install(monkeypatch)
    with seems_to_be_here(monkeypatch):
        lin, x = layer(k=256, n=256), gate_up(100, k=256).requires_grad_()
        y = lin.swiglu(x)
        with pytest.raises(BackwardError):
            y.sum().backward()


def test_a_new_plan_gets_a_new_launch(monkeypatch):
    """``tune`` may find another build or launch shape."""
    w4_fake.install(monkeypatch)
    with seems_to_be_here(monkeypatch):
        lin = layer(k=256, n=256)
        bound = lin.bind()
        first = bound.swiglu(100, True)
        assert bound.swiglu(100, True) is first is not None
        for key, launch in list(bound.spec._launches.items()):
            bound.spec._launches[key] = launch._replace(plan=copy.copy(launch.plan))
        second = bound.swiglu(100, True)
        assert second is not first
        assert bound.swiglu(100, True) is second


def test_few_tokens_that_ran_before_go_to_the_fast_path(monkeypatch):
    """Where torch's operations run anyway: nothing is asked of the route. A new plan may have a launch."""
    w4_fake.install(monkeypatch)
    found = front.front
    monkeypatch.setattr(front, "front", lambda name, *a: None if name == front.PRODUCT else found(name, *a))
    with seems_to_be_here(monkeypatch):
        lin = layer(k=256, n=256)
        bound = lin.bind()
        for x in (gate_up(4, k=256), gate_up(2, 2, k=256)):
            want = lin.swiglu(x)
            assert bound.apart == {4}
            with monkeypatch.context() as patch:
                patch.setattr(type(lin), "bound_to", lambda self, dtype: pytest.fail("asked"))
                assert torch.equal(lin.swiglu(x), want)
        with pytest.raises(InputError, match="gate_up has shape"):
            lin.swiglu(gate_up(8, k=128))
        lin.swiglu(gate_up(100, k=256))
        assert bound.apart == {4}
        bound.plan_anew()
        assert bound.apart == set()


def test_launches_that_ran_before_are_on_the_fast_path_too(monkeypatch):
    """Only plain inputs of an unchanged layer; all others are looked at."""
    kernels = w4_fake.install(monkeypatch)
    asked = []
    with seems_to_be_here(monkeypatch):
        lin = layer(k=256, n=256)
        bound, real = lin.bind(), type(lin).bound_to
        monkeypatch.setattr(type(lin), "bound_to", lambda self, dtype: asked.append(dtype) or real(self, dtype))

        def run(x, *, fast):
            want = lin(swiglu(x))
            asked.clear()
            kernels.launched.clear()
            got = lin.swiglu(x)
            assert torch.equal(got, want)
            assert got.shape == want.shape
            assert kernels.launched[0][0] in ("swiglu_product", "w4_swiglu_row")
            assert bool(asked) != fast

        wide = torch.randn(4, 520).bfloat16()
        for m in (4, 100):
            run(gate_up(m, k=256), fast=False)
            run(gate_up(m, k=256), fast=True)
        run(gate_up(2, 2, k=256), fast=True)
        for x in (wide[:, :512], wide[:, 1:513], gate_up(600, k=256)):  # the last M is not kept
            run(x, fast=False)
            run(x, fast=False)
        assert set(bound.gated) == {4, 100}
        with torch.autocast("cpu", torch.float16):
            assert lin.swiglu(gate_up(4, k=256)).dtype == torch.float16
        monkeypatch.setattr(capture, "modes_open", 1)
        run(gate_up(4, k=256), fast=False)
        monkeypatch.setattr(capture, "modes_open", 0)
        run(gate_up(4, k=256), fast=True)
        lin.bias = nn.Parameter(torch.ones(256, dtype=torch.bfloat16), requires_grad=False)
        run(gate_up(4, k=256), fast=True)  # the call of the layer has taken it
        lin.bias = nn.Parameter(torch.zeros(256, dtype=torch.bfloat16), requires_grad=False)
        kernels.launched.clear()
        assert torch.equal(lin.swiglu(gate_up(4, k=256)), lin(swiglu(gate_up(4, k=256))))
        right = lin.bias
        lin.bias = nn.Parameter(torch.zeros(255, dtype=torch.bfloat16), requires_grad=False)
        with pytest.raises(InputError, match="bias"):
            lin.swiglu(gate_up(4, k=256))
        lin.bias = right
        lin.weight = lin.weight.bitwise_xor(0x11)  # other codes
        want = layer(k=256, n=256)
        want.load_state_dict(lin.state_dict())
        assert torch.equal(lin.swiglu(gate_up(4, k=256)), want(swiglu(gate_up(4, k=256))))
        with pytest.raises(InputError, match="gate_up has shape"):
            lin.swiglu(gate_up(8, k=128))
        bound = lin.bind()
        bound.plan_anew()
        assert not bound.gated


def test_what_a_capture_may_hold_is_kept(monkeypatch):
    """As after any other captured call: the layer keeps the weights that a graph may read."""
    w4_fake.install(monkeypatch)
    with seems_to_be_here(monkeypatch):
        lin = layer(k=256, n=256)
        bound = lin.bind()
        lin.swiglu(gate_up(100, k=256))
        assert not bound.captured
        bound.cuda = True
        monkeypatch.setattr(capture, "stream_is_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        ops.run_swiglu(gate_up(100, k=256), bound, lin.bias)
        assert bound.captured


def test_it_is_inside_the_range_of_its_layer(monkeypatch):
    _, plan, prepared = planned(monkeypatch, W4A8, nvfp4(64, 128), 9)
    found = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", found.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: found.append("/"))
    ranged = nvtx.Ranged(W4A8, plan.problem)
    launch = ranged.swiglu(plan, prepared)
    launch(gate_up(9, k=128), torch.empty(9, 64).bfloat16(), None)
    assert found == ["fp4dispatch nvfp4_gemm M=9 N=64 K=128 w4a8 (fp8)", "/"]
    _, plan, prepared = planned(monkeypatch, W8A16, fp8(64, 100), 9)
    assert nvtx.Ranged(W8A16, plan.problem).swiglu(plan, prepared) is None


# ------------------------------------------------------------------------------------------------------ fused models

transformers = pytest.importorskip("transformers", reason="transformers (extra `demo`) is not installed")
FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral")
in_models = pytest.mark.filterwarnings("ignore")


def model(name="Llama", fmt="nvfp4", fuse=True):
    torch.manual_seed(0)
    if name == "Gemma":
        made = transformers.GemmaForCausalLM(transformers.GemmaConfig(**tiny_models._text())).eval()
    else:
        made = tiny_models.build(name, transformers)
    fp4dispatch.replace_linears(made, fmt, fuse=fuse)
    return made


def mlp_of(made):
    return made.model.layers[0].mlp


@pytest.fixture
def given(monkeypatch):
    """Shapes that layers were given in place of a product."""
    found, real = [], FP4Linear.swiglu
    monkeypatch.setattr(FP4Linear, "swiglu", lambda self, x: found.append(tuple(x.shape)) or real(self, x))
    return found


@in_models
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_row", "fp8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_fused_model_gives_the_bits_it_gave_without(name, fmt):
    made = model(name, fmt)
    mlp = mlp_of(made)
    assert mlp.fused_downs == (("down_proj", "act_fn"),)
    with torch.no_grad():
        got = made(IDS).logits
        for other in made.model.layers:
            vars(other.mlp)["_fused_down"] = lambda down, act, x, rows: down(act(x[..., : rows[0]]) * x[..., rows[0] :])
        assert torch.equal(made(IDS).logits, got)


@in_models
@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_of_a_fused_mlp_has_one_operator_behind_the_projection(name):
    mlp = mlp_of(model(name))
    x = torch.randn(1, 5, mlp.gate_up_proj.in_features)
    with torch.no_grad():
        want = mlp(x)
    got, found = operators(mlp, x)
    assert torch.equal(got, want)
    assert found == ["fp4dispatch.linear_stored.default", "fp4dispatch.swiglu_linear.default"]


@in_models
def test_other_activations_stay_as_they_were(given):
    made, apart = model("Gemma"), model("Gemma", fuse=False)
    mlp, x = mlp_of(made), torch.randn(1, 5, 64)
    with torch.no_grad():
        assert torch.equal(mlp(x), mlp_of(apart)(x))
    _, found = operators(mlp, x)
    assert found.count("fp4dispatch.linear_stored.default") == 2
    assert "fp4dispatch.swiglu_linear.default" not in found
    assert given == []


class Scaled(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x) * 2


class OwnSiLU(nn.SiLU):
    def forward(self, x):
        return super().forward(x) * 2


def _forward_hook(mlp):
    mlp.down_proj.register_forward_hook(lambda module, args, out: out + 1)


def _pre_hook(mlp):
    mlp.down_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _hook_of_act(mlp):
    mlp.act_fn.register_forward_hook(lambda module, args, out: out * 2)


def _wrapped(mlp):
    forward = mlp.down_proj.forward
    mlp.down_proj.forward = lambda x: forward(x) + 1


def _wrapped_act(mlp):
    mlp.act_fn.forward = lambda x: x


def _other_act(mlp):
    mlp.act_fn = nn.GELU()


def _subclass_of_act(mlp):
    mlp.act_fn = OwnSiLU()


def _around_act(mlp):
    mlp.act_fn = Scaled(mlp.act_fn)


def _dense(mlp):
    mlp.down_proj = nn.Linear(mlp.down_proj.in_features, mlp.down_proj.out_features)


def _around_down(mlp):
    mlp.down_proj = nn.Sequential(mlp.down_proj, nn.Tanh())


def _backward_hook(mlp):
    mlp.down_proj.register_full_backward_hook(lambda *_: None)


CHANGES = (
    *(_forward_hook, _pre_hook, _hook_of_act, _wrapped, _wrapped_act, _other_act, _subclass_of_act),
    *(_around_act, _dense, _around_down, _backward_hook),
)


@in_models
@pytest.mark.parametrize("before", [True, False], ids=["before it is fused", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_call_would_run_still_runs(change, before, given):
    made = model(fuse=False)
    mlp = mlp_of(made)
    x = torch.randn(1, 5, mlp.gate_proj.in_features)
    if before:
        change(mlp)
    assert fp4dispatch.fuse(mlp).fused
    if not before:
        change(mlp)
    with torch.no_grad():
        gate, up = mlp.gate_up_proj(x).split(mlp._fused_rows["gate_up_proj"], -1)
        want = mlp.down_proj(mlp.act_fn(gate) * up)
        assert torch.equal(mlp(x), want)
    assert given == []


@in_models
def test_hooks_of_all_modules_run(given):
    mlp = mlp_of(model())
    x, seen = torch.randn(1, 5, mlp.gate_up_proj.in_features), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module)))
    try:
        with torch.no_grad():
            mlp(x)
    finally:
        handle.remove()
    assert seen[:3] == [FP4Linear, type(mlp.act_fn), FP4Linear]
    assert given == []
    with torch.no_grad():
        mlp(x)
    assert len(given) == 1


@in_models
def test_a_hook_that_is_gone_costs_nothing(given):
    mlp = mlp_of(model())
    x = torch.randn(1, 5, mlp.gate_up_proj.in_features)
    with torch.no_grad():
        want = mlp(x)
        handle = mlp.down_proj.register_forward_hook(lambda module, args, out: out + 1)
        assert torch.equal(mlp(x), want + 1)
        handle.remove()
        assert torch.equal(mlp(x), want)
    assert len(given) == 2


@in_models
def test_a_compiled_model_sees_a_module_that_was_replaced():
    torch._dynamo.reset()
    mlp = mlp_of(model())
    x = torch.randn(1, 5, mlp.gate_up_proj.in_features)
    compiled = torch.compile(mlp, fullgraph=True, backend="eager")
    with torch.inference_mode():
        assert torch.equal(compiled(x), mlp(x))
        before = mlp(x)
        mlp.act_fn = nn.GELU()
        assert torch.equal(compiled(x), mlp(x))
        assert not torch.equal(mlp(x), before)


@in_models
@pytest.mark.parametrize("act", [nn.SiLU(), nn.SiLU(inplace=True), F.silu], ids=["module", "in place", "function"])
def test_other_spellings_of_silu(act, given):
    mlp = mlp_of(model())
    x = torch.randn(1, 5, mlp.gate_up_proj.in_features)
    with torch.no_grad():
        want = mlp(x)
        if isinstance(act, nn.Module):
            mlp.act_fn = act
        else:
            del mlp.act_fn
            mlp.act_fn = act
        assert torch.equal(mlp(x), want)
    assert len(given) == 2


@in_models
def test_copies_and_pickles_have_it(given):
    made = model()
    x = torch.randn(1, 5, mlp_of(made).gate_up_proj.in_features)
    with torch.no_grad():
        want = mlp_of(made)(x)
        for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert mlp_of(other).fused_downs == (("down_proj", "act_fn"),)
            assert torch.equal(mlp_of(other)(x), want)
    assert len(given) == 3


class Toy(nn.Module):
    """An MLP whose ``forward`` says it another way."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(K, 64), nn.Linear(K, 64), nn.Linear(64, K)
        self.act_fn = nn.SiLU()


class OtherOrder(Toy):
    def forward(self, x):
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x)))


class UpActivated(Toy):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class Sum(Toy):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))


class MoreToDo(Toy):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)


class AroundTheGate(Toy):
    def forward(self, x):
        return self.down_proj(self.act_fn(torch.tanh(self.gate_proj(x))) * self.up_proj(x))


class AroundUp(Toy):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).abs())


class GateByAFunction(Toy):
    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


class Names(Toy):
    def forward(self, x):
        gate, up = self.act_fn(self.gate_proj(x)), self.up_proj(x)
        return self.down_proj(gate * up)


class OfAFunction(Toy):
    def forward(self, x):
        return torch.tanh(F.silu(self.gate_proj(x)) * self.up_proj(x))


OTHER_EXPRESSIONS = (
    *(OtherOrder, UpActivated, Sum, MoreToDo, AroundTheGate, AroundUp, GateByAFunction, Names, OfAFunction),
)


@pytest.mark.parametrize("cls", OTHER_EXPRESSIONS)
def test_other_expressions_stay_as_they_were(cls, given):
    torch.manual_seed(0)
    made = cls()
    fp4dispatch.replace_linears(made, "nvfp4")
    x = torch.randn(5, K)
    with torch.no_grad():
        want = made(x)
        assert fp4dispatch.fuse(made).fused
        assert made.fused_downs == ()
        torch.testing.assert_close(made(x), want, rtol=1e-4, atol=1e-5)
    assert given == []


class Usual(Toy):
    def forward(self, x):
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y if x.ndim > 1 else y + 1


def test_the_usual_expression_is_found_in_any_class(given):
    torch.manual_seed(0)
    made = Usual()
    fp4dispatch.replace_linears(made, "nvfp4")
    x = torch.randn(5, K)
    with torch.no_grad():
        want = made(x)
        assert fp4dispatch.fuse(made).fused
        torch.testing.assert_close(made(x), want, rtol=1e-4, atol=1e-5)
    assert given == [(5, 128)]


@in_models
def test_warmup_loads_the_kernel_of_fused_mlps(monkeypatch):
    kernels = w4_fake.install(monkeypatch)
    with seems_to_be_here(monkeypatch):
        sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(**{**tiny_models._text(), **sizes})
        torch.manual_seed(0)
        made = transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16)
        fp4dispatch.replace_linears(made.model, "nvfp4")
        warmup(made, tokens=[100])
        assert (front.PACKED, "any") not in kernels.loaded
        fp4dispatch.fuse(made)
        pairs = warmup(made, tokens=[4, 100])
        assert pairs == 4  # two shapes: of o_proj and down_proj one, of which only the second is given gate_up
        assert kernels.loaded.count((front.PACKED, "any")) == 1
        swiglus = [found for found in kernels.launched if found[0] == "w4_swiglu_row"]
        assert swiglus == [("w4_swiglu_row", 100, 512)]
        monkeypatch.setattr(capture, "is_capturing", lambda: True)
        x = torch.randn(1, 100, 128).bfloat16()
        with torch.no_grad():
            mlp_of(made)(x)
        assert kernels.launched[-2][0] == "w4_swiglu_row"


@in_models
def test_warmup_does_not_load_it_for_other_activations(monkeypatch):
    kernels = w4_fake.install(monkeypatch)
    with seems_to_be_here(monkeypatch):
        made = model()
        made.to(torch.bfloat16)
        for each in made.model.layers:
            each.mlp.act_fn = nn.GELU()
        warmup(made, tokens=[100])
        assert any(name == "w4_quantize_row" for name, *_ in kernels.launched)
        assert (front.PACKED, "any") not in kernels.loaded


@in_models
@pytest.mark.parametrize(("act", "wanted"), [(nn.SiLU, True), (nn.GELU, False)])
def test_fuse_and_warmup_compile_it_with_the_others(monkeypatch, act, wanted):
    asked = []
    monkeypatch.setattr(prebuild, "together", lambda asks: asked.append([a for a in asks if a.gated]))
    made = model(fuse=False)
    for each in made.model.layers:
        each.mlp.act_fn = act()
    fp4dispatch.fuse(made)
    warmup(made, tokens=[3])
    down = mlp_of(made).down_proj
    (by_fuse, by_warmup) = [found for found in asked if found] or ([], [])
    for found in (by_fuse, by_warmup):
        assert [(a.problem.n, a.problem.k) for a in found] == [(down.out_features, down.in_features)] * 2 * wanted


def test_the_names_of_hooks_are_those_of_torch():
    """A hook of a kind that is not asked about would be skipped."""
    kinds = {name for name in vars(nn.Module()) if name.endswith("hooks") and "state_dict" not in name}
    module = SimpleNamespace(**{name: {} for name in kinds}, _compiled_call_impl=None)
    assert parents._is_called_plainly(module)
    for name in kinds - {"_non_full_backward_hooks"}:
        changed = SimpleNamespace(**(vars(module) | {name: {1: print}}))
        assert not parents._is_called_plainly(changed), name
