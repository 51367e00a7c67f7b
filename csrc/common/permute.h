// Bytes of two words by a selector, with bytes of copied signs (prmt.b32).
#pragma once

#include <cstdint>

namespace fp4d {

// __byte_perm() spends an instruction on clearing bits of the selector that are clear already.
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

}  // namespace fp4d
