// What a lane takes of a stage of NVFP4 weights under many_tokens/loop_16bit.h: a chunk of 64 rows by 64 k, four blocks.
#pragma once

#include "many_tokens/output.h"
#include "weights/w4_columns.h"

namespace fp4d {

class W4Blocks16Bit {
 public:
  using Block = w4::Block;

  __device__ explicit W4Blocks16Bit(int lane) : columns_(lane) {}

  __device__ __forceinline__ void start(int warp, int lane) {
    words_ = warp * w4::kUnitBytes + lane / 4 * 4 * 16, scales_ = w4::kScaleOffset + lane * 8 + warp * 2;
  }

  // Fetches the scales of this lane's block.
  __device__ __forceinline__ void enter(uint32_t first, uint32_t slot) {
    auto const pair = w4::unit_scales<Out>(load_2(first + scales_ + slot), 0);
    own_ = reinterpret_cast<uint32_t const&>(pair);
  }
  __device__ __forceinline__ Block load(uint32_t first, uint32_t slot, int block) const {
    return {load_16(first + words_ + slot + block * 16), __shfl_sync(~0u, own_, block, 4)};
  }
  __device__ __forceinline__ void dequantize(Block const& block, uint32_t (&a)[4]) const {
    columns_.dequantize(block, a);
  }

 private:
  w4::Columns<Out, true> columns_;
  uint32_t words_ = 0, scales_ = 0;  // in a stage's weights: of the quad's first lane, of this lane
  uint32_t own_ = 0;
};

}  // namespace fp4d
