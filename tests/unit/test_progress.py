"""Progress: a bar on a terminal, lines elsewhere, nothing when quiet, never on stdout."""

from __future__ import annotations

import pytest

from fp4dispatch.machine import progress
from fp4dispatch.machine.progress import Progress


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def work(**options: object) -> None:
    with Progress("compiling", 3, **options) as shown:  # type: ignore[arg-type]
        shown.note("first")
        shown.step()
        shown.update(3, 4, "last")


def test_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    work()
    assert capsys.readouterr() == ("", "")
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.__setitem__(0, clock[0] + 4) or clock[0])
    work(unit="files", announce=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["compiling", "compiling: 3 of 4 files, 12 s, at last"]


def test_bytes_are_sizes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with Progress("quantize", 0, unit="bytes") as shown:
        shown.update(1_500_000_000, 3_000_000_000, "q_proj")
    assert capsys.readouterr().err == "quantize: 1.50 of 3.00 GB, 0 s, at q_proj\n"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    work()
    out, err = capsys.readouterr()
    assert out == ""
    assert "━" in err
    assert "last" in err


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_is_quiet(terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    work(quiet=True, announce=True)
    assert capsys.readouterr() == ("", "")
