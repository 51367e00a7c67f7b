"""The W4P layout against an oracle that walks lanes, words and bits one by one, as its documentation says them."""

from __future__ import annotations

import struct

import pytest
import torch

from fp4dispatch import formats
from fp4dispatch.backends.own.tensors import w4_layout
from fp4dispatch.backends.own.tensors.w4_layout import pack_w4p, unpack_w4p
from fp4dispatch.errors import FormatError, InputError

SHAPES = [(64, 64), (128, 192), (1, 16), (63, 48), (65, 80), (200, 144), (72, 272), (130, 1040)]


def operands(n, k, seed=0):
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (n, k // 2), generator=draw, dtype=torch.uint8)
    scale = torch.randint(127, (n, k // 16), generator=draw).to(torch.uint8)  # every finite e4m3 without a sign
    return codes, scale.view(torch.float8_e4m3fn)


def chunk_by_hand(code, sf, row0, k0):
    """2304 bytes of one chunk; ``code(row, k)`` and ``sf(row, k)`` read the padded weight."""
    data = bytearray(2304)
    for u in range(4):
        for lane in range(32):
            r, c = divmod(lane, 4)
            words = []
            for row, k in ((0, 0), (8, 0), (0, 8), (8, 8)):  # A, B, C, D
                word = 0
                for j in range(8):
                    sign, magnitude = divmod(code(row0 + 16 * u + r + row, k0 + 16 * c + k + j), 8)
                    word |= magnitude << (4 * j) | sign << (8 * j + 7 if j < 4 else 8 * (j - 4) + 3)
                words.append(word)
            data[u * 512 + lane * 16 : u * 512 + lane * 16 + 16] = struct.pack("<4I", *words)
            for half in range(2):
                data[2048 + lane * 8 + u * 2 + half] = sf(row0 + 16 * u + r + 8 * half, k0 + 16 * c)
    return bytes(data)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_byte_is_where_the_documentation_says(n, k):
    codes, scale = operands(n, k)
    unpacked, bytes_of = formats.unpack_e2m1(codes).tolist(), scale.view(torch.uint8).tolist()

    def code(row, column):
        return unpacked[row][column] if row < n and column < k else 0

    def sf(row, column):
        return bytes_of[row][column // 16] if row < n and column < k else 0

    packed = pack_w4p(codes, scale)
    assert packed.shape == (-(-n // 64), -(-k // 64), 2304)
    assert packed.is_contiguous()
    for block in range(packed.shape[0]):
        for chunk in range(packed.shape[1]):
            assert bytes(packed[block, chunk].tolist()) == chunk_by_hand(code, sf, 64 * block, 64 * chunk)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("step", [1, 1 << 14, 1 << 24])
def test_round_trip(n, k, step, monkeypatch):
    codes, scale = operands(n, k)
    whole = pack_w4p(codes, scale)
    monkeypatch.setattr(w4_layout, "STEP_BYTES", step)
    packed = pack_w4p(codes, scale)
    assert torch.equal(packed, whole)
    back, sf = unpack_w4p(packed, n, k)
    assert torch.equal(back, codes)
    assert torch.equal(sf.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_padding_is_zero_in_codes_and_scales(n, k):
    codes, scale = operands(n, k)
    codes |= 0x11
    np, kp = w4_layout.padded(n, k)
    back, sf = unpack_w4p(pack_w4p(codes, scale), np, kp)
    assert not back[n:].any()
    assert not back[:, k // 2 :].any()
    assert back[:n, : k // 2].all()
    assert not sf.view(torch.uint8)[n:].any()
    assert not sf.view(torch.uint8)[:, k // 16 :].any()


def test_strided_operands_and_all_values():
    codes, scale = operands(128, 128)
    wide = torch.zeros(128, 2 * 64, dtype=torch.uint8)
    wide[:, ::2] = codes
    tall = scale.view(torch.uint8).t().contiguous().t().view(torch.float8_e4m3fn)
    assert torch.equal(pack_w4p(wide[:, ::2], tall), pack_w4p(codes, scale))


@pytest.mark.parametrize(("byte", "says"), [(0x7F, "1 NaN and 0 negative"), (0xFF, "1 NaN and 1 neg"), (0xC0, "1 neg")])
def test_nan_and_negative_scales_are_refused(byte, says):
    codes, scale = operands(70, 80)
    scale.view(torch.uint8)[69, 4] = byte
    with pytest.raises(FormatError, match=says) as error:
        pack_w4p(codes, scale)
    assert isinstance(error.value, InputError)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda c, s: (c.to(torch.int8), s), "codes are torch.int8"),
        (lambda c, s: (c[0], s), r"codes are torch.uint8 \[40\]"),
        (lambda c, s: (c[:, :-4], s), "K a multiple of 16"),
        (lambda c, s: (c[:0], s[:0]), "N at least 1"),
        (lambda c, s: (c, s.view(torch.uint8)), "scales are torch.uint8"),
        (lambda c, s: (c, s[:, :-1]), r"need torch.float8_e4m3fn \[70, 5\]"),
        (lambda c, s: (c, formats.to_128x4(s)), "from_128x4 undoes"),
        (lambda c, s: (c, s.to("meta")), "on meta"),
    ],
)
def test_wrong_operands_are_refused(spoil, says):
    with pytest.raises(InputError, match=says):
        pack_w4p(*spoil(*operands(70, 80)))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: (p, 64, 80),
        lambda p: (p, 129, 80),
        lambda p: (p, 70, 129),
        lambda p: (p, 70, 72),
        lambda p: (p.view(torch.int8), 70, 80),
        lambda p: (p.transpose(0, 1), 70, 80),
    ],
)
def test_unpacking_something_else_is_refused(spoil):
    with pytest.raises(InputError, match="unpack_w4p: packed is"):
        unpack_w4p(*spoil(pack_w4p(*operands(70, 80))))


def test_little_memory_beside_operands_and_result(monkeypatch):
    """Peak of temporary storage, counted: a step of the packing must not grow with N."""
    monkeypatch.setattr(w4_layout, "STEP_BYTES", 1 << 16)
    largest = 0
    real = w4_layout._pack_codes

    def watched(codes, blocks, chunks):
        nonlocal largest
        largest = max(largest, codes.numel())
        return real(codes, blocks, chunks)

    monkeypatch.setattr(w4_layout, "_pack_codes", watched)
    pack_w4p(*operands(2048, 512))
    assert largest <= 1 << 16
