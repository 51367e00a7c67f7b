"""``verify --race`` with made-up counts, and the verdicts of the self-check in ``verify``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp4dispatch import cli
from fp4dispatch.backends import registry
from fp4dispatch.cli import demangle
from fp4dispatch.machine import system as machine
from fp4dispatch.trust import facts, quarantine, race
from fp4dispatch.trust.race import CaseCount, RaceReport
from fp4dispatch.trust.verdict import CheckResult


def report(bad: tuple[int, ...], *, control: bool = False, launches: int = 100) -> RaceReport:
    cases = tuple(CaseCount(f"case{i}", launches, b) for i, b in enumerate(bad))
    return RaceReport("A GPU", control, 50, 64, 4, 0, launches * len(bad), sum(bad), 0, cases)


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Decide what the race finds; returns the calls."""

    def decide(ours: RaceReport, control: RaceReport) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def run_race(**options: Any) -> RaceReport:
            calls.append(options)
            return control if options.get("control") else ours

        monkeypatch.setattr(race, "run_race", run_race)
        return calls

    return decide


CAUGHT = report((5, 7), control=True)


@pytest.mark.parametrize(
    ("ours", "control", "code", "words"),
    [
        (report((0, 0)), CAUGHT, 0, "the barriers work"),
        (report((0, 3)), CAUGHT, 1, "case1: 3 wrong launches although"),
        (report((0, 0)), report((5, 0), control=True), 1, "case1: the build without barriers was not caught"),
        (report((0, 0), launches=0), CAUGHT, 1, "case0: not run"),
    ],
)
def test_the_race(
    outcome: Any, capsys: pytest.CaptureFixture[str], ours: RaceReport, control: RaceReport, code: int, words: str
) -> None:
    calls = outcome(ours, control)
    assert cli.main(["verify", "--race", "--rounds", "3", "--requests", "9"]) == code
    out = capsys.readouterr().out
    assert words in out
    assert f"with barriers: {ours.bad_launches} of {ours.launches} launches wrong" in out
    assert f"control, without barriers: {control.bad_launches} of 200 launches wrong" in out
    assert ("proves nothing" in out) == ("not caught" in words)
    assert calls == [{"rounds": 3, "requests": 9}, {"rounds": 3, "requests": 9, "control": True}]
    assert cli.main(["verify", "--race", "--json"]) == code
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["control"]["bad_launches"]) == (code == 0, control.bad_launches)


def test_the_race_needs_an_sm90_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["verify", "--race"]) == 1
    assert "BackendUnsupportedError: the race needs a GPU of sm_90" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (12, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "Some GPU")
    assert cli.main(["verify", "--race"]) == 1
    assert "needs a GPU of sm_90, and torch runs on Some GPU (sm_120)" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "many", "1.5"])
def test_counts_are_positive(number: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", "--race", "--rounds", number])
    assert caught.value.code == 2


@pytest.mark.parametrize("words", [["--rounds", "3"], ["--requests", "9"], ["--rounds", "3", "--json"]])
def test_sizes_of_the_race_without_the_race_are_wrong_usage(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", *words])
    assert caught.value.code == 2
    assert "add --race" in capsys.readouterr().err


@pytest.fixture
def kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Keep a verdict of a built-in backend on disk, under the facts of this machine."""
    import fp4dispatch.dispatch.choose  # noqa: F401  (system.current() says what is proven once it is there)

    monkeypatch.setenv("FP4DISPATCH_CACHE_DIR", str(tmp_path / "cache"))
    quarantine.reset()

    def keep(*findings: str) -> CheckResult:
        held = facts.of_backend(machine.current(), registry.instance("reference"))
        result = CheckResult("reference", "fp8_gemm", "row", "fp8", "", "passed", ran=("one",), facts=held)
        result = replace(result, seconds=1.0, build_ms=957.0, check_ms=43.0)
        if findings:
            result = replace(result, status="failed", kind="NaN", findings=findings)
        quarantine.store.save(result)
        return result

    yield keep
    quarantine.reset()


def test_verify_shows_the_verdicts_that_hold(kept: Any, capsys: pytest.CaptureFixture[str]) -> None:
    kept()
    cli.main(["verify"])
    passed = (
        "self-check: reference fp8_gemm (row, fp8 activations): 1 canaries passed in 43 ms, after 957 ms of building"
    )
    assert passed in capsys.readouterr().out
    cli.main(["verify", "--json"])
    (verdict,) = json.loads(capsys.readouterr().out)["selfcheck"]
    assert (verdict["build_ms"], verdict["check_ms"]) == (957.0, 43.0)
    kept("first tile is NaN", "second tile is NaN")
    assert cli.main(["verify"]) == 1
    out = capsys.readouterr().out
    assert "    FAULT second tile is NaN" in out
    assert cli.main(["verify", "--json"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)["selfcheck"]
    assert verdict["findings"] == ["first tile is NaN", "second tile is NaN"]


def test_verify_shows_the_layers_that_were_checked(kept: Any, capsys: pytest.CaptureFixture[str]) -> None:
    canaries = kept()
    layer = replace(canaries, layer="N=64 K=96 -> bfloat16, M=1..32768", ran=("M=1", "M=133", "M=288"), check_ms=21.0)
    quarantine.store.save(layer)
    cli.main(["verify"])
    out = capsys.readouterr().out
    assert out.count("self-check: ") == 2
    assert (
        "self-check: reference fp8_gemm layer (N=64 K=96 -> bfloat16, M=1..32768, row, fp8 activations): "
        "3 numbers of tokens passed in 21 ms"
    ) in out
    wrong = ("M=1 N=64 K=96: tile (0, 0) is all zero",)
    quarantine.store.save(replace(layer, status="failed", kind="zero", findings=wrong))
    assert cli.main(["verify"]) == 1
    assert "reference fp8_gemm layer M=1 N=64 K=96: tile (0, 0) is all zero" in capsys.readouterr().out
    cli.main(["verify", "--json"])
    assert {v["layer"] for v in json.loads(capsys.readouterr().out)["selfcheck"]} == {"", layer.layer}


def test_a_failed_verdict_alone_fails_verify(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4dispatch.cli import verify

    class Row:
        faults = ()
        proof = None

    class OneEntry:
        root = "nowhere"

        @staticmethod
        def entries() -> list[object]:
            return [object()]

    monkeypatch.setattr(verify, "caches", lambda: [OneEntry()])
    monkeypatch.setattr(verify, "check", lambda *_: Row())
    monkeypatch.setattr(verify, "text", lambda *_: "")
    kept()
    assert cli.main(["verify"]) == 0
    kept("a tile is NaN")
    assert cli.main(["verify"]) == 1


def test_doctor_shows_verdicts_and_fails_on_quarantine(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4dispatch.cli import doctor

    kept()
    (check,) = (check for check in doctor.diagnose(doctor.gather()) if check.name == "self-check")
    assert (check.status, check.text.endswith("passed in 43 ms, after 957 ms of building")) == ("ok", True)
    kept("a tile is NaN", "another is zero")
    (check,) = (check for check in doctor.diagnose(doctor.gather()) if check.name == "self-check")
    assert check.status == "fail"
    assert "a tile is NaN" in check.text
    assert "another is zero" in check.text
    assert str(quarantine.store.folder()) in check.fix
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "off")
    (check,) = (check for check in doctor.diagnose(doctor.gather()) if check.name == "self-check")
    assert (check.status, check.fix) == ("warn", "unset FP4DISPATCH_SELFCHECK")


# ---------------------------------------------------------------------------------------------------- readable names

MANGLED = "_ZN4fp4d14produce_kernelEPK5uint4PS0_ll"


def test_kernels_have_readable_names_where_a_tool_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "c++filt"
    tool.write_text("#!/bin/sh\nsed s/_ZN4fp4d14/fp4d::/\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(demangle.libraries, "nvcc", lambda: (None, ()))
    long = "_ZN" + "x" * 5000
    found = demangle.demangled([MANGLED, long, MANGLED])
    assert found[MANGLED] == "fp4d::produce_kernelEPK5uint4PS0_ll"
    assert len(found[long]) == demangle.LONGEST


@pytest.mark.parametrize("script", [None, "exit 1", "/bin/cat; echo one more"])
def test_names_stay_as_they_are_without_a_tool_that_works(
    script: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if script:
        (tmp_path / "c++filt").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "c++filt").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(demangle.libraries, "nvcc", lambda: (None, ()))
    assert demangle.demangled([MANGLED]) == {MANGLED: MANGLED}
