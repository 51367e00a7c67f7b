"""What must hold around CUDA graph capture, each with a way to take its guard away.

    python -m tests.gpu.capture_cases NAME             0 if the property holds, 3 if not, 5 if it cannot be tried here
    python -m tests.gpu.capture_cases NAME --without   the same with the guard removed: must not be 0

A case runs in a process of its own, because a spoilt capture may leave CUDA unusable. tests/gpu/test_capture_guards.py
runs all of them both ways. Where nothing can be removed because there is no line of code to remove (a plan that keeps
no weights), the fault that the property rules out is planted instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

import fp4dispatch
from fp4dispatch import formats, jit
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.libraries import cudnn as cudnn_backend
from fp4dispatch.backends.libraries import flashinfer
from fp4dispatch.backends.own import cutlass, scratch
from fp4dispatch.dispatch import choose
from fp4dispatch.errors import CaptureError
from fp4dispatch.jit import kernels
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.jit.store.cache import Cache
from fp4dispatch.machine import capture, log
from fp4dispatch.models.linear import FP4Linear, FP8Linear
from fp4dispatch.models.quantized_linear import QuantizedLinear
from fp4dispatch.models.replace import warmup
from fp4dispatch.problem import Problem
from fp4dispatch.problem.decision import Reason
from fp4dispatch.run import ops, routes
from fp4dispatch.trust import selfcheck
from fp4dispatch.tune import tuning

K, N, M = 512, 384, 16
LOG = logging.getLogger("fp4dispatch")
MILLISECOND = 2_000_000
"""Cycles of ``torch.cuda._sleep``, about."""


class CannotTry(Exception):
    """The case needs something that this machine does not have."""


@dataclass(frozen=True)
class Case:
    """A property, how to break it, and what the body says then."""

    body: Callable[[], None]
    remove: Callable[[], object]
    says: str


CASES: dict[str, Case] = {}


def case(remove: Callable[[], object], says: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a body."""

    def register(body: Callable[[], None]) -> Callable[[], None]:
        CASES[body.__name__] = Case(body, remove, says)
        return body

    return register


# --------------------------------------------------------------------------------------------------------------- tools


def fp8(backend="cutlass", n=N, k=K, seed=0, **kwargs):
    torch.manual_seed(seed)
    linear = nn.Linear(k, n).to("cuda", torch.bfloat16)
    return FP8Linear.from_linear(linear, scaling="row", backend=backend, **kwargs)


def rows(m=M, k=K, seed=1, scale=1.0):
    torch.manual_seed(seed)
    return torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * scale


def captured(fn, **options):
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, **options):
        out = fn()
    return graph, out


def refused(fn, *words):
    """The call raises CaptureError inside a capture, with the call to make, and leaves CUDA usable."""
    try:
        captured(fn)
    except CaptureError as error:
        text = str(error)
    else:
        raise AssertionError("was not refused inside a capture")
    torch.cuda.synchronize()
    for word in (*words, "Before capturing:"):
        assert word in text, text
    assert float(torch.ones(4, device="cuda").sum()) == 4


def ask_cudnn():
    """Return cudnn's backend, or give up where it cannot run FP8 here."""
    torch.cuda.init()
    backend = registry.instance("cudnn")
    reasons = backend.supports(Problem("fp8_gemm", M, N, K, "fp8", "row", bias=True), choose.facts())
    if reasons:
        raise CannotTry("; ".join(map(str, reasons)))
    return backend


def without(what):
    """Remove the refusals whose text starts with these words."""
    real = capture.forbid_in_capture

    def forbid(text, fix):
        if not text.startswith(what):
            real(text, fix)

    return lambda: setattr(capture, "forbid_in_capture", forbid)


def arch():
    return fp4dispatch.gpus[0].arch


# --------------------------------------------------------------------------------------- plan, build, tune, check, log


def build_in_capture():
    real = routes.LayerSpec._build

    def build(self, *args):
        asked, capture.is_capturing = capture.is_capturing, lambda: False
        try:
            return real(self, *args)
        finally:
            capture.is_capturing = asked

    routes.LayerSpec._build = build


@case(build_in_capture, "was not refused")
def a_number_of_tokens_that_was_never_planned():
    layer = fp8()
    warmup(layer, tokens=[M])
    x = rows(12)
    refused(lambda: layer(x), "no plan for M=12", "fp4dispatch.warmup(model, tokens=[12])", "M = 16")
    warmup(layer, tokens=[12])
    graph, out = captured(lambda: layer(x))
    graph.replay()
    assert torch.equal(out, layer(x))


@case(without("choosing backends"), "cudaErrorStreamCapture|was not refused")
def a_layer_that_was_never_bound():
    layer, x = fp8(), rows()
    warmup(layer, tokens=[M])
    layer._forget()
    refused(lambda: layer(x), "choosing backends", "fp4dispatch.warmup(model, tokens=[...])")


@case(without("no plan for"), "was not refused")
def a_raw_operator_that_was_never_run():
    a, b = (formats.fp8_quantize(rows(m), "row") for m in (12, N))
    large = formats.fp8_quantize(rows(M), "row")
    ops.fp8_gemm(large.data, b.data, large.scale, b.scale, scaling="row", backend="cutlass")
    refused(
        lambda: ops.fp8_gemm(a.data, b.data, a.scale, b.scale, scaling="row", backend="cutlass"),
        "no plan for fp8_gemm M=12",
        "run it once, eagerly",
    )


@case(without("loading the kernel"), "was not refused")
def a_kernel_that_is_not_loaded():
    torch.cuda.init()
    jit.load("fp8_quantize", "any", arch())
    kernels._loaded.clear()
    refused(lambda: jit.load("fp8_quantize", "any", arch()), "loading the kernel fp8_quantize/any", "warmup")


@case(without("compiling"), "ToolchainError: .*FP4DISPATCH_JIT=0")
def a_kernel_that_is_not_compiled():
    torch.cuda.init()
    os.environ["FP4DISPATCH_JIT"] = "0"  # without the guard it is refused too, but by another
    target = installed().kernel("fp8_quantize").targets[0]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        refused(
            lambda: kernels.build("fp8_quantize", "any", target, cache=Cache(Path(folder) / "cache")),
            "compiling fp8_quantize/any",
            "fp4dispatch build",
        )


@case(without("building a cuDNN graph"), ".")
def a_cudnn_graph_that_is_not_built():
    backend = ask_cudnn()
    weights = fp8().weights()
    prepared = backend.prepare(weights)
    backend.plan(Problem("fp8_gemm", 1, N, K, "fp8", "row"), prepared)
    problem = Problem("fp8_gemm", 256, N, K, "fp8", "row")
    refused(lambda: backend.plan(problem, prepared), "building a cuDNN graph", "fp4dispatch.warmup")


@case(without("planning"), "was not refused")
def a_plan_of_cublaslt_that_is_not_made():
    backend, layer = registry.instance("cublaslt"), fp8("cublaslt")
    warmup(layer, tokens=[M])
    prepared, problem = backend.prepare(layer.weights()), Problem("fp8_gemm", 64, N, K, "fp8", "row")
    refused(lambda: backend.plan(problem, prepared), "planning fp8_gemm M=64", "fp4dispatch.warmup")


def loads(*_):
    raise AssertionError("it was loaded inside a capture")


@case(without("loading FlashInfer's kernels"), "loaded inside a capture")
def a_flashinfer_kernel_that_is_not_loaded():
    flashinfer.package.gemm_module = loads
    backend, layer = registry.instance("flashinfer_cudnn"), fp8()
    prepared, problem = backend.prepare(fp8_tensor(layer)), Problem("fp8_gemm", M, N, K, "fp8", "tensor")
    refused(lambda: backend.plan(problem, prepared), "loading FlashInfer's kernels", "fp4dispatch.warmup")


@case(without("compiling DeepGEMM"), "loaded inside a capture")
def a_deepgemm_kernel_that_is_not_compiled():
    backend = registry.instance("flashinfer_deepgemm")
    backend._gemm = loads
    weight = formats.fp8_quantize(rows(N), "block128")
    prepared = backend.prepare(LinearWeights("fp8_gemm", "block128", N, K, weight.data, weight.scale))
    jit.load("fp8_quantize", "any", arch())
    problem = Problem("fp8_gemm", M, N, K, "fp8", "block128")
    refused(lambda: backend.plan(problem, prepared), "compiling DeepGEMM", "fp4dispatch.warmup")


def fp8_tensor(layer):
    weight = formats.fp8_quantize(layer.weights().weight.float(), "tensor")
    return LinearWeights(
        "fp8_gemm", "tensor", N, K, weight.data, weight.scale, input_scale=torch.ones((), device="cuda")
    )


@case(without("the self-check of"), ".")
def a_backend_that_is_not_checked():
    torch.cuda.init()
    backend, system = registry.instance("cutlass"), choose.facts()
    refused(
        lambda: selfcheck.check(backend, "fp8_gemm", "row", "fp8", system, "cuda:0"),
        "the self-check of cutlass",
        "run one such layer eagerly",
    )


@case(without("tuning"), ".")
def tuning_in_capture():
    layer = fp8()
    warmup(layer, tokens=[M])
    refused(
        lambda: tuning.tune(layer.problem(M), layer.weights(), gpu=0), "tuning fp8_gemm M=16", "tokens=[16], tune=True"
    )


@case(without("warming up"), "was not refused")
def warmup_in_capture():
    layer = fp8()
    warmup(layer, tokens=[M])
    refused(lambda: warmup(layer, tokens=[M]), "warming up")


def w4a16():
    """Return a bound layer whose layout holds its weights exactly, or give up where w4a16 cannot run."""
    torch.cuda.init()
    problem = Problem("nvfp4_gemm", M, N, K, "bf16", "nvfp4", bias=True)
    reasons = registry.instance("w4a16").supports(problem, choose.facts())
    if reasons:
        raise CannotTry("; ".join(map(str, reasons)))
    torch.manual_seed(0)
    linear = nn.Linear(K, N).to("cuda", torch.bfloat16)
    layer = FP4Linear.from_linear(linear, backend="w4a16", keep_stored=True)
    layer.bind()
    return layer


@case(without("dropping canonical weights"), "CUDA error: .*captur")  # the comparison waits for the GPU
def weights_that_are_dropped_in_capture():
    layer = w4a16()
    refused(lambda: fp4dispatch.compact(layer), "dropping canonical weights", "compact(model), then capture")
    assert {"weight", "weight_scale"} <= set(layer._buffers)
    assert fp4dispatch.compact(layer) == N * K // 2 + N * K // 16


@case(without("unpacking weights that the layer dropped"), "was not refused")
def weights_that_are_unpacked_in_capture():
    """They would be in the graph's memory, and there only once it is replayed."""
    layer = w4a16()
    want = [t.clone().view(torch.uint8) for t in (layer.weight, layer.weight_scale)]
    assert fp4dispatch.compact(layer) > 0
    for what in (lambda: layer.weight, lambda: layer.weight_scale, layer.state_dict):
        refused(what, "unpacking weights", "read them before capturing")
        assert not {"weight", "weight_scale"} & set(layer._buffers)
    for tensor, wanted in zip((layer.weight, layer.weight_scale), want, strict=True):
        assert torch.equal(tensor.view(torch.uint8), wanted)


class Seen(logging.Handler):
    """Keeps every record, and whether a capture was going on."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.during, self.after = [], []

    def emit(self, record):
        capturing = torch.cuda.is_current_stream_capturing()
        (self.during if capturing else self.after).append(record.getMessage())


def listen():
    seen = Seen()
    LOG.addHandler(seen)
    LOG.setLevel(logging.DEBUG)
    return seen


@case(lambda: LOG.removeFilter(capture.may_log), "logged during a capture")
def a_warning_in_capture():
    layer, x = fp8(), rows()
    warmup(layer, tokens=[M])
    seen = listen()

    def work():
        LOG.warning("the folder cannot be written")
        return layer(x)

    captured(work)
    assert not seen.during, f"logged during a capture: {seen.during}"


def say_at_once():
    def once(key, level, text):
        if not log.said(key):
            log.count(key)
            LOG.log(level, "%s", text)

    log.once = once


@case(say_at_once, "was never said")
def a_choice_that_is_made_in_capture_is_said_after_it():
    layer, x = fp8(), rows()
    warmup(layer, tokens=[M])
    choose.reset()
    seen = listen()
    problem = Problem("fp8_gemm", M, N, K, "fp8", "row")

    def work():
        choose.select(problem, backend="cutlass")
        return layer(x)

    captured(work)
    assert not seen.during, f"logged during a capture: {seen.during}"
    choose.select(problem, backend="cutlass")
    assert any("cutlass" in line for line in seen.after), "what was not logged during the capture was never said"


# --------------------------------------------------------------------------------------------------- memory of a graph


@case(lambda: setattr(capture, "stream_is_capturing", lambda: False), "what an eager call had left")
def scratch_in_a_graph_is_the_graphs():
    layer, x, other = fp8(), rows(), rows(seed=2, scale=50)
    want = layer(x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(other)
    torch.cuda.synchronize()
    _, plan, _ = layer.bind().ready[M]
    quick = plan.state

    def slowly(*operands):
        torch.cuda._sleep(20 * MILLISECOND)
        quick.gemm(*operands)

    launching(layer, plan, in_two_calls(quick, slowly))
    graph, out = captured(lambda: layer(x), stream=stream)
    launching(layer, plan, quick)
    for _ in range(3):
        out.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        time.sleep(0.003)  # the graph has quantised and sleeps
        with torch.cuda.stream(stream):
            layer(other)
        torch.cuda.synchronize()
        assert torch.equal(out, want), "a replay read what an eager call had left in its scratch"


def in_two_calls(state, gemm):
    """The state of a plan of cutlass that quantises and multiplies in a call each, the second of them ``gemm``."""
    return dataclasses.replace(state, gemm=gemm, at_once=None, make_launch=cutlass._launch_fp8)


def launching(layer, plan, state):
    """Have the layer launch with this state from now on: what it had ready knows the one before."""
    plan.state = state
    layer.bind().ready.clear()


def one_arena_for_all_threads():
    scratch.threading = SimpleNamespace(get_ident=lambda: 0)


@case(one_arena_for_all_threads, "another thread")
def two_threads_on_one_stream():
    layer, x, other = fp8(), rows(), rows(seed=2, scale=50)
    want, want_other = layer(x), layer(other)
    torch.cuda.synchronize()
    _, plan, _ = layer.bind().ready[M]
    quick, quantised, done, results = plan.state, threading.Event(), threading.Event(), {}

    def gemm(*operands):
        if threading.current_thread().name == "first":
            quantised.set()
            done.wait(20)
        quick.gemm(*operands)

    def first():
        results["first"] = layer(x)

    def second():
        quantised.wait(20)
        results["second"] = layer(other)
        done.set()

    launching(layer, plan, in_two_calls(quick, gemm))
    threads = [threading.Thread(target=work, name=work.__name__) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert torch.equal(results["second"], want_other)
    assert torch.equal(results["first"], want), "a launch read what another thread had quantised"


def no_lock():
    real = cudnn_backend._Device.__init__

    def init(self, cudnn):
        real(self, cudnn)
        self.lock = contextlib.nullcontext()

    cudnn_backend._Device.__init__ = init


@case(no_lock, "on the stream of another thread")
def two_threads_with_one_cudnn_handle():
    ask_cudnn()
    layer, right, other = fp8("cudnn"), rows(), rows(seed=2)
    want = layer(right)
    layer(other)
    x = torch.zeros_like(right)
    layer(x)
    torch.cuda.synchronize()
    _, plan, _ = layer.bind().ready[M]
    execute, set_by_first, run_by_second = plan.state.executable.execute, threading.Event(), threading.Event()
    results = {}

    def slowly(*operands):
        if threading.current_thread().name == "first":
            set_by_first.set()
            run_by_second.wait(1)  # under the lock nobody comes
        execute(*operands)

    def first():
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(100 * MILLISECOND)
            x.copy_(right)
            results["first"] = layer(x)

    def second():
        set_by_first.wait(20)
        with torch.cuda.stream(torch.cuda.Stream()):
            layer(other)
        run_by_second.set()

    plan.state.executable.execute = slowly
    threads = [threading.Thread(target=work, name=work.__name__) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert torch.equal(results["first"], want), "a graph was executed on the stream of another thread"


def evict():
    """Caches that hold the last plan only, as an lru_cache of one would (flashinfer#1349)."""
    routes.READY_M = 0
    real = routes.LayerSpec._build

    def build(self, *args):
        made = real(self, *args)
        executables = [state.executables for state in registry.instance("cudnn")._devices.values()]
        for cache in (self._launches, routes._plans, *executables):
            for key in list(cache)[:-1]:
                del cache[key]
        return made

    routes.LayerSpec._build = build


@case(evict, "was dropped")
def other_shapes_are_planned_after_a_capture():
    backend = "cutlass"
    with contextlib.suppress(CannotTry):
        backend = ask_cudnn().name
    layer, x = fp8(backend), rows()
    held: list[weakref.ref] = []
    real = registry.instance(backend).run

    def run(plan, *operands):
        if capture.stream_is_capturing():
            held.append(weakref.ref(plan))
        real(plan, *operands)

    registry.instance(backend).run = run
    warmup(layer, tokens=[M])
    want = layer(x)
    graph, out = captured(lambda: layer(x))
    assert len(held) == 1
    warmup(layer, tokens=range(1, 200, 13))
    gc.collect()
    torch.cuda.empty_cache()
    assert held[0]() is not None, "a plan that a graph was captured with was dropped"
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)


def shared_workspace():
    """One workspace for everybody, allocated anew where another plan needs it (flashinfer#4666)."""
    box = {}

    def launch(executable, state, tensors):
        workspace = None
        if box.get("owner") is not executable:
            box.clear()
            box["owner"] = executable
            box["memory"] = torch.empty(max(executable.workspace_bytes, 1), dtype=torch.uint8, device="cuda")
        if executable.workspace_bytes:
            workspace = box["memory"].zero_()
        d = tensors[cudnn_backend.graphs.D]
        with state.lock:
            cudnn_backend.graphs.frontend().set_stream(
                handle=state.handle, stream=cudnn_backend._current_stream(d.device)
            )
            executable.execute(tensors, workspace, state.handle)

    cudnn_backend._launch = launch


@case(shared_workspace, "memory that is somebody else's|AssertionError")
def workspaces_grow_after_a_capture():
    ask_cudnn()
    layer, x = fp8("cudnn", n=4096, k=4096), rows(1, 4096)
    want = layer(x)
    need = layer.bind().ready[1][1].state.executable.workspace_bytes
    if not need:
        raise CannotTry("cuDNN's plan for M=1 N=K=4096 needs no workspace here")
    graph, out = captured(lambda: layer(x))
    for m in (2, 64, 512):
        layer(rows(m, 4096))
    torch.cuda.synchronize()
    gc.collect()
    bystanders = [torch.full((need,), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(64)]
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(bool((b == 0xA5).all()) for b in bystanders), "a replay wrote into memory that is somebody else's"
    assert torch.equal(out, want)


def quantised_by_address():
    """Keep the quantised activation of an address."""
    kept = {}

    def make_launch(s, weights=()):
        def launch(x, out, bias, w=weights):
            q, scale, workspace = s.scratch()
            if x.data_ptr() not in kept:
                s.quantize(x, q, scale, s.quantize_pdl)
                kept[x.data_ptr()] = (q.clone(), scale.clone())
            q, scale = kept[x.data_ptr()]
            s.gemm(q, w[0], scale, w[1], bias, out, workspace, s.gemm_pdl)

        return launch

    cutlass._AT_ONCE, cutlass._launch_fp8 = (), make_launch


@case(quantised_by_address, "an input that is gone")
def inputs_are_freed():
    layer, x = fp8(), rows()
    kept = [x * 2, x * 3]  # two addresses
    want = [layer(t) for t in kept]

    addresses = []

    def work():
        found = []
        for factor in (2, 3):
            t = x * factor
            addresses.append(t.data_ptr())
            found.append(layer(t))
            del t  # the next one gets its address
        return found

    graph, found = captured(work)
    if len(set(addresses)) > 1:
        raise CannotTry("the allocator did not give the memory of the first input to the second")
    del kept
    gc.collect()
    torch.cuda.empty_cache()
    poison = [torch.full((M, K), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(64)]
    for _ in range(3):
        for out in found:
            out.fill_(torch.nan)
        graph.replay()
        good = all(torch.equal(out, y) for out, y in zip(found, want, strict=True))
        assert good, "a replay computed from an input that is gone"
    assert len(poison) == 64


def plan_with_weights():
    """A plan that keeps the weights that it ran first."""
    real, first = cutlass.CutlassBackend.run, {}

    def run(self, plan, prepared, *operands):
        real(self, plan, first.setdefault(id(plan), prepared), *operands)

    cutlass.CutlassBackend.run = run


@case(plan_with_weights, "the other model")
def two_models_in_one_process():
    models = [nn.Sequential(fp8(seed=seed), nn.GELU(), fp8(n=K, k=N, seed=seed + 10)) for seed in (0, 1)]
    x = rows()
    with torch.inference_mode():
        exact = [
            nn.functional.linear(nn.functional.gelu(nn.functional.linear(x.float(), *dense(a))), *dense(b))
            for a, _, b in models
        ]
        for model in models:
            warmup(model, tokens=[M])
        pool = torch.cuda.graph_pool_handle()
        graphs = [captured(lambda model=model: model(x), pool=pool) for model in models]
        for index in (0, 1, 1, 0):
            graph, out = graphs[index]
            graph.replay()
            near = torch.nn.functional.cosine_similarity(out.float().flatten(), exact[index].flatten(), dim=0)
            assert float(near) > 0.99, f"model {index} computed with the weights of the other model"
            assert torch.equal(out, models[index](x))
    assert len({id(plan) for plan in routes._plans.values()}) == 2, "models of one shape have plans of their own"


def dense(layer):
    w = layer.weights()
    return formats.fp8_dequantize(w.weight, w.scale, w.scaling), layer.bias.float()


def forget_captures():
    real = QuantizedLinear.rebind

    def rebind(self, *args):
        for bound in self._state.bound.values():
            bound.captured = False
        return real(self, *args)

    QuantizedLinear.rebind = rebind


@case(forget_captures, "weights that are gone")
def another_backend_is_chosen_after_a_capture():
    # w8a8 multiplies the stored bytes; what comes after it pads them, so that the layout is a copy of its own.
    choose.exclude("w8a8", "fp8_gemm", "row", Reason("DENIED", "for this test"))
    layer, x = fp8(None, n=388, activation="fp8"), rows()
    want = layer(x)
    graph, out = captured(lambda: layer(x))
    name = layer.bind().spec.routes[layer.bind().spec.index(M)].backend
    choose.exclude(name, "fp8_gemm", "row", Reason("DENIED", "for this test"))
    layer.rebind()
    assert layer.bind().spec.routes[layer.bind().spec.index(M)].backend != name
    gc.collect()
    torch.cuda.synchronize()
    poison = [torch.full((rows_, K), 0x7F, dtype=torch.uint8, device="cuda") for rows_ in (392, 400) for _ in range(50)]
    out.fill_(0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want), "a replay read weights that are gone"
    assert len(poison) == 100
    assert layer(x).shape == want.shape


# ------------------------------------------------------------------------------------------------- everything at once


def one_arena_for_everything():
    one_arena_for_all_threads()
    scratch._stream = lambda index: 0


@case(one_arena_for_everything, "wrong results")
def many_streams_threads_and_graphs_at_once():
    layers = [fp8(seed=0), fp8("cublaslt", seed=1), FP4Linear.from_linear(nn.Linear(K, N).to("cuda", torch.bfloat16))]
    layers.append(fp8(seed=2, n=2 * N))
    xs = [rows(m, seed=m, scale=m) for m in (1, M, 33)]
    jobs = [(layer, x) for layer in layers for x in xs]
    want = [layer(x) for layer, x in jobs]
    torch.cuda.synchronize()
    graphs = [captured(lambda layer=layer, x=x: layer(x)) for layer, x in jobs]
    locks = [threading.Lock() for _ in jobs]
    wrong = []

    def work(index):
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), torch.inference_mode():
                for step in range(150):
                    i = (index * 5 + step) % len(jobs)
                    if step % 3:
                        got = jobs[i][0](jobs[i][1])
                        stream.synchronize()
                        good = torch.equal(got, want[i])
                    else:
                        with locks[i]:
                            graphs[i][0].replay()
                            stream.synchronize()
                            good = torch.equal(graphs[i][1], want[i])
                    if not good:
                        wrong.append((i, step))
        except Exception as error:  # a thread must not die unseen
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"wrong results: {wrong[:5]} of {len(wrong)}"


@case(torch.cuda.init, "the child failed")
def a_fork_after_import():
    """Importing everything has left CUDA alone: a child process can use it, and so can the parent after it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if _works() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"the child failed with status {status}"
    assert _works()


def _works():
    layer, x = fp8(), rows()
    w, bias = dense(layer)
    near = torch.nn.functional.cosine_similarity(layer(x).float(), nn.functional.linear(x.float(), w, bias))
    return bool((near > 0.99).all())


# ----------------------------------------------------------------------------------------------------------------- run


def main(argv):
    name, *flags = argv
    if not fp4dispatch.gpus or arch().sm not in ("sm_90", "sm_100", "sm_103", "sm_120", "sm_121"):
        print("needs a GPU that the cutlass backend runs FP8 on")
        return 5
    chosen = CASES[name]
    if flags == ["--without"]:
        chosen.remove()
    try:
        chosen.body()
    except CannotTry as reason:
        print(f"cannot be tried here: {reason}")
        return 5
    except Exception as error:
        traceback.print_exc()
        print(f"FAILED {type(error).__name__}: {error}", flush=True)
        return 3
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # CUDA may be in no state to be torn down
