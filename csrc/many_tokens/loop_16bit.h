// Main loop of many_tokens/kernel.h for 16-bit activations, k in their own order.
//
// A stage is four MMAs, each with its registers of operand A. While two of them run, the blocks of the two after them
// are dequantised into the registers of the two before, a block between any two MMAs: an instruction beside MMAs costs
// 1 to 2 clocks, and two blocks in a row leave the tensor cores idle (bench/notes/many-tokens.md). With more MMAs under
// way ptxas makes them wait for each other (C7513).
//
// What a lane takes of a stage says `Weights::Blocks`: `enter` it, `load` block i, `dequantize` that. `first` is the
// address in shared memory of the warpgroup's weights in the first slot, `slot` the bytes from there to the slot at hand.
#pragma once

#include "many_tokens/tile.h"

namespace fp4d {

template <class Tile>
struct Loop16Bit {
  using Weights = typename Tile::Weights;
  using Blocks = typename Weights::Blocks;
  using Block = typename Blocks::Block;
  static constexpr int T = Tile::kTokens;
  Params<typename Tile::Weights> const& p;
  Place const& place;
  Ring<Tile> ring;
  int warpgroup, warp, lane;  // warp of the warpgroup
  Offsets<Tile> at = {};
  Releases releases = {};
  Blocks blocks{lane};

  __device__ void start() {
    releases.start(p, place, ring, lane);
    blocks.start(warp, lane);
  }

  // Of the first slot.
  __device__ uint32_t weights() const { return ring.weights(0, warpgroup); }

  // This warp is done with the slot of a barrier.
  __device__ void release(uint32_t barrier) const {
    if (releases.mine != 0) barrier_arrive_in(releases.empty_at + barrier);
  }

  __device__ static void multiply(float (&sums)[T / 2], uint32_t const (&operand)[4], uint64_t b) {
    wgmma_fence();
    wgmma<Weights::kOperand, T>(sums, operand, b);
    wgmma_commit();
  }

  // Adds an item's stages to `sums`.
  __device__ void run(bool, int count, float (&sums)[T / 2], float const*) {
    uint32_t a[4][4];  // of a stage's MMAs, of which the first two are dequantised
    barrier_wait(ring.full(0) + at.barrier, at.parity);
    blocks.enter(weights(), at.slot);
    Block first = blocks.load(weights(), at.slot, 0), second = blocks.load(weights(), at.slot, 1);
    blocks.dequantize(first, a[0]);
    blocks.dequantize(second, a[1]);
    first = blocks.load(weights(), at.slot, 2), second = blocks.load(weights(), at.slot, 3);
    uint32_t previous = 0;
    int left = count;
#pragma unroll 1
    while (true) {
      uint64_t const b = operand_b(ring.base + at.slot);
      multiply(sums, a[0], b);
      wgmma_wait<1>();
      if (left != count) release(previous);
      blocks.dequantize(first, a[2]);
      multiply(sums, a[1], b + kDescriptorStep);
      previous = at.barrier;
      blocks.dequantize(second, a[3]);
      --left;
      at.advance();
      if (left == 0) {
        multiply(sums, a[2], b + 2 * kDescriptorStep);
        multiply(sums, a[3], b + 3 * kDescriptorStep);
        break;
      }
      barrier_wait(ring.full(0) + at.barrier, at.parity);
      blocks.enter(weights(), at.slot);
      first = blocks.load(weights(), at.slot, 0), second = blocks.load(weights(), at.slot, 1);
      multiply(sums, a[2], b + 2 * kDescriptorStep);
      wgmma_wait<1>();
      blocks.dequantize(first, a[0]);
      multiply(sums, a[3], b + 3 * kDescriptorStep);
      blocks.dequantize(second, a[1]);
      first = blocks.load(weights(), at.slot, 2), second = blocks.load(weights(), at.slot, 3);
    }
    wgmma_wait<0>();
    release(previous);
  }
};

}  // namespace fp4d
