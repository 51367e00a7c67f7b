// NVFP4 weights in W4P order to 16-bit operands, as both loops of w4a16_small.cu take them.
#pragma once

#include "few_tokens/element.h"
#include "weights/w4_dequant.h"

namespace fp4d {

// Operand A of two steps from words A and B (half 0) or C and D of a unit.
__device__ __forceinline__ void dequantize_half(uint4 words, int half, w4::Dequant<Element>::Pair scale,
                                                uint32_t (&a)[2][4]) {
  using D = w4::Dequant<Element>;
  uint32_t upper[4], lower[4];
  w4::dequantize<Element>(half ? words.z : words.x, D::low(scale), upper);
  w4::dequantize<Element>(half ? words.w : words.y, D::high(scale), lower);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    a[s][0] = upper[2 * s], a[s][1] = lower[2 * s], a[s][2] = upper[2 * s + 1], a[s][3] = lower[2 * s + 1];
  }
}

}  // namespace fp4d
