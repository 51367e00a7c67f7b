"""What the CUTLASS backend hands to its kernels: kernels in plain torch stand in for the compiled ones, on the CPU."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.activations import swiglu as silu_times_up
from fp4dispatch.backends.base import LinearWeights, Plan, QuantizedActivation
from fp4dispatch.backends.own import compiled, cutlass, scratch, swiglu
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.errors import CaptureError, InputError
from fp4dispatch.machine import capture
from fp4dispatch.problem import Problem
from tests import pdl_fake, swiglu_fake

E4M3 = torch.float8_e4m3fn
STREAM = [7]


class Gemm:
    """Multiplies as its namesakes in csrc/ do, and checks what TMA needs; remembers the addresses of its scratch."""

    def __init__(self, workspace=48):
        self.workspace, self.calls, self.at_once = workspace, [], 0

    def workspace_size(self, m, n, k):
        return self.workspace

    def _aligned(self, *tensors):
        for tensor in tensors:
            assert tensor.data_ptr() % 16 == 0
            assert tensor.stride(-1) == 1

    def fp8_gemm(self, a, b, a_scale, b_scale, bias, d, workspace, pdl):
        self._aligned(a, b, d)
        assert (workspace.dtype, workspace.numel()) == (torch.uint8, self.workspace)
        self.calls.append((a.data_ptr(), a_scale.data_ptr(), workspace.data_ptr(), pdl))
        if a_scale.ndim == 2:
            assert a_scale.stride(0) == 1
            assert a_scale.stride(1) % 4 == 0
            left = formats.fp8_dequantize(a, a_scale.contiguous(), "1x128")
            right = formats.fp8_dequantize(b, b_scale, "block128")
        else:
            left = a.float() * a_scale.reshape(-1, 1)
            right = b.float() * b_scale.reshape(-1, 1)
        self._store(left, right, bias, d)

    def fp8_quantize_gemm(self, quantize, x, a, b, a_scale, b_scale, bias, d, quantize_pdl, pdl):
        self.at_once += 1
        assert quantize_pdl
        quantize(x, a, a_scale, quantize_pdl)
        self.fp8_gemm(a, b, a_scale, b_scale, bias, d, torch.empty(self.workspace, dtype=torch.uint8), pdl)

    def nvfp4_gemm(self, a, b, a_sf, b_sf, alpha, bias, d, workspace, pdl):
        self._aligned(a, b, d)
        self.calls.append((a.data_ptr(), a_sf.data_ptr(), workspace.data_ptr(), pdl))
        one = torch.ones(())
        left = formats.nvfp4_dequantize(a, a_sf, one, sf_layout="128x4")
        right = formats.nvfp4_dequantize(b, b_sf, one, sf_layout="128x4")
        self._store(left, right * alpha.reshape(-1, 1), bias, d)

    def _store(self, left, right, bias, d):
        assert bias is None or (bias.dtype == d.dtype and bias.is_contiguous() and bias.shape == (d.shape[1],))
        d.copy_(left @ right.t() + (0 if bias is None else bias.float()))


class Quantize:
    def fp8_quantize_row(self, x, q, scale, pdl):
        self._store(formats.fp8_quantize(x, "row"), q, scale)

    def fp8_quantize_1x128(self, x, q, scale, pdl):
        self._store(formats.fp8_quantize(x, "1x128"), q, scale)

    def fp8_quantize_tensor(self, x, q, scale, pdl):
        q.copy_(formats.fp8_quantize(x, "tensor", scale.reshape(())).data)

    def nvfp4_quantize(self, x, global_scale, q, sf, pdl):
        made = formats.nvfp4_quantize(x, global_scale, sf_layout="128x4")
        q.copy_(made.data)
        sf.view(torch.uint8).copy_(made.sf.view(torch.uint8))

    def _store(self, made, q, scale):
        q.view(torch.uint8).copy_(made.data.view(torch.uint8))
        scale.copy_(made.scale)


@pytest.fixture
def gemm(monkeypatch):
    """Kernels in torch, on a machine that seems to have an H200."""
    made = Gemm()
    modules = {"fp8_quantize": Quantize(), "nvfp4_quantize": Quantize()}

    def load(kernel, variant, arch):
        return SimpleNamespace(module=modules.get(kernel, made), pdl_allowed=kernel in modules)

    monkeypatch.setattr(compiled.jit, "load", load)
    pdl_fake.passes(monkeypatch)
    tile = SimpleNamespace(kernel="gemm", builds=dict.fromkeys(("bfloat16", "float16"), "any"))
    monkeypatch.setattr(cutlass, "tile_for", lambda *args: tile)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (9, 0))
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: False)
    monkeypatch.setattr(scratch, "_stream", lambda index: STREAM[0])
    monkeypatch.setattr(scratch, "_arenas", {})
    STREAM[0] = 7
    return made


def weights(scaling, n, k, static=None):
    torch.manual_seed(n + k)
    dense = torch.randn(n, k)
    if scaling == "nvfp4":
        q = formats.nvfp4_quantize(dense)
        return LinearWeights(
            "nvfp4_gemm", "nvfp4", n, k, q.data, q.sf, q.global_scale.reshape(1), (n,), input_scale=static
        )
    q = formats.fp8_quantize(dense, scaling)
    return LinearWeights("fp8_gemm", scaling, n, k, q.data, q.scale, input_scale=static)


def planned(w, m, bias=False):
    backend = cutlass.CutlassBackend()
    prepared = backend.prepare(w)
    problem = Problem(w.op, m, w.n, w.k, "nvfp4" if w.op == "nvfp4_gemm" else "fp8", w.scaling, bias=bias)
    return backend, prepared, backend.plan(problem, prepared)


def expected(w, x, bias, m):
    reference = ReferenceBackend()
    activation = "nvfp4" if w.op == "nvfp4_gemm" else "fp8"
    plan = Plan("reference", Problem(w.op, m, w.n, w.k, activation, w.scaling, bias=bias is not None))
    out = torch.empty(m, w.n, dtype=torch.bfloat16)
    reference.run(plan, reference.prepare(w), x, out, bias)
    return out


SIZES = [(64, 128), (72, 272), (100, 48), (60, 200)]  # the last two are padded


@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("m", [1, 5, 130])
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("scaling", ["tensor", "row", "block128", "nvfp4"])
@pytest.mark.parametrize("at_once", [False, True])
def test_it_computes_what_the_reference_does(gemm, at_once, scaling, n, k, m, static, bias, monkeypatch):
    monkeypatch.setattr(cutlass, "_AT_ONCE", ("gemm",) if at_once else ())
    if (scaling == "block128" and static) or (scaling == "nvfp4" and k % 16):
        pytest.skip("no such layer")
    w = weights(scaling, n, k, torch.tensor(0.01) if static else None)
    backend, prepared, plan = planned(w, m, bias is not None)
    values = None if bias is None else torch.randn(n, dtype=bias)
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(m, k, dtype=torch.bfloat16)
        out = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
        backend.run(plan, prepared, x, out, values)
        torch.testing.assert_close(out, expected(w, x, values, m), rtol=0.02, atol=0.02)
    assert all(not pdl for *_, pdl in gemm.calls)  # the GEMM is not proven here, the quantiser is
    assert gemm.at_once == (2 if at_once and scaling != "nvfp4" else 0)
    assert len(gemm.calls) == 2


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("scaling", "static", "function"),
    [
        ("tensor", True, "fp8_swiglu_tensor"),
        ("tensor", False, "fp8_swiglu_row"),
        ("row", False, "fp8_swiglu_row"),
        ("block128", False, "fp8_swiglu_1x128"),
        ("nvfp4", False, None),
    ],
)
def test_swiglu_takes_the_place_of_an_fp8_quantiser(gemm, at_once, scaling, static, function, monkeypatch):
    monkeypatch.setattr(cutlass, "_AT_ONCE", ("gemm",) if at_once else ())
    launched, load = [], compiled.jit.load
    module = swiglu_fake.module(launched)

    def load_too(kernel, variant, arch):
        if kernel == swiglu.ROWS:
            return SimpleNamespace(module=module, pdl_allowed=True)
        return load(kernel, variant, arch)

    monkeypatch.setattr(compiled.jit, "load", load_too)
    monkeypatch.setattr(swiglu, "_known", {})
    backend, prepared, plan = planned(weights(scaling, 64, 128, torch.tensor(0.01) if static else None), 5)
    launch = backend.swiglu(plan, prepared)
    if function is None:
        assert launch is None
        return
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    want, got = (torch.full((5, 64), torch.nan, dtype=torch.bfloat16) for _ in range(2))
    backend.run(plan, prepared, silu_times_up(x), want)
    launch(x, got, None)
    assert torch.equal(got, want)
    assert launched == [(function, 5, 256)]
    assert len(gemm.calls) == 2


@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parents[2] / "csrc" / "cutlass_gemm").glob("fp8_gemm_sm*.cu")), ids=lambda f: f.stem
)
def test_one_call_does_both_where_the_kernel_has_it(file):
    assert (file.stem in cutlass._AT_ONCE) == ("FUNC(fp8_quantize_gemm," in file.read_text())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("n", "k"), [SIZES[0], SIZES[-1]])
@pytest.mark.parametrize("scaling", ["tensor", "row", "block128", "nvfp4"])
@pytest.mark.parametrize("at_once", [False, True])
def test_what_a_layer_calls_is_run_without_the_tests(gemm, at_once, scaling, n, k, static, bias, monkeypatch):
    monkeypatch.setattr(cutlass, "_AT_ONCE", ("gemm",) if at_once else ())
    if (scaling == "block128" and static) or (scaling == "nvfp4" and k % 16):
        pytest.skip("no such layer")
    m, w = 5, weights(scaling, n, k, torch.tensor(0.01) if static else None)
    backend, prepared, plan = planned(w, m, bias)
    ready, values = backend.ready(plan, prepared), torch.randn(n, dtype=torch.bfloat16) if bias else None
    asked = []
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: asked.append(1))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(m, k, dtype=torch.bfloat16)
        out, want = torch.full((2, m, n), torch.nan, dtype=torch.bfloat16)
        ready(x, out, values)
        assert bool(asked) == ((n, k) != SIZES[0]), "who calls it has asked"
        backend.run(plan, prepared, x, want, values)
        assert torch.equal(out, want)
        del asked[:]
    assert len({q for q, *_ in gemm.calls}) == 1, "one arena"


def test_operands_that_kernels_cannot_read_are_copied(gemm):
    w = weights("row", 64, 128)
    backend, prepared, plan = planned(w, 4)
    x = torch.randn(4 * 128 + 1, dtype=torch.bfloat16)[1:].view(4, 128)
    strided = torch.randn(128, 4, dtype=torch.bfloat16).t()
    odd = torch.empty(4 * 64 + 1, dtype=torch.bfloat16)[1:].view(4, 64)
    for rows, out in ((x, torch.empty(4, 64, dtype=torch.bfloat16)), (strided, odd), (x, odd)):
        backend.run(plan, prepared, rows, out)
        torch.testing.assert_close(out, expected(w, rows.contiguous(), None, 4), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("scaling", ["row", "block128", "nvfp4"])
def test_raw_operands(gemm, scaling):
    w = weights(scaling, 64, 128)
    backend, prepared, plan = planned(w, 4)
    x = torch.randn(4, 128)
    made = (
        formats.nvfp4_quantize(x)
        if scaling == "nvfp4"
        else formats.fp8_quantize(x, "1x128" if scaling == "block128" else scaling)
    )
    out = torch.empty(4, 64, dtype=torch.bfloat16)
    backend.run(plan, prepared, QuantizedActivation(*made), out)
    torch.testing.assert_close(out, expected(w, QuantizedActivation(*made), None, 4), rtol=0.02, atol=0.02)


def test_a_plan_is_for_its_m_alone(gemm):
    backend, prepared, plan = planned(weights("row", 64, 128), 4)
    with pytest.raises(InputError, match="the plan is for M=4"):
        backend.run(plan, prepared, torch.randn(5, 128).bfloat16(), torch.empty(5, 64).bfloat16())


# ------------------------------------------------------------------------------------------------------------- scratch


def launch(backend, prepared, plan, m=4, k=128, n=64):
    backend.run(plan, prepared, torch.randn(m, k).bfloat16(), torch.empty(m, n).bfloat16())


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_eager_launches_of_a_thread_on_a_stream_share_one_arena(gemm):
    first, second = planned(weights("row", 64, 128), 4), planned(weights("row", 64, 128), 5)
    for _ in range(3):
        launch(*first)
        launch(*second, m=5)
    assert len({q for q, *_ in gemm.calls}) == 1
    assert len(scratch._arenas) == 1
    for q, scale, workspace, _ in gemm.calls:
        assert len({q, scale, workspace}) == 3


def test_other_threads_and_streams_have_their_own(gemm):
    subject = planned(weights("row", 64, 128), 4)
    launch(*subject)
    STREAM[0] = 8
    launch(*subject)
    STREAM[0] = 7
    held = threading.Event()
    in_thread(lambda: (launch(*subject), held.set()))
    launch(*subject)
    q = [call[0] for call in gemm.calls]
    assert len(set(q)) == 3
    assert q[0] == q[3]


def test_parts_do_not_overlap():
    made = scratch.Scratch(
        torch.device("cpu"),
        [scratch.Part((3, 100), E4M3), scratch.Part((7,), torch.float32), scratch.Part((0,), torch.uint8)],
    )
    assert made._fits
    tensors = made._cut((1, 2))
    spans = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert [tuple(t.shape) for t in tensors] == [(3, 100), (7,), (0,)]
    assert all(t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors)
    scratch._arenas.clear()


def test_a_capture_never_sees_the_arena(gemm, monkeypatch):
    subject = planned(weights("row", 64, 128), 4)
    launch(*subject)
    (arena,) = scratch._arenas.values()
    monkeypatch.setattr(capture, "stream_is_capturing", lambda: True)
    made = subject[2].state.scratch
    for tensor in [t for _ in range(3) for t in made()]:
        assert not arena.data_ptr() <= tensor.data_ptr() < arena.data_ptr() + arena.numel()
    kept = [made()[0] for _ in range(3)]
    assert len({t.data_ptr() for t in kept}) == 3
    monkeypatch.setattr(capture, "is_capturing", lambda: True)
    with pytest.raises(CaptureError, match="scratch memory"):
        made._arena((0, 99))


def test_the_arena_never_grows(gemm):
    k = 1 << 14
    m = scratch.ARENA_BYTES // k + 1
    small, large = planned(weights("row", 64, k), 4), planned(weights("row", 64, k), m)
    launch(*small, k=k)
    before = {name: arena.data_ptr() for name, arena in scratch._arenas.items()}
    assert not large[2].state.scratch._fits
    launch(*large, m=m, k=k)
    backend, prepared, plan = large
    backend.ready(plan, prepared)(torch.randn(m, k).bfloat16(), torch.empty(m, 64).bfloat16(), None)
    assert {name: arena.data_ptr() for name, arena in scratch._arenas.items()} == before
    assert not large[2].state.scratch._found


def test_memory_made_under_inference_mode_serves_outside_too(gemm):
    subject = planned(weights("row", 64, 128), 4)
    with torch.inference_mode():
        launch(*subject)
    launch(*subject)
    assert not any(t.is_inference() for t in scratch._arenas.values())


def test_the_arena_is_of_no_graphs_pool(gemm, monkeypatch):
    """Inside torch.compile's warm-up of a CUDA graph, what the calling thread allocates belongs to the graph."""
    allocate, threads = torch.empty, []

    def watched(*size, **options):
        threads.append((size, threading.get_ident()))
        return allocate(*size, **options)

    subject = planned(weights("row", 64, 128), 4)
    monkeypatch.setattr(scratch.torch, "empty", watched)
    launch(*subject)
    by = [thread for size, thread in threads if size == (scratch.ARENA_BYTES,)]
    assert len(by) == 1
    assert by[0] != threading.get_ident()


def test_an_arena_that_cannot_be_had_is_the_allocators_error(gemm, monkeypatch):
    def full(*size, **options):
        raise torch.OutOfMemoryError("none left")

    subject = planned(weights("row", 64, 128), 4)
    made = subject[2].state.scratch
    monkeypatch.setattr(scratch.torch, "empty", full)
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        made()
    assert not scratch._arenas
