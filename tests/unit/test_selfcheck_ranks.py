"""One rank's failure quarantines the backend on every rank: real processes, gloo."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch.distributed as dist

from fp4dispatch.errors import InputError
from fp4dispatch.trust import quarantine, selfcheck
from fp4dispatch.trust.verdict import CheckResult

BAD = {
    "status": "failed",
    "kind": "never written",
    "findings": ("M=1 N=1 K=1: tile (0, 0) was never written",),
    "evidence": ({"kind": "never written"},),
}


def verdict(backend: str = "cutlass", **options) -> CheckResult:
    options = {"status": "passed", "arch": "sm_90", "facts": {"driver": "1"}} | options
    return CheckResult(backend, "fp8_gemm", "row", "fp8", options.pop("arch"), options.pop("status"), **options)


def rank(number, size, file, answers, mine, ranks):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=number, world_size=size)
    group = dist.new_group(ranks) if ranks else None
    try:
        if not ranks or number in ranks:
            agreed = selfcheck.agree(mine, group)
            answers.put((number, agreed.status, agreed.text(), sorted(quarantine.quarantined()), agreed.lasting))
        else:
            answers.put((number, "not asked", "", sorted(quarantine.quarantined()), True))
    except InputError as error:
        answers.put((number, "error", str(error), [], True))
    finally:
        dist.destroy_process_group()


def run(tmp_path: Path, verdicts, ranks=None):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    size = len(verdicts)
    workers = [
        context.Process(target=rank, args=(i, size, str(tmp_path / "store"), answers, verdicts[i], ranks))
        for i in range(size)
    ]
    for worker in workers:
        worker.start()
    got = sorted(answers.get(timeout=180) for _ in workers)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    return got


def test_one_failure_is_everyones(tmp_path):
    shut = ("cutlass", "fp8_gemm", "sm_90")
    got = run(tmp_path, [verdict(), verdict(**BAD), verdict(status="unchecked")])
    assert [status for _, status, *_ in got] == ["failed"] * 3
    assert got[0][2].startswith("cutlass fp8_gemm M=1 N=1 K=1: tile (0, 0) was never written (on rank 1).")
    assert "on rank" not in got[1][2]
    assert [entries for *_, entries, _ in got] == [[shut], [], [shut]]  # rank 1 remembers its own when it checks
    assert [lasting for *_, lasting in got] == [False, True, False]


def test_all_passed(tmp_path):
    got = run(tmp_path, [verdict(), verdict()])
    assert [(status, entries) for _, status, _, entries, _ in got] == [("passed", [])] * 2


def test_only_the_group_is_asked(tmp_path):
    got = run(tmp_path, [verdict(), verdict(**BAD), verdict()], ranks=[0, 2])
    assert [status for _, status, *_ in got] == ["passed", "not asked", "passed"]


def test_different_questions_are_an_error_on_every_rank(tmp_path):
    got = run(tmp_path, [verdict(), verdict("cudnn", **BAD)])
    assert [status for _, status, *_ in got] == ["error"] * 2
    assert "cudnn fp8_gemm row fp8; cutlass fp8_gemm row fp8" in got[0][2]


@pytest.mark.parametrize("mine", [verdict(), verdict(**BAD)])
def test_without_torch_distributed_a_verdict_stands(mine):
    assert selfcheck.agree(mine) is mine
