"""How the W4P GEMM's operands meet, element by element: from the bytes in memory to the slots of a wgmma.

Written from the PTX ISA (fragments of wgmma, 128-byte swizzle), not from the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_activations(q: Tensor) -> Tensor:
    """Return e4m3 activations [M, K] as ``pack_e4m3.h`` packs them: uint8 [ceil(K/128), ceil(M/8), 1024].

    Every element is placed on its own, by the formula in the header of that file.
    """
    m, k = q.shape
    packed = torch.zeros(-(-k // 128), -(-m // 8), 8, 8, 16, dtype=torch.uint8)  # [.., .., token, column, byte]
    raw, blocks = q.contiguous().view(torch.uint8), torch.arange(k) // 128
    columns, bytes_ = (torch.tensor(of) for of in zip(*(place(i % 128) for i in range(k)), strict=True))
    for token in range(m):
        packed[blocks, token // 8, token % 8, columns ^ (token % 8), bytes_] = raw[token]
    return packed.reshape(packed.shape[0], packed.shape[1], 1024)


def place(k: int) -> tuple[int, int]:
    """Return (16-byte column before the swizzle, byte in it) of element ``k`` of a token's 128 bytes."""
    chunk, c, r = k // 64, k % 64 // 16, k % 16
    s, h, j = r // 8, r % 8 // 4, r % 4
    return 4 * chunk + 2 * s + h, 4 * c + j


def boxes(x: Tensor) -> Tensor:
    """Return 16-bit activations [M, K] as TMA brings them, k in their own order: boxes of 64 k with 128-byte swizzle.

    uint8 [ceil(K/64), ceil(M/8), 1024]: bits 4..6 of an address are flipped by bits 7..9. What is not there is zero.
    """
    m, k = x.shape
    padded = torch.nn.functional.pad(x, (0, -k % 64, 0, -m % 8)).contiguous().view(torch.uint8)
    rows = padded.view(-(-m // 8), 8, -(-k // 64), 8, 16)
    columns = torch.arange(8)[:, None] ^ torch.arange(8)  # [token, column]
    return rows[:, torch.arange(8)[:, None], :, columns].permute(3, 2, 0, 1, 4).reshape(-(-k // 64), -(-m // 8), 1024)


def operand_b(packed: Tensor, tokens: int) -> Tensor:
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

    ``codes`` are the 2048 code bytes of a chunk. For e4m3 (``size`` 1) a lane's four words go into registers a0..a3 of
    each step as w4_dequant.h says, for 16 bits those of all four lanes of its quad as loop_16bit.h says; where a
    register's elements belong is in the PTX ISA (figures of wgmma.m64k16 and m64k32).
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
            for step in range(seen.shape[0]):
                a, b, cc, d = words[warp, lane if size == 1 else 4 * r + step]
                if size == 1:
                    upper, lower = (a, b) if step == 0 else (cc, d)
                    for j in range(4):
                        seen[step, 16 * warp + r, 4 * c + j] = code(upper, j)
                        seen[step, 16 * warp + r + 8, 4 * c + j] = code(lower, j)
                        seen[step, 16 * warp + r, 16 + 4 * c + j] = code(upper, 4 + j)
                        seen[step, 16 * warp + r + 8, 16 + 4 * c + j] = code(lower, 4 + j)
                else:
                    for half, (upper, lower) in enumerate(((a, b), (cc, d))):
                        for j in (2 * c, 2 * c + 1):
                            seen[step, 16 * warp + r, 8 * half + j] = code(upper, j)
                            seen[step, 16 * warp + r + 8, 8 * half + j] = code(lower, j)
    assert int(seen.min()) >= 0
    return seen
