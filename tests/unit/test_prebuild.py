"""What a model needs compiled is known before, and asked for in one go; on a machine that seems to have an H200."""

from __future__ import annotations

import inspect
import itertools
import math
import random
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from fp4dispatch import jit
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import Backend, Prepared
from fp4dispatch.backends.own import compiled, launch_choice, swiglu
from fp4dispatch.backends.own.tiling import search, speeds
from fp4dispatch.backends.own.tiling.tiles import tiles
from fp4dispatch.dispatch import choose
from fp4dispatch.jit.catalog.manifest import installed
from fp4dispatch.machine import gpu_models
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.nvml import Gpu
from fp4dispatch.machine.system import System
from fp4dispatch.models import replace as replace_module
from fp4dispatch.models import warming
from fp4dispatch.models.replace import replace_linears
from fp4dispatch.models.warming import warmup
from fp4dispatch.problem import Problem
from fp4dispatch.problem.arch import SM90
from fp4dispatch.run import binding, prebuild
from fp4dispatch.run.prebuild import Ask
from fp4dispatch.trust import quarantine, selfcheck
from tests import w4_fake

H200 = System.fake("9.0", cuda="13.0", torch="2.11", nvcc="13.0", cutlass="4.5")
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The calls of ``jit.build_together``, as sets of names."""
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(_system, "current", lambda: H200)
    monkeypatch.setattr(choose, "_must_check", lambda decision, gpu: decision.backend != "reference")
    for module in (compiled, launch_choice):
        monkeypatch.setattr(module, "gpu_of", lambda device: (SM90, 132))
    quarantine.reset()
    monkeypatch.setattr(prebuild, "_seen", {})
    calls = []
    monkeypatch.setattr(jit, "build_together", lambda names, arch: calls.append((set(names), arch)))
    yield calls
    quarantine.reset()


def ask(op, scaling, n=4096, k=4096, dtype="bfloat16", backend=None, tokens=prebuild.SAMPLES):
    return Ask(Problem(op, 1, n, k, "any", scaling, dtype), backend, 0, tokens)


def fit(dtype):
    return {"bfloat16": "fp16", "float16": "bf16"}[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("op", "scaling"), [("nvfp4_gemm", "nvfp4"), ("fp8_gemm", "row"), ("fp8_gemm", "block128")])
def test_one_dtype_is_asked_for_at_once_and_the_other_never(op, scaling, dtype, asked):
    prebuild.together([ask(op, scaling, n, k, dtype) for n, k in SHAPES])
    ((names, arch),) = asked
    assert arch == SM90
    assert names
    assert [name for name in names if fit(dtype) in name[1]] == []
    for kernel, variant in names:
        installed().kernel(kernel).variant(variant)


def test_everything_that_plans_will_load_is_named(asked):
    """At any number of tokens, for any of the shapes: what warming up 1..4096 loads is there already."""
    prebuild.together([ask("nvfp4_gemm", "nvfp4", n, k) for n, k in SHAPES])
    ((names, _),) = asked
    for (n, k), m in itertools.product(SHAPES, range(1, 4097)):
        problem = Problem("nvfp4_gemm", m, n, k, "any", "nvfp4")
        decision, _ = choose.prospect(problem, gpu=0)
        backend = registry.instance(decision.backend)
        problem = Problem("nvfp4_gemm", m, n, k, decision.activation, "nvfp4")
        missing = set(backend.builds(problem, torch.device("cuda", 0))) - names
        assert not missing, (m, n, k)


@pytest.mark.parametrize("gpu", ["H200 SXM", "H100 SXM"])
def test_hardly_any_number_of_tokens_needs_another_build_where_models_choose(asked, monkeypatch, gpu):
    """For weights that nobody has tuned: what is missing compiles while a model serves, for most of a minute."""
    model, draw, missed, total = gpu_models.named(gpu), random.Random(5), 0, 0
    here = replace(H200, gpus=(Gpu(0, model.names[0], "GPU-1", SM90),))
    monkeypatch.setattr(_system, "current", lambda: here)
    monkeypatch.setattr(launch_choice, "speeds_on", lambda device: speeds.of(model))
    monkeypatch.setenv("FP4DISPATCH_TUNED", "off")
    for op, scaling in (("nvfp4_gemm", "nvfp4"), ("fp8_gemm", "row")) * 2:
        n, k = (128 * int(math.exp(draw.uniform(math.log(6), math.log(150)))) for _ in range(2))
        prebuild.together([ask(op, scaling, n, k)])
        names, decided = asked[-1][0], {}
        for m in {search.alike(m) for m in range(1, 8193)}:
            last = choose.bucket(m, op, 0)
            if last not in decided:
                decided[last] = choose.prospect(Problem(op, last, n, k, "any", scaling), gpu=0)[0]
            backend = registry.instance(decided[last].backend)
            problem = Problem(op, m, n, k, decided[last].activation, scaling)
            missed += bool(set(backend.builds(problem, torch.device("cuda", 0))) - names)
            total += 1
    assert total > 2000
    assert missed <= 0.002 * total


def test_self_checks_are_counted_in_until_there_is_a_verdict(asked, monkeypatch):
    few = ask("nvfp4_gemm", "nvfp4", tokens=(1,))
    prebuild.together([few])
    problem = Problem("nvfp4_gemm", 1, 4096, 4096, "bf16", "nvfp4")
    blank = selfcheck._blank(registry.instance("w4a16"), "nvfp4_gemm", "nvfp4", "bf16", H200)
    quarantine.remember(replace(blank, status="passed", half="float16"))
    prebuild.together([few])
    quarantine.remember(replace(blank, status="passed", half="bfloat16"))
    assert selfcheck.known(registry.instance("w4a16"), problem, H200).status == "passed"
    prebuild.together([few])
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "off")
    prebuild.together([few])
    checked, other, without, off = (names for names, _ in asked)
    assert checked == other > without == off == {("w4a16_small", "bf16")}
    assert checked == without | {("w4_gemm_sm90", "a16_bf16_64x128")}


def test_layers_of_one_shape_are_thought_about_once(asked, monkeypatch):
    again = ask("nvfp4_gemm", "nvfp4")
    prebuild.together([again] * 3)
    with monkeypatch.context() as patch:
        patch.setattr(choose, "prospect", lambda *a, **k: pytest.fail("decided again"))
        prebuild.together([again])
    assert len(asked) == 1
    monkeypatch.setenv("FP4_GEMM_BACKEND", "w4a8")
    prebuild.together([again])
    (auto, _), (named, _) = asked
    assert named < auto


def test_a_named_backend_is_not_checked_and_what_cannot_be_decided_is_left(asked):
    prebuild.together([ask("nvfp4_gemm", "nvfp4", backend="no such thing"), ask("nvfp4_gemm", "nvfp4", backend="w4a8")])
    ((names, _),) = asked
    assert all(kernel == "w4a8_small" or variant.startswith(("a8_", "any")) for kernel, variant in names)
    prebuild.together([Ask(Problem("nvfp4_gemm", 1, 64, 64), None, None)])  # a CPU
    assert len(asked) == 1


def test_the_names_are_those_that_a_plan_loads(asked, monkeypatch):
    """``builds`` and ``plan`` must not drift apart."""
    kernels = w4_fake.install(monkeypatch)
    for name, activation in (("w4a16", "bf16"), ("w4a8", "fp8")):
        backend = registry.instance(name)
        for m, n in itertools.product((1, 33, 64, 65, 129, 600, 767, 768, 4096), (512, 520, 8192, 28672)):
            problem = Problem("nvfp4_gemm", m, n, 256, activation, "nvfp4")
            kernels.loaded.clear()
            layout = launch_choice.Layout(n, 256, n, 256)
            backend.plan(problem, Prepared(name, (torch.empty(0),), tuple(layout)))
            assert set(kernels.loaded) == set(backend.builds(problem, torch.device("cpu")))
    assert {tile.kernel for tile in tiles("w4")} == {"w4a16_small", "w4a8_small", "w4_gemm_sm90", "w4_to_e4m3"}


def test_every_backend_that_loads_kernels_of_ours_names_them():
    every = {name: type(b) for name, b in registry.backends().items() if isinstance(b, Backend)}
    loads = re.compile(r"jit\.load\(|quantizers")
    source = {c: inspect.getsource(inspect.getmodule(c)) for cls in every.values() for c in cls.__mro__[:-2]}
    own = {name: cls for name, cls in every.items() if any(loads.search(source[c]) for c in cls.__mro__[:-2])}
    assert {"cutlass", "w4a16", "w4a8", "w8a16", "w8a8", "cublaslt", "cudnn", "flashinfer_deepgemm"} <= set(own)
    assert [name for name, cls in own.items() if cls.builds is Backend.builds] == []


def test_fp8_rows_need_the_kernels_of_few_and_of_many_tokens(asked):
    prebuild.together([ask("fp8_gemm", "row", n, k) for n, k in SHAPES])
    ((names, _),) = asked
    assert {
        ("w8a16_small", "bf16"),
        ("w8a8_small", "bf16"),
        ("w8_gemm_sm90", "a16_bf16_64"),  # the self-check of w8a16
        *(("w8_gemm_sm90", f"bf16_{tokens}") for tokens in range(96, 225, 16)),
        ("w4_activations", "any"),
        ("fp8_quantize", "any"),
    } == names


@pytest.mark.parametrize(("op", "scaling"), [("nvfp4_gemm", "nvfp4"), ("fp8_gemm", "row"), ("fp8_gemm", "block128")])
def test_a_layer_that_is_given_gate_up_needs_swiglu_too(asked, op, scaling):
    prebuild.together([ask(op, scaling)])
    prebuild.together([ask(op, scaling)._replace(gated=True)])
    (plain, _), (gated, _) = asked
    assert gated - plain == {("swiglu_activations", "any"), ("swiglu_rows", "any")}


def test_cublaslt_alone_needs_swiglu_too(asked):
    given = ask("fp8_gemm", "row", backend="cublaslt")
    prebuild.together([given])
    prebuild.together([given._replace(gated=True)])
    (plain, _), (gated, _) = asked
    assert plain == {("fp8_quantize", "any")}
    assert gated - plain == {("swiglu_rows", "any")}


def test_a_layer_with_16_bit_activations_needs_it_where_it_is_built(asked, monkeypatch):
    given = ask("nvfp4_gemm", "nvfp4")
    given = given._replace(problem=replace(given.problem, activation="bf16"), gated=True)
    prebuild.together([given])
    monkeypatch.setattr(swiglu, "built_for", lambda kernel, arch, k: False)
    prebuild._seen.clear()
    prebuild.together([given])
    (names, _), (without, _) = asked
    assert ("w4a16_small", "bf16") in names
    assert names - without == {("swiglu_rows", "any")}


def test_only_cublaslt_needs_a_quantiser_of_its_own(asked, monkeypatch):
    prebuild.together([ask("fp8_gemm", "row")])
    prebuild._seen.clear()
    without_it = replace(H200, quarantined=frozenset({("cublaslt", "fp8_gemm", "sm_90")}))
    monkeypatch.setattr(_system, "current", lambda: without_it)
    choose.decide_anew()
    prebuild.together([ask("fp8_gemm", "row")])
    (named, _), (without, _) = asked
    assert named - without == {("fp8_quantize", "any")}


def test_block_scales_need_our_kernels_alone(asked):
    prebuild.together([ask("fp8_gemm", "block128", n, k) for n, k in SHAPES])
    ((names, _),) = asked
    assert {
        ("w8a8_small", "block_bf16"),
        ("w8_gemm_sm90", "block_bf16_128"),
        ("w4_activations", "any"),
    } == names


# ------------------------------------------------------------------------------------------------------------- callers


@pytest.fixture
def asks(monkeypatch):
    calls = []
    monkeypatch.setattr(prebuild, "together", lambda asks: calls.append(list(asks)))
    return calls


def model():
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32, bias=False)).bfloat16()


def test_replacing_asks_for_all_layers_first_and_warming_up_for_all_tokens(asks):
    net = model()
    replace_linears(net, "fp8_row")
    want = [Problem("fp8_gemm", 1, 128, 64, "any", "row", bias=True), Problem("fp8_gemm", 1, 32, 128, "any", "row")]
    assert [a.problem for a in asks[0]] == want
    assert all(len(call) == 1 for call in asks[1:])  # each layer as it is bound
    asks.clear()
    warmup(net, tokens=[3, 5])
    assert [a.problem for a in asks[0]] == [replace(problem, capture="full") for problem in want]
    assert asks[0][0].tokens == tuple(sorted({3, 5, *prebuild.SAMPLES}))


def test_each_format_asks_for_what_its_layers_are(asks):
    for fmt in replace_module.FORMATS:
        net = model()
        asks.clear()
        replace_linears(net, fmt)
        wanted = asks[0][0].problem
        assert wanted == net[0].problem(1), fmt
    assert binding.prebuild is warming.prebuild is prebuild
