"""Projections that are one layer: the results, states and files of the separate ones, for models of Transformers."""

from __future__ import annotations

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fp4dispatch
from fp4dispatch.checkpoints.parts import parts_for
from fp4dispatch.checkpoints.plan import Plan
from fp4dispatch.errors import CaptureError, InputError
from fp4dispatch.integrations.tensor_parallel import whole_model
from fp4dispatch.machine import capture
from fp4dispatch.machine.collectives import Team
from fp4dispatch.models.fusing import fuse as fusing
from fp4dispatch.models.fusing.parents import FusedProjections
from fp4dispatch.models.parallel.plan import Column, TensorParallel
from fp4dispatch.models.projections import FUSED
from tests import breakable, tiny_models, w4_fake
from tests.graph_fake import FakeTape
from tests.hopper import seems_to_be_here
from tests.tiny_models import logits

transformers = pytest.importorskip("transformers", reason="transformers (extra `demo`) is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
IDS = torch.arange(1, 17).view(1, 16)
TWO_RANKS = Team(group=None, name="", rank=0, size=2)
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def _gemma(name):
    return lambda: getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**tiny_models._text())
    )


def model(name="Llama", fmt="nvfp4", fuse=False, seed=0, **options):
    torch.manual_seed(seed)
    made = _gemma(name)().eval() if name in ("Gemma", "Gemma2") else tiny_models.build(name, transformers)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # biases start as zeros
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
            elif seed:
                parameter.normal_(0, 0.1, generator=generator)
    fp4dispatch.replace_linears(made, fmt, fuse=fuse, **options)
    return made


def raw(tensor):
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)


def assert_same(a, b):
    assert set(a) == set(b)
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(raw(a[name]), raw(b[name])), name


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def fused_layers(made):
    return {name: m for name, m in made.named_modules() if name.rpartition(".")[2] in FUSED}


# --------------------------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        *((name, "nvfp4") for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Gemma-3 text")),
        *((name, fmt) for name in ("Llama", "Qwen2") for fmt in ("fp8", "fp8_row")),
    ],
)
def test_the_model_computes_generates_and_stores_what_it_did(name, fmt):
    apart, fused = model(name, fmt), model(name, fmt, fuse=True)
    layers = fused_layers(fused)
    assert len(layers) == 4
    assert not any(m.rpartition(".")[2] in (*QKV, *GATE_UP) for m, _ in fused.named_modules())
    assert (layers["model.layers.0.self_attn.qkv_proj"].bias is not None) == (name == "Qwen2")
    close(logits(fused), logits(apart))
    for ids in (IDS[:, :5], IDS[:, 3:4], IDS.view(2, 8)):  # other inputs, one after the other
        with torch.no_grad():
            close(fused(ids).logits, apart(ids).logits)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(fused.generate(IDS[:, :6], **options), apart.generate(IDS[:, :6], **options))
    assert_same(fused.state_dict(), apart.state_dict())
    assert fp4dispatch.report(fused).model_bytes <= fp4dispatch.report(apart).model_bytes


def test_blocks_of_fp8_fuse_where_each_layer_has_its_own():
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**{**tiny_models._text(), **sizes})
    apart = transformers.LlamaForCausalLM(config).eval()
    fused = copy.deepcopy(apart)
    fp4dispatch.replace_linears(apart, "fp8_block")
    fp4dispatch.replace_linears(fused, "fp8_block", fuse=True)
    assert len(fused_layers(fused)) == 2
    close(logits(fused), logits(apart))
    assert_same(fused.state_dict(), apart.state_dict())
    small = fp4dispatch.replace_linears(tiny_models.build("Llama", transformers), "fp8_block", fuse=True)
    assert len(small.fusing.left) == 4
    assert "blocks of 128 rows, and shards of [96, 96] rows would share one" in str(small)


@pytest.mark.parametrize("name", ["Phi-3", "BERT", "T5", "DeepSeek-V3", "Gemma-3", "OPT", "Mixtral"])
def test_other_models_stay_right(name):
    apart, fused = model(name), model(name, fuse=True)
    close(logits(fused), logits(apart))
    assert_same(fused.state_dict(), apart.state_dict())
    if name == "Phi-3":
        assert str(fp4dispatch.fuse(fused)) == "nothing to fuse"


def with_own_scales(apart, spread=(1.0, 3.0, 0.2)):
    """Quantise each layer by itself: layers that engines fuse have different global scales then."""
    with torch.no_grad():
        for name, parameter in apart.named_parameters():
            for group in (QKV, GATE_UP):
                for shard, factor in zip(group, spread, strict=False):
                    if f"{shard}.weight" in name:
                        parameter.mul_(factor)
    for shard in (*QKV, *GATE_UP, "o_proj", "down_proj"):
        fp4dispatch.replace_linears(apart, "nvfp4", include=f"*.{shard}")
    return apart


def test_global_scales_that_differ_stay_those_of_their_shards(tmp_path):
    apart = with_own_scales(tiny_models.build("Llama", transformers))
    scales = [getattr(apart.model.layers[0].self_attn, shard).weight_scale_2 for shard in QKV]
    assert len({float(scale) for scale in scales}) == 3
    fused = copy.deepcopy(apart)
    report = fp4dispatch.fuse(fused)
    assert len(report.fused) == 4
    layer = fused.model.layers[0].self_attn.qkv_proj
    assert torch.equal(layer.weight_scale_2, torch.stack(scales))
    assert layer.shard_rows == (64, 32, 32)
    close(logits(fused), logits(apart))
    assert_same(fused.state_dict(), apart.state_dict())
    fp4dispatch.save_quantized(fused, tmp_path / "saved", "modelopt")
    again = tiny_models.build("Llama", transformers)
    loaded = fp4dispatch.load_quantized(again, tmp_path / "saved", fuse=True)
    assert len(loaded.fusing.fused) == 4
    assert_same(again.state_dict(), apart.state_dict())
    one = model(fuse=True)  # its layers have one scale each
    assert one.model.layers[0].self_attn.qkv_proj.shard_rows == ()
    with pytest.raises(RuntimeError, match=r"has one global scale, and these are .*load the state, then fuse"):
        one.load_state_dict(apart.state_dict())


# ---------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.parametrize(
    ("name", "backend"), [("Llama", "eager"), ("Qwen3", "aot_eager"), ("Gemma-3 text", "aot_eager")]
)
def test_it_compiles_without_graph_breaks_and_sees_written_weights(name, backend):
    torch._dynamo.reset()
    fused, other = model(name, fuse=True), model(name, seed=1)
    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    with torch.inference_mode():
        close(compiled(IDS).logits, fused(IDS).logits)
        close(compiled(IDS + 3).logits, fused(IDS + 3).logits)
        before = compiled(IDS).logits
    fused.load_state_dict(other.state_dict())
    with torch.inference_mode():
        close(compiled(IDS).logits, other(IDS).logits)
        assert not torch.allclose(before, compiled(IDS).logits, atol=1e-3)


def test_a_compiled_model_has_the_layers_it_is_given():
    torch._dynamo.reset()
    made = model()
    made.model.layers = made.model.layers[:1]
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    with torch.inference_mode():
        want = compiled(IDS).logits
        fp4dispatch.fuse(made)
        close(compiled(IDS).logits, want)


def test_graphs_with_breaks_replay_it():
    apart, fused = breakable.model(), breakable.model()
    fp4dispatch.replace_linears(apart.model.layers, "nvfp4")
    fp4dispatch.replace_linears(fused.model.layers, "nvfp4", fuse=True)
    with torch.no_grad():
        want = apart(IDS, use_cache=False).logits
        graphs = breakable.captured(fused, [8, 16], tapes=FakeTape)
        torch.testing.assert_close(fused(IDS, use_cache=False).logits, want, rtol=1e-3, atol=1e-4)
    assert breakable.replays(graphs) == {"16": 1}


def test_threads_with_other_inputs_do_not_meet():
    fused = model(fuse=True)
    inputs = [torch.full((1, 4), i + 1) for i in range(16)]

    def run(ids):
        with torch.no_grad():
            return fused(ids).logits

    wants = [run(ids) for ids in inputs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for got, want in zip(pool.map(run, inputs), wants, strict=True):
                close(got, want)


# ------------------------------------------------------------------------------------------------- copies and states


def test_copies_pickles_and_moves():
    fused = model("Qwen2", fuse=True)
    want = logits(fused)
    stream = io.BytesIO()
    torch.save(fused, stream)
    stream.seek(0)
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), torch.load(stream, weights_only=False)]
    for made in copies:
        mlp = made.model.layers[1].mlp
        assert isinstance(mlp, FusedProjections)
        assert isinstance(mlp, type(fused.model.layers[1].mlp).fused_base)
        assert type(mlp).__name__ == "Qwen2MLP"
        assert torch.equal(logits(made), want)
        made.model.layers[1].mlp.gate_up_proj.weight.zero_()
    assert torch.equal(logits(fused), want)
    half = copy.deepcopy(fused).to(torch.bfloat16)
    assert half.model.layers[0].self_attn.qkv_proj.bias.dtype == torch.bfloat16
    torch.testing.assert_close(logits(half), want, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8", "fp8_row"])
@pytest.mark.parametrize("assign", [False, True])
def test_states_move_between_fused_models_and_others(fmt, assign):
    apart, fused = model("Qwen2", fmt), model("Qwen2", fmt, fuse=True, seed=1)
    own = {name: tensor.clone() for name, tensor in fused.state_dict().items()}
    assert not torch.allclose(logits(apart), logits(fused), atol=1e-3)
    fused.load_state_dict(copy.deepcopy(apart.state_dict()), assign=assign)
    close(logits(fused), logits(apart))
    apart.load_state_dict(own)
    fused.load_state_dict(apart.state_dict())
    close(logits(fused), logits(apart))
    assert_same(fused.state_dict(), own)
    attention = fused.model.layers[0].self_attn
    assert next(iter(attention.state_dict())) == "q_proj.bias"
    attention.load_state_dict(attention.state_dict())
    mine = dict(attention.state_dict())
    mine["qkv_proj.weight"] = mine.pop("q_proj.weight")
    with pytest.raises(RuntimeError, match=r"load the same tensors of all of them; found q_proj: bias"):
        attention.load_state_dict(mine)
    assert_same(fused.state_dict(), own)


def test_a_state_that_one_layer_cannot_hold_is_refused_and_changes_nothing():
    fused, other = model(fmt="fp8", fuse=True), model(fmt="fp8", seed=1)
    state = other.state_dict()
    layer = fused.model.layers[0].mlp.gate_up_proj
    before = copy.deepcopy(dict(layer.state_dict()))
    state["model.layers.0.mlp.up_proj.weight_scale"] = state["model.layers.0.mlp.up_proj.weight_scale"] * 2
    with pytest.raises(RuntimeError, match=r"gate_up_proj is fused from .*FP8 scale each, which differ"):
        fused.load_state_dict(state)
    assert_same(layer.state_dict(), before)
    with pytest.raises(RuntimeError, match="found gate_proj: weight, weight_scale; up_proj: none"):
        fused.load_state_dict({k: v for k, v in other.state_dict().items() if "up_proj" not in k}, strict=False)
    assert_same(layer.state_dict(), before)


def test_weights_are_held_once_and_writes_to_a_state_are_seen(monkeypatch):
    w4_fake.install(monkeypatch)
    with seems_to_be_here(monkeypatch):
        apart, fused = breakable.model(dtype=torch.bfloat16), breakable.model(dtype=torch.bfloat16)
        fp4dispatch.replace_linears(apart, "nvfp4")
        report = fp4dispatch.replace_linears(fused, "nvfp4", fuse=True)
        assert report.bytes_dropped == sum(g.dropped_bytes for g in fp4dispatch.report(apart).groups) > 0
        layer = fused.model.layers[0].mlp.gate_up_proj
        assert "weight" not in layer._buffers
        assert {group.backend.split()[0] for group in fp4dispatch.report(fused).groups} == {"w4a16"}
        close(logits(fused), logits(apart))
        assert_same(fused.state_dict(), apart.state_dict())
        assert "weight" not in layer._buffers
        held = fused.state_dict()["model.layers.0.mlp.gate_proj.weight"]
        held.zero_()
        gate, up = layer(torch.ones(1, 256, dtype=torch.bfloat16)).split(512, -1)
        assert not gate.any()
        assert up.any()


# --------------------------------------------------------------------------------------------------------------- files


def files(directory):
    return {name: t for file in Path(directory).glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.mark.parametrize(
    ("fmt", "format"), [("nvfp4", "modelopt"), ("nvfp4", "compressed-tensors"), ("fp8", "fp8"), ("fp8_row", "modelopt")]
)
def test_files_are_those_of_separate_layers(tmp_path, fmt, format):
    apart, fused = model("Qwen2", fmt), model("Qwen2", fmt, fuse=True)
    fp4dispatch.save_quantized(apart, tmp_path / "apart", format)
    fp4dispatch.save_quantized(fused, tmp_path / "fused", format)
    assert_same(files(tmp_path / "apart"), files(tmp_path / "fused"))
    for name in ("config.json", "hf_quant_config.json"):
        if (tmp_path / "apart" / name).exists():
            assert (tmp_path / "apart" / name).read_text() == (tmp_path / "fused" / name).read_text()
    loaded = model("Qwen2", fmt, seed=1)
    report = fp4dispatch.load_quantized(loaded, tmp_path / "fused", fuse=True)
    assert len(report.layers) == 8
    assert report.layers[0].sources == tuple(f"model.layers.0.self_attn.{shard}" for shard in QKV)
    assert "fused: model.layers.*.mlp.gate_up_proj = gate_proj + up_proj (2 of these)" in str(report)
    close(logits(loaded), logits(apart))
    fp4dispatch.load_quantized(fused, tmp_path / "apart")  # into a model that is fused
    fp4dispatch.load_quantized(apart, tmp_path / "apart")
    assert len(fused_layers(fused)) == 4
    close(logits(fused), logits(apart))
    assert_same(fused.state_dict(), apart.state_dict())


def test_what_a_checkpoint_says_of_activations_is_no_pin_of_the_user(tmp_path):
    fp4dispatch.save_quantized(model(), tmp_path / "a16", "modelopt")  # weight-only
    made = tiny_models.build("Llama", transformers)
    fp4dispatch.load_quantized(made, tmp_path / "a16", fuse=True)
    layer = made.model.layers[0].mlp.gate_up_proj
    assert layer.activation == "bf16"
    fp4dispatch.save_quantized(model(fmt="fp8"), tmp_path / "fp8", "fp8")
    fp4dispatch.load_quantized(made, tmp_path / "fp8")
    assert made.model.layers[0].mlp.gate_up_proj.activation == "any"


def test_transformers_loads_and_saves_it(tmp_path):
    from fp4dispatch.integrations.transformers import Fp4DispatchConfig, adopt

    apart, fused = model("Qwen2"), model("Qwen2", fuse=True)
    adopt(apart)
    adopt(fused)
    apart.save_pretrained(tmp_path / "apart")
    fused.save_pretrained(tmp_path / "fused")
    assert_same(files(tmp_path / "apart"), files(tmp_path / "fused"))
    assert (tmp_path / "apart/config.json").read_text() == (tmp_path / "fused/config.json").read_text()
    load = transformers.AutoModelForCausalLM.from_pretrained
    again = load(tmp_path / "fused", quantization_config=Fp4DispatchConfig(fuse=True))
    assert len(fused_layers(again)) == 4
    assert len(again.hf_quantizer.report.fusing.fused) == 4
    close(logits(again), logits(apart))
    again.save_pretrained(tmp_path / "again")
    assert_same(files(tmp_path / "again"), files(tmp_path / "apart"))
    plain = tiny_models.build("Qwen2", transformers)
    plain.save_pretrained(tmp_path / "plain")
    quantised = load(tmp_path / "plain", quantization_config=Fp4DispatchConfig(fuse=True), dtype=torch.float32)
    assert len(fused_layers(quantised)) == 4
    fp4dispatch.replace_linears(plain)
    close(logits(quantised), logits(plain))


# --------------------------------------------------------------------------------------------- what stays as it is


def first(made):
    return made.model.layers[0]


def _hook(made):
    first(made).self_attn.k_proj.register_forward_hook(lambda *_: None)


def _attribute(made):
    first(made).self_attn.v_proj.adapter = object()


def _shared(made):
    made.model.layers[1].self_attn.q_proj = first(made).self_attn.q_proj


def _patched(made):
    first(made).self_attn.forward = first(made).self_attn.forward


def _patched_layer(made):
    first(made).self_attn.v_proj.forward = first(made).self_attn.v_proj.forward


def _input_scale(made):
    for shard, scale in zip(QKV, (0.1, 0.1, 0.2), strict=True):
        getattr(first(made).self_attn, shard).input_scale = torch.tensor(scale)


def _one_input_scale(made):
    first(made).self_attn.q_proj.input_scale = torch.tensor(0.1)


def _one_bias(made):
    first(made).self_attn.q_proj.bias = nn.Parameter(torch.ones(64), requires_grad=False)


def _pinned(made):
    first(made).self_attn.q_proj.activation = "bf16"


def _absent(made):
    first(made).self_attn.v_proj = None


def _taken(made):
    first(made).self_attn.qkv_proj = nn.Identity()


def _captured(made):
    layer = first(made).self_attn.q_proj
    next(iter(layer._state.bound.values())).captured = True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_hook, "k_proj has hooks"),
        (_attribute, "v_proj has an attribute of its own, adapter"),
        (_shared, "q_proj is shared with another place"),
        (_patched, "the forward of the LlamaAttention was replaced"),
        (_patched_layer, "the forward of v_proj was replaced"),
        (_input_scale, "static activation scales differ: 0.1, 0.1, 0.2"),
        (_one_input_scale, "only q_proj has input_scale"),
        (_one_bias, "only q_proj has bias"),
        (_pinned, "they have different activation: any, bf16"),
        (_absent, "there is no v_proj"),
        (_taken, "the LlamaAttention has another qkv_proj"),
        (_captured, "a CUDA graph was captured with q_proj"),
    ],
)
def test_what_cannot_be_fused_is_left_with_the_reason(change, reason):
    made = model()
    change(made)
    want = None if change is _absent else logits(made)
    report = fp4dispatch.fuse(made)
    left = dict(report.left)
    assert left["model.layers.0.self_attn.(q_proj, k_proj, v_proj)"] == reason
    assert len(report.fused) == (2 if change is _shared else 3)
    assert not isinstance(first(made).self_attn, FusedProjections)
    assert hasattr(first(made).self_attn, "q_proj")
    assert f"not fused: model.layers.*.self_attn.(q_proj, k_proj, v_proj): {reason}" in str(report)
    if want is not None:
        close(logits(made), want)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"exclude": ["*.k_proj"]}, "k_proj is a Linear, not quantised"),
        (
            {"config": {"*.q_proj": "fp8_row", "*": "nvfp4"}},
            "they have different formats: FP4Linear nvfp4, FP8Linear row",
        ),
        (
            {"config": {"*.q_proj": "fp8", "*": "fp8_row"}},
            "they have different formats: FP8Linear row, FP8Linear tensor",
        ),
    ],
)
def test_layers_of_different_formats_stay_apart(options, reason):
    made = tiny_models.build("Llama", transformers)
    report = fp4dispatch.replace_linears(made, fuse=True, **options)
    assert dict(report.fusing.left)["model.layers.1.self_attn.(q_proj, k_proj, v_proj)"] == reason
    assert len(report.fusing.fused) == 2


def test_reports_name_what_was_fused():
    made = tiny_models.build("Llama", transformers)
    report = fp4dispatch.replace_linears(made, fuse=True)
    assert [layer.name.removeprefix("model.layers.0.") for layer in report.layers[:4]] == [
        *("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    ]
    assert report.layers[0].shards == tuple(f"model.layers.0.self_attn.{shard}" for shard in QKV)
    assert (report.layers[0].n, report.layers[0].k) == (128, 64)
    assert report.layers[0].bytes_before == 128 * 64 * 4
    assert report.bytes_before == sum(
        layer.bytes_before for layer in fp4dispatch.replace_linears(tiny_models.build("Llama", transformers)).layers
    )
    text = "fused: model.layers.*.self_attn.qkv_proj = q_proj + k_proj + v_proj (2 of these)"
    assert text in str(report)
    assert report.to_dict()["fusing"]["fused"][1]["shards"] == [f"model.layers.0.mlp.{shard}" for shard in GATE_UP]
    groups = {group.name: group.shards for group in fp4dispatch.report(made).groups}
    assert groups["model.layers.*.self_attn.qkv_proj"] == QKV
    assert groups["model.layers.*.self_attn.o_proj"] == ()
    apart = fp4dispatch.replace_linears(tiny_models.build("Llama", transformers))
    assert apart.fusing == fusing.NOTHING_FUSED
    assert "fused" not in str(apart)


def test_an_interrupt_leaves_each_module_whole(monkeypatch):
    made = model()
    want = logits(made)
    real, calls = fusing._joined, []

    def interrupted(candidate, layers):
        calls.append(candidate)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(candidate, layers)

    monkeypatch.setattr(fusing, "_joined", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fp4dispatch.fuse(made)
    assert len(fused_layers(made)) == 1
    close(logits(made), want)
    monkeypatch.undo()
    assert len(fp4dispatch.fuse(made).fused) == 3
    assert fp4dispatch.fuse(made) == fusing.NOTHING_FUSED
    close(logits(made), want)


def test_a_backend_that_cannot_run_one_layer_leaves_them_apart(monkeypatch):
    made = model()
    monkeypatch.setattr(fusing, "layer_of", lambda *_, **__: (_ for _ in ()).throw(InputError("too wide\nmore")))
    report = fp4dispatch.fuse(made)
    assert report.fused == ()
    assert {reason for _, reason in report.left} == {"one layer cannot run here: too wide"}


def test_it_is_refused_in_captures_for_other_things_and_before_cutting(monkeypatch):
    for wrong in (None, "model", nn.Linear):
        with pytest.raises(InputError, match=r"need a torch\.nn\.Module"):
            fp4dispatch.fuse(wrong)
    made = model(fuse=True)
    with pytest.raises(InputError, match=r"self_attn\.qkv_proj was fused by fp4dispatch\.fuse, and plans name"):
        whole_model._parts(made, TWO_RANKS, {"*.q_proj": Column()})
    with pytest.raises(InputError, match=r"self_attn\.qkv_proj was fused"):
        parts_for(made, Plan(), TensorParallel(plan={"*.q_proj": Column()}), TWO_RANKS)
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match=r"fp4dispatch\.fuse\(model\)"):
        fp4dispatch.fuse(made)
