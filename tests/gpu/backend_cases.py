"""What layers on any library's backend must survive on a GPU; the tests of each backend bring the layers.

``layer_of(seed)`` returns a layer [N, K] on the backend, in bfloat16, or skips where this machine cannot run it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from fp4dispatch.errors import CaptureError
from fp4dispatch.models.replace import warmup
from fp4dispatch.run import routes

N, K = 1024, 2048

LayerOf = Callable[[int], nn.Module]


def tokens(m: int, seed: int = 0, k: int = K, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(m, k, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(dtype)


def captured(fn: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = fn()
    return graph, out


def difference(replayed: Tensor, eager: Tensor, again: Tensor) -> str:
    """Say where a replay differs from an eager call before it, and which of the two a second eager call agrees with."""
    wrong = replayed != eager
    rows = wrong.any(1).nonzero().flatten().tolist()
    return (
        f"M={len(eager)}: {int(wrong.sum())} of {wrong.numel()} elements differ, in {len(rows)} rows from {rows[:8]}; "
        f"NaN: {int(replayed.isnan().sum())} replayed, {int(eager.isnan().sum())} eager; first: "
        f"{replayed[wrong][:4].tolist()} replayed, {eager[wrong][:4].tolist()} eager; "
        f"another eager call equals the first: {torch.equal(again, eager)}, the replay: {torch.equal(again, replayed)}"
    )


def replay_equals_eager_and_survives_what_is_planned_later(
    layer_of: LayerOf, sizes: Sequence[int], later: Sequence[int], of_another: Sequence[int]
) -> None:
    """Capture ``sizes``; then plan ``later`` tokens, and a second layer's; replays give what eager calls do."""
    layer = layer_of(0)
    warmup(layer, tokens=list(sizes))
    xs = [tokens(m, m) for m in sizes]
    graphs = [captured(lambda x=x: layer(x)) for x in xs]
    with torch.inference_mode():
        expected = [layer(x) for x in xs]
        warmup(layer, tokens=list(later))
        other = layer_of(1)
        for m in of_another:
            other(tokens(m))
        torch.cuda.empty_cache()
        poison = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(8)]
        for _ in range(3):
            for (graph, out), want, x in zip(graphs, expected, xs, strict=True):
                out.fill_(float("nan"))
                graph.replay()
                assert torch.equal(out, want), difference(out, want, layer(x))
        for (graph, out), x in zip(graphs, xs, strict=True):
            x.copy_(tokens(x.shape[0], 99))
            graph.replay()
            assert torch.equal(out, layer(x))
    del poison


def an_m_that_was_never_planned_is_refused_in_capture(layer_of: LayerOf, planned: int, never: int = 500) -> None:
    """The refusal names the call to make, and what was planned can still be captured."""
    layer = layer_of(0)
    warmup(layer, tokens=[planned])
    x = tokens(never)
    with pytest.raises(CaptureError, match=rf"warmup\(model, tokens=\[{never}\]\)"):
        captured(lambda: layer(x))
    graph, out = captured(lambda: layer(x[:planned]))
    graph.replay()
    with torch.inference_mode():
        assert torch.equal(out, layer(x[:planned]))


def many_threads_and_streams_at_once(layers: Sequence[nn.Module], sizes: Sequence[int]) -> None:
    """Six threads, each on a stream of its own, call the layers in an order of their own."""
    for layer in layers:
        warmup(layer, tokens=list(sizes))
    xs = {m: tokens(m, m) for m in sizes}
    with torch.inference_mode():
        expected = {(i, m): layer(xs[m]) for i, layer in enumerate(layers) for m in sizes}
    torch.cuda.synchronize()
    wrong: list[tuple[int, int]] = []
    raised: list[Exception] = []

    def work(seed: int) -> None:
        try:
            stream, order = torch.cuda.Stream(), random.Random(seed)
            with torch.cuda.stream(stream), torch.inference_mode():
                for _ in range(100):
                    i, m = order.randrange(len(layers)), order.choice(sizes)
                    if not torch.equal(layers[i](xs[m]), expected[i, m]):
                        wrong.append((i, m))
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert wrong == []


def launches_go_to_the_current_stream(layer_of: LayerOf, m: int) -> None:
    """A launch on another stream (flashinfer#1303) would not wait for the one that fills x."""
    layer = layer_of(0)
    warmup(layer, tokens=[m])
    with torch.inference_mode():
        final = tokens(m, 1)
        expected = layer(final)
        x, stream = torch.zeros_like(final), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            x.copy_(final)
            out = layer(x)
        stream.synchronize()
    assert torch.equal(out, expected)


def no_call_costs_memory(layer_of: LayerOf, sizes: Sequence[int]) -> None:
    """flashinfer#1887, #1741, #2139: memory or host work that grows with each call."""
    layer = layer_of(0)
    with torch.inference_mode():
        for m in sizes:
            layer(tokens(m))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), len(routes._plans)
        for _ in range(200):
            for m in sizes:
                layer(tokens(m))
        torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), len(routes._plans)) == before
