"""``fp4dispatch bench`` from its arguments to its exit code, on planted methods and a clock that is told."""

from __future__ import annotations

import json
import os
import sys

import pytest

from fp4dispatch import cli
from fp4dispatch.benchmark import host, machine, roofline
from fp4dispatch.benchmark.host import HostRow
from fp4dispatch.benchmark.methods import roster
from fp4dispatch.benchmark.methods.base import BASELINE
from fp4dispatch.benchmark.reports import report
from fp4dispatch.cli import bench
from fp4dispatch.errors import InputError
from tests.bench_cases import CPU, FACTS, HOPPER_ON_PAPER, PEAKS, Planted, ToldEngine, document

OURS = {"us": 4.0, "ours": True}


@pytest.fixture
def planted(monkeypatch):
    """A GPU on paper with three methods; returns the list, to be changed."""
    some = [Planted(us=10.0), Planted("peer", us=5.0), Planted("FP4Linear", **OURS), Planted("tardy", us=50.0)]
    some[3].slow_start = True
    monkeypatch.setattr(machine, "card", lambda device: CPU if device == "cpu" else HOPPER_ON_PAPER)
    monkeypatch.setattr(machine, "engine_for", lambda card: ToldEngine())
    monkeypatch.setattr(machine, "facts", lambda card, commit: FACTS | {"commit": commit})
    monkeypatch.setattr(roster, "everything", lambda: tuple(some))
    monkeypatch.setattr(roofline, "measure", lambda card, engine: PEAKS)
    monkeypatch.setattr(host, "measure", lambda card, engine: [HostRow("FP4Linear", 20.0, 0.02, 5.0)])
    return some


SMALL = ("bench", "--shape", "64x32", "--shape", "128x32", "-m", "3", "-m", "1")


def test_the_table_is_the_default(planted, capsys):
    assert cli.main([*SMALL]) == 0
    out = capsys.readouterr().out
    assert "N=64 K=32" in out
    assert "4.0 (2.50x" in out
    assert "not measured: tardy: compiles for minutes on first use: ask for it with --methods" in out
    assert out.count("tardy") == 1


@pytest.mark.parametrize("name", ["json", "csv", "md"])
def test_a_file_that_cannot_be_written_wastes_no_run(name, planted, capsys, tmp_path):
    for target, words in ((tmp_path / "nowhere" / "out", "no folder"), (tmp_path, "it is a folder")):
        assert cli.main([*SMALL, f"--{name}", str(target)]) == 1
        assert words in capsys.readouterr().err
    assert planted[2].calls == 0, "nothing was measured"


@pytest.mark.parametrize("other", ["csv", "md", "plot", "compare"])
def test_two_results_in_one_file_are_refused_before_measuring(other, planted, capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib (extra `bench`) is not installed")
    file, link = tmp_path / "bench.svg", tmp_path / "link.svg"
    file.write_text(json.dumps(document()))
    link.symlink_to(file.name)
    monkeypatch.setattr(bench, "measure", lambda *a, **k: pytest.fail("measured before looking at the files"))
    assert cli.main([*SMALL, "--json", str(file), f"--{other}", str(link)]) == 1
    assert f"--json and --{other} name one file" in capsys.readouterr().err
    assert json.loads(file.read_text()) == document()


def test_a_device_takes_several_results(planted, capsys):
    assert cli.main([*SMALL, "--json", os.devnull, "--csv", os.devnull]) == 0


def test_every_format_at_once(planted, capsys, tmp_path):
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "md")}
    words = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert cli.main([*SMALL, *words, "--commit", "abc1234"]) == 0
    doc = report.read(files["json"])
    assert doc["facts"]["commit"] == "abc1234"
    assert {(row["n"], row["k"], row["m"]) for row in doc["measured"]} == {
        (n, 32, m) for n in (64, 128) for m in (1, 3)
    }
    assert files["csv"].read_text() == report.csv_text(doc)
    assert files["md"].read_text() == report.markdown(doc)
    assert report.text(doc) in capsys.readouterr().out


@pytest.mark.parametrize("name", ["json", "csv", "md"])
def test_a_format_without_a_file_is_all_that_is_printed(name, planted, capsys):
    assert cli.main([*SMALL, f"--{name}"]) == 0
    out = capsys.readouterr().out
    assert "N=64 K=32" not in out or name == "md"
    if name == "json":
        assert json.loads(out)["kind"] == "bench"
    elif name == "csv":
        assert out.startswith("n,k,m,method,status,us")
    else:
        assert out.startswith("NVIDIA H200")


def test_two_formats_cannot_both_print(planted, capsys):
    assert cli.main([*SMALL, "--json", "--csv"]) == 1
    assert "--json and --csv would both print" in capsys.readouterr().err


def test_a_plot(planted, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib (extra `bench`) is not installed")
    assert cli.main([*SMALL, "--plot", str(tmp_path / "x.svg")]) == 0
    assert (tmp_path / "x.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        ("x.svg", "--plot needs matplotlib"),
        ("x.doc", "matplotlib knows"),
        ("no/such/x.svg", "there is no folder"),
    ],
)
def test_a_picture_that_cannot_be_drawn_is_refused_before_measuring(
    picture, words, planted, tmp_path, capsys, monkeypatch
):
    if "matplotlib knows" in words or "folder" in words:
        pytest.importorskip("matplotlib", reason="matplotlib (extra `bench`) is not installed")
    else:
        monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    monkeypatch.setattr(bench, "measure", lambda *_, **__: pytest.fail("it measured first"))
    assert cli.main([*SMALL, "--plot", str(tmp_path / picture)]) == 1
    assert words in capsys.readouterr().err


def test_ours_wrong_is_exit_1_and_no_time(planted, capsys):
    planted[2].harm = lambda method, out, truth: out.zero_()
    assert cli.main([*SMALL]) == 1
    out = capsys.readouterr().out
    assert next(line for line in out.splitlines() if line.startswith("FP4Linear ")).split() == [
        "FP4Linear",
        "WRONG",
        "WRONG",
    ]


def test_a_peer_that_is_wrong_is_shown_and_is_not_our_failure(planted, capsys):
    planted[1].harm = lambda method, out, truth: out.zero_()
    assert cli.main([*SMALL]) == 0
    assert "WRONG: peer N=64 K=32 M=1,3" in capsys.readouterr().out


def test_compare(planted, capsys, tmp_path):
    old = tmp_path / "old.json"
    assert cli.main([*SMALL, "--json", str(old)]) == 0
    assert cli.main([*SMALL, "--compare", str(old)]) == 0
    assert "no regression" in capsys.readouterr().out
    planted[2].us = 4.4
    assert cli.main([*SMALL, "--compare", str(old)]) == 1
    assert "4 regressions" in capsys.readouterr().out
    assert cli.main([*SMALL, "--compare", str(old), "--threshold", "0.2"]) == 0
    planted[0].us = 20.0  # a slower card
    planted[1].us, planted[2].us = 10.0, 8.0
    capsys.readouterr()
    assert cli.main([*SMALL, "--compare", str(old), "--json"]) == 0
    done = capsys.readouterr()
    assert json.loads(done.out)["kind"] == "bench"  # the verdict does not spoil the JSON
    assert "no regression" in done.err


def test_a_bad_old_file_costs_no_run(planted, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "measure", lambda *a, **k: pytest.fail("measured before reading the old file"))
    assert cli.main([*SMALL, "--compare", str(tmp_path / "none.json")]) == 1
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--methods", "peer"), "no row of ours in common"),
        (("--shape", "256x32"), "no row of ours in common"),
        (("--device", "cpu"), "compare runs of one kind of card"),
    ],
)
def test_an_old_run_that_cannot_be_compared_costs_no_run(words, said, planted, monkeypatch, tmp_path, capsys):
    old = tmp_path / "old.json"
    assert cli.main([*SMALL, "--json", str(old)]) == 0
    monkeypatch.setattr(bench, "measure", lambda *a, **k: pytest.fail("measured before comparing the runs"))
    monkeypatch.setattr(machine, "facts", lambda card, commit: FACTS | ({"device": "a CPU"} if card is CPU else {}))
    words = [*words, *("-m", "1")] if "--shape" in words else [*SMALL[1:], *words]
    assert cli.main(["bench", *words, "--compare", str(old)]) == 1
    assert said in capsys.readouterr().err


def test_a_threshold_of_no_comparison_is_refused(planted, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda *a, **k: pytest.fail("measured before looking at the options"))
    assert cli.main([*SMALL, "--threshold", "0.2"]) == 1
    assert "--threshold is the noise of --compare: add --compare OLD.json" in capsys.readouterr().err


def test_the_json_is_there_before_the_run_has_ended(planted, monkeypatch, tmp_path):
    path = tmp_path / "out.json"

    def killed(operands, copies, card):
        if operands.n == 128:
            raise KeyboardInterrupt
        return real(operands, copies, card)

    real, planted[1].prepare = planted[1].prepare, killed
    words = ["bench", "--shape", "64x32", "--shape", "128x32", "-m", "1", "--json", str(path)]
    assert cli.main(words) == 130
    doc = report.read(path)
    assert [(row["n"], row["method"], row["us"]) for row in doc["measured"]] == [
        (64, BASELINE, 10.0),
        (64, "peer", 5.0),
        (64, "FP4Linear", 4.0),
    ]
    assert doc["left"] == [[128, 32, 1]]
    assert "STOPPED: after 1 problems this run had not ended yet" in report.text(doc)
    planted[1].prepare = real
    assert cli.main(words) == 0
    assert report.read(path)["stopped"] == ""


def test_listing(planted, capsys):
    assert cli.main(["bench", "--list", "--suite", "full"]) == 0
    out = capsys.readouterr().out
    assert "targets" in out
    assert "planted FP4Linear" in out


def test_a_listing_as_json(planted, capsys, tmp_path):
    assert cli.main(["bench", "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "targets" in [suite["name"] for suite in found["suites"]]
    assert found["methods"][0] == {"name": BASELINE, "what": f"planted {BASELINE}", "lacks": ""}
    random = ["bench", "--list", "--suite", "random", "--seed", "1", "--problems", "6"]
    assert cli.main([*random, "--json", str(tmp_path / "list.json")]) == 0
    assert BASELINE in capsys.readouterr().out
    found = json.loads((tmp_path / "list.json").read_text())
    assert [len(problem["m"]) for problem in found["problems"]] == [4, 2]
    assert found["methods"]
    assert cli.main(["bench", "--list", "--csv"]) == 1
    assert "--list goes with --json alone" in capsys.readouterr().err
    assert cli.main(["bench", "--list", "--csv", str(tmp_path / "list.csv")]) == 0
    assert "list.csv: not written, as --list measures nothing" in capsys.readouterr().err
    assert not (tmp_path / "list.csv").exists()
    capsys.readouterr()
    assert cli.main([*SMALL, "--rounds", "7", "--commit", "abc1234", "--list"]) == 0
    assert capsys.readouterr().err == "--shape, -m, --rounds, --commit: not used, as --list measures nothing\n"


def test_what_is_measured(planted):
    def planned(*words):
        import argparse

        parser = argparse.ArgumentParser()
        bench.add_parser(parser.add_subparsers(dest="command"))
        args = parser.parse_args(["bench", *words])
        return bench.plan(args, machine.card(args.device))

    suite, some, budget = planned()
    assert (suite.name, budget) == ("quick", bench.QUICK_S)
    assert [m.name for m in some] == [BASELINE, "peer", "FP4Linear"]
    assert planned("--quick")[0].name == "quick"
    suite, some, budget = planned("--suite", "targets")
    assert (len(suite.shapes), len(some), budget) == (6, 3, None)
    assert len(planned("--suite", "targets", "--methods", "*")[1]) == 4
    assert planned("--suite", "full", "--budget-s", "300")[2] == 300
    assert [m.name for m in planned("--methods", "tardy", "--methods", "FP*")[1]] == [BASELINE, "FP4Linear", "tardy"]
    assert planned("--device", "cpu")[0].name == "cpu"
    assert planned("--device", "cpu", "--quick")[0].name == "cpu"
    for words, said in (
        (("--suite", "huge"), "not a suite"),
        (("--suite", "full", "--device", "cpu"), "is for a GPU, and this is a CPU"),
        (("--shape", "12"), "need NxK"),
        (("--shape", "64x40"), "not a multiple of 16"),
        (("--shape", "0x16"), "need NxK"),
        (("-m", "0"), "at least one token"),
        (("--rounds", "1"), "two rounds"),
        (("--methods", "none"), "matches no method"),
    ):
        with pytest.raises(InputError, match=said):
            planned(*words)


def test_wrong_usage_is_2(planted, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "--quick", "--suite", "full"])
    assert ended.value.code == 2


@pytest.mark.parametrize("option", ["--budget-s", "--threshold"])
@pytest.mark.parametrize("number", ["nan", "inf", "-1", "1e999", "", "ten"])
def test_a_number_that_means_nothing_costs_no_run(option, number, planted, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda *a, **k: pytest.fail("measured before looking at the number"))
    with pytest.raises(SystemExit) as ended:
        cli.main([*SMALL, f"{option}={number}"])
    assert ended.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_said(planted, tmp_path, capsys):
    assert cli.main([*SMALL, "--csv", str(tmp_path / "no" / "x.csv")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_a_device_that_is_not_there():
    with pytest.raises(InputError, match="torch sees"):
        machine.card("cuda:99")
    with pytest.raises(InputError, match="not a device"):
        machine.card("gpu")
    with pytest.raises(InputError, match="is not here"):
        machine.card("meta")


def test_on_a_cpu_it_says_what_cannot_be_measured_and_measures_the_host(capsys, tmp_path):
    path = tmp_path / "cpu.json"
    words = ("--device", "cpu", "--shape", "64x64", "-m", "1", "--rounds", "2")
    assert cli.main(["bench", *words, "--methods", "FP*", "--methods", "torch/row", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "no GPU: kernel times, speed-ups over cuBLAS and rooflines cannot be measured here" in out
    assert "not measured: torch/row: FP8 needs one of sm_100" in out
    assert "a choice from scratch" in out
    doc = report.read(path)
    assert {row["status"] for row in doc["measured"]} == {"ok"}
    assert all(row["us"] > 0 for row in doc["measured"])
    calls = {row["what"]: row for row in doc["host"]}
    assert set(calls) == {"nn.Linear, bfloat16", "FP4Linear", "FP8Linear, row", host.LOOKUP, host.RESOLVE}
    assert all(row["us"] > 0 for row in calls.values())
    assert calls["FP4Linear"]["adds"] < calls["FP4Linear"]["us"]


def test_host_rows_subtract_the_backend(monkeypatch):
    now = [0.0]

    def kinds(card):
        def spend(us):
            return lambda i: now.__setitem__(0, now[0] + us * 1e-6)

        return {"layer": spend(30.0), "layer" + host.DIRECT: spend(22.0), host.RESOLVE: spend(300.0)}

    monkeypatch.setattr(host, "calls", kinds)
    wall = host.WallEngine(lambda: now[0])
    rows = host.measure(CPU, ToldEngine(), wall=wall)
    assert [(row.what, round(row.us, 3)) for row in rows] == [("layer", 30.0), (host.RESOLVE, 300.0)]
    assert rows[0].adds == pytest.approx(8.0)
    assert rows[1].adds is None


def test_a_document_of_a_run_is_what_the_docs_are_made_from():
    assert report.text(document())
