"""Counters of CUDA graphs, and the three forms that they are read in."""

from __future__ import annotations

import io
import json
import re
import threading

import pytest
from rich.console import Console

from fp4dispatch.graphs.stats import Stats


@pytest.fixture
def stats():
    found = Stats('Lla"ma\\3\nb')
    found.captured(32, seconds=0.5, nbytes=3 << 20)
    found.captured(16, seconds=0.25)
    found.captured(32, seconds=0.5, nbytes=1 << 20)
    found.measured(32, 20)
    found.measured(16, 17)
    for bucket, times in ((16, 2), (32, 5)):
        for _ in range(times):
            found.replayed(bucket)
    found.rejected(16, ["padding"])
    found.rejected(16, ["padding", "training"])
    found.rejected(None, ["too-many-tokens"])
    return found


def test_the_dict(stats):
    found = stats.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert (found["captures"], found["replays"], found["rejects"]) == (3, 7, 3)
    assert found["reasons"] == {"padding": 2, "too-many-tokens": 1, "training": 1}
    assert list(found["buckets"]) == ["16", "32", "none"]
    assert found["buckets"]["32"] == {
        "captures": 2, "capture_seconds": 1.0, "bytes": 4 << 20, "pays_from": 20, "replays": 5, "rejects": 0,
        "reasons": {},
    }  # fmt: skip
    assert found["buckets"]["16"]["reasons"] == {"padding": 2, "training": 1}
    assert (found["buckets"]["16"]["rejects"], found["buckets"]["none"]["rejects"]) == (2, 1)
    stats.reset()
    assert stats.as_dict()["buckets"] == {}


def test_the_table(stats):
    text = io.StringIO()
    Console(file=text, width=120).print(stats.table())
    rows = [re.split(r"\s*│\s*", line.strip("│ \n")) for line in text.getvalue().splitlines() if line.startswith("│")]
    assert rows == [
        ["16", "1", "0.25", "0.0", "never", "2", "2", "padding 2, training 1"],
        ["32", "2", "1.00", "4.0", "20", "5", "0", ""][: len(rows[1])],
        ["none", "0", "0.00", "0.0", "", "0", "1", "too-many-tokens 1"],
    ]


SAMPLE = re.compile(r'([a-z0-9_]+)\{(model="(?:[^"\\\n]|\\["\\n])*"(?:,[a-z]+="[a-z0-9-]+")+)\} ([0-9.]+)')


def test_the_prometheus_text_has_the_exposition_format(stats):
    """The format: https://prometheus.io/docs/instrumenting/exposition_formats/ ."""
    text = stats.prometheus()
    assert text.endswith("\n")
    kinds: dict[str, str] = {}
    samples = []
    for line in text.splitlines():
        if line.startswith("# HELP "):
            continue
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            kinds[name] = kind
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert list(kinds)[-1] == match[1]  # samples follow their TYPE
        samples.append(match.groups())
    assert len({sample[:2] for sample in samples}) == len(samples)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in kinds.items())
    assert ("fp4dispatch_graph_replays_total", 'model="Lla\\"ma\\\\3\\nb",bucket="32"', "5") in samples
    assert all(name.startswith("fp4dispatch_graph_") for name in kinds)


def test_the_prometheus_client_reads_it(stats):
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(stats.prometheus())}

    def values(name: str, label: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for sample in families[f"fp4dispatch_graph_{name}"].samples:
            assert sample.labels["model"] == 'Lla"ma\\3\nb'
            found[sample.labels[label]] = found.get(sample.labels[label], 0) + sample.value
        return found

    assert values("captures", "bucket") == {"16": 1, "32": 2, "none": 0}
    assert values("replays", "bucket") == {"16": 2, "32": 5, "none": 0}
    assert values("rejects", "bucket") == {"16": 2, "32": 0, "none": 1}
    assert values("reject_reasons", "reason") == {"padding": 2, "training": 1, "too-many-tokens": 1}
    assert values("memory_bytes", "bucket") == {"16": 0, "32": 4 << 20, "none": 0}
    assert values("pays_from_tokens", "bucket") == {"16": 17, "32": 20}
    assert families["fp4dispatch_graph_memory_bytes"].type == "gauge"
    assert families["fp4dispatch_graph_replays"].type == "counter"


def test_nothing_counted_yet_is_valid_too():
    text = Stats().prometheus()
    assert [line for line in text.splitlines() if not line.startswith("# ")] == []
    assert Stats().as_dict()["replays"] == 0


def test_threads_count_together():
    stats = Stats()

    def count() -> None:
        for _ in range(2000):
            stats.replayed(16)
            stats.rejected(16, ["padding"])

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = stats.as_dict()
    assert (found["replays"], found["rejects"], found["reasons"]) == (8000, 8000, {"padding": 8000})
