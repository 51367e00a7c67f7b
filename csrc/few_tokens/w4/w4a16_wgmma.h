// Consumers of w4a16_small.cu that multiply by wgmma (sm_90a only). For 16 tokens and so few rows that adding up the
// sums of many groups of warps would cost most.
#pragma once

#include "common/sm90.h"
#include "common/wgmma.h"
#include "few_tokens/tile.h"
#include "few_tokens/w4/w4a16_dequant.h"

namespace fp4d {

// Tokens for wgmma. Of a chunk, MMA step s multiplies 32 bytes of a token's row: pair c of the 16 bytes 2s is k = 16c +
// 4s, + 1 and pair c of the next 16 is k = 16c + 4s + 2, + 3. So a lane that loads the same half of the four blocks
// of 16 k has whole 16-byte pieces of the row, once it has transposed 4 by 4 pairs. 128-byte swizzle.
template <class Tile>
struct W4A16Loader {
  static constexpr int T = Tile::kTokens;
  static constexpr int kItems = Tile::kStageChunks * T * 2 / 32;  // of a lane in a stage
  struct Item {
    uint4 v[4];  // of block c
  };
  Params<typename Tile::Weights> const& p;
  Ring<Tile> ring;
  Range range;
  int token, tokens, lane;

  __device__ void load(int stage, int item, Item& to) const {
    if (stage >= range.count) return;
    int const at = lane + item * 32, t = at / 2 % T;
    int const k = (range.first + stage) * Tile::kStageK + at / (2 * T) * w4::kChunkK + at % 2 * 8;
    Element const* const from = p.x + (token + t) * p.x_stride + k;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      to.v[c] = {};
      if (t < tokens && k + 16 * c < p.k) to.v[c] = *reinterpret_cast<uint4 const*>(from + 16 * c);
    }
  }

  __device__ void store(int slot, int item, uint4 const (&v)[4]) const {
    int const at = lane + item * 32, t = at / 2 % T, swizzle = t % 8 * 16;
    if (t >= tokens) return;
    uint32_t const row = ring.tokens(slot) + at / (2 * T) * (T * 128) + t * 128, column = at % 2 * 64;
    store_16(row + ((column + 0) ^ swizzle), v[0].x, v[1].x, v[2].x, v[3].x);
    store_16(row + ((column + 16) ^ swizzle), v[0].y, v[1].y, v[2].y, v[3].y);
    store_16(row + ((column + 32) ^ swizzle), v[0].z, v[1].z, v[2].z, v[3].z);
    store_16(row + ((column + 48) ^ swizzle), v[0].w, v[1].w, v[2].w, v[3].w);
  }

  // A stage is on its way to registers while the one before it is stored.
  __device__ void run() const {
    Item items[kItems];
    grid_dependency_wait();
#pragma unroll
    for (int item = 0; item < kItems; ++item) load(0, item, items[item]);
    int slot = 0;
    uint32_t parity = 1;
#pragma unroll 1
    for (int stage = 0; stage < range.count; ++stage) {
      barrier_wait(ring.empty(slot), parity);
#pragma unroll
      for (int item = 0; item < kItems; ++item) {
        store(slot, item, items[item].v);
        load(stage + 1, item, items[item]);
      }
      visible_to_async();
      __syncwarp();
      if (lane == 0) barrier_arrive(ring.full(slot));
      if (++slot == ring.stages) slot = 0, parity ^= 1;
    }
  }
};

// As consume(), with the four warps of a row block. Registers of operand A are double-buffered by groups of two MMAs:
// a group is waited for when the one after it has started.
struct W4A16Wgmma {
  template <class Tile>
  __device__ __forceinline__ static void consume(Params<typename Tile::Weights> const&, Ring<Tile> ring,
                                                 Range range, uint32_t, int warp, int lane,
                                                 Sums<Tile>& sums) {
    constexpr int T = Tile::kTokens;
    constexpr Operand kOperand = FP4D_OUT == 0 ? Operand::kBF16 : Operand::kF16;
    uint32_t const unit = ring.weights(0, warp / Tile::kBlockWarps);
    uint32_t const words = unit + warp % 4 * w4::kUnitBytes + lane * 16;
    uint32_t const scales = unit + w4::kScaleOffset + lane * 8 + warp % 4 * 2;
    uint32_t const last = ring.full(ring.stages);
    uint32_t full = ring.full(0), parity = 0, offset = 0, release = 0;
    uint32_t a[2][2][4] = {};
#pragma unroll 1
    for (int i = 0; i < range.count; ++i) {
      barrier_wait(full, parity);
      uint4 packed[Tile::kStageChunks];
      uint32_t bytes[Tile::kStageChunks];
#pragma unroll
      for (int chunk = 0; chunk < Tile::kStageChunks; ++chunk) {
        packed[chunk] = load_16(words + offset + chunk * w4::kChunkBytes);
        bytes[chunk] = load_2(scales + offset + chunk * w4::kChunkBytes);
      }
      uint64_t const b = operand_b(ring.tokens(0) + offset);
#pragma unroll
      for (int group = 0; group < 2 * Tile::kStageChunks; ++group) {
        int const chunk = group / 2, half = group % 2;
        wgmma_wait<1>();
        if (group == 1 && release != 0 && lane == 0) barrier_arrive(release);  // of the stage before
        dequantize_half(packed[chunk], half, w4::unit_scales<Element>(bytes[chunk], 0), a[half]);
        wgmma_fence();
        uint64_t const at = b + (chunk * T * 128 >> 4) + half * 2 * kDescriptorStep;
        wgmma<kOperand, T>(sums, a[half][0], at);
        wgmma<kOperand, T>(sums, a[half][1], at + kDescriptorStep);
        wgmma_commit();
      }
      release = full + 8;
      offset += Tile::kStageBytes, full += 16;
      if (full == last) full = ring.full(0), parity ^= 1, offset = 0;
    }
    wgmma_wait<0>();
  }
};

}  // namespace fp4d
