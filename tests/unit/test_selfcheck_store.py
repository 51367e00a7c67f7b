"""Verdicts on disk: when they hold, when they do not, and what broken files, folders and other processes can do."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import stat
from dataclasses import replace

import pytest
import torch

from fp4dispatch.backends import registry
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.errors import CacheError, CaptureError, InputError, SettingsError
from fp4dispatch.jit.store import records
from fp4dispatch.machine import system as _system
from fp4dispatch.machine.system import System
from fp4dispatch.problem import Problem
from fp4dispatch.trust import canary, facts, quarantine, selfcheck
from fp4dispatch.trust.verdict import CheckResult
from tests.planted import FAULTS, Honest

FACTS = {"cuda": "13.0", "torch": "2.11", "cudnn": "9.13.0", "driver": "580.1"}
HERE = System.fake("9.0", **FACTS)
PROBLEM = Problem("fp8_gemm", 16, 64, 64, scaling="row", activation="fp8")
CPU = torch.device("cpu")


class Counted(Honest):
    runs = 0

    def plan(self, problem, prepared):
        type(self).runs += 1
        return super().plan(problem, prepared)


class Broken(FAULTS["NeverWrites_first"]):
    runs = 0

    def plan(self, problem, prepared):
        type(self).runs += 1
        return super().plan(problem, prepared)


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """A cache folder of its own and a registry that a test can put backends into."""
    tmp_path.chmod(0o755)
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FP4DISPATCH_SELFCHECK", raising=False)
    found = {"good": Counted(), "bad": Broken()}
    monkeypatch.setattr(registry, "backends", lambda: found)
    monkeypatch.setattr(Counted, "name", "good", raising=False)
    monkeypatch.setattr(Broken, "name", "bad", raising=False)
    monkeypatch.setattr(Counted, "runs", 0)
    monkeypatch.setattr(Broken, "runs", 0)
    monkeypatch.setattr(canary, "SHAPES", canary.SHAPES[:1])  # what the canaries find is test_selfcheck.py's business
    canary.canaries.cache_clear()
    quarantine.reset()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    quarantine.reset()
    canary.canaries.cache_clear()


def files() -> list:
    return sorted(quarantine.store.folder().glob("*"))


def ask(name: str, system: System = HERE, problem: Problem = PROBLEM) -> CheckResult:
    return selfcheck.trusted(name, problem, system, CPU)


def new_process() -> None:
    quarantine.reset()


# ------------------------------------------------------------------------------------------------------------ keeping


def test_checked_once_then_known_then_read():
    first = ask("good")
    runs = Counted.runs
    assert (first.status, runs > 0, len(files())) == ("passed", True, 1)
    assert ask("good") is first
    new_process()
    again = ask("good")
    assert Counted.runs == runs
    assert again.to_dict() == first.to_dict()


def test_failures_are_kept_with_their_evidence():
    first = ask("bad")
    assert quarantine.quarantined() == {("bad", "fp8_gemm", "sm_90")}
    new_process()
    assert quarantine.quarantined() == frozenset()
    again = ask("bad")
    assert (again.text(), again.evidence) == (first.text(), CheckResult.from_dict(first.to_dict()).evidence)
    assert quarantine.quarantined() == {("bad", "fp8_gemm", "sm_90")}


def test_system_current_says_who_is_in_quarantine():
    ask("bad")
    import fp4dispatch.dispatch.choose  # noqa: F401  (it registers the hook)

    _system.provide(quarantined=quarantine.quarantined)
    assert ("bad", "fp8_gemm", "sm_90") in _system.current().quarantined


@pytest.mark.parametrize(
    "other",
    [
        System.fake("10.0", **FACTS),
        System.fake("9.0", **FACTS | {"driver": "590.2"}),
        System.fake("9.0", **FACTS | {"cuda": "13.1"}),
        System.fake("9.0", **FACTS | {"torch": "2.12"}),
        System.fake("9.0", **FACTS | {"cudnn": "9.14.0"}),
        System.fake("9.0", **FACTS, cudnn_frontend="1.14"),
        System.fake("9.0", **FACTS, flashinfer="0.6.18"),
        System.fake("9.0", **FACTS, cutlass="4.5"),
        System.fake("9.0", **FACTS, nvcc="13.0"),
        System.fake("9.0", **FACTS, proven=[("fp8_gemm", "sm_90")]),
        replace(HERE, gpus=(replace(HERE.gpus[0], name="another GPU"),)),
    ],
)
def test_every_fact_counts(other):
    ask("bad")
    runs = Broken.runs
    new_process()
    ask("bad", other)
    assert Broken.runs == 2 * runs
    assert len(files()) == 2


def test_a_verdict_is_for_the_dtype_that_was_checked():
    """Kernels of bfloat16 and float16 are built apart: the one's numbers say nothing about the other's."""
    asked = {dtype: replace(PROBLEM, out_dtype=dtype) for dtype in ("bfloat16", "float16", "float32")}
    runs = []
    for problem in asked.values():
        for _ in range(2):
            runs.append((ask("good", problem=problem).half, Counted.runs))
    assert [half for half, _ in runs] == ["bfloat16"] * 2 + ["float16"] * 2 + [""] * 2
    counts = [count for _, count in runs]
    assert counts[0] == counts[1] < counts[2] == counts[3] < counts[4] == counts[5]
    assert len(files()) == 3
    new_process()
    assert [ask("good", problem=problem).half for problem in asked.values()] == ["bfloat16", "float16", ""]
    assert Counted.runs == counts[-1]
    failed = ask("bad", problem=asked["float16"])
    assert (failed.half, failed.status) == ("float16", "failed")
    assert quarantine.quarantined() == {("bad", "fp8_gemm", "sm_90")}  # for every dtype


def test_which_gpu_of_the_model_it_is_does_not_count():
    ask("good")
    runs = Counted.runs
    new_process()
    ask("good", replace(HERE, gpus=(replace(HERE.gpus[0], uuid="GPU-other", index=3, memory=1),)))
    assert Counted.runs == runs


def test_code_and_pdl_count(monkeypatch):
    names = {ask("good").name}
    for change in (
        lambda: monkeypatch.setenv("FP4DISPATCH_PDL", "off"),
        lambda: monkeypatch.setattr(facts, "_own_code", lambda: "another kernel"),
        lambda: monkeypatch.setattr(facts, "code_of", lambda kind: "another plug-in"),
        lambda: monkeypatch.setattr(facts, "_cublas", lambda: "another cuBLAS"),
        lambda: monkeypatch.setattr("fp4dispatch.__version__", "99"),
    ):
        change()
        names.add(ask("good").name)
    assert len(names) == len(files()) == 6


def test_kernels_flags_and_backends_are_in_the_code_hash(tmp_path):
    import shutil
    from pathlib import Path

    import fp4dispatch
    from fp4dispatch.jit.catalog import manifest

    csrc = manifest.installed().csrc
    for name in ("csrc", "jit_flags"):
        shutil.copytree(csrc.parent / name, tmp_path / name)
    copy = tmp_path / "fp4dispatch"
    shutil.copytree(Path(fp4dispatch.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))

    def code():
        return facts.hash_of_sources(copy, tmp_path / "csrc")

    seen = {code()}
    assert seen == {code()}
    checks = ("canary", "trial", "tilecheck", "layercheck", "layer_operands")
    files = (
        next((tmp_path / "csrc").rglob("*.cu")),
        next((tmp_path / "jit_flags").glob("*.toml")),
        copy / "strict_toml.py",
        copy / "backends" / "base.py",
        copy / "backends" / "own" / "w4.py",
        *(copy / "formats").glob("*.py"),
        *(copy / "trust" / f"{name}.py" for name in checks),
    )
    for path in files:
        path.write_text(path.read_text("utf-8") + "\n", "utf-8")
        seen.add(code())
    assert len(seen) == 1 + len(files)

    # A file that moves is another content, and counts where it has gone.
    for folder, name in ((tmp_path / "csrc", "*.cu"), (copy / "backends" / "own", "w4.py"), (copy / "jit", "prove.py")):
        path = next(folder.rglob(name))
        below = folder / "below" / "further"
        below.mkdir(parents=True)
        moved = path.rename(below / path.name)
        before = len(seen)
        seen.add(code())
        moved.write_bytes(moved.read_bytes() + b"\n")
        seen.add(code())
        assert len(seen) == before + 2, folder
    (copy / "backends" / "__pycache__").mkdir()
    (copy / "backends" / "__pycache__" / "w4.pyc").write_bytes(b"what Python leaves")
    assert code() in seen

    # What is not there is an error, never a hash without it.
    for missing in (copy / "trust" / "canary.py", copy / "jit", tmp_path / "csrc"):
        hidden = missing.rename(missing.with_name("hidden"))
        with pytest.raises(CacheError, match=f"{missing.name}.*missing"):
            code()
        hidden.rename(missing)
        assert code() in seen
    shutil.rmtree(tmp_path / "jit_flags")
    (tmp_path / "jit_flags").mkdir()
    with pytest.raises(CacheError, match=r"jit_flags.*empty"):
        code()


def test_the_hash_of_a_plugin_sees_all_its_files(tmp_path, monkeypatch):
    package = tmp_path / "plug_in_of_many_files"
    (package / "kernels").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "backend.py").write_text("class Mine: pass\n")
    (package / "kernels" / "gemm.cu").write_text("// 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import importlib

    kind = importlib.import_module("plug_in_of_many_files.backend").Mine
    code = facts.code_of.__wrapped__
    first = code(kind)
    assert code(kind) == first
    (package / "kernels" / "gemm.cu").write_text("// 2\n")
    assert code(kind) != first


def test_code_in_no_file_is_known_for_this_process_alone(monkeypatch):
    """A verdict on what was typed into an interpreter must not hold for what is typed tomorrow."""
    typed = type("Typed", (), {"__module__": "a_module_that_is_no_file"})
    first = facts.code_of.__wrapped__(typed)
    monkeypatch.setattr(facts, "_THIS_PROCESS", "another")
    assert facts.code_of.__wrapped__(typed) != first


def test_the_subject_counts_and_the_size_does_not():
    for problem in (PROBLEM, replace(PROBLEM, scaling="tensor"), replace(PROBLEM, activation="bf16")):
        ask("good", problem=problem)
    assert len(files()) == 3
    ask("good", problem=replace(PROBLEM, m=1, n=4096, bias=True, capture="full"))
    assert len(files()) == 3


def rewritten(**changes) -> CheckResult | None:
    """The one verdict on disk with fields of its record changed, or left out where they are None, read again."""
    (path,) = files()
    data = json.loads(path.read_text("utf-8"))
    data["record"] = {name: value for name, value in (data["record"] | changes).items() if value is not None}
    path.write_text(json.dumps(data), "utf-8")
    new_process()
    return quarantine.store.load(path)


def test_building_and_checking_are_kept_and_shown_apart():
    first = ask("good")
    found = rewritten(build_ms=972.4, check_ms=46.6)
    assert found is not None
    assert (found.build_ms, found.check_ms) == (972.4, 46.6)
    assert found.text().endswith("1 canaries passed in 47 ms, after 972 ms of building")
    assert {"build_ms", "check_ms", "seconds"} <= set(first.to_dict())
    assert first.build_ms + first.check_ms == pytest.approx(first.seconds * 1e3)


def test_a_record_of_before_they_were_told_apart_is_as_good():
    ask("good")
    runs = Counted.runs
    found = rewritten(build_ms=None, check_ms=None, seconds=1.019)
    assert found is not None
    assert (found.build_ms, found.check_ms) == (None, None)
    assert found.text().endswith("1 canaries passed in 1019 ms, building included")
    assert CheckResult.from_dict(found.to_dict()) == found
    assert (ask("good"), Counted.runs) == (found, runs)


@pytest.mark.parametrize("name", ["seconds", "build_ms", "check_ms"])
@pytest.mark.parametrize("value", ["12", [1], -1.0, float("nan"), float("inf"), 10**400, {}])
def test_what_is_no_time_makes_a_record_void(name, value):
    ask("good")
    runs = Counted.runs
    assert rewritten(**{name: value}) is None
    assert ask("good").status == "passed"
    assert Counted.runs > runs


# ----------------------------------------------------------------------------------------------------------- the switch


def test_off(monkeypatch):
    ask("bad")
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "off")
    runs = Broken.runs
    assert quarantine.quarantined() == frozenset()
    result = ask("bad")
    assert (result.status, result.usable, Broken.runs) == ("off", True, runs)
    assert "FP4DISPATCH_SELFCHECK=off" in str(result)


def test_force_checks_once_in_each_process_and_replaces_the_verdict(monkeypatch):
    ask("bad")
    (path,) = files()
    new_process()
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "force")
    runs = Broken.runs
    monkeypatch.setattr(Broken, "write", Honest.write)
    assert ask("bad").status == "passed"
    assert Broken.runs > runs
    runs = Broken.runs
    ask("bad")
    assert Broken.runs == runs
    assert files() == [path]
    assert quarantine.store.load(path).status == "passed"


def test_an_unknown_word_is_an_error(monkeypatch):
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "fource")
    with pytest.raises(SettingsError, match="force"):
        ask("good")


def test_a_format_that_the_backend_does_not_run(monkeypatch):
    monkeypatch.setattr(Counted, "activations", {"fp8_gemm": ("bf16",)})
    with pytest.raises(InputError, match="nothing to check"):
        ask("good")


def test_known_verdicts_are_given_during_capture_and_new_ones_refused(monkeypatch):
    known = ask("good")
    monkeypatch.setattr(selfcheck.capture, "is_capturing", lambda: True)
    assert ask("good") is known
    with pytest.raises(CaptureError, match="self-check of bad"):
        ask("bad")


# -------------------------------------------------------------------------------------------------- broken surroundings


def damage(path, how):
    text = path.read_text("utf-8")
    data = json.loads(text)
    if how == "empty":
        path.write_text("")
    elif how == "half":
        path.write_text(text[: len(text) // 2])
    elif how == "binary":
        path.write_bytes(b"\xff\x00" * 100)
    elif how == "nested":
        path.write_text("[" * 100_000)
    elif how == "list":
        path.write_text("[1, 2]")
    elif how == "facts":
        data["record"]["facts"]["driver"] = "999"
        path.write_text(json.dumps(data))
    elif how == "status":
        data["record"]["status"] = "off"
        path.write_text(json.dumps(data))
    elif how == "no evidence":
        data["record"]["findings"] = []
        path.write_text(json.dumps(data))
    elif how == "extra":
        data["record"]["unheard of"] = 1
        path.write_text(json.dumps(data))
    elif how == "schema":
        data["schema"] = 99
        path.write_text(json.dumps(data))
    elif how == "folder":
        path.unlink()
        path.mkdir()
    elif how == "link":
        other = path.with_name("elsewhere")
        path.rename(other)
        path.symlink_to(other)
    elif how == "writable":
        path.chmod(0o666)


@pytest.mark.parametrize(
    "how",
    [
        *("empty", "half", "binary", "nested", "list", "facts", "status", "no evidence", "extra", "schema"),
        *("folder", "link", "writable"),
    ],
)
def test_a_damaged_verdict_does_not_exist(how):
    ask("bad")
    (path,) = files()
    damage(path, how)
    new_process()
    runs = Broken.runs
    quarantine.recall(HERE, registry.backends())
    assert quarantine.quarantined() == frozenset()
    assert selfcheck.results(HERE) == ()
    assert ask("bad").status == "failed"
    assert Broken.runs > runs


def test_private_modes():
    ask("good")
    (path,) = files()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_place_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch, caplog):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(blocker / "below"))
    with caplog.at_level(logging.DEBUG, "fp4dispatch"):
        assert ask("good").status == "passed"
        assert ask("good", problem=replace(PROBLEM, scaling="tensor")).status == "passed"
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "Not a directory" in warning
    assert "fix: set FP4DISPATCH_CACHE_DIR" in warning
    runs = Counted.runs
    ask("good")
    assert Counted.runs == runs


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(tmp_path):
    quarantine.store.folder().mkdir(parents=True, mode=0o500)
    assert ask("good").status == "passed"
    assert files() == []


def test_nothing_half_written_stays_behind(monkeypatch):
    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.private, "write_synced", full_disk)
    assert ask("good").status == "passed"
    assert files() == []


def test_a_raised_exception_is_not_kept(monkeypatch):
    def plan(self, problem, prepared):
        raise RuntimeError("nvcc went away")

    monkeypatch.setattr(Broken, "plan", plan)
    assert ask("bad").status == "failed"
    assert quarantine.quarantined() == {("bad", "fp8_gemm", "sm_90")}
    assert files() == []


def test_out_of_memory_is_tried_again(monkeypatch):
    def plan(self, problem, prepared):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Counted, "plan", plan)
        assert ask("good").status == "unchecked"
    assert ask("good").status == "passed"


def check_in_a_process(folder, name, barrier, answers):
    os.environ["FP4DISPATCH_CACHE_DIR"] = folder
    backend = type("One", (FAULTS["NeverWrites_first"],), {"name": name})()
    registry.backends = lambda: {name: backend}
    barrier.wait()
    for _ in range(3):
        quarantine.reset()
        os.environ["FP4DISPATCH_SELFCHECK"] = "force"
        answers.put(selfcheck.trusted(name, PROBLEM, HERE, CPU).status)
        quarantine.reset()
        os.environ["FP4DISPATCH_SELFCHECK"] = "auto"
        found = selfcheck.known(backend, replace(PROBLEM, activation="fp8"), HERE)
        answers.put("nothing" if found is None else found.status)


def test_processes_that_check_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.Queue()
    folder = str(tmp_path / "shared")
    workers = [context.Process(target=check_in_a_process, args=(folder, "one", barrier, answers)) for _ in range(2)]
    for worker in workers:
        worker.start()
    got = [answers.get(timeout=120) for _ in range(12)]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert got == ["failed"] * 12
    left = list((tmp_path / "shared" / "selfcheck").iterdir())
    assert [path.suffix for path in left] == [".json"]


# ------------------------------------------------------------------------------------------------------ recall, results


def test_recall_takes_failures_that_hold_here_and_runs_nothing():
    ask("bad")
    ask("good")
    ask("bad", System.fake("10.0", **FACTS))
    new_process()
    runs = Broken.runs, Counted.runs
    quarantine.recall(HERE, registry.backends())
    assert quarantine.quarantined() == {("bad", "fp8_gemm", "sm_90")}
    assert (Broken.runs, Counted.runs) == runs
    new_process()
    quarantine.recall(System.fake("12.0", **FACTS), registry.backends())
    assert quarantine.quarantined() == frozenset()


def test_recall_looks_at_every_gpu():
    ask("bad", System.fake("10.0", **FACTS))
    new_process()
    quarantine.recall(System.fake(gpus=["9.0", "10.0"], **FACTS), registry.backends())
    assert quarantine.quarantined() == {("bad", "fp8_gemm", "sm_100")}


def test_results_lists_what_holds_here():
    ask("bad")
    ask("good", System.fake("10.0", **FACTS))
    new_process()
    ask("good")
    assert [(r.backend, r.status) for r in selfcheck.results(HERE)] == [("good", "passed"), ("bad", "failed")]
    assert json.loads(json.dumps([r.to_dict() for r in selfcheck.results(HERE)]))[1]["kind"] == "never written"


def test_reference_facts_need_no_gpu():
    assert facts.of_backend(System.fake(), ReferenceBackend())["gpu"] == "none"
