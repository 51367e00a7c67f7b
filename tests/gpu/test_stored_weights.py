"""Writes to stored weights on a GPU: late writers under PDL, graphs, compiled calls.

Kernels read weights before they wait. So a GEMM with PDL straight behind a kernel that lets it start early, and writes
the weights late, reads the old ones: the control shows that. A layer waits for the writes before its next launch.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp4dispatch import jit, refresh, warmup
from fp4dispatch.backends.own.pdl_trial import launch_operands
from fp4dispatch.backends.own.pdl_trial.launch_operands import ROLES, Sizes
from fp4dispatch.backends.own.tensors.operands import gpu_of, launch_numbers
from fp4dispatch.backends.own.tiling import launch_model
from fp4dispatch.errors import CaptureError
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.kernels import CHAIN
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.problem.arch import SM90
from fp4dispatch.run import ops
from fp4dispatch.trust import race
from tests.gpu.backend_cases import captured
from tests.gpu.sm90 import needs_sm90

pytestmark = [pytest.mark.gpu, needs_sm90]

K, N = 2048, 1024
LATE = 200_000
"""Clock cycles that a writer is late: a tenth of a millisecond, many times what a launch takes."""
CASES = [
    ("w4a16", "nvfp4", 1),
    ("w4a16", "nvfp4", 200),
    ("w4a8", "nvfp4", 16),
    ("w4a8", "nvfp4", 1000),
    ("w8a16", "row", 1),
    ("w8a16", "tensor", 8),
    ("w8a8", "row", 16),
    ("w8a8", "tensor", 200),
    ("w8a8", "block128", 16),
    ("w8a8", "block128", 200),
]
case = pytest.mark.parametrize(("backend", "scaling", "m"), CASES)


def make(backend, scaling, seed=0):
    torch.manual_seed(seed)
    linear = nn.Linear(K, N, bias=False).to("cuda", torch.bfloat16).requires_grad_(False)
    linear.weight.mul_(1 + seed / 10)
    if scaling == "nvfp4":
        return FP4Linear.from_linear(linear, backend=backend)
    return FP8Linear.from_linear(linear, scaling=scaling, backend=backend)


def tokens(m):
    torch.manual_seed(5)
    return torch.randn(m, K, device="cuda", dtype=torch.bfloat16)


def stored(layer):
    return {name: tensor for name in layer.quantized if (tensor := getattr(layer, name, None)) is not None}


def write(layer, new, late=0):
    if late:
        torch.cuda._sleep(late)
    for name, tensor in stored(new).items():
        getattr(layer, name).copy_(tensor)


@case
def test_a_late_write_is_multiplied_by_the_very_next_launch(backend, scaling, m):
    layer, news = make(backend, scaling), [make(backend, scaling, seed=s) for s in (1, 2)]
    x = tokens(m)
    with torch.inference_mode():
        wants = [new(x) for new in news]
        layer(x)
        torch.cuda.synchronize()
        assert not torch.equal(*wants)
        wrong = 0
        for i in range(500):
            write(layer, news[i % 2], LATE)
            first, second = layer(x), layer(x)
            wrong += not (torch.equal(first, wants[i % 2]) and torch.equal(second, wants[i % 2]))
    assert wrong == 0


@case
def test_the_operator_waits_for_late_writes_to_packed_weights(backend, scaling, m):
    layer, news = make(backend, scaling), [make(backend, scaling, seed=s) for s in (1, 2)]
    x = tokens(m)
    bound, packed = layer.bind(), [new.bind().tensors for new in news]
    with torch.no_grad():
        wants = [new(x) for new in news]
        torch.cuda.synchronize()
        wrong = 0
        for i in range(500):
            torch.cuda._sleep(LATE)
            for mine, theirs in zip(bound.tensors, packed[i % 2], strict=True):
                mine.copy_(theirs)
            wrong += not torch.equal(ops.linear(x, bound.tensors, None, bound.spec.text), wants[i % 2])
    assert wrong == 0


def produce(source, target):
    """Copy by a kernel that releases its dependents at once and writes LATE cycles later. torch counts no version."""
    jit.load(*CHAIN, SM90).module.produce(source.view(torch.uint8), target.view(torch.uint8), LATE, False)


def early_readers():
    """Every (kernel, variant, entry) of the race test that reads weights before it waits."""
    kernels = installed().kernels
    builds = dict.fromkeys((case.kernel, case.variant) for case in race.CASES)
    return [
        pytest.param(kernel, kernels[kernel].variant(variant), entry, id=f"{kernel}-{variant}")
        for kernel, variant in builds
        for entry in launch_operands.entries(kernels[kernel], kernels[kernel].variant(variant))
        if entry.early
    ]


@pytest.mark.parametrize(("kernel", "variant", "entry"), early_readers())
def test_control_pdl_straight_behind_a_late_writer_multiplies_old_weights(kernel, variant, entry):
    sizes = Sizes(16, N, K, launch_operands.dtype_of(variant))
    generator = torch.Generator(device="cuda")
    generator.manual_seed(0)

    def filled(name):
        tensor = torch.zeros(ROLES[name].shape(sizes), dtype=ROLES[name].dtype or sizes.dtype, device="cuda")
        if ROLES[name].fill is not None:
            ROLES[name].fill(tensor, generator)
        return tensor

    operands = {name: filled(name) for name in entry.arguments if name in ROLES}
    if "shape" in entry.arguments:
        gpu = launch_model.gpu_with(gpu_of(torch.device("cuda", 0))[1])
        shape = launch_model.best(entry.tile, *sizes[:3], gpu).shape
        room = launch_model.room_bytes(entry.tile, shape)
        operands |= {"shape": launch_numbers(shape), "room": torch.empty(room, dtype=torch.uint8, device="cuda")}
    (weights, out), old = (operands[entry.early[0]], operands["out"]), filled(entry.early[0])
    function, new = getattr(jit.load(kernel, variant.id, SM90).module, entry.function), weights.clone()

    def product(written, *, late=False, enable_pdl=False):
        weights.copy_(old if late else written)
        out.fill_(float("nan"))
        if late:
            produce(written, weights)  # nothing stands between this kernel and the launch
        function(*(operands.get(name) for name in entry.arguments), enable_pdl)
        return out.clone()

    want = product(new)
    assert not torch.equal(product(old), want)
    wrong = {
        pdl: sum(not torch.equal(product(new, late=True, enable_pdl=pdl), want) for _ in range(20))
        for pdl in (True, False)
    }
    assert wrong[True] > 0, "the control shows nothing: the launch did not start before the writer wrote"
    assert wrong[False] == 0


@pytest.mark.parametrize("how", ["counted", "refresh", "packed"])
@case
def test_the_next_launch_waits_for_a_writer_that_lets_it_start_early(backend, scaling, m, how):
    layer, news = make(backend, scaling), [make(backend, scaling, seed=s) for s in (1, 2)]
    x = tokens(m)

    def pairs(new):
        if how == "packed":
            return list(zip(layer.bind().tensors, new.bind().tensors, strict=True))
        return [(getattr(layer, name), tensor) for name, tensor in stored(new).items()]

    with torch.no_grad():
        wants = [new(x) for new in news]
        bound = layer.bind()
        assert not torch.equal(layer(x), wants[0])
        assert not torch.equal(*wants)
        wrong = 0
        for i in range(50):
            written = pairs(news[i % 2])
            for mine, theirs in written:
                if mine.nbytes % 16:
                    mine.copy_(theirs)  # a scale of one number
            for mine, theirs in written:
                if mine.nbytes % 16 == 0:
                    produce(theirs, mine)
                    if how != "refresh":
                        torch.autograd.graph.increment_version(mine)
            if how == "packed":
                out = ops.linear(x, bound.tensors, None, bound.spec.text)
            else:
                if how == "refresh":
                    refresh(layer)
                out = layer(x)
            wrong += not torch.equal(out, wants[i % 2])
    assert wrong == 0


@case
def test_graphs_see_what_refresh_prepared(backend, scaling, m):
    layer, new = make(backend, scaling), make(backend, scaling, seed=1)
    x = tokens(m)
    warmup(layer, tokens=[m])
    graph, out = captured(lambda: layer(x))
    with torch.inference_mode():
        old, want = layer(x), new(x)
        graph.replay()
        assert torch.equal(out, old)
        write(layer, new)
        assert refresh(layer) == 1
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want)
        for name, tensor in stored(make(backend, scaling)).items():
            getattr(layer, name).data.copy_(tensor)  # torch counts no version
        refresh(layer)
        graph.replay()
        assert torch.equal(out, old)
        assert torch.equal(layer(x), old)


@case
def test_a_write_is_refused_during_capture(backend, scaling, m):
    layer, new = make(backend, scaling), make(backend, scaling, seed=1)
    x = tokens(m)
    warmup(layer, tokens=[m])
    write(layer, new)
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match="were written or replaced"):
        captured(lambda: layer(x))
    with torch.inference_mode():
        assert torch.equal(layer(x), new(x))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(("backend", "scaling", "m"), [CASES[0], CASES[4], CASES[8]])
def test_compiled_calls_multiply_what_was_written(backend, scaling, m, mode):
    torch._dynamo.reset()
    layer, new = make(backend, scaling), make(backend, scaling, seed=1)
    x = tokens(m)
    fn = torch.compile(layer, fullgraph=True, mode=mode)
    with torch.inference_mode():
        old = layer(x)
        for _ in range(4):
            assert torch.equal(fn(x), old)
        write(layer, new, LATE)
        if mode == "reduce-overhead":  # replays run no host code
            refresh(layer)
        for _ in range(4):
            assert torch.equal(fn(x), new(x))
