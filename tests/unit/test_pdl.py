"""PDL needs two witnesses: the proof and a trial on the machine. The trial itself runs in tests/gpu/test_race.py."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp4dispatch.backends.own.pdl_trial import launch_operands, pdl
from fp4dispatch.backends.own.pdl_trial.launch_operands import ENTRIES, ROLES, Sizes
from fp4dispatch.backends.own.pdl_trial.pdl import PdlVerdict
from fp4dispatch.errors import CaptureError, ToolchainError
from fp4dispatch.jit.catalog.manifest import installed

CUDA = torch.device("cuda", 0)
NOT_LAUNCHES = re.compile(r".*(_plan|_tile|_version|workspace_size|shared_memory_bytes|scale_offsets)|cublaslt_.*")
COMPOSED = {"fp8_quantize_gemm"}
"""Launches two kernels that are tried one by one."""


def kernel(sha: str = "a" * 64, proven: bool = True) -> Any:
    entry = SimpleNamespace(name="w4a16_small/bf16-90a", library_sha256=sha, request={})
    return SimpleNamespace(module=None, built=SimpleNamespace(entry=entry), pdl_allowed=proven)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Decide what a trial finds; returns the list of trials made."""
    made: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(pdl, "arch_of", lambda device: None)
    monkeypatch.setattr(pdl.store, "folder", lambda: tmp_path / "pdl")
    monkeypatch.setattr(pdl.jit, "load", lambda *names: kernel("c" * 64))
    monkeypatch.setattr(pdl.capture, "forbid_in_capture", lambda what, fix: None)
    tmp_path.chmod(0o700)

    def finds(passed: bool) -> list[str]:
        def trial(loaded: Any, chain: Any, device: torch.device) -> PdlVerdict:
            sha = loaded.built.entry.library_sha256
            made.append(sha)
            return PdlVerdict("some kernel", sha, "Some GPU", passed, 12, 3.0, "" if passed else "12 bytes differ")

        monkeypatch.setattr(pdl, "trial", trial)
        return made

    pdl.reset()
    yield finds
    pdl.reset()


def test_both_witnesses_are_needed(trials: Any) -> None:
    made = trials(True)
    assert pdl.allowed(kernel(), CUDA)
    assert not pdl.allowed(kernel("b" * 64, proven=False), CUDA)
    assert made == ["a" * 64]  # what is not proven is not tried


def test_other_bits_mean_no_pdl_for_that_build_and_are_said_once(trials: Any, caplog: Any) -> None:
    made = trials(False)
    with caplog.at_level(logging.WARNING, "fp4dispatch"):
        assert not pdl.allowed(kernel(), CUDA)
        assert not pdl.allowed(kernel(), CUDA)
    assert made == ["a" * 64]
    assert [record.message for record in caplog.records] == ["some kernel is launched without PDL: 12 bytes differ"]


@pytest.mark.parametrize("passed", [True, False])
def test_the_verdict_is_kept_for_the_next_process(passed: bool, trials: Any) -> None:
    made = trials(passed)
    assert pdl.allowed(kernel(), CUDA) is passed
    pdl.reset()
    assert pdl.allowed(kernel(), CUDA) is passed
    assert made == ["a" * 64]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(schema=0),
        lambda data: data["record"].update(library_sha256="b" * 64),
        lambda data: data["record"].update(gpu="Another GPU"),
        lambda data: data["record"].update(passed="yes"),
        lambda data: data["record"].pop("kernel"),
        lambda data: data.pop("record"),
    ],
)
def test_a_record_that_is_not_about_this_build_does_not_count(change: Any, trials: Any, tmp_path: Path) -> None:
    made = trials(False)
    assert not pdl.allowed(kernel(), CUDA)
    (path,) = (tmp_path / "pdl").iterdir()
    data = json.loads(path.read_text())
    data["record"]["passed"] = True
    change(data)
    path.write_text(json.dumps(data))
    pdl.reset()
    assert not pdl.allowed(kernel(), CUDA)
    assert len(made) == 2


def test_a_record_that_others_can_write_does_not_count(trials: Any, tmp_path: Path) -> None:
    made = trials(True)
    assert pdl.allowed(kernel(), CUDA)
    (path,) = (tmp_path / "pdl").iterdir()
    path.chmod(0o666)
    pdl.reset()
    assert pdl.allowed(kernel(), CUDA)
    assert len(made) == 2


def test_settings_decide_who_is_asked(trials: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trials(False)
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "off")
    assert pdl.allowed(kernel(), CUDA)
    monkeypatch.setenv("FP4DISPATCH_PDL", "off")
    assert not pdl.allowed(kernel(), CUDA)
    assert made == []
    monkeypatch.delenv("FP4DISPATCH_PDL")
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "auto")
    assert not pdl.allowed(kernel(), CUDA)
    monkeypatch.setenv("FP4DISPATCH_SELFCHECK", "force")
    assert not pdl.allowed(kernel(), CUDA)  # not from the record
    assert len(made) == 2


def test_without_the_chain_there_is_no_trial_and_no_pdl(trials: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trials(True)

    def load(*names: Any) -> Any:
        raise ToolchainError("no nvcc")

    monkeypatch.setattr(pdl.jit, "load", load)
    assert not pdl.allowed(kernel(), CUDA)
    monkeypatch.setattr(pdl.jit, "load", lambda *names: kernel("c" * 64, proven=False))
    assert not pdl.allowed(kernel("b" * 64), CUDA)
    assert made == []


def test_no_trial_during_capture(trials: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trials(True)
    assert pdl.allowed(kernel(), CUDA)

    def forbid(what: str, fix: str) -> None:
        raise CaptureError(what)

    monkeypatch.setattr(pdl.capture, "forbid_in_capture", forbid)
    assert pdl.allowed(kernel(), CUDA)  # known
    with pytest.raises(CaptureError):
        pdl.allowed(kernel("b" * 64), CUDA)
    assert made == ["a" * 64]


def test_every_function_that_launches_has_its_place_in_the_table() -> None:
    """A kernel that is missing there would silently lose PDL; a role that is missing would not be tested."""
    catalog = installed()
    for name, known in catalog.kernels.items():
        if not known.pdl or known.op == "race_chain":
            continue
        text = (catalog.csrc / known.source).read_text()
        exported = set(re.findall(r"TVM_FFI_DLL_EXPORT_TYPED_FUNC\((\w+),", text))
        launching = {function for function in exported if not NOT_LAUNCHES.fullmatch(function)}
        launching -= {function for function in launching if function.endswith("_shaped")} | COMPOSED
        assert {f.removesuffix("_even") for f in launching if f.endswith("_even")} <= launching
        even = {f for f in launching if f.endswith("_even")}
        launching -= even
        assert launching == {entry.function for entry in ENTRIES[name]}, name
        for variant in known.variants.values():
            for entry in launch_operands.entries(known, variant):
                assert set(entry.arguments) <= {*ROLES, "none", "workspace", "shape", "room"}
                assert (entry.function in even) == ("room" in entry.arguments) == ("FP4D_EVEN=1" in variant.defines)
                assert set(entry.early) <= set(entry.arguments)
                assert any(ROLES[role].fill is None for role in entry.arguments if role in ROLES)
                assert bool(entry.early) == bool(known.before_wait)
                assert ("shape" in entry.arguments) == (entry.tile is not None)
    assert set(ENTRIES) == {name for name, known in catalog.kernels.items() if known.pdl and known.op != "race_chain"}


def test_operands_are_finite_and_of_the_stated_shape() -> None:
    sizes, generator = Sizes(5, 72, 160), torch.Generator()
    for name, role in ROLES.items():
        stored = torch.zeros(role.shape(sizes), dtype=role.dtype or sizes.dtype)
        if role.fill is None:
            continue
        role.fill(stored, generator)
        assert stored.view(torch.uint8).any(), name
        values = role.view(stored, sizes)
        if values.is_floating_point():
            assert values.float().isfinite().all(), name


def test_a_chain_on_a_kernel_that_writes_nothing_is_an_error() -> None:
    from fp4dispatch.backends.own.pdl_trial.launch_chain import LaunchChain

    silent = SimpleNamespace(fp8_quantize_row=lambda *arguments: None)
    entry = ENTRIES["fp8_quantize"][0]
    with pytest.raises(RuntimeError, match="left out_a8, out_token_scale unwritten"):
        LaunchChain(silent, None, entry, Sizes(3, 8, 32), torch.Generator())


def test_the_trial_refuses_a_kernel_that_is_not_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = kernel()
    loaded.built.entry.request = {"kernel": "race_chain", "variant": "any"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    found = pdl.trial(loaded, None, CUDA)
    assert not found.passed
    assert "not in the table of launches" in found.evidence
    assert asdict(found)["launches"] == 0


def late_reader(early: bool) -> Any:
    """A quantiser and its neighbours on the CPU; ``early`` ones read what was there before the producer wrote."""
    state: dict[str, torch.Tensor] = {}

    def fp8_quantize_row(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, enable_pdl: bool) -> None:
        seen = state["before"] if enable_pdl and early else x.view(torch.uint8).reshape(-1)
        q.view(torch.uint8).reshape(-1).copy_(seen[: q.numel()])
        scale.fill_(1.0)

    def produce(source: torch.Tensor, target: torch.Tensor, delay: int, enable_pdl: bool) -> None:
        state["before"] = target.clone()
        target.copy_(source)

    def consume(
        outputs: torch.Tensor, copy: torch.Tensor, source: torch.Tensor, target: torch.Tensor, enable_pdl: bool
    ) -> None:
        copy.copy_(outputs)
        target.copy_(source)

    return SimpleNamespace(fp8_quantize_row=fp8_quantize_row), SimpleNamespace(produce=produce, consume=consume)


@pytest.mark.parametrize("early", [False, True])
def test_a_chain_counts_what_a_kernel_read_too_early(early: bool) -> None:
    from fp4dispatch.backends.own.pdl_trial.launch_chain import LaunchChain

    module, neighbours = late_reader(early)
    link = LaunchChain(module, neighbours, ENTRIES["fp8_quantize"][0], Sizes(3, 8, 32), torch.Generator())
    link.launch(0)
    output, inputs = link.wrong().tolist()
    assert (output > 0) == early
    assert inputs == 0


def test_a_chain_counts_writes_that_come_after_the_consumer() -> None:
    from fp4dispatch.backends.own.pdl_trial.launch_chain import LaunchChain

    module, neighbours = late_reader(False)
    neighbours.consume = lambda outputs, copy, source, target, enable_pdl: copy.copy_(
        outputs
    )  # does not have the last word
    link = LaunchChain(module, neighbours, ENTRIES["fp8_quantize"][0], Sizes(3, 8, 32), torch.Generator())
    link.launch(0)
    output, inputs = link.wrong().tolist()
    assert output == 0
    assert inputs > 0


def test_a_chain_gives_a_kernel_for_many_tokens_its_launch_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp4dispatch.backends.own.pdl_trial import launch_chain
    from fp4dispatch.backends.own.tiling.launch_model import H200, best

    given: list[Any] = []

    def w8_gemm(*arguments: Any) -> None:
        given.append(arguments)
        arguments[5].fill_(1)

    monkeypatch.setattr(launch_chain, "gpu_of", lambda device: (None, 132))
    known = installed().kernel("w8_gemm_sm90")
    (entry,) = launch_operands.entries(known, known.variant("bf16_128"))
    launch_chain.LaunchChain(SimpleNamespace(w8_gemm=w8_gemm), None, entry, Sizes(200, 1544, 2080), torch.Generator())
    assert entry.tile is not None
    assert tuple(given[0][6]) == best(entry.tile, 200, 1544, 2080, H200).shape
