// How the producers of many_tokens/kernel.h bring 16-bit activations as they are: boxes of 64 k, which TMA swizzles as
// wgmma reads them. Tokens and k that are not there come as zeros.
#pragma once

#include "many_tokens/tile.h"

namespace fp4d {

constexpr int kBoxK = 128 / sizeof(Out);

// This CTA's share of the activations, to all that have the same tokens; each expects all of them.
template <class Tile>
struct RowsCopies {
  Params<typename Tile::Weights> const& p;
  Place const& place;
  Ring<Tile> ring;
  int token = 0, skip = 0;  // bytes before this CTA's share of a stage

  __device__ void start(Corner corner, int) {
    int const first = place.multicast * (Tile::kTokens >> p.multicast_log2);
    token = corner.token + first, skip = first * 128;
  }
  __device__ void copy(int stage, int slot) {
    uint32_t const full = ring.full(slot), to = ring.tokens(slot) + skip;
    barrier_arrive_expect(full, Tile::kTokenBytes);
    if (p.multicast_log2 == 0) {
      copy_box_kept(to, &p.x, stage * kBoxK, token, full);
    } else {
      uint32_t const ctas = place.all_with_multicast(p);
      copy_box_kept_multicast(to, &p.x, stage * kBoxK, token, full, ctas);
    }
  }
};

}  // namespace fp4d
