// Sums of 128 k under block scales, as wgmma leaves them, added to f32 ones, where tokens are operand B.
#pragma once

#include <cstdint>

#include "common/sm90.h"

namespace fp4d {

// `scale` is that of the weights; one a token lies in shared memory at `tokens`, T of them. A lane has tokens 8 j + 2 c
// and the next, c = lane % 4, of two rows each.
template <int T>
__device__ __forceinline__ void add_scaled(uint32_t tokens, int lane, float scale,
                                           float const (&partial)[T / 2], float (&sums)[T / 2]) {
#pragma unroll
  for (int j = 0; j < T / 8; ++j) {
    uint2 const pair = load_8(tokens + lane % 4 * 8 + j * 32);
    float const first = __uint_as_float(pair.x) * scale, second = __uint_as_float(pair.y) * scale;
    sums[4 * j] = fmaf(partial[4 * j], first, sums[4 * j]);
    sums[4 * j + 1] = fmaf(partial[4 * j + 1], second, sums[4 * j + 1]);
    sums[4 * j + 2] = fmaf(partial[4 * j + 2], first, sums[4 * j + 2]);
    sums[4 * j + 3] = fmaf(partial[4 * j + 3], second, sums[4 * j + 3]);
  }
}

}  // namespace fp4d
