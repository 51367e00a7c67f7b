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
    uint32_t const tokens = ring.tokens(at.slot);
    uint64_t const a = operand_b(Weights::kTokensAreA ? tokens + warpgroup * (64 * 128)
                                                      : ring.weights(at.slot, warpgroup)),
                   b = operand_b(Weights::kTokensAreA ? ring.weights(at.slot, 0) : tokens);
    wgmma_fence();
    wgmma_e4m3<T>(partial, a, b, add);
#pragma unroll
    for (int j = 1; j < kMmas; ++j)
      wgmma_e4m3<T>(partial, a + j * kDescriptorStep, b + j * kDescriptorStep, 1);
    wgmma_commit();
  }

  // Every 128 k have scales of their own: one of the weights, and one a token, which lies in the stage. Tokens are rows of
  // operand A, so a lane has two of them and the rest is one FFMA a sum. These do not hide behind MMAs, which read and write
  // the same registers: a second set of partial sums, added while the next stage is multiplied, is 3 to 6 % slower, and so is
  // waiting for the next stage before them (H200, bench/NOTES.md).
  __device__ void run_blocks(int count, float (&sums)[T / 2], float const* at_scales) {
    static_assert(!Weights::kBlocks || (Weights::kTokensAreA && T == Tile::kRows));
    uint32_t const token = (warpgroup * 64 + warp * 16 + lane / 4) * 4;
    float partial[T / 2];
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      float const scale = __ldg(at_scales + i);
      barrier_wait(ring.full(at.slot), at.parity);
      multiply(partial, 0);
      uint32_t const scales = ring.scales(at.slot) + token;
      float const first = __uint_as_float(load_4(scales)) * scale,
                  second = __uint_as_float(load_4(scales + 8 * 4)) * scale;
      wgmma_wait<0>();
      if (releases.mine != 0) barrier_arrive_in(releases.of(at.slot));
      at.advance();
#pragma unroll
      for (int v = 0; v < T / 2; ++v) sums[v] = fmaf(partial[v], v % 4 < 2 ? first : second, sums[v]);
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
