"""The activations, packed or brought by TMA, and the weights put the same k into the same slot of every wgmma."""

from __future__ import annotations

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.own.tensors.w4_layout import pack_w4p
from tests.w4_model import boxes, operand_a, operand_b, pack_activations


@pytest.mark.parametrize("size", [1, 2], ids=["e4m3", "16 bits"])
@pytest.mark.parametrize(("m", "k"), [(8, 128), (13, 208), (24, 320)])
def test_every_k_meets_itself(size, m, k):
    """Integer products of slots equal the plain integer product, and padding meets padding."""
    draw = torch.Generator().manual_seed(m)
    codes = torch.randint(256, (64, k // 2), generator=draw, dtype=torch.uint8)
    x = torch.randint(100, (m, k), generator=draw).to(torch.uint8 if size == 1 else torch.int16)
    packed = pack_activations(x) if size == 1 else boxes(x)
    assert packed.shape == (-(-k * size // 128), -(-m // 8), 1024)
    tokens = packed.shape[1] * 8
    b = operand_b(packed, tokens)
    if size == 2:
        b = b.contiguous().view(torch.int16)
    w = pack_w4p(codes, torch.ones(64, k // 16).to(torch.float8_e4m3fn))
    a = torch.cat([operand_a(chunk[:2048], size) for chunk in w[0]])
    if len(a) < len(b):  # an odd number of chunks: the kernel multiplies the zeros by anything
        assert int(b[len(a) :].abs().sum()) == 0
    got = torch.einsum("snk,smk->nm", a, b[: len(a)].long())
    want = formats.unpack_e2m1(codes).long() @ x.long().t()
    assert torch.equal(got[:, :m], want)
    assert int(got[:, m:].abs().sum()) == 0


def test_a_row_of_eight_tokens_fills_each_place_once():
    for dtype, placed in ((torch.uint8, pack_activations), (torch.int16, boxes)):
        k = 128 // dtype.itemsize
        x = torch.arange(8 * k).reshape(8, k) % 251 + 1
        packed = placed(x.to(dtype)).view(dtype)
        assert sorted(packed.flatten().tolist()) == sorted(x.flatten().tolist())
