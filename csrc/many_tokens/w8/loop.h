// Main loop of many_tokens/kernel.h for e4m3 weights: both operands lie in shared memory, nothing is converted.
//
// FP8 wgmma keeps 13 bits of a sum. So every kPromoteStages stages the partial sums, which the first MMA has started
// from zero, are added to f32 ones. A warpgroup that adds has no MMA under way, so the two do it half an interval apart:
// one multiplies while the other adds.
#pragma once

#include "many_tokens/tile.h"

namespace fp4d {

template <class Tile>
struct W8Loop {
  using Weights = typename Tile::Weights;
  static constexpr int T = Tile::kTokens, kMmas = 4;  // of a stage
  Params<typename Tile::Weights> const& p;
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

  __device__ void multiply(float (&partial)[T / 2], uint64_t a, uint64_t b, int add) const {
    wgmma_fence();
    wgmma_e4m3<T>(partial, a, b, add);
#pragma unroll
    for (int j = 1; j < kMmas; ++j)
      wgmma_e4m3<T>(partial, a + j * kDescriptorStep, b + j * kDescriptorStep, 1);
    wgmma_commit();
  }

  // Every 128 k have scales of their own: one of the weights, and one a token, which lies in the stage. Tokens are rows
  // of operand A, so a lane has two of them and the rest is one FFMA a sum. These do not hide behind MMAs, which read
  // and write the same registers, so all else must: a stage's MMAs go out one after the other, without a load or a wait
  // between them, and meanwhile the next stage's barrier is asked and its scale of the weights fetched.
  __device__ void run_blocks(int count, float (&sums)[T / 2], float const* at_scales) {
    static_assert(!Weights::kBlocks || (Weights::kTokensAreA && T == Tile::kRows));
    constexpr uint64_t kHigh = kOperandB >> 32 << 32;
    uint32_t const scales_at = ring.scales(0) + (warpgroup * 64 + warp * 16 + lane / 4) * 4;
    float partial[T / 2];
    bool ready = false;  // the stage at hand, without a wait
    int done = 0;
#pragma unroll 1
    do {  // a lane holds one of 32 scales of the weights
      float const held = __ldg(at_scales + min(done + lane, count - 1));
      int const end = min(done + 32, count);
      float scale = __shfl_sync(~0u, held, 0);
#pragma unroll 1
      do {
        if (!ready) barrier_wait(ring.full(at.slot), at.parity);
        uint32_t const scales = scales_at + at.slot * Tile::kStageBytes;
        float first = __uint_as_float(load_4(scales)), second = __uint_as_float(load_4(scales + 8 * 4));
        // By addition: from each address anew they are four more instructions before the MMAs.
        uint32_t const stage = uint32_t(operand_b(ring.base)) + at.slot * (Tile::kStageBytes >> 4);
        multiply(partial, kHigh | (stage + warpgroup * (64 * 128 >> 4)),
                 kHigh | (stage + (Tile::kTokenBytes >> 4)), 0);
        first *= scale, second *= scale;
        uint32_t const release = releases.of(at.slot);
        at.advance();
        // Where no stage follows the question would be answered after microseconds.
        ready = ++done < count && barrier_done(ring.full(at.slot), at.parity);
        scale = __shfl_sync(~0u, held, done & 31);
        wgmma_wait<0>();
        if (releases.mine != 0) barrier_arrive_in(release);
#pragma unroll
        for (int v = 0; v < T / 2; ++v) {
          float& sum = sums[v ^ kOtherBank];
          sum = fmaf(partial[v], v % 4 < 2 ? first : second, sum);
        }
      } while (done < end);
    } while (done < count);
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
      multiply(partial, operand_b(ring.weights(at.slot, warpgroup)), operand_b(ring.tokens(at.slot)), phase);
      wgmma_wait<1>();
      if (release != 0 && releases.mine != 0) barrier_arrive_in(release);
      release = releases.of(at.slot);
      at.advance();
      if (++phase == Tile::kPromoteStages) {
        phase = 0;
        wgmma_wait<0>();
        if (releases.mine != 0) barrier_arrive_in(release);
        release = 0;
        add(partial, sums);
      }
    }
    wgmma_wait<0>();
    if (release != 0 && releases.mine != 0) barrier_arrive_in(release);
    if (phase != 0) add(partial, sums);
  }
};

}  // namespace fp4d
