// NVFP4 weights in W4P order as few_tokens/kernel.h reads them: a stage is up to two chunks, which follow each other in
// memory.
#pragma once

#include "common/async_copy.h"
#include "few_tokens/element.h"
#include "few_tokens/w4/w4a16_dequant.h"
#include "few_tokens/w4/w4a16_wgmma.h"
#include "weights/w4_dequant.h"

namespace fp4d {

struct W4A16Weights {
  using Wgmma = W4A16Wgmma;

  static constexpr int kRows = w4::kChunkRows, kUnits = w4::kUnits;
  static constexpr int kChunkK = w4::kChunkK, kChunkBytes = w4::kChunkBytes, kStageChunks = 2;
  static constexpr int kAlign = 16;
  static constexpr int kReuseTokens = 32;
  static constexpr int kTriggerPart = 1;  // Plan::trigger: stages / this
  static constexpr float kUnscale = w4::Dequant<Element>::kUnscale;
  static constexpr bool kBlocks = false;
  static constexpr int registers(int tokens, int units) {
    return units == 1 ? (tokens <= 32 ? 80 : 96) : units == 4 ? 64 + tokens * 9 / 4 : tokens <= 16 ? 72 : 96;
  }

  // In device code: whether registers hold what a step loads until all of it is there. One tile would spill.
  static constexpr bool releases_early(int tokens, int units) {
    return tokens <= 16 && !(kFp16OnHopper && tokens == 8 && units == 4);
  }

  using Source = uint8_t const*;
  using Activation = Element;
  static constexpr bool kPacked = false;
  static constexpr int kTableBytes = 0;

  // `chunk` and, if there is one, the next, of `row_blocks` row blocks from `row_block` on.
  template <class Tile>
  __device__ static void load(Source const& w, int chunks, int chunk, int row_block, int row_blocks,
                              uint32_t to, uint32_t barrier, int lane) {
    uint32_t const bytes = min(kStageChunks, chunks - chunk) * kChunkBytes;
    // Wgmma multiplies whole stages; a chunk beyond the last is that one again and meets zeros.
    bool const again = Tile::kWgmma && bytes < Tile::kWeightBytes;
    if (elected(lane)) barrier_arrive_expect(barrier, row_blocks * (again ? 2 * bytes : bytes));
    uint8_t const* from = w + (int64_t(row_block) * chunks + chunk) * kChunkBytes;
#pragma unroll 1
    for (int block = 0; block < row_blocks; ++block) {
      copy_stream(to + block * Tile::kWeightBytes, from, bytes, barrier, lane);
      if (again) copy_stream(to + block * Tile::kWeightBytes + bytes, from, bytes, barrier, lane);
      from += int64_t(chunks) * kChunkBytes;
    }
  }

  // What a lane holds of U units: 16 k of two rows each.
  template <int U>
  struct Packed {
    uint4 words[U];
    w4::Dequant<Element>::Pair scale[U];

    // Bits of each load.
    __device__ __forceinline__ uint32_t loaded() const {
      uint32_t seen = 0;
#pragma unroll
      for (int u = 0; u < U; ++u) seen |= words[u].x;
#pragma unroll
      for (int u = 0; u < U; u += 2) seen |= reinterpret_cast<uint32_t const&>(scale[u]);
      return seen;
    }

    __device__ __forceinline__ void operand_a(int unit, int half, uint32_t (&a)[2][4]) const {
      dequantize_half(words[unit], half, scale[unit], a);
    }
  };

  // Where a lane of a consumer warp reads, in the first stage: its first word of the warp's first unit, its bytes of
  // these units' scales, and its 32 bytes of token lane/4.
  template <int U>
  struct Reader {
    uint32_t words, scales, tokens;

    __device__ __forceinline__ Reader(uint32_t weights_at, uint32_t token_at, int part, int lane)
        : words(weights_at + part * U * w4::kUnitBytes + lane * 16),
          scales(weights_at + w4::kScaleOffset + lane * 8 + part * U * 2),
          tokens(token_at + lane % 4 * 32) {
      keep(words), keep(scales), keep(tokens);
    }

    __device__ __forceinline__ uint32_t tokens_at(uint32_t offset, int step) const {
      return tokens + offset + step * kChunkK * 2;
    }

    // Of chunk `step` of the stage at `offset`.
    __device__ __forceinline__ void load(uint32_t offset, int step, Packed<U>& to) const {
      uint32_t const at = offset + step * kChunkBytes;
#pragma unroll
      for (int u = 0; u < U; ++u) to.words[u] = load_16(words + at + u * w4::kUnitBytes);
#pragma unroll
      for (int u = 0; u < U; u += 2) {
        uint32_t const bytes = load_4(scales + at + u * 2);
        to.scale[u] = w4::unit_scales<Element>(bytes, 0),
        to.scale[u + 1] = w4::unit_scales<Element>(bytes, 1);
      }
    }
  };
};

}  // namespace fp4d
