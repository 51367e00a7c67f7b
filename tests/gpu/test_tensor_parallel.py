"""Layers cut among 2 and 4 GPUs over NCCL: equal to one GPU within rounding, eagerly and in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fp4dispatch
from fp4dispatch.integrations.tensor_parallel import Column, Row, parallelize
from tests import parallel
from tests.parallel import FORMATS, World, layer, off, tokens

pytestmark = pytest.mark.gpu

ROUNDING = 0.008
"""bfloat16 results of the ranks, added up in another order."""
QUANTISED = 0.05
"""Activations in FP8 or NVFP4: a row layer scales each rank's part by itself."""


def graphs(world: World) -> dict[str, float]:
    """A captured MLP replays what it computes eagerly, with new inputs too."""
    found = {}
    for fmt in FORMATS:
        net = nn.ModuleDict({"up": layer(fmt, 2048, 1024, True, world), "down": layer(fmt, 1024, 2048, True, world)})
        wants = {m: net["down"](net["up"](tokens(m, 1024, world))) for m in (1, 16, 256)}
        parallelize(net, None, {"up": Column(), "down": Row()})
        fp4dispatch.warmup(net, tokens=[1, 16, 256])
        for m, want in wants.items():
            x = tokens(m, 1024, world)
            eager = net["down"](net["up"](x))
            held = torch.zeros_like(x)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = net["down"](net["up"](held))
            held.copy_(x)
            graph.replay()
            torch.cuda.synchronize()
            found[f"{fmt} {m} whole"] = off(eager, want)
            found[f"{fmt} {m} graph"] = off(out, eager)
    return found


def default_activations(world: World) -> dict[str, float]:
    """What the policy chooses on this GPU, also quantised activations."""
    found = {}
    for fmt in FORMATS:
        for m in (1, 64, 1024):
            up, down = layer(fmt, 4096, 1024, True, world), layer(fmt, 1024, 4096, True, world)
            x = tokens(m, 1024, world)
            want = down(up(x))
            parallelize(nn.ModuleDict({"up": up, "down": down}), None, {"up": Column(), "down": Row()})
            found[f"{fmt} {m}"] = off(down(up(x)), want)
    return found


def choices(world: World) -> list[str]:
    """The backends of all layers after warmup, which ranks must have in common."""
    net = nn.ModuleDict({fmt: layer(fmt, 1024, 1024, True, world) for fmt in FORMATS})
    parallelize(net, None, {"*": Row()})
    fp4dispatch.warmup(net, tokens=[1, 64])
    return [module.backend_text() for module in net.values()]


SCENARIOS = [
    *(parallel.pairs, parallel.gathered, parallel.fused_layers, parallel.padded),
    *(default_activations, graphs, choices, parallel.compiled),
]


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, {torch.cuda.device_count()} visible")
    return parallel.start(SCENARIOS, request.param, "cuda", seconds=400)


def errors(found: list[dict[str, Any]], name: str) -> dict[str, float]:
    return {f"{key}, rank {rank}": e for rank, result in enumerate(found) for key, e in result[name].items()}


@pytest.mark.parametrize("name", ["pairs", "gathered", "fused_layers", "padded", "compiled"])
def test_equal_to_one_gpu(found, name):
    wrong = {case: error for case, error in errors(found, name).items() if not error < ROUNDING}
    assert not wrong


def test_with_quantised_activations(found):
    wrong = {case: error for case, error in errors(found, "default_activations").items() if not error < QUANTISED}
    assert not wrong


def test_a_graph_replays_what_runs_eagerly(found):
    every = errors(found, "graphs")
    assert not {case: error for case, error in every.items() if " graph" in case and error != 0}
    assert not {case: error for case, error in every.items() if " whole" in case and not error < QUANTISED}


def test_all_ranks_choose_the_same_backends(found):
    assert len({tuple(result["choices"]) for result in found}) == 1
