"""Measurements on disk: when they hold, who uses them, and what broken files and folders do."""

from __future__ import annotations

import gc
import json
import logging
import stat
import weakref
from dataclasses import replace

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.dispatch import choose, tuned
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.jit.store import records
from fp4dispatch.machine.system import System
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem import Problem
from fp4dispatch.problem.measurement import Measurement, Timing
from fp4dispatch.trust import facts, quarantine
from tests.declared import DeclaredBackend
from tests.planted import Honest

FACTS = {"cuda": "13.0", "torch": "2.11", "nvcc": "13.0", "cutlass": "4.5", "cudnn": "9.19.0", "cudnn_frontend": "1.14"}
HERE = System.fake("10.0", **FACTS)
PROBLEM = Problem("nvfp4_gemm", 16, 4096, 4096)


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A B200 with every declared backend, and a cache of its own; returns a function that changes the machine."""
    tmp_path.chmod(0o755)
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("FP4DISPATCH_TUNED", "FP4_GEMM_BACKEND", "FP4DISPATCH_DISABLE", "FP4DISPATCH_SELFCHECK"):
        monkeypatch.delenv(name, raising=False)
    backends = {name: DeclaredBackend(name) for name in catalogue().backends}
    monkeypatch.setattr(registry, "backends", lambda: backends)

    def use(system):
        monkeypatch.setattr("fp4dispatch.machine.system.current", lambda: system)

    use(HERE)
    for forget in (tuned.reset, choose.reset, quarantine.reset):
        forget()
    yield use
    for forget in (tuned.reset, choose.reset, quarantine.reset):
        forget()


def store(problem=PROBLEM, system=HERE, fast="cudnn", slow="cutlass"):
    timings = (Timing(fast, "nvfp4", 10.0, 0.1, 15), Timing(slow, "nvfp4", 20.0, 0.1, 15))
    made = Measurement(problem, timings, date="2026-11-21", facts=tuned.facts(system, registry.backends()))
    tuned.store.save(made)
    return made


def new_process():
    tuned.reset()
    choose.reset()


class Held:
    """What a caller has in a local variable."""


def test_looking_for_a_record_that_is_absent_leaves_nothing_of_its_callers():
    """Since Python 3.12 a generator that converts an exception keeps the frames of its callers until a collection."""
    gc.collect()
    gc.disable()
    try:
        held = Held()
        gone = weakref.ref(held)

        def look(held):
            assert tuned.store.find("0" * 40) is None

        look(held)
        del held
        assert gone() is None
    finally:
        gc.enable()


def files():
    return sorted(tuned.store.folder().glob("*"))


def test_auto_uses_it_in_this_and_in_later_processes():
    assert choose.select(PROBLEM).backend == "cutlass"
    made = store()
    assert choose.select(PROBLEM).backend == "cutlass"  # not looked for again
    tuned.remember(made)
    choose.decide_anew()
    assert choose.select(PROBLEM).backend == "cudnn"
    new_process()
    decision = choose.select(PROBLEM)
    assert (decision.backend, decision.rule.id) == ("cudnn", "tuned")
    assert choose.select(replace(PROBLEM, m=11)).backend == "cudnn"  # the same bucket
    assert choose.select(replace(PROBLEM, m=17)).backend == "cutlass"
    assert choose.select(replace(PROBLEM, bias=True)).backend == "cutlass"


def test_explain_shows_it_here_and_never_for_another_machine():
    store()
    here = explain("nvfp4_gemm", 11, 4096, 4096)
    assert (here.backend, here.rule.id) == ("cudnn", "tuned")
    assert "tuned: 20.0 us (quartiles 0.1 us apart, 15 repeats), on 2026-11-21" in str(here)
    assert explain("nvfp4_gemm", 11, 4096, 4096, arch="10.0", **FACTS).backend == "cutlass"
    assert explain("nvfp4_gemm", 11, 4096, 4096, system=HERE).backend == "cutlass"
    assert explain("nvfp4_gemm", 11, 4096, 4096, backend="cutlass").backend == "cutlass"


def test_a_request_is_not_moved(monkeypatch):
    store()
    assert choose.select(PROBLEM, backend="cutlass").backend == "cutlass"
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cutlass")
    assert choose.select(PROBLEM).backend == "cutlass"
    assert choose.select(PROBLEM, backend="auto").backend == "cudnn"


def test_it_is_switched_off_at_once(monkeypatch):
    store()
    assert choose.select(PROBLEM).backend == "cudnn"
    monkeypatch.setenv("FP4DISPATCH_TUNED", "off")
    assert choose.select(PROBLEM).backend == "cutlass"
    assert explain("nvfp4_gemm", 16, 4096, 4096).backend == "cutlass"
    monkeypatch.delenv("FP4DISPATCH_TUNED")
    assert choose.select(PROBLEM).backend == "cudnn"


def test_times_with_pdl_move_nothing_once_pdl_is_off(monkeypatch):
    store()
    assert choose.select(PROBLEM).backend == "cudnn"
    monkeypatch.setenv("FP4DISPATCH_PDL", "off")
    assert choose.select(PROBLEM).backend == "cutlass"
    monkeypatch.delenv("FP4DISPATCH_PDL")
    assert choose.select(PROBLEM).backend == "cudnn"


@pytest.mark.parametrize(
    "other",
    [
        System.fake("10.3", **FACTS),
        System.fake("10.0", **FACTS | {"cuda": "13.1"}),
        System.fake("10.0", **FACTS | {"torch": "2.12"}),
        System.fake("10.0", **FACTS | {"cudnn": "9.20.0"}),
        System.fake("10.0", **FACTS | {"cudnn_frontend": "1.15"}),
        System.fake("10.0", **FACTS | {"cutlass": "4.6"}),
        System.fake("10.0", **FACTS, driver="580.1"),
        System.fake("10.0", **FACTS, flashinfer="0.7.2"),
        replace(HERE, gpus=(replace(HERE.gpus[0], name="another GPU"),)),
    ],
)
def test_another_machine_is_not_moved(machine, other):
    store()
    machine(other)
    assert choose.select(PROBLEM).rule.id != "tuned"
    assert list(tuned.holding(other, registry.backends())) == []
    machine(HERE)
    assert choose.select(PROBLEM).rule.id == "tuned"


def test_which_gpu_of_the_model_it_is_does_not_count(machine):
    store()
    two = System.fake(gpus=["10.0", "10.0"], **FACTS)
    machine(two)
    assert choose.select(PROBLEM, gpu=1).rule.id == "tuned"
    assert len(list(tuned.holding(two, registry.backends()))) == 1


def test_code_and_pdl_count(monkeypatch):
    backends = registry.backends()
    names = [tuned.facts(HERE, backends)]
    with monkeypatch.context() as patch:
        patch.setenv("FP4DISPATCH_PDL", "off")
        names.append(tuned.facts(HERE, backends))
    with monkeypatch.context() as patch:
        patch.setattr(facts, "_own_code", lambda: "other kernels")
        names.append(tuned.facts(HERE, backends))
    names.append(tuned.facts(HERE, {**backends, "plugin": Honest()}))
    with monkeypatch.context() as patch:
        patch.setattr("fp4dispatch.__version__", "99")
        names.append(tuned.facts(HERE, backends))
    assert len({json.dumps(name) for name in names}) == len(names)


def test_no_gpu_no_measurement():
    assert tuned.find(PROBLEM, System.fake(**FACTS), registry.backends()) is None
    store()
    assert choose.select(PROBLEM, gpu=None).backend == "reference"


def test_ignored_is_ignored_until_it_is_measured_anew():
    made = store()
    assert choose.select(PROBLEM).backend == "cudnn"
    tuned.ignore(replace(PROBLEM, m=4))
    choose.decide_anew()
    assert choose.select(PROBLEM).backend == "cutlass"
    tuned.remember(made)
    choose.decide_anew()
    assert choose.select(PROBLEM).backend == "cudnn"


def rewritten(data, **parts):
    held = json.loads(data)
    held["record"] |= parts
    return json.dumps(held).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"[1, 2]",
        lambda data: b"\xff\xfe",
        lambda data: data.replace(b'"us": 10.0', b'"us": 0'),
        lambda data: data.replace(b'"us": 10.0', b'"us": true'),
        lambda data: data.replace(b'"noise_us": 0.1', b'"noise_us": false'),
        lambda data: data.replace(b'"repeats": 15', b'"repeats": true'),
        lambda data: data.replace(b'"repeats": 15', b'"repeats": -1'),
        lambda data: data.replace(b'"ranks": 1', b'"ranks": true'),
        lambda data: data.replace(b'"ranks": 1', b'"ranks": 0'),
        lambda data: data.replace(b'"us": 10.0', b'"us": 30.0'),  # not fastest first
        lambda data: rewritten(data, timings=[]),
        lambda data: data.replace(b'"m": 16', b'"m": 32'),  # its name is another problem's
        lambda data: data.replace(b'"torch": "2.11"', b'"torch": "2.10"'),
    ],
)
def test_a_damaged_file_does_not_exist(damage):
    store()
    (path,) = files()
    changed = damage(path.read_bytes())
    assert changed != path.read_bytes()
    path.write_bytes(changed)
    assert choose.select(PROBLEM).backend == "cutlass"
    assert list(tuned.holding(HERE, registry.backends())) == []


@pytest.mark.parametrize("mode", [0o666, 0o620])
def test_a_file_that_others_can_write_is_not_read(mode):
    store()
    files()[0].chmod(mode)
    assert choose.select(PROBLEM).backend == "cutlass"


def test_private_and_whole(monkeypatch):
    store()
    assert stat.S_IMODE(tuned.store.folder().stat().st_mode) == 0o700
    assert stat.S_IMODE(files()[0].stat().st_mode) == 0o600

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.private, "write_synced", full_disk)
    store(replace(PROBLEM, m=32))
    assert len(files()) == 1


def test_a_place_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(blocker / "below"))
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        store()
        store(replace(PROBLEM, m=32))
    assert len([r for r in caplog.records if "Not a directory" in r.message]) == 1


def test_clear_removes_all_of_them():
    for m in (1, 2, 4):
        store(replace(PROBLEM, m=m))
    assert tuned.clear() == 3
    assert files() == []
    assert tuned.clear() == 0
