// Consumers of w8a8_small.cu: the four warps of a row block multiply together by FP8 wgmma, both operands from shared
// memory.
#pragma once

#include "few_tokens/tile.h"
#include "common/scale_block.h"
#include "common/sm90.h"
#include "common/wgmma.h"
#include "few_tokens/w8/block_scales.h"

namespace fp4d {

// FP8 wgmma keeps 13 bits of a sum, so every 256 k the partial sums, which the first MMA has started from zero, are added
// to f32 ones (many_tokens/kernel.h).
struct W8A8Wgmma {
  static constexpr int kPromoteStages = 2;

  template <class Tile>
  __device__ __forceinline__ static void consume(Params<typename Tile::Weights> const& p, Ring<Tile> ring,
                                                 Range range, uint32_t, int warp, int lane,
                                                 Sums<Tile>& sums) {
    using Weights = typename Tile::Weights;
    uint64_t const rows = operand_b(ring.weights(0, warp / Tile::kBlockWarps)),
                   tokens = operand_b(ring.tokens(0));
    uint32_t const last = ring.full(ring.stages);
    uint32_t full = ring.full(0), parity = 0, offset = 0, release = 0;
    Sums<Tile> partial = {};
    int phase = 0;
    int const row_block = blockIdx.z * Tile::kRowBlocks + warp / Tile::kBlockWarps;
    [[maybe_unused]] float const* const at =
        p.alpha + int64_t(row_block * Weights::kRows / kScaleBlock) * p.chunks + range.first;
    [[maybe_unused]] float scale = Weights::kBlocks && range.count > 0 ? __ldg(at) : 0.f;
#pragma unroll 1
    for (int i = 0; i < range.count; ++i) {
      barrier_wait(full, parity);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < Tile::kStageK / 32; ++s) {
        uint64_t const at_k = offset + s * kDescriptorStep;
        wgmma_e4m3<Tile::kTokens>(partial, rows + at_k, tokens + at_k, s == 0 ? phase : 1);
      }
      wgmma_commit();
      if constexpr (Weights::kBlocks) {
        // The stage before: its MMAs have ended, and its scales are in registers, since the MMAs above overwrite the
        // partial sums that were multiplied by them. Behind loads that are still under way it would come too early.
        if (release != 0 && lane == 0) barrier_arrive(release);
        float const next = __ldg(at + min(i + 1, range.count - 1));
        wgmma_wait<0>();
        add_scaled<Tile::kTokens>(ring.scales(0) + offset * 16, lane, scale, partial, sums);
        scale = next;
      } else {
        wgmma_wait<1>();
        if (release != 0 && lane == 0) barrier_arrive(release);  // of the stage before
        if (++phase == kPromoteStages) {
          phase = 0;
          wgmma_wait<0>();
#pragma unroll
          for (int v = 0; v < Tile::kTokens / 2; ++v) sums[v] += partial[v];
        }
      }
      release = full + 8;
      offset += Tile::kStageBytes / 16, full += 16;
      if (full == last) full = ring.full(0), parity ^= 1, offset = 0;
    }
    wgmma_wait<0>();
    if (phase == 0) return;
#pragma unroll
    for (int v = 0; v < Tile::kTokens / 2; ++v) sums[v] += partial[v];
  }
};

}  // namespace fp4d
