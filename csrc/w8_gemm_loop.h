// Main loop of many_tokens.h for e4m3 weights: both operands lie in shared memory, nothing is converted.
//
// FP8 wgmma keeps 13 bits of a sum. So every kPromoteStages stages the partial sums, which the first MMA has started
// from zero, are added to f32 ones. A warpgroup that adds has no MMA under way, so the two do it half an interval apart:
// one multiplies while the other adds.
#pragma once

#include "many_tokens_tile.h"

namespace fp4d {

template <class Tile>
struct Loop {
  static constexpr int T = Tile::kTokens, kMmas = 4;  // of a stage
  Params const& p;
  Place const& place;
  Ring<Tile> ring;
  int warpgroup, warp, lane;  // warp of the warpgroup
  Position<Tile> at = {};
  uint32_t empty_at = 0, releases = 0;

  __device__ void start() {
    releases = lane < Place::sources(p);
    empty_at = address_in(ring.empty(0), place.source(p, releases != 0 ? lane : 0));
  }

  // Adds an item's stages to `sums`.
  __device__ void run(bool, int count, float (&sums)[T / 2]) {
    float partial[T / 2];
#pragma unroll
    for (float& sum : partial) sum = 0.f;
    int phase = warpgroup * (Tile::kPromoteStages / 2);
    uint32_t release = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      barrier_wait(ring.full(at.slot), at.parity);
      uint64_t const a = operand_b(ring.weights(at.slot, warpgroup)), b = operand_b(ring.tokens(at.slot));
      wgmma_fence();
      wgmma_e4m3<T>(partial, a, b, phase);
#pragma unroll
      for (int j = 1; j < kMmas; ++j)
        wgmma_e4m3<T>(partial, a + j * kDescriptorStep, b + j * kDescriptorStep, 1);
      wgmma_commit();
      wgmma_wait<1>();
      if (release != 0 && releases != 0) barrier_arrive_in(release);
      release = empty_at + at.slot * 16;
      at.advance();
      if (++phase == Tile::kPromoteStages) {
        phase = 0;
        wgmma_wait<0>();
        if (releases != 0) barrier_arrive_in(release);
        release = 0;
#pragma unroll
        for (int v = 0; v < T / 2; ++v) sums[v] += partial[v];
      }
    }
    wgmma_wait<0>();
    if (release != 0 && releases != 0) barrier_arrive_in(release);
    if (phase != 0) {
#pragma unroll
      for (int v = 0; v < T / 2; ++v) sums[v] += partial[v];
    }
  }
};

}  // namespace fp4d
