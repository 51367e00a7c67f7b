"""The checks of the GPU tests, on emulated kernels: what is wrong is seen, and what is right is not accused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests import w4_fake, w4a8_small
from tests.gpu import tiles, w4_packed
from tests.on_cpu import OnCpu, generators


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    row = w4_fake.Kernels().load("w4_activations", "any", None).module.w4_quantize_row
    packer = SimpleNamespace(w4_quantize_row=row, w4_quantize_tensor=None)
    monkeypatch.setattr(w4_packed, "packer", lambda: packer)
    generators(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    w4_packed.weight.cache_clear()
    with OnCpu():
        yield
    w4_packed.weight.cache_clear()


def kernel(change=lambda out: None):
    """w4a8_small, emulated; ``change`` may spoil what it writes."""
    real = w4_fake.Kernels().load("w4a8_small", "bf16", None).module.w4a8_small

    def small(*operands):
        real(*operands)
        change(operands[5])

    return small


def beyond(out):
    out.new_empty(0).set_(out.untyped_storage(), 0, (out.shape[1],)).zero_()


def spoil(out):
    out[-1, -1] += out.abs().max()


def solved(change=lambda out: None):
    problem = w4_packed.Problem(True, torch.bfloat16, (17, 72, 144))
    problem.run(kernel(change))
    problem.check()
    problem.check_norms()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spoil, "1 of 1 tiles wrong"),
        (lambda out: out[:, 3].fill_(torch.nan), "1 of 1 tiles wrong"),
        (beyond, "wrote outside the output"),
    ],
    ids=["one element", "NaN", "a guard"],
)
def test_what_is_wrong_is_seen(change, said):
    solved()
    with pytest.raises(AssertionError, match=said):
        solved(change)


def test_other_bits_of_a_repetition_are_seen():
    problem = w4_packed.Problem(True, torch.bfloat16, (17, 72, 144))
    with pytest.raises(AssertionError):
        problem.run(kernel(lambda out: out[0].mul_(1 + torch.rand(()) / 4)))


def test_a_little_in_all_elements_is_seen_by_the_norm_alone():
    problem = w4_packed.Problem(True, torch.bfloat16, (17, 72, 1040))
    problem.run(kernel())
    problem.check_norms()
    problem.run(kernel(lambda out: out.mul_(1.006)))
    problem.check()
    with pytest.raises(AssertionError, match=r"tile 0, 0: error [67]\.\de-03, 1\.\d* of its limit"):
        problem.check_norms()


def test_the_norms_of_tiles_and_their_limits():
    exact = torch.ones(130, 129, dtype=torch.float64)
    got = exact.bfloat16()
    got[129, 128] = torch.nan
    errors = tiles.norm_errors(got, exact)
    assert errors.tolist() == [[0, 0], [0, torch.inf]]
    limits = tiles.norm_limits(exact, torch.bfloat16, 2.5e-3)
    assert float(limits[0, 0]) == 2.5e-3
    assert limits[0, 0] < limits[1, 1] < 2.0**-7, "two values may both be rounded by much"


def test_sums_that_lose_much_are_seen():
    def shaped(*operands, lost=0.0):
        assert operands[6] == [16, 1, 2, 1, 1, 2, 2]
        real = w4_fake.Kernels().load("w4a8_small", "fp16", None).module.w4a8_small
        real(*operands[:6], operands[7])
        operands[5].mul_(1 - lost)

    shape = (16, 1, 2, 1, 1, 2, 2)
    assert shape[:4] in w4a8_small.INSTANCES
    w4_packed.check_sums_of_one_sign(shaped, shape)
    with pytest.raises(AssertionError, match=r"lossy K=4096: -1\.\de-02 of the sums"):
        w4_packed.check_sums_of_one_sign(lambda *given: shaped(*given, lost=0.01), shape, "lossy")
