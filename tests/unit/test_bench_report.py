"""One document, four shapes of it: table, JSON, CSV and Markdown say the same, and mark what needs marking."""

from __future__ import annotations

import csv
import io
import json

import pytest

from fp4dispatch.benchmark.host import HostRow
from fp4dispatch.benchmark.methods.base import BASELINE
from fp4dispatch.benchmark.problems import shapes
from fp4dispatch.benchmark.reports import plot, records, report
from fp4dispatch.errors import InputError
from tests import docs
from tests.bench_cases import FACTS, document, row

SIX = shapes.catalogue().suite("targets").shapes


def test_the_document_is_plain_data_and_reads_back(tmp_path):
    doc = document(host=[HostRow("FP4Linear", 20.0, 0.02, 5.0)])
    path = tmp_path / "bench.json"
    path.write_text(report.json_text(doc))
    assert report.read(path) == doc
    assert json.loads(report.json_text(document([]))) == document([])
    assert len(report.json_text(doc).splitlines()) < 400
    assert doc["methods"]["FP4Linear"]["rivals"] == [BASELINE, "humming/nvfp4"]
    assert doc["methods"]["torch/row"]["rivals"] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "not a benchmark's JSON"),
        ('{"kind": "demo"}', "not a benchmark's JSON"),
        ('{"kind": "bench", "schema": 2}', "schema 2 and lacks suite"),
        ('{"kind": "bench", "schema": 1}', "lacks suite, facts"),
    ],
)
def test_other_files_are_refused(tmp_path, text, said):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        report.read(path)
    with pytest.raises(InputError, match="cannot be read"):
        report.read(tmp_path / "none.json")


def test_the_table():
    text = report.text(document())
    assert text.splitlines()[0].startswith("NVIDIA H200 sm_90, driver 580.159.04, torch 2.11.0+cu130, commit abc1234")
    assert "copy 4 TB/s, bf16 800 TFLOP/s, fp8 1.6e+03 TFLOP/s" in text
    assert "N=4096 K=14336: Llama-3.1-8B down" in text
    line = next(line for line in text.splitlines() if line.startswith("FP4Linear "))
    assert line.split()[1:] == ["12.5", "(3.20x,", "50%)"] * 3
    assert "not measured: humming/nvfp4: humming-kernels is not installed" in text


def test_wrong_and_failed_rows_have_no_number_and_a_reason():
    wrong = {"status": "WRONG", "us": None, "roofline": None, "detail": "tile (3, 1) is off by 1, allowed 0.006"}
    failed = {"status": "failed", "us": None, "roofline": None, "detail": "RuntimeError: no kernel"}
    rows = [row(64, 64, 1, BASELINE, 4.0), row(64, 64, 2, BASELINE, 4.0)]
    rows += [row(64, 64, m, "FP4Linear", 1.0) | wrong for m in (1, 2)]
    rows += [row(64, 64, 1, "torch/row", 1.0) | failed]
    text = report.text(document(rows))
    cells = next(line for line in text.splitlines() if line.startswith("FP4Linear ")).split()
    assert cells == ["FP4Linear", "WRONG", "WRONG"]
    assert "WRONG: FP4Linear N=64 K=64 M=1,2: tile (3, 1) is off by 1" in text
    assert "failed: torch/row N=64 K=64 M=1: RuntimeError: no kernel" in text
    assert "1.0" not in cells


def test_noisy_and_warm_rows_are_marked():
    rows = [row(64, 64, 1, BASELINE, 4.0, spread=0.06), row(64, 64, 2, BASELINE, 4.0, cold=False)]
    line = next(line for line in report.text(document(rows)).splitlines() if line.startswith(BASELINE))
    assert line.split()[1::2] == ["4.0~", "4.0*"]


def test_what_was_left_out_and_a_stop_are_said():
    doc = document() | {"left": [[64, 64, 1]] * 5, "stopped": ""}
    assert (
        "not measured: 5 problems (64x64 M=1, 64x64 M=1, 64x64 M=1, ...): the time budget was used up"
        in report.text(doc)
    )
    doc["stopped"] = "FP4Linear at 64x64, M=1: CUDA error"
    assert "STOPPED: FP4Linear at 64x64, M=1: CUDA error" in report.text(doc)
    assert "the run stopped" in report.text(doc)


def test_many_tokens_go_into_several_tables():
    rows = [row(64, 64, m, BASELINE, 4.0) for m in range(1, 17)]
    heads = [line.split() for line in report.text(document(rows)).splitlines() if line.lstrip().startswith("M=")]
    assert [len(head) for head in heads] == [7, 7, 2]


def test_csv_has_every_row_and_every_field():
    doc = document()
    rows = list(csv.DictReader(io.StringIO(report.csv_text(doc))))
    assert len(rows) == len(doc["measured"])
    assert float(rows[1]["us"]) == doc["measured"][1]["us"]
    assert rows[1]["tile"] == "0x0"
    assert set(rows[0]) == set(doc["measured"][0])
    assert report.csv_text(document([])) == ""


def test_markdown_tables_are_whole():
    text = report.markdown(document(host=[HostRow("FP4Linear", 20.0, 0.02, 5.0)]))
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 6 + 4  # shapes, means, targets, standing, host
    for table in tables:
        assert len({line.count("|") for line in table}) == 1, table
        assert set(table[1]) <= set("|-:")
    assert "| FP4Linear | 12.5 (3.20x, 50%) |" in text


def test_geometric_means():
    rows = [row(n, k, 1, BASELINE, 40.0) for n, k in SIX]
    rows += [row(n, k, 1, "FP4Linear", us) for (n, k), us in zip(SIX, (10.0, 10, 10, 40, 40, 40), strict=True)]
    rows += [row(*SIX[0], 1, "torch/row", 20.0)]
    doc = document(rows)
    assert report.speedups(doc)["FP4Linear"][1] == (pytest.approx(2.0), 6)
    assert report.speedups(doc, SIX[:3])["FP4Linear"][1] == (pytest.approx(4.0), 3)
    lines = report.text(doc).splitlines()
    after = lines[next(i for i, line in enumerate(lines) if "geometric mean over 6 shapes" in line) :]
    assert next(line for line in after if line.startswith("FP4Linear")).split() == ["FP4Linear", "2.00"]
    assert next(line for line in after if line.startswith("torch/row")).split() == ["torch/row", "2.00", "(1)"]


def test_where_ours_stands_worst_against_the_best_peer():
    rows = []
    for m, bf16, torch_q, ours in ((1, 40.0, 20.0, 10.0), (64, 40.0, 30.0, 33.0), (1024, 50.0, 60.0, 52.0)):
        rows += [row(64, 64, m, BASELINE, bf16), row(64, 64, m, "torch/row+q", torch_q)]
        rows += [row(64, 64, m, "torch/row", 1.0), row(64, 64, m, "FP8Linear/row", ours)]
    (found,) = report.versus(document(rows))
    assert found == {
        "n": 64,
        "k": 64,
        "method": "FP8Linear/row",
        "ratio": pytest.approx(1.1),
        "m": 64,
        "rival": "torch/row+q",
    }
    lines = [line.split() for line in report.text(document(rows)).splitlines()]
    assert ["64x64", "FP8Linear/row", "1.100", "64", "torch/row+q"] in lines


def test_the_summary_for_the_documentation():
    rows = []
    for n, k in SIX:
        for m, ours in ((1, 10.0), (64, 30.5), (1024, 33.0 if n == 8192 else 20.0)):
            rows += [row(n, k, m, BASELINE, 40.0), row(n, k, m, "torch/row+q", 30.0)]
            rows += [row(n, k, m, "FP8Linear/row", ours, error=0.036)]
    rows += [row(*SIX[0], 1, "FP4Linear", 1.0) | {"status": "WRONG", "us": None}]
    doc = document(rows)
    (found,) = report.overall(doc)
    assert (found["n"], found["k"], found["m"], found["rival"]) == (8192, 8192, 1024, "torch/row+q")
    assert (found["ratio"], found["lost"], found["problems"]) == (pytest.approx(1.1), 2, 18)
    text = report.summary(doc)
    assert "| FP8Linear/row | 1.100 | 8192x8192 | 1024 | torch/row+q | 2 of 18 |" in text
    assert "| FP8Linear/row | 4.00 | 1.31 |" in text
    assert "55 rows were checked tile by tile, 1 of them are wrong or failed" in text
    assert "| FP8Linear/row | 0.0360 |" in text


def test_the_documentation_takes_its_tables_from_kept_runs(monkeypatch, tmp_path):
    made = {"format": "nvfp4", "backends": {"w4a16 (bf16)": 224}, "weights_gb": 6.1, "peak_gb": 9.0}
    made |= {"logits": dict.fromkeys(("relative_error", "cosine", "top1", "kl"), 0.5)}
    made |= {"prefill": {"tokens": 4096, "tokens_per_s": 1e4}}
    made |= {"decode": [{"batch": 1, "status": "ok", "tokens_per_s": 200.0}, {"batch": 16, "status": "WRONG"}]}
    body = {"formats": [made], "prompt": 4096, "tiny": False}
    facts = {**dict.fromkeys(records.FACTS, "x"), "date": "2026-11-21", **FACTS}
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    assert docs.bench() == docs.decoder() == "No run is kept yet."
    measured = {**document(), "facts": facts}
    for record in (measured, {"kind": "decoder", "facts": facts, **body}):
        records.keep(tmp_path, record)
    assert docs.bench() == report.summary(measured)
    text = docs.decoder()
    assert "| nvfp4 | 6.1 | 9.0 | 200 (1.00x) | WRONG | 10000 (1.00x) | 0.5000 |" in text
    assert "nvfp4: 224 layers w4a16 (bf16)" in text


def test_a_cpu_run_claims_no_speed():
    doc = document([row(384, 384, 1, name, 50.0) for name in (BASELINE, "FP4Linear")])
    doc["facts"] = FACTS | {"arch": "", "device": "x86_64", "driver": None}
    doc["peaks"] = dict.fromkeys(doc["peaks"])
    text = report.text(doc)
    assert "50.0" in text
    assert "x)" not in text
    assert "as fast as" not in text
    assert "best peer" not in text


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_plots(tmp_path, ending, magic):
    pytest.importorskip("matplotlib", reason="matplotlib (extra `bench`) is not installed")
    path = tmp_path / f"plot.{ending}"
    plot.draw(document(), path)
    assert path.read_bytes().startswith(magic)
    assert path.stat().st_size > 5000


def test_a_plot_draws_every_method_that_has_a_time(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib (extra `bench`) is not installed")
    drawn = []
    from matplotlib.axes import Axes

    real = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda self, *a, **k: drawn.append((k["label"], a[:2])) or real(self, *a, **k))
    plot.draw(document(), tmp_path / "x.svg")
    assert len(drawn) == 6 * 3
    assert ("FP4Linear", ((1, 64, 1024), (3.2, 3.2, 3.2))) in drawn


def test_plots_that_cannot_be(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="nothing to draw"):
        plot.draw(document([]), tmp_path / "x.png")
    pytest.importorskip("matplotlib", reason="matplotlib (extra `bench`) is not installed")
    with pytest.raises(InputError, match="the ending says the format"):
        plot.draw(document(), tmp_path / "x.nonsense")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(InputError, match="fix: pip install matplotlib"):
        plot.draw(document(), tmp_path / "x.png")


def test_a_compiled_run_says_so_beside_one_that_is_not(monkeypatch, tmp_path):
    """The documentation has both; the headline is of the compiled one, with all that makes it faster."""
    from tests.site import figures, speed

    def entry(fmt, weights, *speeds, compiled):
        steps = [{"batch": b, "status": "ok", "tokens_per_s": v} for b, v in zip((1, 16), speeds, strict=True)]
        if compiled:
            steps = [s | {"compiled": {"off": 0.0123, "same_tokens": 0.96, "right": True}} for s in steps]
        logits = dict.fromkeys(("relative_error", "cosine", "top1", "kl"), 0.5)
        found = {"format": fmt, "backends": {}, "weights_gb": weights, "logits": logits, "decode": steps}
        return found if compiled else found | {"prefill": {"tokens": 4096, "tokens_per_s": 1e4}}

    first = next(run for run in figures.random_runs() if "H200" in run["facts"]["device"])
    for compiled, times in ((False, 1), (True, 2)):
        ways = ("bf16", "nvfp4", *(("nvfp4+fuse", "nvfp4+fuse+head") if compiled else ()))
        made = [entry(fmt, 16.1 - 4 * i, (100 + 50 * i) * times, 1000, compiled=compiled) for i, fmt in enumerate(ways)]
        record = {"kind": "decoder", "facts": first["facts"], "formats": made, "prompt": 128, "tiny": False}
        record |= {"subject": "compiled", "compiled": True} if compiled else {}
        records.keep(tmp_path, record)
    records.keep(tmp_path, first)
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    compiled, plain = docs.decoder().split("\n\nNVIDIA")
    assert "compiled with `torch.compile`" in compiled
    assert "at most 0.012 from eager ones, and at least 96% of tokens" in compiled
    assert "| nvfp4+fuse+head | 4.1 | - | 500 (2.50x) | 1000 (1.00x) | 0.5000 |" in compiled
    assert "torch.compile" not in plain
    assert "| nvfp4 | 12.1 | - | 150 (1.50x) | 1000 (1.00x) | 10000 (1.00x) |" in plain
    line = speed.headline()
    assert "from 200 to 500 tokens/s at batch 1 under `torch.compile`, and its weights from 16.1 to 4.1 GB" in line
    assert line.count("A decoder") == 1
    picture = figures.decoder()
    assert picture.count("torch.compile<") == 1
    assert "NVFP4, fused, with head" in picture
    assert "nvfp4+fuse<" not in picture
