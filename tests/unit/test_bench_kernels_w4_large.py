"""bench/kernels_w4_large.py without a GPU: what is wrong has no time; which tiles it times, and how; its table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fp4dispatch.jit.catalog.manifest import installed
from tests import many_tokens, w4a8_small
from tests.on_cpu import OnCpu, generators

pytest.importorskip("tvm_ffi")
from bench import kernels_w4_large


def module():
    """w4a8_small, as it is planned for an H200."""

    def plan(m, n, k, multiprocessors, shared_sm, shared_block, clusters):
        assert (multiprocessors, shared_sm, shared_block, clusters) == w4a8_small.H200
        return [64, 1, 2, 1, 8, 2, 2]

    functions = SimpleNamespace(w4a8_small=None, w4a8_small_shaped=None, w4a8_small_plan=plan)
    return kernels_w4_large.FewTokens(functions)


def gemm(variant):
    """w4_gemm_sm90, as it is planned for an H200."""
    return many_tokens.Gemm(SimpleNamespace(w4_gemm=None), "w4_gemm_sm90", variant, 132)


@pytest.fixture
def h200(monkeypatch):
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)


def test_every_tile_that_is_timed_is_built_and_no_other():
    variants = set(installed().kernel("w4_gemm_sm90").variants)
    assert {v for v in variants if "bf16" in v and not v.startswith("even_")} == variants & kernels_w4_large.TIMED


def test_tiles_that_are_timed():
    names = [f"a8_bf16_{tile}" for tile in ("small", 32, 64, 96, 112, 128, 144, 160, 176, 192, 208)]
    modules = dict.fromkeys([*names, "a16_bf16_64x128", "a16_bf16_128x128", "a16_bf16_256", "w4a16"])
    for act, m, tiles in (
        ("a8", 1, ["small", 32, 64, 128]),
        ("a8", 64, ["small", 32, 64, 128]),
        ("a8", 65, [64, 96, 112, 128]),
        ("a8", 128, [64, 96, 112, 128]),
        ("a8", 129, [64, 96, 112, 128, 144, 160, 176, 192, 208]),
        ("a8", 193, [96, 112, 128, 144, 160, 176, 192, 208]),
        ("a16", 32, ["64x128"]),
        ("a16", 65, ["64x128", "128x128"]),
        ("a16", 256, ["128x128", 256]),
    ):
        assert list(kernels_w4_large.tiles_of(modules, act, m)) == tiles


def test_the_table_has_few_tokens_and_exact_weights():
    us = {"bf16": 40.0, "fp8 row": 20.0, "a8 pack": 2.0, "a8 small": 8.0, "a8 small gemm": 6.0, "a8 32": 10.0}
    row = {"n": 4096, "k": 4096, "m": 16, "us": us | {"w4a16": 5.0, "a16 64": 16.0, "a16 64 gemm": 14.0}, "wrong": {}}
    many = {"n": 4096, "k": 4096, "m": 512, "us": {"bf16": 100.0, "a8 128": 50.0}, "wrong": {}}
    assert kernels_w4_large.best(row, "a8") == (8.0, "small")
    assert kernels_w4_large.best(many, "a8") == (50.0, "128")
    _, first, second, mean, other = kernels_w4_large.table([row, many])
    assert "a8 5.00 (small, 8.0 us, g 6.67, p 2.0)" in first
    assert "w4a16 8.00 (5.0 us)" in first
    assert "w4a16" not in second
    assert "w4a16 8.000" in mean
    assert "w4a16" not in other


def test_launch_shapes_to_tune_fit_and_fill_the_gpu(h200):
    auto, shapes = kernels_w4_large.shapes_to_tune(module(), "small", (16, 4096, 4096))
    assert auto == (64, 1, 2, 1, 8, 2, 2)
    assert auto in shapes
    others = shapes - {auto}
    assert {shape[:4] for shape in others} == {(16, 1, 2, 1), (16, 1, 4, 1), (16, 2, 1, 1)}
    # 64 row blocks alone, or 32 in pairs, leave half of the GPU idle; 7 of each are more than 3 CTAs of an SM.
    assert {shape[4] for shape in others if shape[1] == 1} == {1, 2, 3, 4, 5, 6}
    assert all(w4a8_small.shared_bytes(shape) <= 232448 for shape in others)
    for tile, n, most in ((32, 4096, 4), (128, 3840, 8)):
        shapes = kernels_w4_large.shapes_to_tune(gemm(f"a8_bf16_{tile}"), tile, (16, n, 4096))[1]
        assert max(split for _, split, _ in shapes) == most


def test_launch_shapes_to_tune_are_one_wave_or_whole_tiles_and_one_wave(h200):
    """Two waves of split tiles too; never what a plan may not choose for want of stages."""

    def splits(act, tokens, mnk):
        return {shape[:2] for shape in kernels_w4_large.shapes_to_tune(gemm(f"{act}_bf16_{tokens}"), tokens, mnk)[1]}

    whole = {(1, 1), (2, 1)}
    # 15 tiles: clusters of 8 are one wave, of 6 and 4 too; 32: clusters of 8 would be three waves.
    assert splits("a8", 128, (128, 15 * 128, 4096)) == whole | {(1, 2), (1, 3), (1, 4), (1, 8), (2, 2), (2, 3), (2, 4)}
    assert splits("a8", 128, (128, 32 * 128, 4096)) == whole | {(1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (2, 4)}
    # 650 tiles: after 4 rounds of 132, 5 of 117 or 120, more are left than clusters run. In pairs 5 of 60, and 25.
    assert splits("a8", 128, (128, 650 * 128, 4096)) == whole | {(2, 2)}
    # 576 tiles: 4 rounds of 132, and 48 in halves, as the plan has it.
    assert (1, 2) in splits("a8", 176, (9 * 176, 64 * 128, 4096))
    # 30 tiles, and 66.
    assert (1, 4) in splits("a16", 112, (112, 30 * 128, 4096))
    assert {(1, 4), (1, 8)} & splits("a16", "128x128", (128, 66 * 128, 4096)) == set()
    # Of 4 stages, no more than two parts.
    assert splits("a8", 128, (128, 128, 512)) == whole | {(1, 2), (2, 2)}


SHAPES = [(1, 1, 4), (1, 2, 4)]


@pytest.fixture
def on_cpu(monkeypatch):
    """A weight, and modules whose a16 GEMM of tile 64x128 is right, but for what ``spoil`` does in a launch shape."""
    generators(monkeypatch)
    for name, stand_in in (
        ("COLD_BYTES", 1e5),
        ("capture", lambda call, copies, calls: (copies, calls)),
        ("microseconds", lambda graphs, rounds: dict.fromkeys(graphs, 2.0)),
        ("shapes_to_tune", lambda module, tile, mnk: (SHAPES[0], set(SHAPES))),
        ("W4A16_MOST_M", 0),
    ):
        monkeypatch.setattr(kernels_w4_large, name, stand_in)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch,
        "_scaled_mm",
        lambda a, b, *, scale_a, scale_b, out_dtype, out: out.copy_(a.float() @ b.float() * scale_a * scale_b),
    )
    with OnCpu():
        timed = kernels_w4_large.Timed(264, 144)
        spoilt = {}

        def planned(x, scale, packed, alpha, bias, out, pdl):
            shaped(x, scale, packed, alpha, bias, out, SHAPES[0], pdl)

        def shaped(x, scale, packed, alpha, bias, out, shape, pdl):
            torch.mm(x, timed.dense_first.t(), out=out)
            spoilt.get(tuple(shape), lambda out: None)(out)

        gemm = SimpleNamespace(planned=planned, shaped=shaped)
        activations = SimpleNamespace(w4_quantize_row=lambda x, given, scale, pdl: None)
        yield timed, {"activations": activations, "a16_bf16_64x128": gemm}, spoilt


def one_tile(out):
    out[:, 256:] *= 1.05


def nothing(out):
    out.fill_(torch.nan)


@pytest.mark.parametrize("spoil", [one_tile, nothing])
def test_what_is_wrong_has_no_time(on_cpu, spoil, capsys):
    timed, modules, spoilt = on_cpu
    row = kernels_w4_large.time_problem(modules, timed, 8)
    assert row["wrong"] == {}
    assert "a16 64x128" in row["us"]
    spoilt[SHAPES[0]] = spoil
    row = kernels_w4_large.time_problem(modules, timed, 8)
    assert [*row["wrong"]] == ["a16 64x128"]
    assert set(row["us"]) == {"bf16", "fp8 tensor", "fp8 row", "a8 pack"}


@pytest.mark.parametrize("spoil", [one_tile, nothing])
def test_a_launch_shape_that_is_wrong_has_no_time(on_cpu, spoil, capsys):
    timed, modules, spoilt = on_cpu
    for wrong in (None, *SHAPES):
        spoilt.clear()
        spoilt[wrong] = spoil
        (row,) = kernels_w4_large.tune(modules, timed, 8, ("a16",))
        assert [*row["wrong"]] == ([str(wrong)] if wrong else [])
        assert row["shapes"] == [(2.0, shape, shape == SHAPES[0]) for shape in SHAPES if shape != wrong]
        assert row["auto_us"] == (None if wrong == SHAPES[0] else 2.0)
    assert capsys.readouterr().out.count("WRONG") == 2
