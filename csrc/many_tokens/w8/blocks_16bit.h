// What a lane takes of a stage of e4m3 weights under many_tokens/loop_16bit.h: of 64 rows by 64 k, rows r and r + 8 of
// its warp's 16. A block is 16 k, an MMA. Lane 4r + c multiplies k 2c, 2c + 1, 2c + 8 and 2c + 9 of it: all lanes of a
// quad read the same 16 bytes, and each selects its own.
#pragma once

#include "common/async_copy.h"
#include "common/permute.h"
#include "many_tokens/output.h"
#include "weights/w8_dequant.h"

namespace fp4d {

class W8Blocks16Bit {
 public:
  static constexpr int kRowBytes = 64;
  struct Block {
    uint4 upper, lower;  // row r, row r + 8
  };

  // TMA swizzles: 16 bytes j of row r are at j ^ r / 2 % 4. So the 8 rows that a warp reads lie in all banks.
  __device__ explicit W8Blocks16Bit(int lane) : swizzle_(lane / 8 * 16) {
    uint32_t const first = lane % 4 * 2;
    pair_ = (first | (first + 1) << 8) * 0x11 | 0x8080;
    keep(pair_), keep(swizzle_);
  }

  __device__ __forceinline__ void start(int warp, int lane) { row_ = (warp * 16 + lane / 4) * kRowBytes; }
  __device__ __forceinline__ void enter(uint32_t, uint32_t) {}
  __device__ __forceinline__ Block load(uint32_t first, uint32_t slot, int block) const {
    uint32_t const from = first + slot + row_ + (swizzle_ ^ block * 16);
    return {load_16(from), load_16(from + 8 * kRowBytes)};
  }
  __device__ __forceinline__ void dequantize(Block const& block, uint32_t (&a)[4]) const {
    a[0] = convert(block.upper.x, block.upper.y), a[2] = convert(block.upper.z, block.upper.w);
    a[1] = convert(block.lower.x, block.lower.y), a[3] = convert(block.lower.z, block.lower.w);
  }

 private:
  // This lane's two of 8 k.
  __device__ __forceinline__ uint32_t convert(uint32_t low, uint32_t high) const {
    return w8::convert(permute(low, high, pair_), Out{});
  }

  uint32_t row_ = 0;  // in a stage's weights
  uint32_t swizzle_;
  uint32_t pair_;  // selects two bytes, each with copies of its sign above
};

}  // namespace fp4d
