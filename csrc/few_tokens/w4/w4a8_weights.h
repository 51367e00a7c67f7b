// NVFP4 weights in W4P order and packed e4m3 tokens (packed_activations.cu) as few_tokens/kernel.h reads them: a stage
// is two chunks along K and the 128 k of the tokens that belong to them.
#pragma once

#include "common/async_copy.h"
#include "few_tokens/element.h"
#include "few_tokens/w4/w4a8_wgmma.h"
#include "weights/w4_dequant.h"
#include "weights/w4_to_fp8.h"

namespace fp4d {

struct W4A8Weights {
  using Wgmma = W4A8Wgmma;

  static constexpr int kRows = w4::kChunkRows, kUnits = w4::kUnits;
  static constexpr int kChunkK = w4::kChunkK, kChunkBytes = w4::kChunkBytes, kStageChunks = 2;
  static constexpr int kAlign = 1024;  // of the swizzle's pattern
  static constexpr int kReuseTokens = 32;
  static constexpr int kTriggerPart = 1;  // Plan::trigger: stages / this
  static constexpr float kUnscale = 8.f;
  static constexpr bool kBlocks = false;
  static constexpr int registers(int tokens, int) {
    return tokens <= 32 ? 80 : tokens <= 64 ? 96 : tokens <= 80 ? 112 : tokens <= 96 ? 128 : 168;
  }

  using Source = uint8_t const*;
  using Activation = uint8_t;
  static constexpr bool kPacked = true;
  static constexpr int kTableBytes = w4::kLutTableBytes;

  // The two chunks from `chunk` on of every row block. A chunk beyond the last is that one again and meets zeros.
  template <class Tile>
  __device__ static void load(Source const& w, int chunks, int chunk, int row_block, int row_blocks,
                              uint32_t to, uint32_t barrier, int lane) {
    uint32_t const bytes = min(kStageChunks, chunks - chunk) * kChunkBytes;
    if (elected(lane)) barrier_arrive_expect(barrier, row_blocks * Tile::kWeightBytes);
    uint8_t const* from = w + (int64_t(row_block) * chunks + chunk) * kChunkBytes;
#pragma unroll 1
    for (int block = 0; block < row_blocks; ++block) {
      copy_stream(to + block * Tile::kWeightBytes, from, bytes, barrier, lane);
      if (bytes < Tile::kWeightBytes)
        copy_stream(to + block * Tile::kWeightBytes + bytes, from, bytes, barrier, lane);
      from += int64_t(chunks) * kChunkBytes;
    }
  }

  template <int threads>
  __device__ static void make_tables(uint32_t at, int thread) {
    w4::make_lut_table<threads>(at, thread);
  }
};

}  // namespace fp4d
