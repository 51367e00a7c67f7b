// How the producers of many_tokens/kernel.h bring e4m3 activations, packed by packed_activations.cu.
#pragma once

#include "many_tokens/tile.h"

namespace fp4d {

// This CTA's share of the activations, to all that have the same tokens; each expects all of them.
template <class Tile>
struct PackedCopies {
  using Weights = typename Tile::Weights;
  Params<typename Tile::Weights> const& p;
  Place const& place;
  Ring<Tile> ring;
  uint8_t const* from = nullptr;
  float const* scales = nullptr;         // in blocks
  uint32_t all = 0, mine = 0, skip = 0;  // bytes of tokens

  __device__ void start(Corner corner, int stage) {
    int const tokens = max(0, min(Tile::kTokens, p.token_blocks * 8 - corner.token));
    int const share = Tile::kTokens >> p.multicast_log2;
    all = tokens * 128, skip = place.multicast * share * 128;
    mine = max(0, min(share, tokens - place.multicast * share)) * 128;
    from = p.x + (int64_t(stage) * p.token_blocks * 8 + corner.token) * 128 + skip;
    if constexpr (Weights::kBlocks)
      scales = p.x_scale + int64_t(stage) * p.token_blocks * 8 + corner.token + skip / 128;
  }
  __device__ void copy(int, int slot) {
    uint32_t const full = ring.full(slot);
    barrier_arrive_expect(full, all + (Weights::kBlocks ? all / 32 : 0));
    if (mine > 0) {
      send(ring.tokens(slot) + skip, from, mine, full);
      if constexpr (Weights::kBlocks)
        send(ring.scales(slot) + skip / 32, reinterpret_cast<uint8_t const*>(scales), mine / 32, full);
    }
    from += int64_t(p.token_blocks) * 1024;
    if constexpr (Weights::kBlocks) scales += p.token_blocks * 8;
  }
  __device__ void send(uint32_t to, uint8_t const* what, uint32_t bytes, uint32_t full) const {
    if (p.multicast_log2 == 0) {
      copy_bulk(to, what, bytes, full);
    } else {
      copy_bulk_multicast(to, what, bytes, full, place.all_with_multicast(p));
    }
  }
};

}  // namespace fp4d
