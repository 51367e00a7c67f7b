// e4m3 weights [N, K] as a checkpoint holds them, row by row, as few_tokens/kernel.h reads them. No copy in another
// order: the tensor cores' order comes out of the choice of which k meet in a step.
//
// A stage is 64 rows by 128 k: 128 bytes a row, fetched by TMA, which swizzles (column j of 16 bytes of row r is at j ^
// r % 8) and fills with zeros what is beyond N and K. Lane l = 4r + c of a warp takes, of rows 16u + r and 16u + r + 8
// of a unit u, column 2c + (c / 2 ^ step) in step 0 and 1: so every two rows of 8 lanes meet all 8 columns, and so do
// the 32 bytes of two tokens that belong to them, on the other side. No bank is asked twice at once. In these 16 bytes
// word j is k = 4j .. 4j + 3: slots 2c, 2c + 1 of MMA step j are the first two, slots 2c + 8, 2c + 9 the others; the
// other operand reads 4 consecutive k a lane.
#pragma once

#include "common/async_copy.h"
#include "few_tokens/element.h"
#include "weights/w8_dequant.h"
#include "weights/w8_rows.h"

namespace fp4d {

struct W8A16Weights {
  static constexpr int kRows = w8::kRows, kUnits = 4;
  static constexpr int kChunkK = w8::kStageK, kChunkBytes = w8::kBlockBytes, kStageChunks = 1;
  static constexpr int kAlign = 1024;  // of the swizzle's pattern
  static constexpr int kReuseTokens = 16;
  static constexpr int kTriggerPart = 2;  // Plan::trigger: stages / this
  using Activation = Element;
  static constexpr bool kPacked = false;
  static constexpr int kTableBytes = 0;
  static constexpr float kUnscale = w8::unscale(static_cast<Element const*>(nullptr));
  static constexpr bool kBlocks = false;
  static constexpr int registers(int tokens, int units) {
    return units == 4 ? 80 + tokens * 9 / 4 : tokens <= 16 ? 80 : 96;
  }

  // In device code: whether registers hold what a step loads until all of it is there. One tile would spill.
  static constexpr bool releases_early(int tokens, int units) {
    return tokens <= 16 && !(kFp16OnHopper && tokens == 16 && units == 2);
  }

  using Source = w8::Source;

  template <class Tile>
  __device__ static void load(Source const& w, int, int chunk, int row_block, int row_blocks, uint32_t to,
                              uint32_t barrier, int lane) {
    w8::load_rows(w, chunk, row_block, row_blocks, to, barrier, lane);
  }

  // What a lane holds of U units: 16 k of two rows each.
  template <int U>
  struct Packed {
    uint4 upper[U], lower[U];

    // Bits of each load.
    __device__ __forceinline__ uint32_t loaded() const {
      uint32_t seen = 0;
#pragma unroll
      for (int u = 0; u < U; ++u) seen |= upper[u].x | lower[u].x;
      return seen;
    }

    __device__ __forceinline__ void operand_a(int unit, int half, uint32_t (&a)[2][4]) const {
      uint4 const up = upper[unit], low = lower[unit];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        uint32_t const first = half ? (s ? up.w : up.z) : (s ? up.y : up.x);
        uint32_t const second = half ? (s ? low.w : low.z) : (s ? low.y : low.x);
        a[s][0] = w8::convert(w8::spread<false>(first), Element());
        a[s][1] = w8::convert(w8::spread<false>(second), Element());
        a[s][2] = w8::convert(w8::spread<true>(first), Element());
        a[s][3] = w8::convert(w8::spread<true>(second), Element());
      }
    }
  };

  // Where a lane of a consumer warp reads in each step of the first stage: its 16 bytes of row r of the warp's first
  // unit, and its 32 bytes of token lane/4.
  template <int U>
  struct Reader {
    uint32_t words[2], tokens[2];

    __device__ __forceinline__ Reader(uint32_t weights_at, uint32_t token_at, int part, int lane) {
      int const r = lane / 4, c = lane % 4;
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        int const column = 2 * c + (c / 2 ^ step);
        words[step] = weights_at + (part * U * 16 + r) * kChunkK + (column ^ r) * 16;
        tokens[step] = token_at + column * 32;
        keep(words[step]), keep(tokens[step]);
      }
    }

    __device__ __forceinline__ uint32_t tokens_at(uint32_t offset, int step) const {
      return tokens[step] + offset;
    }

    __device__ __forceinline__ void load(uint32_t offset, int step, Packed<U>& to) const {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        to.upper[u] = load_16(words[step] + offset + u * 16 * kChunkK);
        to.lower[u] = load_16(words[step] + offset + (u * 16 + 8) * kChunkK);
      }
    }
  };
};

}  // namespace fp4d
