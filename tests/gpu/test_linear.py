"""FP4Linear and FP8Linear on a GPU: moves, streams, threads, several devices, compile."""

import threading

import pytest
import torch
from torch import nn

from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.replace import replace_linears, warmup

pytestmark = pytest.mark.gpu

K, N = 512, 384
KINDS = ("nvfp4", "tensor", "row", "block128")


def make(kind, device="cuda", seed=0, **kwargs):
    torch.manual_seed(seed)
    linear = nn.Linear(K, N).to(device, torch.bfloat16)
    if kind == "nvfp4":
        return FP4Linear.from_linear(linear, **kwargs)
    return FP8Linear.from_linear(linear, scaling=kind, **kwargs)


def cosine(a, b):
    return float(torch.nn.functional.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0))


@pytest.mark.parametrize("kind", KINDS)
def test_gpu_and_cpu_agree_and_moves_rebuild(kind):
    layer = make(kind, "cpu")
    x = torch.randn(33, K, dtype=torch.bfloat16)
    want = layer(x)
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    layer.cuda()
    assert all(t.is_cuda for t in layer.buffers())
    got = layer(x.cuda())
    assert cosine(got.cpu(), want) > 0.998
    layer.cpu()
    assert torch.equal(layer(x), want)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), state[name].reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_moves_between_cpu_and_gpu(kind):
    source, target = make(kind, "cuda"), make(kind, "cpu", seed=1)
    target.load_state_dict(source.state_dict())
    x = torch.randn(5, K, dtype=torch.bfloat16)
    assert cosine(target(x), source(x.cuda()).cpu()) > 0.998


@pytest.mark.parametrize("kind", KINDS)
def test_forward_does_not_synchronise(kind):
    layer = make(kind)
    x = torch.randn(17, K, device="cuda", dtype=torch.bfloat16)
    want = layer(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = layer(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got, want)


def test_fp8_goes_to_the_tensor_cores():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 tensor cores come with sm_89")
    for kind in ("tensor", "row"):
        assert "reference" not in repr(make(kind)), repr(make(kind))


def test_many_streams_and_threads():
    layers = [make(kind, seed=i) for i, kind in enumerate(KINDS)]
    xs = [torch.randn(m, K, device="cuda", dtype=torch.bfloat16) for m in (1, 16, 33, 128)]
    want = [[layer(x) for x in xs] for layer in layers]
    torch.cuda.synchronize()
    wrong = []

    def work(index):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), torch.inference_mode():
                for step in range(50):
                    i, j = (index + step) % len(layers), (index * 3 + step) % len(xs)
                    got = layers[i](xs[j])
                    stream.synchronize()
                    if not torch.equal(got, want[i][j]):
                        wrong.append((i, j))
        except Exception as error:  # a thread must not die unseen
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_gpus_whatever_the_current_device_is():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} visible")
    for kind in KINDS:
        layer = make(kind)
        x = torch.randn(9, K, device="cuda:0", dtype=torch.bfloat16)
        want = layer(x)
        layer.to("cuda:1")
        torch.cuda.set_device(0)
        got = layer(x.to("cuda:1"))
        assert got.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        assert torch.equal(got.to("cuda:0"), want)
        with pytest.raises(ValueError, match="cuda:0"):
            layer(x)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", KINDS)
def test_compile_fullgraph_with_dynamic_m(kind, backend):
    torch._dynamo.reset()
    layer = make(kind)
    fn = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for m in (2, 17, 300):
            x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
            assert torch.equal(fn(x), layer(x))


def test_replace_and_warm_up_a_model_on_the_gpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K)).to("cuda", torch.bfloat16)
    x = torch.randn(32, K, device="cuda", dtype=torch.bfloat16)
    want = model(x)
    report = replace_linears(model, "fp8_row")
    assert warmup(model, tokens=[1, 32]) == 4
    assert cosine(model(x), want) > 0.998
    assert report.bytes_after < 0.55 * report.bytes_before
    print(report)
