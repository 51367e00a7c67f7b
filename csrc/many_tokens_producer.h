// Producers of many_tokens.h: one thread for the activations, two for the weights.
#pragma once

#include "many_tokens_tile.h"
#include FP4D_WEIGHT_COPIES

namespace fp4d {

// This CTA's share of the activations, to all that have the same tokens; each expects all of them.
template <class Tile>
struct TokenCopies {
  Params const& p;
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
      uint32_t const ctas = (1 << (1 << p.multicast_log2)) - 1;
      copy_bulk_multicast(to, what, bytes, full, ctas << place.with_multicast(p, 0));
    }
  }
};

// Where a copying thread is: in the ring, in its CTA's items, in the stages of one.
template <class Tile>
struct Cursor {
  Position<Tile> at = {};
  int done = 0, item = 0, stage = 0,
      left = 0;  // stages over all items; the next item; the next stage, how many are left
};

// Goes on until `to` stages are done.
template <class Tile, class Copies>
__device__ __forceinline__ void copy_stages(Copies& copies, Cursor<Tile>& cursor, int to) {
#pragma unroll 1
  for (; cursor.done < to; ++cursor.done) {
    if (cursor.left == 0) {
      Item const item = item_of<Tile>(copies.p, copies.place, cursor.item++);
      cursor.stage = item.first, cursor.left = item.count;
      copies.start(item.corner, item.first);
    }
    if (cursor.done >= Tile::kStages) barrier_wait(copies.ring.empty(cursor.at.slot), cursor.at.parity ^ 1);
    copies.copy(cursor.stage, cursor.at.slot);
    cursor.at.advance();
    ++cursor.stage, --cursor.left;
  }
}

// One thread of each producer warp: the first copies activations.
template <class Tile>
__device__ __forceinline__ void produce(Params const& p, Place const& place, Ring<Tile> ring, int warp,
                                        bool clustered) {
  int const all = place.stages(p), ahead = min(all, Tile::kStages);
  Cursor<Tile> cursor;
  if (warp == 0) {
    if (clustered) cluster_wait_acquire();
    grid_dependency_wait();
    TokenCopies<Tile> tokens{p, place, ring};
    copy_stages<Tile>(tokens, cursor, all);
  } else {
    WeightCopies<Tile> weights{p, place, ring, (warp - 1) * WeightCopies<Tile>::kWarpgroups};
    bool const copies = warp <= kWeightThreads, to_others = p.sharing_log2 > 0;
    if (to_others) cluster_wait_acquire();
    copy_stages<Tile>(weights, cursor, copies ? ahead : 0);  // before the previous grid has finished
    if (clustered && !to_others) cluster_wait_acquire();
    grid_dependency_wait();
    copy_stages<Tile>(weights, cursor, copies ? all : 0);
  }
}

}  // namespace fp4d
