"""The cudnn backend without a GPU: its graphs interpreted on the CPU, and built by cuDNN where that is installed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import QuantizedActivation
from fp4dispatch.backends.libraries import cudnn as backend_module
from fp4dispatch.backends.libraries import cudnn_graphs as graphs
from fp4dispatch.backends.libraries.cudnn import CudnnBackend, m_bucket
from fp4dispatch.backends.libraries.fence import Fence
from fp4dispatch.errors import BackendUnsupportedError, CaptureError, InputError
from fp4dispatch.machine import capture
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.system import System
from fp4dispatch.run import routes
from tests import contract
from tests.cudnn_interpreter import Cudnn

RTX = System.fake("12.0", cuda="13.0", torch="2.11", cudnn="9.23.1", cudnn_frontend="1.25")


@pytest.fixture
def install(monkeypatch):
    """Return a function that puts a module in the place of cuDNN and gives a fresh backend that runs on the CPU."""

    def put(module: Cudnn) -> CudnnBackend:
        monkeypatch.setattr(graphs, "frontend", lambda: module)
        monkeypatch.setattr(backend_module, "_on", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(backend_module, "_current_stream", lambda device: threading.get_ident())
        return CudnnBackend()

    return put


def _cases():
    backend = CudnnBackend()
    return [case for case in contract.cases(backend) if not contract.unsupported(backend, case, RTX)]


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_the_graphs_compute_what_the_reference_does(case, install):
    contract.check(install(Cudnn()), case)


def test_every_claimed_format_is_among_the_cases():
    assert {(c.scaling, c.out_dtype) for c in _cases()} == {
        (s, d) for s in ("nvfp4", "tensor", "row") for d in ("bfloat16", "float16")
    }
    assert {c.shards for c in _cases() if c.scaling == "nvfp4"} == {1, 3}
    assert {c.bias for c in _cases()} == {True, False}
    assert {c.static for c in _cases()} == {True, False}


@pytest.mark.parametrize("scaling", ["nvfp4", "tensor", "row"])
def test_float32_output_is_not_rounded_on_the_way(scaling, install):
    op, activation = ("nvfp4_gemm", "nvfp4") if scaling == "nvfp4" else ("fp8_gemm", "fp8")
    contract.check(install(Cudnn()), contract.Case(op, scaling, activation, 33, 72, 96, "float32", True))


# ------------------------------------------------------------------------------------------------------ M and its plans


def test_buckets_of_m():
    assert [m_bucket(m) for m in (1, 2, 3, 5, 16, 17, 33, 128, 129, 257, 1025, 32768)] == [
        *(1, 2, 4, 8, 16, 32, 48, 128, 144, 288, 1152, 32768)
    ]
    buckets = [m_bucket(m) for m in range(1, 40000)]
    assert all(bucket >= m for m, bucket in enumerate(buckets, 1))
    assert buckets == sorted(buckets)
    assert all(m_bucket(bucket) == bucket for bucket in set(buckets))
    assert all(bucket <= 1.125 * m for m, bucket in enumerate(buckets, 1) if m >= 128)
    assert len({b for b in buckets if b <= 32768}) == 76


def _layer(backend, scaling="nvfp4", n=72, k=96, seed=1, static=False):
    op, activation = ("nvfp4_gemm", "nvfp4") if scaling == "nvfp4" else ("fp8_gemm", "fp8")
    case = contract.Case(op, scaling, activation, 1, n, k, "bfloat16", False, static=static)
    weights = contract.make_weights(case, "cpu", seed)
    return case, weights, backend.prepare(weights)


def _run(backend, case, weights, prepared, m, seed=3):
    """Run M tokens and return the result and what it should be."""
    case = replace(case, m=m)
    plan = routes.plan_for(backend, case.problem(), prepared)
    x, a = contract.make_activation(case, weights, "cpu", seed)
    out = torch.full((m, case.n), float("nan"), dtype=torch.bfloat16)
    backend.run(plan, prepared, x, out)
    return out, (a @ contract.dequantised(weights).t()).to(torch.bfloat16)


@pytest.fixture(autouse=True)
def no_shared_plans(monkeypatch):
    monkeypatch.setattr(routes, "_plans", {})


@pytest.mark.parametrize("scaling", ["nvfp4", "tensor"])
def test_no_plan_runs_for_another_m_than_its_graph_was_built_for(scaling, install):
    """flashinfer#3140 and #3260: a plan of one bucket applied to the graph of another."""
    module = Cudnn()
    backend = install(module)
    layer = _layer(backend, scaling)
    tokens = [1, 200, 7, 8, 129, 1, 17, 128, 130, 2, 200, 5, 16]
    for m in tokens:
        out, expected = _run(backend, *layer, m)
        assert module.launches[-1][0] == m_bucket(m)
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)
    assert sorted(graph.m for graph in module.graphs) == sorted({m_bucket(m) for m in tokens})


def test_a_graph_refuses_tensors_of_another_size(install):
    backend = install(Cudnn())
    case, _weights, prepared = _layer(backend)
    plan = backend.plan(replace(case, m=16).problem(), prepared)
    small = backend_module._scratch(plan.state.executable.key, prepared)
    large = backend_module._scratch(plan.state.executable.key._replace(m=32), prepared)
    state = backend._devices[torch.device("cpu")]
    plan.state.executable.execute(small, None, state.handle)
    for uid in (graphs.A, graphs.D):
        with pytest.raises(InputError, match=f"tensor {uid} of .*need .* elements"):
            plan.state.executable.execute(small | {uid: large[uid]}, None, state.handle)
    del small[graphs.A_SF]
    with pytest.raises(InputError, match=r"tensor 3 .* is None"):
        plan.state.executable.execute(small, None, state.handle)


def test_layers_of_one_shape_share_graphs_whatever_their_alpha(install):
    """flashinfer#2450, #1887: alpha was part of a cache key, and each request grew the cache."""
    module = Cudnn()
    backend = install(module)
    layers = [_layer(backend, seed=seed) for seed in range(5)]
    for layer in layers * 2:
        out, expected = _run(backend, *layer, 16)
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)
    assert len({float(weights.global_scale) for _, weights, _ in layers}) == 5
    assert len(module.graphs) == 1


def test_graphs_are_never_dropped(install):
    """flashinfer#1349: an evicted graph, still used by a captured CUDA graph, is a segfault at replay."""
    backend = install(Cudnn())
    case, _weights, prepared = _layer(backend, n=16, k=32)
    plans = {m: backend.plan(replace(case, m=m).problem(), prepared) for m in range(1, 2000, 7)}
    for m, plan in plans.items():
        assert backend.plan(replace(case, m=m).problem(), prepared).state.executable is plan.state.executable


def test_a_released_graph_is_forgotten_unless_a_plan_holds_it(install):
    """What tuning built for a candidate that nobody runs goes; a plan of a layer keeps its own alive."""
    backend = install(Cudnn())
    case, _weights, prepared = _layer(backend)
    kept, tried = (backend.plan(case.problem(), prepared) for _ in range(2))
    assert kept.state.executable is tried.state.executable
    backend.release(tried)
    assert kept.state.executable.key.m == m_bucket(case.m)
    fresh = backend.plan(case.problem(), prepared)
    assert fresh.state.executable is not tried.state.executable
    backend.release(tried)  # not the one that is remembered now
    assert backend.plan(case.problem(), prepared).state.executable is fresh.state.executable


def test_planning_is_refused_during_capture(install, monkeypatch):
    module = Cudnn()
    backend = install(module)
    case, _weights, prepared = _layer(backend)
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="building a cuDNN graph for nvfp4_gemm M=1"):
        backend.plan(case.problem(), prepared)
    assert module.graphs == []


# ------------------------------------------------------------------------------------------------ candidates, workspace


def test_the_first_candidate_that_builds_and_runs_is_taken(install):
    module = Cudnn(count=4, does_not_build=(0,), does_not_run=(1,))
    backend = install(module)
    out, expected = _run(backend, *_layer(backend), 4)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)
    assert {index for _, index, _ in module.launches} == {2}


def test_the_frontends_own_engines_are_passed_over(install):
    module = Cudnn(count=1, python_plans=2)
    backend = install(module)
    _run(backend, *_layer(backend), 4)
    assert {index for _, index, _ in module.launches} == {2}


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Cudnn(count=0), r"cuDNN 92301 has no .*plan for GraphKey\(op='nvfp4_gemm', m=1.*No valid engine configs"),
        (Cudnn(does_not_build=(0, 1)), r"plan 0: .*Plan index 0 is invalid; plan 1: .*Plan index 1 is invalid"),
        (Cudnn(does_not_run=(0, 1)), r"built, but did not run: eng0: eng0 failed to launch; eng1: eng1 failed"),
    ],
)
def test_no_plan_is_a_refusal_with_every_reason(module, says, install):
    backend = install(module)
    case, _weights, prepared = _layer(backend)
    with pytest.raises(BackendUnsupportedError, match=says):
        backend.plan(case.problem(), prepared)


def test_the_workspace_is_zero_before_every_launch(install):
    """Split-K semaphores count from zero (vllm#55571); the interpreter checks, then fills it with ones."""
    module = Cudnn(workspace_bytes=512)
    backend = install(module)
    layer = _layer(backend)
    for _ in range(3):
        out, expected = _run(backend, *layer, 16)
        torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)
    assert len(module.launches) == 4


def test_threads_take_turns_on_the_handle_and_keep_their_stream(install):
    module = Cudnn()
    backend = install(module)
    layer = _layer(backend)
    _run(backend, *layer, 16)
    wrong, streams = [], set()

    def work():
        streams.add(threading.get_ident())
        for _ in range(10):
            out, expected = _run(backend, *layer, 16)
            if (out - expected).abs().max() > 0.1 * expected.abs().max():
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(module.launches) == 42
    assert {stream for _, _, stream in module.launches} == streams | {threading.get_ident()}


# ------------------------------------------------------------------------------------------------------------- operands


def test_garbage_in_the_padding_of_raw_scales_reaches_nothing(install):
    """vllm#48898: padding of block scales that was left uninitialised turned real rows into garbage."""
    backend = install(Cudnn())
    case = contract.Case("nvfp4_gemm", "nvfp4", "nvfp4", 5, 72, 48, "bfloat16", False, raw="128x4")
    weights = contract.make_weights(case, "cpu", 1)
    prepared = backend.prepare(weights)
    x, a = contract.make_activation(case, weights, "cpu", 3)
    real = formats.to_128x4(torch.ones(5, 3, dtype=torch.uint8)).bool()
    nan = torch.full_like(x.scale.view(torch.uint8), 0x7F)
    poisoned = torch.where(real, x.scale.view(torch.uint8), nan).view(torch.float8_e4m3fn)
    out = torch.empty(5, 72, dtype=torch.bfloat16)
    plan = backend.plan(case.problem(), prepared)
    backend.run(plan, prepared, QuantizedActivation(x.data, poisoned, x.global_scale), out)
    expected = (a @ contract.dequantised(weights).t()).to(torch.bfloat16)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-6)


def test_scales_per_token_are_refused_where_the_layer_has_a_static_one(install):
    backend = install(Cudnn())
    case, _weights, prepared = _layer(backend, "tensor", static=True)
    plan = backend.plan(replace(case, m=3).problem(), prepared)
    x = QuantizedActivation(*formats.fp8_quantize(torch.randn(3, 96), "row"))
    with pytest.raises(InputError, match="a_scale has 3 elements"):
        backend.run(plan, prepared, x, torch.empty(3, 72, dtype=torch.bfloat16))


def test_prepare_copies_nothing_that_fits():
    backend = CudnnBackend()
    for scaling in ("tensor", "row", "nvfp4"):
        _case, weights, prepared = _layer(backend, scaling, 128, 128)
        assert prepared.tensors[0].data_ptr() == weights.weight.data_ptr()
        scale = weights.global_scale if scaling == "nvfp4" else weights.scale
        assert prepared.tensors[1].data_ptr() == scale.data_ptr()


def test_operands_at_odd_addresses_are_moved(install, monkeypatch):
    module = Cudnn()
    backend = install(module)
    case, weights, prepared = _layer(backend, n=80)
    plan = backend.plan(replace(case, m=16).problem(), prepared)
    seen = {}
    execute = plan.state.executable.execute
    monkeypatch.setattr(plan.state.executable, "execute", lambda t, w, h: (seen.update(t), execute(t, w, h)))
    x, _ = contract.make_activation(replace(case, m=16, raw="linear"), weights, "cpu", 3)
    odd = torch.empty(x.data.numel() + 1, dtype=torch.uint8)[1:].view(x.data.shape).copy_(x.data)
    out = torch.empty(16 * 80 + 1, dtype=torch.bfloat16)[1:].view(16, 80)
    backend.run(plan, prepared, QuantizedActivation(odd, x.scale, x.global_scale), out)
    assert {uid for uid, tensor in seen.items() if tensor.data_ptr() % 16} == set()
    assert odd.data_ptr() % 16
    assert out.data_ptr() % 16
    torch.testing.assert_close(out, _run(backend, case, weights, prepared, 16)[1], rtol=2**-6, atol=2**-6)


# ----------------------------------------------------------------------------------------------------- loading, support


def test_two_cudnn_versions_in_one_process_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", Cudnn(version=91900))
    monkeypatch.setattr(_system, "current", lambda: System.fake("12.0", cudnn="9.23.1", cudnn_path="/x/libcudnn.so.9"))
    graphs.frontend.cache_clear()
    with pytest.raises(BackendUnsupportedError, match=r"uses cuDNN 9\.19\.0, but cuDNN 9\.23\.1 is loaded from /x/"):
        graphs.frontend()
    monkeypatch.setattr(_system, "current", lambda: System.fake("12.0", cudnn="9.19.0"))
    assert graphs.frontend().backend_version() == 91900
    graphs.frontend.cache_clear()


def test_a_frontend_that_cannot_load_cudnn_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    graphs.frontend.cache_clear()
    with pytest.raises(BackendUnsupportedError, match=r"cannot load cuDNN: .*\n  fix: pip install"):
        graphs.frontend()


def test_the_frontend_is_not_imported_before_it_is_needed():
    code = (
        "import sys, fp4dispatch; from fp4dispatch.backends import registry; b = registry.instance('cudnn'); "
        "from fp4dispatch.machine.system import System; from fp4dispatch.problem import Problem; "
        "b.supports(Problem('nvfp4_gemm', 1, 128, 128), System.fake('12.0')); sys.exit('cudnn' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_is_registered():
    assert isinstance(registry.instance("cudnn"), CudnnBackend)


# ------------------------------------------------------------------------------------------ cuDNN itself, without a GPU

ROOT = Path(__file__).parents[2]


def _build(*arguments: str) -> list[str]:
    """Build graphs with the real cuDNN, in a process of its own: it aborts where a library that it wants is missing."""
    if torch.cuda.is_available():
        pytest.skip("cuDNN loads what it compiles onto the GPU that is visible, and fails where that is another arch")
    done = subprocess.run(
        [sys.executable, "-m", "tests.cudnn_deviceless", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("built", "refused"))]
    if not lines:
        pytest.skip(f"cuDNN cannot build graphs here: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    assert done.returncode == 0, done.stderr
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["10.0", "10.3", "11.0", "12.0", "12.1"])
def test_cudnn_compiles_every_nvfp4_graph_without_the_gpu(arch):
    lines = _build("nvfp4_gemm", arch)
    assert len(lines) == 12
    assert [line for line in lines if not line.startswith("built")] == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"])
def test_cudnn_compiles_every_fp8_graph_without_the_gpu(arch):
    lines = _build("fp8_gemm", arch)
    assert len(lines) == 24
    assert [line for line in lines if not line.startswith("built")] == []


@pytest.mark.parametrize(("op", "arch"), [("nvfp4_gemm", "9.0"), ("fp8_gemm", "8.0")])
def test_cudnn_refuses_what_the_hardware_lacks(op, arch):
    assert {line.split()[0] for line in _build(op, arch)} == {"refused"}


def test_a_fence_lies_before_every_launch(install, monkeypatch):
    """Some of cuDNN's kernels do not wait for the quantiser (tests/gpu/test_backend_cudnn.py has the race)."""
    order = []
    monkeypatch.setattr(Fence, "__call__", lambda self, like: order.append("fence"))
    module = Cudnn()
    backend = install(module)
    case, weights, prepared = _layer(backend)
    plan = backend.plan(replace(case, m=16).problem(), prepared)
    execute = plan.state.executable.execute
    monkeypatch.setattr(
        plan.state.executable, "execute", lambda *arguments: (order.append("launch"), execute(*arguments))
    )
    order.clear()
    x, _ = contract.make_activation(replace(case, m=16, raw="linear"), weights, "cpu", 3)
    out = torch.empty(16, case.n, dtype=torch.bfloat16)
    for _ in range(2):
        backend.run(plan, prepared, QuantizedActivation(x.data, x.scale, x.global_scale), out)
    assert order == ["fence", "launch"] * 2


def test_a_fence_is_one_operation_on_memory_of_its_own():
    fence, x = Fence(), torch.randn(3)
    before = x.clone()
    with torch.inference_mode():
        fence(x)
    fence(x)
    assert torch.equal(x, before)
    assert len(fence._held) == 1
