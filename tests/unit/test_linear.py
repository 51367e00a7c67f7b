"""FP4Linear and FP8Linear: numbers, shapes, moves, state, pickling, compile."""

import copy
import dataclasses
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import fp4dispatch
from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.errors import BackendUnsupportedError, BackwardError, FormatError, InputError
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.run import routes

K, N = 128, 96
KINDS = ("nvfp4", "tensor", "row", "block128")


def plain(k=K, n=N, bias=True, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(k, n, bias=bias).to(dtype)


def make(kind, linear=None, **kwargs):
    linear = plain() if linear is None else linear
    if kind == "nvfp4":
        return FP4Linear.from_linear(linear, **kwargs)
    return FP8Linear.from_linear(linear, scaling=kind, **kwargs)


def exact(layer, x):
    w = layer.weights()
    if w.scaling == "nvfp4":
        gs = formats.expand_shards(w.global_scale, w.shard_rows)
        weight = formats.nvfp4_dequantize(w.weight, w.scale, gs)
    else:
        weight = formats.fp8_dequantize(w.weight, w.scale, w.scaling)
    y = x.double() @ weight.double().t()
    return y if layer.bias is None else y + layer.bias.double()


def near(y, want, dtype):
    eps = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), want, rtol=eps, atol=eps * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_weight_only_result_is_the_dequantised_product(kind, bias, dtype):
    layer = make(kind, plain(bias=bias, dtype=dtype))
    x = torch.randn(5, K, dtype=dtype)
    near(layer(x), exact(layer, x), dtype)


@pytest.mark.parametrize("shape", [(K,), (3, K), (2, 3, K), (2, 1, 4, K), (0, K), (3, 0, K)])
def test_any_leading_dimensions(shape):
    layer = make("nvfp4")
    x = torch.randn(shape, dtype=torch.bfloat16)
    y = layer(x)
    assert y.shape == (*shape[:-1], N)
    if x.numel():
        assert torch.equal(y.reshape(-1, N), layer(x.reshape(-1, K)))


def test_empty_input_launches_nothing(monkeypatch):
    layer = make("nvfp4")
    monkeypatch.setattr(routes, "launch", lambda *args: pytest.fail("launched"))
    assert layer(torch.empty(0, K, dtype=torch.bfloat16)).shape == (0, N)
    with torch.no_grad():
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        assert compiled(torch.empty(0, K, dtype=torch.bfloat16)).shape == (0, N)


def test_any_strides():
    layer = make("row")
    x = torch.randn(K, 6, dtype=torch.bfloat16).t()
    assert not x.is_contiguous()
    assert torch.equal(layer(x), layer(x.contiguous()))


@pytest.mark.parametrize(
    ("x", "says"),
    [
        (torch.zeros(2, K + 16, dtype=torch.bfloat16), "the layer's in_features"),
        (torch.zeros(2, K, dtype=torch.int32), "int32"),
        (torch.zeros(2, K, dtype=torch.float64), "float64"),
        (torch.zeros((), dtype=torch.bfloat16), "in_features"),
        (torch.zeros(2, K, dtype=torch.bfloat16, device="meta"), "meta"),
    ],
)
def test_bad_input_is_refused_before_any_launch(monkeypatch, x, says):
    layer = make("nvfp4")
    monkeypatch.setattr(routes, "launch", lambda *args: pytest.fail("launched"))
    with pytest.raises(InputError, match=says):
        layer(x)


def test_autocast_decides_the_output_dtype():
    layer = make("nvfp4", plain(dtype=torch.float32))
    x = torch.randn(2, K)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32


def test_fused_shards_keep_their_own_global_scales():
    parts = [plain(n=n, seed=n, bias=False) for n in (64, 32, 16)]
    with torch.no_grad():
        parts[1].weight.mul_(1000)
        parts[2].weight.mul_(0.001)
    singles = [FP4Linear.from_linear(p) for p in parts]
    fused = FP4Linear.from_weights(
        LinearWeights(
            "nvfp4_gemm",
            "nvfp4",
            112,
            K,
            torch.cat([s.weight for s in singles]),
            torch.cat([s.weight_scale.view(torch.uint8) for s in singles]).view(torch.float8_e4m3fn),
            torch.stack([s.weight_scale_2 for s in singles]),
            (64, 32, 16),
        )
    )
    assert len(set(fused.weight_scale_2.tolist())) == 3
    x = torch.randn(4, K, dtype=torch.bfloat16)
    assert torch.equal(fused(x), torch.cat([s(x) for s in singles], dim=-1))
    for activation in ("nvfp4", "fp8"):
        pinned = [FP4Linear.from_weights(s.weights(), activation=activation) for s in (*singles, fused)]
        assert torch.equal(pinned[-1](x), torch.cat([s(x) for s in pinned[:-1]], dim=-1))


def test_activation_pins_the_format():
    x = torch.randn(64, K, dtype=torch.bfloat16)
    errors = []
    for activation in ("bf16", "fp8", "nvfp4"):
        layer = make("nvfp4", activation=activation)
        assert f"({activation})" in repr(layer)
        want = exact(layer, x)
        errors.append(float((layer(x).double() - want).norm() / want.norm()))
    assert errors[0] < 0.003 < 0.01 < errors[1] < 0.045 < 0.06 < errors[2] < 0.15
    with pytest.raises(InputError, match="nvfp4"):
        make("tensor", activation="nvfp4")


def test_static_input_scale_is_used_and_saved():
    layer = make("tensor", activation="fp8")
    static = FP8Linear.from_weights(
        LinearWeights("fp8_gemm", "tensor", N, K, layer.weight, layer.weight_scale, input_scale=torch.tensor(0.001)),
        layer.bias,
        activation="fp8",
    )
    x = torch.randn(4, K, dtype=torch.bfloat16)
    q = formats.fp8_quantize(x, "tensor", torch.tensor(0.001))  # saturates at 0.448
    near(static(x), exact(static, formats.fp8_dequantize(*q, "tensor")), torch.bfloat16)
    assert not torch.allclose(static(x), layer(x), rtol=0.1)
    assert "input_scale" in static.state_dict()
    assert "input_scale" not in layer.state_dict()


# --------------------------------------------------------------------------------------------------------------- state


STATE = {
    "nvfp4": {"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32},
    "tensor": {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
    "row": {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
    "block128": {"weight": torch.float8_e4m3fn, "weight_scale_inv": torch.float32},
}


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_is_canonical_and_round_trips(kind):
    layer = make(kind)
    state = layer.state_dict()
    assert {k: v.dtype for k, v in state.items()} == STATE[kind] | {"bias": torch.bfloat16}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = make(kind, plain(seed=7))
    x = torch.randn(3, K, dtype=torch.bfloat16)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("kind", KINDS)
def test_meta_construction_then_load(kind):
    source = make(kind)
    cls, extra = (FP4Linear, {}) if kind == "nvfp4" else (FP8Linear, {"scaling": kind})
    layer = cls(K, N, device="meta", **extra)
    assert all(t.is_meta for t in layer.state_dict().values())
    assert "not chosen yet" in repr(layer)
    with pytest.raises(InputError, match="meta"):
        layer(torch.zeros(1, K, dtype=torch.bfloat16))
    layer.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(3, K, dtype=torch.bfloat16)
    assert torch.equal(layer(x), source(x))
    empty = cls(K, N, device="meta", **extra).to_empty(device="cpu")
    empty.load_state_dict(source.state_dict())
    assert torch.equal(empty(x), source(x))


def test_load_refuses_other_dtypes_and_nan_scales():
    layer, x = make("nvfp4"), torch.randn(2, K, dtype=torch.bfloat16)
    before = layer(x)
    state = layer.state_dict()
    with pytest.raises(RuntimeError, match=r"weight_scale is torch.float32, needs torch.float8_e4m3fn"):
        layer.load_state_dict(state | {"weight_scale": state["weight_scale"].float()})
    assert torch.equal(layer(x), before)
    bad = state["weight_scale"].clone()
    bad.view(torch.uint8)[3, 2] = 0x7F
    with pytest.raises(FormatError, match="1 NaN"):
        layer.load_state_dict(state | {"weight_scale": bad})


def test_load_takes_an_input_scale_and_modelopts_shapes():
    layer = make("row")
    state = layer.state_dict()
    state["weight_scale"] = state["weight_scale"].reshape(N, 1)
    state["input_scale"] = torch.tensor(0.02)
    layer.load_state_dict(state)
    assert layer.weight_scale.shape == (N,)
    assert float(layer.input_scale) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scale": torch.full((N, K // 16), float("nan")).to(torch.float8_e4m3fn)}, "NaN"),
        ({"global_scale": torch.tensor([-1.0])}, "not finite and positive"),
        ({"global_scale": torch.tensor([float("inf")])}, "not finite and positive"),
        ({"global_scale": torch.tensor([1.0], dtype=torch.bfloat16)}, "bfloat16"),
        ({"global_scale": torch.ones(2), "shard_rows": (N // 2, N // 4)}, "do not add up"),
        ({"global_scale": None}, "global_scale"),
        ({"weight": torch.zeros(N, K // 2 - 8, dtype=torch.uint8)}, "weight is"),
        ({"weight": torch.zeros(N, K // 2)}, "float32"),
        ({"scale": torch.zeros(N, K // 16)}, "block scales are torch.float32"),
        ({"input_scale": torch.tensor(float("nan"))}, "input_scale is nan"),
        ({"input_scale": torch.tensor(1.0, dtype=torch.float16)}, "float16"),
        ({"k": 120}, "multiple of 16"),
    ],
)
def test_broken_weights_are_refused_at_construction(change, says):
    import dataclasses

    weights = dataclasses.replace(make("nvfp4").weights(), **change)
    with pytest.raises(InputError, match=says):
        FP4Linear.from_weights(weights)


def test_nan_weights_and_wrong_bias_are_refused():
    linear = plain()
    with torch.no_grad():
        linear.weight[3, 5] = float("nan")
    for kind in KINDS:
        with pytest.raises(FormatError, match="NaN"):
            make(kind, linear)
    with pytest.raises(InputError, match="bias"):
        FP4Linear.from_weights(make("nvfp4").weights(), torch.zeros(N + 1))


# ------------------------------------------------------------------------------------------ moves, copies, memory, text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.float, lambda m: m.to(torch.bfloat16)])
def test_casting_a_model_leaves_quantised_tensors_alone(kind, cast):
    layer = make(kind)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    model = cast(nn.Sequential(layer, nn.LayerNorm(N)))
    for name, tensor in model[0].state_dict().items():
        if name == "bias":
            assert tensor.dtype == model[1].weight.dtype == model[0].dtype
        else:
            assert tensor.dtype == before[name].dtype
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), before[name].reshape(-1).view(torch.uint8))
    x = torch.randn(2, K, dtype=model[1].weight.dtype)
    near(model[0](x), exact(model[0], x), x.dtype)


def test_module_type_and_moves_keep_scales_too():
    layer = make("nvfp4").type(torch.float16)
    assert (layer.weight.dtype, layer.weight_scale_2.dtype) == (torch.uint8, torch.float32)
    assert layer.to("meta").weight.is_meta
    assert layer.weight_scale_2.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "copier",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: _torch_save(m)],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_whole_and_their_own(kind, copier):
    layer = make(kind)
    x = torch.randn(2, K, dtype=torch.bfloat16)
    want = layer(x)
    other = copier(layer)
    assert torch.equal(other(x), want)
    assert other.nbytes() == layer.nbytes()
    other.weight.zero_()
    assert torch.equal(layer(x), want)
    assert not torch.equal(other(x), want)
    assert repr(other) == repr(layer)


def _torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_bytes_are_not_held_twice():
    layer = make("nvfp4", plain(1024, 512, bias=False))
    layer(torch.zeros(1, 1024, dtype=torch.bfloat16))
    assert layer.nbytes() == 512 * 1024 // 2 + 512 * 1024 // 16 + 4
    names = {name for name, _ in layer.named_buffers(remove_duplicate=False)}
    assert not {"layout1", "layout2"} & names  # only the [1] view of the [] global scale is a layout of its own
    held = {t.untyped_storage().data_ptr() for t in layer.buffers()}
    assert len(held) == 3


def test_repr_names_format_and_backend():
    layer = make("nvfp4")
    assert repr(layer) == (
        "FP4Linear(in_features=128, out_features=96, bias=True, nvfp4, activation=any, backend=reference (bf16))"
    )
    assert "fp8 block128" in repr(make("block128"))


def test_a_named_backend_is_honoured_or_refused():
    x = torch.zeros(1, K, dtype=torch.bfloat16)
    assert make("nvfp4", backend="reference")(x).shape == (1, N)
    layer = make("tensor", backend="cublaslt", name="mlp.up")
    assert "not chosen yet" in repr(layer)
    with pytest.raises(BackendUnsupportedError, match=r'layer "mlp.up"'):
        layer(x)


# ------------------------------------------------------------------------------------------------- autograd and compile


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_raises_and_is_never_silent(compiled):
    layer = make("nvfp4")
    fn = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = torch.randn(2, K, dtype=torch.bfloat16, requires_grad=True)
    y = fn(x)
    assert y.requires_grad
    with pytest.raises(BackwardError, match="inference"):
        y.sum().backward()
    with torch.no_grad():
        assert torch.equal(layer(x), y)


def counted(backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    return CompileCounterWithBackend(backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_identical_layers_and_every_m_share_one_graph(kind, backend):
    counter = counted(backend)
    layers = [make(kind, plain(seed=i)) for i in range(4)]
    with torch.no_grad():
        for layer in layers:
            fn = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
            for m in (2, 3, 17, 64):
                x = torch.randn(m, K, dtype=torch.bfloat16)
                assert torch.equal(fn(x), layer(x))
    assert counter.frame_count == 1


def test_layers_that_differ_only_in_how_they_run_do_not_share_a_graph():
    counter = counted("eager")
    x = torch.randn(64, K, dtype=torch.bfloat16)
    with torch.no_grad():
        for activation in ("bf16", "nvfp4", "fp8"):
            layer = make("nvfp4", activation=activation)
            assert torch.equal(torch.compile(layer, backend=counter, fullgraph=True)(x), layer(x))
    assert counter.frame_count == 3


def test_a_layer_that_was_never_called_is_bound_while_tracing():
    layer = make("nvfp4")
    layer._forget()
    x = torch.randn(4, K, dtype=torch.bfloat16)
    with torch.no_grad():
        y = torch.compile(layer, backend=counted("eager"), fullgraph=True)(x)
    assert torch.equal(y, layer(x))


@pytest.mark.slow
def test_inductor_runs_a_block_of_layers():
    pytest.importorskip("torch._inductor")
    import shutil

    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("inductor needs a C++ compiler: no g++ or clang++ on PATH")
    torch._dynamo.reset()
    model = nn.Sequential(make("nvfp4", plain(K, K)), nn.GELU(), make("row", plain(K, K)))
    x = torch.randn(5, K, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True)(x), model(x), rtol=0.02, atol=0.02)


def test_export_keeps_the_operator():
    layer = make("nvfp4")
    program = torch.export.export(layer, (torch.randn(2, K, dtype=torch.bfloat16),))
    assert any("fp4dispatch.linear" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("cls", [FP4Linear, FP8Linear])
@pytest.mark.parametrize("name", ["__init__", "from_linear", "from_weights"])
def test_constructors_say_every_argument(cls, name):
    parameters = inspect.signature(getattr(cls, name)).parameters
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    assert {"activation", "backend", "dtype", "name"} <= set(parameters)


@pytest.mark.parametrize("cls", [FP4Linear, FP8Linear])
def test_constructors_hand_every_argument_on(cls):
    linear = torch.nn.Linear(32, 16)
    given = {"activation": "bf16", "backend": "reference", "dtype": torch.float16, "name": "mine"}
    first = cls.from_linear(linear, **given)
    for layer in (first, cls.from_weights(first.weights(), linear.bias, **given), cls(32, 16, **given)):
        assert {key: getattr(layer, key) for key in given} == given
    assert cls.from_linear(linear.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [(8, 24), (32,), ()])
def test_weights_of_other_shards_are_refused(rows):
    w = FP4Linear.from_linear(nn.Linear(64, 32, dtype=torch.bfloat16)).weights()
    scales = torch.full((max(1, len(rows)),), float(w.global_scale))
    layer = FP4Linear(64, 32, False, shard_rows=(16, 16))
    with pytest.raises(InputError, match="each shard has a global scale"):
        layer.fill(dataclasses.replace(w, global_scale=scales, shard_rows=rows))


@pytest.mark.parametrize(("scaling", "scale", "says"), [
    ("tensor", torch.ones(2), "need one element"), ("row", torch.ones(1), "need 32, one for each row"),
])  # fmt: skip
def test_scales_of_another_size_are_refused(scaling, scale, says):
    w = FP8Linear.from_linear(nn.Linear(64, 32, dtype=torch.bfloat16), scaling=scaling).weights()
    with pytest.raises(InputError, match=says):
        FP8Linear.from_weights(dataclasses.replace(w, scale=scale))


@pytest.mark.parametrize("shape", [(64,), (2, 32, 64), (0, 64), (32, 0)])
@pytest.mark.parametrize("kind", [FP4Linear, FP8Linear])
def test_a_weight_that_is_no_matrix_is_refused(kind, shape):
    linear = nn.Linear(64, 32, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
    with pytest.raises(InputError, match=r"need \[N, K\], both at least 1"):
        kind.from_linear(linear)


@pytest.mark.parametrize("kind", [FP4Linear, FP8Linear])
def test_a_bias_that_asks_for_a_gradient_is_refused_one(kind):
    layer, x = kind.from_linear(nn.Linear(64, 32, dtype=torch.bfloat16)), torch.randn(2, 64).bfloat16()
    layer(x)
    layer.bias.requires_grad_(True)
    with pytest.raises(BackwardError):
        layer(x).sum().backward()


def test_an_input_without_dimensions_is_refused_after_a_call_too():
    layer = FP8Linear.from_linear(nn.Linear(1, 8, dtype=torch.bfloat16))
    layer(torch.ones(1, 1, dtype=torch.bfloat16))
    with pytest.raises(InputError, match=r"shape \[\]"):
        layer(torch.ones((), dtype=torch.bfloat16))


def test_an_unknown_layout_of_scales_is_refused():
    w = FP4Linear.from_linear(nn.Linear(64, 32, dtype=torch.bfloat16)).weights()
    with pytest.raises(InputError, match="sf_layout='foo'; use"):
        FP4Linear.from_weights(dataclasses.replace(w, sf_layout="foo"))


@pytest.mark.parametrize("function", [fp4dispatch.compact, fp4dispatch.refresh])
def test_what_is_no_model_is_refused(function):
    with pytest.raises(InputError, match="model is a NoneType; need a"):
        function(None)
