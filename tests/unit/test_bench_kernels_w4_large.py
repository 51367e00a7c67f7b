"""bench/kernels_w4_large.py without a GPU: what it checks, on emulated kernels, which tiles it times, its table."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fp4dispatch.jit.catalog.manifest import installed
from tests import many_tokens, w4_fake, w4a8_small

pytest.importorskip("tvm_ffi")


class OnCpu(TorchFunctionMode):
    """Tensors that ask for a GPU are made on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@pytest.fixture
def bench(monkeypatch):
    from bench import kernels_w4_large, kernels_w4_large_check

    monkeypatch.setattr(torch, "Generator", lambda device, real=torch.Generator: real("cpu"))
    with OnCpu():
        yield SimpleNamespace(run=kernels_w4_large, check=kernels_w4_large_check)


def module(bench, change=lambda out: None):
    """w4a8_small, emulated; ``change`` may spoil what it writes."""
    real = w4_fake.Kernels().load("w4a8_small", "bf16", None).module.w4a8_small

    def small(*operands):
        real(*operands)
        change(operands[5])

    def shaped(*operands):
        assert operands[6] == [16, 1, 2, 1, 1, 2, 2]
        small(*operands[:6], operands[7])

    def plan(m, n, k, multiprocessors, shared_sm, shared_block, clusters):
        assert (multiprocessors, shared_sm, shared_block, clusters) == w4a8_small.H200
        return [64, 1, 2, 1, 8, 2, 2]

    return bench.check.FewTokens(SimpleNamespace(w4a8_small=small, w4a8_small_shaped=shaped, w4a8_small_plan=plan))


def gemm(variant):
    """w4_gemm_sm90, as it is planned for an H200."""
    return many_tokens.Gemm(SimpleNamespace(w4_gemm=None), "w4_gemm_sm90", variant, 132)


def packer():
    return w4_fake.Kernels().load("w4_activations", "any", None).module


def weights(bench, sizes=((8, 16), (72, 144), (200, 272))):
    made = [bench.check.Weight(n, k, every_scale=True) for n, k in sizes]
    return [(weight, weight.dense64, bench.check.folded(weight)) for weight in made]


def test_every_launch_shape_is_checked_by_tokens_of_every_kind(bench, monkeypatch):
    asked = []
    monkeypatch.setattr(bench.check, "check_chain", lambda *_: "a fault")
    monkeypatch.setattr(bench.check, "check_one", lambda *given: asked.append(given[-2:]) or ("", 0.001))
    found = bench.check.check_build(None, None, "a8_bf16_small", weights(bench))
    assert found["faults"] == [f"chain M={m}: a fault" for m in (1, 16, 64)]
    assert found["problems"] == len(asked) + 3
    assert {m for m, shape in asked if shape is None} == {1, 7, 16, 17, 33, 64, 65, 100}
    shapes = {shape for _, shape in asked if shape is not None}
    assert shapes == set(w4a8_small.launch_shapes())
    assert {shape[:4] for shape in shapes} == set(w4a8_small.INSTANCES)
    assert {shape[4:6] for shape in shapes} == {(c, s) for c in range(1, 9) for s in (2, 3, 4)}


def spoil(out):
    out[-1, -1] += out.abs().max()


def beyond(out):
    out.new_empty(0).set_(out.untyped_storage(), 0, (out.shape[1],)).zero_()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (spoil, "1 of "),
        (lambda out: out[:, 3].fill_(torch.nan), "wrong, first"),
        (beyond, "wrote outside"),
        (lambda out: out[0].mul_(1 + torch.rand(()) / 4), "bits differ"),
    ],
)
def test_what_is_wrong_is_seen(bench, change, message):
    ((weight, _, dense),) = weights(bench, ((72, 144),))
    for shape in (None, (16, 1, 2, 1, 1, 2, 2)):
        for few, said in ((module(bench), ""), (module(bench, change), message)):
            fault, _ = bench.check.check_one(few, packer(), "a8_bf16_small", weight, dense, 17, shape)
            assert (said in fault) if said else (fault == "")


def test_a_tile_of_32_tokens_is_never_asked_for_8_parts_of_k(bench):
    for variant, most in (("a8_bf16_32", 4), ("a8_bf16_64", 8), ("a16_bf16_64x128", 8)):
        assert max(shape[1] for shape in bench.check.launches_of(variant, 4096)) == most
    assert {shape[1] for shape in bench.check.launches_of("a8_bf16_64", 256)} == {1, 2}
    tokens = {m for _, _, m, _ in bench.check.problems_of("a8_bf16_32", weights(bench, ((8, 16),)))}
    assert tokens > {1, 16, 17, 33, 64, 65, 100, 385}


@pytest.mark.parametrize(("tile", "ragged"), [(96, 201), (112, 233), (144, 297), (160, 329), (176, 361), (208, 425)])
def test_a_tile_that_is_no_power_of_two_is_checked_at_its_own_edges(bench, tile, ragged):
    tokens = {m for _, _, m, _ in bench.check.problems_of(f"a8_bf16_{tile}", weights(bench, ((8, 16),)))}
    assert tokens > {1, tile, tile + 1, ragged, 385}
    assert 0 < ragged - 2 * tile < 16  # a piece of the output that is not full, the only one of its tile


@pytest.fixture
def h200(monkeypatch):
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)


@pytest.mark.parametrize(
    ("variant", "rows", "tokens"),
    [("a8_bf16_176", 128, 176), ("a8_bf16_32", 128, 32), ("a16_bf16_240", 128, 240), ("a16_bf16_128x128", 128, 128)],
)
def test_splits_of_what_whole_tiles_leave_are_checked(bench, h200, monkeypatch, variant, rows, tokens):
    """In every such shape: more tiles than whole ones fill rounds of, and no more than clusters run at once."""
    monkeypatch.setattr(bench.check, "Weight", lambda n, k: SimpleNamespace(n=n, k=k, dense64="exact"))
    monkeypatch.setattr(bench.check, "folded", lambda weight: "folded")
    ctas, seen = (2 if tokens == 32 else 1), set()
    for weight, values, m, ((multicast, split, _),) in bench.check.whole_tiles_first(variant):
        assert values == ("folded" if variant.startswith("a8") else "exact")
        tiles = -(-weight.n // (rows * multicast)) * -(-m // tokens)
        clusters = {2: 66, 3: 39, 4: 30}[multicast * split] * ctas
        rounds, left = divmod(tiles, clusters * split)
        assert (rounds > 0, 0 < left <= clusters, m % tokens > 0, weight.n % rows > 0) == (True, True, True, True)
        assert split <= -(-weight.k // 128)
        seen.add((multicast, split, rounds > 1))
    assert seen == {(1, 2, True), (1, 3, False), (1, 4, True), (2, 2, False)}
    assert list(bench.check.whole_tiles_first("a8_bf16_small")) == []


def test_the_sums_of_every_tile_of_fp8_are_measured(bench, monkeypatch):
    monkeypatch.setattr(bench.check, "check_packing", lambda _: {})
    monkeypatch.setattr(bench.check, "check_build", lambda *_: {})
    monkeypatch.setattr(bench.check, "sum_errors", lambda module, _, tile: [(module, tile)])
    tiles = ["small", *sorted({int(v[8:]) for v in installed().kernel("w4_gemm_sm90").variants if v[:7] == "a8_fp16"})]
    builds = {f"a8_fp16_{tile}": f"build of {tile}" for tile in tiles}
    _, sums = bench.check.check_everything({"activations": None} | builds)
    assert sums == [(f"build of {tile}", tile) for tile in tiles]


def test_tiles_that_are_timed(bench):
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
        assert list(bench.run.tiles_of(modules, act, m)) == tiles


def test_the_table_has_few_tokens_and_exact_weights(bench):
    us = {"bf16": 40.0, "fp8 row": 20.0, "a8 pack": 2.0, "a8 small": 8.0, "a8 small gemm": 6.0, "a8 32": 10.0}
    row = {"n": 4096, "k": 4096, "m": 16, "us": us | {"w4a16": 5.0, "a16 64": 16.0, "a16 64 gemm": 14.0}, "wrong": {}}
    many = {"n": 4096, "k": 4096, "m": 512, "us": {"bf16": 100.0, "a8 128": 50.0}, "wrong": {}}
    assert bench.run.best(row, "a8") == (8.0, "small")
    assert bench.run.best(many, "a8") == (50.0, "128")
    _, first, second, mean, other = bench.run.table([row, many])
    assert "a8 5.00 (small, 8.0 us, g 6.67, p 2.0)" in first
    assert "w4a16 8.00 (5.0 us)" in first
    assert "w4a16" not in second
    assert "w4a16 8.000" in mean
    assert "w4a16" not in other


def test_launch_shapes_to_tune_fit_and_fill_the_gpu(bench, h200):
    auto, shapes = bench.run.shapes_to_tune(module(bench), "small", (16, 4096, 4096))
    assert auto == (64, 1, 2, 1, 8, 2, 2)
    assert auto in shapes
    others = shapes - {auto}
    assert {shape[:4] for shape in others} == {(16, 1, 2, 1), (16, 1, 4, 1), (16, 2, 1, 1)}
    # 64 row blocks alone, or 32 in pairs, leave half of the GPU idle; 7 of each are more than 3 CTAs of an SM.
    assert {shape[4] for shape in others if shape[1] == 1} == {1, 2, 3, 4, 5, 6}
    assert all(w4a8_small.shared_bytes(shape) <= 232448 for shape in others)
    for tile, n, most in ((32, 4096, 4), (128, 3840, 8)):
        shapes = bench.run.shapes_to_tune(gemm(f"a8_bf16_{tile}"), tile, (16, n, 4096))[1]
        assert max(split for _, split, _ in shapes) == most


def test_launch_shapes_to_tune_are_one_wave_or_whole_tiles_and_one_wave(bench, h200):
    """Two waves of split tiles too; never what a plan may not choose for want of stages."""

    def splits(act, tokens, mnk):
        return {shape[:2] for shape in bench.run.shapes_to_tune(gemm(f"{act}_bf16_{tokens}"), tokens, mnk)[1]}

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
