"""How the W4P GEMM's operands meet, element by element: from the bytes in memory to the slots of a wgmma.

Written from the PTX ISA (fragments of wgmma, 128-byte swizzle), not from the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_activations(x: Tensor) -> Tensor:
    """Return activations [M, K] of 1 or 2 bytes an element as ``w4_activations.cu`` packs them.

    uint8 [blocks of 128 bytes along K, ceil(M/8), 1024].

    Every element is placed on its own, by the formula in the header of that file.
    """
    m, k = x.shape
    size = x.element_size()
    block = 128 // size
    packed = torch.zeros(-(-k // block), -(-m // 8), 8, 8, 16, dtype=torch.uint8)  # [.., .., token, column, byte]
    raw = x.contiguous().view(torch.uint8).reshape(m, k, size)
    column, byte = zip(*(place(i % block, size) for i in range(k)), strict=True)
    blocks = torch.arange(k) // block
    columns, bytes_ = torch.tensor(column), torch.tensor(byte)
    for token in range(m):
        for part in range(size):
            packed[blocks, token // 8, token % 8, columns ^ (token % 8), bytes_ + part] = raw[token, :, part]
    return packed.reshape(packed.shape[0], packed.shape[1], 1024)


def place(k: int, size: int) -> tuple[int, int]:
    """Return (16-byte column before the swizzle, byte in it) of element ``k`` of a 128-byte row."""
    chunk, c, r = k // 64, k % 64 // 16, k % 16
    if size == 1:
        s, h, j = r // 8, r % 8 // 4, r % 4
        return 4 * chunk + 2 * s + h, 4 * c + j
    s, h, e = r // 4, r % 4 // 2, r % 2
    return 2 * s + h, 4 * c + 2 * e


def operand_b(packed: Tensor, tokens: int, size: int) -> Tensor:
    """Return what wgmma sees: raw bytes [K steps of 32 bytes, tokens, 32].

    The descriptor's start moves by 32 bytes a step. The address of byte b of token t is start + t / 8 * 1024 +
    t % 8 * 128 + b, and then its bits 4..6 are flipped by bits 7..9.
    """
    flat = packed.reshape(packed.shape[0], -1)
    steps = []
    for block in flat:
        for step in range(4):
            t = torch.arange(tokens)[:, None]
            address = step * 32 + t // 8 * 1024 + t % 8 * 128 + torch.arange(32)
            steps.append(block[address ^ ((address >> 7 & 7) << 4)])
    return torch.stack(steps)


def operand_a(codes: Tensor, size: int) -> Tensor:
    """Return the codes that the lanes of one chunk hold, as wgmma sees them: [steps, 64 rows, slots].

    ``codes`` are the 2048 code bytes of a chunk. A lane's four words go into registers a0..a3 of each step as
    w4_dequant.h says; where a register's elements belong is in the PTX ISA (figures of wgmma.m64k16 and m64k32).
    """
    words = codes.reshape(4, 32, 4, 4).long()
    words = (words * torch.tensor([1, 1 << 8, 1 << 16, 1 << 24])).sum(-1)  # [warp, lane, A B C D]
    per_step = 32 // size
    seen = torch.full((64 // per_step, 64, per_step), -1)

    def code(word: Tensor, j: int) -> int:
        """Of k = j of a word: magnitude by nibbles, signs by bytes."""
        sign = 8 * j + 7 if j < 4 else 8 * (j - 4) + 3
        return int(word) >> 4 * j & 7 | (int(word) >> sign & 1) << 3

    for warp in range(4):
        for lane in range(32):
            r, c = divmod(lane, 4)
            a, b, cc, d = words[warp, lane]
            for step in range(seen.shape[0]):
                if size == 1:
                    upper, lower = (a, b) if step == 0 else (cc, d)
                    for j in range(4):
                        seen[step, 16 * warp + r, 4 * c + j] = code(upper, j)
                        seen[step, 16 * warp + r + 8, 4 * c + j] = code(lower, j)
                        seen[step, 16 * warp + r, 16 + 4 * c + j] = code(upper, 4 + j)
                        seen[step, 16 * warp + r + 8, 16 + 4 * c + j] = code(lower, 4 + j)
                else:
                    upper, lower = (a, b) if step < 2 else (cc, d)
                    for half in range(2):
                        j = 2 * (step % 2) + half
                        for e in range(2):
                            seen[step, 16 * warp + r, 8 * half + 2 * c + e] = code(upper, 2 * j + e)
                            seen[step, 16 * warp + r + 8, 8 * half + 2 * c + e] = code(lower, 2 * j + e)
    assert int(seen.min()) >= 0
    return seen
