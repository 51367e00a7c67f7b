// Consumers of w4a16_small.cu that multiply by wgmma (sm_90a only): the four warps of a row block together, weights as
// operand A in registers, tokens, which TMA brings with k in their own order, as operand B.
#pragma once

#include "common/sm90.h"
#include "common/wgmma.h"
#include "few_tokens/element.h"
#include "few_tokens/tile.h"
#include "weights/w4_columns.h"

namespace fp4d {

// A group is two MMAs, 32 k; a stage has four. While the MMAs of one run, the next one is dequantised into the other
// registers of operand A, and what the one after that needs is loaded.
struct W4A16Wgmma {
  template <class Tile>
  __device__ __forceinline__ static void consume(Params<typename Tile::Weights> const&, Ring<Tile> ring,
                                                 Range range, uint32_t, int warp, int lane,
                                                 Sums<Tile>& sums) {
    constexpr int T = Tile::kTokens, kStageGroups = 2 * Tile::kStageChunks;
    constexpr Operand kOperand = FP4D_OUT == 0 ? Operand::kBF16 : Operand::kF16;
    if (range.count == 0) return;
    w4::Columns<Element> const columns(lane);
    uint32_t const unit = ring.weights(0, warp / Tile::kBlockWarps);
    uint32_t words = unit + warp % 4 * w4::kUnitBytes + lane / 4 * 4 * 16;  // of the quad's first lane
    uint32_t scales = unit + w4::kScaleOffset + lane * 8 + warp % 4 * 2;    // of this lane
    keep(words), keep(scales);
    uint32_t const last = ring.full(ring.stages);
    uint32_t full = ring.full(0), parity = 0, offset = 0, release = 0, own = 0;
    w4::Block blocks[2];
    // Of the stage at `offset`.
    auto const load = [&](int group) {
      uint32_t const chunk = offset + group / 2 * w4::kChunkBytes;
      if (group % 2 == 0) {
        auto const pair = w4::unit_scales<Element>(load_2(scales + chunk), 0);
        own = reinterpret_cast<uint32_t const&>(pair);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const block = group % 2 * 2 + i;
        blocks[i] = {load_16(words + chunk + block * 16), __shfl_sync(~0u, own, block, 4)};
      }
    };
    uint32_t a[2][2][4];
    barrier_wait(full, parity);
    load(0);
#pragma unroll 1
    for (int i = 0; i < range.count; ++i) {
      uint64_t const b = operand_b(ring.tokens(0) + offset);
      uint32_t const current = full;
#pragma unroll
      for (int group = 0; group < kStageGroups; ++group) {
        wgmma_wait<1>();
        if (group == 1 && release != 0 && lane == 0) barrier_arrive(release);  // of the stage before
        columns.dequantize(blocks[0], a[group % 2][0]);
        columns.dequantize(blocks[1], a[group % 2][1]);
        wgmma_fence();
        uint64_t const at = b + (group / 2 * T * 128 >> 4) + group % 2 * 2 * kDescriptorStep;
        wgmma<kOperand, T>(sums, a[group % 2][0], at);
        wgmma<kOperand, T>(sums, a[group % 2][1], at + kDescriptorStep);
        wgmma_commit();
        if (group + 1 < kStageGroups) {
          load(group + 1);
        } else {
          offset += Tile::kStageBytes, full += 16;
          if (full == last) full = ring.full(0), parity ^= 1, offset = 0;
          if (i + 1 < range.count) {
            barrier_wait(full, parity);
            load(0);
          }
        }
      }
      release = current + 8;
    }
    wgmma_wait<0>();
  }
};

}  // namespace fp4d
