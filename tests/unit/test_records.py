"""The records in bench/results have the form of their kind, one for each kind, subject and card."""

from __future__ import annotations

import copy
import json
import lzma
import re
from pathlib import Path

import pytest

from fp4dispatch.benchmark.reports import records

RESULTS = Path(__file__).parents[2] / "bench" / "results"
FILES = sorted(RESULTS.glob("*"))
RACE = {
    "kind": "race",
    "facts": {
        "commit": "abc1234",
        "date": "2026-11-22",
        "device": "NVIDIA H100 80GB HBM3",
        "driver": "580.1",
        "torch": "2.11.0",
        "cuda": "13.0",
    },
    "ours": {"cases": []},
    "control": {"cases": []},
    "trials": [],
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_kept_is_a_record(path):
    record = records.read(path)
    assert records.unpacked(path).decode() == records.text(record), "written by hand: use records.write"


def test_evidence_is_there():
    assert {json.loads(records.unpacked(path))["kind"] for path in FILES} == set(records.KINDS)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "race-h100.json"),
        ("NVIDIA H200", "race-h200.json"),
        ("NVIDIA GeForce RTX 5090", "race-rtx-5090.json"),
    ],
)
def test_the_name_says_kind_and_card(device, name):
    assert records.name(RACE | {"facts": RACE["facts"] | {"device": device}}) == name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(kind="races"), "kind is 'races'"),
        (lambda r: r.pop("facts"), "has no facts"),
        (lambda r: r["facts"].pop("commit"), "facts lack commit"),
        (lambda r: r["facts"].update(commit=""), "commit is empty"),
        (lambda r: r["facts"].update(date="22 November"), "needs YYYY-MM-DD"),
        (lambda r: r["facts"].update(driver=None), "driver is empty"),
        (lambda r: r.pop("trials"), "lacks trials"),
    ],
)
def test_what_lacks_something_is_no_record(change, words, tmp_path):
    path = tmp_path / "race-h100.json"
    path.write_text(records.text(RACE))
    assert records.read(path) == RACE
    broken = copy.deepcopy(RACE)
    change(broken)
    path.write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=words):
        records.read(path)
    body = {key: value for key, value in broken.items() if key not in ("kind", "facts")}
    with pytest.raises(ValueError, match=r"not a record|has no facts"):
        records.write(tmp_path / "new.json", broken["kind"], broken.get("facts", {}), body)
    assert not (tmp_path / "new.json").exists()


SAMPLES = {"kind": "launch samples", "subject": "seed 1", "facts": RACE["facts"]} | {
    "seed": 1,
    "method": "us",
    "gpu": {},
    "problems": [{"n": 128, "k": 64}] * 9,
}


def test_launch_samples_are_packed(tmp_path):
    body = {key: SAMPLES[key] for key in records.KINDS["launch samples"]}
    records.write(tmp_path, "launch samples", SAMPLES["facts"], body, "seed 1")
    (path,) = tmp_path.iterdir()
    assert path.name == "launch-samples-seed-1-h100.json.xz"
    assert records.stem(path) == "launch-samples-seed-1-h100"
    assert lzma.decompress(path.read_bytes()).decode() == records.text(SAMPLES)
    assert records.read(path) == SAMPLES
    assert list(records.kept(tmp_path, "launch samples")) == [SAMPLES]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"{}", lambda data: data[:40] + b"0" + data[41:]]
)
def test_a_damaged_packed_record_is_refused(damage, tmp_path):
    path = tmp_path / "launch-samples-seed-1-h100.json.xz"
    path.write_bytes(damage(lzma.compress(records.text(SAMPLES).encode())))
    with pytest.raises(ValueError, match=r"launch-samples-seed-1-h100\.json\.xz: .*cut off or damaged"):
        records.read(path)


def test_a_record_written_to_a_folder_names_its_file(tmp_path):
    records.write(tmp_path, "race", RACE["facts"], {key: RACE[key] for key in records.KINDS["race"]})
    assert [path.name for path in tmp_path.iterdir()] == ["race-h100.json"]


def test_a_document_is_kept_as_it_would_be_written(tmp_path):
    for record in (RACE, SAMPLES):
        records.keep(tmp_path, record)
        assert list(records.kept(tmp_path, record["kind"])) == [record]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launch-samples-seed-1-h100.json.xz", "race-h100.json"]


def test_only_files_of_the_kind_are_read(tmp_path):
    records.keep(tmp_path, RACE)
    for name in ("races-h100.json", "mutants-h100.json", "notes.json"):
        (tmp_path / name).write_text("not a record")
    assert list(records.kept(tmp_path, "race")) == [RACE]
    (tmp_path / "race-h200.json").write_text("not a record")
    with pytest.raises(ValueError, match="Expecting value"):
        list(records.kept(tmp_path, "race"))


def test_a_record_under_another_name_is_refused(tmp_path):
    (tmp_path / "race-h200.json").write_text(records.text(RACE))
    with pytest.raises(ValueError, match=r"make it race-h100\.json"):
        list(records.kept(tmp_path, "race"))


def test_one_is_one(tmp_path):
    with pytest.raises(LookupError, match="0 records"):
        records.one(tmp_path, "race")
    (tmp_path / "race-h100.json").write_text(records.text(RACE))
    assert records.one(tmp_path, "race") == RACE
    other = RACE | {"facts": RACE["facts"] | {"device": "NVIDIA H200"}}
    (tmp_path / "race-h200.json").write_text(records.text(other))
    with pytest.raises(LookupError, match="2 records"):
        records.one(tmp_path, "race")
    assert list(records.kept(tmp_path, "race")) == [RACE, other]
    with pytest.raises(ValueError, match="kind is 'races'"):
        list(records.kept(tmp_path, "races"))


def cited() -> list[tuple[str, str]]:
    """Every record that a text of the repository names: the text's path, and the record's file name."""
    root = RESULTS.parents[1]
    folders = (root / "bench" / "notes", root / "docs", root / "fp4dispatch", root / "csrc")
    texts = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".md", ".toml", ".py", ".h")]
    texts += [*root.glob("*.md"), root / "bench" / "NOTES.md", root / "bench" / "README.md"]
    named = re.compile(r"results/([a-z0-9_-]+\.json(?:\.xz)?)")
    return [(str(path.relative_to(root)), name) for path in texts for name in named.findall(path.read_text("utf-8"))]


def test_records_that_are_cited_are_there():
    found = cited()
    assert len(found) > 10
    assert [(path, name) for path, name in found if not (RESULTS / name).is_file()] == []


def test_a_record_is_stored_as_it_is_read(tmp_path):
    body = {"ours": {"cases": ({"name": "one"}, {"name": "two"})}, "control": {}, "trials": []}
    records.write(tmp_path, "race", RACE["facts"], body)
    (path,) = tmp_path.iterdir()
    assert path.read_text() == records.text(records.read(path))
