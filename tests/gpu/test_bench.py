"""The benchmark on a real GPU: times mean what they say, wrong results get none, and the command runs."""

from __future__ import annotations

import json
import time

import pytest
import torch

from fp4dispatch import cli
from fp4dispatch.benchmark import machine, roofline, run
from fp4dispatch.benchmark.methods import background, peers, roster
from fp4dispatch.benchmark.methods.base import BASELINE
from fp4dispatch.benchmark.problems.operands import Operands
from fp4dispatch.benchmark.reports import records
from fp4dispatch.problem.arch import SM90
from fp4dispatch.tune.timing import GraphEngine, take_turns
from tests.bench_cases import Planted

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def card():
    return machine.card()


@pytest.fixture
def engine(card):
    return machine.engine_for(card)


def test_ceilings_are_those_of_a_gpu(card, engine):
    peaks = roofline.measure(card, engine)
    assert 1e11 < peaks.copy < 2e13
    assert 1e13 < peaks.bf16 < 1e16
    assert peaks.fp8 is None or peaks.fp8 > peaks.bf16


def test_twice_the_work_takes_twice_the_time(card, engine):
    small, large = (torch.empty(size << 20, dtype=torch.uint8, device=card.device) for size in (256, 512))
    calls = {"small": lambda i: small.fill_(1), "large": lambda i: large.fill_(1)}
    replays = {name: engine.record(call, 4, 1).replay for name, call in calls.items()}
    times = take_turns(replays, dict.fromkeys(calls, 4))
    assert times["large"].us / times["small"].us == pytest.approx(2.0, rel=0.15)


def test_rotated_weights_come_from_memory(card, engine):
    """One weight again and again stays in the cache and is read faster than the memory could deliver it."""
    size = int(card.cache_bytes / 3) & ~0xFFFF
    weights = [torch.ones(size // 4, device=card.device) for _ in range(12)]
    out = torch.empty((), device=card.device)

    def call(i):
        return torch.sum(weights[i], dim=0, out=out)

    call(0)
    replays = {"warm": engine.record(call, 60, 1).replay, "cold": engine.record(call, 60, 12).replay}
    times = take_turns(replays, dict.fromkeys(replays, 60))
    assert times["cold"].us > 1.05 * times["warm"].us


def test_a_replay_finds_nothing_of_the_last_one_in_the_cache(card, engine):
    """A weight that fits the cache is read from memory by each replay, unless nothing else fills the cache before."""
    weight = torch.ones((int(card.cache_bytes / 3) & ~0xFFFF) // 4, device=card.device)
    out = torch.empty((), device=card.device)

    def call(i):
        return torch.sum(weight, dim=0, out=out)

    call(0)
    engines = {"cold": engine, "warm": GraphEngine(card.device, 0.0)}
    replays = {name: each.record(call, 1, 1).replay for name, each in engines.items()}
    times = take_turns(replays, dict.fromkeys(replays, 1))
    assert times["cold"].us > 1.05 * times["warm"].us


class OnGpu(Planted):
    """Multiplies exactly on the GPU; ``harm`` runs inside the call, so that a graph holds it."""

    def prepare(self, operands, copies, card):
        def at(x):
            truth = operands.product(x.float(), self.format)
            out = torch.empty(truth.shape, dtype=torch.bfloat16, device=truth.device)
            counter = torch.zeros((), device=truth.device)

            def call(i):
                out.copy_(truth)
                counter.add_(1)
                if self.harm is not None:
                    self.harm(out, counter)
                return out

            return run.Launch(call, "bf16", "planted", out)

        return at


def test_what_is_wrong_or_only_wrong_in_a_graph_gets_no_time(card, engine):
    some = [
        OnGpu(),
        OnGpu("wrong", harm=lambda out, counter: out[:128, :128].zero_()),
        OnGpu("later", harm=lambda out, counter: out.mul_((counter <= 8).to(out.dtype))),
    ]
    outcome = run.Runner(card, engine, some).run([(512, 512)], [129])
    rows = {row.method: row for row in outcome.rows}
    assert rows[BASELINE].status == "ok"
    assert rows[BASELINE].us > 0
    assert [rows[name].status for name in ("wrong", "later")] == ["WRONG", "WRONG"]
    assert rows["wrong"].us is rows["later"].us is None
    assert rows["later"].detail.endswith("in replays")


def test_every_method_that_can_run_here_is_right(card, engine):
    """Ragged sizes too; what fails says why."""
    able = [method for method in roster.everything() if not method.lacks(card) and not method.slow_start]
    outcome = run.Runner(card, engine, able, rounds=5).run([(1536, 1024)], [1, 17, 129])
    bad = [f"{row.method} M={row.m}: {row.status} {row.detail}" for row in outcome.rows if row.status != "ok"]
    assert bad == []
    assert all(row.us > 0 for row in outcome.rows)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "bench.json"
    words = ("bench", "--shape", "1024x1024", "-m", "1", "-m", "33", "--rounds", "5", "--methods", "FP8Linear/row")
    assert cli.main([*words, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "measured ceilings: copy" in out
    doc = json.loads(path.read_text())
    assert {row["method"] for row in doc["measured"]} == {BASELINE, "FP8Linear/row"}
    assert all(0 < row["roofline"] < 1.5 for row in doc["measured"])
    assert cli.main([*words, "--compare", str(path), "--threshold", "1.0"]) == 0


def test_the_random_suite_and_its_samples_run(card, tmp_path, monkeypatch):
    from bench import launch_samples

    words = ("--seed", "5", "--problems", "2")
    path = tmp_path / "random.json"
    assert (
        cli.main(["bench", "--suite", "random", *words, "--rounds", "2", "--formats", "nvfp4", "--json", str(path)])
        == 0
    )
    doc = json.loads(path.read_text())
    assert doc["left"] == []
    layers = {row["method"] for row in doc["measured"] if row["status"] == "ok"}
    assert {BASELINE, "FP4Linear", "FP4Linear/bf16"} <= layers
    if card.arch != SM90:
        return
    assert all(count > 10 for *_, count in doc["tried"])
    monkeypatch.setattr("sys.argv", ["x", *words, "--m", "33", "80", "--commit", "test", "--json", str(tmp_path)])
    assert launch_samples.main() == 0
    (record,) = records.kept(tmp_path, launch_samples.KIND)
    assert len(record["problems"]) == 2
    assert all(problem["bf16"] > 0 and len(problem["launches"]) > 8 for problem in record["problems"])


@pytest.mark.filterwarnings("error::RuntimeWarning")  # the layer's configuration is the one that is known ahead
def test_hummings_kernels_are_compiled_ahead(card, engine, monkeypatch, tmp_path):
    """A process compiles them into Humming's cache, and then the layer compiles none."""
    cache = pytest.importorskip("humming.utils.jit").get_humming_cache_dir
    monkeypatch.setenv("HUMMING_CACHE_DIR", str(tmp_path))
    cache.cache_clear()
    method, n, k, ms = peers.HummingNvfp4(), 1024, 2048, (1, 40, 300)

    def gemms():
        return {
            f.parent.name
            for f in tmp_path.glob("*/kernel.cubin")
            if "humming<" in (f.parent / "signature.txt").read_text()
        }

    try:
        with background.Background([method.ahead([(n, k, ms)], card)]) as ahead:
            ((_, process),) = ahead._running
            until = time.monotonic() + 300
            while not process._is_over() and time.monotonic() < until:
                time.sleep(0.1)
        assert ahead.lost == []
        compiled = gemms()
        assert 1 <= len(compiled) <= len(ms)
        operands = Operands(n, k, card.device)
        prepared = method.prepare(operands, 1, card)
        for m in ms:
            prepared(operands.activation(m)).call(0)
        engine.finish()
        assert gemms() == compiled
    finally:
        cache.cache_clear()
