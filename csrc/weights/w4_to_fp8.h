// NVFP4 weights in W4P order to e4m3 in the registers of wgmma's operand A, by a table in shared memory.
#pragma once

#include <cstdint>

#include "common/async_copy.h"
#include "weights/w4_dequant.h"
#include "common/sm90.h"

namespace fp4d::w4 {

// What the 8 magnitudes of e2m1 become under every scale, 16 times, so that no two lanes of half a warp meet in a bank.
// Looking 8 bytes up costs a sixth of making them.
constexpr int kLutCopies = 16, kLutPitch = kLutCopies * 8, kLutTableBytes = 128 * kLutPitch;

__device__ __forceinline__ Lut load_lut(uint32_t address) {
  uint2 const lut = load_8(address);
  return {lut.x, lut.y};
}

// By `threads` threads, whose writes a barrier must follow.
template <int threads>
__device__ __forceinline__ void make_lut_table(uint32_t at, int thread) {
  constexpr int kEntries = 128 * kLutCopies;
  static_assert(kEntries % threads == 0 && threads % kLutCopies == 0);
#pragma unroll
  for (int i = 0; i < kEntries; i += threads) {
    int const entry = i + thread;
    uint32_t const scale = entry / kLutCopies, raw = scale * 0x00800080;
    Lut const lut = e4m3_lut(reinterpret_cast<__half2 const&>(raw));
    store_8(at + entry * 8, lut.low, lut.high);
  }
}

// A lane's words of a chunk (A, B, C, D), its two scales and what they make of magnitudes.
struct Fp8Chunk {
  uint4 codes;
  uint32_t scales[2];
  Lut luts[2];

  // From the lane's first word and its first scale.
  __device__ __forceinline__ void load(uint32_t words_at, uint32_t scales_at) {
    scales[0] = load_1(scales_at), scales[1] = load_1(scales_at + 1);
    codes = load_16(words_at);
  }
  // In this lane's copy of the table.
  __device__ __forceinline__ void look_up(uint32_t luts_at) {
    luts[0] = load_lut(luts_at + scales[0] * kLutPitch);
    luts[1] = load_lut(luts_at + scales[1] * kLutPitch);
  }
  // Operand A of the first or the second MMA.
  template <int step, UpperHalf how = UpperHalf::kShift>
  __device__ __forceinline__ void dequantize(uint32_t (&a)[4]) const {
    to_e4m3<how>(step == 0 ? codes.x : codes.z, luts[0], a[0], a[2]);
    to_e4m3<how>(step == 0 ? codes.y : codes.w, luts[1], a[1], a[3]);
  }
};

}  // namespace fp4d::w4
