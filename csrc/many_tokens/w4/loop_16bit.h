// Main loop of many_tokens/kernel.h for 16-bit activations, k in their own order.
//
// Registers of operand A are double-buffered by groups of two MMAs: while those of group i run, the blocks of group i +
// 1 are dequantised into the registers that group i - 1 has finished with. More groups under way, and ptxas makes them
// wait for each other (C7513).
#pragma once

#include "many_tokens/tile.h"
#include "weights/w4_columns.h"

namespace fp4d {

template <class Tile>
struct W4Loop16Bit {
  using Weights = typename Tile::Weights;
  static constexpr int T = Tile::kTokens;
  Params<typename Tile::Weights> const& p;
  Place const& place;
  Ring<Tile> ring;
  int warpgroup, warp, lane;  // warp of the warpgroup
  Position<Tile> at = {};

  Releases releases = {};
  w4::Columns<Out> columns{lane};
  uint32_t words = 0, scales = 0;  // in a stage's weights: of the quad's first lane, of this lane

  __device__ void start() {
    releases.start(p, place, ring, lane);
    words = warp * w4::kUnitBytes + lane / 4 * 4 * 16, scales = w4::kScaleOffset + lane * 8 + warp * 2;
  }

  // This warp is done with a slot.
  __device__ void release(int slot) const {
    if (releases.mine != 0) barrier_arrive_in(releases.of(slot));
  }

  // A group: two blocks, from `b` on.
  __device__ static void multiply(float (&sums)[T / 2], uint32_t const (&a)[2][4], uint64_t b) {
    wgmma_fence();
    wgmma<Weights::kOperand, T>(sums, a[0], b);
    wgmma<Weights::kOperand, T>(sums, a[1], b + kDescriptorStep);
    wgmma_commit();
  }

  // Scales of this lane's block of a stage.
  __device__ uint32_t load_scales(int slot) const {
    auto const pair = w4::unit_scales<Out>(load_2(ring.weights(slot, warpgroup) + scales), 0);
    return reinterpret_cast<uint32_t const&>(pair);
  }
  __device__ w4::Block load(int slot, uint32_t own_scales, int block) const {
    return {load_16(ring.weights(slot, warpgroup) + words + block * 16),
            __shfl_sync(~0u, own_scales, block, 4)};
  }

  // Adds an item's stages to `sums`.
  __device__ void run(bool, int count, float (&sums)[T / 2], float const*) {
    uint32_t even[2][4], odd[2][4];  // blocks 0 and 1 of a stage, and 2 and 3
    barrier_wait(ring.full(at.slot), at.parity);
    uint32_t own = load_scales(at.slot);
    w4::Block first = load(at.slot, own, 0), second = load(at.slot, own, 1);
    columns.dequantize(first, even[0]);
    columns.dequantize(second, even[1]);
    Position<Tile> previous = at;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      uint64_t const b = operand_b(ring.tokens(at.slot));
      first = load(at.slot, own, 2), second = load(at.slot, own, 3);
      multiply(sums, even, b);
      wgmma_wait<1>();
      if (i > 0) release(previous.slot);
      columns.dequantize(first, odd[0]);
      columns.dequantize(second, odd[1]);
      Position<Tile> next = at;
      next.advance();
      bool const last = i + 1 == count;
      int const slot = last ? at.slot : next.slot;
      barrier_wait(ring.full(slot), last ? at.parity : next.parity);
      own = load_scales(slot);
      first = load(slot, own, 0), second = load(slot, own, 1);
      multiply(sums, odd, b + 2 * kDescriptorStep);
      wgmma_wait<1>();
      columns.dequantize(first, even[0]);
      columns.dequantize(second, even[1]);
      previous = at;
      at = next;
    }
    wgmma_wait<0>();
    release(previous.slot);
  }
};

}  // namespace fp4d
