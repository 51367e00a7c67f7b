"""``device_map`` of Transformers with parts of the model on the CPU or on disk: quantised layers come for each call."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import fp4dispatch
from fp4dispatch import FP4Linear, FP8Linear
from fp4dispatch.errors import CaptureError, InputError
from fp4dispatch.machine import capture
from fp4dispatch.models.offloading import offload, on_disk
from tests import tiny_models
from tests.transformers_cases import IDS, compressed, modelopt, plain, quantised_modules, taken_over

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="accelerate, which Transformers needs for device_map, is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

LAYER = "model.layers.1.mlp.up_proj"
ON_DISK = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"} | {
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
}
BESIDE_A_GPU = dict.fromkeys(ON_DISK, "cpu:0") | {"model.layers.1": "cpu"}
"""``cpu:0`` stands for a GPU (:func:`as_beside_a_gpu`)."""


@pytest.fixture(autouse=True, scope="module")
def registered():
    with taken_over("compressed-tensors"):
        yield


@pytest.fixture
def as_beside_a_gpu(monkeypatch):
    """Hooks as accelerate attaches them where a GPU runs the model, but the forwards are on the CPU."""
    hooks = pytest.importorskip("accelerate.hooks")
    utils = pytest.importorskip("accelerate.utils")
    loaders = []

    def dispatch(model, device_map, offload_index=None, offload_buffers=False, skip_keys=None, **_):
        waits = [name for name, device in device_map.items() if device == "cpu"]
        state = utils.extract_submodules_state_dict(model.state_dict(), waits)
        loaders.append(utils.OffloadedWeightsLoader(state, index=offload_index or {}))
        hooks.attach_align_device_hook_on_blocks(
            model, dict.fromkeys(("", *device_map), torch.device("cpu")),
            offload={name: device != "cpu:0" for name, device in device_map.items()},
            weights_map=loaders[0], offload_buffers=offload_buffers, skip_keys=skip_keys, tied_params_map={},
        )  # fmt: skip
        model.hf_device_map = dict(device_map)

    monkeypatch.setattr("transformers.integrations.accelerate.dispatch_model", dispatch)
    return loaders


def load(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def check(model, path, out, place):
    """The model gives the bits of one that stays where it is, twice; saved, it is the checkpoint."""
    expected = tiny_models.logits(load(path))
    for _ in range(2):
        assert torch.equal(tiny_models.logits(model), expected)
    away = {name: layer for name, layer in quantised_modules(model).items() if layer.offload is not None}
    assert set(away) == {name for name in quantised_modules(model) if name.startswith("model.layers.1.")}
    for layer in away.values():
        assert (layer.offload.place, layer.weight.device.type) == (place, "cpu")
        assert not layer._state.bound
        assert not [name for name in layer._buffers if name.startswith("layout")]
    model.save_pretrained(out)
    stored, saved = (load_file(p / "model.safetensors") for p in (path, out))
    assert saved.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(saved[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    return away


CHECKPOINTS = {
    "NVFP4": lambda: modelopt("Llama"),
    "FP8": lambda: modelopt("Llama", "FP8_DEFAULT_CFG"),
    "biases": lambda: modelopt("Qwen2"),
    "reciprocal scales": lambda: compressed("Llama"),
}


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_disk(tmp_path, checkpoint):
    path, folder = CHECKPOINTS[checkpoint](), tmp_path / "offload"
    model = load(path, device_map=ON_DISK, offload_folder=folder)
    away = check(model, path, tmp_path / "out", "disk")
    assert not list(folder.iterdir()), "a file without a name needs no clearing up"
    maps = open("/proc/self/maps").read()  # noqa: PTH123, SIM115
    mapped = [line.split("-")[0] for line in maps.splitlines() if f"{folder}/" in line and "(deleted)" in line]
    assert len(mapped) >= len(away)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_cpu(tmp_path, as_beside_a_gpu, checkpoint):
    path = CHECKPOINTS[checkpoint]()
    model = load(path, device_map=BESIDE_A_GPU)
    away = check(model, path, tmp_path / "out", "the CPU")
    (loader,) = as_beside_a_gpu
    held = [name for name in (*loader, *loader.state_dict) if name.rpartition(".")[0] in away]
    assert not held, "accelerate would hold them a second time"


def test_disk_beside_a_gpu(tmp_path, as_beside_a_gpu):
    path = modelopt("Llama")
    model = load(path, device_map=BESIDE_A_GPU | {"model.layers.1": "disk"})
    check(model, path, tmp_path / "out", "disk")


def test_generate():
    model, expected = load(modelopt("Llama"), device_map=ON_DISK), load(modelopt("Llama"))
    tokens = expected.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False), tokens)


def test_compile():
    model, expected = load(modelopt("Llama"), device_map=ON_DISK), load(modelopt("Llama"))
    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(IDS).logits
        torch.testing.assert_close(found, expected(IDS).logits, rtol=2e-2, atol=2e-2)


def test_a_layer_that_waits_can_be_written_and_a_failed_call_does_no_harm():
    path = modelopt("Llama")
    model, other = load(path, device_map=ON_DISK), load(path)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    for each in (model, other):
        layer = each.get_submodule(LAYER)
        with pytest.raises(InputError, match=r"\[2, 48\]; need"):
            layer(torch.ones(2, 48, dtype=torch.bfloat16))
        before = layer(x)
        layer.weight.copy_(layer.weight.flip(0))
        assert not torch.equal(layer(x), before)
    assert torch.equal(model.get_submodule(LAYER)(x), other.get_submodule(LAYER)(x))


def test_refusals_and_what_is_said(monkeypatch, caplog):
    with pytest.raises(InputError, match=r"on disk, and the checkpoint is not quantised.*quantise it first"):
        load(plain("Llama"), device_map=ON_DISK, quantization_config=fp4dispatch_config())
    model = load(modelopt("Llama"), device_map=ON_DISK)
    groups = fp4dispatch.report(model).groups
    assert [g.reason for g in groups if "offloaded to disk: moved to cpu for each call" in g.reason]
    assert {g.backend for g in groups if "offloaded" in g.reason} == {"chosen at the first call"}
    tiny_models.logits(model)
    assert {g.backend for g in fp4dispatch.report(model).groups} == {"reference (bf16)"}
    assert fp4dispatch.warmup(model, tokens=[2]) == 4, "only the layers that stay"
    with pytest.raises(InputError, match="14 quantised layers of LlamaForCausalLM are offloaded"):
        fp4dispatch.warmup(load(modelopt("Llama"), device_map={"": "disk"}), tokens=[2])
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match=rf'moving layer "{LAYER}", which is offloaded to disk'):
        model.get_submodule(LAYER)(torch.ones(1, 64, dtype=torch.bfloat16))


def fp4dispatch_config():
    from fp4dispatch.integrations.transformers import Fp4DispatchConfig

    return Fp4DispatchConfig()


def test_hooks_can_be_removed():
    hooks = pytest.importorskip("accelerate.hooks")
    model = load(modelopt("Llama"), device_map=ON_DISK)
    hooks.remove_hook_from_module(model.get_submodule(LAYER))
    layer, expected = model.get_submodule(LAYER), load(modelopt("Llama")).get_submodule(LAYER)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert layer.offload is None
    assert torch.equal(layer(x), expected(x))


# Without Transformers.


def addresses(layer):
    return [t.data_ptr() for t in (layer.bias, *layer.buffers()) if t is not None]


@pytest.mark.parametrize("scaling", ["nvfp4", "tensor", "row", "block128"])
@pytest.mark.parametrize("bias", [False, True])
def test_each_format(tmp_path, scaling, bias):
    linear = torch.nn.Linear(256, 128, bias=bias, dtype=torch.bfloat16)
    if scaling == "nvfp4":
        expected, layer = (FP4Linear.from_linear(linear) for _ in range(2))
    else:
        expected, layer = (FP8Linear.from_linear(linear, scaling=scaling) for _ in range(2))
    away = offload(layer, torch.device("cpu:0"), tmp_path)  # torch copies to it, as to a GPU
    waiting = addresses(layer)
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        away.bring(layer)
        assert torch.equal(layer(x.to(dtype)), expected(x.to(dtype)))
        assert not set(addresses(layer)) & set(waiting)
        choices = [bound.spec for bound in layer._state.bound.values()]
        away.release(layer)
        assert addresses(layer) == waiting
        away.bring(layer)
        assert [bound.spec for bound in layer._state.bound.values()] == choices, "the policy is asked once"
        away.release(layer)
    with pytest.raises(InputError, match="waits on the CPU, this one is on meta"):
        offload(FP4Linear(64, 64, device="meta"), torch.device("cpu"))


def test_tensors_on_disk(tmp_path):
    tensors = [torch.arange(5), torch.randn(3, 7), torch.tensor(2.5), torch.ones(4, 4).to(torch.float8_e4m3fn)]
    for tensor, mapped in zip(tensors, on_disk(tensors, tmp_path), strict=True):
        assert (mapped.shape, mapped.dtype) == (tensor.shape, tensor.dtype)
        assert mapped.data_ptr() % 64 == 0
        assert torch.equal(mapped.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        mapped.fill_(1)
    assert json.dumps(list(tmp_path.iterdir())) == "[]"
