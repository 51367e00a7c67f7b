// Main loop of w4_gemm_sm90.h for 16-bit activations.
//
// Registers of operand A are double-buffered by groups of two MMAs: while group i runs, the words of group i + 1 are
// dequantised into the registers that group i - 1 has finished with. So a warpgroup waits for group i - 1 right after it
// has started group i, never for the newest.
#pragma once

#include "w4_gemm_tile.h"

namespace fp4d {

// Operand A of the two MMAs of a group from words A and B of a lane's chunk, or C and D, and its two scales.
template <int group>
__device__ __forceinline__ void dequantize(uint4 codes, uint32_t scales, uint32_t (&a)[2][4]) {
  using D = w4::Dequant<Out>;
  typename D::Pair const scale = w4::unit_scales<Out>(scales, 0);
  uint32_t upper[4], lower[4];
  w4::dequantize<Out>(group ? codes.z : codes.x, D::low(scale), upper);
  w4::dequantize<Out>(group ? codes.w : codes.y, D::high(scale), lower);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    a[s][0] = upper[2 * s], a[s][1] = lower[2 * s], a[s][2] = upper[2 * s + 1], a[s][3] = lower[2 * s + 1];
  }
}

template <class Tile>
struct Loop16 {
  static constexpr int T = Tile::kTokens;
  Params const& p;
  Place const& place;
  Ring<Tile> ring;
  int warpgroup, warp, lane;  // warp of the warpgroup
  Position<Tile> at = {};

  __device__ void start() {}

  // This warp is done with a slot.
  __device__ void release(int slot) const {
    if (p.multicast_log2 == 0) {
      if (lane == 0) barrier_arrive(ring.empty(slot));
    } else if (lane < 1 << p.multicast_log2) {
      barrier_arrive_in(address_in(ring.empty(slot), place.with_multicast(p, lane)));
    }
  }

  __device__ static void multiply(float (&sums)[T / 2], uint32_t const (&a)[2][4], uint64_t b) {
    wgmma_fence();
    wgmma<kOperand, T>(sums, a[0], b);
    wgmma<kOperand, T>(sums, a[1], b + kDescriptorStep);
    wgmma_commit();
  }

  __device__ void load(int slot, uint4& codes, uint32_t& scales) const {
    uint32_t const chunk = ring.weights(slot, warpgroup);
    codes = load_16(chunk + warp * w4::kUnitBytes + lane * 16);
    scales = load_2(chunk + w4::kScaleOffset + lane * 8 + warp * 2);
  }

  // Adds a tile's stages to `sums`.
  __device__ void run(bool, float (&sums)[T / 2]) {
    uint32_t even[2][4], odd[2][4], scales;  // groups 0 and 1 of a stage
    uint4 codes;
    barrier_wait(ring.full(at.slot), at.parity);
    load(at.slot, codes, scales);
    dequantize<0>(codes, scales, even);
    Position<Tile> previous = at;
#pragma unroll 1
    for (int i = 0; i < place.count; ++i) {
      uint64_t const b = operand_b(ring.tokens(at.slot));
      multiply(sums, even, b);
      wgmma_wait<1>();
      if (i > 0) release(previous.slot);
      dequantize<1>(codes, scales, odd);
      multiply(sums, odd, b + 2 * kDescriptorStep);
      // After the last stage the same one again, for nothing: no branch around registers that a wgmma reads.
      Position<Tile> next = at;
      next.advance();
      bool const last = i + 1 == place.count;
      int const slot = last ? at.slot : next.slot;
      barrier_wait(ring.full(slot), last ? at.parity : next.parity);
      load(slot, codes, scales);
      wgmma_wait<1>();
      dequantize<0>(codes, scales, even);
      previous = at;
      at = next;
    }
    wgmma_wait<0>();
    release(previous.slot);
  }
};

}  // namespace fp4d
