"""select: precedence, cache, log lines, errors; explain: any machine; the command that reproduces a decision."""

from __future__ import annotations

import json
import logging
import shlex
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from fp4dispatch.backends import registry
from fp4dispatch.cli import explain as cli_explain
from fp4dispatch.dispatch import choose
from fp4dispatch.dispatch.explain import explain
from fp4dispatch.dispatch.whatif import reproduce
from fp4dispatch.errors import BackendUnsupportedError, InputError, NoBackendError, SettingsError, UnknownBackendError
from fp4dispatch.machine.system import System
from fp4dispatch.policy import resolve
from fp4dispatch.policy.catalogue import catalogue
from fp4dispatch.problem import Problem
from fp4dispatch.problem.decision import Decision
from tests.declared import DeclaredBackend

NVFP4 = Problem("nvfp4_gemm", 16, 4096, 4096)
FP8 = Problem("fp8_gemm", 16, 4096, 4096, scaling="tensor")
FACTS = {
    "cuda": "13.0",
    "torch": "2.11",
    "nvcc": "13.0",
    "cutlass": "4.5",
    "cudnn": "9.19.0",
    "cudnn_frontend": "1.14",
}
VARIABLES = ("FP4_GEMM_BACKEND", "FP4DISPATCH_FP8_BACKEND", "FP4DISPATCH_DISABLE", "FP4DISPATCH_LOG")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """An sm_120 machine on which every declared backend is written; returns a function that changes it."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    backends = {name: DeclaredBackend(name) for name in catalogue().backends}
    monkeypatch.setattr(registry, "backends", lambda: backends)
    choose.reset()

    def use(system):
        monkeypatch.setattr("fp4dispatch.machine.system.current", lambda: system)

    use(System.fake("12.0", **FACTS))
    yield use
    choose.reset()


# -------------------------------------------------------------------------------------------------------- precedence


def test_auto():
    decision = choose.select(NVFP4)
    assert (decision.backend, decision.requested, decision.requested_by) == ("cudnn", "auto", "auto")


def test_argument_over_environment_over_auto(monkeypatch):
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cublaslt")
    by_variable = choose.select(NVFP4)
    assert (by_variable.backend, by_variable.requested_by) == ("cublaslt", "FP4_GEMM_BACKEND")
    by_argument = choose.select(NVFP4, backend="w4a16")
    assert (by_argument.backend, by_argument.requested_by) == ("w4a16", "argument")
    forced_auto = choose.select(NVFP4, backend="auto")
    assert (forced_auto.backend, forced_auto.requested_by) == ("cudnn", "auto")


def test_each_op_has_its_variable(monkeypatch):
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cutlass")
    monkeypatch.setenv("FP4DISPATCH_FP8_BACKEND", "reference")
    assert choose.select(NVFP4).backend == "cutlass"
    fp8 = choose.select(FP8)
    assert (fp8.backend, fp8.requested_by) == ("reference", "FP4DISPATCH_FP8_BACKEND")


def test_the_environment_is_read_at_each_call(monkeypatch):
    assert choose.select(NVFP4).backend == "cudnn"
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cublaslt")
    assert choose.select(NVFP4).backend == "cublaslt"
    monkeypatch.setenv("FP4_GEMM_BACKEND", "")
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "cudnn, cutlass")
    assert choose.select(NVFP4).backend == "cublaslt"


def test_cutlass_named_on_sm120_is_honoured_with_one_warning(monkeypatch, caplog):
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cutlass")
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        assert choose.select(NVFP4).backend == "cutlass"
        choose.select(NVFP4)
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "UNPROVEN" in warnings[0]


def test_unknown_names(monkeypatch):
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cudn")
    with pytest.raises(SettingsError) as raised:
        choose.select(NVFP4)
    assert str(raised.value).startswith(
        "FP4_GEMM_BACKEND='cudn' is not a backend. Did you mean cudnn? Known: auto, reference, "
    )
    assert choose.select(NVFP4, backend="cudnn").backend == "cudnn"  # the argument comes first
    monkeypatch.delenv("FP4_GEMM_BACKEND")
    with pytest.raises(UnknownBackendError, match=r"'cutlas' is not a backend\. Did you mean cutlass"):
        choose.select(NVFP4, backend="cutlas")


@pytest.mark.parametrize("value", ["cutlas", "auto"])
def test_bad_disable(monkeypatch, value):
    monkeypatch.setenv("FP4DISPATCH_DISABLE", value)
    with pytest.raises(SettingsError, match="FP4DISPATCH_DISABLE"):
        choose.select(NVFP4)


def test_aliases_are_honoured_and_noted_once(monkeypatch, caplog):
    monkeypatch.setenv("FP4_GEMM_BACKEND", "marlin")
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        assert choose.select(NVFP4).backend == "w4a16"
        choose.select(NVFP4)
    assert len([r for r in caplog.records if "marlin means w4a16" in r.message]) == 1


# ------------------------------------------------------------------------------------------------------------- cache


def test_one_decision_per_bucket_of_m(monkeypatch):
    asked = []
    real = resolve.resolve
    monkeypatch.setattr(resolve, "resolve", lambda *a, **k: asked.append(a[0].m) or real(*a, **k))
    for m in (9, 16, 13, 17, 0, 1):
        assert choose.select(replace(NVFP4, m=m)).problem.m == m
    assert asked == [16, 24, 1]


def test_a_changed_machine_is_noticed(machine):
    assert choose.select(NVFP4).backend == "cudnn"
    machine(System.fake("10.0", **FACTS))
    assert choose.select(NVFP4).backend == "cutlass"


def test_the_device_of_the_tensors_counts(machine):
    machine(replace(System.fake(**FACTS), gpus=System.fake(gpus=["12.0", "9.0"]).gpus))
    assert choose.select(NVFP4, gpu=0).backend == "cudnn"
    assert choose.select(replace(NVFP4, m=8), gpu=1).backend == "w4a16"
    assert choose.select(NVFP4, gpu=None).backend == "reference"
    with pytest.raises(InputError, match="gpu=2 is not visible: 2 GPUs are"):
        choose.select(NVFP4, gpu=2)


def test_many_threads_agree_and_report_once(caplog):
    found, start = [], threading.Barrier(16)

    def work():
        start.wait()
        found.extend(choose.select(replace(NVFP4, m=m)).backend for m in range(1, 200))

    with caplog.at_level(logging.INFO, "fp4dispatch"):
        threads = [threading.Thread(target=work) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 16 * 199
    assert set(found) == {"cudnn"}
    lines = [r.message for r in caplog.records if r.levelno == logging.INFO]
    assert len(lines) == 1


# ----------------------------------------------------------------------------------------------------------- logging


def test_one_info_line_per_choice_with_rule_and_source(caplog):
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        for m in (9, 16, 12):
            choose.select(replace(NVFP4, m=m))
        choose.select(replace(NVFP4, m=64))  # the same backend by the same rule
        choose.select(replace(NVFP4, n=8192))
        choose.select(NVFP4, backend="cudnn")
    lines = [r.message for r in caplog.records]
    assert len(lines) == 3
    for part in ("M=9 N=4096 K=4096", "sm_120", "cudnn", "nvfp4-sm12x-cudnn-first", "sglang/pull/20047"):
        assert part in lines[0]


def test_fallback_is_one_warning(machine, caplog):
    machine(System.fake("12.0", cuda="13.0", torch="2.11"))
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        for m in (1, 16, 300):
            assert choose.select(replace(NVFP4, m=m)).backend == "cublaslt"
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "cuDNN not found" in warnings[0]


def test_unknown_variables_are_reported_once(monkeypatch, caplog):
    monkeypatch.setenv("FP4DISPATCH_DISABEL", "cudnn")
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        choose.select(NVFP4)
        choose.select(FP8)
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING and "DISABEL" in r.message]
    assert "Did you mean FP4DISPATCH_DISABLE?" in warning


def test_nothing_is_logged_during_capture_and_it_is_afterwards(monkeypatch, caplog):
    monkeypatch.setattr("fp4dispatch.machine.capture.is_capturing", lambda: True)
    with caplog.at_level(logging.DEBUG, "fp4dispatch"):
        choose.select(NVFP4)
        assert caplog.records == []
        monkeypatch.setattr("fp4dispatch.machine.capture.is_capturing", lambda: False)
        choose.select(NVFP4)
    assert len(caplog.records) == 1


def test_importing_sets_up_no_logging_and_the_variable_does():
    code = (
        "import logging, fp4dispatch.dispatch.choose as d\n"
        "log = logging.getLogger('fp4dispatch')\n"
        "assert [type(h) for h in log.handlers] == [logging.NullHandler] and log.level == 0\n"
        "from fp4dispatch import Problem, System\n"
        "d._system.current = lambda: System.fake()\n"
        "from tests.declared import DeclaredBackend\n"
        "d.registry.backends = lambda: {'reference': DeclaredBackend('reference')}\n"
        "d.select(Problem('nvfp4_gemm', 1, 16, 16))\n"
        "d.reset(); d.select(Problem('nvfp4_gemm', 1, 16, 16))\n"
        "print([type(h).__name__ for h in log.handlers], log.level)\n"
    )

    def run(level):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(p for p in sys.path if p) + ":."} | level,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip(), done.stderr

    out, err = run({"FP4DISPATCH_LOG": "info"})
    assert out == "['NullHandler', '_Stderr'] 20"
    assert "fp4dispatch INFO: nvfp4_gemm" in err
    assert "fp4dispatch WARNING: nvfp4_gemm" in err
    out, err = run({"FP4DISPATCH_LOG": "off"})
    assert (out, err) == ("['NullHandler'] 51", "")
    out, err = run({})
    assert (out, err) == ("['NullHandler'] 0", "")


# ------------------------------------------------------------------------------------------------------------ errors


def test_a_named_backend_that_cannot_run_is_an_error_with_everything(machine, monkeypatch):
    raw = replace(NVFP4, sf_layout="linear")
    with pytest.raises(BackendUnsupportedError) as raised:
        choose.select(raw, backend="cudnn", layer="mlp.up")
    text = str(raised.value)
    assert text.startswith('backend="cudnn" was requested for layer "mlp.up" and cannot run nvfp4_gemm M=16')
    assert "LAYOUT b_sf is linear, needs 128x4" in text
    assert "reproduce anywhere: fp4dispatch explain nvfp4_gemm -m 16 -n 4096 -k 4096 --arch 12.0" in text
    assert raised.value.decision.backend is None
    monkeypatch.setenv("FP4_GEMM_BACKEND", "flashinfer_trtllm")
    with pytest.raises(BackendUnsupportedError, match="by FP4_GEMM_BACKEND and cannot run") as raised:
        choose.select(NVFP4)
    assert "ARCH GPU is sm_120, needs sm_100 or sm_103" in str(raised.value)


def test_nothing_can_run(machine, monkeypatch):
    machine(System.fake("12.0", cuda="12.8", cudnn="9.7.1", cudnn_path="/usr/lib", nvcc="12.8"))
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "reference")
    with pytest.raises(NoBackendError) as raised:
        choose.select(Problem("nvfp4_gemm", 16, 7168, 7152, sf_layout="linear"), layer="mlp.up")
    text = str(raised.value)
    assert text.startswith("nothing can run nvfp4_gemm M=16 N=7168 K=7152")
    for part in (
        'layer "mlp.up"',
        "nvcc 12.8 (needs 12.9 for sm_120)",
        "K=7152 is not a multiple of 32",
        "cuDNN 9.7.1 loaded from /usr/lib (needs 9.19)",
        "--arch 12.0 --cuda 12.8 --torch none --cudnn 9.7.1",
        "--disable reference",
    ):
        assert part in text
    assert raised.value.decision.verdict("reference").reasons[0].code == "DENIED"


# ----------------------------------------------------------------------------------------------------------- explain


def same(a: Decision, b: Decision) -> bool:
    """Equal but for where libraries lie and who asked."""

    def view(d):
        verdicts = [(v.backend, v.activation, [r.code for r in v.reasons], v.denied) for v in d.verdicts]
        return d.problem, d.arch, d.backend, d.activation, d.rule, d.requested, verdicts, len(d.warnings)

    return view(a) == view(b)


def replay(command: str, capsys) -> dict:
    """Run a printed command, as a user would, and return its JSON."""
    import argparse

    words = shlex.split(command)
    assert words[:2] == ["fp4dispatch", "explain"]
    parser = argparse.ArgumentParser()
    cli_explain.add_parser(parser.add_subparsers())
    args = parser.parse_args([*words[1:], "--json"])
    capsys.readouterr()
    cli_explain.run(args)
    return json.loads(capsys.readouterr().out)


MACHINES = {
    "everything": System.fake("12.0", **FACTS, flashinfer="0.6.4", proven=[("nvfp4_gemm", "sm_120")]),
    "old": System.fake("12.0", cuda="12.8", torch="2.11", cudnn="9.7.1", cudnn_path="/usr/lib", nvcc="12.8"),
    "no frontend": System.fake("10.0", **{k: v for k, v in FACTS.items() if k != "cudnn_frontend"}),
    "headers only": System.fake("9.0", cutlass="4.5"),
    "cpu torch": System.fake(torch="2.13.0+cpu"),
    "nothing": System.fake(),
    "quarantine": System.fake(
        "10.3", **FACTS, quarantined=[("cutlass", "nvfp4_gemm", "sm_103"), ("cudnn", "fp8_gemm", "sm_103")]
    ),
    "weight-only kernels": System.fake("12.0", **FACTS, proven=[("w4_gemm", "sm_120")]),
    "all kernels": System.fake("12.0", proven=[("nvfp4_gemm", "sm_120"), ("w4_gemm", "sm_120")]),
    "two gpus": replace(System.fake(**FACTS), gpus=System.fake(gpus=["12.0", "9.0"]).gpus),
}
QUESTIONS = {
    "plain": (NVFP4, None),
    "named": (NVFP4, "cutlass"),
    "raw": (Problem("nvfp4_gemm", 3, 100, 7152, sf_layout="linear", bias=True, out_dtype="float16"), None),
    "piecewise": (Problem("nvfp4_gemm", 1, 64, 64, capture="piecewise", m_min=0, activation="nvfp4"), None),
    "fp8": (FP8, None),
    "fp8 raw": (replace(FP8, activation="fp8", raw=True), None),
    "block": (Problem("fp8_gemm", 16, 4096, 4096, scaling="block128"), "cudnn"),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("machine_name", MACHINES)
@pytest.mark.parametrize("disabled", [(), ("cublaslt", "w4a16")])
def test_the_printed_command_reproduces_the_decision(machine_name, question, disabled, capsys):
    system, (problem, backend) = MACHINES[machine_name], QUESTIONS[question]
    original = resolve.resolve(
        problem,
        system,
        registry.backends(),
        requested=backend or "auto",
        requested_by="FP4_GEMM_BACKEND" if backend else "auto",
        disabled=disabled,
    )
    again = replay(reproduce(original, system, disabled), capsys)
    expected = original.to_dict()
    for key in ("problem", "arch", "backend", "activation", "rule", "requested"):
        assert again[key] == json.loads(json.dumps(expected[key])), key
    assert len(again["warnings"]) == len(expected["warnings"])
    for mine, theirs in zip(expected["verdicts"], again["verdicts"], strict=True):
        assert theirs["backend"] == mine["backend"]
        assert [r["code"] for r in theirs["reasons"]] == [r["code"] for r in mine["reasons"]]
        assert [h["id"] for h in theirs["denied"]] == [h["id"] for h in mine["denied"]]


def test_explain_asks_this_machine_when_no_fact_is_given(machine, monkeypatch):
    assert same(explain("nvfp4_gemm", 16, 4096, 4096), choose.select(NVFP4))
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cublaslt")
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "cudnn")
    here = explain("nvfp4_gemm", 16, 4096, 4096)
    assert (here.backend, here.requested_by) == ("cublaslt", "FP4_GEMM_BACKEND")
    assert here.verdict("cudnn").reasons[0].text == "disabled"


def test_explain_of_another_machine_ignores_this_one(monkeypatch):
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cublaslt")
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "w4a16")
    there = explain("nvfp4_gemm", 8, 4096, 4096, arch="9.0", nvcc="13.0")
    assert (there.backend, there.requested_by) == ("w4a16", "auto")


def test_explain_takes_companions_for_granted_unless_told():
    def ask(**facts):
        return explain("nvfp4_gemm", 16, 4096, 4096, arch="12.0", **facts)

    assert ask(cuda="13.0", cudnn="9.19.0").backend == "cudnn"
    without = ask(cuda="13.0", cudnn="9.19.0", cudnn_frontend="none")
    assert [r.text for r in without.verdict("cudnn").reasons] == ["cudnn-frontend not found (needs 1.13)"]
    assert ask(nvcc="13.0", proven=False).verdict("cutlass").can_run
    assert not ask(nvcc="13.0", cutlass="none").verdict("cutlass").can_run
    assert ask(cuda="13.0").backend == "cublaslt"
    assert ask(cuda="13.0", torch="none").backend == "reference"
    assert ask(proven=True).backend == "cutlass"
    some = ask(proven=["w4_gemm"])
    assert some.verdict("cutlass").reasons
    assert some.verdict("w4a16").reasons == () or some.verdict("w4a16").reasons[0].code == "UNAVAILABLE"
    with pytest.raises(InputError, match="proven=w4_gem: no kernel of nvfp4_gemm; known: nvfp4_gemm, w4_gemm"):
        ask(proven=["w4_gem"])


def test_explain_never_raises_for_no_backend():
    decision = explain("nvfp4_gemm", 1, 16, 16, arch="9.0", backend="cudnn")
    assert decision.backend is None
    assert explain("nvfp4_gemm", 1, 16, 16, arch="none", disabled=["reference"]).backend is None


def test_explain_takes_a_system_or_facts():
    assert explain("nvfp4_gemm", 16, 64, 64, system=System.fake("10.0", **FACTS)).backend == "cutlass"
    with pytest.raises(InputError, match="not both"):
        explain("nvfp4_gemm", 16, 64, 64, arch="9.0", system=System.fake())


def test_explain_refuses_nonsense():
    with pytest.raises(InputError):
        explain("nvfp4_gemm", 16, 64, 64, arch="120f")
    with pytest.raises(InputError):
        explain("nvfp4_gemm", 16, 64, 64, arch="12.0", cuda="newest")
    with pytest.raises(InputError):
        explain("nvfp4_gemm", -1, 64, 64)
    with pytest.raises(UnknownBackendError):
        explain("nvfp4_gemm", 16, 64, 64, arch="12.0", backend="cudn")
    with pytest.raises(UnknownBackendError):
        explain("nvfp4_gemm", 16, 64, 64, arch="12.0", disabled=["cudn"])
