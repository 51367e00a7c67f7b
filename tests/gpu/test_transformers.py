"""Transformers on a GPU: loaded directly to it, generating, compiled; logits beside an fp32 reference on the CPU."""

from __future__ import annotations

import pytest
import torch

from fp4dispatch.errors import IntegrationError
from tests import tiny_models
from tests.transformers_cases import IDS, kl, modelopt, plain, quantised_modules, reference

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="accelerate, which Transformers needs for device_map, is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True, scope="module")
def registered():
    import fp4dispatch

    try:
        fp4dispatch.register()
    except IntegrationError as error:
        pytest.skip(str(error))


def load(path, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(path, device_map="cuda", **options)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama", "NVFP4_DEFAULT_CFG"),
        ("Llama", "W4A16_NVFP4_CFG"),
        ("Llama", "FP8_DEFAULT_CFG"),
        ("Phi-3", "NVFP4_DEFAULT_CFG"),
    ],
)
def test_modelopt_checkpoints(name, config):
    path = modelopt(name, config)
    model = load(path)
    layers = quantised_modules(model)
    assert layers
    assert {layer.weight.device.type for layer in layers.values()} == {"cuda"}
    expected, host = reference(name, path), load(path).cpu()
    logits = model(IDS.cuda()).logits.float().cpu()
    p = torch.log_softmax(tiny_models.logits(expected), -1)
    q = torch.log_softmax(logits, -1)
    assert float((p.exp() * (p - q)).sum(-1).max()) < max(1e-3, 4 * kl(host, expected))


def test_it_generates_with_a_compiled_static_cache():
    model = load(modelopt("Llama"))
    expected = model.generate(IDS.cuda(), max_new_tokens=8, do_sample=False)
    found = model.generate(IDS.cuda(), max_new_tokens=8, do_sample=False, cache_implementation="static")
    assert found.shape == expected.shape
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for _ in range(3):
            logits = compiled(IDS.cuda()).logits.float().clone()
        torch.testing.assert_close(logits, model(IDS.cuda()).logits.float(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("config", ["NVFP4_DEFAULT_CFG", "W4A16_NVFP4_CFG", "FP8_DEFAULT_CFG"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_layers(tmp_path, config, place):
    path = modelopt("Llama", config)
    whole = load(path)
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "model.layers.0", "lm_head"], 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, device_map=places | {"model.layers.1": place}, offload_folder=tmp_path
    )
    away = [layer for name, layer in quantised_modules(model).items() if name.startswith("model.layers.1.")]
    for tokens in (1, 16, 1):
        ids = IDS[:, :tokens].cuda()
        with torch.no_grad():
            assert torch.equal(model(ids).logits, whole(ids).logits)
        assert {tensor.device.type for layer in away for tensor in layer.buffers()} == {"cpu"}
    for name, layer in quantised_modules(whole).items():
        offload = model.get_submodule(name).offload
        assert offload is None or offload.backend == layer.backend_text()
    before = torch.cuda.memory_allocated()
    model(IDS.cuda())
    assert torch.cuda.memory_allocated() <= before
    model.save_pretrained(tmp_path / "out")
    again = load(tmp_path / "out")
    assert torch.equal(again(IDS.cuda()).logits, whole(IDS.cuda()).logits)


def test_quantised_while_loading():
    from fp4dispatch.integrations.transformers import Fp4DispatchConfig

    on_gpu = load(plain("Llama"), quantization_config=Fp4DispatchConfig())
    on_cpu = transformers.AutoModelForCausalLM.from_pretrained(plain("Llama"), quantization_config=Fp4DispatchConfig())
    for name, layer in quantised_modules(on_cpu).items():
        other = on_gpu.get_submodule(name)
        for key in ("weight", "weight_scale", "weight_scale_2"):
            mine, theirs = getattr(layer, key), getattr(other, key).cpu()
            assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8)), (name, key)
