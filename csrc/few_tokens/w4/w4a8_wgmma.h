// Consumers of w4a8_small.cu: the four warps of a row block multiply together by FP8 wgmma, weights as operand A in
// registers, tokens as operand B.
#pragma once

#include "few_tokens/tile.h"
#include "common/sm90.h"
#include "weights/w4_to_fp8.h"
#include "common/wgmma.h"

namespace fp4d {

// FP8 wgmma keeps 13 bits of a sum, so every 256 k the partial sums, which the first MMA has started from zero, are added
// to f32 ones (many_tokens/kernel.h).
struct W4A8Wgmma {
  static constexpr int kPromoteStages = 2;

  template <class Tile>
  __device__ __forceinline__ static void multiply(Sums<Tile>& sums, uint32_t const (&a)[4], uint64_t b,
                                                  int add) {
    wgmma_fence();
    wgmma_e4m3<Tile::kTokens>(sums, a, b, add);
    wgmma_commit();
  }

  // Registers of operand A are double-buffered: one is waited for when the next one's MMAs have started. Words and tables
  // of a chunk are asked for while the one before is multiplied.
  template <class Tile>
  __device__ __forceinline__ static void consume(Params<typename Tile::Weights> const&, Ring<Tile> ring,
                                                 Range range, uint32_t tables, int warp, int lane,
                                                 Sums<Tile>& sums) {
    if (range.count == 0) return;
    uint32_t const unit = ring.weights(0, warp / Tile::kBlockWarps);
    uint32_t words = unit + warp % 4 * w4::kUnitBytes + lane * 16;
    uint32_t scales = unit + w4::kScaleOffset + lane * 8 + warp % 4 * 2;
    uint32_t luts = tables + lane % w4::kLutCopies * 8;
    keep(words), keep(scales), keep(luts);
    uint32_t const last = ring.full(ring.stages);
    uint32_t full = ring.full(0), parity = 0, offset = 0, release = 0;
    Sums<Tile> partial = {};
    w4::Fp8Chunk chunks[Tile::kStageChunks];
    auto const load = [&](int c) {
      chunks[c].load(words + offset + c * w4::kChunkBytes, scales + offset + c * w4::kChunkBytes);
    };
    uint32_t a[2][4];
    barrier_wait(full, parity);
    load(0);
    chunks[0].look_up(luts);
#pragma unroll 1
    for (int left = range.count - 1;; --left) {  // stages after this one: what counts takes registers here
      uint64_t const b = operand_b(ring.tokens(0) + offset);
      wgmma_wait<1>();
      chunks[0].dequantize<0>(a[0]);
      multiply<Tile>(partial, a[0], b, (range.count - 1 - left) % kPromoteStages);
      wgmma_wait<1>();
      if (release != 0 && lane == 0) barrier_arrive(release);  // of the stage before
      load(1);
      chunks[0].dequantize<1>(a[1]);
      multiply<Tile>(partial, a[1], b + kDescriptorStep, 1);
      chunks[1].look_up(luts);
      wgmma_wait<1>();
      chunks[1].dequantize<0>(a[0]);
      multiply<Tile>(partial, a[0], b + 2 * kDescriptorStep, 1);
      wgmma_wait<1>();
      chunks[1].dequantize<1>(a[1]);
      multiply<Tile>(partial, a[1], b + 3 * kDescriptorStep, 1);
      if (left == 0) break;
      release = full + 8;
      offset += Tile::kStageBytes, full += 16;
      if (full == last) full = ring.full(0), parity ^= 1, offset = 0;
      barrier_wait(full, parity);
      load(0);
      chunks[0].look_up(luts);
      if ((range.count - left) % kPromoteStages == 0) {
        wgmma_wait<0>();
#pragma unroll
        for (int v = 0; v < Tile::kTokens / 2; ++v) sums[v] += partial[v];
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int v = 0; v < Tile::kTokens / 2; ++v) sums[v] += partial[v];
  }
};

}  // namespace fp4d
