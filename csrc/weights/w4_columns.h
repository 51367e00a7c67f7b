// NVFP4 weights in W4P order (weights/w4_dequant.h) to 16-bit operands whose k are in their own order, as those of
// activations are that TMA brings.
//
// An MMA takes 16 k: of a lane 4r + c pairs 2c and 2c + 8 of a scale block, while the block lies with one lane of the
// quad, in words A..D. So each lane reads the words of all four lanes of its quad, one after the other, and takes byte
// c of each; their scales come by shuffles.
#pragma once

#include "common/async_copy.h"
#include "weights/w4_dequant.h"

namespace fp4d::w4 {

// Words and scales (as Dequant::Pair) of 16 k, of rows r and r + 8.
struct Block {
  uint4 codes;
  uint32_t scales;
};

// What a lane takes of a block. `kHeldTable`: half of the table of magnitudes stays in a register, which saves an
// instruction for each four weights: ptxas brings a constant that it knows to a register before each look-up.
template <class T, bool kHeldTable = false>
class Columns {
 public:
  __device__ explicit Columns(int lane) {
    uint32_t const c = lane % 4, sign = c % 2 * 2;
    magnitudes_ = c | (c + 4) << 4;
    signs_ = sign | (sign + 1) << 4 | (sign + 4) << 8 | (sign + 5) << 12;
    to_top_ = c < 2 ? 1 : 16;
    keep(magnitudes_), keep(signs_), keep(to_top_);
    if constexpr (kHeldTable) {
      held_ = kTable.low | magnitudes_ >> 31;  // + 0, which ptxas does not know
      keep(held_);
    }
  }

  // Operand A of an MMA.
  __device__ __forceinline__ void dequantize(Block const& block, uint32_t (&a)[4]) const {
    typename D::Pair const& scales = reinterpret_cast<typename D::Pair const&>(block.scales);
    row(block.codes.x, block.codes.z, D::low(scales), a[0], a[2]);
    row(block.codes.y, block.codes.w, D::high(scales), a[1], a[3]);
  }

 private:
  using D = Dequant<T>;
  static constexpr Lut kTable{D::kMagnitudes[0], D::kMagnitudes[1]};

  // Of a row's first and last 8 k.
  __device__ __forceinline__ void row(uint32_t first, uint32_t last, typename D::Pair scale, uint32_t& low,
                                      uint32_t& high) const {
    uint32_t const magnitudes = permute(first, last, magnitudes_) & 0x7777;
    uint32_t const signs = permute(first, last, signs_) * to_top_;
    uint32_t pairs[2];
    D::pairs(permute(kHeldTable ? held_ : kTable.low, kTable.high, magnitudes), signs, pairs);
    low = times(pairs[0], scale), high = times(pairs[1], scale);
  }
  __device__ __forceinline__ static uint32_t times(uint32_t pair, typename D::Pair scale) {
    typename D::Pair const product = __hmul2(reinterpret_cast<typename D::Pair const&>(pair), scale);
    return reinterpret_cast<uint32_t const&>(product);
  }

  uint32_t magnitudes_, signs_;  // selectors of bytes
  uint32_t to_top_;              // brings signs to the top of their bytes
  uint32_t held_ = 0;
};

}  // namespace fp4d::w4
