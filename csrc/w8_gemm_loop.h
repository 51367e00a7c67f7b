// Main loop of many_tokens.h for e4m3 weights: both operands lie in shared memory, nothing is converted.
//
// FP8 wgmma keeps 13 bits of a sum. So every kPromoteStages stages the partial sums, which the first MMA has started
// from zero, are added to f32 ones. A warpgroup that adds has no MMA under way, so the two do it half an interval apart:
// one multiplies while the other adds.
#pragma once

#include "many_tokens_tile.h"
#include "w8_block_scales.h"

namespace fp4d {

template <class Tile>
struct Loop {
  static constexpr int T = Tile::kTokens, kMmas = 4;  // of a stage
  Params const& p;
  Place const& place;
  Ring<Tile> ring;
  int warpgroup, warp, lane;  // warp of the warpgroup
  Position<Tile> at = {};
  Releases releases = {};

  __device__ void start() { releases.start(p, place, ring, lane); }

  // Adds an item's stages to `sums`. `at_scales`: of the weight's block, at the item's first stage.
  __device__ void run(bool, int count, float (&sums)[T / 2], [[maybe_unused]] float const* at_scales) {
    if constexpr (Weights::kBlocks) {
      run_blocks(count, sums, at_scales);
    } else {
      run_promoted(count, sums);
    }
  }

  __device__ void multiply(float (&partial)[T / 2], int add) const {
    uint64_t const a = operand_b(ring.weights(at.slot, warpgroup)), b = operand_b(ring.tokens(at.slot));
    wgmma_fence();
    wgmma_e4m3<T>(partial, a, b, add);
#pragma unroll
    for (int j = 1; j < kMmas; ++j)
      wgmma_e4m3<T>(partial, a + j * kDescriptorStep, b + j * kDescriptorStep, 1);
    wgmma_commit();
  }

  // Every 128 k have scales of their own: one of the weights, and one a token, which lie in the stage. A stage is added while
  // the next one is multiplied, into the other of two sets of partial sums.
  __device__ void run_blocks(int count, float (&sums)[T / 2], float const* at_scales) {
    float even[T / 2], odd[T / 2];
#pragma unroll
    for (float& sum : odd) sum = 0.f;  // before the first stage
    uint32_t scales = ring.scales(at.slot), release = 0;
    float scale = 0.f;
    auto const add = [&](float const(&partial)[T / 2]) {
      add_scaled<T>(scales, lane, scale, partial, sums);
      if (release != 0 && releases.mine != 0) barrier_arrive_in(release);
    };
    auto const step = [&](float (&now)[T / 2], float const(&before)[T / 2], int i) {
      float const next = __ldg(at_scales + i);
      barrier_wait(ring.full(at.slot), at.parity);
      multiply(now, 0);
      wgmma_wait<1>();
      add(before);
      scales = ring.scales(at.slot), scale = next, release = releases.of(at.slot);
      at.advance();
    };
#pragma unroll 1
    for (int i = 0; i + 1 < count; i += 2) {
      step(even, odd, i);
      step(odd, even, i + 1);
    }
    if (count % 2 != 0) {
      step(even, odd, count - 1);
      wgmma_wait<0>();
      add(even);
    } else {
      wgmma_wait<0>();
      add(odd);
    }
  }

  __device__ void run_promoted(int count, float (&sums)[T / 2]) {
    float partial[T / 2];
#pragma unroll
    for (float& sum : partial) sum = 0.f;
    int phase = warpgroup * (Tile::kPromoteStages / 2);
    uint32_t release = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      barrier_wait(ring.full(at.slot), at.parity);
      multiply(partial, phase);
      wgmma_wait<1>();
      if (release != 0 && releases.mine != 0) barrier_arrive_in(release);
      release = releases.of(at.slot);
      at.advance();
      if (++phase == Tile::kPromoteStages) {
        phase = 0;
        wgmma_wait<0>();
        if (releases.mine != 0) barrier_arrive_in(release);
        release = 0;
#pragma unroll
        for (int v = 0; v < T / 2; ++v) sums[v] += partial[v];
      }
    }
    wgmma_wait<0>();
    if (release != 0 && releases.mine != 0) barrier_arrive_in(release);
    if (phase != 0) {
#pragma unroll
      for (int v = 0; v < T / 2; ++v) sums[v] += partial[v];
    }
  }
};

}  // namespace fp4d
