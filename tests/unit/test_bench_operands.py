"""What outputs are held to: exact products, each computed from the stored weight and the rounded activation."""

from __future__ import annotations

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.own.tensors.folding import FOLD, fold_e4m3
from fp4dispatch.benchmark.check import relative_error, worst_tile
from fp4dispatch.benchmark.methods.base import tolerance
from fp4dispatch.benchmark.problems import operands as module
from fp4dispatch.benchmark.problems.operands import Operands, Truth, as_entering

CPU = torch.device("cpu")
FORMATS = ("bf16", "nvfp4", "tensor", "row", "block128")


@pytest.fixture(scope="module")
def operands():
    return Operands(300, 256, CPU)


def dense(operands, fmt):
    """Return the weight in float64, by a way of its own."""
    if fmt == "bf16":
        return operands.bf16.double()
    w = operands.weights(fmt)
    if fmt == "nvfp4":
        codes = formats.decode_e2m1(formats.unpack_e2m1(w.weight)).double()
        return codes * w.scale.double().repeat_interleave(16, 1) * w.global_scale.double()
    scale = w.scale.double()
    if fmt == "row":
        scale = scale.reshape(-1, 1)
    if fmt == "block128":
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: w.n, : w.k]
    return w.weight.double() * scale


@pytest.mark.parametrize("fmt", FORMATS)
def test_products_are_exact(operands, fmt, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 128 * 256)  # in three pieces
    truth = Truth(operands, 130)
    want = truth.x.double() @ dense(operands, fmt).t()
    assert worst_tile(truth.want(fmt, "bf16"), want.float()).error < 1e-6


@pytest.mark.parametrize(
    ("entering", "least", "most"), [("row", 0.02, 0.04), ("1x128", 0.02, 0.04), ("nvfp4", 0.08, 0.11)]
)
def test_an_activation_is_rounded_to_its_format_and_back(operands, entering, least, most):
    x = operands.activation(64)
    assert least < relative_error(as_entering(x, entering), x.float()) < most
    assert torch.equal(as_entering(x, "bf16"), x.float())


def test_nvfp4_beside_fp8_activations_is_multiplied_folded(operands):
    truth = Truth(operands, 64)
    w = operands.weights("nvfp4")
    folded = fold_e4m3(w.weight, w.scale).double() * FOLD * w.global_scale.double()
    want = as_entering(truth.x, "row").double() @ folded.t()
    assert worst_tile(truth.want("nvfp4", "row"), want.float()).error < 1e-6
    unfolded = operands.product(as_entering(truth.x, "row"), "nvfp4")
    assert worst_tile(unfolded, want.float()).error > tolerance("nvfp4", "row", 256)  # mixing the two up is seen


def test_a_product_is_computed_once_per_kind(operands):
    truth = Truth(operands, 3)
    assert truth.want("row", "row") is truth.want("row", "row")
    assert truth.want("row", "bf16") is not truth.want("row", "row")


def test_rows_differ_in_scale_so_that_mixed_up_rows_are_seen(operands):
    amax = operands.bf16.abs().amax(1)
    assert amax.max() > 2 * amax.min()
    truth = Truth(operands, 130)
    want = truth.want("row", "bf16")
    w = operands.weights("row")
    swapped = (truth.x.float() @ w.weight.float().t()) * w.scale.roll(1)
    assert worst_tile(swapped, want).error > 0.1


def test_numbers_are_the_same_every_time_and_differ_by_shape():
    a, b, c = Operands(32, 64, CPU), Operands(32, 64, CPU), Operands(64, 64, CPU)
    assert torch.equal(a.bf16, b.bf16)
    assert torch.equal(a.activation(5), b.activation(5))
    assert not torch.equal(a.bf16, c.bf16[:32])


def test_shortcuts_of_the_application_are_stepped_around(operands, monkeypatch):
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        seen = []
        real = operands.rows
        monkeypatch.setattr(
            operands,
            "rows",
            lambda *a, **k: seen.append(torch.backends.mkldnn.matmul.fp32_precision) or real(*a, **k),
        )
        x = operands.activation(64).float()
        exact = x.double() @ dense(operands, "row").t()
        assert worst_tile(operands.product(x, "row"), exact.float()).error < 1e-6
        assert seen == ["ieee"]  # this processor may have no shortcut to take
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def test_autocast_around_a_product_changes_nothing(operands):
    x = operands.activation(64).float()
    want = operands.product(x, "row")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(operands.product(x, "row"), want)


def test_bfloat16_is_not_a_quantised_format(operands):
    with pytest.raises(ValueError, match=r"\.bf16"):
        operands.weights("bf16")
