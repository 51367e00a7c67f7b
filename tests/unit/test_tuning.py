"""Tuning without a GPU: made-up times on an engine that reads them; what is stored, freed, refused."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from fp4dispatch.backends import registry
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.dispatch import choose, tuned
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.errors import CaptureError, InputError
from fp4dispatch.machine.system import System
from fp4dispatch.models.linear import FP8Linear
from fp4dispatch.models.replace import warmup
from fp4dispatch.problem import Problem
from fp4dispatch.run import routes
from fp4dispatch.trust import canary, quarantine, selfcheck
from fp4dispatch.tune import tuning
from fp4dispatch.tune.agreement import Ranks
from fp4dispatch.tune.copies import Copies
from fp4dispatch.tune.timing import Engine, Recording
from tests.planted import Honest

PROBLEM = Problem("fp8_gemm", 12, 64, 96, scaling="row")
HERE = System.fake("9.0", cuda="13.0", torch="2.11", driver="580.1")


class Timed(Honest):
    """Says how long a call takes; counts the plans that are given back."""

    activations = {"fp8_gemm": ("fp8",)}  # noqa: RUF012
    us = 10.0

    def __init__(self, name, us, spread=0.0):
        self.name, self.us, self.spread, self.released = name, us, spread, []
        self.prepared, self.sizes = weakref.WeakSet(), []

    def prepare(self, w):
        self.sizes.append((w.n, w.k))
        made = super().prepare(replace(w, weight=w.weight.clone()))
        made = replace(made, tensors=made.tensors[:3])
        self.prepared.add(made)
        return made

    def run(self, plan, prepared, x, out, bias=None):
        super().run(plan, replace(prepared, tensors=(*prepared.tensors, None)), x, out, bias)

    def release(self, plan):
        self.released.append(plan)


class Clock(Engine):
    """Takes the times that backends state, a little apart from one repeat to the next."""

    device = torch.device("cpu")
    cache_bytes = 1000.0

    def __init__(self):
        self.recorded, self.turn = [], 0

    def once(self, call):
        call(0)
        return 100.0

    def record(self, call, calls, copies):
        for i in range(copies):
            call(i)
        backend = next(c.cell_contents for c in call.__closure__ if isinstance(c.cell_contents, Timed))
        self.recorded.append((backend.name, calls, copies))

        def replay():
            self.turn += 1
            return calls * (backend.us + backend.spread * ((self.turn // 2) % 3 - 1))

        return Recording(replay, [None])


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """An sm_90 machine with three backends; CUDA counts as used, everything runs on the CPU."""
    for name in ("FP4DISPATCH_FP8_BACKEND", "FP4DISPATCH_DISABLE", "FP4DISPATCH_SELFCHECK", "FP4DISPATCH_TUNED"):
        monkeypatch.delenv(name, raising=False)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    backends = {
        "first": Timed("first", 10.0),
        "second": Timed("second", 8.0),
        "third": Timed("third", 9.0),
        "reference": ReferenceBackend(),
    }
    monkeypatch.setattr(registry, "backends", lambda: backends)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("fp4dispatch.machine.capture.is_capturing", lambda: False)
    monkeypatch.setattr(canary, "SHAPES", canary.SHAPES[:1])
    real = selfcheck.trusted
    monkeypatch.setattr(selfcheck, "trusted", lambda name, problem, system, device: real(name, problem, system, "cpu"))
    systems = {}

    def current():
        shut = quarantine.quarantined()
        return systems.setdefault(shut, replace(HERE, quarantined=shut))

    monkeypatch.setattr("fp4dispatch.machine.system.current", current)
    monkeypatch.setattr(routes, "gpu_of", lambda device: 0)
    monkeypatch.setattr(routes, "_plans", {})
    forget = (canary.canaries.cache_clear, quarantine.reset, choose.reset, tuned.reset, tuning._engines.clear)
    forget += (routes.LayerSpec.parse.cache_clear,)
    for each in forget:
        each()
    yield backends
    for each in forget:
        each()


def weights(problem=PROBLEM):
    return tuning.make_weights(problem, "cpu")


class Graphs(Clock):
    """As a CUDA graph, a recording does not hold what its calls read."""

    def __init__(self):
        super().__init__()
        self.replayed = 0

    def record(self, call, calls, copies):
        held, read = super().record(call, calls, copies), weakref.ref(call)

        def replay():
            gc.collect()
            assert read() is not None, "the operands of a graph are gone when it is replayed"
            self.replayed += 1
            return held.replay()

        return Recording(replay, [None])


def tune(problem=PROBLEM, engine=None, **options):
    return tuning.tune(problem, weights(problem), gpu=0, engine=engine or Clock(), **options)


def new_process():
    for forget in (tuned.reset, choose.reset, quarantine.reset):
        forget()


def test_the_fastest_is_used_from_then_on_and_in_later_processes(machine):
    assert choose.select(PROBLEM).backend == "first"
    made = tune()
    assert [(t.backend, t.us) for t in made.timings] == [("second", 8.0), ("third", 9.0), ("first", 10.0)]
    assert made.problem.m == 16
    for again in (lambda: None, new_process):
        again()
        decision = choose.select(PROBLEM)
        assert (decision.backend, decision.rule.id) == ("second", "tuned")
        assert choose.select(replace(PROBLEM, m=17)).backend == "first"
        assert "8.0 us" in str(explain("fp8_gemm", 12, 64, 96, scaling="row"))


def test_each_candidate_is_timed_on_rotating_copies_in_turns(machine):
    engine = Clock()
    made = tune(engine=engine)
    assert [name for name, *_ in engine.recorded] == ["first", "second", "third"]
    for _, calls, copies in engine.recorded:
        assert copies >= 2
        assert calls % copies == 0
    assert all(t.repeats == tuning.ROUNDS for t in made.timings)


def test_one_set_of_copies_serves_every_m(machine):
    shared = Copies(weights(), Clock())
    for m in (16, 64, 256):
        tuning.tune_at(replace(PROBLEM, m=m), shared, gpu=0, ranks=Ranks(alone=True))
    sizes = [size for name in ("first", "second", "third") for size in machine[name].sizes]
    assert sizes.count((PROBLEM.n, PROBLEM.k)) == 3
    assert len(shared.engine.recorded) == 9


def test_noise_keeps_the_default(machine):
    machine["second"].spread = 3.0
    machine["third"].us = 9.9
    made = tune()
    assert made.of("second", "fp8").noise_us > 2
    assert choose.select(PROBLEM).backend == "first"


def test_measured_once_unless_forced(machine):
    first = tune()
    machine["third"].us = 1.0
    engine = Clock()
    assert tune(engine=engine) is first
    assert engine.recorded == []
    new_process()
    assert tune(engine=engine).to_dict() == first.to_dict()
    assert engine.recorded == []
    assert tune(engine=engine, force=True).timings[0].backend == "third"
    assert choose.select(PROBLEM).backend == "third"


def test_denied_and_refused_candidates_are_not_timed(machine, monkeypatch):
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "second")
    engine = Clock()
    made = tune(engine=engine)
    assert [name for name, *_ in engine.recorded] == ["first", "third"]
    assert ("second", "DENIED      disabled") in made.left_out
    assert choose.select(PROBLEM).backend == "third"


def test_what_fails_its_self_check_is_not_timed(machine):
    machine["second"].write = lambda plan, out, result: out.zero_()
    engine = Clock()
    made = tune(engine=engine)
    assert [name for name, *_ in engine.recorded] == ["first", "third"]
    assert any(name == "second" and "Quarantined" in why for name, why in made.left_out)
    assert choose.select(PROBLEM).backend == "third"


def test_what_could_not_be_checked_is_not_timed(machine):
    machine["second"].supports = lambda problem, system: () if problem.n == 64 else (canary_only(),)
    made = tune()
    assert [t.backend for t in made.timings] == ["third", "first"]


def canary_only():
    from fp4dispatch.problem.decision import Reason

    return Reason("SHAPE", "only N=64")


def test_wrong_at_this_very_size_is_quarantined_with_its_tile(machine, caplog):
    def write(plan, out, result):
        out.copy_(result)
        if out.shape[1] == PROBLEM.n:  # not a size of the canaries
            out[-1] = 0

    machine["second"].write = write
    made = tune()
    assert [t.backend for t in made.timings] == ["third", "first"]
    assert any(
        name == "second" and "wrong at this size: M=16 N=64 K=96: tile (0, 0)" in why for name, why in made.left_out
    )
    assert "Quarantined" in caplog.text
    assert ("second", "fp8_gemm", "sm_90") in quarantine.quarantined()
    new_process()
    assert [r.code for r in choose.select(PROBLEM).verdict("second").reasons] == ["QUARANTINED"]


def test_the_callers_autocast_condemns_nobody(machine):
    with torch.autocast("cpu", torch.float16):
        made = tune()
    assert [t.backend for t in made.timings] == ["second", "third", "first"]
    assert not quarantine.quarantined()


def test_never_written_is_wrong_too(machine):
    machine["second"].write = lambda plan, out, result: None if out.shape[1] == PROBLEM.n else out.copy_(result)
    assert "second" not in [t.backend for t in tune().timings]


def test_what_raises_is_left_out(machine):
    plan = Timed.plan

    def raises(problem, prepared):
        if problem.n == PROBLEM.n:
            raise RuntimeError("no kernel image")
        return plan(machine["second"], problem, prepared)

    machine["second"].plan = raises
    made = tune()
    assert ("second", "RuntimeError: no kernel image") in made.left_out
    assert [t.backend for t in made.timings] == ["third", "first"]


def test_one_candidate_is_no_choice_and_nothing_is_stored(machine, monkeypatch):
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "second,third")
    engine = Clock()
    made = tune(engine=engine)
    assert (made.timings, engine.recorded) == ((), [])
    assert not tuned.store.folder().exists()


def test_on_a_cpu_nothing_is_measured(machine):
    made = tuning.tune(PROBLEM, weights(), gpu=None)
    assert made.timings == ()
    assert "nothing to choose from" in made.text()


@pytest.fixture
def no_garbage_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_everything_is_given_back(machine, no_garbage_collection):
    tune()
    for name in ("first", "second", "third"):
        assert len(machine[name].prepared) == 0, name
        assert len(machine[name].released) == 1
    assert routes._plans == {}


def test_everything_is_given_back_after_an_error_too(machine, monkeypatch):
    monkeypatch.setattr(tuning.timing, "take_turns", lambda *a, **k: pytest.fail("the clock broke"))
    with pytest.raises(pytest.fail.Exception):
        tune()
    gc.collect()
    assert all(len(machine[name].released) == 1 for name in ("first", "second", "third"))
    assert not tuned.store.folder().exists()


def test_refused_during_capture(machine, monkeypatch):
    monkeypatch.setattr("fp4dispatch.machine.capture.is_capturing", lambda: True)
    with pytest.raises(CaptureError, match=r"tuning fp8_gemm M=12 .*\n.*warmup\(model, tokens=\[12\], tune=True\)"):
        tune()


def test_weights_of_another_problem_are_refused(machine):
    with pytest.raises(InputError, match=r"\[64, 96\], not of"):
        tuning.tune(replace(PROBLEM, n=128), weights(), gpu=0, engine=Clock())


def test_a_pinned_format_is_a_problem_of_its_own(machine):
    tune()
    pinned = replace(PROBLEM, activation="fp8")
    assert choose.select(pinned).backend == "first"
    tune(pinned)
    assert choose.select(pinned).backend == "second"


# -------------------------------------------------------------------------------------------------------------- warmup


@pytest.fixture
def model(machine, monkeypatch):
    monkeypatch.setattr(tuning, "engine_of", lambda device: Clock())
    torch.manual_seed(0)
    return nn.Sequential(*(FP8Linear.from_linear(nn.Linear(96, 64).bfloat16(), scaling="row") for _ in range(2)))


def chosen(model):
    return [layer.backend_text() for layer in model]


def test_warmup_tunes_each_shape_and_bucket_once_and_binds_anew(machine, model, monkeypatch):
    for layer in model:
        layer.bind()
    assert chosen(model) == ["first (fp8)"] * 2
    tuned_problems, real = [], tuning.tune_each

    def tune_each(problems, *args, **options):
        problems = list(problems)
        tuned_problems.extend(problem.m for problem in problems)
        return real(problems, *args, **options)

    monkeypatch.setattr(tuning, "tune_each", tune_each)
    made, kept = [], Copies.__init__
    monkeypatch.setattr(Copies, "__init__", lambda self, *a: made.append(1) or kept(self, *a))
    assert warmup(model, tokens=[3, 4, 16], tune=True) == 3
    assert tuned_problems == [3, 4, 16]
    assert len(made) == 1, "one set of copies serves all numbers of tokens of the two layers, which have one shape"
    assert len(list(tuned.store.folder().iterdir())) == 2  # 3 and 4 are one bucket
    text = (
        "first (fp8) up to M=2, then second (fp8) up to M=4, then first (fp8) up to M=8, then second (fp8) up to M=16"
    )
    assert chosen(model) == [f"{text}, then first (fp8)"] * 2
    assert {key[0] for key in routes._plans} == {"second"}


@pytest.fixture
def one_range(monkeypatch):
    """All numbers of tokens are decided together, so that tuning exchanges the one backend of a layer."""
    monkeypatch.setattr(routes, "LARGEST_M", 16)
    monkeypatch.setattr(choose, "bucket", lambda m, op, gpu=0: 16)
    monkeypatch.setattr(choose, "m_bucket", lambda m, *where: 16)


def test_a_tuned_layer_holds_only_the_layouts_that_it_uses(machine, model, one_range):
    layer = model[0]
    layer.bind()
    before = layer.nbytes()
    warmup(model, tokens=[16], tune=True)
    assert chosen(model) == ["second (fp8)"] * 2
    names = [name for name, _ in layer.named_buffers()]
    assert len(names) == len(set(names))
    assert layer.nbytes() == before
    x = torch.randn(16, 96).bfloat16()
    assert torch.equal(layer(x), FP8Linear.from_weights(layer.weights(), layer.bias)(x))


@pytest.mark.parametrize("captured", [True, False])
def test_a_layout_is_kept_where_a_graph_may_hold_it_and_only_there(machine, model, one_range, captured):
    bound = model[0].bind()
    bound.captured = captured
    own = weakref.ref(bound.tensors[0])  # prepare() made it
    del bound
    warmup(model, tokens=[16], tune=True)
    assert chosen(model) == ["second (fp8)"] * 2
    gc.collect()
    assert (own() is not None) is captured


def test_layers_whose_backend_is_named_are_left_alone(machine, model):
    for layer in model:
        layer.backend = "third"
        layer._forget()
    warmup(model, tokens=[16], tune=True)
    assert chosen(model) == ["third (fp8)"] * 2
    assert not tuned.store.folder().exists()


def test_results_do_not_change_with_the_choice(machine, model):
    x = torch.randn(16, 96).bfloat16()
    want = [layer(x) for layer in model]
    warmup(model, tokens=[16], tune=True)
    assert all(torch.equal(layer(x), y) for layer, y in zip(model, want, strict=True))


def test_a_rank_alone_makes_no_collective_call(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda *a: pytest.fail("a collective call"))
    assert Ranks(alone=True).gather(3) == [3]


def test_what_a_graph_reads_is_held_until_it_was_replayed():
    """Copies of 28672x4096 were freed before the replays: an illegal access on an H200 whose memory was short."""
    engine = Graphs()
    tune(engine=engine)
    assert engine.replayed > 3
