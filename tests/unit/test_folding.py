"""w4a8's weights against exact rational arithmetic, and what the folding costs beside w4a4."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.base import LinearWeights
from fp4dispatch.backends.own.tensors.folding import FOLD, fold_e4m3
from fp4dispatch.backends.reference import ReferenceBackend
from fp4dispatch.errors import InputError
from fp4dispatch.problem import Problem


def e4m3(byte):
    """The value of a finite e4m3 byte without a sign, from the bits."""
    exponent, mantissa = byte >> 3, byte & 7
    return Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa) * Fraction(2) ** (exponent - 10)


FINITE = [e4m3(byte) for byte in range(0x7F)]


def nearest(value):
    """The byte of the nearest e4m3 value; of two that are equally near, the even one."""
    return min(range(0x7F), key=lambda byte: (abs(FINITE[byte] - value), byte & 1))


def every_product():
    """Codes [127, 16] and one scale a row: every code under every finite scale."""
    codes = torch.arange(16, dtype=torch.uint8).expand(127, 16)
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(127, 1)
    return codes, scale


def test_every_code_under_every_scale_is_rounded_to_nearest_even():
    codes, scale = every_product()
    folded = fold_e4m3(formats.pack_e2m1(codes), scale)
    assert folded.dtype == torch.float8_e4m3fn
    found = folded.view(torch.uint8).tolist()
    for row in range(127):
        for code, magnitude in enumerate(formats.E2M1_VALUES):
            want = nearest(Fraction(magnitude) * FINITE[row] / int(FOLD))
            assert found[row][code] == want, (row, code)
            assert found[row][code + 8] == want | 0x80, (row, code)
    assert max(FINITE[byte & 127] for row in found for byte in row) == 320  # 336, halfway, to the even one


def test_the_stated_bound_holds_and_is_sharp():
    codes, scale = every_product()
    exact = formats.nvfp4_dequantize(formats.pack_e2m1(codes), scale, torch.ones(())).double()
    error = (fold_e4m3(formats.pack_e2m1(codes), scale).double() * FOLD - exact).abs()
    normal = exact.abs() >= 1 / 8
    assert float((error / exact.abs())[normal].max()) == 1 / 21
    assert float(error[~normal].max()) == 2**-7


def test_both_scale_layouts_give_the_same_weights():
    q = formats.nvfp4_quantize(torch.randn(200, 144))
    swizzled = fold_e4m3(q.data, formats.to_128x4(q.sf), sf_layout="128x4")
    assert torch.equal(swizzled.view(torch.uint8), fold_e4m3(q.data, q.sf).view(torch.uint8))
    with pytest.raises(InputError, match="block scales"):
        fold_e4m3(q.data, q.sf.float())


def relative_errors(x, w):
    q = formats.nvfp4_quantize(w)
    m, (n, k) = x.shape[0], w.shape
    weights = LinearWeights("nvfp4_gemm", "nvfp4", n, k, q.data, q.sf, q.global_scale.reshape(1), (n,))
    backend = ReferenceBackend()
    prepared = backend.prepare(weights)
    exact = x.double() @ formats.nvfp4_dequantize(*q).double().t()
    found = []
    for activation in ("bf16", "fp8", "nvfp4"):
        out = torch.empty(m, n, dtype=torch.bfloat16)
        problem = Problem("nvfp4_gemm", m, n, k, activation)
        backend.run(backend.plan(problem, prepared), prepared, x, out)
        found.append(float((out.double() - exact).norm() / exact.norm()))
    return found


@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_w4a8_loses_far_less_than_w4a4(tails):
    torch.manual_seed(0)
    student = torch.distributions.StudentT(3.0)
    draw = torch.randn if tails == "normal" else lambda *shape: student.sample(shape)
    w4a16, w4a8, w4a4 = relative_errors(draw(64, 1024).bfloat16(), draw(256, 1024))
    assert w4a16 < 0.002 < w4a8 < 0.04
    assert w4a8 < 0.5 * w4a4


def test_the_reference_multiplies_the_folded_weights_exactly():
    torch.manual_seed(1)
    w, x = torch.randn(72, 80), torch.randn(5, 80)
    q = formats.nvfp4_quantize(w)
    shards = (40, 32)
    weights = LinearWeights("nvfp4_gemm", "nvfp4", 72, 80, q.data, q.sf, torch.tensor([0.5, 3.0]), shards)
    backend, problem = ReferenceBackend(), Problem("nvfp4_gemm", 5, 72, 80, "fp8", out_dtype="float32")
    prepared = backend.prepare(weights)
    out = torch.empty(5, 72)
    backend.run(backend.plan(problem, prepared), prepared, x, out)
    a = formats.fp8_quantize(x, "row")
    alpha = torch.tensor([0.5] * 40 + [3.0] * 32).double() * 8
    want = formats.fp8_dequantize(*a, "row").double() @ (fold_e4m3(q.data, q.sf).double() * alpha[:, None]).t()
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
