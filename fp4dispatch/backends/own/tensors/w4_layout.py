"""W4P: NVFP4 weights in the order that tensor cores read them. One copy serves every weight-only kernel of ours.

A weight [N, K] is padded with zero codes and zero scales to multiples Np and Kp of 64, and cut into chunks of 64 rows
by 64 k, each 2304 bytes, so that the chunks of one 64-row block along K are one contiguous stream: uint8
[Np/64, Kp/64, 2304]. In a chunk, with unit ``u`` = 0..3 (rows 16u .. 16u+15) and lane ``l`` = 0..31 of a warp
(``r = l // 4``, ``c = l % 4``):

* bytes [0, 2048), codes: 16 bytes at ``512 u + 16 l`` = four little-endian words

  ==== ============ ===================
  word row          k
  ==== ============ ===================
  A    16u + r      16c + 0 .. 16c + 7
  B    16u + r + 8  16c + 0 .. 16c + 7
  C    16u + r      16c + 8 .. 16c + 15
  D    16u + r + 8  16c + 8 .. 16c + 15
  ==== ============ ===================

  of which bits ``4j .. 4j+2`` hold the magnitude of k ``j`` (0..7, counted within the word), bit ``8j+7`` the sign of
  k ``j`` = 0..3 and bit ``8j+3`` that of k ``j+4``. So each half of a word selects four bytes from a table, and the
  signs of four values are already at the sign bits of four bytes.
* bytes [2048, 2304), e4m3 scales as in the checkpoint: two bytes at ``2048 + 8 l + 2 u``, rows ``16u + r`` and
  ``16u + r + 8``, block ``c`` of the chunk.

So a lane holds one whole block of 16 of each of its rows, and converts a scale once for 16 weights. Repacking weights
into fragment order is Marlin's idea (https://arxiv.org/abs/2408.11743); this order is our own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dispatch.errors import InputError
from fp4dispatch.formats import NVFP4_BLOCK, round_up, zero_pad
from fp4dispatch.formats.checks import check_content

ROWS = 64
"""Rows of a chunk."""
COLUMNS = 64
"""Weights along K of a chunk."""
CODE_BYTES = ROWS * COLUMNS // 2
CHUNK_BYTES = CODE_BYTES + ROWS * COLUMNS // NVFP4_BLOCK

STEP_BYTES = 1 << 24
"""Codes that are permuted at a time. The temporary memory is about four times as much."""


def pack_w4p(codes: Tensor, scale: Tensor) -> Tensor:
    """Pack the codes and block scales of an NVFP4 weight.

    Parameters
    ----------
    codes
        uint8 [N, K/2], two e2m1 codes a byte, even element in the low nibble; K a multiple of 16. Any strides.
    scale
        float8_e4m3fn [N, K/16], row-major order of blocks (``linear``), on the same device. Any strides.

    Returns
    -------
    Tensor
        uint8 [ceil(N/64), ceil(K/64), 2304], contiguous, on the device of ``codes``.

    Raises
    ------
    InputError
        For a wrong dtype, shape or device.
    FormatError
        For scales that are NaN or carry a sign: kernels read e4m3 bytes as magnitudes. Synchronises, so not for
        capture.
    """
    n, k = _check(codes, scale)
    check_content("pack_w4p: block scales", scale)
    blocks, chunks = -(-n // ROWS), -(-k // COLUMNS)
    packed = torch.empty(blocks, chunks, CHUNK_BYTES, dtype=torch.uint8, device=codes.device)
    step = _blocks_at_a_time(chunks)
    for start in range(0, blocks, step):
        rows = slice(start * ROWS, (start + step) * ROWS)
        part = packed[start : start + step]
        part[..., :CODE_BYTES] = _pack_codes(codes[rows], part.shape[0], chunks)
        part[..., CODE_BYTES:] = _pack_scales(scale[rows].view(torch.uint8), part.shape[0], chunks)
    return packed


def unpack_w4p(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the codes uint8 [n, k/2] and scales float8_e4m3fn [n, k/16] that :func:`pack_w4p` packed.

    ``n`` and ``k`` may be rounded up to multiples of 64, to see the padding.

    Raises
    ------
    InputError
        For a wrong dtype, shape or stride of ``packed``, or sizes that it does not hold. No sync.
    """
    blocks, chunks = -(-n // ROWS), -(-k // COLUMNS)
    need = (blocks, chunks, CHUNK_BYTES)
    if packed.dtype != torch.uint8 or tuple(packed.shape) != need or not packed.is_contiguous() or k % NVFP4_BLOCK:
        raise InputError(
            f"unpack_w4p: packed is {packed.dtype} {list(packed.shape)} with strides {list(packed.stride())}; a weight "
            f"[{n}, {k}] needs contiguous torch.uint8 {list(need)}, and K a multiple of {NVFP4_BLOCK}"
        )
    codes = torch.empty(n, k // 2, dtype=torch.uint8, device=packed.device)
    scale = torch.empty(n, k // NVFP4_BLOCK, dtype=torch.uint8, device=packed.device)
    step = _blocks_at_a_time(chunks)
    for start in range(0, blocks, step):
        part = packed[start : start + step]
        rows = slice(start * ROWS, min((start + step) * ROWS, n))
        count = rows.stop - rows.start
        codes[rows] = _unpack_codes(part[..., :CODE_BYTES])[:count, : k // 2]
        scale[rows] = _unpack_scales(part[..., CODE_BYTES:])[:count, : k // NVFP4_BLOCK]
    return codes, scale.view(torch.float8_e4m3fn)


def _check(codes: Tensor, scale: Tensor) -> tuple[int, int]:
    if codes.dtype != torch.uint8 or codes.ndim != 2 or not codes.shape[0] or not codes.shape[1] or codes.shape[1] % 8:
        raise InputError(
            f"pack_w4p: codes are {codes.dtype} {list(codes.shape)}; need torch.uint8 [N, K/2], two e2m1 codes a byte, "
            f"N at least 1 and K a multiple of {NVFP4_BLOCK}"
        )
    n, k = codes.shape[0], codes.shape[1] * 2
    need = (n, k // NVFP4_BLOCK)
    if scale.dtype != torch.float8_e4m3fn or tuple(scale.shape) != need or scale.device != codes.device:
        raise InputError(
            f"pack_w4p: scales are {scale.dtype} {list(scale.shape)} on {scale.device}; codes [{n}, {k // 2}] on "
            f"{codes.device} need torch.float8_e4m3fn {list(need)} there: from_128x4 undoes the 128x4 layout"
        )
    return n, k


def _blocks_at_a_time(chunks: int) -> int:
    return max(STEP_BYTES // (chunks * CODE_BYTES), 1)


def _pack_codes(codes: Tensor, blocks: int, chunks: int) -> Tensor:
    """[rows, K/2] -> [blocks, chunks, 2048]."""
    codes = zero_pad(codes, blocks * ROWS, chunks * COLUMNS // 2)
    # [block, unit, half of the unit, row, chunk, block of 16, half of the block, 4 bytes of 2 k each]
    words = codes.reshape(blocks, 4, 2, 8, chunks, 4, 2, 4).permute(0, 4, 1, 3, 5, 6, 2, 7)
    signs = torch.stack((words & 8, words >> 4 & 8), dim=-1).flatten(-2)  # of k = 0..7, in bit 3
    return ((words & 0x77) | signs[..., :4] << 4 | signs[..., 4:]).reshape(blocks, chunks, CODE_BYTES)


def _unpack_codes(part: Tensor) -> Tensor:
    """[blocks, chunks, 2048] -> [64 blocks, 32 chunks]."""
    blocks, chunks = part.shape[:2]
    words = part.reshape(blocks, chunks, 4, 8, 4, 2, 2, 4)
    signs = torch.cat((words >> 4 & 8, words & 8), dim=-1).reshape(*words.shape[:-1], 4, 2)
    codes = (words & 0x77) | signs[..., 0] | signs[..., 1] << 4
    return codes.permute(0, 2, 6, 3, 1, 4, 5, 7).reshape(blocks * ROWS, chunks * COLUMNS // 2)


def _pack_scales(scale: Tensor, blocks: int, chunks: int) -> Tensor:
    """[rows, K/16] -> [blocks, chunks, 256]."""
    scale = zero_pad(scale, blocks * ROWS, chunks * COLUMNS // NVFP4_BLOCK)
    lanes = scale.reshape(blocks, 4, 2, 8, chunks, 4).permute(0, 4, 3, 5, 1, 2)
    return lanes.reshape(blocks, chunks, CHUNK_BYTES - CODE_BYTES)


def _unpack_scales(part: Tensor) -> Tensor:
    """[blocks, chunks, 256] -> [64 blocks, 4 chunks]."""
    blocks, chunks = part.shape[:2]
    rows = part.reshape(blocks, chunks, 8, 4, 4, 2).permute(0, 4, 5, 2, 1, 3)
    return rows.reshape(blocks * ROWS, chunks * COLUMNS // NVFP4_BLOCK)


def padded(n: int, k: int) -> tuple[int, int]:
    """Return N and K of a weight as W4P holds it."""
    return round_up(n, ROWS), round_up(k, COLUMNS)
