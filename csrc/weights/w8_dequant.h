// e4m3 weights to 16-bit operands of tensor cores, exactly.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace fp4d::w8 {

// Two e4m3 bytes to a half each, with 8 copies of its sign above each: bytes 0 and 1 of a word, or 2 and 3.
template <bool upper>
__device__ __forceinline__ uint32_t spread(uint32_t word) {
  uint32_t pair;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(pair) : "r"(word), "n"(upper ? 0xb3a2 : 0x9180));
  return pair;
}

// bf16. Magnitude bits at 10..4 read as |w| * 2^-120, subnormals included, and multiplication keeps subnormals: w itself
// has 4 significant bits and comes out exact. NaN (0x7f, 0xff) reads as +-480.
__device__ __forceinline__ uint32_t convert(uint32_t pair, __nv_bfloat16) {
  uint32_t const bits = (pair << 4) & 0x87f087f0, factor = 0x7b807b80;  // 2^120
  __nv_bfloat162 const product =
      __hmul2(reinterpret_cast<__nv_bfloat162 const&>(bits), reinterpret_cast<__nv_bfloat162 const&>(factor));
  return reinterpret_cast<uint32_t const&>(product);
}

// fp16. Bits 13..7 read as |w| * 2^-8, subnormals included; tensor cores multiply those.
__device__ __forceinline__ uint32_t convert(uint32_t pair, __half) { return (pair << 7) & 0xbf80bf80; }

constexpr float unscale(__nv_bfloat16 const*) { return 1.f; }
constexpr float unscale(__half const*) { return 256.f; }

}  // namespace fp4d::w8
