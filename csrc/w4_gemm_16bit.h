// Main loop of many_tokens.h for 16-bit activations.
//
// Registers of operand A are double-buffered by groups of two MMAs: while those of group i run, the words of group i + 1 are
// dequantised into the registers that group i - 1 has finished with, half of them between the two MMAs: one after the
// other left the tensor cores idle (10 % of time at 256 tokens a tile, H200).
#pragma once

#include "many_tokens_tile.h"

namespace fp4d {

// Half of operand A of the two MMAs of a group: rows r from word A of a lane's chunk (group 1: C), or rows r + 8 from word
// B (D), and their scale, of the chunk's two.
template <int group, int half>
__device__ __forceinline__ void dequantize(uint4 codes, uint32_t scales, uint32_t (&a)[2][4]) {
  using D = w4::Dequant<Out>;
  typename D::Pair const scale = w4::unit_scales<Out>(scales, 0);
  uint32_t const word = half ? (group ? codes.w : codes.y) : (group ? codes.z : codes.x);
  uint32_t pairs[4];
  w4::dequantize<Out>(word, half ? D::high(scale) : D::low(scale), pairs);
#pragma unroll
  for (int s = 0; s < 2; ++s) a[s][half] = pairs[2 * s], a[s][half + 2] = pairs[2 * s + 1];
}

template <class Tile>
struct Loop {
  static constexpr int T = Tile::kTokens;
  Params const& p;
  Place const& place;
  Ring<Tile> ring;
  int warpgroup, warp, lane;  // warp of the warpgroup
  Position<Tile> at = {};

  Releases releases = {};

  __device__ void start() { releases.start(p, place, ring, lane); }

  // This warp is done with a slot.
  __device__ void release(int slot) const {
    if (releases.mine != 0) barrier_arrive_in(releases.of(slot));
  }

  __device__ static void multiply(float (&sums)[T / 2], uint32_t const (&a)[4], uint64_t b) {
    wgmma_fence();
    wgmma<Weights::kOperand, T>(sums, a, b);
    wgmma_commit();
  }

  __device__ void load(int slot, uint4& codes, uint32_t& scales) const {
    uint32_t const chunk = ring.weights(slot, warpgroup);
    codes = load_16(chunk + warp * w4::kUnitBytes + lane * 16);
    scales = load_2(chunk + w4::kScaleOffset + lane * 8 + warp * 2);
  }

  // Adds an item's stages to `sums`.
  __device__ void run(bool, int count, float (&sums)[T / 2], float const*) {
    uint32_t even[2][4], odd[2][4], scales;  // groups 0 and 1 of a stage
    uint4 codes;
    barrier_wait(ring.full(at.slot), at.parity);
    load(at.slot, codes, scales);
    dequantize<0, 0>(codes, scales, even);
    dequantize<0, 1>(codes, scales, even);
    Position<Tile> previous = at;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      uint64_t const b = operand_b(ring.tokens(at.slot));
      multiply(sums, even[0], b);
      wgmma_wait<1>();
      if (i > 0) release(previous.slot);
      dequantize<1, 0>(codes, scales, odd);
      multiply(sums, even[1], b + kDescriptorStep);
      dequantize<1, 1>(codes, scales, odd);
      multiply(sums, odd[0], b + 2 * kDescriptorStep);
      // After the last stage the same one again, for nothing: no branch around registers that a wgmma reads.
      Position<Tile> next = at;
      next.advance();
      bool const last = i + 1 == count;
      int const slot = last ? at.slot : next.slot;
      barrier_wait(ring.full(slot), last ? at.parity : next.parity);
      load(slot, codes, scales);
      wgmma_wait<1>();
      dequantize<0, 0>(codes, scales, even);
      multiply(sums, odd[1], b + 3 * kDescriptorStep);
      dequantize<0, 1>(codes, scales, even);
      previous = at;
      at = next;
    }
    wgmma_wait<0>();
    release(previous.slot);
  }
};

}  // namespace fp4d
