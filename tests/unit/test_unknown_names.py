"""A backend that nobody has, or a value that nobody understands, is refused before a model is changed: everywhere."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

import fp4dispatch
from fp4dispatch import FP4Linear, FP8Linear
from fp4dispatch.backends import registry
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.cli import main
from fp4dispatch.dispatch import choose, report, request
from fp4dispatch.errors import BackendUnsupportedError, SettingsError, UnknownBackendError
from fp4dispatch.formats import fp8_quantize, nvfp4_quantize

VARIABLES = ("FP4_GEMM_BACKEND", "FP4DISPATCH_FP8_BACKEND", "FP4DISPATCH_DISABLE", "FP4DISPATCH_SELFCHECK")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    choose.reset()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


def nvfp4_weights() -> LinearWeights:
    q = nvfp4_quantize(torch.randn(64, 64))
    return LinearWeights("nvfp4_gemm", "nvfp4", 64, 64, q.data, q.sf, q.global_scale.reshape(1), (64,))


def fp8_weights() -> LinearWeights:
    q = fp8_quantize(torch.randn(64, 64), "tensor")
    return LinearWeights("fp8_gemm", "tensor", 64, 64, q.data, q.scale)


def raw_nvfp4(rows: int, **kwargs):
    a, b = nvfp4_quantize(torch.randn(4, 64)), nvfp4_quantize(torch.randn(64, 64))
    return fp4dispatch.nvfp4_gemm(
        a.data[:rows], b.data, a.sf[:rows], b.sf, torch.ones(()), sf_layout="linear", **kwargs
    )


def raw_fp8(rows: int, **kwargs):
    a, b = fp8_quantize(torch.randn(4, 64), "tensor"), fp8_quantize(torch.randn(64, 64), "tensor")
    return fp4dispatch.fp8_gemm(a.data[:rows], b.data, a.scale, b.scale, **kwargs)


# Where a name enters: op, what is called with it.
ENTRANCES = {
    "FP4Linear": ("nvfp4_gemm", lambda **kw: FP4Linear(64, 64, **kw)),
    "FP8Linear": ("fp8_gemm", lambda **kw: FP8Linear(64, 64, **kw)),
    "meta": ("nvfp4_gemm", lambda **kw: FP4Linear(64, 64, device="meta", **kw)),
    "FP4Linear.from_linear": ("nvfp4_gemm", lambda **kw: FP4Linear.from_linear(nn.Linear(64, 64), **kw)),
    "FP8Linear.from_linear": ("fp8_gemm", lambda **kw: FP8Linear.from_linear(nn.Linear(64, 64), **kw)),
    "FP4Linear.from_weights": ("nvfp4_gemm", lambda **kw: FP4Linear.from_weights(nvfp4_weights(), **kw)),
    "FP8Linear.from_weights": ("fp8_gemm", lambda **kw: FP8Linear.from_weights(fp8_weights(), **kw)),
    **{
        f"replace_linears {fmt}": (
            "nvfp4_gemm" if fmt == "nvfp4" else "fp8_gemm",
            lambda fmt=fmt, **kw: fp4dispatch.replace_linears(model(), fmt, **kw),
        )
        for fmt in ("nvfp4", "fp8", "fp8_row", "fp8_block")
    },
    "replace_linears of nothing": (
        "nvfp4_gemm",
        lambda **kw: fp4dispatch.replace_linears(model(), {"*": None, "0": "nvfp4"}, exclude="*", **kw),
    ),
    "nvfp4_gemm": ("nvfp4_gemm", lambda **kw: raw_nvfp4(4, **kw)),
    "nvfp4_gemm of no rows": ("nvfp4_gemm", lambda **kw: raw_nvfp4(0, **kw)),
    "fp8_gemm": ("fp8_gemm", lambda **kw: raw_fp8(4, **kw)),
    "fp8_gemm of no rows": ("fp8_gemm", lambda **kw: raw_fp8(0, **kw)),
    "explain": ("nvfp4_gemm", lambda **kw: fp4dispatch.explain("nvfp4_gemm", 1, 64, 64, **kw)),
    "explain of another machine": (
        "nvfp4_gemm",
        lambda **kw: fp4dispatch.explain("nvfp4_gemm", 1, 64, 64, arch="12.0", **kw),
    ),
}
VARIABLE = {"nvfp4_gemm": "FP4_GEMM_BACKEND", "fp8_gemm": "FP4DISPATCH_FP8_BACKEND"}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_name_that_is_none_is_refused(entrance, monkeypatch):
    op, call = ENTRANCES[entrance]
    for wrong, words in (("marlin9", "'marlin9' is not a backend"), (3, "a int, not"), (["cutlass"], "a list, not")):
        with pytest.raises(UnknownBackendError, match=words):
            call(backend=wrong)
    monkeypatch.setenv(VARIABLE[op], "cutlas")
    with pytest.raises(SettingsError, match=rf"{VARIABLE[op]}='cutlas' is not a backend\. Did you mean cutlass"):
        call()
    monkeypatch.delenv(VARIABLE[op])
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "cudn")
    with pytest.raises(SettingsError, match="FP4DISPATCH_DISABLE='cudn'"):
        call()


@pytest.mark.parametrize("entrance", [name for name in ENTRANCES if "explain" not in name])
def test_a_backend_that_never_runs_the_op_is_refused(entrance, monkeypatch):
    op, call = ENTRANCES[entrance]
    other = "w8a8" if op == "nvfp4_gemm" else "w4a16"
    with pytest.raises(BackendUnsupportedError, match=rf'backend="{other}" was requested and never runs {op}'):
        call(backend=other)
    monkeypatch.setenv(VARIABLE[op], other)
    with pytest.raises(BackendUnsupportedError, match=rf"requested by {VARIABLE[op]} and never runs"):
        call()
    monkeypatch.setenv(VARIABLE[op], "reference")
    monkeypatch.setenv("FP4DISPATCH_DISABLE", "reference")
    with pytest.raises(BackendUnsupportedError, match="FP4DISPATCH_DISABLE forbids it"):
        call()


@pytest.mark.parametrize("variable", ["FP4DISPATCH_SELFCHECK", "FP4DISPATCH_TUNED", "FP4DISPATCH_FP8_COPY"])
@pytest.mark.parametrize("entrance", [name for name in ENTRANCES if "explain" not in name])
def test_a_value_that_is_none_is_refused(entrance, variable, monkeypatch):
    monkeypatch.setenv(variable, "perhaps")
    with pytest.raises(SettingsError, match=f"{variable}='perhaps'"):
        ENTRANCES[entrance][1]()


@pytest.mark.parametrize("wrong", [{"backend": "marlin9"}, {}])
def test_the_model_stays_as_it_was(wrong, monkeypatch):
    if not wrong:
        monkeypatch.setenv("FP4_GEMM_BACKEND", "cutlas")
    made = model()
    before = {name: id(module) for name, module in made.named_modules()}
    with pytest.raises((UnknownBackendError, SettingsError)):
        fp4dispatch.replace_linears(made, **wrong)
    assert {name: id(module) for name, module in made.named_modules()} == before


def test_loading_leaves_the_model_as_it_was(monkeypatch, tmp_path):
    stored = model()
    fp4dispatch.replace_linears(stored, "nvfp4")
    fp4dispatch.save_quantized(stored, tmp_path / "stored")
    fresh = model()
    before = {name: id(module) for name, module in fresh.named_modules()}
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cutlas")
    with pytest.raises(SettingsError, match="FP4_GEMM_BACKEND='cutlas'"):
        fp4dispatch.load_quantized(fresh, tmp_path / "stored")
    assert {name: id(module) for name, module in fresh.named_modules()} == before
    monkeypatch.delenv("FP4_GEMM_BACKEND")
    assert len(fp4dispatch.load_quantized(fresh, tmp_path / "stored").layers) == 2


def test_warming_up_refuses_what_was_misspelt_since(monkeypatch):
    made = model()
    fp4dispatch.replace_linears(made, "nvfp4")
    made(torch.randn(2, 64))
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cutlas")
    with pytest.raises(SettingsError, match="FP4_GEMM_BACKEND='cutlas'"):
        fp4dispatch.warmup(made, [1])
    monkeypatch.delenv("FP4_GEMM_BACKEND")
    made[0].backend = "marlin9"
    with pytest.raises(UnknownBackendError, match="marlin9"):
        fp4dispatch.warmup(made, [1])


@pytest.mark.parametrize(
    "words",
    [
        ["explain", "nvfp4_gemm", "-m", "1", "-n", "64", "-k", "64"],
        ["explain", "nvfp4_gemm", "-m", "1", "-n", "64", "-k", "64", "--arch", "12.0", "--cuda", "13.0"],
        ["demo", "--json"],
    ],
)
def test_the_command_line_refuses_a_misspelt_variable(words, monkeypatch, capsys):
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cutlas")
    assert main(words) == 1
    assert "FP4_GEMM_BACKEND='cutlas' is not a backend. Did you mean cutlass?" in capsys.readouterr().err


def test_another_op_s_variable_does_not_matter(monkeypatch):
    monkeypatch.setenv("FP4DISPATCH_FP8_BACKEND", "cutlas")
    fp4dispatch.replace_linears(model(), "nvfp4")
    monkeypatch.setenv("FP4_GEMM_BACKEND", "cutlas")
    fp4dispatch.replace_linears(model(), "nvfp4", backend="reference")  # the argument comes first


def test_one_line_for_all_m_that_are_decided_alike(caplog):
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        made = model()
        fp4dispatch.replace_linears(made, "nvfp4")
        made(torch.randn(3, 64))
        fp4dispatch.warmup(made, [1, 16, 300])
    lines = [r.message for r in caplog.records if r.levelno == logging.INFO]
    assert len({line for line in lines if "N=64 K=64" in line and "capture" not in line}) == 1
    assert len(lines) == len(set(lines)) == 4  # two shapes, outside of a graph and in one
    assert lines[0].startswith("nvfp4_gemm any M N=64 K=64 (nvfp4)")


def test_ranges_of_m_are_lines_of_their_own(caplog, monkeypatch):
    facts = {"cuda": "13.0", "torch": "2.11", "nvcc": "13.0", "cutlass": "4.5"}
    monkeypatch.setattr("fp4dispatch.machine.system.current", lambda: fp4dispatch.System.fake("9.0", **facts))
    problem = fp4dispatch.Problem("nvfp4_gemm", 1, 4096, 4096)
    ends = list(choose.m_ranges("nvfp4_gemm", 0, 1 << 15))
    assert len(ends) >= 16
    with caplog.at_level(logging.INFO, "fp4dispatch"):
        for _ in range(2):
            decided = [(m, choose.select(fp4dispatch.Problem("nvfp4_gemm", m, 4096, 4096), say=False)) for m in ends]
            report.report_ranges(decided)
        choose.select(problem)  # one of them
    lines = [r.message for r in caplog.records if r.levelno == logging.INFO]
    assert [line.split(" N=")[0] for line in lines] == [
        "nvfp4_gemm M=1..8",
        "nvfp4_gemm M>=9",
    ]
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == ["w4a16", "w4a8"]
    assert "nvfp4-sm90-w4a8" in lines[1]


def test_json_of_a_decision_holds_its_notes(capsys, monkeypatch):
    monkeypatch.setenv("FP4_GEMM_BACKEND", "reference")
    assert main(["explain", "nvfp4_gemm", "-m", "1", "-n", "64", "-k", "64", "--arch", "12.0", "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("FP4_GEMM_BACKEND is set here and not applied")


def test_every_known_name_is_accepted_by_an_op_that_it_runs():
    for name in registry.known():
        ran = 0
        for op in ("nvfp4_gemm", "fp8_gemm"):
            try:
                request.check_request(op, name)
                ran += 1
            except BackendUnsupportedError:
                pass
        assert ran, name
