"""The targets beside a run: the right method and tokens, and no verdict from a mean over fewer shapes."""

from __future__ import annotations

from fp4dispatch.benchmark.methods.base import BASELINE
from fp4dispatch.benchmark.methods.roster import everything
from fp4dispatch.benchmark.problems.shapes import catalogue
from fp4dispatch.benchmark.reports import report, targets
from tests.bench_cases import FACTS, document, row

SUITE = catalogue().suite("targets")
NAMES = {method.name for method in everything()}


def test_every_target_is_of_methods_that_there_are_and_tokens_that_are_measured():
    for target in targets.TARGETS:
        assert {target.method, target.peer} <= NAMES
        assert any(target.first <= m <= target.last for m in SUITE.m)
    for m in SUITE.m:  # NVFP4 has one at every M
        assert [t.least for t in targets.TARGETS if t.method == "FP4Linear" and t.first <= m <= t.last] != []
    assert {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096} == set(SUITE.m)


def test_verdicts():
    means = {
        "FP4Linear": {1: (2.7, 6), 16: (2.43, 6), 64: (2.2, 5), 8192: (9.0, 6)},
        "FP4Linear/bf16": {1: (2.8, 6), 512: (0.949, 6)},
        "humming/nvfp4": {1: (1.86, 6), 64: (1.33, 4)},
        "FP8Linear/row": {512: (1.0, 6), 1024: (1.9, 6)},
    }
    assert targets.table(means, 6) == [
        targets.HEAD,
        ["NVFP4 weights", "1", "2.70", "2.70", "met", "humming/nvfp4", "1.86"],
        ["NVFP4 weights", "16", "2.70", "2.43", "10.0% short", "humming/nvfp4", "-"],
        ["NVFP4 weights", "64", "2.10", "2.20 (5)", "", "humming/nvfp4", "1.33 (4)"],
        ["NVFP4 weights, bfloat16 pinned", "512", "0.95", "0.95", "0.1% short", "humming/nvfp4", "-"],
        ["FP8 by row", "1024", "1.85", "1.90", "met", "torch/row+q", "-"],
    ]
    assert targets.table({}, 6) == [targets.HEAD]


def doc_of(shapes):
    rows = []
    for n, k in shapes:
        rows += [row(n, k, 1, name, us) for name, us in ((BASELINE, 40.0), ("FP4Linear", 10.0), ("torch/row", 20.0))]
    return document(rows)


def test_the_report_shows_them_for_the_shapes_that_they_are_stated_over():
    for text in (report.text(doc_of(SUITE.shapes)), report.summary(doc_of([*SUITE.shapes, (64, 64)]))):
        line = next(line for line in text.splitlines() if "NVFP4 weights" in line)
        assert line.replace("|", " ").split() == ["NVFP4", "weights", "1", "2.70", "4.00", "met", "humming/nvfp4", "-"]
    part = report.text(doc_of(SUITE.shapes[:2]))
    assert "4.00 (2)" in part
    assert " met " not in part
    assert "target for" not in report.text(doc_of([(64, 64)]))
    other = doc_of(SUITE.shapes)
    other["facts"] = FACTS | {"arch": "sm_120"}
    assert "target for" not in report.text(other)


def test_the_documentation_names_who_was_not_measured():
    doc = doc_of(SUITE.shapes) | {"left": [[64, 64, 1]]}
    failed = {"status": "failed", "us": None, "roofline": None, "detail": "ImportError: no triton"}
    doc["measured"].append(row(*SUITE.shapes[0], 1, "flashinfer/block128+q", 1.0) | failed)
    summary = report.summary(doc)
    assert "failed: flashinfer/block128+q N=4096 K=4096 M=1: ImportError: no triton" in summary
    assert "not measured: humming/nvfp4: humming-kernels is not installed" in summary
    assert "not measured: 1 problems (64x64 M=1): the time budget was used up" in summary
