// e4m3 weights row by row (weights/w8_rows.h) and e4m3 tokens packed in the same order of k (packed_activations.cu) as
// few_tokens/kernel.h reads them. Both lie in shared memory as wgmma reads them: nothing is converted.
#pragma once

#include "common/async_copy.h"
#include "few_tokens/element.h"
#include "few_tokens/w8/w8a8_wgmma.h"
#include "weights/w8_rows.h"

namespace fp4d {

struct W8A8Weights {
  using Wgmma = W8A8Wgmma;

  static constexpr int kRows = w8::kRows, kUnits = 4;
  static constexpr int kChunkK = w8::kStageK, kChunkBytes = w8::kBlockBytes, kStageChunks = 1;
  static constexpr int kAlign = 1024;  // of the swizzle's pattern
  static constexpr int kReuseTokens = 32;
  static constexpr int kTriggerPart = 1;  // Plan::trigger: stages / this
  static constexpr float kUnscale = 1.f;
  static constexpr bool kBlocks =
      FP4D_SCALING == 1;  // a scale for 128x128 weights and one for 128 k of a token
  static constexpr int registers(int tokens, int) {
    return tokens <= 32 ? 80 : tokens <= 64 ? 96 : tokens <= 96 ? 128 : 168;
  }

  using Source = w8::Source;
  using Activation = uint8_t;
  static constexpr bool kPacked = true;
  static constexpr int kTableBytes = 0;

  template <class Tile>
  __device__ static void load(Source const& w, int, int chunk, int row_block, int row_blocks, uint32_t to,
                              uint32_t barrier, int lane) {
    w8::load_rows(w, chunk, row_block, row_blocks, to, barrier, lane);
  }
};

}  // namespace fp4d
