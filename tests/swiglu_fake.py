"""``csrc/quantise/swiglu_*.cu`` in torch: SwiGLU, then the quantisers of the other fakes."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fp4dispatch import formats
from tests import w4_fake, w8_fake

EVERY_GATE = 1 << 16
"""Tokens of the check that the backends make before they trust the kernel."""


def module(launched, silu=torch.nn.functional.silu):
    """The module; ``launched`` gets a record of each launch but those of the check. ``silu``: of the gate."""

    def fill(name, x, packed, pack, scaling, scale=None):
        assert x.dtype in (torch.bfloat16, torch.float16)
        w4_fake.check_rows(x)
        assert x.shape[1] % 32 == 0
        gate, up = x.chunk(2, 1)
        q = formats.fp8_quantize((silu(gate) * up).to(x.dtype), scaling, scale)
        values = pack(q.data)
        assert (packed.dtype, packed.shape) == (values.dtype, values.shape)
        assert packed.is_contiguous()
        assert packed.data_ptr() % 16 == 0
        packed.copy_(values)
        if x.shape[0] != EVERY_GATE:
            launched.append((name, *x.shape))
        return q.scale

    def w4_swiglu_row(x, packed, scale, enable_pdl):
        scale.copy_(fill("w4_swiglu_row", x, packed, w4_fake.pack_activation, "row"))

    def w8_swiglu_row(x, packed, scale, enable_pdl):
        scale.copy_(fill("w8_swiglu_row", x, packed, w8_fake.pack_activation, "row"))

    def w8_swiglu_tensor(x, packed, scale, enable_pdl):
        assert (scale.dtype, scale.numel()) == (torch.float32, 1)
        fill("w8_swiglu_tensor", x, packed, w8_fake.pack_activation, "tensor", scale[0])

    def w8_swiglu_block(x, packed, scale, enable_pdl):
        m, k = x.shape[0], x.shape[1] // 2
        assert (scale.dtype, tuple(scale.shape)) == (torch.float32, (-(-k // 128), -(-m // 8) * 8))
        scale.fill_(1).t()[:m].copy_(fill("w8_swiglu_block", x, packed, w8_fake.pack_activation, "1x128"))

    def rows(name, x, q, scaling, scale=None):
        assert q.dtype == torch.float8_e4m3fn
        return fill(name, x, q, lambda data: data, scaling, scale)

    def fp8_swiglu_row(x, q, scale, enable_pdl):
        assert scale.is_contiguous()
        scale.copy_(rows("fp8_swiglu_row", x, q, "row").view(scale.shape))

    def fp8_swiglu_tensor(x, q, scale, enable_pdl):
        assert (scale.dtype, scale.numel()) == (torch.float32, 1)
        rows("fp8_swiglu_tensor", x, q, "tensor", scale.reshape(()))

    def fp8_swiglu_1x128(x, q, scale, enable_pdl):
        scale.copy_(rows("fp8_swiglu_1x128", x, q, "1x128"))

    def swiglu_product(x, out, enable_pdl):
        w4_fake.check_rows(x)
        assert (out.dtype, tuple(out.shape)) == (x.dtype, (x.shape[0], x.shape[1] // 2))
        assert out.is_contiguous()
        gate, up = x.chunk(2, 1)
        out.copy_(silu(gate) * up)
        if x.shape[0] != EVERY_GATE:
            launched.append(("swiglu_product", *x.shape))

    packing = (w4_swiglu_row, w8_swiglu_row, w8_swiglu_tensor, w8_swiglu_block)
    made = (*packing, fp8_swiglu_row, fp8_swiglu_tensor, fp8_swiglu_1x128, swiglu_product)
    return SimpleNamespace(**{function.__name__: function for function in made})
